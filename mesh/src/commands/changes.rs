//! `mesh changes`: lists what changed lately of the objects and pods that steer traffic. Changes
//! nothing.

use std::{collections::BTreeSet, fmt::Debug, time::Duration};

use anyhow::{Result, bail};
use clap::Args;
use diy_mesh_controller::catalog::resources;
use diy_mesh_controller::object::Kind;
use diy_mesh_injector::annotations::INJECT;
use futures::future::join_all;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Client, api::ListParams};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;

use crate::changes::{Change, of_object, of_pod};
use crate::cluster::{self, Cluster, dynamic, list, list_metadata, objects};
use crate::install::live::LABEL;
use crate::pods::{Pod, is_injected, workload};
use crate::terminal::{self, Colors, Output, TextStyle, plain, printable};
use crate::time::{format_duration, format_timestamp, now, parse_duration};

/// The arguments of `mesh changes`.
#[derive(Args, Debug)]
#[command(
    after_help = "Listed are Services, routes, policies and the other objects that the mesh reads; Deployments, \
    StatefulSets and DaemonSets of meshed pods and of the mesh; and meshed pods with the restarts of their containers. \
    BY names the field managers. Only the latest change by each manager is known, only \
    the latest restart of each container, and deleted objects are not seen.\n\n\
    Exit codes: 0 success, also if some kinds may not be listed, which are named; 2 error.\n\n\
    Examples:\n  mesh changes                     the changes of the last hour, newest first\n  \
    mesh changes -n shop --since 24h the changes in a namespace, and of the policies of the mesh\n  \
    mesh changes -o json | jq '.changes[] | select(.kind == \"AuthorizationPolicy\")'"
)]
pub struct Arguments {
    /// Time until now in which the changes were made
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = parse_duration)]
    since: Duration,
    #[command(flatten)]
    cluster: cluster::Arguments,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// The changes in a time.
#[derive(Debug, Serialize)]
struct Report {
    /// The start of the listed time, RFC 3339.
    since: String,
    /// The newest first.
    changes: Vec<Change>,
    /// The kinds that could not be listed.
    unread: Vec<Unread>,
}

/// A kind that could not be listed.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Unread {
    kind: &'static str,
    reason: String,
}

/// Lists the changes.
pub async fn run(arguments: &Arguments) -> Result<()> {
    let (cluster, output) = (&arguments.cluster, arguments.output);
    let client = Cluster::connect(cluster).await?.client;
    let (changes, unread) = read(&client, cluster).await;
    if let ([first, ..], true) = (&unread[..], changes.is_empty()) {
        bail!("failed to list {}: {}", first.kind, first.reason);
    }
    let since = now().saturating_sub(arguments.since.as_secs());
    let report = report(changes, unread, since);
    output.print(&report, |colors| text(&report, arguments.since, colors))
}

fn report(mut changes: Vec<Change>, unread: Vec<Unread>, since: u64) -> Report {
    changes.retain(|change| change.time >= since);
    changes.sort_by(|one, other| {
        let older = other.time.cmp(&one.time);
        older.then_with(|| (&one.kind, &one.object).cmp(&(&other.kind, &other.object)))
    });
    Report {
        since: format_timestamp(since),
        changes,
        unread,
    }
}

/// Reads the changes of a namespace, or of all, and of what is about all namespaces.
async fn read(client: &Client, of: &cluster::Arguments) -> (Vec<Change>, Vec<Unread>) {
    let only = of.namespace.as_deref();
    let pods = list::<Pod>(objects(client, only), &ListParams::default()).await;
    let meshed = pods.as_ref().ok().map(|pods| {
        let meshed = pods.iter().filter(|pod| is_injected(*pod));
        let name = |pod: &Pod| {
            let namespace = pod.metadata.namespace.clone();
            (namespace.unwrap_or_default(), workload(pod).to_owned())
        };
        meshed.map(name).collect::<BTreeSet<_>>()
    });
    let of_pods = pods.map(|pods| {
        let meshed = pods.iter().filter(|pod| is_injected(*pod));
        meshed.flat_map(of_pod).collect()
    });
    let is_meshed = |metadata: &ObjectMeta| {
        let name = [&metadata.namespace, &metadata.name].map(|one| one.clone().unwrap_or_default());
        let has_pods = meshed.as_ref().is_none_or(|all| all.contains(&name.into()));
        has_pods || has_settings(metadata)
    };
    let (deployments, stateful_sets, daemon_sets, others) = tokio::join!(
        of_workloads::<Deployment>(client, only, &is_meshed),
        of_workloads::<StatefulSet>(client, only, &is_meshed),
        of_workloads::<DaemonSet>(client, only, &is_meshed),
        join_all(kinds().map(|kind| of_kind(client, kind, of))),
    );
    let mut all = vec![
        ("Pod", of_pods),
        ("Deployment", deployments),
        ("StatefulSet", stateful_sets),
        ("DaemonSet", daemon_sets),
    ];
    all.extend(kinds().map(Kind::unique_name).zip(others));
    let (mut changes, mut unread) = (Vec::new(), Vec::new());
    for (kind, read) in all {
        match read {
            Ok(read) => changes.extend(read),
            Err(reason) => unread.push(Unread { kind, reason }),
        }
    }
    (changes, unread)
}

