//! The failures of the request path. This module is the only mapping from a failure to its code,
//! whose row in `diy_mesh_model::code` has the HTTP status, the gRPC status and the label.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use diy_mesh_model::code::{Code, Grpc};
use diy_mesh_proto::authorization::Denial;
use http::{HeaderName, HeaderValue, StatusCode};
use thiserror::Error;

use crate::protocol::TooLarge;

/// Why the proxy did not forward a request or a connection, or could not complete it.
#[derive(Clone, Debug, Error)]
pub enum Failure {
    /// The Service exists and has no ready endpoint.
    #[error("service {0} has no ready endpoint")]
    NoEndpoint(String),
    /// The Service has routes, and none matches the request.
    #[error("no route of service {0} matches the request")]
    NoRoute(String),
    /// A rule has no backend for the request.
    #[error("{0} has no valid backend for the request")]
    InvalidBackend(String),
    /// A fault in place of a response.
    #[error("fault of {name}")]
    FaultInjected {
        /// The object that it comes from.
        name: Arc<str>,
        /// The status.
        status: StatusCode,
    },
    /// The proxy rejected the routes of the Service.
    #[error("the routes of service {service} are invalid for this proxy: {reason}")]
    InvalidRoutes {
        /// Namespace and name of the Service.
        service: String,
        /// The invalid part.
        reason: String,
    },
    /// The Service exists and does not have the port, or the mesh does not support it.
    #[error("{}", unknown_port(service, *port, ports, *max_ports))]
    UnknownPort {
        /// Namespace and name of the Service.
        service: String,
        /// The port of the destination.
        port: u16,
        /// The TCP ports of the Service.
        ports: Arc<[u16]>,
        /// Not 0: the Service has the port, but not among these first TCP ports.
        max_ports: u32,
    },
    /// The destination is or may be meshed, and the controller has not sent its endpoints.
    #[error(
        "the endpoints of {0} are unknown, and it may be meshed: plaintext is not allowed; \
         check that the controller is available"
    )]
    Withheld(String),
    /// Discovery removed the endpoints while the proxy connected to them, for as long as it may connect.
    #[error("{backend} has removed {address} while the proxy connected to it")]
    EndpointRemoved {
        /// The last endpoint.
        address: SocketAddr,
        /// The Service.
        backend: String,
    },
    /// The endpoint did not accept the connection.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// The endpoint.
        address: SocketAddr,
        /// The error of connect(2).
        source: Arc<io::Error>,
    },
    /// The endpoint did not accept the connection within the timeout.
    #[error("connection to {0} timed out")]
    ConnectTimeout(SocketAddr),
    /// The endpoint accepted a connection, and sent no HTTP/2 SETTINGS within the timeout: the request was
    /// not sent.
    #[error("{0} has accepted the connection, and sent no HTTP/2 SETTINGS in time")]
    NoSettings(SocketAddr),
    /// No endpoint of a Service or pod accepted a connection.
    #[error("{message}")]
    NoneAccepts {
        /// Which endpoints, and why.
        message: String,
        /// The failure of the last one, whose status and code this one has.
        last: Box<Failure>,
    },
    /// The upstream closed or reset the connection before its response.
    #[error("{address} closed the connection before it responded: {reason}")]
    UpstreamClosed {
        /// The endpoint.
        address: SocketAddr,
        /// The error, or the state of the response.
        reason: String,
    },
    /// The upstream's response violates RFC 9112 or RFC 9113.
    #[error("{address} sent a malformed HTTP response: {reason}")]
    UpstreamMalformed {
        /// The endpoint.
        address: SocketAddr,
        /// The violation.
        reason: String,
    },
    /// A section of the upstream's response exceeds a limit.
    #[error("{address} sent a malformed HTTP response: {}", limit.message())]
    UpstreamTooLarge {
        /// The endpoint.
        address: SocketAddr,
        /// The limit.
        limit: TooLarge,
    },
    /// The client sends more requests than the pod accepts.
    #[error(
        "rate limit {}: the next request is possible in {} ms",
        .0.name,
        .0.retry_after.as_nanos().div_ceil(1_000_000)
    )]
    RateLimited(Exceeded),
    /// The client's request violates RFC 9112 or RFC 9113.
    #[error("malformed request: {0}")]
    BadRequest(&'static str),
    /// A section of the request exceeds a limit.
    #[error("{}", .0.message())]
    HeadersTooLarge(TooLarge),
    /// The expressions of routes, faults or rate limits would judge too many bytes of the request.
    #[error(
        "{} is too large: the expressions of routes and rate limits judge at most {MAX_JUDGED} bytes \
         of a request, and a byte counts for each expression",
        part_name(*.0)
    )]
    TooLargeToMatch(RequestPart),
    /// The client did not send the complete request head, or what an authorization server gets of the
    /// body, within the timeout.
    #[error("timed out before the complete request head, or the body to authorize, arrived")]
    RequestTimeout,
    /// The proxy has reached a limit.
    #[error("the proxy is overloaded: {0}")]
    Overloaded(&'static str),
    /// The memory for a request was used up after the endpoint had got a part of it.
    #[error("the proxy ended the request: the memory that the client may use is in use")]
    MemoryExhausted,
    /// The endpoint takes no more requests at present.
    #[error("{0} is overloaded")]
    UpstreamOverloaded(SocketAddr),
    /// A limit of the endpoint is reached, and no request ended in time or the queue is full.
    #[error("{address} has reached {limit} of {}", policy_or_defaults(policy))]
    EndpointLimit {
        /// The endpoint.
        address: SocketAddr,
        /// The setting of the policy.
        limit: &'static str,
        /// The policy.
        policy: String,
    },
    /// The circuit breaker of the backend is open.
    #[error(
        "the circuit of {service} is open by {policy}: too many requests failed; \
         one request at a time tests whether it works again"
    )]
    CircuitOpen {
        /// Namespace and name of the Service.
        service: String,
        /// The policy.
        policy: String,
    },
    /// The endpoint responded with a status that the route retries.
    #[error("{address} responded with {status}, which is retried")]
    RetriedStatus {
        /// The endpoint.
        address: SocketAddr,
        /// The status.
        status: u16,
    },
    /// The endpoint requires mutual TLS, and the proxy has no valid certificate.
    #[error("{0} requires mutual TLS, and this proxy has no valid certificate")]
    NoCertificate(SocketAddr),
    /// Either side did not accept the certificate of the other one, or the handshake failed.
    #[error("mutual TLS handshake with {address} failed: {reason}")]
    Handshake {
        /// The peer.
        address: SocketAddr,
        /// The error.
        reason: String,
    },
    /// The endpoint sent bytes of its application in place of its first TLS record: its proxy has taken
    /// the late ClientHello for a silent client.
    #[error("{0} answered the mutual TLS handshake in plaintext")]
    PlaintextAnswer(SocketAddr),
    /// The workload accepts only mutual TLS, and the client did not use it.
    #[error("this workload requires mutual TLS: its callers must be in the mesh")]
    MtlsRequired,
    /// The controller has not sent the policies of the pod yet.
    #[error("this workload has just started: its proxy has no policies yet")]
    NotReady,
    /// No policy at the port accepts the token of the request.
    #[error("the token is not valid for {policy}: {}", refusal.reason)]
    InvalidToken {
        /// The first of the policies.
        policy: Arc<str>,
        /// Sentences about the token.
        refusal: Box<TokenRefusal>,
    },
    /// The AuthorizationPolicies of the pod do not allow the call.
    #[error("{}", denied_message(.denial, *.id))]
    Denied {
        /// The policy and its rule.
        denial: Denial,
        /// The number that a caller of another namespace gets in place of policy and rule.
        id: Option<u32>,
    },
    /// The AuthorizationPolicies of the pod do not allow its call to outside of the cluster.
    #[error("{destination} is outside of the cluster, and denied by {reason}")]
    EgressDenied {
        /// The address, and the name by which it was found.
        destination: String,
        /// The policy and its rule, or the reason to refuse the address.
        reason: String,
    },
    /// The proxy has no address of an allowed name.
    #[error("cannot resolve {name}: {reason}")]
    Unresolved {
        /// The name.
        name: Arc<str>,
        /// Why.
        reason: String,
    },
    /// The authorization server of a policy denies the request.
    #[error("denied by the authorization server of {policy} with {}", reply.status)]
    ExternallyDenied {
        /// The policy.
        policy: Arc<str>,
        /// The response to the client.
        reply: Box<ExternalReply>,
    },
    /// The authorization server of a policy did not answer.
    #[error("the authorization server of {policy} did not answer: {reason}")]
    AuthorizerFailed {
        /// The policy.
        policy: Arc<str>,
        /// Why there is no answer.
        reason: String,
    },
    /// A CONNECT request for an application that does not declare that it accepts them.
    #[error(
        "CONNECT is not allowed: the pod does not have the annotation diy-service-mesh/allow-connect: \"true\""
    )]
    ConnectNotAllowed,
    /// A deadline passed before the end of the response.
    #[error("{}", timeout_message(*.0))]
    Timeout(Limit),
}

