//! The state of one subscribed resource, and how a response changes it: snapshots in several
//! messages, deltas, and states of replicas that lag behind. Pure.

use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1::acknowledgement::Part;
use diy_mesh_proto::mesh::v1::discover_response::Update;
use diy_mesh_proto::mesh::v1::{Acknowledgement, DiscoverResponse, Endpoint, Snapshot};
use tokio::sync::watch;
use tokio::time::Instant;

use super::super::position::{Order, Position};
use super::super::resource::Resource;
use super::super::subset::Subset;
use super::super::target::{self, Target, TargetKind};
use super::super::{policy, routes};
use super::shares::{Charge, Shares, Weight};
use crate::route::Routes;

/// A part of a Service with fewer endpoints is replaced by a new one, if there may be twice as many.
const MIN_PART: usize = 16;

/// Endpoints that each resource may have.
const MIN_ENDPOINTS: usize = 4;
/// The least that a resource weighs: these endpoints, and the memory of eight for the rest.
pub(super) const MIN_WEIGHT: usize = MIN_ENDPOINTS + 8;

/// A resource on the stream.
pub(super) struct Entry {
    pub(super) sender: watch::Sender<Arc<Target>>,
    /// Version of the target in `sender`; empty if there is none to resume from.
    pub(super) version: String,
    pub(super) order: Order,
    /// The state on the stream, if it is older than the target in `sender`: it is from a replica of the
    /// controller that lags behind.
    pub(super) refused: Option<Received>,
    pub(super) phase: Phase,
    /// The part of a snapshot in several messages that has arrived.
    pub(super) partial: Option<(Snapshot, Subset)>,
    /// Whether the target is from the controller.
    pub(super) settled: bool,
    /// Whether the latest target with endpoints was meshed.
    pub(super) meshed: bool,
    /// The routes or the policy of the latest snapshot are invalid: earlier ones stay in force.
    pub(super) is_rejected: bool,
    /// Not 0: its routes are rejected until they may weigh as much.
    pub(super) lacks: usize,
    /// The weight of the resource, charged to its namespace.
    pub(super) charge: Charge,
    pub(super) unused_since: Option<Instant>,
}

/// A state of a resource, as a response has it.
pub(super) struct Received {
    pub(super) target: Target,
    pub(super) version: String,
    pub(super) position: Position,
    /// The acknowledgement of its routes and its policy, to be sent when they are in force.
    pub(super) acknowledgement: Option<Acknowledgement>,
}

/// The expectation for the next response.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Phase {
    /// Subscribed, or about to be on the next stream. The next response is not a delta.
    Subscribed,
    /// Deltas apply.
    Current,
    /// A response was invalid. The next sweep requests a snapshot.
    OutOfSync,
}

/// The bounds of a state.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    /// The endpoints that the resource may have, with those that weigh as much as its table and its
    /// routes. 0: it is refused.
    max_weight: usize,
    seed: u64,
}

impl Bounds {
    /// The endpoints that the resource may have beside routes of this weight.
    fn endpoints(self, routes: usize) -> usize {
        self.max_weight.saturating_sub(routes).max(MIN_ENDPOINTS)
    }
}

impl Entry {
    /// The weight of the resource, with the state of a replica that lags behind.
    pub(super) fn weight(&self) -> Weight {
        let refused = self.refused.as_ref();
        let refused = refused.map_or(0, |refused| refused.target.weight());
        let weight = self.sender.borrow().weight() + refused;
        Weight {
            least: MIN_WEIGHT,
            more: weight.saturating_sub(MIN_ENDPOINTS),
        }
    }

    /// The namespace of its Service or pod, once an update applies. Empty: none.
    pub(super) fn namespace(&self, resource: &Resource, update: Option<&Update>) -> String {
        let of_update = match (update, &self.partial) {
            (Some(Update::Snapshot(_)), Some((snapshot, _)))
            | (Some(Update::Snapshot(snapshot)), None) => Some(&*snapshot.namespace),
            _ => None,
        };
        let known = || self.charge.namespace();
        match resource.service() {
            Some((namespace, _)) => namespace.to_owned(),
            None => of_update.unwrap_or_else(known).to_owned(),
        }
    }

    /// The bounds of a state of this namespace. In its present namespace, the resource is charged for
    /// the least already.
    pub(super) fn bounds(&self, shares: &Shares, namespace: &str, seed: u64) -> Bounds {
        let is_known = namespace == self.charge.namespace();
        let limit = shares.limit(namespace, &self.charge);
        let is_refused = !is_known && limit.least < MIN_WEIGHT;
        Bounds {
            max_weight: if is_refused {
                0
            } else {
                limit.more + MIN_ENDPOINTS
            },
            seed,
        }
    }

    /// Charges what it weighs now.
    pub(super) fn settle(&mut self, resource: &Resource, shares: &mut Shares) {
        let weight = self.weight();
        let target = self.sender.borrow().clone();
        let of_resource = resource.service().map(|(namespace, _)| namespace);
        let namespace = of_resource.unwrap_or(&target.namespace);
        shares.set(&mut self.charge, namespace, weight);
    }

