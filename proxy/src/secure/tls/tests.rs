//! Two proxies between a client and an application, with a recording of the bytes between the
//! proxies.

mod admission;
mod callers;
mod client_end;
mod first_messages;
mod floods;
mod fragments;
mod late_hellos;
mod namespaces;
mod slots;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use diy_mesh_model::identity::Identity;
use diy_mesh_testkit::net::{connected, listen, read_all, read_until};
use diy_mesh_testkit::wait::{TEST_TIMEOUT, on_worker, on_worker_within, until};
use rcgen::CertificateParams;
use rustls::RootCertStore;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::context::flow::Flow;
use crate::context::worker::{Worker, WorkerContext};
use crate::discovery::{Discovery, Target, TargetKind};
use crate::endpoint::EndpointInfo;
use crate::error::Failure;
use crate::inbound::policy::Caller;
use crate::limits::lifetime::Lifetimes;
use crate::limits::memory::{Charge, Holder};
use crate::observe::metrics::Metrics;
use crate::path::connection::carry;
use crate::secure::identity::testing::{Authority, WEB};
use crate::secure::identity::{Credentials, CurrentCredentials, none};
use crate::secure::io::Io;
use crate::serve::opaque;
use crate::upstream::balance::Backend;
use diy_mesh_model::exchange::Direction;
use diy_mesh_runtime::admission::Admission;

pub(crate) const CART: &str = "spiffe://cluster.local/ns/shop/sa/cart";

/// Stops the time of all timers until the result is dropped, so that none fires early on a slow
/// machine. Only `advance` changes it.
pub(crate) fn freeze() -> impl Drop {
    struct Frozen(Option<std::sync::mpsc::Sender<()>>);
    impl Drop for Frozen {
        fn drop(&mut self) {
            self.0.take();
            tokio::time::resume();
        }
    }
    let (hold, held) = std::sync::mpsc::channel();
    tokio::time::pause();
    // tokio does not advance paused time on its own while a blocking task runs.
    tokio::task::spawn_blocking(move || held.recv_timeout(TEST_TIMEOUT));
    Frozen(Some(hold))
}

/// Credentials of a workload, by this authority.
pub(crate) fn credentials(
    authority: &Authority,
    identity: &str,
    change: impl FnOnce(&mut CertificateParams),
) -> Arc<Credentials> {
    credentials_that_trust(authority, identity, authority.roots(), change)
}

pub(crate) fn credentials_that_trust(
    authority: &Authority,
    identity: &str,
    roots: Arc<RootCertStore>,
    change: impl FnOnce(&mut CertificateParams),
) -> Arc<Credentials> {
    let (leaf, key) = authority.leaf_and_key(identity, change);
    let (_, not_after) = crate::secure::identity::identity_of(&leaf).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let certified = CertifiedKey::from_der(vec![leaf], key, &super::provider()).unwrap();
    Arc::new(Credentials {
        identity: identity.parse().unwrap(),
        certified: Arc::new(certified),
        roots,
        roots_version: "1".into(),
        not_after,
        tickets: OnceLock::new(),
    })
}

/// The TLS configurations of a worker with default settings.
fn tls(credentials: CurrentCredentials) -> super::Tls {
    let lifetimes = Lifetimes::new(None, fastrand::Rng::new());
    let timeouts = WorkerContext::for_a_test("").config.timeouts;
    super::Tls::new(credentials, lifetimes, timeouts, Metrics::new())
}

/// Enough memory.
pub(super) fn memory() -> Charge {
    let slot = Admission::new(1).admit(&Holder::App.path());
    Charge::new(Rc::new(slot.expect("a slot")))
}

/// Worker of one proxy, with the sender of its credentials.
pub(crate) struct Side {
    pub(crate) worker: Rc<Worker>,
    credentials: Option<watch::Sender<Option<Arc<Credentials>>>>,
    pub(crate) metrics: Arc<Metrics>,
}

impl Side {
    pub(crate) fn new(
        credentials: Option<Arc<Credentials>>,
        arguments: &str,
        discovery: Discovery,
    ) -> Self {
        let (sender, receiver) = watch::channel(credentials.clone());
        let (sender, receiver) = if credentials.is_some() {
            (Some(sender), receiver)
        } else {
            (None, none())
        };
        let context = WorkerContext {
            discovery,
            credentials: receiver,
            ..WorkerContext::for_a_test(arguments)
        };
        let metrics = context.metrics.clone();
        Self {
            worker: Worker::new(context),
            credentials: sender,
            metrics,
        }
    }

