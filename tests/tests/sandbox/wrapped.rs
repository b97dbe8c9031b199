//! Programs of a sandbox that a script starts, which changes their environment first.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use diy_mesh_tests::sandbox::programs;
use tempfile::TempDir;

/// A directory with all programs. `command` starts those with these names: the program and its
/// arguments follow it. The directory is `/usr/local/bin` in all containers.
pub fn wrapped(names: &[&str], command: &str) -> TempDir {
    let programs = programs();
    let folder = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o755))
        .tempdir_in(&programs)
        .unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("wrapped")).unwrap();
    for entry in fs::read_dir(&programs).unwrap() {
        let (file, name) = entry
            .map(|entry| (entry.path(), entry.file_name()))
            .unwrap();
        let name = name.to_str().unwrap();
        if !file.is_file() {
            continue;
        }
        let mut link = path(name);
        if names.contains(&name) {
            let program = format!("/usr/local/bin/wrapped/{name}");
            fs::write(&link, format!("#!/bin/sh\n{command} {program} \"$@\"\n")).unwrap();
            fs::set_permissions(&link, Permissions::from_mode(0o755)).unwrap();
            link = path("wrapped").join(name);
        }
        fs::hard_link(&file, link).unwrap();
    }
    folder
}
