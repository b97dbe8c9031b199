//! Policies in the index: their Services, their precedence, and the effect of changes.

use serde_json::{Value, json};

use super::*;
use crate::catalog::Change;
use crate::index::locality::Location;
use crate::index::state::{State, Target as StateTarget};
use crate::index::tests::{
    Chance, Stale, endpoint, index, ip, key, node, pod, service, slice, stale,
};
use crate::index::{Index, Resource};
use crate::kinds::Object;
use crate::kinds::policy::tests::{policy, policy_for};
use crate::kinds::route::tests::{route, route_of};
use crate::object::Kind;

fn apply(index: &mut Index, object: Object) -> Stale {
    stale(index, Change::Apply(object))
}

fn resolve(index: &Index, resource: &Resource, namespace: &str) -> StateTarget {
    let client = Location {
        namespace: namespace.into(),
        ..Location::default()
    };
    index.resolve(resource, &client).1.target.unwrap()
}

fn destination(index: &Index, address: &str) -> StateTarget {
    let address = Resource::Destination(address.parse().unwrap());
    resolve(index, &address, "")
}

/// The name of the policy of a target.
fn name(target: &StateTarget) -> &str {
    target.policy.as_ref().map_or("", |policy| &policy.name)
}

fn connections() -> Value {
    json!({"connections": {"maxRequests": 1}})
}

fn namespace() -> Value {
    json!([{"group": "", "kind": "Namespace", "name": "shop"}])
}

#[test]
fn policy_is_part_of_every_resource_of_its_service_and_of_no_other() {
    let mut web = service("web", &["10.96.0.7", "fd00::7"]);
    web.external_ips = vec![ip("192.0.2.7")];
    web.ports[0].node_port = Some(30080);
    let other = Service {
        key: Key::new("bank", "web"),
        ..service("web", &["10.96.0.9"])
    };
    let mut index = index([
        Object::Service(web),
        Object::Service(service("api", &["10.96.0.8"])),
        Object::Service(other),
        node("n", &["10.1.0.1"]),
    ]);
    let touched = apply(&mut index, Object::Policy(policy("p", 0, connections())));
    let addresses = ["10.96.0.7", "fd00::7", "192.0.2.7"].map(ip);
    assert_eq!(touched.addresses, addresses.into());
    assert_eq!(touched.node_ports, [30080].into());
    assert_eq!(touched.backends, [key("web")].into());
    let of_web = "TrafficPolicy shop/p";
    for (address, expected) in [
        ("10.96.0.7:80", of_web),
        ("[fd00::7]:9000", of_web),
        ("192.0.2.7:80", of_web),
        ("10.96.0.7:1", ""),
        ("10.96.0.8:80", ""),
        ("10.96.0.9:80", ""),
    ] {
        assert_eq!(name(&destination(&index, address)), expected, "{address}");
    }
    let backend = |key: Key| Resource::Backend(key, 80);
    let of_backend = |key| resolve(&index, &backend(key), "bank");
    assert_eq!(name(&of_backend(key("web"))), of_web);
    assert_eq!(name(&of_backend(key("api"))), "");
    assert!(
        destination(&index, "10.96.0.7:80").routes.is_none(),
        "no settings of requests"
    );
    // The same policy again changes nothing.
    let again = Object::Policy(policy("p", 0, connections()));
    assert_eq!(apply(&mut index, again), Stale::default());
    let delete = Change::Delete(Kind::TrafficPolicy, key("p"));
    let touched = stale(&mut index, delete);
    assert_eq!(touched.addresses, addresses.into());
    assert_eq!(name(&destination(&index, "10.96.0.7:80")), "");
}

#[test]
fn policy_of_a_namespace_is_for_its_services_also_for_later_ones() {
    let inherited = policy_for(
        "all",
        0,
        namespace(),
        json!({
            "connections": {"maxRequests": 1}, "circuitBreaker": {"failurePercent": 50},
        }),
    );
    let mut index = index([
        Object::Service(service("web", &["10.96.0.7"])),
        Object::Policy(inherited),
        Object::Policy(policy("own", 5, connections())),
    ]);
    assert_eq!(
        name(&destination(&index, "10.96.0.7:80")),
        "TrafficPolicy shop/own, TrafficPolicy shop/all"
    );
    let touched = apply(&mut index, Object::Service(service("api", &["10.96.0.8"])));
    assert!(touched.addresses.contains(&ip("10.96.0.8")));
    assert_eq!(
        name(&destination(&index, "10.96.0.8:80")),
        "TrafficPolicy shop/all"
    );
    let foreign = Service {
        key: Key::new("bank", "api"),
        ..service("api", &["10.96.0.9"])
    };
    apply(&mut index, Object::Service(foreign));
    assert_eq!(name(&destination(&index, "10.96.0.9:80")), "");
}

