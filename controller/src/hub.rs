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

use crate::index::object::{Change, Event, Key, Kind, Resource, Source};
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
    missing: watch::Sender<BTreeSet<(Source, Kind)>>,
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

    /// Applies the changes of a catalog until it ends. Subscribers are notified of a change at once,
    /// and of the changes that follow it within an interval together.
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

    /// A handle that waits for notifications.
    pub fn notifications(&self) -> Notifications {
        Notifications(self.queue.clone())
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

/// Waits for the notifications of a subscriber.
pub struct Notifications(Arc<Queue<Resource>>);

impl Notifications {
    /// Waits for a notification. Cancel-safe.
    pub async fn wait(&self) {
        self.0.wait().await;
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
        Change::Apply(
            Source::Kubernetes,
            Object::Pod(Pod {
                key: Key::new("shop", name),
                uid: "".into(),
                addresses: vec![ip.parse().unwrap()],
                terminating: false,
                ready: false,
                created: 0,
                node: "".into(),
                zone: "".into(),
                identity: None,
                bypassed: Vec::new(),
                inbound: Default::default(),
            }),
        )
    }

    fn destination(text: &str) -> Resource {
        Resource::Destination(text.parse().unwrap())
    }

    #[tokio::test]
    async fn is_synced_when_each_source_has_listed_or_lacks_each_kind() {
        let (kubernetes, files) = (Source::Kubernetes, Source::Files);
        let hub = Hub::new([kubernetes, files]);
        let listed = |source| move |kind| Change::Reset(source, kind, vec![]);
        hub.apply(Kind::ALL.map(listed(files)));
        hub.apply([Kind::Service, Kind::Pod].map(listed(kubernetes)));
        assert_eq!(hub.missing(), [Kind::Slice, Kind::Node].into());
        hub.apply([Change::Unavailable(kubernetes, Kind::Node)]);
        assert_eq!(hub.missing(), [Kind::Slice].into());
        let waiting = tokio::spawn({
            let hub = hub.clone();
            async move { hub.synced().await }
        });
        hub.apply([listed(kubernetes)(Kind::Slice)]);
        waiting.await.unwrap();
        assert!(hub.missing().is_empty());
    }

    #[test]
    fn list_of_the_same_objects_notifies_nobody_and_never_empties_a_service() {
        let objects = |addresses: &[&str]| {
            crate::index::tests::service_with_pods("web", "10.96.0.1", addresses)
        };
        let resets = |addresses: &[&str]| {
            let all = objects(addresses);
            Kind::ALL.map(|kind| {
                let of_kind = all.iter().filter(|object| object.kind() == kind);
                Change::Reset(Source::Kubernetes, kind, of_kind.cloned().collect())
            })
        };
        let hub = Hub::new([Source::Kubernetes]);
        hub.apply(resets(&["10.0.0.1", "10.0.0.2"]));
        let mut reader = hub.watch_resources();
        reader.subscribe(&destination("10.96.0.1:80"));
        assert!(reader.next().is_some());
        // Each kind is listed again on its own, at another time.
        for reset in resets(&["10.0.0.1", "10.0.0.2"]) {
            hub.apply([reset]);
            assert!(reader.next().is_none());
        }
        for reset in resets(&["10.0.0.2"]) {
            hub.apply([reset]);
            while let Some((_, published)) = reader.next() {
                assert!(
                    !published
                        .state
                        .target
                        .as_ref()
                        .unwrap()
                        .endpoints
                        .is_empty()
                );
            }
        }
    }

    #[test]
    fn states_have_the_position_of_the_event_that_changed_them() {
        let hub = Hub::new([Source::Kubernetes]);
        let event = |change, version| Event {
            change,
            version: Some(version),
        };
        let api = crate::index::tests::api_service("uid");
        let list = |kind, objects| Change::Reset(Source::Kubernetes, kind, objects);
        let mut reader = hub.watch_resources();
        let position = |reader: &Resources| {
            let (_, published) = reader.next()?;
            let position = published.state.position.as_ref()?;
            Some((position.epoch.to_string(), position.versions[&Kind::Pod]))
        };
        hub.apply([event(list(Kind::Service, vec![api]), 10)]);
        hub.apply([event(list(Kind::Slice, vec![]), 11)]);
        hub.apply([event(list(Kind::Pod, vec![]), 12)]);
        let mut other = hub.watch_resources();
        other.subscribe(&destination("10.0.0.2:80"));
        reader.subscribe(&destination("10.0.0.1:80"));
        assert_eq!(position(&reader), Some(("uid".to_owned(), 12)));
        hub.apply([
            event(pod("p", "10.0.0.1"), 20),
            event(pod("q", "10.0.0.9"), 21),
        ]);
        assert_eq!(position(&reader), Some(("uid".to_owned(), 21)));
        let deleted = Change::Delete(Source::Kubernetes, Kind::Pod, Key::new("shop", "p"));
        hub.apply([event(deleted, 30)]);
        assert_eq!(position(&reader), Some(("uid".to_owned(), 30)));
        // A list after a restore from a backup.
        hub.apply([event(list(Kind::Pod, vec![]), 5)]);
        hub.apply([event(list(Kind::Service, vec![]), 6)]);
        hub.apply([event(pod("p", "10.0.0.1"), 7)]);
        assert_eq!(position(&reader), None, "the Service of the API is gone");
        assert_eq!(
            other
                .next()
                .unwrap()
                .1
                .state
                .position
                .as_ref()
                .unwrap()
                .versions[&Kind::Pod],
            12
        );
    }

    #[tokio::test]
    async fn slow_reader_gets_the_latest_state_once() {
        let hub = Hub::new([Source::Kubernetes]);
        let mut reader = hub.watch_resources();
        reader.subscribe(&destination("10.0.0.1:80"));
        for round in 0..1000 {
            hub.apply([
                pod(&format!("p{round}"), "10.0.0.1"),
                Change::Delete(
                    Source::Kubernetes,
                    Kind::Pod,
                    Key::new("shop", &format!("p{}", round - 1)),
                ),
            ]);
        }
        reader.notifications().wait().await;
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
        let hub = Hub::new([Source::Kubernetes]);
        let (sender, changes) = mpsc::channel(100);
        let mut reader = hub.watch_resources();
        reader.subscribe(&destination("10.0.0.1:80"));
        reader.next().unwrap();
        let following = tokio::spawn(async move { hub.follow(changes).await });
        let start = Instant::now();
        sender.send(pod("p", "10.0.0.1").into()).await.unwrap();
        reader.notifications().wait().await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        reader.next().unwrap();
        for name in ["q", "r", "s"] {
            sender.send(pod(name, "10.0.0.1").into()).await.unwrap();
            tokio::time::sleep(PUBLICATION_INTERVAL / 5).await;
        }
        reader.notifications().wait().await;
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
        let hub = Hub::new([Source::Kubernetes]);
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
        let hub = Hub::new([Source::Kubernetes]);
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
            let hub = Hub::new([Source::Kubernetes]);
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
