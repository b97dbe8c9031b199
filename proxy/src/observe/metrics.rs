//! Counters and gauges of the proxy, exposed in the OpenMetrics text format. The handle of each
//! time series is looked up once, at the start: counting a request is one relaxed atomic addition.

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use diy_mesh_model::code::Code;
use diy_mesh_proto::MAX_EXCEPTIONS;
use diy_mesh_runtime::metrics::{
    Active, on_scrape, register, register_family, register_process, render,
};
use http::StatusCode;
use prometheus_client::encoding::EncodeGaugeValue;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Metric, Registry};
use tokio::sync::watch;

use crate::error::{Exceeded, Failure};
use crate::inbound::edges::Edges;
use crate::labels::{Cause, ExternalResult, LimitKind, MirrorResult, RetryDenial};
use crate::limits::timeouts::TimeoutKind;
use crate::observe::exceptions::{Exception, Exceptions};
use crate::route::fault::FaultKind;
use diy_mesh_model::exchange::Direction;

/// Names of objects that have counters of their own.
const MAX_NAMES: usize = 100;
/// The name of all others.
const OTHER: &str = "other";
const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// The HTTP version of a request: the label `protocol`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpVersion {
    /// HTTP/1.0 or HTTP/1.1.
    Http1,
    /// HTTP/2, including gRPC.
    Http2,
}

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
    faults: NamedCounters,
    rate_limited: NamedCounters,
    /// Allowed requests and connections that the policies under audit would deny.
    pub would_deny: Counter,
    /// Exchanges not dumped because the budget was exhausted.
    pub dumps_suppressed: Counter,
    /// Dumps dropped because the writer's queue was full.
    pub dumps_dropped: Counter,
    /// Metrics of the discovery stream.
    pub discovery: DiscoveryMetrics,
    /// Metrics of the workload certificate.
    pub identity: IdentityMetrics,
    /// What the pod is called by.
    pub edges: Arc<Edges>,
    /// What failed in the last minute.
    pub exceptions: Arc<Exceptions>,
}

/// Metrics of clients' connections and requests, by [`Direction`].
#[derive(Debug)]
struct Flows {
    connections: [Counter; 2],
    connections_open: [Gauge; 2],
    certificate_expired: [Gauge; 2],
    /// By [`HttpVersion`] and status class.
    requests: [[[Counter; CLASSES.len()]; 2]; 2],
    failures: [[Counter; Code::ALL.len()]; 2],
    retries: [Counter; 2],
    /// By [`RetryDenial`].
    retries_denied: [[Counter; RetryDenial::NAMES.len()]; 2],
    /// By [`TimeoutKind`].
    timeouts: [[Counter; TimeoutKind::NAMES.len()]; 2],
    opaque_connections: [Counter; 2],
    /// Bytes that clients sent, and that they received.
    opaque_bytes: [[Counter; 2]; 2],
}

/// Metrics of the endpoints that the connections of one direction lead to.
#[derive(Debug, Default)]
pub struct UpstreamMetrics {
    /// Open connections.
    pub connections: Gauge,
    /// Requests that wait while a limit is reached.
    pub waiting: Gauge,
    /// Requests rejected because a limit was reached, by `LimitKind`.
    pub limited: [Counter; LimitKind::NAMES.len()],
    /// Quarantines that started, by `Cause`.
    pub ejections: [Counter; Cause::NAMES.len()],
    /// Circuits that are open or half-open. Each worker has its own circuit for a destination.
    pub circuits_open: Gauge,
    /// Circuits that were opened.
    pub circuits_opened: Counter,
}

