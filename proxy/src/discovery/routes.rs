//! Conversion of routes from the controller's messages. Rejects what this proxy cannot apply
//! completely. Pure.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::pattern::Pattern;
use diy_mesh_proto::policy::{MAX_ITEMS, check_fault, check_session};
use http::{Method, StatusCode};
use proto::{field_match, path_match, path_modifier, route_filter::Kind};

use super::resource::Resource;
use crate::egress::name_of;
use crate::endpoint::{ExternalHost, ServerTls};
use crate::http::fields::FieldEdit;
use crate::route::fault::{Fault, Share};
use crate::route::matching::{FieldMatch, Match, Matches, PathMatch, ValueMatch};
use crate::route::session::{Carrier, SessionPersistence};
use crate::route::url::{PathChange, Redirect, Rewrite};
use crate::route::{
    BackendRef, Changes, Cors, Mirror, Origin, REDIRECTS, RetryPolicy, RouteBackend, Routes, Rule,
};
use crate::secure::tls::parse_roots;

/// Maximum number of matches and of rules of a destination.
pub(super) const MAX_MATCHES: usize = 10_000;
/// Maximum number of regular expressions of a destination.
pub(super) const MAX_PATTERNS: usize = 1000;

/// Maximum number of attempts after the first one: more never help.
const MAX_RETRIES: u32 = 10;
/// Maximum time between two attempts. The timeout of the request may be longer, or there is none.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Maximum length of the reason of a rejection, in characters.
pub(super) const MAX_REASON: usize = 500;

/// Converts routes. Fails with the first thing that is invalid or unknown.
pub(super) fn parse(routes: proto::Routes) -> Result<Routes, String> {
    let routes = convert(routes).map(Routes::measured);
    routes.map_err(|reason| reason.chars().take(MAX_REASON).collect())
}

fn convert(routes: proto::Routes) -> Result<Routes, String> {
    let proto::Routes {
        matches,
        rules,
        faults,
        tcp,
        ..
    } = routes;
    let of_faults: usize = faults.iter().map(|fault| fault.matches.len()).sum();
    for (count, max, what) in [
        (matches.len() + of_faults, MAX_MATCHES, "matches"),
        (rules.len(), MAX_MATCHES, "rules"),
        (faults.len(), MAX_ITEMS, "faults"),
    ] {
        if count > max {
            return Err(format!("{count} {what}: at most {max} are allowed"));
        }
    }
    let mut patterns = MAX_PATTERNS;
    let in_fault = |(index, fault): (usize, proto::Fault)| {
        let name = fault.name.clone();
        let fault = parse_fault(fault, &mut patterns);
        fault.map_err(|error| format!("fault {index} ({name}): {error}"))
    };
    let faults: Result<_, _> = faults.into_iter().enumerate().map(in_fault).collect();
    let faults = faults?;
    let mut parsed = Vec::with_capacity(matches.len());
    for (index, one) in matches.into_iter().enumerate() {
        let one = parse_match(one, rules.len(), &mut patterns);
        parsed.push(one.map_err(|error| format!("match {index}: {error}"))?);
    }
    let mut externals = Externals::new();
    let in_rule = |(index, rule): (usize, proto::RouteRule)| {
        let name = rule.name.clone();
        let needs_prefix = parsed
            .iter()
            .any(|one| one.rule == index && one.prefix_len().is_none());
        let rule = parse_rule(rule, !needs_prefix, &mut externals);
        rule.map(Arc::new)
            .map_err(|error| format!("rule {index} ({name}): {error}"))
    };
    let rules: Result<_, _> = rules.into_iter().enumerate().map(in_rule).collect();
    let tcp = tcp.map(|rule| {
        let name = rule.name.clone();
        let rule = parse_connection_rule(rule, &mut externals);
        rule.map(Arc::new)
            .map_err(|error| format!("rule of connections ({name}): {error}"))
    });
    let routes = Routes::new(parsed, rules?);
    Ok(routes
        .with_faults(faults)
        .with_connections(tcp.transpose()?))
}

