//! Table of subscribed resources (destinations and backends): target, version and receivers of each.
//! Pure: takes responses and instants, sends targets to receivers and returns requests for the
//! controller.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1::discover_request::Action;
use diy_mesh_proto::mesh::v1::discover_response::Update;
use diy_mesh_proto::mesh::v1::{Acknowledgement, DiscoverResponse, Subscribe, Unsubscribe};
use tokio::sync::watch;
use tokio::time::Instant;

use super::position::Order;
use super::resource::Resource;
use super::target::{Target, TargetKind};

mod entry;
mod shares;

use entry::{Entry, MIN_WEIGHT, Phase};
use shares::{Charge, Shares};

/// Maximum number of expired meshed destinations that are remembered, about 2 MB.
const MAX_REMEMBERED: usize = 50_000;

/// All subscribed resources, and which expired destinations were meshed.
pub(super) struct Table {
    entries: HashMap<Resource, Entry>,
    were_meshed: WereMeshed,
    limit: usize,
    shares: Shares,
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
            shares: Shares::new(max_endpoints),
            seed: fastrand::u64(..),
        }
    }

    /// Changes the number of endpoints of all destinations, with those that take as much memory as the
    /// rest of them.
    pub fn set_max_endpoints(&mut self, max_endpoints: usize) {
        self.shares.max = max_endpoints;
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The version of the state of each resource, and its position.
    pub fn versions(&self) -> impl Iterator<Item = (Resource, (String, String))> {
        let entries = self.entries.iter();
        entries.map(|(resource, entry)| {
            let version = (entry.version.clone(), entry.order.text());
            (resource.clone(), version)
        })
    }

    /// A receiver for `resource`, and the requests to send if it is new.
    pub fn watch(&mut self, resource: impl Into<Resource>) -> Result<(Watched, Vec<Action>), Full> {
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
        let namespace = resource.service().map_or("", |(namespace, _)| namespace);
        let mut requests = if self.has_room(namespace) {
            Vec::new()
        } else {
            self.make_room(namespace)
        };
        if !self.has_room(namespace) {
            return Err(Full);
        }
        // A formerly meshed destination gets no plaintext until the controller sends another
        // target. A backend has no address of its own.
        let (meshed, withheld) = match &resource {
            Resource::Destination(address) => {
                let meshed = self.were_meshed.addresses.remove(address);
                (meshed, meshed || self.were_meshed.is_incomplete)
            }
            Resource::Backend(_) | Resource::External(_) => (false, true),
        };
        let kind = if withheld {
            TargetKind::Withheld
        } else {
            TargetKind::Unknown
        };
        let (sender, receiver) = watch::channel(Arc::new(kind.into()));
        let mut entry = Entry {
            sender,
            version: String::new(),
            order: Order::default(),
            refused: None,
            phase: Phase::Subscribed,
            partial: None,
            settled: false,
            meshed,
            is_rejected: false,
            lacks: 0,
            charge: Charge::default(),
            unused_since: None,
        };
        entry.settle(&resource, &mut self.shares);
        requests.push(subscribe(&resource, &entry, Instant::now()));
        self.entries.insert(resource, entry);
        Ok((
            Watched {
                receiver,
                settled: false,
            },
            requests,
        ))
    }

    /// Whether another destination of this namespace may be added.
    fn has_room(&self, namespace: &str) -> bool {
        let none = Charge::default();
        let limit = self.shares.limit(namespace, &none);
        self.entries.len() < self.limit && limit.least >= MIN_WEIGHT
    }

    /// Removes destinations that were refused, and if these do not suffice, plaintext ones without
    /// receivers. Meshed ones stay until the next sweep, which requires a stream: without one, they
    /// cannot be resubscribed and would become unreachable.
    fn make_room(&mut self, namespace: &str) -> Vec<Action> {
        let mut removed = self.remove(Entry::is_refused);
        if !self.has_room(namespace) {
            let is_unneeded = |entry: &Entry| entry.sender.receiver_count() == 0 && !entry.meshed;
            removed.append(&mut self.remove(is_unneeded));
        }
        removed.iter().map(unsubscribe).collect()
    }

    /// Removes destinations, and remembers which of them were meshed.
    fn remove(&mut self, is_removed: impl Fn(&Entry) -> bool) -> Vec<Resource> {
        let removed = self.entries.extract_if(|_, entry| is_removed(entry));
        let forget = |(resource, mut entry): (Resource, Entry)| {
            self.shares.release(&mut entry.charge);
            match resource {
                Resource::Destination(address) if entry.meshed => self.were_meshed.insert(address),
                _ => {}
            }
            resource
        };
        removed.map(forget).collect()
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
        let Some(entry) = self.entries.get_mut(&resource) else {
            return Applied::default();
        };
        let namespace = entry.namespace(&resource, response.update.as_ref());
        let bounds = entry.bounds(&self.shares, &namespace, self.seed);
        let is_snapshot = matches!(response.update, Some(Update::Snapshot(_)));
        let was_part = entry.sender.borrow().part().is_some();
        let was_small = entry.sender.borrow().table.is_small();
        let acknowledgement = entry.apply(&resource, response, bounds, now, &mut |error| {
            report(format!("{resource}: {error}"))
        });
        entry.settle(&resource, &mut self.shares);
        let has_small_table = !was_small && entry.sender.borrow().table.is_small();
        let is_news = (is_snapshot || !was_part) && entry.partial.is_none();
        let kept = is_news.then(|| entry.sender.borrow().part()).flatten();
        Applied {
            is_older: entry.refused.is_some(),
            acknowledgement,
            small_table: has_small_table.then(|| resource.clone()),
            kept: kept.map(|kept| (resource, kept)),
        }
    }

    /// Ends the wait for first responses, because the controller is unavailable.
    pub fn stop_waiting(&self) {
        for entry in self.entries.values().filter(|entry| !entry.settled) {
            entry.sender.send_modify(|_| {});
        }
    }

    /// The stream has ended.
    pub fn pause(&mut self, now: Instant) {
        let entries = self.entries.values_mut();
        entries.for_each(|entry| entry.order.pause(now));
    }

    /// Requests to send on a new stream: a subscription for each destination, with the known
    /// version. Removes idle destinations.
    pub fn resume(&mut self, now: Instant, idle: Duration) -> Vec<Action> {
        self.mark_unused(now);
        self.remove_idle(now, idle);
        let resubscribe = |(resource, entry): (&Resource, &mut Entry)| {
            entry.phase = Phase::Subscribed;
            entry.partial = None;
            entry.refused = None;
            entry.settle(resource, &mut self.shares);
            entry.order.resume(now);
            subscribe(resource, entry, now)
        };
        self.entries.iter_mut().map(resubscribe).collect()
    }

    /// Removes destinations without receivers after `idle`, or at once if there is no room for
    /// others. Removes those that were refused, and resubscribes to those out of sync. Requires an
    /// open stream: without one, known targets cannot be requested again.
    pub fn sweep(&mut self, now: Instant, idle: Duration) -> Vec<Action> {
        self.mark_unused(now);
        let mut removed = self.remove(Entry::is_refused);
        let idle = if self.has_room("") {
            idle
        } else {
            Duration::ZERO
        };
        removed.append(&mut self.remove_idle(now, idle));
        let mut requests: Vec<_> = removed.iter().map(unsubscribe).collect();
        let shares = &self.shares;
        for (resource, entry) in (self.entries.iter_mut())
            .filter(|(_, entry)| entry.phase == Phase::OutOfSync || entry.may_retry(shares))
        {
            entry.phase = Phase::Subscribed;
            requests.extend([unsubscribe(resource), subscribe(resource, entry, now)]);
        }
        if self.entries.len() < self.entries.capacity() / 4 {
            self.entries.shrink_to_fit();
        }
        requests
    }

    /// Removes destinations without receivers after `idle`.
    fn remove_idle(&mut self, now: Instant, idle: Duration) -> Vec<Resource> {
        self.remove(|entry| entry.is_idle(now, idle))
    }

    /// Publishes the states that were refused for long enough: no replica sends newer ones.
    /// Returns their names and acknowledgements.
    pub fn accept_refused(&mut self, now: Instant) -> Vec<(Resource, Option<Acknowledgement>)> {
        let due = self.entries.iter_mut().filter_map(|(resource, entry)| {
            let refused = entry.refused.take_if(|_| entry.order.is_due(now))?;
            let namespace = entry.namespace(resource, None);
            let bounds = entry.bounds(&self.shares, &namespace, self.seed);
            let acknowledgement = entry.publish(refused, bounds);
            entry.settle(resource, &mut self.shares);
            Some((resource.clone(), acknowledgement))
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
    /// The acknowledgement of the routes and the policy.
    pub acknowledgement: Option<Acknowledgement>,
    /// A Service that has got a smaller table of endpoints for its hashes than usual.
    pub small_table: Option<Resource>,
    /// A Service of which only so many endpoints are kept.
    pub kept: Option<(Resource, usize)>,
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

fn subscribe(resource: &Resource, entry: &Entry, now: Instant) -> Action {
    Action::Subscribe(Subscribe {
        name: resource.to_string(),
        known_version: entry.version.clone(),
        r#type: resource.kind().into(),
        known_position: entry.order.known(now),
    })
}

fn unsubscribe(resource: &Resource) -> Action {
    Action::Unsubscribe(Unsubscribe {
        name: resource.to_string(),
        r#type: resource.kind().into(),
    })
}

#[cfg(test)]
mod tests;
