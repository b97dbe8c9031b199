//! Routes as values: what their objects say, checked, with their matches ranked. Plain values. Matches
//! and rules are messages of the contract with the proxies.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use diy_mesh_proto::mesh::v1::{
    Authorizer, RouteBackend, RouteFilter, RouteMatch, RouteRetry, RouteRule, SessionPersistence,
    path_match, route_filter,
};

use crate::kinds::authorization::server::Server;
use crate::object::{Checked, Key, Kind, ObjectId};

/// A route with parents that are Services, or an object with the same effect: an HTTPRoute, a
/// GRPCRoute, a TCPRoute or a TrafficSplit. With the kind Service: the canaries of the Service with
/// its key. Its content is the rules in their order.
pub type Route = Checked<Vec<Arc<ParsedRule>>>;

/// A rule of a route.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedRule {
    /// The conditions, of which one holds. Empty: the requests that match no route of the Service.
    pub matches: Vec<Arc<Match>>,
    /// The actions, without the settings of requests, as if all references were valid.
    pub message: Arc<RouteRule>,
    /// The settings of requests in the rule.
    pub settings: RequestSettings,
    /// The backends, the receivers of mirrors and the authorization server.
    pub references: Vec<Reference>,
    /// A filter that the mesh does not know: requests get an error instead.
    pub unknown_filter: Option<String>,
    /// The server that has to allow the requests.
    pub external_auth: Option<ExternalAuth>,
}

/// The filter ExternalAuth of a rule.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExternalAuth {
    /// The filter, for conditions.
    pub field: String,
    /// The port of a Service. `None`: no server can allow a request.
    pub server: Option<Server>,
    /// The settings for requests to the server, without a backend.
    pub authorizer: Authorizer,
}

/// A rule of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rule {
    /// The actions. The tables of all parents of a route share them.
    pub shared: Arc<RouteRule>,
    /// The names of backends and of receivers of mirrors that are invalid references.
    pub unresolved: BTreeSet<String>,
    /// The settings of its requests.
    pub settings: RequestSettings,
}

/// The settings of the requests of a rule, or of all requests of a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RequestSettings {
    /// The timeouts of a request and of one attempt in milliseconds. 0: none, whatever the policy.
    pub timeouts: [Option<u64>; 2],
    /// The conditions of retries.
    pub retry: Option<RouteRetry>,
    /// The session of the requests.
    pub session: Option<SessionPersistence>,
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

/// A reference to a backend.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    /// The kind with its group, if it is not Service.
    pub other_kind: Option<String>,
    /// Namespace and name.
    pub key: Key,
    /// The port of the Service.
    pub port: Option<u16>,
    /// The kind of the object that is a host, as a backend of a rule. In its place, the rule has an
    /// empty `external`.
    pub external: Option<Kind>,
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

    /// Whether a rule has the filter ExternalAuth.
    pub fn has_external_auth(&self) -> bool {
        let mut rules = self.content.iter().flatten();
        rules.any(|parsed| parsed.external_auth.is_some())
    }

    /// All references to backends, also of mirrors and of authorization servers.
    pub fn references(&self) -> impl Iterator<Item = &Reference> {
        let rules = self.content.iter().flatten();
        rules.flat_map(|parsed| &parsed.references)
    }

    /// The hosts that are backends.
    pub fn external(&self) -> impl Iterator<Item = ObjectId> {
        let references = self.references();
        references.filter_map(|reference| Some((reference.external?, reference.key.clone())))
    }
}

impl Reference {
    /// The name of the backend. Empty without a port, and for other kinds than Services.
    pub fn name(&self) -> String {
        match (&self.other_kind, self.port) {
            (None, Some(port)) => format!("{}:{port}", self.key),
            _ => String::new(),
        }
    }

    /// A reference to a Service, without a port.
    pub fn service(key: Key, field: String) -> Reference {
        Reference {
            other_kind: None,
            key,
            port: None,
            external: None,
            field,
        }
    }
}

impl ParsedRule {
    /// A rule with nothing but backends, with their weights.
    pub fn new(
        matches: Vec<Arc<Match>>,
        name: String,
        backends: Vec<(Reference, u32)>,
    ) -> ParsedRule {
        let messages = backends.iter().map(|(reference, weight)| RouteBackend {
            name: reference.name(),
            weight: *weight,
            filters: Vec::new(),
            ..RouteBackend::default()
        });
        let message = RouteRule {
            name,
            backends: messages.collect(),
            ..RouteRule::default()
        };
        ParsedRule {
            matches,
            message: Arc::new(message),
            settings: RequestSettings::default(),
            references: backends.into_iter().map(|(one, _)| one).collect(),
            unknown_filter: None,
            external_auth: None,
        }
    }

    /// A rule whose requests fail.
    pub fn failing(matches: Vec<Arc<Match>>, name: String) -> ParsedRule {
        let mut failing = ParsedRule::new(matches, name, Vec::new());
        Arc::make_mut(&mut failing.message).invalid = true;
        failing
    }
}

impl Rule {
    /// The rule where it cannot apply: its requests fail.
    pub fn failing(&self) -> Rule {
        let failing = ParsedRule::failing(Vec::new(), self.shared.name.clone());
        Rule {
            shared: failing.message,
            ..Rule::default()
        }
    }

    /// The rule without the settings of requests.
    pub fn for_connections(&self) -> Rule {
        Rule {
            settings: RequestSettings::default(),
            ..self.clone()
        }
    }

    /// The rule for proxies. A backend that is an invalid reference has no name, and such a mirror is
    /// dropped.
    pub fn message(&self) -> RouteRule {
        let is_resolved = |filter: &RouteFilter| match &filter.kind {
            Some(route_filter::Kind::Mirror(mirror)) => !self.unresolved.contains(&mirror.backend),
            _ => true,
        };
        let mut message = (*self.shared).clone();
        message.filters.retain(is_resolved);
        for backend in &mut message.backends {
            backend.filters.retain(is_resolved);
            if self.unresolved.contains(&backend.name) {
                backend.name.clear();
            }
        }
        let [request, attempt] = self.settings.timeouts;
        message.request_timeout = request.unwrap_or_default();
        message.backend_request_timeout = attempt.unwrap_or_default();
        message.retry.clone_from(&self.settings.retry);
        message
            .session_persistence
            .clone_from(&self.settings.session);
        message
    }
}

impl RequestSettings {
    /// These settings, with the settings of a policy where one is missing. An attempt has at most
    /// the time of the request.
    pub fn or(&self, policy: &RequestSettings) -> RequestSettings {
        let [request, attempt] = self.timeouts;
        let request = request.or(policy.timeouts[0]);
        let longest = request.filter(|timeout| *timeout > 0).unwrap_or(u64::MAX);
        let inherited = policy.timeouts[1].map(|timeout| timeout.min(longest));
        RequestSettings {
            timeouts: [request, attempt.or(inherited)],
            retry: self.retry.clone().or_else(|| policy.retry.clone()),
            session: self.session.clone().or_else(|| policy.session.clone()),
        }
    }
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
