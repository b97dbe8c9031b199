//! The protocol between the client and the node of a sandbox: newline-delimited JSON over one Unix
//! socket. The client sends `Request`s, the node sends `Message`s. The node exits when the socket
//! closes.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::page::Page;

/// A request to the node.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// An id chosen by the client, which the reply repeats.
    pub id: u64,
    /// The operation.
    pub call: Call,
}

/// An operation of the node.
#[derive(Debug, Serialize, Deserialize)]
pub enum Call {
    /// Create or replace objects, as `kubectl apply` does.
    Apply {
        /// Kubernetes objects.
        objects: Vec<Value>,
    },
    /// Delete an object and its pods.
    Delete {
        /// The kind, for example `Deployment`.
        kind: String,
        /// The namespace and the name.
        key: (String, String),
    },
    /// Change the number of replicas of a Deployment.
    Scale {
        /// The namespace and the name.
        key: (String, String),
        /// The new number of replicas.
        replicas: usize,
    },
    /// Run a command in a container. The reply follows when it has exited.
    Exec {
        /// The namespace and the name.
        pod: (String, String),
        /// The container, which determines user, environment and mounts.
        container: String,
        /// The program and its arguments.
        argv: Vec<String>,
    },
    /// Read a page of the admin server of a pod's proxy, from loopback inside the pod. The reply
    /// follows within 5 seconds.
    AdminPage {
        /// The namespace and the name.
        pod: (String, String),
        /// The path with its query.
        path: String,
    },
    /// Terminate all pods, then the node.
    Shutdown {
        /// The time until the node exits at the latest, with all that still runs.
        grace_milliseconds: u64,
    },
}

/// A message of the node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Message {
    /// A process waits for the id maps of its new user namespace. The client answers with one line.
    MapIds {
        /// The process id in the client's PID namespace.
        pid: i32,
    },
    /// The node accepts requests.
    Started,
    /// The node failed. This is the last message.
    Failed {
        /// The error and its remedy.
        reason: String,
    },
    /// The reply to a request.
    Reply {
        /// The id of the request.
        id: u64,
        /// The result, or an error message. The affected pods were reported before.
        result: Result<Reply, String>,
    },
    /// A pod was created or has changed.
    Pod(PodView),
    /// A pod was removed.
    PodRemoved {
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        name: String,
    },
    /// A container printed a line.
    Log(LogLine),
    /// A notice for the user, for example about a restart.
    Notice(String),
}

/// The result of an operation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The operation is complete.
    Done,
    /// The result of a command.
    Output(Output),
    /// The page of an admin server.
    Page(Page),
}

/// The result of a command.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Output {
    /// The exit code, or 128 plus the number of the signal that killed the process.
    pub code: i32,
    /// Standard output, at most 16 MiB.
    pub stdout: String,
    /// Standard error, at most 16 MiB.
    pub stderr: String,
}

/// A line of a container's output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LogLine {
    /// The container.
    pub source: Source,
    /// The line without its line break. Lines are split at 16 KiB.
    pub line: String,
}

/// A container of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The name of the workload, for example `http-server-v1`.
    pub workload: String,
    /// The container's name.
    pub container: String,
}

/// The observed state of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodView {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The name of the workload.
    pub workload: String,
    /// The Services of its namespace that it is an endpoint of.
    pub services: Vec<String>,
    /// Pending or Running.
    pub phase: String,
    /// Whether all containers are ready.
    pub ready: bool,
    /// Whether it is being deleted.
    pub terminating: bool,
    /// Its IPv4 address, if assigned.
    pub ip: Option<String>,
    /// Its IPv6 address, if assigned.
    pub ipv6: Option<String>,
    /// Whether the injector has injected a proxy.
    pub injected: bool,
    /// Why it is not ready, if known.
    pub reason: Option<String>,
    /// Its containers in start order, init containers first.
    pub containers: Vec<ContainerView>,
}

impl PodView {
    /// `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// One of its containers.
    pub fn source(&self, container: &ContainerView) -> Source {
        Source {
            namespace: self.namespace.clone(),
            pod: self.name.clone(),
            workload: self.workload.clone(),
            container: container.name.clone(),
        }
    }

    /// The number of restarts of all containers.
    pub fn restarts(&self) -> u32 {
        self.containers
            .iter()
            .map(|container| container.restarts)
            .sum()
    }
}

/// The observed state of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerView {
    /// Its name.
    pub name: String,
    /// Whether its process is running.
    pub running: bool,
    /// Whether its startup probe has succeeded.
    pub started: bool,
    /// Whether its readiness probe succeeds.
    pub ready: bool,
    /// The number of restarts.
    pub restarts: u32,
    /// The last exit code.
    pub exit_code: Option<i32>,
    /// Why it is not running or not ready, if known.
    pub reason: Option<String>,
}

impl ContainerView {
    /// A container that has not started.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            ..Self::default()
        }
    }
}
