//! The admin server: plain HTTP/1.1 with `/live`, `/ready`, `/metrics` and further routes of a
//! component. Changes nothing.
//!
//! Each connection carries one request, which must arrive within [`REQUEST_TIMEOUT`]. Addresses
//! share the connections (`admission.rs`): clients that hold connections cannot block probes.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::ready;
use std::io;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{ACCEPT, ALLOW, CONTENT_TYPE, HOST};
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use crate::admission::{Admission, Class, Slot, network};
use crate::listen::Acceptor;
use crate::{Readiness, metrics};

/// Time from the connection to the complete request head.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// Time from the response of a handler to its delivery.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum number of open connections.
const MAX_CONNECTIONS: usize = 256;
const MAX_REQUEST_BYTES: usize = 16 * 1024;
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// A process is not live if its tasks have not run for this time. No load takes that long.
const MAX_STALL: Duration = Duration::from_secs(60);
const TEXT: &str = "text/plain; charset=utf-8";

/// The routes of an admin server.
pub struct Admin {
    routes: BTreeMap<Cow<'static, str>, Handler>,
}

type Handler = Box<dyn Fn(&Asked<'_>) -> PendingPage + Send + Sync>;
/// `None` closes the connection without a response.
type PendingPage = Pin<Box<dyn Future<Output = Option<Page>> + Send>>;

/// The parts of a request that a handler gets.
struct Asked<'a> {
    peer: IpAddr,
    query: &'a str,
    headers: &'a HeaderMap,
}

const LOCAL_ONLY: &str = "only connections from the pod itself get this page: use kubectl port-forward, or the commands of mesh\n";

/// The response of a route.
#[derive(Debug)]
pub struct Page(Response<Full<Bytes>>);

impl Page {
    /// A page of plain text.
    pub fn text(body: impl Into<Bytes>) -> Self {
        Self::failure(StatusCode::OK, body)
    }

    /// A page of plain text with another status than 200.
    pub fn failure(status: StatusCode, body: impl Into<Bytes>) -> Self {
        Self::new(status, TEXT, body)
    }

    /// A page in JSON.
    pub fn json(body: impl Into<Bytes>) -> Self {
        Self::new(StatusCode::OK, "application/json", body)
    }

    fn new(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Self {
        let mut response = Response::new(Full::new(body.into()));
        *response.status_mut() = status;
        let content_type = HeaderValue::from_static(content_type);
        response.headers_mut().insert(CONTENT_TYPE, content_type);
        Self(response)
    }
}

impl Admin {
    /// A server of `/live`, `/ready` (the conditions of `readiness`) and `/metrics` (the text of
    /// `metrics` in OpenMetrics, in the format that the client accepts).
    pub fn new(readiness: Readiness, metrics: impl Fn() -> String + Send + Sync + 'static) -> Self {
        let is_ready = move || match readiness.unmet() {
            unmet if unmet.is_empty() => Page::text("ready\n"),
            unmet => Page::failure(StatusCode::SERVICE_UNAVAILABLE, unmet),
        };
        let metrics: Handler = Box::new(move |asked| {
            let accept = asked
                .headers
                .get(ACCEPT)
                .and_then(|value| value.to_str().ok());
            let (kind, text) = metrics::negotiate(accept.unwrap_or_default(), metrics());
            Box::pin(ready(Some(Page::new(StatusCode::OK, kind, text))))
        });
        let routes = BTreeMap::from([("/metrics".into(), metrics)]);
        Self { routes }
            .route("/live", || ready(Page::text("live\n")))
            .route("/ready", move || ready(is_ready()))
    }

