//! The fields of an AuthorizationPolicy: the fields of GEP-3779, and conditions on requests.
//!
//! A field that this release does not know makes the policy invalid: without it, the rest could
//! mean something else. Omitted and empty lists differ. Values of enumerations are texts, which
//! `parse.rs` checks. `tests/crd.rs` makes the definition of the custom resource from these types,
//! with these comments as descriptions.

use std::collections::BTreeMap;

use serde::Deserialize;

#[cfg(test)]
use super::tests::crd;
use crate::object::fields::Milliseconds;

/// Who may call pods, or what they may call outside of the cluster. A call that a rule of a DENY
/// policy matches is denied. Else, where ALLOW policies cover its port, a rule of one of them has to
/// match. Else the default decides. A request that is allowed so, and that a rule of an ExternalAuth
/// policy matches, is for its server to allow.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend(
    "required" = ["targetRefs"], "x-kubernetes-validations" = crd::policies(),
)))]
#[serde(default, rename_all = "camelCase")]
pub struct AuthorizationPolicySpec {
    /// Pods of the namespace of the policy. In the namespace of the mesh, kind Pod selects pods of
    /// all namespaces.
    #[cfg_attr(test, schemars(length(min = 1, max = 16), extend("x-kubernetes-list-type" = "atomic")))]
    pub target_refs: Vec<TargetRef>,
    /// Inbound (default): calls to the pods. Outbound: calls by the pods to outside of the cluster.
    /// Its rules name destinations and their ports.
    #[cfg_attr(test, schemars(extend("enum" = ["Inbound", "Outbound"])))]
    pub direction: Option<String>,
    /// ALLOW: calls are allowed if a rule matches. DENY: calls are denied if a rule matches.
    /// ExternalAuth: requests that a rule matches are denied unless a server allows them.
    #[cfg_attr(test, schemars(extend("enum" = ["ALLOW", "DENY", "ExternalAuth"])))]
    pub action: Option<String>,
    /// Enforce (default), or Audit: nothing is refused, and what would be is counted. ExternalAuth
    /// has no Audit.
    #[cfg_attr(test, schemars(extend("enum" = ["Enforce", "Audit"])))]
    pub mode: Option<String>,
    /// The ports that ALLOW covers. Workload (default): all. Ports: those that the rules name.
    #[cfg_attr(test, schemars(extend("enum" = ["Workload", "Ports"])))]
    pub scope: Option<String>,
    /// Rules, of which one has to match. Without rules, nothing matches.
    #[cfg_attr(test, schemars(length(max = 128), extend("x-kubernetes-list-type" = "atomic")))]
    pub rules: Option<Vec<Rule>>,
    /// Who issues the tokens that rules read claims of. A request with a bearer token that is not
    /// valid gets 401 at the ports that all rules name, or else at all ports.
    #[cfg_attr(test, schemars(length(min = 1, max = 8), extend("x-kubernetes-list-type" = "atomic")))]
    pub issuers: Option<Vec<Issuer>>,
    /// The server of ExternalAuth.
    pub external_auth: Option<ExternalAuth>,
    /// In place of action and rules: whether calls are allowed that no policy is about. Its target
    /// is all pods.
    #[cfg_attr(test, schemars(extend("enum" = ["ALLOW", "DENY"])))]
    pub default_action: Option<String>,
}

/// Pods by their labels, by a Service or by their service account.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["kind"], "x-kubernetes-validations" = crd::rule(
    "has(self.selector) == (self.kind == 'Pod') && has(self.name) == (self.kind != 'Pod')",
    "kind Pod requires selector, other kinds require name",
))))]
#[serde(default, rename_all = "camelCase")]
pub struct TargetRef {
    /// The core group: empty.
    #[cfg_attr(test, schemars(extend("enum" = [""], "default" = "")))]
    pub group: String,
    /// Pod: by selector. Service: the pods that it selects, at its target ports. ServiceAccount: the
    /// pods that run under it.
    #[cfg_attr(test, schemars(extend("enum" = ["Pod", "Service", "ServiceAccount"])))]
    pub kind: String,
    /// The name of the Service or of the service account.
    #[cfg_attr(test, schemars(length(min = 1, max = 253)))]
    pub name: Option<String>,
    /// The labels of the pods. {}: all pods.
    pub selector: Option<Selector>,
}

