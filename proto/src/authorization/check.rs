//! The AuthorizationPolicies that the controller accepts: a proxy knows all their conditions, and
//! they are within the bounds.

use super::claims::{ClaimCondition, check_claim};
use super::fields::{FieldCondition, HostPattern};
use super::index::asking_action;
use super::paths::{PathPattern, check_length};
use super::rule::{ISSUERS_REVISION, REVISION};
use super::sources::Source;
use crate::field;
use crate::mesh::v1 as proto;
use crate::mesh::v1::authorization_policy::Action;
use crate::mesh::v1::authorization_source::Kind;
use crate::mesh::v1::authorizer::Protocol;
use crate::policy::{Violation, check_name, violation};

/// Rules of a policy.
pub const MAX_RULES: usize = 128;
/// Items of each list in a rule.
pub const MAX_ITEMS: usize = 64;

/// Issuers of tokens of a policy.
pub const MAX_ISSUERS: usize = 8;
/// Audiences of an issuer, and fields with its claims.
const MAX_OF_ISSUER: usize = 16;
/// The keys of an issuer, in bytes.
const MAX_KEY_BYTES: usize = 64 * 1024;
/// The path of an authorization server, in bytes, and the time for its answer, in milliseconds.
const MAX_PATH_BYTES: usize = 1024;
const MAX_AUTHORIZER_TIMEOUT: u64 = 60_000;
/// The most bytes of a body that an authorization server gets.
const MAX_BODY: u32 = 65_535;

/// Checks a policy of egress. Fields have the names of the AuthorizationPolicy.
pub fn check_egress(policy: &proto::AuthorizationPolicy) -> Result<(), Violation> {
    let refuse = |field, expected| Err(violation(field, "", expected));
    match Action::try_from(policy.action) {
        Ok(Action::Allow | Action::Deny) => {}
        _ => return refuse("action", "ALLOW or DENY, of calls by the pods"),
    }
    if !policy.issuers.is_empty() {
        return refuse("issuers", "absent, of calls by the pods");
    }
    for rule in &policy.rules {
        if !rule.requests.is_empty() || !rule.not_sources.is_empty() {
            return refuse("rules", "destinations and ports, of calls by the pods");
        }
        for source in rule.sources.iter().flat_map(|list| &list.sources) {
            match source.kind {
                Some(Kind::IpBlock(_)) => {}
                Some(Kind::Host(_)) if policy.action == Action::Allow as i32 => {}
                // The application may leave the name out, or have another one for the address.
                Some(Kind::Host(_)) => {
                    return refuse("rules.destinations.host", "ipBlock, with DENY");
                }
                _ => return refuse("rules.destinations", "host or ipBlock"),
            }
        }
    }
    check_policy(policy)
}

/// Checks a policy about calls to pods. Fields have the names of the AuthorizationPolicy.
pub fn check(policy: &proto::AuthorizationPolicy) -> Result<(), Violation> {
    for rule in &policy.rules {
        let sources = rule.sources.iter().flat_map(|list| &list.sources);
        let mut all = sources.chain(&rule.not_sources);
        if all.any(|source| matches!(source.kind, Some(Kind::Host(_)))) {
            let expected = "a client";
            return Err(violation("rules.sources.host", "", expected));
        }
    }
    check_policy(policy)
}

fn check_policy(policy: &proto::AuthorizationPolicy) -> Result<(), Violation> {
    let action = Action::try_from(policy.action).unwrap_or_default();
    if action == Action::Unspecified {
        let expected = "ALLOW, DENY or ExternalAuth";
        return Err(violation("action", policy.action, expected));
    }
    check_authorizer(policy, action)?;
    // The ports of all rules, at most.
    check_ports("ports", &policy.ports)?;
    check_count("rules", &policy.rules, MAX_RULES)?;
    check_count("issuers", &policy.issuers, MAX_ISSUERS)?;
    policy.issuers.iter().try_for_each(check_issuer)?;
    let has_issuers = !policy.issuers.is_empty();
    if has_issuers && policy.rules.is_empty() {
        return Err(violation("issuers", "", "rules, with issuers"));
    }
    for rule in &policy.rules {
        check_rule(rule, has_issuers)?;
        let is_everywhere = policy.ports.is_empty() && rule.ports.is_empty();
        if action != Action::Allow && is_everywhere && !rule.requests.is_empty() {
            let expected = "set, for a rule about requests of DENY or ExternalAuth: it denies all other traffic at its ports";
            return Err(violation("rules.ports", "", expected));
        }
    }
    Ok(())
}

