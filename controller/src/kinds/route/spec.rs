//! The fields of HTTPRoutes, GRPCRoutes, TCPRoutes, ReferenceGrants and XBackends (Gateway API v1.5,
//! XBackends v1.6) that the mesh reads.
//!
//! Values of enumerations are texts, so that a value of a later release does not make the object
//! unreadable: `parse.rs` rejects it with a reason.

use diy_mesh_proto::mesh::v1::HeaderModifier;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::kinds::authorization::spec::{ForwardBody, GrpcAuth, HttpAuth};
use crate::object::TargetReference;
use crate::object::fields::Milliseconds;

/// The parents and the rules of a route. Without `R`, each rule is parsed on its own, for the
/// position in errors.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RouteSpec<R = Box<RawValue>> {
    pub parent_refs: Vec<TargetReference>,
    pub hostnames: Vec<String>,
    /// Absent: the default of the kind.
    pub rules: Option<Vec<R>>,
    /// A field for Gateways.
    pub use_default_gateways: Option<Box<RawValue>>,
}

/// A rule of a route. The kinds differ in their matches; a TCPRoute has a name and backends only.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Rule<M> {
    pub name: Option<String>,
    pub matches: Vec<M>,
    pub filters: Vec<Filter>,
    pub backend_refs: Vec<BackendRef>,
    pub timeouts: Timeouts,
    pub retry: Option<Retry>,
    pub session_persistence: Option<SessionPersistence>,
}

/// The matches of a rule. Each is parsed on its own: the readable ones may have an effect.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Matches<'a> {
    #[serde(borrow)]
    pub matches: Vec<&'a RawValue>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpMatch {
    pub path: Option<ValueMatch>,
    pub headers: Vec<ValueMatch>,
    pub query_params: Vec<ValueMatch>,
    pub method: Option<String>,
}

/// A match of a path, of a header or of a query parameter.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ValueMatch {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub name: String,
    pub value: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct GrpcMatch {
    pub method: Option<GrpcMethodMatch>,
    pub headers: Vec<ValueMatch>,
}

/// A TCPRoute has no matches: it is for all connections.
#[derive(Debug, Default, Deserialize)]
pub struct TcpMatch {}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct GrpcMethodMatch {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub service: Option<String>,
    pub method: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Timeouts {
    pub request: Option<Milliseconds>,
    pub backend_request: Option<Milliseconds>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Retry {
    pub codes: Vec<u32>,
    pub attempts: Option<u32>,
    pub backoff: Option<Milliseconds>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SessionPersistence {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub session_name: Option<String>,
    pub absolute_timeout: Option<Milliseconds>,
    pub idle_timeout: Option<Milliseconds>,
    pub cookie_config: Option<CookieConfig>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct CookieConfig {
    pub lifetime_type: Option<String>,
}

/// A reference to a backend, its weight and its filters.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BackendRef {
    pub group: Option<String>,
    pub kind: Option<String>,
    pub namespace: Option<String>,
    pub name: String,
    pub port: Option<u16>,
    pub weight: Option<u32>,
    pub filters: Vec<Filter>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ObjectRef {
    pub group: Option<String>,
    pub kind: Option<String>,
    pub namespace: Option<String>,
    pub name: String,
    pub port: Option<u16>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Filter {
    #[serde(rename = "type")]
    pub kind: String,
    pub request_header_modifier: Option<HeaderModifier>,
    pub response_header_modifier: Option<HeaderModifier>,
    pub request_mirror: Option<Mirror>,
    pub request_redirect: Option<Redirect>,
    pub url_rewrite: Option<Rewrite>,
    pub cors: Option<Cors>,
    pub extension_ref: Option<ObjectRef>,
    pub external_auth: Option<Box<RawValue>>,
}

/// The filter of GEP-1494. A field that this release does not know could change what is asked.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ExternalAuth {
    pub protocol: String,
    pub backend_ref: ObjectRef,
    pub grpc: Option<GrpcAuth>,
    pub http: Option<HttpAuth>,
    pub forward_body: Option<ForwardBody>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PathModifier {
    #[serde(rename = "type")]
    pub kind: String,
    pub replace_full_path: Option<String>,
    pub replace_prefix_match: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Redirect {
    pub scheme: Option<String>,
    pub hostname: Option<String>,
    pub path: Option<PathModifier>,
    pub port: Option<u16>,
    pub status_code: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Rewrite {
    pub hostname: Option<String>,
    pub path: Option<PathModifier>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Mirror {
    pub backend_ref: ObjectRef,
    pub percent: Option<u32>,
    pub fraction: Option<Fraction>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Fraction {
    pub numerator: u32,
    pub denominator: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Cors {
    pub allow_origins: Vec<String>,
    pub allow_credentials: bool,
    pub allow_methods: Vec<String>,
    pub allow_headers: Vec<String>,
    pub expose_headers: Vec<String>,
    pub max_age: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct GrantSpec {
    pub from: Vec<GrantFrom>,
    pub to: Vec<GrantTo>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct GrantFrom {
    pub group: String,
    pub kind: String,
    pub namespace: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct GrantTo {
    pub group: String,
    pub kind: String,
    pub name: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BackendSpec {
    #[serde(rename = "type")]
    pub kind: String,
    pub port: BackendPort,
    pub external_hostname: ExternalHostname,
    pub protocol: Option<String>,
    pub tls: Option<BackendTls>,
}

/// The name has no meaning for a single port.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct BackendPort {
    pub name: Option<String>,
    pub port: u16,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ExternalHostname {
    pub hostname: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BackendTls {
    pub mode: String,
    pub client_certificate_ref: Option<Box<RawValue>>,
    pub validation: BackendTlsValidation,
}

/// As in a BackendTLSPolicy.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BackendTlsValidation {
    pub hostname: Option<String>,
    pub ca_certificate_refs: Vec<Box<RawValue>>,
    #[serde(rename = "wellKnownCACertificates")]
    pub well_known_ca_certificates: Option<String>,
    pub subject_alt_names: Vec<Box<RawValue>>,
}
