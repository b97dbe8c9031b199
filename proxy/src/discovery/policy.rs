//! Conversion of the policy of a Service from the controller's message. Rejects what this proxy
//! cannot apply completely. Pure.

use std::time::Duration;

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::policy::check_backend;
use proto::{balancing, hash_key};

use super::routes::MAX_REASON;
use crate::upstream::balance::policy::{Algorithm, BackendPolicy, Balancing, HashKey};
use crate::upstream::balance::{BreakerSettings, BudgetSettings, OutlierSettings};
use crate::upstream::connect::Limits;

/// How long a circuit stays open until a probing request decides.
const OPEN_TIME: Duration = Duration::from_secs(5);

/// Converts a policy. Fails with the first value that is invalid or unknown.
pub(super) fn parse(policy: proto::BackendPolicy) -> Result<BackendPolicy, String> {
    check_backend(&policy).map_err(|violation| {
        let reason = format!("policy ({}): {violation}", policy.name);
        reason.chars().take(MAX_REASON).collect::<String>()
    })?;
    let connect_timeout = policy.connections.and_then(|limits| limits.connect_timeout);
    let outliers = policy.outlier_detection;
    Ok(BackendPolicy {
        name: policy.name,
        balancing: policy.balancing.map(Balancing::from).unwrap_or_default(),
        connect_timeout: connect_timeout.map(Duration::from_millis),
        limits: policy.connections.map(Limits::from).unwrap_or_default(),
        outliers: outliers.map(OutlierSettings::from).unwrap_or_default(),
        breaker: policy.circuit_breaker.map(BreakerSettings::from),
        budget: policy.retry_budget.map(BudgetSettings::from),
    })
}

/// Whether requests select endpoints by a hash.
pub(super) fn hashes(policy: Option<&proto::BackendPolicy>) -> bool {
    let balancing = policy.and_then(|policy| policy.balancing.as_ref());
    balancing.is_some_and(|balancing| balancing.hash_key.is_some())
}

impl From<proto::ConnectionLimits> for Limits {
    fn from(message: proto::ConnectionLimits) -> Self {
        let default = Self::default();
        Self {
            connections: message.max_connections.unwrap_or(default.connections),
            opaque: message.max_connections.is_some(),
            http2_connections: message
                .max_http2_connections
                .unwrap_or(default.http2_connections),
            requests: message.max_requests.unwrap_or(default.requests),
            waiting: message.max_waiting.unwrap_or(default.waiting),
        }
    }
}

impl From<proto::OutlierDetection> for OutlierSettings {
    fn from(message: proto::OutlierDetection) -> Self {
        let default = Self::default();
        let or = |value: Option<u32>, default| value.unwrap_or(default);
        Self {
            consecutive_failures: or(message.consecutive_failures, default.consecutive_failures),
            failure_percent: or(message.failure_percent, default.failure_percent),
            min_requests: or(message.min_requests, default.min_requests),
            interval: duration(message.interval, default.interval),
            latency_percent: or(message.latency_percent, default.latency_percent),
            ejection_time: duration(message.ejection_time, default.ejection_time),
            max_ejection_time: duration(message.max_ejection_time, default.max_ejection_time),
            max_ejected_percent: or(message.max_ejected_percent, default.max_ejected_percent),
        }
    }
}

impl From<proto::CircuitBreaker> for BreakerSettings {
    fn from(message: proto::CircuitBreaker) -> Self {
        let default = OutlierSettings::default();
        Self {
            failure_percent: message.failure_percent,
            min_requests: message.min_requests.unwrap_or(default.min_requests),
            interval: duration(message.interval, default.interval),
            open_time: duration(message.open_time, OPEN_TIME),
        }
    }
}

impl From<proto::RetryBudget> for BudgetSettings {
    fn from(message: proto::RetryBudget) -> Self {
        let default = Self::default();
        Self {
            percent: message.percent.unwrap_or(default.percent),
            min_per_second: message.min_per_second.unwrap_or(default.min_per_second),
        }
    }
}

