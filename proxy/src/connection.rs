//! The path of a connection, inbound and outbound, one call a step. Read this first; `forward.rs`
//! has steps 5 to 7.

use std::net::SocketAddr;
use std::rc::Rc;

use tokio::net::TcpStream;

use crate::detect::{Protocol, RequestDetector};
use crate::dump::Direction;
use crate::error::Failure;
use crate::flow::Flow;
use crate::io::Io;
use crate::opaque;
use crate::orig_dst::original_destination;
use crate::policy::Caller;
use crate::protocol::detect;
use crate::record::ConnectionRecord;
use crate::tls::Alpn;
use crate::worker::Worker;
use crate::{http1, http2};

const TOO_MANY_PENDING: &str = "too many unauthenticated connections of one address";
const TOO_MANY_OF_CALLER: &str = "too many connections of one caller";

/// Carries an accepted connection (step 1) until it ends.
pub async fn carry(worker: Rc<Worker>, direction: Direction, stream: TcpStream, peer: SocketAddr) {
    // 2. Original destination. Inbound it is the application, at the pod's own address; outbound,
    // discovery knows it, or the connection passes through to it.
    let original = match original_destination(&stream, &worker.own_ports()) {
        Ok(original) => original,
        Err(error) => {
            let path = direction.name();
            return tracing::warn!(path, %peer, "connection closed: {error}");
        }
    };
    let (destination, caller) = match direction {
        Direction::Inbound => (worker.apps.fixed(original), Caller::Unauthenticated),
        Direction::Outbound => (
            worker.destinations.get_or_watch(original).await,
            Caller::App,
        ),
    };
    serve(
        Io::new(stream),
        Flow {
            worker,
            direction,
            peer,
            destination,
            caller,
        },
    )
    .await;
}

/// Steps 3 to 8.
pub async fn serve(mut client: Io, mut flow: Flow) {
    // Before authentication only the address tells clients apart.
    let mut pending = None;
    if matches!(flow.caller, Caller::Unauthenticated) {
        pending = flow.worker.pending.acquire(flow.peer.ip());
        if pending.is_none() {
            return refuse(client, flow, &Failure::Overloaded(TOO_MANY_PENDING));
        }
    }
    // A connection that detection dials while the client is silent.
    let mut dialed = None;
    let declared = flow.declared_protocol();
    let protocol = loop {
        // 3. Detect.
        match detect(&mut client, &flow, declared, &mut dialed).await {
            Ok(Protocol::MeshTls) => {}
            Ok(protocol) => break protocol,
            Err(failure) => return refuse(client, flow, &failure),
        }
        // 4. Identity: the peer's certificate. Its ALPN cannot switch detection off: it counts only
        // where it leads to an HTTP parser.
        let (secured, identity, alpn) = match flow.worker.tls.accept(client, flow.peer).await {
            Ok(session) => session,
            Err(failure) => return ConnectionRecord::new(&Rc::new(flow)).fail(&failure),
        };
        client = secured;
        flow.caller = Caller::Peer(Rc::new(identity));
        pending = None;
        match (declared, alpn) {
            (Some(protocol), _) => break protocol,
            (None, Alpn::Http1) => break Protocol::Http1,
            (None, Alpn::Http2) => break Protocol::Http2,
            (None, Alpn::Opaque | Alpn::Detect) => {}
        }
    };
    drop(pending);
    let caller = match &flow.caller {
        Caller::App => None,
        Caller::Unauthenticated => Some(flow.worker.callers.acquire(None)),
        Caller::Peer(identity) => Some(flow.worker.callers.acquire(Some(identity.clone()))),
    };
    if matches!(caller, Some(None)) {
        return refuse(client, flow, &Failure::Overloaded(TOO_MANY_OF_CALLER));
    }
    // 4. Authorization, per request or of the connection. 5. Route, 6. balance, 7. connect: forward.rs.
    // 8. Serve or copy.
    match protocol {
        Protocol::Http1 => {
            if let Some(dialed) = dialed {
                opaque::pool(dialed).await;
            }
            http1::serve(client, &Rc::new(flow)).await;
        }
        // Boxed: it would double the size of every connection's task.
        Protocol::Http2 => Box::pin(http2::serve(client, Rc::new(flow))).await,
        Protocol::Opaque | Protocol::MeshTls => {
            let detector = declared.is_none().then(RequestDetector::default);
            opaque::serve(client, Rc::new(flow), dialed, detector).await;
        }
    }
}

/// Ends a connection that cannot be carried as the kernel does: with a reset.
fn refuse(client: Io, flow: Flow, failure: &Failure) {
    ConnectionRecord::new(&Rc::new(flow)).fail(failure);
    client.reset();
}
