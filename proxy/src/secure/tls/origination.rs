//! TLS to servers outside of the mesh. The server proves its name with a certificate; the proxy has
//! none for it. A failed handshake never falls back to plaintext.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::client::{Resumption, UnbufferedClientConnection};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, RootCertStore};

use super::{Alpn, Handshake, MAX_SESSIONS, Tls, overload_or};
use crate::endpoint::ServerTls;
use crate::error::Failure;
use crate::limits::memory::Charge;
use crate::secure::io::Io;
use diy_mesh_model::exchange::Direction;

/// Maximum size of the roots of one server, as PEM.
const MAX_ROOTS: usize = 64 * 1024;

impl Tls {
    /// Runs the client handshake with a server outside of the mesh. It is charged to `memory`. HTTP/2
    /// requires that the server selects it; HTTP/1 is what servers without ALPN expect.
    pub async fn connect_to_server(
        &self,
        io: Io,
        address: SocketAddr,
        server: &ServerTls,
        alpn: Alpn,
        memory: Charge,
    ) -> Result<Io, Failure> {
        let failed = |reason: String| Failure::Handshake { address, reason };
        let connection = config(server, alpn)
            .and_then(|config| UnbufferedClientConnection::new(config, server.server_name.clone()))
            .map_err(|error| failed(error.to_string()))?;
        let handshake = Handshake::client(connection, memory);
        let (io, negotiated) = self
            .run_handshake(io, handshake, Direction::Outbound)
            .await
            .map_err(|error| overload_or(error, |error| failed(error.to_string())))?;
        if alpn == Alpn::Http2 && negotiated.alpn.as_deref() != Some(b"h2") {
            let reason = "the server does not select HTTP/2 (ALPN protocol h2)";
            return Err(failed(reason.to_owned()));
        }
        tracing::debug!(%address, server = ?server.server_name, "TLS session: {negotiated}");
        Ok(io)
    }
}

fn config(server: &ServerTls, alpn: Alpn) -> Result<Arc<ClientConfig>, rustls::Error> {
    let (slot, protocol): (_, Option<&[u8]>) = match alpn {
        Alpn::Http1 => (&server.configs[0], Some(b"http/1.1")),
        Alpn::Http2 => (&server.configs[1], Some(b"h2")),
        Alpn::Opaque | Alpn::Inspected => (&server.configs[2], None),
    };
    if let Some(config) = slot.get() {
        return Ok(config.clone());
    }
    let mut roots = RootCertStore::empty();
    if server.roots.is_empty() {
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    for root in &server.roots {
        roots.add(root.clone())?;
    }
    let mut config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(&[&TLS13, &TLS12])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocol.into_iter().map(<[u8]>::to_vec).collect();
    config.enable_secret_extraction = true;
    config.resumption = Resumption::in_memory_sessions(MAX_SESSIONS);
    Ok(slot.get_or_init(|| Arc::new(config)).clone())
}

/// The certificate authorities in PEM. Fails if there are none, or if one cannot be a root.
pub fn parse_roots(pem: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    if pem.len() > MAX_ROOTS {
        let size = pem.len();
        return Err(format!(
            "roots of {size} bytes, expected at most {MAX_ROOTS}"
        ));
    }
    let (mut parsed, mut store) = (Vec::new(), RootCertStore::empty());
    for (index, root) in CertificateDer::pem_slice_iter(pem.as_bytes()).enumerate() {
        let root = root.map_err(|error| format!("root {index}: {error:?}"))?;
        let added = store.add(root.clone());
        added.map_err(|error| format!("root {index}: {error}"))?;
        parsed.push(root);
    }
    if parsed.is_empty() {
        return Err("no certificate in the roots, expected PEM".to_owned());
    }
    Ok(parsed)
}
