//! The gRPC server on one port over TLS: the service of `mesh.proto`, and the health check.
//!
//! Every RPC authenticates the client, waits for a synced catalog, then responds. `sign` alone
//! decides on certificate requests; `discover` and `watch` serve one stream each, and `list` answers
//! people and tools.

mod discover;
mod frames;
mod list;
pub(crate) mod message;
mod name;
pub(crate) mod server;
mod sign;
mod subscriptions;
mod told;
mod watch;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use diy_mesh_control_plane::events::Events;
use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::{
    CAPABILITIES_METADATA, CAPABILITY_AUTHORIZATION, CAPABILITY_BACKEND, CAPABILITY_EDGES,
    CAPABILITY_EGRESS, CAPABILITY_KEYS, CAPABILITY_POLICY, CAPABILITY_SELF, CAPABILITY_TELEMETRY,
    CAPABILITY_TRAFFIC, announces,
};
use diy_mesh_runtime::metrics::Active;
use futures::{Stream, StreamExt as _};
use hyper::header::HeaderValue;
use proto::service_mesh_service_server::SERVICE_NAME;
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::authenticate::{Authenticator, Caller};
use crate::authority::{AuthorityHandle, TrustReceiver};
use crate::edges::Edges;
use crate::index::Index;
use crate::metrics::Metrics;
use crate::object::PodRef;
use crate::proxies::Proxies;
use crate::publish::{CatalogError, Hub, Lacking};
use crate::quota::{Counted, Quotas, Unsent};
use crate::serving::{self, Peer};
use discover::SharedSubscriptions;
use frames::MeshServer;
use sign::Signer;

/// For the largest messages: a certificate request, or a list of names.
const MAX_MESSAGE_BYTES: usize = 256 * 1024;
/// A stream ends at one to two times this age.
const MIN_STREAM_AGE: Duration = Duration::from_secs(30 * 60);
/// Time for streams to end after shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);

/// The state that the RPCs share.
#[derive(Clone)]
pub struct Context {
    /// The catalog.
    pub hub: Hub,
    /// Authentication of clients.
    pub authenticator: Arc<Authenticator>,
    /// The issuer and the trust roots.
    pub trust: TrustReceiver,
    /// The certificate authority, and its status.
    pub authority: AuthorityHandle,
    /// The registry of connected proxies.
    pub proxies: Proxies,
    /// The reported callers and destinations of pods.
    pub edges: Edges,
    /// The limits of each caller.
    pub quotas: Quotas,
    /// The trust domain of all identities.
    pub trust_domain: Arc<str>,
    /// The validity of workload certificates.
    pub certificate_life: Duration,
    /// The counters.
    pub metrics: Arc<Metrics>,
    /// The sender of Kubernetes Events.
    pub events: Events,
    /// Cancelled at shutdown: streams end, and clients connect to other replicas.
    pub stopping: CancellationToken,
}

/// Serves until `context.stopping`, then for a few seconds at most.
pub async fn serve(listener: TcpListener, tls: Arc<ServerConfig>, context: Context) {
    let Context {
        hub,
        stopping,
        mut trust,
        ..
    } = context.clone();
    let server = serving::server(tls, listener, &context.quotas);
    let health = HealthReporter::new();
    report(&health, ServingStatus::NotServing).await;
    let health_service = tonic_health::pb::health_server::HealthServer::new(
        tonic_health::server::HealthService::from_health_reporter(health.clone()),
    );
    let routes = Routes::new(health_service)
        .add_service(MeshServer::new(Mesh::new(context)))
        .prepare();
    let server = server::serve(server, routes, stopping.clone());

    let state = async {
        tokio::select! {
            () = hub.synced() => report(&health, ServingStatus::Serving).await,
            () = stopping.cancelled() => {}
        }
        stopping.cancelled().await;
        report(&health, ServingStatus::NotServing).await;
        tokio::time::sleep(DRAIN_TIMEOUT).await;
    };
    let wake_for_trust = async {
        while trust.changed().await.is_ok() {
            hub.wake_clients();
        }
        std::future::pending().await
    };
    tokio::select! {
        () = server => {}
        () = wake_for_trust => {}
        () = state => {
            tracing::info!("closing connections that are open {DRAIN_TIMEOUT:?} after shutdown");
        }
    }
}

async fn report(health: &HealthReporter, status: ServingStatus) {
    for name in ["", SERVICE_NAME] {
        health.set_service_status(name, status).await;
    }
}

/// A call, until its response has been read.
struct Call {
    peer: Peer,
    counted: OnceLock<Counted>,
    unsent: Unsent,
}

/// The implementation of `mesh.proto`.
struct Mesh {
    context: Context,
    signer: Signer,
}

type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The age at which a stream ends, so that its client connects again, perhaps to another
/// replica. Random, so that streams that begin together do not end together.
fn stream_age() -> Duration {
    MIN_STREAM_AGE.mul_f64(1.0 + fastrand::f64())
}

