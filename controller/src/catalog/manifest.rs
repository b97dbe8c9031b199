//! Parses a file of manifests: YAML or JSON with any number of documents and Lists. Ignores other
//! kinds. Pure.

use diy_mesh_model::json;
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::core::DynamicObject;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::resources::{self, resource};
use crate::kinds::Object;
use crate::object::Kind;
use crate::object::fields::{lost, nth_item};

/// An error in a file, with its position.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ManifestError {
    /// The text does not parse.
    #[error("line {line} column {column}: {reason}")]
    At {
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
        /// The error of the parser.
        reason: String,
    },
    /// An object is invalid, or the parser does not report the position. The reason contains the path
    /// of a field that has the wrong type.
    #[error("document {document}: {reason}")]
    In {
        /// The number of the document, from 1.
        document: usize,
        /// The reason.
        reason: String,
    },
}

/// The content of a text.
#[derive(Debug, Default)]
pub struct Parsed {
    /// All objects of the catalog, in their order.
    pub objects: Vec<Object>,
    /// Fields that their kinds do not have, such as misspelt ones, with the object.
    pub unknown_fields: Vec<String>,
}

/// Parses a text. Identities are in the trust domain.
pub fn parse(text: &str, trust_domain: &str) -> Result<Parsed, ManifestError> {
    let mut parsed = Parsed::default();
    let documents = serde_yaml_ng::Deserializer::from_str(text);
    for (document, content) in (1..).zip(documents) {
        let within = |reason| ManifestError::In { document, reason };
        // A value of YAML has each key once.
        let read = serde_yaml_ng::Value::deserialize(content);
        let object = read.map_err(|error| match error.location() {
            None => within(error.to_string()),
            Some(location) => ManifestError::At {
                line: location.line().min(text.lines().count().max(1)),
                column: location.column(),
                reason: without_position(&error),
            },
        })?;
        let object = serde_json::to_value(object).map_err(|error| within(error.to_string()))?;
        // A document with comments only is null.
        if !object.is_null() {
            let added = parsed.add_all(&object, trust_domain);
            added.map_err(within)?;
        }
    }
    Ok(parsed)
}

/// Parses an object, or a List. Identities are in the trust domain.
pub fn parse_object(object: &Value, trust_domain: &str) -> Result<Parsed, ManifestError> {
    let mut parsed = Parsed::default();
    match parsed.add_all(object, trust_domain) {
        Ok(()) => Ok(parsed),
        Err(reason) => Err(ManifestError::In {
            document: 1,
            reason,
        }),
    }
}

fn text_of<'a>(object: &'a Value, field: &str) -> Option<&'a str> {
    object.get(field)?.as_str()
}

impl Parsed {
    /// Adds an object, or the objects of a List.
    fn add_all(&mut self, object: &Value, trust_domain: &str) -> Result<(), String> {
        let (version, kind) = (text_of(object, "apiVersion"), text_of(object, "kind"));
        let Some(kind) = kind.filter(|kind| !kind.is_empty()) else {
            return Err("it has no kind; every object needs apiVersion and kind".to_owned());
        };
        let Some(kind) = kind.strip_suffix("List").filter(|_| version == Some("v1")) else {
            return self.add(version.unwrap_or_default(), kind, object, trust_domain);
        };
        let items = object["items"].as_array().into_iter().flatten();
        for (position, item) in items.enumerate() {
            // The items of a `PodList` need no kind; a `List` has items of any kind.
            let version = text_of(item, "apiVersion").unwrap_or("v1");
            let kind = text_of(item, "kind").unwrap_or(kind);
            let added = self.add(version, kind, item, trust_domain);
            added.map_err(|reason| format!("items[{position}]: {reason}"))?;
        }
        Ok(())
    }

    /// Adds an object, unless its kind is not part of the catalog. The catalog reads its JSON as it
    /// reads a response of the API server.
    fn add(
        &mut self,
        api_version: &str,
        kind_name: &str,
        object: &Value,
        trust_domain: &str,
    ) -> Result<(), String> {
        let version = api_version.rsplit_once('/');
        let (group, version) = version.unwrap_or(("", api_version));
        let mut kinds = Kind::ALL.into_iter();
        let kind = kinds.find(|kind| {
            let is_version = version == "v1" || kind.is_custom();
            kind.name() == kind_name && resource(*kind).group == group && is_version
        });
        let Some(kind) = kind else {
            return Ok(());
        };
        let json = object.to_string();
        let unknown = match kind {
            Kind::Service => unknown_fields::<Service>(object, &json),
            Kind::Slice => unknown_fields::<EndpointSlice>(object, &json),
            Kind::Pod => unknown_fields::<Pod>(object, &json),
            Kind::Node => unknown_fields::<Node>(object, &json),
            _ => unknown_fields::<DynamicObject>(object, &json).map(|mut unknown| {
                unknown.extend(resources::unknown_fields(kind, &json));
                unknown
            }),
        };
        let mut unknown = unknown.map_err(|reason| format!("{kind_name}: {reason}"))?;
        // The cluster that an object is from may have a later release, with other fields in the
        // status.
        unknown.retain(|field| field.split('.').next() != Some("status"));
        let read = resources::read(kind, &json, trust_domain);
        let object = read.map_err(|error| format!("{kind_name}: {error}"))?;
        let describe = |field| {
            let (kind, key) = (object.kind(), object.key());
            format!("{kind} {key}: unknown field {field:?}")
        };
        self.unknown_fields
            .extend(unknown.into_iter().map(describe));
        self.objects.push(object);
        Ok(())
    }
}

