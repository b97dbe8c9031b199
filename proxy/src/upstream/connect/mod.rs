//! Step 7: the connections of one worker, by endpoint, identity and protocol: an idle one, or a new
//! one within the time that `attempts.rs` gives an attempt. Backends with the same endpoint and limits
//! share a pool. When the last of them has removed the endpoint, the pool is closed and keeps no
//! connection.

pub mod http2;
mod queue;

use crate::labels::LimitKind;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use diy_mesh_model::identity::Identity;
use diy_mesh_model::state;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::time::timeout_at;

use self::http2::{Connections, Lease};
use crate::endpoint::{EndpointInfo, ServerTls};
use crate::error::Failure;
use crate::limits::lifetime::Expiry;
use crate::limits::memory::{Charge, ConnectionSlot};
use crate::observe::metrics::UpstreamMetrics;
use crate::secure::io::Io;
use crate::secure::tls::{Alpn, Tls};
use diy_mesh_model::exchange::Direction;
use queue::Limiter;
pub use queue::{Limits, Slot};

/// If there are more idle HTTP/1 connections than a worker keeps, one in this many is closed.
const IDLE_FRACTION: usize = 8;

/// How long an idle connection to an endpoint is kept. Connections that a flood of requests leaves
/// are released within 30 seconds.
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a plaintext connection may have been idle before a request that must not be sent twice.
/// Servers close idle connections after two (Gunicorn) or five seconds (Node.js), without notice.
const MAX_IDLE_BEFORE_UNREPEATABLE: Duration = Duration::from_secs(1);

/// The open pools of one worker and one direction. Backends share the pool of an endpoint if they
/// have the same limits: the limits of one Service do not apply to another one.
pub struct Pools {
    open: Rc<Open>,
    /// The workers of the proxy, which share the limits.
    workers: u32,
    /// The metrics of the direction.
    pub metrics: Arc<UpstreamMetrics>,
}

impl Default for Pools {
    fn default() -> Self {
        Self::new(1, Arc::default())
    }
}

/// The open pools, and the number of their idle HTTP/1 connections, which no connection is charged for.
struct Open {
    pools: RefCell<HashMap<(Remote, Limits), Weak<OpenPool>>>,
    /// Each idle connection has a handle.
    idle: Rc<()>,
    max_idle: Cell<usize>,
}

/// A pool that is closed when this value is dropped. Each backend that contains the endpoint holds
/// it.
pub struct OpenPool(Rc<Pool>);

impl Pools {
    /// The pools of one of `workers` workers. All are closed.
    pub fn new(workers: u32, metrics: Arc<UpstreamMetrics>) -> Self {
        Self {
            open: Rc::default(),
            workers,
            metrics,
        }
    }

    /// Changes the maximum number of idle HTTP/1 connections. The oldest ones beyond it are closed.
    pub fn set_max_idle(&self, max: usize) {
        self.open.max_idle.set(max);
        self.open.close_oldest();
    }

    /// The open pool of connections to `remote` with these limits of the whole proxy.
    pub fn open(&self, remote: Remote, limits: Limits) -> Rc<OpenPool> {
        let mut pools = self.open.pools.borrow_mut();
        let key = (remote, limits);
        if let Some(open) = pools.get(&key).and_then(Weak::upgrade) {
            return open;
        }
        let limits = limits.of_worker(self.workers);
        let (remote, metrics) = (key.0.clone(), self.metrics.clone());
        let pool = Pool::new(remote, limits, metrics, self.open.clone());
        let open = Rc::new(OpenPool(Rc::new(pool)));
        pools.insert(key, Rc::downgrade(&open));
        open
    }

    /// The workers of the proxy.
    pub fn workers(&self) -> u32 {
        self.workers
    }

    /// Closes connections that are idle for too long. The worker calls it every few seconds.
    pub fn evict_idle(&self, now: Instant) {
        let mut pools = self.open.pools.borrow_mut();
        pools.retain(|_, pool| {
            let open = pool.upgrade();
            if let Some(OpenPool(pool)) = open.as_deref() {
                pool.evict_idle(now);
            }
            open.is_some()
        });
        if pools.len() < pools.capacity() / 4 {
            pools.shrink_to_fit();
        }
    }
}

impl Default for Open {
    fn default() -> Self {
        Self {
            pools: RefCell::default(),
            idle: Rc::default(),
            max_idle: Cell::new(usize::MAX),
        }
    }
}

