//! The index as its callers see it: scenarios, and properties over random histories.

mod isolation;
mod outside;

use std::collections::BTreeMap;
use std::net::SocketAddr;

use diy_mesh_proto::mesh::v1::Service as ServiceMessage;
use prost::Message;
use serde_json::{Value, json};

use super::endpoints::{Delta, Endpoint};
use super::locality::{Area, Location, Scope};
use super::reads::{self, Readers};
use super::state::{State, Update};
use super::{Resource, *};
use crate::kinds::authorization::{self, AuthorizationPolicy};
use crate::kinds::mesh::Mesh;
use crate::kinds::pod::Inbound;
use crate::kinds::policy::{self, Policy};
use crate::kinds::route::backend::backend;
use crate::kinds::route::model::{Grant, Route};
use crate::kinds::route::parse;
use crate::kinds::service::{Canary, ServicePort, TargetPort, Transport, excess};
use crate::kinds::slice::{PodReference, SliceEndpoint, SlicePort};
use crate::kinds::smi::{split, traffic_target};
use crate::object::condition::UNSUPPORTED_VALUE;
use crate::object::fields::NULL;
use crate::object::{Meta, Rejection, TargetReference};

pub(crate) fn key(name: &str) -> Key {
    Key::new("shop", name)
}

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(crate) fn service(name: &str, ips: &[&str]) -> Service {
    let port = |name: &str, port, protocol| ServicePort {
        name: name.into(),
        port,
        node_port: None,
        target: TargetPort::Name(name.into()),
        protocol,
        app_protocol: if name == "http" {
            "http".into()
        } else {
            String::new()
        },
    };
    Service {
        key: key(name),
        uid: "".into(),
        is_headless: ips.is_empty(),
        selector: [("app".to_owned(), "web".to_owned())].into(),
        cluster_ips: ips.iter().map(|text| ip(text)).collect(),
        external_ips: vec![],
        external_local: false,
        created: 0,
        ports: vec![
            port("http", 80, Transport::Tcp),
            port("admin", 9000, Transport::Tcp),
            port("dns", 53, Transport::Udp),
        ],
        excess: None,
        external_name: "".into(),
        publish_not_ready: false,
        local_only: false,
        session_affinity: 0,
        canary: None,
    }
}

/// The annotations of a canary of Service `of`.
pub(crate) fn canary(of: &str, weight: Result<u32, &str>) -> Canary {
    let meta = Meta::new(Kind::Service, key("canary"), 0, ("", 0), NULL);
    let weight = weight.map_err(|message| Rejection::new(UNSUPPORTED_VALUE, message.to_owned()));
    Canary::new(meta, vec![TargetReference::service(of)], weight)
}

/// The Service of the Kubernetes API, whose UID identifies the cluster.
pub(crate) fn api_service(uid: &str) -> Object {
    Object::Service(Service {
        key: Key::new("default", "kubernetes"),
        uid: uid.into(),
        ..service("kubernetes", &["10.96.255.1"])
    })
}

pub(crate) fn slice(name: &str, service: &str, port: u16, endpoints: Vec<SliceEndpoint>) -> Slice {
    let ports = vec![
        SlicePort {
            name: "admin".into(),
            port: port + 1,
            protocol: Transport::Tcp,
        },
        SlicePort {
            name: "dns".into(),
            port: 5353,
            protocol: Transport::Udp,
        },
        SlicePort {
            name: "http".into(),
            port,
            protocol: Transport::Tcp,
        },
    ];
    Slice {
        key: key(name),
        service: Some(key(service)),
        ports,
        endpoints,
    }
}

pub(crate) fn endpoint(address: &str, pod: &str) -> SliceEndpoint {
    let pod = (!pod.is_empty()).then(|| PodReference {
        key: key(pod),
        uid: "".into(),
    });
    SliceEndpoint {
        address: ip(address),
        ready: true,
        serving: true,
        terminating: false,
        node: "".into(),
        zone: "a".into(),
        node_hints: Box::default(),
        zone_hints: Box::default(),
        pod,
    }
}

pub(crate) fn pod(name: &str, addresses: &[&str]) -> Pod {
    Pod {
        key: key(name),
        uid: "".into(),
        addresses: addresses.iter().map(|text| ip(text)).collect(),
        host_network: false,
        terminating: false,
        ready: false,
        unready_by_node: false,
        created: 0,
        node: "".into(),
        zone: "".into(),
        identity: Some("spiffe://cluster.local/ns/shop/sa/web".into()),
        bypassed: Default::default(),
        restricts_udp: false,
        inbound: Default::default(),
        labels: [("app".to_owned(), "web".to_owned())].into(),
    }
}

/// A Service, its slice and a pod at each address.
pub(crate) fn service_with_pods(name: &str, ip: &str, addresses: &[&str]) -> Vec<Object> {
    let endpoints = addresses.iter().map(|address| endpoint(address, address));
    let slice = slice(name, name, 8080, endpoints.collect());
    let pods = addresses
        .iter()
        .map(|address| Object::Pod(pod(address, &[address])));
    let mut all: Vec<Object> = pods.collect();
    all.extend([Object::Service(service(name, &[ip])), Object::Slice(slice)]);
    all
}

/// The state of a destination for a client without a location.
fn state(index: &Index, destination: SocketAddr) -> State {
    state_at(index, destination, &Location::default())
}

fn state_at(index: &Index, destination: SocketAddr, client: &Location) -> State {
    index.resolve(&Resource::Destination(destination), client).1
}

fn location(node: &str, zone: &str) -> Location {
    Location {
        namespace: "".into(),
        node: node.into(),
        zone: zone.into(),
    }
}

pub(crate) fn index(objects: impl IntoIterator<Item = Object>) -> Index {
    let mut index = Index::default();
    for object in objects {
        index.apply(Change::Apply(object));
    }
    index
}

/// The answers that a change makes stale.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Stale {
    /// Destinations at these addresses, unless they are addresses of nodes.
    pub addresses: BTreeSet<IpAddr>,
    /// Destinations at these ports of nodes.
    pub node_ports: BTreeSet<u16>,
    /// Backends with these Services.
    pub backends: BTreeSet<Key>,
    /// The messages about these Services.
    pub services: BTreeSet<Key>,
    /// The configuration of these pods.
    pub pods: BTreeSet<Key>,
    /// The same, later.
    pub replicas: BTreeSet<Key>,
}

/// Applies a change. Returns the answers that it makes stale.
pub(crate) fn stale(index: &mut Index, change: Change) -> Stale {
    let mut states = Readers::default();
    for resource in resources(index, &change) {
        let (_, reads) = reads::ask(|| index.resolve(&resource, &Location::default()));
        states.set(&Arc::new(resource), reads);
    }
    let mut messages = Readers::default();
    for key in index.service_keys() {
        let (_, reads) = reads::ask(|| index.service(&key));
        messages.set(&Arc::new(key), reads);
    }
    let nodes: BTreeSet<IpAddr> = nodes(index, &change).collect();
    index.take_changed();
    index.apply(change);
    let changed = index.take_changed();
    let mut stale = Stale::default();
    for resource in states.of(&changed.reads) {
        match &*resource {
            Resource::Destination(address) if nodes.contains(&address.ip()) => {
                stale.node_ports.insert(address.port());
            }
            Resource::Destination(address) => drop(stale.addresses.insert(address.ip())),
            Resource::Backend(service, _) => drop(stale.backends.insert(service.clone())),
            Resource::Workload(pod, _) => drop(stale.pods.insert(pod.clone())),
        }
    }
    let replicas = states.of(&changed.replicas).into_iter();
    stale.replicas = replicas
        .filter_map(|resource| match &*resource {
            Resource::Workload(pod, _) => Some(pod.clone()),
            _ => None,
        })
        .collect();
    let messages = messages.of(&changed.reads).into_iter();
    stale.services = messages.map(|key| Key::clone(&key)).collect();
    stale.services.extend(changed.services);
    stale
}

