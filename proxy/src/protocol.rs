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

/// The maximum size of a section. HTTP/1 counts the bytes of a head with its start line, HTTP/2 as in
/// RFC 9113, section 6.5.2.
pub const MAX_SECTION: usize = 64 * 1024;
/// The maximum number of fields of a request, and of an HTTP/1 response.
pub const MAX_FIELDS: usize = 128;

/// The limit that a section exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TooLarge {
    /// [`MAX_SECTION`], by a head.
    Header,
    /// [`MAX_FIELDS`].
    Fields,
    /// [`MAX_SECTION`], by trailers.
    Trailers,
}

impl TooLarge {
    /// The limit in a message.
    pub const fn message(self) -> &'static str {
        match self {
            Self::Header => "the header section is over 65536 bytes",
            Self::Fields => "the header section has over 128 fields",
            Self::Trailers => "the trailer section is over 65536 bytes",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_limits() {
        let names = |limit: TooLarge, number: usize| limit.message().contains(&number.to_string());
        assert!(names(TooLarge::Header, MAX_SECTION) && names(TooLarge::Trailers, MAX_SECTION));
        assert!(names(TooLarge::Fields, MAX_FIELDS));
    }
}
