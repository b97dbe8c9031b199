//! The routes of one Service: which apply to which port and for which clients, in which order, and
//! what their authors are told. Pure.
//!
//! Routes of the Service's own namespace (producer routes) are for all clients. Routes of another
//! namespace (consumer routes) are for the clients of that namespace, in place of the former. So
//! no namespace changes the traffic between two others.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::matches;
use super::model::{Match, Reference, Route, Rule};
use super::{Condition, ParentReference, UNSUPPORTED_VALUE};
use crate::index::object::{Key, Kind, Service, ServicePort, Transport};
use crate::index::version::{self, Version};

/// The limits of a Service port for the clients of one namespace. The oldest routes come first.
const MAX_MATCHES: usize = 4096;
const MAX_PATTERNS: usize = 256;
/// Of the encoded routes, a part of the largest message that proxies accept.
const MAX_BYTES: usize = 1024 * 1024;
/// Problems in one condition.
const MAX_PROBLEMS: usize = 4;

/// Kind, namespace and name of a route.
pub type RouteId = (Kind, Key);

/// The routes of a Service port for the clients of one namespace.
#[derive(Debug)]
pub struct Table {
    /// In order of precedence, with the position of their rule.
    pub matches: Vec<(u32, Arc<Match>)>,
    /// The rules of all routes.
    pub rules: Vec<Arc<Rule<String>>>,
    /// GRPCRoutes, not HTTPRoutes.
    pub grpc: bool,
    /// The digest of all of this.
    pub version: Version,
}

impl PartialEq for Table {
    fn eq(&self, other: &Table) -> bool {
        self.version == other.version
    }
}

/// The tables of a Service port.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PortTables {
    /// For clients of all other namespaces.
    producer: Option<Arc<Table>>,
    /// For clients of these namespaces.
    consumers: BTreeMap<Arc<str>, Arc<Table>>,
    /// Their namespaces.
    pub namespaces: Option<Arc<BTreeSet<Arc<str>>>>,
}

impl PortTables {
    /// The table for the clients of a namespace.
    pub fn of_client(&self, namespace: &str) -> Option<&Arc<Table>> {
        self.consumers.get(namespace).or(self.producer.as_ref())
    }
}

/// The routes of a Service.
#[derive(Debug, Default)]
pub struct Attachment {
    /// By the port of the Service.
    pub tables: BTreeMap<u16, PortTables>,
    /// The conditions of each route, by the position of the parent in the route.
    pub conditions: HashMap<RouteId, BTreeMap<usize, Vec<Condition>>>,
}

/// Why a reference to a backend is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unresolved {
    /// A reason of the specification.
    pub reason: &'static str,
    /// What is wrong.
    pub message: String,
}

/// A route with the backends that it has at this Service.
struct Candidate<'a> {
    route: &'a Route,
    rules: Vec<Arc<Rule<String>>>,
    problems: Vec<Unresolved>,
    /// Whether the route applies, by port.
    verdicts: BTreeMap<u16, Verdict>,
}

#[derive(Clone, Copy, PartialEq)]
enum Verdict {
    Accepted,
    Conflicted,
    TooLarge,
}

/// Attaches routes to a Service, which may not exist. `resolve` returns the name of a backend.
pub fn attach(
    key: &Key,
    service: Option<&Service>,
    mut routes: Vec<&Route>,
    resolve: impl Fn(&Route, &Reference) -> Result<String, Unresolved>,
) -> Attachment {
    routes.sort_by_key(|route| (route.created, &route.key, route.kind));
    let candidates = routes.into_iter();
    let mut candidates: Vec<Candidate<'_>> =
        candidates.map(|route| candidate(route, &resolve)).collect();
    let is_external = |service: &&Service| !service.external_name.is_empty();
    let parent = service.filter(|service| !is_external(service));
    let ports = parent.into_iter().flat_map(|service| &service.ports);
    let ports = ports.filter(|port| port.protocol == Transport::Tcp);
    let mut tables = BTreeMap::new();
    for port in ports {
        let of_port = attach_port(key, port, &mut candidates);
        if of_port != PortTables::default() {
            tables.insert(port.port, of_port);
        }
    }
    let conditions = candidates.iter().map(|candidate| {
        let route = candidate.route;
        let of_parents = route.parents.iter().enumerate();
        let of_parents = of_parents.filter(|(_, parent)| parent.key(&route.key) == *key);
        let conditions = of_parents
            .map(|(position, parent)| (position, candidate.conditions(key, service, parent)));
        ((route.kind, route.key.clone()), conditions.collect())
    });
    Attachment {
        conditions: conditions.collect(),
        tables,
    }
}

fn candidate<'a>(
    route: &'a Route,
    resolve: &impl Fn(&Route, &Reference) -> Result<String, Unresolved>,
) -> Candidate<'a> {
    let mut problems = Vec::new();
    let mut rules = Vec::new();
    for parsed in route.rules.iter().flatten() {
        let mut rule = parsed.rule.map(|reference| {
            let resolved = resolve(route, reference);
            resolved.map_err(|problem| problems.push(problem)).ok()
        });
        if let Some(message) = &parsed.unknown_filter {
            // Requests must not pass without the filter.
            (rule.backends, rule.filters) = (vec![], vec![]);
            problems.push(Unresolved {
                reason: super::INVALID_KIND,
                message: format!("{message}; requests of the rule fail"),
            });
        }
        rules.push(Arc::new(rule));
    }
    Candidate {
        route,
        rules,
        problems,
        verdicts: BTreeMap::new(),
    }
}

