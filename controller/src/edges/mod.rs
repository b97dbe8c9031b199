//! The edges of the last days: what pods were called by, and what they called outside of the cluster,
//! as their proxies report it. Pods that are alike form a group. Bounded, and never pushed out by
//! others: what has no room is cut, and its group is incomplete. Pure: the caller passes the time.
//! `store` keeps them in ConfigMaps.
//!
//! A proxy, or another client with the token of its pod, reports about the group of this pod only.
//! The stored content is read as a report too: replicas unite their knowledge.

pub mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use diy_mesh_proto::authorization::edge::is_valid;
use diy_mesh_proto::mesh::v1 as proto;
use prost::Message as _;
use proto::get_edges_response::{Group as Message, Seen};

use crate::kinds::Pod;
use crate::unix_time::seconds;

/// Days for which an edge is kept, including the day of its last report.
const MAX_DAYS: i64 = 7;
const SECONDS_PER_DAY: u64 = 24 * 3600;
/// The bytes of the edges of a group, of a namespace, and of all.
const MAX_GROUP_BYTES: Bytes = [64 * 1024, 16 * 1024];
const MAX_NAMESPACE_BYTES: Bytes = [256 * 1024, 64 * 1024];
const MAX_BYTES: Bytes = [16 * 1024 * 1024, 4 * 1024 * 1024];
/// The bytes of the labels and ports of a group.
const MAX_HEADER_BYTES: usize = 4 * 1024;
/// The bytes of an entry besides its text.
const ENTRY_BYTES: usize = 16;
/// The first byte of the encoded edge of a destination. Its only field is the destination.
const DESTINATION_TAG: u8 = 7 << 3 | 2;
/// Labels that controllers and nodes set for each pod, or for each run of a Job.
const POD_LABELS: [&str; 11] = [
    "pod-template-hash",
    "pod-template-generation",
    "controller-revision-hash",
    "controller-uid",
    "batch.kubernetes.io/controller-uid",
    "job-name",
    "batch.kubernetes.io/job-name",
    "batch.kubernetes.io/job-completion-index",
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
    "topology.kubernetes.io/zone",
];

/// Bytes of calls to pods with the headers of groups, and of destinations: neither takes the bytes of
/// the other.
type Bytes = [usize; 2];

/// The callers of pods, and the destinations that pods have called. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Edges(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    namespaces: BTreeMap<String, Namespace>,
    bytes: Bytes,
    /// The number of reported edges that were cut.
    cut: u64,
    /// The namespaces with something new that is not stored yet.
    unstored: BTreeSet<String>,
}

#[derive(Debug, Default)]
struct Namespace {
    /// The groups by their encoded header. The group of the empty header stands for groups that
    /// were cut.
    groups: BTreeMap<Vec<u8>, Group>,
    bytes: Bytes,
}

#[derive(Debug, Default)]
struct Group {
    since: i64,
    last_day: i64,
    /// The last days of encoded edges. The empty edge has the last day on which others were cut.
    edges: BTreeMap<Vec<u8>, i64>,
    bytes: Bytes,
}

/// Days since 1970.
pub fn day(now: SystemTime) -> i64 {
    (seconds(now) / SECONDS_PER_DAY) as i64
}

/// The labels that the pods of a group share.
pub fn shared_labels(mut labels: BTreeMap<String, String>) -> BTreeMap<String, String> {
    labels.retain(|name, _| !POD_LABELS.contains(&name.as_str()));
    labels
}

/// The group of a meshed pod, without edges.
pub fn group(pod: &Pod) -> Message {
    let ports = pod.inbound.ports.iter().map(|port| proto::workload::Port {
        name: port.name.to_string(),
        port: port.port.into(),
        protocol: port.protocol.name().to_owned(),
    });
    Message {
        namespace: pod.key.namespace.to_string(),
        service_account: pod.service_account().unwrap_or_default().to_owned(),
        labels: shared_labels(pod.labels.clone()),
        ports: ports.collect(),
        ..Message::default()
    }
}