/// Labels of pods, all of which match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct Selector {
    /// Labels with these values.
    #[cfg_attr(test, schemars(extend("maxProperties" = 32)))]
    pub match_labels: BTreeMap<String, String>,
    /// Conditions on labels.
    #[cfg_attr(test, schemars(length(max = 32), extend("x-kubernetes-list-type" = "atomic")))]
    pub match_expressions: Vec<Requirement>,
}

/// A condition on a label.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["key", "operator"], "x-kubernetes-validations" = crd::rule(
    "has(self.values) == (self.operator in ['In', 'NotIn'])",
    "In and NotIn require values, Exists and DoesNotExist have none",
))))]
#[serde(default, rename_all = "camelCase")]
pub struct Requirement {
    /// The name of the label.
    #[cfg_attr(test, schemars(length(min = 1, max = 317)))]
    pub key: String,
    /// In, NotIn, Exists or DoesNotExist. NotIn holds without the label, too.
    #[cfg_attr(test, schemars(extend("enum" = ["In", "NotIn", "Exists", "DoesNotExist"])))]
    pub operator: String,
    /// The values.
    #[cfg_attr(test, schemars(length(min = 1, max = 64), inner(length(max = 63)), extend(
        "x-kubernetes-list-type" = "atomic",
    )))]
    pub values: Option<Vec<String>>,
}

/// An issuer of JSON Web Tokens.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["issuer", "audiences", "keys"])))]
#[serde(default, rename_all = "camelCase")]
pub struct Issuer {
    /// The claim iss.
    #[cfg_attr(test, schemars(length(min = 1, max = 1024)))]
    pub issuer: String,
    /// The claim aud has one of them.
    #[cfg_attr(test, schemars(length(min = 1, max = 16), inner(length(min = 1, max = 1024)), extend(
        "x-kubernetes-list-type" = "atomic",
    )))]
    pub audiences: Vec<String>,
    /// Its public keys.
    pub keys: IssuerKeys,
    /// Claims of valid tokens that the application gets as headers. The same headers from clients
    /// are removed.
    #[cfg_attr(test, schemars(length(min = 1, max = 16), extend("x-kubernetes-list-type" = "atomic")))]
    pub headers: Option<Vec<ClaimHeader>>,
}

/// The public keys of an issuer.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["type"], "x-kubernetes-validations" = crd::rule(
    "has(self.inline) == (self.type == 'Inline') && \
     has(self.secret) == (self.type == 'Secret') && has(self.url) == (self.type == 'URL')",
    "expected the field of the type, and no other",
))))]
#[serde(default, rename_all = "camelCase")]
pub struct IssuerKeys {
    /// Inline. Secret: of the namespace of the policy. URL: one that the operator of the mesh has
    /// allowed. The controller fetches keys of the latter two, and the status has them.
    #[serde(rename = "type")]
    #[cfg_attr(test, schemars(extend("enum" = ["Inline", "Secret", "URL"])))]
    pub kind: String,
    /// A JWK set (RFC 7517): RSA, P-256, P-384 or Ed25519. A token has the algorithm of its key. An
    /// RSA key without an algorithm has RS256.
    #[cfg_attr(test, schemars(length(min = 1, max = 65_536)))]
    pub inline: Option<String>,
    /// A Secret with a JWK set, which the service account of the controller may get.
    pub secret: Option<SecretKey>,
    /// The https URL of a JWK set.
    #[cfg_attr(test, schemars(regex(pattern = "^https://"), length(max = 2048)))]
    pub url: Option<String>,
}

/// A value in a Secret.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["name", "key"])))]
#[serde(default, rename_all = "camelCase")]
pub struct SecretKey {
    /// The name of the Secret.
    #[cfg_attr(test, schemars(length(min = 1, max = 253)))]
    pub name: String,
    /// The key of the value.
    #[cfg_attr(test, schemars(length(min = 1, max = 253)))]
    pub key: String,
}

/// A claim as a header: a text, a number or a boolean.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["claim", "name"])))]
#[serde(default, rename_all = "camelCase")]
pub struct ClaimHeader {
    /// The name of the claim, or a JSON pointer: /realm_access/owner.
    #[cfg_attr(test, schemars(length(min = 1, max = 1024)))]
    pub claim: String,
    /// The name of the header.
    #[cfg_attr(test, schemars(regex(pattern = crd::TOKEN), length(max = 256)))]
    pub name: String,
}

