//! The endpoints of Service ports. The endpoints of a port exist once, and so do the endpoints for
//! the clients of one node or zone, whatever the number of addresses and subscribers. Pure.
//!
//! Endpoints to which no state refers are not kept. A change of a Service, of its slices or of
//! their pods computes its endpoints again.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use bytes::Bytes;

use super::Index;
use super::links::Link;
use super::locality::{Area, Location};
use super::reads::{self, Read, Readers, Reads};
use crate::kinds::service::Transport;
use crate::kinds::slice::SliceEndpoint;
use crate::kinds::{Pod, Service, Slice};
use crate::object::version::{Digest, Version};
use crate::object::{Key, Kind};

/// The memory for the endpoints of a Service, of all its ports together.
pub const MAX_BYTES: usize = 8 * 1024 * 1024;
/// The memory of an endpoint without its texts: its fields, and its encoding.
const ENDPOINT_BYTES: usize = size_of::<Endpoint>() + size_of::<Place>() + 24;
/// The slices of a pod that its Services are read from, while the index is locked.
const MAX_SLICES: usize = 64;

/// One endpoint of a target.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// The address and port.
    pub address: SocketAddr,
    /// The zone, or empty.
    pub zone: Arc<str>,
    /// The pod, if known.
    pub pod: Option<Key>,
    /// The SPIFFE ID, if the endpoint is meshed.
    pub identity: Option<Arc<str>>,
    /// Whether the pod declares the port opaque.
    pub opaque: bool,
    /// Whether the endpoint terminates and still serves, or its node is unready: used only while none
    /// is ready.
    pub draining: bool,
    /// Whether it is one of these because of its node.
    pub node_unready: bool,
    /// Whether no pod has the address, and it is not an address of the API server.
    pub outside: bool,
}

/// The difference between two sets of endpoints.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// New and changed endpoints.
    pub upserted: Vec<Endpoint>,
    /// Addresses of removed endpoints.
    pub removed: Vec<SocketAddr>,
}

/// A set of endpoints, ready ones and those that drain. All states with it share it, with its
/// encoding.
#[derive(Debug)]
pub struct Endpoints {
    /// Ascending by address, without duplicates.
    list: Arc<[Endpoint]>,
    /// The digest of the list.
    pub version: Version,
    encoded: OnceLock<Vec<Bytes>>,
    places: Vec<Place>,
    /// Whether all ready endpoints have hints for nodes, and for zones.
    all_have_hints: [bool; 2],
    /// The sets for some clients, as long as they are in use.
    subsets: Mutex<HashMap<Selection, Weak<Endpoints>>>,
    /// The set that this one is a part of, which finds it as long as it exists.
    _whole: Option<Arc<Endpoints>>,
}

/// Where an endpoint is, and for whose clients.
#[derive(Clone, Debug, Default)]
struct Place {
    node: Arc<str>,
    node_hints: Box<[Arc<str>]>,
    zone_hints: Box<[Arc<str>]>,
}

/// A part of a set.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Selection {
    OnNode(Arc<str>),
    ForNode(Arc<str>),
    ForZone(Arc<str>),
}

impl Selection {
    fn contains(&self, place: &Place) -> bool {
        match self {
            Selection::OnNode(node) => place.node == *node,
            Selection::ForNode(node) => place.node_hints.contains(node),
            Selection::ForZone(zone) => place.zone_hints.contains(zone),
        }
    }
}

impl PartialEq for Endpoints {
    fn eq(&self, other: &Endpoints) -> bool {
        self.version == other.version
    }
}

impl std::ops::Deref for Endpoints {
    type Target = [Endpoint];

    fn deref(&self) -> &[Endpoint] {
        &self.list
    }
}

impl Default for Endpoints {
    fn default() -> Self {
        Endpoints::new(Vec::new())
    }
}

