//! Execution of a command in a container's namespaces, with its mounts, user and environment, as
//! `kubectl exec` does.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicU64, Ordering},
};

use anyhow::{Context, Result};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    process::{Child, Command},
    sync::watch,
};

use crate::{exec::Spec, protocol::Output};

/// A command to run in a container.
#[derive(Debug)]
pub(super) struct ExecCommand {
    spec_file: PathBuf,
    /// Closes when the pod is removed.
    pod: watch::Receiver<()>,
}

/// The limit of standard output and of standard error, in bytes.
const MAX_OUTPUT: u64 = 16 << 20;

impl ExecCommand {
    /// Writes the process spec of the command. `container` is the directory of the container.
    pub(super) fn new(
        container: &Path,
        argv: Vec<String>,
        pod: watch::Receiver<()>,
    ) -> Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let text =
            fs::read(container.join("spec.json")).context("the container does not exist yet")?;
        let spec = Spec {
            argv,
            ..serde_json::from_slice(&text)?
        };
        let spec_file = container.join(format!(
            "exec-{}.json",
            NUMBER.fetch_add(1, Ordering::Relaxed)
        ));
        fs::write(&spec_file, serde_json::to_vec(&spec)?)?;
        Ok(Self { spec_file, pod })
    }

    /// Runs the command to completion. The command is killed when the pod is removed.
    pub(super) async fn output(mut self) -> Result<Output> {
        let mut child = spawn(&self.spec_file)?;
        let pid = child.id().expect("the child has not been awaited");
        let group = Pid::from_raw(pid.cast_signed());
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let is_shut_down =
            async { tokio::join!(child.wait(), read_text(stdout), read_text(stderr)) };
        let outcome = tokio::select! {
            (status, stdout, stderr) = is_shut_down => Ok(Output { code: super::container::exit_code(status?), stdout, stderr }),
            _ = self.pod.changed() => Err(anyhow::anyhow!("the pod was removed")),
        };
        // Kills the command and its child processes.
        let _ = killpg(group, Signal::SIGKILL);
        let _ = fs::remove_file(&self.spec_file);
        outcome
    }
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
