//! Local replies: responses that the proxy makes itself, in either version of HTTP. A failure is
//! one maker of them. Nothing here sends one.

use std::time::Duration;

use bytes::Bytes;
use diy_mesh_model::exchange::ExchangeId;
use diy_mesh_proto::field::{EXCHANGE, MESH_ERROR};
use http::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, LOCATION, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};

use crate::error::Failure;

const X_MESH_ERROR: HeaderName = HeaderName::from_static(MESH_ERROR);
const X_MESH_EXCHANGE: HeaderName = HeaderName::from_static(EXCHANGE);
/// The status of a gRPC call.
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// gRPC proposal A6.
const GRPC_PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// The length of the message of a gRPC call, before its encoding. Clients limit the header.
const MAX_GRPC_MESSAGE: usize = 1024;

/// A response of the proxy's own.
#[derive(Clone, Debug)]
pub struct LocalReply {
    /// The HTTP status.
    pub status: StatusCode,
    /// Fields besides the fields about the body. Without a Content-Type, the body is a text.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// The body, most often a line of text. A gRPC call has it as its message.
    pub body: Bytes,
    /// The status of a gRPC call, which has HTTP status 200 then.
    pub grpc_status: u8,
    /// The time after which a gRPC call may be sent again.
    pub grpc_pushback: Option<Duration>,
}

impl From<&Failure> for LocalReply {
    fn from(failure: &Failure) -> Self {
        let code = (
            X_MESH_ERROR,
            HeaderValue::from_static(failure.code().label()),
        );
        if let Failure::ExternallyDenied { reply, .. } = failure {
            return Self {
                body: reply.body.clone(),
                grpc_status: failure.grpc_status(),
                ..Self::bare(
                    reply.status,
                    std::iter::once(code)
                        .chain(reply.headers.iter().cloned())
                        .collect(),
                )
            };
        }
        let allow = failure
            .allow()
            .map(|methods| (ALLOW, HeaderValue::from_static(methods)));
        let challenge = failure
            .challenge()
            .map(|challenge| (WWW_AUTHENTICATE, HeaderValue::from_static(challenge)));
        let retry_after = failure.retry_after().map(|time| {
            let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
            (RETRY_AFTER, HeaderValue::from(seconds.max(1)))
        });
        Self {
            status: failure.status(),
            headers: std::iter::once(code)
                .chain(allow)
                .chain(challenge)
                .chain(retry_after)
                .collect(),
            grpc_pushback: failure.retry_after(),
            body: format!("{}\n", failure.client_message()).into(),
            grpc_status: failure.grpc_status(),
        }
    }
}

impl LocalReply {
    /// Tells the client the identifier of the exchange.
    pub fn name_exchange(&mut self, id: ExchangeId) {
        let value = HeaderValue::from_str(&id.to_string());
        let value = value.map(|value| (X_MESH_EXCHANGE, value));
        self.headers.extend(value.ok());
    }

    /// A reply without a body.
    pub fn bare(status: StatusCode, headers: Vec<(HeaderName, HeaderValue)>) -> Self {
        Self {
            status,
            headers,
            body: Bytes::new(),
            grpc_status: 0,
            grpc_pushback: None,
        }
    }

    /// A redirect.
    pub fn redirect(status: StatusCode, location: &[u8]) -> Result<Self, Failure> {
        let location = HeaderValue::from_bytes(location)
            .map_err(|_| Failure::BadRequest("the target or the host is no part of a URL"))?;
        Ok(Self::bare(status, vec![(LOCATION, location)]))
    }

