//! The time for which a lock is held, for the metrics.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use prometheus_client::metrics::histogram::Histogram;

/// Upper bounds of the histogram, in seconds. The goal is 20 ms.
const BUCKETS: [f64; 8] = [0.00001, 0.0001, 0.001, 0.005, 0.01, 0.02, 0.05, 0.2];

/// The times for which a lock was held, and the longest one.
#[derive(Debug)]
pub(super) struct Holds {
    longest: AtomicU64,
    pub(super) times: Histogram,
}

impl Default for Holds {
    fn default() -> Self {
        Holds {
            longest: AtomicU64::default(),
            times: Histogram::new(BUCKETS),
        }
    }
}

/// A guard of a lock, with the time since it is held.
pub(super) struct Timed<'a, G> {
    guard: G,
    since: Instant,
    holds: &'a Holds,
}

impl Holds {
    pub(super) fn hold<G>(&self, guard: G) -> Timed<'_, G> {
        Timed {
            guard,
            since: Instant::now(),
            holds: self,
        }
    }

    pub(super) fn longest(&self) -> Duration {
        Duration::from_nanos(self.longest.load(Ordering::Relaxed))
    }
}

impl<G> Drop for Timed<'_, G> {
    fn drop(&mut self) {
        let time = self.since.elapsed();
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.holds.longest.fetch_max(nanos, Ordering::Relaxed);
        self.holds.times.observe(time.as_secs_f64());
    }
}

impl<G: Deref> Deref for Timed<'_, G> {
    type Target = G::Target;

    fn deref(&self) -> &G::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for Timed<'_, G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}
