//! gRPC connections to the controllers: through the API server to the pods of the cluster, or to
//! given URLs. Each connection is TLS, and each call carries a token.

use std::{
    collections::BTreeMap,
    io,
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Args;
use diy_mesh_controller::AUTHORITY_CONDITION;
use diy_mesh_injector::containers::{ROOTS, ROOTS_CONFIG_MAP};
use diy_mesh_proto::{
    TOKEN_AUDIENCE,
    mesh::v1::{
        GetAuthorizationRequest, GetEdgesRequest, GetIdentityRequest, GetIdentityResponse,
        GetRoutesRequest, GetRoutesResponse, GetServicesRequest, GetTrafficRequest, Service,
        WatchServicesRequest, WatchServicesResponse, get_authorization_response,
        get_edges_response, get_traffic_response,
        service_mesh_service_client::ServiceMeshServiceClient,
    },
};
use diy_mesh_runtime::error_chain;
use futures::future::join_all;
use hyper::{Uri, http::uri::Authority};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec},
    core::v1::{ConfigMap, Pod, ServiceAccount},
};
use kube::{
    Api,
    api::{ListParams, PostParams},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::Mutex,
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::aws_lc_rs::default_provider,
        pki_types::{CertificateDer, ServerName, pem::PemObject},
        version::TLS13,
    },
};
use tonic::{
    Code, Request, Status, Streaming,
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint},
};
use tower::service_fn;

use crate::cluster::{self, Cluster, ConnectError};

/// How to reach the controllers.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Arguments {
    /// The cluster.
    #[command(flatten)]
    pub cluster: cluster::Arguments,
    /// The account, or the controllers in place of those of a cluster.
    #[command(flatten)]
    pub access: Access,
}

/// The account, or the controllers in place of those of a cluster.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Access {
    /// Service account whose token is sent: NAMESPACE/NAME, or NAME in the namespace of the mesh. The
    /// controller lists what this account may list: the pods of all namespaces, or of its own
    #[arg(long, value_name = "ACCOUNT", default_value = VIEWER)]
    pub account: String,
    /// URL of a controller to query instead of those of a cluster; repeatable
    #[arg(
        long, value_name = "https://HOST:PORT", value_parser = https_url, requires_all = ["token_file", "roots_file"],
        conflicts_with_all = ["context", "mesh_namespace", "account"]
    )]
    pub controller: Vec<Uri>,
    /// File with a token for --controller
    #[arg(long, value_name = "FILE", requires = "controller")]
    pub token_file: Option<PathBuf>,
    /// File with the trust roots for --controller, PEM
    #[arg(long, value_name = "FILE", requires = "controller")]
    pub roots_file: Option<PathBuf>,
}

/// The controllers cannot be reached, or reject the call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection to the cluster failed.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The pods cannot be listed.
    #[error("failed to list the controller pods in namespace {0}: {1}")]
    Pods(String, String),
    /// No controller pod is running.
    #[error(
        "no running controller found in namespace {0}: if Deployment controller exists there, scale it up or see its pods (kubectl describe -n {0} deployment/controller); else install the mesh there, or set its namespace with --mesh-namespace"
    )]
    NoPods(String),
    /// A file cannot be read.
    #[error("failed to read {0}: {1}")]
    File(PathBuf, io::Error),
    /// There is no usable token.
    #[error("no token for the controller: {0}")]
    Token(String),
    /// There are no usable trust roots.
    #[error("no trust roots of the mesh: {0}")]
    Roots(String),
    /// No controller responds.
    #[error("no controller responds: {0}")]
    Unreachable(String),
    /// The connection to one replica failed.
    #[error("{0}")]
    Connection(String),
    /// The controller rejects the call.
    #[error("request rejected by the controller: {}", describe_status(.0))]
    Rejected(#[from] Status),
}

/// The replicas of the controller.
pub struct Controllers {
    replicas: Replicas,
    /// The token of a cluster's service account, and the time of its request.
    token: Mutex<Option<(MetadataValue<Ascii>, Instant)>>,
}

enum Replicas {
    /// The pods of a cluster, and the service account whose token is sent.
    Cluster(Box<Cluster>, String),
    /// Addresses, with the files of a token and of the trust roots.
    Urls(Vec<Uri>, [PathBuf; 2]),
}

