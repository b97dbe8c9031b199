//! The objects of an installation of the mesh: the objects of `manifests/`, with values at their
//! places. Pure.
//!
//! The same places are templates in the Helm chart, so that `mesh install`, kustomize and the chart
//! give the same objects. `docs/operations.md` describes the values.

pub mod live;
pub mod values;

use diy_mesh_sandbox::manifest;
use serde_json::Value;

pub use values::Values;

/// The JSON schema of the values.
pub const SCHEMA: &str = include_str!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../manifests/chart/values.schema.json"
));

/// A place of a value in the objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The path of the value, such as `controller.replicas`.
    pub value: &'static str,
    /// The index of the object.
    pub object: usize,
    /// The JSON pointer of the field.
    pub pointer: String,
    /// Whether the field is text, whatever the type of the value is.
    pub is_text: bool,
}

/// The values that are the complete text of fields, wherever it stands, and a variable of the injector
/// with their type.
const TEXTS: [(&str, &str, &str); 6] = [
    ("namespace", values::NAMESPACE, "POD_NAMESPACE"),
    ("image.pullPolicy", "IfNotPresent", "IMAGE_PULL_POLICY"),
    ("image.controller", "diy-sm-controller:dev", IMAGE),
    ("image.injector", "diy-sm-injector:dev", IMAGE),
    ("image.proxy", "diy-sm-proxy:dev", IMAGE),
    ("image.proxyInit", "diy-sm-proxy-init:dev", IMAGE),
];
const IMAGE: &str = "IMAGE_TO_DEPLOY_PROXY";

/// The values of a Deployment: in a field of its pods, or in a variable of its first container.
const FIELDS: [(&str, &str, &str); 27] = [
    ("controller.replicas", "controller", "/spec/replicas"),
    ("controller.resources", "controller", RESOURCES),
    (
        "controller.certificateLife",
        "controller",
        "CERTIFICATE_LIFE",
    ),
    ("controller.caLife", "controller", "CA_LIFE"),
    ("controller.log", "controller", "LOG"),
    ("controller.logFormat", "controller", "LOG_FORMAT"),
    ("controller.keyUrls", "controller", "KEY_URLS"),
    (
        "controller.privateKeyUrls",
        "controller",
        "PRIVATE_KEY_URLS",
    ),
    ("controller.keyRootsFile", "controller", "KEY_ROOTS_FILE"),
    ("trustDomain", "controller", "TRUST_DOMAIN"),
    ("trustDomain", "injector", "TRUST_DOMAIN"),
    ("injector.replicas", "injector", "/spec/replicas"),
    ("injector.resources", "injector", RESOURCES),
    ("injector.log", "injector", "LOG"),
    ("injector.logFormat", "injector", "LOG_FORMAT"),
    ("egress.privateNames", "injector", "EGRESS_PRIVATE_NAMES"),
    ("proxy.observeEdges", "injector", "PROXY_OBSERVE_EDGES"),
    ("proxy.dump", "injector", "PROXY_DUMP"),
    ("proxy.log", "injector", "PROXY_LOG"),
    ("proxy.logFormat", "injector", "PROXY_LOG_FORMAT"),
    ("proxy.drain", "injector", "PROXY_DRAIN"),
    ("proxy.cpuRequest", "injector", "PROXY_CPU_REQUEST"),
    ("proxy.cpuLimit", "injector", "PROXY_CPU_LIMIT"),
    ("proxy.memoryRequest", "injector", "PROXY_MEMORY_REQUEST"),
    ("proxy.memoryLimit", "injector", "PROXY_MEMORY_LIMIT"),
    ("guaranteed.cpu", "injector", "GUARANTEED_CPU"),
    ("guaranteed.memory", "injector", "GUARANTEED_MEMORY"),
];

const CONTAINER: &str = "/spec/template/spec/containers/0";
const RESOURCES: &str = "/spec/template/spec/containers/0/resources";

/// The objects with these values, in the order in which they are applied.
pub fn objects(values: &Values) -> Vec<Value> {
    let (mut objects, values) = (manifests(), values.resolved());
    for place in places(&objects) {
        let field = objects[place.object].pointer_mut(&place.pointer);
        let field = field.expect("places are from the same objects");
        let value = value_at(&values, place.value);
        *field = match value {
            Value::String(_) => value.clone(),
            value if place.is_text => value.to_string().into(),
            value => value.clone(),
        };
    }
    objects
}

/// The CustomResourceDefinitions, which are installed apart: deleting them deletes all policies.
pub fn definitions() -> Vec<Value> {
    embedded("crds")
}

/// The objects of `manifests/`, which have the default values.
pub fn manifests() -> Vec<Value> {
    embedded("")
}

fn embedded(folder: &str) -> Vec<Value> {
    let objects = manifest::embedded().kustomization(folder);
    objects.expect("tests parse the embedded manifests")
}

/// The places of all values.
pub fn places(objects: &[Value]) -> Vec<Place> {
    let mut places = Vec::new();
    for (object, content) in objects.iter().enumerate() {
        collect_texts(content, String::new(), &mut |value, pointer| {
            places.push(Place {
                value,
                object,
                pointer,
                is_text: true,
            });
        });
        let deployment =
            Some(&content["metadata"]["name"]).filter(|_| content["kind"] == "Deployment");
        for (value, name, field) in FIELDS {
            if deployment.is_some_and(|own| own == name)
                && let Some((pointer, is_text)) = pointer(content, field)
            {
                places.push(Place {
                    value,
                    object,
                    pointer,
                    is_text,
                });
            }
        }
    }
    places
}

fn collect_texts(field: &Value, pointer: String, found: &mut impl FnMut(&'static str, String)) {
    match field {
        Value::String(text) => {
            if let Some((value, ..)) = TEXTS.iter().find(|(_, default, _)| text == default) {
                found(value, pointer);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                collect_texts(item, format!("{pointer}/{index}"), found);
            }
        }
        Value::Object(fields) => {
            for (name, field) in fields {
                let name = name.replace('~', "~0").replace('/', "~1");
                collect_texts(field, format!("{pointer}/{name}"), found);
            }
        }
        _ => {}
    }
}

/// The JSON pointer of a field or variable of a Deployment, and whether it is text.
fn pointer(deployment: &Value, field: &str) -> Option<(String, bool)> {
    if field.starts_with('/') {
        return Some((field.to_owned(), false));
    }
    let variables = format!("{CONTAINER}/env");
    let mut names = deployment.pointer(&variables)?.as_array()?.iter();
    let index = names.position(|variable| variable["name"] == field)?;
    Some((format!("{variables}/{index}/value"), true))
}

/// The value at a path such as `controller.replicas`.
fn value_at<'a>(values: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(values, |value, name| &value[name])
}

#[cfg(test)]
mod tests;
