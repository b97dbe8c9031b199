//! Header compression for HTTP/2: HPACK (RFC 7541). The [`Decoder`] reads the field blocks of one
//! direction of a connection, the [`Encoder`] writes the blocks of the other direction. The decoder
//! checks each field alone: the rules for a whole field section are up to its caller.

mod decoder;
mod encoder;
mod huffman;
mod table;

pub use decoder::{DecodeError, Decoder};
pub use encoder::Encoder;

use http::uri::{Authority, Scheme};
use http::{Method, StatusCode};

/// The size of a dynamic table at the beginning of a connection (RFC 9113, section 6.5.2).
const DEFAULT_TABLE_SIZE: usize = 4096;
/// The size of a field beyond its name and its value (RFC 7541, section 4.1).
pub(crate) const FIELD_OVERHEAD: usize = 32;
/// The maximum length of a name, as in the crate `http`.
const MAX_NAME: usize = u16::MAX as usize;

/// One field of a field section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field<'a> {
    /// The name, in lower case unless it is malformed.
    pub name: &'a [u8],
    /// The value.
    pub value: &'a [u8],
    /// The meaning of the name. [`Kind::Malformed`] if the value is not valid for it.
    pub kind: Kind,
    /// No table may contain the value (RFC 7541, section 7.1.3).
    pub is_sensitive: bool,
}

/// The meaning of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The pseudo-field `:method`.
    Method,
    /// The pseudo-field `:scheme`.
    Scheme,
    /// The pseudo-field `:authority`.
    Authority,
    /// The pseudo-field `:path`: begins with a slash, or is `*`.
    Path,
    /// The pseudo-field `:protocol` (RFC 8441): visible ASCII, not empty.
    Protocol,
    /// The pseudo-field `:status`.
    Status,
    /// The field `te`.
    Te,
    /// Another header or trailer field.
    Header,
    /// The field makes its message malformed (RFC 9113, section 8.1.1), for this reason.
    Malformed(&'static str),
}

impl Field<'_> {
    /// The size of the field (RFC 9113, section 6.5.2).
    pub fn size(&self) -> usize {
        self.name.len() + self.value.len() + FIELD_OVERHEAD
    }
}

impl Kind {
    /// The meaning of a name, whatever its value is.
    fn of(name: &[u8]) -> Self {
        match name {
            b":method" => Self::Method,
            b":scheme" => Self::Scheme,
            b":authority" => Self::Authority,
            b":path" => Self::Path,
            b":protocol" => Self::Protocol,
            b":status" => Self::Status,
            b"te" => Self::Te,
            // RFC 9113, section 8.2.2.
            b"connection" | b"transfer-encoding" | b"upgrade" | b"keep-alive"
            | b"proxy-connection" => {
                Self::Malformed("a field of the connection, which HTTP/2 does not have")
            }
            [b':', ..] => Self::Malformed("unknown pseudo-field"),
            _ if name.contains(&b'"') => Self::Malformed("quote in a field name"),
            _ if is_name(name) => Self::Header,
            _ => Self::Malformed("invalid field name"),
        }
    }

    /// The kind of a field with this name and a value.
    fn with(self, value: &[u8]) -> Self {
        let reason = match self {
            Self::Method if Method::from_bytes(value).is_err() => "invalid :method",
            // `Scheme` accepts the empty text.
            Self::Scheme if value.is_empty() || Scheme::try_from(value).is_err() => {
                "invalid :scheme"
            }
            Self::Authority if Authority::try_from(value).is_err() => "invalid :authority",
            Self::Path if !is_path(value) => "invalid :path",
            Self::Protocol if value.is_empty() || !value.iter().all(u8::is_ascii_graphic) => {
                "invalid :protocol"
            }
            Self::Status if StatusCode::from_bytes(value).is_err() => "invalid :status",
            Self::Te if !value.eq_ignore_ascii_case(b"trailers") => {
                "a field of the connection, which HTTP/2 does not have"
            }
            // RFC 9113, section 8.2.1.
            Self::Header if matches!(value, [b' ' | b'\t', ..] | [.., b' ' | b'\t']) => {
                "space around a field value"
            }
            Self::Header if !value.iter().all(|byte| is_of_value(*byte)) => {
                "invalid byte in a field value"
            }
            valid => return valid,
        };
        Self::Malformed(reason)
    }
}

/// Whether this is a token in lower case (RFC 9110, section 5.6.2).
fn is_name(name: &[u8]) -> bool {
    let is_of_name =
        |byte: &u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9') || b"!#$%&'*+-.^_`|~".contains(byte);
    !name.is_empty() && name.len() <= MAX_NAME && name.iter().all(is_of_name)
}

fn is_of_value(byte: u8) -> bool {
    byte == b'\t' || (byte >= b' ' && byte != 0x7f)
}

/// Whether this is a `:path`: begins with a slash, or is `*`, and has no byte that the crate `http`
/// refuses in paths and queries. Many clients send quotes and braces without percent-encoding.
pub(crate) fn is_path(path: &[u8]) -> bool {
    let is_of_path = |byte: &u8| matches!(byte, b'!' | b'"' | b'$'..=b';' | b'=' | b'?'..=b'_' | b'a'..=b'~' | 0x80..);
    let is_of_query = |byte: &u8| matches!(byte, b'!' | b'$'..=b';' | b'=' | b'?'..=b'~' | 0x80..);
    let end = path.iter().position(|byte| *byte == b'?');
    let end = end.unwrap_or(path.len());
    let (before, query) = path.split_at(end);
    matches!(path, [b'/', ..] | b"*")
        && before.iter().all(is_of_path)
        && query.iter().all(is_of_query)
        && (path.is_ascii() || str::from_utf8(path).is_ok())
}

#[cfg(test)]
mod tests;
