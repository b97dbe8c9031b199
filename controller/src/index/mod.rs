//! The index of the catalog: resolves destinations and Services, and returns the destinations that
//! a change affects.
//!
//! Pure. Equal objects result in equal states and versions, in any order of events. The cost of a
//! change depends on the affected objects, not on the size of the cluster.

pub mod authorization;
pub mod dependencies;
pub mod endpoints;
pub mod excess;
mod headless;
pub(crate) mod limits;
mod links;
pub mod locality;
pub mod outcome;
mod policies;
pub mod position;
mod resolve;
mod resource;
mod routes;
pub mod state;
mod store;
mod view;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::Arc;

use crate::catalog::{Change, Event};
use crate::kinds::{Node, Object, Pod, Service, Slice};
use crate::object::{Key, Kind, ObjectId, ObjectStatus, PodRef, Withheld};
use authorization::Authorizations;
use endpoints::Room;
use headless::Headless;
use limits::Limits;
use links::{Dirty, Link, Links};
use policies::Policies;
use position::{History, Position, Progress};
use routes::Routes;
use store::{Replaced, Store, put};

use crate::kinds::mesh::Mesh;
use crate::kinds::policy::Target;
use crate::kinds::smi::traffic_target::policy_key;
use crate::object::kind::Report;
pub use resource::Resource;

/// The objects of the catalog and their references.
#[derive(Debug, Default)]
pub struct Index {
    services: Store<Service>,
    slices: Store<Slice>,
    pods: Store<Pod>,
    nodes: Store<Node>,
    routes: Routes,
    policies: Policies,
    authorizations: Authorizations,
    meshes: Store<Mesh>,
    limits: Limits,
    headless: Headless,
    /// The room of the ports of Services with endpoints over the limit.
    rooms: HashMap<Key, Room>,
    endpoints: endpoints::Cache,
    links: Links,
    history: History,
    /// The position after the latest complete batch of changes.
    position: Option<Arc<Position>>,
    is_position_current: bool,
    /// The meshed pods by namespace.
    meshed: BTreeMap<Arc<str>, BTreeSet<Key>>,
    /// The kinds that are installed and could not be listed so far.
    unreadable: BTreeSet<Kind>,
}

