//! A copy of an HTTP/2 request for a mirror: sent whole; its response is read and dropped.

use std::rc::Rc;
use std::time::SystemTime;

use bytes::Bytes;
use h2::RecvStream;
use http::Request;
use http::request::Parts;

use crate::balance::Endpoint;
use crate::dump::Direction;
use crate::error::Failure;
use crate::flow::Flow;
use crate::forward::{AttemptError, Attempts, Forward, Replayable};
use crate::http::verdict::Verdict;
use crate::io::Io;

/// A copy.
pub struct Copy {
    flow: Rc<Flow>,
    attempts: Attempts,
    parts: Parts,
    body: Bytes,
}

impl Copy {
    /// A request with this head and body.
    pub fn new(flow: Rc<Flow>, attempts: Attempts, parts: Parts, body: Bytes) -> Self {
        Self {
            flow,
            attempts,
            parts,
            body,
        }
    }
}

/// Reads a body to its end.
async fn drain(mut body: RecvStream) -> Result<(), h2::Error> {
    while let Some(data) = body.data().await {
        body.flow_control().release_capacity(data?.len())?;
    }
    Ok(())
}

impl Forward for Copy {
    type Outcome = ();

    fn authorize(&mut self, _: &Flow) -> Result<(), Failure> {
        Ok(())
    }

    fn attempts(&mut self) -> &mut Attempts {
        &mut self.attempts
    }

    async fn attempt(&mut self, endpoint: &Rc<Endpoint>) -> Result<(), AttemptError> {
        let worker = self.flow.worker.clone();
        let expiry = |io: &Io| worker.expiry(io, Direction::Outbound);
        let dialer = self.attempts.dialer(&worker.tls);
        let leased = endpoint.pool().http2(dialer, expiry).await;
        let lease = leased.map_err(AttemptError::connect)?;
        self.attempts.connected();
        let closed = |error: h2::Error| {
            let (address, reason) = (endpoint.address, error.to_string());
            AttemptError::last(Failure::UpstreamClosed { address, reason })
        };
        let request = Request::from_parts(self.parts.clone(), ());
        let (response, mut stream) = lease.send(request, self.body.is_empty()).map_err(closed)?;
        if !self.body.is_empty() {
            stream.send_data(self.body.clone(), true).map_err(closed)?;
        }
        let (parts, body) = response.await.map_err(closed)?.into_parts();
        let (status, is_peer) = (parts.status.as_u16(), lease.is_secured());
        let verdict = Verdict::of(status, &parts.headers, is_peer, SystemTime::now);
        let answered = self
            .attempts
            .answered(verdict, Replayable::ONCE, &self.flow);
        let drained = drain(body).await.map_err(closed);
        self.attempts.end();
        answered.and(drained)
    }

    fn rewind(&mut self) -> bool {
        true
    }
}
