//! Lifetime of connections between proxies. An HTTP connection has a maximum age, limited by the
//! expiry of both certificates, and ends gracefully. An opaque connection, or one with an open
//! stream, may outlive the certificate of the peer, which is counted. It is reset only at
//! `--max-connection-age`.
//!
//! A [`Lifetime`] is computed after the handshake. Plaintext connections have none. This module
//! does not close connections.

use std::cell::RefCell;
use std::future::{Future, pending};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;

/// The maximum age of an HTTP connection, before jitter.
const MAX_HTTP_AGE: Duration = Duration::from_secs(3600);
/// Random fraction of an age.
const JITTER: f64 = 0.1;
/// Time between retirement and end of an HTTP connection. Pools close connections that are idle for
/// half of it, so clients never send a request on a connection that the server is closing.
const RETIREMENT_PERIOD: Duration = Duration::from_secs(60);

/// When a connection between proxies retires and ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// No HTTP exchange starts after this time.
    pub retires_at: Instant,
    /// Expiry of the certificate of the peer.
    pub certificate_ends_at: Instant,
    /// When the connection is reset, even in use.
    pub resets_at: Option<Instant>,
}

impl Lifetime {
    /// Whether no further exchange may start on the connection.
    pub fn is_retired(&self, now: Instant) -> bool {
        now >= self.retires_at
    }

    /// When a server closes the idle connection, which the pool of the client no longer contains.
    pub fn closes_idle_at(&self) -> Instant {
        (self.retires_at + RETIREMENT_PERIOD).min(self.certificate_ends_at)
    }

    /// Waits until a connection in use must be reset. Calls `outlived` when the certificate of the
    /// peer expires, and keeps the returned guard until then.
    pub async fn expire<Guard>(self, outlived: impl FnOnce() -> Guard) {
        let first = self.resets_at.map_or(self.certificate_ends_at, |at| {
            at.min(self.certificate_ends_at)
        });
        sleep_until(first.into()).await;
        if self.resets_at == Some(first) {
            return;
        }
        let _guard = outlived();
        match self.resets_at {
            Some(at) => sleep_until(at.into()).await,
            None => pending().await,
        }
    }
}

/// Computes lifetimes with jitter for the connections of a worker.
pub struct Lifetimes {
    max_connection_age: Option<Duration>,
    rng: RefCell<fastrand::Rng>,
}

impl Lifetimes {
    /// `max_connection_age` is the age at which connections are reset.
    pub fn new(max_connection_age: Option<Duration>, rng: fastrand::Rng) -> Self {
        Self {
            max_connection_age,
            rng: RefCell::new(rng),
        }
    }

    /// Lifetime of a connection established `now`. `peer_remaining` and `own_remaining` are the
    /// remaining validities of the certificates of the peer and of this proxy.
    pub fn sample(
        &self,
        now: Instant,
        peer_remaining: Duration,
        own_remaining: Duration,
    ) -> Lifetime {
        let mut rng = self.rng.borrow_mut();
        let reset_age = self
            .max_connection_age
            .map(|age| age.mul_f64(1.0 - JITTER * rng.f64()));
        let http_age = MAX_HTTP_AGE.mul_f64(1.0 - JITTER + 2.0 * JITTER * rng.f64());
        let end = http_age
            .min(peer_remaining)
            .min(own_remaining)
            .min(reset_age.unwrap_or(Duration::MAX));
        Lifetime {
            retires_at: now + end.saturating_sub(RETIREMENT_PERIOD).max(end / 2),
            certificate_ends_at: now + peer_remaining,
            resets_at: reset_age.map(|age| now + age),
        }
    }
}

/// A running [`Lifetime::expire`], which completes when a connection in use must be reset. Never
/// completes for plaintext connections.
pub struct Expiry(pub Option<Pin<Box<dyn Future<Output = ()>>>>);

impl Future for Expiry {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0
            .as_mut()
            .map_or(Poll::Pending, |expire| expire.as_mut().poll(cx))
    }
}

