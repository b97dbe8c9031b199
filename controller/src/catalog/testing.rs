//! An API server whose responses the test writes.

use diy_mesh_testkit::net::{listen, read_until};
use diy_mesh_testkit::wait::soon;
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};

use super::claims::Claims;
use super::freshness::Freshness;
use super::objects::Context;
use super::watch::Timing;
use super::{Change, Event};
use crate::api::bytes::Pages;

/// The context of the watches of a [`Server`].
pub struct Cluster {
    pub client: Client,
    changes: mpsc::Sender<Event>,
    pub claims: Claims,
    pub is_restored: watch::Sender<bool>,
    freshness: Freshness,
    pages: Pages,
    timing: Timing,
}

impl Cluster {
    pub(super) fn context(&self) -> Context<'_> {
        Context {
            trust_domain: "cluster.local",
            namespace: "mesh",
            freshness: &self.freshness,
            changes: &self.changes,
            claims: &self.claims,
            is_restored: &self.is_restored,
            pages: &self.pages,
            timing: self.timing,
        }
    }
}

/// An API server whose responses the test writes.
pub struct Server {
    listener: TcpListener,
    changes: mpsc::Receiver<Event>,
    pub freshness: Freshness,
    /// Requests that the test has not asked for yet.
    early: Vec<(TcpStream, String)>,
    /// Connections without a response, or with an unfinished one.
    hanging: Vec<TcpStream>,
}

impl Server {
    /// One without watches.
    pub async fn without_watches() -> (Server, Cluster) {
        Self::start(Timing::default()).await
    }

    pub(super) async fn start(timing: Timing) -> (Server, Cluster) {
        Self::start_with(timing, Pages::default()).await
    }

    pub(super) async fn start_with(timing: Timing, pages: Pages) -> (Server, Cluster) {
        let (listener, address) = listen().await;
        let url = format!("http://{address}");
        let (sender, changes) = mpsc::channel(16);
        let freshness = Freshness::default();
        let cluster = Cluster {
            claims: Claims::default(),
            is_restored: watch::Sender::new(false),
            client: Client::try_from(Config::new(url.parse().unwrap())).unwrap(),
            changes: sender,
            freshness: freshness.clone(),
            pages,
            timing,
        };
        let server = Server {
            listener,
            changes,
            freshness,
            early: Vec::new(),
            hanging: Vec::new(),
        };
        (server, cluster)
    }

    /// The next request whose target contains a text: its connection, and its query without the
    /// common parameters.
    async fn request(&mut self, text: &str) -> (TcpStream, String) {
        let is_it = |(_, target): &(TcpStream, String)| target.contains(text);
        let (stream, target) = match self.early.iter().position(is_it) {
            Some(position) => self.early.remove(position),
            None => loop {
                let request = self.accept().await;
                if is_it(&request) {
                    break request;
                } else {
                    self.early.push(request)
                }
            },
        };
        let (_, query) = target.split_once('?').unwrap_or_default();
        let is_relevant = |part: &&str| {
            ["watch=", "resourceVersion=", "continue="]
                .iter()
                .any(|name| part.starts_with(name))
        };
        let query: Vec<&str> = query.split('&').filter(is_relevant).collect();
        (stream, query.join("&"))
    }

    /// The targets of requests that the test has not asked for.
    pub fn early(&self) -> Vec<&str> {
        self.early.iter().map(|(_, target)| &**target).collect()
    }

    async fn accept(&self) -> (TcpStream, String) {
        let (mut stream, _) = soon(self.listener.accept()).await.unwrap();
        let head = read_until(&mut stream, "\r\n\r\n").await;
        let target = head.split(' ').nth(1).unwrap();
        (stream, target.to_owned())
    }

    /// Leaves the next request without a response.
    pub async fn hang(&mut self) -> String {
        self.hang_at("").await
    }

    /// Leaves the next request for a resource without a response.
    pub async fn hang_at(&mut self, resource: &str) -> String {
        let (stream, target) = self.request(resource).await;
        self.hanging.push(stream);
        target
    }

    /// Responds to the next request and closes its connection.
    pub async fn respond(&mut self, status: u16, body: Value) -> String {
        self.respond_at("", status, body).await
    }

    /// Responds to the next request for a resource and closes its connection.
    pub async fn respond_at(&mut self, resource: &str, status: u16, body: Value) -> String {
        let (mut stream, target) = self.request(resource).await;
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
    pub async fn events(&mut self, events: &[Value]) -> String {
        self.events_at("", events).await.1
    }

    /// Responds to the next watch of a resource with events, and leaves it open. Returns the number
    /// of the watch, for more events.
    pub async fn events_at(&mut self, resource: &str, events: &[Value]) -> (usize, String) {
        let (mut stream, target) = self.request(resource).await;
        let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        self.hanging.push(stream);
        let watch = self.hanging.len() - 1;
        self.more_events(watch, events).await;
        (watch, target)
    }

    /// Sends events of a watch that is open.
    pub async fn more_events(&mut self, watch: usize, events: &[Value]) {
        let lines: String = events.iter().map(|event| format!("{event}\n")).collect();
        let written = self.hanging[watch].write_all(lines.as_bytes()).await;
        written.unwrap();
    }

    /// The next change in a few words.
    pub async fn change(&mut self) -> String {
        self.event().await.0
    }

    /// The next change in a few words, and its version.
    pub async fn event(&mut self) -> (String, Option<u64>) {
        let event = soon(self.changes.recv()).await.unwrap();
        let text = match event.change {
            Change::Apply(object) => format!("apply {}", object.key()),
            Change::Delete(kind, key) => format!("delete {kind} {key}"),
            Change::Reset(kind, objects) => {
                let keys: Vec<String> = objects.iter().map(|one| one.key().to_string()).collect();
                format!("reset {kind} [{}]", keys.join(" "))
            }
            Change::NotInstalled(kind) => format!("not installed {kind}"),
            Change::Unreadable(kind) => format!("unreadable {kind}"),
            Change::Lost(namespaces) => format!("lost {namespaces:?}"),
            Change::Bookmark(kind) => format!("bookmark {kind}"),
            Change::Epoch(epoch) => format!("epoch {epoch}"),
        };
        (text, event.version)
    }
}

pub fn list(version: &str, token: &str, items: &[Value]) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ServiceList", "items": items,
        "metadata": {"resourceVersion": version, "continue": token},
    })
}

pub fn event(type_: &str, object: Value) -> Value {
    json!({"type": type_, "object": object})
}

pub fn failure(code: u16) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "metadata": {},
        "code": code, "message": "no", "reason": "Test",
    })
}
