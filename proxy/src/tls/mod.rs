//! Mesh TLS: both sides prove who they are, on the connection's original port. TLS 1.3 only; its ALPN names what is inside,
//! which counts at the far side where it is HTTP. [`Tls::accept`] and [`Tls::connect`] are all that the paths see.
//!
//! A worker keeps the configurations that belong to the credentials of the moment. New credentials, or new roots, make new
//! ones, with new tickets: no session outlives the certificates under which it was made. What a resumed session says of the peer
//! is judged anew. There is no way from a failed handshake to plaintext.

mod handshake;
mod hello;
pub mod record;
mod session;
#[cfg(test)]
mod session_tests;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use diy_mesh_proto::Identity;
use rustls::client::{Resumption, UnbufferedClientConnection};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::ServerName;
use rustls::server::{NoServerSessionStorage, UnbufferedServerConnection};
use rustls::{ClientConfig, ServerConfig};
use tokio::time::timeout;

use crate::error::Failure;
use crate::identity::{
    ClientVerifier, Credentials, CurrentCredentials, ServerVerifier, identity_of,
};
use crate::io::Io;
use crate::lifetime::Lifetimes;

pub use handshake::{Handshake, Negotiated};
pub use hello::{Hello, inspect};
pub use session::{Kernel, Leftover, Session};

/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Sessions to resume that are kept for one identity and protocol: by endpoint.
const SESSIONS: usize = 32;
/// Configurations that are kept; with more, all are made anew.
const MOST_CONFIGURATIONS: usize = 4096;

/// The application protocol of a mesh TLS session, negotiated by ALPN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Alpn {
    /// HTTP/1.
    Http1,
    /// HTTP/2.
    Http2,
    /// Not HTTP according to the client. The server detects the protocol, as for [`Self::Detect`].
    Opaque,
    /// Unknown to the client, which has sent no bytes yet. The server detects the protocol.
    Detect,
}

impl Alpn {
    const ALL: [Self; 4] = [Self::Http1, Self::Http2, Self::Opaque, Self::Detect];

    /// The protocol name on the wire (RFC 7301).
    pub const fn name(self) -> &'static [u8] {
        match self {
            Self::Http1 => b"diy-mesh/http1",
            Self::Http2 => b"diy-mesh/h2",
            Self::Opaque => b"diy-mesh/tcp",
            Self::Detect => b"diy-mesh/any",
        }
    }

    /// The protocol with this name.
    pub fn from_name(name: &[u8]) -> Option<Self> {
        Self::ALL.into_iter().find(|alpn| alpn.name() == name)
    }
}

/// A worker's side of every session.
pub struct Tls {
    credentials: CurrentCredentials,
    lifetimes: Lifetimes,
    keys: RefCell<Option<Rc<Keys>>>,
}

/// What belongs to one set of credentials.
struct Keys {
    credentials: Arc<Credentials>,
    server: Arc<ServerConfig>,
    clients: RefCell<HashMap<(Identity, Alpn), Arc<ClientConfig>>>,
}

impl Tls {
    /// Proves itself by the newest of these credentials.
    pub fn new(credentials: CurrentCredentials, lifetimes: Lifetimes) -> Self {
        Self {
            credentials,
            lifetimes,
            keys: RefCell::new(None),
        }
    }

    /// Makes a connection to an endpoint a session with a workload that proves to be `expected`.
    pub async fn connect(
        &self,
        io: Io,
        address: SocketAddr,
        expected: &Identity,
        alpn: Alpn,
    ) -> Result<Io, Failure> {
        let own = self
            .keys()
            .ok_or(Failure::NoCertificate(address))?
            .credentials
            .not_after;
        let (mut io, negotiated) = self.begin(io, address, expected, alpn).await?;
        let failed = |reason: String| Failure::Handshake { address, reason };
        let (peer, not_after) = judge(&negotiated).map_err(failed)?;
        if peer != *expected {
            return Err(failed(format!(
                "it is {peer}, and discovery named {expected}"
            )));
        }
        self.set_lifetime(&mut io, not_after, own);
        tracing::trace!(%address, %peer, "a session: {negotiated}");
        Ok(io)
    }