/// Why a token is not valid.
#[derive(Clone, Debug, Default)]
pub struct TokenRefusal {
    /// For the log.
    pub reason: String,
    /// For the client, which learns neither the issuers nor the audiences that policies accept.
    pub told: String,
}

impl Failure {
    /// The failure after failed attempts to reach a backend, which has `ready` endpoints: the last one,
    /// or a summary if no endpoint accepts connections. `None` without attempts.
    pub fn of_attempts(mut failures: Vec<Self>, backend: &str, ready: usize) -> Option<Self> {
        let count = failures.len();
        let addresses = failures.iter().filter_map(Self::unconnected);
        let mut ports: Vec<_> = addresses.map(|address| address.port()).collect();
        if ports.len() < count {
            return failures.pop();
        }
        ports.dedup();
        let is_refusal = |failure: &Self| {
            matches!(failure, Self::Connect { source, .. }
                if source.kind() == io::ErrorKind::ConnectionRefused)
        };
        let all_refuse = failures.iter().all(is_refusal);
        let last = failures.pop()?;
        if count == 1 {
            // Without discovery, the address is the name of the backend.
            let is_named = last.unconnected()?.to_string() != backend;
            return Some(if is_named {
                Self::NoneAccepts {
                    message: format!("{backend}: {last}"),
                    last: Box::new(last),
                }
            } else {
                last
            });
        }
        let endpoints = match (count, ready) {
            (2, 2) => "both ready endpoints".to_owned(),
            (count, ready) if count >= ready => format!("all {count} ready endpoints"),
            (count, ready) => format!("{count} of {ready} ready endpoints"),
        };
        let problem = match (all_refuse, ports.as_slice()) {
            (true, [port]) => format!("refuse connections on port {port}"),
            (true, _) => "refuse connections".to_owned(),
            (false, _) => format!("accept no connection; the last error is: {last}"),
        };
        Some(Self::NoneAccepts {
            message: format!("{endpoints} of {backend} {problem}"),
            last: Box::new(last),
        })
    }

