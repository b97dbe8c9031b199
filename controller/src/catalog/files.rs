//! The catalog of a folder: Services, EndpointSlices, Pods, Nodes, routes, grants and policies in
//! *.yaml, *.yml and *.json files.
//!
//! Polls the folder; an unchanged file costs one `stat`. Logs an invalid file once and keeps its
//! previous content. Never writes, and ignores subfolders.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::mpsc;

use super::freshness::Freshness;
use super::{Change, Event, manifest};
use crate::file::Stamp;
use crate::kinds::Object;
use crate::object::{Key, Kind};

const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Sends the objects of the folder, then changes, until the receiver is dropped.
pub async fn run(
    folder: PathBuf,
    trust_domain: &str,
    freshness: &Freshness,
    changes: mpsc::Sender<Event>,
) {
    let mut files = Files::new(folder, trust_domain);
    let mut interval = tokio::time::interval(POLL_INTERVAL);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = interval.tick() => {}
            () = changes.closed() => return,
        }
        for change in files.scan() {
            if changes.send(change.into()).await.is_err() {
                return;
            }
        }
        if files.is_current {
            Kind::ALL
                .into_iter()
                .for_each(|kind| freshness.confirm(kind, 0));
        }
    }
}

/// The folder at the last scan.
struct Files {
    folder: PathBuf,
    trust_domain: String,
    files: BTreeMap<PathBuf, File>,
    /// The objects with their files. `None` before the first successful scan.
    objects: Option<Objects>,
    /// The errors of the last scan, which logs new ones only.
    errors: BTreeSet<String>,
    /// The last scan could read the folder.
    is_current: bool,
}

type Objects = BTreeMap<(Kind, Key), (PathBuf, Object)>;

struct File {
    stamp: Stamp,
    /// The objects of the last valid content.
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
            is_current: false,
        }
    }

    /// The changes since the last scan, or an empty list if the folder cannot be read.
    fn scan(&mut self) -> Vec<Change> {
        let mut errors = BTreeSet::new();
        let listed = list(&self.folder);
        self.is_current = listed.is_ok();
        let changes = match listed {
            Ok(paths) => self.read_all(paths, &mut errors),
            Err(error) => {
                let folder = self.folder.display();
                errors.insert(format!("cannot read the folder {folder}: {error}"));
                vec![]
            }
        };
        for new in errors.difference(&self.errors) {
            tracing::error!("{new}; the previous content stays in use");
        }
        self.errors = errors;
        changes
    }

    fn read_all(&mut self, paths: BTreeSet<PathBuf>, errors: &mut BTreeSet<String>) -> Vec<Change> {
        let before = self.files.len();
        self.files.retain(|path, _| paths.contains(path));
        let mut changed = self.files.len() < before || self.objects.is_none();
        for path in paths {
            match self.read(&path) {
                Ok(file_changed) => changed |= file_changed,
                Err(error) => {
                    errors.insert(format!("{}: {error}", path.display()));
                }
            }
        }
        if changed { self.update() } else { vec![] }
    }

    /// Reads a file that may have changed. Returns whether its objects have changed.
    fn read(&mut self, path: &Path) -> Result<bool, String> {
        let known = self.files.get(path);
        let read = Stamp::of(path).and_then(|stamp| match known {
            Some(file) if file.stamp.settled() && !stamp.differs(&file.stamp) => Ok(None),
            _ => Ok(Some((stamp, std::fs::read(path)?))),
        });
        let (stamp, bytes) = match read {
            Ok(Some(read)) => read,
            Ok(None) => return Ok(false),
            // Deleted since the folder was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(format!("cannot read the file: {error}")),
        };
        let objects = self.parse(bytes);
        let file = self.files.entry(path.to_owned()).or_insert(File {
            stamp: stamp.clone(),
            objects: Vec::new(),
        });
        file.stamp = stamp;
        let objects = objects?;
        let changed = file.objects != objects;
        file.objects = objects;
        Ok(changed)
    }

    /// The objects of a file. Unknown fields are errors, as in strict field validation.
    fn parse(&self, bytes: Vec<u8>) -> Result<Vec<Object>, String> {
        let text = String::from_utf8(bytes);
        let text = text.map_err(|error| format!("it is not UTF-8 text: {error}"))?;
        let parsed = manifest::parse(&text, &self.trust_domain).map_err(|e| e.to_string())?;
        if parsed.unknown_fields.is_empty() {
            Ok(parsed.objects)
        } else {
            Err(parsed.unknown_fields.join("; "))
        }
    }

    /// Merges the objects of all files, and returns the changes.
    fn update(&mut self) -> Vec<Change> {
        let mut objects = Objects::new();
        for (path, file) in &self.files {
            for object in &file.objects {
                let (kind, key) = (object.kind(), object.key().clone());
                let entry = (path.clone(), object.clone());
                if let Some((other, _)) = objects.insert((kind, key.clone()), entry) {
                    let (other, path) = (other.display(), path.display());
                    tracing::warn!("{kind} {key} is in {other} and in {path}, using the latter");
                }
            }
        }
        let changes = match &self.objects {
            None => Kind::ALL.map(|kind| reset(&objects, kind)).into(),
            Some(before) => difference(before, &objects),
        };
        let (files, count) = (self.files.len(), objects.len());
        tracing::debug!(folder = %self.folder.display(), files, objects = count, "catalog updated");
        self.objects = Some(objects);
        changes
    }
}

