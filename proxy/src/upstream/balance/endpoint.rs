//! The state of one endpoint of a backend: its pool, in-flight requests, latency and judgement.
//! It survives updates of the other endpoints. In-flight requests keep it alive after its removal.

use crate::labels::Cause;
use std::cell::{Cell, OnceCell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::MIN_SHARE;
use super::health::Health;
use super::latency::Latency;
use super::outlier::{Judgement, Outcome, Trial};
use crate::endpoint::EndpointInfo;
use crate::http::verdict::{Overload, Verdict};
use crate::route::session::{Tag, tag};
use crate::upstream::connect::Pool;

/// An endpoint of a backend.
pub struct Endpoint {
    /// Its address.
    pub address: SocketAddr,
    /// The announcement of discovery.
    pub info: Arc<EndpointInfo>,
    /// Whether its node is unready, as discovery announced last.
    pub node_unready: Cell<bool>,
    tag: OnceCell<Tag>,
    pool: RefCell<Rc<Pool>>,
    /// When discovery announced it, or `None` if the first announcement that this proxy got contains
    /// it.
    pub(super) joined_at: Option<Instant>,
    in_flight: Cell<u32>,
    pub(super) latency: Latency,
    pub(super) judgement: Judgement,
    health: Rc<Health>,
    /// Until then, the endpoint wants no retries: it is overloaded.
    no_retry_until: Cell<Option<Instant>>,
}

/// An in-flight request. The endpoint counts it until it is dropped.
#[must_use = "the request is in flight until this value is dropped"]
pub struct InFlight {
    endpoint: Rc<Endpoint>,
    trial: Trial,
    /// The result was recorded, or does not count.
    recorded: bool,
}

impl Endpoint {
    pub(super) fn new(
        pool: &Rc<Pool>,
        info: &Arc<EndpointInfo>,
        joined_at: Option<Instant>,
        health: &Rc<Health>,
    ) -> Self {
        Self {
            address: pool.remote.address,
            pool: RefCell::new(pool.clone()),
            info: info.clone(),
            node_unready: Cell::new(info.node_unready),
            tag: OnceCell::new(),
            joined_at,
            in_flight: Cell::new(0),
            latency: Latency::default(),
            judgement: Judgement::new(&health.detector),
            health: health.clone(),
            no_retry_until: Cell::new(None),
        }
    }

    /// The tag that the tokens of sessions contain: another pod with the address has another tag.
    pub fn tag(&self) -> Tag {
        let tag = || tag(&[&self.address.to_string(), &self.info.pod]);
        *self.tag.get_or_init(tag)
    }

    /// Counts a request that starts now.
    pub fn begin(self: &Rc<Self>, now: Instant) -> InFlight {
        self.in_flight.set(self.in_flight.get() + 1);
        let trial = self.judgement.begin(now);
        self.health.observe();
        InFlight {
            endpoint: self.clone(),
            trial,
            recorded: false,
        }
    }

    /// The connections to it.
    pub fn pool(&self) -> Rc<Pool> {
        self.pool.borrow().clone()
    }

    /// Later requests use the connections of another pool.
    pub(super) fn set_pool(&self, pool: &Rc<Pool>) {
        self.pool.replace(pool.clone());
    }

    /// The number of in-flight requests.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.get()
    }

    /// Whether the endpoint is quarantined. The balancer prefers others.
    pub fn is_quarantined(&self, now: Instant) -> bool {
        self.judgement.is_quarantined(now)
    }

    /// The share of the requests that the endpoint gets, from nearly 0 to 1 after `slow_start`,
    /// which is not 0.
    pub(super) fn share(&self, slow_start: Duration, now: Instant) -> f64 {
        let age = |since| {
            now.saturating_duration_since(since)
                .div_duration_f64(slow_start)
        };
        self.joined_at
            .map_or(1.0, |since| age(since).clamp(MIN_SHARE, 1.0))
    }

    /// Whether the endpoint usually answers within this time. True if its latency is unknown.
    pub(super) fn answers_within(&self, time: Duration, now: Instant) -> bool {
        let usual = self.latency.usual(now);
        !time.is_zero() && usual.is_none_or(|usual| usual <= time)
    }

    /// Whether the endpoint has asked for no retries yet.
    pub fn refuses_retries(&self, now: Instant) -> bool {
        self.no_retry_left(now).is_some()
    }

    /// For how long the endpoint has asked for no retries.
    pub(super) fn no_retry_left(&self, now: Instant) -> Option<Duration> {
        let until = self.no_retry_until.get().filter(|until| now < *until)?;
        Some(until - now)
    }

    /// Whether one more request costs less than on `other`.
    pub(super) fn is_cheaper(&self, other: &Self, now: Instant) -> bool {
        self.latency
            .is_cheaper(self.in_flight(), &other.latency, other.in_flight(), now)
    }

    /// The endpoint is much slower than the others.
    pub(super) fn record_slowness(&self, now: Instant) {
        self.quarantined(self.judgement.record_slowness(now));
    }

    /// A quarantine may have started.
    fn quarantined(&self, cause: Option<Cause>) {
        if let Some(cause) = cause {
            // Afterwards, the endpoint starts without a history of slow failures.
            self.latency.reset();
            self.health.ejected(self.address, cause);
        }
    }
}

