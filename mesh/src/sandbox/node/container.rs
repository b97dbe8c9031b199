//! One container's life: start, output, probes, end, and start again with growing pauses, as its restart policy has it.

use std::{
    path::PathBuf,
    process::{ExitStatus, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Container, LifecycleHandler};
use nix::{
    sys::signal::{Signal, kill, killpg},
    unistd::Pid,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    process::{Child, Command},
    sync::watch,
    task::JoinHandle,
    time::{self, Instant},
};

use super::{board::Board, probe::Check};

/// When to start a container again after it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Restart {
    Always,
    OnFailure,
    Never,
}

/// The order to end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stop {
    /// When it is killed.
    pub(super) deadline: Instant,
    /// Its preStop hook runs first.
    pub(super) pre_stop: bool,
}

/// What a container needs to run.
pub(super) struct Supervisor {
    board: Arc<Board>,
    /// Its place on the board.
    index: usize,
    restart: Restart,
    /// Its `exec::Spec`.
    spec_file: PathBuf,
    startup: Option<Check>,
    readiness: Option<Check>,
    liveness: Option<Check>,
    pre_stop: Option<PreStop>,
}

enum PreStop {
    Sleep(Duration),
    Exec(PathBuf),
    Http(Check),
}

/// A pipe's line never grows beyond this; kubelets cut there too.
const LONGEST_LINE: usize = 16 * 1024;

impl Supervisor {
    pub(super) fn new(
        board: Arc<Board>,
        index: usize,
        container: &Container,
        restart: Restart,
        spec_file: PathBuf,
    ) -> Result<Self> {
        let check = |probe: Option<&_>| probe.map(|probe| Check::new(probe, container)).transpose();
        let place = || format!("container {}", container.name);
        Ok(Self {
            startup: check(container.startup_probe.as_ref()).with_context(place)?,
            readiness: check(container.readiness_probe.as_ref()).with_context(place)?,
            liveness: check(container.liveness_probe.as_ref()).with_context(place)?,
            pre_stop: container
                .lifecycle
                .as_ref()
                .and_then(|lifecycle| lifecycle.pre_stop.as_ref())
                .map(|hook| pre_stop(hook, container, &spec_file))
                .transpose()
                .with_context(place)?,
            board,
            index,
            restart,
            spec_file,
        })
    }

    /// Runs the container until it has ended for good; the exit code.
    pub(super) async fn run(self, mut stop: watch::Receiver<Option<Stop>>) -> i32 {
        let mut pause = Duration::from_secs(1);
        loop {
            let begun = Instant::now();
            let code = match self.run_once(&mut stop).await {
                Ok(code) => code,
                Err(error) => {
                    self.board.notice(format!(
                        "container {} does not start: {error:#}",
                        self.board.container(self.index)
                    ));
                    128
                }
            };
            self.board.update(self.index, |view| {
                (view.running, view.ready, view.started, view.exit_code) =
                    (false, false, false, Some(code));
                view.reason = Some(if code == 0 {
                    "Completed".into()
                } else {
                    format!("exit code {code}")
                });
            });
            let again = match self.restart {
                Restart::Always => true,
                Restart::OnFailure => code != 0,
                Restart::Never => false,
            };
            if !again || stop.borrow().is_some() {
                return code;
            }
            if begun.elapsed() > Duration::from_secs(600) {
                pause = Duration::from_secs(1);
            }
            self.board.notice(format!(
                "container {} ended with code {code}; it starts again in {} s",
                self.board.container(self.index),
                pause.as_secs()
            ));
            tokio::select! {
                () = time::sleep(pause) => {}
                () = stopped(&mut stop) => return code,
            }
            pause = (pause * 2).min(Duration::from_secs(60));
            self.board.update(self.index, |view| view.restarts += 1);
        }
    }

