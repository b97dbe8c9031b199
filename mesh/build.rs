//! Embeds the version in the binary.

use std::{env, process::Command};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-env=MESH_VERSION={}", version());
}

/// The version of the package, and in release builds from a git checkout the commit. Debug builds
/// would be rebuilt after each commit. Without a fixed length, the length of the commit depends on
/// the checkout.
fn version() -> String {
    let version = env::var("CARGO_PKG_VERSION").expect("cargo sets CARGO_PKG_VERSION");
    if env::var("PROFILE").is_ok_and(|profile| profile == "debug") {
        return version;
    }
    // Each commit and checkout changes this file.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    match git(&["rev-parse", "--short=12", "HEAD"]) {
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
