//! The proxies of a cluster, asked directly: by port-forward to their pods. Needs the right
//! `pods/portforward` in their namespaces, and no controller.

use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use diy_mesh_model::exchange::{Direction, Exchange, ExchangeId, Recent};
use diy_mesh_model::state::State;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, client::conn::http1, header::HOST};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::ListParams};
use serde::de::DeserializeOwned;

use crate::{
    check::pods,
    cluster::{self, Cluster, describe_error},
    why::{Record, Story},
};

const TIMEOUT: Duration = Duration::from_secs(10);
/// The length of a page, whose proxy may be hostile.
const MAX_PAGE: usize = 4 << 20;
/// The pods of a workload that are asked.
const MAX_PODS: usize = 16;

/// The proxies of a cluster.
pub struct Proxies<'a> {
    /// The cluster.
    pub cluster: &'a Cluster,
}

/// What keeps a proxy from being asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The pods cannot be listed.
    #[error("failed to list pods: {0}")]
    Pods(String),
    /// There is no such pod.
    #[error("no pod with a proxy of the mesh is {0}")]
    NoPod(String),
    /// The proxy does not respond.
    #[error("the proxy of {pod} cannot be asked: {reason}")]
    Proxy {
        /// Namespace and name of the pod.
        pod: String,
        /// The cause.
        reason: String,
    },
}

impl Proxies<'_> {
    /// The pods with a proxy that are named `NAME` or belong to a workload of that name, at most 16.
    pub async fn named(&self, namespace: &str, name: &str) -> Result<Vec<Pod>, Error> {
        let of_workload = format!("{name}-");
        let api = Api::namespaced(self.cluster.client.clone(), namespace);
        let listed = cluster::list(api, &ListParams::default()).await;
        let listed: Vec<Pod> = listed.map_err(|error| Error::Pods(describe_error(error)))?;
        let mut found: Vec<Pod> = pods::meshed(&listed).cloned().collect();
        found.retain(|pod| {
            let pod = pod.name_any();
            pod == name || pod.starts_with(&of_workload)
        });
        found.truncate(MAX_PODS);
        if found.is_empty() {
            return Err(Error::NoPod(format!("{namespace}/{name}")));
        }
        Ok(found)
    }

    /// The pod with this address: among those of all namespaces, or of the own one, if not all may
    /// be listed.
    async fn at(&self, address: IpAddr) -> Result<Pod, Error> {
        let client = &self.cluster.client;
        let params = ListParams::default().fields(&format!("status.podIP={address}"));
        let mut listed = cluster::list::<Pod>(Api::all(client.clone()), &params).await;
        if matches!(&listed, Err(kube::Error::Api(status)) if status.code == 403) {
            listed = cluster::list(Api::default_namespaced(client.clone()), &params).await;
        }
        let listed = listed.map_err(|error| Error::Pods(describe_error(error)))?;
        let found = pods::meshed(&listed).next().cloned();
        found.ok_or_else(|| Error::NoPod(format!("at {address}")))
    }

    /// The recent exchanges of a pod that a query asks for.
    pub async fn recent(&self, pod: &Pod, query: &str) -> Result<Recent, Error> {
        self.ask(pod, &format!("/exchanges?{query}")).await
    }

    /// What is in force in the proxy of a pod that a query asks for.
    pub async fn state(&self, pod: &Pod, query: &str) -> Result<State, Error> {
        self.ask(pod, &format!("/state?{query}")).await
    }

    async fn ask<T: DeserializeOwned>(&self, pod: &Pod, path: &str) -> Result<T, Error> {
        let page = tokio::time::timeout(TIMEOUT, self.page(pod, path)).await;
        let page = page.unwrap_or_else(|_| Err("timed out".into()));
        let value = page.and_then(|page| {
            serde_json::from_slice(&page).map_err(|error| format!("unexpected response: {error}"))
        });
        value.map_err(|reason| Error::Proxy {
            pod: pods::name(pod),
            reason,
        })
    }

    async fn page(&self, pod: &Pod, path: &str) -> Result<Bytes, String> {
        let api: Api<Pod> = Api::namespaced(
            self.cluster.client.clone(),
            &pod.namespace().unwrap_or_default(),
        );
        let port = pods::admin_port(pod);
        let forwarder = api.portforward(&pod.name_any(), &[port]).await;
        let mut forwarder = forwarder.map_err(describe_error)?;
        let stream = forwarder.take_stream(port).ok_or("no stream")?;
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| error.to_string())?;
        // It ends with the response: the proxy closes.
        tokio::spawn(connection);
        let request = Request::get(path).header(HOST, "proxy");
        let request = request.body(Empty::<Bytes>::new());
        let request = request.map_err(|error| error.to_string())?;
        let response = sender.send_request(request).await;
        let response = response.map_err(|error| error.to_string())?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_PAGE).collect().await;
        let body = body.map_err(|error| error.to_string())?.to_bytes();
        if status.is_success() {
            return Ok(body);
        }
        let text = String::from_utf8_lossy(&body);
        Err(format!("{status}: {}", text.trim()))
    }

    /// What is known of an exchange: the proxy of the pod that it names is asked, then that of the
    /// endpoint.
    pub async fn story(&self, id: ExchangeId) -> Result<Story, Error> {
        let pod = self.at(id.pod).await?;
        let known = self.recent(&pod, &format!("id={id}")).await?;
        let Some(exchange) = known.exchanges.into_iter().next_back() else {
            let missing = format!(
                "The proxy of {} no longer knows exchange {id}: it keeps the latest 256 failures and 256 others.",
                pods::name(&pod)
            );
            return Ok(Story {
                missing: vec![missing],
                ..Story::default()
            });
        };
        Ok(self.complete(&pod, exchange).await)
    }

    /// The story of an exchange that one proxy knows.
    pub async fn complete(&self, pod: &Pod, exchange: Exchange) -> Story {
        let record = Record {
            pod: pods::name(pod),
            exchange,
        };
        if record.exchange.direction == Direction::Inbound {
            return Story {
                callee: Some(record),
                ..Story::default()
            };
        }
        let (callee, missing) = match self.callee(&record.exchange).await {
            Ok(callee) => (callee, None),
            Err(error) => (None, Some(format!("The callee is unknown: {error}."))),
        };
        Story {
            caller: Some(record),
            callee,
            missing: missing.into_iter().collect(),
        }
    }

    /// The record of the callee's proxy: of the same identifier, or of the opaque connection between
    /// the same addresses. None if nothing was sent to a proxy.
    async fn callee(&self, exchange: &Exchange) -> Result<Option<Record>, Error> {
        let course = exchange.course.as_ref();
        let last = course.and_then(|course| course.attempts.last());
        let Some(last) = last.filter(|last| last.identity.is_some()) else {
            return Ok(None);
        };
        let local = course.and_then(|course| course.local);
        let pod = self.at(last.endpoint.ip()).await?;
        let query = match (local, exchange.id) {
            (None, Some(id)) => format!("id={id}"),
            _ => "after=0".into(),
        };
        let known = self.recent(&pod, &query).await?.exchanges;
        let found = known.into_iter().rev().find(|other| match local {
            Some(local) => other.peer == local,
            None => other.id == exchange.id && other.direction != exchange.direction,
        });
        Ok(found.map(|exchange| Record {
            pod: pods::name(&pod),
            exchange,
        }))
    }
}
