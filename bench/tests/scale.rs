//! The scale benchmark with the real controller and injector, small. The test does not check
//! performance.
//!
//! Requires these programs (`cargo build --bins`).

use std::{
    env, fs,
    path::Path,
    process::{Command, Stdio},
    sync::{Arc, atomic::AtomicBool},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Parser;
use diy_mesh_bench::scale::{config::Config, measure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

#[test]
fn measures_subscribers_certificates_and_injections() -> Result<()> {
    let mut config = Config::parse_from([
        "scale",
        "--subscribers=2,60",
        "--endpoints=120",
        "--changes=3",
        "--churn=20",
        "--seconds=1",
        "--storms=1",
        "--requests=40",
    ]);
    let own = env::current_exe()?;
    let folder = own.parent().and_then(Path::parent);
    let folder = folder.context("the test binary is in target/PROFILE/deps")?;
    config.find_programs(folder).map_err(anyhow::Error::msg)?;
    let report = measure(&config, Arc::new(AtomicBool::new(false)))?.json();
    let results = report["results"].as_array().context("results")?;
    assert_eq!(results.len(), 14, "{report:#}");
    for result in results {
        let medians = result["medians"].as_object().context("medians")?;
        let is_standalone = medians.contains_key("0");
        assert_eq!(medians.len(), if is_standalone { 1 } else { 2 }, "{result}");
        let is_positive =
            |value: &serde_json::Value| value.as_f64().is_some_and(|value| value > 0.0);
        let may_be_zero = [
            "memory_kb_per_subscriber",
            "change_cpu_us_per_subscriber",
            "fan_out_p99_ms",
        ];
        let is_exempt = may_be_zero.iter().any(|name| result["metric"] == *name);
        assert!(is_exempt || medians.values().all(is_positive), "{result}");
    }
    Ok(())
}

#[test]
fn interrupted_run_leaves_no_program_and_no_file() -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let mut run = Command::new(env!("CARGO_BIN_EXE_scale"))
        .args(["--only=discovery", "--subscribers=10", "--seconds=3600"])
        .env("TMPDIR", scratch.path())
        .stderr(Stdio::null())
        .spawn()?;
    let log = || {
        let folder = fs::read_dir(scratch.path()).ok()?.next()?.ok()?.path();
        fs::read_to_string(folder.join("controller.err")).ok()
    };
    let deadline = Instant::now() + Duration::from_secs(300);
    while log().is_none_or(|log| log.is_empty()) {
        assert!(run.try_wait()?.is_none(), "the run has ended");
        assert!(Instant::now() < deadline, "the controller logs nothing");
        thread::sleep(Duration::from_millis(5));
    }
    kill(Pid::from_raw(run.id() as i32), Signal::SIGINT)?;
    assert_eq!(run.wait()?.code(), Some(130));
    assert_eq!(fs::read_dir(scratch.path())?.count(), 0);
    Ok(())
}
