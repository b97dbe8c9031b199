//! The hub: subscriptions to resources and Services, and their pending notifications. Between
//! the index and the gRPC streams.
//!
//! Per changed resource, the state is computed and encoded once. Per subscriber, the topic is added to its
//! queue. A queue contains each topic once: a slow reader gets the latest state, and queues stay
//! bounded.

mod published;
mod queue;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::index::object::{Change, Key, Kind, Resource};
use crate::index::view::ServiceView;
use crate::index::{Index, Touched};
pub use published::Published;
use queue::Queue;

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
    missing: watch::Sender<BTreeSet<Kind>>,
    meshed: watch::Sender<BTreeSet<Arc<str>>>,
    /// Notified after each change.
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct Inner {
    index: Index,
    resources: BTreeMap<Resource, Watched>,
    named: HashMap<Key, HashMap<u64, Arc<Queue<Key>>>>,
    all: HashMap<u64, Arc<Queue<Key>>>,
    next_subscriber: u64,
}

/// A resource with subscribers.
struct Watched {
    published: Arc<Published>,
    subscribers: HashMap<u64, Arc<Queue<Resource>>>,
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

impl Default for Hub {
    fn default() -> Self {
        Hub {
            inner: Arc::default(),
            missing: watch::Sender::new(Kind::ALL.into()),
            meshed: watch::Sender::default(),
            changed: watch::Sender::new(()),
        }
    }
}

impl Hub {
    /// Applies the changes of a catalog until it ends. Subscribers are notified of a change at once,
    /// and of the changes that follow it within an interval together.
    pub async fn follow(&self, mut changes: mpsc::Receiver<Change>) {
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
    pub fn apply(&self, changes: impl IntoIterator<Item = Change>) {
        let mut touched = Touched::default();
        self.update(changes, &mut touched);
        self.lock().publish(&touched);
    }

    /// Applies changes and adds the affected topics to `touched`.
    fn update(&self, changes: impl IntoIterator<Item = Change>, touched: &mut Touched) {
        let mut listed = BTreeSet::new();
        let mut inner = self.lock();
        for change in changes {
            if let Change::Reset(kind, _) = &change {
                listed.insert(*kind);
            }
            inner.index.apply(change, touched);
        }
        self.meshed.send_if_modified(|meshed| {
            let now = inner.index.meshed_namespaces().cloned().collect();
            std::mem::replace(meshed, now) != *meshed
        });
        drop(inner);
        self.changed.send_replace(());
        self.missing.send_if_modified(|missing| {
            let before = missing.len();
            missing.retain(|kind| !listed.contains(kind));
            missing.len() < before
        });
    }

    /// The kinds that were not listed yet. Empty if the catalog is synced.
    pub fn missing(&self) -> BTreeSet<Kind> {
        self.missing.borrow().clone()
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

    /// A subscriber without subscriptions.
    pub fn watch_resources(&self) -> Resources {
        let id = self.lock().next_id();
        Resources {
            hub: self.clone(),
            id,
            queue: Arc::default(),
            subscribed: HashSet::new(),
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
            let state = self.index.state(resource);
            if state.version != watched.published.state.version {
                watched.published = Arc::new(watched.published.successor(state));
                let subscribers = watched.subscribers.values();
                subscribers.for_each(|queue| queue.push(resource.clone()));
            }
        }
    }

    fn next_id(&mut self) -> u64 {
        self.next_subscriber += 1;
        self.next_subscriber
    }
}

/// A subscriber to resources. Dropping it ends its subscriptions.
pub struct Resources {
    hub: Hub,
    id: u64,
    queue: Arc<Queue<Resource>>,
    subscribed: HashSet<Resource>,
}

impl Resources {
    /// Adds a subscription, and a notification of its current state, even if it exists.
    pub fn subscribe(&mut self, resource: &Resource) {
        let mut inner = self.hub.lock();
        let Inner {
            index, resources, ..
        } = &mut *inner;
        let watched = resources
            .entry(resource.clone())
            .or_insert_with(|| Watched {
                published: Arc::new(Published::new(index.state(resource))),
                subscribers: HashMap::new(),
            });
        watched.subscribers.insert(self.id, self.queue.clone());
        self.subscribed.insert(resource.clone());
        self.queue.push(resource.clone());
    }

    /// Removes a subscription.
    pub fn unsubscribe(&mut self, resource: &Resource) {
        if self.subscribed.remove(resource) {
            forget(&mut self.hub.lock(), resource, self.id);
        }
    }

    /// Waits for a notification. Cancel-safe.
    pub async fn wait(&self) {
        self.queue.wait().await;
    }

    /// The next notification: a resource and its current state.
    pub fn next(&self) -> Option<(Resource, Arc<Published>)> {
        loop {
            let resource = self.queue.pop()?;
            let inner = self.hub.lock();
            // A pending notification of a subscription that has ended is dropped.
            if let Some(watched) = inner.resources.get(&resource)
                && watched.subscribers.contains_key(&self.id)
            {
                return Some((resource, watched.published.clone()));
            }
        }
    }
}

impl Drop for Resources {
    fn drop(&mut self) {
        let mut inner = self.hub.lock();
        for resource in &self.subscribed {
            forget(&mut inner, resource, self.id);
        }
    }
}

fn forget(inner: &mut Inner, resource: &Resource, subscriber: u64) {
    if let Some(watched) = inner.resources.get_mut(resource) {
        watched.subscribers.remove(&subscriber);
        if watched.subscribers.is_empty() {
            inner.resources.remove(resource);
        }
    }
}

/// A subscriber to Services. Dropping it ends its subscriptions.
pub struct Services {
    hub: Hub,
    id: u64,
    names: BTreeSet<Key>,
    queue: Arc<Queue<Key>>,
}

impl Services {
    /// Waits for a notification. Cancel-safe.
    pub async fn wait(&self) {
        self.queue.wait().await;
    }

    /// The next notification: a Service and its current state, or `None` if it does not exist.
    pub fn next(&self) -> Option<(Key, Option<ServiceView>)> {
        let key = self.queue.pop()?;
        let view = self.hub.service(&key);
        Some((key, view))
    }

    /// Whether the subscription is for all Services.
    pub fn watches_all(&self) -> bool {
        self.names.is_empty()
    }

    /// The number of pending notifications.
    pub fn pending(&self) -> usize {
        self.queue.len()
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        let mut inner = self.hub.lock();
        inner.all.remove(&self.id);
        for name in &self.names {
            if let Some(subscribers) = inner.named.get_mut(name) {
                subscribers.remove(&self.id);
                if subscribers.is_empty() {
                    inner.named.remove(name);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::object::{Object, Pod};
    use crate::index::tests::Chance;

    fn pod(name: &str, ip: &str) -> Change {
        Change::Apply(Object::Pod(Pod {
            key: Key::new("shop", name),
            uid: "".into(),
            addresses: vec![ip.parse().unwrap()],
            terminating: false,
            ready: false,
            created: 0,
            zone: "".into(),
            identity: None,
            bypassed: Vec::new(),
            inbound: Default::default(),
        }))
    }

    fn destination(text: &str) -> Resource {
        Resource::Destination(text.parse().unwrap())
    }

    #[tokio::test]
    async fn is_synced_after_a_list_of_each_kind() {
        let hub = Hub::default();
        hub.apply([
            Change::Reset(Kind::Service, vec![]),
            Change::Reset(Kind::Pod, vec![]),
        ]);
        assert_eq!(hub.missing(), [Kind::Slice].into());
        let waiting = tokio::spawn({
            let hub = hub.clone();
            async move { hub.synced().await }
        });
        hub.apply([Change::Reset(Kind::Slice, vec![])]);
        waiting.await.unwrap();
        assert!(hub.missing().is_empty());
    }

    #[tokio::test]
    async fn slow_reader_gets_the_latest_state_once() {
        let hub = Hub::default();
        let mut reader = hub.watch_resources();
        reader.subscribe(&destination("10.0.0.1:80"));
        for round in 0..1000 {
            hub.apply([
                pod(&format!("p{round}"), "10.0.0.1"),
                Change::Delete(Kind::Pod, Key::new("shop", &format!("p{}", round - 1))),
            ]);
        }
        reader.wait().await;
        let (_, published) = reader.next().unwrap();
        assert_eq!(
            published.state.target.as_ref().unwrap().key,
            Key::new("shop", "p999")
        );
        assert!(
            reader.next().is_none(),
            "the queue contained the destination once"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn publishes_a_change_at_once_and_a_burst_together() {
        let (hub, (sender, changes)) = (Hub::default(), mpsc::channel(100));
        let mut reader = hub.watch_resources();
        reader.subscribe(&destination("10.0.0.1:80"));
        reader.next().unwrap();
        let following = tokio::spawn(async move { hub.follow(changes).await });
        let start = Instant::now();
        sender.send(pod("p", "10.0.0.1")).await.unwrap();
        reader.wait().await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        reader.next().unwrap();
        for name in ["q", "r", "s"] {
            sender.send(pod(name, "10.0.0.1")).await.unwrap();
            tokio::time::sleep(PUBLICATION_INTERVAL / 5).await;
        }
        reader.wait().await;
        assert_eq!(
            start.elapsed().as_millis(),
            PUBLICATION_INTERVAL.as_millis()
        );
        let (_, published) = reader.next().unwrap();
        let target = published.state.target.as_ref().unwrap();
        assert_eq!((&*target.key.name, reader.next().is_none()), ("s", true));
        drop(sender);
        following.await.unwrap();
    }

    #[test]
    fn notifies_only_subscribers_of_changed_destinations() {
        let hub = Hub::default();
        let (mut one, mut other) = (hub.watch_resources(), hub.watch_resources());
        one.subscribe(&destination("10.0.0.1:80"));
        other.subscribe(&destination("10.0.0.2:80"));
        assert!(one.next().is_some() && other.next().is_some());
        hub.apply([pod("p", "10.0.0.1")]);
        assert!(one.next().is_some());
        assert!(other.next().is_none());
        // Affected, but unchanged.
        hub.apply([pod("p", "10.0.0.1")]);
        assert!(one.next().is_none());
    }

    #[test]
    fn dropped_subscribers_leave_no_state() {
        let hub = Hub::default();
        let mut one = hub.watch_resources();
        one.subscribe(&destination("10.0.0.1:80"));
        one.subscribe(&destination("10.0.0.1:81"));
        one.unsubscribe(&destination("10.0.0.1:81"));
        let services = hub.watch_services(&[Key::new("shop", "web")].into());
        let all = hub.watch_services(&BTreeSet::new());
        let counts = hub.counts();
        assert_eq!((counts.resources, counts.subscriptions), (1, 1));
        drop((one, services, all));
        let inner = hub.lock();
        assert!(inner.resources.is_empty() && inner.named.is_empty() && inner.all.is_empty());
    }

    #[test]
    fn readers_of_any_pace_end_with_the_state_of_the_index() {
        for seed in 0..50 {
            let mut chance = Chance(fastrand::Rng::with_seed(seed));
            let hub = Hub::default();
            let mut readers: Vec<_> = (0..3)
                .map(|_| (hub.watch_resources(), HashMap::new()))
                .collect();
            for _ in 0..200 {
                let count = chance.0.usize(..3);
                let changes: Vec<Change> = (0..count).map(|_| chance.change()).collect();
                hub.apply(changes);
                let (reader, known) = &mut readers[chance.0.usize(..3)];
                let all = Chance::destinations();
                let some = Resource::Destination(all[chance.0.usize(..all.len())]);
                match chance.0.u8(..4) {
                    0 => reader.subscribe(&some),
                    1 => {
                        reader.unsubscribe(&some);
                        known.remove(&some);
                    }
                    _ => take(reader, known),
                }
            }
            for (reader, known) in &mut readers {
                while reader.queue.len() > 0 {
                    take(reader, known);
                }
                assert_eq!(known.len(), reader.subscribed.len(), "seed {seed}");
                for (resource, published) in known {
                    assert_eq!(
                        *published.state,
                        hub.lock().index.state(resource),
                        "seed {seed}: {resource:?}"
                    );
                }
            }
        }
    }

    fn take(reader: &Resources, known: &mut HashMap<Resource, Arc<Published>>) {
        if let Some((resource, published)) = reader.next() {
            known.insert(resource, published);
        }
    }
}
