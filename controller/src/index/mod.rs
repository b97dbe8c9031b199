//! The index of the catalog: resolves destinations and Services, and returns the destinations that
//! a change affects.
//!
//! Pure. Equal objects result in equal states and versions, in any order of events. The cost of a
//! change depends on the affected objects, not on the size of the cluster.

pub mod dependencies;
pub mod endpoints;
pub mod excess;
mod headless;
pub(crate) mod limits;
pub mod locality;
pub mod object;
mod policies;
pub mod position;
mod resolve;
mod routes;
pub mod state;
mod store;
pub mod version;
pub mod view;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::Arc;

use excess::ExcessServices;
use headless::Headless;
use limits::Limits;
use object::{Change, Event, Key, Kind, Node, Object, Pod, PodReference, Service, Slice};
use policies::Policies;
use position::{History, Position, Progress};
use routes::Routes;
use store::{Objects, Replaced, Store};
use view::ServiceView;

use crate::authenticate::PodRef;
use crate::routes::RouteStatus;
use crate::routes::attach::RouteId;
use crate::routes::mesh::Mesh;
use crate::routes::statuses::Withheld;

/// The objects of the catalog and their references.
#[derive(Debug, Default)]
pub struct Index {
    services: Store<Service>,
    slices: Store<Slice>,
    pods: Store<Pod>,
    nodes: Store<Node>,
    routes: Routes,
    policies: Policies,
    meshes: Store<Mesh>,
    limits: Limits,
    headless: Headless,
    excess: ExcessServices,
    endpoints: endpoints::Cache,
    slices_of_service: HashMap<Key, BTreeSet<Key>>,
    slices_of_pod: HashMap<Key, BTreeSet<Key>>,
    /// The slices with an endpoint at an address that names no pod.
    slices_at: HashMap<IpAddr, BTreeSet<Key>>,
    services_at: HashMap<IpAddr, BTreeSet<Key>>,
    services_outside: HashMap<IpAddr, BTreeSet<Key>>,
    services_on_nodes: HashMap<u16, BTreeSet<Key>>,
    pods_at: HashMap<IpAddr, BTreeSet<Key>>,
    nodes_at: HashMap<IpAddr, BTreeSet<Key>>,
    history: History,
    /// The position after the latest complete batch of changes.
    position: Option<Arc<Position>>,
    is_position_current: bool,
    /// The meshed pods by namespace.
    meshed: BTreeMap<Arc<str>, BTreeSet<Key>>,
    /// The objects whose status may have changed.
    changed_statuses: BTreeSet<RouteId>,
    /// The kinds that are installed and could not be listed so far.
    unreadable: BTreeSet<Kind>,
}

/// A part of an event.
#[derive(Debug)]
pub enum Step {
    /// A new or changed object.
    Set(Object),
    /// A deleted object.
    Remove(Kind, Key),
    /// The catalog has reached this resource version of a kind.
    Record(Kind, Progress, Option<u64>),
    /// The epoch of the resource versions.
    SetEpoch(u64),
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
    /// Services with rate limits and another number of replicas, which concerns their pods.
    pub replicas: BTreeSet<Key>,
    /// All resources: one of the kinds that they depend on can be read now, or cannot be read.
    pub all: bool,
}

impl Index {
    /// The steps of an event: a list of all objects is as many as there are objects.
    pub fn steps(&self, Event { change, version }: Event) -> Vec<Step> {
        let record = |kind, progress| Step::Record(kind, progress, version);
        match change {
            Change::Apply(object) => {
                let record = record(object.kind(), Progress::Change);
                vec![Step::Set(object), record]
            }
            Change::Delete(kind, key) => {
                vec![Step::Remove(kind, key), record(kind, Progress::Change)]
            }
            Change::Reset(kind, objects) => {
                let listed: HashSet<&Key> = objects.iter().map(Object::key).collect();
                let mut deleted = self.objects(kind).keys();
                deleted.retain(|key| !listed.contains(key));
                let deleted = deleted.into_iter().map(|key| Step::Remove(kind, key));
                let set = objects.into_iter().map(Step::Set);
                let record = record(kind, Progress::List);
                deleted.chain(set).chain([record]).collect()
            }
            Change::NotInstalled(kind) => {
                let removed = self.objects(kind).keys().into_iter();
                let removed = removed.map(|key| Step::Remove(kind, key));
                removed
                    .chain([record(kind, Progress::NotInstalled)])
                    .collect()
            }
            Change::Unreadable(..) => vec![],
            Change::Bookmark(kind) => vec![record(kind, Progress::Bookmark)],
            Change::Epoch(epoch) => vec![Step::SetEpoch(epoch)],
        }
    }

