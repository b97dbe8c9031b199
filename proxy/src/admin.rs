//! Admin server: `/live`, `/ready` and `/metrics`. Runs on the main thread, separate from traffic, with bounded resources. Read-only.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::metrics::{self, Metrics};

/// Maximum number of concurrent connections. Further ones wait.
const MAX_CONNECTIONS: usize = 256;
/// Timeout of a connection, which serves one request.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay after an error of accept(2), mostly a lack of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
const PATHS: &str =
    "/live     liveness\n/ready    readiness\n/metrics  metrics in the OpenMetrics format\n";

/// Readiness of the proxy: all registered conditions are met. Clones share their state.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    state: Arc<Mutex<ReadinessState>>,
}

#[derive(Debug, Default)]
struct ReadinessState {
    /// Name of each condition, and the reason why it is not met; `None` if it is met.
    conditions: Vec<(&'static str, Option<&'static str>)>,
    draining: bool,
}

/// A condition of readiness.
#[derive(Debug)]
pub struct Condition {
    state: Arc<Mutex<ReadinessState>>,
    index: usize,
}

impl Readiness {
    /// Ready, without conditions.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a condition that is not met, because of `reason`.
    pub fn condition(&self, name: &'static str, reason: &'static str) -> Condition {
        let mut state = lock(&self.state);
        state.conditions.push((name, Some(reason)));
        Condition {
            state: self.state.clone(),
            index: state.conditions.len() - 1,
        }
    }

    /// Makes the proxy not ready, because it is shutting down.
    pub fn drain(&self) {
        lock(&self.state).draining = true;
    }

    /// Reasons why the proxy is not ready, one per line; empty if it is ready.
    pub fn reasons(&self) -> String {
        let state = lock(&self.state);
        let draining = state
            .draining
            .then(|| "draining: the proxy is shutting down\n".to_owned());
        let unmet = state
            .conditions
            .iter()
            .filter_map(|(name, reason)| reason.map(|reason| format!("{name}: {reason}\n")));
        draining.into_iter().chain(unmet).collect()
    }
}

impl Condition {
    /// Marks the condition as met.
    pub fn set(&self) {
        lock(&self.state).conditions[self.index].1 = None;
    }

    /// Marks the condition as not met, because of `reason`.
    pub fn unset(&self, reason: &'static str) {
        lock(&self.state).conditions[self.index].1 = Some(reason);
    }
}

/// Ignores poisoning: no critical section leaves an invalid state.
fn lock(state: &Mutex<ReadinessState>) -> MutexGuard<'_, ReadinessState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// State that the admin server exposes.
#[derive(Clone)]
pub struct Admin {
    /// For `/ready`.
    pub readiness: Readiness,
    /// For `/metrics`.
    pub metrics: Arc<Metrics>,
}

/// Binds the port on all addresses, of both families if IPv6 is available.
pub fn bind(port: u16) -> io::Result<Vec<TcpListener>> {
    let v6 = bind_one(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)));
    let listener = match v6 {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(error),
        Err(_) => bind_one(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))),
        bound => bound,
    };
    let explained = listener.map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("failed to listen on port {port} (--admin-port): {error}"),
        )
    });
    Ok(vec![explained?])
}

fn bind_one(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(128)?;
    Ok(socket.into())
}

impl Admin {
    /// Serves all listeners forever.
    pub async fn serve(self, listeners: Vec<TcpListener>) {
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let admin = Arc::new(self);
        let mut loops = tokio::task::JoinSet::new();
        for listener in listeners {
            loops.spawn(accept(listener, permits.clone(), admin.clone()));
        }
        loops.join_all().await;
    }

    fn respond(&self, method: &Method, path: &str) -> Response<Full<Bytes>> {
        let (status, text) = match path {
            _ if *method != Method::GET && *method != Method::HEAD => (
                StatusCode::METHOD_NOT_ALLOWED,
                "only GET and HEAD\n".to_owned(),
            ),
            "/live" => (StatusCode::OK, "live\n".to_owned()),
            "/ready" => match self.readiness.reasons() {
                reasons if reasons.is_empty() => (StatusCode::OK, "ready\n".to_owned()),
                reasons => (StatusCode::SERVICE_UNAVAILABLE, reasons),
            },
            "/metrics" => (StatusCode::OK, self.metrics.render()),
            _ => (
                StatusCode::NOT_FOUND,
                format!("unknown path {path}, expected one of\n{PATHS}"),
            ),
        };
        let content_type = if path == "/metrics" {
            metrics::CONTENT_TYPE
        } else {
            "text/plain; charset=utf-8"
        };
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = status;
        response
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        if status == StatusCode::METHOD_NOT_ALLOWED {
            response
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        }
        response
    }
}

