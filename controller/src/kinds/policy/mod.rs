//! TrafficPolicies: how clients use a Service, and what its requests may do. Pure.
//!
//! A policy is for Services of its own namespace, or for all of them. `parse.rs` reads objects, and
//! `crate::index::policies` applies them to the catalog. Sections are messages of the contract with
//! the proxies, whose values `diy_mesh_proto::policy` checks for both sides.

pub mod parse;
pub mod spec;
pub mod telemetry;

use std::fmt;
use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use prost::Message;

use super::route::attach::Table;
use super::route::model::{RequestSettings, Rule};
use super::service::ServicePort;
use crate::object::version::{self, Version};
use crate::object::{Checked, Condition, Key, TargetReference};

/// The reasons of conditions that do not hold (GEP-713).
const INVALID: &str = "Invalid";
const CONFLICTED: &str = "Conflicted";
const TARGET_NOT_FOUND: &str = "TargetNotFound";

/// A TrafficPolicy. Its parents are the targets.
pub type Policy = Checked<Arc<Settings>>;

/// The target of a policy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// A Service.
    Service(Key),
    /// All Services of a namespace.
    Namespace(Arc<str>),
}

/// The sections of a policy. Sections for a Service replace the sections for its namespace, one by
/// one.
#[derive(Debug, Default, PartialEq)]
pub struct Settings {
    /// "TrafficPolicy NAMESPACE/NAME", for logs and metrics.
    pub name: String,
    /// `loadBalancing`
    pub balancing: Option<proto::Balancing>,
    /// `connections`
    pub connections: Option<proto::ConnectionLimits>,
    /// `outlierDetection`
    pub outlier_detection: Option<proto::OutlierDetection>,
    /// `circuitBreaker`
    pub circuit_breaker: Option<proto::CircuitBreaker>,
    /// `retry`
    pub retry: Option<RetrySettings>,
    /// `timeouts`: of a request and of an attempt, in milliseconds.
    pub timeouts: Option<[Option<u64>; 2]>,
    /// `sessionPersistence`
    pub session: Option<proto::SessionPersistence>,
    /// `rateLimits`, without ports and replicas.
    pub rate_limits: Option<Arc<[proto::RateLimit]>>,
    /// `faults`
    pub faults: Option<Arc<Faults>>,
    /// `telemetry`
    pub telemetry: Option<Arc<proto::Telemetry>>,
}

/// Faults with their digest: all ports of all Services of a namespace may have them.
#[derive(Debug)]
pub struct Faults {
    /// The faults.
    pub list: Vec<proto::Fault>,
    /// The digest.
    pub version: Version,
}

impl Faults {
    /// These faults.
    pub fn new(list: Vec<proto::Fault>) -> Faults {
        let encoded: Vec<Vec<u8>> = list.iter().map(Message::encode_to_vec).collect();
        let version = version::of("faults", &encoded);
        Faults { list, version }
    }
}

impl PartialEq for Faults {
    fn eq(&self, other: &Faults) -> bool {
        self.version == other.version
    }
}

/// Who applies sections of a policy, and with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The proxies of clients, with the routes of the Service.
    Requests,
    /// The proxies of clients, with its endpoints.
    Endpoints,
    /// The proxies of the pods of the Service.
    Pods,
    /// The proxies of the pods too, but no calls depend on it. Its parts replace the parts for the
    /// namespace one by one.
    Telemetry,
}

/// The section `retry`.
#[derive(Debug, Default, PartialEq)]
pub struct RetrySettings {
    /// The conditions and number of retries. `None`: the default of the proxy.
    pub retry: Option<proto::RouteRetry>,
    /// The share of retries.
    pub budget: Option<proto::RetryBudget>,
}

/// The policy of a Service, from its own sections and the sections of its namespace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Effective {
    /// How clients use its endpoints.
    pub backend: Option<Arc<proto::BackendPolicy>>,
    /// The settings of requests that its routes leave open.
    pub requests: Requests,
    /// Limits of the requests to its pods, without ports and replicas.
    pub rate_limits: Option<Arc<[proto::RateLimit]>>,
    /// The telemetry settings of its pods.
    pub telemetry: Option<Arc<proto::Telemetry>>,
}

