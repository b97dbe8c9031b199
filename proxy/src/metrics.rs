//! Counters and gauges of the proxy, exposed in the OpenMetrics text format. The handle of each
//! time series is looked up once, at the start: counting a request is one relaxed atomic addition.

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use diy_mesh_runtime::metrics::{
    Active, on_scrape, register, register_family, register_process, render,
};
use http::StatusCode;
use prometheus_client::encoding::EncodeGaugeValue;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::balance::Cause;
use crate::connect::LimitKind;
use crate::dump::Direction;
use crate::error::Failure;
use crate::forward::RetryDenial;
use crate::limit::Exceeded;
use crate::mirror::MirrorResult;
use crate::route::fault::FaultKind;
use crate::timeouts::TimeoutKind;

/// Values of the label `code`: those of `Failure::code`, and one for codes missing here.
const FAILURE_CODES: [&str; 26] = [
    "no-endpoint",
    "unknown-port",
    "no-route",
    "invalid-backend",
    "invalid-routes",
    "fault-injected",
    "withheld",
    "connect-failed",
    "connect-timeout",
    "upstream-closed",
    "upstream-malformed",
    "rate-limited",
    "bad-request",
    "headers-too-large",
    "request-timeout",
    "overloaded",
    "upstream-overloaded",
    "circuit-open",
    "retried-status",
    "no-certificate",
    "handshake-failed",
    "mtls-required",
    "connect-not-allowed",
    "timeout",
    "loop",
    "other",
];
/// Names of objects that have counters of their own.
const MAX_NAMES: usize = 100;
/// The name of all others.
const OTHER: &str = "other";
const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// The HTTP version of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.0 or HTTP/1.1.
    Http1,
    /// HTTP/2, including gRPC.
    Http2,
}

/// All metrics of the process, shared by all threads.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    inbound: Flows,
    outbound: Flows,
    /// To endpoints in the zone of the proxy, and in other zones.
    zones: [Counter; 2],
    /// By [`Direction`], inbound first.
    upstream: [Arc<UpstreamMetrics>; 2],
    /// By [`MirrorResult`].
    mirrors: [Counter; MirrorResult::NAMES.len()],
    faults: NamedCounters,
    rate_limited: NamedCounters,
    /// Exchanges not dumped because the budget was exhausted.
    pub dumps_suppressed: Counter,
    /// Dumps dropped because the writer's queue was full.
    pub dumps_dropped: Counter,
    /// Metrics of the discovery stream.
    pub discovery: DiscoveryMetrics,
    /// Metrics of the workload certificate.
    pub identity: IdentityMetrics,
}

/// Metrics of one direction.
#[derive(Debug)]
struct Flows {
    connections: Counter,
    connections_open: Gauge,
    certificate_expired: Gauge,
    /// By [`Protocol`] and status class.
    requests: [[Counter; CLASSES.len()]; 2],
    failures: [Counter; FAILURE_CODES.len()],
    retries: Counter,
    /// By [`RetryDenial`].
    retries_denied: [Counter; RetryDenial::ALL.len()],
    /// By [`TimeoutKind`].
    timeouts: [Counter; TimeoutKind::ALL.len()],
    opaque_connections: Counter,
    opaque_sent: Counter,
    opaque_received: Counter,
}

