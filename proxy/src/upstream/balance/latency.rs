//! The latency of one endpoint: a decaying mean and variance, and the comparison of two endpoints.
//! Pure: the caller passes the time.
//!
//! In-flight requests show a slow endpoint at once and at any rate of requests, so the balancer
//! compares these first ("least request" in Envoy). Latencies count only if they differ by more than
//! chance explains, by Welch's t-test (B. L. Welch, Biometrika 34, 1947). The cost of an endpoint is
//! then its mean latency times the number of in-flight requests plus one, as in Finagle's
//! `PeakEwma`. Prequal (B. Wydrowski et al., NSDI 2024) also prefers requests in flight to latency
//! as the more current signal.
//!
//! A peak EWMA would remember one slow response for its decay time, however few requests there are,
//! so that two equal endpoints get unequal shares at low rates. Here one slow response also raises
//! the variance: about nine are needed. An avoided endpoint has no new samples, so the weight of its
//! old ones decays until its latency is unknown and it is tried again. Mean and variance are updated
//! incrementally (D. H. D. West, CACM 22(9), 1979).

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The time in which the weight of a sample falls to 1/e.
const DECAY_SECONDS: f64 = 10.0;
/// The minimum total weight of the samples of a known latency.
const MIN_WEIGHT: f64 = 4.0;
/// The minimum difference of two latencies, in standard errors. In-flight requests decide below it.
const MIN_STANDARD_ERRORS: f64 = 3.0;
/// The minimum difference of two latencies.
const MIN_DIFFERENCE_SECONDS: f64 = 1e-3;
/// A failure counts as a latency of at least this, so that an endpoint that fails fast is not
/// preferred.
const FAILURE_SECONDS: f64 = 1.0;

/// The latency of one endpoint.
#[derive(Debug)]
pub(super) struct Latency(Cell<Option<Samples>>, f64);

impl Default for Latency {
    fn default() -> Self {
        Self::with_decay(DECAY_SECONDS)
    }
}

/// Weighted samples, in seconds.
#[derive(Clone, Copy, Debug)]
struct Samples {
    mean: f64,
    /// The weighted sum of the squared deviations from the mean.
    deviations: f64,
    /// The sum of the weights at the time of the last sample, which had a weight of 1.
    weight: f64,
    last_at: Instant,
    decay_seconds: f64,
}

impl Latency {
    /// A latency whose samples have another decay time.
    pub fn with_decay(seconds: f64) -> Self {
        Self(Cell::new(None), seconds)
    }

    /// Whether the latency is above this multiple of the latency of `other`, by more than chance
    /// explains.
    pub fn exceeds(&self, other: &Self, ratio: f64, now: Instant) -> bool {
        let (Some(one), Some(other)) = (self.0.get(), other.0.get()) else {
            return false;
        };
        let other = Samples {
            mean: other.mean * ratio,
            deviations: other.deviations * ratio * ratio,
            ..other
        };
        one.mean > other.mean && one.differs(&other, now)
    }

    /// Whether one more request costs less with `in_flight` requests here than with
    /// `other_in_flight` requests at `other`.
    pub fn is_cheaper(
        &self,
        in_flight: u32,
        other: &Self,
        other_in_flight: u32,
        now: Instant,
    ) -> bool {
        match (self.0.get(), other.0.get()) {
            (Some(one), Some(other)) if one.differs(&other, now) => {
                one.cost(in_flight) < other.cost(other_in_flight)
            }
            _ => in_flight < other_in_flight,
        }
    }

    /// The mean latency, if it is known.
    pub fn usual(&self, now: Instant) -> Option<Duration> {
        let samples = self.0.get();
        let known = samples.filter(|samples| samples.weight_at(now) >= MIN_WEIGHT);
        known.map(|samples| Duration::from_secs_f64(samples.mean.max(0.0)))
    }

    /// Records the latency of a response.
    pub fn record_success(&self, latency: Duration, now: Instant) {
        self.record(latency.as_secs_f64(), now);
    }

    /// Records a failure that took `latency`.
    pub fn record_failure(&self, latency: Duration, now: Instant) {
        self.record(latency.as_secs_f64().max(FAILURE_SECONDS), now);
    }

    /// Drops all samples.
    pub fn reset(&self) {
        self.0.set(None);
    }

    fn record(&self, seconds: f64, now: Instant) {
        let mut samples = self.0.get().unwrap_or(Samples {
            mean: 0.0,
            deviations: 0.0,
            weight: 0.0,
            last_at: now,
            decay_seconds: self.1,
        });
        let decay = samples.decay(now);
        samples.weight = samples.weight * decay + 1.0;
        let deviation = seconds - samples.mean;
        samples.mean += deviation / samples.weight;
        samples.deviations = samples.deviations * decay + deviation * (seconds - samples.mean);
        samples.last_at = now;
        self.0.set(Some(samples));
    }
}

impl Samples {
    /// Whether the latencies are known, and differ by more than chance explains.
    fn differs(&self, other: &Self, now: Instant) -> bool {
        let difference = (self.mean - other.mean).abs();
        if difference <= MIN_DIFFERENCE_SECONDS {
            return false;
        }
        let weights = (self.weight_at(now), other.weight_at(now));
        if weights.0.min(weights.1) < MIN_WEIGHT {
            return false;
        }
        let error = self.variance() / weights.0 + other.variance() / weights.1;
        difference * difference > MIN_STANDARD_ERRORS * MIN_STANDARD_ERRORS * error
    }

