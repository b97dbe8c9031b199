//! The catalog folder that the controller reads: a file an object, each replaced at once by renaming. It writes what has
//! changed and nothing else.

use std::{collections::BTreeMap, fs, io, path::PathBuf};

use k8s_openapi::Resource;
use serde::Serialize;

/// A folder of objects.
#[derive(Debug)]
pub(super) struct Catalog {
    folder: PathBuf,
    written: BTreeMap<String, String>,
}

/// What the folder shall hold, by file name.
#[derive(Debug, Default)]
pub(super) struct Contents(BTreeMap<String, String>);

impl Contents {
    /// Adds an object.
    pub(super) fn add<T: Resource + Serialize>(
        &mut self,
        namespace: Option<&String>,
        name: Option<&String>,
        object: &T,
    ) -> anyhow::Result<()> {
        let file = format!(
            "{}.{}.{}.yaml",
            T::KIND.to_lowercase(),
            namespace.map_or("", String::as_str),
            name.map_or("", String::as_str)
        );
        self.0.insert(file, serde_yaml_ng::to_string(object)?);
        Ok(())
    }
}

impl Catalog {
    /// A catalog in an existing, empty folder.
    pub(super) fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            written: BTreeMap::new(),
        }
    }

    /// Makes the folder hold `contents`.
    pub(super) fn write(&mut self, contents: Contents) -> io::Result<()> {
        for (file, text) in contents
            .0
            .iter()
            .filter(|(file, text)| self.written.get(*file) != Some(*text))
        {
            // Readers look at *.yaml only.
            let temporary = self.folder.join(format!("{file}.new"));
            fs::write(&temporary, text)?;
            fs::rename(temporary, self.folder.join(file))?;
        }
        for file in self
            .written
            .keys()
            .filter(|file| !contents.0.contains_key(*file))
        {
            fs::remove_file(self.folder.join(file))?;
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
                serde_yaml_ng::from_str(&format!("{{metadata: {{name: {name}}}}}")).unwrap();
            contents
                .add(Some(&"a".into()), service.metadata.name.as_ref(), &service)
                .unwrap();
        }
        contents
    }

    #[test]
    fn files_come_change_and_go() {
        let folder = std::env::temp_dir().join(format!("mesh-catalog-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let mut catalog = Catalog::new(folder.clone());
        catalog.write(contents(&["one", "two"])).unwrap();
        let text = fs::read_to_string(folder.join("service.a.one.yaml")).unwrap();
        assert!(
            text.contains("kind: Service") && text.contains("name: one"),
            "{text}"
        );
        catalog.write(contents(&["two"])).unwrap();
        let left: Vec<_> = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(left, ["service.a.two.yaml"]);
        fs::remove_dir_all(folder).unwrap();
    }
}
