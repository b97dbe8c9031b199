//! Steps 4 to 8 of a connection that is not HTTP: it is authorized as a whole, forwarded once, and
//! then copied.

use std::rc::Rc;
use std::time::Instant;

use tokio::io::AsyncWriteExt;

use crate::balance::Endpoint;
use crate::connect::{Slot, Upstream};
use crate::copy::{self, End};
use crate::detect::RequestDetector;
use crate::error::Failure;
use crate::flow::Flow;
use crate::forward::{AttemptError, Attempts, Forward, forward};
use crate::io::Io;
use crate::memory::EXHAUSTED;
use crate::record::ConnectionRecord;
use crate::tls::Alpn;

/// A new connection to an endpoint, which counts as in flight there.
pub struct Dialed {
    /// The connection.
    pub upstream: Io,
    /// The slot of the connection, if these are limited.
    slot: Option<Slot>,
    /// The endpoint, and the attempts that the balancer counts.
    pub attempts: Attempts,
}

/// Copies bytes in both directions. `dialed` is the upstream connection, if it exists already. The
/// connection is reset if the `detector` finds a request in the client's first line.
pub async fn serve(
    mut client: Io,
    flow: Rc<Flow>,
    dialed: Option<Dialed>,
    detector: Option<RequestDetector>,
) {
    let mut record = ConnectionRecord::new(&flow);
    let mut memory = flow.charge();
    let dialed = match (flow.authorize_connection(), dialed) {
        (Err(refused), _) => Err(refused),
        (Ok(()), Some(dialed)) => Ok(dialed),
        (Ok(()), None) => dial(&flow, Alpn::Opaque).await,
    };
    let Dialed {
        mut upstream,
        slot: _slot,
        attempts,
    } = match dialed {
        Ok(dialed) => dialed,
        Err(failure) => {
            record.fail(&failure);
            return client.reset();
        }
    };
    let mut end = flow.copy_end(&client, &upstream);
    let charge = &mut |bytes| memory.hold(bytes).is_ok();
    let copied = copy::bidirectional(&mut client, &mut upstream, detector, &mut end, charge).await;
    attempts.closed(copied.received > 0, copied.upstream_ended_first);
    record.copied(copied.sent, copied.received);
    match copied.end {
        End::Http => record.fail(&Failure::BadRequest(
            "the client paused in the first line of an HTTP request",
        )),
        End::Overloaded => record.fail(&EXHAUSTED),
        End::Complete | End::Failed | End::Expired => {}
    }
}

/// Connects to one of the endpoints that the destination, or its routes, have for the connection.
pub async fn dial(flow: &Flow, alpn: Alpn) -> Result<Dialed, Failure> {
    let backend = flow.connection_backend().await?;
    let mut dial = Dial {
        alpn,
        attempts: Attempts::default(),
    };
    dial.attempts.preference = backend.preference(None, flow.peer);
    let Upstream { io, connection, .. } = forward(&mut dial, flow, &backend).await?;
    Ok(Dialed {
        upstream: io,
        slot: connection,
        attempts: dial.attempts,
    })
}

/// Returns a connection to the pool whose client sends HTTP/1. Flushes it first: the peer waits for
/// the end of the TLS handshake.
pub async fn pool(
    Dialed {
        mut upstream,
        slot: _slot,
        attempts,
    }: Dialed,
) {
    if let (Ok(()), Some(endpoint)) = (upstream.flush().await, attempts.endpoint()) {
        endpoint.pool().checkin_http1(upstream, Instant::now());
    }
}

struct Dial {
    alpn: Alpn,
    attempts: Attempts,
}

impl Forward for Dial {
    type Outcome = Upstream;

    fn authorize(&mut self, flow: &Flow) -> Result<(), Failure> {
        flow.authorize_connection()
    }

    fn attempts(&mut self) -> &mut Attempts {
        &mut self.attempts
    }

    async fn attempt(
        &mut self,
        flow: &Flow,
        endpoint: &Rc<Endpoint>,
    ) -> Result<Upstream, AttemptError> {
        let dialer = self.attempts.dialer(flow);
        let dialed = endpoint.pool().opaque(dialer, self.alpn).await;
        let upstream = dialed.map_err(AttemptError::connect)?;
        self.attempts.opened();
        Ok(upstream)
    }

    fn rewind(&mut self) -> bool {
        true
    }
}
