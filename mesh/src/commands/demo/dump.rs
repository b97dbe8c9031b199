//! The JSON dumps of the proxies: parsing, and formatting as the text that `kubectl logs` shows.

use std::{fmt::Write, net::SocketAddr};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::SignedDuration};
use serde::Deserialize;

use crate::commands::terminal::printable;

// Writing to a String does not fail: the results of `write!` are ignored.

/// A line that a proxy writes to standard output.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum DumpLine {
    /// A complete or aborted exchange.
    Exchange(Box<Dump>),
    /// The number of exchanges without a dump.
    Suppressed {
        /// The number.
        suppressed: u64,
    },
}

/// One side of an exchange, or an opaque connection. The documentation of the proxy describes the
/// fields.
#[derive(Clone, Debug, Deserialize)]
pub struct Dump {
    pub time: Time,
    pub direction: Direction,
    pub peer: SocketAddr,
    pub destination: SocketAddr,
    pub endpoint: Option<SocketAddr>,
    pub route: Option<String>,
    pub backend: Option<String>,
    pub fault: Option<Fault>,
    pub identity: Option<String>,
    pub duration_ms: f64,
    pub request: Option<Part>,
    pub response: Option<Part>,
    pub failure: Option<Failure>,
    pub incomplete: Option<String>,
    pub upgraded: Option<Transfer>,
    /// Only for an opaque connection.
    #[serde(flatten)]
    pub opaque: Option<Transfer>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    Inbound,
    Outbound,
}

/// A request or a response.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Part {
    pub start_line: String,
    pub headers: Vec<(String, String)>,
    #[serde(default)]
    pub headers_omitted: usize,
    pub body_bytes: u64,
    pub body: Option<String>,
    pub body_kind: Option<String>,
    pub messages: Option<u64>,
    #[serde(default)]
    pub trailers: Vec<(String, String)>,
}

/// An injected fault.
#[derive(Clone, Debug, Deserialize)]
pub struct Fault {
    pub policy: String,
    pub delay_ms: Option<f64>,
}

/// An error response of the proxy itself.
#[derive(Clone, Debug, Deserialize)]
pub struct Failure {
    pub code: String,
    pub message: String,
}

/// Bytes that the client sent and received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Transfer {
    pub sent: u64,
    pub received: u64,
}

impl DumpLine {
    /// Parses a line of a proxy. Returns `None` if it is no JSON dump.
    pub fn parse(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }
}

impl Dump {
    /// Method and path, or `TCP` with the numbers of bytes.
    pub fn subject(&self) -> String {
        if let Some(Transfer { sent, received }) = self.opaque {
            return format!("TCP {} sent, {} received", bytes(sent), bytes(received));
        }
        let start_line = self.request.as_ref().map_or("-", |part| &part.start_line);
        let mut words = start_line.split(' ');
        let (method, target) = (words.next().unwrap_or("-"), words.next().unwrap_or(""));
        format!("{method} {target}").trim_end().to_owned()
    }

    /// The path of the request.
    pub fn path(&self) -> Option<&str> {
        self.request.as_ref()?.start_line.split(' ').nth(1)
    }

    /// The status code of the response, for gRPC with the name of the gRPC status.
    pub fn status(&self) -> Option<String> {
        let status = self.response.as_ref()?.start_line.split(' ').nth(1)?;
        Some(match self.grpc_status() {
            Some(code) => format!("{status} {}", grpc_name(code)),
            None => status.to_owned(),
        })
    }

    /// The code in the field `grpc-status`.
    fn grpc_status(&self) -> Option<tonic::Code> {
        let response = self.response.as_ref()?;
        let mut fields = response.trailers.iter().chain(&response.headers);
        let (_, code) = fields.find(|(name, _)| name.eq_ignore_ascii_case("grpc-status"))?;
        Some(tonic::Code::from_bytes(code.as_bytes()))
    }

    /// Whether the exchange failed: no response, an error of the server, or a gRPC error.
    pub fn is_failure(&self) -> bool {
        let is_open = self
            .incomplete
            .as_ref()
            .is_some_and(|reason| reason.starts_with("still open"));
        self.failure.is_some()
            || (self.incomplete.is_some() && !is_open)
            || self.status().is_some_and(|status| status.starts_with('5'))
            || self
                .grpc_status()
                .is_some_and(|status| status != tonic::Code::Ok)
    }

    /// Whether an exchange that `inner` describes can be part of this exchange: the same request,
    /// sent from the same pod to the selected endpoint, within its time.
    pub fn contains(&self, inner: &Self) -> bool {
        let start_line = |dump: &Self| dump.request.as_ref().map(|part| part.start_line.clone());
        // Both times are rounded to milliseconds.
        let tolerance = SignedDuration::from_millis(2);
        let started = inner.time.0.duration_since(self.time.0);
        let duration = SignedDuration::from_secs_f64(self.duration_ms / 1000.0);
        self.peer.ip() == inner.peer.ip()
            && (self
                .endpoint
                .is_none_or(|endpoint| endpoint == inner.destination))
            && self.opaque == inner.opaque
            && start_line(self) == start_line(inner)
            && (-tolerance..=duration + tolerance).contains(&started)
    }

