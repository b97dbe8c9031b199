//! The facts that the checks look at: objects of the cluster, what the controllers say, and one trial. All are asked for at the same
//! time; what cannot be had is kept as the reason why.

use k8s_openapi::{
    api::{
        admissionregistration::v1::MutatingWebhookConfiguration,
        apps::v1::Deployment,
        core::v1::{ConfigMap, Namespace, Node, Pod, Secret},
    },
    apimachinery::pkg::version::Info,
};
use kube::{
    Api, Resource,
    api::{ListParams, PostParams},
};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::join;

use super::rights::{self, Access};
use crate::{
    cluster::{self, Cluster},
    identity::{source::Source, status::Mesh},
    time::now,
};

/// A fact, or why it is not known.
pub type Known<T> = Result<T, String>;

/// Everything that is looked at.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The mesh's own namespace.
    pub namespace: String,
    /// Seconds since 1970.
    pub now: u64,
    /// The API server's.
    pub version: Info,
    /// With their kubelets' versions.
    pub nodes: Known<Vec<Node>>,
    /// With their labels.
    pub namespaces: Known<Vec<Namespace>>,
    /// Of all namespaces.
    pub pods: Known<Vec<Pod>>,
    /// Those of the mesh.
    pub deployments: Known<Vec<Deployment>>,
    /// The mesh's, if it is there.
    pub webhook: Known<Option<MutatingWebhookConfiguration>>,
    /// The certificate that the injector serves, as PEM, if there is one.
    pub serving: Known<Option<String>>,
    /// The ConfigMaps with the mesh's roots.
    pub roots: Known<Vec<ConfigMap>>,
    /// What the controllers say of certificates.
    pub identity: Known<Mesh>,
    /// What the mesh's accounts must be allowed, and whether they are.
    pub rights: Known<Vec<(Access, bool)>>,
    /// What became of a pod that asks for the mesh.
    pub trial: Known<Trial>,
}

/// What became of a pod that asks for the mesh, and that nobody ever ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trial {
    /// It came back with a proxy.
    Injected,
    /// It came back as it was.
    LeftAlone,
    /// The webhook could not be called.
    Failed(String),
}

/// The name of the mesh's webhook configuration.
pub const WEBHOOK: &str = "diy-service-mesh-injector";
/// The name of the ConfigMaps with the mesh's roots.
pub const ROOTS: &str = "diy-service-mesh-roots";
const SERVING: &str = "diy-service-mesh-injector-tls";

impl Facts {
    /// Asks the cluster.
    pub async fn gather(cluster: &Cluster) -> Self {
        let (client, namespace) = (&cluster.client, cluster.namespace.as_str());
        let every = ListParams::default();
        let roots = ListParams::default().fields(&format!("metadata.name={ROOTS}"));
        let (all_nodes, all_namespaces, all_pods) = (
            Api::all(client.clone()),
            Api::all(client.clone()),
            Api::all(client.clone()),
        );
        let (own, all_maps) = (
            Api::namespaced(client.clone(), namespace),
            Api::all(client.clone()),
        );
        let source = Source::Cluster(Box::new(cluster.clone()));
        let (
            nodes,
            namespaces,
            pods,
            deployments,
            roots,
            webhook,
            serving,
            identity,
            rights,
            trial,
        ) = join!(
            list(&all_nodes, &every),
            list(&all_namespaces, &every),
            list(&all_pods, &every),
            list(&own, &every),
            list(&all_maps, &roots),
            webhook(cluster),
            serving(cluster),
            source.ask(),
            rights::ask(cluster),
            trial(cluster),
        );
        Self {
            namespace: namespace.to_owned(),
            now: now(),
            version: cluster.version.clone(),
            identity: identity.map(Mesh::of).map_err(|error| error.to_string()),
            nodes,
            namespaces,
            pods,
            deployments,
            webhook,
            serving,
            roots,
            rights,
            trial,
        }
    }
}

/// A list, page by page.
async fn list<K>(api: &Api<K>, params: &ListParams) -> Known<Vec<K>>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    let mut params = params.clone().limit(500);
    let mut items = Vec::new();
    loop {
        let page = api
            .list(&params)
            .await
            .map_err(|error| cluster::short(&error))?;
        items.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(items),
        }
    }
}

async fn webhook(cluster: &Cluster) -> Known<Option<MutatingWebhookConfiguration>> {
    let api = Api::all(cluster.client.clone());
    api.get_opt(WEBHOOK)
        .await
        .map_err(|error| cluster::short(&error))
}

