//! The condition `Programmed` of routes and policies: what the proxies of the pods that they concern
//! do with them, whatever replica they are connected to. Pure.
//!
//! Any meshed pod can connect, disconnect, acknowledge and reject as it likes. Therefore a condition
//! changes once per review at most, only a limited number of them does, and while proxies are still
//! to acknowledge an object, other counts alone are no change. The names of pods, and the reasons
//! that they give, are for authors of their own namespace only.

pub mod exchange;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use exchange::{Exchange, Id};

use crate::authorization;
use crate::index::limits::{MAX_BYTES, MAX_SERVICES};
use crate::object::{Condition, Key, Kind, ObjectId, ObjectStatus};
use crate::policy::Target;

/// The type of the condition.
pub const PROGRAMMED: &str = "diy-service-mesh.dev/Programmed";
/// Time between two reviews, at least. The states of an object that is known for this time are
/// published.
pub const REVIEW_INTERVAL: Duration = Duration::from_secs(10);
/// Time after which proxies that are still to acknowledge an object are named, and other counts are
/// written.
const STILL_TIME: Duration = Duration::from_secs(60);
/// Time for which a condition stays after the last pod that it concerns, or after the start of a
/// new replica. The proxies connect to this replica within this time.
const HOLD_TIME: Duration = Duration::from_secs(300);
/// Objects whose condition a review changes at most, those with the oldest ones first: each is two
/// requests to the API server.
const MAX_CHANGES: usize = 100;
/// Names of pods, and reasons, in a message.
const MAX_NAMES: usize = 10;
const MAX_REASONS: usize = 3;

/// A route or a policy at one of its targets.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "Id", into = "Id")]
pub struct Subject {
    /// The kind of the object.
    pub kind: Kind,
    /// Its namespace and name.
    pub key: Key,
    /// The Service or the namespace that it concerns.
    pub target: Target,
}

/// The outcome of an object at a proxy. The worst comes first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Outcome {
    /// It rejects it, for this reason.
    Rejected(String),
    /// It is of an older release, and lacks the capability.
    Incapable,
    /// The pod has none.
    NoProxy,
    /// Its pod has as many rate limits as it can have.
    Surplus,
    /// Its pod has as many AuthorizationPolicies as it can have.
    TooLarge,
    /// Its pod has the telemetry of another Service.
    Replaced,
    /// It has not acknowledged the current state yet.
    Waiting,
    /// These ports of its pod bypass it.
    Bypassed(String),
    /// It does not read requests at these ports of its pod.
    Opaque(String),
    /// It applies it.
    Applied,
}

impl Outcome {
    /// The reason of the condition.
    fn reason(&self) -> &'static str {
        match self {
            Outcome::Rejected(_) => "Rejected",
            Outcome::Incapable => "ProxyLacksCapability",
            Outcome::NoProxy => "NoProxy",
            Outcome::Surplus => "TooManyRateLimits",
            Outcome::TooLarge => authorization::TOO_LARGE,
            Outcome::Replaced => "Replaced",
            Outcome::Waiting => "Pending",
            Outcome::Bypassed(_) | Outcome::Opaque(_) | Outcome::Applied => "Programmed",
        }
    }

    /// The worse one of two, if the other one holds.
    pub(crate) fn or_worse(self, holds: bool, other: Outcome) -> Outcome {
        if holds { self.min(other) } else { self }
    }

    /// Without what a proxy says, and without ports.
    fn without_text(&self) -> Outcome {
        match self {
            Outcome::Rejected(_) => Outcome::Rejected("".into()),
            Outcome::Bypassed(_) => Outcome::Bypassed("".into()),
            Outcome::Opaque(_) => Outcome::Opaque("".into()),
            other => other.clone(),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Rejected(reason) if reason.is_empty() => f.write_str("rejected"),
            Outcome::Rejected(reason) => write!(f, "rejected: {reason}"),
            Outcome::Incapable => f.write_str("the proxy is of an older release: restart the pod"),
            Outcome::Surplus => write!(
                f,
                "a pod has the rate limits of the {MAX_SERVICES} oldest Services that select it, \
                 at most {} KiB",
                MAX_BYTES / 1024
            ),
            Outcome::TooLarge => write!(
                f,
                "a pod has at most {} AuthorizationPolicies of {} KiB in all: this one denies the \
                 calls of its targets",
                authorization::MAX_POLICIES,
                authorization::MAX_BYTES / 1024
            ),
            Outcome::Replaced => {
                f.write_str("the telemetry of an older Service that selects the pod applies")
            }
            Outcome::NoProxy => f.write_str("no proxy: nothing is enforced"),
            Outcome::Waiting => f.write_str("not acknowledged yet"),
            Outcome::Bypassed(ports) => write!(f, "ports {ports} bypass the proxy"),
            Outcome::Opaque(ports) => write!(f, "ports {ports} are opaque: no request is matched"),
            Outcome::Applied => f.write_str("applied"),
        }
    }
}

