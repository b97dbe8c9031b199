//! The catalog of files: a folder whose *.yaml, *.yml and *.json hold Services, EndpointSlices and
//! Pods.
//!
//! Looked at several times a second; a file that is unchanged costs one `stat`. A file that cannot
//! be used is named once, and what it said before stays in force. It never writes, and never
//! follows into folders below.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aws_lc_rs::digest;
use tokio::sync::mpsc;

use super::manifest;
use crate::file::Stamp;
use crate::index::object::{Change, Key, Kind, Object};

/// How often the folder is looked at.
const INTERVAL: Duration = Duration::from_millis(200);

/// Sends the folder's objects, then what changes, until the receiver is gone.
pub async fn run(folder: PathBuf, trust_domain: &str, changes: mpsc::Sender<Change>) {
    let mut files = Files::new(folder, trust_domain);
    let mut interval = tokio::time::interval(INTERVAL);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = interval.tick() => {}
            () = changes.closed() => return,
        }
        for change in files.scan() {
            if changes.send(change).await.is_err() {
                return;
            }
        }
    }
}

/// The folder as it was at the last look.
struct Files {
    folder: PathBuf,
    trust_domain: String,
    files: BTreeMap<PathBuf, File>,
    /// All objects, and the file that each is from; none before the first look that succeeded.
    objects: Option<BTreeMap<(Kind, Key), (PathBuf, Object)>>,
    /// What was wrong at the last look: said once, not at every look.
    errors: BTreeSet<String>,
}

struct File {
    stamp: Stamp,
    digest: Vec<u8>,
    /// Of the last content that could be used.
    objects: Vec<Object>,
}

impl Files {
    fn new(folder: PathBuf, trust_domain: &str) -> Files {
        Files {
            folder,
            trust_domain: trust_domain.to_owned(),
            files: BTreeMap::new(),
            objects: None,
            errors: BTreeSet::new(),
        }
    }

    /// What has changed since the last look. Nothing where the folder cannot be read: what is known
    /// stays.
    fn scan(&mut self) -> Vec<Change> {
        let mut errors = BTreeSet::new();
        let changes = self.scan_with(&mut errors);
        for new in errors.difference(&self.errors) {
            tracing::error!("{new}. What was read before stays in force");
        }
        self.errors = errors;
        changes
    }

    fn scan_with(&mut self, errors: &mut BTreeSet<String>) -> Vec<Change> {
        let paths = match list(&self.folder) {
            Ok(paths) => paths,
            Err(error) => {
                errors.insert(format!(
                    "{}: the folder of the catalog cannot be read: {error}",
                    self.folder.display()
                ));
                return vec![];
            }
        };
        let before = self.files.len();
        self.files.retain(|path, _| paths.contains(path));
        let mut changed = self.files.len() < before || self.objects.is_none();
        for path in paths {
            changed |= self.read(path, errors);
        }
        if changed { self.publish() } else { vec![] }
    }

    /// Reads one file if it may have changed. Whether there is another content to take into
    /// account.
    fn read(&mut self, path: PathBuf, errors: &mut BTreeSet<String>) -> bool {
        let known = self.files.get(&path);
        let read = Stamp::of(&path).and_then(|stamp| match known {
            Some(file) if file.stamp.settled() && !stamp.differs(&file.stamp) => Ok(None),
            _ => Ok(Some((stamp, std::fs::read(&path)?))),
        });
        let (stamp, bytes) = match read {
            Ok(None) => return false,
            Ok(Some(read)) => read,
            // Gone since the folder was listed: the next look sees that it is.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return false,
            Err(error) => {
                errors.insert(format!("{}: cannot be read: {error}", path.display()));
                return false;
            }
        };
        let digest = digest::digest(&digest::SHA256, &bytes).as_ref().to_vec();
        let former = self.files.remove(&path);
        if let Some(file) = former.as_ref().filter(|file| file.digest == digest) {
            let objects = file.objects.clone();
            self.files.insert(
                path,
                File {
                    stamp,
                    digest,
                    objects,
                },
            );
            return false;
        }
        let parsed = String::from_utf8(bytes).map_err(|error| format!("not UTF-8: {error}"));
        let (objects, usable) = match parsed.and_then(|text| {
            manifest::parse(&text, &self.trust_domain).map_err(|error| error.to_string())
        }) {
            Ok(objects) => (objects, true),
            Err(reason) => {
                tracing::error!(
                    "{}: {reason}. What the file said before stays in force",
                    path.display()
                );
                (former.map(|file| file.objects).unwrap_or_default(), false)
            }
        };
        self.files.insert(
            path,
            File {
                stamp,
                digest,
                objects,
            },
        );
        usable
    }

    fn publish(&mut self) -> Vec<Change> {
        let mut objects: BTreeMap<(Kind, Key), (PathBuf, Object)> = BTreeMap::new();
        for (path, file) in &self.files {
            for object in &file.objects {
                let key = (object.kind(), object.key().clone());
                if let Some((other, _)) = objects.insert(key, (path.clone(), object.clone())) {
                    let (kind, key) = (object.kind(), object.key());
                    tracing::warn!(
                        "{kind} {key} stands in {} and in {}: the latter counts",
                        other.display(),
                        path.display()
                    );
                }
            }
        }
        let changes = match &self.objects {
            None => Kind::ALL
                .map(|kind| Change::Reset(kind, of_kind(&objects, kind)))
                .into(),
            Some(before) => difference(before, &objects),
        };
        tracing::debug!(folder = %self.folder.display(), files = self.files.len(), objects = objects.len(), "the catalog was read");
        self.objects = Some(objects);
        changes
    }
}

