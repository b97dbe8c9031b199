//! The memory of the controller while it lists a cluster with the largest objects that its tenants
//! can create: in a memory cgroup with the limit of manifests/controller.yaml.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_testkit::memory::MemoryGroup;
use diy_mesh_testkit::net::{listen, read_head};
use diy_mesh_testkit::process::Process;
use diy_mesh_testkit::tokens::Signer;
use diy_mesh_testkit::{is_root, skip};
use serde_json::json;
use tokio::io::{AsyncWriteExt, BufWriter};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

/// The limit of the manifest, without what 2,000 subscribed pods take.
const LIMIT: u64 = (512 - 120) * 1024 * 1024;
const ORDINARY_PODS: usize = 20_000;
const LARGE_PODS: usize = 30;
/// Objects of a kind of custom resources, a full page: half just below the limit of an object, half
/// just above.
const POLICIES: usize = 50;
/// Objects of a kind that is read in the same way as another one: enough to be read at the same time.
const FURTHER: usize = 8;
/// The kinds of custom resources that the cluster has.
const INSTALLED: [&str; 9] = [
    "authorizationpolicies",
    "trafficpolicies",
    "httproutes",
    "grpcroutes",
    "tcproutes",
    "referencegrants",
    "xbackends",
    "trafficsplits",
    "traffictargets",
];
/// The kinds with a full page: a policy, and routes of the Gateway API and of SMI.
const FULL: [&str; 3] = ["authorizationpolicies", "httproutes", "trafficsplits"];
const TIMEOUT: Duration = Duration::from_secs(600);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

#[tokio::test(flavor = "multi_thread")]
async fn largest_objects_of_tenants_fit_the_limit_of_the_manifest() {
    if !is_root() {
        return;
    }
    let group = match MemoryGroup::new(LIMIT) {
        Ok(group) => group,
        Err(reason) => return skip(reason),
    };
    let files = support::scratch();
    let (listener, address) = listen().await;
    tokio::spawn(serve(listener));
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": format!("http://{address}")}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "users": [{"name": "test", "user": {}}],
    });
    let path = files.path().join("kubeconfig");
    fs::write(&path, kubeconfig.to_string()).unwrap();
    let issuer = Signer::named("first");
    fs::write(files.path().join("jwks.json"), issuer.jwks()).unwrap();
    let folder = files.path().display();
    let mut process = Process::start(
        group
            .command(env!("CARGO_BIN_EXE_controller"))
            .args(["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"])
            .args(["--ca", &format!("files:{folder}")])
            .args(["--authenticator", &format!("jwks:{folder}/jwks.json")])
            .env("KUBECONFIG", &path)
            .env("NO_COLOR", "1"),
    );
    let synced = async {
        while !process.output().contains("the catalog is synced") {
            assert!(!process.has_exited(), "{}", process.output());
            sleep(POLL_INTERVAL).await;
        }
    };
    let synced = timeout(TIMEOUT, synced).await;
    synced.expect("the catalog is synced in time");
    let peak = group.peak();
    println!("peak: {} MiB", peak >> 20);
    assert!(peak < LIMIT, "{peak} bytes");
}

/// An API server that makes objects while it sends them.
async fn serve(listener: TcpListener) {
    let texts = Arc::new(Texts::new());
    loop {
        let ((stream, _), texts) = (listener.accept().await.unwrap(), texts.clone());
        // A client that has seen enough closes its connection.
        tokio::spawn(async move {
            let _ = respond(stream, &texts).await;
        });
    }
}