/// The outcomes of an object at the connected proxies.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Progress {
    pods: usize,
    applied: usize,
    #[serde(skip_serializing_if = "Exceptions::is_empty")]
    exceptions: Exceptions,
    #[serde(skip_serializing_if = "Exceptions::is_empty")]
    waiting: Exceptions,
    /// Each replica computes it.
    #[serde(skip)]
    coverage: Coverage,
}

/// The pods that an AuthorizationPolicy selects, whatever they are connected to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Coverage {
    /// The number of pods with a proxy.
    pods: usize,
    /// The number of pods without a proxy.
    unproxied: usize,
    without_proxy: Exceptions,
    /// Ports at which the policy, or its rules about requests, have no effect.
    notes: Exceptions,
    /// The ports that the rules name and no pod declares.
    absent: BTreeSet<u32>,
}

impl Coverage {
    /// Adds a pod that a policy of a namespace selects.
    pub fn add(&mut self, namespace: &str, pod: &Key, outcome: &Outcome) {
        match outcome {
            Outcome::NoProxy => {
                self.unproxied += 1;
                self.without_proxy.add(namespace, pod, outcome);
            }
            Outcome::Bypassed(_) | Outcome::Opaque(_) => self.notes.add(namespace, pod, outcome),
            _ => self.pods += 1,
        }
    }

    /// Sets the ports that no pod declares.
    pub fn set_absent(&mut self, ports: BTreeSet<u32>) {
        self.absent = ports;
    }

    /// Whether a policy selects no pod.
    pub fn is_empty(&self) -> bool {
        self.pods + self.unproxied == 0
    }
}

/// Some ports, for a message.
pub fn shown<T: fmt::Display>(ports: impl Iterator<Item = T>) -> String {
    let mut ports: Vec<String> = ports.map(|port| port.to_string()).collect();
    if ports.len() > MAX_NAMES {
        ports.truncate(MAX_NAMES);
        ports.push("...".into());
    }
    ports.join(", ")
}

/// Proxies that do not apply an object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Exceptions {
    /// Some of the namespace of the object.
    named: Vec<(Outcome, Vec<String>)>,
    /// The numbers of the others, in order: of this namespace, and of other ones.
    more: Vec<(Outcome, [usize; 2])>,
}

impl Progress {
    /// The outcomes of an object of a namespace at these pods.
    pub fn of<'a>(namespace: &str, pods: impl Iterator<Item = (&'a Key, &'a Outcome)>) -> Progress {
        let mut progress = Progress::default();
        for (pod, outcome) in pods {
            progress.pods += 1;
            match outcome {
                Outcome::Applied => progress.applied += 1,
                Outcome::Waiting => progress.waiting.add(namespace, pod, outcome),
                _ => progress.exceptions.add(namespace, pod, outcome),
            }
        }
        progress
    }

    fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Adds what other pods do with the object.
    fn merge(&mut self, namespace: &str, other: &Progress) {
        self.pods += other.pods;
        self.applied += other.applied;
        self.exceptions.merge(namespace, &other.exceptions);
        self.waiting.merge(namespace, &other.waiting);
    }

    /// Adds the pods that are connected to no replica, and those without a proxy.
    fn cover(&mut self, coverage: Coverage) {
        let absent = coverage.pods.saturating_sub(self.pods);
        if absent > 0 {
            self.waiting.count(&Outcome::Waiting, [absent, 0]);
        }
        self.pods += absent + coverage.unproxied;
        self.exceptions.merge("", &coverage.without_proxy);
        self.coverage = coverage;
    }

    /// The same pods, before any of them acknowledges the current generation.
    fn outdated(&self) -> Progress {
        let mut outdated = Progress {
            pods: self.pods,
            ..Progress::default()
        };
        outdated.waiting.count(&Outcome::Waiting, [self.pods, 0]);
        outdated
    }
}

impl Exceptions {
    fn is_empty(&self) -> bool {
        self.named.is_empty() && self.more.is_empty()
    }

    fn merge(&mut self, namespace: &str, other: &Exceptions) {
        for (outcome, names) in &other.named {
            let pods = names.iter().map(|name| Key::new(namespace, name));
            pods.for_each(|pod| self.add(namespace, &pod, outcome));
        }
        let more = other.more.iter();
        more.for_each(|(outcome, counts)| self.count(outcome, *counts));
    }

