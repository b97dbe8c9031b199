//! The gRPC server: the service of `mesh.proto` and the health check, on one port, over TLS.

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

/// For the largest messages: a certificate request, or a list of names.
const MAX_MESSAGE_BYTES: usize = 256 * 1024;
/// The largest header block: a token and little else.
const MAX_HEADER_LIST_BYTES: u32 = 32 * 1024;
/// A proxy has two or three open streams.
const MAX_CONCURRENT_STREAMS: u32 = 128;
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for streams to end after shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);

/// What the service answers from.
#[derive(Clone)]
pub struct Context {
    /// The catalog.
    pub hub: Hub,
    /// Authentication of clients.
    pub authenticator: Arc<Authenticator>,
    /// The issuer and the trust roots.
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
        .max_decoding_message_size(MAX_MESSAGE_BYTES);
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEP_ALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_TIMEOUT))
        .http2_max_header_list_size(MAX_HEADER_LIST_BYTES)
        .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
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
        tokio::time::sleep(DRAIN_TIMEOUT).await;
    };
    tokio::select! {
        result = server => result,
        () = state => {
            tracing::info!("some connections did not end within {} s and are cut", DRAIN_TIMEOUT.as_secs());
            Ok(())
        }
    }
}

async fn report(health: &HealthReporter, status: ServingStatus) {
    for name in ["", SERVICE_NAME] {
        health.set_service_status(name, status).await;
    }
}
