//! The record of an exchange or of an opaque connection, as a proxy dumps it. The JSON form is the
//! format, which docs/reference/observability.md describes; the text is a rendering of it. Credentials are masked
//! before a record is made.

#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::code::{Code, GRPC_STATUSES};
use crate::escape;
pub use crate::exchange_id::ExchangeId;

/// The value of [`Exchange::incomplete`] while an exchange is open.
pub const STILL_OPEN: &str = "still open; what follows is not shown";
/// The field of a response that names an error of a proxy.
pub const MESH_ERROR: &str = "x-mesh-error";

/// A line of JSON dumps.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Dump {
    /// An exchange or an opaque connection.
    Exchange(Box<Exchange>),
    /// The number of exchanges in the last second without a dump.
    #[allow(missing_docs)]
    Suppressed { time: String, suppressed: u64 },
}

/// One side of an exchange, or an opaque connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Exchange {
    /// The start, in RFC 3339.
    pub time: String,
    /// As seen from the application.
    pub direction: Direction,
    /// The client.
    pub peer: SocketAddr,
    /// The original destination.
    pub destination: SocketAddr,
    /// The selected endpoint of an outbound exchange.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<SocketAddr>,
    /// The route of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    /// The backend that the route selected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// The injected fault.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<Fault>,
    /// The AuthorizationPolicy under audit that would deny the request, and its rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub would_deny: Option<String>,
    /// The caller or the endpoint, if mutual TLS has verified it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// The protocol that the proxy forwarded.
    pub protocol: Protocol,
    /// With microsecond resolution.
    pub duration_ms: f64,
    /// The request, if its header arrived.
    pub request: Option<Part>,
    /// The response, if there was one.
    pub response: Option<Part>,
    /// The response of the proxy itself, or why it ended the exchange ([`Course::cut_off`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
    /// Why the exchange is incomplete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub incomplete: Option<String>,
    /// Bytes after an upgrade or CONNECT.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upgraded: Option<Transfer>,
    /// Bytes of an opaque connection.
    #[serde(flatten)]
    pub opaque: Option<Transfer>,
    /// The same at the proxies of the caller and of the callee.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<ExchangeId>,
    /// The further fields of the records of recent exchanges.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub course: Option<Course>,
}

/// The steps of a proxy in an exchange or an opaque connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Course {
    /// Namespace and name of the destination's Service or pod, or an address.
    pub service: String,
    /// In order; none, if the proxy sent nothing.
    pub attempts: Vec<Attempt>,
    /// The time from the start to the head of the response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub responded_ms: Option<f64>,
    /// The proxy's own address of an opaque connection to the endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local: Option<SocketAddr>,
    /// The failure was no response: the proxy closed the connection, or cut the response off.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cut_off: bool,
}

/// An attempt to reach an endpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Attempt {
    /// Its address.
    pub endpoint: SocketAddr,
    /// Namespace and name of the pod. Empty: none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// The identity that the endpoint must prove, or `None` if it is not meshed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// The time from the start of the exchange.
    pub began_ms: f64,
    /// Why another attempt followed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
}

/// Recent exchanges of a proxy, in the order of their ends.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Recent {
    /// The number of exchanges that have ended since the proxy started.
    pub ended: u64,
    /// Those that were asked for and are still known.
    pub exchanges: Vec<Exchange>,
}

/// Direction of a connection, as seen from the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// To the application of the pod.
    Inbound,
    /// From the application of the pod.
    Outbound,
}

/// The protocol that a proxy forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Protocol {
    Http1,
    Http2,
    Tcp,
}

/// A request or a response.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Part {
    /// The request line or the status line.
    pub start_line: String,
    /// Names and values, in order.
    pub headers: Vec<(String, String)>,
    /// The number of header fields that are not in `headers`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub headers_omitted: usize,
    /// The total length.
    pub body_bytes: u64,
    /// The first bytes, if they are text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// The kind of the body: `text`, `binary`, `gzip`, `grpc`, ...
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body_kind: Option<String>,
    /// The number of gRPC messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages: Option<u64>,
    /// Names and values, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trailers: Vec<(String, String)>,
}

/// An injected fault.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Fault {
    pub policy: String,
    pub delay_ms: Option<f64>,
}

/// Why the proxy could not carry an exchange or an attempt to its end.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Failure {
    pub code: String,
    pub message: String,
}

/// Bytes that the client sent and received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Transfer {
    pub sent: u64,
    pub received: u64,
}

impl Direction {
    /// The names in metrics and JSON dumps, in the order of the discriminants.
    pub const NAMES: [&str; 2] = ["inbound", "outbound"];

    /// The name in metrics and JSON dumps.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

impl Protocol {
    /// The name in JSON dumps and access logs.
    pub fn name(self) -> &'static str {
        ["http1", "http2", "tcp"][self as usize]
    }
}

