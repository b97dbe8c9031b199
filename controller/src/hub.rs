//! The hub: subscriptions to resources and Services, and their pending notifications. Between
//! the index and the gRPC streams.
//!
//! Per changed resource, the state is computed and encoded once. Per subscriber, the topic is added
//! to its queue. A queue contains each topic once: a slow reader gets the latest state, and queues
//! stay bounded.

mod published;
mod queue;
mod resources;
mod services;
mod watched;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::authenticate::PodRef;
use crate::index::locality::Location;
use crate::index::object::{Change, Event, Key, Kind, Resource, Source};
use crate::index::view::ServiceView;
use crate::index::{Index, Touched};
pub use published::Published;
use queue::Queue;
pub use resources::{Notifications, Resources};
pub use services::Services;
use watched::Watched;

/// The maximum number of changes that are applied under one lock.
const MAX_BATCH: usize = 1024;
/// Minimum time between two publications, which merges the changes of a rollout.
const PUBLICATION_INTERVAL: Duration = Duration::from_millis(100);
/// Time that a call waits for a synced catalog.
const SYNC_TIMEOUT: Duration = Duration::from_secs(5);

/// Why the catalog cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CatalogError {
    /// Objects of these kinds were not listed yet.
    #[error("the catalog is not synced yet, objects of these kinds are missing: {0}; try again")]
    NotSynced(String),
    /// The controller stops.
    #[error("this controller is shutting down; connect again to reach another replica")]
    Stopping,
}

impl From<CatalogError> for tonic::Status {
    fn from(error: CatalogError) -> tonic::Status {
        tonic::Status::unavailable(error.to_string())
    }
}

/// The index and its subscribers. Cheap to clone.
#[derive(Clone)]
pub struct Hub {
    inner: Arc<Mutex<Inner>>,
    missing: watch::Sender<BTreeSet<(Source, Kind)>>,
    meshed: watch::Sender<BTreeSet<Arc<str>>>,
    /// Notified after each change.
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct Inner {
    index: Index,
    resources: BTreeMap<Resource, Watched>,
    /// The destinations with subscribers by their port.
    destinations_on: HashMap<u16, BTreeSet<SocketAddr>>,
    named: HashMap<Key, HashMap<u64, Arc<Queue<Key>>>>,
    all: HashMap<u64, Arc<Queue<Key>>>,
    clients: HashMap<u64, Client>,
    clients_of_pod: HashMap<Key, BTreeSet<u64>>,
    next_subscriber: u64,
}

/// A subscriber to resources.
struct Client {
    queue: Arc<Queue<Resource>>,
    /// Its pod, if its token is bound to one.
    pod: Option<PodRef>,
    /// The location of its pod. Unknown until the pod is in the catalog.
    location: Location,
    subscribed: HashSet<Resource>,
}

/// Sizes for the metrics.
#[derive(Debug, Default, PartialEq)]
pub struct Counts {
    /// Objects by kind.
    pub objects: Vec<(Kind, usize)>,
    /// Resources with subscribers.
    pub resources: usize,
    /// Subscriptions to them.
    pub subscriptions: usize,
}

impl Hub {
    /// An empty catalog that is synced when each of these sources has listed each kind.
    pub fn new(sources: impl IntoIterator<Item = Source>) -> Hub {
        let all = |source| Kind::ALL.map(|kind| (source, kind));
        Hub {
            inner: Arc::default(),
            missing: watch::Sender::new(sources.into_iter().flat_map(all).collect()),
            meshed: watch::Sender::default(),
            changed: watch::Sender::new(()),
        }
    }

    /// Applies the changes of a catalog until it ends. Subscribers are notified of a change at
    /// once, and of the changes that follow it within an interval together.
    pub async fn follow(&self, mut changes: mpsc::Receiver<Event>) {
        let (mut batch, mut touched) = (Vec::new(), Touched::default());
        let mut next_publication = Instant::now();
        loop {
            tokio::select! {
                count = changes.recv_many(&mut batch, MAX_BATCH) => {
                    if count == 0 {
                        return self.lock().publish(&touched);
                    }
                    self.update(batch.drain(..), &mut touched);
                }
                () = sleep_until(next_publication), if touched != Touched::default() => {
                    self.lock().publish(&std::mem::take(&mut touched));
                    next_publication = Instant::now() + PUBLICATION_INTERVAL;
                }
            }
        }
    }

