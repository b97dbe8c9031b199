//! The authority against a real cluster, with the rights that manifests/controller.yaml gives and
//! no others: the Secret, the reports, the ConfigMaps with the roots, a rotation.
//!
//! Needs a cluster that KUBECONFIG names and rights to make namespaces and cluster roles there;
//! what it makes it removes: `KUBECONFIG=... cargo test --workspace --test kubernetes_authority --
//! --ignored`
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use diy_mesh_control_plane::events::{Events, publish};
use diy_mesh_controller::authenticate::Caller;
use diy_mesh_controller::authority::state::Phase;
use diy_mesh_controller::authority::{
    self, AuthorityHandle, Options, Roots, Storage, events, self_signed,
};
use diy_mesh_controller::catalog::Change;
use diy_mesh_controller::kinds::{Object, Pod};
use diy_mesh_controller::object::{Key, Kind, PodRef};
use diy_mesh_controller::proxies::Proxies;
use diy_mesh_controller::publish::Hub;
use diy_mesh_proto::mesh::v1::ProxyStatus;
use diy_mesh_testkit::wait::{eventually, soon};
use futures::FutureExt;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Secret, ServiceAccount};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, Resource};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

const SECRET: &str = "diy-service-mesh-ca";
const ROOTS: &str = "diy-service-mesh-roots";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: KUBECONFIG"]
async fn replicas_share_publish_and_rotate_a_ca_with_minimal_permissions() {
    let cluster = Cluster::make().await;
    // The objects of the scenario are removed also when it fails.
    let result = AssertUnwindSafe(scenario(&cluster)).catch_unwind().await;
    cluster.remove().await;
    if let Err(panic) = result {
        resume_unwind(panic);
    }
}

