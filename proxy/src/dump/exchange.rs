//! What a dump shows of one exchange, in bounded memory. `record.rs` fills it; on drop it goes to
//! the writer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use http::{StatusCode, Version};

use super::body::Body;
use super::{ConnectionInfo, Message, Mode, Shared};
use crate::http::edits::Edits;
use crate::http::view::{self, RequestView};

/// Maximum size of the recorded fields of one message.
const MAX_FIELDS: usize = 16 * 1024;
/// Maximum size of a recorded start line.
const MAX_START_LINE: usize = 4 * 1024;
/// Age at which an open exchange is dumped, so that long-lived streams are visible.
pub(super) const MAX_OPEN_TIME: Duration = Duration::from_secs(10);

/// Dump of one exchange, written on drop. If request or response are incomplete by then, the dump
/// reports that.
pub struct ExchangeDump {
    shared: Arc<Shared>,
    /// `None` after it is written.
    record: Option<Box<Record>>,
    pub(super) started: Instant,
}

/// Recorded data of an exchange.
pub(crate) struct Record {
    pub time: SystemTime,
    pub duration: Duration,
    pub connection: ConnectionInfo,
    /// Endpoint of an outbound exchange.
    pub endpoint: Option<SocketAddr>,
    /// The route, and its backend if it chose one.
    pub route: Option<(String, Option<String>)>,
    /// The policy of a fault, and the delay.
    pub fault: Option<(String, Option<Duration>)>,
    /// Identity of the caller or of the endpoint. `None` without mutual TLS.
    pub identity: Option<String>,
    /// It came by HTTP/2, not HTTP/1.
    pub http2: bool,
    pub request: Part,
    pub response: Part,
    /// Code and message of an error of the proxy.
    pub failure: Option<(&'static str, String)>,
    /// Why the exchange was aborted, if known.
    pub cut_off: Option<String>,
    /// Bytes sent and received after a protocol upgrade.
    pub upgraded: Option<(u64, u64)>,
    /// Whether the exchange was open when written.
    pub open: bool,
}

/// A request or a response.
#[derive(Default)]
pub(crate) struct Part {
    /// Whether query strings are masked.
    pub masks_queries: bool,
    pub start_line: Vec<u8>,
    pub fields: Fields,
    pub body: Body,
    pub trailers: Fields,
    pub ended: bool,
}

/// Header or trailer fields in their original order.
#[derive(Default)]
pub(crate) struct Fields {
    pub kept: Vec<(Vec<u8>, Vec<u8>)>,
    pub omitted: usize,
    size: usize,
}

impl ExchangeDump {
    pub(super) fn new(shared: Arc<Shared>, connection: ConnectionInfo) -> Self {
        let keeps = shared.mode == Mode::Full;
        let part = || Part {
            body: Body::new(keeps),
            masks_queries: !keeps,
            ..Part::default()
        };
        let record = Record {
            time: SystemTime::now(),
            duration: Duration::ZERO,
            connection,
            endpoint: None,
            route: None,
            fault: None,
            identity: None,
            http2: false,
            request: part(),
            response: part(),
            failure: None,
            cut_off: None,
            upgraded: None,
            open: false,
        };
        Self {
            shared,
            record: Some(Box::new(record)),
            started: Instant::now(),
        }
    }

    /// Fills the record, until it is written.
    pub(crate) fn fill(&mut self, fill: impl FnOnce(&mut Record)) {
        if let Some(record) = &mut self.record {
            fill(record);
        }
    }

    /// Records bytes of the request body.
    pub fn request_body(&mut self, bytes: &[u8]) {
        self.fill(|record| record.request.body.append(bytes));
        self.write_if_long_lived();
    }

    /// Records bytes of the response body.
    pub fn response_body(&mut self, bytes: &[u8]) {
        self.fill(|record| record.response.body.append(bytes));
        self.write_if_long_lived();
    }

    fn write_if_long_lived(&mut self) {
        if self.started.elapsed() > MAX_OPEN_TIME {
            self.write(true);
        }
    }

