//! Tests with an API server whose responses the test writes.

use serde_json::json;

use super::super::testing::{Server, event, failure, list};
use super::super::watch::Timing;
use super::*;

const GRANTS: &str = "metadata.name%3Dreferencegrants.gateway.networking.k8s.io";
const ROUTES: &str = "metadata.name%3Dhttproutes.gateway.networking.k8s.io";

/// A server that the watches of these kinds use.
async fn start(kinds: impl IntoIterator<Item = Kind>) -> Server {
    // Each request gets a response in time: none is repeated.
    let (server, cluster) = Server::start(Timing::default()).await;
    let cluster = std::sync::Arc::new(cluster);
    for kind in kinds {
        let cluster = cluster.clone();
        tokio::spawn(async move {
            watch_custom(&cluster.client, kind, cluster.context()).await;
        });
    }
    server
}

/// A definition with these versions and whether they are served, established or not.
fn definition(kind: Kind, versions: &[(&str, bool)], is_established: bool) -> Value {
    let ApiResource { plural, group, .. } = resource(kind);
    let version = |(name, served): &(&str, bool)| json!({"name": name, "served": served});
    let status = if is_established { "True" } else { "False" };
    json!({
        "metadata": {"name": format!("{plural}.{group}"), "resourceVersion": "8"},
        "spec": {"versions": versions.iter().map(version).collect::<Vec<_>>()},
        "status": {"conditions": [
            {"type": "NamesAccepted", "status": "True"},
            {"type": "Established", "status": status},
        ]},
    })
}

fn grant() -> Value {
    json!({
        "metadata": {"name": "g", "namespace": "shop", "resourceVersion": "5"},
        "spec": {"from": [], "to": [{"group": "", "kind": "Service"}]},
    })
}

fn installed(kind: Kind, definition: &Value) -> Installed {
    Installed::of(
        kind,
        &serde_json::from_str(&definition.to_string()).unwrap(),
    )
}

#[tokio::test]
async fn kind_that_is_installed_later_is_listed_when_its_definition_is_established() {
    let mut server = start([Kind::Grant]).await;
    server.respond_at(GRANTS, 200, list("7", "", &[])).await;
    assert_eq!(server.change().await, "not installed ReferenceGrant");
    let (watch, query) = server.events_at(GRANTS, &[]).await;
    assert_eq!(query, "watch=true&resourceVersion=7");
    let mut new = definition(Kind::Grant, &[("v1", true)], false);
    new["status"]["conditions"] = Value::Null;
    let pending = definition(Kind::Grant, &[("v1", true)], false);
    let established = definition(Kind::Grant, &[("v1", true)], true);
    let events = [
        ("ADDED", new),
        ("MODIFIED", pending),
        ("MODIFIED", established),
    ];
    let events = events.map(|(kind, definition)| event(kind, definition));
    server.more_events(watch, &events).await;
    // The API server may need a moment after it has established the definition.
    server
        .respond_at("/v1/referencegrants?", 404, failure(404))
        .await;
    let listed = list("9", "", &[grant()]);
    server.respond_at("/v1/referencegrants?", 200, listed).await;
    assert_eq!(server.change().await, "reset ReferenceGrant [shop/g]");
    assert_eq!(server.early(), [""; 0], "nothing else was requested");
}