/// Checks the external authorization server. Fields have the names below `externalAuth`.
fn check_authorizer(policy: &proto::AuthorizationPolicy, action: Action) -> Result<(), Violation> {
    let asks = [Action::ExternalAuth, Action::ExternalAuthWithBody].contains(&action);
    let authorizer = match (&policy.authorizer, asks) {
        (Some(authorizer), true) => authorizer,
        (None, false) => return Ok(()),
        (_, is_required) => {
            let expected = if is_required {
                "set, with ExternalAuth"
            } else {
                "absent, without ExternalAuth"
            };
            return Err(violation("externalAuth", "", expected));
        }
    };
    if policy.audit {
        return Err(violation("mode", "Audit", "Enforce, with ExternalAuth"));
    }
    let is_http = match Protocol::try_from(authorizer.protocol) {
        Ok(Protocol::Grpc) => false,
        Ok(Protocol::Http) => true,
        _ => {
            return Err(violation(
                "externalAuth.protocol",
                authorizer.protocol,
                "GRPC or HTTP",
            ));
        }
    };
    if authorizer.backend.is_empty() {
        return Err(violation(
            "externalAuth.backendRef",
            "",
            "a Service and a port",
        ));
    }
    let size = authorizer.max_body;
    if size > MAX_BODY || action != asking_action([authorizer]) {
        let (field, expected) = ("externalAuth.forwardBody.maxSize", "at most 65535");
        return Err(violation(field, size, expected));
    }
    let path = &authorizer.path;
    if !is_http && !path.is_empty() {
        return Err(violation("externalAuth.http", path, "absent, with GRPC"));
    }
    let is_in_path = |byte: u8| byte.is_ascii_graphic() && !b"?#".contains(&byte);
    let is_path = path.is_empty() || path.starts_with('/');
    if path.len() > MAX_PATH_BYTES || !is_path || !path.bytes().all(is_in_path) {
        let expected = "a path of at most 1024 visible ASCII characters";
        return Err(violation("externalAuth.http.path", path, expected));
    }
    let (field, names) = (
        "externalAuth.allowedResponseHeaders",
        &authorizer.response_fields,
    );
    check_count(field, names, MAX_ITEMS)?;
    for name in names {
        check_name(field, name)?;
        if field::is_reserved(name) {
            return Err(violation(
                field,
                name,
                "a header that no proxy or connection needs",
            ));
        }
    }
    let field = "externalAuth.allowedHeaders";
    check_count(field, &authorizer.request_fields, MAX_ITEMS)?;
    let mut names = authorizer.request_fields.iter();
    names.try_for_each(|name| check_name(field, name))?;
    if (1..=MAX_AUTHORIZER_TIMEOUT).contains(&authorizer.timeout) {
        Ok(())
    } else {
        let timeout = format!("{}ms", authorizer.timeout);
        Err(violation(
            "externalAuth.timeout",
            timeout,
            "from 1ms to 60s",
        ))
    }
}

/// Checks an issuer of tokens. The caller checks the keys when it has them.
pub fn check_issuer(issuer: &proto::TokenIssuer) -> Result<(), Violation> {
    check_length("issuers.issuer", &issuer.name)?;
    check_count("issuers.audiences", &issuer.audiences, MAX_OF_ISSUER)?;
    let mut audiences = issuer.audiences.iter();
    audiences.try_for_each(|one| check_length("issuers.audiences", one))?;
    if issuer.audiences.is_empty() {
        return Err(violation("issuers.audiences", "", "an audience or more"));
    }
    if issuer.keys.len() > MAX_KEY_BYTES {
        let expected = format!("at most {MAX_KEY_BYTES} bytes");
        return Err(violation("issuers.keys", issuer.keys.len(), &expected));
    }
    check_count("issuers.headers", &issuer.fields, MAX_OF_ISSUER)?;
    for proto::ClaimField { claim, name } in &issuer.fields {
        check_claim("issuers.headers.claim", claim)?;
        check_name("issuers.headers.name", name)?;
        if field::is_reserved(name) || name.eq_ignore_ascii_case("authorization") {
            let expected = "a header that no client, proxy or connection needs";
            return Err(violation("issuers.headers.name", name, expected));
        }
    }
    Ok(())
}

fn check_rule(rule: &proto::AuthorizationRule, has_issuers: bool) -> Result<(), Violation> {
    let revision = if has_issuers {
        ISSUERS_REVISION
    } else {
        REVISION
    };
    if rule.revision != revision {
        return Err(violation(
            "rules.revision",
            rule.revision,
            &revision.to_string(),
        ));
    }
    let sources = rule.sources.as_ref().map_or(&[][..], |list| &list.sources);
    each("rules.sources", sources, Source::parse)?;
    each("rules.notSources", &rule.not_sources, Source::parse)?;
    check_count("rules.ports", &rule.ports, MAX_ITEMS)?;
    check_ports("rules.ports", &rule.ports)?;
    each("rules.requests", &rule.requests, |request| {
        each("methods", &request.methods, |method| check_method(method))?;
        each("paths", &request.paths, PathPattern::parse)?;
        each("hosts", &request.hosts, |host| HostPattern::parse(host))?;
        each("headers", &request.headers, FieldCondition::parse)?;
        each("claims", &request.claims, ClaimCondition::parse)?;
        if !request.claims.is_empty() && !has_issuers {
            return Err(violation("claims", "", "issuers in the policy"));
        }
        Ok(())
    })
}

fn check_ports(field: &'static str, ports: &[u32]) -> Result<(), Violation> {
    let invalid = ports
        .iter()
        .find(|port| !(1..=u32::from(u16::MAX)).contains(*port));
    invalid.map_or(Ok(()), |port| {
        Err(violation(field, port, "from 1 to 65535"))
    })
}

/// A method is in upper case: servers that ignore case read others so.
fn check_method(method: &str) -> Result<(), Violation> {
    check_name("", method)?;
    if method.bytes().any(|byte| byte.is_ascii_lowercase()) {
        return Err(violation("", method, "in upper case"));
    }
    Ok(())
}

fn check_count<T>(field: &'static str, items: &[T], most: usize) -> Result<(), Violation> {
    if items.len() <= most {
        Ok(())
    } else {
        let expected = format!("at most {most}");
        Err(violation(field, items.len(), &expected))
    }
}

fn each<M, T>(
    field: &'static str,
    items: &[M],
    check: impl Fn(&M) -> Result<T, Violation>,
) -> Result<(), Violation> {
    check_count(field, items, MAX_ITEMS)?;
    let at = |position: usize| move |one: Violation| one.within(&format!("{field}[{position}]"));
    let mut items = items.iter().enumerate();
    items.try_for_each(|(position, item)| check(item).map(drop).map_err(at(position)))
}