fn duration(milliseconds: Option<u64>, default: Duration) -> Duration {
    milliseconds.map_or(default, Duration::from_millis)
}

/// Converts a message that was checked.
impl From<proto::Balancing> for Balancing {
    fn from(message: proto::Balancing) -> Self {
        let default = Self::default();
        let hash_key = message.hash_key.as_ref().and_then(|key| key.kind.clone());
        let algorithm = match (message.algorithm(), hash_key) {
            (balancing::Algorithm::LeastRequest, _) => Algorithm::LeastRequest,
            (balancing::Algorithm::RoundRobin, _) => Algorithm::RoundRobin,
            (balancing::Algorithm::ConsistentHash, Some(key)) => {
                Algorithm::ConsistentHash(match key {
                    hash_key::Kind::Header(name) => HashKey::Header(name),
                    hash_key::Kind::Cookie(name) => HashKey::Cookie(name),
                    hash_key::Kind::Source(_) => HashKey::Source,
                })
            }
            _ => Algorithm::PeakEwma,
        };
        let slow_start = message.slow_start.map(Duration::from_millis);
        Self {
            algorithm,
            prefer_zone: message.prefer_zone,
            slow_start: slow_start.unwrap_or(default.slow_start),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use proto::acknowledgement::Part;
    use proto::discover_response::Update;
    use proto::snapshot::Kind;
    use tokio::time::Instant;

    use super::super::table::Table;
    use super::*;

    fn balancing(algorithm: i32, key: Option<hash_key::Kind>) -> proto::BackendPolicy {
        proto::BackendPolicy {
            name: "TrafficPolicy shop/web".to_owned(),
            balancing: Some(proto::Balancing {
                algorithm,
                hash_key: key.map(|kind| proto::HashKey { kind: Some(kind) }),
                ..proto::Balancing::default()
            }),
            ..proto::BackendPolicy::default()
        }
    }

    #[test]
    fn absent_settings_are_the_defaults() {
        for empty in [proto::BackendPolicy::default(), balancing(0, None)] {
            let parsed = parse(empty).expect("valid");
            assert_eq!(parsed.balancing, Balancing::default());
        }
        let mut off = balancing(2, None);
        off.balancing.as_mut().expect("set").slow_start = Some(0);
        let parsed = parse(off).expect("valid").balancing;
        assert_eq!(parsed.slow_start, Duration::ZERO);
        assert_eq!(parsed.algorithm, Algorithm::LeastRequest);
    }

    #[test]
    fn resilience_settings_replace_the_defaults_one_by_one() {
        let default = parse(proto::BackendPolicy::default()).expect("valid");
        assert_eq!((default.breaker, default.budget), (None, None));
        assert_eq!(default.connect_timeout, None);
        let message = proto::BackendPolicy {
            connections: Some(proto::ConnectionLimits {
                max_requests: Some(7),
                connect_timeout: Some(1500),
                ..proto::ConnectionLimits::default()
            }),
            outlier_detection: Some(proto::OutlierDetection {
                failure_percent: Some(0),
                latency_percent: Some(300),
                ..proto::OutlierDetection::default()
            }),
            circuit_breaker: Some(proto::CircuitBreaker {
                failure_percent: 40,
                ..proto::CircuitBreaker::default()
            }),
            retry_budget: Some(proto::RetryBudget {
                percent: Some(5),
                ..proto::RetryBudget::default()
            }),
            ..proto::BackendPolicy::default()
        };
        let seconds = Duration::from_secs;
        let expected = BackendPolicy {
            connect_timeout: Some(Duration::from_millis(1500)),
            limits: Limits {
                requests: 7,
                ..Limits::default()
            },
            outliers: OutlierSettings {
                failure_percent: 0,
                latency_percent: 300,
                ..OutlierSettings::default()
            },
            breaker: Some(BreakerSettings {
                failure_percent: 40,
                min_requests: 20,
                interval: seconds(10),
                open_time: seconds(5),
            }),
            budget: Some(BudgetSettings {
                percent: 5,
                min_per_second: 1,
            }),
            ..BackendPolicy::default()
        };
        assert_eq!(parse(message), Ok(expected));
        let connections = proto::ConnectionLimits {
            max_connections: Some(4096),
            ..proto::ConnectionLimits::default()
        };
        assert!(Limits::from(connections).opaque, "opaque ones count then");
    }

    #[test]
    fn rejected_policy_leaves_the_previous_one_in_force() {
        let (mut table, address) = (
            Table::new(1, usize::MAX),
            SocketAddr::from(([10, 96, 0, 7], 80)),
        );
        let (watched, _) = table.watch(address).expect("room");
        // The name of the policy in force, and the acknowledgement.
        let mut apply = |version: &str, name: &str, policy: Option<proto::BackendPolicy>| {
            let response = proto::DiscoverResponse {
                name: address.to_string(),
                version: version.to_owned(),
                update: Some(Update::Snapshot(proto::Snapshot {
                    kind: Kind::Service.into(),
                    name: name.to_owned(),
                    policy,
                    ..proto::Snapshot::default()
                })),
                ..proto::DiscoverResponse::default()
            };
            let applied = table.apply(response, Instant::now(), &mut |_| {});
            let policy = watched.receiver.borrow().policy.clone();
            let algorithm = policy.balancing.algorithm.clone();
            let rejection = applied.acknowledgement.map(|one| {
                assert_eq!(one.version, version);
                let is_rejected = !one.rejection.is_empty();
                assert_eq!(one.part() == Part::Policy, is_rejected);
                one.rejection
            });
            (algorithm, rejection)
        };
        let valid = |algorithm| (algorithm, Some(String::new()));
        let unknown = Some(balancing(77, None));
        let (algorithm, rejection) = apply("1", "web", unknown.clone());
        assert_eq!(algorithm, Algorithm::PeakEwma, "the default");
        let reason = rejection.expect("acknowledged");
        assert!(
            reason.contains("\"77\" is not a known algorithm"),
            "{reason}"
        );
        assert_eq!(
            apply("2", "web", Some(balancing(3, None))),
            valid(Algorithm::RoundRobin)
        );
        let (algorithm, rejection) = apply("3", "web", unknown.clone());
        assert_eq!(algorithm, Algorithm::RoundRobin);
        assert!(rejection.is_some_and(|reason| !reason.is_empty()));
        let (algorithm, _) = apply("4", "another Service", unknown);
        assert_eq!(algorithm, Algorithm::PeakEwma);
        assert_eq!(apply("5", "web", None), (Algorithm::PeakEwma, None));
    }

    #[test]
    fn hash_keys_are_names_of_fields_and_cookies() {
        let key = |kind| parse(balancing(4, Some(kind))).map(|one| one.balancing.algorithm);
        let header = |name: &str| key(hash_key::Kind::Header(name.to_owned()));
        let cookie = |name: &str| key(hash_key::Kind::Cookie(name.to_owned()));
        let hash = |key| Ok(Algorithm::ConsistentHash(key));
        assert_eq!(header("X-User"), hash(HashKey::Header("X-User".into())));
        assert_eq!(cookie("User"), hash(HashKey::Cookie("User".into())));
        let source = hash_key::Kind::Source(hash_key::Source::default());
        assert_eq!(key(source), hash(HashKey::Source));
        for invalid in [header("x user"), header(""), cookie("a=b"), cookie("")] {
            let reason = invalid.expect_err("invalid");
            let starts = "policy (TrafficPolicy shop/web): loadBalancing.hash.";
            assert!(reason.starts_with(starts), "{reason}");
        }
    }

    #[test]
    fn unknown_parts_are_rejected() {
        let unknown_key = proto::HashKey { kind: None };
        let mut other_key = balancing(4, None);
        other_key.balancing.as_mut().expect("set").hash_key = Some(unknown_key);
        for (policy, expected) in [
            (balancing(4, None), "ConsistentHash requires"),
            (balancing(5, None), "\"5\" is not a known algorithm"),
            (other_key, "one of header, cookie and source"),
        ] {
            let reason = parse(policy).expect_err("unknown");
            assert!(reason.contains(expected), "{reason}");
        }
    }
}
