//! The controller: discovery and certificates for proxies, over gRPC.
//!
//! The path of a change: [`catalog`] (Kubernetes, or files) sends an object of [`kinds`], [`index`]
//! (pure) determines the affected destinations, [`mod@publish`] notifies their subscribers,
//! [`grpc`] sends responses at the pace of each client, and [`status`] tells the authors of objects
//! what applies. [`authenticate`] precedes every call. The controller stores only its certificate
//! authority, and what pods were called by ([`edges`]); all replicas respond alike, by what they
//! tell each other ([`replicas`]).
//!
//! The path of a certificate: [`serving`] (TLS), [`grpc`] authenticates the pod, [`issuer`] (pure)
//! signs with the current CA of [`authority`]. [`proxies`] lists the connected proxies and their
//! roots.
//!
//! Code imports only from its own folder and from later ones: `tests/tests/tidy.rs` has the order,
//! which ends with [`object`], the vocabulary of all kinds.

mod api;
pub mod authenticate;
pub mod authority;
pub mod catalog;
pub mod config;
pub mod edges;
pub mod explain;
mod fetch;
pub mod file;
pub mod grpc;
pub mod index;
pub mod kinds;
pub mod metrics;
pub mod object;
pub mod proxies;
pub mod publish;
pub mod quota;
pub mod replicas;
mod scrape;
pub mod serving;
pub mod status;
mod unix_time;

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;

use diy_mesh_control_plane::clock::Clock;
use diy_mesh_control_plane::events::{Events, Queue, publish};
use diy_mesh_model::identity;
use diy_mesh_runtime::{Admin, Readiness, listen, raise_max_open_files};
use futures::FutureExt;
use futures::future::{BoxFuture, FusedFuture};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use authenticate::{Authenticator, Jwks, Verifier};
use authority::{AuthorityHandle, TrustReceiver};
use catalog::Event;
use catalog::freshness::Freshness;
pub use config::Config;
pub use diy_mesh_issuer as issuer;
use edges::Edges;
use fetch::{Allowed, Fetcher};
use metrics::Metrics;
use object::Kind;
use object::kind::Report;
use proxies::Proxies;
use publish::Hub;
use quota::Quotas;
use scrape::Sources;
use serving::{Names, Serving};
use status::lease::Election;
use status::writer::Writer;
use status::{lease, report, writer};

/// The service account, in the namespace of the controller, whose tokens may list all pods where no
/// Kubernetes API reviews their access.
const VIEWER: &str = "mesh-viewer";
/// The catalog pauses while more changes wait for the index.
const MAX_QUEUED_CHANGES: usize = 1024;

