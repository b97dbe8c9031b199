//! AuthorizationPolicies from the content of their objects. Pure.
//!
//! Nothing relies on the validation of the API server: objects from files have none. Each invalid
//! field is named, with its value and the expected value. An invalid policy denies the calls of its
//! targets, or of all pods of its namespace if the targets cannot be read. It denies the calls of
//! its direction, or of both directions if the direction cannot be read.

pub(crate) mod authorizer;
mod issuers;
mod requests;
mod targets;

use std::collections::BTreeSet;
use std::sync::Arc;

use diy_mesh_model::identity::{Identity, TRUST_DOMAIN};
use diy_mesh_proto::authorization::{
    ISSUERS_REVISION, MAX_ISSUERS, MAX_ITEMS, MAX_RULES, REVISION, asking_action, check,
    check_egress,
};
use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::policy::Violation;
use proto::authorization_policy::Action;
use proto::authorization_source::Kind as SourceKind;

use super::spec::{AuthorizationPolicySpec, Destination, Rule, Selector, Source};
use super::{
    AuthorizationPolicy, Direction, Effect, INVALID, MAX_BYTES, Mode, Rules, TOO_LARGE, Target,
    keys, name,
};
use crate::object::condition::UNSUPPORTED_VALUE;
use crate::object::fields::{field, fields, null, one_of, read_known, string, within};
use crate::object::issuer_keys::Entry;
use crate::object::rejection::{bounded, refuse, shortened, unsupported};
use crate::object::{Key, Meta, Rejection};
use issuers::issuer;
use requests::request;
pub(crate) use targets::reference;
use targets::targets;

const MAX_REQUESTS: usize = 16;

/// Parses a policy. Service accounts are of the trust domain. The status has keys of issuers.
pub fn policy(meta: Meta, spec: &str, status: &str, trust_domain: &str) -> AuthorizationPolicy {
    let targets = targets(&meta.key, field(spec, "targetRefs"));
    let directions = directions(spec);
    let reader = Reader {
        key: &meta.key,
        directions,
        trust_domain,
        known: keys::entries(status),
    };
    let effect = match &targets {
        Ok(targets) => read(spec).and_then(|spec| reader.effect(spec, targets)),
        Err(rejection) => Err(rejection.clone()),
    };
    let mode = match string(field(spec, "mode")).as_deref() {
        Some("Audit") => Mode::Audit,
        _ => Mode::Enforce,
    };
    let effect = effect.map_err(|rejection| {
        let reason = match rejection.reason {
            TOO_LARGE => TOO_LARGE,
            _ => INVALID,
        };
        (Rejection::new(reason, shortened(&rejection.message)), mode)
    });
    let targets = targets.unwrap_or_else(|_| vec![Target::Pods(Selector::default())]);
    let parents = targets.iter().map(reference).collect();
    AuthorizationPolicy::with(meta, parents, targets.into(), directions, effect)
}

/// A policy of which only the name is known: it denies the inbound calls of all pods of its
/// namespace.
pub(crate) fn denying_all(meta: Meta, rejection: Rejection) -> AuthorizationPolicy {
    let target = Target::Pods(Selector::default());
    let parents = vec![reference(&target)];
    let effect = Err((rejection, Mode::Enforce));
    AuthorizationPolicy::with(
        meta,
        parents,
        [target].into(),
        &[Direction::Inbound],
        effect,
    )
}

fn directions(spec: &str) -> &'static [Direction] {
    let sections = fields(spec);
    let direction = sections.get("direction").map(|text| string(text.get()));
    match direction.as_ref().map(Option::as_deref) {
        None if spec.starts_with('{') => &[Direction::Inbound],
        Some(Some("Inbound")) => &[Direction::Inbound],
        Some(Some("Outbound")) => &[Direction::Outbound],
        _ => &Direction::ALL,
    }
}

/// Reads a spec. An absent field differs from an empty one, and `null` is neither.
fn read(spec: &str) -> Result<AuthorizationPolicySpec, Rejection> {
    if let Some(path) = null(spec) {
        let field = within("spec", &path);
        return Err(invalid(format!("{field}: null is no value")));
    }
    read_known(spec, "spec")
}

/// A violation below a field of the spec.
pub(crate) fn rejected(field: &str, prefix: &str, violation: &Violation) -> Rejection {
    let at = violation.field.trim_start_matches(prefix);
    let field = format!("{field}.{at}");
    unsupported(&field, &violation.value, &violation.expected)
}

fn invalid(message: String) -> Rejection {
    Rejection::new(UNSUPPORTED_VALUE, message)
}

