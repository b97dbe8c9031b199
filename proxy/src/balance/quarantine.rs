//! The quarantine of one endpoint: for how long the balancer avoids it after refused connections and
//! failed requests, and the one request that then decides. Pure: the caller passes the time.
//!
//! This is Envoy's outlier detection (consecutive gateway failures) and Finagle's failure accrual,
//! with a probing request as in a circuit breaker.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::zone::ZonePreference;

/// The number of consecutive failures that start a quarantine.
const MAX_FAILURES: u32 = 5;
/// How long other requests avoid an endpoint while a probing request is in flight.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why an endpoint is quarantined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// It accepts no connections. One refusal is enough, and the quarantine is short: the requests
    /// go to other endpoints, so no caller notices.
    Refused,
    /// It answers requests with failures, which callers see.
    Failed,
}

impl Cause {
    /// The first and the longest quarantine. Each further one is twice as long as the previous one.
    const fn durations(self) -> (Duration, Duration) {
        match self {
            Self::Refused => (Duration::from_secs(1), Duration::from_secs(30)),
            Self::Failed => (Duration::from_secs(10), Duration::from_secs(300)),
        }
    }
}

/// The quarantines of one backend: at most half of its endpoints are quarantined for their failures,
/// so that the others are not overloaded, and a single one never.
#[derive(Debug, Default)]
pub(super) struct Siblings {
    count: Cell<usize>,
    quarantined: Cell<usize>,
    /// The preference of the own zone.
    pub zones: ZonePreference,
}

impl Siblings {
    /// Sets the number of endpoints.
    pub fn set_count(&self, count: usize) {
        self.count.set(count);
    }

    fn may_quarantine(&self) -> bool {
        self.quarantined.get() < self.count.get() / 2
    }
}

/// The quarantine of an endpoint.
pub(super) struct Quarantine {
    state: Cell<State>,
    siblings: Rc<Siblings>,
    /// Discovery has removed the endpoint.
    removed: Cell<bool>,
}

#[derive(Clone, Copy)]
enum State {
    Healthy {
        /// Consecutive failures.
        failures: u32,
    },
    /// It lasts until a request succeeds.
    Quarantined(Active),
}

#[derive(Clone, Copy)]
struct Active {
    cause: Cause,
    since: Instant,
    until: Instant,
    duration: Duration,
    /// The probe is an opaque connection that is open: no failure until `until` is a success.
    probe_is_open: bool,
}

const HEALTHY: State = State::Healthy { failures: 0 };

impl Quarantine {
    pub fn new(siblings: &Rc<Siblings>) -> Self {
        Self {
            state: Cell::new(HEALTHY),
            siblings: siblings.clone(),
            removed: Cell::new(false),
        }
    }

    /// Records the latency of a response from an endpoint in this zone.
    pub fn record_latency(&self, zone: &str, latency: Duration, now: Instant) {
        self.siblings.zones.record(zone, latency, now);
    }

    /// Whether requests avoid the endpoint.
    pub fn is_active(&self, now: Instant) -> bool {
        matches!(self.state.get(), State::Quarantined(active) if now < active.until)
    }

    /// A request begins. Returns whether it is the probing request after an expired quarantine,
    /// whose result decides. Others avoid the endpoint meanwhile.
    pub fn begin(&self, now: Instant) -> bool {
        match self.state.get() {
            State::Quarantined(active) if now < active.until => false,
            State::Quarantined(active) if !active.probe_is_open => {
                let until = now + PROBE_TIMEOUT;
                self.state
                    .set(State::Quarantined(Active { until, ..active }));
                true
            }
            State::Quarantined(_) => {
                self.end();
                false
            }
            State::Healthy { .. } => false,
        }
    }

    /// The probing request has no result. Another one may decide.
    pub fn cancel_probe(&self, now: Instant) {
        if let State::Quarantined(active) = self.state.get() {
            self.state.set(State::Quarantined(Active {
                until: now,
                probe_is_open: false,
                ..active
            }));
        }
    }

    /// Records a failure. Returns whether it started a quarantine. During one, only the failure of
    /// the probing request counts: others were sent before, or because all endpoints are
    /// quarantined.
    pub fn record_failure(&self, cause: Cause, is_probe: bool, now: Instant) -> bool {
        let (first, longest) = cause.durations();
        let duration = match self.state.get() {
            _ if self.removed.get() => return false,
            State::Healthy { failures } if cause == Cause::Failed => {
                let failures = failures.saturating_add(1);
                if failures < MAX_FAILURES || !self.siblings.may_quarantine() {
                    self.state.set(State::Healthy { failures });
                    return false;
                }
                self.start()
            }
            State::Healthy { .. } => self.start(),
            State::Quarantined(_) if !is_probe => return false,
            State::Quarantined(active) => active.duration * 2,
        };
        let duration = duration.clamp(first, longest);
        self.state.set(State::Quarantined(Active {
            cause,
            since: now,
            until: now + duration,
            duration,
            probe_is_open: false,
        }));
        true
    }

    /// Records a success. It ends the quarantine if the request started after the failure. An
    /// earlier one may have used an old connection to an endpoint that accepts no new ones.
    pub fn record_success(&self, started_at: Instant) {
        match self.state.get() {
            State::Quarantined(active) if active.since >= started_at => {}
            _ => self.end(),
        }
    }

