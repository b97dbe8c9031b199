//! Preference of the client's own zone: how many requests go to endpoints of other zones. Pure: the
//! caller passes the time and the RNG.
//!
//! A few requests always leave the zone, so that the latency of both sides is known. While the own
//! zone is slower than the others by more than chance explains, or lacks healthy endpoints, this
//! share grows in small steps, and falls again afterwards. Requests in flight do not count: this
//! proxy's requests stay in the zone by intention, and the requests of other proxies are unknown.
//! The latency contains the queues at the endpoints, whoever fills them. So the endpoints of a
//! small zone with many clients become at most slower, by [`MAX_RATIO`] on average; static shares
//! by the number of endpoints (Kubernetes' Topology Aware Routing, Envoy's zone aware routing) need
//! equal clients or knowledge of them.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use super::latency::Latency;

/// The share of the requests that leave the zone at least, and at most.
const MIN_SHARE: f64 = 0.03;
const MAX_SHARE: f64 = 0.9;
/// How often the share changes, and by how much.
const STEP_INTERVAL: Duration = Duration::from_millis(100);
const STEP_UP: f64 = 0.05;
const STEP_DOWN: f64 = 0.03;
/// The latency of the own zone from which requests leave it, as a multiple of the others' latency.
const MAX_RATIO: f64 = 1.5;
/// The decay time of the own zone's latency: it has many samples.
const OWN_DECAY_SECONDS: f64 = 1.0;
/// The load of a zone whose endpoints are not all healthy, as a multiple of its share of healthy ones:
/// Envoy's overprovisioning factor.
const OVERPROVISIONING: f64 = 1.4;

/// The preference of one backend.
#[derive(Debug)]
pub(super) struct ZonePreference {
    /// The own zone, or `None` without a preferred zone.
    own_zone: RefCell<Option<Box<str>>>,
    /// The share of the requests that leave the zone.
    share: Cell<f64>,
    /// The share of the requests that the zone has endpoints for.
    capacity: Cell<f64>,
    stepped_at: Cell<Option<Instant>>,
    own: Latency,
    others: Latency,
}

impl Default for ZonePreference {
    fn default() -> Self {
        Self {
            own_zone: RefCell::default(),
            share: Cell::new(MIN_SHARE),
            capacity: Cell::new(1.0),
            stepped_at: Cell::new(None),
            own: Latency::with_decay(OWN_DECAY_SECONDS),
            others: Latency::default(),
        }
    }
}

impl ZonePreference {
    /// Sets the zone of this proxy. Empty: no zone is preferred.
    pub fn set_zone(&self, zone: &str) {
        let zone = Some(zone).filter(|zone| !zone.is_empty());
        if self.own_zone.borrow().as_deref() != zone {
            *self.own_zone.borrow_mut() = zone.map(Box::from);
        }
    }

    /// Whether a zone is preferred.
    pub fn is_active(&self) -> bool {
        self.own_zone.borrow().is_some()
    }

    /// Whether an endpoint of this zone is in the zone of this proxy.
    pub fn is_own(&self, zone: &str) -> bool {
        self.own_zone.borrow().as_deref() == Some(zone)
    }

    /// Records the latency of a response from an endpoint of this zone.
    pub fn record(&self, zone: &str, latency: Duration, now: Instant) {
        if !self.is_active() {
            return;
        }
        let side = if self.is_own(zone) {
            &self.own
        } else {
            &self.others
        };
        side.record_success(latency, now);
    }

    /// Whether the next request stays in the zone. `healthy` is the share of its endpoints that are.
    pub fn stays(&self, now: Instant, rng: &mut fastrand::Rng, healthy: impl Fn() -> f64) -> bool {
        let stepped_at = self.stepped_at.get().unwrap_or(now - STEP_INTERVAL);
        let elapsed = now.saturating_duration_since(stepped_at);
        if elapsed >= STEP_INTERVAL {
            self.stepped_at.set(Some(now));
            self.capacity.set((healthy() * OVERPROVISIONING).min(1.0));
            let share = if self.own.exceeds(&self.others, MAX_RATIO, now) {
                self.share.get() + STEP_UP
            } else {
                self.share.get() - STEP_DOWN * elapsed.div_duration_f64(STEP_INTERVAL)
            };
            self.share.set(share.clamp(MIN_SHARE, MAX_SHARE));
        }
        rng.f64() < (1.0 - self.share.get()) * self.capacity.get()
    }
}
