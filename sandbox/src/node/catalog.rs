//! The catalog directory that the controller reads. Each object is one file, replaced atomically
//! when it changes.

use std::{collections::BTreeMap, fs, io, path::PathBuf};

use serde_json::Value;

use super::{services::text, volumes::replace_file};

/// The catalog directory.
#[derive(Debug)]
pub(super) struct Catalog {
    directory: PathBuf,
    /// By file name.
    written: BTreeMap<String, String>,
}

impl Catalog {
    /// A catalog in an existing empty directory.
    pub(super) fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            written: BTreeMap::new(),
        }
    }

    /// Writes the files of changed objects and deletes the files of removed ones.
    pub(super) fn write<'a>(&mut self, objects: impl Iterator<Item = &'a Value>) -> io::Result<()> {
        let contents: BTreeMap<String, String> = objects
            .map(|object| {
                let metadata = &object["metadata"];
                let [kind, namespace, name] =
                    [&object["kind"], &metadata["namespace"], &metadata["name"]].map(text);
                let file = format!("{}.{namespace}.{name}.yaml", kind.to_lowercase());
                // JSON is YAML.
                (file, object.to_string())
            })
            .collect();
        for (file, text) in &contents {
            if self.written.get(file) != Some(text) {
                // The temporary file has the extension .new, and the controller reads *.yaml only.
                replace_file(&self.directory.join(file), text)?;
            }
        }
        for file in self
            .written
            .keys()
            .filter(|file| !contents.contains_key(*file))
        {
            fs::remove_file(self.directory.join(file))?;
        }
        self.written = contents;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn creates_and_deletes_files() {
        let directory = std::env::temp_dir().join(format!("mesh-catalog-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let mut catalog = Catalog::new(directory.clone());
        let [one, two] = ["one", "two"]
            .map(|name| json!({"kind": "Service", "metadata": {"name": name, "namespace": "a"}}));
        catalog.write([&one, &two].into_iter()).unwrap();
        let text = fs::read_to_string(directory.join("service.a.one.yaml")).unwrap();
        assert_eq!(text, one.to_string());
        catalog.write([&two].into_iter()).unwrap();
        let left: Vec<_> = fs::read_dir(&directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(left, ["service.a.two.yaml"]);
        fs::remove_dir_all(directory).unwrap();
    }
}
