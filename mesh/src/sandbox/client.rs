//! The outer half of a sandbox: `Sandbox` starts it, gives it objects, and knows what its pods do and print. It blocks rather
//! than being async, so that tests and the demo read as a list of steps; any number of threads may use one.

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
    manifest,
    protocol::{Answer, Call, Message, Output, PodView, Request},
};

/// A running sandbox; dropping it ends all of its processes.
pub struct Sandbox {
    child: Mutex<Child>,
    writer: Mutex<UnixStream>,
    shared: Arc<Shared>,
    next: AtomicU64,
}

/// What is known of a sandbox in a moment.
#[derive(Debug, Default)]
pub struct View {
    /// By `namespace/name`.
    pub pods: BTreeMap<String, PodView>,
    /// The lines that containers have printed, by `namespace/name`, then by container; those of pods that are gone stay.
    pub logs: BTreeMap<String, BTreeMap<String, Vec<String>>>,
    /// What the sandbox wants people to know.
    pub notices: Vec<String>,
    replies: HashMap<u64, Result<Answer, String>>,
    /// Why the inner half has ended.
    ended: Option<String>,
}

/// Why something did not work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no sandbox.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The manifests.
    #[error(transparent)]
    Manifest(#[from] manifest::Error),
    /// The sandbox says no.
    #[error("{0}")]
    Refused(String),
    /// The inner half is gone.
    #[error("the sandbox has ended: {0}")]
    Ended(String),
    /// A wait came to its deadline.
    #[error("not within {} s: {what}; {state}", .within.as_secs())]
    Deadline {
        /// What was waited for.
        what: String,
        /// For how long.
        within: Duration,
        /// What the pods looked like then.
        state: String,
    },
}

struct Shared {
    view: Mutex<View>,
    changed: Condvar,
}

/// Told of each message before it is taken note of, and last of the end, as `Failed`; where it returns false, a log line is
/// not kept.
type Listener = Box<dyn FnMut(&Message) -> bool + Send>;

impl Sandbox {
    /// Starts an empty sandbox. `programs` is the folder with `mesh`, `proxy`, `controller` and the others.
    pub fn start(programs: &Path) -> Result<Self, Error> {
        Self::start_with(programs, Box::new(|_| true))
    }

    /// Starts an empty sandbox whose messages a listener hears, on a thread of its own; it returns whether to keep a log line.
    pub fn start_with(programs: &Path, listener: Listener) -> Result<Self, Error> {
        let launched = launch(programs)?;
        let shared = Arc::new(Shared {
            view: Mutex::default(),
            changed: Condvar::new(),
        });
        let theirs = shared.clone();
        thread::Builder::new()
            .name("sandbox-messages".into())
            .spawn(move || listen(launched.reader, &theirs, listener))
            .map_err(LaunchError::Io)?;
        Ok(Self {
            child: Mutex::new(launched.child),
            writer: Mutex::new(launched.writer),
            shared,
            next: AtomicU64::new(1),
        })
    }

    /// Creates or replaces the objects of a YAML text.
    pub fn apply(&self, yaml: &str) -> Result<(), Error> {
        self.apply_objects(manifest::parse(yaml)?)
    }

    /// Creates or replaces objects.
    pub fn apply_objects(&self, objects: Vec<Value>) -> Result<(), Error> {
        self.call(Call::Apply { objects }).map(drop)
    }

    /// Deletes an object, for example a `Deployment`, or a `Pod`, which its workload then replaces.
    pub fn delete(&self, kind: &str, namespace: &str, name: &str) -> Result<(), Error> {
        self.call(Call::Delete {
            kind: kind.into(),
            namespace: namespace.into(),
            name: name.into(),
        })
        .map(drop)
    }

    /// Changes a Deployment's number of replicas; with 0 it is stopped.
    pub fn scale(&self, namespace: &str, name: &str, replicas: i32) -> Result<(), Error> {
        self.call(Call::Scale {
            namespace: namespace.into(),
            name: name.into(),
            replicas,
        })
        .map(drop)
    }

    /// Runs a program in a container of a pod, to its end; several can run at once from several threads.
    pub fn exec(&self, pod: &PodView, container: &str, argv: &[&str]) -> Result<Output, Error> {
        let call = Call::Exec {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            container: container.into(),
            argv: argv.iter().map(|&argument| argument.to_owned()).collect(),
        };
        match self.call(call)? {
            Answer::Output(output) => Ok(output),
            Answer::Done => Err(Error::Refused("the program was not run".into())),
        }
    }

    /// Waits until `find` finds something in what is known; `what` is said when it does not in time.
    pub fn wait<T>(
        &self,
        what: &str,
        within: Duration,
        mut find: impl FnMut(&View) -> Option<T>,
    ) -> Result<T, Error> {
        let deadline = Instant::now() + within;
        let mut view = self.view();
        loop {
            if let Some(found) = find(&view) {
                return Ok(found);
            }
            if let Some(reason) = &view.ended {
                return Err(Error::Ended(reason.clone()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Deadline {
                    what: what.into(),
                    within,
                    state: view.describe(),
                });
            }
            view = self
                .shared
                .changed
                .wait_timeout(view, left)
                .expect("nobody panics while holding it")
                .0;
        }
    }

    /// Waits until there are pods, and each is ready or, where it is a Job's, has succeeded.
    pub fn wait_settled(&self, within: Duration) -> Result<(), Error> {
        self.wait("every pod is ready", within, |view| {
            let mut living = view.pods.values().filter(|pod| !pod.terminating).peekable();
            (living.peek().is_some() && living.all(PodView::settled)).then_some(())
        })
    }

    /// What is known now. It is locked while it is looked at.
    pub fn view(&self) -> MutexGuard<'_, View> {
        self.shared
            .view
            .lock()
            .expect("nobody panics while holding it")
    }

