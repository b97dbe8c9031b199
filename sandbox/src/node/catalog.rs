//! The catalog directory that the controller reads. Each object is one file, replaced atomically
//! when it changes.

use std::{collections::BTreeMap, fs, io, path::PathBuf};

use kube::{Resource, ResourceExt};
use serde::Serialize;

use super::volumes::replace_file;

/// The catalog directory.
#[derive(Debug)]
pub(super) struct Catalog {
    directory: PathBuf,
    written: BTreeMap<String, String>,
}

/// The desired files by name.
#[derive(Debug, Default)]
pub(super) struct Contents(BTreeMap<String, String>);

impl Contents {
    /// Adds an object.
    pub(super) fn add<T>(&mut self, object: &T) -> anyhow::Result<()>
    where
        T: Resource<DynamicType = ()> + Serialize,
    {
        let namespace = object.namespace().unwrap_or_default();
        self.add_as(&T::kind(&()), &namespace, &object.name_any(), object)
    }

    /// Adds an object of this kind.
    pub(super) fn add_as(
        &mut self,
        kind: &str,
        namespace: &str,
        name: &str,
        object: &impl Serialize,
    ) -> anyhow::Result<()> {
        let file = format!("{}.{namespace}.{name}.yaml", kind.to_lowercase());
        self.0.insert(file, serde_yaml_ng::to_string(object)?);
        Ok(())
    }
}

impl Catalog {
    /// A catalog in an existing empty directory.
    pub(super) fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            written: BTreeMap::new(),
        }
    }

    /// Writes changed files and deletes those that are not in `contents`.
    pub(super) fn write(&mut self, contents: Contents) -> io::Result<()> {
        for (file, text) in contents
            .0
            .iter()
            .filter(|(file, text)| self.written.get(*file) != Some(*text))
        {
            // The temporary file has the extension .new, and the controller reads *.yaml only.
            replace_file(&self.directory.join(file), text)?;
        }
        for file in self
            .written
            .keys()
            .filter(|file| !contents.0.contains_key(*file))
        {
            fs::remove_file(self.directory.join(file))?;
        }
        self.written = contents.0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;

    use super::*;

    fn contents(names: &[&str]) -> Contents {
        let mut contents = Contents::default();
        for name in names {
            let service: Service =
                serde_yaml_ng::from_str(&format!("{{metadata: {{name: {name}, namespace: a}}}}"))
                    .unwrap();
            contents.add(&service).unwrap();
        }
        contents
    }

    #[test]
    fn creates_and_deletes_files() {
        let directory = std::env::temp_dir().join(format!("mesh-catalog-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let mut catalog = Catalog::new(directory.clone());
        catalog.write(contents(&["one", "two"])).unwrap();
        let text = fs::read_to_string(directory.join("service.a.one.yaml")).unwrap();
        assert!(
            text.contains("kind: Service") && text.contains("name: one"),
            "{text}"
        );
        catalog.write(contents(&["two"])).unwrap();
        let left: Vec<_> = fs::read_dir(&directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(left, ["service.a.two.yaml"]);
        fs::remove_dir_all(directory).unwrap();
    }
}
