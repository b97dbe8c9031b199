//! A copy of an HTTP/1 request for a mirror: sent whole; its response is read and dropped.

use std::time::SystemTime;

use bytes::BytesMut;
use tokio::io::AsyncWriteExt;

use super::discard::{Body, fill};
use super::head::{Framing, HeadSearch, ResponseHead};
use crate::context::flow::Flow;
use crate::http::verdict::Verdict;
use crate::secure::io::Io;
use crate::serve::attempts::{Attempt, AttemptError, Replayable};

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
    message: &[u8],
    method: &[u8],
    attempt: &mut Attempt<'_>,
    flow: &Flow,
) -> Result<(), AttemptError> {
    let endpoint = attempt.endpoint.clone();
    let (dialer, began_at) = (attempt.dialer(flow), attempt.in_flight.started_at());
    let connected = endpoint.pool().http1(dialer, began_at).await;
    let mut upstream = connected.map_err(AttemptError::connect)?;
    if !upstream.reused {
        attempt.in_flight.connected();
    }
    let closed = |reason| AttemptError::closed(endpoint.address, reason, false);
    let io = &mut upstream.io;
    let written = async {
        io.write_all(message).await?;
        io.flush().await
    };
    let written: std::io::Result<()> = written.await;
    written.map_err(|error| closed(error.to_string()))?;
    let head = read(io, method).await.map_err(closed)?;
    let is_peer = io.is_secured();
    let verdict = Verdict::of(head.status, &head, is_peer, SystemTime::now);
    let answered_at = attempt.answered(head.status, verdict, Replayable::ONCE, flow)?;
    let reusable = head.connection.persists(head.version)
        && head.status != 101
        && head.framing != Framing::UntilClose
        && io.unread().is_empty();
    if reusable {
        endpoint.pool().checkin_http1(upstream.io, answered_at);
    }
    Ok(())
}

/// Reads the response to its end. Returns its head.
async fn read(io: &mut Io, method: &[u8]) -> Result<ResponseHead, String> {
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
    if head.status == 101 || head.framing == Framing::UntilClose {
        return Ok(head);
    }
    Body::new(head.framing).drop_rest(io, usize::MAX).await?;
    Ok(head)
}