fn nodes<'a>(index: &'a Index, change: &'a Change) -> impl Iterator<Item = IpAddr> + use<'a> {
    let new = match change {
        Change::Apply(Object::Node(node)) => Some(node),
        _ => None,
    };
    let nodes = index.nodes.values().chain(new);
    nodes.flat_map(|node| node.addresses.iter().copied())
}

/// All resources of the objects before a change, and of the new object.
fn resources(index: &Index, change: &Change) -> BTreeSet<Resource> {
    let (service, pod) = match change {
        Change::Apply(Object::Service(service)) => (Some(service), None),
        Change::Apply(Object::Pod(pod)) => (None, Some(pod)),
        _ => (None, None),
    };
    let mut all = BTreeSet::new();
    for service in index.services.values().chain(service) {
        let ips = service.cluster_ips.iter().chain(&service.external_ips);
        for port in service.tcp_ports() {
            let at = |ip: &IpAddr| Resource::Destination(SocketAddr::new(*ip, port.port));
            all.extend(ips.clone().map(at));
            all.insert(Resource::Backend(service.key.clone(), port.port));
        }
        let on_node = |port| move |ip| Resource::Destination(SocketAddr::new(ip, port));
        let ports = service.node_ports();
        all.extend(ports.flat_map(|port| nodes(index, change).map(on_node(port))));
    }
    for node in nodes(index, change) {
        all.insert(Resource::Destination(SocketAddr::new(node, 80)));
    }
    for pod in index.pods.values().chain(pod) {
        let at = |ip: &IpAddr| Resource::Destination(SocketAddr::new(*ip, 8080));
        all.extend(pod.own_addresses().iter().map(at));
        if pod.identity.is_some() {
            all.insert(Resource::Workload(pod.key.clone(), pod.uid.clone()));
        }
    }
    all
}

/// A description of a destination in a few words.
fn at(index: &Index, destination: &str) -> String {
    match state(index, destination.parse().unwrap()).target {
        None => "unknown".into(),
        Some(target) => {
            let endpoints: Vec<String> = target
                .endpoints
                .iter()
                .map(|endpoint| {
                    if endpoint.draining {
                        format!("draining:{}", endpoint.address)
                    } else {
                        endpoint.address.to_string()
                    }
                })
                .collect();
            format!("{:?} {} [{}]", target.kind, target.key, endpoints.join(" "))
        }
    }
}

#[test]
fn resolves_each_port_and_family_to_its_endpoints() {
    let index = index([
        Object::Service(service("web", &["10.96.0.1", "fd00::1"])),
        Object::Slice(slice("web-4", "web", 8080, vec![endpoint("10.0.0.1", "p")])),
        Object::Slice(slice("web-6", "web", 8080, vec![endpoint("fd01::1", "p")])),
        Object::Pod(pod("p", &["10.0.0.1", "fd01::1"])),
    ]);
    assert_eq!(
        at(&index, "10.96.0.1:80"),
        "Service shop/web [10.0.0.1:8080]"
    );
    assert_eq!(
        at(&index, "10.96.0.1:9000"),
        "Service shop/web [10.0.0.1:8081]"
    );
    assert_eq!(
        at(&index, "[fd00::1]:80"),
        "Service shop/web [[fd01::1]:8080]"
    );
    assert_eq!(at(&index, "[fd01::1]:1234"), "Pod shop/p [[fd01::1]:1234]");
    let target = state(&index, "10.96.0.1:80".parse().unwrap())
        .target
        .unwrap();
    assert_eq!(target.app_protocol, "http");
    assert_eq!(
        target.endpoints[0].identity.as_deref(),
        Some("spiffe://cluster.local/ns/shop/sa/web")
    );
}

#[test]
fn endpoints_have_the_opaque_ports_of_their_pod() {
    let declares = |ports: &str| {
        Object::Pod(Pod {
            inbound: Inbound {
                opaque_ports: ports.parse().unwrap(),
                ..Inbound::default()
            },
            ..pod("p", &["10.0.0.1"])
        })
    };
    let mut index = index([
        Object::Service(service("web", &["10.96.0.1"])),
        Object::Slice(slice(
            "web-1",
            "web",
            8080,
            vec![endpoint("10.0.0.1", "p"), endpoint("10.0.0.2", "")],
        )),
        declares("8080"),
    ]);
    let opaque = |index: &Index, destination: &str| {
        let endpoints = state(index, destination.parse().unwrap())
            .target
            .unwrap()
            .endpoints;
        endpoints
            .iter()
            .map(|endpoint| endpoint.opaque)
            .collect::<Vec<_>>()
    };
    assert_eq!(opaque(&index, "10.96.0.1:80"), [true, false]);
    assert_eq!(opaque(&index, "10.96.0.1:9000"), [false, false]);
    assert_eq!(
        (
            opaque(&index, "10.0.0.1:8080"),
            opaque(&index, "10.0.0.1:80")
        ),
        (vec![true], vec![false])
    );
    // Another pod of the name declares nothing: subscribers hear of it.
    let before = state(&index, "10.96.0.1:80".parse().unwrap());
    let touched = stale(&mut index, Change::Apply(declares("")));
    assert!(touched.addresses.contains(&ip("10.96.0.1")));
    let Update::Difference(delta) = state(&index, "10.96.0.1:80".parse().unwrap()).since(&before)
    else {
        panic!("a delta is enough")
    };
    assert_eq!(
        delta
            .upserted
            .iter()
            .map(|endpoint| endpoint.address.to_string())
            .collect::<Vec<_>>(),
        ["10.0.0.1:8080"]
    );
}

#[test]
fn other_ports_and_transports_of_a_cluster_ip_are_unknown_ports() {
    let index = index([
        Object::Service(service("web", &["10.96.0.1"])),
        Object::Pod(pod("node", &["10.96.0.3"])),
        Object::Service(service("api", &["10.96.0.3"])),
    ]);
    assert_eq!(
        at(&index, "10.96.0.1:81"),
        "UnknownPort([80, 9000]) shop/web []"
    );
    assert_eq!(
        at(&index, "10.96.0.1:53"),
        "UnknownPort([80, 9000]) shop/web []",
        "UDP is not redirected"
    );
    assert_eq!(
        at(&index, "10.96.0.3:81"),
        "Pod shop/node [10.96.0.3:81]",
        "a pod has all ports"
    );
    assert_eq!(at(&index, "10.96.0.2:80"), "unknown");
    assert_eq!(
        at(&index, "10.96.0.1:80"),
        "Service shop/web []",
        "known, with nobody behind it"
    );
}

#[test]
fn resolves_named_target_ports_per_slice() {
    let index = index([
        Object::Service(service("web", &["10.96.0.1"])),
        Object::Slice(slice(
            "web-old",
            "web",
            8080,
            vec![endpoint("10.0.0.1", "")],
        )),
        Object::Slice(slice(
            "web-new",
            "web",
            9090,
            vec![endpoint("10.0.0.2", "")],
        )),
    ]);
    assert_eq!(
        at(&index, "10.96.0.1:80"),
        "Service shop/web [10.0.0.1:8080 10.0.0.2:9090]"
    );
}

#[test]
fn lists_ready_endpoints_and_draining_ones_apart() {
    let mut unready = endpoint("10.0.0.2", "");
    (unready.ready, unready.serving) = (false, false);
    let mut leaving = endpoint("10.0.0.3", "");
    (leaving.ready, leaving.terminating) = (false, true);
    let mut gone = leaving.clone();
    (gone.address, gone.serving) = (ip("10.0.0.4"), false);
    let all = vec![endpoint("10.0.0.1", ""), unready, leaving, gone];
    let slice = slice("web-1", "web", 8080, all);
    let web = service("web", &["10.96.0.1"]);
    let index = index([Object::Service(web), Object::Slice(slice)]);
    assert_eq!(
        at(&index, "10.96.0.1:80"),
        "Service shop/web [10.0.0.1:8080 draining:10.0.0.3:8080]"
    );
}

