//! Table of subscribed resources (destinations and backends): target, version and receivers of each.
//! Pure: takes responses and instants, sends targets to receivers and returns requests for the
//! controller.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1::discover_request::Action;
use diy_mesh_proto::mesh::v1::discover_response::Update;
use diy_mesh_proto::mesh::v1::{
    Acknowledgement, DiscoverRequest, DiscoverResponse, Endpoint, Snapshot, Subscribe, Unsubscribe,
};
use tokio::sync::watch;
use tokio::time::Instant;

use super::policy;
use super::position::Position;
use super::resource::Resource;
use super::routes;
use super::subset::Subset;
use super::target::{self, Target};

/// Maximum number of expired meshed destinations that are remembered, about 2 MB.
const MAX_REMEMBERED: usize = 50_000;

/// Time for which states that are older than the known one are refused.
pub(super) const MAX_REFUSAL: Duration = Duration::from_secs(30);
/// Endpoints that each Service may have, whatever the others have.
const MIN_ENDPOINTS: usize = 64;
/// A part of a Service with fewer endpoints is replaced by a new one.
const MIN_PART: usize = 16;

/// All subscribed resources, and which expired destinations were meshed.
pub(super) struct Table {
    entries: HashMap<Resource, Entry>,
    were_meshed: WereMeshed,
    limit: usize,
    /// Endpoints of all destinations.
    max_endpoints: usize,
    /// Each proxy keeps other endpoints of a large Service.
    seed: u64,
}

/// Addresses of expired destinations whose latest target was meshed. Addresses are never evicted:
/// beyond the limit, every destination counts as formerly meshed. The pod's application can exceed
/// the limit with a port scan of a meshed pod; its unknown destinations are then unreachable while
/// the controller is unavailable.
struct WereMeshed {
    addresses: HashSet<SocketAddr>,
    limit: usize,
    is_incomplete: bool,
}

/// A receiver of targets.
#[derive(Debug)]
pub(super) struct Watched {
    pub receiver: watch::Receiver<Arc<Target>>,
    /// Whether the target is from the controller. If not, the first notification ends the wait for
    /// a response.
    pub settled: bool,
}

/// The table is full.
#[derive(Debug)]
pub(super) struct Full;

struct Entry {
    sender: watch::Sender<Arc<Target>>,
    /// Version of the target in `sender`; empty if there is none to resume from.
    version: String,
    position: Position,
    /// The state on the stream, if it is older than the target in `sender`.
    refused: Option<Refused>,
    phase: Phase,
    /// The part of a snapshot in several messages that has arrived.
    partial: Option<(Snapshot, Subset)>,
    /// Whether the target is from the controller.
    settled: bool,
    /// Whether the latest target with endpoints was meshed.
    meshed: bool,
    /// The routes or the policy of the latest snapshot are invalid: earlier ones stay in force.
    is_rejected: bool,
    unused_since: Option<Instant>,
}

/// An older state of a replica of the controller that lags behind.
struct Refused {
    target: Target,
    version: String,
    position: Position,
    since: Instant,
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    /// Subscribed, or about to be on the next stream. The next response is not a delta.
    Subscribed,
    /// Deltas apply.
    Current,
    /// A response was invalid. The next sweep requests a snapshot.
    OutOfSync,
}

