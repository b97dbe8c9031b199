//! Steps 4 to 8 for HTTP/2 cleartext with prior knowledge, and so for gRPC: one connection of a client, many streams at once, each
//! balanced by itself. [`serve`] is the connection, `exchange.rs` a stream; `upstream.rs` has the connections to endpoints.
//!
//! What one client's connection can make the proxy hold is bounded by the constants here; a flood ends that connection only.

mod exchange;
mod head;
mod relay;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::Reason;
use h2::server::{Builder, Connection};
use tokio::time::{Sleep, sleep, timeout};

use crate::batched::Batched;
use crate::flow::Flow;
use crate::io::Io;
use crate::lifetime::{Expiry, drained_or};
use crate::pool::http2::{
    CONNECTION_WINDOW, MAX_HEADER_LIST, MAX_RESETS_REMEMBERED, SEND_BUFFER, STREAM_WINDOW,
};

/// Streams that a client may have open at once on one connection.
const MAX_STREAMS: u32 = 250;
/// Streams that a client has opened and reset in one breath.
const MAX_RESETS_PENDING: usize = 100;
/// Streams that the proxy had to reset because the client broke the rules.
const MAX_RESETS_CAUSED: usize = 100;
/// Streams that a client may reset in a second, where it resets more than it lets come to an end.
const MAX_RESETS_A_SECOND: u32 = 400;
/// Bytes that a client may send in a row without anything happening on a stream, besides what the windows of its streams let it
/// send: pings, settings and the like.
const MAX_IDLE_TALK: u64 = 256 * 1024;
/// How long the client's preface may take.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection without streams for that long (up to twice that) is closed.
const IDLE: Duration = Duration::from_secs(15 * 60);

/// Serves a client's connection until either side ends it.
pub async fn serve(io: Io, flow: Rc<Flow>) {
    let (retires_at, expiry) = (
        io.lifetime().map(|lifetime| lifetime.retires_at),
        flow.worker.expiry(&io, flow.direction),
    );
    let io = Batched::new(io);
    let mut handshake = pin!(settings().handshake::<_, Bytes>(io.clone()));
    let connection = match timeout(PREFACE_TIMEOUT, io.drive(|cx| handshake.as_mut().poll(cx)))
        .await
    {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return tracing::debug!(peer = %flow.peer, "no HTTP/2 preface: {error}"),
        Err(_) => return tracing::debug!(peer = %flow.peer, "no HTTP/2 preface in time"),
    };
    let drain = flow.worker.drain.clone();
    let client = Rc::new(Client::new(flow));
    let mut retire = pin!(drained_or(&drain, retires_at));
    let mut serving = Serving {
        connection,
        io: io.clone(),
        client,
        talk: 0,
        tick: Box::pin(sleep(IDLE)),
        quiet: false,
        draining: false,
        flooded: false,
        takes_extended_connect: false,
        expiry,
    };
    let end = io.drive(|cx| serving.poll(cx, retire.as_mut())).await;
    drop(serving);
    match end {
        End::Closed => {}
        End::SentAway => io.linger().await,
        End::Expired => io.reset_on_drop(),
    }
}

fn settings() -> Builder {
    let mut builder = Builder::new();
    builder
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEADER_LIST)
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_reset_streams(MAX_RESETS_REMEMBERED)
        .max_pending_accept_reset_streams(MAX_RESETS_PENDING)
        .max_local_error_reset_streams(Some(MAX_RESETS_CAUSED));
    builder
}

/// How a client's connection ended.
enum End {
    Closed,
    /// The client broke the rules, and was told.
    SentAway,
    /// It reached its maximum age.
    Expired,
}

/// A client's connection under way.
struct Serving {
    connection: Connection<Batched, Bytes>,
    io: Batched,
    client: Rc<Client>,
    /// Bytes read when something last happened on a stream.
    talk: u64,
    tick: Pin<Box<Sleep>>,
    /// There was no stream at the last tick.
    quiet: bool,
    /// No stream is begun any more: the client knows by GOAWAY.
    draining: bool,
    flooded: bool,
    /// The client has been told that it may open WebSockets.
    takes_extended_connect: bool,
    expiry: Expiry,
}