/// What every connection needs.
#[derive(Clone)]
struct Credentials {
    token: MetadataValue<Ascii>,
    roots: RootCertStore,
}

/// A connection to a controller.
pub struct Controller {
    client: ServiceMeshServiceClient<Channel>,
    token: MetadataValue<Ascii>,
}

/// The responses of the replicas to GetIdentity.
#[derive(Clone, Debug, Default)]
pub struct Responses {
    /// The status by the name of the pod or the address.
    pub replicas: BTreeMap<String, GetIdentityResponse>,
    /// The errors of replicas that did not respond.
    pub unreachable: BTreeMap<String, String>,
}

/// A connection before TLS.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// The service account that may list the pods of all namespaces.
const VIEWER: &str = "mesh-viewer";
/// The port of the gRPC server.
const PORT: u16 = 8080;
/// The port of the admin server.
const ADMIN_PORT: u16 = 8081;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Shorter than the timeout of an idle connection to the API server.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// The shortest validity that the API server grants, in seconds.
const TOKEN_SECONDS: i64 = 600;
/// A new token is requested after this time.
const TOKEN_AGE: Duration = Duration::from_secs(300);
/// A page has one MiB, or a single Service with some ten thousand endpoints.
const MAX_MESSAGE_SIZE: usize = 64 << 20;

fn https_url(text: &str) -> Result<Uri, String> {
    let uri = text.parse::<Uri>().ok();
    uri.filter(|uri| uri.scheme_str() == Some("https") && uri.host().is_some())
        .ok_or_else(|| {
            "expected an HTTPS URL such as https://controller.service-mesh.svc:8080".into()
        })
}

impl Controllers {
    /// The controllers at the given URLs, or those of the cluster.
    pub async fn new(Arguments { cluster, access }: &Arguments) -> Result<Self, Error> {
        match (&access.token_file, &access.roots_file) {
            (Some(token), Some(roots)) => Ok(Self::of(Replicas::Urls(
                access.controller.clone(),
                [token.clone(), roots.clone()],
            ))),
            _ => {
                let cluster = Cluster::connect(cluster).await?;
                let account = access.account.clone();
                Ok(Self::of(Replicas::Cluster(Box::new(cluster), account)))
            }
        }
    }

    /// The controllers of a cluster, as the account that may list all pods.
    pub fn of_cluster(cluster: &Cluster) -> Self {
        Self::of(Replicas::Cluster(Box::new(cluster.clone()), VIEWER.into()))
    }

    fn of(replicas: Replicas) -> Self {
        let token = Mutex::default();
        Self { replicas, token }
    }

    /// The cluster, unless URLs are given.
    pub fn cluster(&self) -> Option<&Cluster> {
        match &self.replicas {
            Replicas::Cluster(cluster, _) => Some(cluster),
            Replicas::Urls(..) => None,
        }
    }

    /// Connects to the first controller that responds.
    pub async fn connect(&self) -> Result<Controller, Error> {
        let credentials = self.credentials().await?;
        let mut errors = Vec::new();
        for name in self.names().await? {
            match self.connect_to(&name, credentials.clone()).await {
                Ok(controller) => return Ok(controller),
                Err(error) => errors.push(format!("{name}: {error}")),
            }
        }
        Err(Error::Unreachable(errors.join("; ")))
    }

    /// Connects to all replicas concurrently, and gives the errors of those that do not respond. Fails
    /// if none does.
    pub async fn connect_all(
        &self,
    ) -> Result<(BTreeMap<String, Controller>, BTreeMap<String, Error>), Error> {
        let credentials = self.credentials().await?;
        let connect = async |name: String| {
            let connected = self.connect_to(&name, credentials.clone()).await;
            (name, connected)
        };
        let (mut connected, mut errors) = (BTreeMap::new(), BTreeMap::new());
        for (name, one) in join_all(self.names().await?.into_iter().map(connect)).await {
            match one {
                Ok(controller) => drop(connected.insert(name, controller)),
                Err(error) => drop(errors.insert(name, error)),
            }
        }
        if connected.is_empty() {
            let errors = errors
                .iter()
                .map(|(name, error)| format!("{name}: {error}"));
            return Err(Error::Unreachable(errors.collect::<Vec<_>>().join("; ")));
        }
        Ok((connected, errors))
    }

