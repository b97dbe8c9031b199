//! What the proxy counts, and its rendering for Prometheus. Counting is one relaxed addition; nothing here decides anything.

use std::fmt::{Display, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use http::StatusCode;

use crate::discovery::DiscoveryStats;
use crate::dump::Direction;
use crate::error::Failure;
use crate::identity::IdentityStats;

/// What `Failure::code` may say, in the order in which it is counted. The last is for what is missing here.
const FAILURE_CODES: [&str; 15] = [
    "no-endpoint",
    "connect-failed",
    "connect-timeout",
    "upstream-closed",
    "upstream-malformed",
    "bad-request",
    "headers-too-large",
    "request-timeout",
    "overloaded",
    "no-certificate",
    "handshake-failed",
    "mtls-required",
    "connect-not-allowed",
    "loop",
    "other",
];
const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// The version of HTTP that a request came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.0 or HTTP/1.1.
    Http1,
    /// HTTP/2, gRPC included.
    Http2,
}

/// All that the proxy counts; shared by all threads.
#[derive(Debug)]
pub struct Metrics {
    inbound: Flows,
    outbound: Flows,
    /// Exchanges beyond the budget for dumps.
    pub dumps_suppressed: AtomicU64,
    /// Dumps that the writer had no room for.
    pub dumps_dropped: AtomicU64,
    /// Of the certificate.
    pub identity: Arc<IdentityStats>,
    started: SystemTime,
}

/// What is counted on one of the two paths.
#[derive(Debug, Default)]
struct Flows {
    connections: AtomicU64,
    connections_closed: AtomicU64,
    requests: [[AtomicU64; CLASSES.len()]; 2],
    failures: [AtomicU64; FAILURE_CODES.len()],
    certificates_expired: AtomicU64,
    opaque_connections: AtomicU64,
    opaque_sent: AtomicU64,
    opaque_received: AtomicU64,
}

/// A connection that is counted as open until this is dropped.
#[derive(Debug)]
pub struct OpenConnection {
    metrics: Arc<Metrics>,
    direction: Direction,
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.metrics
            .flows(self.direction)
            .connections_closed
            .fetch_add(1, Ordering::Relaxed);
    }
}

/// An open connection whose peer's certificate has expired, counted until this is dropped.
#[derive(Debug)]
pub struct ExpiredConnection {
    metrics: Arc<Metrics>,
    direction: Direction,
}

impl Drop for ExpiredConnection {
    fn drop(&mut self) {
        self.metrics
            .flows(self.direction)
            .certificates_expired
            .fetch_sub(1, Ordering::Relaxed);
    }
}

