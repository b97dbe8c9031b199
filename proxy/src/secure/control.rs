//! gRPC client of the controller: address, TLS, keepalive, timeouts and the pod's token. It makes
//! single calls; `discovery.rs` and `identity.rs` retry them. It never logs the token.

mod secure;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use diy_mesh_proto::mesh::v1::service_mesh_service_client::ServiceMeshServiceClient;
use diy_mesh_proto::mesh::v1::{
    DiscoverRequest, DiscoverResponse, SignCertificateRequest, SignCertificateResponse,
};
use diy_mesh_proto::{
    CAPABILITIES_METADATA, CAPABILITY_AUTHORIZATION, CAPABILITY_CHUNKS, CAPABILITY_EDGES,
    CAPABILITY_EGRESS, CAPABILITY_KEYS, CAPABILITY_POLICY, CAPABILITY_ROUTES, CAPABILITY_SELF,
    CAPABILITY_TELEMETRY, CAPABILITY_TRAFFIC, announces,
};
use diy_mesh_runtime::error_chain;
use http::Uri;
use http::uri::Scheme;
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio_stream::Stream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};
use tower::service_fn;

use crate::secure::identity::RootsError;
pub use secure::Tls;

/// Timeout of name resolution, TCP connection and TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of opening a discovery stream, including the connection.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of a certificate request. The controller reviews the token with Kubernetes first, and
/// requests may queue there.
const SIGN_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval and timeout of HTTP/2 pings: a failed node is detected within their sum.
const PING_INTERVAL: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// HTTP/2 flow-control windows in bytes. Responses are small.
const STREAM_WINDOW: u32 = 64 * 1024;
/// `h2` ends a connection on which too many small DATA frames wait. The window sets their maximum:
/// 2,000.
const CONNECTION_WINDOW: u32 = 1024 * 1024;
/// Maximum size of a message: a snapshot of about 100,000 endpoints.
const MAX_MESSAGE_SIZE: usize = 16 * 1024 * 1024;
/// Requests that tonic buffers while it connects. Streams are opened one at a time.
const CHANNEL_BUFFER: usize = 4;

