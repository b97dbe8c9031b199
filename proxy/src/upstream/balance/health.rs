//! The state that the endpoints of one backend have in common: the settings of outlier detection,
//! the circuit breaker, the preference of a zone, and how changes are counted and logged.

use crate::labels::Cause;
use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use diy_mesh_runtime::metrics::Active;

use super::outlier::Detector;
use super::policy::BackendPolicy;
use super::zone::ZonePreference;
use crate::error::{Failure, policy_or_defaults};
use crate::observe::metrics::UpstreamMetrics;

/// The health of one backend.
pub(super) struct Health {
    /// The judgement of its endpoints, and the circuit breaker.
    pub detector: Rc<Detector>,
    /// The preference of the own zone.
    pub zones: ZonePreference,
    labels: RefCell<Labels>,
    /// The circuit is counted while it is not closed.
    open: RefCell<Option<Active>>,
    metrics: Arc<UpstreamMetrics>,
}

#[derive(Default)]
struct Labels {
    destination: Arc<str>,
    policy: Arc<BackendPolicy>,
}

impl Default for Health {
    fn default() -> Self {
        Self::new(Arc::default())
    }
}

impl Health {
    pub fn new(metrics: Arc<UpstreamMetrics>) -> Self {
        Self {
            detector: Rc::new(Detector::new(Instant::now())),
            zones: ZonePreference::default(),
            labels: RefCell::default(),
            open: RefCell::default(),
            metrics,
        }
    }

    /// Applies the settings of `policy`.
    pub fn apply(&self, destination: &Arc<str>, policy: &Arc<BackendPolicy>) {
        self.labels.replace(Labels {
            destination: destination.clone(),
            policy: policy.clone(),
        });
        self.detector.set(policy.outliers, policy.breaker);
        self.observe();
    }

    /// Fails while the circuit is open.
    pub fn check_circuit(&self, now: Instant) -> Result<(), Failure> {
        if self.detector.is_open(now) {
            let labels = self.labels.borrow();
            Err(Failure::CircuitOpen {
                service: labels.destination.to_string(),
                policy: labels.policy.name.clone(),
            })
        } else {
            Ok(())
        }
    }

    /// An endpoint is quarantined.
    pub fn ejected(&self, endpoint: SocketAddr, cause: Cause) {
        self.metrics.ejections[cause as usize].inc();
        let Labels {
            destination,
            policy,
        } = &*self.labels.borrow();
        let policy = policy_or_defaults(&policy.name);
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
    pub fn observe(&self) {
        let (was_closed, is_closed) = (self.open.borrow().is_none(), self.detector.is_closed());
        if was_closed == is_closed {
            return;
        }
        let Labels {
            destination,
            policy,
        } = &*self.labels.borrow();
        let policy = policy_or_defaults(&policy.name);
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
}
