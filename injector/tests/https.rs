//! The injector over HTTPS, with ephemeral certificates.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fs, iter};

use bytes::Bytes;
use clap::Parser;
use diy_mesh_injector::config::{Config, Flags, ServingCertificate};
use diy_mesh_injector::{Error, Injector};
use diy_mesh_model::sidecar::Settings;
use http::header::AUTHORIZATION;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::ByteString;
use rustls::client::WantsClientCert;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ConfigBuilder, RootCertStore};
use serde_json::{Value, json};
use std::net::SocketAddr;
use tempfile::TempDir;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use diy_mesh_testkit::authority;
use diy_mesh_testkit::http::get;
use diy_mesh_testkit::metrics;
use diy_mesh_testkit::process::Process;
use diy_mesh_testkit::wait::soon;

struct Running {
    address: SocketAddr,
    admin: SocketAddr,
    /// The file of the CA, and the files of the namespaces.
    folder: TempDir,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), Error>>,
}

fn config(arguments: &[&str]) -> Config {
    let images = [
        "--image-to-deploy-proxy=diy-sm-proxy:dev",
        "--image-to-deploy-proxy-init=diy-sm-proxy-init:dev",
    ];
    let flags = Flags::parse_from(["injector"].iter().chain(&images).chain(arguments));
    Config::from_flags(flags).expect("a configuration")
}

async fn injector() -> Running {
    let folder = tempfile::tempdir().expect("a folder");
    label(&folder, json!({}));
    let config = config(&[
        "--listen=127.0.0.1:0",
        "--admin-listen=127.0.0.1:0",
        &format!("--namespaces-folder={}", folder.path().display()),
        "--serving-certificate=ephemeral",
        &format!("--ca-file={}/ca.crt", folder.path().display()),
    ]);
    let injector = Injector::bind(config).await.expect("free ports");
    let (address, admin, ready) = (
        injector.address(),
        injector.admin_address(),
        injector.ready(),
    );
    let (stop, stopped) = oneshot::channel();
    let task = tokio::spawn(injector.run(async {
        let _ = stopped.await;
    }));
    ready.await;
    Running {
        address,
        admin,
        folder,
        stop,
        task,
    }
}

/// Writes the Namespace `http-client`.
fn label(folder: &TempDir, labels: Value) {
    let namespace = json!({
        "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "http-client", "labels": labels},
    });
    let file = folder.path().join("http-client.json");
    fs::write(file, namespace.to_string()).expect("a writable folder");
}

impl Running {
    async fn tls(&self, protocol: &[u8], name: &str) -> std::io::Result<TlsStream<TcpStream>> {
        tls(self.address, &self.ca_file(), protocol, name).await
    }

    fn ca_file(&self) -> PathBuf {
        self.folder.path().join("ca.crt")
    }

    /// Sends a request over a new connection.
    async fn http1(&self, request: Request<Full<Bytes>>) -> (StatusCode, Bytes) {
        let stream = self.tls(b"http/1.1", "127.0.0.1").await;
        send(stream.expect("a TLS connection"), request).await
    }

    async fn admin(&self, path: &str) -> (u16, String) {
        get(self.admin, path).await
    }
}

async fn tls(
    address: SocketAddr,
    ca_file: &Path,
    protocol: &[u8],
    name: &str,
) -> std::io::Result<TlsStream<TcpStream>> {
    let config = client_config(ca_file, protocol);
    let stream = TcpStream::connect(address).await?;
    handshake(config, name, stream).await
}

async fn send(stream: TlsStream<TcpStream>, request: Request<Full<Bytes>>) -> (StatusCode, Bytes) {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .expect("HTTP/1.1");
    tokio::spawn(connection);
    read(sender.send_request(request).await.expect("an answer")).await
}

fn client_config(ca_file: &Path, protocol: &[u8]) -> ClientConfig {
    let mut config = trusting(ca_file).with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    config
}

fn trusting(ca_file: &Path) -> ConfigBuilder<ClientConfig, WantsClientCert> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(ca_file).expect("a CA file") {
        roots
            .add(certificate.expect("a certificate"))
            .expect("a root");
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
}

async fn handshake(
    config: ClientConfig,
    name: &str,
    stream: TcpStream,
) -> std::io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from(name.to_owned()).expect("a name");
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
}

