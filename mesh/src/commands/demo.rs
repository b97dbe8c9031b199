//! `mesh demo`: runs the walkthrough's manifests in a sandbox and prints the output of the
//! containers. One blocking loop receives the messages of the sandbox and signals.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use futures::future::select_all;
use tokio::signal::unix::{SignalKind, signal};

use serde_json::Value;

use self::{
    screen::{Detail, Screen},
    story::{Item, Story},
    summary::Summary,
};
use crate::terminal;
use diy_mesh_sandbox::{
    Error, Sandbox,
    manifest::{self, Files},
    protocol::Message,
    socket::{self, Server},
};

mod names;
mod order;
mod screen;
mod story;
mod summary;
#[cfg(test)]
mod tests;

/// The arguments of `mesh demo`.
#[derive(Args, Debug)]
pub struct Arguments {
    /// Stop after this many seconds; the exit code is 0 if all pods became ready
    #[arg(long = "for", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    seconds: Option<u64>,
    /// Print the summary only
    #[arg(long)]
    quiet: bool,
    /// Print all exchanges in full, also exchanges of clients outside the pods, and all other
    /// output
    #[arg(long, conflicts_with = "quiet")]
    full: bool,
    /// Like --full, but only for this workload, pod, container or namespace, for example
    /// http-client or proxy; repeatable
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Run the manifests in this directory instead of the walkthrough's: every kustomization.yaml in
    /// it or, if there is none, every YAML file
    #[arg(long, value_name = "DIR")]
    manifests: Option<PathBuf>,
    /// Add the objects in this YAML file, or merge them into the objects of the same kind and name:
    /// fields by name, lists of named items by the name of the item, null removes a field; `-` is
    /// standard input; repeatable
    #[arg(long, value_name = "FILE")]
    set: Vec<PathBuf>,
}

/// An input of the demo loop.
enum DemoEvent {
    Sandbox(Box<Message>),
    /// The clients are applied. Follows the messages about their pods.
    Clients(Result<(), Error>),
    Signal,
}

/// The workloads that no Service selects. They start when the pods of the Services are ready, so that
/// their first requests find endpoints.
enum Clients {
    Waiting(Vec<Value>),
    Starting,
    Started,
}

/// The interval of progress messages until all pods are ready.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// The story begins after this time without a change of a pod even if one is not ready.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The time between SIGTERM and SIGKILL at the end of the demo.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// Runs the demo until it ends, or until the reader of standard output exits.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let mut objects = match &arguments.manifests {
        Some(directory) => Files::read(directory).and_then(|files| files.objects()).with_context(|| {
            let directory = directory.display();
            format!("invalid --manifests {directory}: expected a directory of YAML files with the mesh and its applications")
        })?,
        None => manifest::embedded().objects()?,
    };
    for path in &arguments.set {
        set(&mut objects, path).with_context(|| format!("invalid --set {}", path.display()))?;
    }
    check_only(&arguments.only, &objects)?;
    // The bounded queue slows the programs down if the output is slow.
    let (sender, demo_events) = sync_channel(1024);
    watch_signals(sender.clone())?;
    let started_at = Instant::now();
    let detail = match () {
        () if arguments.quiet => Detail::Summary,
        () if arguments.full || !arguments.only.is_empty() => Detail::Everything,
        () => Detail::Story,
    };
    let json = request_json_dumps(&mut objects);
    let mut screen = Screen::new(detail, arguments.only.clone(), json);
    let clients = order::take_clients(&mut objects);
    screen.print_status("starting a sandbox; Ctrl-C stops it and removes all of its resources")?;
    let messages = sender.clone();
    let sandbox = Sandbox::start_with(
        &programs()?,
        Box::new(move |message| {
            // Fails only while the demo exits.
            let _ = messages.send(DemoEvent::Sandbox(Box::new(message.clone())));
            false
        }),
    )?;
    let server = serve(&sandbox, &mut screen)?;
    sandbox.apply_objects(objects)?;
    let deadline = arguments
        .seconds
        .map(|seconds| started_at + Duration::from_secs(seconds));
    let mut demo = Demo {
        sandbox: Arc::new(sandbox),
        events: sender,
        clients: if clients.is_empty() {
            Clients::Started
        } else {
            Clients::Waiting(clients)
        },
        server,
        screen,
        story: Story::default(),
        summary: Summary::default(),
        started_at,
        changed_at: started_at,
        ready_after: None,
    };
    let reason = demo.run(&demo_events, deadline)?;
    demo.finish(reason, &demo_events)
}

