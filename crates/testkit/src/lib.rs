//! Utilities for the tests of several crates: sockets, a client, processes and their memory,
//! waiting, keys and their certificates and tokens. A dependency of tests only. It does not depend
//! on crates of the workspace, so that the unit tests of each one can use it.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

pub mod authority;
pub mod http;
pub mod memory;
pub mod metrics;
pub mod net;
pub mod output;
pub mod process;
pub mod tokens;
pub mod wait;

use std::fmt::Display;
use std::io::Write;
use std::process::{Command, Stdio};

/// Reports that a test is skipped because this machine lacks its means. Panics in CI, which must
/// have them.
pub fn skip(reason: impl Display) {
    assert!(
        std::env::var_os("CI").is_none(),
        "CI must be able to run this test: {reason}"
    );
    // The test harness captures the output of eprintln!, but not this.
    let _ = writeln!(std::io::stderr(), "skipped: {reason}");
}

/// Whether a program is installed. [`skip`]s the test if it is not.
pub fn has_program(name: &str) -> bool {
    let mut program = Command::new(name);
    let output = program.arg("--version").stdin(Stdio::null()).output();
    if output.is_err() {
        skip(format_args!("requires {name}"));
    }
    output.is_ok()
}

/// Whether this process runs as root. [`skip`]s the test if it does not.
pub fn is_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        skip("requires root");
    }
    is_root
}
