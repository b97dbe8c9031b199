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
pub mod reads;
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
use std::sync::{Arc, Mutex, PoisonError};

use crate::catalog::{Change, Event};
use crate::kinds::{Node, Object, Pod, Service, Slice};
use crate::object::{Key, Kind, ObjectId, ObjectStatus, PodRef, Withheld};
use authorization::Authorizations;
use endpoints::Room;
use headless::Headless;
use limits::Limits;
use links::{Link, Links, Question};
use policies::Policies;
use position::{History, Position, Progress};
use reads::{Read, Readers, Reads};
use routes::Routes;
use store::{Replaced, Store, Values};

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
    rooms: Values<Key, Room>,
    endpoints: endpoints::Cache,
    links: Links,
    changed: Changed,
    /// The values that the answers of questions depend on.
    readers: Readers<Question>,
    /// The same for the statuses that somebody has asked for.
    reported: Mutex<Readers<ObjectId>>,
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

/// Changed values, for the questions that have read them.
#[derive(Debug, Default, PartialEq)]
pub struct Changed {
    /// Objects, links and results.
    pub reads: BTreeSet<Read>,
    /// Numbers of the replicas of Services with rate limits, which concern all of their pods.
    pub replicas: BTreeSet<Read>,
    /// Services that are new, or do not exist any more.
    pub services: BTreeSet<Key>,
    /// All: one of the kinds that states depend on can be read now, or cannot be read.
    pub all: bool,
}

impl Changed {
    fn add(&mut self, read: Read) {
        self.reads.insert(read);
    }

    /// Adds later changes.
    pub fn append(&mut self, mut later: Changed) {
        self.reads.append(&mut later.reads);
        self.replicas.append(&mut later.replicas);
        self.services.append(&mut later.services);
        self.all |= later.all;
    }
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

    /// Applies a step. After the last one of a batch, [`settle_one`](Self::settle_one) completes it.
    pub fn step(&mut self, step: Step) {
        match step {
            Step::Set(object) => {
                let (kind, key) = (object.kind(), object.key().clone());
                self.set(kind, &key, Some(object));
            }
            Step::Remove(kind, key) => self.set(kind, &key, None),
            Step::Record(kind, progress, version) => {
                self.history.record(kind, progress, version);
                self.is_position_current = false;
            }
            Step::SetLost(namespaces) => {
                let changed = &mut self.links.changed;
                self.authorizations.set_lost(changed, namespaces);
            }
            Step::SetEpoch(epoch) => {
                self.history.set_epoch(epoch);
                self.is_position_current = false;
            }
        }
        self.tell();
    }

    /// Tells what has changed to those that have read it.
    fn tell(&mut self) {
        let changed = std::mem::take(&mut self.links.changed);
        self.links
            .stale
            .append(&mut self.readers.of(&changed.reads));
        let reported = self.reported.get_mut();
        let reported = reported.unwrap_or_else(PoisonError::into_inner);
        let statuses = reported.of(&changed.reads).into_iter();
        self.links
            .statuses
            .extend(statuses.map(|id| ObjectId::clone(&id)));
        self.changed
            .reads
            .extend(self.endpoints.tell(&changed.reads));
        self.changed.append(changed);
    }

    /// The changes since the last call.
    pub fn take_changed(&mut self) -> Changed {
        std::mem::take(&mut self.changed)
    }

    /// The position after the latest complete batch of changes, if positions have an order.
    pub fn position(&self) -> Option<&Arc<Position>> {
        self.position.as_ref()
    }

