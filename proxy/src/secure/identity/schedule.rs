//! Renewal times and retry delays of certificates. Pure functions of times and a random number.
//!
//! Intervals apply to certificates valid for five minutes or more. For shorter ones, as in tests,
//! they shrink in proportion.

use std::time::{Duration, SystemTime};

use crate::secure::control::backoff_ceiling;

/// Fraction of the validity after which a certificate is renewed, before jitter.
const RENEWAL_FRACTION: f64 = 0.8;
const JITTER: f64 = 0.05;
/// Remaining fraction of the validity from which failures are logged as warnings.
const LATE_FRACTION: f64 = 1.0 / 3.0;
/// Minimum interval between two certificates.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(30);
/// Smallest and largest ceiling of the retry delay.
const RETRY_BACKOFF: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// The same without a valid certificate.
const INITIAL_BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));
/// Shortest validity with unscaled intervals.
const FULL_VALIDITY: Duration = Duration::from_secs(300);

/// Period in which a certificate is used. It starts with the arrival: `notBefore` of the
/// certificate is earlier, to allow for clock skew.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Validity {
    pub from: SystemTime,
    pub until: SystemTime,
}

impl Validity {
    /// Time of the regular renewal. `random` is in 0..=1.
    pub fn renewal_time(&self, random: f64) -> SystemTime {
        self.from
            + self
                .length()
                .mul_f64(RENEWAL_FRACTION + (random * 2.0 - 1.0) * JITTER)
    }

    /// Earliest time of any renewal.
    pub fn earliest_renewal(&self) -> SystemTime {
        self.from + RENEWAL_INTERVAL.mul_f64(self.scale())
    }

    /// Whether the certificate expires soon.
    pub fn is_late(&self, now: SystemTime) -> bool {
        self.remaining(now) < self.length().mul_f64(LATE_FRACTION)
    }

    /// Time until expiry.
    pub fn remaining(&self, now: SystemTime) -> Duration {
        self.until.duration_since(now).unwrap_or_default()
    }

    fn length(&self) -> Duration {
        self.remaining(self.from)
    }

    fn scale(&self) -> f64 {
        (self.length().as_secs_f64() / FULL_VALIDITY.as_secs_f64()).min(1.0)
    }
}

/// Delay after `failures` consecutive failures. `validity` is the validity of the current
/// certificate, `random` is in 0..=1.
pub(super) fn retry_delay(validity: Option<Validity>, failures: u32, random: f64) -> Duration {
    let (backoff, scale) = validity.map_or((INITIAL_BACKOFF, 1.0), |validity| {
        (RETRY_BACKOFF, validity.scale())
    });
    backoff_ceiling(backoff, failures).mul_f64(scale * (0.5 + random / 2.0))
}

/// Time of the renewal after a change of the issuer: random within `within`, but not before the
/// earliest renewal.
pub(super) fn issuer_change_renewal_time(
    now: SystemTime,
    validity: Validity,
    within: Duration,
    random: f64,
) -> SystemTime {
    (now + within.mul_f64(random)).max(validity.earliest_renewal())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);
    const RANDOM: [f64; 3] = [0.0, 0.5, 1.0];

    fn validity(seconds: f64) -> Validity {
        let from = SystemTime::UNIX_EPOCH + DAY * 20_000;
        Validity {
            from,
            until: from + Duration::from_secs_f64(seconds),
        }
    }

    fn seconds(time: SystemTime, validity: Validity) -> f64 {
        (time.duration_since(validity.from).unwrap().as_secs_f64() * 1000.0).round() / 1000.0
    }

    #[test]
    fn renews_at_four_fifths_of_the_validity_with_jitter() {
        let at =
            |of: f64| RANDOM.map(|random| seconds(validity(of).renewal_time(random), validity(of)));
        assert_eq!(at(86_400.0), [64_800.0, 69_120.0, 73_440.0]);
        assert_eq!(at(10.0), [7.5, 8.0, 8.5]);
        assert_eq!(at(0.0), [0.0; 3], "expired on arrival");
    }

    #[test]
    fn keeps_a_minimum_interval_between_renewals() {
        let apart = |of: f64| seconds(validity(of).earliest_renewal(), validity(of));
        assert_eq!(
            [86_400.0, 300.0, 60.0, 10.0].map(apart),
            [30.0, 30.0, 6.0, 1.0]
        );
    }

    #[test]
    fn retry_delay_grows_from_five_seconds_to_a_minute() {
        let ceilings = |validity| {
            [1, 2, 3, 4, 5, 6, u32::MAX]
                .map(|failures| retry_delay(validity, failures, 1.0).as_millis())
        };
        assert_eq!(
            ceilings(Some(validity(86_400.0))),
            [5_000, 10_000, 20_000, 40_000, 60_000, 60_000, 60_000]
        );
        assert_eq!(
            ceilings(Some(validity(30.0))),
            [500, 1_000, 2_000, 4_000, 6_000, 6_000, 6_000]
        );
        assert_eq!(ceilings(None), [200, 400, 800, 1_600, 3_200, 6_400, 10_000]);
        assert_eq!(
            retry_delay(Some(validity(86_400.0)), 1, 0.0),
            Duration::from_millis(2_500)
        );
    }

    #[test]
    fn certificate_is_late_in_the_last_third_of_its_validity() {
        let validity = validity(30.0);
        let late = [0, 19, 21, 30, 99]
            .map(|passed| validity.is_late(validity.from + Duration::from_secs(passed)));
        assert_eq!(late, [false, false, true, true, true]);
        assert_eq!(validity.remaining(validity.until + DAY), Duration::ZERO);
    }

    #[test]
    fn issuer_change_renews_at_a_random_time_after_the_minimum_interval() {
        let validity = validity(86_400.0);
        let at = |passed: u64, within: u64| {
            let now = validity.from + Duration::from_secs(passed);
            RANDOM.map(|random| {
                seconds(
                    issuer_change_renewal_time(now, validity, Duration::from_secs(within), random),
                    validity,
                )
            })
        };
        assert_eq!(at(1_000, 600), [1_000.0, 1_300.0, 1_600.0]);
        assert_eq!(at(0, 0), [30.0; 3]);
        assert_eq!(at(10, 100), [30.0, 60.0, 110.0]);
    }
}