    /// Whether there is memory now for the routes that were rejected.
    pub(super) fn may_retry(&self, shares: &Shares) -> bool {
        let limit = || shares.limit(self.charge.namespace(), &self.charge);
        self.lacks > 0 && limit().more + MIN_ENDPOINTS >= self.lacks
    }

    /// Whether there was no memory for it.
    pub(super) fn is_refused(&self) -> bool {
        self.sender.borrow().kind == TargetKind::Refused
    }

    /// Applies a response. Returns the acknowledgement of the routes and the policy that it has put in
    /// force, or has rejected.
    pub(super) fn apply(
        &mut self,
        resource: &Resource,
        response: DiscoverResponse,
        bounds: Bounds,
        now: Instant,
        report: &mut dyn FnMut(String),
    ) -> Option<Acknowledgement> {
        let (version, position) = (response.version, Position::from(response.position));
        let mut acknowledgement = None;
        let mut invalid_parts = 0;
        let next = match response.update {
            Some(Update::Snapshot(snapshot)) => {
                let (snapshot, subset) = self.append(snapshot, bounds);
                if response.more {
                    self.partial = Some((snapshot, subset));
                    return None;
                }
                let (target, acknowledged) =
                    self.read_snapshot(resource, &version, snapshot, (subset, bounds), report);
                acknowledgement = acknowledged;
                target
            }
            // The replica may lag behind.
            Some(Update::Unknown(_)) if self.meshed => Ok(TargetKind::Withheld.into()),
            Some(Update::Unknown(known)) => Ok(Target::unknown(resource, known.node)),
            Some(Update::Unchanged(_)) if self.settled && !self.version.is_empty() => {
                self.phase = Phase::Current;
                self.refused = None;
                self.order.confirm(position);
                return None;
            }
            Some(Update::Unchanged(_)) => Err("unchanged, but no version is known".to_owned()),
            Some(Update::Delta(_)) if self.phase == Phase::OutOfSync => return None,
            Some(Update::Delta(_)) if self.phase == Phase::Subscribed => {
                Err("delta before a snapshot".to_owned())
            }
            Some(Update::Delta(delta)) => {
                let before = match &self.refused {
                    Some(refused) => Arc::new(refused.target.clone()),
                    None => self.sender.borrow().clone(),
                };
                let mut report_part = |error: String| {
                    invalid_parts += 1;
                    report(error);
                };
                let max_endpoints = bounds.endpoints(before.weight_of_routes());
                let next = target::with_delta(&before, delta, max_endpoints, &mut report_part);
                match invalid_parts {
                    0 => next,
                    _ => Ok(next.unwrap_or_else(|_| Target::clone(&before))),
                }
            }
            // Sent by a newer controller.
            Some(Update::Roots(_) | Update::Workload(_) | Update::ReportTraffic(_)) | None => {
                report("unknown kind of response".to_owned());
                return None;
            }
        };
        let is_in_sync = next.is_ok() && invalid_parts == 0;
        let acknowledgement = match next {
            Ok(target) => {
                let fits = bounds.max_weight > 0 || target.kind == TargetKind::Unknown;
                let state = Received {
                    target: if fits {
                        target
                    } else {
                        TargetKind::Refused.into()
                    },
                    version,
                    position,
                    acknowledgement,
                };
                self.accept(state, bounds, now)
            }
            Err(error) => {
                report(error);
                acknowledgement.filter(|one| !one.rejection.is_empty())
            }
        };
        if !is_in_sync {
            self.mark_out_of_sync();
        }
        acknowledgement
    }

    /// The target of a complete snapshot, and the acknowledgement of its routes and its policy, if it
    /// has any.
    fn read_snapshot(
        &mut self,
        resource: &Resource,
        version: &str,
        mut snapshot: Snapshot,
        (subset, bounds): (Subset, Bounds),
        report: &mut dyn FnMut(String),
    ) -> (Result<Target, String>, Option<Acknowledgement>) {
        self.lacks = 0;
        let routes = snapshot.routes.take().map(|routes| {
            let routes = routes::parse(routes)?;
            self.check_size(routes, bounds)
        });
        let policy = snapshot.policy.take().map(policy::parse);
        let is_meshed = |endpoint: &Endpoint| !endpoint.identity.is_empty();
        let mut endpoints = snapshot.endpoints.iter().chain(&snapshot.draining);
        let names_identity = endpoints.any(is_meshed);
        let target = target::from_snapshot(resource, snapshot, subset, report);
        let reasons = [error_of(&routes), error_of(&policy)];
        let part = match reasons {
            [Some(_), None] => Part::Routes,
            [None, Some(_)] => Part::Policy,
            _ => Part::Unspecified,
        };
        let reasons: Vec<&str> = reasons.into_iter().flatten().collect();
        self.is_rejected = !reasons.is_empty();
        let rejection = reasons.join("; ");
        if self.is_rejected {
            report(format!("rejected: {rejection}"));
        }
        let has_any = routes.is_some() || policy.is_some();
        let acknowledgement = has_any.then(|| Acknowledgement {
            r#type: resource.kind().into(),
            name: resource.to_string(),
            version: version.to_owned(),
            rejection,
            part: part.into(),
        });
        if target.is_err() && names_identity && !self.settled {
            // The endpoint is meshed, and its identity is invalid.
            self.meshed = true;
            self.sender
                .send_replace(Arc::new(TargetKind::Withheld.into()));
        }
        let before = self.sender.borrow();
        let target = target.map(|mut target| {
            target.set_routes(routes, &before);
            target.set_policy(policy, &before);
            target.reduce(bounds.endpoints(target.weight_of_routes()));
            target
        });
        (target, acknowledgement)
    }

