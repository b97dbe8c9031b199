//! A TLS server for clients that nobody vouches for: from a listener to connections with a
//! completed handshake, and the time that each may take.
//!
//! A client that sends no ClientHello takes no slot, and is closed when many newer ones have come.
//! With its ClientHello, it takes one of the slots that addresses share. It releases the slot when
//! it has authenticated, or when the connection ends.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use diy_mesh_runtime::listen::Acceptor;
use diy_mesh_runtime::max_open_files;
use diy_mesh_runtime::shares::{Share, Shares};
use rustls::ServerConfig;
use rustls::server::{Accepted, Acceptor as HelloReader};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::StartHandshake;
use tokio_rustls::server::TlsStream;

/// Time for the ClientHello and for a slot.
pub const CLIENT_HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Time from the slot to the first call, the rest of the handshake included.
pub const FIRST_CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Age at which a connection ends if others wait for its slot.
pub const CONTENDED_AGE: Duration = Duration::from_secs(10);
/// Time without a call after which a connection ends if others wait for its slot.
pub const CONTENDED_IDLE_TIMEOUT: Duration = Duration::from_secs(3);
/// The maximum number of connections without a slot.
pub const MAX_WAITING: usize = 8192;
/// A ClientHello has one or two kilobytes.
pub const MAX_CLIENT_HELLO_BYTES: usize = 16 * 1024;
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
const READ_BYTES: u64 = 4096;
/// Open files that are not connections of clients.
const OTHER_FILES: usize = 128;

/// The limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Open connections. The limit of open files may allow fewer.
    pub connections: usize,
    /// Connections that have sent a ClientHello and have not authenticated.
    pub slots: usize,
    /// Time without a call.
    pub idle: Duration,
}

/// Accepts TLS connections.
pub struct TlsServer {
    acceptor: Acceptor,
    config: Arc<ServerConfig>,
    idle: Duration,
    connections: Arc<Semaphore>,
    slots: Arc<Shares<IpAddr>>,
    handshakes: JoinSet<Option<Connection>>,
    /// The newest connections. One that has no slot yet ends when its sender is dropped.
    newest: VecDeque<oneshot::Sender<Infallible>>,
    max_waiting: usize,
}

/// A connection with a completed handshake, and its client.
pub type Connection = (TlsStream<TcpStream>, Arc<Client>);

impl TlsServer {
    /// A server of a bound listener.
    pub fn new(listener: TcpListener, config: Arc<ServerConfig>, limits: Limits) -> Self {
        let files = usize::try_from(max_open_files()).unwrap_or(usize::MAX);
        let connections = files.saturating_sub(OTHER_FILES).max(1);
        let connections = connections.min(limits.connections);
        Self {
            acceptor: Acceptor::new(listener),
            config,
            idle: limits.idle,
            connections: Arc::new(Semaphore::new(connections)),
            slots: Shares::new(limits.slots, limits.slots / 2),
            handshakes: JoinSet::new(),
            newest: VecDeque::new(),
            max_waiting: MAX_WAITING.min(connections / 2),
        }
    }

    /// Returns the next connection that has completed its handshake. Cancel-safe.
    pub async fn accept(&mut self) -> Connection {
        loop {
            tokio::select! {
                (stream, peer) = self.acceptor.accept() => self.start(stream, peer),
                Some(done) = self.handshakes.join_next() => {
                    if let Ok(Some(connection)) = done {
                        return connection;
                    }
                }
            }
        }
    }

    /// Starts the handshake of a connection. At the limit of connections it is closed.
    fn start(&mut self, stream: TcpStream, peer: SocketAddr) {
        let Ok(permit) = self.connections.clone().try_acquire_owned() else {
            return tracing::warn!("connection closed: the limit of connections is reached");
        };
        let (newest, displaced) = oneshot::channel();
        self.newest.push_back(newest);
        if self.newest.len() > self.max_waiting {
            self.newest.pop_front();
        }
        let (config, slots, idle) = (self.config.clone(), self.slots.clone(), self.idle);
        self.handshakes.spawn(async move {
            let client = |slot| Client::new(slots.clone(), slot, permit, idle);
            let slot = slots.acquire(peer.ip().to_canonical());
            handshake(stream, config, displaced, slot, client)
                .await
                .inspect_err(|error| tracing::debug!(%peer, "TLS handshake failed: {error}"))
                .ok()
        });
    }
}

async fn handshake(
    mut stream: TcpStream,
    config: Arc<ServerConfig>,
    displaced: oneshot::Receiver<Infallible>,
    slot: impl Future<Output = Share<IpAddr>>,
    client: impl FnOnce(Share<IpAddr>) -> Arc<Client>,
) -> io::Result<Connection> {
    let start = async {
        let hello = client_hello(&mut stream).await?;
        io::Result::Ok((hello, client(slot.await)))
    };
    let (hello, client) = tokio::select! {
        started = timeout(CLIENT_HELLO_TIMEOUT, start) => started??,
        _ = displaced => return Err(io::Error::other("too many newer connections wait")),
    };
    tokio::select! {
        stream = StartHandshake::from_parts(hello, stream).into_stream(config) => Ok((stream?, client)),
        () = client.expired() => Err(io::ErrorKind::TimedOut.into()),
    }
}