    fn count(&mut self, outcome: &Outcome, [own, others]: [usize; 2]) {
        let at = self.more.partition_point(|(one, _)| one < outcome);
        if self.more.get(at).is_none_or(|(one, _)| one != outcome) {
            self.more.insert(at, (outcome.clone(), [0; 2]));
        }
        let counts = &mut self.more[at].1;
        *counts = [counts[0] + own, counts[1] + others];
    }

    fn add(&mut self, namespace: &str, pod: &Key, outcome: &Outcome) {
        let is_own = *pod.namespace == *namespace;
        let (reasons, named) = (self.named.len(), self.named.iter());
        let names: usize = named.map(|(_, names)| names.len()).sum();
        let is_named = is_own && names < MAX_NAMES;
        match self.named.iter_mut().find(|(one, _)| one == outcome) {
            Some((_, names)) if is_named => names.push(pod.name.to_string()),
            None if is_named && reasons < MAX_REASONS => {
                let names = vec![pod.name.to_string()];
                self.named.push((outcome.clone(), names));
            }
            _ => {
                let counts = [is_own, !is_own].map(usize::from);
                self.count(&outcome.without_text(), counts);
            }
        }
    }

    /// The worst outcome in the namespace of the object. Any meshed pod can report any outcome, so
    /// pods of other namespaces count in the message only.
    fn worst(&self) -> Option<&Outcome> {
        let named = self.named.iter().map(|(outcome, _)| outcome);
        let own = self.more.iter().filter(|(_, [own, _])| *own > 0);
        named.chain(own.map(|(outcome, _)| outcome)).min()
    }

    /// Whether it differs by more than the numbers of pods without a name.
    fn differs(&self, other: &Exceptions) -> bool {
        let kinds = |one: &Exceptions| {
            let more = one.more.iter();
            let kinds = more.map(|(outcome, count)| (outcome.clone(), count.map(|one| one > 0)));
            kinds.collect::<Vec<_>>()
        };
        self.named != other.named || kinds(self) != kinds(other)
    }

    fn describe(&self, namespace: &str) -> Vec<String> {
        let named = self.named.iter();
        let named = named.map(|(outcome, names)| format!("{} ({outcome})", names.join(", ")));
        let more = self.more.iter().flat_map(|(outcome, [own, others])| {
            let count = |count: usize, of: &str| match count {
                0 => None,
                1 => Some(format!("1 pod of {of} ({outcome})")),
                _ => Some(format!("{count} pods of {of} ({outcome})")),
            };
            let own = count(*own, &format!("namespace {namespace}"));
            [own, count(*others, "other namespaces")]
        });
        named.chain(more.flatten()).collect()
    }
}

/// The conditions.
#[derive(Debug, Default)]
pub struct Reports {
    reports: BTreeMap<Subject, Report>,
    /// The first review.
    started: Option<Instant>,
    /// The findings of the other replicas.
    pub exchange: Exchange,
    /// Whether reviews have run for [`HOLD_TIME`]: objects that this replica does not know then
    /// concern no proxy.
    is_complete: bool,
}

#[derive(Debug)]
struct Report {
    state: ReportState,
    /// The review that found this generation first, this state first, and any state last.
    generation_since: Instant,
    since: Instant,
    seen: Instant,
    /// The state in the condition, and the time since when it is there.
    written: Option<(ReportState, Instant)>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct ReportState {
    generation: i64,
    progress: Progress,
}

impl Reports {
    /// Updates the conditions to what a review has found, with the generations of the objects, and to
    /// what other replicas have. `covered` are AuthorizationPolicies that select pods. Returns the objects
    /// whose conditions change.
    pub fn update(
        &mut self,
        now: Instant,
        found: BTreeMap<Subject, (i64, Progress)>,
        covered: BTreeMap<Subject, (i64, Coverage)>,
    ) -> BTreeSet<ObjectId> {
        let started = *self.started.get_or_insert(now);
        self.is_complete = now.duration_since(started) >= HOLD_TIME;
        let mut found = self.exchange.merge(found);
        for (subject, (generation, coverage)) in covered {
            let new = (generation, Progress::default());
            found.entry(subject).or_insert(new).1.cover(coverage);
        }
        for (subject, (generation, progress)) in found {
            let state = ReportState {
                generation,
                progress,
            };
            match self.reports.get_mut(&subject) {
                Some(report) => report.update(now, state),
                None => drop(self.reports.insert(subject, Report::new(now, state))),
            }
        }
        let due = self.reports.iter();
        let due = due.filter(|(_, report)| report.is_due(now));
        let at = |report: &Report| report.written.as_ref().map(|(_, at)| *at);
        let due = due.map(|(subject, report)| (at(report), subject.clone()));
        let mut due: Vec<(Option<Instant>, Subject)> = due.collect();
        due.sort();
        let mut changed = BTreeSet::new();
        for (_, subject) in due {
            let id = (subject.kind, subject.key.clone());
            if changed.len() >= MAX_CHANGES && !changed.contains(&id) {
                continue;
            }
            changed.insert(id);
            match self.reports.get_mut(&subject) {
                Some(one) if one.seen == now => one.written = Some((one.state.clone(), now)),
                _ => drop(self.reports.remove(&subject)),
            }
        }
        self.reports
            .retain(|_, report| report.written.is_some() || report.seen == now);
        changed
    }

