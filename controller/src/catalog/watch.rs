//! A LIST and then watches of one kind of objects in a Kubernetes cluster.
//!
//! Each request has a deadline: a LIST, the start of a watch, and the watch itself, which the API
//! server ends after [`WATCH_SECONDS`]. A request that exceeds it is abandoned and repeated with
//! back-off. A watch resumes from the last version. Objects are listed again only if the API server
//! refuses that version; the list then replaces the previous one in a single change, so that no
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
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::convert::CatalogObject;
use super::freshness::Freshness;
use super::resources::resource;
use crate::index::object::{Change, Event, Key, Kind, Object, Source};

const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(250);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Objects in one response to a LIST, which is in memory as a whole.
const PAGE_SIZE: u32 = 500;
/// Of optional kinds: a route may have 1 MiB.
const OPTIONAL_PAGE_SIZE: u32 = 50;
/// Invalid objects of a kind that the log names.
const MAX_NAMED: usize = 100;
/// The duration of a watch, in seconds. The API server ends it.
const WATCH_SECONDS: u32 = 180;

/// The objects of a kind that are watched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Selector<'a> {
    /// By their fields.
    pub fields: Option<&'a str>,
    /// By their labels.
    pub labels: Option<&'a str>,
}

/// All objects.
pub(super) const ALL: Selector<'_> = Selector {
    fields: None,
    labels: None,
};

/// The deadlines of requests, which tests shorten.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// For one page of a LIST.
    pub list_timeout: Duration,
    /// For the response to the start of a watch.
    pub start_timeout: Duration,
    /// For the end of a watch.
    pub watch_timeout: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            list_timeout: Duration::from_secs(30),
            start_timeout: Duration::from_secs(15),
            watch_timeout: Duration::from_secs(u64::from(WATCH_SECONDS) + 15),
        }
    }
}

/// What the watches of a cluster share.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub trust_domain: &'a str,
    pub freshness: &'a Freshness,
    pub changes: &'a mpsc::Sender<Event>,
    pub timing: Timing,
}

/// Why a LIST or a watch has ended.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{}", explain_status(.kind, .status))]
    Status { kind: Kind, status: Box<Status> },
    #[error("{}", error_chain(.0))]
    Client(kube::Error),
    #[error("the API server has not completed the {request} within {deadline:?}")]
    Timeout {
        request: &'static str,
        deadline: Duration,
    },
    #[error("the list has no resourceVersion")]
    NoVersion,
    /// The receiver of changes was dropped.
    #[error("the controller stops")]
    Stopped,
}

/// Sends all objects of a kind, then changes, until the receiver is dropped. `apis` are versions of
/// the kind, of which the first one that is installed is used.
pub(super) async fn watch<K>(
    kind: Kind,
    apis: Vec<Api<K>>,
    selector: Selector<'_>,
    context: Context<'_>,
) where
    K: CatalogObject + Resource + Clone + Debug + DeserializeOwned,
{
    let mut watch = Watch {
        kind,
        apis,
        missing: 0,
        is_unavailable: false,
        selector,
        context,
        version: None,
        ignored: BTreeSet::new(),
        backoff: Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL),
    };
    tokio::select! {
        () = watch.run() => {}
        () = context.changes.closed() => {}
    }
}

struct Watch<'a, K> {
    kind: Kind,
    /// The version in use comes first.
    apis: Vec<Api<K>>,
    /// Versions that are not installed, in a row.
    missing: usize,
    /// The kind is optional, and not installed or not permitted.
    is_unavailable: bool,
    selector: Selector<'a>,
    context: Context<'a>,
    /// The version of the last event. `None`: the objects must be listed.
    version: Option<String>,
    /// The invalid objects.
    ignored: BTreeSet<Key>,
    backoff: Backoff,
}

