//! Headless Services in the index: the conditions about older ones, and when they change.

use serde_json::json;

use super::*;
use crate::catalog::Change;
use crate::index::Index;
use crate::index::tests::{Chance, endpoint, index, key, pod, service, slice};
use crate::kinds::policy::tests::policy;
use crate::kinds::route::backend::{KINDS, backend};
use crate::kinds::route::model::Route;
use crate::kinds::route::tests::{route, route_of};
use crate::kinds::{Object, Slice};
use crate::object::Meta;

/// Whether the status of a route may have changed.
fn change(index: &mut Index, change: Change) -> bool {
    index.change(change);
    index.settle()
}

fn apply(index: &mut Index, object: Object) -> bool {
    change(index, Change::Apply(object))
}

fn delete(index: &mut Index, kind: Kind, name: &str) -> bool {
    let deleted = Change::Delete(kind, key(name));
    change(index, deleted)
}

fn headless(name: &str, created: i64) -> Object {
    Object::Service(Service {
        created,
        ..service(name, &[])
    })
}

/// A slice of a Service with pods of these names, at the ports 8080 (http) and 8081 (admin).
fn of(name: &str, pods: &[&str]) -> Slice {
    let endpoints = pods.iter().map(|pod| endpoint("10.0.0.1", pod));
    slice(name, name, 8080, endpoints.collect())
}

/// `web` with a route and the pods `a` and `b`, which the younger `next` has too.
fn cluster() -> Index {
    let mut next = route("next", 0, json!([{}]));
    next.parents[0].name = "next".to_owned();
    index([
        Object::Pod(pod("a", &["10.0.0.1"])),
        Object::Pod(pod("b", &["10.0.0.2"])),
        headless("web", 1),
        headless("next", 2),
        Object::Slice(of("web", &["a", "b"])),
        Object::Slice(of("next", &["a", "b"])),
        Object::Route(route("web", 0, json!([{}]))),
        Object::Route(next),
    ])
}

/// The messages of the condition, by route.
fn older(index: &Index) -> Vec<(String, String)> {
    let statuses = index.route_statuses();
    let conditions = statuses.iter().flat_map(|status| {
        let conditions = status.parents.iter().flat_map(|one| &one.conditions);
        conditions.map(|condition| (status.key.to_string(), condition))
    });
    let older = conditions.filter(|(_, one)| one.kind == APPLIES_TO_ALL_PODS);
    let older = older.map(|(route, condition)| {
        assert!(!condition.holds && condition.reason == OLDER_SERVICE);
        (route, condition.message.clone())
    });
    older.collect()
}

fn message(index: &Index) -> String {
    let older = older(index);
    let [(route, message)] = &older[..] else {
        panic!("one route: {older:?}")
    };
    assert!(route.ends_with("/next"), "{route}");
    message.clone()
}

#[test]
fn routes_of_a_younger_headless_service_get_a_condition_while_pods_follow_an_older_one() {
    let mut index = cluster();
    let expected = "routes and policies of older headless Services apply to 2 of the pods of \
                    shop/next: shop/web (pods a, b)";
    assert_eq!(message(&index), expected);
    // The older one loses a pod, by its slice and by the labels of the pod.
    assert!(apply(&mut index, Object::Slice(of("web", &["a"]))));
    assert!(message(&index).contains("1 of the pods of shop/next: shop/web (pods a)"));
    let mut unlabelled = pod("a", &["10.0.0.1"]);
    unlabelled.labels.clear();
    assert!(apply(&mut index, Object::Pod(unlabelled)));
    assert_eq!(older(&index), []);
    assert!(apply(&mut index, Object::Slice(of("web", &["a", "b"]))));
    assert!(message(&index).contains("(pods b)"));
    // The older Service becomes the younger one, has cluster IPs, and is deleted.
    assert!(apply(&mut index, headless("web", 3)));
    assert_eq!(older(&index)[0].0, "shop/web");
    assert!(apply(&mut index, headless("web", 1)));
    let balanced = Object::Service(service("web", &["10.96.0.7"]));
    assert!(apply(&mut index, balanced));
    assert_eq!(older(&index), []);
    assert!(apply(&mut index, headless("web", 1)));
    assert!(!message(&index).is_empty());
    assert!(delete(&mut index, Kind::Service, "web"));
    assert_eq!(older(&index), []);
    // It exists again, and the pod is deleted.
    assert!(apply(&mut index, headless("web", 1)));
    assert!(delete(&mut index, Kind::Pod, "b"));
    assert_eq!(older(&index), []);
}