impl Open {
    /// Closes the oldest idle HTTP/1 connections if there are too many: several, because it inspects all.
    fn close_oldest(&self) {
        let (idle, max) = (Rc::strong_count(&self.idle) - 1, self.max_idle.get());
        if idle <= max {
            return;
        }
        let pools: Vec<_> = self.pools.borrow().values().cloned().collect();
        let pools: Vec<_> = pools.iter().filter_map(Weak::upgrade).collect();
        let mut since: Vec<_> = pools
            .iter()
            .flat_map(|open| open.pool().idle_since())
            .collect();
        let oldest = (idle - max + max / IDLE_FRACTION).min(since.len());
        if oldest > 0 {
            let (_, last, _) = since.select_nth_unstable(oldest - 1);
            for open in &pools {
                let mut idle = open.pool().http1.borrow_mut();
                idle.retain(|idle| idle.since > *last);
            }
        }
    }
}

impl OpenPool {
    /// The pool. A request in flight may outlive the endpoint's removal, and keeps only this.
    pub fn pool(&self) -> &Rc<Pool> {
        &self.0
    }
}

impl Drop for OpenPool {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The connections to one endpoint.
pub struct Pool {
    /// The address and the identity of the endpoint.
    pub remote: Remote,
    /// Idle HTTP/1 connections, the most recently used last.
    http1: RefCell<Vec<Idle>>,
    limiter: Rc<Limiter>,
    /// HTTP/2 connections of the pod's own application.
    pub http2: Connections,
    /// HTTP/2 connections to it, by the number of the caller. Callers that shared one would share its
    /// limit of streams, and each could use it up.
    callers: RefCell<HashMap<u64, Rc<Connections>>>,
    closed: Cell<bool>,
    open: Rc<Open>,
}

/// An HTTP/1 connection for one exchange, or an opaque one.
pub struct Upstream {
    /// The connection.
    pub io: Io,
    /// It was idle in the pool, and the peer may have closed it.
    pub reused: bool,
    /// Its slot among the connections of the endpoint, if these are limited.
    pub connection: Option<Slot>,
    /// The slot of the request on it.
    _request: Option<Slot>,
}

struct Idle {
    io: Io,
    since: Instant,
    _counted: Rc<()>,
}

impl Pool {
    /// An empty pool.
    fn new(remote: Remote, limits: Limits, metrics: Arc<UpstreamMetrics>, open: Rc<Open>) -> Self {
        let limiter = Limiter::new(limits, metrics);
        Self {
            remote,
            http1: RefCell::default(),
            http2: Connections::new(limiter.clone()),
            callers: RefCell::default(),
            limiter,
            closed: Cell::new(false),
            open,
        }
    }

    /// An HTTP/1 connection: an idle one if there is one, else a new one. Waits while all
    /// connections or requests that the endpoint may have are in use. `is_repeatable`: the request may
    /// be sent again if the endpoint closes the connection.
    pub async fn http1(
        &self,
        dialer: Dialer<'_>,
        now: Instant,
        is_repeatable: bool,
    ) -> Result<Upstream, Failure> {
        let request = self.acquire(LimitKind::Requests, dialer).await?;
        let connection = self.acquire(LimitKind::Connections, dialer).await?;
        let (io, reused) = match self.checkout_http1(now, is_repeatable) {
            Some(io) => (io, true),
            None => (self.dial(dialer, Alpn::Http1).await?, false),
        };
        Ok(Upstream {
            io,
            reused,
            connection: Some(connection),
            _request: Some(request),
        })
    }

    /// A new connection for opaque bytes, which may become an HTTP/1 one. Waits while the endpoint
    /// has all connections that it may have.
    pub async fn opaque(&self, dialer: Dialer<'_>, alpn: Alpn) -> Result<Upstream, Failure> {
        let connection = if self.limiter.limits.opaque {
            Some(self.acquire(LimitKind::Connections, dialer).await?)
        } else {
            None
        };
        if connection.is_some() {
            // Idle HTTP/1 connections make space.
            let limit = self.limiter.limits.connections as usize;
            let in_use = self.limiter.connections() as usize;
            let mut idle = self.http1.borrow_mut();
            let excess = (in_use + idle.len()).saturating_sub(limit);
            drop(idle.drain(..excess));
        }
        Ok(Upstream {
            io: self.dial(dialer, alpn).await?,
            reused: false,
            connection,
            _request: None,
        })
    }

    async fn dial(&self, dialer: Dialer<'_>, alpn: Alpn) -> Result<Io, Failure> {
        let mut io = dialer.dial(&self.remote, alpn).await?;
        io.count(self.limiter.count_connection());
        Ok(io)
    }

    async fn acquire(&self, kind: LimitKind, dialer: Dialer<'_>) -> Result<Slot, Failure> {
        let address = self.remote.address;
        self.limiter.acquire(kind, address, dialer.deadline).await
    }

