//! One worker thread: its listeners, and what its connections share. Workers share nothing but the
//! configuration, the metrics and the dump queue.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use diy_mesh_proto::Identity;
use tokio::net::TcpStream;
use tokio::sync::{Notify, oneshot};
use tokio::task::{LocalSet, spawn_local};
use tokio_util::sync::CancellationToken;

use crate::accept::accept;
use crate::config::Config;
use crate::destination::Destinations;
use crate::discovery::Discovery;
use crate::dump::{Direction, Dumps};
use crate::error::Failure;
use crate::identity::CurrentCredentials;
use crate::io::Io;
use crate::lifetime::{Expiry, Lifetimes};
use crate::metrics::Metrics;
use crate::shares::{Share, Shares};
use crate::tls::Tls;

/// How often idle destinations and connections are evicted.
const EVICTION_INTERVAL: Duration = Duration::from_secs(5);

/// The maximum number of inbound connections that have neither authenticated nor sent a request:
/// each may hold the state of a TLS handshake.
const MAX_PENDING: usize = 8192;

/// At most one warning about a peer is logged in this time; the metrics count them all.
const PEER_WARNING_INTERVAL: Duration = Duration::from_secs(10);

/// The inputs of a worker.
pub struct WorkerContext {
    /// The configuration of the proxy.
    pub config: Arc<Config>,
    /// The dump queue.
    pub dumps: Dumps,
    /// The metrics of the proxy.
    pub metrics: Arc<Metrics>,
    /// The source of destinations.
    pub discovery: Discovery,
    /// The certificate and the trust roots.
    pub credentials: CurrentCredentials,
    /// The maximum number of open connections.
    pub limit: usize,
    /// Cancelled when the proxy shuts down.
    pub drain: CancellationToken,
}

/// The listening sockets of a worker.
pub struct Listeners {
    /// For connections to the application.
    pub inbound: Vec<TcpListener>,
    /// For connections of the application.
    pub outbound: Vec<TcpListener>,
}

/// A function that handles an accepted connection until it ends.
pub trait Carry<F>: Fn(Rc<Worker>, Direction, TcpStream, SocketAddr) -> F + Copy + 'static {}
impl<F, C: Fn(Rc<Worker>, Direction, TcpStream, SocketAddr) -> F + Copy + 'static> Carry<F> for C {}

/// Starts a worker on a thread of its own. The receiver completes when the worker has drained.
pub fn spawn<F: Future<Output = ()> + 'static>(
    number: usize,
    context: WorkerContext,
    listeners: Listeners,
    carry: impl Carry<F> + Send,
) -> io::Result<oneshot::Receiver<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (done, drained) = oneshot::channel();
    std::thread::Builder::new()
        .name(format!("worker-{number}"))
        .spawn(move || {
            LocalSet::new().block_on(&runtime, Worker::new(context).run(listeners, carry));
            // Fails if the drain timeout has passed and the receiver was dropped.
            let _ = done.send(());
        })?;
    Ok(drained)
}

/// What the connections of one worker thread share.
pub struct Worker {
    /// The configuration of the proxy.
    pub config: Arc<Config>,
    /// The dump queue.
    pub dumps: Dumps,
    /// The metrics of the proxy.
    pub metrics: Arc<Metrics>,
    /// The TLS configurations and session tickets.
    pub tls: Tls,
    /// The destinations of the outbound path: endpoints with their loads and pools.
    pub destinations: Destinations,
    /// The addresses of the application, which the inbound path connects to.
    pub apps: Destinations,
    /// The random numbers of the balancers.
    pub rng: RefCell<fastrand::Rng>,
    /// Cancelled when the proxy shuts down: connections end after their current exchange.
    pub drain: CancellationToken,
    /// The open connections, by direction: neither keeps the other one out.
    open: Rc<Shares<Direction>>,
    /// Inbound connections whose caller is not authenticated and whose protocol is unknown, by
    /// address.
    pub pending: Rc<Shares<IpAddr>>,
    /// The other inbound connections, by the caller's identity. Never by address: a gateway or a
    /// node that translates addresses is one address of many callers.
    pub callers: Rc<Shares<Option<Rc<Identity>>>>,
    /// When a peer was last warned about.
    warned_at: Cell<Option<Instant>>,
    /// Notified when the last connection closes.
    idle: Notify,
}

impl Worker {
    /// A worker without connections.
    pub fn new(context: WorkerContext) -> Rc<Self> {
        let mut rng = fastrand::Rng::new();
        let lifetimes = Lifetimes::new(context.config.max_connection_age, rng.fork());
        // A quarter of the connections is for the other direction. Of the inbound ones, a quarter
        // may be pending, and half may be of one caller.
        let max_inbound = context.limit - context.limit / 4;
        let max_pending = (max_inbound / 4).clamp(1, MAX_PENDING);
        let tls = Tls::new(
            context.credentials,
            lifetimes,
            context.config.timeouts,
            context.metrics.clone(),
        );
        Rc::new(Self {
            config: context.config,
            dumps: context.dumps,
            metrics: context.metrics,
            tls,
            destinations: Destinations::new(context.discovery),
            apps: Destinations::new(Discovery::off()),
            rng: RefCell::new(rng),
            drain: context.drain,
            open: Shares::new(context.limit, max_inbound),
            callers: Shares::new(max_inbound, max_inbound / 2),
            pending: Shares::new(max_pending, max_pending / 2),
            warned_at: Cell::new(None),
            idle: Notify::new(),
        })
    }

