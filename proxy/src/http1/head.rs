//! HTTP/1 heads: parsed strictly (RFC 9112), kept as received, and written for the next hop. Field
//! names keep their case, and fields their order. Pure: no sockets.
//!
//! The proxy is stricter than its parser: it rejects every head that two hops could parse
//! differently.

use std::cmp::Ordering;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use memchr::memmem;

use crate::authority;
use crate::http::edits::Edits;
use crate::http::view::{self, Fields as _, Head, RequestView};

/// The maximum size of a head in bytes: start line and fields.
pub const MAX_HEAD: usize = 64 * 1024;
/// The maximum number of fields of a head.
const MAX_FIELDS: usize = 128;

/// The reason for the rejection of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// Over [`MAX_HEAD`] bytes, or too many fields.
    TooLarge,
    /// Not valid by RFC 9112, or ambiguous.
    Malformed(&'static str),
}

/// HTTP/1.0 or HTTP/1.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// HTTP/1.0: one exchange per connection, unless both sides send `Connection: keep-alive`.
    Http10,
    /// HTTP/1.1.
    Http11,
}

/// The end of a message's body (RFC 9112, section 6.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// No body.
    None,
    /// After this number of bytes.
    Length(u64),
    /// With the last chunk.
    Chunked,
    /// With the connection. Responses only.
    UntilClose,
}

/// A request's start line and fields.
#[derive(Debug)]
pub struct RequestHead {
    fields: Fields,
    method: Range<u32>,
    target: Range<u32>,
    /// The client's version.
    pub version: Version,
    /// Where the body ends.
    pub framing: Framing,
    /// The connection options of the client.
    pub connection: Connection,
}

/// A response's start line and fields.
#[derive(Debug)]
pub struct ResponseHead {
    fields: Fields,
    reason: Range<u32>,
    /// The upstream's version.
    pub version: Version,
    /// The status code, 100 to 999.
    pub status: u16,
    /// Where the body ends.
    pub framing: Framing,
    /// The connection options of the upstream.
    pub connection: Connection,
}

/// The connection options of a head.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Connection {
    /// `Connection: close`.
    pub close: bool,
    /// `Connection: keep-alive`.
    pub keep_alive: bool,
    /// `Connection: upgrade`, with an `Upgrade` field that the proxy forwards.
    pub upgrade: bool,
}

impl Connection {
    /// Whether the connection may carry another exchange.
    pub fn persists(self, version: Version) -> bool {
        !self.close && (version == Version::Http11 || self.keep_alive)
    }
}

/// The end of the head at the start of `buf`, if it is complete. `scanned` is how far earlier calls
/// searched: a peer that sends byte by byte costs no more than one that sends at once.
pub fn find_end(buf: &[u8], scanned: &mut usize) -> Result<Option<usize>, Refused> {
    let blank = buf
        .iter()
        .take_while(|byte| matches!(byte, b'\r' | b'\n'))
        .count();
    let from = scanned.saturating_sub(3).max(blank);
    let end = memmem::find(&buf[from.min(buf.len())..], b"\r\n\r\n").map(|at| from + at + 4);
    if memmem::find(&buf[from.min(buf.len())..end.unwrap_or(buf.len())], b"\n\n").is_some() {
        return Err(Refused::Malformed("a line of the head ends without CR LF"));
    }
    if end.unwrap_or(buf.len()) > MAX_HEAD {
        return Err(Refused::TooLarge);
    }
    *scanned = buf.len();
    Ok(end)
}

impl RequestHead {
    /// Parses a complete head, as delimited by [`find_end`].
    pub fn parse(raw: Bytes) -> Result<Self, Refused> {
        let mut storage = [httparse::EMPTY_HEADER; MAX_FIELDS];
        let mut parsed = httparse::Request::new(&mut storage);
        whole(parsed.parse(&raw), raw.len())?;
        let (Some(method), Some(target), Some(version)) =
            (parsed.method, parsed.path, parsed.version)
        else {
            return Err(Refused::Malformed("the request line is incomplete"));
        };
        let (method, target) = (span(&raw, method.as_bytes()), span(&raw, target.as_bytes()));
        let version = if version == 0 {
            Version::Http10
        } else {
            Version::Http11
        };
        let spans = Fields::spans(&raw, parsed.headers, version)?;
        let fields = Fields { raw, spans };
        let seen = fields.examine()?;
        match (seen.hosts, version) {
            (0, Version::Http11) => return Err(Refused::Malformed("the Host field is missing")),
            (2.., _) => return Err(Refused::Malformed("the Host field is repeated")),
            _ => {}
        }
        if seen.chunked && version == Version::Http10 {
            return Err(Refused::Malformed("Transfer-Encoding in HTTP/1.0"));
        }
        let framing = match seen.length {
            _ if seen.chunked => Framing::Chunked,
            None | Some(0) => Framing::None,
            Some(length) => Framing::Length(length),
        };
        let head = Self {
            fields,
            method,
            target,
            version,
            framing,
            connection: seen.connection,
        };
        head.check_target()?;
        Ok(head)
    }