/// Merges the routes of a port, separately for each namespace that they are of.
fn attach_port(key: &Key, port: &ServicePort, candidates: &mut [Candidate<'_>]) -> PortTables {
    let mut of_namespace: BTreeMap<Arc<str>, Vec<&mut Candidate<'_>>> = BTreeMap::new();
    for candidate in candidates {
        let route = candidate.route;
        let mut parents = route.parents.iter();
        let selects =
            |parent: &ParentReference| parent.key(&route.key) == *key && parent.selects(port);
        if route.rules.is_ok() && parents.any(selects) {
            let namespace = route.key.namespace.clone();
            of_namespace.entry(namespace).or_default().push(candidate);
        }
    }
    let mut consumers: BTreeMap<Arc<str>, Arc<Table>> = BTreeMap::new();
    for (namespace, mut candidates) in of_namespace {
        let table = Arc::new(merge(port.port, &mut candidates));
        consumers.insert(namespace, table);
    }
    let producer = consumers.remove(&key.namespace);
    let namespaces: BTreeSet<Arc<str>> = consumers.keys().cloned().collect();
    PortTables {
        producer,
        consumers,
        namespaces: (!namespaces.is_empty()).then(|| Arc::new(namespaces)),
    }
}

/// Merges routes in the order of their precedence. If there are GRPCRoutes, HTTPRoutes do not apply.
fn merge(port: u16, candidates: &mut [&mut Candidate<'_>]) -> Table {
    let is_grpc = |candidate: &Candidate<'_>| candidate.route.kind == Kind::GrpcRoute;
    let grpc = candidates.iter().any(|candidate| is_grpc(candidate));
    let (mut matches, mut rules) = (Vec::new(), Vec::new());
    let (mut patterns, mut bytes) = (0, 0);
    for candidate in candidates {
        let parsed = candidate.route.rules.iter().flatten();
        let own = parsed.clone().flat_map(|parsed| &parsed.matches);
        let own_matches = own.clone().count();
        let own_patterns: usize = own.map(|one| matches::patterns(one)).sum();
        let verdict = if is_grpc(candidate) != grpc {
            Verdict::Conflicted
        } else if matches.len() + own_matches > MAX_MATCHES
            || patterns + own_patterns > MAX_PATTERNS
            || bytes + candidate.route.bytes > MAX_BYTES
        {
            Verdict::TooLarge
        } else {
            Verdict::Accepted
        };
        candidate.verdicts.insert(port, verdict);
        if verdict != Verdict::Accepted {
            continue;
        }
        patterns += own_patterns;
        bytes += candidate.route.bytes;
        for (parsed, rule) in parsed.zip(&candidate.rules) {
            let position = u32::try_from(rules.len()).expect("a route has few rules");
            rules.push(rule.clone());
            matches.extend(parsed.matches.iter().map(|one| (position, one.clone())));
        }
    }
    // Stable: of equal ranks, the oldest route and the first rule come first.
    matches.sort_by_key(|(_, one): &(u32, Arc<Match>)| one.rank);
    Table {
        version: version::of("routes", &(&matches, &rules, grpc)),
        matches,
        rules,
        grpc,
    }
}

impl Candidate<'_> {
    fn conditions(
        &self,
        key: &Key,
        service: Option<&Service>,
        parent: &ParentReference,
    ) -> Vec<Condition> {
        let accepted = self.accepted(key, service, parent);
        match &self.route.rules {
            Err(_) => vec![accepted],
            Ok(_) => vec![accepted, self.resolved_refs()],
        }
    }

    fn accepted(
        &self,
        key: &Key,
        service: Option<&Service>,
        parent: &ParentReference,
    ) -> Condition {
        let rejected = |reason, message| Condition {
            kind: "Accepted",
            holds: false,
            reason,
            message,
        };
        let Some(service) = service else {
            let message = format!("the Service {key} does not exist");
            return rejected(super::NO_MATCHING_PARENT, message);
        };
        if !service.external_name.is_empty() {
            let message = format!("the Service {key} is an ExternalName, which has no routes");
            return rejected(UNSUPPORTED_VALUE, message);
        }
        if let Err(rejection) = &self.route.rules {
            return rejected(rejection.reason, rejection.message.clone());
        }
        let ports = service.ports.iter().filter(|port| parent.selects(port));
        let verdicts: Vec<Verdict> = ports
            .filter_map(|port| self.verdicts.get(&port.port).copied())
            .collect();
        if verdicts.contains(&Verdict::Accepted) {
            let ignored = self.route.ignored.iter();
            let ignored = ignored.map(|field| format!("; {field} has no effect in a mesh"));
            return Condition {
                kind: "Accepted",
                holds: true,
                reason: "Accepted",
                message: format!("the route applies to {key}{}", ignored.collect::<String>()),
            };
        }
        match verdicts.first() {
            None => {
                let message = format!("the Service {key} has no such TCP port");
                rejected(super::NO_MATCHING_PARENT, message)
            }
            Some(Verdict::Conflicted) => {
                let message = format!("a GRPCRoute applies to {key}, which excludes HTTPRoutes");
                rejected(super::CONFLICTED, message)
            }
            Some(_) => {
                let message = format!(
                    "with older routes, {key} would have more than {MAX_MATCHES} matches, \
                     {MAX_PATTERNS} regular expressions or {MAX_BYTES} bytes of routes"
                );
                rejected(UNSUPPORTED_VALUE, message)
            }
        }
    }

    fn resolved_refs(&self) -> Condition {
        let problems = self.problems.iter().take(MAX_PROBLEMS);
        let messages: Vec<&str> = problems.map(|problem| &*problem.message).collect();
        match self.problems.first() {
            None => Condition {
                kind: "ResolvedRefs",
                holds: true,
                reason: "ResolvedRefs",
                message: "all backends exist".to_owned(),
            },
            Some(first) => Condition {
                kind: "ResolvedRefs",
                holds: false,
                reason: first.reason,
                message: messages.join("; "),
            },
        }
    }
}
