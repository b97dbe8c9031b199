//! Step 8 for bytes that nobody looks into: both directions between two connections, each ended on its own.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::AsyncWrite;

use crate::detect::{Protocol, RequestLineDetector, Verdict};
use crate::io::Io;

/// What went by.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Copied {
    /// Bytes from the client.
    pub sent: u64,
    /// Bytes to the client.
    pub received: u64,
    /// It ended because the client turned out to speak HTTP.
    pub was_http: bool,
    /// It ended because a connection reached its maximum age: both have to be reset.
    pub expired: bool,
}

/// Copies until both directions have ended, or either side breaks. An end of one direction is passed on as such (a
/// half-close) and leaves the other alone. What the client says goes by the `detector`, where there is one, until it is settled that
/// it is no HTTP; if it is, that ends both. So does the `expiry`, once it is done.
pub async fn both(
    client: &mut Io,
    upstream: &mut Io,
    detector: Option<RequestLineDetector>,
    expiry: &mut (impl Future<Output = ()> + Unpin),
) -> Copied {
    let (mut up, mut down) = (
        Half {
            detector,
            ..Half::default()
        },
        Half::default(),
    );
    let expired = poll_fn(|cx| {
        // A break of either direction ends both, as a reset does without the mesh; else both have to end.
        match (
            up.poll(cx, client, upstream),
            down.poll(cx, upstream, client),
        ) {
            (Poll::Ready(Err(_)), _) | (_, Poll::Ready(Err(_))) => Poll::Ready(false),
            (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => Poll::Ready(false),
            _ => Pin::new(&mut *expiry).poll(cx).map(|()| true),
        }
    })
    .await;
    Copied {
        sent: up.copied,
        received: down.copied,
        was_http: up.was_http,
        expired,
    }
}

/// One direction. It owns a buffer only while its receiver is slower than its sender.
#[derive(Default)]
struct Half {
    waiting: BytesMut,
    copied: u64,
    state: State,
    detector: Option<RequestLineDetector>,
    was_http: bool,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum State {
    #[default]
    Copying,
    Ending,
    Ended,
}

impl Half {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Io,
        to: &mut Io,
    ) -> Poll<std::io::Result<()>> {
        loop {
            while !self.waiting.is_empty() {
                let written = ready!(Pin::new(&mut *to).poll_write(cx, &self.waiting))?;
                self.waiting.advance(written);
            }
            match self.state {
                State::Ended => return Poll::Ready(Ok(())),
                State::Ending => {
                    ready!(Pin::new(&mut *to).poll_shutdown(cx))?;
                    self.state = State::Ended;
                    return Poll::Ready(Ok(()));
                }
                State::Copying => {}
            }
            self.waiting = BytesMut::new();
            ready!(self.poll_pass(cx, from, to))?;
        }
    }

    /// Reads once, and writes what came before it is copied anywhere.
    fn poll_pass(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Io,
        to: &mut Io,
    ) -> Poll<std::io::Result<()>> {
        let mut write_error = None;
        let read = ready!(from.poll_pass(cx, |bytes, cx| {
            match self
                .detector
                .as_mut()
                .map(|detector| detector.update(bytes))
            {
                None | Some(Verdict::NeedMore) => {}
                Some(Verdict::Known(Protocol::Http1 | Protocol::Http2)) => {
                    self.was_http = true;
                    write_error = Some(std::io::ErrorKind::InvalidData.into());
                }
                Some(Verdict::Known(_)) => self.detector = None,
            }
            let mut rest = bytes;
            while !rest.is_empty() && write_error.is_none() {
                match Pin::new(&mut *to).poll_write(cx, rest) {
                    Poll::Ready(Ok(written)) => rest = &rest[written..],
                    Poll::Ready(Err(error)) => write_error = Some(error),
                    Poll::Pending => break,
                }
            }
            self.waiting.extend_from_slice(rest);
            bytes.len()
        }))?;
        if let Some(error) = write_error {
            return Poll::Ready(Err(error));
        }
        self.copied += read as u64;
        if read == 0 {
            self.state = State::Ending;
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    async fn pair() -> (TcpStream, Io) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (near, far) = tokio::join!(
            TcpStream::connect(listener.local_addr().unwrap()),
            listener.accept()
        );
        (near.unwrap(), Io::new(far.unwrap().0))
    }

    #[tokio::test]
    async fn a_half_close_passes_and_the_other_direction_goes_on() {
        let ((mut client, mut client_io), (mut server, mut server_io)) =
            (pair().await, pair().await);
        let copying = tokio::spawn(async move {
            both(&mut client_io, &mut server_io, None, &mut pending()).await
        });
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        let mut asked = String::new();
        server.read_to_string(&mut asked).await.unwrap();
        assert_eq!(asked, "question");
        server.write_all(b"an answer after the end").await.unwrap();
        drop(server);
        let mut answered = String::new();
        client.read_to_string(&mut answered).await.unwrap();
        assert_eq!(answered, "an answer after the end");
        assert_eq!(
            copying.await.unwrap(),
            Copied {
                sent: 8,
                received: 23,
                was_http: false,
                expired: false
            }
        );
    }

    #[tokio::test]
    async fn a_slow_receiver_slows_the_sender_and_loses_nothing() {
        let ((mut client, mut client_io), (mut server, mut server_io)) =
            (pair().await, pair().await);
        tokio::spawn(
            async move { both(&mut client_io, &mut server_io, None, &mut pending()).await },
        );
        let sent: Vec<u8> = (0..4_000_000u32).map(|at| (at % 251) as u8).collect();
        let copy = sent.clone();
        let writing = tokio::spawn(async move {
            client.write_all(&copy).await.unwrap();
            client.shutdown().await.unwrap();
            client
        });
        let mut received = Vec::new();
        let mut piece = vec![0; 777];
        loop {
            let read = server.read(&mut piece).await.unwrap();
            if read == 0 {
                break;
            }
            received.extend_from_slice(&piece[..read]);
        }
        assert!(received == sent);
        writing.await.unwrap();
    }
}
