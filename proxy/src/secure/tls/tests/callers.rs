//! Requests of one caller over HTTP/2 that do not end, or whose responses it does not read. They
//! leave memory and connections to the application to other callers.

use bytes::Bytes;
use diy_mesh_testkit::wait::until;
use h2::RecvStream;
use h2::client::{ResponseFuture, SendRequest};
use http::{Request, Response};

use super::slots::{FLOODER, GATEWAY, Slots};
use super::*;
use crate::upstream::connect::http2::CONNECTION_WINDOW;

/// More than the windows of a stream.
const LARGE: usize = 1024 * 1024;

/// The requests and bytes that an application has received and sent.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) hanging: Cell<usize>,
    pub(super) sent: Cell<usize>,
}

/// An application that never responds to `/hang`, and with a large body to `/large`.
pub(super) async fn http2_app(max_streams: u32, seen: Rc<Seen>) -> SocketAddr {
    listening(async move |stream| {
        let mut builder = h2::server::Builder::new();
        let handshake = builder.max_concurrent_streams(max_streams);
        let Ok(mut connection) = handshake.handshake::<_, Bytes>(stream).await else {
            return;
        };
        while let Some(Ok((request, respond))) = connection.accept().await {
            tokio::task::spawn_local(answer(request, respond, seen.clone()));
        }
    })
    .await
}

async fn answer(
    request: Request<RecvStream>,
    mut respond: h2::server::SendResponse<Bytes>,
    seen: Rc<Seen>,
) {
    let left = match request.uri().path() {
        "/hang" => {
            seen.hanging.set(seen.hanging.get() + 1);
            return std::future::pending().await;
        }
        "/large" => LARGE,
        _ => 2,
    };
    let mut stream = respond.send_response(Response::new(()), false).unwrap();
    let mut body = Bytes::from(vec![b'x'; left]);
    while !body.is_empty() {
        stream.reserve_capacity(body.len());
        let capacity = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await;
        let Some(Ok(capacity)) = capacity else { return };
        let part = body.split_to(capacity);
        seen.sent.set(seen.sent.get() + part.len());
        stream.send_data(part, body.is_empty()).unwrap();
    }
}

/// A connection over HTTP/2: with mutual TLS as this worker, or without.
pub(super) async fn connect(
    slots: &Slots,
    from: [u8; 4],
    caller: Option<&Rc<Worker>>,
) -> SendRequest<Bytes> {
    let connected = try_connect(slots, from, caller).await;
    connected.expect("a connection")
}

/// A connection, or `None` if it is reset.
pub(super) async fn try_connect(
    slots: &Slots,
    from: [u8; 4],
    caller: Option<&Rc<Worker>>,
) -> Option<SendRequest<Bytes>> {
    let mut io = Io::new(slots.connect(from).await.ok()?);
    if let Some(caller) = caller {
        let (cart, alpn) = (CART.parse().unwrap(), super::super::Alpn::Http2);
        let connected = caller
            .tls
            .connect(io, slots.address, &cart, alpn, memory())
            .await;
        io = connected.ok()?;
    }
    let (client, connection) = h2::client::handshake(io).await.ok()?;
    tokio::task::spawn_local(connection);
    Some(client)
}

/// Sends a request, whose response nobody reads yet.
pub(super) async fn send(client: &mut SendRequest<Bytes>, path: &str) -> ResponseFuture {
    let request = Request::get(format!("http://cart{path}")).body(()).unwrap();
    std::future::poll_fn(|cx| client.poll_ready(cx))
        .await
        .expect("the connection is open");
    client.send_request(request, true).unwrap().0
}

/// Other callers get responses: one with an identity, and a client without mutual TLS.
async fn assert_others_are_served(slots: &Slots) {
    for other in [Some(&slots.other), None] {
        let mut client = connect(slots, GATEWAY, other).await;
        let response = send(&mut client, "/").await.await.expect("a response");
        assert_eq!(response.status(), 200);
        let body = response.into_body().data().await;
        assert_eq!(&body.expect("a body").expect("all of it")[..], b"xx");
    }
}

#[test]
fn streams_of_one_caller_leave_memory_to_other_callers() {
    // With an identity, without one, and first with it and then without it.
    for hostile in [&[true][..], &[false], &[true, false]] {
        on_worker(async {
            let seen = Rc::<Seen>::default();
            let app = http2_app(1000, seen.clone()).await;
            // The memory for some 750 streams.
            let slots = Slots::with_memory(app, 200, 4 * 1024 * 1024, "").await;
            let (mut connections, mut flood) = (Vec::new(), Vec::new());
            for has_identity in hostile {
                let (before, caller) = (slots.rejections(), has_identity.then_some(&slots.caller));
                while slots.rejections() == before {
                    let mut client = connect(&slots, FLOODER, caller).await;
                    for _ in 0..200 {
                        flood.push(send(&mut client, "/hang").await);
                    }
                    // All streams get there, except on a connection that has ended.
                    wait_until_unchanged(|| seen.hanging.get() + slots.rejections()).await;
                    connections.push(client);
                }
            }
            assert!(flood.len() > 400, "{} streams", flood.len());
            assert_others_are_served(&slots).await;
        });
    }
}

