//! From fields to the heads and trailers of messages, and back (RFC 9113, section 8).

use http::header::{CONNECTION, CONTENT_LENGTH, TE, TRANSFER_ENCODING, UPGRADE};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, request, response};

use crate::hpack::{Encoder, Field};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// The protocol of an extended CONNECT request (RFC 8441, section 4), an extension of its head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Protocol(HeaderValue);

impl Protocol {
    /// The name of the protocol, such as `websocket`.
    pub fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }
}

impl TryFrom<&'static str> for Protocol {
    type Error = http::header::InvalidHeaderValue;

    fn try_from(name: &'static str) -> Result<Self, Self::Error> {
        HeaderValue::from_str(name).map(Self)
    }
}

/// A head or the trailers of a message, as received.
#[derive(Debug)]
pub struct Received<T> {
    /// The fields that were kept.
    pub message: T,
    /// Further fields were dropped, because those before were over the limit.
    pub is_cut: bool,
}

/// The fields of one block, as they arrive.
#[derive(Default)]
pub(crate) struct Section {
    method: Option<Method>,
    scheme: Option<Scheme>,
    authority: Option<Authority>,
    path: Option<PathAndQuery>,
    protocol: Option<HeaderValue>,
    status: Option<StatusCode>,
    fields: HeaderMap,
    /// The size of the fields so far (RFC 9113, section 6.5.2).
    size: usize,
    is_cut: bool,
    malformed: Option<&'static str>,
}

impl Section {
    /// Takes the next field. Returns whether further ones are kept.
    pub fn push(&mut self, field: &Field, size: usize, max_size: usize) -> bool {
        if self.size > max_size {
            self.is_cut = true;
            return false;
        }
        self.size += size;
        match field {
            Field::Method(method) => {
                self.pseudo(|section| section.method.replace(method.clone()).is_some())
            }
            Field::Scheme(scheme) => {
                self.pseudo(|section| section.scheme.replace(scheme.clone()).is_some())
            }
            Field::Authority(authority) => {
                self.pseudo(|section| section.authority.replace(authority.clone()).is_some());
            }
            Field::Path(path) => {
                self.pseudo(|section| section.path.replace(path.clone()).is_some())
            }
            Field::Protocol(protocol) => {
                self.pseudo(|section| section.protocol.replace(protocol.clone()).is_some());
            }
            Field::Status(status) => {
                self.pseudo(|section| section.status.replace(*status).is_some())
            }
            Field::Header(name, value) if is_of_connection(name, value) => {
                self.malformed("a field of the connection, which HTTP/2 does not have");
            }
            Field::Header(name, value) => {
                if self.fields.try_append(name, value.clone()).is_err() {
                    self.is_cut = true;
                }
            }
            Field::Malformed(reason) => self.malformed(reason),
        }
        true
    }

    /// Takes a pseudo-header field. `is_repeated` keeps the field, and tells whether there was one before.
    fn pseudo(&mut self, is_repeated: impl FnOnce(&mut Self) -> bool) {
        if !self.fields.is_empty() {
            self.malformed("a pseudo-header field after other fields");
        }
        if is_repeated(self) {
            self.malformed("a repeated pseudo-header field");
        }
    }

    fn malformed(&mut self, reason: &'static str) {
        self.malformed.get_or_insert(reason);
    }

