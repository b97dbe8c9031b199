//! The path of a connection, inbound and outbound, one call a step. Read this first. Steps 4 to 8 of a
//! request are in `http1/mod.rs` and in `http2/exchange.rs`.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use diy_mesh_runtime::listen::Acceptor;
use socket2::SockRef;
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::spawn_local;

use crate::context::flow::Flow;
use crate::context::record::ConnectionRecord;
use crate::context::worker::Worker;
use crate::error::Failure;
use crate::http::request_line::RequestDetector;
use crate::inbound::policy::Caller;
use crate::limits::memory::{ConnectionSlot, PENDING_COST};
use crate::path::detect::detect;
use crate::path::redirect;
use crate::protocol::Protocol;
use crate::secure::io::Io;
use crate::secure::tls::Alpn;
use crate::serve::{http1, http2, opaque, trace};
use diy_mesh_model::exchange::Direction;

/// The listening sockets of a worker.
pub struct Listeners {
    /// For connections to the application.
    pub inbound: Vec<std::net::TcpListener>,
    /// For connections of the application.
    pub outbound: Vec<std::net::TcpListener>,
}

/// Serves the connections of one worker until the proxy has drained.
pub async fn serve(worker: Rc<Worker>, listeners: Listeners) {
    for (direction, listeners) in [
        (Direction::Inbound, listeners.inbound),
        (Direction::Outbound, listeners.outbound),
    ] {
        for listener in listeners {
            spawn_local(accept(worker.clone(), direction, listener));
        }
    }
    let exporting = spawn_local(trace::export(worker.clone()));
    worker.maintain_until_drained().await;
    exporting.abort();
    trace::export_last(&worker).await;
}

/// 1. Accept. Never ends: after an error of accept(2), it logs the error and waits.
async fn accept(worker: Rc<Worker>, direction: Direction, listener: std::net::TcpListener) {
    let mut acceptor = match TcpListener::from_std(listener) {
        Ok(listener) => Acceptor::new(listener),
        Err(error) => return tracing::error!("cannot listen: {error}"),
    };
    let original = match direction {
        Direction::Inbound => inbound_destination,
        Direction::Outbound => original_destination,
    };
    loop {
        let (stream, peer) = acceptor.accept().await;
        // Connections of applications have an address of the pod.
        let other = if direction == Direction::Outbound && peer.ip().is_loopback() {
            redirect::answer(stream, worker.config.inbound_port)
        } else {
            Some(stream)
        };
        let Some(stream) = other else {
            continue;
        };
        start(&worker, direction, stream, peer, original);
    }
}

/// Starts the task of an accepted connection, whose original destination `original` finds, given the
/// ports of the proxy. Resets the connection if it gets no slot: then nothing is allocated for it.
pub fn start(
    worker: &Rc<Worker>,
    direction: Direction,
    stream: TcpStream,
    peer: SocketAddr,
    original: impl FnOnce(&TcpStream, &[u16]) -> Result<SocketAddr, OrigDstError> + 'static,
) {
    let Some(open) = worker.admit(direction, peer.ip()) else {
        return Io::new(stream).reset();
    };
    let (worker, slot) = (worker.clone(), open.slot.clone());
    let client = Io::in_slot(stream, slot.clone());
    // Boxed, as all steps are: the task of a connection that waits has only the step that it is in.
    let redirected = Box::pin(redirected(worker, direction, client, peer, slot, original));
    spawn_local(async move {
        let steps = pin!(async {
            let Some((client, flow)) = redirected.await else {
                return;
            };
            carry(client, flow).await;
        });
        open.run(steps).await;
    });
}