impl Endpoints {
    /// Endpoints that are the same for every client. They ascend by address.
    pub fn new(list: Vec<Endpoint>) -> Endpoints {
        let mut digest = Digest::new("endpoints");
        for endpoint in &list {
            digest.address(endpoint.address.ip());
            digest.number(endpoint.address.port().into());
            digest.text(&endpoint.zone);
            digest.text(endpoint.pod.as_ref().map_or("", |pod| &pod.namespace));
            digest.text(endpoint.pod.as_ref().map_or("", |pod| &pod.name));
            digest.text(endpoint.identity.as_deref().unwrap_or(""));
            let flags = [
                endpoint.opaque,
                endpoint.draining,
                endpoint.outside,
                endpoint.node_unready,
            ];
            let flags = flags.iter().enumerate();
            digest.number(flags.map(|(at, flag)| u64::from(*flag) << at).sum());
        }
        Endpoints {
            version: digest.finish(),
            list: list.into(),
            encoded: OnceLock::new(),
            places: Vec::new(),
            all_have_hints: [false; 2],
            subsets: Mutex::default(),
            _whole: None,
        }
    }

    fn in_places(list: Vec<Endpoint>, places: Vec<Place>) -> Endpoints {
        let ready = || list.iter().zip(&places).filter(|(one, _)| !one.draining);
        let has_ready = ready().next().is_some();
        let all_have_hints = [
            has_ready && ready().all(|(_, place)| !place.node_hints.is_empty()),
            has_ready && ready().all(|(_, place)| !place.zone_hints.is_empty()),
        ];
        Endpoints {
            places,
            all_have_hints,
            ..Endpoints::new(list)
        }
    }

    /// The parts of a message with these endpoints, as `encode` encodes them, the first time only.
    pub fn encoded(&self, encode: impl FnOnce(&[Endpoint]) -> Vec<Bytes>) -> &[Bytes] {
        self.encoded.get_or_init(|| encode(&self.list))
    }

    /// The endpoints alone, without their encoding and the set that they are a part of.
    pub fn list(&self) -> Arc<[Endpoint]> {
        self.list.clone()
    }

    /// The difference to an earlier set, in one pass.
    pub fn since(&self, before: &[Endpoint]) -> Delta {
        let mut delta = Delta::default();
        let (mut old, mut new) = (before.iter().peekable(), self.list.iter().peekable());
        loop {
            let order = match (old.peek(), new.peek()) {
                (None, None) => return delta,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(before), Some(after)) => before.address.cmp(&after.address),
            };
            let before = if order.is_le() { old.next() } else { None };
            let after = if order.is_ge() { new.next() } else { None };
            match (before, after) {
                (Some(before), None) => delta.removed.push(before.address),
                (before, Some(after)) if before != Some(after) => {
                    delta.upserted.push(after.clone());
                }
                _ => {}
            }
        }
    }

    /// The endpoints for a client, by its node and zone. With `local_only`
    /// (`internalTrafficPolicy`), the endpoints of its node, whether or not there are any.
    /// Otherwise, the endpoints with a hint for its node, else for its zone. As in kube-proxy,
    /// hints apply if all ready endpoints have such hints and one is for the client.
    pub(super) fn select(
        self: &Arc<Self>,
        local_only: bool,
        client: &Location,
    ) -> (Area, Arc<Endpoints>) {
        if local_only {
            return (
                Area::Node,
                self.part(Selection::OnNode(client.node.clone())),
            );
        }
        let [node_hints, zone_hints] = self.all_have_hints;
        let hinted = [
            node_hints.then(|| Selection::ForNode(client.node.clone())),
            zone_hints.then(|| Selection::ForZone(client.zone.clone())),
        ];
        let area = match self.all_have_hints {
            [true, _] => Area::Node,
            [false, true] => Area::Zone,
            [false, false] => Area::Cluster,
        };
        let parts = hinted.into_iter().flatten();
        let mut parts = parts.map(|selection| self.part(selection));
        let usable = parts.find(|part| part.iter().any(|one| !one.draining));
        (area, usable.unwrap_or_else(|| self.clone()))
    }

    fn part(self: &Arc<Self>, selection: Selection) -> Arc<Endpoints> {
        let mut subsets = lock(&self.subsets);
        if let Some(known) = subsets.get(&selection).and_then(Weak::upgrade) {
            return known;
        }
        if subsets.len() == subsets.capacity() {
            subsets.retain(|_, part| part.strong_count() > 0);
        }
        let all = self.list.iter().zip(&self.places);
        let part = all.filter(|(_, place)| selection.contains(place));
        let part = part.map(|(endpoint, _)| endpoint.clone()).collect();
        let part = Arc::new(Endpoints {
            _whole: Some(self.clone()),
            ..Endpoints::new(part)
        });
        subsets.insert(selection, Arc::downgrade(&part));
        part
    }
}