/// Waits until a connection accepts no more exchanges: the proxy drains, or it is `at`.
pub async fn drained_or(drain: &CancellationToken, at: Option<Instant>) {
    match at {
        None => drain.cancelled().await,
        Some(at) => tokio::select! {
            biased;
            () = drain.cancelled() => {}
            // In a box: most connections have none.
            () = Box::pin(sleep_until(at.into())) => {}
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);
    const DAY: Duration = Duration::from_secs(24 * 3600);

    /// Lifetimes of 1000 connections.
    fn sample(
        max_connection_age: Option<Duration>,
        peer_left: Duration,
        own_left: Duration,
    ) -> (Instant, Vec<Lifetime>) {
        let (now, lifetimes) = (
            Instant::now(),
            Lifetimes::new(max_connection_age, fastrand::Rng::with_seed(7)),
        );
        (
            now,
            (0..1000)
                .map(|_| lifetimes.sample(now, peer_left, own_left))
                .collect(),
        )
    }

    #[test]
    fn http_connection_retires_after_an_hour_with_jitter() {
        let (now, samples) = sample(None, DAY, DAY);
        let ages = || {
            samples
                .iter()
                .map(|lifetime| lifetime.retires_at + RETIREMENT_PERIOD - now)
        };
        assert!(ages().all(|age| age >= HOUR.mul_f64(0.9) && age <= HOUR.mul_f64(1.1)));
        assert!(
            ages().any(|age| age < HOUR.mul_f64(0.92))
                && ages().any(|age| age > HOUR.mul_f64(1.08))
        );
        assert!(RETIREMENT_PERIOD >= 2 * crate::upstream::connect::IDLE_TIMEOUT);
        assert!(
            samples.iter().all(|lifetime| lifetime.resets_at.is_none()
                && lifetime.certificate_ends_at == now + DAY)
        );
    }

    #[test]
    fn http_connection_retires_before_either_certificate_expires() {
        let left = Duration::from_secs(600);
        for (peer, own) in [(left, DAY), (DAY, left)] {
            let (now, samples) = sample(None, peer, own);
            assert!(
                samples
                    .iter()
                    .all(|lifetime| lifetime.retires_at == now + left - RETIREMENT_PERIOD)
            );
            assert!(
                samples
                    .iter()
                    .all(|lifetime| lifetime.certificate_ends_at == now + peer)
            );
        }
        // With a short remaining validity, half of it is used.
        let (now, samples) = sample(None, RETIREMENT_PERIOD, DAY);
        assert!(
            samples
                .iter()
                .all(|lifetime| lifetime.retires_at == now + RETIREMENT_PERIOD / 2)
        );
        assert!(
            samples
                .iter()
                .all(|lifetime| lifetime.closes_idle_at() == lifetime.certificate_ends_at)
        );
    }

    #[test]
    fn resets_within_maximum_age_and_retires_before() {
        let age = HOUR / 2;
        let (now, samples) = sample(Some(age), DAY, DAY);
        let resets = || samples.iter().filter_map(|lifetime| lifetime.resets_at);
        assert!(resets().all(|at| at <= now + age && at >= now + age.mul_f64(0.9)));
        assert!(
            resets().any(|at| at < now + age.mul_f64(0.92))
                && resets().any(|at| at > now + age.mul_f64(0.98))
        );
        assert!(
            samples
                .iter()
                .all(|lifetime| Some(lifetime.retires_at + RETIREMENT_PERIOD) == lifetime.resets_at)
        );
        // A maximum age above the default does not affect HTTP connections.
        let (now, samples) = sample(Some(DAY), DAY, DAY);
        assert!(
            samples
                .iter()
                .all(|lifetime| lifetime.retires_at < now + HOUR.mul_f64(1.1))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn resets_at_maximum_age_before_or_after_certificate_expiry() {
        let now = Instant::now();
        let lifetime = |certificate, reset| Lifetime {
            retires_at: now,
            certificate_ends_at: now + certificate,
            resets_at: reset,
        };
        for (certificate, reset, outlives) in [
            (HOUR, Some(now + 2 * HOUR), true),
            (2 * HOUR, Some(now + HOUR), false),
        ] {
            let mut outlived = false;
            lifetime(certificate, reset)
                .expire(|| outlived = true)
                .await;
            assert_eq!(outlived, outlives);
        }
        let (counted, begun) = (tokio::sync::Notify::new(), tokio::time::Instant::now());
        tokio::select! {
            () = lifetime(HOUR, None).expire(|| counted.notify_one()) => panic!("reset without a maximum age"),
            () = async { counted.notified().await; tokio::time::sleep(100 * HOUR).await } => {}
        }
        assert!(begun.elapsed() >= 100 * HOUR);
    }

    #[tokio::test(start_paused = true)]
    async fn drained_or_completes_at_drain_or_deadline() {
        let (drain, begun) = (CancellationToken::new(), tokio::time::Instant::now());
        let end = drained_or(&drain, Some(begun.into_std() + HOUR));
        tokio::time::timeout(2 * HOUR, end).await.unwrap();
        assert!(begun.elapsed() >= HOUR);
        drain.cancel();
        drained_or(&drain, Some(Instant::now() + 100 * HOUR)).await;
        drained_or(&drain, None).await;
    }
}
