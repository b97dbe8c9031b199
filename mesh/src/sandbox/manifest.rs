//! Manifests in: kustomize folders (of the binary or of the disk) and YAML text to Kubernetes objects as JSON values. Pure
//! but for reading a folder. It knows the little of kustomize that our manifests use and refuses the rest by name.

use std::{
    collections::BTreeMap,
    fs,
    path::{Component, Path, PathBuf},
};

use serde::Deserialize;
use serde_json::{Map, Value};

/// The manifests that this binary was built with, by path below `manifests/`.
pub fn embedded() -> Files {
    let list: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/manifests.rs"));
    Files(
        list.iter()
            .map(|(path, text)| (PathBuf::from(path), (*text).to_owned()))
            .collect(),
    )
}

/// YAML files by relative path.
#[derive(Clone, Debug, Default)]
pub struct Files(BTreeMap<PathBuf, String>);

/// Manifests that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder of the disk.
    #[error("cannot read {path}: {error}")]
    Read {
        /// Which one.
        path: String,
        /// Why not.
        error: std::io::Error,
    },
    /// Nothing to run.
    #[error("there are no Kubernetes objects in its YAML files")]
    Empty,
    /// A file that a kustomization names.
    #[error("{by} names {path}, which is not there")]
    Missing {
        /// The naming file.
        by: String,
        /// The named one.
        path: String,
    },
    /// YAML that does not parse.
    #[error("{path}: {message}")]
    Yaml {
        /// Where.
        path: String,
        /// The parser's words, with line and column.
        message: String,
    },
    /// Valid YAML that is no manifest.
    #[error("{path}: {message}")]
    Invalid {
        /// Where.
        path: String,
        /// What is wrong.
        message: String,
    },
}

impl Files {
    /// Reads all YAML files below `folder`.
    pub fn read(folder: &Path) -> Result<Self, Error> {
        let mut files = BTreeMap::new();
        let mut folders = vec![folder.to_owned()];
        while let Some(next) = folders.pop() {
            let failed = |error| Error::Read {
                path: next.display().to_string(),
                error,
            };
            for entry in fs::read_dir(&next).map_err(failed)? {
                let path = entry.map_err(failed)?.path();
                if path.is_dir() {
                    folders.push(path);
                } else if path
                    .extension()
                    .is_some_and(|extension| extension == "yaml" || extension == "yml")
                {
                    let text = fs::read_to_string(&path).map_err(|error| Error::Read {
                        path: path.display().to_string(),
                        error,
                    })?;
                    files.insert(
                        path.strip_prefix(folder)
                            .expect("it was found below it")
                            .to_owned(),
                        text,
                    );
                }
            }
        }
        Ok(Self(files))
    }

    /// The objects of every kustomization, the outer folders first; without any, those of all files. A file or folder that
    /// several kustomizations name counts once.
    pub fn objects(&self) -> Result<Vec<Value>, Error> {
        let kustomizations: Vec<&PathBuf> = self
            .0
            .keys()
            .filter(|path| path.file_name().is_some_and(|name| name == KUSTOMIZATION))
            .collect();
        let mut seen = Vec::new();
        let mut objects = Vec::new();
        if kustomizations.is_empty() {
            for path in self.0.keys() {
                objects.extend(self.file(path)?);
            }
        }
        let depth = |path: &Path| path.components().count();
        let mut folders: Vec<PathBuf> = kustomizations
            .iter()
            .map(|path| path.parent().unwrap_or(Path::new("")).to_owned())
            .collect();
        folders.sort_by_key(|folder| (depth(folder), folder.clone()));
        for folder in folders {
            objects.extend(self.kustomize(&folder, &mut seen)?);
        }
        if objects.is_empty() {
            Err(Error::Empty)
        } else {
            Ok(objects)
        }
    }

