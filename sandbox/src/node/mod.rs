//! The node of a sandbox: the kubelet and the control plane of a cluster with one node. It runs as
//! a process inside the sandbox's namespaces (see `enter`). It accepts requests on the control
//! socket, runs pods, and publishes the resulting state as the controller's catalog, Service
//! translation rules, hosts files and webhook endpoints. It exits when the control socket closes.
//!
//! The event loop below owns all mutable `State`. Every other task reports to it with `Event`s.

mod admission;
mod catalog;
mod cel;
mod container;
mod endpoints;
mod execute;
mod hosts;
mod issuer;
mod network;
mod objects;
mod pod;
mod probe;
mod roots;
mod services;
mod spec;
mod state;
mod status;
mod volumes;
mod workloads;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
};

use self::{
    admission::Webhook, hosts::Hosts, issuer::Issuer, network::Network, objects::Objects,
    state::State,
};
use super::{
    lock,
    protocol::{Call, Message, Output, PodView, Request},
};

/// State that the pod tasks and the event loop share.
struct Node {
    programs: PathBuf,
    /// The directory that the control plane mounts: the catalog, the namespaces and the JWKS file.
    control: PathBuf,
    /// The directory of the certificate authority, which all controllers mount.
    authority: PathBuf,
    roots: roots::Published,
    network: Network,
    issuer: Issuer,
    hosts: Hosts,
    webhooks: watch::Receiver<Vec<Webhook>>,
    objects: Mutex<Objects>,
    /// Messages to the client. Senders wait while the queue is full.
    messages: mpsc::Sender<Message>,
}

/// An input of the event loop.
enum Event {
    /// The state of a pod has changed. `pod` is `None` until the pod has a network.
    PodUpdated {
        uid: String,
        pod: Option<Box<Pod>>,
        view: Box<PodView>,
    },
    /// The event loop itself has created or terminated a pod.
    PodChanged {
        uid: String,
    },
    /// The processes and addresses of a pod are released.
    PodRemoved {
        uid: String,
    },
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
    let result = serve(programs, reader, messages.clone()).await;
    if let Err(error) = &result {
        // Fails if the client is disconnected.
        let _ = messages
            .send(Message::Failed {
                reason: format!("{error:#}"),
            })
            .await;
    }
    drop(messages);
    // Pod tasks may hold clones of the sender, so the writer does not always end.
    let _ = tokio::time::timeout(FLUSH_TIMEOUT, writer).await;
    Ok(())
}

async fn serve(
    programs: PathBuf,
    reader: OwnedReadHalf,
    messages: mpsc::Sender<Message>,
) -> Result<()> {
    let network = Network::new()?;
    let issuer = Issuer::new()?;
    let control = Path::new(NODE_DIRECTORY).join("control");
    fs::create_dir_all(control.join("catalog"))?;
    fs::write(control.join("jwks.json"), issuer.jwks()?)?;
    let authority = Path::new(NODE_DIRECTORY).join("authority");
    fs::create_dir_all(&authority)?;
    let roots = roots::watch(&authority);
    let (webhooks_sender, webhooks) = watch::channel(Vec::new());
    let objects = Mutex::new(Objects::default());
    let node = Arc::new(Node {
        programs,
        control,
        authority,
        roots,
        network,
        issuer,
        hosts: Hosts::default(),
        webhooks,
        objects,
        messages,
    });
    let (events_sender, events) = mpsc::unbounded_channel();
    let state = State::new(node.clone(), events_sender, webhooks_sender)?;
    node.messages.send(Message::Started).await?;
    Loop {
        node,
        state,
        events,
        lines: BufReader::new(reader).lines(),
    }
    .run()
    .await
}

struct Loop {
    node: Arc<Node>,
    state: State,
    events: mpsc::UnboundedReceiver<Event>,
    lines: Lines<BufReader<OwnedReadHalf>>,
}

impl Loop {
    async fn run(mut self) -> Result<()> {
        loop {
            tokio::select! {
                line = self.lines.next_line() => match line.context("failed to read from the control socket")? {
                    None => return Ok(()),
                    Some(line) => self.request(serde_json::from_str(&line).context("failed to parse a request")?).await?,
                },
                event = self.events.recv() => self.event(event.expect("the event loop holds a sender")).await?,
            }
            self.queued_events().await?;
            self.state.sync()?;
            if let Some(requests) = self.state.completed_shutdown() {
                for &id in requests {
                    self.reply(id, Ok(None)).await?;
                }
                return Ok(());
            }
        }
    }

    async fn queued_events(&mut self) -> Result<()> {
        while let Ok(event) = self.events.try_recv() {
            self.event(event).await?;
        }
        Ok(())
    }

    async fn event(&mut self, event: Event) -> Result<()> {
        if let Some(message) = self.state.event(event) {
            self.node.messages.send(message).await?;
        }
        Ok(())
    }

    async fn request(&mut self, request: Request) -> Result<()> {
        let id = request.id;
        let done = match request.call {
            Call::Apply { objects } => self.state.apply(objects),
            Call::Delete {
                kind,
                namespace,
                name,
            } => self.state.delete(&kind, (namespace, name)),
            Call::Scale {
                namespace,
                name,
                replicas,
            } => self.state.scale(&(namespace, name), replicas),
            Call::Exec {
                namespace,
                pod,
                container,
                argv,
            } => {
                match self.state.exec(&(namespace, pod), &container, argv) {
                    Ok(program) => {
                        let messages = self.node.messages.clone();
                        tokio::spawn(async move {
                            let result = program
                                .output()
                                .await
                                .map(Some)
                                .map_err(|error| format!("{error:#}"));
                            // Fails if the client is disconnected.
                            let _ = messages.send(Message::Reply { id, result }).await;
                        });
                        return Ok(());
                    }
                    Err(error) => Err(error),
                }
            }
            Call::Shutdown { grace_milliseconds } => {
                self.state
                    .shut_down(id, Duration::from_millis(grace_milliseconds));
                return Ok(());
            }
        };
        self.state.sync()?;
        // The client receives the pods that the request created or terminated before the reply.
        self.queued_events().await?;
        let done = done.map(|()| None);
        self.reply(id, done.map_err(|error| format!("{error:#}")))
            .await
    }

    async fn reply(&self, id: u64, result: Result<Option<Output>, String>) -> Result<()> {
        Ok(self
            .node
            .messages
            .send(Message::Reply { id, result })
            .await?)
    }
}

impl Node {
    fn pod_directory(&self, uid: &str) -> PathBuf {
        Path::new(NODE_DIRECTORY).join("pods").join(uid)
    }

    fn objects(&self) -> MutexGuard<'_, Objects> {
        lock(&self.objects)
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
