//! Metrics of connections and requests of both directions: of clients, and of endpoints.

use diy_mesh_model::code::Code;
use diy_mesh_model::exchange::Direction;
use diy_mesh_runtime::metrics::{register, register_family};
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry};

use crate::labels::{Cause, HandshakeResult, LimitKind, RetryDenial, Verdict};
use crate::limits::timeouts::TimeoutKind;

/// Metrics of clients' connections and requests, by [`Direction`].
#[derive(Debug)]
pub(super) struct Flows {
    pub connections: [Counter; 2],
    pub connections_open: [Gauge; 2],
    pub certificate_expired: [Gauge; 2],
    pub failures: [[Counter; Code::ALL.len()]; 2],
    pub retries: [Counter; 2],
    /// By [`RetryDenial`].
    pub retries_denied: [[Counter; RetryDenial::NAMES.len()]; 2],
    /// By [`TimeoutKind`].
    pub timeouts: [[Counter; TimeoutKind::NAMES.len()]; 2],
    pub opaque_connections: [Counter; 2],
    /// Bytes that clients sent, and that they received.
    pub opaque_bytes: [[Counter; 2]; 2],
    /// The same in the bodies of HTTP.
    pub http_bytes: [[Counter; 2]; 2],
    /// By [`Verdict`].
    pub verdicts: [[Counter; Verdict::NAMES.len()]; 2],
    /// By [`HandshakeResult`].
    pub handshakes: [[Counter; HandshakeResult::NAMES.len()]; 2],
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

impl Flows {
    pub fn register(r: &mut Registry) -> Self {
        Self {
            connections: by_direction(r, "connections", "Accepted connections"),
            connections_open: by_direction(r, "connections_open", "Open connections"),
            certificate_expired: by_direction(
                r,
                "connections_certificate_expired",
                "Open connections whose peer's certificate has expired: opaque, upgraded, or with a response in progress",
            ),
            failures: by_direction_and(
                r,
                "failures",
                "Requests and connections that the proxy failed to forward, by the code of x-mesh-error",
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
                "Timeouts of connections that fired, by kind: the name of the flag without -timeout",
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
                "Bytes that clients of closed opaque connections sent and received",
                "way",
                ["sent", "received"],
            ),
            http_bytes: by_direction_and(
                r,
                "http_bytes",
                "Bytes of HTTP bodies and upgraded connections that clients sent and received",
                "way",
                ["sent", "received"],
            ),
            verdicts: by_direction_and(
                r,
                "verdicts",
                "Requests and opaque connections by the verdict of the policies: would-deny are allowed ones that AuthorizationPolicies under audit would deny",
                "verdict",
                Verdict::NAMES,
            ),
            handshakes: by_direction_and(
                r,
                "tls_handshakes",
                "TLS handshakes with other proxies, by result; plaintext: the server's application has answered a late ClientHello",
                "result",
                HandshakeResult::NAMES,
            ),
        }
    }
}

impl UpstreamMetrics {
    /// Registers the metrics of both directions.
    pub fn register(r: &mut Registry) -> [Self; 2] {
        let connections: [Gauge; 2] = by_direction(
            r,
            "upstream_connections",
            "Open connections to endpoints (outbound) and to the application (inbound)",
        );
        let waiting: [Gauge; 2] = by_direction(
            r,
            "requests_waiting",
            "Requests that wait because a limit of their endpoint is reached",
        );
        let limited = by_direction_and(
            r,
            "requests_limited",
            "Requests rejected by a limit of their endpoint, because they did not get a connection in time or found the queue full",
            "limit",
            LimitKind::NAMES,
        );
        let help = "Quarantines of endpoints, by cause";
        let ejections = by_direction_and(r, "ejections", help, "cause", Cause::NAMES);
        let help = "Circuits that are open or half-open. Each worker has its own circuit for a destination";
        let open: [Gauge; 2] = by_direction(r, "circuits_open", help);
        let help = "Circuits that were opened. The log names their destinations";
        let opened: [Counter; 2] = by_direction(r, "circuits_opened", help);
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
