//! The very program against a real cluster, with the least rights that it needs: the watches,
//! TokenReview, RBAC, SIGTERM.
//!
//! Needs a cluster that KUBECONFIG names and rights to make namespaces and cluster roles there;
//! what it makes it removes: `KUBECONFIG=... cargo test -p diy-mesh-controller --test kubernetes --
//! --ignored`
#![allow(clippy::unwrap_used)]

mod support;

use std::panic::{AssertUnwindSafe, resume_unwind};
use std::process::Command;
use std::time::Instant;

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::mesh::v1::service_mesh_service_client::ServiceMeshServiceClient;
use diy_mesh_testkit::http::get;
use diy_mesh_testkit::process::{Process, Signal};
use diy_mesh_testkit::wait::{TEST_TIMEOUT, eventually};
use futures::FutureExt;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, Pod, Service, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use support::say;
use tonic::Code;

const OURS: &str = "diy-service-mesh";

#[tokio::test]
#[ignore = "needs a cluster: KUBECONFIG"]
async fn controller_serves_a_cluster_with_minimal_permissions() {
    let cluster = Cluster::make().await;
    // The objects of the scenario are removed also when it fails.
    let result = AssertUnwindSafe(scenario(&cluster)).catch_unwind().await;
    cluster.remove().await;
    if let Err(panic) = result {
        resume_unwind(panic);
    }
}

async fn scenario(cluster: &Cluster) {
    let mut controller = Controller::start(cluster).await;
    // Whatever the cluster has: the definitions can be read.
    controller.process.line(" installed").await;
    controller.ready().await;

    // Tokens, as the API server sees them.
    let mut client = controller.client(cluster.token("web", OURS).await).await;
    let all = answered(&mut client).await.unwrap();
    assert!(
        all.iter()
            .any(|service| service.namespace == "default" && service.name == "kubernetes")
    );
    for (token, reason) in [
        (cluster.token("web", "another").await, "audience"),
        ("rubbish".to_owned(), "refused"),
    ] {
        let status = answered(&mut controller.client(token).await)
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated);
        assert!(status.message().contains(reason), "{}", status.message());
    }

    // An account that may not list pods.
    let token = cluster.token("other", OURS).await;
    let denied = answered(&mut controller.client(token).await).await;
    assert_eq!(denied.unwrap_err().code(), Code::PermissionDenied);

    // A Service, its pod and its slice, from nothing to gone.
    let mut discover = client.discover().await;
    let service: Service = cluster.create(json!({
        "metadata": {"name": "web"}, "spec": {"ports": [{"name": "http", "port": 80, "targetPort": 8080, "appProtocol": "http"}]},
    }));
    let service = cluster
        .api::<Service>()
        .create(&PostParams::default(), &service)
        .await
        .unwrap();
    let ip = service.spec.unwrap().cluster_ip.unwrap();
    discover.subscribe(&format!("{ip}:80"), "").await;
    discover.subscribe("198.51.100.7:1234", "").await;
    let mut answers = vec![discover.said().await, discover.said().await];
    if answers[0] == format!("{ip}:80: unknown") {
        // The watch was slower than we.
        answers.push(discover.said().await);
    }
    assert!(
        answers.contains(&format!("{ip}:80: service {}/web []", cluster.name)),
        "{answers:?}"
    );
    assert!(
        answers.contains(&"198.51.100.7:1234: unknown".to_owned()),
        "{answers:?}"
    );

    // The pod before the slice: an endpoint has details of its pod, so a pod that the controller sees
    // after the slice is a further version of the Service.
    cluster.make_pod().await;
    let pod = discover.answer().await.unwrap();
    assert_eq!(
        say(&pod),
        format!(
            "198.51.100.7:1234: pod {}/web-1 [198.51.100.7:1234]",
            cluster.name
        )
    );
    cluster.make_slice().await;
    let slice = discover.answer().await.unwrap();
    assert_eq!(say(&slice), format!("{ip}:80: +[198.51.100.7:8080] -[]"));
    let pods_of = |position: &Option<proto::Position>| {
        let components = position.as_ref().unwrap().components.iter();
        let mut pods = components.filter(|component| component.kind == "Pod");
        pods.next().unwrap().resource_version
    };
    assert!(
        [&pod, &slice]
            .iter()
            .all(|answer| pods_of(&answer.position) > 0)
    );
    let mut again = client.discover().await;
    again.subscribe(&format!("{ip}:80"), &slice.version).await;
    assert_eq!(again.said().await, format!("{ip}:80: unchanged"));

    cluster
        .api::<Pod>()
        .delete("web-1", &DeleteParams::default().grace_period(0))
        .await
        .unwrap();
    cluster
        .api::<Service>()
        .delete("web", &DeleteParams::default())
        .await
        .unwrap();
    let mut unknown = 0;
    while unknown < 2 {
        unknown += usize::from(discover.said().await.ends_with(": unknown"));
    }

    // Without its rights it says so, and cannot authenticate clients.
    cluster.revoke().await;
    let deadline = Instant::now() + TEST_TIMEOUT;
    let status = loop {
        // Each time another token, since answers are cached. The API server takes a moment to
        // notice.
        match controller
            .client(cluster.token("web", OURS).await)
            .await
            .services(&[])
            .await
        {
            Err(status) if status.message().contains("create on tokenreviews") => break status,
            other => assert!(
                Instant::now() < deadline,
                "the rights are never gone: {other:?}"
            ),
        }
    };
    assert_eq!(status.code(), Code::Unavailable);

    // SIGTERM.
    let status = controller.stop(&mut discover).await;
    assert_eq!(status.code(), Code::Unavailable);

    // A start without rights: not ready, and the log says what is missing.
    let mut controller = Controller::start(cluster).await;
    controller
        .process
        .line("verbs list and watch on endpointslices of discovery.k8s.io")
        .await;
    controller
        .answers("/ready", |code, reason| {
            code == 503 && reason.contains("EndpointSlice")
        })
        .await;
}