impl Serving {
    /// Ready when the connection has ended.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        retire: Pin<&mut impl Future<Output = ()>>,
    ) -> Poll<End> {
        if Pin::new(&mut self.expiry).poll(cx).is_ready() {
            return Poll::Ready(End::Expired);
        }
        if !self.draining && (retire.poll(cx).is_ready() || self.client.has_probed.get()) {
            self.draining = true;
            self.connection.graceful_shutdown();
        }
        if !self.takes_extended_connect && self.client.flow.destination.takes_extended_connect.get()
        {
            // While the client has yet to acknowledge other settings, the next poll tries again.
            self.takes_extended_connect = self.connection.enable_connect_protocol().is_ok();
        }
        loop {
            match self.connection.poll_accept(cx) {
                Poll::Ready(Some(Ok((request, respond)))) => {
                    self.quiet = false;
                    self.client.note_progress();
                    tokio::task::spawn_local(exchange::carry(
                        request,
                        respond,
                        Stream::open(&self.client),
                    ));
                }
                Poll::Ready(Some(Err(error))) => {
                    tracing::debug!(peer = %self.client.flow.peer, "the client's connection ended: {error}");
                    return Poll::Ready(if error.is_library() {
                        End::SentAway
                    } else {
                        End::Closed
                    });
                }
                Poll::Ready(None) => {
                    return Poll::Ready(if self.flooded {
                        End::SentAway
                    } else {
                        End::Closed
                    });
                }
                Poll::Pending if !self.flooded && self.is_flood() => {
                    self.flooded = true;
                    self.connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                }
                Poll::Pending => break,
            }
        }
        while self.tick.as_mut().poll(cx).is_ready() {
            self.tick.as_mut().reset(tokio::time::Instant::now() + IDLE);
            self.talk = self.io.read_bytes();
            let quiet = !self.connection.has_streams();
            if quiet && self.quiet {
                if self.draining {
                    return Poll::Ready(End::Closed);
                }
                self.draining = true;
                self.connection.graceful_shutdown();
                cx.waker().wake_by_ref();
            }
            self.quiet = quiet;
        }
        Poll::Pending
    }

    /// The client only makes work.
    fn is_flood(&mut self) -> bool {
        if self.client.calm_down.take() {
            tracing::info!(peer = %self.client.flow.peer, "connection closed: it resets streams faster than any of them ends");
            return true;
        }
        let read = self.io.read_bytes();
        if self.client.progress.take() {
            self.talk = read;
        }
        // Twice a window: small frames are mostly head.
        let bodies = 2 * u64::from(
            STREAM_WINDOW
                .saturating_mul(self.client.open.get())
                .min(CONNECTION_WINDOW),
        );
        let flood = read - self.talk > MAX_IDLE_TALK + bodies;
        if flood {
            tracing::info!(peer = %self.client.flow.peer, "connection closed: it talks without any stream moving on");
        }
        flood
    }
}

/// What the streams of one client's connection share.
struct Client {
    flow: Rc<Flow>,
    /// Streams under way.
    open: Cell<u32>,
    /// Something happened on a stream.
    progress: Cell<bool>,
    second: Cell<Instant>,
    /// Streams that the client reset in this second, and all that ended in it.
    resets: Cell<u32>,
    ends: Cell<u32>,
    calm_down: Cell<bool>,
    /// A stream was an exempt probe of a strict pod: the connection carries no other.
    has_probed: Cell<bool>,
}

impl Client {
    fn new(flow: Rc<Flow>) -> Self {
        let zero = || Cell::new(0);
        Self {
            flow,
            open: zero(),
            progress: Cell::new(false),
            second: Cell::new(Instant::now()),
            resets: zero(),
            ends: zero(),
            calm_down: Cell::new(false),
            has_probed: Cell::new(false),
        }
    }

    fn note_progress(&self) {
        self.progress.set(true);
    }

    /// A stream came to its end.
    fn has_ended(&self) {
        self.ends.set(self.ends.get().saturating_add(1));
    }

    /// The client reset a stream.
    fn was_reset(&self) {
        let now = Instant::now();
        if now.saturating_duration_since(self.second.get()) > Duration::from_secs(1) {
            self.second.set(now);
            self.resets.set(0);
            self.ends.set(0);
        }
        self.resets.set(self.resets.get() + 1);
        if self.resets.get() > MAX_RESETS_A_SECOND && self.resets.get() > self.ends.get() {
            self.calm_down.set(true);
        }
    }
}

/// A stream under way, as its connection counts it.
struct Stream(Rc<Client>);

impl Stream {
    fn open(client: &Rc<Client>) -> Self {
        client.open.set(client.open.get() + 1);
        Self(client.clone())
    }
}

impl std::ops::Deref for Stream {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.0
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.open.set(self.0.open.get() - 1);
    }
}