#[tokio::test]
async fn objects_are_watched_in_the_best_version_as_long_as_it_is_installed() {
    let mut server = start([Kind::Grant]).await;
    let old = definition(Kind::Grant, &[("v1beta1", true)], true);
    server
        .respond_at(GRANTS, 200, list("7", "", std::slice::from_ref(&old)))
        .await;
    let listed = list("9", "", &[grant()]);
    server
        .respond_at("/v1beta1/referencegrants?", 200, listed)
        .await;
    assert_eq!(server.change().await, "reset ReferenceGrant [shop/g]");
    let (objects, _) = server.events_at("/v1beta1/referencegrants?", &[]).await;
    let (watch, _) = server.events_at(GRANTS, &[event("MODIFIED", old)]).await;
    // The former definition again has not changed this watch.
    let deleted = event("DELETED", grant());
    server.more_events(objects, &[deleted]).await;
    assert_eq!(server.change().await, "delete ReferenceGrant shop/g");

    let both = definition(Kind::Grant, &[("v1beta1", true), ("v1", true)], true);
    server
        .more_events(watch, &[event("MODIFIED", both.clone())])
        .await;
    let listed = list("10", "", &[grant()]);
    server.respond_at("/v1/referencegrants?", 200, listed).await;
    assert_eq!(server.change().await, "reset ReferenceGrant [shop/g]");
    let changed = |version| {
        let mut grant = grant();
        grant["metadata"]["resourceVersion"] = json!(version);
        event("MODIFIED", grant)
    };
    let events = [changed("12"), changed("11")];
    let (_, started) = server.events_at("/v1/referencegrants?", &events).await;
    assert_eq!(started, "watch=true&resourceVersion=10");
    for version in [12, 11] {
        let applied = ("apply shop/g".to_owned(), Some(version));
        assert_eq!(server.event().await, applied);
    }
    let ages = |server: &Server| server.freshness.ages().len();
    assert_eq!(ages(&server), 1);

    server
        .more_events(watch, &[event("DELETED", both.clone())])
        .await;
    // Without a version, the catalog would have no position in the history of the cluster. With an
    // earlier one, it would begin another history.
    let removed = ("reset ReferenceGrant []".to_owned(), Some(12));
    assert_eq!(server.event().await, removed);
    assert_eq!(
        ages(&server),
        0,
        "the age of what does not exist is no alert"
    );

    server.more_events(watch, &[event("ADDED", both)]).await;
    let listed = list("20", "", &[grant()]);
    server.respond_at("/v1/referencegrants?", 200, listed).await;
    assert_eq!(server.change().await, "reset ReferenceGrant [shop/g]");
}

#[tokio::test]
async fn versions_are_tried_until_the_definition_can_be_read() {
    let mut odd = definition(Kind::Grant, &[], true);
    odd["spec"]["versions"] = json!("v1");
    for (status, body) in [
        (403, failure(403)),
        (404, failure(404)),
        (500, failure(500)),
        (200, list("7", "", &[odd])),
    ] {
        let mut server = start([Kind::Grant]).await;
        server.respond_at(GRANTS, status, body).await;
        server
            .respond_at("/v1/referencegrants?", 404, failure(404))
            .await;
        let listed = list("9", "", &[grant()]);
        server
            .respond_at("/v1beta1/referencegrants?", 200, listed)
            .await;
        assert_eq!(server.change().await, "reset ReferenceGrant [shop/g]");
        let both = definition(Kind::Grant, &[("v1", true), ("v1beta1", true)], true);
        server
            .respond_at(GRANTS, 200, list("10", "", &[both]))
            .await;
        server
            .respond_at("/v1/referencegrants?", 200, list("11", "", &[]))
            .await;
        assert_eq!(server.change().await, "reset ReferenceGrant []");
    }
}

#[tokio::test]
async fn definition_without_a_response_leaves_other_kinds_alone() {
    let mut server = start([Kind::HttpRoute, Kind::Grant]).await;
    assert_eq!(server.hang_at(ROUTES).await, "");
    let current = definition(Kind::Grant, &[("v1", true)], true);
    server
        .respond_at(GRANTS, 200, list("7", "", &[current]))
        .await;
    let listed = list("9", "", &[grant()]);
    server.respond_at("/v1/referencegrants?", 200, listed).await;
    assert_eq!(server.change().await, "reset ReferenceGrant [shop/g]");
}