    fn write(&mut self, open: bool) {
        let Some(mut record) = self.record.take() else {
            return;
        };
        record.duration = self.started.elapsed();
        record.open = open;
        self.shared.release();
        self.shared.send(Message::Exchange(record));
    }
}

impl Drop for ExchangeDump {
    fn drop(&mut self) {
        self.write(false);
    }
}

impl Record {
    /// The head of a request as it is sent: fields in original order and case, after `edits`.
    pub fn request_head(&mut self, request: &RequestView<'_>, edits: Edits<'_>) {
        self.http2 = request.version == Version::HTTP_2;
        let authority = request.authority().unwrap_or(b"*");
        // The target of CONNECT is an authority.
        let target = match edits.target.unwrap_or(request.target) {
            b"" => authority,
            target => target,
        };
        let version = match self.http2 {
            true => "HTTP/2".to_owned(),
            false => format!("{:?}", request.version),
        };
        let line = [request.method, b" ", target, b" ", version.as_bytes()].concat();
        let mut fields = pairs(request.head);
        if self.http2 && request.header("host").is_none() && request.authority().is_some() {
            fields.insert(0, (b"host", authority));
        }
        self.request.head(&line, edits.fields(fields.into_iter()));
    }

    /// The head of a response, after `edits`.
    pub fn response_head(
        &mut self,
        status: StatusCode,
        reason: &[u8],
        fields: &dyn view::Fields,
        edits: Edits<'_>,
    ) {
        let status = status.as_str().as_bytes();
        let line = match self.http2 {
            true => [b"HTTP/2 ", status].concat(),
            false => [b"HTTP/1.1 ", status, b" ", reason].concat(),
        };
        let fields = edits.fields(pairs(fields).into_iter());
        self.response.head(&line, fields);
    }

    /// Why the exchange is incomplete; `None` if it is complete.
    pub fn incomplete(&self) -> Option<&str> {
        if self.open {
            return Some("still open; what follows is not shown");
        }
        if let Some(reason) = &self.cut_off {
            return Some(reason);
        }
        if self.failure.is_some() || self.upgraded.is_some() {
            return None;
        }
        match (
            self.response.start_line.is_empty(),
            self.request.ended,
            self.response.ended,
        ) {
            (true, false, _) => Some("cut off before the request ended"),
            (true, true, _) => Some("cut off before the response began"),
            (false, _, false) => Some("cut off before the response ended"),
            (false, false, true) => Some("answered before the request ended"),
            (false, true, true) => None,
        }
    }
}

impl Part {
    /// Records the trailers.
    pub fn set_trailers(&mut self, fields: &dyn view::Fields) {
        self.trailers.extend(pairs(fields));
    }

    fn head<'a>(
        &mut self,
        start_line: &[u8],
        fields: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
    ) {
        self.start_line = start_line[..start_line.len().min(MAX_START_LINE)].to_vec();
        self.fields = Fields::default();
        self.fields.extend(fields);
        if self.is_grpc() {
            self.body.count_messages();
        }
    }

    /// Value of the first field with this name.
    pub fn field(&self, name: &str) -> Option<&[u8]> {
        self.fields.get(name)
    }

    fn is_grpc(&self) -> bool {
        let kind = self.field("content-type").unwrap_or_default();
        kind.starts_with(b"application/grpc") && !kind.starts_with(b"application/grpc-web-text")
    }
}

impl Fields {
    fn extend<'a>(&mut self, fields: impl IntoIterator<Item = (&'a [u8], &'a [u8])>) {
        for (name, value) in fields {
            self.size += name.len() + value.len();
            if self.size <= MAX_FIELDS {
                self.kept.push((name.to_vec(), value.to_vec()));
            } else {
                self.omitted += 1;
            }
        }
    }

    /// Value of the first field with this name.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        let (_, value) = self
            .kept
            .iter()
            .find(|(kept, _)| kept.eq_ignore_ascii_case(name.as_bytes()))?;
        Some(value)
    }
}

/// Fields as pairs of name and value.
fn pairs(fields: &dyn view::Fields) -> Vec<(&[u8], &[u8])> {
    let mut pairs = Vec::new();
    fields.visit(&mut |name, value| pairs.push((name, value)));
    pairs
}
