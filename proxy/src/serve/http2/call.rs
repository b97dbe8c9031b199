//! A request of the proxy's own in HTTP/2: sent whole; its response is read whole, or dropped.

use std::time::SystemTime;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use http::request::Parts;
use http::{HeaderMap, Request, Response};

use crate::context::flow::Flow;
use crate::http::verdict::Verdict;
use crate::secure::io::Io;
use crate::serve::attempts::{Attempt, AttemptError};
use crate::serve::call::Call;
use diy_mesh_model::exchange::Direction;

/// Sends a request with this head.
pub async fn attempt(
    call: &Call,
    parts: &Parts,
    attempt: &mut Attempt<'_>,
    flow: &Flow,
) -> Result<Response<Bytes>, AttemptError> {
    let worker = &flow.worker;
    let expiry = |io: &Io| worker.expiry(io, Direction::Outbound);
    let dialer = attempt.dialer(flow);
    let pool = attempt.endpoint.pool();
    let leased = pool.http2(flow.direction, dialer, expiry).await;
    let mut lease = leased.map_err(AttemptError::connect)?;
    attempt.in_flight.connected();
    let address = attempt.endpoint.address;
    let closed = |reason| AttemptError::closed(address, reason, call.is_repeatable);
    let failed = |error: h2::Error| closed(error.to_string());
    let request = Request::from_parts(parts.clone(), ());
    let body = &call.body;
    let (response, mut stream) = lease.send(request, body.is_empty(), None).map_err(failed)?;
    if !body.is_empty() {
        stream
            .send_data(lease.io().queue(body.clone()), true)
            .map_err(failed)?;
    }
    let (mut head, body) = response.await.map_err(failed)?.into_parts();
    let (status, is_peer) = (head.status.as_u16(), lease.is_peer());
    let verdict = Verdict::of(status, &head.headers, is_peer, SystemTime::now);
    let answered = attempt.answered(status, verdict, call.replayable(), flow);
    let read = read(body, &mut head.headers, call.max_answer).await;
    lease.record_end();
    answered?;
    Ok(Response::from_parts(head, read.map_err(closed)?))
}

/// Reads a body to its end, with its trailers. Returns it if it is not dropped.
async fn read(
    mut body: RecvStream,
    fields: &mut HeaderMap,
    max: Option<usize>,
) -> Result<Bytes, String> {
    let mut kept = BytesMut::new();
    while let Some(data) = body.data().await {
        let data = data.map_err(|error| error.to_string())?;
        let released = body.flow_control().release_capacity(data.len());
        released.map_err(|error| error.to_string())?;
        if let Some(max) = max {
            if kept.len() + data.len() > max {
                return Err("it is too long".to_owned());
            }
            kept.extend_from_slice(&data);
        }
    }
    let trailers = body.trailers().await.map_err(|error| error.to_string())?;
    fields.extend(trailers.unwrap_or_default());
    Ok(kept.freeze())
}