async fn client_hello(stream: &mut TcpStream) -> io::Result<Accepted> {
    let mut reader = HelloReader::default();
    let mut total = 0;
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        let read = stream.take(READ_BYTES).read_buf(&mut bytes).await?;
        total += read;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if total > MAX_CLIENT_HELLO_BYTES {
            return Err(io::Error::other("the ClientHello is too long"));
        }
        reader.read_tls(&mut bytes.as_slice())?;
        match reader.accept() {
            Ok(Some(accepted)) => return Ok(accepted),
            Ok(None) => {}
            Err((error, mut alert)) => {
                bytes.clear();
                alert.write(&mut bytes)?;
                stream.write_all(&bytes).await?;
                return Err(io::Error::other(error));
            }
        }
    }
}

/// The client of one connection.
pub struct Client {
    connected: Instant,
    idle: Duration,
    slots: Arc<Shares<IpAddr>>,
    state: Mutex<ClientState>,
    _permit: OwnedSemaphorePermit,
}

struct ClientState {
    slot: Option<Share<IpAddr>>,
    /// A call has been served.
    is_served: bool,
    /// Open calls.
    calls: usize,
    idle_since: Instant,
}

impl Client {
    fn new(
        slots: Arc<Shares<IpAddr>>,
        slot: Share<IpAddr>,
        permit: OwnedSemaphorePermit,
        idle: Duration,
    ) -> Arc<Self> {
        let now = Instant::now();
        Arc::new(Self {
            connected: now,
            idle,
            slots,
            state: Mutex::new(ClientState {
                slot: Some(slot),
                is_served: false,
                calls: 0,
                idle_since: now,
            }),
            _permit: permit,
        })
    }

    /// Counts a call until the value is dropped: the connection is not idle.
    pub fn call(self: &Arc<Self>) -> OpenCall {
        self.state().calls += 1;
        OpenCall(self.clone())
    }

    /// The client has made its first call.
    pub fn serve(&self) {
        self.state().is_served = true;
    }

    /// The client has authenticated: the connection releases the slot of its address.
    pub fn authenticate(&self) {
        let mut state = self.state();
        state.is_served = true;
        let slot = state.slot.take();
        drop(state);
        drop(slot);
    }

    /// Completes when the connection must end: without a first call in time, idle, or while others
    /// wait for its slot.
    pub async fn expired(&self) {
        loop {
            // Connections without a slot are many.
            let has_slot = self.state().slot.is_some();
            sleep(if has_slot {
                CHECK_INTERVAL
            } else {
                self.idle / 4
            })
            .await;
            if self.is_expired(Instant::now()) {
                return;
            }
        }
    }

    fn is_expired(&self, now: Instant) -> bool {
        let state = self.state();
        let age = now.duration_since(self.connected);
        let idle = match state.calls {
            0 => now.duration_since(state.idle_since),
            _ => Duration::ZERO,
        };
        let is_contended = state.slot.is_some() && self.slots.is_contended();
        (!state.is_served && age >= FIRST_CALL_TIMEOUT)
            || (is_contended && (idle >= CONTENDED_IDLE_TIMEOUT || age >= CONTENDED_AGE))
            || idle >= self.idle
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(slots: &Arc<Shares<IpAddr>>) -> Arc<Client> {
        let slot = slots.try_acquire(IpAddr::from([127, 0, 0, 1])).unwrap();
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        Client::new(slots.clone(), slot, permit, Duration::from_secs(300))
    }

    async fn lifetime(client: &Client) -> u64 {
        client.expired().await;
        client.connected.elapsed().as_secs()
    }

    #[tokio::test(start_paused = true)]
    async fn connection_without_a_served_call_ends() {
        let slots = Shares::new(4, 2);
        let client = client(&slots);
        let _failing = client.call();
        assert_eq!(lifetime(&client).await, FIRST_CALL_TIMEOUT.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn authenticated_connection_keeps_no_slot_and_ends_when_idle() {
        let slots = Shares::new(4, 2);
        let client = client(&slots);
        let call = client.call();
        client.authenticate();
        assert_eq!(slots.in_use(), 0);
        let year = Duration::from_secs(365 * 24 * 3600);
        assert!(
            timeout(year, client.expired()).await.is_err(),
            "a call is open"
        );
        drop(call);
        let ended = lifetime(&client).await - year.as_secs();
        assert!((300..400).contains(&ended), "{ended}");
    }

    #[tokio::test(start_paused = true)]
    async fn connection_with_a_slot_ends_soon_while_others_wait_for_one() {
        for (call, expected) in [(false, CONTENDED_IDLE_TIMEOUT), (true, CONTENDED_AGE)] {
            let slots = Shares::new(1, 0);
            let client = client(&slots);
            client.serve();
            let _call = call.then(|| client.call());
            let other = slots.acquire(IpAddr::from([127, 0, 0, 2]));
            tokio::select! {
                _ = other => panic!("the slot is in use"),
                ended = lifetime(&client) => assert_eq!(ended, expected.as_secs()),
            }
        }
    }
}
