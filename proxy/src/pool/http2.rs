//! The HTTP/2 connections of one worker to one endpoint. Many streams share one; another one is opened
//! when the peer allows no more streams on it. A connection lives in a task of its own.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Ping, PingPong, SendStream};
use http::Request;
use tokio::sync::Mutex;
use tokio::task::AbortHandle;

use crate::batched::Batched;
use crate::connect::{self, Remote};
use crate::error::Failure;
use crate::io::Io;
use crate::lifetime::{Expiry, Lifetime};
use crate::tls::{Alpn, Tls};

/// The maximum size of a header list, counted as in RFC 9113, section 6.5.2.
pub const MAX_HEADER_LIST: u32 = 64 * 1024;
/// The flow-control window of a stream.
pub const STREAM_WINDOW: u32 = 256 * 1024;
/// The flow-control window of a connection: 32 streams whose receivers read nothing.
pub const CONNECTION_WINDOW: u32 = 32 * STREAM_WINDOW;
/// Bytes of one stream that wait to be written.
pub const SEND_BUFFER: usize = 64 * 1024;
/// Streams reset by the proxy whose late frames are not an error.
pub const MAX_RESETS_REMEMBERED: usize = 200;

/// Connections to one endpoint; where all of them are full, streams are turned away.
const MAX_CONNECTIONS: usize = 64;
/// Streams that a peer is taken to allow until it has said how many.
const ASSUMED_MAX_STREAMS: usize = 100;
/// A connection that no stream has used for this long is closed.
const KEEP_IDLE: Duration = Duration::from_secs(60);
/// A connection with open streams on which nothing was read for this long is pinged, and given up after twice that.
const SILENCE: Duration = Duration::from_secs(20);

/// A worker's HTTP/2 connections to one endpoint.
#[derive(Default)]
pub struct Connections {
    open: RefCell<Vec<Rc<Connection>>>,
    closed: Cell<bool>,
    /// One dials, the others wait for what comes of it.
    dialing: Mutex<()>,
    dials: Cell<u64>,
    last_dial: RefCell<Option<Failure>>,
}

/// One connection. Its task ends when nobody holds it any more.
pub(super) struct Connection {
    sender: RefCell<SendRequest<Bytes>>,
    is_secured: bool,
    streams: Cell<usize>,
    /// It has carried a stream that has ended, so that it may have died meanwhile.
    reused: Cell<bool>,
    health: RefCell<Health>,
    lifetime: Option<Lifetime>,
    /// It takes no new streams: its lifetime is over.
    retired: Cell<bool>,
    task: AbortHandle,
}

/// What [`Connections::sweep`] looks at.
struct Health {
    io: Batched,
    ping: Option<PingPong>,
    pinged: bool,
    read_bytes: u64,
    /// When it was last seen to be read from, or to be free of streams.
    heard: Instant,
    used: Instant,
}

/// A place for one stream on a connection, given back on drop.
pub struct Lease {
    connection: Rc<Connection>,
}

impl Connections {
    /// A slot for a stream, on a new connection if no open one has one.
    pub(super) async fn lease(
        &self,
        remote: &Remote,
        tls: &Tls,
        expiry: impl FnOnce(&Io) -> Expiry,
    ) -> Result<Lease, Failure> {
        if let Some(lease) = self.find() {
            return Ok(lease);
        }
        let dials = self.dials.get();
        let _turn = self.dialing.lock().await;
        if let Some(lease) = self.find() {
            return Ok(lease);
        }
        if let (true, Some(failure)) = (self.dials.get() != dials, &*self.last_dial.borrow()) {
            return Err(failure.clone());
        }
        if self.open.borrow().len() >= MAX_CONNECTIONS {
            return Err(Failure::Overloaded("too many streams to one endpoint"));
        }
        let dialed = open(remote, tls, expiry).await;
        self.dials.set(self.dials.get() + 1);
        self.last_dial.replace(dialed.as_ref().err().cloned());
        let connection = dialed?;
        if !self.closed.get() {
            self.open.borrow_mut().push(connection.clone());
        }
        Ok(Lease::new(connection))
    }

    /// Looks after the connections: to be called every few seconds. Idle ones are closed, silent ones pinged and given up, and those
    /// whose lifetime is over get no new streams.
    pub fn sweep(&self, now: Instant) {
        self.open
            .borrow_mut()
            .retain(|connection| connection.is_worth_keeping(now));
    }

    /// Lets go of all connections, and from now on of new ones. Streams under way end in peace.
    pub fn close(&self) {
        self.closed.set(true);
        self.open.take();
    }

