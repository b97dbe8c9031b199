//! How often a pod may ask for a certificate: a few at once, then one now and again. The time is
//! passed in; memory is bounded.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// So many at once: a proxy that restarts some times over.
const BURST: u32 = 5;
/// Then one in this time.
const REFILL_INTERVAL: Duration = Duration::from_secs(10);
/// Pods that asked within the last minute; more are asked to wait.
const MAX_PODS: usize = 100_000;

/// The pods that have asked lately, by UID.
#[derive(Default)]
pub(super) struct Limiter {
    /// When each one will have its whole burst again. A pod that already has it is forgotten.
    whole_again: HashMap<Arc<str>, Instant>,
    swept: Option<Instant>,
}

impl Limiter {
    /// Takes one of the pod's turns; else says how long to wait for the next.
    pub(super) fn take(&mut self, uid: &Arc<str>, now: Instant) -> Result<(), Duration> {
        self.sweep(now);
        if self.whole_again.len() >= MAX_PODS && !self.whole_again.contains_key(uid) {
            return Err(REFILL_INTERVAL);
        }
        let whole_again = self
            .whole_again
            .get(uid)
            .copied()
            .filter(|whole| *whole > now)
            .unwrap_or(now)
            + REFILL_INTERVAL;
        match (whole_again - now).checked_sub(REFILL_INTERVAL * BURST) {
            Some(wait) if !wait.is_zero() => Err(wait),
            _ => {
                self.whole_again.insert(uid.clone(), whole_again);
                Ok(())
            }
        }
    }

    /// Seldom enough to cost nothing, often enough that what is kept is what asked lately.
    fn sweep(&mut self, now: Instant) {
        if self
            .swept
            .is_none_or(|swept| now >= swept + REFILL_INTERVAL)
        {
            self.whole_again.retain(|_, whole| *whole > now);
            self.swept = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_then_one_now_and_again_each_pod_by_itself() {
        let (mut limiter, now) = (Limiter::default(), Instant::now());
        let (one, other) = ("one".into(), "other".into());
        for _ in 0..BURST {
            assert_eq!(limiter.take(&one, now), Ok(()));
        }
        assert_eq!(limiter.take(&one, now), Err(REFILL_INTERVAL));
        assert_eq!(
            limiter.take(&one, now + REFILL_INTERVAL / 4),
            Err(REFILL_INTERVAL * 3 / 4),
            "a refusal costs nothing"
        );
        assert_eq!(limiter.take(&other, now), Ok(()));
        assert_eq!(limiter.take(&one, now + REFILL_INTERVAL), Ok(()));
        assert_eq!(
            limiter.take(&one, now + REFILL_INTERVAL),
            Err(REFILL_INTERVAL)
        );
        let later = now + REFILL_INTERVAL * 100;
        for _ in 0..BURST {
            assert_eq!(limiter.take(&one, later), Ok(()));
        }
        assert!(
            limiter.take(&one, later).is_err(),
            "a long rest earns one burst"
        );
    }

    #[test]
    fn memory_is_bounded_and_freed() {
        let (mut limiter, now) = (Limiter::default(), Instant::now());
        for pod in 0..MAX_PODS {
            limiter.take(&pod.to_string().into(), now).unwrap();
        }
        assert_eq!(limiter.take(&"one more".into(), now), Err(REFILL_INTERVAL));
        assert_eq!(
            limiter.take(&"0".into(), now),
            Ok(()),
            "those that are known go on"
        );
        limiter
            .take(&"later".into(), now + REFILL_INTERVAL * 3)
            .unwrap();
        assert_eq!(limiter.whole_again.len(), 1);
    }
}
