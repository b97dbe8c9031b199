//! The writer of the statuses of routes, policies and XMeshes. It writes on the replica that holds
//! the Lease.
//!
//! Level-triggered: after each change it writes the routes whose conditions differ from those that
//! it has written, one of each namespace in turn (`schedule.rs`). At its start and every
//! `RESYNC_INTERVAL` it compares all routes of the cluster. Each write is based on the resource
//! version of the route that it has read.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_control_plane::events::Events;
use diy_mesh_runtime::Backoff;
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, GetParams, ListParams, PostParams};
use kube::core::{ApiResource, DynamicObject, Request};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Deserialize;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

mod object;
mod progress;
mod schedule;

use object::Stored;
use progress::Progress;

use super::lease::{Election, LEASE};
use super::merge::merge;
use super::report;
use super::statuses::{Statuses, take_changed, wait_changed};
use crate::api::bytes::{self, Page, Pages, Text};
use crate::api::{self, API_TIMEOUT, ApiError};
use crate::catalog::marker::{self, Marker};
use crate::catalog::resources;
use crate::metrics::Metrics;
use crate::object::{Key, Kind, ObjectId, ObjectStatus, Withheld};

/// The label of the ControllerRevisions of earlier releases.
const STORED_STATE_LABEL: &str = "diy-service-mesh.dev/last-valid";
/// Time between two comparisons of all routes of a kind with the cluster.
const RESYNC_INTERVAL: Duration = Duration::from_secs(600);
/// Time between two writes, each of which needs a read. Limits the load of the API server.
const WRITE_INTERVAL: Duration = Duration::from_millis(20);
/// Time between two updates of the marker.
const MIN_MARKER_INTERVAL: Duration = Duration::from_secs(1);
const MAX_MARKER_INTERVAL: Duration = Duration::from_secs(10);
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(500);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// Objects in one response to a LIST, unless it is too long. A route may have 1.5 MiB.
const PAGE_SIZE: u32 = 50;
/// Writes by others between a read and a write, until they count as an error.
const MAX_CONFLICTS: usize = 10;

/// Writes while this replica holds the Lease, until `stopping`. Then releases the Lease.
pub async fn run(
    mut election: Election,
    writer: Writer,
    statuses: &impl Statuses,
    stopping: CancellationToken,
) {
    let leader = &writer.metrics.status_leader;
    loop {
        tokio::select! {
            () = election.acquire() => {}
            () = stopping.cancelled() => return,
        }
        tracing::info!("this replica writes the status of routes (Lease {LEASE})");
        leader.set(1);
        tokio::select! {
            () = election.keep() => {}
            () = stopping.cancelled() => {}
            never = writer.run(statuses) => match never {},
            never = writer.delete_stored_states() => match never {},
            never = writer.keep_marker(statuses) => match never {},
        }
        leader.set(0);
        writer.metrics.statuses_waiting.set(0);
        if stopping.is_cancelled() {
            return election.release().await;
        }
        tracing::warn!("this replica has lost Lease {LEASE} and writes no status of routes");
    }
}

/// Writes the statuses of the routes of a cluster.
pub struct Writer {
    client: Client,
    namespace: String,
    kinds: Vec<Kind>,
    pages: Pages,
    metrics: Arc<Metrics>,
    events: Events,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error("other clients have changed the route {MAX_CONFLICTS} times between read and write")]
    Conflicts,
}

impl Writer {
    /// A writer for these kinds of routes. The others have no status, and get Events. `namespace`
    /// is the namespace of the mesh.
    pub fn new(
        client: Client,
        namespace: &str,
        kinds: &[Kind],
        metrics: Arc<Metrics>,
        events: Events,
    ) -> Writer {
        Writer {
            client,
            namespace: namespace.to_owned(),
            kinds: kinds.to_vec(),
            pages: Pages::default(),
            metrics,
            events,
        }
    }

