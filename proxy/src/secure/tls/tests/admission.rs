//! Random histories of connections to a proxy whose slots and bytes are all in use, through the path of
//! accepted connections. A caller within its share keeps its connections and what they hold, and a new
//! caller gets a connection.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use diy_mesh_testkit::wait::until;
use tokio::io::AsyncWrite;

use super::slots::Slots;
use super::*;
use crate::limits::memory::Holder;
use crate::path::connection::start;
use crate::secure::tls::Alpn;

const SLOTS: usize = 40;
/// The application, the namespaces of a hostile and two other callers, and the clients without
/// authentication are the holders: four of the latter's half of the slots remain to each.
const KEPT: usize = 2;
/// The memory limit: 39 KiB remain to each of them.
const MEMORY: usize = 448 * 1024;
/// The bytes that one more connection of the caller has sent. Its buffer has 36 KiB.
const HELD: usize = 12 * 1024;
const ALPNS: [Alpn; 4] = [Alpn::Http1, Alpn::Http2, Alpn::Opaque, Alpn::Inspected];
const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: cart\r\n\r\n";
const UNFINISHED: &[u8] = b"GET / HTTP/1.1\r\nHost: cart\r\nX: ";
const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// The other ends of hostile connections.
#[derive(Default)]
struct Flood {
    plaintext: Vec<TcpStream>,
    secured: Vec<Io>,
}

impl Flood {
    /// Opens a connection of a random kind, or closes one.
    async fn step(&mut self, slots: &Slots, hostile: &[Rc<Worker>], rng: &mut fastrand::Rng) {
        let from = [127, 0, 0, rng.u8(10..14)];
        match rng.u8(0..16) {
            10..13 if !self.plaintext.is_empty() => {
                let index = rng.usize(..self.plaintext.len());
                // Fails if the connection was reset, or is not read.
                let _ = self.plaintext[index].try_write(&vec![b'a'; rng.usize(..30_000)]);
            }
            13..16 if !self.secured.is_empty() => {
                let index = rng.usize(..self.secured.len());
                if !write_now(&mut self.secured[index], &vec![b'a'; rng.usize(..30_000)]).await {
                    drop(self.secured.swap_remove(index));
                }
            }
            0 if !self.plaintext.is_empty() => {
                drop(
                    self.plaintext
                        .swap_remove(rng.usize(..self.plaintext.len())),
                );
            }
            1 if !self.secured.is_empty() => {
                drop(self.secured.swap_remove(rng.usize(..self.secured.len())));
            }
            0..6 => {
                // Silent, half-open, idle, with an unfinished head, HTTP/2, opaque.
                let sent = [
                    b"",
                    &b"\x16\x03\x01\x02\0\x01"[..],
                    REQUEST,
                    UNFINISHED,
                    HTTP2,
                    b"\0\0",
                ];
                // Fails if the connection was reset.
                if let Ok(mut stream) = slots.connect(from).await {
                    let _ = stream.write_all(sent[rng.usize(..sent.len())]).await;
                    self.plaintext.push(stream);
                }
            }
            _ => {
                let tls = &hostile[rng.usize(..hostile.len())].tls;
                let alpn = ALPNS[rng.usize(..ALPNS.len())];
                if let Some(mut io) = slots.connect_as(tls, from, alpn).await {
                    let sent = [b"", REQUEST, UNFINISHED, HTTP2];
                    write_now(&mut io, sent[rng.usize(..sent.len())]).await;
                    self.secured.push(io);
                }
            }
        }
    }
}

impl Slots {
    /// A connection, or `None` if it is reset.
    async fn connect_as(
        &self,
        tls: &crate::secure::tls::Tls,
        from: [u8; 4],
        alpn: Alpn,
    ) -> Option<Io> {
        let io = Io::new(self.connect(from).await.ok()?);
        let cart = CART.parse().unwrap();
        let mut io = tls
            .connect(io, self.address, &cart, alpn, memory())
            .await
            .ok()?;
        io.flush().await.ok()?;
        Some(io)
    }
}

/// Whether the connection takes these bytes at once.
async fn write_now(io: &mut Io, bytes: &[u8]) -> bool {
    let written = poll_fn(|cx| Poll::Ready(Pin::new(&mut *io).poll_write(cx, bytes))).await;
    matches!(written, Poll::Ready(Ok(written)) if written == bytes.len())
}

/// Sends a request on an open connection, and reads the response.
async fn call(io: &mut Io) -> bool {
    finish(io, REQUEST).await
}

/// Sends the rest of a request, and reads the response.
async fn finish(io: &mut Io, rest: &[u8]) -> bool {
    let mut answer = Vec::new();
    let called = async {
        io.write_all(rest).await?;
        // The application repeats the request after its own head.
        while answer.windows(4).filter(|end| end == b"\r\n\r\n").count() < 2 {
            answer.push(io.read_u8().await?);
            if answer.starts_with(b"HTTP/1.1 503") {
                break;
            }
        }
        std::io::Result::Ok(())
    };
    called.await.is_ok() && answer.starts_with(b"HTTP/1.1 200 OK")
}