/// An external authorization server, with the fields of the filter ExternalAuth of GEP-1494.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend(
    "required" = ["protocol", "backendRef"], "x-kubernetes-validations" = crd::rule(
        "(!has(self.grpc) || self.protocol == 'GRPC') && (!has(self.http) || self.protocol == 'HTTP')",
        "expected no field of the other protocol",
    ),
)))]
#[serde(default, rename_all = "camelCase")]
pub struct ExternalAuth {
    /// GRPC: envoy.service.auth.v3.Authorization. HTTP: a request, which a response with 200 to 299
    /// allows.
    #[cfg_attr(test, schemars(extend("enum" = ["GRPC", "HTTP"])))]
    pub protocol: String,
    /// The server.
    pub backend_ref: BackendRef,
    /// Settings of GRPC.
    pub grpc: Option<GrpcAuth>,
    /// Settings of HTTP.
    pub http: Option<HttpAuth>,
    /// The part of the body of the request that the server gets. Omitted: nothing.
    pub forward_body: Option<ForwardBody>,
    /// The time for the answer, from 1ms to 60s. Default: 1s.
    #[cfg_attr(test, schemars(with = "Option<crd::UpToAMinute>"))]
    pub timeout: Option<Milliseconds>,
    /// Without an answer, requests are denied (Deny, default) or allowed (Allow).
    #[cfg_attr(test, schemars(extend("enum" = ["Deny", "Allow"])))]
    pub failure_mode: Option<String>,
}

/// The start of the body of a request.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct ForwardBody {
    /// The most bytes that the server gets. 0 (default): none.
    #[cfg_attr(test, schemars(range(max = 65_535)))]
    pub max_size: u32,
}

/// A port of a Service. The policy does not apply to the pods that the Service selects.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["name", "port"])))]
#[serde(default, rename_all = "camelCase")]
pub struct BackendRef {
    /// The core group: empty.
    #[cfg_attr(test, schemars(extend("enum" = [""], "default" = "")))]
    pub group: String,
    /// Service.
    #[cfg_attr(test, schemars(extend("enum" = ["Service"], "default" = "Service")))]
    pub kind: Option<String>,
    /// The name of the Service.
    #[cfg_attr(test, schemars(regex(pattern = crd::LABEL), length(max = 63)))]
    pub name: String,
    /// Default: the namespace of the policy. Another one requires no ReferenceGrant: the pods call
    /// the server under their own identity, and its policies decide.
    #[cfg_attr(test, schemars(regex(pattern = crd::LABEL), length(max = 63)))]
    pub namespace: Option<String>,
    /// The TCP port of the Service.
    #[cfg_attr(test, schemars(range(min = 1, max = 65_535)))]
    pub port: u32,
}

/// Settings of a server with the protocol GRPC: headers for the server and for the application.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct GrpcAuth {
    /// The headers of the request that the server gets. Omitted: all.
    #[cfg_attr(test, schemars(length(min = 1, max = 64), inner(regex(pattern = crd::TOKEN), length(max = 256)), extend(
        "x-kubernetes-list-type" = "atomic",
    )))]
    pub allowed_headers: Option<Vec<String>>,
    /// The headers that the server sets or removes for the application. The same headers from
    /// clients are removed. Omitted: none.
    #[cfg_attr(test, schemars(length(min = 1, max = 64), inner(regex(pattern = crd::TOKEN), length(max = 256)), extend(
        "x-kubernetes-list-type" = "atomic",
    )))]
    pub allowed_response_headers: Option<Vec<String>>,
}

/// Settings of a server with the protocol HTTP: its path, and headers for the server and for the
/// application.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct HttpAuth {
    /// Stands before the path of the request.
    #[cfg_attr(test, schemars(regex(pattern = crd::PATH_PREFIX), length(max = 1024)))]
    pub path: Option<String>,
    /// The headers of the request that the server gets, besides Host, Authorization and
    /// X-Mesh-Caller, the SPIFFE ID of the client.
    #[cfg_attr(test, schemars(length(min = 1, max = 64), inner(regex(pattern = crd::TOKEN), length(max = 256)), extend(
        "x-kubernetes-list-type" = "atomic",
    )))]
    pub allowed_headers: Option<Vec<String>>,
    /// The headers of the answer that the application gets. The same headers from clients are
    /// removed. Omitted: none.
    #[cfg_attr(test, schemars(length(min = 1, max = 64), inner(regex(pattern = crd::TOKEN), length(max = 256)), extend(
        "x-kubernetes-list-type" = "atomic",
    )))]
    pub allowed_response_headers: Option<Vec<String>>,
}