#[test]
fn published_endpoints_are_ready_in_every_condition() {
    let mut unready = endpoint("10.0.0.2", "");
    (unready.ready, unready.serving) = (false, false);
    let mut leaving = endpoint("10.0.0.3", "");
    leaving.terminating = true;
    let mut web = service("web", &["10.96.0.1"]);
    web.publish_not_ready = true;
    let slice = slice("web-1", "web", 8080, vec![unready, leaving]);
    let index = index([Object::Service(web), Object::Slice(slice)]);
    assert_eq!(
        at(&index, "10.96.0.1:80"),
        "Service shop/web [10.0.0.2:8080 10.0.0.3:8080]"
    );
    let view = index.service(&key("web")).unwrap();
    assert!(view.endpoints.iter().all(|endpoint| endpoint.ready));
}

#[test]
fn deleted_pod_drains_before_the_slices_change() {
    let mut going = pod("p", &["10.0.0.1"]);
    going.terminating = true;
    let index = index([
        Object::Service(service("web", &["10.96.0.1"])),
        Object::Slice(slice("web-1", "web", 8080, vec![endpoint("10.0.0.1", "p")])),
        Object::Pod(going),
    ]);
    assert_eq!(
        at(&index, "10.96.0.1:80"),
        "Service shop/web [draining:10.0.0.1:8080]"
    );
    assert_eq!(
        at(&index, "10.0.0.1:80"),
        "Pod shop/p [10.0.0.1:80]",
        "by its own address it is still itself"
    );
}

#[test]
fn services_with_names_that_begin_with_a_digit_are_destinations_and_backends() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/features");
    let text = std::fs::read_to_string(format!("{folder}/service-name.yaml")).unwrap();
    let mut objects = crate::catalog::parse(&text, "cluster.local")
        .unwrap()
        .objects;
    for (last, name) in ["1server", "2"].into_iter().enumerate() {
        let Object::Service(service) = &mut objects[last] else {
            panic!("a Service")
        };
        service.cluster_ips = vec![ip(&format!("10.96.0.{last}"))];
        service.key.namespace = "shop".into();
        let mut listed = slice(name, name, 8080, vec![endpoint("10.0.0.1", "")]);
        listed.ports[0].name.clear();
        objects.push(Object::Slice(listed));
        let index = index(objects.clone());
        let expected = format!("Service shop/{name} [10.0.0.1:8081]");
        assert_eq!(at(&index, &format!("10.96.0.{last}:80")), expected);
        let backend = Resource::Backend(key(name), 80);
        let (_, backend) = index.resolve(&backend, &Location::default());
        assert!(backend.target.is_some(), "{name}");
    }
}

/// Kubernetes marks the pods of a node unready whose kubelet is silent.
#[test]
fn endpoints_are_a_last_resort_if_their_node_alone_made_them_unready() {
    type Edit = fn(&mut Pod);
    let pods: [(&str, Edit); 5] = [
        ("by its node", |_| {}),
        ("by its containers or a readiness gate", |pod| {
            pod.unready_by_node = false;
        }),
        ("while it is deleted", |pod| pod.terminating = true),
        ("on a ready node", |pod| pod.node = "n2".into()),
        ("on an unknown node", |pod| pod.node = "n3".into()),
    ];
    let on = |name: &str, unready| {
        Object::Node(Node {
            key: Key::new("", name),
            addresses: vec![],
            unready,
            zone: "".into(),
        })
    };
    for (at, (name, change)) in pods.into_iter().enumerate() {
        let mut unready = Pod {
            node: "n1".into(),
            unready_by_node: true,
            ..pod("p", &["10.0.0.1"])
        };
        change(&mut unready);
        let mut listed = endpoint("10.0.0.1", "p");
        (listed.ready, listed.serving) = (false, false);
        let objects = [
            Object::Service(service("web", &["10.96.0.1"])),
            Object::Slice(slice("web-1", "web", 8080, vec![listed])),
            Object::Pod(unready),
            on("n1", true),
            on("n2", false),
        ];
        let expected = if at == 0 { "draining:1" } else { "" };
        let mut index = index(objects.clone());
        assert_eq!(
            endpoints_for(&index, &location("", "")).1,
            expected,
            "{name}"
        );
        let destination = Resource::Destination("10.96.0.1:80".parse().unwrap());
        let (_, state) = index.resolve(&destination, &location("", ""));
        let endpoints = state.target.unwrap().endpoints;
        assert!(
            endpoints
                .iter()
                .all(|one| one.node_unready && one.identity.is_some())
        );
        // Whatever arrives last.
        for object in objects {
            let key = object.key().clone();
            index.apply(Change::Delete(object.kind(), key));
            endpoints_for_any(&index);
            index.apply(Change::Apply(object));
            assert_eq!(endpoints_for_any(&index), expected, "{name}");
        }
        let touched = stale(&mut index, Change::Apply(on("n1", false)));
        let is_touched = touched.addresses.contains(&ip("10.96.0.1"));
        assert_eq!(
            (endpoints_for_any(&index), is_touched),
            (String::new(), at == 0)
        );
    }
}

/// The endpoints at 10.96.0.1:80, or nothing without the Service.
fn endpoints_for_any(index: &Index) -> String {
    let destination = Resource::Destination("10.96.0.1:80".parse().unwrap());
    let (_, state) = index.resolve(&destination, &location("", ""));
    state
        .target
        .map_or_else(String::new, |_| endpoints_for(index, &location("", "")).1)
}

/// The endpoints at 10.96.0.1:80 for a client, by the last part of their address.
fn endpoints_for(index: &Index, client: &Location) -> (Area, String) {
    let destination = Resource::Destination("10.96.0.1:80".parse().unwrap());
    let (scope, state) = index.resolve(&destination, client);
    let endpoints = state.target.unwrap().endpoints;
    let last = |endpoint: &Endpoint| {
        let address = endpoint.address.ip().to_string();
        let last = address.rsplit('.').next().unwrap().to_owned();
        if endpoint.draining {
            format!("draining:{last}")
        } else {
            last
        }
    };
    let endpoints: Vec<String> = endpoints.iter().map(last).collect();
    (scope.area, endpoints.join(" "))
}

#[test]
fn internal_traffic_policy_local_selects_the_endpoints_of_the_clients_node() {
    let on = |address: &str, node: &str| {
        let mut endpoint = endpoint(address, "");
        endpoint.node = node.into();
        endpoint
    };
    let mut leaving = on("10.0.0.3", "n2");
    (leaving.ready, leaving.terminating) = (false, true);
    let all = vec![on("10.0.0.1", "n1"), on("10.0.0.2", ""), leaving];
    let mut web = service("web", &["10.96.0.1"]);
    web.local_only = true;
    let index = index([
        Object::Service(web),
        Object::Slice(slice("web-1", "web", 8080, all)),
    ]);
    for (node, expected) in [("n1", "1"), ("n2", "draining:3"), ("n3", ""), ("", "2")] {
        let found = endpoints_for(&index, &location(node, "a"));
        assert_eq!(found, (Area::Node, expected.to_owned()), "{node:?}");
    }
}

#[test]
fn hints_select_endpoints_for_the_zone_or_the_node_of_the_client() {
    let hinted = |address: &str, zones: &[&str], nodes: &[&str]| {
        let mut endpoint = endpoint(address, "");
        endpoint.zone_hints = zones.iter().map(|zone| (*zone).into()).collect();
        endpoint.node_hints = nodes.iter().map(|node| (*node).into()).collect();
        endpoint
    };
    let behind = |all: Vec<SliceEndpoint>| {
        index([
            Object::Service(service("web", &["10.96.0.1"])),
            Object::Slice(slice("web-1", "web", 8080, all)),
        ])
    };
    let found = |index: &Index, node: &str, zone: &str| endpoints_for(index, &location(node, zone));
    let one = hinted("10.0.0.1", &["a"], &[]);
    let other = hinted("10.0.0.2", &["b", "c"], &[]);
    let mut leaving = endpoint("10.0.0.3", "");
    (leaving.ready, leaving.terminating) = (false, true);
    let zones = behind(vec![one.clone(), other.clone(), leaving.clone()]);
    assert_eq!(found(&zones, "n", "a"), (Area::Zone, "1".into()));
    assert_eq!(found(&zones, "n", "c"), (Area::Zone, "2".into()));
    // No endpoint is for the client, or its zone is unknown.
    let all = (Area::Zone, "1 2 draining:3".to_owned());
    assert_eq!(found(&zones, "n", "d"), all);
    assert_eq!(found(&zones, "n", ""), all);
    // One endpoint has no hint.
    let some = behind(vec![one.clone(), endpoint("10.0.0.4", "")]);
    assert_eq!(found(&some, "n", "a"), (Area::Cluster, "1 4".into()));
    let none = behind(vec![leaving]);
    assert_eq!(found(&none, "n", "a"), (Area::Cluster, "draining:3".into()));
    // Hints for nodes precede those for zones.
    let nodes = behind(vec![
        hinted("10.0.0.1", &["a"], &["n1"]),
        hinted("10.0.0.2", &["a"], &["n2"]),
        hinted("10.0.0.3", &["b"], &["n3"]),
    ]);
    assert_eq!(found(&nodes, "n2", "a"), (Area::Node, "2".into()));
    assert_eq!(found(&nodes, "n4", "a"), (Area::Node, "1 2".into()));
}

