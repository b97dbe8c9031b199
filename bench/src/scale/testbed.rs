//! The programs under test on one core, their files, and the waits of a run.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::{Pid, geteuid},
};
use tempfile::TempDir;

use crate::process::{Process, Program};

/// Interval at which waits check their condition.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The files and the cores of a run.
pub struct Testbed {
    folder: TempDir,
    core: CpuSet,
    /// Set by a signal: waits end with an error.
    interrupted: Arc<AtomicBool>,
}

impl Testbed {
    /// Reserves the last core for the programs under test; all other threads of this process use
    /// the other cores. With only one core, all share it.
    pub fn new(interrupted: Arc<AtomicBool>) -> Result<Testbed> {
        let own = Pid::from_raw(0);
        let mut others = sched_getaffinity(own).context("read the CPU affinity")?;
        let is_set = |core: &usize| others.is_set(*core).unwrap_or(false);
        let cores: Vec<_> = (0..CpuSet::count()).filter(is_set).collect();
        let last = *cores.last().context("the CPU affinity is empty")?;
        let mut core = CpuSet::new();
        core.set(last).context("select a core")?;
        if cores.len() > 1 {
            others.unset(last).context("select the other cores")?;
        }
        sched_setaffinity(own, &others).context("set the CPU affinity")?;
        Ok(Testbed {
            folder: tempfile::tempdir().context("create a temporary directory")?,
            core,
            interrupted,
        })
    }

    /// The directory for files, which is removed at the end.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Writes a file to the directory.
    pub fn write(&self, name: &str, content: &str) -> Result<PathBuf> {
        let path = self.folder().join(name);
        fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
        Ok(path)
    }

    /// Starts a program on its core, and waits until it is ready.
    pub fn start(
        &self,
        name: &str,
        path: &Path,
        arguments: Vec<String>,
        environment: Vec<(&'static str, String)>,
        admin: SocketAddr,
    ) -> Result<Process> {
        let program = Program {
            name: name.to_owned(),
            path: path.to_owned(),
            arguments,
            environment,
            uid: geteuid().as_raw(),
        };
        let mut process =
            Process::start_with(program, self.folder(), |command| self.spawn(command))?;
        process.poll_ready(admin, "/ready")?;
        Ok(process)
    }

    /// A child inherits the affinity of the thread that starts it.
    fn spawn(&self, command: &mut Command) -> Result<Child> {
        thread::scope(|scope| {
            let starter = scope.spawn(|| {
                sched_setaffinity(Pid::from_raw(0), &self.core).context("select a core")?;
                let child = command.spawn();
                child.with_context(|| format!("start {}", command.get_program().display()))
            });
            starter
                .join()
                .unwrap_or_else(|_| bail!("the thread that starts a program panicked"))
        })
    }

    /// Waits until `progress` returns `count`.
    pub fn wait_for(
        &self,
        what: &str,
        count: usize,
        timeout: Duration,
        progress: impl Fn() -> usize,
    ) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            let now = progress();
            if now >= count {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{what}: {now} of {count} after {timeout:?}"
            );
            self.pause(POLL_INTERVAL)?;
        }
    }

    /// Sleeps, or fails after a signal.
    pub fn pause(&self, duration: Duration) -> Result<()> {
        ensure!(!self.interrupted.load(Ordering::Relaxed), "interrupted");
        thread::sleep(duration);
        Ok(())
    }
}

/// Loopback address with a free port. Another program may take the port before it is used.
pub fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("find a free port")?;
    listener.local_addr().context("read a free port")
}
