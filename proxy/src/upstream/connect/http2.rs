//! The HTTP/2 connections of one worker to one endpoint, inbound for the requests of one caller.
//! Streams share a connection. A new connection is opened if the open ones have reached the peer's
//! SETTINGS_MAX_CONCURRENT_STREAMS. Each connection has its own task. A stream that the proxy resets
//! counts until the peer has read the reset.

use crate::labels::LimitKind;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use diy_mesh_http2::{Config, Error, ErrorCode, Receiver, Request, Role, Sender};
use diy_mesh_runtime::admission::Class;
use tokio::sync::Mutex;
use tokio::task::AbortHandle;
use tokio::time::timeout_at;

use super::queue::{Limiter, Slot};
use super::{Dialer, IDLE_TIMEOUT, Remote};
use crate::error::Failure;
use crate::limits::lifetime::{Expiry, Lifetime};
use crate::limits::memory::{Charge, ConnectionSlot};
use crate::protocol::MAX_SECTION;
use crate::secure::io::Io;
use crate::secure::tls::{Acceptance, Alpn};
use crate::upstream::multiplexed::{MAX_OUTPUT, Multiplexed};

/// The streams to endpoints whose receivers do not read may hold their windows at once, all together a
/// part of the memory: this many of them would use all.
const STREAMS_OF_MEMORY: usize = 128;
/// The largest flow-control window of a stream.
pub const STREAM_WINDOW: u32 = 256 * 1024;
/// The flow-control window of a connection: bytes on their way. Those that wait for a receiver count in
/// the windows of their streams alone.
pub const CONNECTION_WINDOW: u32 = 32 * STREAM_WINDOW;
/// The smallest flow-control window (RFC 9113, section 6.9.2).
pub const MIN_WINDOW: u32 = 65_535;
/// The maximum size of a field block, which SETTINGS name. A larger one ends the connection. The proxy's
/// own limit for the fields is lower ([`MAX_SECTION`]): the proxy replies with that limit, also to
/// trailers.
const MAX_BLOCK: usize = 280 * 1024;

/// The memory of a connection without its streams, and without what waits for its peer.
pub const CONNECTION_COST: usize = 16 * 1024;

/// The maximum number of concurrent streams until the peer's SETTINGS frame arrives, which tells how
/// many it accepts.
const INITIAL_MAX_STREAMS: usize = 1;
/// The maximum number of concurrent streams of a client connection, and of its requests that the
/// application has. Those whose streams were reset count until the application has read the reset.
pub const MAX_STREAMS: u32 = 250;
/// The time for the peer's SETTINGS after the handshake, unless the time for a connection is longer. A
/// limit of no streams counts as none.
const SETTINGS_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the peer of a connection with open streams may be silent before the proxy sends a
/// SETTINGS frame.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// The silence after which a connection gets no new streams: the peer may be stopped. Open streams stay
/// while the peer's kernel acknowledges what is sent.
const MAX_SILENCE: Duration = Duration::from_secs(20);
/// The time after which the connection of a peer is closed that sends bytes, and acknowledges no
/// SETTINGS frame, or that is silent without open streams.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(40);
/// The time that counts for one check at most. After a longer one the proxy itself was paused, and has
/// read nothing.
const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// A worker's HTTP/2 connections to one endpoint.
pub struct Connections {
    limiter: Rc<Limiter>,
    open: RefCell<Vec<Rc<Connection>>>,
    closed: Cell<bool>,
    /// Serializes dialing: concurrent requests share the connection, or the failure.
    dialing: Mutex<()>,
    dials: Cell<u64>,
    last_failure: RefCell<Option<Failure>>,
    /// The endpoint was silent. New connections carry no stream before it has sent its SETTINGS.
    is_silent: Cell<bool>,
}

