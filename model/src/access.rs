//! A line of an access log: an exchange, or an opaque connection, as JSON or in a format of one's own.
//! No value of a peer adds a line. Pure.

use std::borrow::Cow;
use std::net::SocketAddr;

use serde::Serialize;
use serde_json::Value;
use thiserror::Error;

use crate::escape;
use crate::exchange::{Direction, ExchangeId, Protocol};

/// The length of a format.
pub const MAX_FORMAT_BYTES: usize = 2048;
/// The length of a method or path in a line. The rest is left out.
const MAX_TEXT_BYTES: usize = 1024;
/// The text of a field without a value.
const ABSENT: &str = "-";

/// The names of the fields of an [`Entry`], in the order of JSON.
pub const FIELDS: [&str; 23] = [
    "time",
    "duration_ms",
    "direction",
    "protocol",
    "method",
    "path",
    "status",
    "grpc_status",
    "failure",
    "bytes_sent",
    "bytes_received",
    "peer",
    "identity",
    "destination",
    "route",
    "backend",
    "endpoint",
    "attempts",
    "tls",
    "fault",
    "trace_id",
    "id",
    "incomplete",
];

/// An exchange, or an opaque connection. The text of peers is escaped.
#[derive(Clone, Debug, Serialize)]
pub struct Entry<'a> {
    /// The start, in RFC 3339.
    pub time: String,
    /// With microsecond resolution.
    pub duration_ms: f64,
    /// As seen from the application.
    pub direction: Direction,
    /// What the proxy forwarded.
    pub protocol: Protocol,
    /// The method of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub method: Option<Cow<'a, str>>,
    /// The target of the request, with a masked query.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<Cow<'a, str>>,
    /// The status of the response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The name of the status of the gRPC call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grpc_status: Option<&'static str>,
    /// The code of the failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<&'static str>,
    /// Bytes that the client sent, without heads.
    pub bytes_sent: u64,
    /// Bytes that the client received, without heads.
    pub bytes_received: u64,
    /// The client.
    pub peer: SocketAddr,
    /// The caller or the endpoint, if mutual TLS has verified it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<&'a str>,
    /// The original destination.
    pub destination: SocketAddr,
    /// The route of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<&'a str>,
    /// The backend that the route selected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<&'a str>,
    /// The latest endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<SocketAddr>,
    /// The number of endpoints that it was sent to.
    pub attempts: u32,
    /// `mtls`, `tls` or `none`.
    pub tls: &'static str,
    /// The policy of the injected fault.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<&'a str>,
    /// The trace of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<&'a str>,
    /// The same at both proxies of an exchange.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<ExchangeId>,
    /// There was no complete response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub incomplete: Option<bool>,
}

/// The form of lines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// One JSON object.
    #[default]
    Json,
    /// Text with the values of fields.
    Text(Vec<Piece>),
}

/// A part of a format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// As it is written.
    Literal(String),
    /// The value of a field.
    Field(&'static str),
}

/// Why a format is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FormatError {
    /// Its length.
    #[error("it is longer than {MAX_FORMAT_BYTES} bytes")]
    TooLong,
    /// It would add lines.
    #[error("it contains a control character")]
    Control,
    /// A field that no entry has.
    #[error("{{{0}}} is not a field; the fields are {fields}, and {{{{ is a brace", fields = FIELDS.join(", "))]
    UnknownField(String),
}

impl Format {
    /// Parses `JSON`, or a text with fields in braces.
    pub fn parse(text: &str) -> Result<Self, FormatError> {
        if matches!(text, "" | "JSON") {
            return Ok(Self::Json);
        }
        if text.len() > MAX_FORMAT_BYTES {
            return Err(FormatError::TooLong);
        }
        if text.chars().any(char::is_control) {
            return Err(FormatError::Control);
        }
        let (mut pieces, mut rest) = (Vec::new(), text);
        while let Some((literal, after)) = rest.split_once('{') {
            if let Some(after) = after.strip_prefix('{') {
                pieces.push(Piece::Literal(format!("{literal}{{")));
                rest = after;
                continue;
            }
            let (name, after) = after.split_once('}').unwrap_or(("", after));
            let field = FIELDS.into_iter().find(|field| *field == name);
            let field = field.ok_or_else(|| FormatError::UnknownField(name.to_owned()))?;
            pieces.extend([Piece::Literal(literal.to_owned()), Piece::Field(field)]);
            rest = after;
        }
        pieces.push(Piece::Literal(rest.to_owned()));
        Ok(Self::Text(pieces))
    }
}