impl Endpoint {
    /// The memory that it takes, encoded too.
    pub fn bytes(&self) -> usize {
        let identity = self.identity.as_deref().map_or(0, str::len);
        weight(&self.zone, self.pod.as_ref()) + identity
    }
}

/// The memory of an endpoint of a slice at a port. Endpoints with hints are in several parts.
fn bytes_of(endpoint: &SliceEndpoint) -> usize {
    let pod = endpoint.pod.as_ref().map(|pod| &pod.key);
    let hints = endpoint.node_hints.len() + endpoint.zone_hints.len();
    weight(&endpoint.zone, pod) * (1 + hints)
}

/// The memory of an endpoint without its identity.
fn weight(zone: &str, pod: Option<&Key>) -> usize {
    let pod = pod.map_or(0, |pod| pod.namespace.len() + pod.name.len());
    ENDPOINT_BYTES + zone.len() + pod
}

/// The endpoints of the Service ports that states refer to.
#[derive(Debug, Default)]
pub(super) struct Cache(Mutex<Sets>);

#[derive(Debug, Default)]
struct Sets {
    of_port: HashMap<Arc<OfPort>, Cached>,
    readers: Readers<OfPort>,
}

/// The Service, the name of the port, and whether the addresses are IPv6.
type OfPort = (Key, String, bool);

#[derive(Debug)]
struct Cached {
    set: Weak<Endpoints>,
    /// Nothing that it depends on has changed.
    is_current: bool,
}

/// The endpoints of a port were read.
fn read(port: &OfPort) -> Read {
    Read::of("endpoints", port)
}

impl Cache {
    /// Marks the endpoints that have read a changed value, and returns them: they may be others now.
    pub(super) fn tell(&self, changed: &BTreeSet<Read>) -> Vec<Read> {
        let mut sets = lock(&self.0);
        let stale = sets.readers.of(changed).into_iter();
        let stale = stale.map(|port| {
            match sets.of_port.get_mut(&port) {
                Some(cached) if cached.set.strong_count() > 0 => cached.is_current = false,
                _ => sets.remove(&port),
            }
            read(&port)
        });
        stale.collect()
    }

    fn get(&self, port: &OfPort) -> Option<(Arc<Endpoints>, bool)> {
        let sets = lock(&self.0);
        let cached = sets.of_port.get(port)?;
        Some((cached.set.upgrade()?, cached.is_current))
    }

    fn insert(&self, port: OfPort, set: &Arc<Endpoints>, reads: Reads) {
        let mut sets = lock(&self.0);
        // A state may have read an unused set that was equal to its own: it still hears of the next change.
        if sets.of_port.len() == sets.of_port.capacity() {
            let is_used = |cached: &Cached| cached.set.strong_count() > 0;
            sets.of_port.retain(|_, cached| is_used(cached));
        }
        let port = Arc::new(port);
        sets.readers.set(&port, reads);
        let cached = Cached {
            set: Arc::downgrade(set),
            is_current: true,
        };
        sets.of_port.insert(port, cached);
    }

    /// The number of sets in use.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let sets = lock(&self.0);
        let sets = sets.of_port.values();
        sets.filter(|cached| cached.set.strong_count() > 0).count()
    }
}

impl Sets {
    fn remove(&mut self, port: &OfPort) {
        self.of_port.remove(port);
        self.readers.remove(port);
    }
}

impl Index {
    /// The names of the Services of its namespace that a pod is an endpoint of, by the first
    /// `MAX_SLICES` there.
    pub fn services_of<'a>(&'a self, pod: &'a Key) -> BTreeSet<&'a str> {
        let services = self.slices_with(pod).take(MAX_SLICES);
        let services = services.filter_map(|slice| slice.service.as_ref());
        services.map(|key| &*key.name).collect()
    }

