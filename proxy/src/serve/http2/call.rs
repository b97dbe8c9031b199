//! A request of the proxy's own in HTTP/2: sent whole; its response is read whole, or dropped.

use std::pin::pin;
use std::time::SystemTime;

use bytes::BytesMut;
use h2::RecvStream;
use http::request::Parts;
use http::{HeaderMap, Request};

use crate::context::flow::Flow;
use crate::http::answer::{Answer, Incomplete};
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
) -> Result<Answer, AttemptError> {
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
    let (head, mut body) = response.await.map_err(failed)?.into_parts();
    let (status, is_peer) = (head.status.as_u16(), lease.is_peer());
    let verdict = Verdict::of(status, &head.headers, is_peer, SystemTime::now);
    let answered = attempt.answered(status, verdict, call.replayable(), flow);
    let (mut fields, mut kept) = (head.headers, BytesMut::new());
    let read = {
        let reading = pin!(read(&mut body, &mut fields, &mut kept, call.max_answer));
        attempt.deadline().limit(reading).await
    };
    lease.record_end();
    answered?;
    Ok(Answer {
        status: head.status,
        fields: Ok(fields),
        body: kept.freeze(),
        missing: read.err().map(|incomplete| incomplete.0),
    })
}

/// Reads a body to its end, with its trailers. Keeps at most `max` bytes, if it is not dropped.
async fn read(
    body: &mut RecvStream,
    fields: &mut HeaderMap,
    kept: &mut BytesMut,
    max: Option<usize>,
) -> Result<(), Incomplete> {
    while let Some(data) = body.data().await {
        let mut data = data?;
        body.flow_control().release_capacity(data.len())?;
        if let Some(max) = max {
            let is_longer = kept.len() + data.len() > max;
            data.truncate(max - kept.len());
            kept.extend_from_slice(&data);
            if is_longer {
                return Err(Incomplete("it is too long".to_owned()));
            }
        }
    }
    fields.extend(body.trailers().await?.unwrap_or_default());
    Ok(())
}