/// The capabilities that a client is announced: those about its pod only if that has an injected
/// proxy, or is not in the catalog yet.
fn capabilities(caller: &Caller, index: &Index) -> HeaderValue {
    let is_injected = |pod: &&PodRef| {
        let known = index.pod_by_uid(pod);
        known.is_none_or(|known| known.identity.is_some())
    };
    let of_pod = caller.pod.as_ref().filter(is_injected);
    let of_pod = of_pod.map(|_| {
        [
            CAPABILITY_SELF,
            CAPABILITY_EDGES,
            CAPABILITY_AUTHORIZATION,
            CAPABILITY_EGRESS,
            CAPABILITY_KEYS,
            CAPABILITY_TRAFFIC,
        ]
    });
    let all: Vec<&str> = of_pod
        .into_iter()
        .flatten()
        .chain([CAPABILITY_BACKEND])
        .collect();
    HeaderValue::try_from(all.join(",")).expect("capabilities are ASCII words")
}

impl Mesh {
    fn new(context: Context) -> Mesh {
        Mesh {
            signer: Signer::new(context.clone()),
            context,
        }
    }

    /// Signs the certificate of a pod.
    async fn serve_certificate(
        &self,
        request: Request<proto::SignCertificateRequest>,
    ) -> Result<Response<proto::SignCertificateResponse>, Status> {
        let call = open_call(&request)?;
        let message = request.into_inner();
        let token = &message.token;
        let authenticator = &self.context.authenticator;
        let caller = authenticator.caller_by_token(token, call.peer.ip()).await?;
        self.admit(&call, &caller)?;
        let response = self.signer.sign(message, &caller, call.peer.address);
        Ok(Response::new(response.await?))
    }

    /// Serves one Discover stream.
    async fn serve_discover(
        &self,
        request: Request<Streaming<proto::DiscoverRequest>>,
    ) -> Result<hyper::Response<Body>, Status> {
        let (caller, call) = self.authenticate(&request).await?;
        tracing::debug!(caller = %caller.user, "Discover");
        let open = Active::new(&self.context.metrics.discover_streams);
        let Context {
            hub,
            trust,
            proxies,
            metrics,
            ..
        } = self.context.clone();
        let proxy = proxies.connect(&caller, self.context.authority.clock().now());
        let capabilities = hub.read(|index| capabilities(&caller, index));
        let announced = request.metadata().get(CAPABILITIES_METADATA);
        let announced = announced.and_then(|words| words.to_str().ok());
        // Proxies of earlier releases announce nothing.
        let lacking = Lacking {
            policies: !announces(announced, CAPABILITY_POLICY),
            authorization: !announces(announced, CAPABILITY_AUTHORIZATION),
            egress: !announces(announced, CAPABILITY_EGRESS),
            telemetry: !announces(announced, CAPABILITY_TELEMETRY),
        };
        let mut subscriber = hub.watch_resources(caller.pod.clone());
        subscriber.set_lacking(lacking);
        if caller.pod.is_none() {
            subscriber.set_caller(caller.user.clone());
        }
        let reports_traffic = announces(announced, CAPABILITY_TRAFFIC);
        let watched = proxy.watched().filter(|_| reports_traffic);
        let charge = call.peer.charge();
        let subscriptions =
            SharedSubscriptions::new(subscriber, caller.pod, charge, lacking.policies);
        let responses = discover::responses(subscriptions.clone(), trust, watched, metrics);
        // Dropped with the responses.
        let (mut reading, read) = oneshot::channel::<Infallible>();
        let responses = responses.inspect(move |_| {
            let _ = &read;
        });
        let (requests, context) = (request.into_inner(), self.context.clone());
        tokio::spawn(async move {
            let _open = open;
            let status = tokio::select! {
                Err(status) = discover::read(requests, &subscriptions, &proxy, &context) => status,
                () = reading.closed() => return,
                () = context.stopping.cancelled() => CatalogError::Stopping.into(),
                () = tokio::time::sleep(stream_age()) => Status::new(Code::Ok, ""),
            };
            // A client that reads no more does not receive this: the drain closes its connection.
            subscriptions.end(status);
        });
        let mut response = frames::response(responses);
        let headers = response.headers_mut();
        headers.insert(CAPABILITIES_METADATA, capabilities);
        Ok(response)
    }

    /// Authenticates a client, then waits for a synced catalog: before that, known destinations
    /// would be reported as unknown.
    async fn authenticate<T>(&self, request: &Request<T>) -> Result<(Caller, Arc<Call>), Status> {
        let call = open_call(request)?;
        let authenticator = &self.context.authenticator;
        let address = call.peer.ip();
        let caller = authenticator.caller(request.metadata(), address).await?;
        self.admit(&call, &caller)?;
        self.context.hub.wait_synced(&self.context.stopping).await?;
        Ok((caller, call))
    }

    /// Counts a call and its connection for an authenticated caller.
    fn admit(&self, call: &Call, caller: &Caller) -> Result<(), Status> {
        let quota = self.context.quotas.of(caller);
        call.peer.authenticate(&quota)?;
        let _ = call.counted.set(quota.call()?);
        Ok(())
    }
}

/// The call that a request belongs to.
fn open_call<T>(request: &Request<T>) -> Result<Arc<Call>, Status> {
    let call = request.extensions().get::<Arc<Call>>();
    call.cloned()
        .ok_or_else(|| Status::internal("the call is not counted"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn streams_end_at_different_ages() {
        let ages: BTreeSet<_> = (0..100).map(|_| stream_age()).collect();
        assert!(ages.len() > 90 && ages.iter().all(|age| (1800..3600).contains(&age.as_secs())));
    }
}
