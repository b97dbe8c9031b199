//! What this proxy proves itself by, and whom it trusts: [`Credentials`], held in memory only and replaced as a whole.

#[cfg(test)]
pub(crate) mod testing;
mod verify;

pub use verify::{ClientVerifier, NotThePeer, ServerVerifier, identity_of};

use std::sync::Arc;
use std::time::SystemTime;

use diy_mesh_proto::Identity;
use rustls::RootCertStore;
use rustls::sign::CertifiedKey;
use tokio::sync::watch;

/// A certificate with its key, and the roots that peers are verified by. New connections use the newest, old ones live on.
#[derive(Debug)]
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
}

/// The credentials now and whenever they change; none until the first certificate.
pub type CurrentCredentials = watch::Receiver<Option<Arc<Credentials>>>;

/// No credentials, ever: for a proxy that has no identity. The receiver is closed.
pub fn none() -> CurrentCredentials {
    watch::channel(None).1
}