    /// Checks the four forms of a target (RFC 9112, section 3.2). If target and Host name different
    /// hosts, the RFC gives precedence to the target. A server that uses Host would see another
    /// request than the proxy, so such a request is rejected.
    fn check_target(&self) -> Result<(), Refused> {
        let (method, target) = (self.method(), self.target());
        if method == b"CONNECT" {
            return match (self.framing, authority::is_host_and_port(target)) {
                (_, false) => Err(Refused::Malformed("the target of CONNECT is not HOST:PORT")),
                (Framing::None, true) => Ok(()),
                _ => Err(Refused::Malformed("CONNECT with a body")),
            };
        }
        if target.starts_with(b"/") || (target == b"*" && method == b"OPTIONS") {
            return Ok(());
        }
        let Some((scheme, named)) = absolute_form(target) else {
            return Err(Refused::Malformed("the target is neither a path nor a URL"));
        };
        match self.field("host") {
            Some(host) if !authority::is_same(scheme, named, host) => Err(Refused::Malformed(
                "the target and the Host field name different hosts",
            )),
            _ => Ok(()),
        }
    }

    /// The request as authorization and routing see it.
    pub fn view(&self) -> RequestView<'_> {
        RequestView {
            method: self.method(),
            target: self.target(),
            head: self,
            version: match self.version {
                Version::Http10 => http::Version::HTTP_10,
                Version::Http11 => http::Version::HTTP_11,
            },
            upgrade: self.connection.upgrade,
        }
    }

    /// GET, POST, ...
    pub fn method(&self) -> &[u8] {
        self.fields.slice(&self.method)
    }

    /// The target as received, in any of the four forms of RFC 9112, section 3.2.
    pub fn target(&self) -> &[u8] {
        self.fields.slice(&self.target)
    }

    /// Names and values, in their order and case.
    pub fn fields(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.fields.iter()
    }

    /// Writes the head for the next hop.
    pub fn write(&self, out: &mut BytesMut, edits: Edits<'_>) {
        out.reserve(self.fields.raw.len() + 128);
        out.extend_from_slice(self.method());
        out.extend_from_slice(b" ");
        out.extend_from_slice(edits.target.unwrap_or_else(|| self.target()));
        out.extend_from_slice(if self.version == Version::Http10 {
            b" HTTP/1.0\r\n"
        } else {
            b" HTTP/1.1\r\n"
        });
        self.fields.write(out, self.connection.upgrade, edits);
        out.extend_from_slice(b"\r\n");
    }
}

impl ResponseHead {
    /// Parses a complete head, as delimited by [`find_end`], of a response to a request with this
    /// method.
    pub fn parse(raw: Bytes, method: &[u8]) -> Result<Self, Refused> {
        let mut storage = [httparse::EMPTY_HEADER; MAX_FIELDS];
        let mut parsed = httparse::Response::new(&mut storage);
        whole(parsed.parse(&raw), raw.len())?;
        let (Some(status), Some(version)) = (parsed.code, parsed.version) else {
            return Err(Refused::Malformed("the status line is incomplete"));
        };
        if status < 100 {
            return Err(Refused::Malformed(
                "the status is not a number from 100 to 999",
            ));
        }
        let reason = span(&raw, parsed.reason.unwrap_or_default().as_bytes());
        let version = if version == 0 {
            Version::Http10
        } else {
            Version::Http11
        };
        let spans = Fields::spans(&raw, parsed.headers, version)?;
        let fields = Fields { raw, spans };
        let seen = fields.examine()?;
        let framing = match (status, seen.length) {
            (100..=199 | 204 | 304, _) => Framing::None,
            _ if method == b"HEAD" || (method == b"CONNECT" && (200..300).contains(&status)) => {
                Framing::None
            }
            _ if seen.chunked => Framing::Chunked,
            (_, Some(0)) => Framing::None,
            (_, Some(length)) => Framing::Length(length),
            (_, None) => Framing::UntilClose,
        };
        Ok(Self {
            fields,
            reason,
            version,
            status,
            framing,
            connection: seen.connection,
        })
    }