/// One connection. Its task ends when the last handle is dropped.
pub(super) struct Connection {
    io: Multiplexed,
    is_peer: bool,
    streams: Rc<Streams>,
    /// A stream on the connection has ended. The peer may have closed the connection since.
    reused: Cell<bool>,
    /// A request has told the peer its exchange.
    announced: Cell<bool>,
    /// When the peer's SETTINGS must have arrived.
    settings_deadline: Instant,
    /// The peer is silent: the connection accepts no new streams.
    silent: Cell<bool>,
    health: RefCell<Health>,
    lifetime: Option<Lifetime>,
    /// The lifetime is over: the connection accepts no new streams.
    retired: Cell<bool>,
    /// The slot that the connection is charged to: the connection outlives the exchanges that it
    /// serves.
    slot: Rc<ConnectionSlot>,
    task: AbortHandle,
}

/// The liveness of a connection, updated by [`Connections::maintain`].
struct Health {
    bytes_read: u64,
    checked: Instant,
    /// The time since the connection received bytes, or had no streams.
    silence: Duration,
    /// The SETTINGS frame that is not acknowledged, and for how long.
    unread: (Option<Instant>, Duration),
    last_used: Instant,
}

/// A slot for one stream on a connection. Released on drop, or when the peer has read the reset of
/// the stream.
pub struct Lease {
    connection: Rc<Connection>,
    slot: Option<StreamSlot>,
    /// The stream was opened. Unless its end is recorded, it is reset on drop.
    is_open: Cell<bool>,
    /// The number of streams when it was opened. 0: the peer's limit was not known.
    opened_as: Cell<usize>,
}

/// The resources that one stream occupies.
struct StreamSlot {
    streams: Rc<Streams>,
    /// The request is in flight.
    _request: Slot,
    /// The places of the client whose request it is.
    places: Option<Rc<dyn Places>>,
}

/// The places for requests of one client.
pub trait Places {
    /// Takes one until the result is dropped, also while all are taken.
    fn keep(self: Rc<Self>) -> Box<dyn Any>;
}

impl Connections {
    pub(super) fn new(limiter: Rc<Limiter>) -> Self {
        Self {
            limiter,
            open: RefCell::default(),
            closed: Cell::new(false),
            dialing: Mutex::default(),
            dials: Cell::new(0),
            last_failure: RefCell::default(),
            is_silent: Cell::new(false),
        }
    }

    /// Acquires a slot for a stream. Opens a connection if no open one has a free slot, and waits
    /// if there are as many as the endpoint may have. A new one is charged to the caller.
    pub(super) async fn lease(
        &self,
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
        // Boxed: most requests find one.
        let connection = Box::pin(self.connection(remote, dialer, expiry, false));
        Ok(Lease::new(connection.await?, request))
    }

