//! The status of the XMeshes of this controller (GEP-3949): that they are accepted, and the features
//! that the mesh supports. They configure nothing.

use std::convert::Infallible;

use diy_mesh_runtime::Backoff;
use kube::api::{ListParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tokio::time::{Duration, sleep};

use super::{Error, MAX_RETRY_INTERVAL, MIN_RETRY_INTERVAL, Writer, now, request};
use crate::routes::Condition;
use crate::routes::status::{CONTROLLER_NAME, condition};

/// Time between two reads. XMeshes change rarely, and clusters have few of them.
const INTERVAL: Duration = Duration::from_secs(30);

/// The features that docs/gateway-api.md lists as supported, in alphabetical order.
const FEATURES: &[&str] = &[
    "GRPCRoute",
    "GRPCRouteNamedRouteRule",
    "HTTPRoute",
    "HTTPRoute303RedirectStatusCode",
    "HTTPRoute307RedirectStatusCode",
    "HTTPRoute308RedirectStatusCode",
    "HTTPRouteBackendProtocolH2C",
    "HTTPRouteBackendProtocolWebSocket",
    "HTTPRouteBackendRequestHeaderModification",
    "HTTPRouteBackendTimeout",
    "HTTPRouteCORS",
    "HTTPRouteDestinationPortMatching",
    "HTTPRouteHostRewrite",
    "HTTPRouteMethodMatching",
    "HTTPRouteNamedRouteRule",
    "HTTPRouteParentRefPort",
    "HTTPRoutePathRedirect",
    "HTTPRoutePathRewrite",
    "HTTPRoutePortRedirect",
    "HTTPRouteQueryParamMatching",
    "HTTPRouteRequestMirror",
    "HTTPRouteRequestMultipleMirrors",
    "HTTPRouteRequestPercentageMirror",
    "HTTPRouteRequestTimeout",
    "HTTPRouteResponseHeaderModification",
    "HTTPRouteRetry",
    "HTTPRouteRetryBackendTimeout",
    "HTTPRouteRetryConnectionError",
    "HTTPRouteSchemeRedirect",
    "Mesh",
    "MeshClusterIPMatching",
    "MeshConsumerRoute",
    "MeshHTTPRouteBackendRequestHeaderModification",
    "MeshHTTPRouteNamedRouteRule",
    "MeshHTTPRouteQueryParamMatching",
    "MeshHTTPRouteRedirectPath",
    "MeshHTTPRouteRedirectPort",
    "MeshHTTPRouteRewritePath",
    "MeshHTTPRouteSchemeRedirect",
];

impl Writer {
    /// Writes the status of XMeshes, in clusters that have the kind. Never returns.
    pub(super) async fn write_mesh_status(&self) -> Infallible {
        let mut backoff = Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
        loop {
            let delay = match self.update_meshes().await {
                Err(error) if !error.is(404) => {
                    let delay = backoff.next_delay();
                    tracing::warn!(
                        "cannot write the status of XMeshes, retrying in {delay:?}: {error}"
                    );
                    delay
                }
                _ => {
                    backoff.reset();
                    INTERVAL
                }
            };
            sleep(delay).await;
        }
    }

    async fn update_meshes(&self) -> Result<(), Error> {
        let kind = GroupVersionKind::gvk("gateway.networking.x-k8s.io", "v1alpha1", "XMesh");
        let resource = ApiResource::from_gvk_with_plural(&kind, "xmeshes");
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
        for mut mesh in request(api.list(&ListParams::default())).await?.items {
            let Some(changed) = status(&mesh, &now()) else {
                continue;
            };
            mesh.data["status"] = changed;
            let (name, params) = (mesh.name_any(), PostParams::default());
            match request(api.replace_status(&name, &params, &mesh)).await {
                // Not deleted since it was read.
                Err(error) if !error.is(404) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// The status of an XMesh of this controller, unless it has it already.
fn status(mesh: &DynamicObject, now: &str) -> Option<Value> {
    let (spec, before) = (&mesh.data["spec"], &mesh.data["status"]);
    if spec["controllerName"] != CONTROLLER_NAME {
        return None;
    }
    let accepted = match spec["parametersRef"].is_null() {
        true => Condition::new("Accepted", true, "Accepted", String::new()),
        false => {
            let message = "spec.parametersRef: the mesh has no parameters, remove the reference";
            Condition::new("Accepted", false, "InvalidParameters", message.to_owned())
        }
    };
    let conditions = before["conditions"].as_array().into_iter().flatten();
    let (own, mut others): (Vec<&Value>, Vec<&Value>) =
        conditions.partition(|one| one["type"] == accepted.kind);
    let generation = mesh.metadata.generation.unwrap_or_default();
    let accepted = condition(&accepted, own.first().copied(), generation, now);
    others.insert(0, &accepted);
    let features = FEATURES.iter().map(|name| json!({"name": name}));
    let mut status = match before {
        Value::Object(_) => before.clone(),
        _ => json!({}),
    };
    status["conditions"] = json!(others);
    status["supportedFeatures"] = features.collect();
    (status != *before).then_some(status)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{calls_until_idle, writer};
    use super::*;
    use crate::routes::testing::ApiServer;

    const PATH: &str = "/apis/gateway.networking.x-k8s.io/v1alpha1/xmeshes";

    fn mesh(name: &str, controller: &str) -> Value {
        json!({
            "apiVersion": "gateway.networking.x-k8s.io/v1alpha1", "kind": "XMesh",
            "metadata": {"name": name, "generation": 3},
            "spec": {"controllerName": controller},
            "status": {"conditions": [
                {"type": "Accepted", "status": "Unknown", "reason": "Pending", "message": "",
                    "lastTransitionTime": "1970-01-01T00:00:00Z"},
                {"type": "example.net/X", "status": "True"},
            ]},
        })
    }

    #[tokio::test(start_paused = true)]
    async fn own_meshes_get_their_condition_and_features_once() {
        let server = ApiServer::default();
        let writer = writer(&server);
        let running = tokio::spawn(async move { writer.write_mesh_status().await });
        let list = format!("GET {PATH}");
        // Not installed.
        assert_eq!(calls_until_idle(&server).await[0], list);
        server.install(PATH);
        server.put(&format!("{PATH}/own"), mesh("own", CONTROLLER_NAME));
        server.put(&format!("{PATH}/other"), mesh("other", "example.net/mesh"));
        let mut with_parameters = mesh("parameters", CONTROLLER_NAME);
        with_parameters["spec"]["parametersRef"] = json!({"name": "x"});
        server.put(&format!("{PATH}/parameters"), with_parameters);
        let writes = calls_until_idle(&server).await.into_iter();
        let writes: Vec<String> = writes.filter(|call| *call != list).collect();
        let write = |name: &str| format!("PUT {PATH}/{name}/status");
        assert_eq!(writes, [write("own"), write("parameters")]);
        let status = |name: &str| server.get(&format!("{PATH}/{name}")).unwrap()["status"].clone();
        let own = status("own");
        let accepted = &own["conditions"][0];
        assert_eq!(
            (&accepted["type"], &accepted["status"], &accepted["reason"]),
            (&json!("Accepted"), &json!("True"), &json!("Accepted"))
        );
        assert_eq!(accepted["observedGeneration"], 3);
        assert_eq!(own["conditions"][1]["type"], "example.net/X");
        assert_eq!(own["supportedFeatures"][0]["name"], "GRPCRoute");
        let rejected = &status("parameters")["conditions"][0];
        assert_eq!(
            (&rejected["status"], &rejected["reason"]),
            (&json!("False"), &json!("InvalidParameters"))
        );
        assert_eq!(status("other"), mesh("other", "")["status"]);
        running.abort();
    }

    #[test]
    fn features_are_those_of_the_documentation() {
        let document = include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../docs/gateway-api.md"
        ));
        let supported = document.lines().filter_map(|line| {
            let (name, rest) = line.strip_prefix("| `")?.split_once('`')?;
            let is_name = name.starts_with(|first: char| first.is_ascii_uppercase());
            (is_name && rest.starts_with(" | supported")).then_some(name)
        });
        let mut supported: Vec<&str> = supported.collect();
        supported.sort_unstable();
        assert_eq!(FEATURES, supported);
    }
}
