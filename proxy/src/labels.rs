//! Values of labels of metrics that are decisions of the request path, too.

/// Why a safe retry does not take place: the label `reason` of the metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryDenial {
    /// The budget of the backend is used up.
    Budget,
    /// Another hop has sent the request before, with its own budget.
    PreviousAttempt,
    /// No endpoint usually answers before the deadline.
    Deadline,
    /// The circuit of the backend is open.
    Circuit,
}

impl RetryDenial {
    /// The values of the label `reason`, in the order of the discriminants.
    pub const NAMES: [&str; 4] = ["budget", "previous-attempt", "deadline", "circuit-open"];
}

/// The result of a copy: the label `result` of the metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorResult {
    /// It has a response.
    Answered,
    /// It has none.
    Failed,
    /// It was not sent: its body is long, or there are too many.
    Dropped,
}

impl MirrorResult {
    /// The values of the label, in the order of the discriminants.
    pub const NAMES: [&str; 3] = ["answered", "failed", "dropped"];
}

/// What an authorization server says about a request: the label `result` of the metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExternalResult {
    /// It is allowed.
    Allowed,
    /// It is denied.
    Denied,
    /// Nothing: it is denied.
    Failed,
    /// Nothing: it is allowed, as the policy says.
    FailedOpen,
}

impl ExternalResult {
    /// The values of the label, in the order of the discriminants.
    pub const NAMES: [&str; 4] = ["allowed", "denied", "failed", "failed-open"];
}

/// Why an endpoint is quarantined: the label `cause` of the metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It accepts no connections. One refusal is enough.
    Refused,
    /// It has failed several requests in a row.
    Consecutive,
    /// It fails a large share of its requests.
    Percent,
    /// It is much slower than the others.
    Latency,
}

impl Cause {
    /// The values of the label `cause`, in the order of the discriminants.
    pub const NAMES: [&str; 4] = ["refused", "consecutive", "percent", "latency"];

    /// The value of the label.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// A limit of an endpoint: the label `limit` of the metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// HTTP/1 connections, and opaque ones.
    Connections,
    /// HTTP/2 connections.
    Http2Connections,
    /// Requests in flight.
    Requests,
}

impl LimitKind {
    /// The values of the label `limit`, in the order of the discriminants.
    pub const NAMES: [&str; 3] = ["connections", "http2-connections", "requests"];

    /// The setting of a TrafficPolicy.
    pub fn setting(self) -> &'static str {
        match self {
            Self::Connections => "maxConnections",
            Self::Http2Connections => "maxHttp2Connections",
            Self::Requests => "maxRequests",
        }
    }
}
