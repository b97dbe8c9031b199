//! The hub: subscriptions to resources and Services, and their pending notifications. Between
//! the index and the gRPC streams.
//!
//! Per changed resource, the state is computed and encoded once. Per subscriber, the state is added
//! to its queue. A queue contains each topic once: a slow reader gets the latest state, and queues
//! stay bounded.
//!
//! Two locks: that of the index, and that of the subscribers, in this order. States are resolved
//! under a shared lock of the index only, so streams read their queues meanwhile. The conditions of
//! `enforcement` have a lock of their own, which is taken alone.

mod enforcement;
mod history;
mod queue;
mod resources;
mod services;
mod subscribers;
mod watched;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::authenticate::PodRef;
use crate::index::locality::Location;
use crate::index::object::{Change, Event, Key, Kind, Source};
use crate::index::view::ServiceView;
use crate::index::{Index, Touched};
use crate::routes::RouteStatus;
use crate::routes::enforcement::Reports;
use history::History;
pub use resources::{Notifications, Resources};
pub use services::Services;
use subscribers::Subscribers;
use watched::Resolved;

/// The maximum number of changes that are applied under one lock.
const MAX_BATCH: usize = 1024;
/// Minimum time between two publications, which merges the changes of a rollout.
const PUBLICATION_INTERVAL: Duration = Duration::from_millis(100);
/// Minimum time between two publications of the replicas that share rate limits.
const REPLICAS_INTERVAL: Duration = Duration::from_secs(5);
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
    index: Arc<RwLock<Index>>,
    subscribers: Arc<Mutex<Subscribers>>,
    missing: watch::Sender<BTreeSet<(Source, Kind)>>,
    meshed: watch::Sender<BTreeSet<Arc<str>>>,
    /// Notified after each change.
    changed: watch::Sender<()>,
    /// Notified after each change that may concern the status of a route.
    routed: watch::Sender<()>,
    /// The routes and policies that connected proxies do not apply.
    reports: Arc<Mutex<Reports>>,
    /// The endpoints of former states.
    history: Arc<Mutex<History>>,
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
    /// Streams of proxies without the capability `routes`, and without `policy`.
    pub missing: [usize; 2],
}

impl Hub {
    /// An empty catalog that is synced when each of these sources has listed each kind.
    pub fn new(sources: impl IntoIterator<Item = Source>) -> Hub {
        let all = |source| Kind::ALL.map(|kind| (source, kind));
        Hub {
            index: Arc::default(),
            subscribers: Arc::default(),
            missing: watch::Sender::new(sources.into_iter().flat_map(all).collect()),
            meshed: watch::Sender::default(),
            changed: watch::Sender::new(()),
            routed: watch::Sender::new(()),
            reports: Arc::default(),
            history: Arc::default(),
        }
    }

    /// Applies the changes of a catalog until it ends. Subscribers are notified of a change at
    /// once, and of the changes that follow it within an interval together.
    pub async fn follow(&self, mut changes: mpsc::Receiver<Event>) {
        let (mut batch, mut touched) = (Vec::new(), Touched::default());
        // A change of the replicas of a Service concerns all of its pods.
        let mut replicas = BTreeSet::new();
        let (mut next_publication, mut next_replicas) = (Instant::now(), Instant::now());
        loop {
            tokio::select! {
                count = changes.recv_many(&mut batch, MAX_BATCH) => {
                    if count == 0 {
                        touched.replicas = replicas;
                        return self.publish(&touched);
                    }
                    self.update(batch.drain(..), &mut touched);
                    replicas.append(&mut touched.replicas);
                }
                () = sleep_until(next_replicas), if !replicas.is_empty() => {
                    touched.replicas = std::mem::take(&mut replicas);
                    next_replicas = Instant::now() + REPLICAS_INTERVAL;
                }
                () = sleep_until(next_publication), if touched != Touched::default() => {
                    self.publish(&std::mem::take(&mut touched));
                    next_publication = Instant::now() + PUBLICATION_INTERVAL;
                }
            }
        }
    }

    /// Applies changes and notifies the subscribers of the affected topics.
    pub fn apply<E: Into<Event>>(&self, changes: impl IntoIterator<Item = E>) {
        let mut touched = Touched::default();
        self.update(changes, &mut touched);
        self.publish(&touched);
    }

    /// Applies changes and adds the affected topics to `touched`.
    fn update<E: Into<Event>>(&self, changes: impl IntoIterator<Item = E>, touched: &mut Touched) {
        let mut listed: BTreeSet<(Source, Kind)> = BTreeSet::new();
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        for event in changes.into_iter().map(Into::into) {
            if let Change::Reset(source, kind, _) | Change::Unavailable(source, kind) =
                &event.change
            {
                listed.insert((*source, *kind));
            }
            index.apply_event(event, touched);
        }
        if index.settle(touched) {
            self.routed.send_replace(());
        }
        self.meshed.send_if_modified(|meshed| {
            let now = index.meshed_namespaces().cloned().collect();
            std::mem::replace(meshed, now) != *meshed
        });
        drop(index);
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
        self.wait_listed(&Kind::ALL, stopping).await
    }