    /// Accepts connections for `app` and returns the address: not 127.0.0.1, which would be the
    /// address of the client's own pod.
    pub(crate) async fn receive(&self, app: SocketAddr) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
        self.receive_on(listener, app)
    }

    pub(super) fn receive_on(&self, listener: TcpListener, app: SocketAddr) -> SocketAddr {
        let address = listener.local_addr().unwrap();
        let worker = self.worker.clone();
        tokio::task::spawn_local(async move {
            loop {
                let (stream, peer) = listener.accept().await.unwrap();
                let destination = worker.apps.fixed(app);
                let flow = Flow {
                    called_by: Default::default(),
                    counted: Default::default(),
                    slot: worker.slot(),
                    worker: worker.clone(),
                    direction: Direction::Inbound,
                    peer,
                    original: destination.address().unwrap(),
                    destination,
                    caller: Caller::Unauthenticated,
                };
                tokio::task::spawn_local(carry(Io::new(stream), flow));
            }
        });
        address
    }

    /// Runs the server handshake, whose ClientHello is unread in `io`.
    pub(crate) async fn accept(
        &self,
        io: Io,
        peer: SocketAddr,
    ) -> Result<(Io, Identity, super::Alpn), Failure> {
        let memory = Charge::new(self.worker.slot());
        self.worker.tls.accept(io, peer, memory).await
    }

    /// An outbound connection of the application.
    pub(crate) async fn connect(&self, destination: &Rc<Backend>) -> TcpStream {
        let (client, stream) = connected().await;
        let (worker, destination) = (self.worker.clone(), destination.clone());
        let flow = Flow {
            called_by: Default::default(),
            counted: Default::default(),
            slot: worker.slot(),
            worker,
            direction: Direction::Outbound,
            peer: stream.peer_addr().unwrap(),
            original: destination.address().unwrap(),
            destination,
            caller: Caller::App,
        };
        tokio::task::spawn_local(carry(Io::new(stream), flow));
        client
    }

    fn renew(&self, credentials: Arc<Credentials>) {
        self.credentials
            .as_ref()
            .unwrap()
            .send_replace(Some(credentials));
    }
}

/// Client → outbound proxy → recorded connection → inbound proxy → application.
pub(super) struct Pair {
    pub(super) outbound: Side,
    pub(super) inbound: Side,
    destination: Rc<Backend>,
    /// Recorded bytes of all connections, in both directions.
    wire: Rc<RefCell<Vec<u8>>>,
    /// Address of the inbound proxy.
    address: SocketAddr,
    /// Ends the recorded connections, without close_notify.
    pub(super) cut: CancellationToken,
    /// The number of next connections whose ClientHello arrives after the server's first bytes.
    late: Rc<Cell<usize>>,
}

impl Pair {
    /// A pair whose endpoint has the identity CART.
    async fn new(
        outbound: Option<Arc<Credentials>>,
        inbound: Option<Arc<Credentials>>,
        arguments: &str,
        app: SocketAddr,
    ) -> Self {
        let (discovery, mut questions) = Discovery::by_hand();
        let outbound = Side::new(outbound, "", discovery);
        let inbound = Side::new(inbound, arguments, Discovery::off());
        let address = inbound.receive(app).await;
        let wire_listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
        let wire_address = wire_listener.local_addr().unwrap();
        let wire = Rc::new(RefCell::new(Vec::new()));
        let cut = CancellationToken::new();
        let late = Rc::new(Cell::new(0));
        let tap = tap(
            wire_listener,
            address,
            wire.clone(),
            cut.clone(),
            late.clone(),
        );
        tokio::task::spawn_local(tap);
        let opaque = inbound.worker.policy().opaque_ports.contains(app.port());
        let endpoint = EndpointInfo {
            identity: Some(CART.parse().unwrap()),
            opaque,
            ..EndpointInfo::bare(wire_address)
        };
        let pod = Target {
            kind: TargetKind::Pod,
            namespace: "shop".into(),
            name: "cart-1".into(),
            endpoints: vec![Arc::new(endpoint)],
            ..Target::default()
        };
        let (destination, ()) = tokio::join!(
            outbound.worker.destinations.get_or_watch(wire_address),
            async {
                let (_, answer) = questions.next().await;
                drop(answer(Arc::new(pod)));
            }
        );
        Self {
            outbound,
            inbound,
            destination,
            wire,
            address,
            cut,
            late,
        }
    }

    /// WEB connects to CART, under one authority.
    pub(super) async fn usual(app: SocketAddr) -> Self {
        let authority = Authority::new("root");
        let [web, cart] = [WEB, CART].map(|identity| credentials(&authority, identity, |_| {}));
        Self::new(Some(web), Some(cart), "", app).await
    }

    /// A connection to the inbound proxy with mutual TLS and this ALPN protocol.
    async fn connect_as(&self, alpn: super::Alpn) -> Io {
        let io = Io::new(TcpStream::connect(self.address).await.unwrap());
        let cart = CART.parse().unwrap();
        let tls = &self.outbound.worker.tls;
        let io = tls.connect(io, self.address, &cart, alpn, memory()).await;
        io.unwrap()
    }

    /// Sends bytes over mutual TLS with this ALPN protocol and returns the response.
    async fn call_as(&self, alpn: super::Alpn, bytes: &str) -> String {
        let mut io = self.connect_as(alpn).await;
        io.write_all(bytes.as_bytes()).await.unwrap();
        io.shutdown().await.unwrap();
        read_all(&mut io).await
    }

    /// A client connection through the outbound proxy.
    pub(super) async fn connect(&self) -> TcpStream {
        self.outbound.connect(&self.destination).await
    }

    /// Flow of a client connection in the outbound proxy.
    fn flow(&self, peer: SocketAddr) -> Flow {
        let (worker, destination) = (self.outbound.worker.clone(), self.destination.clone());
        Flow {
            called_by: Default::default(),
            counted: Default::default(),
            slot: worker.slot(),
            worker,
            direction: Direction::Outbound,
            peer,
            original: destination.address().unwrap(),
            destination,
            caller: Caller::App,
        }
    }

    /// Sends a request on a new connection and returns the response.
    async fn call(&self, request: &str) -> String {
        exchange(self.connect().await, request).await
    }