/// Of the injector's Secret nothing but the certificate is kept.
async fn serving(cluster: &Cluster) -> Known<Option<String>> {
    let api: Api<Secret> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let secret = api
        .get_opt(SERVING)
        .await
        .map_err(|error| cluster::short(&error))?;
    let certificate = secret.and_then(|secret| secret.data?.remove("tls.crt"));
    Ok(certificate.map(|certificate| String::from_utf8_lossy(&certificate.0).into_owned()))
}

/// Has a pod made that asks for the mesh, as far as the API server goes without keeping it: the webhook is called as for any other.
async fn trial(cluster: &Cluster) -> Known<Trial> {
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), "default");
    let pod = json!({
        "metadata": {"name": "mesh-check-trial", "annotations": {"diy-service-mesh/inject": "true"}},
        "spec": {"containers": [{"name": "trial", "image": "mesh-check-trial", "ports": [{"containerPort": 8080}]}]},
    });
    let pod = serde_json::from_value(pod).map_err(|error| error.to_string())?;
    match api
        .create(
            &PostParams {
                dry_run: true,
                ..PostParams::default()
            },
            &pod,
        )
        .await
    {
        Ok(pod) if super::pods::is_injected(&pod) => Ok(Trial::Injected),
        Ok(_) => Ok(Trial::LeftAlone),
        Err(kube::Error::Api(status))
            if status.message.contains("calling webhook")
                && status.message.contains(WEBHOOK_DOMAIN) =>
        {
            Ok(Trial::Failed(status.message))
        }
        Err(error) => Err(cluster::short(&error)),
    }
}

const WEBHOOK_DOMAIN: &str = "injector.diy-service-mesh.dev";

/// Facts for tests: a mesh in which all is well, and one of which nothing is known.
#[cfg(test)]
pub(super) mod testing {
    use serde_json::Value;

    use super::*;

    pub(crate) const NOW: u64 = 1_800_000_000;

    pub(crate) fn object<T: DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).expect("a test's object")
    }

    pub(crate) fn untold() -> Facts {
        fn why<T>() -> Known<T> {
            Err("not allowed".into())
        }
        Facts {
            namespace: "service-mesh".into(),
            now: NOW,
            version: object(
                json!({"major": "1", "minor": "34", "gitVersion": "v1.34.1", "buildDate": "", "compiler": "", "gitCommit": "",
                "gitTreeState": "", "goVersion": "", "platform": ""}),
            ),
            nodes: why(),
            namespaces: why(),
            pods: why(),
            deployments: why(),
            webhook: why(),
            serving: why(),
            roots: why(),
            identity: why(),
            rights: why(),
            trial: why(),
        }
    }

    /// A pod of namespace `shop`, with these annotations.
    pub(crate) fn pod(name: &str, annotations: Value) -> Pod {
        object(json!({
            "metadata": {"namespace": "shop", "name": name, "annotations": annotations, "creationTimestamp": "2020-01-01T00:00:00Z"},
            "spec": {"containers": []}, "status": {"phase": "Running"},
        }))
    }

    /// One that is in the mesh, and whose proxy is in this state.
    pub(crate) fn meshed(name: &str, proxy: Value) -> Pod {
        let mut pod = pod(
            name,
            json!({"diy-service-mesh/inject": "true", "diy-service-mesh/status": "injected"}),
        );
        let spec = pod.spec.as_mut().expect("it has one");
        spec.init_containers = Some(vec![object(
            json!({"name": "proxy", "image": "diy-sm-proxy:1.0", "restartPolicy": "Always"}),
        )]);
        pod.status
            .as_mut()
            .expect("it has one")
            .init_container_statuses = Some(vec![object(proxy)]);
        pod
    }

    /// The state of a proxy that is well.
    pub(crate) fn ready() -> Value {
        json!({"name": "proxy", "ready": true, "started": true, "restartCount": 0, "image": "", "imageID": "", "state": {"running": {}}})
    }

    pub(crate) fn deployment(name: &str, available: i32, env: Value) -> Deployment {
        object(json!({
            "metadata": {"name": name},
            "spec": {"replicas": 2, "selector": {}, "template": {"spec": {"containers": [
                {"name": name, "image": format!("diy-sm-{name}:1.0"), "env": env}]}}},
            "status": {"availableReplicas": available},
        }))
    }
}
