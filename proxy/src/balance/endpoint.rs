//! One endpoint as a worker sees it: its pool, the requests under way, its latency, and whether it refused a connection
//! lately. It outlives changes of its siblings; requests under way hold on to it when it is gone.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ewma::PeakEwma;
use crate::connect::Remote;
use crate::discovery::EndpointInfo;
use crate::pool::Pool;

/// How long an endpoint is left alone that refused a connection: doubling from the one to the other.
const QUARANTINE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// An endpoint of a destination.
pub struct Endpoint {
    /// Its address.
    pub address: SocketAddr,
    /// The connections to it.
    pub pool: Pool,
    pending: Cell<u32>,
    latency: PeakEwma,
    quarantine: Quarantine,
}

/// A request under way; it counts until it is dropped.
#[must_use = "a request that is not held is not under way"]
pub struct InFlight {
    endpoint: Rc<Endpoint>,
    since: Instant,
    observed: bool,
}

impl Endpoint {
    pub(super) fn new(info: &EndpointInfo) -> Self {
        Self {
            address: info.address,
            pool: Pool::new(Remote {
                address: info.address,
                identity: info.identity.clone(),
            }),
            pending: Cell::new(0),
            latency: PeakEwma::default(),
            quarantine: Quarantine::default(),
        }
    }

    /// A request goes there now.
    pub fn begin(self: &Rc<Self>) -> InFlight {
        self.pending.set(self.pending.get() + 1);
        InFlight {
            endpoint: self.clone(),
            since: Instant::now(),
            observed: false,
        }
    }

    /// The endpoint refused a connection: it is passed over for a while, where there are others.
    pub fn quarantine(&self, now: Instant) {
        self.quarantine.impose(now);
    }

    /// Requests under way.
    pub fn pending(&self) -> u32 {
        self.pending.get()
    }

    /// Whether it is passed over for now.
    pub fn is_quarantined(&self, now: Instant) -> bool {
        self.quarantine.holds(now)
    }

    pub(super) fn is_cheaper(&self, other: &Self, now: Instant) -> bool {
        self.latency
            .is_cheaper(self.pending.get(), &other.latency, other.pending.get(), now)
    }

    /// Discovery says anew that it takes connections.
    pub(super) fn announced(&self) {
        self.quarantine.lift();
    }
}

impl InFlight {
    /// The endpoint.
    pub fn endpoint(&self) -> &Rc<Endpoint> {
        &self.endpoint
    }

    /// When it began.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// There is a new connection for it. What that took is no latency: a connection serves many requests, and one to an endpoint that is
    /// seldom chosen would make it dearer each time.
    pub fn connected(&mut self) {
        self.since = Instant::now();
    }

    /// A connection was opened that is no request: the endpoint is well, and how long the connection lasts is no latency.
    pub fn opened(&mut self) {
        self.observed = true;
        self.endpoint.quarantine.survived(self.since);
    }

    /// The response has begun: what it took until here is the latency, however long its body takes.
    /// Returns the time.
    pub fn answered(&mut self) -> Instant {
        let now = Instant::now();
        if !self.observed {
            self.observed = true;
            self.endpoint
                .latency
                .succeeded(now.saturating_duration_since(self.since), now);
            self.endpoint.quarantine.survived(self.since);
        }
        now
    }

    /// There was no response, or one that says that the endpoint is not well.
    pub fn failed(&mut self) {
        if !self.observed {
            self.observed = true;
            let now = Instant::now();
            self.endpoint
                .latency
                .failed(now.saturating_duration_since(self.since), now);
        }
    }
}

impl Drop for InFlight {
    /// A request that ended with neither word was answered: what it took is its latency.
    fn drop(&mut self) {
        if !self.observed {
            self.answered();
        }
        self.endpoint.pending.set(self.endpoint.pending.get() - 1);
    }
}

/// An endpoint's time-out.
#[derive(Default)]
struct Quarantine(Cell<Option<Imposed>>);

#[derive(Clone, Copy)]
struct Imposed {
    at: Instant,
    length: Duration,
}