    /// Ends all pods in order, then everything else. Programs that take longer than `grace` are killed.
    pub fn shut_down(&self, grace: Duration) -> Result<(), Error> {
        let milliseconds = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        match self.call(Call::Shutdown {
            grace_milliseconds: milliseconds,
        }) {
            // Ending is what was asked for.
            Ok(_) | Err(Error::Ended(_)) => {}
            Err(error) => return Err(error),
        }
        self.wait_for_child();
        Ok(())
    }

    /// The id of the outermost process of the inner half.
    pub fn process_id(&self) -> u32 {
        self.child
            .lock()
            .expect("nobody panics while holding it")
            .id()
    }

    fn call(&self, call: Call) -> Result<Answer, Error> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut line = serde_json::to_vec(&Request { id, call }).expect("requests are plain data");
        line.push(b'\n');
        let written = self
            .writer
            .lock()
            .expect("nobody panics while holding it")
            .write_all(&line);
        let mut view = self.view();
        loop {
            if let Some(reply) = view.replies.remove(&id) {
                return reply.map_err(Error::Refused);
            }
            if let Some(reason) = &view.ended {
                return Err(Error::Ended(reason.clone()));
            }
            if let Err(error) = &written {
                return Err(Error::Ended(error.to_string()));
            }
            view = self
                .shared
                .changed
                .wait(view)
                .expect("nobody panics while holding it");
        }
    }

    /// Waits for the inner half to go, and helps it where it does not.
    fn wait_for_child(&self) {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = Instant::now() + Duration::from_secs(5);
        while let Ok(None) = child.try_wait() {
            if Instant::now() > deadline {
                // The process that it has started ends with it, and everything with that.
                let _ = child.kill();
                let _ = child.wait();
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if thread::panicking() {
            let view = self
                .shared
                .view
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            eprintln!("the sandbox at the end:\n{}", view.report());
        }
        // Nothing in there has a chance to object: the inner half ends when the socket closes, and all its processes with it.
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = writer.shutdown(std::net::Shutdown::Both);
        drop(writer);
        self.wait_for_child();
    }
}

impl View {
    /// The lines of a container; none where it has printed none.
    pub fn lines(&self, pod: &PodView, container: &str) -> &[String] {
        self.logs
            .get(&pod.full_name())
            .and_then(|logs| logs.get(container))
            .map_or(&[], Vec::as_slice)
    }

    /// The pods that a workload has made and that are not about to end.
    pub fn pods_of(&self, namespace: &str, workload: &str) -> Vec<PodView> {
        self.pods
            .values()
            .filter(|pod| {
                pod.namespace == namespace && pod.workload == workload && !pod.terminating
            })
            .cloned()
            .collect()
    }

    /// The pods that are not ready, and why.
    pub fn not_ready(&self) -> Vec<String> {
        let waiting = self
            .pods
            .values()
            .filter(|pod| !pod.settled() && !pod.terminating);
        waiting
            .map(|pod| {
                format!(
                    "{} ({}): {}",
                    pod.full_name(),
                    pod.phase,
                    pod.reason.as_deref().unwrap_or("no reason known")
                )
            })
            .collect()
    }

    fn describe(&self) -> String {
        let waiting = self.not_ready();
        if waiting.is_empty() {
            format!("{} pods, all ready", self.pods.len())
        } else {
            format!("not ready: {}", waiting.join("; "))
        }
    }

    /// Everything that helps to understand a failed test, the last lines of each container.
    fn report(&self) -> String {
        let mut out = format!("{}\n", self.describe());
        for notice in &self.notices {
            out += &format!("! {notice}\n");
        }
        for (pod, containers) in &self.logs {
            for (container, lines) in containers {
                for line in &lines[lines.len().saturating_sub(40)..] {
                    out += &format!("{pod}[{container}] {line}\n");
                }
            }
        }
        out
    }

    fn note(&mut self, message: Message, keep: bool) {
        match message {
            Message::Pod(pod) => drop(self.pods.insert(pod.full_name(), pod)),
            Message::PodGone { namespace, name } => {
                drop(self.pods.remove(&format!("{namespace}/{name}")))
            }
            Message::Log(line) if keep => {
                let pod = self
                    .logs
                    .entry(format!("{}/{}", line.namespace, line.pod))
                    .or_default();
                pod.entry(line.container).or_default().push(line.line);
            }
            Message::Notice(text) => self.notices.push(text),
            Message::Reply { id, result } => drop(self.replies.insert(id, result)),
            Message::Failed { reason } => self.ended = Some(reason),
            Message::Log(_) | Message::MapIds { .. } | Message::Started => {}
        }
    }
}

fn listen(reader: BufReader<UnixStream>, shared: &Shared, mut listener: Listener) {
    let read = || -> io::Result<()> {
        for line in reader.lines() {
            let message = serde_json::from_str(&line?)?;
            // The end is told once, below.
            let keep = matches!(message, Message::Failed { .. }) || listener(&message);
            shared
                .view
                .lock()
                .expect("nobody panics while holding it")
                .note(message, keep);
            shared.changed.notify_all();
        }
        Ok(())
    };
    let reason = match read() {
        Ok(()) => "its process is gone".to_owned(),
        Err(error) => error.to_string(),
    };
    let mut view = shared.view.lock().expect("nobody panics while holding it");
    let reason = view.ended.get_or_insert(reason).clone();
    drop(view);
    listener(&Message::Failed { reason });
    shared.changed.notify_all();
}
