//! TrafficPolicies from the content of their objects. Pure.
//!
//! Nothing relies on the validation of the API server: objects from files have none. Each invalid
//! field is named, with its value and the expected value.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::policy::{self, MAX_ITEMS};
use diy_mesh_proto::route::{self, is_hostname};
use prost::Message;
use proto::hash_key::Kind as HashKind;
use proto::rate_limit::Scope;
use serde_json::json;
use serde_json::value::RawValue;

use super::spec::{self, TargetRef, TrafficPolicySpec};
use super::{Faults, INVALID, Policy, RetrySettings, Settings, telemetry};
use crate::kinds::route::filters::share;
use crate::kinds::route::matches::MatchSpec;
use crate::kinds::route::parse::{retry, session_persistence, timeouts};
use crate::kinds::route::spec::{HttpMatch, Retry};
use crate::object::condition::UNSUPPORTED_VALUE;
use crate::object::fields::{Milliseconds, fields, read, read_known};
use crate::object::rejection::{bounded, refuse, shortened, unsupported, violates};
use crate::object::{Key, Meta, Rejection, TargetReference};

const MAX_TARGETS: usize = 16;
/// The maximum number of matches of all faults, and of all rate limits. Proxies evaluate them for
/// each request.
pub(super) const MAX_MATCHES: usize = 128;
const MAX_PATTERNS: usize = 64;
/// The maximum length of the encoded faults or rate limits.
const MAX_BYTES: usize = 64 * 1024;
const DEFAULT_WINDOW: Milliseconds = Milliseconds(1000);

/// Parses a policy. An error: its targets are unknown, so that it has no status.
pub fn policy(meta: Meta, spec: &str) -> Result<Policy, String> {
    let sections = fields(spec);
    let targets: Vec<TargetRef> = match sections.get("targetRefs") {
        None => Vec::new(),
        Some(list) => read(list.get(), "spec.targetRefs").map_err(|one| one.message)?,
    };
    let mut references: Vec<TargetReference> = Vec::new();
    for target in targets.iter().take(MAX_TARGETS) {
        let reference = TargetReference {
            group: Some(target.group.clone()),
            kind: Some(target.kind.clone()),
            name: target.name.clone(),
            ..TargetReference::default()
        };
        if !references.contains(&reference) {
            references.push(reference);
        }
    }
    let (settings, invalid) = settings(&meta.key, &sections);
    let mut policy = Policy::new(meta, references, Ok(Arc::new(settings)));
    policy.invalid = invalid;
    if let Err(rejection) = check_targets(&policy, &targets) {
        policy.content = Err(Rejection {
            reason: INVALID,
            ..rejection
        });
    }
    Ok(policy)
}

fn check_targets(policy: &Policy, written: &[TargetRef]) -> Result<(), Rejection> {
    let field = "spec.targetRefs";
    bounded(field, written, MAX_TARGETS)?;
    if written.is_empty() {
        return Err(unsupported(field, "", "a list of 1 to 16 targets"));
    }
    for (position, (reference, target)) in policy.targets().enumerate() {
        if target.is_none() {
            let namespace = &policy.key.namespace;
            return Err(unsupported(
                &format!("{field}[{position}]"),
                &reference.to_string(),
                &format!("a Service of the namespace, or Namespace {namespace}"),
            ));
        }
    }
    if policy.parents.len() == written.len() {
        Ok(())
    } else {
        Err(unsupported(field, "", "a list without duplicates"))
    }
}

/// The valid sections, and what is invalid: such a section has no effect.
fn settings(key: &Key, sections: &BTreeMap<String, &RawValue>) -> (Settings, Option<Rejection>) {
    let name = format!("TrafficPolicy {key}");
    let mut settings = Settings {
        name: name.clone(),
        ..Settings::default()
    };
    let mut problems = Vec::new();
    for (name, text) in sections {
        let only = format!("{{{}:{text}}}", json!(name));
        let section = read_known(&only, "spec").and_then(|spec| add(&mut settings, spec));
        if let Err(rejection) = section {
            problems.push(rejection.message);
        }
    }
    let is_empty = Settings {
        name,
        ..Settings::default()
    } == settings;
    let invalid = (!problems.is_empty()).then(|| {
        let effect = match problems.len() {
            1 => "the section has no effect",
            _ => "these sections have no effect",
        };
        let message = format!("{}; {effect}", problems.join("; "));
        Rejection {
            reason: INVALID,
            message: shortened(&message),
            is_partial: !is_empty,
        }
    });
    (settings, invalid)
}

