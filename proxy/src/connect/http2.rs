//! The HTTP/2 connections of one worker to one endpoint, inbound for the requests of one caller.
//! Streams share a connection. A new connection is opened if the open ones have reached the peer's
//! SETTINGS_MAX_CONCURRENT_STREAMS. Each connection has its own task.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use h2::client::{ResponseFuture, SendRequest};
use h2::{Ping, PingPong, SendStream};
use http::Request;
use tokio::sync::{Mutex, OnceCell};
use tokio::task::AbortHandle;

use super::queue::{LimitKind, Limiter, Slot};
use super::{Dialer, Remote};
use crate::account::{Account, Charge};
use crate::batched::{Batched, Queued};
use crate::error::Failure;
use crate::io::Io;
use crate::lifetime::{Expiry, Lifetime};
use crate::tls::{Acceptance, Alpn};

/// The maximum size of a header list, counted as in RFC 9113, section 6.5.2.
pub const MAX_HEADER_LIST: u32 = 64 * 1024;
/// The flow-control window of a stream.
pub const STREAM_WINDOW: u32 = 256 * 1024;
/// The largest flow-control window of a connection: 32 streams whose receivers do not read.
pub const CONNECTION_WINDOW: u32 = 32 * STREAM_WINDOW;
/// The flow-control window of a connection that has no share of the memory for windows: the
/// smallest one (RFC 9113, section 6.9.2).
pub const MIN_CONNECTION_WINDOW: u32 = 65_535;
/// The maximum number of unwritten bytes of one stream.
pub const MAX_SEND_BUFFER: usize = 64 * 1024;
/// The maximum number of streams that the proxy has reset and whose late frames it ignores.
pub const MAX_LOCAL_RESETS: usize = 200;

/// The memory of a connection besides that of its windows and streams.
pub const CONNECTION_COST: usize = 16 * 1024;

/// The maximum number of concurrent streams until the peer's SETTINGS frame arrives.
const INITIAL_MAX_STREAMS: usize = 100;
/// How long a connection without streams stays open.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the peer of a connection with open streams may be silent before the proxy sends a PING.
/// After the same time again without a byte the proxy closes the connection.
const READ_IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// A worker's HTTP/2 connections to one endpoint.
pub struct Connections {
    limiter: Rc<Limiter>,
    /// The caller whose requests they carry. None: the pod's own application.
    caller: Option<CallerAccounts>,
    open: RefCell<Vec<Rc<Connection>>>,
    closed: Cell<bool>,
    /// Serializes dialing: concurrent requests share the connection, or the failure.
    dialing: Mutex<()>,
    dials: Cell<u64>,
    last_failure: RefCell<Option<Failure>>,
}

/// What the connections of one caller are charged to.
pub(super) struct CallerAccounts {
    /// Kept while these connections are its own.
    pub _memory: Rc<Account>,
    pub windows: Rc<Account>,
}

/// One connection. Its task ends when the last handle is dropped.
pub(super) struct Connection {
    sender: RefCell<SendRequest<Queued>>,
    io: Batched,
    is_secured: bool,
    streams: Cell<usize>,
    limiter: Rc<Limiter>,
    /// A stream on the connection has ended. The peer may have closed the connection since.
    reused: Cell<bool>,
    /// The peer's SETTINGS have arrived, if somebody has waited for them.
    settled: OnceCell<()>,
    health: RefCell<Health>,
    lifetime: Option<Lifetime>,
    blocked: Rc<Blocked>,
    /// The lifetime is over: the connection accepts no new streams.
    retired: Cell<bool>,
    task: AbortHandle,
}

/// The liveness of a connection, updated by [`Connections::maintain`].
struct Health {
    ping: Option<PingPong>,
    /// A PING frame was sent and not yet acknowledged.
    pinged: bool,
    bytes_read: u64,
    /// When the connection last received bytes, or had no streams.
    last_read: Instant,
    last_used: Instant,
}

/// A slot for one stream on a connection. Released on drop.
pub struct Lease {
    connection: Rc<Connection>,
    /// [`Blocked`] counts the stream.
    is_blocked: Cell<bool>,
    /// The request is in flight.
    _request: Slot,
}

impl Connections {
    pub(super) fn new(limiter: Rc<Limiter>, caller: Option<CallerAccounts>) -> Self {
        Self {
            limiter,
            caller,
            open: RefCell::default(),
            closed: Cell::new(false),
            dialing: Mutex::default(),
            dials: Cell::new(0),
            last_failure: RefCell::default(),
        }
    }

