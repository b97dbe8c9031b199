//! A controller in this process, with a catalog of files and an issuer of its own, and a client
//! that talks to it over loopback.
#![allow(dead_code, clippy::unwrap_used)]

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use diy_mesh_controller::authority::TrustSender;
use diy_mesh_controller::config::{Authenticator, Storage};
use diy_mesh_controller::{Config, Controller, Error};
use diy_mesh_proto::CAPABILITIES_METADATA;
use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::mesh::v1::service_mesh_service_client::ServiceMeshServiceClient;
use diy_mesh_testkit::http::get;
use diy_mesh_testkit::tokens::{Signer, now};
use diy_mesh_testkit::wait::soon;
use proto::ResourceType;
use proto::discover_request::Action;
use proto::discover_response::Update;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Request, Status, Streaming};

/// A folder for a controller's files, in memory where there is such a place: what it writes it has
/// on the disk before it goes on, and a disk may be busy for seconds.
pub fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        tempfile::tempdir_in(memory)
    } else {
        tempfile::tempdir()
    }
    .unwrap()
}

/// The claims of a token that is good.
pub fn claims() -> Value {
    let now = now();
    json!({
        "iss": "https://issuer.test", "aud": ["diy-service-mesh"], "sub": "system:serviceaccount:shop:web",
        "iat": now, "nbf": now, "exp": now + 3600,
        "kubernetes.io": {"namespace": "shop", "pod": {"name": "web-1", "uid": "1"}, "serviceaccount": {"name": "web", "uid": "2"}},
    })
}

/// A controller and its files.
pub struct Sandbox {
    pub issuer: Signer,
    pub address: SocketAddr,
    pub admin: SocketAddr,
    pub authority: TrustSender,
    pub dir: tempfile::TempDir,
    stop: Option<oneshot::Sender<()>>,
    running: JoinHandle<Result<(), Error>>,
}

impl Sandbox {
    pub async fn start(manifests: &[(&str, String)]) -> Sandbox {
        Sandbox::start_with(manifests, |_| {}).await
    }

    /// A controller with other settings.
    pub async fn start_with(
        manifests: &[(&str, String)],
        change: impl FnOnce(&mut Config),
    ) -> Sandbox {
        let dir = scratch();
        let issuer = Signer::named("first");
        std::fs::create_dir(dir.path().join("catalog")).unwrap();
        std::fs::create_dir(dir.path().join("ca")).unwrap();
        for (name, text) in manifests {
            replace(&dir.path().join("catalog").join(name), text);
        }
        replace(&dir.path().join("jwks.json"), &issuer.jwks());
        let mut config = config(dir.path());
        change(&mut config);
        let controller = Controller::bind(config).await.unwrap();
        let (address, admin, kept) = (
            controller.address(),
            controller.admin_address(),
            controller.authority().clone(),
        );
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(controller.run(async {
            let _ = stopped.await;
        }));
        let authority = soon(kept.loaded()).await.unwrap();
        Sandbox {
            issuer,
            address,
            admin,
            authority,
            dir,
            stop: Some(stop),
            running,
        }
    }

    pub fn write(&self, name: &str, text: &str) {
        replace(&self.dir.path().join("catalog").join(name), text);
    }

    pub fn remove(&self, name: &str) {
        std::fs::remove_file(self.dir.path().join("catalog").join(name)).unwrap();
    }

    /// Stops the controller like SIGTERM.
    pub fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    pub async fn ended(self) {
        soon(self.running).await.unwrap().unwrap();
    }

    pub async fn channel(&self) -> Channel {
        self.try_channel().await.unwrap()
    }

    /// A client that trusts the mesh's roots of now.
    pub async fn try_channel(&self) -> Result<Channel, tonic::transport::Error> {
        let roots = self.authority.borrow().roots.pem.clone();
        connect(self.address, &roots).await
    }

    pub async fn client(&self) -> Client {
        Client {
            client: ServiceMeshServiceClient::new(self.channel().await),
            token: Some(self.issuer.sign(&claims())),
            announced: None,
        }
    }

    /// A client of the pod with this UID.
    pub async fn pod(&self, uid: usize) -> Client {
        let mut claims = claims();
        let pod = json!({"name": format!("web-{uid}"), "uid": uid.to_string()});
        claims["kubernetes.io"]["pod"] = pod;
        Client {
            token: Some(self.issuer.sign(&claims)),
            ..self.client().await
        }
    }

