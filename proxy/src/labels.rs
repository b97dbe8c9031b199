//! Values of labels of metrics that are decisions of the request path, too.

use std::sync::Arc;

use diy_mesh_model::identity::Identity;
use http::StatusCode;

/// The name of what has no place of its own in metrics.
pub const OTHER: &str = "other";
/// The value of a label for what is not known by name.
pub const OTHER_VALUE: &str = "_OTHER";
/// The methods of RFC 9110, and PATCH.
const METHODS: [&str; 9] = [
    "CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE",
];

/// The label `http_request_method`.
pub fn method(method: &[u8]) -> &'static str {
    let known = METHODS.iter().find(|known| known.as_bytes() == method);
    known.copied().unwrap_or(OTHER_VALUE)
}

/// The other side of a request: the labels `service_peer_name` and `service_peer_namespace`. Both are
/// empty if the mesh has no name for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Peer {
    /// The service account of a caller, or a Service, or a configured host outside of the cluster.
    pub name: Arc<str>,
    /// The namespace of the service account or of the Service.
    pub namespace: Arc<str>,
}

impl Peer {
    /// A peer with this name.
    pub fn new(name: &str, namespace: &str) -> Self {
        Self {
            name: name.into(),
            namespace: namespace.into(),
        }
    }

    /// All peers without a place of their own.
    pub fn other() -> Self {
        Self::new(OTHER, "")
    }

    /// A caller with a verified identity.
    pub fn caller(identity: &Identity) -> Self {
        Self::new(identity.service_account(), identity.namespace())
    }
}

/// The label `tls`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TlsKind {
    /// The proxy has no TLS session with the peer.
    None,
    /// Mutual TLS with the peer's proxy.
    Mutual,
    /// TLS to a server outside of the mesh.
    Server,
}

impl TlsKind {
    /// The value of the label.
    pub fn name(self) -> &'static str {
        ["none", "mtls", "tls"][self as usize]
    }
}

/// Why a request failed: the label `error_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ErrorType {
    /// It did not fail.
    None,
    /// This proxy, or the callee's proxy, could not complete it: the code.
    Mesh(&'static str),
    /// By its HTTP status.
    Status,
    /// By its gRPC status.
    Grpc,
    /// It has no complete response.
    Other,
}

impl ErrorType {
    /// The error of a request that ended. `code`: of the proxy that failed it. `grpc`: its gRPC
    /// status, if it is a call. `is_complete`: no part of its response is missing, unless the client
    /// left.
    pub fn of(
        code: Option<&'static str>,
        status: Option<StatusCode>,
        grpc: &str,
        is_complete: bool,
    ) -> Self {
        match (code, status) {
            (Some(code), _) => Self::Mesh(code),
            (None, Some(status)) if status.as_u16() >= 500 => Self::Status,
            _ if is_server_error(grpc) => Self::Grpc,
            (None, Some(_)) if is_complete => Self::None,
            _ if grpc == "CANCELLED" => Self::None,
            _ => Self::Other,
        }
    }

    /// Whether the request failed, as access logs, recent exchanges and reports of traffic see it: also
    /// by a gRPC status that is no error of the server.
    pub fn is_failure(self, grpc: &str) -> bool {
        self != Self::None || !matches!(grpc, "" | "OK")
    }

    /// The value of the label. `status` and `grpc` are the values of the labels of the statuses.
    pub fn value<'a>(self, status: &'a str, grpc: &'a str) -> &'a str {
        match self {
            Self::None => "",
            Self::Mesh(code) => code,
            Self::Status => status,
            Self::Grpc => grpc,
            Self::Other => OTHER_VALUE,
        }
    }
}

/// The gRPC statuses that are errors of the server by the semantic conventions.
fn is_server_error(grpc: &str) -> bool {
    matches!(
        grpc,
        "UNKNOWN"
            | "DEADLINE_EXCEEDED"
            | "UNIMPLEMENTED"
            | "INTERNAL"
            | "UNAVAILABLE"
            | "DATA_LOSS"
            | OTHER_VALUE
    )
}

/// The verdict of the policies on a request or a connection: the label `verdict`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is allowed.
    Allowed,
    /// It is denied, or its client must authenticate.
    Denied,
    /// It is allowed, and those under audit would deny it.
    WouldDeny,
}

impl Verdict {
    /// The values of the label, in the order of the discriminants.
    pub const NAMES: [&str; 3] = ["allowed", "denied", "would-deny"];
}

/// The result of a TLS handshake: the label `result` of the metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeResult {
    /// A new session.
    Full,
    /// An earlier session goes on.
    Resumed,
    /// There is no session.
    Failed,
    /// The server answered in plaintext.
    Plaintext,
}

impl HandshakeResult {
    /// The values of the label, in the order of the discriminants.
    pub const NAMES: [&str; 4] = ["full", "resumed", "failed", "plaintext"];
}

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

/// The decision of an authorization server about a request: the label `result` of the metric.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_methods_are_others() {
        assert_eq!(METHODS.map(|known| method(known.as_bytes())), METHODS);
        assert_eq!(
            ["get", "", "BREW"].map(|name| method(name.as_bytes())),
            [OTHER_VALUE; 3]
        );
    }

    #[test]
    fn error_is_that_of_the_proxy_then_of_the_status_then_of_the_call() {
        let value = |code, status: u16, grpc, is_complete| {
            let known = StatusCode::from_u16(status).ok();
            let error = ErrorType::of(code, known, grpc, is_complete);
            error
                .value(known.as_ref().map_or("", StatusCode::as_str), grpc)
                .to_owned()
        };
        assert_eq!(
            value(Some("timeout"), 504, "DEADLINE_EXCEEDED", true),
            "timeout"
        );
        assert_eq!(value(None, 503, "", true), "503");
        assert_eq!(value(None, 499, "", true), "");
        assert_eq!(value(None, 200, "", false), OTHER_VALUE);
        assert_eq!(value(None, 0, "", true), OTHER_VALUE);
        assert_eq!(value(None, 200, "UNAVAILABLE", true), "UNAVAILABLE");
        assert_eq!(value(None, 200, OTHER_VALUE, true), OTHER_VALUE);
        for grpc in ["OK", "NOT_FOUND", "CANCELLED"] {
            assert_eq!(value(None, 200, grpc, true), "");
        }
        assert_eq!(value(None, 0, "CANCELLED", false), "");
    }
}
