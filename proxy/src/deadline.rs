//! Deadlines of an exchange, and of one attempt of it. `forward.rs` enforces them; routes, and the
//! deadlines of callers, set them. Without a deadline there is no timer.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// What a deadline limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The exchange: from the head of the request to the end of the response, retries included.
    Exchange,
    /// One attempt.
    Attempt,
}

/// The time at which an exchange or an attempt has to be complete, if there is one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadline(Option<(Instant, Limit)>);

impl Deadline {
    /// No deadline.
    pub const NONE: Self = Self(None);

    /// After `timeout`, from now on. None: no deadline.
    pub fn after(timeout: Option<Duration>, limit: Limit) -> Self {
        let at = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Self(at.map(|at| (at, limit)))
    }

    /// The earlier one of two. Of equal ones, `self`.
    pub fn earlier(self, other: Self) -> Self {
        match (self.0, other.0) {
            (Some((one, _)), Some((two, _))) if two < one => other,
            (None, _) => other,
            _ => self,
        }
    }

    /// The time until the deadline. None without one.
    pub fn remaining(self) -> Option<Duration> {
        self.0
            .map(|(at, _)| at.saturating_duration_since(Instant::now()))
    }

    /// A timer that fires at the deadline.
    pub fn timer(self) -> DeadlineTimer {
        DeadlineTimer {
            deadline: self.0,
            sleep: None,
        }
    }
}

/// Fires at a [`Deadline`].
#[derive(Debug)]
pub struct DeadlineTimer {
    deadline: Option<(Instant, Limit)>,
    /// In a box, and set on the first poll: most exchanges have no deadline, or end at once.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl DeadlineTimer {
    /// Ready at the deadline, with what it limits. Pending without one.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Limit> {
        let Some((at, limit)) = self.deadline else {
            return Poll::Pending;
        };
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep_until(at)));
        sleep.as_mut().poll(cx).map(|()| limit)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn earlier_deadline_fires_first() {
        let exchange = Deadline::after(Some(3 * SECOND), Limit::Exchange);
        let attempt = Deadline::after(Some(SECOND), Limit::Attempt);
        for deadline in [exchange.earlier(attempt), attempt.earlier(exchange)] {
            assert_eq!(deadline, attempt);
        }
        assert_eq!(exchange.earlier(Deadline::NONE), exchange);
        assert_eq!(Deadline::NONE.earlier(exchange), exchange);
        assert_eq!(exchange.remaining(), Some(3 * SECOND));
        let mut timer = exchange.timer();
        let limit = poll_fn(|cx| timer.poll(cx)).await;
        assert_eq!(
            (limit, exchange.remaining()),
            (Limit::Exchange, Some(Duration::ZERO))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_deadline_nothing_fires() {
        assert_eq!(Deadline::after(None, Limit::Attempt), Deadline::NONE);
        let endless = Deadline::after(Some(Duration::MAX), Limit::Attempt);
        let mut timer = endless.timer();
        let fired = tokio::time::timeout(1000 * SECOND, poll_fn(|cx| timer.poll(cx))).await;
        assert!(fired.is_err());
    }
}
