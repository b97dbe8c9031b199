//! The authority's state in a folder that the replicas share: a file a field, reports in a folder
//! below, `request` for requests.
//!
//! Several files change in one step: what is to be written is first left in one file, which whoever
//! comes next (after a crash too) carries out before it does anything else. All of it happens under
//! a lock that ends with its process.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aws_lc_rs::digest::{Context, SHA256};
use futures::Stream;
use tokio::time::{MissedTickBehavior, interval};

use super::{Store, StoreError, Stored, Written};
use crate::authority::material::{FIELDS, Fields};
use crate::issuer::hex;

/// How often the folder is looked at.
const INTERVAL: Duration = Duration::from_millis(400);
const LOCK: &str = ".lock";
const PENDING: &str = ".pending.json";
const REQUEST: &str = "request";
const REPORTS: &str = "reports";

/// The store of a folder.
#[derive(Clone)]
pub struct Files {
    folder: PathBuf,
}

impl Files {
    /// The store in this folder.
    pub fn new(folder: PathBuf) -> Files {
        Files { folder }
    }

    /// Does something while no other replica does, once what was left undone is done.
    async fn locked<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Files) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let files = self.clone();
        let done = tokio::task::spawn_blocking(move || {
            let path = files.folder.join(LOCK);
            let lock = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .open(&path);
            let lock = lock.and_then(|lock| lock.lock().map(|()| lock));
            let lock = lock.map_err(|error| StoreError::File(path, error))?;
            files.carry_out()?;
            let done = work(&files);
            drop(lock);
            done
        });
        done.await.unwrap_or_else(|error| {
            Err(StoreError::File(
                self.folder.clone(),
                io::Error::other(error),
            ))
        })
    }

    /// Carries out what a write has left to be done.
    fn carry_out(&self) -> Result<(), StoreError> {
        let pending = self.folder.join(PENDING);
        let Some(bytes) = read(&pending)? else {
            return Ok(());
        };
        let fields: BTreeMap<String, String> = serde_json::from_slice(&bytes)
            .map_err(|error| StoreError::File(pending.clone(), io::Error::other(error)))?;
        for name in FIELDS {
            match fields.get(name) {
                Some(text) => replace(&self.folder.join(name), text.as_bytes(), mode(name))?,
                None => remove(&self.folder.join(name))?,
            }
        }
        remove(&self.folder.join(REQUEST))?;
        remove(&pending)
    }

    fn stored(&self) -> Result<Option<Stored>, StoreError> {
        let mut fields = Fields::new();
        for name in FIELDS {
            if let Some(bytes) = read(&self.folder.join(name))? {
                fields.insert(name.to_owned(), bytes);
            }
        }
        let request = read(&self.folder.join(REQUEST))?
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let version = version(&fields, request.as_deref());
        Ok((!fields.is_empty()).then_some(Stored {
            fields,
            request,
            version,
        }))
    }
}

impl Store for Files {
    fn place(&self) -> String {
        format!("the folder {}", self.folder.display())
    }

    async fn read(&self) -> Result<Option<Stored>, StoreError> {
        self.locked(Files::stored).await
    }

    async fn write(&self, fields: &Fields, before: Option<&Stored>) -> Result<Written, StoreError> {
        let before = before.map(|before| before.version.clone());
        let texts = fields
            .iter()
            .map(|(name, value)| (name.clone(), String::from_utf8_lossy(value).into_owned()));
        let pending =
            serde_json::to_vec(&texts.collect::<BTreeMap<_, _>>()).expect("texts are JSON");
        self.locked(move |files| {
            if files.stored()?.map(|stored| stored.version) != before {
                return Ok(Written::Raced);
            }
            replace(&files.folder.join(PENDING), &pending, 0o600)?;
            files.carry_out()?;
            Ok(Written::Done)
        })
        .await
    }

    fn changes(&self) -> impl Stream<Item = ()> + Send {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        futures::stream::unfold(ticks, async |mut ticks| {
            ticks.tick().await;
            Some(((), ticks))
        })
    }

    async fn reports(&self) -> Result<BTreeMap<String, String>, StoreError> {
        let folder = self.folder.join(REPORTS);
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            Err(error) => return Err(StoreError::File(folder, error)),
        };
        let mut reports = BTreeMap::new();
        for entry in entries.flatten() {
            let path = entry.path();
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .and_then(|name| name.strip_suffix(".json"));
            let Some(name) = name.filter(|name| !name.starts_with('.')) else {
                continue;
            };
            if let Some(bytes) = read(&path)? {
                reports.insert(
                    name.to_owned(),
                    String::from_utf8_lossy(&bytes).into_owned(),
                );
            }
        }
        Ok(reports)
    }

    async fn report(&self, name: &str, report: Option<&str>) -> Result<(), StoreError> {
        let folder = self.folder.join(REPORTS);
        fs::create_dir_all(&folder).map_err(|error| StoreError::File(folder.clone(), error))?;
        let path = folder.join(format!("{name}.json"));
        match report {
            Some(report) => replace(&path, report.as_bytes(), 0o644),
            None => remove(&path),
        }
    }
}

