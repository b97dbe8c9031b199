//! A LIST and then watches of one kind of objects in a Kubernetes cluster.
//!
//! Each request has a deadline: a LIST, the start of a watch, and the watch itself, which the API
//! server ends after [`WATCH_SECONDS`]. A request that exceeds it is abandoned and repeated with
//! back-off. A watch resumes from the last version. Objects are listed again only if the API server
//! refuses that version, or if the watch is silent while proxies know of later events from another
//! replica; the list then replaces the previous one in a single change, so that no
//! state in between is visible.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::pin::pin;
use std::time::Duration;

use diy_mesh_runtime::{Backoff, error_chain};
use futures::StreamExt;
use kube::api::{ListParams, WatchParams};
use kube::core::{Status, WatchEvent};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::convert::ConvertError;
use crate::index::object::Key;

const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(250);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Invalid objects that the log names.
const MAX_NAMED: usize = 100;
/// Minimum time between two LISTs in place of silent watches, as a multiple of what one takes.
const MIN_LIST_INTERVAL: u32 = 10;
/// The duration of a watch, in seconds. The API server ends it.
const WATCH_SECONDS: u32 = 180;

/// The deadlines of requests, which tests shorten.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// For one page of a LIST.
    pub list_timeout: Duration,
    /// For the response to the start of a watch.
    pub start_timeout: Duration,
    /// For the end of a watch.
    pub watch_timeout: Duration,
    /// For an event of a watch, if someone knows of later ones.
    pub stall_timeout: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            list_timeout: Duration::from_secs(30),
            start_timeout: Duration::from_secs(15),
            watch_timeout: Duration::from_secs(u64::from(WATCH_SECONDS) + 15),
            stall_timeout: Duration::from_secs(1),
        }
    }
}

/// The objects that a watch reads.
pub(super) struct Target<'a, K> {
    /// The name in the log: the kind, or the kind and the name of one object.
    pub name: String,
    /// The resource in all versions that can be used. The first one that is installed is used.
    pub apis: Vec<Api<K>>,
    /// Selects some of the objects by their fields.
    pub fields: Option<&'a str>,
    /// Objects in one response to a LIST, which is in memory as a whole.
    pub page_size: u32,
    /// What the controller must be permitted to list and watch.
    pub permission: String,
}

/// A change of the objects of a watch.
pub(super) enum Update<T> {
    /// All objects. Others are deleted.
    Reset(Vec<T>),
    /// A new or changed object.
    Apply(T),
    /// A deleted object.
    Delete(Key),
    /// There are no other changes up to the version.
    Bookmark,
}

/// The receiver of the objects of a watch.
pub(super) trait Sink {
    /// An object of the API.
    type Object: Resource + Clone + Debug + DeserializeOwned;
    /// What is kept of it.
    type Item;

    /// Converts an object.
    fn convert(&self, object: &Self::Object) -> Result<Self::Item, ConvertError>;

    /// The objects are current. Of them, this number is invalid.
    fn confirm(&mut self, invalid: usize);

    /// Receives a change, with its resource version if it is an integer.
    async fn send(&mut self, update: Update<Self::Item>, version: Option<u64>);

    /// A LIST begins, which answers all requests for later events.
    fn begin_list(&mut self) {}

    /// Waits until someone knows of later events than the watch has sent since the last LIST.
    async fn requested(&self) {
        std::future::pending().await
    }

    /// A request has failed, in all versions of the resource.
    fn failed(&mut self, error: String);
}

/// Why a LIST or a watch has ended.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{}", explain_status(.permission, .status))]
    Status {
        permission: String,
        status: Box<Status>,
    },
    #[error("{}", error_chain(.0))]
    Client(kube::Error),
    #[error("the API server has not completed the {request} within {deadline:?}")]
    Timeout {
        request: &'static str,
        deadline: Duration,
    },
    #[error("the list has no resourceVersion")]
    NoVersion,
}

