//! HTTP/1 heads: parsed strictly (RFC 9112), kept as received, and written for the next hop. Field
//! names keep their case, and fields their order. Pure: no sockets.
//!
//! The proxy is stricter than its parser: it rejects every head that two hops could parse
//! differently.

mod fields;
#[cfg(test)]
mod tests;

use std::mem::MaybeUninit;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use httparse::ParserConfig;
use memchr::memmem;

pub(super) use self::fields::put_field;
use self::fields::{Fields, span};
use crate::http::authority;
use crate::http::edits::Edits;
use crate::http::view::{self, Fields as _, Head, RequestView};
use crate::protocol::{MAX_FIELDS, MAX_SECTION, TooLarge};

/// The reason for the rejection of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// Over a limit.
    TooLarge(TooLarge),
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

impl Version {
    /// From the minor version that the parser reports.
    fn parsed(minor: u8) -> Self {
        if minor == 0 {
            Self::Http10
        } else {
            Self::Http11
        }
    }
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

/// The search for the ends of lines. It searches each byte once: a peer that sends byte by byte
/// costs no more than one that sends at once.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct LineSearch {
    searched: usize,
}

impl LineSearch {
    /// The end of the next line, after its LF. `bytes` contains the bytes of earlier calls, and more.
    pub fn next_end(&mut self, bytes: &[u8]) -> Option<usize> {
        let found = memchr::memchr(b'\n', &bytes[self.searched..]);
        let end = found.map(|at| self.searched + at + 1);
        self.searched = end.unwrap_or(bytes.len());
        end
    }

    /// The end of the next empty line, which ends a head or a trailer section.
    pub fn next_empty(&mut self, bytes: &[u8]) -> Result<Option<usize>, &'static str> {
        while let Some(end) = self.next_end(bytes) {
            match bytes[..end] {
                [b'\n'] | [.., b'\n', b'\n'] => return Err("a line ends without CR LF"),
                [b'\r', b'\n'] | [.., b'\r', b'\n', b'\r', b'\n'] => return Ok(Some(end)),
                _ => {}
            }
        }
        Ok(None)
    }
}

/// The search for the end of a head.
#[derive(Debug, Default)]
pub struct HeadSearch {
    /// The number of bytes of blank lines before the head.
    blank: usize,
    lines: LineSearch,
}

impl HeadSearch {
    /// The end of the head at the start of `bytes`, if it is complete. `bytes` contains the bytes of
    /// earlier calls, and more.
    pub fn find_end(&mut self, bytes: &[u8]) -> Result<Option<usize>, Refused> {
        if self.is_blank() {
            let is_blank = |byte: &&u8| matches!(byte, b'\r' | b'\n');
            self.blank += bytes[self.blank..].iter().take_while(is_blank).count();
            self.lines.searched = self.blank;
        }
        let end = self.lines.next_empty(bytes).map_err(Refused::Malformed)?;
        if end.unwrap_or(bytes.len()) > MAX_SECTION {
            Err(Refused::TooLarge(TooLarge::Header))
        } else {
            Ok(end)
        }
    }

    /// Whether no head has begun: there are blank lines at most.
    pub fn is_blank(&self) -> bool {
        self.blank == self.lines.searched
    }
}

