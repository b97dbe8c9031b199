//! The state of the authority in a folder: a file per field, the reports in `reports.json`, and
//! requests in `request`.
//!
//! A write changes several files in one step: it first leaves its content in one file, and the next
//! access, even after a crash, completes it. A lock of the operating system protects each access.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use futures::Stream;
use tokio::time::{MissedTickBehavior, interval};

use super::{Store, StoreError, Stored, Written};
use crate::authority::publish::KEY;
use crate::authority::state::{FIELDS, Fields, fields_digest};

const POLL_INTERVAL: Duration = Duration::from_millis(400);
const LOCK: &str = ".lock";
const PENDING: &str = ".pending.json";
const REQUEST: &str = "request";
const REPORTS: &str = "reports.json";

/// The store in a folder.
#[derive(Clone)]
pub struct Files {
    folder: PathBuf,
}

impl Files {
    /// The store in this folder.
    pub fn new(folder: PathBuf) -> Files {
        Files { folder }
    }

    /// Completes a pending write, then runs `work`, with the lock.
    async fn locked<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Files) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let files = self.clone();
        let work = tokio::task::spawn_blocking(move || {
            let path = files.path(LOCK);
            let mut options = OpenOptions::new();
            let options = options.create(true).truncate(false).write(true).mode(0o600);
            let lock = options.open(&path);
            let lock = lock.and_then(|lock| lock.lock().map(|()| lock));
            let _lock = lock.map_err(|error| StoreError::File(path, error))?;
            files.complete_write()?;
            work(&files)
        });
        let result = work.await.map_err(io::Error::other);
        result.map_err(|error| StoreError::File(self.folder.clone(), error))?
    }

    fn complete_write(&self) -> Result<(), StoreError> {
        let pending = self.path(PENDING);
        let Some(json) = read(&pending)? else {
            return Ok(());
        };
        let fields: BTreeMap<String, String> = serde_json::from_slice(&json)
            .map_err(|error| StoreError::File(pending.clone(), error.into()))?;
        for name in FIELDS {
            let path = self.path(name);
            match fields.get(name) {
                Some(text) => replace(&path, text.as_bytes(), mode(name))?,
                None => remove(&path)?,
            }
        }
        remove(&self.path(REQUEST))?;
        remove(&pending)
    }

    fn stored(&self) -> Result<Option<Stored>, StoreError> {
        let mut fields = Fields::new();
        for name in FIELDS {
            let value = read(&self.path(name))?;
            fields.extend(value.map(|value| (name.to_owned(), value)));
        }
        if fields.is_empty() {
            return Ok(None);
        }
        let request = read(&self.path(REQUEST))?;
        let mut all = fields.clone();
        all.extend(request.clone().map(|request| (REQUEST.to_owned(), request)));
        Ok(Some(Stored {
            fields,
            request: request.map(|request| String::from_utf8_lossy(&request).into_owned()),
            version: fields_digest(&all),
        }))
    }

    fn read_reports(&self) -> Result<BTreeMap<String, String>, StoreError> {
        // Reports repeat, so an invalid file is replaced.
        let json = read(&self.path(REPORTS))?.unwrap_or_default();
        Ok(serde_json::from_slice(&json).unwrap_or_default())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

impl Store for Files {
    fn place(&self) -> String {
        format!("the folder {}", self.folder.display())
    }

    async fn read(&self) -> Result<Option<Stored>, StoreError> {
        self.locked(Files::stored).await
    }

    async fn date(&self) -> Option<SystemTime> {
        None
    }

    async fn traces(&self) -> Result<Vec<String>, StoreError> {
        let work = |files: &Files| {
            let roots = read(&files.path(KEY))?.map(|_| format!("the file {KEY}"));
            let reports = files.read_reports()?.into_keys();
            let reports = reports.map(|name| format!("the report of replica {name}"));
            Ok(roots.into_iter().chain(reports).collect())
        };
        self.locked(work).await
    }

    async fn write(&self, fields: &Fields, before: Option<&Stored>) -> Result<Written, StoreError> {
        let before = before.map(|before| before.version.clone());
        let texts = fields.iter();
        let texts = texts.map(|(name, value)| (name, String::from_utf8_lossy(value)));
        let pending = texts.collect::<BTreeMap<_, _>>();
        let pending = serde_json::to_vec(&pending).expect("texts are valid JSON");
        self.locked(move |files| {
            if files.stored()?.map(|stored| stored.version) != before {
                return Ok(Written::Conflict);
            }
            replace(&files.path(PENDING), &pending, 0o600)?;
            files.complete_write()?;
            Ok(Written::Done)
        })
        .await
    }

    fn changes(&self) -> impl Stream<Item = ()> + Send {
        let mut ticks = interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        futures::stream::unfold(ticks, async |mut ticks| {
            ticks.tick().await;
            Some(((), ticks))
        })
    }

    async fn reports(&self) -> Result<BTreeMap<String, String>, StoreError> {
        self.locked(Files::read_reports).await
    }

    async fn report(&self, replica: &str, report: Option<&str>) -> Result<(), StoreError> {
        let (replica, report) = (replica.to_owned(), report.map(str::to_owned));
        self.locked(move |files| {
            let mut reports = files.read_reports()?;
            reports.remove(&replica);
            reports.extend(report.map(|report| (replica, report)));
            let json = serde_json::to_vec(&reports).expect("texts are valid JSON");
            replace(&files.path(REPORTS), &json, 0o644)
        })
        .await
    }
}

/// Only the owner can read keys.
fn mode(name: &str) -> u32 {
    if name.ends_with(".key") { 0o600 } else { 0o644 }
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(StoreError::File(path.to_owned(), error)),
    }
}

/// Replaces a file atomically, and flushes it to the disk.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> Result<(), StoreError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = folder.join(format!(".{name}.{}", std::process::id()));
    let written = || -> io::Result<()> {
        remove(&new).map_err(io::Error::other)?;
        let mut options = OpenOptions::new();
        let mut file = options.create_new(true).write(true).mode(mode).open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, path)?;
        File::open(folder)?.sync_all()
    };
    written().map_err(|error| StoreError::File(path.to_owned(), error))
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
    async fn one_of_concurrent_first_writes_succeeds() {
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
    async fn write_replaces_fields_removes_request_and_protects_keys() {
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
        assert_eq!(late, Written::Conflict, "its base is outdated");
    }

    #[tokio::test]
    async fn next_access_completes_interrupted_write() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path().to_owned());
        files
            .write(
                &fields(&[("tls.crt", "old"), ("tls.key", "old"), ("next.crt", "n")]),
                None,
            )
            .await
            .unwrap();
        // The state after a crash during a write.
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
    async fn stores_and_removes_reports() {
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
