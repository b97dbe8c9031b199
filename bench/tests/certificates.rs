//! The certificate benchmark with the real controller. The test does not check performance.
//!
//! Requires root and the controller binary (`cargo build --bins`). Skipped without root, except in
//! CI, where it fails.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use diy_mesh_bench::{
    cases::Metric, certificates::CertificateBench, config::Programs, load::Window,
    network::NamespaceSet,
};
use diy_mesh_testkit::is_root;

/// Directory that the controller's user can access.
const STATE: &str = "/var/lib/diy-mesh-bench-test";

#[test]
fn signs_a_certificate_for_each_pod() -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    let namespaces = NamespaceSet::clear("dmbc-")?;
    let outcome = certificates(&namespaces);
    namespaces.close()?;
    fs::remove_dir_all(STATE)?;
    outcome
}

fn certificates(namespaces: &NamespaceSet) -> Result<()> {
    let state = PathBuf::from(STATE);
    fs::create_dir_all(&state)?;
    let programs = Programs {
        controller: controller()?,
        state,
        ..Programs::default()
    };
    let window = Window {
        warm_up: Duration::ZERO,
        length: Duration::from_millis(200),
    };
    let certificates = CertificateBench::start(&programs, namespaces)?;
    // Twice, like a case with repeats.
    for _ in 0..2 {
        let numbers = certificates.prepare(50, window)?.measure(8, 50)?;
        for metric in [
            Metric::Certificates,
            Metric::CertificateCpu,
            Metric::LatencyP99,
        ] {
            assert!(
                numbers
                    .iter()
                    .any(|&(of, value)| of == metric && value > 0.0),
                "{numbers:?}"
            );
        }
    }
    Ok(())
}

fn controller() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own
        .parent()
        .and_then(Path::parent)
        .context("the test binary is in target/PROFILE/deps")?;
    let program = folder.join("controller");
    ensure!(
        program.is_file(),
        "{} does not exist: run `cargo build --bins` first",
        program.display()
    );
    Ok(program)
}