#[test]
fn caller_that_leaves_returns_what_its_streams_used() {
    // Thousands of streams: longer than other tests on a busy machine.
    on_worker_within(Duration::from_secs(60), async {
        let seen = Rc::<Seen>::default();
        let app = http2_app(1000, seen.clone()).await;
        let slots = Slots::with_memory(app, 200, 4 * 1024 * 1024, "").await;
        let mut accepted = Vec::new();
        for _ in 0..3 {
            let (before, rejections) = (seen.hanging.get(), slots.rejections());
            let (mut connections, mut flood) = (Vec::new(), Vec::new());
            while slots.rejections() == rejections {
                let mut client = connect(&slots, FLOODER, Some(&slots.caller)).await;
                for _ in 0..200 {
                    flood.push(send(&mut client, "/hang").await);
                }
                let answered = || seen.hanging.get() - before + slots.rejections() - rejections;
                // All streams get there, except on a connection that has ended.
                wait_until_unchanged(answered).await;
                connections.push(client);
            }
            accepted.push(seen.hanging.get() - before);
            drop((connections, flood));
            // The rest is charged for a connection to the application, and the state of its streams.
            let used = || slots.inbound.admission.used_bytes(&[]);
            until(|| used() <= 1024 * 1024).await;
        }
        assert!(accepted[0] > 400, "{accepted:?}");
        // The connection to the application keeps the state of its streams.
        let least = accepted[0] - accepted[0] / 5;
        assert!(accepted.iter().all(|count| *count >= least), "{accepted:?}");
    });
}

pub(super) async fn wait_until_unchanged(value: impl Fn() -> usize) {
    let (mut last, mut unchanged) = (value(), 0);
    while unchanged < 500 {
        tokio::task::yield_now().await;
        unchanged = if value() == last { unchanged + 1 } else { 0 };
        last = value();
    }
}

/// An application that responds to `/large` when all of `count` requests have arrived, and counts
/// the connections that cannot be written to.
async fn http1_app(count: usize, arrived: Rc<Cell<usize>>, blocked: Rc<Cell<usize>>) -> SocketAddr {
    listening(async move |mut stream| {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let Ok(byte) = stream.read_u8().await else {
                return;
            };
            head.push(byte);
        }
        if !head.starts_with(b"GET /large ") {
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
            return stream.write_all(answer).await.unwrap_or_default();
        }
        arrived.set(arrived.get() + 1);
        until(|| arrived.get() >= count).await;
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 800000000\r\n\r\n";
        let mut result = stream.write_all(answer).await;
        while result.is_ok() {
            result = stream.try_write(&[b'x'; 16 * 1024]).map(drop);
            if matches!(&result, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock) {
                blocked.set(blocked.get() + 1);
                result = stream.writable().await;
                blocked.set(blocked.get() - 1);
            }
        }
        blocked.set(blocked.get() + 1);
    })
    .await
}

#[test]
fn unread_responses_of_one_caller_leave_memory_to_other_callers() {
    const FLOOD: usize = 350;
    on_worker_within(Duration::from_secs(60), async {
        let (arrived, blocked) = (Rc::<Cell<usize>>::default(), Rc::<Cell<usize>>::default());
        let app = http1_app(FLOOD, arrived.clone(), blocked.clone()).await;
        // The memory for some 750 connections.
        let slots = Slots::with_memory(app, 1000, 4 * 1024 * 1024, "").await;
        let mut flood = Vec::new();
        for number in 1..=FLOOD {
            let mut client = slots.connect(FLOODER).await.unwrap();
            socket2::SockRef::from(&client)
                .set_recv_buffer_size(4096)
                .unwrap();
            let get = b"GET /large HTTP/1.1\r\nHost: cart\r\n\r\n";
            client.write_all(get).await.unwrap();
            flood.push(client);
            until(|| arrived.get() >= number).await;
        }
        let mut unchanged = 0;
        while unchanged < 1000 {
            unchanged = (unchanged + 1) * usize::from(blocked.get() == FLOOD);
            tokio::task::yield_now().await;
        }
        let answer = slots.call(GATEWAY).await.expect("another caller");
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        let answer = slots.call_without_tls(GATEWAY).await;
        let answer = answer.expect("a client at another address");
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    });
}

#[test]
fn streams_of_one_caller_leave_connections_to_the_app_to_other_callers() {
    on_worker(async {
        let seen = Rc::<Seen>::default();
        let app = http2_app(1, seen.clone()).await;
        let slots = Slots::with_memory(app, 200, 64 * 1024 * 1024, " --workers 1").await;
        let mut client = connect(&slots, FLOODER, Some(&slots.caller)).await;
        let mut flood = Vec::new();
        for count in 1..=64 {
            flood.push(send(&mut client, "/hang").await);
            until(|| seen.hanging.get() >= count).await;
        }
        assert_others_are_served(&slots).await;
    });
}

#[test]
fn responses_that_one_caller_does_not_read_do_not_delay_those_of_others() {
    for has_identity in [true, false] {
        on_worker(async {
            let seen = Rc::<Seen>::default();
            let app = http2_app(1000, seen.clone()).await;
            let slots = Slots::with_memory(app, 200, 128 * 1024 * 1024, "").await;
            let caller = has_identity.then_some(&slots.caller);
            let mut client = connect(&slots, FLOODER, caller).await;
            let mut unread = Vec::new();
            for _ in 0..40 {
                unread.push(send(&mut client, "/large").await);
            }
            until(|| seen.sent.get() >= CONNECTION_WINDOW as usize).await;
            wait_until_unchanged(|| seen.sent.get()).await;
            assert_others_are_served(&slots).await;
        });
    }
}
