//! Quarantines of endpoints, result by result.

use super::*;
use Cause::{Consecutive, Latency, Percent, Refused};

const SECOND: Duration = Duration::from_secs(1);

/// The quarantines of a backend with this many endpoints and these settings.
fn with(count: usize, settings: OutlierSettings, now: Instant) -> Vec<Quarantine> {
    let siblings = Rc::new(Siblings::new(now));
    siblings.set_count(count);
    siblings.set(settings);
    (0..count).map(|_| Quarantine::new(&siblings)).collect()
}

fn quarantines(count: usize) -> Vec<Quarantine> {
    with(count, OutlierSettings::default(), Instant::now())
}

/// Failures of an endpoint while the others work.
fn fail(quarantine: &Quarantine, times: u32, now: Instant) {
    for _ in 0..times {
        quarantine.siblings.failures.set(0);
        quarantine.record_failure(false, now);
    }
}

fn active(quarantines: &[Quarantine], now: Instant) -> usize {
    let is_active = |quarantine: &&Quarantine| quarantine.is_active(now);
    quarantines.iter().filter(is_active).count()
}

#[test]
fn five_consecutive_failures_start_it() {
    let (now, quarantines) = (Instant::now(), quarantines(2));
    let [one, other] = &quarantines[..] else {
        unreachable!("two")
    };
    fail(one, 4, now);
    one.record_success(now, now);
    fail(one, 4, now);
    assert!(!one.is_active(now));
    assert_eq!(one.record_failure(false, now), Some(Consecutive));
    assert!(one.is_active(now + 9 * SECOND) && !one.is_active(now + 10 * SECOND));
    assert_eq!(other.record_refusal(false, now), Some(Refused));
    assert!(other.is_active(now));
}

#[test]
fn doubles_with_each_failed_probe() {
    let (refused, failed) = ([1, 2, 4, 8, 16, 30, 30], [10, 20, 40, 80, 160, 300, 300]);
    for (cause, durations) in [(Refused, refused), (Consecutive, failed)] {
        let (mut now, quarantines) = (Instant::now(), quarantines(2));
        let quarantine = &quarantines[0];
        let record = |is_probe, now| match cause {
            Refused => quarantine.record_refusal(is_probe, now),
            _ => quarantine.record_failure(is_probe, now),
        };
        fail(quarantine, 4, now);
        for seconds in durations {
            let is_probe = quarantine.begin(now);
            assert_eq!(record(is_probe, now), Some(cause), "{seconds}");
            // Concurrent failures do not extend it.
            fail(quarantine, 32, now + SECOND / 2);
            now += seconds * SECOND;
            assert!(quarantine.is_active(now - SECOND / 100), "{seconds} s");
            assert!(!quarantine.is_active(now), "{seconds} s");
        }
        // A success ends it. The duration is forgotten, unless failures follow soon.
        assert!(quarantine.begin(now));
        quarantine.record_success(now, now);
        now += match cause {
            Refused => Duration::ZERO,
            _ => durations[6] * SECOND + OutlierSettings::default().interval,
        };
        fail(quarantine, 4, now);
        record(false, now);
        assert!(quarantine.is_active(now));
        assert!(!quarantine.is_active(now + durations[0] * SECOND));
    }
}

#[test]
fn failures_soon_after_a_quarantine_double_it() {
    let (now, quarantines) = (Instant::now(), quarantines(2));
    let quarantine = &quarantines[0];
    let mut now = now;
    for seconds in [10, 20, 40] {
        fail(quarantine, 5, now);
        assert!(quarantine.is_active(now + (seconds - 1) * SECOND));
        now += seconds * SECOND;
        assert!(quarantine.begin(now), "{seconds}");
        quarantine.record_success(now, now);
        now += SECOND;
    }
}

