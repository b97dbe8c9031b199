//! The gRPC channel to the controller: address, keepalive, deadlines, and the token by which the pod proves itself. It
//! knows how to open a stream, once; who asks again, and when, is `discovery.rs`. It never logs the token.

use std::path::{Path, PathBuf};
use std::time::Duration;

use diy_mesh_proto::mesh::v1::service_mesh_service_client::ServiceMeshServiceClient;
use diy_mesh_proto::mesh::v1::{DiscoverRequest, DiscoverResponse};
use thiserror::Error;
use tokio_stream::Stream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

/// How long the name, the connection and the handshake may take; and how long all of it together with the answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
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
    #[error("controller address {address:?}: {reason}; expected something like http://controller.service-mesh.svc.cluster.local.:8080")]
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
    #[error("the controller at {address} did not answer within {OPEN_TIMEOUT:?}")]
    Timeout {
        /// Who.
        address: String,
    },
}

/// How to reach the controller. Cheap to clone; holds no connection.
#[derive(Clone, Debug)]
pub struct Control {
    endpoint: Endpoint,
    token_file: Option<PathBuf>,
}

impl Control {
    /// Checks the address; connects to nothing. Without a token file calls carry no token: only a controller without
    /// an authenticator takes them.
    pub fn new(address: &str, token_file: Option<PathBuf>) -> Result<Self, ControlError> {
        let bad = |reason: String| ControlError::Address { address: address.to_owned(), reason };
        let endpoint = Endpoint::from_shared(address.to_owned()).map_err(|error| bad(causes(&error)))?;
        match endpoint.uri().scheme_str() {
            Some("http") => {}
            Some(other) => return Err(bad(format!("scheme {other:?} is not supported"))),
            None => return Err(bad("the scheme is missing".to_owned())),
        }
        if endpoint.uri().host().is_none_or(str::is_empty) {
            return Err(bad("the host is missing".to_owned()));
        }
        let endpoint = endpoint
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .buffer_size(CHANNEL_BUFFER);
        Ok(Self { endpoint, token_file })
    }

    /// Opens the discovery stream on a connection of its own, so that each try resolves the name anew, may reach
    /// another replica, and carries the token that lies in the file now. Returns once the controller has accepted it.
    pub async fn discover(
        self,
        requests: impl Stream<Item = DiscoverRequest> + Send + 'static,
    ) -> Result<Streaming<DiscoverResponse>, ControlError> {
        let address = self.address();
        let call = async {
            let mut request = Request::new(requests);
            if let Some(token) = self.token().await? {
                request.metadata_mut().insert("authorization", token);
            }
            let mut client = ServiceMeshServiceClient::new(self.connect().await?).max_decoding_message_size(MAX_MESSAGE);
            Ok(client.discover(request).await.map_err(ControlError::Refused)?.into_inner())
        };
        tokio::time::timeout(OPEN_TIMEOUT, call).await.unwrap_or(Err(ControlError::Timeout { address }))
    }

    async fn connect(&self) -> Result<Channel, ControlError> {
        let connected = self.endpoint.connect().await;
        connected.map_err(|error| ControlError::Connect { address: self.address(), reason: causes(&error) })
    }

    async fn token(&self) -> Result<Option<MetadataValue<Ascii>>, ControlError> {
        let Some(path) = &self.token_file else { return Ok(None) };
        let text = tokio::fs::read_to_string(path).await;
        bearer(path, text.map_err(|source| ControlError::TokenFile { path: path.clone(), source })?.trim()).map(Some)
    }

    fn address(&self) -> String {
        self.endpoint.uri().to_string()
    }
}

fn bearer(path: &Path, token: &str) -> Result<MetadataValue<Ascii>, ControlError> {
    let no_token = || ControlError::NoToken(path.to_owned());
    if token.is_empty() || token.contains(char::is_whitespace) {
        return Err(no_token());
    }
    let mut value: MetadataValue<Ascii> = format!("Bearer {token}").parse().map_err(|_| no_token())?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked_before_anything_is_dialled() {
        assert!(Control::new("http://controller.service-mesh.svc.cluster.local.:8080", None).is_ok());
        assert!(Control::new("http://[fd00::1]:8080", None).is_ok());
        for wrong in ["", "controller:8080", "ftp://controller:8080", "https://controller:8080", "http://", "http://a b:80"] {
            let error = Control::new(wrong, None).expect_err(wrong).to_string();
            assert!(error.contains("expected something like http://"), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_token_is_sent_as_bearer_and_never_printed() {
        let value = bearer(Path::new("t"), "abc.def").expect("a token");
        assert_eq!(value.to_str().expect("text"), "Bearer abc.def");
        assert!(!format!("{value:?}").contains("abc"));
        for wrong in ["", "two words", "line\nbreak", "bell\u{7}"] {
            assert!(bearer(Path::new("t"), wrong).is_err(), "{wrong:?}");
        }
    }

    #[tokio::test]
    async fn the_token_file_is_read_at_each_call_and_its_absence_is_named() {
        let path = std::env::temp_dir().join(format!("diy-sm-proxy-token-{}", std::process::id()));
        let control = Control::new("http://127.0.0.1:1", Some(path.clone())).expect("an address");
        let missing = control.token().await.expect_err("no file yet").to_string();
        assert!(missing.contains(&path.display().to_string()), "{missing}");
        for token in ["first", "second"] {
            std::fs::write(&path, format!("{token}\n")).expect("a file in the temporary folder");
            let value = control.token().await.expect("a token").expect("a token");
            assert_eq!(value.to_str().expect("text"), format!("Bearer {token}"));
        }
        std::fs::remove_file(&path).expect("the file is there");
    }

    #[tokio::test]
    async fn a_controller_that_is_away_is_an_error_that_says_where() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
        let address = format!("http://{}", listener.local_addr().expect("bound"));
        drop(listener);
        let error = Control::new(&address, None).expect("an address").discover(tokio_stream::empty()).await;
        let text = error.expect_err("nobody listens").to_string();
        assert!(text.contains(&address) && text.contains("refused"), "{text}");
    }
}
