//! A line of an access log: an exchange, or an opaque connection, as JSON or in a format of one's own.
//! No value of a peer adds a line. Pure.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use thiserror::Error;

use crate::escape;
use crate::exchange::{Direction, ExchangeId, Protocol};

/// The length of a format.
pub const MAX_FORMAT_BYTES: usize = 2048;
/// The length of a method or path in a line. The rest is left out.
const MAX_TEXT_BYTES: usize = 1024;
/// The text of a field without a value.
const ABSENT: &str = "-";

/// The value of a field.
type ValueOf = for<'a> fn(&'a Entry<'_>) -> Value<'a>;

macro_rules! fields {
    ($($name:ident: $value:expr,)*) => {
        /// The names of all fields, and their values.
        const FIELDS: &[(&str, ValueOf)] = &[$((stringify!($name), $value),)*];

        impl Entry<'_> {
            /// Adds each field with a value, after a comma. Without a loop, so that the kind of each
            /// value is known when this is compiled.
            fn write_fields(&self, out: &mut Vec<u8>) {
                $(
                    let value: ValueOf = $value;
                    value(self).write_field(concat!(",\"", stringify!($name), "\":"), out);
                )*
            }
        }
    };
}

// The fields of an `Entry`, in the order of JSON. The first one always has a value.
fields! {
    time: |entry| Value::Plain(&entry.time),
    duration_ms: |entry| Value::Milliseconds(entry.duration),
    direction: |entry| Value::Plain(entry.direction.name()),
    protocol: |entry| Value::Plain(entry.protocol.name()),
    method: |entry| Value::text(entry.method.as_deref()),
    path: |entry| Value::text(entry.path.as_deref()),
    status: |entry| Value::option(entry.status, |status| Value::Number(status.into())),
    grpc_status: |entry| Value::text(entry.grpc_status),
    failure: |entry| Value::text(entry.failure),
    bytes_sent: |entry| Value::Number(entry.bytes_sent),
    bytes_received: |entry| Value::Number(entry.bytes_received),
    peer: |entry| Value::Address(entry.peer),
    identity: |entry| Value::text(entry.identity),
    destination: |entry| Value::Address(entry.destination),
    route: |entry| Value::text(entry.route),
    backend: |entry| Value::text(entry.backend),
    endpoint: |entry| Value::option(entry.endpoint, Value::Address),
    attempts: |entry| Value::Number(entry.attempts.into()),
    tls: |entry| Value::Plain(entry.tls),
    fault: |entry| Value::text(entry.fault),
    trace_id: |entry| Value::text(entry.trace_id),
    id: |entry| Value::option(entry.id, Value::Id),
    incomplete: |entry| Value::option(entry.incomplete.then_some(()), |()| Value::True),
}

/// An exchange, or an opaque connection. The text of peers is escaped.
#[derive(Clone, Debug)]
pub struct Entry<'a> {
    /// The start, in RFC 3339.
    pub time: String,
    /// Its duration, of which lines have milliseconds with microsecond resolution.
    pub duration: Duration,
    /// As seen from the application.
    pub direction: Direction,
    /// The protocol that the proxy forwarded.
    pub protocol: Protocol,
    /// The method of the request.
    pub method: Option<Cow<'a, str>>,
    /// The target of the request, with a masked query.
    pub path: Option<Cow<'a, str>>,
    /// The status of the response.
    pub status: Option<u16>,
    /// The name of the status of the gRPC call.
    pub grpc_status: Option<&'static str>,
    /// The code of the failure.
    pub failure: Option<&'static str>,
    /// Bytes that the client sent, without heads.
    pub bytes_sent: u64,
    /// Bytes that the client received, without heads.
    pub bytes_received: u64,
    /// The client.
    pub peer: SocketAddr,
    /// The caller or the endpoint, if mutual TLS has verified it.
    pub identity: Option<&'a str>,
    /// The original destination.
    pub destination: SocketAddr,
    /// The route of the request.
    pub route: Option<&'a str>,
    /// The backend that the route selected.
    pub backend: Option<&'a str>,
    /// The latest endpoint.
    pub endpoint: Option<SocketAddr>,
    /// The number of endpoints that it was sent to.
    pub attempts: u32,
    /// `mtls`, `tls` or `none`.
    pub tls: &'static str,
    /// The policy of the injected fault.
    pub fault: Option<&'a str>,
    /// The trace of the request.
    pub trace_id: Option<&'a str>,
    /// The same at both proxies of an exchange.
    pub id: Option<ExchangeId>,
    /// There was no complete response.
    pub incomplete: bool,
}