#[test]
fn location_of_a_pod_has_the_zone_of_its_node() {
    let on_node = |uid: &str| Pod {
        uid: uid.into(),
        node: "n1".into(),
        zone: "label".into(),
        ..pod("p", &[])
    };
    let mut index = index([Object::Pod(on_node("1"))]);
    let location = |node, zone| Location {
        namespace: "shop".into(),
        ..location(node, zone)
    };
    assert_eq!(index.location(&key("p"), "1"), location("n1", "label"));
    assert_eq!(index.location(&key("p"), "0"), location("", ""));
    let node = Object::Node(Node {
        key: Key::new("", "n1"),
        addresses: vec![],
        unready: false,
        zone: "a".into(),
    });
    let (_, reads) = reads::ask(|| index.location(&key("p"), "1"));
    let mut locations = Readers::default();
    locations.set(&Arc::new("p"), reads);
    index.take_changed();
    index.apply(Change::Apply(node));
    assert_eq!(locations.of(&index.take_changed().reads).len(), 1);
    assert_eq!(index.location(&key("p"), "1"), location("n1", "a"));
}

pub(crate) fn node(name: &str, addresses: &[&str]) -> Object {
    Object::Node(Node {
        key: Key::new("", name),
        addresses: addresses.iter().map(|text| ip(text)).collect(),
        unready: false,
        zone: "".into(),
    })
}

#[test]
fn external_addresses_are_destinations_unless_they_are_others() {
    let outside = |name: &str, created, addresses: &[&str]| {
        let mut service = service(name, &[]);
        service.external_ips = addresses.iter().map(|text| ip(text)).collect();
        service.created = created;
        // Policies for cluster IPs and for other nodes do not apply.
        (service.local_only, service.external_local) = (true, true);
        Object::Service(service)
    };
    let all = ["192.0.2.1", "10.96.0.1", "10.0.0.1", "10.1.0.1"];
    let mut index = index([
        outside("young", 2, &["192.0.2.1"]),
        outside("web", 1, &all),
        Object::Slice(slice("web-1", "web", 8080, vec![endpoint("10.0.0.1", "")])),
        Object::Service(service("api", &["10.96.0.1"])),
        Object::Pod(pod("p", &["10.0.0.1"])),
        node("n1", &["10.1.0.1"]),
    ]);
    assert_eq!(
        at(&index, "192.0.2.1:80"),
        "Service shop/web [10.0.0.1:8080]"
    );
    assert_eq!(at(&index, "192.0.2.1:81"), "unknown", "no such port");
    assert_eq!(at(&index, "10.96.0.1:80"), "Service shop/api []");
    assert_eq!(at(&index, "10.0.0.1:80"), "Pod shop/p [10.0.0.1:80]");
    assert_eq!(at(&index, "10.1.0.1:80"), "unknown", "a node");
    let gone = Change::Delete(Kind::Service, key("web"));
    let touched = stale(&mut index, gone);
    assert!(touched.addresses.contains(&ip("192.0.2.1")));
    assert_eq!(at(&index, "192.0.2.1:80"), "Service shop/young []");
}

#[test]
fn node_ports_are_destinations_at_the_addresses_of_nodes() {
    let on_node = |address: &str, node: &str| {
        let mut endpoint = endpoint(address, "");
        endpoint.node = node.into();
        endpoint
    };
    let endpoints = vec![on_node("10.0.0.1", "n1"), on_node("10.0.0.2", "n2")];
    let mut web = service("web", &["10.96.0.1"]);
    web.ports[0].node_port = Some(30080);
    let mut index = index([
        Object::Service(web.clone()),
        Object::Slice(slice("web-1", "web", 8080, endpoints)),
        node("n1", &["10.1.0.1", "fd02::1"]),
    ]);
    let both = "Service shop/web [10.0.0.1:8080 10.0.0.2:8080]";
    assert_eq!(at(&index, "10.1.0.1:30080"), both);
    assert_eq!(at(&index, "[fd02::1]:30080"), "Service shop/web []");
    assert_eq!(at(&index, "10.1.0.1:80"), "unknown");
    assert_eq!(at(&index, "10.1.0.2:30080"), "unknown", "not a node");
    // Another node forwards only to its own endpoints, the client's node to all.
    web.external_local = true;
    let local = Change::Apply(Object::Service(web));
    let touched = stale(&mut index, local);
    assert!(touched.node_ports.contains(&30080));
    let from = |node: &str| {
        let destination = Resource::Destination("10.1.0.1:30080".parse().unwrap());
        let (scope, state) = index.resolve(&destination, &location(node, ""));
        assert_eq!(scope.area, Area::Node);
        state.target.unwrap().endpoints.len()
    };
    assert_eq!((from("n1"), from("n2"), from("")), (2, 1, 1));
}

#[test]
fn endpoint_of_an_unknown_pod_is_not_usable() {
    let mut index = index([
        Object::Service(service("web", &["10.96.0.1"])),
        Object::Slice(slice("web-1", "web", 8080, vec![endpoint("10.0.0.1", "p")])),
    ]);
    assert_eq!(at(&index, "10.96.0.1:80"), "Service shop/web []");
    let touched = stale(
        &mut index,
        Change::Apply(Object::Pod(pod("p", &["10.0.0.1"]))),
    );
    assert!(touched.addresses.contains(&ip("10.96.0.1")));
    assert_eq!(
        at(&index, "10.96.0.1:80"),
        "Service shop/web [10.0.0.1:8080]"
    );
    index.apply(Change::Delete(Kind::Pod, key("p")));
    assert_eq!(at(&index, "10.96.0.1:80"), "Service shop/web []");
}

#[test]
fn ignores_slices_of_a_predecessor_with_the_same_name() {
    let mut stale = endpoint("10.0.0.1", "db-0");
    stale.pod = Some(PodReference {
        key: key("db-0"),
        uid: "old".into(),
    });
    let mut successor = pod("db-0", &["10.0.0.2"]);
    successor.uid = "new".into();
    let index = index([
        Object::Service(service("db", &["10.96.0.1"])),
        Object::Slice(slice("db-1", "db", 8080, vec![stale])),
        Object::Pod(successor),
    ]);
    assert_eq!(at(&index, "10.96.0.1:80"), "Service shop/db []");
}

#[test]
fn merges_endpoints_of_two_slices_and_their_termination() {
    let mut moved = slice(
        "web-2",
        "web",
        8080,
        vec![endpoint("10.0.0.1", "p"), endpoint("10.0.0.2", "")],
    );
    let objects = |moved: &Slice| {
        index([
            Object::Service(service("web", &["10.96.0.1"])),
            Object::Slice(slice("web-1", "web", 8080, vec![endpoint("10.0.0.1", "p")])),
            Object::Slice(moved.clone()),
            Object::Pod(pod("p", &["10.0.0.1"])),
        ])
    };
    assert_eq!(
        at(&objects(&moved), "10.96.0.1:80"),
        "Service shop/web [10.0.0.1:8080 10.0.0.2:8080]"
    );
    moved.endpoints[0].terminating = true;
    assert_eq!(
        at(&objects(&moved), "10.96.0.1:80"),
        "Service shop/web [draining:10.0.0.1:8080 10.0.0.2:8080]"
    );
}

