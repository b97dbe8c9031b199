//! The admin server: plain HTTP/1.1 with `/live`, `/ready`, `/metrics` and further routes of a
//! component. Changes nothing.
//!
//! Each connection carries one request, which must arrive within [`REQUEST_TIMEOUT`]. At the limit
//! of connections, a new one replaces the oldest: clients that hold connections cannot block
//! probes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

use crate::listen::Acceptor;
use crate::{Readiness, metrics};

/// Time from the connection to the complete request head.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// Time from the connection to the complete response.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum number of open connections.
const MAX_CONNECTIONS: usize = 256;
const MAX_REQUEST_BYTES: usize = 16 * 1024;
const TEXT: &str = "text/plain; charset=utf-8";

/// The routes of an admin server.
pub struct Admin {
    routes: Vec<(&'static str, Handler)>,
}

type Handler = Box<dyn Fn() -> Page + Send + Sync>;

/// The response of a route.
#[derive(Debug)]
pub struct Page {
    status: StatusCode,
    content_type: &'static str,
    body: String,
}

impl Page {
    /// A page of plain text.
    pub fn text(body: impl Into<String>) -> Self {
        Self::new(StatusCode::OK, TEXT, body.into())
    }

    /// A page of JSON.
    pub fn json(body: impl Into<String>) -> Self {
        Self::new(StatusCode::OK, "application/json", body.into())
    }

    fn new(status: StatusCode, content_type: &'static str, body: String) -> Self {
        Self {
            status,
            content_type,
            body,
        }
    }
}

impl Admin {
    /// A server of `/live`, `/ready` (the conditions of `readiness`) and `/metrics` (the text of
    /// `metrics`).
    pub fn new(readiness: Readiness, metrics: impl Fn() -> String + Send + Sync + 'static) -> Self {
        let ready = move || match readiness.unmet() {
            unmet if unmet.is_empty() => Page::text("ready\n"),
            unmet => Page::new(StatusCode::SERVICE_UNAVAILABLE, TEXT, unmet),
        };
        Self { routes: Vec::new() }
            .route("/live", || Page::text("live\n"))
            .route("/ready", ready)
            .route("/metrics", move || {
                Page::new(StatusCode::OK, metrics::CONTENT_TYPE, metrics())
            })
    }

    /// Adds a route for GET requests. The handler must not block.
    pub fn route(
        mut self,
        path: &'static str,
        handler: impl Fn() -> Page + Send + Sync + 'static,
    ) -> Self {
        self.routes.push((path, Box::new(handler)));
        self
    }

    /// Serves forever. Dropping the future closes all connections.
    pub async fn serve(self, listener: TcpListener) {
        let admin = Arc::new(self);
        let mut acceptor = Acceptor::new(listener);
        let mut connections = JoinSet::new();
        let mut open: VecDeque<AbortHandle> = VecDeque::new();
        loop {
            let (stream, _) = acceptor.accept().await;
            while connections.try_join_next().is_some() {}
            open.retain(|connection| !connection.is_finished());
            if open.len() >= MAX_CONNECTIONS
                && let Some(oldest) = open.pop_front()
            {
                tracing::debug!("admin connection closed: {MAX_CONNECTIONS} newer ones are open");
                oldest.abort();
            }
            let admin = admin.clone();
            open.push_back(connections.spawn(async move { admin.serve_connection(stream).await }));
        }
    }

