//! The facts that the checks evaluate: objects of the cluster, the status of the controllers, and a
//! dry run of the injection. They are read concurrently. A fact that cannot be read is stored as
//! the error message.

use std::collections::{BTreeMap, BTreeSet};

use diy_mesh_controller::object::Kind;
use diy_mesh_injector::containers::ROOTS_CONFIG_MAP;
use diy_mesh_model::json;
use futures::future::join_all;
use k8s_openapi::{
    api::{
        admissionregistration::v1::MutatingWebhookConfiguration,
        apps::v1::Deployment,
        core::v1::{self, ConfigMap, Namespace, Node, Secret, Service},
    },
    apimachinery::pkg::version::Info,
};
use kube::{
    Api, Client, ResourceExt,
    api::{ListParams, PostParams},
    core::ApiResource,
};
use serde_json::{Value, json};
use tokio::join;

use super::permissions::{self, Permission};
use super::traces::{self, Traces};
use super::traffic::{self, Traffic};
use super::workloads::{self, Workload};
use super::{ALL_NAMESPACES, MAX_DETAILS, injection, upgrade};
use crate::pods;
use crate::{
    cluster::{self, Cluster, describe_error, list},
    controller::Controllers,
    identity::status::Mesh,
    pods::Pod,
    routes::{self, Route},
    time::now,
};

/// A fact, or the reason why it is unknown.
pub type Fact<T> = Result<T, String>;

/// The facts about a mesh.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The namespace of the mesh.
    pub namespace: String,
    /// The namespace that the facts are about. `None`: all.
    pub only: Option<String>,
    /// The current time, in seconds since 1970.
    pub now: u64,
    /// The version of the API server.
    pub version: Info,
    /// The nodes, with the versions of their kubelets.
    pub nodes: Fact<Vec<Node>>,
    /// The namespaces, with their labels.
    pub namespaces: Fact<Vec<Namespace>>,
    /// The pods of all namespaces.
    pub pods: Fact<Vec<Pod>>,
    /// The responses of proxies that are not ready to `/ready`, by `namespace/name` of the pod.
    pub ready_pages: BTreeMap<String, String>,
    /// The Services of all namespaces.
    pub services: Fact<Vec<Service>>,
    /// The controllers of pods in all namespaces.
    pub workloads: Fact<Vec<Workload>>,
    /// The Deployments in the namespace of the mesh.
    pub deployments: Fact<Vec<Deployment>>,
    /// The webhook configuration of the mesh, if it exists.
    pub webhook: Fact<Option<MutatingWebhookConfiguration>>,
    /// The serving certificate of the injector as PEM, if it exists.
    pub serving: Fact<Option<String>>,
    /// The ConfigMaps with the trust roots.
    pub roots: Fact<Vec<ConfigMap>>,
    /// The certificate status that the controllers report.
    pub identity: Fact<Mesh>,
    /// The permissions that the service accounts of the mesh need, and whether they are granted.
    pub permissions: Fact<Vec<(Permission, bool)>>,
    /// The definitions of the Gateway API and of policies that are installed, of those that the mesh
    /// uses.
    pub definitions: Fact<Vec<Value>>,
    /// The routes with Services as parents.
    pub routes: Fact<Vec<Route>>,
    /// The TrafficPolicies and AuthorizationPolicies of all namespaces.
    pub policies: Fact<Vec<Value>>,
    /// The judgement of this release about routes and policies.
    pub judgement: Fact<upgrade::Judgement>,
    /// The failures at the proxies in the last minute.
    pub traffic: Fact<Traffic>,
    /// The traces that a part of the proxies has counted, by workload.
    pub traces: BTreeMap<String, Traces>,
    /// The result of a dry run of the injection.
    pub dry_run: Fact<DryRun>,
}

/// The result of the dry-run creation of a pod that requests injection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DryRun {
    /// The pod has a proxy.
    Injected,
    /// The pod is unchanged.
    NotInjected,
    /// The API server failed to call the webhook.
    Failed(String),
}

/// The kinds that routes and policies refer to, and the kinds of SMI.
const OTHER_KINDS: [Kind; 7] = [
    Kind::Service,
    Kind::Grant,
    Kind::Backend,
    Kind::TrafficSplit,
    Kind::RouteGroup,
    Kind::TrafficTarget,
    Kind::TcpGroup,
];
/// The name of the webhook configuration.
pub const WEBHOOK: &str = "diy-service-mesh-injector";
/// The Secret with the serving certificate of the injector.
const SERVING_SECRET: &str = "diy-service-mesh-injector-tls";

