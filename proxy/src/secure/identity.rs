//! Workload identity: [`Credentials`], held in memory only and replaced as a whole. One task on the
//! main thread renews them ([`start`]). New connections use the newest credentials; open
//! connections keep theirs.

mod leaf;
mod renewal;
mod request;
mod roots;
mod schedule;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod verify;

use std::fmt;
use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use diy_mesh_model::identity::Identity;
use diy_mesh_proto::mesh::v1::ProxyStatus;
use rustls::RootCertStore;
use rustls::crypto::aws_lc_rs::Ticketer;
use rustls::server::ProducesTickets;
use rustls::sign::CertifiedKey;
use tokio::sync::watch;

use crate::observe::metrics::IdentityMetrics;
use crate::secure::control::Control;
pub use leaf::Leaf;
pub use roots::{Roots, RootsError, Trust, parse_roots};
pub use verify::{ClientVerifier, PeerError, ServerVerifier, identity_of};

/// Certificate, private key, and the roots that verify peers.
pub struct Credentials {
    /// Identity of this workload.
    pub identity: Identity,
    /// Certificate chain, leaf first, and private key.
    pub certified: Arc<CertifiedKey>,
    /// Trust roots that verify peers.
    pub roots: Arc<RootCertStore>,
    /// Version of the roots, assigned by the controller.
    pub roots_version: String,
    /// Expiry of the certificate.
    pub not_after: SystemTime,
    /// Encrypts session tickets; created with the first ticket.
    pub tickets: OnceLock<Arc<dyn ProducesTickets>>,
}

/// Omits the private key.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            identity,
            roots_version,
            not_after,
            ..
        } = self;
        write!(
            f,
            "Credentials({identity}, roots {roots_version}, until {not_after:?})"
        )
    }
}

/// Receiver of the current credentials; `None` before the first certificate and after expiry of the
/// last one.
pub type CurrentCredentials = watch::Receiver<Option<Arc<Credentials>>>;

/// A closed receiver without credentials, for a proxy without an identity.
pub fn none() -> CurrentCredentials {
    watch::channel(None).1
}

/// Returns the credentials and the task that the main thread runs to renew them. `trust` provides
/// newer roots.
pub fn start(
    control: Control,
    trust_domain: String,
    trust: Trust,
    metrics: IdentityMetrics,
) -> (CurrentCredentials, impl Future<Output = ()> + Send) {
    let renewal = renewal::Renewal::new(control, trust_domain, trust, metrics);
    (renewal.credentials(), renewal.run())
}

impl Credentials {
    fn new(
        identity: Identity,
        certified: Arc<CertifiedKey>,
        roots: &Roots,
        not_after: SystemTime,
    ) -> Self {
        Self {
            identity,
            certified,
            roots: roots.trusted.clone(),
            roots_version: roots.version.clone(),
            not_after,
            tickets: OnceLock::new(),
        }
    }

    /// Encrypts and decrypts session tickets for all workers. Tickets of other credentials do not
    /// decrypt.
    pub fn tickets(&self) -> Result<Arc<dyn ProducesTickets>, rustls::Error> {
        match self.tickets.get() {
            Some(tickets) => Ok(tickets.clone()),
            None => {
                let new = Ticketer::new()?;
                Ok(self.tickets.get_or_init(|| new).clone())
            }
        }
    }

    /// Status reported to the controller.
    pub fn status(&self) -> ProxyStatus {
        let leaf = self
            .certified
            .cert
            .first()
            .and_then(|leaf| Leaf::parse(leaf).ok());
        let (not_before, serial, issuer) = leaf
            .map(|leaf| (leaf.not_before, leaf.serial, leaf.issuer))
            .unwrap_or((UNIX_EPOCH, String::new(), String::new()));
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        ProxyStatus {
            roots_version: self.roots_version.clone(),
            certificate_not_before: seconds(not_before),
            certificate_not_after: seconds(self.not_after),
            certificate_serial: serial,
            certificate_issuer: issuer,
            proxy_version: env!("CARGO_PKG_VERSION").to_owned(),
            clock: i64::try_from(now.as_millis()).unwrap_or(i64::MAX),
        }
    }
}

fn seconds(time: SystemTime) -> i64 {
    i64::try_from(
        time.duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs(),
    )
    .unwrap_or(i64::MAX)
}
