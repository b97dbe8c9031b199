//! The definitions of the custom resources of the mesh, from the types of their fields, and the
//! definition of TrafficPolicy. Tests compare them with the files of `manifests/crds`;
//! `UPDATE_CRDS=1 cargo test -p diy-mesh-controller crd` rewrites these files.
//!
//! The types here are types of the Gateway API, with schemas of their own.

#![allow(dead_code)]

use std::any::type_name;
use std::borrow::Cow;
use std::path::Path;

use diy_mesh_proto::field;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::kinds::policy::parse::MAX_MATCHES;
use crate::kinds::policy::spec::TrafficPolicySpec;
use crate::object::fields::{Name, Named};
use crate::object::kind::{GROUP, VERSION};

/// GEP-2257.
const DURATION: &str = "^([0-9]{1,5}(h|m|s|ms)){1,4}$";
/// At least the longest text of that form.
const MAX_DURATION_LENGTH: u32 = 32;
/// Labels of letters in lower case, digits and hyphens, with dots between them.
pub(crate) const HOSTNAME: &str =
    "^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
pub(crate) const NAME: &str = "^[A-Za-z0-9!#$%&'*+\\-.^_\\x60|~]+$";

/// For path matches: there is nothing to check.
const PLAIN: &str = "!has(self.value) || (has(self.type) && self.type == 'RegularExpression')";

/// A duration as in HTTPRoutes.
#[derive(JsonSchema)]
#[serde(transparent)]
pub(crate) struct Duration(
    #[schemars(regex(pattern = DURATION), length(max = MAX_DURATION_LENGTH))] String,
);

/// A duration from 1ms to 24h.
#[derive(JsonSchema)]
#[serde(transparent)]
#[schemars(extend("x-kubernetes-validations" = rule(
    "duration(self) >= duration('1ms') && duration(self) <= duration('24h')",
    "expected a duration from 1ms to 24h",
)))]
pub(crate) struct Limited(Duration);

/// A duration from 1ms to 60s.
#[derive(JsonSchema)]
#[serde(transparent)]
#[schemars(extend("x-kubernetes-validations" = rule(
    "duration(self) >= duration('1ms') && duration(self) <= duration('60s')",
    "expected a duration from 1ms to 60s",
)))]
pub(crate) struct UpToAMinute(Duration);

impl<T: Named> JsonSchema for Name<T> {
    fn schema_name() -> Cow<'static, str> {
        type_name::<T>().into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let names = T::NAMES.iter().map(|(name, _)| *name);
        json_schema!({"type": "string", "enum": Vec::from_iter(names)})
    }

    fn inline_schema() -> bool {
        true
    }
}

/// A duration up to 24h.
#[derive(JsonSchema)]
#[serde(transparent)]
#[schemars(extend("x-kubernetes-validations" = rule(
    "duration(self) <= duration('24h')", "expected a duration up to 24h",
)))]
pub(crate) struct UpToADay(Duration);

/// A duration up to a year.
#[derive(JsonSchema)]
#[serde(transparent)]
#[schemars(extend("x-kubernetes-validations" = rule(
    "duration(self) <= duration('8760h')", "expected a duration up to 8760h",
)))]
struct UpToAYear(Duration);

/// One validation, an expression of the Common Expression Language.
pub(crate) fn rule(rule: &str, message: &str) -> Value {
    json!([{"rule": rule, "message": message}])
}

/// An expression for the headers that no route changes.
fn reserved() -> String {
    let mesh = [field::PREVIOUS_ATTEMPTS, field::MESH_ERROR].map(spellings);
    let of_connections = field::OF_CONNECTIONS.join("|");
    format!(
        "(?i)^({of_connections}|{}|{})$",
        spellings(field::CALLED_BY),
        mesh.join("|")
    )
}

/// Every spelling of a header that some server reads as it.
fn spellings(name: &str) -> String {
    name.replace('-', "[^a-z0-9]")
}

/// All faults or all rate limits together have a limited number of matches.
pub(crate) fn few_matches(field: &str) -> Value {
    json!({
        "rule": format!("!has(self.{field}) || \
            self.{field}.map(one, has(one.matches) ? size(one.matches) : 0).sum() <= {MAX_MATCHES}"),
        "message": format!("{field} have at most {MAX_MATCHES} matches"),
    })
}