/// Conditions on a call, all of which hold.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
pub struct Rule {
    /// The callers. Omitted: every client. []: none.
    #[cfg_attr(test, schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic")))]
    pub sources: Option<Vec<Source>>,
    /// Callers that do not match.
    #[cfg_attr(test, schemars(length(min = 1, max = 64), extend("x-kubernetes-list-type" = "atomic")))]
    pub not_sources: Option<Vec<Source>>,
    /// The destinations, of Outbound. Omitted: every one. []: none.
    #[cfg_attr(test, schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic")))]
    pub destinations: Option<Vec<Destination>>,
    /// The ports. Omitted: all.
    pub network_attributes: Option<NetworkAttributes>,
    /// Conditions on the request, of which one holds. Omitted: every request, and every connection.
    #[cfg_attr(test, schemars(length(min = 1, max = 16), extend("x-kubernetes-list-type" = "atomic")))]
    pub requests: Option<Vec<RequestMatch>>,
}

/// A caller.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["type"], "x-kubernetes-validations" = crd::rule(
    "has(self.serviceAccount) == (self.type == 'ServiceAccount') && \
     has(self.spiffe) == (self.type == 'SPIFFE') && \
     has(self.namespace) == (self.type == 'Namespace') && \
     has(self.ipBlock) == (self.type == 'IPBlock')",
    "expected the field of the type, and no other",
))))]
#[serde(default, rename_all = "camelCase")]
pub struct Source {
    /// ServiceAccount, SPIFFE, Namespace, IPBlock, or Unauthenticated: without an identity.
    #[serde(rename = "type")]
    #[cfg_attr(test, schemars(extend("enum" = [
        "ServiceAccount", "SPIFFE", "Namespace", "IPBlock", "Unauthenticated",
    ])))]
    pub kind: String,
    /// A service account of the trust domain of the mesh.
    pub service_account: Option<ServiceAccount>,
    /// spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/SERVICE-ACCOUNT. Each part may be *.
    #[cfg_attr(test, schemars(regex(pattern = crd::SPIFFE), length(max = 2048)))]
    pub spiffe: Option<String>,
    /// All service accounts of a namespace, of the trust domain of the mesh.
    #[cfg_attr(test, schemars(regex(pattern = crd::LABEL), length(max = 63)))]
    pub namespace: Option<String>,
    /// Addresses of clients: 10.0.0.0/8 or fd00::/8.
    #[cfg_attr(test, schemars(regex(pattern = crd::IP_BLOCK), length(max = 43)))]
    pub ip_block: Option<String>,
}

/// A destination outside of the cluster.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["type"], "x-kubernetes-validations" = crd::rule(
    "has(self.host) == (self.type == 'Host') && has(self.ipBlock) == (self.type == 'IPBlock')",
    "expected the field of the type, and no other",
))))]
#[serde(default, rename_all = "camelCase")]
pub struct Destination {
    /// Host, of ALLOW, or IPBlock.
    #[serde(rename = "type")]
    #[cfg_attr(test, schemars(extend("enum" = ["Host", "IPBlock"])))]
    pub kind: String,
    /// The name in the ClientHello or in Host: api.example.com, or *.example.com.
    #[cfg_attr(test, schemars(regex(pattern = crd::HOST), length(max = 253)))]
    pub host: Option<String>,
    /// Addresses: 203.0.113.0/24 or 2001:db8::/32.
    #[cfg_attr(test, schemars(regex(pattern = crd::IP_BLOCK), length(max = 43)))]
    pub ip_block: Option<String>,
}

/// A service account.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["name"])))]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceAccount {
    /// The namespace. Default: the namespace of the policy.
    #[cfg_attr(test, schemars(regex(pattern = crd::LABEL), length(max = 63)))]
    pub namespace: Option<String>,
    /// The name. *: every one of the namespace.
    #[cfg_attr(test, schemars(regex(pattern = crd::NAME_OR_ALL), length(max = 253)))]
    pub name: String,
}

/// Where the call arrives.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["ports"])))]
#[serde(default, rename_all = "camelCase")]
pub struct NetworkAttributes {
    /// Ports of the pod, or with Outbound, ports of the destination.
    #[cfg_attr(test, schemars(length(min = 1, max = 64), inner(range(min = 1, max = 65_535)), extend(
        "x-kubernetes-list-type" = "set",
    )))]
    pub ports: Vec<u16>,
}

