//! The gRPC channel to the controller: address, TLS, keepalive, deadlines, and the token by which the pod proves itself. It
//! knows how to ask, once; who asks again, and when, is `discovery.rs` and `identity.rs`. It never logs the token.

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
use http::Uri;
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio_stream::Stream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};
use tower::service_fn;

use crate::identity::BadRoots;
pub use secure::Tls;

/// How long the name, the connection and the handshake may take; and how long all of it together with the answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a certificate may take: the controller asks Kubernetes about the token first, and many may wait for theirs.
const SIGN_TIMEOUT: Duration = Duration::from_secs(30);
/// A ping every so often on the quiet connection, and how long its answer may take: a controller whose machine died is
/// noticed within the sum of both.
const PING_EVERY: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// HTTP/2 flow-control windows: what the controller may send before the proxy has read. Answers are small.
const WINDOW: u32 = 64 * 1024;
/// The largest message that is read: a snapshot of about a hundred thousand endpoints.
const MAX_MESSAGE: usize = 16 * 1024 * 1024;
/// Requests that wait for the connection inside tonic; streams are opened one at a time.
const CHANNEL_BUFFER: usize = 4;

/// Why the controller could not be asked.
#[derive(Debug, Error)]
pub enum ControlError {
    /// The configured address is no address.
    #[error(
        "controller address {address:?}: {reason}; expected something like https://controller.service-mesh.svc.cluster.local.:8080"
    )]
    Address {
        /// What was configured.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The token's file could not be read.
    #[error("can't read the token file {}: {source}", path.display())]
    TokenFile {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// The file was read, and what it holds can't be sent as a token.
    #[error("the token file {} does not hold a token: empty, or characters that no token has", .0.display())]
    NoToken(PathBuf),
    /// The roots' file could not be read.
    #[error("can't read the trust roots {}: {source}", path.display())]
    RootsFile {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// The file was read, and nobody can be verified by what it holds.
    #[error("the trust roots {} are no roots: {reason}", path.display())]
    BadRootsFile {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        reason: BadRoots,
    },
    /// No connection.
    #[error("can't connect to the controller at {address}: {reason}")]
    Connect {
        /// Where to.
        address: String,
        /// The whole chain of causes: the outer ones say little.
        reason: String,
    },
    /// The connection stands, or stood, and the controller said no.
    #[error("the controller refused: {}", said(.0))]
    Refused(Status),
    /// Neither yes nor no.
    #[error("the controller at {address} did not answer within {time:?}")]
    Timeout {
        /// Who.
        address: String,
        /// How long it had.
        time: Duration,
    },
}

/// How to reach the controller. Cheap to clone; holds no connection.
#[derive(Clone, Debug)]
pub struct Control {
    address: Uri,
    endpoint: Endpoint,
    tls: Option<Tls>,
    token_file: Option<PathBuf>,
}

impl Control {
    /// Checks the address; connects to nothing. `https` needs `tls`, and `http` goes without. Without a token file calls carry no
    /// token: only a controller without an authenticator takes them.
    pub fn new(
        address: &str,
        token_file: Option<PathBuf>,
        tls: Option<Tls>,
    ) -> Result<Self, ControlError> {
        let bad = |reason: String| ControlError::Address {
            address: address.to_owned(),
            reason,
        };
        let uri: Uri = address.parse().map_err(|error| bad(causes(&error)))?;
        match (uri.scheme_str(), &tls) {
            (Some("http"), None) | (Some("https"), Some(_)) => {}
            (Some("https"), None) => {
                return Err(bad("nothing says by what to verify it".to_owned()));
            }
            (Some(other), _) => return Err(bad(format!("scheme {other:?} is not supported here"))),
            (None, _) => return Err(bad("the scheme is missing".to_owned())),
        }
        if uri.host().is_none_or(str::is_empty) {
            return Err(bad("the host is missing".to_owned()));
        }
        // To tonic every connection is a plain one: it would want to do the TLS of another itself.
        let plain = address.replacen("https://", "http://", 1);
        let endpoint = Endpoint::from_shared(plain).map_err(|error| bad(causes(&error)))?;
        let endpoint = endpoint
            .origin(uri.clone())
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .buffer_size(CHANNEL_BUFFER);
        Ok(Self {
            address: uri,
            endpoint,
            tls,
            token_file,
        })
    }

    /// Opens the discovery stream on a connection of its own, so that each try resolves the name anew, may reach
    /// another replica, and carries the token that lies in the file now. Returns once the controller has accepted it.
    pub async fn discover(
        self,
        requests: impl Stream<Item = DiscoverRequest> + Send + 'static,
    ) -> Result<Streaming<DiscoverResponse>, ControlError> {
        self.within(OPEN_TIMEOUT, async {
            let mut request = Request::new(requests);
            if let Some(token) = self.token().await? {
                request.metadata_mut().insert("authorization", token);
            }
            let mut client = ServiceMeshServiceClient::new(self.connect().await?)
                .max_decoding_message_size(MAX_MESSAGE);
            Ok(client
                .discover(request)
                .await
                .map_err(ControlError::Refused)?
                .into_inner())
        })
        .await
    }

    /// Asks for a certificate, likewise on a connection of its own; the message holds the token.
    pub async fn sign_certificate(
        &self,
        request: SignCertificateRequest,
    ) -> Result<SignCertificateResponse, ControlError> {
        self.within(SIGN_TIMEOUT, async {
            let mut client = ServiceMeshServiceClient::new(self.connect().await?);
            Ok(client
                .sign_certificate(request)
                .await
                .map_err(ControlError::Refused)?
                .into_inner())
        })
        .await
    }

    /// The token that lies in the file now; none where there is no file to read.
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
            return Err(ControlError::NoToken(path.clone()));
        }
        Ok(Some(token.to_owned()))
    }

    async fn within<T>(
        &self,
        time: Duration,
        call: impl Future<Output = Result<T, ControlError>>,
    ) -> Result<T, ControlError> {
        let late = || ControlError::Timeout {
            address: self.address.to_string(),
            time,
        };
        tokio::time::timeout(time, call)
            .await
            .unwrap_or_else(|_| Err(late()))
    }

    async fn connect(&self) -> Result<Channel, ControlError> {
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
        connected.map_err(|error| ControlError::Connect {
            address: self.address.to_string(),
            reason: causes(&error),
        })
    }

    async fn token(&self) -> Result<Option<MetadataValue<Ascii>>, ControlError> {
        let (Some(path), Some(token)) = (&self.token_file, self.read_token().await?) else {
            return Ok(None);
        };
        bearer(path, &token).map(Some)
    }
}

fn bearer(path: &Path, token: &str) -> Result<MetadataValue<Ascii>, ControlError> {
    let value = format!("Bearer {token}").parse::<MetadataValue<Ascii>>();
    let mut value = value.map_err(|_| ControlError::NoToken(path.to_owned()))?;
    value.set_sensitive(true);
    Ok(value)
}

/// A status as the log has it.
pub fn said(status: &Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}

/// An error and what caused it, in one line.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