    /// Acquires a slot for a stream. Opens a connection if no open one has a free slot, and waits
    /// if there are as many as the endpoint may have. A new one is charged to `caller`.
    pub(super) async fn lease(
        &self,
        caller: &Rc<Account>,
        remote: &Remote,
        dialer: Dialer<'_>,
        expiry: impl FnOnce(&Io) -> Expiry,
    ) -> Result<Lease, Failure> {
        let (kind, address) = (LimitKind::Requests, remote.address);
        let request = self.limiter.acquire(kind, address, dialer.deadline);
        let request = request.await?;
        if let Some(connection) = self.find(false) {
            return Ok(Lease::new(connection, request));
        }
        let connection = self
            .connection(caller, remote, dialer, expiry, false)
            .await?;
        Ok(Lease::new(connection, request))
    }

    /// A connection with a free slot, an open one or a new one. `has_waited`: no earlier request
    /// waits.
    async fn connection(
        &self,
        caller: &Rc<Account>,
        remote: &Remote,
        dialer: Dialer<'_>,
        expiry: impl FnOnce(&Io) -> Expiry,
        has_waited: bool,
    ) -> Result<Rc<Connection>, Failure> {
        let dials = self.dials.get();
        let guard = self.dialing.lock().await;
        if let Some(connection) = self.find(has_waited) {
            return Ok(connection);
        }
        if self.is_full() || !self.is_turn(has_waited) {
            drop(guard);
            // Closed connections make space for new ones.
            let take = || match self.find(true) {
                Some(connection) => Some(Some(connection)),
                None => (!self.is_full()).then_some(None),
            };
            let (kind, deadline) = (LimitKind::Http2Connections, dialer.deadline);
            let waiting = self.limiter.wait(kind, remote.address, deadline, take);
            return match waiting.await? {
                Some(connection) => Ok(connection),
                None => Box::pin(self.connection(caller, remote, dialer, expiry, true)).await,
            };
        }
        if let (true, Some(failure)) = (self.dials.get() != dials, &*self.last_failure.borrow()) {
            return Err(failure.clone());
        }
        let windows = self.caller.as_ref().map(|caller| &caller.windows);
        let accounts = (caller, windows);
        let dialed = open(remote, dialer, expiry, &self.limiter, accounts).await;
        self.dials.set(self.dials.get() + 1);
        self.last_failure.replace(dialed.as_ref().err().cloned());
        let connection = dialed?;
        if !self.closed.get() {
            self.open.borrow_mut().push(connection.clone());
        }
        Ok(connection)
    }

    /// Closes idle connections, retires those whose lifetime is over, and checks the liveness of
    /// the others. The worker calls it every few seconds.
    pub fn maintain(&self, now: Instant) {
        self.open
            .borrow_mut()
            .retain(|connection| connection.maintain(now));
    }

    /// Releases all connections, and those that are opened later. Open streams continue.
    pub fn close(&self) {
        self.closed.set(true);
        self.open.take();
    }

    /// The number of open connections.
    pub fn len(&self) -> usize {
        self.open.borrow().len()
    }

    /// Whether no connection is open.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn is_full(&self) -> bool {
        self.len() >= self.limiter.limits.http2_connections as usize
    }

    /// Whether the next free slot is that of a request that `has_waited`, or has not.
    fn is_turn(&self, has_waited: bool) -> bool {
        has_waited || !self.limiter.has_queue(LimitKind::Http2Connections)
    }

    /// The first connection that has a free slot, so that the later ones become idle. Drops closed
    /// connections. None while earlier requests wait, unless the request `has_waited`.
    fn find(&self, has_waited: bool) -> Option<Rc<Connection>> {
        if !self.is_turn(has_waited) {
            return None;
        }
        let mut open = self.open.borrow_mut();
        let mut index = 0;
        while let Some(connection) = open.get(index) {
            match connection.capacity() {
                Capacity::Available => return Some(connection.clone()),
                Capacity::Exhausted => index += 1,
                Capacity::Closed => drop(open.remove(index)),
            }
        }
        None
    }
}

/// Whether a connection accepts a new stream.
enum Capacity {
    Available,
    Exhausted,
    Closed,
}

