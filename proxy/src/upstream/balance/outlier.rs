//! Outlier detection and circuit breaking: whether requests avoid an endpoint, or fail at once for
//! all endpoints of a backend, and the one request that decides when this ends. Pure: the caller
//! passes the time.
//!
//! Both are circuits, with the states of M. Nygard, "Release It!" (2007): closed, open, and
//! half-open while the probing request is in flight. The open circuit of an endpoint is its
//! quarantine (ejection, in the words of a TrafficPolicy and of Envoy). The open circuit of a
//! backend is its open circuit breaker. An outlier differs from the other endpoints: while these
//! fail too, failed requests quarantine no endpoint, because the remaining ones would get the load
//! of all. Each worker has its own circuits, as it has its own load.

use crate::labels::Cause;
use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// How long other requests avoid what a probing request tests. Then another one decides.
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

/// When the circuit of a backend opens, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerSettings {
    /// The share of failed requests in `interval`, with at least `min_requests`.
    pub failure_percent: u32,
    /// The minimum number of requests.
    pub min_requests: u32,
    /// The time in which requests count.
    pub interval: Duration,
    /// The time until a probing request decides.
    pub open_time: Duration,
}

/// The evidence from the end of a request about its endpoint and the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The endpoint works.
    Success,
    /// The request failed.
    Failure,
    /// The endpoint accepted no connection.
    Refused,
    /// The time of the Service for a response is over: a failure of the backend only.
    TimedOut,
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trial {
    pub started_at: Instant,
    /// It decides whether the quarantine of the endpoint ends.
    probes_endpoint: bool,
    /// It decides whether the circuit of the backend closes.
    probes_backend: bool,
}

/// Whether requests pass. `None`: the circuit is closed.
#[derive(Debug, Default)]
struct Circuit(Cell<Option<Open>>);

#[derive(Clone, Copy, Debug)]
struct Open {
    since: Instant,
    until: Instant,
    probe: Probe,
}

/// The probing request, which makes the circuit half-open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Probe {
    None,
    InFlight,
    /// It is an opaque connection that is open: no failure until `until` is a success.
    Connected,
}

impl Circuit {
    fn is_closed(&self) -> bool {
        self.0.get().is_none()
    }

    fn is_open(&self, now: Instant) -> bool {
        self.0.get().is_some_and(|open| now < open.until)
    }

    /// The time until a request decides, or `None` if the circuit is closed.
    fn left(&self, now: Instant) -> Option<Duration> {
        let open = self.0.get()?;
        Some(open.until.saturating_duration_since(now))
    }

    /// Whether it has opened before this time.
    fn opened_before(&self, time: Instant) -> bool {
        self.0.get().is_some_and(|open| open.since < time)
    }

    fn open(&self, now: Instant, time: Duration) {
        self.0.set(Some(Open {
            since: now,
            until: now + time,
            probe: Probe::None,
        }));
    }

    fn close(&self) {
        self.0.set(None);
    }

    /// A request begins. Returns whether it is the probing one after the time is over.
    fn begin(&self, now: Instant) -> bool {
        let Some(expired) = self.0.get().filter(|open| open.until <= now) else {
            return false;
        };
        let decides = expired.probe != Probe::Connected;
        self.0.set(decides.then_some(Open {
            until: now + PROBE_TIMEOUT,
            probe: Probe::InFlight,
            ..expired
        }));
        decides
    }

    /// The probing request is a connection that is open, or has no result: then another one decides.
    fn defer(&self, is_connection: bool, now: Instant) {
        let (probe, until) = if is_connection {
            (Probe::Connected, now + PROBE_TIMEOUT)
        } else {
            (Probe::None, now)
        };
        if let Some(open) = self.0.get().filter(|open| open.probe != Probe::None) {
            self.0.set(Some(Open {
                until,
                probe,
                ..open
            }));
        }
    }
}

/// The state that the endpoints of one backend have in common: the settings, how many are
/// quarantined, and the circuit breaker.
#[derive(Debug)]
pub(super) struct Detector {
    settings: Cell<OutlierSettings>,
    /// The settings of the circuit breaker. `None`: the circuit of the backend is closed.
    breaker: Cell<Option<BreakerSettings>>,
    circuit: Circuit,
    /// The results of all endpoints, for the circuit.
    all_results: Window,
    /// The number of endpoints, and of those that are quarantined.
    count: Cell<usize>,
    quarantined: Cell<usize>,
    /// The results of the endpoints that are not quarantined.
    results: Window,
    /// Failures since the last success of any endpoint.
    failures: Cell<u32>,
    /// The beginning of the first interval.
    start: Instant,
}