/// The kinds whose authors steer traffic.
fn kinds() -> impl Iterator<Item = Kind> {
    let is_written = |kind: &Kind| !matches!(kind, Kind::Slice | Kind::Pod | Kind::Node);
    Kind::ALL.into_iter().filter(is_written)
}

/// The changes of a kind, and of policies of the mesh.
async fn of_kind(
    client: &Client,
    kind: Kind,
    of: &cluster::Arguments,
) -> Result<Vec<Change>, String> {
    let mesh = &*of.mesh_namespace;
    let namespaces = match (kind, of.namespace.as_deref()) {
        (Kind::Mesh, _) | (_, None) => vec![None],
        (Kind::Authorization, Some(only)) if only != mesh => vec![Some(only), Some(mesh)],
        (_, only) => vec![only],
    };
    let mut all = Vec::new();
    for namespace in namespaces {
        for resource in resources(kind) {
            let api = dynamic(client, &resource, namespace);
            let items = list_metadata(api, &ListParams::default()).await?;
            let is_served = !items.is_empty();
            let changes = items
                .iter()
                .flat_map(|one| of_object(kind.unique_name(), one));
            all.extend(changes);
            if is_served {
                break;
            }
        }
    }
    Ok(all)
}

/// The changes of workloads of the mesh, and of those with meshed pods.
async fn of_workloads<K>(
    client: &Client,
    only: Option<&str>,
    is_meshed: impl Fn(&ObjectMeta) -> bool,
) -> Result<Vec<Change>, String>
where
    K: kube::Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    K: Clone + Debug + DeserializeOwned,
{
    let items = list_metadata(objects::<K>(client, only), &ListParams::default()).await?;
    let listed = items.iter().filter(|one| is_meshed(one));
    Ok(listed
        .flat_map(|one| of_object(&K::kind(&()), one))
        .collect())
}

/// Whether a workload is one of the mesh, or its field managers have set that its pods request
/// injection: it may have no pods.
fn has_settings(metadata: &ObjectMeta) -> bool {
    let label = metadata.labels.iter().flatten();
    let mut managed = metadata.managed_fields.iter().flatten();
    label
        .into_iter()
        .any(|(name, value)| (&**name, &**value) == LABEL)
        || managed.any(|entry| json!(entry.fields_v1).to_string().contains(INJECT))
}

fn text(report: &Report, since: Duration, colors: Colors) -> String {
    let mut rows = vec![terminal::headings([
        "TIME", "KIND", "OBJECT", "CHANGE", "BY",
    ])];
    rows.extend(report.changes.iter().map(|one| {
        let by = if one.by.is_empty() { "-" } else { &one.by };
        let time = format_timestamp(one.time);
        [&*time, &one.kind, &one.object, &one.change, by]
            .map(plain)
            .to_vec()
    }));
    let table = if report.changes.is_empty() {
        let since = format_duration(since.as_secs());
        format!("no change in the last {since}\n")
    } else {
        colors.table(&rows)
    };
    let unread = report.unread.iter().map(|one| {
        let line = format!("not listed: {}: {}", one.kind, one.reason);
        colors.paint(TextStyle::Warning, &printable(&line)) + "\n"
    });
    table + &unread.collect::<String>()
}

#[cfg(test)]
mod tests {
    use hyper::{Request, Response, header::ACCEPT, http};
    use kube::client::Body;
    use serde_json::Value;

    use super::*;

