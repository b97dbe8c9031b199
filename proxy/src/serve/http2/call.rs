//! A request of the proxy's own in HTTP/2: sent whole; its response is read whole, or dropped.

use std::future::poll_fn;
use std::pin::pin;
use std::time::SystemTime;

use bytes::BytesMut;
use diy_mesh_http2::{Error, Receiver, Request};
use http::HeaderMap;

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
    request: &Request,
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
    let failed = |error: Error| closed(error.to_string());
    let body = &call.body;
    let (sender, receiver) = lease.send(request, body.is_empty(), None).map_err(failed)?;
    if !body.is_empty() {
        sender.send(body.clone(), true).map_err(failed)?;
    }
    let head = loop {
        let head = poll_fn(|cx| receiver.poll_response(cx))
            .await
            .map_err(failed)?;
        if !head.message.status.is_informational() {
            break head.message;
        }
    };
    let (status, is_peer) = (head.status.as_u16(), lease.is_peer());
    let verdict = Verdict::of(status, &head.fields, is_peer, SystemTime::now);
    let answered = attempt.answered(status, verdict, call.replayable(), flow);
    let (mut fields, mut kept) = (HeaderMap::from(&head.fields), BytesMut::new());
    let read = {
        let reading = pin!(read(&receiver, &mut fields, &mut kept, call.max_answer));
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
    body: &Receiver,
    fields: &mut HeaderMap,
    kept: &mut BytesMut,
    max: Option<usize>,
) -> Result<(), Incomplete> {
    while let Some(data) = poll_fn(|cx| body.poll_data(cx)).await {
        let mut data = data?;
        body.release(data.len());
        if let Some(max) = max {
            let is_longer = kept.len() + data.len() > max;
            data.truncate(max - kept.len());
            kept.extend_from_slice(&data);
            if is_longer {
                return Err(Incomplete("it is too long".to_owned()));
            }
        }
    }
    if let Some(trailers) = poll_fn(|cx| body.poll_trailers(cx)).await? {
        fields.extend(HeaderMap::from(&trailers.message));
    }
    Ok(())
}
