//! Metrics of the proxy, which a scrape of the admin port gets. The handles of most time series are
//! looked up once, at the start: to count is one relaxed atomic addition. Series with names are in
//! tables with a limited number of places (`series.rs`), so that a scrape has at most 1,500 samples.

mod control;
mod flows;
mod policies;
mod requests;
mod series;
#[cfg(test)]
pub(crate) mod testing;
mod udp;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant, SystemTime};

use diy_mesh_model::exchange::Direction;
use diy_mesh_proto::MAX_EXCEPTIONS;
use diy_mesh_runtime::metrics::{
    Active, on_scrape, register, register_family, register_process, render,
};
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use self::control::unix_seconds;
use self::flows::Flows;
use self::policies::PolicyCounters;
use crate::error::{Failure, Scope};
use crate::inbound::edges::Edges;
use crate::labels::{ExternalResult, HandshakeResult, MirrorResult, RetryDenial, Verdict};
use crate::limits::timeouts::TimeoutKind;
use crate::observe::exceptions::{Exception, Exceptions};
use crate::observe::trace::SpanBudget;
use crate::route::fault::FaultKind;
pub use control::{DiscoveryMetrics, IdentityMetrics};
pub use flows::UpstreamMetrics;
pub use requests::{ConnectionLabels, Counted, OpenConnection, RequestLabels, Requests};

/// The places of durations, each of which has a histogram; of requests; of faults and of rate limits,
/// each. A test adds them to all other samples.
const MAX_DURATION_SETS: usize = 32;
const MAX_REQUEST_SETS: usize = 300;
/// Sets of labels of opaque connections.
const MAX_CONNECTION_SETS: usize = 100;
const MAX_POLICY_SETS: usize = 40;

/// All metrics of the process, shared by all threads.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    flows: Flows,
    /// To endpoints in the zone of the proxy, and in other zones.
    zones: [Counter; 2],
    /// By [`Direction`].
    upstream: [Arc<UpstreamMetrics>; 2],
    /// By [`MirrorResult`].
    mirrors: [Counter; MirrorResult::NAMES.len()],
    /// By [`ExternalResult`].
    external: [Counter; ExternalResult::NAMES.len()],
    /// Requests that ended.
    pub requests: Arc<Requests>,
    faults: Arc<PolicyCounters>,
    rate_limited: Arc<PolicyCounters>,
    /// Requests and opaque connections to endpoints of unready nodes.
    pub last_resorts: Counter,
    /// Exchanges not dumped because the budget was exhausted.
    pub dumps_suppressed: Counter,
    /// Dumps dropped because the writer's queue was full.
    pub dumps_dropped: Counter,
    /// Lines of the access log dropped because the writer's queue was full.
    pub access_logs_dropped: Counter,
    /// Requests with a trace, by [`Direction`], and requests of the application without a trace.
    traced: [Counter; 2],
    untraced: Counter,
    /// Spans of requests.
    pub spans: SpanBudget,
    /// Metrics of the discovery stream.
    pub discovery: DiscoveryMetrics,
    /// Metrics of the workload certificate.
    pub identity: IdentityMetrics,
    /// The edges of the pod.
    pub edges: Arc<Edges>,
    /// The failures in the last minute.
    pub exceptions: Arc<Exceptions>,
}

