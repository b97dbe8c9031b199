//! [`Io`], a connection: a socket, its optional TLS session, and the bytes that were read and not
//! yet consumed. Both paths and both versions of HTTP read and write through it. It contains no
//! policy.
//!
//! **Bytes count as written when the socket has them,** with and without TLS. A writer therefore
//! never flushes, and nothing stays behind while its source pauses. In return, a write that has
//! returned `Pending` must be repeated with the same bytes, because their TLS records exist already;
//! more bytes may follow them. [`AsyncWrite::poll_flush`] sends what the session adds to data: the
//! last messages of a handshake, and alerts.
//!
//! All connections of a worker share one scratch buffer: a read either returns at once or leaves
//! the buffer unused. A connection that waits for bytes owns no buffer.

use std::io::{self, Read as _};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Buf, BytesMut};
use diy_mesh_runtime::metrics::Active;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

use crate::limits::lifetime::Lifetime;
use crate::limits::memory::{ConnectionSlot, max_read};
use crate::secure::scratch::Scratch;
use crate::secure::tls::{Acceptance, Handshake, Negotiated, Session};

/// The maximum number of bytes of one read that are forwarded at once. A large value saves system
/// calls for bulk data. Pages of the scratch buffer that no read has used need no memory.
const MAX_READ: usize = 256 * 1024;
/// The maximum number of bytes of one read that are buffered until they are parsed.
pub const MAX_FILL: usize = 31 * 1024;

/// The minimum size of a read of TLS records: an incomplete record, and the rest of it.
const MIN_SEALED_READ: usize = 40 * 1024;

thread_local! {
    static SCRATCH_BUFFER: Scratch = const { Scratch::new() };
}

/// A connection. The next read returns unread bytes first, such as those that protocol detection
/// inspected.
pub struct Io {
    stream: TcpStream,
    tls: Option<Box<Tls>>,
    unread: BytesMut,
    urgent: Urgent,
    /// Counted among the connections to endpoints.
    _counted: Option<Active>,
    /// The slot of a connection to the proxy.
    slot: Option<Rc<ConnectionSlot>>,
}

/// Whether bytes after TCP urgent data wait in the socket. A read ends before urgent data, and no
/// event follows for the bytes that are left, but tokio takes a short read for an empty socket.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Urgent {
    /// Unknown. They wait for the event of the next packet.
    #[default]
    Unexpected,
    /// Unknown. The next read does not wait for an event.
    Expected,
    /// No: the latest read has found the socket empty.
    Read,
}

/// The state of a connection with TLS. Only those to other proxies have a lifetime.
#[derive(Default)]
struct Tls {
    session: Option<Session>,
    lifetime: Option<Lifetime>,
}

