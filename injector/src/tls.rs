//! TLS of the webhook. Each handshake uses the latest certificate; open connections keep theirs.

use std::sync::Arc;

use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::sync::watch;

/// The latest serving certificate, or `None` before the first one.
pub type ServingCertificate = watch::Receiver<Option<Arc<CertifiedKey>>>;

/// A TLS configuration for HTTP/2 and HTTP/1.1.
pub fn config(certificate: ServingCertificate) -> Arc<ServerConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has cipher suites for TLS 1.2 and 1.3")
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(Resolver(certificate)));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Arc::new(config)
}

#[derive(Debug)]
struct Resolver(ServingCertificate);

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.borrow().clone()
    }
}
