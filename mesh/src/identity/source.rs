//! Reading of the certificate status from the admin ports of the controller replicas, through the
//! API server or from given URLs.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use clap::Args;
use diy_mesh_runtime::error_chain;
use futures::future::join_all;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, Uri};
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::ListParams};
use tokio::time::timeout;

use super::status::Status;
use crate::cluster::{self, Cluster, ConnectError};

/// The source of the certificate status.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Arguments {
    /// The cluster.
    #[command(flatten)]
    pub cluster: cluster::Arguments,
    /// URL of a controller to query instead of those of the cluster, for example
    /// http://127.0.0.1:8081; repeatable
    #[arg(long, value_name = "URL", value_parser = status_url, conflicts_with_all = ["context", "namespace"])]
    pub controller: Vec<Uri>,
}

/// The replicas of the controller.
#[derive(Clone)]
pub enum Source {
    /// The pods of a cluster.
    Cluster(Box<Cluster>),
    /// The status URLs of admin servers.
    Urls(Vec<Uri>),
}

/// The status cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection to the cluster failed.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The pods cannot be listed.
    #[error("failed to list the controller pods in namespace {0}: {1}")]
    Pods(String, String),
    /// No controller pod is running.
    #[error(
        "no running controller found in namespace {0}: if Deployment controller exists there, scale it up or see its pods (kubectl describe -n {0} deployment/controller); else install the mesh there, or set its namespace with --namespace"
    )]
    NoPods(String),
    /// No replica responds.
    #[error("no controller responds: {0}")]
    Unreachable(String),
}

/// The responses of the replicas.
#[derive(Clone, Debug, Default)]
pub struct Responses {
    /// The status by replica name or URL.
    pub replicas: BTreeMap<String, Status>,
    /// The errors of replicas that did not respond.
    pub unreachable: BTreeMap<String, String>,
}

/// The admin port of the controller.
const ADMIN_PORT: u16 = 8081;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The status of a mesh with ten thousand workloads has a tenth of this size.
const MAX_BODY_SIZE: usize = 64 << 20;

/// Parses the URL of a controller. Returns the URL of its status.
fn status_url(text: &str) -> Result<Uri, String> {
    let uri = format!("{}/identity", text.trim_end_matches('/')).parse::<Uri>();
    uri.ok()
        .filter(|uri| uri.scheme_str() == Some("http") && uri.host().is_some())
        .ok_or_else(|| "expected an HTTP URL such as http://127.0.0.1:8081".into())
}

impl Source {
    /// Connects to the cluster unless controller URLs are given.
    pub async fn new(arguments: &Arguments) -> Result<Self, Error> {
        if arguments.controller.is_empty() {
            return Ok(Self::Cluster(Box::new(
                Cluster::connect(&arguments.cluster).await?,
            )));
        }
        Ok(Self::Urls(arguments.controller.clone()))
    }

    /// Reads the status of all replicas concurrently. Fails if none responds.
    pub async fn fetch(&self) -> Result<Responses, Error> {
        let texts = match self {
            Self::Urls(urls) => {
                let client = &HttpClient::builder(TokioExecutor::new()).build_http();
                let read = |url: &Uri| {
                    let (name, url) = (url.authority().map(ToString::to_string), url.clone());
                    async move { (name.unwrap_or_default(), get(client, url).await) }
                };
                join_all(urls.iter().map(read)).await
            }
            Self::Cluster(cluster) => {
                let read = |name: String| async move {
                    let text = through_api_server(cluster, &name).await;
                    (name, text)
                };
                join_all(controllers(cluster).await?.into_iter().map(read)).await
            }
        };
        let mut responses = Responses::default();
        for (name, text) in texts {
            match text.and_then(|text| {
                serde_json::from_str(&text).map_err(|error| format!("invalid response: {error}"))
            }) {
                Ok(status) => drop(responses.replicas.insert(name, status)),
                Err(error) => drop(responses.unreachable.insert(name, error)),
            }
        }
        if responses.replicas.is_empty() {
            let errors: Vec<String> = responses
                .unreachable
                .iter()
                .map(|(name, error)| format!("{name}: {error}"))
                .collect();
            return Err(Error::Unreachable(errors.join("; ")));
        }
        Ok(responses)
    }
}