    /// A connection with a free slot, an open one or a new one. `has_waited`: no earlier request
    /// waits.
    async fn connection(
        &self,
        remote: &Remote,
        dialer: Dialer<'_>,
        expiry: impl FnOnce(&Io) -> Expiry,
        has_waited: bool,
    ) -> Result<Rc<Connection>, Failure> {
        let dials = self.dials.get();
        let timed_out = |_| Failure::NoSettings(remote.address);
        let guard = timeout_at(dialer.deadline, self.dialing.lock()).await;
        let guard = guard.map_err(timed_out)?;
        let mut found = self.find(has_waited);
        if found.is_none()
            && let Some(unsettled) = self.unsettled()
        {
            let settled = timeout_at(dialer.deadline, unsettled.settled()).await;
            settled.map_err(timed_out)?;
            self.is_silent.set(false);
            found = self.find(has_waited);
        }
        if let Some(connection) = found {
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
                None => Box::pin(self.connection(remote, dialer, expiry, true)).await,
            };
        }
        if let (true, Some(failure)) = (self.dials.get() != dials, &*self.last_failure.borrow()) {
            return Err(failure.clone());
        }
        let dialed = open(remote, dialer, expiry, &self.limiter).await;
        self.dials.set(self.dials.get() + 1);
        self.last_failure.replace(dialed.as_ref().err().cloned());
        let connection = dialed?;
        if !self.closed.get() {
            self.open.borrow_mut().push(connection.clone());
        }
        if self.is_silent.get() {
            let settled = timeout_at(dialer.deadline, connection.settled()).await;
            settled.map_err(timed_out)?;
            self.is_silent.set(false);
        }
        Ok(connection)
    }

    /// Closes idle connections, retires those whose lifetime is over, and checks the liveness of
    /// the others. The worker calls it every few seconds.
    pub fn maintain(&self, now: Instant) {
        self.open.borrow_mut().retain(|connection| {
            let stays = connection.maintain(now);
            if connection.silent.get() {
                self.is_silent.set(true);
            }
            stays
        });
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

    /// Whether the peers of all open connections have told how many streams they accept.
    #[cfg(test)]
    pub fn is_settled(&self) -> bool {
        self.unsettled().is_none()
    }

    fn is_full(&self) -> bool {
        self.len() >= self.limiter.limits.http2_connections as usize
    }

    /// A connection whose peer has not told how many streams it accepts.
    fn unsettled(&self) -> Option<Rc<Connection>> {
        let open = self.open.borrow();
        let unsettled = open.iter().find(|connection| !connection.is_settled());
        unsettled.cloned()
    }

    /// Whether the next free slot is for a request that `has_waited`, or has not.
    fn is_turn(&self, has_waited: bool) -> bool {
        has_waited || !self.limiter.has_queue(LimitKind::Http2Connections)
    }

    /// The first connection that has a free slot, so that the later ones become idle. Drops closed
    /// connections. `None` while earlier requests wait, unless the request `has_waited`.
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
        if self.retired.get() || self.silent.get() || self.slot.is_asked_to_end() {
            return Capacity::Exhausted;
        }
        let open = self.streams.open.get();
        self.io.with(|connection| {
            if !connection.accepts_streams() {
                // It has failed, or the peer has sent GOAWAY.
                return Capacity::Closed;
            }
            let max_streams = connection.max_streams();
            let max_streams = max_streams.map_or(INITIAL_MAX_STREAMS, |max| max as usize);
            if open < max_streams {
                Capacity::Available
            } else {
                Capacity::Exhausted
            }
        })
    }

    /// Whether the peer has told that it accepts streams, or the connection has ended.
    fn is_settled(&self) -> bool {
        let told = |max_streams| max_streams > 0;
        self.io.with(|connection| {
            !connection.accepts_streams() || connection.max_streams().is_some_and(told)
        })
    }

    /// Waits until the peer has told how many streams it accepts, or the connection has ended.
    async fn settled(&self) {
        poll_fn(|cx| {
            if self.is_settled() {
                return Poll::Ready(());
            }
            self.io.wake_at_settings(cx);
            Poll::Pending
        })
        .await;
    }

    /// Keeps `kept` until the peer has read all that was sent so far, or the connection has ended.
    fn keep_until_read(&self, kept: impl Any) {
        self.streams.keep_until_read(&self.io, Box::new(kept));
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
        if !self.is_settled() && now >= self.settings_deadline {
            self.silent.set(true);
            return self.abort("the peer has sent no SETTINGS frame");
        }
        let health = &mut *self.health.borrow_mut();
        health.update(now, self.io.bytes_read(), &self.streams);
        if self.streams.open.get() == 0 {
            health.silence = Duration::ZERO;
            self.slot.set(Class::BetweenExchanges);
            let idle = now.saturating_duration_since(health.last_used);
            return !self.retired.get() && idle < IDLE_TIMEOUT;
        }
        health.last_used = now;
        if health.silence >= PROBE_INTERVAL && health.unread.0.is_none() {
            self.keep_until_read(());
        }
        self.silent.set(health.silence >= MAX_SILENCE);
        if health.unread.1 >= UNREAD_TIMEOUT {
            return self.abort("the peer acknowledges no SETTINGS frame");
        }
        if health.silence >= UNREAD_TIMEOUT && self.streams.live.get() == 0 {
            return self.abort("the peer is silent");
        }
        true
    }

    /// Closes the connection. Returns that it does not stay in the pool.
    fn abort(&self, reason: &str) -> bool {
        tracing::debug!("upstream connection closed: {reason}");
        self.task.abort();
        self.io.release();
        false
    }
}