impl Detector {
    pub fn new(now: Instant) -> Self {
        Self {
            settings: Cell::default(),
            breaker: Cell::default(),
            circuit: Circuit::default(),
            all_results: Window::default(),
            count: Cell::new(0),
            quarantined: Cell::new(0),
            results: Window::default(),
            failures: Cell::new(0),
            start: now,
        }
    }

    /// Sets the number of endpoints.
    pub fn set_count(&self, count: usize) {
        self.count.set(count);
    }

    /// Sets the settings, for later results.
    pub fn set(&self, settings: OutlierSettings, breaker: Option<BreakerSettings>) {
        self.settings.set(settings);
        self.breaker.set(breaker);
        if breaker.is_none() {
            self.circuit.close();
        }
    }

    /// The settings of outlier detection in force.
    pub fn settings(&self) -> OutlierSettings {
        self.settings.get()
    }

    /// Whether requests for the backend fail at once.
    pub fn is_open(&self, now: Instant) -> bool {
        self.circuit.is_open(now)
    }

    /// The time until a request decides whether others pass, or `None` if they pass.
    pub fn left(&self, now: Instant) -> Option<Duration> {
        self.circuit.left(now)
    }

    /// Whether requests for the backend pass, and none is the probing one.
    pub fn is_closed(&self) -> bool {
        self.circuit.is_closed()
    }

    /// Whether the quarantine of an endpoint has not ended.
    pub fn has_quarantined(&self) -> bool {
        self.quarantined.get() > 0
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

    /// Counts a result for the circuit of the backend. While it is open, only the result of the probing
    /// request counts: the others were sent before.
    fn record(&self, is_failure: bool, is_probe: bool, now: Instant) {
        let Some(settings) = self.breaker.get() else {
            return;
        };
        let opens = if self.circuit.is_closed() {
            let number = half(self.start, now, settings.interval);
            self.all_results.record(number, is_failure);
            let counts = self.all_results.counts(number);
            is_failure && counts.exceed(settings.failure_percent, settings.min_requests)
        } else {
            is_probe && is_failure
        };
        if opens {
            self.all_results.clear();
            self.circuit.open(now, settings.open_time);
        } else if is_probe {
            self.circuit.close();
        }
    }
}

/// The judgement of one endpoint.
#[derive(Debug)]
pub(super) struct Judgement {
    detector: Rc<Detector>,
    /// Open while the endpoint is quarantined: until a request succeeds.
    circuit: Circuit,
    /// The cause and the time of the current quarantine, or of the last one.
    cause: Cell<Cause>,
    duration: Cell<Duration>,
    /// The end of the last quarantine, unless it was for refused connections.
    returned_at: Cell<Option<Instant>>,
    /// Consecutive failures.
    failures: Cell<u32>,
    results: Window,
    /// Discovery has removed the endpoint: its results no longer count.
    removed: Cell<bool>,
}

impl Judgement {
    pub fn new(detector: &Rc<Detector>) -> Self {
        Self {
            detector: detector.clone(),
            circuit: Circuit::default(),
            cause: Cell::new(Cause::Refused),
            duration: Cell::default(),
            returned_at: Cell::default(),
            failures: Cell::default(),
            results: Window::default(),
            removed: Cell::default(),
        }
    }

    /// Whether requests avoid the endpoint.
    pub fn is_quarantined(&self, now: Instant) -> bool {
        self.circuit.is_open(now)
    }

    /// Why requests avoid the endpoint, if they do.
    pub fn quarantine(&self, now: Instant) -> Option<Cause> {
        self.is_quarantined(now).then(|| self.cause.get())
    }

    /// The cause of the quarantine, if it has not ended, and the time until a request decides.
    pub fn left(&self, now: Instant) -> Option<(Cause, Duration)> {
        let left = self.circuit.left(now)?;
        Some((self.cause.get(), left))
    }

    /// A request begins, which may be the one that decides.
    pub fn begin(&self, now: Instant) -> Trial {
        let was_closed = self.circuit.is_closed();
        let probes_endpoint = self.circuit.begin(now);
        if !was_closed && self.circuit.is_closed() {
            self.returned(now);
        }
        Trial {
            started_at: now,
            probes_endpoint,
            probes_backend: self.detector.circuit.begin(now),
        }
    }

