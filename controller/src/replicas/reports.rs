//! Reports of the replicas on their connected proxies, and the unmet conditions of a rotation
//! according to them. Pure.
//!
//! A report contains numbers and a few names. During a rotation, the replicas also compare the
//! connected pods, to notice a pod without a connection to any replica. The comparison goes part by
//! part in the order of their digests: the size of a report does not depend on the number of pods.
//! A pod that was connected once and fulfilled the condition of the phase is accounted for.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest::{SHA256, digest};
use diy_mesh_control_plane::clock::Reading;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::Instant;

/// The maximum number of names in a list.
const MAX_NAMES: usize = 20;
/// A report that has not changed for this time does not count.
const LIVENESS_TIMEOUT: Duration = Duration::from_secs(15);
/// A report that has not changed for this time is removed.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(60);
/// The maximum number of reports without a change so far. Beyond it, the reports with the lowest
/// numbers are removed at once. An object may have 256 KB of annotations, and replicas that never
/// live for [`REMOVAL_TIMEOUT`] leave their reports.
const MAX_UNCHANGED: usize = 8;
/// The maximum number of pods in a report, 64 KB: an object may have 256 KB of annotations.
const MAX_DIGESTS: usize = 4000;
/// Above all digests.
pub(crate) const END: u64 = 1 << 48;

/// Report of a replica to the other replicas about its connected proxies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// The time of its clock in seconds since 1970. Differs from the one before.
    pub beat: u64,
    /// Version of the CA state that the replica uses.
    pub state: String,
    /// Version of the roots that the replica sends to its proxies.
    pub roots: String,
    /// Key identifier of the issuer that the replica uses.
    pub issuer: String,
    /// Number of connected proxies.
    pub connected: u64,
    /// Proxies that do not trust the current version.
    pub not_acknowledged: BoundedNames,
    /// Proxies whose certificate has another issuer.
    pub not_renewed: BoundedNames,
    /// Namespaces without the current roots.
    pub namespaces: BoundedNames,
    /// The ready pods below this digest are accounted for, as this replica has seen.
    pub confirmed: u64,
    /// A part of the connected pods; only during a rotation.
    pub pods: Pods,
    /// The use of routes and policies by its proxies: a
    /// [`Page`](super::exchange::Page), which replicas of other releases may
    /// not understand.
    pub programmed: Value,
    /// The URLs of issuers whose tokens name unknown keys, as its proxies have reported.
    pub unknown_keys: Vec<String>,
}

/// The connected pods of a replica in a range of digests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pods {
    /// The start of the range.
    pub from: u64,
    /// The end of the range, which does not belong to it.
    pub to: u64,
    /// The pods that fulfil the condition of the phase, ascending.
    pub done: Vec<u64>,
    /// The other ones, ascending.
    pub lacking: Vec<u64>,
}