impl Health {
    /// Counts the time since the last check.
    fn update(&mut self, now: Instant, bytes_read: u64, streams: &Streams) {
        let passed = now.saturating_duration_since(self.checked);
        let passed = passed.min(MAX_CHECK_INTERVAL);
        self.checked = now;
        if bytes_read == self.bytes_read {
            self.silence += passed;
        } else {
            (self.bytes_read, self.silence) = (bytes_read, Duration::ZERO);
        }
        let unread_since = streams.unread_since.get();
        // A peer that is silent reads nothing.
        let is_same = unread_since.is_some() && unread_since == self.unread.0;
        if is_same && self.silence < MAX_SILENCE {
            self.unread.1 += passed;
        } else {
            self.unread = (unread_since, Duration::ZERO);
        }
    }
}

impl Lease {
    fn new(connection: Rc<Connection>, request: Slot) -> Self {
        let streams = connection.streams.clone();
        streams.open.set(streams.open.get() + 1);
        streams.live.set(streams.live.get() + 1);
        connection.slot.touch();
        connection.io.open_streams(streams.open.get());
        Self {
            connection,
            slot: Some(StreamSlot {
                streams,
                _request: request,
                places: None,
            }),
            is_open: Cell::new(false),
            opened_as: Cell::new(0),
        }
    }

    /// Opens the stream. If it is reset, it has one of these places until the peer has read the reset.
    pub fn send(
        &mut self,
        request: &Request,
        end_of_stream: bool,
        places: Option<Rc<dyn Places>>,
    ) -> Result<(Sender, Receiver), Error> {
        let io = &self.connection.io;
        let opened = io.streams().open(request, end_of_stream)?;
        if let Some(slot) = &mut self.slot {
            slot.places = places;
        }
        self.is_open.set(true);
        if io.is_settled() {
            self.opened_as.set(self.connection.streams.open.get());
        }
        Ok(opened)
    }

    /// Whether the peer may have refused the stream because of a limit that it had not told before.
    pub fn was_over_limit(&self) -> bool {
        let limit = self
            .connection
            .io
            .with(|connection| connection.max_streams());
        let limit = limit.map_or(INITIAL_MAX_STREAMS, |max| max as usize);
        let opened_as = self.opened_as.get();
        opened_as == 0 || opened_as > limit
    }

    /// Whether the peer has sent SETTINGS that accept streams.
    pub fn is_settled(&self) -> bool {
        self.connection.io.is_settled()
    }

    /// The stream has ended on both sides, or the peer has reset it.
    pub fn record_end(&self) {
        self.is_open.set(false);
    }

    /// The connection.
    pub fn io(&self) -> &Multiplexed {
        &self.connection.io
    }

    /// Whether the connection has mutual TLS: the peer is an authenticated proxy.
    pub fn is_peer(&self) -> bool {
        self.connection.is_peer
    }

    /// Whether the peer accepts extended CONNECT requests (RFC 8441), which open WebSockets.
    pub fn supports_extended_connect(&self) -> bool {
        let io = &self.connection.io;
        io.with(|connection| connection.accepts_connect_protocol())
    }

    /// Waits until the peer's SETTINGS have arrived. Returns false if the connection has ended.
    pub async fn settled(&self) -> bool {
        self.connection.settled().await;
        !matches!(self.connection.capacity(), Capacity::Closed)
    }