    /// Reads the certificate status of all replicas concurrently. Fails if none responds.
    pub async fn identity(&self) -> Result<Responses, Error> {
        let credentials = self.credentials().await?;
        let read = |name: String| {
            let credentials = credentials.clone();
            async move {
                let response = async {
                    let mut controller = self.connect_to(&name, credentials).await?;
                    let response = timeout(REQUEST_TIMEOUT, controller.identity()).await;
                    Ok::<_, Error>(response.map_err(|_| timed_out(REQUEST_TIMEOUT))??)
                };
                let response = match response.await {
                    Err(Error::Connection(error)) => self.explain(&name, error).await,
                    response => response,
                };
                (name, response)
            }
        };
        let (mut responses, mut rejected) = (Responses::default(), None);
        for (name, response) in join_all(self.names().await?.into_iter().map(read)).await {
            match response {
                Ok(status) => drop(responses.replicas.insert(name, status)),
                Err(error) => {
                    responses.unreachable.insert(name, error.to_string());
                    if let Error::Rejected(_) = error {
                        rejected = Some(error);
                    }
                }
            }
        }
        if let Some(rejected) = rejected.filter(|_| responses.replicas.is_empty()) {
            return Err(rejected);
        }
        if responses.replicas.is_empty() {
            let errors = responses.unreachable.iter();
            let errors: Vec<_> = errors
                .map(|(name, error)| format!("{name}: {error}"))
                .collect();
            return Err(Error::Unreachable(errors.join("; ")));
        }
        Ok(responses)
    }

    /// The status of a replica without a connection, if it is not ready for want of a CA: then it has no
    /// certificate, and cannot serve. Else the error, with the reasons why it is not ready.
    async fn explain(&self, name: &str, error: String) -> Result<GetIdentityResponse, Error> {
        let Replicas::Cluster(cluster, _) = &self.replicas else {
            return Err(Error::Connection(error));
        };
        let path = format!("{name}:{ADMIN_PORT}/proxy/ready");
        let ready = cluster.admin_page(&cluster.mesh_namespace, &path).await;
        let reasons = ready.err().unwrap_or_default();
        let reasons = reasons.lines().filter(|line| !line.trim().is_empty());
        let of_authority = |line: &str| {
            let line = line.strip_prefix(AUTHORITY_CONDITION)?;
            Some(line.strip_prefix(": ")?.to_owned())
        };
        if let Some(problem) = reasons.clone().find_map(of_authority) {
            return Ok(GetIdentityResponse {
                problem,
                ..GetIdentityResponse::default()
            });
        }
        let texts: Vec<&str> = std::iter::once(&*error).chain(reasons).collect();
        Err(Error::Connection(texts.join("; ")))
    }

    /// The names of the running controller pods, or the authorities of the URLs.
    async fn names(&self) -> Result<Vec<String>, Error> {
        match &self.replicas {
            Replicas::Cluster(cluster, _) => running_pods(cluster).await,
            Replicas::Urls(urls, _) => {
                let authorities = urls.iter().filter_map(Uri::authority);
                Ok(authorities.map(ToString::to_string).collect())
            }
        }
    }

    async fn credentials(&self) -> Result<Credentials, Error> {
        match &self.replicas {
            Replicas::Cluster(cluster, account) => {
                let mut cached = self.token.lock().await;
                let fresh = cached.take().filter(|(_, at)| at.elapsed() < TOKEN_AGE);
                let (token, at) = match fresh {
                    Some(fresh) => fresh,
                    None => {
                        let token = request_token(cluster, account).await?;
                        (metadata(&token)?, Instant::now())
                    }
                };
                *cached = Some((token.clone(), at));
                let roots = roots(cluster).await?;
                Ok(Credentials { token, roots })
            }
            Replicas::Urls(_, files) => {
                let read = |path: &PathBuf| {
                    std::fs::read_to_string(path).map_err(|error| Error::File(path.clone(), error))
                };
                let [token, roots] = files.each_ref().map(read);
                Ok(Credentials {
                    token: metadata(&token?)?,
                    roots: certificates(&roots?)?,
                })
            }
        }
    }

