//! The record of one exchange: filled on the worker as the bytes pass, in bounded memory, and handed to the writer when it
//! is dropped. It formats nothing.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::body::Body;
use super::{ConnectionInfo, Message, Mode, Shared};
use crate::error::Failure;

/// Bytes of names and values that are kept of one head.
const HEAD_LIMIT: usize = 16 * 1024;
/// Bytes that are kept of a start line.
const START_LINE_LIMIT: usize = 4 * 1024;
/// An exchange that is open for longer is written as it stands: a stream that never ends is seen, too.
const OPEN_LIMIT: Duration = Duration::from_secs(10);

/// One exchange that will be dumped. What both paths know of it they tell this; dropping it ends the record, and a record
/// that ends before its request and its response did says that the exchange was cut off.
pub struct ExchangeDump {
    shared: Arc<Shared>,
    /// `None` once it is written.
    record: Option<Box<Record>>,
    started: Instant,
}

/// What is known of an exchange.
pub(super) struct Record {
    pub time: SystemTime,
    pub duration: Duration,
    pub connection: ConnectionInfo,
    pub protocol: &'static str,
    pub request: Part,
    pub response: Part,
    /// The proxy's own error: its code, and what it says.
    pub failure: Option<(&'static str, String)>,
    /// Why it ended early, where somebody said why.
    pub cut_off: Option<String>,
    /// The connection became a tunnel: bytes sent and received since.
    pub upgraded: Option<(u64, u64)>,
    /// Written before it ended.
    pub open: bool,
}

/// The request or the response.
#[derive(Default)]
pub(super) struct Part {
    pub start_line: Vec<u8>,
    pub fields: Fields,
    pub body: Body,
    pub trailers: Fields,
    pub ended: bool,
}

/// Header or trailer fields in the order in which they came.
#[derive(Default)]
pub(super) struct Fields {
    pub kept: Vec<(Vec<u8>, Vec<u8>)>,
    pub omitted: usize,
    size: usize,
}

impl ExchangeDump {
    pub(super) fn new(shared: Arc<Shared>, connection: ConnectionInfo) -> Self {
        let keeps = shared.mode == Mode::Full;
        let part = || Part {
            body: Body::new(keeps),
            ..Part::default()
        };
        let record = Record {
            time: SystemTime::now(),
            duration: Duration::ZERO,
            connection,
            protocol: "http1",
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

    /// The request's head in HTTP/1: the start line and the fields as they were sent, in their order and case.
    pub fn request_head<'a>(
        &mut self,
        start_line: &[u8],
        fields: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
    ) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.request.head(start_line, fields);
    }

    /// The request's head in HTTP/2.
    pub fn request_parts(&mut self, parts: &http::request::Parts) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.protocol = "http2";
        let path = parts.uri.path_and_query().map_or("", |path| path.as_str());
        let authority = parts
            .uri
            .authority()
            .map(|authority| ("host".as_bytes(), authority.as_str().as_bytes()));
        let target = if path.is_empty() {
            parts
                .uri
                .authority()
                .map_or("*", |authority| authority.as_str())
        } else {
            path
        };
        let line = format!("{} {target} HTTP/2", parts.method);
        record.request.head(
            line.as_bytes(),
            authority.into_iter().chain(pairs(&parts.headers)),
        );
    }

