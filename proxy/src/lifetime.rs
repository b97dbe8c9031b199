//! How long a connection between proxies is used. An HTTP connection has a maximum age, at most until a certificate of either side
//! expires, and ends gracefully. An opaque one, or one with a stream still open, outlives the peer's certificate: that is counted. It
//! is reset only at `--max-connection-age`.
//!
//! A [`Lifetime`] is drawn after the handshake and carried by [`crate::io::Io`]; a plaintext connection has none. Nothing here closes a
//! connection: whoever carries it does.

use std::cell::RefCell;
use std::future::{Future, pending, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;

/// The maximum age of an HTTP connection, before jitter.
const MAX_HTTP_AGE: Duration = Duration::from_secs(3600);
/// The share of an age that is random.
const JITTER: f64 = 0.1;
/// How long before its end an HTTP connection is retired. Pools drop connections that are idle for half of this, so a caller never
/// sends a request on a connection that the callee is closing.
const RETIREMENT: Duration = Duration::from_secs(60);

/// When a connection between proxies ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// No HTTP exchange begins after this.
    pub retires_at: Instant,
    /// When the peer's certificate expires.
    pub certificate_ends_at: Instant,
    /// When the connection is reset, whatever it carries.
    pub resets_at: Option<Instant>,
}

impl Lifetime {
    /// Whether no further exchange may begin on the connection.
    pub fn is_retired(&self, now: Instant) -> bool {
        now >= self.retires_at
    }

    /// When a callee closes the connection while it is idle: the caller no longer has it in its pool.
    pub fn closes_idle_at(&self) -> Instant {
        (self.retires_at + RETIREMENT).min(self.certificate_ends_at)
    }

    /// Done when a connection in use has to be reset. At the end of the peer's certificate it calls `outlived`, and keeps what that
    /// returns until it is dropped itself.
    pub async fn expire<Counted>(self, outlived: impl FnOnce() -> Counted) {
        let first = self.resets_at.map_or(self.certificate_ends_at, |at| {
            at.min(self.certificate_ends_at)
        });
        sleep_until(first.into()).await;
        if self.resets_at == Some(first) {
            return;
        }
        let _counted = outlived();
        match self.resets_at {
            Some(at) => sleep_until(at.into()).await,
            None => pending().await,
        }
    }
}

/// Draws the lifetimes of a worker's connections.
pub struct Lifetimes {
    max_connection_age: Option<Duration>,
    rng: RefCell<fastrand::Rng>,
}

impl Lifetimes {
    /// With the age at which connections are reset, where there is one.
    pub fn new(max_connection_age: Option<Duration>, rng: fastrand::Rng) -> Self {
        Self {
            max_connection_age,
            rng: RefCell::new(rng),
        }
    }

    /// For a connection made `now`. `peer_left` is what is left of the peer's certificate, `own_left` of the own one: the peer ends
    /// the connection by that.
    pub fn draw(&self, now: Instant, peer_left: Duration, own_left: Duration) -> Lifetime {
        let mut rng = self.rng.borrow_mut();
        let reset_age = self
            .max_connection_age
            .map(|age| age.mul_f64(1.0 - JITTER * rng.f64()));
        let http_age = MAX_HTTP_AGE.mul_f64(1.0 - JITTER + 2.0 * JITTER * rng.f64());
        let end = http_age
            .min(peer_left)
            .min(own_left)
            .min(reset_age.unwrap_or(Duration::MAX));
        Lifetime {
            retires_at: now + end.saturating_sub(RETIREMENT).max(end / 2),
            certificate_ends_at: now + peer_left,
            resets_at: reset_age.map(|age| now + age),
        }
    }
}

/// Done when a connection in use has to be reset: a [`Lifetime::expire`] under way. Never done for a plaintext connection.
pub struct Expiry(pub Option<Pin<Box<dyn Future<Output = ()>>>>);

impl Future for Expiry {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0
            .as_mut()
            .map_or(Poll::Pending, |expire| expire.as_mut().poll(cx))
    }
}

