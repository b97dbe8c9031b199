//! Quarantines of endpoints and circuits of backends, result by result.

use super::*;
use crate::labels::Cause;
use Cause::{Consecutive, Latency, Percent, Refused};

const SECOND: Duration = Duration::from_secs(1);

impl Judgement {
    /// A request begins. Returns whether it is the probing one.
    fn probes(&self, now: Instant) -> bool {
        self.begin(now).probes_endpoint
    }

    fn record_failure(&self, is_probe: bool, now: Instant) -> Option<Cause> {
        self.record(Outcome::Failure, &request(now, is_probe), now)
    }

    fn record_refusal(&self, is_probe: bool, now: Instant) -> Option<Cause> {
        self.record(Outcome::Refused, &request(now, is_probe), now)
    }

    fn record_success(&self, started_at: Instant, now: Instant) {
        let cause = self.record(Outcome::Success, &request(started_at, false), now);
        assert_eq!(cause, None);
    }
}

/// A request that the circuit of the backend does not depend on.
fn request(started_at: Instant, probes_endpoint: bool) -> Trial {
    Trial {
        started_at,
        probes_endpoint,
        probes_backend: false,
    }
}

/// The endpoints of a backend with these settings.
fn with(count: usize, settings: OutlierSettings, now: Instant) -> Vec<Judgement> {
    let detector = Rc::new(Detector::new(now));
    detector.set_count(count);
    detector.set(settings, None);
    (0..count).map(|_| Judgement::new(&detector)).collect()
}

fn with_defaults(count: usize) -> Vec<Judgement> {
    with(count, OutlierSettings::default(), Instant::now())
}

/// Failures of an endpoint while the others work.
fn fail(endpoint: &Judgement, times: u32, now: Instant) {
    for _ in 0..times {
        endpoint.detector.failures.set(0);
        endpoint.record_failure(false, now);
    }
}

fn quarantined(endpoints: &[Judgement], now: Instant) -> usize {
    let is_quarantined = |endpoint: &&Judgement| endpoint.is_quarantined(now);
    endpoints.iter().filter(is_quarantined).count()
}

#[test]
fn five_consecutive_failures_start_it() {
    let (now, endpoints) = (Instant::now(), with_defaults(2));
    let [one, other] = &endpoints[..] else {
        unreachable!("two")
    };
    fail(one, 4, now);
    one.record_success(now, now);
    fail(one, 4, now);
    assert!(!one.is_quarantined(now));
    assert_eq!(one.record_failure(false, now), Some(Consecutive));
    assert!(one.is_quarantined(now + 9 * SECOND) && !one.is_quarantined(now + 10 * SECOND));
    assert_eq!(other.record_refusal(false, now), Some(Refused));
    assert!(other.is_quarantined(now));
}

#[test]
fn doubles_with_each_failed_probe() {
    let (refused, failed) = ([1, 2, 4, 8, 16, 30, 30], [10, 20, 40, 80, 160, 300, 300]);
    for (cause, durations) in [(Refused, refused), (Consecutive, failed)] {
        let (mut now, endpoints) = (Instant::now(), with_defaults(2));
        let endpoint = &endpoints[0];
        let record = |is_probe, now| match cause {
            Refused => endpoint.record_refusal(is_probe, now),
            _ => endpoint.record_failure(is_probe, now),
        };
        fail(endpoint, 4, now);
        for seconds in durations {
            let is_probe = endpoint.probes(now);
            assert_eq!(record(is_probe, now), Some(cause), "{seconds}");
            // Concurrent failures do not extend it.
            fail(endpoint, 32, now + SECOND / 2);
            now += seconds * SECOND;
            assert!(endpoint.is_quarantined(now - SECOND / 100), "{seconds} s");
            assert!(!endpoint.is_quarantined(now), "{seconds} s");
        }
        // A success ends it. The duration is forgotten, unless failures follow soon.
        assert!(endpoint.probes(now));
        endpoint.record_success(now, now);
        now += match cause {
            Refused => Duration::ZERO,
            _ => durations[6] * SECOND + OutlierSettings::default().interval,
        };
        fail(endpoint, 4, now);
        record(false, now);
        assert!(endpoint.is_quarantined(now));
        assert!(!endpoint.is_quarantined(now + durations[0] * SECOND));
    }
}