/// The paths of the fields that the complete type of an object does not have.
fn unknown_fields<T>(object: &Value, json: &str) -> Result<Vec<String>, String>
where
    T: DeserializeOwned + Serialize,
{
    let read: T = json::parse(json).map_err(|error| error.to_string())?;
    let known = serde_json::to_value(&read).map_err(|error| error.to_string())?;
    Ok(lost(object, &known, nth_item))
}

/// The message of an error. The parser appends the position to some.
fn without_position(error: &impl ToString) -> String {
    let message = error.to_string();
    let reason = message.split(" at line ").next();
    reason.unwrap_or(&message).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        parse(text, "cluster.local")
            .unwrap()
            .objects
            .iter()
            .map(|object| format!("{} {}", object.kind(), object.key()))
            .collect()
    }

    #[test]
    fn parses_several_documents_and_ignores_other_kinds() {
        let text = "# a comment alone\n---\napiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\n---\n\
                    apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec: {anything: goes}\n---\n---\n\
                    apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\nendpoints: []\nmetadata: {name: web-1}\n";
        assert_eq!(
            names(text),
            ["Service shop/web", "EndpointSlice default/web-1"]
        );
        assert_eq!(names(""), [""; 0]);
    }

    #[test]
    fn parses_json_and_lists() {
        assert_eq!(
            names(r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}"#),
            ["Pod default/p"]
        );
        let list = r#"{"apiVersion": "v1", "kind": "List", "items": [
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "a"}},
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}]}"#;
        assert_eq!(names(list), ["Pod a/p"]);
    }

    #[test]
    fn reports_line_and_column_of_invalid_yaml() {
        let text = "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\n bad: [\n";
        let ManifestError::At {
            line,
            column,
            reason,
        } = parse(text, "cluster.local").unwrap_err()
        else {
            panic!("the place is known")
        };
        assert_eq!(line, 5);
        assert!(column > 0 && !reason.is_empty(), "{column} {reason}");
    }

    #[test]
    fn refuses_aliases_that_repeat_each_other() {
        let mut text =
            "apiVersion: v1\nkind: Service\nmetadata: {name: web}\na0: &a0 [x]\n".to_owned();
        for level in 1..30 {
            let last = level - 1;
            text += &format!(
                "a{level}: &a{level} [{}]\n",
                format!("*a{last},").repeat(10)
            );
        }
        let error = parse(&text, "cluster.local").unwrap_err().to_string();
        assert!(error.contains("repetition limit"), "{error}");
    }

    #[test]
    fn refuses_a_key_that_is_repeated() {
        let text = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec:\n  clusterIP: 10.0.0.1\n  clusterIP: 10.0.0.2\n";
        let error = parse(text, "cluster.local").unwrap_err().to_string();
        assert!(
            error.contains("duplicate entry with key \"clusterIP\""),
            "{error}"
        );
    }

    #[test]
    fn reports_document_and_path_of_a_field_with_the_wrong_type() {
        let text = "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  ports:\n  - port: eighty\n";
        assert_eq!(
            parse(text, "cluster.local").unwrap_err().to_string(),
            "document 1: Service: spec.ports[0].port: invalid type: string \"eighty\", expected i32"
        );
    }

    #[test]
    fn reports_the_document_of_an_invalid_object() {
        let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n---\napiVersion: v1\nkind: Service\nmetadata: {name: b}\nspec: {clusterIP: x}\n";
        assert_eq!(
            parse(text, "cluster.local").unwrap_err().to_string(),
            "document 2: Service: spec.clusterIPs: \"x\" is not an IP address"
        );
        assert_eq!(
            parse("metadata: {name: a}\n", "cluster.local")
                .unwrap_err()
                .to_string(),
            "document 1: it has no kind; every object needs apiVersion and kind"
        );
    }

    fn unknown(text: &str) -> Vec<String> {
        parse(text, "cluster.local").unwrap().unknown_fields
    }

    #[test]
    fn unknown_fields_have_their_object_and_path() {
        let route = |kind: &str, version: &str, spec: &str| {
            unknown(&format!(
                "apiVersion: {version}\nkind: {kind}\nmetadata: {{name: a, namespace: shop}}\nspec: {spec}\n"
            ))
        };
        let field = |kind: &str, path: &str| [format!("{kind} shop/a: unknown field {path:?}")];
        let gateway = "gateway.networking.k8s.io/v1";
        for (kind, version, spec, path) in [
            (
                "Service",
                "v1",
                "{ports: [{port: 80, targetport: 81}]}",
                "spec.ports[0].targetport",
            ),
            (
                "Pod",
                "v1",
                "{containers: [], nodename: n}",
                "spec.nodename",
            ),
            (
                "HTTPRoute",
                gateway,
                "{rules: [{}, {backendRef: []}]}",
                "spec.rules[1].backendRef",
            ),
            (
                "HTTPRoute",
                gateway,
                "{parentRefs: [{name: a, sction: b}]}",
                "spec.parentRefs[0].sction",
            ),
            (
                "HTTPRoute",
                gateway,
                "{rules: [{backendRefs: [{name: a, prot: 80}]}]}",
                "spec.rules[0].backendRefs[0].prot",
            ),
            (
                "HTTPRoute",
                gateway,
                "{rules: [{filters: [{type: URLRewrite, urlRewrite: {host: a}}]}]}",
                "spec.rules[0].filters[0].urlRewrite.host",
            ),
            (
                "GRPCRoute",
                gateway,
                "{rules: [{matches: [{method: {servce: a}}]}]}",
                "spec.rules[0].matches[0].method.servce",
            ),
            (
                "ReferenceGrant",
                gateway,
                "{to: [{kinds: Service}]}",
                "spec.to[0].kinds",
            ),
            (
                "TrafficPolicy",
                "diy-service-mesh.dev/v1alpha1",
                "{timeouts: {reqest: 1s}}",
                "spec.timeouts.reqest",
            ),
            (
                "TrafficPolicy",
                "diy-service-mesh.dev/v1alpha1",
                "{loadBalancing: {algoritm: RoundRobin}}",
                "spec.loadBalancing.algoritm",
            ),
            (
                "AuthorizationPolicy",
                "diy-service-mesh.dev/v1alpha1",
                "{rules: [{sources: [{type: SPIFFE, spifee: a}]}]}",
                "spec.rules[0].sources[0].spifee",
            ),
            (
                "TrafficSplit",
                "split.smi-spec.io/v1alpha4",
                "{service: a, backends: [{service: b, weight: 1, x: 1}]}",
                "spec.backends[0].x",
            ),
            (
                "HTTPRouteGroup",
                "specs.smi-spec.io/v1alpha4",
                "{matches: [{name: m, path: /}]}",
                "spec.matches[0].path",
            ),
        ] {
            assert_eq!(route(kind, version, spec), field(kind, path));
        }
        let misplaced = "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Service, metadata: {name: a, label: {}}, sepc: {}}\n";
        assert_eq!(
            unknown(misplaced),
            [
                "Service default/a: unknown field \"metadata.label\"",
                "Service default/a: unknown field \"sepc\""
            ]
        );
    }

    #[test]
    fn fields_that_the_api_server_adds_or_the_mesh_does_not_need_are_known() {
        let metadata = "{name: a, uid: u, generation: 1, resourceVersion: '7', creationTimestamp: '2026-11-22T09:00:00Z', annotations: {a: b}, ownerReferences: [{apiVersion: v1, kind: Pod, name: p, uid: u}], managedFields: [{manager: kubectl, operation: Update, fieldsType: FieldsV1, fieldsV1: {'f:spec': {'f:ports': {}}}}]}";
        for object in [
            "apiVersion: v1\nkind: Pod\nspec: {containers: [{name: app, image: i, resources: {limits: {cpu: 1}}}]}\nstatus: {phase: Running, ofALaterRelease: 1}",
            "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nspec: {useDefaultGateways: All, rules: [{filters: [{type: ExternalAuth, externalAuth: {protocol: HTTP}}]}]}\nstatus: {parents: []}",
            "apiVersion: split.smi-spec.io/v1alpha4\nkind: TrafficSplit\nspec: {service: a, matches: [{kind: HTTPRouteGroup, name: g, apiGroup: specs.smi-spec.io}]}",
            "apiVersion: specs.smi-spec.io/v1alpha4\nkind: HTTPRouteGroup\nspec: {matches: [{name: m}]}",
        ] {
            assert_eq!(
                unknown(&format!("{object}\nmetadata: {metadata}\n")),
                [""; 0]
            );
        }
    }
}