    fn object(name: &str, minute: u8, more: Value) -> Value {
        let mut metadata = json!({"name": name, "namespace": "shop",
            "creationTimestamp": format!("2026-11-30T09:{minute:02}:00Z")});
        let more = more.as_object().unwrap().clone();
        metadata.as_object_mut().unwrap().extend(more);
        json!({"metadata": metadata})
    }

    /// An API server whose user may list neither HTTPRoutes nor policies of the namespace of the mesh.
    /// It pages Services.
    async fn respond(request: Request<Body>) -> http::Result<Response<Body>> {
        let uri = request.uri().to_string();
        let accept = request.headers().get(ACCEPT);
        let accept = accept.and_then(|accept| accept.to_str().ok());
        let is_metadata =
            accept.is_some_and(|accept| accept.contains("as=PartialObjectMetadataList"));
        let path = request.uri().path();
        let (group, items, next) = match path.split("/namespaces/shop/").collect::<Vec<_>>()[..] {
            [group, "pods"] => {
                let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet",
                    "name": "web-7f9", "uid": "u", "controller": true});
                let injected = json!({"annotations": {"diy-service-mesh/status": "injected"},
                    "labels": {"pod-template-hash": "7f9"}, "ownerReferences": [owner]});
                let pods = [
                    object("web-7f9-x2x4z", 3, injected),
                    object("plain", 3, json!({})),
                ];
                (group, pods.to_vec(), "")
            }
            [group, "deployments"] => {
                let own = json!({"managedFields": [{"manager": "helm",
                    "time": "2026-11-30T09:02:00Z"}]});
                let all = [object("web", 2, own), object("other", 2, json!({}))];
                (group, all.to_vec(), "")
            }
            [group, "services"] if !uri.contains("continue=next") => {
                (group, vec![object("web", 1, json!({}))], "next")
            }
            [group, "services"] => (group, vec![object("api", 4, json!({}))], ""),
            [_, "httproutes"] | [_] if !path.ends_with("/xmeshes") => ("", vec![], ""),
            [group, ..] => (group, vec![], ""),
            [] => ("", vec![], ""),
        };
        assert!(is_metadata || path.ends_with("/pods"), "{uri}");
        let (code, body) = if group.is_empty() {
            let status = json!({"kind": "Status", "status": "Failure", "code": 403,
                "message": path, "reason": "Forbidden"});
            (403, status)
        } else {
            (200, json!({"metadata": {"continue": next}, "items": items}))
        };
        Response::builder()
            .status(code)
            .body(Body::from(body.to_string().into_bytes()))
    }

    #[tokio::test]
    async fn changes_are_listed_newest_first_and_kinds_without_permission_are_named() {
        let client = Client::new(tower::service_fn(respond), "default");
        let of = cluster::Arguments {
            mesh_namespace: "service-mesh".to_owned(),
            namespace: Some("shop".to_owned()),
            ..cluster::Arguments::default()
        };
        let (changes, unread) = read(&client, &of).await;
        let start = crate::time::parse_timestamp("2026-11-30T09:02:00Z").unwrap();
        let report = report(changes, unread, start);
        assert_eq!(
            text(&report, Duration::from_secs(3600), Colors::DISABLED),
            "\
TIME                  KIND        OBJECT              CHANGE   BY
2026-11-30T09:04:00Z  Service     shop/api            created  -
2026-11-30T09:03:00Z  Pod         shop/web-7f9-x2x4z  created  ReplicaSet web-7f9
2026-11-30T09:02:00Z  Deployment  shop/web            created  helm
not listed: HTTPRoute: forbidden: /apis/gateway.networking.k8s.io/v1/namespaces/shop/httproutes
not listed: AuthorizationPolicy: forbidden: \
/apis/diy-service-mesh.dev/v1alpha1/namespaces/service-mesh/authorizationpolicies
"
        );
        let none = Report {
            changes: vec![],
            unread: vec![],
            ..report
        };
        assert_eq!(
            text(&none, Duration::from_secs(3600), Colors::DISABLED),
            "no change in the last 1 h\n"
        );
    }

    #[test]
    fn workloads_without_pods_are_known_by_their_annotation() {
        let with = |fields: Value| {
            let metadata = json!({"managedFields": [{"fieldsV1": fields}]});
            has_settings(&serde_json::from_value(metadata).unwrap())
        };
        let inject = format!("f:{INJECT}");
        assert!(with(json!({"f:spec": {"f:template": {inject: {}}}})));
        assert!(!with(json!({"f:spec": {"f:template": {}}})));
    }
}
