//! The hub: subscriptions to resources and Services, and their pending notifications. Between
//! the index and the gRPC streams.
//!
//! Per changed resource, the state is computed and encoded once. Per subscriber, the state is added
//! to its queue. A queue contains each topic once: a slow reader gets the latest state, and queues
//! stay bounded.
//!
//! Two locks, taken in this order: the lock of the index, and the lock of the subscribers. States
//! are resolved under a shared lock of the index only, so streams read their queues meanwhile. The
//! conditions of `acknowledgements` have a lock of their own, which is taken alone.
//!
//! [`Hub::follow`] alone changes the index. It works in slices of a few milliseconds, without a lock
//! between them. Namespaces take turns in publications, so that none waits for the states of another.

mod acknowledgements;
mod history;
pub(crate) mod keys;
mod queue;
mod resources;
mod subscribers;
mod timed;
pub(crate) mod turns;
mod update;
mod watched;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use diy_mesh_proto::mesh::v1::Service;
use prometheus_client::metrics::histogram::Histogram;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::catalog::Event;
use crate::catalog::claims::Claims;
use crate::index::dependencies::CONFIGURATION;
use crate::index::locality::Location;
use crate::index::reads::{self, Readers};
use crate::index::{Changed, Index, Resource};
use crate::kinds::authorization;
use crate::object::{Key, Kind, ObjectId, ObjectStatus, PodRef, Withheld};
use crate::publish::keys::schedule::Schedule;
use crate::replicas::exchange::Page;
use crate::status::programmed::Reports;
use crate::status::statuses::Statuses;
pub use acknowledgements::Rejection;
use history::History;
pub use resources::{Notifications, Resources};
pub use subscribers::Lacking;
use subscribers::Subscribers;
use timed::{Holds, Timed};
use turns::Turns;
use update::Update;
use watched::Resolved;

/// The maximum number of changes that are taken at once.
const MAX_BATCH: usize = 1024;
/// Time after which work under a lock makes a pause.
const MAX_SLICE: Duration = Duration::from_millis(5);
/// Minimum time between two publications, which merges the changes of a rollout.
const PUBLICATION_INTERVAL: Duration = Duration::from_millis(100);
/// Upper bounds of the histogram of publications, in seconds.
const PUBLICATION_BUCKETS: [f64; 8] = [0.001, 0.005, 0.02, 0.1, 0.2, 0.5, 2.0, 10.0];
/// Minimum time between two publications of the replicas that share rate limits.
const REPLICAS_INTERVAL: Duration = Duration::from_secs(5);
/// Changes of Services that a slow client has not read. Beyond them, all may have changed for it.
const MAX_UNREAD_CHANGES: usize = 16;
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
    /// The kinds that were not listed yet, and whether calls wait for them.
    unlisted: watch::Sender<Unlisted>,
    meshed: watch::Sender<BTreeSet<Arc<str>>>,
    /// The invalid AuthorizationPolicies of the mesh, which the log names once.
    invalid: watch::Sender<BTreeSet<Key>>,
    /// The namespaces that lack their AuthorizationPolicies, which the log names once.
    lost: watch::Sender<BTreeSet<Arc<str>>>,
    /// Notified after each change.
    changed: watch::Sender<()>,
    /// The objects whose status may have changed since they were last taken.
    changed_statuses: watch::Sender<BTreeSet<ObjectId>>,
    /// The keys of issuers: when to fetch which, and what was fetched.
    fetches: Arc<Mutex<Schedule>>,
    /// The outcomes of routes and policies at connected proxies.
    reports: Arc<Mutex<Reports>>,
    /// The endpoints of former states.
    history: Arc<Mutex<History>>,
    changed_services: broadcast::Sender<Arc<BTreeSet<Key>>>,
    /// The Services that were read while somebody waits for their changes.
    services: Arc<Mutex<Readers<Key>>>,
    claims: Claims,
    holds: Arc<[Holds; 3]>,
    /// The times from the receipt of changes to the notification of subscribers.
    publications: Histogram,
}

type Unlisted = BTreeMap<Kind, bool>;