    /// The slices of its namespace that a pod is in.
    pub(super) fn slices_with<'a>(&'a self, pod: &'a Key) -> impl Iterator<Item = &'a Slice> {
        let link = Link::EndpointOf(pod.clone());
        let keys = self.links.keys_in(&link, Kind::Slice, &pod.namespace);
        keys.map(|key| &self.slices[key])
    }

    /// The endpoints of a port that are ready or drain, of one family, as far as the Service has
    /// room for them.
    pub(super) fn endpoints(
        &self,
        service: &Service,
        port: &str,
        ipv6: bool,
    ) -> Result<Arc<Endpoints>, NoRoom> {
        let room = self.rooms.get(&service.key);
        let room = room.map_or(Ok(MAX_BYTES), |room| room.of(port))?;
        let port = (service.key.clone(), port.to_owned(), ipv6);
        reads::record(|| read(&port));
        // The index does not change meanwhile, so that others compute the same.
        let before = match self.endpoints.get(&port) {
            Some((current, true)) => return Ok(current),
            before => before.map(|(set, _)| set),
        };
        let (next, reads) = reads::ask(|| {
            self.services.get(&service.key);
            self.rooms.get(&service.key);
            self.list(service, &port.1, ipv6, room)
        });
        // Equal ones keep their encoding, unless clients have parts of them.
        let has_parts = service.local_only || service.external_local;
        let is_same = |before: &Arc<Endpoints>| {
            let hints = [before.all_have_hints, next.all_have_hints];
            before.version == next.version && !has_parts && hints == [[false; 2]; 2]
        };
        let next = before.filter(is_same).unwrap_or_else(|| Arc::new(next));
        self.endpoints.insert(port, &next, reads);
        Ok(next)
    }

    /// The endpoints of a port in the first slices, by name, as far as they fit into the room. Others
    /// cost nothing.
    fn list(&self, service: &Service, port: &str, ipv6: bool, room: usize) -> Endpoints {
        let mut all: BTreeMap<SocketAddr, Vec<&SliceEndpoint>> = BTreeMap::new();
        let of_slices = self.slices_of(&service.key).flat_map(|slice| {
            let numbers = slice.tcp_ports(port);
            numbers.flat_map(|number| slice.endpoints.iter().map(move |one| (number, one)))
        });
        let mut bytes = 0;
        let fitting = of_slices.take_while(|(_, endpoint)| {
            bytes += bytes_of(endpoint);
            bytes <= room
        });
        for (number, endpoint) in fitting.filter(|(_, one)| one.address.is_ipv6() == ipv6) {
            let address = SocketAddr::new(endpoint.address, number);
            all.entry(address).or_default().push(endpoint);
        }
        let all = all.into_iter();
        let usable = all.filter_map(|(address, same)| self.usable(service, address, &same));
        let (list, places) = usable.unzip();
        Endpoints::in_places(list, places)
    }