/// The settings of requests, for rules without their own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Requests {
    /// The name of the rule for requests that no route concerns.
    name: String,
    /// The settings of requests whose rule has none.
    pub settings: RequestSettings,
    /// Injected before rules apply.
    pub faults: Option<Arc<Faults>>,
}

impl Settings {
    /// The sections of a side that the policy has, and whether each has an effect there.
    pub fn sections(&self, side: Side) -> Vec<Option<bool>> {
        let has = |is_set: bool| is_set.then_some(true);
        let retry = self.retry.as_ref();
        match side {
            Side::Requests => vec![
                has(self.timeouts.is_some()),
                has(self.session.is_some()),
                has(self.faults.is_some()),
                retry.map(|retry| retry.retry.is_some()),
            ],
            Side::Endpoints => vec![
                has(self.balancing.is_some()),
                has(self.connections.is_some()),
                has(self.outlier_detection.is_some()),
                has(self.circuit_breaker.is_some()),
                retry.map(|retry| retry.budget.is_some()),
            ],
            Side::Pods => vec![has(self.rate_limits.is_some())],
            Side::Telemetry => {
                let telemetry = self.telemetry.as_ref();
                telemetry.map_or(vec![None; 3], |one| {
                    vec![
                        has(one.dump.is_some()),
                        has(one.access_logs.is_some()),
                        has(one.tracing.is_some()),
                    ]
                })
            }
        }
    }

    /// Whether the policy has a section with an effect on a side.
    fn concerns(&self, side: Side) -> bool {
        self.sections(side).contains(&Some(true))
    }
}

impl Policy {
    /// The targets, with their references. `None`: something else, or of another namespace.
    pub fn targets(&self) -> impl Iterator<Item = (&TargetReference, Option<Target>)> {
        let targets = self.parents.iter();
        targets.map(|reference| (reference, self.target(reference)))
    }

    /// The target of a reference. `None`: another kind, or another namespace.
    pub fn target(&self, reference: &TargetReference) -> Option<Target> {
        let namespace = &self.key.namespace;
        let is_core = matches!(reference.group.as_deref(), None | Some("" | "core"));
        match reference.kind.as_deref().filter(|_| is_core)? {
            "Service" => Some(Target::Service(Key::new(namespace, &reference.name))),
            "Namespace" if *reference.name == **namespace => {
                Some(Target::Namespace(namespace.clone()))
            }
            _ => None,
        }
    }

    /// The condition at a target that the policy `applied` has.
    pub fn accepted(&self, target: Option<&Target>, exists: bool, applied: &Key) -> Condition {
        let (reason, message) = match (self.rejection(), target) {
            (Some(rejection), _) => return rejection.condition(),
            (None, None) => (INVALID, "it is no Service of the namespace".to_owned()),
            (None, Some(target)) if !exists => (
                TARGET_NOT_FOUND,
                format!("the {target} does not exist, or is an ExternalName"),
            ),
            (None, Some(target)) if *applied != self.key => (
                CONFLICTED,
                format!("TrafficPolicy {applied}, which is older, applies to the {target}"),
            ),
            (None, Some(target)) => ("Accepted", format!("the policy applies to the {target}")),
        };
        Condition::new("Accepted", reason == "Accepted", reason, message)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Service(key) => write!(f, "Service {key}"),
            Target::Namespace(name) => write!(f, "namespace {name}"),
        }
    }
}

impl Effective {
    /// Merges the sections of a Service and of its namespace. `None` without any.
    pub fn of(own: Option<&Settings>, inherited: Option<&Settings>) -> Option<Effective> {
        let layers = [own, inherited].into_iter().flatten();
        let effective = Effective {
            backend: backend(layers.clone()).map(Arc::new),
            requests: requests(layers.clone()),
            rate_limits: first(layers.clone(), |one| &one.rate_limits).cloned(),
            telemetry: telemetry(layers),
        };
        (effective != Effective::default()).then_some(effective)
    }