    /// The failure with the name of the policy that sets the limit.
    pub fn with_policy(mut self, name: impl FnOnce() -> String) -> Self {
        if let Self::EndpointLimit { policy, .. } = &mut self {
            *policy = name();
        }
        self
    }

    /// The address of an endpoint that accepted no connection.
    fn unconnected(&self) -> Option<SocketAddr> {
        match self {
            Self::Connect { address, .. } | Self::ConnectTimeout(address) => Some(*address),
            _ => None,
        }
    }

    /// The HTTP status that the client gets.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NoneAccepts { last, .. } => last.status(),
            Self::FaultInjected { status, .. } => *status,
            Self::ExternallyDenied { reply, .. } => reply.status,
            Self::TooLargeToMatch(RequestPart::Target) => StatusCode::URI_TOO_LONG,
            failure => {
                let status = failure.code().statuses().first();
                let status = status.and_then(|status| StatusCode::from_u16(*status).ok());
                status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
            }
        }
    }

    /// The gRPC status code that a gRPC client gets.
    pub fn grpc_status(&self) -> u8 {
        if let Self::UpstreamTooLarge { .. } = self {
            return Grpc::ResourceExhausted as u8;
        }
        let own = self.code().grpc().map(|grpc| grpc as u8);
        own.unwrap_or_else(|| grpc_status(self.status()))
    }

    /// The text for the client. Only callers of the pod's namespace are told its policies.
    pub fn client_message(&self) -> String {
        match self {
            Self::Denied { id: Some(id), .. } => {
                format!("denied; the log of the callee's proxy has the reason under {id:08x}")
            }
            Self::InvalidToken { refusal, .. } => {
                format!("the token is not valid: {}", refusal.told)
            }
            Self::AuthorizerFailed { .. } => {
                "the authorization server of the callee did not answer".to_owned()
            }
            failure => failure.to_string(),
        }
    }

    /// The value of the WWW-Authenticate field that goes with the status (RFC 6750, section 3).
    pub fn challenge(&self) -> Option<&'static str> {
        matches!(self, Self::InvalidToken { .. }).then_some("Bearer error=\"invalid_token\"")
    }

    /// The value of the Allow field that goes with the status (RFC 9110, section 15.5.6).
    pub fn allow(&self) -> Option<&'static str> {
        matches!(self, Self::ConnectNotAllowed)
            .then_some("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE")
    }

    /// The time until the request may be sent again, if the proxy knows it.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::RateLimited(exceeded) => Some(exceeded.retry_after),
            _ => None,
        }
    }

    /// The client's connection ends with the answer: what follows on it would be of a tunnel, or
    /// from an untrusted peer.
    pub fn closes_connection(&self) -> bool {
        matches!(self, Self::ConnectNotAllowed | Self::MtlsRequired)
    }

    /// Whether authentication failed: no certificate, no valid handshake, or no mutual TLS.
    pub fn is_identity_failure(&self) -> bool {
        matches!(
            self,
            Self::NoCertificate(_)
                | Self::Handshake { .. }
                | Self::PlaintextAnswer(_)
                | Self::MtlsRequired
        )
    }

    /// Whether the policies of the pod deny the request or the connection.
    pub fn is_denial(&self) -> bool {
        matches!(
            self,
            Self::MtlsRequired
                | Self::Denied { .. }
                | Self::EgressDenied { .. }
                | Self::InvalidToken { .. }
                | Self::ExternallyDenied { .. }
                | Self::AuthorizerFailed { .. }
        )
    }

    /// Whether the endpoint, or the network path to it, caused the failure. The balancer then
    /// prefers other endpoints.
    pub fn is_upstream_failure(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. }
                | Self::ConnectTimeout(_)
                | Self::NoSettings(_)
                | Self::UpstreamClosed { .. }
                | Self::UpstreamMalformed { .. }
                | Self::UpstreamTooLarge { .. }
                | Self::Handshake { .. }
                | Self::PlaintextAnswer(_)
                | Self::Timeout(Limit::Attempt)
        )
    }

    /// The code, whose row says what clients get.
    pub fn code(&self) -> Code {
        match self {
            Self::NoneAccepts { last, .. } => last.code(),
            Self::NoEndpoint(_) | Self::EndpointRemoved { .. } => Code::NoEndpoint,
            Self::NoRoute(_) => Code::NoRoute,
            Self::InvalidBackend(_) => Code::InvalidBackend,
            Self::InvalidRoutes { .. } => Code::InvalidRoutes,
            Self::FaultInjected { .. } => Code::FaultInjected,
            Self::UnknownPort { .. } => Code::UnknownPort,
            Self::Withheld(_) => Code::Withheld,
            Self::Connect { .. } => Code::ConnectFailed,
            Self::ConnectTimeout(_) | Self::NoSettings(_) => Code::ConnectTimeout,
            Self::UpstreamClosed { .. } => Code::UpstreamClosed,
            Self::UpstreamMalformed { .. } | Self::UpstreamTooLarge { .. } => {
                Code::UpstreamMalformed
            }
            Self::RateLimited(_) => Code::RateLimited,
            Self::BadRequest(_) => Code::BadRequest,
            Self::HeadersTooLarge(_) => Code::HeadersTooLarge,
            Self::TooLargeToMatch(_) => Code::TooLargeToMatch,
            Self::RequestTimeout => Code::RequestTimeout,
            Self::Overloaded(_) => Code::Overloaded,
            Self::MemoryExhausted => Code::MemoryExhausted,
            Self::UpstreamOverloaded(_) | Self::EndpointLimit { .. } => Code::UpstreamOverloaded,
            Self::CircuitOpen { .. } => Code::CircuitOpen,
            Self::RetriedStatus { .. } => Code::RetriedStatus,
            Self::NoCertificate(_) => Code::NoCertificate,
            Self::Handshake { .. } | Self::PlaintextAnswer(_) => Code::HandshakeFailed,
            Self::MtlsRequired => Code::MtlsRequired,
            Self::NotReady => Code::NotReady,
            Self::Denied { .. } => Code::Denied,
            Self::EgressDenied { .. } => Code::EgressDenied,
            Self::Unresolved { .. } => Code::Unresolved,
            Self::InvalidToken { .. } => Code::InvalidToken,
            Self::ExternallyDenied { .. } => Code::ExternallyDenied,
            Self::AuthorizerFailed { .. } => Code::AuthorizerFailed,
            Self::ConnectNotAllowed => Code::ConnectNotAllowed,
            Self::Timeout(_) => Code::Timeout,
        }
    }
}