/// The groups that several replicas have told, each once.
pub fn united(groups: impl IntoIterator<Item = Message>) -> Vec<Message> {
    let groups: Vec<Message> = groups.into_iter().collect();
    let today = groups.iter().map(|group| group.last_day).max();
    let mut inner = Inner::default();
    for mut group in groups {
        let (edge, last_day) = (None, group.last_day);
        let cut = group.incomplete.then_some(Seen { edge, last_day });
        group.edges.extend(cut);
        inner.merge(group, today.unwrap_or_default());
    }
    let edges = Edges(Arc::new(Mutex::new(inner)));
    let groups = |name: &String| edges.groups(name);
    edges.namespaces().iter().flat_map(groups).collect()
}

impl Edges {
    /// Adds the report of a proxy about the group of its pod.
    pub fn report(&self, group: Message, report: proto::Edges, now: SystemTime) {
        let last_day = day(now);
        let cut = report.incomplete.then_some(None);
        let edges = report.edges.into_iter().map(Some).chain(cut);
        let group = Message {
            edges: edges.map(|edge| Seen { edge, last_day }).collect(),
            since: seconds(now) as i64,
            last_day,
            ..group
        };
        let mut inner = self.lock();
        let namespace = group.namespace.clone();
        if inner.merge(group, last_day) {
            inner.unstored.insert(namespace);
        }
    }

    /// Whether a namespace has had something new since the last time.
    fn take_unstored(&self, namespace: &str) -> bool {
        self.lock().unstored.remove(namespace)
    }

    /// Whether something is not stored yet.
    fn has_unstored(&self) -> bool {
        !self.lock().unstored.is_empty()
    }

    /// Something of a namespace is not stored yet.
    fn mark_unstored(&self, namespace: &str) {
        self.lock().unstored.insert(namespace.to_owned());
    }

    /// Adds what is stored of a namespace. Returns all of it, as it is to be stored.
    fn unite(&self, namespace: &str, stored: Vec<Message>, now: SystemTime) -> Vec<Message> {
        let mut inner = self.lock();
        for group in stored {
            let namespace = namespace.to_owned();
            inner.merge(Message { namespace, ..group }, day(now));
        }
        inner.groups(namespace)
    }

    /// Forgets what was not seen for seven days.
    fn expire(&self, now: SystemTime) {
        self.lock().expire(day(now));
    }

    /// The namespaces with groups.
    pub fn namespaces(&self) -> BTreeSet<String> {
        self.lock().namespaces.keys().cloned().collect()
    }

    /// The groups of a namespace.
    pub fn groups(&self, namespace: &str) -> Vec<Message> {
        let mut groups = self.lock().groups(namespace);
        for group in &mut groups {
            let count = group.edges.len();
            group.edges.retain(|seen| seen.edge.is_some());
            group.incomplete = group.edges.len() < count;
        }
        groups
    }

