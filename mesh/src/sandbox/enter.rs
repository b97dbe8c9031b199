//! The inner half's way in, three starts of this binary, each with the control socket as standard input:
//!
//! 1. `mesh sandbox-node` makes the namespaces. Without root it first makes a user namespace, whose id maps the outer half
//!    writes (newuidmap must run outside of it).
//! 2. `mesh sandbox-init` is process 1 of the new process namespace. It mounts, and buries orphans. When it dies, however it
//!    dies, the kernel ends every process in there, and namespaces, addresses and files vanish with the last of them: nothing
//!    of a sandbox lies outside of its namespaces, so nothing can be left behind and nothing needs a clean-up.
//! 3. `mesh sandbox-agent` is the node itself.
//!
//! They are own starts because entering a user or process namespace needs a process of one thread.

use std::{
    io::{self, IsTerminal, Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode},
};

use anyhow::{Context, Result, bail};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::{
        prctl,
        signal::Signal,
        wait::{WaitStatus, waitpid},
    },
    unistd::{Pid, geteuid, setgroups, sethostname, setsid},
};

use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt;
use tracing_subscriber::prelude::*;

use super::protocol::Message;

/// `mesh sandbox-node`: makes the namespaces and waits for process 1 in them.
pub fn node(programs: &Path) -> Result<ExitCode> {
    let mut control = control_socket()?;
    match make_namespaces(&mut control).and_then(|()| start("sandbox-init", programs)) {
        Ok(mut init) => Ok(exit_code(
            init.wait().context("cannot wait for the sandbox")?.code(),
        )),
        Err(error) => {
            // The outer half shows it; here it would come twice.
            send(
                &mut control,
                &Message::Failed {
                    reason: format!("{error:#}"),
                },
            )?;
            Ok(ExitCode::FAILURE)
        }
    }
}

/// `mesh sandbox-init`: process 1.
pub fn init(programs: &Path) -> Result<ExitCode> {
    prctl::set_pdeathsig(Signal::SIGKILL).context("cannot ask to end with the parent")?;
    let agent = match prepare_mounts().and_then(|()| start("sandbox-agent", programs)) {
        Ok(agent) => Pid::from_raw(agent.id().cast_signed()),
        Err(error) => {
            send(
                &mut control_socket()?,
                &Message::Failed {
                    reason: format!("{error:#}"),
                },
            )?;
            return Ok(ExitCode::FAILURE);
        }
    };
    loop {
        match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, code)) if pid == agent => return Ok(exit_code(Some(code))),
            Ok(WaitStatus::Signaled(pid, ..)) if pid == agent => return Ok(ExitCode::FAILURE),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => bail!("cannot wait for processes: {error}"),
        }
    }
}

/// `mesh sandbox-agent`: the node.
pub fn agent(programs: PathBuf, log: Targets) -> Result<ExitCode> {
    let lines = fmt::layer()
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr);
    tracing_subscriber::registry().with(log).with(lines).init();
    let control = control_socket()?;
    // Two threads: the node's own work is small, and the pods' programs need the cores.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start")?;
    runtime.block_on(super::node::run(programs, control))?;
    // Blocked threads are not waited for: process 1 ends with this process, and everything with it.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// The socket to the outer half, which every stage has as its standard input.
fn control_socket() -> Result<UnixStream> {
    let fd = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .context("no control socket: this command is for mesh itself")?;
    Ok(UnixStream::from(fd))
}

fn make_namespaces(control: &mut UnixStream) -> Result<()> {
    // Ctrl-C in a terminal is for the outer half, which then ends the sandbox in order.
    setsid().context("cannot start a session")?;
    if !geteuid().is_root() {
        make_user_namespace(control)?;
    }
    let flags = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWIPC;
    unshare(flags)
        .map_err(|error| anyhow::anyhow!("cannot make namespaces ({error}). {}", NO_NAMESPACES))
}

const NO_NAMESPACES: &str = "In a container: start it with --privileged. As an ordinary user: an administrator may have forbidden it; \
    try `sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu), or run as root";

fn make_user_namespace(control: &mut UnixStream) -> Result<()> {
    unshare(CloneFlags::CLONE_NEWUSER).map_err(|error| {
        anyhow::anyhow!(
            "not root, and user namespaces are not allowed here ({error}). Run as root, or allow them: \
             `sudo sysctl -w kernel.unprivileged_userns_clone=1` (older Debian), `sudo sysctl -w user.max_user_namespaces=10000`"
        )
    })?;
    send(
        control,
        &Message::MapIds {
            pid: std::process::id().cast_signed(),
        },
    )?;
    let mut answer = [0; 1];
    control
        .read_exact(&mut answer)
        .context("the id maps were not written")?;
    setgroups(&[]).context("cannot leave the user's groups")
}

fn prepare_mounts() -> Result<()> {
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("cannot detach the sandbox's mounts")?;
    mount(Some("proc"), "/proc", Some("proc"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC, none)
        .context("cannot mount /proc (inside a container a part of /proc is hidden: start it with --privileged)")?;
    mount(
        Some("tmpfs"),
        "/run",
        Some("tmpfs"),
        MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
        Some("mode=0755"),
    )
    .context("cannot mount /run")?;
    sethostname("sandbox").context("cannot set the host name")
}

fn start(stage: &str, programs: &Path) -> Result<Child> {
    // This very binary, even when its file has been replaced since.
    Command::new("/proc/self/exe")
        .arg(stage)
        .arg("--programs")
        .arg(programs)
        .spawn()
        .with_context(|| format!("cannot start {stage}"))
}

fn send(control: &mut UnixStream, message: &Message) -> Result<()> {
    let mut line = serde_json::to_string(message)?;
    line.push('\n');
    control
        .write_all(line.as_bytes())
        .context("the sandbox's owner is gone")
}

fn exit_code(code: Option<i32>) -> ExitCode {
    code.and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from)
}
