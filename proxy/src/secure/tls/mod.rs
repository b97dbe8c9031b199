//! Mutual TLS between proxies, on the original port of the connection. TLS 1.3 only. The ALPN
//! protocol names the application protocol, which the server accepts if it is HTTP. [`Tls::accept`]
//! and [`Tls::connect`] are the interface.
//!
//! Each worker caches the TLS configurations of the current credentials. New credentials or roots
//! create new configurations with new ticket keys, so sessions of earlier credentials are not
//! resumed. The peer of a resumed session is authenticated again. A failed handshake never falls
//! back to plaintext.

mod handshake;
mod hello;
mod known;
mod origination;
pub mod record;
mod session;
#[cfg(test)]
mod session_tests;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod truncation_tests;
mod turns;
#[cfg(test)]
mod write_tests;

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use diy_mesh_model::identity::Identity;
use rustls::client::{Resumption, UnbufferedClientConnection};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::ServerName;
use rustls::server::{NoServerSessionStorage, UnbufferedServerConnection};
use rustls::{ClientConfig, HandshakeKind, ServerConfig};
use tokio::time::{Instant, timeout};

use crate::error::Failure;
use crate::labels::HandshakeResult;
use crate::limits::lifetime::Lifetimes;
use crate::limits::memory::Charge;
use crate::limits::timeouts::{TimeoutKind, Timeouts};
use crate::observe::metrics::Metrics;
use crate::secure::identity::{
    ClientVerifier, Credentials, CurrentCredentials, ServerVerifier, identity_of,
};
use crate::secure::io::Io;
use diy_mesh_model::exchange::Direction;

use known::KnownPeers;

pub use handshake::{Handshake, Negotiated};
pub use hello::{Hello, inspect, server_name};
pub use origination::parse_roots;
pub use session::{Acceptance, Buffered, Kernel, Session};
pub use turns::Turns;

/// Maximum number of stored sessions for one identity and protocol, keyed by endpoint.
const MAX_SESSIONS: usize = 32;
/// Maximum number of cached client configurations. At the limit, the cache is cleared.
const MAX_CLIENT_CONFIGS: usize = 4096;

/// The application protocol of a mesh TLS session, negotiated by ALPN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Alpn {
    /// HTTP/1.
    Http1,
    /// HTTP/2.
    Http2,
    /// Not HTTP by declaration: the client's proxy inspects no bytes. The server detects the protocol.
    Opaque,
    /// Unknown, or not HTTP according to the first bytes, which the client's proxy inspects before it
    /// sends them. The server inspects the same bytes, and waits for no more of them.
    Inspected,
}

impl Alpn {
    const ALL: [Self; 4] = [Self::Http1, Self::Http2, Self::Opaque, Self::Inspected];

    /// The protocol name on the wire (RFC 7301).
    pub const fn name(self) -> &'static [u8] {
        match self {
            Self::Http1 => b"diy-mesh/http1",
            Self::Http2 => b"diy-mesh/h2",
            Self::Opaque => b"diy-mesh/tcp",
            Self::Inspected => b"diy-mesh/any",
        }
    }

    /// The protocol with this name.
    pub fn from_name(name: &[u8]) -> Option<Self> {
        Self::ALL.into_iter().find(|alpn| alpn.name() == name)
    }
}

/// TLS configurations of a worker.
pub struct Tls {
    credentials: CurrentCredentials,
    lifetimes: Lifetimes,
    timeouts: Timeouts,
    metrics: Arc<Metrics>,
    configs: RefCell<Option<Rc<Configs>>>,
    /// The addresses of other proxies.
    known: RefCell<KnownPeers>,
    turns: Turns,
}

/// TLS configurations of one set of credentials.
struct Configs {
    credentials: Arc<Credentials>,
    server: Arc<ServerConfig>,
    clients: RefCell<HashMap<(Identity, Alpn), Arc<ClientConfig>>>,
}

