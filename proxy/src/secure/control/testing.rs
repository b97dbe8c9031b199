//! A fake controller for tests, over plaintext or TLS.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use diy_mesh_proto::CAPABILITIES_METADATA;
use diy_mesh_proto::mesh::v1 as proto;
use proto::discover_request::Action;
use proto::discover_response::Update;
use proto::service_mesh_service_server::{ServiceMeshService, ServiceMeshServiceServer};
use proto::{
    DiscoverRequest, DiscoverResponse, ProxyStatus, ResourceType, SignCertificateRequest,
    SignCertificateResponse,
};
use rcgen::CertificateSigningRequestParams;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataValue;
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};

use diy_mesh_testkit::wait::soon;

use super::Tls;
use crate::secure::identity::Trust;
use crate::secure::identity::testing::{Authority, WEB};

/// Default identity of the controller.
pub(crate) const CONTROLLER: &str = "spiffe://cluster.local/ns/service-mesh/sa/controller";

/// A fake controller that accepts one stream at a time.
pub(crate) struct FakeController {
    pub address: SocketAddr,
    /// How it issues certificates; `None` rejects requests as unavailable.
    pub signing: Arc<Mutex<Option<Signing>>>,
    /// Whether it announces that it sends the inbound configuration of the proxy's pod.
    pub announces_self: Arc<AtomicBool>,
    pub streams: mpsc::Receiver<FakeStream>,
    stop: CancellationToken,
    server: JoinHandle<()>,
}

/// How certificates are issued.
#[derive(Clone)]
pub(crate) struct Signing {
    pub authority: Arc<Authority>,
    pub lifetime: Duration,
    pub roots_version: &'static str,
}

/// The controller's end of a stream, closed on drop.
pub(crate) struct FakeStream {
    pub requests: Streaming<DiscoverRequest>,
    responses: mpsc::Sender<Result<DiscoverResponse, Status>>,
    pub authorization: Option<String>,
}

struct FakeService {
    streams: mpsc::Sender<FakeStream>,
    signing: Arc<Mutex<Option<Signing>>>,
    announces_self: Arc<AtomicBool>,
}

impl FakeController {
    pub async fn start() -> Self {
        Self::start_at(([127, 0, 0, 1], 0).into()).await
    }

    pub async fn start_at(address: SocketAddr) -> Self {
        Self::start_with(address, Server::builder()).await
    }

    /// Starts with a TLS certificate for `identity`, issued by `authority`.
    pub async fn start_tls(address: SocketAddr, authority: &Authority, identity: &str) -> Self {
        let (certificate, key) = authority.leaf_and_key(identity, |_| {});
        let identity = Identity::from_pem(
            crate::secure::identity::testing::pem(&certificate),
            key.serialize_pem(),
        );
        Self::start_with(
            address,
            Server::builder()
                .tls_config(ServerTlsConfig::new().identity(identity))
                .unwrap(),
        )
        .await
    }

    async fn start_with(address: SocketAddr, mut server: Server) -> Self {
        let listener = TcpListener::bind(address).await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        let (sender, streams) = mpsc::channel(16);
        let (stop, signing) = (CancellationToken::new(), Arc::default());
        let announces_self = Arc::default();
        let stopped = stop.clone().cancelled_owned();
        let service = FakeService {
            streams: sender,
            signing: Arc::clone(&signing),
            announces_self: Arc::clone(&announces_self),
        };
        let server = server
            .add_service(ServiceMeshServiceServer::new(service))
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), stopped);
        let server = tokio::spawn(async { server.await.expect("the fake controller serves") });
        Self {
            address,
            signing,
            announces_self,
            streams,
            stop,
            server,
        }
    }

    /// Its URL, without TLS.
    pub fn url(&self) -> http::Uri {
        format!("http://{}", self.address).parse().expect("a URL")
    }

    pub async fn stream(&mut self) -> FakeStream {
        soon(self.streams.recv())
            .await
            .expect("the fake controller runs")
    }

    /// Changes how certificates are issued.
    pub fn sign(&self, signing: Option<Signing>) {
        *self.signing.lock().unwrap() = signing;
    }

    /// Closes the listener. Streams must be dropped before.
    pub async fn stop(self) -> SocketAddr {
        self.stop.cancel();
        drop(self.streams);
        soon(self.server).await.expect("the fake controller stops");
        self.address
    }
}

impl FakeStream {
    /// The next request in short form: "+10.96.0.7:80@version", "-10.96.0.7:80", "=version of the
    /// roots".
    pub async fn request(&mut self) -> String {
        match self.action().await {
            Action::Subscribe(subscribe) if subscribe.r#type() == ResourceType::Self_ => {
                format!("+self@{}", subscribe.known_version)
            }
            Action::Subscribe(subscribe) => {
                format!("+{}@{}", subscribe.name, subscribe.known_version)
            }
            Action::Unsubscribe(unsubscribe) => format!("-{}", unsubscribe.name),
            Action::Acknowledgement(acknowledgement) => format!(
                "{}@{} {:?}",
                acknowledgement.r#type().as_str_name(),
                acknowledgement.version,
                acknowledgement.rejection
            ),
            Action::Status(status) => format!("={}", status.roots_version),
            Action::Exceptions(exceptions) => format!("{exceptions:?}"),
            Action::Edges(edges) => format!("{edges:?}"),
            Action::UnknownKeys(keys) => format!("{keys:?}"),
            Action::Traffic(report) => format!("{report:?}"),
        }
    }

    /// The next request, which must be a status.
    pub async fn status(&mut self) -> ProxyStatus {
        match self.action().await {
            Action::Status(status) => status,
            other => panic!("expected a status, got {other:?}"),
        }
    }

    pub async fn action(&mut self) -> Action {
        let request = soon(self.requests.message())
            .await
            .expect("the stream is open")
            .expect("the stream is open");
        request.action.expect("an action")
    }

    pub async fn respond(&self, destination: &str, version: &str, update: Update) {
        self.send(DiscoverResponse {
            name: destination.to_owned(),
            version: version.to_owned(),
            update: Some(update),
            ..DiscoverResponse::default()
        })
        .await;
    }

    pub async fn send(&self, response: DiscoverResponse) {
        soon(self.responses.send(Ok(response)))
            .await
            .expect("the stream is open");
    }
}

