//! Detection of changed files, for the catalog of a folder and the keys of the token issuer.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// The kernel uses a coarse clock: a second write within this time may not change the stamp.
const TIMESTAMP_GRANULARITY: Duration = Duration::from_secs(1);

/// The metadata that changes when a file is written or replaced.
#[derive(Clone, Debug)]
pub struct Stamp {
    inode: u64,
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    settled: bool,
}

impl Stamp {
    /// The stamp of the file at `path`, which must be a regular file.
    pub fn of(path: &Path) -> io::Result<Stamp> {
        let metadata = std::fs::metadata(path)?;
        if !metadata.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file",
            ));
        }
        let modified = metadata.modified()?;
        Ok(Stamp {
            inode: metadata.ino(),
            length: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            settled: SystemTime::now()
                .duration_since(modified)
                .is_ok_and(|age| age > TIMESTAMP_GRANULARITY),
        })
    }

    /// Whether the file has been written or replaced since `earlier`.
    pub fn differs(&self, earlier: &Stamp) -> bool {
        (self.inode, self.length, self.modified, self.changed)
            != (
                earlier.inode,
                earlier.length,
                earlier.modified,
                earlier.changed,
            )
    }

    /// Whether a later change certainly changes the stamp.
    pub fn settled(&self) -> bool {
        self.settled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differs_after_replacement_only() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&path, "same").unwrap();
        std::fs::write(&other, "same").unwrap();
        let first = Stamp::of(&path).unwrap();
        assert!(!Stamp::of(&path).unwrap().differs(&first));
        std::fs::rename(&other, &path).unwrap();
        assert!(Stamp::of(&path).unwrap().differs(&first));
    }

    #[test]
    fn rejects_folders() {
        assert!(Stamp::of(tempfile::tempdir().unwrap().path()).is_err());
    }
}