    /// Records the end of a request. Returns the cause of the quarantine that this starts. During one,
    /// only the failure of the probing request counts: others were sent before, or because all
    /// endpoints are quarantined.
    pub fn record(&self, outcome: Outcome, trial: &Trial, now: Instant) -> Option<Cause> {
        let is_failure = outcome != Outcome::Success;
        self.detector.record(is_failure, trial.probes_backend, now);
        if outcome == Outcome::TimedOut || self.removed.get() {
            return None;
        }
        self.count(is_failure, now);
        let is_judged = self.circuit.is_closed() || trial.probes_endpoint;
        match outcome {
            Outcome::Failure if is_judged => self.fail(now),
            Outcome::Refused if is_judged => Some(self.start(Cause::Refused, now)),
            Outcome::Success => {
                self.failures.set(0);
                // An earlier request may have used an old connection to an endpoint that accepts no
                // new ones.
                if self.circuit.opened_before(trial.started_at) {
                    self.end(now);
                }
                None
            }
            _ => None,
        }
    }

    /// A request has no result, or not yet: it is an opaque connection that the endpoint accepted.
    /// This ends a quarantine for refused connections, and says nothing about other failures.
    pub fn defer(&self, is_connection: bool, trial: &Trial, now: Instant) {
        if trial.probes_backend {
            self.detector.circuit.defer(is_connection, now);
        }
        let is_accepted = is_connection && self.cause.get() == Cause::Refused;
        if is_accepted && self.circuit.opened_before(trial.started_at) {
            self.end(now);
        } else if trial.probes_endpoint {
            self.circuit.defer(is_connection, now);
        }
    }

    /// The endpoint is much slower than the others. Returns the cause of the quarantine, if the
    /// endpoint has had enough requests and may have one.
    pub fn record_slowness(&self, now: Instant) -> Option<Cause> {
        let detector = &self.detector;
        let counts = self.results.counts(detector.half(now));
        let is_known = counts.requests >= detector.settings().min_requests;
        let may_start = is_known && self.circuit.is_closed() && !self.removed.get();
        (may_start && detector.may_quarantine()).then(|| self.start(Cause::Latency, now))
    }

    /// Ends the quarantine, and forgets it: discovery has announced the endpoint again.
    pub fn reset(&self, now: Instant) {
        self.end(now);
        self.failures.set(0);
        self.returned_at.set(None);
    }

    /// Discovery has removed the endpoint. Requests in flight no longer count.
    pub fn remove(&self, now: Instant) {
        self.reset(now);
        self.removed.set(true);
    }

    /// Counts a result, unless the endpoint is quarantined.
    fn count(&self, is_failure: bool, now: Instant) {
        if !self.circuit.is_closed() {
            return;
        }
        let detector = &self.detector;
        detector.failures.set(if is_failure {
            detector.failures.get().saturating_add(1)
        } else {
            0
        });
        let number = detector.half(now);
        self.results.record(number, is_failure);
        detector.results.record(number, is_failure);
    }

    /// A request failed that counts. Starts a quarantine if the endpoint is an outlier, and a longer
    /// one after the probing request.
    fn fail(&self, now: Instant) -> Option<Cause> {
        let cause = if self.circuit.is_closed() {
            self.failures.set(self.failures.get().saturating_add(1));
            self.outlier(now)
                .filter(|_| self.detector.may_quarantine())?
        } else if self.cause.get() == Cause::Refused {
            Cause::Consecutive
        } else {
            self.cause.get()
        };
        Some(self.start(cause, now))
    }

    /// Whether the endpoint fails, and the others do not. Soon after a quarantine, fewer requests
    /// show it: one success does not mean that the endpoint has recovered.
    fn outlier(&self, now: Instant) -> Option<Cause> {
        let (detector, failures) = (&self.detector, self.failures.get());
        let settings = detector.settings();
        // Since the last success of any endpoint, all together have failed at most as often as this one
        // in a row.
        let is_alone = detector.failures.get() <= failures;
        if (1..=failures).contains(&settings.consecutive_failures) && is_alone {
            return Some(Cause::Consecutive);
        }
        if settings.failure_percent == 0 {
            return None;
        }
        let number = detector.half(now);
        let own = self.results.counts(number);
        let others = detector.results.counts(number).without(own);
        let min_requests = if self.has_returned(now) {
            settings.min_requests.div_ceil(RETURNED_FRACTION)
        } else {
            settings.min_requests
        };
        let exceeds = own.exceed(settings.failure_percent, min_requests);
        (exceeds && own.stand_out(others)).then_some(Cause::Percent)
    }

