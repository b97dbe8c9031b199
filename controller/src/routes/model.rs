//! Routes as values: what their objects say, checked, with their matches ranked. Plain values. Parts
//! that are the same for proxies are messages of the contract with them.

use std::cmp::Reverse;
use std::sync::Arc;

use diy_mesh_proto::mesh::v1::{
    RouteFilter, RouteMatch, RouteRetry, SessionPersistence, path_match, route_filter,
};

use super::Condition;
use crate::checked::Checked;
use crate::index::object::{Key, Kind};

/// A route with parents that are Services, or what has the same effect: an HTTPRoute, a GRPCRoute, a
/// TCPRoute or a TrafficSplit. Of kind Service: the canaries of the Service with its key. Its content
/// is the rules in their order.
pub type Route = Checked<Vec<Arc<ParsedRule>>>;

/// Why a route, or a reference of it, is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Rejection {
    /// A reason of the specification.
    pub reason: &'static str,
    /// The field, its value and the expected value.
    pub message: String,
    /// Whether other rules of the route are valid.
    pub is_partial: bool,
}

/// A rule with references to its backends.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedRule {
    /// The conditions, of which one holds. Empty: the requests that match no route of the Service.
    pub matches: Vec<Arc<Match>>,
    /// The actions.
    pub rule: Rule<Reference>,
    /// A filter that the mesh does not know: requests get an error instead.
    pub unknown_filter: Option<String>,
}

/// Conditions on a request, with their precedence.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Match {
    /// The conditions. Its `rule` has no meaning.
    pub message: RouteMatch,
    /// Higher ranks take precedence.
    pub rank: Rank,
}

impl Match {
    /// Whether every request matches.
    pub fn is_for_all(&self) -> bool {
        self.message == RouteMatch::default()
    }

    /// The condition on the path.
    pub fn path(&self) -> Option<&path_match::Kind> {
        self.message.path.as_ref()?.kind.as_ref()
    }
}

/// The precedence of a match, by the criteria of the specification for its kind of route.
pub type Rank = Reverse<[usize; 5]>;

/// The actions of a rule. Backends are references, or names of resources.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rule<B> {
    /// For logs and metrics.
    pub name: String,
    /// The backends with their weights and filters.
    pub backends: Vec<Backend<B>>,
    /// The filters in their order.
    pub filters: Vec<Filter<B>>,
    /// The timeout of a request in milliseconds. 0: none, whatever the policy.
    pub request_timeout: Option<u64>,
    /// The timeout of one attempt in milliseconds. 0: none, whatever the policy.
    pub backend_request_timeout: Option<u64>,
    /// The conditions of retries.
    pub retry: Option<RouteRetry>,
    /// The session of the requests.
    pub session: Option<SessionPersistence>,
    /// Requests go to the endpoints of the destination.
    pub to_destination: bool,
    /// The rule cannot be applied: its requests fail.
    pub is_invalid: bool,
}

/// A backend of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Backend<B> {
    /// The reference, or the name of the resource, which is empty if the reference is invalid.
    pub target: B,
    /// The share of the requests.
    pub weight: u32,
    /// The filters in their order.
    pub filters: Vec<Filter<B>>,
}

/// A filter of a rule or of a backend.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Filter<B> {
    /// The message, whose mirror names no backend. The tables of all parents of a route share it.
    pub message: Arc<RouteFilter>,
    /// The receiver of a mirror.
    pub mirror: Option<B>,
}

/// A reference to a backend.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    /// The kind with its group, if it is not Service.
    pub other_kind: Option<String>,
    /// Namespace and name.
    pub key: Key,
    /// The port of the Service.
    pub port: Option<u16>,
    /// The field of the route, for conditions.
    pub field: String,
}

/// A ReferenceGrant: references from these kinds and namespaces to these Services of its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Namespace and name.
    pub key: Key,
    /// Kinds of routes, with their namespaces.
    pub from: Vec<(Kind, Arc<str>)>,
    /// Names of Services. `None`: all of the namespace.
    pub to: Vec<Option<Arc<str>>>,
}

impl Route {
    /// Whether the route is only a split of requests: its backends have the port of its parent, and
    /// get no requests where they have no such port.
    pub fn is_split(&self) -> bool {
        matches!(self.kind, Kind::Service | Kind::TrafficSplit)
    }

    /// Whether no rule can be read.
    pub fn is_unreadable(&self) -> bool {
        let mut rules = self.content.iter().flatten();
        let first = rules.next();
        first.is_some_and(|parsed| parsed.matches.is_empty()) && rules.next().is_none()
    }

