//! The lifecycle of one container: start, output, probes, termination, and restarts after a
//! second.

use std::{
    future::pending, os::unix::process::ExitStatusExt, path::PathBuf, process::ExitStatus,
    sync::Arc, time::Duration,
};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Container, LifecycleHandler};
use nix::{
    sys::signal::{Signal, kill, killpg},
    unistd::Pid,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    process::Child,
    sync::watch,
    task::JoinHandle,
    time::{self, Instant},
};

use super::{probe::Prober, status::StatusManager};

/// A request to terminate a container.
#[derive(Clone, Copy, Debug)]
pub(super) struct Termination {
    /// When the container receives SIGKILL.
    pub(super) deadline: Instant,
    /// Whether its preStop hook runs before SIGTERM.
    pub(super) pre_stop: bool,
}

/// Runs one container.
pub(super) struct Supervisor {
    status: Arc<StatusManager>,
    /// The index of the container in the status manager.
    index: usize,
    /// Whether it restarts also after exit code 0.
    restarts_after_success: bool,
    /// The path of its `exec::Spec`.
    spec_file: PathBuf,
    startup: Option<Prober>,
    readiness: Option<Prober>,
    liveness: Option<Prober>,
    pre_stop: Option<PreStop>,
}

enum PreStop {
    Sleep(Duration),
    Http(Prober),
}

/// Kubelets split longer lines too.
const MAX_LINE_LENGTH: usize = 16 * 1024;
const RESTART_DELAY: Duration = Duration::from_secs(1);
const MIN_PROBE_INTERVAL: Duration = Duration::from_millis(20);
/// The time to read the remaining output after the container's process group is killed.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

impl Supervisor {
    pub(super) fn new(
        status: Arc<StatusManager>,
        index: usize,
        container: &Container,
        restarts_after_success: bool,
        spec_file: PathBuf,
    ) -> Result<Self> {
        let prober =
            |probe: Option<&_>| probe.map(|probe| Prober::new(probe, container)).transpose();
        let pre_stop = container
            .lifecycle
            .as_ref()
            .and_then(|lifecycle| lifecycle.pre_stop.as_ref())
            .map(|hook| PreStop::new(hook, container))
            .transpose()?;
        Ok(Self {
            startup: prober(container.startup_probe.as_ref())?,
            readiness: prober(container.readiness_probe.as_ref())?,
            liveness: prober(container.liveness_probe.as_ref())?,
            pre_stop,
            status,
            index,
            restarts_after_success,
            spec_file,
        })
    }

    /// Runs the container, again after each exit, until it has completed or terminated.
    pub(super) async fn run(self, mut termination: watch::Receiver<Option<Termination>>) {
        loop {
            let code = match self.run_once(&mut termination).await {
                Ok(code) => code,
                Err(error) => {
                    self.notice(&format!("failed to start: {error:#}"));
                    128
                }
            };
            self.status.update(self.index, |view| {
                (view.running, view.ready, view.started, view.exit_code) =
                    (false, false, false, Some(code));
                view.reason = Some(if code == 0 {
                    "Completed".into()
                } else {
                    format!("exit code {code}")
                });
            });
            if termination.borrow().is_some() || (code == 0 && !self.restarts_after_success) {
                return;
            }
            self.notice(&format!("exited with code {code}, restarting"));
            tokio::select! {
                () = time::sleep(RESTART_DELAY) => {}
                () = termination_requested(&mut termination) => return,
            }
            self.status.update(self.index, |view| view.restarts += 1);
        }
    }