    /// Whether the last quarantine ended a short time ago.
    fn has_returned(&self, now: Instant) -> bool {
        let interval = self.detector.settings().interval;
        let is_recent =
            |end| now.saturating_duration_since(end) < self.duration.get().saturating_add(interval);
        self.returned_at.get().is_some_and(is_recent)
    }

    /// Starts a quarantine, or a longer one after the failure of the probing request.
    fn start(&self, cause: Cause, now: Instant) -> Cause {
        let detector = &self.detector;
        let settings = detector.settings();
        let (first, longest) = match cause {
            Cause::Refused => (REFUSED_TIME, MAX_REFUSED_TIME),
            _ => (settings.ejection_time, settings.max_ejection_time),
        };
        let is_new = self.circuit.is_closed();
        let is_repeated = !is_new || cause != Cause::Refused && self.has_returned(now);
        if is_new {
            detector.quarantined.set(detector.quarantined.get() + 1);
            self.results
                .take_from(&detector.results, detector.half(now));
        }
        let duration = self
            .duration
            .get()
            .saturating_mul(2 * u32::from(is_repeated));
        let duration = duration.clamp(first, longest.max(first));
        self.cause.set(cause);
        self.duration.set(duration);
        self.circuit.open(now, duration);
        cause
    }

    fn end(&self, now: Instant) {
        if !self.circuit.is_closed() {
            self.circuit.close();
            self.returned(now);
        }
    }

    /// The quarantine is over.
    fn returned(&self, now: Instant) {
        let quarantined = &self.detector.quarantined;
        quarantined.set(quarantined.get() - 1);
        self.failures.set(0);
        let is_counted = self.cause.get() != Cause::Refused;
        self.returned_at.set(is_counted.then_some(now));
    }
}

/// Results of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    requests: u32,
    failures: u32,
}

impl Counts {
    /// Whether there are enough requests, and at least this share of them has failed.
    fn exceed(self, percent: u32, min_requests: u32) -> bool {
        self.requests >= min_requests.max(1)
            && u64::from(self.failures) * 100 >= u64::from(percent) * u64::from(self.requests)
    }

    /// Whether requests fail at least twice as often as the requests of `others`, if these have any.
    fn stand_out(self, others: Self) -> bool {
        let [own, other] = [(self, others), (others, self)]
            .map(|(one, of)| u64::from(one.failures) * u64::from(of.requests));
        others.requests == 0 || own > 0 && own >= 2 * other
    }

    /// The counts without the counts of `part`.
    fn without(self, part: Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(part.requests),
            failures: self.failures.saturating_sub(part.failures),
        }
    }

    fn with(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_add(other.requests),
            failures: self.failures.saturating_add(other.failures),
        }
    }
}

/// The number of the half interval that contains `now`.
fn half(start: Instant, now: Instant, interval: Duration) -> u32 {
    let elapsed = now.saturating_duration_since(start);
    let milliseconds = |time: Duration| time.as_secs() * 1000 + u64::from(time.subsec_millis());
    let number = milliseconds(elapsed) / (milliseconds(interval) / 2).max(1);
    // Only whether two numbers are equal or adjacent counts.
    number as u32
}

/// The results of requests in the last interval, as two halves: the counts of the current and of the
/// previous one. So they cover at least half of the interval and at most all of it, at the cost of
/// five integers.
#[derive(Debug, Default)]
struct Window {
    previous: Cell<Counts>,
    current: Cell<Counts>,
    /// The half interval that `current` counts.
    number: Cell<u32>,
}

impl Window {
    /// Counts a result in this half interval.
    fn record(&self, number: u32, is_failure: bool) {
        self.advance(number);
        let one = Counts {
            requests: 1,
            failures: is_failure.into(),
        };
        self.current.set(self.current.get().with(one));
    }

    /// The results of this half interval and of the previous one.
    fn counts(&self, number: u32) -> Counts {
        self.advance(number);
        self.previous.get().with(self.current.get())
    }

    /// Moves the results out of this window, and out of `all`, which contains them.
    fn take_from(&self, all: &Self, number: u32) {
        self.advance(number);
        all.advance(number);
        for (own, all) in [
            (&self.previous, &all.previous),
            (&self.current, &all.current),
        ] {
            all.set(all.get().without(own.take()));
        }
    }

    /// Forgets all results.
    fn clear(&self) {
        self.previous.take();
        self.current.take();
    }

    fn advance(&self, number: u32) {
        let before = self.number.replace(number);
        if before != number {
            let current = self.current.take();
            let is_next = number == before.wrapping_add(1);
            self.previous
                .set(if is_next { current } else { Counts::default() });
        }
    }
}

#[cfg(test)]
mod tests;
