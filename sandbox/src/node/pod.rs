//! The lifecycle of one pod: admission, network, volumes, init containers and native sidecars in
//! order, application containers, and termination of the sidecars in reverse order after the
//! application containers.

use std::{collections::BTreeMap, fs, future::pending, path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use diy_mesh_injector::containers::ROOTS_CONFIG_MAP;
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::ResourceExt;
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{self, Instant},
};

use super::{
    Event, Node, admission,
    container::{Supervisor, Termination, termination_requested},
    issuer::TokenSubject,
    network::{NODE_V4, PodNetwork},
    roots,
    spec::{PodContext, service_account},
    status::StatusManager,
    volumes::{self, ProjectedToken, RefreshedFiles},
};
use crate::protocol::{ContainerView, PodView};

/// Runs a pod until it is deleted.
pub(super) struct PodTask {
    pub(super) node: Arc<Node>,
    /// As created by its workload.
    pub(super) pod: Pod,
    pub(super) view: PodView,
    pub(super) namespace_labels: BTreeMap<String, String>,
    pub(super) termination: watch::Receiver<Option<Termination>>,
    pub(super) events: mpsc::UnboundedSender<Event>,
}

/// A container that has started.
struct StartedContainer {
    termination: watch::Sender<Option<Termination>>,
    task: JoinHandle<()>,
}

const MIN_ADMISSION_RETRY_INTERVAL: Duration = Duration::from_millis(100);
const MAX_ADMISSION_RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// The least time between SIGTERM and SIGKILL of a sidecar.
const MIN_SIDECAR_GRACE_PERIOD: Duration = Duration::from_secs(2);

impl PodTask {
    pub(super) async fn run(mut self) {
        let uid = self.pod.uid().unwrap_or_default();
        let directory = self.node.pod_directory(&uid);
        if let Err(error) = self.run_containers(&directory).await {
            let name = self.view.full_name();
            let text = format!("failed to run pod {name}: {error:#}");
            let _ = self.events.send(Event::Notice(text));
            self.report(Some(Box::new(self.pod.clone())), format!("{error:#}"));
            termination_requested(&mut self.termination).await;
        }
        self.node.hosts.remove(&directory.join("hosts"));
        // The directory is on a tmpfs that disappears with the sandbox.
        let _ = fs::remove_dir_all(directory);
        let _ = self.events.send(Event::PodRemoved { uid });
    }

    async fn run_containers(&mut self, directory: &Path) -> Result<()> {
        let mut termination = self.termination.clone();
        tokio::select! {
            () = async { self.admit().await; self.wait_for_roots().await } => {}
            () = termination_requested(&mut termination) => return Ok(()),
        }
        let network = self.node.network.pod().await?;
        let mut ips = vec![network.v4.to_string()];
        ips.extend(network.v6.map(|ip| ip.to_string()));
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
        let status = Arc::new(StatusManager::new(
            self.pod.clone(),
            self.view.clone(),
            &ips,
            init,
            self.events.clone(),
            self.node.messages.clone(),
        ));
        let (pending, refreshed) = self.prepare(directory, &network, &ips, &containers, &status)?;
        let refresh = self.refresh(refreshed);
        status.phase("Pending");

        let mut sidecars = Vec::new();
        self.start(&status, pending, &mut sidecars).await;
        let request = self.termination_request();
        for sidecar in sidecars.into_iter().rev() {
            let deadline = request
                .deadline
                .max(Instant::now() + MIN_SIDECAR_GRACE_PERIOD);
            let request = Termination {
                deadline,
                ..request
            };
            self.terminate(vec![sidecar], request).await;
        }
        refresh.abort();
        Ok(())
    }

