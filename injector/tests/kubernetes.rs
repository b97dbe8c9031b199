//! Reconciliation of the Secret and the caBundle in a cluster. Requires permission to create
//! namespaces: `KUBECONFIG=... cargo test -p diy-mesh-injector --test kubernetes -- --ignored`.
//!
//! Objects have unique names and are deleted at the end. The webhook configuration selects only
//! pods of the test.

use std::collections::BTreeMap;

use clap::Parser;
use diy_mesh_injector::{Config, Error, Flags, Injector};
use diy_mesh_testkit::wait::{eventually, soon};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const SECRET: &str = "diy-service-mesh-injector-tls";

/// A namespace and a webhook configuration for one test.
struct Cluster {
    name: String,
    client: Client,
}

impl Cluster {
    async fn new() -> Self {
        let client = Client::try_default()
            .await
            .expect("KUBECONFIG names a cluster");
        let name = format!("injector-test-{:08x}", fastrand::u32(..));
        let namespace =
            serde_json::from_value(json!({"metadata": {"name": name}})).expect("a namespace");
        Api::<Namespace>::all(client.clone())
            .create(&PostParams::default(), &namespace)
            .await
            .expect("a new namespace");
        let cluster = Self { name, client };
        cluster.configure().await;
        cluster
    }

    async fn configure(&self) {
        let webhook = |name: &str| {
            json!({
                "name": name,
                "admissionReviewVersions": ["v1"],
                "clientConfig": {"service": {"name": "injector", "namespace": self.name, "path": "/pods"}},
                "rules": [{"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}],
                "namespaceSelector": {"matchLabels": {"injector-test": self.name}},
                "sideEffects": "None",
            })
        };
        let webhooks = [
            webhook("first.injector.example"),
            webhook("second.injector.example"),
        ];
        let configuration = json!({"metadata": {"name": self.name}, "webhooks": webhooks});
        let configuration = serde_json::from_value(configuration).expect("a configuration");
        self.configurations()
            .create(&PostParams::default(), &configuration)
            .await
            .expect("a new configuration");
    }

    fn configurations(&self) -> Api<MutatingWebhookConfiguration> {
        Api::all(self.client.clone())
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.name)
    }

    async fn start(&self) -> Running {
        let flags = Flags::parse_from([
            "injector",
            "--image-to-deploy-proxy=proxy",
            "--image-to-deploy-proxy-init=init",
            "--listen=127.0.0.1:0",
            "--admin-listen=127.0.0.1:0",
            "--shutdown-delay=0",
            &format!("--pod-namespace={}", self.name),
            &format!("--webhook-configuration={}", self.name),
        ]);
        let injector = Injector::bind(Config::from_flags(flags).expect("a configuration"))
            .await
            .expect("free ports");
        let ready = Box::pin(injector.ready());
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(injector.run(async {
            let _ = stopped.await;
        }));
        Running { ready, stop, task }
    }

    async fn secret(&self) -> BTreeMap<String, ByteString> {
        self.secrets()
            .get(SECRET)
            .await
            .expect("the Secret")
            .data
            .expect("data")
    }

    async fn bundles(&self) -> Vec<Option<ByteString>> {
        let configuration = self
            .configurations()
            .get(&self.name)
            .await
            .expect("the configuration");
        configuration
            .webhooks
            .into_iter()
            .flatten()
            .map(|webhook| webhook.client_config.ca_bundle)
            .collect()
    }

    /// Waits until both webhooks have the Secret's CA.
    async fn reconciled(&self) -> ByteString {
        eventually("the caBundle is corrected", async || {
            let secret = self.secrets().get_opt(SECRET).await.expect("an answer");
            let ca = secret
                .and_then(|secret| secret.data)
                .and_then(|mut data| data.remove("ca.crt"));
            match (ca, self.bundles().await) {
                (Some(ca), bundles) if bundles == [Some(ca.clone()), Some(ca.clone())] => Ok(ca),
                (_, bundles) => Err(bundles),
            }
        })
        .await
    }

    async fn patch_configuration(&self, webhook: Value) {
        let patch = Patch::Strategic(json!({"webhooks": [webhook]}));
        self.configurations()
            .patch(&self.name, &PatchParams::default(), &patch)
            .await
            .expect("a patch");
    }

    async fn remove(self) {
        self.configurations()
            .delete(&self.name, &DeleteParams::default())
            .await
            .expect("a configuration to delete");
        Api::<Namespace>::all(self.client.clone())
            .delete(&self.name, &DeleteParams::default())
            .await
            .expect("a namespace to delete");
    }
}

struct Running {
    ready: std::pin::Pin<Box<dyn Future<Output = ()> + Send>>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), Error>>,
}

impl Running {
    async fn stop(self) {
        self.stop.send(()).expect("the injector runs");
        self.task.await.expect("no panic").expect("no error");
    }
}

#[tokio::test]
#[ignore = "needs a cluster"]
async fn replicas_share_one_certificate_and_reconcile_secret_and_ca_bundle() {
    let cluster = Cluster::new().await;
    let mut replicas = futures::future::join_all((0..4).map(|_| cluster.start())).await;
    for replica in &mut replicas {
        soon(replica.ready.as_mut()).await;
    }
    let ca = cluster.reconciled().await;
    let secret = cluster.secret().await;
    assert_eq!(
        secret.keys().map(String::as_str).collect::<Vec<_>>(),
        ["ca.crt", "ca.key", "tls.crt", "tls.key"]
    );

    // One caBundle is cleared, the other is overwritten.
    cluster
        .patch_configuration(
            json!({"name": "first.injector.example", "clientConfig": {"caBundle": null}}),
        )
        .await;
    assert_eq!(cluster.reconciled().await, ca);
    let other = diy_mesh_injector::certificate::KeyMaterial::generate(
        &diy_mesh_injector::certificate::Names::new(["other.example".into()]),
        std::time::SystemTime::now(),
    );
    let other = ByteString(other.expect("generates certificates").bundle().into_bytes());
    cluster
        .patch_configuration(
            json!({"name": "second.injector.example", "clientConfig": {"caBundle": other}}),
        )
        .await;
    assert_eq!(cluster.reconciled().await, ca);

    // The configuration is deleted and applied again.
    cluster
        .configurations()
        .delete(&cluster.name, &DeleteParams::default())
        .await
        .expect("it exists");
    cluster.configure().await;
    assert_eq!(cluster.reconciled().await, ca);

    // A deleted Secret is restored with the same content.
    cluster
        .secrets()
        .delete(SECRET, &DeleteParams::default())
        .await
        .expect("it exists");
    assert_eq!(cluster.reconciled().await, ca);
    assert_eq!(cluster.secret().await, secret);

    // An invalid Secret is corrected.
    let invalid = Patch::Merge(json!({"stringData": {"tls.key": "invalid"}}));
    cluster
        .secrets()
        .patch(SECRET, &PatchParams::default(), &invalid)
        .await
        .expect("a patch");
    eventually("the Secret is corrected", async || {
        let current = cluster.secret().await;
        (current == secret).then_some(()).ok_or(current)
    })
    .await;
    assert_eq!(cluster.reconciled().await, ca);

    // A replica that starts later adopts the Secret.
    let mut late = cluster.start().await;
    soon(late.ready.as_mut()).await;
    assert_eq!(cluster.secret().await, secret);
    late.stop().await;
    for replica in replicas {
        replica.stop().await;
    }
    cluster.remove().await;
}
