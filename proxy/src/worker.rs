//! One worker thread: its listeners, what it has ([`Worker`]), and what one connection of it carries along ([`Flow`]).
//! Workers share nothing but the configuration, the counters and the dumps' queue.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use diy_mesh_proto::Identity;
use tokio::net::TcpStream;
use tokio::sync::{Notify, oneshot};
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;

use crate::balance::{Destination, Destinations};
use crate::config::Config;
use crate::detect::{Protocol, announced};
use crate::discovery::Discovery;
use crate::dump::{ConnectionInfo, Direction, Dumps, ExchangeDump};
use crate::error::Failure;
use crate::identity::CurrentCredentials;
use crate::io::Io;
use crate::lifetime::{Expiry, Lifetimes};
use crate::metrics::Metrics;
use crate::policy::{Admission, Caller, RequestView};
use crate::tls::Tls;
use crate::{accept, inbound, orig_dst, outbound};

/// How often what nobody uses is looked for.
const SWEEP: Duration = Duration::from_secs(5);

/// One line in the log about peers that prove nothing in this time; the metrics count them all.
const COMPLAIN_EVERY: Duration = Duration::from_secs(10);

/// What a worker is given.
pub struct Seat {
    /// How the proxy was started.
    pub config: Arc<Config>,
    /// Where exchanges are dumped to.
    pub dumps: Dumps,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// What destinations are.
    pub discovery: Discovery,
    /// By what this proxy proves itself, and whom it trusts.
    pub credentials: CurrentCredentials,
    /// Connections at most.
    pub limit: usize,
    /// Cancelled when the proxy is to end.
    pub drain: CancellationToken,
}

/// A worker's sockets.
pub struct Listeners {
    /// For connections to the app.
    pub inbound: Vec<TcpListener>,
    /// For connections of the app.
    pub outbound: Vec<TcpListener>,
}

/// Starts a worker on a thread of its own. The receiver is done when the worker has drained.
pub fn spawn(number: usize, seat: Seat, listeners: Listeners) -> io::Result<oneshot::Receiver<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (done, drained) = oneshot::channel();
    std::thread::Builder::new()
        .name(format!("worker-{number}"))
        .spawn(move || {
            LocalSet::new().block_on(&runtime, Worker::new(seat).run(listeners));
            // Nobody waits any longer where the time to drain was over.
            let _ = done.send(());
        })?;
    Ok(drained)
}

/// One worker thread's own.
pub struct Worker {
    /// How the proxy was started.
    pub config: Arc<Config>,
    /// Where exchanges are dumped to.
    pub dumps: Dumps,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// This worker's side of mesh TLS.
    pub tls: Tls,
    /// The destinations that this worker meets: endpoints with their loads and pools.
    pub destinations: Destinations,
    /// The local app's addresses that this worker's inbound path meets, likewise.
    pub apps: Destinations,
    /// The dice of the balancers.
    pub rng: RefCell<fastrand::Rng>,
    /// Cancelled when the proxy is to end: connections finish what they carry.
    pub drain: CancellationToken,
    limit: usize,
    open: Cell<usize>,
    /// When a peer was last complained of.
    complained: Cell<Option<Instant>>,
    /// Told when no connection is open any more.
    idle: Notify,
}

impl Worker {
    /// A worker without connections.
    pub fn new(seat: Seat) -> Rc<Self> {
        let mut rng = fastrand::Rng::new();
        let lifetimes = Lifetimes::new(seat.config.max_connection_age, rng.fork());
        Rc::new(Self {
            config: seat.config,
            dumps: seat.dumps,
            metrics: seat.metrics,
            tls: Tls::new(seat.credentials, lifetimes),
            destinations: Destinations::new(seat.discovery),
            apps: Destinations::new(Discovery::off()),
            rng: RefCell::new(rng),
            drain: seat.drain,
            limit: seat.limit,
            open: Cell::new(0),
            complained: Cell::new(None),
            idle: Notify::new(),
        })
    }

    async fn run(self: Rc<Self>, listeners: Listeners) {
        for listener in listeners.inbound {
            let worker = self.clone();
            tokio::task::spawn_local(accept::accept(listener, move |stream, peer| {
                worker.take(Direction::Inbound, stream, peer)
            }));
        }
        for listener in listeners.outbound {
            let worker = self.clone();
            tokio::task::spawn_local(accept::accept(listener, move |stream, peer| {
                worker.take(Direction::Outbound, stream, peer)
            }));
        }
        let mut sweep = tokio::time::interval(SWEEP);
        loop {
            tokio::select! {
                _ = sweep.tick() => {
                    self.destinations.evict_idle(Instant::now());
                    self.apps.evict_idle(Instant::now());
                }
                () = self.drain.cancelled() => break,
            }
        }
        // Late arrivals are still served: the listeners stay until nothing is open.
        while self.open.get() > 0 {
            self.idle.notified().await;
        }
    }

    /// Carries an accepted connection in a task of its own; over the limit it is reset, and those that are open go on.
    fn take(self: &Rc<Self>, direction: Direction, stream: TcpStream, peer: SocketAddr) {
        if self.open.get() >= self.limit {
            self.metrics
                .failure(direction, &Failure::Overloaded("too many connections"));
            return Io::new(stream).reset();
        }
        self.open.set(self.open.get() + 1);
        let open = Open {
            worker: self.clone(),
            _counted: self.metrics.connection(direction),
        };
        tokio::task::spawn_local(async move {
            let worker = open.worker.clone();
            match direction {
                Direction::Inbound => inbound::carry(stream, peer, worker).await,
                Direction::Outbound => outbound::carry(stream, peer, worker).await,
            }
            drop(open);
        });
    }

