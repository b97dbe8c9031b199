//! The index of the catalog: resolves destinations and Services, and returns the destinations that
//! a change affects.
//!
//! Pure. Equal objects result in equal states and versions, in any order of events. The cost of a
//! change depends on the affected objects, not on the size of the cluster.

pub mod locality;
pub mod object;
pub mod position;
pub mod state;
mod store;
pub mod version;
pub mod view;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use locality::{Candidate, Location, Scope};
use object::{
    Change, Event, Key, Kind, Node, Object, Pod, PodReference, Resource, Service, ServicePort,
    Slice, SliceEndpoint, Source, Transport,
};
use position::{History, Position};
use state::{Endpoint, State, Target, TargetKind};
use store::{Replaced, Store};
use view::ServiceView;

/// The objects of the catalog and their references.
#[derive(Debug, Default)]
pub struct Index {
    services: Store<Service>,
    slices: Store<Slice>,
    pods: Store<Pod>,
    nodes: Store<Node>,
    slices_of_service: HashMap<Key, BTreeSet<Key>>,
    slices_of_pod: HashMap<Key, BTreeSet<Key>>,
    /// The slices with an endpoint at an address that names no pod.
    slices_at: HashMap<IpAddr, BTreeSet<Key>>,
    services_at: HashMap<IpAddr, BTreeSet<Key>>,
    services_outside: HashMap<IpAddr, BTreeSet<Key>>,
    services_on_nodes: HashMap<u16, BTreeSet<Key>>,
    pods_at: HashMap<IpAddr, BTreeSet<Key>>,
    history: History,
    position: Option<Arc<Position>>,
    nodes_at: HashMap<IpAddr, BTreeSet<Key>>,
    /// The meshed pods by namespace.
    meshed: HashMap<Arc<str>, BTreeSet<Key>>,
}

/// The topics that changes may affect.
#[derive(Debug, Default, PartialEq)]
pub struct Touched {
    /// Services with a possibly changed view.
    pub services: BTreeSet<Key>,
    /// Addresses with possibly changed destinations.
    pub addresses: BTreeSet<IpAddr>,
    /// Pods with possibly changed inbound configuration or location.
    pub pods: BTreeSet<Key>,
    /// Nodes with a possibly changed zone.
    pub nodes: BTreeSet<Arc<str>>,
    /// Ports with possibly changed destinations at the addresses of nodes.
    pub node_ports: BTreeSet<u16>,
}

impl Index {
    /// Applies a change and adds the affected topics to `touched`.
    pub fn apply(&mut self, change: Change, touched: &mut Touched) {
        match change {
            Change::Apply(source, object) => self.set(source, object, touched),
            Change::Delete(source, kind, key) => self.remove(source, kind, &key, touched),
            Change::Reset(source, kind, objects) => {
                let listed: HashSet<&Key> = objects.iter().map(Object::key).collect();
                let mut deleted = self.keys_of(source, kind);
                deleted.retain(|key| !listed.contains(key));
                for key in deleted {
                    self.remove(source, kind, &key, touched);
                }
                for object in objects {
                    self.set(source, object, touched);
                }
            }
            // What was listed before stays.
            Change::Unavailable(..) => {}
        }
    }

    /// Applies a change with its version, as [`apply`](Self::apply) does.
    pub fn apply_event(&mut self, event: Event, touched: &mut Touched) {
        let recorded = match &event.change {
            Change::Apply(source, object) => Some((*source, object.kind(), false)),
            Change::Delete(source, kind, _) => Some((*source, *kind, false)),
            Change::Reset(source, kind, _) => Some((*source, *kind, true)),
            Change::Unavailable(..) => None,
        };
        self.apply(event.change, touched);
        if let Some((Source::Kubernetes, kind, is_list)) = recorded {
            self.history.record(kind, is_list, event.version);
            let api = self.services.get(&Key::new("default", "kubernetes"));
            let cluster = api.map(|service| &*service.uid);
            let position = cluster.and_then(|uid| self.history.position(uid));
            self.position = position.map(Arc::new);
        }
    }

