//! The part of an object that its status depends on, and the text of the object with another status.
//! Pure.

use std::collections::BTreeMap;

use kube::api::ObjectMeta;
use kube::core::DynamicObject;
use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use crate::object::Kind;

/// The compared fields: the references and the status. The rest of the spec is skipped.
#[derive(Deserialize)]
pub(super) struct Stored {
    metadata: Metadata,
    #[serde(default)]
    spec: References,
    #[serde(default)]
    status: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    generation: Option<i64>,
    resource_version: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct References {
    parent_refs: Value,
    target_refs: Value,
}

impl Stored {
    /// An object with nothing else.
    pub(super) fn into_object(self, kind: Kind) -> DynamicObject {
        let resource = crate::catalog::resource(kind);
        let Metadata {
            name,
            namespace,
            uid,
            generation,
            resource_version,
        } = self.metadata;
        let References {
            parent_refs,
            target_refs,
        } = self.spec;
        let metadata = ObjectMeta {
            namespace,
            uid,
            generation,
            resource_version,
            ..ObjectMeta::default()
        };
        let mut object = DynamicObject::new(&name.unwrap_or_default(), &resource)
            .data(json!({"spec": {"parentRefs": parent_refs, "targetRefs": target_refs}}));
        object.data["status"] = self.status;
        object.metadata = ObjectMeta {
            name: object.metadata.name,
            ..metadata
        };
        object
    }
}

/// The text of an object with this status. All other fields stay as they are written.
pub(super) fn with_status(object: &str, status: &Value) -> Result<Vec<u8>, serde_json::Error> {
    let mut fields: BTreeMap<String, &RawValue> = serde_json::from_str(object)?;
    let status = to_raw_value(status)?;
    fields.insert("status".to_owned(), &status);
    serde_json::to_vec(&fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_status_leaves_the_other_fields_as_they_are_written() {
        let object = r#"{"spec": {"b": 1.0, "a": 1e2}, "status": {"old": 1}, "kind": "A"}"#;
        let written = with_status(object, &json!({"new": 2})).unwrap();
        let expected = r#"{"kind":"A","spec":{"b": 1.0, "a": 1e2},"status":{"new":2}}"#;
        assert_eq!(String::from_utf8(written).unwrap(), expected);
    }

    #[test]
    fn only_references_and_status_are_read() {
        let text = r#"{"metadata": {"name": "a", "namespace": "shop", "generation": 3, "managedFields": [1]},
            "spec": {"parentRefs": [{"name": "web"}], "rules": [1]}, "status": {"parents": []}}"#;
        let stored: Stored = serde_json::from_str(text).unwrap();
        let object = stored.into_object(Kind::HttpRoute);
        assert_eq!(object.metadata.generation, Some(3));
        assert_eq!(
            object.data,
            json!({"spec": {"parentRefs": [{"name": "web"}], "targetRefs": null}, "status": {"parents": []}})
        );
    }
}
