//! Write batching for HTTP/2 connections: the frames that all streams produce in one poll of the
//! connection's task are written with one system call. `h2` flushes after each larger frame.
//! [`Batched`] ignores these flushes, and [`Batched::drive`] writes at the end of each poll. This
//! module does not parse frames. It passes what it reads through [`Frames`].
//!
//! It also bounds and charges what waits for a peer that does not read, whatever flow-control windows
//! the peer grants: bodies that `h2` queues ([`Queued`]), streams that ended, the write buffer, and
//! the buffers of the connection.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::timeout;

use super::frames::{Frames, PREFACE_LENGTH};
use crate::error::Failure;
use crate::limits::memory::{Charge, max_read};
use crate::secure::io::Io;
use crate::secure::tls::Acceptance;

/// The maximum number of buffered bytes. Above it, a write waits for the socket.
const MAX_BUFFERED: usize = 64 * 1024;
/// The maximum number of bytes of bodies that `h2` queues for one connection: short ones of a hundred
/// streams do not wait for each other.
const MAX_QUEUED: usize = 128 * 1024;
/// The maximum number of queued bytes to which a body is added without flow-control capacity: others
/// have room while a receiver grants none.
pub const MAX_UNRESERVED_QUEUED: usize = MAX_QUEUED / 4 * 3;
/// Waiting bytes are charged in steps of this size until they are written.
const QUEUE_STEP: usize = 4 * 1024;
/// The capacity that a connection may own without using it while it waits for the socket.
const MAX_UNUSED_CAPACITY: usize = 16 * 1024;
/// The maximum capacity of a buffer that is kept for reuse.
const MAX_SPARE_CAPACITY: usize = 2 * MAX_BUFFERED;
/// The maximum number of bytes that are read in one poll of the connection's task: then the tasks of
/// the streams take what `h2` has queued for them.
const MAX_READ_PER_POLL: usize = 256 * 1024;
/// How long [`Batched::linger`] reads.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);
/// How many bytes [`Batched::linger`] reads.
const MAX_LINGER_BYTES: usize = 4 * 1024 * 1024;

