//! Routes from the content of their objects. Pure.
//!
//! Nothing relies on the validation of the API server: objects from files have none. Values that
//! the specification forbids, or does not define, are reported with their field. Requests of a rule
//! that cannot be applied fail. A rule whose matches cannot be read is dropped; the requests that
//! its filter may protect fail. Where a rule has the filter ExternalAuth, the called pods refuse
//! them too.

use std::sync::Arc;

use diy_mesh_proto::mesh::v1::{
    ExternalBackend, RouteBackend, RouteRetry, RouteRule, SessionPersistence,
};
use diy_mesh_proto::policy;
use diy_mesh_proto::route::{self, is_hostname, is_token};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::value::RawValue;

use super::INCOMPATIBLE_FILTERS;
use super::backend::{BACKEND_BYTES, KINDS};
use super::filters::{self, Found};
use super::matches::MatchSpec;
use super::model::{ExternalAuth, Match, ParsedRule, Reference, RequestSettings, Route};
use super::spec::{
    self, BackendRef, GrpcMatch, HttpMatch, ObjectRef, RouteSpec, TcpMatch, Timeouts,
};
use crate::object::condition::UNSUPPORTED_VALUE;
use crate::object::fields::{Milliseconds, field, items, one_of, read, string};
use crate::object::rejection::{bounded, refuse, shortened, unsupported, violates};
use crate::object::{Key, Kind, Meta, Rejection, TargetReference};

/// The limits of the objects in Kubernetes, which hold for files too.
pub(crate) const MAX_ITEMS: usize = 16;
pub(crate) const MAX_PARENTS: usize = 32;
const MAX_MATCHES: usize = 64;
pub(crate) const MAX_MATCHES_OF_ROUTE: usize = 128;
/// Regular expressions of a route, which proxies compile.
const MAX_PATTERNS_OF_ROUTE: usize = 128;
pub(crate) const MAX_WEIGHT: u32 = 1_000_000;
/// The default of Envoy.
const DEFAULT_RETRY_ATTEMPTS: u32 = 1;
const DEFAULT_SESSION_COOKIE: &str = "mesh-session";
const DEFAULT_SESSION_HEADER: &str = "x-mesh-session";
/// At least the length of the parts of a rule and of a reference that its object does not contain.
pub(super) const RULE_BYTES: usize = 512;
pub(super) const REFERENCE_BYTES: usize = 160;

/// Parses a route. An error: its parents are unknown, so that it has no status.
pub fn route(meta: Meta, spec: &str) -> Result<Route, String> {
    let parsed: RouteSpec = read(spec, "spec").map_err(|one| one.message)?;
    let parents = parsed.parent_refs.into_iter();
    let parents = parents.filter(TargetReference::is_service);
    let parents: Vec<TargetReference> = parents.take(MAX_PARENTS).collect();
    let has_hostnames = !parsed.hostnames.is_empty();
    let has_more = meta.kind == Kind::TcpRoute && parsed.rules.iter().flatten().nth(1).is_some();
    let ignored = has_hostnames.then_some("spec.hostnames");
    let ignored = ignored.or(has_more.then_some("a rule after the first one"));
    // A route for Gateways only does not concern the mesh.
    let listed = parsed.rules.iter().filter(|_| !parents.is_empty());
    let values: Vec<&str> = listed.flatten().map(|rule| rule.get()).collect();
    let (rules, invalid) = match meta.kind {
        Kind::GrpcRoute => rules::<GrpcMatch>(&meta, &values),
        Kind::TcpRoute => tcp_rules(&meta, &values),
        _ if values.is_empty() => rules::<HttpMatch>(&meta, &["{}"]),
        _ => rules::<HttpMatch>(&meta, &values),
    };
    let mut route = Route::new(meta, parents, Ok(rules));
    route.invalid = invalid;
    route.ignored = ignored;
    let rules = route.content.iter().flatten().count();
    route.bytes += rules * RULE_BYTES + route.references().count() * REFERENCE_BYTES;
    route.bytes += route.external().count() * BACKEND_BYTES;
    Ok(route)
}

