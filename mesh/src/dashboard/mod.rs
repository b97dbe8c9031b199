//! The server of `mesh dashboard`: one page and its data, on loopback only. Changes nothing.

pub mod guard;
pub mod live;
pub mod source;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use diy_mesh_model::exchange::ExchangeId;
use diy_mesh_runtime::listen::Acceptor;
use futures::{StreamExt, stream::FuturesUnordered};
use http_body_util::Full;
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Request, Response, StatusCode, Uri, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use serde_json::json;
use tokio::{net::TcpListener, net::TcpStream, sync::Mutex, time::Instant};

use crate::traffic::{By, Row, Sample, TcpRow};
use guard::Guard;
use source::Source;

/// However many tabs look, the mesh is asked this often, and only while one looks.
const INTERVAL: Duration = Duration::from_secs(1);
/// The timeout for a request head, and for a connection between two requests.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Further ones wait.
const MAX_CONNECTIONS: usize = 64;
const MAX_REQUEST_BYTES: usize = 16 * 1024;

const TEXT: &str = "text/plain; charset=utf-8";
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
    require-trusted-types-for 'script'";
/// The parts of the page.
const PAGE: [(&str, &str, &str); 3] = [
    (
        "/",
        "text/html; charset=utf-8",
        include_str!("page/index.html"),
    ),
    (
        "/style.css",
        "text/css; charset=utf-8",
        include_str!("page/style.css"),
    ),
    (
        "/app.js",
        "text/javascript; charset=utf-8",
        include_str!("page/app.js"),
    ),
];

/// The server.
pub struct Server<S> {
    source: S,
    guard: Guard,
    latest: Mutex<Latest>,
}

/// The data that all tabs get.
#[derive(Default)]
struct Latest {
    asked: Option<Instant>,
    sample: Option<(Instant, Sample)>,
    error: Option<String>,
}

/// The traffic of the mesh.
#[derive(Serialize)]
struct Traffic {
    age_ms: u128,
    /// Why the data is not newer.
    error: Option<String>,
    notes: Vec<String>,
    workloads: Vec<Row>,
    edges: Vec<Row>,
    routes: Vec<Row>,
    /// The opaque connections from and to the ends of edges.
    tcp: Vec<TcpRow>,
    /// The workloads of called Services that have other names.
    services: BTreeMap<String, BTreeSet<String>>,
}

/// A question of the page.
#[derive(Debug, PartialEq, Eq)]
enum Question {
    Traffic,
    Workload(String),
    Exchange(ExchangeId),
    LatestFailure { from: String, to: String },
}

/// A status and a text.
type Failure = (StatusCode, String);

impl<S: Source> Server<S> {
    /// A server that answers what the guard permits.
    pub fn new(source: S, guard: Guard) -> Self {
        Self {
            source,
            guard,
            latest: Mutex::default(),
        }
    }

    /// Serves forever. Dropping the future closes all connections.
    pub async fn serve(&self, listener: TcpListener) {
        let mut acceptor = Acceptor::new(listener);
        let mut connections = FuturesUnordered::new();
        loop {
            tokio::select! {
                (stream, _) = acceptor.accept(), if connections.len() < MAX_CONNECTIONS => {
                    connections.push(self.serve_connection(stream));
                }
                Some(()) = connections.next() => {}
            }
        }
    }

    async fn serve_connection(&self, stream: TcpStream) {
        let service = service_fn(async |request| Ok::<_, Infallible>(self.respond(&request).await));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(REQUEST_TIMEOUT)
            .max_buf_size(MAX_REQUEST_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        // The browser may leave at any time.
        let _ = connection.await;
    }

    async fn respond<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        let (method, headers) = (request.method(), request.headers());
        let mut parts = PAGE.iter();
        let part = parts.find(|(path, ..)| *path == request.uri().path());
        let checked = match part {
            Some(_) => self.guard.check_page(method, headers),
            None => self.guard.check_data(method, headers),
        };
        match (checked, part) {
            (Err(refused), _) => response(refused.status(), TEXT, format!("{refused}\n")),
            (Ok(()), Some((_, kind, text))) => response(StatusCode::OK, kind, *text),
            (Ok(()), None) => match self.answer(request.uri()).await {
                Ok(json) => response(StatusCode::OK, "application/json", json),
                Err((status, error)) => response(status, TEXT, format!("{error}\n")),
            },
        }
    }