/// Conditions on a request, all of which hold. One entry of each list matches, and all entries of
/// headers and claims.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("minProperties" = 1, "x-kubernetes-validations" = crd::rule(
    "!has(self.grpc) || !has(self.paths)", "grpc and paths exclude each other",
))))]
#[serde(default, rename_all = "camelCase")]
pub struct RequestMatch {
    /// The methods, in upper case.
    #[cfg_attr(test, schemars(length(min = 1, max = 16), inner(regex(pattern = crd::METHOD), length(max = 64)), extend(
        "x-kubernetes-list-type" = "atomic",
    )))]
    pub methods: Option<Vec<String>>,
    /// The paths, without the query.
    #[cfg_attr(test, schemars(length(min = 1, max = 32), extend("x-kubernetes-list-type" = "atomic")))]
    pub paths: Option<Vec<PathMatch>>,
    /// The hosts: api.example.com, or *.example.com.
    #[cfg_attr(test, schemars(length(min = 1, max = 32), inner(regex(pattern = crd::HOST), length(max = 253)), extend(
        "x-kubernetes-list-type" = "atomic",
    )))]
    pub hosts: Option<Vec<String>>,
    /// The headers, all of which match.
    #[cfg_attr(test, schemars(length(min = 1, max = 16), extend("x-kubernetes-list-type" = "atomic")))]
    pub headers: Option<Vec<HeaderMatch>>,
    /// The claims of the token, all of which match. They require issuers.
    #[cfg_attr(test, schemars(length(min = 1, max = 16), extend("x-kubernetes-list-type" = "atomic")))]
    pub claims: Option<Vec<ClaimMatch>>,
    /// The gRPC methods.
    #[cfg_attr(test, schemars(length(min = 1, max = 32), extend("x-kubernetes-list-type" = "atomic")))]
    pub grpc: Option<Vec<GrpcMatch>>,
}

/// A condition on the path.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["type", "value"], "x-kubernetes-validations" = crd::rule(
    "self.type == 'Suffix' || self.value.startsWith('/')", "a path begins with /",
))))]
#[serde(default, rename_all = "camelCase")]
pub struct PathMatch {
    /// Exact. PathPrefix: by elements. Suffix: by characters. Template: by elements, where {*} is
    /// one, and {**} at the end is any number of them.
    #[serde(rename = "type")]
    #[cfg_attr(test, schemars(extend("enum" = ["Exact", "PathPrefix", "Suffix", "Template"])))]
    pub kind: String,
    /// The path, or the part of it.
    #[cfg_attr(test, schemars(regex(pattern = crd::PATH), length(max = 1024)))]
    pub value: String,
}

/// A condition on a header field.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["name", "type"], "x-kubernetes-validations" = crd::rule(
    "has(self.value) == (self.type != 'Present')", "all types but Present require value",
))))]
#[serde(default, rename_all = "camelCase")]
pub struct HeaderMatch {
    /// The name.
    #[cfg_attr(test, schemars(regex(pattern = crd::TOKEN), length(max = 256)))]
    pub name: String,
    /// Exact, Prefix, Suffix, or Present: any value.
    #[serde(rename = "type")]
    #[cfg_attr(test, schemars(extend("enum" = ["Exact", "Prefix", "Suffix", "Present"])))]
    pub kind: String,
    /// The value, or the part of it.
    #[cfg_attr(test, schemars(length(min = 1, max = 1024)))]
    pub value: Option<String>,
}

/// A condition on a claim. It holds for a list if one member matches, and for scope and scp if one
/// word matches.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["claim", "type"], "x-kubernetes-validations" = crd::rule(
    "has(self.value) == (self.type != 'Present')", "all types but Present require value",
))))]
#[serde(default, rename_all = "camelCase")]
pub struct ClaimMatch {
    /// The name of the claim, or a JSON pointer: /realm_access/roles.
    #[cfg_attr(test, schemars(length(min = 1, max = 1024)))]
    pub claim: String,
    /// Exact, Prefix, Suffix, or Present: any value.
    #[serde(rename = "type")]
    #[cfg_attr(test, schemars(extend("enum" = ["Exact", "Prefix", "Suffix", "Present"])))]
    pub kind: String,
    /// The value, or the part of it.
    #[cfg_attr(test, schemars(length(min = 1, max = 1024)))]
    pub value: Option<String>,
}

/// A gRPC service, or one of its methods.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("required" = ["service"])))]
#[serde(default, rename_all = "camelCase")]
pub struct GrpcMatch {
    /// The service with its package: echo.v1.Echo.
    #[cfg_attr(test, schemars(regex(pattern = crd::GRPC), length(max = 512)))]
    pub service: String,
    /// The method. Default: all of the service.
    #[cfg_attr(test, schemars(regex(pattern = crd::GRPC), length(max = 256)))]
    pub method: Option<String>,
}