/// The rules of a route, and what is invalid.
type Rules = (Vec<Arc<ParsedRule>>, Option<Rejection>);

/// The first rule has all connections.
fn tcp_rules(meta: &Meta, values: &[&str]) -> Rules {
    let Some(first) = values.first() else {
        let rejection = unsupported("spec.rules", "", "a list with a rule");
        return unreadable(meta, false, rejection);
    };
    let (rules, invalid) = rules::<TcpMatch>(meta, std::slice::from_ref(first));
    let for_requests = rules.first().and_then(|parsed| for_requests(parsed));
    match for_requests {
        None => (rules, invalid),
        Some(what) => {
            let message = format!(
                "spec.rules[0]: {what} of a TCPRoute, which is for connections; all connections fail"
            );
            let failing = ParsedRule::failing(vec![Arc::default()], route_name(meta));
            let rejection = Rejection::new(UNSUPPORTED_VALUE, message);
            (vec![Arc::new(failing)], Some(rejection))
        }
    }
}

/// The part of a rule that connections cannot have.
fn for_requests(rule: &ParsedRule) -> Option<&'static str> {
    if rule.settings != RequestSettings::default() {
        return Some("timeouts, retries or sessions");
    }
    let RouteRule {
        backends, filters, ..
    } = &*rule.message;
    let all = backends.iter().flat_map(|backend| &backend.filters);
    all.chain(filters).next().map(|_| "filters")
}

fn rules<M: MatchSpec + DeserializeOwned>(meta: &Meta, values: &[&str]) -> Rules {
    if let Err(rejection) = bounded("spec.rules", values, MAX_ITEMS) {
        let is_protected = values.iter().any(|rule| has_external_auth(rule));
        return unreadable(meta, is_protected, rejection);
    }
    let (mut rules, mut problems): (Vec<Arc<ParsedRule>>, Vec<Rejection>) = Default::default();
    let (mut valid, mut is_protected) = (0, false);
    let failing = |matches, is_protected| Arc::new(failing(meta, matches, is_protected));
    for (position, value) in values.iter().enumerate() {
        let at = format!("spec.rules[{position}]");
        let (matches, unreadable) = read_matches::<M>(value, &at, &rules);
        let Some(rejection) = unreadable else {
            match read(value, &at).and_then(|spec| rule(meta, spec, &matches, &at)) {
                Ok(rule) => {
                    valid += 1;
                    rules.push(Arc::new(rule));
                }
                Err(rejection) => {
                    problems.push(rejection.with("requests of the rule get status 500"));
                    rules.push(failing(matches, has_external_auth(value)));
                }
            }
            continue;
        };
        let effect = match (has_external_auth(value), matches.is_empty()) {
            (false, _) => "the rule has no effect",
            (true, false) => {
                rules.push(failing(matches, true));
                "requests of its other matches get status 500"
            }
            (true, true) => {
                is_protected = true;
                "all requests of the route get status 500, because the rule has an ExternalAuth filter"
            }
        };
        problems.push(rejection.with(effect));
    }
    let Some(first) = problems.first() else {
        return (rules, None);
    };
    if is_protected {
        valid = 0;
        let matches = rules.iter().map(|parsed| parsed.matches.clone());
        rules = matches.map(|matches| failing(matches, true)).collect();
    }
    if is_protected || rules.is_empty() {
        rules.push(failing(Vec::new(), is_protected));
    }
    let messages: Vec<&str> = problems.iter().map(|one| &*one.message).collect();
    let dropped = if valid > 0 { "Dropped Rule: " } else { "" };
    let rejection = Rejection {
        reason: first.reason,
        message: shortened(&format!("{dropped}{}", messages.join("; "))),
        is_partial: valid > 0,
    };
    (rules, Some(rejection))
}