impl<K> Watch<'_, K>
where
    K: CatalogObject + Resource + Clone + Debug + DeserializeOwned,
{
    async fn run(&mut self) {
        loop {
            let result = match self.version.clone() {
                None => self.list().await,
                Some(version) => self.follow(&version).await,
            };
            match result {
                Ok(()) => {}
                Err(Error::Stopped) => return,
                Err(error) => self.retry(&error).await,
            }
        }
    }

    /// Lists all objects, in pages, and sends them as one change.
    async fn list(&mut self) -> Result<(), Error> {
        let mut params = ListParams::default().limit(match self.kind.is_optional() {
            true => OPTIONAL_PAGE_SIZE,
            false => PAGE_SIZE,
        });
        params.field_selector = self.selector.fields.map(str::to_owned);
        params.label_selector = self.selector.labels.map(str::to_owned);
        self.ignored.clear();
        let mut listed = Vec::new();
        let version = loop {
            let deadline = self.context.timing.list_timeout;
            let page = self
                .within(deadline, "LIST", self.apis[0].list(&params))
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
        self.confirm();
        let change = Change::Reset(Source::Kubernetes, self.kind, listed);
        let sent = self.send(change, &version).await;
        self.version = Some(version);
        sent
    }

    /// Sends the changes since `version` until the API server ends the watch.
    async fn follow(&mut self, version: &str) -> Result<(), Error> {
        let mut params = WatchParams::default().timeout(WATCH_SECONDS);
        params.field_selector = self.selector.fields.map(str::to_owned);
        params.label_selector = self.selector.labels.map(str::to_owned);
        let Timing {
            start_timeout,
            watch_timeout,
            ..
        } = self.context.timing;
        let start = self.apis[0].watch(&params, version);
        let started = self.within(start_timeout, "start of a watch", start).await;
        let events = started.inspect_err(|error| {
            if error.requires_list() {
                self.version = None;
            }
        })?;
        self.confirm();
        let mut events = pin!(events);
        let deadline = tokio::time::Instant::now() + watch_timeout;
        loop {
            let event = tokio::time::timeout_at(deadline, events.next()).await;
            let event = event.map_err(|_| Error::Timeout {
                request: "watch",
                deadline: watch_timeout,
            })?;
            match event {
                Some(event) => {
                    self.receive(event.map_err(|error| self.error(error))?)
                        .await?
                }
                None => break,
            }
        }
        // An API server that ends each watch at once is not overloaded by the next one.
        tokio::time::sleep(MIN_RETRY_INTERVAL).await;
        Ok(())
    }

    async fn receive(&mut self, event: WatchEvent<K>) -> Result<(), Error> {
        let (change, version) = match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                let apply = |object| Change::Apply(Source::Kubernetes, object);
                // An invalid object replaces its valid state.
                let change = self
                    .convert(&object)
                    .map_or_else(|| self.deleted(&object), apply);
                (Some(change), object.resource_version())
            }
            WatchEvent::Deleted(object) => {
                self.ignored.remove(&key(&object));
                (Some(self.deleted(&object)), object.resource_version())
            }
            WatchEvent::Bookmark(bookmark) => (None, Some(bookmark.metadata.resource_version)),
            WatchEvent::Error(status) => {
                self.version = None;
                return Err(self.error(kube::Error::Api(status)));
            }
        };
        self.confirm();
        if let Some(change) = change {
            self.send(change, version.as_deref().unwrap_or_default())
                .await?;
        }
        if let Some(version) = version {
            self.version = Some(version);
        }
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
                kind: self.kind,
                status,
            },
            other => Error::Client(other),
        }
    }

    /// Logs an error and waits.
    async fn retry(&mut self, error: &Error) {
        if error.is_missing() {
            self.apis.rotate_left(1);
            self.missing += 1;
            if self.missing < self.apis.len() {
                return;
            }
        }
        self.missing = 0;
        let delay = self.backoff.next_delay();
        let is_unavailable = self.kind.is_optional() && error.is_unavailable();
        // A kind that is not installed is no news after the first request.
        if is_unavailable && self.is_unavailable {
            tracing::debug!("{} objects are still not available: {error}", self.kind);
        } else if is_unavailable {
            tracing::info!(
                "{} objects are not available, and will be used once they are: {error}",
                self.kind
            );
        } else {
            tracing::warn!(
                "cannot watch {} objects, retrying in {delay:?}: {error}",
                self.kind
            );
        }
        if is_unavailable {
            self.is_unavailable = true;
            let unavailable = Change::Unavailable(Source::Kubernetes, self.kind);
            // If the receiver was dropped, the next request does not matter.
            let _ = self.context.changes.send(unavailable.into()).await;
        }
        tokio::time::sleep(delay).await;
    }

    /// The objects are current.
    fn confirm(&mut self) {
        self.backoff.reset();
        (self.missing, self.is_unavailable) = (0, false);
        let freshness = self.context.freshness;
        freshness.confirm(self.kind, self.ignored.len());
    }

    async fn send(&self, change: Change, version: &str) -> Result<(), Error> {
        let version = version.parse().ok();
        let event = Event { change, version };
        let sent = self.context.changes.send(event).await;
        sent.map_err(|_| Error::Stopped)
    }

    /// Converts an object. The log names an invalid one once, as long as it is invalid.
    fn convert(&mut self, object: &K) -> Option<Object> {
        let (key, converted) = (
            key(object),
            object.convert(self.kind, self.context.trust_domain),
        );
        match &converted {
            Ok(_) => drop(self.ignored.remove(&key)),
            Err(error) => {
                let is_named = self.ignored.len() < MAX_NAMED && !self.ignored.contains(&key);
                if is_named {
                    tracing::warn!("{} {key} is ignored: {error}", self.kind);
                }
                self.ignored.insert(key);
            }
        }
        converted.ok()
    }

    fn deleted(&self, object: &K) -> Change {
        Change::Delete(Source::Kubernetes, self.kind, key(object))
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
            Error::Client(_) | Error::NoVersion | Error::Stopped => false,
        }
    }

    /// Whether the cluster does not have the version of the kind.
    fn is_missing(&self) -> bool {
        matches!(self, Error::Status { status, .. } if status.code == 404)
    }

    /// Whether the cluster does not have the kind, or does not permit to list it.
    fn is_unavailable(&self) -> bool {
        matches!(self, Error::Status { status, .. } if matches!(status.code, 403 | 404))
    }
}

