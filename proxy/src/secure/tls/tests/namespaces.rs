//! Many service accounts of one namespace, which one tenant can create. Together they leave half
//! to a caller of another namespace.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use bytes::Bytes;
use diy_mesh_testkit::wait::until;
use h2::client::{ResponseFuture, SendRequest};
use http::Request;

use super::callers::{Seen, connect, http2_app, send, try_connect, wait_until_unchanged};
use super::slots::{FLOODER, GATEWAY, Slots};
use super::*;
use crate::limits::memory::Holder;
use crate::secure::tls::Alpn;
use crate::upstream::connect::http2::STREAM_WINDOW;

/// More requests than all memory permits on one connection, and the connections of one caller to an
/// application.
const MAX_STREAMS: usize = 200;
const MAX_CONNECTIONS: usize = 60;

const MIB: usize = 1024 * 1024;

/// The numbers of service accounts of the tenant.
const ACCOUNTS: [usize; 2] = [5, 50];

fn tenant(slots: &Slots, accounts: usize) -> Vec<Rc<Worker>> {
    (0..accounts)
        .map(|name| slots.caller_as(&format!("spiffe://cluster.local/ns/tenant/sa/a{name}")))
        .collect()
}

/// A caller of another namespace than the tenant's.
fn neighbor(slots: &Slots) -> Rc<Worker> {
    slots.caller_as(WEB)
}

/// Requests over HTTP/2 that are never answered.
type Flood = Vec<(SendRequest<Bytes>, Vec<ResponseFuture>)>;

/// Sends `max` requests, or until one is rejected, on connections of [`MAX_STREAMS`].
async fn flood(slots: &Slots, seen: &Seen, caller: &Rc<Worker>, max: usize) -> Flood {
    let hanging = seen.hanging.get();
    let mut flood = Flood::new();
    while seen.hanging.get() < hanging + max {
        let Some(mut client) = try_connect(slots, FLOODER, Some(caller)).await else {
            break;
        };
        let mut streams = Vec::new();
        let mut is_rejected = false;
        while !is_rejected && streams.len() < MAX_STREAMS && seen.hanging.get() < hanging + max {
            let before = seen.hanging.get();
            // Fails if the connection is rejected.
            let _ = poll_fn(|cx| client.poll_ready(cx)).await;
            let request = Request::get("http://cart/hang").body(()).unwrap();
            let Ok((mut response, _)) = client.send_request(request, true) else {
                break;
            };
            is_rejected = poll_fn(|cx| {
                cx.waker().wake_by_ref();
                if seen.hanging.get() > before {
                    Poll::Ready(false)
                } else {
                    Pin::new(&mut response).poll(cx).map(|_| true)
                }
            })
            .await;
            streams.push(response);
        }
        let is_full = streams.len() == MAX_STREAMS && !is_rejected;
        flood.push((client, streams));
        if !is_full {
            break;
        }
    }
    flood
}

/// The bytes that the callers of a namespace hold.
fn used_by(slots: &Slots, namespace: &str) -> usize {
    let namespace = Holder::Namespace(format!("cluster.local/{namespace}").into());
    let admission = &slots.inbound.admission;
    admission.used_bytes(&[Holder::Clients, namespace])
}

/// The tenant alone used nearly all, and leaves half to its neighbor.
fn assert_shares(slots: &Slots, by_tenant: usize) {
    let admission = &slots.inbound.admission;
    let limit = admission.max_bytes();
    assert!(admission.used_bytes(&[]) <= limit / 7 * 8);
    assert!(by_tenant > limit / 4 * 3, "{by_tenant} of {limit}");
    // Less the cost of one connection.
    let (by_tenant, by_neighbor) = (used_by(slots, "tenant"), used_by(slots, "shop"));
    let expected = limit / 2 - 64 * 1024;
    assert!(
        by_neighbor >= expected,
        "{by_neighbor} and {by_tenant} of {limit}"
    );
}

/// The tenant and then its neighbor use what they get of the memory for buffers. The application
/// permits `max_streams` on each connection.
async fn assert_memory_is_shared(accounts: usize, max_streams: u32, max: usize) {
    let seen = Rc::<Seen>::default();
    let app = http2_app(max_streams, seen.clone()).await;
    let slots = Slots::with_memory(app, 400, 2 * MIB, " --workers 1").await;
    let mut floods = Vec::new();
    for caller in &tenant(&slots, accounts) {
        floods.push(flood(&slots, &seen, caller, max).await);
    }
    let by_tenant = slots.inbound.admission.used_bytes(&[]);
    floods.push(flood(&slots, &seen, &neighbor(&slots), max).await);
    assert_shares(&slots, by_tenant);
}

#[test]
fn callers_of_one_namespace_leave_half_of_the_memory() {
    on_worker_within(Duration::from_secs(60), async {
        for accounts in ACCOUNTS {
            assert_memory_is_shared(accounts, 1000, 10_000).await;
        }
    });
}