/// Sizes for the metrics.
#[derive(Debug, Default, PartialEq)]
pub struct Counts {
    /// Objects by kind.
    pub objects: Vec<(Kind, usize)>,
    /// Resources with subscribers.
    pub resources: usize,
    /// Subscriptions to them.
    pub subscriptions: usize,
    /// Streams of proxies of an earlier release, without routes and policies.
    pub earlier: usize,
    /// Streams of proxies that apply no AuthorizationPolicies.
    pub unauthorizing: usize,
    /// Streams of proxies that apply no AuthorizationPolicies about calls by their pods.
    pub without_egress: usize,
    /// Streams of proxies that apply no telemetry.
    pub without_telemetry: usize,
}

impl Default for Hub {
    /// An empty catalog that is synced when each kind was listed.
    fn default() -> Hub {
        let unlisted = CONFIGURATION.iter().map(|kind| (*kind, true));
        Hub {
            index: Arc::default(),
            subscribers: Arc::default(),
            unlisted: watch::Sender::new(unlisted.collect()),
            meshed: watch::Sender::default(),
            invalid: watch::Sender::default(),
            lost: watch::Sender::default(),
            changed: watch::Sender::new(()),
            changed_statuses: watch::Sender::default(),
            fetches: Arc::default(),
            reports: Arc::default(),
            history: Arc::default(),
            changed_services: broadcast::Sender::new(MAX_UNREAD_CHANGES),
            services: Arc::default(),
            claims: Claims::default(),
            holds: Arc::default(),
            publications: Histogram::new(PUBLICATION_BUCKETS),
        }
    }
}

impl Hub {
    /// The hub of a mesh whose controller is in this namespace.
    pub fn of_mesh(namespace: &str) -> Hub {
        Hub {
            index: Arc::new(RwLock::new(Index::of_mesh(namespace))),
            ..Hub::default()
        }
    }

    /// Applies the changes of a catalog until it ends. Subscribers are notified of a change at
    /// once, and of the changes that follow it within an interval together.
    pub async fn follow(&self, mut changes: mpsc::Receiver<Event>) {
        let (mut batch, mut changed) = (Vec::new(), Changed::default());
        // A change of the replicas of a Service concerns all of its pods: it waits for its own interval,
        // then for the next publication.
        let (mut replicas, mut due) = (BTreeSet::new(), BTreeSet::new());
        let (mut next_publication, mut next_replicas) = (Instant::now(), Instant::now());
        let mut turns = Turns::default();
        // The time of the oldest change that is not published.
        let mut since = None;
        let mut is_published = true;
        loop {
            tokio::select! {
                count = changes.recv_many(&mut batch, MAX_BATCH) => {
                    since.get_or_insert_with(Instant::now);
                    let mut update = Update::new(batch.drain(..));
                    let latest = loop {
                        match self.update(&mut update) {
                            Some(latest) => break latest,
                            None => yield_now().await,
                        }
                    };
                    changed.append(latest);
                    replicas.append(&mut changed.replicas);
                    is_published = false;
                    if count == 0 {
                        due.append(&mut replicas);
                        changed.replicas = due;
                        self.begin_publication(&changed, &mut turns, since);
                        while self.publish(&mut turns) {}
                        return;
                    }
                }
                () = sleep_until(next_replicas), if !replicas.is_empty() => {
                    due.append(&mut replicas);
                    is_published = false;
                    next_replicas = Instant::now() + REPLICAS_INTERVAL;
                }
                () = sleep_until(next_publication), if !is_published => {
                    let mut changed = std::mem::take(&mut changed);
                    changed.replicas = std::mem::take(&mut due);
                    self.begin_publication(&changed, &mut turns, since.take());
                    is_published = true;
                    // A new position alone delays no change.
                    if changed != Changed::default() {
                        next_publication = Instant::now() + PUBLICATION_INTERVAL;
                    }
                }
                () = yield_now(), if !turns.is_empty() => drop(self.publish(&mut turns)),
            }
        }
    }

