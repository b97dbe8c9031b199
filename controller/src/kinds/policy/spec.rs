//! The fields of a TrafficPolicy. Matches are the same as in HTTPRoutes.
//!
//! A field that this release does not know makes the policy invalid: without it, the rest could
//! mean something else. `tests/crd.rs` makes the definition of the custom resource from these types,
//! with these comments as descriptions.

use diy_mesh_proto::mesh::v1::balancing::Algorithm;
use diy_mesh_proto::mesh::v1::rate_limit::Scope;
use serde::Deserialize;

use super::telemetry::Telemetry;
#[cfg(test)]
use super::tests::crd;
use crate::kinds::route::spec::{BackendSpec, Fraction, HttpMatch, SessionPersistence, Timeouts};
use crate::object::fields::{Milliseconds, Name, Named};

/// The traffic of the requests to Services, or a host outside of the cluster. A section for a
/// Service replaces the section for its namespace. Absent fields have the defaults of the proxies.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend(
    "x-kubernetes-validations" = [
        crd::few_matches("rateLimits"), crd::few_matches("faults"),
    ],
)))]
#[serde(default, rename_all = "camelCase")]
pub struct TrafficPolicySpec {
    /// Services of the namespace of the policy, or this namespace: all of its Services. The oldest
    /// of several policies for one target applies. Required, except with backend.
    #[cfg_attr(test, schemars(length(min = 1, max = 16), extend(
        "x-kubernetes-list-type" = "map",
        "x-kubernetes-list-map-keys" = ["group", "kind", "name"],
    )))]
    pub target_refs: Vec<TargetRef>,
    /// How clients choose an endpoint for each request.
    pub load_balancing: Option<LoadBalancing>,
    /// Limits of each endpoint, in the proxy of each client.
    pub connections: Option<Connections>,
    /// When an endpoint gets no requests for a while.
    pub outlier_detection: Option<OutlierDetection>,
    /// When all requests fail at once with 503. Absent: never.
    pub circuit_breaker: Option<CircuitBreaker>,
    /// Retries of requests whose route says nothing about them.
    pub retry: Option<Retry>,
    /// Timeouts of requests whose route has none. 0s: none.
    #[cfg_attr(test, schemars(with = "Option<crd::Timeouts>"))]
    pub timeouts: Option<Timeouts>,
    /// Requests of a session go to one endpoint, unless their route says otherwise.
    #[cfg_attr(test, schemars(with = "Option<crd::SessionPersistence>"))]
    pub session_persistence: Option<SessionPersistence>,
    /// Limits that the proxies of the pods of the Service enforce, all of them.
    #[cfg_attr(test, schemars(length(max = 16), extend(
        "x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"],
    )))]
    pub rate_limits: Option<Vec<RateLimit>>,
    /// Faults that the proxies of clients inject, for tests of the clients.
    #[cfg_attr(test, schemars(length(max = 16)))]
    pub faults: Option<Vec<Fault>>,
    /// The telemetry of the proxies of the pods of the Service about their traffic.
    pub telemetry: Option<Telemetry>,
    /// A host outside of the cluster, as a backend of routes of the namespace. They refer to the
    /// policy, which has neither targetRefs nor another section.
    #[cfg_attr(test, schemars(with = "Option<crd::Backend>"))]
    pub backend: Option<BackendSpec>,
}

/// A Service of the namespace of the policy, or this namespace.
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["kind", "name"])))]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct TargetRef {
    /// The core group: empty.
    #[cfg_attr(test, schemars(extend("enum" = [""], "default" = "")))]
    pub group: String,
    /// Service or Namespace.
    #[cfg_attr(test, schemars(extend("enum" = ["Service", "Namespace"])))]
    pub kind: String,
    /// The name.
    #[cfg_attr(test, schemars(length(min = 1, max = 253)))]
    pub name: String,
}

/// How clients choose an endpoint for each request.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("x-kubernetes-validations" = [{
    "rule": "has(self.hash) == (has(self.algorithm) && self.algorithm == 'ConsistentHash')",
    "message": "hash is required for ConsistentHash, and for nothing else",
}])))]
#[serde(default, rename_all = "camelCase")]
pub struct LoadBalancing {
    /// PeakEwma (default): the better of two random endpoints, by latency and requests in flight.
    /// LeastRequest: by requests in flight. RoundRobin: in turn. ConsistentHash: by a hash.
    pub algorithm: Option<Name<Algorithm>>,
    /// The input of a consistent hash. Requests without it are balanced by PeakEwma.
    pub hash: Option<Hash>,
    /// Prefer: endpoints in the zone of the client come first, while they are healthy and less
    /// loaded than the others. Default: None.
    pub zone_preference: Option<Name<PreferZone>>,
    /// The time in which the share of a new endpoint grows. 0s: none.
    #[cfg_attr(test, schemars(with = "Option<crd::UpToADay>"))]
    pub slow_start: Option<Milliseconds>,
}