    /// Whether the proxies of clients apply it, and not only the proxies of the pods.
    pub fn concerns_clients(&self) -> bool {
        self.backend.is_some() || self.requests != Requests::default()
    }
}

/// A section of the first policy that has it.
fn first<'a, T>(
    mut layers: impl Iterator<Item = &'a Settings>,
    section: fn(&Settings) -> &Option<T>,
) -> Option<&'a T> {
    layers.find_map(|one| section(one).as_ref())
}

fn backend<'a>(layers: impl Iterator<Item = &'a Settings> + Clone) -> Option<proto::BackendPolicy> {
    let names = layers.clone().filter(|one| one.concerns(Side::Endpoints));
    let names: Vec<&str> = names.map(|one| &*one.name).collect();
    let retry = first(layers.clone(), |one| &one.retry);
    let policy = proto::BackendPolicy {
        name: names.join(", "),
        balancing: first(layers.clone(), |one| &one.balancing).cloned(),
        connections: first(layers.clone(), |one| &one.connections).cloned(),
        outlier_detection: first(layers.clone(), |one| &one.outlier_detection).cloned(),
        circuit_breaker: first(layers, |one| &one.circuit_breaker).cloned(),
        retry_budget: retry.and_then(|retry| retry.budget),
    };
    (!names.is_empty()).then_some(policy)
}

fn telemetry<'a>(layers: impl Iterator<Item = &'a Settings>) -> Option<Arc<proto::Telemetry>> {
    let mut layers = layers.filter_map(|one| one.telemetry.as_ref());
    let own = layers.next()?;
    let Some(inherited) = layers.next() else {
        return Some(own.clone());
    };
    let mut merged = proto::Telemetry::clone(own);
    merged.name = format!("{}, {}", own.name, inherited.name);
    set_absent(&mut merged.dump, &inherited.dump);
    set_absent(&mut merged.access_logs, &inherited.access_logs);
    set_absent(&mut merged.tracing, &inherited.tracing);
    Some(Arc::new(merged))
}

fn set_absent<T: Clone>(part: &mut Option<T>, inherited: &Option<T>) {
    if part.is_none() {
        part.clone_from(inherited);
    }
}

fn requests<'a>(layers: impl Iterator<Item = &'a Settings> + Clone) -> Requests {
    let first_layer = layers.clone().find(|one| one.concerns(Side::Requests));
    Requests {
        name: first_layer.map_or(String::new(), |one| one.name.clone()),
        settings: RequestSettings {
            timeouts: first(layers.clone(), |one| &one.timeouts)
                .copied()
                .unwrap_or_default(),
            retry: first(layers.clone(), |one| &one.retry).and_then(|one| one.retry.clone()),
            session: first(layers.clone(), |one| &one.session).cloned(),
        },
        faults: first(layers, |one| &one.faults)
            .filter(|faults| !faults.list.is_empty())
            .cloned(),
    }
}

impl Requests {
    /// The table of a Service port without routes. `None`: no settings.
    pub fn table(&self, service: &Key, port: &ServicePort) -> Option<Table> {
        let unnamed = Requests {
            name: String::new(),
            ..self.clone()
        };
        if unnamed == Requests::default() {
            return None;
        }
        let shared = proto::RouteRule {
            name: self.name.clone(),
            backends: vec![proto::RouteBackend {
                name: format!("{service}:{}", port.port),
                weight: 1,
                ..proto::RouteBackend::default()
            }],
            to_destination: true,
            ..proto::RouteRule::default()
        };
        let rule = Rule {
            shared: Arc::new(shared),
            settings: RequestSettings::default().or(&self.settings),
            ..Rule::default()
        };
        Some(Table::new(
            vec![(0, Arc::default())],
            vec![Arc::new(rule)],
            false,
            None,
            self,
            vec![],
        ))
    }
}

#[cfg(test)]
pub(crate) mod tests;