#[tonic::async_trait]
impl ServiceMeshService for FakeService {
    type DiscoverStream = ReceiverStream<Result<DiscoverResponse, Status>>;
    type WatchServicesStream = Pin<
        Box<dyn tokio_stream::Stream<Item = Result<proto::WatchServicesResponse, Status>> + Send>,
    >;

    async fn discover(
        &self,
        request: Request<Streaming<DiscoverRequest>>,
    ) -> Result<Response<Self::DiscoverStream>, Status> {
        let authorization = request
            .metadata()
            .get("authorization")
            .map(|value| value.to_str().expect("text").to_owned());
        if authorization.as_deref() == Some("Bearer expired") {
            return Err(Status::unauthenticated("the token has expired"));
        }
        let (responses, outgoing) = mpsc::channel(16);
        let stream = FakeStream {
            requests: request.into_inner(),
            responses,
            authorization,
        };
        self.streams
            .send(stream)
            .await
            .map_err(|_| Status::unavailable("the test has ended"))?;
        let mut response = Response::new(ReceiverStream::new(outgoing));
        if self.announces_self.load(Ordering::SeqCst) {
            let capabilities =
                MetadataValue::from_static("later, self, authorization, keys, traffic");
            let metadata = response.metadata_mut();
            metadata.insert(CAPABILITIES_METADATA, capabilities);
        }
        Ok(response)
    }

    async fn get_services(
        &self,
        _: Request<proto::GetServicesRequest>,
    ) -> Result<Response<proto::GetServicesResponse>, Status> {
        Err(Status::unimplemented("not called by proxies"))
    }

    async fn get_routes(
        &self,
        _: Request<proto::GetRoutesRequest>,
    ) -> Result<Response<proto::GetRoutesResponse>, Status> {
        Err(Status::unimplemented("not called by proxies"))
    }

    async fn watch_services(
        &self,
        _: Request<proto::WatchServicesRequest>,
    ) -> Result<Response<Self::WatchServicesStream>, Status> {
        Err(Status::unimplemented("not called by proxies"))
    }

    async fn get_identity(
        &self,
        _: Request<proto::GetIdentityRequest>,
    ) -> Result<Response<proto::GetIdentityResponse>, Status> {
        Err(Status::unimplemented("not called by proxies"))
    }

    async fn get_authorization(
        &self,
        _: Request<proto::GetAuthorizationRequest>,
    ) -> Result<Response<proto::GetAuthorizationResponse>, Status> {
        Err(Status::unimplemented("not called by proxies"))
    }

    async fn get_traffic(
        &self,
        _: Request<proto::GetTrafficRequest>,
    ) -> Result<Response<proto::GetTrafficResponse>, Status> {
        Err(Status::unimplemented("not called by proxies"))
    }

    async fn get_edges(
        &self,
        _: Request<proto::GetEdgesRequest>,
    ) -> Result<Response<proto::GetEdgesResponse>, Status> {
        Err(Status::unimplemented("not called by proxies"))
    }

    async fn sign_certificate(
        &self,
        request: Request<SignCertificateRequest>,
    ) -> Result<Response<SignCertificateResponse>, Status> {
        let signing = self
            .signing
            .lock()
            .unwrap()
            .clone()
            .ok_or_else(|| Status::unavailable("no issuer"))?;
        Ok(Response::new(
            signing.respond(request.get_ref(), SystemTime::now()),
        ))
    }
}

impl Signing {
    /// A valid response to the workload [`WEB`].
    pub fn respond(
        &self,
        request: &SignCertificateRequest,
        now: SystemTime,
    ) -> SignCertificateResponse {
        let csr =
            CertificateSigningRequestParams::from_pem(std::str::from_utf8(&request.csr).unwrap())
                .unwrap();
        let (from, until) = (now - Duration::from_secs(300), now + self.lifetime);
        let certificate = self.authority.sign(WEB, &csr.public_key, |leaf| {
            (leaf.not_before, leaf.not_after) = (from.into(), until.into())
        });
        SignCertificateResponse {
            cert: certificate.pem().into_bytes(),
            ca: self.authority.pem().into_bytes(),
            roots_version: self.roots_version.to_owned(),
        }
    }
}

/// Temporary files with trust roots and token.
pub(crate) struct Mounted(tempfile::TempDir);

impl Mounted {
    pub fn new(roots: &Authority, token: &str) -> Self {
        let mounted = Self(tempfile::tempdir().expect("a temporary folder"));
        std::fs::write(mounted.token_file(), token).expect("a file in the temporary folder");
        mounted.write_roots(&roots.pem());
        mounted
    }

    pub fn write_roots(&self, pem: &str) {
        std::fs::write(self.roots_file(), pem).expect("a file in the temporary folder");
    }

    pub fn roots_file(&self) -> PathBuf {
        self.0.path().join("roots.pem")
    }

    pub fn token_file(&self) -> PathBuf {
        self.0.path().join("token")
    }

    pub fn tls(&self, trust: &Trust) -> Tls {
        Tls {
            expected: CONTROLLER.parse().unwrap(),
            roots_file: self.roots_file(),
            trust: trust.clone(),
        }
    }
}