impl TokenRefusal {
    /// A reason that depends on the token only.
    pub fn of_token(reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self {
            told: reason.clone(),
            reason,
        }
    }

    /// A reason that depends on what policies accept.
    pub fn of_policies(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            told: "it is not accepted".to_owned(),
        }
    }
}

/// A part of a request, in a message.
fn part_name(part: RequestPart) -> &'static str {
    match part {
        RequestPart::Target => "the path or the query",
        RequestPart::Fields => "the header section",
    }
}

/// The policy that sets a limit, in a message.
pub fn policy_or_defaults(policy: &str) -> &str {
    match policy {
        "" => "the proxy's defaults",
        policy => policy,
    }
}

fn denied_message(denial: &Denial, id: Option<u32>) -> String {
    match id {
        Some(id) => format!("denied by {denial} ({id:08x})"),
        None => format!("denied by {denial}"),
    }
}

/// The status of a gRPC call whose response has this HTTP status (`http-grpc-status-mapping.md` in
/// the gRPC documentation).
fn grpc_status(status: StatusCode) -> u8 {
    match status.as_u16() {
        400 => 13,                   // INTERNAL
        401 => 16,                   // UNAUTHENTICATED
        403 => 7,                    // PERMISSION_DENIED
        404 => 12,                   // UNIMPLEMENTED
        429 | 502 | 503 | 504 => 14, // UNAVAILABLE
        _ => 2,                      // UNKNOWN
    }
}

