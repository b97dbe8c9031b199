//! The part of the messages of one exchange that a dump shows, in bounded memory. `record.rs` fills
//! it and sends it to the writer, which masks it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use diy_mesh_model::escape;
use diy_mesh_model::exchange::{self as model, Exchange, STILL_OPEN};
use diy_mesh_proto::telemetry::{DumpFilter, Telemetry};
use http::{StatusCode, Version};

use super::body::{Body, Shown};
use super::{Message, Mode, Shared, filter_of, mask};
use crate::http::edits::Edits;
use crate::http::view::{self, RequestView};
use crate::observe::ended::Ended;

/// Maximum size of the recorded fields of one message.
const MAX_FIELDS: usize = 16 * 1024;
/// Maximum size of a recorded start line.
const MAX_START_LINE: usize = 4 * 1024;
/// Age at which an open exchange is dumped, so that long-lived streams are visible.
pub(super) const MAX_OPEN_TIME: Duration = Duration::from_secs(10);

/// Dump of one exchange. If request or response are incomplete when it is written, it reports that.
pub struct ExchangeDump {
    shared: Arc<Shared>,
    /// With a filter: it has not used the budget yet.
    filtered: Option<Arc<Telemetry>>,
    /// `None` after it is written.
    record: Option<Box<Record>>,
    pub(super) started: Instant,
}

/// Recorded data of an exchange.
pub(crate) struct Record {
    is_http2: bool,
    pub request: Part,
    pub response: Part,
    /// Why the exchange was aborted, if known.
    pub cut_off: Option<String>,
    /// The status of the response.
    pub status: Option<u16>,
    /// Whether the exchange was open when written.
    open: bool,
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
    pub(super) fn new(shared: Arc<Shared>, mode: Mode, filtered: Option<Arc<Telemetry>>) -> Self {
        let keeps = mode == Mode::Full;
        let part = || Part {
            body: Body::new(keeps),
            masks_queries: !keeps,
            ..Part::default()
        };
        let record = Record {
            is_http2: false,
            request: part(),
            response: part(),
            cut_off: None,
            status: None,
            open: false,
        };
        Self {
            shared,
            filtered,
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

    /// Records the head of a request, if the filter has its path.
    pub(crate) fn request_head(&mut self, request: &RequestView<'_>, edits: Edits<'_>) {
        let filter = self.filter();
        if filter.is_none_or(|filter| filter.has_path(request.path())) {
            self.fill(|record| record.request_head(request, edits));
        } else if self.record.take().is_some() {
            self.shared.release();
        }
    }

    fn filter(&self) -> Option<&DumpFilter> {
        filter_of(self.filtered.as_ref()?)
    }

    /// Whether the filter has the exchange. One without a request has no path.
    fn passes(&self, record: &Record) -> bool {
        self.filter().is_none_or(|filter| {
            let has_path = filter.path.is_none() || !record.request.start_line.is_empty();
            has_path && filter.has_result(record.status, self.started.elapsed())
        })
    }

    /// Whether it is to be written although the exchange is open.
    pub fn is_long_lived(&self) -> bool {
        self.record.is_some() && self.started.elapsed() > MAX_OPEN_TIME
    }

    /// Writes it once, with what else is known of the exchange, which may still be `open`.
    pub fn write(&mut self, ended: &Arc<Ended>, open: bool) {
        let Some(mut record) = self.record.take() else {
            return;
        };
        let passes = self.passes(&record);
        if !passes && open {
            self.record = Some(record);
            return;
        }
        if !passes || (self.filtered.is_some() && !self.shared.take_budget()) {
            return self.shared.release();
        }
        record.open = open;
        self.shared.release();
        self.shared.send(Message::Exchange(record, ended.clone()));
    }
}

impl Drop for ExchangeDump {
    fn drop(&mut self) {
        if self.record.take().is_some() {
            self.shared.release();
        }
    }
}

impl Record {
    /// The head of a request as it is sent: fields in original order and case, after `edits`.
    pub fn request_head(&mut self, request: &RequestView<'_>, edits: Edits<'_>) {
        if request.version == Version::HTTP_2 {
            self.is_http2 = true;
        }
        let authority = request.authority().unwrap_or(b"*");
        // The target of CONNECT is an authority.
        let target = match edits.target.unwrap_or(request.target) {
            b"" => authority,
            target => target,
        };
        let version = if self.is_http2 {
            "HTTP/2".to_owned()
        } else {
            format!("{:?}", request.version)
        };
        let line = [request.method, b" ", target, b" ", version.as_bytes()].concat();
        let mut fields = pairs(request.head);
        if self.is_http2 && request.header("host").is_none() && request.authority().is_some() {
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
        self.status = Some(status.as_u16());
        let status = status.as_str().as_bytes();
        let line = if self.is_http2 {
            [b"HTTP/2 ", status].concat()
        } else {
            [b"HTTP/1.1 ", status, b" ", reason].concat()
        };
        let fields = edits.fields(pairs(fields).into_iter());
        self.response.head(&line, fields);
    }

    /// The complete record, with masks: what the exchange shares with other connections, and its
    /// messages.
    pub(super) fn finish(self, exchange: Exchange) -> Exchange {
        let is_over = exchange.failure.is_some() || exchange.upgraded.is_some();
        let incomplete = self.incomplete(is_over).map(str::to_owned);
        Exchange {
            request: self.request.shown(),
            response: self.response.shown(),
            incomplete,
            ..exchange
        }
    }

    /// Why the exchange is incomplete; `None` if it is complete, or is over for another reason.
    fn incomplete(&self, is_over: bool) -> Option<&str> {
        if self.open {
            return Some(STILL_OPEN);
        }
        if let Some(reason) = &self.cut_off {
            return Some(reason);
        }
        if is_over {
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

    /// The message with masks; `None` without a header.
    fn shown(&self) -> Option<model::Part> {
        if self.start_line.is_empty() {
            return None;
        }
        let (body, body_kind, messages) = match self.body.shown(self.field("content-encoding")) {
            Shown::Nothing => (None, None, None),
            Shown::Text { text, .. } => (Some(text.to_owned()), Some("text"), None),
            Shown::Named { kind, .. } => (None, Some(kind), None),
            Shown::Messages { messages, .. } => (None, Some("grpc"), Some(messages)),
        };
        Some(model::Part {
            start_line: escaped(&mask::start_line(&self.start_line, self.masks_queries)),
            headers: self.fields.shown(self.masks_queries),
            headers_omitted: self.fields.omitted,
            body_bytes: self.body.total(),
            body,
            body_kind: body_kind.map(str::to_owned),
            messages,
            trailers: self.trailers.shown(self.masks_queries),
        })
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

    fn shown(&self, masks_queries: bool) -> Vec<(String, String)> {
        let shown = |(name, value): &(Vec<u8>, Vec<u8>)| {
            let value = mask::value(name, value, masks_queries);
            (escaped(name), escaped(&value))
        };
        self.kept.iter().map(shown).collect()
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

fn escaped(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    escape::line(bytes, &mut out);
    out
}