impl Io {
    /// Wraps a connected socket. `listener.rs` and `connect/mod.rs` set its options.
    pub fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            tls: None,
            unread: BytesMut::new(),
            urgent: Urgent::default(),
            _counted: None,
            slot: None,
        }
    }

    /// A connection that keeps this slot while it is open.
    pub fn in_slot(stream: TcpStream, slot: Rc<ConnectionSlot>) -> Self {
        let mut io = Self::new(stream);
        io.slot = Some(slot);
        io
    }

    /// Counts the connection until it is dropped.
    pub fn count(&mut self, counted: Active) {
        self._counted = Some(counted);
    }

    /// Runs the TLS handshake, which has consumed the unread bytes.
    pub async fn secure(mut self, handshake: Handshake) -> io::Result<(Self, Negotiated)> {
        self.unread = BytesMut::new();
        let (negotiated, session) = handshake.run(&mut self.stream, &mut self.unread).await?;
        self.tls.get_or_insert_default().session = Some(session);
        Ok((self, negotiated))
    }

    /// Whether the connection has a TLS session.
    pub fn is_secured(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.session.is_some())
    }

    /// Whether the connection has mutual TLS: the peer is an authenticated proxy.
    pub fn is_peer(&self) -> bool {
        self.is_secured() && self.lifetime().is_some()
    }

    /// Whether the peer has accepted the TLS handshake. Plaintext has none to reject.
    pub fn acceptance(&self) -> Acceptance {
        let session = self.tls.as_ref().and_then(|tls| tls.session.as_ref());
        match session.map_or(Acceptance::Accepted, Session::acceptance) {
            // A server outside of the mesh may send an alert after it has read a request.
            Acceptance::Rejected if !self.is_peer() => Acceptance::Unknown,
            acceptance => acceptance,
        }
    }

    /// The lifetime of the connection, or `None` for a plaintext connection.
    pub fn lifetime(&self) -> Option<&Lifetime> {
        self.tls.as_ref()?.lifetime.as_ref()
    }

    /// Sets the lifetime of the connection.
    pub fn set_lifetime(&mut self, lifetime: Lifetime) {
        self.tls.get_or_insert_default().lifetime = Some(lifetime);
    }

    /// Whether no new HTTP exchange may start on the connection.
    pub fn is_retired(&self, now: Instant) -> bool {
        self.lifetime()
            .is_some_and(|lifetime| lifetime.is_retired(now))
    }

    /// The socket. For its addresses and options only.
    pub fn socket(&self) -> &TcpStream {
        &self.stream
    }

    /// The bytes that were read and not yet consumed.
    pub fn unread(&mut self) -> &mut BytesMut {
        &mut self.unread
    }

    /// The size of the buffers that the connection owns.
    pub fn buffered(&self) -> usize {
        let session = self.tls.as_ref().and_then(|tls| tls.session.as_ref());
        self.unread.capacity() + session.map_or(0, Session::buffered)
    }

    /// Reads once and appends the bytes to [`Io::unread`]. Returns their number, 0 at the end of
    /// the stream.
    pub fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let Self {
            stream,
            tls,
            unread,
            urgent,
            ..
        } = self;
        if unread.is_empty() && unread.capacity() > 0 {
            *unread = BytesMut::new();
        }
        let limit = max_read(MAX_FILL);
        poll_read_once(stream, tls, urgent, cx, limit, |bytes, _| {
            unread.extend_from_slice(bytes);
            bytes.len()
        })
    }

    /// Reads once into the thread's scratch buffer, and passes the bytes to `consume`. An empty
    /// slice is the end of the stream.
    pub fn poll_read_with<T>(
        &mut self,
        cx: &mut Context<'_>,
        consume: impl FnOnce(&[u8], &mut Context<'_>) -> T,
    ) -> Poll<io::Result<T>> {
        if self.unread.is_empty() {
            let Self {
                stream,
                tls,
                urgent,
                ..
            } = self;
            return poll_read_once(stream, tls, urgent, cx, max_read(MAX_READ), consume);
        }
        let unread = std::mem::take(&mut self.unread);
        Poll::Ready(Ok(consume(&unread, cx)))
    }

    /// Reads TCP urgent data without delay from now on, at the cost of a system call more for each
    /// pause of the peer. `set_options` keeps this data in the stream.
    pub fn expect_urgent_data(&mut self) {
        self.urgent = Urgent::Expected;
    }

    /// Acknowledges the bytes that were read, at once. A peer with Nagle's algorithm that has written a
    /// part of a message keeps the rest until then, and the kernel delays acknowledgments on a
    /// connection that carries requests and responses by 40 ms. Other proxies do not use the
    /// algorithm.
    pub fn acknowledge(&self) {
        if !self.is_secured() {
            // An error means that the connection has ended: the next read tells.
            let _ = self.stream.set_quickack(true);
        }
    }

    /// Reads and drops bytes until the end of the stream, an error, or `left` bytes: a socket that
    /// is closed with unread bytes resets the connection.
    pub fn poll_discard(&mut self, cx: &mut Context<'_>, left: &mut usize) -> Poll<()> {
        while *left > 0 {
            match ready!(self.poll_read_with(cx, |bytes, _| bytes.len())) {
                Ok(read) if read > 0 => *left = left.saturating_sub(read),
                _ => break,
            }
        }
        Poll::Ready(())
    }

    /// Whether an idle connection cannot carry another request: the peer closed it, reset it, or
    /// sent unexpected bytes. Needs no system call while the socket is not readable.
    pub fn is_stale(&mut self) -> bool {
        if !self.unread.is_empty() {
            return true;
        }
        match session(&mut self.tls) {
            None => !self
                .stream
                .try_read(&mut [0])
                .is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock),
            Some(session) if !session.is_flushed() => true,
            Some(session) => SCRATCH_BUFFER.with(|buffer| {
                buffer.with_buffer(MAX_READ, |scratch| {
                    session.has_received(&self.stream, scratch)
                })
            }),
        }
    }

    /// Resets the connection.
    pub fn reset(self) {
        self.reset_on_drop();
    }

    /// Makes the connection end with a reset when it is dropped.
    pub fn reset_on_drop(&self) {
        // If the option cannot be set, the connection ends with a FIN.
        let _ = SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        // The peer sees that the connection is cut off.
        if self.slot.as_ref().is_some_and(|slot| slot.is_ended()) {
            self.reset_on_drop();
        }
    }
}

fn session(tls: &mut Option<Box<Tls>>) -> Option<&mut Session> {
    tls.as_mut()?.session.as_mut()
}