impl InFlight {
    /// When the request started.
    pub fn started_at(&self) -> Instant {
        self.trial.started_at
    }

    /// Restarts the latency measurement on a new connection. The time to connect does not count:
    /// many requests share a connection, and an endpoint that is seldom selected, and whose
    /// connections therefore are new, would stay expensive.
    pub fn connected(&mut self) {
        self.trial.started_at = Instant::now();
    }

    /// Records that the endpoint accepted an opaque connection, whose duration is not a latency.
    pub fn opened(&mut self) {
        self.recorded = true;
        self.defer(true, Instant::now());
    }

    /// Records the end of an opaque connection: whether the endpoint sent anything, and whether it
    /// ended the connection before the client did.
    pub fn closed(mut self, has_answered: bool, ended_first: bool) {
        let now = Instant::now();
        self.recorded = true;
        match (has_answered, ended_first) {
            (true, _) => self.judge(Outcome::Success, now),
            (false, true) => self.judge(Outcome::Failure, now),
            (false, false) => self.defer(false, now),
        }
    }

    /// Records the latency at the start of a response, and what it says about the endpoint. Returns
    /// the time.
    pub fn answered(&mut self, verdict: Verdict) -> Instant {
        let now = Instant::now();
        match verdict {
            Verdict::Failure | Verdict::NotDelivered => self.record(Outcome::Failure, now),
            Verdict::Overloaded(Overload { retry_after, .. }) => {
                let until = self.endpoint.no_retry_until.get();
                let until = until.map_or(now + retry_after, |until| until.max(now + retry_after));
                self.endpoint.no_retry_until.set(Some(until));
                // It gets fewer requests, as a slow one, and no quarantine: it works, and the others
                // would have its load too.
                self.record(Outcome::Success, now);
            }
            Verdict::Success if !self.recorded => {
                self.record_latency(now);
                self.judge(Outcome::Success, now);
            }
            Verdict::Success => {}
        }
        now
    }

    /// Records a failure of the endpoint.
    pub fn failed(&mut self) {
        self.record(Outcome::Failure, Instant::now());
    }

    /// Records that the endpoint accepted no connection.
    pub fn refused(&mut self) {
        self.record(Outcome::Refused, Instant::now());
    }

    /// Records that the time for the response is over, for a limit that the Service has. The latency
    /// is at least the time until now.
    pub fn timed_out(self) {
        self.judge(Outcome::TimedOut, Instant::now());
    }

    /// Drops a result that says nothing about the endpoint.
    pub fn discard(mut self) {
        self.recorded = true;
        self.defer(false, Instant::now());
    }

    /// Records the first result, and the latency of a failure.
    fn record(&mut self, outcome: Outcome, now: Instant) {
        if !std::mem::replace(&mut self.recorded, true) {
            let latency = now.saturating_duration_since(self.trial.started_at);
            self.endpoint.latency.record_failure(latency, now);
            self.judge(outcome, now);
        }
    }

