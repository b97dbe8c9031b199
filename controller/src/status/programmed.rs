//! The condition `Programmed` of routes and policies: what the proxies of the pods that they concern
//! do with them, whatever replica they are connected to. Pure.
//!
//! Any meshed pod can connect, disconnect, acknowledge and reject as it likes. Therefore a condition
//! changes once per review at most, only a limited number of them does, and while proxies are still
//! to acknowledge an object, other counts alone are no change. The names of pods, and the reasons
//! that they give, are for authors of their own namespace only.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::replicas::exchange::Exchange;

use crate::index::outcome::{Coverage, Exceptions, Outcome, Progress, Subject, shown};
use crate::kinds::policy::Target;
use crate::object::{Condition, Kind, ObjectId, ObjectStatus};

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