async fn scenario(cluster: &Cluster) {
    // Two start at the same moment: one CA.
    let (one, two) = tokio::join!(Replica::start(cluster), Replica::start(cluster));
    let roots = one.roots().await;
    assert_eq!(two.roots().await, roots);
    let secret = cluster
        .api::<Secret>(&cluster.mesh)
        .get(SECRET)
        .await
        .unwrap();
    assert_eq!(secret.type_.as_deref(), Some("kubernetes.io/tls"));

    // The roots are where the first meshed pod is and where the mesh is, and nowhere else.
    one.knows(&cluster.shop, true);
    cluster.until_published(&cluster.shop, &roots).await;
    two.knows(&cluster.shop, true);
    let config_maps = cluster.api::<ConfigMap>(&cluster.shop);
    config_maps
        .delete(ROOTS, &DeleteParams::default())
        .await
        .unwrap();
    cluster.until_published(&cluster.shop, &roots).await;
    let edit = Patch::Merge(json!({"data": {"roots.pem": "edited"}}));
    config_maps
        .patch(ROOTS, &PatchParams::default(), &edit)
        .await
        .unwrap();
    cluster.until_published(&cluster.shop, &roots).await;
    cluster.until_published(&cluster.mesh, &roots).await;
    let ours = format!("diy-service-mesh.dev/mesh={}", cluster.mesh);
    let all = Api::<ConfigMap>::all(cluster.client.clone());
    let all = all.list(&ListParams::default().labels(&ours)).await;
    let namespaces = all.unwrap().into_iter();
    let namespaces = namespaces.filter_map(|one| one.metadata.namespace);
    assert_eq!(
        namespaces.collect::<BTreeSet<_>>(),
        [cluster.mesh.clone(), cluster.shop.clone()].into()
    );
    // A namespace that does not exist does not hold up others.
    one.knows("no-such-namespace-of-ours", false);
    cluster
        .until("the failure is known", async || {
            one.authority
                .status()
                .replicas
                .values()
                .any(|report| report.namespaces.count == 1)
        })
        .await;
    one.forgets("no-such-namespace-of-ours");
    reports_roots_that_cannot_be_published(cluster, &one).await;

    // A rotation, asked for by an annotation.
    let ask = |what: &str| {
        Patch::Merge(
            json!({"metadata": {"annotations": {"diy-service-mesh.dev/rotate-root": what}}}),
        )
    };
    let secrets = cluster.api::<Secret>(&cluster.mesh);
    secrets
        .patch(SECRET, &PatchParams::default(), &ask("start"))
        .await
        .unwrap();
    one.until_phase(Phase::Announcing).await;
    two.until_phase(Phase::Announcing).await;
    let both = one.roots().await;
    assert_eq!(both.certificates.len(), 2);
    cluster.until_published(&cluster.shop, &both).await;
    // One replica goes, in the midst of it; another comes.
    two.task.abort();
    let two = Replica::start(cluster).await;
    two.knows(&cluster.shop, true);
    one.until_phase(Phase::Switched).await;
    one.until_phase(Phase::Steady).await;
    two.until_phase(Phase::Steady).await;
    let after = two.roots().await;
    assert_eq!(
        (one.roots().await, after.certificates.len()),
        (after.clone(), 1)
    );
    assert_ne!(after, roots);
    cluster.until_published(&cluster.shop, &after).await;
    let secret = secrets.get(SECRET).await.unwrap();
    assert!(
        secret.metadata.annotations.is_none_or(|all| all.is_empty()),
        "the request is taken"
    );
    assert!(!secret.data.unwrap().contains_key("previous.key"));

    // Deleted: put back. Broken: refused, and what was read stays.
    secrets
        .delete(SECRET, &DeleteParams::default())
        .await
        .unwrap();
    cluster
        .until("it is put back", async || {
            secrets.get_opt(SECRET).await.unwrap().is_some()
        })
        .await;
    assert_eq!(one.roots().await, after);
    let empty = Patch::Merge(json!({"data": {"tls.crt": "", "tls.key": ""}}));
    secrets
        .patch(SECRET, &PatchParams::default(), &empty)
        .await
        .unwrap();
    let has_key = async || {
        let data = secrets.get(SECRET).await.unwrap().data.unwrap();
        !data["tls.key"].0.is_empty()
    };
    cluster.until("it is filled", has_key).await;
    assert_eq!(one.roots().await, after);
    let break_it = Patch::Merge(json!({"data": {"tls.key": "cnViYmlzaA=="}}));
    secrets
        .patch(SECRET, &PatchParams::default(), &break_it)
        .await
        .unwrap();
    let refused = async || {
        one.authority
            .status()
            .problem
            .is_some_and(|problem| problem.contains("tls.key cannot be used"))
    };
    cluster.until("it is refused", refused).await;
    assert_eq!(
        (one.roots().await, one.authority.unavailable()),
        (after, None)
    );

    // An operator's own, replaced whole.
    let (certificate, key) = self_signed(
        "elsewhere",
        std::time::SystemTime::now(),
        Duration::from_secs(3600),
    )
    .unwrap();
    let operators = Patch::Merge(json!({"stringData": {"tls.crt": certificate, "tls.key": key}}));
    secrets
        .patch(SECRET, &PatchParams::default(), &operators)
        .await
        .unwrap();
    let theirs = Roots::from_pem(&certificate).unwrap();
    cluster
        .until("it is followed", async || {
            *one.roots().await == theirs && *two.roots().await == theirs
        })
        .await;
    cluster.until_published(&cluster.shop, &theirs).await;
    one.task.abort();
    two.task.abort();

    // Lost while no replica ran: the published roots show that there was one.
    secrets
        .delete(SECRET, &DeleteParams::default())
        .await
        .unwrap();
    let one = Replica::start(cluster).await;
    assert_ne!(*one.roots().await, theirs);
    one.until_phase(Phase::Steady).await;
    let reason = one.authority.status().rotation.reason;
    assert!(
        reason.contains("the CA was lost") && reason.contains(&cluster.shop),
        "{reason}"
    );
    one.task.abort();
}

/// An event names a ConfigMap that cannot be written: here, an immutable one.
async fn reports_roots_that_cannot_be_published(cluster: &Cluster, replica: &Replica) {
    let config_maps = cluster.api::<ConfigMap>(&cluster.mesh);
    let edit = Patch::Merge(json!({"immutable": true, "data": {"roots.pem": "other"}}));
    let parameters = PatchParams::default();
    let edited = config_maps.patch(ROOTS, &parameters, &edit).await;
    edited.unwrap();
    let events = cluster.api::<Event>(&cluster.mesh);
    cluster
        .until("an event names the ConfigMap", async || {
            let events = events.list(&ListParams::default()).await.unwrap();
            events.iter().any(|event| {
                let object = event
                    .regarding
                    .as_ref()
                    .and_then(|object| object.name.as_deref());
                event.reason.as_deref() == Some("RootsNotPublished") && object == Some(ROOTS)
            })
        })
        .await;
    let deleted = config_maps.delete(ROOTS, &DeleteParams::default()).await;
    deleted.unwrap();
    let roots = replica.roots().await;
    cluster.until_published(&cluster.mesh, &roots).await;
}

