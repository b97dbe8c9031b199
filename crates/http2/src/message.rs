//! From fields to the heads and trailers of messages, and back (RFC 9113, section 8).

use std::fmt;

use http::header::CONTENT_LENGTH;
use http::uri::{PathAndQuery, Scheme};
use http::{Method, StatusCode, request, response};

use crate::fields::{Fields, Text};
use crate::hpack::{Encoder, Field, Kind, is_path};

/// The maximum length of a path of this side, as in the crate `http`.
const MAX_PATH: usize = u16::MAX as usize - 1;

/// The head of a request.
#[derive(Clone)]
pub struct Request {
    /// GET, POST, ...
    pub method: Method,
    /// http or https. `None` for CONNECT.
    pub scheme: Option<Scheme>,
    /// The header fields.
    pub fields: Fields,
    authority: Option<Text>,
    path: Option<Text>,
    protocol: Option<Text>,
}

/// The head of a response.
#[derive(Clone, Debug, PartialEq)]
pub struct Response {
    /// The status.
    pub status: StatusCode,
    /// The header fields.
    pub fields: Fields,
}

impl Request {
    /// `:authority`.
    pub fn authority(&self) -> Option<&[u8]> {
        self.authority.map(|text| self.fields.text(text))
    }

    /// `:path`, with the query. `None` for CONNECT.
    pub fn path(&self) -> Option<&[u8]> {
        self.path.map(|text| self.fields.text(text))
    }

    /// The protocol of an extended CONNECT request (RFC 8441, section 4), such as `websocket`.
    pub fn protocol(&self) -> Option<&[u8]> {
        self.protocol.map(|text| self.fields.text(text))
    }

    /// Changes `:authority`.
    pub fn set_authority(&mut self, authority: &http::uri::Authority) {
        self.authority = Some(self.fields.keep(authority.as_str().as_bytes()));
    }

    /// Changes `:path`. Returns false, without a change, if no request can have this path.
    #[must_use]
    pub fn set_path(&mut self, path: &[u8]) -> bool {
        let is_valid = path.len() <= MAX_PATH && is_path(path);
        if is_valid {
            self.path = Some(self.fields.keep(path));
        }
        is_valid
    }

    /// Makes a request to `http://` an extended CONNECT request for this protocol.
    #[cfg(test)]
    pub(crate) fn set_protocol(&mut self, protocol: &'static str) {
        self.method = Method::CONNECT;
        self.protocol = Some(self.fields.keep(protocol.as_bytes()));
    }
}

impl From<&request::Parts> for Request {
    fn from(parts: &request::Parts) -> Self {
        let mut fields = Fields::from(&parts.headers);
        let authority = parts.uri.authority();
        let authority = authority.map(|authority| fields.keep(authority.as_str().as_bytes()));
        // A URI may have a query without a path.
        let path = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
        let slash = if path.starts_with('?') { "/" } else { "" };
        let path = fields.keep(&[slash, path].concat().into_bytes());
        let scheme = parts.uri.scheme().cloned().unwrap_or(Scheme::HTTP);
        let has_path = parts.method != Method::CONNECT;
        Self {
            method: parts.method.clone(),
            scheme: has_path.then_some(scheme),
            fields,
            authority,
            path: has_path.then_some(path),
            protocol: None,
        }
    }
}

impl From<&response::Parts> for Response {
    fn from(parts: &response::Parts) -> Self {
        Self {
            status: parts.status,
            fields: Fields::from(&parts.headers),
        }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text =
            |text: Option<&[u8]>| text.map(|text| String::from_utf8_lossy(text).into_owned());
        f.debug_struct("Request")
            .field("method", &self.method)
            .field("scheme", &self.scheme)
            .field("authority", &text(self.authority()))
            .field("path", &text(self.path()))
            .field("protocol", &text(self.protocol()))
            .field("fields", &self.fields)
            .finish()
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
    authority: Option<Text>,
    path: Option<Text>,
    protocol: Option<Text>,
    status: Option<StatusCode>,
    fields: Fields,
    /// The size of the fields so far (RFC 9113, section 6.5.2).
    size: usize,
    is_cut: bool,
    malformed: Option<&'static str>,
}

impl Section {
    /// Takes the next field. Returns whether further ones are kept.
    pub fn push(&mut self, field: &Field<'_>, max_size: usize) -> bool {
        if self.size > max_size {
            self.is_cut = true;
            return false;
        }
        self.size += field.size();
        let value = field.value;
        let is_repeated = match field.kind {
            Kind::Header | Kind::Te => {
                self.fields.append(field.name, value, field.is_sensitive);
                return true;
            }
            Kind::Malformed(reason) => {
                self.malformed(reason);
                return true;
            }
            Kind::Method => {
                let method = Method::from_bytes(value).ok();
                std::mem::replace(&mut self.method, method).is_some()
            }
            Kind::Scheme => {
                let scheme = Scheme::try_from(value).ok();
                std::mem::replace(&mut self.scheme, scheme).is_some()
            }
            Kind::Status => {
                let status = StatusCode::from_bytes(value).ok();
                std::mem::replace(&mut self.status, status).is_some()
            }
            Kind::Authority => self.authority.replace(self.fields.keep(value)).is_some(),
            Kind::Path => self.path.replace(self.fields.keep(value)).is_some(),
            Kind::Protocol => self.protocol.replace(self.fields.keep(value)).is_some(),
        };
        if is_repeated {
            self.malformed("a repeated pseudo-header field");
        }
        if !self.fields.is_empty() {
            self.malformed("a pseudo-header field after other fields");
        }
        true
    }

