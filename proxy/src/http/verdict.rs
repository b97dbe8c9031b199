//! The verdict of the head of a response on the endpoint that sent it, in either version of HTTP.
//! The balancer and the retries depend on it. Pure: the caller passes the clock.

use std::time::{Duration, SystemTime};

use crate::http::view::Fields;

/// The longest time for which an endpoint can refuse retries.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(3600);
const RESOURCE_EXHAUSTED: &[u8] = b"8";
const UNKNOWN: &[u8] = b"2";
const INTERNAL: &[u8] = b"13";
const UNAVAILABLE: &[u8] = b"14";
const DATA_LOSS: &[u8] = b"15";

/// The verdict of a response on its endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It works: the response is a result of the request, whatever its status.
    Success,
    /// It, or a proxy in front of it, is unavailable or broken.
    Failure,
    /// Its proxy replied that its application accepts no connection.
    NotDelivered,
    /// It works, and has rejected the request because of its load or of a rate limit.
    Overloaded(Overload),
}

/// A request that was rejected because of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overload {
    /// The requests that are safe to send to another endpoint.
    pub retry: Retryable,
    /// How long the endpoint wants no retry: `Retry-After` or `grpc-retry-pushback-ms`.
    pub retry_after: Duration,
}

/// Which requests are safe to send to another endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retryable {
    /// No request: the endpoint asks for no retry.
    None,
    /// Idempotent ones: the application may have processed a part of the request.
    Idempotent,
    /// All: no handler got the request, or the application asks for it.
    All,
}

impl Verdict {
    /// Judges the head of a final response. `is_peer`: an authenticated proxy sent it, whose
    /// `x-mesh-error` counts.
    pub fn of(status: u16, fields: &dyn Fields, is_peer: bool, now: fn() -> SystemTime) -> Self {
        let grpc_status = fields.field("grpc-status");
        if grpc_status.is_none() && status < 429 {
            return Self::Success;
        }
        let mesh_error = fields.field("x-mesh-error").filter(|_| is_peer);
        let pushback = fields.field("grpc-retry-pushback-ms").map(pushback);
        let rejected = |retry| {
            let retry_after = match grpc_status {
                Some(_) => pushback.unwrap_or(Some(Duration::ZERO)),
                None => retry_after(fields, now),
            };
            Self::overloaded(retry_after, retry)
        };
        match (status, grpc_status, mesh_error) {
            (502, _, Some(b"connect-failed")) | (_, Some(_), Some(b"connect-failed")) => {
                Self::NotDelivered
            }
            (_, _, Some(b"overloaded" | b"upstream-overloaded" | b"rate-limited")) => {
                rejected(Retryable::All)
            }
            (_, _, Some(b"memory-exhausted")) => rejected(Retryable::Idempotent),
            // The authorization server is to blame, and not the endpoint.
            (_, _, Some(b"authorizer-failed" | b"externally-denied")) => Self::Success,
            // Another limit of its proxy, such as the limit of the header.
            (_, Some(RESOURCE_EXHAUSTED), Some(_)) => Self::Success,
            // The application asks for a retry (gRPC's proposal A6).
            (_, Some(RESOURCE_EXHAUSTED | UNAVAILABLE), _) if let Some(Some(after)) = pushback => {
                Self::overloaded(Some(after), Retryable::All)
            }
            (_, Some(UNAVAILABLE), _) => Self::Failure,
            // RFC 6585, section 4. The handler may have run: a gRPC server also responds so if its
            // response is too large.
            (429, ..) | (_, Some(RESOURCE_EXHAUSTED), _) => rejected(Retryable::Idempotent),
            // RFC 9110, section 15.6.4. Without a time, the endpoint may be broken.
            (503, ..) if fields.field("retry-after").is_some() => {
                Self::overloaded(retry_after(fields, now), Retryable::Idempotent)
            }
            // These two say what the application does not implement.
            (501 | 505, ..) => Self::Success,
            (500..=599, ..) => Self::Failure,
            // The statuses that gRPC servers send in place of 500.
            (_, Some(UNKNOWN | INTERNAL | DATA_LOSS), _) => Self::Failure,
            _ => Self::Success,
        }
    }

    /// `retry_after` is `None` if the endpoint asks for no retry.
    fn overloaded(retry_after: Option<Duration>, retry: Retryable) -> Self {
        Self::Overloaded(Overload {
            retry: retry_after.map_or(Retryable::None, |_| retry),
            retry_after: retry_after.unwrap_or_default().min(MAX_RETRY_AFTER),
        })
    }
}

/// The time of `Retry-After`: seconds, or a date. Zero if there is none, or an invalid one.
fn retry_after(fields: &dyn Fields, now: fn() -> SystemTime) -> Option<Duration> {
    let text = fields.field("retry-after").unwrap_or_default();
    let text = std::str::from_utf8(text).unwrap_or_default().trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(text.parse().map_or(MAX_RETRY_AFTER, Duration::from_secs));
    }
    let date = httpdate::parse_http_date(text).ok();
    Some(date.map_or(Duration::ZERO, |date| {
        date.duration_since(now()).unwrap_or_default()
    }))
}

