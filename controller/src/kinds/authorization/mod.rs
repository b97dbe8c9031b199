//! AuthorizationPolicies: who may call which pods, and what pods may call outside of the cluster. Pure.
//!
//! `parse.rs` reads objects, and `crate::index::authorization` selects the policies of each pod, whose
//! proxy enforces them. A policy that is invalid denies the calls that it could be about.

pub mod keys;
pub mod parse;
pub mod server;
pub mod spec;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use prost::Message;
use proto::authorization_policy::Action;

use super::smi::traffic_target;
use crate::object::condition::{ALLOWS_ALL, FIELDS_DROPPED};
use crate::object::issuer_keys::{Entry, Source};
use crate::object::version::{self, Version};
use crate::object::{Checked, Condition, Key, Meta, Rejection, TargetReference};
use keys::Fetched;
use server::Server;
use spec::{Requirement, Selector};

/// The length of the policies of a pod in a message. Each pod has a copy.
pub(crate) const MAX_BYTES: usize = 256 * 1024;
/// Policies of a pod.
pub(crate) const MAX_POLICIES: usize = 1000;

/// The reasons of conditions that do not hold.
pub(crate) const INVALID: &str = "Invalid";
const TARGET_NOT_FOUND: &str = "TargetNotFound";
/// See [`INVALID`].
pub(crate) const TOO_LARGE: &str = "TooLarge";

/// An AuthorizationPolicy. Its parents are the targets. One that is invalid has a content too, which
/// denies.
pub type AuthorizationPolicy = Checked<Arc<Content>>;

/// The targets of a policy, and its effect on their calls.
#[derive(Debug, PartialEq)]
pub struct Content {
    /// In the order of the parents.
    pub targets: Arc<[Target]>,
    /// The calls that it is about: of both directions, if the direction cannot be read.
    pub directions: &'static [Direction],
    /// The effect on these calls.
    pub effect: Effect,
}

/// The direction of calls, seen from a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Calls to the pod.
    Inbound,
    /// Calls by the pod to outside of the cluster.
    Outbound,
}

impl Direction {
    /// Both directions.
    pub const ALL: [Direction; 2] = [Direction::Inbound, Direction::Outbound];
}

/// Pods.
#[derive(Debug, PartialEq)]
pub enum Target {
    /// By their labels.
    Pods(Selector),
    /// Pods that a Service selects, at its target ports.
    Service(Key),
    /// Pods that run under a service account of the namespace.
    ServiceAccount(String),
}

/// The effect of a policy.
#[derive(Debug, PartialEq)]
pub enum Effect {
    /// Its rules match calls.
    Rules(Arc<Rules>),
    /// It sets the default: whether calls are denied that no policy is about.
    Default {
        /// Whether they are.
        deny: bool,
    },
}

/// Whether a policy refuses calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// It does.
    Enforce,
    /// It counts the calls that it would refuse.
    Audit,
}

/// The rules of a policy. All pods that it selects share them.
#[derive(Debug)]
pub struct Rules {
    /// The message. Its ports are the ports of the scope.
    pub message: proto::AuthorizationPolicy,
    /// The digest.
    pub version: Version,
    /// The length of the message.
    pub bytes: usize,
    /// The keys of issuers that the status has, or lacks.
    pub fetched: Vec<Fetched>,
    /// The external authorization servers.
    pub servers: Vec<Server>,
}

impl Rules {
    /// The rules of this message.
    pub fn new(message: proto::AuthorizationPolicy) -> Rules {
        Self::with_references(message, vec![], vec![])
    }

    /// The rules of this message, with keys from the status of the policy, and servers.
    pub fn with_references(
        message: proto::AuthorizationPolicy,
        fetched: Vec<Fetched>,
        servers: Vec<Server>,
    ) -> Rules {
        let encoded = message.encode_to_vec();
        Rules {
            message,
            version: version::of("authorization policy", &encoded),
            bytes: encoded.len(),
            fetched,
            servers,
        }
    }

    /// The mode.
    pub fn mode(&self) -> Mode {
        if self.message.audit {
            Mode::Audit
        } else {
            Mode::Enforce
        }
    }
}

impl PartialEq for Rules {
    fn eq(&self, other: &Rules) -> bool {
        self.version == other.version && self.fetched == other.fetched
    }
}

impl Effect {
    /// Denies every call.
    pub fn denying(key: &Key, mode: Mode) -> Effect {
        Effect::Rules(Arc::new(Rules::new(denying(name(key), mode))))
    }
}

/// "AuthorizationPolicy NAMESPACE/NAME", for logs and responses.
pub fn name(key: &Key) -> String {
    let (kind, key) = traffic_target::id(key);
    format!("{kind} {key}")
}

/// A policy with this name that denies every call: no proxy knows the revision of its rule.
pub fn denying(name: String, mode: Mode) -> proto::AuthorizationPolicy {
    proto::AuthorizationPolicy {
        name,
        action: Action::Deny.into(),
        audit: mode == Mode::Audit,
        rules: vec![proto::AuthorizationRule {
            revision: u32::MAX,
            ..proto::AuthorizationRule::default()
        }],
        ..proto::AuthorizationPolicy::default()
    }
}

impl AuthorizationPolicy {
    /// A policy. With a rejection, it denies the calls of its targets.
    pub fn with(
        meta: Meta,
        parents: Vec<TargetReference>,
        targets: Arc<[Target]>,
        directions: &'static [Direction],
        effect: Result<Effect, (Rejection, Mode)>,
    ) -> AuthorizationPolicy {
        let (effect, invalid) = match effect {
            Ok(effect) => (effect, None),
            Err((rejection, mode)) => (Effect::denying(&meta.key, mode), Some(rejection)),
        };
        let content = Arc::new(Content {
            targets,
            directions,
            effect,
        });
        let mut policy = Checked::new(meta, parents, Ok(content));
        policy.invalid = invalid;
        policy
    }