impl Connection {
    fn capacity(&self) -> Capacity {
        if self.retired.get() {
            return Capacity::Exhausted;
        }
        let mut sender = self.sender.borrow_mut();
        match sender.poll_ready(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(())) if self.streams.get() < sender.current_max_send_streams() => {
                Capacity::Available
            }
            Poll::Ready(Ok(())) | Poll::Pending => Capacity::Exhausted,
            // It has failed, or the peer has sent GOAWAY.
            Poll::Ready(Err(_)) => Capacity::Closed,
        }
    }

    /// Waits for the answer to a PING frame.
    async fn round_trip(&self) -> Result<(), h2::Error> {
        let ping = |cx: &mut Context<'_>| match &mut self.health.borrow_mut().ping {
            Some(ping) => ping.poll_pong(cx).map_ok(drop),
            None => Poll::Ready(Ok(())),
        };
        if let Some(ping) = &mut self.health.borrow_mut().ping {
            // Fails while another PING frame is in flight: its answer serves as well.
            let _ = ping.send_ping(Ping::opaque());
        }
        poll_fn(ping).await
    }

    /// Updates the state of the connection. Returns whether it stays in the pool.
    fn maintain(&self, now: Instant) -> bool {
        if matches!(self.capacity(), Capacity::Closed) {
            return false;
        }
        self.retired.set(
            self.lifetime
                .is_some_and(|lifetime| lifetime.is_retired(now)),
        );
        let health = &mut *self.health.borrow_mut();
        if self.streams.get() == 0 {
            health.last_read = now;
            let idle = now.saturating_duration_since(health.last_used);
            return !self.retired.get() && idle < IDLE_TIMEOUT;
        }
        health.last_used = now;
        let is_alive = health.update(now, self.io.bytes_read());
        if !is_alive {
            tracing::debug!("upstream connection closed: the peer does not answer PING frames");
            self.task.abort();
        }
        is_alive
    }
}

impl Health {
    /// Sends a PING frame if the peer is silent. Returns whether the connection is alive.
    fn update(&mut self, now: Instant, bytes_read: u64) -> bool {
        if bytes_read != self.bytes_read {
            (self.bytes_read, self.last_read) = (bytes_read, now);
        }
        let Some(ping) = &mut self.ping else {
            return true;
        };
        if self.pinged
            && ping
                .poll_pong(&mut Context::from_waker(Waker::noop()))
                .is_ready()
        {
            self.pinged = false;
        }
        let silence = now.saturating_duration_since(self.last_read);
        if silence >= READ_IDLE_TIMEOUT && !self.pinged {
            self.pinged = ping.send_ping(Ping::opaque()).is_ok();
        }
        silence < 2 * READ_IDLE_TIMEOUT
    }
}

impl Lease {
    fn new(connection: Rc<Connection>, request: Slot) -> Self {
        connection.streams.set(connection.streams.get() + 1);
        Self {
            connection,
            is_blocked: Cell::new(false),
            _request: request,
        }
    }

    /// Counts a stream whose client does not read all at once: bytes wait for it.
    pub fn record_blocked(&self) {
        if !self.is_blocked.replace(true) {
            self.connection.blocked.add();
        }
    }

    /// Opens the stream.
    pub fn send(
        &self,
        request: Request<()>,
        end_of_stream: bool,
    ) -> Result<(ResponseFuture, SendStream<Queued>), h2::Error> {
        self.connection
            .sender
            .borrow_mut()
            .send_request(request, end_of_stream)
    }

    /// The connection.
    pub fn io(&self) -> &Batched {
        &self.connection.io
    }

    /// Whether the connection has mutual TLS: the peer is an authenticated proxy.
    pub fn is_secured(&self) -> bool {
        self.connection.is_secured
    }

    /// Whether the peer accepts extended CONNECT requests (RFC 8441), which open WebSockets.
    pub fn supports_extended_connect(&self) -> bool {
        self.connection
            .sender
            .borrow()
            .is_extended_connect_protocol_enabled()
    }

    /// Waits until the peer's SETTINGS have arrived: they precede the answer to a PING frame.
    pub async fn settled(&self) -> Result<(), h2::Error> {
        let connection = &self.connection;
        let settled = connection
            .settled
            .get_or_try_init(|| connection.round_trip());
        settled.await.copied()
    }

    /// Whether the peer has accepted the TLS handshake.
    pub fn acceptance(&self) -> Acceptance {
        self.connection.io.acceptance()
    }

    /// Whether the connection has carried another stream before.
    pub fn is_reused(&self) -> bool {
        self.connection.reused.get()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.connection
            .streams
            .set(self.connection.streams.get() - 1);
        self.connection.reused.set(true);
        if self.is_blocked.get() {
            self.connection.blocked.remove();
        }
        let limiter = &self.connection.limiter;
        limiter.release(LimitKind::Http2Connections);
        if self.connection.streams.get() == 0 {
            self.connection.health.borrow_mut().last_used = Instant::now();
        }
    }
}

