//! What the access log has of an exchange, or of a connection. Kept only for pods whose telemetry
//! asks for it.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use diy_mesh_model::access::Entry;
use diy_mesh_model::exchange::{Direction, Protocol, milliseconds};
use diy_mesh_proto::telemetry::Telemetry;

use super::{ConnectionRecord, ExchangeRecord, remote};
use crate::context::flow::Flow;
use crate::http::view::{Fields, RequestView};
use crate::observe::dump::{AccessRecord, RequestTarget};
use crate::protocol::HttpVersion;
use crate::upstream::balance::Endpoint;

/// What is kept of an exchange.
pub(super) struct Observed {
    telemetry: Arc<Telemetry>,
    request: Option<RequestTarget>,
    grpc_status: Option<u32>,
    /// The response has ended, or became a tunnel.
    is_complete: bool,
}

impl Observed {
    /// None: nothing asks for it.
    pub fn new(telemetry: &Arc<Telemetry>) -> Option<Box<Self>> {
        telemetry.access_logs.as_ref()?;
        Some(Box::new(Self {
            telemetry: telemetry.clone(),
            request: None,
            grpc_status: None,
            is_complete: false,
        }))
    }
}

impl ExchangeRecord {
    /// The request, before its head is written for the next hop.
    pub(super) fn observe(&mut self, request: &RequestView<'_>) {
        if let Some(observed) = &mut self.observed {
            observed.request = Some(RequestTarget::new(request.method, request.target));
        }
    }

    /// The fields of the response, and its trailers.
    pub(super) fn observe_fields(&mut self, fields: &dyn Fields) {
        if let Some(observed) = &mut self.observed {
            let status = fields.field("grpc-status");
            let status = status.and_then(|status| str::from_utf8(status).ok()?.parse().ok());
            observed.grpc_status = status.or(observed.grpc_status);
        }
    }

    /// The response is complete.
    pub(super) fn observe_end(&mut self) {
        if let Some(observed) = &mut self.observed {
            observed.is_complete = true;
        }
    }

    /// The exchange has ended.
    pub(super) fn tell_observed(&mut self) {
        let Some(observed) = self.observed.take() else {
            return;
        };
        let (flow, duration) = (&self.flow, self.started.elapsed());
        let (route, backend) = self.rule().unzip();
        let is_incomplete = !observed.is_complete && self.failure.is_none();
        let entry = Entry {
            protocol: match self.version {
                HttpVersion::Http1 => Protocol::Http1,
                HttpVersion::Http2 => Protocol::Http2,
            },
            status: self.status.map(|status| status.as_u16()),
            grpc_status: observed.grpc_status,
            failure: self.failure,
            bytes_sent: self.sent,
            bytes_received: self.received,
            route: route.map(str::to_owned),
            backend: backend.flatten().map(str::to_owned),
            attempts: self.attempts,
            fault: self.fault.as_deref().map(str::to_owned),
            incomplete: is_incomplete.then_some(true),
            ..entry(flow, self.endpoint.as_deref(), duration)
        };
        log(
            flow,
            observed.telemetry,
            entry,
            observed.request,
            self.started,
        );
    }
}

impl ConnectionRecord {
    /// The connection has ended.
    pub(super) fn log_access(&self, telemetry: Arc<Telemetry>) {
        if self.copied.is_none() && self.failure.is_none() {
            return;
        }
        let (sent, received) = self.copied.unwrap_or_default();
        let entry = Entry {
            failure: self.failure,
            bytes_sent: sent,
            bytes_received: received,
            attempts: self.endpoint.is_some().into(),
            ..entry(&self.flow, self.endpoint.as_deref(), self.started.elapsed())
        };
        log(&self.flow, telemetry, entry, None, self.started);
    }
}

/// An entry about a connection that carries no HTTP.
fn entry(flow: &Flow, endpoint: Option<&Endpoint>, duration: Duration) -> Entry {
    let remote = remote(flow, endpoint);
    let tls = match (flow.direction, &remote.identity) {
        (_, Some(_)) => "mutual",
        (Direction::Outbound, None) => match endpoint.map(|endpoint| endpoint.info.server_tls()) {
            Some(Some(_)) => "server",
            _ => "none",
        },
        (Direction::Inbound, None) => "none",
    };
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
        incomplete: None,
    }
}

/// Writes a line, unless only failures have one.
fn log(
    flow: &Flow,
    telemetry: Arc<Telemetry>,
    entry: Entry,
    request: Option<RequestTarget>,
    started: Instant,
) {
    let is_logged = |failures: bool| !failures || is_failure(&entry);
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

fn is_failure(entry: &Entry) -> bool {
    let is_error = |status: u16| status >= 500;
    entry.failure.is_some()
        || entry.incomplete.is_some()
        || entry.status.is_some_and(is_error)
        || entry.grpc_status.is_some_and(|status| status != 0)
}