    /// Several slices may contain an address while an endpoint moves between them. It terminates if
    /// it terminates in any of them.
    fn usable(
        &self,
        service: &Service,
        address: SocketAddr,
        same: &[&SliceEndpoint],
    ) -> Option<(Endpoint, Place)> {
        let terminating = same.iter().filter(|endpoint| endpoint.terminating);
        let terminating: HashSet<_> = terminating.map(|endpoint| &endpoint.pod).collect();
        let all = same.iter().copied().filter_map(|endpoint| {
            let pod = match &endpoint.pod {
                None => None,
                // Only the pod determines whether it is meshed: endpoints of unknown pods are not
                // usable.
                Some(reference) => Some(self.pod_of(reference)?),
            };
            let terminating =
                pod.is_some_and(|pod| pod.terminating) || terminating.contains(&endpoint.pod);
            let ready = service.publish_not_ready || (endpoint.ready && !terminating);
            // The node is unready, not the application: that may work as before.
            let node_unready =
                !ready && !terminating && pod.is_some_and(|pod| self.is_unready_by_node(pod));
            let draining = node_unready || (!ready && terminating && endpoint.serving);
            (ready || draining).then_some((draining, node_unready, endpoint, pod))
        });
        let (draining, node_unready, slice, pod) = all.min_by_key(|(draining, ..)| *draining)?;
        // The pod at the address is meshed or not, whatever program maintains the slice.
        let holder = pod.or_else(|| self.holder(address.ip()));
        // The pod has the address or not, whatever the slice refers to. The address of a node
        // counts only for pods in the namespace of the Service.
        let is_inside = holder.is_some_and(|pod| {
            let is_own = !pod.host_network || pod.key.namespace == service.key.namespace;
            is_own && pod.addresses.contains(&address.ip())
        });
        let endpoint = Endpoint {
            address,
            zone: slice.zone.clone(),
            pod: pod.map(|pod| pod.key.clone()),
            identity: holder.and_then(|pod| pod.identity_at(address.port())),
            opaque: pod.is_some_and(|pod| pod.is_opaque_at(address.port())),
            draining,
            node_unready,
            outside: !is_inside && !service.is_api(),
        };
        let place = Place {
            node: slice.node.clone(),
            node_hints: slice.node_hints.clone(),
            zone_hints: slice.zone_hints.clone(),
        };
        Some((endpoint, place))
    }

    fn is_unready_by_node(&self, pod: &Pod) -> bool {
        let node = || self.nodes.get(&Key::new("", &pod.node));
        pod.unready_by_node && node().is_some_and(|node| node.unready)
    }

    /// The room of the ports of a Service whose endpoints do not all have room.
    pub(super) fn compute_room(&self, service: &Service) -> Option<Room> {
        let ports = service.tcp_ports();
        let mut of_port: HashMap<&str, usize> = ports.map(|port| (&*port.name, 0)).collect();
        for slice in self.slices_of(&service.key) {
            let bytes: usize = slice.endpoints.iter().map(bytes_of).sum();
            let ports = slice.ports.iter();
            for port in ports.filter(|port| port.protocol == Transport::Tcp) {
                if let Some(all) = of_port.get_mut(&*port.name) {
                    *all += bytes;
                }
            }
        }
        if of_port.values().sum::<usize>() <= MAX_BYTES {
            return None;
        }
        let (mut taken, mut room) = (0, Room::default());
        for (name, bytes) in BTreeMap::from_iter(of_port) {
            let left = MAX_BYTES.saturating_sub(taken);
            taken += bytes;
            if bytes <= left {
                room.complete += 1
            } else {
                room.of_port.insert(name.to_owned(), left);
            }
        }
        Some(room)
    }
}

/// The memory for the endpoints of the ports of a Service over its limit. Ports take it in the order
/// of their names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Room {
    /// The ports that have too little.
    pub(super) of_port: BTreeMap<String, usize>,
    /// The number of ports with all endpoints.
    complete: usize,
}

/// A port without endpoints, since its Service is over its limit.
#[derive(Debug)]
pub(super) struct NoRoom {
    /// The number of ports with all endpoints.
    pub(super) complete: usize,
}

