//! The gRPC surface: the contract's service and the health check, on one port, over TLS. Thin: it authenticates, asks the hub, and says it in
//! the contract's words.

mod discover;
mod limit;
mod message;
mod service;
mod sign;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1::service_mesh_service_server::{
    SERVICE_NAME, ServiceMeshServiceServer,
};
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::authenticate::Authenticator;
use crate::authority::Authority;
use crate::hub::Hub;
use crate::metrics::Metrics;
use crate::proxies::Proxies;
use crate::serving;
use service::Mesh;

/// The largest message that is read: a certificate request, or a list of names.
const LARGEST_MESSAGE: usize = 256 * 1024;
/// The largest header block: a token and little else.
const LARGEST_HEADERS: u32 = 32 * 1024;
/// How many calls one connection may have open: a proxy has two or three.
const CALLS_PER_CONNECTION: u32 = 128;
/// A peer that is silent for so long is asked whether it is still there,
const PING_AFTER: Duration = Duration::from_secs(20);
/// and has so long to answer.
const PING_PATIENCE: Duration = Duration::from_secs(10);
/// How long streams get to end once the controller stops.
const DRAIN: Duration = Duration::from_secs(3);

/// What the service answers from.
#[derive(Clone)]
pub struct Context {
    /// The catalog.
    pub hub: Hub,
    /// Who may call.
    pub authenticator: Arc<Authenticator>,
    /// Who signs, and whom everybody trusts.
    pub authority: Authority,
    /// The proxies that are connected.
    pub proxies: Proxies,
    /// The trust domain of all identities.
    pub trust_domain: Arc<str>,
    /// How long workloads' certificates are valid.
    pub certificate_life: Duration,
    /// The counters.
    pub metrics: Arc<Metrics>,
    /// Cancelled once the controller stops: streams end, so that their callers go elsewhere.
    pub stopping: CancellationToken,
}

/// Serves until `context.stopping`, then a few seconds more at most.
pub async fn serve(
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    context: Context,
) -> Result<(), tonic::transport::Error> {
    let Context { hub, stopping, .. } = context.clone();
    let health = HealthReporter::new();
    report(&health, ServingStatus::NotServing).await;
    let health_service = tonic_health::pb::health_server::HealthServer::new(
        tonic_health::server::HealthService::from_health_reporter(health.clone()),
    );
    let mesh = ServiceMeshServiceServer::new(Mesh::new(context))
        .max_decoding_message_size(LARGEST_MESSAGE);
    let server = Server::builder()
        .http2_keepalive_interval(Some(PING_AFTER))
        .http2_keepalive_timeout(Some(PING_PATIENCE))
        .http2_max_header_list_size(LARGEST_HEADERS)
        .max_concurrent_streams(CALLS_PER_CONNECTION)
        .add_service(health_service)
        .add_service(mesh)
        .serve_with_incoming_shutdown(
            serving::handshakes(tls, listener),
            stopping.clone().cancelled_owned(),
        );

    let state = async {
        tokio::select! {
            () = hub.synced() => report(&health, ServingStatus::Serving).await,
            () = stopping.cancelled() => {}
        }
        stopping.cancelled().await;
        report(&health, ServingStatus::NotServing).await;
        tokio::time::sleep(DRAIN).await;
    };
    tokio::select! {
        result = server => result,
        () = state => {
            tracing::info!("some connections did not end within {} s and are cut", DRAIN.as_secs());
            Ok(())
        }
    }
}

async fn report(health: &HealthReporter, status: ServingStatus) {
    for name in ["", SERVICE_NAME] {
        health.set_service_status(name, status).await;
    }
}