#[test]
fn only_changes_that_concern_routes_of_a_headless_service_change_statuses() {
    let mut index = cluster();
    index.take_changed_statuses();
    for (object, what) in [
        (Object::Pod(pod("c", &["10.0.0.3"])), "a pod without slices"),
        (Object::Slice(of("web", &["a", "b", "c"])), "a pod of one"),
        (Object::Slice(of("next", &["a", "b", "x"])), "no pod yet"),
        (headless("more", 3), "a Service without pods"),
        (
            Object::Slice(of("more", &["a"])),
            "younger, and without routes",
        ),
        (Object::Pod(pod("a", &["10.0.0.9"])), "another address"),
    ] {
        assert!(!apply(&mut index, object), "{what}");
    }
    assert!(message(&index).contains("apply to 2 of the pods"));
    assert!(apply(&mut index, Object::Slice(of("next", &["a", "c"]))));
    assert!(message(&index).contains("(pods a, c)"));
}

#[test]
fn condition_is_for_the_ports_of_the_parent_and_accepted_routes_only() {
    let mut index = cluster();
    let parent = |port: Option<u16>, rules| {
        let mut next = route("next", 0, rules);
        next.parents[0].name = "next".to_owned();
        next.parents[0].port = port;
        Object::Route(next)
    };
    // The older Service leads to the port of `http` only.
    let mut http = of("web", &["a", "b"]);
    http.ports.retain(|port| port.name == "http");
    apply(&mut index, Object::Slice(http));
    apply(&mut index, parent(Some(9000), json!([{}])));
    assert_eq!(older(&index), []);
    apply(&mut index, parent(Some(80), json!([{}])));
    assert!(message(&index).contains("2 of the pods"));
    let invalid = json!([{"matches": [{"path": {"type": "RegularExpression", "value": "("}}]}]);
    apply(&mut index, parent(None, invalid));
    assert_eq!(older(&index), [], "Accepted is False");
}

#[test]
fn authors_of_other_namespaces_learn_no_names_of_pods() {
    let mut index = cluster();
    let consumer = |name: &str| -> Route {
        let mut route = route_of(Kind::HttpRoute, "other", name, 0, json!([{}]));
        route.parents[0].name = "next".to_owned();
        route
    };
    delete(&mut index, Kind::HttpRoute, "next");
    assert!(apply(&mut index, Object::Route(consumer("next"))));
    let expected = "routes and policies of older headless Services apply to 2 of the pods of \
                    shop/next: shop/web";
    assert_eq!(message(&index), expected);
}

#[test]
fn long_lists_of_names_are_shortened() {
    let pods: Vec<String> = (0..9).map(|number| format!("p{number}")).collect();
    let pods: Vec<&str> = pods.iter().map(String::as_str).collect();
    let mut index = cluster();
    apply(&mut index, Object::Slice(of("next", &pods)));
    for (age, name) in pods.iter().enumerate() {
        apply(&mut index, Object::Pod(pod(name, &[])));
        let age = i64::try_from(age).unwrap();
        apply(&mut index, headless(&format!("old-{name}"), -age));
        apply(
            &mut index,
            Object::Slice(of(&format!("old-{name}"), &[name])),
        );
    }
    let expected = "routes and policies of older headless Services apply to 9 of the pods of \
                    shop/next: shop/old-p0, shop/old-p1, shop/old-p2, shop/old-p3 and 5 more \
                    (pods p0, p1, p2, p3 and 5 more)";
    assert_eq!(message(&index), expected);
}

