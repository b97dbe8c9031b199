//! Tests with an API server whose responses the test writes.

use serde_json::{Value, json};

use super::super::objects::Objects;
use super::super::resources::{MAX_OBJECT_BYTES, resources};
use super::super::testing::{Server, event, failure, list};
use super::*;
use crate::catalog::claims::Subject;
use crate::object::Kind;

/// Requests that hang are abandoned soon; other requests that exceed this are repeated.
const TIMING: Timing = Timing {
    list_timeout: Duration::from_millis(500),
    start_timeout: Duration::from_millis(500),
    watch_timeout: Duration::from_secs(1),
    stall_timeout: Duration::from_millis(100),
    claim_interval: Duration::from_millis(100),
};

/// A server that a watch of a kind uses.
async fn start(kind: Kind) -> Server {
    let (server, cluster) = Server::start(TIMING).await;
    tokio::spawn(async move {
        let mut objects = Objects::new(kind, &cluster.client, cluster.context());
        objects.watch(resources(kind), None).await;
    });
    server
}

fn service(name: &str, ip: &str, version: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "spec": {"clusterIP": ip},
        "metadata": {"name": name, "namespace": "shop", "resourceVersion": version},
    })
}

#[tokio::test]
async fn abandons_requests_that_hang() {
    let mut server = start(Kind::Service).await;
    assert_eq!(server.hang().await, "", "a LIST");
    let one = service("a", "10.0.0.1", "5");
    server.respond(200, list("7", "", &[one])).await;
    assert_eq!(server.change().await, "reset Service [shop/a]");
    assert_eq!(server.hang().await, "watch=true&resourceVersion=7");
    let one = service("a", "10.0.0.1", "5");
    assert_eq!(server.respond(200, list("7", "", &[one])).await, "");
    assert_eq!(server.change().await, "reset Service [shop/a]");
    let added = event("ADDED", service("b", "10.0.0.2", "8"));
    server.events(&[added]).await;
    assert_eq!(server.change().await, "apply shop/b");
    // The watch hangs, and is abandoned too.
    let deleted = event("DELETED", service("a", "10.0.0.1", "9"));
    let resumed = server.events(&[deleted]).await;
    assert_eq!(resumed, "watch=true&resourceVersion=8");
    assert_eq!(server.change().await, "delete Service shop/a");
}

#[tokio::test]
async fn lists_pages_and_resumes_after_a_bookmark() {
    let mut server = start(Kind::Service).await;
    let (a, b) = (service("a", "10.0.0.1", "5"), service("b", "10.0.0.2", "6"));
    server.respond(200, list("7", "more", &[a])).await;
    let second = server.respond(200, list("7", "", &[b])).await;
    assert_eq!(second, "continue=more");
    assert_eq!(server.change().await, "reset Service [shop/a shop/b]");
    assert_eq!(server.freshness.ages().len(), 1);
    let known = "bookmark Service".to_owned();
    let bookmark =
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"resourceVersion": "90"}});
    let invalid = event("MODIFIED", service("b", "not an address", "91"));
    server.events(&[event("BOOKMARK", bookmark), invalid]).await;
    assert_eq!(server.event().await, (known, Some(90)));
    assert_eq!(server.change().await, "delete Service shop/b");
    assert_eq!(server.hang().await, "watch=true&resourceVersion=91");
}

#[tokio::test]
async fn page_over_the_limit_is_requested_again_with_half_as_many_objects() {
    let (mut server, cluster) = Server::start_with(TIMING, Pages::with_max_bytes(2048)).await;
    tokio::spawn(async move {
        let mut objects = Objects::new(Kind::Grant, &cluster.client, cluster.context());
        objects.watch(resources(Kind::Grant), None).await;
    });
    let grant = |name: &str| {
        json!({
            "metadata": {"name": name, "namespace": "shop", "resourceVersion": "5",
                "annotations": {"long": "x".repeat(1500)}},
            "spec": {"from": [], "to": []},
        })
    };
    for limit in [50, 25, 12] {
        let both = list("7", "", &[grant("a"), grant("b")]);
        let resource = format!("?&limit={limit}");
        assert_eq!(
            server.respond_at(&resource, 200, both).await,
            "",
            "no version 0"
        );
    }
    let first = list("7", "more", &[grant("a")]);
    server.respond_at("?&limit=6", 200, first).await;
    let rest = list("7", "", &[grant("b")]);
    let second = server
        .respond_at("?&limit=12&continue=more", 200, rest)
        .await;
    assert_eq!(second, "continue=more");
    assert_eq!(
        server.change().await,
        "reset ReferenceGrant [shop/a shop/b]"
    );
}

