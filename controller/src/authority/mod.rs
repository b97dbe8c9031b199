//! The certificate authority of the mesh: the issuer and the trust roots as one watched value.
//!
//! All replicas share its state in a [`store`]. [`state`] and [`ca`] define and check the state,
//! [`rotation`] decides on the next step (pure), according to the
//! [`reports`](crate::replicas::reports) of the replicas. `reconcile` connects these, [`publish`]
//! distributes the roots to pods, [`status`] reports.

pub mod ca;
pub mod events;
pub mod publish;
mod reconcile;
pub mod rotation;
pub mod state;
pub mod status;
pub mod store;
#[cfg(test)]
mod testing;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aws_lc_rs::{digest, rand};
use diy_mesh_control_plane::clock::Clock;
use futures::FutureExt;
use futures::future::BoxFuture;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::issuer::{self, Issuer, SignError, hex, pem};
use crate::proxies::Proxies;
use crate::publish::Hub;
use publish::{Publication, PublishStatus, config_maps};
use reconcile::Reconciler;
use rotation::RotationPolicy;
use status::{Status, StatusSender};
use store::Store;
use store::files::Files;
use store::kubernetes::Kubernetes;

/// The common name of generated CAs, which distinguishes them from the CAs of operators.
pub const NAME: &str = "diy-service-mesh CA";
/// Time from a change of a ConfigMap until mounted files contain it: the kubelet syncs once a
/// minute, from a cache that may be as old.
const KUBELET_SYNC_DELAY: Duration = Duration::from_secs(120);

/// The issuer and the trust roots. They change together.
#[derive(Debug)]
pub struct Trust {
    /// The issuer of certificates.
    pub issuer: Arc<Issuer>,
    /// The roots of all proxies.
    pub roots: Arc<Roots>,
    /// The time within which proxies with a certificate of another issuer renew it, each at a
    /// random time. Zero after a forced rotation: proxies must not trust former roots any longer.
    pub renew_within: Duration,
}

/// A set of trust roots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// The certificates as PEM.
    pub pem: String,
    /// Equal for equal sets: the first half of the SHA-256 of the sorted certificates, hexadecimal.
    pub version: String,
    /// The certificates, sorted and without duplicates.
    pub certificates: Vec<CertificateDer<'static>>,
}

impl Roots {
    /// The set of these certificates.
    pub fn new(certificates: impl IntoIterator<Item = CertificateDer<'static>>) -> Roots {
        let mut certificates: Vec<_> = certificates.into_iter().collect();
        certificates.sort_by(|one, other| one.as_ref().cmp(other.as_ref()));
        certificates.dedup();
        let mut hash = digest::Context::new(&digest::SHA256);
        certificates.iter().for_each(|root| hash.update(root));
        Roots {
            pem: certificates.iter().map(|root| pem(root)).collect(),
            version: hex(&hash.finish().as_ref()[..16]),
            certificates,
        }
    }

    /// The set of the certificates in a PEM text.
    pub fn from_pem(text: &str) -> Result<Roots, rustls::pki_types::pem::Error> {
        let certificates = CertificateDer::pem_slice_iter(text.as_bytes());
        Ok(Roots::new(certificates.collect::<Result<Vec<_>, _>>()?))
    }
}

/// Publishes the current trust.
pub type TrustSender = watch::Sender<Arc<Trust>>;
/// The current trust and its changes.
pub type TrustReceiver = watch::Receiver<Arc<Trust>>;

/// Generates a root CA: its certificate and its key, as PEM.
pub fn self_signed(
    trust_domain: &str,
    now: SystemTime,
    lifetime: Duration,
) -> Result<(String, String), SignError> {
    issuer::self_signed(trust_domain, NAME, now, lifetime)
}

/// The options of the authority.
pub struct Options {
    /// The trust domain of the mesh.
    pub trust_domain: String,
    /// The validity of leaves.
    pub certificate_life: Duration,
    /// The validity of generated CAs.
    pub ca_life: Duration,
    /// The storage of the state.
    pub storage: Storage,
    /// The clock of this replica, which the authority compares with others.
    pub clock: Clock,
    /// Cancelled a few seconds before the replica stops.
    pub stopping: CancellationToken,
}

/// The storage of the state and of the published roots.
#[derive(Clone)]
pub enum Storage {
    /// A Secret, and a ConfigMap in each namespace with meshed pods.
    Kubernetes {
        /// The client of the cluster.
        client: kube::Client,
        /// The namespace of the mesh.
        namespace: String,
    },
    /// A folder.
    Files(PathBuf),
}