    async fn run_once(&self, stop: &mut watch::Receiver<Option<Stop>>) -> Result<i32> {
        let mut child = super::execute::spawn(&self.spec_file)?;
        let pid = Pid::from_raw(
            child
                .id()
                .context("a child that was not waited for has an id")?
                .cast_signed(),
        );
        let pumps = [
            self.pump(child.stdout.take()),
            self.pump(child.stderr.take()),
        ];
        self.board.update(self.index, |view| {
            (view.running, view.started) = (true, self.startup.is_none());
            view.ready = view.started && self.readiness.is_none();
            view.reason = None;
        });
        let status = tokio::select! {
            status = child.wait() => status?,
            reason = self.probe() => {
                self.board.notice(format!("container {} is ended: {reason:#}", self.board.container(self.index)));
                self.end(&mut child, pid, stop, Stop { deadline: Instant::now() + Duration::from_secs(30), pre_stop: false }).await?
            }
            () = stopped(stop) => {
                let order = stop.borrow().expect("it was just seen");
                self.end(&mut child, pid, stop, order).await?
            }
        };
        // Whatever it started goes with it, as in a container. An empty group is no error.
        let _ = killpg(pid, Signal::SIGKILL);
        for pump in pumps.into_iter().flatten() {
            // A process that left its group may hold the pipe; its lines are not waited for.
            let _ = time::timeout(Duration::from_secs(1), pump).await;
        }
        Ok(exit_code(status))
    }

    /// SIGTERM, after the hook; SIGKILL at the deadline, which a later order can only bring closer.
    async fn end(
        &self,
        child: &mut Child,
        pid: Pid,
        stop: &mut watch::Receiver<Option<Stop>>,
        mut order: Stop,
    ) -> Result<ExitStatus> {
        let hook = self.hook(order.pre_stop);
        tokio::pin!(hook);
        let mut asked = false;
        loop {
            tokio::select! {
                status = child.wait() => return Ok(status?),
                () = &mut hook, if !asked => {
                    asked = true;
                    // It may have ended in this moment.
                    let _ = kill(pid, Signal::SIGTERM);
                }
                () = time::sleep_until(order.deadline) => {
                    let _ = killpg(pid, Signal::SIGKILL);
                    return Ok(child.wait().await?);
                }
                Ok(()) = stop.changed() => {
                    if let Some(later) = *stop.borrow() {
                        order.deadline = order.deadline.min(later.deadline);
                        if !later.pre_stop && !asked {
                            asked = true;
                            let _ = kill(pid, Signal::SIGTERM);
                        }
                    }
                }
            }
        }
    }

    async fn hook(&self, wanted: bool) {
        match &self.pre_stop {
            Some(PreStop::Sleep(duration)) if wanted => time::sleep(*duration).await,
            Some(PreStop::Exec(spec)) if wanted => {
                let mut command = Command::new("/proc/self/exe");
                command
                    .arg("sandbox-exec")
                    .arg(spec)
                    .env_clear()
                    .stdin(Stdio::null())
                    .kill_on_drop(true);
                match command.output().await {
                    Ok(output) if output.status.success() => {}
                    other => self.hook_failed(&format!("{other:?}")),
                }
            }
            Some(PreStop::Http(check)) if wanted => {
                if let Err(error) = check.run(self.board.ip()).await {
                    self.hook_failed(&format!("{error:#}"));
                }
            }
            _ => {}
        }
    }

    fn hook_failed(&self, why: &str) {
        self.board.notice(format!(
            "the preStop hook of container {} failed: {why}",
            self.board.container(self.index)
        ));
    }

