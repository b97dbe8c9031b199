//! Conversion of the rate limits of the own pod from the controller's message. Rejects what this
//! proxy cannot apply completely. Pure.

use std::sync::Arc;
use std::time::{Duration, Instant};

use diy_mesh_model::ports::PortSet;
use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::policy::check_rate_limit;
use proto::rate_limit::Scope as ProtoScope;

use super::routes::{MAX_MATCHES, MAX_PATTERNS, parse_conditions};
use crate::error::Scope;
use crate::inbound::limit::{Rate, RateLimit, RateLimits};

/// Maximum number of limits of a pod, and of ports of a limit.
const MAX_LIMITS: usize = 256;

/// Converts limits. Those that `earlier` has too keep their fill.
pub(super) fn parse(
    limits: &[proto::RateLimit],
    earlier: &RateLimits,
    now: Instant,
) -> Result<RateLimits, String> {
    let matches = limits.iter().map(|limit| limit.matches.len()).sum();
    let ports = limits.iter().map(|limit| limit.ports.len()).max();
    for (count, max, what) in [
        (limits.len(), MAX_LIMITS, "rate limits"),
        (matches, MAX_MATCHES, "matches of rate limits"),
        (
            ports.unwrap_or_default(),
            MAX_LIMITS,
            "ports of a rate limit",
        ),
    ] {
        if count > max {
            return Err(format!("{count} {what}: at most {max} are allowed"));
        }
    }
    let mut patterns = MAX_PATTERNS;
    let mut parsed: Vec<Arc<RateLimit>> = Vec::with_capacity(limits.len());
    for (index, limit) in limits.iter().enumerate() {
        let scope = match limit.scope() {
            ProtoScope::Caller => Scope::Caller,
            // The check rejects others.
            ProtoScope::Service | ProtoScope::Unspecified => Scope::Service,
        };
        // A policy of several Services that select the pod has its limits once for each.
        let is_same = |one: &&Arc<RateLimit>| *one.name == *limit.name && one.scope == scope;
        let nth = parsed.iter().filter(is_same).count();
        let in_limit = |error| format!("rate limit {index} ({}): {error}", limit.name);
        parsed.push(Arc::new(RateLimit {
            name: limit.name.as_str().into(),
            scope,
            ports: parse_ports(limit).map_err(in_limit)?,
            matches: parse_conditions(&limit.matches, &mut patterns).map_err(in_limit)?,
            rate: parse_rate(limit).map_err(in_limit)?,
            buckets: earlier.buckets(&limit.name, scope, nth, now),
        }));
    }
    Ok(RateLimits(parsed))
}

fn parse_ports(limit: &proto::RateLimit) -> Result<PortSet, String> {
    let ports = limit.ports.iter().map(|port| (*port, *port));
    PortSet::from_ranges(ports).map_err(|(port, _)| format!("port {port}, expected 1 to 65535"))
}

fn parse_rate(limit: &proto::RateLimit) -> Result<Rate, String> {
    check_rate_limit(limit).map_err(|violation| violation.to_string())?;
    if limit.replicas == 0 {
        return Err("0 replicas, expected at least 1".to_owned());
    }
    let burst = match limit.burst {
        0 => limit.requests,
        burst => burst,
    };
    let window = Duration::from_millis(limit.window);
    Ok(Rate::new(limit.requests, window, burst, limit.replicas))
}