    /// Resolves a resource for a client. Clients with equal locations within the scope share the
    /// state.
    pub fn resolve(&self, resource: &Resource, client: &Location) -> (Scope, State) {
        let resolved = match resource {
            Resource::Destination(address) => self.destination(*address, client),
            Resource::Backend(service, port) => self.backend(service, *port, client),
            Resource::Workload(pod, uid) => self.workload(pod, uid).map(everywhere),
        };
        let (scope, target) = resolved.unzip();
        let state = State {
            position: self.position.clone(),
            ..State::new(target)
        };
        (scope.unwrap_or_default(), state)
    }

    /// The node and the zone of a pod, not of another one with its name.
    pub fn location(&self, pod: &Key, uid: &str) -> Location {
        let Some(pod) = self.pods.get(pod).filter(|pod| *pod.uid == *uid) else {
            return Location::default();
        };
        let node = Key {
            namespace: "".into(),
            name: pod.node.clone(),
        };
        let zone = self.nodes.get(&node).map(|node| &node.zone);
        Location {
            node: node.name,
            zone: zone.unwrap_or(&pod.zone).clone(),
        }
    }

    /// A Service with all endpoints.
    pub fn service(&self, key: &Key) -> Option<ServiceView> {
        let service = self.services.get(key)?;
        let slices: Vec<&Slice> = self.slices_of(key).collect();
        let pod_of = |reference: &PodReference| self.pod_of(reference);
        Some(view::of(service, &slices, pod_of, |ip| self.holder(ip)))
    }

    /// A pod by its key.
    pub fn pod(&self, key: &Key) -> Option<&Pod> {
        self.pods.get(key)
    }

    /// The pods with an address. Several during its reassignment.
    pub fn pods_at(&self, address: IpAddr) -> impl Iterator<Item = &Pod> {
        self.pods_at
            .get(&address)
            .into_iter()
            .flatten()
            .map(|key| &self.pods[key])
    }

    /// The keys of all Services.
    pub fn service_keys(&self) -> BTreeSet<Key> {
        self.services.keys().cloned().collect()
    }

    /// The namespaces with meshed pods.
    pub fn meshed_namespaces(&self) -> impl Iterator<Item = &Arc<str>> {
        self.meshed.keys()
    }

    /// The meshed pods that are ready and do not terminate.
    pub fn ready_meshed_pods(&self) -> impl Iterator<Item = &Pod> {
        let meshed = self.meshed.values().flatten().map(|key| &self.pods[key]);
        meshed.filter(|pod| pod.ready && !pod.terminating)
    }

    /// The number of objects of a kind.
    pub fn count(&self, kind: Kind) -> usize {
        match kind {
            Kind::Service => self.services.len(),
            Kind::Slice => self.slices.len(),
            Kind::Pod => self.pods.len(),
            Kind::Node => self.nodes.len(),
        }
    }

    /// A Service port, a pod, a Service without the port, a node port, a Service port at an external
    /// address, or an unknown target. An address of several kinds is of the first one.
    fn destination(&self, address: SocketAddr, client: &Location) -> Option<(Scope, Target)> {
        self.service_target(address, client)
            .or_else(|| self.pod_target(address).map(everywhere))
            .or_else(|| self.unknown_port(address).map(everywhere))
            .or_else(|| match self.nodes_at.get(&address.ip()) {
                Some(nodes) => self.node_port(nodes.first()?, address, client),
                None => self.external(address, client),
            })
    }

    fn service_target(&self, address: SocketAddr, client: &Location) -> Option<(Scope, Target)> {
        let service = &self.services[self.services_at.get(&address.ip())?.first()?];
        let port = service.tcp_port(|port| port.port == address.port())?;
        self.service_port(service, port, address.is_ipv6(), client)
    }

    /// Pods reach all endpoints at external addresses, whatever the policies of the Service. Of
    /// several Services with the address and port, the oldest one has it.
    fn external(&self, address: SocketAddr, client: &Location) -> Option<(Scope, Target)> {
        let services = self.services_outside.get(&address.ip())?.iter();
        let services = services.filter_map(|key| {
            let service = &self.services[key];
            let port = service.tcp_port(|port| port.port == address.port())?;
            Some((service, port))
        });
        let (service, port) =
            services.min_by_key(|(service, _)| (service.created, &service.key))?;
        let candidates = self.endpoints(service, &port.name, address.is_ipv6());
        let (scope, endpoints) = locality::select(candidates, false, client);
        Some((scope, service_target(service, port, endpoints)))
    }