#[test]
fn share_of_failures_starts_it_if_the_others_work() {
    let settings = OutlierSettings {
        consecutive_failures: 0,
        ..OutlierSettings::default()
    };
    let now = Instant::now();
    for (others_fail, expected) in [(false, Some(Percent)), (true, None)] {
        let quarantines = with(5, settings, now);
        let (mut ejected, mut ejected_after) = (None, 0);
        for number in 1..=100 {
            let fails = number % 2 == 0;
            for other in &quarantines[1..] {
                match others_fail && fails {
                    true => assert_eq!(other.record_failure(false, now), None),
                    false => other.record_success(now, now),
                }
            }
            match fails {
                true => ejected = quarantines[0].record_failure(false, now),
                false => quarantines[0].record_success(now, now),
            }
            ejected_after = number;
            if ejected.is_some() {
                break;
            }
        }
        assert_eq!(ejected, expected);
        assert!(ejected.is_none() || ejected_after == 20, "{ejected_after}");
    }
    // Requests of an earlier interval do not count.
    let quarantines = with(2, settings, now);
    fail(&quarantines[0], 19, now);
    fail(&quarantines[0], 19, now + 10 * SECOND);
    assert!(!quarantines[0].is_active(now + 10 * SECOND));
    fail(&quarantines[0], 1, now + 10 * SECOND);
    assert!(quarantines[0].is_active(now + 10 * SECOND));
}

#[test]
fn slowness_starts_it_after_enough_requests() {
    let (now, quarantines) = (Instant::now(), quarantines(2));
    for quarantine in &quarantines {
        (0..19).for_each(|_| quarantine.record_success(now, now));
        assert_eq!(quarantine.record_slowness(now), None);
        quarantine.record_success(now, now);
    }
    assert_eq!(quarantines[0].record_slowness(now), Some(Latency));
    assert_eq!(quarantines[0].record_slowness(now), None, "it is active");
    assert_eq!(quarantines[1].record_slowness(now), None, "half are");
}

#[test]
fn failure_of_all_endpoints_quarantines_none() {
    let (now, quarantines) = (Instant::now(), quarantines(4));
    for _ in 0..1000 {
        for quarantine in &quarantines {
            assert_eq!(quarantine.record_failure(false, now), None);
        }
    }
    // Once one works again, the others are outliers.
    quarantines[0].record_success(now, now);
    assert_eq!(quarantines[1].record_failure(false, now), Some(Consecutive));
}

#[test]
fn settings_replace_the_defaults() {
    let settings = OutlierSettings {
        consecutive_failures: 2,
        failure_percent: 0,
        ejection_time: 3 * SECOND,
        max_ejection_time: 5 * SECOND,
        max_ejected_percent: 100,
        ..OutlierSettings::default()
    };
    let now = Instant::now();
    let quarantines = with(3, settings, now);
    quarantines.iter().for_each(|one| fail(one, 2, now));
    assert_eq!(active(&quarantines, now + 2 * SECOND), 3);
    assert_eq!(active(&quarantines, now + 3 * SECOND), 0);
    assert!(quarantines[0].begin(now + 3 * SECOND));
    quarantines[0].record_failure(true, now + 3 * SECOND);
    assert!(quarantines[0].is_active(now + 7 * SECOND));
    assert!(!quarantines[0].is_active(now + 8 * SECOND));
    let off = OutlierSettings {
        consecutive_failures: 0,
        ..settings
    };
    for settings in [
        off,
        OutlierSettings {
            max_ejected_percent: 0,
            ..settings
        },
    ] {
        let quarantines = with(3, settings, now);
        quarantines.iter().for_each(|one| fail(one, 1000, now));
        assert_eq!(active(&quarantines, now), 0);
    }
}