#[test]
fn address_that_moves_to_a_new_pod_stays_usable() {
    let mut leaving = endpoint("10.0.0.1", "old");
    leaving.terminating = true;
    leaving.ready = false;
    let index = index([
        Object::Service(service("web", &["10.96.0.1"])),
        Object::Slice(slice("web-1", "web", 8080, vec![leaving])),
        Object::Slice(slice(
            "web-2",
            "web",
            8080,
            vec![endpoint("10.0.0.1", "new")],
        )),
        Object::Pod(pod("new", &["10.0.0.1"])),
    ]);
    let target = state(&index, "10.96.0.1:80".parse().unwrap())
        .target
        .unwrap();
    assert_eq!(target.endpoints.len(), 1);
    assert_eq!(target.endpoints[0].pod, Some(key("new")));
}

#[test]
fn prefers_running_then_younger_pod_at_an_address() {
    let (mut old, mut new) = (pod("old", &["10.0.0.1"]), pod("new", &["10.0.0.1"]));
    (old.created, new.created) = (2, 1);
    assert_eq!(
        at(
            &index([Object::Pod(old.clone()), Object::Pod(new.clone())]),
            "10.0.0.1:80"
        ),
        "Pod shop/old [10.0.0.1:80]"
    );
    old.terminating = true;
    assert_eq!(
        at(&index([Object::Pod(old), Object::Pod(new)]), "10.0.0.1:80"),
        "Pod shop/new [10.0.0.1:80]"
    );
}

#[test]
fn address_of_a_finished_pod_belongs_to_the_next_pod() {
    let mut index = index([Object::Pod(pod("job", &["10.0.0.1"]))]);
    // A finished pod is converted to one without addresses.
    index.apply(Change::Apply(Object::Pod(pod("job", &[]))));
    assert_eq!(at(&index, "10.0.0.1:80"), "unknown");
    index.apply(Change::Apply(Object::Pod(pod("web", &["10.0.0.1"]))));
    assert_eq!(at(&index, "10.0.0.1:80"), "Pod shop/web [10.0.0.1:80]");
}

#[test]
fn endpoint_without_a_pod_has_the_identity_but_not_the_policy_of_the_pod_at_its_address() {
    let holder = |addresses: &[&str]| {
        Object::Pod(Pod {
            inbound: Inbound {
                opaque_ports: "8080".parse().unwrap(),
                ..Inbound::default()
            },
            bypassed: "8081".parse().unwrap(),
            ..pod("p", addresses)
        })
    };
    let mut index = index([
        Object::Service(service("web", &["10.96.0.1"])),
        Object::Slice(slice("web-1", "web", 8080, vec![endpoint("10.0.0.1", "")])),
        holder(&["10.0.0.1"]),
    ]);
    let only = |index: &Index, destination: &str| {
        let target = state(index, destination.parse().unwrap()).target.unwrap();
        let [endpoint] = &target.endpoints[..] else {
            panic!("one endpoint")
        };
        endpoint.clone()
    };
    let endpoint = only(&index, "10.96.0.1:80");
    assert!(endpoint.identity.is_some());
    assert_eq!((endpoint.pod, endpoint.opaque), (None, false));
    assert_eq!(only(&index, "10.96.0.1:9000").identity, None, "bypassed");
    let view = index.service(&key("web")).unwrap();
    assert!(!view.endpoints[0].identity.is_empty());
    // The pod loses the address, as a finished one does.
    let gone = Change::Apply(holder(&[]));
    let touched = stale(&mut index, gone);
    assert!(touched.addresses.contains(&ip("10.96.0.1")));
    assert_eq!(only(&index, "10.96.0.1:80").identity, None);
}

#[test]
fn pod_has_the_protocol_of_headless_services_that_select_it() {
    let declares = |name: &str, protocol: &str| {
        let mut service = service(name, &[]);
        service.ports[0].app_protocol = protocol.into();
        service
    };
    let behind = |services: &[Service]| {
        let mut all = vec![Object::Pod(pod("p", &["10.0.0.1"]))];
        for service in services {
            let name = &service.key.name;
            let mut slice = slice(name, name, 8080, vec![endpoint("10.0.0.1", "p")]);
            slice.service = Some(service.key.clone());
            all.extend([Object::Service(service.clone()), Object::Slice(slice)]);
        }
        index(all)
    };
    let protocol = |index: &Index, destination: &str| {
        let target = state(index, destination.parse().unwrap()).target;
        target.unwrap().app_protocol
    };
    let grpc = declares("grpc", "grpc");
    let mut index = behind(std::slice::from_ref(&grpc));
    assert_eq!(protocol(&index, "10.0.0.1:8080"), "grpc");
    assert_eq!(protocol(&index, "10.0.0.1:8081"), "", "another port");
    let changed = Object::Service(declares("grpc", "redis"));
    let touched = stale(&mut index, Change::Apply(changed));
    assert!(touched.addresses.contains(&ip("10.0.0.1")));
    assert_eq!(protocol(&index, "10.0.0.1:8080"), "redis");

    let both = behind(&[grpc.clone(), declares("redis", "redis")]);
    assert_eq!(protocol(&both, "10.0.0.1:8080"), "", "they disagree");
    let mut other = grpc.clone();
    other.selector.insert("app".into(), "other".into());
    assert_eq!(protocol(&behind(&[other]), "10.0.0.1:8080"), "");
    let mut manual = grpc.clone();
    manual.selector.clear();
    assert_eq!(protocol(&behind(&[manual]), "10.0.0.1:8080"), "");
    let mut foreign = grpc.clone();
    foreign.key = Key::new("elsewhere", "grpc");
    assert_eq!(protocol(&behind(&[foreign]), "10.0.0.1:8080"), "");
    let mut balanced = grpc;
    balanced.is_headless = false;
    assert_eq!(protocol(&behind(&[balanced]), "10.0.0.1:8080"), "");
}

#[test]
fn view_of_an_endpoint_has_few_ports() {
    let ports = (1..=1000).map(|port| SlicePort {
        name: format!("p{port:04}"),
        port,
        protocol: Transport::Tcp,
    });
    let many = Slice {
        ports: ports.collect(),
        ..slice("web", "web", 80, vec![endpoint("10.0.0.9", "")])
    };
    let web = service("web", &["10.96.0.1"]);
    let index = index([Object::Service(web), Object::Slice(many)]);
    let view = index.service(&key("web")).unwrap();
    assert_eq!(view.endpoints[0].ports.len(), 32);
}

#[test]
fn view_contains_all_endpoints_and_merges_address_families() {
    let mut unready = endpoint("10.0.0.9", "");
    unready.ready = false;
    let index = index([
        Object::Service(service("web", &["10.96.0.1", "fd00::1"])),
        Object::Slice(slice(
            "web-4",
            "web",
            8080,
            vec![endpoint("10.0.0.1", "p"), unready],
        )),
        Object::Slice(slice(
            "web-6",
            "web",
            8080,
            vec![endpoint("fd01::1", "p"), endpoint("fd01::2", "unheard-of")],
        )),
        Object::Pod(pod("p", &["10.0.0.1", "fd01::1"])),
    ]);
    let view = index.service(&key("web")).unwrap();
    assert_eq!(view.endpoints.len(), 3);
    let joined = view
        .endpoints
        .iter()
        .find(|endpoint| &*endpoint.pod_name == "p")
        .unwrap();
    assert_eq!(joined.addresses, ["10.0.0.1", "fd01::1"]);
    assert_eq!(joined.ports["http"], 8080);
    let identity = "spiffe://cluster.local/ns/shop/sa/web";
    assert_eq!(joined.identity, identity);
    assert_eq!(
        view.endpoints
            .iter()
            .filter(|endpoint| endpoint.ready)
            .collect::<Vec<_>>(),
        [joined]
    );
    assert_eq!(index.service(&key("nobody")), None);
}

