//! The time for which a lock is held, for the metrics.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The longest time for which a lock was held.
#[derive(Debug, Default)]
pub(super) struct Longest(AtomicU64);

/// A guard of a lock, with the time since it is held.
pub(super) struct Timed<'a, G> {
    guard: G,
    since: Instant,
    longest: &'a Longest,
}

impl Longest {
    pub(super) fn hold<G>(&self, guard: G) -> Timed<'_, G> {
        Timed {
            guard,
            since: Instant::now(),
            longest: self,
        }
    }

    pub(super) fn get(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

impl<G> Drop for Timed<'_, G> {
    fn drop(&mut self) {
        let nanos = u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.longest.0.fetch_max(nanos, Ordering::Relaxed);
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