impl Facts {
    /// Reads all facts from the cluster, of the objects of a namespace or of all.
    pub async fn gather(cluster: &Cluster, only: Option<&str>) -> Self {
        let (client, namespace) = (&cluster.client, cluster.mesh_namespace.as_str());
        let all = ListParams::default();
        let roots = ListParams::default().fields(&format!("metadata.name={ROOTS_CONFIG_MAP}"));
        let controllers = Controllers::of_cluster(cluster);
        let (
            nodes,
            namespaces,
            pods,
            services,
            deployments,
            roots,
            webhook,
            serving,
            identity,
            permissions,
            dry_run,
            workloads,
            definitions,
            routes,
            policies,
            others,
        ) = join!(
            list(Api::all(client.clone()), &all),
            namespaces(client, only),
            list(cluster::objects(client, only), &all),
            list(cluster::objects(client, only), &all),
            list(Api::namespaced(client.clone(), namespace), &all),
            list(cluster::objects(client, only), &roots),
            webhook(cluster),
            serving(cluster),
            controllers.identity(),
            permissions::review(cluster),
            dry_run(cluster, only),
            workloads::read(client, only),
            routes::definitions(client),
            routes::fetch(client, only, Kind::routes()),
            routes::fetch(client, only, [Kind::TrafficPolicy, Kind::Authorization]),
            others(client, only),
        );
        let objects = [&routes, &policies, &others].map(Clone::clone);
        let objects = objects.into_iter().collect::<Fact<Vec<_>>>();
        let judgement = objects.map(|objects| {
            let mut objects = objects.concat();
            objects.extend(pods_with_policies(&pods, &policies));
            upgrade::judge(&objects)
        });
        let routes = routes.map(|all| all.iter().filter_map(Route::read).collect());
        let now = now();
        let mut identity = identity.map(Mesh::merge).map_err(|error| error.to_string());
        if let (Ok(mesh), Some(only)) = (&mut identity, only) {
            mesh.keep_namespace(only);
        }
        let ready_pages = async {
            match &pods {
                Ok(pods) => ready_pages(cluster, pods, now).await,
                Err(_) => BTreeMap::new(),
            }
        };
        let (ready_pages, pages) = join!(ready_pages, traffic::pages(cluster, &pods));
        let traffic = Traffic::read(&identity, &pods, &pages);
        let traces = traces::count(&pods, &pages);
        Self {
            namespace: namespace.to_owned(),
            only: only.map(str::to_owned),
            now,
            version: cluster.version.clone(),
            identity,
            nodes,
            namespaces,
            pods,
            ready_pages,
            services,
            workloads,
            deployments,
            webhook,
            serving,
            roots,
            permissions,
            definitions,
            routes,
            policies,
            judgement,
            traffic,
            traces,
            dry_run,
        }
    }
}

/// The namespaces, or the only one, for which rights in it suffice.
async fn namespaces(client: &Client, only: Option<&str>) -> Fact<Vec<Namespace>> {
    let api = Api::all(client.clone());
    let Some(name) = only else {
        return list(api, &ListParams::default()).await;
    };
    let found = api.get_opt(name).await.map_err(describe_error)?;
    found.map_or_else(
        || Err(format!("there is no namespace {name}")),
        |found| Ok(vec![found]),
    )
}

/// The objects that routes and policies refer to, which may be in any namespace.
async fn others(client: &Client, only: Option<&str>) -> Fact<Vec<Value>> {
    match only {
        Some(_) => Err(ALL_NAMESPACES.to_owned()),
        None => routes::fetch(client, None, OTHER_KINDS).await,
    }
}

/// The pods of the namespaces with policies.
fn pods_with_policies(pods: &Fact<Vec<Pod>>, policies: &Fact<Vec<Value>>) -> Vec<Value> {
    let policies = policies.iter().flatten();
    let namespaces = policies.filter_map(|one| one["metadata"]["namespace"].as_str());
    let namespaces: BTreeSet<&str> = namespaces.collect();
    let pods = pods.iter().flatten();
    let pods = pods.filter(|pod| namespaces.contains(&*pod.namespace().unwrap_or_default()));
    let object = |pod: &Pod| {
        let mut object = json!(pod);
        object["apiVersion"] = "v1".into();
        object["kind"] = "Pod".into();
        object
    };
    pods.map(object).collect()
}

