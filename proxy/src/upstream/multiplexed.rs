//! An HTTP/2 connection with its socket: [`Multiplexed::drive`] passes what arrives to the protocol, of
//! the crate `diy-mesh-http2`, and writes the frames of all streams with one system call.
//!
//! The connection is charged for what waits for a peer that does not read, whatever flow-control windows
//! the peer grants: frames, and the memory of streams that have ended.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use diy_mesh_http2::{Config, Connection, Error, MAX_FRAME, Shared};
use tokio::io::AsyncWrite;
use tokio::time::timeout;

use crate::error::Failure;
use crate::limits::memory::{Charge, max_read};
use crate::secure::io::Io;
use crate::secure::tls::Acceptance;

/// The number of bytes of output above which bodies wait.
pub const MAX_OUTPUT: usize = 64 * 1024;
/// The number of bytes of output above which nothing is read: the peer does not read the answers to its
/// frames.
const MAX_UNREAD_OUTPUT: usize = 4 * MAX_OUTPUT;
/// The maximum number of bytes that are read in one poll of the connection's task: then the tasks of
/// the streams take what has arrived for them.
const MAX_READ_PER_POLL: usize = 256 * 1024;
/// How long the end of a connection takes.
const END_TIMEOUT: Duration = Duration::from_secs(1);
/// How many bytes [`Multiplexed::linger`] reads.
const MAX_LINGER_BYTES: usize = 4 * 1024 * 1024;

/// A handle to the connection.
#[derive(Clone)]
pub struct Multiplexed(Rc<Inner>);

struct Inner {
    streams: Shared,
    socket: RefCell<Socket>,
    /// The memory of streams that have ended, and whose frames are not written.
    ended: Cell<usize>,
    /// Tasks that wait for the peer's SETTINGS.
    unsettled: RefCell<Vec<Waker>>,
}

struct Socket {
    io: Io,
    /// The start of a frame.
    rest: Vec<u8>,
    bytes_read: u64,
    /// Charged for the connection, and for the bytes that wait for its peer.
    memory: Charge,
    /// The bytes that were charged at first.
    cost: usize,
    /// The most streams that were open at once.
    streams: usize,
    /// The memory that the connection needs is not left.
    overload: Option<Failure>,
}

/// The memory of a stream.
const STREAM_STATE: usize = 512;

impl Multiplexed {
    /// A connection that begins, for which `memory` has been charged already.
    pub fn new(io: Io, memory: Charge, config: Config) -> Self {
        let socket = Socket {
            io,
            rest: Vec::new(),
            bytes_read: 0,
            cost: memory.amount(),
            memory,
            streams: 0,
            overload: None,
        };
        Self(Rc::new(Inner {
            streams: Shared::new(config),
            socket: RefCell::new(socket),
            ended: Cell::new(0),
            unsettled: RefCell::default(),
        }))
    }

    /// The connection's streams.
    pub fn streams(&self) -> &Shared {
        &self.0.streams
    }

    /// Uses the protocol's state.
    pub fn with<T>(&self, use_it: impl FnOnce(&mut Connection) -> T) -> T {
        self.0.streams.with(use_it)
    }

    /// Reads, polls `step`, which takes what has arrived, and writes, until `step` is ready. Charges
    /// what still waits for the peer. If that fails, `step` has to end, as [`Multiplexed::overload`] tells:
    /// at once, because it holds until then what it may not.
    pub async fn drive<T>(&self, mut step: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
        poll_fn(|cx| {
            self.with(Connection::set_awake);
            self.read(cx);
            let mut result = step(cx);
            self.write(cx);
            if let (true, Err(failure)) = (result.is_pending(), self.charge()) {
                self.0.socket.borrow_mut().overload = Some(failure);
                result = step(cx);
            }
            self.with(|connection| connection.wait(cx));
            result
        })
        .await
    }

    /// Passes what has arrived to the protocol.
    fn read(&self, cx: &mut Context<'_>) {
        let socket = &mut *self.0.socket.borrow_mut();
        let settings = || self.with(|connection| connection.settings_received());
        let settings_before = settings();
        let before = socket.bytes_read;
        while self.with(|connection| {
            connection.ended().is_none() && connection.output().len() < MAX_UNREAD_OUTPUT
        }) {
            if socket.bytes_read - before >= MAX_READ_PER_POLL as u64 {
                cx.waker().wake_by_ref();
                break;
            }
            let (rest, streams) = (&mut socket.rest, &self.0.streams);
            let read = socket.io.poll_read_with(cx, |bytes, _| {
                pass(streams, rest, bytes);
                bytes.len()
            });
            match read {
                Poll::Pending => break,
                Poll::Ready(Ok(0)) => self.with(|connection| connection.end(&Error::Closed)),
                Poll::Ready(Ok(length)) => socket.bytes_read += length as u64,
                Poll::Ready(Err(error)) => {
                    self.with(|connection| connection.end(&Error::Io(error.kind())));
                }
            }
        }
        let has_ended = self.with(|connection| connection.ended().is_some());
        if has_ended || settings() != settings_before {
            self.0.unsettled.take().into_iter().for_each(Waker::wake);
        }
    }