impl Named for Algorithm {
    const NAMES: &[(&str, Self)] = &[
        ("PeakEwma", Self::PeakEwma),
        ("LeastRequest", Self::LeastRequest),
        ("RoundRobin", Self::RoundRobin),
        ("ConsistentHash", Self::ConsistentHash),
    ];
}

/// Whether endpoints in the zone of the client come first.
#[derive(Clone, Copy, Debug)]
pub struct PreferZone(pub bool);

impl Named for PreferZone {
    const NAMES: &[(&str, Self)] = &[("None", Self(false)), ("Prefer", Self(true))];
}

/// The input of a consistent hash: exactly one of these.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("minProperties" = 1, "maxProperties" = 1)))]
#[serde(default, rename_all = "camelCase")]
pub struct Hash {
    /// The value of a header field.
    #[cfg_attr(test, schemars(regex(pattern = crd::NAME), length(max = 128)))]
    pub header: Option<String>,
    /// The value of a cookie.
    #[cfg_attr(test, schemars(regex(pattern = crd::NAME), length(max = 128)))]
    pub cookie: Option<String>,
    /// The address of the client.
    pub source: Option<Source>,
}

/// The address of the client.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Source {}

/// Limits of each endpoint, in the proxy of each client. Traffic that exceeds them waits, or gets
/// 503.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct Connections {
    /// HTTP/1 connections, and connections that carry no HTTP.
    #[cfg_attr(test, schemars(range(min = 1, max = 1_000_000)))]
    pub max_connections: Option<u32>,
    /// HTTP/2 connections.
    #[cfg_attr(test, schemars(range(min = 1, max = 1_000_000)))]
    pub max_http2_connections: Option<u32>,
    /// Requests in flight.
    #[cfg_attr(test, schemars(range(min = 1, max = 1_000_000)))]
    pub max_requests: Option<u32>,
    /// Requests that wait. 0: none.
    #[cfg_attr(test, schemars(range(max = 1_000_000)))]
    pub max_waiting: Option<u32>,
    /// The time to connect, from 1ms to 24h.
    #[cfg_attr(test, schemars(with = "Option<crd::Limited>"))]
    pub connect_timeout: Option<Milliseconds>,
}

/// When an endpoint gets no requests for a while, except a probing one then.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct OutlierDetection {
    /// Failures in a row: failed connections, gateway errors and responses with 5xx. 0: off.
    #[cfg_attr(test, schemars(range(max = 1000)))]
    pub consecutive_failures: Option<u32>,
    /// The share of failed requests in an interval. 0: off.
    #[cfg_attr(test, schemars(range(max = 100)))]
    pub failure_percent: Option<u32>,
    /// The requests in an interval from which on failurePercent counts.
    #[cfg_attr(test, schemars(range(min = 1, max = 1_000_000)))]
    pub min_requests: Option<u32>,
    /// The interval, from 1ms to 24h.
    #[cfg_attr(test, schemars(with = "Option<crd::Limited>"))]
    pub interval: Option<Milliseconds>,
    /// The mean latency, in percent of the median of the endpoints: 0 (off, default), or 200 to
    /// 10000.
    #[cfg_attr(test, schemars(range(max = 10_000), extend("x-kubernetes-validations" = [{
        "rule": "self == 0 || self >= 200", "message": "expected 0, or at least 200",
    }])))]
    pub latency_percent: Option<u32>,
    /// The time of the first ejection. Each further one takes twice as long.
    #[cfg_attr(test, schemars(with = "Option<crd::Limited>"))]
    pub ejection_time: Option<Milliseconds>,
    /// The time of the longest ejection.
    #[cfg_attr(test, schemars(with = "Option<crd::Limited>"))]
    pub max_ejection_time: Option<Milliseconds>,
    /// The share of the endpoints that are ejected at most, except for failed connections.
    #[cfg_attr(test, schemars(range(max = 100)))]
    pub max_ejected_percent: Option<u32>,
}

/// When all requests fail at once with 503, whatever the endpoints.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["failurePercent"])))]
#[serde(default, rename_all = "camelCase")]
pub struct CircuitBreaker {
    /// The share of failed requests in an interval.
    #[cfg_attr(test, schemars(range(min = 1, max = 100)))]
    pub failure_percent: u32,
    /// The requests in an interval from which on failurePercent counts.
    #[cfg_attr(test, schemars(range(min = 1, max = 1_000_000)))]
    pub min_requests: Option<u32>,
    /// The interval, from 1ms to 24h.
    #[cfg_attr(test, schemars(with = "Option<crd::Limited>"))]
    pub interval: Option<Milliseconds>,
    /// The time until one probing request decides, from 1ms to 24h.
    #[cfg_attr(test, schemars(with = "Option<crd::Limited>"))]
    pub open_time: Option<Milliseconds>,
}