    fn cost(&self, in_flight: u32) -> f64 {
        (self.mean + MIN_DIFFERENCE_SECONDS) * (f64::from(in_flight) + 1.0)
    }

    /// The sample variance, which does not decay. The weight is over 1 where it is used.
    fn variance(&self) -> f64 {
        self.deviations / (self.weight - 1.0)
    }

    fn weight_at(&self, now: Instant) -> f64 {
        if self.weight < MIN_WEIGHT {
            return self.weight;
        }
        self.weight * self.decay(now)
    }

    /// The factor of all weights since the last sample, from 1 down to 0.
    fn decay(&self, now: Instant) -> f64 {
        (-now.saturating_duration_since(self.last_at).as_secs_f64() / self.decay_seconds).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const SECOND: Duration = Duration::from_secs(1);

    /// The latency of an endpoint with these samples in milliseconds.
    fn latency(samples: impl IntoIterator<Item = u32>, now: Instant) -> Latency {
        let latency = Latency::default();
        for sample in samples {
            latency.record_success(sample * MS, now);
        }
        latency
    }

    /// Which of two idle endpoints is cheaper, if any.
    fn cheaper_when_idle(one: &Latency, other: &Latency, now: Instant) -> Option<u8> {
        match (
            one.is_cheaper(0, other, 0, now),
            other.is_cheaper(0, one, 0, now),
        ) {
            (true, false) => Some(1),
            (false, true) => Some(2),
            (false, false) => None,
            (true, true) => panic!("each is cheaper than the other"),
        }
    }

    #[test]
    fn mean_and_variance_match_their_definitions() {
        let now = Instant::now();
        let samples = latency([2, 4, 4, 4, 5, 5, 7, 9], now).0.get().unwrap();
        let assert_near = |value: f64, expected: f64| {
            assert!(
                (value - expected).abs() < 1e-9,
                "{value}, expected {expected}"
            )
        };
        assert_near(samples.mean, 5e-3);
        assert_near(samples.variance(), 32e-6 / 7.0);
        // After 10 seconds, the old samples weigh 1/e of the new one.
        let one = latency([1], now);
        one.record_success(3 * MS, now + 10 * SECOND);
        let weight = 1.0 / std::f64::consts::E;
        let mean = (1e-3 * weight + 3e-3) / (weight + 1.0);
        assert_near(one.0.get().unwrap().mean, mean);
    }

    #[test]
    fn compares_latency_times_in_flight_requests() {
        let now = Instant::now();
        let (fast, slow) = (latency([10; 20], now), latency([100; 20], now));
        assert_eq!(cheaper_when_idle(&fast, &slow, now), Some(1));
        assert!(fast.is_cheaper(8, &slow, 0, now));
        assert!(slow.is_cheaper(0, &fast, 10, now));
        assert!(!fast.is_cheaper(3, &fast, 3, now));
    }

    #[test]
    fn compares_in_flight_requests_until_latencies_are_known() {
        let now = Instant::now();
        let (new, fast, slow) = (
            Latency::default(),
            latency([1; 20], now),
            latency([500; 3], now),
        );
        for unknown in [&new, &slow] {
            assert_eq!(cheaper_when_idle(unknown, &fast, now), None);
            assert!(unknown.is_cheaper(0, &fast, 1, now) && fast.is_cheaper(0, unknown, 1, now));
        }
    }

    #[test]
    fn one_slow_response_does_not_count_and_ten_do() {
        let now = Instant::now();
        let usual = || (0..20).map(|sample| 2 + sample % 5);
        let (one, other) = (latency(usual(), now), latency(usual(), now));
        other.record_success(5 * SECOND, now);
        assert_eq!(cheaper_when_idle(&one, &other, now), None);
        for _ in 0..9 {
            other.record_success(5 * SECOND, now);
        }
        assert_eq!(cheaper_when_idle(&one, &other, now), Some(1));
    }

    #[test]
    fn latency_without_new_samples_becomes_unknown() {
        let now = Instant::now();
        let (fast, slow) = (latency([1; 40], now), latency([500; 40], now));
        assert_eq!(cheaper_when_idle(&fast, &slow, now + 20 * SECOND), Some(1));
        assert_eq!(cheaper_when_idle(&fast, &slow, now + 25 * SECOND), None);
    }

    #[test]
    fn ignores_differences_below_a_millisecond() {
        let now = Instant::now();
        let (one, other) = (latency([1; 100], now), latency([2; 100], now));
        assert_eq!(cheaper_when_idle(&one, &other, now), None);
    }

    #[test]
    fn fast_failures_raise_the_cost() {
        let now = Instant::now();
        let (failing, healthy) = (Latency::default(), latency([50; 10], now));
        for _ in 0..10 {
            failing.record_failure(Duration::ZERO, now);
        }
        assert_eq!(cheaper_when_idle(&healthy, &failing, now), Some(1));
        failing.reset();
        assert_eq!(cheaper_when_idle(&healthy, &failing, now), None);
    }

    #[test]
    fn tolerates_time_going_backwards() {
        let later = Instant::now() + 5 * SECOND;
        let latency = latency([1; 10], later);
        latency.record_success(MS, later - 5 * SECOND);
        let samples = latency.0.get().unwrap();
        assert_eq!(samples.weight_at(later - 6 * SECOND), 11.0);
    }
}