    /// Applies changes and notifies the subscribers of the affected topics.
    pub fn apply<E: Into<Event>>(&self, changes: impl IntoIterator<Item = E>) {
        let mut touched = Touched::default();
        self.update(changes, &mut touched);
        self.lock().publish(&touched);
    }

    /// Applies changes and adds the affected topics to `touched`.
    fn update<E: Into<Event>>(&self, changes: impl IntoIterator<Item = E>, touched: &mut Touched) {
        let mut listed: BTreeSet<(Source, Kind)> = BTreeSet::new();
        let mut inner = self.lock();
        for event in changes.into_iter().map(Into::into) {
            if let Change::Reset(source, kind, _) | Change::Unavailable(source, kind) =
                &event.change
            {
                listed.insert((*source, *kind));
            }
            inner.index.apply_event(event, touched);
        }
        self.meshed.send_if_modified(|meshed| {
            let now = inner.index.meshed_namespaces().cloned().collect();
            std::mem::replace(meshed, now) != *meshed
        });
        drop(inner);
        self.changed.send_replace(());
        self.missing.send_if_modified(|missing| {
            let before = missing.len();
            missing.retain(|one| !listed.contains(one));
            missing.len() < before
        });
    }

    /// The kinds that were not listed yet. Empty if the catalog is synced.
    pub fn missing(&self) -> BTreeSet<Kind> {
        self.missing
            .borrow()
            .iter()
            .map(|(_, kind)| *kind)
            .collect()
    }

    /// Waits for a synced catalog, for a few seconds at most.
    pub async fn wait_synced(&self, stopping: &CancellationToken) -> Result<(), CatalogError> {
        tokio::select! {
            () = self.synced() => Ok(()),
            () = stopping.cancelled() => Err(CatalogError::Stopping),
            () = tokio::time::sleep(SYNC_TIMEOUT) => {
                let missing: Vec<&str> = self.missing().iter().map(|kind| kind.name()).collect();
                Err(CatalogError::NotSynced(missing.join(", ")))
            }
        }
    }

    /// Waits for a synced catalog.
    pub async fn synced(&self) {
        let mut missing = self.missing.subscribe();
        let waited = missing.wait_for(BTreeSet::is_empty).await;
        debug_assert!(waited.is_ok(), "self holds the sender");
    }

    /// The namespaces with meshed pods, and changes.
    pub fn meshed_namespaces(&self) -> watch::Receiver<BTreeSet<Arc<str>>> {
        self.meshed.subscribe()
    }

    /// The keys and UIDs of ready meshed pods.
    pub fn ready_meshed_pods(&self) -> Vec<(Key, Arc<str>)> {
        self.lock()
            .index
            .ready_meshed_pods()
            .map(|pod| (pod.key.clone(), pod.uid.clone()))
            .collect()
    }

    /// Reads the index, again after each change, until `read` returns a value.
    pub async fn wait_for<T>(&self, read: impl Fn(&Index) -> Option<T>) -> T {
        let mut changed = self.changed.subscribe();
        loop {
            if let Some(value) = self.read(&read) {
                return value;
            }
            changed.changed().await.expect("self holds the sender");
        }
    }

    /// Reads the current index under its lock.
    pub fn read<T>(&self, read: impl FnOnce(&Index) -> T) -> T {
        read(&self.lock().index)
    }

    /// The current state of a Service.
    pub fn service(&self, key: &Key) -> Option<ServiceView> {
        self.lock().index.service(key)
    }

    /// The keys of all Services.
    pub fn service_keys(&self) -> BTreeSet<Key> {
        self.lock().index.service_keys()
    }

    /// A subscriber without subscriptions, in the pod that its token is bound to, if any.
    pub fn watch_resources(&self, pod: Option<PodRef>) -> Resources {
        let mut inner = self.lock();
        let id = inner.next_id();
        let queue: Arc<Queue<Resource>> = Arc::default();
        let key = pod.as_ref().map(PodRef::key);
        let client = Client {
            location: inner.location(pod.as_ref()),
            queue: queue.clone(),
            pod,
            subscribed: HashSet::new(),
        };
        inner.clients.insert(id, client);
        if let Some(key) = key {
            inner.clients_of_pod.entry(key).or_default().insert(id);
        }
        Resources {
            hub: self.clone(),
            id,
            queue,
        }
    }