/// A route without a rule that can be read. Requests that match no other route of the Service fail.
fn unreadable(meta: &Meta, is_protected: bool, rejection: Rejection) -> Rules {
    let rule = failing(meta, Vec::new(), is_protected);
    (vec![Arc::new(rule)], Some(rejection))
}

/// A rule whose requests fail. If it `is_protected`, the called pods refuse them.
fn failing(meta: &Meta, matches: Vec<Arc<Match>>, is_protected: bool) -> ParsedRule {
    let is_protected = is_protected && meta.kind == Kind::HttpRoute;
    ParsedRule {
        external_auth: is_protected.then(ExternalAuth::default),
        ..ParsedRule::failing(matches, route_name(meta))
    }
}

/// The matches of a rule that can be read, and why others cannot. `earlier`: the rules before it,
/// with which it must be within the limits of a route.
fn read_matches<M: MatchSpec + DeserializeOwned>(
    rule: &str,
    at: &str,
    earlier: &[Arc<ParsedRule>],
) -> (Vec<Arc<Match>>, Option<Rejection>) {
    let field = format!("{at}.matches");
    let listed: spec::Matches<'_> = match read(rule, at) {
        Ok(listed) => listed,
        Err(rejection) => return (Vec::new(), Some(rejection)),
    };
    if let Err(rejection) = bounded(&field, &listed.matches, MAX_MATCHES) {
        return (Vec::new(), Some(rejection));
    }
    let parse = |(position, one): (usize, &&RawValue)| {
        let at = format!("{field}[{position}]");
        read::<M>(one.get(), &at)?.parse(&at).map(Arc::new)
    };
    let (mut matches, mut unreadable) = (Vec::new(), None);
    for one in listed.matches.iter().enumerate().map(parse) {
        match one {
            Ok(one) => matches.push(one),
            Err(rejection) => drop(unreadable.get_or_insert(rejection)),
        }
    }
    if listed.matches.is_empty() {
        matches.extend(M::default().parse(&field).map(Arc::new));
    }
    let all = earlier.iter().flat_map(|rule| &rule.matches);
    match check_matches("spec.rules", all.chain(&matches)) {
        Ok(()) => (matches, unreadable),
        Err(rejection) => (Vec::new(), Some(rejection)),
    }
}

/// Whether a rule asks for an authorization of its requests, which must not pass without it.
fn has_external_auth(rule: &str) -> bool {
    let filters = |of| items(field(of, "filters"));
    let backends = items(field(rule, "backendRefs")).into_iter();
    let of_backends = backends.flat_map(|backend| filters(backend.get()));
    let mut filters = filters(rule).into_iter().chain(of_backends);
    filters.any(|one| string(field(one.get(), "type")).as_deref() == Some("ExternalAuth"))
}

/// Rejects more matches and regular expressions than a route may have.
pub(crate) fn check_matches<'a>(
    field: &str,
    all: impl Iterator<Item = &'a Arc<Match>>,
) -> Result<(), Rejection> {
    let (mut count, mut patterns) = (0, 0);
    for one in all {
        count += 1;
        patterns += route::patterns(&one.message);
    }
    if count <= MAX_MATCHES_OF_ROUTE && patterns <= MAX_PATTERNS_OF_ROUTE {
        return Ok(());
    }
    let message = format!(
        "{field}: {count} matches with {patterns} regular expressions are more than \
         {MAX_MATCHES_OF_ROUTE} and {MAX_PATTERNS_OF_ROUTE}"
    );
    Err(Rejection::new(UNSUPPORTED_VALUE, message))
}

