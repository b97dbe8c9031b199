//! The state of one subscribed resource, and how a response changes it: snapshots in several
//! messages, deltas, and states of replicas that lag behind. Pure.

use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1::acknowledgement::Part;
use diy_mesh_proto::mesh::v1::discover_response::Update;
use diy_mesh_proto::mesh::v1::{Acknowledgement, DiscoverResponse, Endpoint, Snapshot};
use tokio::sync::watch;
use tokio::time::Instant;

use super::super::policy;
use super::super::position::{Order, Position};
use super::super::resource::Resource;
use super::super::routes;
use super::super::subset::Subset;
use super::super::target::{self, Target};

/// A part of a Service with fewer endpoints is replaced by a new one.
const MIN_PART: usize = 16;

/// A resource on the stream.
pub(super) struct Entry {
    pub(super) sender: watch::Sender<Arc<Target>>,
    /// Version of the target in `sender`; empty if there is none to resume from.
    pub(super) version: String,
    pub(super) order: Order,
    /// The state on the stream, if it is older than the target in `sender`: that of a replica of the
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
    pub(super) unused_since: Option<Instant>,
}

/// A state of a resource, as a response has it.
pub(super) struct Received {
    pub(super) target: Target,
    pub(super) version: String,
    pub(super) position: Position,
    /// Of its routes and its policy, to be sent when they are in force.
    pub(super) acknowledgement: Option<Acknowledgement>,
}

/// What the next response may be.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Phase {
    /// Subscribed, or about to be on the next stream. The next response is not a delta.
    Subscribed,
    /// Deltas apply.
    Current,
    /// A response was invalid. The next sweep requests a snapshot.
    OutOfSync,
}

/// What the snapshot of a Service may take.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    pub(super) endpoints: usize,
    pub(super) seed: u64,
}

impl Entry {
    /// The number of endpoints that it holds, with those that take as much memory as its table.
    pub(super) fn weight(&self) -> usize {
        let refused = self.refused.as_ref();
        self.sender.borrow().weight() + refused.map_or(0, |refused| refused.target.endpoints())
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
                    self.read_snapshot(resource, &version, snapshot, subset, report);
                acknowledgement = acknowledged;
                target
            }
            // The replica may lag behind.
            Some(Update::Unknown(_)) if self.meshed => Ok(Target::Withheld),
            Some(Update::Unknown(_)) => Ok(Target::unknown(resource)),
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
                let next = target::with_delta(&before, delta, bounds.endpoints, &mut report_part);
                match invalid_parts {
                    0 => next,
                    _ => Ok(next.unwrap_or_else(|_| Target::clone(&before))),
                }
            }
            // Sent by a newer controller.
            Some(Update::Roots(_) | Update::Workload(_)) | None => {
                report("unknown kind of response".to_owned());
                return None;
            }
        };
        let is_in_sync = next.is_ok() && invalid_parts == 0;
        let acknowledgement = match next {
            Ok(target) => {
                let state = Received {
                    target,
                    version,
                    position,
                    acknowledgement,
                };
                self.accept(state, bounds.endpoints, now)
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
        subset: Subset,
        report: &mut dyn FnMut(String),
    ) -> (Result<Target, String>, Option<Acknowledgement>) {
        let routes = snapshot.routes.take().map(routes::parse);
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
            self.sender.send_replace(Arc::new(Target::Withheld));
        }
        let before = self.sender.borrow();
        let target = target.map(|target| {
            let target = target.with_routes(routes, &before);
            target.with_policy(policy, &before)
        });
        (target, acknowledgement)
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
        subset.reduce(endpoints, draining, bounds.endpoints);
        (snapshot, subset)
    }

    /// Publishes the state, unless the known one is newer. A difference to a refused state keeps its
    /// acknowledgement.
    fn accept(
        &mut self,
        mut state: Received,
        max_endpoints: usize,
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
        self.publish(state, max_endpoints)
    }

    /// Sends the target to its receivers. Returns the acknowledgement.
    pub(super) fn publish(
        &mut self,
        state: Received,
        max_endpoints: usize,
    ) -> Option<Acknowledgement> {
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
        let is_short = target.part().is_some_and(|kept| kept < MIN_PART);
        let target = target.with_table(&before, max_endpoints);
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
