//! Steps 4 to 8 of a connection that is not HTTP: it is authorized as a whole, forwarded once, and
//! then copied.

use std::future::poll_fn;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt;
use tokio::time::timeout_at;

use crate::context::flow::Flow;
use crate::context::record::ConnectionRecord;
use crate::egress::{Outside, name_of};
use crate::error::Failure;
use crate::http::request_line::RequestDetector;
use crate::limits::memory::{Charge, EXHAUSTED};
use crate::route::AttemptSettings;
use crate::secure::io::Io;
use crate::secure::tls::{self, Alpn};
use crate::serve::attempts::{AttemptError, Attempts, Step};
use crate::serve::copy::{self, End};
use crate::serve::outside;
use crate::upstream::balance::{Endpoint, InFlight};
use crate::upstream::connect::{Slot, Upstream};

/// How long a client may take for its ClientHello to a destination that needs its name.
const CLIENT_HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// A new connection to an endpoint, which counts as in flight there.
pub struct Dialed {
    /// The connection.
    pub upstream: Io,
    /// The slot of the connection, if these are limited.
    slot: Option<Slot>,
    /// The endpoint.
    pub endpoint: Rc<Endpoint>,
    in_flight: InFlight,
    /// The endpoint, if it is outside of the cluster.
    outside: Option<Outside>,
}

/// Copies bytes in both directions. `dialed` is the upstream connection, if it exists already. The
/// connection is reset if the `detector` finds a request in the client's first line. There is none if
/// the protocol is declared: then nothing has inspected the client's bytes.
pub async fn serve(
    mut client: Io,
    flow: Rc<Flow>,
    dialed: Option<Dialed>,
    detector: Option<RequestDetector>,
) {
    let mut record = ConnectionRecord::new(&flow);
    let mut memory = flow.charge();
    let alpn = match &detector {
        Some(_) => Alpn::Inspected,
        None => Alpn::Opaque,
    };
    let mut allowed = flow.allowed();
    let dialed = match dialed {
        Some(dialed) => flow.authorize_silent_client().map(|()| dialed),
        None => match server_name(&mut client, &flow, &mut memory).await {
            Ok(name) => dial(&flow, alpn, name).await,
            Err(failure) => Err(failure),
        },
    };
    // The policy may have changed in the meantime.
    let dialed = dialed.and_then(|dialed| {
        allowed.outside.clone_from(&dialed.outside);
        let verdict = flow.judge_again(&mut allowed, || None);
        verdict.map(|()| dialed)
    });
    let Dialed {
        mut upstream,
        slot: _slot,
        endpoint,
        in_flight,
        ..
    } = match dialed {
        Ok(dialed) => dialed,
        Err(failure) => {
            record.fail(&failure);
            return client.reset();
        }
    };
    record.connected(&endpoint, upstream.socket().local_addr().ok());
    flow.audit(None, None);
    let mut edge = flow.new_edge(None);
    // A connection without a byte of its client is no call, and listed apart: a port scan, or a check
    // of a balancer.
    let mut called = |[sent, _]: [u64; 2]| {
        if sent > 0
            && let Some(edge) = edge.take()
        {
            flow.worker.edges.add(*edge);
        }
    };
    let mut end = flow.copy_end(&client, &upstream, allowed.clone(), None);
    let charge = &mut |held, bytes| {
        called(bytes);
        record.copying(bytes);
        memory.hold(held).is_ok()
    };
    let copied = copy::bidirectional(&mut client, &mut upstream, detector, &mut end, charge).await;
    called([copied.sent, copied.received]);
    if let Some(edge) = edge.take() {
        flow.worker.edges.add(edge.silent());
    }
    in_flight.closed(copied.received > 0, copied.upstream_ended_first);
    record.copied(copied.sent, copied.received);
    match copied.end {
        End::Http => record.fail(&Failure::BadRequest(
            "the client paused in the first line of an HTTP request",
        )),
        End::Overloaded => record.fail(&EXHAUSTED),
        End::Expired => {
            let denied = flow.judge(None, &allowed).err();
            denied.iter().for_each(|failure| record.fail(failure));
        }
        End::Complete | End::Failed => {}
    }
}

/// The name that the client's ClientHello has, of a destination outside of the cluster. Without
/// policies of egress, only if the ClientHello is complete.
async fn server_name(
    client: &mut Io,
    flow: &Flow,
    memory: &mut Charge,
) -> Result<Option<String>, Failure> {
    if flow.outside().is_none() {
        return Ok(None);
    }
    let waits = flow.worker.policy().egress.is_some();
    let until = Instant::now() + CLIENT_HELLO_TIMEOUT;
    loop {
        let name = tls::server_name(client.unread());
        if !waits || name.is_some() {
            return Ok(name.and_then(|name| name_of(name.as_bytes())));
        }
        let filled = timeout_at(until.into(), poll_fn(|cx| client.poll_fill(cx)));
        if !matches!(filled.await, Ok(Ok(1..))) {
            return Ok(None);
        }
        memory.hold(client.buffered())?;
    }
}

/// Connects to one of the endpoints that the destination, or its routes, have for the connection.
/// `name` is the name of a destination outside of the cluster.
pub async fn dial(flow: &Flow, alpn: Alpn, name: Option<String>) -> Result<Dialed, Failure> {
    // 4. Authorization.
    let mut permit = flow.authorize_connection()?;
    // 5. Route.
    let mut backend = flow.connection_backend().await?;
    outside::find(flow, name, &mut backend, &mut permit).await?;
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
                    outside: attempt.outside,
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
