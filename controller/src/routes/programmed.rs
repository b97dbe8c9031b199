//! The condition `Programmed` of routes and policies: what the connected proxies of the pods that
//! they concern do with them. Pure.
//!
//! Any meshed pod can connect, disconnect, acknowledge and reject as it likes. Therefore a condition
//! changes once per review at most, only a limited number of them does, and while proxies are still
//! to acknowledge an object, other counts alone are no change. The names of pods, and the reasons
//! that they give, are for authors of their own namespace only.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::attach::RouteId;
use super::{Condition, RouteStatus};
use crate::authorization;
use crate::index::limits::{MAX_BYTES, MAX_SERVICES};
use crate::index::object::{Key, Kind};
use crate::policy::Target;

/// The type of the condition.
pub const PROGRAMMED: &str = "diy-service-mesh.dev/Programmed";
/// Time between two reviews, at least. The states of an object that is known for this time are
/// published.
pub const REVIEW_INTERVAL: Duration = Duration::from_secs(10);
/// Time after which proxies that are still to acknowledge an object are named, and other counts are
/// written.
const STILL_TIME: Duration = Duration::from_secs(60);
/// Time that a condition stays after the last pod that it concerns, and that the condition of an
/// earlier replica stays: the proxies connect to this one within this time.
const HOLD_TIME: Duration = Duration::from_secs(300);
/// Objects whose condition a review changes at most, those with the oldest ones first: each is two
/// requests to the API server.
const MAX_CHANGES: usize = 100;
/// Names of pods, and reasons, in a message.
const MAX_NAMES: usize = 10;
const MAX_REASONS: usize = 3;

/// A route or a policy at one of its targets.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subject {
    /// The kind of the object.
    pub kind: Kind,
    /// Its namespace and name.
    pub key: Key,
    /// The Service or the namespace that it concerns.
    pub target: Target,
}

/// What a proxy does with an object. The worst comes first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// It rejects it, for this reason.
    Rejected(Arc<str>),
    /// It is of an older release, and lacks the capability.
    Incapable,
    /// Its pod has as many rate limits as it can have.
    Surplus,
    /// Its pod has as many AuthorizationPolicies as it can have.
    TooLarge,
    /// It has not acknowledged the current state yet.
    Waiting,
    /// It applies it.
    Applied,
}

impl Outcome {
    /// The reason of the condition.
    fn reason(&self) -> &'static str {
        match self {
            Outcome::Rejected(_) => "Rejected",
            Outcome::Incapable => "ProxyLacksCapability",
            Outcome::Surplus => "TooManyRateLimits",
            Outcome::TooLarge => authorization::TOO_LARGE,
            Outcome::Waiting => "Pending",
            Outcome::Applied => "Programmed",
        }
    }

    /// Without what a proxy says.
    fn without_text(&self) -> Outcome {
        match self {
            Outcome::Rejected(_) => Outcome::Rejected("".into()),
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
            Outcome::Waiting => f.write_str("not acknowledged yet"),
            Outcome::Applied => f.write_str("applied"),
        }
    }
}

/// What the connected proxies do with an object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    pods: usize,
    applied: usize,
    exceptions: Exceptions,
    waiting: Exceptions,
}

/// Proxies that do not apply an object.
#[derive(Clone, Debug, Default, PartialEq)]
struct Exceptions {
    /// Some of the namespace of the object.
    named: Vec<(Outcome, Vec<Arc<str>>)>,
    /// The numbers of the others: of this namespace, and of other ones.
    more: BTreeMap<Outcome, [usize; 2]>,
}

impl Progress {
    /// What these pods do with an object of a namespace.
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
        self.waiting != Exceptions::default()
    }
}

impl Exceptions {
    fn add(&mut self, namespace: &str, pod: &Key, outcome: &Outcome) {
        let is_own = *pod.namespace == *namespace;
        let (reasons, named) = (self.named.len(), self.named.iter());
        let names: usize = named.map(|(_, names)| names.len()).sum();
        let is_named = is_own && names < MAX_NAMES;
        match self.named.iter_mut().find(|(one, _)| one == outcome) {
            Some((_, names)) if is_named => names.push(pod.name.clone()),
            None if is_named && reasons < MAX_REASONS => {
                self.named.push((outcome.clone(), vec![pod.name.clone()]));
            }
            _ => {
                let [own, others] = self.more.entry(outcome.without_text()).or_default();
                *(if is_own { own } else { others }) += 1;
            }
        }
    }

    fn worst(&self) -> Option<&Outcome> {
        let named = self.named.iter().map(|(outcome, _)| outcome);
        named.chain(self.more.keys()).min()
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
    /// What this replica does not know of concerns no proxy.
    is_complete: bool,
}

#[derive(Debug)]
struct Report {
    state: ReportState,
    /// The review that found this generation first, this state first, and any state last.
    generation_since: Instant,
    since: Instant,
    seen: Instant,
    /// What the condition says, and since when.
    written: Option<(ReportState, Instant)>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct ReportState {
    generation: i64,
    progress: Progress,
}

impl Reports {
    /// Updates the conditions to what a review has found, with the generations of the objects.
    /// Returns the objects whose conditions change.
    pub fn update(
        &mut self,
        now: Instant,
        found: BTreeMap<Subject, (i64, Progress)>,
    ) -> BTreeSet<RouteId> {
        let started = *self.started.get_or_insert(now);
        self.is_complete = now.duration_since(started) >= HOLD_TIME;
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
    pub fn add_to(&self, status: &mut RouteStatus) {
        status.keeps_programmed |= !self.is_complete;
        for parent in &mut status.parents {
            let mut conditions = parent.conditions.iter();
            if !conditions.any(|one| one.kind == "Accepted" && one.holds) {
                continue;
            }
            let own = || Target::Namespace(status.key.namespace.clone());
            let target = match parent.parent.kind.as_deref() {
                // Its targets have one condition.
                _ if status.kind == Kind::Authorization => own(),
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
        let message = format!(
            "{applied} of {pods} pods connected to the writing replica have generation \
                 {generation}{exceptions}"
        );
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
            || (!current.is_waiting() && (is_new || before.is_waiting()))
            || (is_new && age >= STILL_TIME)
            || (is_still && current != before)
    }
}

#[cfg(test)]
mod tests;