impl Room {
    fn of(&self, port: &str) -> Result<usize, NoRoom> {
        let complete = self.complete;
        match self.of_port.get(port).copied() {
            Some(0) => Err(NoRoom { complete }),
            room => Ok(room.unwrap_or(MAX_BYTES)),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::Index;
    use super::super::state::TargetKind;
    use super::super::tests::{endpoint, index, ip, pod, service, slice};
    use super::*;
    use crate::catalog::Change;
    use crate::index::Resource;
    use crate::kinds::service::ServicePort;
    use crate::kinds::slice::SlicePort;
    use crate::kinds::{Object, Pod};

    /// A Service with this many ports, and a slice with these endpoints at each.
    fn wide(ports: u16, endpoints: Vec<SliceEndpoint>) -> [Object; 2] {
        let mut service = service("web", &["10.96.0.1"]);
        let port = |number: u16| ServicePort {
            name: format!("p{number:04}"),
            port: number,
            ..service.ports[0].clone()
        };
        service.ports = (1..=ports).map(port).collect();
        let mut slice = slice("web-1", "web", 8080, endpoints);
        let port = |number: u16| SlicePort {
            name: format!("p{number:04}"),
            port: 10000 + number,
            protocol: Transport::Tcp,
        };
        slice.ports = (1..=ports).map(port).collect();
        [Object::Service(service), Object::Slice(slice)]
    }

    fn bare(number: u32) -> SliceEndpoint {
        let address = std::net::Ipv4Addr::from_bits(0x0a40_0000 + number).to_string();
        SliceEndpoint {
            pod: None,
            ..endpoint(&address, "")
        }
    }

    fn resolve(index: &Index, address: &str, client: &Location) -> super::super::state::State {
        let destination = Resource::Destination(address.parse().unwrap());
        index.resolve(&destination, client).1
    }

    #[test]
    fn addresses_resources_and_locations_share_the_endpoints_of_a_port() {
        let mut objects = wide(2, vec![endpoint("10.0.0.1", "p")]);
        let Object::Service(web) = &mut objects[0] else {
            panic!("a Service")
        };
        web.external_ips = vec![ip("192.0.2.1")];
        let mut index = index(
            objects
                .into_iter()
                .chain([Object::Pod(pod("p", &["10.0.0.1"]))]),
        );
        let anywhere = Location::default();
        let all = ["10.96.0.1:1", "192.0.2.1:1"].map(|one| resolve(&index, one, &anywhere));
        let backend = Resource::Backend(Key::new("shop", "web"), 1);
        let backend = index.resolve(&backend, &anywhere).1;
        let states = all.iter().chain([&backend]);
        let sets = states.map(|one| Arc::as_ptr(&one.target.as_ref().unwrap().endpoints));
        assert_eq!(sets.collect::<HashSet<_>>().len(), 1);
        let other = resolve(&index, "10.96.0.1:2", &anywhere);
        assert_eq!(index.endpoints.len(), 2);
        // A change that concerns no endpoint leaves the set as it is.
        let Some(mut pod) = index.pod(&Key::new("shop", "p")).cloned() else {
            panic!("a pod")
        };
        pod.labels.insert("a".to_owned(), "b".to_owned());
        let apply = |index: &mut Index, pod: Pod| {
            let change = Change::Apply(Object::Pod(pod));
            index.apply(change);
        };
        apply(&mut index, pod.clone());
        let next = resolve(&index, "10.96.0.1:1", &anywhere);
        let same = [&next, &all[0]].map(|one| one.target.as_ref().unwrap().endpoints.clone());
        assert!(Arc::ptr_eq(&same[0], &same[1]));
        pod.terminating = true;
        apply(&mut index, pod);
        let next = resolve(&index, "10.96.0.1:1", &anywhere);
        assert_ne!(next.version, all[0].version);
        drop((all, backend, other, next, same));
        assert_eq!(index.endpoints.len(), 0, "nobody needs them");
    }

    /// The set of a state that is the same as before is unused, and others take its place in the cache.
    #[test]
    fn state_hears_of_endpoints_whose_latest_set_is_unused() {
        let mut objects = wide(500, vec![endpoint("10.0.0.1", "p")]);
        let Object::Service(web) = &mut objects[0] else {
            panic!("a Service")
        };
        web.local_only = true;
        let pod = pod("p", &["10.0.0.1"]);
        let objects = objects.into_iter().chain([Object::Pod(pod.clone())]);
        let mut index = index(objects);
        let anywhere = Location::default();
        let first = "10.96.0.1:1";
        let _kept = resolve(&index, first, &anywhere);
        let labels = [("a".to_owned(), "b".to_owned())].into();
        let labelled = Pod { labels, ..pod };
        index.apply(Change::Apply(Object::Pod(labelled.clone())));
        let (_, reads) = reads::ask(|| drop(resolve(&index, first, &anywhere)));
        let mut states = Readers::default();
        states.set(&Arc::new(first), reads);
        let others = (2..=500).map(|port| format!("10.96.0.1:{port}"));
        let others: Vec<_> = others.map(|one| resolve(&index, &one, &anywhere)).collect();
        assert_eq!(others.len(), 499);
        index.take_changed();
        index.apply(Change::Apply(Object::Pod(Pod {
            terminating: true,
            ..labelled
        })));
        assert!(states.of(&index.take_changed().reads).contains(&first));
    }

    #[test]
    fn clients_of_a_node_share_the_endpoints_on_it() {
        let endpoints = (0..10).map(|number| SliceEndpoint {
            node: format!("n{}", number % 2).into(),
            ..bare(number)
        });
        let mut objects = wide(1, endpoints.collect());
        let Object::Service(web) = &mut objects[0] else {
            panic!("a Service")
        };
        web.local_only = true;
        let index = index(objects);
        let at = |node: &str, zone: &str| {
            let client = Location {
                node: node.into(),
                zone: zone.into(),
                ..Location::default()
            };
            resolve(&index, "10.96.0.1:1", &client)
                .target
                .unwrap()
                .endpoints
        };
        let (one, same, other) = (at("n0", "a"), at("n0", "b"), at("n1", ""));
        assert!(Arc::ptr_eq(&one, &same));
        assert_eq!((one.len(), other.len(), at("n2", "").len()), (5, 5, 0));
    }

    #[test]
    fn endpoints_over_the_limit_of_a_service_are_left_out_in_the_order_of_port_names() {
        let index = index(wide(1000, (0..1000).map(bare).collect()));
        let (mut bytes, mut complete, mut cut, mut failing) = (0, 0, 0, BTreeSet::new());
        let mut states = Vec::new();
        for port in 1..=1000 {
            let state = resolve(&index, &format!("10.96.0.1:{port}"), &Location::default());
            let target = state.target.as_ref().unwrap();
            bytes += target.endpoints.iter().map(Endpoint::bytes).sum::<usize>();
            match (&target.kind, target.endpoints.len()) {
                (TargetKind::Service, 1000) => complete += 1,
                (TargetKind::Service, 1..1000) => cut += 1,
                (TargetKind::ExcessPort(supported), 0) => drop(failing.insert(*supported)),
                other => panic!("port {port}: {other:?}"),
            }
            states.push(state);
        }
        assert!(
            (MAX_BYTES / 2..=MAX_BYTES).contains(&bytes),
            "{bytes} bytes"
        );
        assert_eq!(cut, 1);
        assert_eq!(failing, BTreeSet::from([complete]));
        let statuses = index.route_statuses();
        let condition = &statuses[0].parents[0].conditions[0];
        assert_eq!(
            (condition.reason, condition.holds),
            ("TooManyEndpoints", false)
        );
        let lacking = 1000 - complete;
        assert!(
            condition
                .message
                .contains(&format!("{lacking} of its ports")),
            "{condition:?}"
        );
    }

    #[test]
    fn first_slices_keep_their_endpoints_and_hints_take_more_memory() {
        let [service, _] = wide(1, vec![]);
        let slice = |number: u32, hints: Box<[Arc<str>]>| {
            let endpoints = (0..20_000).map(|endpoint| SliceEndpoint {
                zone_hints: hints.clone(),
                ..bare(20_000 * number + endpoint)
            });
            let [_, slice] = wide(1, endpoints.collect());
            let Object::Slice(slice) = slice else {
                panic!("a slice")
            };
            let key = Key::new("shop", &format!("web-{number}"));
            Object::Slice(crate::kinds::Slice { key, ..slice })
        };
        for (hints, expected) in [
            (Box::default(), 40_000..60_000),
            (["a".into()].into(), 20_000..30_000),
        ] {
            // The slices are not in the order of their names.
            let slices = [2, 0, 1].map(|number| slice(number, Box::clone(&hints)));
            let index = index([service.clone()].into_iter().chain(slices));
            let state = resolve(&index, "10.96.0.1:1", &Location::default());
            let endpoints = state.target.unwrap().endpoints;
            assert!(expected.contains(&endpoints.len()), "{}", endpoints.len());
            let addresses = endpoints.iter().map(|one| one.address.ip());
            assert!(
                addresses.eq((0..)
                    .map(|number| bare(number).address)
                    .take(endpoints.len()))
            );
        }
    }
}