    /// Records that the endpoint accepted an opaque connection. This ends a quarantine for refused
    /// connections, and says nothing about other failures yet.
    pub fn record_connection(&self, started_at: Instant, is_probe: bool) {
        match self.state.get() {
            State::Quarantined(active) if active.cause == Cause::Refused => {
                self.record_success(started_at);
            }
            State::Quarantined(active) if is_probe => {
                let probe_is_open = true;
                self.state.set(State::Quarantined(Active {
                    probe_is_open,
                    ..active
                }));
            }
            _ => {}
        }
    }

    /// Ends the quarantine.
    pub fn end(&self) {
        if let State::Quarantined(_) = self.state.replace(HEALTHY) {
            let quarantined = &self.siblings.quarantined;
            quarantined.set(quarantined.get() - 1);
        }
    }

    /// Discovery has removed the endpoint. Requests in flight no longer count.
    pub fn remove(&self) {
        self.end();
        self.removed.set(true);
    }

    /// Counts a new quarantine. Returns the duration before limits.
    fn start(&self) -> Duration {
        let quarantined = &self.siblings.quarantined;
        quarantined.set(quarantined.get() + 1);
        Duration::ZERO
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Cause::{Failed, Refused};

    const SECOND: Duration = Duration::from_secs(1);

    /// The quarantines of a backend with this many endpoints.
    fn quarantines(count: usize) -> Vec<Quarantine> {
        let siblings = Rc::new(Siblings::default());
        siblings.set_count(count);
        (0..count).map(|_| Quarantine::new(&siblings)).collect()
    }

    fn fail(quarantine: &Quarantine, times: u32, now: Instant) {
        for _ in 0..times {
            quarantine.record_failure(Failed, false, now);
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
        one.record_success(now);
        fail(one, 4, now);
        assert!(!one.is_active(now));
        fail(one, 1, now);
        assert!(one.is_active(now + 9 * SECOND) && !one.is_active(now + 10 * SECOND));
        assert!(other.record_failure(Refused, false, now) && other.is_active(now));
    }

    #[test]
    fn doubles_with_each_failed_probe() {
        let (refused, failed) = ([1, 2, 4, 8, 16, 30, 30], [10, 20, 40, 80, 160, 300, 300]);
        for (cause, durations) in [(Refused, refused), (Failed, failed)] {
            let (mut now, quarantines) = (Instant::now(), quarantines(2));
            let quarantine = &quarantines[0];
            fail(quarantine, 4, now);
            for seconds in durations {
                let is_probe = quarantine.begin(now);
                assert!(quarantine.record_failure(cause, is_probe, now), "{seconds}");
                // Concurrent failures do not extend it.
                fail(quarantine, 32, now + SECOND / 2);
                now += seconds * SECOND;
                assert!(quarantine.is_active(now - SECOND / 100), "{seconds} s");
                assert!(!quarantine.is_active(now), "{seconds} s");
            }
            // A success ends it and resets the duration.
            assert!(quarantine.begin(now));
            quarantine.record_success(now);
            fail(quarantine, 4, now);
            quarantine.record_failure(cause, false, now);
            assert!(!quarantine.is_active(now + durations[0] * SECOND));
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
        quarantine.record_success(expired);
        assert!(!quarantine.is_active(expired + 11 * SECOND));
    }

    #[test]
    fn accepted_connection_is_no_success_after_failures() {
        let (now, quarantines) = (Instant::now(), quarantines(4));
        let [one, refusing, ..] = &quarantines[..] else {
            unreachable!("four")
        };
        fail(one, 4, now);
        one.record_connection(now, false);
        fail(one, 1, now);
        assert!(one.is_active(now));
        // The connection of the probe stays open.
        let expired = now + 10 * SECOND;
        assert!(one.begin(expired));
        one.record_connection(expired, true);
        assert!(one.is_active(expired + 9 * SECOND));
        assert!(!one.begin(expired + 10 * SECOND), "it is over");
        // It fails.
        fail(one, 5, expired);
        let expired = expired + 10 * SECOND;
        assert!(one.begin(expired));
        one.record_connection(expired, true);
        assert!(one.record_failure(Failed, true, expired));
        assert!(one.is_active(expired + 19 * SECOND));

        refusing.record_failure(Refused, false, now);
        refusing.record_connection(now + SECOND, false);
        assert!(!refusing.is_active(now));
    }

    #[test]
    fn only_success_of_later_request_ends_it() {
        let (now, quarantines) = (Instant::now(), quarantines(1));
        quarantines[0].record_failure(Refused, false, now);
        quarantines[0].record_success(now - SECOND);
        assert!(quarantines[0].is_active(now));
        quarantines[0].record_success(now + SECOND / 2);
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
                first.record_success(later);
                fail(last, 1, later);
                assert!(last.is_active(later), "of {count}");
            }
        }
    }

    #[test]
    fn refused_connections_quarantine_all_endpoints_and_count_for_the_limit() {
        let (now, quarantines) = (Instant::now(), quarantines(4));
        for refusing in &quarantines[..2] {
            refusing.record_failure(Refused, false, now);
        }
        fail(&quarantines[2], 5, now);
        assert!(!quarantines[2].is_active(now));
        for refusing in &quarantines[2..] {
            refusing.record_failure(Refused, false, now);
        }
        assert_eq!(active(&quarantines, now), 4);
    }

    #[test]
    fn removed_endpoint_does_not_count_for_the_limit() {
        let (now, quarantines) = (Instant::now(), quarantines(2));
        fail(&quarantines[0], 5, now);
        quarantines[0].remove();
        fail(&quarantines[0], 5, now);
        fail(&quarantines[1], 5, now);
        assert!(!quarantines[0].is_active(now) && quarantines[1].is_active(now));
    }
}