    /// The whole response in HTTP/1.1. `keep_alive`: the connection carries another exchange.
    /// `head_only`: it replies to HEAD.
    pub fn http1(&self, keep_alive: bool, head_only: bool) -> Vec<u8> {
        let (status, reason) = (self.status.as_str(), self.status.canonical_reason());
        let mut out = format!("HTTP/1.1 {status} {}\r\n", reason.unwrap_or_default()).into_bytes();
        let (head, body) = self.http2(head_only);
        for (name, value) in head.headers() {
            out.extend_from_slice(
                &[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat(),
            );
        }
        out.extend_from_slice(if keep_alive {
            b"\r\n"
        } else {
            b"connection: close\r\n\r\n"
        });
        out.extend_from_slice(&body);
        out
    }

    /// The head and the body in HTTP/2.
    pub fn http2(&self, head_only: bool) -> (Response<()>, Bytes) {
        let body = self.body.clone();
        let mut head = Response::new(());
        *head.status_mut() = self.status;
        let headers = head.headers_mut();
        let has_type = self.headers.iter().any(|(name, _)| name == CONTENT_TYPE);
        if !body.is_empty() && !has_type {
            let text = HeaderValue::from_static("text/plain; charset=utf-8");
            headers.insert(CONTENT_TYPE, text);
        }
        if self.status != StatusCode::NO_CONTENT {
            headers.insert(CONTENT_LENGTH, body.len().into());
        }
        for (name, value) in &self.headers {
            headers.append(name, value.clone());
        }
        (head, if head_only { Bytes::new() } else { body })
    }

    /// The head of a gRPC response that consists of nothing else ("Trailers-Only").
    pub fn grpc(&self) -> (Response<()>, Bytes) {
        let mut head = Response::new(());
        let headers = head.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.extend(self.grpc_trailers());
        (head, Bytes::new())
    }

    /// The start of the body.
    fn grpc_message(&self) -> &[u8] {
        let end = self.body.len().min(MAX_GRPC_MESSAGE);
        self.body[..end].trim_ascii_end()
    }

    /// The trailers that end a gRPC call.
    pub fn grpc_trailers(&self) -> HeaderMap {
        let mut fields = HeaderMap::with_capacity(3);
        fields.insert(GRPC_STATUS, u16::from(self.grpc_status).into());
        if let Ok(message) = HeaderValue::try_from(percent_encoded(self.grpc_message())) {
            fields.insert(GRPC_MESSAGE, message);
        }
        if let Some(pushback) = self.grpc_pushback {
            let milliseconds = pushback.as_nanos().div_ceil(1_000_000);
            let milliseconds = u64::try_from(milliseconds).unwrap_or(u64::MAX);
            fields.insert(GRPC_PUSHBACK, milliseconds.into());
        }
        let is_of_body = |name: &HeaderName| name.as_str().starts_with("content-");
        let others = self.headers.iter().filter(|(name, _)| !is_of_body(name));
        fields.extend(others.cloned());
        fields
    }
}

/// The encoding of `grpc-message`: bytes from space to tilde stay, except the percent sign.
fn percent_encoded(text: &[u8]) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text {
        match byte {
            b' '..=b'~' if *byte != b'%' => encoded.push((*byte).into()),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http1_reply_names_the_failure_and_ends_the_connection() {
        let reply = LocalReply::from(&Failure::BadRequest("no"));
        let text = |keep_alive, head_only| {
            String::from_utf8(reply.http1(keep_alive, head_only)).expect("text")
        };
        let head = "HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n\
                    content-length: 22\r\nx-mesh-error: bad-request\r\n";
        let body = "malformed request: no\n";
        assert_eq!(text(true, false), format!("{head}\r\n{body}"));
        assert_eq!(
            text(false, true),
            format!("{head}connection: close\r\n\r\n")
        );
    }

    #[test]
    fn refused_method_lists_the_allowed_ones() {
        let (head, _) = LocalReply::from(&Failure::ConnectNotAllowed).http2(false);
        assert_eq!(head.status(), StatusCode::METHOD_NOT_ALLOWED);
        assert!(
            head.headers()[ALLOW]
                .to_str()
                .is_ok_and(|methods| methods.contains("GET, "))
        );
    }

    #[test]
    fn rate_limit_names_the_time_in_whole_seconds_and_in_milliseconds_for_grpc() {
        for (nanos, seconds, milliseconds) in [
            (1, "1", "1"),
            (1_000_000_000, "1", "1000"),
            (1_000_000_001, "2", "1001"),
            (1_999_000_000, "2", "1999"),
        ] {
            let exceeded = crate::error::Exceeded {
                name: "TrafficPolicy shop/web/all".into(),
                scope: crate::error::Scope::Service,
                retry_after: Duration::from_nanos(nanos),
            };
            let reply = LocalReply::from(&Failure::RateLimited(exceeded));
            let (head, _) = reply.http2(false);
            assert_eq!(head.status(), StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(head.headers()[RETRY_AFTER], seconds);
            assert!(!head.headers().contains_key(GRPC_PUSHBACK));
            let trailers = reply.grpc_trailers();
            assert_eq!(trailers[GRPC_STATUS], "8");
            assert_eq!(trailers[GRPC_PUSHBACK], milliseconds);
        }
    }

    #[test]
    fn grpc_reply_has_status_and_encoded_message() {
        let reply = LocalReply::from(&Failure::NoEndpoint("100% of é\n".into()));
        let (head, body) = reply.grpc();
        assert_eq!((head.status(), body.len()), (StatusCode::OK, 0));
        assert_eq!(head.headers()[GRPC_STATUS], "14");
        let message = head.headers()[GRPC_MESSAGE].to_str().expect("text");
        assert_eq!(message, "service 100%25 of %C3%A9%0A has no ready endpoint");
    }
}