    /// A slot for a stream on an HTTP/2 connection: on an open one if there is one with a free slot,
    /// else on a new one. `expiry` tells when a new connection has to be reset.
    pub async fn http2(
        &self,
        direction: Direction,
        dialer: Dialer<'_>,
        expiry: impl FnOnce(&Io) -> Expiry,
    ) -> Result<Lease, Failure> {
        let of_caller;
        let connections = match direction {
            Direction::Outbound => &self.http2,
            Direction::Inbound => {
                of_caller = self.connections_of(dialer.slot.holder());
                &of_caller
            }
        };
        connections.lease(&self.remote, dialer, expiry).await
    }

    fn connections_of(&self, caller: u64) -> Rc<Connections> {
        let mut callers = self.callers.borrow_mut();
        if let Some(known) = callers.get(&caller) {
            return known.clone();
        }
        // A limiter of its own: nothing that another caller does keeps its requests waiting.
        let (limits, metrics) = (self.limiter.limits, self.limiter.metrics.clone());
        let limiter = Limiter::new(limits, metrics);
        let connections = Rc::new(Connections::new(limiter));
        if self.closed.get() {
            connections.close()
        } else {
            drop(callers.insert(caller, connections.clone()))
        }
        connections
    }

    /// The most recently used HTTP/1 connection that is still open. Drops closed and retired ones, and,
    /// for a request that is not repeatable, one that the endpoint may be closing: a new one takes its
    /// place, also at an endpoint that serves one connection at a time.
    pub fn checkout_http1(&self, now: Instant, is_repeatable: bool) -> Option<Io> {
        let mut idle = self.http1.borrow_mut();
        while let Some(Idle { mut io, since, .. }) = idle.pop() {
            let idle_for = now.saturating_duration_since(since);
            if !is_repeatable && !io.is_secured() && idle_for >= MAX_IDLE_BEFORE_UNREPEATABLE {
                // A FIN would occupy the local port for a minute: bursts would use up all.
                io.reset();
                return None;
            }
            if !io.is_retired(now) && !io.is_stale() {
                return Some(io);
            }
        }
        None
    }

    /// Returns an HTTP/1 connection to the pool after its exchange. Drops it if the pool is closed, or
    /// if the connection is retired.
    pub fn checkin_http1(&self, io: Io, now: Instant) {
        if !self.closed.get() && !io.is_retired(now) {
            let idle = Idle {
                io,
                since: now,
                _counted: self.open.idle.clone(),
            };
            self.http1.borrow_mut().push(idle);
            self.open.close_oldest();
        }
    }

    fn idle_since(&self) -> Vec<Instant> {
        let idle = self.http1.borrow();
        idle.iter().map(|idle| idle.since).collect()
    }

    /// Drops the HTTP/1 connections that are idle for too long, closed or retired. Maintains the
    /// HTTP/2 connections.
    pub fn evict_idle(&self, now: Instant) {
        self.http2.maintain(now);
        self.callers.borrow_mut().retain(|_, connections| {
            connections.maintain(now);
            // A request may wait for a connection.
            !connections.is_empty() || Rc::strong_count(connections) > 1
        });
        let mut idle = self.http1.borrow_mut();
        idle.retain_mut(|Idle { io, since, .. }| {
            now.saturating_duration_since(*since) <= IDLE_TIMEOUT
                && !io.is_retired(now)
                && !io.is_stale()
        });
        if idle.len() < idle.capacity() / 4 {
            idle.shrink_to_fit();
        }
    }

    /// Whether a connection is kept for further requests.
    pub fn has_connections(&self) -> bool {
        !self.http1.borrow().is_empty()
            || !self.http2.is_empty()
            || !self.callers.borrow().is_empty()
    }

    /// The used parts of the limits. Each caller of the application has its own HTTP/2 connections.
    pub fn state(&self) -> state::Pool {
        let (limits, callers) = (self.limiter.limits, self.callers.borrow());
        let limit = |limit: u32| Some(limit).filter(|limit| *limit != u32::MAX);
        let of_callers: usize = callers.values().map(|caller| caller.len()).sum();
        state::Pool {
            connections: self.limiter.connections(),
            max_connections: limit(limits.connections),
            idle: self.http1.borrow().len(),
            http2_connections: self.http2.len() + of_callers,
            max_http2_connections: limit(limits.http2_connections).filter(|_| callers.is_empty()),
            max_requests: limit(limits.requests),
            waiting: self.limiter.waiting(),
        }
    }

    /// Drops all idle connections, and those that are returned later. Open HTTP/2 streams continue.
    pub fn close(&self) {
        self.closed.set(true);
        self.http1.take();
        self.http2.close();
        let callers = self.callers.take();
        callers.values().for_each(|connections| connections.close());
    }
}

/// The far end of connections that can replace one another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Remote {
    /// Its address.
    pub address: SocketAddr,
    /// Its pod as "namespace/name": another pod may get the address later. Empty if it is none.
    pub pod: String,
    /// The SPIFFE ID that the endpoint must prove, or `None` if it is not meshed.
    pub identity: Option<Identity>,
    /// The TLS settings of a server outside of the mesh.
    pub tls: Option<Arc<ServerTls>>,
}

