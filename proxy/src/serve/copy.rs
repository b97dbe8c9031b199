//! Step 8 for opaque connections and tunnels: copies bytes between two connections in both
//! directions. Each direction ends independently. An end is passed on only if the sender ended its
//! direction: truncated bytes end with a reset.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::AsyncWrite;

use crate::http::request_line::RequestDetector;
use crate::protocol::Protocol;
use crate::secure::io::Io;

/// The result of [`bidirectional`].
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Copied {
    /// Bytes from the client.
    pub sent: u64,
    /// Bytes to the client.
    pub received: u64,
    /// Whether the upstream ended its direction, or failed, before the client did.
    pub upstream_ended_first: bool,
    /// How it ended.
    pub end: End,
}

/// How [`bidirectional`] ended.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Both directions ended.
    #[default]
    Complete,
    /// A connection failed, or ended without TLS close_notify.
    Failed,
    /// The client sent an HTTP request line.
    Http,
    /// A connection reached its maximum age.
    Expired,
    /// No memory is left to the caller.
    Overloaded,
}

/// Copies until both directions have ended, or either connection fails. The end of one direction is
/// propagated as a half-close and does not end the other direction. If there is a `detector`, it
/// inspects the client's bytes until they determine the protocol. HTTP ends the copy, and so does
/// `expiry` when it completes. A connection that has not received everything up to the sender's end
/// is reset when it is dropped. `charge` gets the size of the buffers, and the bytes that the client
/// has sent and received, when the copy waits, and ends the copy if it returns false.
pub async fn bidirectional(
    client: &mut Io,
    upstream: &mut Io,
    detector: Option<RequestDetector>,
    expiry: &mut (impl Future<Output = ()> + Unpin),
    charge: &mut impl FnMut(usize, [u64; 2]) -> bool,
) -> Copied {
    client.expect_urgent_data();
    upstream.expect_urgent_data();
    let mut upload = Transfer {
        detector,
        ..Transfer::default()
    };
    let mut download = Transfer::default();
    let mut first_end = None;
    let end = poll_fn(|cx| {
        let polled = (
            upload.poll(cx, client, upstream),
            download.poll(cx, upstream, client),
        );
        if polled.0.is_ready() || polled.1.is_ready() {
            // An error of the upload alone is one of the client: the upstream's also ends the download.
            first_end.get_or_insert(polled.1.is_ready() && upload.state == State::Copying);
        }
        // An error in either direction ends both, as a reset does without the mesh.
        match polled {
            _ if upload.was_http => Poll::Ready(End::Http),
            (Poll::Ready(Err(_)), _) | (_, Poll::Ready(Err(_))) => Poll::Ready(End::Failed),
            (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => Poll::Ready(End::Complete),
            _ => {
                let pending = upload.pending.capacity() + download.pending.capacity();
                let held = client.buffered() + upstream.buffered() + pending;
                if !charge(held, [upload.copied, download.copied]) {
                    return Poll::Ready(End::Overloaded);
                }
                Pin::new(&mut *expiry).poll(cx).map(|()| End::Expired)
            }
        }
    })
    .await;
    for (transfer, to) in [(&upload, upstream), (&download, client)] {
        if transfer.state != State::Done {
            to.reset_on_drop();
        }
    }
    Copied {
        sent: upload.copied,
        received: download.copied,
        upstream_ended_first: first_end.unwrap_or(false),
        end,
    }
}

/// One direction. It owns a buffer only while its receiver is slower than its sender.
#[derive(Default)]
struct Transfer {
    /// Bytes that were read and not yet written.
    pending: BytesMut,
    copied: u64,
    state: State,
    detector: Option<RequestDetector>,
    was_http: bool,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum State {
    #[default]
    Copying,
    ShuttingDown,
    Done,
}

impl Transfer {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Io,
        to: &mut Io,
    ) -> Poll<std::io::Result<()>> {
        loop {
            while !self.pending.is_empty() {
                let written = ready!(Pin::new(&mut *to).poll_write(cx, &self.pending))?;
                self.pending.advance(written);
            }
            match self.state {
                State::Done => return Poll::Ready(Ok(())),
                State::ShuttingDown => {
                    ready!(Pin::new(&mut *to).poll_shutdown(cx))?;
                    self.state = State::Done;
                    return Poll::Ready(Ok(()));
                }
                State::Copying => {}
            }
            self.pending = BytesMut::new();
            ready!(self.poll_copy_once(cx, from, to))?;
        }
    }

    /// Reads once, and writes the bytes directly from the read buffer. Buffers those that `to` does
    /// not accept.
    fn poll_copy_once(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Io,
        to: &mut Io,
    ) -> Poll<std::io::Result<()>> {
        let mut write_error = None;
        let read = ready!(from.poll_read_with(cx, |bytes, cx| {
            let detector = self.detector.as_mut();
            match detector.and_then(|detector| detector.update(bytes)) {
                None => {}
                Some(Protocol::Http1 | Protocol::Http2) => {
                    self.was_http = true;
                    write_error = Some(std::io::ErrorKind::InvalidData.into());
                }
                Some(_) => self.detector = None,
            }
            let mut rest = bytes;
            while !rest.is_empty() && write_error.is_none() {
                match Pin::new(&mut *to).poll_write(cx, rest) {
                    Poll::Ready(Ok(written)) => rest = &rest[written..],
                    Poll::Ready(Err(error)) => write_error = Some(error),
                    Poll::Pending => break,
                }
            }
            self.pending.extend_from_slice(rest);
            bytes.len()
        }))?;
        if let Some(error) = write_error {
            return Poll::Ready(Err(error));
        }
        self.copied += read as u64;
        if read == 0 {
            self.state = State::ShuttingDown;
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diy_mesh_testkit::net::connected;
    use std::future::pending;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    async fn pair() -> (TcpStream, Io) {
        let (near, far) = connected().await;
        (near, Io::new(far))
    }

    async fn copy(mut client: Io, mut server: Io) -> Copied {
        bidirectional(
            &mut client,
            &mut server,
            None,
            &mut pending(),
            &mut |_, _| true,
        )
        .await
    }

    #[tokio::test]
    async fn propagates_half_close_and_continues_in_other_direction() {
        let ((mut client, client_io), (mut server, server_io)) = (pair().await, pair().await);
        let ends = async {
            client.write_all(b"request").await.unwrap();
            client.shutdown().await.unwrap();
            let mut request = String::new();
            server.read_to_string(&mut request).await.unwrap();
            assert_eq!(request, "request");
            server.write_all(b"response after the end").await.unwrap();
            drop(server);
            let mut response = String::new();
            client.read_to_string(&mut response).await.unwrap();
            assert_eq!(response, "response after the end");
        };
        let (copied, ()) = tokio::join!(copy(client_io, server_io), ends);
        assert_eq!(
            copied,
            Copied {
                sent: 7,
                received: 22,
                upstream_ended_first: false,
                end: End::Complete
            }
        );
    }

    #[tokio::test]
    async fn applies_backpressure_to_sender_without_data_loss() {
        let ((mut client, client_io), (mut server, server_io)) = (pair().await, pair().await);
        let sent: Vec<u8> = (0..4_000_000u32).map(|at| (at % 251) as u8).collect();
        let bytes = sent.clone();
        let writing = tokio::spawn(async move {
            client.write_all(&bytes).await.unwrap();
            client.shutdown().await.unwrap();
            client
        });
        let reading = async {
            let mut received = Vec::new();
            let mut piece = vec![0; 777];
            loop {
                let read = server.read(&mut piece).await.unwrap();
                if read == 0 {
                    break;
                }
                received.extend_from_slice(&piece[..read]);
            }
            drop(server);
            received
        };
        let (_, received) = tokio::join!(copy(client_io, server_io), reading);
        assert!(received == sent);
        writing.await.unwrap();
    }
}
