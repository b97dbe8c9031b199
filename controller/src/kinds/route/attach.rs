//! The routes of one Service that are of one namespace: the routes of each port in their order, and
//! the conditions for their authors. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use diy_mesh_proto::mesh::v1::{ExternalBackend, Fault, RouteBackend, RouteMatch, Routes};
use diy_mesh_proto::route;

use super::INCOMPATIBLE_FILTERS;
use super::external::{self, Place};
use super::model::{ExternalAuth, Match, ParsedRule, Reference, RequestSettings, Route, Rule};
use crate::kinds::Service;
use crate::kinds::authorization::{Mode, Rules, denying};
use crate::kinds::policy::{Faults, Requests};
use crate::kinds::service::ServicePort;
use crate::object::condition::{PARTIALLY_INVALID, UNSUPPORTED_VALUE};
use crate::object::rejection::shortened;
use crate::object::version::{self, Version};
use crate::object::{Condition, Key, Kind, ObjectId, Rejection, TargetReference};

/// The limits of a Service port for the clients of one namespace. The oldest routes come first.
const MAX_ROUTES: usize = 1024;
const MAX_MATCHES: usize = 4096;
const MAX_PATTERNS: usize = 256;
/// The maximum length of the encoded routes, a part of the largest message that proxies accept. For
/// splits, whose backends differ by port: at all ports together.
const MAX_BYTES: usize = 1024 * 1024;
/// Limits of all tables of a Service: the length of the encoded routes, and the number of routes in
/// them. Ports with the same routes share a table.
const MAX_TABLE_BYTES: usize = 8 * MAX_BYTES;
const MAX_TABLE_ROUTES: usize = 64 * MAX_ROUTES;
/// Problems in one condition.
const MAX_PROBLEMS: usize = 4;
/// The message for a route with the filter ExternalAuth that does not apply to a port.
const DENIED_AT_PODS: &str = "; the route has the filter ExternalAuth, so that the pods deny all \
    calls at the ports where it does not apply";
/// The message for a route of a headless Service.
const BACKENDS_WITHOUT_EFFECT: &str = "; backendRefs, with their weights and filters, have no \
    effect: the Service is headless, and requests stay at the pod that the client has selected";

/// The routes of a Service port for the clients of one namespace.
#[derive(Debug)]
pub struct Table {
    /// In order of precedence, with the position of their rule.
    pub matches: Vec<(u32, Arc<Match>)>,
    /// The rules of all routes.
    pub rules: Vec<Arc<Rule>>,
    /// GRPCRoutes, not HTTPRoutes.
    pub grpc: bool,
    /// The rule for connections that carry no HTTP.
    pub tcp: Option<Arc<Rule>>,
    /// The faults of the policy of the Service.
    pub faults: Option<Arc<Faults>>,
    /// The routes with these rules.
    pub routes: Vec<ObjectId>,
    /// No rule of these routes can be read.
    pub is_unreadable: bool,
    /// The digest of all of this.
    pub version: Version,
    encoded: OnceLock<Bytes>,
}

impl Table {
    /// The table of these rules of `routes`, with the faults of a policy.
    pub fn new(
        matches: Vec<(u32, Arc<Match>)>,
        rules: Vec<Arc<Rule>>,
        grpc: bool,
        tcp: Option<Arc<Rule>>,
        requests: &Requests,
        routes: Vec<ObjectId>,
    ) -> Table {
        let faults = requests.faults.clone();
        let injected = faults.as_ref().map(|faults| faults.version);
        Table {
            version: version::of("routes", &(&matches, &rules, grpc, &tcp, injected)),
            matches,
            rules,
            grpc,
            tcp,
            faults,
            routes,
            is_unreadable: false,
            encoded: OnceLock::new(),
        }
    }

    /// The faults of the policy.
    pub fn faults(&self) -> &[Fault] {
        self.faults.as_ref().map_or(&[], |faults| &faults.list)
    }