/// A part of an event.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "most are objects")]
pub enum Step {
    /// A new or changed object.
    Set(Object),
    /// A deleted object.
    Remove(Kind, Key),
    /// The catalog has reached this resource version of a kind.
    Record(Kind, Progress, Option<u64>),
    /// The epoch of the resource versions.
    SetEpoch(u64),
    /// The namespaces that lack their AuthorizationPolicies.
    SetLost(BTreeSet<Arc<str>>),
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
    /// The index of a mesh whose controller is in this namespace.
    pub fn of_mesh(namespace: &str) -> Index {
        Index {
            authorizations: Authorizations::of_mesh(namespace),
            ..Index::default()
        }
    }

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
                let mut deleted = self.keys(kind).cloned().collect::<Vec<_>>();
                deleted.retain(|key| !listed.contains(key));
                let deleted = deleted.into_iter().map(|key| Step::Remove(kind, key));
                let set = objects.into_iter().map(Step::Set);
                let record = record(kind, Progress::List);
                let found = (kind == Kind::Authorization).then(|| Step::SetLost(BTreeSet::new()));
                deleted.chain(set).chain(found).chain([record]).collect()
            }
            Change::NotInstalled(kind) => {
                let removed = self.keys(kind);
                let removed = removed.map(|key| Step::Remove(kind, key.clone()));
                removed
                    .chain([record(kind, Progress::NotInstalled)])
                    .collect()
            }
            Change::Unreadable(..) => vec![],
            Change::Lost(namespaces) => vec![Step::SetLost(namespaces)],
            Change::Bookmark(kind) => vec![record(kind, Progress::Bookmark)],
            Change::Epoch(epoch) => vec![Step::SetEpoch(epoch)],
        }
    }

    /// Applies a step, and adds the affected topics to `touched`. After the last one of a batch,
    /// [`settle_one`](Self::settle_one) completes them.
    pub fn step(&mut self, step: Step, touched: &mut Touched) {
        match step {
            Step::Set(object) => {
                let (kind, key) = (object.kind(), object.key().clone());
                self.set(kind, &key, Some(object), touched);
            }
            Step::Remove(kind, key) => self.set(kind, &key, None, touched),
            Step::Record(kind, progress, version) => {
                self.history.record(kind, progress, version);
                self.is_position_current = false;
            }
            Step::SetLost(namespaces) => {
                touched.all |= self.authorizations.set_lost(namespaces);
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

    /// Computes a part of what changes concern: first what others depend on. Returns whether nothing
    /// is left.
    pub fn settle_one(&mut self, touched: &mut Touched) -> bool {
        let Some(dirty) = self.links.dirty.pop_first() else {
            if !std::mem::replace(&mut self.is_position_current, true) {
                let api = self.services.get(&Key::new("default", "kubernetes"));
                let cluster = api.map(|service| &*service.uid);
                let position = cluster.and_then(|uid| self.history.position(uid));
                self.position = position.map(Arc::new);
            }
            return true;
        };
        let (links, services) = (&mut self.links, &self.services);
        match dirty {
            Dirty::Target(target) => self.policies.settle(links, target),
            Dirty::Policy(service) => {
                if self.policies.update(&service, services.get(&service)) {
                    self.routes.mark_service(links, &service);
                    links.dirty.insert(Dirty::Limits(service.clone()));
                    self.touch_clients(&service, touched);
                    // Clients use the endpoints of the Service as a backend too.
                    touched.services.insert(service);
                }
            }
            Dirty::Limits(service) => self.settle_limits(&service, touched),
            Dirty::Canaries(primary) => {
                if self.routes.settle_canaries(links, &primary, services) {
                    touched.services.insert(primary);
                }
            }
            Dirty::Routes(service, namespace) => {
                let group = (service.clone(), namespace);
                let concerned = self.routes.settle(links, group, services, &self.policies);
                if concerned.clients {
                    self.touch_clients(&service, touched);
                }
                if concerned.pods {
                    touched.pods.extend(self.pods_limited_by(&service));
                }
            }
            Dirty::Headless(pod) => self.settle_headless(&pod),
            Dirty::Room(service) => self.settle_room(&service, touched),
            Dirty::Pods(namespace) => {
                let pods = self.meshed.get(&namespace).into_iter().flatten();
                touched.pods.extend(pods.cloned());
            }
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
        let is_changed = if is_readable {
            self.unreadable.remove(&kind)
        } else {
            self.unreadable.insert(kind)
        };
        if is_changed {
            touched.all = true;
            self.links.statuses.extend(self.with_status());
        }
    }

    /// The objects whose status may have changed since the last call.
    pub fn take_changed_statuses(&mut self) -> BTreeSet<ObjectId> {
        std::mem::take(&mut self.links.statuses)
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

    /// The status for the author of a route, of a policy or of a Service.
    pub fn status(&self, id: &ObjectId) -> Result<Option<ObjectStatus>, Withheld> {
        if self.is_status_withheld(id) {
            return Err(Withheld);
        }
        let mut status = match id {
            (Kind::TrafficPolicy, key) => {
                let of_targets = self.policies.status(key, &self.services);
                of_targets.or_else(|| self.routes.backend_status(&self.links, id))
            }
            (Kind::Authorization, key) => self.authorizations.status(key, &self.services),
            (Kind::TrafficTarget, key) => {
                self.authorizations.status(&policy_key(key), &self.services)
            }
            (Kind::Service, key) => self.service_status(key),
            (Kind::Backend, _) => self.routes.backend_status(&self.links, id),
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
    fn service_status(&self, key: &Key) -> Option<ObjectStatus> {
        let service = self.services.get(key)?;
        let canary = self.routes.canary_status(service);
        let parents = canary
            .into_iter()
            .chain(excess::status(service, self.rooms.get(key)));
        let status = ObjectStatus {
            uid: service.uid.clone(),
            ..ObjectStatus::new(Kind::Service, key.clone(), 0, parents.collect())
        };
        (!status.parents.is_empty()).then_some(status)
    }

    /// The objects that may have a status.
    pub fn with_status(&self) -> BTreeSet<ObjectId> {
        let reporting = |kind: &Kind| kind.row().report != Report::Silent;
        let reporting = Kind::ALL.into_iter().filter(reporting);
        let objects = reporting.flat_map(|kind| self.keys(kind).map(move |key| (kind, key)));
        let services = self.services.values().filter(|service| {
            let has_excess = service.excess.is_some() || self.rooms.contains_key(&service.key);
            has_excess || service.canary.is_some()
        });
        let services = services.map(|service| (Kind::Service, &service.key));
        let all = objects.chain(services);
        all.map(|(kind, key)| (kind, key.clone())).collect()
    }

    /// The statuses of all objects that have one.
    pub fn route_statuses(&self) -> Vec<ObjectStatus> {
        let all = self.with_status().into_iter();
        all.filter_map(|id| self.status(&id).ok()?).collect()
    }

    /// A Service with its canaries, and the routes and policies that name it.
    pub fn objects_of_service(&self, key: &Key) -> BTreeSet<ObjectId> {
        let mut ids = BTreeSet::from([(Kind::Service, key.clone())]);
        self.routes.mark(key, &mut ids);
        let target = Target::Service(key.clone());
        for link in [Link::CanaryOf(key.clone()), Link::Target(target)] {
            ids.extend(self.links.ids(&link).cloned());
        }
        ids
    }

    /// A Service.
    pub fn service_object(&self, key: &Key) -> Option<&Service> {
        self.services.get(key)
    }

    /// The generation of a route or of a policy.
    pub fn generation(&self, (kind, key): &ObjectId) -> Option<i64> {
        match kind {
            Kind::TrafficPolicy => Some(self.policies.objects.get(key)?.generation),
            Kind::Authorization => Some(self.authorizations.objects.get(key)?.generation),
            Kind::TrafficTarget => Some(self.authorizations.targets.get(key)?.generation),
            _ => Some(self.routes.get(&(*kind, key.clone()))?.generation),
        }
    }

    /// A pod, not another one with its name.
    pub fn pod_by_uid(&self, pod: &PodRef) -> Option<&Pod> {
        let known = self.pods.get(&pod.key());
        known.filter(|known| known.uid == pod.uid)
    }

    /// A pod with a proxy, not another one with its name.
    pub fn meshed_pod(&self, pod: &PodRef) -> Option<&Pod> {
        let known = self.pod_by_uid(pod);
        known.filter(|known| known.identity.is_some())
    }

    /// A pod by its key.
    pub fn pod(&self, key: &Key) -> Option<&Pod> {
        self.pods.get(key)
    }

    /// The pods with an address. Several during its reassignment.
    pub fn pods_at(&self, address: IpAddr) -> impl Iterator<Item = &Pod> {
        let pods = self.links.keys(&Link::PodAt(address));
        pods.map(|key| &self.pods[key])
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
        self.keys(kind).count()
    }

    fn keys(&self, kind: Kind) -> Box<dyn Iterator<Item = &Key> + '_> {
        match kind {
            Kind::Service => Box::new(self.services.keys()),
            Kind::Slice => Box::new(self.slices.keys()),
            Kind::Pod => Box::new(self.pods.keys()),
            Kind::Node => Box::new(self.nodes.keys()),
            Kind::HttpRoute | Kind::GrpcRoute | Kind::TcpRoute => {
                Box::new(self.routes.of_kind(kind))
            }
            Kind::Grant => Box::new(self.routes.grants.keys()),
            Kind::Backend => Box::new(self.routes.backends(kind)),
            Kind::TrafficSplit => Box::new(self.routes.traffic_splits.keys()),
            Kind::RouteGroup => Box::new(self.routes.route_groups.keys()),
            Kind::TrafficPolicy => {
                let with_targets = self.policies.objects.keys();
                Box::new(with_targets.chain(self.routes.backends(kind)))
            }
            Kind::Authorization => Box::new(self.authorizations.authored()),
            Kind::TrafficTarget => Box::new(self.authorizations.targets.keys()),
            Kind::TcpGroup => Box::new(self.authorizations.tcp_groups.keys()),
            Kind::Mesh => Box::new(self.meshes.keys()),
        }
    }

    /// Replaces an object. `None`: it is deleted.
    fn set(&mut self, kind: Kind, key: &Key, new: Option<Object>, touched: &mut Touched) {
        macro_rules! typed {
            ($variant:ident) => {
                new.and_then(|object| match object {
                    Object::$variant(object) => Some(object),
                    _ => None,
                })
            };
        }
        let links = &mut self.links;
        // Routes and policies have a status, which contains their generation.
        if kind.row().report != Report::Silent {
            links.statuses.insert((kind, key.clone()));
        }
        match kind {
            Kind::Service => self.set_service(key, typed!(Service), touched),
            Kind::Slice => self.set_slice(key, typed!(Slice), touched),
            Kind::Pod => self.set_pod(key, typed!(Pod), touched),
            Kind::Node => self.set_node(key, typed!(Node), touched),
            Kind::HttpRoute | Kind::GrpcRoute | Kind::TcpRoute => {
                self.routes.set_route(links, kind, key, typed!(Route))
            }
            Kind::Grant => self.routes.set_grant(links, key, typed!(Grant)),
            Kind::Backend => {
                let id = (kind, key.clone());
                self.routes.set_backend(links, id, typed!(Backend));
            }
            Kind::TrafficSplit => self.routes.set_traffic_split(links, key, typed!(Split)),
            Kind::RouteGroup => {
                self.routes.set_group(links, key, typed!(RouteGroup));
                self.update_traffic_targets(kind, key, touched);
            }
            Kind::TrafficTarget => {
                let new = typed!(TrafficTarget);
                let all = &mut self.authorizations;
                all.targets.replace(links, kind, key, new);
                self.update_traffic_target(key, touched);
            }
            Kind::TcpGroup => {
                let (groups, new) = (&mut self.authorizations.tcp_groups, typed!(TcpGroup));
                groups.replace(links, kind, key, new);
                self.update_traffic_targets(kind, key, touched);
            }
            Kind::TrafficPolicy => {
                let (backend, policy) = match new {
                    Some(Object::Backend(backend)) => (Some(backend), None),
                    Some(Object::Policy(policy)) => (None, Some(policy)),
                    _ => (None, None),
                };
                self.routes.set_backend(links, (kind, key.clone()), backend);
                self.policies.set(links, key, policy);
            }
            Kind::Authorization => {
                self.set_authorization(key, typed!(Authorization), touched);
            }
            Kind::Mesh => drop(self.meshes.replace(links, kind, key, typed!(Mesh))),
        }
    }

    fn set_service(&mut self, key: &Key, new: Option<Service>, touched: &mut Touched) {
        let replaced = self
            .services
            .replace(&mut self.links, Kind::Service, key, new);
        let Some(Replaced(old)) = replaced else {
            return;
        };
        let (new, links) = (self.services.get(key), &mut self.links);
        let both = || old.iter().chain(new);
        both().for_each(|service| touch_addresses(service, touched));
        touched.services.insert(key.clone());
        self.endpoints.invalidate(key);
        if both().any(|service| service.canary.is_some() || service.excess.is_some()) {
            links.statuses.insert((Kind::Service, key.clone()));
        }
        self.routes.set_service(links, key, old.as_ref(), new);
        self.policies.set_service(links, key);
        self.authorizations.mark_service(links, key);
        let of_service = [Dirty::Limits(key.clone()), Dirty::Room(key.clone())];
        links.dirty.extend(of_service);
        if let Some(old) = &old
            && self.limits.has(key)
        {
            touched
                .pods
                .extend(self.selected(old).map(|pod| pod.key.clone()));
        }
        let is_protected = self.routes.is_protected(key);
        if is_protected || self.links.contains(&Link::AuthorizationOf(key.clone())) {
            let selected = old.iter().chain(self.services.get(key));
            let selected = selected.flat_map(|service| self.selected(service));
            touched.pods.extend(selected.map(|pod| pod.key.clone()));
        }
        if both().any(|service| service.is_headless) {
            self.routes.mark(key, &mut self.links.statuses);
            self.slices_of(key)
                .for_each(|slice| self.touch_pods(slice, touched));
            let pods = self.slices_of(key).flat_map(pods_of).cloned();
            let pods: Vec<Dirty> = pods.map(Dirty::Headless).collect();
            self.links.dirty.extend(pods);
        }
    }

    fn set_slice(&mut self, key: &Key, new: Option<Slice>, touched: &mut Touched) {
        let replaced = self.slices.replace(&mut self.links, Kind::Slice, key, new);
        let Some(Replaced(old)) = replaced else {
            return;
        };
        for slice in old.iter().chain(self.slices.get(key)) {
            self.touch_service_of(slice, touched);
            let service = slice.service.as_ref();
            let dirty = &mut self.links.dirty;
            dirty.extend(service.cloned().map(Dirty::Room));
            let service = service.and_then(|key| self.services.get(key));
            if service.is_some_and(|service| service.is_headless) {
                dirty.extend(pods_of(slice).cloned().map(Dirty::Headless));
                self.touch_pods(slice, touched);
            }
        }
    }

    /// The ports or the slices of a Service have changed, perhaps many.
    fn settle_room(&mut self, key: &Key, touched: &mut Touched) {
        let service = self.services.get(key);
        let room = service.and_then(|service| self.compute_room(service));
        let before = put(&mut self.rooms, key, room);
        if before.as_ref() != self.rooms.get(key) {
            self.endpoints.invalidate(key);
            self.touch_clients(key, touched);
            touched.services.insert(key.clone());
            self.links.statuses.insert((Kind::Service, key.clone()));
        }
    }

    fn set_pod(&mut self, key: &Key, new: Option<Pod>, touched: &mut Touched) {
        let replaced = self.pods.replace(&mut self.links, Kind::Pod, key, new);
        let Some(Replaced(old)) = replaced else {
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
        let of_pod = Link::EndpointOf(key.clone());
        if self.links.contains(&of_pod) {
            self.links.dirty.insert(Dirty::Headless(key.clone()));
        }
        let addresses = old.iter().chain(new).flat_map(Pod::own_addresses);
        let bare = addresses.clone().map(|ip| Link::EndpointAt(*ip));
        for link in bare.chain([of_pod]) {
            self.touch_services_with(&link, touched);
        }
        touched.addresses.extend(addresses);
    }

    /// Adds the Services of the slices with a link.
    fn touch_services_with(&self, link: &Link, touched: &mut Touched) {
        for slice in self.links.keys(link) {
            self.touch_service_of(&self.slices[slice], touched);
        }
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
        pods.for_each(|pod| touched.addresses.extend(pod.own_addresses()));
    }

    fn set_node(&mut self, key: &Key, new: Option<Node>, touched: &mut Touched) {
        let replaced = self.nodes.replace(&mut self.links, Kind::Node, key, new);
        let Some(Replaced(old)) = replaced else {
            return;
        };
        let both = old.iter().chain(self.nodes.get(key));
        touched
            .addresses
            .extend(both.flat_map(|node| &node.addresses));
        touched.nodes.insert(key.name.clone());
        for pod in self.links.keys(&Link::UnreadyOn(key.name.clone())) {
            self.touch_services_with(&Link::EndpointOf(pod.clone()), touched);
        }
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
pub(crate) mod tests;
