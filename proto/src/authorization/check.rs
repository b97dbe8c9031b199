//! The AuthorizationPolicies that the controller accepts: those of which a proxy knows all conditions,
//! within the bounds.

use super::fields::{FieldCondition, HostPattern};
use super::paths::PathPattern;
use super::rule::REVISION;
use super::sources::Source;
use crate::mesh::v1 as proto;
use crate::mesh::v1::authorization_policy::Action;
use crate::policy::{Violation, check_name, violation};

/// Rules of a policy.
pub const MAX_RULES: usize = 128;
/// Items of each list in a rule.
pub const MAX_ITEMS: usize = 64;

/// Checks a policy. Fields have the names of the AuthorizationPolicy.
pub fn check(policy: &proto::AuthorizationPolicy) -> Result<(), Violation> {
    let action = Action::try_from(policy.action).unwrap_or_default();
    if action == Action::Unspecified {
        return Err(violation("action", policy.action, "ALLOW or DENY"));
    }
    // The ports of all rules, at most.
    check_ports("ports", &policy.ports)?;
    check_count("rules", &policy.rules, MAX_RULES)?;
    for rule in &policy.rules {
        check_rule(rule)?;
        let is_everywhere = policy.ports.is_empty() && rule.ports.is_empty();
        if action == Action::Deny && is_everywhere && !rule.requests.is_empty() {
            let expected =
                "set, for a DENY rule about requests: it denies all other traffic at its ports";
            return Err(violation("rules.ports", "", expected));
        }
    }
    Ok(())
}

fn check_rule(rule: &proto::AuthorizationRule) -> Result<(), Violation> {
    if rule.revision != REVISION {
        return Err(violation("rules.revision", rule.revision, "1"));
    }
    let sources = rule.sources.as_ref().map_or(&[][..], |list| &list.sources);
    each("rules.sources", sources, Source::parse)?;
    each("rules.notSources", &rule.not_sources, Source::parse)?;
    check_count("rules.ports", &rule.ports, MAX_ITEMS)?;
    check_ports("rules.ports", &rule.ports)?;
    check_count("rules.requests", &rule.requests, MAX_ITEMS)?;
    for request in &rule.requests {
        each("rules.methods", &request.methods, |method| {
            check_method(method)
        })?;
        each("rules.paths", &request.paths, PathPattern::parse)?;
        each("rules.hosts", &request.hosts, |host| {
            HostPattern::parse(host)
        })?;
        each("rules.headers", &request.headers, FieldCondition::parse)?;
    }
    Ok(())
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
    let field = "rules.methods";
    check_name(field, method)?;
    if method.bytes().any(|byte| byte.is_ascii_lowercase()) {
        return Err(violation(field, method, "in upper case"));
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
    items.iter().try_for_each(|item| check(item).map(|_| ()))
}
