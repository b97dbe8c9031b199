//! All subscribers, and the states that they share.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::time::Instant;

use super::MAX_SLICE;
use super::acknowledgements::{Review, is_reviewed};
use super::history::History;
use super::queue::Queue;
use super::watched::{Resolved, Subscriber, Watched};
use crate::index::locality::{Location, Scope};
use crate::index::position::Position;
use crate::index::reads::{self, Readers, Reads};
use crate::index::{Changed, Index, Resource, link, unlink};
use crate::object::{Key, PodRef};

#[derive(Default)]
pub(super) struct Subscribers {
    /// The resources with subscribers. All maps and queues share their names.
    resources: BTreeMap<Arc<Resource>, Watched>,
    /// The values that the states of the resources depend on.
    readers: Readers<Resource>,
    clients: HashMap<u64, Client>,
    /// The values that the locations of the clients depend on.
    located: Readers<u64>,
    clients_of_pod: HashMap<Key, BTreeSet<u64>>,
    /// The latest position whose changes are published, except the changes of pending resources.
    pub(super) published: watch::Sender<Option<Arc<Position>>>,
    next_id: u64,
}

/// A subscriber to resources.
pub(super) struct Client {
    queue: Arc<Queue>,
    /// Its pod, if its token is bound to one.
    pod: Option<PodRef>,
    /// The location of its pod. Unknown until the pod is in the catalog.
    location: Location,
    subscribed: HashSet<Arc<Resource>>,
    lacking: Lacking,
}

/// The features that the proxy of an earlier release does not apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lacking {
    /// Routes and policies.
    pub policies: bool,
    /// AuthorizationPolicies about calls to its pod.
    pub authorization: bool,
    /// AuthorizationPolicies about calls by its pod.
    pub egress: bool,
    /// Telemetry of its pod.
    pub telemetry: bool,
}

/// The location of a pod, if a token is bound to one, and what it depends on.
pub(super) fn location(index: &Index, pod: Option<&PodRef>) -> (Location, Reads) {
    let of_pod = |pod: &PodRef| reads::ask(|| index.location(&pod.key(), &pod.uid));
    pod.map_or_else(Default::default, of_pod)
}

impl Subscribers {
    pub(super) fn add_client(
        &mut self,
        pod: Option<PodRef>,
        (location, reads): (Location, Reads),
    ) -> (u64, Arc<Queue>) {
        self.next_id += 1;
        let id = self.next_id;
        self.located.set(&Arc::new(id), reads);
        let queue: Arc<Queue> = Arc::default();
        if let Some(pod) = &pod {
            link(&mut self.clients_of_pod, &pod.key(), &id);
        }
        let client = Client {
            queue: queue.clone(),
            pod,
            location,
            subscribed: HashSet::new(),
            lacking: Lacking::default(),
        };
        self.clients.insert(id, client);
        (id, queue)
    }

    pub(super) fn remove_client(&mut self, id: u64) {
        let Some(client) = self.clients.remove(&id) else {
            return;
        };
        for resource in &client.subscribed {
            self.forget(resource, id);
        }
        self.located.remove(&id);
        if let Some(pod) = &client.pod {
            unlink(&mut self.clients_of_pod, &pod.key(), &id);
        }
    }

