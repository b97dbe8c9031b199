//! Routes in the index: their destinations and clients, and the effect of changes.

use serde_json::json;

use super::*;
use crate::catalog::Change;
use crate::index::locality::Location;
use crate::index::state::{State, Target};
use crate::index::tests::{Chance, Stale, endpoint, index, ip, key, pod, service, slice, stale};
use crate::index::{Index, Resource};
use crate::kinds::route::tests::{route, route_of};
use crate::kinds::{Object, Slice};

mod backends;

fn apply(index: &mut Index, object: Object) -> Stale {
    stale(index, Change::Apply(object))
}

fn target(index: &Index, destination: &str, namespace: &str) -> Target {
    let client = Location {
        namespace: namespace.into(),
        ..Location::default()
    };
    let destination = Resource::Destination(destination.parse().unwrap());
    index.resolve(&destination, &client).1.target.unwrap()
}

/// The names of the rules of a destination.
fn rules(index: &Index, destination: &str, namespace: &str) -> Vec<String> {
    let routes = target(index, destination, namespace).routes;
    let rules = routes.iter().flat_map(|table| &table.rules);
    rules.map(|rule| rule.shared.name.clone()).collect()
}

#[test]
fn routes_apply_at_every_address_of_a_service() {
    let mut web = service("web", &["10.96.0.7", "fd00::7"]);
    web.external_ips = vec![ip("192.0.2.7")];
    web.ports[0].node_port = Some(30080);
    let node = crate::kinds::Node {
        key: Key::new("", "n1"),
        addresses: vec![ip("10.1.0.1")],
        unready: false,
        zone: "".into(),
    };
    let mut index = index([Object::Service(web), Object::Node(node)]);
    let touched = apply(&mut index, Object::Route(route("r", 0, json!([{}]))));
    let addresses = ["10.96.0.7", "fd00::7", "192.0.2.7"].map(ip);
    assert_eq!(touched.addresses, addresses.into());
    assert_eq!(touched.node_ports, [30080].into());
    assert!(touched.backends.is_empty(), "their endpoints are the same");
    for address in [
        "10.96.0.7:80",
        "[fd00::7]:80",
        "192.0.2.7:80",
        "10.1.0.1:30080",
    ] {
        assert_eq!(
            rules(&index, address, ""),
            ["HTTPRoute shop/r"],
            "{address}"
        );
    }
    let backend = Resource::Backend(key("web"), 80);
    let backend = index.resolve(&backend, &Location::default()).1;
    assert!(backend.target.unwrap().routes.is_none());
}

#[test]
fn routes_of_a_namespace_are_for_its_clients_and_those_of_the_service_for_all_others() {
    let consumer = route_of(Kind::HttpRoute, "c", "r", 0, json!([{}]));
    let index = index([
        Object::Service(service("web", &["10.96.0.7"])),
        Object::Route(route("r", 0, json!([{}]))),
        Object::Route(consumer),
    ]);
    let web = "10.96.0.7:80";
    assert_eq!(rules(&index, web, "c"), ["HTTPRoute c/r"]);
    for client in ["shop", "x", ""] {
        assert_eq!(rules(&index, web, client), ["HTTPRoute shop/r"], "{client}");
    }
    let resolve = |address: &str| {
        let destination = Resource::Destination(address.parse().unwrap());
        index
            .resolve(&destination, &Location::default())
            .0
            .namespaces
    };
    let namespaces = resolve(web).unwrap();
    assert_eq!(*namespaces, ["c".into()].into(), "all others share a state");
}

#[test]
fn change_touches_only_the_destinations_whose_routes_differ() {
    let services = [
        ("web", "10.96.0.7"),
        ("b", "10.96.0.8"),
        ("other", "10.96.0.9"),
    ];
    let services = services.map(|(name, ip)| Object::Service(service(name, &[ip])));
    let mut index = index(services);
    let to_b = || {
        route(
            "r",
            0,
            json!([{"backendRefs": [{"name": "b", "port": 80}]}]),
        )
    };
    let web = BTreeSet::from([ip("10.96.0.7")]);
    assert_eq!(apply(&mut index, Object::Route(to_b())).addresses, web);
    let same = Route {
        generation: 8,
        ..to_b()
    };
    let touched = apply(&mut index, Object::Route(same));
    assert_eq!(
        touched,
        Stale::default(),
        "another generation with the same rules"
    );
    // The backend loses its port: its own address has changed, and the routes to it.
    let mut b = service("b", &["10.96.0.8"]);
    b.ports.remove(0);
    let both = ["10.96.0.7", "10.96.0.8"].map(ip);
    let touched = apply(&mut index, Object::Service(b));
    assert_eq!(touched.addresses, both.into());
    let grant = Grant {
        key: Key::new("shop", "g"),
        from: vec![(Kind::HttpRoute, "x".into())],
        to: vec![None],
    };
    assert_eq!(apply(&mut index, Object::Grant(grant)), Stale::default());
}

