//! Names of header fields that only a proxy sets, and that routes do not change. The controller does
//! not accept a route that changes them, and a proxy rejects all routes of its destination.

/// The field that tells an application its caller.
pub const CALLED_BY: &str = "x-called-by";
/// The field in which a proxy tells the next one how often the request was sent before.
pub const PREVIOUS_ATTEMPTS: &str = "x-mesh-previous-attempts";
/// The field with the identifier of the exchange, from proxy to proxy, and in responses that a proxy
/// made itself.
pub const EXCHANGE: &str = "x-mesh-exchange";
/// The field that tells a caller that a proxy replied, and why.
pub use diy_mesh_model::exchange::MESH_ERROR;
/// The fields of requests that only a proxy sets.
pub const OF_REQUESTS: [&str; 3] = [CALLED_BY, PREVIOUS_ATTEMPTS, EXCHANGE];
/// The fields of responses that only a proxy sets.
pub const OF_RESPONSES: [&str; 2] = [MESH_ERROR, EXCHANGE];

/// The field of a question to an authorization server that counts the questions before it, whose answer
/// it is for. Clients can only refuse themselves with it.
pub const QUESTIONS: &str = "x-mesh-questions";

/// The field of a question in HTTP with the identity of the client that it is about.
pub const CALLER: &str = "x-mesh-caller";

/// The field of a question about a request with a body: whether the body is longer than the part
/// that the server gets. The name is from Envoy.
pub const PARTIAL_BODY: &str = "x-envoy-auth-partial-body";

/// Fields that frame a message, belong to one connection, or name the host.
pub const OF_CONNECTIONS: [&str; 13] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Whether no route changes this field: one of connections, or, in every spelling that some server
/// reads as it, one of the mesh.
pub fn is_reserved(name: &str) -> bool {
    let mut of_connections = OF_CONNECTIONS.iter();
    of_connections.any(|one| name.eq_ignore_ascii_case(one)) || is_of_mesh(name.as_bytes())
}

/// Whether only a proxy sets this field, in every spelling.
pub fn is_of_mesh(name: &[u8]) -> bool {
    let mut fields = OF_REQUESTS.iter().chain(&OF_RESPONSES);
    fields.any(|own| is_same_name(name, own.as_bytes()))
}

/// Compares names as CGI does (RFC 3875, section 4.1.18), and servers that follow it: without case,
/// and every byte that is neither a letter nor a digit counts as an underscore.
#[inline]
pub fn is_same_name(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && (one.eq_ignore_ascii_case(other) || folded(one).eq(folded(other)))
}

/// A name as CGI reads it: equal for the names that [`is_same_name`] compares as equal.
pub fn folded(name: &[u8]) -> impl Iterator<Item = u8> {
    name.iter().map(|byte| match byte {
        byte if byte.is_ascii_alphanumeric() => byte.to_ascii_lowercase(),
        _ => b'_',
    })
}
