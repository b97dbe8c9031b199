//! Connection slots of an inbound proxy before and after authentication: many connections of one
//! address are served, and a flood of one address does not keep the others out.

use diy_mesh_testkit::metrics;
use diy_mesh_testkit::wait::until;
use tokio::net::TcpSocket;
use tokio::task::JoinSet;

use super::*;
use crate::limits::memory::{Holder, Memory, PENDING_COST};
use crate::path::connection::start;

/// An address of many callers, such as an ingress gateway.
pub(super) const GATEWAY: [u8; 4] = [127, 0, 0, 5];
pub(super) const FLOODER: [u8; 4] = [127, 0, 0, 6];

const ORDERS: &str = "spiffe://cluster.local/ns/shop/sa/orders";

/// A busy machine takes seconds for thousands of handshakes.
const PATIENT: &str = " --tls-handshake-timeout 100 --detect-timeout 100";

/// An inbound proxy with `limit` connections, and two callers of it.
pub(super) struct Slots {
    pub(super) address: SocketAddr,
    pub(super) inbound: Rc<Worker>,
    metrics: Arc<Metrics>,
    pub(super) caller: Rc<Worker>,
    pub(super) other: Rc<Worker>,
    pub(super) authority: Authority,
}

impl Slots {
    pub(super) async fn new(limit: usize, arguments: &str) -> Self {
        Self::with(app().await, limit, arguments).await
    }

    async fn with(app: SocketAddr, limit: usize, arguments: &str) -> Self {
        Self::with_memory(app, limit, 64 * 1024 * 1024, arguments).await
    }

    pub(super) async fn with_memory(
        app: SocketAddr,
        limit: usize,
        memory: usize,
        arguments: &str,
    ) -> Self {
        let authority = Authority::new("root");
        let context = context_of(&authority, CART, arguments);
        let context = WorkerContext {
            limit,
            memory: Memory::of_bytes(memory, context.config.workers),
            ..context
        };
        let (metrics, inbound) = (context.metrics.clone(), Worker::new(context));
        let [caller, other] =
            [WEB, ORDERS].map(|identity| Worker::new(context_of(&authority, identity, PATIENT)));
        let listener = crate::path::listener::bind([127, 0, 0, 2].into(), 0, TEST_TIMEOUT).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        let address = listener.local_addr().unwrap();
        tokio::task::spawn_local(accept(inbound.clone(), listener, app));
        Self {
            address,
            inbound,
            metrics,
            caller,
            other,
            authority,
        }
    }

    /// Another caller.
    pub(super) fn caller_as(&self, identity: &str) -> Rc<Worker> {
        Worker::new(context_of(&self.authority, identity, PATIENT))
    }

    pub(super) async fn connect(&self, from: [u8; 4]) -> std::io::Result<TcpStream> {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        socket.connect(self.address).await
    }