    /// A subscriber to these Services, or to all if `names` is empty, with a pending notification
    /// for each.
    pub fn watch_services(&self, names: &BTreeSet<Key>) -> Services {
        let mut inner = self.lock();
        let id = inner.next_id();
        let queue: Arc<Queue<Key>> = Arc::default();
        if names.is_empty() {
            inner.all.insert(id, queue.clone());
            inner
                .index
                .service_keys()
                .into_iter()
                .for_each(|key| queue.push(key));
        }
        for name in names {
            inner
                .named
                .entry(name.clone())
                .or_default()
                .insert(id, queue.clone());
            queue.push(name.clone());
        }
        Services {
            hub: self.clone(),
            id,
            names: names.clone(),
            queue,
        }
    }

    /// Sizes for the metrics.
    pub fn counts(&self) -> Counts {
        let inner = self.lock();
        let watched = inner.resources.values();
        Counts {
            objects: Kind::ALL.map(|kind| (kind, inner.index.count(kind))).into(),
            resources: inner.resources.len(),
            subscriptions: watched.map(|watched| watched.subscribers.len()).sum(),
        }
    }

    /// After a panic under the lock, the index stays in use.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn publish(&mut self, touched: &Touched) {
        for ip in &touched.addresses {
            let first = Resource::Destination(SocketAddr::new(*ip, 0));
            self.publish_from(
                first,
                |resource| matches!(resource, Resource::Destination(other) if other.ip() == *ip),
            );
        }
        for port in &touched.node_ports {
            for address in self.destinations_on.get(port).into_iter().flatten() {
                let resource = Resource::Destination(*address);
                let watched = self.resources.get_mut(&resource);
                watched
                    .into_iter()
                    .for_each(|watched| watched.update(&resource, &self.index, &self.clients));
            }
        }
        self.relocate(touched);
        for pod in &touched.pods {
            let first = Resource::Workload(pod.clone(), "".into());
            self.publish_from(
                first,
                |resource| matches!(resource, Resource::Workload(other, _) if other == pod),
            );
        }
        for key in &touched.services {
            let first = Resource::Backend(key.clone(), 0);
            self.publish_from(
                first,
                |resource| matches!(resource, Resource::Backend(other, _) if other == key),
            );
            let named = self.named.get(key).into_iter().flat_map(HashMap::values);
            named
                .chain(self.all.values())
                .for_each(|queue| queue.push(key.clone()));
        }
    }

    /// Resolves the resources that are affected, which begin with `first` in their order.
    fn publish_from(&mut self, first: Resource, is_affected: impl Fn(&Resource) -> bool) {
        let affected = self.resources.range_mut(first..);
        for (resource, watched) in affected.take_while(|(resource, _)| is_affected(resource)) {
            watched.update(resource, &self.index, &self.clients);
        }
    }

    /// Moves the clients in pods and on nodes that have changed, and notifies them of the resources
    /// that depend on their location.
    fn relocate(&mut self, touched: &Touched) {
        let pods = touched.pods.iter();
        let in_pods = pods.filter_map(|pod| self.clients_of_pod.get(pod));
        let mut moved: BTreeSet<u64> = in_pods.flatten().copied().collect();
        if !touched.nodes.is_empty() {
            let clients = self.clients.iter();
            let on_nodes =
                clients.filter(|(_, client)| touched.nodes.contains(&client.location.node));
            moved.extend(on_nodes.map(|(id, _)| *id));
        }
        for id in moved {
            let location = self.location(self.clients[&id].pod.as_ref());
            let Some(client) = self.clients.get_mut(&id) else {
                continue;
            };
            if std::mem::replace(&mut client.location, location) == client.location {
                continue;
            }
            for resource in &client.subscribed {
                if let Some(watched) = self.resources.get_mut(resource) {
                    watched.add(resource, &self.index, &client.location, &HashMap::new());
                    client.queue.push(resource.clone());
                }
            }
        }
    }

    fn location(&self, pod: Option<&PodRef>) -> Location {
        pod.map_or_else(Location::default, |pod| {
            self.index.location(&pod.key(), &pod.uid)
        })
    }

    fn next_id(&mut self) -> u64 {
        self.next_subscriber += 1;
        self.next_subscriber
    }
}

#[cfg(test)]
mod tests;