    /// A node with `externalTrafficPolicy: Local` forwards connections of other nodes to its own
    /// endpoints.
    fn node_port(
        &self,
        node: &Key,
        address: SocketAddr,
        client: &Location,
    ) -> Option<(Scope, Target)> {
        let services = self.services_on_nodes.get(&address.port())?.iter();
        let services = services.map(|key| &self.services[key]);
        let service = services.min_by_key(|service| (service.created, &service.key))?;
        let port = service.tcp_port(|port| port.node_port == Some(address.port()))?;
        let candidates = self.endpoints(service, &port.name, address.is_ipv6());
        let on_node = Location {
            node: node.name.clone(),
            ..Location::default()
        };
        let is_local = service.external_local && client.node != node.name;
        let from = if is_local { &on_node } else { client };
        let (scope, endpoints) = locality::select(candidates, is_local, from);
        let scope = if service.external_local {
            Scope::Node
        } else {
            scope
        };
        Some((scope, service_target(service, port, endpoints)))
    }

    /// A Service port in the primary family of the Service.
    fn backend(&self, service: &Key, port: u16, client: &Location) -> Option<(Scope, Target)> {
        let service = self.services.get(service)?;
        let primary = service.cluster_ips.first();
        let port = service.tcp_port(|other| other.port == port)?;
        self.service_port(service, port, primary.is_some_and(IpAddr::is_ipv6), client)
    }

    fn service_port(
        &self,
        service: &Service,
        port: &ServicePort,
        ipv6: bool,
        client: &Location,
    ) -> Option<(Scope, Target)> {
        let candidates = self.endpoints(service, &port.name, ipv6);
        let (scope, endpoints) = locality::select(candidates, service.local_only, client);
        Some((scope, service_target(service, port, endpoints)))
    }

    /// The inbound configuration of a meshed pod, not of another one with its name.
    fn workload(&self, pod: &Key, uid: &str) -> Option<Target> {
        let pod = self.pods.get(pod)?;
        (pod.identity.is_some() && *pod.uid == *uid).then(|| Target {
            kind: TargetKind::Workload(pod.inbound.clone()),
            key: pod.key.clone(),
            app_protocol: String::new(),
            endpoints: Vec::new(),
        })
    }

    /// The Service at a cluster IP, which does not have the port: no connection can succeed there.
    fn unknown_port(&self, destination: SocketAddr) -> Option<Target> {
        let service = &self.services[self.services_at.get(&destination.ip())?.first()?];
        if !service.cluster_ips.contains(&destination.ip()) {
            return None;
        }
        let tcp = |port: &&ServicePort| port.protocol == Transport::Tcp;
        let ports = service.ports.iter().filter(tcp).map(|port| port.port);
        Some(Target {
            kind: TargetKind::UnknownPort(ports.collect()),
            key: service.key.clone(),
            app_protocol: String::new(),
            endpoints: Vec::new(),
        })
    }

    fn pod_target(&self, destination: SocketAddr) -> Option<Target> {
        let pod = self.holder(destination.ip())?;
        Some(Target {
            kind: TargetKind::Pod,
            key: pod.key.clone(),
            app_protocol: self.headless_protocol(pod, destination.port()),
            endpoints: vec![Endpoint {
                address: destination,
                zone: pod.zone.clone(),
                pod: Some(pod.key.clone()),
                identity: pod.identity_at(destination.port()),
                opaque: pod.is_opaque_at(destination.port()),
                draining: false,
            }],
        })
    }

    /// The running pod with an address. Terminating and older pods come last.
    fn holder(&self, address: IpAddr) -> Option<&Pod> {
        self.pods_at(address)
            .max_by_key(|pod| (!pod.terminating, pod.created, &pod.key))
    }