impl Quarantine {
    /// Connections that were refused together count as one refusal.
    fn impose(&self, now: Instant) {
        let (least, most) = QUARANTINE;
        let length = match self.0.get() {
            Some(imposed) if imposed.holds(now) => return,
            Some(imposed) => (imposed.length * 2).min(most),
            None => least,
        };
        self.0.set(Some(Imposed { at: now, length }));
    }

    fn holds(&self, now: Instant) -> bool {
        self.0.get().is_some_and(|imposed| imposed.holds(now))
    }

    /// What began at `begun` went well. Only what began since the refusal says that it is over: an answer may still come on an old
    /// connection of an endpoint that takes no new ones.
    fn survived(&self, begun: Instant) {
        if self.0.get().is_some_and(|imposed| imposed.at < begun) {
            self.lift();
        }
    }

    fn lift(&self) {
        self.0.set(None);
    }
}

impl Imposed {
    fn holds(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) < self.length
    }
}

/// One that nothing but its address is known of.
pub(super) fn bare(address: SocketAddr) -> Arc<EndpointInfo> {
    Arc::new(EndpointInfo::bare(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn endpoint() -> Rc<Endpoint> {
        Rc::new(Endpoint::new(&EndpointInfo::bare(
            ([127, 0, 0, 1], 80).into(),
        )))
    }

    #[test]
    fn quarantine_doubles_from_one_second_to_thirty() {
        let (mut now, quarantine) = (Instant::now(), Quarantine::default());
        assert!(!quarantine.holds(now));
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            quarantine.impose(now);
            // More refusals at the same time do not add up.
            (0..32).for_each(|_| quarantine.impose(now));
            now += seconds * SECOND;
            assert!(quarantine.holds(now - SECOND / 100), "{seconds} s");
            assert!(!quarantine.holds(now), "{seconds} s");
        }
        quarantine.lift();
        quarantine.impose(now);
        assert!(!quarantine.holds(now + SECOND));
    }

    #[test]
    fn only_a_request_that_began_after_the_refusal_ends_the_quarantine() {
        let (now, quarantine) = (Instant::now(), Quarantine::default());
        quarantine.impose(now);
        quarantine.survived(now - SECOND);
        assert!(quarantine.holds(now));
        quarantine.survived(now + SECOND / 2);
        assert!(!quarantine.holds(now));
    }

    #[test]
    fn requests_count_until_they_are_dropped() {
        let endpoint = endpoint();
        let (mut one, other) = (endpoint.begin(), endpoint.begin());
        assert_eq!(endpoint.pending(), 2);
        one.answered();
        assert_eq!(endpoint.pending(), 2);
        drop((one, other));
        assert_eq!(endpoint.pending(), 0);
    }

    #[test]
    fn what_a_connection_takes_and_how_long_it_lasts_is_no_latency() {
        let (dialed, pooled, opened) = (endpoint(), endpoint(), endpoint());
        let mut slow = dialed.begin();
        slow.since -= SECOND;
        slow.connected();
        drop(slow);
        pooled.latency.succeeded(SECOND / 2, Instant::now());
        assert!(dialed.is_cheaper(&pooled, Instant::now()));
        let mut connection = opened.begin();
        connection.opened();
        connection.since -= SECOND;
        drop(connection);
        // Nothing is known of it still: requests under way alone decide.
        let under_way = dialed.begin();
        assert!(
            opened.is_cheaper(&dialed, Instant::now())
                && !dialed.is_cheaper(&opened, Instant::now())
        );
        drop(under_way);
        assert!(
            !opened.is_cheaper(&dialed, Instant::now())
                && !dialed.is_cheaper(&opened, Instant::now())
        );
    }

    #[test]
    fn a_failed_request_makes_the_endpoint_dearer_than_one_that_answered() {
        let (failing, healthy) = (endpoint(), endpoint());
        drop(healthy.begin());
        failing.begin().failed();
        assert!(healthy.is_cheaper(&failing, Instant::now()));
    }
}
