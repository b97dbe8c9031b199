//! What the two halves of a sandbox say to each other: JSON, a line a message, over one Unix socket. The outer half (the
//! `client`) sends `Request`s, the inner half (the `node`) sends `Message`s. When the socket closes the node ends, and with
//! it every process of the sandbox. No logic lives here.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A call to the node; the reply carries the same number.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the caller.
    pub id: u64,
    /// What to do.
    pub call: Call,
}

/// What a node can be asked to do.
#[derive(Debug, Serialize, Deserialize)]
pub enum Call {
    /// Create or replace objects, as `kubectl apply` does.
    Apply {
        /// Kubernetes objects.
        objects: Vec<Value>,
    },
    /// Delete one object and what it owns.
    Delete {
        /// For example `Deployment`.
        kind: String,
        /// The namespace.
        namespace: String,
        /// The name.
        name: String,
    },
    /// Change a Deployment's number of replicas.
    Scale {
        /// The Deployment's namespace.
        namespace: String,
        /// The Deployment's name.
        name: String,
        /// The new number.
        replicas: i32,
    },
    /// Run a program in a pod's namespaces, with its environment, as its user; the reply comes when it has ended.
    Exec {
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        pod: String,
        /// The container whose user, environment and files to use.
        container: String,
        /// Program and arguments.
        argv: Vec<String>,
    },
    /// Stop every pod, then the node.
    Shutdown {
        /// How long programs may take to end by themselves.
        grace_milliseconds: u64,
    },
}

/// What a node says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Message {
    /// The process with this id has entered a new user namespace and waits for its id maps. Answered with one line.
    MapIds {
        /// As the outer half sees it.
        pid: i32,
    },
    /// The node is up and takes requests.
    Started,
    /// The node cannot go on; the last message.
    Failed {
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The answer to a request.
    Reply {
        /// The request's.
        id: u64,
        /// The answer, or what went wrong.
        result: Result<Answer, String>,
    },
    /// A pod is new or has changed.
    Pod(PodView),
    /// A pod is gone.
    PodGone {
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        name: String,
    },
    /// A container has printed a line.
    Log(LogLine),
    /// Something a person may want to know: a restart, a pod that cannot be created.
    Notice(String),
}

/// The answer to a successful request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// Done; the object names that were touched are known by now.
    Done,
    /// A program has ended.
    Output(Output),
}

/// What a program that was run in a pod left.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Output {
    /// The exit code; 128 plus the signal's number where a signal ended it.
    pub code: i32,
    /// Its standard output, at most 16 MiB.
    pub stdout: String,
    /// Its standard error, at most 16 MiB.
    pub stderr: String,
}

/// A line of a container's output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LogLine {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// What made the pod, for example `http-server-v1`.
    pub workload: String,
    /// The container's name.
    pub container: String,
    /// Without the line break; long lines come in pieces of 16 KiB, as a kubelet's do.
    pub line: String,
}

/// What can be seen of a pod.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PodView {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The kind of what made it: Deployment, DaemonSet, Job, or Pod.
    pub owner_kind: String,
    /// The name of what made it.
    pub workload: String,
    /// Pending, Running, Succeeded or Failed.
    pub phase: String,
    /// All containers are ready.
    pub ready: bool,
    /// It has been told to end.
    pub terminating: bool,
    /// Its IPv4 address, once it has one.
    pub ip: Option<String>,
    /// The injector has marked it.
    pub injected: bool,
    /// Why it is not ready, where that is known.
    pub reason: Option<String>,
    /// Its containers in the order in which they start, init containers first.
    pub containers: Vec<ContainerView>,
}

impl PodView {
    /// `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// It runs to an end (a Job's) and has done so well, or it is ready.
    pub fn settled(&self) -> bool {
        self.ready || self.phase == "Succeeded"
    }

    /// How often its containers have been started again.
    pub fn restarts(&self) -> u32 {
        self.containers
            .iter()
            .map(|container| container.restarts)
            .sum()
    }
}

/// What can be seen of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerView {
    /// Its name.
    pub name: String,
    /// Its process runs.
    pub running: bool,
    /// It has passed its startup probe.
    pub started: bool,
    /// It has passed its readiness probe.
    pub ready: bool,
    /// How often it has been started again.
    pub restarts: u32,
    /// The last exit code.
    pub exit_code: Option<i32>,
    /// Why it is not running or not ready, where that is known.
    pub reason: Option<String>,
}