    async fn answer(&self, uri: &Uri) -> Result<String, Failure> {
        let failed = |error| (StatusCode::BAD_GATEWAY, error);
        let story = match Question::parse(uri.path(), uri.query().unwrap_or_default())? {
            Question::Traffic => return Ok(json!(self.traffic().await).to_string()),
            Question::Workload(name) => {
                let workload = self.source.workload(&name).await;
                return Ok(json!(workload.map_err(failed)?).to_string());
            }
            Question::Exchange(id) => self.source.story(id).await,
            Question::LatestFailure { from, to } => self.source.latest(&from, &to).await,
        };
        let story = story.map_err(failed)?;
        Ok(json!({"page": story.page(), "is_failure": story.is_failure()}).to_string())
    }

    /// A tab that waits keeps the others waiting: they get the same answer.
    async fn traffic(&self) -> Traffic {
        let mut latest = self.latest.lock().await;
        let is_due = |asked: Instant| asked.elapsed() >= INTERVAL;
        if latest.asked.is_none_or(is_due) {
            match self.source.sample().await {
                Ok(sample) => {
                    latest.sample = Some((Instant::now(), sample));
                    latest.error = None;
                }
                Err(error) => latest.error = Some(error),
            }
            latest.asked = Some(Instant::now());
        }
        latest.traffic()
    }
}

impl Latest {
    fn traffic(&self) -> Traffic {
        let nothing = (Instant::now(), Sample::default());
        let (at, sample) = self.sample.as_ref().unwrap_or(&nothing);
        let edges = sample.rows(By::Edge);
        let mut services = sample.services();
        services.retain(|name, _| edges.iter().any(|edge| edge.names.get("to") == Some(name)));
        Traffic {
            age_ms: at.elapsed().as_millis(),
            error: self.error.clone(),
            notes: sample.notes.clone(),
            workloads: sample.rows(By::Workload),
            edges,
            routes: sample.rows(By::Route),
            tcp: sample.tcp_rows(By::Edge),
            services,
        }
    }
}

impl Question {
    fn parse(path: &str, query: &str) -> Result<Self, Failure> {
        let mut values = query.split('&').filter_map(|pair| pair.split_once('='));
        let mut value = |name| match values.next() {
            Some((known, value)) if known == name => Ok(value),
            _ => Err((StatusCode::BAD_REQUEST, format!("no parameter {name}"))),
        };
        Ok(match path {
            "/api/traffic" => Self::Traffic,
            "/api/workload" => Self::Workload(namespaced(value("name")?)?),
            "/api/why" if query.starts_with("from=") => Self::LatestFailure {
                from: namespaced(value("from")?)?,
                to: namespaced(value("to")?)?,
            },
            "/api/why" => Self::Exchange(value("id")?.parse().map_err(|error| {
                (
                    StatusCode::BAD_REQUEST,
                    format!("invalid identifier: {error}"),
                )
            })?),
            _ => return Err((StatusCode::NOT_FOUND, "no such page".into())),
        })
    }
}

/// `NAMESPACE/NAME`, which become parts of paths.
fn namespaced(text: &str) -> Result<String, Failure> {
    let is_known = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-');
    let is_name = |name: &str| {
        name.len() <= 253
            && name.starts_with(|first: char| first.is_ascii_alphanumeric())
            && name.bytes().all(is_known)
    };
    let names = text.split_once('/');
    if names.is_some_and(|(namespace, name)| is_name(namespace) && is_name(name)) {
        return Ok(text.to_owned());
    }
    let error = "invalid name, expected NAMESPACE/NAME";
    Err((StatusCode::BAD_REQUEST, error.into()))
}

fn response(
    status: StatusCode,
    kind: &'static str,
    body: impl Into<Bytes>,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    for (name, value) in [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (CACHE_CONTROL, "no-store"),
    ] {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}