/// The authority for the other modules.
#[derive(Clone)]
pub struct AuthorityHandle {
    clock: Clock,
    trust: watch::Receiver<Option<TrustSender>>,
    status: watch::Receiver<Status>,
    published: watch::Receiver<PublishStatus>,
}

impl AuthorityHandle {
    /// The trusted time, from the first loaded CA on.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Waits for a usable CA. `None`: the authority has ended.
    pub async fn loaded(&self) -> Option<TrustSender> {
        let mut trust = self.trust.clone();
        let loaded = trust.wait_for(Option::is_some).await;
        loaded.ok().and_then(|trust| trust.clone())
    }

    /// The current trust, if a CA is loaded.
    pub fn trust(&self) -> Option<Arc<Trust>> {
        let trust = self.trust.borrow();
        trust.as_ref().map(|trust| trust.borrow().clone())
    }

    /// The status of this replica.
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// The status of this replica, and its changes.
    pub fn watch_status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// The places without the current roots, and their changes.
    pub fn watch_published(&self) -> watch::Receiver<PublishStatus> {
        self.published.clone()
    }

    /// The reason why no certificate can be signed, if that is the case.
    pub fn unavailable(&self) -> Option<String> {
        let reason = || {
            let problem = self.status.borrow().problem.clone();
            problem.unwrap_or_else(|| "the CA is not loaded yet".to_owned())
        };
        self.trust.borrow().is_none().then(reason)
    }
}

/// Creates the authority. The returned future runs it and never completes.
pub fn start(
    options: Options,
    hub: &Hub,
    proxies: Proxies,
) -> (AuthorityHandle, BoxFuture<'static, ()>) {
    match options.storage.clone() {
        Storage::Kubernetes { client, namespace } => {
            let settle = KUBELET_SYNC_DELAY.min(options.certificate_life / 10);
            let store = Kubernetes::new(client.clone(), &namespace);
            start_with(store, settle, options, hub, proxies, |publication| {
                config_maps::run(client, namespace, publication)
            })
        }
        Storage::Files(folder) => {
            let store = Files::new(folder.clone());
            start_with(
                store,
                Duration::ZERO,
                options,
                hub,
                proxies,
                |publication| publish::file(folder, publication),
            )
        }
    }
}

fn start_with<P: Future<Output = ()> + Send>(
    store: impl Store,
    settle: Duration,
    options: Options,
    hub: &Hub,
    proxies: Proxies,
    publish: impl FnOnce(Publication) -> P + Send + 'static,
) -> (AuthorityHandle, BoxFuture<'static, ()>) {
    let (trust, replica) = (watch::Sender::default(), replica_name());
    let (published_sender, published) = watch::channel(PublishStatus::default());
    let status = StatusSender::new(&store.place(), &replica);
    let handle = AuthorityHandle {
        clock: options.clock.clone(),
        trust: trust.subscribe(),
        status: status.sender.subscribe(),
        published: published.clone(),
    };
    let reconciler = Reconciler {
        store: Arc::new(store),
        policy: RotationPolicy {
            trust_domain: options.trust_domain,
            ca_life: options.ca_life,
            leaf_life: options.certificate_life,
            settle,
        },
        replica,
        clock: options.clock,
        hub: hub.clone(),
        proxies,
        published,
        stopping: options.stopping,
        trust,
        status,
    };
    let (loaded, namespaces) = (handle.clone(), hub.meshed_namespaces());
    let publish = async move {
        if let Some(trust) = loaded.loaded().await {
            let publication = Publication {
                trust: trust.subscribe(),
                namespaces,
                status: published_sender,
            };
            publish(publication).await;
        }
    };
    let run = async move {
        tokio::join!(reconciler.run(), publish);
    };
    (handle, run.boxed())
}

/// The host name, which is the pod's name in a cluster, with a random suffix: replicas may share a
/// host.
fn replica_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
    let host: String = host.trim().chars().filter(is_plain).take(200).collect();
    let mut suffix = [0; 3];
    // Without randomness, the host name must do.
    let _ = rand::fill(&mut suffix);
    format!("{host}-{}", hex(&suffix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_depends_on_the_set_of_roots_only() {
        let now = SystemTime::now();
        let new = || {
            self_signed("cluster.local", now, Duration::from_secs(3600))
                .unwrap()
                .0
        };
        let (one, other) = (new(), new());
        let roots = |text: &str| Roots::from_pem(text).unwrap();
        let both = roots(&(one.clone() + &other));
        assert_eq!(both, roots(&format!("{other}{one}{other}")));
        assert_eq!(both.version.len(), 32);
        assert_ne!(both.version, roots(&one).version);
        assert_eq!(roots(&both.pem), both);
        assert!(Roots::from_pem("-----BEGIN CERTIFICATE-----\nx").is_err());
    }
}
