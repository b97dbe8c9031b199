//! A copy of an HTTP/2 request for a mirror: sent whole; its response is read and dropped.

use std::time::SystemTime;

use bytes::Bytes;
use h2::RecvStream;
use http::Request;
use http::request::Parts;

use crate::context::flow::Flow;
use crate::http::verdict::Verdict;
use crate::secure::io::Io;
use crate::serve::attempts::{Attempt, AttemptError, Replayable};
use diy_mesh_model::exchange::Direction;

/// Sends a request with this head and body.
pub async fn attempt(
    parts: &Parts,
    body: &Bytes,
    attempt: &mut Attempt<'_>,
    flow: &Flow,
) -> Result<(), AttemptError> {
    let worker = &flow.worker;
    let expiry = |io: &Io| worker.expiry(io, Direction::Outbound);
    let dialer = attempt.dialer(flow);
    let pool = attempt.endpoint.pool();
    let leased = pool.http2(flow.direction, dialer, expiry).await;
    let mut lease = leased.map_err(AttemptError::connect)?;
    attempt.in_flight.connected();
    let address = attempt.endpoint.address;
    let closed = |error: h2::Error| AttemptError::closed(address, error.to_string(), false);
    let request = Request::from_parts(parts.clone(), ());
    let (response, mut stream) = lease.send(request, body.is_empty(), None).map_err(closed)?;
    if !body.is_empty() {
        stream
            .send_data(lease.io().queue(body.clone()), true)
            .map_err(closed)?;
    }
    let (head, body) = response.await.map_err(closed)?.into_parts();
    let (status, is_peer) = (head.status.as_u16(), lease.is_secured());
    let verdict = Verdict::of(status, &head.headers, is_peer, SystemTime::now);
    let answered = attempt.answered(status, verdict, Replayable::ONCE, flow);
    let drained = drain(body).await.map_err(closed);
    lease.record_end();
    answered.and(drained)
}

/// Reads a body to its end.
async fn drain(mut body: RecvStream) -> Result<(), h2::Error> {
    while let Some(data) = body.data().await {
        body.flow_control().release_capacity(data?.len())?;
    }
    Ok(())
}