/// Rejects lists that are empty, or too long.
fn listed<T>(field: &str, list: &[T], max: usize) -> Result<(), Rejection> {
    if list.is_empty() {
        return Err(invalid(format!("{field}: expected 1 to {max} entries")));
    }
    bounded(field, list, max)
}

/// The entries of a list that may be absent, but not empty, each converted.
fn each<S, T>(
    field: &str,
    list: Option<Vec<S>>,
    max: usize,
    convert: impl Fn(S, &str) -> Result<T, Rejection>,
) -> Result<Vec<T>, Rejection> {
    let Some(list) = list else {
        return Ok(Vec::new());
    };
    listed(field, &list, max)?;
    let list = list.into_iter().enumerate();
    list.map(|(at, one)| convert(one, &format!("{field}[{at}]")))
        .collect()
}

/// The context in which the sources of a policy are read.
struct Reader<'a> {
    key: &'a Key,
    directions: &'static [Direction],
    trust_domain: &'a str,
    /// The keys in the status.
    known: Vec<Entry>,
}

impl Reader<'_> {
    fn effect(
        &self,
        spec: AuthorizationPolicySpec,
        targets: &[Target],
    ) -> Result<Effect, Rejection> {
        let [direction] = *self.directions else {
            let direction = spec.direction.unwrap_or_default();
            return refuse("spec", "direction", direction, "Inbound or Outbound");
        };
        let check = match direction {
            Direction::Inbound => check,
            Direction::Outbound => check_egress,
        };
        check_direction(direction, &spec, targets)?;
        if let Some(default) = &spec.default_action {
            return self::default(default, &spec, targets);
        }
        let action = action(spec.action.as_deref())?;
        let modes = [("Enforce", false), ("Audit", true)];
        let audit = one_of("spec.mode", spec.mode.as_deref(), &modes)?;
        let specs = spec.rules.unwrap_or_default();
        bounded("spec.rules", &specs, MAX_RULES)?;
        let parse = |spec, field: &str| issuer(spec, field, &self.key.namespace, &self.known);
        let issuers = each("spec.issuers", spec.issuers, MAX_ISSUERS, parse)?;
        let (issuers, fetched): (Vec<_>, Vec<_>) = issuers.into_iter().unzip();
        let parse = |spec| authorizer::authorizer(spec, &self.key.namespace);
        let (authorizer, server) = spec.external_auth.map(parse).transpose()?.unzip();
        let action = match action {
            Action::ExternalAuth => asking_action(&authorizer),
            other => other,
        };
        let mut policy = proto::AuthorizationPolicy {
            name: name(self.key),
            action: action.into(),
            audit,
            authorizer,
            ..proto::AuthorizationPolicy::default()
        };
        check(&policy).map_err(|violation| rejected("spec", "", &violation))?;
        policy.issuers = issuers;
        if specs.is_empty() && !policy.issuers.is_empty() {
            return Err(invalid("spec.issuers: requires rules".to_owned()));
        }
        let specs = specs.into_iter().enumerate();
        let rules = specs.map(|(at, rule)| {
            let field = format!("spec.rules[{at}]");
            let has_issuers = !policy.issuers.is_empty();
            policy.rules = vec![self.rule(rule, action, has_issuers, &field)?];
            check(&policy).map_err(|mut violation| {
                if direction == Direction::Outbound {
                    let named = violation.field.replacen("sources", "destinations", 1);
                    violation.field = named.into();
                }
                rejected(&field, "rules.", &violation)
            })?;
            Ok(policy.rules.swap_remove(0))
        });
        let rules = rules.collect::<Result<Vec<_>, _>>()?;
        policy.ports = scope(spec.scope.as_deref(), action, &rules)?;
        policy.rules = rules;
        let fetched = fetched.into_iter().flatten().collect();
        let rules = Rules::with_references(policy, fetched, server.into_iter().collect());
        if rules.bytes > MAX_BYTES {
            let message = format!("spec: {} bytes are more than {MAX_BYTES}", rules.bytes);
            return Err(Rejection::new(TOO_LARGE, message));
        }
        Ok(Effect::Rules(Arc::new(rules)))
    }

    fn rule(
        &self,
        spec: Rule,
        action: Action,
        has_issuers: bool,
        field: &str,
    ) -> Result<proto::AuthorizationRule, Rejection> {
        let source = |source, field: &str| self.source(source, field);
        let destination = |one, field: &str| destination(one, action, field);
        let sources = ends(&format!("{field}.sources"), spec.sources, source)?;
        let at = format!("{field}.destinations");
        let destinations = ends(&at, spec.destinations, destination)?;
        let at = format!("{field}.networkAttributes.ports");
        let ports = spec.network_attributes.map(|one| one.ports);
        let ports = each(&at, ports, MAX_ITEMS, |port, _| Ok(port.into()))?;
        let at = format!("{field}.requests");
        let revision = if has_issuers {
            ISSUERS_REVISION
        } else {
            REVISION
        };
        Ok(proto::AuthorizationRule {
            revision,
            sources: sources.or(destinations),
            not_sources: each(
                &format!("{field}.notSources"),
                spec.not_sources,
                MAX_ITEMS,
                source,
            )?,
            ports,
            requests: each(&at, spec.requests, MAX_REQUESTS, request)?,
        })
    }

    fn source(&self, spec: Source, field: &str) -> Result<proto::AuthorizationSource, Rejection> {
        let fields = (
            spec.service_account,
            spec.spiffe,
            spec.namespace,
            spec.ip_block,
        );
        let kind = match (&*spec.kind, fields) {
            ("ServiceAccount", (Some(account), None, None, None)) => {
                let own = &self.key.namespace;
                let namespace = account.namespace.as_deref().unwrap_or(own);
                self.account(namespace, &account.name, field)?
            }
            ("Namespace", (None, None, Some(namespace), None)) => {
                self.account(&namespace, "*", field)?
            }
            ("SPIFFE", (None, Some(id), None, None)) => {
                let expected = "spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/SERVICE-ACCOUNT";
                let invalid = || unsupported(&format!("{field}.spiffe"), &id, expected);
                let parts = id.strip_prefix("spiffe://").ok_or_else(invalid)?;
                let parts: Vec<&str> = parts.split('/').collect();
                let [trust_domain, "ns", namespace, "sa", account] = parts[..] else {
                    return Err(invalid());
                };
                identity(trust_domain, namespace, account).ok_or_else(invalid)?
            }
            ("IPBlock", (None, None, None, Some(block))) => SourceKind::IpBlock(block),
            ("Unauthenticated", (None, None, None, None)) => {
                SourceKind::Unauthenticated(proto::Unauthenticated {})
            }
            (kind, _) => {
                let expected = "ServiceAccount, SPIFFE, Namespace, IPBlock or Unauthenticated, \
                                with its field and no other";
                return refuse(field, "type", kind, expected);
            }
        };
        Ok(proto::AuthorizationSource { kind: Some(kind) })
    }

    /// A service account of the own trust domain.
    fn account(&self, namespace: &str, name: &str, field: &str) -> Result<SourceKind, Rejection> {
        let matches = identity(TRUST_DOMAIN, namespace, name).filter(|_| namespace != "*");
        let Some(SourceKind::Identity(matches)) = matches else {
            let shown = format!("{namespace}/{name}");
            let expected = "the name of a namespace and of a service account, or * for all of them";
            return Err(unsupported(field, &shown, expected));
        };
        Ok(SourceKind::Identity(proto::IdentityMatch {
            trust_domain: self.trust_domain.to_owned(),
            ..matches
        }))
    }
}

