//! Conversion of the policy of a Service from the controller's message. Rejects what this proxy
//! cannot apply completely. Pure.

use std::time::Duration;

use diy_mesh_proto::mesh::v1 as proto;
use http::HeaderName;
use proto::{balancing, hash_key};

use super::routes::MAX_REASON;
use crate::balance::policy::{Algorithm, BackendPolicy, Balancing, HashKey};

/// Converts a policy. Fails with the first thing that is invalid or unknown.
pub(super) fn parse(policy: proto::BackendPolicy) -> Result<BackendPolicy, String> {
    let name = policy.name.clone();
    convert(policy).map_err(|reason| {
        let reason = format!("policy ({name}): {reason}");
        reason.chars().take(MAX_REASON).collect()
    })
}

fn convert(policy: proto::BackendPolicy) -> Result<BackendPolicy, String> {
    let proto::BackendPolicy {
        name, balancing, ..
    } = policy;
    let balancing = balancing.map(parse_balancing).transpose();
    Ok(BackendPolicy {
        name,
        balancing: balancing
            .map_err(|error| format!("load balancing: {error}"))?
            .unwrap_or_default(),
    })
}

fn parse_balancing(balancing: proto::Balancing) -> Result<Balancing, String> {
    let default = Balancing::default();
    let hash_key = balancing.hash_key.map(parse_hash_key).transpose()?;
    let algorithm = match balancing::Algorithm::try_from(balancing.algorithm) {
        Ok(balancing::Algorithm::Unspecified) => default.algorithm,
        Ok(balancing::Algorithm::PeakEwma) => Algorithm::PeakEwma,
        Ok(balancing::Algorithm::LeastRequest) => Algorithm::LeastRequest,
        Ok(balancing::Algorithm::RoundRobin) => Algorithm::RoundRobin,
        Ok(balancing::Algorithm::ConsistentHash) => {
            Algorithm::ConsistentHash(hash_key.ok_or("a consistent hash without a key")?)
        }
        Err(_) => return Err(format!("unknown algorithm {}", balancing.algorithm)),
    };
    Ok(Balancing {
        algorithm,
        prefer_zone: balancing.prefer_zone,
        slow_start: balancing
            .slow_start
            .map_or(default.slow_start, Duration::from_millis),
    })
}

fn parse_hash_key(key: proto::HashKey) -> Result<HashKey, String> {
    match key.kind {
        Some(hash_key::Kind::Header(name)) => {
            let header = HeaderName::from_bytes(name.as_bytes());
            let header = header.map_err(|_| format!("{name:?} is no name of a header field"))?;
            Ok(HashKey::Header(header.as_str().to_owned()))
        }
        // The name of a cookie is a token too (RFC 6265, section 4.1.1), with case.
        Some(hash_key::Kind::Cookie(name)) => match HeaderName::from_bytes(name.as_bytes()) {
            Ok(_) => Ok(HashKey::Cookie(name)),
            Err(_) => Err(format!("{name:?} is no name of a cookie")),
        },
        Some(hash_key::Kind::Source(_)) => Ok(HashKey::Source),
        None => Err("unknown kind of hash key".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

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
    fn rejected_policy_leaves_the_previous_one_in_force() {
        let (mut table, address) = (Table::new(1), SocketAddr::from(([10, 96, 0, 7], 80)));
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
            let algorithm = watched
                .receiver
                .borrow()
                .policy()
                .balancing
                .algorithm
                .clone();
            let rejection = applied.acknowledgement.map(|one| {
                assert_eq!(one.version, version);
                one.rejection
            });
            (algorithm, rejection)
        };
        let valid = |algorithm| (algorithm, Some(String::new()));
        let unknown = Some(balancing(77, None));
        let (algorithm, rejection) = apply("1", "web", unknown.clone());
        assert_eq!(algorithm, Algorithm::PeakEwma, "the default");
        let reason = rejection.expect("acknowledged");
        assert!(reason.contains("unknown algorithm 77"), "{reason}");
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
        assert_eq!(header("X-User"), hash(HashKey::Header("x-user".into())));
        assert_eq!(cookie("User"), hash(HashKey::Cookie("User".into())));
        let source = hash_key::Kind::Source(hash_key::Source::default());
        assert_eq!(key(source), hash(HashKey::Source));
        for invalid in [header("x user"), header(""), cookie("a=b"), cookie("")] {
            let reason = invalid.expect_err("invalid");
            let starts = "policy (TrafficPolicy shop/web): load balancing: \"";
            assert!(reason.starts_with(starts), "{reason}");
        }
    }

    #[test]
    fn unknown_parts_are_rejected() {
        let unknown_key = proto::HashKey { kind: None };
        let mut other_key = balancing(4, None);
        other_key.balancing.as_mut().expect("set").hash_key = Some(unknown_key);
        for (policy, expected) in [
            (balancing(4, None), "without a key"),
            (balancing(5, None), "unknown algorithm 5"),
            (other_key, "unknown kind of hash key"),
        ] {
            let reason = parse(policy).expect_err("unknown");
            assert!(reason.contains(expected), "{reason}");
        }
    }
}
