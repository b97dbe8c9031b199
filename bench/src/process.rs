//! One process of a side: started in a namespace under a uid, its CPU time and memory read from /proc, ended on drop.

use std::{
    fs::{self, File},
    io::{ErrorKind, Read, Write},
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

/// The proxies' user: what the redirect rules leave alone.
pub const PROXY_UID: u32 = 1337;

/// What to start.
pub struct Program {
    /// For messages and the log's name.
    pub name: String,
    /// The file, readable by the uid.
    pub path: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Its environment, beside PATH.
    pub environment: Vec<(&'static str, String)>,
    /// Who runs it.
    pub uid: u32,
}

/// A running program.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    started: Instant,
}

impl Process {
    /// Starts `program` in `namespace`; what it prints goes to files in `logs`.
    pub fn start(program: Program, namespace: &Namespace, logs: &Path) -> Result<Self> {
        let create = |stream: &str| {
            let path = logs.join(format!("{}.{stream}", program.name));
            let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
            anyhow::Ok((path, file))
        };
        // Dumps go to one, logs to the other.
        let ((_, output), (log, errors)) = (create("out")?, create("err")?);
        let mut command = Command::new(&program.path);
        command
            .args(&program.arguments)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .envs(program.environment);
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        command.uid(program.uid).gid(program.uid).current_dir("/");
        let started = Instant::now();
        let child = namespace.spawn(&mut command)?;
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

    /// Asks `path` at `address`, inside `namespace`, until it answers 200; says how long after the start that was.
    pub fn wait_ready(
        &mut self,
        namespace: &Namespace,
        address: SocketAddr,
        path: &str,
    ) -> Result<Duration> {
        namespace.enter(|| {
            let deadline = self.started + Duration::from_secs(20);
            loop {
                let answer = ask(address, path);
                if answer
                    .as_ref()
                    .is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
                {
                    return Ok(self.started.elapsed());
                }
                if let Some(status) = self.child.try_wait().context("wait for a child")? {
                    bail!(
                        "{} ended while starting ({status}){}",
                        self.name,
                        self.last_words()
                    );
                }
                if Instant::now() >= deadline {
                    let answer = answer.unwrap_or_else(|problem| problem.to_string());
                    bail!(
                        "{} is not ready after 20 s: {}{}",
                        self.name,
                        answer.trim(),
                        self.last_words()
                    );
                }
                thread::sleep(Duration::from_millis(1));
            }
        })
    }

    /// Fails if it has ended.
    pub fn ensure_running(&mut self) -> Result<()> {
        match self.child.try_wait().context("wait for a child")? {
            Some(status) => bail!("{} has ended ({status}){}", self.name, self.last_words()),
            None => Ok(()),
        }
    }

    /// The end of its log.
    pub fn last_words(&self) -> String {
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
            "; the last that {} printed:\n    {}",
            self.name,
            lines.join("\n    ")
        )
    }

    /// Where its CPU time and memory are read.
    pub fn meter(&self) -> Meter {
        Meter(PathBuf::from(format!("/proc/{}", self.id())))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
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

/// Reads one process's use of the machine.
#[derive(Clone)]
pub struct Meter(PathBuf);

impl Meter {
    /// CPU time so far, user and system, of all threads: the scheduler's own count, in nanoseconds.
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
                // A thread that has ended between the two calls.
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

fn ask(address: SocketAddr, path: &str) -> std::io::Result<String> {
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
    fn a_process_uses_cpu_time_and_memory() {
        let meter = Meter(PathBuf::from("/proc/self"));
        assert!(meter.cpu().unwrap() > Duration::ZERO);
        assert!(meter.resident().unwrap() > 100_000);
    }
}
