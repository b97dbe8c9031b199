//! The inner half of a sandbox: one node of a cluster, with what a cluster's control plane does for it. It runs as a process of
//! its own inside the sandbox's namespaces (see `enter`), takes requests, runs pods, and keeps four things in step with them:
//! the controller's catalog, the translation rules of Services, the pods' hosts files, and where the injector is. It has no
//! API but the control socket, and ends when that closes.
//!
//! `State` is all that changes, and only the loop below changes it; everything else tells it by `Event`s.

mod admission;
mod board;
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
mod volumes;
mod workloads;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
};

use self::{
    admission::Hook, hosts::Hosts, issuer::Issuer, network::Network, objects::Objects, state::State,
};
use super::protocol::{Answer, Call, Message, PodView, Request};

/// What pods and the loop share.
struct Node {
    programs: PathBuf,
    /// The folder that controllers see.
    control: PathBuf,
    /// The folder that controllers share: their certificate authority, with its keys.
    authority: PathBuf,
    /// What they have published of it.
    roots: roots::Published,
    network: Network,
    issuer: Issuer,
    hosts: Hosts,
    hooks: watch::Receiver<Vec<Hook>>,
    objects: Mutex<Objects>,
    /// To the outer half. Full: the reader is slow, and writers wait.
    messages: mpsc::Sender<Message>,
}

/// What the loop is told.
enum Event {
    /// A pod's state has changed.
    Pod {
        uid: String,
        pod: Box<Pod>,
        view: PodView,
    },
    /// A pod is not on the network yet: what can be seen of it.
    View {
        uid: String,
        view: PodView,
    },
    /// The loop itself has made a pod, or told it to end.
    Touched {
        uid: String,
    },
    /// A pod's processes and addresses are gone.
    Ended {
        uid: String,
    },
    Notice(String),
}

/// Everything of the node that is a file, on a tmpfs.
const FOLDER: &str = "/run/mesh";

/// Runs the node until the outer half is gone or asks for the end.
pub async fn run(programs: PathBuf, control: std::os::unix::net::UnixStream) -> Result<()> {
    control.set_nonblocking(true)?;
    let (reader, writer) = UnixStream::from_std(control)?.into_split();
    let (messages, receiver) = mpsc::channel(1024);
    let writer = tokio::spawn(write(writer, receiver));
    let result = serve(programs, reader, messages.clone()).await;
    if let Err(error) = &result {
        // Where the outer half is gone, nobody is left to hear of it.
        let _ = messages
            .send(Message::Failed {
                reason: format!("{error:#}"),
            })
            .await;
    }
    drop(messages);
    // The last messages, for as long as somebody reads them. Clones of the sender may live on in tasks.
    let _ = tokio::time::timeout(std::time::Duration::from_secs(1), writer).await;
    Ok(())
}

async fn serve(
    programs: PathBuf,
    reader: OwnedReadHalf,
    messages: mpsc::Sender<Message>,
) -> Result<()> {
    let network = Network::new()?;
    let issuer = Issuer::new()?;
    let control = Path::new(FOLDER).join("control");
    fs::create_dir_all(control.join("catalog"))?;
    fs::write(control.join("jwks.json"), issuer.jwks()?)?;
    let authority = Path::new(FOLDER).join("authority");
    fs::create_dir_all(&authority)?;
    let roots = roots::watch(&authority);
    let (hooks_sender, hooks) = watch::channel(Vec::new());
    let objects = Mutex::new(Objects::default());
    let node = Arc::new(Node {
        programs,
        control,
        authority,
        roots,
        network,
        issuer,
        hosts: Hosts::default(),
        hooks,
        objects,
        messages,
    });
    let (events_sender, events) = mpsc::unbounded_channel();
    let state = State::new(node.clone(), events_sender, hooks_sender)?;
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
                line = self.lines.next_line() => match line.context("the control socket broke")? {
                    None => return Ok(()),
                    Some(line) => self.request(serde_json::from_str(&line).context("a request that does not parse")?).await?,
                },
                event = self.events.recv() => self.event(event.context("the loop holds a sender")?).await?,
            }
            // What happened at the same time is looked at together.
            self.waiting_events().await?;
            self.state.sync()?;
            if self.state.finished() {
                for id in self.state.waiting_for_the_end() {
                    self.reply(id, Ok(Answer::Done)).await?;
                }
                return Ok(());
            }
        }
    }

    async fn waiting_events(&mut self) -> Result<()> {
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
                                .map(Answer::Output)
                                .map_err(|error| format!("{error:#}"));
                            // Nobody waits for it where the outer half is gone.
                            let _ = messages.send(Message::Reply { id, result }).await;
                        });
                        return Ok(());
                    }
                    Err(error) => Err(error),
                }
            }
            Call::Shutdown { grace_milliseconds } => {
                self.state
                    .shut_down(id, std::time::Duration::from_millis(grace_milliseconds));
                return Ok(());
            }
        };
        self.state.sync()?;
        // Who hears that it is done has heard of the pods that it made and of those that it ends.
        self.waiting_events().await?;
        self.reply(
            id,
            done.map(|()| Answer::Done)
                .map_err(|error| format!("{error:#}")),
        )
        .await
    }

    async fn reply(&self, id: u64, result: Result<Answer, String>) -> Result<()> {
        Ok(self
            .node
            .messages
            .send(Message::Reply { id, result })
            .await?)
    }
}

impl Node {
    fn pod_folder(&self, uid: &str) -> PathBuf {
        Path::new(FOLDER).join("pods").join(uid)
    }

    /// One that was applied, or the mesh's roots.
    fn config_map(&self, namespace: &str, name: &str) -> Option<ConfigMap> {
        let objects = self.objects.lock().expect("nobody panics while holding it");
        let applied = objects
            .config_maps
            .get(&(namespace.to_owned(), name.to_owned()))
            .cloned();
        applied.or_else(|| {
            self.roots
                .borrow()
                .as_deref()
                .filter(|_| name == roots::CONFIG_MAP)
                .map(roots::config_map)
        })
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
            // The outer half is gone; the reading side sees it and ends the node.
            return;
        }
        buffer.clear();
    }
}