    /// Adds the conditions of an object to its status, where the object is accepted.
    pub fn add_to(&self, status: &mut ObjectStatus) {
        status.keeps_programmed |= !self.is_complete;
        for parent in &mut status.parents {
            let mut conditions = parent.conditions.iter();
            if !conditions.any(|one| one.kind == "Accepted" && one.holds) {
                continue;
            }
            let own = || Target::Namespace(status.key.namespace.clone());
            let target = match parent.parent.kind.as_deref() {
                // Its targets have one condition.
                _ if matches!(status.kind, Kind::Authorization | Kind::TrafficTarget) => own(),
                Some("Namespace") => own(),
                _ => Target::Service(parent.parent.key(&status.key)),
            };
            let subject = Subject {
                kind: status.kind,
                key: status.key.clone(),
                target,
            };
            let report = self.reports.get(&subject);
            let written = report.and_then(|report| report.written.as_ref());
            let condition = written.map(|(state, _)| state.condition(&subject));
            parent.conditions.extend(condition);
        }
    }
}

impl ReportState {
    fn condition(&self, subject: &Subject) -> Condition {
        let (generation, progress) = (self.generation, &self.progress);
        let all = [&progress.exceptions, &progress.waiting];
        let worst = all.into_iter().find_map(Exceptions::worst);
        let worst = worst.unwrap_or(&Outcome::Applied);
        let described = all.map(|one| one.describe(&subject.key.namespace)).concat();
        let exceptions = if described.is_empty() {
            String::new()
        } else {
            format!("; not: {}", described.join(", "))
        };
        let (applied, pods) = (progress.applied, progress.pods);
        let notes = progress.coverage.notes.describe(&subject.key.namespace);
        let absent = &progress.coverage.absent;
        let absent = (!absent.is_empty())
            .then(|| format!("no pod declares the ports {}", shown(absent.iter())));
        let notes = notes.into_iter().chain(absent);
        let notes: String = notes.map(|note| format!("; {note}")).collect();
        let message =
            format!("{applied} of {pods} pods have generation {generation}{exceptions}{notes}");
        let holds = *worst == Outcome::Applied;
        Condition {
            generation: Some(generation),
            ..Condition::new(PROGRAMMED, holds, worst.reason(), message)
        }
    }
}

impl Report {
    fn new(now: Instant, state: ReportState) -> Report {
        Report {
            state,
            generation_since: now,
            since: now,
            seen: now,
            written: None,
        }
    }

    fn update(&mut self, now: Instant, state: ReportState) {
        self.seen = now;
        if self.state.generation != state.generation {
            self.generation_since = now;
        }
        if self.state != state {
            (self.state, self.since) = (state, now);
        }
    }

    /// Whether its condition is to change.
    fn is_due(&self, now: Instant) -> bool {
        if self.seen != now {
            return self.written.is_some() && now.duration_since(self.seen) >= HOLD_TIME;
        }
        let age = now.duration_since(self.generation_since);
        if age < REVIEW_INTERVAL {
            return false;
        }
        let written = self.written.as_ref().map(|(state, _)| state);
        let is_new = written.is_none_or(|before| before.generation != self.state.generation);
        let (none, current) = (ReportState::default(), &self.state.progress);
        let before = &written.unwrap_or(&none).progress;
        let is_still = now.duration_since(self.since) >= STILL_TIME;
        current.exceptions.differs(&before.exceptions)
            || current.coverage.notes.differs(&before.coverage.notes)
            || current.coverage.absent != before.coverage.absent
            || (!current.is_waiting() && (is_new || before.is_waiting()))
            || (is_new && age >= STILL_TIME)
            || (is_still && current != before)
    }
}

#[cfg(test)]
mod tests;