/// Sends all objects, then changes. Never ends.
pub(super) async fn watch<S: Sink>(target: Target<'_, S::Object>, sink: &mut S, timing: Timing) {
    let mut watch = Watch {
        target,
        sink,
        timing,
        missing: 0,
        logged: String::new(),
        version: None,
        next_list: Instant::now(),
        invalid: BTreeSet::new(),
        backoff: Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL),
    };
    watch.run().await;
}

struct Watch<'a, S: Sink> {
    /// The version in use comes first.
    target: Target<'a, S::Object>,
    sink: &'a mut S,
    timing: Timing,
    /// Versions that are not installed, in a row.
    missing: usize,
    /// The error that the log has.
    logged: String,
    /// The version of the last event. `None`: the objects must be listed.
    version: Option<String>,
    /// Before this time, a silent watch is not replaced by a LIST.
    next_list: Instant,
    /// The invalid objects.
    invalid: BTreeSet<Key>,
    backoff: Backoff,
}

impl<S: Sink> Watch<'_, S> {
    async fn run(&mut self) {
        loop {
            let result = match self.version.clone() {
                None => self.list().await,
                Some(version) => self.follow(&version).await,
            };
            if let Err(error) = result {
                self.retry(&error).await;
            }
        }
    }

    /// Lists all objects, in pages, and sends them as one change.
    async fn list(&mut self) -> Result<(), Error> {
        let mut params = ListParams::default().limit(self.target.page_size);
        params.field_selector = self.target.fields.map(str::to_owned);
        let started = Instant::now();
        self.sink.begin_list();
        self.invalid.clear();
        let mut listed = Vec::new();
        let version = loop {
            let deadline = self.timing.list_timeout;
            let page = self
                .within(deadline, "LIST", self.target.apis[0].list(&params))
                .await?;
            let objects = page.items.iter();
            listed.extend(objects.filter_map(|object| self.convert(object)));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => break page.metadata.resource_version,
            }
        };
        let version = version.filter(|version| !version.is_empty());
        let version = version.ok_or(Error::NoVersion)?;
        self.next_list = started + started.elapsed() * MIN_LIST_INTERVAL;
        self.confirm();
        self.send(Update::Reset(listed), &version).await;
        self.version = Some(version);
        Ok(())
    }

    /// Sends the changes since `version` until the API server ends the watch.
    async fn follow(&mut self, version: &str) -> Result<(), Error> {
        let mut params = WatchParams::default().timeout(WATCH_SECONDS);
        params.field_selector = self.target.fields.map(str::to_owned);
        let Timing {
            start_timeout,
            watch_timeout,
            ..
        } = self.timing;
        let start = self.target.apis[0].watch(&params, version);
        let started = self.within(start_timeout, "start of a watch", start).await;
        let events = started.inspect_err(|error| {
            if error.requires_list() {
                self.version = None;
            }
        })?;
        self.confirm();
        let mut events = pin!(events);
        let deadline = Instant::now() + watch_timeout;
        loop {
            let event = tokio::select! {
                event = timeout_at(deadline, events.next()) => event,
                () = self.stalled() => {
                    let name = &self.target.name;
                    tracing::info!("the watch of {name} lags behind another replica, listing again");
                    self.version = None;
                    return Ok(());
                }
            };
            let event = event.map_err(|_| Error::Timeout {
                request: "watch",
                deadline: watch_timeout,
            })?;
            let Some(event) = event else {
                break;
            };
            let event = event.map_err(|error| self.error(error))?;
            self.receive(event).await?;
        }
        // An API server that ends each watch at once is not overloaded by the next one.
        sleep(MIN_RETRY_INTERVAL).await;
        Ok(())
    }

    /// Waits until someone knows of later events, and the watch stays silent.
    async fn stalled(&self) {
        self.sink.requested().await;
        sleep(self.timing.stall_timeout).await;
        sleep_until(self.next_list).await;
    }

    async fn receive(&mut self, event: WatchEvent<S::Object>) -> Result<(), Error> {
        let (update, version) = match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                // An invalid object replaces its valid state.
                let update = self.convert(&object).map(Update::Apply);
                let update = update.unwrap_or_else(|| Update::Delete(key(&object)));
                (update, object.resource_version())
            }
            WatchEvent::Deleted(object) => {
                let key = key(&object);
                self.invalid.remove(&key);
                (Update::Delete(key), object.resource_version())
            }
            WatchEvent::Bookmark(bookmark) => {
                (Update::Bookmark, Some(bookmark.metadata.resource_version))
            }
            WatchEvent::Error(status) => {
                self.version = None;
                return Err(self.error(kube::Error::Api(status)));
            }
        };
        self.confirm();
        let sent = version.as_deref().unwrap_or_default();
        self.send(update, sent).await;
        self.version = version.or(self.version.take());
        Ok(())
    }

    /// The result of a request, unless it exceeds its deadline.
    async fn within<T>(
        &self,
        deadline: Duration,
        request: &'static str,
        work: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, Error> {
        match timeout(deadline, work).await {
            Ok(result) => result.map_err(|error| self.error(error)),
            Err(_) => Err(Error::Timeout { request, deadline }),
        }
    }

    fn error(&self, error: kube::Error) -> Error {
        match error {
            kube::Error::Api(status) => Error::Status {
                permission: self.target.permission.clone(),
                status,
            },
            other => Error::Client(other),
        }
    }

    /// Logs an error and waits.
    async fn retry(&mut self, error: &Error) {
        if error.is_missing() {
            self.target.apis.rotate_left(1);
            self.missing += 1;
            if self.missing < self.target.apis.len() {
                return;
            }
        }
        self.missing = 0;
        let delay = self.backoff.next_delay();
        let (name, error) = (&self.target.name, error.to_string());
        // The same error is no news.
        if error != self.logged {
            tracing::warn!("cannot watch {name}, retrying in {delay:?}: {error}");
            self.logged.clone_from(&error);
        }
        self.sink.failed(error);
        sleep(delay).await;
    }

    /// The objects are current.
    fn confirm(&mut self) {
        self.backoff.reset();
        self.missing = 0;
        self.logged.clear();
        self.sink.confirm(self.invalid.len());
    }

    async fn send(&mut self, update: Update<S::Item>, version: &str) {
        self.sink.send(update, version.parse().ok()).await;
    }

    /// Converts an object. The log names an invalid one once, as long as it is invalid.
    fn convert(&mut self, object: &S::Object) -> Option<S::Item> {
        let (key, converted) = (key(object), self.sink.convert(object));
        match &converted {
            Ok(_) => drop(self.invalid.remove(&key)),
            Err(error) => {
                let is_named = self.invalid.len() < MAX_NAMED && !self.invalid.contains(&key);
                if is_named {
                    tracing::warn!("{} {key} is ignored: {error}", self.target.name);
                }
                self.invalid.insert(key);
            }
        }
        converted.ok()
    }
}

fn key(object: &impl ResourceExt) -> Key {
    Key::new(&object.namespace().unwrap_or_default(), &object.name_any())
}

impl Error {
    /// Whether the API server refuses the version of a watch, or may do so: the version is too old
    /// or, after a restore, newer than the data, for which the API server waits. An overloaded API
    /// server gets no LIST.
    fn requires_list(&self) -> bool {
        match self {
            Error::Status { status, .. } => !matches!(status.code, 429 | 500 | 503),
            Error::Timeout { .. } => true,
            Error::Client(_) | Error::NoVersion => false,
        }
    }

    /// Whether the cluster does not have the version of the resource.
    fn is_missing(&self) -> bool {
        matches!(self, Error::Status { status, .. } if status.code == 404)
    }
}

/// A status with its remedy.
fn explain_status(permission: &str, status: &Status) -> String {
    match status.code {
        403 => format!(
            "{}; the controller's ServiceAccount needs the verbs list and watch on {permission}",
            status.message
        ),
        404 => format!(
            "{} (status 404); the controller must be able to read the definition of this kind, which \
             names the versions that are served",
            status.message
        ),
        code => format!("{} (status {code})", status.message),
    }
}

#[cfg(test)]
mod tests;
