//! Deadlines of an exchange, and of one attempt of it. The protocols enforce them; routes, and the
//! deadlines of callers, set them. Without a deadline there is no timer.

use crate::error::Limit;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// The minimum difference between the time that is left and the value of `grpc-timeout` at which
/// the value changes.
const MIN_DIFFERENCE: Duration = Duration::from_millis(1);
/// `grpc-timeout` has at most eight digits.
const MAX_GRPC_TIMEOUT: u128 = 100_000_000;

/// The time at which an exchange or an attempt has to be complete, if there is one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadline(Option<(Instant, Limit)>);

impl Deadline {
    /// A deadline after `timeout`, from now on. `None`: no deadline.
    pub fn after(timeout: Option<Duration>, limit: Limit) -> Self {
        let at = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Self(at.map(|at| (at, limit)))
    }

    /// Whether there is one.
    pub fn is_set(self) -> bool {
        self.0.is_some()
    }

    /// The earlier one of two deadlines, or `self` if they are equal.
    pub fn earlier(self, other: Self) -> Self {
        match (self.0, other.0) {
            (Some((one, _)), Some((two, _))) if two < one => other,
            (None, _) => other,
            _ => self,
        }
    }

    /// The time until the deadline, or `None` without a deadline.
    pub fn remaining(self) -> Option<Duration> {
        self.0
            .map(|(at, _)| at.saturating_duration_since(Instant::now()))
    }

    /// The new value of a valid `grpc-timeout`: the time that is left. `None` if that is almost the
    /// same, or if there is no deadline.
    pub fn grpc_timeout(self, value: &[u8]) -> Option<String> {
        let (before, left) = (parse_grpc_timeout(value)?, self.remaining()?);
        if before.saturating_sub(left) < MIN_DIFFERENCE {
            return None;
        }
        let units = [(left.as_micros(), 'u'), (left.as_millis(), 'm')];
        let precise = units
            .into_iter()
            .find(|(count, _)| *count < MAX_GRPC_TIMEOUT);
        let (count, unit) = precise.unwrap_or((u128::from(left.as_secs()), 'S'));
        Some(format!("{}{unit}", count.min(MAX_GRPC_TIMEOUT - 1)))
    }

    /// Polls `work` until the deadline, and cancels it then.
    pub async fn limit<T, E: From<Limit>>(
        self,
        mut work: Pin<&mut impl Future<Output = Result<T, E>>>,
    ) -> Result<T, E> {
        // Boxed, and set on the second poll: most exchanges have no deadline, or end at once.
        let mut timer = None;
        poll_fn(|cx| match (work.as_mut().poll(cx), self.0) {
            (Poll::Pending, Some((at, limit))) => {
                let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(at)));
                timer.as_mut().poll(cx).map(|()| Err(limit.into()))
            }
            (polled, _) => polled,
        })
        .await
    }
}

/// Parses `grpc-timeout`: at most eight digits, and a unit. `None` if it is malformed.
pub fn parse_grpc_timeout(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let count: u64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    Some(match unit {
        b'H' => Duration::from_secs(count * 3600),
        b'M' => Duration::from_secs(count * 60),
        b'S' => Duration::from_secs(count),
        b'm' => Duration::from_millis(count),
        b'u' => Duration::from_micros(count),
        b'n' => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::pin::pin;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn earlier_deadline_fires_first() {
        let exchange = Deadline::after(Some(3 * SECOND), Limit::Exchange);
        let attempt = Deadline::after(Some(SECOND), Limit::Attempt);
        for deadline in [exchange.earlier(attempt), attempt.earlier(exchange)] {
            assert_eq!(deadline, attempt);
        }
        assert_eq!(exchange.earlier(Deadline::default()), exchange);
        assert_eq!(Deadline::default().earlier(exchange), exchange);
        assert_eq!(exchange.remaining(), Some(3 * SECOND));
        let limited = exchange.limit(pin!(pending::<Result<(), Limit>>())).await;
        assert_eq!(
            (limited, exchange.remaining()),
            (Err(Limit::Exchange), Some(Duration::ZERO))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn grpc_timeouts_are_parsed_and_written() {
        for (text, expected) in [
            ("1H", Some(3600 * SECOND)),
            ("2M", Some(120 * SECOND)),
            ("3S", Some(3 * SECOND)),
            ("99999999m", Some(Duration::from_millis(99_999_999))),
            ("5u", Some(Duration::from_micros(5))),
            ("7n", Some(Duration::from_nanos(7))),
            ("0S", Some(Duration::ZERO)),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("123456789S", None),
            ("S", None),
            ("", None),
            ("5", None),
            ("-5S", None),
            ("+5S", None),
            ("5s", None),
            ("1.5S", None),
        ] {
            assert_eq!(parse_grpc_timeout(text.as_bytes()), expected, "{text}");
        }
        for (timeout, expected) in [
            (5 * SECOND, "5000000u"),
            (100 * SECOND, "100000m"),
            (Duration::from_secs(360_000), "360000S"),
            (Duration::from_nanos(7), "0u"),
        ] {
            let deadline = Deadline::after(Some(timeout), Limit::Caller);
            let written = deadline.grpc_timeout(b"1000H");
            assert_eq!(written.as_deref(), Some(expected));
        }
        let deadline = Deadline::after(Some(SECOND), Limit::Caller);
        for unchanged in [&b"1S"[..], b"1000m", b"1000999u", b"10", b""] {
            assert_eq!(deadline.grpc_timeout(unchanged), None);
        }
        assert_eq!(Deadline::default().grpc_timeout(b"1S"), None);
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_deadline_nothing_fires() {
        assert_eq!(Deadline::after(None, Limit::Attempt), Deadline::default());
        let endless = Deadline::after(Some(Duration::MAX), Limit::Attempt);
        let mut work = pin!(pending::<Result<(), Limit>>());
        let limited = endless.limit(work.as_mut());
        let fired = tokio::time::timeout(1000 * SECOND, limited).await;
        assert!(fired.is_err());
    }
}