    /// Runs a handshake outside the pool.
    async fn negotiate(&self) -> super::Negotiated {
        let endpoint = self
            .destination
            .pick(&[], &mut fastrand::Rng::new())
            .unwrap();
        let io = Io::new(TcpStream::connect(endpoint.address).await.unwrap());
        let cart = CART.parse().unwrap();
        self.outbound
            .worker
            .tls
            .handshake(io, endpoint.address, &cart, super::Alpn::Http1, memory())
            .await
            .unwrap()
            .1
    }

    fn saw(&self, text: &str) -> bool {
        memchr::memmem::find(&self.wire.borrow(), text.as_bytes()).is_some()
    }
}

/// Forwards connections and records their bytes.
async fn tap(
    listener: TcpListener,
    to: SocketAddr,
    record: Rc<RefCell<Vec<u8>>>,
    cut: CancellationToken,
    late: Rc<Cell<usize>>,
) {
    loop {
        let (near, _) = listener.accept().await.unwrap();
        let (record, cut) = (record.clone(), cut.clone());
        let is_late = late.get() > 0;
        late.update(|late| late.saturating_sub(1));
        tokio::task::spawn_local(async move {
            let far = TcpStream::connect(to).await.unwrap();
            if is_late {
                far.readable().await.unwrap();
            }
            let ((near_read, near_write), (far_read, far_write)) =
                (near.into_split(), far.into_split());
            let one_way =
                async |mut from: tokio::net::tcp::OwnedReadHalf,
                       mut to: tokio::net::tcp::OwnedWriteHalf| {
                    let mut piece = vec![0; 16 * 1024];
                    while let Ok(read) = from.read(&mut piece).await {
                        record.borrow_mut().extend_from_slice(&piece[..read]);
                        if read == 0 || to.write_all(&piece[..read]).await.is_err() {
                            break;
                        }
                    }
                };
            let both = async {
                tokio::join!(one_way(near_read, far_write), one_way(far_read, near_write))
            };
            cut.run_until_cancelled(both).await;
        });
    }
}

pub(crate) async fn exchange(mut client: TcpStream, request: &str) -> String {
    client.write_all(request.as_bytes()).await.unwrap();
    read_all(&mut client).await
}

/// An application that sends first, and returns the reversed input after the half-close of the
/// client.
async fn speaks_first(greeting: &'static [u8]) -> SocketAddr {
    listening(async move |mut stream| {
        stream.write_all(greeting).await.unwrap();
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).await.unwrap();
        heard.reverse();
        stream.write_all(&heard).await.unwrap();
    })
    .await
}

/// An HTTP/1 application that returns the head of each request.
pub(crate) async fn app() -> SocketAddr {
    listening(async |mut stream| {
        let mut seen = Vec::new();
        while let Ok(byte) = stream.read_u8().await {
            seen.push(byte);
            if seen.ends_with(b"\r\n\r\n") {
                let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", seen.len());
                stream
                    .write_all(&[answer.as_bytes(), &seen].concat())
                    .await
                    .unwrap();
                seen.clear();
            }
        }
    })
    .await
}

/// An application that serves each connection with `carry`.
pub(crate) async fn listening(carry: impl AsyncFn(TcpStream) + 'static) -> SocketAddr {
    let (listener, address) = listen().await;
    let carry = Rc::new(carry);
    tokio::task::spawn_local(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let carry = carry.clone();
            tokio::task::spawn_local(async move { carry(stream).await });
        }
    });
    address
}

/// A request with forged `X-Called-By` fields.
const FORGED: &str = "GET /secret HTTP/1.1\r\nHost: cart\r\nx-called-by: spiffe://cluster.local/ns/a/sa/b\r\nX_Called_By: me\r\nConnection: close\r\n\r\n";

const GET: &str = "GET /secret HTTP/1.1\r\nHost: cart\r\nConnection: close\r\n\r\n";

#[test]
fn encrypts_requests_and_sets_x_called_by() {
    on_worker(async {
        let pair = Pair::usual(app().await).await;
        let answer = pair.call(FORGED).await;
        assert!(
            answer.ends_with(&format!(
                "GET /secret HTTP/1.1\r\nHost: cart\r\nX-Called-By: {WEB}\r\n\r\n"
            )),
            "{answer}"
        );
        assert!(pair.saw("diy-mesh/http1") && !pair.saw("secret") && !pair.saw("200 OK"));
    });
}

#[test]
fn pools_connections_and_resumes_sessions() {
    on_worker(async {
        let pair = Pair::usual(app().await).await;
        pair.call(GET).await;
        let after_one = pair.wire.borrow().len();
        pair.call(GET).await;
        assert!(
            pair.wire.borrow().len() - after_one < 1000,
            "the same connection, without another handshake"
        );
        let endpoint = pair
            .destination
            .pick(&[], &mut fastrand::Rng::new())
            .unwrap();
        endpoint.pool().evict_idle(
            Instant::now() + crate::upstream::connect::IDLE_TIMEOUT + Duration::from_secs(1),
        );
        let before = pair.wire.borrow().len();
        let negotiated = pair.negotiate().await;
        assert_eq!(
            negotiated.to_string(),
            "X25519MLKEM768 TLS13_AES_128_GCM_SHA256 Resumed",
            "{before}"
        );
        let metrics = pair.outbound.metrics.render();
        for result in ["full", "resumed"] {
            let labels = format!("direction=\"outbound\",result=\"{result}\"");
            let sample = format!("tls_handshakes_total{{{labels}}} 1\n");
            assert!(metrics.contains(&sample), "{sample}: {metrics}");
        }
        // A resumed session has the peer certificate.
        assert_eq!(super::authenticate(&negotiated).unwrap().0.as_str(), CART);
    });
}