    /// Applies a step, and adds the affected topics to `touched`. After the last one of a batch,
    /// [`settle_one`](Self::settle_one) completes them.
    pub fn step(&mut self, step: Step, touched: &mut Touched) {
        match step {
            Step::Set(object) => self.set(object, touched),
            Step::Remove(kind, key) => self.remove(kind, &key, touched),
            Step::Record(kind, progress, version) => {
                self.history.record(kind, progress, version);
                self.is_position_current = false;
            }
            Step::SetEpoch(epoch) => {
                self.history.set_epoch(epoch);
                self.is_position_current = false;
            }
        }
    }

    /// The position after the latest complete batch of changes, if positions have an order.
    pub fn position(&self) -> Option<&Arc<Position>> {
        self.position.as_ref()
    }

    /// Computes a part of what changes concern: the policies of a Service first, then what depends
    /// on them. Returns whether nothing is left.
    pub fn settle_one(&mut self, touched: &mut Touched) -> bool {
        let statuses = &mut self.changed_statuses;
        if let Some((service, is_changed)) = self.policies.settle_one(&self.services, statuses) {
            if is_changed {
                self.routes.set_policy(&service);
                self.limits.changed.insert(service.clone());
                self.touch_clients(&service, touched);
                // Clients use the endpoints of the Service as a backend too.
                touched.services.insert(service);
            }
        } else if let Some(service) = self.limits.changed.pop_first() {
            self.settle_limits(&service, touched);
        } else if let Some((primary, is_changed)) =
            self.routes.settle_canaries(&self.services, statuses)
        {
            if is_changed {
                touched.services.insert(primary);
            }
        } else if let Some((service, is_changed)) =
            self.routes
                .settle_one(&self.services, &self.policies, statuses)
        {
            if is_changed {
                self.touch_clients(&service, touched);
            }
        } else if let Some(pod) = self.headless.changed.pop_first() {
            self.settle_headless(&pod);
        } else if let Some(service) = self.excess.changed.pop_first() {
            self.settle_room(&service, touched);
        } else {
            if !std::mem::replace(&mut self.is_position_current, true) {
                let api = self.services.get(&Key::new("default", "kubernetes"));
                let cluster = api.map(|service| &*service.uid);
                let position = cluster.and_then(|uid| self.history.position(uid));
                self.position = position.map(Arc::new);
            }
            return true;
        }
        false
    }

    /// Applies a change without its resource version, and completes it.
    pub fn apply(&mut self, change: Change, touched: &mut Touched) {
        for step in self.steps(change.into()) {
            if !matches!(step, Step::Record(..)) {
                self.step(step, touched);
            }
        }
        while !self.settle_one(touched) {}
    }

    /// Records whether an installed kind that was not listed before can be read.
    pub fn set_readable(&mut self, kind: Kind, is_readable: bool, touched: &mut Touched) {
        let is_changed = match is_readable {
            true => self.unreadable.remove(&kind),
            false => self.unreadable.insert(kind),
        };
        if is_changed {
            touched.all = true;
            self.changed_statuses.extend(self.with_status());
        }
    }

    /// The objects whose status may have changed since the last call.
    pub fn take_changed_statuses(&mut self) -> BTreeSet<RouteId> {
        std::mem::take(&mut self.changed_statuses)
    }

    /// Adds the destinations of a Service, also those at its pods.
    fn touch_clients(&self, key: &Key, touched: &mut Touched) {
        let Some(service) = self.services.get(key) else {
            return;
        };
        touch_addresses(service, touched);
        // A route may take precedence over its canaries.
        if self.routes.has_canaries(key) {
            touched.services.insert(key.clone());
        }
        if service.is_headless {
            self.slices_of(key)
                .for_each(|slice| self.touch_pods(slice, touched));
        }
    }

    /// What the author of a route, of a policy or of a Service is told.
    pub fn status(&self, id: &RouteId) -> Result<Option<RouteStatus>, Withheld> {
        if self.is_status_withheld(id) {
            return Err(Withheld);
        }
        let mut status = match id {
            (Kind::TrafficPolicy, key) => self.policies.status(key, &self.services),
            (Kind::Service, key) => self.service_status(key),
            (Kind::Mesh, key) => self.meshes.get(key).and_then(|mesh| mesh.status.clone()),
            _ => self.routes.route_status(id),
        };
        if let Some(status) = &mut status {
            self.add_older_services(status);
            // Proxies acknowledge no state that is withheld.
            status.keeps_programmed = !self.unreadable.is_empty();
        }
        Ok(status)
    }