    /// The head of a request.
    pub fn request(mut self) -> Result<Received<request::Parts>, &'static str> {
        if let Some(reason) = self.malformed {
            return Err(reason);
        }
        if self.status.is_some() {
            return Err("a request with :status");
        }
        let method = self.method.take().ok_or("a request without :method")?;
        let is_connect = method == Method::CONNECT && self.protocol.is_none();
        if is_connect != self.path.is_none() || is_connect != self.scheme.is_none() {
            return Err("a request with a wrong combination of :method, :scheme and :path");
        }
        if self.authority.is_none() && method == Method::CONNECT {
            return Err("CONNECT without :authority");
        }
        if self.protocol.is_some() && method != Method::CONNECT {
            return Err(":protocol in a request other than CONNECT");
        }
        let (mut parts, ()) = http::Request::new(()).into_parts();
        let mut uri = http::uri::Parts::default();
        // A URI has a scheme only with an authority.
        uri.scheme = self.scheme.take().filter(|_| self.authority.is_some());
        uri.authority = self.authority.take();
        uri.path_and_query = self.path.take();
        parts.uri = Uri::from_parts(uri).map_err(|_| ":scheme, :authority and :path are no URI")?;
        parts.method = method;
        parts.version = http::Version::HTTP_2;
        if let Some(protocol) = self.protocol.take() {
            parts.extensions.insert(Protocol(protocol));
        }
        parts.headers = self.fields;
        Ok(Received {
            message: parts,
            is_cut: self.is_cut,
        })
    }

    /// The head of a response.
    pub fn response(self) -> Result<Received<response::Parts>, &'static str> {
        if let Some(reason) = self.malformed {
            return Err(reason);
        }
        let is_of_request = self.method.is_some()
            || self.scheme.is_some()
            || self.authority.is_some()
            || self.path.is_some()
            || self.protocol.is_some();
        if is_of_request {
            return Err("a response with a pseudo-header field of requests");
        }
        let (mut parts, ()) = http::Response::new(()).into_parts();
        parts.status = self.status.ok_or("a response without :status")?;
        if parts.status == StatusCode::SWITCHING_PROTOCOLS {
            return Err("status 101, which HTTP/2 does not have");
        }
        parts.version = http::Version::HTTP_2;
        parts.headers = self.fields;
        Ok(Received {
            message: parts,
            is_cut: self.is_cut,
        })
    }

    /// The trailers of a message.
    pub fn trailers(self) -> Result<Received<HeaderMap>, &'static str> {
        if let Some(reason) = self.malformed {
            return Err(reason);
        }
        let is_head = self.method.is_some()
            || self.scheme.is_some()
            || self.authority.is_some()
            || self.path.is_some()
            || self.protocol.is_some()
            || self.status.is_some();
        if is_head {
            return Err("trailers with a pseudo-header field");
        }
        Ok(Received {
            message: self.fields,
            is_cut: self.is_cut,
        })
    }
}

/// Whether no HTTP/2 message has the field (RFC 9113, section 8.2.2).
fn is_of_connection(name: &HeaderName, value: &HeaderValue) -> bool {
    match name {
        name if *name == TE => !value.as_bytes().eq_ignore_ascii_case(b"trailers"),
        name => [
            CONNECTION,
            TRANSFER_ENCODING,
            UPGRADE,
            KEEP_ALIVE,
            PROXY_CONNECTION,
        ]
        .contains(name),
    }
}

/// The length that the head gives its body. Fails if the field has no such value, or several ones.
pub(crate) fn content_length(fields: &HeaderMap) -> Result<Option<u64>, &'static str> {
    let mut values = fields.get_all(CONTENT_LENGTH).iter();
    let Some(first) = values.next() else {
        return Ok(None);
    };
    if values.any(|other| other != first) {
        return Err("values of Content-Length that differ");
    }
    let text = first
        .to_str()
        .ok()
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    let length = text.and_then(|text| text.parse().ok());
    length
        .map(Some)
        .ok_or("Content-Length is not a number of bytes")
}

/// Appends the fields of a request's head.
pub(crate) fn write_request(encoder: &mut Encoder, head: &request::Parts, out: &mut Vec<u8>) {
    encoder.begin(out);
    encoder.method(&head.method, out);
    let protocol = head.extensions.get::<Protocol>();
    if head.method != Method::CONNECT || protocol.is_some() {
        encoder.scheme(head.uri.scheme().unwrap_or(&Scheme::HTTP), out);
    }
    if let Some(authority) = head.uri.authority() {
        encoder.authority(authority.as_str(), out);
    }
    if head.method != Method::CONNECT || protocol.is_some() {
        let path = head.uri.path_and_query().map_or("/", PathAndQuery::as_str);
        // A URI may have a query without a path.
        let with_slash = path.starts_with('?').then(|| format!("/{path}"));
        encoder.path(with_slash.as_deref().unwrap_or(path), out);
    }
    if let Some(Protocol(protocol)) = protocol {
        encoder.protocol(protocol.as_bytes(), out);
    }
    write_fields(encoder, &head.headers, out);
}

/// Appends the fields of a response's head.
pub(crate) fn write_response(encoder: &mut Encoder, head: &response::Parts, out: &mut Vec<u8>) {
    encoder.begin(out);
    encoder.status(head.status, out);
    write_fields(encoder, &head.headers, out);
}

/// Appends the fields of trailers.
pub(crate) fn write_trailers(encoder: &mut Encoder, fields: &HeaderMap, out: &mut Vec<u8>) {
    encoder.begin(out);
    write_fields(encoder, fields, out);
}

fn write_fields(encoder: &mut Encoder, fields: &HeaderMap, out: &mut Vec<u8>) {
    for (name, value) in fields {
        encoder.header(name, value, out);
    }
}