    /// The routes for proxies.
    fn message(&self) -> Routes {
        let matches = self.matches.iter().map(|(rule, one)| RouteMatch {
            rule: *rule,
            ..one.message.clone()
        });
        Routes {
            matches: matches.collect(),
            rules: self.rules.iter().map(|rule| rule.message()).collect(),
            grpc: self.grpc,
            tcp: self.tcp.as_ref().map(|rule| rule.message()),
            faults: self.faults().to_vec(),
        }
    }

    /// The routes as `encode` encodes them, the first time only.
    pub fn encoded(&self, encode: impl FnOnce(Routes) -> Bytes) -> &Bytes {
        self.encoded.get_or_init(|| encode(self.message()))
    }
}

impl PartialEq for Table {
    fn eq(&self, other: &Table) -> bool {
        (&self.version, self.is_unreadable) == (&other.version, other.is_unreadable)
    }
}

/// The routes of a Service that are of one namespace.
#[derive(Debug, Default)]
pub struct Attachment {
    /// By the port of the Service.
    pub tables: BTreeMap<u16, Arc<Table>>,
    /// The rules for its pods, at ports with the filter ExternalAuth.
    pub protected: BTreeMap<u16, Arc<Rules>>,
    /// The conditions of each route, by the position of the parent in the route.
    pub conditions: HashMap<ObjectId, BTreeMap<usize, Vec<Condition>>>,
}

/// A route with the backends that it has at this Service.
struct Candidate<'a> {
    route: &'a Route,
    /// The parents that are this Service, with their positions in the route.
    parents: Vec<(usize, &'a TargetReference)>,
    /// Older routes exceed a limit without it.
    is_surplus: bool,
    /// The rules, by the port of the Service for a split. `None`: the rules of other routes, for
    /// all ports.
    rules: BTreeMap<Option<u16>, Vec<Arc<Rule>>>,
    problems: Vec<Rejection>,
    /// Whether the route applies, by table.
    verdicts: Vec<(usize, Verdict)>,
    /// Why rules with the filter ExternalAuth fail, by table.
    incompatible: Vec<(usize, Rejection)>,
    /// The ports at which a route with this filter does not apply, although its parents select
    /// them.
    unapplied: BTreeSet<u16>,
}

/// The limits of one table.
#[derive(Clone, Copy)]
struct Limits {
    routes: usize,
    bytes: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Verdict {
    Accepted,
    /// Routes of this kind exclude the route.
    Conflicted(Kind),
    TooLarge,
}

/// Attaches the routes of one namespace to a Service, which may not exist. `requests` are the
/// settings of its policy. `resolve` checks a reference, and returns what proxies are told about an
/// XBackend.
pub fn attach(
    key: &Key,
    service: Option<&Service>,
    mut routes: Vec<&Route>,
    requests: Option<&Requests>,
    resolve: impl Fn(&Route, &Reference) -> Result<Option<ExternalBackend>, Rejection>,
) -> Attachment {
    routes.sort_by_key(|route| (route.created, &route.key, route.kind));
    let parent = service.filter(|service| service.external_name.is_empty());
    let ports = parent.into_iter().flat_map(Service::tcp_ports);
    let numbers: Vec<u16> = ports.clone().map(|port| port.port).collect();
    let none = Requests::default();
    let requests = requests.unwrap_or(&none);
    let mut split_bytes = 0;
    let candidates = routes.into_iter().enumerate().map(|(age, route)| {
        if route.is_split() {
            split_bytes += route.bytes * numbers.len();
        }
        let is_surplus = age >= MAX_ROUTES || (route.is_split() && split_bytes > MAX_BYTES);
        candidate(
            route,
            is_surplus,
            key,
            &numbers,
            &requests.settings,
            &resolve,
        )
    });
    let mut candidates: Vec<Candidate<'_>> = candidates.collect();
    let groups = grouped(&candidates, service, ports.collect());
    let limits = Limits {
        routes: MAX_ROUTES.min(MAX_TABLE_ROUTES / groups.len().max(1)),
        bytes: MAX_BYTES.min(MAX_TABLE_BYTES / groups.len().max(1)),
    };
    let (mut tables, mut protected) = (BTreeMap::new(), BTreeMap::new());
    for (at, (selected, ports)) in groups.iter().enumerate() {
        let first = (parent, ports[0].port);
        let (table, rules) = merge(&mut candidates, (at, selected), first, limits, requests);
        for port in ports {
            tables.insert(port.port, table.clone());
            protected.extend(rules.clone().map(|rules| (port.port, rules)));
        }
    }
    for candidate in &mut candidates {
        candidate.unapplied = candidate.find_unapplied(parent, &groups);
    }
    protected.extend(denied(&candidates));
    let parent = Parent {
        key,
        service,
        groups: &groups,
        limits,
    };
    let conditions = candidates.iter().map(|candidate| {
        let route = candidate.route;
        let of_parents = candidate.parents.iter();
        let conditions = of_parents
            .map(|(position, reference)| (*position, candidate.conditions(&parent, reference)));
        ((route.kind, route.key.clone()), conditions.collect())
    });
    Attachment {
        conditions: conditions.collect(),
        tables,
        protected,
    }
}

/// The ports whose pods deny all calls. A route with the filter ExternalAuth is for them, and does
/// not apply: the requests that it would protect are unknown.
fn denied(candidates: &[Candidate<'_>]) -> BTreeMap<u16, Arc<Rules>> {
    let mut denied = BTreeMap::new();
    for candidate in candidates.iter().filter(|one| !one.unapplied.is_empty()) {
        let name = format!("{} {}", candidate.route.kind, candidate.route.key);
        let rules = Arc::new(Rules::new(denying(name, Mode::Enforce)));
        for port in &candidate.unapplied {
            denied.entry(*port).or_insert_with(|| rules.clone());
        }
    }
    denied
}

/// The tables of a Service: the routes that each contains, with its ports.
type Groups<'a> = Vec<(Vec<usize>, Vec<&'a ServicePort>)>;

/// A Service that routes refer to, which may not exist.
struct Parent<'a> {
    key: &'a Key,
    service: Option<&'a Service>,
    groups: &'a Groups<'a>,
    limits: Limits,
}