    /// A Service may be a canary, and have too many ports or endpoints.
    fn service_status(&self, key: &Key) -> Option<RouteStatus> {
        let service = self.services.get(key)?;
        let canary = self.routes.canary_status(service);
        let parents = canary.into_iter().chain(self.excess.status(service));
        let status = RouteStatus {
            kind: Kind::Service,
            key: key.clone(),
            uid: service.uid.clone(),
            generation: 0,
            parents: parents.collect(),
            keeps_programmed: false,
        };
        (!status.parents.is_empty()).then_some(status)
    }

    /// The objects that may have a status.
    pub fn with_status(&self) -> BTreeSet<RouteId> {
        let policies = self.policies.objects.keys();
        let policies = policies.map(|key| (Kind::TrafficPolicy, key.clone()));
        let services = self.routes.canary_services().chain(self.excess.services());
        let services = services.map(|key| (Kind::Service, key.clone()));
        let meshes = self.meshes.keys().map(|key| (Kind::Mesh, key.clone()));
        let others = services.chain(meshes).chain(self.routes.ids());
        policies.chain(others).collect()
    }

    /// The statuses of all objects that have one.
    pub fn route_statuses(&self) -> Vec<RouteStatus> {
        let all = self.with_status().into_iter();
        all.filter_map(|id| self.status(&id).ok()?).collect()
    }

    /// A Service with all endpoints.
    pub fn service(&self, key: &Key) -> Option<ServiceView> {
        let service = self.services.get(key)?;
        let slices: Vec<&Slice> = self.slices_of(key).collect();
        let pod_of = |reference: &PodReference| self.pod_of(reference);
        Some(ServiceView {
            canaries: self.routes.canaries(key).to_vec(),
            ..view::of(service, &slices, pod_of, |ip| self.holder(ip))
        })
    }

    /// The generation of a route or of a policy.
    pub fn generation(&self, (kind, key): &RouteId) -> Option<i64> {
        match kind {
            Kind::TrafficPolicy => Some(self.policies.objects.get(key)?.generation),
            _ => Some(self.routes.get(&(*kind, key.clone()))?.generation),
        }
    }

