//! The outcomes of routes and policies at the proxies of the pods that they concern. Plain values,
//! which replicas also tell each other.
//!
//! The names of pods, and the reasons that they give, are for authors of their own namespace only.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::limits::{MAX_BYTES, MAX_SERVICES};
use crate::kinds::authorization;
use crate::kinds::policy::Target;
use crate::object::{Key, Kind};

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

/// The kind, namespace and name of an object, and of its target, which has no name if it is the
/// namespace.
type Id = (Kind, [String; 2], [String; 2]);

impl From<Subject> for Id {
    fn from(subject: Subject) -> Id {
        let pair = |key: &Key| [&key.namespace, &key.name].map(|part| part.to_string());
        let target = match &subject.target {
            Target::Service(key) => pair(key),
            Target::Namespace(name) => [name.to_string(), String::new()],
        };
        (subject.kind, pair(&subject.key), target)
    }
}

impl From<Id> for Subject {
    fn from((kind, [namespace, name], target): Id) -> Subject {
        let target = match target {
            [namespace, name] if name.is_empty() => Target::Namespace(namespace.into()),
            [namespace, name] => Target::Service(Key::new(&namespace, &name)),
        };
        let key = Key::new(&namespace, &name);
        Subject { kind, key, target }
    }
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
    pub(crate) fn reason(&self) -> &'static str {
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
    pub(crate) pods: usize,
    pub(crate) applied: usize,
    #[serde(skip_serializing_if = "Exceptions::is_empty")]
    pub(crate) exceptions: Exceptions,
    #[serde(skip_serializing_if = "Exceptions::is_empty")]
    pub(crate) waiting: Exceptions,
    /// Each replica computes it.
    #[serde(skip)]
    pub(crate) coverage: Coverage,
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
    pub(crate) notes: Exceptions,
    /// The ports that the rules name and no pod declares.
    pub(crate) absent: BTreeSet<u32>,
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
pub(crate) struct Exceptions {
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

    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Adds what other pods do with the object.
    pub(crate) fn merge(&mut self, namespace: &str, other: &Progress) {
        self.pods += other.pods;
        self.applied += other.applied;
        self.exceptions.merge(namespace, &other.exceptions);
        self.waiting.merge(namespace, &other.waiting);
    }

    /// Adds the pods that are connected to no replica, and those without a proxy.
    pub(crate) fn cover(&mut self, coverage: Coverage) {
        let absent = coverage.pods.saturating_sub(self.pods);
        if absent > 0 {
            self.waiting.count(&Outcome::Waiting, [absent, 0]);
        }
        self.pods += absent + coverage.unproxied;
        self.exceptions.merge("", &coverage.without_proxy);
        self.coverage = coverage;
    }

    /// The same pods, before any of them acknowledges the current generation.
    pub(crate) fn outdated(&self) -> Progress {
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
    pub(crate) fn worst(&self) -> Option<&Outcome> {
        let named = self.named.iter().map(|(outcome, _)| outcome);
        let own = self.more.iter().filter(|(_, [own, _])| *own > 0);
        named.chain(own.map(|(outcome, _)| outcome)).min()
    }

    /// Whether it differs by more than the numbers of pods without a name.
    pub(crate) fn differs(&self, other: &Exceptions) -> bool {
        let kinds = |one: &Exceptions| {
            let more = one.more.iter();
            let kinds = more.map(|(outcome, count)| (outcome.clone(), count.map(|one| one > 0)));
            kinds.collect::<Vec<_>>()
        };
        self.named != other.named || kinds(self) != kinds(other)
    }

    pub(crate) fn describe(&self, namespace: &str) -> Vec<String> {
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