#[test]
fn oldest_valid_policy_applies_and_the_others_are_told() {
    let invalid = policy("a", 0, json!({"connections": {"maxRequests": 0}}));
    let mut index = index([
        Object::Service(service("web", &["10.96.0.7"])),
        Object::Policy(invalid),
        Object::Policy(policy("b", 2, connections())),
        Object::Policy(policy("c", 1, connections())),
        Object::Policy(policy("d", 1, connections())),
        Object::Policy(policy_for(
            "e",
            0,
            json!([{"kind": "Service", "name": "x"}]),
            json!({}),
        )),
    ]);
    assert_eq!(
        name(&destination(&index, "10.96.0.7:80")),
        "TrafficPolicy shop/c"
    );
    let reasons = |index: &Index| -> Vec<String> {
        let statuses = index.route_statuses();
        let statuses = statuses.iter().map(|status| {
            let condition = &status.parents[0].conditions[0];
            assert_eq!(condition.holds, condition.reason == "Accepted");
            assert_eq!((status.kind, status.generation), (Kind::TrafficPolicy, 7));
            format!("{} {}", status.key.name, condition.reason)
        });
        statuses.collect()
    };
    assert_eq!(
        reasons(&index),
        [
            "a Invalid",
            "b Conflicted",
            "c Accepted",
            "d Conflicted",
            "e TargetNotFound"
        ]
    );
    for gone in ["c", "d"] {
        let delete = Change::Delete(Kind::TrafficPolicy, key(gone));
        index.apply(delete);
    }
    assert_eq!(
        name(&destination(&index, "10.96.0.7:80")),
        "TrafficPolicy shop/b"
    );
    let delete = Change::Delete(Kind::Service, key("web"));
    index.apply(delete);
    assert_eq!(
        reasons(&index),
        ["a Invalid", "b TargetNotFound", "e TargetNotFound"]
    );
}

#[test]
fn settings_of_requests_complete_the_rules_of_all_namespaces() {
    let mut index = index([
        Object::Service(service("web", &["10.96.0.7"])),
        Object::Route(route("r", 0, json!([{"timeouts": {"request": "1s"}}]))),
        Object::Route(route_of(Kind::HttpRoute, "c", "r", 0, json!([{}]))),
    ]);
    let settings = json!({
        "timeouts": {"request": "5s"}, "faults": [{"abort": {"status": 503}}],
    });
    let touched = apply(&mut index, Object::Policy(policy("p", 0, settings)));
    assert_eq!(touched.addresses, [ip("10.96.0.7")].into());
    let web = Resource::Destination("10.96.0.7:80".parse().unwrap());
    for (namespace, timeout) in [("", 1_000), ("shop", 1_000), ("c", 5_000)] {
        let table = resolve(&index, &web, namespace).routes.unwrap();
        let rule = table.rules[0].message();
        assert_eq!(rule.request_timeout, timeout, "{namespace}");
        assert!(!rule.to_destination);
        assert_eq!(table.faults().len(), 1);
    }
    let before = destination(&index, "10.96.0.7:80");
    let settings = json!({"timeouts": {"request": "5s"}});
    apply(&mut index, Object::Policy(policy("p", 0, settings)));
    let after = destination(&index, "10.96.0.7:80");
    assert_ne!(
        before.routes, after.routes,
        "faults are part of the version"
    );
}

#[test]
fn requests_that_no_route_concerns_have_a_rule_to_the_destination() {
    let settings = json!({"timeouts": {"request": "5s"}});
    let index = index([
        Object::Service(service("web", &["10.96.0.7"])),
        Object::Policy(policy("p", 0, settings)),
    ]);
    for port in [80, 9000] {
        let table = destination(&index, &format!("10.96.0.7:{port}"))
            .routes
            .unwrap();
        let [rule] = &table.rules[..] else {
            panic!("one rule")
        };
        let rule = rule.message();
        assert_eq!(
            (&*rule.name, rule.to_destination),
            ("TrafficPolicy shop/p", true)
        );
        assert_eq!(rule.backends[0].name, format!("shop/web:{port}"));
        assert_eq!(rule.request_timeout, 5_000);
        assert_eq!(table.matches.len(), 1);
        assert_eq!(
            *table.matches[0].1,
            crate::kinds::route::model::Match::default()
        );
    }
}

