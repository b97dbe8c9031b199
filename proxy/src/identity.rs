//! What this proxy proves itself by, and whom it trusts: [`Credentials`], held in memory only and replaced as a whole. One task on
//! the main thread keeps them ([`start`]); connections take the newest, and those that are open live on.

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

use diy_mesh_proto::Identity;
use diy_mesh_proto::mesh::v1::ProxyStatus;
use rustls::RootCertStore;
use rustls::crypto::aws_lc_rs::Ticketer;
use rustls::server::ProducesTickets;
use rustls::sign::CertifiedKey;
use tokio::sync::watch;

use crate::control::Control;
use crate::metrics::IdentityMetrics;
pub use leaf::Leaf;
pub use roots::{BadRoots, Roots, Trust, store};
pub use verify::{ClientVerifier, NotThePeer, ServerVerifier, identity_of};

/// A certificate with its key, and the roots that peers are verified by. New connections use the newest, old ones live on.
pub struct Credentials {
    /// Who this workload is.
    pub identity: Identity,
    /// The leaf, its intermediates, and the key.
    pub certified: Arc<CertifiedKey>,
    /// Who may vouch for peers.
    pub roots: Arc<RootCertStore>,
    /// The roots' version, as the controller names it.
    pub roots_version: String,
    /// When the certificate ends.
    pub not_after: SystemTime,
    /// What tickets are sealed with, from the first one on.
    pub tickets: OnceLock<Arc<dyn ProducesTickets>>,
}

/// Without the key, whatever its own Debug may say.
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

/// The credentials now and whenever they change; none before the first certificate, and none once the last one has ended.
pub type CurrentCredentials = watch::Receiver<Option<Arc<Credentials>>>;

/// No credentials, ever: for a proxy that has no identity. The receiver is closed.
pub fn none() -> CurrentCredentials {
    watch::channel(None).1
}

/// The credentials, and the task that the main thread must run to have and keep them. `trust` is where newer roots appear.
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
    /// Seals and opens the tickets of sessions under these credentials, on whichever worker. Other credentials open none of them.
    pub fn tickets(&self) -> Result<Arc<dyn ProducesTickets>, rustls::Error> {
        match self.tickets.get() {
            Some(tickets) => Ok(tickets.clone()),
            None => {
                let new = Ticketer::new()?;
                Ok(self.tickets.get_or_init(|| new).clone())
            }
        }
    }

    /// What the controller is told of them.
    pub fn status(&self) -> ProxyStatus {
        let leaf = self
            .certified
            .cert
            .first()
            .and_then(|leaf| Leaf::read(leaf).ok());
        let (not_before, serial, issuer) =
            leaf.map_or((UNIX_EPOCH, String::new(), String::new()), |leaf| {
                let Leaf {
                    not_before,
                    serial,
                    issuer,
                    ..
                } = leaf;
                (not_before, serial, issuer)
            });
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