    /// Connects to the controller with one of the `names`.
    async fn connect_to(&self, name: &str, credentials: Credentials) -> Result<Controller, Error> {
        match &self.replicas {
            Replicas::Cluster(cluster, _) => {
                let pods: Api<Pod> =
                    Api::namespaced(cluster.client.clone(), &cluster.mesh_namespace);
                let forward = async || {
                    let forwarder = pods.portforward(name, &[PORT]).await;
                    let mut forwarder = forwarder.map_err(io::Error::other)?;
                    let stream = forwarder.take_stream(PORT);
                    Ok(Box::new(stream.ok_or(io::ErrorKind::NotConnected)?) as _)
                };
                let host = format!("controller.{}.svc", cluster.mesh_namespace);
                Controller::over(forward, &host, credentials).await
            }
            Replicas::Urls(..) => {
                let authority: Authority = name
                    .parse()
                    .map_err(|_| Error::Connection("invalid URL".to_owned()))?;
                let host = authority.host().trim_matches(['[', ']']);
                let address = (host, authority.port_u16().unwrap_or(PORT));
                let connect = async || Ok(Box::new(TcpStream::connect(address).await?) as _);
                // Controllers have certificates for the names of their Service and for localhost.
                let name = match host.parse::<IpAddr>() {
                    Ok(_) => "localhost",
                    Err(_) => host,
                };
                Controller::over(connect, name, credentials).await
            }
        }
    }
}

/// The names of the running controller pods.
async fn running_pods(cluster: &Cluster) -> Result<Vec<String>, Error> {
    let namespace = &cluster.mesh_namespace;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    let pods = pods
        .list(&ListParams::default().labels("app=controller"))
        .await;
    let pods =
        pods.map_err(|error| Error::Pods(namespace.clone(), cluster::describe_error(error)))?;
    let running = pods.items.into_iter().filter(|pod| {
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        pod.metadata.deletion_timestamp.is_none() && phase == Some("Running")
    });
    let names: Vec<String> = running.filter_map(|pod| pod.metadata.name).collect();
    if names.is_empty() {
        return Err(Error::NoPods(namespace.clone()));
    }
    Ok(names)
}

fn timed_out(after: Duration) -> Error {
    Error::Connection(format!("timed out after {} s", after.as_secs()))
}

fn describe_status(status: &Status) -> String {
    match status.code() {
        Code::Unimplemented => {
            "its release does not have this call: use the mesh command of that release".to_owned()
        }
        code => format!("{code:?}: {}", status.message()),
    }
}

impl Controller {
    /// Connects over the stream that `connect` opens.
    async fn over(
        connect: impl AsyncFnOnce() -> io::Result<Box<dyn Io>>,
        server_name: &str,
        Credentials { token, roots }: Credentials,
    ) -> Result<Self, Error> {
        let connected = async {
            let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
                .with_protocol_versions(&[&TLS13])
                .map_err(io::Error::other)?;
            let mut config = config.with_root_certificates(roots).with_no_client_auth();
            config.alpn_protocols = vec![b"h2".to_vec()];
            let server_name = ServerName::try_from(server_name.to_owned());
            let server_name = server_name.map_err(io::Error::other)?;
            let tls = TlsConnector::from(Arc::new(config));
            let mut stream = Some(tls.connect(server_name, connect().await?).await?);
            // There is one stream: a lost connection ends the command. With an https URL, tonic
            // would require its own TLS.
            let once = service_fn(move |_: Uri| {
                let stream = stream.take().ok_or(io::ErrorKind::NotConnected);
                async { Ok::<_, io::Error>(TokioIo::new(stream?)) }
            });
            // Pings end a quiet watch if the controller is unavailable, and keep the API server's
            // forwarding open.
            let channel = Endpoint::from_static("http://controller")
                .http2_keep_alive_interval(PING_INTERVAL)
                .keep_alive_while_idle(true)
                .connect_with_connector(once)
                .await;
            channel.map_err(io::Error::other)
        };
        let channel = match timeout(CONNECT_TIMEOUT, connected).await {
            Ok(channel) => channel.map_err(|error| Error::Connection(error_chain(&error)))?,
            Err(_) => return Err(timed_out(CONNECT_TIMEOUT)),
        };
        let client = ServiceMeshServiceClient::new(channel);
        Ok(Self {
            client: client.max_decoding_message_size(MAX_MESSAGE_SIZE),
            token,
        })
    }