    fn kustomize(&self, folder: &Path, seen: &mut Vec<PathBuf>) -> Result<Vec<Value>, Error> {
        let path = folder.join(KUSTOMIZATION);
        if seen.contains(&path) {
            return Ok(Vec::new());
        }
        seen.push(path.clone());
        let text = self.0.get(&path).ok_or_else(|| Error::Missing {
            by: "the sandbox".into(),
            path: path.display().to_string(),
        })?;
        let kustomization: Kustomization =
            serde_yaml_ng::from_str(text).map_err(|error| yaml_error(&path, &error))?;
        let mut objects = Vec::new();
        for resource in &kustomization.resources {
            let target = normal(&folder.join(resource));
            if self.0.contains_key(&target) {
                objects.extend(self.file(&target)?);
            } else if self.0.contains_key(&target.join(KUSTOMIZATION)) {
                objects.extend(self.kustomize(&target, seen)?);
            } else {
                return Err(Error::Missing {
                    by: path.display().to_string(),
                    path: target.display().to_string(),
                });
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
        parse_named(&self.0[path], &path.display().to_string())
    }
}

/// The objects of a YAML text of any number of documents.
pub fn parse(text: &str) -> Result<Vec<Value>, Error> {
    parse_named(text, "YAML")
}

fn parse_named(text: &str, path: &str) -> Result<Vec<Value>, Error> {
    let mut objects = Vec::new();
    for document in serde_yaml_ng::Deserializer::from_str(text) {
        let value =
            Value::deserialize(document).map_err(|error| yaml_error(Path::new(path), &error))?;
        match value {
            Value::Null => {}
            Value::Object(ref object) if object.get("kind").is_some_and(|kind| kind == "List") => {
                objects.extend(
                    object
                        .get("items")
                        .and_then(Value::as_array)
                        .cloned()
                        .unwrap_or_default(),
                );
            }
            Value::Object(ref object)
                if object.contains_key("kind") && object.contains_key("apiVersion") =>
            {
                objects.push(value)
            }
            _ => {
                return Err(Error::Invalid {
                    path: path.into(),
                    message: "a document without apiVersion and kind".into(),
                });
            }
        }
    }
    Ok(objects)
}

const KUSTOMIZATION: &str = "kustomization.yaml";

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
        self.add_at(object);
        if let Some(template) = object
            .pointer_mut("/spec/template")
            .filter(|_| self.include_templates)
        {
            self.add_at(template);
        }
    }

    fn add_at(&self, object: &mut Value) {
        let Some(object) = object.as_object_mut() else {
            return;
        };
        let metadata = object
            .entry("metadata")
            .or_insert_with(|| Value::Object(Map::new()));
        let Some(metadata) = metadata.as_object_mut() else {
            return;
        };
        let labels = metadata
            .entry("labels")
            .or_insert_with(|| Value::Object(Map::new()));
        let Some(labels) = labels.as_object_mut() else {
            return;
        };
        labels.extend(
            self.pairs
                .iter()
                .map(|(key, value)| (key.clone(), Value::from(value.as_str()))),
        );
    }
}

/// The path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                out.pop();
            }
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

fn yaml_error(path: &Path, error: &serde_yaml_ng::Error) -> Error {
    Error::Yaml {
        path: path.display().to_string(),
        message: error.to_string(),
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
    fn the_embedded_manifests_hold_the_walkthrough() {
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
    fn a_kustomization_reads_files_and_folders_and_adds_labels() {
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
    fn what_kustomize_has_and_we_do_not_is_named() {
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
    fn a_missing_resource_and_bad_yaml_are_named_with_their_place() {
        let error = files(&[("kustomization.yaml", "resources: [x.yaml]")])
            .objects()
            .unwrap_err()
            .to_string();
        assert_eq!(error, "kustomization.yaml names x.yaml, which is not there");
        for nothing in [&[][..], &[("empty.yaml", "---\n")]] {
            let error = files(nothing).objects().unwrap_err().to_string();
            assert_eq!(error, "there are no Kubernetes objects in its YAML files");
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
    fn lists_are_opened() {
        let objects = parse(
            "apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Pod, metadata: {name: a}}]",
        )
        .unwrap();
        assert_eq!(names(&objects), ["a"]);
    }
}