    /// Whether a warning about a peer is due: a flood of them would be one of lines in the log.
    pub fn may_complain(&self, now: Instant) -> bool {
        let due = self
            .complained
            .get()
            .is_none_or(|last| now.saturating_duration_since(last) >= COMPLAIN_EVERY);
        if due {
            self.complained.set(Some(now));
        }
        due
    }

    /// The expiry of a connection in use, which counts the connection from the end of the peer's certificate on. Never done for plaintext.
    pub fn expiry(self: &Rc<Self>, io: &Io, direction: Direction) -> Expiry {
        let Some(&lifetime) = io.lifetime() else {
            return Expiry(None);
        };
        // A socket without a peer is closed: reading from it says so.
        let Ok(peer) = io.socket().peer_addr() else {
            return Expiry(None);
        };
        let (worker, path) = (self.clone(), direction.name());
        Expiry(Some(Box::pin(async move {
            let outlived = || {
                if worker.may_complain(Instant::now()) {
                    tracing::warn!(path, %peer, "the peer's certificate has expired; its connection stays open");
                }
                worker.metrics.certificate_expired(direction)
            };
            lifetime.expire(outlived).await;
            tracing::debug!(path, %peer, "connection reset: it reached its maximum age");
        })))
    }

    /// The ports that a connection must not lead back to.
    pub fn own_ports(&self) -> [u16; 2] {
        [self.config.inbound_port, self.config.outbound_port]
    }

    /// Says why a connection is closed at once.
    pub fn refuse(&self, direction: Direction, peer: SocketAddr, refused: &orig_dst::Refused) {
        tracing::warn!(path = direction.name(), %peer, "connection closed: {refused}");
    }
}

/// One open connection, counted until it is dropped.
struct Open {
    worker: Rc<Worker>,
    _counted: crate::metrics::OpenConnection,
}

impl Drop for Open {
    fn drop(&mut self) {
        let open = &self.worker.open;
        open.set(open.get() - 1);
        if open.get() == 0 {
            self.worker.idle.notify_one();
        }
    }
}

/// One connection on its way through the proxy.
#[derive(Clone)]
pub struct Flow {
    /// The worker that carries it.
    pub worker: Rc<Worker>,
    /// To the app or from it.
    pub direction: Direction,
    /// Who connected.
    pub peer: SocketAddr,
    /// Where it goes.
    pub destination: Rc<Destination>,
    /// Who connected, as far as they have proven it.
    pub caller: Caller,
}

impl Flow {
    /// What dumps say of the connection.
    pub fn info(&self) -> ConnectionInfo {
        ConnectionInfo {
            direction: self.direction,
            peer: self.peer,
            destination: self.destination.address,
        }
    }

    /// The record of an exchange that begins now, where it is to be dumped.
    pub fn dump(&self) -> Option<ExchangeDump> {
        self.worker.dumps.exchange(&self.info())
    }

    /// The protocol of the connection where it is declared. Inbound, only the pod's own opaque ports count; outbound, what discovery
    /// knows of the destination.
    pub fn declared_protocol(&self) -> Option<Protocol> {
        match self.direction {
            Direction::Inbound => {
                let opaque_ports = &self.worker.config.policy.opaque_ports;
                opaque_ports
                    .contains(self.destination.address.port())
                    .then_some(Protocol::Opaque)
            }
            Direction::Outbound => announced(self.destination.app_protocol()),
        }
    }

    /// Whether a connection may be made for the caller, whatever they want.
    pub fn admits_unseen(&self) -> Result<(), Failure> {
        self.worker.config.policy.admits_unseen(&self.caller)
    }

    /// Whether this request of theirs may be passed on, and how.
    pub fn authorize_request(&self, request: &RequestView<'_>) -> Result<Admission, Failure> {
        self.worker.config.policy.authorize_request(
            &self.caller,
            self.destination.address.port(),
            request,
        )
    }

    /// The expiry of this connection while it and `upstream` are in use: one of the two leads to a peer's proxy, or neither.
    pub fn expiry(&self, client: &Io, upstream: &Io) -> Expiry {
        let leads_to_peer = if client.lifetime().is_some() {
            client
        } else {
            upstream
        };
        self.worker.expiry(leads_to_peer, self.direction)
    }

    /// What the app is told of who calls.
    pub fn called_by(&self) -> Option<&str> {
        self.caller.identity().map(Identity::as_str)
    }

    /// The proxy is about to end.
    pub fn is_draining(&self) -> bool {
        self.worker.drain.is_cancelled()
    }
}

#[cfg(test)]
impl Seat {
    /// What a test gives a worker, to change as it needs: with these arguments more, and nobody to ask.
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
    async fn over_the_limit_connections_are_reset_and_counted() {
        let seat = Seat {
            limit: 1,
            ..Seat::for_a_test("")
        };
        let metrics = seat.metrics.clone();
        let worker = Worker::new(seat);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        worker.open.set(1);
        let flood = async {
            for _ in 0..100 {
                let (stream, peer) = listener.accept().await.unwrap();
                worker.take(Direction::Inbound, stream, peer);
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
        assert_eq!(
            worker.open.get(),
            1,
            "the one that was open is still carried"
        );
        let counted = metrics.render();
        assert!(
            counted.contains("failures_total{direction=\"inbound\",code=\"overloaded\"} 100"),
            "{counted}"
        );
    }
}
