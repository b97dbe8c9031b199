//! The client of a sandbox: starts it, applies objects, and records the state and output of its
//! pods. The API is blocking, so that tests and the demo are sequential code, and thread-safe.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
    process::Child,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{
    launch::{LaunchError, launch},
    lock, manifest,
    page::Page,
    protocol::{Call, LogLine, Message, Output, PodView, Reply, Request},
    socket::{self, Server},
};

/// A running sandbox. Dropping it kills all of its processes.
pub struct Sandbox {
    child: Mutex<Child>,
    shared: Arc<Shared>,
}

/// A snapshot of the state of a sandbox.
#[derive(Debug, Default)]
pub struct View {
    /// By `namespace/name`.
    pub pods: BTreeMap<String, PodView>,
    /// The output lines by `namespace/name` and container. Lines of removed pods are kept.
    pub logs: BTreeMap<String, BTreeMap<String, Vec<String>>>,
    /// Notices about failures and restarts.
    pub notices: Vec<String>,
    replies: HashMap<u64, Result<Reply, String>>,
    /// Why the node has exited.
    exited: Option<String>,
}

/// An error of a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The sandbox does not start.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The manifests are invalid.
    #[error(transparent)]
    Manifest(#[from] manifest::Error),
    /// The node rejected a request.
    #[error("{0}")]
    Rejected(String),
    /// The node has exited.
    #[error("the sandbox has exited: {0}")]
    Exited(String),
    /// A condition was not met in time.
    #[error("timed out after {} s waiting for: {condition}; {state}", .timeout.as_secs())]
    Timeout {
        /// The condition.
        condition: String,
        /// The timeout.
        timeout: Duration,
        /// The state of the pods at the timeout.
        state: String,
    },
}

/// The time to exit after the control socket is closed, or after all processes are killed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// The number of lines of each container in the report of a failed test.
const REPORTED_LINES: usize = 40;

/// The state that the threads of the connection to the node share.
pub(crate) struct Shared {
    writer: Mutex<UnixStream>,
    next_id: AtomicU64,
    view: Mutex<View>,
    changed: Condvar,
}

/// A callback that receives each message before it is recorded, and `Failed` once at the end. A log
/// line is recorded only if it returns true.
type Listener = Box<dyn FnMut(&Message) -> bool + Send>;

impl Sandbox {
    /// Starts an empty sandbox. `programs` is the directory of the binaries.
    pub fn start(programs: &Path) -> Result<Self, Error> {
        Self::start_with(programs, Box::new(|_| true))
    }

    /// Starts an empty sandbox with a listener, which runs on a dedicated thread.
    pub fn start_with(programs: &Path, listener: Listener) -> Result<Self, Error> {
        let launched = launch(programs)?;
        let shared = Arc::new(Shared {
            writer: Mutex::new(launched.writer),
            next_id: AtomicU64::new(1),
            view: Mutex::default(),
            changed: Condvar::new(),
        });
        let reader_shared = shared.clone();
        thread::Builder::new()
            .name("sandbox-messages".into())
            .spawn(move || read_messages(launched.reader, &reader_shared, listener))
            .map_err(LaunchError::Io)?;
        Ok(Self {
            child: Mutex::new(launched.child),
            shared,
        })
    }

    /// Creates or replaces the objects of a YAML stream.
    pub fn apply(&self, yaml: &str) -> Result<(), Error> {
        self.apply_objects(manifest::parse(yaml)?)
    }

    /// Creates or replaces objects.
    pub fn apply_objects(&self, objects: Vec<Value>) -> Result<(), Error> {
        self.shared.call(Call::Apply { objects }).map(drop)
    }

    /// Deletes an object. A workload replaces a deleted `Pod`.
    pub fn delete(&self, kind: &str, namespace: &str, name: &str) -> Result<(), Error> {
        let (kind, key) = (kind.into(), (namespace.into(), name.into()));
        self.shared.call(Call::Delete { kind, key }).map(drop)
    }

    /// Changes the number of replicas of a Deployment.
    pub fn scale(&self, namespace: &str, name: &str, replicas: usize) -> Result<(), Error> {
        let key = (namespace.into(), name.into());
        self.shared.call(Call::Scale { key, replicas }).map(drop)
    }

