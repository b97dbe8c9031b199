//! One pod's life, top to bottom: admission, network, files, init containers and native sidecars in order, the app's
//! containers, and the end: the app's first, then the sidecars in reverse order. It tells the node what it does through the
//! pod's `Board`, and never looks at other pods.

use std::{collections::BTreeMap, fs, path::PathBuf, sync::Arc, time::Duration};

use anyhow::Result;
use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{self, Instant},
};

use super::{
    Event, Node,
    admission::{self, Hook},
    board::Board,
    container::{Restart, Stop, Supervisor, stopped},
    issuer::Bearer,
    network::{NODE_V4, PodNetwork},
    roots,
    spec::{Surroundings, service_account},
    volumes::{self, Live, ProjectedToken},
};
use crate::sandbox::protocol::{ContainerView, PodView};

/// Runs a pod until it is deleted.
pub(super) struct PodTask {
    pub(super) node: Arc<Node>,
    /// As its workload made it.
    pub(super) pod: Pod,
    pub(super) view: PodView,
    pub(super) namespace_labels: BTreeMap<String, String>,
    pub(super) stop: watch::Receiver<Option<Stop>>,
    pub(super) events: mpsc::UnboundedSender<Event>,
}

/// A container that can be started.
struct Prepared {
    role: Role,
    /// Its place on the board.
    index: usize,
    supervisor: Supervisor,
}

/// A container that has been started.
struct Started {
    stop: watch::Sender<Option<Stop>>,
    task: JoinHandle<i32>,
}

/// How starting a pod ended.
enum Outcome {
    /// The app's containers have ended by themselves.
    Ended { succeeded: bool },
    /// There is an order to stop.
    Stopped,
}

impl PodTask {
    pub(super) async fn run(mut self) {
        let uid = self.pod.metadata.uid.clone().unwrap_or_default();
        let folder = self.node.pod_folder(&uid);
        if let Err(error) = self.live(folder.clone()).await {
            self.notice(format!(
                "pod {} cannot run: {error:#}",
                self.view.full_name()
            ));
            self.view.reason = Some(format!("{error:#}"));
            let _ = self.events.send(Event::Pod {
                uid: uid.clone(),
                pod: Box::new(self.pod.clone()),
                view: self.view.clone(),
            });
            stopped(&mut self.stop).await;
        }
        self.node.hosts.forget(&folder.join("hosts"));
        // It is on a tmpfs of ours; what is left of it there is only memory.
        let _ = fs::remove_dir_all(folder);
        let _ = self.events.send(Event::Ended { uid });
    }

    async fn live(&mut self, folder: PathBuf) -> Result<()> {
        let mut stop = self.stop.clone();
        tokio::select! {
            () = async { self.admission().await; self.roots().await } => {}
            () = stopped(&mut stop) => return Ok(()),
        }
        let network = self.node.network.pod().await?;
        let ips: Vec<String> = [
            Some(network.v4.to_string()),
            network.v6.map(|ip| ip.to_string()),
        ]
        .into_iter()
        .flatten()
        .collect();
        let containers = self.containers();
        self.view.containers = containers
            .iter()
            .map(|(container, _)| ContainerView {
                name: container.name.clone(),
                ..ContainerView::default()
            })
            .collect();
        self.view.ip = ips.first().cloned();
        let init = containers
            .iter()
            .map(|(_, role)| *role == Role::Init)
            .collect();
        let board = Arc::new(Board::new(
            self.pod.clone(),
            self.view.clone(),
            &ips,
            init,
            self.events.clone(),
            self.node.messages.clone(),
        ));
        let (supervisors, live) = self.prepare(folder, &network, &ips, &containers, &board)?;
        let renewal = self.renew(live);
        board.phase("Pending", None);

        let mut sidecars = Vec::new();
        let outcome = self.start(&board, supervisors, &mut sidecars).await;
        let order = self.order();
        for sidecar in sidecars.into_iter().rev() {
            // However long the app took, a sidecar has a moment.
            let deadline = order.deadline.max(Instant::now() + Duration::from_secs(2));
            self.end(vec![sidecar], Stop { deadline, ..order }).await;
        }
        renewal.abort();
        if let Outcome::Ended { succeeded } = outcome {
            board.phase(if succeeded { "Succeeded" } else { "Failed" }, None);
            drop(network);
            stopped(&mut self.stop).await;
        }
        Ok(())
    }