/// The value of a field.
enum Value<'a> {
    Absent,
    /// Without quotes, backslashes and control characters.
    Plain(&'a str),
    Text(&'a str),
    Number(u64),
    Milliseconds(Duration),
    Address(SocketAddr),
    Id(ExchangeId),
    True,
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
    /// The value of a field, by its position.
    Field(usize),
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
    #[error("{{{0}}} is not a field; the fields are {fields}, and {{{{ is a brace", fields = names())]
    UnknownField(String),
}

/// The names of all fields.
fn names() -> String {
    let names: Vec<&str> = FIELDS.iter().map(|(name, _)| *name).collect();
    names.join(", ")
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
            let field = FIELDS.iter().position(|(field, _)| *field == name);
            let field = field.ok_or_else(|| FormatError::UnknownField(name.to_owned()))?;
            pieces.extend([Piece::Literal(literal.to_owned()), Piece::Field(field)]);
            rest = after;
        }
        pieces.push(Piece::Literal(rest.to_owned()));
        Ok(Self::Text(pieces))
    }
}

impl Entry<'_> {
    /// Adds the line, with its end. Each request may add one, so this allocates nothing.
    pub fn write(&self, format: &Format, out: &mut Vec<u8>) {
        match format {
            Format::Json => self.write_json(out),
            Format::Text(pieces) => self.write_text(pieces, out),
        }
        out.push(b'\n');
    }

    fn write_json(&self, out: &mut Vec<u8>) {
        let start = out.len();
        self.write_fields(out);
        out[start] = b'{';
        out.push(b'}');
    }

    fn write_text(&self, pieces: &[Piece], out: &mut Vec<u8>) {
        for piece in pieces {
            match piece {
                Piece::Literal(text) => out.extend_from_slice(text.as_bytes()),
                Piece::Field(position) => FIELDS[*position].1(self).write(out),
            }
        }
    }
}

impl<'a> Value<'a> {
    fn text(text: Option<&'a str>) -> Self {
        Self::option(text, Self::Text)
    }

    fn option<T>(value: Option<T>, of: impl FnOnce(T) -> Self) -> Self {
        value.map_or(Self::Absent, of)
    }

    /// Inlined, so that the compiler keeps only the branch of the field's kind.
    #[inline(always)]
    fn write_field(&self, key: &str, out: &mut Vec<u8>) {
        if matches!(self, Self::Absent) {
            return;
        }
        out.extend_from_slice(key.as_bytes());
        match self {
            Self::Text(text) if !is_plain(text) => {
                serde_json::to_writer(out, text).expect("a text can be written");
            }
            Self::Plain(_) | Self::Text(_) | Self::Address(_) | Self::Id(_) => {
                out.push(b'"');
                self.write(out);
                out.push(b'"');
            }
            _ => self.write(out),
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Absent => out.extend(ABSENT.bytes()),
            Self::Plain(text) | Self::Text(text) => out.extend_from_slice(text.as_bytes()),
            Self::Number(number) => write_number(*number, out),
            Self::Milliseconds(duration) => {
                write_number(
                    duration.as_secs() * 1000 + u64::from(duration.subsec_millis()),
                    out,
                );
                let rest = duration.subsec_micros() % 1000;
                out.extend([b'.', digit(rest / 100), digit(rest / 10), digit(rest)]);
            }
            Self::Address(SocketAddr::V4(address)) => {
                write_ipv4(*address.ip(), out);
                out.push(b':');
                write_number(address.port().into(), out);
            }
            Self::Address(SocketAddr::V6(address)) => write_display(address, out),
            Self::Id(id) => {
                match id.pod {
                    IpAddr::V4(pod) => write_ipv4(pod, out),
                    IpAddr::V6(pod) => write_display(pod, out),
                }
                out.push(b'-');
                out.extend(id.digits());
            }
            Self::True => out.extend(b"true"),
        }
    }
}