    pub(super) fn set_lacking(&mut self, id: u64, lacking: Lacking) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.lacking = lacking;
        }
    }

    /// The clients in pods that lack something.
    pub(super) fn count_lacking(&self, lacks: impl Fn(Lacking) -> bool) -> usize {
        let clients = self.clients.values();
        clients
            .filter(|one| one.pod.is_some() && lacks(one.lacking))
            .count()
    }

    /// The clients with pending notifications.
    pub(super) fn count_waiting(&self) -> usize {
        let clients = self.clients.values();
        clients.filter(|one| one.queue.len() > 0).count()
    }

    /// The pods of clients.
    pub(super) fn pods(&self) -> Vec<Key> {
        self.clients_of_pod.keys().cloned().collect()
    }

    /// The latest client in a pod of this name: its number, its pod, and what it lacks.
    pub(super) fn latest_in(&self, pod: &Key) -> Option<(u64, &PodRef, Lacking)> {
        let id = *self.clients_of_pod.get(pod)?.last()?;
        let client = self.client(id);
        Some((id, client.pod.as_ref()?, client.lacking))
    }

    /// Whether a client has subscribed to the state of its pod.
    pub(super) fn has_own_state(&self, id: u64) -> bool {
        let client = self.client(id);
        let pod = client.pod.as_ref();
        let own = pod.map(|pod| Resource::Workload(pod.key(), pod.uid.clone()));
        own.is_some_and(|own| client.subscribed.contains(&own))
    }

    /// The subscription of a client.
    pub(super) fn subscriber(&mut self, id: u64, resource: &Resource) -> Option<&mut Subscriber> {
        self.resources.get_mut(resource)?.subscribers.get_mut(&id)
    }

    /// Reviews the resources after the last one, for the time of a slice. Returns the last one, unless
    /// none is left.
    pub(super) fn review(
        &self,
        last: Option<&Resource>,
        review: &mut Review,
    ) -> Option<Arc<Resource>> {
        let end = Instant::now() + MAX_SLICE;
        let after = last.map_or(Bound::Unbounded, Bound::Excluded);
        let resources = self
            .resources
            .range::<Resource, _>((after, Bound::Unbounded));
        for (resource, watched) in resources {
            if watched.states.values().any(|state| is_reviewed(state)) {
                for (id, subscriber) in &watched.subscribers {
                    let state = watched.state(&self.client(*id).location);
                    let acknowledged = subscriber.acknowledged.as_ref();
                    state
                        .iter()
                        .for_each(|state| review.add(*id, acknowledged, state));
                }
            }
            if Instant::now() >= end {
                return Some(resource.clone());
            }
        }
        None
    }

    pub(super) fn wake_clients(&self) {
        self.clients.values().for_each(|client| client.queue.wake());
    }

    /// The location of a client, and whether the state of a resource there is known, and pending.
    pub(super) fn known(&self, id: u64, resource: &Resource) -> (Location, bool, bool) {
        let location = &self.client(id).location;
        let watched = self.resources.get(resource);
        let is_known = watched.is_some_and(|watched| watched.state(location).is_some());
        let is_pending = watched.is_some_and(|watched| watched.is_pending);
        (location.clone(), is_known, is_pending)
    }

    /// Adds a subscription, and a notification of its current state, even if it exists. `resolved`
    /// is the state, unless it is known.
    pub(super) fn subscribe(
        &mut self,
        index: &Index,
        id: u64,
        resource: &Resource,
        resolved: Option<Resolved>,
    ) -> Arc<Resource> {
        let known = self.resources.get_key_value(resource);
        let shared = known.map_or_else(|| Arc::new(resource.clone()), |(key, _)| key.clone());
        let watched = self.resources.entry(shared.clone()).or_default();
        let client = self.clients.get_mut(&id).expect("a client is removed last");
        let published = self.published.borrow();
        let location = &client.location;
        let (state, reads) = watched.add(index, resource, location, resolved, published.as_ref());
        drop(published);
        self.readers.add(&shared, reads);
        let subscriber = Subscriber {
            queue: client.queue.clone(),
            acknowledged: None,
        };
        watched.subscribers.insert(id, subscriber);
        client.subscribed.insert(shared.clone());
        client.queue.push(shared.clone(), state);
        shared
    }

    pub(super) fn unsubscribe(&mut self, id: u64, resource: &Resource) {
        let client = self.clients.get_mut(&id);
        if let Some(client) = client
            && let Some(resource) = client.subscribed.take(resource)
        {
            client.queue.remove(&resource);
            self.forget(&resource, id);
        }
    }

    /// A change may concern a resource.
    pub(super) fn mark_pending(&mut self, resource: &Resource) {
        if let Some(watched) = self.resources.get_mut(resource) {
            watched.is_pending = true;
        }
    }

    /// The resources with subscribers that changes of the index affect.
    pub(super) fn affected(&self, changed: &Changed) -> BTreeSet<Arc<Resource>> {
        if changed.all {
            return self.resources.keys().cloned().collect();
        }
        let changed = changed.reads.iter().chain(&changed.replicas);
        self.readers.of(changed)
    }

    /// The namespace of the target of a resource. Empty while it is unknown.
    pub(super) fn namespace(&self, resource: &Resource) -> Arc<str> {
        if let Resource::Backend(key, _) | Resource::Workload(key, _) = resource {
            return key.namespace.clone();
        }
        let watched = self.resources.get(resource);
        let state = watched.and_then(|watched| watched.state(&Location::default()));
        let target = state.and_then(|state| state.target.as_ref());
        target.map_or_else(|| "".into(), |target| target.key.namespace.clone())
    }

    /// The locations of the subscribers to a resource, within a scope.
    pub(super) fn locations(&self, resource: &Resource, scope: &Scope) -> HashSet<Location> {
        let watched = self.resources.get(resource);
        let watched = watched.filter(|_| *scope != Scope::default());
        let ids = watched
            .into_iter()
            .flat_map(|watched| watched.subscribers.keys());
        ids.map(|id| self.client(*id).location.within(scope))
            .collect()
    }

    /// Replaces the states of a resource, and notifies the subscribers whose state has changed.
    pub(super) fn update(
        &mut self,
        index: &Index,
        resource: &Resource,
        resolved: Resolved,
        history: &mut History,
    ) {
        if let Some((resource, _)) = self.resources.get_key_value(resource) {
            let resource = resource.clone();
            let clients = &self.clients;
            let location = |id: u64| clients[&id].location.clone();
            if let Some(watched) = self.resources.get_mut(&resource) {
                let reads = watched.update(index, &resource, resolved, history, location);
                self.readers.set(&resource, reads);
            }
        }
    }

    /// Moves the clients whose pod or node has changed, and notifies them of the resources that depend on
    /// their location.
    pub(super) fn relocate(&mut self, index: &Index, changed: &Changed) {
        let published = self.published.borrow();
        for id in self.located.of(&changed.reads) {
            let Some(client) = self.clients.get_mut(&id) else {
                continue;
            };
            let (location, reads) = location(index, client.pod.as_ref());
            self.located.set(&id, reads);
            if std::mem::replace(&mut client.location, location) == client.location {
                continue;
            }
            for resource in &client.subscribed {
                if let Some(watched) = self.resources.get_mut(resource) {
                    let (location, published) = (&client.location, published.as_ref());
                    let (state, reads) = watched.add(index, resource, location, None, published);
                    self.readers.add(resource, reads);
                    client.queue.push(resource.clone(), state);
                }
            }
        }
    }

    /// The number of resources with subscribers, and of their subscriptions.
    pub(super) fn counts(&self) -> (usize, usize) {
        let watched = self.resources.values();
        let subscriptions = watched.map(|watched| watched.subscribers.len()).sum();
        (self.resources.len(), subscriptions)
    }

    fn forget(&mut self, resource: &Resource, subscriber: u64) {
        if let Some(watched) = self.resources.get_mut(resource) {
            watched.subscribers.remove(&subscriber);
            if watched.subscribers.is_empty() {
                self.resources.remove(resource);
                self.readers.remove(resource);
            }
        }
    }

    fn client(&self, id: u64) -> &Client {
        &self.clients[&id]
    }
}

#[cfg(test)]
impl Subscribers {
    /// The number of states of a resource.
    pub(super) fn states(&self, resource: &Resource) -> usize {
        self.resources[resource].states.len()
    }

    /// The location of a client, and the number of its subscriptions.
    pub(super) fn of(&self, reader: &super::Resources) -> (Location, usize) {
        let client = self.client(reader.id);
        (client.location.clone(), client.subscribed.len())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.resources.is_empty()
            && self.readers.is_empty()
            && self.located.is_empty()
            && self.clients.is_empty()
            && self.clients_of_pod.is_empty()
    }
}