/// Opens a connection and starts its task. `expiry` completes when the connection has to be reset.
/// Charges the memory to the account of the caller, and the window to another one, if it shares that
/// with others.
async fn open(
    remote: &Remote,
    dialer: Dialer<'_>,
    expiry: impl FnOnce(&Io) -> Expiry,
    limiter: &Rc<Limiter>,
    (caller, windows): (&Rc<Account>, Option<&Rc<Account>>),
) -> Result<Rc<Connection>, Failure> {
    let address = remote.address;
    let mut memory = Charge::new(caller.clone());
    let blocked = Rc::<Blocked>::default();
    let mut window = windows.map(|windows| Window {
        charge: Charge::new(windows.clone()),
        blocked: blocked.clone(),
    });
    if !memory.try_grow(CONNECTION_COST) {
        return Err(memory.exceeded());
    }
    let mut io = dialer.dial(remote, Alpn::Http2).await?;
    io.count(limiter.count_connection());
    let is_secured = io.is_secured();
    let lifetime = io.lifetime().copied();
    let mut expiry = expiry(&io);
    let io = Batched::new(io, memory);
    let handshake = h2::client::Builder::new()
        .enable_push(false)
        .initial_max_send_streams(INITIAL_MAX_STREAMS)
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(match window {
            Some(_) => MIN_CONNECTION_WINDOW,
            None => CONNECTION_WINDOW,
        })
        .max_header_list_size(MAX_HEADER_LIST)
        .max_concurrent_reset_streams(MAX_LOCAL_RESETS)
        .max_send_buffer_size(MAX_SEND_BUFFER)
        .handshake(io.clone());
    let (sender, mut connection) = handshake.await.map_err(|error| Failure::UpstreamClosed {
        address,
        reason: error.to_string(),
    })?;
    let (ping, now) = (connection.ping_pong(), Instant::now());
    let task = tokio::task::spawn_local({
        let io = io.clone();
        async move {
            let ended = io.drive(|cx| match Pin::new(&mut expiry).poll(cx) {
                Poll::Pending if io.overload().is_some() => {
                    tracing::debug!(%address, "upstream connection reset: no memory is left for it");
                    io.reset_on_drop();
                    Poll::Ready(Ok(()))
                }
                Poll::Ready(()) => {
                    io.reset_on_drop();
                    Poll::Ready(Ok(()))
                }
                Poll::Pending => {
                    let resized = window.as_mut().and_then(|window| window.grow(cx));
                    if let Some(size) = resized {
                        connection.set_target_window_size(size);
                    }
                    Pin::new(&mut connection).poll(cx)
                }
            });
            if let Err(error) = ended.await {
                tracing::debug!(%address, "upstream connection failed: {error}");
            }
        }
    });
    let health = Health {
        ping,
        pinged: false,
        bytes_read: 0,
        last_read: now,
        last_used: now,
    };
    Ok(Rc::new(Connection {
        sender: RefCell::new(sender),
        io,
        is_secured,
        streams: Cell::new(0),
        limiter: limiter.clone(),
        reused: Cell::new(false),
        settled: OnceCell::new(),
        health: RefCell::new(health),
        lifetime,
        blocked,
        retired: Cell::new(false),
        task: task.abort_handle(),
    }))
}

/// The flow-control window of a connection, charged to its caller. It grows with the number of
/// blocked streams: each may hold the bytes of a window of its own. It never shrinks, because the
/// peer may use what it was granted.
struct Window {
    charge: Charge,
    blocked: Rc<Blocked>,
}

/// The open streams of a connection whose clients did not read all at once.
#[derive(Default)]
struct Blocked {
    streams: Cell<u32>,
    /// Wakes the task of the connection.
    task: RefCell<Option<Waker>>,
}

impl Blocked {
    fn add(&self) {
        self.streams.set(self.streams.get() + 1);
        if let Some(task) = &*self.task.borrow() {
            task.wake_by_ref();
        }
    }

    fn remove(&self) {
        self.streams.set(self.streams.get() - 1);
    }
}

impl Window {
    /// The new size, if the window has to grow and the caller may use the memory for it. `cx` is
    /// that of the connection's task.
    fn grow(&mut self, cx: &Context<'_>) -> Option<u32> {
        let task = &mut *self.blocked.task.borrow_mut();
        match task {
            Some(task) => task.clone_from(cx.waker()),
            None => *task = Some(cx.waker().clone()),
        }
        let streams = (1 + self.blocked.streams.get()).min(CONNECTION_WINDOW / STREAM_WINDOW);
        let wanted = streams.next_power_of_two() * STREAM_WINDOW;
        let granted = self.charge.amount();
        // A smaller one if the caller may not use as much.
        std::iter::successors(Some(wanted), |size| Some(size / 2))
            .take_while(|size| *size >= STREAM_WINDOW && *size as usize > granted)
            .find(|size| self.charge.try_grow(*size as usize))
    }
}