#[test]
fn resumes_sessions_on_any_worker() {
    on_worker(async {
        let authority = Authority::new("root");
        let [web, cart] = [WEB, CART]
            .map(|identity| watch::channel(Some(credentials(&authority, identity, |_| {}))).1);
        let (client, servers) = (tls(web), [cart.clone(), cart].map(tls));
        let (listener, address) = listen().await;
        for (server, kind) in servers.iter().zip([" Full", " Resumed"]) {
            let (near, far) = tokio::join!(TcpStream::connect(address), listener.accept());
            let (near, (far, peer)) = (near.unwrap(), far.unwrap());
            let calling = async {
                let begun = client
                    .handshake(
                        Io::new(near),
                        address,
                        &CART.parse().unwrap(),
                        super::Alpn::Opaque,
                        memory(),
                    )
                    .await;
                let (mut io, negotiated) = begun.unwrap();
                assert!(negotiated.to_string().ends_with(kind), "{negotiated}");
                // The ticket precedes application data.
                assert_eq!(io.read_u8().await.unwrap(), b'!');
            };
            let answering = async {
                let (mut io, identity, _) =
                    server.accept(Io::new(far), peer, memory()).await.unwrap();
                assert_eq!(identity.as_str(), WEB);
                io.write_all(b"!").await.unwrap();
            };
            tokio::join!(calling, answering);
        }
    });
}

#[test]
fn removes_forged_x_called_by_for_any_alpn_protocol() {
    on_worker(async {
        let pair = Pair::usual(app().await).await;
        for alpn in [
            super::Alpn::Opaque,
            super::Alpn::Inspected,
            super::Alpn::Http1,
        ] {
            let answer = pair.call_as(alpn, FORGED).await;
            let seen = format!("GET /secret HTTP/1.1\r\nHost: cart\r\nX-Called-By: {WEB}\r\n\r\n");
            assert!(answer.ends_with(&seen), "{alpn:?}: {answer}");
        }
    });
}

#[test]
fn rejects_http_after_a_pause_in_the_request_line_over_tls() {
    on_worker(async {
        let (listener, address) = listen().await;
        let pair = Pair::usual(address).await;
        let io = Io::new(TcpStream::connect(pair.address).await.unwrap());
        let mut io = pair
            .outbound
            .worker
            .tls
            .connect(
                io,
                pair.address,
                &CART.parse().unwrap(),
                super::Alpn::Opaque,
                memory(),
            )
            .await
            .unwrap();
        io.write_all(b"GE").await.unwrap();
        let mut app = listener.accept().await.unwrap().0;
        let mut begun = [0; 2];
        app.read_exact(&mut begun).await.unwrap();
        io.write_all(b"T / HTTP/1.1\r\nX-Called-By: forged\r\n\r\n")
            .await
            .unwrap();
        let mut rest = Vec::new();
        let _ = app.read_to_end(&mut rest).await;
        assert_eq!((&begun, rest), (b"GE", Vec::new()));
    });
}

#[test]
fn forwards_bytes_of_opaque_ports_for_any_alpn_protocol() {
    on_worker(async {
        let app = app().await;
        let authority = Authority::new("root");
        let [web, cart] = [WEB, CART].map(|identity| credentials(&authority, identity, |_| {}));
        let arguments = format!(" --inbound strict --opaque-ports {}", app.port());
        let pair = Pair::new(Some(web), Some(cart), &arguments, app).await;
        for alpn in super::Alpn::ALL {
            let answer = pair.call_as(alpn, FORGED).await;
            assert!(answer.ends_with(FORGED), "{alpn:?}: {answer}");
        }
        // Discovery announces the opaque port to the outbound proxy.
        let mut client = pair.connect().await;
        client.write_all(FORGED.as_bytes()).await.unwrap();
        client.shutdown().await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with(FORGED), "{answer}");
        assert!(pair.saw("diy-mesh/tcp") && !pair.saw("secret"));
        // A strict pod rejects plaintext on the port.
        assert_eq!(
            exchange(TcpStream::connect(pair.address).await.unwrap(), FORGED).await,
            ""
        );
    });
}

#[test]
fn forwards_plaintext_of_opaque_ports_and_lets_servers_send_first() {
    on_worker(async {
        let port_of = |app: SocketAddr| format!(" --opaque-ports {}", app.port());
        let http = app().await;
        let pair = Pair::new(None, None, &port_of(http), http).await;
        let mut client = TcpStream::connect(pair.address).await.unwrap();
        client.write_all(FORGED.as_bytes()).await.unwrap();
        client.shutdown().await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with(FORGED), "{answer}");
        // With detection, the proxy would wait for the client, because the server begins like
        // HTTP/2.
        let settings = b"\0\0\x06\x04\0\0\0\0\0\0\x03\0\0\0\x4d";
        let server = speaks_first(settings).await;
        let pair = Pair::new(None, None, &port_of(server), server).await;
        let mut client = TcpStream::connect(pair.address).await.unwrap();
        let mut greeting = [0; 15];
        client.read_exact(&mut greeting).await.unwrap();
        assert_eq!(&greeting, settings);
    });
}