    /// Keeps the board in step with the probes; comes back when one says that the container must end.
    async fn probe(&self) -> anyhow::Error {
        if let Some(check) = &self.startup {
            if let Err(error) = self
                .until_success(check, check.period * check.failures)
                .await
            {
                return error.context("its startup probe failed");
            }
            self.board.update(self.index, |view| {
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
        let Some(check) = &self.readiness else {
            return std::future::pending().await;
        };
        // Until it is ready for the first time nobody wants to wait for a period.
        let _ = self.until_success(check, Duration::MAX).await;
        let (mut failures, mut successes) = (0, 1);
        loop {
            self.board.update(self.index, |view| {
                if successes >= check.successes && !view.ready {
                    (view.ready, view.reason) = (true, None);
                } else if failures >= check.failures && view.ready {
                    (view.ready, view.reason) = (false, Some("its readiness probe fails".into()));
                }
            });
            time::sleep(check.period).await;
            match check.run(self.board.ip()).await {
                Ok(()) => (failures, successes) = (0, successes + 1),
                Err(error) => {
                    (failures, successes) = (failures + 1, 0);
                    tracing::debug!(
                        "readiness of {}: {error:#}",
                        self.board.container(self.index)
                    );
                }
            }
        }
    }

    async fn watch_liveness(&self) -> anyhow::Error {
        let Some(check) = &self.liveness else {
            return std::future::pending().await;
        };
        time::sleep(check.initial_delay.max(check.period)).await;
        let mut failures = 0;
        loop {
            match check.run(self.board.ip()).await {
                Ok(()) => failures = 0,
                Err(error) if failures + 1 >= check.failures => {
                    return error.context("its liveness probe failed");
                }
                Err(_) => failures += 1,
            }
            time::sleep(check.period).await;
        }
    }

    /// Probes in quick succession, then ever slower up to the period, until the first success.
    async fn until_success(&self, check: &Check, patience: Duration) -> Result<()> {
        time::sleep(check.initial_delay).await;
        let begun = Instant::now();
        let mut pause = Duration::from_millis(20);
        loop {
            let Err(error) = check.run(self.board.ip()).await else {
                return Ok(());
            };
            if begun.elapsed() > patience {
                return Err(error);
            }
            self.board
                .update(self.index, |view| view.reason = Some(format!("{error:#}")));
            time::sleep(pause).await;
            pause = pause.mul_f64(1.3).min(check.period);
        }
    }

    fn pump(
        &self,
        pipe: Option<impl AsyncRead + Unpin + Send + 'static>,
    ) -> Option<JoinHandle<()>> {
        let (board, index) = (self.board.clone(), self.index);
        pipe.map(|pipe| {
            tokio::spawn(async move {
                let mut lines = BufReader::with_capacity(LONGEST_LINE, pipe);
                while let Some(line) = next_line(&mut lines).await {
                    board.log(index, line).await;
                }
            })
        })
    }
}

/// Comes back once there is an order to stop, also when it was there before.
pub(super) async fn stopped(stop: &mut watch::Receiver<Option<Stop>>) {
    if stop.wait_for(Option::is_some).await.is_err() {
        // Nobody can order any more.
        std::future::pending::<()>().await;
    }
}

/// A line without its break, or the next piece of a long one; `None` at the end or when the pipe breaks.
async fn next_line(reader: &mut BufReader<impl AsyncRead + Unpin>) -> Option<String> {
    let mut line = Vec::new();
    loop {
        let buffer = reader.fill_buf().await.ok()?;
        if buffer.is_empty() {
            return (!line.is_empty()).then(|| String::from_utf8_lossy(&line).into_owned());
        }
        let room = &buffer[..buffer.len().min(LONGEST_LINE - line.len())];
        let end = room.iter().position(|&byte| byte == b'\n');
        line.extend_from_slice(&room[..end.unwrap_or(room.len())]);
        let used = end.map_or(room.len(), |at| at + 1);
        reader.consume(used);
        if end.is_some() || line.len() >= LONGEST_LINE {
            return Some(String::from_utf8_lossy(&line).into_owned());
        }
    }
}

fn pre_stop(
    hook: &LifecycleHandler,
    container: &Container,
    spec_file: &std::path::Path,
) -> Result<PreStop> {
    if let Some(sleep) = &hook.sleep {
        return Ok(PreStop::Sleep(Duration::from_secs(
            sleep.seconds.try_into().unwrap_or(0),
        )));
    }
    if let Some(http) = &hook.http_get {
        return Ok(PreStop::Http(Check::hook(http, container)?));
    }
    let exec = hook
        .exec
        .as_ref()
        .context("the sandbox knows the preStop hooks sleep, exec and httpGet")?;
    let mut spec: crate::sandbox::exec::Spec = serde_json::from_slice(&std::fs::read(spec_file)?)?;
    spec.argv = exec.command.clone().unwrap_or_default();
    let file = spec_file.with_extension("pre-stop");
    std::fs::write(&file, serde_json::to_vec(&spec)?)?;
    Ok(PreStop::Exec(file))
}

/// As shells count: 128 and the signal's number where a signal ended it.
pub(super) fn exit_code(status: ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_come_whole_and_long_ones_in_pieces() {
        let long = "x".repeat(LONGEST_LINE + 3);
        let text = format!("one\n\n{long}\nlast");
        let mut reader = BufReader::with_capacity(100, text.as_bytes());
        let mut lines = Vec::new();
        while let Some(line) = next_line(&mut reader).await {
            lines.push(line);
        }
        assert_eq!(
            lines.iter().map(String::len).collect::<Vec<_>>(),
            [3, 0, LONGEST_LINE, 3, 4]
        );
    }

    #[tokio::test]
    async fn a_stop_that_was_ordered_before_counts() {
        let (sender, mut receiver) = watch::channel(None);
        sender
            .send(Some(Stop {
                deadline: Instant::now(),
                pre_stop: false,
            }))
            .unwrap();
        receiver.borrow_and_update();
        stopped(&mut receiver).await;
    }
}