/// The proxy replaces this header of clients. An exact expression exceeds the budget of CEL: this one
/// matches any character in place of the second hyphen.
pub(crate) fn no_caller() -> Value {
    let name = field::CALLED_BY
        .replacen('-', r"[\W_]", 1)
        .replace("-", ".");
    let length = field::CALLED_BY.len();
    rule(
        &format!(
            "!has(self.matches) || self.matches.all(one, !has(one.headers) || \
             !one.headers.exists(header, \
             size(header.name) == {length} && header.name.matches(r'(?i){name}')))"
        ),
        "the proxy replaces this header: set per to Caller",
    )
}

/// A share is in percent or a fraction. Objects that are stored without either keep their meaning:
/// all requests.
pub(crate) fn one_share() -> Value {
    rule(
        "has(self.percent) != has(self.fraction)",
        "expected percent or fraction; percent: 100 is all requests",
    )
}

/// As in HTTPRoutes.
#[derive(JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rule(
    "!has(self.request) || !has(self.backendRequest) || \
     duration(self.request) == duration('0s') || \
     duration(self.backendRequest) <= duration(self.request)",
    "backendRequest is at most request",
)))]
pub(crate) struct Timeouts {
    /// From the first byte of the request to the end of the response. 0s: none.
    request: Option<Duration>,
    /// The same for one attempt. At most the timeout of the request. 0s: none.
    backend_request: Option<Duration>,
}

/// As in HTTPRoutes.
#[derive(JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!has(self.cookieConfig) || !has(self.cookieConfig.lifetimeType) || \
                 self.cookieConfig.lifetimeType != 'Permanent' || \
                 (has(self.absoluteTimeout) && duration(self.absoluteTimeout) > duration('0s') && \
                 (!has(self.type) || self.type == 'Cookie'))",
        "message": "a permanent session requires a cookie and absoluteTimeout",
    },
    {
        "rule": "!has(self.type) || self.type != 'Header' || !has(self.sessionName) || \
                 !self.sessionName.matches('RESERVED')"
            .replace("RESERVED", &reserved()),
        "message": "sessionName is a header that routes may not set",
    },
]))]
pub(crate) struct SessionPersistence {
    /// Cookie (default) or Header.
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["Cookie", "Header"]))]
    kind: Option<String>,
    /// The name of the cookie or of the header. Default: mesh-session, or x-mesh-session.
    #[schemars(regex(pattern = NAME), length(max = 128))]
    session_name: Option<String>,
    /// The time from the first response of the session.
    absolute_timeout: Option<UpToAYear>,
    /// The time from the latest response of the session.
    idle_timeout: Option<UpToAYear>,
    /// The lifetime of the cookie.
    cookie_config: Option<CookieConfig>,
}

/// The lifetime of a cookie.
#[derive(JsonSchema)]
#[serde(rename_all = "camelCase")]
struct CookieConfig {
    /// Session (default): of the browser. Permanent: absoluteTimeout.
    #[schemars(extend("enum" = ["Session", "Permanent"]))]
    lifetime_type: Option<String>,
}

/// A host outside of the cluster, with the fields of an XBackend (GEP-4894) that the mesh supports.
#[derive(JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rule(
    "!has(self.protocol) || self.protocol != 'H2C' || !has(self.tls) || self.tls.mode == 'None'",
    "H2C has no TLS: HTTP2 has",
)))]
pub(crate) struct Backend {
    /// ExternalHostname.
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["ExternalHostname"]))]
    kind: String,
    /// The port of the host.
    port: BackendPort,
    /// The host.
    external_hostname: ExternalHostname,
    /// The protocol of the requests, which proxies keep. Default: the protocol of the route.
    #[schemars(extend("enum" = ["HTTP", "HTTP11", "HTTP2", "H2C", "GRPC", "TCP"]))]
    protocol: Option<String>,
    /// TLS to the host. Default: plaintext.
    tls: Option<BackendTls>,
}

/// The port of a host.
#[derive(JsonSchema)]
struct BackendPort {
    /// Without effect.
    #[schemars(length(max = 63))]
    name: Option<String>,
    /// The number.
    #[schemars(range(min = 1, max = 65535))]
    port: u32,
}

/// A host.
#[derive(JsonSchema)]
struct ExternalHostname {
    /// A complete name outside of the cluster, and no address.
    hostname: PublicHostname,
}