/// Reads once, at most `limit` bytes, and passes the plaintext to `consume`.
fn poll_read_once<T>(
    stream: &mut TcpStream,
    tls: &mut Option<Box<Tls>>,
    urgent: &mut Urgent,
    cx: &mut Context<'_>,
    limit: usize,
    consume: impl FnOnce(&[u8], &mut Context<'_>) -> T,
) -> Poll<io::Result<T>> {
    let read = |scratch: &mut Vec<u8>| match session(tls) {
        None if *urgent != Urgent::Unexpected => {
            let read = ready!(poll_read_urgent(stream, urgent, cx, &mut scratch[..limit]))?;
            Poll::Ready(Ok(consume(&scratch[..read], cx)))
        }
        None => {
            let mut buf = ReadBuf::new(&mut scratch[..limit]);
            ready!(Pin::new(stream).poll_read(cx, &mut buf))?;
            Poll::Ready(Ok(consume(buf.filled(), cx)))
        }
        Some(session) => {
            let limit = limit.max(MIN_SEALED_READ);
            session.poll_read(cx, stream, &mut scratch[..limit], consume)
        }
    };
    SCRATCH_BUFFER.with(|buffer| buffer.with_buffer(MAX_READ, read))
}

/// Reads once. Only a read that would block means that the socket is empty.
fn poll_read_urgent(
    stream: &TcpStream,
    urgent: &mut Urgent,
    cx: &mut Context<'_>,
    buf: &mut [u8],
) -> Poll<io::Result<usize>> {
    let socket = SockRef::from(stream);
    loop {
        let result = if *urgent == Urgent::Expected {
            (&*socket).read(buf)
        } else {
            ready!(stream.poll_read_ready(cx))?;
            stream.try_io(Interest::READABLE, || (&*socket).read(buf))
        };
        match result {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => *urgent = Urgent::Read,
            result => return Poll::Ready(result),
        }
    }
}

impl AsyncRead for Io {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.unread.is_empty() {
            if !self.is_secured() {
                return Pin::new(&mut self.stream).poll_read(cx, buf);
            }
            if ready!(self.poll_fill(cx))? == 0 {
                return Poll::Ready(Ok(()));
            }
        }
        let length = self.unread.len().min(buf.remaining());
        buf.put_slice(&self.unread[..length]);
        self.unread.advance(length);
        if self.unread.is_empty() {
            self.unread = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Io {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let Self { stream, tls, .. } = &mut *self;
        match session(tls) {
            None => Pin::new(stream).poll_write(cx, buf),
            Some(session) => session.poll_write(cx, stream, buf),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { stream, tls, .. } = &mut *self;
        match session(tls) {
            None => Pin::new(stream).poll_flush(cx),
            Some(session) => session.poll_flush(cx, stream),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { stream, tls, .. } = &mut *self;
        match session(tls) {
            None => Pin::new(stream).poll_shutdown(cx),
            Some(session) => session.poll_shutdown(cx, stream),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::future::poll_fn;

    use super::*;
    use diy_mesh_testkit::net::connected;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    pub(crate) async fn pair() -> (Io, TcpStream) {
        let (near, far) = connected().await;
        (Io::new(near), far)
    }

    #[tokio::test]
    async fn reads_unread_bytes_first() {
        let (mut io, mut far) = pair().await;
        far.write_all(b"hello").await.unwrap();
        poll_fn(|cx| io.poll_fill(cx)).await.unwrap();
        assert_eq!(&io.unread()[..], b"hello");
        far.write_all(b" world").await.unwrap();
        let mut read = [0; 11];
        io.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"hello world");
    }

    #[tokio::test]
    async fn nested_read_uses_its_own_buffer() {
        let (mut outer, mut outer_far) = pair().await;
        let (mut inner, mut inner_far) = pair().await;
        outer_far.write_all(b"outer").await.unwrap();
        inner_far.write_all(b"inner").await.unwrap();
        inner.stream.readable().await.unwrap();
        poll_fn(|cx| {
            outer.poll_read_with(cx, |outer_bytes, cx| {
                let inner_bytes = inner.poll_read_with(cx, |bytes, _| bytes.to_vec());
                assert!(matches!(inner_bytes, Poll::Ready(Ok(bytes)) if bytes == b"inner"));
                assert_eq!(outer_bytes, b"outer");
            })
        })
        .await
        .unwrap();
    }

    #[tokio::test]
    async fn is_stale_after_close_or_unexpected_bytes() {
        let (mut io, far) = pair().await;
        assert!(!io.is_stale());
        drop(far);
        io.stream.readable().await.unwrap();
        assert!(io.is_stale());
        let (mut io, mut far) = pair().await;
        far.write_all(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
            .await
            .unwrap();
        io.stream.readable().await.unwrap();
        assert!(io.is_stale());
    }
}
