//! A request of the proxy's own in HTTP/1: sent whole; its response is read whole, or dropped.

use std::pin::pin;
use std::time::SystemTime;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode};
use tokio::io::AsyncWriteExt;

use super::discard::{Body, fill};
use super::head::{Framing, HeadSearch, Refused, ResponseHead};
use crate::context::flow::Flow;
use crate::http::answer::{Answer, Incomplete};
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
) -> Result<Answer, AttemptError> {
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
    let head = read_head(io, method).await;
    let is_peer = io.is_peer();
    let head = match head {
        Ok(head) => head,
        Err(InvalidHead { status, reason }) => {
            let Some(status) = status else {
                return Err(closed(reason));
            };
            let verdict = Verdict::of(status, &HeaderMap::new(), is_peer, SystemTime::now);
            attempt.answered(status, verdict, call.replayable(), flow)?;
            return Ok(answer(status, Err(reason), Bytes::new(), None));
        }
    };
    let verdict = Verdict::of(head.status, &head, is_peer, SystemTime::now);
    let answered_at = attempt.answered(head.status, verdict, call.replayable(), flow)?;
    let mut kept = BytesMut::new();
    let read = {
        let reading = pin!(read_body(io, &head, call.max_answer, &mut kept));
        attempt.deadline().limit(reading).await
    };
    let reusable = head.connection.persists(head.version)
        && head.status != 101
        && head.framing != Framing::UntilClose
        && read.is_ok()
        && io.unread().is_empty();
    if reusable {
        endpoint.pool().checkin_http1(upstream.io, answered_at);
    }
    let missing = read.err().map(|incomplete| incomplete.0);
    Ok(answer(
        head.status,
        Ok(fields(&head)),
        kept.freeze(),
        missing,
    ))
}

fn answer(
    status: u16,
    fields: Result<HeaderMap, String>,
    body: Bytes,
    missing: Option<String>,
) -> Answer {
    Answer {
        status: StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY),
        fields,
        body,
        missing,
    }
}

fn fields(head: &ResponseHead) -> HeaderMap {
    let mut fields = HeaderMap::new();
    head.visit(&mut |name, value| {
        if let (Ok(name), Ok(value)) = (name.try_into(), value.try_into()) {
            fields.append::<http::HeaderName>(name, value);
        }
    });
    fields
}

/// A head that ends early, is too large or is not valid.
struct InvalidHead {
    /// The status, if it has arrived.
    status: Option<u16>,
    reason: String,
}

impl InvalidHead {
    fn new(raw: &[u8], reason: String) -> Self {
        let status = ResponseHead::status_of(raw).filter(|status| *status >= 200);
        Self { status, reason }
    }

    fn refused(raw: &[u8], refused: Refused) -> Self {
        let reason = match refused {
            Refused::TooLarge(limit) => limit.message(),
            Refused::Malformed(_) => "its head is malformed",
        };
        Self::new(raw, reason.to_owned())
    }
}

/// Reads the head of the final response.
async fn read_head(io: &mut Io, method: &[u8]) -> Result<ResponseHead, InvalidHead> {
    let mut search = HeadSearch::default();
    loop {
        let end = search.find_end(io.unread());
        let end = end.map_err(|refused| InvalidHead::refused(io.unread(), refused))?;
        if let Some(end) = end {
            let raw = io.unread().split_to(end).freeze();
            search = HeadSearch::default();
            let head = ResponseHead::parse(raw.clone(), method);
            let head = head.map_err(|refused| InvalidHead::refused(&raw, refused))?;
            if !head.is_interim() {
                return Ok(head);
            }
        } else if let Err(reason) = fill(io).await {
            return Err(InvalidHead::new(io.unread(), reason));
        }
    }
}

/// Reads a body to its end. Keeps at most `max` bytes, if it is not dropped.
async fn read_body(
    io: &mut Io,
    head: &ResponseHead,
    max: Option<usize>,
    kept: &mut BytesMut,
) -> Result<(), Incomplete> {
    let mut body = Body::new(head.framing);
    match max {
        _ if head.status == 101 => Ok(()),
        Some(max) => body.read(io, max, kept).await,
        None if head.framing == Framing::UntilClose => Ok(()),
        None => body.drop_rest(io, usize::MAX).await.map_err(Incomplete),
    }
}
