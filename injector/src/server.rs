//! An HTTPS server: HTTP/1.1 and HTTP/2 over TLS, with limits and graceful shutdown. Independent of
//! the handler.
//!
//! The API server has no identity here: a connection keeps the slots of its address until it ends.

use std::convert::Infallible;
use std::future::Future;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use diy_mesh_control_plane::tls::{Connection, Limits, TlsServer, connections};
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Connections, with those that have sent nothing.
const MAX_CONNECTIONS: usize = 8192;
/// Connections that have sent a byte.
const MAX_HANDSHAKES: usize = 512;
/// Time without a request after which a connection ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time to the end of the next request head of an HTTP/1 connection.
const REQUEST_HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Age at which a connection is shut down gracefully, so that clients spread over the replicas.
const MAX_CONNECTION_AGE: Duration = Duration::from_secs(5 * 60);
/// Time for open requests to complete after shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves until `stop` is true, then waits for open requests to complete.
pub async fn serve<H, F>(
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    handler: H,
    mut stop: watch::Receiver<bool>,
) where
    H: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let limits = Limits {
        handshakes: MAX_HANDSHAKES,
        idle: IDLE_TIMEOUT,
    };
    let connections = connections(MAX_CONNECTIONS, usize::MAX);
    let mut server = TlsServer::new(listener, tls, connections, limits);
    let mut tasks = JoinSet::new();
    loop {
        let connection = tokio::select! {
            biased;
            () = stopped(&mut stop) => break,
            Some(_) = tasks.join_next() => continue,
            connection = server.accept() => connection,
        };
        let (handler, stop) = (handler.clone(), stop.clone());
        tasks.spawn(run(connection, handler, stop));
    }
    drop(server);
    let _ = timeout(DRAIN_TIMEOUT, async {
        while tasks.join_next().await.is_some() {}
    })
    .await;
}

/// The address of the client, as an extension of each request. Clients of unknown addresses count as
/// one.
#[derive(Clone, Copy, Debug)]
pub struct ClientAddress(pub IpAddr);

impl Default for ClientAddress {
    fn default() -> Self {
        Self(Ipv6Addr::UNSPECIFIED.into())
    }
}

/// The task of a connection.
async fn run<H, F>(connection: Connection, handler: H, stop: watch::Receiver<bool>)
where
    H: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let client = connection.1.clone();
    let requests = pin!(requests(connection, handler, stop));
    match client.run(requests).await {
        Some(Err(error)) => tracing::debug!(error, "connection failed"),
        Some(Ok(())) => {}
        None => tracing::debug!("another connection has taken its slot"),
    }
}

type ConnectionError = Box<dyn std::error::Error + Send + Sync>;

async fn requests<H, F>(
    (stream, client): Connection,
    handler: H,
    mut stop: watch::Receiver<bool>,
) -> Result<(), ConnectionError>
where
    H: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_HEAD_TIMEOUT)
        .max_buf_size(64 * 1024);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(250)
        .max_header_list_size(16 * 1024);
    builder
        .http2()
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT);
    let calling = client.clone();
    let address = stream.get_ref().0.peer_addr();
    let address = address.map_or_else(
        |_| ClientAddress::default(),
        |peer| ClientAddress(peer.ip()),
    );
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(address);
        calling.serve();
        let (response, call) = (handler(request), calling.call());
        async move {
            let _call = call;
            Ok::<_, Infallible>(response.await)
        }
    });
    let mut serving = pin!(builder.serve_connection(TokioIo::new(stream), service));
    tokio::select! {
        done = serving.as_mut() => return done,
        () = stopped(&mut stop) => {}
        () = sleep(MAX_CONNECTION_AGE) => {}
        () = client.expired() => {}
    }
    serving.as_mut().graceful_shutdown();
    timeout(DRAIN_TIMEOUT, serving).await?
}

/// Completes when the flag is true or its sender is gone.
pub async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<A, B, C, F>(_: impl FnOnce(A, B, C) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn task_of_a_connection_holds_the_connection_once() {
        type Respond = fn(Request<Incoming>) -> std::future::Ready<Response<Full<Bytes>>>;
        let connection = size_of_future(requests::<Respond, _>);
        let task = size_of_future(run::<Respond, _>);
        assert!(
            task < 2 * connection,
            "{task} bytes, {connection} for requests"
        );
    }
}
