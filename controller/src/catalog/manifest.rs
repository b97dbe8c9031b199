//! Parses a file of manifests: YAML or JSON with any number of documents and Lists. Ignores other
//! kinds. Pure.

use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::core::DynamicObject;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_yaml_ng::{Error, Value};

use super::convert::ConvertError;
use super::resources::{self, resource};
use crate::fields::with_unknown_fields;
use crate::index::object::{Kind, Object};

/// An error in a file, with its position.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ManifestError {
    /// The text does not parse, or a field has the wrong type. The reason may contain the path of
    /// the field.
    #[error("line {line} column {column}: {reason}")]
    At {
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
        /// The error of the parser.
        reason: String,
    },
    /// An object is invalid, or the parser does not report the position.
    #[error("document {document}: {reason}")]
    In {
        /// The number of the document, from 1.
        document: usize,
        /// The reason.
        reason: String,
    },
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct TypeMeta {
    api_version: String,
    kind: String,
}

#[derive(Deserialize)]
struct List {
    #[serde(default)]
    items: Vec<Value>,
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
    // Each document is parsed twice, first for its kind, so that errors of the second pass have a
    // line.
    let documents = || serde_yaml_ng::Deserializer::from_str(text);
    for (position, (first, second)) in documents().zip(documents()).enumerate() {
        let document = position + 1;
        let within = |reason| ManifestError::In { document, reason };
        let at = |error: Error| match error.location() {
            None => within(error.to_string()),
            Some(location) => ManifestError::At {
                line: location.line().min(text.lines().count().max(1)),
                column: location.column(),
                reason: without_position(&error),
            },
        };
        // A document with comments only is null.
        let Some(meta) = Option::<TypeMeta>::deserialize(first).map_err(at)? else {
            continue;
        };
        if meta.kind.is_empty() {
            let reason = "it has no kind; every object needs apiVersion and kind";
            return Err(within(reason.to_owned()));
        }
        if meta.api_version == "v1" && meta.kind.ends_with("List") {
            let list = List::deserialize(second).map_err(at)?;
            for (position, item) in list.items.into_iter().enumerate() {
                let added = parsed.add_item(item, &meta.kind, trust_domain);
                added.map_err(|reason| within(format!("items[{position}]: {reason}")))?;
            }
        } else {
            let added = parsed.add(&meta, second, trust_domain);
            added.map_err(|error| match error {
                Invalid::Parse(error) => at(error),
                Invalid::Convert(reason) => within(format!("{}: {reason}", meta.kind)),
            })?;
        }
    }
    Ok(parsed)
}

enum Invalid {
    Parse(Error),
    Convert(ConvertError),
}

impl Parsed {
    /// Adds an item. The items of a `PodList` need no kind; a `List` has items of any kind.
    fn add_item(&mut self, item: Value, list: &str, trust_domain: &str) -> Result<(), String> {
        let text = |field: &str| item.get(field).and_then(Value::as_str).map(str::to_owned);
        let kind = list.strip_suffix("List").unwrap_or_default();
        let meta = TypeMeta {
            api_version: text("apiVersion").unwrap_or_else(|| "v1".to_owned()),
            kind: text("kind").unwrap_or_else(|| kind.to_owned()),
        };
        let added = self.add(&meta, item, trust_domain);
        added.map_err(|error| match error {
            Invalid::Parse(error) => format!("{}: {error}", meta.kind),
            Invalid::Convert(reason) => format!("{}: {reason}", meta.kind),
        })
    }

    /// Adds an object, unless its kind is not part of the catalog.
    fn add<'a>(
        &mut self,
        meta: &TypeMeta,
        document: impl Deserializer<'a, Error = Error>,
        trust_domain: &str,
    ) -> Result<(), Invalid> {
        let version = meta.api_version.rsplit_once('/');
        let (group, version) = version.unwrap_or(("", &meta.api_version));
        let mut kinds = Kind::ALL.into_iter();
        let kind = kinds.find(|kind| {
            let is_version = version == "v1" || kind.is_custom();
            kind.name() == meta.kind && resource(*kind).group == group && is_version
        });
        let Some(kind) = kind else {
            return Ok(());
        };
        let (json, mut fields) = match kind {
            Kind::Service => complete::<Service, _>(document, |_| vec![]),
            Kind::Slice => complete::<EndpointSlice, _>(document, |_| vec![]),
            Kind::Pod => complete::<Pod, _>(document, |_| vec![]),
            Kind::Node => complete::<Node, _>(document, |_| vec![]),
            _ => complete::<DynamicObject, _>(document, |object| {
                resources::unknown_fields(kind, object)
            }),
        }?;
        // The cluster that an object is from may have a later release, with other fields in the
        // status.
        fields.retain(|field| {
            let section = field.split('.').next();
            !matches!(section, Some("apiVersion" | "kind" | "status"))
        });
        let object = resources::read(kind, &json, trust_domain).map_err(Invalid::Convert)?;
        let unknown = |field| {
            let (kind, key) = (object.kind(), object.key());
            format!("{kind} {key}: unknown field {field:?}")
        };
        self.unknown_fields.extend(fields.into_iter().map(unknown));
        self.objects.push(object);
        Ok(())
    }
}

/// The JSON text of an object of a complete type, and the paths of the fields that the type does not
/// have. The catalog reads the text as it reads a response of the API server.
fn complete<'a, T, D>(
    document: D,
    unknown_fields: impl FnOnce(&T) -> Vec<String>,
) -> Result<(String, Vec<String>), Invalid>
where
    T: DeserializeOwned + Serialize,
    D: Deserializer<'a, Error = Error>,
{
    let (object, mut unknown) = with_unknown_fields::<T, _>(document);
    let object = object.map_err(|(_, error)| Invalid::Parse(error))?;
    unknown.extend(unknown_fields(&object));
    let json = serde_json::to_string(&object);
    let json = json.map_err(|error| Invalid::Convert(ConvertError(error.to_string())))?;
    Ok((json, unknown))
}

/// The message of an error. The parser appends the position to some.
fn without_position(error: &Error) -> String {
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
    fn reports_line_and_path_of_a_field_with_the_wrong_type() {
        let text = "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  ports:\n  - port: eighty\n";
        let error = parse(text, "cluster.local").unwrap_err();
        assert!(
            matches!(error, ManifestError::At { line: 7, .. }),
            "{error}"
        );
        assert!(error.to_string().contains("spec.ports[0].port"), "{error}");
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