#[test]
fn lifetime_ends_with_the_certificates() {
    on_worker(async {
        let (authority, left) = (Authority::new("root"), Duration::from_secs(600));
        let expires =
            |leaf: &mut CertificateParams| leaf.not_after = (SystemTime::now() + left).into();
        let web = watch::channel(Some(credentials(&authority, WEB, expires))).1;
        let cart = watch::channel(Some(credentials(&authority, CART, |_| {}))).1;
        let (client, server) = (tls(web), tls(cart));
        let (listener, address) = listen().await;
        // The second session is resumed.
        for _ in 0..2 {
            let (near, far) = tokio::join!(TcpStream::connect(address), listener.accept());
            let (near, (far, peer)) = (near.unwrap(), far.unwrap());
            let calling = async {
                let mut io = client
                    .connect(
                        Io::new(near),
                        address,
                        &CART.parse().unwrap(),
                        super::Alpn::Opaque,
                        memory(),
                    )
                    .await
                    .unwrap();
                assert_eq!(io.read_u8().await.unwrap(), b'!');
                *io.lifetime().unwrap()
            };
            let answering = async {
                let (mut io, ..) = server.accept(Io::new(far), peer, memory()).await.unwrap();
                io.write_all(b"!").await.unwrap();
                (*io.lifetime().unwrap(), io)
            };
            let (at_client, (at_server, _io)) = tokio::join!(calling, answering);
            let now = Instant::now();
            assert!(
                at_server.certificate_ends_at <= now + left
                    && at_client.certificate_ends_at > now + left
            );
            for lifetime in [at_client, at_server] {
                assert!(
                    lifetime.retires_at > now
                        && lifetime.retires_at < now + left - Duration::from_secs(30),
                    "{lifetime:?}"
                );
            }
        }
    });
}