fn rule(
    meta: &Meta,
    rule: spec::Rule<IgnoredAny>,
    matches: &[Arc<Match>],
    at: &str,
) -> Result<ParsedRule, Rejection> {
    bounded(&format!("{at}.backendRefs"), &rule.backend_refs, MAX_ITEMS)?;
    let context = filters::Context { meta, matches };
    let (mut found, mut of_filters) = (Found::default(), Found::default());
    let filters_at = format!("{at}.filters");
    let filters = filters::parse(rule.filters, &filters_at, &context, &mut of_filters)?;
    let responds = filters.iter().any(filters::is_redirect);
    if responds && !rule.backend_refs.is_empty() {
        let message = format!("{at}: a RequestRedirect excludes backendRefs");
        return Err(Rejection::new(INCOMPATIBLE_FILTERS, message));
    }
    let external_auth = of_filters.external_auth.take();
    let mut backends = Vec::new();
    for (position, backend_ref) in rule.backend_refs.into_iter().enumerate() {
        let at = format!("{at}.backendRefs[{position}]");
        backends.push(backend(backend_ref, &at, &context, &mut found)?);
    }
    found.references.append(&mut of_filters.references);
    let of_backends = backends.iter().flat_map(|backend| &backend.filters);
    let mut all = filters.iter().chain(of_backends);
    if external_auth.is_some() && all.any(filters::is_rewrite) {
        let message = format!(
            "{at}: ExternalAuth excludes URLRewrite, because the called pods match what they get"
        );
        return Err(Rejection::new(INCOMPATIBLE_FILTERS, message));
    }
    let settings = RequestSettings {
        timeouts: timeouts(&rule.timeouts, at)?,
        retry: rule.retry.map(|spec| retry(spec, at)).transpose()?,
        session: rule
            .session_persistence
            .map(|spec| session_persistence(spec, at))
            .transpose()?,
    };
    let message = RouteRule {
        name: name(meta, rule.name.as_deref(), at)?,
        backends,
        filters,
        ..RouteRule::default()
    };
    Ok(ParsedRule {
        matches: matches.to_vec(),
        message: Arc::new(message),
        settings,
        references: found.references,
        unknown_filter: of_filters.unknown.or(found.unknown),
        external_auth,
    })
}

/// The name of a rule in logs and metrics.
fn name(meta: &Meta, rule: Option<&str>, at: &str) -> Result<String, Rejection> {
    let route = route_name(meta);
    match rule.filter(|rule| !rule.is_empty()) {
        None => Ok(route),
        Some(rule) if is_hostname(rule) => Ok(format!("{route}/{rule}")),
        Some(rule) => refuse(at, "name", rule, "a name"),
    }
}

fn route_name(meta: &Meta) -> String {
    format!("{} {}", meta.kind, meta.key)
}

fn backend(
    backend: BackendRef,
    at: &str,
    context: &filters::Context<'_>,
    found: &mut Found,
) -> Result<RouteBackend, Rejection> {
    let weight = backend.weight.unwrap_or(1);
    if weight > MAX_WEIGHT {
        return refuse(at, "weight", weight, &format!("at most {MAX_WEIGHT}"));
    }
    let filters_at = format!("{at}.filters");
    let position = found.references.len();
    let filters = filters::parse(backend.filters, &filters_at, context, found)?;
    if filters.iter().any(filters::is_response) {
        let message = format!("{filters_at}: RequestRedirect and CORS are filters of rules only");
        return Err(Rejection::new(INCOMPATIBLE_FILTERS, message));
    }
    if found.external_auth.is_some() {
        let message = format!("{filters_at}: ExternalAuth is a filter of rules only");
        return Err(Rejection::new(INCOMPATIBLE_FILTERS, message));
    }
    let named = (backend.group.as_deref(), backend.kind.as_deref());
    let is_named = |kind: &Kind| named == (Some(kind.row().group), Some(kind.row().name));
    let external = KINDS.into_iter().find(is_named);
    let object = ObjectRef {
        group: backend.group,
        kind: backend.kind,
        namespace: backend.namespace,
        name: backend.name,
        port: backend.port,
    };
    let reference = Reference {
        external,
        ..reference(object, &context.meta.key, at.to_owned())
    };
    let name = reference.name();
    found.references.insert(position, reference);
    Ok(RouteBackend {
        name,
        weight,
        filters,
        // The catalog has the host, or not.
        external: external.map(|_| ExternalBackend::default()),
    })
}

