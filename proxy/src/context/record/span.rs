//! The span of an exchange: of a server inbound, of a client outbound, with the attributes of the
//! semantic conventions.

use std::time::Instant;

use diy_mesh_model::exchange::Direction;
use diy_mesh_proto::otlp::KeyValue;
use diy_mesh_proto::otlp::span::SpanKind;
use diy_mesh_proto::telemetry::{AttributeValue, Tracing};
use http::{HeaderValue, StatusCode, Version};

use super::ExchangeRecord;
use crate::context::flow::Flow;
use crate::http::trace_context::SpanContext;
use crate::http::view::RequestView;
use crate::inbound::policy::Caller;
use crate::labels::{self, OTHER_VALUE};
use crate::limits::memory::Charge;
use crate::observe::dump::mask;
use crate::observe::trace::{EXPORT_PATH, Started, number, size, text};
use crate::upstream::balance::Backend;

/// The length of the values of clients in attributes.
const MAX_TEXT_BYTES: usize = 1024;
/// The span of a request, and its attributes so far.
pub(super) struct RequestSpan {
    started: Started,
    name: String,
    attributes: Vec<KeyValue>,
    memory: Charge,
}

impl RequestSpan {
    /// The span of a request that begins now, if it is sampled and its client has memory left.
    fn new(
        tracing: &Tracing,
        parent: Option<SpanContext>,
        flow: &Flow,
        request: &RequestView<'_>,
        now: Instant,
    ) -> Option<Self> {
        let is_trusted = flow.caller != Caller::Unauthenticated;
        let worker = &flow.worker;
        let started = Started::new(
            tracing,
            parent,
            is_trusted,
            &mut worker.rng.borrow_mut(),
            &worker.metrics.spans,
            now,
        )?;
        let mut span = Self {
            started,
            name: String::new(),
            attributes: vec![],
            memory: flow.charge(),
        };
        span.add_request(flow, request);
        span.add_custom(tracing, request);
        let is_left = span.memory.try_grow(size(&span.name, &span.attributes));
        if !is_left {
            worker.metrics.spans.dropped.inc();
        }
        is_left.then_some(span)
    }

    fn add_request(&mut self, flow: &Flow, request: &RequestView<'_>) {
        let method = labels::method(request.method);
        let is_known = method != OTHER_VALUE;
        self.name = if is_known { method } else { "HTTP" }.to_owned();
        let version = match request.version {
            Version::HTTP_10 => "1.0",
            Version::HTTP_2 => "2",
            _ => "1.1",
        };
        let attributes = &mut self.attributes;
        attributes.push(text("http.request.method", method));
        if !is_known {
            let original = bounded(request.method);
            attributes.push(text("http.request.method_original", original));
        }
        attributes.push(text("url.path", bounded(request.path())));
        attributes.push(text("network.protocol.version", version));
        let (host, port) = server(flow, request);
        attributes.push(text("server.address", host));
        attributes.push(number("server.port", port));
        if request.is_grpc() {
            let method = bounded(request.path().strip_prefix(b"/").unwrap_or_default());
            attributes.push(text("rpc.system.name", "grpc"));
            attributes.push(text("rpc.method", method.clone()));
            self.name = method;
        }
    }

    fn add_custom(&mut self, tracing: &Tracing, request: &RequestView<'_>) {
        for (name, value) in &tracing.attributes {
            let value = match value {
                AttributeValue::Literal(value) => Some(value.clone()),
                // Credentials are masked, and queries, as in dumps.
                AttributeValue::Header(field) => (request.header(field))
                    .map(|value| bounded(&mask::value(field.as_bytes(), value, true))),
            };
            self.attributes.extend(value.map(|value| text(name, value)));
        }
    }
}

impl ExchangeRecord {
    /// Begins the span of a request, before its head is written for the next hop, and counts whether
    /// the application has a trace for it, or has passed one on. Returns its `traceparent`, which never
    /// leaves the cluster. Exports of spans have none.
    pub(super) fn begin_span(
        &mut self,
        backend: &Backend,
        request: &RequestView<'_>,
    ) -> Option<Box<HeaderValue>> {
        let flow = &self.flow;
        let policy = flow.worker.policy();
        let tracing = policy.telemetry.as_ref()?.tracing.as_ref()?;
        if request.path() == EXPORT_PATH.as_bytes() {
            return None;
        }
        let parent = SpanContext::of(request);
        let span = RequestSpan::new(tracing, parent, flow, request, self.ended.started);
        let is_added = flow.direction == Direction::Inbound && span.is_some();
        let metrics = &flow.worker.metrics;
        metrics.trace(flow.direction, is_added || parent.is_some());
        let Some(span) = span else {
            return unsampled(flow, parent);
        };
        let leaves = flow.direction == Direction::Outbound && backend.leaves_cluster();
        let traceparent = (!leaves).then(|| Box::new(span.started.own.traceparent()));
        self.span = Some(Box::new(span));
        traceparent
    }