    /// The reason phrase.
    pub fn reason(&self) -> &[u8] {
        self.fields.slice(&self.reason)
    }

    /// Names and values, in their order and case.
    pub fn fields(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.fields.iter()
    }

    /// An interim response. 101 is a final one.
    pub fn is_interim(&self) -> bool {
        (100..200).contains(&self.status) && self.status != 101
    }

    /// Removes Transfer-Encoding, for a client of HTTP/1.0.
    pub fn drop_chunks(&mut self) {
        for at in 0..self.fields.spans.len() {
            let name = self.fields.slice(&self.fields.spans[at].name);
            self.fields.spans[at].hop_by_hop |= name.eq_ignore_ascii_case(b"transfer-encoding");
        }
    }

    /// Writes the head for the client. `connection` is the value of a Connection field, if any.
    pub fn write(&self, out: &mut BytesMut, edits: Edits<'_>, connection: Option<&str>) {
        out.reserve(self.fields.raw.len() + 32);
        out.extend_from_slice(b"HTTP/1.1 ");
        let digits = [self.status / 100, self.status / 10 % 10, self.status % 10]
            .map(|digit| b'0' + digit as u8);
        out.extend_from_slice(&digits);
        out.extend_from_slice(b" ");
        out.extend_from_slice(self.reason());
        out.extend_from_slice(b"\r\n");
        let upgrade = self.status == 101 || self.connection.upgrade;
        self.fields.write(out, upgrade, edits);
        if let Some(connection) = connection {
            out.extend_from_slice(b"Connection: ");
            out.extend_from_slice(connection.as_bytes());
            out.extend_from_slice(b"\r\n");
        }
        out.extend_from_slice(b"\r\n");
    }
}

/// The fields of a head, as ranges of its bytes.
#[derive(Debug)]
struct Fields {
    raw: Bytes,
    spans: Vec<FieldSpan>,
}

#[derive(Debug)]
struct FieldSpan {
    name: Range<u32>,
    value: Range<u32>,
    /// Applies to this hop only: not written for the next one.
    hop_by_hop: bool,
}

/// The result of one pass over the fields.
#[derive(Default)]
struct Seen {
    hosts: usize,
    length: Option<u64>,
    chunked: bool,
    connection: Connection,
}

impl Fields {
    fn spans(
        raw: &[u8],
        parsed: &[httparse::Header<'_>],
        version: Version,
    ) -> Result<Vec<FieldSpan>, Refused> {
        let mut spans: Vec<FieldSpan> = parsed
            .iter()
            .map(|field| FieldSpan {
                name: span(raw, field.name.as_bytes()),
                value: span(raw, field.value),
                hop_by_hop: false,
            })
            .collect();
        let upgrade = version == Version::Http11 && asks_for_upgrade(parsed);
        for (span, field) in spans.iter_mut().zip(parsed) {
            span.hop_by_hop = match field.name.len() {
                2 => {
                    field.name.eq_ignore_ascii_case("te")
                        && !field.value.eq_ignore_ascii_case(b"trailers")
                }
                7 => field.name.eq_ignore_ascii_case("upgrade") && !upgrade,
                10 => {
                    field.name.eq_ignore_ascii_case("connection")
                        || field.name.eq_ignore_ascii_case("keep-alive")
                }
                14 => field.name.eq_ignore_ascii_case("http2-settings"),
                16 => field.name.eq_ignore_ascii_case("proxy-connection"),
                _ => false,
            };
        }
        mark_nominated(&mut spans, parsed)?;
        Ok(spans)
    }

    fn examine(&self) -> Result<Seen, Refused> {
        let mut seen = Seen::default();
        let mut encodings = 0;
        let mut upgrade = false;
        for (span, (name, value)) in self.spans.iter().zip(self.iter()) {
            match name.len() {
                4 if name.eq_ignore_ascii_case(b"host") => {
                    seen.hosts += 1;
                    check_host(value)?;
                }
                7 if name.eq_ignore_ascii_case(b"upgrade") => upgrade |= !span.hop_by_hop,
                10 if name.eq_ignore_ascii_case(b"connection") => {
                    for option in list(value) {
                        seen.connection.close |= option.eq_ignore_ascii_case(b"close");
                        seen.connection.keep_alive |= option.eq_ignore_ascii_case(b"keep-alive");
                    }
                }
                14 if name.eq_ignore_ascii_case(b"content-length") => {
                    let length = parse_length(value)?;
                    if seen.length.replace(length).is_some() {
                        return Err(Refused::Malformed("Content-Length is repeated"));
                    }
                }
                17 if name.eq_ignore_ascii_case(b"transfer-encoding") => {
                    encodings += 1;
                    if encodings > 1 || !value.eq_ignore_ascii_case(b"chunked") {
                        return Err(Refused::Malformed(
                            "Transfer-Encoding is something else than chunked",
                        ));
                    }
                    seen.chunked = true;
                }
                _ => {}
            }
        }
        if seen.chunked && seen.length.is_some() {
            return Err(Refused::Malformed(
                "Transfer-Encoding together with Content-Length",
            ));
        }
        seen.connection.upgrade = upgrade;
        Ok(seen)
    }

    fn slice(&self, span: &Range<u32>) -> &[u8] {
        &self.raw[span.start as usize..span.end as usize]
    }

    fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.spans
            .iter()
            .map(|field| (self.slice(&field.name), self.slice(&field.value)))
    }

