//! Why the proxy answered instead of the app: the one map from a cause to status, `x-mesh-error` code and metric label.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use http::StatusCode;
use thiserror::Error;

/// A request that the proxy could not carry, or would not.
#[derive(Clone, Debug, Error)]
pub enum Failure {
    /// The Service exists and nothing is ready behind it.
    #[error("service {0} has no ready endpoint")]
    NoEndpoint(String),
    /// The endpoint did not accept the connection.
    #[error("can't connect to {address}: {source}")]
    Connect {
        /// Where to.
        address: SocketAddr,
        /// What the kernel said.
        source: Arc<io::Error>,
    },
    /// The endpoint did not accept the connection in time.
    #[error("no connection to {0} in time")]
    ConnectTimeout(SocketAddr),
    /// The upstream closed or broke the connection before it had answered.
    #[error("{address} closed the connection before it answered: {reason}")]
    UpstreamClosed {
        /// Who.
        address: SocketAddr,
        /// How.
        reason: String,
    },
    /// What the upstream sent is not HTTP as RFC 9112 or RFC 9113 have it.
    #[error("{address} answered with malformed HTTP: {reason}")]
    UpstreamMalformed {
        /// Who.
        address: SocketAddr,
        /// What is wrong with it.
        reason: String,
    },
    /// What the client sent is not HTTP as RFC 9112 or RFC 9113 have it.
    #[error("malformed request: {0}")]
    BadRequest(&'static str),
    /// The client's header block is over the limit.
    #[error("the header block is over {0} bytes")]
    HeadersTooLarge(usize),
    /// The client did not send its whole request head in time.
    #[error("the request's head did not arrive in time")]
    RequestTimeout,
    /// The proxy carries all that it may hold.
    #[error("the proxy carries all that it may hold: {0}")]
    Overloaded(&'static str),
    /// The endpoint is meshed, and there is no certificate to prove oneself to it by.
    #[error("{0} is reached by mutual TLS only, and this proxy has no valid certificate now")]
    NoCertificate(SocketAddr),
    /// The peer did not prove to be who it should be, or refused this side's proof.
    #[error("no mutual TLS with {address}: {reason}")]
    Handshake {
        /// Who.
        address: SocketAddr,
        /// Why.
        reason: String,
    },
    /// The workload takes mutual TLS only, and the client came without.
    #[error("this workload takes mutual TLS only: its callers have to be in the mesh")]
    MtlsRequired,
    /// A CONNECT request to an app that does not declare to take any.
    #[error(
        "CONNECT is not allowed: the pod does not have the annotation diy-service-mesh/allow-connect: \"true\""
    )]
    ConnectNotAllowed,
    /// The connection leads back to the proxy.
    #[error("{0} leads back to the proxy: forwarding would loop")]
    Loop(SocketAddr),
}

impl Failure {
    /// The HTTP status that the client gets.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NoEndpoint(_) | Self::Overloaded(_) | Self::NoCertificate(_) => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::Connect { .. }
            | Self::UpstreamClosed { .. }
            | Self::UpstreamMalformed { .. }
            | Self::Handshake { .. }
            | Self::Loop(_) => StatusCode::BAD_GATEWAY,
            Self::MtlsRequired => StatusCode::FORBIDDEN,
            Self::ConnectNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::ConnectTimeout(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::BadRequest(_) => StatusCode::BAD_REQUEST,
            Self::HeadersTooLarge(_) => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::RequestTimeout => StatusCode::REQUEST_TIMEOUT,
        }
    }

    /// The gRPC status code that a gRPC client gets (codes as in the gRPC core documentation's statuscodes.md).
    pub fn grpc_status(&self) -> u8 {
        match self {
            Self::ConnectTimeout(_) | Self::RequestTimeout => 4, // DEADLINE_EXCEEDED
            Self::MtlsRequired => 7,                             // PERMISSION_DENIED
            Self::BadRequest(_) => 13,                           // INTERNAL, as gRPC maps HTTP 400
            Self::HeadersTooLarge(_) | Self::Overloaded(_) => 8, // RESOURCE_EXHAUSTED
            Self::ConnectNotAllowed => 12,                       // UNIMPLEMENTED
            _ => 14,                                             // UNAVAILABLE
        }
    }

    /// The value of the Allow field that goes with the status (RFC 9110, section 15.5.6).
    pub fn allow(&self) -> Option<&'static str> {
        matches!(self, Self::ConnectNotAllowed)
            .then_some("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE")
    }

    /// The client's connection ends with the answer: what follows on it would be of a tunnel, or from an untrusted peer.
    pub fn closes_connection(&self) -> bool {
        matches!(self, Self::ConnectNotAllowed | Self::MtlsRequired)
    }

    /// Whether authentication failed: no certificate, no valid handshake, or no mutual TLS.
    pub fn is_identity_failure(&self) -> bool {
        matches!(
            self,
            Self::NoCertificate(_) | Self::Handshake { .. } | Self::MtlsRequired
        )
    }

    /// The endpoint caused it, or the way there: the balancer prefers others.
    pub fn is_upstreams(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. }
                | Self::ConnectTimeout(_)
                | Self::UpstreamClosed { .. }
                | Self::UpstreamMalformed { .. }
                | Self::Handshake { .. }
        )
    }

    /// The code in `x-mesh-error` and in metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoEndpoint(_) => "no-endpoint",
            Self::Connect { .. } => "connect-failed",
            Self::ConnectTimeout(_) => "connect-timeout",
            Self::UpstreamClosed { .. } => "upstream-closed",
            Self::UpstreamMalformed { .. } => "upstream-malformed",
            Self::BadRequest(_) => "bad-request",
            Self::HeadersTooLarge(_) => "headers-too-large",
            Self::RequestTimeout => "request-timeout",
            Self::Overloaded(_) => "overloaded",
            Self::NoCertificate(_) => "no-certificate",
            Self::Handshake { .. } => "handshake-failed",
            Self::MtlsRequired => "mtls-required",
            Self::ConnectNotAllowed => "connect-not-allowed",
            Self::Loop(_) => "loop",
        }
    }
}