impl Pods {
    /// As many of these pods as a report may have, from a digest on.
    pub(crate) fn new(from: u64, mut all: Vec<(u64, bool)>) -> Pods {
        all.retain(|(digest, _)| *digest >= from);
        all.sort_unstable();
        // A pod may have many streams.
        all.dedup();
        let to = all.get(MAX_DIGESTS).map_or(END, |(digest, _)| *digest);
        let all = all.into_iter().filter(|(digest, _)| *digest < to);
        let (done, lacking): (Vec<_>, Vec<_>) = all.partition(|(_, is_done)| *is_done);
        let digests = |pods: Vec<(u64, bool)>| pods.into_iter().map(|(digest, _)| digest).collect();
        Pods {
            from,
            to,
            done: digests(done),
            lacking: digests(lacking),
        }
    }
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

impl BoundedNames {
    /// Counts a name, and keeps the first ones.
    pub(crate) fn add(&mut self, name: impl ToString) {
        self.count += 1;
        if self.names.len() < MAX_NAMES {
            self.names.push(name.to_string());
        }
    }
}

/// Counts names, and keeps some of them.
pub(crate) fn bounded(names: impl IntoIterator<Item = String>) -> BoundedNames {
    let mut bounded = BoundedNames::default();
    names.into_iter().for_each(|name| bounded.add(name));
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
pub(crate) fn pod_digest(namespace: &str, name: &str, uid: &str) -> u64 {
    let digest = match uid {
        "" => digest(&SHA256, format!("{namespace}/{name}").as_bytes()),
        uid => digest(&SHA256, uid.as_bytes()),
    };
    let bytes = digest.as_ref()[..6].iter();
    bytes.fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The observed state of the mesh.
#[derive(Clone, Debug, Default)]
pub struct Observation {
    /// The digest of the stored state.
    pub state: String,
    /// The reports of live replicas by name.
    pub reports: BTreeMap<String, Report>,
    /// The ready meshed pods below this digest are accounted for.
    pub confirmed: u64,
    /// The names of the other ones by digest.
    pub pods: BTreeMap<u64, String>,
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

    /// Ready pods without a connection to a replica, and the number of those to be compared.
    fn absent_pods(&self) -> Vec<String> {
        let covered = self.covered();
        let is_connected = |pod: &u64| {
            self.current().any(|Report { pods, .. }| {
                let mut lists = [&pods.done, &pods.lacking].into_iter();
                lists.any(|list| list.binary_search(pod).is_ok())
            })
        };
        let compared = self.pods.range(..covered);
        let absent = compared.filter(|(digest, _)| !is_connected(digest));
        let absent = bounded(absent.map(|(_, name)| format!("pod {name}")));
        let left = self.pods.range(covered..).count();
        let left = (left > 0).then(|| format!("{left} pods to be compared by the replicas"));
        let absent = conditions(&absent, "to connect to the controller");
        absent.into_iter().chain(left).collect()
    }

    /// The end of the range of digests that all replicas report.
    fn covered(&self) -> u64 {
        let ends = self.current().map(|Report { pods, .. }| match pods.from {
            from if from <= self.confirmed => pods.to,
            _ => self.confirmed,
        });
        ends.min().unwrap_or_default().max(self.confirmed)
    }

    /// The pods below this digest are accounted for, now or before.
    pub(crate) fn next_confirmed(&self) -> u64 {
        let is_done = |pod: &u64| {
            let mut reports = self.current();
            reports.any(|report| report.pods.done.binary_search(pod).is_ok())
        };
        let covered = self.covered();
        let mut open = self.pods.range(..covered).map(|(digest, _)| *digest);
        open.find(|digest| !is_done(digest)).unwrap_or(covered)
    }

    /// The digest from which on the next report names pods: a replica still compares them.
    pub(crate) fn next_from(&self) -> u64 {
        let confirmed = self.current().map(|report| report.confirmed);
        let confirmed = confirmed.filter(|confirmed| *confirmed < END);
        confirmed.min().unwrap_or_default()
    }
}

/// Determines live replicas by the changes of their reports, as this replica sees them. All clocks
/// may be wrong, also the clock of this replica.
#[derive(Debug, Default)]
pub(crate) struct Liveness {
    seen: BTreeMap<String, Seen>,
    /// The time of the first update.
    begun: Option<Instant>,
}

#[derive(Debug)]
struct Seen {
    beat: u64,
    since: Instant,
    has_changed: bool,
}

impl Liveness {
    /// Returns the live reports, and the names of reports to remove.
    pub(crate) fn update(
        &mut self,
        reports: BTreeMap<String, Report>,
        now: Instant,
    ) -> (BTreeMap<String, Report>, Vec<String>) {
        self.begun.get_or_insert(now);
        self.seen.retain(|name, _| reports.contains_key(name));
        let has_changed = |(name, report): &(&String, &Report)| {
            let seen = self.seen.get(*name);
            seen.is_some_and(|seen| seen.has_changed || seen.beat != report.beat)
        };
        let unchanged = reports.iter().filter(|one| !has_changed(one));
        let mut unchanged: Vec<_> = unchanged
            .map(|(name, one)| (one.beat, name.clone()))
            .collect();
        unchanged.sort();
        unchanged.truncate(unchanged.len().saturating_sub(MAX_UNCHANGED));
        let is_excess = |name: &String| unchanged.iter().any(|(_, other)| other == name);
        let (mut live, mut dead) = (BTreeMap::new(), Vec::new());
        for (name, report) in reports {
            let seen = self.seen.entry(name.clone()).or_insert(Seen {
                beat: report.beat,
                since: now,
                has_changed: false,
            });
            if seen.beat != report.beat {
                (seen.beat, seen.since, seen.has_changed) = (report.beat, now, true);
            }
            let age = now.duration_since(seen.since);
            if age >= REMOVAL_TIMEOUT || is_excess(&name) {
                dead.push(name);
            } else if age < LIVENESS_TIMEOUT {
                live.insert(name, report);
            }
        }
        (live, dead)
    }

    /// Whether a replica runs. A replica that has stopped long ago may have left an unchanged report.
    pub(crate) fn is_certain(&self, name: &str) -> bool {
        self.seen.get(name).is_some_and(Seen::is_certain)
    }

    /// The clocks of replicas that run, one a host: a replica that was restarted has a new name, and
    /// its former report still counts. `None`: at the start, the reports have not changed yet.
    pub(crate) fn clocks(&self) -> Option<Vec<Reading>> {
        let live = self.seen.iter().filter(|(_, seen)| seen.is_certain());
        let mut latest = BTreeMap::<&str, &Seen>::new();
        for (name, seen) in live {
            let host = name.rsplit_once('-').map_or(&**name, |(host, _)| host);
            let known = latest.entry(host).or_insert(seen);
            if known.since < seen.since {
                *known = seen;
            }
        }
        let is_first = |seen: &Seen| Some(seen.since) == self.begun && !seen.has_changed;
        let mut waiting = self.seen.values().filter(|seen| is_first(seen));
        if latest.is_empty() && waiting.any(|seen| seen.since.elapsed() < LIVENESS_TIMEOUT) {
            return None;
        }
        let clocks = latest.into_values().filter_map(|seen| {
            let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seen.beat));
            time.map(|time| Reading::new(time, seen.since))
        });
        Some(clocks.collect())
    }
}

impl Seen {
    fn is_certain(&self) -> bool {
        self.has_changed && self.since.elapsed() < LIVENESS_TIMEOUT
    }
}

/// Determines whether all replicas agree for two reports of each. The first agreement may come from
/// a replica that has just lost its connections.
#[derive(Debug, Default)]
pub(crate) struct Agreement(Option<(String, BTreeMap<String, u64>)>);

impl Agreement {
    /// Records whether the replicas agree now. Returns whether they agree for long enough.
    pub(crate) fn is_stable(&mut self, agree: bool, observed: &Observation) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    const PODS: usize = 100_000;

