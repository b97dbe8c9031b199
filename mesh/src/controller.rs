//! gRPC connections to the controllers: through the API server to the pods of the cluster, or to
//! given URLs. Each connection is TLS, and each call carries a token.

use std::{
    collections::BTreeMap,
    io,
    mem::take,
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
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
    Api, ResourceExt,
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
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Channel, Endpoint},
};
use tower::service_fn;

use crate::{
    cluster::{self, Cluster, describe_error, objects},
    pods, proxies,
};

/// How to reach the controllers.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Arguments {
    /// The cluster.
    #[command(flatten)]
    pub cluster: cluster::Arguments,
    /// The account, or the controllers in place of the controllers of a cluster.
    #[command(flatten)]
    pub access: Access,
}

/// The account, or the controllers in place of the controllers of a cluster.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Access {
    /// Service account whose token is sent: NAMESPACE/NAME, or NAME in the namespace of the mesh. The
    /// controller lists what this account may list: the pods of all namespaces, or of its own
    #[arg(long, value_name = "ACCOUNT", default_value = VIEWER)]
    pub account: String,
    /// URL of a controller to query instead of the controllers of a cluster; repeatable
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

/// The controller rejects a call.
#[derive(Debug, thiserror::Error)]
#[error("request rejected by the controller: {}", describe_status(.0))]
pub struct Rejected(#[from] pub Status);

/// The replicas of the controller.
pub struct Controllers {
    replicas: Replicas,
    /// The token of a cluster's service account, and the time of its request.
    token: Mutex<Option<(Token, Instant)>>,
}

enum Replicas {
    /// The pods of a cluster, and the service account whose token is sent.
    Cluster(Box<Cluster>, String),
    /// Addresses, with the files of a token and of the trust roots.
    Urls(Vec<Uri>, [PathBuf; 2]),
}

/// The credentials of every connection.
#[derive(Clone)]
struct Credentials {
    token: Token,
    roots: RootCertStore,
}

/// A connection to a controller.
pub struct Controller {
    client: ServiceMeshServiceClient<InterceptedService<Channel, Token>>,
}

/// The token of each call.
#[derive(Clone)]
struct Token(MetadataValue<Ascii>);

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
    /// The controllers at the given URLs, or the controllers of the cluster.
    pub async fn new(Arguments { cluster, access }: &Arguments) -> Result<Self> {
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
    pub async fn connect(&self) -> Result<Controller> {
        let credentials = self.credentials().await?;
        let mut errors = BTreeMap::new();
        for name in self.names().await? {
            match self.connect_to(&name, &credentials).await {
                Ok(controller) => return Ok(controller),
                Err(error) => drop(errors.insert(name, error)),
            }
        }
        Err(unreachable(errors))
    }

    /// Connects to all replicas concurrently, and gives the errors of those that do not respond. Fails
    /// if none does.
    pub async fn connect_all(&self) -> Result<(BTreeMap<String, Controller>, Errors)> {
        let credentials = self.credentials().await?;
        let connect = async |name: &str| self.connect_to(name, &credentials).await;
        of_all(&self.names().await?, connect).await
    }

    /// The trust domain of each replica, with what it knows of the calls to and by pods of a namespace,
    /// or of all (""); and the errors of those that do not respond. Fails if none does.
    pub async fn edges(
        &self,
        namespace: &str,
    ) -> Result<(
        BTreeMap<String, (String, Vec<get_edges_response::Group>)>,
        Errors,
    )> {
        let credentials = self.credentials().await?;
        let read = async |name: &str| {
            let mut controller = self.connect_to(name, &credentials).await?;
            let identity = timely(REQUEST_TIMEOUT, controller.identity()).await?;
            let groups = timely(REQUEST_TIMEOUT, controller.edges(namespace)).await?;
            Ok((identity.trust_domain, groups))
        };
        of_all(&self.names().await?, read).await
    }

    /// Reads the certificate status of all replicas concurrently. Fails if none responds.
    pub async fn identity(&self) -> Result<Responses> {
        let credentials = self.credentials().await?;
        let read = async |name: &str| {
            let response = async {
                let mut controller = self.connect_to(name, &credentials).await?;
                timely(REQUEST_TIMEOUT, controller.identity()).await
            };
            match response.await {
                Err(error) if !error.is::<Rejected>() => self.explain(name, error).await,
                response => response,
            }
        };
        let (replicas, errors) = of_all(&self.names().await?, read).await?;
        let unreachable = errors
            .into_iter()
            .map(|(name, error)| (name, error.to_string()));
        Ok(Responses {
            replicas,
            unreachable: unreachable.collect(),
        })
    }

    /// The status of a replica without a connection, if it is not ready for want of a CA: then it has no
    /// certificate, and cannot serve. Else the error, with the reasons why it is not ready.
    async fn explain(&self, name: &str, error: anyhow::Error) -> Result<GetIdentityResponse> {
        let Replicas::Cluster(cluster, _) = &self.replicas else {
            return Err(error);
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
        let error = error.to_string();
        let texts: Vec<&str> = std::iter::once(&*error).chain(reasons).collect();
        bail!(texts.join("; "))
    }

    /// The names of the running controller pods, or the authorities of the URLs.
    async fn names(&self) -> Result<Vec<String>> {
        match &self.replicas {
            Replicas::Cluster(cluster, _) => running_pods(cluster).await,
            Replicas::Urls(urls, _) => {
                let authorities = urls.iter().filter_map(Uri::authority);
                Ok(authorities.map(ToString::to_string).collect())
            }
        }
    }

    async fn credentials(&self) -> Result<Credentials> {
        match &self.replicas {
            Replicas::Cluster(cluster, account) => {
                let mut cached = self.token.lock().await;
                let fresh = cached.take().filter(|(_, at)| at.elapsed() < TOKEN_AGE);
                let (token, at) = match fresh {
                    Some(fresh) => fresh,
                    None => {
                        let token = request_token(cluster, account).await?;
                        (Token::new(&token)?, Instant::now())
                    }
                };
                *cached = Some((token.clone(), at));
                let roots = roots(cluster).await?;
                Ok(Credentials { token, roots })
            }
            Replicas::Urls(_, files) => {
                let [token, roots] = files.each_ref().map(|path| {
                    let text = std::fs::read_to_string(path);
                    text.map_err(|error| anyhow!("failed to read {}: {error}", path.display()))
                });
                Ok(Credentials {
                    token: Token::new(&token?)?,
                    roots: certificates(&roots?)?,
                })
            }
        }
    }

    /// Connects to the controller with one of the `names`.
    async fn connect_to(&self, name: &str, credentials: &Credentials) -> Result<Controller> {
        match &self.replicas {
            Replicas::Cluster(cluster, _) => {
                let pods: Api<Pod> = objects(&cluster.client, Some(&cluster.mesh_namespace));
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
                let authority: Authority = name.parse().context("invalid URL")?;
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

/// The errors of replicas by their names.
type Errors = BTreeMap<String, anyhow::Error>;

/// The answers of the replicas, which are asked at the same time, and the errors of the others.
/// Fails if none answers.
async fn of_all<T>(
    names: &[String],
    ask: impl AsyncFn(&str) -> Result<T>,
) -> Result<(BTreeMap<String, T>, Errors)> {
    let asked = names.iter().map(|name| ask(name));
    let (mut answers, mut errors) = (BTreeMap::new(), Errors::new());
    for (name, answer) in names.iter().zip(join_all(asked).await) {
        match answer {
            Ok(answer) => drop(answers.insert(name.clone(), answer)),
            Err(error) => drop(errors.insert(name.clone(), error)),
        }
    }
    if answers.is_empty() {
        return Err(unreachable(errors));
    }
    Ok((answers, errors))
}

/// A rejection of the call, or that no replica responds.
fn unreachable(errors: Errors) -> anyhow::Error {
    let texts = errors
        .iter()
        .map(|(name, error)| format!("{name}: {error}"));
    let texts: Vec<String> = texts.collect();
    let rejected = errors.into_values().find(|error| error.is::<Rejected>());
    rejected.unwrap_or_else(|| anyhow!("no controller responds: {}", texts.join("; ")))
}

/// The names of the running controller pods.
async fn running_pods(cluster: &Cluster) -> Result<Vec<String>> {
    let namespace = &cluster.mesh_namespace;
    let pods: Api<pods::Pod> = objects(&cluster.client, Some(namespace));
    let running = ListParams::default().labels("app=controller");
    let running = running.fields("status.phase=Running");
    let pods = cluster::list(pods, &running).await.map_err(|error| {
        anyhow!("failed to list the controller pods in namespace {namespace}: {error}")
    })?;
    let pods = pods.iter().filter(|pod| pods::is_active(pod));
    let names: Vec<String> = pods.map(ResourceExt::name_any).collect();
    ensure!(
        !names.is_empty(),
        "no running controller found in namespace {namespace}: if Deployment controller exists there, scale it up or see its pods (kubectl describe -n {namespace} deployment/controller); else install the mesh there, or set its namespace with --mesh-namespace"
    );
    Ok(names)
}

/// The result of a future, unless it takes too long.
async fn timely<T>(limit: Duration, future: impl Future<Output = Result<T>>) -> Result<T> {
    let result = timeout(limit, future).await;
    result.unwrap_or_else(|_| bail!("timed out after {} s", limit.as_secs()))
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
        Credentials { token, roots }: &Credentials,
    ) -> Result<Self> {
        let connected = async {
            let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
                .with_protocol_versions(&[&TLS13])?;
            let config = config.with_root_certificates(roots.clone());
            let mut config = config.with_no_client_auth();
            config.alpn_protocols = vec![b"h2".to_vec()];
            let server_name = ServerName::try_from(server_name.to_owned())?;
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
                .await?;
            anyhow::Ok(channel)
        };
        let described = async {
            connected
                .await
                .map_err(|error| anyhow!(error_chain(&*error)))
        };
        let channel = timely(CONNECT_TIMEOUT, described).await?;
        let client = ServiceMeshServiceClient::with_interceptor(channel, token.clone());
        let client = client.max_decoding_message_size(MAX_MESSAGE_SIZE);
        Ok(Self { client })
    }

    /// The named Services ("namespace/name"), or all.
    pub async fn services(&mut self, names: Vec<String>) -> Result<Vec<Service>> {
        let page = async |page_token| {
            let services = names.clone();
            let request = GetServicesRequest {
                services,
                page_token,
            };
            let page = self.client.get_services(request).await?.into_inner();
            Ok((page.services, page.next_page_token))
        };
        all_pages(page).await
    }

    /// The named Services, or all, then each change.
    pub async fn watch_services(
        &mut self,
        services: Vec<String>,
    ) -> Result<Streaming<WatchServicesResponse>> {
        let request = WatchServicesRequest { services };
        let watch = self.client.watch_services(request).await;
        Ok(watch.map_err(Rejected)?.into_inner())
    }

    /// The rules for the requests of the clients of a namespace to a Service.
    pub async fn routes(&mut self, service: &str, clients: &str) -> Result<GetRoutesResponse> {
        let mut last = GetRoutesResponse::default();
        let page = async |page_token| {
            let request = GetRoutesRequest {
                service: service.to_owned(),
                clients: clients.to_owned(),
                page_token,
            };
            last = self.client.get_routes(request).await?.into_inner();
            Ok((take(&mut last.ports), take(&mut last.next_page_token)))
        };
        let ports = all_pages(page).await?;
        Ok(GetRoutesResponse { ports, ..last })
    }

    /// The pods of a target ("namespace/name") with who may call them.
    pub async fn authorization(
        &mut self,
        target: String,
        port: u32,
    ) -> Result<Vec<get_authorization_response::Pod>> {
        let page = async |page_token| {
            let target = target.clone();
            let request = GetAuthorizationRequest {
                target,
                port,
                page_token,
            };
            let page = self.client.get_authorization(request).await?.into_inner();
            Ok((page.pods, page.next_page_token))
        };
        all_pages(page).await
    }

    /// The callers of the pods of a namespace, or of all namespaces ("").
    async fn edges(&mut self, namespace: &str) -> Result<Vec<get_edges_response::Group>> {
        let page = async |page_token| {
            let namespace = namespace.to_owned();
            let request = GetEdgesRequest {
                namespace,
                page_token,
            };
            let page = self.client.get_edges(request).await?.into_inner();
            Ok((page.groups, page.next_page_token))
        };
        all_pages(page).await
    }

    /// The latest reports of the proxies of a namespace, or of all (""), to this replica. With
    /// `watch`, they report each second for some time.
    pub async fn traffic(
        &mut self,
        namespace: &str,
        watch: bool,
    ) -> Result<Vec<get_traffic_response::Pod>> {
        let page = async |page_token| {
            let namespace = namespace.to_owned();
            let request = GetTrafficRequest {
                namespace,
                watch,
                page_token,
            };
            let page = self.client.get_traffic(request).await?.into_inner();
            Ok((page.pods, page.next_page_token))
        };
        timely(REQUEST_TIMEOUT, all_pages(page)).await
    }

    /// The certificate status of the replica with all its workloads.
    async fn identity(&mut self) -> Result<GetIdentityResponse> {
        let mut last = GetIdentityResponse::default();
        let page = async |page_token| {
            let request = GetIdentityRequest { page_token };
            last = self.client.get_identity(request).await?.into_inner();
            Ok((take(&mut last.workloads), take(&mut last.next_page_token)))
        };
        let workloads = all_pages(page).await?;
        Ok(GetIdentityResponse { workloads, ..last })
    }
}

/// The items of all pages of a response, each page by the token that `page` gives with the one before.
/// The last one has none.
async fn all_pages<T>(
    mut page: impl AsyncFnMut(String) -> Result<(Vec<T>, String), Status>,
) -> Result<Vec<T>> {
    let (mut all, mut token) = (Vec::new(), String::new());
    loop {
        let (items, next) = page(token).await.map_err(Rejected)?;
        all.extend(items);
        token = next;
        if token.is_empty() {
            return Ok(all);
        }
    }
}

impl Token {
    fn new(token: &str) -> Result<Self> {
        let value = format!("Bearer {}", token.trim()).parse();
        let mut value: MetadataValue<Ascii> =
            value.map_err(|error| anyhow!("no token for the controller: {error}"))?;
        value.set_sensitive(true);
        Ok(Self(value))
    }
}

impl Interceptor for Token {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let metadata = request.metadata_mut();
        metadata.insert("authorization", self.0.clone());
        Ok(request)
    }
}

fn certificates(pem: &str) -> Result<RootCertStore> {
    let mut store = RootCertStore::empty();
    let certificates = CertificateDer::pem_slice_iter(pem.as_bytes());
    let added = certificates.map(|certificate| anyhow::Ok(store.add(certificate?)?));
    let added: Result<()> = added.collect();
    added.map_err(|error| anyhow!("no trust roots of the mesh: {error}"))?;
    ensure!(
        !store.is_empty(),
        "no trust roots of the mesh: the PEM contains no certificate"
    );
    Ok(store)
}

/// A token of `account`: NAMESPACE/NAME, or NAME in the namespace of the mesh.
async fn request_token(cluster: &Cluster, account: &str) -> Result<String> {
    let account = cluster::full_name(account, &cluster.mesh_namespace);
    let (namespace, name) = proxies::names(&account);
    let accounts: Api<ServiceAccount> = objects(&cluster.client, Some(namespace));
    let request = TokenRequest {
        spec: TokenRequestSpec {
            audiences: vec![TOKEN_AUDIENCE.into()],
            expiration_seconds: Some(TOKEN_SECONDS),
            ..TokenRequestSpec::default()
        },
        ..TokenRequest::default()
    };
    let params = PostParams::default();
    let response = accounts.create_token_request(name, &params, &request).await;
    let response = response.map_err(|error| {
        let error = describe_error(error);
        anyhow!(
            "no token for the controller: failed to create a token of the service account \
             {account}: {error}; name one that you may create tokens for with --account \
             NAMESPACE/NAME"
        )
    })?;
    let status = response.status;
    let status = status.context("no token for the controller: the response contains none")?;
    Ok(status.token)
}

/// The roots that the controller publishes in the namespace of the mesh.
async fn roots(cluster: &Cluster) -> Result<RootCertStore> {
    let config_maps: Api<ConfigMap> = objects(&cluster.client, Some(&cluster.mesh_namespace));
    let config_map = config_maps.get(ROOTS_CONFIG_MAP).await;
    let config_map = config_map
        .map_err(|error| anyhow!("no trust roots of the mesh: {}", describe_error(error)))?;
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
        let refused = || anyhow!("refused");
        let status = controllers.explain("lost", refused()).await.unwrap();
        assert_eq!(status.problem, "the Secret contains no CA");
        let error = controllers.explain("new", refused()).await;
        let error = error.unwrap_err().to_string();
        assert_eq!(error, "refused; catalog: not synced");
    }

    #[test]
    fn rejects_invalid_files_and_urls() {
        assert!(certificates("no PEM").is_err());
        assert!(Token::new("two\nlines").is_err());
        assert!(https_url("http://controller:8080").is_err());
        assert!(https_url("https://controller:8080").is_ok());
    }
}