    /// Whether a pod has a proxy, and does not terminate. Not another pod with its name.
    pub fn has_proxy(&self, pod: &PodRef) -> bool {
        let known = self.pods.get(&pod.key());
        known.is_some_and(|known| {
            known.uid == pod.uid && known.identity.is_some() && !known.terminating
        })
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

    /// The meshed pods after one, in the order of their keys.
    pub fn meshed_pods_after(&self, last: &Key) -> impl Iterator<Item = &Pod> {
        let meshed = self.meshed.range(last.namespace.clone()..);
        let after = (Bound::Excluded(last.clone()), Bound::Unbounded);
        let keys = meshed.flat_map(move |(_, keys)| keys.range(after.clone()));
        keys.map(|key| &self.pods[key])
    }

    /// The number of objects of a kind.
    pub fn count(&self, kind: Kind) -> usize {
        self.objects(kind).len()
    }

    fn objects(&self, kind: Kind) -> &dyn Objects {
        match kind {
            Kind::Service => &self.services,
            Kind::Slice => &self.slices,
            Kind::Pod => &self.pods,
            Kind::Node => &self.nodes,
            Kind::HttpRoute | Kind::GrpcRoute | Kind::TcpRoute => self.routes.of_kind(kind),
            Kind::Grant => &self.routes.grants,
            Kind::TrafficSplit => &self.routes.traffic_splits,
            Kind::RouteGroup => &self.routes.route_groups,
            Kind::TrafficPolicy => &self.policies.objects,
            Kind::Mesh => &self.meshes,
        }
    }

    fn set(&mut self, object: Object, touched: &mut Touched) {
        let (kind, key) = (object.kind(), object.key().clone());
        self.mark(kind, &key);
        match object {
            Object::Service(service) => self.set_service(&key, Some(service), touched),
            Object::Slice(slice) => self.set_slice(&key, Some(slice), touched),
            Object::Pod(pod) => self.set_pod(&key, Some(pod), touched),
            Object::Node(node) => self.set_node(&key, Some(node), touched),
            Object::Route(route) => self.routes.set_route(kind, &key, Some(route)),
            Object::Grant(grant) => self.routes.set_grant(&key, Some(grant)),
            Object::Split(split) => self.routes.set_traffic_split(&key, Some(split)),
            Object::RouteGroup(group) => self.routes.set_group(&key, Some(group)),
            Object::Policy(policy) => self.policies.set(&key, Some(policy)),
            Object::Mesh(mesh) => drop(self.meshes.replace(&key, Some(mesh))),
        }
    }

    fn remove(&mut self, kind: Kind, key: &Key, touched: &mut Touched) {
        self.mark(kind, key);
        match kind {
            Kind::Service => self.set_service(key, None, touched),
            Kind::Slice => self.set_slice(key, None, touched),
            Kind::Pod => self.set_pod(key, None, touched),
            Kind::Node => self.set_node(key, None, touched),
            Kind::HttpRoute | Kind::GrpcRoute | Kind::TcpRoute => {
                self.routes.set_route(kind, key, None)
            }
            Kind::Grant => self.routes.set_grant(key, None),
            Kind::TrafficSplit => self.routes.set_traffic_split(key, None),
            Kind::RouteGroup => self.routes.set_group(key, None),
            Kind::TrafficPolicy => self.policies.set(key, None),
            Kind::Mesh => drop(self.meshes.replace(key, None)),
        }
    }

    /// Routes and policies have a status, which contains their generation.
    fn mark(&mut self, kind: Kind, key: &Key) {
        if kind.has_status() {
            self.changed_statuses.insert((kind, key.clone()));
        }
    }

    fn set_service(&mut self, key: &Key, new: Option<Service>, touched: &mut Touched) {
        let Some(Replaced(old)) = self.services.replace(key, new) else {
            return;
        };
        let new = self.services.get(key);
        let (map, before) = (&mut self.services_at, old.as_ref());
        relink(map, key, before, new, |one| &one.cluster_ips, touched);
        let map = &mut self.services_outside;
        relink(map, key, before, new, |one| &one.external_ips, touched);
        for port in old.iter().flat_map(Service::node_ports) {
            unlink(&mut self.services_on_nodes, &port, key);
            touched.node_ports.insert(port);
        }
        for port in new.into_iter().flat_map(Service::node_ports) {
            link(&mut self.services_on_nodes, &port, key);
            touched.node_ports.insert(port);
        }
        touched.services.insert(key.clone());
        self.endpoints.invalidate(key);
        self.excess.set_service(key, new);
        let has_status = |service: &Service| service.canary.is_some() || service.excess.is_some();
        if old.as_ref().is_some_and(has_status) || new.is_some_and(has_status) {
            self.changed_statuses.insert((Kind::Service, key.clone()));
        }
        let is_headless = |service: Option<&Service>| service.is_some_and(|one| one.is_headless);
        let is_headless = is_headless(old.as_ref()) || is_headless(new);
        self.routes.set_service(key, old.as_ref(), new);
        self.policies.set_service(key, new.is_some());
        self.policies.mark(key, &mut self.changed_statuses);
        self.limits.changed.insert(key.clone());
        if let Some(old) = &old
            && self.limits.has(key)
        {
            touched
                .pods
                .extend(self.selected(old).map(|pod| pod.key.clone()));
        }
        if is_headless {
            self.routes.mark(key, &mut self.changed_statuses);
            self.slices_of(key)
                .for_each(|slice| self.touch_pods(slice, touched));
            let pods: Vec<Key> = self.slices_of(key).flat_map(pods_of).cloned().collect();
            self.headless.changed.extend(pods);
        }
    }

    fn set_slice(&mut self, key: &Key, new: Option<Slice>, touched: &mut Touched) {
        let Some(Replaced(old)) = self.slices.replace(key, new) else {
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
            self.excess.changed.extend(slice.service.clone());
            let service = slice.service.as_ref();
            let service = service.and_then(|key| self.services.get(key));
            if service.is_some_and(|service| service.is_headless) {
                self.touch_pods(slice, touched);
                self.headless.changed.extend(pods_of(slice).cloned());
            }
        }
    }

    /// The ports or the slices of a Service have changed, perhaps many.
    fn settle_room(&mut self, key: &Key, touched: &mut Touched) {
        let service = self.services.get(key);
        let room = service.and_then(|service| self.compute_room(service));
        if self.excess.set_room(key, room) {
            self.endpoints.invalidate(key);
            self.touch_clients(key, touched);
            touched.services.insert(key.clone());
            self.changed_statuses.insert((Kind::Service, key.clone()));
        }
    }

    fn set_pod(&mut self, key: &Key, new: Option<Pod>, touched: &mut Touched) {
        let Some(Replaced(old)) = self.pods.replace(key, new) else {
            return;
        };
        let new = self.pods.get(key);
        let is_meshed = |pod: Option<&Pod>| pod.is_some_and(|pod| pod.identity.is_some());
        match (is_meshed(old.as_ref()), is_meshed(new)) {
            (false, true) => {
                let of_namespace = self.meshed.entry(key.namespace.clone());
                of_namespace.or_default().insert(key.clone());
            }
            (true, false) => {
                let pods = self.meshed.get_mut(&key.namespace);
                if pods.is_some_and(|pods| pods.remove(key) && pods.is_empty()) {
                    self.meshed.remove(&key.namespace);
                }
            }
            _ => {}
        }
        let (services, limits) = (&self.services, &mut self.limits);
        limits.count(services, &key.namespace, [old.as_ref(), new], touched);
        // Readiness does not affect destinations.
        let ready = new.is_some_and(|pod| pod.ready);
        let same_readiness = old.clone().map(|old| Pod { ready, ..old });
        if same_readiness.as_ref() == new {
            return;
        }
        touched.pods.insert(key.clone());
        if self.slices_of_pod.contains_key(key) {
            self.headless.changed.insert(key.clone());
        }
        let addresses = old.iter().chain(new).flat_map(|pod| &pod.addresses);
        let bare = addresses.filter_map(|ip| self.slices_at.get(ip)).flatten();
        for slice in self
            .slices_of_pod
            .get(key)
            .into_iter()
            .flatten()
            .chain(bare)
        {
            self.touch_service_of(&self.slices[slice], touched);
        }
        let (map, old) = (&mut self.pods_at, old.as_ref());
        relink(map, key, old, new, |pod| &pod.addresses, touched);
    }

    /// Adds the Service of a slice and its addresses.
    fn touch_service_of(&self, slice: &Slice, touched: &mut Touched) {
        let service = slice.service.as_ref();
        if let Some(service) = service.and_then(|key| self.services.get(key)) {
            touch_addresses(service, touched);
            touched.services.insert(service.key.clone());
            self.endpoints.invalidate(&service.key);
        }
    }

    /// Adds the addresses of the pods of a slice.
    fn touch_pods(&self, slice: &Slice, touched: &mut Touched) {
        let pods = pods_of(slice).filter_map(|key| self.pods.get(key));
        pods.for_each(|pod| touched.addresses.extend(&pod.addresses));
    }

    fn set_node(&mut self, key: &Key, new: Option<Node>, touched: &mut Touched) {
        let Some(Replaced(old)) = self.nodes.replace(key, new) else {
            return;
        };
        let (map, old, new) = (&mut self.nodes_at, old.as_ref(), self.nodes.get(key));
        relink(map, key, old, new, |node| &node.addresses, touched);
        touched.nodes.insert(key.name.clone());
    }
}

/// Adds the destinations of a Service.
fn touch_addresses(service: &Service, touched: &mut Touched) {
    touched.addresses.extend(&service.cluster_ips);
    touched.addresses.extend(&service.external_ips);
    touched.node_ports.extend(service.node_ports());
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
fn relink<T>(
    map: &mut HashMap<IpAddr, BTreeSet<Key>>,
    key: &Key,
    old: Option<&T>,
    new: Option<&T>,
    addresses: fn(&T) -> &[IpAddr],
    touched: &mut Touched,
) {
    let (old, new) = (
        old.map_or(&[][..], addresses),
        new.map_or(&[][..], addresses),
    );
    old.iter().for_each(|ip| unlink(map, ip, key));
    new.iter().for_each(|ip| link(map, ip, key));
    touched.addresses.extend(old.iter().chain(new));
}

/// Adds a reference.
pub(crate) fn link<K: Clone + Eq + Hash, V: Clone + Ord>(
    map: &mut HashMap<K, BTreeSet<V>>,
    to: &K,
    key: &V,
) {
    map.entry(to.clone()).or_default().insert(key.clone());
}

/// Removes a reference. Entries without references do not remain.
pub(crate) fn unlink<K: Eq + Hash, V: Ord>(map: &mut HashMap<K, BTreeSet<V>>, from: &K, key: &V) {
    if let Some(keys) = map.get_mut(from) {
        keys.remove(key);
        if keys.is_empty() {
            map.remove(from);
        }
    }
}

#[cfg(test)]
impl Index {
    fn change(&mut self, change: Change, touched: &mut Touched) {
        let steps = self.steps(change.into()).into_iter();
        let changes = steps.filter(|step| !matches!(step, Step::Record(..)));
        changes.for_each(|step| self.step(step, touched));
    }

    fn settle(&mut self, touched: &mut Touched) -> bool {
        while !self.settle_one(touched) {}
        !self.take_changed_statuses().is_empty()
    }
}

#[cfg(test)]
mod isolation;
#[cfg(test)]
pub(crate) mod tests;