    /// A replica with these connected pods.
    #[derive(Default)]
    struct Replica {
        connected: BTreeMap<u64, bool>,
        confirmed: u64,
        from: u64,
    }

    impl Replica {
        fn report(&self) -> Report {
            let lacking = self.connected.values().filter(|is_done| !*is_done);
            let names = lacking.map(|_| "proxy ".to_owned() + &"n".repeat(316));
            let connected = self.connected.iter();
            Report {
                confirmed: self.confirmed,
                not_acknowledged: bounded(names),
                pods: Pods::new(
                    self.from,
                    connected.map(|(pod, done)| (*pod, *done)).collect(),
                ),
                ..Report::default()
            }
        }
    }

    /// One report of each replica. Returns what the first one waits for.
    fn exchange(replicas: &mut [Replica], ready: &BTreeMap<u64, String>) -> Vec<String> {
        let reports = replicas.iter().map(Replica::report).enumerate();
        let reports: BTreeMap<String, Report> = reports
            .map(|(number, report)| {
                let text = serde_json::to_string(&report).unwrap();
                assert!(text.len() < 80 * 1024, "{} bytes", text.len());
                (number.to_string(), serde_json::from_str(&text).unwrap())
            })
            .collect();
        let observed = replicas.iter_mut().map(|replica| {
            let pods = ready.range(replica.confirmed..);
            let observed = Observation {
                reports: reports.clone(),
                confirmed: replica.confirmed,
                pods: pods.map(|(pod, name)| (*pod, name.clone())).collect(),
                ..Observation::default()
            };
            replica.confirmed = observed.next_confirmed();
            replica.from = observed.next_from();
            observed.not_acknowledged(true, true)
        });
        observed.collect::<Vec<_>>().swap_remove(0)
    }

