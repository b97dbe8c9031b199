//! Steps 4 to 8 of a connection that is not HTTP: it is authorized as a whole, forwarded once, and
//! then copied.

use std::rc::Rc;
use std::time::Instant;

use tokio::io::AsyncWriteExt;

use crate::context::flow::Flow;
use crate::context::record::ConnectionRecord;
use crate::error::Failure;
use crate::http::request_line::RequestDetector;
use crate::limits::memory::EXHAUSTED;
use crate::route::AttemptSettings;
use crate::secure::io::Io;
use crate::secure::tls::Alpn;
use crate::serve::attempts::{AttemptError, Attempts, Step};
use crate::serve::copy::{self, End};
use crate::upstream::balance::{Endpoint, InFlight};
use crate::upstream::connect::{Slot, Upstream};

/// A new connection to an endpoint, which counts as in flight there.
pub struct Dialed {
    /// The connection.
    pub upstream: Io,
    /// The slot of the connection, if these are limited.
    slot: Option<Slot>,
    /// The endpoint.
    pub endpoint: Rc<Endpoint>,
    in_flight: InFlight,
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
    let mut allowed = flow.allowed();
    let dialed = match dialed {
        Some(dialed) => flow.authorize_connection().map(|_| dialed),
        None => dial(&flow, Alpn::Opaque).await,
    };
    // The policy may have changed in the meantime.
    let dialed = dialed.and_then(|dialed| {
        let verdict = flow.judge_again(&mut allowed, || None);
        verdict.map(|()| dialed)
    });
    let Dialed {
        mut upstream,
        slot: _slot,
        in_flight,
        ..
    } = match dialed {
        Ok(dialed) => dialed,
        Err(failure) => {
            record.fail(&failure);
            return client.reset();
        }
    };
    flow.audit(None, None);
    if let Some(edge) = flow.new_edge(None) {
        flow.worker.edges.add(*edge);
    }
    let mut end = flow.copy_end(&client, &upstream, allowed, None);
    let charge = &mut |bytes| memory.hold(bytes).is_ok();
    let copied = copy::bidirectional(&mut client, &mut upstream, detector, &mut end, charge).await;
    in_flight.closed(copied.received > 0, copied.upstream_ended_first);
    record.copied(copied.sent, copied.received);
    match copied.end {
        End::Http => record.fail(&Failure::BadRequest(
            "the client paused in the first line of an HTTP request",
        )),
        End::Overloaded => record.fail(&EXHAUSTED),
        End::Expired => {
            let denied = flow.judge(None, &flow.allowed()).err();
            denied.iter().for_each(|failure| record.fail(failure));
        }
        End::Complete | End::Failed => {}
    }
}

/// Connects to one of the endpoints that the destination, or its routes, have for the connection.
pub async fn dial(flow: &Flow, alpn: Alpn) -> Result<Dialed, Failure> {
    // 4. Authorization.
    let permit = flow.authorize_connection()?;
    // 5. Route.
    let backend = flow.connection_backend().await?;
    let settings = AttemptSettings {
        preference: backend.preference(None, flow.peer),
        ..AttemptSettings::default()
    };
    let mut attempts = Attempts::new(flow, &backend, settings, permit);
    loop {
        // 6. Balance.
        let mut attempt = attempts.begin(flow)?;
        // 7. Connect.
        let dialed = attempt
            .endpoint
            .pool()
            .opaque(attempt.dialer(flow), alpn)
            .await;
        let error = match dialed {
            Ok(Upstream { io, connection, .. }) => {
                attempt.in_flight.opened();
                return Ok(Dialed {
                    upstream: io,
                    slot: connection,
                    endpoint: attempt.endpoint,
                    in_flight: attempt.in_flight,
                });
            }
            Err(failure) => AttemptError::connect(failure),
        };
        if let Step::Done(failure) = attempt.next(error, flow, || true) {
            return Err(failure);
        }
    }
}

/// Returns a connection to the pool whose client sends HTTP/1. Flushes it first: the peer waits for
/// the end of the TLS handshake.
pub async fn pool(mut dialed: Dialed) {
    if dialed.upstream.flush().await.is_ok() {
        let pool = dialed.endpoint.pool();
        pool.checkin_http1(dialed.upstream, Instant::now());
    }
}