#[test]
fn retired_http2_connection_finishes_streams_and_accepts_no_new_ones() {
    on_worker(async {
        let (go, arrived) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(0)));
        let (app_go, app_arrived) = (go.clone(), arrived.clone());
        let app = listening(async move |stream| {
            let mut connection = h2::server::handshake(stream).await.unwrap();
            while let Some(Ok((_, mut respond))) = connection.accept().await {
                app_arrived.set(app_arrived.get() + 1);
                let (go, first) = (app_go.clone(), app_arrived.get() == 1);
                tokio::task::spawn_local(async move {
                    while first && !go.get() {
                        tokio::task::yield_now().await;
                    }
                    respond
                        .send_response(http::Response::new(()), true)
                        .unwrap();
                });
            }
        })
        .await;
        let pair = Pair::usual(app).await;
        let (mut client, connection) = h2::client::handshake(pair.connect().await).await.unwrap();
        tokio::task::spawn_local(connection);
        let get = || http::Request::get("http://cart/").body(()).unwrap();
        let (first, _) = client.send_request(get(), true).unwrap();
        until(|| arrived.get() > 0).await;
        let pool = &pair
            .destination
            .pick(&[], &mut fastrand::Rng::new())
            .unwrap()
            .pool()
            .http2;
        until(|| pool.is_settled()).await;
        let retired = Instant::now() + Duration::from_secs(70 * 60);
        pool.maintain(retired);
        assert_eq!(pool.len(), 1);
        let mut client = client.ready().await.unwrap();
        assert_eq!(
            client
                .send_request(get(), true)
                .unwrap()
                .0
                .await
                .unwrap()
                .status(),
            200
        );
        assert_eq!(pool.len(), 2);
        go.set(true);
        assert_eq!(first.await.unwrap().status(), 200);
        while !pool.is_empty() {
            pool.maintain(retired);
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn resets_opaque_connection_at_the_maximum_age() {
    on_worker(async {
        let app = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let authority = Authority::new("root");
        let [web, cart] = [WEB, CART].map(|identity| credentials(&authority, identity, |_| {}));
        let pair = Pair::new(
            Some(web),
            Some(cart),
            " --max-connection-age 10",
            app.local_addr().unwrap(),
        )
        .await;
        let mut client = pair.connect().await;
        client.write_all(b"\0\x01hello").await.unwrap();
        let (mut app, _) = app.accept().await.unwrap();
        app.read_exact(&mut [0; 7]).await.unwrap();
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(10)).await;
        tokio::time::resume();
        assert_eq!(
            app.read(&mut [0]).await.unwrap_err().kind(),
            std::io::ErrorKind::ConnectionReset
        );
        // The recorder forwards a reset as an end.
        let _ = client.read_to_end(&mut Vec::new()).await;
    });
}

#[test]
fn accepts_late_client_hello_of_server_first_protocol() {
    on_worker(async {
        let pair = Pair::usual(speaks_first(b"220 mail.example").await).await;
        let frozen = freeze();
        let late = TcpStream::connect(pair.address).await.unwrap();
        // The proxy accepts the connection, and waits for the first bytes.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        tokio::time::advance(Duration::from_millis(20)).await;
        let begun = pair
            .outbound
            .worker
            .tls
            .handshake(
                Io::new(late),
                pair.address,
                &CART.parse().unwrap(),
                super::Alpn::Opaque,
                memory(),
            )
            .await;
        drop(frozen);
        let mut greeting = [0; 16];
        begun.unwrap().0.read_exact(&mut greeting).await.unwrap();
        assert_eq!(&greeting, b"220 mail.example");
    });
}

#[test]
fn pools_the_early_connection_if_the_client_sends_http() {
    on_worker(async {
        let pair = Pair::usual(app().await).await;
        let client = pair.connect().await;
        until(|| pair.saw("diy-mesh/any")).await;
        assert!(exchange(client, GET).await.starts_with("HTTP/1.1 200"));
        let hellos = memchr::memmem::find_iter(&pair.wire.borrow(), b"diy-mesh/any").count()
            + memchr::memmem::find_iter(&pair.wire.borrow(), b"diy-mesh/http1").count();
        let endpoint = pair
            .destination
            .pick(&[], &mut fastrand::Rng::new())
            .unwrap();
        until(|| endpoint.pool().idle_http1() >= hellos).await;
    });
}

#[test]
fn pooled_connection_has_completed_its_handshake() {
    on_worker(async {
        let (app, address) = listen().await;
        let pair = Pair::usual(address).await;
        let dialed = opaque::dial(&pair.flow(pair.address), super::Alpn::Inspected, None)
            .await
            .unwrap();
        let endpoint = dialed.endpoint.clone();
        opaque::pool(dialed).await;
        // The inbound proxy connects to the application after the handshake.
        app.accept().await.unwrap();
        assert!(
            endpoint
                .pool()
                .checkout_http1(Instant::now(), true)
                .is_some()
        );
    });
}

#[test]
fn rejects_endpoint_with_unexpected_certificate() {
    on_worker(async {
        let (authority, other_authority) = (Authority::new("root"), Authority::new("another root"));
        let past = |params: &mut CertificateParams| {
            params.not_after = (SystemTime::now() - Duration::from_secs(1)).into()
        };
        let both_roots = || {
            let mut roots = RootCertStore::empty();
            roots.add(authority.certificate()).unwrap();
            roots.add(other_authority.certificate()).unwrap();
            Arc::new(roots)
        };
        let wrong = [
            // A pod that reuses the address, with its own certificate.
            (
                "another workload",
                credentials(
                    &authority,
                    "spiffe://cluster.local/ns/shop/sa/thief",
                    |_| {},
                ),
                "expected",
            ),
            (
                "another trust domain",
                credentials(&authority, "spiffe://other.local/ns/shop/sa/cart", |_| {}),
                "spiffe://other.local",
            ),
            (
                "an expired certificate",
                credentials(&authority, CART, past),
                "xpired",
            ),
            (
                "another authority",
                credentials_that_trust(&other_authority, CART, both_roots(), |_| {}),
                "UnknownIssuer",
            ),
        ];
        for (what, cart, reason) in wrong {
            let web = credentials(&authority, WEB, |_| {});
            let pair = Pair::new(Some(web), Some(cart), "", app().await).await;
            let answer = pair.call(GET).await;
            assert!(
                answer.starts_with("HTTP/1.1 502 ")
                    && answer.contains("x-mesh-error: handshake-failed"),
                "{what}: {answer}"
            );
            assert!(answer.contains(reason), "{what}: {answer}");
            assert!(!pair.saw("secret") && !pair.saw("HTTP/1.1"), "{what}");
        }
    });
}

#[test]
fn rejects_client_with_invalid_certificate() {
    on_worker(async {
        let (authority, other_authority) = (Authority::new("root"), Authority::new("another root"));
        let past = |params: &mut CertificateParams| {
            params.not_after = (SystemTime::now() - Duration::from_secs(1)).into()
        };
        let wrong = [
            (
                "another trust domain",
                credentials(&authority, "spiffe://other.local/ns/shop/sa/web", |_| {}),
            ),
            ("an expired certificate", credentials(&authority, WEB, past)),
            (
                "another authority",
                credentials_that_trust(&other_authority, WEB, authority.roots(), |_| {}),
            ),
        ];
        for (what, web) in wrong {
            let cart = credentials(&authority, CART, |_| {});
            let pair = Pair::new(Some(web), Some(cart), "", app().await).await;
            let answer = pair.call(GET).await;
            assert!(
                answer.starts_with("HTTP/1.1 502 ")
                    && answer.contains("x-mesh-error: handshake-failed"),
                "{what}: {answer}"
            );
            let metrics = pair.inbound.metrics.render();
            assert!(metrics.contains("code=\"handshake-failed\"} 1"), "{what}");
            let failed = "tls_handshakes_total{direction=\"inbound\",result=\"failed\"} 1";
            assert!(metrics.contains(failed), "{what}: {metrics}");
        }
    });
}

#[test]
fn sends_nothing_to_a_meshed_endpoint_without_a_certificate() {
    on_worker(async {
        let authority = Authority::new("root");
        let pair = Pair::new(
            None,
            Some(credentials(&authority, CART, |_| {})),
            "",
            app().await,
        )
        .await;
        let answer = pair.call(GET).await;
        assert!(
            answer.starts_with("HTTP/1.1 503 ") && answer.contains("x-mesh-error: no-certificate"),
            "{answer}"
        );
        assert!(pair.wire.borrow().is_empty());
        // Nor is one answered: the handshake does not begin.
        let pair = Pair::new(
            Some(credentials(&authority, WEB, |_| {})),
            None,
            "",
            app().await,
        )
        .await;
        assert!(
            pair.call(GET)
                .await
                .contains("x-mesh-error: handshake-failed")
        );
        assert!(!pair.saw("secret"));
    });
}

#[test]
fn sends_no_request_to_a_meshed_endpoint_without_tls() {
    on_worker(async {
        let pair = Pair::usual(app().await).await;
        let (listener, heard) = (
            TcpListener::bind("127.0.0.2:0").await.unwrap(),
            Rc::new(RefCell::new(Vec::new())),
        );
        let plain = crate::upstream::balance::Backend::alone(listener.local_addr().unwrap());
        let record = heard.clone();
        tokio::task::spawn_local(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut piece = [0; 4096];
            let read = stream.read(&mut piece).await.unwrap();
            record.borrow_mut().extend_from_slice(&piece[..read]);
            stream
                .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                .await
                .unwrap();
        });
        let address = plain.address().unwrap();
        let io = crate::secure::io::Io::new(TcpStream::connect(address).await.unwrap());
        let refused = pair
            .outbound
            .worker
            .tls
            .connect(
                io,
                address,
                &CART.parse().unwrap(),
                super::Alpn::Http1,
                memory(),
            )
            .await;
        assert_eq!(
            refused.err().map(|failure| failure.code().label()),
            Some("handshake-failed")
        );
        assert_eq!(super::inspect(&heard.borrow()), super::Hello::Mesh);
    });
}

