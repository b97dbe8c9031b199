//! TLS connections to the controller, whose certificate must have the configured identity. Trust
//! roots are the roots of the mounted file, read for each connection, and the newest roots that the
//! controller has sent.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use diy_mesh_model::identity::Identity;
use rustls::client::Resumption;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tracing::warn;

use super::ControlError;
use crate::secure::identity::{ServerVerifier, Trust, parse_roots};

const HTTP2: &[u8] = b"h2";

/// Authentication of the controller.
#[derive(Clone, Debug)]
pub struct Tls {
    /// Identity that its certificate must have.
    pub expected: Identity,
    /// PEM file with trust roots.
    pub roots_file: PathBuf,
    /// Trust roots received from the controller.
    pub trust: Trust,
}

impl Tls {
    /// TLS configuration of a new connection.
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
        // No configuration is used twice.
        config.resumption = Resumption::disabled();
        Ok(TlsConnector::from(Arc::new(config)))
    }

    /// Union of mounted and received roots: either may be the newer ones, if roots change while the
    /// controller is unavailable.
    async fn roots(&self) -> Result<RootCertStore, ControlError> {
        let received = self.trust.newest();
        let mut roots = match (self.read_mounted().await, &received) {
            (Ok(mounted), _) => mounted,
            (Err(error), None) => return Err(error),
            (Err(error), Some(_)) => {
                warn!("using only the trust roots received from the controller: {error}");
                RootCertStore::empty()
            }
        };
        for anchor in received.iter().flat_map(|roots| &roots.trusted.roots) {
            if !roots.roots.contains(anchor) {
                roots.roots.push(anchor.clone());
            }
        }
        Ok(roots)
    }

    async fn read_mounted(&self) -> Result<RootCertStore, ControlError> {
        let path = &self.roots_file;
        let pem = tokio::fs::read(path)
            .await
            .map_err(|source| ControlError::RootsFile {
                path: path.clone(),
                source,
            })?;
        parse_roots(&pem).map_err(|reason| ControlError::InvalidRootsFile {
            path: path.clone(),
            reason,
        })
    }
}

/// Connects, and requires HTTP/2 by ALPN.
pub(super) async fn connect(
    connector: TlsConnector,
    host: String,
    port: u16,
) -> std::io::Result<TlsStream<TcpStream>> {
    let tcp = TcpStream::connect((host.as_str(), port)).await?;
    tcp.set_nodelay(true)?;
    let stream = connector.connect(server_name(&host), tcp).await?;
    if stream.get_ref().1.alpn_protocol() != Some(HTTP2) {
        return Err(std::io::Error::other("HTTP/2 not negotiated by ALPN"));
    }
    Ok(stream)
}

/// Server name of the handshake. The verifier ignores it and checks the identity.
fn server_name(host: &str) -> ServerName<'static> {
    ServerName::try_from(host.to_owned())
        .unwrap_or_else(|_| ServerName::from(IpAddr::from([0, 0, 0, 0])))
}
