//! A LIST and then watches of one kind of objects in a Kubernetes cluster.
//!
//! Each request has a deadline: a LIST, the start of a watch, and the watch itself, which the API
//! server ends after [`WATCH_SECONDS`]. A request that exceeds it is abandoned and repeated with
//! back-off. A watch resumes from the last version. Objects are listed again only if the API server
//! refuses that version; the list then replaces the previous one in a single change, so that no state
//! in between is visible.
//!
//! A watch is started again at its last version if it is silent while proxies claim to know of later
//! events from another replica, and the cluster has had any: one cheap request tells.
//!
//! Objects are parsed one by one from the text of a page or of an event. Few texts are in memory at
//! a time. A page over the limit is requested again with half as many objects.

use std::collections::BTreeSet;
use std::time::Duration;

use diy_mesh_runtime::{Backoff, error_chain};
use kube::Client;
use kube::api::{ListParams, WatchParams};
use kube::core::{ApiResource, DynamicObject, Request, Resource, Status};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::convert::ConvertError;
use super::slim::Outline;
use crate::api::ApiError;
use crate::api::bytes::{self, Lines, Page, Pages, Text};
use crate::object::Key;

const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(250);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Invalid objects that the log names.
const MAX_NAMED: usize = 100;
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
    /// For an event of a watch, if someone claims to know of later ones.
    pub stall_timeout: Duration,
    /// Between two examinations of such claims.
    pub claim_interval: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            list_timeout: Duration::from_secs(30),
            start_timeout: Duration::from_secs(15),
            watch_timeout: Duration::from_secs(u64::from(WATCH_SECONDS) + 15),
            stall_timeout: Duration::from_secs(1),
            claim_interval: Duration::from_secs(10),
        }
    }
}

/// The objects that a watch reads.
pub(super) struct Target<'a> {
    /// The name in the log: the kind, or the kind and the name of one object.
    pub name: String,
    /// The API.
    pub client: Client,
    /// The resource in all versions that can be used. The first one that is installed is used.
    pub resources: Vec<ApiResource>,
    /// The permits for pages, which all watches share.
    pub pages: &'a Pages,
    /// Selects some of the objects by their fields.
    pub fields: Option<&'a str>,
    /// Objects in one response to a LIST, unless it is too long.
    pub page_size: u32,
    /// The resources that the controller must be permitted to list and watch.
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
    /// The part of an object that is kept.
    type Item;
    /// Whether an object that cannot be converted is ignored. Otherwise the request fails.
    const IGNORES_INVALID: bool = true;

    /// Converts the JSON text of an object.
    fn convert(&self, json: &str) -> Result<Self::Item, ConvertError>;

    /// Records that the objects are current, and how many are invalid.
    fn confirm(&mut self, invalid: usize);

    /// Receives a change, with its resource version if it is an integer.
    async fn send(&mut self, update: Update<Self::Item>, version: Option<u64>);

    /// Waits until someone claims to know of later events than were sent.
    async fn claimed(&self) {
        std::future::pending().await
    }

    /// Answers these claims: the cluster has no event after this version. Returns whether one is true.
    fn answer(&self, _: u64) -> bool {
        false
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
    Api(ApiError),
    #[error("the API server has not completed the {request} within {deadline:?}")]
    Timeout {
        request: &'static str,
        deadline: Duration,
    },
    #[error("the list has no resourceVersion")]
    NoVersion,
    #[error("the object cannot be read: {0}")]
    Invalid(ConvertError),
}

/// The text of an event of a watch.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(rename = "type")]
    kind: String,
    #[serde(borrow)]
    object: &'a RawValue,
}

/// Sends all objects, then changes. Never ends.
pub(super) async fn watch<S: Sink>(target: Target<'_>, sink: &mut S, timing: Timing) {
    let mut watch = Watch {
        target,
        sink,
        timing,
        missing: 0,
        logged: String::new(),
        version: None,
        next_answer: Instant::now(),
        invalid: BTreeSet::new(),
        backoff: Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL),
    };
    watch.run().await;
}