impl Tls {
    /// Uses the current value of `credentials` for each connection.
    pub fn new(
        credentials: CurrentCredentials,
        lifetimes: Lifetimes,
        timeouts: Timeouts,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            credentials,
            lifetimes,
            timeouts,
            metrics,
            configs: RefCell::new(None),
            known: RefCell::default(),
            turns: Turns::default(),
        }
    }

    /// Whether another proxy at this address has completed a handshake lately.
    pub fn is_known(&self, address: IpAddr) -> bool {
        self.known.borrow().contains(address, Instant::now())
    }

    /// Forgets an address, whose client has not begun a handshake.
    pub fn forget(&self, address: IpAddr) {
        self.known.borrow_mut().remove(address);
    }

    /// The identity of the own workload, while it has a certificate.
    pub fn identity(&self) -> Option<Identity> {
        let credentials = self.credentials.borrow();
        credentials.as_ref().map(|own| own.identity.clone())
    }

    /// The timeouts of the sockets and handshakes of new connections.
    pub fn timeouts(&self) -> &Timeouts {
        &self.timeouts
    }

    /// The turns of the worker's handshakes.
    pub fn turns(&self) -> &Turns {
        &self.turns
    }

    /// Runs the client handshake with an endpoint, whose certificate must have the identity
    /// `expected`. It is charged to `memory`.
    pub async fn connect(
        &self,
        io: Io,
        address: SocketAddr,
        expected: &Identity,
        alpn: Alpn,
        memory: Charge,
    ) -> Result<Io, Failure> {
        let own = self
            .configs()
            .ok_or(Failure::NoCertificate(address))?
            .credentials
            .not_after;
        let (mut io, negotiated) = self.handshake(io, address, expected, alpn, memory).await?;
        let failed = |reason: String| Failure::Handshake { address, reason };
        let (peer, not_after) = authenticate(&negotiated).map_err(failed)?;
        if peer != *expected {
            return Err(failed(format!("peer is {peer}, expected {expected}")));
        }
        self.set_lifetime(&mut io, not_after, own);
        tracing::debug!(%address, %peer, "TLS session: {negotiated}");
        Ok(io)
    }

    async fn handshake(
        &self,
        io: Io,
        address: SocketAddr,
        expected: &Identity,
        alpn: Alpn,
        memory: Charge,
    ) -> Result<(Io, Negotiated), Failure> {
        let configs = self.configs().ok_or(Failure::NoCertificate(address))?;
        let failed = |reason: String| Failure::Handshake { address, reason };
        let config = configs
            .client(expected, alpn)
            .map_err(|error| failed(error.to_string()))?;
        // Not sent: the key of stored sessions.
        let name = ServerName::IpAddress(address.ip().into());
        let connection = UnbufferedClientConnection::new(config, name)
            .map_err(|error| failed(error.to_string()))?;
        let handshake = Handshake::client(connection, memory);
        self.run_handshake(io, handshake, Direction::Outbound)
            .await
            .map_err(|error| overload_or(error, |error| failed(error.to_string())))
    }

    /// Runs the server handshake, which is charged to `memory`. The ClientHello is unread in `io`.
    /// Returns the identity of the peer and the ALPN protocol.
    pub async fn accept(
        &self,
        mut io: Io,
        peer: SocketAddr,
        memory: Charge,
    ) -> Result<(Io, Identity, Alpn), Failure> {
        let configs = self.configs().ok_or(Failure::NoCertificate(peer))?;
        let failed = |reason: String| Failure::Handshake {
            address: peer,
            reason,
        };
        let connection = UnbufferedServerConnection::new(configs.server.clone())
            .map_err(|error| failed(error.to_string()))?;
        let handshake = Handshake::server(connection, std::mem::take(io.unread()), memory);
        let refused = |error: io::Error| match error.kind() {
            io::ErrorKind::InvalidData | io::ErrorKind::TimedOut => failed(error.to_string()),
            // Clients may cancel a connection: no authentication failure.
            _ => Failure::BadRequest("client closed the connection during the TLS handshake"),
        };
        let (mut io, negotiated) = self
            .run_handshake(io, handshake, Direction::Inbound)
            .await
            .map_err(|error| overload_or(error, refused))?;
        let (identity, not_after) = authenticate(&negotiated).map_err(failed)?;
        let alpn = negotiated
            .alpn
            .as_deref()
            .and_then(Alpn::from_name)
            .ok_or_else(|| failed("no ALPN protocol of the mesh".to_owned()))?;
        self.set_lifetime(&mut io, not_after, configs.credentials.not_after);
        self.known.borrow_mut().add(peer.ip(), Instant::now());
        Ok((io, identity, alpn))
    }

    /// Runs a handshake with a timeout. Boxed: its future is large and short-lived, and would
    /// otherwise enlarge the task of the connection for its whole lifetime.
    fn run_handshake(
        &self,
        io: Io,
        handshake: Handshake,
        direction: Direction,
    ) -> Pin<Box<impl Future<Output = io::Result<(Io, Negotiated)>>>> {
        let limit = self.timeouts.tls_handshake;
        let handshake = handshake.in_turn(&self.turns);
        Box::pin(async move {
            let ended = timeout(limit, io.secure(handshake))
                .await
                .unwrap_or_else(|_| {
                    self.metrics.timeout(direction, TimeoutKind::TlsHandshake);
                    Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        format!("TLS handshake not completed within {limit:?}"),
                    ))
                });
            let result = match &ended {
                Ok((_, negotiated)) if negotiated.kind == Some(HandshakeKind::Resumed) => {
                    HandshakeResult::Resumed
                }
                Ok(_) => HandshakeResult::Full,
                Err(error) if is_plaintext(error) => HandshakeResult::Plaintext,
                Err(_) => HandshakeResult::Failed,
            };
            self.metrics.handshake(direction, result);
            ended
        })
    }

    /// Converts the expiry times of both certificates from wall clock to monotonic time.
    fn set_lifetime(&self, io: &mut Io, peer: SystemTime, own: SystemTime) {
        let now = SystemTime::now();
        let remaining = |end: SystemTime| end.duration_since(now).unwrap_or_default();
        io.set_lifetime(self.lifetimes.sample(
            std::time::Instant::now(),
            remaining(peer),
            remaining(own),
        ));
    }

    /// Configurations of the current credentials; `None` without a valid certificate.
    fn configs(&self) -> Option<Rc<Configs>> {
        let current = self.credentials.borrow().clone()?;
        let mut configs = self.configs.borrow_mut();
        if let Some(configs) = configs
            .as_ref()
            .filter(|configs| Arc::ptr_eq(&configs.credentials, &current))
        {
            return Some(configs.clone());
        }
        match Configs::new(current) {
            Ok(new) => Some(configs.insert(Rc::new(new)).clone()),
            Err(error) => {
                tracing::error!("failed to create the TLS configuration: {error}");
                None
            }
        }
    }
}

