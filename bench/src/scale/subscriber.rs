//! One subscriber: a discovery stream on a connection of the proxy's own client code.
//!
//! Most subscribers decode only what the measurement needs, so that thousands of them share a core.
//! Some are the proxy's complete [`Discovery`], whose targets are compared with the cluster at the
//! end. Some subscribe and then do not read.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use bytes::Bytes;
use diy_mesh_proto::mesh::v1::{
    Delta, DiscoverRequest, ProxyStatus, ResourceType, Snapshot, Subscribe,
    discover_request::Action,
};
use diy_mesh_proxy::discovery::{self, OwnProxy, TargetKind};
use diy_mesh_proxy::observe::exceptions::Exceptions;
use diy_mesh_proxy::observe::metrics::DiscoveryMetrics;
use diy_mesh_proxy::secure::control::Control;
use diy_mesh_proxy::secure::identity::{self, Trust};
use http::uri::PathAndQuery;
use prost::Message;
use tokio::{sync::Semaphore, time::sleep};
use tokio_stream::StreamExt;
use tonic::{Streaming, client::Grpc};
use tonic_prost::ProstCodec;

use super::{
    cluster,
    progress::{Position, Progress},
};

/// The back-off of the proxy.
const MIN_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(10);

/// The use of responses by a subscriber.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Decodes changes of the large Service.
    Stream,
    /// Is the discovery of a proxy.
    Discovery,
    /// Does not read.
    Stuck,
}

/// A proxy that subscribes to its destinations.
pub struct Subscriber {
    /// Its number, which selects its destinations.
    pub number: usize,
    /// Its use of responses.
    pub kind: Kind,
    /// Client with the token of its pod.
    pub control: Control,
    /// Receives what it knows.
    pub progress: Arc<Progress>,
}

/// A response with undecoded content. It has the fields of `DiscoverResponse`.
#[derive(Clone, PartialEq, Message)]
struct RawResponse {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(bytes = "bytes", optional, tag = "3")]
    snapshot: Option<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "4")]
    delta: Option<Bytes>,
    #[prost(bool, tag = "11")]
    more: bool,
}

impl Subscriber {
    /// Subscribes, again after each failure with the proxy's back-off. `connecting` limits the
    /// first connections. Never returns.
    pub async fn run(self, connecting: Arc<Semaphore>) {
        let mut failures = 0;
        let mut permit = connecting.acquire_owned().await.ok();
        loop {
            let mut position = self.progress.position(permit.take());
            let result = match self.kind {
                Kind::Stream => self.follow(&mut position).await,
                Kind::Discovery => self.discover(&mut position).await,
                Kind::Stuck => self.hold(&mut position).await,
            };
            // Successful streams end with the controller.
            failures = if position.is_complete() {
                1
            } else {
                failures + 1
            };
            if let Err(error) = result {
                self.progress.failed(&error);
            }
            drop(position);
            let ceiling = MIN_BACKOFF
                .saturating_mul(1 << failures.min(8))
                .min(MAX_BACKOFF);
            sleep(ceiling.mul_f64(fastrand::f64())).await;
        }
    }

    async fn follow(&self, position: &mut Position) -> Result<()> {
        let mut responses = self.open().await?;
        let mut expected = cluster::destinations(self.number);
        let hot = expected[0].to_string();
        while let Some(response) = responses.message().await.context("read a response")? {
            let RawResponse {
                name,
                snapshot,
                delta,
                more,
            } = response;
            if name.is_empty() {
                // The roots, or the inbound configuration of the pod.
                continue;
            }
            let address: SocketAddr = name.parse().context("read a destination")?;
            expected.retain(|missing| more || *missing != address);
            if name == hot {
                let upserted = match (delta, snapshot) {
                    (Some(delta), _) => Delta::decode(delta).context("decode a delta")?.upserted,
                    // The first one has no change that is measured, and is large.
                    (None, Some(snapshot)) if position.is_complete() => {
                        Snapshot::decode(snapshot)
                            .context("decode a snapshot")?
                            .endpoints
                    }
                    _ => Vec::new(),
                };
                let addresses = upserted
                    .iter()
                    .filter_map(|endpoint| endpoint.address.parse().ok());
                position.advance(addresses);
            }
            if expected.is_empty() {
                position.complete();
            }
        }
        Ok(())
    }

