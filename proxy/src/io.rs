//! A connection's bytes: a socket, its TLS session where it has one, and what was read and not yet taken. Both paths and both
//! HTTP versions read and write through [`Io`]; it decides nothing.
//!
//! A worker reads into one scratch buffer that all its connections share, because a read either returns at once or
//! holds nothing: a connection that waits owns no buffer at all.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Buf, BytesMut};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::lifetime::Lifetime;
use crate::scratch::Scratch;
use crate::tls::{Handshake, Negotiated, Session};

/// The most that one read takes for whoever passes bytes on at once: the more, the fewer system calls for bulk data.
/// Pages that no read has needed take no memory.
const SCRATCH: usize = 256 * 1024;
/// The most that one read takes for whoever keeps the bytes until they are parsed.
const FILL: usize = 64 * 1024;

thread_local! {
    static SCRATCH_BUFFER: Scratch = const { Scratch::new() };
}

/// A connection. Bytes that were read and not taken, as by detection, come first when it is read again.
pub struct Io {
    stream: TcpStream,
    tls: Option<Box<Tls>>,
    unread: BytesMut,
}

/// What a connection to a peer's proxy has beside its socket.
#[derive(Default)]
struct Tls {
    session: Option<Session>,
    lifetime: Option<Lifetime>,
}

impl Io {
    /// Takes over a connected socket. The caller has set its options (see `accept.rs` and `connect.rs`).
    pub fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            tls: None,
            unread: BytesMut::new(),
        }
    }

    /// From here on TLS: runs the handshake, which was given what was unread.
    pub async fn secure(mut self, handshake: Handshake) -> io::Result<(Self, Negotiated)> {
        self.unread = BytesMut::new();
        let (negotiated, session) = handshake.run(&mut self.stream, &mut self.unread).await?;
        self.tls.get_or_insert_default().session = Some(session);
        Ok((self, negotiated))
    }

    /// Whether what goes over the wire is sealed.
    pub fn is_secured(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.session.is_some())
    }

    /// How long it is used; none for a plaintext connection.
    pub fn lifetime(&self) -> Option<&Lifetime> {
        self.tls.as_ref()?.lifetime.as_ref()
    }

    /// Limits how long it is used.
    pub fn set_lifetime(&mut self, lifetime: Lifetime) {
        self.tls.get_or_insert_default().lifetime = Some(lifetime);
    }

    /// Whether no further HTTP exchange may begin on it.
    pub fn is_retired(&self, now: Instant) -> bool {
        self.lifetime()
            .is_some_and(|lifetime| lifetime.is_retired(now))
    }

    /// The socket, to ask it for its addresses.
    pub fn socket(&self) -> &TcpStream {
        &self.stream
    }

    /// What was read and not yet taken.
    pub fn unread(&mut self) -> &mut BytesMut {
        &mut self.unread
    }

    /// Reads once and adds what came to [`Io::unread`]; 0 is the end of the stream.
    pub fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let Self {
            stream,
            tls,
            unread,
            ..
        } = self;
        if unread.is_empty() && unread.capacity() > 0 {
            *unread = BytesMut::new();
        }
        poll_read_some(stream, tls, cx, FILL, |bytes, _| {
            unread.extend_from_slice(bytes);
            bytes.len()
        })
    }

    /// Reads once into this thread's scratch buffer, and gives what came to `take`. Zero bytes are the end of the stream.
    pub fn poll_pass<T>(
        &mut self,
        cx: &mut Context<'_>,
        take: impl FnOnce(&[u8], &mut Context<'_>) -> T,
    ) -> Poll<io::Result<T>> {
        if self.unread.is_empty() {
            return poll_read_some(&mut self.stream, &mut self.tls, cx, SCRATCH, take);
        }
        let unread = std::mem::take(&mut self.unread);
        Poll::Ready(Ok(take(&unread, cx)))
    }

    /// True where the connection can't carry another request: the peer closed it, broke it, or sent bytes that nobody
    /// asked for. Costs no system call while the socket is quiet.
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
                buffer.with_buffer(SCRATCH, |scratch| {
                    session.has_received(&self.stream, scratch)
                })
            }),
        }
    }

    /// Half-closes the connection.
    pub fn poll_half_close(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match session(&mut self.tls) {
            None => Pin::new(&mut self.stream).poll_shutdown(cx),
            Some(session) => session.poll_shutdown(cx, &mut self.stream),
        }
    }

    /// Breaks the connection off: the peer sees a reset.
    pub fn reset(self) {
        self.reset_on_drop();
    }

    /// The peer sees a reset when the connection is dropped.
    pub fn reset_on_drop(&self) {
        // Where the option is refused the peer sees an end instead.
        let _ = SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
    }
}

fn session(tls: &mut Option<Box<Tls>>) -> Option<&mut Session> {
    tls.as_mut()?.session.as_mut()
}

/// Reads once, at most so much, and gives the plain bytes to `take`.
fn poll_read_some<T>(
    stream: &mut TcpStream,
    tls: &mut Option<Box<Tls>>,
    cx: &mut Context<'_>,
    most: usize,
    take: impl FnOnce(&[u8], &mut Context<'_>) -> T,
) -> Poll<io::Result<T>> {
    let read = |scratch: &mut Vec<u8>| match session(tls) {
        None => {
            let mut buf = ReadBuf::new(&mut scratch[..most]);
            ready!(Pin::new(stream).poll_read(cx, &mut buf))?;
            Poll::Ready(Ok(take(buf.filled(), cx)))
        }
        Some(session) => session.poll_read(cx, stream, &mut scratch[..most], take),
    };
    SCRATCH_BUFFER.with(|buffer| buffer.with_buffer(SCRATCH, read))
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
        self.poll_half_close(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    async fn pair() -> (Io, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (near, far) = tokio::join!(
            TcpStream::connect(listener.local_addr().unwrap()),
            listener.accept()
        );
        (Io::new(near.unwrap()), far.unwrap().0)
    }

    #[tokio::test]
    async fn what_was_peeked_comes_first() {
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
    async fn a_read_inside_of_a_read_has_a_buffer_of_its_own() {
        let (mut outer, mut outer_far) = pair().await;
        let (mut inner, mut inner_far) = pair().await;
        outer_far.write_all(b"outer").await.unwrap();
        inner_far.write_all(b"inner").await.unwrap();
        inner.stream.readable().await.unwrap();
        poll_fn(|cx| {
            outer.poll_pass(cx, |outer_bytes, cx| {
                let inner_bytes = inner.poll_pass(cx, |bytes, _| bytes.to_vec());
                assert!(matches!(inner_bytes, Poll::Ready(Ok(bytes)) if bytes == b"inner"));
                assert_eq!(outer_bytes, b"outer");
            })
        })
        .await
        .unwrap();
    }

    #[tokio::test]
    async fn a_quiet_connection_is_fresh_and_a_closed_or_talking_one_is_stale() {
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