thread_local! {
    /// The write buffer of all connections of a worker. A connection usually fills and empties it
    /// in one poll.
    static SPARE_BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A handle to the connection. `h2` has one, and the connection's task has another.
#[derive(Clone)]
pub struct Batched(Rc<RefCell<Inner>>, Rc<Queue>);

/// The bytes that `h2` has not passed to the write buffer.
#[derive(Default)]
struct Queue {
    /// Bytes of bodies.
    bytes: Cell<usize>,
    /// The memory of streams that have ended.
    ended: Cell<usize>,
    /// Tasks that wait for room.
    waiting: RefCell<Vec<Waker>>,
    /// Tasks that wait for the peer's SETTINGS.
    unsettled: RefCell<Vec<Waker>>,
}

/// Bytes of a body. They count as queued until `h2` has written or dropped them.
pub struct Queued {
    bytes: Bytes,
    queue: Rc<Queue>,
}

struct Inner {
    io: Io,
    buffer: Vec<u8>,
    /// The number of bytes of `buffer` that were written.
    written: usize,
    bytes_read: u64,
    /// The number of bytes that may still be read in this poll.
    left_to_read: usize,
    frames: Frames,
    /// The number of bytes of [`Io::unread`] that are complete frames.
    complete: usize,
    /// Charged for the connection, and for the bytes that wait for its peer.
    memory: Charge,
    /// The bytes that were charged at first.
    cost: usize,
    /// The most streams that were open at once.
    streams: usize,
    /// The memory that the connection needs is not left.
    overload: Option<Failure>,
}

/// The memory that `h2` keeps for each stream, also for later ones: for as many as were open at
/// once.
const STREAM_STATE: usize = 512;

impl Batched {
    /// A handle to a connection to a server, for which `memory` has been charged already.
    pub fn to_server(io: Io, memory: Charge) -> Self {
        Self::new(io, memory, Frames::after(0))
    }

    /// A handle to the connection of a client, which begins with a preface.
    pub fn of_client(io: Io, memory: Charge) -> Self {
        Self::new(io, memory, Frames::after(PREFACE_LENGTH))
    }

    fn new(mut io: Io, memory: Charge, mut frames: Frames) -> Self {
        let inner = Inner {
            bytes_read: 0,
            complete: frames.filter(io.unread()),
            io,
            buffer: Vec::new(),
            written: 0,
            left_to_read: MAX_READ_PER_POLL,
            frames,
            cost: memory.amount(),
            streams: 0,
            memory,
            overload: None,
        };
        Self(Rc::new(RefCell::new(inner)), Rc::default())
    }

    /// Polls `step`, which drives `h2`, and writes the bytes that it buffered. Then charges what still
    /// waits for the peer. If that fails, `step` has to end, as [`Batched::overload`] tells: at once,
    /// because it holds until then what it may not.
    pub async fn drive<T>(&self, mut step: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
        let mut step = |cx: &mut Context<'_>| {
            self.0.borrow_mut().left_to_read = MAX_READ_PER_POLL;
            step(cx)
        };
        poll_fn(|cx| match (step(cx), self.charge(cx)) {
            (Poll::Pending, Err(failure)) => {
                self.0.borrow_mut().overload = Some(failure);
                step(cx)
            }
            (result, _) => result,
        })
        .await
    }

    fn charge(&self, cx: &mut Context<'_>) -> Result<(), Failure> {
        let Self(inner, queue) = self;
        let inner = &mut *inner.borrow_mut();
        // After a write error, the next read or write of `h2` fails too.
        if inner.poll_write_out(cx).is_ready() {
            queue.ended.set(0);
        }
        let held = inner.buffer.capacity() + inner.io.buffered();
        let held = inner.base() + held + queue.bytes.get() + queue.ended.get();
        if queue.bytes.get() <= MAX_QUEUED / 2 {
            queue.waiting.take().into_iter().for_each(Waker::wake);
        }
        inner.memory.hold(held)
    }

    /// Why the connection has to end, if no memory is left for it.
    pub fn overload(&self) -> Option<Failure> {
        self.0.borrow().overload.clone()
    }

    /// Waits until `h2` may queue this many further bytes of a body. While the memory is short, one
    /// body at a time.
    pub fn poll_room(&self, cx: &Context<'_>, length: usize) -> Poll<()> {
        let Self(inner, queue) = self;
        let queued = queue.bytes.get();
        let is_left = || {
            let inner = &mut *inner.borrow_mut();
            let held = inner.base() + queued + length;
            inner.memory.try_grow(held.next_multiple_of(QUEUE_STEP))
        };
        if queued == 0 || queued + length <= MAX_QUEUED && is_left() {
            return Poll::Ready(());
        }
        queue.waiting.borrow_mut().push(cx.waker().clone());
        Poll::Pending
    }

    /// The number of bytes of bodies that `h2` has queued.
    pub fn queued(&self) -> usize {
        self.1.bytes.get()
    }

    /// Counts bytes of a body, for `h2`.
    pub fn queue(&self, bytes: Bytes) -> Queued {
        let queue = self.1.clone();
        queue.bytes.set(queue.bytes.get() + bytes.len());
        Queued { bytes, queue }
    }

    /// Counts the memory of a stream that has ended until all frames are written.
    pub fn queue_ended(&self, memory: usize) {
        let ended = &self.1.ended;
        ended.set(ended.get() + memory);
    }

    /// Reads and discards the peer's bytes for a short time, so that the peer receives the GOAWAY
    /// frame.
    pub async fn linger(&self) {
        let mut left = MAX_LINGER_BYTES;
        let discarded = poll_fn(|cx| self.0.borrow_mut().io.poll_discard(cx, &mut left));
        // A peer that is still sending then receives a reset.
        let _ = timeout(LINGER_TIMEOUT, discarded).await;
    }

    /// The connection has ended: it holds nothing, however long there are handles to it.
    pub fn release(&self) {
        let inner = &mut *self.0.borrow_mut();
        inner.buffer = Vec::new();
        // Never fails: it does not grow.
        let _ = inner.memory.hold(0);
        self.1.unsettled.take().into_iter().for_each(Waker::wake);
    }

    /// Whether the peer has sent too large a header block: the connection has to end.
    pub fn is_over_limit(&self) -> bool {
        self.0.borrow().frames.is_over_limit()
    }

    /// Whether the peer's SETTINGS have arrived.
    pub fn is_settled(&self) -> bool {
        self.0.borrow().frames.settings() > 0
    }

    /// The task wakes when a SETTINGS frame of the peer has arrived, or the connection has ended.
    pub fn wake_at_settings(&self, cx: &Context<'_>) {
        self.1.unsettled.borrow_mut().push(cx.waker().clone());
    }

    /// Charges the connection for this many streams that are open at once, until it ends.
    pub fn open_streams(&self, count: usize) {
        let inner = &mut *self.0.borrow_mut();
        inner.streams = inner.streams.max(count);
    }

    /// Makes the connection end with a reset when it is dropped.
    pub fn reset_on_drop(&self) {
        self.0.borrow().io.reset_on_drop();
    }

    /// Whether the peer has accepted the TLS handshake.
    pub fn acceptance(&self) -> Acceptance {
        self.0.borrow().io.acceptance()
    }

    /// The number of bytes that `h2` has read so far.
    pub fn bytes_read(&self) -> u64 {
        self.0.borrow().bytes_read
    }
}

impl Inner {
    /// The bytes that the connection holds when nothing waits for its peer.
    fn base(&self) -> usize {
        self.cost + self.streams * STREAM_STATE
    }