fn reset(objects: &Objects, kind: Kind) -> Change {
    let objects = objects.values().map(|(_, object)| object);
    let of_kind = objects.filter(|object| object.kind() == kind);
    Change::Reset(kind, of_kind.cloned().collect())
}

fn difference(before: &Objects, after: &Objects) -> Vec<Change> {
    let deleted = before.keys().filter(|key| !after.contains_key(*key));
    let deleted = deleted.map(|(kind, key)| Change::Delete(*kind, key.clone()));
    let old = |key| before.get(key).map(|(_, object)| object);
    let after = after.iter().map(|(key, (_, object))| (key, object));
    let changed = after.filter(|(key, object)| old(*key) != Some(*object));
    let changed = changed.map(|(_, object)| Change::Apply(object.clone()));
    deleted.chain(changed).collect()
}

/// The manifests of a folder. Writers use hidden files until they are complete.
fn list(folder: &Path) -> io::Result<BTreeSet<PathBuf>> {
    let mut paths = BTreeSet::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        let is_manifest = matches!(extension, Some("yaml" | "yml" | "json"));
        let name = path.file_name().unwrap_or_default();
        if is_manifest && !name.as_encoded_bytes().starts_with(b".") && path.is_file() {
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
            Change::NotInstalled(kind) | Change::Unreadable(kind) => {
                panic!("a folder has {kind}")
            }
            Change::Reset(kind, objects) => {
                format!("reset {kind} {}", objects.len())
            }
            other => panic!("files have no {other:?}"),
        };
        changes.iter().map(one).collect()
    }

    #[test]
    fn first_scan_resets_each_kind_and_later_scans_return_changes() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "a.yaml", &service("a", "10.0.0.1"));
        write(dir.path(), "notes.txt", "no manifest");
        let mut files = Files::new(dir.path().to_owned(), "cluster.local");
        assert_eq!(
            say(files.scan()),
            [
                "reset Service 1",
                "reset EndpointSlice 0",
                "reset Pod 0",
                "reset Node 0",
                "reset HTTPRoute 0",
                "reset GRPCRoute 0",
                "reset TCPRoute 0",
                "reset ReferenceGrant 0",
                "reset XBackend 0",
                "reset TrafficPolicy 0",
                "reset TrafficSplit 0",
                "reset HTTPRouteGroup 0",
                "reset AuthorizationPolicy 0",
                "reset TrafficTarget 0",
                "reset TCPRoute.specs.smi-spec.io 0",
                "reset XMesh 0",
            ]
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
    fn notices_change_in_place_with_the_same_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.yaml");
        std::fs::write(&path, service("a", "10.0.0.1")).unwrap();
        let mut files = Files::new(dir.path().to_owned(), "cluster.local");
        files.scan();
        std::fs::write(&path, service("a", "10.0.0.2")).unwrap();
        assert_eq!(say(files.scan()), ["apply default/a"]);
    }

    #[test]
    fn invalid_file_keeps_its_last_valid_content() {
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
    fn last_file_with_an_object_takes_precedence() {
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
            "the object of the other file"
        );
    }

    #[test]
    fn missing_folder_keeps_all_objects() {
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

    #[test]
    fn file_with_an_unknown_field_keeps_its_last_valid_content() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "a.yaml", &service("a", "10.0.0.1"));
        let mut files = Files::new(dir.path().to_owned(), "cluster.local");
        files.scan();
        let route = "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\n\
                     metadata: {name: web}\nspec: {rules: [{backendRef: [{name: a, port: 80}]}]}\n";
        write(dir.path(), "b.yaml", route);
        write(dir.path(), "c.yaml", &service("c", "10.0.0.3"));
        assert_eq!(say(files.scan()), ["apply default/c"]);
        let path = dir.path().join("b.yaml").display().to_string();
        let field = "HTTPRoute default/web: unknown field \"spec.rules[0].backendRef\"";
        let expected = BTreeSet::from([format!("{path}: {field}")]);
        assert_eq!(files.errors, expected);
        write(
            dir.path(),
            "b.yaml",
            &route.replace("backendRef", "backendRefs"),
        );
        assert_eq!(say(files.scan()), ["apply default/web"]);
    }
}
