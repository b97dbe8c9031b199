//! Reports of the replicas on their connected proxies, and the unmet conditions of a rotation
//! according to them. Pure.
//!
//! A report contains numbers and a few names. It contains the digests of all connected pods, so
//! that a pod without a connection to any replica is noticed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::issuer::hex;

/// The maximum number of names in a list.
const MAX_NAMES: usize = 20;
/// A report that has not changed for this time does not count.
const LIVENESS_TIMEOUT: Duration = Duration::from_secs(15);
/// A report that has not changed for this time is removed.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(60);

/// Report of a replica to the other replicas about its connected proxies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// Counter that changes with each report.
    pub beat: u64,
    /// Version of the CA state that the replica uses.
    pub state: String,
    /// Version of the roots that the replica sends to its proxies.
    pub roots: String,
    /// Key identifier of the issuer that the replica uses.
    pub issuer: String,
    /// Number of connected proxies.
    pub connected: u64,
    /// Number of proxies by acknowledged version of the roots.
    pub acknowledged: BTreeMap<String, u64>,
    /// Proxies that do not trust the current version.
    pub not_acknowledged: BoundedNames,
    /// Proxies whose certificate has another issuer.
    pub not_renewed: BoundedNames,
    /// Namespaces without the current roots.
    pub namespaces: BoundedNames,
    /// Digests of the connected pods; only during a rotation.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub pods: BTreeSet<String>,
}

/// Count with a bounded list of names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BoundedNames {
    /// Total number.
    pub count: u64,
    /// At most 20 names.
    pub names: Vec<String>,
}

/// Counts names, and keeps some of them.
pub(super) fn bounded(names: impl IntoIterator<Item = String>) -> BoundedNames {
    let mut bounded = BoundedNames::default();
    for name in names {
        bounded.count += 1;
        if bounded.names.len() < MAX_NAMES {
            bounded.names.push(name);
        }
    }
    bounded
}

/// A condition per name, and one for the number of the others.
fn conditions(names: &BoundedNames, condition: &str) -> Vec<String> {
    let listed = names.names.iter().map(|name| format!("{name} {condition}"));
    let more = names.count.saturating_sub(names.names.len() as u64);
    let more = (more > 0).then(|| format!("{more} more {condition}"));
    listed.chain(more).collect()
}

/// A digest of a pod's UID, or of its name if it has no UID.
pub(super) fn pod_digest(namespace: &str, name: &str, uid: &str) -> String {
    let text = match uid {
        "" => format!("{namespace}/{name}"),
        uid => uid.to_owned(),
    };
    hex(&digest(&SHA256, text.as_bytes()).as_ref()[..6])
}

/// The observed state of the mesh.
#[derive(Clone, Debug, Default)]
pub struct Observation {
    /// The digest of the stored state.
    pub state: String,
    /// The reports of live replicas by name.
    pub reports: BTreeMap<String, Report>,
    /// The names of ready meshed pods by digest.
    pub pods: BTreeMap<String, String>,
}

impl Observation {
    /// The conditions for trust of all proxies in the current roots: whether proxies, connected or
    /// absent, still count, and whether namespaces do.
    pub fn not_acknowledged(&self, proxies_count: bool, namespaces_count: bool) -> Vec<String> {
        let mut waiting = self.outdated_replicas();
        for report in self.current() {
            if namespaces_count {
                waiting.extend(conditions(&report.namespaces, "to hold the current roots"));
            }
            if proxies_count {
                let proxies = &report.not_acknowledged;
                waiting.extend(conditions(proxies, "to trust the current roots"));
            }
        }
        if proxies_count {
            waiting.extend(self.absent_pods());
        }
        waiting
    }

    /// The conditions for certificates of the current issuer in all proxies.
    pub fn not_renewed(&self) -> Vec<String> {
        let mut waiting = self.outdated_replicas();
        for report in self.current() {
            waiting.extend(conditions(&report.not_renewed, "to renew its certificate"));
        }
        waiting.extend(self.absent_pods());
        waiting
    }

    fn current(&self) -> impl Iterator<Item = &Report> {
        let reports = self.reports.values();
        reports.filter(|report| report.state == self.state)
    }

    fn outdated_replicas(&self) -> Vec<String> {
        let reports = self.reports.iter();
        let outdated = reports.filter(|(_, report)| report.state != self.state);
        outdated
            .map(|(name, _)| format!("replica {name} to load the current state"))
            .collect()
    }

    /// Ready pods without a connection to a replica.
    fn absent_pods(&self) -> Vec<String> {
        let connected = |pod: &str| {
            self.reports
                .values()
                .any(|report| report.pods.contains(pod))
        };
        let absent = self.pods.iter().filter(|(digest, _)| !connected(digest));
        let absent = bounded(absent.map(|(_, name)| format!("pod {name}")));
        conditions(&absent, "to connect to the controller")
    }
}

/// Determines live replicas by the changes of their reports, with the clock of this replica.
#[derive(Debug, Default)]
pub(super) struct Liveness(BTreeMap<String, (u64, Instant)>);

impl Liveness {
    /// Returns the live reports, and the names of reports to remove.
    pub(super) fn update(
        &mut self,
        reports: BTreeMap<String, Report>,
        now: Instant,
    ) -> (BTreeMap<String, Report>, Vec<String>) {
        self.0.retain(|name, _| reports.contains_key(name));
        let (mut live, mut dead) = (BTreeMap::new(), Vec::new());
        for (name, report) in reports {
            let (beat, since) = self.0.entry(name.clone()).or_insert((report.beat, now));
            if *beat != report.beat {
                (*beat, *since) = (report.beat, now);
            }
            let age = now.duration_since(*since);
            if age < LIVENESS_TIMEOUT {
                live.insert(name, report);
            } else if age >= REMOVAL_TIMEOUT {
                dead.push(name);
            }
        }
        (live, dead)
    }
}

/// Determines whether all replicas agree for two reports of each. The first agreement may be
/// that of a replica that has just lost its connections.
#[derive(Debug, Default)]
pub(super) struct Agreement(Option<(String, BTreeMap<String, u64>)>);

impl Agreement {
    /// Records whether the replicas agree now. Returns whether they agree for long enough.
    pub(super) fn is_stable(&mut self, agree: bool, observed: &Observation) -> bool {
        if !agree {
            self.0 = None;
            return false;
        }
        let beats = observed.reports.iter();
        let beats: BTreeMap<String, u64> = beats
            .map(|(name, report)| (name.clone(), report.beat))
            .collect();
        match &self.0 {
            Some((state, first)) if *state == observed.state && first.keys().eq(beats.keys()) => {
                beats.iter().all(|(name, beat)| first[name] != *beat)
            }
            _ => {
                self.0 = Some((observed.state.clone(), beats));
                false
            }
        }
    }
}