    /// A client with the token of a service account, which is bound to no pod.
    pub async fn account(&self, user: &str) -> Client {
        let mut claims = claims();
        claims["sub"] = json!(user);
        claims["kubernetes.io"] = json!({});
        Client {
            token: Some(self.issuer.sign(&claims)),
            ..self.client().await
        }
    }

    pub async fn admin(&self, path: &str) -> (u16, String) {
        get(self.admin, path).await
    }
}

/// A client's connection to a controller that these roots vouch for.
pub async fn connect(address: SocketAddr, roots: &str) -> Result<Channel, tonic::transport::Error> {
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(roots))
        .domain_name("localhost");
    Endpoint::from_shared(format!("https://{address}"))
        .unwrap()
        .tls_config(tls)
        .unwrap()
        .connect()
        .await
}

pub fn config(dir: &Path) -> Config {
    Config {
        listen: "127.0.0.1:0".parse().unwrap(),
        admin_listen: "127.0.0.1:0".parse().unwrap(),
        catalog: Storage::Files(dir.join("catalog")),
        authenticator: Authenticator::Jwks(dir.join("jwks.json")),
        jwks_issuer: Some("https://issuer.test".into()),
        ca: Storage::Files(dir.join("ca")),
        ca_life: Duration::from_secs(86_400),
        certificate_life: Duration::from_secs(3600),
        trust_domain: "cluster.local".into(),
        pod_namespace: "service-mesh".into(),
        key_urls: vec![],
        private_key_urls: vec![],
        key_roots_file: dir.join("roots.pem"),
        log: tracing_subscriber::filter::Targets::new(),
        log_format: diy_mesh_runtime::LogFormat::Text,
    }
}

pub fn replace(path: &Path, text: &str) {
    let hidden = path.with_file_name(format!(".{}", path.file_name().unwrap().to_str().unwrap()));
    std::fs::write(&hidden, text).unwrap();
    std::fs::rename(hidden, path).unwrap();
}

/// A caller with a token.
pub struct Client {
    pub client: ServiceMeshServiceClient<Channel>,
    pub token: Option<String>,
    /// The capabilities that its Discover streams announce.
    pub announced: Option<&'static str>,
}

impl Client {
    pub fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            request
                .metadata_mut()
                .insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        request
    }

    /// The Services of all pages.
    pub async fn services(&mut self, names: &[&str]) -> Result<Vec<proto::Service>, Status> {
        Ok(self.pages_of_services(names).await?.concat())
    }

    pub async fn pages_of_services(
        &mut self,
        names: &[&str],
    ) -> Result<Vec<Vec<proto::Service>>, Status> {
        let (mut pages, mut page_token) = (Vec::new(), String::new());
        loop {
            let request = self.request(proto::GetServicesRequest {
                services: names.iter().map(|name| name.to_string()).collect(),
                page_token,
            });
            let page = self.client.get_services(request).await?.into_inner();
            pages.push(page.services);
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return Ok(pages);
            }
        }
    }

    pub async fn identity(&mut self) -> Result<proto::GetIdentityResponse, Status> {
        let request = self.request(proto::GetIdentityRequest::default());
        Ok(self.client.get_identity(request).await?.into_inner())
    }

    pub async fn watch(&mut self, names: &[&str]) -> Streaming<proto::WatchServicesResponse> {
        let request = self.request(proto::WatchServicesRequest {
            services: names.iter().map(|name| name.to_string()).collect(),
        });
        self.client
            .watch_services(request)
            .await
            .unwrap()
            .into_inner()
    }

    /// A stream of a proxy that applies routes, on which the roots have come.
    pub async fn discover_routes(&mut self) -> Discover {
        self.announced = Some("chunks, routes, policy");
        self.discover().await
    }

    /// A stream on which the roots have come.
    pub async fn discover(&mut self) -> Discover {
        let mut discover = self.try_discover().await.unwrap();
        assert_eq!(discover.said().await, ": roots");
        discover
    }

    pub async fn try_discover(&mut self) -> Result<Discover, Status> {
        let (requests, stream) = mpsc::channel(16);
        let mut request = self.request(ReceiverStream::new(stream));
        if let Some(words) = self.announced {
            let words = words.parse().unwrap();
            request.metadata_mut().insert(CAPABILITIES_METADATA, words);
        }
        let answer = self.client.discover(request).await?;
        let capabilities = answer.metadata().get(CAPABILITIES_METADATA);
        let capabilities = capabilities.unwrap().to_str().unwrap().to_owned();
        Ok(Discover {
            requests,
            capabilities,
            answers: answer.into_inner(),
        })
    }
}