#[test]
fn pod_has_the_policy_of_its_oldest_headless_service() {
    let of = |name: &str| {
        let slice = slice(name, name, 8080, vec![endpoint("10.0.0.1", "p")]);
        Object::Slice(slice)
    };
    let mut index = index([
        Object::Pod(pod("p", &["10.0.0.1"])),
        Object::Service(service("web", &[])),
        of("web"),
    ]);
    let settings = json!({
        "connections": {"maxRequests": 1}, "timeouts": {"request": "5s"},
    });
    let touched = apply(&mut index, Object::Policy(policy("p", 0, settings)));
    assert_eq!(touched.addresses, [ip("10.0.0.1")].into());
    let target = destination(&index, "10.0.0.1:8080");
    assert_eq!(name(&target), "TrafficPolicy shop/p");
    assert!(target.routes.unwrap().rules[0].shared.to_destination);
    assert_eq!(name(&destination(&index, "10.0.0.1:9999")), "");
}

#[test]
fn policy_changes_no_flow_to_services_of_other_namespaces() {
    let states = |index: &Index| -> Vec<State> {
        let resolve = |address| {
            let resource = Resource::Destination(address);
            Chance::locations().map(|client| index.resolve(&resource, &client).1)
        };
        Chance::destinations()
            .into_iter()
            .flat_map(resolve)
            .collect()
    };
    let (mut foreign, mut own) = (0, 0);
    for seed in 0..40 {
        let mut chance = Chance(fastrand::Rng::with_seed(seed));
        let mut index = Index::default();
        for _ in 0..100 {
            let change = chance.change();
            // All Services of this world are in `shop`.
            let namespace = match &change {
                Change::Apply(Object::Policy(policy)) => Some(policy.key.namespace.clone()),
                Change::Delete(Kind::TrafficPolicy, key) => Some(key.namespace.clone()),
                _ => None,
            };
            let before = states(&index);
            index.apply(change);
            match namespace.as_deref() {
                Some("other") => {
                    foreign += 1;
                    assert!(before == states(&index));
                }
                Some(_) => own += usize::from(before != states(&index)),
                None => {}
            }
        }
    }
    assert!(
        foreign > 50 && own > 20,
        "{foreign} changes, {own} with an effect"
    );
}

#[test]
fn thousands_of_policies_of_a_tenant_leave_others_alone() {
    let mut index = index([
        Object::Service(service("web", &["10.96.0.7"])),
        Object::Service(service("api", &["10.96.0.8"])),
    ]);
    let targets = json!([{"kind": "Service", "name": "api"}]);
    apply(
        &mut index,
        Object::Policy(policy_for("first", 0, targets, connections())),
    );
    let before = destination(&index, "10.96.0.8:80");
    let many = (0..10_000).map(|number| policy(&format!("p{number}"), 1, connections()));
    let targets = json!([{"kind": "Service", "name": "api"}]);
    let first = policy_for("first", 0, targets, connections());
    let all = many.chain([first]).map(Object::Policy).collect();
    let touched = stale(&mut index, Change::Reset(Kind::TrafficPolicy, all));
    assert_eq!(touched.addresses, [ip("10.96.0.7")].into());
    assert_eq!(before, destination(&index, "10.96.0.8:80"));
    assert_eq!(
        name(&destination(&index, "10.96.0.7:80")),
        "TrafficPolicy shop/p0"
    );
}

#[test]
fn invalid_section_has_no_effect_and_the_rest_applies() {
    let invalid = json!({"maxRequests": 0});
    let sections = json!({"connections": invalid, "timeouts": {"request": "5s"}});
    let of_service = policy("p", 1, sections);
    // An older policy without a valid section applies to no target.
    let older = policy("older", 0, json!({"connections": invalid}));
    assert_eq!(older.rejection().map(|one| one.reason), Some("Invalid"));
    let inherited = policy_for(
        "n",
        0,
        json!([{"kind": "Namespace", "name": "shop"}]),
        json!({"connections": {"maxRequests": 7}}),
    );
    let index = index([
        Object::Service(service("web", &["10.96.0.7"])),
        Object::Policy(of_service),
        Object::Policy(older),
        Object::Policy(inherited),
    ]);
    let effective = index.policy(&key("web")).unwrap();
    let connections = effective.backend.as_ref().unwrap().connections.unwrap();
    assert_eq!(connections.max_requests, Some(7), "of the namespace");
    let routes = destination(&index, "10.96.0.7:80").routes.unwrap();
    assert_eq!(routes.rules[0].message().request_timeout, 5_000);
    let statuses = index.route_statuses();
    let of_policy = statuses.iter().find(|one| &*one.key.name == "p").unwrap();
    let [accepted, partial] = &of_policy.parents[0].conditions[..] else {
        panic!("{of_policy:?}")
    };
    assert!(accepted.holds && partial.is_problem(), "{of_policy:?}");
    let message = "spec.connections.maxRequests: \"0\" is not from 1 to 1000000; the section has \
                   no effect";
    assert_eq!(partial.message, message);
}
