//! A TLS server for clients that nobody vouches for: from a listener to connections with a
//! completed handshake, and the time that each may take.
//!
//! Each connection has a slot (`crates/runtime/src/admission.rs`), held by the client's address until
//! the client has authenticated, then by its pod. Memory that is kept for the client is charged to the
//! slot.
//!
//! From its first byte until the client has authenticated, a connection also has one of fewer slots,
//! which the addresses hold and wait for: thousands of clients behind one address get in one after
//! the other.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use diy_mesh_runtime::admission::{Admission, Class, Slot, network};
use diy_mesh_runtime::listen::Acceptor;
use diy_mesh_runtime::max_open_files;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Time for the first byte and for the slot of the handshake.
pub const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time from the slot of the handshake to the first call.
pub const FIRST_CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum number of connections whose clients have not authenticated.
pub const MAX_UNAUTHENTICATED: usize = 8192;
/// Open files that are not connections of clients.
const OTHER_FILES: usize = 128;

/// The limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections that have sent a byte, and whose clients have not authenticated.
    pub handshakes: usize,
    /// Time without a call.
    pub idle: Duration,
}

/// Who holds connections.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Holder {
    /// All clients that have not authenticated.
    Unauthenticated,
    /// The unauthenticated clients at one [`network`].
    Address(IpAddr),
    /// The pods of a namespace.
    Namespace(Arc<str>),
    /// A pod, by its UID.
    Pod(Arc<str>),
}

/// The slots of all connections, and the bytes that these hold.
pub type Connections = Admission<Holder>;
/// The slot of a connection.
pub type ConnectionSlot = Slot<Holder>;

/// This many slots, or fewer if the limit of open files is lower, and this many bytes.
pub fn connections(slots: usize, bytes: usize) -> Arc<Connections> {
    let files = usize::try_from(max_open_files()).unwrap_or(usize::MAX);
    let slots = files.saturating_sub(OTHER_FILES).min(slots);
    let connections = Admission::new(slots);
    connections.resize(slots, bytes);
    connections
}

/// Accepts TLS connections.
pub struct TlsServer {
    acceptor: Acceptor,
    tls: TlsAcceptor,
    idle: Duration,
    connections: Arc<Connections>,
    handshakes: Arc<Admission<IpAddr>>,
    tasks: JoinSet<Option<Connection>>,
}

/// A connection with a completed handshake, and its client.
pub type Connection = (TlsStream<TcpStream>, Arc<Client>);

impl TlsServer {
    /// A server of a bound listener.
    pub fn new(
        listener: TcpListener,
        config: Arc<ServerConfig>,
        connections: Arc<Connections>,
        limits: Limits,
    ) -> Self {
        Self {
            acceptor: Acceptor::new(listener),
            tls: config.into(),
            idle: limits.idle,
            connections,
            handshakes: Admission::new(limits.handshakes),
            tasks: JoinSet::new(),
        }
    }

    /// Returns the next connection that has completed its handshake. Cancel-safe.
    pub async fn accept(&mut self) -> Connection {
        loop {
            tokio::select! {
                (stream, peer) = self.acceptor.accept() => self.start(stream, peer),
                Some(done) = self.tasks.join_next() => {
                    if let Ok(Some(connection)) = done {
                        return connection;
                    }
                }
            }
        }
    }

    /// Starts the handshake of a connection. Without a slot, it is closed.
    fn start(&mut self, stream: TcpStream, peer: SocketAddr) {
        let address = network(peer.ip());
        let holder = [Holder::Unauthenticated, Holder::Address(address)];
        let admitted = self.connections.admit_within(&holder, MAX_UNAUTHENTICATED);
        let Some(connection) = admitted else {
            let limit = "the limit of connections is reached, and its address has its share";
            return tracing::warn!(%peer, "connection closed: {limit}");
        };
        let (tls, handshakes, idle) = (self.tls.clone(), self.handshakes.clone(), self.idle);
        self.tasks.spawn(async move {
            connect(stream, connection, tls, &handshakes, address, idle)
                .await
                .inspect_err(|error| tracing::debug!(%peer, "TLS handshake failed: {error}"))
                .ok()
        });
    }
}

