//! A file of manifests, as text, to the catalog's objects. Pure: YAML or JSON, several documents,
//! Lists; other kinds are ignored.

use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde::{Deserialize, de::DeserializeOwned};
use serde_yaml_ng::{Deserializer, Value};

use super::CatalogObject;
use crate::index::object::Object;

/// What is wrong with a text, and where.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ManifestError {
    /// It does not parse, or a field has the wrong type. The reason may name the path to the field.
    #[error("line {line} column {column}: {reason}")]
    At {
        /// Counted from 1.
        line: usize,
        /// Counted from 1.
        column: usize,
        /// What the parser says.
        reason: String,
    },
    /// It cannot be used, and the parser does not say where.
    #[error("document {document}: {reason}")]
    In {
        /// Counted from 1.
        document: usize,
        /// Why.
        reason: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TypeMeta {
    api_version: Option<String>,
    kind: Option<String>,
}

#[derive(Deserialize)]
struct List {
    #[serde(default)]
    items: Vec<Value>,
}

/// Every Service, EndpointSlice and Pod of the text, in its order.
pub(super) fn parse(text: &str, trust_domain: &str) -> Result<Vec<Object>, ManifestError> {
    let mut objects = Vec::new();
    // Each document is read twice, first for its kind alone, so that an error in the second reading
    // has its line.
    let documents = Deserializer::from_str(text).zip(Deserializer::from_str(text));
    for (position, (first, second)) in documents.enumerate() {
        let context = Context {
            text,
            trust_domain,
            document: position + 1,
        };
        // A document that holds nothing but comments is null.
        let Some(meta) =
            Option::<TypeMeta>::deserialize(first).map_err(|error| context.at(&error))?
        else {
            continue;
        };
        let kind = meta.kind.ok_or_else(|| {
            context.within("it has no kind; every object needs apiVersion and kind")
        })?;
        match (
            meta.api_version.as_deref().unwrap_or_default(),
            kind.as_str(),
        ) {
            ("v1", "Service") => objects.push(context.read::<Service>(second)?),
            ("discovery.k8s.io/v1", "EndpointSlice") => {
                objects.push(context.read::<EndpointSlice>(second)?)
            }
            ("v1", "Pod") => objects.push(context.read::<Pod>(second)?),
            ("v1", list) if list.ends_with("List") => {
                let list = List::deserialize(second).map_err(|error| context.at(&error))?;
                for (position, item) in list.items.into_iter().enumerate() {
                    objects.extend(context.item(item, list_item_kind(&kind), position)?);
                }
            }
            _ => {}
        }
    }
    Ok(objects)
}

/// `PodList` holds Pods, which need not repeat their kind; `List` holds anything.
fn list_item_kind(list: &str) -> &str {
    list.strip_suffix("List").unwrap_or_default()
}

struct Context<'a> {
    text: &'a str,
    trust_domain: &'a str,
    document: usize,
}

impl Context<'_> {
    fn read<T: CatalogObject + DeserializeOwned>(
        &self,
        document: Deserializer<'_>,
    ) -> Result<Object, ManifestError> {
        let object = T::deserialize(document).map_err(|error| self.at(&error))?;
        object
            .convert(self.trust_domain)
            .map_err(|error| self.within(&format!("{}: {error}", T::KIND)))
    }

    fn item(
        &self,
        item: Value,
        kind: &str,
        position: usize,
    ) -> Result<Option<Object>, ManifestError> {
        let text = |field: &str| item.get(field).and_then(Value::as_str).map(str::to_owned);
        let kind = text("kind").unwrap_or_else(|| kind.to_owned());
        let version = text("apiVersion").unwrap_or_else(|| "v1".to_owned());
        let result = match (version.as_str(), kind.as_str()) {
            ("v1", "Service") => read_value::<Service>(item, self.trust_domain),
            ("discovery.k8s.io/v1", "EndpointSlice") => {
                read_value::<EndpointSlice>(item, self.trust_domain)
            }
            ("v1", "Pod") => read_value::<Pod>(item, self.trust_domain),
            _ => return Ok(None),
        };
        result
            .map(Some)
            .map_err(|reason| self.within(&format!("items[{position}]: {kind}: {reason}")))
    }

    fn at(&self, error: &serde_yaml_ng::Error) -> ManifestError {
        match error.location() {
            None => self.within(&error.to_string()),
            Some(location) => {
                // The parser appends the place to some of its messages, and says it in its own way.
                let reason = error.to_string();
                let reason = reason
                    .split(" at line ")
                    .next()
                    .unwrap_or(&reason)
                    .to_owned();
                ManifestError::At {
                    line: location.line().min(self.text.lines().count().max(1)),
                    column: location.column(),
                    reason,
                }
            }
        }
    }

    fn within(&self, reason: &str) -> ManifestError {
        ManifestError::In {
            document: self.document,
            reason: reason.to_owned(),
        }
    }
}

fn read_value<T: CatalogObject + DeserializeOwned>(
    item: Value,
    trust_domain: &str,
) -> Result<Object, String> {
    let object: T = serde_yaml_ng::from_value(item).map_err(|error| error.to_string())?;
    object
        .convert(trust_domain)
        .map_err(|error| error.to_string())
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
    fn several_documents_and_other_kinds_in_one_file() {
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
    fn json_and_what_kubectl_prints_are_read_too() {
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
    fn text_that_is_no_yaml_is_named_with_its_line_and_column() {
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
    fn a_field_of_the_wrong_type_is_named_with_its_line() {
        let text = "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  ports:\n  - port: eighty\n";
        let error = parse(text, "cluster.local").unwrap_err();
        assert!(
            matches!(error, ManifestError::At { line: 7, .. }),
            "{error}"
        );
        assert!(error.to_string().contains("spec.ports[0].port"), "{error}");
    }

    #[test]
    fn a_value_that_makes_no_sense_names_its_document() {
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
