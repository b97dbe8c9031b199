//! The values that policies, faults, rate limits and sessions may have. The controller does not
//! accept a TrafficPolicy with others, and a proxy rejects a message with others.
//!
//! Fields have the names of the TrafficPolicy. Faults and rate limits have the matches of routes,
//! and the same code checks them.

use std::borrow::Cow;
use std::fmt::Display;
use std::ops::RangeInclusive;

use crate::field;
use crate::mesh::v1::balancing::Algorithm;
use crate::mesh::v1::hash_key::Kind;
use crate::mesh::v1::rate_limit::Scope;
use crate::mesh::v1::{
    BackendPolicy, Balancing, CircuitBreaker, ConnectionLimits, Fault, FieldMatch, HashKey,
    OutlierDetection, RateLimit, RetryBudget, SessionPersistence, Share,
};
use crate::route::is_token;

/// The longest duration, in milliseconds: a day.
pub const MAX_DURATION: u64 = 24 * 60 * 60 * 1000;
/// The longest timeout of a session, in milliseconds: a year.
pub const MAX_SESSION_TIMEOUT: u64 = 365 * MAX_DURATION;
/// Faults of a Service, and rate limits of a Service.
pub const MAX_ITEMS: usize = 16;
/// The length of the name of a header field or of a cookie.
pub const MAX_NAME_BYTES: usize = 128;

/// The length of a value in an error.
const MAX_SHOWN_CHARS: usize = 64;
const DURATION: RangeInclusive<u64> = 1..=MAX_DURATION;
const PERCENT: RangeInclusive<u32> = 0..=100;
const COUNT: RangeInclusive<u32> = 1..=1_000_000;
const RATE: RangeInclusive<u64> = 1..=1_000_000_000;

/// A value that a field does not permit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {value:?} is not {expected}")]
pub struct Violation {
    /// The field, for example "connections.maxRequests".
    pub field: Cow<'static, str>,
    /// The start of its value.
    pub value: String,
    /// The permitted values.
    pub expected: String,
}

impl Violation {
    /// The violation in a field that contains this one.
    pub(crate) fn within(self, field: &str) -> Self {
        let dot = if self.field.is_empty() { "" } else { "." };
        Self {
            field: format!("{field}{dot}{}", self.field).into(),
            ..self
        }
    }
}

pub(crate) fn violation(field: &'static str, value: impl Display, expected: &str) -> Violation {
    Violation {
        field: field.into(),
        value: value.to_string().chars().take(MAX_SHOWN_CHARS).collect(),
        expected: expected.to_owned(),
    }
}

/// Checks that a value, if there is one, is in a range.
fn within<T: PartialOrd + Display>(
    field: &'static str,
    value: Option<T>,
    range: &RangeInclusive<T>,
) -> Result<(), Violation> {
    match value {
        Some(value) if !range.contains(&value) => {
            let expected = format!("from {} to {}", range.start(), range.end());
            Err(violation(field, value, &expected))
        }
        _ => Ok(()),
    }
}

/// Checks that a duration is not 0 and not too long.
pub(crate) fn duration(field: &'static str, value: Option<u64>) -> Result<(), Violation> {
    let in_range = within(field, value, &DURATION);
    in_range.map_err(|violation| Violation {
        value: format!("{}ms", violation.value),
        expected: "from 1ms to 24h".to_owned(),
        ..violation
    })
}

/// Checks how clients use the endpoints of a Service.
pub fn check_backend(policy: &BackendPolicy) -> Result<(), Violation> {
    policy.balancing.as_ref().map_or(Ok(()), check_balancing)?;
    let connections = policy.connections.as_ref();
    connections.map_or(Ok(()), check_connections)?;
    let outlier_detection = policy.outlier_detection.as_ref();
    outlier_detection.map_or(Ok(()), check_outlier_detection)?;
    let circuit_breaker = policy.circuit_breaker.as_ref();
    circuit_breaker.map_or(Ok(()), check_circuit_breaker)?;
    policy.retry_budget.as_ref().map_or(Ok(()), check_budget)
}

fn check_balancing(balancing: &Balancing) -> Result<(), Violation> {
    let field = "loadBalancing.algorithm";
    let algorithm = Algorithm::try_from(balancing.algorithm)
        .map_err(|_| violation(field, balancing.algorithm, "a known algorithm"))?;
    let hash = "loadBalancing.hash";
    match (algorithm, &balancing.hash_key) {
        (Algorithm::ConsistentHash, Some(key)) => check_hash_key(key)?,
        (Algorithm::ConsistentHash, None) => {
            return Err(violation(hash, "", "set, which ConsistentHash requires"));
        }
        (_, Some(_)) => return Err(violation(hash, "set", "absent, without ConsistentHash")),
        (_, None) => {}
    }
    match balancing.slow_start {
        None | Some(0) => Ok(()),
        some => duration("loadBalancing.slowStart", some),
    }
}