impl Entry<'_> {
    /// Adds the line, with its end.
    pub fn write(&self, format: &Format, out: &mut Vec<u8>) {
        match format {
            Format::Json => serde_json::to_writer(&mut *out, self).expect("all keys are strings"),
            Format::Text(pieces) => self.write_text(pieces, out),
        }
        out.push(b'\n');
    }

    fn write_text(&self, pieces: &[Piece], out: &mut Vec<u8>) {
        let fields = serde_json::to_value(self).expect("all keys are strings");
        for piece in pieces {
            match piece {
                Piece::Literal(text) => out.extend(text.bytes()),
                Piece::Field(name) => match &fields[*name] {
                    Value::Null => out.extend(ABSENT.bytes()),
                    Value::String(text) => out.extend(text.bytes()),
                    value => out.extend(value.to_string().bytes()),
                },
            }
        }
    }
}

/// The method or the path of a request as an entry has it: without control characters and quotes, and
/// not too long.
pub fn shown(bytes: &[u8]) -> Cow<'_, str> {
    let bytes = &bytes[..bytes.len().min(MAX_TEXT_BYTES)];
    let is_plain = |byte: &u8| matches!(byte, b' '..=b'~') && *byte != b'"';
    if let (true, Ok(text)) = (bytes.iter().all(is_plain), std::str::from_utf8(bytes)) {
        return Cow::Borrowed(text);
    }
    let mut out = String::new();
    escape::line(bytes, &mut out);
    Cow::Owned(out.replace('"', "\\x22"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(entry: &Entry<'_>, format: &Format) -> String {
        let mut out = Vec::new();
        entry.write(format, &mut out);
        String::from_utf8(out).unwrap()
    }

    fn entry() -> Entry<'static> {
        Entry {
            time: "2026-11-27T10:00:00.000Z".into(),
            duration_ms: 1.5,
            direction: Direction::Inbound,
            protocol: Protocol::Http2,
            method: Some("POST".into()),
            path: Some("/a".into()),
            status: Some(200),
            grpc_status: Some("UNAVAILABLE"),
            failure: Some("connect"),
            bytes_sent: 1,
            bytes_received: 2,
            peer: "10.0.0.7:41234".parse().unwrap(),
            identity: Some("spiffe://cluster.local/ns/shop/sa/web"),
            destination: "10.0.0.9:8080".parse().unwrap(),
            route: Some("HTTPRoute shop/web"),
            backend: Some("shop/web:80"),
            endpoint: Some("10.0.0.9:8080".parse().unwrap()),
            attempts: 1,
            tls: "mtls",
            fault: Some("TrafficPolicy shop/web"),
            trace_id: Some("0af7651916cd43dd8448eb211c80319c"),
            id: "10.0.0.7-00000000002a".parse().ok(),
            incomplete: Some(true),
        }
    }

    #[test]
    fn every_field_has_a_name() {
        let line = line(&entry(), &Format::Json);
        let mut at = 0;
        for name in FIELDS {
            at = line
                .find(&format!("\"{name}\":"))
                .filter(|found| *found > at)
                .unwrap_or_else(|| panic!("{name} after byte {at} of {line}"));
        }
        let fields: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(fields.as_object().unwrap().len(), FIELDS.len());
    }

    #[test]
    fn formats_have_values_of_fields_and_nothing_where_there_is_none() {
        let format = Format::parse("{{{method} {path} {status}} {route}|{tls}").unwrap();
        assert_eq!(
            line(&entry(), &format),
            "{POST /a 200} HTTPRoute shop/web|mtls\n"
        );
        let silent = Entry {
            method: None,
            path: None,
            status: None,
            ..entry()
        };
        let format = Format::parse("{method} {path} {status}").unwrap();
        assert_eq!(line(&silent, &format), "- - -\n");
        assert_eq!(Format::parse("JSON"), Ok(Format::Json));
    }

    #[test]
    fn rejects_formats_with_other_fields_and_lines() {
        let error = |text: &str| Format::parse(text).unwrap_err().to_string();
        let unknown = error("{method} {user}");
        assert!(unknown.starts_with("{user} is not a field; the fields are time, duration_ms,"));
        assert!(unknown.ends_with("and {{ is a brace"), "{unknown}");
        assert!(error("{method").starts_with("{} is not a field"));
        assert_eq!(error("a\nb"), "it contains a control character");
        assert_eq!(error(&"a".repeat(2049)), "it is longer than 2048 bytes");
    }

    #[test]
    fn no_value_of_a_peer_adds_a_line_or_ends_a_quoted_one() {
        let hostile = "/a\r\n{\"status\":200}\u{2028}\u{85}\x1b[2J";
        let entry = Entry {
            path: Some(shown(hostile.as_bytes())),
            ..entry()
        };
        for format in ["JSON", "\"{path}\""] {
            let line = line(&entry, &Format::parse(format).unwrap());
            assert_eq!(line.matches('\n').count(), 1, "{line}");
            assert!(!line.trim_end().contains(char::is_control), "{line}");
        }
        let format = Format::parse("\"{path}\"").unwrap();
        assert_eq!(line(&entry, &format).matches('"').count(), 2);
        assert_eq!(shown(&[b'a'; 5000]).len(), 1024);
    }
}