/// Reads `/ready` of the proxies that are not ready. The text of an error is the page: a proxy that is
/// not ready responds with 503.
async fn ready_pages(cluster: &Cluster, pods: &[Pod], now: u64) -> BTreeMap<String, String> {
    let read = async |pod: &Pod| {
        let page = admin_page(cluster, pod, "ready").await;
        (pods::name(pod), page.unwrap_or_else(|error| error))
    };
    let unready = injection::unready_proxies(pods, now).take(MAX_DETAILS);
    join_all(unready.map(read)).await.into_iter().collect()
}

/// Reads a page of the admin server of a proxy.
pub(super) async fn admin_page(cluster: &Cluster, pod: &Pod, page: &str) -> Fact<String> {
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    let path = format!("{name}:{}/proxy/{page}", pods::admin_port(pod));
    cluster.admin_page(&namespace, &path).await
}

async fn webhook(cluster: &Cluster) -> Fact<Option<MutatingWebhookConfiguration>> {
    let api = Api::all(cluster.client.clone());
    api.get_opt(WEBHOOK).await.map_err(describe_error)
}

/// Reads the certificate only. The private key in the Secret is discarded.
async fn serving(cluster: &Cluster) -> Fact<Option<String>> {
    let api: Api<Secret> = Api::namespaced(cluster.client.clone(), &cluster.mesh_namespace);
    let secret = api.get_opt(SERVING_SECRET).await.map_err(describe_error)?;
    let certificate = secret.and_then(|secret| secret.data?.remove("tls.crt"));
    Ok(certificate.map(|certificate| String::from_utf8_lossy(&certificate.0).into_owned()))
}

/// Creates a pod that requests injection in a dry run: the API server calls the webhooks but does
/// not store the pod.
async fn dry_run(cluster: &Cluster, only: Option<&str>) -> Fact<DryRun> {
    // In some others, nothing is injected.
    let is_injected = |name: &&str| *name != cluster.mesh_namespace && !name.starts_with("kube-");
    let namespace = only.filter(is_injected).unwrap_or("default");
    let resource = ApiResource::erase::<v1::Pod>(&());
    let api = cluster::dynamic(&cluster.client, &resource, Some(namespace));
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "mesh-check-trial", "annotations": {"diy-service-mesh/inject": "true"}},
        "spec": {"containers": [{"name": "check", "image": "mesh-check-trial", "ports": [{"containerPort": 8080}]}]},
    });
    let pod = json::read(&pod).map_err(|error| error.to_string())?;
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    match api.create(&dry_run, &pod).await {
        Ok(pod) if pods::is_injected(&pod) => Ok(DryRun::Injected),
        Ok(_) => Ok(DryRun::NotInjected),
        Err(kube::Error::Api(status))
            if status.message.contains("calling webhook")
                && status.message.contains(WEBHOOK_DOMAIN) =>
        {
            Ok(DryRun::Failed(status.message))
        }
        Err(error) => Err(cluster::describe_error(error)),
    }
}

const WEBHOOK_DOMAIN: &str = "injector.diy-service-mesh.dev";

#[cfg(test)]
pub(crate) mod testing;

#[cfg(test)]
mod tests {
    use diy_mesh_controller::catalog::parse_object;

    use super::*;

    #[test]
    fn pods_are_judged_as_the_controller_reads_them() {
        let whole = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": "shop", "name": "web", "uid": "u", "labels": {"app": "web"}},
            "spec": {
                "nodeName": "n", "serviceAccountName": "web", "readinessGates": [{"conditionType": "g"}],
                "containers": [{"name": "app", "image": "i", "ports": [{"containerPort": 80, "name": "http"}]}],
                "initContainers": [{"name": "proxy", "args": ["--admin-port=4001"],
                    "env": [{"name": "SERVICE_MESH_TOKEN_FILE", "value": "/token"}]}],
            },
            "status": {"phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}],
                "conditions": [{"type": "Ready", "status": "True"}]},
        });
        let pod = json::read(&whole).expect("a pod");
        let policy = json!({"metadata": {"namespace": "shop"}});
        let judged = pods_with_policies(&Ok(vec![pod]), &Ok(vec![policy]));
        let judged = parse_object(&judged[0], "cluster.local").expect("a pod");
        assert_eq!(judged.unknown_fields, [""; 0]);
        let expected = parse_object(&whole, "cluster.local").expect("a pod");
        assert_eq!(judged.objects, expected.objects);
        assert_eq!(judged.objects.len(), 1);
    }
}