/// Metrics of the endpoints that the connections of one direction lead to.
#[derive(Debug, Default)]
pub struct UpstreamMetrics {
    /// Open connections.
    pub connections: Gauge,
    /// Requests that wait while a limit is reached.
    pub waiting: Gauge,
    /// Requests rejected because a limit was reached, by [`LimitKind`].
    pub limited: [Counter; LimitKind::NAMES.len()],
    /// Quarantines that started, by [`Cause`].
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
        let [inbound, outbound] = Flows::register(r);
        let upstream = UpstreamMetrics::register(r).map(Arc::new);
        let discovery = DiscoveryMetrics::register(r);
        let identity = IdentityMetrics::register(r);
        let mirrors = register_family(
            r,
            "mirrored_requests",
            "Copies of requests that routes mirror, by result",
            "result",
            MirrorResult::NAMES,
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
            inbound,
            outbound,
            upstream,
            mirrors,
            zones,
            faults,
            rate_limited,
            dumps_suppressed,
            dumps_dropped,
            discovery,
            identity,
        })
    }

    /// Counts an accepted connection, as open until the returned value is dropped.
    pub fn connection(&self, direction: Direction) -> Active {
        let flows = self.flows(direction);
        flows.connections.inc();
        Active::new(&flows.connections_open)
    }

    /// Counts an open connection whose peer's certificate has expired, until the returned value is
    /// dropped.
    pub fn certificate_expired(&self, direction: Direction) -> Active {
        Active::new(&self.flows(direction).certificate_expired)
    }

    /// Counts a response, from the application or from the proxy itself.
    pub fn request(&self, direction: Direction, protocol: Protocol, status: StatusCode) {
        let class = (status.as_u16() / 100).clamp(1, 5) as usize - 1;
        self.flows(direction).requests[protocol as usize][class].inc();
    }

    /// Counts a request or a connection that the proxy failed to forward.
    pub fn failure(&self, direction: Direction, failure: &Failure) {
        let index = FAILURE_CODES
            .iter()
            .position(|code| *code == failure.code())
            .unwrap_or(FAILURE_CODES.len() - 1);
        self.flows(direction).failures[index].inc();
    }

    /// Counts a retry that is safe, and takes place unless it is denied.
    pub fn retry(&self, direction: Direction, denial: Option<RetryDenial>) {
        let flows = self.flows(direction);
        match denial {
            None => flows.retries.inc(),
            Some(denial) => flows.retries_denied[denial as usize].inc(),
        };
    }

    /// Counts a request, or an opaque connection, to an endpoint in this zone or in another one.
    pub fn zone(&self, is_own: bool) {
        self.zones[usize::from(!is_own)].inc();
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
        self.flows(direction).timeouts[kind as usize].inc();
    }

    /// Counts a closed opaque connection and the bytes that its client sent and received.
    pub fn opaque(&self, direction: Direction, sent: u64, received: u64) {
        let flows = self.flows(direction);
        flows.opaque_connections.inc();
        flows.opaque_sent.inc_by(sent);
        flows.opaque_received.inc_by(received);
    }

    /// All metrics in the OpenMetrics text format.
    pub fn render(&self) -> String {
        render(&self.registry)
    }

    /// The metrics of the endpoints of one direction.
    pub fn upstream(&self, direction: Direction) -> Arc<UpstreamMetrics> {
        let [inbound, outbound] = &self.upstream;
        match direction {
            Direction::Inbound => inbound.clone(),
            Direction::Outbound => outbound.clone(),
        }
    }

    fn flows(&self, direction: Direction) -> &Flows {
        match direction {
            Direction::Inbound => &self.inbound,
            Direction::Outbound => &self.outbound,
        }
    }
}

impl Flows {
    /// Registers the metrics of both directions, inbound first.
    fn register(r: &mut Registry) -> [Self; 2] {
        let connections: Counters<1> = register(r, "connections", "Accepted connections");
        let open: Gauges = register(r, "connections_open", "Open connections");
        let expired: Gauges = register(
            r,
            "connections_certificate_expired",
            "Open connections whose peer's certificate has expired",
        );
        let requests: Counters<3> =
            register(r, "requests", "Responses sent to clients, by status class");
        let failures: Counters<2> = register(
            r,
            "failures",
            "Requests and connections that the proxy failed to forward, by error code",
        );
        let retries: Counters<1> = register(
            r,
            "retries",
            "Attempts to send a request or connection again",
        );
        let denied: Counters<2> = register(
            r,
            "retries_denied",
            "Safe retries that did not take place, by reason",
        );
        let timeouts: Counters<2> =
            register(r, "timeouts", "Timeouts of connections that fired, by kind");
        let opaque_connections: Counters<1> = register(
            r,
            "opaque_connections",
            "Closed connections forwarded as opaque bytes",
        );
        let opaque_bytes: Counters<2> = register(
            r,
            "opaque_bytes",
            "Bytes that clients of opaque connections sent and received",
        );
        [Direction::Inbound, Direction::Outbound].map(|direction| {
            let direction = ("direction", direction.name());
            Self {
                connections: connections.get_or_create_owned(&[direction]),
                connections_open: open.get_or_create_owned(&[direction]),
                certificate_expired: expired.get_or_create_owned(&[direction]),
                requests: ["http1", "http2"].map(|protocol| {
                    CLASSES.map(|class| {
                        let labels = [direction, ("protocol", protocol), ("class", class)];
                        requests.get_or_create_owned(&labels)
                    })
                }),
                failures: FAILURE_CODES
                    .map(|code| failures.get_or_create_owned(&[direction, ("code", code)])),
                retries: retries.get_or_create_owned(&[direction]),
                retries_denied: RetryDenial::ALL.map(|denial| {
                    denied.get_or_create_owned(&[direction, ("reason", denial.name())])
                }),
                timeouts: TimeoutKind::ALL
                    .map(|kind| timeouts.get_or_create_owned(&[direction, ("kind", kind.name())])),
                opaque_connections: opaque_connections.get_or_create_owned(&[direction]),
                opaque_sent: opaque_bytes.get_or_create_owned(&[direction, ("way", "sent")]),
                opaque_received: opaque_bytes
                    .get_or_create_owned(&[direction, ("way", "received")]),
            }
        })
    }
}

