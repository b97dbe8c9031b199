//! The hub: subscriptions to destinations and Services, and their pending notifications. Between
//! the index and the gRPC streams.
//!
//! Per changed destination, the state is computed once. Per subscriber, the topic is added to its
//! mailbox. A mailbox holds each topic once: a slow reader gets the latest state, and queues stay
//! bounded.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::index::object::{Change, Key, Kind};
use crate::index::state::State;
use crate::index::view::ServiceView;
use crate::index::{Index, Touched};

/// How many changes are taken in under one lock; more wait for the next round.
const BATCH: usize = 1024;
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
    /// Sent to after each change, for whoever waits for a fact.
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct Inner {
    index: Index,
    destinations: HashMap<IpAddr, HashMap<u16, Watched>>,
    named: HashMap<Key, HashMap<u64, Arc<Mailbox<Key>>>>,
    all: HashMap<u64, Arc<Mailbox<Key>>>,
    next_subscriber: u64,
}

/// A destination that somebody watches.
struct Watched {
    state: Arc<State>,
    subscribers: HashMap<u64, Arc<Mailbox<SocketAddr>>>,
}

/// How much there is of everything, for the metrics.
#[derive(Debug, Default, PartialEq)]
pub struct Counts {
    /// Objects by kind.
    pub objects: Vec<(Kind, usize)>,
    /// Destinations that somebody watches.
    pub destinations: usize,
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
    /// Takes in what a catalog provider sends, until the provider is gone.
    pub async fn follow(&self, mut changes: mpsc::Receiver<Change>) {
        let mut batch = Vec::new();
        while changes.recv_many(&mut batch, BATCH).await > 0 {
            self.apply(batch.drain(..));
        }
    }

    /// Applies changes and notifies the subscribers of the affected topics.
    pub fn apply(&self, changes: impl IntoIterator<Item = Change>) {
        let mut listed = BTreeSet::new();
        let mut inner = self.lock();
        let mut touched = Touched::default();
        for change in changes {
            if let Change::Reset(kind, _) = &change {
                listed.insert(*kind);
            }
            inner.index.apply(change, &mut touched);
        }
        inner.publish(&touched);
        self.meshed.send_if_modified(|meshed| {
            let changed = !inner.index.meshed_namespaces().eq(meshed.iter());
            if changed {
                *meshed = inner.index.meshed_namespaces().cloned().collect();
            }
            changed
        });
        drop(inner);
        self.changed.send_replace(());
        self.missing.send_if_modified(|missing| {
            let before = missing.len();
            missing.retain(|kind| !listed.contains(kind));
            missing.len() < before
        });
    }

    /// The kinds of object that were not listed yet; none: the catalog is synced.
    pub fn missing(&self) -> BTreeSet<Kind> {
        self.missing.borrow().clone()
    }

    /// Waits for a synced catalog, for [`SYNC_TIMEOUT`] at most.
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

    /// The namespaces that have meshed pods, now and whenever that changes.
    pub fn meshed_namespaces(&self) -> watch::Receiver<BTreeSet<Arc<str>>> {
        self.meshed.subscribe()
    }

    /// Namespace, name and UID of the meshed pods that are ready.
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

    /// A Service as it is now.
    pub fn service(&self, key: &Key) -> Option<ServiceView> {
        self.lock().index.service(key)
    }

    /// All Services there are now.
    pub fn service_keys(&self) -> BTreeSet<Key> {
        self.lock().index.service_keys()
    }

    /// A subscriber to destinations, with none yet.
    pub fn watch_destinations(&self) -> Destinations {
        let id = self.lock().next_id();
        Destinations {
            hub: self.clone(),
            id,
            mailbox: Arc::default(),
            subscribed: HashSet::new(),
        }
    }

    /// A subscriber to the named Services, or to all where none is named. Each of them is news at
    /// first.
    pub fn watch_services(&self, names: &BTreeSet<Key>) -> Services {
        let mut inner = self.lock();
        let id = inner.next_id();
        let mailbox: Arc<Mailbox<Key>> = Arc::default();
        if names.is_empty() {
            inner.all.insert(id, mailbox.clone());
            inner
                .index
                .service_keys()
                .into_iter()
                .for_each(|key| mailbox.put(key));
        }
        for name in names {
            inner
                .named
                .entry(name.clone())
                .or_default()
                .insert(id, mailbox.clone());
            mailbox.put(name.clone());
        }
        Services {
            hub: self.clone(),
            id,
            names: names.clone(),
            mailbox,
        }
    }

    /// How much there is of everything.
    pub fn counts(&self) -> Counts {
        let inner = self.lock();
        let watched = || inner.destinations.values().flat_map(HashMap::values);
        Counts {
            objects: Kind::ALL.map(|kind| (kind, inner.index.count(kind))).into(),
            destinations: watched().count(),
            subscriptions: watched().map(|watched| watched.subscribers.len()).sum(),
        }
    }

