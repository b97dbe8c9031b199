//! Text format of dumps. Pure.

use std::fmt::Write;

use diy_mesh_model::code::GRPC_STATUSES;

use super::body::Shown;
use super::exchange::{Fields, Part, Record};
use super::{ConnectionInfo, Direction, Opaque, json, mask};

// Writing to a String does not fail: the results of `write!` are ignored.

/// Renders an exchange, ending with an empty line.
pub(super) fn exchange(record: &Record) -> String {
    let mut out = connection(&record.connection);
    if let Some((route, backend)) = &record.route {
        out.push_str(" by ");
        mask::line(route.as_bytes(), &mut out);
        if let Some(backend) = backend {
            out.push_str(" to ");
            mask::line(backend.as_bytes(), &mut out);
        }
    }
    out.push('\n');
    if !record.request.start_line.is_empty() {
        part(&record.request, &mut out);
    }
    if let Some((policy, delay)) = &record.fault {
        let delay = delay.map_or_else(String::new, |delay| format!(", delayed by {delay:?}"));
        out.push_str("[fault of ");
        mask::line(format!("{policy}{delay}").as_bytes(), &mut out);
        out.push_str("]\n");
    }
    if let Some((code, text)) = &record.failure {
        out.push_str("[answered by the proxy: ");
        mask::line(format!("{code}: {text}").as_bytes(), &mut out);
        out.push_str("]\n");
    }
    if !record.response.start_line.is_empty() {
        part(&record.response, &mut out);
    }
    if let Some((sent, received)) = record.upgraded {
        let _ = write!(
            out,
            "[then {} sent and {} received, no longer HTTP]\n\n",
            bytes(sent),
            bytes(received)
        );
    }
    if let Some(what) = record.incomplete() {
        out.push('[');
        mask::line(what.as_bytes(), &mut out);
        out.push_str("]\n\n");
    }
    if !out.ends_with("\n\n") {
        out.push('\n');
    }
    out.push('[');
    mask::line(details(record).as_bytes(), &mut out);
    out.push_str("]\n\n");
    out
}

/// When the exchange began and how long it took, its endpoint, and how that one or the caller
/// authenticated.
fn details(record: &Record) -> String {
    let time = json::rfc3339(record.time);
    let duration = record.duration.as_secs_f64() * 1000.0;
    let mut details = format!("{time}, {duration:.3} ms");
    if let Some(endpoint) = record.endpoint {
        let _ = write!(details, ", endpoint {endpoint}");
    }
    match &record.identity {
        Some(identity) => details += &format!(", mutual TLS with {identity}"),
        None => details += ", no mutual TLS",
    }
    details
}

/// Renders an opaque connection: one line and an empty line.
pub(super) fn opaque(opaque: &Opaque) -> String {
    let duration = opaque.duration.as_secs_f64();
    let connection = connection(&opaque.connection);
    format!(
        "{connection}\n[TCP: {} sent, {} received, {duration:.3} s from {}]\n\n",
        bytes(opaque.sent),
        bytes(opaque.received),
        json::rfc3339(opaque.time)
    )
}

/// Renders the number of suppressed exchanges.
pub(super) fn suppressed(exchanges: u64) -> String {
    let noun = if exchanges == 1 {
        "exchange"
    } else {
        "exchanges"
    };
    format!("[{exchanges} more {noun} went by]\n\n")
}

fn connection(connection: &ConnectionInfo) -> String {
    match connection.direction {
        Direction::Inbound => format!(
            "Inbound connection from {} to port: {}",
            connection.peer,
            connection.destination.port()
        ),
        Direction::Outbound => format!("Outbound connection to {}", connection.destination),
    }
}

fn part(part: &Part, out: &mut String) {
    mask::line(&mask::start_line(&part.start_line, part.masks_queries), out);
    out.push('\n');
    fields(part, &part.fields, out);
    out.push('\n');
    body(part, out);
    if !part.trailers.kept.is_empty() {
        fields(part, &part.trailers, out);
        out.push('\n');
    }
}

fn fields(part: &Part, fields: &Fields, out: &mut String) {
    for (name, value) in &fields.kept {
        mask::line(name, out);
        out.push_str(": ");
        mask::line(&mask::value(name, value, part.masks_queries), out);
        if let Some(status) = grpc_status_name(name, value) {
            let _ = write!(out, " ({status})");
        }
        out.push('\n');
    }
    if fields.omitted > 0 {
        let _ = writeln!(out, "[and {} more]", fields.omitted);
    }
}

fn body(part: &Part, out: &mut String) {
    match part.body.shown(part.field("content-encoding")) {
        Shown::Nothing => return,
        Shown::Text { text, total } => {
            mask::text(text, out);
            if !out.ends_with('\n') {
                out.push('\n');
            }
            if total > text.len() as u64 {
                let _ = writeln!(out, "[the first {} of {}]", text.len(), bytes(total));
            }
        }
        Shown::Named { kind, total } => {
            let _ = writeln!(out, "[{kind} body, {}]", bytes(total));
        }
        Shown::Messages { messages, total } => {
            let noun = if messages == 1 { "message" } else { "messages" };
            let _ = writeln!(out, "[{messages} gRPC {noun}, {}]", bytes(total));
        }
    }
    out.push('\n');
}

/// Name of the gRPC status code in a `grpc-status` field.
fn grpc_status_name(name: &[u8], code: &[u8]) -> Option<&'static str> {
    if !name.eq_ignore_ascii_case(b"grpc-status") {
        return None;
    }
    let code: usize = std::str::from_utf8(code).ok()?.parse().ok()?;
    GRPC_STATUSES.get(code).copied()
}

fn bytes(count: u64) -> String {
    if count == 1 {
        "1 byte".into()
    } else {
        format!("{count} bytes")
    }
}
