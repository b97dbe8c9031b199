//! Embeds the walkthrough's manifests and the version in the binary.

use std::{env, fs, io, path::Path, process::Command};

fn main() -> io::Result<()> {
    println!("cargo::rustc-env=MESH_VERSION={}", version());
    let own = env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let manifests = Path::new(&own).join("../manifests").canonicalize()?;
    println!("cargo::rerun-if-changed={}", manifests.display());
    let mut entries = Vec::new();
    collect(&manifests, &manifests, &mut entries)?;
    entries.sort();
    let list: String = entries
        .iter()
        .map(|(name, path)| format!("    ({name:?}, include_str!({path:?})),\n"))
        .collect();
    let out = Path::new(&env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("manifests.rs");
    fs::write(out, format!("&[\n{list}]\n"))
}

fn collect(root: &Path, folder: &Path, entries: &mut Vec<(String, String)>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(root, &path, entries)?;
        } else if path
            .extension()
            .is_some_and(|extension| extension == "yaml")
        {
            let name = path
                .strip_prefix(root)
                .expect("the path is below the folder")
                .display()
                .to_string();
            entries.push((name, path.display().to_string()));
        }
    }
    Ok(())
}

/// The version of the package, and in release builds from a git checkout the commit. Debug builds
/// would be rebuilt after each commit.
fn version() -> String {
    let version = env::var("CARGO_PKG_VERSION").expect("cargo sets CARGO_PKG_VERSION");
    if env::var("PROFILE").is_ok_and(|profile| profile == "debug") {
        return version;
    }
    // Each commit and checkout changes this file.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    match git(&["rev-parse", "--short", "HEAD"]) {
        Some(commit) => format!("{version} ({commit})"),
        None => version,
    }
}

/// The output of git. `None` without git or a checkout.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}
