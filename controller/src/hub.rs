//! The hub: subscriptions to resources and Services, and their pending notifications. Between
//! the index and the gRPC streams.
//!
//! Per changed resource, the state is computed and encoded once. Per subscriber, the topic is added
//! to its queue. A queue contains each topic once: a slow reader gets the latest state, and queues
//! stay bounded.

mod published;
mod queue;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::authenticate::PodRef;
use crate::index::locality::{Location, Scope};
use crate::index::object::{Change, Event, Key, Kind, Resource, Source};
use crate::index::view::ServiceView;
use crate::index::{Index, Touched};
use crate::routes::RouteStatus;
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
    /// Notified after each change that may concern the status of a route.
    routed: watch::Sender<()>,
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

/// A resource with subscribers.
#[derive(Default)]
struct Watched {
    scope: Scope,
    /// The states by the location of clients within the scope. One for most resources.
    states: HashMap<Location, Arc<Published>>,
    subscribers: BTreeSet<u64>,
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
            routed: watch::Sender::new(()),
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
        if inner.index.settle(touched) {
            self.routed.send_replace(());
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

    /// What the authors of routes are told: all routes with a parent that is a Service.
    pub fn route_statuses(&self) -> Vec<RouteStatus> {
        self.lock().index.route_statuses()
    }

    /// Notified when the status of a route may have changed.
    pub fn routes_changed(&self) -> watch::Receiver<()> {
        self.routed.subscribe()
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

impl Watched {
    /// Adds the state for a location, if there is none. `before` are earlier states.
    fn add(
        &mut self,
        resource: &Resource,
        index: &Index,
        location: &Location,
        before: &HashMap<Location, Arc<Published>>,
    ) {
        let location = location.within(&self.scope);
        self.states.entry(location).or_insert_with_key(|location| {
            let (_, state) = index.resolve(resource, location);
            Published::next(before.get(location), state)
        });
    }

    fn published(&self, location: &Location) -> Option<&Arc<Published>> {
        self.states.get(&location.within(&self.scope))
    }

    /// Resolves the resource again, and notifies the subscribers whose state has changed. Work is
    /// done per location, and in most cases there is one.
    fn update(&mut self, resource: &Resource, index: &Index, clients: &HashMap<u64, Client>) {
        let anywhere = Location::default();
        let (scope, state) = index.resolve(resource, &anywhere);
        let before = std::mem::take(self);
        let next = Published::next(before.states.get(&anywhere), state);
        let is_same = |known: &Arc<Published>| Arc::ptr_eq(known, &next);
        let is_shared = [&before.scope, &scope] == [&Scope::default(); 2];
        let is_unchanged = is_shared && before.states.get(&anywhere).is_some_and(is_same);
        self.scope = scope;
        self.states.insert(anywhere, next);
        let version = |watched: &Watched, client: &Client| {
            let published = watched.published(&client.location)?;
            Some(published.state.version)
        };
        let subscribers = before.subscribers.iter();
        let affected = subscribers.filter(|_| !is_unchanged);
        for client in affected.filter_map(|id| clients.get(id)) {
            if is_shared {
                client.queue.push(resource.clone());
                continue;
            }
            self.add(resource, index, &client.location, &before.states);
            if version(self, client) != version(&before, client) {
                client.queue.push(resource.clone());
            }
        }
        self.subscribers = before.subscribers;
    }
}

/// A subscriber to resources. Dropping it ends its subscriptions.
pub struct Resources {
    hub: Hub,
    id: u64,
    queue: Arc<Queue<Resource>>,
}

impl Resources {
    /// Adds a subscription, and a notification of its current state, even if it exists.
    pub fn subscribe(&mut self, resource: &Resource) {
        let mut inner = self.hub.lock();
        let Inner {
            index,
            resources,
            clients,
            destinations_on,
            ..
        } = &mut *inner;
        let client = clients.get_mut(&self.id).expect("self is a client");
        let watched = resources.entry(resource.clone()).or_default();
        if watched.subscribers.is_empty() {
            (watched.scope, _) = index.resolve(resource, &Location::default());
        }
        if let Resource::Destination(address) = resource {
            let same_port = destinations_on.entry(address.port()).or_default();
            same_port.insert(*address);
        }
        watched.add(resource, index, &client.location, &HashMap::new());
        watched.subscribers.insert(self.id);
        client.subscribed.insert(resource.clone());
        self.queue.push(resource.clone());
    }

    /// Removes a subscription.
    pub fn unsubscribe(&mut self, resource: &Resource) {
        let mut inner = self.hub.lock();
        let client = inner.clients.get_mut(&self.id);
        if client.is_some_and(|client| client.subscribed.remove(resource)) {
            forget(&mut inner, resource, self.id);
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
            let client = inner.clients.get(&self.id)?;
            // A pending notification of a subscription that has ended is dropped.
            if let Some(watched) = inner.resources.get(&resource)
                && watched.subscribers.contains(&self.id)
                && let Some(published) = watched.published(&client.location)
            {
                return Some((resource, published.clone()));
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
        let Some(client) = inner.clients.remove(&self.id) else {
            return;
        };
        for resource in &client.subscribed {
            forget(&mut inner, resource, self.id);
        }
        if let Some(key) = client.pod.as_ref().map(PodRef::key)
            && let Some(clients) = inner.clients_of_pod.get_mut(&key)
        {
            clients.remove(&self.id);
            if clients.is_empty() {
                inner.clients_of_pod.remove(&key);
            }
        }
    }
}

fn forget(inner: &mut Inner, resource: &Resource, subscriber: u64) {
    if let Some(watched) = inner.resources.get_mut(resource) {
        watched.subscribers.remove(&subscriber);
        if watched.subscribers.is_empty() {
            inner.resources.remove(resource);
            if let Resource::Destination(address) = resource
                && let Some(same_port) = inner.destinations_on.get_mut(&address.port())
            {
                same_port.remove(address);
                if same_port.is_empty() {
                    inner.destinations_on.remove(&address.port());
                }
            }
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
                labels: Default::default(),
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
        let optional = Kind::ALL.into_iter().filter(|kind| kind.is_optional());
        assert_eq!(hub.missing().len(), 1 + optional.clone().count());
        hub.apply(optional.map(|kind| Change::Unavailable(kubernetes, kind)));
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
        let mut reader = hub.watch_resources(None);
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
        let mut reader = hub.watch_resources(None);
        let position = |reader: &Resources| {
            let (_, published) = reader.next()?;
            let position = published.state.position.as_ref()?;
            Some((position.epoch.to_string(), position.versions[&Kind::Pod]))
        };
        hub.apply([event(list(Kind::Service, vec![api]), 10)]);
        hub.apply([event(list(Kind::Slice, vec![]), 11)]);
        hub.apply([event(list(Kind::Pod, vec![]), 12)]);
        let mut other = hub.watch_resources(None);
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
        let mut reader = hub.watch_resources(None);
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
        let mut reader = hub.watch_resources(None);
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
        let elapsed = start.elapsed().as_millis();
        assert_eq!(elapsed, PUBLICATION_INTERVAL.as_millis());
        let (_, published) = reader.next().unwrap();
        let target = published.state.target.as_ref().unwrap();
        assert_eq!((&*target.key.name, reader.next().is_none()), ("s", true));
        drop(sender);
        following.await.unwrap();
    }

    #[test]
    fn notifies_only_subscribers_of_changed_destinations() {
        let hub = Hub::new([Source::Kubernetes]);
        let (mut one, mut other) = (hub.watch_resources(None), hub.watch_resources(None));
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
    fn clients_on_one_node_share_the_states_of_a_local_service() {
        let hub = Hub::new([Source::Kubernetes]);
        let client = |name: &str| {
            let pod = PodRef {
                namespace: "shop".into(),
                name: name.into(),
                uid: "".into(),
            };
            let mut reader = hub.watch_resources(Some(pod));
            reader.subscribe(&destination("10.96.0.1:80"));
            reader
        };
        let on_node = |name: &str, node: &str| {
            let Change::Apply(source, Object::Pod(pod)) = pod(name, "10.1.0.1") else {
                panic!("a pod")
            };
            let node = node.into();
            Change::Apply(source, Object::Pod(Pod { node, ..pod }))
        };
        let endpoints = |reader: &Resources| {
            let published = reader.next()?.1;
            let endpoints = published.state.target.as_ref()?.endpoints.iter();
            Some(
                endpoints
                    .map(|one| one.address.to_string())
                    .collect::<Vec<_>>(),
            )
        };
        let addresses = ["10.0.0.1", "10.0.0.2"];
        let mut service = crate::index::tests::service_with_pods("web", "10.96.0.1", &addresses);
        for object in &mut service {
            match object {
                Object::Service(service) => service.local_only = true,
                Object::Slice(slice) => {
                    slice.endpoints[0].node = "n1".into();
                    slice.endpoints[1].node = "n2".into();
                }
                _ => {}
            }
        }
        hub.apply([on_node("a", "n1"), on_node("b", "n1"), on_node("c", "n2")]);
        let changes = service.iter().cloned();
        hub.apply(changes.map(|object| Change::Apply(Source::Kubernetes, object)));
        let (a, b, c, late) = (client("a"), client("b"), client("c"), client("late"));
        let (first, second) = (
            vec!["10.0.0.1:8080".to_owned()],
            vec!["10.0.0.2:8080".to_owned()],
        );
        assert_eq!(endpoints(&a), Some(first.clone()));
        assert_eq!(endpoints(&b), Some(first));
        assert_eq!(endpoints(&c), Some(second.clone()));
        assert_eq!(endpoints(&late), Some(vec![]), "its node is unknown");
        let states = || {
            hub.lock().resources[&destination("10.96.0.1:80")]
                .states
                .len()
        };
        assert_eq!(states(), 3);
        // The catalog learns of the pod.
        hub.apply([on_node("late", "n2")]);
        assert_eq!(endpoints(&late), Some(second));
        assert!(a.next().is_none() && c.next().is_none());
        // The Service is the same for all clients again.
        let Some(Object::Service(mut web)) = service.iter().rev().nth(1).cloned() else {
            panic!("the Service comes before its slice")
        };
        web.local_only = false;
        hub.apply([Change::Apply(Source::Kubernetes, Object::Service(web))]);
        for reader in [&a, &b, &c, &late] {
            assert_eq!(endpoints(reader).unwrap().len(), 2);
        }
        assert_eq!(states(), 1);
    }

    #[test]
    fn dropped_subscribers_leave_no_state() {
        let hub = Hub::new([Source::Kubernetes]);
        let mut one = hub.watch_resources(None);
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
        assert!(inner.clients.is_empty() && inner.clients_of_pod.is_empty());
        assert!(inner.destinations_on.is_empty());
    }

    #[test]
    fn readers_of_any_pace_end_with_the_state_of_the_index() {
        for seed in 0..50 {
            let mut chance = Chance(fastrand::Rng::with_seed(seed));
            let hub = Hub::new([Source::Kubernetes]);
            // Pods that come, go, and move between nodes.
            let pods = ["p1", "p2", "p3"].map(|name| PodRef {
                namespace: "shop".into(),
                name: name.into(),
                uid: "".into(),
            });
            let mut readers: Vec<_> = pods
                .map(|pod| (hub.watch_resources(Some(pod)), HashMap::new()))
                .into();
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
                let subscribed = hub.lock().clients[&reader.id].subscribed.len();
                assert_eq!(known.len(), subscribed, "seed {seed}");
                let location = &hub.lock().clients[&reader.id].location.clone();
                for (resource, published) in known {
                    assert_eq!(
                        *published.state,
                        hub.lock().index.resolve(resource, location).1,
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