/// The callers, or the destinations. An empty list has none.
fn ends<S>(
    field: &str,
    list: Option<Vec<S>>,
    convert: impl Fn(S, &str) -> Result<proto::AuthorizationSource, Rejection>,
) -> Result<Option<proto::AuthorizationSources>, Rejection> {
    let Some(list) = list else {
        return Ok(None);
    };
    let list = Some(list).filter(|list| !list.is_empty());
    let sources = each(field, list, MAX_ITEMS, convert)?;
    Ok(Some(proto::AuthorizationSources { sources }))
}

fn destination(
    spec: Destination,
    action: Action,
    field: &str,
) -> Result<proto::AuthorizationSource, Rejection> {
    let kind = match (&*spec.kind, spec.host, spec.ip_block) {
        ("Host", Some(_), None) if action == Action::Deny => {
            let message = "a DENY by name cannot be made safe: the application may leave the name \
                           out; use IPBlock, or an ALLOW of other names";
            return Err(invalid(format!("{field}.host: {message}")));
        }
        ("Host", Some(host), None) => SourceKind::Host(host),
        ("IPBlock", None, Some(block)) => SourceKind::IpBlock(block),
        (kind, ..) => {
            let expected = "Host or IPBlock, with its field and no other";
            return refuse(field, "type", kind, expected);
        }
    };
    Ok(proto::AuthorizationSource { kind: Some(kind) })
}