#[test]
fn unchanged_object_affects_nothing() {
    let objects = [
        Object::Service(service("web", &["10.96.0.1"])),
        Object::Pod(pod("p", &["10.0.0.1"])),
    ];
    let mut index = index(objects.clone());
    let never_there = Change::Delete(Kind::Slice, key("never-there"));
    for change in objects.map(Change::Apply).into_iter().chain([never_there]) {
        index.take_changed();
        index.apply(change);
        assert_eq!(index.take_changed(), Changed::default());
    }
}

#[test]
fn slice_that_changes_its_service_affects_both() {
    let mut index = index([
        Object::Service(service("a", &["10.96.0.1"])),
        Object::Service(service("b", &["10.96.0.2"])),
        Object::Slice(slice("s", "a", 8080, vec![endpoint("10.0.0.1", "")])),
    ]);
    let touched = stale(
        &mut index,
        Change::Apply(Object::Slice(slice(
            "s",
            "b",
            8080,
            vec![endpoint("10.0.0.1", "")],
        ))),
    );
    assert_eq!(touched.services, [key("a"), key("b")].into());
    assert_eq!(at(&index, "10.96.0.1:80"), "Service shop/a []");
    assert_eq!(at(&index, "10.96.0.2:80"), "Service shop/b [10.0.0.1:8080]");
}

/// Tenants write slices that name pods of others, and as many as they like.
#[test]
fn services_of_a_pod_are_those_of_its_namespace_and_bounded() {
    let of = |namespace: &str, number: usize| {
        let name = format!("{namespace}-{number:03}");
        let mut slice = slice(&name, &name, 8080, vec![endpoint("10.0.0.1", "p")]);
        slice.key = Key::new(namespace, &name);
        slice.service = Some(slice.key.clone());
        Object::Slice(slice)
    };
    let foreign = ["attacker", "zz"].into_iter();
    let foreign = foreign.flat_map(|namespace| (0..200).map(move |number| (namespace, number)));
    let own = (0..200).map(|number| ("shop", number));
    let slices = foreign
        .chain(own)
        .map(|(namespace, number)| of(namespace, number));
    let index = index(
        [Object::Pod(pod("p", &["10.0.0.1"]))]
            .into_iter()
            .chain(slices),
    );
    let pod = key("p");
    let services = index.services_of(&pod);
    let expected: Vec<String> = (0..64).map(|number| format!("shop-{number:03}")).collect();
    assert_eq!(services.into_iter().collect::<Vec<_>>(), expected);
    assert_eq!(index.slices_with(&pod).count(), 200);
}

/// A small world in which everything collides: names, addresses, references.
pub(crate) struct Chance(pub(crate) fastrand::Rng);