    /// Waits until the objects of these kinds are listed, for a few seconds at most.
    pub async fn wait_listed(
        &self,
        kinds: &[Kind],
        stopping: &CancellationToken,
    ) -> Result<(), CatalogError> {
        tokio::select! {
            () = self.listed(kinds) => Ok(()),
            () = stopping.cancelled() => Err(CatalogError::Stopping),
            () = tokio::time::sleep(SYNC_TIMEOUT) => {
                let missing = self.missing();
                let missing = missing.iter().filter(|kind| kinds.contains(kind));
                let missing: Vec<&str> = missing.map(|kind| kind.name()).collect();
                Err(CatalogError::NotSynced(missing.join(", ")))
            }
        }
    }

    /// Waits for a synced catalog.
    pub async fn synced(&self) {
        self.listed(&Kind::ALL).await;
    }

    async fn listed(&self, kinds: &[Kind]) {
        let mut missing = self.missing.subscribe();
        let is_listed = |missing: &BTreeSet<(Source, Kind)>| {
            missing.iter().all(|(_, kind)| !kinds.contains(kind))
        };
        let waited = missing.wait_for(is_listed).await;
        debug_assert!(waited.is_ok(), "self holds the sender");
    }

    /// The namespaces with meshed pods, and changes.
    pub fn meshed_namespaces(&self) -> watch::Receiver<BTreeSet<Arc<str>>> {
        self.meshed.subscribe()
    }

    /// What the authors of routes are told: all routes with a parent that is a Service.
    pub fn route_statuses(&self) -> Vec<RouteStatus> {
        let mut statuses = self.index().route_statuses();
        let reports = self.reports();
        statuses.iter_mut().for_each(|one| reports.add_to(one));
        statuses
    }

    /// Notified when the status of a route may have changed.
    pub fn routes_changed(&self) -> watch::Receiver<()> {
        self.routed.subscribe()
    }

    /// The keys and UIDs of ready meshed pods.
    pub fn ready_meshed_pods(&self) -> Vec<(Key, Arc<str>)> {
        self.index()
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

    /// Reads the current index under its lock. `read` must not use the hub.
    pub fn read<T>(&self, read: impl FnOnce(&Index) -> T) -> T {
        read(&self.index())
    }

    /// The current state of a Service.
    pub fn service(&self, key: &Key) -> Option<ServiceView> {
        self.index().service(key)
    }

    /// The keys of all Services.
    pub fn service_keys(&self) -> BTreeSet<Key> {
        self.index().service_keys()
    }

    /// A subscriber without subscriptions, in the pod that its token is bound to, if any.
    pub fn watch_resources(&self, pod: Option<PodRef>) -> Resources {
        let index = self.index();
        let location = subscribers::location(&index, pod.as_ref());
        let (id, queue) = self.subscribers().add_client(pod, location);
        let hub = self.clone();
        Resources { hub, id, queue }
    }

    /// A subscriber to these Services, or to all if `names` is empty, with a pending notification
    /// for each.
    pub fn watch_services(&self, names: &BTreeSet<Key>) -> Services {
        let index = self.index();
        let (id, queue) = self.subscribers().watch_services(names);
        match names.is_empty() {
            true => index
                .service_keys()
                .into_iter()
                .for_each(|key| queue.push(key, ())),
            false => names.iter().for_each(|name| queue.push(name.clone(), ())),
        }
        Services {
            hub: self.clone(),
            id,
            names: names.clone(),
            queue,
        }
    }

    /// Wakes all subscribers to resources, to look for changes that are not in the catalog.
    pub fn wake_clients(&self) {
        self.subscribers().wake_clients();
    }

    /// Sizes for the metrics.
    pub fn counts(&self) -> Counts {
        let index = self.index();
        let subscribers = self.subscribers();
        let (resources, subscriptions) = subscribers.counts();
        Counts {
            missing: subscribers.count_missing(),
            objects: Kind::ALL.map(|kind| (kind, index.count(kind))).into(),
            resources,
            subscriptions,
        }
    }

    /// Resolves what is affected, and notifies its subscribers. The shared lock keeps the index
    /// unchanged until the end, so that a new subscriber cannot replace a newer state.
    fn publish(&self, touched: &Touched) {
        let index = self.index();
        let affected = self.subscribers().affected(&index, touched);
        for resource in affected {
            let mut resolved = Resolved::new(&index, &resource, &Location::default());
            let locations = self.subscribers().locations(&resource, &resolved.scope);
            for location in locations {
                resolved.add(&index, &resource, location);
            }
            let history = &mut self.history();
            self.subscribers()
                .update(&index, &resource, resolved, history);
        }
        self.subscribers().relocate(&index, touched);
        self.subscribers().notify_services(&touched.services);
    }

    /// After a panic under a lock, index and subscribers stay in use.
    fn index(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reports(&self) -> MutexGuard<'_, Reports> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn subscribers(&self) -> MutexGuard<'_, Subscribers> {
        self.subscribers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