/// Connects one proxy, which always has the trust of its replica.
async fn follow(authority: AuthorityHandle, registry: Proxies, namespace: String) {
    let pod = Some(PodRef {
        namespace: namespace.into(),
        name: "web".into(),
        uid: "web".into(),
    });
    let user = "user".into();
    let proxy = registry.connect(&Caller { user, pod }, SystemTime::now());
    let Some(trust) = authority.loaded().await else {
        return;
    };
    let mut trust = trust.subscribe();
    loop {
        let now = trust.borrow_and_update().clone();
        let status = ProxyStatus {
            roots_version: now.roots.version.clone(),
            certificate_issuer: now.issuer.id().to_owned(),
            ..ProxyStatus::default()
        };
        proxy.update(status, 0);
        if trust.changed().await.is_err() {
            return;
        }
    }
}

struct Replica {
    authority: AuthorityHandle,
    hub: Hub,
    task: JoinHandle<()>,
}

impl Replica {
    async fn start(cluster: &Cluster) -> Replica {
        let client = cluster.as_controller().await;
        let hub = Hub::default();
        hub.apply(Kind::ALL.map(|kind| Change::Reset(kind, vec![])));
        let options = Options {
            clock: Default::default(),
            stopping: Default::default(),
            trust_domain: "cluster.local".into(),
            certificate_life: Duration::from_secs(30),
            ca_life: Duration::from_secs(3600),
            storage: Storage::Kubernetes {
                client: client.clone(),
                namespace: cluster.mesh.clone(),
            },
        };
        let registry = Proxies::default();
        let (authority, run) = authority::start(options, &hub, registry.clone());
        let follow = follow(authority.clone(), registry, cluster.shop.clone());
        let ((events, queue), mesh) = (Events::new(), cluster.mesh.clone());
        let observed = authority.clone();
        let task = tokio::spawn(async move {
            let (published, status) = (observed.watch_published(), observed.watch_status());
            let clock = observed.clock().clone();
            let observe = events::observe(published, status, &mesh, clock, events);
            tokio::join!(run, follow, observe, publish(client, "controller", queue));
        });
        Replica {
            authority,
            hub,
            task,
        }
    }

    fn knows(&self, namespace: &str, ready: bool) {
        self.hub.apply([Change::Apply(Object::Pod(Pod {
            key: Key::new(namespace, "web"),
            uid: "web".into(),
            addresses: vec![],
            host_network: false,
            terminating: false,
            ready,
            unready_by_node: false,
            created: 0,
            node: "".into(),
            zone: "".into(),
            identity: Some("spiffe://cluster.local/ns/shop/sa/web".into()),
            bypassed: Default::default(),
            restricts_udp: false,
            inbound: Default::default(),
            labels: Default::default(),
        }))]);
    }

    fn forgets(&self, namespace: &str) {
        self.hub
            .apply([Change::Delete(Kind::Pod, Key::new(namespace, "web"))]);
    }

    async fn roots(&self) -> Arc<Roots> {
        let authority = soon(self.authority.loaded()).await.unwrap();
        authority.borrow().roots.clone()
    }

    async fn until_phase(&self, phase: Phase) {
        eventually(phase.name(), async || {
            let status = self.authority.status();
            let is_reached = status.issuer.is_some() && status.rotation.phase == phase.name();
            is_reached.then_some(()).ok_or(status)
        })
        .await;
    }
}

struct Cluster {
    client: Client,
    kubeconfig: Kubeconfig,
    /// The mesh's own namespace, and the name of all that belongs to no namespace.
    mesh: String,
    /// A namespace with meshed pods.
    shop: String,
}