#[test]
fn first_version_that_the_mesh_reads_and_the_cluster_serves_is_used() {
    for (kind, versions, expected) in [
        (Kind::Grant, &[("v1beta1", true)][..], Some("v1beta1")),
        (Kind::Grant, &[("v1beta1", true), ("v1", true)], Some("v1")),
        (
            Kind::Grant,
            &[("v1beta1", true), ("v1", false)],
            Some("v1beta1"),
        ),
        (
            Kind::TrafficSplit,
            &[("v1alpha1", true), ("v1alpha3", true)],
            Some("v1alpha3"),
        ),
        (Kind::TrafficSplit, &[("v1alpha1", true)], None),
        (
            Kind::TcpRoute,
            &[("v1alpha2", false), ("v1", true)],
            Some("v1"),
        ),
        (
            Kind::TcpRoute,
            &[("v1alpha2", true), ("v1", true)],
            Some("v1"),
        ),
        (Kind::TcpRoute, &[("v1alpha2", true)], Some("v1alpha2")),
        (Kind::TcpRoute, &[("v2", true)], None),
        (Kind::HttpRoute, &[], None),
    ] {
        let found = installed(kind, &definition(kind, versions, true)).versions();
        let found: Vec<&str> = found.iter().map(|found| &*found.version).collect();
        assert_eq!(found, Vec::from_iter(expected), "{kind} {versions:?}");
        let pending = installed(kind, &definition(kind, versions, false));
        assert_eq!(pending, Installed::NotEstablished);
    }
    let unsupported = definition(Kind::TcpRoute, &[("v1", false), ("v2", true)], true);
    assert_eq!(
        installed(Kind::TcpRoute, &unsupported).describe(Kind::TcpRoute),
        "TCPRoute is not used: its definition serves [\"v2\"], expected one of [\"v1\", \"v1alpha2\"]"
    );
    let text = Installed::No.describe(Kind::TcpRoute);
    assert_eq!(text, "TCPRoute is not installed");
}

#[test]
fn names_optional_fields_that_a_definition_lacks() {
    let with = |kind: Kind, fields: &[&str]| {
        let mut one = definition(kind, &[("v1beta1", true), ("v1", true)], true);
        let fields = fields
            .iter()
            .map(|field| ((*field).to_owned(), json!({"type": "object"})));
        let fields: serde_json::Map<String, Value> = fields.collect();
        let rules = json!({"type": "array", "items": {"properties": fields, "type": "object"}});
        // Several hundred kilobytes, with values of all types.
        let large: Vec<Value> = (0..10_000)
            .map(|at| json!({"description": at, "x": [null]}))
            .collect();
        one["spec"]["versions"][1]["schema"] = json!({"openAPIV3Schema": {
            "properties": {
                "spec": {"properties": {"other": {"allOf": large}, "rules": rules}},
                "status": {"properties": {"rules": []}},
            },
        }});
        one
    };
    for (kind, fields, expected) in [
        (
            Kind::HttpRoute,
            &["matches"][..],
            "HTTPRoute v1 is installed, without retry and sessionPersistence: TrafficPolicies have \
             these fields",
        ),
        (
            Kind::HttpRoute,
            &["retry", "sessionPersistence", "matches"],
            "HTTPRoute v1 is installed",
        ),
        (
            Kind::GrpcRoute,
            &["retry"],
            "GRPCRoute v1 is installed, without sessionPersistence: TrafficPolicies have these fields",
        ),
        (Kind::Grant, &[], "ReferenceGrant v1 is installed"),
    ] {
        let definition = with(kind, fields);
        let text = installed(kind, &definition).describe(kind);
        assert_eq!(text, expected);
        let lacking = lacking_fields(kind, &definition);
        assert!(
            lacking.iter().all(|field| text.contains(field)),
            "{lacking:?}"
        );
    }
    let odd = json!({"spec": {"versions": [{"name": "v1", "served": true, "schema": []}]}});
    let all = ["retry", "sessionPersistence"];
    assert_eq!(lacking_fields(Kind::HttpRoute, &odd), all);
}