    /// A panic under the lock would be a bug of the index; what it left is still the best that we
    /// know.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn publish(&mut self, touched: &Touched) {
        for ip in &touched.addresses {
            let Some(ports) = self.destinations.get_mut(ip) else {
                continue;
            };
            for (port, watched) in ports {
                let destination = SocketAddr::new(*ip, *port);
                let state = self.index.resolve(destination);
                if state.version != watched.state.version {
                    watched.state = Arc::new(state);
                    watched
                        .subscribers
                        .values()
                        .for_each(|mailbox| mailbox.put(destination));
                }
            }
        }
        for key in &touched.services {
            let named = self.named.get(key).into_iter().flat_map(HashMap::values);
            named
                .chain(self.all.values())
                .for_each(|mailbox| mailbox.put(key.clone()));
        }
    }

    fn next_id(&mut self) -> u64 {
        self.next_subscriber += 1;
        self.next_subscriber
    }
}

/// A subscriber to destinations. Dropped, it is forgotten.
pub struct Destinations {
    hub: Hub,
    id: u64,
    mailbox: Arc<Mailbox<SocketAddr>>,
    subscribed: HashSet<SocketAddr>,
}

impl Destinations {
    /// Watches one more destination, whose state is news at once, also where it was watched before.
    pub fn subscribe(&mut self, destination: SocketAddr) {
        let mut inner = self.hub.lock();
        let Inner {
            index,
            destinations,
            ..
        } = &mut *inner;
        let watched = destinations
            .entry(destination.ip())
            .or_default()
            .entry(destination.port());
        let watched = watched.or_insert_with(|| Watched {
            state: Arc::new(index.resolve(destination)),
            subscribers: HashMap::new(),
        });
        watched.subscribers.insert(self.id, self.mailbox.clone());
        self.subscribed.insert(destination);
        self.mailbox.put(destination);
    }

    /// Watches a destination no longer.
    pub fn unsubscribe(&mut self, destination: SocketAddr) {
        if self.subscribed.remove(&destination) {
            forget(&mut self.hub.lock(), destination, self.id);
        }
    }

    /// Waits until there is news. Loses nothing when it is dropped.
    pub async fn wait(&self) {
        self.mailbox.wait().await;
    }

    /// The next news: a destination and its state now.
    pub fn next(&self) -> Option<(SocketAddr, Arc<State>)> {
        loop {
            let destination = self.mailbox.take()?;
            let inner = self.hub.lock();
            let watched = inner
                .destinations
                .get(&destination.ip())
                .and_then(|ports| ports.get(&destination.port()));
            // A note about a destination that was unsubscribed since is no news, even where others
            // watch it.
            if let Some(watched) =
                watched.filter(|watched| watched.subscribers.contains_key(&self.id))
            {
                return Some((destination, watched.state.clone()));
            }
        }
    }
}

impl Drop for Destinations {
    fn drop(&mut self) {
        let mut inner = self.hub.lock();
        for destination in &self.subscribed {
            forget(&mut inner, *destination, self.id);
        }
    }
}

fn forget(inner: &mut Inner, destination: SocketAddr, subscriber: u64) {
    let Some(ports) = inner.destinations.get_mut(&destination.ip()) else {
        return;
    };
    if let Some(watched) = ports.get_mut(&destination.port()) {
        watched.subscribers.remove(&subscriber);
        if watched.subscribers.is_empty() {
            ports.remove(&destination.port());
        }
    }
    if ports.is_empty() {
        inner.destinations.remove(&destination.ip());
    }
}

/// A subscriber to Services. Dropped, it is forgotten.
pub struct Services {
    hub: Hub,
    id: u64,
    names: BTreeSet<Key>,
    mailbox: Arc<Mailbox<Key>>,
}

impl Services {
    /// Waits until there is news. Loses nothing when it is dropped.
    pub async fn wait(&self) {
        self.mailbox.wait().await;
    }

    /// The next news: a Service as it is now, or none for one that does not exist.
    pub fn next(&self) -> Option<(Key, Option<ServiceView>)> {
        let key = self.mailbox.take()?;
        let view = self.hub.service(&key);
        Some((key, view))
    }

    /// Whether the subscription is for all Services.
    pub fn watches_all(&self) -> bool {
        self.names.is_empty()
    }

    /// The number of pending notifications.
    pub fn pending(&self) -> usize {
        self.mailbox.len()
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

/// What a subscriber has to look at: each topic once, first come, first served.
struct Mailbox<T> {
    topics: Mutex<(VecDeque<T>, HashSet<T>)>,
    news: Notify,
}

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        Mailbox {
            topics: Mutex::new((VecDeque::new(), HashSet::new())),
            news: Notify::new(),
        }
    }
}

