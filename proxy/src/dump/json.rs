//! JSON format of dumps, one object per line. Pure. Fields of an exchange:
//!
//! - `time` (start, RFC 3339), `direction` (`inbound`, `outbound`), `peer`, `destination` (address
//!   and port), `endpoint` (outbound), `identity` (of the caller or the endpoint, if mutual TLS),
//!   `protocol` (`http1`, `http2`, `tcp`), `duration_ms`
//! - `route` and `backend`, if a route selected the backend; `fault`: `policy` and `delay_ms`
//!   (`null` without one) of an injected fault
//! - `request`, `response`: `start_line`, `headers` (pairs of name and value, in order),
//!   `headers_omitted`, `body` (text, where it is text), `body_kind` (`text`, `binary`, `gzip`,
//!   ...), `body_bytes` (total length), `messages` (gRPC), `trailers`; `null` if absent
//! - `failure`: `code` and `message` of an error response of the proxy; `incomplete`: why the
//!   exchange is incomplete
//! - `upgraded`: `sent` and `received` bytes after a protocol upgrade
//!
//! An opaque connection (`protocol` `tcp`) has `sent` and `received` instead of request and
//! response. A line with `suppressed` is the number of exchanges without a dump in the last second.

use std::time::SystemTime;

use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

use super::body::Shown;
use super::exchange::{Fields, Part, Record};
use super::{ConnectionInfo, Opaque, mask};

/// Renders an exchange.
pub(super) fn exchange(record: &Record) -> String {
    let mut object = connection(&record.connection, record.time);
    if let Some(endpoint) = record.endpoint {
        object["endpoint"] = endpoint.to_string().into();
    }
    if let Some((route, backend)) = &record.route {
        object["route"] = route.as_str().into();
        object["backend"] = backend.as_deref().into();
    }
    if let Some((policy, delay)) = &record.fault {
        let delay = delay.map(milliseconds);
        object["fault"] = json!({ "policy": policy, "delay_ms": delay });
    }
    if let Some(identity) = &record.identity {
        object["identity"] = identity.as_str().into();
    }
    object["protocol"] = if record.http2 { "http2" } else { "http1" }.into();
    object["duration_ms"] = milliseconds(record.duration);
    object["request"] = part(&record.request);
    object["response"] = part(&record.response);
    if let Some((code, message)) = &record.failure {
        object["failure"] = json!({ "code": code, "message": message });
    }
    if let Some(what) = record.incomplete() {
        object["incomplete"] = what.into();
    }
    if let Some((sent, received)) = record.upgraded {
        object["upgraded"] = json!({ "sent": sent, "received": received });
    }
    line(&object)
}

/// Renders an opaque connection.
pub(super) fn opaque(opaque: &Opaque) -> String {
    let mut object = connection(&opaque.connection, opaque.time);
    object["protocol"] = "tcp".into();
    object["duration_ms"] = milliseconds(opaque.duration);
    object["sent"] = opaque.sent.into();
    object["received"] = opaque.received.into();
    line(&object)
}

/// Renders the number of suppressed exchanges.
pub(super) fn suppressed(exchanges: u64) -> String {
    line(&json!({ "time": rfc3339(SystemTime::now()), "suppressed": exchanges }))
}

fn connection(connection: &ConnectionInfo, time: SystemTime) -> Value {
    json!({
        "time": rfc3339(time),
        "direction": connection.direction.name(),
        "peer": connection.peer.to_string(),
        "destination": connection.destination.to_string(),
    })
}

fn part(part: &Part) -> Value {
    if part.start_line.is_empty() {
        return Value::Null;
    }
    let mut object = json!({
        "start_line": shown(&mask::start_line(&part.start_line, part.masks_queries)),
        "headers": fields(part, &part.fields),
        "body_bytes": part.body.total(),
    });
    if part.fields.omitted > 0 {
        object["headers_omitted"] = part.fields.omitted.into();
    }
    match part.body.shown(part.field("content-encoding")) {
        Shown::Nothing => {}
        Shown::Text { text, .. } => {
            object["body"] = text.into();
            object["body_kind"] = "text".into();
        }
        Shown::Named { kind, .. } => object["body_kind"] = kind.into(),
        Shown::Messages { messages, .. } => {
            object["body_kind"] = "grpc".into();
            object["messages"] = messages.into();
        }
    }
    if !part.trailers.kept.is_empty() {
        object["trailers"] = fields(part, &part.trailers);
    }
    object
}

fn fields(part: &Part, fields: &Fields) -> Value {
    fields
        .kept
        .iter()
        .map(|(name, value)| {
            let value = mask::value(name, value, part.masks_queries);
            json!([shown(name), shown(&value)])
        })
        .collect()
}

fn shown(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    mask::line(bytes, &mut out);
    out
}

fn milliseconds(duration: std::time::Duration) -> Value {
    // With microsecond resolution.
    (duration.as_micros() as f64 / 1000.0).into()
}

fn line(object: &Value) -> String {
    format!("{object}\n")
}

/// A time in UTC with milliseconds.
pub(super) fn rfc3339(time: SystemTime) -> String {
    const FORMAT: &[BorrowedFormatItem<'_>] =
        format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]Z");
    OffsetDateTime::from(time)
        .format(FORMAT)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn formats_times_as_rfc3339() {
        let at = |milliseconds| rfc3339(UNIX_EPOCH + Duration::from_millis(milliseconds));
        assert_eq!(at(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_400_000), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(1_709_251_199_999), "2024-02-29T23:59:59.999Z");
        assert_eq!(at(1_709_251_200_000), "2024-03-01T00:00:00.000Z");
        assert_eq!(at(1_795_305_599_001), "2026-11-21T23:59:59.001Z");
        assert_eq!(at(4_107_542_400_000), "2100-03-01T00:00:00.000Z");
    }
}
