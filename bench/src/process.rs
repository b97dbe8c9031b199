//! Child process in a namespace: start, readiness, CPU time and memory from /proc, termination on
//! drop.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::network::Namespace;

/// UID of the proxies, which the redirect rules skip.
pub const PROXY_UID: u32 = 1337;

/// Program to start.
pub struct Program {
    /// Name in messages and of the log file.
    pub name: String,
    /// Executable, readable by the UID.
    pub path: PathBuf,
    /// Arguments.
    pub arguments: Vec<String>,
    /// Environment in addition to PATH.
    pub environment: Vec<(&'static str, String)>,
    /// UID and GID.
    pub uid: u32,
}

/// Running program. Drop terminates it.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    started: Instant,
}

impl Process {
    /// Starts `program` in `namespace`. Discards its standard output, and writes its errors to a file in
    /// `logs`.
    pub fn start(program: Program, namespace: &Namespace, logs: &Path) -> Result<Self> {
        Process::start_with(program, logs, |command| namespace.spawn(command))
    }

    /// Starts `program` with `spawn`. Discards its standard output, and writes its errors to a file in
    /// `logs`.
    pub fn start_with(
        program: Program,
        logs: &Path,
        spawn: impl FnOnce(&mut Command) -> Result<Child>,
    ) -> Result<Self> {
        let log = logs.join(format!("{}.err", program.name));
        let errors = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let mut command = Command::new(&program.path);
        command
            .args(&program.arguments)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .envs(program.environment);
        let output = Stdio::piped();
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        command.uid(program.uid).gid(program.uid).current_dir("/");
        let started = Instant::now();
        let mut child = spawn(&mut command)?;
        // Dumps and access logs, which a container runtime would read.
        let mut output = child.stdout.take().context("standard output is a pipe")?;
        thread::spawn(move || io::copy(&mut output, &mut io::sink()));
        Ok(Process {
            name: program.name,
            child,
            log,
            started,
        })
    }

    /// The process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Polls `path` at `address` in `namespace` until the response is 200. Returns the time since
    /// the start.
    pub fn wait_ready(
        &mut self,
        namespace: &Namespace,
        address: SocketAddr,
        path: &str,
    ) -> Result<Duration> {
        namespace.enter(|| self.poll_ready(address, path))
    }

    /// Polls `path` at `address` until the response is 200. Returns the time since the start.
    pub fn poll_ready(&mut self, address: SocketAddr, path: &str) -> Result<Duration> {
        let deadline = self.started + Duration::from_secs(20);
        loop {
            let answer = http_get(address, path);
            if answer
                .as_ref()
                .is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
            {
                return Ok(self.started.elapsed());
            }
            if let Some(status) = self.child.try_wait().context("wait for a child")? {
                bail!(
                    "{} exited during startup ({status}){}",
                    self.name,
                    self.log_tail()
                );
            }
            if Instant::now() >= deadline {
                let answer = answer.unwrap_or_else(|error| error.to_string());
                bail!(
                    "{} is not ready after 20 s: {}{}",
                    self.name,
                    answer.trim(),
                    self.log_tail()
                );
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Fails if the process has exited.
    pub fn ensure_running(&mut self) -> Result<()> {
        match self.child.try_wait().context("wait for a child")? {
            Some(status) => bail!("{} has exited ({status}){}", self.name, self.log_tail()),
            None => Ok(()),
        }
    }

    /// Last lines of the log, formatted for an error message.
    pub fn log_tail(&self) -> String {
        let text = fs::read(&self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default();
        let lines: Vec<String> = text
            .lines()
            .rev()
            .take(8)
            .map(|line| line.chars().take(300).collect())
            .collect();
        if lines.is_empty() {
            return String::new();
        }
        let lines: Vec<_> = lines.into_iter().rev().collect();
        format!(
            "; last log lines of {}:\n    {}",
            self.name,
            lines.join("\n    ")
        )
    }

    /// Kills the process without a shutdown.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context("kill a child")?;
        self.child.wait().context("wait for a child")?;
        Ok(())
    }

    /// Meter of its CPU time and memory.
    pub fn meter(&self) -> Meter {
        Meter::of(self.id())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        let pid = Pid::from_raw(self.child.id() as i32);
        let _ = kill(pid, Signal::SIGTERM);
        let deadline = Instant::now() + Duration::from_secs(2);
        while Instant::now() < deadline {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Resource usage of a process.
#[derive(Clone)]
pub struct Meter(PathBuf);

impl Meter {
    /// Meter of any process.
    pub fn of(pid: u32) -> Self {
        Self(PathBuf::from(format!("/proc/{pid}")))
    }

    /// User and system CPU time of all threads, with the resolution of the scheduler (nanoseconds).
    pub fn cpu(&self) -> Result<Duration> {
        let tasks = self.0.join("task");
        let mut nanoseconds = 0;
        for task in fs::read_dir(&tasks).with_context(|| format!("list {}", tasks.display()))? {
            let file = task.context("list threads")?.path().join("schedstat");
            match fs::read_to_string(&file) {
                Ok(text) => {
                    nanoseconds +=
                        first_number(&text).with_context(|| format!("read {}", file.display()))?
                }
                // The thread has exited since the directory was read.
                Err(error)
                    if matches!(error.kind(), ErrorKind::NotFound)
                        || error.raw_os_error() == Some(3) => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("read {}", file.display()));
                }
            }
        }
        Ok(Duration::from_nanos(nanoseconds))
    }

    /// Highest resident memory since the start of the process, in bytes.
    pub fn peak_resident(&self) -> Result<u64> {
        let file = self.0.join("status");
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let number = line.and_then(first_number).context("status has no VmHWM")?;
        Ok(number * 1024)
    }

    /// Resident memory in bytes.
    pub fn resident(&self) -> Result<u64> {
        let file = self.0.join("smaps_rollup");
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("Rss:"))
            .context("smaps_rollup has no Rss")?;
        Ok(first_number(line).context("smaps_rollup has no number after Rss")? * 1024)
    }
}

fn first_number(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

fn http_get(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    stream.write_all(
        format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes(),
    )?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meter_reads_cpu_time_and_memory() {
        let meter = Meter(PathBuf::from("/proc/self"));
        assert!(meter.cpu().unwrap() > Duration::ZERO);
        assert!(meter.resident().unwrap() > 100_000);
    }
}