impl<T: Clone + Eq + Hash> Mailbox<T> {
    fn put(&self, topic: T) {
        let mut topics = self.topics();
        if topics.1.insert(topic.clone()) {
            topics.0.push_back(topic);
            drop(topics);
            self.news.notify_one();
        }
    }

    fn take(&self) -> Option<T> {
        let mut topics = self.topics();
        let topic = topics.0.pop_front()?;
        topics.1.remove(&topic);
        Some(topic)
    }

    fn len(&self) -> usize {
        self.topics().0.len()
    }

    /// There is one reader, so a note that is left between the look and the wait is kept by
    /// `Notify`.
    async fn wait(&self) {
        while self.topics().0.is_empty() {
            self.news.notified().await;
        }
    }

    fn topics(&self) -> MutexGuard<'_, (VecDeque<T>, HashSet<T>)> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner)
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
            opaque_ports: Box::default(),
        }))
    }

    fn destination(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[tokio::test]
    async fn the_catalog_is_synced_once_each_kind_was_listed() {
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
    async fn a_slow_reader_finds_the_latest_state_once_however_often_it_changed() {
        let hub = Hub::default();
        let mut reader = hub.watch_destinations();
        reader.subscribe(destination("10.0.0.1:80"));
        for round in 0..1000 {
            hub.apply([
                pod(&format!("p{round}"), "10.0.0.1"),
                Change::Delete(Kind::Pod, Key::new("shop", &format!("p{}", round - 1))),
            ]);
        }
        reader.wait().await;
        let (_, state) = reader.next().unwrap();
        assert_eq!(state.target.as_ref().unwrap().key, Key::new("shop", "p999"));
        assert!(
            reader.next().is_none(),
            "the mailbox held the destination once"
        );
    }

    #[test]
    fn only_who_watches_what_changed_has_news() {
        let hub = Hub::default();
        let (mut one, mut other) = (hub.watch_destinations(), hub.watch_destinations());
        one.subscribe(destination("10.0.0.1:80"));
        other.subscribe(destination("10.0.0.2:80"));
        assert!(one.next().is_some() && other.next().is_some());
        hub.apply([pod("p", "10.0.0.1")]);
        assert!(one.next().is_some());
        assert!(other.next().is_none());
        // Touched, yet the same: a pod behind it that changes nothing of what it stands for.
        hub.apply([pod("p", "10.0.0.1")]);
        assert!(one.next().is_none());
    }

    #[test]
    fn nothing_is_left_of_subscribers_that_are_gone() {
        let hub = Hub::default();
        let mut one = hub.watch_destinations();
        one.subscribe(destination("10.0.0.1:80"));
        one.subscribe(destination("10.0.0.1:81"));
        one.unsubscribe(destination("10.0.0.1:81"));
        let services = hub.watch_services(&[Key::new("shop", "web")].into());
        let all = hub.watch_services(&BTreeSet::new());
        let counts = hub.counts();
        assert_eq!((counts.destinations, counts.subscriptions), (1, 1));
        drop((one, services, all));
        let inner = hub.lock();
        assert!(inner.destinations.is_empty() && inner.named.is_empty() && inner.all.is_empty());
    }

    #[test]
    fn readers_of_any_pace_end_at_what_the_index_says() {
        for seed in 0..50 {
            let mut chance = Chance(fastrand::Rng::with_seed(seed));
            let hub = Hub::default();
            let mut readers: Vec<_> = (0..3)
                .map(|_| (hub.watch_destinations(), HashMap::new()))
                .collect();
            for _ in 0..200 {
                let count = chance.0.usize(..3);
                let changes: Vec<Change> = (0..count).map(|_| chance.change()).collect();
                hub.apply(changes);
                let (reader, known) = &mut readers[chance.0.usize(..3)];
                let all = Chance::destinations();
                let some = all[chance.0.usize(..all.len())];
                match chance.0.u8(..4) {
                    0 => reader.subscribe(some),
                    1 => {
                        reader.unsubscribe(some);
                        known.remove(&some);
                    }
                    _ => take(reader, known),
                }
            }
            for (reader, known) in &mut readers {
                while reader.mailbox.len() > 0 {
                    take(reader, known);
                }
                assert_eq!(known.len(), reader.subscribed.len(), "seed {seed}");
                for (destination, state) in known {
                    assert_eq!(
                        **state,
                        hub.lock().index.resolve(*destination),
                        "seed {seed}: {destination}"
                    );
                }
            }
        }
    }

    fn take(reader: &Destinations, known: &mut HashMap<SocketAddr, Arc<State>>) {
        if let Some((destination, state)) = reader.next() {
            known.insert(destination, state);
        }
    }
}
