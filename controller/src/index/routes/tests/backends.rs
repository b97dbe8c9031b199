//! XBackends, and TrafficPolicies with `backend`, as backends of routes, with their changes and their
//! statuses.

use super::*;
use crate::catalog::parse;
use crate::kinds::route::backend::KINDS;

const WEB: &str = "10.96.0.7:80";

/// An object without unknown fields.
fn object(value: serde_json::Value) -> Object {
    let parsed = parse(&value.to_string(), "cluster.local").unwrap();
    assert_eq!(parsed.unknown_fields, [""; 0]);
    parsed.objects.into_iter().next().unwrap()
}

/// `api` of either kind.
fn backend(kind: Kind, namespace: &str, host: &str) -> Object {
    let mut spec = json!({
        "type": "ExternalHostname", "externalHostname": {"hostname": host},
        "port": {"port": 443}, "tls": {"mode": "ServerOnly"},
    });
    if kind == Kind::TrafficPolicy {
        spec = json!({"backend": spec});
    }
    object(json!({
        "apiVersion": format!("{}/v1alpha1", kind.row().group), "kind": kind.name(),
        "metadata": {"name": "api", "namespace": namespace, "generation": 3},
        "spec": spec,
    }))
}

/// A policy `api` for Service `web`, in place of a host.
fn with_targets() -> Object {
    object(json!({
        "apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "TrafficPolicy",
        "metadata": {"name": "api", "namespace": "shop", "generation": 4},
        "spec": {
            "targetRefs": [{"group": "", "kind": "Service", "name": "web"}],
            "connections": {"maxRequests": 1},
        },
    }))
}

/// A route of `shop` with backends: `api` of a kind with this change, and `b`.
fn to_api(kind: Kind, of_kind: Kind, change: serde_json::Value) -> Object {
    let mut api = json!({
        "group": of_kind.row().group, "kind": of_kind.name(), "name": "api", "weight": 9,
    });
    let change = change.as_object().unwrap().clone();
    api.as_object_mut().unwrap().extend(change);
    let rules = json!([{"backendRefs": [api, {"name": "b", "port": 80}]}]);
    Object::Route(route_of(kind, "shop", "r", 0, rules))
}

fn with_services(objects: impl IntoIterator<Item = Object>) -> Index {
    let services = [("web", "10.96.0.7"), ("b", "10.96.0.8")];
    let services = services.map(|(name, ip)| Object::Service(service(name, &[ip])));
    index(services.into_iter().chain(objects))
}

/// The backends of the rule, each with its host, and the reason of ResolvedRefs.
fn backends(index: &Index) -> (Vec<String>, &'static str) {
    let table = target(index, WEB, "").routes.unwrap();
    let rule = table.tcp.as_ref().unwrap_or_else(|| &table.rules[0]);
    let backends = rule.message().backends.into_iter().map(|one| {
        let host = one.external.map(|one| format!("{}:{}", one.host, one.port));
        format!("{}{} {}", one.name, host.unwrap_or_default(), one.weight)
    });
    let backends = backends.collect();
    let routes = index.route_statuses().into_iter();
    let mut routes = routes.filter(|status| &*status.key.name == "r");
    let conditions = routes.next().unwrap().parents.remove(0).conditions;
    let resolved = conditions.iter().find(|one| one.kind == "ResolvedRefs");
    (backends, resolved.unwrap().reason)
}

#[test]
fn host_is_a_backend_of_all_kinds_of_routes() {
    let all = Kind::routes().flat_map(|kind| KINDS.map(|of_kind| (kind, of_kind)));
    for (kind, of_kind) in all {
        let to_api = |change| to_api(kind, of_kind, change);
        let backend = |host| backend(of_kind, "shop", host);
        let mut index = with_services([to_api(json!({})), backend("a.example.com")]);
        let expected = |host: &str| vec![format!("{host} 9"), "shop/b:80 1".to_owned()];
        let valid = (expected("a.example.com:443"), "ResolvedRefs");
        assert_eq!(backends(&index), valid, "{kind} {of_kind}");
        apply(&mut index, to_api(json!({"port": 443})));
        assert_eq!(backends(&index), valid, "{kind} {of_kind}");
        // The others keep their share.
        apply(&mut index, to_api(json!({"port": 80})));
        assert_eq!(backends(&index), (expected(""), "BackendNotFound"));
        apply(&mut index, to_api(json!({"name": "none"})));
        assert_eq!(backends(&index), (expected(""), "BackendNotFound"));
        apply(&mut index, to_api(json!({"group": "example.net"})));
        assert_eq!(backends(&index), (expected(""), "InvalidKind"));
        apply(&mut index, to_api(json!({})));
        apply(&mut index, backend("b.cluster.local"));
        assert_eq!(backends(&index), (expected(""), "UnsupportedValue"));
    }
}

#[test]
fn mirrors_and_authorization_servers_are_services() {
    for kind in KINDS {
        let api = json!({"group": kind.row().group, "kind": kind.name(), "name": "api"});
        let auth = json!({"protocol": "GRPC", "backendRef": api.clone()});
        for filter in [
            json!({"type": "RequestMirror", "requestMirror": {"backendRef": api}}),
            json!({"type": "ExternalAuth", "externalAuth": auth}),
        ] {
            let own = json!([{"name": "web", "port": 80}]);
            let rules = json!([{"filters": [filter], "backendRefs": own}]);
            let index = with_services([
                backend(kind, "shop", "a.example.com"),
                Object::Route(route("r", 0, rules)),
            ]);
            assert_eq!(backends(&index).1, "InvalidKind");
        }
    }
}

