//! The injector: a mutating admission webhook that adds proxy-init and the proxy to pods.
//!
//! The path of a review: `server` (HTTPS), `webhook` (limits), `review` (AdmissionReview),
//! `namespaces` (labels), `patch` (Pod to JSON patch), which uses `annotations`, `other_mesh`,
//! `settings`, `containers` and `probes`.
//! `kubernetes` or `ephemeral` provide the serving certificate (`certificate`); `publish` hands it
//! to `tls` and to `health`.
//!
//! The injector stores only its own certificates and is not on the path of any traffic.

pub mod annotations;
pub mod certificate;
pub mod config;
pub mod containers;
mod diff;
mod ephemeral;
mod health;
mod kubernetes;
pub mod metrics;
mod namespaces;
pub mod other_mesh;
pub mod patch;
mod pod;
mod probes;
mod publish;
mod quantity;
mod resources;
pub mod review;
mod server;
pub mod settings;
mod tls;
pub mod version;
pub mod webhook;

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use diy_mesh_control_plane::events::{Events, Queue, publish};
use diy_mesh_runtime::{Admin, Readiness, listen, raise_max_open_files};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::certificate::Names;
pub use crate::config::{Config, Flags, ServingCertificate};
use crate::health::Health;
use crate::metrics::Metrics;
use crate::namespaces::Namespaces;
use crate::publish::Publisher;

/// A failure of the injector.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An address that cannot be bound.
    #[error("cannot listen on {0}: {1}")]
    Bind(SocketAddr, std::io::Error),
    /// A failure of the admin server.
    #[error("the admin server has failed: {0}")]
    Admin(#[from] std::io::Error),
    /// A failure to provide certificates.
    #[error(transparent)]
    Publish(#[from] publish::Error),
}

/// Runs an injector until `shutdown` completes, then waits for open requests to complete.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    Injector::bind(config).await?.run(shutdown).await
}

/// An injector with bound ports. It serves in [`run`](Self::run).
#[derive(Debug)]
pub struct Injector {
    config: Config,
    webhook: TcpListener,
    admin: TcpListener,
    health: Arc<Health>,
    metrics: Arc<Metrics>,
}

impl Injector {
    /// Binds the ports, and reads the images of injected containers if the configuration lacks
    /// them.
    pub async fn bind(mut config: Config) -> Result<Self, Error> {
        if let Some(pod) = &config.pod_with_images {
            kubernetes::read_images(&mut config.settings, pod).await?;
        }
        raise_max_open_files();
        let bind = async |address| {
            listen::bind(address)
                .await
                .map_err(|error| Error::Bind(address, error))
        };
        let webhook = bind(config.listen).await?;
        let admin = bind(config.admin_listen).await?;
        let metrics = Arc::new(Metrics::default());
        Ok(Self {
            config,
            webhook,
            admin,
            health: Arc::default(),
            metrics,
        })
    }

    /// The address of the webhook.
    pub fn address(&self) -> SocketAddr {
        self.webhook
            .local_addr()
            .expect("a bound socket has an address")
    }

    /// The address of the admin server.
    pub fn admin_address(&self) -> SocketAddr {
        self.admin
            .local_addr()
            .expect("a bound socket has an address")
    }

    /// A future that completes when the injector is ready.
    pub fn ready(&self) -> impl Future<Output = ()> + Send + use<> {
        let health = self.health.clone();
        async move { health.wait().await }
    }

    /// Serves until `shutdown` completes, then waits for open requests to complete.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        tracing::info!(webhook = %self.address(), admin = %self.admin_address(), "listening");
        let Self {
            config,
            webhook,
            admin,
            health,
            metrics,
        } = self;
        let publisher = Publisher::new(health.clone(), metrics.clone());
        let (stop, stopping) = watch::channel(false);

        let readiness = Readiness::default();
        readiness.check("certificates", {
            let health = health.clone();
            move || health.unmet()
        });
        let admin = {
            let metrics = metrics.clone();
            Admin::new(readiness.clone(), move || metrics.render()).serve_on_thread(admin)
        };
        let (events, queue) = Events::new();
        let handler = webhook::handler(Arc::new(webhook::Webhook::new(
            config.settings.clone(),
            Namespaces::open(config.namespaces_folder.as_deref()).await?,
            metrics,
            events,
        )));
        let webhook = server::serve(
            webhook,
            tls::config(publisher.subscribe()),
            handler,
            stopping.clone(),
        );
        let certificates = certificates(&config, &publisher, queue, stopping);
        let signal = async {
            shutdown.await;
            tracing::info!(delay = ?config.shutdown_delay, "stopping");
            readiness.drain();
            sleep(config.shutdown_delay).await;
            let _ = stop.send(true);
        };
        let served = async { tokio::try_join!(ok(webhook), certificates, ok(signal)).map(|_| ()) };
        tokio::select! {
            result = served => result,
            failed = admin => match failed? {},
        }
    }
}

async fn certificates(
    config: &Config,
    publisher: &Publisher,
    queue: Queue,
    mut stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    let service = format!("injector.{}.svc", config.settings.mesh_namespace);
    let service_names = [format!("{service}.cluster.local"), service];
    match &config.serving_certificate {
        ServingCertificate::Kubernetes {
            webhook_configuration,
        } => {
            let names = Names::new(service_names.into_iter().chain(config.extra_names.clone()));
            let namespace = &config.settings.mesh_namespace;
            let client = kubernetes::client().await?;
            let events = async {
                publish(client.clone(), "injector", queue).await;
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = server::stopped(&mut stop) => Ok(()),
                () = events => Ok(()),
                result = kubernetes::run(client.clone(), publisher, &names, namespace, webhook_configuration) => match result? {},
            }
        }
        ServingCertificate::Ephemeral { ca_file } => {
            let local = ["localhost".into(), "127.0.0.1".into(), "::1".into()];
            let listen = Some(config.listen.ip())
                .filter(|address| !address.is_unspecified())
                .as_ref()
                .map(IpAddr::to_string);
            let names = service_names.into_iter().chain(local).chain(listen);
            let names = Names::new(names.chain(config.extra_names.clone()));
            tokio::select! {
                () = server::stopped(&mut stop) => Ok(()),
                result = ephemeral::run(publisher, &names, ca_file) => match result? {},
            }
        }
    }
}

async fn ok(future: impl Future<Output = ()>) -> Result<(), Error> {
    future.await;
    Ok(())
}
