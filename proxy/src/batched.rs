//! Write batching for HTTP/2 connections: the frames that all streams produce in one poll of the
//! connection's task are written with one system call. `h2` flushes after each larger frame.
//! [`Batched`] ignores these flushes, and [`Batched::drive`] writes at the end of each poll. This
//! module does not parse frames.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::timeout;

use crate::io::Io;
use crate::tls::Acceptance;

/// The maximum number of buffered bytes. Above it, a write waits for the socket.
const MAX_BUFFERED: usize = 64 * 1024;
/// The maximum capacity of a buffer that is kept for reuse.
const MAX_SPARE_CAPACITY: usize = 2 * MAX_BUFFERED;
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
pub struct Batched(Rc<RefCell<Inner>>);

struct Inner {
    io: Io,
    buffer: Vec<u8>,
    /// The number of bytes of `buffer` that were written.
    written: usize,
    bytes_read: u64,
}

impl Batched {
    pub fn new(io: Io) -> Self {
        Self(Rc::new(RefCell::new(Inner {
            io,
            buffer: Vec::new(),
            written: 0,
            bytes_read: 0,
        })))
    }

    /// Polls `step`, which drives `h2`, and writes the bytes that it buffered.
    pub async fn drive<T>(&self, mut step: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
        poll_fn(|cx| {
            let result = step(cx);
            // After a write error, the next read or write of `step` fails too.
            let _ = self.0.borrow_mut().poll_write_out(cx);
            result
        })
        .await
    }

    /// Reads and discards the peer's bytes for a short time, so that the peer receives the GOAWAY
    /// frame.
    pub async fn linger(&self) {
        let mut left = MAX_LINGER_BYTES;
        let discarded = poll_fn(|cx| self.0.borrow_mut().io.poll_discard(cx, &mut left));
        // A peer that is still sending then receives a reset.
        let _ = timeout(LINGER_TIMEOUT, discarded).await;
    }

    /// Makes the connection end with a reset when it is dropped.
    pub fn reset_on_drop(&self) {
        self.0.borrow().io.reset_on_drop();
    }

    /// Whether the peer has accepted the TLS handshake.
    pub fn acceptance(&self) -> Acceptance {
        self.0.borrow().io.acceptance()
    }

    /// The number of bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.0.borrow().bytes_read
    }
}

impl Inner {
    /// Writes the buffered bytes. Pending while the socket's send buffer is full.
    fn poll_write_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.buffer.len() {
            let unwritten = &self.buffer[self.written..];
            let written = ready!(Pin::new(&mut self.io).poll_write(cx, unwritten))?;
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
        if self.buffer.len() >= MAX_BUFFERED {
            ready!(self.poll_write_out(cx))?;
        }
        if self.buffer.capacity() == 0 {
            self.buffer = SPARE_BUFFER.take();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Batched {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let inner = &mut *self.0.borrow_mut();
        let before = buf.filled().len();
        ready!(Pin::new(&mut inner.io).poll_read(cx, buf))?;
        inner.bytes_read += (buf.filled().len() - before) as u64;
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

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let inner = &mut *self.0.borrow_mut();
        ready!(inner.poll_write_out(cx))?;
        Pin::new(&mut inner.io).poll_shutdown(cx)
    }
}
