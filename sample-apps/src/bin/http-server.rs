//! http-server: answers `/hello` with its hostname and version, prints each request, and fails a
//! configured share of requests. `POST /delay` changes the delay of its responses.
//!
//! Serves HTTP/1.1, and HTTP/2 with prior knowledge.

use std::convert::Infallible;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use diy_mesh_sample_apps::config::{MAX_DELAY_MS, ServerConfig};
use diy_mesh_sample_apps::{dump, listen, process};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

const NAME: &str = "http-server";
const ABOUT: &str = "Answers /hello and prints each request";
/// Limit of a request body, which is buffered for printing.
const MAX_BODY_BYTES: usize = 1024 * 1024;
/// Limit for receiving a request body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// Limit for requests in flight during shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let config = ServerConfig::read(NAME, ABOUT);
    process::run(NAME, |stop| serve(config, stop))
}

async fn serve(config: ServerConfig, stop: CancellationToken) -> anyhow::Result<()> {
    let listener = listen::dual_stack(config.listen_port).await?;
    eprintln!(
        "http-server {} listens on {}",
        config.version,
        listener.local_addr()?
    );

    let mut http = auto::Builder::new(TokioExecutor::new()).title_case_headers(true);
    http.http1().timer(TokioTimer::new()).half_close(true);
    http.http2().timer(TokioTimer::new());
    let server = Arc::new(Server {
        delay_ms: AtomicU64::new(config.delay_ms),
        config,
        requests: AtomicU64::new(0),
    });
    let connections = TaskTracker::new();
    let mut incoming = listen::incoming(listener, stop.clone());
    while let Some(connection) = incoming.next().await {
        connections.spawn(serve_connection(
            http.clone(),
            server.clone(),
            connection?,
            stop.clone(),
        ));
    }
    connections.close();
    if timeout(DRAIN_TIMEOUT, connections.wait()).await.is_err() {
        eprintln!(
            "http-server: exits with requests in flight after {} s",
            DRAIN_TIMEOUT.as_secs()
        );
    }
    Ok(())
}

/// Serves one connection until it closes; after `stop`, until its requests in flight are complete.
async fn serve_connection(
    http: auto::Builder<TokioExecutor>,
    server: Arc<Server>,
    connection: TcpStream,
    stop: CancellationToken,
) {
    let service = service_fn(move |request| respond(server.clone(), request));
    let mut connection = pin!(http.serve_connection(TokioIo::new(connection), service));
    let served = tokio::select! {
        result = connection.as_mut() => result,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    // A connection error concerns the client; its requests are printed already.
    served.ok();
}

struct Server {
    config: ServerConfig,
    delay_ms: AtomicU64,
    requests: AtomicU64,
}

async fn respond(
    server: Arc<Server>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let path = request.uri().path();
    let is_delay = path == "/delay" && request.method() == Method::POST;
    if path != "/hello" && !is_delay {
        return Ok(text(
            StatusCode::NOT_FOUND,
            "Not found: this server answers /hello\n",
        ));
    }
    let (parts, body) = request.into_parts();
    let body = match timeout(BODY_TIMEOUT, Limited::new(body, MAX_BODY_BYTES).collect()).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            return Ok(text(
                StatusCode::PAYLOAD_TOO_LARGE,
                "The body is longer than 1 MiB\n",
            ));
        }
        Ok(Err(_)) => return Ok(text(StatusCode::BAD_REQUEST, "The body is broken\n")),
        Err(_) => {
            return Ok(text(
                StatusCode::REQUEST_TIMEOUT,
                "The body took too long\n",
            ));
        }
    };
    if is_delay {
        return Ok(server.set_delay(&body));
    }

    let fails = fastrand::u8(0..100) < server.config.fail_rate;
    let number = server.requests.fetch_add(1, Ordering::Relaxed) + 1;
    let outcome = if fails {
        "Failed to process request\n"
    } else {
        ""
    };
    // A closed standard output does not stop the server.
    process::print(&format!(
        "Request #{number}\n{}---\n{outcome}",
        dump::request(&parts, &body)
    ))
    .ok();
    tokio::time::sleep(Duration::from_millis(
        server.delay_ms.load(Ordering::Relaxed),
    ))
    .await;

    let ServerConfig {
        hostname, version, ..
    } = &server.config;
    Ok(if fails {
        text(StatusCode::INTERNAL_SERVER_ERROR, "Internal server error\n")
    } else {
        text(
            StatusCode::OK,
            format!("Hello from the http-server service! Hostname: {hostname} Version: {version}"),
        )
    })
}

impl Server {
    /// Changes the delay of later responses to the milliseconds in a body.
    fn set_delay(&self, body: &[u8]) -> Response<Full<Bytes>> {
        let value = String::from_utf8_lossy(body);
        match value.trim().parse() {
            Ok(delay_ms) if delay_ms <= MAX_DELAY_MS => {
                self.delay_ms.store(delay_ms, Ordering::Relaxed);
                process::print(&format!("Delay: {delay_ms} ms\n")).ok();
                text(StatusCode::OK, format!("Delay: {delay_ms} ms\n"))
            }
            _ => text(
                StatusCode::BAD_REQUEST,
                format!("Expected 0 to {MAX_DELAY_MS} milliseconds\n"),
            ),
        }
    }
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    response
}