/// Connections of the pod's own application to `app`, silent ones.
async fn flood_of_the_app(slots: &Slots, app: SocketAddr, count: usize) -> Vec<TcpStream> {
    let listener = TcpListener::bind("127.0.0.3:0").await.unwrap();
    let mut open = Vec::new();
    for _ in 0..count {
        let address = listener.local_addr().unwrap();
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (stream, peer) = accepted.unwrap();
        let original = move |_: &TcpStream, _: &[u16]| Ok(app);
        start(&slots.inbound, Direction::Outbound, stream, peer, original);
        open.push(client.unwrap());
    }
    open
}

#[test]
fn random_floods_leave_callers_their_shares() {
    for seed in 0..6 {
        on_worker_within(Duration::from_secs(60), async {
            let mut rng = fastrand::Rng::with_seed(seed);
            let app = app().await;
            let slots = Slots::with_memory(app, SLOTS, MEMORY, "").await;
            let admission = &slots.inbound.admission;
            let max_bytes = admission.max_bytes();
            let mut most = 0;
            let hostile: Vec<_> = (0..4)
                .map(|number| format!("spiffe://cluster.local/ns/h{}/sa/{number}", number % 2))
                .map(|identity| slots.caller_as(&identity))
                .collect();
            let mut flood = Flood::default();
            let _outbound = flood_of_the_app(&slots, app, SLOTS).await;
            let mut kept = Vec::new();
            for _ in 0..KEPT {
                let io = slots
                    .connect_as(&slots.caller.tls, [127, 0, 0, 5], Alpn::Http1)
                    .await;
                let mut io = io.expect("a holder below its share");
                assert!(call(&mut io).await, "seed {seed}: a holder below its share");
                kept.push(io);
            }
            let held = slots.connect_as(&slots.caller.tls, [127, 0, 0, 5], Alpn::Http1);
            let mut held = held.await.expect("a holder below its share");
            let unfinished = [UNFINISHED, &[b'a'; HELD]].concat();
            held.write_all(&unfinished).await.unwrap();
            for step in 0..300 {
                flood.step(&slots, &hostile, &mut rng).await;
                assert!(admission.used(&[]) <= SLOTS, "seed {seed}");
                let used = admission.used_bytes(&[]);
                // With a head of a connection that was told to end, and whose task has not run.
                let most_of_all = max_bytes / 7 * 8 + 64 * 1024;
                assert!(used <= most_of_all, "seed {seed}: {used} bytes");
                most = most.max(used);
                if step % 20 == 19 {
                    // Ending connections belong to no holder, and may leave nothing to others.
                    let held = |holder| admission.used_bytes(&[holder]);
                    let all = || admission.used_bytes(&[]);
                    until(|| all() <= held(Holder::App) + held(Holder::Clients)).await;
                    for io in &mut kept {
                        assert!(call(io).await, "seed {seed}, step {step}: it lost its slot");
                    }
                }
            }
            assert!(
                most > max_bytes / 8 * 7,
                "seed {seed}: {most} bytes were not short"
            );
            let by_caller = [
                Holder::Clients,
                Holder::Namespace("cluster.local/shop".into()),
            ];
            let by_caller = admission.used_bytes(&by_caller);
            assert!(by_caller > HELD, "seed {seed}: {by_caller} bytes");
            let is_complete = finish(&mut held, b"\r\n\r\n").await;
            assert!(is_complete, "seed {seed}: it lost what it held");
            let app_has = slots.inbound.admission.used(&[Holder::App]);
            assert!(app_has >= SLOTS / 2, "seed {seed}: {app_has}");
            for (caller, from) in [(&slots.other, 6), (&slots.other, 10)] {
                let io = slots
                    .connect_as(&caller.tls, [127, 0, 0, from], Alpn::Http1)
                    .await;
                let mut io = io.expect("a new holder");
                assert!(call(&mut io).await, "seed {seed}: a new holder");
            }
        });
    }
}

/// An authenticated caller that sends nothing, whatever its ALPN, uses slots of its namespace.
#[test]
fn silent_authenticated_connections_are_charged_to_their_identity() {
    on_worker(async {
        for alpn in ALPNS {
            let slots = Slots::new(8, "").await;
            let caller = slots.caller_as("spiffe://cluster.local/ns/tenant/sa/a");
            let tenant = Holder::Namespace("cluster.local/tenant".into());
            let used = || {
                slots
                    .inbound
                    .admission
                    .used(&[Holder::Clients, tenant.clone()])
            };
            let mut silent = Vec::new();
            for _ in 0..12 {
                let io = slots.connect_as(&caller.tls, [127, 0, 0, 6], alpn).await;
                silent.push(io.expect("a holder may use what is free"));
                let pending = [Holder::Clients, Holder::AllPending];
                until(|| slots.inbound.admission.used(&pending) == 0).await;
            }
            assert_eq!(used(), 8, "{alpn:?}");
            let answer = slots.call([127, 0, 0, 6]).await.expect("another caller");
            assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        }
    });
}
