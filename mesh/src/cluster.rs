//! The cluster that the user's kubeconfig names, for the commands that look at a mesh in it. It finds the way there and says
//! clearly when there is none; what is asked is the commands' business.

use std::time::Duration;

use clap::Args;
use k8s_openapi::apimachinery::pkg::version::Info;
use kube::{Client, Config, config::KubeConfigOptions};

/// Which cluster, and where the mesh is in it.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Arguments {
    /// The context of the kubeconfig, if not its current one
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
    /// The mesh's own namespace
    #[arg(short, long, value_name = "NAME", default_value = "service-mesh")]
    pub namespace: String,
}

/// A cluster that answers.
#[derive(Clone)]
pub struct Cluster {
    /// To ask it.
    pub client: Client,
    /// The mesh's own namespace.
    pub namespace: String,
    /// The API server's version.
    pub version: Info,
}

/// There is no cluster to look at.
#[derive(Debug, thiserror::Error)]
pub enum NoCluster {
    /// No kubeconfig, and not in a cluster either.
    #[error("no cluster: {0}; set KUBECONFIG to the file that names yours")]
    Config(String),
    /// The kubeconfig has no such context, or cannot be read or used.
    #[error("no cluster: {0}; `kubectl config get-contexts` lists them")]
    Context(String),
    /// It does not answer.
    #[error(
        "no cluster: {server} does not answer as one: {error}; is it running, and is the kubeconfig the right one?"
    )]
    Silent {
        /// Where it should be.
        server: String,
        /// What happened.
        error: String,
    },
}

const PATIENCE: Duration = Duration::from_secs(10);

impl Cluster {
    /// Connects, and makes sure that it answers.
    pub async fn connect(arguments: &Arguments) -> Result<Self, NoCluster> {
        let mut config = match &arguments.context {
            None => Config::infer()
                .await
                .map_err(|error| NoCluster::Config(error.to_string()))?,
            context => {
                let options = KubeConfigOptions {
                    context: context.clone(),
                    ..KubeConfigOptions::default()
                };
                Config::from_kubeconfig(&options)
                    .await
                    .map_err(|error| NoCluster::Context(with_causes(&error)))?
            }
        };
        config.connect_timeout = Some(PATIENCE);
        config.read_timeout = Some(Duration::from_secs(30));
        let server = config.cluster_url.to_string();
        let client =
            Client::try_from(config).map_err(|error| NoCluster::Context(with_causes(&error)))?;
        let version = match tokio::time::timeout(PATIENCE, client.apiserver_version()).await {
            Ok(Ok(version)) => version,
            Ok(Err(error)) => {
                return Err(NoCluster::Silent {
                    server,
                    error: with_causes(&error),
                });
            }
            Err(_) => {
                return Err(NoCluster::Silent {
                    server,
                    error: format!("no answer within {} s", PATIENCE.as_secs()),
                });
            }
        };
        Ok(Self {
            client,
            namespace: arguments.namespace.clone(),
            version,
        })
    }
}

/// An error with what caused it, each once.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// What the API server said no to, or what went wrong on the way there, in a few words.
pub fn short(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if status.code == 403 => {
            format!("not allowed: {}", status.message)
        }
        kube::Error::Api(status) => status.message.clone(),
        other => with_causes(other),
    }
}