/// A complete name outside of the cluster. The controller alone knows the trust domain.
#[derive(JsonSchema)]
#[serde(transparent)]
#[schemars(extend("x-kubernetes-validations" = rule(
    "self.contains('.') && !self.matches('(^|[.])([0-9]+|0x[^.]*|cluster[.]local)$')",
    "expected a complete host name outside of the cluster, and no IP address",
)))]
struct PublicHostname(#[schemars(regex(pattern = HOSTNAME), length(max = 253))] String);

/// A complete name.
#[derive(JsonSchema)]
#[serde(transparent)]
#[schemars(extend("x-kubernetes-validations" = rule(
    "self.contains('.') && !self.matches('(^|[.])([0-9]+|0x[^.]*)$')",
    "expected a complete host name, and no IP address",
)))]
struct ServerName(#[schemars(regex(pattern = HOSTNAME), length(max = 253))] String);

/// TLS to a host.
#[derive(JsonSchema)]
struct BackendTls {
    /// The mode None, or ServerOnly: proxies verify the certificate of the host.
    #[schemars(extend("enum" = ["None", "ServerOnly"]))]
    mode: String,
    /// How the certificate is verified.
    validation: Option<BackendTlsValidation>,
}

/// How the certificate of a host is verified.
#[derive(JsonSchema)]
#[serde(rename_all = "camelCase")]
struct BackendTlsValidation {
    /// The name in the certificate. Default: the name of the host.
    hostname: Option<ServerName>,
    /// System (default): the public certificate authorities.
    #[serde(rename = "wellKnownCACertificates")]
    #[schemars(extend("enum" = ["System"]))]
    well_known_ca_certificates: Option<String>,
}

/// A share. The denominator is 100 by default.
#[derive(JsonSchema)]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "self.numerator <= (has(self.denominator) ? self.denominator : 100)",
    "message": "expected a share of at most 1",
}]))]
pub(crate) struct Fraction {
    /// The numerator.
    #[schemars(range(min = 0, max = 1_000_000_000))]
    numerator: u32,
    /// The denominator. Default: 100.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    denominator: Option<u32>,
}

/// Conditions on a request, all of which hold. As in HTTPRoutes.
#[derive(JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Match {
    /// The path. Default: every path.
    path: Option<PathMatch>,
    /// The headers.
    #[schemars(length(max = 16))]
    headers: Option<Vec<ValueMatch>>,
    /// The query parameters.
    #[schemars(length(max = 16))]
    query_params: Option<Vec<ValueMatch>>,
    /// The method. Default: every method.
    #[schemars(extend("enum" = [
        "GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH",
    ]))]
    method: Option<String>,
}

/// A condition on the path.
#[derive(JsonSchema)]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": format!("{PLAIN} || (self.value.startsWith('/') && !self.value.contains('//') && \
                 !self.value.matches('/[.][.]?(/|$)') && !self.value.matches('%2[fF]'))"),
        "message": "a path begins with /, without empty or dot segments and encoded slashes",
    },
    {
        "rule": format!("{PLAIN} || \
                 self.value.matches(\"^([-A-Za-z0-9/._~!$&'()*+,;=:@]|%[0-9a-fA-F]{{2}})*$\")"),
        "message": "a path has no query, no fragment, and only characters of RFC 3986",
    },
]))]
struct PathMatch {
    /// Exact, PathPrefix (default) or RegularExpression.
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["Exact", "PathPrefix", "RegularExpression"]))]
    kind: Option<String>,
    /// The path, the prefix of whole elements, or the expression. Default: /.
    #[schemars(length(max = 1024))]
    value: Option<String>,
}

/// A condition on a header field or on a query parameter.
#[derive(JsonSchema)]
struct ValueMatch {
    /// Exact (default) or RegularExpression.
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["Exact", "RegularExpression"]))]
    kind: Option<String>,
    /// The name.
    #[schemars(regex(pattern = NAME), length(max = 256))]
    name: String,
    /// The value, or the expression.
    #[schemars(length(min = 1, max = 4096))]
    value: String,
}

/// A custom resource.
pub(crate) struct Resource {
    pub(crate) kind: &'static str,
    pub(crate) plural: &'static str,
    pub(crate) description: &'static str,
    pub(crate) labels: Value,
    pub(crate) columns: Vec<Value>,
}

