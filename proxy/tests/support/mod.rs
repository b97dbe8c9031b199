//! What the proxy's tests share: a worker without listeners, and connections of it that go to a
//! given address.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use clap::Parser;
use diy_mesh_proxy::balance::Destination;
use diy_mesh_proxy::config::{Config, RawConfig};
use diy_mesh_proxy::connection::serve;
use diy_mesh_proxy::discovery::Discovery;
use diy_mesh_proxy::dump::{Direction, Dumps};
use diy_mesh_proxy::flow::Flow;
use diy_mesh_proxy::io::Io;
use diy_mesh_proxy::lifetime::Lifetime;
use diy_mesh_proxy::metrics::Metrics;
use diy_mesh_proxy::policy::Caller;
use diy_mesh_proxy::worker::{Worker, WorkerContext};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// Long enough for a busy machine, short enough for a test that hangs.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// Runs a test as a worker thread runs: one thread, a local set, a deadline.
pub fn on_worker<F: Future<Output = ()>>(test: F) {
    run(test, false, DEADLINE);
}

/// The same where time passes at once while nothing else happens: timeouts take no time.
pub fn on_worker_without_waiting<F: Future<Output = ()>>(test: F) {
    run(test, true, Duration::from_secs(3600));
}

/// The same where the test jumps ahead in time: its deadline does not.
pub fn on_worker_with_jumps<F: Future<Output = ()>>(test: F) {
    let (expire, expired) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        std::thread::sleep(DEADLINE);
        expire.send(())
    });
    let test = async {
        tokio::select! {
            () = test => {}
            _ = expired => panic!("the test took too long"),
        }
    };
    run(test, false, Duration::MAX);
}

/// Makes all timers due that would be after `by`.
pub async fn jump(by: Duration) {
    tokio::time::pause();
    tokio::time::advance(by).await;
    tokio::time::resume();
}

/// Waits for a condition that other tasks bring about.
pub async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::task::yield_now().await;
    }
}

fn run<F: Future<Output = ()>>(test: F, paused: bool, deadline: Duration) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(paused)
        .build()
        .unwrap();
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        tokio::time::timeout(deadline, test)
            .await
            .expect("the test took too long")
    });
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
        let args = "proxy --inbound-port 4000 --outbound-port 5000 --admin-port 4001 --controller http://c:8080 --token-file /token --dump off";
        let mut config = Config::from_raw(RawConfig::parse_from(args.split(' '))).unwrap();
        change(&mut config);
        let (metrics, drain) = (Metrics::new(), CancellationToken::new());
        let context = WorkerContext {
            config: Arc::new(config),
            dumps: Dumps::off(),
            metrics: metrics.clone(),
            discovery: Discovery::off(),
            credentials: diy_mesh_proxy::identity::none(),
            limit: 1000,
            drain: drain.clone(),
        };
        Self {
            worker: Worker::new(context),
            drain,
            metrics,
        }
    }

    /// A client's connection through the proxy to `destination`.
    pub async fn connect(&self, destination: &Rc<Destination>) -> TcpStream {
        self.carry(Direction::Outbound, destination, Caller::App)
            .await
    }

    /// The connection of somebody who proves nothing, through the proxy to its app at `address`.
    pub async fn connect_inbound(&self, address: SocketAddr) -> TcpStream {
        self.carry(
            Direction::Inbound,
            &Rc::new(Destination::fixed(address)),
            Caller::Unauthenticated,
        )
        .await
    }

    async fn carry(
        &self,
        direction: Direction,
        destination: &Rc<Destination>,
        caller: Caller,
    ) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (client, accepted) = tokio::join!(
            TcpStream::connect(listener.local_addr().unwrap()),
            listener.accept()
        );
        let (stream, peer) = accepted.unwrap();
        let flow = Flow {
            worker: self.worker.clone(),
            direction,
            peer,
            destination: destination.clone(),
            caller,
        };
        tokio::task::spawn_local(serve(Io::new(stream), flow));
        client.unwrap()
    }

    /// A peer's connection with this lifetime through the proxy to the app at `address`. It is as
    /// if TLS had been terminated already.
    pub async fn connect_peer(&self, address: SocketAddr, lifetime: Lifetime) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (client, accepted) = tokio::join!(
            TcpStream::connect(listener.local_addr().unwrap()),
            listener.accept()
        );
        let (stream, peer) = accepted.unwrap();
        let flow = Flow {
            worker: self.worker.clone(),
            direction: Direction::Inbound,
            peer,
            destination: Rc::new(Destination::fixed(address)),
            caller: Caller::Peer(Rc::new(
                "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap(),
            )),
        };
        let mut io = Io::new(stream);
        io.set_lifetime(lifetime);
        tokio::task::spawn_local(serve(io, flow));
        client.unwrap()
    }

    /// How many inbound connections are open whose peer's certificate has expired.
    pub fn expired(&self) -> u64 {
        let page = self.metrics.render();
        let name = "diy_mesh_proxy_connections_certificate_expired{direction=\"inbound\"} ";
        page.lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap()
            .parse()
            .unwrap()
    }

    /// A client's connection through the proxy to one address.
    pub async fn connect_to(&self, address: SocketAddr) -> TcpStream {
        self.connect(&Rc::new(Destination::fixed(address))).await
    }
}

/// A server for raw bytes.
pub async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// An app whose clients speak first.
pub struct App {
    listener: TcpListener,
    /// Connections on which nothing was said yet: a client that is silent for two milliseconds is
    /// dialed for in vain.
    silent: Vec<TcpStream>,
}

impl App {
    pub async fn listen() -> (App, SocketAddr) {
        let (listener, address) = listen().await;
        (
            App {
                listener,
                silent: Vec::new(),
            },
            address,
        )
    }

    /// Whether no connection that has come so far carries a byte.
    pub async fn heard_nothing(&mut self) -> bool {
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

    /// The next connection on which something is said.
    pub async fn accept(&mut self) -> TcpStream {
        loop {
            let silent = &self.silent;
            let spoken = poll_fn(|cx| {
                for (index, stream) in silent.iter().enumerate() {
                    if let Poll::Ready(said) = stream.poll_peek(cx, &mut ReadBuf::new(&mut [0])) {
                        return Poll::Ready((index, said.unwrap()));
                    }
                }
                Poll::Pending
            });
            tokio::select! {
                (index, said) = spoken => {
                    let stream = self.silent.remove(index);
                    if said > 0 {
                        return stream;
                    }
                }
                accepted = self.listener.accept() => self.silent.push(accepted.unwrap().0),
            }
        }
    }
}

/// Reads until what came ends with `end`.
pub async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut read = Vec::new();
    while !read.ends_with(end.as_bytes()) {
        match stream.read_u8().await {
            Ok(byte) => read.push(byte),
            Err(error) => panic!("{error} after {:?}", String::from_utf8_lossy(&read)),
        }
    }
    String::from_utf8(read).unwrap()
}

/// Reads until the end of the stream.
pub async fn read_all(stream: &mut TcpStream) -> String {
    let mut read = Vec::new();
    // A reset after the last answer is an end, too.
    let _ = stream.read_to_end(&mut read).await;
    String::from_utf8(read).unwrap()
}

pub async fn write(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).await.unwrap();
}