    async fn serve_connection(&self, stream: TcpStream) {
        let service = service_fn(async |request: Request<Incoming>| {
            Ok::<_, Infallible>(self.respond(request.method(), request.uri().path()))
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(REQUEST_TIMEOUT)
            .keep_alive(false)
            .max_buf_size(MAX_REQUEST_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        match tokio::time::timeout(CONNECTION_TIMEOUT, connection).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!("admin connection failed: {error}"),
            Err(_) => tracing::debug!("admin connection timed out after {CONNECTION_TIMEOUT:?}"),
        }
    }

    fn respond(&self, method: &Method, path: &str) -> Response<Full<Bytes>> {
        let is_allowed = [Method::GET, Method::HEAD].contains(method);
        let page = match self.routes.iter().find(|(route, _)| *route == path) {
            _ if !is_allowed => Page::new(
                StatusCode::METHOD_NOT_ALLOWED,
                TEXT,
                "only GET and HEAD are allowed\n".to_owned(),
            ),
            Some((_, handler)) => handler(),
            None => {
                let paths: Vec<&str> = self.routes.iter().map(|(path, _)| *path).collect();
                let text = format!("{path} not found; paths: {}\n", paths.join(", "));
                Page::new(StatusCode::NOT_FOUND, TEXT, text)
            }
        };
        let mut response = Response::new(Full::from(page.body));
        *response.status_mut() = page.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(page.content_type));
        if !is_allowed {
            headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        }
        response
    }
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paths = self.routes.iter().map(|(path, _)| path);
        f.debug_list().entries(paths).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::time::Instant;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::listen::bind;

    async fn start() -> (SocketAddr, Readiness) {
        let readiness = Readiness::default();
        let admin = Admin::new(readiness.clone(), || "# EOF\n".to_owned())
            .route("/identity", || Page::json("{}"));
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(admin.serve(listener));
        (address, readiness)
    }

    /// Returns the status, the head and the body.
    async fn send(address: SocketAddr, method: &str, path: &str) -> (u16, String, String) {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("{method} {path} HTTP/1.1\r\nhost: a\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        (head[9..12].parse().unwrap(), head.into(), body.into())
    }

    #[tokio::test]
    async fn serves_liveness_and_readiness() {
        let (address, readiness) = start().await;
        let condition = readiness.condition("listeners", "not bound");
        let (status, _, body) = send(address, "GET", "/ready").await;
        assert_eq!((status, body.as_str()), (503, "listeners: not bound\n"));
        condition.met();
        let (status, _, body) = send(address, "GET", "/ready").await;
        assert_eq!((status, body.as_str()), (200, "ready\n"));
        readiness.drain();
        assert_eq!(send(address, "GET", "/ready").await.0, 503);
        let (status, _, body) = send(address, "GET", "/live").await;
        assert_eq!((status, body.as_str()), (200, "live\n"));
    }

    #[tokio::test]
    async fn serves_metrics_and_further_routes_and_names_them() {
        let (address, _) = start().await;
        let (status, head, body) = send(address, "GET", "/metrics").await;
        assert_eq!((status, body.as_str()), (200, "# EOF\n"));
        assert!(head.contains(metrics::CONTENT_TYPE), "{head}");
        let (status, head, body) = send(address, "GET", "/identity").await;
        assert_eq!((status, body.as_str()), (200, "{}"));
        assert!(head.contains("application/json"), "{head}");
        let (status, _, body) = send(address, "GET", "/").await;
        assert!(status == 404 && body.contains("/identity"), "{body}");
        let (status, head, _) = send(address, "POST", "/live").await;
        assert!(status == 405 && head.contains("allow: GET, HEAD"), "{head}");
        let (status, _, body) = send(address, "HEAD", "/live").await;
        assert_eq!((status, body.as_str()), (200, ""));
    }

    #[tokio::test]
    async fn answers_probes_while_other_clients_hold_all_connections() {
        let (address, _) = start().await;
        let mut silent = Vec::new();
        for _ in 0..2 * MAX_CONNECTIONS {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let start = Instant::now();
        assert_eq!(send(address, "GET", "/live").await.0, 200);
        assert!(start.elapsed() < REQUEST_TIMEOUT, "{:?}", start.elapsed());
    }

    #[tokio::test]
    async fn closes_connections_without_a_complete_request_in_time() {
        let (address, _) = start().await;
        for sent in ["", "GET /live HTTP/1.1\r\n"] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(sent.as_bytes()).await.unwrap();
            let start = Instant::now();
            let _ = stream.read_to_end(&mut Vec::new()).await;
            let elapsed = start.elapsed();
            assert!(
                elapsed > REQUEST_TIMEOUT / 2 && elapsed < REQUEST_TIMEOUT * 5,
                "{sent:?}: {elapsed:?}"
            );
        }
    }
}
