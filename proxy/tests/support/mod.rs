//! Shared test support: a worker without listeners, and connections through it.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use clap::Parser;
use diy_mesh_model::exchange::Direction;
use diy_mesh_proxy::config::Config;
use diy_mesh_proxy::context::flow::Flow;
use diy_mesh_proxy::context::worker::{Worker, WorkerContext};
use diy_mesh_proxy::discovery::Discovery;
use diy_mesh_proxy::inbound::policy::Caller;
use diy_mesh_proxy::limits::lifetime::Lifetime;
use diy_mesh_proxy::limits::memory::{ConnectionSlot, Holder, Memory};
use diy_mesh_proxy::limits::timeouts::TimeoutKind;
use diy_mesh_proxy::observe::dump::Dumps;
use diy_mesh_proxy::observe::metrics::Metrics;
use diy_mesh_proxy::path::connection::carry;
use diy_mesh_proxy::secure::io::Io;
use diy_mesh_proxy::upstream::balance::Backend;
use diy_mesh_proxy::upstream::connect::set_options;
use diy_mesh_testkit::metrics;
use diy_mesh_testkit::net::{connected, read_head};
use diy_mesh_testkit::wait::{TEST_TIMEOUT, on_worker_within};
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// Like [`on_worker`], with paused time: timers fire as soon as the runtime is idle.
pub fn on_worker_without_waiting<F: Future<Output = ()>>(test: F) {
    on_worker_within(Duration::from_secs(3600), async {
        tokio::time::pause();
        test.await;
    });
}

/// Like [`on_worker`], for tests that call [`jump`]. Their timeout uses real time.
pub fn on_worker_with_jumps<F: Future<Output = ()>>(test: F) {
    let (expire, expired) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        std::thread::sleep(TEST_TIMEOUT);
        expire.send(())
    });
    let test = async {
        tokio::select! {
            () = test => {}
            _ = expired => panic!("the test timed out"),
        }
    };
    on_worker_within(Duration::MAX, test);
}

/// Advances the time of all timers.
pub async fn jump(by: Duration) {
    tokio::time::pause();
    tokio::time::advance(by).await;
    tokio::time::resume();
}

pub struct Mesh {
    pub worker: Rc<Worker>,
    pub drain: CancellationToken,
    pub metrics: Arc<Metrics>,
}