    /// One request without mutual TLS on a connection of its own.
    pub(super) async fn call_without_tls(&self, from: [u8; 4]) -> std::io::Result<String> {
        let mut stream = self.connect(from).await?;
        stream.write_all(GET.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    /// One request over mutual TLS on a connection of its own.
    pub(super) async fn call(&self, from: [u8; 4]) -> Result<String, String> {
        let failed = |error: std::io::Error| error.to_string();
        let io = Io::new(self.connect(from).await.map_err(failed)?);
        let (cart, tls) = (CART.parse().unwrap(), &self.caller.tls);
        let connected = tls.connect(io, self.address, &cart, super::super::Alpn::Http1, memory());
        let mut io = connected.await.map_err(|failure| failure.to_string())?;
        io.write_all(GET.as_bytes()).await.map_err(failed)?;
        io.flush().await.map_err(failed)?;
        let mut answer = Vec::new();
        io.read_to_end(&mut answer).await.map_err(failed)?;
        Ok(String::from_utf8(answer).unwrap())
    }

    /// Connections that send these bytes and nothing else, without those that are reset.
    pub(super) async fn flood(&self, bytes: &[u8]) -> Vec<TcpStream> {
        let flood = self.flood_from(FLOODER, 300, bytes).await;
        until(|| self.rejected()).await;
        flood
    }

    async fn flood_from(&self, from: [u8; 4], count: usize, bytes: &[u8]) -> Vec<TcpStream> {
        let mut flood = Vec::new();
        for _ in 0..count {
            if let Ok(mut stream) = self.connect(from).await
                && stream.write_all(bytes).await.is_ok()
            {
                flood.push(stream);
            }
        }
        flood
    }

    fn rejected(&self) -> bool {
        self.rejections() > 0
    }

    pub(super) fn rejections(&self) -> usize {
        self.metric("failures_total{direction=\"inbound\",code=\"overloaded\"}")
    }

    fn open_connections(&self) -> usize {
        self.metric("connections_open{direction=\"inbound\"}")
    }

    fn metric(&self, name: &str) -> usize {
        let name = format!("diy_mesh_proxy_{name}");
        metrics::value(&self.metrics.render(), &name) as usize
    }
}

fn context_of(authority: &Authority, identity: &str, arguments: &str) -> WorkerContext {
    let credentials = credentials(authority, identity, |_| {});
    WorkerContext {
        credentials: watch::channel(Some(credentials)).1,
        ..WorkerContext::for_a_test(arguments)
    }
}

/// Accepts connections as the proxy does, with `app` as their original destination.
async fn accept(worker: Rc<Worker>, listener: TcpListener, app: SocketAddr) {
    loop {
        let (stream, peer) = listener.accept().await.unwrap();
        start(&worker, Direction::Inbound, stream, peer, move |_, _| {
            Ok(app)
        });
    }
}

#[test]
fn two_thousand_connections_of_one_address_succeed() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    on_worker_within(Duration::from_secs(120), async {
        let slots = Rc::new(Slots::new(50_000, PATIENT).await);
        let mut calls = JoinSet::new();
        for _ in 0..2000 {
            let slots = slots.clone();
            calls.spawn_local(async move { slots.call(GATEWAY).await });
        }
        while let Some(answer) = calls.join_next().await {
            let answer = answer.unwrap().expect("the connection is accepted");
            assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        }
        assert!(!slots.rejected());
    });
}

#[test]
fn flood_of_unauthenticated_connections_leaves_slots_to_other_addresses() {
    on_worker(async {
        for (arguments, bytes) in [
            // An unfinished ClientHello.
            ("", &b"\x16\x03\x01\x02\0\x01"[..]),
            ("", b""),
            (" --inbound strict", b""),
        ] {
            let slots = Slots::new(200, arguments).await;
            let mut floods = vec![slots.flood(bytes).await];
            let pending = [Holder::Clients, Holder::AllPending];
            assert_eq!(
                slots.inbound.admission.used(&pending),
                200,
                "all that is free"
            );
            for host in 10..18 {
                floods.push(slots.flood_from([127, 0, 0, host], 60, bytes).await);
            }
            for _ in 0..3 {
                let answer = slots.call(GATEWAY).await.expect("another address");
                assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
            }
        }
    });
}

#[test]
fn evicted_connections_hold_nothing_and_others_survive_the_flood() {
    on_worker(async {
        let slots = Slots::new(200, "").await;
        let mut silent = slots.connect(GATEWAY).await.unwrap();
        until(|| slots.inbound.admission.used(&[]) > 0).await;
        // The flooding clients never close their ends.
        let mut floods = vec![slots.flood(b"").await];
        for host in 10..18 {
            floods.push(slots.flood_from([127, 0, 0, host], 60, b"").await);
        }
        let used = || slots.inbound.admission.used_bytes(&[]);
        until(|| slots.open_connections() <= 200 && used() <= 200 * PENDING_COST).await;
        silent.write_all(GET.as_bytes()).await.unwrap();
        let mut answer = String::new();
        silent.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        drop((floods, silent));
        until(|| slots.open_connections() == 0 && slots.inbound.admission.used(&[]) == 0).await;
        assert_eq!(used(), 0);
    });
}

#[test]
fn flood_of_one_caller_leaves_slots_to_other_callers() {
    on_worker(async {
        let slots = Slots::new(200, "").await;
        // Opaque: the protocol is known, and the caller has no identity.
        let _flood = slots.flood(b"\0\0\0\0").await;
        for _ in 0..3 {
            let answer = slots.call(FLOODER).await.expect("another caller");
            assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
            let answer = slots.call_without_tls(GATEWAY).await;
            let answer = answer.expect("a client at another address");
            assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        }
    });
}

#[test]
fn requests_of_one_caller_leave_connections_to_the_app_to_other_callers() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    on_worker_within(Duration::from_secs(60), async {
        // A request with a body is never answered.
        let hanging = Rc::new(Cell::new(0));
        let count = hanging.clone();
        let app = listening(async move |mut stream| {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let Ok(byte) = stream.read_u8().await else {
                    return;
                };
                head.push(byte);
            }
            if head.starts_with(b"POST") {
                count.set(count.get() + 1);
                std::future::pending::<()>().await;
            }
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
            let _ = stream.write_all(answer).await;
        });
        // One of four workers, with enough slots: the usual limit of an endpoint would be 1,024.
        let slots = Slots::with(app.await, 8000, " --workers 4").await;
        let mut flood = Vec::new();
        for _ in 0..1100 {
            let mut stream = slots.connect(FLOODER).await.unwrap();
            let post = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n";
            stream.write_all(post).await.unwrap();
            flood.push(stream);
        }
        until(|| hanging.get() >= 1024).await;
        let answer = slots.call(FLOODER).await.expect("another caller");
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    });
}