    /// Queues the span for the exporter. Returns its trace.
    pub(super) fn end_span(&self, span: RequestSpan) -> String {
        let RequestSpan {
            started,
            name,
            mut attributes,
            memory,
        } = span;
        let (status, grpc) = (
            self.ended.status.map(|status| status.as_u16()),
            self.grpc.status(),
        );
        attributes.extend(status.map(|status| number("http.response.status_code", status)));
        if !grpc.is_empty() {
            attributes.push(text("rpc.response.status_code", grpc));
        }
        self.add_ends(&mut attributes);
        let error = self.error();
        if !error.is_empty() {
            attributes.push(text("error.type", error));
        }
        let kind = match self.flow.direction {
            Direction::Inbound => SpanKind::Server,
            Direction::Outbound => SpanKind::Client,
        };
        let (worker, duration) = (&self.flow.worker, self.ended.started.elapsed());
        let trace_id = started.own.trace_id();
        let span = started.finish(name, kind, attributes, !error.is_empty(), duration);
        // From now on, the queue charges the client.
        drop(memory);
        let (client, slot) = (self.flow.holder(), &self.flow.slot);
        worker.spans.add(span, client, slot, &worker.metrics.spans);
        trace_id
    }

    /// The other side of the proxy.
    fn add_ends(&self, attributes: &mut Vec<KeyValue>) {
        let attempt = self.ended.attempt.as_ref();
        let (flow, endpoint) = (&self.flow, attempt.map(|attempt| &attempt.endpoint));
        let address = match flow.direction {
            Direction::Inbound => Some(flow.peer),
            Direction::Outbound => endpoint.map(|endpoint| endpoint.address),
        };
        if let Some(peer) = address {
            let address = peer.ip().to_canonical().to_string();
            if flow.direction == Direction::Inbound {
                attributes.push(text("client.address", address.clone()));
            }
            attributes.push(text("network.peer.address", address));
            attributes.push(number("network.peer.port", peer.port()));
        }
        let peer = self.peer();
        if !peer.name.is_empty() {
            attributes.push(text("service.peer.name", &*peer.name));
            attributes.push(text("service.peer.namespace", &*peer.namespace));
        }
        let is_tls = endpoint.is_some_and(|endpoint| endpoint.server_tls().is_some());
        attributes.push(text("url.scheme", if is_tls { "https" } else { "http" }));
        let attempts = self.ended.attempts;
        if attempts > 1 {
            attributes.push(number("http.request.resend_count", attempts - 1));
        }
    }

    /// The class of the error, as in metrics. For the span of a client, more statuses are errors.
    /// Empty: no error.
    fn error(&self) -> &str {
        let grpc = self.grpc.status();
        let status = self.ended.status.as_ref().map_or("", StatusCode::as_str);
        let is_client = self.flow.direction == Direction::Outbound;
        match self.error_type().value(status, grpc) {
            "" if is_client && !matches!(grpc, "" | "OK") => grpc,
            "" if is_client && status.starts_with('4') => status,
            error => error,
        }
    }
}

/// The parent as the application gets it without a span of the proxy: the application does not
/// sample a request for which an unauthenticated client asks for sampling. `None`: the parent stays
/// as it is.
fn unsampled(flow: &Flow, parent: Option<SpanContext>) -> Option<Box<HeaderValue>> {
    let is_untrusted = flow.caller == Caller::Unauthenticated;
    let parent = parent.filter(|parent| is_untrusted && parent.sampled == Some(true))?;
    let sampled = Some(false);
    Some(Box::new(SpanContext { sampled, ..parent }.traceparent()))
}

/// The host and the port that the request names, or else the original destination.
fn server(flow: &Flow, request: &RequestView<'_>) -> (String, u16) {
    let original = flow.original;
    let Some(authority) = request.authority().map(bounded) else {
        return (original.ip().to_canonical().to_string(), original.port());
    };
    let named = authority.rsplit_once(':');
    let named = named.and_then(|(host, port)| Some((host, port.parse().ok()?)));
    match named {
        Some((host, port)) => (host.to_owned(), port),
        None => (authority, original.port()),
    }
}

/// At most [`MAX_TEXT_BYTES`] of text, without spare capacity. A byte that is not of UTF-8 becomes
/// three.
fn bounded(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_TEXT_BYTES)]);
    text[..text.floor_char_boundary(MAX_TEXT_BYTES)].to_owned()
}