impl Chance {
    pub(crate) const SERVICES: [&str; 3] = ["a", "b", "c"];
    const SLICES: [&str; 4] = ["s1", "s2", "s3", "s4"];
    const PODS: [&str; 4] = ["p1", "p2", "p3", "p4"];
    const NODES: [&str; 2] = ["n1", "n2"];
    const NAMESPACES: [&str; 2] = ["shop", "other"];
    const CLUSTER_IPS: [&str; 3] = ["10.96.0.1", "10.96.0.2", "fd00::1"];
    const ADDRESSES: [&str; 4] = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "fd01::1"];

    fn one<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.0.usize(..from.len())]
    }

    fn some<'a>(&mut self, from: &[&'a str]) -> Vec<&'a str> {
        from.iter().copied().filter(|_| self.0.bool()).collect()
    }

    fn endpoint(&mut self) -> SliceEndpoint {
        let pod = if self.0.bool() {
            self.one(&Self::PODS)
        } else {
            ""
        };
        let mut endpoint = endpoint(self.one(&Self::ADDRESSES), pod);
        endpoint.ready = self.0.u8(..4) > 0;
        endpoint.serving = self.0.u8(..4) > 0;
        endpoint.terminating = self.0.u8(..4) == 0;
        endpoint.zone = self.one(&["a", "b"]).into();
        endpoint.node = self.one(&Self::NODES).into();
        if self.0.bool() {
            endpoint.zone_hints = [endpoint.zone.clone()].into();
        }
        if self.0.u8(..4) == 0 {
            endpoint.node_hints = [endpoint.node.clone()].into();
        }
        endpoint
    }

    pub(crate) fn object(&mut self, kind: Kind) -> Object {
        match kind {
            Kind::Service => {
                let ips = self.some(&Self::CLUSTER_IPS);
                let mut service = service(self.one(&Self::SERVICES), &ips);
                service.publish_not_ready = self.0.bool();
                service.local_only = self.0.u8(..4) == 0;
                service.external_local = self.0.bool();
                service.session_affinity = self.0.u32(..2);
                service.created = self.0.i64(0..2);
                let outside = [&Self::CLUSTER_IPS[..], &Self::ADDRESSES, &["192.0.2.1"]].concat();
                service.external_ips = self.some(&outside).into_iter().map(ip).collect();
                service.ports[0].node_port = self.0.bool().then_some(30080);
                if self.0.u8(..4) == 0 {
                    let mut ports = vec![service.ports[0].clone(); excess::MAX_PORTS + 1];
                    (ports[1000].port, ports[1000].node_port) = (30080, Some(30080));
                    service.excess = excess::split(ports).1;
                }
                service.canary = (self.0.u8(..3) == 0).then(|| {
                    let weight = Ok([10, 60, 100][self.0.usize(..3)]);
                    Box::new(canary(self.one(&Self::SERVICES), weight))
                });
                Object::Service(service)
            }
            Kind::Slice => {
                let endpoints = (0..self.0.usize(..4)).map(|_| self.endpoint()).collect();
                Object::Slice(slice(
                    self.one(&Self::SLICES),
                    self.one(&Self::SERVICES),
                    8080 + self.0.u16(..2),
                    endpoints,
                ))
            }
            Kind::Pod => {
                let addresses = self.some(&Self::ADDRESSES);
                let mut pod = pod(self.one(&Self::PODS), &addresses);
                pod.terminating = self.0.u8(..4) == 0;
                pod.created = self.0.i64(0..3);
                pod.identity = if self.0.bool() { pod.identity } else { None };
                if self.0.u8(..4) == 0 {
                    pod.labels.clear();
                }
                pod.node = self.one(&Self::NODES).into();
                pod.unready_by_node = self.0.bool();
                Object::Pod(pod)
            }
            Kind::Node => Object::Node(Node {
                key: Key::new("", self.one(&Self::NODES)),
                addresses: self.some(&Self::ADDRESSES).into_iter().map(ip).collect(),
                unready: self.0.bool(),
                zone: self.one(&["a", "b"]).into(),
            }),
            Kind::HttpRoute | Kind::GrpcRoute | Kind::TcpRoute => Object::Route(self.route(kind)),
            Kind::TrafficSplit => {
                let groups = self.some(&["g1", "g2"]).into_iter();
                let groups = groups.map(|name| json!({"kind": "HTTPRouteGroup", "name": name}));
                let groups: Vec<Value> = groups.collect();
                let backends = (0..2).map(|_| {
                    json!({
                        "service": self.one(&["a", "b", "c", "missing"]),
                        "weight": self.0.u8(..3),
                    })
                });
                let backends: Vec<Value> = backends.collect();
                let service = self.one(&Self::SERVICES);
                let spec = json!({"service": service, "backends": backends, "matches": groups});
                let spec = spec.to_string();
                Object::Split(split::split(self.meta(kind, &spec), &spec).unwrap())
            }
            Kind::RouteGroup => {
                let path = self.one(&["/a", "/b.*", "("]);
                let spec = json!({"matches": [{"name": "m", "pathRegex": path, "methods": ["GET", "PUT"]}]}).to_string();
                let key = Key::new(self.one(&Self::NAMESPACES), self.one(&["g1", "g2"]));
                let meta = self.meta(kind, &spec);
                Object::RouteGroup(split::group(Meta { key, ..meta }, &spec).unwrap())
            }
            Kind::Grant => Object::Grant(Grant {
                key: Key::new(self.one(&Self::NAMESPACES), self.one(&["g1", "g2"])),
                from: vec![(Kind::HttpRoute, self.one(&Self::NAMESPACES).into())],
                to: vec![self.0.bool().then(|| self.one(&Self::SERVICES).into())],
            }),
            Kind::Backend => {
                let spec = self.host().to_string();
                let key = Key::new(self.one(&Self::NAMESPACES), self.one(&["a", "b"]));
                let meta = self.meta(kind, &spec);
                Object::Backend(backend(Meta { key, ..meta }, &spec, "cluster.local"))
            }
            // The names are the same as for policies with targets.
            Kind::TrafficPolicy if self.0.u8(..4) == 0 => {
                let spec = json!({"backend": self.host()}).to_string();
                let key = Key::new(self.one(&Self::NAMESPACES), self.one(&["a", "p1"]));
                let meta = self.meta(kind, &spec);
                Object::Backend(backend(Meta { key, ..meta }, &spec, "cluster.local"))
            }
            Kind::TrafficPolicy => Object::Policy(self.policy()),
            Kind::Authorization => Object::Authorization(self.authorization()),
            Kind::TrafficTarget => {
                let rules = self.some(&["g1", "g2"]).into_iter().map(|name| {
                    let kind = self.one(&["HTTPRouteGroup", "TCPRoute"]);
                    json!({"kind": kind, "name": name})
                });
                let rules: Vec<Value> = rules.collect();
                let namespace = self.one(&Self::NAMESPACES);
                let subject = json!({"kind": "ServiceAccount", "name": "web"});
                let spec = json!({"destination": subject, "sources": [subject], "rules": rules})
                    .to_string();
                let key = Key::new(namespace, self.one(&["t1", "t2"]));
                let meta = self.meta(kind, &spec);
                let meta = Meta { key, ..meta };
                Object::TrafficTarget(traffic_target::target(meta, &spec, "cluster.local"))
            }
            Kind::TcpGroup => {
                let spec = json!({"matches": {"ports": [self.one(&["80", "81"]).parse::<u16>().unwrap()]}}).to_string();
                let key = Key::new(self.one(&Self::NAMESPACES), self.one(&["g1", "g2"]));
                let meta = self.meta(kind, &spec);
                Object::TcpGroup(traffic_target::tcp(Meta { key, ..meta }, &spec))
            }
            Kind::Mesh => {
                let controller = self.one(&["diy-service-mesh.dev/controller", "example.net/x"]);
                let spec = json!({"controllerName": controller}).to_string();
                Object::Mesh(Mesh::new(self.meta(kind, &spec), &spec))
            }
        }
    }

    /// The fields of a host, some of them invalid.
    fn host(&mut self) -> Value {
        let host = self.one(&["a.example.com", "b.example.com", "invalid"]);
        let port = json!({"port": 80 + self.0.u8(..2)});
        json!({"type": "ExternalHostname", "externalHostname": {"hostname": host}, "port": port})
    }

    /// A policy of either namespace, some of them invalid.
    fn policy(&mut self) -> Policy {
        let namespace = self.one(&Self::NAMESPACES);
        let targets = (0..2).map(|_| match self.0.u8(..4) {
            0 => json!({"kind": "Namespace", "name": namespace}),
            _ => json!({"kind": "Service", "name": self.one(&Self::SERVICES)}),
        });
        let mut spec = json!({"targetRefs": targets.collect::<Vec<_>>()});
        for (section, value) in [
            ("connections", json!({"maxRequests": self.0.u32(..3)})),
            ("timeouts", json!({"request": self.one(&["1s", "2s"])})),
            (
                "retry",
                json!({"attempts": self.0.u32(..3), "budget": {"percent": 1}}),
            ),
            (
                "faults",
                json!([{"abort": {"status": 500 + self.0.u32(..2)}}]),
            ),
        ] {
            if self.0.bool() {
                spec[section] = value;
            }
        }
        let key = Key::new(namespace, self.one(&["p1", "p2"]));
        let spec = spec.to_string();
        let meta = self.meta(Kind::TrafficPolicy, &spec);
        policy::parse::policy(Meta { key, ..meta }, &spec).unwrap()
    }

    /// An AuthorizationPolicy of either namespace, some of them invalid.
    fn authorization(&mut self) -> AuthorizationPolicy {
        let target = match self.0.u8(..3) {
            0 => json!({"kind": "Pod", "selector": {"matchLabels": {"app": "web"}}}),
            1 => json!({"kind": "Service", "name": self.one(&Self::SERVICES)}),
            _ => json!({"kind": "ServiceAccount", "name": "web"}),
        };
        let action = self.one(&["ALLOW", "DENY", "NONE"]);
        let direction = self.one(&["Inbound", "Outbound", "Neither"]);
        let spec = json!({
            "targetRefs": [target], "direction": direction, "action": action, "rules": [{}],
        });
        let key = Key::new(self.one(&Self::NAMESPACES), self.one(&["p1", "p2"]));
        let spec = spec.to_string();
        let meta = self.meta(Kind::Authorization, &spec);
        authorization::parse::policy(Meta { key, ..meta }, &spec, NULL, "cluster.local")
    }

    fn meta(&mut self, kind: Kind, spec: &str) -> Meta {
        let key = Key::new(self.one(&Self::NAMESPACES), self.one(&["r1", "r2", "r3"]));
        let state = (self.one(&["1", "2"]), self.0.i64(0..3));
        Meta::new(kind, key, self.0.i64(0..2), state, spec)
    }

    /// A route of either namespace, with parents and backends in `shop`.
    fn route(&mut self, kind: Kind) -> Route {
        let parents = (0..2).map(|_| {
            json!({
                "group": "", "kind": "Service", "namespace": "shop",
                "name": self.one(&Self::SERVICES),
                "port": ([None, Some(80), Some(9000), Some(81)])[self.0.usize(..4)],
            })
        });
        let parents: Vec<Value> = parents.collect();
        let backends = (0..2).map(|_| {
            let (group, kind) = match self.0.u8(..4) {
                0 => ("gateway.networking.x-k8s.io", "XBackend"),
                1 => ("diy-service-mesh.dev", "TrafficPolicy"),
                _ => ("", "Service"),
            };
            let names = ["a", "b", "c", "p1", "missing"];
            json!({
                "group": group, "kind": kind, "namespace": "shop", "name": self.one(&names),
                "port": 80 + self.0.u8(..2), "weight": self.0.u8(..3),
            })
        });
        let rule = json!({
            "backendRefs": backends.collect::<Vec<_>>(),
            "matches": [{"headers": [{
                "name": self.one(&["one", "two"]), "value": self.one(&["x", "("]),
                "type": self.one(&["Exact", "RegularExpression"]),
            }]}],
        });
        let spec = json!({"parentRefs": parents, "rules": [rule]}).to_string();
        parse::route(self.meta(kind, &spec), &spec).unwrap()
    }

    /// The destinations, the first ports of the Services, and the pods.
    pub(crate) fn resources() -> Vec<Resource> {
        let destinations = Self::destinations().into_iter();
        let destinations = destinations.map(Resource::Destination);
        let backends = Self::SERVICES.map(|name| Resource::Backend(key(name), 80));
        let pods = Self::PODS.map(|name| Resource::Workload(key(name), "".into()));
        destinations.chain(backends).chain(pods).collect()
    }

    /// A kind of objects that users write.
    pub(crate) fn kind(&mut self) -> Kind {
        Kind::ALL[self.0.usize(..Kind::ALL.len())]
    }

    pub(crate) fn change(&mut self) -> Change {
        let kind = self.kind();
        match self.0.u8(..10) {
            0 => {
                let objects: BTreeMap<Key, Object> = (0..3)
                    .map(|_| self.object(kind))
                    .map(|object| (object.key().clone(), object))
                    .collect();
                Change::Reset(kind, objects.into_values().collect())
            }
            1..4 => Change::Delete(kind, self.object(kind).key().clone()),
            _ => Change::Apply(self.object(kind)),
        }
    }

    /// Unknown, two nodes in two zones, and another namespace.
    pub(crate) fn locations() -> [Location; 4] {
        let [one, other] = Self::NODES;
        [
            Location::default(),
            Location {
                namespace: "other".into(),
                ..location(one, "a")
            },
            location(one, "a"),
            location(other, "b"),
        ]
    }

    pub(crate) fn destinations() -> Vec<SocketAddr> {
        let ips = Self::CLUSTER_IPS.iter().chain(&Self::ADDRESSES);
        let ips = ips.chain(&["192.0.2.1"]);
        ips.flat_map(|address| [80, 9000, 30080].map(|port| SocketAddr::new(ip(address), port)))
            .collect()
    }
}