/// Groups the ports with the same routes. The backends of a split depend on the port.
fn grouped<'a>(
    candidates: &[Candidate<'_>],
    service: Option<&Service>,
    ports: Vec<&'a ServicePort>,
) -> Groups<'a> {
    let has_pods_only = service.is_some_and(|service| service.is_headless);
    let by_number: HashMap<u16, &ServicePort> = ports.iter().map(|one| (one.port, *one)).collect();
    let by_name: HashMap<&str, &ServicePort> = ports.iter().map(|one| (&*one.name, *one)).collect();
    let (mut of_all, mut of_port) = (Vec::new(), HashMap::<u16, Vec<usize>>::new());
    for (position, candidate) in candidates.iter().enumerate() {
        let has_effect = !(candidate.route.is_split() && has_pods_only);
        if candidate.is_surplus || candidate.route.content.is_err() || !has_effect {
            continue;
        }
        let parents = || candidate.parents.iter().map(|(_, parent)| *parent);
        if parents().any(|parent| parent.port.is_none() && parent.section().is_none()) {
            of_all.push(position);
            continue;
        }
        let named = parents().filter_map(|parent| match parent.port {
            Some(number) => by_number.get(&number).filter(|port| parent.selects(port)),
            None => by_name.get(parent.section()?),
        });
        for port in named {
            let selected = of_port.entry(port.port).or_default();
            if selected.last() != Some(&position) {
                selected.push(position);
            }
        }
    }
    let mut groups: BTreeMap<(&[usize], Option<u16>), Vec<&ServicePort>> = BTreeMap::new();
    for port in ports {
        let own = of_port.get(&port.port).map_or(&[][..], Vec::as_slice);
        let selected = of_all.iter().chain(own).map(|one| candidates[*one].route);
        let is_split = first(selected).is_some_and(Route::is_split);
        let group = groups.entry((own, is_split.then_some(port.port)));
        group.or_default().push(port);
    }
    let groups = groups.into_iter().map(|((own, _), ports)| {
        let mut selected = [&of_all, own].concat();
        selected.sort_unstable();
        (selected, ports)
    });
    groups
        .filter(|(selected, _)| !selected.is_empty())
        .collect()
}

