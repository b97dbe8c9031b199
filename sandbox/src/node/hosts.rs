//! The hosts files of the pods, which contain the names of the Services.

use std::{
    collections::BTreeMap,
    fs::{self, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Mutex,
};

use crate::lock;

/// The hosts files of all pods.
#[derive(Debug, Default)]
pub(super) struct Hosts(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// The lines of the Services, by the namespace of the pod.
    services: BTreeMap<String, String>,
    files: BTreeMap<PathBuf, File>,
}

#[derive(Debug)]
struct File {
    namespace: String,
    own: String,
    written: String,
}

impl Hosts {
    /// Creates a file. `own` are the lines of the pod itself.
    pub(super) fn add(&self, path: PathBuf, namespace: &str, own: String) -> io::Result<()> {
        let mut inner = lock(&self.0);
        let text = text(&own, inner.services.get(namespace));
        fs::write(&path, &text)?;
        inner.files.insert(
            path,
            File {
                namespace: namespace.into(),
                own,
                written: text,
            },
        );
        Ok(())
    }

    /// Stops updating a file.
    pub(super) fn remove(&self, path: &Path) {
        lock(&self.0).files.remove(path);
    }

    /// Updates the lines of the Services in all files.
    pub(super) fn update(&self, services: BTreeMap<String, String>) -> io::Result<()> {
        let mut inner = lock(&self.0);
        inner.services = services;
        let Inner { services, files } = &mut *inner;
        for (path, file) in files {
            let text = text(&file.own, services.get(&file.namespace));
            if text != file.written {
                // The pods have mounted this inode, so it is overwritten in place.
                let out = OpenOptions::new().write(true).open(path)?;
                out.write_all_at(text.as_bytes(), 0)?;
                out.set_len(text.len() as u64)?;
                file.written = text;
            }
        }
        Ok(())
    }
}

fn text(own: &str, services: Option<&String>) -> String {
    format!(
        "127.0.0.1 localhost\n::1 localhost\n{own}{}",
        services.map_or("", String::as_str)
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn updates_files_in_place() {
        let path = std::env::temp_dir().join(format!("mesh-hosts-{}", std::process::id()));
        let hosts = Hosts::default();
        let services = |text: &str| BTreeMap::from([("a".to_owned(), text.to_owned())]);
        hosts
            .update(services("10.96.0.10 shop-with-a-long-name\n"))
            .unwrap();
        hosts
            .add(path.clone(), "a", "10.244.0.7 me\n".into())
            .unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        hosts.update(services("10.96.0.11 x\n")).unwrap();
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            "127.0.0.1 localhost\n::1 localhost\n10.244.0.7 me\n10.96.0.11 x\n"
        );
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
        hosts.remove(&path);
        fs::remove_file(path).unwrap();
    }
}