    /// Ready pods, and two replicas to which they are connected.
    fn mesh() -> (BTreeMap<u64, String>, [Replica; 2]) {
        let ready = (0..PODS).map(|number| {
            let uid = format!("6f1d52a5-{number:012}");
            (
                pod_digest("shop", "web", &uid),
                format!("shop/web-{number}"),
            )
        });
        let (ready, mut replicas) = (ready.collect::<BTreeMap<_, _>>(), <[Replica; 2]>::default());
        for (number, digest) in ready.keys().enumerate() {
            replicas[number % 2].connected.insert(*digest, true);
        }
        (ready, replicas)
    }

    #[test]
    fn replicas_compare_a_hundred_thousand_pods_in_small_reports() {
        let (ready, mut replicas) = mesh();
        assert_eq!(ready.len(), PODS, "two pods share no digest");
        let first = exchange(&mut replicas, &ready);
        assert!(
            first[0].ends_with(" pods to be compared by the replicas"),
            "{first:?}"
        );
        let pages = PODS.div_ceil(2 * MAX_DIGESTS);
        let rounds = (1..=2 * pages).find(|_| exchange(&mut replicas, &ready).is_empty());
        assert_eq!(rounds, Some(2 * pages - 2), "a part in every other report");
        assert_eq!(replicas[0].confirmed, END);
        // A replica that starts now compares all of them.
        replicas[1].confirmed = 0;
        for _ in 0..=2 * pages {
            exchange(&mut replicas, &ready);
        }
        assert_eq!(replicas[1].confirmed, END);
    }

    #[test]
    fn pod_without_a_connection_or_an_acknowledgement_holds_a_large_rotation() {
        let (ready, mut replicas) = mesh();
        let mut digests = ready.keys().skip(PODS / 2);
        let [absent, lacking] = [(); 2].map(|()| *digests.next().unwrap());
        for replica in &mut replicas {
            replica.connected.remove(&absent);
            replica
                .connected
                .entry(lacking)
                .and_modify(|is_done| *is_done = false);
        }
        let mut waiting = Vec::new();
        for _ in 0..=PODS / MAX_DIGESTS {
            waiting = exchange(&mut replicas, &ready);
        }
        assert!(
            waiting[0].ends_with(" to trust the current roots"),
            "{waiting:?}"
        );
        let name = format!("pod {} to connect to the controller", ready[&absent]);
        assert!(waiting.contains(&name), "{waiting:?}");
        assert_eq!(replicas[0].confirmed, absent);
        replicas[0].connected.insert(absent, true);
        exchange(&mut replicas, &ready);
        assert_eq!(replicas[0].confirmed, lacking);
        // Connected to both, it fulfils the condition at one of them.
        replicas[0].connected.insert(lacking, true);
        replicas[1].connected.insert(lacking, true);
        for _ in 0..=PODS / MAX_DIGESTS {
            waiting = exchange(&mut replicas, &ready);
        }
        assert_eq!(waiting, [""; 0]);
        // It was accounted for, so that a new connection of it does not hold the rotation.
        replicas[0].connected.remove(&absent);
        assert_eq!(exchange(&mut replicas, &ready), [""; 0]);
    }

    #[test]
    fn pod_with_many_streams_leaves_room_for_others() {
        let streams = (0..100_000).map(|stream| (7, stream % 2 == 0));
        let pods = Pods::new(0, streams.chain([(9, true)]).collect());
        let (done, lacking) = (vec![7, 9], vec![7]);
        let (from, to) = (0, END);
        let expected = Pods {
            from,
            to,
            done,
            lacking,
        };
        assert_eq!(pods, expected);
    }

