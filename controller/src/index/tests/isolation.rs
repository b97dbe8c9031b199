//! Isolation: an object changes the connections to its own Services only, and the backends that are
//! its own, in random clusters.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use super::super::Index;
use super::super::locality::Location;
use super::super::state::{State, TargetKind};
use super::{Chance, index, key};
use crate::catalog::Change;
use crate::index::Resource;
use crate::kinds::policy::Target;
use crate::kinds::{Object, Service};
use crate::object::{Key, Kind};

const HOSTILE: &str = "other";

/// Random objects, one of each name.
fn cluster(chance: &mut Chance) -> Vec<Object> {
    let mut objects: Vec<Object> = Vec::new();
    for _ in 0..40 {
        let kind = chance.kind();
        let object = chance.object(kind);
        objects.retain(|other| !is_same(other, &object));
        objects.push(object);
    }
    objects
}

/// All destinations, also the ports of pods that slices contain, at which routes of headless Services
/// apply, and the backends of all Services.
fn resources() -> Vec<Resource> {
    let all = Chance::destinations().into_iter();
    let at_pods = all.clone().flat_map(|address| {
        let ports = 8080..=8082;
        ports.map(move |port| SocketAddr::new(address.ip(), port))
    });
    let backends = Chance::SERVICES.iter().flat_map(|name| {
        let ports = [80, 9000];
        ports.map(|port| Resource::Backend(key(name), port))
    });
    let destinations = all.chain(at_pods).map(Resource::Destination);
    destinations.chain(backends).collect()
}

fn is_same(one: &Object, other: &Object) -> bool {
    (one.kind(), one.key()) == (other.kind(), other.key())
}

fn state(index: &Index, resource: &Resource, client: &Location) -> State {
    index.resolve(resource, client).1
}

/// The Services that a resource belongs to: of a pod, the headless ones that select it.
fn services_of(index: &Index, state: &State) -> BTreeSet<Key> {
    let Some(target) = &state.target else {
        return BTreeSet::new();
    };
    let TargetKind::Pod = target.kind else {
        return [target.key.clone()].into();
    };
    let Some(pod) = index.pod(&target.key) else {
        return BTreeSet::new();
    };
    let services = index.services.keys().map(|key| &index.services[key]);
    let services = services.filter(|service| service.is_headless && service.selects(pod));
    services.map(|service| service.key.clone()).collect()
}

/// The Services whose connections an object may change. The object of a Service is its annotation.
fn concerned(object: &Object, all: &[Object]) -> BTreeSet<Key> {
    match object {
        Object::Route(route) => {
            let parents = route.parents.iter();
            parents.map(|parent| parent.key(&route.key)).collect()
        }
        Object::Grant(grant) => {
            let routes = all.iter().filter_map(|object| match object {
                Object::Route(route) => Some(route),
                _ => None,
            });
            let permitted = routes.filter(|route| {
                let mut references = route.references();
                references.any(|one| grant.permits(route, &one.key))
            });
            let parents = permitted.flat_map(|route| {
                let parents = route.parents.iter();
                parents.map(|parent| parent.key(&route.key))
            });
            parents.collect()
        }
        Object::Backend(backend) => {
            let routes = all.iter().filter_map(|object| match object {
                Object::Route(route) => Some(route),
                _ => None,
            });
            let routes = routes.filter(|route| {
                let mut references = route.external();
                references.any(|one| one == (backend.kind, backend.key.clone()))
            });
            let parents = routes.flat_map(|route| {
                let parents = route.parents.iter();
                parents.map(|parent| parent.key(&route.key))
            });
            parents.collect()
        }
        Object::Mesh(_) | Object::Authorization(_) => BTreeSet::new(),
        Object::TrafficTarget(_) | Object::TcpGroup(_) => BTreeSet::new(),
        Object::Policy(policy) => {
            let targets = policy.targets().filter_map(|(_, target)| target);
            let services = all.iter().filter(|one| one.kind() == Kind::Service);
            let services: Vec<&Key> = services.map(Object::key).collect();
            let of_target = |target| match target {
                Target::Service(key) => vec![key],
                Target::Namespace(name) => {
                    let own = services.iter().filter(|key| key.namespace == name);
                    own.map(|key| (*key).clone()).collect()
                }
            };
            targets.flat_map(of_target).collect()
        }
        Object::Split(split) => split
            .parents
            .iter()
            .map(|parent| parent.key(&split.key))
            .collect(),
        Object::RouteGroup(group) => {
            let splits = all.iter().filter_map(|object| match object {
                Object::Split(split) => Some(split),
                _ => None,
            });
            let splits = splits.filter(|split| {
                let mut rule = split.content.iter();
                rule.any(|rule| rule.groups.contains(&group.key))
            });
            splits
                .flat_map(|split| split.parents.iter().map(|parent| parent.key(&split.key)))
                .collect()
        }
        Object::Slice(slice) => slice.service.iter().cloned().collect(),
        Object::Service(service) => {
            let parents = service.canary.iter().flat_map(|canary| &canary.parents);
            let named = parents.map(|parent| parent.key(&service.key));
            // A canary has no canaries.
            named.chain([service.key.clone()]).collect()
        }
        Object::Pod(_) | Object::Node(_) => unreachable!("not a setting"),
    }
}

