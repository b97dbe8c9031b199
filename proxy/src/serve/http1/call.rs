//! A request of the proxy's own in HTTP/1: sent whole; its response is read whole, or dropped.

use std::time::SystemTime;

use bytes::{Bytes, BytesMut};
use http::{Response, StatusCode};
use tokio::io::AsyncWriteExt;

use super::discard::{Body, fill};
use super::head::{Framing, HeadSearch, ResponseHead};
use crate::context::flow::Flow;
use crate::http::verdict::Verdict;
use crate::http::view::Fields;
use crate::secure::io::Io;
use crate::serve::attempts::{Attempt, AttemptError};
use crate::serve::call::Call;

/// A request with this head and body.
pub fn message(head: &[u8], body: &[u8], chunked: bool) -> BytesMut {
    let mut message = BytesMut::from(head);
    if chunked && !body.is_empty() {
        message.extend_from_slice(format!("{:x}\r\n", body.len()).as_bytes());
    }
    message.extend_from_slice(body);
    if chunked {
        let end: &[u8] = if body.is_empty() { b"" } else { b"\r\n" };
        message.extend_from_slice(end);
        message.extend_from_slice(b"0\r\n\r\n");
    }
    message
}

/// Sends a request with this method.
pub async fn attempt(
    call: &Call,
    message: &[u8],
    method: &[u8],
    attempt: &mut Attempt<'_>,
    flow: &Flow,
) -> Result<Response<Bytes>, AttemptError> {
    let endpoint = attempt.endpoint.clone();
    let (dialer, began_at) = (attempt.dialer(flow), attempt.in_flight.started_at());
    let pool = endpoint.pool();
    let connected = pool.http1(dialer, began_at, call.is_repeatable).await;
    let mut upstream = connected.map_err(AttemptError::connect)?;
    if !upstream.reused {
        attempt.in_flight.connected();
    }
    let closed = |reason| AttemptError::closed(endpoint.address, reason, call.is_repeatable);
    let io = &mut upstream.io;
    let written = async {
        io.write_all(message).await?;
        io.flush().await
    };
    let written: std::io::Result<()> = written.await;
    written.map_err(|error| closed(error.to_string()))?;
    let (head, body) = read(io, method, call.max_answer).await.map_err(closed)?;
    let is_peer = io.is_peer();
    let verdict = Verdict::of(head.status, &head, is_peer, SystemTime::now);
    let answered_at = attempt.answered(head.status, verdict, call.replayable(), flow)?;
    let reusable = head.connection.persists(head.version)
        && head.status != 101
        && head.framing != Framing::UntilClose
        && io.unread().is_empty();
    if reusable {
        endpoint.pool().checkin_http1(upstream.io, answered_at);
    }
    Ok(response(&head, body))
}

fn response(head: &ResponseHead, body: Bytes) -> Response<Bytes> {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(head.status).unwrap_or(StatusCode::BAD_GATEWAY);
    head.visit(&mut |name, value| {
        if let (Ok(name), Ok(value)) = (name.try_into(), value.try_into()) {
            response
                .headers_mut()
                .append::<http::HeaderName>(name, value);
        }
    });
    response
}

/// Reads the response to its end. Returns its head, and its body if it is not dropped.
async fn read(
    io: &mut Io,
    method: &[u8],
    max_body: Option<usize>,
) -> Result<(ResponseHead, Bytes), String> {
    let mut search = HeadSearch::default();
    let head = loop {
        let end = search.find_end(io.unread()).map_err(|_| "malformed head")?;
        if let Some(end) = end {
            let raw = io.unread().split_to(end).freeze();
            search = HeadSearch::default();
            match ResponseHead::parse(raw, method) {
                Ok(head) if head.is_interim() => continue,
                Ok(head) => break head,
                Err(_) => return Err("malformed head".to_owned()),
            }
        }
        fill(io).await?;
    };
    let mut body = Body::new(head.framing);
    let kept = match max_body {
        Some(max) if head.status != 101 => body.read(io, max).await?,
        None if head.status != 101 && head.framing != Framing::UntilClose => {
            body.drop_rest(io, usize::MAX).await?;
            Bytes::new()
        }
        _ => Bytes::new(),
    };
    Ok((head, kept))
}
