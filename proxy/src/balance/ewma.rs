//! Peak-EWMA: a latency estimate that rises to each peak at once and decays slowly. Pure: the
//! caller passes the time.
//!
//! The algorithm is that of Finagle (`com.twitter.finagle.loadbalancer.PeakEwma`) and of tower
//! (`tower::load::PeakEwma`). The cost of an endpoint is its latency times the number of in-flight
//! requests plus one. A latency above the estimate replaces it. A latency below it is averaged with
//! a weight that grows with the time since the last observation. Without observations the estimate
//! decays to zero, so that an endpoint that was slow once is tried again. Unlike these
//! implementations it assumes no latency for an endpoint that has not responded yet: until then
//! only in-flight requests are compared.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The time in which the weight of the past falls to 1/e.
const DECAY_SECONDS: f64 = 10.0;
/// Added to each latency. Smaller differences have little weight, and in-flight requests decide.
/// All endpoints of an idle Service get about the same cost, so that a burst spreads.
const NOISE_SECONDS: f64 = 100e-6;
/// A failure counts as a latency of this multiple of the estimate, so that an endpoint that fails
/// fast is not preferred.
const FAILURE_FACTOR: f64 = 5.0;
/// The maximum latency that a fast failure counts as, so that an endpoint recovers soon.
const MAX_FAILURE_SECONDS: f64 = 1.0;
/// The estimate for a failure without earlier observations.
const DEFAULT_SECONDS: f64 = 30e-3;

/// The latency estimate of one endpoint.
#[derive(Debug, Default)]
pub(super) struct PeakEwma(Cell<Option<Observation>>);

#[derive(Clone, Copy, Debug)]
struct Observation {
    seconds: f64,
    at: Instant,
}

impl PeakEwma {
    /// Whether the cost with `in_flight` requests is less than the cost of `other` with
    /// `other_in_flight` requests.
    pub fn is_cheaper(
        &self,
        in_flight: u32,
        other: &Self,
        other_in_flight: u32,
        now: Instant,
    ) -> bool {
        match (self.estimate(now), other.estimate(now)) {
            (Some(latency), Some(other)) => cost(latency, in_flight) < cost(other, other_in_flight),
            _ => in_flight < other_in_flight,
        }
    }

    /// Records the latency of a response.
    pub fn record_success(&self, latency: Duration, now: Instant) {
        self.observe(latency.as_secs_f64(), now);
    }

    /// Records a failure that took `latency`.
    pub fn record_failure(&self, latency: Duration, now: Instant) {
        let penalty =
            (self.estimate(now).unwrap_or(DEFAULT_SECONDS) + NOISE_SECONDS) * FAILURE_FACTOR;
        self.observe(
            latency.as_secs_f64().max(penalty.min(MAX_FAILURE_SECONDS)),
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
        self.0.set(Some(Observation { seconds, at: now }));
    }

    /// The estimate in seconds. `None` without observations.
    fn estimate(&self, now: Instant) -> Option<f64> {
        self.0
            .get()
            .map(|observation| observation.seconds * observation.weight(now))
    }
}

impl Observation {
    /// The remaining weight of the observation, from 1 down to 0.
    fn weight(&self, now: Instant) -> f64 {
        (-now.saturating_duration_since(self.at).as_secs_f64() / DECAY_SECONDS).exp()
    }
}

fn cost(seconds: f64, in_flight: u32) -> f64 {
    (seconds + NOISE_SECONDS) * (f64::from(in_flight) + 1.0)
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
    fn rises_to_peak_and_decays_over_time() {
        let (start, ewma) = (Instant::now(), PeakEwma::default());
        assert_eq!(ewma.estimate(start), None);
        ewma.record_success(MS, start);
        assert_estimate(&ewma, start, 1.0);
        ewma.record_success(100 * MS, start);
        assert_estimate(&ewma, start, 100.0);
        // Without observations it decays to 1/e in 10 seconds.
        assert_estimate(
            &ewma,
            start + Duration::from_secs(10),
            100.0 / std::f64::consts::E,
        );
        // An immediate observation has no weight, and one after 10 seconds has a weight of 1 - 1/e.
        ewma.record_success(MS, start);
        assert_estimate(&ewma, start, 100.0);
        let later = start + Duration::from_secs(10);
        ewma.record_success(MS, later);
        assert_estimate(
            &ewma,
            later,
            100.0 / std::f64::consts::E + (1.0 - 1.0 / std::f64::consts::E),
        );
    }

    #[test]
    fn compares_latency_times_in_flight_requests() {
        let now = Instant::now();
        let (fast, slow) = (PeakEwma::default(), PeakEwma::default());
        fast.record_success(MS, now);
        slow.record_success(10 * MS, now);
        assert!(fast.is_cheaper(0, &slow, 0, now) && !slow.is_cheaper(0, &fast, 0, now));
        assert!(fast.is_cheaper(8, &slow, 0, now));
        assert!(slow.is_cheaper(0, &fast, 9, now));
        assert!(!fast.is_cheaper(3, &fast, 3, now));
    }

    #[test]
    fn compares_in_flight_requests_before_first_observation() {
        let now = Instant::now();
        let (new, known) = (PeakEwma::default(), PeakEwma::default());
        known.record_success(MS, now);
        assert!(!new.is_cheaper(0, &known, 0, now) && !known.is_cheaper(0, &new, 0, now));
        assert!(new.is_cheaper(0, &known, 1, now) && known.is_cheaper(0, &new, 1, now));
    }

    #[test]
    fn fast_failures_raise_the_cost() {
        let now = Instant::now();
        let (failing, healthy, new) = (
            PeakEwma::default(),
            PeakEwma::default(),
            PeakEwma::default(),
        );
        for ewma in [&failing, &healthy] {
            ewma.record_success(10 * MS, now);
        }
        failing.record_failure(Duration::ZERO, now);
        assert!(healthy.is_cheaper(3, &failing, 0, now));
        (0..20).for_each(|_| failing.record_failure(Duration::ZERO, now));
        assert_estimate(&failing, now, 1000.0);
        // A slow failure counts with its own latency.
        failing.record_failure(Duration::from_secs(3), now);
        assert_estimate(&failing, now, 3000.0);
        new.record_failure(Duration::ZERO, now);
        assert!(healthy.is_cheaper(0, &new, 0, now));
    }

    #[test]
    fn compares_in_flight_requests_after_idle_period() {
        let start = Instant::now();
        let (one, other) = (PeakEwma::default(), PeakEwma::default());
        one.record_success(MS, start);
        other.record_success(50 * MS, start);
        let later = start + Duration::from_secs(600);
        assert!(other.is_cheaper(0, &one, 1, later) && one.is_cheaper(0, &other, 1, later));
    }

    #[test]
    fn tolerates_time_going_backwards() {
        let start = Instant::now() + Duration::from_secs(5);
        let ewma = PeakEwma::default();
        ewma.record_success(MS, start);
        ewma.record_success(2 * MS, start - Duration::from_secs(5));
        assert_estimate(&ewma, start - Duration::from_secs(5), 2.0);
    }
}