/// Metrics of the discovery stream. Clones share their values.
#[derive(Clone, Debug, Default)]
pub struct DiscoveryMetrics {
    /// 1 while the stream is open.
    pub connected: Gauge,
    /// Subscribed destinations.
    pub subscriptions: Gauge,
    /// Destinations refused because the limit was reached.
    pub refused: Counter,
    /// Invalid parts of responses.
    pub broken: Counter,
    /// Attempts to open the stream after the first one.
    pub reconnects: Counter,
    /// Responses with a state that is older than the known one.
    pub older_refused: Counter,
    /// Older states in use, because no newer ones arrived.
    pub older_accepted: Counter,
    last_message: watch::Sender<Option<Instant>>,
}

/// Metrics of the workload certificate. Clones share their values.
#[derive(Clone, Debug, Default)]
pub struct IdentityMetrics {
    /// Certificates issued by the controller.
    pub certificates: Counter,
    /// Failed attempts to get a certificate.
    pub failures: Counter,
    not_after: watch::Sender<Option<SystemTime>>,
}

impl Metrics {
    /// Registers all metrics with the value 0 and records the start time of the process.
    pub fn new() -> Arc<Self> {
        let mut registry = Registry::with_prefix("diy_mesh_proxy");
        let r = &mut registry;
        let flows = Flows::register(r);
        let upstream = UpstreamMetrics::register(r).map(Arc::new);
        let discovery = DiscoveryMetrics::register(r);
        let identity = IdentityMetrics::register(r);
        let exceptions = register_exceptions(r);
        let mirrors = register_family(
            r,
            "mirrored_requests",
            "Copies of requests that routes mirror, by result",
            "result",
            MirrorResult::NAMES,
        );
        let external = register_family(
            r,
            "external_authorizations",
            "Questions to authorization servers, by result",
            "result",
            ExternalResult::NAMES,
        );
        let zones = register_family(
            r,
            "zone_requests",
            "Outbound requests and opaque connections by the zone of the endpoint, if zones are known",
            "zone",
            ["own", "other"],
        );
        let faults = NamedCounters::register(
            r,
            "faults",
            "Faults that were injected into requests, by kind and policy",
        );
        let rate_limited = NamedCounters::register(
            r,
            "rate_limited",
            "Requests that exceeded a rate limit, by its scope and policy",
        );
        let would_deny = register(
            r,
            "would_deny",
            "Allowed requests and connections that the AuthorizationPolicies under audit would deny",
        );
        let edges_cut = register(
            r,
            "edges_cut",
            "Kinds of calls to the pod that have no room in the reports to the controller",
        );
        let dumps_suppressed = register(
            r,
            "dumps_suppressed",
            "Exchanges not dumped because the budget was used up",
        );
        let dumps_dropped = register(
            r,
            "dumps_dropped",
            "Dumps dropped because the writer's queue was full",
        );
        let start_time: Gauge<f64, AtomicU64> = register(
            r,
            "start_time_seconds",
            "Start time of the process in seconds since 1970",
        );
        start_time.set(unix_seconds(SystemTime::now()));
        register_process(r);
        Arc::new(Self {
            registry,
            flows,
            upstream,
            mirrors,
            external,
            zones,
            faults,
            rate_limited,
            would_deny,
            dumps_suppressed,
            dumps_dropped,
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

    /// Counts a response, from the application or from the proxy itself.
    pub fn request(&self, direction: Direction, version: HttpVersion, status: StatusCode) {
        let class = (status.as_u16() / 100).clamp(1, 5) as usize - 1;
        self.flows.requests[direction as usize][version as usize][class].inc();
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

    /// Counts a copy of a request.
    pub fn mirror(&self, result: MirrorResult) {
        self.mirrors[result as usize].inc();
    }

    /// Counts an injected fault of the policy with this name.
    pub fn fault(&self, kind: FaultKind, name: &str) {
        self.faults.get(("kind", kind.name()), name).inc();
    }

    /// Counts a request that exceeded a rate limit.
    pub fn rate_limited(&self, exceeded: &Exceeded) {
        let scope = ("per", exceeded.scope.name());
        self.rate_limited.get(scope, &exceeded.name).inc();
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

impl Flows {
    fn register(r: &mut Registry) -> Self {
        Self {
            connections: by_direction(r, "connections", "Accepted connections"),
            connections_open: by_direction(r, "connections_open", "Open connections"),
            certificate_expired: by_direction(
                r,
                "connections_certificate_expired",
                "Open connections whose peer's certificate has expired",
            ),
            requests: Self::register_requests(r),
            failures: by_direction_and(
                r,
                "failures",
                "Requests and connections that the proxy failed to forward, by error code",
                "code",
                Code::ALL.map(Code::label),
            ),
            retries: by_direction(
                r,
                "retries",
                "Attempts to send a request or connection again",
            ),
            retries_denied: by_direction_and(
                r,
                "retries_denied",
                "Safe retries that did not take place, by reason",
                "reason",
                RetryDenial::NAMES,
            ),
            timeouts: by_direction_and(
                r,
                "timeouts",
                "Timeouts of connections that fired, by kind",
                "kind",
                TimeoutKind::NAMES,
            ),
            opaque_connections: by_direction(
                r,
                "opaque_connections",
                "Closed connections forwarded as opaque bytes",
            ),
            opaque_bytes: by_direction_and(
                r,
                "opaque_bytes",
                "Bytes that clients of opaque connections sent and received",
                "way",
                ["sent", "received"],
            ),
        }
    }

    fn register_requests(r: &mut Registry) -> [[[Counter; CLASSES.len()]; 2]; 2] {
        let requests: Family<Labels<3>, Counter> =
            register(r, "requests", "Responses sent to clients, by status class");
        Direction::NAMES.map(|direction| {
            ["http1", "http2"].map(|protocol| {
                CLASSES.map(|class| {
                    let labels = [
                        ("direction", direction),
                        ("protocol", protocol),
                        ("class", class),
                    ];
                    requests.get_or_create_owned(&labels)
                })
            })
        })
    }
}

impl UpstreamMetrics {
    /// Registers the metrics of both directions.
    fn register(r: &mut Registry) -> [Self; 2] {
        let connections: [Gauge; 2] = by_direction(
            r,
            "upstream_connections",
            "Open connections to endpoints and to the application",
        );
        let waiting: [Gauge; 2] = by_direction(
            r,
            "requests_waiting",
            "Requests that wait because a limit of their endpoint is reached",
        );
        let limited = by_direction_and(
            r,
            "requests_limited",
            "Requests rejected because a limit of their endpoint was reached, by limit",
            "limit",
            LimitKind::NAMES,
        );
        let help = "Quarantines of endpoints, by cause";
        let ejections = by_direction_and(r, "ejections", help, "cause", Cause::NAMES);
        let open: [Gauge; 2] =
            by_direction(r, "circuits_open", "Circuits that are open or half-open");
        let opened: [Counter; 2] = by_direction(r, "circuits_opened", "Circuits that were opened");
        [Direction::Inbound, Direction::Outbound].map(|direction| Self {
            connections: connections[direction as usize].clone(),
            waiting: waiting[direction as usize].clone(),
            limited: limited[direction as usize].clone(),
            ejections: ejections[direction as usize].clone(),
            circuits_open: open[direction as usize].clone(),
            circuits_opened: opened[direction as usize].clone(),
        })
    }
}

/// Counters by the names of objects, which are others than [`OTHER`] only for the first
/// [`MAX_NAMES`] names.
#[derive(Debug)]
struct NamedCounters {
    counters: Family<[(&'static str, String); 2], Counter>,
    names: Mutex<HashSet<String>>,
}

impl NamedCounters {
    fn register(registry: &mut Registry, name: &str, help: &str) -> Self {
        Self {
            counters: register(registry, name, help),
            names: Mutex::default(),
        }
    }

    /// The counter of a name with another label.
    fn get(&self, (label, value): (&'static str, &str), name: &str) -> Counter {
        let is_known = {
            let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
            names.contains(name) || names.len() < MAX_NAMES && names.insert(name.to_owned())
        };
        let name = if is_known { name } else { OTHER };
        let labels = [(label, value.to_owned()), ("policy", name.to_owned())];
        self.counters.get_or_create_owned(&labels)
    }
}

impl DiscoveryMetrics {
    fn register(r: &mut Registry) -> Self {
        let [older_refused, older_accepted] = register_family(
            r,
            "discovery_older_states",
            "States from the controller that are older than the known ones",
            "result",
            ["refused", "accepted"],
        );
        let metrics = Self {
            older_refused,
            older_accepted,
            connected: register(
                r,
                "discovery_connected",
                "1 while the discovery stream is open",
            ),
            subscriptions: register(r, "discovery_subscriptions", "Subscribed destinations"),
            refused: register(
                r,
                "discovery_refused",
                "Destinations refused because the limit of subscriptions was reached",
            ),
            broken: register(
                r,
                "discovery_broken",
                "Invalid parts of the controller's responses",
            ),
            reconnects: register(
                r,
                "discovery_reconnects",
                "Attempts to open the discovery stream after the first one",
            ),
            last_message: watch::Sender::default(),
        };
        let shared = metrics.clone();
        register_optional(
            r,
            "discovery_last_message_age_seconds",
            "Time since the controller's latest response in seconds.",
            move || shared.last_message_age().map(|age| age.as_secs_f64()),
        );
        metrics
    }

    /// Records the arrival of a response.
    pub fn message_received(&self) {
        self.last_message.send_replace(Some(Instant::now()));
    }

    /// Time since the latest response; `None` before the first one.
    pub fn last_message_age(&self) -> Option<Duration> {
        self.last_message.borrow().map(|at| at.elapsed())
    }
}

impl IdentityMetrics {
    fn register(r: &mut Registry) -> Self {
        let metrics = Self {
            certificates: register(r, "certificates", "Certificates issued by the controller"),
            failures: register(
                r,
                "certificate_failures",
                "Failed attempts to get a certificate",
            ),
            not_after: watch::Sender::default(),
        };
        let not_after = metrics.not_after.clone();
        register_optional(
            r,
            "certificate_end_time_seconds",
            "Expiry of the certificate in seconds since 1970.",
            move || not_after.borrow().map(|time| unix_seconds(time) as u64),
        );
        metrics
    }

    /// Records a new certificate that expires at `not_after`.
    pub fn issued(&self, not_after: SystemTime) {
        self.certificates.inc();
        self.not_after.send_replace(Some(not_after));
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

type Labels<const N: usize> = [(&'static str, &'static str); N];

/// Registers one time series for each [`Direction`].
fn by_direction<M: Metric + TypedMetric + Clone + Default>(
    registry: &mut Registry,
    name: &str,
    help: &str,
) -> [M; 2] {
    register_family(registry, name, help, "direction", Direction::NAMES)
}

/// Registers one time series for each [`Direction`] and each value of another label.
fn by_direction_and<const N: usize>(
    registry: &mut Registry,
    name: &str,
    help: &str,
    label: &'static str,
    values: [&'static str; N],
) -> [[Counter; N]; 2] {
    let family: Family<Labels<2>, Counter> = register(registry, name, help);
    Direction::NAMES.map(|direction| {
        values.map(|value| family.get_or_create_owned(&[("direction", direction), (label, value)]))
    })
}

/// Registers a gauge that is read at each scrape, and absent while `read` returns `None`.
fn register_optional<V: EncodeGaugeValue>(
    registry: &mut Registry,
    name: &'static str,
    help: &'static str,
    read: impl Fn() -> Option<V> + Send + Sync + 'static,
) {
    on_scrape(registry, move |encoder| match read() {
        Some(value) => encoder
            .encode_descriptor(name, help, None, MetricType::Gauge)?
            .encode_gauge(&value),
        None => Ok(()),
    });
}

fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64()
}

#[cfg(test)]
mod tests;