#[test]
fn one_probing_request_decides() {
    let (now, quarantines) = (Instant::now(), quarantines(2));
    let quarantine = &quarantines[0];
    fail(quarantine, 5, now);
    assert!(!quarantine.begin(now), "it is not over");
    let expired = now + 10 * SECOND;
    assert!(quarantine.begin(expired));
    assert!(
        quarantine.is_active(expired) && !quarantine.begin(expired),
        "others avoid the endpoint meanwhile"
    );
    // Without a result, another request decides: at once if the request was canceled.
    quarantine.cancel_probe(expired + SECOND);
    assert!(quarantine.begin(expired + SECOND));
    assert!(!quarantine.begin(expired + 10 * SECOND));
    assert!(quarantine.begin(expired + 11 * SECOND));
    quarantine.record_success(expired, expired);
    assert!(!quarantine.is_active(expired + 11 * SECOND));
}

#[test]
fn accepted_connection_is_no_success_after_failures() {
    let (now, quarantines) = (Instant::now(), quarantines(4));
    let [one, refusing, ..] = &quarantines[..] else {
        unreachable!("four")
    };
    fail(one, 4, now);
    one.record_connection(now, false, now);
    fail(one, 1, now);
    assert!(one.is_active(now));
    // The connection of the probe stays open.
    let expired = now + 10 * SECOND;
    assert!(one.begin(expired));
    one.record_connection(expired, true, expired);
    assert!(one.is_active(expired + 9 * SECOND));
    assert!(!one.begin(expired + 10 * SECOND), "it is over");
    // It fails, for twice as long.
    fail(one, 5, expired);
    let expired = expired + 20 * SECOND;
    assert!(one.begin(expired));
    one.record_connection(expired, true, expired);
    assert!(one.record_failure(true, expired).is_some());
    assert!(one.is_active(expired + 39 * SECOND));

    refusing.record_refusal(false, now);
    refusing.record_connection(now + SECOND, false, now + SECOND);
    assert!(!refusing.is_active(now));
}

#[test]
fn only_success_of_later_request_ends_it() {
    let (now, quarantines) = (Instant::now(), quarantines(1));
    quarantines[0].record_refusal(false, now);
    quarantines[0].record_success(now - SECOND, now);
    assert!(quarantines[0].is_active(now));
    quarantines[0].record_success(now + SECOND / 2, now + SECOND / 2);
    assert!(!quarantines[0].is_active(now));
}

#[test]
fn failures_quarantine_at_most_half_of_the_endpoints() {
    let now = Instant::now();
    for (count, most) in [(1, 0), (2, 1), (3, 1), (4, 2), (9, 4)] {
        let quarantines = quarantines(count);
        quarantines.iter().for_each(|one| fail(one, 100, now));
        assert_eq!(active(&quarantines, now), most, "of {count}");
        // One that awaits its probing request still counts.
        let later = now + 3600 * SECOND;
        quarantines.iter().for_each(|one| fail(one, 100, later));
        assert_eq!(active(&quarantines, later), 0, "of {count}");
        // Another one takes the place of one that ends.
        if let [first, .., last] = &quarantines[..] {
            first.record_success(later, later);
            fail(last, 1, later);
            assert!(last.is_active(later), "of {count}");
        }
    }
}

#[test]
fn refused_connections_quarantine_all_endpoints_and_count_for_the_limit() {
    let (now, quarantines) = (Instant::now(), quarantines(4));
    for refusing in &quarantines[..2] {
        refusing.record_refusal(false, now);
    }
    fail(&quarantines[2], 5, now);
    assert!(!quarantines[2].is_active(now));
    for refusing in &quarantines[2..] {
        refusing.record_refusal(false, now);
    }
    assert_eq!(active(&quarantines, now), 4);
}

#[test]
fn removed_endpoint_does_not_count_for_the_limit() {
    let (now, quarantines) = (Instant::now(), quarantines(2));
    fail(&quarantines[0], 5, now);
    quarantines[0].remove(now);
    fail(&quarantines[0], 5, now);
    fail(&quarantines[1], 5, now);
    assert!(!quarantines[0].is_active(now) && quarantines[1].is_active(now));
}
