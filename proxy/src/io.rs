//! A connection's bytes: a socket, and what was read from it before anybody knew what it carries. Both paths and both
//! HTTP versions read and write through [`Io`]; it decides nothing.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// A connection. Bytes that detection peeked at come first when it is read.
pub struct Io {
    stream: TcpStream,
    peeked: BytesMut,
}

impl Io {
    /// Takes over a connected socket and turns Nagle's delay off: the proxy adds no wait of its own.
    pub fn new(stream: TcpStream) -> Self {
        // A socket whose peer has gone already refuses the option; the first read will tell.
        let _ = stream.set_nodelay(true);
        Self { stream, peeked: BytesMut::new() }
    }

    /// Gives bytes back: the next read returns them first.
    pub fn unread(&mut self, mut bytes: BytesMut) {
        if !self.peeked.is_empty() {
            bytes.extend_from_slice(&self.peeked);
        }
        self.peeked = bytes;
    }

    /// The far side's address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    /// True where the connection can't carry another request: the peer closed it, broke it, or sent bytes that nobody
    /// asked for. Costs no system call while the socket is quiet.
    pub fn is_stale(&self) -> bool {
        !self.peeked.is_empty() || !matches!(self.stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

impl AsyncRead for Io {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.peeked.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        let length = self.peeked.len().min(buf.remaining());
        buf.put_slice(&self.peeked[..length]);
        self.peeked.advance(length);
        if self.peeked.is_empty() {
            self.peeked = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Io {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