/// The failure of a handshake: that no memory is left for it, or what `failure` makes of the error.
fn overload_or(error: io::Error, failure: impl FnOnce(io::Error) -> Failure) -> Failure {
    error.downcast::<Failure>().unwrap_or_else(failure)
}

fn is_plaintext(error: &io::Error) -> bool {
    let failure = error.get_ref().and_then(|inner| inner.downcast_ref());
    matches!(failure, Some(Failure::PlaintextAnswer(_)))
}

/// Identity of the peer and expiry of its certificate. Full handshakes have verified the
/// certificate; for resumed sessions, this checks the expiry again.
fn authenticate(negotiated: &Negotiated) -> Result<(Identity, SystemTime), String> {
    let leaf = negotiated
        .certificate
        .as_ref()
        .ok_or("no peer certificate")?;
    let (identity, not_after) = identity_of(leaf).map_err(|error| error.to_string())?;
    if not_after <= SystemTime::now() {
        return Err("peer certificate expired".to_owned());
    }
    Ok((identity, not_after))
}

impl Configs {
    fn new(credentials: Arc<Credentials>) -> Result<Self, rustls::Error> {
        let verifier = ClientVerifier::new(
            credentials.roots.clone(),
            credentials.identity.trust_domain(),
        )
        .map_err(|error| rustls::Error::General(error.to_string()))?;
        let mut server = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(
                credentials.certified.clone(),
            )));
        server.alpn_protocols = Alpn::ALL.map(|alpn| alpn.name().to_vec()).to_vec();
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.ticketer = credentials.tickets()?;
        server.send_tls13_tickets = 1;
        // `session.rs` seals and opens records.
        server.enable_secret_extraction = true;
        Ok(Self {
            server: Arc::new(server),
            clients: RefCell::default(),
            credentials,
        })
    }

    fn client(&self, expected: &Identity, alpn: Alpn) -> Result<Arc<ClientConfig>, rustls::Error> {
        let mut clients = self.clients.borrow_mut();
        let key = (expected.clone(), alpn);
        if let Some(config) = clients.get(&key) {
            return Ok(config.clone());
        }
        let verifier = ServerVerifier::new(self.credentials.roots.clone(), expected.clone());
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(
                self.credentials.certified.clone(),
            )));
        config.alpn_protocols = vec![alpn.name().to_vec()];
        config.enable_sni = false;
        config.enable_secret_extraction = true;
        config.resumption = Resumption::in_memory_sessions(MAX_SESSIONS);
        if clients.len() >= MAX_CLIENT_CONFIGS {
            clients.clear();
        }
        let config = Arc::new(config);
        clients.insert(key, config.clone());
        Ok(config)
    }
}

/// rustls' key exchange groups, X25519MLKEM768 first, and the TLS 1.3 cipher suites, AES-128-GCM
/// first.
fn provider() -> Arc<CryptoProvider> {
    use aws_lc_rs::cipher_suite::{
        TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
    };
    let suites = vec![
        TLS13_AES_128_GCM_SHA256,
        TLS13_AES_256_GCM_SHA384,
        TLS13_CHACHA20_POLY1305_SHA256,
    ];
    Arc::new(CryptoProvider {
        cipher_suites: suites,
        ..aws_lc_rs::default_provider()
    })
}
