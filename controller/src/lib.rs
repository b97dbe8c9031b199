//! The controller: discovery and certificates for proxies, over gRPC.
//!
//! The path of a change, in the order of the modules: [`catalog`] (Kubernetes, or files) sends it,
//! [`index`] (pure) determines what it affects, [`hub`] notifies subscribers, [`grpc`] sends
//! responses at the pace of each client. [`authenticate`] precedes every call. The controller
//! stores only its certificate authority; all replicas respond alike.
//!
//! The path of a certificate: [`serving`] (TLS), [`grpc`] authenticates the pod, [`issuer`] (pure)
//! signs with the current CA of [`authority`]. [`proxies`] lists the connected proxies and their
//! roots.

pub mod admin;
pub mod authenticate;
pub mod authority;
pub mod catalog;
pub mod config;
pub mod file;
pub mod grpc;
pub mod hub;
pub mod index;
pub mod metrics;
pub mod proxies;
pub mod serving;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_runtime::{Readiness, listen};
use futures::future::BoxFuture;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use authenticate::{Authenticator, Jwks, TokenReviews, Verifier};
use authority::AuthorityHandle;
pub use config::Config;
pub use diy_mesh_issuer as issuer;
use hub::Hub;
use metrics::Metrics;
use proxies::Proxies;
use serving::{Names, Serving};

/// Changes that wait for the index; a provider pauses when there are more.
const MAX_QUEUED_CHANGES: usize = 1024;

