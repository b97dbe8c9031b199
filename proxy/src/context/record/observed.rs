//! What the access log has of an exchange, or of a connection, and the span of an exchange. Kept only
//! for pods whose telemetry asks for it.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use diy_mesh_model::access::Entry;
use diy_mesh_model::exchange::{Direction, Protocol, Transfer, milliseconds};
use diy_mesh_proto::telemetry::Telemetry;
use http::HeaderValue;

use super::metrics::tls;
use super::span::RequestSpan;
use super::{ConnectionRecord, ExchangeRecord, remote};
use crate::context::flow::Flow;
use crate::http::view::RequestView;
use crate::observe::dump::{AccessRecord, RequestTarget};
use crate::upstream::balance::{Backend, Endpoint};

/// What is kept of an exchange.
pub(super) struct Observed {
    telemetry: Arc<Telemetry>,
    request: Option<RequestTarget>,
    span: Option<RequestSpan>,
}

impl Observed {
    /// None: nothing asks for it.
    pub fn new(telemetry: &Arc<Telemetry>) -> Option<Box<Self>> {
        let asks = telemetry.access_logs.is_some() || telemetry.tracing.is_some();
        let new = || Self {
            telemetry: telemetry.clone(),
            request: None,
            span: None,
        };
        asks.then(|| Box::new(new()))
    }
}

impl ExchangeRecord {
    /// The request, before its head is written for the next hop. Returns the `traceparent` of its span,
    /// which never leaves the cluster.
    pub(super) fn observe(
        &mut self,
        backend: &Backend,
        request: &RequestView<'_>,
    ) -> Option<Box<HeaderValue>> {
        let (observed, flow) = (self.observed.as_mut()?, &self.flow);
        observed.request = Some(RequestTarget::new(request.method, request.target));
        observed.span = RequestSpan::new(&observed.telemetry, flow, request);
        let span = observed.span.as_ref()?;
        let leaves = flow.direction == Direction::Outbound && backend.leaves_cluster();
        (!leaves).then(|| Box::new(span.started.own.traceparent()))
    }

    /// The exchange has ended.
    pub(super) fn tell_observed(&mut self, ended: Instant) {
        let Some(mut observed) = self.observed.take() else {
            return;
        };
        let span = observed.span.take();
        let trace_id = span.as_ref().map(|span| span.started.own.trace_id());
        if let Some(span) = span {
            self.end_span(span);
        }
        let duration = ended.saturating_duration_since(self.started);
        let (flow, is_failure) = (&self.flow, self.is_failure());
        let (route, backend) = self.rule().unzip();
        let grpc = self.grpc.status();
        let entry = Entry {
            protocol: self.version.into(),
            status: self.status.map(|status| status.as_u16()),
            grpc_status: (!grpc.is_empty()).then_some(grpc),
            failure: self.code(),
            bytes_sent: self.transfer.sent,
            bytes_received: self.transfer.received,
            route: route.map(str::to_owned),
            backend: backend.flatten().map(str::to_owned),
            attempts: self.attempts,
            fault: self.fault.as_deref().map(str::to_owned),
            trace_id,
            id: Some(self.id),
            incomplete: self.is_incomplete().then_some(true),
            ..entry(flow, self.endpoint.as_ref(), duration)
        };
        let Observed {
            telemetry, request, ..
        } = *observed;
        log(flow, telemetry, (entry, is_failure), request, self.started);
    }
}

impl ConnectionRecord {
    /// The connection has ended.
    pub(super) fn log_access(&self, telemetry: Arc<Telemetry>) {
        if self.copied.is_none() && self.failure.is_none() {
            return;
        }
        let Transfer { sent, received } = self.copied.unwrap_or_default();
        let entry = Entry {
            failure: self.failure.as_ref().map(|cause| cause.code),
            bytes_sent: sent,
            bytes_received: received,
            attempts: self.endpoint.is_some().into(),
            ..entry(&self.flow, self.endpoint.as_ref(), self.started.elapsed())
        };
        let is_failure = self.failure.is_some();
        log(
            &self.flow,
            telemetry,
            (entry, is_failure),
            None,
            self.started,
        );
    }
}

/// An entry about a connection that carries no HTTP.
fn entry(flow: &Flow, endpoint: Option<&Rc<Endpoint>>, duration: Duration) -> Entry {
    let tls = tls(flow, endpoint).name();
    let remote = remote(flow, endpoint.map(Rc::as_ref));
    Entry {
        time: String::new(),
        duration_ms: milliseconds(duration),
        direction: flow.direction,
        protocol: Protocol::Tcp,
        method: None,
        path: None,
        status: None,
        grpc_status: None,
        failure: None,
        bytes_sent: 0,
        bytes_received: 0,
        peer: flow.peer,
        identity: remote.identity,
        destination: flow.original,
        route: None,
        backend: None,
        endpoint: remote.endpoint,
        attempts: 0,
        tls,
        fault: None,
        trace_id: None,
        id: None,
        incomplete: None,
    }
}

/// Writes a line, unless only failures have one.
fn log(
    flow: &Flow,
    telemetry: Arc<Telemetry>,
    (entry, is_failure): (Entry, bool),
    request: Option<RequestTarget>,
    started: Instant,
) {
    let is_logged = |failures: bool| !failures || is_failure;
    let logs = telemetry.access_logs.as_ref();
    if logs.is_some_and(|logs| is_logged(logs.failures)) {
        let started = SystemTime::now().checked_sub(started.elapsed());
        flow.worker.dumps.access(AccessRecord {
            telemetry,
            entry,
            started: started.unwrap_or(SystemTime::UNIX_EPOCH),
            request,
        });
    }
}