/// Everything that can be asked of an index.
type Answers = (
    Vec<(Scope, State)>,
    Vec<Option<ServiceMessage>>,
    Vec<ObjectStatus>,
);

fn answers(index: &Index) -> Answers {
    let views = Chance::SERVICES.map(|name| index.service(&key(name)));
    let states = requests();
    let states = states
        .iter()
        .map(|(destination, client)| index.resolve(&Resource::Destination(*destination), client));
    (states.collect(), views.into(), index.route_statuses())
}

/// Each destination, for a client at each location.
fn requests() -> Vec<(SocketAddr, Location)> {
    let destinations = Chance::destinations().into_iter();
    destinations
        .flat_map(|destination| Chance::locations().map(|client| (destination, client)))
        .collect()
}

fn remember(objects: &mut BTreeMap<(Kind, Key), Object>, change: &Change) {
    let id = |object: &Object| (object.kind(), object.key().clone());
    match change {
        Change::Apply(object) => drop(objects.insert(id(object), object.clone())),
        Change::Delete(kind, key) => drop(objects.remove(&(*kind, key.clone()))),
        Change::Reset(kind, all) => {
            objects.retain(|(other, _), _| other != kind);
            objects.extend(all.iter().map(|object| (id(object), object.clone())));
        }
        Change::NotInstalled(..) | Change::Unreadable(..) => {}
        Change::Bookmark(..) | Change::Epoch(_) | Change::Lost(_) => {}
    }
}

/// A cluster without objects.
pub(super) fn empty() -> Index {
    let mut index = Index::default();
    for kind in Kind::ALL {
        let event = Event {
            change: Change::Reset(kind, vec![]),
            version: Some(1),
        };
        for step in index.steps(event) {
            index.step(step);
        }
    }
    index
}

#[test]
fn states_and_versions_are_independent_of_the_history() {
    let mut invalid = 0;
    for seed in 0..50 {
        let mut chance = Chance(fastrand::Rng::with_seed(seed));
        let (mut lived, mut objects) = (empty(), BTreeMap::new());
        for step in 0..60 {
            let change = chance.change();
            remember(&mut objects, &change);
            lived.apply(change);
            if step % 10 == 9 {
                let all = objects.values().cloned();
                let mut shuffled: Vec<Change> = all.map(Change::Apply).collect();
                chance.0.shuffle(&mut shuffled);
                let mut fresh = Index::default();
                for change in shuffled {
                    fresh.apply(change);
                }
                assert_eq!(answers(&fresh), answers(&lived), "seed {seed} step {step}");
                let statuses = lived.route_statuses();
                let conditions = statuses.iter().flat_map(|one| &one.parents);
                let mut conditions = conditions.flat_map(|one| &one.conditions);
                invalid += usize::from(conditions.any(|one| one.reason == UNSUPPORTED_VALUE));
            }
        }
        for kind in Kind::ALL {
            lived.apply(Change::Reset(kind, vec![]));
        }
        let left = [
            lived.links.len(),
            lived.routes.len(),
            lived.policies.len(),
            lived.limits.len(),
            lived.headless.len(),
            lived.rooms.len(),
        ];
        assert_eq!(left, [0; 6], "seed {seed}: nothing is left of what is gone");
        for id in lived.take_changed_statuses() {
            assert_eq!(lived.status(&id), Ok(None), "seed {seed}: {id:?}");
        }
        let reported = lived.reported.get_mut().unwrap();
        assert!(
            lived.readers.is_empty() && reported.is_empty(),
            "seed {seed}"
        );
    }
    assert!(invalid > 50, "{invalid} states have invalid objects");
}

#[test]
fn changes_are_reported_and_deltas_transform_states() {
    for seed in 0..50 {
        let mut chance = Chance(fastrand::Rng::with_seed(1000 + seed));
        let mut index = Index::default();
        let mut statuses = BTreeMap::new();
        for step in 0..60 {
            let before = answers(&index);
            let (mut states, mut services) = (Readers::default(), Readers::default());
            for request in requests() {
                let (_, reads) = reads::ask(|| state_at(&index, request.0, &request.1));
                states.set(&Arc::new(format!("{request:?}")), reads);
            }
            for name in Chance::SERVICES {
                let (_, reads) = reads::ask(|| index.service(&key(name)));
                services.set(&Arc::new(name), reads);
            }
            index.take_changed();
            index.apply(chance.change());
            let changed = index.take_changed();
            let (states, services) = (states.of(&changed.reads), services.of(&changed.reads));
            for id in index.take_changed_statuses() {
                match index.status(&id).unwrap() {
                    Some(status) => drop(statuses.insert(id, status)),
                    None => drop(statuses.remove(&id)),
                }
            }
            let after = answers(&index);
            let known: Vec<_> = statuses.values().cloned().collect();
            assert_eq!(known, after.2, "seed {seed} step {step}");
            for (request, ((_, old), (scope, new))) in
                requests().iter().zip(before.0.iter().zip(&after.0))
            {
                let (destination, client) = request;
                let place = client.within(scope);
                assert_eq!(
                    state_at(&index, *destination, &place),
                    *new,
                    "seed {seed} step {step}: {destination} for {client:?}"
                );
                assert!(
                    old == new || states.contains(&format!("{request:?}")),
                    "seed {seed} step {step}: {destination}"
                );
                assert_eq!(
                    old == new,
                    old.version == new.version,
                    "seed {seed} step {step}: {destination}"
                );
                if let Update::Difference(delta) = new.since(old) {
                    let endpoints = patched(&old.target.as_ref().unwrap().endpoints, &delta);
                    assert_eq!(
                        endpoints[..],
                        new.target.as_ref().unwrap().endpoints[..],
                        "seed {seed} step {step}: {destination}"
                    );
                }
            }
            for (name, (old, new)) in Chance::SERVICES.iter().zip(before.1.iter().zip(&after.1)) {
                assert!(
                    old == new || services.contains(name),
                    "seed {seed} step {step}: {name}"
                );
                let encoded = [old, new].map(|one| one.as_ref().map(Message::encode_to_vec));
                assert_eq!(old == new, encoded[0] == encoded[1]);
            }
        }
    }
}

/// The endpoints of a proxy after a delta.
fn patched(endpoints: &[Endpoint], delta: &Delta) -> Vec<Endpoint> {
    let mut all: BTreeMap<SocketAddr, Endpoint> = endpoints
        .iter()
        .map(|endpoint| (endpoint.address, endpoint.clone()))
        .collect();
    for address in &delta.removed {
        assert!(
            all.remove(address).is_some(),
            "only what is there is removed"
        );
    }
    all.extend(
        delta
            .upserted
            .iter()
            .map(|endpoint| (endpoint.address, endpoint.clone())),
    );
    all.into_values().collect()
}

#[test]
fn meshed_namespaces_follow_their_pods() {
    let mut index = index([
        Object::Pod(pod("a", &["10.0.0.1"])),
        Object::Pod(pod("b", &["10.0.0.2"])),
    ]);
    let namespaces = |index: &Index| {
        index
            .meshed_namespaces()
            .map(|name| name.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(namespaces(&index), ["shop"]);
    let after = |index: &Index, name| index.meshed_pods_after(&key(name)).count();
    assert_eq!((after(&index, ""), after(&index, "a")), (2, 1));
    let touched = stale(
        &mut index,
        Change::Apply(Object::Pod(Pod {
            ready: true,
            ..pod("a", &["10.0.0.1"])
        })),
    );
    assert_eq!(touched, Stale::default());
    index.apply(Change::Apply(Object::Pod(Pod {
        identity: None,
        ..pod("a", &["10.0.0.1"])
    })));
    assert_eq!(namespaces(&index), ["shop"]);
    index.apply(Change::Delete(Kind::Pod, key("b")));
    assert!(namespaces(&index).is_empty());
}
