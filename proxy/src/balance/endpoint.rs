//! The state of one endpoint of a backend: its pool, in-flight requests, latency and quarantine.
//! It survives updates of the other endpoints. In-flight requests keep it alive after its removal.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;

use std::time::{Duration, Instant};

use super::latency::Latency;
use crate::pool::Pool;

/// How long an endpoint is quarantined after it refused a connection. The time doubles with each
/// further refusal.
const MIN_QUARANTINE: Duration = Duration::from_secs(1);
const MAX_QUARANTINE: Duration = Duration::from_secs(30);

/// An endpoint of a backend.
pub struct Endpoint {
    /// Its address.
    pub address: SocketAddr,
    /// The connections to it.
    pub pool: Rc<Pool>,
    in_flight: Cell<u32>,
    latency: Latency,
    quarantine: Quarantine,
}

/// An in-flight request. The endpoint counts it until it is dropped.
#[must_use = "the request is in flight until this value is dropped"]
pub struct InFlight {
    endpoint: Rc<Endpoint>,
    started_at: Instant,
    /// The latency was recorded, or does not count.
    recorded: bool,
}

impl Endpoint {
    pub(super) fn new(pool: &Rc<Pool>) -> Self {
        Self {
            address: pool.remote.address,
            pool: pool.clone(),
            in_flight: Cell::new(0),
            latency: Latency::default(),
            quarantine: Quarantine::default(),
        }
    }

    /// Counts a request that starts now.
    pub fn begin(self: &Rc<Self>) -> InFlight {
        self.in_flight.set(self.in_flight.get() + 1);
        InFlight {
            endpoint: self.clone(),
            started_at: Instant::now(),
            recorded: false,
        }
    }

    /// Starts or extends the quarantine after the endpoint refused a connection. The balancer
    /// prefers endpoints that are not quarantined.
    pub fn quarantine(&self, now: Instant) {
        self.quarantine.extend(now);
    }

    /// The number of in-flight requests.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.get()
    }

    /// Whether the endpoint is quarantined.
    pub fn is_quarantined(&self, now: Instant) -> bool {
        self.quarantine.is_active(now)
    }

    /// Whether one more request costs less than on `other`.
    pub(super) fn is_cheaper(&self, other: &Self, now: Instant) -> bool {
        self.latency
            .is_cheaper(self.in_flight(), &other.latency, other.in_flight(), now)
    }

    /// Ends the quarantine: discovery has announced the endpoint again.
    pub(super) fn end_quarantine(&self) {
        self.quarantine.end();
    }
}

impl InFlight {
    /// The endpoint of the request.
    pub fn endpoint(&self) -> &Rc<Endpoint> {
        &self.endpoint
    }

    /// When the request started.
    pub fn started_at(&self) -> Instant {
        self.started_at
    }

    /// Restarts the latency measurement on a new connection. The time to connect does not count:
    /// many requests share a connection, and an endpoint that is seldom selected, and whose
    /// connections therefore are new, would stay expensive.
    pub fn connected(&mut self) {
        self.started_at = Instant::now();
    }

    /// Records the success of an opaque connection, whose duration is not a latency.
    pub fn opened(&mut self) {
        self.recorded = true;
        self.endpoint.quarantine.record_success(self.started_at);
    }

    /// Records the latency at the start of the response. Returns the time.
    pub fn answered(&mut self) -> Instant {
        let now = Instant::now();
        if !self.recorded {
            self.recorded = true;
            self.endpoint
                .latency
                .record_success(now.saturating_duration_since(self.started_at), now);
            self.endpoint.quarantine.record_success(self.started_at);
        }
        now
    }

    /// Records a failure of the endpoint.
    pub fn failed(&mut self) {
        if !self.recorded {
            self.recorded = true;
            let now = Instant::now();
            self.endpoint
                .latency
                .record_failure(now.saturating_duration_since(self.started_at), now);
        }
    }
}

impl Drop for InFlight {
    /// Counts a request without a recorded result as answered now.
    fn drop(&mut self) {
        if !self.recorded {
            self.answered();
        }
        self.endpoint
            .in_flight
            .set(self.endpoint.in_flight.get() - 1);
    }
}