impl Metrics {
    /// Registers all metrics with the value 0 and records the start time of the process.
    pub fn new() -> Arc<Self> {
        let mut registry = Registry::default();
        let requests = Arc::new(Requests::new(Instant::now()));
        // The names of the conventions have no prefix.
        let durations = requests.clone();
        on_scrape(&mut registry, move |encoder| {
            durations.encode_durations(encoder)
        });
        let r = registry.sub_registry_with_prefix("diy_mesh_proxy");
        let counts = requests.clone();
        on_scrape(r, move |encoder| counts.encode_counts(encoder));
        let flows = Flows::register(r);
        let upstream = UpstreamMetrics::register(r).map(Arc::new);
        let discovery = DiscoveryMetrics::register(r);
        let identity = IdentityMetrics::register(r);
        let exceptions = register_exceptions(r);
        let mirrors = register_family(
            r,
            "mirrored_requests",
            "Copies of requests that routes mirror: answered, failed, or dropped because of a long body or too many at a time",
            "result",
            MirrorResult::NAMES,
        );
        let external = register_family(
            r,
            "external_authorizations",
            "Questions to authorization servers. Without an answer, the request is denied (failed) or allowed (failed-open)",
            "result",
            ExternalResult::NAMES,
        );
        let zones = register_family(
            r,
            "zone_requests",
            "Outbound requests, retries included, and opaque connections to endpoints in the zone of the pod (own) and in other zones, if both are known",
            "zone",
            ["own", "other"],
        );
        let faults = register_policies(
            r,
            (
                "faults",
                "Faults that were injected into requests, by kind and policy.",
            ),
            "kind",
        );
        let rate_limited = register_policies(
            r,
            (
                "rate_limited",
                "Requests that exceeded a rate limit, by its scope and policy. The label policy ends with the name of the limit.",
            ),
            "per",
        );
        let edges_cut = register(
            r,
            "edges_cut",
            "Kinds of calls to the pod that the proxy does not report to the controller, or reports without their path, because of a limit",
        );
        let last_resorts = register(
            r,
            "last_resort_requests",
            "Outbound requests, retries included, and opaque connections to endpoints whose node is unready, because no endpoint of the Service is ready",
        );
        let dumps_suppressed = register(
            r,
            "dumps_suppressed",
            "Exchanges not dumped because the rate limit of dumps was reached",
        );
        let dumps_dropped = register(
            r,
            "dumps_dropped",
            "Dumps dropped because the writer's queue was full",
        );
        let access_logs_dropped = register(
            r,
            "access_logs_dropped",
            "Lines of the access log dropped because the writer's queue was full",
        );
        let inbound_traced = register(
            r,
            "inbound_traced_requests",
            "Requests that the application received with a trace, while tracing is on",
        );
        let outbound_traced = register(
            r,
            "outbound_traced_requests",
            "Requests that the application made with a trace, while tracing is on",
        );
        let untraced = register(
            r,
            "outbound_untraced_requests",
            "Requests that the application made without a trace, while tracing is on",
        );
        let spans_dropped = register(
            r,
            "spans_dropped",
            "Spans that exceeded the bound of a second, of the queue or of the memory, or that the collector did not take",
        );
        let start_time: Gauge<f64, AtomicU64> = register(
            r,
            "start_time_seconds",
            "Start time of the process in seconds since 1970",
        );
        start_time.set(unix_seconds(SystemTime::now()));
        register_process(r);
        on_scrape(r, encode_udp);
        Arc::new(Self {
            registry,
            flows,
            upstream,
            mirrors,
            external,
            zones,
            requests,
            faults,
            rate_limited,
            last_resorts,
            dumps_suppressed,
            dumps_dropped,
            access_logs_dropped,
            traced: [inbound_traced, outbound_traced],
            untraced,
            spans: SpanBudget::new(spans_dropped, Instant::now()),
            discovery,
            identity,
            edges: Arc::new(Edges::new(edges_cut)),
            exceptions,
        })
    }

    /// Counts an accepted connection, as open until the returned value is dropped.
    pub fn connection(&self, direction: Direction) -> Active {
        self.flows.connections[direction as usize].inc();
        Active::new(&self.flows.connections_open[direction as usize])
    }

    /// Counts an open connection whose peer's certificate has expired, until the returned value is
    /// dropped.
    pub fn certificate_expired(&self, direction: Direction) -> Active {
        Active::new(&self.flows.certificate_expired[direction as usize])
    }

    /// Counts a request that ended now, of a connection that keeps `counted`, and the bytes of the
    /// bodies that its client sent and received.
    pub fn request(
        &self,
        counted: &Counted,
        labels: RequestLabels,
        [sent, received]: [u64; 2],
        took: Duration,
        now: Instant,
    ) {
        let [all_sent, all_received] = &self.flows.http_bytes[labels.direction as usize];
        all_sent.inc_by(sent);
        all_received.inc_by(received);
        self.requests.count(counted, labels, took, now);
    }

    /// Counts a verdict of the policies.
    pub fn verdict(&self, direction: Direction, verdict: Verdict) {
        self.flows.verdicts[direction as usize][verdict as usize].inc();
    }

    /// Counts a TLS handshake with another proxy.
    pub fn handshake(&self, direction: Direction, result: HandshakeResult) {
        self.flows.handshakes[direction as usize][result as usize].inc();
    }

    /// Counts a request or a connection that the proxy failed to forward.
    pub fn failure(&self, direction: Direction, failure: &Failure) {
        self.flows.failures[direction as usize][failure.code() as usize].inc();
    }