impl Cluster {
    async fn make() -> Cluster {
        let kubeconfig = Kubeconfig::from_env()
            .unwrap()
            .expect("KUBECONFIG names a cluster");
        let config =
            Config::from_custom_kubeconfig(kubeconfig.clone(), &KubeConfigOptions::default())
                .await
                .unwrap();
        let mesh = format!("authority-test-{:08x}", fastrand::u32(..));
        let cluster = Cluster {
            client: Client::try_from(config).unwrap(),
            kubeconfig,
            shop: format!("{mesh}-shop"),
            mesh,
        };
        for name in [&cluster.mesh, &cluster.shop] {
            cluster
                .create_global::<Namespace>(json!({"metadata": {"name": name}}))
                .await;
        }
        // The rights as the manifest has them, under other names.
        let text = std::fs::read_to_string(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../manifests/controller.yaml"
        ))
        .unwrap();
        for document in serde_yaml_ng::Deserializer::from_str(&text) {
            let text = serde_json::to_string(&Value::deserialize(document).unwrap()).unwrap();
            let mut object: Value = serde_json::from_str(
                &text.replace("\"service-mesh\"", &format!("{:?}", cluster.mesh)),
            )
            .unwrap();
            let of_all = |object: &mut Value| object["metadata"] = json!({"name": cluster.mesh});
            match object["kind"].as_str().unwrap() {
                "ServiceAccount" => cluster.create::<ServiceAccount>(object).await,
                "Role" => cluster.create::<Role>(object).await,
                "RoleBinding" => cluster.create::<RoleBinding>(object).await,
                "ClusterRole" => {
                    of_all(&mut object);
                    cluster.create_global::<ClusterRole>(object).await;
                }
                "ClusterRoleBinding" => {
                    of_all(&mut object);
                    object["roleRef"]["name"] = json!(cluster.mesh);
                    cluster.create_global::<ClusterRoleBinding>(object).await;
                }
                _ => {}
            }
        }
        cluster
    }

    async fn remove(&self) {
        let gone = DeleteParams::default();
        Api::<ClusterRoleBinding>::all(self.client.clone())
            .delete(&self.mesh, &gone)
            .await
            .unwrap();
        Api::<ClusterRole>::all(self.client.clone())
            .delete(&self.mesh, &gone)
            .await
            .unwrap();
        for name in [&self.mesh, &self.shop] {
            Api::<Namespace>::all(self.client.clone())
                .delete(name, &gone)
                .await
                .unwrap();
        }
    }

    /// As the ServiceAccount `controller`, which has the rights of the manifest and no others.
    async fn as_controller(&self) -> Client {
        let request = TokenRequest {
            spec: TokenRequestSpec {
                expiration_seconds: Some(600),
                ..TokenRequestSpec::default()
            },
            ..TokenRequest::default()
        };
        let accounts = self.api::<ServiceAccount>(&self.mesh);
        let token = accounts
            .create_token_request("controller", &PostParams::default(), &request)
            .await
            .unwrap()
            .status
            .unwrap()
            .token;
        let mut kubeconfig = serde_json::to_value(&self.kubeconfig).unwrap();
        for user in kubeconfig["users"].as_array_mut().unwrap() {
            user["user"] = json!({ "token": token });
        }
        let kubeconfig: Kubeconfig = serde_json::from_value(kubeconfig).unwrap();
        Client::try_from(
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
                .await
                .unwrap(),
        )
        .unwrap()
    }

    async fn until(&self, what: &str, condition: impl AsyncFn() -> bool) {
        let poll = async || condition().await.then_some(()).ok_or("not yet");
        eventually(what, poll).await;
    }

    async fn until_published(&self, namespace: &str, roots: &Roots) {
        let config_maps = self.api::<ConfigMap>(namespace);
        let is_there = async || {
            let data = config_maps
                .get_opt(ROOTS)
                .await
                .unwrap()
                .and_then(|config_map| config_map.data);
            data.is_some_and(|data| data.get("roots.pem") == Some(&roots.pem))
        };
        self.until("the roots are published", is_there).await;
    }

    fn api<K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>>(
        &self,
        namespace: &str,
    ) -> Api<K> {
        Api::namespaced(self.client.clone(), namespace)
    }

    async fn create<K>(&self, object: Value)
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned
            + serde::Serialize,
    {
        let object: K = serde_json::from_value(object).unwrap();
        self.api::<K>(&self.mesh)
            .create(&PostParams::default(), &object)
            .await
            .unwrap();
    }

    async fn create_global<K>(&self, object: Value)
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + serde::Serialize,
        K: Resource<Scope = k8s_openapi::ClusterResourceScope>,
    {
        let object: K = serde_json::from_value(object).unwrap();
        Api::<K>::all(self.client.clone())
            .create(&PostParams::default(), &object)
            .await
            .unwrap();
    }
}