#[test]
fn forwards_opaque_bytes_in_both_directions() {
    on_worker(async {
        let pair = Pair::usual(speaks_first(b"220 ready\r\n").await).await;
        let mut client = pair.connect().await;
        let mut greeting = [0; 11];
        client.read_exact(&mut greeting).await.unwrap();
        assert_eq!(&greeting, b"220 ready\r\n");
        assert!(pair.saw("diy-mesh/any") && !pair.saw("220 ready"));
        let sent: Vec<u8> = (0..3_000_000u32).map(|at| (at % 251) as u8).collect();
        let (mut read, mut write) = client.split();
        let mut received = Vec::new();
        tokio::join!(
            async {
                write.write_all(&sent).await.unwrap();
                write.shutdown().await.unwrap();
            },
            async {
                read.read_to_end(&mut received).await.unwrap();
            }
        );
        received.reverse();
        assert!(received == sent, "{} of {}", received.len(), sent.len());
    });
}

#[test]
fn http2_streams_share_a_session_and_get_x_called_by() {
    on_worker(async {
        let (listener, app) = listen().await;
        tokio::task::spawn_local(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut connection = h2::server::handshake(stream).await.unwrap();
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                let callers: Vec<_> = request
                    .headers()
                    .get_all("x-called-by")
                    .iter()
                    .cloned()
                    .collect();
                assert!(!request.headers().contains_key("x_called_by"));
                let response = http::Response::builder()
                    .header("x-seen", callers[0].clone())
                    .header("x-count", callers.len());
                respond
                    .send_response(response.body(()).unwrap(), true)
                    .unwrap();
            }
        });
        let pair = Pair::usual(app).await;
        let (client, connection) = h2::client::handshake(pair.connect().await).await.unwrap();
        tokio::task::spawn_local(connection);
        for _ in 0..3 {
            let request = http::Request::get("http://cart/secret")
                .header("x-called-by", "me")
                .header("x_called_by", "me");
            let mut client = client.clone().ready().await.unwrap();
            let (response, _) = client
                .send_request(request.body(()).unwrap(), true)
                .unwrap();
            let response = response.await.unwrap();
            assert_eq!(
                (
                    &response.headers()["x-seen"],
                    &response.headers()["x-count"]
                ),
                (&WEB.parse().unwrap(), &"1".parse().unwrap())
            );
        }
        assert!(pair.saw("diy-mesh/h2") && !pair.saw("PRI *"));
    });
}

#[test]
fn forwards_websocket_upgrade_with_x_called_by() {
    on_worker(async {
        let (listener, app) = listen().await;
        tokio::task::spawn_local(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let head = read_until(&mut stream, "\r\n\r\n").await;
            assert!(head.contains(&format!("X-Called-By: {WEB}\r\n")));
            stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n").await.unwrap();
            let (mut read, mut write) = stream.split();
            tokio::io::copy(&mut read, &mut write).await.unwrap();
        });
        let pair = Pair::usual(app).await;
        let mut client = pair.connect().await;
        client.write_all(b"GET /chat HTTP/1.1\r\nHost: cart\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n").await.unwrap();
        let head = read_until(&mut client, "\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 101 "));
        client.write_all(b"a secret frame").await.unwrap();
        let mut echoed = [0; 14];
        client.read_exact(&mut echoed).await.unwrap();
        assert_eq!(&echoed, b"a secret frame");
        assert!(!pair.saw("secret") && !pair.saw("Upgrade"));
    });
}