    /// Writes until it is dropped.
    async fn run(&self, statuses: &impl Statuses) -> Infallible {
        let (mut progress, mut announced) = (Progress::default(), BTreeMap::new());
        let mut pace = interval(WRITE_INTERVAL);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let backoff = || Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
        let resyncs = self.kinds.iter();
        let mut resyncs: Vec<_> = resyncs
            .map(|kind| (Instant::now(), *kind, backoff()))
            .collect();
        let mut changed = statuses.with_status();
        loop {
            changed.append(&mut take_changed(statuses));
            let has_status = |(kind, _): &ObjectId| self.kinds.contains(kind);
            let changed = std::mem::take(&mut changed).into_iter();
            let (written, others): (BTreeSet<_>, BTreeSet<_>) = changed.partition(has_status);
            report::announce(&mut announced, statuses, others, &self.events);
            for id in written {
                let status = statuses.get(&id);
                progress.changed(id, status);
            }
            let now = Instant::now();
            for (next, kind, backoff) in resyncs.iter_mut().filter(|(next, ..)| *next <= now) {
                let delay = match self.resync(*kind, statuses, &mut progress).await {
                    Ok(()) => {
                        backoff.reset();
                        RESYNC_INTERVAL
                    }
                    Err(error) => {
                        let delay = backoff.next_delay();
                        tracing::warn!(
                            "cannot list {kind} objects, retrying in {delay:?}: {error}"
                        );
                        delay
                    }
                };
                *next = Instant::now() + delay;
            }
            let resync = resyncs.iter().map(|(next, ..)| *next).min();
            let resync = resync.unwrap_or(now + RESYNC_INTERVAL);
            let batch = progress.next_batch();
            let waiting = i64::try_from(progress.waiting()).unwrap_or(i64::MAX);
            self.metrics.statuses_waiting.set(waiting);
            if batch.is_empty() {
                tokio::select! {
                    () = wait_changed(statuses) => {}
                    () = sleep_until(progress.schedule.next_retry(resync)) => {}
                }
            }
            for id in batch {
                if progress.schedule.is_slow(&id.1.namespace) {
                    continue;
                }
                let Ok(status) = statuses.get(&id) else {
                    progress.changed(id, Err(Withheld));
                    continue;
                };
                let Err(error) = self.reconcile(&id, status.as_ref(), &mut pace).await else {
                    progress.succeeded(id, status.as_ref());
                    continue;
                };
                self.metrics.statuses_failed.inc();
                let (delay, should_log) = progress.schedule.fail(&id, &error);
                if should_log {
                    let (kind, key) = &id;
                    tracing::warn!(
                        "cannot write the status of {kind} {key}, retrying in {delay:?}: {error}"
                    );
                }
                progress.differs(id, status.as_ref());
            }
        }
    }

    /// Deletes the states of invalid objects that earlier releases have stored: nothing reads them.
    /// Never returns.
    async fn delete_stored_states(&self) -> Infallible {
        let states: Api<ControllerRevision> = Api::namespaced(self.client.clone(), &self.namespace);
        let (params, stored) = (DeleteParams::default(), ListParams::default());
        let stored = stored.labels(STORED_STATE_LABEL);
        let mut backoff = Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
        while let Err(error) = request(states.delete_collection(&params, &stored)).await {
            let delay = backoff.next_delay();
            tracing::warn!(
                "cannot delete the ControllerRevisions with the label {STORED_STATE_LABEL}, which \
                 earlier releases have stored, retrying in {delay:?}: {error}"
            );
            sleep(delay).await;
        }
        std::future::pending().await
    }

    /// Keeps the namespaces with AuthorizationPolicies in the marker. Never returns.
    async fn keep_marker(&self, statuses: &impl Statuses) -> Infallible {
        let marker = Marker::new(&self.client, &self.namespace);
        let mut changed = statuses.changed().subscribe();
        loop {
            // Withheld while the policies cannot be read.
            let is_known = statuses
                .get(&(Kind::Authorization, Key::new("", "")))
                .is_ok();
            if is_known && let Err(error) = marker.update(&authorized(statuses)).await {
                tracing::warn!("cannot update ConfigMap {}: {error}", marker::CONFIG_MAP);
            }
            sleep(MIN_MARKER_INTERVAL).await;
            let _ = timeout(MAX_MARKER_INTERVAL, changed.changed()).await;
        }
    }

    /// Compares all routes of a kind with the cluster, and writes none. One that is not installed has
    /// none. They are listed in the first of its versions that the cluster serves.
    async fn resync(
        &self,
        kind: Kind,
        statuses: &impl Statuses,
        progress: &mut Progress,
    ) -> Result<(), Error> {
        let mut versions = resources(kind).into_iter();
        let Some(mut version) = versions.next() else {
            return Ok(());
        };
        let mut params = ListParams::default().limit(PAGE_SIZE);
        loop {
            let request = collection(&version, "").list(&params);
            let text = match (self.text(request).await, versions.len()) {
                (Ok(text), _) => text,
                (Err(ApiError::TooLong), _) if params.limit > Some(1) => {
                    params.limit = params.limit.map(|limit| limit / 2);
                    continue;
                }
                (Err(error), 0) if error.is(404) => return Ok(()),
                (Err(error), _) if error.is(404) => {
                    version = versions.next().unwrap_or(version);
                    continue;
                }
                (Err(error), _) => return Err(error.into()),
            };
            let page: Page<'_> = parse(text.as_str())?;
            for item in page.items.into_iter().flatten() {
                let object = parse::<Stored>(item.get())?.into_object(kind);
                let namespace = object.namespace().unwrap_or_default();
                let id = (kind, Key::new(&namespace, &object.name_any()));
                let Ok(status) = statuses.get(&id) else {
                    continue;
                };
                match merge(kind, &object, status.as_ref(), &now()) {
                    Some(_) => progress.differs(id, status.as_ref()),
                    None => progress.succeeded(id, status.as_ref()),
                }
            }
            params.limit = params.limit.map(|limit| (limit * 2).min(PAGE_SIZE));
            match page.metadata.next() {
                Some(token) => params.continue_token = Some(token),
                None => return Ok(()),
            }
        }
    }

