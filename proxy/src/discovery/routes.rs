//! Conversion of routes from the controller's messages. Rejects what this proxy cannot apply
//! completely. Pure.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::policy::{MAX_ITEMS, check_fault, check_session};
use diy_mesh_proto::route::{check_filter, check_retry, patterns};
use http::StatusCode;
use proto::{path_modifier, route_filter::Kind};

use super::resource::Resource;
use crate::egress::name_of;
use crate::endpoint::{ExternalHost, ServerTls};
use crate::http::fields::FieldEdit;
use crate::route::fault::{Fault, Share};
use crate::route::matching::{Match, Matches};
use crate::route::{BackendRef, Changes, RetryPolicy, RouteBackend, Routes, Rule};
use crate::secure::tls::parse_roots;

/// Maximum number of matches and of rules of a destination.
pub(super) const MAX_MATCHES: usize = 10_000;
/// Maximum number of regular expressions of a destination.
pub(super) const MAX_PATTERNS: usize = 1000;

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
    let mut budget = MAX_PATTERNS;
    let in_fault = |(index, fault): (usize, proto::Fault)| {
        let name = fault.name.clone();
        let fault = parse_fault(fault, &mut budget);
        fault.map_err(|error| format!("fault {index} ({name}): {error}"))
    };
    let faults: Result<_, _> = faults.into_iter().enumerate().map(in_fault).collect();
    let faults = faults?;
    let parsed = compile_matches(&matches, rules.len(), &mut budget)?;
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

fn parse_fault(fault: proto::Fault, budget: &mut usize) -> Result<Fault, String> {
    check_fault(&fault).map_err(|violation| violation.to_string())?;
    let abort = u16::try_from(fault.abort_status).ok();
    let abort = abort.and_then(|status| StatusCode::from_u16(status).ok());
    Ok(Fault {
        name: fault.name.into(),
        matches: parse_conditions(&fault.matches, budget)?,
        delay: timeout(fault.delay).zip(parse_share(fault.delayed)),
        abort: abort.zip(parse_share(fault.aborted)),
    })
}

/// A share that was checked before, or `None` without a share.
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
    matches: &[proto::RouteMatch],
    budget: &mut usize,
) -> Result<Matches, String> {
    let mut matches = compile_matches(matches, usize::MAX, budget)?;
    matches.iter_mut().for_each(|one| one.rule = 0);
    Ok(Matches::new(matches))
}

/// Matches that select one of several rules. `budget`: so many regular expressions are left.
pub(super) fn compile_matches(
    matches: &[proto::RouteMatch],
    rules: usize,
    budget: &mut usize,
) -> Result<Vec<Match>, String> {
    let mut compile = |one: &proto::RouteMatch| {
        *budget = budget
            .checked_sub(patterns(one))
            .ok_or_else(|| format!("more than {MAX_PATTERNS} regular expressions"))?;
        let compiled = Match::compile(one).map_err(|violation| violation.to_string())?;
        if compiled.rule < rules {
            Ok(compiled)
        } else {
            Err(format!("rule {} of {rules}", one.rule))
        }
    };
    let at = |(index, one)| compile(one).map_err(|error| format!("match {index}: {error}"));
    matches.iter().enumerate().map(at).collect()
}

/// `selects_by_prefix`: all matches of the rule have one that can be replaced.
fn parse_rule(
    rule: proto::RouteRule,
    selects_by_prefix: bool,
    externals: &mut Externals,
) -> Result<Rule, String> {
    if let Some(session) = &rule.session_persistence {
        check_session(session).map_err(|error| format!("sessionPersistence: {error}"))?;
    }
    let mut parsed = Rule {
        name: rule.name.into(),
        request_timeout: timeout(rule.request_timeout),
        backend_request_timeout: timeout(rule.backend_request_timeout),
        retry: rule.retry.map(parse_retry).transpose()?,
        to_destination: rule.to_destination,
        is_invalid: rule.invalid,
        session: rule.session_persistence,
        ..Rule::default()
    };
    let mut changes = Changes::default();
    for filter in rule.filters {
        match checked(filter)? {
            Kind::Redirect(redirect) => parsed.redirect = Some(redirect),
            Kind::Cors(cors) => parsed.cors = Some(cors),
            kind => change(&mut changes, kind)?,
        }
    }
    parsed.changes = Arc::new(changes);
    for backend in rule.backends {
        let to = parse_backend(backend.name, backend.external, externals)?;
        let mut changes = parsed.changes.clone();
        for filter in backend.filters {
            change(Arc::make_mut(&mut changes), checked(filter)?)?;
        }
        parsed.backends.push(RouteBackend {
            to,
            weight: backend.weight,
            changes,
        });
    }
    let changes = parsed.backends.iter().map(|one| &one.changes);
    let rewrites = changes.chain([&parsed.changes]);
    let rewrites = rewrites.flat_map(|changes| &changes.rewrite);
    let redirect = parsed.redirect.iter().map(|redirect| &redirect.path);
    let paths = rewrites.map(|rewrite| &rewrite.path).chain(redirect);
    let is_prefix =
        |path: &proto::PathModifier| matches!(path.kind, Some(path_modifier::Kind::Prefix(_)));
    let replaces_prefix = paths.flatten().any(is_prefix);
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
    check_retry(&retry).map_err(|violation| violation.to_string())?;
    let statuses = retry.statuses.iter().map(|status| *status as u16);
    Ok(Arc::new(RetryPolicy {
        statuses: statuses.collect(),
        attempts: retry.attempts,
        backoff: Duration::from_millis(retry.backoff).min(MAX_BACKOFF),
    }))
}

fn timeout(milliseconds: u64) -> Option<Duration> {
    (milliseconds > 0).then(|| Duration::from_millis(milliseconds))
}

/// The filter, if this proxy knows it and its values.
fn checked(filter: proto::RouteFilter) -> Result<Kind, String> {
    let kind = filter.kind.ok_or("unknown kind of filter")?;
    check_filter(&kind).map_err(|violation| violation.to_string())?;
    Ok(kind)
}

/// Adds a filter that changes requests or responses.
fn change(changes: &mut Changes, filter: Kind) -> Result<(), String> {
    match filter {
        Kind::RequestHeaders(modifier) => modify(&mut changes.request, modifier),
        Kind::ResponseHeaders(modifier) => modify(&mut changes.response, modifier),
        Kind::Rewrite(rewrite) => {
            let known = changes.rewrite.get_or_insert_default();
            if !rewrite.hostname.is_empty() {
                known.hostname = rewrite.hostname;
            }
            known.path = rewrite.path.or(known.path.take());
        }
        Kind::Mirror(mirror) => {
            Resource::backend(&mirror.backend)?;
            changes.mirrors.push(mirror);
        }
        Kind::Redirect(_) => return Err("a redirect of a backend".to_owned()),
        Kind::Cors(_) => return Err("CORS of a backend".to_owned()),
    }
    Ok(())
}

/// Set, then add, then remove.
fn modify(edits: &mut Vec<FieldEdit>, modifier: proto::HeaderModifier) {
    let proto::HeaderModifier { set, add, remove } = modifier;
    let set = set.into_iter();
    let set = set.map(|field| FieldEdit::Set(field.name, field.value));
    let add = add.into_iter();
    let add = add.map(|field| FieldEdit::Add(field.name, field.value));
    let remove = remove.into_iter().map(FieldEdit::Remove);
    set.chain(add)
        .chain(remove)
        .for_each(|edit| edit.push(edits));
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
