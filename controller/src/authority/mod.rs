//! The certificate authority of the mesh: the current issuer and the trust roots, as one watched
//! value.
//!
//! It lies in a [`store`] that all replicas share. [`material`] says what the store's fields mean,
//! [`rotation`] (pure) how one CA replaces another, [`reports`] which conditions the replicas
//! report for it. `keeper` is the task that combines them, [`publish`] distributes the roots to
//! pods, [`status`] reports the state.

mod disjoint_roots;
mod keeper;
pub mod material;
pub mod publish;
pub mod reports;
pub mod rotation;
pub mod status;
pub mod store;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aws_lc_rs::{digest, rand};
use futures::FutureExt;
use futures::future::BoxFuture;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::sync::watch;

use crate::hub::Hub;
use crate::issuer::{self, Issuer, SignError, hex, pem};
use diy_mesh_proto::status::Status;
use keeper::Keeper;
use publish::{Published, Task};
use reports::ConnectedProxies;
use rotation::Rules;
use status::StatusSender;
use store::Store;

/// The common name of every CA that the controller makes: by it, it tells its own from an
/// operator's.
pub const NAME: &str = "diy-service-mesh CA";
/// Files in pods follow their ConfigMap this late, at most: the kubelet looks once a minute, and
/// what it knows may be as old.
const KUBELET_SYNC_DELAY: Duration = Duration::from_secs(120);

/// The issuer and the trust roots. They change together.
#[derive(Debug)]
pub struct Trust {
    /// The issuer of certificates.
    pub issuer: Arc<Issuer>,
    /// The roots of all proxies.
    pub roots: Arc<Roots>,
    /// Within what time proxies whose certificate another issuer signed shall renew it, each at a
    /// moment of its own choice.
    pub renew_within: Duration,
}

/// A set of trust roots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// All of them.
    pub pem: String,
    /// Equal for equal sets, on each replica: the first half of the SHA-256 over the sorted
    /// certificates, hexadecimal.
    pub version: String,
    /// All of them, sorted, none twice.
    pub certificates: Vec<CertificateDer<'static>>,
}

impl Roots {
    /// The set of these certificates.
    pub fn new(certificates: impl IntoIterator<Item = CertificateDer<'static>>) -> Roots {
        let mut certificates: Vec<_> = certificates.into_iter().collect();
        certificates.sort_by(|one, other| one.as_ref().cmp(other.as_ref()));
        certificates.dedup();
        let mut hash = digest::Context::new(&digest::SHA256);
        certificates
            .iter()
            .for_each(|certificate| hash.update(certificate));
        let version = hex(&hash.finish().as_ref()[..16]);
        Roots {
            pem: certificates
                .iter()
                .map(|certificate| pem(certificate))
                .collect(),
            version,
            certificates,
        }
    }

    /// The set of the certificates in a text.
    pub fn from_pem(text: &str) -> Result<Roots, rustls::pki_types::pem::Error> {
        let certificates: Vec<_> =
            CertificateDer::pem_slice_iter(text.as_bytes()).collect::<Result<_, _>>()?;
        Ok(Roots::new(certificates))
    }
}

/// Publishes the current trust.
pub type TrustSender = watch::Sender<Arc<Trust>>;
/// The current trust and its changes.
pub type TrustReceiver = watch::Receiver<Arc<Trust>>;

/// Generates the controller's own root: its certificate and its key, as PEM.
pub fn self_signed(
    trust_domain: &str,
    now: SystemTime,
    life: Duration,
) -> Result<(String, String), SignError> {
    issuer::self_signed(trust_domain, NAME, now, life)
}

/// What the authority is told.
pub struct Options {
    /// The controller's trust domain.
    pub trust_domain: String,
    /// How long leaves live.
    pub certificate_life: Duration,
    /// How long a CA that it makes lives.
    pub ca_life: Duration,
    /// Where the CA lies.
    pub provider: Provider,
}

/// Where the CA lies, and where the roots are published.
#[derive(Clone)]
pub enum Provider {
    /// In a Secret, and a ConfigMap in each namespace with meshed pods.
    Kubernetes {
        /// The cluster.
        client: kube::Client,
        /// The mesh's own namespace.
        namespace: String,
    },
    /// In a folder, both.
    Files(PathBuf),
}

/// The state of the authority for the other modules.
#[derive(Clone)]
pub struct AuthorityHandle {
    trust: watch::Receiver<Option<TrustSender>>,
    status: watch::Receiver<Status>,
}

impl AuthorityHandle {
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

    /// How it stands.
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// Why nothing can be signed, where that is so.
    pub fn unavailable(&self) -> Option<String> {
        let waits = || "the CA was not read yet".to_owned();
        self.trust
            .borrow()
            .is_none()
            .then(|| self.status.borrow().problem.clone().unwrap_or_else(waits))
    }
}

/// Prepares the authority. The returned future maintains it and never completes.
pub fn keep(
    options: Options,
    hub: &Hub,
    proxies: ConnectedProxies,
) -> (AuthorityHandle, BoxFuture<'static, ()>) {
    match options.provider.clone() {
        Provider::Kubernetes { client, namespace } => {
            let settle = KUBELET_SYNC_DELAY.min(options.certificate_life / 10);
            let store = store::kubernetes::Kubernetes::new(client.clone(), &namespace);
            keep_in(store, settle, options, hub, proxies, |task| {
                publish::kubernetes(client, namespace, task)
            })
        }
        Provider::Files(folder) => {
            let store = store::files::Files::new(folder.clone());
            keep_in(store, Duration::ZERO, options, hub, proxies, |task| {
                publish::file(folder, task)
            })
        }
    }
}

fn keep_in<P: Future<Output = ()> + Send>(
    store: impl Store,
    settle: Duration,
    options: Options,
    hub: &Hub,
    proxies: ConnectedProxies,
    publish: impl FnOnce(Task) -> P + Send + 'static,
) -> (AuthorityHandle, BoxFuture<'static, ()>) {
    let Options {
        trust_domain,
        certificate_life: leaf_life,
        ca_life,
        ..
    } = options;
    let (first, (published, seen)) = (
        watch::Sender::default(),
        watch::channel(Published::default()),
    );
    let name = replica_name();
    let status = StatusSender::new(&store.place(), &name);
    let kept = AuthorityHandle {
        trust: first.subscribe(),
        status: status.sender.subscribe(),
    };
    let keeper = Keeper {
        store: Arc::new(store),
        rules: Rules {
            trust_domain,
            ca_life,
            leaf_life,
            settle,
        },
        name,
        hub: hub.clone(),
        proxies,
        published: seen,
        first,
        status,
    };
    let (there, namespaces) = (kept.clone(), hub.meshed_namespaces());
    let publishing = async move {
        if let Some(trust) = there.loaded().await {
            publish(Task {
                trust: trust.subscribe(),
                namespaces,
                published,
            })
            .await;
        }
    };
    let both = async move {
        tokio::join!(keeper.run(), publishing);
    };
    (kept, both.boxed())
}

/// The machine's name, which in a cluster is the pod's, and something of its own: two replicas may
/// share a machine.
fn replica_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
    let mut own = [0; 3];
    // Without randomness the name alone has to do.
    let _ = rand::fill(&mut own);
    format!(
        "{}-{}",
        host.trim()
            .chars()
            .filter(plain)
            .take(200)
            .collect::<String>(),
        hex(&own)
    )
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
