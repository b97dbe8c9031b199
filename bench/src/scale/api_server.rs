//! Fake Kubernetes API server over HTTP: LIST in pages and WATCH of any collection, with resource
//! versions, timeouts and bookmarks, GET of cluster-scoped objects (404 for others), and
//! TokenReview. It authenticates nobody and ignores selectors. A change between two pages may be
//! in neither.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use anyhow::Result;
use axum::{
    Json, Router,
    body::Body,
    extract::State,
    http::{StatusCode, Uri},
    response::{IntoResponse, Response},
    routing::post,
};
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::{sync::mpsc, time::interval};
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::cluster::Object;
use crate::certificates::api_server::{review, serve_on_thread};

const BOOKMARK_INTERVAL: Duration = Duration::from_secs(5);

/// The server. It runs until the process exits.
#[derive(Clone)]
pub struct ApiServer {
    store: Arc<Mutex<Store>>,
    /// Where it listens.
    pub address: SocketAddr,
}

#[derive(Default)]
struct Store {
    version: u64,
    collections: BTreeMap<String, BTreeMap<String, Value>>,
    events: Vec<Event>,
    watches: Vec<Watch>,
}

struct Event {
    version: u64,
    collection: &'static str,
    line: Bytes,
}

struct Watch {
    collection: String,
    /// The client wants the watch to end then.
    until: Option<Instant>,
    lines: mpsc::UnboundedSender<Result<Bytes, Infallible>>,
}

impl ApiServer {
    /// Starts the server on a thread of its own.
    pub fn start() -> Result<ApiServer> {
        let store = Arc::new(Mutex::new(Store::default()));
        let shared = store.clone();
        let address = serve_on_thread(0, async |listener| {
            tokio::spawn(send_bookmarks(shared.clone()));
            let routes = Router::new()
                .route("/apis/authentication.k8s.io/v1/tokenreviews", post(review))
                .fallback(collection)
                .with_state(shared);
            axum::serve(listener, routes).await
        })?;
        Ok(ApiServer { store, address })
    }

    /// A kubeconfig for the server.
    pub fn kubeconfig(&self) -> String {
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "scale",
            "clusters": [{ "name": "scale", "cluster": { "server": format!("http://{}", self.address) } }],
            "users": [{ "name": "scale", "user": { "token": "controller-token" } }],
            "contexts": [{ "name": "scale", "context": { "cluster": "scale", "user": "scale" } }],
        })
        .to_string()
    }

    /// Replaces all objects. No watch may be open.
    pub fn reset(&self, objects: Vec<Object>) {
        let mut store = lock(&self.store);
        store.collections.clear();
        store.events.clear();
        for (collection, mut object) in objects {
            store.insert(collection, &mut object);
        }
    }

    /// Creates or updates an object and notifies the watches.
    pub fn apply(&self, (collection, mut object): Object) {
        let mut store = lock(&self.store);
        let is_new = store.insert(collection, &mut object);
        let kind = if is_new { "ADDED" } else { "MODIFIED" };
        let line = line(&json!({ "type": kind, "object": object }));
        let version = store.version;
        store.watches.retain(|watch| {
            watch.collection != collection || watch.lines.send(Ok(line.clone())).is_ok()
        });
        store.events.push(Event {
            version,
            collection,
            line,
        });
    }
}

impl Store {
    fn insert(&mut self, collection: &str, object: &mut Value) -> bool {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let metadata = &object["metadata"];
        let key = format!("{}/{}", metadata["namespace"], metadata["name"]);
        let objects = self.collections.entry(collection.to_owned()).or_default();
        objects.insert(key, object.clone()).is_none()
    }
}

fn lock(store: &Mutex<Store>) -> MutexGuard<'_, Store> {
    store.lock().expect("no holder of the lock panics")
}

fn line(event: &Value) -> Bytes {
    format!("{event}\n").into()
}

/// GET of a cluster-scoped object, LIST or WATCH. A collection that was never written is empty.
async fn collection(State(store): State<Arc<Mutex<Store>>>, uri: Uri) -> Response {
    let mut store = lock(&store);
    let (parent, name) = uri.path().rsplit_once('/').unwrap_or_default();
    let mut siblings = store.collections.get(parent).into_iter().flatten();
    if let Some((_, object)) = siblings.find(|(_, object)| object["metadata"]["name"] == name) {
        return Json(object).into_response();
    }
    if is_object(uri.path()) {
        let status = json!({
            "apiVersion": "v1", "kind": "Status", "status": "Failure", "metadata": {},
            "code": 404, "reason": "NotFound", "message": "the object does not exist",
        });
        return (StatusCode::NOT_FOUND, Json(status)).into_response();
    }
    let options = uri.query().unwrap_or_default();
    let number = |name: &str| -> Option<u64> {
        let mut options = options
            .split('&')
            .filter_map(|option| option.split_once('='));
        options.find(|(option, _)| *option == name)?.1.parse().ok()
    };
    if !options.split('&').any(|option| option == "watch=true") {
        let objects = store.collections.get(uri.path());
        let position = number("continue").unwrap_or(0) as usize;
        let limit = number("limit").map_or(usize::MAX, |limit| limit as usize);
        let mut rest = objects
            .into_iter()
            .flat_map(BTreeMap::values)
            .skip(position);
        let items: Vec<_> = rest.by_ref().take(limit).collect();
        let next = rest.next().map(|_| (position + limit).to_string());
        return Json(json!({
            "apiVersion": "v1", "kind": "List", "items": items,
            "metadata": { "resourceVersion": store.version.to_string(), "continue": next },
        }))
        .into_response();
    }
    let since = number("resourceVersion").unwrap_or(0);
    let (lines, stream) = mpsc::unbounded_channel();
    for event in &store.events {
        if event.collection == uri.path() && event.version > since {
            let _ = lines.send(Ok(event.line.clone()));
        }
    }
    let timeout = number("timeoutSeconds").map(Duration::from_secs);
    store.watches.push(Watch {
        collection: uri.path().to_owned(),
        until: timeout.map(|timeout| Instant::now() + timeout),
        lines,
    });
    Body::from_stream(UnboundedReceiverStream::new(stream)).into_response()
}

/// Whether a path ends with the name of an object: KIND/NAME or namespaces/NAMESPACE/KIND/NAME
/// after the version of the API.
fn is_object(path: &str) -> bool {
    let version = if path.starts_with("/apis/") { 4 } else { 3 };
    path.split('/').skip(version).count() % 2 == 0
}

async fn send_bookmarks(store: Arc<Mutex<Store>>) {
    let mut ticks = interval(BOOKMARK_INTERVAL);
    loop {
        ticks.tick().await;
        let mut store = lock(&store);
        let version = store.version.to_string();
        store.watches.retain(|watch| {
            let (group, kind) = match &watch.collection {
                path if path.ends_with("endpointslices") => {
                    ("discovery.k8s.io/v1", "EndpointSlice")
                }
                path if path.ends_with("services") => ("v1", "Service"),
                _ => ("v1", "Pod"),
            };
            let bookmark = json!({ "type": "BOOKMARK", "object": {
                "apiVersion": group, "kind": kind, "metadata": { "resourceVersion": version },
            }});
            let is_over = watch.until.is_some_and(|until| until <= Instant::now());
            !is_over && watch.lines.send(Ok(line(&bookmark))).is_ok()
        });
    }
}