#[test]
fn object_changes_connections_to_its_own_services_only() {
    let mut changed = BTreeSet::new();
    for seed in 0..1500 {
        let mut chance = Chance(fastrand::Rng::with_seed(seed));
        let mut objects = cluster(&mut chance);
        let position = chance.0.usize(..objects.len());
        let object = objects[position].clone();
        if matches!(object.kind(), Kind::Pod | Kind::Node) {
            continue;
        }
        let with = index(objects.clone());
        let all = objects.clone();
        match &mut objects[position] {
            Object::Service(service) => service.canary = None,
            _ => drop(objects.remove(position)),
        }
        let without = index(objects);
        let concerned = concerned(&object, &all);
        for resource in resources() {
            for client in Chance::locations() {
                let before = state(&without, &resource, &client);
                let after = state(&with, &resource, &client);
                if before == after {
                    continue;
                }
                let mut owners = services_of(&with, &after);
                owners.extend(services_of(&without, &before));
                assert!(
                    !owners.is_disjoint(&concerned),
                    "seed {seed}: {} {} changes {resource:?}, of {owners:?}",
                    object.kind(),
                    object.key()
                );
                let is_consumer = |route: &crate::kinds::route::model::Route| {
                    concerned
                        .iter()
                        .all(|key| key.namespace != route.key.namespace)
                };
                if let Object::Route(route) = &object
                    && is_consumer(route)
                {
                    assert_eq!(client.namespace, route.key.namespace, "seed {seed}");
                }
                let is_backend = matches!(resource, Resource::Backend(..));
                changed.insert((object.kind(), is_backend));
            }
        }
    }
    let settings = [
        Kind::Service,
        Kind::Slice,
        Kind::HttpRoute,
        Kind::GrpcRoute,
        Kind::Backend,
        Kind::TrafficPolicy,
        Kind::TrafficSplit,
    ];
    for kind in settings {
        let has_effect = changed.contains(&(kind, false));
        assert!(has_effect, "no {kind} has had an effect");
    }
    // Connections to other Services use a backend too: no route may change it.
    let of_backends = changed.iter().filter(|(_, is_backend)| *is_backend);
    let of_backends: Vec<Kind> = of_backends.map(|(kind, _)| *kind).collect();
    assert_eq!(of_backends, [Kind::Slice, Kind::TrafficPolicy]);
}

/// A headless Service without a selector, whose slice lists the pods of another namespace, with
/// routes and a policy, and canaries of Services that are not in its namespace.
fn hostile(chance: &mut Chance, objects: &[Object]) -> Vec<Object> {
    let mut hostile = Vec::new();
    for object in objects {
        match object.clone() {
            Object::Service(service) => hostile.push(Object::Service(Service {
                key: Key::new(HOSTILE, &service.key.name),
                is_headless: true,
                selector: Default::default(),
                cluster_ips: vec![],
                external_ips: vec![],
                created: -1,
                ports: service
                    .ports
                    .iter()
                    .cloned()
                    .map(|mut port| {
                        port.node_port = None;
                        port.app_protocol = "kubernetes.io/h2c".into();
                        port
                    })
                    .collect(),
                // No two Services of a cluster have the same node port.
                excess: None,
                ..service
            })),
            Object::Slice(mut slice) => {
                let name = slice.service.map_or("a".into(), |key| key.name);
                slice.key = Key::new(HOSTILE, &slice.key.name);
                slice.service = Some(Key {
                    namespace: HOSTILE.into(),
                    name,
                });
                hostile.push(Object::Slice(slice));
            }
            _ => {}
        }
    }
    for _ in 0..20 {
        let kind = [
            Kind::HttpRoute,
            Kind::GrpcRoute,
            Kind::Backend,
            Kind::TrafficPolicy,
            Kind::TrafficSplit,
            Kind::RouteGroup,
        ][chance.0.usize(..6)];
        let object = chance.object(kind);
        if *object.key().namespace == *HOSTILE {
            hostile.push(object);
        }
    }
    hostile
}

#[test]
fn objects_of_a_namespace_do_not_change_connections_between_pods_of_others() {
    for seed in 0..100 {
        let mut chance = Chance(fastrand::Rng::with_seed(7000 + seed));
        let mut objects = cluster(&mut chance);
        objects
            .retain(|object| *object.key().namespace != *HOSTILE && object.kind() != Kind::Grant);
        let mut index = index(objects.clone());
        let clients = || {
            let clients = Chance::locations().into_iter();
            clients.filter(|client| *client.namespace != *HOSTILE)
        };
        let states = |index: &Index| -> Vec<(State, Location)> {
            let resources = resources().into_iter();
            let all = resources.flat_map(|resource| {
                clients().map(move |client| (state(index, &resource, &client), client))
            });
            all.collect()
        };
        let before = states(&index);
        let hostile = hostile(&mut chance, &objects);
        assert!(!hostile.is_empty(), "seed {seed}");
        for object in hostile {
            let what = format!("{} {}", object.kind(), object.key());
            let change = Change::Apply(object);
            index.apply(change);
            assert!(
                states(&index) == before,
                "seed {seed}: {what} has an effect"
            );
        }
    }
}