/// The time of `grpc-retry-pushback-ms`. `None` if the endpoint asks for no retry: a negative
/// number, or no number.
fn pushback(value: &[u8]) -> Option<Duration> {
    let text = std::str::from_utf8(value).ok()?;
    text.trim().parse().ok().map(Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderName, HeaderValue};

    use super::Retryable::{All, Idempotent, None as NoRetry};
    use super::Verdict::{Failure, NotDelivered, Success};
    use super::*;

    /// Sun, 06 Nov 1994 08:49:37 GMT, the example of RFC 9110.
    const NOW: u64 = 784_111_777;

    fn judge(status: u16, fields: &[(&'static str, &'static str)], is_peer: bool) -> Verdict {
        let field = |(name, value): &(&'static str, &'static str)| {
            (
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            )
        };
        let fields: HeaderMap = fields.iter().map(field).collect();
        let now = || SystemTime::UNIX_EPOCH + Duration::from_secs(NOW);
        Verdict::of(status, &fields, is_peer, now)
    }

    fn overloaded(retry: Retryable, milliseconds: u64) -> Verdict {
        Verdict::Overloaded(Overload {
            retry,
            retry_after: Duration::from_millis(milliseconds),
        })
    }

    #[test]
    fn status_decides() {
        for (status, expected) in [
            (200, Success),
            (404, Success),
            (429, overloaded(Idempotent, 0)),
            (500, Failure),
            (501, Success),
            (502, Failure),
            (503, Failure),
            (504, Failure),
            (505, Success),
            (599, Failure),
        ] {
            assert_eq!(judge(status, &[], false), expected, "{status}");
        }
        for (status, expected) in [
            ("0", Success),
            ("2", Failure),
            ("5", Success),
            ("8", overloaded(Idempotent, 0)),
            ("13", Failure),
            ("14", Failure),
            ("15", Failure),
        ] {
            let fields = [("grpc-status", status)];
            assert_eq!(judge(200, &fields, false), expected, "{status}");
        }
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        for (value, milliseconds) in [
            ("7", 7_000),
            ("0", 0),
            ("99999999999999999999999", 3_600_000),
            ("86400", 3_600_000),
            ("Sun, 06 Nov 1994 08:49:47 GMT", 10_000),
            ("Sun, 06 Nov 1994 08:49:27 GMT", 0),
            ("Sunday, 06-Nov-94 08:49:47 GMT", 10_000),
            ("soon", 0),
            ("-1", 0),
            ("", 0),
        ] {
            let fields = [("retry-after", value)];
            // It says when to send the request again, and not whether the application got it.
            let expected = overloaded(Idempotent, milliseconds);
            for status in [429, 503] {
                assert_eq!(judge(status, &fields, false), expected, "{value}");
            }
        }
        assert_eq!(judge(502, &[("retry-after", "7")], false), Failure);
    }

    #[test]
    fn pushback_of_grpc_delays_or_forbids_retries() {
        let judge = |status, pushback| {
            let fields = [
                ("grpc-status", status),
                ("grpc-retry-pushback-ms", pushback),
            ];
            judge(200, &fields, false)
        };
        for (pushback, retry, milliseconds) in [
            ("250", All, 250),
            ("0", All, 0),
            ("-1", NoRetry, 0),
            ("soon", NoRetry, 0),
            ("99999999999", All, 3_600_000),
        ] {
            let expected = overloaded(retry, milliseconds);
            assert_eq!(judge("8", pushback), expected, "{pushback}");
            let unavailable = if retry == All { expected } else { Failure };
            assert_eq!(judge("14", pushback), unavailable, "{pushback}");
        }
        assert_eq!(judge("5", "250"), Success);
    }

    #[test]
    fn only_an_authenticated_proxy_replies_for_the_mesh() {
        let error = |code| ("x-mesh-error", code);
        let (refused, overload) = ([error("connect-failed")], [error("overloaded")]);
        assert_eq!(judge(502, &refused, true), NotDelivered);
        assert_eq!(judge(502, &refused, false), Failure);
        assert_eq!(judge(503, &refused, true), Failure);
        assert_eq!(judge(503, &overload, true), overloaded(All, 0));
        let limited = [
            ("grpc-status", "8"),
            ("grpc-retry-pushback-ms", "250"),
            error("rate-limited"),
        ];
        assert_eq!(judge(200, &limited, true), overloaded(All, 250));
        let limited = [("retry-after", "2"), error("rate-limited")];
        assert_eq!(judge(429, &limited, true), overloaded(All, 2000));
        let full = [error("upstream-overloaded")];
        assert_eq!(judge(503, &full, true), overloaded(All, 0));
        // Its application may have got the request.
        let ended = [error("memory-exhausted")];
        assert_eq!(judge(503, &ended, true), overloaded(Idempotent, 0));
        for code in ["authorizer-failed", "externally-denied"] {
            assert_eq!(judge(503, &[error(code)], true), Success, "{code}");
            assert_eq!(judge(503, &[error(code)], false), Failure, "{code}");
        }
        for (code, expected) in [
            ("overloaded", overloaded(All, 0)),
            ("headers-too-large", Success),
        ] {
            let fields = [("grpc-status", "8"), error(code)];
            assert_eq!(judge(200, &fields, true), expected, "{code}");
        }
        assert_eq!(judge(503, &overload, false), Failure);
        let grpc = [("grpc-status", "14"), error("connect-failed")];
        assert_eq!(judge(200, &grpc, true), NotDelivered);
        assert_eq!(judge(200, &grpc, false), Failure);
    }
}