    /// Answers a question that changes concern: first those that others read. Returns whether none is
    /// left.
    pub fn settle_one(&mut self) -> bool {
        let Some(question) = self.links.stale.pop_first() else {
            if !std::mem::replace(&mut self.is_position_current, true) {
                let api = self.services.get(&Key::new("default", "kubernetes"));
                let cluster = api.map(|service| &*service.uid);
                let position = cluster.and_then(|uid| self.history.position(uid));
                self.position = position.map(Arc::new);
            }
            return true;
        };
        let (links, services) = (&mut self.links, &self.services);
        let reads = match &*question {
            Question::Split(key) => self.routes.settle_split(links, key),
            Question::Rules(key) => self.settle_rules(key),
            Question::Target(target) => self.policies.settle(links, target),
            Question::Policy(key) => self.policies.settle_service(links, key, services),
            Question::Limits(key) => self.settle_limits(key),
            Question::Canaries(key) => self.routes.settle_canaries(links, key, services),
            Question::Routes(key, namespace) => {
                let group = (key, namespace);
                self.routes.settle(links, group, services, &self.policies)
            }
            Question::Headless(pod) => self.settle_headless(pod),
            Question::Room(key) => self.settle_room(key),
        };
        if self.is_posed(&question) {
            self.readers.set(&question, reads);
        } else {
            self.readers.remove(&question);
        }
        self.tell();
        false
    }

    /// Whether there is something that a question is about. Others have no answer.
    fn is_posed(&self, question: &Question) -> bool {
        match question {
            Question::Split(key) => self.routes.traffic_splits.get(key).is_some(),
            Question::Rules(key) => self.authorizations.targets.get(key).is_some(),
            Question::Target(target) => self.links.contains(&Link::Target(target.clone())),
            Question::Policy(key) | Question::Limits(key) | Question::Room(key) => {
                self.services.get(key).is_some()
            }
            Question::Canaries(key) => self.links.contains(&Link::CanaryOf(key.clone())),
            Question::Routes(key, namespace) => {
                let link = Link::RouteOf(key.clone(), namespace.clone());
                self.links.contains(&link)
            }
            Question::Headless(pod) => self.links.contains(&Link::EndpointOf(pod.clone())),
        }
    }

    /// Applies a change without its resource version, and completes it.
    pub fn apply(&mut self, change: Change) {
        for step in self.steps(change.into()) {
            if !matches!(step, Step::Record(..)) {
                self.step(step);
            }
        }
        while !self.settle_one() {}
    }

    /// Records whether an installed kind that was not listed before can be read.
    pub fn set_readable(&mut self, kind: Kind, is_readable: bool) {
        let is_changed = if is_readable {
            self.unreadable.remove(&kind)
        } else {
            self.unreadable.insert(kind)
        };
        if is_changed {
            self.changed.all = true;
            self.links.statuses.extend(self.with_status());
        }
    }

    /// The objects whose status may have changed since the last call.
    pub fn take_changed_statuses(&mut self) -> BTreeSet<ObjectId> {
        std::mem::take(&mut self.links.statuses)
    }

    /// The status for the author of a route, of a policy or of a Service.
    pub fn status(&self, id: &ObjectId) -> Result<Option<ObjectStatus>, Withheld> {
        let (status, reads) = reads::ask(|| self.answer_status(id));
        let reported = self.reported.lock();
        let mut reported = reported.unwrap_or_else(PoisonError::into_inner);
        match &status {
            Ok(None) => reported.remove(id),
            _ => reported.set(&Arc::new(id.clone()), reads),
        }
        status
    }

    fn answer_status(&self, id: &ObjectId) -> Result<Option<ObjectStatus>, Withheld> {
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
            let has_excess = service.excess.is_some() || self.rooms.get(&service.key).is_some();
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
        ids.extend(self.routes.ids(key).cloned());
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
    fn set(&mut self, kind: Kind, key: &Key, new: Option<Object>) {
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
            Kind::Service => self.set_service(key, typed!(Service)),
            Kind::Slice => self.set_slice(key, typed!(Slice)),
            Kind::Pod => self.set_pod(key, typed!(Pod)),
            Kind::Node => drop(self.nodes.replace(links, kind, key, typed!(Node))),
            Kind::HttpRoute | Kind::GrpcRoute | Kind::TcpRoute => {
                self.routes.set_route(links, kind, key, typed!(Route))
            }
            Kind::Grant => drop(self.routes.grants.replace(links, kind, key, typed!(Grant))),
            Kind::Backend => {
                let id = (kind, key.clone());
                let backends = &mut self.routes.backends;
                backends.put(&mut links.changed, &id, typed!(Backend));
            }
            Kind::TrafficSplit => {
                let splits = &mut self.routes.traffic_splits;
                splits.replace(links, kind, key, typed!(Split));
                links.pose([Question::Split(key.clone())]);
            }
            Kind::RouteGroup => {
                let groups = &mut self.routes.route_groups;
                groups.replace(links, kind, key, typed!(RouteGroup));
            }
            Kind::TrafficTarget => {
                let targets = &mut self.authorizations.targets;
                targets.replace(links, kind, key, typed!(TrafficTarget));
                links.pose([Question::Rules(key.clone())]);
            }
            Kind::TcpGroup => {
                let groups = &mut self.authorizations.tcp_groups;
                groups.replace(links, kind, key, typed!(TcpGroup));
            }
            Kind::TrafficPolicy => {
                let (backend, policy) = match new {
                    Some(Object::Backend(backend)) => (Some(backend), None),
                    Some(Object::Policy(policy)) => (None, Some(policy)),
                    _ => (None, None),
                };
                let (backends, policies) = (&mut self.routes.backends, &mut self.policies.objects);
                backends.put(&mut links.changed, &(kind, key.clone()), backend);
                policies.replace(links, kind, key, policy);
            }
            Kind::Authorization => self.set_authorization(key, typed!(Authorization)),
            Kind::Mesh => drop(self.meshes.replace(links, kind, key, typed!(Mesh))),
        }
    }

