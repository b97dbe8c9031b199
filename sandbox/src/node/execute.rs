//! Execution of a command in a container's namespaces, with its mounts, user and environment, as
//! `kubectl exec` does.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicU64, Ordering},
};

use anyhow::{Context, Result, anyhow};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    process::{Child, Command},
};

use super::container::{Termination, exit_code};
use crate::{exec::Spec, protocol::Output};

/// The limit of standard output and of standard error, in bytes.
const MAX_OUTPUT: u64 = 16 << 20;

/// Runs a command to completion in the container with this directory. The command is killed when the
/// pod is removed, which closes `pod`.
pub(super) async fn execute(
    container: PathBuf,
    argv: Vec<String>,
    mut pod: Termination,
) -> Result<Output> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let text = fs::read(container.join("spec.json")).context("the container does not exist yet")?;
    let spec = Spec {
        argv,
        ..serde_json::from_slice(&text)?
    };
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let spec_file = container.join(format!("exec-{number}.json"));
    fs::write(&spec_file, serde_json::to_vec(&spec)?)?;
    let mut child = spawn(&spec_file)?;
    let pid = child.id().expect("the child has not been awaited");
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let exit = async { tokio::join!(child.wait(), read_text(stdout), read_text(stderr)) };
    let outcome = tokio::select! {
        (status, stdout, stderr) = exit => Ok(Output { code: exit_code(status?), stdout, stderr }),
        () = async { while pod.changed().await.is_ok() {} } => Err(anyhow!("the pod was removed")),
    };
    // Kills the command and its child processes.
    let _ = killpg(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
    let _ = fs::remove_file(&spec_file);
    outcome
}

/// Starts the process of a spec file.
pub(super) fn spawn(spec_file: &Path) -> Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg("sandbox-exec").arg(spec_file).env_clear();
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().context("failed to start sandbox-exec")
}

/// Reads a pipe to its end. Discards what exceeds `MAX_OUTPUT`.
async fn read_text(pipe: Option<impl AsyncRead + Unpin>) -> String {
    let Some(mut pipe) = pipe else {
        return String::new();
    };
    let mut kept = Vec::new();
    // A read error ends the output.
    let _ = (&mut pipe).take(MAX_OUTPUT).read_to_end(&mut kept).await;
    let _ = tokio::io::copy(&mut pipe, &mut tokio::io::sink()).await;
    String::from_utf8_lossy(&kept).into_owned()
}