    /// Counts a retry that is safe, and takes place unless it is denied.
    pub fn retry(&self, direction: Direction, denial: Option<RetryDenial>) {
        match denial {
            None => self.flows.retries[direction as usize].inc(),
            Some(denial) => self.flows.retries_denied[direction as usize][denial as usize].inc(),
        };
    }

    /// Counts a request, or an opaque connection, to an endpoint in this zone or in another one.
    pub fn zone(&self, is_own: bool) {
        self.zones[usize::from(!is_own)].inc();
    }

    /// Counts a question to an authorization server.
    pub fn external(&self, result: ExternalResult) {
        self.external[result as usize].inc();
    }

    /// Counts a request that has a trace, or one of the application that has none.
    pub fn trace(&self, direction: Direction, is_traced: bool) {
        if is_traced {
            self.traced[direction as usize].inc();
        } else if direction == Direction::Outbound {
            self.untraced.inc();
        }
    }

    /// Counts a copy of a request.
    pub fn mirror(&self, result: MirrorResult) {
        self.mirrors[result as usize].inc();
    }

    /// Counts an injected fault of the policy with this name.
    pub fn fault(&self, kind: FaultKind, name: &Arc<str>) {
        self.faults.count(kind.name(), name, Instant::now());
    }

    /// Counts a request that exceeded the rate limit with this name.
    pub fn rate_limited(&self, scope: Scope, name: &Arc<str>) {
        self.rate_limited.count(scope.name(), name, Instant::now());
    }

    /// Counts a connection that ended, or whose protocol was decided, by a timeout.
    pub fn timeout(&self, direction: Direction, kind: TimeoutKind) {
        self.flows.timeouts[direction as usize][kind as usize].inc();
    }

    /// Counts a closed opaque connection and the bytes that its client sent and received.
    pub fn opaque(&self, direction: Direction, sent: u64, received: u64) {
        self.flows.opaque_connections[direction as usize].inc();
        let [all_sent, all_received] = &self.flows.opaque_bytes[direction as usize];
        all_sent.inc_by(sent);
        all_received.inc_by(received);
    }

    /// All metrics in the OpenMetrics text format.
    pub fn render(&self) -> String {
        render(&self.registry)
    }

    /// The metrics of the endpoints of one direction.
    pub fn upstream(&self, direction: Direction) -> Arc<UpstreamMetrics> {
        self.upstream[direction as usize].clone()
    }
}

/// Registers what failed in the last minute, as the messages to the controller have it.
fn register_exceptions(registry: &mut Registry) -> Arc<Exceptions> {
    let exceptions = Arc::new(Exceptions::new(Instant::now()));
    let mut gauge = |name, help, read: fn(&Exception) -> u32| {
        let exceptions = exceptions.clone();
        on_scrape(registry, move |encoder| {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for one in exceptions
                .report(Instant::now())
                .iter()
                .take(MAX_EXCEPTIONS)
            {
                let labels = [
                    ("kind", one.kind.name()),
                    ("destination", &one.destination),
                    ("endpoint", &one.endpoint),
                    ("reason", &one.reason),
                ];
                family.encode_family(&labels)?.encode_gauge(&read(one))?;
            }
            Ok(())
        });
    };
    let help = "Failures of the last minute, by kind and reason.";
    gauge("exceptions", help, |one| one.count);
    let help = "Requests, connections or probes of the last minute among which the exceptions are.";
    gauge("exception_attempts", help, |one| one.total);
    exceptions
}

/// Registers counters by the names of policies.
fn register_policies(
    registry: &mut Registry,
    names: (&'static str, &'static str),
    label: &'static str,
) -> Arc<PolicyCounters> {
    let counters = Arc::new(PolicyCounters::new(Instant::now()));
    let shared = counters.clone();
    on_scrape(registry, move |encoder| {
        shared.encode(encoder, names, label)
    });
    counters
}

fn encode_udp(encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let Some(counts) = udp::read() else {
        return Ok(());
    };
    let help =
        "UDP datagrams of the pod, which the mesh does not carry, as the kernel counts them.";
    let mut family = encoder.encode_descriptor("udp_datagrams", help, None, MetricType::Counter)?;
    for (way, count) in udp::WAYS.into_iter().zip(counts) {
        let labels = [("way", way)];
        let mut counter = family.encode_family(&labels)?;
        counter.encode_counter::<NoLabelSet, u64, f64>(&count, None)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