impl Table {
    pub fn new(limit: usize, max_endpoints: usize) -> Self {
        let were_meshed = WereMeshed {
            addresses: HashSet::new(),
            limit: MAX_REMEMBERED,
            is_incomplete: false,
        };
        Self {
            entries: HashMap::new(),
            were_meshed,
            limit,
            max_endpoints,
            seed: fastrand::u64(..),
        }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// A receiver for `resource`, and the requests to send if it is new.
    pub fn watch(
        &mut self,
        resource: impl Into<Resource>,
    ) -> Result<(Watched, Vec<DiscoverRequest>), Full> {
        let resource = resource.into().canonical();
        if let Some(entry) = self.entries.get_mut(&resource) {
            entry.unused_since = None;
            return Ok((
                Watched {
                    receiver: entry.sender.subscribe(),
                    settled: entry.settled,
                },
                Vec::new(),
            ));
        }
        let mut requests = if self.entries.len() < self.limit {
            Vec::new()
        } else {
            self.make_room()
        };
        if self.entries.len() >= self.limit {
            return Err(Full);
        }
        // A formerly meshed destination gets no plaintext until the controller sends another
        // target. A backend has no address of its own.
        let (meshed, withheld) = match &resource {
            Resource::Destination(address) => {
                let meshed = self.were_meshed.addresses.remove(address);
                (meshed, meshed || self.were_meshed.is_incomplete)
            }
            Resource::Backend(_) => (false, true),
        };
        let (sender, receiver) = watch::channel(Arc::new(if withheld {
            Target::Withheld
        } else {
            Target::Unknown
        }));
        let entry = Entry {
            sender,
            version: String::new(),
            position: Position::default(),
            refused: None,
            phase: Phase::Subscribed,
            partial: None,
            settled: false,
            meshed,
            is_rejected: false,
            unused_since: None,
        };
        requests.push(subscribe(&resource, &entry));
        self.entries.insert(resource, entry);
        Ok((
            Watched {
                receiver,
                settled: false,
            },
            requests,
        ))
    }

    /// Removes plaintext destinations without receivers. Meshed ones stay until the next sweep,
    /// which requires a stream: without one, they cannot be resubscribed and would become
    /// unreachable.
    fn make_room(&mut self) -> Vec<DiscoverRequest> {
        let unneeded = |entry: &Entry| entry.sender.receiver_count() == 0 && !entry.meshed;
        self.entries
            .extract_if(|_, entry| unneeded(entry))
            .map(|(resource, _)| unsubscribe(&resource))
            .collect()
    }

    /// Applies a response. Reports each invalid part and applies the others. Ignores responses
    /// about expired resources, which cross the unsubscription on the wire.
    pub fn apply(
        &mut self,
        response: DiscoverResponse,
        now: Instant,
        report: &mut dyn FnMut(String),
    ) -> Applied {
        let resource = match Resource::parse(response.r#type, &response.name) {
            Ok(resource) => resource,
            Err(error) => {
                report(error);
                return Applied::default();
            }
        };
        let bounds = Bounds {
            endpoints: self.max_endpoints_of(&resource, &response),
            seed: self.seed,
        };
        let Some(entry) = self.entries.get_mut(&resource) else {
            return Applied::default();
        };
        let is_snapshot = matches!(response.update, Some(Update::Snapshot(_)));
        let acknowledgement = entry.apply(&resource, response, bounds, now, &mut |error| {
            report(format!("{resource}: {error}"))
        });
        let kept = is_snapshot && entry.partial.is_none();
        let kept = kept.then(|| entry.sender.borrow().part()).flatten();
        Applied {
            is_older: entry.refused.is_some(),
            acknowledgement,
            kept: kept.map(|kept| (resource, kept)),
        }
    }

    /// The endpoints that a Service may have after this response: half of what the others leave.
    fn max_endpoints_of(&self, resource: &Resource, response: &DiscoverResponse) -> usize {
        let size = |one: &Snapshot| one.endpoints.len() + one.draining.len();
        let entry = self.entries.get(resource);
        let partial = entry.and_then(|entry| entry.partial.as_ref());
        let next = match &response.update {
            Some(Update::Snapshot(next)) => {
                size(next) + partial.map_or(0, |(partial, _)| size(partial))
            }
            Some(Update::Delta(delta)) => {
                let before = entry.map_or(0, |entry| entry.sender.borrow().endpoints());
                before + delta.upserted.len() + delta.draining.len()
            }
            _ => 0,
        };
        if next <= MIN_ENDPOINTS {
            return MIN_ENDPOINTS;
        }
        let others = self.entries.iter().filter(|(other, _)| *other != resource);
        let others = others.map(|(_, entry)| entry.sender.borrow().endpoints());
        let free = self.max_endpoints.saturating_sub(others.sum());
        (free / 2).max(MIN_ENDPOINTS)
    }

    /// Ends the wait for first responses, because the controller is unavailable.
    pub fn stop_waiting(&self) {
        for entry in self.entries.values().filter(|entry| !entry.settled) {
            entry.sender.send_modify(|_| {});
        }
    }

    /// Requests to send on a new stream: a subscription for each destination, with the known
    /// version. Removes idle destinations.
    pub fn resume(&mut self, now: Instant, idle: Duration) -> Vec<DiscoverRequest> {
        self.mark_unused(now);
        self.remove_idle(now, idle);
        let resubscribe = |(resource, entry): (&Resource, &mut Entry)| {
            entry.phase = Phase::Subscribed;
            entry.partial = None;
            entry.refused = None;
            subscribe(resource, entry)
        };
        self.entries.iter_mut().map(resubscribe).collect()
    }

    /// Removes destinations without receivers after `idle`, or at once if the table is full, and
    /// resubscribes to those out of sync. Requires an open stream: without one, known targets
    /// cannot be requested again.
    pub fn sweep(&mut self, now: Instant, idle: Duration) -> Vec<DiscoverRequest> {
        self.mark_unused(now);
        let idle = if self.entries.len() < self.limit {
            idle
        } else {
            Duration::ZERO
        };
        let mut requests: Vec<_> = self
            .remove_idle(now, idle)
            .iter()
            .map(unsubscribe)
            .collect();
        for (resource, entry) in self
            .entries
            .iter_mut()
            .filter(|(_, entry)| entry.phase == Phase::OutOfSync)
        {
            entry.phase = Phase::Subscribed;
            requests.extend([unsubscribe(resource), subscribe(resource, entry)]);
        }
        if self.entries.len() < self.entries.capacity() / 4 {
            self.entries.shrink_to_fit();
        }
        requests
    }

    /// Removes destinations without receivers after `idle`, and remembers which of them were
    /// meshed.
    fn remove_idle(&mut self, now: Instant, idle: Duration) -> Vec<Resource> {
        let idle_entries = self.entries.extract_if(|_, entry| entry.is_idle(now, idle));
        let remember = |(resource, entry): (Resource, Entry)| {
            match resource {
                Resource::Destination(address) if entry.meshed => self.were_meshed.insert(address),
                _ => {}
            }
            resource
        };
        idle_entries.map(remember).collect()
    }

    /// Publishes the states that were refused for [`MAX_REFUSAL`]: no replica sends newer ones.
    /// Returns their names.
    pub fn accept_refused(&mut self, now: Instant) -> Vec<Resource> {
        let is_due = |refused: &mut Refused| now.duration_since(refused.since) >= MAX_REFUSAL;
        let due = self.entries.iter_mut().filter_map(|(resource, entry)| {
            let refused = entry.refused.take_if(is_due)?;
            entry.publish(refused.target, refused.version, refused.position);
            Some(resource.clone())
        });
        due.collect()
    }

    fn mark_unused(&mut self, now: Instant) {
        for entry in self.entries.values_mut() {
            entry.unused_since = if entry.sender.receiver_count() > 0 {
                None
            } else {
                entry.unused_since.or(Some(now))
            };
        }
    }
}

/// The effect of a response.
#[derive(Debug, Default)]
pub(super) struct Applied {
    /// The state on the stream is older than the known one, which stays.
    pub is_older: bool,
    /// Of the routes and the policy.
    pub acknowledgement: Option<Acknowledgement>,
    /// A Service of which only so many endpoints are kept.
    pub kept: Option<(Resource, usize)>,
}

/// What the snapshot of a Service may take.
#[derive(Clone, Copy)]
struct Bounds {
    endpoints: usize,
    seed: u64,
}

impl WereMeshed {
    fn insert(&mut self, address: SocketAddr) {
        if self.addresses.len() < self.limit {
            self.addresses.insert(address);
        } else {
            self.is_incomplete = true;
        }
    }
}

impl Entry {
    fn apply(
        &mut self,
        resource: &Resource,
        response: DiscoverResponse,
        bounds: Bounds,
        now: Instant,
        report: &mut dyn FnMut(String),
    ) -> Option<Acknowledgement> {
        let DiscoverResponse {
            version,
            update,
            more,
            position,
            ..
        } = response;
        let position = Position::from(position);
        let mut errors = 0;
        let mut report_part = |error: String| {
            errors += 1;
            report(error);
        };
        let mut names_identity = false;
        let mut acknowledgement = None;
        let next = match update {
            Some(Update::Snapshot(snapshot)) => {
                let (mut snapshot, subset) = self.append(snapshot, bounds);
                if more {
                    self.partial = Some((snapshot, subset));
                    return None;
                }
                let routes = snapshot.routes.take().map(routes::parse);
                let policy = snapshot.policy.take().map(policy::parse);
                let results = [
                    routes.as_ref().map(|routes| routes.as_ref().err()),
                    policy.as_ref().map(|policy| policy.as_ref().err()),
                ];
                acknowledgement = acknowledge(resource, &version, results);
                self.is_rejected = results.into_iter().flatten().any(|one| one.is_some());
                let is_meshed = |endpoint: &Endpoint| !endpoint.identity.is_empty();
                let mut endpoints = snapshot.endpoints.iter().chain(&snapshot.draining);
                names_identity = endpoints.any(is_meshed);
                let target = target::from_snapshot(resource, snapshot, subset, &mut report_part);
                target.map(|target| {
                    let before = self.sender.borrow();
                    let target = target.with_routes(routes, &before);
                    target.with_policy(policy, &before)
                })
            }
            // The replica may lag behind.
            Some(Update::Unknown(_)) if self.meshed => Ok(Target::Withheld),
            Some(Update::Unknown(_)) => Ok(Target::unknown(resource)),
            Some(Update::Unchanged(_)) if self.settled && !self.version.is_empty() => {
                self.phase = Phase::Current;
                self.refused = None;
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
                let next = target::with_delta(&before, delta, &mut report_part);
                if errors > 0 {
                    let next = next.unwrap_or_else(|_| Target::clone(&before));
                    self.accept(next, version, position, now);
                    self.mark_out_of_sync();
                    return None;
                }
                next
            }
            // Sent by a newer controller.
            Some(Update::Roots(_) | Update::Workload(_)) | None => {
                report("unknown kind of response".to_owned());
                return None;
            }
        };
        if let Some(Acknowledgement { rejection, .. }) = &acknowledgement
            && !rejection.is_empty()
        {
            report(format!("rejected: {rejection}"));
        }
        match next {
            Ok(target) => {
                let is_large = target.endpoints() > bounds.endpoints.saturating_mul(2);
                self.accept(target, version, position, now);
                if is_large {
                    // Its deltas have added too many. The next snapshot is reduced.
                    self.mark_out_of_sync();
                }
            }
            Err(error) => {
                report(error);
                // The endpoint is meshed, and its identity is invalid.
                if names_identity && !self.settled {
                    self.meshed = true;
                    self.sender.send_replace(Arc::new(Target::Withheld));
                }
                self.mark_out_of_sync();
            }
        }
        acknowledgement
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
        subset.reduce(&mut snapshot.endpoints, bounds.endpoints);
        subset.reduce(&mut snapshot.draining, bounds.endpoints);
        subset.retain(&mut snapshot.endpoints);
        (snapshot, subset)
    }