async fn respond(mut stream: TcpStream, texts: &Texts) -> std::io::Result<()> {
    let Some(head) = read_head(&mut stream).await else {
        return Ok(());
    };
    let target = head.split(' ').nth(1).unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let plural = path.rsplit('/').next().unwrap_or_default();
    let parameter = |name: &str| {
        let mut parameters = query.split('&').filter_map(|one| one.split_once('='));
        parameters
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value)
    };
    let number = |name: &str| parameter(name).and_then(|value| value.parse::<usize>().ok());
    let (count, object): (usize, fn(&Texts, usize) -> String) = match plural {
        "pods" => (LARGE_PODS + ORDINARY_PODS, Texts::pod),
        kind if FULL.contains(&kind) => (POLICIES, Texts::policy),
        kind if INSTALLED.contains(&kind) => (FURTHER, Texts::policy),
        "customresourcedefinitions" => {
            let is_installed = INSTALLED.iter().any(|kind| query.contains(kind));
            (usize::from(is_installed), Texts::definition)
        }
        "services" | "endpointslices" | "nodes" => (0, Texts::policy),
        _ => {
            let status = json!({"apiVersion": "v1", "kind": "Status", "status": "Failure",
                "metadata": {}, "code": 404, "message": "no", "reason": "NotFound"});
            let head =
                "HTTP/1.1 404 X\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n";
            return stream.write_all(format!("{head}{status}").as_bytes()).await;
        }
    };
    let mut stream = BufWriter::new(stream);
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    if parameter("watch").is_some() {
        stream.flush().await?;
        return std::future::pending().await;
    }
    let first = number("continue").unwrap_or_default();
    let end = count.min(first + number("limit").unwrap_or(count));
    stream.write_all(b"{\"items\": [").await?;
    for number in first..end {
        let separator = if number == first { "" } else { "," };
        let text = format!("{separator}{}", object(texts, number));
        stream.write_all(text.as_bytes()).await?;
    }
    let next = if end < count {
        end.to_string()
    } else {
        String::new()
    };
    let metadata = json!({"resourceVersion": "7", "continue": next});
    stream
        .write_all(format!("], \"metadata\": {metadata}}}").as_bytes())
        .await?;
    stream.flush().await?;
    stream.shutdown().await
}

/// The long parts of objects.
struct Texts {
    labels: [String; 2],
    variables: String,
    rules: [String; 2],
}

impl Texts {
    fn new() -> Texts {
        let label = |label| format!("\"example.com/label-{label:05}\": \"{}\"", "v".repeat(63));
        let labels = |count| (0..count).map(label).collect::<Vec<_>>().join(",");
        let variable =
            |number| json!({"name": format!("VARIABLE_{number}"), "value": "v".repeat(40)});
        let variables: Vec<_> = (0..20).map(variable).collect();
        let rules = |count| vec!["0"; count].join(",");
        Texts {
            labels: [14_000, 5].map(labels),
            variables: json!(variables).to_string(),
            rules: [500_000, 620_000].map(rules),
        }
    }

    fn definition(&self, _: usize) -> String {
        let versions = [
            "v1", "v1beta1", "v1alpha1", "v1alpha2", "v1alpha3", "v1alpha4",
        ];
        let versions = versions.map(|name| json!({"name": name, "served": true}));
        let established = json!({"type": "Established", "status": "True"});
        json!({"metadata": {"name": "definition", "resourceVersion": "5"},
            "spec": {"versions": versions}, "status": {"conditions": [established]}})
        .to_string()
    }

    /// The first ones have 1.4 MB, as many as etcd stores.
    fn pod(&self, number: usize) -> String {
        let labels = &self.labels[usize::from(number >= LARGE_PODS)];
        let (one, two, three) = (number >> 16, number >> 8 & 255, number & 255);
        format!(
            r#"{{"metadata": {{"name": "pod-{number}", "namespace": "hostile", "uid": "u{number}",
                "resourceVersion": "5", "labels": {{{labels}}}}},
            "spec": {{"serviceAccountName": "web", "nodeName": "node",
                "initContainers": [{{"name": "proxy", "env": [{{"name": "SERVICE_MESH_TOKEN_FILE"}}]}}],
                "containers": [{{"name": "app", "env": {}}}]}},
            "status": {{"phase": "Running", "podIP": "10.{one}.{two}.{three}"}}}}"#,
            self.variables
        )
    }

    /// A policy or route whose values take the most memory for their length.
    fn policy(&self, number: usize) -> String {
        let rules = &self.rules[number % 2];
        let reference = r#"[{"group": "", "kind": "Service", "name": "web"}]"#;
        format!(
            r#"{{"metadata": {{"name": "policy-{number}", "namespace": "hostile", "resourceVersion": "5"}},
            "spec": {{"targetRefs": {reference}, "parentRefs": {reference}, "rules": [{rules}]}}}}"#
        )
    }
}