fn of_kind(objects: &BTreeMap<(Kind, Key), (PathBuf, Object)>, kind: Kind) -> Vec<Object> {
    objects
        .values()
        .filter(|(_, object)| object.kind() == kind)
        .map(|(_, object)| object.clone())
        .collect()
}

fn difference(
    before: &BTreeMap<(Kind, Key), (PathBuf, Object)>,
    after: &BTreeMap<(Kind, Key), (PathBuf, Object)>,
) -> Vec<Change> {
    let gone = before
        .keys()
        .filter(|key| !after.contains_key(*key))
        .map(|(kind, key)| Change::Delete(*kind, key.clone()));
    let changed = after
        .iter()
        .filter(|(key, (_, object))| before.get(*key).is_none_or(|(_, old)| old != object));
    gone.chain(changed.map(|(_, (_, object))| Change::Apply(object.clone())))
        .collect()
}

/// Files that begin with a dot are a writer's own: it renames them when they are complete.
fn list(folder: &Path) -> io::Result<BTreeSet<PathBuf>> {
    let mut paths = BTreeSet::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let manifest = matches!(
            path.extension().and_then(|extension| extension.to_str()),
            Some("yaml" | "yml" | "json")
        );
        let hidden = path
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if manifest && !hidden && path.is_file() {
            paths.insert(path);
        }
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(name: &str, ip: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: {ip}}}\n"
        )
    }

    fn write(folder: &Path, name: &str, text: &str) {
        let hidden = folder.join(format!(".{name}"));
        std::fs::write(&hidden, text).unwrap();
        std::fs::rename(hidden, folder.join(name)).unwrap();
    }

    fn say(changes: Vec<Change>) -> Vec<String> {
        let one = |change: &Change| match change {
            Change::Apply(object) => format!("apply {}", object.key()),
            Change::Delete(_, key) => format!("delete {key}"),
            Change::Reset(kind, objects) => format!("reset {kind} {}", objects.len()),
        };
        changes.iter().map(one).collect()
    }

    #[test]
    fn the_first_look_lists_each_kind_and_later_ones_say_what_changed() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "a.yaml", &service("a", "10.0.0.1"));
        write(dir.path(), "notes.txt", "no manifest");
        let mut files = Files::new(dir.path().to_owned(), "cluster.local");
        assert_eq!(
            say(files.scan()),
            ["reset Service 1", "reset EndpointSlice 0", "reset Pod 0"]
        );
        assert_eq!(say(files.scan()), [""; 0]);
        write(dir.path(), "b.yml", &service("b", "10.0.0.2"));
        assert_eq!(say(files.scan()), ["apply default/b"]);
        write(dir.path(), "a.yaml", &service("a", "10.0.0.3"));
        assert_eq!(say(files.scan()), ["apply default/a"]);
        std::fs::remove_file(dir.path().join("a.yaml")).unwrap();
        assert_eq!(say(files.scan()), ["delete default/a"]);
    }

    #[test]
    fn a_change_in_place_of_the_same_length_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.yaml");
        std::fs::write(&path, service("a", "10.0.0.1")).unwrap();
        let mut files = Files::new(dir.path().to_owned(), "cluster.local");
        files.scan();
        std::fs::write(&path, service("a", "10.0.0.2")).unwrap();
        assert_eq!(say(files.scan()), ["apply default/a"]);
    }

    #[test]
    fn a_broken_file_keeps_its_last_good_state_and_harms_no_other() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "a.yaml", &service("a", "10.0.0.1"));
        write(dir.path(), "b.yaml", "kind: [");
        let mut files = Files::new(dir.path().to_owned(), "cluster.local");
        assert_eq!(say(files.scan())[0], "reset Service 1");
        write(dir.path(), "a.yaml", "kind: [");
        assert_eq!(say(files.scan()), [""; 0]);
        write(dir.path(), "b.yaml", &service("b", "10.0.0.2"));
        assert_eq!(say(files.scan()), ["apply default/b"]);
        write(dir.path(), "a.yaml", &service("a", "10.0.0.9"));
        assert_eq!(say(files.scan()), ["apply default/a"]);
    }

    #[test]
    fn an_object_in_two_files_counts_as_the_last_one_has_it() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "1.yaml", &service("a", "10.0.0.1"));
        write(dir.path(), "2.yaml", &service("a", "10.0.0.2"));
        let mut files = Files::new(dir.path().to_owned(), "cluster.local");
        let Change::Reset(Kind::Service, services) = files.scan().remove(0) else {
            panic!("Services come first")
        };
        let Object::Service(service) = &services[0] else {
            panic!("a Service")
        };
        assert_eq!(
            service.cluster_ips,
            ["10.0.0.2".parse::<std::net::IpAddr>().unwrap()]
        );
        std::fs::remove_file(dir.path().join("2.yaml")).unwrap();
        assert_eq!(
            say(files.scan()),
            ["apply default/a"],
            "the other file's object is back in force"
        );
    }

    #[test]
    fn a_folder_that_vanishes_takes_nothing_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("catalog");
        std::fs::create_dir(&folder).unwrap();
        write(&folder, "a.yaml", &service("a", "10.0.0.1"));
        let mut files = Files::new(folder.clone(), "cluster.local");
        files.scan();
        std::fs::rename(&folder, dir.path().join("away")).unwrap();
        assert_eq!(say(files.scan()), [""; 0]);
        std::fs::rename(dir.path().join("away"), &folder).unwrap();
        assert_eq!(say(files.scan()), [""; 0]);
    }
}