    /// Writes the buffered bytes. Pending while the socket's send buffer is full.
    fn poll_write_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.buffer.len() {
            let unwritten = &self.buffer[self.written..];
            let Poll::Ready(written) = Pin::new(&mut self.io).poll_write(cx, unwritten) else {
                if self.buffer.capacity() - unwritten.len() > MAX_UNUSED_CAPACITY {
                    self.buffer = unwritten.to_vec();
                    self.written = 0;
                }
                return Poll::Pending;
            };
            let written = written?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.written += written;
        }
        if self.buffer.capacity() > 0 {
            self.written = 0;
            let mut buffer = std::mem::take(&mut self.buffer);
            if buffer.capacity() <= MAX_SPARE_CAPACITY {
                buffer.clear();
                SPARE_BUFFER.set(buffer);
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Waits until the buffer has room.
    fn poll_capacity(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.buffer.len() >= max_read(MAX_BUFFERED) {
            ready!(self.poll_write_out(cx))?;
        }
        if self.buffer.capacity() == 0 {
            self.buffer = SPARE_BUFFER.take();
        }
        Poll::Ready(Ok(()))
    }
}

impl Buf for Queued {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
        self.queue.bytes.set(self.queue.bytes.get() - count);
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.advance(self.bytes.len());
    }
}

impl AsyncRead for Batched {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let inner = &mut *self.0.borrow_mut();
        while inner.complete == 0 {
            if inner.frames.is_over_limit() {
                // The task of the connection ends it.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if inner.left_to_read == 0 {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let read = ready!(inner.io.poll_fill(cx))?;
            if read == 0 {
                // A frame may be incomplete.
                inner.complete = inner.io.unread().len();
                break;
            }
            inner.left_to_read = inner.left_to_read.saturating_sub(read);
            let before = inner.frames.settings();
            inner.complete = inner.frames.filter(inner.io.unread());
            if inner.frames.settings() > before {
                // These tasks run when `h2` has read the frame.
                self.1.unsettled.take().into_iter().for_each(Waker::wake);
            }
        }
        let unread = inner.io.unread();
        let length = inner.complete.min(buf.remaining());
        buf.put_slice(&unread[..length]);
        unread.advance(length);
        inner.complete -= length;
        inner.bytes_read += length as u64;
        if unread.is_empty() {
            *unread = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Batched {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let inner = &mut *self.0.borrow_mut();
        ready!(inner.poll_capacity(cx))?;
        inner.buffer.extend_from_slice(buf);
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let inner = &mut *self.0.borrow_mut();
        ready!(inner.poll_capacity(cx))?;
        bufs.iter()
            .for_each(|buf| inner.buffer.extend_from_slice(buf));
        Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// `h2` flushes when it has written all of its frames: others may follow.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let inner = &mut *self.0.borrow_mut();
        if inner.buffer.len() < MAX_BUFFERED {
            inner.frames.return_windows(&mut inner.buffer);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let inner = &mut *self.0.borrow_mut();
        ready!(inner.poll_write_out(cx))?;
        Pin::new(&mut inner.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use diy_mesh_testkit::net::connected;

    use super::*;
    use crate::limits::memory::Holder;
    use diy_mesh_runtime::admission::Admission;

    #[tokio::test]
    async fn bodies_wait_while_the_queue_is_full_or_the_memory_is_short() {
        let (stream, far) = connected().await;
        let address = far.local_addr().unwrap();
        let admission = Admission::new(2);
        admission.resize(2, 1024 * 1024);
        let slot = |holder: Holder| Rc::new(admission.admit(&holder.path()).expect("a slot"));
        let charge = Charge::new(slot(Holder::Plaintext(address.ip())));
        let io = Batched::to_server(Io::new(stream), charge);
        let has_room = |length| {
            let task = Context::from_waker(Waker::noop());
            io.poll_room(&task, length).is_ready()
        };
        let body = |length| io.queue(vec![0; length].into());
        let bodies = [MAX_QUEUED / 2 - 2500; 2].map(body);
        assert!(has_room(5000) && !has_room(6000));
        // Bytes that `h2` has written need no room.
        drop(bodies);
        assert_eq!(io.queued(), 0);
        let (mut partly_written, mut other) = (body(10_000), Charge::new(slot(Holder::App)));
        partly_written.advance(6000);
        assert_eq!((io.queued(), partly_written.remaining()), (4000, 4000));
        assert!(has_room(5000));
        io.drive(|_| Poll::Ready(())).await;
        other.hold(admission.max_bytes() - 6000).unwrap();
        assert!(!has_room(5000), "one body at a time");
        drop(partly_written);
        assert!(has_room(5000));
        // The task of a body that waits goes on when the queue has been written.
        let (queued, waits) = (body(10_000), poll_fn(|cx| io.poll_room(cx, 5000)));
        let writes = async {
            tokio::task::yield_now().await;
            drop(queued);
            io.drive(|_| Poll::Ready(())).await;
        };
        tokio::join!(waits, writes);
    }
}
