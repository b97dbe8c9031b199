//! The quarantine of one endpoint (ejection, in the words of a TrafficPolicy): for how long the
//! balancer avoids it after refused connections, failed requests or slow responses, and the one
//! request that then decides. Pure: the caller passes the time.
//!
//! This is Envoy's outlier detection and Finagle's failure accrual, with a probing request as in a
//! circuit breaker. An outlier differs from the other endpoints: while these fail too, failed
//! requests quarantine none, because those that remain would get the load of all.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::window::{Window, half};

/// How long other requests avoid an endpoint while a probing request is in flight.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
/// The first and the longest quarantine after a refused connection. It is short: the requests go to
/// other endpoints, so no caller notices.
const REFUSED_TIME: Duration = Duration::from_secs(1);
const MAX_REFUSED_TIME: Duration = Duration::from_secs(30);
/// Soon after a quarantine, this fraction of the minimum number of requests is enough for another
/// one.
const RETURNED_FRACTION: u32 = 4;

/// When an endpoint is quarantined for what callers see: failed requests and slow responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutlierSettings {
    /// Failures in a row. 0: off.
    pub consecutive_failures: u32,
    /// The share of failed requests in `interval`, with at least `min_requests`. 0: off.
    pub failure_percent: u32,
    /// The minimum number of requests for `failure_percent` and `latency_percent`.
    pub min_requests: u32,
    /// The time in which requests count.
    pub interval: Duration,
    /// The mean latency, in percent of the median of the endpoints. 0: off.
    pub latency_percent: u32,
    /// The first quarantine. Each further one is twice as long as the previous one.
    pub ejection_time: Duration,
    /// The longest quarantine.
    pub max_ejection_time: Duration,
    /// The share of the endpoints that are quarantined at most, one at least. A single endpoint
    /// never is.
    pub max_ejected_percent: u32,
}

impl Default for OutlierSettings {
    fn default() -> Self {
        Self {
            consecutive_failures: 5,
            failure_percent: 50,
            min_requests: 20,
            interval: Duration::from_secs(10),
            latency_percent: 0,
            ejection_time: Duration::from_secs(10),
            max_ejection_time: Duration::from_secs(300),
            max_ejected_percent: 50,
        }
    }
}

/// Why an endpoint is quarantined: the label `cause` of the metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It accepts no connections. One refusal is enough.
    Refused,
    /// It has failed several requests in a row.
    Consecutive,
    /// It fails a large share of its requests.
    Percent,
    /// It is much slower than the others.
    Latency,
}

impl Cause {
    /// The values of the label `cause`, in the order of the discriminants.
    pub const NAMES: [&str; 4] = ["refused", "consecutive", "percent", "latency"];

    /// The value of the label.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// What the endpoints of one backend have in common: the settings, and how many are quarantined.
#[derive(Debug)]
pub(super) struct Siblings {
    settings: Cell<OutlierSettings>,
    count: Cell<usize>,
    quarantined: Cell<usize>,
    /// The results of the endpoints that are not quarantined.
    window: Window,
    /// Failures since the last success of any endpoint.
    failures: Cell<u32>,
    /// The beginning of the first interval.
    start: Instant,
}

impl Siblings {
    pub fn new(now: Instant) -> Self {
        Self {
            settings: Cell::default(),
            count: Cell::new(0),
            quarantined: Cell::new(0),
            window: Window::default(),
            failures: Cell::new(0),
            start: now,
        }
    }

    /// Sets the number of endpoints.
    pub fn set_count(&self, count: usize) {
        self.count.set(count);
    }

    /// Sets the settings, for later results.
    pub fn set(&self, settings: OutlierSettings) {
        self.settings.set(settings);
    }

    /// The settings in force.
    pub fn settings(&self) -> OutlierSettings {
        self.settings.get()
    }

    /// The number of the half interval that contains `now`.
    pub fn half(&self, now: Instant) -> u32 {
        half(self.start, now, self.settings.get().interval)
    }