impl Dump {
    /// The text form, ending with an empty line, without control characters.
    pub fn text(&self) -> String {
        match self {
            Self::Exchange(exchange) => exchange.text(),
            Self::Suppressed { suppressed: 1, .. } => "[1 more exchange went by]\n\n".into(),
            Self::Suppressed { suppressed, .. } => {
                format!("[{suppressed} more exchanges went by]\n\n")
            }
        }
    }
}

impl Exchange {
    /// The text form, ending with an empty line, without control characters.
    pub fn text(&self) -> String {
        let mut out = String::new();
        push_line(&self.connection(), &mut out);
        if let Some(transfer) = self.opaque {
            let (sent, received) = transfer.text();
            let (seconds, time) = (self.duration_ms / 1000.0, &self.time);
            let remote = self.remote();
            let line = format!(
                "[TCP: {sent} sent, {received} received, {seconds:.3} s from {time}{remote}]"
            );
            push_line(&line, &mut out);
            out.push('\n');
            return out;
        }
        if let Some(request) = &self.request {
            request.push_text(&mut out);
        }
        if let Some(fault) = &self.fault {
            push_line(&fault.text(), &mut out);
        }
        if let Some(reason) = &self.would_deny {
            push_line(&format!("[would be denied by {reason}]"), &mut out);
        }
        if let Some(Failure { code, message }) = &self.failure {
            push_line(
                &format!("[answered by the proxy: {code}: {message}]"),
                &mut out,
            );
        }
        if let Some(response) = &self.response {
            response.push_text(&mut out);
        }
        if let Some(transfer) = self.upgraded {
            let (sent, received) = transfer.text();
            let line = format!("[then {sent} sent and {received} received, no longer HTTP]");
            push_line(&line, &mut out);
            out.push('\n');
        }
        if let Some(reason) = &self.incomplete {
            push_line(&format!("[{reason}]"), &mut out);
            out.push('\n');
        }
        if !out.ends_with("\n\n") {
            out.push('\n');
        }
        push_line(&self.details(), &mut out);
        out.push('\n');
        out
    }

    fn connection(&self) -> String {
        let mut text = match self.direction {
            Direction::Inbound => {
                let port = self.destination.port();
                format!("Inbound connection from {} to port: {port}", self.peer)
            }
            Direction::Outbound => format!("Outbound connection to {}", self.destination),
        };
        if let Some(route) = &self.route {
            text += &format!(" by {route}");
            if let Some(backend) = &self.backend {
                text += &format!(" to {backend}");
            }
        }
        text
    }

    /// When the exchange began and how long it took, its endpoint, and how that one or the caller
    /// authenticated.
    fn details(&self) -> String {
        let remote = self.remote();
        format!("[{}, {:.3} ms{remote}]", self.time, self.duration_ms)
    }

    fn remote(&self) -> String {
        let mut text = String::new();
        if let Some(endpoint) = self.endpoint {
            text += &format!(", endpoint {endpoint}");
        }
        match &self.identity {
            Some(identity) => text += &format!(", mutual TLS with {identity}"),
            None => text += ", no mutual TLS",
        }
        text
    }

    /// Whether it went out to this Service or pod, `namespace/name`, or from a route to it as a backend.
    pub fn is_to(&self, name: &str) -> bool {
        let course = self.course.as_ref();
        let is_backend = |backend: &String| {
            let service = backend
                .rsplit_once(':')
                .map_or(&**backend, |(name, _)| name);
            service == name
        };
        self.direction == Direction::Outbound
            && (course.is_some_and(|course| course.service == name)
                || self.backend.as_ref().is_some_and(is_backend))
    }

    /// Whether the exchange went to this host, an address or a name outside of the cluster, and port.
    /// The name is in the request or in the message of a denial.
    pub fn is_to_host(&self, host: &str, port: Option<u16>) -> bool {
        let headers = self.request.iter().flat_map(|part| &part.headers);
        let mut sent = headers.filter(|(name, _)| name.eq_ignore_ascii_case("host"));
        let is_sent = |(_, value): &(String, String)| {
            let name = value.rsplit_once(':').map_or(&**value, |(name, _)| name);
            [name, value]
                .iter()
                .any(|name| name.eq_ignore_ascii_case(host))
        };
        let is_named = || {
            let message = self.failure.iter().flat_map(|failure| {
                let is_end = |one: char| !one.is_alphanumeric() && !matches!(one, '.' | '-');
                failure.message.split(is_end)
            });
            let mut words = message.map(|word| word.trim_end_matches('.'));
            words.any(|word| word.eq_ignore_ascii_case(host))
        };
        let ip = self.destination.ip().to_canonical();
        self.direction == Direction::Outbound
            && port.is_none_or(|port| port == self.destination.port())
            && (ip.to_string() == host || sent.any(is_sent) || is_named())
    }

    /// The path and query of the request.
    pub fn path(&self) -> Option<&str> {
        self.request.as_ref()?.start_line.split(' ').nth(1)
    }

    /// Method and path, or `TCP` with the numbers of bytes.
    pub fn subject(&self) -> String {
        if let Some(transfer) = self.opaque {
            let (sent, received) = transfer.text();
            return format!("TCP {sent} sent, {received} received");
        }
        let start_line = self.request.as_ref().map_or("-", |part| &part.start_line);
        let words: Vec<_> = start_line.split(' ').take(2).collect();
        words.join(" ")
    }