    /// Applies changes and notifies the subscribers of the affected resources.
    pub fn apply<E: Into<Event>>(&self, changes: impl IntoIterator<Item = E>) {
        let mut turns = Turns::default();
        let since = Some(Instant::now());
        let mut update = Update::new(changes.into_iter().map(Into::into));
        let changed = loop {
            if let Some(changed) = self.update(&mut update) {
                break changed;
            }
        };
        self.begin_publication(&changed, &mut turns, since);
        while self.publish(&mut turns) {}
    }

    /// Applies a part of the changes. Returns what has changed once all are applied.
    fn update(&self, update: &mut Update) -> Option<Changed> {
        let has_steps = update.prepare(&self.index());
        let mut index = self.index_mut();
        let end = Instant::now() + MAX_SLICE;
        while let Some(step) = update.next() {
            index.step(step);
            if Instant::now() >= end {
                return None;
            }
        }
        if has_steps {
            // There may be more.
            return None;
        }
        while !index.settle_one() {
            if Instant::now() >= end {
                return None;
            }
        }
        self.meshed.send_if_modified(|meshed| {
            let is_changed = !index.meshed_namespaces().eq(meshed.iter());
            if is_changed {
                *meshed = index.meshed_namespaces().cloned().collect();
            }
            is_changed
        });
        let invalid = added(&self.invalid, index.invalid_policies_of_mesh());
        let lost = added(&self.lost, index.lost_policies());
        self.unlisted.send_if_modified(|unlisted| {
            let mut is_changed = false;
            for (kind, is_readable) in &update.readable {
                let is_awaited = unlisted.get_mut(kind);
                is_changed |= is_awaited.is_some();
                match (is_awaited, is_readable) {
                    (None, _) => continue,
                    (Some(is_awaited), false) => *is_awaited = false,
                    (Some(_), true) => drop(unlisted.remove(kind)),
                }
                index.set_readable(*kind, *is_readable);
            }
            is_changed
        });
        self.mark_statuses(index.take_changed_statuses());
        let changed = index.take_changed();
        drop(index);
        for key in invalid {
            tracing::error!(
                "{} of the namespace of the mesh is invalid: running proxies keep their policies, and \
                 pods that start wait; its status has the reason",
                authorization::name(&key)
            );
        }
        for namespace in lost {
            tracing::error!(
                "the AuthorizationPolicies of namespace {namespace} were deleted with their \
                 definition: its pods that start wait (of the namespace of the mesh: all pods); install \
                 both again, or run: mesh authz forget {namespace}"
            );
        }
        self.changed.send_replace(());
        Some(changed)
    }

    /// The kinds that calls wait for. Empty if the catalog is synced.
    pub fn missing(&self) -> BTreeSet<Kind> {
        let unlisted = self.unlisted.borrow();
        let awaited = unlisted.iter().filter(|(_, is_awaited)| **is_awaited);
        awaited.map(|(kind, _)| *kind).collect()
    }

    /// Whether the objects of a kind were listed.
    pub fn is_listed(&self, kind: Kind) -> bool {
        !self.unlisted.borrow().contains_key(&kind)
    }

    /// Waits for a synced catalog, for a few seconds at most.
    pub async fn wait_synced(&self, stopping: &CancellationToken) -> Result<(), CatalogError> {
        self.wait_listed(&Kind::ALL, stopping).await
    }