/// Rejects fields of the other direction. Calls to outside of the cluster have no Service, no token, and
/// no authorization server.
fn check_direction(
    direction: Direction,
    spec: &AuthorizationPolicySpec,
    targets: &[Target],
) -> Result<(), Rejection> {
    let is_outbound = direction == Direction::Outbound;
    let asks = spec.external_auth.is_some() || spec.action.as_deref() == Some("ExternalAuth");
    let mut services = targets.iter();
    let has_service = services.any(|target| matches!(target, Target::Service(_)));
    let of_spec = [
        ("issuers", spec.issuers.is_some()),
        ("externalAuth", asks),
        ("targetRefs of kind Service", has_service),
    ];
    let of_spec = of_spec.map(|(name, is_set)| (name.to_owned(), is_set && is_outbound));
    let rules = spec.rules.iter().flatten().enumerate();
    let of_rules = rules.flat_map(|(at, rule)| {
        let fields = [
            ("destinations", rule.destinations.is_some() && !is_outbound),
            ("sources", rule.sources.is_some() && is_outbound),
            ("notSources", rule.not_sources.is_some() && is_outbound),
            ("requests", rule.requests.is_some() && is_outbound),
        ];
        fields.map(|(name, is_set)| (format!("rules[{at}].{name}"), is_set))
    });
    let mut fields = of_spec.into_iter().chain(of_rules);
    fields
        .find(|(_, is_set)| *is_set)
        .map_or(Ok(()), |(field, _)| {
            let message = format!("spec.{field}: expected none with direction {direction:?}");
            Err(invalid(message))
        })
}

/// An identity. Each part of it may be `*`.
fn identity(trust_domain: &str, namespace: &str, account: &str) -> Option<SourceKind> {
    let [known, parts] = ["any", ""].map(|all| {
        [trust_domain, namespace, account].map(|part| if part == "*" { all } else { part })
    });
    Identity::new(known[0], known[1], known[2]).ok()?;
    let [trust_domain, namespace, service_account] = parts.map(str::to_owned);
    Some(SourceKind::Identity(proto::IdentityMatch {
        trust_domain,
        namespace,
        service_account,
    }))
}

fn action(text: Option<&str>) -> Result<Action, Rejection> {
    match text.unwrap_or_default() {
        "ALLOW" => Ok(Action::Allow),
        "DENY" => Ok(Action::Deny),
        "ExternalAuth" => Ok(Action::ExternalAuth),
        other => {
            let expected = "ALLOW, DENY or ExternalAuth; it is required without defaultAction";
            Err(unsupported("spec.action", other, expected))
        }
    }
}

/// A policy that sets the default has nothing else.
fn default(
    text: &str,
    spec: &AuthorizationPolicySpec,
    targets: &[Target],
) -> Result<Effect, Rejection> {
    let others = [&spec.action, &spec.mode, &spec.scope];
    let has_others = others.iter().any(|other| other.is_some());
    let has_references = spec.issuers.is_some() || spec.external_auth.is_some();
    if has_others || has_references || spec.rules.is_some() {
        let message =
            "spec.defaultAction: excludes action, mode, scope, rules, issuers and externalAuth";
        return Err(invalid(message.to_owned()));
    }
    if *targets != [Target::Pods(Selector::default())] {
        let message = "spec.defaultAction: requires the targetRefs [{kind: Pod, selector: {}}]";
        return Err(invalid(message.to_owned()));
    }
    let actions = [("ALLOW", false), ("DENY", true)];
    let deny = one_of("spec.defaultAction", Some(text), &actions)?;
    Ok(Effect::Default { deny })
}

/// The ports that a policy covers at most. Empty: all.
fn scope(
    scope: Option<&str>,
    action: Action,
    rules: &[proto::AuthorizationRule],
) -> Result<Vec<u32>, Rejection> {
    let has_ports = || !rules.is_empty() && rules.iter().all(|rule| !rule.ports.is_empty());
    match scope {
        None => Ok(vec![]),
        Some("Workload") if action == Action::Allow => Ok(vec![]),
        Some("Ports") if action == Action::Allow && has_ports() => {
            let ports = rules.iter().flat_map(|rule| rule.ports.iter().copied());
            let ports: BTreeSet<u32> = ports.collect();
            Ok(ports.into_iter().collect())
        }
        Some(other) => {
            let expected =
                "Workload, or Ports with ports in each of one or more rules; only for ALLOW";
            Err(unsupported("spec.scope", other, expected))
        }
    }
}