impl Resource {
    /// The definition, with the fields of a type.
    pub(crate) fn definition<T: JsonSchema>(self) -> Value {
        let settings = SchemaSettings::draft07().with(|one| one.inline_subschemas = true);
        let schema = settings.into_generator().into_root_schema_for::<T>();
        let mut spec = schema.to_value();
        simplify(&mut spec);
        let Resource {
            kind,
            plural,
            description,
            labels,
            mut columns,
        } = self;
        columns.extend([
            json!({"name": "Accepted", "type": "string", "jsonPath":
                ".status.ancestors[*].conditions[?(@.type==\"Accepted\")].status"}),
            json!({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}),
        ]);
        json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{plural}.{GROUP}"), "labels": labels},
            "spec": {
                "group": GROUP, "scope": "Namespaced",
                "names": {"kind": kind, "listKind": format!("{kind}List"), "plural": plural,
                    "singular": kind.to_lowercase(), "categories": ["diy-service-mesh"]},
                "versions": [{
                    "name": VERSION, "served": true, "storage": true,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": {
                        "description": description, "type": "object", "required": ["spec"],
                        "properties": {
                            "apiVersion": {"type": "string"}, "kind": {"type": "string"},
                            "metadata": {"type": "object"}, "spec": spec, "status": status(),
                        },
                    }},
                }],
            },
        })
    }
}

/// The file of a definition in the manifests has this content. Rewrites it on request.
pub(crate) fn assert_installed(definition: &Value, source: &str) {
    let plural = definition["spec"]["names"]["plural"].as_str().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = root.join(format!("../manifests/crds/{plural}.yaml"));
    if std::env::var_os("UPDATE_CRDS").is_some() {
        let comment = format!(
            "# Generated from controller/src/kinds/{source}/spec.rs by `UPDATE_CRDS=1 cargo test -p diy-mesh-controller crd`.\n"
        );
        let text = serde_yaml_ng::to_string(definition).unwrap();
        std::fs::write(&path, comment + &text).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let document = serde_yaml_ng::Deserializer::from_str(&text);
    let installed: Option<Value> = Option::deserialize(document).unwrap();
    assert!(
        installed.as_ref() == Some(definition),
        "manifests/crds is not up to date: run UPDATE_CRDS=1 cargo test -p diy-mesh-controller crd"
    );
}

fn definition() -> Value {
    let targets =
        json!({"name": "Targets", "type": "string", "jsonPath": ".spec.targetRefs[*].name"});
    let resource = Resource {
        kind: "TrafficPolicy",
        plural: "trafficpolicies",
        description: "The traffic of the requests to Services of a namespace.",
        // GEP-713.
        labels: json!({"gateway.networking.k8s.io/policy": "Inherited"}),
        columns: vec![targets],
    };
    let mut definition = resource.definition::<TrafficPolicySpec>();
    let spec =
        &mut definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    let sections = spec["properties"].as_object().expect("sections").keys();
    let others = sections.filter(|section| *section != "backend");
    let others: Vec<String> = others.map(|other| format!("has(self.{other})")).collect();
    let only_backend = json!({
        "rule": format!("has(self.backend) ? !({}) : has(self.targetRefs)", others.join(" || ")),
        "message": "expected targetRefs, or backend alone",
    });
    let rules = &mut spec["x-kubernetes-validations"];
    rules.as_array_mut().expect("rules").push(only_backend);
    definition
}

/// PolicyStatus of GEP-713.
fn status() -> Value {
    let text = |max: u32| json!({"type": "string", "maxLength": max});
    let number = || json!({"type": "integer", "format": "int64", "minimum": 0});
    json!({
        "description": "The conditions of the policy from the controllers of meshes.",
        "type": "object", "required": ["ancestors"],
        "properties": {"ancestors": {
            "type": "array", "maxItems": 16, "x-kubernetes-list-type": "atomic",
            "items": {
                "type": "object", "required": ["ancestorRef", "controllerName"],
                "properties": {
                    "ancestorRef": {
                        "type": "object", "required": ["name"],
                        "properties": {
                            "group": text(253), "kind": text(63), "namespace": text(63),
                            "name": text(253), "sectionName": text(253),
                            "port": {"type": "integer", "minimum": 1, "maximum": 65535},
                        },
                    },
                    "controllerName": text(253),
                    "conditions": {
                        "type": "array", "maxItems": 8, "x-kubernetes-list-type": "map",
                        "x-kubernetes-list-map-keys": ["type"],
                        "items": {
                            "type": "object",
                            "required": ["type", "status", "reason", "message",
                                "lastTransitionTime"],
                            "properties": {
                                "type": text(316), "reason": text(1024), "message": text(32768),
                                "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                                "observedGeneration": number(),
                                "lastTransitionTime": {"type": "string", "format": "date-time"},
                            },
                        },
                    },
                },
            },
        }},
    })
}

/// Removes what structural schemas do not have.
fn simplify(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            // API servers prune unknown fields.
            for name in ["$schema", "title", "format"] {
                fields.remove(name);
            }
            if fields
                .get("additionalProperties")
                .is_some_and(Value::is_boolean)
            {
                fields.remove("additionalProperties");
            }
            // Defaults of the Rust types are no values of the API.
            if fields
                .get("enum")
                .is_none_or(|all| all.as_array() != Some(&vec![json!("")]))
            {
                fields.remove("default");
            }
            if let Some(Value::Array(types)) = fields.get("type") {
                let mut types = types.iter().filter(|one| *one != "null").cloned();
                let only = types.next().expect("a type other than null");
                fields.insert("type".to_owned(), only);
            }
            if let Some(Value::Array(values)) = fields.get_mut("enum") {
                values.retain(|one| !one.is_null());
            }
            if let Some(Value::String(text)) = fields.get_mut("description") {
                *text = text.replace('\n', " ");
            }
            for name in ["minimum", "maximum"] {
                let number = fields.get(name).and_then(Value::as_f64);
                fields.extend(number.map(|number| (name.to_owned(), json!(number as i64))));
            }
            fields.values_mut().for_each(simplify);
        }
        Value::Array(items) => items.iter_mut().for_each(simplify),
        _ => {}
    }
}