    /// Whether the peer has accepted the TLS handshake.
    pub fn acceptance(&self) -> Acceptance {
        self.connection.io.acceptance()
    }

    /// The request tells the peer its exchange. Returns whether it is the first one on the connection.
    pub fn take_first_announcement(&self) -> bool {
        !self.connection.announced.replace(true)
    }

    /// Whether the connection has carried another stream before.
    pub fn is_reused(&self) -> bool {
        self.connection.reused.get()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let connection = &self.connection;
        let streams = &connection.streams;
        connection.reused.set(true);
        streams.live.set(streams.live.get() - 1);
        let slot = self.slot.take();
        if self.is_open.get() {
            let place = slot.as_ref().and_then(|slot| slot.places.clone());
            connection.keep_until_read((slot, place.map(Places::keep)));
        } else {
            drop(slot);
        }
        if streams.open.get() == 0 {
            connection.slot.set(Class::BetweenExchanges);
            connection.health.borrow_mut().last_used = Instant::now();
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.streams.is_unused.set(true);
        self.io.with(|connection| connection.wake());
    }
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        let streams = &self.streams;
        streams.open.set(streams.open.get() - 1);
        streams.limiter.release(LimitKind::Http2Connections);
    }
}

/// Opens a connection and starts its task. `expiry` completes when the connection has to be reset.
/// It is charged to the caller.
async fn open(
    remote: &Remote,
    dialer: Dialer<'_>,
    expiry: impl FnOnce(&Io) -> Expiry,
    limiter: &Rc<Limiter>,
) -> Result<Rc<Connection>, Failure> {
    let address = remote.address;
    let slot = Rc::new(dialer.slot.beside());
    let mut memory = Charge::new(slot.clone());
    let streams = Rc::new(Streams::new(limiter.clone()));
    memory.begin(CONNECTION_COST)?;
    let mut io = dialer.dial(remote, Alpn::Http2).await?;
    io.count(limiter.count_connection());
    let is_peer = io.is_peer();
    let lifetime = io.lifetime().copied();
    let mut expiry = expiry(&io);
    let config = config(Role::Client, stream_window(slot.max_bytes()));
    let io = Multiplexed::new(io, memory, config);
    let task = tokio::task::spawn_local({
        let (slot, driven) = (slot.clone(), Driven(io.clone(), streams.clone()));
        async move {
            let Driven(io, streams) = &driven;
            let ended = io.drive(|cx| {
                if io.overload().is_some() {
                    tracing::debug!(%address, "upstream connection reset: no memory is left for it");
                    io.reset_on_drop();
                    return Poll::Ready(());
                }
                if Pin::new(&mut expiry).poll(cx).is_ready() {
                    io.reset_on_drop();
                    return Poll::Ready(());
                }
                streams.release_read(io);
                if let Some(error) = io.ended() {
                    tracing::debug!(%address, "upstream connection ended: {error}");
                    return Poll::Ready(());
                }
                let is_over = |io: &Multiplexed| {
                    io.with(|connection| !connection.accepts_streams() && !connection.has_streams())
                };
                if streams.is_unused.get() || is_over(io) {
                    let closed = |connection: &mut diy_mesh_http2::Connection| {
                        connection.close(ErrorCode::NO_ERROR, &Error::Closed);
                    };
                    io.with(closed);
                    return Poll::Ready(());
                }
                Poll::Pending
            });
            match slot.run(pin!(ended)).await {
                None => io.reset_on_drop(),
                Some(()) => io.shut_down().await,
            }
        }
    });
    let now = Instant::now();
    let health = Health {
        bytes_read: 0,
        checked: now,
        silence: Duration::ZERO,
        unread: (None, Duration::ZERO),
        last_used: now,
    };
    Ok(Rc::new(Connection {
        io,
        is_peer,
        streams,
        reused: Cell::new(false),
        announced: Cell::new(false),
        settings_deadline: now + dialer.timeout.max(SETTINGS_TIMEOUT),
        silent: Cell::new(false),
        health: RefCell::new(health),
        lifetime,
        retired: Cell::new(false),
        slot,
        task: task.abort_handle(),
    }))
}

