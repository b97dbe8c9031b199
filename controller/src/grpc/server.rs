//! The HTTP/2 server: a task for each connection, and the limits of its client.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use diy_mesh_control_plane::tls::TlsServer;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::body::Body;
use tonic::service::Routes;
use tower::ServiceExt as _;

use super::Call;
use crate::quota::Unsent;
use crate::serving::Peer;

/// The largest header block: a token and little else.
const MAX_HEADER_LIST_BYTES: u32 = 32 * 1024;
/// A proxy has two or three open streams.
const MAX_CONCURRENT_STREAMS: u32 = 16;
/// Bytes that a client may send before they are read, on a connection and on a stream. `h2` ends a
/// connection on which small DATA frames wait whose number the first one bounds: 2,000 of them.
const CONNECTION_WINDOW: u32 = 1024 * 1024;
const STREAM_WINDOW: u32 = 64 * 1024;
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves connections until `stopping`, then until all have ended.
pub(super) async fn serve(mut server: TlsServer, routes: Routes, stopping: CancellationToken) {
    let connections = TaskTracker::new();
    loop {
        tokio::select! {
            (stream, client) = server.accept() => {
                let peer = Peer::new(stream.get_ref().0, client);
                let (routes, stopping) = (routes.clone(), stopping.clone());
                connections.spawn(run(stream, peer, routes, stopping));
            }
            () = stopping.cancelled() => break,
        }
    }
    connections.close();
    connections.wait().await;
}

/// The task of a connection.
async fn run(
    stream: TlsStream<TcpStream>,
    peer: Peer,
    routes: Routes,
    stopping: CancellationToken,
) {
    let serving = pin!(serve_connection(stream, peer.clone(), routes, stopping));
    if peer.run(serving).await.is_none() {
        tracing::debug!(peer = ?peer.address, "another connection has taken its slot");
    }
}

/// Serves one connection until it ends, or its client has expired.
async fn serve_connection(
    stream: TlsStream<TcpStream>,
    peer: Peer,
    routes: Routes,
    stopping: CancellationToken,
) {
    let expiring = peer.clone();
    let service = service_fn(move |request| call(routes.clone(), peer.clone(), request));
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .max_header_list_size(MAX_HEADER_LIST_BYTES)
        .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .initial_stream_window_size(STREAM_WINDOW)
        .serve_connection(TokioIo::new(stream), service);
    let (mut connection, mut expired) = (pin!(connection), pin!(expiring.expired()));
    let mut is_stopping = false;
    loop {
        tokio::select! {
            biased;
            result = &mut connection => {
                if let Err(error) = result {
                    tracing::debug!(peer = ?expiring.address, "connection failed: {error}");
                }
                return;
            }
            () = &mut expired => {
                return tracing::debug!(peer = ?expiring.address, "connection expired");
            }
            () = stopping.cancelled(), if !is_stopping => {
                is_stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// Counts and serves a call of a connection.
async fn call(
    routes: Routes,
    peer: Peer,
    request: hyper::Request<Incoming>,
) -> Result<hyper::Response<Body>, Infallible> {
    let mut request = request.map(Body::new);
    let open = peer.call();
    let call = Arc::new(Call {
        peer,
        counted: OnceLock::new(),
        unsent: Unsent::default(),
    });
    request.extensions_mut().insert(call.clone());
    let response = routes.oneshot(request).await?;
    Ok(response.map(|body| {
        Body::new(body.map_frame(move |frame| {
            let _until_the_end = &open;
            frame.map_data(|bytes| call.unsent.attach(bytes))
        }))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<A, B, C, D, F>(_: impl FnOnce(A, B, C, D) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn task_of_a_connection_holds_the_connection_once() {
        let connection = size_of_future(serve_connection);
        let task = size_of_future(run);
        assert!(
            task < connection + 2048,
            "{task} bytes, {connection} of them served"
        );
        assert!(task <= MAX_TASK_BYTES, "{task} bytes");
    }

    /// Each subscriber has one such task.
    const MAX_TASK_BYTES: usize = 6 * 1024;
}