    /// Runs a command in a container to completion.
    pub fn exec(&self, pod: &PodView, container: &str, argv: &[&str]) -> Result<Output, Error> {
        let call = Call::Exec {
            pod: (pod.namespace.clone(), pod.name.clone()),
            container: container.into(),
            argv: argv.iter().map(|&argument| argument.to_owned()).collect(),
        };
        match self.shared.call(call)? {
            Reply::Output(output) => Ok(output),
            other => Err(Error::Rejected(format!("unexpected reply: {other:?}"))),
        }
    }

    /// Reads a page of the admin server of a pod's proxy, as a port-forward does. `path` may have a
    /// query.
    pub fn admin_page(&self, pod: &PodView, path: &str) -> Result<Page, Error> {
        let pod = (pod.namespace.clone(), pod.name.clone());
        self.shared.admin_page(pod, path.into())
    }

    /// Serves the pods of the sandbox to other processes of this user, at this socket, until the
    /// server is dropped.
    pub fn serve(&self, path: &Path) -> Result<Server, socket::Error> {
        Server::start(path, self.shared.clone())
    }

    /// Waits until `find` returns a value. The timeout error names the `condition`.
    pub fn wait<T>(
        &self,
        condition: &str,
        timeout: Duration,
        mut find: impl FnMut(&View) -> Option<T>,
    ) -> Result<T, Error> {
        let deadline = Instant::now() + timeout;
        let mut view = self.view();
        loop {
            if let Some(found) = find(&view) {
                return Ok(found);
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Err(Error::Timeout {
                    condition: condition.into(),
                    timeout,
                    state: view.describe(),
                });
            }
            view = self.shared.next_change(view, remaining)?;
        }
    }

    /// Waits until at least one pod exists and every pod is ready.
    pub fn wait_settled(&self, timeout: Duration) -> Result<(), Error> {
        self.wait("every pod is ready", timeout, |view| {
            let is_any = view.active().next().is_some();
            (is_any && view.active().all(|pod| pod.ready)).then_some(())
        })
    }

    /// Locks the current state.
    pub fn view(&self) -> MutexGuard<'_, View> {
        self.shared.view()
    }

    /// Terminates all pods, then the node. Processes that run longer than `timeout` are killed.
    pub fn shut_down(&self, timeout: Duration) -> Result<(), Error> {
        let grace_milliseconds = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        match self.shared.call(Call::Shutdown { grace_milliseconds }) {
            Ok(_) | Err(Error::Exited(_)) => {}
            Err(error) => return Err(error),
        }
        self.wait_for_child(timeout);
        Ok(())
    }

    /// The process id of the node's outermost process.
    pub fn process_id(&self) -> u32 {
        lock(&self.child).id()
    }

    /// Waits until the node exits, which it does in this time. Kills it `EXIT_TIMEOUT` later.
    fn wait_for_child(&self, timeout: Duration) {
        let mut child = lock(&self.child);
        let deadline = Instant::now() + timeout + EXIT_TIMEOUT;
        while let Ok(None) = child.try_wait() {
            if Instant::now() > deadline {
                // All other processes of the sandbox are killed with it.
                let _ = child.kill();
                let _ = child.wait();
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Shared {
    /// Locks the current state.
    pub(crate) fn view(&self) -> MutexGuard<'_, View> {
        lock(&self.view)
    }

    /// Reads a page of the admin server of a pod's proxy.
    pub(crate) fn admin_page(&self, pod: (String, String), path: String) -> Result<Page, Error> {
        match self.call(Call::AdminPage { pod, path })? {
            Reply::Page(page) => Ok(page),
            other => Err(Error::Rejected(format!("unexpected reply: {other:?}"))),
        }
    }

    fn call(&self, call: Call) -> Result<Reply, Error> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mut line =
            serde_json::to_vec(&Request { id, call }).expect("requests serialize to JSON");
        line.push(b'\n');
        let written = lock(&self.writer).write_all(&line);
        let mut view = self.view();
        written.map_err(|error| Error::Exited(view.exited.clone().unwrap_or(error.to_string())))?;
        loop {
            if let Some(reply) = view.replies.remove(&id) {
                return reply.map_err(Error::Rejected);
            }
            view = self.next_change(view, Duration::MAX)?;
        }
    }

    /// Waits for the next change of the state, at most `timeout`. Fails if the node has exited.
    fn next_change<'a>(
        &self,
        view: MutexGuard<'a, View>,
        timeout: Duration,
    ) -> Result<MutexGuard<'a, View>, Error> {
        if let Some(reason) = &view.exited {
            return Err(Error::Exited(reason.clone()));
        }
        let result = self.changed.wait_timeout(view, timeout);
        Ok(result.unwrap_or_else(PoisonError::into_inner).0)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("state of the sandbox:\n{}", self.view().report());
        }
        // The node exits when the control socket closes.
        let _ = lock(&self.shared.writer).shutdown(std::net::Shutdown::Both);
        self.wait_for_child(Duration::ZERO);
    }
}

