//! The condition `Enforced` of routes and policies: False while connected proxies of an older
//! release, or pods with too many rate limits, do not apply them, else absent. Pure.
//!
//! Any meshed pod can connect, disconnect and subscribe as it likes. Therefore a condition, once
//! set, stays as it is for `HOLD_TIME`, and few of them change at a time. The names of pods are for
//! authors of their own namespace only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::attach::RouteId;
use super::{Condition, RouteStatus};
use crate::index::enforcement::{Cause, Subject};
use crate::index::limits::{MAX_BYTES, MAX_SERVICES};
use crate::index::object::{Key, Kind};
use crate::policy::Target;

/// The type of the condition.
pub const ENFORCED: &str = "diy-service-mesh.dev/Enforced";
const PROXY_LACKS_CAPABILITY: &str = "ProxyLacksCapability";
const TOO_MANY_RATE_LIMITS: &str = "TooManyRateLimits";
/// Time that a condition stays after the last such proxy, and that its message stays at least.
/// Streams end and begin again within this time.
const HOLD_TIME: Duration = Duration::from_secs(300);
/// Conditions that an update changes at most: each of them is two requests to the API server.
const MAX_CHANGES: usize = 20;
/// Names in a message.
const MAX_NAMES: usize = 3;

/// The pods whose proxies do not apply an object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pods {
    /// Some of those in the namespace of the object.
    names: Vec<Arc<str>>,
    own: usize,
    others: usize,
}

impl Pods {
    /// Adds a pod, for an object of a namespace.
    pub fn add(&mut self, pod: &Key, namespace: &str) {
        if *pod.namespace != *namespace {
            self.others += 1;
            return;
        }
        self.own += 1;
        if self.names.len() < MAX_NAMES {
            self.names.push(pod.name.clone());
        }
    }

    /// What the author of the object is told.
    fn message(&self, subject: &Subject) -> String {
        if subject.cause == Cause::RateLimits {
            return format!(
                "rate limits of this policy do not apply to some pods, such as {}: a pod has those \
                 of the {MAX_SERVICES} oldest Services that select it, at most {} KiB",
                self.names.join(", "),
                MAX_BYTES / 1024
            );
        }
        let count = |count: usize, of: &str| match count {
            1 => format!("1 pod of {of}"),
            _ => format!("{count} pods of {of}"),
        };
        let mut all = Vec::new();
        if self.own > 0 {
            let more = match self.own - self.names.len() {
                0 => String::new(),
                _ => ", ...".to_owned(),
            };
            let pods = count(self.own, &format!("namespace {}", subject.key.namespace));
            all.push(format!("{pods} ({}{more})", self.names.join(", ")));
        }
        if self.others > 0 {
            all.push(count(self.others, "other namespaces"));
        }
        let what = match subject.kind {
            Kind::TrafficPolicy => "do not apply all of this policy",
            _ => "do not apply this route",
        };
        format!(
            "proxies of an older release {what}: those of {}; restart these pods, \
             so that they get the current proxy",
            all.join(" and ")
        )
    }
}

/// The conditions.
#[derive(Debug, Default)]
pub struct Reports(BTreeMap<Subject, Report>);

#[derive(Debug)]
struct Report {
    message: String,
    since: Instant,
    /// The last time that a proxy did not apply the object.
    seen: Instant,
}

impl Reports {
    /// Updates the conditions to what a review has found. Returns the objects that they concern.
    pub fn update(&mut self, now: Instant, found: &BTreeMap<Subject, Pods>) -> BTreeSet<RouteId> {
        let mut changed = BTreeSet::new();
        let mut changes = 0;
        let mut change = |subject: &Subject| {
            let is_permitted = changes < MAX_CHANGES;
            if is_permitted {
                changes += 1;
                changed.insert((subject.kind, subject.key.clone()));
            }
            is_permitted
        };
        let is_held = |since: Instant| now.duration_since(since) < HOLD_TIME;
        self.0.retain(|subject, report| {
            if found.contains_key(subject) {
                report.seen = now;
            }
            is_held(report.seen) || !change(subject)
        });
        for (subject, pods) in found {
            let message = pods.message(subject);
            let known = self.0.get(subject);
            let is_unchanged =
                known.is_some_and(|known| known.message == message || is_held(known.since));
            if !is_unchanged && change(subject) {
                let report = Report {
                    message,
                    since: now,
                    seen: now,
                };
                self.0.insert(subject.clone(), report);
            }
        }
        changed
    }

    /// Adds the conditions of an object to its status, where the object is accepted.
    pub fn add_to(&self, status: &mut RouteStatus) {
        if self.0.is_empty() {
            return;
        }
        for parent in &mut status.parents {
            let mut conditions = parent.conditions.iter();
            if !conditions.any(|one| one.kind == "Accepted" && one.holds) {
                continue;
            }
            let target = match parent.parent.kind.as_deref() {
                Some("Namespace") => Target::Namespace(status.key.namespace.clone()),
                _ => Target::Service(parent.parent.key(&status.key)),
            };
            let causes = [
                (Cause::Capability, PROXY_LACKS_CAPABILITY),
                (Cause::RateLimits, TOO_MANY_RATE_LIMITS),
            ];
            let condition = causes.into_iter().find_map(|(cause, reason)| {
                let report = self.0.get(&Subject {
                    kind: status.kind,
                    key: status.key.clone(),
                    target: target.clone(),
                    cause,
                })?;
                Some(Condition::new(
                    ENFORCED,
                    false,
                    reason,
                    report.message.clone(),
                ))
            });
            parent.conditions.extend(condition);
        }
    }
}

#[cfg(test)]
mod tests;