    /// Asks the webhooks, until they answer or the pod is deleted: a workload's controller would do so too.
    async fn admission(&mut self) {
        let mut hooks = self.node.hooks.clone();
        let mut told = String::new();
        let mut pause = Duration::from_millis(100);
        loop {
            let current: Vec<Hook> = hooks.borrow_and_update().clone();
            match admission::admit(self.pod.clone(), &self.namespace_labels, &current).await {
                Ok(pod) => {
                    self.pod = pod;
                    self.pod.spec.get_or_insert_default().node_name = Some("sandbox".into());
                    let annotations = self.pod.metadata.annotations.as_ref();
                    self.view.injected = annotations
                        .and_then(|map| map.get("diy-service-mesh/status"))
                        .is_some_and(|status| status == "injected");
                    return;
                }
                Err(error) => {
                    let text = format!("{error:#}");
                    // At the start pods are made before the injector answers, and nobody needs to hear of it.
                    if text != told {
                        self.waits_for(format!("not created: {text}"));
                        told = text;
                    }
                }
            }
            // Sooner where the injector has come or gone.
            let _ = time::timeout(pause, hooks.changed()).await;
            pause = (pause * 2).min(Duration::from_secs(2));
        }
    }

    /// Waits for the mesh's roots where the pod mounts them, as a kubelet does: for as long as it takes.
    async fn roots(&mut self) {
        let applied =
            |node: &Node, namespace: &str| node.config_map(namespace, roots::CONFIG_MAP).is_some();
        if !self.pod.spec.as_ref().is_some_and(roots::needed)
            || applied(&self.node, &self.view.namespace)
        {
            return;
        }
        self.waits_for(format!(
            "ConfigMap {} is not there: the controller makes it, and has not yet; is it running?",
            roots::CONFIG_MAP
        ));
        let mut published = self.node.roots.clone();
        // Its sender lives as long as the node.
        let _ = published.wait_for(Option::is_some).await;
        self.view.reason = None;
    }

    /// Tells why the pod does not go on.
    fn waits_for(&mut self, reason: String) {
        self.view.reason = Some(reason);
        let uid = self.pod.metadata.uid.clone().unwrap_or_default();
        let _ = self.events.send(Event::View {
            uid,
            view: self.view.clone(),
        });
    }

    fn prepare(
        &self,
        folder: PathBuf,
        network: &PodNetwork,
        ips: &[String],
        containers: &[(Container, Role)],
        board: &Arc<Board>,
    ) -> Result<(Vec<Prepared>, Live)> {
        fs::create_dir_all(&folder)?;
        let (namespace, name) = (self.view.namespace.as_str(), self.view.name.as_str());
        let own = ips.iter().map(|ip| format!("{ip} {name}\n")).collect();
        self.node.hosts.add(folder.join("hosts"), namespace, own)?;
        let config_map = |name: &str| self.node.config_map(namespace, name);
        let config = |name: &str, key: &str| config_map(name)?.data?.get(key).cloned();
        let surroundings = Surroundings {
            pod: &self.pod,
            ips,
            node_ip: NODE_V4.to_string(),
            programs: &self.node.programs,
            network: network.path(),
            folder: &folder,
            control: &self.node.control,
            authority: &self.node.authority,
            config: &config,
        };
        let live = volumes::prepare(
            &surroundings,
            &volumes::Sources {
                issuer: &self.node.issuer,
                bearer: &self.bearer(),
                config_map: &config_map,
            },
        )?;
        let policy = self
            .pod
            .spec
            .as_ref()
            .and_then(|spec| spec.restart_policy.as_deref());
        let mut supervisors = Vec::new();
        for (index, (container, role)) in containers.iter().enumerate() {
            let spec_file = folder
                .join("containers")
                .join(&container.name)
                .join("spec.json");
            fs::write(
                &spec_file,
                serde_json::to_vec(&surroundings.process(container)?)?,
            )?;
            let restart = match (role, policy) {
                (Role::Sidecar, _) | (Role::App, None | Some("Always")) => Restart::Always,
                (_, Some("Never")) => Restart::Never,
                _ => Restart::OnFailure,
            };
            let supervisor = Supervisor::new(board.clone(), index, container, restart, spec_file)?;
            supervisors.push(Prepared {
                role: *role,
                index,
                supervisor,
            });
        }
        Ok((supervisors, live))
    }