/// The rules of the manifests for custom kinds, their definitions, the epoch and the marker. A kind that is
/// installed and cannot be read would delay the controller for a minute.
fn rules_of_custom_kinds() -> Vec<Value> {
    let manifest = include_str!("../../manifests/controller.yaml");
    let documents = serde_yaml_ng::Deserializer::from_str(manifest);
    let rules = documents.flat_map(|document| {
        let object = Value::deserialize(document).unwrap();
        object["rules"].as_array().cloned().unwrap_or_default()
    });
    let is_custom = |rule: &Value| {
        let group = rule["apiGroups"][0].as_str().unwrap();
        let config_maps = ["diy-service-mesh-epoch", "diy-service-mesh-authorization"];
        let is_stored = config_maps
            .iter()
            .any(|name| rule["resourceNames"] == json!([name]));
        let is_read = rule["verbs"].as_array().unwrap().contains(&json!("watch"));
        is_stored || is_read && group.contains('.') && !group.ends_with("discovery.k8s.io")
    };
    let rules = Vec::from_iter(rules.filter(is_custom));
    assert!(rules.len() > 5, "{rules:?}");
    rules
}

/// The answer for a client, once the API server has reviewed its token.
async fn answered(client: &mut support::Client) -> Result<Vec<proto::Service>, tonic::Status> {
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        match client.services(&[]).await {
            Err(status) if status.code() == Code::Unavailable && Instant::now() < deadline => {
                println!("again: {}", status.message())
            }
            answer => return answer,
        }
    }
}