    fn malformed(&mut self, reason: &'static str) {
        self.malformed.get_or_insert(reason);
    }

    /// The head of a request.
    pub fn request(self) -> Result<Received<Request>, &'static str> {
        if let Some(reason) = self.malformed {
            return Err(reason);
        }
        if self.status.is_some() {
            return Err("a request with :status");
        }
        let method = self.method.ok_or("a request without :method")?;
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
        Ok(Received {
            message: Request {
                method,
                scheme: self.scheme,
                fields: self.fields,
                authority: self.authority,
                path: self.path,
                protocol: self.protocol,
            },
            is_cut: self.is_cut,
        })
    }

    /// The head of a response.
    pub fn response(self) -> Result<Received<Response>, &'static str> {
        if let Some(reason) = self.malformed {
            return Err(reason);
        }
        if self.is_of_request() {
            return Err("a response with a pseudo-header field of requests");
        }
        let status = self.status.ok_or("a response without :status")?;
        if status == StatusCode::SWITCHING_PROTOCOLS {
            return Err("status 101, which HTTP/2 does not have");
        }
        Ok(Received {
            message: Response {
                status,
                fields: self.fields,
            },
            is_cut: self.is_cut,
        })
    }

    /// The trailers of a message.
    pub fn trailers(self) -> Result<Received<Fields>, &'static str> {
        if let Some(reason) = self.malformed {
            return Err(reason);
        }
        if self.is_of_request() || self.status.is_some() {
            return Err("trailers with a pseudo-header field");
        }
        Ok(Received {
            message: self.fields,
            is_cut: self.is_cut,
        })
    }

    fn is_of_request(&self) -> bool {
        self.method.is_some()
            || self.scheme.is_some()
            || self.authority.is_some()
            || self.path.is_some()
            || self.protocol.is_some()
    }
}

/// The length that the head gives its body. Fails if the field has no such value, or several ones.
pub(crate) fn content_length(fields: &Fields) -> Result<Option<u64>, &'static str> {
    let mut values = fields.get_all(CONTENT_LENGTH.as_str());
    let Some(first) = values.next() else {
        return Ok(None);
    };
    if values.any(|other| other != first) {
        return Err("values of Content-Length that differ");
    }
    let is_number = !first.is_empty() && first.iter().all(u8::is_ascii_digit);
    let text = str::from_utf8(first).ok().filter(|_| is_number);
    let length = text.and_then(|text| text.parse().ok());
    length
        .map(Some)
        .ok_or("Content-Length is not a number of bytes")
}

/// Appends the fields of a request's head.
pub(crate) fn write_request(encoder: &mut Encoder, head: &Request, out: &mut Vec<u8>) {
    encoder.begin(out);
    encoder.field(b":method", head.method.as_str().as_bytes(), false, out);
    let scheme = head
        .scheme
        .as_ref()
        .map(|scheme| scheme.as_str().as_bytes());
    let pseudo: [(&[u8], _); 4] = [
        (b":scheme", scheme),
        (b":authority", head.authority()),
        (b":path", head.path()),
        (b":protocol", head.protocol()),
    ];
    for (name, value) in pseudo {
        if let Some(value) = value {
            encoder.field(name, value, false, out);
        }
    }
    write_fields(encoder, &head.fields, out);
}

/// Appends the fields of a response's head.
pub(crate) fn write_response(encoder: &mut Encoder, head: &Response, out: &mut Vec<u8>) {
    encoder.begin(out);
    encoder.field(b":status", head.status.as_str().as_bytes(), false, out);
    write_fields(encoder, &head.fields, out);
}

/// Appends the fields of trailers.
pub(crate) fn write_trailers(encoder: &mut Encoder, fields: &Fields, out: &mut Vec<u8>) {
    encoder.begin(out);
    write_fields(encoder, fields, out);
}

fn write_fields(encoder: &mut Encoder, fields: &Fields, out: &mut Vec<u8>) {
    for (name, value, is_sensitive) in fields.with_sensitivity() {
        encoder.field(name, value, is_sensitive, out);
    }
}
