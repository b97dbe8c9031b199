//! The connection to the cluster of the user's kubeconfig.

use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::{Arg, Args};
use diy_mesh_runtime::error_chain;
use futures::AsyncReadExt;
use hyper::Request;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::version::Info;
use kube::{
    Api, Client, Config,
    api::{ListParams, ObjectList, ObjectMeta},
    config::KubeConfigOptions,
    core::{ApiResource, DynamicObject},
};
use serde::de::DeserializeOwned;

/// The cluster, the namespace of the mesh, and the namespace of a command's objects.
#[derive(Args, Clone, Debug, Default)]
#[group(skip)]
pub struct Arguments {
    /// Context of the kubeconfig [default: the current context]
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
    /// Namespace of the mesh
    #[arg(long, value_name = "NAME", default_value = "service-mesh")]
    pub mesh_namespace: String,
    /// Namespace of the listed objects, and of names without one [default: all, and the namespace
    /// of the context]
    #[arg(short, long, value_name = "NAME")]
    pub namespace: Option<String>,
}

/// A reachable cluster.
#[derive(Clone)]
pub struct Cluster {
    /// The client of the API server.
    pub client: Client,
    /// The namespace of the mesh.
    pub mesh_namespace: String,
    /// The version of the API server.
    pub version: Info,
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const READ_TIMEOUT: Duration = Duration::from_secs(30);
const ADMIN_PAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// The length of a page of an admin server, which may be hostile.
const MAX_ADMIN_PAGE_BYTES: u64 = 1024 * 1024;

/// For commands about the whole mesh, which have no namespace: `--namespace` is an error.
pub(crate) fn no_namespace(argument: Arg) -> Arg {
    let error = "this command is about the whole mesh: --mesh-namespace names its namespace";
    let reject = move |_: &str| Err::<String, _>(error);
    argument.hide(true).value_parser(reject)
}

impl Arguments {
    /// `NAMESPACE/NAME` of `[NAMESPACE/]NAME`, by default in the given namespace, or in the
    /// namespace of the context.
    pub async fn full_name(&self, name: &str) -> String {
        let config = self.config().await.ok();
        let namespace = config.map(|config| config.default_namespace);
        let namespace = namespace.or_else(|| self.namespace.clone());
        full_name(name, namespace.as_deref().unwrap_or("default"))
    }

    /// The configuration of the context, with the given namespace.
    async fn config(&self) -> Result<Config> {
        let mut config = match &self.context {
            None => Config::infer().await.map_err(|error| {
                anyhow!(
                    "no cluster configured: {error}; set KUBECONFIG to the path of your kubeconfig"
                )
            })?,
            context => {
                let options = KubeConfigOptions {
                    context: context.clone(),
                    ..KubeConfigOptions::default()
                };
                let config = Config::from_kubeconfig(&options).await;
                config.map_err(|error| invalid_kubeconfig(&error))?
            }
        };
        if let Some(namespace) = &self.namespace {
            config.default_namespace.clone_from(namespace);
        }
        Ok(config)
    }
}

impl Cluster {
    /// Connects and reads the version of the API server.
    pub async fn connect(arguments: &Arguments) -> Result<Self> {
        let mut config = arguments.config().await?;
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        config.read_timeout = Some(READ_TIMEOUT);
        // Retries would hide the responses with the status 503 of proxies that are not ready.
        config.default_retry = false;
        let server = config.cluster_url.to_string();
        let client = Client::try_from(config).map_err(|error| invalid_kubeconfig(&error))?;
        let version = tokio::time::timeout(CONNECT_TIMEOUT, client.apiserver_version()).await;
        let version = match version {
            Ok(version) => version.map_err(|error| error_chain(&error)),
            Err(_) => Err(format!("timed out after {} s", CONNECT_TIMEOUT.as_secs())),
        };
        let version = version.map_err(|error| {
            anyhow!(
                "failed to connect to the API server at {server}: {error}; check that the cluster is running and the kubeconfig is correct"
            )
        })?;
        Ok(Self {
            client,
            mesh_namespace: arguments.mesh_namespace.clone(),
            version,
        })
    }