#[test]
fn policies_of_a_younger_headless_service_get_the_condition_unless_they_concern_its_pods_only() {
    let mut index = cluster();
    delete(&mut index, Kind::HttpRoute, "next");
    assert_eq!(older(&index), []);
    let of = |target: serde_json::Value, settings| {
        let mut policy = policy("next", 0, settings);
        policy.parents = vec![serde_json::from_value(target).unwrap()];
        Object::Policy(policy)
    };
    let to_next = || json!({"group": "", "kind": "Service", "name": "next"});
    let timeouts = || json!({"timeouts": {"request": "5s"}});
    assert!(apply(&mut index, of(to_next(), timeouts())));
    assert!(message(&index).ends_with("shop/next: shop/web (pods a, b)"));
    assert!(apply(
        &mut index,
        Object::Slice(super::tests::of("web", &["a"]))
    ));
    assert!(message(&index).ends_with("(pods a)"));
    let limits = json!({"rateLimits": [{"name": "all", "requests": 5}]});
    apply(&mut index, of(to_next(), limits));
    assert_eq!(older(&index), []);
    let namespace = json!({"group": "", "kind": "Namespace", "name": "shop"});
    apply(&mut index, of(namespace, timeouts()));
    assert_eq!(older(&index), [], "it is for both Services");
}

#[test]
fn hosts_as_backends_of_a_younger_headless_service_do_not_get_the_condition() {
    for kind in KINDS {
        let mut index = cluster();
        let host = json!({"group": kind.row().group, "kind": kind.name(), "name": "host"});
        let mut next = route("next", 0, json!([{"backendRefs": [host]}]));
        next.parents[0].name = "next".to_owned();
        apply(&mut index, Object::Route(next));
        let host = json!({
            "type": "ExternalHostname", "externalHostname": {"hostname": "a.example.com"},
            "port": {"port": 443},
        });
        let spec = match kind {
            Kind::TrafficPolicy => json!({"backend": host}).to_string(),
            _ => host.to_string(),
        };
        let meta = Meta::new(kind, key("host"), 0, ("", 0), &spec);
        apply(
            &mut index,
            Object::Backend(backend(meta, &spec, "cluster.local")),
        );
        let status = index.status(&(kind, key("host"))).unwrap().unwrap();
        assert_eq!(status.parents.len(), 1, "{kind}");
        assert!(message(&index).ends_with("shop/next: shop/web (pods a, b)"));
    }
}

#[test]
fn of_two_ports_of_a_service_for_one_port_of_a_pod_the_first_one_decides() {
    let mut web = service("web", &[]);
    web.ports.reverse();
    let mut same = of("web", &["a"]);
    same.ports.iter_mut().for_each(|port| port.port = 8080);
    let mut route = route("web", 0, json!([{}]));
    route.parents[0].port = Some(80);
    let index = index([
        Object::Pod(pod("a", &["10.0.0.1"])),
        Object::Service(web),
        Object::Slice(same),
        Object::Route(route),
    ]);
    let destination = crate::index::Resource::Destination("10.0.0.1:8080".parse().unwrap());
    let (_, state) = index.resolve(&destination, &Default::default());
    assert!(state.target.unwrap().routes.is_some());
    assert_eq!(older(&index), []);
}

#[test]
fn conditions_depend_on_the_objects_only_and_are_announced() {
    let (mut conditions, mut silent) = (0, 0);
    for seed in 0..40 {
        let mut chance = Chance(fastrand::Rng::with_seed(seed));
        let (mut lived, mut objects) = (Index::default(), Vec::<Object>::new());
        for step in 0..100 {
            let kinds = [Kind::Service, Kind::Slice, Kind::Pod, Kind::HttpRoute];
            let kind = kinds[chance.0.usize(..4)];
            let mut object = chance.object(kind);
            if let Object::Service(service) = &mut object {
                service.is_headless = chance.0.u8(..4) > 0;
                service.canary = None;
            }
            // No object is a later state of another one.
            if let Object::Route(route) = &mut object {
                route.uid = step.to_string().into();
            }
            let key = object.key().clone();
            objects.retain(|other| (other.kind(), other.key()) != (kind, &key));
            let next = match chance.0.u8(..4) {
                0 => Change::Delete(kind, key),
                _ => {
                    objects.push(object.clone());
                    Change::Apply(object)
                }
            };
            let before = lived.route_statuses();
            let is_announced = change(&mut lived, next);
            let after = lived.route_statuses();
            assert!(is_announced || before == after, "seed {seed} step {step}");
            silent += usize::from(!is_announced);
            conditions += older(&lived).len();
            let fresh = index(objects.clone());
            assert_eq!(after, fresh.route_statuses(), "seed {seed} step {step}");
        }
    }
    assert!(
        conditions > 100 && silent > 1000,
        "{conditions} conditions, {silent} changes without effect"
    );
}
