//! The mutable state of a node, and its reconciliation: `sync` starts and stops pods, and updates
//! the catalog, the translation rules, the hosts files and the webhooks. It never blocks, so the
//! event loop calls it after every event.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::{
    api::{
        core::v1::{Pod, Service},
        discovery::v1::EndpointSlice,
    },
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use kube::ResourceExt;
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use super::{
    Event, NODE_DIRECTORY, Node,
    admission::{self, Webhook},
    catalog::{Catalog, Contents},
    container::Termination,
    endpoints,
    execute::ExecCommand,
    network::run_with_input,
    objects::{Key, Objects},
    pod::{PodTask, termination_grace_period},
    services, spec,
    volumes::replace_file,
    workloads::{Kind, OwnedPod, Workload},
};
use crate::protocol::{Message, PodView};

/// The state that only the event loop changes.
pub(super) struct State {
    node: Arc<Node>,
    events: mpsc::UnboundedSender<Event>,
    webhooks: watch::Sender<Vec<Webhook>>,
    rules: watch::Sender<Rules>,
    catalog: Catalog,
    /// By uid.
    pods: BTreeMap<String, PodRecord>,
    shutdown: Option<Shutdown>,
}

/// A pod that has been created.
struct PodRecord {
    owner: (Kind, Key),
    template_hash: String,
    /// The last reported state.
    pod: Pod,
    view: PodView,
    termination: watch::Sender<Option<Termination>>,
    /// Closes when the record is dropped; see `ExecCommand`.
    alive: watch::Sender<()>,
}

/// A requested shutdown of all pods.
struct Shutdown {
    requests: Vec<u64>,
    termination: Termination,
}

/// iptables-restore input by address family.
#[derive(Clone, Default, PartialEq, Eq)]
struct Rules {
    v4: String,
    v6: Option<String>,
}

impl State {
    /// The state of a node without pods. Fails if the kernel does not accept the translation rules.
    pub(super) fn new(
        node: Arc<Node>,
        events: mpsc::UnboundedSender<Event>,
        webhooks: watch::Sender<Vec<Webhook>>,
    ) -> Result<Self> {
        let first = Rules::new(&[], &[], node.network.ipv6);
        first.load()?;
        let rules = watch::Sender::new(first);
        tokio::spawn(load_rules(rules.subscribe(), events.clone()));
        let catalog = Catalog::new(std::path::Path::new(NODE_DIRECTORY).join("control/catalog"));
        Ok(Self {
            node,
            events,
            webhooks,
            rules,
            catalog,
            pods: BTreeMap::new(),
            shutdown: None,
        })
    }

    /// Creates or replaces objects. The error lists all invalid objects.
    pub(super) fn apply(&mut self, values: Vec<Value>) -> Result<()> {
        let mut objects = self.node.objects();
        let ipv6 = self.node.network.ipv6;
        let errors: Vec<String> = values
            .into_iter()
            .filter_map(|value| objects.apply(value, ipv6).err())
            .map(|error| format!("{error:#}"))
            .collect();
        for object in objects.unknown.drain(..) {
            let text = format!("ignored {object}: the sandbox does not have this kind");
            // Fails only when the node exits.
            let _ = self.events.send(Event::Notice(text));
        }
        ensure!(errors.is_empty(), "{}", errors.join("\n"));
        Ok(())
    }

    /// Deletes an object. If a workload owns a deleted pod, the workload creates a replacement.
    pub(super) fn delete(&mut self, kind: &str, key: Key) -> Result<()> {
        let deleted = self.node.objects().delete(kind, &key);
        match self.find(&key).filter(|_| kind == "Pod") {
            Some((uid, _)) => self.stop(&uid.clone()),
            None => deleted?,
        }
        Ok(())
    }

    /// The uid and the record of a pod.
    fn find(&self, key: &Key) -> Option<(&String, &PodRecord)> {
        self.pods.iter().find(|(_, record)| record.key() == *key)
    }

    pub(super) fn scale(&mut self, key: &Key, replicas: i32) -> Result<()> {
        self.node.objects().scale(key, replicas)
    }

    /// Prepares a command to run in a pod.
    pub(super) fn exec(
        &self,
        key: &Key,
        container: &str,
        argv: Vec<String>,
    ) -> Result<ExecCommand> {
        let (uid, record) = self
            .find(key)
            .with_context(|| format!("pod {}/{} not found", key.0, key.1))?;
        let directory = self
            .node
            .pod_directory(uid)
            .join("containers")
            .join(container);
        ExecCommand::new(&directory, argv, record.alive.subscribe())
            .with_context(|| format!("pod {}/{}, container {container}", key.0, key.1))
    }