    async fn run<F>(self: Rc<Self>, listeners: Listeners, carry: impl Carry<F>)
    where
        F: Future<Output = ()> + 'static,
    {
        for (direction, listeners) in [
            (Direction::Inbound, listeners.inbound),
            (Direction::Outbound, listeners.outbound),
        ] {
            for listener in listeners {
                let worker = self.clone();
                spawn_local(accept(listener, move |stream, peer| {
                    worker.take(direction, stream, peer, carry);
                }));
            }
        }
        let mut eviction = tokio::time::interval(EVICTION_INTERVAL);
        loop {
            tokio::select! {
                _ = eviction.tick() => {
                    self.destinations.evict_idle(Instant::now());
                    self.apps.evict_idle(Instant::now());
                }
                () = self.drain.cancelled() => break,
            }
        }
        // Late connections are still served: the listeners stay until no connection is open.
        while self.open.in_use() > 0 {
            self.idle.notified().await;
        }
    }

    /// Spawns the task of an accepted connection. Resets the connection if the limit is reached.
    pub(crate) fn take<F: Future<Output = ()> + 'static>(
        self: &Rc<Self>,
        direction: Direction,
        stream: TcpStream,
        peer: SocketAddr,
        carry: impl Carry<F>,
    ) {
        let Some(slot) = self.open.acquire(direction) else {
            self.metrics
                .failure(direction, &Failure::Overloaded("too many connections"));
            return Io::new(stream).reset();
        };
        let counted = self.metrics.connection(direction);
        let open = Open {
            worker: self.clone(),
            slot: Some(slot),
            _counted: counted,
        };
        spawn_local(async move {
            carry(open.worker.clone(), direction, stream, peer).await;
            drop(open);
        });
    }

    /// Whether to log a warning about a peer. Limits the rate of these warnings.
    pub fn should_log(&self, now: Instant) -> bool {
        let due = self
            .warned_at
            .get()
            .is_none_or(|last| now.saturating_duration_since(last) >= PEER_WARNING_INTERVAL);
        if due {
            self.warned_at.set(Some(now));
        }
        due
    }

    /// The expiry of a connection in use, which counts the connection from the end of the peer's
    /// certificate on. Never done for plaintext.
    pub fn expiry(self: &Rc<Self>, io: &Io, direction: Direction) -> Expiry {
        let Some(&lifetime) = io.lifetime() else {
            return Expiry(None);
        };
        // A socket without a peer address is closed: the next read returns the error.
        let Ok(peer) = io.socket().peer_addr() else {
            return Expiry(None);
        };
        let (worker, path) = (self.clone(), direction.name());
        Expiry(Some(Box::pin(async move {
            let outlived = || {
                if worker.should_log(Instant::now()) {
                    tracing::warn!(path, %peer, "the peer's certificate has expired; its connection stays open");
                }
                worker.metrics.certificate_expired(direction)
            };
            lifetime.expire(outlived).await;
            tracing::debug!(path, %peer, "connection reset: it reached its maximum age");
        })))
    }

    /// The ports of the proxy, which no connection may lead back to.
    pub fn own_ports(&self) -> [u16; 2] {
        [self.config.inbound_port, self.config.outbound_port]
    }
}

/// One open connection, counted until it is dropped.
struct Open {
    worker: Rc<Worker>,
    slot: Option<Share<Direction>>,
    _counted: diy_mesh_runtime::metrics::Active,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.slot = None;
        if self.worker.open.in_use() == 0 {
            self.worker.idle.notify_one();
        }
    }
}

#[cfg(test)]
impl WorkerContext {
    /// The inputs of a worker in a test, with additional arguments and without discovery.
    pub fn for_a_test(arguments: &str) -> Self {
        use clap::Parser as _;
        let usual = "proxy --inbound-port 4000 --outbound-port 5000 --admin-port 4001 --controller http://c:8080 --token-file /token";
        let raw = crate::config::RawConfig::parse_from(format!("{usual}{arguments}").split(' '));
        Self {
            config: Arc::new(Config::from_raw(raw).unwrap()),
            dumps: Dumps::off(),
            metrics: Metrics::new(),
            discovery: Discovery::off(),
            credentials: crate::identity::none(),
            limit: 1000,
            drain: CancellationToken::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test]
    async fn resets_and_counts_connections_over_limit() {
        let context = WorkerContext {
            limit: 1,
            ..WorkerContext::for_a_test("")
        };
        let metrics = context.metrics.clone();
        let worker = Worker::new(context);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let _open = worker.open.acquire(Direction::Outbound);
        let flood = async {
            for _ in 0..100 {
                let (stream, peer) = listener.accept().await.unwrap();
                worker.take(Direction::Inbound, stream, peer, |_, _, _, _| {
                    std::future::ready(())
                });
            }
        };
        let clients = async {
            for _ in 0..100 {
                let mut client = TcpStream::connect(address).await.unwrap();
                let error = client.read(&mut [0]).await.expect_err("a reset");
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            }
        };
        tokio::join!(flood, clients);
        assert_eq!(worker.open.in_use(), 1, "the open connection is unaffected");
        let counted = metrics.render();
        assert!(
            counted.contains("failures_total{direction=\"inbound\",code=\"overloaded\"} 100"),
            "{counted}"
        );
    }
}
