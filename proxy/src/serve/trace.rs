//! The export of spans: sends the spans of a worker to the collector of the pod's telemetry, as
//! requests of the proxy's own (OTLP/gRPC). Discovery finds the collector, and mutual TLS applies
//! where it has a proxy. Spans that cannot be sent are counted. No request of the application waits
//! for it.

use std::net::Ipv4Addr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use diy_mesh_http2::Request;
use diy_mesh_model::exchange::Direction;
use diy_mesh_proto::otlp::{
    ExportTraceServiceRequest, InstrumentationScope, KeyValue, Resource, ResourceSpans, ScopeSpans,
    Span,
};

use crate::context::flow::Flow;
use crate::context::worker::Worker;
use crate::error::Limit;
use crate::http::grpc;
use crate::inbound::policy::Caller;
use crate::limits::deadline::Deadline;
use crate::limits::memory::Holder;
use crate::observe::trace::{EXPORT_PATH, text};
use crate::secure::io::MAX_FILL;
use crate::serve::call::{Call, CallHead};

/// The time for a batch.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time for the last ones.
const LAST_TIMEOUT: Duration = Duration::from_secs(1);
/// The length of the body of an answer.
const MAX_ANSWER: usize = 4096;
const SCHEMA: &str = "https://opentelemetry.io/schemas/1.45.0";

/// Exports the spans of a worker until it is dropped.
pub async fn export(worker: Rc<Worker>) {
    let exporting = async {
        loop {
            let spans = worker.spans.next().await;
            send_or_count(&worker, spans, EXPORT_TIMEOUT).await;
        }
    };
    tokio::join!(exporting, worker.spans.evict(&worker.metrics.spans));
}

/// Exports what is left when the proxy ends.
pub async fn export_last(worker: &Rc<Worker>) {
    let end = Instant::now() + LAST_TIMEOUT;
    loop {
        let spans = worker.spans.take();
        if spans.is_empty() {
            return;
        }
        let left = end.saturating_duration_since(Instant::now());
        send_or_count(worker, spans, left).await;
    }
}

async fn send_or_count(worker: &Rc<Worker>, spans: Vec<Span>, timeout: Duration) {
    let count = spans.len();
    let Err(reason) = send(worker, spans, timeout).await else {
        return;
    };
    let dropped = &worker.metrics.spans.dropped;
    dropped.inc_by(u64::try_from(count).unwrap_or(u64::MAX));
    if worker.warnings.should_log(Instant::now()) {
        tracing::warn!("{count} spans are lost: {reason}");
    }
}

async fn send(worker: &Rc<Worker>, spans: Vec<Span>, timeout: Duration) -> Result<(), String> {
    let telemetry = worker.policy().telemetry.clone();
    let tracing = telemetry.as_ref().and_then(|one| one.tracing.as_ref());
    let collector: Arc<str> = tracing.ok_or("tracing is off")?.backend.as_str().into();
    let request = grpc::request(&collector, EXPORT_PATH, &message(worker, spans));
    let (parts, body) = request
        .ok_or("the collector has no valid name")?
        .into_parts();
    let slot = worker.admission.admit(&Holder::App.path());
    let slot = Rc::new(slot.ok_or("the proxy is overloaded")?);
    let unspecified = (Ipv4Addr::UNSPECIFIED, 0).into();
    let flow = Flow {
        worker: worker.clone(),
        direction: Direction::Outbound,
        peer: unspecified,
        original: unspecified,
        destination: worker.destinations.backend(&collector).await,
        caller: Caller::App,
        slot: slot.clone(),
        called_by: Default::default(),
        counted: Default::default(),
    };
    let mut memory = flow.charge();
    let needed = 2 * body.len() + MAX_FILL + MAX_ANSWER;
    memory.begin(needed).map_err(|error| error.to_string())?;
    let call = Call {
        head: CallHead::Http2(Box::new(Request::from(&parts))),
        body,
        is_repeatable: true,
        max_answer: Some(MAX_ANSWER),
    };
    let deadline = Deadline::after(Some(timeout), Limit::Attempt);
    let sent = pin!(call.send(&flow, &collector, deadline));
    let answer = slot
        .run(pin!(deadline.limit(sent)))
        .await
        .ok_or("the proxy is overloaded")?;
    let answer = answer.map_err(|failure| failure.to_string());
    let exported = answer.and_then(|answer| grpc::message(&answer).map(|_| ()));
    exported.map_err(|reason| format!("collector {collector}: {reason}"))
}

fn message(worker: &Worker, spans: Vec<Span>) -> ExportTraceServiceRequest {
    let scope = InstrumentationScope {
        name: "diy-service-mesh".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let scope_spans = ScopeSpans {
        scope: Some(scope),
        spans,
        schema_url: SCHEMA.to_owned(),
    };
    let attributes = resource(worker);
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource { attributes }),
            scope_spans: vec![scope_spans],
            schema_url: SCHEMA.to_owned(),
        }],
    }
}

/// The pod, and its service account as the name of the service.
fn resource(worker: &Worker) -> Vec<KeyValue> {
    let (identity, config) = (worker.tls.identity(), &worker.config);
    let name = identity.as_ref().map(|own| own.service_account());
    let known = [
        ("service.name", name.unwrap_or("unknown_service")),
        ("k8s.pod.name", &config.pod_name),
        ("k8s.namespace.name", &config.pod_namespace),
    ];
    let known = known.into_iter().filter(|(_, value)| !value.is_empty());
    known.map(|(key, value)| text(key, value)).collect()
}
