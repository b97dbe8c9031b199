//! Peak-EWMA: an endpoint's latency, as an average that jumps up at once and comes down slowly. Pure: instants go in.
//!
//! The idea is Finagle's (`com.twitter.finagle.loadbalancer.PeakEwma`), in Rust first tower's (`tower::load::PeakEwma`):
//! the cost of an endpoint is its latency times the requests under way and the one to come; a latency above the estimate
//! replaces it, one below pulls it down by as much weight as time has passed. Where nothing is observed the estimate
//! falls towards zero, so that an endpoint that was slow once is tried again. Unlike theirs it assumes nothing of an
//! endpoint that never answered: until it has, requests under way alone compare it, whatever its siblings' latency is.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The time in which the weight of the past falls to 1/e.
const DECAY_SECONDS: f64 = 10.0;
/// Below this a difference in latency is noise: requests under way decide. It also keeps endpoints of an idle service
/// alike, whose estimates have all fallen to about nothing, so that a burst spreads.
const NOISE_SECONDS: f64 = 100e-6;
/// A failure counts as a latency this many times the estimate, so that failing fast does not look like being fast; and
/// no more than the cap, so that one bad minute is over soon.
const FAILURE_FACTOR: f64 = 5.0;
const FAILURE_CAP_SECONDS: f64 = 1.0;
/// The estimate for a failure where nothing was observed before.
const ASSUMED_SECONDS: f64 = 30e-3;

/// One endpoint's latency.
#[derive(Debug, Default)]
pub(super) struct PeakEwma(Cell<Option<Observed>>);

#[derive(Clone, Copy, Debug)]
struct Observed {
    seconds: f64,
    at: Instant,
}

impl PeakEwma {
    /// Whether one more request costs less here, with `pending` under way, than `there` with `pending_there`.
    pub fn is_cheaper(&self, pending: u32, there: &Self, pending_there: u32, now: Instant) -> bool {
        match (self.estimate(now), there.estimate(now)) {
            (Some(here), Some(there)) => cost(here, pending) < cost(there, pending_there),
            _ => pending < pending_there,
        }
    }

    /// A response took this long.
    pub fn succeeded(&self, latency: Duration, now: Instant) {
        self.observe(latency.as_secs_f64(), now);
    }

    /// There was no response, or none worth the name, after this time.
    pub fn failed(&self, latency: Duration, now: Instant) {
        let penalty =
            (self.estimate(now).unwrap_or(ASSUMED_SECONDS) + NOISE_SECONDS) * FAILURE_FACTOR;
        self.observe(
            latency.as_secs_f64().max(penalty.min(FAILURE_CAP_SECONDS)),
            now,
        );
    }

    fn observe(&self, latency: f64, now: Instant) {
        let seconds = match self.0.get() {
            Some(before) if latency < before.seconds => {
                let weight = before.weight(now);
                before.seconds * weight + latency * (1.0 - weight)
            }
            _ => latency,
        };
        self.0.set(Some(Observed { seconds, at: now }));
    }

    /// In seconds; `None`: nothing was ever observed.
    fn estimate(&self, now: Instant) -> Option<f64> {
        self.0
            .get()
            .map(|observed| observed.seconds * observed.weight(now))
    }
}

impl Observed {
    /// What is left of the past's weight.
    fn weight(&self, now: Instant) -> f64 {
        (-now.saturating_duration_since(self.at).as_secs_f64() / DECAY_SECONDS).exp()
    }
}

fn cost(seconds: f64, pending: u32) -> f64 {
    (seconds + NOISE_SECONDS) * (f64::from(pending) + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn assert_estimate(ewma: &PeakEwma, now: Instant, expected_ms: f64) {
        let estimate = ewma.estimate(now).expect("observed") * 1000.0;
        assert!(
            (estimate - expected_ms).abs() < 0.001,
            "{estimate} ms, expected {expected_ms} ms"
        );
    }

    #[test]
    fn a_peak_counts_at_once_and_decays_by_time() {
        let (start, ewma) = (Instant::now(), PeakEwma::default());
        assert_eq!(ewma.estimate(start), None);
        ewma.succeeded(MS, start);
        assert_estimate(&ewma, start, 1.0);
        ewma.succeeded(100 * MS, start);
        assert_estimate(&ewma, start, 100.0);
        // Without observations: to 1/e in 10 seconds.
        assert_estimate(
            &ewma,
            start + Duration::from_secs(10),
            100.0 / std::f64::consts::E,
        );
        // An observation right after changes next to nothing, one 10 seconds later most of it.
        ewma.succeeded(MS, start);
        assert_estimate(&ewma, start, 100.0);
        let later = start + Duration::from_secs(10);
        ewma.succeeded(MS, later);
        assert_estimate(
            &ewma,
            later,
            100.0 / std::f64::consts::E + (1.0 - 1.0 / std::f64::consts::E),
        );
    }

    #[test]
    fn latency_and_requests_under_way_make_the_cost() {
        let now = Instant::now();
        let (fast, slow) = (PeakEwma::default(), PeakEwma::default());
        fast.succeeded(MS, now);
        slow.succeeded(10 * MS, now);
        assert!(fast.is_cheaper(0, &slow, 0, now) && !slow.is_cheaper(0, &fast, 0, now));
        assert!(fast.is_cheaper(8, &slow, 0, now));
        assert!(slow.is_cheaper(0, &fast, 9, now));
        assert!(!fast.is_cheaper(3, &fast, 3, now));
    }

    #[test]
    fn what_never_answered_is_compared_by_requests_under_way() {
        let now = Instant::now();
        let (fresh, known) = (PeakEwma::default(), PeakEwma::default());
        known.succeeded(MS, now);
        assert!(!fresh.is_cheaper(0, &known, 0, now) && !known.is_cheaper(0, &fresh, 0, now));
        assert!(fresh.is_cheaper(0, &known, 1, now) && known.is_cheaper(0, &fresh, 1, now));
    }

    #[test]
    fn failing_fast_does_not_look_fast() {
        let now = Instant::now();
        let (failing, healthy, fresh) = (
            PeakEwma::default(),
            PeakEwma::default(),
            PeakEwma::default(),
        );
        for ewma in [&failing, &healthy] {
            ewma.succeeded(10 * MS, now);
        }
        failing.failed(Duration::ZERO, now);
        assert!(healthy.is_cheaper(3, &failing, 0, now));
        (0..20).for_each(|_| failing.failed(Duration::ZERO, now));
        assert_estimate(&failing, now, 1000.0);
        // What took longer than the cap took longer.
        failing.failed(Duration::from_secs(3), now);
        assert_estimate(&failing, now, 3000.0);
        fresh.failed(Duration::ZERO, now);
        assert!(healthy.is_cheaper(0, &fresh, 0, now));
    }

    #[test]
    fn after_a_quiet_time_all_are_alike_but_for_requests_under_way() {
        let start = Instant::now();
        let (one, other) = (PeakEwma::default(), PeakEwma::default());
        one.succeeded(MS, start);
        other.succeeded(50 * MS, start);
        let later = start + Duration::from_secs(600);
        assert!(other.is_cheaper(0, &one, 1, later) && one.is_cheaper(0, &other, 1, later));
    }

    #[test]
    fn a_clock_that_seems_to_run_backwards_does_no_harm() {
        let start = Instant::now() + Duration::from_secs(5);
        let ewma = PeakEwma::default();
        ewma.succeeded(MS, start);
        ewma.succeeded(2 * MS, start - Duration::from_secs(5));
        assert_estimate(&ewma, start - Duration::from_secs(5), 2.0);
    }
}