#[test]
fn callers_of_one_namespace_leave_half_of_the_connections_to_the_app() {
    on_worker_within(Duration::from_secs(60), async {
        for accounts in ACCOUNTS {
            // Each request needs a connection of its own.
            assert_memory_is_shared(accounts, 1, MAX_CONNECTIONS).await;
        }
    });
}

/// Opens this many connections.
async fn take_slots(slots: &Slots, count: usize, from: [u8; 4], caller: &Rc<Worker>) -> Vec<Io> {
    let (cart, mut open) = (CART.parse().unwrap(), Vec::new());
    let pending = [Holder::Clients, Holder::AllPending];
    for _ in 0..count {
        let io = Io::new(slots.connect(from).await.unwrap());
        let connected = caller
            .tls
            .connect(io, slots.address, &cart, Alpn::Http1, memory());
        let mut io = connected.await.expect("a TLS session");
        io.flush().await.unwrap();
        open.push(io);
        until(|| slots.inbound.admission.used(&pending) == 0).await;
    }
    open
}

#[test]
fn callers_of_one_namespace_leave_half_of_the_slots() {
    on_worker_within(Duration::from_secs(60), async {
        for accounts in ACCOUNTS {
            let slots = Slots::new(100, "").await;
            let used = |namespace: &str| {
                let namespace = Holder::Namespace(format!("cluster.local/{namespace}").into());
                slots.inbound.admission.used(&[Holder::Clients, namespace])
            };
            let mut open = Vec::new();
            for caller in &tenant(&slots, accounts) {
                open.push(take_slots(&slots, 120 / accounts, FLOODER, caller).await);
            }
            assert_eq!((used("tenant"), used("shop")), (100, 0));
            open.push(take_slots(&slots, 60, GATEWAY, &neighbor(&slots)).await);
            // Less one: the new connection of the neighbor was one of an unknown client first.
            let by_neighbor = used("shop");
            assert!((49..=51).contains(&by_neighbor), "{by_neighbor}");
            assert_eq!(used("tenant") + by_neighbor, 100);
        }
    });
}

#[test]
fn callers_of_one_namespace_leave_windows_to_others() {
    on_worker_within(Duration::from_secs(60), async {
        let seen = Rc::<Seen>::default();
        let app = http2_app(1000, seen.clone()).await;
        let slots = Slots::with_memory(app, 400, 64 * MIB, "").await;
        let admission = &slots.inbound.admission;
        // The application has its half.
        let _app = slots.inbound.slot();
        let used = || admission.used_bytes(&[]);
        let mut unread = Vec::new();
        for caller in tenant(&slots, 50).iter().chain([&neighbor(&slots)]) {
            let mut client = connect(&slots, FLOODER, Some(caller)).await;
            let responses: Vec<_> = request_large(&mut client, 20).await;
            wait_until_unchanged(|| seen.sent.get() + used() + used()).await;
            unread.push((client, responses));
        }
        let limit = admission.max_bytes();
        let (by_tenant, by_neighbor) = (used_by(&slots, "tenant"), used_by(&slots, "shop"));
        assert!(by_tenant > limit / 4, "{by_tenant} of {limit}");
        assert!(used() <= limit, "{} of {limit}", used());
        assert!(by_neighbor >= 2 * MIB, "{by_neighbor} of {limit}");
        // The waiting bytes are charged: streams for which no memory was left have ended. Beyond, each
        // connection has 64 KiB in the proxy and in the client, and each stream 16 KiB.
        let mut open = 0;
        for (_, responses) in &mut unread {
            for response in responses {
                open += usize::from(!has_failed(response).await);
            }
        }
        let (waiting, max) = (
            open * STREAM_WINDOW as usize,
            used() + 51 * (128 + 20 * 16) * 1024,
        );
        assert!(
            waiting <= max,
            "{waiting} bytes of {open} responses, with {}",
            used()
        );
        assert!(seen.sent.get() >= waiting);
    });
}

/// Whether the response has ended with an error, after its received part.
async fn has_failed(response: &mut ResponseFuture) -> bool {
    poll_fn(|cx| {
        Poll::Ready(match Pin::new(&mut *response).poll(cx) {
            Poll::Pending => false,
            Poll::Ready(Err(_)) => true,
            Poll::Ready(Ok(response)) => {
                let mut body = response.into_body();
                loop {
                    match body.poll_data(cx) {
                        Poll::Ready(Some(Ok(_))) => {}
                        Poll::Ready(ended) => break ended.is_some(),
                        Poll::Pending => break false,
                    }
                }
            }
        })
    })
    .await
}

/// Requests for large responses.
async fn request_large(client: &mut SendRequest<Bytes>, count: usize) -> Vec<ResponseFuture> {
    let mut responses = Vec::new();
    for _ in 0..count {
        responses.push(send(client, "/large").await);
    }
    responses
}