    /// All references to backends, also of mirrors.
    pub fn references(&self) -> impl Iterator<Item = &Reference> {
        let rules = self.content.iter().flatten();
        rules.flat_map(|parsed| {
            let backends = parsed.rule.backends.iter();
            let filters = backends.clone().flat_map(|backend| &backend.filters);
            let filters = filters.chain(&parsed.rule.filters);
            let mirrors = filters.filter_map(|filter| filter.mirror.as_ref());
            backends.map(|backend| &backend.target).chain(mirrors)
        })
    }
}

impl Rejection {
    /// A rejection for a reason of the specification.
    pub fn new(reason: &'static str, message: String) -> Rejection {
        Rejection {
            reason,
            message,
            is_partial: false,
        }
    }

    /// The rejection with its effect.
    pub(super) fn with(self, effect: &str) -> Rejection {
        Rejection {
            message: format!("{}; {effect}", self.message),
            ..self
        }
    }

    /// The condition of the route.
    pub fn condition(&self) -> Condition {
        Condition::new("Accepted", false, self.reason, self.message.clone())
    }
}

impl Reference {
    /// A reference to a Service, without a port.
    pub fn service(key: Key, field: String) -> Reference {
        Reference {
            other_kind: None,
            key,
            port: None,
            field,
        }
    }
}

impl<B> Filter<B> {
    /// A filter of this kind.
    pub fn new(kind: route_filter::Kind, mirror: Option<B>) -> Filter<B> {
        let message = Arc::new(RouteFilter { kind: Some(kind) });
        Filter { message, mirror }
    }

    /// The kind and its values.
    pub fn kind(&self) -> Option<&route_filter::Kind> {
        self.message.kind.as_ref()
    }
}

impl<B> Backend<B> {
    /// A backend without filters.
    pub fn new(target: B, weight: u32) -> Backend<B> {
        Backend {
            target,
            weight,
            filters: Vec::new(),
        }
    }
}

impl ParsedRule {
    /// A rule with nothing but backends.
    pub fn new(
        matches: Vec<Arc<Match>>,
        name: String,
        backends: Vec<Backend<Reference>>,
    ) -> ParsedRule {
        ParsedRule {
            matches,
            rule: Rule::new(name, backends),
            unknown_filter: None,
        }
    }

    /// A rule whose requests fail.
    pub fn failing(matches: Vec<Arc<Match>>, name: String) -> ParsedRule {
        let mut failing = ParsedRule::new(matches, name, Vec::new());
        failing.rule.is_invalid = true;
        failing
    }
}

impl<B> Rule<B> {
    /// A rule with nothing but backends.
    pub fn new(name: String, backends: Vec<Backend<B>>) -> Rule<B> {
        Rule {
            name,
            backends,
            filters: Vec::new(),
            request_timeout: None,
            backend_request_timeout: None,
            retry: None,
            session: None,
            to_destination: false,
            is_invalid: false,
        }
    }

    /// The rule with other targets. A mirror without a target is dropped.
    pub fn map<T>(&self, mut target: impl FnMut(&B) -> Option<T>) -> Rule<T>
    where
        T: Default,
    {
        let backends = self.backends.iter().map(|backend| Backend {
            target: target(&backend.target).unwrap_or_default(),
            weight: backend.weight,
            filters: map_filters(&backend.filters, &mut target),
        });
        Rule {
            name: self.name.clone(),
            backends: backends.collect(),
            filters: map_filters(&self.filters, &mut target),
            request_timeout: self.request_timeout,
            backend_request_timeout: self.backend_request_timeout,
            retry: self.retry.clone(),
            session: self.session.clone(),
            to_destination: self.to_destination,
            is_invalid: self.is_invalid,
        }
    }
}

fn map_filters<B, T>(
    filters: &[Filter<B>],
    target: &mut impl FnMut(&B) -> Option<T>,
) -> Vec<Filter<T>> {
    let map = |filter: &Filter<B>| {
        let mirror = match &filter.mirror {
            Some(mirror) => Some(target(mirror)?),
            None => None,
        };
        let message = filter.message.clone();
        Some(Filter { message, mirror })
    };
    filters.iter().filter_map(map).collect()
}

impl Grant {
    /// Whether the grant permits a reference from a route to a Service of its namespace.
    pub fn permits(&self, route: &Route, service: &Key) -> bool {
        let is_from = |(kind, namespace): &(Kind, Arc<str>)| {
            (*kind, namespace) == (route.kind, &route.key.namespace)
        };
        let is_to =
            |name: &Option<Arc<str>>| name.as_ref().is_none_or(|name| *name == service.name);
        self.key.namespace == service.namespace
            && self.from.iter().any(is_from)
            && self.to.iter().any(is_to)
    }
}
