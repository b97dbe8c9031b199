//! Access to the files of this repository for the tests that check code and documents.

use std::fs;
use std::path::{Path, PathBuf};

/// Absolute path of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tests is a directory of the repository")
        .to_owned()
}

/// Reads a text file. `path` is relative to the repository.
pub fn read(path: &Path) -> String {
    fs::read_to_string(root().join(path))
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All files below a directory, relative to the repository and sorted. Skips `target` and hidden
/// entries.
pub fn files(directory: impl AsRef<Path>) -> Vec<PathBuf> {
    let (mut found, mut directories) = (Vec::new(), vec![directory.as_ref().to_owned()]);
    while let Some(directory) = directories.pop() {
        let entries = fs::read_dir(root().join(&directory))
            .unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        for entry in entries {
            let name = entry.expect("the directory is readable").file_name();
            let path = directory.join(&name);
            if name == "target" || name.as_encoded_bytes().starts_with(b".") {
                continue;
            }
            if root().join(&path).is_dir() {
                directories.push(path);
            } else {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// The files of [`files`] with this extension.
pub fn files_with_extension(directory: impl AsRef<Path>, extension: &str) -> Vec<PathBuf> {
    let mut files = files(directory);
    files.retain(|path| path.extension().is_some_and(|found| found == extension));
    files
}

/// Panics with all violations, if there are any.
pub fn assert_none(message: &str, violations: impl IntoIterator<Item = String>) {
    let violations: Vec<_> = violations.into_iter().collect();
    assert!(
        violations.is_empty(),
        "{} {message}:\n  {}",
        violations.len(),
        violations.join("\n  ")
    );
}
