//! XBackends (GEP-4894), and TrafficPolicies with the same fields in `backend`: hosts outside of the
//! cluster as backends of routes. Pure.
//!
//! Nothing relies on the validation of the API server: objects from files have none. Proxies resolve
//! the host, and refuse addresses of the cluster, whatever its name is.

use std::net::IpAddr;

use diy_mesh_proto::mesh::v1::{ExternalBackend, ExternalTls};
use diy_mesh_proto::route::is_hostname;

use super::UNSUPPORTED_PROTOCOL;
use super::spec::{BackendSpec, BackendTls};
use crate::object::condition::{BACKEND_NOT_FOUND, UNSUPPORTED_VALUE};
use crate::object::fields::{field, fields, read_known, string};
use crate::object::rejection::{refuse, shortened, unsupported};
use crate::object::{Checked, Kind, Meta, Rejection};

/// The kinds of objects that can be a host.
pub(crate) const KINDS: [Kind; 2] = [Kind::Backend, Kind::TrafficPolicy];
/// The protocols of a backend. Proxies keep the protocol of each request.
const PROTOCOLS: [&str; 6] = ["HTTP", "HTTP11", "HTTP2", "H2C", "GRPC", "TCP"];
/// Names of Services end in this domain.
const CLUSTER_DOMAIN: &str = "cluster.local";
/// At least the length of a host in a rule: its name, its host and the name of its server, of at
/// most 253 bytes each, and its namespace.
pub(super) const BACKEND_BYTES: usize = 1024;

/// An XBackend, or a TrafficPolicy with `backend`.
pub type Backend = Checked<Box<External>>;

/// A host outside of the cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct External {
    /// The message for proxies.
    pub message: ExternalBackend,
    /// The protocol, if the object names one.
    pub protocol: Option<&'static str>,
}

/// Whether the TrafficPolicy with this spec is a host. One with targets is not, whatever else it has.
pub fn is_backend(spec: &str) -> bool {
    let sections = fields(spec);
    sections.contains_key("backend") && !sections.contains_key("targetRefs")
}

/// Parses an XBackend, or a TrafficPolicy that is a host. Names in `trust_domain` are names of the
/// cluster, too.
pub fn backend(meta: Meta, spec: &str, trust_domain: &str) -> Backend {
    let name = format!("{} {}", meta.kind, meta.key);
    let content = match meta.kind {
        Kind::TrafficPolicy => {
            only_backend(spec).and_then(|spec| external(name, spec, "spec.backend", trust_domain))
        }
        _ => external(name, spec, "spec", trust_domain),
    };
    Backend::new(meta, Vec::new(), content.map(Box::new))
}

/// The section `backend`. Other sections of the policy would have no target.
fn only_backend(spec: &str) -> Result<&str, Rejection> {
    let mut sections = fields(spec).into_keys();
    match sections.find(|section| section != "backend") {
        Some(other) => refuse(
            "spec",
            &shortened(&other),
            "set",
            "absent in a policy with backend",
        ),
        None => Ok(field(spec, "backend")),
    }
}