    /// The text of the response to a request.
    async fn text(
        &self,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<Text, ApiError> {
        let request = request.map_err(kube::Error::BuildRequest)?;
        api::request(API_TIMEOUT, async {
            let response = bytes::send(&self.client, request).await?;
            bytes::read(response, self.pages.permit().await).await
        })
        .await
    }

    /// Writes the status of a route, unless the cluster has it already.
    async fn reconcile(
        &self,
        id: &ObjectId,
        desired: Option<&ObjectStatus>,
        pace: &mut Interval,
    ) -> Result<(), Error> {
        let (kind, key) = id;
        for _ in 0..MAX_CONFLICTS {
            pace.tick().await;
            let Some((resource, text)) = self.read(id).await? else {
                // Deleted, or its kind is not installed.
                return Ok(());
            };
            let current = parse::<Stored>(text.as_str())?.into_object(*kind);
            let Some(changed) = merge(*kind, &current, desired, &now()) else {
                return Ok(());
            };
            let changed = object::with_status(text.as_str(), &changed);
            let changed = changed.map_err(ApiError::Unreadable)?;
            drop(text);
            match self.write(&resource, key, changed).await {
                Ok(()) => {
                    self.metrics.statuses_written.inc();
                    self.report_problems(&current, &resource, desired);
                    return Ok(());
                }
                Err(error) if error.is(404) => return Ok(()),
                Err(error) if error.is(409) => drop(self.metrics.status_conflicts.inc()),
                Err(error) => return Err(error.into()),
            }
        }
        Err(Error::Conflicts)
    }

    /// The text of a route in the first version of its kind that the cluster serves.
    async fn read(&self, (kind, key): &ObjectId) -> Result<Option<(ApiResource, Text)>, ApiError> {
        for resource in resources(*kind) {
            let request = collection(&resource, &key.namespace);
            match self
                .text(request.get(&key.name, &GetParams::default()))
                .await
            {
                Ok(text) => return Ok(Some((resource, text))),
                Err(error) if error.is(404) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Replaces the status of a route by the one in the text.
    async fn write(
        &self,
        resource: &ApiResource,
        key: &Key,
        text: Vec<u8>,
    ) -> Result<(), ApiError> {
        let (request, params) = (collection(resource, &key.namespace), PostParams::default());
        let request = request.replace_subresource("status", &key.name, &params, text);
        let request = request.map_err(kube::Error::BuildRequest)?;
        api::request(API_TIMEOUT, async {
            bytes::discard(bytes::send(&self.client, request).await?).await
        })
        .await
    }

    /// Queues an event about each condition that does not hold. Written statuses have changed, so
    /// that neither a resync nor another holder of the Lease repeats them.
    fn report_problems(
        &self,
        object: &DynamicObject,
        resource: &ApiResource,
        status: Option<&ObjectStatus>,
    ) {
        let reference = object.object_ref(resource);
        for parent in status.iter().flat_map(|status| &status.parents) {
            for one in parent.conditions.iter().filter(|one| one.is_problem()) {
                let status = format!("{} is {}: {}", one.kind, one.status(), one.message);
                let note = format!("{}: {status}", parent.parent);
                self.events
                    .warn(reference.clone(), one.reason, "Attach", &note);
            }
        }
    }
}

/// The namespaces with AuthorizationPolicies.
fn authorized(statuses: &impl Statuses) -> marker::Namespaces {
    let all = statuses.with_status().into_iter();
    let policies = all.filter(|(kind, _)| *kind == Kind::Authorization);
    policies.map(|(_, key)| key.namespace).collect()
}

/// Requests for objects of a namespace, or of all namespaces.
fn collection(resource: &ApiResource, namespace: &str) -> Request {
    let namespace = Some(namespace).filter(|namespace| !namespace.is_empty());
    Request::new(DynamicObject::url_path(resource, namespace))
}

fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, ApiError> {
    Ok(serde_json::from_str(text)?)
}

/// The time of a transition.
fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

async fn request<T>(work: impl Future<Output = Result<T, kube::Error>>) -> Result<T, ApiError> {
    api::request(API_TIMEOUT, work).await
}

#[cfg(test)]
mod tests;