/// Retries of requests whose route says nothing about them.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct Retry {
    /// Statuses that are retried, in addition to failed connections.
    #[cfg_attr(test, schemars(length(max = 64), inner(range(min = 400, max = 599))))]
    pub codes: Option<Vec<u32>>,
    /// Attempts after the first one. Default: 1.
    #[cfg_attr(test, schemars(range(max = 10)))]
    pub attempts: Option<u32>,
    /// The shortest time between two attempts.
    #[cfg_attr(test, schemars(with = "Option<crd::Duration>"))]
    pub backoff: Option<Milliseconds>,
    /// The share of retries, which is always limited.
    pub budget: Option<Budget>,
}

/// Retries as a share of the requests, and retries that are permitted at any rate.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct Budget {
    /// The share of retries.
    #[cfg_attr(test, schemars(range(max = 100)))]
    pub percent: Option<u32>,
    /// Retries that are permitted at any rate.
    #[cfg_attr(test, schemars(range(max = 1_000_000)))]
    pub min_per_second: Option<u32>,
}

/// A limit of the requests to the Service. Requests that exceed it get 429, or RESOURCE_EXHAUSTED.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend(
    "required" = ["name", "requests"],
    "x-kubernetes-validations" = crd::no_caller(),
)))]
#[serde(default, rename_all = "camelCase")]
pub struct RateLimit {
    /// The name, for logs and metrics.
    #[cfg_attr(
        test,
        schemars(regex(pattern = crd::HOSTNAME), length(max = 253))
    )]
    pub name: String,
    /// One of these matches. Empty: every request.
    #[cfg_attr(test, schemars(with = "Vec<crd::Match>", length(max = 64)))]
    pub matches: Vec<HttpMatch>,
    /// Requests in a window, for all replicas together.
    #[cfg_attr(test, schemars(range(min = 1, max = 1_000_000_000)))]
    pub requests: u64,
    /// The window, from 1ms to 24h. Default: 1s.
    #[cfg_attr(test, schemars(with = "Option<crd::Limited>"))]
    pub window: Option<Milliseconds>,
    /// Requests at once, for all replicas together. Default: requests.
    #[cfg_attr(test, schemars(range(min = 1, max = 1_000_000_000)))]
    pub burst: Option<u64>,
    /// Service (default): all clients share the limit. Caller: each caller identity has it.
    pub per: Option<Name<Scope>>,
}

impl Named for Scope {
    const NAMES: &[(&str, Self)] = &[("Service", Self::Service), ("Caller", Self::Caller)];
}

/// A delay, an abort, or one after the other.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("x-kubernetes-validations" = [{
    "rule": "has(self.delay) || has(self.abort)", "message": "expected delay, abort or both",
}])))]
#[serde(default, rename_all = "camelCase")]
pub struct Fault {
    /// One of these matches. Empty: every request.
    #[cfg_attr(test, schemars(with = "Vec<crd::Match>", length(max = 64)))]
    pub matches: Vec<HttpMatch>,
    /// A delay of the request.
    pub delay: Option<Delay>,
    /// A response in place of a backend's.
    pub abort: Option<Abort>,
}

/// A delay of a share of the requests.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend(
    "required" = ["duration"],
    "x-kubernetes-validations" = crd::one_share(),
)))]
#[serde(default, rename_all = "camelCase")]
pub struct Delay {
    /// The duration, from 1ms to 24h.
    #[cfg_attr(test, schemars(with = "crd::Limited"))]
    pub duration: Milliseconds,
    /// The share in percent. Excludes fraction.
    #[cfg_attr(test, schemars(range(max = 100)))]
    pub percent: Option<u32>,
    /// The share. Excludes percent.
    #[cfg_attr(test, schemars(with = "Option<crd::Fraction>"))]
    pub fraction: Option<Fraction>,
}

/// A response to a share of the requests.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend(
    "required" = ["status"],
    "x-kubernetes-validations" = crd::one_share(),
)))]
#[serde(default, rename_all = "camelCase")]
pub struct Abort {
    /// The status. A gRPC call gets the status code that corresponds to it.
    #[cfg_attr(test, schemars(range(min = 400, max = 599)))]
    pub status: u32,
    /// The share in percent. Excludes fraction.
    #[cfg_attr(test, schemars(range(max = 100)))]
    pub percent: Option<u32>,
    /// The share. Excludes percent.
    #[cfg_attr(test, schemars(with = "Option<crd::Fraction>"))]
    pub fraction: Option<Fraction>,
}
