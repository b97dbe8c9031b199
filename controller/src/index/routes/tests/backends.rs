//! XBackends as backends of routes, with their changes and their statuses.

use super::*;
use crate::catalog::parse;

const WEB: &str = "10.96.0.7:80";

/// An object of group `gateway.networking.x-k8s.io` or `gateway.networking.k8s.io`.
fn object(value: serde_json::Value) -> Object {
    let parsed = parse(&value.to_string(), "cluster.local").unwrap();
    assert_eq!(parsed.unknown_fields, [""; 0]);
    parsed.objects.into_iter().next().unwrap()
}

fn backend(namespace: &str, host: &str) -> Object {
    object(json!({
        "apiVersion": "gateway.networking.x-k8s.io/v1alpha1", "kind": "XBackend",
        "metadata": {"name": "api", "namespace": namespace, "generation": 3},
        "spec": {
            "type": "ExternalHostname", "externalHostname": {"hostname": host},
            "port": {"port": 443}, "tls": {"mode": "ServerOnly"},
        },
    }))
}

/// A route of `shop` with backends: an XBackend with this change, and `b`.
fn to_api(kind: Kind, change: serde_json::Value) -> Object {
    let mut api = json!({
        "group": "gateway.networking.x-k8s.io", "kind": "XBackend", "name": "api", "weight": 9,
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
    for kind in Kind::routes() {
        let mut index = with_services([to_api(kind, json!({})), backend("shop", "a.example.com")]);
        let expected = |host: &str| vec![format!("{host} 9"), "shop/b:80 1".to_owned()];
        let valid = (expected("a.example.com:443"), "ResolvedRefs");
        assert_eq!(backends(&index), valid, "{kind}");
        apply(&mut index, to_api(kind, json!({"port": 443})));
        assert_eq!(backends(&index), valid, "{kind}");
        // The others keep their share.
        apply(&mut index, to_api(kind, json!({"port": 80})));
        assert_eq!(backends(&index), (expected(""), "BackendNotFound"));
        apply(&mut index, to_api(kind, json!({"name": "none"})));
        assert_eq!(backends(&index), (expected(""), "BackendNotFound"));
        apply(&mut index, to_api(kind, json!({"group": "example.net"})));
        assert_eq!(backends(&index), (expected(""), "InvalidKind"));
        apply(&mut index, to_api(kind, json!({})));
        apply(&mut index, backend("shop", "b.cluster.local"));
        assert_eq!(backends(&index), (expected(""), "UnsupportedValue"));
    }
}

#[test]
fn mirrors_and_authorization_servers_are_services() {
    let api = json!({"group": "gateway.networking.x-k8s.io", "kind": "XBackend", "name": "api"});
    let auth = json!({"protocol": "GRPC", "backendRef": api.clone()});
    for filter in [
        json!({"type": "RequestMirror", "requestMirror": {"backendRef": api}}),
        json!({"type": "ExternalAuth", "externalAuth": auth}),
    ] {
        let own = json!([{"name": "web", "port": 80}]);
        let rules = json!([{"filters": [filter], "backendRefs": own}]);
        let index = with_services([
            backend("shop", "a.example.com"),
            Object::Route(route("r", 0, rules)),
        ]);
        assert_eq!(backends(&index).1, "InvalidKind");
    }
}

#[test]
fn change_of_a_backend_touches_only_the_services_whose_routes_use_it() {
    let other = route("other", 1, json!([{"matches": [{"method": "PUT"}]}]));
    let mut other = Object::Route(other);
    if let Object::Route(route) = &mut other {
        route.parents[0].name = "b".to_owned();
    }
    let mut index = with_services([to_api(Kind::HttpRoute, json!({})), other]);
    let web = Touched {
        addresses: [ip("10.96.0.7")].into(),
        ..Touched::default()
    };
    assert_eq!(apply(&mut index, backend("shop", "a.example.com")), web);
    let same = apply(&mut index, backend("shop", "a.example.com"));
    assert_eq!(same, Touched::default());
    assert_eq!(apply(&mut index, backend("shop", "b.example.com")), web);
    let of_others = apply(&mut index, backend("bank", "a.example.com"));
    assert_eq!(of_others, Touched::default());
    // A Service with the name of the XBackend has no part in it.
    let service = apply(&mut index, Object::Service(service("api", &["10.96.0.9"])));
    assert_eq!(service.addresses, [ip("10.96.0.9")].into());
    let mut touched = Touched::default();
    index.apply(Change::Delete(Kind::Backend, key("api")), &mut touched);
    assert_eq!(touched, web);
    assert_eq!(backends(&index).1, "BackendNotFound");
}

#[test]
fn backend_is_of_the_namespace_of_the_route() {
    let grant = json!({
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "ReferenceGrant",
        "metadata": {"name": "g", "namespace": "bank"},
        "spec": {
            "from": [{"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "namespace": "shop"}],
            "to": [{"group": "gateway.networking.x-k8s.io", "kind": "XBackend"}, {"group": "", "kind": "Service"}],
        },
    });
    let index = with_services([
        to_api(Kind::HttpRoute, json!({"namespace": "bank"})),
        backend("bank", "a.example.com"),
        object(grant),
    ]);
    assert_eq!(backends(&index).1, "RefNotPermitted");
    let status = index.status(&(Kind::Backend, Key::new("bank", "api")));
    assert_eq!(status.unwrap().unwrap().parents.len(), 0);
}

#[test]
fn status_of_a_backend_names_the_services_of_its_routes() {
    let id = (Kind::Backend, key("api"));
    let mut index = with_services([backend("shop", "a.example.com")]);
    let status = |index: &Index| {
        let status = index.status(&id).unwrap().unwrap();
        assert_eq!(status.generation, 3);
        let parents = status.parents.into_iter().map(|one| {
            assert_eq!(one.conditions.len(), 1);
            let condition = &one.conditions[0];
            (one.parent.to_string(), condition.holds, condition.reason)
        });
        parents.collect::<Vec<_>>()
    };
    assert_eq!(status(&index), []);
    index.take_changed_statuses();
    apply(&mut index, to_api(Kind::HttpRoute, json!({})));
    let web = "Service shop/web".to_owned();
    assert!(index.take_changed_statuses().contains(&id));
    assert_eq!(status(&index), [(web.clone(), true, "Accepted")]);
    apply(&mut index, backend("shop", "127.0.0.1"));
    assert_eq!(status(&index), [(web, false, "UnsupportedValue")]);
    index.take_changed_statuses();
    let mut touched = Touched::default();
    index.apply(Change::Delete(Kind::HttpRoute, key("r")), &mut touched);
    assert!(index.take_changed_statuses().contains(&id));
    assert_eq!(status(&index), []);
}