struct Watch<'a, S: Sink> {
    /// The version in use comes first.
    target: Target<'a>,
    sink: &'a mut S,
    timing: Timing,
    /// Versions that are not installed, in a row.
    missing: usize,
    /// The error that the log has.
    logged: String,
    /// The version of the last event. `None`: the objects must be listed.
    version: Option<String>,
    /// Before this time, claims have no answer.
    next_answer: Instant,
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
        self.invalid.clear();
        let mut listed = Vec::new();
        let version = loop {
            let text = match self.page(&params).await {
                Ok(text) => text,
                Err(Error::Api(ApiError::TooLong)) if params.limit > Some(1) => {
                    params.limit = params.limit.map(|limit| limit / 2);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let page: Page<'_> = parse(text.as_str())?;
            for item in page.items.into_iter().flatten() {
                listed.extend(self.convert(item)?.item);
            }
            // The next objects may be small again.
            params.limit = params
                .limit
                .map(|limit| (limit * 2).min(self.target.page_size));
            let version = page.metadata.resource_version.clone();
            match page.metadata.next() {
                Some(token) => params.continue_token = Some(token),
                None => break version,
            }
        };
        let version = version.filter(|version| !version.is_empty());
        let version = version.ok_or(Error::NoVersion)?;
        self.confirm();
        self.send(Update::Reset(listed), &version).await;
        self.version = Some(version);
        Ok(())
    }

    /// The text of a page.
    async fn page(&self, params: &ListParams) -> Result<Text, Error> {
        let (deadline, client) = (self.timing.list_timeout, &self.target.client);
        let request = self.request().list(params).map_err(invalid_request)?;
        let response = self
            .within(deadline, "LIST", bytes::send(client, request))
            .await?;
        let permit = self.target.pages.permit().await;
        self.within(deadline, "LIST", bytes::read(response, permit))
            .await
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
        let request = self.request().watch(&params, version);
        let start = bytes::send(&self.target.client, request.map_err(invalid_request)?);
        let started = self.within(start_timeout, "start of a watch", start).await;
        let response = started.inspect_err(|error| {
            if error.requires_list() {
                self.version = None;
            }
        })?;
        self.confirm();
        let mut lines = Lines::new(response, self.target.pages.clone());
        let deadline = Instant::now() + watch_timeout;
        loop {
            let line = tokio::select! {
                line = timeout_at(deadline, lines.next()) => line,
                () = self.stalled() => {
                    if self.is_behind().await {
                        let name = &self.target.name;
                        tracing::info!("the watch of {name} lags behind another replica, restarting it");
                        return Ok(());
                    }
                    continue;
                }
            };
            let line = line.map_err(|_| Error::Timeout {
                request: "watch",
                deadline: watch_timeout,
            })?;
            let Some(line) = line.map_err(|error| self.error(error))? else {
                break;
            };
            self.receive(line).await?;
        }
        // An API server that ends each watch at once is not overloaded by the next one.
        sleep(MIN_RETRY_INTERVAL).await;
        Ok(())
    }

    /// Requests of the version in use.
    fn request(&self) -> Request {
        Request::new(DynamicObject::url_path(&self.target.resources[0], None))
    }

    /// Waits until someone claims to know of later events, and the watch stays silent.
    async fn stalled(&self) {
        self.sink.claimed().await;
        sleep(self.timing.stall_timeout).await;
        sleep_until(self.next_answer).await;
        self.sink.claimed().await;
    }

    /// Whether the cluster has had events as claimed. Without an answer, the claims wait.
    async fn is_behind(&mut self) -> bool {
        self.next_answer = Instant::now() + self.timing.claim_interval;
        match self.current().await {
            Ok(current) => self.sink.answer(current),
            Err(error) => {
                let name = &self.target.name;
                tracing::debug!("cannot read the current version of {name}: {error}");
                false
            }
        }
    }

    /// The latest version of the cluster, from a list of the metadata of one object.
    async fn current(&self) -> Result<u64, Error> {
        let (deadline, client) = (self.timing.list_timeout, &self.target.client);
        let request = self
            .request()
            .list_metadata(&ListParams::default().limit(1));
        let request = request.map_err(invalid_request)?;
        let current = async {
            let response = bytes::send(client, request).await?;
            bytes::read(response, self.target.pages.permit().await).await
        };
        let text = self.within(deadline, "LIST", current).await?;
        let page: Page<'_> = parse(text.as_str())?;
        let version = page.metadata.resource_version.ok_or(Error::NoVersion)?;
        // Only integers are claimed.
        version.parse().map_err(|_| Error::NoVersion)
    }

    async fn receive(&mut self, line: Text) -> Result<(), Error> {
        let Event { kind, object } = parse(line.as_str())?;
        let (update, version) = match &*kind {
            "ADDED" | "MODIFIED" => {
                let Read { key, version, item } = self.convert(object)?;
                // An invalid object replaces its valid state.
                (item.map_or(Update::Delete(key), Update::Apply), version)
            }
            "DELETED" => {
                let outline: Outline = parse(object.get())?;
                let key = key(&outline);
                self.invalid.remove(&key);
                (Update::Delete(key), outline.metadata.resource_version)
            }
            "BOOKMARK" => {
                let outline: Outline = parse(object.get())?;
                (Update::Bookmark, outline.metadata.resource_version)
            }
            _ => {
                self.version = None;
                let status: Status = parse(object.get())?;
                return Err(self.error(kube::Error::Api(Box::new(status)).into()));
            }
        };
        drop(line);
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
        work: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, Error> {
        match timeout(deadline, work).await {
            Ok(result) => result.map_err(|error| self.error(error)),
            Err(_) => Err(Error::Timeout { request, deadline }),
        }
    }

    fn error(&self, error: ApiError) -> Error {
        match error {
            ApiError::Client(kube::Error::Api(status)) => Error::Status {
                permission: self.target.permission.clone(),
                status,
            },
            other => Error::Api(other),
        }
    }

    /// Logs an error and waits.
    async fn retry(&mut self, error: &Error) {
        if error.is_missing() {
            self.target.resources.rotate_left(1);
            self.missing += 1;
            if self.missing < self.target.resources.len() {
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
    fn convert(&mut self, object: &RawValue) -> Result<Read<S::Item>, Error> {
        let outline: Outline = parse(object.get())?;
        let (key, converted) = (key(&outline), self.sink.convert(object.get()));
        match &converted {
            Ok(_) => drop(self.invalid.remove(&key)),
            Err(error) if !S::IGNORES_INVALID => return Err(Error::Invalid(error.clone())),
            Err(error) => {
                let is_named = self.invalid.len() < MAX_NAMED && !self.invalid.contains(&key);
                if is_named {
                    tracing::warn!("{} {key} is ignored: {error}", self.target.name);
                }
                self.invalid.insert(key.clone());
            }
        }
        Ok(Read {
            key,
            version: outline.metadata.resource_version,
            item: converted.ok(),
        })
    }
}

/// An object that was read.
struct Read<T> {
    key: Key,
    version: Option<String>,
    /// `None` if the object is invalid.
    item: Option<T>,
}

fn key(Outline { metadata }: &Outline) -> Key {
    let [namespace, name] = [&metadata.namespace, &metadata.name];
    let text = |field: &Option<String>| field.clone().unwrap_or_default();
    Key::new(&text(namespace), &text(name))
}

fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, Error> {
    serde_json::from_str(text).map_err(|error| Error::Api(error.into()))
}

fn invalid_request(error: kube::core::request::Error) -> Error {
    Error::Api(kube::Error::BuildRequest(error).into())
}

impl Error {
    /// Whether the API server refuses the version of a watch, or may do so: the version is too old
    /// or, after a restore, newer than the data, for which the API server waits. An overloaded API
    /// server gets no LIST.
    fn requires_list(&self) -> bool {
        match self {
            Error::Status { status, .. } => !matches!(status.code, 429 | 500 | 503),
            Error::Timeout { .. } => true,
            Error::Api(_) | Error::NoVersion | Error::Invalid(_) => false,
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