    /// The targets and what applies to them.
    pub fn applied(&self) -> &Content {
        self.content.as_ref().expect("an invalid policy denies")
    }

    /// Whether it is about the calls of a direction.
    pub fn is_about(&self, direction: Direction) -> bool {
        self.applied().directions.contains(&direction)
    }

    /// The policy as one of the namespace of the mesh: an ALLOW there covers only ports that it names.
    pub fn of_mesh(mut self) -> AuthorizationPolicy {
        if let Effect::Rules(rules) = &self.applied().effect
            && rules.message.action() == Action::Allow
            && rules.message.ports.is_empty()
        {
            let effect = Effect::denying(&self.key, rules.mode());
            let content = self.applied();
            self.content = Ok(Arc::new(Content {
                targets: content.targets.clone(),
                directions: content.directions,
                effect,
            }));
            let message = "spec.scope: an ALLOW in the namespace of the mesh requires Ports";
            self.invalid = Some(Rejection::new(INVALID, message.to_owned()));
        }
        self
    }

    /// Its rules, unless it sets the default.
    pub fn rules(&self) -> Option<&Rules> {
        match &self.applied().effect {
            Effect::Rules(rules) => Some(rules),
            Effect::Default { .. } => None,
        }
    }

    /// The external authorization server.
    pub fn server(&self) -> Option<&Server> {
        self.rules()?.servers.first()
    }

    /// The keys of issuers that the status has, or lacks.
    pub fn fetched(&self) -> &[Fetched] {
        self.rules().map_or(&[], |rules| &rules.fetched)
    }

    /// Where the keys of issuers are that the policy does not have, for its status.
    pub fn issuers(&self) -> Vec<(Source, Entry)> {
        let sources = self.fetched().iter().map(|one| one.source.clone());
        let sources: BTreeSet<Source> = sources.collect();
        let entry = |source| (source, Entry::default());
        sources.into_iter().map(entry).collect()
    }

    /// The condition at a target. `effect`: the effect of an invalid policy, for the message.
    pub fn accepted(&self, target: &Target, exists: bool, effect: &str) -> Condition {
        let (reason, message) = match self.rejection() {
            Some(Rejection {
                reason, message, ..
            }) => (*reason, format!("{message}; {effect}")),
            None if !exists => (
                TARGET_NOT_FOUND,
                format!("the {target} does not exist, is an ExternalName, or has no selector"),
            ),
            None => ("Accepted", format!("the policy applies to the {target}")),
        };
        Condition::new("Accepted", reason == "Accepted", reason, message)
    }

    /// The condition of an ALLOW that has a rule without a caller, destination or request.
    pub fn allows_all(&self) -> Option<Condition> {
        let policy = &self.rules()?.message;
        let mut rules = policy.rules.iter();
        let at = rules.position(|rule| {
            rule.sources.is_none() && rule.not_sources.is_empty() && rule.requests.is_empty()
        });
        let at = at.filter(|_| policy.action() == Action::Allow)?;
        let (fields, all) = if self.is_about(Direction::Outbound) {
            ("destinations", "every destination")
        } else {
            ("sources and no requests", "every caller")
        };
        let ports = if policy.rules[at].ports.is_empty() {
            ""
        } else {
            " at its ports"
        };
        let message = format!("spec.rules[{at}] has no {fields}: it allows {all}{ports}");
        let (reason, message) = match &self.dropped {
            Some(dropped) => (FIELDS_DROPPED, format!("{message}; {dropped}")),
            None => ("RuleWithoutConditions", message),
        };
        Some(Condition::new(ALLOWS_ALL, true, reason, message))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Pods(selector) => write!(f, "pods with the labels {selector}"),
            Target::Service(key) => write!(f, "Service {key}"),
            Target::ServiceAccount(name) => write!(f, "service account {name}"),
        }
    }
}

impl Selector {
    /// Whether it selects pods with these labels.
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        let mut equal = self.match_labels.iter();
        let mut expressions = self.match_expressions.iter();
        equal.all(|(name, value)| labels.get(name) == Some(value))
            && expressions.all(|one| one.holds(labels))
    }
}

impl Requirement {
    fn holds(&self, labels: &BTreeMap<String, String>) -> bool {
        let label = labels.get(&self.key);
        let is_listed = || {
            let mut values = self.values.iter().flatten();
            values.any(|value| Some(value) == label)
        };
        match &*self.operator {
            "In" => is_listed(),
            "NotIn" => !is_listed(),
            "Exists" => label.is_some(),
            _ => label.is_none(),
        }
    }
}

/// As kubectl has it. `*`: all pods.
impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let equal = self.match_labels.iter();
        let equal = equal.map(|(name, value)| format!("{name}={value}"));
        let expressions = self.match_expressions.iter().map(|one| {
            let (key, values) = (&one.key, one.values.as_deref().unwrap_or_default());
            match &*one.operator {
                "In" => format!("{key} in ({})", values.join(",")),
                "NotIn" => format!("{key} notin ({})", values.join(",")),
                "Exists" => key.clone(),
                _ => format!("!{key}"),
            }
        });
        let all: Vec<String> = equal.chain(expressions).collect();
        if all.is_empty() {
            return f.write_str("*");
        }
        f.write_str(&all.join(","))
    }
}

#[cfg(test)]
pub(crate) mod tests;
