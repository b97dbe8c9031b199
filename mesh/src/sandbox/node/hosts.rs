//! The pods' hosts files, kept in step with the Services. It only writes files.

use std::{
    collections::BTreeMap,
    fs::{self, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Mutex,
};

/// All hosts files of the sandbox.
#[derive(Debug, Default)]
pub(super) struct Hosts(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// The lines about Services, by the namespace that looks.
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
    /// Writes a new file, with the pod's own lines first.
    pub(super) fn add(&self, path: PathBuf, namespace: &str, own: String) -> io::Result<()> {
        let mut inner = self.0.lock().expect("nobody panics while holding it");
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

    /// The file is no longer needed.
    pub(super) fn forget(&self, path: &Path) {
        self.0
            .lock()
            .expect("nobody panics while holding it")
            .files
            .remove(path);
    }

    /// Brings all files in step.
    pub(super) fn update(&self, services: BTreeMap<String, String>) -> io::Result<()> {
        let mut inner = self.0.lock().expect("nobody panics while holding it");
        inner.services = services;
        let Inner { services, files } = &mut *inner;
        for (path, file) in files {
            let text = text(&file.own, services.get(&file.namespace));
            if text != file.written {
                // In place: the pods have mounted this very file. One write, and the rest is cut off after it.
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
    fn a_changed_service_is_written_into_the_same_file() {
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
        hosts.forget(&path);
        fs::remove_file(path).unwrap();
    }
}
