//! The fields of a TrafficPolicy. Matches are those of HTTPRoutes.
//!
//! A field that this release does not know makes the policy invalid: without it, the rest could
//! mean something else. Values of enumerations are texts, which `parse.rs` checks.

use serde::Deserialize;

use crate::routes::spec::{Fraction, HttpMatch, SessionPersistence, Timeouts};

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct TrafficPolicySpec {
    pub target_refs: Vec<TargetRef>,
    pub load_balancing: Option<LoadBalancing>,
    pub connections: Option<Connections>,
    pub outlier_detection: Option<OutlierDetection>,
    pub circuit_breaker: Option<CircuitBreaker>,
    pub retry: Option<Retry>,
    pub timeouts: Option<Timeouts>,
    pub session_persistence: Option<SessionPersistence>,
    pub rate_limits: Option<Vec<RateLimit>>,
    pub faults: Option<Vec<Fault>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct TargetRef {
    pub group: String,
    pub kind: String,
    pub name: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct LoadBalancing {
    pub algorithm: Option<String>,
    pub hash: Option<Hash>,
    pub zone_preference: Option<String>,
    pub slow_start: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct Hash {
    pub header: Option<String>,
    pub cookie: Option<String>,
    pub source: Option<Source>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Source {}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct Connections {
    pub max_connections: Option<u32>,
    pub max_http2_connections: Option<u32>,
    pub max_requests: Option<u32>,
    pub max_waiting: Option<u32>,
    pub connect_timeout: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct OutlierDetection {
    pub consecutive_failures: Option<u32>,
    pub failure_percent: Option<u32>,
    pub min_requests: Option<u32>,
    pub interval: Option<String>,
    pub latency_percent: Option<u32>,
    pub ejection_time: Option<String>,
    pub max_ejection_time: Option<String>,
    pub max_ejected_percent: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct CircuitBreaker {
    pub failure_percent: u32,
    pub min_requests: Option<u32>,
    pub interval: Option<String>,
    pub open_time: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct Retry {
    pub codes: Option<Vec<u32>>,
    pub attempts: Option<u32>,
    pub backoff: Option<String>,
    pub budget: Option<Budget>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct Budget {
    pub percent: Option<u32>,
    pub min_per_second: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct RateLimit {
    pub name: String,
    pub matches: Vec<HttpMatch>,
    pub requests: u64,
    pub window: Option<String>,
    pub burst: Option<u64>,
    pub per: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct Fault {
    pub matches: Vec<HttpMatch>,
    pub delay: Option<Delay>,
    pub abort: Option<Abort>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct Delay {
    pub duration: String,
    pub percent: Option<u32>,
    pub fraction: Option<Fraction>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct Abort {
    pub status: u32,
    pub percent: Option<u32>,
    pub fraction: Option<Fraction>,
}