/// Each schema, with its path.
pub(crate) fn walk(schema: &Value, path: &str, visit: &mut impl FnMut(&str, &Map<String, Value>)) {
    let fields = schema.as_object().expect("a schema");
    visit(path, fields);
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        walk(property, &format!("{path}.{name}"), visit);
    }
    if let Some(items) = fields.get("items") {
        walk(items, &format!("{path}[]"), visit);
    }
}

/// The schema is structural, and describes every field. Returns the number of fields.
pub(crate) fn assert_structural(definition: &Value) -> usize {
    let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let mut count = 0;
    walk(
        &schema["properties"]["spec"],
        "spec",
        &mut |path, fields| {
            count += 1;
            let known = [
                "description",
                "type",
                "properties",
                "required",
                "items",
                "enum",
                "default",
                "minimum",
                "maximum",
                "minLength",
                "maxLength",
                "minItems",
                "maxItems",
                "pattern",
                "minProperties",
                "maxProperties",
                "additionalProperties",
                "x-kubernetes-list-type",
                "x-kubernetes-list-map-keys",
                "x-kubernetes-validations",
            ];
            let unknown: Vec<&String> = fields
                .keys()
                .filter(|name| !known.contains(&name.as_str()))
                .collect();
            assert!(unknown.is_empty(), "{path}: {unknown:?}");
            assert!(fields["type"].is_string(), "{path}");
            let default = fields.get("default");
            assert!(
                default.is_none_or(|default| fields["enum"][0] == *default),
                "{path}"
            );
            assert!(
                path.ends_with("[]") || fields.contains_key("description"),
                "{path}"
            );
            assert!(
                fields["type"] != "array" || fields.contains_key("maxItems"),
                "{path}"
            );
        },
    );
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::policy::tests::policy;

    #[test]
    fn crd_of_the_manifests_is_that_of_the_types() {
        assert_installed(&definition(), "policy");
    }

    #[test]
    fn schema_is_structural_and_describes_every_field() {
        let count = assert_structural(&definition());
        assert!(count > 80, "{count} fields");
    }

    /// The API server and the controller accept the same values.
    #[test]
    fn limits_of_numbers_are_those_of_the_controller() {
        let definition = definition();
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let sections = &schema["properties"]["spec"]["properties"];
        let is_valid = |sections: Value| policy("p", 0, sections).invalid.is_none();
        let mut count = 0;
        for section in ["connections", "outlierDetection", "circuitBreaker", "retry"] {
            walk(&sections[section], "", &mut |path, fields| {
                let Some(max) = fields.get("maximum").and_then(Value::as_i64) else {
                    return;
                };
                let min = fields.get("minimum").and_then(Value::as_i64).unwrap_or(0);
                let set = |value: i64| {
                    let (path, mut value) = match path.strip_suffix("[]") {
                        Some(path) => (path, json!([value])),
                        None => (path, json!(value)),
                    };
                    for name in path.split('.').rev().filter(|name| !name.is_empty()) {
                        value = json!({name: value});
                    }
                    if section == "circuitBreaker" && value.get("failurePercent").is_none() {
                        value["failurePercent"] = json!(50);
                    }
                    is_valid(json!({section: value}))
                };
                count += 1;
                assert_eq!(
                    [min - 1, min, max, max + 1].map(set),
                    [false, true, true, false],
                    "{section}{path}: {min} to {max}"
                );
            });
        }
        assert!(count >= 15, "{count} numbers");
    }
}