impl UpstreamMetrics {
    /// Registers the metrics of both directions, inbound first.
    fn register(r: &mut Registry) -> [Self; 2] {
        let connections: Gauges = register(
            r,
            "upstream_connections",
            "Open connections to endpoints and to the application",
        );
        let waiting: Gauges = register(
            r,
            "requests_waiting",
            "Requests that wait because a limit of their endpoint is reached",
        );
        let limited: Counters<2> = register(
            r,
            "requests_limited",
            "Requests rejected because a limit of their endpoint was reached, by limit",
        );
        let ejections: Counters<2> = register(r, "ejections", "Quarantines of endpoints, by cause");
        let open: Gauges = register(r, "circuits_open", "Circuits that are open or half-open");
        let opened: Counters<1> = register(r, "circuits_opened", "Circuits that were opened");
        [Direction::Inbound, Direction::Outbound].map(|direction| {
            let direction = ("direction", direction.name());
            Self {
                connections: connections.get_or_create_owned(&[direction]),
                waiting: waiting.get_or_create_owned(&[direction]),
                limited: LimitKind::NAMES
                    .map(|limit| limited.get_or_create_owned(&[direction, ("limit", limit)])),
                ejections: Cause::NAMES
                    .map(|cause| ejections.get_or_create_owned(&[direction, ("cause", cause)])),
                circuits_open: open.get_or_create_owned(&[direction]),
                circuits_opened: opened.get_or_create_owned(&[direction]),
            }
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

type Labels<const N: usize> = [(&'static str, &'static str); N];
type Counters<const N: usize> = Family<Labels<N>, Counter>;
type Gauges = Family<Labels<1>, Gauge>;

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
mod tests {
    use super::*;

    /// Parses a page into samples: name with labels, and value. Panics if the page is not in the
    /// OpenMetrics text format.
    fn parse(page: &str) -> std::collections::HashMap<String, f64> {
        let page = page.strip_suffix("# EOF\n").expect("an end marker");
        let mut family = String::new();
        let mut samples = std::collections::HashMap::new();
        for line in page.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                family = help.split_once(' ').expect("a help text").0.to_owned();
                assert!(family.starts_with("diy_mesh_proxy_"), "{line}");
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').expect("a type");
                assert_eq!(name, family, "TYPE follows HELP");
                match kind {
                    "counter" => family.push_str("_total"),
                    "gauge" => {}
                    _ => panic!("unexpected type: {line}"),
                }
            } else {
                let (name, value) = line.rsplit_once(' ').expect("a value");
                assert_eq!(
                    name.split('{').next(),
                    Some(family.as_str()),
                    "samples follow their family"
                );
                if let Some((_, labels)) = name.split_once('{') {
                    for label in labels.strip_suffix('}').expect("closed labels").split(',') {
                        let (label, value) = label.split_once('=').expect("a label");
                        assert!(
                            label.bytes().all(|byte| byte.is_ascii_lowercase())
                                && value.len() > 2
                                && value.starts_with('"')
                                && value.ends_with('"')
                        );
                    }
                }
                assert!(
                    samples
                        .insert(name.to_owned(), value.parse().expect("a number"))
                        .is_none(),
                    "duplicate sample: {line}"
                );
            }
        }
        samples
    }

    #[test]
    fn renders_counted_values() {
        let metrics = Metrics::new();
        let open = metrics.connection(Direction::Inbound);
        drop(metrics.connection(Direction::Inbound));
        metrics.request(Direction::Outbound, Protocol::Http2, StatusCode::NOT_FOUND);
        metrics.failure(Direction::Outbound, &Failure::NoEndpoint("a/b".into()));
        metrics.opaque(Direction::Inbound, 10, 20);
        let samples = parse(&metrics.render());
        let sample = |name: &str| samples[&format!("diy_mesh_proxy_{name}")];
        assert_eq!(sample("connections_total{direction=\"inbound\"}"), 2.0);
        assert_eq!(sample("connections_open{direction=\"inbound\"}"), 1.0);
        assert_eq!(
            sample("requests_total{direction=\"outbound\",protocol=\"http2\",class=\"4xx\"}"),
            1.0
        );
        assert_eq!(
            sample("requests_total{direction=\"outbound\",protocol=\"http1\",class=\"4xx\"}"),
            0.0
        );
        assert_eq!(
            sample("failures_total{direction=\"outbound\",code=\"no-endpoint\"}"),
            1.0
        );
        assert_eq!(
            sample("opaque_bytes_total{direction=\"inbound\",way=\"received\"}"),
            20.0
        );
        assert!(
            sample("resident_memory_bytes") > 100_000.0 && sample("start_time_seconds") > 1.7e9
        );
        drop(open);
        let samples = parse(&metrics.render());
        assert_eq!(
            samples["diy_mesh_proxy_connections_open{direction=\"inbound\"}"],
            0.0
        );
    }

    #[test]
    fn omits_unknown_times_until_they_are_recorded() {
        let metrics = Metrics::new();
        let names = [
            "diy_mesh_proxy_certificate_end_time_seconds",
            "diy_mesh_proxy_discovery_last_message_age_seconds",
        ];
        let samples = parse(&metrics.render());
        assert!(names.iter().all(|name| !samples.contains_key(*name)));
        metrics
            .identity
            .issued(UNIX_EPOCH + Duration::from_secs(2_000_000_000));
        metrics.discovery.message_received();
        let samples = parse(&metrics.render());
        assert_eq!(samples[names[0]], 2e9);
        assert!(samples[names[1]] < 60.0);
    }

    #[test]
    fn every_failure_code_is_a_label() {
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
        let failures = [
            Failure::NoEndpoint(String::new()),
            Failure::UnknownPort {
                service: String::new(),
                port: 1,
                ports: Arc::new([]),
            },
            Failure::NoRoute(String::new()),
            Failure::InvalidBackend(String::new()),
            Failure::InvalidRoutes {
                service: String::new(),
                reason: String::new(),
            },
            Failure::FaultInjected {
                name: "".into(),
                status: StatusCode::SERVICE_UNAVAILABLE,
            },
            Failure::Withheld(String::new()),
            Failure::Connect {
                address,
                source: Arc::new(std::io::ErrorKind::Other.into()),
            },
            Failure::ConnectTimeout(address),
            Failure::UpstreamClosed {
                address,
                reason: String::new(),
            },
            Failure::UpstreamMalformed {
                address,
                reason: String::new(),
            },
            Failure::RateLimited(Exceeded {
                name: "".into(),
                scope: crate::limit::Scope::Service,
                retry_after: Duration::ZERO,
            }),
            Failure::BadRequest(""),
            Failure::HeadersTooLarge(0),
            Failure::RequestTimeout,
            Failure::Overloaded(""),
            Failure::UpstreamOverloaded(address),
            Failure::CircuitOpen {
                service: String::new(),
                policy: String::new(),
            },
            Failure::RetriedStatus {
                address,
                status: 503,
            },
            Failure::NoCertificate(address),
            Failure::Handshake {
                address,
                reason: String::new(),
            },
            Failure::MtlsRequired,
            Failure::ConnectNotAllowed,
            Failure::Timeout(crate::deadline::Limit::Exchange),
            Failure::Loop(address),
        ];
        assert_eq!(
            failures.each_ref().map(Failure::code),
            FAILURE_CODES[..FAILURE_CODES.len() - 1]
        );
    }

    #[test]
    fn names_of_policies_are_bounded() {
        let metrics = Metrics::new();
        for number in 0..2 * MAX_NAMES {
            let name = format!("TrafficPolicy shop/{number}");
            metrics.fault(FaultKind::Abort, &name);
            metrics.fault(FaultKind::Abort, "TrafficPolicy shop/0");
        }
        let text = metrics.render();
        let sample = |policy: &str, count: usize| {
            let labels = format!("{{kind=\"abort\",policy=\"{policy}\"}}");
            let line = format!("diy_mesh_proxy_faults_total{labels} {count}\n");
            assert!(text.contains(&line), "{line}: {text}");
        };
        sample("TrafficPolicy shop/0", 2 * MAX_NAMES + 1);
        sample("TrafficPolicy shop/99", 1);
        sample(OTHER, MAX_NAMES);
        assert!(!text.contains("shop/100"), "{text}");
    }
}
