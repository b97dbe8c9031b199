//! Whether a file is still the one that was read. Shared by what re-reads files: the catalog of
//! files, the issuer's keys.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// The kernel stamps files by a coarse clock: a second write within this time may leave no trace in
/// the stamp.
const TIMESTAMP_GRANULARITY: Duration = Duration::from_secs(1);

/// What tells a file from the same file after a change, or after its replacement.
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

    /// Whether it certainly is another file, or another content, than at the time of `earlier`.
    pub fn differs(&self, earlier: &Stamp) -> bool {
        (self.inode, self.length, self.modified, self.changed)
            != (
                earlier.inode,
                earlier.length,
                earlier.modified,
                earlier.changed,
            )
    }

    /// Whether a change after this stamp would show in the next one.
    pub fn settled(&self) -> bool {
        self.settled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_file_differs_and_an_untouched_one_does_not() {
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
    fn a_folder_is_no_file() {
        assert!(Stamp::of(tempfile::tempdir().unwrap().path()).is_err());
    }
}
