//! The lifecycle of one container: start, output, probes, termination, and a restart a second after
//! it has exited.

use std::{
    convert::Infallible, future::pending, io, os::unix::process::ExitStatusExt, path::PathBuf,
    process::ExitStatus, sync::Arc, time::Duration,
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
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{self, Instant},
};

use super::{probe::Prober, status::PodStatus};
use crate::protocol::{LogLine, Message, Source};

/// When a container receives SIGKILL, once its termination is requested.
pub(super) type Termination = watch::Receiver<Option<Instant>>;

/// The role of a container in its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Runs to completion before the application containers start.
    Init,
    /// Starts before the application containers and terminates after them.
    Sidecar,
    /// An application container.
    App,
}

/// Runs one container.
pub(super) struct Supervisor {
    status: Arc<PodStatus>,
    /// The index of the container in the status.
    index: usize,
    pub(super) role: Role,
    source: Source,
    /// Receives the output.
    messages: mpsc::Sender<Message>,
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
    /// The supervisor of the container at `index` of the pod's status.
    pub(super) fn new(
        status: Arc<PodStatus>,
        index: usize,
        container: &Container,
        role: Role,
        messages: mpsc::Sender<Message>,
        spec_file: PathBuf,
    ) -> Result<Self> {
        let (source, ip) = {
            let view = status.view();
            let ip = view.ip.as_ref().context("the pod has no address")?;
            (view.source(&view.containers[index]), ip.parse()?)
        };
        let prober = |probe: Option<&_>| {
            probe
                .map(|probe| Prober::new(probe, container, ip))
                .transpose()
        };
        let hook = container.lifecycle.as_ref();
        let hook = hook.and_then(|lifecycle| lifecycle.pre_stop.as_ref());
        let pre_stop = hook.map(|hook| PreStop::new(hook, container, ip));
        Ok(Self {
            startup: prober(container.startup_probe.as_ref())?,
            readiness: prober(container.readiness_probe.as_ref())?,
            liveness: prober(container.liveness_probe.as_ref())?,
            pre_stop: pre_stop.transpose()?,
            status,
            index,
            role,
            source,
            messages,
            spec_file,
        })
    }

    /// Runs the container, again after each exit, until its termination. An init container ends with
    /// exit code 0.
    pub(super) async fn run(self, mut termination: Termination) {
        loop {
            let code = match self.run_once(&mut termination).await {
                Ok(code) => code,
                Err(error) => {
                    self.notice(&format!("failed to start: {error:#}"));
                    128
                }
            };
            let is_completed = self.role == Role::Init && code == 0;
            self.status.update_container(self.index, |view| {
                (view.running, view.started) = (false, false);
                (view.ready, view.exit_code) = (is_completed, Some(code));
                view.reason = Some(format!("exit code {code}"));
            });
            if is_completed || termination.borrow().is_some() {
                return;
            }
            self.notice(&format!("exited with code {code}, restarting"));
            tokio::select! {
                () = time::sleep(RESTART_DELAY) => {}
                _ = requested(&mut termination) => return,
            }
            self.status
                .update_container(self.index, |view| view.restarts += 1);
        }
    }

    /// Waits until the container is started, as its startup probe finds.
    pub(super) fn started(&self) -> impl Future<Output = ()> + use<> {
        let (mut views, index) = (self.status.watch(), self.index);
        async move {
            // Fails only if the pod is removed.
            let _ = views.wait_for(|view| view.containers[index].started).await;
        }
    }

    async fn run_once(&self, termination: &mut Termination) -> Result<i32> {
        let mut child = super::execute::spawn(&self.spec_file)?;
        let pid = child.id().expect("the child has not been awaited");
        let pid = Pid::from_raw(pid.cast_signed());
        let output = [
            self.forward_lines(child.stdout.take()),
            self.forward_lines(child.stderr.take()),
        ];
        self.status.update_container(self.index, |view| {
            (view.running, view.started) = (true, self.startup.is_none());
            view.ready = view.started && self.readiness.is_none() && self.role != Role::Init;
            view.reason = None;
        });
        let status = tokio::select! {
            status = child.wait() => status?,
            reason = self.probe() => {
                self.notice(&format!("killed: {reason:#}"));
                let _ = killpg(pid, Signal::SIGKILL);
                child.wait().await?
            }
            deadline = requested(termination) => self.terminate(&mut child, pid, deadline).await?,
        };
        // Kills the remaining processes of the container. Fails if there are none.
        let _ = killpg(pid, Signal::SIGKILL);
        for task in output.into_iter().flatten() {
            // A process that has left the process group can keep the pipe open.
            let _ = time::timeout(DRAIN_TIMEOUT, task).await;
        }
        Ok(exit_code(status))
    }

