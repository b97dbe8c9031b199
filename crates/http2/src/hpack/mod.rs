//! Header compression for HTTP/2: HPACK (RFC 7541). The [`Decoder`] reads the field blocks of one
//! direction of a connection, the [`Encoder`] writes the blocks of the other direction. The decoder
//! checks each field alone: the rules for a whole field section are up to its caller.

mod decoder;
mod encoder;
mod huffman;
mod table;

pub use decoder::{DecodeError, Decoder};
pub use encoder::Encoder;

use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderName, HeaderValue, Method, StatusCode};

/// The size of a dynamic table at the beginning of a connection (RFC 9113, section 6.5.2).
const DEFAULT_TABLE_SIZE: usize = 4096;
/// The size of a field beyond its name and its value (RFC 7541, section 4.1).
const FIELD_OVERHEAD: usize = 32;

/// One field of a field section. The value is valid for the name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Field {
    /// The pseudo-field `:method`.
    Method(Method),
    /// The pseudo-field `:scheme`.
    Scheme(Scheme),
    /// The pseudo-field `:authority`.
    Authority(Authority),
    /// The pseudo-field `:path`: begins with a slash, or is `*`.
    Path(PathAndQuery),
    /// The pseudo-field `:protocol` (RFC 8441): visible ASCII, not empty.
    Protocol(HeaderValue),
    /// The pseudo-field `:status`.
    Status(StatusCode),
    /// A header or trailer field.
    Header(HeaderName, HeaderValue),
    /// A field that makes its message malformed (RFC 9113, section 8.1.1), with the reason.
    Malformed(&'static str),
}

/// The name of a received field.
#[derive(Clone)]
struct Name {
    kind: NameKind,
    /// The length in bytes.
    length: usize,
}

/// The parsed text of a name.
#[derive(Clone)]
enum NameKind {
    Method,
    Scheme,
    Authority,
    Path,
    Protocol,
    Status,
    Header(HeaderName),
    /// No valid field has the name. All fields with the name are malformed for the same reason.
    Malformed(&'static str),
}

impl Name {
    fn parse(name: &[u8]) -> Self {
        let kind = match name {
            b":method" => NameKind::Method,
            b":scheme" => NameKind::Scheme,
            b":authority" => NameKind::Authority,
            b":path" => NameKind::Path,
            b":protocol" => NameKind::Protocol,
            b":status" => NameKind::Status,
            [b':', ..] => NameKind::Malformed("unknown pseudo-field"),
            // `HeaderName` accepts quotes, which are not allowed in a token.
            _ if name.contains(&b'"') => NameKind::Malformed("quote in a field name"),
            _ => HeaderName::from_lowercase(name)
                .map_or(NameKind::Malformed("invalid field name"), NameKind::Header),
        };
        let length = name.len();
        Self { kind, length }
    }

    /// The field with this name and a value.
    fn field(&self, value: &[u8], is_sensitive: bool) -> Field {
        match &self.kind {
            NameKind::Method => {
                Method::from_bytes(value).map_or(Field::Malformed("invalid :method"), Field::Method)
            }
            // `Scheme` accepts the empty text.
            NameKind::Scheme if value.is_empty() => Field::Malformed("invalid :scheme"),
            NameKind::Scheme => {
                Scheme::try_from(value).map_or(Field::Malformed("invalid :scheme"), Field::Scheme)
            }
            NameKind::Authority => Authority::try_from(value)
                .map_or(Field::Malformed("invalid :authority"), Field::Authority),
            NameKind::Path => path(value),
            NameKind::Protocol if value.is_empty() || !value.iter().all(u8::is_ascii_graphic) => {
                Field::Malformed("invalid :protocol")
            }
            NameKind::Protocol => {
                header_value(value, is_sensitive).map_or_else(Field::Malformed, Field::Protocol)
            }
            NameKind::Status => StatusCode::from_bytes(value)
                .map_or(Field::Malformed("invalid :status"), Field::Status),
            NameKind::Header(name) => header_value(value, is_sensitive)
                .map_or_else(Field::Malformed, |value| Field::Header(name.clone(), value)),
            NameKind::Malformed(reason) => Field::Malformed(reason),
        }
    }
}

/// A `:path`. `PathAndQuery` also accepts a query without a path, and removes a fragment.
fn path(value: &[u8]) -> Field {
    let invalid = Field::Malformed("invalid :path");
    if !matches!(value, [b'/', ..] | b"*") || value.contains(&b'#') {
        return invalid;
    }
    PathAndQuery::try_from(value).map_or(invalid, Field::Path)
}

/// A field value without spaces around it (RFC 9113, section 8.2.1), or the reason against it.
fn header_value(value: &[u8], is_sensitive: bool) -> Result<HeaderValue, &'static str> {
    if let [b' ' | b'\t', ..] | [.., b' ' | b'\t'] = value {
        return Err("space around a field value");
    }
    let mut value = HeaderValue::from_bytes(value).map_err(|_| "invalid byte in a field value")?;
    value.set_sensitive(is_sensitive);
    Ok(value)
}

#[cfg(test)]
mod tests;