#[tokio::test]
async fn policies_that_were_deleted_with_their_definition_are_missed_until_they_are_forgotten() {
    const DEFINITION: &str = "metadata.name%3Dauthorizationpolicies.diy-service-mesh.dev";
    const MARKER: &str = "/namespaces/mesh/configmaps/diy-service-mesh-authorization";
    let marker = |data: Value| json!({"metadata": {"name": "m"}, "data": data});
    let mut server = start([Kind::Authorization]).await;
    server.respond_at(DEFINITION, 200, list("7", "", &[])).await;
    let (watch, _) = server.events_at(DEFINITION, &[]).await;
    server.respond_at(MARKER, 500, failure(500)).await;
    let shop = marker(json!({"shop": ""}));
    server.respond_at(MARKER, 200, shop).await;
    assert_eq!(server.change().await, r#"lost {"shop"}"#);
    assert_eq!(server.change().await, "not installed AuthorizationPolicy");
    server.respond_at(MARKER, 200, marker(json!({}))).await;
    assert_eq!(server.change().await, "lost {}");
    assert_eq!(server.change().await, "not installed AuthorizationPolicy");
    let kept = definition(Kind::Authorization, &[("v1alpha1", true)], true);
    let added = event("ADDED", kept.clone());
    server.more_events(watch, &[added]).await;
    let listed = list("12", "", &[]);
    server
        .respond_at("/v1alpha1/authorizationpolicies?", 200, listed)
        .await;
    let one = list("7", "", std::slice::from_ref(&kept));
    server.respond_at(DEFINITION, 200, one).await;
    assert_eq!(server.change().await, "reset AuthorizationPolicy []");
}

#[tokio::test]
async fn policies_are_deleted_one_by_one_and_outlive_their_definition() {
    const DEFINITION: &str = "metadata.name%3Dauthorizationpolicies.diy-service-mesh.dev";
    const POLICIES: &str = "/v1alpha1/authorizationpolicies?";
    let policy = |name: &str| {
        json!({"metadata": {"name": name, "namespace": "shop", "resourceVersion": "5"}, "spec": {
            "targetRefs": [{"kind": "Pod", "selector": {}}], "action": "ALLOW", "rules": []}})
    };
    let mut server = start([Kind::Authorization]).await;
    let kept = definition(Kind::Authorization, &[("v1alpha1", true)], true);
    let mut terminating = kept.clone();
    terminating["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    let one = |definition: &Value| list("7", "", std::slice::from_ref(definition));
    server.respond_at(DEFINITION, 200, one(&kept)).await;
    let (watch, _) = server.events_at(DEFINITION, &[]).await;
    let listed = list("9", "", &[policy("a"), policy("b")]);
    server.respond_at(POLICIES, 200, listed).await;
    server.respond_at(DEFINITION, 500, failure(500)).await;
    server.respond_at(DEFINITION, 200, one(&kept)).await;
    let listed = "reset AuthorizationPolicy [shop/a shop/b]";
    assert_eq!(server.change().await, listed);

    let (policies, _) = server.events_at(POLICIES, &[]).await;
    let deleted = event("DELETED", policy("a"));
    server.more_events(policies, &[deleted]).await;
    server.respond_at(DEFINITION, 200, one(&kept)).await;
    assert_eq!(server.change().await, "delete AuthorizationPolicy shop/a");

    // The API server deletes all objects of a definition before it.
    let deleted = event("DELETED", policy("b"));
    server.more_events(policies, &[deleted]).await;
    server.respond_at(DEFINITION, 200, one(&terminating)).await;
    let deleted = event("DELETED", terminating);
    server.more_events(watch, &[deleted]).await;
    // The next change is the list of a new definition.
    let added = event("ADDED", kept.clone());
    server.more_events(watch, &[added]).await;
    let listed = list("12", "", &[policy("c")]);
    server.respond_at(POLICIES, 200, listed).await;
    server.respond_at(DEFINITION, 200, one(&kept)).await;
    assert_eq!(server.change().await, "reset AuthorizationPolicy [shop/c]");
}