    /// The status code of the response, for gRPC with the name of the gRPC status.
    pub fn status(&self) -> Option<String> {
        let status = self.response.as_ref()?.start_line.split(' ').nth(1)?;
        Some(match self.grpc_status() {
            Some(code) => format!("{status} {}", grpc_name(code).unwrap_or(code)),
            None => status.to_owned(),
        })
    }

    /// The value of the field `grpc-status`.
    fn grpc_status(&self) -> Option<&str> {
        let response = self.response.as_ref()?;
        let mut fields = response.trailers.iter().chain(&response.headers);
        let (_, code) = fields.find(|(name, _)| is_grpc_status(name))?;
        Some(code)
    }

    /// The code of an error of the callee's proxy, at the caller's.
    pub fn peer_error(&self) -> Option<Code> {
        let fields = &self.response.as_ref()?.headers;
        let mut fields = fields.iter();
        let (_, code) = fields.find(|(name, _)| name.eq_ignore_ascii_case(MESH_ERROR))?;
        Code::of(code)
    }

    /// The code of its failure, or of the error of the callee's proxy.
    pub fn code(&self) -> Option<&str> {
        let own = self.failure.as_ref().map(|failure| &*failure.code);
        own.or_else(|| Some(self.peer_error()?.label()))
    }

    /// The first attempt that another one followed, with its number.
    pub fn failed_attempt(&self) -> Option<(usize, &Attempt)> {
        let mut attempts = (1..).zip(&self.course.as_ref()?.attempts);
        attempts.find(|(_, attempt)| attempt.failure.is_some())
    }

    /// Whether the exchange failed: no response, an error of a proxy or of the server, or a gRPC
    /// error.
    pub fn is_failure(&self) -> bool {
        let incomplete = self.incomplete.as_deref();
        self.failure.is_some()
            || self.peer_error().is_some()
            || incomplete.is_some_and(|reason| reason != STILL_OPEN)
            || self.status().is_some_and(|status| status.starts_with('5'))
            || self.grpc_status().is_some_and(|code| code != "0")
    }
}

impl Part {
    fn push_text(&self, out: &mut String) {
        push_line(&self.start_line, out);
        push_fields(&self.headers, out);
        if self.headers_omitted > 0 {
            push_line(&format!("[and {} more]", self.headers_omitted), out);
        }
        out.push('\n');
        self.push_body(out);
        if !self.trailers.is_empty() {
            push_fields(&self.trailers, out);
            out.push('\n');
        }
    }

    fn push_body(&self, out: &mut String) {
        let total = bytes(self.body_bytes);
        match (&self.body, self.messages, &self.body_kind) {
            (Some(body), ..) => {
                escape::text(body, out);
                if !out.ends_with('\n') {
                    out.push('\n');
                }
                if self.body_bytes > body.len() as u64 {
                    push_line(&format!("[the first {} of {total}]", body.len()), out);
                }
            }
            (None, Some(1), _) => push_line(&format!("[1 gRPC message, {total}]"), out),
            (None, Some(count), _) => push_line(&format!("[{count} gRPC messages, {total}]"), out),
            (None, None, Some(kind)) => push_line(&format!("[{kind} body, {total}]"), out),
            (None, None, None) => return,
        }
        out.push('\n');
    }
}

impl Fault {
    /// A fault of the policy with this name.
    pub fn new(policy: String, delay: Option<Duration>) -> Self {
        let delay_ms = delay.map(milliseconds);
        Self { policy, delay_ms }
    }

    fn text(&self) -> String {
        let delay = self.delay_ms.map_or_else(String::new, |delay| {
            let delay = Duration::from_micros((delay * 1000.0).round() as u64);
            format!(", delayed by {delay:?}")
        });
        format!("[fault of {}{delay}]", self.policy)
    }
}

impl Transfer {
    fn text(self) -> (String, String) {
        (bytes(self.sent), bytes(self.received))
    }
}

/// A duration in records, with microsecond resolution.
pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1000.0
}

fn push_fields(fields: &[(String, String)], out: &mut String) {
    for (name, value) in fields {
        let grpc = is_grpc_status(name).then(|| grpc_name(value)).flatten();
        match grpc {
            Some(status) => push_line(&format!("{name}: {value} ({status})"), out),
            None => push_line(&format!("{name}: {value}"), out),
        }
    }
}

fn is_grpc_status(name: &str) -> bool {
    name.eq_ignore_ascii_case("grpc-status")
}

fn grpc_name(code: &str) -> Option<&'static str> {
    let code: usize = code.parse().ok()?;
    GRPC_STATUSES.get(code).copied()
}

fn push_line(line: &str, out: &mut String) {
    escape::line(line.as_bytes(), out);
    out.push('\n');
}

fn bytes(count: u64) -> String {
    if count == 1 {
        "1 byte".into()
    } else {
        format!("{count} bytes")
    }
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

fn is_false(value: &bool) -> bool {
    !value
}