    /// Calls the webhooks until they admit the pod, as a workload controller retries to create it.
    async fn admit(&mut self) {
        let mut webhooks = self.node.webhooks.clone();
        let mut reported = String::new();
        let mut interval = MIN_ADMISSION_RETRY_INTERVAL;
        loop {
            let current = webhooks.borrow_and_update().clone();
            match admission::admit(self.pod.clone(), &self.namespace_labels, &current).await {
                Ok(pod) => {
                    self.pod = pod;
                    let node = &mut self.pod.spec.get_or_insert_default().node_name;
                    node.get_or_insert_with(|| "sandbox".into());
                    let status = self.pod.annotations().get("diy-service-mesh/status");
                    self.view.injected = status.is_some_and(|status| status == "injected");
                    return;
                }
                Err(error) => {
                    let text = format!("{error:#}");
                    if text != reported {
                        self.report(None, format!("not created: {text}"));
                        reported = text;
                    }
                }
            }
            // A change of the webhooks ends the wait.
            let _ = time::timeout(interval, webhooks.changed()).await;
            interval = (interval * 2).min(MAX_ADMISSION_RETRY_INTERVAL);
        }
    }

    /// Waits until the ConfigMap of the trust roots exists, if the pod mounts it.
    async fn wait_for_roots(&mut self) {
        if !self.pod.spec.as_ref().is_some_and(roots::mounted) || self.node.roots.borrow().is_some()
        {
            return;
        }
        self.report(
            None,
            format!(
                "ConfigMap {ROOTS_CONFIG_MAP} not found: the controller creates it, check that it is running"
            ),
        );
        let mut published = self.node.roots.clone();
        // The sender lives as long as the node.
        let _ = published.wait_for(Option::is_some).await;
        self.view.reason = None;
    }

    /// Reports why the pod does not start.
    fn report(&mut self, pod: Option<Box<Pod>>, reason: String) {
        self.view.reason = Some(reason);
        let _ = self.events.send(Event::PodUpdated {
            uid: self.pod.uid().unwrap_or_default(),
            pod,
            view: Box::new(self.view.clone()),
        });
    }

    fn prepare(
        &self,
        directory: &Path,
        network: &PodNetwork,
        ips: &[String],
        containers: &[(Container, Role)],
        status: &Arc<StatusManager>,
    ) -> Result<(Vec<(Role, Supervisor)>, RefreshedFiles)> {
        fs::create_dir_all(directory)?;
        let (namespace, name) = (self.view.namespace.as_str(), self.view.name.as_str());
        let own = ips.iter().map(|ip| format!("{ip} {name}\n")).collect();
        self.node
            .hosts
            .add(directory.join("hosts"), namespace, own)?;
        let roots = self.node.roots.borrow().clone().unwrap_or_default();
        let context = PodContext {
            pod: &self.pod,
            ips,
            node_ip: NODE_V4.to_string(),
            programs: &self.node.programs,
            network: network.path(),
            directory,
            control: &self.node.control,
            authority: &self.node.authority,
        };
        let refreshed = volumes::prepare(
            &context,
            &volumes::Sources {
                issuer: &self.node.issuer,
                subject: &self.token_subject(),
                roots: &roots,
            },
        )?;
        let mut pending = Vec::new();
        for (index, (container, role)) in containers.iter().enumerate() {
            let spec_file = directory
                .join("containers")
                .join(&container.name)
                .join("spec.json");
            fs::write(
                &spec_file,
                serde_json::to_vec(&context.process(container)?)?,
            )?;
            let restarts_after_success = *role != Role::Init;
            let supervisor = Supervisor::new(
                status.clone(),
                index,
                container,
                restarts_after_success,
                spec_file,
            )
            .with_context(|| format!("container {}", container.name))?;
            pending.push((*role, supervisor));
        }
        Ok((pending, refreshed))
    }