/// A status with its remedy.
fn explain_status(kind: &Kind, status: &Status) -> String {
    if status.code != 403 {
        return format!("{} (status {})", status.message, status.code);
    }
    let resource = resource(*kind);
    let group = match &*resource.group {
        "" => "the core group",
        group => group,
    };
    format!(
        "{}; the controller's ServiceAccount needs the verbs list and watch on {} of {group}, in all namespaces",
        status.message, resource.plural
    )
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{Node, Service};
    use kube::{Client, Config};
    use serde_json::{Value, json};
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::{TcpListener, TcpStream};

    use super::super::resources::apis;
    use super::*;

    /// Longer than anything takes.
    const DEADLINE: Duration = Duration::from_secs(20);
    /// Requests that hang are abandoned soon; other requests that exceed this are repeated.
    const TIMING: Timing = Timing {
        list_timeout: Duration::from_millis(500),
        start_timeout: Duration::from_millis(500),
        watch_timeout: Duration::from_secs(1),
    };

    /// An API server whose responses the test writes.
    struct Server {
        listener: TcpListener,
        changes: mpsc::Receiver<Event>,
        freshness: Freshness,
        /// Connections without a response.
        hanging: Vec<TcpStream>,
    }

    impl Server {
        /// A server that a watch of `K` uses.
        async fn start<K>(kind: Kind) -> Server
        where
            K: CatalogObject + Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
            K: Send + Sync + 'static,
        {
            Server::start_with(kind, |client| vec![Api::<K>::all(client)]).await
        }

        async fn start_with<K>(kind: Kind, apis: impl FnOnce(Client) -> Vec<Api<K>>) -> Server
        where
            K: CatalogObject + Resource + Clone + Debug + DeserializeOwned,
            K: Send + Sync + 'static,
        {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("http://{}", listener.local_addr().unwrap());
            let client = Client::try_from(Config::new(url.parse().unwrap())).unwrap();
            let apis = apis(client);
            let (sender, changes) = mpsc::channel(16);
            let freshness = Freshness::default();
            let confirmed = freshness.clone();
            tokio::spawn(async move {
                let context = Context {
                    trust_domain: "cluster.local",
                    freshness: &confirmed,
                    changes: &sender,
                    timing: TIMING,
                };
                watch(kind, apis, ALL, context).await;
            });
            Server {
                listener,
                changes,
                freshness,
                hanging: Vec::new(),
            }
        }

        /// The next request: its connection, and its target without the common parameters.
        async fn request(&self) -> (TcpStream, String) {
            let accepted = tokio::time::timeout(DEADLINE, self.listener.accept()).await;
            let (stream, _) = accepted.expect("another request").unwrap();
            let mut lines = BufReader::new(stream).lines();
            let first = lines.next_line().await.unwrap().unwrap();
            while !lines.next_line().await.unwrap().unwrap().is_empty() {}
            let target = first.split(' ').nth(1).unwrap();
            let (_, query) = target.split_once('?').unwrap();
            let is_relevant = |part: &&str| {
                ["watch=", "resourceVersion=", "continue="]
                    .iter()
                    .any(|name| part.starts_with(name))
            };
            let query: Vec<&str> = query.split('&').filter(is_relevant).collect();
            (lines.into_inner().into_inner(), query.join("&"))
        }

        /// Leaves the next request without a response.
        async fn hang(&mut self) -> String {
            let (stream, target) = self.request().await;
            self.hanging.push(stream);
            target
        }

        /// Responds to the next request and closes its connection.
        async fn respond(&mut self, status: u16, body: Value) -> String {
            let (mut stream, target) = self.request().await;
            let body = body.to_string();
            let head = format!(
                "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
                 Connection: close\r\n\r\n",
                body.len()
            );
            stream.write_all((head + &body).as_bytes()).await.unwrap();
            target
        }

        /// Responds to the next watch with events, and leaves it open.
        async fn events(&mut self, events: &[Value]) -> String {
            let (mut stream, target) = self.request().await;
            let head =
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n";
            let lines: String = events.iter().map(|event| format!("{event}\n")).collect();
            let response = head.to_owned() + &lines;
            stream.write_all(response.as_bytes()).await.unwrap();
            self.hanging.push(stream);
            target
        }

        /// The next change in a few words.
        async fn change(&mut self) -> String {
            self.event().await.0
        }

        /// The next change in a few words, and its version.
        async fn event(&mut self) -> (String, Option<u64>) {
            let event = tokio::time::timeout(DEADLINE, self.changes.recv()).await;
            let event = event.expect("another change").unwrap();
            let text = match event.change {
                Change::Apply(_, object) => format!("apply {}", object.key()),
                Change::Delete(_, kind, key) => format!("delete {kind} {key}"),
                Change::Reset(_, kind, objects) => {
                    let keys: Vec<String> =
                        objects.iter().map(|one| one.key().to_string()).collect();
                    format!("reset {kind} [{}]", keys.join(" "))
                }
                Change::Unavailable(_, kind) => format!("unavailable {kind}"),
            };
            (text, event.version)
        }
    }

    fn service(name: &str, ip: &str, version: &str) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Service", "spec": {"clusterIP": ip},
            "metadata": {"name": name, "namespace": "shop", "resourceVersion": version},
        })
    }

    fn list(version: &str, token: &str, items: &[Value]) -> Value {
        json!({
            "apiVersion": "v1", "kind": "ServiceList", "items": items,
            "metadata": {"resourceVersion": version, "continue": token},
        })
    }

    fn event(type_: &str, object: Value) -> Value {
        json!({"type": type_, "object": object})
    }

    fn failure(code: u16) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Status", "status": "Failure", "metadata": {},
            "code": code, "message": "no", "reason": "Test",
        })
    }

    #[tokio::test]
    async fn abandons_requests_that_hang() {
        let mut server = Server::start::<Service>(Kind::Service).await;
        assert_eq!(server.hang().await, "", "a LIST");
        let one = service("a", "10.0.0.1", "5");
        server.respond(200, list("7", "", &[one])).await;
        assert_eq!(server.change().await, "reset Service [shop/a]");
        assert_eq!(server.hang().await, "watch=true&resourceVersion=7");
        let one = service("a", "10.0.0.1", "5");
        assert_eq!(server.respond(200, list("7", "", &[one])).await, "");
        assert_eq!(server.change().await, "reset Service [shop/a]");
        let added = event("ADDED", service("b", "10.0.0.2", "8"));
        server.events(&[added]).await;
        assert_eq!(server.change().await, "apply shop/b");
        // The watch hangs, and is abandoned too.
        let deleted = event("DELETED", service("a", "10.0.0.1", "9"));
        let resumed = server.events(&[deleted]).await;
        assert_eq!(resumed, "watch=true&resourceVersion=8");
        assert_eq!(server.change().await, "delete Service shop/a");
    }

    #[tokio::test]
    async fn lists_pages_and_resumes_after_a_bookmark() {
        let mut server = Server::start::<Service>(Kind::Service).await;
        let (a, b) = (service("a", "10.0.0.1", "5"), service("b", "10.0.0.2", "6"));
        server.respond(200, list("7", "more", &[a])).await;
        let second = server.respond(200, list("7", "", &[b])).await;
        assert_eq!(second, "continue=more");
        assert_eq!(server.change().await, "reset Service [shop/a shop/b]");
        assert_eq!(server.freshness.ages().len(), 1);
        let bookmark =
            json!({"apiVersion": "v1", "kind": "Service", "metadata": {"resourceVersion": "90"}});
        let invalid = event("MODIFIED", service("b", "not an address", "91"));
        server.events(&[event("BOOKMARK", bookmark), invalid]).await;
        assert_eq!(server.change().await, "delete Service shop/b");
        assert_eq!(server.hang().await, "watch=true&resourceVersion=91");
    }

    #[tokio::test]
    async fn invalid_objects_are_counted_until_they_are_valid_or_deleted() {
        let mut server = Server::start::<Service>(Kind::Service).await;
        let mut large = service("large", "10.0.0.1", "5");
        large["spec"]["ports"] = json!([{"port": 70_000}]);
        let invalid = service("b", "not an address", "6");
        let listed = list("7", "", &[large.clone(), invalid]);
        server.respond(200, listed).await;
        assert_eq!(server.change().await, "reset Service []");
        assert_eq!(server.freshness.ignored(), [(Kind::Service, 2)]);
        let valid = event("MODIFIED", service("b", "10.0.0.2", "8"));
        server.events(&[valid, event("DELETED", large)]).await;
        assert_eq!(server.change().await, "apply shop/b");
        assert_eq!(server.change().await, "delete Service shop/large");
        assert_eq!(server.freshness.ignored(), [(Kind::Service, 0)]);
    }

    #[tokio::test]
    async fn lists_again_if_the_version_is_refused_but_not_while_the_server_is_overloaded() {
        let mut server = Server::start::<Service>(Kind::Service).await;
        server.respond(200, list("7", "", &[])).await;
        assert_eq!(server.change().await, "reset Service []");
        let start = "watch=true&resourceVersion=7";
        assert_eq!(server.respond(500, failure(500)).await, start);
        assert_eq!(server.respond(400, failure(400)).await, start);
        assert_eq!(server.respond(200, list("3", "", &[])).await, "");
        assert_eq!(server.change().await, "reset Service []");
        let expired = event("ERROR", failure(410));
        let resumed = server.events(&[expired]).await;
        assert_eq!(resumed, "watch=true&resourceVersion=3");
        assert_eq!(server.respond(200, list("4", "", &[])).await, "");
        assert_eq!(server.change().await, "reset Service []");
    }

    #[tokio::test]
    async fn changes_have_the_version_of_their_event_if_it_is_an_integer() {
        let mut server = Server::start::<Service>(Kind::Service).await;
        server.respond(200, list("7", "", &[])).await;
        assert_eq!(server.event().await, ("reset Service []".into(), Some(7)));
        let object = |version| service("a", "10.0.0.1", version);
        let events = ["8", "9", "x-1"].map(|version| event("ADDED", object(version)));
        server.events(&events).await;
        for version in [Some(8), Some(9), None] {
            assert_eq!(server.event().await, ("apply shop/a".into(), version));
        }
    }

    #[tokio::test]
    async fn kind_that_is_not_installed_or_not_permitted_is_unavailable_if_it_is_optional() {
        for code in [403, 404] {
            let mut server = Server::start::<Node>(Kind::Node).await;
            server.respond(code, failure(code)).await;
            assert_eq!(server.change().await, "unavailable Node");
            server.respond(200, list("1", "", &[])).await;
            assert_eq!(server.change().await, "reset Node []");
            let mut server = Server::start::<Service>(Kind::Service).await;
            server.respond(code, failure(code)).await;
            server.respond(200, list("1", "", &[])).await;
            assert_eq!(server.change().await, "reset Service []");
        }
    }

    #[tokio::test]
    async fn uses_the_version_that_is_installed_and_waits_until_one_is() {
        let grants = |client: Client| apis(&client, Kind::Grant);
        let mut server = Server::start_with(Kind::Grant, grants).await;
        // Before all versions were tried, the kind is not unavailable.
        for _ in 0..2 {
            server.respond(404, failure(404)).await;
        }
        assert_eq!(server.change().await, "unavailable ReferenceGrant");
        server.respond(404, failure(404)).await;
        let grant = json!({
            "metadata": {"name": "g", "namespace": "shop", "resourceVersion": "5"},
            "spec": {"from": [], "to": [{"group": "", "kind": "Service"}]},
        });
        server.respond(200, list("7", "", &[grant])).await;
        assert_eq!(server.change().await, "reset ReferenceGrant [shop/g]");
        assert_eq!(server.hang().await, "watch=true&resourceVersion=7");
    }

    #[tokio::test]
    async fn route_with_values_of_a_later_release_leaves_the_others_readable() {
        let routes = |client: Client| apis(&client, Kind::HttpRoute);
        let mut server = Server::start_with(Kind::HttpRoute, routes).await;
        let route = |name: &str, rules: Value| {
            let parent = json!({"group": "", "kind": "Service", "name": "web"});
            json!({
                "metadata": {"name": name, "namespace": "shop", "resourceVersion": "5"},
                "spec": {"parentRefs": [parent], "rules": rules},
            })
        };
        let future = route("a", json!([{"filters": [{"type": "Future", "future": 1}]}]));
        let unreadable = json!({
            "metadata": {"name": "b", "namespace": "shop", "resourceVersion": "6"},
            "spec": {"parentRefs": "none"},
        });
        let all = [future, unreadable, route("c", json!([{}]))];
        server.respond(200, list("7", "", &all)).await;
        assert_eq!(server.change().await, "reset HTTPRoute [shop/a shop/c]");
    }

    #[test]
    fn names_missing_permissions() {
        let status = Status::failure("forbidden", "Forbidden").with_code(403);
        let text = explain_status(&Kind::Slice, &status);
        assert!(
            text.contains("verbs list and watch on endpointslices of discovery.k8s.io"),
            "{text}"
        );
    }
}
