//! The filter ExternalAuth of routes at the pods of their parent.

use super::*;
use crate::index::dependencies::kinds;
use crate::kinds::route::tests::{route, route_of};

/// Another Service in `shop` for pods with this label, with this target port.
fn other(name: &str, app: &str, target: u16) -> Service {
    let mut other = Service {
        key: key(name),
        selector: [("app".to_owned(), app.to_owned())].into(),
        ..service(name, &["10.96.0.9"])
    };
    other.ports.truncate(1);
    other.ports[0].target = TargetPort::Number(target);
    other
}

fn filter(namespace: &str) -> Value {
    let backend = json!({"name": "auth", "namespace": namespace, "port": 80});
    json!({"type": "ExternalAuth", "externalAuth": {"protocol": "GRPC", "backendRef": backend}})
}

/// Rules, one of which asks the Service `auth` of a namespace.
fn rules(namespace: &str) -> Value {
    let web = json!([{"name": "web", "namespace": "shop", "port": 80}]);
    let admin = json!([{"path": {"type": "PathPrefix", "value": "/admin"}}]);
    let admin = json!({"matches": admin, "filters": [filter(namespace)], "backendRefs": web});
    json!([admin, {"backendRefs": web}])
}

fn asking_route() -> Object {
    Object::Route(route("r", 0, rules("shop")))
}

fn auth() -> Object {
    Object::Service(other("auth", "auth", 9000))
}

/// The policies of a pod that are made of routes: ports and servers.
fn asked(index: &Index, pod: &Key) -> Vec<(Vec<u32>, Vec<String>)> {
    let policies = message(index, pod).policies.into_iter();
    let policies = policies.filter(|one| one.name.starts_with("HTTPRoute "));
    let say = |policy: proto::AuthorizationPolicy| {
        let rules = policy.routes.into_iter().flat_map(|routes| routes.rules);
        let servers = rules.filter_map(|rule| Some(rule.authorizer?.backend));
        (policy.ports, servers.collect())
    };
    policies.map(say).collect()
}

fn expected(port: u32) -> Vec<(Vec<u32>, Vec<String>)> {
    vec![(vec![port], vec!["shop/auth:80".to_owned()])]
}

fn delete(index: &mut Index, kind: Kind, name: &str) -> Stale {
    stale(index, Change::Delete(kind, key(name)))
}

#[test]
fn pods_of_the_parent_ask_at_its_target_ports_whatever_changes() {
    let mut index = index([
        auth(),
        Object::Service(web(8080)),
        Object::Pod(pod_in("shop", "a")),
        Object::Pod(pod_in("bank", "a")),
    ]);
    assert_eq!(asked(&index, &key("a")), []);
    let before = state(&index, &key("a"));
    assert_eq!(apply(&mut index, asking_route()).pods, [key("a")].into());
    assert_eq!(asked(&index, &key("a")), expected(8080));
    assert_eq!(asked(&index, &Key::new("bank", "a")), []);
    assert!(state(&index, &key("a")) != before);
    let moved = other("web", "none", 8080);
    for (service, expected) in [
        (web(9090), expected(9090)),
        (moved, vec![]),
        (web(80), expected(80)),
    ] {
        let touched = apply(&mut index, Object::Service(service));
        assert_eq!(touched.pods, [key("a")].into());
        assert_eq!(asked(&index, &key("a")), expected);
    }
    assert_eq!(
        delete(&mut index, Kind::Service, "web").pods,
        [key("a")].into()
    );
    assert_eq!(asked(&index, &key("a")), []);
    assert_eq!(
        apply(&mut index, Object::Service(web(8080))).pods,
        [key("a")].into()
    );
    assert_eq!(asked(&index, &key("a")), expected(8080));
    // The server vanishes: nothing is allowed.
    assert_eq!(
        delete(&mut index, Kind::Service, "auth").pods,
        [key("a")].into()
    );
    assert_eq!(
        asked(&index, &key("a")),
        [(vec![8080], vec![String::new()])]
    );
    apply(&mut index, auth());
    assert_eq!(
        delete(&mut index, Kind::HttpRoute, "r").pods,
        [key("a")].into()
    );
    assert_eq!(asked(&index, &key("a")), []);
    assert!(index.routes.protected(&key("web")).is_none());
}

#[test]
fn routes_of_all_services_of_a_pod_apply_and_after_its_policies() {
    let second =
        json!([{"filters": [filter("shop")], "backendRefs": [{"name": "second", "port": 80}]}]);
    let parent = json!([{"group": "", "kind": "Service", "name": "second"}]);
    let spec = json!({"parentRefs": parent, "rules": second});
    let second =
        crate::kinds::route::tests::parse_state(Kind::HttpRoute, key("s"), 0, ("", 1), spec);
    let index = index([
        auth(),
        Object::Service(web(8080)),
        Object::Service(Service {
            selector: web(1).selector,
            ..other("second", "", 8080)
        }),
        Object::Pod(pod_in("shop", "a")),
        asking_route(),
        Object::Route(second),
        of_pods("shop", "z", json!({}), deny()),
    ]);
    let names = message(&index, &key("a")).policies.into_iter();
    let names: Vec<_> = names.map(|one| one.name).collect();
    assert_eq!(
        names,
        [
            "AuthorizationPolicy shop/z",
            "HTTPRoute shop/s",
            "HTTPRoute shop/r"
        ]
    );
}