    fn write(&self, out: &mut BytesMut, upgrade: bool, edits: Edits<'_>) {
        for field in &self.spans {
            let name = self.slice(&field.name);
            let value = edits.value(name, self.slice(&field.value));
            let Some(value) = value.filter(|_| !field.hop_by_hop) else {
                continue;
            };
            out.extend_from_slice(name);
            out.extend_from_slice(b": ");
            out.extend_from_slice(value);
            out.extend_from_slice(b"\r\n");
        }
        for (name, value) in edits.appended() {
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(b": ");
            out.extend_from_slice(value.as_bytes());
            out.extend_from_slice(b"\r\n");
        }
        if upgrade {
            out.extend_from_slice(b"Connection: Upgrade\r\n");
        }
    }
}

impl view::Fields for RequestHead {
    fn visit<'a>(&'a self, each: &mut dyn FnMut(&'a [u8], &'a [u8])) {
        self.fields().for_each(|(name, value)| each(name, value));
    }
}

impl view::Fields for ResponseHead {
    fn visit<'a>(&'a self, each: &mut dyn FnMut(&'a [u8], &'a [u8])) {
        self.fields().for_each(|(name, value)| each(name, value));
    }
}

impl Head for RequestHead {
    fn authority(&self) -> Option<&[u8]> {
        let target = self.target();
        if self.method() == b"CONNECT" {
            return Some(target);
        }
        match absolute_form(target) {
            Some((_, named)) => Some(named),
            None => self.field("host"),
        }
    }
}

/// The scheme and the authority of a target that is a URL.
fn absolute_form(target: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = memmem::find(target, b"://")?;
    let (scheme, rest) = (&target[..end], &target[end + 3..]);
    let named = &rest[..rest
        .iter()
        .position(|byte| b"/?#".contains(byte))
        .unwrap_or(rest.len())];
    scheme
        .iter()
        .all(u8::is_ascii_alphanumeric)
        .then_some((scheme, named))
}