/// Adds the section of this spec, which has one only.
fn add(settings: &mut Settings, spec: TrafficPolicySpec) -> Result<(), Rejection> {
    let name = settings.name.clone();
    if spec.backend.is_some() {
        return refuse(
            "spec",
            "backend",
            "set",
            "absent in a policy with targetRefs",
        );
    }
    let backend = proto::BackendPolicy {
        balancing: spec.load_balancing.map(balancing).transpose()?,
        connections: spec.connections.map(connections),
        outlier_detection: spec.outlier_detection.map(outlier_detection),
        circuit_breaker: spec.circuit_breaker.map(circuit_breaker),
        retry_budget: spec
            .retry
            .as_ref()
            .and_then(|retry| retry.budget.as_ref())
            .map(budget),
        ..proto::BackendPolicy::default()
    };
    policy::check_backend(&backend).map_err(|violation| violates("spec", &violation))?;
    let proto::BackendPolicy {
        balancing,
        connections,
        outlier_detection,
        circuit_breaker,
        ..
    } = backend;
    set(&mut settings.balancing, balancing);
    set(&mut settings.connections, connections);
    set(&mut settings.outlier_detection, outlier_detection);
    set(&mut settings.circuit_breaker, circuit_breaker);
    if let Some(spec) = spec.retry {
        settings.retry = Some(retry_settings(spec, backend.retry_budget)?);
    }
    if let Some(spec) = &spec.timeouts {
        settings.timeouts = Some(timeouts(spec, "spec")?);
    }
    if let Some(spec) = spec.session_persistence {
        settings.session = Some(session_persistence(spec, "spec")?);
    }
    if let Some(specs) = spec.rate_limits {
        settings.rate_limits = Some(rate_limits(specs, &name)?);
    }
    if let Some(specs) = spec.faults {
        settings.faults = Some(faults(specs, &name)?);
    }
    if let Some(spec) = spec.telemetry {
        settings.telemetry = Some(telemetry::parse(spec, &name)?);
    }
    Ok(())
}

fn set<T>(section: &mut Option<T>, new: Option<T>) {
    if new.is_some() {
        *section = new;
    }
}

fn balancing(spec: spec::LoadBalancing) -> Result<proto::Balancing, Rejection> {
    let algorithm = spec.algorithm.map(|name| name.0);
    Ok(proto::Balancing {
        algorithm: algorithm.unwrap_or_default().into(),
        hash_key: spec.hash.map(hash_key).transpose()?,
        prefer_zone: spec.zone_preference.is_some_and(|name| name.0.0),
        slow_start: spec.slow_start.map(|time| time.0),
    })
}

fn hash_key(spec: spec::Hash) -> Result<proto::HashKey, Rejection> {
    let kind = match (spec.header, spec.cookie, spec.source) {
        (Some(name), None, None) => HashKind::Header(name.to_ascii_lowercase()),
        (None, Some(name), None) => HashKind::Cookie(name),
        (None, None, Some(_)) => HashKind::Source(proto::hash_key::Source {}),
        _ => {
            let expected = "exactly one of header, cookie and source";
            return Err(unsupported("spec.loadBalancing.hash", "", expected));
        }
    };
    Ok(proto::HashKey { kind: Some(kind) })
}

fn connections(spec: spec::Connections) -> proto::ConnectionLimits {
    proto::ConnectionLimits {
        max_connections: spec.max_connections,
        max_http2_connections: spec.max_http2_connections,
        max_requests: spec.max_requests,
        max_waiting: spec.max_waiting,
        connect_timeout: spec.connect_timeout.map(|time| time.0),
    }
}

fn outlier_detection(spec: spec::OutlierDetection) -> proto::OutlierDetection {
    proto::OutlierDetection {
        consecutive_failures: spec.consecutive_failures,
        failure_percent: spec.failure_percent,
        min_requests: spec.min_requests,
        interval: spec.interval.map(|time| time.0),
        latency_percent: spec.latency_percent,
        ejection_time: spec.ejection_time.map(|time| time.0),
        max_ejection_time: spec.max_ejection_time.map(|time| time.0),
        max_ejected_percent: spec.max_ejected_percent,
    }
}

fn circuit_breaker(spec: spec::CircuitBreaker) -> proto::CircuitBreaker {
    proto::CircuitBreaker {
        failure_percent: spec.failure_percent,
        min_requests: spec.min_requests,
        interval: spec.interval.map(|time| time.0),
        open_time: spec.open_time.map(|time| time.0),
    }
}

fn budget(spec: &spec::Budget) -> proto::RetryBudget {
    proto::RetryBudget {
        percent: spec.percent,
        min_per_second: spec.min_per_second,
    }
}

