//! Accepts connections and serves HTTP/1.1 and HTTP/2 on them, over TLS or not, until told to stop. Knows nothing of what is served.
//!
//! An error of one connection never ends another, and a failed accept never ends the loop nor makes it spin.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

/// A server holds this many connections at most; further ones wait in the kernel's queue.
const CONNECTIONS: usize = 512;
/// A client has this long for its handshake.
const PATIENCE: Duration = Duration::from_secs(5);
/// A client that speaks HTTP/1 has this long to begin its next request and to end its header.
const IDLE: Duration = Duration::from_secs(60);
/// After this a connection is asked to go, so that callers spread over replicas again and no idle one stays for good.
const CONNECTION_AGE: Duration = Duration::from_secs(5 * 60);
/// How long requests may take to end once the server stops.
const DRAIN: Duration = Duration::from_secs(10);

/// Binds an address. A machine without IPv6 cannot bind `[::]`, and means `0.0.0.0` by it.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Err(error)
            if error.kind() != io::ErrorKind::AddrInUse
                && address.is_ipv6()
                && address.ip().is_unspecified() =>
        {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port()))
                .await
                .map_err(|_| error)
        }
        bound => bound,
    }
}

/// Serves until `stop` turns true, then lets the requests at hand end.
pub async fn serve<H, F>(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    handler: H,
    mut stop: watch::Receiver<bool>,
) where
    H: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    let mut tasks = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = stopped(&mut stop) => break,
            Some(_) = tasks.join_next() => continue,
            accepted = accept(&listener, &connections) => accepted,
        };
        let (stream, permit) = accepted;
        let (tls, handler, stop) = (tls.clone(), handler.clone(), stop.clone());
        tasks.spawn(async move {
            if let Err(error) = connection(stream, tls, handler, stop).await {
                tracing::debug!(error, "connection ended");
            }
            drop(permit);
        });
    }
    drop(listener);
    let _ = timeout(DRAIN, async { while tasks.join_next().await.is_some() {} }).await;
}

async fn accept(
    listener: &TcpListener,
    connections: &Arc<Semaphore>,
) -> (TcpStream, tokio::sync::OwnedSemaphorePermit) {
    let permit = connections
        .clone()
        .acquire_owned()
        .await
        .expect("the semaphore is never closed");
    let mut pause = Duration::from_millis(5);
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return (stream, permit),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(1));
            }
        }
    }
}

type ConnectionError = Box<dyn std::error::Error + Send + Sync>;

async fn connection<H, F>(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    handler: H,
    stop: watch::Receiver<bool>,
) -> Result<(), ConnectionError>
where
    H: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    stream.set_nodelay(true)?;
    match tls {
        None => requests(stream, handler, stop).await,
        Some(tls) => requests(timeout(PATIENCE, tls.accept(stream)).await??, handler, stop).await,
    }
}

async fn requests<S, H, F>(
    stream: S,
    handler: H,
    mut stop: watch::Receiver<bool>,
) -> Result<(), ConnectionError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    H: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_buf_size(64 * 1024);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(250)
        .max_header_list_size(16 * 1024);
    builder
        .http2()
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(PATIENCE);
    let service = service_fn(move |request| {
        let answer = handler(request);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let mut serving = pin!(builder.serve_connection(TokioIo::new(stream), service));
    tokio::select! {
        done = serving.as_mut() => return done,
        () = stopped(&mut stop) => {}
        () = sleep(CONNECTION_AGE) => {}
    }
    serving.as_mut().graceful_shutdown();
    timeout(DRAIN, serving).await?
}

/// Returns once the flag is true, or nobody is left who could set it.
pub async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}