async fn accept(listener: TcpListener, permits: Arc<Semaphore>, admin: Arc<Admin>) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!("admin server failed to listen: {error}"),
    };
    loop {
        let Ok(permit) = permits.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let admin = admin.clone();
                tokio::spawn(async move {
                    serve_connection(stream, &admin).await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!("admin server failed to accept a connection: {error}");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

async fn serve_connection(stream: TcpStream, admin: &Admin) {
    let service = service_fn(async |request: Request<Incoming>| {
        Ok::<_, Infallible>(admin.respond(request.method(), request.uri().path()))
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(CONNECTION_TIMEOUT)
        .keep_alive(false)
        .max_buf_size(16 * 1024)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!("admin connection failed: {error}"),
        Err(_) => tracing::debug!("admin connection closed after {CONNECTION_TIMEOUT:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn start() -> (SocketAddr, Readiness) {
        let admin = Admin {
            readiness: Readiness::new(),
            metrics: Metrics::new(),
        };
        let readiness = admin.readiness.clone();
        let listeners = bind(0).unwrap();
        let port = listeners[0].local_addr().unwrap().port();
        tokio::spawn(admin.serve(listeners));
        (SocketAddr::from((Ipv4Addr::LOCALHOST, port)), readiness)
    }

    async fn request(address: SocketAddr, method: &str, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream
            .write_all(format!("{method} {path} HTTP/1.1\r\nhost: a\r\n\r\n").as_bytes())
            .await
            .unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        (head[9..12].parse().unwrap(), body.to_owned())
    }

    #[tokio::test]
    async fn reports_unmet_conditions_and_draining() {
        let (address, readiness) = start().await;
        let (listeners, discovery) = (
            readiness.condition("listeners", "not yet"),
            readiness.condition("discovery", "no answer"),
        );
        assert_eq!(
            request(address, "GET", "/ready").await,
            (503, "listeners: not yet\ndiscovery: no answer\n".to_owned())
        );
        listeners.set();
        assert_eq!(
            request(address, "GET", "/ready").await,
            (503, "discovery: no answer\n".to_owned())
        );
        discovery.set();
        assert_eq!(
            request(address, "GET", "/ready").await,
            (200, "ready\n".to_owned())
        );
        listeners.unset("gone");
        assert_eq!(
            request(address, "GET", "/ready").await,
            (503, "listeners: gone\n".to_owned())
        );
        listeners.set();
        readiness.drain();
        assert_eq!(request(address, "GET", "/ready").await.0, 503);
        assert_eq!(
            request(address, "GET", "/live").await,
            (200, "live\n".to_owned())
        );
    }

    #[tokio::test]
    async fn serves_metrics_and_rejects_unknown_paths_and_methods() {
        let (address, _) = start().await;
        let (status, page) = request(address, "GET", "/metrics").await;
        assert!(
            status == 200
                && page.contains("\ndiy_mesh_proxy_connections_open{direction=\"inbound\"} 0\n"),
            "{page}"
        );
        let (status, text) = request(address, "GET", "/").await;
        assert!(status == 404 && text.contains("/metrics"), "{text}");
        assert_eq!(request(address, "POST", "/live").await.0, 405);
        assert_eq!(
            request(address, "HEAD", "/live").await,
            (200, String::new())
        );
    }

    #[tokio::test]
    async fn serves_requests_beside_silent_connections() {
        let (address, _) = start().await;
        let mut silent = Vec::new();
        for _ in 0..MAX_CONNECTIONS / 2 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        assert_eq!(request(address, "GET", "/live").await.0, 200);
    }

    #[tokio::test]
    async fn reports_port_in_use() {
        let taken = bind(0).unwrap();
        let port = taken[0].local_addr().unwrap().port();
        let error = bind(port).unwrap_err();
        assert!(
            error
                .to_string()
                .contains(&format!("port {port} (--admin-port)")),
            "{error}"
        );
    }
}