/// Whether JSON has the text as it is. Without a branch for each byte.
fn is_plain(text: &str) -> bool {
    let needs_escape = |byte| byte < b' ' || byte == b'"' || byte == b'\\';
    !text
        .bytes()
        .fold(false, |found, byte| found | needs_escape(byte))
}

fn write_number(number: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

/// As its `Display` does, which takes several times as long.
fn write_ipv4(address: Ipv4Addr, out: &mut Vec<u8>) {
    let (mut text, mut length) = ([b'.'; 16], 0);
    for octet in address.octets() {
        for (least, unit) in [(100, 100), (10, 10), (0, 1)] {
            if octet >= least {
                text[length] = digit((octet / unit).into());
                length += 1;
            }
        }
        length += 1;
    }
    out.extend_from_slice(&text[..length - 1]);
}

fn write_display(value: impl Display, out: &mut Vec<u8>) {
    write!(out, "{value}").expect("memory can be written");
}

fn digit(number: u32) -> u8 {
    b'0' + (number % 10) as u8
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
            duration: Duration::from_micros(1_500_020),
            direction: Direction::Inbound,
            protocol: Protocol::Http2,
            method: Some("POST".into()),
            path: Some("/a".into()),
            status: Some(200),
            grpc_status: Some("UNAVAILABLE"),
            failure: Some("connect"),
            bytes_sent: 1,
            bytes_received: u64::MAX,
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
            incomplete: true,
        }
    }

    #[test]
    fn every_field_has_a_name() {
        let line = line(&entry(), &Format::Json);
        let mut at = 0;
        for (name, _) in FIELDS {
            at = line
                .find(&format!("\"{name}\":"))
                .filter(|found| *found > at)
                .unwrap_or_else(|| panic!("{name} after byte {at} of {line}"));
        }
        let fields: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(fields.as_object().unwrap().len(), FIELDS.len());
        assert_eq!(fields["duration_ms"], 1500.02);
        assert_eq!(fields["bytes_received"], u64::MAX);
        assert_eq!(fields["peer"], entry().peer.to_string());
        assert_eq!(fields["id"], entry().id.unwrap().to_string());
        assert_eq!(fields["incomplete"], true);
    }

    #[test]
    fn values_are_valid_json_whatever_they_contain() {
        for text in ["", "\"", "\\x22", "a\u{7f}\u{e9}", "\0", "line\nbreak"] {
            let entry = Entry {
                peer: "[2001:db8::1]:80".parse().unwrap(),
                id: "2001:db8::1-00000000002a".parse().ok(),
                route: Some(text),
                ..entry()
            };
            let line = line(&entry, &Format::Json);
            let fields: serde_json::Value = serde_json::from_str(&line).unwrap();
            assert_eq!(fields["route"], text);
            assert_eq!(fields["peer"], "[2001:db8::1]:80");
            assert_eq!(fields["id"], "2001:db8::1-00000000002a");
        }
    }

    #[test]
    fn addresses_are_written_as_they_are_displayed() {
        for octet in 0..=u8::MAX {
            let address = Ipv4Addr::new(octet, !octet, 0, octet);
            let mut out = Vec::new();
            write_ipv4(address, &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), address.to_string());
        }
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
        let each_byte = |byte| [b"/a", &[byte][..], b"b\\\",\"status\":9"].concat();
        for target in (0..=u8::MAX).map(each_byte).chain([hostile.into()]) {
            let entry = Entry {
                path: Some(shown(&target)),
                ..entry()
            };
            for format in ["JSON", "\"{path}\""] {
                let line = line(&entry, &Format::parse(format).unwrap());
                assert_eq!(line.matches('\n').count(), 1, "{line}");
                assert!(!line.trim_end().contains(char::is_control), "{line}");
            }
            let fields = line(&entry, &Format::Json);
            let fields: serde_json::Value = serde_json::from_str(&fields).unwrap();
            assert_eq!(fields["path"].as_str(), entry.path.as_deref());
            assert_eq!(fields["status"], 200);
            let format = Format::parse("\"{path}\"").unwrap();
            assert_eq!(line(&entry, &format).matches('"').count(), 2);
        }
        assert_eq!(shown(&[b'a'; 5000]).len(), 1024);
    }
}
