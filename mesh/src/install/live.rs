//! The objects of an installation in a cluster.

use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::discovery::{self, Scope};
use kube::{Api, Client, ResourceExt};
use serde_json::Value;

use crate::cluster::describe_error;
use crate::routes::text;

/// The label of all objects of the mesh, and its value.
pub const LABEL: (&str, &str) = ("app.kubernetes.io/part-of", "diy-service-mesh");

/// Whether an object of a cluster is of the mesh: others may have its name.
pub fn is_of_mesh<K: ResourceExt>(object: &K) -> bool {
    let value = object.labels().get(LABEL.0);
    value.is_some_and(|value| value == LABEL.1)
}

/// `Kind namespace/name`, or `Kind name`.
pub fn title(object: &Value) -> String {
    let [kind, namespace, name] = [
        &object["kind"],
        &object["metadata"]["namespace"],
        &object["metadata"]["name"],
    ]
    .map(text);
    if namespace.is_empty() {
        format!("{kind} {name}")
    } else {
        format!("{kind} {namespace}/{name}")
    }
}

/// The API of the kind of an object, in its namespace.
pub async fn api(client: &Client, object: &Value) -> Result<Api<DynamicObject>, String> {
    let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
    let (group, version) = version.split_once('/').unwrap_or(("", &version));
    let kind = GroupVersionKind::gvk(group, version, &kind);
    let found = discovery::pinned_kind(client, &kind).await;
    let (resource, capabilities) = found.map_err(describe_error)?;
    Ok(match capabilities.scope {
        Scope::Cluster => Api::all_with(client.clone(), &resource),
        Scope::Namespaced => {
            let namespace = text(&object["metadata"]["namespace"]);
            Api::namespaced_with(client.clone(), &namespace, &resource)
        }
    })
}

/// Whether the API server would accept an object, in a dry run.
pub async fn dry_run(client: &Client, object: &Value) -> Result<(), String> {
    let api = api(client, object).await?;
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let params = PatchParams::apply("mesh-upgrade").force().dry_run();
    let applied = api.patch(name, &params, &Patch::Apply(object)).await;
    applied.map(drop).map_err(describe_error)
}