#[test]
fn ports_with_the_same_routes_are_one_policy() {
    let mut two = web(8080);
    two.ports.push(crate::kinds::service::ServicePort {
        name: "admin".into(),
        port: 81,
        target: TargetPort::Number(8081),
        ..two.ports[0].clone()
    });
    let index = index([
        auth(),
        Object::Service(two),
        Object::Pod(pod_in("shop", "a")),
        asking_route(),
    ]);
    let server = vec!["shop/auth:80".to_owned()];
    assert_eq!(asked(&index, &key("a")), [(vec![8080, 8081], server)]);
}

#[test]
fn route_of_another_namespace_changes_nothing_at_the_pods() {
    let consumer = route_of(Kind::HttpRoute, "bank", "r", 0, rules("bank"));
    let mut index = index([Object::Service(web(8080)), Object::Pod(pod_in("shop", "a"))]);
    let touched = apply(&mut index, Object::Route(consumer));
    assert_eq!(touched.pods, [].into());
    assert_eq!(message(&index, &key("a")).policies, []);
}

#[test]
fn server_of_another_namespace_requires_a_grant() {
    let server = Service {
        key: Key::new("iam", "auth"),
        ..other("auth", "auth", 9000)
    };
    let mut index = index([
        Object::Service(server),
        Object::Service(web(8080)),
        Object::Pod(pod_in("shop", "a")),
        Object::Route(route("r", 0, rules("iam"))),
    ]);
    assert_eq!(
        asked(&index, &key("a")),
        [(vec![8080], vec![String::new()])]
    );
    let status = index.status(&(Kind::HttpRoute, key("r"))).unwrap().unwrap();
    let resolved = &status.parents[0].conditions[1];
    assert_eq!(
        (resolved.holds, resolved.reason),
        (false, "RefNotPermitted")
    );
    let grant = crate::kinds::route::model::Grant {
        key: Key::new("iam", "g"),
        from: vec![(Kind::HttpRoute, "shop".into())],
        to: vec![None],
    };
    let touched = apply(&mut index, Object::Grant(grant));
    assert_eq!(touched.pods, [key("a")].into());
    let server = vec!["iam/auth:80".to_owned()];
    assert_eq!(asked(&index, &key("a")), [(vec![8080], server)]);
}

#[test]
fn pod_that_would_ask_itself_denies_and_one_with_the_server_at_another_port_asks() {
    let app = web(1).selector["app"].clone();
    for (target, denies) in [(8080, true), (9000, false)] {
        let index = index([
            Object::Service(other("auth", &app, target)),
            Object::Service(web(8080)),
            Object::Pod(pod_in("shop", "a")),
            asking_route(),
        ]);
        let policies = message(&index, &key("a")).policies;
        assert_eq!(policies[0].ports, [8080]);
        let denying = policies[0].action() == Action::Deny;
        assert_eq!(denying, denies, "{target}");
    }
}

#[test]
fn state_of_pods_waits_for_the_kinds_of_routes() {
    let mut index = index([
        auth(),
        Object::Service(web(8080)),
        Object::Pod(pod_in("shop", "a")),
    ]);
    let resource = Resource::Workload(key("a"), "".into());
    for kind in [Kind::HttpRoute, Kind::GrpcRoute, Kind::Grant] {
        assert!(kinds(&resource, None).contains(&kind));
        index.set_readable(kind, false);
        assert!(state(&index, &key("a")).is_withheld, "{kind}");
        index.set_readable(kind, true);
        assert!(!state(&index, &key("a")).is_withheld);
    }
}

#[test]
fn routes_over_the_bound_deny() {
    let path = |rule: usize, one: usize| {
        let value = format!("/{rule}/{one}/{}", "x".repeat(900));
        json!({"path": {"type": "Exact", "value": value}})
    };
    let routes = (0..24).map(|name| {
        let rules = (0..2).map(|rule| {
            let matches: Vec<Value> = (0..8).map(|one| path(name * 2 + rule, one)).collect();
            let web = json!([{"name": "web", "port": 80}]);
            json!({"matches": matches, "filters": [filter("shop")], "backendRefs": web})
        });
        let rules: Vec<Value> = rules.collect();
        Object::Route(route(&format!("r{name}"), 0, json!(rules)))
    });
    let own = [
        auth(),
        Object::Service(web(8080)),
        Object::Pod(pod_in("shop", "a")),
    ];
    let index = index(own.into_iter().chain(routes));
    let all = message(&index, &key("a"));
    assert_eq!(
        (all.policies.len(), &*all.policies[0].ports),
        (1, &[8080][..])
    );
    assert_eq!(all.policies[0].action(), Action::Deny);
    assert!(all.encoded_len() <= MAX_BYTES);
}