    /// Starts the containers and waits until a termination is requested. Terminates all of them but
    /// the sidecars.
    async fn start(
        &mut self,
        status: &Arc<StatusManager>,
        pending: Vec<(Role, Supervisor)>,
        sidecars: &mut Vec<StartedContainer>,
    ) {
        let mut apps = Vec::new();
        for (index, (role, supervisor)) in pending.into_iter().enumerate() {
            if role == Role::App && apps.is_empty() {
                status.phase("Running");
            }
            let mut started = spawn(supervisor);
            match role {
                Role::App => apps.push(started),
                Role::Sidecar => {
                    sidecars.push(started);
                    let mut states = status.watch();
                    let started = states.wait_for(|states| states[index].started);
                    tokio::select! {
                        _ = started => {}
                        () = termination_requested(&mut self.termination) => return,
                    }
                }
                Role::Init => tokio::select! {
                    _ = &mut started.task => {}
                    () = termination_requested(&mut self.termination) => {
                        return self.terminate(vec![started], self.termination_request()).await;
                    }
                },
            }
        }
        termination_requested(&mut self.termination).await;
        self.terminate(apps, self.termination_request()).await;
    }

    /// Terminates containers concurrently and waits until they exit. Forwards later requests, which
    /// can shorten the deadline.
    async fn terminate(&self, containers: Vec<StartedContainer>, request: Termination) {
        for container in &containers {
            container.termination.send_replace(Some(request));
        }
        let mut later = self.termination.clone();
        for mut container in containers {
            while !container.task.is_finished() {
                tokio::select! {
                    _ = &mut container.task => break,
                    Ok(()) = later.changed() => {
                        if let Some(request) = *later.borrow_and_update() {
                            container.termination.send_replace(Some(request));
                        }
                    }
                }
            }
        }
    }

    /// The requested termination.
    fn termination_request(&self) -> Termination {
        let requested = *self.termination.borrow();
        requested.expect("a termination is requested")
    }

    /// Spawns a task that renews the projected tokens and trust roots in the pod's volumes.
    fn refresh(&self, files: RefreshedFiles) -> JoinHandle<()> {
        let (node, subject, events) =
            (self.node.clone(), self.token_subject(), self.events.clone());
        let mut published = self.node.roots.clone();
        tokio::spawn(async move {
            let interval = files.tokens.iter().map(ProjectedToken::renew_after).min();
            let next_renewal = || async move {
                match interval {
                    Some(interval) => time::sleep(interval).await,
                    None => pending().await,
                }
            };
            let mut renewal = Box::pin(next_renewal());
            let pod = format!("{}/{}", subject.namespace, subject.pod);
            loop {
                let results: Vec<Result<()>> = tokio::select! {
                    () = &mut renewal => {
                        renewal = Box::pin(next_renewal());
                        files.tokens.iter().map(|token| token.renew(&node.issuer, &subject)).collect()
                    }
                    // The sender lives as long as the node.
                    Ok(()) = published.changed() => {
                        let roots = published.borrow_and_update().clone().unwrap_or_default();
                        files.roots.iter().map(|file| Ok(volumes::replace_file(file, &roots)?)).collect()
                    }
                };
                for error in results.into_iter().filter_map(Result::err) {
                    let text = format!("failed to refresh the volumes of pod {pod}: {error:#}");
                    let _ = events.send(Event::Notice(text));
                }
            }
        })
    }

    fn token_subject(&self) -> TokenSubject {
        TokenSubject {
            namespace: self.view.namespace.clone(),
            service_account: service_account(&self.pod),
            pod: self.view.name.clone(),
            pod_uid: self.pod.uid().unwrap_or_default(),
        }
    }

    /// The containers in start order.
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
}

/// The role of a container in its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Runs to completion before the application containers start.
    Init,
    /// Starts before the application containers and terminates after them.
    Sidecar,
    /// An application container.
    App,
}

/// The time between the deletion of a pod and SIGKILL.
pub(super) fn termination_grace_period(pod: &Pod) -> Duration {
    let seconds = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.termination_grace_period_seconds)
        .and_then(|seconds| u64::try_from(seconds).ok());
    Duration::from_secs(seconds.unwrap_or(30))
}

fn spawn(supervisor: Supervisor) -> StartedContainer {
    let (termination, receiver) = watch::channel(None);
    StartedContainer {
        termination,
        task: tokio::spawn(supervisor.run(receiver)),
    }
}
