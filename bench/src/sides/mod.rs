//! The sides, each in its own namespaces, all running at the same time.

mod control;
mod envoy;
mod haproxy;
mod mesh;
mod peer;

use std::{
    fs::{self, Permissions},
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

pub use self::control::{Control, Destinations};
use crate::{
    cases::Side,
    config::Programs,
    load,
    network::{CLUSTER, Namespace, NamespaceSet, PLAIN_CLUSTER, Pair, SERVER},
    process::{Meter, PROXY_UID, Process},
    server::{HTTP_PORT, SINK_PORT, Server},
};

const INBOUND_PORT: u16 = 4000;
const OUTBOUND_PORT: u16 = 5000;
const ADMIN_PORT: u16 = 4001;

/// A running side.
pub struct Running {
    /// Which side.
    pub side: Side,
    /// Namespaces of client and server.
    pub pair: Pair,
    /// Origin server.
    pub server: Server,
    programs: Programs,
    proxies: Option<Proxies>,
}

/// Proxy processes of a side.
pub struct Proxies {
    /// The processes of client and server. The first one is dropped first.
    pub ends: [Option<Process>; 2],
    /// Time from the start of the first one until it was ready.
    pub ready: Duration,
}

impl Proxies {
    /// The proxy of the client, or of the server if the client has none.
    pub fn first(&self) -> Result<&Process> {
        self.ends.iter().flatten().next().context("no proxy runs")
    }
}

impl Running {
    /// Creates namespaces and redirect rules, and starts the origin server and the proxies.
    pub fn start(
        side: Side,
        programs: &Programs,
        namespaces: &NamespaceSet,
        control: Option<&mut Control>,
    ) -> Result<Self> {
        let pair = Pair::create(side.name(), namespaces)?;
        let server = Server::start(&pair.server)?;
        for (has_proxy, namespace) in side.ends().into_iter().zip([&pair.client, &pair.server]) {
            if has_proxy {
                redirect(&programs.proxy_init, namespace)?;
            }
        }
        if let (true, Some(control)) = (side.is_mesh(), control) {
            control.connect(&pair)?;
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

    /// Stops the proxies and starts new ones.
    pub fn restart(&mut self) -> Result<()> {
        self.proxies = None;
        self.proxies = match self.side {
            Side::Direct => None,
            Side::Mesh | Side::Dumps | Side::Telemetry | Side::MeshClient | Side::MeshServer => {
                Some(mesh::start(&self.programs, &self.pair, self.side)?)
            }
            Side::Envoy => Some(envoy::peer(&self.programs)?.start(&self.programs, &self.pair)?),
            Side::Haproxy => Some(haproxy::peer(&self.programs).start(&self.programs, &self.pair)?),
        };
        let http = self.http();
        let response = self.pair.client.enter(|| load::one_request(http));
        response.with_context(|| {
            format!(
                "the first request through {} failed{}",
                self.side.name(),
                self.log_tail()
            )
        })
    }

    /// Address for HTTP requests.
    pub fn http(&self) -> SocketAddr {
        self.address(80, HTTP_PORT)
    }

    /// Address of the byte sink.
    pub fn sink(&self) -> SocketAddr {
        self.address(SINK_PORT, SINK_PORT)
    }

    /// Address of a port of the Service, or of the server for a client without a proxy.
    pub fn address(&self, service: u16, server: u16) -> SocketAddr {
        match self.side {
            Side::Direct | Side::MeshServer => (SERVER, server).into(),
            Side::MeshClient => (PLAIN_CLUSTER, service).into(),
            _ => (CLUSTER, service).into(),
        }
    }

    /// Proxies; `None` on the direct side.
    pub fn proxies(&self) -> Option<&Proxies> {
        self.proxies.as_ref()
    }

    /// Meters of the proxies of client and server; empty on the direct side.
    pub fn meters(&self) -> Vec<Meter> {
        self.proxies
            .iter()
            .flat_map(|proxies| proxies.ends.iter().flatten().map(Process::meter))
            .collect()
    }

    /// Fails if a proxy is not running.
    pub fn ensure_running(&mut self) -> Result<()> {
        let Some(proxies) = &mut self.proxies else {
            ensure!(
                self.side == Side::Direct,
                "the proxies of {} are not running",
                self.side.name()
            );
            return Ok(());
        };
        let mut ends = proxies.ends.iter_mut().flatten();
        ends.try_for_each(Process::ensure_running)
    }

    /// Last log lines of both proxies, for error messages.
    pub fn log_tail(&self) -> String {
        let log = self.proxies.as_ref().map(|proxies| {
            proxies
                .ends
                .iter()
                .flatten()
                .map(Process::log_tail)
                .collect()
        });
        log.unwrap_or_default()
    }
}

/// Sets the redirect rules with proxy-init; they are the same for all sides with proxies.
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
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "proxy-init failed in {}: {}",
        namespace.name(),
        error.trim()
    );
    Ok(())
}

/// Writes a file that is readable for the proxies' user.
pub(crate) fn write_readable(path: &Path, content: &str) -> Result<()> {
    fs::write(path, content).with_context(|| format!("write {}", path.display()))?;
    fs::set_permissions(path, Permissions::from_mode(0o644))
        .with_context(|| format!("make {} readable", path.display()))
}

/// Copies a program to a directory that the proxies' user can access.
pub(crate) fn copy_for_proxy_user(program: &Path, directory: &Path) -> Result<PathBuf> {
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
