//! The results of requests in the last interval, for shares of failures. Pure: the caller passes
//! the time.
//!
//! An interval is two halves: the counts of the current and of the previous one. So they cover at
//! least half of the interval and at most all of it, at the cost of five integers.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Results of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub requests: u32,
    pub failures: u32,
}

impl Counts {
    /// Whether there are enough requests, and at least this share of them has failed.
    pub fn exceed(self, percent: u32, min_requests: u32) -> bool {
        self.requests >= min_requests.max(1)
            && u64::from(self.failures) * 100 >= u64::from(percent) * u64::from(self.requests)
    }

    /// Whether requests fail at least twice as often as those of `others`, if these have any.
    pub fn stand_out(self, others: Self) -> bool {
        let [own, other] = [(self, others), (others, self)]
            .map(|(one, of)| u64::from(one.failures) * u64::from(of.requests));
        others.requests == 0 || own > 0 && own >= 2 * other
    }

    /// The counts without those of `part`.
    pub fn without(self, part: Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(part.requests),
            failures: self.failures.saturating_sub(part.failures),
        }
    }

    fn with(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_add(other.requests),
            failures: self.failures.saturating_add(other.failures),
        }
    }
}

/// The number of the half interval that contains `now`.
pub(super) fn half(start: Instant, now: Instant, interval: Duration) -> u32 {
    let elapsed = now.saturating_duration_since(start);
    let milliseconds = |time: Duration| time.as_secs() * 1000 + u64::from(time.subsec_millis());
    let number = milliseconds(elapsed) / (milliseconds(interval) / 2).max(1);
    // Only whether two numbers are equal or adjacent counts.
    number as u32
}

/// The results of requests in the last interval.
#[derive(Debug, Default)]
pub(super) struct Window {
    previous: Cell<Counts>,
    current: Cell<Counts>,
    /// The half interval that `current` counts.
    number: Cell<u32>,
}

impl Window {
    /// Counts a result in this half interval.
    pub fn record(&self, number: u32, is_failure: bool) {
        self.advance(number);
        let one = Counts {
            requests: 1,
            failures: is_failure.into(),
        };
        self.current.set(self.current.get().with(one));
    }

    /// The results of this half interval and of the previous one.
    pub fn counts(&self, number: u32) -> Counts {
        self.advance(number);
        self.previous.get().with(self.current.get())
    }

    /// Moves the results out of this window, and out of `all`, which contains them.
    pub fn take_from(&self, all: &Self, number: u32) {
        self.advance(number);
        all.advance(number);
        for (own, all) in [
            (&self.previous, &all.previous),
            (&self.current, &all.current),
        ] {
            all.set(all.get().without(own.take()));
        }
    }

    /// Forgets all results.
    pub fn clear(&self) {
        self.previous.take();
        self.current.take();
    }

    fn advance(&self, number: u32) {
        let before = self.number.replace(number);
        if before != number {
            let current = self.current.take();
            let is_next = number == before.wrapping_add(1);
            self.previous
                .set(if is_next { current } else { Counts::default() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(requests: u32, failures: u32) -> Counts {
        Counts { requests, failures }
    }

    #[test]
    fn counts_the_current_and_the_previous_half() {
        let (window, start) = (Window::default(), Instant::now());
        let at = |milliseconds| {
            let now = start + Duration::from_millis(milliseconds);
            half(start, now, Duration::from_secs(10))
        };
        assert_eq!([at(0), at(4999), at(5000), at(10_000)], [0, 0, 1, 2]);
        window.record(0, true);
        window.record(0, false);
        window.record(1, true);
        assert_eq!(window.counts(1), counts(3, 2));
        assert_eq!(window.counts(2), counts(1, 1));
        window.record(2, false);
        assert_eq!(window.counts(4), counts(0, 0), "a pause");
        assert_eq!(half(start, start, Duration::ZERO), 0);
    }

    #[test]
    fn share_counts_with_enough_requests_only() {
        assert!(!counts(19, 19).exceed(50, 20) && counts(20, 10).exceed(50, 20));
        assert!(!counts(20, 9).exceed(50, 20) && !counts(0, 0).exceed(50, 0));
        assert!(counts(u32::MAX, u32::MAX).exceed(100, u32::MAX));
    }

    #[test]
    fn one_stands_out_that_fails_twice_as_often_as_the_others() {
        assert!(counts(20, 10).stand_out(counts(80, 0)));
        assert!(counts(20, 10).stand_out(counts(80, 20)));
        assert!(!counts(20, 10).stand_out(counts(80, 21)));
        assert!(!counts(20, 20).stand_out(counts(80, 80)), "all fail");
        assert!(counts(20, 20).stand_out(counts(0, 0)), "the only one");
    }

    #[test]
    fn results_leave_the_window_of_all() {
        let (one, all) = (Window::default(), Window::default());
        for (number, window) in [(1, &one), (1, &all), (2, &one), (2, &all), (2, &all)] {
            window.record(number, true);
        }
        one.take_from(&all, 2);
        assert_eq!((one.counts(2), all.counts(2)), (counts(0, 0), counts(1, 1)));
    }
}