/// Reads the host in the field `at`.
fn external(name: String, spec: &str, at: &str, trust_domain: &str) -> Result<External, Rejection> {
    // Another type may have other fields.
    let kind = string(field(spec, "type")).unwrap_or_default();
    if kind != "ExternalHostname" {
        return refuse(at, "type", kind, "ExternalHostname");
    }
    let spec: BackendSpec = read_known(spec, at)?;
    let host = spec.external_hostname.hostname;
    let host = host_name(&format!("{at}.externalHostname.hostname"), &host)?;
    let domains = [CLUSTER_DOMAIN, trust_domain];
    let is_in = |domain: &&str| {
        let rest = host.strip_suffix(domain);
        rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    if let Some(domain) = domains
        .iter()
        .find(|domain| !domain.is_empty() && is_in(domain))
    {
        let expected = format!("outside of the cluster, whose names end in .{domain}");
        return refuse(at, "externalHostname.hostname", host, &expected);
    }
    if spec.port.port == 0 {
        return refuse(at, "port.port", 0, "a port from 1 to 65535");
    }
    let tls = tls(spec.tls, &host, &format!("{at}.tls"))?;
    let protocol = spec.protocol.as_deref();
    let protocol = protocol
        .map(|one| protocol_of(one, tls.is_some(), at))
        .transpose()?;
    let port = spec.port.port.into();
    let message = ExternalBackend {
        name,
        host,
        port,
        tls,
    };
    Ok(External { message, protocol })
}

/// A name of the DNS in lower case, with a dot: others are completed with the domains of the cluster.
fn host_name(field: &str, text: &str) -> Result<String, Rejection> {
    let host = text.to_ascii_lowercase();
    let last = host.rsplit('.').next().unwrap_or_default();
    // Resolvers read such names as IPv4 addresses.
    let is_number = last.starts_with("0x") || last.bytes().all(|byte| byte.is_ascii_digit());
    let is_address = is_number || host.parse::<IpAddr>().is_ok();
    if is_hostname(&host) && host.contains('.') && !is_address {
        return Ok(host);
    }
    let expected = "a complete host name, such as \"api.example.com\", and no IP address";
    Err(unsupported(field, text, expected))
}

fn protocol_of(text: &str, has_tls: bool, at: &str) -> Result<&'static str, Rejection> {
    let known = PROTOCOLS.into_iter().find(|one| *one == text);
    let known = known.filter(|one| !(has_tls && *one == "H2C"));
    known.ok_or_else(|| {
        let expected = "HTTP, HTTP11, HTTP2, GRPC, TCP or, without TLS, H2C";
        let Rejection { message, .. } = unsupported(&format!("{at}.protocol"), text, expected);
        Rejection::new(UNSUPPORTED_PROTOCOL, message)
    })
}

/// TLS to the server with this host name.
fn tls(spec: Option<BackendTls>, host: &str, at: &str) -> Result<Option<ExternalTls>, Rejection> {
    let Some(spec) = spec.filter(|spec| spec.mode != "None") else {
        return Ok(None);
    };
    if spec.mode != "ServerOnly" {
        let expected = "None or ServerOnly: proxies have no certificates for other servers";
        return refuse(at, "mode", spec.mode, expected);
    }
    let validation = spec.validation;
    let refused = [
        (
            "clientCertificateRef",
            spec.client_certificate_ref.is_some(),
            "proxies have no certificates for other servers",
        ),
        (
            "validation.caCertificateRefs",
            !validation.ca_certificate_refs.is_empty(),
            "the controller reads no certificates of others, use wellKnownCACertificates: System",
        ),
        (
            "validation.subjectAltNames",
            !validation.subject_alt_names.is_empty(),
            "the name in the certificate is validation.hostname",
        ),
    ];
    if let Some((field, _, reason)) = refused.iter().find(|(_, is_set, _)| *is_set) {
        let message = format!("{at}.{field}: not supported: {reason}");
        return Err(Rejection::new(UNSUPPORTED_VALUE, message));
    }
    let roots = validation.well_known_ca_certificates;
    if let Some(other) = roots.filter(|roots| roots != "System") {
        return refuse(at, "validation.wellKnownCACertificates", other, "System");
    }
    let server_name = match validation.hostname {
        Some(name) => host_name(&format!("{at}.validation.hostname"), &name)?,
        None => host.to_owned(),
    };
    Ok(Some(ExternalTls {
        server_name,
        roots: String::new(),
    }))
}

impl External {
    /// The backend for a reference of a route of this kind.
    pub(crate) fn of_route(
        &self,
        kind: Kind,
        port: Option<u16>,
    ) -> Result<ExternalBackend, Rejection> {
        let ExternalBackend {
            name, port: own, ..
        } = &self.message;
        if let Some(port) = port.filter(|port| u32::from(*port) != *own) {
            let message = format!("the {name} has the port {own}, not {port}");
            return Err(Rejection::new(BACKEND_NOT_FOUND, message));
        }
        let is_kept = match self.protocol {
            None => true,
            Some("TCP") => kind == Kind::TcpRoute,
            Some("HTTP11") => kind == Kind::HttpRoute,
            Some(_) => kind != Kind::TcpRoute,
        };
        if let Some(protocol) = self.protocol.filter(|_| !is_kept) {
            let message = format!(
                "the {name} has the protocol {protocol}, which is none of a {kind}: proxies do not \
                 convert protocols"
            );
            return Err(Rejection::new(UNSUPPORTED_PROTOCOL, message));
        }
        Ok(self.message.clone())
    }
}
