//! The protocols of connections.

use diy_mesh_model::exchange;

/// The HTTP version of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpVersion {
    /// HTTP/1.0 or HTTP/1.1.
    Http1,
    /// HTTP/2, including gRPC.
    Http2,
}

impl From<HttpVersion> for exchange::Protocol {
    fn from(version: HttpVersion) -> Self {
        match version {
            HttpVersion::Http1 => Self::Http1,
            HttpVersion::Http2 => Self::Http2,
        }
    }
}

/// The protocol of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.0 or HTTP/1.1.
    Http1,
    /// HTTP/2 with prior knowledge, which includes gRPC.
    Http2,
    /// Any other protocol, which includes TLS of the application.
    Opaque,
    /// TLS of another proxy. Its ALPN extension names the protocol inside. Detected on inbound
    /// connections only.
    MeshTls,
}

impl Protocol {
    /// The name in the state of the proxy.
    pub fn name(self) -> &'static str {
        ["http1", "http2", "opaque", "mesh-tls"][self as usize]
    }
}