impl Metrics {
    /// Everything at zero; the process starts now.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            inbound: Flows::default(),
            outbound: Flows::default(),
            dumps_suppressed: AtomicU64::new(0),
            dumps_dropped: AtomicU64::new(0),
            identity: Arc::default(),
            started: SystemTime::now(),
        })
    }

    /// A connection was accepted.
    pub fn connection(self: &Arc<Self>, direction: Direction) -> OpenConnection {
        self.flows(direction)
            .connections
            .fetch_add(1, Ordering::Relaxed);
        OpenConnection {
            metrics: self.clone(),
            direction,
        }
    }

    /// The certificate of an open connection's peer has expired.
    pub fn certificate_expired(self: &Arc<Self>, direction: Direction) -> ExpiredConnection {
        self.flows(direction)
            .certificates_expired
            .fetch_add(1, Ordering::Relaxed);
        ExpiredConnection {
            metrics: self.clone(),
            direction,
        }
    }

    /// A request was answered with this status, by the app or by the proxy.
    pub fn request(&self, direction: Direction, protocol: Protocol, status: StatusCode) {
        let class = (status.as_u16() / 100).clamp(1, 5) as usize - 1;
        self.flows(direction).requests[protocol as usize][class].fetch_add(1, Ordering::Relaxed);
    }

    /// The proxy could not carry a request or a connection.
    pub fn failure(&self, direction: Direction, failure: &Failure) {
        let index = FAILURE_CODES
            .iter()
            .position(|code| *code == failure.code())
            .unwrap_or(FAILURE_CODES.len() - 1);
        self.flows(direction).failures[index].fetch_add(1, Ordering::Relaxed);
    }

    /// A connection that was passed through unread is over: the bytes that the client sent and received.
    pub fn opaque(&self, direction: Direction, sent: u64, received: u64) {
        let flows = self.flows(direction);
        flows.opaque_connections.fetch_add(1, Ordering::Relaxed);
        flows.opaque_sent.fetch_add(sent, Ordering::Relaxed);
        flows.opaque_received.fetch_add(received, Ordering::Relaxed);
    }

    /// The exposition format of Prometheus, version 0.0.4.
    pub fn render(&self, discovery: &DiscoveryStats) -> String {
        let mut page = Page(String::with_capacity(8 * 1024));
        page.family("connections_total", "counter", "Connections accepted.");
        self.each(|flows, direction| {
            page.sample(
                "connections_total",
                &[("direction", direction)],
                get(&flows.connections),
            )
        });
        page.family("connections_open", "gauge", "Connections open now.");
        self.each(|flows, direction| {
            // Closed is read first: a connection that opens and closes meanwhile can't make it negative.
            let closed = get(&flows.connections_closed);
            page.sample(
                "connections_open",
                &[("direction", direction)],
                get(&flows.connections) - closed,
            );
        });
        page.family(
            "connections_certificate_expired",
            "gauge",
            "Connections open now whose peer's certificate has expired.",
        );
        self.each(|flows, direction| {
            page.sample(
                "connections_certificate_expired",
                &[("direction", direction)],
                get(&flows.certificates_expired),
            );
        });
        page.family(
            "requests_total",
            "counter",
            "Requests answered, by the class of the status.",
        );
        self.each(|flows, direction| {
            for (protocol, classes) in ["http1", "http2"].into_iter().zip(&flows.requests) {
                for (class, count) in CLASSES.into_iter().zip(classes) {
                    page.sample(
                        "requests_total",
                        &[
                            ("direction", direction),
                            ("protocol", protocol),
                            ("class", class),
                        ],
                        get(count),
                    );
                }
            }
        });
        page.family(
            "failures_total",
            "counter",
            "Requests and connections that the proxy could not carry, by its error code.",
        );
        self.each(|flows, direction| {
            for (code, count) in FAILURE_CODES.into_iter().zip(&flows.failures) {
                page.sample(
                    "failures_total",
                    &[("direction", direction), ("code", code)],
                    get(count),
                );
            }
        });
        page.family(
            "opaque_connections_total",
            "counter",
            "Connections passed through unread that are over.",
        );
        self.each(|flows, direction| {
            page.sample(
                "opaque_connections_total",
                &[("direction", direction)],
                get(&flows.opaque_connections),
            )
        });
        page.family(
            "opaque_bytes_total",
            "counter",
            "Bytes of connections passed through unread, as the client sent and received them.",
        );
        self.each(|flows, direction| {
            page.sample(
                "opaque_bytes_total",
                &[("direction", direction), ("way", "sent")],
                get(&flows.opaque_sent),
            );
            page.sample(
                "opaque_bytes_total",
                &[("direction", direction), ("way", "received")],
                get(&flows.opaque_received),
            );
        });
        render_discovery(discovery, &mut page);
        render_identity(&self.identity, &mut page);
        self.render_process(&mut page);
        page.0
    }

    fn render_process(&self, page: &mut Page) {
        page.family(
            "dumps_suppressed_total",
            "counter",
            "Exchanges beyond the budget for dumps.",
        );
        page.sample("dumps_suppressed_total", &[], get(&self.dumps_suppressed));
        page.family(
            "dumps_dropped_total",
            "counter",
            "Dumps that the writer had no room for.",
        );
        page.sample("dumps_dropped_total", &[], get(&self.dumps_dropped));
        if let Some(bytes) = resident_memory() {
            page.family(
                "resident_memory_bytes",
                "gauge",
                "Resident memory of the process.",
            );
            page.sample("resident_memory_bytes", &[], bytes);
        }
        page.family(
            "start_time_seconds",
            "gauge",
            "When the process started, in seconds since 1970.",
        );
        page.sample(
            "start_time_seconds",
            &[],
            self.started
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs_f64(),
        );
    }

    fn flows(&self, direction: Direction) -> &Flows {
        match direction {
            Direction::Inbound => &self.inbound,
            Direction::Outbound => &self.outbound,
        }
    }

    fn each(&self, mut render: impl FnMut(&Flows, &'static str)) {
        for direction in [Direction::Inbound, Direction::Outbound] {
            render(self.flows(direction), direction.name());
        }
    }
}