#[test]
fn strict_pod_accepts_only_peers() {
    on_worker(async {
        let app = app().await;
        let authority = Authority::new("root");
        let [web, cart] = [WEB, CART].map(|identity| credentials(&authority, identity, |_| {}));
        // The flag of an earlier injector, which exempted such requests.
        let arguments = format!(" --inbound strict --probe http:{}:/healthz", app.port());
        let pair = Pair::new(Some(web), Some(cart), &arguments, app).await;
        assert!(pair.call(GET).await.starts_with("HTTP/1.1 200 "), "a peer");
        let plain = async |request: &str| {
            exchange(TcpStream::connect(pair.address).await.unwrap(), request).await
        };
        let health = "GET /healthz HTTP/1.1\r\nHost: cart\r\nConnection: close\r\n\r\n";
        for request in [GET, health] {
            let refused = plain(request).await;
            assert!(
                refused.starts_with("HTTP/1.1 403 ")
                    && refused.contains("x-mesh-error: mtls-required"),
                "{refused}"
            );
        }
        assert_eq!(plain("*1\r\n$4\r\nPING\r\n").await, "", "opaque bytes");
    });
}

#[test]
fn new_connections_use_new_certificate_and_open_ones_continue() {
    on_worker(async {
        let (old, new) = (Authority::new("old root"), Authority::new("new root"));
        let mut both = RootCertStore::empty();
        both.add(old.certificate()).unwrap();
        both.add(new.certificate()).unwrap();
        let both = Arc::new(both);
        let of = |authority: &Authority, identity: &str| {
            credentials_that_trust(authority, identity, both.clone(), |_| {})
        };
        let pair = Pair::new(Some(of(&old, WEB)), Some(of(&old, CART)), "", app().await).await;
        let mut kept = pair.connect().await;
        let ask = async |client: &mut TcpStream| {
            client
                .write_all(b"GET / HTTP/1.1\r\nHost: cart\r\n\r\n")
                .await
                .unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(format!("X-Called-By: {WEB}\r\n\r\n").as_bytes()) {
                answer.push(client.read_u8().await.unwrap());
            }
        };
        ask(&mut kept).await;
        pair.outbound.renew(of(&new, WEB));
        pair.inbound.renew(of(&new, CART));
        ask(&mut kept).await;
        // New connections use only the new root.
        pair.outbound.renew(credentials(&new, WEB, |_| {}));
        pair.inbound.renew(credentials(&new, CART, |_| {}));
        assert!(
            pair.negotiate().await.to_string().ends_with(" Full"),
            "sessions of earlier certificates are not resumed"
        );
        ask(&mut kept).await;
    });
}

#[test]
fn limits_and_counts_the_time_of_handshakes() {
    on_worker(async {
        let authority = Authority::new("root");
        let side = |identity| {
            let credentials = credentials(&authority, identity, |_| {});
            Side::new(Some(credentials), "", Discovery::off())
        };
        let counted = |side: &Side, direction: &str| {
            let name =
                format!("timeouts_total{{direction=\"{direction}\",kind=\"tls-handshake\"}} 1\n");
            side.metrics.render().contains(&name)
        };
        let (client, server, cart) = (side(WEB), side(CART), CART.parse().unwrap());
        // The client's ClientHello reaches a peer that does not respond.
        let (silent, address) = listen().await;
        let (near, far) = tokio::join!(TcpStream::connect(address), silent.accept());
        let (near, mut far) = (Io::new(near.unwrap()), far.unwrap().0);
        let tls = &client.worker.tls;
        let connect = tls.connect(near, address, &cart, super::Alpn::Http1, memory());
        let mut hello = vec![0; 4096];
        let read = async {
            let read = far.read(&mut hello).await.unwrap();
            hello.truncate(read);
            tokio::time::pause();
        };
        let (connected, ()) = tokio::join!(connect, read);
        let failure = connected.err().unwrap().to_string();
        assert!(failure.contains("not completed within 5s"), "{failure}");
        assert!(counted(&client, "outbound"));
        // The server responds to a ClientHello after which nothing follows.
        tokio::time::resume();
        let mut stream = TcpStream::connect(server.receive(address).await)
            .await
            .unwrap();
        stream.write_all(&hello).await.unwrap();
        assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
        tokio::time::pause();
        let _ = stream.read_to_end(&mut Vec::new()).await;
        assert!(counted(&server, "inbound"));
    });
}

#[test]
fn connections_of_a_pod_to_itself_use_no_tls() {
    on_worker(async {
        // Loopback connections from 127.0.0.1 to 127.0.0.1 model a pod that connects to itself.
        let (_listener, address) = listen().await;
        let (discovery, mut questions) = Discovery::by_hand();
        let authority = Authority::new("root");
        let side = Side::new(Some(credentials(&authority, CART, |_| {})), "", discovery);
        let endpoint = Arc::new(EndpointInfo {
            identity: Some(CART.parse().unwrap()),
            ..EndpointInfo::bare(address)
        });
        let pod = Target {
            kind: TargetKind::Pod,
            namespace: "shop".into(),
            name: "cart-1".into(),
            endpoints: vec![endpoint],
            ..Target::default()
        };
        let (destination, ()) =
            tokio::join!(side.worker.destinations.get_or_watch(address), async {
                let (_, answer) = questions.next().await;
                drop(answer(Arc::new(pod)));
            });
        let endpoint = destination.pick(&[], &mut fastrand::Rng::new()).unwrap();
        let slot = side.worker.slot();
        let dialer = crate::upstream::connect::Dialer::new(
            &side.worker.tls,
            tokio::time::Instant::now(),
            TEST_TIMEOUT,
            &slot,
        );
        let io = dialer
            .dial(&endpoint.pool().remote, super::Alpn::Http1)
            .await
            .unwrap();
        assert!(!io.is_secured());
    });
}