fn timeout_message(limit: Limit) -> &'static str {
    match limit {
        Limit::Exchange => "the response did not end within the request timeout of the route",
        Limit::Caller => "the deadline of the caller (grpc-timeout) has passed",
        Limit::Attempt => {
            "the endpoint did not respond within the backendRequest timeout of the route"
        }
    }
}

fn unknown_port(service: &str, port: u16, ports: &[u16], max_ports: u32) -> String {
    match max_ports {
        0 => format!(
            "service {service} has no port {port}; it has {}",
            list(ports)
        ),
        _ => format!(
            "the mesh does not support port {port} of service {service}, only its first \
             {max_ports} TCP ports; split the service"
        ),
    }
}

/// The ports in a message, at most eight of them.
fn list(ports: &[u16]) -> String {
    let (shown, rest) = ports.split_at(ports.len().min(8));
    let shown: Vec<String> = shown.iter().map(u16::to_string).collect();
    match (shown.is_empty(), rest.len()) {
        (true, _) => "no TCP port".to_owned(),
        (false, 0) => shown.join(", "),
        (false, more) => format!("{} and {more} more", shown.join(", ")),
    }
}

/// The operation that a deadline limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The exchange: from the head of the request to the end of the response, retries included.
    Exchange,
    /// One attempt.
    Attempt,
    /// The exchange: the caller of a gRPC call does not wait longer.
    Caller,
}

/// The response of an authorization server for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalReply {
    /// The HTTP status.
    pub status: StatusCode,
    /// The fields.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// The body.
    pub body: Bytes,
}