impl RequestHead {
    /// Parses a complete head, as delimited by [`HeadSearch`].
    pub fn parse(raw: Bytes) -> Result<Self, Refused> {
        let mut storage = [const { MaybeUninit::uninit() }; MAX_FIELDS];
        let mut parsed = httparse::Request::new(&mut []);
        let length = parsed.parse_with_uninit_headers(&raw, &mut storage);
        whole(length, raw.len())?;
        let (Some(method), Some(target), Some(version)) =
            (parsed.method, parsed.path, parsed.version)
        else {
            return Err(Refused::Malformed("the request line is incomplete"));
        };
        let (method, target) = (span(&raw, method.as_bytes()), span(&raw, target.as_bytes()));
        let version = Version::parsed(version);
        let spans = Fields::spans(&raw, parsed.headers, version)?;
        let mut fields = Fields { raw, spans };
        if fields.slice(&method).eq_ignore_ascii_case(b"CONNECT") {
            // It opens a tunnel, whatever else it asks for.
            fields.remove(b"upgrade");
        }
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
    /// request than the proxy, so such a request is rejected. So is one with a fragment, which some
    /// servers drop and others read as a part of the path, and one with user information: `http://x@a/`
    /// would evade the routes of the host `a`.
    fn check_target(&self) -> Result<(), Refused> {
        let (method, target) = (self.method(), self.target());
        if target.contains(&b'#') {
            return Err(Refused::Malformed("the target has a fragment"));
        }
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
        if named.is_empty() || !authority::is_text(named) {
            return Err(Refused::Malformed(
                "the target does not name a host, or has user information",
            ));
        }
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
    /// Parses a complete head, as delimited by [`HeadSearch`], of a response to a request with this
    /// method.
    pub fn parse(raw: Bytes, method: &[u8]) -> Result<Self, Refused> {
        let mut storage = [const { MaybeUninit::uninit() }; MAX_FIELDS];
        let mut parsed = httparse::Response::new(&mut []);
        let parser = ParserConfig::default();
        let length = parser.parse_response_with_uninit_headers(&mut parsed, &raw, &mut storage);
        whole(length, raw.len())?;
        let (Some(status), Some(version)) = (parsed.code, parsed.version) else {
            return Err(Refused::Malformed("the status line is incomplete"));
        };
        if status < 100 {
            return Err(Refused::Malformed(
                "the status is not a number from 100 to 999",
            ));
        }
        let reason = reason_phrase(&raw);
        let version = Version::parsed(version);
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

    /// The status of a head that may be incomplete or not valid.
    pub fn status_of(raw: &[u8]) -> Option<u16> {
        let blank = raw.iter().take_while(|byte| b"\r\n".contains(byte));
        let line = raw.get(blank.count()..)?.strip_prefix(b"HTTP/1.")?;
        let status = match line {
            [b'0' | b'1', b' ', status @ .., _] => status.get(..3)?,
            _ => return None,
        };
        let is_number = status.iter().all(u8::is_ascii_digit);
        let is_end = line.get(5).is_some_and(|byte| b" \r".contains(byte));
        let status: u16 = str::from_utf8(status).ok()?.parse().ok()?;
        (is_number && is_end && status >= 100).then_some(status)
    }

    /// Whether the connection may carry another exchange. An upstream also closes it after a request of
    /// HTTP/1.0, which goes on without `Connection: keep-alive`, unless the response has this field.
    pub fn persists_after(&self, request: Version) -> bool {
        self.connection.persists(self.version.min(request))
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
        self.fields.remove(b"transfer-encoding");
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
            put_field(out, b"Connection", connection.as_bytes());
        }
        out.extend_from_slice(b"\r\n");
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

    fn visit_forwarded<'a>(&'a self, each: &mut dyn FnMut(&'a [u8], &'a [u8])) {
        self.fields
            .forwarded()
            .for_each(|(name, value)| each(name, value));
    }
}

/// The scheme and the authority of a target that is a URL.
fn absolute_form(target: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = memmem::find(target, b"://")?;
    let (scheme, rest) = (&target[..end], &target[end + 3..]);
    let named = &rest[..rest
        .iter()
        .position(|byte| b"/?".contains(byte))
        .unwrap_or(rest.len())];
    scheme
        .iter()
        .all(u8::is_ascii_alphanumeric)
        .then_some((scheme, named))
}

/// The reason phrase of a valid head. The parser returns none with a byte above ASCII.
fn reason_phrase(raw: &[u8]) -> Range<u32> {
    let is_end = |byte: &&u8| matches!(byte, b'\r' | b'\n');
    let blank = raw.iter().take_while(is_end).count();
    // The parser also accepts a line that ends with LF alone.
    let end = raw[blank..].iter().position(|byte| is_end(&byte));
    let end = end.map_or(raw.len(), |line| blank + line);
    let start = end.min(blank + "HTTP/1.1 200 ".len());
    start as u32..end as u32
}

/// Whether the parser has read the head to its end.
fn whole(parsed: httparse::Result<usize>, length: usize) -> Result<(), Refused> {
    Err(Refused::Malformed(match parsed {
        Ok(httparse::Status::Complete(read)) if read == length => return Ok(()),
        Err(httparse::Error::TooManyHeaders) => return Err(Refused::TooLarge(TooLarge::Fields)),
        Ok(_) | Err(httparse::Error::NewLine) => "a line ends without CR LF",
        Err(httparse::Error::HeaderName) => "a field's name is not a token",
        Err(httparse::Error::HeaderValue) => "a field's value has a forbidden byte",
        Err(httparse::Error::Version) => "the version is not HTTP/1.0 or HTTP/1.1",
        Err(httparse::Error::Status) => "the status is not a number from 100 to 999",
        Err(httparse::Error::Token) => "the request line has a forbidden byte",
    }))
}