    fn judge(&self, outcome: Outcome, now: Instant) {
        let endpoint = &self.endpoint;
        endpoint.quarantined(endpoint.judgement.record(outcome, &self.trial, now));
        endpoint.health.observe();
    }

    /// There is no result, or only a connection so far.
    fn defer(&self, is_connection: bool, now: Instant) {
        let judgement = &self.endpoint.judgement;
        judgement.defer(is_connection, &self.trial, now);
    }

    fn record_latency(&mut self, now: Instant) {
        self.recorded = true;
        let (endpoint, latency) = (
            &self.endpoint,
            now.saturating_duration_since(self.trial.started_at),
        );
        endpoint.latency.record_success(latency, now);
        let zone = &endpoint.info.zone;
        endpoint.health.zones.record(zone, latency, now);
    }
}

impl Drop for InFlight {
    /// A request without a recorded result was canceled: its response takes at least until now.
    fn drop(&mut self) {
        if !self.recorded {
            let now = Instant::now();
            self.record_latency(now);
            self.defer(false, now);
        }
        self.endpoint
            .in_flight
            .set(self.endpoint.in_flight.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl InFlight {
        /// Records a success with this latency.
        pub fn answered_after(mut self, latency: Duration) {
            self.trial.started_at = Instant::now() - latency;
            self.answered(Verdict::Success);
        }
    }

    use crate::endpoint::EndpointInfo;
    use crate::upstream::connect::{Limits, Remote};

    const SECOND: Duration = Duration::from_secs(1);

    fn endpoint() -> Rc<Endpoint> {
        let info = Arc::new(EndpointInfo::bare(([127, 0, 0, 1], 80).into()));
        let remote = Remote::from(&*info);
        {
            let pool = Rc::new(Pool::alone(remote, Limits::default()));
            Rc::new(Endpoint::new(&pool, &info, None, &Rc::default()))
        }
    }

    #[test]
    fn counts_requests_until_they_are_dropped() {
        let endpoint = endpoint();
        let (mut one, other) = (
            endpoint.begin(Instant::now()),
            endpoint.begin(Instant::now()),
        );
        assert_eq!(endpoint.in_flight(), 2);
        one.answered(Verdict::Success);
        assert_eq!(endpoint.in_flight(), 2);
        drop((one, other));
        assert_eq!(endpoint.in_flight(), 0);
    }

    #[test]
    fn latency_excludes_dialing_and_opaque_connections() {
        let (dialed, pooled, opened) = (endpoint(), endpoint(), endpoint());
        for _ in 0..10 {
            let mut slow = dialed.begin(Instant::now());
            slow.trial.started_at -= SECOND;
            slow.connected();
            drop(slow);
            pooled.latency.record_success(SECOND / 2, Instant::now());
        }
        assert!(dialed.is_cheaper(&pooled, Instant::now()));
        let mut connection = opened.begin(Instant::now());
        connection.opened();
        connection.trial.started_at -= SECOND;
        drop(connection);
        // It still has no latency: only in-flight requests are compared.
        let in_flight = dialed.begin(Instant::now());
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
    fn answers_within_the_usual_latency() {
        let (unknown, slow, now) = (endpoint(), endpoint(), Instant::now());
        for _ in 0..10 {
            slow.latency.record_success(SECOND, now);
        }
        assert!(slow.answers_within(2 * SECOND, now) && !slow.answers_within(SECOND / 2, now));
        assert!(unknown.answers_within(SECOND / 2, now));
        assert!(!unknown.answers_within(Duration::ZERO, now));
    }

    #[test]
    fn failure_makes_endpoint_more_expensive() {
        let (failing, healthy) = (endpoint(), endpoint());
        for _ in 0..10 {
            drop(healthy.begin(Instant::now()));
            failing.begin(Instant::now()).failed();
        }
        assert!(healthy.is_cheaper(&failing, Instant::now()));
    }
}
