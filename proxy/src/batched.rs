//! A connection whose writes are gathered: what all streams have ready in one turn of the connection's task leaves in one
//! system call. `h2` flushes after each larger frame; here that is only noted, and the task calls [`Batched::poll_drain`] when it
//! has nothing more to do. It knows nothing of frames.

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

/// With that much gathered, a write waits for the socket.
const LIMIT: usize = 64 * 1024;
/// A buffer that grew beyond this is not kept for others.
const KEEP: usize = 2 * LIMIT;
/// How long and how much is still read from a client that was sent away.
const LINGER: Duration = Duration::from_secs(1);
const MAX_LINGER: usize = 4 * 1024 * 1024;

thread_local! {
    /// Emptied in the same turn in which it is filled, mostly: one buffer does for all connections of a worker.
    static SPARE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A handle to the connection; `h2` has one, the connection's task another.
#[derive(Clone)]
pub struct Batched(Rc<RefCell<Inner>>);

struct Inner {
    io: Io,
    out: Vec<u8>,
    /// What of `out` is written already.
    written: usize,
    read: u64,
}

impl Batched {
    pub fn new(io: Io) -> Self {
        Self(Rc::new(RefCell::new(Inner {
            io,
            out: Vec::new(),
            written: 0,
            read: 0,
        })))
    }

    /// Writes what was gathered. Pending: the socket takes no more now.
    pub fn poll_drain(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.borrow_mut().poll_drain(cx)
    }

    /// Runs a step of `h2`, writing what it gathers.
    pub async fn drive<T>(&self, mut step: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
        poll_fn(|cx| {
            let stepped = step(cx);
            // Where writing fails, so does the step, once it reads or writes again.
            let _ = self.poll_drain(cx);
            stepped
        })
        .await
    }

    /// Reads on for a moment after the end, so that the peer gets to see the last word: closing with bytes unread would reset the
    /// connection.
    pub async fn linger(&self) {
        let mut left = MAX_LINGER;
        let drained = poll_fn(|cx| {
            let inner = &mut *self.0.borrow_mut();
            while left > 0 {
                match ready!(inner.io.poll_pass(cx, |bytes, _| bytes.len())) {
                    Ok(read) if read > 0 => left = left.saturating_sub(read),
                    _ => break,
                }
            }
            Poll::Ready(())
        });
        // Who is still sending then sees a reset.
        let _ = timeout(LINGER, drained).await;
    }

    /// The peer sees a reset when the connection is dropped.
    pub fn reset_on_drop(&self) {
        self.0.borrow().io.reset_on_drop();
    }

    /// Bytes read so far.
    pub fn read_bytes(&self) -> u64 {
        self.0.borrow().read
    }
}

impl Inner {
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.out.len() {
            let written = ready!(Pin::new(&mut self.io).poll_write(cx, &self.out[self.written..]))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.written += written;
        }
        if self.out.capacity() > 0 {
            self.written = 0;
            let mut out = std::mem::take(&mut self.out);
            if out.capacity() <= KEEP {
                out.clear();
                SPARE.set(out);
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.out.len() >= LIMIT {
            ready!(self.poll_drain(cx))?;
        }
        if self.out.capacity() == 0 {
            self.out = SPARE.take();
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
        inner.read += (buf.filled().len() - before) as u64;
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
        ready!(inner.poll_room(cx))?;
        inner.out.extend_from_slice(buf);
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let inner = &mut *self.0.borrow_mut();
        ready!(inner.poll_room(cx))?;
        bufs.iter().for_each(|buf| inner.out.extend_from_slice(buf));
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
        ready!(inner.poll_drain(cx))?;
        Pin::new(&mut inner.io).poll_shutdown(cx)
    }
}