/// Done when a connection takes no more exchanges: the proxy drains, or `at` has come.
pub fn drained_or(drain: &CancellationToken, at: Option<Instant>) -> impl Future<Output = ()> {
    // In a box: most connections have none.
    let mut timer = at.map(|at| Box::pin(sleep_until(at.into())));
    async move {
        let mut drain = pin!(drain.cancelled());
        poll_fn(|cx| {
            let has_come = timer
                .as_mut()
                .is_some_and(|timer| timer.as_mut().poll(cx).is_ready());
            if has_come {
                Poll::Ready(())
            } else {
                drain.as_mut().poll(cx)
            }
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);
    const DAY: Duration = Duration::from_secs(24 * 3600);

    /// Lifetimes of many connections, and what all of them satisfy.
    fn draw(
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
                .map(|_| lifetimes.draw(now, peer_left, own_left))
                .collect(),
        )
    }

    #[test]
    fn an_http_connection_retires_after_an_hour_give_or_take_a_tenth() {
        let (now, drawn) = draw(None, DAY, DAY);
        let ages = || {
            drawn
                .iter()
                .map(|lifetime| lifetime.retires_at + RETIREMENT - now)
        };
        assert!(ages().all(|age| age >= HOUR.mul_f64(0.9) && age <= HOUR.mul_f64(1.1)));
        assert!(
            ages().any(|age| age < HOUR.mul_f64(0.92))
                && ages().any(|age| age > HOUR.mul_f64(1.08))
        );
        assert!(RETIREMENT >= 2 * crate::balance::KEEP_CONNECTION);
        assert!(
            drawn.iter().all(|lifetime| lifetime.resets_at.is_none()
                && lifetime.certificate_ends_at == now + DAY)
        );
    }

    #[test]
    fn an_http_connection_retires_before_a_certificate_of_either_side_expires() {
        let left = Duration::from_secs(600);
        for (peer, own) in [(left, DAY), (DAY, left)] {
            let (now, drawn) = draw(None, peer, own);
            assert!(
                drawn
                    .iter()
                    .all(|lifetime| lifetime.retires_at == now + left - RETIREMENT)
            );
            assert!(
                drawn
                    .iter()
                    .all(|lifetime| lifetime.certificate_ends_at == now + peer)
            );
        }
        // With little left, some of it is still used.
        let (now, drawn) = draw(None, RETIREMENT, DAY);
        assert!(
            drawn
                .iter()
                .all(|lifetime| lifetime.retires_at == now + RETIREMENT / 2)
        );
        assert!(
            drawn
                .iter()
                .all(|lifetime| lifetime.closes_idle_at() == lifetime.certificate_ends_at)
        );
    }

    #[test]
    fn a_maximum_age_resets_within_it_and_retires_before() {
        let age = HOUR / 2;
        let (now, drawn) = draw(Some(age), DAY, DAY);
        let resets = || drawn.iter().filter_map(|lifetime| lifetime.resets_at);
        assert!(resets().all(|at| at <= now + age && at >= now + age.mul_f64(0.9)));
        assert!(
            resets().any(|at| at < now + age.mul_f64(0.92))
                && resets().any(|at| at > now + age.mul_f64(0.98))
        );
        assert!(
            drawn
                .iter()
                .all(|lifetime| Some(lifetime.retires_at + RETIREMENT) == lifetime.resets_at)
        );
        // A longer one than the usual leaves HTTP as it is.
        let (now, drawn) = draw(Some(DAY), DAY, DAY);
        assert!(
            drawn
                .iter()
                .all(|lifetime| lifetime.retires_at < now + HOUR.mul_f64(1.1))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_reset_at_its_age_whether_or_not_it_outlives_the_certificate() {
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
            () = lifetime(HOUR, None).expire(|| counted.notify_one()) => panic!("without a maximum age there is no reset"),
            () = async { counted.notified().await; tokio::time::sleep(100 * HOUR).await } => {}
        }
        assert!(begun.elapsed() >= 100 * HOUR);
    }

    #[tokio::test(start_paused = true)]
    async fn exchanges_end_with_the_drain_or_at_their_time() {
        let (drain, begun) = (CancellationToken::new(), tokio::time::Instant::now());
        let end = drained_or(&drain, Some(begun.into_std() + HOUR));
        tokio::time::timeout(2 * HOUR, end).await.unwrap();
        assert!(begun.elapsed() >= HOUR);
        drain.cancel();
        drained_or(&drain, Some(Instant::now() + 100 * HOUR)).await;
        drained_or(&drain, None).await;
    }
}