    /// Writes the output as far as the socket takes it.
    fn write(&self, cx: &mut Context<'_>) {
        let socket = &mut *self.0.socket.borrow_mut();
        self.with(|connection| connection.set_max_output(max_read(MAX_OUTPUT)));
        if let Poll::Ready(written) = self.poll_write(socket, cx) {
            self.0.ended.set(0);
            if let Err(error) = written {
                self.with(|connection| connection.end(&Error::Io(error.kind())));
            }
        }
    }

    /// Ready when the output is written.
    fn poll_write(&self, socket: &mut Socket, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with(|connection| {
            while !connection.output().is_empty() {
                let written = Pin::new(&mut socket.io).poll_write(cx, connection.output());
                match ready!(written)? {
                    0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                    written => connection.record_written(written),
                }
            }
            connection.return_buffer();
            Poll::Ready(Ok(()))
        })
    }

    fn charge(&self) -> Result<(), Failure> {
        let socket = &mut *self.0.socket.borrow_mut();
        let protocol = self.with(|connection| connection.buffered());
        let buffers = protocol + socket.rest.capacity() + socket.io.buffered();
        let state = socket.cost + socket.streams * STREAM_STATE;
        socket.memory.hold(state + buffers + self.0.ended.get())
    }

    /// Why the connection has to end, if no memory is left for it.
    pub fn overload(&self) -> Option<Failure> {
        self.0.socket.borrow().overload.clone()
    }

    /// Why the connection has ended.
    pub fn ended(&self) -> Option<Error> {
        self.with(|connection| connection.ended().cloned())
    }

    /// Counts the memory of a stream that has ended until all frames are written.
    pub fn queue_ended(&self, memory: usize) {
        self.0.ended.set(self.0.ended.get() + memory);
    }

    /// Writes what is left, and closes the connection.
    pub async fn shut_down(&self) {
        let shut_down = poll_fn(|cx| {
            let socket = &mut *self.0.socket.borrow_mut();
            ready!(self.poll_write(socket, cx))?;
            Pin::new(&mut socket.io).poll_shutdown(cx)
        });
        // The socket is closed in any case.
        let _ = timeout(END_TIMEOUT, shut_down).await;
    }

    /// Reads and discards the peer's bytes for a short time, so that the peer receives the GOAWAY
    /// frame.
    pub async fn linger(&self) {
        let mut left = MAX_LINGER_BYTES;
        let discarded = poll_fn(|cx| {
            let socket = &mut *self.0.socket.borrow_mut();
            // The rest is discarded either way.
            let _ = self.poll_write(socket, cx);
            socket.io.poll_discard(cx, &mut left)
        });
        // A peer that is still sending then receives a reset.
        let _ = timeout(END_TIMEOUT, discarded).await;
    }

    /// The connection has ended: it holds nothing, however long there are handles to it.
    pub fn release(&self) {
        self.with(|connection| connection.end(&Error::Closed));
        let socket = &mut *self.0.socket.borrow_mut();
        socket.rest = Vec::new();
        // Never fails: it does not grow.
        let _ = socket.memory.hold(0);
        self.0.unsettled.take().into_iter().for_each(Waker::wake);
    }

    /// Whether the peer's SETTINGS have arrived.
    pub fn is_settled(&self) -> bool {
        self.with(|connection| connection.is_settled())
    }

    /// The task wakes when SETTINGS of the peer have arrived, or the connection has ended.
    pub fn wake_at_settings(&self, cx: &Context<'_>) {
        self.0.unsettled.borrow_mut().push(cx.waker().clone());
    }

    /// Charges the connection for this many streams that are open at once, until it ends.
    pub fn open_streams(&self, count: usize) {
        let socket = &mut *self.0.socket.borrow_mut();
        socket.streams = socket.streams.max(count);
    }

    /// Makes the connection end with a reset when it is dropped.
    pub fn reset_on_drop(&self) {
        self.0.socket.borrow().io.reset_on_drop();
    }

    /// Whether the peer has accepted the TLS handshake.
    pub fn acceptance(&self) -> Acceptance {
        self.0.socket.borrow().io.acceptance()
    }

    /// The number of bytes that have arrived.
    pub fn bytes_read(&self) -> u64 {
        self.0.socket.borrow().bytes_read
    }
}

/// Passes bytes to the protocol, after the bytes of an incomplete frame. Keeps the start of the next one.
fn pass(streams: &Shared, rest: &mut Vec<u8>, mut bytes: &[u8]) {
    // After a violation, nothing is left to read.
    let receive = |bytes: &[u8]| {
        let received = streams.with(|connection| connection.receive(bytes));
        received.unwrap_or(bytes.len())
    };
    if !rest.is_empty() {
        let before = rest.len();
        rest.extend_from_slice(&bytes[..bytes.len().min(MAX_FRAME - before)]);
        let taken = receive(rest);
        if taken == 0 {
            return;
        }
        bytes = &bytes[taken.saturating_sub(before)..];
        *rest = Vec::new();
    }
    let taken = receive(bytes);
    rest.extend_from_slice(&bytes[taken..]);
}