impl From<Limit> for Failure {
    fn from(limit: Limit) -> Self {
        Self::Timeout(limit)
    }
}

/// The requests that share a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The requests of all callers.
    Service,
    /// The requests of one identity, or of all clients without an identity.
    Caller,
}

impl Scope {
    /// The value of the label `per`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Service => "service",
            Self::Caller => "caller",
        }
    }
}

/// A request exceeds a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exceeded {
    /// The limit.
    pub name: Arc<str>,
    /// The requests that it counts together.
    pub scope: Scope,
    /// The time until the next token.
    pub retry_after: Duration,
}

/// A part of a request's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestPart {
    /// The path and the query.
    Target,
    /// The header fields.
    Fields,
}

/// The maximum number of bytes that expressions judge of one request. A byte counts for each
/// expression that judges it.
pub const MAX_JUDGED: usize = 1024 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_port_names_the_ports_of_the_service() {
        let unknown = |ports: &[u16]| Failure::UnknownPort {
            service: "shop/web".to_owned(),
            port: 99,
            ports: ports.into(),
            max_ports: 0,
        };
        for (ports, message) in [
            (&[80][..], "service shop/web has no port 99; it has 80"),
            (
                &[80, 443],
                "service shop/web has no port 99; it has 80, 443",
            ),
            (&[], "service shop/web has no port 99; it has no TCP port"),
            (
                &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
                "service shop/web has no port 99; it has 1, 2, 3, 4, 5, 6, 7, 8 and 2 more",
            ),
        ] {
            let failure = unknown(ports);
            assert_eq!(failure.to_string(), message);
            assert_eq!(failure.status().as_u16(), 503);
            assert_eq!(
                (failure.code().label(), failure.grpc_status()),
                ("unknown-port", 14)
            );
        }
    }

    fn address(host: u8, port: u16) -> SocketAddr {
        ([10, 0, 0, host], port).into()
    }

    fn refused(host: u8, port: u16) -> Failure {
        Failure::Connect {
            address: address(host, port),
            source: Arc::new(io::ErrorKind::ConnectionRefused.into()),
        }
    }

    #[test]
    fn failure_of_endpoints_names_the_service_and_what_they_have_in_common() {
        let timeout = |host| Failure::ConnectTimeout(address(host, 8089));
        let handshake = Failure::Handshake {
            address: address(3, 8089),
            reason: "no".to_owned(),
        };
        let both = || vec![refused(1, 8089), refused(2, 8089)];
        let cases = [
            (
                both(),
                2,
                "both ready endpoints of shop/cart refuse connections on port 8089",
                502,
            ),
            (
                [both(), vec![refused(3, 8089)]].concat(),
                3,
                "all 3 ready endpoints of shop/cart refuse connections on port 8089",
                502,
            ),
            (
                [both(), vec![refused(3, 8090)]].concat(),
                9,
                "3 of 9 ready endpoints of shop/cart refuse connections",
                502,
            ),
            (
                vec![refused(1, 8089), timeout(2)],
                2,
                "both ready endpoints of shop/cart accept no connection; \
                 the last error is: connection to 10.0.0.2:8089 timed out",
                504,
            ),
            (
                [both(), vec![handshake]].concat(),
                3,
                "mutual TLS handshake with 10.0.0.3:8089 failed: no",
                502,
            ),
            (
                vec![timeout(1)],
                1,
                "shop/cart: connection to 10.0.0.1:8089 timed out",
                504,
            ),
        ];
        for (failures, ready, message, status) in cases {
            let last = failures.last().expect("one").clone();
            let failure = Failure::of_attempts(failures, "shop/cart", ready).expect("one");
            assert_eq!(failure.to_string(), message);
            assert_eq!(failure.status().as_u16(), status);
            assert_eq!(
                (failure.code().label(), failure.grpc_status()),
                (last.code().label(), last.grpc_status())
            );
        }
        let unnamed = Failure::of_attempts(vec![timeout(1)], "10.0.0.1:8089", 1).expect("one");
        let message = "connection to 10.0.0.1:8089 timed out";
        assert_eq!(unnamed.to_string(), message);
        assert!(Failure::of_attempts(Vec::new(), "shop/cart", 0).is_none());
    }
}