async fn read(response: Response<hyper::body::Incoming>) -> (StatusCode, Bytes) {
    let status = response.status();
    (
        status,
        response
            .into_body()
            .collect()
            .await
            .expect("a body")
            .to_bytes(),
    )
}

fn review(pod: &Value) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "http-client",
            "operation": "CREATE",
            "userInfo": {"username": "somebody"},
            "object": pod,
            "oldObject": null,
            "dryRun": false,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        },
    })
}

fn pod(inject: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "http-client-", "annotations": {"diy-service-mesh/inject": inject}},
        "spec": {"containers": [{"name": "http-client", "image": "diy-sm-http-client:dev"}]},
    })
}

fn post(path: &str, review: &Value) -> Request<Full<Bytes>> {
    let builder = Request::post(path)
        .header("host", "injector")
        .header("content-type", "application/json");
    builder
        .body(Full::from(review.to_string()))
        .expect("a request")
}

fn response(body: &Bytes) -> Value {
    let review: Value = serde_json::from_slice(body).expect("JSON");
    assert_eq!(
        (&review["apiVersion"], &review["kind"]),
        (&json!("admission.k8s.io/v1"), &json!("AdmissionReview"))
    );
    assert_eq!(
        review["response"]["uid"],
        "705ab4f5-6393-11e8-b7cc-42010a800002"
    );
    review["response"].clone()
}

fn patched(pod: &Value, response: &Value) -> Value {
    let ByteString(patch) =
        serde_json::from_value(response["patch"].clone()).expect("a patch in base64");
    let patch: json_patch::Patch = serde_json::from_slice(&patch).expect("a JSON patch");
    let mut pod = pod.clone();
    json_patch::patch(&mut pod, &patch).expect("the patch applies");
    pod
}

#[tokio::test]
async fn patches_requesting_pod_and_second_review_is_empty() {
    let injector = injector().await;
    let asked = pod("True");
    let (status, body) = injector.http1(post("/pods", &review(&asked))).await;
    assert_eq!(status, StatusCode::OK);
    let answer = response(&body);
    assert_eq!(
        (&answer["allowed"], &answer["patchType"]),
        (&json!(true), &json!("JSONPatch"))
    );
    assert_eq!(
        answer["auditAnnotations"],
        json!({"proxy-injected": "true"})
    );
    let meshed = patched(&asked, &answer);
    let names: Vec<_> = meshed["spec"]["initContainers"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|container| &container["name"])
        .collect();
    assert_eq!(names, ["proxy-init", "proxy"]);

    let (_, body) = injector.http1(post("/pods", &review(&meshed))).await;
    let answer = response(&body);
    assert_eq!(
        (&answer["allowed"], &answer["patch"], &answer["patchType"]),
        (&json!(true), &Value::Null, &Value::Null)
    );
}

#[tokio::test]
async fn namespace_labels_are_defaults() {
    let injector = injector().await;
    let unannotated = json!({"metadata": {"name": "a"}, "spec": {"containers": []}});
    let inbound = |pod: &Value| {
        let args = pod["spec"]["initContainers"][1]["args"].as_array();
        let settings = args.map(|args| args.iter().filter_map(Value::as_str));
        settings.map(|args| Settings::of_arguments(args).strict)
    };
    for (labels, pod, expected) in [
        (json!({}), unannotated.clone(), None),
        (
            json!({"diy-service-mesh/inject": "enabled"}),
            unannotated.clone(),
            Some(false),
        ),
        (
            json!({"diy-service-mesh/inject": "enabled"}),
            pod("false"),
            None,
        ),
        (
            json!({"diy-service-mesh/inbound": "strict"}),
            unannotated.clone(),
            None,
        ),
        (
            json!({"diy-service-mesh/inbound": "strict"}),
            pod("true"),
            Some(true),
        ),
        (
            json!({"diy-service-mesh/inbound": "permissive"}),
            pod("true"),
            Some(false),
        ),
        (
            json!({"diy-service-mesh/inject": "enabled", "diy-service-mesh/inbound": "strict"}),
            unannotated,
            Some(true),
        ),
    ] {
        label(&injector.folder, labels.clone());
        // Also a path of an earlier release, whatever its labels.
        for path in ["/pods?timeout=5s", "/inject", "/inject/strict-namespace"] {
            let (_, body) = injector.http1(post(path, &review(&pod))).await;
            let response = response(&body);
            assert_eq!(response["allowed"], true);
            let patched = match &response["patch"] {
                Value::Null => None,
                _ => inbound(&patched(&pod, &response)),
            };
            assert_eq!(patched, expected, "{path}, {labels}");
        }
    }
}

