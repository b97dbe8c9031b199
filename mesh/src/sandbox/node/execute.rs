//! A program run in a pod on request, as `kubectl exec` does: in a container's namespaces, with its files, user and
//! environment. It ends with the pod.

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

use crate::sandbox::{exec::Spec, protocol::Output};

/// A program about to run.
#[derive(Debug)]
pub(super) struct Program {
    spec_file: PathBuf,
    /// Closes when the pod is gone.
    pod: watch::Receiver<()>,
}

const MOST_OUTPUT: u64 = 16 << 20;

impl Program {
    /// `container` is the container's folder in the pod's.
    pub(super) fn new(
        container: &Path,
        argv: Vec<String>,
        pod: watch::Receiver<()>,
    ) -> Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let text =
            fs::read(container.join("spec.json")).context("the container has not been made yet")?;
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

    /// Runs it to its end.
    pub(super) async fn output(mut self) -> Result<Output> {
        let mut child = spawn(&self.spec_file)?;
        let group = Pid::from_raw(
            child
                .id()
                .context("a child that was not waited for has an id")?
                .cast_signed(),
        );
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let finished = async { tokio::join!(child.wait(), text(stdout), text(stderr)) };
        let outcome = tokio::select! {
            (status, stdout, stderr) = finished => Ok(Output { code: super::container::exit_code(status?), stdout, stderr }),
            _ = self.pod.changed() => Err(anyhow::anyhow!("the pod ended meanwhile")),
        };
        // It, and what it started.
        let _ = killpg(group, Signal::SIGKILL);
        let _ = fs::remove_file(&self.spec_file);
        outcome
    }
}

/// Starts the process of a spec file, which enters its pod and becomes the program.
pub(super) fn spawn(spec_file: &Path) -> Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg("sandbox-exec").arg(spec_file).env_clear();
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().context("cannot start sandbox-exec")
}

/// All that the pipe gives, of which the first part is kept.
async fn text(pipe: Option<impl AsyncRead + Unpin>) -> String {
    let Some(mut pipe) = pipe else {
        return String::new();
    };
    let mut kept = Vec::new();
    // A broken pipe is its end.
    let _ = (&mut pipe).take(MOST_OUTPUT).read_to_end(&mut kept).await;
    let _ = tokio::io::copy(&mut pipe, &mut tokio::io::sink()).await;
    String::from_utf8_lossy(&kept).into_owned()
}