/// The flow of a redirected connection, or `None` if it is closed.
async fn redirected(
    worker: Rc<Worker>,
    direction: Direction,
    client: Io,
    peer: SocketAddr,
    slot: Rc<ConnectionSlot>,
    original: impl FnOnce(&TcpStream, &[u16]) -> Result<SocketAddr, OrigDstError>,
) -> Option<(Io, Flow)> {
    // 2. Original destination. Inbound it is the application, at the pod's own address; outbound,
    // discovery knows it, or the connection passes through to it.
    let original = match original(client.socket(), &worker.own_ports()) {
        Ok(original) => original,
        Err(error) => {
            if worker.warnings.should_log(Instant::now()) {
                let path = direction.name();
                tracing::warn!(path, %peer, "connection closed: {error}");
            }
            return None;
        }
    };
    let (destination, caller) = match direction {
        Direction::Inbound => (worker.apps.fixed(original), Caller::Unauthenticated),
        Direction::Outbound => (
            worker.destinations.get_or_watch(original).await,
            Caller::App,
        ),
    };
    let flow = Flow {
        worker,
        direction,
        peer,
        original,
        destination,
        caller,
        slot,
        called_by: Default::default(),
        counted: Default::default(),
    };
    Some((client, flow))
}

/// Carries a connection from step 3 on until it ends.
pub fn carry(client: Io, flow: Flow) -> impl Future<Output = ()> {
    let (worker, direction) = (flow.worker.clone(), flow.direction);
    let detected = Box::pin(detected(client, flow));
    async move {
        let steps = pin!(async {
            if let Some(served) = detected.await {
                served.await;
            }
        });
        worker.run_under_policy(direction, steps).await;
    }
}

/// Steps 3 and 4 of a connection. Returns its further steps, or None if it has ended.
async fn detected(mut client: Io, mut flow: Flow) -> Option<Pin<Box<dyn Future<Output = ()>>>> {
    // The state of a TLS handshake, until the protocol is known.
    let mut pending = flow.charge();
    if let Err(failure) = pending.begin(PENDING_COST) {
        refuse(client, flow, &failure);
        return None;
    }
    // A connection that detection dials while the client is silent.
    let mut dialed = None;
    let declared = flow.declared_protocol();
    let mut alpn = None;
    let protocol = loop {
        // 3. Detect.
        match detect(&mut client, &flow, declared, alpn, &mut dialed).await {
            Ok(Protocol::MeshTls) => {}
            Ok(protocol) => break protocol,
            Err(failure) => {
                if !is_silent_end(&failure, client.unread()) {
                    refuse(client, flow, &failure);
                }
                return None;
            }
        }
        // 4. Identity: the peer's certificate. Its ALPN cannot switch detection off: it counts only
        // where it leads to an HTTP parser.
        let accepted = flow.worker.tls.accept(client, flow.peer, flow.charge());
        let (secured, identity, negotiated) = match accepted.await {
            Ok(session) => session,
            Err(failure) => {
                if !is_silent_end(&failure, &[]) {
                    ConnectionRecord::new(&Rc::new(flow)).fail(&failure);
                }
                return None;
            }
        };
        client = secured;
        flow.caller = Caller::Peer(Arc::new(identity));
        flow.assign_slot();
        match (declared, negotiated) {
            (Some(protocol), _) => break protocol,
            (None, Alpn::Http1) => break Protocol::Http1,
            (None, Alpn::Http2) => break Protocol::Http2,
            (None, Alpn::Opaque | Alpn::Inspected) => alpn = Some(negotiated),
        }
    };
    drop(pending);
    if flow.caller == Caller::Unauthenticated {
        flow.worker.tls.forget(flow.peer.ip());
        flow.assign_slot();
    }
    // Steps 4 to 8, per request or for the connection.
    let flow = Rc::new(flow);
    Some(match protocol {
        Protocol::Http1 => {
            if let Some(dialed) = dialed {
                opaque::pool(dialed).await;
            }
            Box::pin(http1::serve(client, flow))
        }
        Protocol::Http2 => Box::pin(http2::serve(client, flow)),
        Protocol::Opaque | Protocol::MeshTls => {
            let detector = declared.is_none().then(RequestDetector::default);
            Box::pin(opaque::serve(client, flow, dialed, detector))
        }
    })
}

