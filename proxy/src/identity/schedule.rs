//! When a certificate is renewed, and how soon after a failure: functions of times and a random number, no clock inside.
//!
//! All spacings are for lives of five minutes and more; those of shorter ones, which tests have, shrink with the life.

use std::time::{Duration, SystemTime};

/// A certificate is renewed after this part of its life, a little earlier or later by chance.
const RENEW_AT: f64 = 0.8;
const JITTER: f64 = 0.05;
/// From this part of its life left on, failures are worth a warning.
const LATE: f64 = 1.0 / 3.0;
/// At least this long between two certificates.
const SPACING: Duration = Duration::from_secs(30);
/// The pause after a failure doubles from the one to the other.
const RETRY: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// The same while there is no certificate: a pod waits.
const RETRY_FIRST: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));
/// The shortest life that the above are for.
const FULL_LIFE: Duration = Duration::from_secs(300);

/// From when until when a certificate is used: it counts from its arrival, for its own beginning lies in the past on purpose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Life {
    pub from: SystemTime,
    pub until: SystemTime,
}

impl Life {
    /// When it is time for the next one; `random` is from 0 to 1.
    pub fn renew_at(&self, random: f64) -> SystemTime {
        self.from
            + self
                .length()
                .mul_f64(RENEW_AT + (random * 2.0 - 1.0) * JITTER)
    }

    /// The earliest moment for the next one, whatever the reason.
    pub fn earliest(&self) -> SystemTime {
        self.from + SPACING.mul_f64(self.scale())
    }

    /// Little is left of it.
    pub fn is_late(&self, now: SystemTime) -> bool {
        self.left(now) < self.length().mul_f64(LATE)
    }

    /// How much is left of it.
    pub fn left(&self, now: SystemTime) -> Duration {
        self.until.duration_since(now).unwrap_or_default()
    }

    fn length(&self) -> Duration {
        self.left(self.from)
    }

    fn scale(&self) -> f64 {
        (self.length().as_secs_f64() / FULL_LIFE.as_secs_f64()).min(1.0)
    }
}

/// The pause before the try after `failures` failures in a row; `random` is from 0 to 1. `life`: of the certificate that is there.
pub(super) fn pause(life: Option<Life>, failures: u32, random: f64) -> Duration {
    let ((least, most), scale) = life.map_or((RETRY_FIRST, 1.0), |life| (RETRY, life.scale()));
    let ceiling = least
        .saturating_mul(1 << failures.saturating_sub(1).min(16))
        .min(most);
    ceiling.mul_f64(scale * (0.5 + random / 2.0))
}

/// When to renew because another issuer signs now: at a moment by chance within the time given, unless it is due sooner anyway.
pub(super) fn after_switch(
    now: SystemTime,
    life: Life,
    within: Duration,
    random: f64,
) -> SystemTime {
    (now + within.mul_f64(random)).max(life.earliest())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);
    const RANDOM: [f64; 3] = [0.0, 0.5, 1.0];

    fn life(seconds: f64) -> Life {
        let from = SystemTime::UNIX_EPOCH + DAY * 20_000;
        Life {
            from,
            until: from + Duration::from_secs_f64(seconds),
        }
    }

    fn seconds(time: SystemTime, life: Life) -> f64 {
        (time.duration_since(life.from).unwrap().as_secs_f64() * 1000.0).round() / 1000.0
    }

    #[test]
    fn renewal_is_due_around_four_fifths_of_a_life() {
        let at = |of: f64| RANDOM.map(|random| seconds(life(of).renew_at(random), life(of)));
        assert_eq!(at(86_400.0), [64_800.0, 69_120.0, 73_440.0]);
        assert_eq!(at(10.0), [7.5, 8.0, 8.5]);
        assert_eq!(at(0.0), [0.0; 3], "one that has ended on arrival");
    }

    #[test]
    fn two_renewals_are_apart_as_far_as_their_lives_allow() {
        let apart = |of: f64| seconds(life(of).earliest(), life(of));
        assert_eq!(
            [86_400.0, 300.0, 60.0, 10.0].map(apart),
            [30.0, 30.0, 6.0, 1.0]
        );
    }

    #[test]
    fn failures_spread_out_from_five_seconds_to_a_minute() {
        let ceilings = |life| {
            [1, 2, 3, 4, 5, 6, u32::MAX].map(|failures| pause(life, failures, 1.0).as_millis())
        };
        assert_eq!(
            ceilings(Some(life(86_400.0))),
            [5_000, 10_000, 20_000, 40_000, 60_000, 60_000, 60_000]
        );
        assert_eq!(
            ceilings(Some(life(30.0))),
            [500, 1_000, 2_000, 4_000, 6_000, 6_000, 6_000]
        );
        assert_eq!(ceilings(None), [200, 400, 800, 1_600, 3_200, 6_400, 10_000]);
        assert_eq!(
            pause(Some(life(86_400.0)), 1, 0.0),
            Duration::from_millis(2_500)
        );
    }

    #[test]
    fn a_life_is_late_in_its_last_third() {
        let life = life(30.0);
        let late =
            [0, 19, 21, 30, 99].map(|passed| life.is_late(life.from + Duration::from_secs(passed)));
        assert_eq!(late, [false, false, true, true, true]);
        assert_eq!(life.left(life.until + DAY), Duration::ZERO);
    }

    #[test]
    fn a_new_issuer_is_gone_to_at_a_moment_by_chance_and_never_at_once_after_a_renewal() {
        let life = life(86_400.0);
        let at = |passed: u64, within: u64| {
            let now = life.from + Duration::from_secs(passed);
            RANDOM.map(|random| {
                seconds(
                    after_switch(now, life, Duration::from_secs(within), random),
                    life,
                )
            })
        };
        assert_eq!(at(1_000, 600), [1_000.0, 1_300.0, 1_600.0]);
        assert_eq!(at(0, 0), [30.0; 3]);
        assert_eq!(at(10, 100), [30.0, 60.0, 110.0]);
    }
}