    /// Runs the preStop hook, sends SIGTERM, and sends SIGKILL at the deadline.
    async fn terminate(
        &self,
        child: &mut Child,
        pid: Pid,
        deadline: Instant,
    ) -> io::Result<ExitStatus> {
        let hook_and_signal = async {
            self.run_pre_stop().await;
            // Fails if the process has exited.
            let _ = kill(pid, Signal::SIGTERM);
            pending::<Infallible>().await
        };
        tokio::select! {
            status = child.wait() => return status,
            never = hook_and_signal => match never {},
            () = time::sleep_until(deadline) => {}
        }
        let _ = killpg(pid, Signal::SIGKILL);
        child.wait().await
    }

    async fn run_pre_stop(&self) {
        match &self.pre_stop {
            None => {}
            Some(PreStop::Sleep(duration)) => time::sleep(*duration).await,
            Some(PreStop::Http(prober)) => {
                if let Err(error) = prober.probe().await {
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
            self.status.update_container(self.index, |view| {
                view.started = true;
                view.ready = self.readiness.is_none();
                view.reason = None;
            });
        }
        tokio::select! {
            never = self.watch_readiness() => match never {},
            error = self.watch_liveness() => error.context("liveness probe failed"),
        }
    }

    async fn watch_readiness(&self) -> Infallible {
        let Some(prober) = &self.readiness else {
            return pending().await;
        };
        loop {
            // The first success does not wait for a full period.
            let _ = self.probe_until_success(prober, Duration::MAX).await;
            self.status.update_container(self.index, |view| {
                (view.ready, view.reason) = (true, None);
            });
            let error = probe_until_failure(prober).await;
            self.status.update_container(self.index, |view| {
                (view.ready, view.reason) = (false, Some(format!("{error:#}")));
            });
        }
    }

    async fn watch_liveness(&self) -> anyhow::Error {
        match &self.liveness {
            Some(prober) => probe_until_failure(prober).await,
            None => pending().await,
        }
    }

    /// Probes at intervals that grow from `MIN_PROBE_INTERVAL` to the probe's period.
    async fn probe_until_success(&self, prober: &Prober, timeout: Duration) -> Result<()> {
        let started_at = Instant::now();
        let mut interval = MIN_PROBE_INTERVAL;
        loop {
            let Err(error) = prober.probe().await else {
                return Ok(());
            };
            if started_at.elapsed() > timeout {
                return Err(error);
            }
            let reason = format!("{error:#}");
            self.status
                .update_container(self.index, |view| view.reason = Some(reason));
            time::sleep(interval).await;
            interval = interval.mul_f64(1.3).min(prober.period);
        }
    }

    fn forward_lines(
        &self,
        pipe: Option<impl AsyncRead + Unpin + Send + 'static>,
    ) -> Option<JoinHandle<()>> {
        let (messages, source) = (self.messages.clone(), self.source.clone());
        let mut lines = BufReader::with_capacity(MAX_LINE_LENGTH, pipe?);
        Some(tokio::spawn(async move {
            while let Some(line) = next_line(&mut lines).await {
                let source = source.clone();
                // Waits while the client's queue is full.
                let _ = messages.send(Message::Log(LogLine { source, line })).await;
            }
        }))
    }

    fn notice(&self, text: &str) {
        let Source {
            namespace,
            pod,
            container,
            ..
        } = &self.source;
        self.status
            .notice(format!("container {namespace}/{pod}[{container}]: {text}"));
    }
}

impl PreStop {
    fn new(hook: &LifecycleHandler, container: &Container, ip: std::net::Ipv4Addr) -> Result<Self> {
        if let Some(sleep) = &hook.sleep {
            let seconds = sleep.seconds.try_into().unwrap_or(0);
            return Ok(Self::Sleep(Duration::from_secs(seconds)));
        }
        let http = hook
            .http_get
            .as_ref()
            .context("unsupported preStop hook: the sandbox supports sleep and httpGet")?;
        Ok(Self::Http(Prober::pre_stop(http, container, ip)?))
    }
}

/// Probes until the probe has failed several times in a row. Returns the last failure.
async fn probe_until_failure(prober: &Prober) -> anyhow::Error {
    let mut failures = 0;
    loop {
        time::sleep(prober.period).await;
        match prober.probe().await {
            Ok(()) => failures = 0,
            Err(error) if failures + 1 >= prober.failure_threshold => return error,
            Err(_) => failures += 1,
        }
    }
}

/// Waits until a termination is requested, also if that has happened before. Returns the deadline.
pub(super) async fn requested(termination: &mut Termination) -> Instant {
    match termination
        .wait_for(Option::is_some)
        .await
        .map(|deadline| *deadline)
    {
        Ok(Some(deadline)) => deadline,
        // The sender is dropped, so no request can follow.
        _ => pending().await,
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
}