    /// Terminates all pods. The event loop answers `request` when all of them are removed.
    pub(super) fn shut_down(&mut self, request: u64, grace: Duration) {
        let termination = Termination {
            deadline: Instant::now() + grace,
            pre_stop: false,
        };
        let shutdown = self.shutdown.get_or_insert(Shutdown {
            requests: Vec::new(),
            termination,
        });
        shutdown.requests.push(request);
        let deadline = &mut shutdown.termination.deadline;
        *deadline = termination.deadline.min(*deadline);
    }

    /// The ids of the shutdown requests, once all pods are removed.
    pub(super) fn completed_shutdown(&self) -> Option<&[u64]> {
        let shutdown = self.shutdown.as_ref()?;
        self.pods.is_empty().then_some(&shutdown.requests)
    }

    /// Records an event. Returns the message for the client, if any.
    pub(super) fn event(&mut self, event: Event) -> Option<Message> {
        match event {
            Event::Notice(text) => Some(Message::Notice(text)),
            Event::PodUpdated { uid, pod, view } => {
                let record = self.pods.get_mut(&uid)?;
                record.view = PodView {
                    terminating: record.view.terminating,
                    ..*view
                };
                if let Some(pod) = pod {
                    let deleted = record.pod.metadata.deletion_timestamp.take();
                    record.pod = *pod;
                    record.pod.metadata.deletion_timestamp = deleted;
                }
                Some(Message::Pod(record.view.clone()))
            }
            Event::PodChanged { uid } => {
                let record = self.pods.get(&uid)?;
                Some(Message::Pod(record.view.clone()))
            }
            Event::PodRemoved { uid } => {
                let record = self.pods.remove(&uid)?;
                Some(Message::PodRemoved {
                    namespace: record.view.namespace,
                    name: record.view.name,
                })
            }
        }
    }

    /// Reconciles the pods and all published state.
    pub(super) fn sync(&mut self) -> Result<()> {
        // Webhooks come first, because new pods need them for admission.
        self.publish_webhooks();
        if let Some(termination) = self.shutdown.as_ref().map(|shutdown| shutdown.termination) {
            self.terminate_pods(termination);
        } else {
            self.run_workloads()?;
        }
        let node = self.node.clone();
        let objects = node.objects();
        let slices = self.slices(&objects);
        self.write_catalog(&objects, &slices)?;
        let services: Vec<&Service> = objects.services.values().collect();
        publish(
            &self.rules,
            Rules::new(&services, &slices, node.network.ipv6),
        );
        let namespaces: BTreeSet<&String> = self
            .pods
            .values()
            .map(|record| &record.view.namespace)
            .collect();
        let hosts = namespaces
            .into_iter()
            .map(|namespace| {
                (
                    namespace.clone(),
                    services::hosts(&services, &slices, namespace),
                )
            })
            .collect();
        node.hosts
            .update(hosts)
            .context("failed to write a hosts file")?;
        Ok(())
    }

    fn publish_webhooks(&self) {
        let objects = self.node.objects();
        let ca_file = |uid: &str| self.node.pod_directory(uid).join("injector/ca.pem");
        let webhooks = admission::webhooks(&objects, &self.slices(&objects), &ca_file);
        publish(&self.webhooks, webhooks);
    }

    fn run_workloads(&mut self) -> Result<()> {
        let workloads = self.node.objects().workloads.clone();
        for (owner, workload) in &workloads {
            let owned: Vec<OwnedPod> = self
                .pods
                .values()
                .filter(|record| record.owner == *owner)
                .map(PodRecord::owned)
                .collect();
            let plan = workload.plan(&owned);
            for _ in 0..plan.create {
                self.start(workload, owner)?;
            }
            for name in plan.delete {
                let key = (owner.1.0.clone(), name);
                if let Some(uid) = self.find(&key).map(|(uid, _)| uid.clone()) {
                    self.stop(&uid);
                }
            }
        }
        let orphans = self
            .pods
            .iter()
            .filter(|(_, record)| !workloads.contains_key(&record.owner))
            .map(|(uid, _)| uid.clone());
        for uid in orphans.collect::<Vec<_>>() {
            self.stop(&uid);
        }
        Ok(())
    }

    fn start(&mut self, workload: &Workload, owner: &(Kind, Key)) -> Result<()> {
        let pod = workload.new_pod();
        let uid = pod.uid().unwrap_or_default();
        let view = PodView {
            namespace: owner.1.0.clone(),
            name: pod.name_any(),
            workload: owner.1.1.clone(),
            phase: "Pending".into(),
            ..PodView::default()
        };
        let namespace_labels = self.node.objects().namespace_labels(&view.namespace);
        // For the injector.
        let file = format!("namespaces/{}.json", view.namespace);
        let namespace = json!({"metadata": {"name": view.namespace, "labels": namespace_labels}});
        replace_file(&self.node.control.join(file), &namespace.to_string())
            .context("failed to write a namespace")?;
        let (termination, receiver) = watch::channel(None);
        let task = PodTask {
            node: self.node.clone(),
            pod: pod.clone(),
            view: view.clone(),
            namespace_labels,
            termination: receiver,
            events: self.events.clone(),
        };
        tokio::spawn(task.run());
        let _ = self.events.send(Event::PodChanged { uid: uid.clone() });
        let record = PodRecord {
            owner: owner.clone(),
            template_hash: workload.template_hash().to_owned(),
            pod,
            view,
            termination,
            alive: watch::Sender::new(()),
        };
        self.pods.insert(uid, record);
        Ok(())
    }

