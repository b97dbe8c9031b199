//! An API server in memory for tests: objects by path, optimistic concurrency, status
//! subresources, and failures.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use diy_mesh_testkit::output::Output;
use http::{Method, Request, Response};
use http_body_util::BodyExt;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

use crate::object::{Condition, Key, Kind, ObjectStatus, TargetReference, TargetStatus};

/// The kind of the routes in tests.
pub(crate) const KIND: Kind = Kind::HttpRoute;

type Change = Box<dyn FnOnce(&mut Value) + Send>;

/// The server. Clones share its objects.
#[derive(Clone, Default)]
pub(crate) struct ApiServer(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    version: u64,
    objects: BTreeMap<String, Value>,
    /// The collections that exist. A LIST of another one fails.
    collections: Vec<String>,
    /// A change of another client before the next write to a path.
    conflicts: BTreeMap<String, Change>,
    /// The status of each response to a write of a path, or to the list of a collection.
    rejected: BTreeMap<String, u16>,
    fail_all: Option<u16>,
    /// Writes of paths with this text get no response.
    hanging: Option<String>,
    calls: Vec<String>,
}

impl ApiServer {
    pub(crate) fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect().await?.to_bytes();
                let body = serde_json::from_slice(&body).unwrap_or_default();
                let path = head.uri.path();
                if server.receive(&head.method, path) {
                    std::future::pending::<()>().await;
                }
                let mut inner = server.lock();
                let (status, object) = inner.respond(&head.method, path, body);
                let response = Response::builder().status(status);
                let body = Body::from(object.to_string().into_bytes());
                Ok::<_, kube::Error>(response.body(body).expect("valid"))
            }
        });
        Client::new(service, "default")
    }

    /// Records a call. Returns whether it gets no response.
    fn receive(&self, method: &Method, path: &str) -> bool {
        let mut inner = self.lock();
        inner.calls.push(format!("{method} {path}"));
        let hanging = inner.hanging.as_ref();
        hanging.is_some_and(|text| method != Method::GET && path.contains(text))
    }

    pub(crate) fn get(&self, path: &str) -> Option<Value> {
        self.lock().objects.get(path).cloned()
    }

    /// Creates or replaces an object, as another client does.
    pub(crate) fn put(&self, path: &str, object: Value) {
        let mut inner = self.lock();
        inner.store(path, object);
    }

    /// Installs a collection for LIST requests, by its path.
    pub(crate) fn install(&self, collection: &str) {
        self.lock().collections.push(collection.to_owned());
    }

    /// Another client changes the object between the next read and write.
    pub(crate) fn conflict_once(
        &self,
        path: &str,
        change: impl FnOnce(&mut Value) + Send + 'static,
    ) {
        let mut inner = self.lock();
        inner.conflicts.insert(path.to_owned(), Box::new(change));
    }

    /// Rejects writes of this path, or the list of this collection, with a status, or accepts them
    /// again.
    pub(crate) fn reject(&self, path: &str, status: Option<u16>) {
        let mut inner = self.lock();
        match status {
            Some(status) => drop(inner.rejected.insert(path.to_owned(), status)),
            None => drop(inner.rejected.remove(path)),
        }
    }

    /// Responds with this status to all requests.
    pub(crate) fn fail_all(&self, status: Option<u16>) {
        self.lock().fail_all = status;
    }

    /// Does not respond to writes of paths with this text.
    pub(crate) fn hang(&self, text: &str) {
        self.lock().hanging = Some(text.to_owned());
    }

    /// The calls since the last time, as `METHOD PATH`.
    pub(crate) fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().calls)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("no test panics with the lock")
    }
}

impl Inner {
    fn store(&mut self, path: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.objects.insert(path.to_owned(), object.clone());
        object
    }

    fn respond(&mut self, method: &Method, path: &str, body: Value) -> (u16, Value) {
        if let Some(status) = self.fail_all {
            return failure(status);
        }
        if method == Method::GET {
            return match (self.objects.get(path), self.rejected.get(path)) {
                (Some(object), _) => (200, object.clone()),
                (None, Some(status)) => failure(*status),
                _ if self.collections.iter().any(|one| one == path) => (200, self.list(path)),
                _ => failure(404),
            };
        }
        let path = &if method == Method::POST {
            let name = body["metadata"]["name"].as_str().expect("a name");
            format!("{path}/{name}")
        } else {
            path.to_owned()
        };
        if let Some(status) = self.rejected.get(path) {
            return failure(*status);
        }
        if method == Method::POST {
            return if self.objects.contains_key(path) {
                failure(409)
            } else {
                (201, self.store(path, body))
            };
        }
        if method == Method::DELETE {
            return match self.objects.remove(path) {
                Some(object) => (200, object),
                None => failure(404),
            };
        }
        let (path, is_status) = match path.strip_suffix("/status") {
            Some(path) => (path, true),
            None => (path.as_str(), false),
        };
        if let Some(change) = self.conflicts.remove(path) {
            let mut object = self.objects[path].clone();
            change(&mut object);
            self.store(path, object);
        }
        let Some(current) = self.objects.get(path) else {
            return failure(404);
        };
        let version = |object: &Value| object["metadata"]["resourceVersion"].clone();
        if version(current) != version(&body) {
            return failure(409);
        }
        let object = if is_status {
            let mut object = current.clone();
            object["status"] = body["status"].clone();
            object
        } else {
            body
        };
        (200, self.store(path, object))
    }

    /// The objects of all namespaces whose paths have the group and the plural of a collection.
    fn list(&self, collection: &str) -> Value {
        let (group, plural) = collection.rsplit_once('/').expect("a path");
        let plural = format!("/{plural}/");
        let listed = |path: &str| path.starts_with(group) && path.contains(&plural);
        let objects = self.objects.iter().filter(|(path, _)| listed(path));
        let items: Vec<&Value> = objects.map(|(_, object)| object).collect();
        json!({"apiVersion": "v1", "kind": "List", "items": items,
            "metadata": {"resourceVersion": self.version.to_string()}})
    }
}

fn failure(code: u16) -> (u16, Value) {
    let reason = match code {
        404 => "NotFound",
        409 => "Conflict",
        _ => "Test",
    };
    let status = json!({"status": "Failure", "code": code, "message": "refused by the test", "reason": reason});
    (code, status)
}

/// The status of HTTPRoute shop/web.
pub(crate) fn status(generation: i64, parents: Vec<TargetStatus>) -> ObjectStatus {
    ObjectStatus::new(KIND, Key::new("shop", "web"), generation, parents)
}

/// The status at a Service.
pub(crate) fn service(name: &str, port: Option<u16>, conditions: Vec<Condition>) -> TargetStatus {
    let parent = TargetReference {
        group: Some(String::new()),
        kind: Some("Service".into()),
        name: name.into(),
        port,
        ..TargetReference::default()
    };
    TargetStatus { parent, conditions }
}

/// The condition Accepted.
pub(crate) fn accepted(holds: bool) -> Condition {
    let reason = if holds {
        "Accepted"
    } else {
        "UnsupportedValue"
    };
    Condition::new("Accepted", holds, reason, String::new())
}

/// Writes a log to an output.
pub(crate) fn subscriber(log: &Output) -> impl tracing::Subscriber + Send + Sync + 'static {
    let log = log.clone();
    let lines = tracing_subscriber::fmt().with_ansi(false);
    lines.with_writer(move || log.clone()).finish()
}