impl From<&EndpointInfo> for Remote {
    fn from(info: &EndpointInfo) -> Self {
        Self {
            address: info.address,
            pod: info.pod.clone(),
            identity: info.identity.clone(),
            tls: info.server_tls().cloned(),
        }
    }
}

/// How often a handshake that was answered in plaintext is repeated on a new connection.
const MAX_REPEATS: u32 = 2;

/// Opens the new connections of one attempt.
#[derive(Clone, Copy)]
pub struct Dialer<'a> {
    tls: &'a Tls,
    timeout: Duration,
    /// The end of the time for all that precedes a connection's use.
    pub deadline: tokio::time::Instant,
    /// The connection that needs them, and is charged for it.
    slot: &'a Rc<ConnectionSlot>,
}

impl<'a> Dialer<'a> {
    /// Opens connections for an attempt that has begun. One may take until the timeout, its queues and
    /// its TLS handshake included.
    pub fn new(
        tls: &'a Tls,
        began: tokio::time::Instant,
        timeout: Duration,
        slot: &'a Rc<ConnectionSlot>,
    ) -> Self {
        Self {
            tls,
            timeout,
            deadline: began + timeout,
            slot,
        }
    }

    /// Opens a connection: with mutual TLS if the remote is meshed, and with TLS if its settings say
    /// so, never in plaintext then.
    pub async fn dial(&self, remote: &Remote, alpn: Alpn) -> Result<Io, Failure> {
        let Self {
            tls,
            timeout,
            deadline,
            slot,
        } = *self;
        let address = remote.address;
        let connect = || connect(address, tls, deadline, remote.identity.is_some());
        let io = connect().await?;
        let memory = || Charge::new(slot.clone());
        let secured = match (&remote.tls, &remote.identity) {
            (Some(server), _) => {
                // Boxed: most connections stay in the cluster.
                let secured = Box::pin(tls.connect_to_server(io, address, server, alpn, memory()));
                timeout_at(deadline, secured).await
            }
            // A connection to the pod itself never leaves it, and does not pass its own proxy again.
            (None, Some(expected)) if !is_own(&io) => {
                let (mut io, mut repeats) = (io, 0);
                loop {
                    let secured = tls.connect(io, address, expected, alpn, memory());
                    match timeout_at(deadline, secured).await {
                        Ok(Err(Failure::PlaintextAnswer(_))) if repeats < MAX_REPEATS => {
                            repeats += 1;
                            io = connect().await?;
                        }
                        ended => break ended,
                    }
                }
            }
            (None, _) => return Ok(io),
        };
        secured.unwrap_or_else(|_| {
            let reason = format!("not completed within {timeout:?}");
            Err(Failure::Handshake { address, reason })
        })
    }
}

/// The kernel connects from the address that it connects to only where that address is this pod's.
fn is_own(io: &Io) -> bool {
    let socket = io.socket();
    matches!((socket.local_addr(), socket.peer_addr()), (Ok(local), Ok(peer)) if local.ip() == peer.ip())
}

async fn connect(
    address: SocketAddr,
    tls: &Tls,
    deadline: tokio::time::Instant,
    is_meshed: bool,
) -> Result<Io, Failure> {
    let connecting = async {
        if is_meshed {
            tls.turns().next().await;
        }
        TcpStream::connect(address).await
    };
    let connected = timeout_at(deadline, connecting).await;
    let connected = connected.unwrap_or_else(|elapsed| Err(elapsed.into()));
    let stream = connected.map_err(|source| match source.kind() {
        io::ErrorKind::TimedOut => Failure::ConnectTimeout(address),
        _ => Failure::Connect {
            address,
            source: Arc::new(source),
        },
    })?;
    // A socket whose peer has gone already refuses options; the first read will tell.
    let _ = set_options(SockRef::from(&stream), tls.timeouts().tcp_user);
    Ok(Io::new(stream))
}

/// Sets the options of each socket, accepted or dialed. A peer that is unreachable is detected on a
/// quiet connection by keepalive probes, and on a connection with unacknowledged data by
/// `TCP_USER_TIMEOUT`, by default within two minutes both. With a `user_timeout`, Linux also ends
/// the probes after it, not after a number of them.
pub fn set_options(socket: SockRef<'_>, user_timeout: Duration) -> io::Result<()> {
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(15))
        .with_retries(4);
    socket.set_tcp_nodelay(true)?;
    // Urgent data is a part of the stream: Telnet and FTP send commands so.
    socket.set_out_of_band_inline(true)?;
    socket.set_tcp_keepalive(&keepalive)?;
    // 0 is the default of the kernel.
    socket.set_tcp_user_timeout(Some(user_timeout))
}

#[cfg(test)]
mod tests;