    async fn run_once(
        &self,
        termination: &mut watch::Receiver<Option<Termination>>,
    ) -> Result<i32> {
        let mut child = super::execute::spawn(&self.spec_file)?;
        let pid = child.id().expect("the child has not been awaited");
        let pid = Pid::from_raw(pid.cast_signed());
        let output = [
            self.forward_lines(child.stdout.take()),
            self.forward_lines(child.stderr.take()),
        ];
        self.status.update(self.index, |view| {
            (view.running, view.started) = (true, self.startup.is_none());
            view.ready = view.started && self.readiness.is_none();
            view.reason = None;
        });
        let status = tokio::select! {
            status = child.wait() => status?,
            reason = self.probe() => {
                self.notice(&format!("killed: {reason:#}"));
                let _ = killpg(pid, Signal::SIGKILL);
                child.wait().await?
            }
            () = termination_requested(termination) => {
                let request = termination.borrow().expect("termination is requested");
                self.terminate(&mut child, pid, termination, request).await?
            }
        };
        // Kills the remaining processes of the container. Fails if there are none.
        let _ = killpg(pid, Signal::SIGKILL);
        for task in output.into_iter().flatten() {
            // A process that has left the process group can keep the pipe open.
            let _ = time::timeout(DRAIN_TIMEOUT, task).await;
        }
        Ok(exit_code(status))
    }

    /// Runs the preStop hook, sends SIGTERM, and sends SIGKILL at the deadline. A later request can
    /// only shorten the deadline.
    async fn terminate(
        &self,
        child: &mut Child,
        pid: Pid,
        termination: &mut watch::Receiver<Option<Termination>>,
        mut request: Termination,
    ) -> Result<ExitStatus> {
        let hook = self.run_pre_stop(request.pre_stop);
        tokio::pin!(hook);
        let mut signaled = false;
        loop {
            tokio::select! {
                status = child.wait() => return Ok(status?),
                () = &mut hook, if !signaled => {
                    signaled = true;
                    // Fails if the process has exited.
                    let _ = kill(pid, Signal::SIGTERM);
                }
                () = time::sleep_until(request.deadline) => {
                    let _ = killpg(pid, Signal::SIGKILL);
                    return Ok(child.wait().await?);
                }
                Ok(()) = termination.changed() => {
                    if let Some(later) = *termination.borrow() {
                        request.deadline = request.deadline.min(later.deadline);
                        if !later.pre_stop && !signaled {
                            signaled = true;
                            let _ = kill(pid, Signal::SIGTERM);
                        }
                    }
                }
            }
        }
    }

    async fn run_pre_stop(&self, enabled: bool) {
        match self.pre_stop.as_ref().filter(|_| enabled) {
            None => {}
            Some(PreStop::Sleep(duration)) => time::sleep(*duration).await,
            Some(PreStop::Http(prober)) => {
                if let Err(error) = prober.probe(self.status.ip()).await {
                    self.notice(&format!("preStop hook failed: {error:#}"));
                }
            }
        }
    }

    /// Applies the results of the probes to the status. Returns the reason when a probe requires a
    /// restart.
    async fn probe(&self) -> anyhow::Error {
        if let Some(prober) = &self.startup {
            let timeout = prober.period * prober.failure_threshold;
            if let Err(error) = self.probe_until_success(prober, timeout).await {
                return error.context("startup probe failed");
            }
            self.status.update(self.index, |view| {
                view.started = true;
                view.ready = self.readiness.is_none();
                view.reason = None;
            });
        }
        tokio::select! {
            never = self.watch_readiness() => match never {},
            error = self.watch_liveness() => error,
        }
    }

    async fn watch_readiness(&self) -> std::convert::Infallible {
        let Some(prober) = &self.readiness else {
            return pending().await;
        };
        loop {
            // The first success does not wait for a full period.
            let _ = self.probe_until_success(prober, Duration::MAX).await;
            self.status.update(self.index, |view| {
                (view.ready, view.reason) = (true, None);
            });
            let error = self.probe_until_failure(prober).await;
            self.status.update(self.index, |view| {
                (view.ready, view.reason) = (false, Some(format!("{error:#}")));
            });
        }
    }

    async fn watch_liveness(&self) -> anyhow::Error {
        match &self.liveness {
            Some(prober) => {
                let error = self.probe_until_failure(prober).await;
                error.context("liveness probe failed")
            }
            None => pending().await,
        }
    }

    /// Probes until the probe has failed several times in a row. Returns the last failure.
    async fn probe_until_failure(&self, prober: &Prober) -> anyhow::Error {
        let mut failures = 0;
        loop {
            time::sleep(prober.period).await;
            match prober.probe(self.status.ip()).await {
                Ok(()) => failures = 0,
                Err(error) if failures + 1 >= prober.failure_threshold => return error,
                Err(_) => failures += 1,
            }
        }
    }

