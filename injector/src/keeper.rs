//! Where the keepers of certificates (Kubernetes, memory) put what they have: the one place that TLS and readiness learn from.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::sign::CertifiedKey;
use tokio::sync::watch;

use crate::certificate::{self, Material};
use crate::health::Health;
use crate::metrics::Metrics;

/// Why certificates cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// They cannot be made or read.
    #[error(transparent)]
    Certificate(#[from] certificate::Error),
    /// The CA cannot be told to the callers.
    #[error("cannot write the CA to {0}: {1}")]
    CaFile(PathBuf, std::io::Error),
    /// The Kubernetes API said no, or nothing.
    #[error("cannot {0}: {1}")]
    Api(String, #[source] Box<kube::Error>),
    /// The Kubernetes API took too long.
    #[error("cannot {0}: no answer from the Kubernetes API")]
    Silent(String),
    /// There is no Kubernetes API to talk to.
    #[error("no access to the Kubernetes API: {0}")]
    Client(#[source] Box<kube::Error>),
    /// A cluster whose API server is too old for native sidecars.
    #[error("Kubernetes {0} is too old: the mesh needs native sidecars, so 1.29 or newer")]
    TooOld(String),
}

/// The receiving end of certificates.
#[derive(Debug)]
pub struct Keeper {
    serving: watch::Sender<Option<Arc<CertifiedKey>>>,
    /// What probes are told.
    pub health: Arc<Health>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
}

impl Keeper {
    /// Nothing to serve yet.
    pub fn new(health: Arc<Health>, metrics: Arc<Metrics>) -> Self {
        Self {
            serving: watch::Sender::new(None),
            health,
            metrics,
        }
    }

    /// The newest serving certificate, now and in future.
    pub fn serving(&self) -> crate::tls::Serving {
        self.serving.subscribe()
    }

    /// Serves this from the next handshake on.
    pub fn serve(&self, material: &Material) -> Result<(), Error> {
        let new = material.serving()?;
        let changed = self.serving.send_if_modified(|serving| {
            let changed = serving
                .as_ref()
                .is_none_or(|serving| serving.cert != new.cert);
            if changed {
                *serving = Some(new);
            }
            changed
        });
        if changed {
            tracing::info!("serving certificate loaded");
        }
        self.metrics
            .certificates(material.serving_ends(), material.ca_ends());
        Ok(())
    }
}