    /// Waits until nothing waits for the objects of these kinds, for a few seconds at most.
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
                let missing: Vec<&str> = missing.map(|kind| kind.unique_name()).collect();
                Err(CatalogError::NotSynced(missing.join(", ")))
            }
        }
    }

    /// Waits for a synced catalog.
    pub async fn synced(&self) {
        self.listed(&Kind::ALL).await;
    }

    async fn listed(&self, kinds: &[Kind]) {
        let are_listed = |unlisted: &Unlisted| {
            let mut unlisted = unlisted.iter();
            unlisted.all(|(kind, is_awaited)| !is_awaited || !kinds.contains(kind))
        };
        let waited = self.unlisted.subscribe().wait_for(are_listed).await.is_ok();
        debug_assert!(waited, "self holds the sender");
    }

    /// The namespaces with meshed pods, and changes.
    pub fn meshed_namespaces(&self) -> watch::Receiver<BTreeSet<Arc<str>>> {
        self.meshed.subscribe()
    }

    fn mark_statuses(&self, changed: BTreeSet<ObjectId>) {
        self.changed_statuses.send_if_modified(|all| {
            let before = all.len();
            all.extend(changed);
            all.len() > before
        });
    }

    /// The keys and UIDs of the meshed pods that are ready and do not terminate.
    pub fn ready_meshed_pods(&self) -> Vec<(Key, Arc<str>)> {
        let (mut pods, mut last) = (Vec::new(), Key::new("", ""));
        loop {
            let index = self.index();
            let slice: Vec<_> = index.meshed_pods_after(&last).take(MAX_BATCH).collect();
            let Some(end) = slice.last() else {
                return pods;
            };
            last = end.key.clone();
            let ready = slice
                .into_iter()
                .filter(|pod| pod.ready && !pod.terminating);
            pods.extend(ready.map(|pod| (pod.key.clone(), pod.uid.clone())));
        }
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
    pub fn service(&self, key: &Key) -> Option<Service> {
        let index = self.index();
        let (service, reads) = reads::ask(|| index.service(key));
        if service.is_none() {
            // Its return is told to all.
            self.services().remove(key);
        } else if self.changed_services.receiver_count() > 0 {
            self.services().set(&Arc::new(key.clone()), reads);
        }
        service
    }

    /// The keys of all Services.
    pub fn service_keys(&self) -> BTreeSet<Key> {
        self.index().service_keys()
    }

    /// A subscriber without subscriptions, in the pod that its token is bound to, if any.
    pub fn watch_resources(&self, pod: Option<PodRef>) -> Resources {
        let index = self.index();
        let location = subscribers::location(&index, pod.as_ref());
        let caller = pod.as_ref().map(|pod| pod.uid.clone());
        let mut subscribers = self.subscribers();
        let (id, queue) = subscribers.add_client(pod, location);
        let published = subscribers.published.subscribe();
        let hub = self.clone();
        Resources {
            hub,
            caller: caller.unwrap_or_default(),
            id,
            queue,
            published,
        }
    }

    /// The claims of subscribers about later events, for the source of the catalog.
    pub fn claims(&self) -> &Claims {
        &self.claims
    }

    /// The Services that may have changed, at each publication.
    pub fn changed_services(&self) -> broadcast::Receiver<Arc<BTreeSet<Key>>> {
        self.changed_services.subscribe()
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
            earlier: subscribers.count_lacking(|lacking| lacking.policies),
            unauthorizing: subscribers.count_lacking(|lacking| lacking.authorization),
            without_egress: subscribers.count_lacking(|lacking| lacking.egress),
            without_telemetry: subscribers.count_lacking(|lacking| lacking.telemetry),
            objects: Kind::ALL.map(|kind| (kind, index.count(kind))).into(),
            resources,
            subscriptions,
        }
    }

    /// Adds what is affected to the turns of its namespaces. `since` is the time of the oldest change.
    fn begin_publication(
        &self,
        changed: &Changed,
        turns: &mut Turns<Arc<Resource>>,
        since: Option<Instant>,
    ) {
        let since = since.unwrap_or_else(Instant::now);
        let index = self.index();
        let mut subscribers = self.subscribers();
        for resource in subscribers.affected(changed) {
            let namespace = subscribers.namespace(&resource);
            subscribers.mark_pending(&resource);
            turns.add(namespace, resource, since);
        }
        // From here on, the states of all others are also those at this position.
        subscribers.published.send_if_modified(|published| {
            let position = index.position();
            let is_changed = published.as_ref() != position;
            *published = position.cloned();
            is_changed
        });
        subscribers.relocate(&index, changed);
        drop(subscribers);
        let mut services = self.services();
        if self.changed_services.receiver_count() == 0 {
            *services = Readers::default();
            return;
        }
        let read = services.of(&changed.reads).into_iter();
        let mut affected: BTreeSet<Key> = read.map(|key| Key::clone(&key)).collect();
        affected.extend(changed.services.iter().cloned());
        if !affected.is_empty() {
            // An error means that there are no receivers any more.
            let _ = self.changed_services.send(Arc::new(affected));
        }
    }

    /// Resolves a part of what is affected, and notifies its subscribers. Returns whether something
    /// is left. The shared lock keeps the index unchanged while a resource is resolved, so that a
    /// new subscriber cannot replace a newer state.
    fn publish(&self, turns: &mut Turns<Arc<Resource>>) -> bool {
        let index = self.index();
        let end = Instant::now() + MAX_SLICE;
        while let Some((resource, since)) = turns.next() {
            self.publish_one(&index, &resource);
            self.publications.observe(since.elapsed().as_secs_f64());
            if Instant::now() >= end {
                break;
            }
        }
        !turns.is_empty()
    }

    /// Resolves a resource, and notifies its subscribers.
    fn publish_one(&self, index: &Index, resource: &Resource) {
        let mut resolved = Resolved::new(index, resource, &Location::default());
        let locations = self.subscribers().locations(resource, &resolved.scope);
        for location in locations {
            resolved.add(index, resource, location);
        }
        let (mut subscribers, mut history) = (self.subscribers(), self.history());
        subscribers.update(index, resource, resolved, &mut history);
    }

    /// The longest times for which the locks were held: the lock of the index, exclusive and
    /// shared, and the lock of the subscribers.
    pub fn longest_holds(&self) -> [Duration; 3] {
        self.holds.each_ref().map(Holds::longest)
    }

    /// The times for which the same locks were held.
    pub fn holds(&self) -> [&Histogram; 3] {
        self.holds.each_ref().map(|holds| &holds.times)
    }

    /// The times from the receipt of changes to the notification of subscribers.
    pub fn publications(&self) -> &Histogram {
        &self.publications
    }

    /// The number of subscribers with notifications that they have not read.
    pub fn waiting(&self) -> usize {
        self.subscribers().count_waiting()
    }

    /// After a panic under a lock, index and subscribers stay in use.
    fn index(&self) -> Timed<'_, RwLockReadGuard<'_, Index>> {
        let guard = self.index.read().unwrap_or_else(PoisonError::into_inner);
        self.holds[1].hold(guard)
    }

    fn index_mut(&self) -> Timed<'_, RwLockWriteGuard<'_, Index>> {
        let guard = self.index.write().unwrap_or_else(PoisonError::into_inner);
        self.holds[0].hold(guard)
    }

    fn services(&self) -> MutexGuard<'_, Readers<Key>> {
        self.services.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A page of what the proxies of this replica do with routes and policies, for the other replicas.
    pub fn page(&self) -> Page {
        self.reports().exchange.page()
    }

    /// Records the pages of all other live replicas.
    pub fn receive_pages(&self, pages: BTreeMap<String, Page>) {
        self.reports().exchange.receive(pages);
    }

    fn reports(&self) -> MutexGuard<'_, Reports> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn subscribers(&self) -> Timed<'_, MutexGuard<'_, Subscribers>> {
        let guard = self.subscribers.lock();
        self.holds[2].hold(guard.unwrap_or_else(PoisonError::into_inner))
    }
}

impl Statuses for Hub {
    fn with_status(&self) -> BTreeSet<ObjectId> {
        self.index().with_status()
    }

    fn get(&self, id: &ObjectId) -> Result<Option<ObjectStatus>, Withheld> {
        let mut status = self.index().status(id)?;
        if let Some(status) = &mut status {
            self.reports().add_to(status);
            self.fetches().add_to(&mut status.issuers);
        }
        Ok(status)
    }

    fn changed(&self) -> &watch::Sender<BTreeSet<ObjectId>> {
        &self.changed_statuses
    }
}

/// Replaces a set by the current one, if it differs, and returns what is new in it.
fn added<T: Clone + Ord>(known: &watch::Sender<BTreeSet<T>>, current: &BTreeSet<T>) -> Vec<T> {
    let mut added = Vec::new();
    known.send_if_modified(|known| {
        let is_changed = known != current;
        if is_changed {
            added.extend(current.difference(known).cloned());
            known.clone_from(current);
        }
        is_changed
    });
    added
}

#[cfg(test)]
mod tests;
