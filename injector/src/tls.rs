//! TLS for the webhook, with a certificate that can be exchanged while it serves.
//!
//! Every handshake takes the newest certificate; connections that stand keep theirs.

use std::sync::Arc;

use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

/// The newest serving certificate; none until there is one.
pub type Serving = watch::Receiver<Option<Arc<CertifiedKey>>>;

/// A TLS acceptor for HTTP/2 and HTTP/1.1 that serves whatever certificate is the newest.
pub fn acceptor(serving: Serving) -> TlsAcceptor {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder =
        ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.expect("the provider has cipher suites for TLS 1.2 and 1.3");
    let mut config = builder
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(Newest(serving)));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

#[derive(Debug)]
struct Newest(Serving);

impl ResolvesServerCert for Newest {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.borrow().clone()
    }
}