    /// Publishes the state, unless the known one is newer.
    fn accept(&mut self, target: Target, version: String, position: Position, now: Instant) {
        if self.settled && position.is_older_than(&self.position) {
            let since = self.refused.take().map_or(now, |refused| refused.since);
            self.phase = Phase::Current;
            self.refused = Some(Refused {
                target,
                version,
                position,
                since,
            });
        } else {
            self.publish(target, version, position);
        }
    }

    fn publish(&mut self, mut target: Target, version: String, position: Position) {
        target.inherit_affinity(&self.sender.borrow());
        if !target.is_without_endpoint() {
            self.meshed = target.is_meshed();
        }
        let is_short = target.part().is_some_and(|kept| kept < MIN_PART);
        self.sender.send_replace(Arc::new(target));
        // The next stream reports a rejection again.
        self.version = if self.is_rejected {
            String::new()
        } else {
            version
        };
        self.position = position;
        self.refused = None;
        self.phase = Phase::Current;
        if is_short {
            self.mark_out_of_sync();
        }
        self.settled = true;
    }

    /// Keeps the target until a snapshot arrives, for which no receiver waits.
    fn mark_out_of_sync(&mut self) {
        self.phase = Phase::OutOfSync;
        self.partial = None;
        self.refused = None;
        self.version = String::new();
        if !self.settled {
            self.sender.send_modify(|_| {});
        }
    }