#[tokio::test]
async fn object_over_the_limit_leaves_the_others_readable() {
    let mut server = start(Kind::Grant).await;
    let grant = |name: &str, length: usize| {
        json!({
            "metadata": {"name": name, "namespace": "shop", "resourceVersion": "5",
                "annotations": {"long": "x".repeat(length)}},
            "spec": {"from": [], "to": []},
        })
    };
    let objects = [grant("large", MAX_OBJECT_BYTES), grant("b", 1)];
    server.respond(200, list("7", "", &objects)).await;
    assert_eq!(server.change().await, "reset ReferenceGrant [shop/b]");
    assert_eq!(server.freshness.ignored(), [(Kind::Grant, 1)]);
}

#[tokio::test]
async fn claims_restart_a_silent_watch_without_a_list_if_one_is_true() {
    let (mut server, cluster) = Server::start(TIMING).await;
    let claims = cluster.claims.clone();
    tokio::spawn(async move {
        let mut objects = Objects::new(Kind::Service, &cluster.client, cluster.context());
        objects.watch(resources(Kind::Service), None).await;
    });
    server.respond(200, list("7", "", &[])).await;
    assert_eq!(server.change().await, "reset Service []");
    let (watch, _) = server.events_at("watch=true", &[]).await;
    let (honest, liar) = ("1".into(), "2".into());
    let subject = Subject::Kind(Kind::Service);
    claims.add(&honest, Subject::Kind(Kind::Pod), 9);
    claims.add(&liar, subject, 1_000);
    // One object, without its spec.
    server
        .respond_at("?&limit=1", 200, list("8", "", &[]))
        .await;
    // The watch goes on, and the caller is not believed again.
    claims.add(&liar, subject, 8);
    let added = event("ADDED", service("a", "10.0.0.1", "8"));
    server.more_events(watch, &[added]).await;
    assert_eq!(server.change().await, "apply shop/a");
    claims.add(&honest, subject, 9);
    server
        .respond_at("?&limit=1", 200, list("9", "", &[]))
        .await;
    let missed = event("ADDED", service("b", "10.0.0.2", "9"));
    let restarted = server.events(&[missed]).await;
    assert_eq!(restarted, "watch=true&resourceVersion=8");
    assert_eq!(server.change().await, "apply shop/b");
    assert_eq!(server.early(), [""; 0], "no LIST");
    // All claims are answered: the watch lasts until its own end.
    assert_eq!(claims.pending(subject), 0);
    assert_eq!(server.hang().await, "watch=true&resourceVersion=9");
}

#[tokio::test]
async fn invalid_objects_are_counted_until_they_are_valid_or_deleted() {
    let mut server = start(Kind::Service).await;
    let mut large = service("large", "10.0.0.1", "5");
    large["spec"]["ports"] = json!([{"port": 70_000}]);
    let invalid = service("b", "not an address", "6");
    let listed = list("7", "", &[large.clone(), invalid]);
    server.respond(200, listed).await;
    assert_eq!(server.change().await, "reset Service []");
    assert_eq!(server.freshness.ignored(), [(Kind::Service, 2)]);
    let valid = event("MODIFIED", service("b", "10.0.0.2", "8"));
    server.events(&[valid, event("DELETED", large)]).await;
    assert_eq!(server.change().await, "apply shop/b");
    assert_eq!(server.change().await, "delete Service shop/large");
    assert_eq!(server.freshness.ignored(), [(Kind::Service, 0)]);
}