/// A rule of connections has a name and backends. The rest would have no effect on them.
fn parse_connection_rule(
    rule: proto::RouteRule,
    externals: &mut Externals,
) -> Result<Rule, String> {
    let backends = rule.backends.iter().map(|backend| proto::RouteBackend {
        filters: vec![],
        ..backend.clone()
    });
    let expected = proto::RouteRule {
        name: rule.name.clone(),
        backends: backends.collect(),
        invalid: rule.invalid,
        ..proto::RouteRule::default()
    };
    if rule == expected {
        parse_rule(expected, true, externals)
    } else {
        Err("more than backends".to_owned())
    }
}

fn parse_fault(fault: proto::Fault, patterns: &mut usize) -> Result<Fault, String> {
    check_fault(&fault).map_err(|violation| violation.to_string())?;
    let abort = match fault.abort_status {
        0 => None,
        status => Some(parse_status(status, "abort with")?),
    };
    Ok(Fault {
        name: fault.name.into(),
        matches: parse_conditions(fault.matches, patterns)?,
        delay: timeout(fault.delay).zip(parse_share(fault.delayed)),
        abort: abort.zip(parse_share(fault.aborted)),
    })
}

/// A share that was checked before. None: there is none.
fn parse_share(share: Option<proto::Share>) -> Option<Share> {
    let proto::Share {
        numerator,
        denominator,
    } = share?;
    let denominator = NonZeroU32::new(denominator)?;
    Some(Share {
        numerator,
        denominator,
    })
}

/// Matches of requests to which a setting applies: they select no rule.
pub(super) fn parse_conditions(
    matches: Vec<proto::RouteMatch>,
    patterns: &mut usize,
) -> Result<Matches, String> {
    let matches = matches.into_iter();
    let matches = matches.map(|one| proto::RouteMatch { rule: 0, ..one });
    parse_matches(matches.collect(), 1, patterns)
}

/// Matches that select one of several rules.
pub(super) fn parse_matches(
    matches: Vec<proto::RouteMatch>,
    rules: usize,
    patterns: &mut usize,
) -> Result<Matches, String> {
    let parse = |(index, one): (usize, proto::RouteMatch)| {
        let one = parse_match(one, rules, patterns);
        one.map_err(|error| format!("match {index}: {error}"))
    };
    let matches: Result<_, _> = matches.into_iter().enumerate().map(parse).collect();
    Ok(Matches::new(matches?))
}

fn parse_session(session: proto::SessionPersistence) -> Result<SessionPersistence, String> {
    check_session(&session).map_err(|error| format!("sessionPersistence: {error}"))?;
    let seconds = |milliseconds: u64| (milliseconds > 0).then(|| milliseconds.div_ceil(1000));
    Ok(SessionPersistence {
        carrier: if session.header.is_empty() {
            Carrier::Cookie(session.cookie)
        } else {
            Carrier::Header(session.header)
        },
        absolute_timeout: seconds(session.absolute_timeout),
        idle_timeout: seconds(session.idle_timeout),
        permanent: session.permanent,
    })
}

fn parse_status(status: u32, what: &str) -> Result<StatusCode, String> {
    let known = u16::try_from(status).ok();
    let known = known.filter(|known| (400..=599).contains(known));
    let known = known.and_then(|known| StatusCode::from_u16(known).ok());
    known.ok_or_else(|| format!("{what} the status {status}, expected 400 to 599"))
}