    /// The number of reported edges that were cut, and the bytes of those that are kept.
    pub fn counts(&self) -> (u64, usize) {
        let inner = self.lock();
        (inner.cut, inner.bytes.iter().sum())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Returns whether something is new.
    fn merge(&mut self, group: Message, today: i64) -> bool {
        if !is_kept(group.last_day, today) {
            return false;
        }
        let namespace = self.namespaces.entry(group.namespace.clone()).or_default();
        let free = |kind: usize| {
            let free = MAX_NAMESPACE_BYTES[kind].saturating_sub(namespace.bytes[kind]);
            free.min(MAX_BYTES[kind].saturating_sub(self.bytes[kind]))
        };
        let mut room = Room {
            free: [free(0), free(1)],
            used: Bytes::default(),
            cut: 0,
        };
        let is_new = namespace.merge(group, today, &mut room);
        add(&mut namespace.bytes, room.used);
        add(&mut self.bytes, room.used);
        self.cut += room.cut;
        is_new
    }

    fn expire(&mut self, today: i64) {
        self.bytes = Bytes::default();
        for namespace in self.namespaces.values_mut() {
            namespace.bytes = Bytes::default();
            namespace.groups.retain(|header, group| {
                group.edges.retain(|_, last| is_kept(*last, today));
                group.bytes = Bytes::default();
                for edge in group.edges.keys() {
                    group.bytes[kind(edge)] += cost(edge);
                }
                let is_kept = is_kept(group.last_day, today);
                if is_kept {
                    add(&mut namespace.bytes, group.bytes);
                    namespace.bytes[kind(header)] += cost(header);
                }
                is_kept
            });
            add(&mut self.bytes, namespace.bytes);
        }
        self.namespaces
            .retain(|_, namespace| !namespace.groups.is_empty());
    }

    /// As they are stored, in the order of their headers.
    fn groups(&self, name: &str) -> Vec<Message> {
        let namespace = self.namespaces.get(name).into_iter();
        let groups = namespace.flat_map(|namespace| &namespace.groups);
        groups
            .map(|(header, group)| group.message(name, header))
            .collect()
    }
}

/// Whether what was seen last on this day is kept. The clock of another replica may be ahead.
fn is_kept(last_day: i64, today: i64) -> bool {
    (today - MAX_DAYS + 1..=today + 1).contains(&last_day)
}

/// The bytes of an entry. The one that stands for what was cut always has room.
fn cost(key: &[u8]) -> usize {
    if key.is_empty() {
        0
    } else {
        key.len() + ENTRY_BYTES
    }
}

/// The position in [`Bytes`] for an encoded edge or header.
fn kind(key: &[u8]) -> usize {
    (key.first() == Some(&DESTINATION_TAG)).into()
}

fn add(sum: &mut Bytes, bytes: Bytes) {
    let [calls, destinations] = bytes;
    sum[0] += calls;
    sum[1] += destinations;
}

/// The bytes that a report may add.
struct Room {
    free: Bytes,
    used: Bytes,
    cut: u64,
}

impl Room {
    /// Takes the bytes of an entry. `None`: it is cut.
    fn take(&mut self, key: Vec<u8>, is_valid: bool) -> Option<Vec<u8>> {
        let (cost, kind) = (cost(&key), kind(&key));
        if !is_valid || self.used[kind] + cost > self.free[kind] {
            self.cut += 1;
            return None;
        }
        self.used[kind] += cost;
        Some(key)
    }
}

impl Namespace {
    fn merge(&mut self, group: Message, today: i64, room: &mut Room) -> bool {
        let Message {
            edges,
            since,
            last_day,
            ..
        } = group;
        let header = Message {
            service_account: group.service_account,
            // An earlier release may have stored further ones.
            labels: shared_labels(group.labels),
            ports: group.ports,
            ..Message::default()
        };
        let header = header.encode_to_vec();
        let is_known = self.groups.contains_key(&header);
        let is_small = header.len() <= MAX_HEADER_BYTES;
        let taken = if is_known {
            Some(header)
        } else {
            room.take(header, is_small)
        };
        let (header, edges) = match taken {
            Some(header) => (header, edges),
            None => (
                vec![],
                vec![Seen {
                    edge: None,
                    last_day,
                }],
            ),
        };
        let known = self.groups.entry(header).or_insert_with(|| Group {
            since,
            ..Group::default()
        });
        known.since = known.since.min(since);
        known.last_day = known.last_day.max(last_day);
        let edges = edges
            .into_iter()
            .filter(|seen| is_kept(seen.last_day, today));
        // All of them are added.
        edges.fold(!is_known, |is_new, seen| known.add(seen, room) || is_new)
    }
}

impl Group {
    /// Returns whether the edge is new.
    fn add(&mut self, Seen { edge, last_day }: Seen, room: &mut Room) -> bool {
        let mut key = edge
            .as_ref()
            .map(prost::Message::encode_to_vec)
            .unwrap_or_default();
        if !self.edges.contains_key(&key) {
            let kind = kind(&key);
            let is_small = self.bytes[kind] + cost(&key) <= MAX_GROUP_BYTES[kind];
            let is_valid = is_small && edge.as_ref().is_none_or(is_valid);
            key = room.take(key, is_valid).unwrap_or_default();
            self.bytes[kind] += cost(&key);
        }
        let before = self.edges.get(&key).copied();
        self.edges
            .insert(key, before.unwrap_or(last_day).max(last_day));
        before.is_none()
    }

    fn message(&self, namespace: &str, header: &[u8]) -> Message {
        let edge = |key: &[u8]| proto::Edge::decode(key).ok().filter(|_| !key.is_empty());
        let edges = self.edges.iter().map(|(key, last_day)| Seen {
            edge: edge(key),
            last_day: *last_day,
        });
        Message {
            namespace: namespace.to_owned(),
            edges: edges.collect(),
            since: self.since,
            last_day: self.last_day,
            ..Message::decode(header).unwrap_or_default()
        }
    }
}

#[cfg(test)]
mod tests;