    /// How many connections are open.
    pub fn len(&self) -> usize {
        self.open.borrow().len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first connection with room for a stream: those behind it become idle in the end. Dead ones on the way are dropped.
    fn find(&self) -> Option<Lease> {
        let mut open = self.open.borrow_mut();
        let mut index = 0;
        while let Some(connection) = open.get(index) {
            match connection.room() {
                Room::Free => return Some(Lease::new(connection.clone())),
                Room::Full => index += 1,
                Room::Dead => drop(open.remove(index)),
            }
        }
        None
    }
}

enum Room {
    Free,
    Full,
    Dead,
}

impl Connection {
    fn room(&self) -> Room {
        if self.retired.get() {
            return Room::Full;
        }
        let mut sender = self.sender.borrow_mut();
        match sender.poll_ready(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(())) if self.streams.get() < sender.current_max_send_streams() => {
                Room::Free
            }
            Poll::Ready(Ok(())) | Poll::Pending => Room::Full,
            // It is broken, or the peer wants no new streams on it.
            Poll::Ready(Err(_)) => Room::Dead,
        }
    }

    fn is_worth_keeping(&self, now: Instant) -> bool {
        if matches!(self.room(), Room::Dead) {
            return false;
        }
        self.retired.set(
            self.lifetime
                .is_some_and(|lifetime| lifetime.is_retired(now)),
        );
        let health = &mut *self.health.borrow_mut();
        if self.streams.get() == 0 {
            health.heard = now;
            return !self.retired.get() && now.saturating_duration_since(health.used) < KEEP_IDLE;
        }
        health.used = now;
        let keep = health.is_heard(now);
        if !keep {
            tracing::debug!("an upstream connection answers no ping: given up");
            self.task.abort();
        }
        keep
    }
}

impl Health {
    /// False where the peer is gone without a word.
    fn is_heard(&mut self, now: Instant) -> bool {
        let read_bytes = self.io.read_bytes();
        if read_bytes != self.read_bytes {
            (self.read_bytes, self.heard) = (read_bytes, now);
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
        let silence = now.saturating_duration_since(self.heard);
        if silence >= SILENCE && !self.pinged {
            self.pinged = ping.send_ping(Ping::opaque()).is_ok();
        }
        silence < 2 * SILENCE
    }
}

impl Lease {
    pub(super) fn new(connection: Rc<Connection>) -> Self {
        connection.streams.set(connection.streams.get() + 1);
        Self { connection }
    }

    /// Opens the stream.
    pub fn send(
        &self,
        request: Request<()>,
        end_of_stream: bool,
    ) -> Result<(ResponseFuture, SendStream<Bytes>), h2::Error> {
        self.connection
            .sender
            .borrow_mut()
            .send_request(request, end_of_stream)
    }

    /// The connection is a peer's, by mutual TLS.
    pub fn is_secured(&self) -> bool {
        self.connection.is_secured
    }

    /// The peer takes WebSockets in streams (RFC 8441).
    pub fn takes_extended_connect(&self) -> bool {
        self.connection
            .sender
            .borrow()
            .is_extended_connect_protocol_enabled()
    }

    /// The connection has carried a stream before.
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
        if self.connection.streams.get() == 0 {
            self.connection.health.borrow_mut().used = Instant::now();
        }
    }
}

/// Opens a connection.
pub(super) async fn open(
    remote: &Remote,
    tls: &Tls,
    expiry: impl FnOnce(&Io) -> Expiry,
) -> Result<Rc<Connection>, Failure> {
    let address = remote.address;
    let io = connect::dial(remote, Alpn::Http2, tls).await?;
    let is_secured = io.is_secured();
    let lifetime = io.lifetime().copied();
    let mut expiry = expiry(&io);
    let io = Batched::new(io);
    let handshake = h2::client::Builder::new()
        .enable_push(false)
        .initial_max_send_streams(ASSUMED_MAX_STREAMS)
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(MAX_HEADER_LIST)
        .max_concurrent_reset_streams(MAX_RESETS_REMEMBERED)
        .max_send_buffer_size(SEND_BUFFER)
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
                Poll::Ready(()) => {
                    io.reset_on_drop();
                    Poll::Ready(Ok(()))
                }
                Poll::Pending => Pin::new(&mut connection).poll(cx),
            });
            if let Err(error) = ended.await {
                tracing::debug!(%address, "an upstream connection ended: {error}");
            }
        }
    });
    let health = Health {
        io,
        ping,
        pinged: false,
        read_bytes: 0,
        heard: now,
        used: now,
    };
    Ok(Rc::new(Connection {
        sender: RefCell::new(sender),
        is_secured,
        streams: Cell::new(0),
        reused: Cell::new(false),
        health: RefCell::new(health),
        lifetime,
        retired: Cell::new(false),
        task: task.abort_handle(),
    }))
}