    /// Rejects routes that take more than the resource may. Those that take no more than the earlier
    /// ones never do.
    fn check_size(&mut self, routes: Routes, bounds: Bounds) -> Result<Routes, String> {
        let weight = target::weight_of(&routes);
        let left = bounds.max_weight.saturating_sub(MIN_ENDPOINTS);
        if weight <= left.max(self.sender.borrow().weight_of_routes()) {
            return Ok(routes);
        }
        self.lacks = weight + MIN_ENDPOINTS;
        Err(format!(
            "the routes take {} KiB, and the memory limit of the proxy leaves {} KiB for them",
            routes.size().div_ceil(1024),
            left * target::BYTES_OF_ENDPOINT / 1024
        ))
    }

    /// Joins the messages of a snapshot, and keeps what is within the bounds.
    fn append(&mut self, mut next: Snapshot, bounds: Bounds) -> (Snapshot, Subset) {
        let (mut snapshot, mut subset) = match self.partial.take() {
            Some((mut snapshot, subset)) => {
                subset.retain(&mut next.endpoints);
                subset.retain(&mut next.draining);
                snapshot.endpoints.append(&mut next.endpoints);
                snapshot.draining.append(&mut next.draining);
                (snapshot, subset)
            }
            None => {
                // All proxies hash to the same endpoints.
                let is_hashed = policy::hashes(next.policy.as_ref());
                let subset = Subset::new(if is_hashed { 0 } else { bounds.seed });
                (next, subset)
            }
        };
        let Snapshot {
            endpoints,
            draining,
            ..
        } = &mut snapshot;
        subset.reduce(endpoints, draining, bounds.endpoints(0));
        (snapshot, subset)
    }

    /// Publishes the state, unless the known one is newer. A difference to a refused state keeps its
    /// acknowledgement.
    fn accept(
        &mut self,
        mut state: Received,
        bounds: Bounds,
        now: Instant,
    ) -> Option<Acknowledgement> {
        let refused = self.refused.take();
        let refused = refused.and_then(|refused| refused.acknowledgement);
        state.acknowledgement = state.acknowledgement.or(refused);
        if self.settled && !self.order.accepts(&state.position, now) {
            self.phase = Phase::Current;
            self.refused = Some(state);
            return None;
        }
        self.publish(state, bounds)
    }

    /// Sends the target to its receivers. Returns the acknowledgement.
    pub(super) fn publish(&mut self, state: Received, bounds: Bounds) -> Option<Acknowledgement> {
        let Received {
            mut target,
            version,
            position,
            acknowledgement,
        } = state;
        let before = self.sender.borrow().clone();
        target.inherit_affinity(&before);
        if !target.is_without_endpoint() {
            self.meshed = target.is_meshed();
        }
        let max_endpoints = bounds.endpoints(target.weight_of_routes());
        let is_short = |kept: usize| kept < MIN_PART && kept <= max_endpoints / 2;
        let is_short = target.part().is_some_and(is_short);
        let target = target.with_table(&before, bounds.endpoints(0));
        self.sender.send_replace(Arc::new(target));
        // The next stream reports a rejection again.
        self.version = if self.is_rejected {
            String::new()
        } else {
            version
        };
        self.order.apply(position);
        self.refused = None;
        self.phase = Phase::Current;
        if is_short {
            self.mark_out_of_sync();
        }
        self.settled = true;
        acknowledgement
    }

    /// Keeps the target until a snapshot arrives, for which no receiver waits.
    pub(super) fn mark_out_of_sync(&mut self) {
        self.phase = Phase::OutOfSync;
        self.partial = None;
        self.refused = None;
        self.version = String::new();
        if !self.settled {
            self.sender.send_modify(|_| {});
        }
    }

    pub(super) fn is_idle(&self, now: Instant, idle: Duration) -> bool {
        self.unused_since
            .is_some_and(|since| now.saturating_duration_since(since) >= idle)
    }
}

/// Why routes or a policy are invalid, if there are any.
fn error_of<T>(parsed: &Option<Result<T, String>>) -> Option<&str> {
    parsed.as_ref()?.as_ref().err().map(String::as_str)
}