impl Mesh {
    pub fn new() -> Self {
        Self::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut Config)) -> Self {
        Self::with_memory(64 * 1024 * 1024, change)
    }

    pub fn with_memory(memory: usize, change: impl FnOnce(&mut Config)) -> Self {
        let args = "proxy --inbound-port 4000 --outbound-port 5000 --admin-port 4001 --controller http://c:8080 --token-file /token --dump off";
        let mut config = Config::parse_from(args.split(' ')).check().unwrap();
        change(&mut config);
        let workers = config.workers;
        let (metrics, drain) = (Metrics::new(), CancellationToken::new());
        let context = WorkerContext {
            config: Arc::new(config),
            dumps: Dumps::off(),
            metrics: metrics.clone(),
            discovery: Discovery::off(),
            credentials: diy_mesh_proxy::secure::identity::none(),
            limit: 1000,
            memory: Memory::new(memory * workers * 8),
            recent: Arc::default(),
            drain: drain.clone(),
            questions: tokio::sync::mpsc::channel(1).1,
        };
        Self {
            worker: Worker::new(context),
            drain,
            metrics,
        }
    }

    /// An outbound connection through the proxy to `destination`.
    pub async fn connect(&self, destination: &Rc<Backend>) -> TcpStream {
        self.carry(Direction::Outbound, destination, Caller::App, None)
            .await
    }

    /// An inbound connection of an unauthenticated peer through the proxy to the app at `address`.
    pub async fn connect_inbound(&self, address: SocketAddr) -> TcpStream {
        self.carry(
            Direction::Inbound,
            &Backend::alone(address),
            Caller::Unauthenticated,
            None,
        )
        .await
    }

    /// An inbound connection of a peer with this lifetime through the proxy to the app at
    /// `address`, as after the TLS handshake.
    pub async fn connect_peer(&self, address: SocketAddr, lifetime: Lifetime) -> TcpStream {
        let identity = "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap();
        self.carry(
            Direction::Inbound,
            &Backend::alone(address),
            Caller::Peer(Arc::new(identity)),
            Some(lifetime),
        )
        .await
    }

    /// A slot of the application.
    pub fn slot(&self) -> Rc<ConnectionSlot> {
        self.slot_of(Holder::App)
    }

    fn slot_of(&self, holder: Holder) -> Rc<ConnectionSlot> {
        Rc::new(self.worker.admission.admit(&holder.path()).unwrap())
    }

    async fn carry(
        &self,
        direction: Direction,
        destination: &Rc<Backend>,
        caller: Caller,
        lifetime: Option<Lifetime>,
    ) -> TcpStream {
        let (client, stream) = connected().await;
        // As an accepted socket has them.
        set_options(SockRef::from(&stream), Duration::ZERO).unwrap();
        let peer = stream.peer_addr().unwrap();
        let holder = match (direction, &caller) {
            (Direction::Outbound, _) => Holder::App,
            (_, Caller::Peer(identity)) => Holder::Peer(identity.clone()),
            _ => Holder::Pending(peer.ip()),
        };
        let flow = Flow {
            called_by: Default::default(),
            counted: Default::default(),
            slot: self.slot_of(holder),
            worker: self.worker.clone(),
            direction,
            peer,
            original: destination.address().unwrap(),
            destination: destination.clone(),
            caller,
        };
        let slot = flow.slot.clone();
        let mut io = Io::in_slot(stream, slot.clone());
        if let Some(lifetime) = lifetime {
            io.set_lifetime(lifetime);
        }
        tokio::task::spawn_local(async move { slot.run(pin!(carry(io, flow))).await });
        client
    }

    /// The number of open inbound connections whose peer's certificate has expired.
    pub fn expired(&self) -> u64 {
        self.metric("connections_certificate_expired{direction=\"inbound\"}")
    }

    /// The number of timeouts of this kind that fired.
    pub fn timeouts(&self, direction: Direction, kind: TimeoutKind) -> u64 {
        let (direction, kind) = (direction.name(), kind.name());
        self.metric(&format!(
            "timeouts_total{{direction=\"{direction}\",kind=\"{kind}\"}}"
        ))
    }

    /// The number of requests with all of these labels.
    pub fn requests(&self, labels: &[&str]) -> u64 {
        let metric = "diy_mesh_proxy_requests_total";
        metrics::sum(&self.metrics.render(), metric, labels)
    }

    /// The value of a time series.
    pub fn metric(&self, name: &str) -> u64 {
        let name = format!("diy_mesh_proxy_{name}");
        metrics::value(&self.metrics.render(), &name)
    }

    /// An outbound connection through the proxy to one address.
    pub async fn connect_to(&self, address: SocketAddr) -> TcpStream {
        self.connect(&Backend::alone(address)).await
    }
}

/// Whether the connection was reset by the other end.
pub async fn is_reset(stream: &mut TcpStream) -> bool {
    stream
        .read(&mut [0])
        .await
        .is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
}

/// An app for client-first protocols.
pub struct App {
    listener: TcpListener,
    /// Connections without bytes. The proxy dials them if the client is silent for 2 ms, and may
    /// not use them.
    silent: Vec<TcpStream>,
}

impl App {
    pub async fn listen() -> (App, SocketAddr) {
        let (listener, address) = diy_mesh_testkit::net::listen().await;
        (
            App {
                listener,
                silent: Vec::new(),
            },
            address,
        )
    }

    /// Whether no connection so far has received bytes.
    pub async fn received_nothing(&mut self) -> bool {
        while let Ok(accepted) =
            tokio::time::timeout(Duration::from_millis(50), self.listener.accept()).await
        {
            self.silent.push(accepted.unwrap().0);
        }
        let mut byte = [0];
        self.silent
            .iter()
            .all(|stream| !matches!(stream.try_read(&mut byte), Ok(1..)))
    }

    /// The next connection that receives bytes.
    pub async fn accept(&mut self) -> TcpStream {
        loop {
            let silent = &self.silent;
            let readable = poll_fn(|cx| {
                for (index, stream) in silent.iter().enumerate() {
                    if let Poll::Ready(peeked) = stream.poll_peek(cx, &mut ReadBuf::new(&mut [0])) {
                        return Poll::Ready((index, peeked.unwrap()));
                    }
                }
                Poll::Pending
            });
            tokio::select! {
                (index, peeked) = readable => {
                    let stream = self.silent.remove(index);
                    if peeked > 0 {
                        return stream;
                    }
                }
                accepted = self.listener.accept() => self.silent.push(accepted.unwrap().0),
            }
        }
    }
}

/// An app that responds to each request with 200 and no body.
pub async fn answering_app() -> SocketAddr {
    let (mut app, address) = App::listen().await;
    tokio::task::spawn_local(async move {
        loop {
            let mut stream = app.accept().await;
            tokio::task::spawn_local(async move {
                while read_head(&mut stream).await.is_some() {
                    write(&mut stream, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
                }
            });
        }
    });
    address
}

pub async fn write(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).await.unwrap();
}
