//! Manifests: converts kustomizations and YAML streams to Kubernetes objects as JSON values.
//! Supports only the kustomize fields that the project's manifests use, and rejects all others.

use std::{
    collections::BTreeMap,
    fs,
    path::{Component, Path, PathBuf},
};

use serde::Deserialize;
use serde_json::{Value, json};

/// The manifests embedded in this binary, by path relative to `manifests/`.
pub fn embedded() -> Files {
    let list: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/manifests.rs"));
    let files = list.iter();
    let files = files.map(|&(path, text)| (PathBuf::from(path), text.to_owned()));
    Files(files.collect())
}

/// YAML files by relative path.
#[derive(Clone, Debug, Default)]
pub struct Files(BTreeMap<PathBuf, String>);

/// Invalid manifests.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory cannot be read.
    #[error("failed to read {path}: {error}")]
    Read {
        /// Its path.
        path: String,
        /// The cause.
        error: std::io::Error,
    },
    /// There are no objects.
    #[error("no Kubernetes objects found in the YAML files")]
    Empty,
    /// A file is not valid YAML, a document is not a Kubernetes object, or a resource of a
    /// kustomization does not exist.
    #[error("{path}: {message}")]
    Invalid {
        /// The path of the file.
        path: String,
        /// The cause, with line and column if known.
        message: String,
    },
}

impl Files {
    /// Reads all YAML files in `directory` and its subdirectories.
    pub fn read(directory: &Path) -> Result<Self, Error> {
        let mut files = BTreeMap::new();
        let mut directories = vec![directory.to_owned()];
        while let Some(next) = directories.pop() {
            for entry in fs::read_dir(&next).map_err(|error| read_error(&next, error))? {
                let path = entry.map_err(|error| read_error(&next, error))?.path();
                let extension = path.extension().unwrap_or_default();
                if path.is_dir() {
                    directories.push(path);
                } else if extension == "yaml" || extension == "yml" {
                    let text = fs::read_to_string(&path);
                    let text = text.map_err(|error| read_error(&path, error))?;
                    let relative = path.strip_prefix(directory);
                    let relative = relative.expect("the path is below the directory");
                    files.insert(relative.to_owned(), text);
                }
            }
        }
        Ok(Self(files))
    }

    /// The objects of all kustomizations, outer directories first, or of all files if there is no
    /// kustomization. Each kustomization is included once, and components are not: they change
    /// other kustomizations on request.
    pub fn objects(&self) -> Result<Vec<Value>, Error> {
        let kustomizations = self
            .0
            .iter()
            .filter(|(path, text)| path.ends_with(KUSTOMIZATION) && !is_component(text));
        let mut directories: Vec<&Path> = kustomizations
            .filter_map(|(path, _)| path.parent())
            .collect();
        directories.sort_by_key(|directory| directory.components().count());
        let (mut seen, mut objects) = (Vec::new(), Vec::new());
        for directory in &directories {
            objects.extend(self.kustomize(directory, &mut seen)?);
        }
        if directories.is_empty() {
            for path in self.0.keys() {
                objects.extend(self.file(path)?);
            }
        }
        if objects.is_empty() {
            Err(Error::Empty)
        } else {
            Ok(objects)
        }
    }

    /// The objects of the kustomization of a directory.
    pub fn kustomization(&self, directory: &str) -> Result<Vec<Value>, Error> {
        self.kustomize(Path::new(directory), &mut Vec::new())
    }

    fn kustomize(&self, directory: &Path, seen: &mut Vec<PathBuf>) -> Result<Vec<Value>, Error> {
        let path = directory.join(KUSTOMIZATION);
        if seen.contains(&path) {
            return Ok(Vec::new());
        }
        seen.push(path.clone());
        let text = self.0.get(&path).ok_or(Error::Empty)?;
        let kustomization: Kustomization =
            serde_yaml_ng::from_str(text).map_err(|error| invalid(&path, error))?;
        let mut objects = Vec::new();
        for resource in &kustomization.resources {
            let target = normalize(&directory.join(resource));
            if self.0.contains_key(&target) {
                objects.extend(self.file(&target)?);
            } else if self.0.contains_key(&target.join(KUSTOMIZATION)) {
                objects.extend(self.kustomize(&target, seen)?);
            } else {
                let message = format!("resource {} not found", target.display());
                return Err(invalid(&path, message));
            }
        }
        for object in &mut objects {
            for labels in &kustomization.labels {
                labels.add_to(object);
            }
        }
        Ok(objects)
    }

