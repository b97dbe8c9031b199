//! Where the controller's replicas are asked for what they know: each pod's admin port, through the API server, or URLs that the
//! user names. It reads and parses; `status` understands.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use clap::Args;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, Uri};
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::ListParams};
use tokio::{task::JoinSet, time::timeout};

use super::status::Status;
use crate::cluster::{self, Cluster, NoCluster};

/// How the controller is reached.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Arguments {
    /// Which cluster.
    #[command(flatten)]
    pub cluster: cluster::Arguments,
    /// Ask this controller instead of those of the cluster, for example http://127.0.0.1:8081; may be given again
    #[arg(long, value_name = "URL", conflicts_with_all = ["context", "namespace"])]
    pub controller: Vec<String>,
}

/// The controller's replicas.
#[derive(Clone)]
pub enum Source {
    /// The pods of a cluster.
    Cluster(Box<Cluster>),
    /// Admin servers.
    Urls(Vec<Uri>),
}

/// Why nothing is known.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no cluster.
    #[error(transparent)]
    NoCluster(#[from] NoCluster),
    /// What is no URL.
    #[error("--controller {0:?} is no URL such as http://127.0.0.1:8081")]
    Url(String),
    /// The pods cannot be listed.
    #[error("cannot list the controller's pods in namespace {0}: {1}")]
    Pods(String, String),
    /// There are none.
    #[error(
        "no controller runs in namespace {0}: is the mesh installed there? (kubectl get pods -n {0}; --namespace names another)"
    )]
    Nobody(String),
    /// None of them answers.
    #[error("no controller answers: {0}")]
    Silent(String),
}

/// What the replicas have said.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    /// By the replica's name or URL.
    pub replicas: BTreeMap<String, Status>,
    /// Who did not answer, and why.
    pub silent: BTreeMap<String, String>,
}

/// Which port of a controller serves it.
const ADMIN_PORT: u16 = 8081;
const PATIENCE: Duration = Duration::from_secs(10);
/// A mesh of ten thousand workloads takes a tenth of it.
const LARGEST: usize = 64 << 20;

impl Source {
    /// Finds out whom to ask.
    pub async fn new(arguments: &Arguments) -> Result<Self, Error> {
        if arguments.controller.is_empty() {
            return Ok(Self::Cluster(Box::new(
                Cluster::connect(&arguments.cluster).await?,
            )));
        }
        let urls = arguments.controller.iter().map(|text| {
            let uri = format!("{}/identity", text.trim_end_matches('/'))
                .parse::<Uri>()
                .ok();
            let uri = uri.filter(|uri| uri.scheme_str() == Some("http") && uri.host().is_some());
            uri.ok_or_else(|| Error::Url(text.clone()))
        });
        Ok(Self::Urls(urls.collect::<Result<_, _>>()?))
    }

    /// Asks all of them; it is an error where none answers.
    pub async fn ask(&self) -> Result<Answers, Error> {
        let mut tasks = JoinSet::new();
        match self {
            Self::Urls(urls) => {
                let client: HttpClient<HttpConnector, Empty<Bytes>> =
                    HttpClient::builder(TokioExecutor::new()).build_http();
                for url in urls {
                    let (client, url) = (client.clone(), url.clone());
                    tasks.spawn(async move {
                        (
                            url.authority()
                                .map_or_else(String::new, ToString::to_string),
                            get(&client, url).await,
                        )
                    });
                }
            }
            Self::Cluster(cluster) => {
                for name in controllers(cluster).await? {
                    let cluster = cluster.clone();
                    tasks.spawn(async move {
                        let answer = through_api_server(&cluster, &name).await;
                        (name, answer)
                    });
                }
            }
        }
        let mut answers = Answers::default();
        while let Some(answer) = tasks.join_next().await {
            let Ok((name, answer)) = answer else { continue };
            match answer.and_then(|text| {
                serde_json::from_str(&text)
                    .map_err(|error| format!("it answers something else: {error}"))
            }) {
                Ok(status) => drop(answers.replicas.insert(name, status)),
                Err(error) => drop(answers.silent.insert(name, error)),
            }
        }
        if answers.replicas.is_empty() {
            let silent: Vec<String> = answers
                .silent
                .iter()
                .map(|(name, why)| format!("{name}: {why}"))
                .collect();
            return Err(Error::Silent(silent.join("; ")));
        }
        Ok(answers)
    }
}

/// The names of the controller's pods.
async fn controllers(cluster: &Cluster) -> Result<Vec<String>, Error> {
    let namespace = &cluster.namespace;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    let pods = pods
        .list(&ListParams::default().labels("app=controller"))
        .await;
    let pods = pods.map_err(|error| Error::Pods(namespace.clone(), cluster::short(&error)))?;
    let running = pods.items.into_iter().filter(|pod| {
        pod.metadata.deletion_timestamp.is_none()
            && pod
                .status
                .as_ref()
                .is_some_and(|status| status.phase.as_deref() == Some("Running"))
    });
    let names: Vec<String> = running.filter_map(|pod| pod.metadata.name).collect();
    if names.is_empty() {
        Err(Error::Nobody(namespace.clone()))
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
    match timeout(PATIENCE, cluster.client.request_text(request)).await {
        Ok(answer) => answer.map_err(|error| cluster::short(&error)),
        Err(_) => Err(format!("no answer within {} s", PATIENCE.as_secs())),
    }
}

async fn get(client: &HttpClient<HttpConnector, Empty<Bytes>>, url: Uri) -> Result<String, String> {
    let answer = async {
        let response = client
            .get(url)
            .await
            .map_err(|error| cluster::with_causes(&error))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), LARGEST)
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
    timeout(PATIENCE, answer)
        .await
        .unwrap_or_else(|_| Err(format!("no answer within {} s", PATIENCE.as_secs())))
}