/// Whether the head requests an upgrade that the proxy forwards: any except to HTTP, in plaintext or
/// in TLS, whose requests would not be parsed.
fn asks_for_upgrade(fields: &[httparse::Header<'_>]) -> bool {
    let has = |name: &str, accept: fn(&[u8]) -> bool| {
        fields
            .iter()
            .filter(|field| field.name.eq_ignore_ascii_case(name))
            .flat_map(|field| list(field.value))
            .any(accept)
    };
    has("connection", |option| {
        option.eq_ignore_ascii_case(b"upgrade")
    }) && has("upgrade", |_| true)
        && !has("upgrade", is_http)
}

/// Whether a protocol of an Upgrade field carries HTTP: `h2c` (RFC 7540), `HTTP/2.0` (RFC 9110,
/// section 7.8), `TLS/1.0` (RFC 2817).
fn is_http(protocol: &[u8]) -> bool {
    [&b"h2"[..], b"http", b"tls"].iter().any(|name| {
        protocol
            .get(..name.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(name))
    })
}

/// Marks the fields that `Connection` nominates (RFC 9110, section 7.6.1). Fields that frame or route
/// a message must not be nominated.
fn mark_nominated(spans: &mut [FieldSpan], parsed: &[httparse::Header<'_>]) -> Result<(), Refused> {
    const KEPT: [&[u8]; 4] = [b"close", b"keep-alive", b"upgrade", b"te"];
    const NEVER: [&[u8]; 7] = [
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"content-type",
        b"authorization",
        b"cookie",
        b"x-called-by",
    ];
    let mut index = None;
    for field in parsed
        .iter()
        .filter(|field| field.name.eq_ignore_ascii_case("connection"))
    {
        for option in list(field.value) {
            if KEPT.iter().any(|kept| option.eq_ignore_ascii_case(kept)) {
                continue;
            }
            if NEVER.iter().any(|never| option.eq_ignore_ascii_case(never)) {
                return Err(Refused::Malformed(
                    "Connection names a field that is not the connection's",
                ));
            }
            let index = index.get_or_insert_with(|| NameIndex::new(parsed, compare_names));
            index.each_named(option, |at| spans[at].hop_by_hop = true);
        }
    }
    Ok(())
}

/// The fields of a head, sorted by name. Comparing every option with every field would cost a
/// hundred times as much as parsing the head.
struct NameIndex<'a, C> {
    fields: &'a [httparse::Header<'a>],
    order: Vec<usize>,
    /// For each index in `order`, whether it has been nominated.
    named: Vec<bool>,
    compare: C,
}

impl<'a, C: FnMut(&[u8], &[u8]) -> Ordering> NameIndex<'a, C> {
    fn new(fields: &'a [httparse::Header<'a>], mut compare: C) -> Self {
        let mut order: Vec<usize> = (0..fields.len()).collect();
        order.sort_unstable_by(|one, other| {
            compare(fields[*one].name.as_bytes(), fields[*other].name.as_bytes())
        });
        Self {
            fields,
            named: vec![false; order.len()],
            order,
            compare,
        }
    }

    /// Calls `mark` for each field with this name, once: not again for a repeated option.
    fn each_named(&mut self, name: &[u8], mut mark: impl FnMut(usize)) {
        let Self {
            fields,
            order,
            named,
            compare,
        } = self;
        let first = order.partition_point(|at| compare(fields[*at].name.as_bytes(), name).is_lt());
        for (at, named) in order.iter().zip(named).skip(first) {
            if *named || compare(fields[*at].name.as_bytes(), name).is_ne() {
                break;
            }
            *named = true;
            mark(*at);
        }
    }
}

/// The order of two names, without case.
fn compare_names(one: &[u8], other: &[u8]) -> Ordering {
    one.iter()
        .map(u8::to_ascii_lowercase)
        .cmp(other.iter().map(u8::to_ascii_lowercase))
}

/// The members of a comma-separated list (RFC 9110, section 5.6.1).
fn list(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value
        .split(|byte| *byte == b',')
        .map(<[u8]>::trim_ascii)
        .filter(|member| !member.is_empty())
}

fn parse_length(value: &[u8]) -> Result<u64, Refused> {
    let digits = std::str::from_utf8(value)
        .ok()
        .filter(|text| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()));
    digits
        .and_then(|text| text.parse().ok())
        .ok_or(Refused::Malformed("Content-Length is not a number"))
}

fn check_host(value: &[u8]) -> Result<(), Refused> {
    if authority::is_text(value) {
        Ok(())
    } else {
        Err(Refused::Malformed("the Host field is not a host"))
    }
}

fn whole(parsed: httparse::Result<usize>, length: usize) -> Result<(), Refused> {
    match parsed {
        Ok(httparse::Status::Complete(read)) if read == length => Ok(()),
        Ok(_) => Err(Refused::Malformed("a line of the head ends without CR LF")),
        Err(httparse::Error::TooManyHeaders) => Err(Refused::TooLarge),
        Err(httparse::Error::HeaderName) => {
            Err(Refused::Malformed("a field's name is not a token"))
        }
        Err(httparse::Error::HeaderValue) => {
            Err(Refused::Malformed("a field's value has a forbidden byte"))
        }
        Err(httparse::Error::NewLine) => {
            Err(Refused::Malformed("a line of the head ends without CR LF"))
        }
        Err(httparse::Error::Version) => Err(Refused::Malformed(
            "the version is not HTTP/1.0 or HTTP/1.1",
        )),
        Err(httparse::Error::Status) => Err(Refused::Malformed(
            "the status is not a number from 100 to 999",
        )),
        Err(httparse::Error::Token) => {
            Err(Refused::Malformed("the request line has a forbidden byte"))
        }
    }
}

