//! The circuit breaker of one backend: while most of its requests fail, further ones fail at once,
//! but a probing one from time to time. So the backend recovers without load, and callers do not
//! wait for its timeouts. Pure: the caller passes the time.
//!
//! The states are those of M. Nygard, "Release It!" (2007): closed, open, and half-open while the
//! probing request is in flight. Each worker has its own breakers, as it has its own load.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::window::{Window, half};

/// How long other requests fail while a probing request is in flight. Then another one decides.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

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

/// The circuit breaker of one backend. Without settings, it is closed.
#[derive(Debug)]
pub(super) struct Breaker {
    settings: Cell<Option<BreakerSettings>>,
    state: Cell<State>,
    window: Window,
    start: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed,
    Open {
        until: Instant,
    },
    /// A probing request is in flight.
    HalfOpen {
        until: Instant,
        /// It is an opaque connection that is open: no failure until `until` is a success.
        is_connection: bool,
    },
}

impl Breaker {
    pub fn new(now: Instant) -> Self {
        Self {
            settings: Cell::new(None),
            state: Cell::new(State::Closed),
            window: Window::default(),
            start: now,
        }
    }

    /// Sets the settings. Without any, the circuit is closed.
    pub fn set(&self, settings: Option<BreakerSettings>) {
        self.settings.set(settings);
        if settings.is_none() {
            self.state.set(State::Closed);
        }
    }

    /// Whether there are settings.
    pub fn is_set(&self) -> bool {
        self.settings.get().is_some()
    }

    /// Whether requests pass, and none is the probing one.
    pub fn is_closed(&self) -> bool {
        self.state.get() == State::Closed
    }

    /// Whether a request fails at once.
    pub fn is_open(&self, now: Instant) -> bool {
        match self.state.get() {
            State::Closed => false,
            State::Open { until } | State::HalfOpen { until, .. } => now < until,
        }
    }

    /// A request begins, which [`Breaker::is_open`] permits. Returns whether it is the probing
    /// one, whose result decides.
    pub fn begin(&self, now: Instant) -> bool {
        match self.state.get() {
            State::Open { until } | State::HalfOpen { until, .. } if now < until => false,
            State::Closed => false,
            State::HalfOpen {
                is_connection: true,
                ..
            } => {
                self.state.set(State::Closed);
                false
            }
            State::Open { .. } | State::HalfOpen { .. } => {
                self.half_open(now, false);
                true
            }
        }
    }

    /// The probing request has no result. Another one may decide.
    pub fn cancel_probe(&self, now: Instant) {
        if let State::HalfOpen { .. } = self.state.get() {
            self.state.set(State::Open { until: now });
        }
    }

    /// The probing request is an opaque connection, and the backend has accepted it.
    pub fn probe_accepted(&self, now: Instant) {
        if let State::HalfOpen { .. } = self.state.get() {
            self.half_open(now, true);
        }
    }

    /// Counts a result. While the circuit is open, only that of the probing request counts: the
    /// others were sent before.
    pub fn record(&self, is_failure: bool, is_probe: bool, now: Instant) {
        let Some(settings) = self.settings.get() else {
            return;
        };
        let opens = match self.state.get() {
            State::Closed => {
                let number = half(self.start, now, settings.interval);
                self.window.record(number, is_failure);
                let counts = self.window.counts(number);
                is_failure && counts.exceed(settings.failure_percent, settings.min_requests)
            }
            _ if !is_probe => return,
            _ if is_failure => true,
            _ => return self.state.set(State::Closed),
        };
        if opens {
            self.window.clear();
            let until = now + settings.open_time;
            self.state.set(State::Open { until });
        }
    }

    fn half_open(&self, now: Instant, is_connection: bool) {
        let until = now + PROBE_TIMEOUT;
        self.state.set(State::HalfOpen {
            until,
            is_connection,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A breaker that opens for 5 s at half of 20 requests in 10 s.
    fn breaker(now: Instant) -> Breaker {
        let breaker = Breaker::new(now);
        breaker.set(Some(BreakerSettings {
            failure_percent: 50,
            min_requests: 20,
            interval: 10 * SECOND,
            open_time: 5 * SECOND,
        }));
        breaker
    }

    fn opened(now: Instant) -> Breaker {
        let breaker = breaker(now);
        (0..20).for_each(|_| breaker.record(true, false, now));
        assert!(breaker.is_open(now));
        breaker
    }

    #[test]
    fn opens_at_the_share_of_failures_with_enough_requests() {
        let now = Instant::now();
        let circuit = breaker(now);
        (0..19).for_each(|_| circuit.record(true, false, now));
        assert!(!circuit.is_open(now) && circuit.is_closed());
        circuit.record(true, false, now);
        assert!(circuit.is_open(now + 4 * SECOND) && !circuit.is_open(now + 5 * SECOND));
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
    fn one_probing_request_decides() {
        let start = Instant::now();
        let (circuit, mut now) = (opened(start), start);
        assert!(!circuit.begin(now), "it is open");
        for _ in 0..3 {
            now += 5 * SECOND;
            assert!(!circuit.is_open(now) && circuit.begin(now));
            assert!(circuit.is_open(now), "others fail meanwhile");
            // Results of requests from before do not count.
            (0..100).for_each(|_| circuit.record(false, false, now));
            assert!(circuit.is_open(now));
            circuit.record(true, true, now);
            assert!(circuit.is_open(now + 4 * SECOND));
        }
        now += 5 * SECOND;
        assert!(circuit.begin(now));
        circuit.record(false, true, now);
        assert!(circuit.is_closed() && !circuit.is_open(now));
        // The failures from before are forgotten.
        (0..19).for_each(|_| circuit.record(true, false, now));
        assert!(circuit.is_closed());
    }

    #[test]
    fn probing_request_without_result_is_replaced() {
        let start = Instant::now();
        let (circuit, now) = (opened(start), start + 5 * SECOND);
        assert!(circuit.begin(now));
        circuit.cancel_probe(now);
        assert!(!circuit.is_open(now) && circuit.begin(now));
        // It never ends.
        assert!(circuit.is_open(now + 9 * SECOND) && !circuit.is_open(now + 10 * SECOND));
        assert!(circuit.begin(now + 10 * SECOND));
        // An open connection is a success after the time of a probing request.
        circuit.probe_accepted(now + 11 * SECOND);
        assert!(circuit.is_open(now + 20 * SECOND));
        assert!(!circuit.begin(now + 21 * SECOND) && circuit.is_closed());
    }

    #[test]
    fn without_settings_it_is_closed() {
        let now = Instant::now();
        let unset = Breaker::new(now);
        (0..1000).for_each(|_| unset.record(true, false, now));
        assert!(unset.is_closed());
        let removed = opened(now);
        removed.set(None);
        assert!(removed.is_closed() && !removed.begin(now));
    }
}
