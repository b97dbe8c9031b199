//! Shared parts of the long-running components (controller, injector, proxy): the admin server,
//! listeners, admission, readiness, metrics, logs, back-off, signals and error chains. Has no
//! knowledge of Kubernetes, of the mesh or of any component.

pub mod admin;
pub mod admission;
pub mod listen;
pub mod metrics;
mod process;
mod readiness;

use std::time::Duration;

pub use admin::{Admin, Page};
pub use process::{
    LogFormat, error_chain, init_logging, max_open_files, raise_max_open_files, shutdown_signal,
};
pub use readiness::{Condition, Readiness};

/// Exponential delays between `min` and `max`, doubled with each error in a row.
#[derive(Debug)]
pub struct Backoff {
    min: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    /// Delays from `min` to `max`.
    pub fn new(min: Duration, max: Duration) -> Self {
        let next = min;
        Self { min, max, next }
    }

    /// The delay after one more error.
    pub fn next_delay(&mut self) -> Duration {
        let next = (self.next * 2).min(self.max);
        std::mem::replace(&mut self.next, next)
    }

    /// Starts over with `min`. For use after a success.
    pub fn reset(&mut self) {
        self.next = self.min;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_delays_up_to_the_maximum_and_starts_over_after_a_reset() {
        let (min, max) = (Duration::from_millis(250), Duration::from_secs(1));
        let mut backoff = Backoff::new(min, max);
        let delays: Vec<_> = (0..5).map(|_| backoff.next_delay()).collect();
        assert_eq!(delays, [min, min * 2, max, max, max]);
        backoff.reset();
        assert_eq!(backoff.next_delay(), min);
    }
}
