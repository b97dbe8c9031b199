//! Many service accounts of one namespace, which one tenant can create. Together they leave a third
//! to a caller of another namespace.

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use http::Request;

use super::callers::{Seen, connect, http2_app, send, wait_until_unchanged};
use super::slots::{FLOODER, GATEWAY, Slots};
use super::*;
use crate::account::{Budget, Holder};
use crate::tls::Alpn;

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
    let (rejections, hanging) = (slots.rejections(), seen.hanging.get());
    let mut flood = Flood::new();
    while seen.hanging.get() < hanging + max {
        let mut client = connect(slots, FLOODER, Some(caller)).await;
        let mut streams = Vec::new();
        while streams.len() < MAX_STREAMS && seen.hanging.get() < hanging + max {
            let before = seen.hanging.get();
            // Fails if the connection is rejected.
            let _ = std::future::poll_fn(|cx| client.poll_ready(cx)).await;
            let request = Request::get("http://cart/hang").body(()).unwrap();
            streams.extend(
                client
                    .send_request(request, true)
                    .map(|(response, _)| response),
            );
            while seen.hanging.get() == before && slots.rejections() == rejections {
                tokio::task::yield_now().await;
            }
            if slots.rejections() > rejections {
                flood.push((client, streams));
                return flood;
            }
        }
        flood.push((client, streams));
    }
    flood
}

/// The tenant used at most two thirds, and its neighbor gets 4/7 of the rest, as it does alone.
fn assert_shares(budget: &Budget, by_tenant: usize) {
    let (limit, by_neighbor) = (budget.limit(), budget.used() - by_tenant);
    assert!(by_tenant > limit / 2, "{by_tenant} of {limit}");
    assert!(by_tenant <= limit / 3 * 2, "{by_tenant} of {limit}");
    // Less the cost of one connection.
    let expected = limit / 3 / 7 * 4 * 9 / 10;
    assert!(by_neighbor >= expected, "{by_neighbor} of {limit}");
}

/// The tenant and then its neighbor use what they get of the memory for buffers. The application
/// permits `max_streams` on each connection.
async fn assert_memory_is_shared(accounts: usize, max_streams: u32, max: usize) {
    let seen = Rc::<Seen>::default();
    let app = http2_app(max_streams, seen.clone()).await;
    let slots = Slots::with_memory(app, 400, 4 * MIB, " --workers 1").await;
    let mut floods = Vec::new();
    for caller in &tenant(&slots, accounts) {
        floods.push(flood(&slots, &seen, caller, max).await);
    }
    let buffers = slots.inbound.memory(Direction::Inbound).buffers.clone();
    let by_tenant = buffers.used();
    floods.push(flood(&slots, &seen, &neighbor(&slots), max).await);
    assert_shares(&buffers, by_tenant);
}

#[test]
fn callers_of_one_namespace_leave_a_third_of_the_memory() {
    on_worker_within(Duration::from_secs(60), async {
        for accounts in ACCOUNTS {
            assert_memory_is_shared(accounts, 1000, 10_000).await;
        }
    });
}

#[test]
fn callers_of_one_namespace_leave_a_third_of_the_connections_to_the_app() {
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
        let connected = caller.tls.connect(io, slots.address, &cart, Alpn::Http1);
        let mut io = connected.await.expect("a TLS session");
        io.flush().await.unwrap();
        open.push(io);
        while slots.inbound.admission.used(&pending) > 0 {
            tokio::task::yield_now().await;
        }
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
fn callers_of_one_namespace_leave_a_third_of_the_windows() {
    on_worker_within(Duration::from_secs(60), async {
        let seen = Rc::<Seen>::default();
        let app = http2_app(1000, seen.clone()).await;
        let slots = Slots::with_memory(app, 400, 32 * MIB, "").await;
        let windows = &slots.inbound.memory(Direction::Inbound).app_windows;
        let mut unread = Vec::new();
        for caller in tenant(&slots, 50).iter().chain([&neighbor(&slots)]) {
            let before = windows.used();
            let mut client = connect(&slots, FLOODER, Some(caller)).await;
            let responses: Vec<_> = request_large(&mut client, 20).await;
            wait_until_unchanged(|| seen.sent.get()).await;
            unread.push((client, responses, windows.used() - before));
        }
        let (by_neighbor, limit) = (unread[50].2, windows.limit());
        let by_tenant = windows.used() - by_neighbor;
        assert!(by_tenant > limit / 2, "{by_tenant} of {limit}");
        assert!(by_tenant <= limit / 3 * 2, "{by_tenant} of {limit}");
        assert!(by_neighbor >= MIB, "{by_neighbor} of {limit}");
        // Beyond, each connection has 64 KiB in the proxy and in the client, and each stream 16 KiB.
        let (sent, max) = (
            seen.sent.get(),
            windows.used() + 51 * (128 + 20 * 16) * 1024,
        );
        assert!(
            sent <= max,
            "{sent} bytes of responses, with {}",
            windows.used()
        );
    });
}

/// Requests for large responses.
async fn request_large(client: &mut SendRequest<Bytes>, count: usize) -> Vec<ResponseFuture> {
    let mut responses = Vec::new();
    for _ in 0..count {
        responses.push(send(client, "/large").await);
    }
    responses
}
