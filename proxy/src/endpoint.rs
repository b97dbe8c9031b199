//! An endpoint as discovery announces it, and a host outside of the cluster that has some.

use std::hash::{Hash, Hasher};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use diy_mesh_model::identity::Identity;
use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, ServerName};

/// One endpoint. Each announcement is a new `Arc`, even without changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointInfo {
    /// Address and port.
    pub address: SocketAddr,
    /// Topology zone; empty if unknown.
    pub zone: String,
    /// Pod as "namespace/name"; empty if the endpoint is not a pod.
    pub pod: String,
    /// Expected SPIFFE ID; `None` if the endpoint is not meshed.
    pub identity: Option<Identity>,
    /// Whether the pod declares the port opaque.
    pub opaque: bool,
    /// Whether the address is of no pod: egress has to allow it.
    pub outside: bool,
    /// Whether the node is unready, and so the endpoint a last resort.
    pub node_unready: bool,
    /// The host that has the address, as the proxy has resolved it.
    pub external: Option<Arc<ExternalHost>>,
}

impl EndpointInfo {
    /// The TLS settings of a server outside of the mesh.
    pub fn server_tls(&self) -> Option<&Arc<ServerTls>> {
        self.external.as_ref()?.tls.as_ref()
    }
}

/// A host outside of the cluster that routes have as a backend. Its requests keep the field `Host`
/// of the application, unless the route rewrites it.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ExternalHost {
    /// "KIND NAMESPACE/NAME" of the XBackend or the TrafficPolicy, for logs.
    pub name: Arc<str>,
    /// A DNS name in lower case.
    pub host: Arc<str>,
    /// The port of the server.
    pub port: u16,
    /// TLS to the server, or `None` for plaintext.
    pub tls: Option<Arc<ServerTls>>,
}

/// TLS to a server outside of the mesh.
#[derive(Debug)]
pub struct ServerTls {
    /// The name in the ClientHello and in the certificate.
    pub server_name: ServerName<'static>,
    /// Empty: the public certificate authorities.
    pub roots: Vec<CertificateDer<'static>>,
    /// The configurations for HTTP/1, HTTP/2 and other protocols, made by the first connections.
    pub configs: [OnceLock<Arc<ClientConfig>>; 3],
}

/// Only the settings count.
impl PartialEq for ServerTls {
    fn eq(&self, other: &Self) -> bool {
        (&self.server_name, &self.roots) == (&other.server_name, &other.roots)
    }
}

impl Eq for ServerTls {}

/// Without the certificates, which are large.
impl Hash for ServerTls {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.server_name.hash(state);
    }
}