    /// Probes at intervals that grow from `MIN_PROBE_INTERVAL` to the probe's period.
    async fn probe_until_success(&self, prober: &Prober, timeout: Duration) -> Result<()> {
        let started_at = Instant::now();
        let mut interval = MIN_PROBE_INTERVAL;
        loop {
            let Err(error) = prober.probe(self.status.ip()).await else {
                return Ok(());
            };
            if started_at.elapsed() > timeout {
                return Err(error);
            }
            self.status
                .update(self.index, |view| view.reason = Some(format!("{error:#}")));
            time::sleep(interval).await;
            interval = interval.mul_f64(1.3).min(prober.period);
        }
    }

    fn forward_lines(
        &self,
        pipe: Option<impl AsyncRead + Unpin + Send + 'static>,
    ) -> Option<JoinHandle<()>> {
        let (status, index) = (self.status.clone(), self.index);
        pipe.map(|pipe| {
            tokio::spawn(async move {
                let mut lines = BufReader::with_capacity(MAX_LINE_LENGTH, pipe);
                while let Some(line) = next_line(&mut lines).await {
                    status.log(index, line).await;
                }
            })
        })
    }

    fn notice(&self, text: &str) {
        let container = self.status.container(self.index);
        self.status.notice(format!("container {container}: {text}"));
    }
}

impl PreStop {
    fn new(hook: &LifecycleHandler, container: &Container) -> Result<Self> {
        if let Some(sleep) = &hook.sleep {
            let seconds = sleep.seconds.try_into().unwrap_or(0);
            return Ok(Self::Sleep(Duration::from_secs(seconds)));
        }
        let http = hook
            .http_get
            .as_ref()
            .context("unsupported preStop hook: the sandbox supports sleep and httpGet")?;
        Ok(Self::Http(Prober::pre_stop(http, container)?))
    }
}

/// Waits until a termination is requested. Returns at once if that has happened before.
pub(super) async fn termination_requested(termination: &mut watch::Receiver<Option<Termination>>) {
    if termination.wait_for(Option::is_some).await.is_err() {
        // The sender is dropped, so no request can follow.
        pending::<()>().await;
    }
}

/// Reads a line without its line break, or the next part of a long line. Returns `None` at the end
/// of the pipe or on an error.
async fn next_line(reader: &mut BufReader<impl AsyncRead + Unpin>) -> Option<String> {
    let mut line = Vec::new();
    loop {
        let buffer = reader.fill_buf().await.ok()?;
        if buffer.is_empty() {
            return (!line.is_empty()).then(|| String::from_utf8_lossy(&line).into_owned());
        }
        let available = &buffer[..buffer.len().min(MAX_LINE_LENGTH - line.len())];
        let end = available.iter().position(|&byte| byte == b'\n');
        line.extend_from_slice(&available[..end.unwrap_or(available.len())]);
        let used = end.map_or(available.len(), |at| at + 1);
        reader.consume(used);
        if end.is_some() || line.len() >= MAX_LINE_LENGTH {
            return Some(String::from_utf8_lossy(&line).into_owned());
        }
    }
}

/// The exit code, or 128 plus the number of the signal that killed the process, as shells report
/// it.
pub(super) fn exit_code(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn splits_long_lines() {
        let long = "x".repeat(MAX_LINE_LENGTH + 3);
        let text = format!("one\n\n{long}\nlast");
        let mut reader = BufReader::with_capacity(100, text.as_bytes());
        let mut lines = Vec::new();
        while let Some(line) = next_line(&mut reader).await {
            lines.push(line);
        }
        assert_eq!(
            lines.iter().map(String::len).collect::<Vec<_>>(),
            [3, 0, MAX_LINE_LENGTH, 3, 4]
        );
    }

    #[tokio::test]
    async fn detects_termination_requested_before_the_wait() {
        let (sender, mut receiver) = watch::channel(None);
        sender
            .send(Some(Termination {
                deadline: Instant::now(),
                pre_stop: false,
            }))
            .unwrap();
        receiver.borrow_and_update();
        termination_requested(&mut receiver).await;
    }
}