async fn connect(
    stream: TcpStream,
    connection: ConnectionSlot,
    tls: TlsAcceptor,
    handshakes: &Arc<Admission<IpAddr>>,
    address: IpAddr,
    idle: Duration,
) -> io::Result<Connection> {
    let wait = async {
        // Without a byte, the client has closed the connection.
        if stream.peek(&mut [0]).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        connection.set(Class::Idle);
        io::Result::Ok(handshakes.acquire(&[address]).await)
    };
    let waited = connection
        .run(pin!(timeout(FIRST_BYTE_TIMEOUT, wait)))
        .await;
    let handshake = waited.ok_or_else(displaced)???;
    let client = Client::new(connection, handshake, idle);
    // Boxed, so that a connection that waits takes little memory.
    let mut accepted = Box::pin(async {
        tokio::select! {
            accepted = tls.accept(stream) => accepted,
            () = client.expired() => Err(io::ErrorKind::TimedOut.into()),
        }
    });
    let stream = client
        .run(accepted.as_mut())
        .await
        .ok_or_else(displaced)??;
    drop(accepted);
    Ok((stream, client))
}

fn displaced() -> io::Error {
    io::Error::other("another connection has taken its slot")
}

/// The client of one connection.
pub struct Client {
    started: Instant,
    idle: Duration,
    connection: Arc<ConnectionSlot>,
    /// Until the client has authenticated.
    handshake: Slot<IpAddr>,
    state: Mutex<ClientState>,
}

struct ClientState {
    /// A call has been served.
    is_served: bool,
    /// Open calls.
    calls: usize,
    idle_since: Instant,
}

impl Client {
    fn new(connection: ConnectionSlot, handshake: Slot<IpAddr>, idle: Duration) -> Arc<Self> {
        let now = Instant::now();
        let client = Self {
            started: now,
            idle,
            connection: Arc::new(connection),
            handshake,
            state: Mutex::new(ClientState {
                is_served: false,
                calls: 0,
                idle_since: now,
            }),
        };
        client.set(Class::BetweenExchanges);
        Arc::new(client)
    }

    /// Serves the connection. Returns `None` if another connection takes its slot before it ends.
    /// Pinned by the caller: a future that is passed by value is in memory once more for each
    /// function.
    pub async fn run<T>(&self, work: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        let in_handshake_slot = pin!(self.handshake.run(work));
        self.connection.run(in_handshake_slot).await.flatten()
    }

    /// The slot, to which the bytes are charged that are held for the client.
    pub fn slot(&self) -> &Arc<ConnectionSlot> {
        &self.connection
    }

    /// Counts a call until the value is dropped: the connection is not idle.
    pub fn call(self: &Arc<Self>) -> OpenCall {
        let mut state = self.state();
        state.calls += 1;
        self.set(Class::InUse);
        OpenCall(self.clone())
    }

    /// The client has made its first call.
    pub fn serve(&self) {
        self.state().is_served = true;
    }

    /// The client has authenticated: a pod with this UID, or none, in this namespace. It holds the
    /// connection in place of its address.
    pub fn authenticate(&self, namespace: Arc<str>, pod: Arc<str>) {
        self.serve();
        let holder = [Holder::Namespace(namespace), Holder::Pod(pod)];
        self.connection.reassign(&holder);
        self.handshake.release();
    }

    /// Completes when the connection must end: without a first call in time, or idle.
    pub async fn expired(&self) {
        loop {
            let deadline = self.deadline();
            if deadline <= Instant::now() {
                return;
            }
            sleep_until(deadline).await;
        }
    }

    /// When the connection must end, if nothing happens until then.
    fn deadline(&self) -> Instant {
        let state = self.state();
        let idle_since = match state.calls {
            0 => state.idle_since,
            _ => Instant::now(),
        };
        let idle = idle_since + self.idle;
        if state.is_served {
            idle
        } else {
            idle.min(self.started + FIRST_CALL_TIMEOUT)
        }
    }

    fn set(&self, class: Class) {
        self.connection.set(class);
        self.handshake.set(class);
    }