#[tokio::test]
async fn rejects_pods_of_a_namespace_that_cannot_be_read() {
    let injector = injector().await;
    fs::remove_file(injector.folder.path().join("http-client.json")).expect("a file");
    for pod in [
        pod("true"),
        json!({"metadata": {"name": "a"}, "spec": {"containers": []}}),
    ] {
        let (_, body) = injector.http1(post("/pods", &review(&pod))).await;
        let response = response(&body);
        assert_eq!(
            (&response["allowed"], &response["status"]["code"]),
            (&json!(false), &json!(503))
        );
        let message = response["status"]["message"].as_str().expect("a message");
        assert!(
            message.starts_with("cannot read the labels of namespace \"http-client\""),
            "{message}"
        );
    }
    // The decision about the others does not depend on the namespace.
    for pod in [pod("false"), pod("enabled")] {
        let (_, body) = injector.http1(post("/pods", &review(&pod))).await;
        assert_eq!(response(&body)["allowed"], true);
    }
}

#[tokio::test]
async fn patches_only_pod_creation() {
    let injector = injector().await;
    for (pointer, value) in [
        ("/request/operation", "UPDATE"),
        ("/request/kind/kind", "Deployment"),
        ("/request/kind/group", "other.example"),
    ] {
        let mut review = review(&pod("true"));
        *review.pointer_mut(pointer).expect("a field") = json!(value);
        let (_, body) = injector.http1(post("/pods", &review)).await;
        assert_eq!(
            response(&body),
            json!({"uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "allowed": true}),
            "{pointer}"
        );
    }
}

#[tokio::test]
async fn denies_ephemeral_containers_of_injected_pods_with_the_uid_of_the_proxy() {
    let injector = injector().await;
    let plain = pod("true");
    let (_, body) = injector.http1(post("/pods", &review(&plain))).await;
    let meshed = patched(&plain, &response(&body));
    let debug = async |pod: &Value, pod_user: Value, user: Value| {
        let mut pod = pod.clone();
        pod["spec"]["securityContext"] = json!({"runAsUser": pod_user});
        let container =
            json!({"name": "shell", "image": "busybox", "securityContext": {"runAsUser": user}});
        pod["spec"]["ephemeralContainers"] = json!([container]);
        let mut review = review(&pod);
        review["request"]["operation"] = json!("UPDATE");
        review["request"]["subResource"] = json!("ephemeralcontainers");
        let (_, body) = injector.http1(post("/pods", &review)).await;
        let response = response(&body);
        assert!(response["patch"].is_null());
        response["status"]["message"].as_str().map(str::to_owned)
    };
    let (proxy, other, none) = (json!(1337), json!(1000), Value::Null);
    let denied = debug(&meshed, none.clone(), proxy.clone()).await;
    assert_eq!(
        denied.as_deref(),
        Some(
            "container \"shell\" runs as user 1337, which is reserved for the proxy, so that its traffic would bypass the mesh: choose another user"
        )
    );
    assert_eq!(debug(&meshed, proxy.clone(), none.clone()).await, denied);
    assert_eq!(debug(&meshed, proxy.clone(), other.clone()).await, None);
    assert_eq!(debug(&meshed, none.clone(), none.clone()).await, None);
    assert_eq!(
        debug(&plain, none, proxy.clone()).await,
        None,
        "not injected"
    );

    let mut taken = plain;
    taken["spec"]["containers"][0]["securityContext"] = json!({"runAsUser": proxy});
    let (_, body) = injector.http1(post("/pods", &review(&taken))).await;
    let meshed = patched(&taken, &response(&body));
    assert_eq!(debug(&meshed, Value::Null, proxy).await, None);
    let denied = debug(&meshed, Value::Null, json!(1338)).await;
    assert!(denied.is_some_and(|message| message.contains("user 1338")));
}

#[tokio::test]
async fn serves_an_api_server_that_authenticates_to_webhooks() {
    let injector = injector().await;
    // Its kubeconfig for webhooks contains a token, a certificate of a CA that the injector does not
    // know, or both.
    let authority::Server { leaf, key, .. } = authority::server("kube-apiserver");
    let leaf = CertificateDer::from_pem_slice(leaf.as_bytes()).expect("a certificate");
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).expect("a key");
    let builder = trusting(&injector.ca_file());
    let with_certificate = builder.with_client_auth_cert(vec![leaf], key);
    let with_certificate = with_certificate.expect("a client certificate");
    let without = client_config(&injector.ca_file(), b"http/1.1");
    let token = "Bearer eyJhbGciOiJub25lIn0.e30.";
    for (config, token) in [
        (without, Some(token)),
        (with_certificate.clone(), None),
        (with_certificate, Some(token)),
    ] {
        let mut request = post("/pods", &review(&pod("true")));
        let token = token.map(|token| token.parse().expect("a header"));
        let fields = token.map(|token| (AUTHORIZATION, token));
        request.headers_mut().extend(fields);
        let stream = TcpStream::connect(injector.address).await.expect("TCP");
        let stream = handshake(config, "127.0.0.1", stream).await;
        let (status, body) = send(stream.expect("a TLS connection"), request).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(response(&body)["patchType"], "JSONPatch");
    }
}

#[tokio::test]
async fn denies_invalid_annotation_and_warns_about_invalid_inject_annotation() {
    let injector = injector().await;
    let mut bad = pod("true");
    bad["metadata"]["annotations"]["diy-service-mesh/skip-outbound-ports"] = json!("25,smtp");
    let (_, body) = injector.http1(post("/pods", &review(&bad))).await;
    let answer = response(&body);
    assert_eq!(answer["allowed"], false);
    let message = answer["status"]["message"].as_str().expect("a message");
    assert!(
        message.starts_with("annotation diy-service-mesh/skip-outbound-ports is \"25,smtp\", expected ports from 1 to 65535"),
        "{message}"
    );

    let (_, body) = injector
        .http1(post("/pods", &review(&pod("enabled"))))
        .await;
    let answer = response(&body);
    assert_eq!(
        (&answer["allowed"], &answer["patch"]),
        (&json!(true), &Value::Null)
    );
    assert_eq!(
        answer["warnings"],
        json!([
            "not injected: annotation diy-service-mesh/inject is \"enabled\", expected \"true\" or \"false\""
        ])
    );
}

#[tokio::test]
async fn http2_serves_concurrent_reviews() {
    let injector = injector().await;
    let stream = injector
        .tls(b"h2", "injector.service-mesh.svc")
        .await
        .expect("a TLS connection");
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .expect("HTTP/2");
    tokio::spawn(connection);
    let answers = (0..200).map(|_| {
        let mut sender = sender.clone();
        async move {
            let request = post(
                "https://injector.service-mesh.svc/pods",
                &review(&pod("true")),
            );
            read(sender.send_request(request).await.expect("an answer")).await
        }
    });
    for (status, body) in futures::future::join_all(answers).await {
        assert_eq!(status, StatusCode::OK);
        assert!(response(&body)["patch"].is_string());
    }
}

#[tokio::test]
async fn rejects_malformed_review_and_serves_the_next_one() {
    let injector = injector().await;
    for body in ["", "not json", "{\"kind\":\"AdmissionReview\"}"] {
        let request = Request::post("/pods")
            .header("host", "injector")
            .body(Full::from(body))
            .expect("a request");
        let (status, answer) = injector.http1(request).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(!answer.is_empty());
    }
    let large = Request::post("/pods")
        .header("host", "injector")
        .body(Full::from(vec![b' '; 5 << 20]))
        .expect("a request");
    assert_eq!(injector.http1(large).await.0, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(
        injector.http1(post("/pods", &review(&pod("true")))).await.0,
        StatusCode::OK
    );
    let (status, text) = injector.admin("/metrics").await;
    assert_eq!(status, 200);
    assert!(
        text.contains("diy_mesh_injector_reviews_total{outcome=\"error\"} 4\n"),
        "{text}"
    );
    assert!(
        text.contains("diy_mesh_injector_reviews_total{outcome=\"injected\"} 1\n"),
        "{text}"
    );
}

#[tokio::test]
async fn certificate_is_valid_for_its_names_only() {
    let injector = injector().await;
    for name in [
        "localhost",
        "injector.service-mesh.svc",
        "injector.service-mesh.svc.cluster.local",
        "::1",
    ] {
        assert!(injector.tls(b"h2", name).await.is_ok(), "{name}");
    }
    assert!(
        injector
            .tls(b"h2", "controller.service-mesh.svc")
            .await
            .is_err()
    );
}

#[tokio::test]
async fn serves_probes_and_shuts_down_cleanly() {
    let injector = injector().await;
    assert_eq!(injector.admin("/live").await, (200, "live\n".into()));
    assert_eq!(injector.admin("/ready").await, (200, "ready\n".into()));
    assert_eq!(injector.admin("/").await.0, 404);
    // An idle connection does not delay the shutdown.
    let idle = injector
        .tls(b"http/1.1", "localhost")
        .await
        .expect("a TLS connection");
    injector.stop.send(()).expect("the injector runs");
    injector.task.await.expect("no panic").expect("no error");
    drop(idle);
    assert!(TcpStream::connect(injector.address).await.is_err());
}

#[tokio::test]
async fn reports_port_in_use() {
    let injector = injector().await;
    let config = config(&[&format!("--listen={}", injector.address)]);
    assert!(matches!(
        config.serving_certificate,
        ServingCertificate::Kubernetes { .. }
    ));
    let error = Injector::bind(config)
        .await
        .expect_err("the port is taken")
        .to_string();
    assert!(
        error.starts_with(&format!("cannot listen on {}", injector.address)),
        "{error}"
    );
}

/// Container runtimes start a process with a soft limit of 1,024 open files.
#[tokio::test]
async fn raises_the_limit_of_open_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut injector = Process::start(
        Command::new("sh")
            .args(["-c", "ulimit -Sn 64 && exec \"$0\" \"$@\""])
            .arg(env!("CARGO_BIN_EXE_injector"))
            .args([
                "--image-to-deploy-proxy=a",
                "--image-to-deploy-proxy-init=b",
            ])
            .args(["--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"])
            .arg("--serving-certificate=ephemeral")
            .arg(format!("--ca-file={}/ca.crt", folder.path().display()))
            .arg("--namespaces-folder=/nowhere"),
    );
    let line = injector.line(" admin=").await;
    let (_, admin) = line.split_once(" admin=").expect("it is there");
    let (_, page) = get(admin.parse().expect("an address"), "/metrics").await;
    let limit = metrics::value(&page, "diy_mesh_injector_max_open_files");
    assert!(limit > 64, "{limit} files can be open");
}

/// The API server is one address among many.
#[tokio::test]
async fn held_connections_do_not_keep_the_api_server_out() {
    // One address gets all slots until they are short.
    for (addresses, connections, slots) in [(1, 600, 256), (4, 200, 512)] {
        let injector = injector().await;
        let config = client_config(&injector.ca_file(), b"h2");
        let (established, mut held) = (Arc::new(AtomicUsize::new(0)), Vec::new());
        for source in (2..2 + addresses).flat_map(|source| iter::repeat_n(source, connections)) {
            let socket = TcpSocket::new_v4().expect("a socket");
            let source = format!("127.0.0.{source}:0").parse().expect("an address");
            socket.bind(source).expect("an address");
            let stream = socket.connect(injector.address).await.expect("TCP");
            let (config, established) = (config.clone(), established.clone());
            held.push(tokio::spawn(async move {
                let mut stream = handshake(config, "127.0.0.1", stream).await?;
                established.fetch_add(1, Ordering::Relaxed);
                stream.read_to_end(&mut Vec::new()).await
            }));
        }
        while established.load(Ordering::Relaxed) < slots {
            tokio::task::yield_now().await;
        }
        let pod = pod("true");
        let review = injector.http1(post("/pods", &review(&pod)));
        let (status, _) = soon(review).await;
        assert_eq!(status, StatusCode::OK);
        held.iter().for_each(|task| task.abort());
    }
}