#[test]
fn no_route_changes_traffic_between_two_other_namespaces() {
    let states = |index: &Index, namespace: &str| -> Vec<State> {
        let destinations = Chance::destinations().into_iter();
        let client = Location {
            namespace: namespace.into(),
            ..Location::default()
        };
        let resolve = |address| index.resolve(&Resource::Destination(address), &client).1;
        destinations.map(resolve).collect()
    };
    let (mut foreign, mut applied) = (0, 0);
    for seed in 0..40 {
        let mut chance = Chance(fastrand::Rng::with_seed(seed));
        let mut index = Index::default();
        for _ in 0..60 {
            let change = chance.change();
            let is_foreign = match &change {
                Change::Apply(Object::Route(route)) => &*route.key.namespace == "other",
                Change::Delete(Kind::HttpRoute | Kind::GrpcRoute, key) => {
                    &*key.namespace == "other"
                }
                _ => false,
            };
            // All Services of this world are in `shop`.
            let all = ["shop", "third", ""].map(|namespace| states(&index, namespace));
            let own = states(&index, "other");
            index.apply(change);
            if is_foreign {
                foreign += 1;
                applied += usize::from(own != states(&index, "other"));
                assert_eq!(
                    all,
                    ["shop", "third", ""].map(|namespace| states(&index, namespace))
                );
            }
        }
    }
    assert!(
        foreign > 100 && applied > 5,
        "{foreign} changes, {applied} with an effect"
    );
}

#[test]
fn pod_has_the_routes_of_the_oldest_headless_service_that_selects_it() {
    let headless = |name: &str, created| Service {
        created,
        ..service(name, &[])
    };
    let of = |name: &str| {
        let slice = slice(name, name, 8080, vec![endpoint("10.0.0.1", "p")]);
        Object::Slice(slice)
    };
    // Another tenant lists the pod in a slice of its own Service, with a route.
    let hostile = Service {
        key: Key::new("evil", "web"),
        selector: Default::default(),
        ..headless("web", -1)
    };
    let hostile_slice = Slice {
        key: Key::new("evil", "web"),
        service: Some(Key::new("evil", "web")),
        ..slice("web", "web", 8080, vec![endpoint("10.0.0.1", "p")])
    };
    let mut hostile_route = route_of(Kind::HttpRoute, "evil", "evil", 0, json!([{}]));
    hostile_route.parents[0].namespace = None;
    let mut index = index([
        Object::Pod(pod("p", &["10.0.0.1"])),
        Object::Service(headless("web", 2)),
        of("web"),
        Object::Service(hostile),
        Object::Slice(hostile_slice),
        Object::Route(hostile_route),
    ]);
    assert!(rules(&index, "10.0.0.1:8080", "").is_empty());
    let touched = apply(&mut index, Object::Route(route("r", 0, json!([{}]))));
    assert_eq!(touched.addresses, [ip("10.0.0.1")].into());
    assert_eq!(rules(&index, "10.0.0.1:8080", ""), ["HTTPRoute shop/r"]);
    assert!(
        rules(&index, "10.0.0.1:9999", "").is_empty(),
        "not a port of the Service"
    );
    // An older Service selects the pod too. It has no routes.
    apply(&mut index, of("older"));
    let touched = apply(&mut index, Object::Service(headless("older", 1)));
    assert!(touched.addresses.contains(&ip("10.0.0.1")));
    assert!(rules(&index, "10.0.0.1:8080", "").is_empty());
}

#[test]
fn statuses_have_the_generation_of_the_route_and_one_entry_for_each_parent() {
    let mut two = route("r", 0, json!([{}]));
    two.parents.push(crate::object::TargetReference {
        name: "gone".to_owned(),
        ..two.parents[0].clone()
    });
    let mut index = index([Object::Service(service("web", &["10.96.0.7"]))]);
    apply(&mut index, Object::Route(two.clone()));
    let statuses = index.route_statuses();
    let [status] = &statuses[..] else {
        panic!("one route: {statuses:?}")
    };
    assert_eq!((&*status.key.name, status.generation), ("r", 7));
    let parents = status.parents.iter();
    let parents: Vec<(&str, bool, &str)> = parents
        .map(|one| {
            (
                &*one.parent.name,
                one.conditions[0].holds,
                one.conditions[0].reason,
            )
        })
        .collect();
    let gone = ("gone", false, "NoMatchingParent");
    assert_eq!(parents, [("web", true, "Accepted"), gone]);
    // Another generation of the same rules is another status.
    two.generation = 8;
    apply(&mut index, Object::Route(two));
    assert_eq!(index.route_statuses()[0].generation, 8);
}

#[test]
fn backend_of_a_headless_service_has_the_family_of_its_endpoints() {
    let slice =
        |address: &str| Object::Slice(slice("web", "web", 8080, vec![endpoint(address, "")]));
    let mut index = index([Object::Service(service("web", &[]))]);
    for address in ["10.0.0.1", "fd01::1"] {
        apply(&mut index, slice(address));
        let backend = Resource::Backend(key("web"), 80);
        let state = index.resolve(&backend, &Location::default()).1;
        let endpoints = state.target.unwrap().endpoints;
        assert_eq!(endpoints[0].address.ip(), ip(address));
    }
}

#[test]
fn consumer_route_that_cannot_be_read_leaves_the_routes_of_the_service_in_force() {
    let unreadable = json!([{"matches": [{"path": {"type": "RegularExpression", "value": "("}}]}]);
    let mut index = index([Object::Service(service("web", &["10.96.0.7"]))]);
    let consumer = route_of(Kind::HttpRoute, "bank", "c", 0, unreadable);
    apply(&mut index, Object::Route(consumer));
    let at = |index: &Index, namespace| rules(index, "10.96.0.7:80", namespace);
    assert_eq!(at(&index, "bank"), ["HTTPRoute bank/c"], "no other route");
    assert_eq!(at(&index, "shop"), [""; 0]);
    apply(&mut index, Object::Route(route("r", 0, json!([{}]))));
    assert_eq!(at(&index, "bank"), ["HTTPRoute shop/r"]);
}