/// The names of the running controller pods.
pub async fn controllers(cluster: &Cluster) -> Result<Vec<String>, Error> {
    let namespace = &cluster.namespace;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    let pods = pods
        .list(&ListParams::default().labels("app=controller"))
        .await;
    let pods =
        pods.map_err(|error| Error::Pods(namespace.clone(), cluster::describe_error(&error)))?;
    let running = pods.items.into_iter().filter(|pod| {
        pod.metadata.deletion_timestamp.is_none()
            && pod
                .status
                .as_ref()
                .is_some_and(|status| status.phase.as_deref() == Some("Running"))
    });
    let names: Vec<String> = running.filter_map(|pod| pod.metadata.name).collect();
    if names.is_empty() {
        Err(Error::NoPods(namespace.clone()))
    } else {
        Ok(names)
    }
}

async fn through_api_server(cluster: &Cluster, pod: &str) -> Result<String, String> {
    let path = format!(
        "/api/v1/namespaces/{}/pods/{pod}:{ADMIN_PORT}/proxy/identity",
        cluster.namespace
    );
    let request = Request::get(path)
        .body(Vec::new())
        .map_err(|error| error.to_string())?;
    match timeout(REQUEST_TIMEOUT, cluster.client.request_text(request)).await {
        Ok(response) => response.map_err(|error| cluster::describe_error(&error)),
        Err(_) => Err(format!("timed out after {} s", REQUEST_TIMEOUT.as_secs())),
    }
}

/// Sends a GET request, again if the connection was closed without a response: a controller that
/// stops closes its connections, and one that is ready waits for a request only shortly.
async fn get(client: &HttpClient<HttpConnector, Empty<Bytes>>, url: Uri) -> Result<String, String> {
    let response = async {
        let response = match client.get(url.clone()).await {
            Err(error) if is_incomplete(&error) => client.get(url).await,
            response => response,
        };
        let response = response.map_err(|error| error_chain(&error))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_BODY_SIZE)
            .collect()
            .await
            .map_err(|error| error.to_string())?
            .to_bytes();
        let text = String::from_utf8_lossy(&body).into_owned();
        if status.is_success() {
            Ok(text)
        } else {
            Err(format!("status {status}: {}", text.trim()))
        }
    };
    timeout(REQUEST_TIMEOUT, response)
        .await
        .unwrap_or_else(|_| Err(format!("timed out after {} s", REQUEST_TIMEOUT.as_secs())))
}

fn is_incomplete(error: &hyper_util::client::legacy::Error) -> bool {
    let source = std::error::Error::source(error);
    source
        .and_then(|source| source.downcast_ref::<hyper::Error>())
        .is_some_and(hyper::Error::is_incomplete_message)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn asks_again_after_a_close_without_a_response() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        let controller = async {
            for response in [&b""[..], b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"] {
                let (mut stream, _) = listener.accept().await.expect("a connection");
                stream.read_exact(&mut [0; 4]).await.expect("a request");
                stream
                    .write_all(response)
                    .await
                    .expect("an open connection");
                stream.shutdown().await.expect("an open connection");
                // The rest of the request, so that the close is no reset.
                let _ = stream.read_to_end(&mut Vec::new()).await;
            }
        };
        let client = HttpClient::builder(TokioExecutor::new()).build_http();
        let url = format!("http://{address}/identity").parse().expect("a URL");
        let (text, ()) = tokio::join!(get(&client, url), controller);
        assert_eq!(text.as_deref(), Ok("{}"));
    }
}
