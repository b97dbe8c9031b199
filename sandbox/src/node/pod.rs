//! The lifecycle of one pod: admission, network, volumes, init containers and native sidecars in
//! order, application containers, and termination of the sidecars in reverse order after the
//! application containers.

use std::{fs, path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use diy_mesh_injector::containers::ROOTS_CONFIG_MAP;
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::ResourceExt;
use serde_json::Value;
use tokio::{
    sync::{mpsc, watch},
    time::{self, Instant},
};

use super::{
    Event, Node, admission,
    container::{Role, Supervisor, Termination, requested},
    objects::Key,
    roots,
    spec::PodContext,
    status::PodStatus,
    volumes::Volumes,
};
use crate::protocol::ContainerView;

/// Runs a pod until it is deleted.
pub(super) struct PodTask {
    pub(super) node: Arc<Node>,
    pub(super) key: Key,
    /// As created by its workload.
    pub(super) pod: Pod,
    pub(super) status: Arc<PodStatus>,
    pub(super) namespace_labels: Value,
    pub(super) termination: Termination,
    pub(super) events: mpsc::UnboundedSender<Event>,
}

const MIN_ADMISSION_RETRY_INTERVAL: Duration = Duration::from_millis(100);
const MAX_ADMISSION_RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// The least time between SIGTERM and SIGKILL of a sidecar.
const MIN_SIDECAR_GRACE_PERIOD: Duration = Duration::from_secs(2);

impl PodTask {
    pub(super) async fn run(mut self) {
        let directory = self.node.pod_directory(&self.pod);
        let mut termination = self.termination.clone();
        let is_admitted = tokio::select! {
            () = async { self.admit().await; self.wait_for_roots().await } => true,
            _ = requested(&mut termination) => false,
        };
        if is_admitted && let Err(error) = self.run_containers(&directory).await {
            let (namespace, name) = &self.key;
            let text = format!("failed to run pod {namespace}/{name}: {error:#}");
            self.status.notice(text);
            self.report(format!("{error:#}"));
            requested(&mut termination).await;
        }
        // The directory is on a tmpfs that disappears with the sandbox.
        let _ = fs::remove_dir_all(directory);
        let _ = self.events.send(Event::PodRemoved(self.key));
    }

    /// Calls the webhooks until they admit the pod, as a workload controller retries to create it.
    async fn admit(&mut self) {
        let mut webhooks = self.node.webhooks.clone();
        let mut interval = MIN_ADMISSION_RETRY_INTERVAL;
        loop {
            let current = webhooks.borrow_and_update().clone();
            match admission::admit(&self.pod, &self.namespace_labels, &current).await {
                Ok(mut pod) => {
                    let node = &mut pod.spec.get_or_insert_default().node_name;
                    node.get_or_insert_with(|| "sandbox".into());
                    let is_injected = pod.annotations().get("diy-service-mesh/status")
                        == Some(&"injected".to_owned());
                    if current.is_empty() && asks_for_proxy(&pod) {
                        let (namespace, name) = &self.key;
                        self.status.notice(format!(
                            "pod {namespace}/{name} has no proxy: it asks for one, and the manifests have no \
                            webhook; add a copy of the folder manifests of the mesh"
                        ));
                    }
                    self.pod = pod.clone();
                    let _ = self
                        .events
                        .send(Event::PodAdmitted(self.key.clone(), Box::new(pod)));
                    self.status.update(|view| {
                        (view.injected, view.reason) = (is_injected, None);
                    });
                    return;
                }
                Err(error) => self.report(format!("not created: {error:#}")),
            }
            // A change of the webhooks ends the wait.
            let _ = time::timeout(interval, webhooks.changed()).await;
            interval = (interval * 2).min(MAX_ADMISSION_RETRY_INTERVAL);
        }
    }

    /// Waits until the ConfigMap of the trust roots exists, if the pod mounts it.
    async fn wait_for_roots(&mut self) {
        let mut published = self.node.roots.clone();
        if !self.pod.spec.as_ref().is_some_and(roots::mounted) || published.borrow().is_some() {
            return;
        }
        self.report(format!(
            "ConfigMap {ROOTS_CONFIG_MAP} not found: the controller creates it, check that it is running"
        ));
        // The sender lives as long as the node.
        let _ = published.wait_for(Option::is_some).await;
        self.status.update(|view| view.reason = None);
    }

    /// Reports why the pod does not start.
    fn report(&self, reason: String) {
        self.status.update(|view| view.reason = Some(reason));
    }

    /// Runs the containers until the pod is deleted.
    async fn run_containers(&mut self, directory: &Path) -> Result<()> {
        let network = self.node.network.pod().await?;
        let containers = containers(&self.pod);
        self.status.update(|view| {
            view.ip = Some(network.v4.to_string());
            view.ipv6 = network.v6.map(|ip| ip.to_string());
            let names = containers.iter().map(|(container, _)| &*container.name);
            view.containers = names.map(ContainerView::new).collect();
        });
        let context = PodContext {
            pod: &self.pod,
            ip: network.v4,
            paths: &self.node.paths,
            network: network.path(),
            directory,
        };
        let own = [
            Some(network.v4.to_string()),
            network.v6.map(|ip| ip.to_string()),
        ];
        let own = own
            .iter()
            .flatten()
            .map(|ip| format!("{ip} {}\n", self.key.1));
        let volumes = Volumes::create(&self.node, &context, &self.key.0, own.collect())?;
        let mut supervisors = Vec::new();
        for (index, &(container, role)) in containers.iter().enumerate() {
            let (status, messages) = (self.status.clone(), self.node.messages.clone());
            let supervisor = context.write_spec(container).and_then(|spec_file| {
                Supervisor::new(status, index, container, role, messages, spec_file)
            });
            supervisors.push(supervisor.with_context(|| format!("container {}", container.name))?);
        }
        tokio::select! {
            never = volumes.refresh(&self.node, &self.pod, &self.status) => match never {},
            () = self.supervise(supervisors) => Ok(()),
        }
    }

    async fn supervise(&self, supervisors: Vec<Supervisor>) {
        let mut termination = self.termination.clone();
        let (mut sidecars, mut apps) = (Vec::new(), Vec::new());
        for supervisor in supervisors {
            if termination.borrow().is_some() {
                break;
            }
            match supervisor.role {
                Role::Init => supervisor.run(termination.clone()).await,
                Role::Sidecar => {
                    let (sender, own_termination) = watch::channel(None);
                    let started = supervisor.started();
                    sidecars.push((sender, tokio::spawn(supervisor.run(own_termination))));
                    tokio::select! {
                        () = started => {}
                        _ = requested(&mut termination) => {}
                    }
                }
                Role::App => {
                    self.status.update(|view| view.phase = "Running".into());
                    apps.push(tokio::spawn(supervisor.run(termination.clone())));
                }
            }
        }
        let deadline = requested(&mut termination).await;
        for app in apps {
            let _ = app.await;
        }
        for (sender, task) in sidecars.into_iter().rev() {
            let least = Instant::now() + MIN_SIDECAR_GRACE_PERIOD;
            sender.send_replace(Some(deadline.max(least)));
            let _ = task.await;
        }
    }
}

/// The containers of a pod in start order.
fn containers(pod: &Pod) -> Vec<(&Container, Role)> {
    let spec = pod.spec.iter();
    let init = spec
        .clone()
        .flat_map(|spec| spec.init_containers.iter().flatten());
    let init = init.map(|container| match container.restart_policy.as_deref() {
        Some("Always") => (container, Role::Sidecar),
        _ => (container, Role::Init),
    });
    let apps = spec.flat_map(|spec| &spec.containers);
    init.chain(apps.map(|container| (container, Role::App)))
        .collect()
}

/// The time between the deletion of a pod and SIGKILL.
pub(super) fn termination_grace_period(pod: &Pod) -> Duration {
    let spec = pod.spec.as_ref();
    let seconds = spec.and_then(|spec| spec.termination_grace_period_seconds);
    Duration::from_secs(seconds.unwrap_or(30).unsigned_abs())
}

/// Whether the pod has the annotation that enables injection.
fn asks_for_proxy(pod: &Pod) -> bool {
    let value = pod.annotations().get("diy-service-mesh/inject");
    value.is_some_and(|value| value.eq_ignore_ascii_case("true"))
}