/// Only the owner can read keys.
fn mode(name: &str) -> u32 {
    if name.ends_with(".key") { 0o600 } else { 0o644 }
}

fn version(fields: &Fields, request: Option<&str>) -> String {
    let mut context = Context::new(&SHA256);
    let request = request.map(|request| (REQUEST, request.as_bytes()));
    for (name, value) in fields
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_slice()))
        .chain(request)
    {
        for part in [name.as_bytes(), value] {
            context.update(&(part.len() as u64).to_be_bytes());
            context.update(part);
        }
    }
    hex(context.finish().as_ref())
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(StoreError::File(path.to_owned(), error)),
    }
}

/// Puts a whole new file in the place of an old one, at once, and on the disk.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> Result<(), StoreError> {
    let failed = |error| StoreError::File(path.to_owned(), error);
    let folder = path.parent().unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = folder.join(format!(".{name}.{}", std::process::id()));
    let written = || -> io::Result<()> {
        remove(&new).map_err(io::Error::other)?;
        let mut file = OpenOptions::new()
            .create_new(true)
            .write(true)
            .mode(mode)
            .open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, path)?;
        File::open(folder)?.sync_all()
    };
    written().map_err(failed)
}

fn remove(path: &Path) -> Result<(), StoreError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(StoreError::File(path.to_owned(), error))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(names: &[(&str, &str)]) -> Fields {
        names
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec()))
            .collect()
    }

    #[tokio::test]
    async fn of_many_who_create_at_the_same_moment_one_does_and_all_read_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let racing = (0..8).map(|number| {
            let files = Files::new(dir.path().to_owned());
            tokio::spawn(async move {
                let mine = number.to_string();
                let written = files
                    .write(&fields(&[("tls.crt", &mine), ("tls.key", &mine)]), None)
                    .await
                    .unwrap();
                (written, files.read().await.unwrap().unwrap().fields)
            })
        });
        let results: Vec<_> = futures::future::join_all(racing)
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect();
        assert_eq!(
            results
                .iter()
                .filter(|(written, _)| *written == Written::Done)
                .count(),
            1
        );
        for (_, read) in &results {
            assert_eq!(read, &results[0].1);
            assert_eq!(read["tls.crt"], read["tls.key"]);
        }
    }

    #[tokio::test]
    async fn a_write_replaces_all_fields_takes_the_request_and_leaves_keys_to_their_owner() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path().to_owned());
        assert!(files.read().await.unwrap().is_none());
        files
            .write(
                &fields(&[("tls.crt", "a"), ("tls.key", "b"), ("next.crt", "c")]),
                None,
            )
            .await
            .unwrap();
        fs::write(dir.path().join("request"), "start\n").unwrap();
        let stored = files.read().await.unwrap().unwrap();
        assert_eq!(stored.request.as_deref(), Some("start\n"));
        let written = files
            .write(
                &fields(&[("tls.crt", "d"), ("tls.key", "b")]),
                Some(&stored),
            )
            .await
            .unwrap();
        assert_eq!(written, Written::Done);
        let again = files.read().await.unwrap().unwrap();
        assert_eq!((again.fields.len(), again.request.as_deref()), (2, None));
        assert_eq!(
            fs::metadata(dir.path().join("tls.key"))
                .unwrap()
                .permissions()
                .mode()
                & 0o777,
            0o600
        );
        let late = files
            .write(&fields(&[("tls.crt", "e")]), Some(&stored))
            .await
            .unwrap();
        assert_eq!(late, Written::Raced, "what it was made from is out of date");
    }

    #[tokio::test]
    async fn what_a_crash_has_left_undone_is_done_by_whoever_comes_next() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path().to_owned());
        files
            .write(
                &fields(&[("tls.crt", "old"), ("tls.key", "old"), ("next.crt", "n")]),
                None,
            )
            .await
            .unwrap();
        // As a crash in the midst of a write leaves it.
        fs::write(
            dir.path().join(PENDING),
            r#"{"tls.crt": "new", "tls.key": "new"}"#,
        )
        .unwrap();
        fs::write(dir.path().join("tls.crt"), "new").unwrap();
        let stored = files.read().await.unwrap().unwrap();
        assert_eq!(
            stored.fields,
            fields(&[("tls.crt", "new"), ("tls.key", "new")])
        );
        assert!(!dir.path().join(PENDING).exists());
    }

    #[tokio::test]
    async fn reports_come_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path().to_owned());
        assert!(files.reports().await.unwrap().is_empty());
        files.report("one", Some("{}")).await.unwrap();
        files.report("two", Some("[]")).await.unwrap();
        files.report("one", None).await.unwrap();
        assert_eq!(
            files.reports().await.unwrap(),
            [("two".to_owned(), "[]".to_owned())].into()
        );
    }
}