    /// The named Services ("namespace/name"), or all.
    pub async fn services(&mut self, names: Vec<String>) -> Result<Vec<Service>, Error> {
        let pages = pages(async |page_token| {
            let services = names.clone();
            let request = self.authorize(GetServicesRequest {
                services,
                page_token,
            });
            let page = self.client.get_services(request).await?.into_inner();
            Ok((page.services, page.next_page_token))
        });
        Ok(pages.await?.concat())
    }

    /// The named Services, or all, then each change.
    pub async fn watch_services(
        &mut self,
        services: Vec<String>,
    ) -> Result<Streaming<WatchServicesResponse>, Error> {
        let request = self.authorize(WatchServicesRequest { services });
        Ok(self.client.watch_services(request).await?.into_inner())
    }

    /// What happens with the requests of the clients of a namespace to a Service.
    pub async fn routes(
        &mut self,
        service: String,
        clients: String,
    ) -> Result<GetRoutesResponse, Error> {
        let pages = pages(async |page_token| {
            let request = self.authorize(GetRoutesRequest {
                service: service.clone(),
                clients: clients.clone(),
                page_token,
            });
            let mut page = self.client.get_routes(request).await?.into_inner();
            let next = std::mem::take(&mut page.next_page_token);
            Ok((page, next))
        });
        let first_has_all = |mut all: GetRoutesResponse, mut page: GetRoutesResponse| {
            all.ports.append(&mut page.ports);
            all
        };
        let all = pages.await?.into_iter().reduce(first_has_all);
        Ok(all.unwrap_or_default())
    }

    /// The pods of a target ("namespace/name") with who may call them.
    pub async fn authorization(
        &mut self,
        target: String,
        port: u32,
    ) -> Result<Vec<get_authorization_response::Pod>, Error> {
        let pages = pages(async |page_token| {
            let request = self.authorize(GetAuthorizationRequest {
                target: target.clone(),
                port,
                page_token,
            });
            let page = self.client.get_authorization(request).await?.into_inner();
            Ok((page.pods, page.next_page_token))
        });
        Ok(pages.await?.concat())
    }

    /// What the pods of a namespace were called by, or those of all ("").
    pub async fn edges(
        &mut self,
        namespace: &str,
    ) -> Result<Vec<get_edges_response::Group>, Error> {
        let pages = pages(async |page_token| {
            let namespace = namespace.to_owned();
            let request = self.authorize(GetEdgesRequest {
                namespace,
                page_token,
            });
            let page = self.client.get_edges(request).await?.into_inner();
            Ok((page.groups, page.next_page_token))
        });
        Ok(pages.await?.concat())
    }

    /// What the proxies of a namespace, or of all (""), have reported last to this replica. With `watch`,
    /// they report each second for some time.
    pub async fn traffic(
        &mut self,
        namespace: &str,
        watch: bool,
    ) -> Result<Vec<get_traffic_response::Pod>, Error> {
        let pages = pages(async |page_token| {
            let request = self.authorize(GetTrafficRequest {
                namespace: namespace.to_owned(),
                watch,
                page_token,
            });
            let page = self.client.get_traffic(request).await?.into_inner();
            Ok((page.pods, page.next_page_token))
        });
        let pages = timeout(REQUEST_TIMEOUT, pages).await;
        Ok(pages.map_err(|_| timed_out(REQUEST_TIMEOUT))??.concat())
    }

    /// The certificate status of the replica with all its workloads.
    async fn identity(&mut self) -> Result<GetIdentityResponse, Status> {
        let (mut workloads, mut page_token) = (Vec::new(), String::new());
        loop {
            let request = self.authorize(GetIdentityRequest { page_token });
            let mut page = self.client.get_identity(request).await?.into_inner();
            workloads.append(&mut page.workloads);
            page_token = std::mem::take(&mut page.next_page_token);
            if page_token.is_empty() {
                return Ok(GetIdentityResponse { workloads, ..page });
            }
        }
    }

    fn authorize<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let token = self.token.clone();
        request.metadata_mut().insert("authorization", token);
        request
    }
}

