//! The injector: a mutating webhook. A Pod comes in, a JSON patch goes out that adds proxy-init and proxy.
//!
//! A request's way: `server` accepts it, `tls` decrypts, `webhook` bounds and reads it, `review` understands it,
//! `patch` decides, with `annotations` for what the pod asks, `containers` for what it gains and `probes` for what the kubelet
//! may ask it. Beside that way,
//! `kubernetes` or `ephemeral` keep the serving certificate (`certificate`), `publish` hands it to TLS, and `health` tells probes.
//!
//! It stores nothing but its own certificates, and is not on the path of any traffic.

pub mod annotations;
pub mod certificate;
pub mod config;
pub mod containers;
mod diff;
mod ephemeral;
mod health;
mod kubernetes;
mod metrics;
pub mod patch;
mod pod;
mod probes;
mod publish;
pub mod review;
mod server;
mod tls;
pub mod webhook;

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::certificate::Names;
pub use crate::config::{Config, Flags, ServingCertificate};
use crate::health::Health;
use crate::metrics::Metrics;
use crate::publish::Publisher;

/// Why the injector cannot run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An address cannot be bound.
    #[error("cannot listen on {0}: {1}")]
    Bind(SocketAddr, std::io::Error),
    /// There are no certificates to serve.
    #[error(transparent)]
    Publish(#[from] publish::Error),
}

/// Runs an injector until `shutdown` is there, then lets the requests at hand end.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    Injector::bind(config).await?.run(shutdown).await
}

/// An injector whose ports are open, and which serves once it [runs](Self::run).
#[derive(Debug)]
pub struct Injector {
    config: Config,
    webhook: TcpListener,
    admin: TcpListener,
    health: Arc<Health>,
    metrics: Arc<Metrics>,
}

impl Injector {
    /// Opens the ports.
    pub async fn bind(config: Config) -> Result<Self, Error> {
        let listen = async |address| {
            server::bind(address)
                .await
                .map_err(|error| Error::Bind(address, error))
        };
        let webhook = listen(config.listen).await?;
        let admin = listen(config.admin_listen).await?;
        let metrics = Arc::new(Metrics::default());
        Ok(Self {
            config,
            webhook,
            admin,
            health: Arc::new(Health::new(metrics.clone())),
            metrics,
        })
    }

    /// Where the webhook listens.
    pub fn address(&self) -> SocketAddr {
        self.webhook
            .local_addr()
            .expect("a bound socket has an address")
    }

    /// Where the admin server listens.
    pub fn admin_address(&self) -> SocketAddr {
        self.admin
            .local_addr()
            .expect("a bound socket has an address")
    }

    /// A future that ends once reviews can be answered.
    pub fn ready(&self) -> impl Future<Output = ()> + Send + use<> {
        let health = self.health.clone();
        async move { health.wait().await }
    }

    /// Serves until `shutdown` is there, then lets the requests at hand end.
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

        let answer = {
            let health = health.clone();
            move |request| std::future::ready(health.answer(&request))
        };
        let admin = server::serve(admin, None, answer, stopping.clone());
        let handler = webhook::handler(Arc::new(webhook::Webhook::new(
            config.settings.clone(),
            metrics,
        )));
        let webhook = server::serve(
            webhook,
            Some(tls::acceptor(publisher.subscribe())),
            handler,
            stopping.clone(),
        );
        let certificates = certificates(&config, &publisher, stopping);
        let signal = async {
            shutdown.await;
            tracing::info!(delay = ?config.shutdown_delay, "stopping");
            health.stopping();
            sleep(config.shutdown_delay).await;
            let _ = stop.send(true);
        };
        // Certificates that cannot be kept end the program: the error drops all else.
        let ((), (), (), ()) = tokio::try_join!(ok(admin), ok(webhook), certificates, ok(signal))?;
        Ok(())
    }
}

async fn certificates(
    config: &Config,
    publisher: &Publisher,
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
            tokio::select! {
                () = server::stopped(&mut stop) => Ok(()),
                result = kubernetes::run(publisher, &names, namespace, webhook_configuration) => match result? {},
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