/// A failure that prevents the start of the controller, or ends it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The controller cannot listen on an address.
    #[error("cannot listen on {address} ({setting}): {source}")]
    Bind {
        /// The setting with the address.
        setting: &'static str,
        /// The address.
        address: SocketAddr,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The configuration of the Kubernetes client is missing or invalid.
    #[error(
        "cannot configure the Kubernetes client, expected a service account in a pod, KUBECONFIG, or ~/.kube/config: {0}"
    )]
    Kubernetes(#[from] kube::Error),
    /// The public keys of the token issuer cannot be used.
    #[error("cannot use the keys of the token issuer: {0}")]
    Jwks(#[from] authenticate::jwks::JwksError),
    /// The trust domain or the namespace is invalid in an identity.
    #[error("cannot create the identity of the controller: {0}")]
    Identity(#[from] diy_mesh_model::identity::InvalidIdentity),
    /// The serving certificate cannot be signed.
    #[error("cannot create the serving certificate: {0}")]
    Certificate(#[from] issuer::SignError),
    /// The admin server has failed.
    #[error("the admin server has failed: {0}")]
    Admin(#[from] io::Error),
}

/// Runs the controller until `shutdown`, then for a few seconds at most.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    Controller::bind(config).await?.run(shutdown).await
}

/// A controller with open ports. It responds when it runs.
pub struct Controller {
    config: Config,
    client: Option<kube::Client>,
    verifier: Verifier,
    names: Names,
    hub: Hub,
    proxies: Proxies,
    authority: AuthorityHandle,
    run_authority: BoxFuture<'static, ()>,
    stopping: CancellationToken,
    grpc: Listener,
    admin: Listener,
}

struct Listener {
    socket: TcpListener,
    address: SocketAddr,
}

impl Controller {
    /// Opens the ports and connects the modules.
    pub async fn bind(config: Config) -> Result<Controller, Error> {
        raise_max_open_files();
        let client = if config.needs_kubernetes() {
            Some(kube::Client::try_default().await?)
        } else {
            None
        };
        let cluster = || client.clone().expect(CLIENT);
        let verifier = match &config.authenticator {
            config::Authenticator::TokenReview => Verifier::Kubernetes(cluster()),
            config::Authenticator::Jwks(file) => Verifier::Jwks(
                Box::new(Jwks::open(file, config.jwks_issuer.clone())?),
                identity::user(&config.pod_namespace, VIEWER),
            ),
        };
        let stopping = CancellationToken::new();
        let options = authority::Options {
            trust_domain: config.trust_domain.clone(),
            certificate_life: config.certificate_life,
            ca_life: config.ca_life,
            clock: Clock::default(),
            stopping: stopping.clone(),
            storage: match &config.ca {
                config::Storage::Kubernetes => authority::Storage::Kubernetes {
                    client: cluster(),
                    namespace: config.pod_namespace.clone(),
                },
                config::Storage::Files(folder) => authority::Storage::Files(folder.clone()),
            },
        };
        let (hub, proxies) = (Hub::of_mesh(&config.pod_namespace), Proxies::default());
        let (authority, run_authority) = authority::start(options, &hub, proxies.clone());
        Ok(Controller {
            names: Names::new(&config.trust_domain, &config.pod_namespace)?,
            grpc: bind("LISTEN", config.listen).await?,
            admin: bind("ADMIN_LISTEN", config.admin_listen).await?,
            config,
            client,
            verifier,
            hub,
            proxies,
            authority,
            run_authority,
            stopping,
        })
    }

    /// The address of the gRPC server.
    pub fn address(&self) -> SocketAddr {
        self.grpc.address
    }

    /// The certificate authority.
    pub fn authority(&self) -> &AuthorityHandle {
        &self.authority
    }

    /// The address of /live, /ready and /metrics.
    pub fn admin_address(&self) -> SocketAddr {
        self.admin.address
    }

    /// Serves until `shutdown`, then for a few seconds at most.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let Controller {
            config,
            hub,
            stopping,
            ..
        } = self;
        let (stopped, readiness) = (CancellationToken::new(), Readiness::default());
        let trust_domain: Arc<str> = config.trust_domain.as_str().into();
        let freshness = Freshness::default();
        let (quotas, edges) = (Quotas::default(), Edges::default());
        let (sender, changes) = mpsc::channel(MAX_QUEUED_CHANGES);
        let (events, queue) = Events::new();
        let sources = Sources {
            hub: hub.clone(),
            freshness: freshness.clone(),
            authority: self.authority.clone(),
            quotas: quotas.clone(),
            edges: edges.clone(),
            readiness: readiness.clone(),
            changes: sender.downgrade(),
            events: events.clone(),
        };
        let metrics = Arc::new(Metrics::new(move |encoder| sources.encode(encoder)));
        add_conditions(&readiness, hub.clone(), &freshness, self.authority.clone());
        let page = metrics.clone();
        let admin = Admin::new(readiness.clone(), move || page.render());
        let replica = self.authority.status().replica;
        let writer = status_writer(&config, &self.client, replica, &metrics, &events);
        let statuses = publish_statuses(&hub, writer, &stopping);
        let mut statuses = pin!(statuses.fuse());
        let context = |trust| grpc::Context {
            hub: hub.clone(),
            authenticator: Arc::new(Authenticator::new(
                self.verifier,
                self.authority.clock().clone(),
                metrics.clone(),
            )),
            trust,
            authority: self.authority.clone(),
            proxies: self.proxies,
            edges: edges.clone(),
            quotas,
            trust_domain: trust_domain.clone(),
            certificate_life: config.certificate_life,
            metrics: metrics.clone(),
            events: events.clone(),
            stopping: stopping.clone(),
        };
        let calls = serve_calls(
            self.grpc.socket,
            self.names,
            &self.authority,
            context,
            &stopping,
        );
        let observe_authority = async {
            if config.ca == config::Storage::Kubernetes {
                let authority = &self.authority;
                let (published, status) = (authority.watch_published(), authority.watch_status());
                let namespace = &config.pod_namespace;
                let clock = authority.clock().clone();
                authority::events::observe(published, status, namespace, clock, events.clone())
                    .await;
            }
        };
        let store_edges = async {
            let is_cluster = config.catalog == config::Storage::Kubernetes;
            let client = self.client.clone().filter(|_| is_cluster);
            // The clocks are compared before.
            self.authority.loaded().await;
            let (namespace, clock) = (&config.pod_namespace, self.authority.clock());
            edges::store::run(client, namespace, edges.clone(), clock, &stopped).await;
        };
        let mut store_edges = pin!(store_edges.fuse());
        let keys = Fetcher::new(
            self.client.clone(),
            Allowed {
                urls: urls(&config.key_urls),
                private_urls: urls(&config.private_key_urls),
                roots: config.key_roots_file.clone(),
            },
        );
        let background = async {
            tokio::join!(
                watch_catalog(
                    &config,
                    &self.client,
                    self.authority.clock(),
                    &freshness,
                    sender,
                    &events,
                    &hub,
                ),
                hub.follow(changes),
                log_sync(&hub),
                self.run_authority,
                stop_after(shutdown, &readiness, &stopping),
                publish_events(&self.client, queue),
                observe_authority,
                &mut store_edges,
                keys.run(&hub),
                hub.review_acknowledgements(),
                &mut statuses,
            )
        };
        tracing::info!(grpc = %self.grpc.address, admin = %self.admin.address, "listening");
        let result = tokio::select! {
            result = calls => result,
            failed = admin.serve_on_thread(self.admin.socket) => match failed? {},
            // These run until the servers end.
            _ = background => Ok(()),
        };
        // Proxies report until their streams end.
        stopped.cancel();
        if !store_edges.is_terminated() {
            store_edges.await;
        }
        // Another replica does not wait for the Lease of this one.
        if !statuses.is_terminated() {
            stopping.cancel();
            statuses.await;
        }
        result
    }
}

/// The URLs of a flag. An empty variable has one empty URL.
fn urls<C: FromIterator<String>>(urls: &[String]) -> C {
    let urls = urls.iter().filter(|url| !url.is_empty());
    urls.cloned().collect()
}

/// The name of the condition of readiness that a CA is loaded.
pub const AUTHORITY_CONDITION: &str = "certificate authority";

/// Adds the conditions of readiness: a right clock, a synced and current catalog, and a CA.
fn add_conditions(
    readiness: &Readiness,
    hub: Hub,
    freshness: &Freshness,
    authority: AuthorityHandle,
) {
    let clock = authority.clock().clone();
    readiness.check("clock", move || clock.error());
    readiness.check(AUTHORITY_CONDITION, move || authority.unavailable());
    readiness.check("catalog", move || {
        let missing: Vec<&str> = hub
            .missing()
            .iter()
            .map(|kind| kind.unique_name())
            .collect();
        (!missing.is_empty()).then(|| format!("not synced: waiting for {}", missing.join(", ")))
    });
    let freshness = freshness.clone();
    readiness.check("catalog updates", move || freshness.stale());
}

/// The writer of statuses, and the election among the replicas. `None` without a cluster.
fn status_writer(
    config: &Config,
    client: &Option<kube::Client>,
    replica: String,
    metrics: &Arc<Metrics>,
    events: &Events,
) -> Option<(Election, Writer)> {
    let is_cluster = config.catalog == config::Storage::Kubernetes;
    let client = client.clone().filter(|_| is_cluster)?;
    let (namespace, timing) = (&config.pod_namespace, lease::Timing::default());
    let has_status = |kind: &Kind| kind.row().report == Report::Status;
    let kinds = Vec::from_iter(Kind::ALL.into_iter().filter(has_status));
    let (metrics, events) = (metrics.clone(), events.clone());
    let writer = Writer::new(client.clone(), namespace, &kinds, metrics, events);
    let election = Election::new(client, namespace, replica, timing);
    Some((election, writer))
}

/// Writes the statuses of routes, or logs them without a cluster, from the first synced catalog on: a
/// route whose grant is not known yet is not to be rejected.
async fn publish_statuses(
    hub: &Hub,
    writer: Option<(Election, Writer)>,
    stopping: &CancellationToken,
) {
    tokio::select! {
        () = hub.synced() => {}
        () = stopping.cancelled() => return,
    }
    match writer {
        Some((election, writer)) => writer::run(election, writer, hub, stopping.clone()).await,
        None => tokio::select! {
            never = report::log_changes(hub) => match never {},
            () = stopping.cancelled() => {}
        },
    }
}

/// Serves the calls of proxies from the first loaded CA on.
async fn serve_calls(
    socket: TcpListener,
    names: Names,
    authority: &AuthorityHandle,
    context: impl FnOnce(TrustReceiver) -> grpc::Context,
    stopping: &CancellationToken,
) -> Result<(), Error> {
    let trust = tokio::select! {
        trust = authority.loaded() => trust,
        () = stopping.cancelled() => None,
    };
    let Some(trust) = trust.map(|trust| trust.subscribe()) else {
        return Ok(());
    };
    let context = context(trust.clone());
    let clock = authority.clock().clone();
    let serving = Serving::new(trust, names, context.certificate_life, clock)?;
    tokio::select! {
        () = grpc::serve(socket, serving.tls(), context) => Ok(()),
        () = serving.renew() => Ok(()),
    }
}

/// Sends the changes of the catalog to `sender`.
async fn watch_catalog(
    config: &Config,
    client: &Option<kube::Client>,
    clock: &Clock,
    freshness: &Freshness,
    sender: mpsc::Sender<Event>,
    events: &Events,
    hub: &Hub,
) {
    let (trust_domain, namespace) = (&config.trust_domain, &config.pod_namespace);
    match &config.catalog {
        config::Storage::Kubernetes => {
            let client = client.clone().expect(CLIENT);
            let report = |kind: &_| status::events::kind_unreadable(events, namespace, kind);
            let claims = hub.claims();
            catalog::kubernetes::run(client, config, clock, freshness, sender, claims, report).await
        }
        config::Storage::Files(folder) => {
            catalog::files::run(folder.clone(), trust_domain, freshness, sender).await
        }
    }
}

async fn publish_events(client: &Option<kube::Client>, queue: Queue) {
    if let Some(client) = client.clone() {
        publish(client, "controller", queue).await;
    }
}

async fn log_sync(hub: &Hub) {
    hub.synced().await;
    tracing::info!("the catalog is synced");
}

async fn stop_after(
    shutdown: impl Future<Output = ()>,
    readiness: &Readiness,
    stopping: &CancellationToken,
) {
    shutdown.await;
    tracing::info!("shutting down");
    readiness.drain();
    stopping.cancel();
}

/// The invariant of the client.
const CLIENT: &str = "the configuration that needs Kubernetes has a client";

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