    /// Adds or replaces a route for GET requests. The handler must not block, and limits the time
    /// of its page. `None` closes the connection without a response. The future is dropped if the
    /// client leaves.
    pub fn route<F>(
        mut self,
        path: impl Into<Cow<'static, str>>,
        handler: impl Fn() -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output: Into<Option<Page>>> + Send + 'static,
    {
        let handler: Handler = Box::new(move |_| {
            let page = handler();
            Box::pin(async { page.await.into() })
        });
        self.routes.insert(path.into(), handler);
        self
    }

    /// Adds a route for GET requests that come from the pod itself, or from a user by `kubectl
    /// port-forward`, but not from websites in the browser of the user. The handler gets the query of
    /// the URL, and is otherwise as the handler of a [`route`](Self::route).
    pub fn local_route<F>(
        mut self,
        path: impl Into<Cow<'static, str>>,
        handler: impl Fn(&str) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Page> + Send + 'static,
    {
        let handler: Handler = Box::new(move |asked| {
            if !asked.peer.to_canonical().is_loopback() || names_website(asked.headers) {
                let page = Page::failure(StatusCode::FORBIDDEN, LOCAL_ONLY);
                return Box::pin(ready(Some(page)));
            }
            let page = handler(asked.query);
            Box::pin(async { Some(page.await) })
        });
        self.routes.insert(path.into(), handler);
        self
    }

    /// Serves forever on a thread of its own, so that the load of other tasks does not delay
    /// probes. `/live` fails if the tasks of the caller's runtime do not run. Dropping the future
    /// ends the server.
    pub async fn serve_on_thread(self, listener: TcpListener) -> io::Result<Infallible> {
        let listener = listener.into_std()?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (heartbeat, mut heartbeats) = watch::channel(Instant::now());
        let alive = heartbeats.clone();
        let admin = self.route("/live", move || ready(live(alive.borrow().elapsed())));
        let server = async move {
            let listener = TcpListener::from_std(listener)?;
            tokio::select! {
                () = admin.serve(listener) => {}
                // Fails when the sender is dropped.
                _ = heartbeats.wait_for(|_| false) => {}
            }
            io::Result::Ok(())
        };
        std::thread::Builder::new()
            .name("admin".to_owned())
            .spawn(move || runtime.block_on(server))?;
        loop {
            tokio::time::sleep(HEARTBEAT_INTERVAL).await;
            if heartbeat.send(Instant::now()).is_err() {
                return Err(io::Error::other("the admin server has failed"));
            }
        }
    }

    /// Serves forever. Dropping the future closes all connections.
    pub async fn serve(self, listener: TcpListener) {
        let admin = Arc::new(self);
        let mut acceptor = Acceptor::new(listener);
        let admission = Admission::new(MAX_CONNECTIONS);
        let mut connections = JoinSet::new();
        loop {
            let (stream, peer) = acceptor.accept().await;
            while connections.try_join_next().is_some() {}
            let Some(slot) = admission.admit(&[network(peer.ip())]) else {
                tracing::debug!(%peer, "admin connection closed: {MAX_CONNECTIONS} others are open");
                continue;
            };
            let admin = admin.clone();
            connections.spawn(async move {
                slot.run(pin!(admin.serve_connection(stream, peer.ip(), &slot)))
                    .await;
            });
        }
    }

    async fn serve_connection(&self, stream: TcpStream, peer: IpAddr, slot: &Slot<IpAddr>) {
        let responded = Notify::new();
        let service = service_fn(async |request: Request<Incoming>| {
            slot.set(Class::InUse);
            let page = self.respond(&request, peer).await;
            responded.notify_one();
            page.map(|Page(response)| response)
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(REQUEST_TIMEOUT)
            .keep_alive(false)
            .max_buf_size(MAX_REQUEST_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        let undelivered = async {
            responded.notified().await;
            tokio::time::sleep(RESPONSE_TIMEOUT).await;
        };
        tokio::select! {
            result = connection => if let Err(error) = result {
                tracing::debug!("admin connection failed: {error}");
            },
            () = undelivered => tracing::debug!("admin response not read in {RESPONSE_TIMEOUT:?}"),
        }
    }

    /// An error closes the connection without a response.
    async fn respond<B>(&self, request: &Request<B>, peer: IpAddr) -> Result<Page, &'static str> {
        if ![Method::GET, Method::HEAD].contains(request.method()) {
            let text = "only GET and HEAD are allowed\n";
            let mut page = Page::failure(StatusCode::METHOD_NOT_ALLOWED, text);
            let allowed = HeaderValue::from_static("GET, HEAD");
            page.0.headers_mut().insert(ALLOW, allowed);
            return Ok(page);
        }
        let path = request.uri().path();
        match self.routes.get(path) {
            Some(handler) => {
                let query = request.uri().query().unwrap_or_default();
                let headers = request.headers();
                let page = handler(&Asked {
                    peer,
                    query,
                    headers,
                });
                page.await.ok_or("the handler gives no response")
            }
            None => {
                let paths: Vec<&str> = self.routes.keys().map(|path| &**path).collect();
                let text = format!("{path} not found; paths: {}\n", paths.join(", "));
                Ok(Page::failure(StatusCode::NOT_FOUND, text))
            }
        }
    }
}

/// Whether the host is the name of a website, which may point it to loopback (DNS rebinding).
fn names_website(headers: &HeaderMap) -> bool {
    let authority = |host: &HeaderValue| host.to_str().ok()?.parse::<Authority>().ok();
    headers.get_all(HOST).iter().any(|host| {
        authority(host).is_none_or(|authority| {
            let host = authority.host();
            let address = host.trim_start_matches('[').trim_end_matches(']');
            host.contains('.') && address.parse::<IpAddr>().is_err()
        })
    })
}

fn live(stalled: Duration) -> Page {
    if stalled < MAX_STALL {
        return Page::text("live\n");
    }
    let text = format!("no task has run for {} s\n", stalled.as_secs());
    Page::failure(StatusCode::SERVICE_UNAVAILABLE, text)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::SocketAddr;

    use diy_mesh_testkit::http::send;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::listen::bind;
    use diy_mesh_testkit::wait::until;

    async fn start() -> (SocketAddr, Readiness) {
        let readiness = Readiness::default();
        let admin = Admin::new(readiness.clone(), || "# EOF\n".to_owned())
            .route("/other", || ready(Page::text("{}")))
            .route("/none", || ready(None));
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(admin.serve(listener));
        (address, readiness)
    }

    async fn request(stream: &mut TcpStream, method: &str, path: &str) {
        let request = format!("{method} {path} HTTP/1.1\r\nhost: a\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
    }

    async fn read(mut stream: TcpStream) -> String {
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response
    }

    #[tokio::test]
    async fn local_routes_are_for_local_clients() {
        let admin = Admin::new(Readiness::default(), String::new)
            .local_route("/local", |query| ready(Page::text(query.to_owned())));
        for (peer, status) in [
            ("127.0.0.1", 200),
            ("::1", 200),
            ("::ffff:127.0.0.1", 200),
            ("10.244.1.7", 403),
            ("::ffff:10.244.1.7", 403),
            ("fd00::7", 403),
        ] {
            let peer: IpAddr = peer.parse().unwrap();
            let request = Request::get("/local?a=b").body(()).unwrap();
            let Page(response) = admin.respond(&request, peer).await.unwrap();
            assert_eq!(response.status(), status, "{peer}");
        }
        for (host, status) in [
            ("localhost:4001", 200),
            ("127.0.0.1:4001", 200),
            ("[::1]:4001", 200),
            ("proxy", 200),
            ("website.example:4001", 403),
            ("127.0.0.1.website.example", 403),
            ("localhost.", 403),
            ("", 403),
        ] {
            let request = Request::get("/local").header(HOST, host);
            let request = request.body(()).unwrap();
            let Page(response) = admin
                .respond(&request, [127, 0, 0, 1].into())
                .await
                .unwrap();
            assert_eq!(response.status(), status, "{host}");
        }
    }

    #[tokio::test]
    async fn serves_liveness_and_readiness() {
        let (address, readiness) = start().await;
        let condition = readiness.condition("listeners", "not bound");
        let (status, _, body) = send(address, "GET", "/ready", "").await;
        assert_eq!((status, body.as_str()), (503, "listeners: not bound\n"));
        condition.send_replace(None);
        let (status, _, body) = send(address, "GET", "/ready", "").await;
        assert_eq!((status, body.as_str()), (200, "ready\n"));
        readiness.drain();
        assert_eq!(send(address, "GET", "/ready", "").await.0, 503);
        let (status, _, body) = send(address, "GET", "/live", "").await;
        assert_eq!((status, body.as_str()), (200, "live\n"));
    }

    /// The only thread of this runtime waits for the response.
    #[tokio::test]
    async fn is_live_while_the_tasks_of_the_process_are_delayed() {
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let admin = Admin::new(Readiness::default(), String::new);
        let served = tokio::spawn(admin.serve_on_thread(listener));
        tokio::task::yield_now().await;
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let request = b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n";
        stream.write_all(request).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        assert!(response.ends_with("live\n"), "{response}");
        served.abort();
        assert!(served.await.unwrap_err().is_cancelled());
        // The port is free again.
        while bind(address).await.is_err() {
            tokio::task::yield_now().await;
        }
    }

    #[test]
    fn is_not_live_if_no_task_has_run_for_long() {
        assert_eq!(live(MAX_STALL / 2).0.status(), StatusCode::OK);
        assert_eq!(live(MAX_STALL).0.status(), StatusCode::SERVICE_UNAVAILABLE);
    }

    #[tokio::test]
    async fn serves_metrics_and_further_routes_and_names_them() {
        let (address, _) = start().await;
        let (status, head, body) = send(address, "GET", "/metrics", "").await;
        assert_eq!((status, body.as_str()), (200, ""));
        assert!(head.contains("text/plain; version=0.0.4;"), "{head}");
        let accept = "accept: application/openmetrics-text\r\n";
        let (_, head, body) = send(address, "GET", "/metrics", accept).await;
        assert_eq!(body, "# EOF\n");
        assert!(
            head.contains("application/openmetrics-text; version=1.0.0;"),
            "{head}"
        );
        let (status, head, body) = send(address, "GET", "/other", "").await;
        assert_eq!((status, body.as_str()), (200, "{}"));
        assert!(head.contains("text/plain"), "{head}");
        let (status, _, body) = send(address, "GET", "/", "").await;
        assert!(status == 404 && body.contains("/other"), "{body}");
        let (status, head, _) = send(address, "POST", "/live", "").await;
        assert!(status == 405 && head.contains("allow: GET, HEAD"), "{head}");
        let (status, _, body) = send(address, "HEAD", "/live", "").await;
        assert_eq!((status, body.as_str()), (200, ""));
    }

    #[tokio::test]
    async fn answers_probes_while_other_clients_hold_all_connections() {
        let (address, _) = start().await;
        // The time stands still, so that no connection ends by its timeout: tokio does not advance
        // paused time on its own while a blocking task runs.
        let (_hold, held) = std::sync::mpsc::channel::<()>();
        tokio::time::pause();
        tokio::task::spawn_blocking(move || held.recv_timeout(Duration::from_secs(60)));
        let start = tokio::time::Instant::now();
        let mut silent = Vec::new();
        for _ in 0..2 * MAX_CONNECTIONS {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        assert_eq!(send(address, "GET", "/live", "").await.0, 200);
        assert!(start.elapsed().is_zero(), "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn closes_connections_without_a_complete_request_in_time() {
        let (address, _) = start().await;
        for sent in ["", "GET /live HTTP/1.1\r\n"] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(sent.as_bytes()).await.unwrap();
            let start = tokio::time::Instant::now();
            let _ = stream.read_to_end(&mut Vec::new()).await;
            let elapsed = start.elapsed();
            assert!(
                elapsed > REQUEST_TIMEOUT / 2 && elapsed < REQUEST_TIMEOUT * 5,
                "{sent:?}: {elapsed:?}"
            );
        }
    }

    #[tokio::test]
    async fn closes_connection_if_a_handler_gives_no_response() {
        let (address, _) = start().await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        request(&mut stream, "GET", "/none").await;
        assert_eq!(read(stream).await, "");
    }

    /// A request that waits for its page is answered, whatever connections follow: silent ones from
    /// the same address, or requests for the same page from another one.
    #[tokio::test]
    async fn other_clients_do_not_displace_a_pending_request() {
        for (source, path) in [("127.0.0.1", None), ("127.0.0.2", Some("/slow"))] {
            let (release, gate) = tokio::sync::watch::channel(false);
            let slow = move || {
                let mut gate = gate.clone();
                async move {
                    gate.wait_for(|open| *open).await.unwrap();
                    Some(Page::text("done"))
                }
            };
            let admin = Admin::new(Readiness::default(), String::new).route("/slow", slow);
            let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
            let address = listener.local_addr().unwrap();
            tokio::spawn(admin.serve(listener));

            let mut pending = TcpStream::connect(address).await.unwrap();
            request(&mut pending, "GET", "/slow").await;
            until(|| release.receiver_count() >= 2).await;
            let mut others = Vec::new();
            for _ in 0..MAX_CONNECTIONS + 16 {
                let socket = tokio::net::TcpSocket::new_v4().unwrap();
                socket.bind(format!("{source}:0").parse().unwrap()).unwrap();
                let mut stream = socket.connect(address).await.unwrap();
                if let Some(path) = path {
                    request(&mut stream, "GET", path).await;
                }
                others.push(stream);
            }
            // The last connection is served, so all others have been accepted.
            assert_eq!(send(address, "GET", "/live", "").await.0, 200);
            release.send(true).unwrap();
            let response = read(pending).await;
            assert!(response.ends_with("done"), "{source}: {response}");
        }
    }
}