/// A failed call of the controller.
#[derive(Debug, Error)]
pub enum ControlError {
    /// The token file is not readable.
    #[error("failed to read the token file {}: {source}", path.display())]
    TokenFile {
        /// Path of the file.
        path: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
    /// The content of the token file is not a token.
    #[error("invalid token in {}: expected one line without spaces or control characters", .0.display())]
    InvalidToken(PathBuf),
    /// The file with the trust roots is not readable.
    #[error("failed to read the trust roots {}: {source}", path.display())]
    RootsFile {
        /// Path of the file.
        path: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
    /// The content of the file is not a set of trust roots.
    #[error("invalid trust roots in {}: {reason}", path.display())]
    InvalidRootsFile {
        /// Path of the file.
        path: PathBuf,
        /// Why they are invalid.
        reason: RootsError,
    },
    /// The connection failed.
    #[error("failed to connect to the controller at {address}: {reason}")]
    Connect {
        /// Address of the controller.
        address: String,
        /// The error with its chain of causes.
        reason: String,
    },
    /// The controller responded with an error.
    #[error("request rejected by the controller: {}", describe(.0))]
    Rejected(Status),
    /// The controller did not respond in time.
    #[error("no response from the controller at {address} within {timeout:?}")]
    Timeout {
        /// Address of the controller.
        address: String,
        /// The timeout of the call.
        timeout: Duration,
    },
}

/// An open discovery stream.
#[derive(Debug)]
pub struct DiscoveryStream {
    /// The responses of the controller.
    pub responses: Streaming<DiscoverResponse>,
    /// The controller announces the inbound configuration of the proxy's own pod.
    pub sends_own_pod: bool,
    /// With these AuthorizationPolicies.
    pub sends_policies: SentPolicies,
    /// The controller announces that it reads these reports.
    pub accepts: AcceptedReports,
}

/// Client of the controller. Cheap to clone; holds no connection.
#[derive(Clone, Debug)]
pub struct Control {
    address: Uri,
    endpoint: Endpoint,
    tls: Option<Tls>,
    token_file: Option<PathBuf>,
}

/// The AuthorizationPolicies that a controller sends.
#[derive(Clone, Copy, Debug)]
pub struct SentPolicies {
    /// About calls to the pod.
    pub authorization: bool,
    /// About calls by the pod.
    pub egress: bool,
}

impl SentPolicies {
    /// Those that this release knows.
    pub const ALL: Self = Self {
        authorization: true,
        egress: true,
    };
}

/// The reports that a controller reads. Earlier releases do not read all.
#[derive(Clone, Copy, Debug, Default)]
pub struct AcceptedReports {
    /// About edges.
    pub edges: bool,
    /// About unknown keys.
    pub keys: bool,
    /// About traffic.
    pub traffic: bool,
}

impl Control {
    /// A client of the controller at this URL, with `tls` for https. Without a token file, calls
    /// carry no token: only controllers without authentication accept them.
    pub fn new(address: Uri, token_file: Option<PathBuf>, tls: Option<Tls>) -> Self {
        // The connector does TLS: for an https URL, tonic would require its own.
        let mut plain = address.clone().into_parts();
        plain.scheme = Some(Scheme::HTTP);
        let plain = Uri::from_parts(plain).expect("only the scheme is another one");
        let endpoint = Endpoint::from(plain)
            .origin(address.clone())
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .buffer_size(CHANNEL_BUFFER);
        Self {
            address,
            endpoint,
            tls,
            token_file,
        }
    }

    /// Opens a discovery stream on a new connection: each attempt resolves the name, may reach
    /// another replica, and sends the current content of the token file. Returns when the
    /// controller has accepted the stream.
    pub async fn discover(
        self,
        requests: impl Stream<Item = DiscoverRequest> + Send + 'static,
    ) -> Result<DiscoveryStream, ControlError> {
        self.with_timeout(OPEN_TIMEOUT, async {
            let request = self.discovery_request(requests).await?;
            let mut client = ServiceMeshServiceClient::new(self.connect().await?)
                .max_decoding_message_size(MAX_MESSAGE_SIZE);
            let response = client
                .discover(request)
                .await
                .map_err(ControlError::Rejected)?;
            let capabilities = response.metadata().get(CAPABILITIES_METADATA);
            let capabilities = capabilities.and_then(|text| text.to_str().ok());
            Ok(DiscoveryStream {
                sends_own_pod: announces(capabilities, CAPABILITY_SELF),
                sends_policies: SentPolicies {
                    authorization: announces(capabilities, CAPABILITY_AUTHORIZATION),
                    egress: announces(capabilities, CAPABILITY_EGRESS),
                },
                accepts: AcceptedReports {
                    edges: announces(capabilities, CAPABILITY_EDGES),
                    keys: announces(capabilities, CAPABILITY_KEYS),
                    traffic: announces(capabilities, CAPABILITY_TRAFFIC),
                },
                responses: response.into_inner(),
            })
        })
        .await
    }

    /// A request that opens a discovery stream, with the token and the capabilities of this release.
    pub async fn discovery_request<T>(&self, requests: T) -> Result<Request<T>, ControlError> {
        let mut request = Request::new(requests);
        let capabilities = [
            CAPABILITY_CHUNKS,
            CAPABILITY_ROUTES,
            CAPABILITY_POLICY,
            CAPABILITY_AUTHORIZATION,
            CAPABILITY_EGRESS,
            CAPABILITY_TELEMETRY,
            CAPABILITY_TRAFFIC,
        ]
        .join(", ");
        let capabilities = capabilities.parse().expect("the names are words");
        let metadata = request.metadata_mut();
        metadata.insert(CAPABILITIES_METADATA, capabilities);
        if let Some(token) = self.token().await? {
            metadata.insert("authorization", token);
        }
        Ok(request)
    }

    /// Requests a certificate on a new connection. The message contains the token.
    pub async fn sign_certificate(
        &self,
        request: SignCertificateRequest,
    ) -> Result<SignCertificateResponse, ControlError> {
        self.with_timeout(SIGN_TIMEOUT, async {
            let mut client = ServiceMeshServiceClient::new(self.connect().await?);
            Ok(client
                .sign_certificate(request)
                .await
                .map_err(ControlError::Rejected)?
                .into_inner())
        })
        .await
    }

    /// The current content of the token file; `None` without a token file.
    pub async fn read_token(&self) -> Result<Option<String>, ControlError> {
        let Some(path) = &self.token_file else {
            return Ok(None);
        };
        let text =
            tokio::fs::read_to_string(path)
                .await
                .map_err(|source| ControlError::TokenFile {
                    path: path.clone(),
                    source,
                })?;
        let token = text.trim();
        if token.is_empty() || token.contains(char::is_whitespace) {
            return Err(ControlError::InvalidToken(path.clone()));
        }
        Ok(Some(token.to_owned()))
    }

    async fn with_timeout<T>(
        &self,
        timeout: Duration,
        call: impl Future<Output = Result<T, ControlError>>,
    ) -> Result<T, ControlError> {
        tokio::time::timeout(timeout, call)
            .await
            .unwrap_or_else(|_| {
                Err(ControlError::Timeout {
                    address: self.address.to_string(),
                    timeout,
                })
            })
    }

    /// Opens a new connection.
    pub async fn connect(&self) -> Result<Channel, ControlError> {
        let connected = match &self.tls {
            None => self.endpoint.connect().await,
            Some(tls) => {
                let connector = tls.connector().await?;
                let host = self
                    .address
                    .host()
                    .unwrap_or_default()
                    .trim_matches(['[', ']'])
                    .to_owned();
                let port = self.address.port_u16().unwrap_or(443);
                let connect = move |_| {
                    let connection = secure::connect(connector.clone(), host.clone(), port);
                    async { connection.await.map(TokioIo::new) }
                };
                self.endpoint
                    .connect_with_connector(service_fn(connect))
                    .await
            }
        };
        connected.map_err(|error| {
            let (address, mut reason) = (self.address.to_string(), error_chain(&error));
            // The texts of rustls.
            let mut of_clocks = ["certificate expired", "certificate not valid yet"].iter();
            if of_clocks.any(|cause| reason.contains(cause)) {
                reason.push_str("; check the clocks of this node and of the controller's");
            }
            ControlError::Connect { address, reason }
        })
    }

    /// The value of the metadata `authorization`; `None` without a token file.
    pub async fn token(&self) -> Result<Option<MetadataValue<Ascii>>, ControlError> {
        let (Some(path), Some(token)) = (&self.token_file, self.read_token().await?) else {
            return Ok(None);
        };
        bearer(path, &token).map(Some)
    }
}

fn bearer(path: &Path, token: &str) -> Result<MetadataValue<Ascii>, ControlError> {
    let value = format!("Bearer {token}").parse::<MetadataValue<Ascii>>();
    let mut value = value.map_err(|_| ControlError::InvalidToken(path.to_owned()))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Code and message of a gRPC status.
pub fn describe(status: &Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}

/// Ceiling of the delay after `failures` consecutive failures: doubles from the smallest to the
/// largest value.
pub(crate) fn backoff_ceiling(
    (smallest, largest): (Duration, Duration),
    failures: u32,
) -> Duration {
    smallest
        .saturating_mul(1 << failures.saturating_sub(1).min(16))
        .min(largest)
}