    async fn start(
        &mut self,
        board: &Arc<Board>,
        supervisors: Vec<Prepared>,
        sidecars: &mut Vec<Started>,
    ) -> Outcome {
        let mut apps = Vec::new();
        for Prepared {
            role,
            index,
            supervisor,
        } in supervisors
        {
            if role == Role::App && apps.is_empty() {
                board.phase("Running", None);
            }
            let mut started = spawn(supervisor);
            match role {
                Role::App => apps.push(started),
                Role::Sidecar => {
                    sidecars.push(started);
                    let mut states = board.watch();
                    let up = states.wait_for(|states| states[index].started);
                    tokio::select! {
                        _ = up => {}
                        () = stopped(&mut self.stop) => return Outcome::Stopped,
                    }
                }
                Role::Init => {
                    let code = tokio::select! {
                        code = &mut started.task => code.unwrap_or(128),
                        () = stopped(&mut self.stop) => {
                            self.end(vec![started], self.order()).await;
                            return Outcome::Stopped;
                        }
                    };
                    if code != 0 {
                        return Outcome::Ended { succeeded: false };
                    }
                }
            }
        }
        let mut succeeded = true;
        for app in &mut apps {
            tokio::select! {
                code = &mut app.task => succeeded &= matches!(code, Ok(0)),
                () = stopped(&mut self.stop) => {
                    let order = self.order();
                    self.end(apps, order).await;
                    return Outcome::Stopped;
                }
            }
        }
        Outcome::Ended { succeeded }
    }

    /// Ends containers at the same time, and waits for it. A later order to the pod, which brings the end closer, is passed on.
    async fn end(&mut self, containers: Vec<Started>, order: Stop) {
        for container in &containers {
            container.stop.send_replace(Some(order));
        }
        let mut later = self.stop.clone();
        for mut container in containers {
            while !container.task.is_finished() {
                tokio::select! {
                    _ = &mut container.task => break,
                    Ok(()) = later.changed() => {
                        if let Some(order) = *later.borrow_and_update() {
                            container.stop.send_replace(Some(order));
                        }
                    }
                }
            }
        }
    }

    /// The order to stop, or, where the app has ended by itself, the grace that the pod gives its sidecars.
    fn order(&self) -> Stop {
        let grace = self
            .pod
            .spec
            .as_ref()
            .and_then(|spec| spec.termination_grace_period_seconds)
            .and_then(|seconds| u64::try_from(seconds).ok());
        self.stop.borrow().unwrap_or(Stop {
            deadline: Instant::now() + Duration::from_secs(grace.unwrap_or(30)),
            pre_stop: true,
        })
    }

    /// Keeps tokens and roots in the pod's files up to date.
    fn renew(&self, live: Live) -> JoinHandle<()> {
        let (node, bearer, events) = (self.node.clone(), self.bearer(), self.events.clone());
        let mut published = self.node.roots.clone();
        tokio::spawn(async move {
            let period = live
                .tokens
                .iter()
                .map(ProjectedToken::renew_after)
                .min()
                .unwrap_or(Duration::MAX);
            let mut due = Instant::now().checked_add(period);
            let pod = format!("{}/{}", bearer.namespace, bearer.pod);
            let tell = |what: &str, error: anyhow::Error| {
                let _ = events.send(Event::Notice(format!(
                    "cannot renew {what} of {pod}: {error:#}"
                )));
            };
            loop {
                let moment = due.unwrap_or_else(Instant::now);
                tokio::select! {
                    () = time::sleep_until(moment), if due.is_some() => {
                        let failed = live.tokens.iter().filter_map(|token| token.renew(&node.issuer, &bearer).err());
                        failed.for_each(|error| tell("the token", error));
                        due = Instant::now().checked_add(period);
                    }
                    Ok(()) = published.changed() => {
                        let roots = published.borrow_and_update().clone().unwrap_or_default();
                        let failed = live.roots.iter().filter_map(|file| volumes::write_roots(file, &roots).err());
                        failed.for_each(|error| tell("the roots", error.into()));
                    }
                    else => return,
                }
            }
        })
    }

    fn bearer(&self) -> Bearer {
        Bearer {
            namespace: self.view.namespace.clone(),
            service_account: service_account(&self.pod),
            pod: self.view.name.clone(),
            pod_uid: self.pod.metadata.uid.clone().unwrap_or_default(),
        }
    }

    /// The containers in the order in which they start.
    fn containers(&self) -> Vec<(Container, Role)> {
        let Some(spec) = &self.pod.spec else {
            return Vec::new();
        };
        let role = |container: &Container| {
            if container.restart_policy.as_deref() == Some("Always") {
                Role::Sidecar
            } else {
                Role::Init
            }
        };
        let init = spec
            .init_containers
            .iter()
            .flatten()
            .map(|container| (container.clone(), role(container)));
        init.chain(
            spec.containers
                .iter()
                .map(|container| (container.clone(), Role::App)),
        )
        .collect()
    }

    fn notice(&self, text: String) {
        let _ = self.events.send(Event::Notice(text));
    }
}

/// When a container runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// To its end, before the app.
    Init,
    /// From before the app until after it.
    Sidecar,
    App,
}

fn spawn(supervisor: Supervisor) -> Started {
    let (stop, order) = watch::channel(None);
    Started {
        stop,
        task: tokio::spawn(supervisor.run(order)),
    }
}