    /// The application protocol that headless Services declare for a port of a pod. Empty if they
    /// declare none, or different ones.
    fn headless_protocol(&self, pod: &Pod, port: u16) -> String {
        let slices = self.slices_of_pod.get(&pod.key).into_iter().flatten();
        let declared = slices.filter_map(|slice| {
            let slice = &self.slices[slice];
            let service = self.services.get(slice.service.as_ref()?)?;
            let is_tcp = |protocol| protocol == Transport::Tcp;
            let mut ports = slice.ports.iter();
            let at = ports.find(|at| at.port == port && is_tcp(at.protocol))?;
            let mut ports = service.ports.iter();
            let port = ports.find(|port| port.name == at.name && is_tcp(port.protocol))?;
            let belongs = service.is_headless && service.selects(pod);
            (belongs && !port.app_protocol.is_empty()).then_some(&port.app_protocol)
        });
        let mut declared: BTreeSet<&String> = declared.collect();
        let only = declared.pop_first().filter(|_| declared.is_empty());
        only.cloned().unwrap_or_default()
    }

    /// The endpoints of a port that are ready or drain, in the family of the cluster IP.
    fn endpoints(&self, service: &Service, port: &str, ipv6: bool) -> Vec<Candidate<'_>> {
        let mut all: BTreeMap<SocketAddr, Vec<&SliceEndpoint>> = BTreeMap::new();
        for slice in self.slices_of(&service.key) {
            let ports = slice
                .ports
                .iter()
                .filter(|candidate| candidate.name == port && candidate.protocol == Transport::Tcp);
            for number in ports.map(|port| port.port) {
                let endpoints = slice.endpoints.iter();
                for endpoint in endpoints.filter(|endpoint| endpoint.address.is_ipv6() == ipv6) {
                    let address = SocketAddr::new(endpoint.address, number);
                    all.entry(address).or_default().push(endpoint);
                }
            }
        }
        let all = all.into_iter();
        all.filter_map(|(address, same)| self.usable(service, address, &same))
            .collect()
    }

    /// Several slices may contain an address while an endpoint moves between them. It terminates if
    /// it terminates in any of them.
    fn usable<'a>(
        &self,
        service: &Service,
        address: SocketAddr,
        same: &[&'a SliceEndpoint],
    ) -> Option<Candidate<'a>> {
        let all = same.iter().copied().filter_map(|endpoint| {
            let pod = match &endpoint.pod {
                None => None,
                // Only the pod determines whether it is meshed: endpoints of unknown pods are not
                // usable.
                Some(reference) => Some(self.pod_of(reference)?),
            };
            let terminating = pod.is_some_and(|pod| pod.terminating)
                || same
                    .iter()
                    .any(|other| other.terminating && other.pod == endpoint.pod);
            let ready = service.publish_not_ready || (endpoint.ready && !terminating);
            let draining = !ready && terminating && endpoint.serving;
            (ready || draining).then_some((draining, endpoint, pod))
        });
        let (draining, slice, pod) = all.min_by_key(|(draining, ..)| *draining)?;
        // Whoever maintains the slice: the pod at the address is meshed or not.
        let holder = pod.or_else(|| self.holder(address.ip()));
        let endpoint = Endpoint {
            address,
            zone: slice.zone.clone(),
            pod: pod.map(|pod| pod.key.clone()),
            identity: holder.and_then(|pod| pod.identity_at(address.port())),
            opaque: pod.is_some_and(|pod| pod.is_opaque_at(address.port())),
            draining,
        };
        Some(Candidate { endpoint, slice })
    }

    /// The referenced pod, unless a successor has its name.
    fn pod_of(&self, reference: &PodReference) -> Option<&Pod> {
        let pod = self.pods.get(&reference.key)?;
        (reference.uid.is_empty() || pod.uid.is_empty() || reference.uid == pod.uid).then_some(pod)
    }

    /// In the order of their names, independently of the order of events.
    fn slices_of(&self, service: &Key) -> impl Iterator<Item = &Slice> {
        self.slices_of_service
            .get(service)
            .into_iter()
            .flatten()
            .map(|key| &self.slices[key])
    }

    fn keys_of(&self, source: Source, kind: Kind) -> Vec<Key> {
        match kind {
            Kind::Service => self.services.keys_of(source),
            Kind::Slice => self.slices.keys_of(source),
            Kind::Pod => self.pods.keys_of(source),
            Kind::Node => self.nodes.keys_of(source),
        }
    }

    fn set(&mut self, source: Source, object: Object, touched: &mut Touched) {
        let key = object.key().clone();
        match object {
            Object::Service(service) => self.set_service(source, &key, Some(service), touched),
            Object::Slice(slice) => self.set_slice(source, &key, Some(slice), touched),
            Object::Pod(pod) => self.set_pod(source, &key, Some(pod), touched),
            Object::Node(node) => self.set_node(source, &key, Some(node), touched),
        }
    }

    fn remove(&mut self, source: Source, kind: Kind, key: &Key, touched: &mut Touched) {
        match kind {
            Kind::Service => self.set_service(source, key, None, touched),
            Kind::Slice => self.set_slice(source, key, None, touched),
            Kind::Pod => self.set_pod(source, key, None, touched),
            Kind::Node => self.set_node(source, key, None, touched),
        }
    }

    fn set_service(
        &mut self,
        source: Source,
        key: &Key,
        new: Option<Service>,
        touched: &mut Touched,
    ) {
        let Some(Replaced(old)) = self.services.replace(source, key, new) else {
            return;
        };
        let new = self.services.get(key);
        let ips = |service: Option<&Service>| service.map_or(vec![], |one| one.cluster_ips.clone());
        let (before, after) = (ips(old.as_ref()), ips(new));
        relink(&mut self.services_at, key, before, after, touched);
        let ips =
            |service: Option<&Service>| service.map_or(vec![], |one| one.external_ips.clone());
        let (before, after) = (ips(old.as_ref()), ips(new));
        relink(&mut self.services_outside, key, before, after, touched);
        for port in old.iter().flat_map(Service::node_ports) {
            unlink(&mut self.services_on_nodes, &port, key);
            touched.node_ports.insert(port);
        }
        for port in new.into_iter().flat_map(Service::node_ports) {
            link(&mut self.services_on_nodes, &port, key);
            touched.node_ports.insert(port);
        }
        touched.services.insert(key.clone());
        let is_headless = |service: Option<&Service>| service.is_some_and(|one| one.is_headless);
        if is_headless(old.as_ref()) || is_headless(new) {
            self.slices_of(key)
                .for_each(|slice| self.touch_pods(slice, touched));
        }
    }

    fn set_slice(&mut self, source: Source, key: &Key, new: Option<Slice>, touched: &mut Touched) {
        let Some(Replaced(old)) = self.slices.replace(source, key, new) else {
            return;
        };
        let new = self.slices.get(key);
        if let Some(slice) = &old {
            let services = slice.service.iter();
            services.for_each(|service| unlink(&mut self.slices_of_service, service, key));
            pods_of(slice).for_each(|pod| unlink(&mut self.slices_of_pod, pod, key));
            bare_addresses(slice).for_each(|ip| unlink(&mut self.slices_at, &ip, key));
        }
        if let Some(slice) = new {
            let services = slice.service.iter();
            services.for_each(|service| link(&mut self.slices_of_service, service, key));
            pods_of(slice).for_each(|pod| link(&mut self.slices_of_pod, pod, key));
            bare_addresses(slice).for_each(|ip| link(&mut self.slices_at, &ip, key));
        }
        for slice in old.iter().chain(new) {
            self.touch_service_of(slice, touched);
            let service = slice.service.as_ref();
            let service = service.and_then(|key| self.services.get(key));
            if service.is_some_and(|service| service.is_headless) {
                self.touch_pods(slice, touched);
            }
        }
    }

    fn set_pod(&mut self, source: Source, key: &Key, new: Option<Pod>, touched: &mut Touched) {
        let Some(Replaced(old)) = self.pods.replace(source, key, new) else {
            return;
        };
        let new = self.pods.get(key);
        let is_meshed = |pod: Option<&Pod>| pod.is_some_and(|pod| pod.identity.is_some());
        match (is_meshed(old.as_ref()), is_meshed(new)) {
            (false, true) => link(&mut self.meshed, &key.namespace, key),
            (true, false) => unlink(&mut self.meshed, &key.namespace, key),
            _ => {}
        }
        // Readiness does not affect destinations.
        let ready = new.is_some_and(|pod| pod.ready);
        let same_readiness = old.clone().map(|old| Pod { ready, ..old });
        if same_readiness.as_ref() == new {
            return;
        }
        touched.pods.insert(key.clone());
        let ips = |pod: Option<&Pod>| pod.map_or(vec![], |pod| pod.addresses.clone());
        let (before, after) = (ips(old.as_ref()), ips(new));
        let bare = before.iter().chain(&after);
        let bare = bare.filter_map(|ip| self.slices_at.get(ip)).flatten();
        for slice in self
            .slices_of_pod
            .get(key)
            .into_iter()
            .flatten()
            .chain(bare)
        {
            self.touch_service_of(&self.slices[slice], touched);
        }
        relink(&mut self.pods_at, key, before, after, touched);
    }

    /// Adds the Service of a slice and its addresses.
    fn touch_service_of(&self, slice: &Slice, touched: &mut Touched) {
        let service = slice.service.as_ref();
        if let Some(service) = service.and_then(|key| self.services.get(key)) {
            touched.addresses.extend(&service.cluster_ips);
            touched.addresses.extend(&service.external_ips);
            touched.node_ports.extend(service.node_ports());
            touched.services.insert(service.key.clone());
        }
    }

    /// Adds the addresses of the pods of a slice.
    fn touch_pods(&self, slice: &Slice, touched: &mut Touched) {
        let pods = pods_of(slice).filter_map(|key| self.pods.get(key));
        pods.for_each(|pod| touched.addresses.extend(&pod.addresses));
    }

    fn set_node(&mut self, source: Source, key: &Key, new: Option<Node>, touched: &mut Touched) {
        let Some(Replaced(old)) = self.nodes.replace(source, key, new) else {
            return;
        };
        let ips = |node: Option<&Node>| node.map_or(vec![], |node| node.addresses.clone());
        let (before, after) = (ips(old.as_ref()), ips(self.nodes.get(key)));
        relink(&mut self.nodes_at, key, before, after, touched);
        touched.nodes.insert(key.name.clone());
    }
}