    fn beats(all: &[(&str, u64)]) -> BTreeMap<String, Report> {
        let report = |beat| Report {
            beat,
            ..Report::default()
        };
        let all = all.iter();
        all.map(|(name, beat)| ((*name).to_owned(), report(*beat)))
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn replicas_live_by_changes_of_their_reports_whatever_their_clocks_are() {
        let mut liveness = Liveness::default();
        let mut update = |day: u64, idle| {
            let reports = beats(&[("behind", day), ("idle", idle), ("ahead", day * 1_000_000)]);
            let (live, dead) = liveness.update(reports, Instant::now());
            let is_certain = ["behind", "idle", "ahead"].map(|name| liveness.is_certain(name));
            assert_eq!(is_certain, [day > 1, false, day > 1], "day {day}");
            (Vec::from_iter(live.into_keys()).join(" "), dead)
        };
        assert_eq!(update(1, 5000), ("ahead behind idle".to_owned(), vec![]));
        tokio::time::advance(LIVENESS_TIMEOUT).await;
        assert_eq!(update(2, 5000), ("ahead behind".to_owned(), vec![]));
        tokio::time::advance(REMOVAL_TIMEOUT).await;
        let idle = vec!["idle".to_owned()];
        assert_eq!(update(3, 5000), ("ahead behind".to_owned(), idle));
    }

    #[tokio::test(start_paused = true)]
    async fn clock_of_a_restarted_replica_counts_once() {
        let mut liveness = Liveness::default();
        let mut clocks = |all: &[(&str, u64)]| {
            let (live, _) = liveness.update(beats(all), Instant::now());
            assert_eq!(live.len(), all.len());
            liveness.clocks().map(|clocks| clocks.len())
        };
        let second = Duration::from_secs(1);
        assert_eq!(clocks(&[]), Some(0), "there are no others");
        tokio::time::advance(second).await;
        assert_eq!(clocks(&[("one-a", 1), ("two-a", 1)]), Some(0));
        assert_eq!(clocks(&[("one-a", 2), ("two-a", 2)]), Some(2));
        tokio::time::advance(10 * second).await;
        // One was restarted, and its former report still counts.
        let restarted = [("one-a", 2), ("one-b", 3), ("two-a", 3)];
        assert_eq!(clocks(&restarted), Some(2));
        tokio::time::advance(second).await;
        let restarted = [("one-a", 2), ("one-b", 4), ("two-a", 3)];
        assert_eq!(clocks(&restarted), Some(2));
    }

    #[tokio::test(start_paused = true)]
    async fn new_replica_waits_for_the_clocks_of_others() {
        let mut liveness = Liveness::default();
        let mut are_known = |all: &[(&str, u64)]| {
            liveness.update(beats(all), Instant::now());
            liveness.clocks().is_some()
        };
        assert!(!are_known(&[("one-a", 1), ("gone-a", 1)]));
        tokio::time::advance(LIVENESS_TIMEOUT / 2).await;
        assert!(are_known(&[("one-a", 2), ("gone-a", 1)]));
        // Another one starts later.
        assert!(are_known(&[("one-a", 3), ("gone-a", 1), ("two-a", 1)]));
        let mut alone = Liveness::default();
        alone.update(beats(&[("gone-a", 1)]), Instant::now());
        assert!(alone.clocks().is_none());
        tokio::time::advance(LIVENESS_TIMEOUT).await;
        alone.update(beats(&[("gone-a", 1), ("new-a", 1)]), Instant::now());
        assert!(alone.clocks().is_some(), "none has changed for long");
    }

    #[tokio::test(start_paused = true)]
    async fn reports_of_many_replicas_that_have_stopped_are_removed_at_once() {
        let mut liveness = Liveness::default();
        liveness.update(beats(&[("live", 1)]), Instant::now());
        let stopped = (10..30).map(|number| (number.to_string(), number));
        let stopped: Vec<(String, u64)> = stopped.collect();
        let all = stopped.iter().map(|(name, beat)| (&**name, *beat));
        let all: Vec<_> = all.chain([("live", 2)]).collect();
        let (live, dead) = liveness.update(beats(&all), Instant::now());
        assert_eq!(live.len(), MAX_UNCHANGED + 1);
        assert!(live.contains_key("live") && live.contains_key("29"));
        assert_eq!(dead.len(), stopped.len() - MAX_UNCHANGED);
    }
}