#[test]
fn change_of_a_backend_touches_only_the_services_whose_routes_use_it() {
    for (kind, other_kind) in KINDS.into_iter().zip(KINDS.into_iter().rev()) {
        let other = route("other", 1, json!([{"matches": [{"method": "PUT"}]}]));
        let mut other = Object::Route(other);
        if let Object::Route(route) = &mut other {
            route.parents[0].name = "b".to_owned();
        }
        let mut index = with_services([to_api(Kind::HttpRoute, kind, json!({})), other]);
        let web = Stale {
            addresses: [ip("10.96.0.7")].into(),
            ..Stale::default()
        };
        let host = |host| backend(kind, "shop", host);
        assert_eq!(apply(&mut index, host("a.example.com")), web);
        let same = apply(&mut index, host("a.example.com"));
        assert_eq!(same, Stale::default());
        assert_eq!(apply(&mut index, host("b.example.com")), web);
        let of_others = apply(&mut index, backend(kind, "bank", "a.example.com"));
        assert_eq!(of_others, Stale::default());
        // Objects of other kinds with the same name have no part in it.
        let of_other_kind = apply(&mut index, backend(other_kind, "shop", "c.example.com"));
        assert_eq!(of_other_kind, Stale::default());
        assert_eq!(backends(&index).0[0], "b.example.com:443 9");
        let service = apply(&mut index, Object::Service(service("api", &["10.96.0.9"])));
        assert_eq!(service.addresses, [ip("10.96.0.9")].into());
        let touched = stale(&mut index, Change::Delete(kind, key("api")));
        assert_eq!(touched, web);
        assert_eq!(backends(&index).1, "BackendNotFound");
    }
}

#[test]
fn backend_is_of_the_namespace_of_the_route() {
    for kind in KINDS {
        let from = json!({
            "group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "namespace": "shop",
        });
        let to = json!([
            {"group": kind.row().group, "kind": kind.name()}, {"group": "", "kind": "Service"},
        ]);
        let grant = json!({
            "apiVersion": "gateway.networking.k8s.io/v1", "kind": "ReferenceGrant",
            "metadata": {"name": "g", "namespace": "bank"}, "spec": {"from": [from], "to": to},
        });
        let index = with_services([
            to_api(Kind::HttpRoute, kind, json!({"namespace": "bank"})),
            backend(kind, "bank", "a.example.com"),
            object(grant),
        ]);
        assert_eq!(backends(&index).1, "RefNotPermitted");
        let own = (format!("{kind} api"), true, "Accepted");
        assert_eq!(status(&index, &(kind, Key::new("bank", "api")), 3), [own]);
    }
}

/// The parents of a status, each with its only condition.
fn status(index: &Index, id: &(Kind, Key), generation: i64) -> Vec<(String, bool, &'static str)> {
    let status = index.status(id).unwrap().unwrap();
    assert_eq!((status.kind, status.generation), (id.0, generation));
    let parents = status.parents.into_iter().map(|one| {
        assert_eq!(one.conditions.len(), 1);
        let condition = &one.conditions[0];
        (one.parent.to_string(), condition.holds, condition.reason)
    });
    parents.collect()
}

#[test]
fn status_of_a_backend_names_the_services_of_its_routes_or_itself() {
    for kind in KINDS {
        let id = (kind, key("api"));
        let mut index = with_services([backend(kind, "shop", "a.example.com")]);
        let own = format!("{kind} api");
        assert_eq!(status(&index, &id, 3), [(own.clone(), true, "Accepted")]);
        assert!(index.with_status().contains(&id));
        index.take_changed_statuses();
        apply(&mut index, to_api(Kind::HttpRoute, kind, json!({})));
        let web = "Service shop/web".to_owned();
        assert!(index.take_changed_statuses().contains(&id));
        assert_eq!(status(&index, &id, 3), [(web.clone(), true, "Accepted")]);
        apply(&mut index, backend(kind, "shop", "127.0.0.1"));
        assert_eq!(status(&index, &id, 3), [(web, false, "UnsupportedValue")]);
        index.take_changed_statuses();
        index.apply(Change::Delete(Kind::HttpRoute, key("r")));
        assert!(index.take_changed_statuses().contains(&id));
        assert_eq!(status(&index, &id, 3), [(own, false, "UnsupportedValue")]);
    }
}

#[test]
fn policy_becomes_a_backend_and_has_targets_again() {
    let kind = Kind::TrafficPolicy;
    let id = (kind, key("api"));
    let route = to_api(Kind::HttpRoute, kind, json!({}));
    let mut index = with_services([route, with_targets()]);
    let max_requests = |index: &Index| {
        let policy = index.policies.of_service(&key("web"));
        let backend = policy.and_then(|policy| policy.backend.as_ref());
        backend.and_then(|backend| backend.connections?.max_requests)
    };
    let accepted = |parent: &str| (parent.to_owned(), true, "Accepted");
    for _ in 0..2 {
        assert_eq!(backends(&index).1, "BackendNotFound");
        assert_eq!(max_requests(&index), Some(1));
        assert_eq!(status(&index, &id, 4), [accepted("Service web")]);
        apply(&mut index, backend(kind, "shop", "a.example.com"));
        assert_eq!(backends(&index).1, "ResolvedRefs");
        assert_eq!(max_requests(&index), None);
        assert_eq!(status(&index, &id, 3), [accepted("Service shop/web")]);
        assert_eq!(index.count(kind), 1);
        apply(&mut index, with_targets());
    }
    apply(&mut index, backend(kind, "shop", "a.example.com"));
    index.apply(Change::Reset(kind, Vec::new()));
    assert_eq!(
        (index.count(kind), backends(&index).1),
        (0, "BackendNotFound")
    );
}