#[test]
fn failures_soon_after_a_quarantine_double_it() {
    let (now, endpoints) = (Instant::now(), with_defaults(2));
    let endpoint = &endpoints[0];
    let mut now = now;
    for seconds in [10, 20, 40] {
        fail(endpoint, 5, now);
        assert!(endpoint.is_quarantined(now + (seconds - 1) * SECOND));
        now += seconds * SECOND;
        assert!(endpoint.probes(now), "{seconds}");
        endpoint.record_success(now, now);
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
        let endpoints = with(5, settings, now);
        let (mut ejected, mut ejected_after) = (None, 0);
        for number in 1..=100 {
            let fails = number % 2 == 0;
            for other in &endpoints[1..] {
                if others_fail && fails {
                    assert_eq!(other.record_failure(false, now), None)
                } else {
                    other.record_success(now, now)
                }
            }
            if fails {
                ejected = endpoints[0].record_failure(false, now)
            } else {
                endpoints[0].record_success(now, now)
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
    let endpoints = with(2, settings, now);
    fail(&endpoints[0], 19, now);
    fail(&endpoints[0], 19, now + 10 * SECOND);
    assert!(!endpoints[0].is_quarantined(now + 10 * SECOND));
    fail(&endpoints[0], 1, now + 10 * SECOND);
    assert!(endpoints[0].is_quarantined(now + 10 * SECOND));
}

#[test]
fn slowness_starts_it_after_enough_requests() {
    let (now, endpoints) = (Instant::now(), with_defaults(2));
    for endpoint in &endpoints {
        (0..19).for_each(|_| endpoint.record_success(now, now));
        assert_eq!(endpoint.record_slowness(now), None);
        endpoint.record_success(now, now);
    }
    assert_eq!(endpoints[0].record_slowness(now), Some(Latency));
    assert_eq!(endpoints[0].record_slowness(now), None, "it is active");
    assert_eq!(endpoints[1].record_slowness(now), None, "half are");
}

#[test]
fn failure_of_all_endpointsendpoints_none() {
    let (now, endpoints) = (Instant::now(), with_defaults(4));
    for _ in 0..1000 {
        for endpoint in &endpoints {
            assert_eq!(endpoint.record_failure(false, now), None);
        }
    }
    // Once one works again, the others are outliers.
    endpoints[0].record_success(now, now);
    assert_eq!(endpoints[1].record_failure(false, now), Some(Consecutive));
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
    let endpoints = with(3, settings, now);
    endpoints.iter().for_each(|one| fail(one, 2, now));
    assert_eq!(quarantined(&endpoints, now + 2 * SECOND), 3);
    assert_eq!(quarantined(&endpoints, now + 3 * SECOND), 0);
    assert!(endpoints[0].probes(now + 3 * SECOND));
    endpoints[0].record_failure(true, now + 3 * SECOND);
    assert!(endpoints[0].is_quarantined(now + 7 * SECOND));
    assert!(!endpoints[0].is_quarantined(now + 8 * SECOND));
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
        let endpoints = with(3, settings, now);
        endpoints.iter().for_each(|one| fail(one, 1000, now));
        assert_eq!(quarantined(&endpoints, now), 0);
    }
}

#[test]
fn one_probing_request_decides() {
    let (now, endpoints) = (Instant::now(), with_defaults(2));
    let endpoint = &endpoints[0];
    fail(endpoint, 5, now);
    assert!(!endpoint.probes(now), "it is not over");
    let expired = now + 10 * SECOND;
    assert!(endpoint.probes(expired));
    assert!(
        endpoint.is_quarantined(expired) && !endpoint.probes(expired),
        "others avoid the endpoint meanwhile"
    );
    // Without a result, another request decides: at once if the request was canceled.
    endpoint.defer(false, &request(now, true), expired + SECOND);
    assert!(endpoint.probes(expired + SECOND));
    assert!(!endpoint.probes(expired + 10 * SECOND));
    assert!(endpoint.probes(expired + 11 * SECOND));
    endpoint.record_success(expired, expired);
    assert!(!endpoint.is_quarantined(expired + 11 * SECOND));
}

#[test]
fn accepted_connection_is_no_success_after_failures() {
    let (now, endpoints) = (Instant::now(), with_defaults(4));
    let [one, refusing, ..] = &endpoints[..] else {
        unreachable!("four")
    };
    fail(one, 4, now);
    one.defer(true, &request(now, false), now);
    fail(one, 1, now);
    assert!(one.is_quarantined(now));
    // The connection of the probe stays open.
    let expired = now + 10 * SECOND;
    assert!(one.probes(expired));
    one.defer(true, &request(expired, true), expired);
    assert!(one.is_quarantined(expired + 9 * SECOND));
    assert!(!one.probes(expired + 10 * SECOND), "it is over");
    // It fails, for twice as long.
    fail(one, 5, expired);
    let expired = expired + 20 * SECOND;
    assert!(one.probes(expired));
    one.defer(true, &request(expired, true), expired);
    assert!(one.record_failure(true, expired).is_some());
    assert!(one.is_quarantined(expired + 39 * SECOND));

    refusing.record_refusal(false, now);
    refusing.defer(true, &request(now + SECOND, false), now + SECOND);
    assert!(!refusing.is_quarantined(now));
}

#[test]
fn only_success_of_later_request_ends_it() {
    let (now, endpoints) = (Instant::now(), with_defaults(1));
    endpoints[0].record_refusal(false, now);
    endpoints[0].record_success(now - SECOND, now);
    assert!(endpoints[0].is_quarantined(now));
    endpoints[0].record_success(now + SECOND / 2, now + SECOND / 2);
    assert!(!endpoints[0].is_quarantined(now));
}

#[test]
fn failures_quarantine_at_most_half_of_the_endpoints() {
    let now = Instant::now();
    for (count, most) in [(1, 0), (2, 1), (3, 1), (4, 2), (9, 4)] {
        let endpoints = with_defaults(count);
        endpoints.iter().for_each(|one| fail(one, 100, now));
        assert_eq!(quarantined(&endpoints, now), most, "of {count}");
        // One that awaits its probing request still counts.
        let later = now + 3600 * SECOND;
        endpoints.iter().for_each(|one| fail(one, 100, later));
        assert_eq!(quarantined(&endpoints, later), 0, "of {count}");
        // Another one takes the place of one that ends.
        if let [first, .., last] = &endpoints[..] {
            first.record_success(later, later);
            fail(last, 1, later);
            assert!(last.is_quarantined(later), "of {count}");
        }
    }
}

#[test]
fn refused_connections_quarantine_all_endpointsand_count_for_the_limit() {
    let (now, endpoints) = (Instant::now(), with_defaults(4));
    for refusing in &endpoints[..2] {
        refusing.record_refusal(false, now);
    }
    fail(&endpoints[2], 5, now);
    assert!(!endpoints[2].is_quarantined(now));
    for refusing in &endpoints[2..] {
        refusing.record_refusal(false, now);
    }
    assert_eq!(quarantined(&endpoints, now), 4);
}

#[test]
fn removed_endpoint_does_not_count_for_the_limit() {
    let (now, endpoints) = (Instant::now(), with_defaults(2));
    fail(&endpoints[0], 5, now);
    endpoints[0].remove(now);
    fail(&endpoints[0], 5, now);
    fail(&endpoints[1], 5, now);
    assert!(!endpoints[0].is_quarantined(now) && endpoints[1].is_quarantined(now));
}

/// A breaker that opens for 5 s at half of 20 requests in 10 s.
fn breaker(now: Instant) -> Detector {
    let detector = Detector::new(now);
    let settings = BreakerSettings {
        failure_percent: 50,
        min_requests: 20,
        interval: 10 * SECOND,
        open_time: 5 * SECOND,
    };
    detector.set(OutlierSettings::default(), Some(settings));
    detector
}

fn opened(now: Instant) -> Detector {
    let breaker = breaker(now);
    (0..20).for_each(|_| breaker.record(true, false, now));
    assert!(breaker.is_open(now));
    breaker
}

#[test]
fn opens_at_the_share_of_failures_with_enough_requests() {
    let now = Instant::now();
    let detector = breaker(now);
    (0..19).for_each(|_| detector.record(true, false, now));
    assert!(!detector.is_open(now) && detector.is_closed());
    detector.record(true, false, now);
    assert!(detector.is_open(now + 4 * SECOND) && !detector.is_open(now + 5 * SECOND));
    let mixed = breaker(now);
    for number in 0..1000 {
        mixed.record(number % 5 < 2, false, now);
    }
    assert!(mixed.is_closed(), "two of five fail");
    // A pause longer than the interval.
    (0..19).for_each(|_| mixed.record(true, false, now + 20 * SECOND));
    assert!(mixed.is_closed());
    mixed.record(true, false, now + 20 * SECOND);
    assert!(!mixed.is_closed());
}

#[test]
fn one_probing_request_decides_about_the_circuit() {
    let start = Instant::now();
    let (detector, mut now) = (opened(start), start);
    assert!(!detector.circuit.begin(now), "it is open");
    for _ in 0..3 {
        now += 5 * SECOND;
        assert!(!detector.is_open(now) && detector.circuit.begin(now));
        assert!(detector.is_open(now), "others fail meanwhile");
        // Results of requests from before do not count.
        (0..100).for_each(|_| detector.record(false, false, now));
        assert!(detector.is_open(now));
        detector.record(true, true, now);
        assert!(detector.is_open(now + 4 * SECOND));
    }
    now += 5 * SECOND;
    assert!(detector.circuit.begin(now));
    detector.record(false, true, now);
    assert!(detector.is_closed() && !detector.is_open(now));
    // The failures from before are forgotten.
    (0..19).for_each(|_| detector.record(true, false, now));
    assert!(detector.is_closed());
}

#[test]
fn probing_request_without_result_is_replaced() {
    let start = Instant::now();
    let (detector, now) = (opened(start), start + 5 * SECOND);
    assert!(detector.circuit.begin(now));
    detector.circuit.defer(false, now);
    assert!(!detector.is_open(now) && detector.circuit.begin(now));
    // It never ends.
    assert!(detector.is_open(now + 9 * SECOND) && !detector.is_open(now + 10 * SECOND));
    assert!(detector.circuit.begin(now + 10 * SECOND));
    // An open connection is a success after the time of a probing request.
    detector.circuit.defer(true, now + 11 * SECOND);
    assert!(detector.is_open(now + 20 * SECOND));
    assert!(!detector.circuit.begin(now + 21 * SECOND) && detector.is_closed());
}

#[test]
fn without_settings_it_is_closed() {
    let now = Instant::now();
    let unset = Detector::new(now);
    (0..1000).for_each(|_| unset.record(true, false, now));
    assert!(unset.is_closed());
    let removed = opened(now);
    removed.set(OutlierSettings::default(), None);
    assert!(removed.is_closed() && !removed.circuit.begin(now));
}

fn counts(requests: u32, failures: u32) -> Counts {
    Counts { requests, failures }
}

#[test]
fn counts_the_current_and_the_previous_half() {
    let (window, start) = (Window::default(), Instant::now());
    let at = |milliseconds| {
        let now = start + Duration::from_millis(milliseconds);
        half(start, now, Duration::from_secs(10))
    };
    assert_eq!([at(0), at(4999), at(5000), at(10_000)], [0, 0, 1, 2]);
    window.record(0, true);
    window.record(0, false);
    window.record(1, true);
    assert_eq!(window.counts(1), counts(3, 2));
    assert_eq!(window.counts(2), counts(1, 1));
    window.record(2, false);
    assert_eq!(window.counts(4), counts(0, 0), "a pause");
    assert_eq!(half(start, start, Duration::ZERO), 0);
}

#[test]
fn share_counts_with_enough_requests_only() {
    assert!(!counts(19, 19).exceed(50, 20) && counts(20, 10).exceed(50, 20));
    assert!(!counts(20, 9).exceed(50, 20) && !counts(0, 0).exceed(50, 0));
    assert!(counts(u32::MAX, u32::MAX).exceed(100, u32::MAX));
}

#[test]
fn one_stands_out_that_fails_twice_as_often_as_the_others() {
    assert!(counts(20, 10).stand_out(counts(80, 0)));
    assert!(counts(20, 10).stand_out(counts(80, 20)));
    assert!(!counts(20, 10).stand_out(counts(80, 21)));
    assert!(!counts(20, 20).stand_out(counts(80, 80)), "all fail");
    assert!(counts(20, 20).stand_out(counts(0, 0)), "the only one");
}

#[test]
fn results_leave_the_window_of_all() {
    let (one, all) = (Window::default(), Window::default());
    for (number, window) in [(1, &one), (1, &all), (2, &one), (2, &all), (2, &all)] {
        window.record(number, true);
    }
    one.take_from(&all, 2);
    assert_eq!((one.counts(2), all.counts(2)), (counts(0, 0), counts(1, 1)));
}

#[test]
fn one_request_decides_about_the_endpoint_and_the_circuit() {
    let now = Instant::now();
    let detector = Rc::new(breaker(now));
    detector.set_count(1);
    let endpoint = Judgement::new(&detector);
    for _ in 0..20 {
        endpoint.record_refusal(false, now);
    }
    assert!(detector.is_open(now) && endpoint.is_quarantined(now));
    let later = now + 10 * SECOND;
    let [first, second] = [endpoint.begin(later), endpoint.begin(later)];
    assert!(first.probes_endpoint && first.probes_backend);
    assert!(!second.probes_endpoint && !second.probes_backend);
    endpoint.record(Outcome::Success, &first, later + SECOND);
    let now = later + SECOND;
    // It began after the failures.
    assert!(detector.is_closed() && !endpoint.is_quarantined(now));
}

#[test]
fn end_of_an_earlier_probing_request_does_not_shorten_the_quarantine() {
    let (now, endpoints) = (Instant::now(), with_defaults(2));
    let endpoint = &endpoints[0];
    fail(endpoint, 5, now);
    let first = endpoint.begin(now + 10 * SECOND);
    let second = endpoint.begin(now + 20 * SECOND);
    assert!(first.probes_endpoint && second.probes_endpoint);
    let failed = now + 21 * SECOND;
    assert!(endpoint.record(Outcome::Failure, &second, failed).is_some());
    endpoint.defer(false, &first, failed + SECOND);
    assert!(endpoint.is_quarantined(failed + 19 * SECOND));
}