fn check_hash_key(key: &HashKey) -> Result<(), Violation> {
    let (field, name) = match &key.kind {
        Some(Kind::Header(name)) => ("loadBalancing.hash.header", name),
        Some(Kind::Cookie(name)) => ("loadBalancing.hash.cookie", name),
        Some(Kind::Source(_)) => return Ok(()),
        None => {
            let expected = "one of header, cookie and source";
            return Err(violation("loadBalancing.hash", "", expected));
        }
    };
    check_name(field, name)
}

/// The name of a header field or of a cookie: a token of RFC 9110.
pub(crate) fn check_name(field: &'static str, name: &str) -> Result<(), Violation> {
    if name.len() <= MAX_NAME_BYTES && is_token(name) {
        Ok(())
    } else {
        Err(violation(field, name, "a name of at most 128 characters"))
    }
}

fn check_connections(limits: &ConnectionLimits) -> Result<(), Violation> {
    within("connections.maxConnections", limits.max_connections, &COUNT)?;
    let http2 = limits.max_http2_connections;
    within("connections.maxHttp2Connections", http2, &COUNT)?;
    within("connections.maxRequests", limits.max_requests, &COUNT)?;
    let waiting = 0..=*COUNT.end();
    within("connections.maxWaiting", limits.max_waiting, &waiting)?;
    duration("connections.connectTimeout", limits.connect_timeout)
}

fn check_outlier_detection(outlier: &OutlierDetection) -> Result<(), Violation> {
    let failures = outlier.consecutive_failures;
    within(
        "outlierDetection.consecutiveFailures",
        failures,
        &(0..=1000),
    )?;
    let failures = outlier.failure_percent;
    within("outlierDetection.failurePercent", failures, &PERCENT)?;
    within("outlierDetection.minRequests", outlier.min_requests, &COUNT)?;
    duration("outlierDetection.interval", outlier.interval)?;
    let latency = outlier.latency_percent;
    if !matches!(latency, None | Some(0 | 200..=10_000)) {
        let (field, latency) = (
            "outlierDetection.latencyPercent",
            latency.unwrap_or_default(),
        );
        return Err(violation(field, latency, "0, or from 200 to 10000"));
    }
    duration("outlierDetection.ejectionTime", outlier.ejection_time)?;
    duration(
        "outlierDetection.maxEjectionTime",
        outlier.max_ejection_time,
    )?;
    let ejected = outlier.max_ejected_percent;
    within("outlierDetection.maxEjectedPercent", ejected, &PERCENT)
}

fn check_circuit_breaker(breaker: &CircuitBreaker) -> Result<(), Violation> {
    let failures = Some(breaker.failure_percent);
    within("circuitBreaker.failurePercent", failures, &(1..=100))?;
    within("circuitBreaker.minRequests", breaker.min_requests, &COUNT)?;
    duration("circuitBreaker.interval", breaker.interval)?;
    duration("circuitBreaker.openTime", breaker.open_time)
}

fn check_budget(budget: &RetryBudget) -> Result<(), Violation> {
    within("retry.budget.percent", budget.percent, &PERCENT)?;
    let floor = 0..=*COUNT.end();
    within("retry.budget.minPerSecond", budget.min_per_second, &floor)
}

/// Checks a fault.
pub fn check_fault(fault: &Fault) -> Result<(), Violation> {
    if fault.delay == 0 && fault.abort_status == 0 {
        return Err(violation("delay", "", "set, or abort"));
    }
    if fault.delay > 0 {
        duration("delay.duration", Some(fault.delay))?;
        check_share("delay.percent", fault.delayed)?;
    }
    if fault.abort_status > 0 {
        within("abort.status", Some(fault.abort_status), &(400..=599))?;
        check_share("abort.percent", fault.aborted)?;
    }
    Ok(())
}

/// Checks a share, which is at most 1.
pub fn check_share(field: &'static str, share: Option<Share>) -> Result<(), Violation> {
    let Share {
        numerator,
        denominator,
    } = share.unwrap_or_default();
    if denominator > 0 && numerator <= denominator {
        Ok(())
    } else {
        let value = format!("{numerator}/{denominator}");
        Err(violation(field, value, "a share of at most 1"))
    }
}

/// Checks a rate limit, without its ports and its replicas.
pub fn check_rate_limit(limit: &RateLimit) -> Result<(), Violation> {
    within("requests", Some(limit.requests), &RATE)?;
    duration("window", Some(limit.window))?;
    within("burst", Some(limit.burst), &(0..=*RATE.end()))?;
    // A client may send this field: the proxy replaces it on the way to the application.
    let mut headers = limit.matches.iter().flat_map(|one| &one.headers);
    let is_caller =
        |one: &&FieldMatch| field::is_same_name(one.name.as_bytes(), field::CALLED_BY.as_bytes());
    if let Some(one) = headers.find(is_caller) {
        let expected = "a header of clients: set `per: Caller`";
        return Err(violation("matches", &*one.name, expected));
    }
    match Scope::try_from(limit.scope) {
        Ok(Scope::Service | Scope::Caller) => Ok(()),
        _ => Err(violation("per", limit.scope, "Service or Caller")),
    }
}