/// An open Discover stream.
pub struct Discover {
    pub requests: mpsc::Sender<proto::DiscoverRequest>,
    pub capabilities: String,
    pub answers: Streaming<proto::DiscoverResponse>,
}

impl Discover {
    pub async fn subscribe(&self, destination: &str, known_version: &str) {
        let subscribe = proto::Subscribe {
            name: destination.into(),
            known_version: known_version.into(),
            ..proto::Subscribe::default()
        };
        self.send(Action::Subscribe(subscribe)).await;
    }

    pub async fn subscribe_to(&self, kind: ResourceType, name: &str) {
        let subscribe = proto::Subscribe {
            name: name.into(),
            r#type: kind.into(),
            ..proto::Subscribe::default()
        };
        self.send(Action::Subscribe(subscribe)).await;
    }

    pub async fn unsubscribe(&self, destination: &str) {
        self.send(Action::Unsubscribe(proto::Unsubscribe {
            name: destination.into(),
            ..proto::Unsubscribe::default()
        }))
        .await;
    }

    pub async fn send(&self, action: Action) {
        self.requests
            .send(proto::DiscoverRequest {
                action: Some(action),
            })
            .await
            .unwrap();
    }

    pub async fn answer(&mut self) -> Result<proto::DiscoverResponse, Status> {
        let answer = soon(self.answers.message()).await?;
        Ok(answer.expect("the stream goes on"))
    }

    /// The next answer in a few words.
    pub async fn said(&mut self) -> String {
        say(&self.answer().await.unwrap())
    }
}

pub fn say(answer: &proto::DiscoverResponse) -> String {
    let list = |endpoints: &[proto::Endpoint]| {
        endpoints
            .iter()
            .map(|endpoint| endpoint.address.clone())
            .collect::<Vec<_>>()
            .join(" ")
    };
    let what = match answer.update.as_ref().unwrap() {
        Update::Snapshot(snapshot) => {
            let kind = if snapshot.kind() == proto::snapshot::Kind::Pod {
                "pod"
            } else {
                "service"
            };
            format!(
                "{kind} {}/{} [{}]",
                snapshot.namespace,
                snapshot.name,
                list(&snapshot.endpoints)
            )
        }
        Update::Delta(delta) => format!(
            "+[{}] -[{}]",
            list(&delta.upserted),
            delta.removed.join(" ")
        ),
        Update::Unchanged(_) => "unchanged".into(),
        Update::Unknown(_) => "unknown".into(),
        Update::Roots(_) => "roots".into(),
        Update::ReportTraffic(report) => format!("report for {} s", report.seconds),
        Update::Workload(workload) => {
            let opaque = workload.opaque_ports.iter();
            let opaque: Vec<String> = opaque
                .map(|ports| format!("{}-{}", ports.first, ports.last))
                .collect();
            let ports = workload.ports.iter();
            let ports: Vec<String> = ports
                .map(|port| format!("{}:{}/{}", port.name, port.port, port.protocol))
                .collect();
            format!(
                "workload {} connect {} opaque {opaque:?} ports {ports:?}",
                workload.inbound_mode().as_str_name(),
                workload.allow_connect
            )
        }
    };
    format!("{}: {what}", answer.name)
}

/// A Service `shop/web` on port 80, its pods at these addresses, and one slice of them.
pub fn web(pods: &[&str]) -> String {
    let mut text = "apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.7, ports: [{name: http, port: 80, targetPort: 8080, appProtocol: http}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
"
    .to_owned();
    if pods.is_empty() {
        text = text.replace("endpoints:\n", "endpoints: []\n");
    }
    for pod in pods {
        let name = pod.replace('.', "-");
        text += &format!(
            "- {{addresses: [{pod}], zone: a, targetRef: {{kind: Pod, name: web-{name}, namespace: shop}}}}\n"
        );
    }
    for pod in pods {
        text += &pod_manifest(&format!("web-{}", pod.replace('.', "-")), pod);
    }
    text
}

pub fn pod_manifest(name: &str, ip: &str) -> String {
    format!(
        "---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: shop}}
spec: {{serviceAccountName: web, initContainers: [{{name: proxy, env: [{{name: SERVICE_MESH_TOKEN_FILE}}]}}], containers: []}}
status: {{phase: Running, podIP: {ip}, podIPs: [{{ip: {ip}}}]}}
"
    )
}