    fn may_quarantine(&self) -> bool {
        let (count, percent) = (self.count.get(), self.settings.get().max_ejected_percent);
        let most = count.saturating_mul(percent as usize) / 100;
        count > 1 && percent > 0 && self.quarantined.get() < most.max(1)
    }
}

/// The quarantine of an endpoint.
pub(super) struct Quarantine {
    state: Cell<State>,
    window: Window,
    siblings: Rc<Siblings>,
    /// Discovery has removed the endpoint.
    removed: Cell<bool>,
}

#[derive(Clone, Copy)]
enum State {
    Healthy {
        /// Consecutive failures.
        failures: u32,
        /// The previous quarantine.
        previous: Option<Previous>,
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

#[derive(Clone, Copy)]
struct Previous {
    duration: Duration,
    ended_at: Instant,
}

const HEALTHY: State = State::Healthy {
    failures: 0,
    previous: None,
};

impl Quarantine {
    pub fn new(siblings: &Rc<Siblings>) -> Self {
        Self {
            state: Cell::new(HEALTHY),
            window: Window::default(),
            siblings: siblings.clone(),
            removed: Cell::new(false),
        }
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
                self.end(now);
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

    /// Records that the endpoint accepted no connection. Returns the cause of the quarantine that
    /// this starts.
    pub fn record_refusal(&self, is_probe: bool, now: Instant) -> Option<Cause> {
        self.count(true, now);
        self.start(Cause::Refused, is_probe, now)
    }

    /// Records a failed request. Returns the cause of the quarantine that this starts. During one,
    /// only the failure of the probing request counts: others were sent before, or because all
    /// endpoints are quarantined.
    pub fn record_failure(&self, is_probe: bool, now: Instant) -> Option<Cause> {
        self.count(true, now);
        let cause = match self.state.get() {
            State::Healthy { failures, previous } => {
                let failures = failures.saturating_add(1);
                self.state.set(State::Healthy { failures, previous });
                let has_returned = self.recent(previous, now).is_some();
                self.outlier(failures, has_returned, now)
                    .filter(|_| self.siblings.may_quarantine())?
            }
            State::Quarantined(active) if active.cause == Cause::Refused => Cause::Consecutive,
            State::Quarantined(active) => active.cause,
        };
        self.start(cause, is_probe, now)
    }

    /// Records a success. It ends the quarantine if the request started after the failure. An
    /// earlier one may have used an old connection to an endpoint that accepts no new ones.
    pub fn record_success(&self, started_at: Instant, now: Instant) {
        self.count(false, now);
        match self.state.get() {
            State::Quarantined(active) if active.since >= started_at => {}
            State::Quarantined(_) => self.end(now),
            State::Healthy { failures: 0, .. } => {}
            State::Healthy { previous, .. } => self.state.set(State::Healthy {
                failures: 0,
                previous,
            }),
        }
    }

    /// Records that the endpoint accepted an opaque connection. This ends a quarantine for refused
    /// connections, and says nothing about other failures yet.
    pub fn record_connection(&self, started_at: Instant, is_probe: bool, now: Instant) {
        match self.state.get() {
            State::Quarantined(active)
                if active.cause == Cause::Refused && active.since < started_at =>
            {
                self.end(now);
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

    /// The endpoint is much slower than the others. Returns the cause of the quarantine, if the
    /// endpoint has had enough requests and may have one.
    pub fn record_slowness(&self, now: Instant) -> Option<Cause> {
        let counts = self.window.counts(self.siblings.half(now));
        let is_known = counts.requests >= self.siblings.settings().min_requests;
        let is_healthy = matches!(self.state.get(), State::Healthy { .. });
        (is_known && is_healthy && self.siblings.may_quarantine())
            .then(|| self.start(Cause::Latency, false, now))?
    }

    /// Ends the quarantine, and forgets it: discovery has announced the endpoint again.
    pub fn reset(&self, now: Instant) {
        self.end(now);
        self.state.set(HEALTHY);
    }

    /// Discovery has removed the endpoint. Requests in flight no longer count.
    pub fn remove(&self, now: Instant) {
        self.reset(now);
        self.removed.set(true);
    }

    /// Counts a result, unless the endpoint is quarantined.
    fn count(&self, is_failure: bool, now: Instant) {
        if self.removed.get() || matches!(self.state.get(), State::Quarantined(_)) {
            return;
        }
        let siblings = &self.siblings;
        siblings.failures.set(match is_failure {
            true => siblings.failures.get().saturating_add(1),
            false => 0,
        });
        let number = siblings.half(now);
        self.window.record(number, is_failure);
        siblings.window.record(number, is_failure);
    }

    /// The previous quarantine, if it ended a short time ago.
    fn recent(&self, previous: Option<Previous>, now: Instant) -> Option<Previous> {
        let interval = self.siblings.settings().interval;
        previous.filter(|previous| {
            now.saturating_duration_since(previous.ended_at)
                < previous.duration.saturating_add(interval)
        })
    }

    /// Whether the endpoint fails, and the others do not. Soon after a quarantine, fewer requests
    /// show it: one success does not mean that the endpoint has recovered.
    fn outlier(&self, failures: u32, has_returned: bool, now: Instant) -> Option<Cause> {
        let siblings = &self.siblings;
        let settings = siblings.settings();
        // Since the last success, no other endpoint has failed more often than this one succeeded.
        let is_alone = siblings.failures.get() <= failures;
        if (1..=failures).contains(&settings.consecutive_failures) && is_alone {
            return Some(Cause::Consecutive);
        }
        if settings.failure_percent == 0 {
            return None;
        }
        let number = siblings.half(now);
        let own = self.window.counts(number);
        let others = siblings.window.counts(number).without(own);
        let min_requests = match has_returned {
            true => settings.min_requests.div_ceil(RETURNED_FRACTION),
            false => settings.min_requests,
        };
        let exceeds = own.exceed(settings.failure_percent, min_requests);
        (exceeds && own.stand_out(others)).then_some(Cause::Percent)
    }

    /// Starts a quarantine, or a longer one after the failure of the probing request.
    fn start(&self, cause: Cause, is_probe: bool, now: Instant) -> Option<Cause> {
        let settings = self.siblings.settings();
        let (first, longest) = match cause {
            Cause::Refused => (REFUSED_TIME, MAX_REFUSED_TIME),
            _ => (settings.ejection_time, settings.max_ejection_time),
        };
        let duration = match self.state.get() {
            _ if self.removed.get() => return None,
            State::Healthy { previous, .. } => {
                let siblings = &self.siblings;
                siblings.quarantined.set(siblings.quarantined.get() + 1);
                self.window.take_from(&siblings.window, siblings.half(now));
                let recent = self.recent(previous, now);
                let recent = recent.filter(|_| cause != Cause::Refused);
                recent.map_or(Duration::ZERO, |one| one.duration.saturating_mul(2))
            }
            State::Quarantined(_) if !is_probe => return None,
            State::Quarantined(active) => active.duration.saturating_mul(2),
        };
        let duration = duration.clamp(first, longest.max(first));
        self.state.set(State::Quarantined(Active {
            cause,
            since: now,
            until: now + duration,
            duration,
            probe_is_open: false,
        }));
        Some(cause)
    }

    fn end(&self, now: Instant) {
        let State::Quarantined(active) = self.state.get() else {
            return;
        };
        let quarantined = &self.siblings.quarantined;
        quarantined.set(quarantined.get() - 1);
        let previous = Previous {
            duration: active.duration,
            ended_at: now,
        };
        self.state.set(State::Healthy {
            failures: 0,
            previous: (active.cause != Cause::Refused).then_some(previous),
        });
    }
}

#[cfg(test)]
mod tests;