/// Serves `mesh why --demo` and the like. The demo runs without, if that is not possible.
fn serve(sandbox: &Sandbox, screen: &mut Screen) -> Result<Option<Server>> {
    match sandbox.serve(&socket::demo_socket()) {
        Ok(server) => {
            screen.name_why();
            Ok(Some(server))
        }
        Err(error) => {
            let text = format!("`mesh why --demo` does not know this demo: {error}");
            screen.print_status(&text)?;
            Ok(None)
        }
    }
}

/// Why the demo stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExitReason {
    Timeout,
    Signal,
}

struct Demo {
    sandbox: Arc<Sandbox>,
    events: SyncSender<DemoEvent>,
    clients: Clients,
    /// Answers `mesh why --demo` and the like.
    server: Option<Server>,
    screen: Screen,
    story: Story,
    summary: Summary,
    started_at: Instant,
    /// The time of the last change of a pod.
    changed_at: Instant,
    /// The time until all pods were ready for the first time.
    ready_after: Option<Duration>,
}

impl Demo {
    fn run(
        &mut self,
        demo_events: &Receiver<DemoEvent>,
        deadline: Option<Instant>,
    ) -> Result<ExitReason> {
        let mut next_progress = self.started_at + PROGRESS_INTERVAL;
        loop {
            let story_deadline = self.story.next_deadline().filter(|_| !self.is_starting());
            let deadlines = [deadline, story_deadline];
            let next = deadlines
                .into_iter()
                .flatten()
                .fold(next_progress, Instant::min);
            match demo_events.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(DemoEvent::Signal) => return Ok(ExitReason::Signal),
                Ok(DemoEvent::Sandbox(message)) => {
                    if let Message::Failed { reason } = &*message {
                        bail!("the sandbox failed: {reason}");
                    }
                    self.handle(*message)?;
                }
                Ok(DemoEvent::Clients(applied)) => {
                    applied?;
                    self.clients = Clients::Started;
                    self.check_ready()?;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("the sandbox is disconnected"),
            }
            if !self.is_starting() {
                let items = self.story.take_complete(Instant::now());
                self.print(&items)?;
            }
            if Instant::now() >= next_progress {
                next_progress += PROGRESS_INTERVAL;
                self.print_progress()?;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(ExitReason::Timeout);
            }
        }
    }

    /// Whether exchanges wait: their story begins when all pods are ready.
    fn is_starting(&self) -> bool {
        self.screen.detail() == Detail::Story
            && self.ready_after.is_none()
            && self.changed_at.elapsed() < START_TIMEOUT
    }

    fn print_progress(&mut self) -> Result<()> {
        if self.ready_after.is_some() {
            return Ok(());
        }
        let waiting = self.sandbox.view().not_ready();
        waiting
            .iter()
            .try_for_each(|pod| self.screen.print_status(&format!("waiting for {pod}")))
    }

    fn handle(&mut self, message: Message) -> Result<()> {
        self.summary.record_message(&message);
        match message {
            Message::Log(line) => {
                self.story.record_line(line, Instant::now());
                Ok(())
            }
            Message::Notice(text) => self.screen.print_status(&text),
            Message::Pod(pod) => {
                self.changed_at = Instant::now();
                self.story.record_pod(&pod);
                self.screen.pod(&pod)?;
                self.check_ready()
            }
            _ => Ok(()),
        }
    }

    /// Starts the clients, or reports that everything is ready, once all present pods are ready.
    fn check_ready(&mut self) -> Result<()> {
        if self.ready_after.is_some() || !self.summary.all_ready() {
            return Ok(());
        }
        match &mut self.clients {
            Clients::Waiting(objects) => {
                let objects = std::mem::take(objects);
                self.clients = Clients::Starting;
                let (sandbox, events) = (self.sandbox.clone(), self.events.clone());
                // This thread has to receive the messages that precede the reply.
                let apply = move || {
                    // Fails only while the demo exits.
                    let _ = events.send(DemoEvent::Clients(sandbox.apply_objects(objects)));
                };
                thread::Builder::new().name("clients".into()).spawn(apply)?;
                Ok(())
            }
            Clients::Starting => Ok(()),
            Clients::Started => {
                let elapsed = self.started_at.elapsed();
                self.ready_after = Some(elapsed);
                let text = format!("everything is ready after {:.1} s", elapsed.as_secs_f64());
                self.screen.print_ready(&text)
            }
        }
    }

    fn print(&mut self, items: &[Item]) -> Result<()> {
        for item in items {
            if let Item::Exchange(exchange) = item {
                self.summary.record_exchange(exchange, &self.story);
            }
            self.screen.print(item, &self.story)?;
        }
        Ok(())
    }