    async fn begin(
        &self,
        io: Io,
        address: SocketAddr,
        expected: &Identity,
        alpn: Alpn,
    ) -> Result<(Io, Negotiated), Failure> {
        let keys = self.keys().ok_or(Failure::NoCertificate(address))?;
        let failed = |reason: String| Failure::Handshake { address, reason };
        let config = keys
            .client(expected, alpn)
            .map_err(|error| failed(error.to_string()))?;
        // Never sent: it tells the endpoint's sessions from others.
        let name = ServerName::IpAddress(address.ip().into());
        let connection = UnbufferedClientConnection::new(config, name)
            .map_err(|error| failed(error.to_string()))?;
        secure(io, Handshake::client(connection))
            .await
            .map_err(|error| failed(error.to_string()))
    }

    /// Takes up a session that a peer begins: the ClientHello is unread in `io`. Who the peer is, and what is inside.
    pub async fn accept(
        &self,
        mut io: Io,
        peer: SocketAddr,
    ) -> Result<(Io, Identity, Alpn), Failure> {
        let keys = self.keys().ok_or(Failure::NoCertificate(peer))?;
        let failed = |reason: String| Failure::Handshake {
            address: peer,
            reason,
        };
        let connection = UnbufferedServerConnection::new(keys.server.clone())
            .map_err(|error| failed(error.to_string()))?;
        let handshake = Handshake::server(connection, std::mem::take(io.unread()));
        let (mut io, negotiated) =
            secure(io, handshake)
                .await
                .map_err(|error| match error.kind() {
                    io::ErrorKind::InvalidData | io::ErrorKind::TimedOut => {
                        failed(error.to_string())
                    }
                    // It may have found another way meanwhile: that says nothing of who it is.
                    _ => Failure::BadRequest("the client left in the middle of the TLS handshake"),
                })?;
        let (identity, not_after) = judge(&negotiated).map_err(failed)?;
        let alpn = negotiated
            .alpn
            .as_deref()
            .and_then(Alpn::from_name)
            .ok_or_else(|| failed("the session has no ALPN protocol of the mesh".to_owned()))?;
        self.set_lifetime(&mut io, not_after, keys.credentials.not_after);
        Ok((io, identity, alpn))
    }

    /// Certificates have the time of day; a connection goes by the time that has passed since its handshake.
    fn set_lifetime(&self, io: &mut Io, peer: SystemTime, own: SystemTime) {
        let now = SystemTime::now();
        let left = |end: SystemTime| end.duration_since(now).unwrap_or_default();
        io.set_lifetime(self.lifetimes.draw(Instant::now(), left(peer), left(own)));
    }

    /// The newest; none where there is no valid certificate.
    fn keys(&self) -> Option<Rc<Keys>> {
        let current = self.credentials.borrow().clone()?;
        let mut keys = self.keys.borrow_mut();
        if let Some(keys) = keys
            .as_ref()
            .filter(|keys| Arc::ptr_eq(&keys.credentials, &current))
        {
            return Some(keys.clone());
        }
        match Keys::new(current) {
            Ok(new) => Some(keys.insert(Rc::new(new)).clone()),
            Err(error) => {
                tracing::error!("the certificate can't be used: {error}");
                None
            }
        }
    }
}

/// In a box of its own: a handshake is large and soon over, and a connection's task has room, all its life, for whatever it may
/// wait for.
fn secure(
    io: Io,
    handshake: Handshake,
) -> Pin<Box<impl Future<Output = io::Result<(Io, Negotiated)>>>> {
    Box::pin(async {
        let late = |_| {
            io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no TLS handshake within {HANDSHAKE_TIMEOUT:?}"),
            )
        };
        timeout(HANDSHAKE_TIMEOUT, io.secure(handshake))
            .await
            .unwrap_or_else(|elapsed| Err(late(elapsed)))
    })
}

/// Who the peer is, and until when its certificate says so. The handshake has verified a new certificate; of a resumed session this is the verification.
fn judge(negotiated: &Negotiated) -> Result<(Identity, SystemTime), String> {
    let leaf = negotiated
        .certificate
        .as_ref()
        .ok_or("it showed no certificate")?;
    let (identity, not_after) = identity_of(leaf).map_err(|error| error.to_string())?;
    if not_after <= SystemTime::now() {
        return Err("its certificate has expired".to_owned());
    }
    Ok((identity, not_after))
}

impl Keys {
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
        // Records are sealed and opened by `session.rs`.
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
        config.resumption = Resumption::in_memory_sessions(SESSIONS);
        if clients.len() >= MOST_CONFIGURATIONS {
            clients.clear();
        }
        let config = Arc::new(config);
        clients.insert(key, config.clone());
        Ok(config)
    }
}

/// X25519MLKEM768 first, which the library prefers. AES-128 in GCM first: both sides have AES in hardware, or are no slower.
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