/// Why the controller does not start, or ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A port cannot be listened on.
    #[error("cannot listen on {address} ({setting}): {source}")]
    Bind {
        /// The setting that names it.
        setting: &'static str,
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// There is no cluster to talk to.
    #[error(
        "no way to the Kubernetes API (a ServiceAccount in a pod, or KUBECONFIG, or ~/.kube/config): {0}"
    )]
    Kubernetes(#[from] kube::Error),
    /// The issuer's keys cannot be used.
    #[error("the authenticator: {0}")]
    Jwks(#[from] authenticate::jwks::JwksError),
    /// The trust domain and the namespace do not make an identity.
    #[error("the controller's own identity: {0}")]
    Identity(#[from] diy_mesh_proto::identity::InvalidIdentity),
    /// The controller has no certificate of its own.
    #[error("the controller's own certificate: {0}")]
    Certificate(#[from] issuer::SignError),
    /// The gRPC server gave up.
    #[error("the gRPC server ended: {0}")]
    Grpc(#[from] tonic::transport::Error),
}

/// Runs the controller until `shutdown`, then a few seconds more at most.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    Controller::bind(config).await?.run(shutdown).await
}

/// A controller that listens, and answers once it runs.
pub struct Controller {
    catalog: Source,
    verifier: Verifier,
    hub: Hub,
    proxies: Proxies,
    authority: AuthorityHandle,
    keeping: BoxFuture<'static, ()>,
    names: Names,
    trust_domain: Arc<str>,
    certificate_life: Duration,
    grpc: Listener,
    admin: Listener,
}

struct Listener {
    socket: TcpListener,
    address: SocketAddr,
}

enum Source {
    Kubernetes(kube::Client),
    Files(std::path::PathBuf),
}

impl Controller {
    /// Listens, and gets ready to talk to what the configuration names.
    pub async fn bind(config: Config) -> Result<Controller, Error> {
        let client = if config.needs_kubernetes() {
            Some(kube::Client::try_default().await?)
        } else {
            None
        };
        let client = || {
            client
                .clone()
                .expect("a client was made for whatever needs Kubernetes")
        };
        let catalog = match config.catalog {
            config::Catalog::Kubernetes => Source::Kubernetes(client()),
            config::Catalog::Files(folder) => Source::Files(folder),
        };
        let verifier = match config.authenticator {
            config::Authenticator::TokenReview => {
                Verifier::TokenReview(TokenReviews::new(client()))
            }
            config::Authenticator::Jwks { file, issuer } => {
                Verifier::Jwks(Jwks::open(&file, issuer)?)
            }
        };
        let names = Names::new(&config.trust_domain, &config.pod_namespace)?;
        let (trust_domain, certificate_life) =
            (config.trust_domain.as_str().into(), config.certificate_life);
        let storage = match config.ca {
            config::Ca::Kubernetes => authority::Storage::Kubernetes {
                client: client(),
                namespace: config.pod_namespace,
            },
            config::Ca::Files(folder) => authority::Storage::Files(folder),
        };
        let authority = authority::Options {
            trust_domain: config.trust_domain,
            certificate_life: config.certificate_life,
            ca_life: config.ca_life,
            storage,
        };
        let (hub, proxies) = (Hub::default(), Proxies::default());
        let (authority, keeping) = authority::start(authority, &hub, proxies.clone());
        let grpc = bind("LISTEN", config.listen).await?;
        let admin = bind("ADMIN_LISTEN", config.admin_listen).await?;
        Ok(Controller {
            catalog,
            verifier,
            hub,
            proxies,
            authority,
            keeping,
            names,
            trust_domain,
            certificate_life,
            grpc,
            admin,
        })
    }

    /// Where gRPC is served.
    pub fn address(&self) -> SocketAddr {
        self.grpc.address
    }

    /// The certificate authority.
    pub fn authority(&self) -> &AuthorityHandle {
        &self.authority
    }

    /// Where /live, /ready and /metrics are served.
    pub fn admin_address(&self) -> SocketAddr {
        self.admin.address
    }

    /// Serves until `shutdown`, then a few seconds more at most.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let (hub, stopping, readiness) = (self.hub, CancellationToken::new(), Readiness::default());
        let (counted, authority) = (hub.clone(), self.authority.clone());
        let metrics = Arc::new(Metrics::new(move |encoder| {
            metrics::encode_counts(&counted, encoder)?;
            authority::status::encode_metrics(&authority.status(), encoder)
        }));
        admin::add_conditions(&readiness, hub.clone(), self.authority.clone());
        let authenticator = Arc::new(Authenticator::new(self.verifier, metrics.clone()));
        let admin = admin::server(
            readiness.clone(),
            metrics.clone(),
            self.authority.clone(),
            self.proxies.clone(),
            self.trust_domain.clone(),
        );
        let trust_domain = self.trust_domain.clone();
        let grpc = async {
            let trust = tokio::select! {
                trust = self.authority.loaded() => trust,
                () = stopping.cancelled() => None,
            };
            let Some(trust) = trust.map(|trust| trust.subscribe()) else {
                return Ok(());
            };
            let serving = Serving::new(trust.clone(), self.names, self.certificate_life)?;
            let context = grpc::Context {
                hub: hub.clone(),
                authenticator,
                trust,
                proxies: self.proxies,
                trust_domain: self.trust_domain,
                certificate_life: self.certificate_life,
                metrics,
                stopping: stopping.clone(),
            };
            tokio::select! {
                result = grpc::serve(self.grpc.socket, serving.tls(), context) => Ok(result?),
                () = serving.renew() => Ok(()),
            }
        };
        let (sender, changes) = mpsc::channel(MAX_QUEUED_CHANGES);
        let provider = async {
            match self.catalog {
                Source::Kubernetes(client) => {
                    catalog::kubernetes::run(client, &trust_domain, sender).await
                }
                Source::Files(folder) => catalog::files::run(folder, &trust_domain, sender).await,
            }
        };
        let follow = hub.follow(changes);
        let synced = async {
            hub.synced().await;
            tracing::info!("the catalog is synced");
        };
        let signal = async {
            shutdown.await;
            tracing::info!("shutting down");
            readiness.drain();
            stopping.cancel();
        };
        tracing::info!(grpc = %self.grpc.address, admin = %self.admin.address, "the controller listens");
        tokio::select! {
            result = grpc => result,
            () = admin.serve(self.admin.socket) => Ok(()),
            // The rest goes on until the servers end.
            _ = async { tokio::join!(provider, follow, synced, self.keeping, signal) } => Ok(()),
        }
    }
}

async fn bind(setting: &'static str, address: SocketAddr) -> Result<Listener, Error> {
    let listening = async {
        let socket = listen::bind(address).await?;
        Ok(Listener {
            address: socket.local_addr()?,
            socket,
        })
    };
    listening.await.map_err(|source| Error::Bind {
        setting,
        address,
        source,
    })
}