fn parse_match(
    one: proto::RouteMatch,
    rules: usize,
    patterns: &mut usize,
) -> Result<Match, String> {
    let rule = usize::try_from(one.rule).ok().filter(|at| *at < rules);
    let rule = rule.ok_or_else(|| format!("rule {} of {rules}", one.rule))?;
    let mut pattern = |expression: &str| {
        *patterns = patterns
            .checked_sub(1)
            .ok_or_else(|| format!("more than {MAX_PATTERNS} regular expressions"))?;
        Pattern::parse(expression).map_err(|error| {
            let shown: String = expression.chars().take(100).collect();
            format!("regular expression {shown:?}: {error}")
        })
    };
    let path = match one.path {
        None => None,
        Some(path) => Some(match path.kind {
            Some(path_match::Kind::Exact(path)) => PathMatch::Exact(absolute(path)?),
            Some(path_match::Kind::Prefix(path)) => PathMatch::prefix(&absolute(path)?),
            Some(path_match::Kind::Regex(expression)) => PathMatch::Regex(pattern(&expression)?),
            None => return Err("unknown kind of path match".to_owned()),
        }),
    };
    let mut fields = |all: Vec<proto::FieldMatch>, normal: fn(&str) -> String| {
        let mut names = HashSet::new();
        let mut fields = Vec::with_capacity(all.len());
        // Of several with one name, the first one counts.
        for field in all {
            let value = match field.kind {
                Some(field_match::Kind::Exact(value)) => ValueMatch::Exact(value),
                Some(field_match::Kind::Regex(regex)) => ValueMatch::Regex(pattern(&regex)?),
                None => return Err(format!("unknown kind of match of {:?}", field.name)),
            };
            if names.insert(normal(&field.name)) {
                let name = field.name;
                fields.push(FieldMatch { name, value });
            }
        }
        Ok(fields)
    };
    let headers = fields(one.headers, str::to_ascii_lowercase)?;
    let query = fields(one.query, str::to_owned)?;
    let method = Some(one.method).filter(|method| !method.is_empty());
    if let Some(method) = method.as_ref() {
        Method::from_bytes(method.as_bytes()).map_err(|_| format!("method {method:?}"))?;
    }
    Ok(Match {
        rule,
        path,
        headers,
        query,
        method,
    })
}

/// `selects_by_prefix`: all matches of the rule have one that can be replaced.
fn parse_rule(
    rule: proto::RouteRule,
    selects_by_prefix: bool,
    externals: &mut Externals,
) -> Result<Rule, String> {
    let mut parsed = Rule {
        name: rule.name.into(),
        request_timeout: timeout(rule.request_timeout),
        backend_request_timeout: timeout(rule.backend_request_timeout),
        retry: rule.retry.map(parse_retry).transpose()?,
        to_destination: rule.to_destination,
        is_invalid: rule.invalid,
        session: rule.session_persistence.map(parse_session).transpose()?,
        ..Rule::default()
    };
    let mut changes = Changes::default();
    for filter in rule.filters {
        match filter.kind {
            Some(Kind::Redirect(redirect)) => parsed.redirect = Some(parse_redirect(redirect)?),
            Some(Kind::Cors(cors)) => parsed.cors = Some(parse_cors(cors)?),
            kind => change(&mut changes, kind)?,
        }
    }
    parsed.changes = Arc::new(changes);
    for backend in rule.backends {
        let to = parse_backend(backend.name, backend.external, externals)?;
        let mut changes = parsed.changes.clone();
        for filter in backend.filters {
            change(Arc::make_mut(&mut changes), filter.kind)?;
        }
        parsed.backends.push(RouteBackend {
            to,
            weight: backend.weight,
            changes,
        });
    }
    let redirect = parsed.redirect.as_ref().map(|redirect| &redirect.path);
    let rewrites = parsed.backends.iter().map(|one| &one.changes.rewrite.path);
    let replaces_prefix = rewrites
        .chain([&parsed.changes.rewrite.path])
        .chain(redirect)
        .any(|path| matches!(path, Some(PathChange::Prefix(_))));
    if replaces_prefix && !selects_by_prefix {
        return Err("a prefix is replaced, and not all matches have a prefix".to_owned());
    }
    Ok(parsed)
}

/// Backends outside of the cluster that are parsed, by name: equal messages are one backend.
type Externals = HashMap<String, (proto::ExternalBackend, Arc<ExternalHost>)>;