fn retry_settings(
    spec: spec::Retry,
    budget: Option<proto::RetryBudget>,
) -> Result<RetrySettings, Rejection> {
    let is_set = spec.codes.is_some() || spec.attempts.is_some() || spec.backoff.is_some();
    let of_route = Retry {
        codes: spec.codes.unwrap_or_default(),
        attempts: spec.attempts,
        backoff: spec.backoff,
    };
    let retry = is_set.then(|| retry(of_route, "spec")).transpose()?;
    Ok(RetrySettings { retry, budget })
}

fn rate_limits(
    specs: Vec<spec::RateLimit>,
    policy: &str,
) -> Result<Arc<[proto::RateLimit]>, Rejection> {
    let field = "spec.rateLimits";
    bounded(field, &specs, MAX_ITEMS)?;
    let (mut limits, mut names, mut total) = (Vec::new(), BTreeSet::new(), Total::default());
    for (position, spec) in specs.into_iter().enumerate() {
        let at = format!("{field}[{position}]");
        if !is_hostname(&spec.name) || !names.insert(spec.name.clone()) {
            let expected = "a name in lower case, which no other limit of the policy has";
            return Err(unsupported(&format!("{at}.name"), &spec.name, expected));
        }
        let scope = spec.per.map_or(Scope::Service, |name| name.0);
        let limit = proto::RateLimit {
            name: format!("{policy}/{}", spec.name),
            matches: total.matches(&spec.matches, &at)?,
            scope: scope.into(),
            requests: spec.requests,
            window: spec.window.unwrap_or(DEFAULT_WINDOW).0,
            burst: spec.burst.unwrap_or_default(),
            ..proto::RateLimit::default()
        };
        policy::check_rate_limit(&limit).map_err(|violation| violates(&at, &violation))?;
        total.add(field, &limit)?;
        limits.push(limit);
    }
    Ok(limits.into())
}

fn faults(specs: Vec<spec::Fault>, policy: &str) -> Result<Arc<Faults>, Rejection> {
    let field = "spec.faults";
    bounded(field, &specs, MAX_ITEMS)?;
    let (mut faults, mut total) = (Vec::new(), Total::default());
    for (position, spec) in specs.into_iter().enumerate() {
        let at = format!("{field}[{position}]");
        let mut fault = proto::Fault {
            name: policy.to_owned(),
            matches: total.matches(&spec.matches, &at)?,
            ..proto::Fault::default()
        };
        if let Some(delay) = spec.delay {
            let at = format!("{at}.delay");
            fault.delay = delay.duration.0;
            if fault.delay == 0 {
                return refuse(&at, "duration", "0ms", "at least 1ms");
            }
            fault.delayed = Some(share(delay.percent, delay.fraction.as_ref(), &at)?);
        }
        if let Some(abort) = spec.abort {
            let at = format!("{at}.abort");
            if abort.status == 0 {
                return refuse(&at, "status", 0, "a status from 400 to 599");
            }
            fault.abort_status = abort.status;
            fault.aborted = Some(share(abort.percent, abort.fraction.as_ref(), &at)?);
        }
        policy::check_fault(&fault).map_err(|violation| violates(&at, &violation))?;
        total.add(field, &fault)?;
        faults.push(fault);
    }
    Ok(Arc::new(Faults::new(faults)))
}

/// The size of the faults or the rate limits of a policy so far.
#[derive(Default)]
struct Total {
    matches: usize,
    patterns: usize,
    bytes: usize,
}

impl Total {
    fn matches(
        &mut self,
        specs: &[HttpMatch],
        at: &str,
    ) -> Result<Vec<proto::RouteMatch>, Rejection> {
        let field = format!("{at}.matches");
        self.matches += specs.len();
        within(&field, "matches", self.matches, MAX_MATCHES)?;
        let mut parsed = Vec::with_capacity(specs.len());
        for (position, spec) in specs.iter().enumerate() {
            let one = spec.parse(&format!("{field}[{position}]"))?;
            self.patterns += route::patterns(&one.message);
            within(&field, "regular expressions", self.patterns, MAX_PATTERNS)?;
            parsed.push(one.message);
        }
        Ok(parsed)
    }

    fn add(&mut self, field: &str, message: &impl Message) -> Result<(), Rejection> {
        self.bytes += message.encoded_len();
        within(field, "encoded bytes", self.bytes, MAX_BYTES)
    }
}

fn within(field: &str, what: &str, count: usize, max: usize) -> Result<(), Rejection> {
    if count <= max {
        Ok(())
    } else {
        let message = format!("{field}: {count} {what} in the policy are more than {max}");
        Err(Rejection::new(UNSUPPORTED_VALUE, message))
    }
}
