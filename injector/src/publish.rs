//! Publication of the certificates: hands them to the TLS server, to readiness and to the metrics.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::sign::CertifiedKey;
use tokio::sync::watch;

use crate::certificate::{self, KeyMaterial};
use crate::health::Health;
use crate::metrics::Metrics;

/// A failure to provide certificates.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Certificates cannot be generated or loaded.
    #[error(transparent)]
    Certificate(#[from] certificate::Error),
    /// The CA file cannot be written.
    #[error("cannot write the CA file {0}: {1}")]
    CaFile(PathBuf, std::io::Error),
    /// The Kubernetes API returned an error.
    #[error("cannot {0}: {1}")]
    Api(String, #[source] Box<kube::Error>),
    /// Another writer changed the object after it was read.
    #[error("cannot {0}: another writer has changed it")]
    Conflict(String),
    /// The Kubernetes API did not respond in time.
    #[error("cannot {0}: the Kubernetes API did not respond within {1} s")]
    Timeout(String, u64),
    /// There is no configuration for the Kubernetes API.
    #[error("cannot connect to the Kubernetes API: {0}")]
    Client(#[source] Box<kube::Error>),
    /// The injector's pod lacks an init container with an image.
    #[error(
        "the injector's pod has no init container {0}, whose image new pods receive: apply the manifests, or set --image-to-deploy-proxy and --image-to-deploy-proxy-init"
    )]
    NoImage(String),
    /// The API server does not support native sidecars.
    #[error(
        "Kubernetes {0} is too old: the mesh uses native sidecars, which require 1.29 or later; upgrade the cluster"
    )]
    UnsupportedVersion(String),
}

/// The sender of certificates to the rest of the process.
#[derive(Debug)]
pub struct Publisher {
    serving: watch::Sender<Option<Arc<CertifiedKey>>>,
    /// The readiness of the injector.
    pub health: Arc<Health>,
    /// The metrics of the injector.
    pub metrics: Arc<Metrics>,
}

impl Publisher {
    /// A publisher without a certificate.
    pub fn new(health: Arc<Health>, metrics: Arc<Metrics>) -> Self {
        let serving = watch::Sender::new(None);
        Self {
            serving,
            health,
            metrics,
        }
    }

    /// The latest serving certificate.
    pub fn subscribe(&self) -> crate::tls::ServingCertificate {
        self.serving.subscribe()
    }

    /// Serves this certificate from the next handshake on.
    pub fn publish(&self, material: &KeyMaterial) -> Result<(), Error> {
        let new = material.serving()?;
        let is_new =
            |old: &Option<Arc<CertifiedKey>>| old.as_ref().is_none_or(|old| old.cert != new.cert);
        if is_new(&self.serving.borrow()) {
            tracing::info!("serving certificate loaded");
            self.serving.send_replace(Some(new));
        }
        self.metrics
            .certificates(material.serving_not_after(), material.ca_not_after());
        Ok(())
    }
}