    /// The lines of the text format of the proxy.
    pub fn text(&self) -> Vec<String> {
        let mut out = match self.direction {
            Direction::Inbound => format!(
                "Inbound connection from {} to port: {}",
                self.peer,
                self.destination.port()
            ),
            Direction::Outbound => format!("Outbound connection to {}", self.destination),
        };
        if let Some(route) = &self.route {
            let _ = write!(out, " by {route}");
            if let Some(backend) = &self.backend {
                let _ = write!(out, " to {backend}");
            }
        }
        out.push('\n');
        let time = self.time.0.strftime("%Y-%m-%dT%H:%M:%S.%3fZ");
        if let Some(Transfer { sent, received }) = self.opaque {
            let seconds = self.duration_ms / 1000.0;
            let (sent, received) = (bytes(sent), bytes(received));
            let _ = write!(
                out,
                "[TCP: {sent} sent, {received} received, {seconds:.3} s from {time}]"
            );
            return lines(&out);
        }
        if let Some(request) = &self.request {
            request.write(&mut out);
        }
        if let Some(Fault { policy, delay_ms }) = &self.fault {
            let delay =
                delay_ms.map_or_else(String::new, |delay| format!(", delayed by {delay}ms"));
            let _ = writeln!(out, "[fault of {policy}{delay}]");
        }
        if let Some(Failure { code, message }) = &self.failure {
            let _ = writeln!(out, "[answered by the proxy: {code}: {message}]");
        }
        if let Some(response) = &self.response {
            response.write(&mut out);
        }
        if let Some(Transfer { sent, received }) = self.upgraded {
            let (sent, received) = (bytes(sent), bytes(received));
            let _ = writeln!(
                out,
                "[then {sent} sent and {received} received, no longer HTTP]\n"
            );
        }
        if let Some(reason) = &self.incomplete {
            let _ = writeln!(out, "[{reason}]\n");
        }
        let _ = write!(out, "[{time}, {:.3} ms", self.duration_ms);
        if let Some(endpoint) = self.endpoint {
            let _ = write!(out, ", endpoint {endpoint}");
        }
        let _ = match &self.identity {
            Some(identity) => writeln!(out, ", mutual TLS with {identity}]"),
            None => writeln!(out, ", no mutual TLS]"),
        };
        lines(&out)
    }
}

fn lines(text: &str) -> Vec<String> {
    text.trim_end().lines().map(printable).collect()
}

impl Part {
    fn write(&self, out: &mut String) {
        let _ = writeln!(out, "{}", self.start_line);
        write_fields(&self.headers, out);
        if self.headers_omitted > 0 {
            let _ = writeln!(out, "[and {} more]", self.headers_omitted);
        }
        out.push('\n');
        let total = bytes(self.body_bytes);
        let _ = match (&self.body, self.messages, &self.body_kind) {
            (Some(body), ..) if (body.len() as u64) < self.body_bytes => {
                writeln!(out, "{body}\n[the first {} of {total}]\n", body.len())
            }
            (Some(body), ..) => writeln!(out, "{}\n", body.trim_end_matches('\n')),
            (None, Some(1), _) => writeln!(out, "[1 gRPC message, {total}]\n"),
            (None, Some(messages), _) => writeln!(out, "[{messages} gRPC messages, {total}]\n"),
            (None, None, Some(kind)) => writeln!(out, "[{kind} body, {total}]\n"),
            (None, None, None) => Ok(()),
        };
        if !self.trailers.is_empty() {
            write_fields(&self.trailers, out);
            out.push('\n');
        }
    }
}

fn write_fields(fields: &[(String, String)], out: &mut String) {
    for (name, value) in fields {
        let _ = write!(out, "{name}: {value}");
        if name.eq_ignore_ascii_case("grpc-status") {
            let _ = write!(
                out,
                " ({})",
                grpc_name(tonic::Code::from_bytes(value.as_bytes()))
            );
        }
        out.push('\n');
    }
}

/// The name of a gRPC status in its specification: `DEADLINE_EXCEEDED` for `DeadlineExceeded`.
fn grpc_name(code: tonic::Code) -> String {
    let mut name = String::new();
    for character in format!("{code:?}").chars() {
        if character.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(character.to_uppercase());
    }
    name
}

fn bytes(count: u64) -> String {
    if count == 1 {
        "1 byte".into()
    } else {
        format!("{count} bytes")
    }
}