#[tokio::test]
async fn lists_again_if_the_version_is_refused_but_not_while_the_server_is_overloaded() {
    let mut server = start(Kind::Service).await;
    server.respond(200, list("7", "", &[])).await;
    assert_eq!(server.change().await, "reset Service []");
    let start = "watch=true&resourceVersion=7";
    assert_eq!(server.respond(500, failure(500)).await, start);
    assert_eq!(server.respond(400, failure(400)).await, start);
    assert_eq!(server.respond(200, list("3", "", &[])).await, "");
    assert_eq!(server.change().await, "reset Service []");
    let expired = event("ERROR", failure(410));
    let resumed = server.events(&[expired]).await;
    assert_eq!(resumed, "watch=true&resourceVersion=3");
    assert_eq!(server.respond(200, list("4", "", &[])).await, "");
    assert_eq!(server.change().await, "reset Service []");
}

#[tokio::test]
async fn changes_have_the_version_of_their_event_if_it_is_an_integer() {
    let mut server = start(Kind::Service).await;
    server.respond(200, list("7", "", &[])).await;
    assert_eq!(server.event().await, ("reset Service []".into(), Some(7)));
    let object = |version| service("a", "10.0.0.1", version);
    let events = ["8", "9", "x-1"].map(|version| event("ADDED", object(version)));
    server.events(&events).await;
    for version in [Some(8), Some(9), None] {
        assert_eq!(server.event().await, ("apply shop/a".into(), version));
    }
}

#[tokio::test]
async fn kind_that_cannot_be_read_has_no_objects_by_that_whatever_the_error() {
    for code in [403, 404, 500] {
        let mut server = start(Kind::Node).await;
        server.respond(code, failure(code)).await;
        // It is requested again, and has failed by then.
        server.hang().await;
        let error = server.freshness.failure(Kind::Node).unwrap();
        assert!(error.starts_with("no"), "{error}");
        server.respond(200, list("1", "", &[])).await;
        assert_eq!(server.change().await, "reset Node []", "and nothing before");
        assert_eq!(server.freshness.failure(Kind::Node), None);
    }
    let mut server = start(Kind::Node).await;
    server.hang().await;
    server.hang().await;
    let error = server.freshness.failure(Kind::Node).unwrap();
    assert!(error.contains("has not completed the LIST"), "{error}");
}

#[tokio::test]
async fn uses_the_version_that_is_installed_and_waits_until_one_is() {
    let mut server = start(Kind::Grant).await;
    server.respond(404, failure(404)).await;
    // The other version is requested at once.
    server.respond(404, failure(404)).await;
    server.respond(404, failure(404)).await;
    let error = server.freshness.failure(Kind::Grant).unwrap();
    assert!(error.contains("the definition of this kind"), "{error}");
    let grant = json!({
        "metadata": {"name": "g", "namespace": "shop", "resourceVersion": "5"},
        "spec": {"from": [], "to": [{"group": "", "kind": "Service"}]},
    });
    server.respond(200, list("7", "", &[grant])).await;
    assert_eq!(server.change().await, "reset ReferenceGrant [shop/g]");
    assert_eq!(server.hang().await, "watch=true&resourceVersion=7");
}

#[tokio::test]
async fn route_with_values_of_a_later_release_leaves_the_others_readable() {
    let mut server = start(Kind::HttpRoute).await;
    let route = |name: &str, rules: Value| {
        let parent = json!({"group": "", "kind": "Service", "name": "web"});
        json!({
            "metadata": {"name": name, "namespace": "shop", "resourceVersion": "5"},
            "spec": {"parentRefs": [parent], "rules": rules},
        })
    };
    let future = route("a", json!([{"filters": [{"type": "Future", "future": 1}]}]));
    let unreadable = json!({
        "metadata": {"name": "b", "namespace": "shop", "resourceVersion": "6"},
        "spec": {"parentRefs": "none"},
    });
    let all = [future, unreadable, route("c", json!([{}]))];
    server.respond(200, list("7", "", &all)).await;
    assert_eq!(server.change().await, "reset HTTPRoute [shop/a shop/c]");
}

#[tokio::test]
async fn names_missing_permissions() {
    let (_server, cluster) = Server::start(TIMING).await;
    let objects = Objects::new(Kind::Slice, &cluster.client, cluster.context());
    let target = objects.target(Vec::new(), None);
    let status = Status::failure("forbidden", "Forbidden").with_code(403);
    let text = explain_status(&target.permission, &status);
    let expected = "verbs list and watch on endpointslices of discovery.k8s.io, in all namespaces";
    assert!(text.contains(expected), "{text}");
}