    /// Each update is one assignment, so the state is valid after a panic.
    fn state(&self) -> MutexGuard<'_, ClientState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An open call of a client.
pub struct OpenCall(Arc<Client>);

impl Drop for OpenCall {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.calls -= 1;
        if state.calls == 0 {
            state.idle_since = Instant::now();
            self.0.set(Class::BetweenExchanges);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustls::server::{ClientHello, ResolvesServerCert};
    use rustls::sign::CertifiedKey;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpSocket;

    use super::*;

    const A: [u8; 4] = [127, 0, 0, 1];
    const B: [u8; 4] = [127, 0, 0, 2];

    struct Slots(Arc<Connections>, Arc<Admission<IpAddr>>);

    impl Slots {
        fn new(handshakes: usize) -> Self {
            Self(Admission::new(100), Admission::new(handshakes))
        }

        async fn client(&self, address: [u8; 4]) -> Arc<Client> {
            let address = IpAddr::from(address);
            let holder = [Holder::Unauthenticated, Holder::Address(address)];
            let connection = self.0.admit(&holder).unwrap();
            let handshake = self.1.acquire(&[address]).await;
            Client::new(connection, handshake, Duration::from_secs(300))
        }
    }

    async fn run<T>(client: &Client, work: impl Future<Output = T>) -> Option<T> {
        client.run(pin!(work)).await
    }

    async fn lifetime(client: &Client) -> u64 {
        run(client, client.expired()).await;
        client.started.elapsed().as_secs()
    }

    #[tokio::test(start_paused = true)]
    async fn connection_without_a_served_call_ends() {
        let client = Slots::new(4).client(A).await;
        let _failing = client.call();
        assert_eq!(lifetime(&client).await, FIRST_CALL_TIMEOUT.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn authenticated_connection_keeps_no_slot_of_its_address_and_ends_when_idle() {
        let slots = Slots::new(4);
        let client = slots.client(A).await;
        let call = client.call();
        client.authenticate("shop".into(), "1".into());
        assert_eq!(slots.1.used(&[]), 0);
        assert_eq!(slots.0.used(&[Holder::Unauthenticated]), 0);
        let pod = [Holder::Namespace("shop".into()), Holder::Pod("1".into())];
        assert_eq!(slots.0.used(&pod), 1);
        let year = Duration::from_secs(365 * 24 * 3600);
        assert!(
            timeout(year, client.expired()).await.is_err(),
            "a call is open"
        );
        drop(call);
        let ended = lifetime(&client).await - year.as_secs();
        assert_eq!(ended, 300);
    }

    #[tokio::test(start_paused = true)]
    async fn connection_ends_soon_if_its_address_has_more_than_its_share() {
        for (call, expected) in [(false, 1), (true, 0)] {
            let slots = Slots::new(2);
            let both = [slots.client(A).await, slots.client(A).await];
            both[0].serve();
            both[1].serve();
            let _calls = both.each_ref().map(|client| call.then(|| client.call()));
            let other = slots.client(B).await;
            let started = run(&other, async { Instant::now() });
            let (first, second, started) = tokio::join!(
                timeout(
                    FIRST_CALL_TIMEOUT,
                    run(&both[0], std::future::pending::<()>())
                ),
                timeout(
                    FIRST_CALL_TIMEOUT,
                    run(&both[1], std::future::pending::<()>())
                ),
                started,
            );
            // Among connections with a call, the youngest ends.
            assert_eq!((first.is_ok(), second.is_ok()), (!call, call));
            let waited = started.unwrap() - other.started;
            assert!(
                waited.as_secs_f64() < f64::from(expected) * 2.0 + 0.1,
                "{waited:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn handshake_of_an_address_above_its_share_has_a_second_to_be_done() {
        let slots = Slots::new(2);
        let (first, _second) = (slots.client(A).await, slots.client(A).await);
        let other = slots.client(B).await;
        let authenticates = async {
            tokio::task::yield_now().await;
            first.authenticate("shop".into(), "1".into());
            first.expired().await;
        };
        let (first, started) = tokio::join!(run(&first, authenticates), async {
            run(&other, async { Instant::now() }).await
        });
        assert_eq!(first, Some(()));
        assert_eq!(started, Some(other.started), "it has not waited");
    }

    /// A server without a certificate answers a ClientHello with an alert.
    #[derive(Debug)]
    struct NoCertificate;

    impl ResolvesServerCert for NoCertificate {
        fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
            None
        }
    }

    async fn connect_from(source: [u8; 4], to: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((source, 0).into()).unwrap();
        socket.connect(to).await.unwrap()
    }

    #[tokio::test]
    async fn silent_connections_from_many_addresses_leave_slots_to_others() {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(NoCertificate));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = connections(40, usize::MAX);
        let limits = Limits {
            handshakes: 4,
            idle: Duration::from_secs(60),
        };
        let mut server = TlsServer::new(listener, Arc::new(config), connections, limits);
        tokio::spawn(async move {
            loop {
                server.accept().await;
            }
        });
        let mut silent = Vec::new();
        for number in 0..300 {
            silent.push(connect_from([127, 0, 1, number as u8 % 30], address).await);
        }
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        let mut hello = Vec::new();
        rustls::ClientConnection::new(config.into(), "a".try_into().unwrap())
            .unwrap()
            .write_tls(&mut hello)
            .unwrap();
        // New addresses, also while those before them are there.
        let start = Instant::now();
        for number in 0..5 {
            let mut stream = connect_from([127, 0, 2, number], address).await;
            stream.write_all(&hello).await.unwrap();
            stream.read_exact(&mut [0]).await.expect("an alert");
        }
        assert!(
            start.elapsed() < FIRST_BYTE_TIMEOUT,
            "{:?}",
            start.elapsed()
        );
    }
}