struct Cluster {
    client: Client,
    kubeconfig: Kubeconfig,
    name: String,
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
        let name = format!("controller-test-{:08x}", fastrand::u32(..));
        let cluster = Cluster {
            client: Client::try_from(config).unwrap(),
            kubeconfig,
            name: name.clone(),
        };
        let all = PostParams::default();
        let namespace = cluster.create(json!({"metadata": {"name": name}}));
        Api::<Namespace>::all(cluster.client.clone())
            .create(&all, &namespace)
            .await
            .unwrap();
        for account in ["controller", "web", "other"] {
            let account = cluster.create(json!({"metadata": {"name": account}}));
            cluster
                .api::<ServiceAccount>()
                .create(&all, &account)
                .await
                .unwrap();
        }
        let mut rules = rules_of_custom_kinds();
        rules.extend([
            json!({"apiGroups": [""], "resources": ["services", "pods", "nodes"], "verbs": ["list", "watch"]}),
            json!({"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}),
            json!({"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}),
            json!({"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]}),
        ]);
        let role = cluster.create(json!({"metadata": {"name": name}, "rules": rules}));
        Api::<ClusterRole>::all(cluster.client.clone())
            .create(&all, &role)
            .await
            .unwrap();
        let binding = cluster.create(json!({
            "metadata": {"name": name}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [
                {"kind": "ServiceAccount", "name": "controller", "namespace": name},
                // It may list pods.
                {"kind": "ServiceAccount", "name": "web", "namespace": name},
            ],
        }));
        Api::<ClusterRoleBinding>::all(cluster.client.clone())
            .create(&all, &binding)
            .await
            .unwrap();
        cluster
    }

    async fn remove(&self) {
        self.revoke().await;
        Api::<ClusterRole>::all(self.client.clone())
            .delete(&self.name, &DeleteParams::default())
            .await
            .unwrap();
        Api::<Namespace>::all(self.client.clone())
            .delete(&self.name, &DeleteParams::default())
            .await
            .unwrap();
    }

    async fn revoke(&self) {
        // Gone already where the scenario got so far.
        let _ = Api::<ClusterRoleBinding>::all(self.client.clone())
            .delete(&self.name, &DeleteParams::default())
            .await;
    }

    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.name)
    }

    fn create<K: DeserializeOwned + Serialize>(&self, object: Value) -> K {
        serde_json::from_value(object).unwrap()
    }

    /// Without an audience: a token for the API server itself.
    async fn token(&self, account: &str, audience: &str) -> String {
        let audiences = if audience.is_empty() {
            vec![]
        } else {
            vec![audience.to_owned()]
        };
        let spec = TokenRequestSpec {
            audiences,
            expiration_seconds: Some(600),
            ..TokenRequestSpec::default()
        };
        let request = TokenRequest {
            spec,
            ..TokenRequest::default()
        };
        let answer = self
            .api::<ServiceAccount>()
            .create_token_request(account, &PostParams::default(), &request)
            .await
            .unwrap();
        answer.status.unwrap().token
    }

    async fn make_slice(&self) {
        let slice: EndpointSlice = self.create(json!({
            "metadata": {"name": "web-by-hand", "labels": {"kubernetes.io/service-name": "web"}}, "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8080}],
            "endpoints": [{"addresses": ["198.51.100.7"], "targetRef": {"kind": "Pod", "name": "web-1", "namespace": self.name}}],
        }));
        self.api::<EndpointSlice>()
            .create(&PostParams::default(), &slice)
            .await
            .unwrap();
    }

    /// A pod that no kubelet runs: its status is ours to write.
    async fn make_pod(&self) {
        let pod: Pod = self.create(json!({
            "metadata": {"name": "web-1"},
            "spec": {"schedulerName": "nobody", "serviceAccountName": "web", "containers": [{"name": "web", "image": "none"}]},
        }));
        self.api::<Pod>()
            .create(&PostParams::default(), &pod)
            .await
            .unwrap();
        let status = json!({"status": {"phase": "Running", "podIP": "198.51.100.7", "podIPs": [{"ip": "198.51.100.7"}]}});
        self.api::<Pod>()
            .patch_status("web-1", &PatchParams::default(), &Patch::Merge(status))
            .await
            .unwrap();
    }
}

/// The program, as a process.
struct Controller {
    process: Process,
    address: std::net::SocketAddr,
    admin: std::net::SocketAddr,
    files: tempfile::TempDir,
}

impl Controller {
    /// As the ServiceAccount `controller`, which has the rights of the cluster role and no others.
    async fn start(cluster: &Cluster) -> Controller {
        let token = cluster.token("controller", "").await;
        let mut kubeconfig = serde_json::to_value(&cluster.kubeconfig).unwrap();
        for user in kubeconfig["users"].as_array_mut().unwrap() {
            user["user"] = json!({ "token": token });
        }
        let files = support::scratch();
        let path = files.path().join("kubeconfig");
        std::fs::write(&path, kubeconfig.to_string()).unwrap();
        let mut process = Process::start(
            Command::new(env!("CARGO_BIN_EXE_controller"))
                .args(["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"])
                .args(["--ca", &format!("files:{}", files.path().display())])
                .args(["--pod-namespace", &cluster.name])
                .env("KUBECONFIG", &path)
                .env("NO_COLOR", "1"),
        );
        let line = process.line("listening grpc=").await;
        let field = |name: &str| {
            line.split(' ')
                .find_map(|part| part.strip_prefix(name))
                .unwrap()
                .parse()
                .unwrap()
        };
        let (address, admin) = (field("grpc="), field("admin="));
        Controller {
            process,
            address,
            admin,
            files,
        }
    }

    /// With its catalog and its CA, which are read side by side.
    async fn ready(&mut self) {
        self.process.line("the catalog is synced").await;
        self.answers("/ready", |code, text| (code, text) == (200, "ready\n"))
            .await;
    }

    /// Waits until the admin port answers so.
    async fn answers(&self, path: &str, so: impl Fn(u16, &str) -> bool) {
        eventually(path, async || {
            let (code, text) = get(self.admin, path).await;
            so(code, &text).then_some(()).ok_or((code, text))
        })
        .await;
    }

    async fn client(&self, token: String) -> support::Client {
        let path = self.files.path().join("roots.pem");
        // It is ready a moment before it has published them.
        let read = async || std::fs::read_to_string(&path);
        let roots = eventually("the roots", read).await;
        let channel = support::connect(self.address, &roots).await.unwrap();
        support::Client {
            announced: None,
            client: ServiceMeshServiceClient::new(channel),
            token: Some(token),
        }
    }

    /// SIGTERM; what an open stream says of it.
    async fn stop(mut self, discover: &mut support::Discover) -> tonic::Status {
        self.process.signal(Signal::SIGTERM);
        let status = discover.answer().await.unwrap_err();
        assert!(self.process.exited().await.success());
        status
    }
}