impl View {
    /// The output lines of a container.
    pub fn lines(&self, pod: &PodView, container: &str) -> &[String] {
        let logs = self.logs.get(&pod.full_name());
        let lines = logs.and_then(|logs| logs.get(container));
        lines.map_or(&[], Vec::as_slice)
    }

    /// The pods of a workload that are not terminating.
    pub fn pods_of(&self, namespace: &str, workload: &str) -> Vec<PodView> {
        let is_own = |pod: &&PodView| pod.namespace == namespace && pod.workload == workload;
        self.active().filter(is_own).cloned().collect()
    }

    /// The pods that are not ready, with the reasons.
    pub fn not_ready(&self) -> Vec<String> {
        let waiting = self.active().filter(|pod| !pod.ready);
        let texts = waiting.map(|pod| {
            let reason = pod.reason.as_deref().unwrap_or("unknown reason");
            format!("{} ({}): {reason}", pod.full_name(), pod.phase)
        });
        texts.collect()
    }

    /// The pods that are not terminating.
    pub(crate) fn active(&self) -> impl Iterator<Item = &PodView> {
        self.pods.values().filter(|pod| !pod.terminating)
    }

    fn describe(&self) -> String {
        let waiting = self.not_ready();
        if waiting.is_empty() {
            format!("{} pods, all ready", self.pods.len())
        } else {
            format!("not ready: {}", waiting.join("; "))
        }
    }

    /// The state of all pods, the notices and the last lines of each container, for failed tests.
    fn report(&self) -> String {
        let mut out = format!("{}\n", self.describe());
        for notice in &self.notices {
            out += &format!("! {notice}\n");
        }
        for (pod, containers) in &self.logs {
            for (container, lines) in containers {
                for line in &lines[lines.len().saturating_sub(REPORTED_LINES)..] {
                    out += &format!("{pod}[{container}] {line}\n");
                }
            }
        }
        out
    }

    fn record(&mut self, message: Message, keep: bool) {
        match message {
            Message::Pod(pod) => drop(self.pods.insert(pod.full_name(), pod)),
            Message::PodRemoved { namespace, name } => {
                drop(self.pods.remove(&format!("{namespace}/{name}")))
            }
            Message::Log(LogLine { source, line }) if keep => {
                let pod = format!("{}/{}", source.namespace, source.pod);
                let containers = self.logs.entry(pod).or_default();
                containers.entry(source.container).or_default().push(line);
            }
            Message::Notice(text) => self.notices.push(text),
            Message::Reply { id, result } => drop(self.replies.insert(id, result)),
            Message::Failed { reason } => self.exited = Some(reason),
            Message::Log(_) | Message::MapIds { .. } | Message::Started => {}
        }
    }
}

fn read_messages(reader: BufReader<UnixStream>, shared: &Shared, mut listener: Listener) {
    let read = || -> io::Result<()> {
        for line in reader.lines() {
            let message = serde_json::from_str(&line?)?;
            // `Failed` is sent to the listener once, below.
            let keep = matches!(message, Message::Failed { .. }) || listener(&message);
            lock(&shared.view).record(message, keep);
            shared.changed.notify_all();
        }
        Ok(())
    };
    let reason = match read() {
        Ok(()) => "the process exited".to_owned(),
        Err(error) => error.to_string(),
    };
    let mut view = lock(&shared.view);
    let reason = view.exited.get_or_insert(reason).clone();
    drop(view);
    listener(&Message::Failed { reason });
    shared.changed.notify_all();
}