    /// Shuts the sandbox down and prints the summary. A second signal exits immediately.
    fn finish(mut self, reason: ExitReason, demo_events: &Receiver<DemoEvent>) -> Result<ExitCode> {
        let rest = self.story.take_all();
        self.print(&rest)?;
        // Also if a second signal ends the process.
        self.server = None;
        let not_ready = self.sandbox.view().not_ready();
        thread::scope(|scope| {
            let stopping = scope.spawn(|| self.sandbox.shut_down(SHUTDOWN_TIMEOUT));
            while !stopping.is_finished() {
                if let Ok(DemoEvent::Signal) = demo_events.recv_timeout(Duration::from_millis(20)) {
                    // The sandbox exits with this process.
                    std::process::exit(130);
                }
            }
            stopping
                .join()
                .expect("shut_down does not panic")
                .context("failed to shut the sandbox down")
        })?;
        let elapsed = self.started_at.elapsed();
        let mut text = self.summary.text(elapsed, self.ready_after) + "\n";
        let failed = reason == ExitReason::Timeout && self.ready_after.is_none();
        if failed {
            text += "not everything became ready:\n";
            text.extend(not_ready.iter().map(|pod| format!("  {pod}\n")));
        }
        terminal::write(&text)?;
        Ok(if failed {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        })
    }
}

/// Adds or changes the objects in a file.
fn set(objects: &mut Vec<Value>, path: &Path) -> Result<()> {
    let text = if path == Path::new("-") {
        std::io::read_to_string(std::io::stdin())?
    } else {
        std::fs::read_to_string(path)?
    };
    Ok(manifest::set(objects, &text, path)?)
}

/// Makes the proxies print JSON dumps, which the demo formats itself. Returns the namespaces and
/// names of the workloads whose manifests already request a format: `json` is printed as it is.
fn request_json_dumps(objects: &mut [Value]) -> BTreeSet<(String, String)> {
    const ANNOTATION: &str = "diy-service-mesh/dump-format";
    let mut json = BTreeSet::new();
    for object in objects {
        let text = |value: &Value, default: &str| value.as_str().unwrap_or(default).to_owned();
        let namespace = text(&object["metadata"]["namespace"], "default");
        let name = text(&object["metadata"]["name"], "");
        let pod = match object["kind"].as_str() {
            Some("Pod") => object,
            Some("Deployment") => &mut object["spec"]["template"],
            _ => continue,
        };
        let annotations = &mut pod["metadata"]["annotations"];
        match annotations[ANNOTATION].as_str() {
            Some(format) if format.eq_ignore_ascii_case("json") => {
                json.insert((namespace, name));
            }
            Some(_) => {}
            None => annotations[ANNOTATION] = "json".into(),
        }
    }
    json
}

/// Fails if nothing has a name that `--only` selects. A pod's name begins with the name of its
/// workload.
fn check_only(only: &[String], objects: &[Value]) -> Result<()> {
    let (mut workloads, mut others) = (BTreeSet::new(), BTreeSet::from(story::PROXY_CONTAINERS));
    for object in objects {
        let Some(pod) = order::pod(object) else {
            continue;
        };
        workloads.extend(object["metadata"]["name"].as_str());
        others.extend(object["metadata"]["namespace"].as_str());
        let lists = ["containers", "initContainers"].map(|list| pod["spec"][list].as_array());
        let containers = lists.into_iter().flatten().flatten();
        others.extend(containers.filter_map(|container| container["name"].as_str()));
    }
    for name in only {
        let is_pod = |workload: &&str| {
            let suffix = name.strip_prefix(*workload);
            suffix.is_some_and(|suffix| suffix.is_empty() || suffix.starts_with('-'))
        };
        if !others.contains(&**name) && !workloads.iter().any(is_pod) {
            let workloads: Vec<_> = workloads.into_iter().collect();
            bail!(
                "invalid --only {name}: no workload, pod, container or namespace has this name; the workloads are {}",
                workloads.join(", ")
            );
        }
    }
    Ok(())
}

/// The directory of this binary, which contains the other binaries.
fn programs() -> Result<PathBuf> {
    let path = std::env::current_exe().context("failed to find the path of this binary")?;
    Ok(path
        .parent()
        .context("the path of this binary has no directory")?
        .to_owned())
}

fn watch_signals(sender: SyncSender<DemoEvent>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let guard = runtime.enter();
    let kinds = [
        SignalKind::interrupt(),
        SignalKind::terminate(),
        SignalKind::hangup(),
    ];
    let signals = kinds.into_iter().map(signal);
    let mut signals = signals.collect::<std::io::Result<Vec<_>>>()?;
    drop(guard);
    let wait = move || {
        loop {
            let next = signals.iter_mut().map(|signal| Box::pin(signal.recv()));
            runtime.block_on(select_all(next));
            if sender.send(DemoEvent::Signal).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("signals".into()).spawn(wait)?;
    Ok(())
}