fn parse_backend(
    name: String,
    external: Option<proto::ExternalBackend>,
    externals: &mut Externals,
) -> Result<Option<BackendRef>, String> {
    let Some(external) = external else {
        return if name.is_empty() {
            Ok(None)
        } else {
            Resource::backend(&name).map(|_| Some(BackendRef::Service(name.into())))
        };
    };
    if !name.is_empty() {
        let other = external.name;
        return Err(format!(
            "backend {name:?} and {other:?}: expected one of them"
        ));
    }
    let host = match externals.get(&external.name) {
        Some((known, host)) if *known == external => host.clone(),
        _ => {
            let name = external.name.clone();
            let host = parse_external(external.clone());
            let host = Arc::new(host.map_err(|error| format!("{name}: {error}"))?);
            externals.insert(name, (external, host.clone()));
            host
        }
    };
    Ok(Some(BackendRef::External(host)))
}

fn parse_external(external: proto::ExternalBackend) -> Result<ExternalHost, String> {
    if external.name.is_empty() {
        return Err("a backend outside of the cluster without a name".to_owned());
    }
    let port = u16::try_from(external.port).ok().filter(|port| *port != 0);
    let port = port.ok_or_else(|| format!("port {}, expected 1 to 65535", external.port))?;
    Ok(ExternalHost {
        name: external.name.into(),
        host: dns_name(external.host)?.into(),
        port,
        tls: external.tls.map(parse_tls).transpose()?,
    })
}

fn parse_tls(tls: proto::ExternalTls) -> Result<Arc<ServerTls>, String> {
    let name = dns_name(tls.server_name)?;
    let server_name = name.clone().try_into();
    Ok(Arc::new(ServerTls {
        server_name: server_name.map_err(|error| format!("server name {name:?}: {error}"))?,
        roots: if tls.roots.is_empty() {
            vec![]
        } else {
            parse_roots(&tls.roots)?
        },
        configs: Default::default(),
    }))
}

/// A name that can be resolved: in lower case, and no address.
fn dns_name(name: String) -> Result<String, String> {
    if name_of(name.as_bytes()).as_ref() == Some(&name) {
        Ok(name)
    } else {
        let shown: String = name.chars().take(100).collect();
        Err(format!("host {shown:?}: expected a DNS name in lower case"))
    }
}

fn parse_retry(retry: proto::RouteRetry) -> Result<Arc<RetryPolicy>, String> {
    let status = |status| parse_status(status, "retry of").map(|status| status.as_u16());
    Ok(Arc::new(RetryPolicy {
        statuses: retry
            .statuses
            .into_iter()
            .map(status)
            .collect::<Result<_, _>>()?,
        attempts: retry.attempts.min(MAX_RETRIES),
        backoff: Duration::from_millis(retry.backoff).min(MAX_BACKOFF),
    }))
}

fn timeout(milliseconds: u64) -> Option<Duration> {
    (milliseconds > 0).then(|| Duration::from_millis(milliseconds))
}

/// Adds a filter that changes requests or responses.
fn change(changes: &mut Changes, filter: Option<Kind>) -> Result<(), String> {
    match filter {
        Some(Kind::RequestHeaders(modifier)) => modify(&mut changes.request, modifier),
        Some(Kind::ResponseHeaders(modifier)) => modify(&mut changes.response, modifier),
        Some(Kind::Rewrite(rewrite)) => {
            let Rewrite { host, path } = &mut changes.rewrite;
            if !rewrite.hostname.is_empty() {
                *host = Some(hostname(rewrite.hostname)?);
            }
            if let Some(change) = rewrite.path {
                *path = Some(path_change(change)?);
            }
            Ok(())
        }
        Some(Kind::Mirror(mirror)) => {
            Resource::backend(&mirror.backend)?;
            if mirror.denominator == 0 {
                return Err("mirror: a share of 0 parts".to_owned());
            }
            changes.mirrors.push(Mirror {
                backend: mirror.backend.into(),
                numerator: mirror.numerator,
                denominator: mirror.denominator,
            });
            Ok(())
        }
        Some(Kind::Redirect(_)) => Err("a redirect of a backend".to_owned()),
        Some(Kind::Cors(_)) => Err("CORS of a backend".to_owned()),
        None => Err("unknown kind of filter".to_owned()),
    }
}

