//! TLS to the controller: it must show the mesh's certificate for the identity that we were told to expect. Whom we believe that:
//! the roots mounted beside the token, read anew each time, and the newest that the controller itself sent.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use diy_mesh_proto::Identity;
use rustls::client::Resumption;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tracing::warn;

use super::ControlError;
use crate::identity::{ServerVerifier, Trust, store};

const HTTP2: &[u8] = b"h2";

/// How the controller proves itself.
#[derive(Clone, Debug)]
pub struct Tls {
    /// Who it must be.
    pub expected: Identity,
    /// The mounted roots.
    pub roots_file: PathBuf,
    /// The newest roots.
    pub trust: Trust,
}

impl Tls {
    /// What the next connection is made with.
    pub(super) async fn connector(&self) -> Result<TlsConnector, ControlError> {
        let verifier = ServerVerifier::new(Arc::new(self.roots().await?), self.expected.clone());
        let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has TLS 1.3");
        let mut config = config
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_no_client_auth();
        config.alpn_protocols = vec![HTTP2.to_vec()];
        // Each connection is the only one with its roots.
        config.resumption = Resumption::disabled();
        Ok(TlsConnector::from(Arc::new(config)))
    }

    /// The mounted roots may be older than what was sent, or newer, where the controller was away while they changed.
    async fn roots(&self) -> Result<RootCertStore, ControlError> {
        let newest = self.trust.newest();
        let mut roots = match (self.mounted().await, &newest) {
            (Ok(mounted), _) => mounted,
            (Err(error), None) => return Err(error),
            (Err(error), Some(_)) => {
                warn!("the controller is verified by the roots that it sent alone: {error}");
                RootCertStore::empty()
            }
        };
        for anchor in newest.iter().flat_map(|newest| &newest.store.roots) {
            if !roots.roots.contains(anchor) {
                roots.roots.push(anchor.clone());
            }
        }
        Ok(roots)
    }

    async fn mounted(&self) -> Result<RootCertStore, ControlError> {
        let path = &self.roots_file;
        let pem = tokio::fs::read(path)
            .await
            .map_err(|source| ControlError::RootsFile {
                path: path.clone(),
                source,
            })?;
        store(&pem).map_err(|reason| ControlError::BadRootsFile {
            path: path.clone(),
            reason,
        })
    }
}

/// One connection, with HTTP/2 agreed on.
pub(super) async fn connect(
    connector: TlsConnector,
    host: String,
    port: u16,
) -> std::io::Result<TlsStream<TcpStream>> {
    let tcp = TcpStream::connect((host.as_str(), port)).await?;
    tcp.set_nodelay(true)?;
    let stream = connector.connect(server_name(&host), tcp).await?;
    if stream.get_ref().1.alpn_protocol() != Some(HTTP2) {
        return Err(std::io::Error::other("it speaks TLS, but not HTTP/2"));
    }
    Ok(stream)
}

/// What the handshake names. It proves nothing: the identity does.
fn server_name(host: &str) -> ServerName<'static> {
    let unnamed = || ServerName::from(IpAddr::from([0, 0, 0, 0]));
    ServerName::try_from(host.to_owned()).unwrap_or_else(|_| unnamed())
}