/// A connection whose task runs. When the task ends, also because the connection has to end at once, all
/// streams end, and nothing is kept: a kept value refers to the streams.
struct Driven(Multiplexed, Rc<Streams>);

impl Drop for Driven {
    fn drop(&mut self) {
        let Self(io, streams) = self;
        io.release();
        drop(streams.unread.take());
    }
}

/// The limits of a connection whose streams have these windows.
pub fn config(role: Role, stream_window: u32) -> Config {
    Config {
        role,
        max_streams: MAX_STREAMS,
        stream_window,
        connection_window: CONNECTION_WINDOW,
        max_fields: MAX_SECTION as u32,
        max_block: MAX_BLOCK,
        max_output: MAX_OUTPUT,
        enable_connect_protocol: false,
    }
}

/// The flow-control window of the streams to endpoints, given the memory for all connections.
fn stream_window(memory: usize) -> u32 {
    let share = memory / STREAMS_OF_MEMORY;
    share.clamp(MIN_WINDOW as usize, STREAM_WINDOW as usize) as u32
}

/// The streams of a connection, shared with its task.
struct Streams {
    limiter: Rc<Limiter>,
    /// Open ones, and those whose reset the peer has not read.
    open: Cell<usize>,
    /// Those that are not reset.
    live: Cell<usize>,
    /// The connection is not in the pool, and has no streams.
    is_unused: Cell<bool>,
    /// The values that are dropped when the peer has acknowledged this number of SETTINGS frames.
    unread: RefCell<VecDeque<(u64, Box<dyn Any>)>>,
    /// Since when a SETTINGS frame has to be acknowledged.
    unread_since: Cell<Option<Instant>>,
}

impl Streams {
    fn new(limiter: Rc<Limiter>) -> Self {
        Self {
            limiter,
            open: Cell::new(0),
            live: Cell::new(0),
            is_unused: Cell::new(false),
            unread: RefCell::default(),
            unread_since: Cell::new(None),
        }
    }

    /// Keeps a value until the peer has read all that was sent so far, or the connection has ended. The peer
    /// acknowledges a SETTINGS frame after it has processed the frames before (RFC 9113, section 6.5.3).
    /// PING frames would show the same, but gRPC servers close a connection with more than two of them in
    /// five minutes in which they send no response.
    fn keep_until_read(&self, io: &Multiplexed, value: Box<dyn Any>) {
        if io.ended().is_some() {
            return;
        }
        let number = io.with(|connection| match connection.settings() {
            (sent, acknowledged) if sent == acknowledged => connection.probe(),
            (sent, _) => sent + 1,
        });
        let unread = &mut *self.unread.borrow_mut();
        if unread.is_empty() {
            self.unread_since.set(Some(Instant::now()));
        }
        unread.push_back((number, value));
    }

    /// Drops the values whose frames the peer has read. One SETTINGS frame at a time waits for its
    /// acknowledgment.
    fn release_read(&self, io: &Multiplexed) {
        let next = || {
            let unread = self.unread.borrow();
            unread.front().map(|(number, _)| *number)
        };
        let Some(mut number) = next() else {
            return;
        };
        let (sent, acknowledged) = io.with(|connection| connection.settings());
        if number > acknowledged && sent > acknowledged {
            return;
        }
        while number <= acknowledged {
            let read = self.unread.borrow_mut().pop_front();
            drop(read);
            match next() {
                Some(next) => number = next,
                None => return self.unread_since.set(None),
            }
        }
        self.unread_since.set(Some(Instant::now()));
        if sent == acknowledged {
            io.with(|connection| connection.probe());
        }
    }
}