/// The route whose kind requests follow.
fn first<'a>(routes: impl Iterator<Item = &'a Route>) -> Option<&'a Route> {
    routes.max_by_key(|route| (!route.is_unreadable(), precedence(route.kind)))
}

fn candidate<'a>(
    route: &'a Route,
    is_surplus: bool,
    key: &Key,
    ports: &[u16],
    policy: &RequestSettings,
    resolve: &impl Fn(&Route, &Reference) -> Result<Option<ExternalBackend>, Rejection>,
) -> Candidate<'a> {
    let mut problems = Vec::new();
    let ports: Vec<Option<u16>> = match route.is_split() {
        true if is_surplus => vec![],
        true => ports.iter().copied().map(Some).collect(),
        false => vec![None],
    };
    let rules = ports.into_iter().map(|port| {
        let parsed = route.content.iter().flatten().filter(|_| !is_surplus);
        let rules = parsed.map(|parsed| {
            let mut rule = rule(route, parsed, key, port, resolve, &mut problems);
            rule.settings = parsed.settings.or(policy);
            Arc::new(rule)
        });
        (port, rules.collect())
    });
    let is_this = |parent: &TargetReference| parent.key(&route.key) == *key;
    let parents = route.parents.iter().enumerate();
    Candidate {
        rules: rules.collect(),
        parents: parents.filter(|(_, parent)| is_this(parent)).collect(),
        route,
        is_surplus,
        problems,
        verdicts: Vec::new(),
        incompatible: Vec::new(),
        unapplied: BTreeSet::new(),
    }
}

/// A rule with checked references. The rule of a split is for a port of its parent.
fn rule(
    route: &Route,
    parsed: &ParsedRule,
    parent: &Key,
    port: Option<u16>,
    resolve: &impl Fn(&Route, &Reference) -> Result<Option<ExternalBackend>, Rejection>,
    problems: &mut Vec<Rejection>,
) -> Rule {
    let (mut unresolved, mut resolved) = (BTreeSet::new(), Vec::new());
    let mut external = Vec::new();
    for reference in &parsed.references {
        let reference = Reference {
            port: port.or(reference.port),
            ..reference.clone()
        };
        let found = resolve(route, &reference);
        if reference.external.is_some() {
            external.push(found.as_ref().ok().cloned().flatten());
        }
        match found {
            Ok(_) => resolved.push(Some(reference.name())),
            Err(problem) => {
                resolved.push(None);
                unresolved.insert(reference.name());
                if !problems.contains(&problem) {
                    problems.push(problem);
                }
            }
        }
    }
    let mut shared = parsed.message.clone();
    if !external.is_empty() {
        // References are in the order of their backends.
        let backends = &mut Arc::make_mut(&mut shared).backends;
        let backends = backends.iter_mut().filter(|one| one.external.is_some());
        for (backend, found) in backends.zip(external) {
            backend.external = found;
        }
    }
    if let Some(port) = port {
        let parent = format!("{parent}:{port}");
        let backends = shared.backends.iter().zip(resolved);
        let backends = backends.filter_map(|(backend, name)| {
            let name = match route.kind {
                // The specification of SMI: the others get their share.
                Kind::TrafficSplit => name?,
                _ => name.unwrap_or_else(|| parent.clone()),
            };
            Some(RouteBackend {
                name,
                ..backend.clone()
            })
        });
        let mut backends: Vec<RouteBackend> = backends.collect();
        if backends.iter().all(|backend| backend.weight == 0) {
            backends = vec![RouteBackend {
                name: parent,
                weight: 1,
                ..RouteBackend::default()
            }];
        }
        Arc::make_mut(&mut shared).backends = backends;
        unresolved.clear();
    }
    if let Some(message) = &parsed.unknown_filter {
        // Requests must not pass without the filter.
        shared = ParsedRule::failing(Vec::new(), shared.name.clone()).message;
        let message = format!("{message}; requests of the rule fail");
        problems.push(Rejection::new(
            crate::object::condition::INVALID_KIND,
            message,
        ));
    }
    Rule {
        shared,
        unresolved,
        settings: RequestSettings::default(),
    }
}