/// Set, then add, then remove.
fn modify(edits: &mut Vec<FieldEdit>, modifier: proto::HeaderModifier) -> Result<(), String> {
    for field in modifier.set {
        FieldEdit::set(&field.name, &field.value)?.push(edits);
    }
    for field in modifier.add {
        FieldEdit::add(&field.name, &field.value)?.push(edits);
    }
    for name in modifier.remove {
        FieldEdit::remove(&name)?.push(edits);
    }
    Ok(())
}

fn path_change(modifier: proto::PathModifier) -> Result<PathChange, String> {
    match modifier.kind {
        Some(path_modifier::Kind::Full(path)) => Ok(PathChange::Full(absolute(path)?)),
        Some(path_modifier::Kind::Prefix(path)) if path.is_empty() => Ok(PathChange::Prefix(path)),
        Some(path_modifier::Kind::Prefix(path)) => Ok(PathChange::Prefix(absolute(path)?)),
        None => Err("unknown kind of path modifier".to_owned()),
    }
}

/// A path that begins with a slash, of characters that a request line may have.
fn absolute(path: String) -> Result<String, String> {
    let is_valid = |byte: u8| byte.is_ascii_graphic() && !b"?#".contains(&byte);
    if path.starts_with('/') && path.bytes().all(is_valid) {
        Ok(path)
    } else {
        Err(format!(
            "path {path:?}: expected a path that begins with a slash, without a query"
        ))
    }
}

fn hostname(name: String) -> Result<String, String> {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if !name.is_empty() && name.len() <= 253 && name.bytes().all(is_valid) {
        Ok(name)
    } else {
        Err(format!("host name {name:?}: expected a DNS name"))
    }
}

fn parse_redirect(redirect: proto::Redirect) -> Result<Redirect, String> {
    let text = |text: String| Some(text).filter(|text| !text.is_empty());
    let scheme = text(redirect.scheme);
    if let Some(scheme) = scheme
        .as_ref()
        .filter(|one| !["http", "https"].contains(&&***one))
    {
        return Err(format!("redirect to the scheme {scheme:?}"));
    }
    let status = u16::try_from(redirect.status).ok();
    let status = status.and_then(|status| StatusCode::from_u16(status).ok());
    let status = status.filter(|status| REDIRECTS.contains(status));
    let port = u16::try_from(redirect.port);
    Ok(Redirect {
        scheme,
        host: text(redirect.hostname).map(hostname).transpose()?,
        path: redirect.path.map(path_change).transpose()?,
        port: Some(port.map_err(|_| format!("redirect to the port {}", redirect.port))?)
            .filter(|port| *port != 0),
        status: status.ok_or_else(|| format!("redirect with the status {}", redirect.status))?,
    })
}

fn parse_cors(cors: proto::Cors) -> Result<Cors, String> {
    let origins = cors.allow_origins.iter().map(|one| Origin::parse(one));
    let origins = origins.collect::<Result<_, _>>()?;
    let lists = [
        &cors.allow_methods,
        &cors.allow_headers,
        &cors.expose_headers,
    ];
    for name in lists.into_iter().flatten() {
        http::HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| format!("CORS: {name:?} is no name of a method or field"))?;
    }
    Ok(Cors {
        origins,
        credentials: cors.allow_credentials,
        methods: cors.allow_methods,
        headers: cors.allow_headers,
        expose: cors.expose_headers,
        max_age: cors.max_age,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_between_attempts_is_bounded() {
        for (milliseconds, expected) in [
            (0, Duration::ZERO),
            (25, Duration::from_millis(25)),
            (u64::MAX, MAX_BACKOFF),
        ] {
            let retry = proto::RouteRetry {
                backoff: milliseconds,
                ..proto::RouteRetry::default()
            };
            assert_eq!(parse_retry(retry).unwrap().backoff, expected);
        }
    }
}