/// The quarantine of an endpoint. An expired one determines the duration of the next one.
#[derive(Default)]
struct Quarantine(Cell<Option<(Instant, Duration)>>);

impl Quarantine {
    /// Starts the quarantine, for twice the previous duration. Refusals during the quarantine do
    /// not extend it.
    fn extend(&self, now: Instant) {
        let duration = match self.0.get() {
            Some(_) if self.is_active(now) => return,
            Some((_, duration)) => (duration * 2).min(MAX_QUARANTINE),
            None => MIN_QUARANTINE,
        };
        self.0.set(Some((now, duration)));
    }

    fn is_active(&self, now: Instant) -> bool {
        self.0
            .get()
            .is_some_and(|(start, duration)| now.saturating_duration_since(start) < duration)
    }

    /// Ends the quarantine if the successful request started after the refusal. An earlier one may
    /// have used an old connection to an endpoint that accepts no new ones.
    fn record_success(&self, started_at: Instant) {
        if self.0.get().is_some_and(|(start, _)| start < started_at) {
            self.end();
        }
    }

    fn end(&self) {
        self.0.set(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connect::Remote;
    use crate::discovery::EndpointInfo;

    const SECOND: Duration = Duration::from_secs(1);

    fn endpoint() -> Rc<Endpoint> {
        let remote = Remote::from(&EndpointInfo::bare(([127, 0, 0, 1], 80).into()));
        Rc::new(Endpoint::new(&Rc::new(Pool::new(remote))))
    }

    #[test]
    fn quarantine_doubles_from_one_second_to_thirty() {
        let (mut now, quarantine) = (Instant::now(), Quarantine::default());
        assert!(!quarantine.is_active(now));
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            quarantine.extend(now);
            // Concurrent refusals count once.
            (0..32).for_each(|_| quarantine.extend(now));
            now += seconds * SECOND;
            assert!(quarantine.is_active(now - SECOND / 100), "{seconds} s");
            assert!(!quarantine.is_active(now), "{seconds} s");
        }
        quarantine.end();
        quarantine.extend(now);
        assert!(!quarantine.is_active(now + SECOND));
    }

    #[test]
    fn only_success_of_later_request_ends_quarantine() {
        let (now, quarantine) = (Instant::now(), Quarantine::default());
        quarantine.extend(now);
        quarantine.record_success(now - SECOND);
        assert!(quarantine.is_active(now));
        quarantine.record_success(now + SECOND / 2);
        assert!(!quarantine.is_active(now));
    }

    #[test]
    fn counts_requests_until_they_are_dropped() {
        let endpoint = endpoint();
        let (mut one, other) = (endpoint.begin(), endpoint.begin());
        assert_eq!(endpoint.in_flight(), 2);
        one.answered();
        assert_eq!(endpoint.in_flight(), 2);
        drop((one, other));
        assert_eq!(endpoint.in_flight(), 0);
    }

    #[test]
    fn latency_excludes_dialing_and_opaque_connections() {
        let (dialed, pooled, opened) = (endpoint(), endpoint(), endpoint());
        for _ in 0..10 {
            let mut slow = dialed.begin();
            slow.started_at -= SECOND;
            slow.connected();
            drop(slow);
            pooled.latency.record_success(SECOND / 2, Instant::now());
        }
        assert!(dialed.is_cheaper(&pooled, Instant::now()));
        let mut connection = opened.begin();
        connection.opened();
        connection.started_at -= SECOND;
        drop(connection);
        // It still has no latency: only in-flight requests are compared.
        let in_flight = dialed.begin();
        assert!(
            opened.is_cheaper(&dialed, Instant::now())
                && !dialed.is_cheaper(&opened, Instant::now())
        );
        drop(in_flight);
        assert!(
            !opened.is_cheaper(&dialed, Instant::now())
                && !dialed.is_cheaper(&opened, Instant::now())
        );
    }

    #[test]
    fn failure_makes_endpoint_more_expensive() {
        let (failing, healthy) = (endpoint(), endpoint());
        for _ in 0..10 {
            drop(healthy.begin());
            failing.begin().failed();
        }
        assert!(healthy.is_cheaper(&failing, Instant::now()));
    }
}