/// Whether the client closed its connection before it sent a byte for the application: another proxy
/// does so with a connection that it no longer needs. It has requested nothing.
fn is_silent_end(failure: &Failure, unread: &[u8]) -> bool {
    unread.is_empty() && matches!(failure, Failure::BadRequest(_))
}

/// Ends a connection that cannot be carried as the kernel does: with a reset.
fn refuse(client: Io, flow: Flow, failure: &Failure) {
    ConnectionRecord::new(&Rc::new(flow)).fail(failure);
    client.reset();
}

/// Reads SO_ORIGINAL_DST, which the REDIRECT rule sets. `own_ports` are the ports of the proxy.
pub fn original_destination(
    stream: &TcpStream,
    own_ports: &[u16],
) -> Result<SocketAddr, OrigDstError> {
    let local = stream.local_addr().map_err(OrigDstError::Unknown)?;
    let socket = SockRef::from(stream);
    let original = if local.is_ipv4() {
        socket.original_dst_v4()
    } else {
        socket.original_dst_v6()
    };
    let original = original.map_err(OrigDstError::Unknown)?.as_socket();
    let original =
        original.ok_or_else(|| OrigDstError::Unknown(io::ErrorKind::AddrNotAvailable.into()))?;
    check(original, local, own_ports)
}

/// The original destination of an inbound connection: an address of this pod. A host on the link of
/// the pod can send packets for any other one, or for loopback, and the rules redirect these, too.
fn inbound_destination(stream: &TcpStream, own_ports: &[u16]) -> Result<SocketAddr, OrigDstError> {
    let original = original_destination(stream, own_ports)?;
    let local = stream.local_addr().map_err(OrigDstError::Unknown)?;
    if is_of_pod(original.ip(), local.ip(), has_address) {
        Ok(original)
    } else {
        Err(OrigDstError::Foreign(original))
    }
}

/// Whether others reach this pod by an address: `local`, or one that an interface has.
fn is_of_pod(original: IpAddr, local: IpAddr, has_address: impl Fn(IpAddr) -> bool) -> bool {
    let address = original.to_canonical();
    let is_host = !address.is_loopback() && !address.is_unspecified() && !address.is_multicast();
    is_host && (same(original, local) || has_address(address))
}

