//! The timeouts of connections: their flags and defaults, and the detection of idle connections.
//! `metrics.rs` counts each timeout that fires.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use clap::Args;
use clap::builder::{RangedU64ValueParser, TypedValueParser, ValueParser};
use tokio::time::{Instant, Sleep, sleep_until};

/// The largest timeout, in seconds: a year.
const MAX_TIMEOUT: u64 = 365 * 24 * 3600;
/// The largest value of `TCP_USER_TIMEOUT`, which is an int of milliseconds, in seconds.
const MAX_TCP_USER_TIMEOUT: u64 = i32::MAX as u64 / 1000;

/// The timeouts of client connections and of sockets. The default values do not end connections of
/// applications that are quiet for hours.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Time without a request after which a client's HTTP/1 connection is closed
    #[arg(long = "http1-idle-timeout", value_name = "SECONDS", default_value = "3600", value_parser = seconds())]
    pub http1_idle: Duration,
    /// Time without a stream after which a client's HTTP/2 connection is closed
    #[arg(long = "http2-idle-timeout", value_name = "SECONDS", default_value = "3600", value_parser = seconds())]
    pub http2_idle: Duration,
    /// Time without a byte in either direction after which an opaque or upgraded connection is
    /// reset
    #[arg(long = "opaque-idle-timeout", value_name = "SECONDS", default_value = "86400", value_parser = seconds())]
    pub opaque_idle: Duration,
    /// Time for a client to send the head of a request after its first byte, or the HTTP/2 preface
    #[arg(long = "request-head-timeout", value_name = "SECONDS", default_value = "30", value_parser = seconds())]
    pub request_head: Duration,
    /// Time to connect a request or connection to an endpoint, mutual TLS included: all attempts
    /// together
    #[arg(long = "connect-timeout", value_name = "SECONDS", default_value = "3", value_parser = seconds())]
    pub connect: Duration,
    /// Time for a mutual TLS handshake after the ClientHello
    #[arg(long = "tls-handshake-timeout", value_name = "SECONDS", default_value = "5", value_parser = seconds())]
    pub tls_handshake: Duration,
    /// Time for protocol detection after the first byte of the client
    #[arg(long = "detect-timeout", value_name = "SECONDS", default_value = "10", value_parser = seconds())]
    pub detect: Duration,
    /// Time for the first byte of a client after which its connection is reset, if the server is
    /// silent too
    #[arg(long = "silent-client-timeout", value_name = "SECONDS", default_value = "3600", value_parser = seconds())]
    pub silent_client: Duration,
    /// Time after which the kernel closes a connection if the peer does not acknowledge data
    /// (`TCP_USER_TIMEOUT` of all sockets). 0: the default of the kernel
    #[arg(long = "tcp-user-timeout", value_name = "SECONDS", default_value = "120", value_parser = tcp_user_timeout())]
    pub tcp_user: Duration,
}

fn seconds() -> ValueParser {
    let seconds = RangedU64ValueParser::<u64>::new().range(1..=MAX_TIMEOUT);
    ValueParser::new(seconds.map(Duration::from_secs))
}

fn tcp_user_timeout() -> ValueParser {
    let seconds = RangedU64ValueParser::<u64>::new().range(0..=MAX_TCP_USER_TIMEOUT);
    ValueParser::new(seconds.map(Duration::from_secs))
}

/// A timeout that fired: the label `kind` of the metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeoutKind {
    /// An idle HTTP/1 connection was closed.
    Http1Idle,
    /// An HTTP/2 connection without streams was closed.
    Http2Idle,
    /// A quiet opaque or upgraded connection was reset.
    OpaqueIdle,
    /// A request head was incomplete.
    RequestHead,
    /// A TLS handshake was incomplete.
    TlsHandshake,
    /// The protocol of a client's first bytes was still ambiguous.
    Detect,
    /// A client sent no byte.
    SilentClient,
}

impl TimeoutKind {
    /// The values of the label `kind`, in the order of the discriminants.
    pub const NAMES: [&str; 7] = [
        "http1-idle",
        "http2-idle",
        "opaque-idle",
        "request-head",
        "tls-handshake",
        "detect",
        "silent-client",
    ];

    /// The value of the label.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// Measures how long a connection is idle. Activity only records the time: the timer is set again
/// when it fires, at most once per timeout.
pub struct IdleTimer {
    timeout: Duration,
    /// The start of the idle period, or `None` if it starts with the next poll.
    since: Option<Instant>,
    /// In a box: most connections are busy and short.
    timer: Option<Pin<Box<Sleep>>>,
}

impl IdleTimer {
    /// A timer that starts with its first poll.
    pub fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            since: None,
            timer: None,
        }
    }

    /// Ends the idle period. Another one starts with the next poll.
    pub fn touch(&mut self) {
        self.since = None;
    }

    /// Ready when the connection was idle for the timeout.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let deadline = *self.since.get_or_insert_with(Instant::now) + self.timeout;
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        while timer.as_mut().poll(cx).is_ready() {
            if timer.deadline() >= deadline {
                return Poll::Ready(());
            }
            timer.as_mut().reset(deadline);
        }
        Poll::Pending
    }

    /// Like [`IdleTimer::poll`], where a poll for another reason than the timer is activity.
    pub fn poll_active(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut fired = |timer: &mut Pin<Box<Sleep>>| timer.as_mut().poll(cx).is_ready();
        if self.timer.as_mut().is_some_and(|timer| !fired(timer)) {
            self.since = Some(Instant::now());
            return Poll::Pending;
        }
        self.poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::{advance, timeout};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    /// Polls once, as after an event of the connection.
    async fn poll_once(mut poll: impl FnMut(&mut Context<'_>) -> Poll<()>) -> bool {
        poll_fn(|cx| Poll::Ready(poll(cx).is_ready())).await
    }

    #[tokio::test(start_paused = true)]
    async fn fires_after_the_timeout_without_activity() {
        let mut idle = IdleTimer::new(HOUR);
        let begun = Instant::now();
        assert!(!poll_once(|cx| idle.poll(cx)).await);
        advance(HOUR / 2).await;
        idle.touch();
        poll_fn(|cx| idle.poll(cx)).await;
        assert_eq!(begun.elapsed().as_secs(), 3600 + 1800);
    }

    #[tokio::test(start_paused = true)]
    async fn polls_before_the_deadline_are_activity() {
        let mut idle = IdleTimer::new(HOUR);
        let begun = Instant::now();
        for _ in 0..45 {
            assert!(!poll_once(|cx| idle.poll_active(cx)).await);
            advance(Duration::from_secs(7 * 60)).await;
        }
        let end = timeout(2 * HOUR, poll_fn(|cx| idle.poll_active(cx)));
        end.await.expect("it fires");
        let elapsed = begun.elapsed();
        assert!(elapsed > 6 * HOUR && elapsed < 7 * HOUR, "{elapsed:?}");
    }
}