/// Checks the session of a rule.
pub fn check_session(session: &SessionPersistence) -> Result<(), Violation> {
    let field = "sessionName";
    let name = match (&*session.cookie, &*session.header) {
        (name, "") | ("", name) => name,
        (name, _) => {
            return Err(violation(
                field,
                name,
                "of a cookie or of a header, not of both",
            ));
        }
    };
    check_name(field, name)?;
    if !session.header.is_empty() && field::is_reserved(name) {
        return Err(violation(field, name, "a header that routes may set"));
    }
    for (field, timeout) in [
        ("absoluteTimeout", session.absolute_timeout),
        ("idleTimeout", session.idle_timeout),
    ] {
        if timeout > MAX_SESSION_TIMEOUT {
            return Err(violation(field, format!("{timeout}ms"), "at most 8760h"));
        }
    }
    if session.permanent && (session.absolute_timeout == 0 || session.cookie.is_empty()) {
        let expected = "set, for a permanent cookie";
        Err(violation("absoluteTimeout", "", expected))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(policy: BackendPolicy) -> String {
        check_backend(&policy).map_or_else(|error| error.to_string(), |()| "valid".into())
    }

    #[test]
    fn absent_values_are_defaults() {
        let policy = BackendPolicy {
            balancing: Some(Balancing::default()),
            connections: Some(ConnectionLimits::default()),
            outlier_detection: Some(OutlierDetection::default()),
            retry_budget: Some(RetryBudget::default()),
            ..BackendPolicy::default()
        };
        assert_eq!(check(policy), "valid");
    }

    #[test]
    fn names_the_field_the_value_and_the_permitted_values() {
        let balancing = |balancing| BackendPolicy {
            balancing: Some(balancing),
            ..BackendPolicy::default()
        };
        let hashed = |kind| {
            balancing(Balancing {
                algorithm: Algorithm::ConsistentHash.into(),
                hash_key: Some(HashKey { kind }),
                ..Balancing::default()
            })
        };
        let connections = ConnectionLimits {
            max_requests: Some(0),
            ..ConnectionLimits::default()
        };
        let outlier = |detection| BackendPolicy {
            outlier_detection: Some(detection),
            ..BackendPolicy::default()
        };
        let cases = [
            (
                balancing(Balancing {
                    algorithm: 77,
                    ..Balancing::default()
                }),
                "loadBalancing.algorithm: \"77\" is not a known algorithm",
            ),
            (
                hashed(None),
                "loadBalancing.hash: \"\" is not one of header, cookie and source",
            ),
            (
                hashed(Some(Kind::Cookie("a b".into()))),
                "loadBalancing.hash.cookie: \"a b\" is not a name of at most 128 characters",
            ),
            (hashed(Some(Kind::Header("x-user".into()))), "valid"),
            (
                BackendPolicy {
                    connections: Some(connections),
                    ..BackendPolicy::default()
                },
                "connections.maxRequests: \"0\" is not from 1 to 1000000",
            ),
            (
                outlier(OutlierDetection {
                    latency_percent: Some(199),
                    ..OutlierDetection::default()
                }),
                "outlierDetection.latencyPercent: \"199\" is not 0, or from 200 to 10000",
            ),
            (
                outlier(OutlierDetection {
                    interval: Some(u64::MAX),
                    ..OutlierDetection::default()
                }),
                "outlierDetection.interval: \"18446744073709551615ms\" is not from 1ms to 24h",
            ),
            (
                BackendPolicy {
                    circuit_breaker: Some(CircuitBreaker::default()),
                    ..BackendPolicy::default()
                },
                "circuitBreaker.failurePercent: \"0\" is not from 1 to 100",
            ),
        ];
        for (policy, expected) in cases {
            assert_eq!(check(policy), expected);
        }
    }

    #[test]
    fn faults_have_an_effect_and_shares_of_at_most_one() {
        let share = |numerator, denominator| {
            Some(Share {
                numerator,
                denominator,
            })
        };
        let abort = |status, aborted| Fault {
            abort_status: status,
            aborted,
            ..Fault::default()
        };
        let valid = |fault: &Fault| check_fault(fault).is_ok();
        assert!(valid(&abort(503, share(1, 1))));
        for fault in [
            Fault::default(),
            abort(200, share(1, 1)),
            abort(503, None),
            abort(503, share(2, 1)),
            abort(503, share(0, 0)),
        ] {
            assert!(!valid(&fault), "{fault:?}");
        }
    }

    #[test]
    fn permanent_sessions_have_an_absolute_timeout() {
        let session =
            |cookie: &str, header: &str, absolute_timeout, permanent| SessionPersistence {
                cookie: cookie.into(),
                header: header.into(),
                absolute_timeout,
                permanent,
                ..SessionPersistence::default()
            };
        for (session, expected) in [
            (session("s", "", 0, false), true),
            (session("s", "", 1, true), true),
            (session("s", "", 0, true), false),
            (session("", "x-s", 0, false), true),
            (session("", "x-s", 1, true), false),
            (session("", "host", 0, false), false),
            (session("", "", 0, false), false),
            (session("a", "b", 0, false), false),
            (session("s", "", u64::MAX, false), false),
        ] {
            assert_eq!(check_session(&session).is_ok(), expected, "{session:?}");
        }
    }
}
