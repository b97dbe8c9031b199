//! Accessors for a pod as plain JSON. Pure.

use serde_json::{Map, Value};

/// The value of the pod's annotation `name`.
pub fn annotation<'a>(pod: &'a Value, name: &str) -> Option<&'a str> {
    pod.get("metadata")?.get("annotations")?.get(name)?.as_str()
}

/// The `name` field of a container, a volume, a variable or a port.
pub fn name_of(object: &Value) -> &str {
    object
        .get("name")
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// The items of the list `field` of an object; empty if there is no such list.
pub fn list<'a>(object: &'a Value, field: &str) -> &'a [Value] {
    object
        .get(field)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// The parts of a pod that injection reads. Their JSON types are checked.
pub struct PodView<'a> {
    /// `metadata.annotations`
    pub annotations: Option<&'a Map<String, Value>>,
    /// `spec.initContainers`
    pub init_containers: &'a [Value],
    /// `spec.containers`
    pub containers: &'a [Value],
    /// `spec.volumes`
    pub volumes: &'a [Value],
}

impl<'a> PodView<'a> {
    /// Checks the types of all parts. Returns one message per wrong type.
    pub fn new(pod: &'a Value) -> Result<Self, Vec<String>> {
        let mut problems = Vec::new();
        for part in ["metadata", "spec"] {
            if !pod.get(part).is_some_and(Value::is_object) {
                problems.push(format!("the pod has no {part}"));
            }
        }
        let mut list = |path: &str| match pod.pointer(path) {
            None | Some(Value::Null) => &[],
            Some(Value::Array(items)) if items.iter().all(Value::is_object) => items.as_slice(),
            Some(_) => {
                problems.push(format!("{path} of the pod is not a list of objects"));
                &[][..]
            }
        };
        let init_containers = list("/spec/initContainers");
        let containers = list("/spec/containers");
        let volumes = list("/spec/volumes");
        let annotations = match pod.pointer("/metadata/annotations") {
            None | Some(Value::Null) => None,
            Some(Value::Object(map)) => Some(map),
            Some(_) => {
                problems.push("/metadata/annotations of the pod is not a map".into());
                None
            }
        };
        if !problems.is_empty() {
            return Err(problems);
        }
        Ok(Self {
            annotations,
            init_containers,
            containers,
            volumes,
        })
    }
}
