//! Start of the node inside its namespaces, in three processes of this binary. Each has the control
//! socket as standard input:
//!
//! 1. `mesh sandbox-node` creates the namespaces. Without root it first creates a user namespace, and the client writes its id
//!    maps, because newuidmap must run outside of the namespace.
//! 2. `mesh sandbox-init` is process 1 of the PID namespace. It mounts file systems and reaps orphaned processes. When it
//!    exits, the kernel kills all processes of the namespace, and all namespaces, addresses and files disappear. No cleanup is
//!    necessary.
//! 3. `mesh sandbox-agent` is the node.
//!
//! They are separate processes because only a single-threaded process can enter a user or PID
//! namespace.

use std::{
    io::{self, Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode},
};

use anyhow::{Context, Result, bail};
use diy_mesh_runtime::{LogFormat, init_logging};
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

use super::protocol::Message;

/// `mesh sandbox-node`: creates the namespaces and waits for their process 1.
pub fn node(programs: &Path) -> Result<ExitCode> {
    let mut control = control_socket()?;
    match create_namespaces(&mut control).and_then(|()| start("sandbox-init", programs)) {
        Ok(mut init) => Ok(exit_code(
            init.wait()
                .context("failed to wait for the sandbox")?
                .code(),
        )),
        Err(error) => fail(&mut control, &error),
    }
}

/// `mesh sandbox-init`: process 1.
pub fn init(programs: &Path) -> Result<ExitCode> {
    prctl::set_pdeathsig(Signal::SIGKILL).context("failed to set the parent death signal")?;
    let agent = match prepare_mounts().and_then(|()| start("sandbox-agent", programs)) {
        Ok(agent) => Pid::from_raw(agent.id().cast_signed()),
        Err(error) => return fail(&mut control_socket()?, &error),
    };
    loop {
        match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, code)) if pid == agent => return Ok(exit_code(Some(code))),
            Ok(WaitStatus::Signaled(pid, ..)) if pid == agent => return Ok(ExitCode::FAILURE),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => bail!("failed to wait for child processes: {error}"),
        }
    }
}

/// `mesh sandbox-agent`: the node.
pub fn agent(programs: PathBuf, log: Targets) -> Result<ExitCode> {
    init_logging(log, LogFormat::Text);
    let control = control_socket()?;
    // Two threads leave the other cores to the programs of the pods.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("failed to start the runtime")?;
    runtime.block_on(super::node::run(programs, control))?;
    // Process 1 exits with this process, so blocked threads are not awaited.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// The socket to the client, which is the standard input of all three processes.
fn control_socket() -> Result<UnixStream> {
    let fd = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .context("standard input is not a control socket: only mesh runs this command")?;
    Ok(UnixStream::from(fd))
}

fn create_namespaces(control: &mut UnixStream) -> Result<()> {
    // A new session does not receive Ctrl-C, so that the client can shut the sandbox down.
    setsid().context("failed to create a session")?;
    if !geteuid().is_root() {
        create_user_namespace(control)?;
    }
    let flags = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWIPC;
    unshare(flags).map_err(|error| {
        anyhow::anyhow!("failed to create namespaces ({error}). {}", NO_NAMESPACES)
    })
}

const NO_NAMESPACES: &str = "In a container: start it with --privileged. As an unprivileged user: allow user namespaces with \
    `sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu), or run as root";

fn create_user_namespace(control: &mut UnixStream) -> Result<()> {
    unshare(CloneFlags::CLONE_NEWUSER).map_err(|error| {
        anyhow::anyhow!(
            "failed to create a user namespace ({error}). Run as root, or allow user namespaces: \
             `sudo sysctl -w kernel.unprivileged_userns_clone=1` (older Debian), `sudo sysctl -w user.max_user_namespaces=10000`"
        )
    })?;
    let pid = std::process::id().cast_signed();
    send(control, &Message::MapIds { pid })?;
    let mut answer = [0; 1];
    control
        .read_exact(&mut answer)
        .context("the client did not write the id maps")?;
    setgroups(&[]).context("failed to drop the supplementary groups")
}

fn prepare_mounts() -> Result<()> {
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("failed to make the mounts private")?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(
        Some("proc"),
        "/proc",
        Some("proc"),
        flags | MsFlags::MS_NOEXEC,
        none,
    )
    .context(
        "failed to mount /proc (a container hides parts of /proc: start it with --privileged)",
    )?;
    mount(
        Some("tmpfs"),
        "/run",
        Some("tmpfs"),
        flags,
        Some("mode=0755"),
    )
    .context("failed to mount /run")?;
    sethostname("sandbox").context("failed to set the host name")
}

/// Starts the next process. /proc/self/exe is the running binary even if its file has been
/// replaced.
fn start(stage: &str, programs: &Path) -> Result<Child> {
    Command::new("/proc/self/exe")
        .arg(stage)
        .arg(programs)
        .spawn()
        .with_context(|| format!("failed to start {stage}"))
}

/// Sends the error to the client, which reports it.
fn fail(control: &mut UnixStream, error: &anyhow::Error) -> Result<ExitCode> {
    let reason = format!("{error:#}");
    send(control, &Message::Failed { reason })?;
    Ok(ExitCode::FAILURE)
}

fn send(control: &mut UnixStream, message: &Message) -> Result<()> {
    let mut line = serde_json::to_string(message)?;
    line.push('\n');
    control
        .write_all(line.as_bytes())
        .context("the client is disconnected")
}

fn exit_code(code: Option<i32>) -> ExitCode {
    code.and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from)
}