/// The precedence of a kind of routes at a port: requests follow the highest one.
fn precedence(kind: Kind) -> u8 {
    match kind {
        Kind::GrpcRoute => 4,
        Kind::HttpRoute => 3,
        Kind::TcpRoute => 2,
        Kind::TrafficSplit => 1,
        _ => 0,
    }
}

/// Merges the routes at these positions into the table `at`, for a port, in the order of their
/// precedence. Connections that carry no HTTP follow the oldest TCPRoute or, without routes, a split
/// of all requests. Records the verdicts. Returns what the pods are told, too.
fn merge(
    candidates: &mut [Candidate<'_>],
    (at, selected): (usize, &[usize]),
    (service, port): (Option<&Service>, u16),
    limits: Limits,
    requests: &Requests,
) -> (Arc<Table>, Option<Arc<Rules>>) {
    // A route without a readable rule does not exclude others.
    let mut selected: Vec<usize> = selected.to_vec();
    selected.sort_by_key(|one| candidates[*one].route.is_unreadable());
    let routes = selected.iter().map(|one| candidates[*one].route);
    let first = first(routes).expect("a port without routes has no table");
    let (kind, is_unreadable) = (first.kind, first.is_unreadable());
    let mut tcp: Option<Arc<Rule>> = None;
    let (mut matches, mut rules, mut filters) = (Vec::new(), Vec::new(), Vec::new());
    let (mut patterns, mut bytes, mut routes, mut unmatched) = (0, 0, Vec::new(), None);
    for position in &selected {
        let candidate = &mut candidates[*position];
        let parsed = candidate.route.content.iter().flatten();
        let own = parsed.clone().flat_map(|parsed| &parsed.matches);
        let own_matches = own.clone().count();
        let own_patterns: usize = own.map(|one| route::patterns(&one.message)).sum();
        let is_tcp = candidate.route.kind == Kind::TcpRoute;
        let verdict = if is_tcp && tcp.is_some() {
            Verdict::Conflicted(Kind::TcpRoute)
        } else if !is_tcp && candidate.route.kind != kind {
            Verdict::Conflicted(kind)
        } else if routes.len() >= limits.routes
            || matches.len() + own_matches > MAX_MATCHES
            || patterns + own_patterns > MAX_PATTERNS
            || bytes + candidate.route.bytes > limits.bytes
        {
            Verdict::TooLarge
        } else {
            Verdict::Accepted
        };
        candidate.verdicts.push((at, verdict));
        if verdict != Verdict::Accepted {
            continue;
        }
        routes.push((candidate.route.kind, candidate.route.key.clone()));
        patterns += own_patterns;
        bytes += candidate.route.bytes;
        if tcp.is_none() && (is_tcp || candidate.route.is_split()) {
            let mut all = parsed.clone().zip(candidate.rules_at(port));
            let for_all = all.find(|(parsed, _)| {
                parsed.matches.is_empty() || parsed.matches.iter().any(|one| one.is_for_all())
            });
            // Otherwise they stay with the Service, as without a rule.
            let rule = for_all.filter(|(_, rule)| !rule.shared.to_destination);
            tcp = rule.map(|(_, rule)| Arc::new(rule.for_connections()));
        }
        if is_tcp && kind != Kind::TcpRoute {
            continue;
        }
        for (parsed, rule) in parsed.zip(candidate.rules_at(port)) {
            let owner = *position;
            let position = u32::try_from(rules.len()).expect("a route has few rules");
            rules.push(rule.clone());
            filters.push((owner, parsed.external_auth.clone()));
            matches.extend(parsed.matches.iter().map(|one| (position, one.clone())));
            // Among several rules without matches, one with a filter decides at the pods.
            if parsed.matches.is_empty() && (unmatched.is_none() || parsed.external_auth.is_some())
            {
                unmatched = Some(position);
            }
        }
    }
    // Stable: of equal ranks, the oldest route and the first rule come first.
    matches.sort_by_key(|(_, one): &(u32, Arc<Match>)| one.rank);
    matches.extend(unmatched.map(|position| (position, Arc::default())));
    let is_protected = filters.iter().any(|(_, filter)| filter.is_some());
    let place = service.filter(|_| is_protected);
    let place = place.map(|service| Place::new(service, &matches));
    let route = |position: usize| candidates[position].route;
    let (filters, incompatible) = external::check_rules(place, &mut rules, filters, route);
    for (position, rejection) in incompatible {
        candidates[position].incompatible.push((at, rejection));
    }
    let protected = external::rules(&matches, &rules, &filters);
    let is_grpc = kind == Kind::GrpcRoute;
    let table = Table {
        is_unreadable,
        ..Table::new(matches, rules, is_grpc, tcp, requests, routes)
    };
    (Arc::new(table), protected.map(Arc::new))
}

impl Candidate<'_> {
    fn rules_at(&self, port: u16) -> &[Arc<Rule>] {
        let port = self.route.is_split().then_some(port);
        self.rules.get(&port).map_or(&[], Vec::as_slice)
    }

    /// See [`unapplied`](Self::unapplied).
    fn find_unapplied(&self, service: Option<&Service>, groups: &Groups<'_>) -> BTreeSet<u16> {
        if !self.route.has_external_auth() {
            return BTreeSet::new();
        }
        let verdicts = self.verdicts.iter();
        let accepted = verdicts.filter(|(_, verdict)| *verdict == Verdict::Accepted);
        let applied = accepted.flat_map(|(at, _)| &groups[*at].1);
        let applied: HashSet<u16> = applied.map(|port| port.port).collect();
        let ports = service.into_iter().flat_map(Service::tcp_ports);
        let ports = ports.filter(|port| !applied.contains(&port.port));
        let selected =
            ports.filter(|port| self.parents.iter().any(|(_, parent)| parent.selects(port)));
        selected.map(|port| port.port).collect()
    }

    fn conditions(&self, parent: &Parent<'_>, reference: &TargetReference) -> Vec<Condition> {
        let accepted = self.accepted(parent, reference);
        let incompatible = self.incompatible(parent, reference);
        let incompatible = incompatible.filter(|_| accepted.holds);
        let accepted = match &incompatible {
            Some(rejection) if !rejection.is_partial => rejection.condition(),
            _ => accepted,
        };
        let mut conditions = self.route.conditions(accepted);
        if self.is_denied(parent, reference) {
            conditions[0].message.push_str(DENIED_AT_PODS);
        }
        if let Some(rejection) = incompatible.filter(|rejection| rejection.is_partial) {
            add_partial(&mut conditions, rejection);
        }
        if self.route.rejection().is_none() && !self.is_surplus {
            conditions.insert(1, self.resolved_refs());
        }
        conditions
    }

    /// Whether the pods of a port deny all calls, as the route does not apply there.
    fn is_denied(&self, parent: &Parent<'_>, reference: &TargetReference) -> bool {
        let ports = parent.service.into_iter().flat_map(Service::tcp_ports);
        let mut ports = ports.filter(|port| self.unapplied.contains(&port.port));
        !self.unapplied.is_empty() && ports.any(|port| reference.selects(port))
    }

    /// Why rules with the filter ExternalAuth fail at a parent.
    fn incompatible(&self, parent: &Parent<'_>, reference: &TargetReference) -> Option<Rejection> {
        let selects = |at: usize| {
            let mut ports = parent.groups[at].1.iter();
            ports.any(|port| reference.selects(port))
        };
        let problems = self.incompatible.iter();
        let problems = problems.filter(|(at, _)| selects(*at));
        let mut messages: Vec<&str> = problems.map(|(_, one)| &*one.message).collect();
        messages.sort_unstable();
        messages.dedup();
        let failing = self.route.content.iter().flatten();
        let failing = failing.filter(|parsed| {
            let filter = parsed.external_auth.as_ref();
            let is_named = |filter: &ExternalAuth| {
                let field = format!("{}: ", filter.field);
                messages.iter().any(|message| message.starts_with(&field))
            };
            parsed.message.invalid || filter.is_some_and(is_named)
        });
        let is_partial = failing.count() < self.route.content.iter().flatten().count();
        (!messages.is_empty()).then(|| Rejection {
            is_partial,
            ..Rejection::new(INCOMPATIBLE_FILTERS, shortened(&messages.join("; ")))
        })
    }

    fn accepted(&self, parent: &Parent<'_>, reference: &TargetReference) -> Condition {
        let key = parent.key;
        let rejected = |reason, message| Rejection::new(reason, message).condition();
        let Some(service) = parent.service else {
            let message = format!("the Service {key} does not exist");
            return rejected(super::NO_MATCHING_PARENT, message);
        };
        if !service.external_name.is_empty() {
            let message = format!("the Service {key} is an ExternalName, which has no routes");
            return rejected(UNSUPPORTED_VALUE, message);
        }
        if let Some(rejection) = self.route.rejection() {
            return rejection.condition();
        }
        if self.route.is_split() && service.is_headless {
            let message = format!("the Service {key} is headless: its clients select the pods");
            return rejected(UNSUPPORTED_VALUE, message);
        }
        let selects = |ports: &[&ServicePort]| ports.iter().any(|port| reference.selects(port));
        let verdicts = self.verdicts.iter();
        let verdicts = verdicts.filter(|(at, _)| selects(&parent.groups[*at].1));
        let mut verdicts: Vec<Verdict> = verdicts.map(|(_, verdict)| *verdict).collect();
        let mut ports = service.ports.iter();
        if self.is_surplus && ports.any(|port| reference.selects(port)) {
            verdicts.push(Verdict::TooLarge);
        }
        if verdicts.contains(&Verdict::Accepted) {
            let ignored = self.route.ignored.iter();
            let ignored = ignored.map(|field| format!("; {field} has no effect in a mesh"));
            let mut message = format!("the route applies to {key}{}", ignored.collect::<String>());
            let mut rules = self.route.content.iter().flatten();
            if service.is_headless && rules.any(|parsed| !parsed.message.backends.is_empty()) {
                message.push_str(BACKENDS_WITHOUT_EFFECT);
            }
            return Condition::new("Accepted", true, "Accepted", message);
        }
        match verdicts.first() {
            None => {
                let message = format!("the Service {key} has no such TCP port");
                rejected(super::NO_MATCHING_PARENT, message)
            }
            Some(Verdict::Conflicted(Kind::TcpRoute)) if self.route.kind == Kind::TcpRoute => {
                let message = format!("an older TCPRoute applies to {key}");
                rejected(super::CONFLICTED, message)
            }
            Some(Verdict::Conflicted(kind)) => {
                let excluded = match self.route.kind {
                    Kind::Service => "the canaries of Services",
                    kind => kind.name(),
                };
                let message = format!("{kind} objects apply to {key}, which exclude {excluded}");
                rejected(super::CONFLICTED, message)
            }
            Some(_) => {
                let Limits { routes, bytes } = parent.limits;
                let message = format!(
                    "with older routes, {key} would have more than {routes} routes, \
                     {MAX_MATCHES} matches, {MAX_PATTERNS} regular expressions or {bytes} bytes"
                );
                rejected(UNSUPPORTED_VALUE, message)
            }
        }
    }

    fn resolved_refs(&self) -> Condition {
        let problems = self.problems.iter().take(MAX_PROBLEMS);
        let messages: Vec<&str> = problems.map(|problem| &*problem.message).collect();
        let (reason, message) = match self.problems.first() {
            None => ("ResolvedRefs", "all backends exist".to_owned()),
            Some(first) => (first.reason, shortened(&messages.join("; "))),
        };
        Condition::new("ResolvedRefs", messages.is_empty(), reason, message)
    }
}

/// Adds what is invalid at a parent, to what is invalid at all of them.
fn add_partial(conditions: &mut Vec<Condition>, rejection: Rejection) {
    let partial = conditions.iter_mut();
    let mut partial = partial.filter(|one| one.kind == PARTIALLY_INVALID);
    if let Some(earlier) = partial.next() {
        let both = format!("{}; {}", earlier.message, rejection.message);
        earlier.message = shortened(&both);
        return;
    }
    let (reason, message) = (rejection.reason, rejection.message);
    conditions.push(Condition::new(PARTIALLY_INVALID, true, reason, message));
}