    fn file(&self, path: &Path) -> Result<Vec<Value>, Error> {
        parse_named(&self.0[path], path)
    }
}

/// Parses the objects of a YAML stream.
pub fn parse(text: &str) -> Result<Vec<Value>, Error> {
    parse_named(text, Path::new("YAML"))
}

/// Adds the objects of a YAML stream to `objects`. One that exists already is changed, as `kubectl
/// patch` does: fields are merged, lists of named items by name, `null` removes a field, and every
/// other value replaces the former one.
pub fn set(objects: &mut Vec<Value>, text: &str, path: &Path) -> Result<(), Error> {
    let changes = parse_named(text, path)?;
    if changes.is_empty() {
        return Err(Error::Empty);
    }
    for change in changes {
        let key = |object: &Value| {
            let metadata = &object["metadata"];
            [&object["kind"], &metadata["namespace"], &metadata["name"]].map(Value::clone)
        };
        match objects
            .iter_mut()
            .find(|object| key(object) == key(&change))
        {
            Some(object) => merge(object, change),
            None => objects.push(change),
        }
    }
    Ok(())
}

fn merge(target: &mut Value, change: Value) {
    match (target, change) {
        (Value::Object(fields), Value::Object(changes)) => {
            for (name, change) in changes {
                if change.is_null() {
                    fields.remove(&name);
                } else {
                    merge(fields.entry(name).or_insert(Value::Null), change);
                }
            }
        }
        (Value::Array(items), Value::Array(changes)) if are_named(items) && are_named(&changes) => {
            for change in changes {
                match items.iter_mut().find(|item| item["name"] == change["name"]) {
                    Some(item) => merge(item, change),
                    None => items.push(change),
                }
            }
        }
        (target, change) => *target = change,
    }
}

fn are_named(items: &[Value]) -> bool {
    items.iter().all(|item| item["name"].is_string())
}

fn parse_named(text: &str, path: &Path) -> Result<Vec<Value>, Error> {
    let mut objects = Vec::new();
    for document in serde_yaml_ng::Deserializer::from_str(text) {
        let mut value = Value::deserialize(document).map_err(|error| invalid(path, error))?;
        match value["kind"].as_str() {
            _ if value.is_null() => {}
            Some("List") => match value["items"].take() {
                Value::Array(items) => objects.extend(items),
                _ => return Err(invalid(path, "the List has no items")),
            },
            Some(_) if value["apiVersion"].is_string() => objects.push(value),
            _ => return Err(invalid(path, "document has no apiVersion and kind")),
        }
    }
    Ok(objects)
}

const KUSTOMIZATION: &str = "kustomization.yaml";

