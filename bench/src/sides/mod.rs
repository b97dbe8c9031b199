//! The four ways from client to server, each in namespaces of its own, all up at once.

mod control;
mod envoy;
mod mesh;

use std::{
    fs::{self, Permissions},
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

pub use self::control::Control;
use crate::{
    cases::Side,
    config::Programs,
    load,
    network::{CLUSTER, Namespace, Pair, SERVER, Site},
    process::{Meter, PROXY_UID, Process},
    server::{HTTP_PORT, SINK_PORT, Server},
};

const INBOUND_PORT: u16 = 4000;
const OUTBOUND_PORT: u16 = 5000;
const ADMIN_PORT: u16 = 4001;

/// A side that is up.
pub struct Running {
    /// Which one.
    pub side: Side,
    /// Its namespaces.
    pub pair: Pair,
    /// Its origin server.
    pub server: Server,
    programs: Programs,
    proxies: Option<Proxies>,
}

/// The processes of a side with proxies.
pub struct Proxies {
    /// Beside the client, dropped (ended) first.
    pub client: Process,
    /// Beside the server.
    pub server: Process,
    /// From the start of the client's until it was ready.
    pub ready: Duration,
}

impl Running {
    /// Makes its namespaces and rules, starts its server and its proxies.
    pub fn start(
        side: Side,
        programs: &Programs,
        site: &Site,
        control: Option<&mut Control>,
    ) -> Result<Self> {
        let pair = Pair::make(side.name(), site)?;
        let server = Server::start(&pair.server)?;
        if side != Side::Direct {
            redirect(&programs.proxy_init, &pair.client)?;
            redirect(&programs.proxy_init, &pair.server)?;
        }
        if let (true, Some(control)) = (side.is_mesh(), control) {
            control.plug(&pair)?;
        }
        let mut running = Running {
            side,
            pair,
            server,
            programs: programs.clone(),
            proxies: None,
        };
        running.restart()?;
        Ok(running)
    }

    /// Ends the proxies and starts fresh ones.
    pub fn restart(&mut self) -> Result<()> {
        self.proxies = None;
        self.proxies = match self.side {
            Side::Direct => None,
            Side::Mesh => Some(mesh::start(&self.programs, &self.pair, false)?),
            Side::Dumps => Some(mesh::start(&self.programs, &self.pair, true)?),
            Side::Envoy => Some(envoy::start(&self.programs, &self.pair)?),
        };
        let http = self.http();
        let answer = self.pair.client.enter(|| load::one_request(http));
        answer.with_context(|| {
            format!(
                "the first request through {} failed{}",
                self.side.name(),
                self.last_words()
            )
        })
    }

    /// Where the client dials for HTTP.
    pub fn http(&self) -> SocketAddr {
        match self.side {
            Side::Direct => (SERVER, HTTP_PORT).into(),
            _ => (CLUSTER, 80).into(),
        }
    }

    /// Where the client dials to get rid of bytes.
    pub fn sink(&self) -> SocketAddr {
        match self.side {
            Side::Direct => (SERVER, SINK_PORT).into(),
            _ => (CLUSTER, SINK_PORT).into(),
        }
    }

    /// None on the direct side.
    pub fn proxies(&self) -> Option<&Proxies> {
        self.proxies.as_ref()
    }

    /// Meters of the proxies: the client's, the server's; none on the direct side.
    pub fn meters(&self) -> Vec<Meter> {
        self.proxies
            .iter()
            .flat_map(|proxies| [proxies.client.meter(), proxies.server.meter()])
            .collect()
    }

    /// Fails if a proxy is not there.
    pub fn ensure_running(&mut self) -> Result<()> {
        let Some(proxies) = &mut self.proxies else {
            ensure!(
                self.side == Side::Direct,
                "the proxies of {} are not up",
                self.side.name()
            );
            return Ok(());
        };
        proxies.client.ensure_running()?;
        proxies.server.ensure_running()
    }

    /// What its proxies printed last, for an error's message.
    pub fn last_words(&self) -> String {
        let words = self
            .proxies
            .as_ref()
            .map(|proxies| proxies.client.last_words() + &proxies.server.last_words());
        words.unwrap_or_default()
    }
}

/// The redirect rules: the very same for every side that has proxies.
fn redirect(proxy_init: &Path, namespace: &Namespace) -> Result<()> {
    let mut command = Command::new(proxy_init);
    for (flag, value) in [
        ("--inbound-port", INBOUND_PORT.into()),
        ("--outbound-port", OUTBOUND_PORT.into()),
        ("--admin-port", ADMIN_PORT.into()),
        ("--proxy-uid", PROXY_UID),
    ] {
        command.arg(flag).arg(value.to_string());
    }
    command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let output = namespace
        .spawn(&mut command)?
        .wait_with_output()
        .context("wait for proxy-init")?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "proxy-init failed in {}: {}",
        namespace.name(),
        problem.trim()
    );
    Ok(())
}

/// Writes a file that the proxies' user may read.
pub(crate) fn write_readable(path: &Path, content: &str) -> Result<()> {
    fs::write(path, content).with_context(|| format!("write {}", path.display()))?;
    fs::set_permissions(path, Permissions::from_mode(0o644))
        .with_context(|| format!("make {} readable", path.display()))
}

/// A copy of a program that the proxies' user can reach, wherever the checkout lies.
pub(crate) fn reachable(program: &Path, directory: &Path) -> Result<PathBuf> {
    let name = program
        .file_name()
        .with_context(|| format!("{} names no file", program.display()))?;
    let copy = directory.join(name);
    if !copy.exists() {
        fs::copy(program, &copy)
            .with_context(|| format!("copy {} to {}", program.display(), copy.display()))?;
        fs::set_permissions(&copy, Permissions::from_mode(0o755))
            .with_context(|| format!("make {} executable", copy.display()))?;
    }
    Ok(copy)
}
