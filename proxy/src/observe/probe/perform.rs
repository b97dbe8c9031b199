//! One attempt of a probe, with the rules of the kubelet for success. Never reads the environment:
//! the target is an argument.

use std::borrow::Cow;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use diy_mesh_runtime::error_chain;
use http::{StatusCode, Uri};
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio_util::either::Either;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tower::service_fn;

use super::http::{HTTP2, handshake};
use super::{Action, Grpc, GrpcMode, HttpGet, KubeletProbe, Pod};

/// The product with which the kubelet's probes identify themselves.
pub(super) const PROBE_AGENT: &str = "kube-probe/1 (diy-service-mesh)";
/// The product of its lifecycle hooks.
pub(super) const HOOK_AGENT: &str = "kube-lifecycle/1 (diy-service-mesh)";

/// The failure of a probe.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// The application does not accept connections.
    #[error("cannot connect to {0}: {1}")]
    Connect(SocketAddr, io::Error),
    /// The proxy itself listens on the port.
    #[error("port {0} belongs to the proxy, expected a port of the application")]
    ProxyPort(u16),
    /// The TLS handshake failed.
    #[error("TLS handshake with {0} failed: {1}")]
    Tls(SocketAddr, io::Error),
    /// The path or the header fields are not valid in an HTTP request.
    #[error("invalid path or header field: {0}")]
    Request(#[from] http::Error),
    /// There is no complete and valid response.
    #[error("no valid HTTP response: {}", error_chain(.0))]
    Response(#[from] hyper::Error),
    /// The status of the response is a failure.
    #[error("HTTP status {}, expected 200 to 399", .0.as_u16())]
    Status(StatusCode),
    /// A redirect that is not a URL.
    #[error("redirect to an invalid location")]
    Redirect,
    /// A loop of redirects.
    #[error("more than {0} redirects")]
    TooManyRedirects(usize),
    /// There is no HTTP/2 connection for the gRPC call.
    #[error("no gRPC connection: {}", error_chain(.0))]
    GrpcConnection(#[from] tonic::transport::Error),
    /// The gRPC call failed.
    #[error("gRPC health check failed: {}", describe(.0))]
    Grpc(#[from] Box<tonic::Status>),
    /// The application responds that it is not healthy.
    #[error("gRPC health status {0}, expected SERVING")]
    NotServing(&'static str),
    /// The application did not respond in time.
    #[error("no response within {0:?}")]
    Timeout(Duration),
}

impl ProbeError {
    /// The reason in exceptions: one of few words.
    pub fn code(&self) -> Cow<'static, str> {
        match self {
            Self::Connect(..) => "connect-failed".into(),
            Self::ProxyPort(_) => "proxy-port".into(),
            Self::Tls(..) => "tls-failed".into(),
            Self::Request(_) => "invalid-request".into(),
            Self::Response(_) | Self::GrpcConnection(_) => "no-response".into(),
            Self::Status(status) => format!("status-{}", status.as_u16()).into(),
            Self::Redirect | Self::TooManyRedirects(_) => "redirect".into(),
            Self::Grpc(_) => "grpc-failed".into(),
            Self::NotServing(_) => "not-serving".into(),
            Self::Timeout(_) => "timeout".into(),
        }
    }
}

/// Performs a probe once. The caller limits its duration.
pub(super) async fn perform(probe: &KubeletProbe, pod: &Pod) -> Result<(), ProbeError> {
    match &probe.action {
        Action::HttpGet(get) if probe.is_hook() => {
            super::http::get(get, pod, HOOK_AGENT).await.map(|_| ())
        }
        Action::HttpGet(get) => http_probe(get, pod).await,
        Action::TcpSocket(socket) => connect(pod, socket.port.get()).await.map(drop),
        Action::Grpc(grpc) => grpc_probe(grpc, pod).await,
    }
}

/// A connection to a port of the application, at the pod's own address.
pub(super) async fn connect(pod: &Pod, port: u16) -> Result<TcpStream, ProbeError> {
    if pod.proxy_ports.contains(&port) {
        return Err(ProbeError::ProxyPort(port));
    }
    let address = SocketAddr::new(pod.ip, port);
    TcpStream::connect(address)
        .await
        .map_err(|error| ProbeError::Connect(address, error))
}

/// A redirect to another host counts as a success, without a request to it.
async fn http_probe(get: &HttpGet, pod: &Pod) -> Result<(), ProbeError> {
    let status = super::http::get(get, pod, PROBE_AGENT).await?;
    if (200..400).contains(&status.as_u16()) {
        Ok(())
    } else {
        Err(ProbeError::Status(status))
    }
}

async fn grpc_probe(grpc: &Grpc, pod: &Pod) -> Result<(), ProbeError> {
    let (pod, port) = (*pod, grpc.port.get());
    let mode = grpc.mode;
    let connector = service_fn(move |_: Uri| async move {
        let stream = connect(&pod, port).await?;
        Ok::<_, ProbeError>(TokioIo::new(match mode {
            GrpcMode::Plaintext => Either::Left(stream),
            GrpcMode::Tls => Either::Right(handshake(pod.ip, port, stream, &[HTTP2]).await?),
        }))
    });
    let channel = Endpoint::try_from(format!("http://{}", SocketAddr::new(pod.ip, port)))?
        .user_agent(PROBE_AGENT)?
        .connect_with_connector(connector)
        .await?;
    let service = grpc.service.clone().unwrap_or_default();
    let response = HealthClient::new(channel)
        .check(HealthCheckRequest { service })
        .await
        .map_err(Box::new)?;
    match response.into_inner().status() {
        ServingStatus::Serving => Ok(()),
        other => Err(ProbeError::NotServing(other.as_str_name())),
    }
}

/// The text of the application is quoted.
fn describe(status: &tonic::Status) -> String {
    format!("{:?}: {:?}", status.code(), status.message())
}