    fn is_idle(&self, now: Instant, idle: Duration) -> bool {
        self.unused_since
            .is_some_and(|since| now.saturating_duration_since(since) >= idle)
    }
}

/// The acknowledgement of a snapshot's routes and policy, if it has any. Each result is the reason of
/// a rejection.
fn acknowledge(
    resource: &Resource,
    version: &str,
    results: [Option<Option<&String>>; 2],
) -> Option<Acknowledgement> {
    if results.iter().all(Option::is_none) {
        return None;
    }
    let reasons: Vec<&str> = results
        .into_iter()
        .flatten()
        .flatten()
        .map(|reason| &**reason)
        .collect();
    Some(Acknowledgement {
        r#type: resource.kind().into(),
        name: resource.to_string(),
        version: version.to_owned(),
        rejection: reasons.join("; "),
    })
}

fn subscribe(resource: &Resource, entry: &Entry) -> DiscoverRequest {
    let action = Action::Subscribe(Subscribe {
        name: resource.to_string(),
        known_version: entry.version.clone(),
        r#type: resource.kind().into(),
    });
    DiscoverRequest {
        action: Some(action),
    }
}

fn unsubscribe(resource: &Resource) -> DiscoverRequest {
    DiscoverRequest {
        action: Some(Action::Unsubscribe(Unsubscribe {
            name: resource.to_string(),
            r#type: resource.kind().into(),
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diy_mesh_proto::mesh::v1 as proto;
    use diy_mesh_proto::mesh::v1::snapshot::Kind;
    use diy_mesh_proto::mesh::v1::{Delta, Snapshot, Unchanged, Unknown};

    const MINUTE: Duration = Duration::from_secs(60);

    fn table() -> Table {
        Table::new(100, usize::MAX)
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn endpoint(address: &str) -> Endpoint {
        Endpoint {
            address: address.to_owned(),
            pod_name: "pod".to_owned(),
            pod_namespace: "shop".to_owned(),
            ..Endpoint::default()
        }
    }

    fn snapshot(kind: Kind, addresses: &[&str]) -> Update {
        let endpoints = addresses.iter().map(|address| endpoint(address)).collect();
        let (namespace, name) = ("shop".to_owned(), "cart".to_owned());
        Update::Snapshot(Snapshot {
            kind: kind.into(),
            namespace,
            name,
            app_protocol: String::new(),
            endpoints,
            ..Snapshot::default()
        })
    }

    fn delta(upserted: &[&str], removed: &[&str]) -> Update {
        let upserted = upserted.iter().map(|address| endpoint(address)).collect();
        Update::Delta(Delta {
            upserted,
            removed: removed.iter().map(ToString::to_string).collect(),
            draining: Vec::new(),
        })
    }

    /// Applies a response about 10.96.0.7:80 and returns the errors.
    fn apply(table: &mut Table, version: &str, update: impl Into<Option<Update>>) -> Vec<String> {
        let mut errors = Vec::new();
        let response = DiscoverResponse {
            name: "10.96.0.7:80".to_owned(),
            version: version.to_owned(),
            update: update.into(),
            ..DiscoverResponse::default()
        };
        table.apply(response, Instant::now(), &mut |error| errors.push(error));
        errors
    }

    fn addresses(receiver: &watch::Receiver<Arc<Target>>) -> Vec<String> {
        match &**receiver.borrow() {
            Target::Unknown => vec!["unknown".to_owned()],
            Target::Withheld => vec!["withheld".to_owned()],
            Target::UnknownPort(_) => vec!["unknown port".to_owned()],
            Target::Refused => vec!["refused".to_owned()],
            Target::Service(service) => service
                .endpoints
                .iter()
                .map(|endpoint| endpoint.address.to_string())
                .collect(),
            Target::Pod(pod) => vec![format!("pod {}", pod.endpoint.address)],
        }
    }

    /// Sorted requests in short form: "+10.96.0.7:80@version", "-10.96.0.7:80".
    fn short(requests: impl IntoIterator<Item = DiscoverRequest>) -> Vec<String> {
        let mut texts: Vec<_> = requests
            .into_iter()
            .map(|request| match request.action.expect("an action") {
                Action::Subscribe(subscribe) => {
                    format!("+{}@{}", subscribe.name, subscribe.known_version)
                }
                Action::Unsubscribe(unsubscribe) => format!("-{}", unsubscribe.name),
                other => panic!("the table does not send {other:?}"),
            })
            .collect();
        texts.sort();
        texts
    }

    fn watch(table: &mut Table) -> watch::Receiver<Arc<Target>> {
        table
            .watch(address("10.96.0.7:80"))
            .expect("room")
            .0
            .receiver
    }

    #[test]
    fn applies_snapshot_then_deltas() {
        let mut table = table();
        let receiver = watch(&mut table);
        assert_eq!(addresses(&receiver), ["unknown"]);
        assert!(
            apply(
                &mut table,
                "1",
                snapshot(
                    Kind::Service,
                    &["10.0.0.2:8080", "10.0.0.1:8080", "10.0.0.2:8080"]
                )
            )
            .is_empty()
        );
        assert_eq!(addresses(&receiver), ["10.0.0.1:8080", "10.0.0.2:8080"]);
        assert!(
            apply(
                &mut table,
                "2",
                delta(
                    &["10.0.0.3:8080", "[fd00::1]:8080", "10.0.0.0:8080"],
                    &["10.0.0.1:8080", "10.0.0.9:1"]
                )
            )
            .is_empty()
        );
        assert_eq!(
            addresses(&receiver),
            [
                "10.0.0.0:8080",
                "10.0.0.2:8080",
                "10.0.0.3:8080",
                "[fd00::1]:8080"
            ]
        );
        assert!(apply(&mut table, "3", Update::Unknown(Unknown {})).is_empty());
        assert_eq!(addresses(&receiver), ["unknown"]);
    }

    #[test]
    fn updates_opaque_flag_of_an_endpoint() {
        let mut table = table();
        let receiver = watch(&mut table);
        let opaque = || match &**receiver.borrow() {
            Target::Service(service) => service
                .endpoints
                .iter()
                .map(|endpoint| endpoint.opaque)
                .collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        apply(
            &mut table,
            "1",
            snapshot(Kind::Service, &["10.0.0.1:80", "10.0.0.2:80"]),
        );
        assert_eq!(opaque(), [false, false]);
        let upserted = vec![Endpoint {
            opaque: true,
            ..endpoint("10.0.0.2:80")
        }];
        apply(
            &mut table,
            "2",
            Update::Delta(Delta {
                upserted,
                ..Delta::default()
            }),
        );
        assert_eq!(opaque(), [false, true]);
    }

    #[test]
    fn draining_endpoints_are_usable_only_while_none_is_ready() {
        let mut table = table();
        let receiver = watch(&mut table);
        let usable = || match &**receiver.borrow() {
            Target::Service(service) => service
                .usable()
                .iter()
                .map(|endpoint| endpoint.address.to_string())
                .collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        let Update::Snapshot(ready) = snapshot(Kind::Service, &["10.0.0.2:80"]) else {
            panic!("it is a snapshot");
        };
        let draining = vec![endpoint("10.0.0.3:80"), endpoint("10.0.0.1:80")];
        let both = Snapshot { draining, ..ready };
        assert!(apply(&mut table, "1", Update::Snapshot(both)).is_empty());
        assert_eq!(usable(), ["10.0.0.2:80"]);
        let drain = |address: &str| {
            Update::Delta(Delta {
                removed: vec![address.to_owned()],
                draining: vec![endpoint(address)],
                ..Delta::default()
            })
        };
        assert!(apply(&mut table, "2", drain("10.0.0.2:80")).is_empty());
        assert_eq!(usable(), ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"]);
        assert!(apply(&mut table, "3", delta(&[], &["10.0.0.1:80"])).is_empty());
        assert_eq!(usable(), ["10.0.0.2:80", "10.0.0.3:80"]);
        assert!(apply(&mut table, "4", delta(&["10.0.0.3:80"], &[])).is_empty());
        assert_eq!(usable(), ["10.0.0.3:80"]);
        assert!(apply(&mut table, "5", delta(&[], &["10.0.0.3:80"])).is_empty());
        assert_eq!(usable(), ["10.0.0.2:80"]);
    }

    #[test]
    fn session_affinity_continues_after_another_snapshot() {
        let mut table = table();
        let receiver = watch(&mut table);
        let affinity = || match &**receiver.borrow() {
            Target::Service(service) => service.affinity.clone(),
            other => panic!("{other:?}"),
        };
        let sticky = |session_affinity_seconds| {
            let Update::Snapshot(snapshot) = snapshot(Kind::Service, &["10.0.0.1:80"]) else {
                panic!("it is a snapshot");
            };
            Update::Snapshot(Snapshot {
                session_affinity_seconds,
                ..snapshot
            })
        };
        apply(&mut table, "1", sticky(60));
        let first = affinity().expect("the Service has affinity");
        apply(&mut table, "2", delta(&["10.0.0.2:80"], &[]));
        apply(&mut table, "3", sticky(60));
        assert!(Arc::ptr_eq(&first, &affinity().expect("the same")));
        apply(&mut table, "4", sticky(30));
        assert!(!Arc::ptr_eq(&first, &affinity().expect("another timeout")));
        apply(&mut table, "5", sticky(0));
        assert!(affinity().is_none());
    }

    #[test]
    fn delta_replaces_only_the_upserted_endpoint() {
        let mut table = table();
        let receiver = watch(&mut table);
        let endpoints = |receiver: &watch::Receiver<Arc<Target>>| match &**receiver.borrow() {
            Target::Service(service) => service.endpoints.clone(),
            other => panic!("{other:?}"),
        };
        apply(
            &mut table,
            "1",
            snapshot(Kind::Service, &["10.0.0.1:80", "10.0.0.2:80"]),
        );
        let before = endpoints(&receiver);
        apply(&mut table, "2", delta(&["10.0.0.2:80"], &[]));
        let after = endpoints(&receiver);
        assert!(Arc::ptr_eq(&before[0], &after[0]) && !Arc::ptr_eq(&before[1], &after[1]));
    }

    #[test]
    fn subscribes_once_per_canonical_address() {
        let mut table = table();
        let (_first, request) = table.watch(address("10.96.0.7:80")).expect("room");
        assert_eq!(short(request), ["+10.96.0.7:80@"]);
        let (_second, request) = table.watch(address("[::ffff:10.96.0.7]:80")).expect("room");
        assert_eq!((request, table.len()), (Vec::new(), 1));
    }

    #[test]
    fn resumes_from_known_versions() {
        let (mut table, now) = (table(), Instant::now());
        let receiver = watch(&mut table);
        apply(&mut table, "7", snapshot(Kind::Service, &["10.0.0.1:80"]));
        let _other = table.watch(address("10.96.0.8:80")).expect("room");
        assert_eq!(
            short(table.resume(now, MINUTE)),
            ["+10.96.0.7:80@7", "+10.96.0.8:80@"]
        );
        assert_eq!(addresses(&receiver), ["10.0.0.1:80"]);
        assert!(apply(&mut table, "7", Update::Unchanged(Unchanged {})).is_empty());
        assert!(apply(&mut table, "8", delta(&["10.0.0.2:80"], &[])).is_empty());
        assert_eq!(addresses(&receiver), ["10.0.0.1:80", "10.0.0.2:80"]);
    }

    #[test]
    fn keeps_target_and_resubscribes_after_invalid_response() {
        let bad: [(&str, Option<Update>); 5] = [
            (
                "delta before a snapshot",
                Some(delta(&["10.0.0.1:80"], &[])),
            ),
            (
                "unchanged, but no version is known",
                Some(Update::Unchanged(Unchanged {})),
            ),
            (
                "neither a service nor a pod",
                Some(snapshot(Kind::Unspecified, &["10.0.0.1:80"])),
            ),
            ("without an endpoint", Some(snapshot(Kind::Pod, &[]))),
            (
                "differs from the destination",
                Some(snapshot(Kind::Pod, &["10.96.0.8:80"])),
            ),
        ];
        for (expected, update) in bad {
            let (mut table, now) = (table(), Instant::now());
            let mut receiver = watch(&mut table);
            let errors = apply(&mut table, "1", update);
            assert!(
                errors.len() == 1 && errors[0].contains(expected),
                "{errors:?}"
            );
            assert!(
                receiver.has_changed().expect("open"),
                "ends the wait for a response"
            );
            receiver.mark_unchanged();
            // One resubscription for any number of invalid responses.
            assert_eq!(apply(&mut table, "2", delta(&[], &[])), [""; 0]);
            assert_eq!(
                short(table.sweep(now, MINUTE)),
                ["+10.96.0.7:80@", "-10.96.0.7:80"]
            );
            assert_eq!(short(table.sweep(now, MINUTE)), [""; 0]);
            assert!(apply(&mut table, "3", snapshot(Kind::Service, &["10.0.0.1:80"])).is_empty());
            assert_eq!(addresses(&receiver), ["10.0.0.1:80"]);
        }
    }

    #[test]
    fn skips_invalid_endpoints_and_applies_the_others() {
        let mut table = table();
        let receiver = watch(&mut table);
        let wrong = [
            "nonsense",
            "10.0.0.1",
            "10.0.0.1:0",
            "0.0.0.0:80",
            "224.0.0.1:80",
            "10.0.0.1:99999",
        ];
        for address in wrong {
            let errors = apply(
                &mut table,
                "1",
                snapshot(Kind::Service, &["10.0.0.1:80", address, "10.0.0.2:80"]),
            );
            assert!(
                errors.len() == 1 && errors[0].contains(address),
                "{errors:?}"
            );
            assert_eq!(addresses(&receiver), ["10.0.0.1:80", "10.0.0.2:80"]);
        }
        assert_eq!(
            apply(
                &mut table,
                "2",
                delta(&["nonsense"], &["10.0.0.1:80", "more nonsense"])
            )
            .len(),
            2
        );
        assert_eq!(addresses(&receiver), ["10.0.0.2:80"]);
        assert_eq!(
            short(table.sweep(Instant::now(), MINUTE)),
            ["+10.96.0.7:80@", "-10.96.0.7:80"]
        );
    }

    #[test]
    fn applies_pod_snapshot_and_identity_delta() {
        let mut table = table();
        let receiver = watch(&mut table);
        assert!(apply(&mut table, "1", snapshot(Kind::Pod, &["10.96.0.7:80"])).is_empty());
        assert_eq!(addresses(&receiver), ["pod 10.96.0.7:80"]);
        let meshed = Endpoint {
            identity: "spiffe://cluster.local/ns/shop/sa/cart".to_owned(),
            ..endpoint("10.96.0.7:80")
        };
        assert!(
            apply(
                &mut table,
                "2",
                Update::Delta(Delta {
                    upserted: vec![meshed],
                    ..Delta::default()
                })
            )
            .is_empty()
        );
        assert!(
            matches!(&**receiver.borrow(), Target::Pod(pod) if pod.endpoint.identity.is_some())
        );
        assert_eq!(
            apply(&mut table, "3", delta(&[], &["10.96.0.7:80"])).len(),
            1
        );
        assert_eq!(addresses(&receiver), ["pod 10.96.0.7:80"]);
    }

    #[test]
    fn withholds_a_pod_whose_identity_cannot_be_read() {
        let mut table = table();
        let receiver = watch(&mut table);
        let Update::Snapshot(mut pod) = snapshot(Kind::Pod, &["10.96.0.7:80"]) else {
            panic!("it is a snapshot");
        };
        pod.endpoints[0].identity = "https://not-spiffe".to_owned();
        assert!(!apply(&mut table, "1", Update::Snapshot(pod)).is_empty());
        assert_eq!(addresses(&receiver), ["withheld"]);
    }

    #[test]
    fn removes_unused_destination_after_idle_timeout() {
        let (mut table, start) = (table(), Instant::now());
        let receiver = watch(&mut table);
        assert_eq!(short(table.sweep(start, MINUTE)), [""; 0]);
        drop(receiver);
        assert_eq!(short(table.sweep(start, MINUTE)), [""; 0]);
        let again = watch(&mut table);
        assert_eq!(short(table.sweep(start + MINUTE, MINUTE)), [""; 0]);
        drop(again);
        assert_eq!(short(table.sweep(start + MINUTE, MINUTE)), [""; 0]);
        assert_eq!(
            short(table.sweep(start + 2 * MINUTE, MINUTE)),
            ["-10.96.0.7:80"]
        );
        assert_eq!(table.len(), 0);
        // A response that crossed the unsubscription is valid.
        assert!(apply(&mut table, "2", delta(&["10.0.0.2:80"], &[])).is_empty());
    }

    fn meshed() -> Update {
        let meshed = Endpoint {
            identity: "spiffe://cluster.local/ns/shop/sa/cart".to_owned(),
            ..endpoint("10.0.0.1:80")
        };
        Update::Delta(Delta {
            upserted: vec![meshed],
            ..Delta::default()
        })
    }

    /// Expires all destinations without receivers.
    fn expire(table: &mut Table) {
        let start = Instant::now();
        table.sweep(start, MINUTE);
        table.sweep(start + MINUTE, MINUTE);
        assert_eq!(table.len(), 0);
    }

    #[test]
    fn withholds_a_formerly_meshed_destination_until_its_target_changes() {
        let mut table = table();
        drop(watch(&mut table));
        apply(&mut table, "1", snapshot(Kind::Service, &[]));
        apply(&mut table, "2", meshed());
        expire(&mut table);
        for _ in 0..2 {
            assert_eq!(addresses(&watch(&mut table)), ["withheld"]);
            expire(&mut table);
        }
        drop(watch(&mut table));
        // A replica that lags behind does not know the destination.
        apply(&mut table, "3", Update::Unknown(Unknown {}));
        let receiver = watch(&mut table);
        apply(&mut table, "3", Update::Unknown(Unknown {}));
        assert_eq!(addresses(&receiver), ["withheld"]);
        drop(receiver);
        expire(&mut table);
        assert_eq!(addresses(&watch(&mut table)), ["withheld"]);
        apply(&mut table, "4", snapshot(Kind::Service, &["10.0.0.9:80"]));
        expire(&mut table);
        assert_eq!(addresses(&watch(&mut table)), ["unknown"]);
    }

    #[test]
    fn service_without_endpoints_keeps_its_meshed_state() {
        let mut table = table();
        drop(watch(&mut table));
        apply(&mut table, "1", snapshot(Kind::Service, &[]));
        apply(&mut table, "2", meshed());
        apply(&mut table, "3", delta(&[], &["10.0.0.1:80"]));
        expire(&mut table);
        assert_eq!(addresses(&watch(&mut table)), ["withheld"]);
        apply(&mut table, "4", snapshot(Kind::Service, &["10.0.0.2:80"]));
        expire(&mut table);
        assert_eq!(
            addresses(&watch(&mut table)),
            ["unknown"],
            "the endpoints left the mesh"
        );
    }

    #[test]
    fn withholds_every_destination_beyond_the_remembered_limit() {
        let mut table = table();
        table.were_meshed.limit = 1;
        let destinations = ["10.96.0.1:80", "10.96.0.2:80", "10.96.0.3:80"].map(address);
        for destination in &destinations[..2] {
            drop(table.watch(*destination).expect("room"));
            for update in [snapshot(Kind::Service, &[]), meshed()] {
                let destination = destination.to_string();
                let response = DiscoverResponse {
                    name: destination,
                    version: "1".to_owned(),
                    update: Some(update),
                    ..DiscoverResponse::default()
                };
                table.apply(response, Instant::now(), &mut |error| panic!("{error}"));
            }
        }
        expire(&mut table);
        let mut watch =
            |destination: SocketAddr| table.watch(destination).expect("room").0.receiver;
        for receiver in destinations.map(&mut watch) {
            assert_eq!(addresses(&receiver), ["withheld"]);
        }
        let receiver = watch(address("10.96.0.7:80"));
        apply(&mut table, "1", Update::Unknown(Unknown {}));
        assert_eq!(
            addresses(&receiver),
            ["unknown"],
            "as sent by the controller"
        );
    }

    #[test]
    fn full_table_refuses_destinations_until_a_sweep() {
        let (mut table, now) = (Table::new(1, usize::MAX), Instant::now());
        let receiver = watch(&mut table);
        apply(&mut table, "1", snapshot(Kind::Service, &[]));
        apply(&mut table, "2", meshed());
        assert!(table.watch(address("10.96.0.8:80")).is_err());
        assert!(table.watch(address("10.96.0.7:80")).is_ok());
        drop(receiver);
        assert!(
            table.watch(address("10.96.0.8:80")).is_err(),
            "a meshed destination is kept without a stream"
        );
        assert_eq!(short(table.sweep(now, MINUTE)), ["-10.96.0.7:80"]);
        assert!(table.watch(address("10.96.0.8:80")).is_ok());
        assert_eq!(short(table.sweep(now, MINUTE)), ["-10.96.0.8:80"]);
        assert_eq!(addresses(&watch(&mut table)), ["withheld"]);
    }

    #[test]
    fn full_table_replaces_unused_plaintext_destinations() {
        let mut table = Table::new(3, usize::MAX);
        let receiver = watch(&mut table);
        apply(&mut table, "1", snapshot(Kind::Service, &["10.0.0.1:80"]));
        for unwatched in ["10.96.0.8:80", "10.96.0.9:80"] {
            drop(table.watch(address(unwatched)).expect("room"));
        }
        let (_watched, requests) = table
            .watch(address("10.96.0.10:80"))
            .expect("room after eviction");
        assert_eq!(
            short(requests),
            ["+10.96.0.10:80@", "-10.96.0.8:80", "-10.96.0.9:80"]
        );
        apply(&mut table, "2", delta(&["10.0.0.2:80"], &[]));
        assert_eq!(addresses(&receiver), ["10.0.0.1:80", "10.0.0.2:80"]);
    }

    /// Applies a response of a replica that has processed these events, at `now`. Returns whether
    /// the state is refused.
    fn apply_at(
        table: &mut Table,
        now: Instant,
        position: (&str, u64, u64),
        version: &str,
        update: Update,
    ) -> bool {
        let (epoch, pods, slices) = position;
        let components = [("Pod", pods), ("EndpointSlice", slices)];
        let component = |(kind, resource_version): (&str, u64)| proto::position::Component {
            kind: kind.to_owned(),
            resource_version,
        };
        let response = DiscoverResponse {
            name: "10.96.0.7:80".to_owned(),
            version: version.to_owned(),
            update: Some(update),
            position: Some(proto::Position {
                epoch: epoch.to_owned(),
                components: components.map(component).into(),
            }),
            ..DiscoverResponse::default()
        };
        table
            .apply(response, now, &mut |error| panic!("{error}"))
            .is_older
    }

    #[test]
    fn lagging_replica_does_not_restore_an_older_state() {
        let (mut table, start) = (table(), Instant::now());
        let receiver = watch(&mut table);
        let new = snapshot(Kind::Service, &["10.0.0.9:80"]);
        assert!(!apply_at(&mut table, start, ("a", 50, 60), "new", new));
        // Another replica, which lags.
        let requests = table.resume(start, MINUTE);
        assert_eq!(short(requests), ["+10.96.0.7:80@new"]);
        let old = snapshot(Kind::Service, &["10.0.0.1:80", "10.0.0.2:80"]);
        assert!(apply_at(&mut table, start, ("a", 50, 40), "old", old));
        assert_eq!(addresses(&receiver), ["10.0.0.9:80"]);
        // Its deltas apply to its own state, until that is not older.
        let update = delta(&["10.0.0.3:80"], &["10.0.0.1:80"]);
        assert!(apply_at(&mut table, start, ("a", 50, 50), "older", update));
        assert_eq!(addresses(&receiver), ["10.0.0.9:80"]);
        let update = delta(&["10.0.0.9:80"], &["10.0.0.2:80"]);
        assert!(!apply_at(&mut table, start, ("a", 50, 61), "newer", update));
        assert_eq!(addresses(&receiver), ["10.0.0.3:80", "10.0.0.9:80"]);
        assert_eq!(short(table.resume(start, MINUTE)), ["+10.96.0.7:80@newer"]);
    }

    fn chunk(numbers: std::ops::Range<u32>, more: bool) -> DiscoverResponse {
        let endpoints = numbers.map(|number| {
            let address = std::net::Ipv4Addr::from_bits(0x0a00_0000 + number);
            endpoint(&format!("{address}:80"))
        });
        let snapshot = Snapshot {
            kind: Kind::Service.into(),
            endpoints: endpoints.collect(),
            ..Snapshot::default()
        };
        DiscoverResponse {
            name: "10.96.0.7:80".to_owned(),
            update: Some(Update::Snapshot(snapshot)),
            more,
            ..DiscoverResponse::default()
        }
    }

    #[test]
    fn part_of_a_large_service_is_kept_and_follows_its_changes() {
        let mut table = Table::new(100, 2000);
        let receiver = watch(&mut table);
        let apply = |table: &mut Table, response| {
            table.apply(response, Instant::now(), &mut |error| panic!("{error}"))
        };
        // A snapshot without an end is within the bounds.
        for number in 0..50 {
            apply(&mut table, chunk(number * 4000..(number + 1) * 4000, true));
            let entry = &table.entries[&Resource::from(address("10.96.0.7:80"))];
            let (partial, subset) = entry.partial.as_ref().unwrap();
            assert!(partial.endpoints.len() == 1000 && subset.is_partial());
        }
        let applied = apply(&mut table, chunk(200_000..200_001, false));
        let kept = applied.kept.expect("a part").1;
        assert!((999..=1000).contains(&kept), "{kept}");
        let known = addresses(&receiver);
        assert_eq!(known.len(), kept);
        // Only changes of this part count.
        for number in 300_000..302_000 {
            let address = std::net::Ipv4Addr::from_bits(0x0a00_0000 + number);
            let update = delta(&[&format!("{address}:80")], &[]);
            apply_at(&mut table, Instant::now(), ("", 0, 0), "2", update);
        }
        let added = addresses(&receiver).len() - kept;
        // One in 200: 10 on average.
        assert!(added < 40, "{added}");
        // Another Service has half of the rest.
        let other = Resource::from(address("10.96.0.8:80"));
        let max = table.max_endpoints_of(&other, &chunk(0..100, false));
        assert!((400..=500).contains(&max), "{max}");
        // A part that is almost used up is replaced.
        let removed = addresses(&receiver);
        let removed: Vec<&str> = removed.iter().skip(15).map(String::as_str).collect();
        let update = delta(&[], &removed);
        apply_at(&mut table, Instant::now(), ("", 0, 0), "3", update);
        assert_eq!(addresses(&receiver).len(), 15);
        let requests = table.sweep(Instant::now(), MINUTE);
        assert_eq!(short(requests), ["+10.96.0.7:80@", "-10.96.0.7:80"]);
    }

    #[test]
    fn service_that_grows_by_deltas_is_reduced() {
        let (mut table, now) = (Table::new(100, 2000), Instant::now());
        let receiver = watch(&mut table);
        let snapshot = |numbers| chunk(numbers, false).update.unwrap();
        apply_at(&mut table, now, ("", 0, 0), "1", snapshot(0..10));
        let add = |table: &mut Table, number: u32| {
            let Update::Snapshot(added) = snapshot(number * 100..(number + 1) * 100) else {
                panic!("a snapshot");
            };
            let delta = Delta {
                upserted: added.endpoints,
                ..Delta::default()
            };
            apply_at(table, now, ("", 0, 0), "2", Update::Delta(delta));
        };
        (1..=19).for_each(|number| add(&mut table, number));
        assert_eq!(addresses(&receiver).len(), 1910);
        assert!(table.sweep(now, MINUTE).is_empty());
        (20..100).for_each(|number| add(&mut table, number));
        let kept = addresses(&receiver).len();
        assert!(kept <= 2010, "{kept}");
        // Its next snapshot has the bounds of a new one.
        let requests = table.sweep(now, MINUTE);
        assert_eq!(short(requests), ["+10.96.0.7:80@", "-10.96.0.7:80"]);
        apply_at(&mut table, now, ("", 0, 0), "3", snapshot(0..10_000));
        assert_eq!(addresses(&receiver).len(), 1000);
        assert!(table.sweep(now, MINUTE).is_empty());
    }

    #[test]
    fn states_without_order_apply() {
        let (mut table, start) = (table(), Instant::now());
        let receiver = watch(&mut table);
        for (position, endpoint) in [
            (("a", 50, 60), "10.0.0.1:80"),
            // Each replica is ahead in one kind.
            (("a", 40, 70), "10.0.0.2:80"),
            (("a", 50, 60), "10.0.0.3:80"),
            // The cluster was restored from a backup.
            (("a, restored", 1, 1), "10.0.0.4:80"),
            // A catalog of files.
            (("", 0, 0), "10.0.0.5:80"),
            (("", 0, 0), "10.0.0.6:80"),
        ] {
            let update = snapshot(Kind::Service, &[endpoint]);
            assert!(!apply_at(&mut table, start, position, "1", update));
            assert_eq!(addresses(&receiver), [endpoint]);
        }
    }

    #[test]
    fn older_state_applies_if_no_newer_one_arrives() {
        let (mut table, start) = (table(), Instant::now());
        let receiver = watch(&mut table);
        let known = snapshot(Kind::Service, &["10.0.0.1:80"]);
        apply_at(&mut table, start, ("a", 50, 60), "known", known);
        let old = snapshot(Kind::Service, &["10.0.0.2:80"]);
        assert!(apply_at(&mut table, start, ("a", 1, 1), "old", old));
        let later = start + MAX_REFUSAL / 2;
        let update = delta(&["10.0.0.3:80"], &[]);
        assert!(apply_at(&mut table, later, ("a", 2, 2), "less old", update));
        let due = start + MAX_REFUSAL;
        assert!(
            table
                .accept_refused(due - Duration::from_millis(1))
                .is_empty()
        );
        assert_eq!(table.accept_refused(due), [address("10.96.0.7:80").into()]);
        assert_eq!(addresses(&receiver), ["10.0.0.2:80", "10.0.0.3:80"]);
        assert!(table.accept_refused(due).is_empty());
        // From there on, the order counts from that state.
        let update = delta(&[], &["10.0.0.2:80"]);
        assert!(!apply_at(&mut table, due, ("a", 3, 3), "3", update));
        assert_eq!(addresses(&receiver), ["10.0.0.3:80"]);
    }

    #[test]
    fn ignores_responses_without_update_or_address() {
        let mut table = table();
        let receiver = watch(&mut table);
        apply(&mut table, "1", snapshot(Kind::Service, &["10.0.0.1:80"]));
        assert_eq!(apply(&mut table, "2", None).len(), 1);
        let mut errors = Vec::new();
        let invalid = |name: &str, r#type| DiscoverResponse {
            name: name.to_owned(),
            r#type,
            ..DiscoverResponse::default()
        };
        for response in [invalid("nowhere", 0), invalid("10.96.0.7:80", 77)] {
            table.apply(response, Instant::now(), &mut |error| errors.push(error));
        }
        assert_eq!(
            (errors.len(), addresses(&receiver)),
            (2, vec!["10.0.0.1:80".to_owned()])
        );
    }
}
