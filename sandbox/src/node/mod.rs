//! The node of a sandbox: the kubelet and the control plane of a cluster with one node. It runs as
//! a process inside the sandbox's namespaces (see `enter`). It accepts requests on the control
//! socket, runs pods, and publishes the resulting state as the controller's catalog, Service
//! translation rules, hosts files and webhook endpoints. It exits when the control socket closes.
//!
//! The event loop below owns all mutable `State`. Every other task reports to it with `Event`s.

mod admin_page;
mod admission;
mod catalog;
mod cel;
mod container;
mod endpoints;
mod execute;
mod issuer;
mod links;
mod network;
mod objects;
mod pod;
mod probe;
mod roots;
mod services;
mod spec;
mod state;
mod status;
mod translation;
mod volumes;
mod workloads;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
    time::{self, Instant},
};

use self::{admission::Webhook, issuer::Issuer, network::Network, objects::Key, state::State};
use super::protocol::{Call, Message, Reply, Request};

/// State that the pod tasks and the event loop share.
struct Node {
    paths: Paths,
    roots: roots::Published,
    network: Network,
    issuer: Issuer,
    /// The lines of the Services in hosts files, by the namespace of the pod.
    hosts: watch::Sender<BTreeMap<String, String>>,
    webhooks: watch::Receiver<Vec<Webhook>>,
    /// Messages to the client. Senders wait while the queue is full.
    messages: mpsc::Sender<Message>,
}

/// The directories that containers mount.
struct Paths {
    /// The programs on the host.
    programs: PathBuf,
    /// For the control plane: the catalog, the namespaces, and the keys that tokens are checked
    /// with.
    control: PathBuf,
    /// The certificate authority, which all controllers share.
    authority: PathBuf,
}

/// An input of the event loop.
enum Event {
    /// The webhooks have admitted a pod.
    PodAdmitted(Key, Box<Pod>),
    /// The status of a pod has changed.
    PodChanged(Key),
    /// The processes and addresses of a pod are released.
    PodRemoved(Key),
    Notice(String),
}

/// The node's files, on a tmpfs.
const NODE_DIRECTORY: &str = "/run/mesh";
/// The time to deliver the last messages to the client.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs the node until the client disconnects or requests a shutdown.
pub async fn run(programs: PathBuf, control: std::os::unix::net::UnixStream) -> Result<()> {
    control.set_nonblocking(true)?;
    let (reader, writer) = UnixStream::from_std(control)?.into_split();
    let (messages, receiver) = mpsc::channel(1024);
    let writer = tokio::spawn(write(writer, receiver));
    if let Err(error) = serve(programs, reader, messages.clone()).await {
        let reason = format!("{error:#}");
        // Fails if the client is disconnected.
        let _ = messages.send(Message::Failed { reason }).await;
    }
    drop(messages);
    // Pod tasks may hold clones of the sender, so the writer does not always end.
    let _ = time::timeout(FLUSH_TIMEOUT, writer).await;
    Ok(())
}

async fn serve(
    programs: PathBuf,
    reader: OwnedReadHalf,
    messages: mpsc::Sender<Message>,
) -> Result<()> {
    let issuer = Issuer::new()?;
    let directory = Path::new(NODE_DIRECTORY);
    let paths = Paths {
        programs,
        control: directory.join("control"),
        authority: directory.join("authority"),
    };
    fs::create_dir_all(paths.control.join("catalog"))?;
    fs::create_dir_all(&paths.authority)?;
    fs::write(paths.control.join("jwks.json"), issuer.jwks()?)?;
    let (webhooks_sender, webhooks) = watch::channel(Vec::new());
    let node = Arc::new(Node {
        roots: roots::watch(&paths.authority),
        paths,
        network: Network::new()?,
        issuer,
        hosts: watch::Sender::default(),
        webhooks,
        messages,
    });
    let (events_sender, mut events) = mpsc::unbounded_channel();
    let mut state = State::new(node.clone(), events_sender, webhooks_sender)?;
    node.messages.send(Message::Started).await?;
    let mut lines = BufReader::new(reader).lines();
    while !state.is_shut_down() {
        let mut request = None;
        tokio::select! {
            line = lines.next_line() => match line.context("failed to read from the control socket")? {
                None => return Ok(()),
                Some(line) => request = Some(serde_json::from_str(&line).context("failed to parse a request")?),
            },
            event = events.recv() => forward(&node, state.event(event)).await?,
            () = time::sleep_until(state.deadline()) => return Ok(()),
        }
        let reply = match request {
            Some(Request { id, call }) => {
                perform(&node, &mut state, id, call).map(|result| Message::Reply { id, result })
            }
            None => None,
        };
        // The client receives the pods that a request created or terminated before the reply.
        let mut is_changed = true;
        while is_changed {
            state.sync()?;
            is_changed = false;
            while let Ok(event) = events.try_recv() {
                forward(&node, state.event(Some(event))).await?;
                is_changed = true;
            }
        }
        forward(&node, reply).await?;
    }
    Ok(())
}

async fn forward(node: &Node, message: Option<Message>) -> Result<()> {
    match message {
        Some(message) => Ok(node.messages.send(message).await?),
        None => Ok(()),
    }
}

/// Performs a request. Returns the result, or `None` if it follows later.
fn perform(node: &Node, state: &mut State, id: u64, call: Call) -> Option<Result<Reply, String>> {
    let done = |()| Some(Reply::Done);
    let reply = match call {
        Call::Apply { objects } => state.apply(objects).map(done),
        Call::Delete { kind, key } => state.delete(&kind, &key).map(done),
        Call::Scale { key, replicas } => state.scale(&key, replicas).map(done),
        Call::Exec {
            pod,
            container,
            argv,
        } => state.exec(&pod, &container, argv).map(|command| {
            reply_later(node, id, async { command.await.map(Reply::Output) });
            None
        }),
        Call::AdminPage { pod, path } => state.admin_page(&pod, path).map(|page| {
            reply_later(node, id, async { page.await.map(Reply::Page) });
            None
        }),
        Call::Shutdown { grace_milliseconds } => {
            state.shut_down(Instant::now() + Duration::from_millis(grace_milliseconds));
            Ok(Some(Reply::Done))
        }
    };
    reply.map_err(|error| format!("{error:#}")).transpose()
}

/// Replies to a request when its operation has ended.
fn reply_later(
    node: &Node,
    id: u64,
    operation: impl Future<Output = Result<Reply>> + Send + 'static,
) {
    let messages = node.messages.clone();
    tokio::spawn(async move {
        let result = operation.await.map_err(|error| format!("{error:#}"));
        // Fails if the client is disconnected.
        let _ = messages.send(Message::Reply { id, result }).await;
    });
}

impl Node {
    fn pod_directory(&self, pod: &Pod) -> PathBuf {
        let uid = pod.uid().unwrap_or_default();
        Path::new(NODE_DIRECTORY).join("pods").join(uid)
    }
}

async fn write(mut writer: OwnedWriteHalf, mut messages: mpsc::Receiver<Message>) {
    let mut buffer = Vec::new();
    let mut batch = Vec::new();
    while messages.recv_many(&mut batch, 256).await > 0 {
        for message in batch.drain(..) {
            serde_json::to_writer(&mut buffer, &message).expect("messages are plain data");
            buffer.push(b'\n');
        }
        if writer.write_all(&buffer).await.is_err() {
            // The client is disconnected. The reading side detects it and ends the node.
            return;
        }
        buffer.clear();
    }
}