/// Whether this network namespace has the address.
fn has_address(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

/// Rejects own ports at addresses of this pod.
fn check(
    original: SocketAddr,
    local: SocketAddr,
    own_ports: &[u16],
) -> Result<SocketAddr, OrigDstError> {
    let is_own_address = original.ip().is_loopback()
        || original.ip().is_unspecified()
        || same(original.ip(), local.ip());
    if is_own_address && own_ports.contains(&original.port()) {
        Err(OrigDstError::Loop(original))
    } else {
        Ok(original)
    }
}

fn same(one: IpAddr, other: IpAddr) -> bool {
    one.to_canonical() == other.to_canonical()
}

/// A connection without a usable original destination, which is closed.
#[derive(Debug, Error)]
pub enum OrigDstError {
    /// The original destination is a port of the proxy itself.
    #[error("original destination {0} is the proxy itself: forwarding would loop")]
    Loop(SocketAddr),
    /// The original destination of an inbound connection is another host, or loopback.
    #[error(
        "original destination {0} is not an address of this pod: the proxy forwards inbound connections to the pod only; \
         if the pod is a router, set the annotation diy-service-mesh/skip-inbound-ports"
    )]
    Foreign(SocketAddr),
    /// The kernel has no original destination.
    #[error(
        "no original destination: {0}; check that the rules of proxy-init redirected the connection"
    )]
    Unknown(#[source] io::Error),
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use diy_mesh_runtime::admission::Class;
    use diy_mesh_testkit::net::{connected, listen};
    use tokio::io::AsyncReadExt as _;

    use super::*;
    use crate::context::worker::WorkerContext;

    fn is_accepted(original: &str, local: &str) -> bool {
        check(
            original.parse().unwrap(),
            local.parse().unwrap(),
            &[4000, 5000],
        )
        .is_ok()
    }

    #[test]
    fn rejects_own_ports_at_own_addresses_only() {
        assert!(!is_accepted("10.0.0.1:4000", "10.0.0.1:4000"));
        assert!(!is_accepted("10.0.0.1:5000", "10.0.0.1:4000"));
        assert!(!is_accepted("127.0.0.1:5000", "127.0.0.1:5000"));
        assert!(!is_accepted("[::1]:5000", "[::1]:5000"));
        assert!(is_accepted("10.0.0.1:8080", "10.0.0.1:4000"));
        assert!(
            is_accepted("10.0.0.2:5000", "127.0.0.1:5000"),
            "port 5000 of another host"
        );
    }

    #[test]
    fn inbound_connections_reach_addresses_of_the_pod_only() {
        let is_accepted = |original: &str, local: &str| {
            let secondary: IpAddr = "10.0.0.9".parse().unwrap();
            let has = |address: IpAddr| address.is_loopback() || address == secondary;
            is_of_pod(original.parse().unwrap(), local.parse().unwrap(), has)
        };
        assert!(is_accepted("10.0.0.1", "10.0.0.1"));
        assert!(is_accepted("10.0.0.1", "::ffff:10.0.0.1"));
        assert!(is_accepted("10.0.0.9", "10.0.0.1"), "a secondary address");
        assert!(is_accepted("fd00::1", "fd00::1"));
        for other in [
            "127.0.0.1",
            "127.9.9.9",
            "::1",
            "0.0.0.0",
            "10.0.0.2",
            "192.0.2.1",
            "fd00::2",
        ] {
            assert!(!is_accepted(other, "10.0.0.1"), "{other}");
        }
        assert!(has_address([127, 0, 0, 1].into()) && !has_address([192, 0, 2, 1].into()));
    }

    /// An idle connection owns its task, which contains the first one, and the second one.
    #[test]
    fn idle_connections_are_small() {
        fn size<F, T>(_: impl Fn(Io, F) -> T) -> usize {
            size_of::<T>()
        }
        let sizes = [size(carry), size(http1::serve)];
        assert!(sizes[0] <= 256 && sizes[1] <= 1024, "{sizes:?}");
    }

    #[tokio::test]
    async fn rejects_connection_without_redirect() {
        let (_client, accepted) = connected().await;
        let port = accepted.local_addr().unwrap().port();
        assert!(original_destination(&accepted, &[port]).is_err());
    }

    #[tokio::test]
    async fn resets_and_counts_connections_over_limit() {
        let context = WorkerContext {
            limit: 1,
            ..WorkerContext::for_a_test("")
        };
        let metrics = context.metrics.clone();
        let worker = Worker::new(context);
        let (listener, address) = listen().await;
        let open = worker
            .admit(Direction::Inbound, [127, 0, 0, 1].into())
            .unwrap();
        open.slot.set(Class::InUse);
        let flood = async {
            for _ in 0..100 {
                let (stream, peer) = listener.accept().await.unwrap();
                start(
                    &worker,
                    Direction::Inbound,
                    stream,
                    peer,
                    original_destination,
                );
            }
        };
        let clients = async {
            for _ in 0..100 {
                let mut client = TcpStream::connect(address).await.unwrap();
                let error = client.read(&mut [0]).await.expect_err("a reset");
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            }
        };
        tokio::join!(flood, clients);
        assert!(
            !open.slot.is_asked_to_end(),
            "the open connection is unaffected"
        );
        let counted = metrics.render();
        assert!(
            counted.contains("failures_total{direction=\"inbound\",code=\"overloaded\"} 100"),
            "{counted}"
        );
        drop(open);
        assert_eq!(worker.admission.used(&[]), 0);
    }
}