    /// Opens a stream with subscriptions to all destinations, without known versions.
    async fn open(&self) -> Result<Streaming<RawResponse>> {
        let own_pod = Subscribe {
            r#type: ResourceType::Self_.into(),
            ..Subscribe::default()
        };
        let mut requests = vec![Action::Status(status()), Action::Subscribe(own_pod)];
        requests.extend(
            cluster::destinations(self.number)
                .iter()
                .map(|destination| {
                    Action::Subscribe(Subscribe {
                        name: destination.to_string(),
                        ..Subscribe::default()
                    })
                }),
        );
        let requests = requests.into_iter().map(|action| DiscoverRequest {
            action: Some(action),
        });
        // The stream of requests stays open.
        let requests = tokio_stream::iter(requests).chain(tokio_stream::pending());
        let request = self.control.discovery_request(requests).await?;
        let mut client =
            Grpc::new(self.control.connect().await?).max_decoding_message_size(16 * 1024 * 1024);
        client.ready().await.context("wait for the connection")?;
        let path = PathAndQuery::from_static("/mesh.v1.ServiceMeshService/Discover");
        let codec = ProstCodec::<DiscoverRequest, RawResponse>::default();
        let response = client.streaming(request, path, codec).await;
        Ok(response.context("open a discovery stream")?.into_inner())
    }

    /// Opens a stream and reads nothing until the controller restarts.
    async fn hold(&self, position: &mut Position) -> Result<()> {
        let mut restarts = self.progress.restarts();
        let _unread = self.open().await?;
        position.connected();
        let _ = restarts.changed().await;
        Ok(())
    }

    /// Runs the discovery of a proxy, a new one after each restart of the controller.
    async fn discover(&self, position: &mut Position) -> Result<()> {
        let mut restarts = self.progress.restarts();
        let (discovery, driver) = discovery::start(
            self.control.clone(),
            Trust::default(),
            identity::none(),
            DiscoveryMetrics::default(),
            Arc::new(Exceptions::new(Instant::now())),
            OwnProxy::default(),
        );
        let driver = tokio::spawn(driver);
        let mut targets = Vec::new();
        for destination in cluster::destinations(self.number) {
            let mut target = discovery.watch(destination).await;
            while target.borrow_and_update().kind != TargetKind::Service {
                target.changed().await.context("the discovery has ended")?;
            }
            targets.push(target);
        }
        let mut hot = targets.swap_remove(0);
        position.complete();
        loop {
            let target = hot.borrow_and_update().clone();
            if target.kind == TargetKind::Service {
                let endpoints = target.endpoints.iter();
                let meshed = endpoints.filter(|endpoint| endpoint.identity.is_some());
                let addresses: Vec<_> = meshed.map(|endpoint| endpoint.address).collect();
                position.advance(addresses.iter().copied());
                self.progress.set_target(self.number, addresses);
            }
            tokio::select! {
                changed = hot.changed() => if changed.is_err() { break },
                _ = restarts.changed() => break,
            }
        }
        driver.abort();
        Ok(())
    }
}

/// The status of a proxy with a certificate.
fn status() -> ProxyStatus {
    ProxyStatus {
        roots_version: "5d41402abc4b2a76b9719d911017c592".to_owned(),
        certificate_not_before: 1_700_000_000,
        certificate_not_after: 1_700_086_400,
        certificate_serial: "4b1f7c0e2f2b4a0e8f430d8f6c9d7e21".to_owned(),
        certificate_issuer: "5b1f7c0e2f2b4a0e8f430d8f6c9d7e215b1f7c0e".to_owned(),
        proxy_version: env!("CARGO_PKG_VERSION").to_owned(),
        clock: 0,
    }
}