    /// Bytes of the request's body.
    pub fn request_body(&mut self, bytes: &[u8]) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.request.body.append(bytes);
        self.write_if_open_for_long();
    }

    /// Fields after the request's body.
    pub fn request_trailers<'a>(&mut self, fields: impl IntoIterator<Item = (&'a [u8], &'a [u8])>) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.request.trailers.extend(fields);
    }

    /// The request was sent whole.
    pub fn request_end(&mut self) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.request.ended = true;
    }

    /// The response's head in HTTP/1. A head that follows another (100 Continue) takes its place.
    pub fn response_head<'a>(
        &mut self,
        start_line: &[u8],
        fields: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
    ) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.response.head(start_line, fields);
    }

    /// The response's head in HTTP/2.
    pub fn response_parts(&mut self, parts: &http::response::Parts) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.response.head(
            format!("HTTP/2 {}", parts.status.as_u16()).as_bytes(),
            pairs(&parts.headers),
        );
    }

    /// The answer that the proxy made by itself.
    pub fn response_answer(&mut self, head: &http::Response<()>, body: &[u8]) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.response.head(
            format!("HTTP/2 {}", head.status().as_u16()).as_bytes(),
            pairs(head.headers()),
        );
        record.response.body.append(body);
    }

    /// Bytes of the response's body.
    pub fn response_body(&mut self, bytes: &[u8]) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.response.body.append(bytes);
        self.write_if_open_for_long();
    }

    /// Fields after the response's body.
    pub fn response_trailers<'a>(
        &mut self,
        fields: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
    ) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.response.trailers.extend(fields);
    }

    /// The response was received whole.
    pub fn response_end(&mut self) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.response.ended = true;
    }

    /// The proxy answers by itself, because of this. Its answer is told by `response_head` and the like.
    pub fn failure(&mut self, failure: &Failure) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.failure = Some((failure.code(), failure.to_string()));
    }

    /// The exchange ends before its time, because of this.
    pub fn cut_off(&mut self, reason: &str) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.cut_off = Some(reason.to_owned());
    }

    /// The connection had become a tunnel (WebSocket, CONNECT) and is over: the bytes that the client sent and received.
    pub fn upgraded(&mut self, sent: u64, received: u64) {
        let Some(record) = &mut self.record else {
            return;
        };
        record.upgraded = Some((sent, received));
    }

    fn write_if_open_for_long(&mut self) {
        if self.started.elapsed() > OPEN_LIMIT {
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
    /// What to say of an exchange that did not come to its end; `None` for one that did.
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
    fn head<'a>(
        &mut self,
        start_line: &[u8],
        fields: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
    ) {
        self.start_line = start_line[..start_line.len().min(START_LINE_LIMIT)].to_vec();
        self.fields = Fields::default();
        self.fields.extend(fields);
        if self.is_grpc() {
            self.body.count_messages();
        }
    }

    /// The value of the first field of that name.
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
            if self.size <= HEAD_LIMIT {
                self.kept.push((name.to_vec(), value.to_vec()));
            } else {
                self.omitted += 1;
            }
        }
    }

    /// The value of the first field of that name.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        let (_, value) = self
            .kept
            .iter()
            .find(|(kept, _)| kept.eq_ignore_ascii_case(name.as_bytes()))?;
        Some(value)
    }
}

/// A header map's fields as the setters take them.
pub fn pairs(headers: &http::HeaderMap) -> impl Iterator<Item = (&[u8], &[u8])> {
    headers
        .iter()
        .map(|(name, value)| (name.as_str().as_bytes(), value.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dump::{Direction, Dumps};

    #[test]
    fn a_stream_that_goes_on_and_on_is_written_as_it_stands() {
        let (dumps, output) = Dumps::recorded();
        let address = "10.0.0.9:8080".parse().unwrap();
        let mut dump = dumps
            .exchange(&ConnectionInfo {
                direction: Direction::Outbound,
                peer: address,
                destination: address,
            })
            .unwrap();
        dump.request_head(b"GET /watch HTTP/1.1", []);
        dump.request_end();
        dump.response_head(b"HTTP/1.1 200 OK", []);
        dump.response_body(b"first");
        dump.started -= OPEN_LIMIT + Duration::from_secs(1);
        dump.response_body(b", second");
        dump.response_body(b", third");
        dumps.flush(Duration::from_secs(20));
        let written = output.lock().unwrap().clone();
        assert!(
            written.ends_with("first, second\n\n[still open; what follows is not shown]\n\n"),
            "{written}"
        );
        drop(dump);
        dumps.flush(Duration::from_secs(20));
        assert_eq!(*output.lock().unwrap(), written, "it is written once");
    }
}