/// The pages of a response, each by the token that `page` gives with the one before. The last one has
/// none.
async fn pages<P>(
    mut page: impl AsyncFnMut(String) -> Result<(P, String), Status>,
) -> Result<Vec<P>, Status> {
    let (mut pages, mut token) = (Vec::new(), String::new());
    loop {
        let (page, next) = page(token).await?;
        pages.push(page);
        token = next;
        if token.is_empty() {
            return Ok(pages);
        }
    }
}

fn metadata(token: &str) -> Result<MetadataValue<Ascii>, Error> {
    let value: Result<MetadataValue<Ascii>, _> = format!("Bearer {}", token.trim()).parse();
    let mut value = value.map_err(|error| Error::Token(error.to_string()))?;
    value.set_sensitive(true);
    Ok(value)
}

fn certificates(pem: &str) -> Result<RootCertStore, Error> {
    let mut store = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let certificate = certificate.map_err(|error| Error::Roots(error.to_string()))?;
        let added = store.add(certificate);
        added.map_err(|error| Error::Roots(error.to_string()))?;
    }
    if store.is_empty() {
        return Err(Error::Roots("the PEM contains no certificate".into()));
    }
    Ok(store)
}

/// A token of `account`: NAMESPACE/NAME, or NAME in the namespace of the mesh.
async fn request_token(cluster: &Cluster, account: &str) -> Result<String, Error> {
    let (namespace, name) = account
        .split_once('/')
        .unwrap_or((&cluster.mesh_namespace, account));
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client.clone(), namespace);
    let request = TokenRequest {
        spec: TokenRequestSpec {
            audiences: vec![TOKEN_AUDIENCE.into()],
            expiration_seconds: Some(TOKEN_SECONDS),
            ..TokenRequestSpec::default()
        },
        ..TokenRequest::default()
    };
    let response = accounts
        .create_token_request(name, &PostParams::default(), &request)
        .await;
    let response = response.map_err(cluster::describe_error);
    let token = response.and_then(|response| {
        let status = response.status.map(|status| status.token);
        status.ok_or_else(|| "the response contains none".to_owned())
    });
    token.map_err(|error| {
        Error::Token(format!(
            "failed to create a token of the service account {namespace}/{name}: {error}; name one \
             that you may create tokens for with --account NAMESPACE/NAME"
        ))
    })
}

/// The roots that the controller publishes in the namespace of the mesh.
async fn roots(cluster: &Cluster) -> Result<RootCertStore, Error> {
    let namespace = &cluster.mesh_namespace;
    let config_maps: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), namespace);
    let config_map = config_maps.get(ROOTS_CONFIG_MAP).await;
    let config_map = config_map.map_err(|error| Error::Roots(cluster::describe_error(error)))?;
    let pem = config_map.data.and_then(|mut data| data.remove(ROOTS));
    certificates(&pem.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn replica_without_a_connection_is_named_with_the_reason() {
        let service = service_fn(|request: hyper::Request<kube::client::Body>| async move {
            let pods = "/api/v1/namespaces/service-mesh/pods";
            let path = request.uri().path().strip_prefix(pods).unwrap_or_default();
            let page = match path {
                "/lost:8081/proxy/ready" => {
                    "catalog: not synced\ncertificate authority: the Secret contains no CA\n"
                }
                "/new:8081/proxy/ready" => "catalog: not synced\n",
                _ => "unexpected path\n",
            };
            let response = hyper::Response::builder().status(503);
            response.body(kube::client::Body::from(page.as_bytes().to_vec()))
        });
        let controllers = Controllers::of_cluster(&Cluster {
            client: kube::Client::new(service, "default"),
            mesh_namespace: "service-mesh".into(),
            version: crate::check::facts::testing::unknown_facts().version,
        });
        // A problem of the authority, as its status would have it.
        let status = controllers.explain("lost", "refused".into()).await.unwrap();
        assert_eq!(status.problem, "the Secret contains no CA");
        let error = controllers.explain("new", "refused".into()).await;
        let error = error.unwrap_err().to_string();
        assert_eq!(error, "refused; catalog: not synced");
    }

    #[test]
    fn rejects_invalid_files_and_urls() {
        assert!(certificates("no PEM").is_err());
        assert!(metadata("two\nlines").is_err());
        assert!(https_url("http://controller:8080").is_err());
        assert!(https_url("https://controller:8080").is_ok());
    }
}