fn service_target(service: &Service, port: &ServicePort, endpoints: Vec<Endpoint>) -> Target {
    Target {
        kind: TargetKind::Service,
        key: service.key.clone(),
        app_protocol: port.app_protocol.clone(),
        endpoints,
    }
}

/// A target that does not depend on the client.
fn everywhere(target: Target) -> (Scope, Target) {
    (Scope::Cluster, target)
}

fn pods_of(slice: &Slice) -> impl Iterator<Item = &Key> {
    let references = slice.endpoints.iter().flat_map(|endpoint| &endpoint.pod);
    references.map(|reference| &reference.key)
}

/// The addresses of endpoints that name no pod.
fn bare_addresses(slice: &Slice) -> impl Iterator<Item = IpAddr> {
    let bare = slice.endpoints.iter();
    bare.filter(|endpoint| endpoint.pod.is_none())
        .map(|endpoint| endpoint.address)
}

/// Moves an object from its old to its new addresses, which are all affected.
fn relink(
    map: &mut HashMap<IpAddr, BTreeSet<Key>>,
    key: &Key,
    old: Vec<IpAddr>,
    new: Vec<IpAddr>,
    touched: &mut Touched,
) {
    old.iter().for_each(|ip| unlink(map, ip, key));
    new.iter().for_each(|ip| link(map, ip, key));
    touched.addresses.extend(old.into_iter().chain(new));
}

fn link<K: Clone + Eq + Hash>(map: &mut HashMap<K, BTreeSet<Key>>, to: &K, key: &Key) {
    map.entry(to.clone()).or_default().insert(key.clone());
}

fn unlink<K: Eq + Hash>(map: &mut HashMap<K, BTreeSet<Key>>, from: &K, key: &Key) {
    if let Some(keys) = map.get_mut(from) {
        keys.remove(key);
        if keys.is_empty() {
            map.remove(from);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
