//! Parses a file of manifests: YAML or JSON with any number of documents and Lists. Ignores other
//! kinds. Pure.

use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_yaml_ng::{Error, Value};

use super::convert::CatalogObject;
use super::gateway::{
    self, GatewayObject, GrpcRoute, HttpRoute, ReferenceGrant, TcpRoute, TrafficPolicy,
};
use super::smi::{RouteGroup, TrafficSplit};
use crate::index::object::Object;
use crate::policy;
use crate::routes::smi;

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

/// All objects of the catalog in a text, in their order.
pub(crate) fn parse(text: &str, trust_domain: &str) -> Result<Vec<Object>, ManifestError> {
    let mut objects = Vec::new();
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
                let object = list_item(item, &meta.kind, trust_domain);
                let invalid = |reason| within(format!("items[{position}]: {reason}"));
                objects.extend(object.map_err(invalid)?);
            }
        } else {
            objects.extend(match object(&meta, second, trust_domain) {
                Some(Ok(object)) => Some(object),
                Some(Err(Invalid::Parse(error))) => return Err(at(error)),
                Some(Err(Invalid::Convert(reason))) => {
                    return Err(within(format!("{}: {reason}", meta.kind)));
                }
                None => None,
            });
        }
    }
    Ok(objects)
}

/// Parses an item. The items of a `PodList` need no kind; a `List` has items of any kind.
fn list_item(item: Value, list: &str, trust_domain: &str) -> Result<Option<Object>, String> {
    let text = |field: &str| item.get(field).and_then(Value::as_str).map(str::to_owned);
    let kind = list.strip_suffix("List").unwrap_or_default();
    let meta = TypeMeta {
        api_version: text("apiVersion").unwrap_or_else(|| "v1".to_owned()),
        kind: text("kind").unwrap_or_else(|| kind.to_owned()),
    };
    let object = object(&meta, item, trust_domain).transpose();
    object.map_err(|error| match error {
        Invalid::Parse(error) => format!("{}: {error}", meta.kind),
        Invalid::Convert(reason) => format!("{}: {reason}", meta.kind),
    })
}

enum Invalid {
    Parse(Error),
    Convert(String),
}

/// Parses an object. `None`: the kind is not part of the catalog.
fn object<'a>(
    meta: &TypeMeta,
    document: impl Deserializer<'a, Error = Error>,
    trust_domain: &str,
) -> Option<Result<Object, Invalid>> {
    match (meta.api_version.as_str(), meta.kind.as_str()) {
        ("v1", "Service") => Some(read::<Service>(document, trust_domain)),
        ("v1", "Pod") => Some(read::<Pod>(document, trust_domain)),
        ("v1", "Node") => Some(read::<Node>(document, trust_domain)),
        ("discovery.k8s.io/v1", "EndpointSlice") => {
            Some(read::<EndpointSlice>(document, trust_domain))
        }
        (version, kind) => {
            let (group, _) = version.split_once('/')?;
            match kind {
                "TrafficPolicy" if group == policy::GROUP => {
                    Some(read::<GatewayObject<TrafficPolicy>>(document, trust_domain))
                }
                "TrafficSplit" if group == smi::SPLIT_GROUP => {
                    Some(read::<GatewayObject<TrafficSplit>>(document, trust_domain))
                }
                "HTTPRouteGroup" if group == smi::SPECS_GROUP => {
                    Some(read::<GatewayObject<RouteGroup>>(document, trust_domain))
                }
                _ if group != gateway::GROUP => None,
                "HTTPRoute" => Some(read::<GatewayObject<HttpRoute>>(document, trust_domain)),
                "GRPCRoute" => Some(read::<GatewayObject<GrpcRoute>>(document, trust_domain)),
                "TCPRoute" => Some(read::<GatewayObject<TcpRoute>>(document, trust_domain)),
                "ReferenceGrant" => Some(read::<GatewayObject<ReferenceGrant>>(
                    document,
                    trust_domain,
                )),
                _ => None,
            }
        }
    }
}

fn read<'a, T: CatalogObject + DeserializeOwned>(
    document: impl Deserializer<'a, Error = Error>,
    trust_domain: &str,
) -> Result<Object, Invalid> {
    let object = T::deserialize(document).map_err(Invalid::Parse)?;
    let converted = object.convert(trust_domain);
    converted.map_err(|error| Invalid::Convert(error.to_string()))
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
}
