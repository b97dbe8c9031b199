//! The retry budget of one backend: retries are a fraction of its requests, so that a failing
//! backend gets at most that much more load. Pure: the caller passes the time.
//!
//! Requests and retries are counted with weights that decay. A retry is permitted while the count
//! of retries is below a floor plus a fraction of the count of requests. Over any time T from the
//! start, this permits at most `ratio * requests + floor + floor * T / window` retries. Finagle's
//! `RetryBudget`, which Linkerd uses, counts in a window of the same length: 20% and 10 retries per
//! second. Here the floor is a tenth of it: each proxy and worker has its own, so the callers of a
//! failing backend multiply it.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The time in which the weight of a request or retry falls to 1/e.
const WINDOW: Duration = Duration::from_secs(10);

/// The parameters of a retry budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetSettings {
    /// Retries in percent of the requests.
    pub percent: u32,
    /// Retries that are permitted at any rate of requests.
    pub min_per_second: u32,
}

impl Default for BudgetSettings {
    fn default() -> Self {
        Self {
            percent: 20,
            min_per_second: 1,
        }
    }
}

/// The requests and retries of one backend.
#[derive(Debug)]
pub struct RetryBudget {
    /// Retries per request.
    ratio: Cell<f64>,
    /// Retries in [`WINDOW`] that are permitted at any rate of requests.
    floor: Cell<f64>,
    counts: Cell<Counts>,
}

#[derive(Clone, Copy, Debug)]
struct Counts {
    requests: f64,
    retries: f64,
    at: Instant,
}

impl RetryBudget {
    /// The default budget, without requests.
    pub fn new(now: Instant) -> Self {
        let counts = Cell::new(Counts {
            requests: 0.0,
            retries: 0.0,
            at: now,
        });
        let budget = Self {
            ratio: Cell::default(),
            floor: Cell::default(),
            counts,
        };
        budget.set(BudgetSettings::default(), 1);
        budget
    }

    /// Sets the parameters, which `workers` share. The counts stay.
    pub fn set(&self, settings: BudgetSettings, workers: u32) {
        self.ratio.set(f64::from(settings.percent) / 100.0);
        let per_second = f64::from(settings.min_per_second) / f64::from(workers.max(1));
        self.floor.set(per_second * WINDOW.as_secs_f64());
    }

    /// Counts a request.
    pub fn record_request(&self, now: Instant) {
        let mut counts = self.decayed(now);
        counts.requests += 1.0;
        self.counts.set(counts);
    }

    /// Counts a retry, if there is budget for it.
    pub fn try_retry(&self, now: Instant) -> bool {
        let mut counts = self.decayed(now);
        let permitted = self.floor.get() + self.ratio.get() * counts.requests;
        let is_permitted = counts.retries + 1.0 <= permitted;
        if is_permitted {
            counts.retries += 1.0;
        }
        self.counts.set(counts);
        is_permitted
    }

    fn decayed(&self, now: Instant) -> Counts {
        let counts = self.counts.get();
        let elapsed = now.saturating_duration_since(counts.at);
        let decay = (-elapsed.as_secs_f64() / WINDOW.as_secs_f64()).exp();
        Counts {
            requests: counts.requests * decay,
            retries: counts.retries * decay,
            at: now.max(counts.at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends requests at this rate, each of which wants two retries. Returns the requests and the
    /// permitted retries.
    fn simulate(per_second: f64, duration: Duration, seed: u64) -> (u32, u32) {
        let (start, mut rng) = (Instant::now(), fastrand::Rng::with_seed(seed));
        let budget = RetryBudget::new(start);
        let (mut now, mut requests, mut retries) = (start, 0, 0);
        while now - start < duration {
            // Bursts and pauses.
            for _ in 0..rng.u32(1..=9) {
                budget.record_request(now);
                requests += 1;
                retries += u32::from(budget.try_retry(now)) + u32::from(budget.try_retry(now));
            }
            now += Duration::from_secs_f64(rng.f64() * 10.0 / per_second);
        }
        (requests, retries)
    }

    #[test]
    fn permits_a_fifth_of_the_requests_and_one_per_second() {
        let duration = Duration::from_secs(300);
        for (seed, rate) in [0.1, 1.0, 10.0, 100.0, 2000.0].into_iter().enumerate() {
            let (requests, retries) = simulate(rate, duration, seed as u64);
            let most = 0.2 * f64::from(requests) + 10.0 + duration.as_secs_f64();
            let (retries, requests) = (f64::from(retries), f64::from(requests));
            assert!(retries <= most, "{retries} for {requests} at {rate}/s");
            // Nor much less: bursts use what earlier requests have left.
            let least = most.min(2.0 * requests) * 0.7;
            assert!(retries >= least, "{retries} for {requests} at {rate}/s");
        }
    }

    #[test]
    fn floor_is_available_at_once_and_returns_with_time() {
        let start = Instant::now();
        let budget = RetryBudget::new(start);
        let retries = |now| (0..100).filter(|_| budget.try_retry(now)).count();
        assert_eq!(retries(start), 10);
        assert_eq!(retries(start + Duration::from_secs(1)), 0);
        assert_eq!(retries(start + Duration::from_secs(2)), 1);
        assert_eq!(retries(start + Duration::from_secs(3600)), 10);
    }

    #[test]
    fn earlier_requests_permit_no_retries_later() {
        let start = Instant::now();
        let budget = RetryBudget::new(start);
        (0..100_000).for_each(|_| budget.record_request(start));
        let later = start + Duration::from_secs(3600);
        assert_eq!((0..100).filter(|_| budget.try_retry(later)).count(), 10);
    }
}
