//! What the endpoints of one backend have in common: the settings of outlier detection, the circuit
//! breaker, the preference of a zone, and how changes are counted and logged.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use diy_mesh_runtime::metrics::Active;

use super::breaker::Breaker;
use super::policy::BackendPolicy;
use super::quarantine::{Cause, Siblings};
use super::zone::ZonePreference;
use crate::error::Failure;
use crate::metrics::UpstreamMetrics;

/// The health of one backend.
pub(super) struct Health {
    /// The quarantines of its endpoints.
    pub siblings: Rc<Siblings>,
    /// The preference of the own zone.
    pub zones: ZonePreference,
    breaker: Breaker,
    labels: RefCell<Labels>,
    /// The circuit is counted while it is not closed.
    open: RefCell<Option<Active>>,
    metrics: Arc<UpstreamMetrics>,
}

#[derive(Default)]
struct Labels {
    destination: Rc<str>,
    policy: Arc<BackendPolicy>,
}

impl Default for Health {
    fn default() -> Self {
        Self::new(Arc::default())
    }
}

impl Health {
    pub fn new(metrics: Arc<UpstreamMetrics>) -> Self {
        let now = Instant::now();
        Self {
            siblings: Rc::new(Siblings::new(now)),
            zones: ZonePreference::default(),
            breaker: Breaker::new(now),
            labels: RefCell::default(),
            open: RefCell::default(),
            metrics,
        }
    }

    /// Applies the settings of `policy`.
    pub fn apply(&self, destination: &Rc<str>, policy: &Arc<BackendPolicy>) {
        self.labels.replace(Labels {
            destination: destination.clone(),
            policy: policy.clone(),
        });
        self.siblings.set(policy.outliers);
        self.observe(|breaker| breaker.set(policy.breaker));
    }

    /// Fails while the circuit is open.
    pub fn check_circuit(&self, now: Instant) -> Result<(), Failure> {
        match self.breaker.is_open(now) {
            false => Ok(()),
            true => {
                let labels = self.labels.borrow();
                Err(Failure::CircuitOpen {
                    service: labels.destination.to_string(),
                    policy: labels.policy.name.clone(),
                })
            }
        }
    }

    /// A request begins, which the circuit permits. Returns whether its result decides about an
    /// open circuit.
    pub fn begin(&self, now: Instant) -> bool {
        !self.breaker.is_closed() && self.observe(|breaker| breaker.begin(now))
    }

    /// The request that decides has no result.
    pub fn cancel_probe(&self, now: Instant) {
        self.breaker.cancel_probe(now);
    }

    /// The request that decides is an opaque connection, and was accepted.
    pub fn probe_accepted(&self, now: Instant) {
        self.breaker.probe_accepted(now);
    }

    /// Counts a result for the circuit.
    pub fn record(&self, is_failure: bool, is_probe: bool, now: Instant) {
        if self.breaker.is_set() {
            self.observe(|breaker| breaker.record(is_failure, is_probe, now));
        }
    }

    /// An endpoint is quarantined.
    pub fn ejected(&self, endpoint: SocketAddr, cause: Cause) {
        self.metrics.ejections[cause as usize].inc();
        let Labels {
            destination,
            policy,
        } = &*self.labels.borrow();
        let policy = policy.name.as_str();
        match cause {
            // Another endpoint gets the request.
            Cause::Refused => tracing::debug!(%destination, %endpoint, "endpoint quarantined"),
            _ => {
                let cause = cause.name();
                tracing::info!(%destination, %endpoint, cause, policy, "endpoint quarantined");
            }
        }
    }

    /// Counts and logs the change of the circuit, if there is one.
    fn observe<T>(&self, change: impl FnOnce(&Breaker) -> T) -> T {
        let was_closed = self.breaker.is_closed();
        let result = change(&self.breaker);
        let is_closed = self.breaker.is_closed();
        if was_closed != is_closed {
            let Labels {
                destination,
                policy,
            } = &*self.labels.borrow();
            let policy = policy.name.as_str();
            if is_closed {
                self.open.take();
                tracing::info!(%destination, policy, "circuit closed: requests pass again");
            } else {
                let open = Active::new(&self.metrics.circuits_open);
                self.open.replace(Some(open));
                self.metrics.circuits_opened.inc();
                tracing::warn!(%destination, policy, "circuit opened: too many requests failed");
            }
        }
        result
    }
}
