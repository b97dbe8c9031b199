//! Names of header fields that only a proxy sets, and that routes do not change. The controller does
//! not accept a route that changes them, and a proxy rejects all routes of its destination.

/// The field that tells an application its caller.
pub const CALLED_BY: &str = "x-called-by";
/// The field in which a proxy tells the next one how often the request was sent before.
pub const PREVIOUS_ATTEMPTS: &str = "x-mesh-previous-attempts";
/// The field that tells a caller that a proxy replied, and why.
pub const MESH_ERROR: &str = "x-mesh-error";

/// The field of a question to an authorization server that counts the questions before it, whose answer
/// it is for. Clients can only refuse themselves with it.
pub const QUESTIONS: &str = "x-mesh-questions";

/// The field of a question in HTTP with the identity of the client that it is about.
pub const CALLER: &str = "x-mesh-caller";

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
    let is_same = |other: &&str| is_same_name(name.as_bytes(), other.as_bytes());
    OF_CONNECTIONS
        .iter()
        .any(|one| name.eq_ignore_ascii_case(one))
        || [CALLED_BY, PREVIOUS_ATTEMPTS, MESH_ERROR]
            .iter()
            .any(is_same)
}

/// Compares names as CGI does (RFC 3875, section 4.1.18), and servers that follow it: without case,
/// and every byte that is neither a letter nor a digit counts as an underscore.
#[inline]
pub fn is_same_name(one: &[u8], other: &[u8]) -> bool {
    let fold = |byte: &u8| match byte {
        byte if byte.is_ascii_alphanumeric() => byte.to_ascii_lowercase(),
        _ => b'_',
    };
    one.len() == other.len()
        && one
            .iter()
            .zip(other)
            .all(|(one, other)| fold(one) == fold(other))
}