/// The range of `part` in `whole`. `part` must be a slice of it.
fn span(whole: &[u8], part: &[u8]) -> Range<u32> {
    if part.is_empty() {
        return 0..0;
    }
    let start = (part.as_ptr() as usize - whole.as_ptr() as usize) as u32;
    start..start + part.len() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::edits::Edit;

    fn request(text: &str) -> Result<RequestHead, Refused> {
        RequestHead::parse(Bytes::copy_from_slice(text.as_bytes()))
    }

    fn response(text: &str, method: &str) -> Result<ResponseHead, Refused> {
        ResponseHead::parse(Bytes::copy_from_slice(text.as_bytes()), method.as_bytes())
    }

    fn forwarded(text: &str) -> String {
        let mut out = BytesMut::new();
        let edits = [Edit::Own("x-called-by", None)];
        request(text).unwrap().write(&mut out, Edits::of(&edits));
        String::from_utf8(out.to_vec()).unwrap()
    }

    #[test]
    fn keeps_case_order_and_repetition_of_fields() {
        let text = "GET /a?b HTTP/1.1\r\nhOsT: x\r\nX-One: 1\r\nx-two: 2\r\nX-One: again\r\n\r\n";
        assert_eq!(forwarded(text), text);
    }

    #[test]
    fn hop_by_hop_fields_are_not_forwarded() {
        let text = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close, X-Mine\r\nX-Mine: 1\r\nKeep-Alive: 5\r\nProxy-Connection: a\r\nX-Other: 2\r\n\r\n";
        assert_eq!(
            forwarded(text),
            "GET / HTTP/1.1\r\nHost: x\r\nX-Other: 2\r\n\r\n"
        );
        assert!(request(text).unwrap().connection.close);
    }

    /// A head with these fields beside Host, and its options in `Connection` fields of so many
    /// each.
    fn head_with(names: &[String], options: &[String], each: usize) -> String {
        let fields: String = names.iter().map(|name| format!("{name}: 1\r\n")).collect();
        let connection: String = options
            .chunks(each)
            .map(|options| format!("Connection: {}\r\n", options.join(", ")))
            .collect();
        format!("GET / HTTP/1.1\r\nHost: x\r\n{fields}{connection}\r\n")
    }

    #[test]
    fn removes_nominated_fields_in_any_case_and_number() {
        let mut rng = fastrand::Rng::with_seed(5);
        for _ in 0..500 {
            // Few names, so that fields and options repeat them.
            let mut name = |_| {
                let name = ["A", "ab", "X-A", "x-b", "Z", "hop", "hops"][rng.usize(0..7)];
                if rng.bool() {
                    name.to_ascii_uppercase()
                } else {
                    name.to_ascii_lowercase()
                }
            };
            let names: Vec<_> = (0..20).map(&mut name).collect();
            let mut options: Vec<_> = (0..5).map(&mut name).collect();
            options.extend(["close".to_owned(), "nothing".to_owned()]);
            let kept = names.iter().filter(|name| {
                !options
                    .iter()
                    .any(|option| option.eq_ignore_ascii_case(name))
            });
            let expected = head_with(&kept.cloned().collect::<Vec<_>>(), &[], 1);
            assert_eq!(
                forwarded(&head_with(&names, &options, 3)),
                expected,
                "{options:?}"
            );
        }
    }

    #[test]
    fn connection_options_cost_is_linear() {
        let value = b"1";
        for names in [
            vec!["a"; MAX_FIELDS],
            (0..MAX_FIELDS)
                .map(|at| if at % 2 == 0 { "a" } else { "b" })
                .collect(),
        ] {
            let fields: Vec<_> = names
                .iter()
                .map(|name| httparse::Header { name, value })
                .collect();
            let (mut comparisons, mut marks) = (0, 0);
            let mut index = NameIndex::new(&fields, |one, other| {
                comparisons += 1;
                compare_names(one, other)
            });
            let options = MAX_HEAD / 2;
            for _ in 0..options {
                index.each_named(b"a", |_| marks += 1);
            }
            assert_eq!(marks, names.iter().filter(|name| **name == "a").count());
            assert!(comparisons < 10 * options, "{comparisons}");
        }
    }

    #[test]
    fn removes_forged_x_called_by() {
        let text = "GET / HTTP/1.1\r\nHost: x\r\nX-Called-By: a\r\nx-cAlled-by: b\r\nx.called_by: d\r\nX-Called-Bye: c\r\n\r\n";
        assert_eq!(
            forwarded(text),
            "GET / HTTP/1.1\r\nHost: x\r\nX-Called-Bye: c\r\n\r\n"
        );
    }

    #[test]
    fn forwards_websocket_upgrade_and_drops_upgrades_to_http() {
        let text = "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n\r\n";
        assert!(request(text).unwrap().connection.upgrade);
        assert_eq!(
            forwarded(text),
            "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
        );
        let h2c = "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\nConnection: Upgrade, HTTP2-Settings\r\n\r\n";
        assert_eq!(forwarded(h2c), "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
        for protocol in ["websocket, h2c", "HTTP/2.0", "TLS/1.2, HTTP/1.1", "h2c-14"] {
            let text = format!(
                "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: {protocol}\r\nConnection: Upgrade\r\n\r\n"
            );
            assert_eq!(
                forwarded(&text),
                "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                "{protocol}"
            );
        }
        let old = "GET / HTTP/1.0\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n";
        assert_eq!(
            forwarded(old),
            "GET / HTTP/1.0\r\nHost: x\r\n\r\n",
            "RFC 9110, section 7.8"
        );
    }

    #[test]
    fn rejects_target_with_another_host_than_the_host_field() {
        let target =
            |line: &str| request(&format!("{line} HTTP/1.1\r\nHost: a\r\n\r\n")).map(|_| ());
        for passed in [
            "GET http://a/",
            "GET http://A:80/x",
            "GET https://a:443?x",
            "GET http://u:p@a/",
            "OPTIONS *",
            "CONNECT b:1",
            "GET //b/",
        ] {
            assert_eq!(target(passed), Ok(()), "{passed}");
        }
        for other in [
            "GET http://b/",
            "GET http://a:81/",
            "GET https://a:80/",
            "GET http://b\\@a/",
            "GET http:///x",
            "GET http://a@b/",
        ] {
            assert_eq!(
                target(other),
                Err(Refused::Malformed(
                    "the target and the Host field name different hosts"
                )),
                "{other}"
            );
        }
        for none in [
            "GET *",
            "GET a",
            "GET http:a",
            "GET ?://a/",
            "CONNECT /",
            "CONNECT a",
            "CONNECT http://a:1/",
        ] {
            assert!(target(none).is_err(), "{none}");
        }
        assert!(request("CONNECT a:1 HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n").is_err());
        assert!(
            request("GET http://a/ HTTP/1.0\r\n\r\n").is_ok(),
            "there is no Host to differ from"
        );
    }

    #[test]
    fn rejects_ambiguous_requests() {
        let refused = |fields: &str, why: &'static str| {
            let text = format!("POST / HTTP/1.1\r\n{fields}\r\n");
            assert_eq!(
                request(&text).map(|head| head.framing),
                Err(Refused::Malformed(why)),
                "{fields:?}"
            );
        };
        refused("", "the Host field is missing");
        refused("Host: a\r\nHost: a\r\n", "the Host field is repeated");
        refused("Host: a b\r\n", "the Host field is not a host");
        refused(
            "Host: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n",
            "Content-Length is repeated",
        );
        refused(
            "Host: a\r\nContent-Length: 1, 1\r\n",
            "Content-Length is not a number",
        );
        refused(
            "Host: a\r\nContent-Length: +1\r\n",
            "Content-Length is not a number",
        );
        refused(
            "Host: a\r\nContent-Length: 99999999999999999999\r\n",
            "Content-Length is not a number",
        );
        refused(
            "Host: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding together with Content-Length",
        );
        refused(
            "Host: a\r\nTransfer-Encoding: gzip, chunked\r\n",
            "Transfer-Encoding is something else than chunked",
        );
        refused(
            "Host: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding is something else than chunked",
        );
        refused(
            "Host: a\r\nTransfer-Encoding: xchunked\r\n",
            "Transfer-Encoding is something else than chunked",
        );
        refused(
            "Host: a\r\nConnection: Content-Length\r\nContent-Length: 1\r\n",
            "Connection names a field that is not the connection's",
        );
        refused("Host : a\r\n", "a field's name is not a token");
        refused(
            "Host: a\r\nX: 1\r\n folded\r\n",
            "a field's name is not a token",
        );
        refused(
            "Host: a\r\nX: \0\r\n",
            "a field's value has a forbidden byte",
        );
        assert!(request("GET / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n").is_err());
        assert!(
            request("GET / HTTP/1.1\r\nHost: a\nX: 1\r\n\r\n").is_ok_and(|head| head
                .fields
                .iter()
                .count()
                == 2)
        );
    }

    #[test]
    fn response_framing_follows_rfc_9112() {
        let framing = |text: &str, method: &str| response(text, method).unwrap().framing;
        assert_eq!(
            framing("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "GET"),
            Framing::Length(5)
        );
        assert_eq!(
            framing("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HEAD"),
            Framing::None
        );
        assert_eq!(
            framing(
                "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
                "GET"
            ),
            Framing::None
        );
        assert_eq!(
            framing("HTTP/1.1 204 No Content\r\n\r\n", "GET"),
            Framing::None
        );
        assert_eq!(
            framing(
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
                "GET"
            ),
            Framing::Chunked
        );
        assert_eq!(
            framing("HTTP/1.1 200 OK\r\n\r\n", "GET"),
            Framing::UntilClose
        );
        assert_eq!(framing("HTTP/1.1 200 OK\r\n\r\n", "CONNECT"), Framing::None);
        assert!(
            response(
                "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
                "GET"
            )
            .is_err()
        );
    }

    #[test]
    fn keeps_reason_phrase_and_sets_own_connection_field() {
        let mut out = BytesMut::new();
        let text = "HTTP/1.0 299 Fine By Me\r\nConnection: close\r\nX-A: b\r\n\r\n";
        response(text, "GET")
            .unwrap()
            .write(&mut out, Edits::default(), Some("close"));
        assert_eq!(
            &out[..],
            b"HTTP/1.1 299 Fine By Me\r\nX-A: b\r\nConnection: close\r\n\r\n"
        );
    }

    #[test]
    fn keeps_offered_upgrade_with_its_connection_field() {
        let text = "HTTP/1.1 426 Upgrade Required\r\nUpgrade: websocket\r\nConnection: upgrade\r\nContent-Length: 0\r\n\r\n";
        let mut out = BytesMut::new();
        response(text, "GET")
            .unwrap()
            .write(&mut out, Edits::default(), Some("close"));
        let expected = "Upgrade: websocket\r\nContent-Length: 0\r\nConnection: Upgrade\r\nConnection: close\r\n\r\n";
        assert_eq!(
            String::from_utf8_lossy(&out),
            format!("HTTP/1.1 426 Upgrade Required\r\n{expected}")
        );
    }

    #[test]
    fn rejects_status_below_100() {
        for status in ["000", "099", "99", "1000", "abc"] {
            assert!(
                response(&format!("HTTP/1.1 {status} OK\r\n\r\n"), "GET").is_err(),
                "{status}"
            );
        }
        assert_eq!(
            response("HTTP/1.1 999 OK\r\n\r\n", "GET").unwrap().status,
            999
        );
    }

    #[test]
    fn finds_complete_head_and_rejects_endless_one() {
        let mut scanned = 0;
        assert_eq!(
            find_end(b"GET / HTTP/1.1\r\nHost: a\r\n\r", &mut scanned),
            Ok(None)
        );
        assert_eq!(
            find_end(b"GET / HTTP/1.1\r\nHost: a\r\n\r\nrest", &mut scanned),
            Ok(Some(27))
        );
        assert_eq!(
            find_end(b"\r\n\r\nGET / HTTP/1.1\r\n\r\n", &mut 0),
            Ok(Some(22))
        );
        assert_eq!(
            find_end(b"GET / HTTP/1.1\n\n", &mut 0),
            Err(Refused::Malformed("a line of the head ends without CR LF"))
        );
        assert_eq!(
            find_end(&vec![b'a'; MAX_HEAD + 1], &mut 0),
            Err(Refused::TooLarge)
        );
    }
}