    fn set_service(&mut self, key: &Key, new: Option<Service>) {
        let replaced = self
            .services
            .replace(&mut self.links, Kind::Service, key, new);
        let Some(Replaced(old)) = replaced else {
            return;
        };
        let (new, links) = (self.services.get(key), &mut self.links);
        if old.is_some() != new.is_some() {
            links.changed.services.insert(key.clone());
        }
        let both = || old.iter().chain(new);
        if both().any(|service| service.canary.is_some() || service.excess.is_some()) {
            links.statuses.insert((Kind::Service, key.clone()));
        }
        links.pose([
            Question::Policy(key.clone()),
            Question::Limits(key.clone()),
            Question::Room(key.clone()),
        ]);
        if both().any(|service| service.is_headless) {
            let pods = self.slices_of(key).flat_map(pods_of).cloned();
            let pods: Vec<Question> = pods.map(Question::Headless).collect();
            self.links.pose(pods);
        }
    }

    fn set_slice(&mut self, key: &Key, new: Option<Slice>) {
        let replaced = self.slices.replace(&mut self.links, Kind::Slice, key, new);
        let Some(Replaced(old)) = replaced else {
            return;
        };
        for slice in old.iter().chain(self.slices.get(key)) {
            let service = slice.service.as_ref();
            let service = service.and_then(|key| self.services.get(key));
            if service.is_some_and(|service| service.is_headless) {
                let pods = pods_of(slice).cloned();
                self.links.pose(pods.map(Question::Headless));
            }
        }
    }

    /// Answers whether the endpoints of a Service have room.
    fn settle_room(&mut self, key: &Key) -> Reads {
        let (room, reads) = reads::ask(|| self.compute_room(self.services.get(key)?));
        if self.rooms.put(&mut self.links.changed, key, room).is_some() {
            // Its status may be the first one.
            self.links.statuses.insert((Kind::Service, key.clone()));
        }
        reads
    }

    fn set_pod(&mut self, key: &Key, new: Option<Pod>) {
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
        let (limits, both) = (&mut self.limits, [old.as_ref(), new]);
        limits.count(&mut self.links, &self.services, &key.namespace, both);
    }
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

/// Replaces or removes the value of a key. Returns the one before.
fn put<K: Clone + Eq + Hash, V>(map: &mut HashMap<K, V>, key: &K, new: Option<V>) -> Option<V> {
    match new {
        Some(new) => map.insert(key.clone(), new),
        None => map.remove(key),
    }
}

#[cfg(test)]
impl Index {
    fn change(&mut self, change: Change) {
        let steps = self.steps(change.into()).into_iter();
        let changes = steps.filter(|step| !matches!(step, Step::Record(..)));
        changes.for_each(|step| self.step(step));
    }

    fn settle(&mut self) -> bool {
        while !self.settle_one() {}
        !self.take_changed_statuses().is_empty()
    }
}

#[cfg(test)]
pub(crate) mod tests;
