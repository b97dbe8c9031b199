//! The real controller signs for those who ask in the measurement, in a namespace of its own; no figure is judged.
//!
//! Needs root, and the controller beside the tests (`cargo build --bins`). Without root it says so and is skipped, but
//! not in CI.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use diy_mesh_bench::{
    cases::Metric, certificates::Issuing, config::Programs, load::Window, network::Site,
};

/// Where the controller's user can read.
const STATE: &str = "/var/lib/diy-mesh-bench-test";

#[test]
fn each_pod_that_asks_gets_its_certificate() -> Result<()> {
    let root = nix::unistd::geteuid().is_root();
    assert!(
        root || env::var_os("CI").is_none(),
        "in CI this test has to run as root"
    );
    if !root {
        eprintln!("skipped: it makes network namespaces, run it as root");
        return Ok(());
    }
    let site = Site::clear("dmbc-")?;
    let outcome = certificates(&site);
    site.close()?;
    fs::remove_dir_all(STATE)?;
    outcome
}

fn certificates(site: &Site) -> Result<()> {
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
    let issuing = Issuing::start(&programs, site)?;
    // Twice, as when a case is repeated.
    for _ in 0..2 {
        let numbers = issuing.ready(50, window)?.measure(8, 50)?;
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
    let own = env::current_exe()?;
    let folder = own
        .parent()
        .and_then(Path::parent)
        .context("tests lie in target/PROFILE/deps")?;
    let program = folder.join("controller");
    ensure!(
        program.is_file(),
        "{} is not there: run `cargo build --bins` first",
        program.display()
    );
    Ok(program)
}
