//! Steps 3 to 8, which both paths take in the same way: find out what a connection carries and who calls, and hand it to the one
//! that carries it.

use std::rc::Rc;
use std::time::Instant;

use crate::detect::{Onlooker, Protocol};
use crate::error::Failure;
use crate::io::Io;
use crate::policy::Caller;
use crate::race::{self, Dialed};
use crate::tls::Alpn;
use crate::worker::Flow;
use crate::{copy, http1, http2};

/// Serves a connection until it ends.
pub async fn serve(mut client: Io, mut flow: Flow) {
    let mut dialed = None;
    // Where the protocol is not declared, the first bytes tell.
    let declared = flow.declared_protocol();
    let onlooker = declared.is_none().then(Onlooker::default);
    let protocol = loop {
        match race::first_word(&mut client, &flow, declared, &mut dialed).await {
            Ok(Protocol::MeshTls) => match flow.worker.tls.accept(client, flow.peer).await {
                Ok((secured, identity, alpn)) => {
                    client = secured;
                    flow.caller = Caller::Peer(Rc::new(identity));
                    // The caller's ALPN can't switch detection off: it counts only where it leads to an HTTP parser.
                    match (declared, alpn) {
                        (Some(protocol), _) => break protocol,
                        (None, Alpn::Http1) => break Protocol::Http1,
                        (None, Alpn::Http2) => break Protocol::Http2,
                        (None, Alpn::Opaque | Alpn::Detect) => {}
                    }
                }
                Err(failure) => return note(&flow, &failure),
            },
            Ok(protocol) => break protocol,
            Err(failure) => return refuse(client, &flow, &failure),
        }
    };
    match protocol {
        Protocol::Http1 => {
            if let Some(dialed) = dialed {
                race::keep(dialed).await;
            }
            http1::serve(client, &flow).await;
        }
        // In a box: it would double what the task of a connection takes that carries anything else.
        Protocol::Http2 => Box::pin(http2::serve(client, Rc::new(flow))).await,
        Protocol::Opaque | Protocol::MeshTls => {
            let dialed = match (flow.admits_unseen(), dialed) {
                (Err(refused), _) => Err(refused),
                (Ok(()), Some(dialed)) => Ok(dialed),
                (Ok(()), None) => race::dial(&flow, Alpn::Opaque).await,
            };
            match dialed {
                Ok(dialed) => opaque(client, dialed, &flow, onlooker).await,
                Err(failure) => refuse(client, &flow, &failure),
            }
        }
    }
}

/// Bytes both ways.
async fn opaque(mut client: Io, mut dialed: Dialed, flow: &Flow, onlooker: Option<Onlooker>) {
    let begun = Instant::now();
    let expiry = flow.expiry(&client, &dialed.upstream);
    let copied = copy::both(&mut client, &mut dialed.upstream, onlooker, expiry).await;
    drop(dialed.in_flight);
    if copied.expired {
        client.reset();
        dialed.upstream.reset();
    } else if copied.was_http {
        refuse(
            client,
            flow,
            &Failure::BadRequest(
                "an HTTP request that paused in its first line: it had been taken for another protocol",
            ),
        );
    }
    flow.worker
        .metrics
        .opaque(flow.direction, copied.sent, copied.received);
    flow.worker
        .dumps
        .opaque(&flow.info(), copied.sent, copied.received, begun.elapsed());
}

/// Ends a connection that can't be carried as the kernel would: with a reset.
fn refuse(client: Io, flow: &Flow, failure: &Failure) {
    note(flow, failure);
    client.reset();
}

fn note(flow: &Flow, failure: &Failure) {
    flow.worker.metrics.failure(flow.direction, failure);
    let (path, peer, destination, code) = (
        flow.direction.name(),
        flow.peer,
        flow.destination.name(),
        failure.code(),
    );
    // Nobody else may ever hear of it: what was refused was no HTTP, or had not come so far.
    if failure.is_identity_failure() && flow.worker.may_complain(Instant::now()) {
        return tracing::warn!(path, %peer, %destination, code, "{failure}");
    }
    tracing::debug!(path, %peer, %destination, code, "{failure}");
}