/// Invalid YAML is reported later.
fn is_component(kustomization: &str) -> bool {
    let value: Result<Value, _> = serde_yaml_ng::from_str(kustomization);
    value.is_ok_and(|value| value["kind"] == "Component")
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Kustomization {
    #[serde(rename = "apiVersion")]
    _api_version: Option<String>,
    #[serde(rename = "kind")]
    _kind: Option<String>,
    #[serde(default)]
    resources: Vec<String>,
    #[serde(default)]
    labels: Vec<Labels>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Labels {
    pairs: BTreeMap<String, String>,
    #[serde(default)]
    include_templates: bool,
}

impl Labels {
    fn add_to(&self, object: &mut Value) {
        let patch = json!({"metadata": {"labels": self.pairs}});
        json_patch::merge(object, &patch);
        let template = object.pointer_mut("/spec/template");
        if let Some(template) = template.filter(|_| self.include_templates) {
            json_patch::merge(template, &patch);
        }
    }
}

/// Removes `.` and `..` from a path without access to the file system.
pub(super) fn normalize(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(out.pop()),
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

fn read_error(path: &Path, error: std::io::Error) -> Error {
    let path = path.display().to_string();
    Error::Read { path, error }
}

fn invalid(path: &Path, message: impl ToString) -> Error {
    Error::Invalid {
        path: path.display().to_string(),
        message: message.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(list: &[(&str, &str)]) -> Files {
        Files(
            list.iter()
                .map(|(path, text)| (PathBuf::from(path), (*text).to_owned()))
                .collect(),
        )
    }

    fn names(objects: &[Value]) -> Vec<&str> {
        objects
            .iter()
            .map(|object| object["metadata"]["name"].as_str().unwrap())
            .collect()
    }

    #[test]
    fn set_adds_objects_and_changes_existing_ones() {
        let deployment = r#"{apiVersion: apps/v1, kind: Deployment, metadata: {name: web, namespace: shop}, spec: {replicas: 1,
        ports: [1, 2], env: [{name: A, value: "1"}, {name: B, value: "2"}]}}"#;
        let mut objects = parse(deployment).unwrap();
        let path = Path::new("change.yaml");
        let change = r#"{apiVersion: apps/v1, kind: Deployment, metadata: {name: web, namespace: shop}, spec: {replicas: null,
        ports: [3], env: [{name: B, value: "3"}, {name: C, value: "4"}]}}"#;
        let other = "{apiVersion: v1, kind: Service, metadata: {name: web, namespace: shop}}";
        set(&mut objects, &format!("{change}\n---\n{other}"), path).unwrap();
        assert_eq!(objects.len(), 2, "{objects:?}");
        let expected = json!({"ports": [3], "env": [
        {"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}]});
        assert_eq!(objects[0]["spec"], expected);
        assert_eq!(objects[1]["kind"], "Service");
        let error = set(&mut objects, "# nothing", path).unwrap_err();
        assert!(matches!(error, Error::Empty), "{error}");
        let error = set(&mut objects, "spec: {}", path).unwrap_err().to_string();
        assert_eq!(error, "change.yaml: document has no apiVersion and kind");
    }

    #[test]
    fn embedded_manifests_contain_the_walkthrough() {
        let objects = embedded().objects().unwrap();
        let deployments: Vec<Value> = objects
            .into_iter()
            .filter(|object| object["kind"] == "Deployment")
            .collect();
        let names = names(&deployments);
        for name in [
            "controller",
            "injector",
            "http-client",
            "http-server-v1",
            "http-server-v2",
            "grpc-client",
            "grpc-server",
        ] {
            assert!(names.contains(&name), "{name} is missing among {names:?}");
        }
    }

    #[test]
    fn kustomization_includes_resources_and_adds_labels() {
        let files = files(&[
            (
                "kustomization.yaml",
                "resources: [a.yaml, inner/]\nlabels: [{pairs: {x: y}, includeTemplates: true}]",
            ),
            (
                "a.yaml",
                "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {template: {}}",
            ),
            ("inner/kustomization.yaml", "resources: [../b.yaml]"),
            (
                "optional/kustomization.yaml",
                "{kind: Component, patches: []}",
            ),
            (
                "b.yaml",
                "apiVersion: v1\nkind: Pod\nmetadata: {name: b}\n---\n",
            ),
            (
                "unnamed.yaml",
                "apiVersion: v1\nkind: Pod\nmetadata: {name: c}",
            ),
        ]);
        let objects = files.objects().unwrap();
        assert_eq!(names(&objects), ["a", "b"]);
        assert_eq!(objects[1]["metadata"]["labels"]["x"], "y");
        assert_eq!(
            objects[0]["spec"]["template"]["metadata"]["labels"]["x"],
            "y"
        );
    }

    #[test]
    fn rejects_unsupported_kustomize_fields() {
        let error = files(&[("kustomization.yaml", "namePrefix: x-")])
            .objects()
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("namePrefix") && error.contains("kustomization.yaml"),
            "{error}"
        );
    }

    #[test]
    fn errors_name_the_file_and_position() {
        let error = files(&[("kustomization.yaml", "resources: [x.yaml]")])
            .objects()
            .unwrap_err()
            .to_string();
        assert_eq!(error, "kustomization.yaml: resource x.yaml not found");
        for empty in [&[][..], &[("empty.yaml", "---\n")]] {
            let error = files(empty).objects().unwrap_err().to_string();
            assert_eq!(error, "no Kubernetes objects found in the YAML files");
        }
        let error = parse("a: b: c").unwrap_err().to_string();
        assert!(error.contains("line 1"), "{error}");
        assert!(
            parse("just: text")
                .unwrap_err()
                .to_string()
                .contains("apiVersion")
        );
    }

    #[test]
    fn expands_lists() {
        let objects = parse(
            "apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Pod, metadata: {name: a}}]",
        )
        .unwrap();
        assert_eq!(names(&objects), ["a"]);
    }
}