fn render_discovery(stats: &DiscoveryStats, page: &mut Page) {
    page.family(
        "discovery_connected",
        "gauge",
        "1 while the stream to the controller stands.",
    );
    page.sample("discovery_connected", &[], u8::from(stats.connected()));
    page.family(
        "discovery_subscriptions",
        "gauge",
        "Destinations that the proxy is subscribed to.",
    );
    page.sample("discovery_subscriptions", &[], stats.subscriptions());
    page.family(
        "discovery_refused_total",
        "counter",
        "Times that a destination was refused because too many were in use.",
    );
    page.sample("discovery_refused_total", &[], stats.refused());
    page.family(
        "discovery_broken_total",
        "counter",
        "Things in the controller's answers that made no sense.",
    );
    page.sample("discovery_broken_total", &[], stats.broken());
    page.family(
        "discovery_reconnects_total",
        "counter",
        "Tries to open the stream after the first one.",
    );
    page.sample("discovery_reconnects_total", &[], stats.reconnects());
    if let Some(age) = stats.last_message_age() {
        page.family(
            "discovery_last_message_age_seconds",
            "gauge",
            "How long ago the controller last sent an answer.",
        );
        page.sample("discovery_last_message_age_seconds", &[], age.as_secs_f64());
    }
}

fn render_identity(stats: &IdentityStats, page: &mut Page) {
    page.family(
        "certificates_total",
        "counter",
        "Certificates that the controller signed for this proxy.",
    );
    page.sample("certificates_total", &[], stats.certificates());
    page.family(
        "certificate_failures_total",
        "counter",
        "Tries to get a certificate that failed.",
    );
    page.sample("certificate_failures_total", &[], stats.failures());
    if let Some(time) = stats.not_after() {
        page.family(
            "certificate_end_time_seconds",
            "gauge",
            "When the certificate ends, in seconds since 1970.",
        );
        page.sample("certificate_end_time_seconds", &[], time);
    }
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// The process's resident memory in bytes, where the kernel tells.
fn resident_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// The page under way. Writing to a String can't fail: results of `write!` are not looked at.
struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(
            self.0,
            "# HELP diy_mesh_proxy_{name} {help}\n# TYPE diy_mesh_proxy_{name} {kind}"
        );
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &'static str)], value: impl Display) {
        let _ = write!(self.0, "diy_mesh_proxy_{name}");
        for (index, (label, value)) in labels.iter().enumerate() {
            let _ = write!(
                self.0,
                "{}{label}=\"{value}\"",
                if index == 0 { '{' } else { ',' }
            );
        }
        let _ = writeln!(
            self.0,
            "{} {value}",
            if labels.is_empty() { "" } else { "}" }
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page's samples: name with labels, and value. Panics where the page is not in the exposition format.
    fn parse(page: &str) -> std::collections::HashMap<String, f64> {
        let mut family = String::new();
        let mut samples = std::collections::HashMap::new();
        for line in page.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                family = help.split_once(' ').expect("a help text").0.to_owned();
                assert!(family.starts_with("diy_mesh_proxy_"), "{line}");
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').expect("a type");
                assert_eq!(name, family, "TYPE follows HELP");
                assert!(
                    ["counter", "gauge"].contains(&kind)
                        && (kind == "counter") == name.ends_with("_total"),
                    "{line}"
                );
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
                    "{line} stands twice"
                );
            }
        }
        samples
    }

    #[test]
    fn what_is_counted_is_rendered() {
        let metrics = Metrics::new();
        let open = metrics.connection(Direction::Inbound);
        drop(metrics.connection(Direction::Inbound));
        metrics.request(Direction::Outbound, Protocol::Http2, StatusCode::NOT_FOUND);
        metrics.failure(Direction::Outbound, &Failure::NoEndpoint("a/b".into()));
        metrics.opaque(Direction::Inbound, 10, 20);
        let samples = parse(&metrics.render(crate::discovery::Discovery::off().stats()));
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
        assert_eq!(
            parse(&metrics.render(crate::discovery::Discovery::off().stats()))["diy_mesh_proxy_connections_open{direction=\"inbound\"}"],
            0.0
        );
    }

    #[test]
    fn every_failure_has_its_label() {
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
        let failures = [
            Failure::NoEndpoint(String::new()),
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
            Failure::BadRequest(""),
            Failure::HeadersTooLarge(0),
            Failure::RequestTimeout,
            Failure::Overloaded(""),
            Failure::NoCertificate(address),
            Failure::Handshake {
                address,
                reason: String::new(),
            },
            Failure::MtlsRequired,
            Failure::ConnectNotAllowed,
            Failure::Loop(address),
        ];
        assert_eq!(failures.each_ref().map(Failure::code), FAILURE_CODES[..14]);
    }
}