    /// Reads a page of the admin server of a pod through the API server. That takes the right to
    /// get `pods/proxy`. A port-forward (`proxies`) takes a right to create, which accounts for
    /// reading rarely have. `path` is `POD:PORT/proxy/PAGE`. The text of an error is the page: one
    /// that is not ready has the status 503.
    pub(crate) async fn admin_page(&self, namespace: &str, path: &str) -> Result<String, String> {
        let request = Request::get(format!("/api/v1/namespaces/{namespace}/pods/{path}"));
        let request = request.body(Vec::new());
        let request = request.map_err(|error| error.to_string())?;
        let read = async {
            let body = self.client.request_stream(request).await;
            let body = body.map_err(describe_error)?;
            let mut text = Vec::new();
            let mut body = Box::pin(body).take(MAX_ADMIN_PAGE_BYTES);
            let read = body.read_to_end(&mut text).await;
            read.map_err(|error| error.to_string())?;
            Ok(String::from_utf8_lossy(&text).into_owned())
        };
        let read = tokio::time::timeout(ADMIN_PAGE_TIMEOUT, read).await;
        read.unwrap_or_else(|_| Err(format!("{path} does not respond")))
    }
}

fn invalid_kubeconfig(error: &(dyn std::error::Error + 'static)) -> anyhow::Error {
    let error = error_chain(error);
    anyhow!(
        "failed to load the kubeconfig: {error}; list its contexts with `kubectl config get-contexts`"
    )
}

/// `NAMESPACE/NAME` of `[NAMESPACE/]NAME`.
pub(crate) fn full_name(name: &str, default: &str) -> String {
    let (namespace, name) = name.split_once('/').unwrap_or((default, name));
    format!("{namespace}/{name}")
}

/// The objects of a namespace, or of all.
pub(crate) fn objects<K>(client: &Client, only: Option<&str>) -> Api<K>
where
    K: kube::Resource<Scope = NamespaceResourceScope>,
    K::DynamicType: Default,
{
    match only {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// The objects of a kind, of a namespace, or of all.
pub(crate) fn dynamic(
    client: &Client,
    resource: &ApiResource,
    only: Option<&str>,
) -> Api<DynamicObject> {
    match only {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, resource),
        None => Api::all_with(client.clone(), resource),
    }
}

/// Lists all objects, page by page. A kind that is not installed has no objects.
pub(crate) async fn list<K>(api: Api<K>, params: &ListParams) -> Result<Vec<K>, String>
where
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    let api = &api;
    pages(params, |params| async move { api.list(&params).await }).await
}

/// The metadata of all objects, page by page. A kind that is not installed has no objects.
pub(crate) async fn list_metadata<K>(
    api: Api<K>,
    params: &ListParams,
) -> Result<Vec<ObjectMeta>, String>
where
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    let api = &api;
    let page = |params| async move { api.list_metadata(&params).await };
    let items = pages(params, page).await?;
    Ok(items.into_iter().map(|one| one.metadata).collect())
}

async fn pages<T: Clone, F>(
    params: &ListParams,
    list: impl Fn(ListParams) -> F,
) -> Result<Vec<T>, String>
where
    F: Future<Output = kube::Result<ObjectList<T>>>,
{
    let mut params = params.clone().limit(500);
    let mut items = Vec::new();
    loop {
        let page = match list(params.clone()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(items),
            page => page.map_err(describe_error)?,
        };
        items.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(items),
        }
    }
}

/// The beginning of an error for lack of rights.
pub(crate) const FORBIDDEN: &str = "forbidden: ";

/// Formats an error of the Kubernetes API.
pub fn describe_error(error: kube::Error) -> String {
    match error {
        kube::Error::Api(status) if status.code == 403 => format!("{FORBIDDEN}{}", status.message),
        kube::Error::Api(status) => status.message,
        other => error_chain(&other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn names_are_in_the_given_namespace_unless_they_have_their_own() {
        let arguments = Arguments {
            namespace: Some("shop".into()),
            ..Arguments::default()
        };
        assert_eq!(arguments.full_name("web").await, "shop/web");
        assert_eq!(arguments.full_name("till/web").await, "till/web");
        if let Ok(config) = arguments.config().await {
            assert_eq!(config.default_namespace, "shop");
        }
    }
}
