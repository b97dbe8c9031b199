//! Reports of the replicas on their connected proxies, and what a phase of the rotation waits for
//! according to them. Pure.
//!
//! A report says how many; names are few, for people. The pods are all there, as digests, so that a
//! pod that is connected to no replica is missed, however the connections are spread.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
pub use diy_mesh_proto::status::{BoundedNames as Few, Report};
use tokio::time::Instant;

use crate::issuer::hex;

/// How many names a list has at most.
const MAX_NAMES: usize = 20;
/// Who was silent for so long does not count.
pub const LIVENESS_TIMEOUT: Duration = Duration::from_secs(15);
/// Whose report is removed.
pub const REMOVAL_TIMEOUT: Duration = Duration::from_secs(60);

/// A proxy that is connected to this replica.
#[derive(Clone, Debug, Default)]
pub struct Connected {
    /// Namespace, name and UID of its pod; none where it runs in no pod.
    pub pod: Option<(String, String, String)>,
    /// Its user.
    pub user: String,
    /// The version of the roots that it trusts; empty: it has not said so yet.
    pub roots_version: String,
    /// The id of the issuer of its certificate; empty: it has not said so yet.
    pub issuer: String,
}

impl Connected {
    /// For people.
    fn name(&self) -> String {
        match &self.pod {
            Some((namespace, name, _)) => format!("proxy {namespace}/{name}"),
            None => format!("proxy of {}", self.user),
        }
    }

    /// Which ones do not match, by name.
    pub fn few(all: &[Connected], wrong: impl Fn(&Connected) -> bool) -> Few {
        few(all.iter().filter(|proxy| wrong(proxy)).map(Connected::name))
    }
}

/// The proxies that are connected to this replica now.
pub type ConnectedProxies = Arc<dyn Fn() -> Vec<Connected> + Send + Sync>;

/// A number, and some of the names.
pub fn few(names: impl IntoIterator<Item = String>) -> Few {
    let mut few = Few::default();
    for name in names {
        few.count += 1;
        if few.names.len() < MAX_NAMES {
            few.names.push(name);
        }
    }
    few
}

/// As sentences; the rest as a number.
fn say(few: &Few, what: &str, lines: &mut Vec<String>) {
    lines.extend(few.names.iter().map(|name| format!("{name} {what}")));
    let more = few.count.saturating_sub(few.names.len() as u64);
    if more > 0 {
        lines.push(format!("{more} more {what}"));
    }
}

/// A pod, short: by its UID, or by its name where it has none.
pub fn pod_digest(namespace: &str, name: &str, uid: &str) -> String {
    let text = if uid.is_empty() {
        format!("{namespace}/{name}")
    } else {
        uid.to_owned()
    };
    hex(&digest(&SHA256, text.as_bytes()).as_ref()[..6])
}

/// What is known of the mesh at one moment.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// The state of the store.
    pub state: String,
    /// What each live replica says.
    pub reports: BTreeMap<String, Report>,
    /// The ready meshed pods, by digest, with their names.
    pub pods: BTreeMap<String, String>,
}

impl Evidence {
    /// Who does not trust the current roots yet; nobody: all do.
    pub fn not_acknowledged(&self, absent_count: bool) -> Vec<String> {
        let mut waiting = self.behind();
        for report in self.current() {
            say(
                &report.namespaces,
                "to hold the current roots",
                &mut waiting,
            );
            say(
                &report.not_acknowledged,
                "to trust the current roots",
                &mut waiting,
            );
        }
        if absent_count {
            say(&self.absent(), "to connect to the controller", &mut waiting);
        }
        waiting
    }

    /// Who may use a certificate of another issuer than the current one; nobody: none is in use.
    pub fn not_renewed(&self) -> Vec<String> {
        let mut waiting = self.behind();
        for report in self.current() {
            say(
                &report.not_renewed,
                "to renew its certificate",
                &mut waiting,
            );
        }
        say(&self.absent(), "to connect to the controller", &mut waiting);
        waiting
    }

    fn current(&self) -> impl Iterator<Item = &Report> {
        self.reports
            .values()
            .filter(|report| report.state == self.state)
    }

    /// The replicas that act by another state.
    fn behind(&self) -> Vec<String> {
        let behind = self
            .reports
            .iter()
            .filter(|(_, report)| report.state != self.state);
        behind
            .map(|(name, _)| format!("replica {name} to follow"))
            .collect()
    }

    fn absent(&self) -> Few {
        let connected = |digest: &str| {
            self.reports
                .values()
                .any(|report| report.pods.contains(digest))
        };
        few(self
            .pods
            .iter()
            .filter(|(digest, _)| !connected(digest))
            .map(|(_, name)| format!("pod {name}")))
    }
}

/// Which replicas live: a report counts from when it was first seen, as long as its beat goes on.
/// By this replica's own clock.
#[derive(Debug, Default)]
pub struct Liveness(BTreeMap<String, (u64, Instant)>);

impl Liveness {
    /// Takes in all reports there are; gives back the live ones, and the names of those that are to
    /// be removed.
    pub fn update(
        &mut self,
        reports: BTreeMap<String, Report>,
        now: Instant,
    ) -> (BTreeMap<String, Report>, Vec<String>) {
        self.0.retain(|name, _| reports.contains_key(name));
        let (mut live, mut gone) = (BTreeMap::new(), Vec::new());
        for (name, report) in reports {
            let (beat, since) = self.0.entry(name.clone()).or_insert((report.beat, now));
            if *beat != report.beat {
                (*beat, *since) = (report.beat, now);
            }
            let silence = now.duration_since(*since);
            if silence < LIVENESS_TIMEOUT {
                live.insert(name, report);
            } else if silence >= REMOVAL_TIMEOUT {
                gone.push(name);
            }
        }
        (live, gone)
    }
}

/// That all replicas have agreed for two heartbeats of each: one moment's agreement may be that of
/// a replica which has just lost its connections.
#[derive(Debug, Default)]
pub struct Agreement(Option<(String, BTreeMap<String, u64>)>);

impl Agreement {
    /// Takes in whether they agree now; gives back whether they have done so for long enough.
    pub fn holds(&mut self, agree: bool, evidence: &Evidence) -> bool {
        if !agree {
            self.0 = None;
            return false;
        }
        let beats: BTreeMap<String, u64> = evidence
            .reports
            .iter()
            .map(|(name, report)| (name.clone(), report.beat))
            .collect();
        match &self.0 {
            Some((state, first)) if *state == evidence.state && first.keys().eq(beats.keys()) => {
                beats.iter().all(|(name, beat)| first[name] != *beat)
            }
            _ => {
                self.0 = Some((evidence.state.clone(), beats));
                false
            }
        }
    }
}