    /// Terminates a pod within its grace period.
    fn stop(&mut self, uid: &str) {
        let Some(record) = self
            .pods
            .get_mut(uid)
            .filter(|record| !record.view.terminating)
        else {
            return;
        };
        record.terminate(Termination {
            deadline: Instant::now() + termination_grace_period(&record.pod),
            pre_stop: true,
        });
        let _ = self.events.send(Event::PodChanged {
            uid: uid.to_owned(),
        });
    }

    /// Terminates the applications first. The control plane follows once they are removed.
    fn terminate_pods(&mut self, termination: Termination) {
        let apps_left = self.pods.values().any(|record| !record.is_control_plane());
        for record in self
            .pods
            .values_mut()
            .filter(|record| !apps_left || !record.is_control_plane())
        {
            let current = *record.termination.borrow();
            if current
                .is_none_or(|current| current.pre_stop || current.deadline > termination.deadline)
            {
                record.terminate(termination);
            }
        }
    }

    fn slices(&self, objects: &Objects) -> Vec<EndpointSlice> {
        let mut slices: Vec<EndpointSlice> = objects.slices.values().cloned().collect();
        for ((namespace, _), service) in &objects.services {
            let pods: Vec<&Pod> = self
                .pods
                .values()
                .filter(|record| record.view.namespace == *namespace)
                .map(|record| &record.pod)
                .collect();
            slices.extend(endpoints::slices(service, &pods, &objects.nodes));
        }
        slices
    }

    fn write_catalog(&mut self, objects: &Objects, slices: &[EndpointSlice]) -> Result<()> {
        let mut contents = Contents::default();
        for service in objects.services.values() {
            contents.add(service)?;
        }
        for ((kind, (namespace, name)), route) in &objects.routes {
            contents.add_as(kind, namespace, name, route)?;
        }
        for node in objects.nodes.values() {
            contents.add(node)?;
        }
        for slice in slices {
            contents.add(slice)?;
        }
        for record in self.pods.values().filter(|record| record.view.ip.is_some()) {
            contents.add(&record.pod)?;
        }
        self.catalog
            .write(contents)
            .context("failed to write the catalog")
    }
}

impl PodRecord {
    fn key(&self) -> Key {
        (self.view.namespace.clone(), self.view.name.clone())
    }

    fn owned(&self) -> OwnedPod {
        OwnedPod {
            name: self.view.name.clone(),
            template_hash: self.template_hash.clone(),
            ready: self.view.ready,
            terminating: self.view.terminating,
        }
    }

    fn terminate(&mut self, termination: Termination) {
        self.view.terminating = true;
        self.pod.metadata.deletion_timestamp.get_or_insert_with(now);
        self.termination.send_replace(Some(termination));
    }

    fn is_control_plane(&self) -> bool {
        let containers = self.pod.spec.iter().flat_map(|spec| &spec.containers);
        let mut programs = containers.filter_map(|container| {
            spec::program(container.image.as_deref().unwrap_or_default()).ok()
        });
        programs.any(|program| program == "controller" || program == "injector")
    }
}

impl Rules {
    fn new(services: &[&Service], slices: &[EndpointSlice], ipv6: bool) -> Self {
        Self {
            v4: services::rules(services, slices, false),
            v6: ipv6.then(|| services::rules(services, slices, true)),
        }
    }

    fn load(&self) -> Result<()> {
        run_with_input("iptables-restore", &["-w"], &self.v4)?;
        self.v6.as_ref().map_or(Ok(()), |text| {
            run_with_input("ip6tables-restore", &["-w"], text)
        })
    }
}

/// Notifies the receivers if the value differs.
fn publish<T: PartialEq>(sender: &watch::Sender<T>, value: T) {
    sender.send_if_modified(|current| {
        let modified = *current != value;
        *current = value;
        modified
    });
}

fn now() -> Time {
    // In whole seconds, as the API server writes timestamps.
    let now = Timestamp::try_from(SystemTime::now()).unwrap_or(Timestamp::MAX);
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}

/// Loads the latest rules after each change.
async fn load_rules(mut rules: watch::Receiver<Rules>, events: mpsc::UnboundedSender<Event>) {
    while rules.changed().await.is_ok() {
        let latest = rules.borrow_and_update().clone();
        if let Ok(Err(error)) = tokio::task::spawn_blocking(move || latest.load()).await {
            let _ = events.send(Event::Notice(format!(
                "failed to load the Service translation rules: {error:#}"
            )));
        }
    }
}