/// A reference of the route `from`. Its target is checked with the catalog.
pub(super) fn reference(object: ObjectRef, from: &Key, field: String) -> Reference {
    let group = object
        .group
        .filter(|group| !group.is_empty() && group != "core");
    let kind = object
        .kind
        .filter(|kind| !kind.is_empty() && kind != "Service");
    let other_kind = (group.is_some() || kind.is_some()).then(|| {
        let kind = kind.as_deref().unwrap_or("Service");
        let group = group.map_or(String::new(), |group| format!(" of group {group}"));
        format!("{kind}{group}")
    });
    let namespace = object.namespace.filter(|namespace| !namespace.is_empty());
    Reference {
        other_kind,
        key: Key {
            namespace: namespace.map_or_else(|| from.namespace.clone(), Into::into),
            name: object.name.into(),
        },
        port: object.port.filter(|port| *port != 0),
        external: None,
        field,
    }
}

/// The timeouts of a request and of an attempt, in milliseconds. 0: none.
pub(crate) fn timeouts(timeouts: &Timeouts, at: &str) -> Result<[Option<u64>; 2], Rejection> {
    let Timeouts {
        request,
        backend_request,
    } = *timeouts;
    if request > Some(Milliseconds(0)) && backend_request > request {
        let value = format!("{}ms", backend_request.unwrap_or_default().0);
        let expected = "at most the request timeout";
        return refuse(at, "timeouts.backendRequest", value, expected);
    }
    Ok([request, backend_request].map(|timeout| Some(timeout?.0)))
}

pub(crate) fn retry(retry: spec::Retry, at: &str) -> Result<RouteRetry, Rejection> {
    bounded(&format!("{at}.retry.codes"), &retry.codes, MAX_MATCHES)?;
    let retry = RouteRetry {
        statuses: retry.codes,
        attempts: retry.attempts.unwrap_or(DEFAULT_RETRY_ATTEMPTS),
        backoff: retry.backoff.unwrap_or_default().0,
    };
    route::check_retry(&retry).map_err(|violation| violates(at, &violation))?;
    Ok(retry)
}

/// The session of a rule (GEP-1619).
pub(crate) fn session_persistence(
    spec: spec::SessionPersistence,
    at: &str,
) -> Result<SessionPersistence, Rejection> {
    let at = format!("{at}.sessionPersistence");
    let lifetime = spec.cookie_config.and_then(|config| config.lifetime_type);
    let field = format!("{at}.cookieConfig.lifetimeType");
    let lifetimes = [("Session", false), ("Permanent", true)];
    let permanent = one_of(&field, lifetime.as_deref(), &lifetimes)?;
    let kinds = [("Cookie", false), ("Header", true)];
    let is_header = one_of(&format!("{at}.type"), spec.kind.as_deref(), &kinds)?;
    let name = |default: &str| spec.session_name.clone().unwrap_or(default.to_owned());
    let (cookie, header) = if is_header {
        (String::new(), name(DEFAULT_SESSION_HEADER))
    } else {
        (name(DEFAULT_SESSION_COOKIE), String::new())
    };
    let session = SessionPersistence {
        absolute_timeout: spec.absolute_timeout.unwrap_or_default().0,
        idle_timeout: spec.idle_timeout.unwrap_or_default().0,
        cookie,
        header,
        permanent,
    };
    match policy::check_session(&session) {
        Ok(()) => Ok(session),
        Err(violation) => Err(violates(&at, &violation)),
    }
}

/// The name of a header, in lower case.
pub(crate) fn header_name(field: &str, name: &str) -> Result<String, Rejection> {
    if is_token(name) {
        Ok(name.to_ascii_lowercase())
    } else {
        Err(unsupported(field, name, "the name of a header"))
    }
}
