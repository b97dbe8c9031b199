//! The mutable state of a node, and its reconciliation: `sync` starts and stops pods, and updates
//! the catalog, the translation rules, the hosts files and the webhooks. It never blocks, so the
//! event loop calls it after every event.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::ResourceExt;
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use super::{
    Event, NODE_DIRECTORY, Node,
    admin_page::admin_page,
    admission::{self, Webhook},
    catalog::Catalog,
    endpoints,
    execute::execute,
    objects::{CATALOG_KINDS, Key, Objects},
    pod::{PodTask, termination_grace_period},
    services, spec,
    status::PodStatus,
    translation::{self, Translation},
    volumes::replace_file,
    workloads::Workload,
};
use crate::{
    page::Page,
    protocol::{Message, Output, PodView},
};

/// The state that only the event loop changes.
pub(super) struct State {
    node: Arc<Node>,
    objects: Objects,
    pods: BTreeMap<Key, PodRecord>,
    catalog: Catalog,
    events: mpsc::UnboundedSender<Event>,
    webhooks: watch::Sender<Vec<Webhook>>,
    translations: watch::Sender<Vec<Translation>>,
    /// When the node exits, with all that still runs.
    shutdown: Option<Instant>,
}

/// A pod that has been created.
struct PodRecord {
    /// The kind and key of its workload.
    owner: (String, Key),
    template_hash: String,
    /// As admitted, without status.
    pod: Pod,
    status: Arc<PodStatus>,
    deleted_at: Option<Time>,
    /// Closes when the pod is removed.
    termination: watch::Sender<Option<Instant>>,
}

impl State {
    /// The state of a node without pods. Fails if the kernel does not accept the translation rules.
    pub(super) fn new(
        node: Arc<Node>,
        events: mpsc::UnboundedSender<Event>,
        webhooks: watch::Sender<Vec<Webhook>>,
    ) -> Result<Self> {
        translation::load(&[])?;
        let translations = watch::Sender::default();
        tokio::spawn(load(translations.subscribe(), events.clone()));
        Ok(Self {
            node,
            objects: Objects::default(),
            pods: BTreeMap::new(),
            catalog: Catalog::new(Path::new(NODE_DIRECTORY).join("control/catalog")),
            events,
            webhooks,
            translations,
            shutdown: None,
        })
    }

    /// Creates or replaces objects. The error lists all invalid objects.
    pub(super) fn apply(&mut self, values: Vec<Value>) -> Result<()> {
        let ipv6 = self.node.network.ipv6;
        let mut errors = Vec::new();
        for value in values {
            let result = self.objects.apply(value, ipv6);
            errors.extend(result.err().map(|error| format!("{error:#}")));
        }
        for object in self.objects.unknown.drain(..) {
            let text = format!("ignored {object}: the sandbox does not have this kind");
            // Fails only when the node exits.
            let _ = self.events.send(Event::Notice(text));
        }
        ensure!(errors.is_empty(), "{}", errors.join("\n"));
        Ok(())
    }

    /// Deletes an object. If a workload owns a deleted pod, the workload creates a replacement.
    pub(super) fn delete(&mut self, kind: &str, key: &Key) -> Result<()> {
        let deleted = self.objects.delete(kind, key);
        match self.pods.get_mut(key).filter(|_| kind == "Pod") {
            Some(record) => record.terminate(),
            None => deleted?,
        }
        Ok(())
    }

    pub(super) fn scale(&mut self, key: &Key, replicas: usize) -> Result<()> {
        self.objects.scale(key, replicas)
    }

    /// Prepares a command to run in a pod.
    pub(super) fn exec(
        &self,
        key: &Key,
        container: &str,
        argv: Vec<String>,
    ) -> Result<impl Future<Output = Result<Output>> + Send + use<>> {
        let (record, container) = self.container(key, container)?;
        Ok(execute(container, argv, record.termination.subscribe()))
    }

    /// Prepares to read a page of the admin server of a pod's proxy.
    pub(super) fn admin_page(
        &self,
        key: &Key,
        path: String,
    ) -> Result<impl Future<Output = Result<Page>> + Send + use<>> {
        let (_, container) = self.container(key, "proxy")?;
        Ok(admin_page(container, path))
    }

    /// A pod, and the directory of one of its containers.
    fn container(&self, key: &Key, name: &str) -> Result<(&PodRecord, PathBuf)> {
        let record = self.pods.get(key);
        let record = record.with_context(|| format!("pod {}/{} not found", key.0, key.1))?;
        let directory = self.node.pod_directory(&record.pod);
        Ok((record, directory.join("containers").join(name)))
    }

    /// Terminates all pods. The node exits when they are removed, at the latest at the deadline.
    pub(super) fn shut_down(&mut self, deadline: Instant) {
        self.shutdown = Some(deadline);
    }

    pub(super) fn is_shut_down(&self) -> bool {
        self.shutdown.is_some() && self.pods.is_empty()
    }

    /// When the node exits.
    pub(super) fn deadline(&self) -> Instant {
        const NEVER: std::time::Duration = std::time::Duration::from_secs(1 << 30);
        self.shutdown.unwrap_or_else(|| Instant::now() + NEVER)
    }

    /// Records an event. Returns the message for the client, if any.
    pub(super) fn event(&mut self, event: Option<Event>) -> Option<Message> {
        match event? {
            Event::Notice(text) => Some(Message::Notice(text)),
            Event::PodAdmitted(key, pod) => {
                self.pods.get_mut(&key)?.pod = *pod;
                None
            }
            Event::PodChanged(key) => {
                let record = self.pods.get(&key)?;
                Some(Message::Pod(record.view()))
            }
            Event::PodRemoved(key) => {
                self.pods.remove(&key)?;
                let (namespace, name) = key;
                Some(Message::PodRemoved { namespace, name })
            }
        }
    }

    /// Reconciles the pods and all published state.
    pub(super) fn sync(&mut self) -> Result<()> {
        let slices = self.slices();
        // Webhooks come first, because new pods need them for admission.
        let pods = Path::new(NODE_DIRECTORY).join("pods");
        let ca_file = |uid: &str| pods.join(uid).join("injector/ca.pem");
        let webhooks = admission::webhooks(&self.objects, &slices, ca_file);
        publish(&self.webhooks, webhooks);
        match self.shutdown {
            Some(_) => self.terminate_pods(),
            None => self.run_workloads()?,
        }
        self.write_catalog(&slices)
            .context("failed to write the catalog")?;
        for ((namespace, name), record) in &self.pods {
            let services = endpoints::services_of(&slices, namespace, name);
            record.status.update(|view| view.services = services);
        }
        let services: Vec<&Value> = self.objects.of("Service").collect();
        let translations = services::translations(&services, &slices);
        publish(&self.translations, translations);
        let hosts = self.pods.keys().map(|(namespace, _)| {
            let text = services::hosts(&services, &slices, namespace);
            (namespace.clone(), text)
        });
        publish(&self.node.hosts, hosts.collect());
        Ok(())
    }

    /// The EndpointSlices of all Services.
    fn slices(&self) -> Vec<Value> {
        let mut slices: Vec<Value> = self.objects.of("EndpointSlice").cloned().collect();
        let pods: Vec<_> = self
            .pods
            .values()
            .map(|one| (&one.pod, one.view()))
            .collect();
        let node = |name: &str| self.objects.get("Node", &(String::new(), name.to_owned()));
        for service in self.objects.of("Service") {
            let namespace = &service["metadata"]["namespace"];
            let own = pods.iter().filter(|(_, view)| namespace == &view.namespace);
            slices.extend(endpoints::slices(service, own, node));
        }
        slices
    }

    fn run_workloads(&mut self) -> Result<()> {
        let workloads = self.objects.workloads.clone();
        for (owner, workload) in &workloads {
            let records = self.pods.values().filter(|record| record.owner == *owner);
            let owned = records.map(|record| (&*record.template_hash, record.view()));
            let owned: Vec<_> = owned.collect();
            let plan = workload.plan(&owned);
            for _ in 0..plan.create {
                self.start(workload, owner)?;
            }
            for name in plan.delete {
                let record = self.pods.get_mut(&(owner.1.0.clone(), name));
                record.into_iter().for_each(PodRecord::terminate);
            }
        }
        for record in self.pods.values_mut() {
            if !workloads.contains_key(&record.owner) {
                record.terminate();
            }
        }
        Ok(())
    }

    fn start(&mut self, workload: &Workload, owner: &(String, Key)) -> Result<()> {
        let pod = workload.new_pod(&owner.1);
        let (namespace, name) = (owner.1.0.clone(), pod.name_any());
        let labels = self.objects.namespace_labels(&namespace);
        // For the injector.
        let control = &self.node.paths.control;
        let file = control.join(format!("namespaces/{namespace}.json"));
        let object = json!({"metadata": {"name": namespace, "labels": labels}});
        replace_file(&file, &object.to_string()).context("failed to write a namespace")?;
        let key = (namespace.clone(), name.clone());
        let view = PodView {
            namespace,
            name,
            workload: owner.1.1.clone(),
            phase: "Pending".into(),
            ..PodView::default()
        };
        let (termination, receiver) = watch::channel(None);
        let status = Arc::new(PodStatus::new(view, self.events.clone()));
        let task = PodTask {
            node: self.node.clone(),
            key: key.clone(),
            pod: pod.clone(),
            status: status.clone(),
            namespace_labels: labels,
            termination: receiver,
            events: self.events.clone(),
        };
        tokio::spawn(task.run());
        let _ = self.events.send(Event::PodChanged(key.clone()));
        let record = PodRecord {
            owner: owner.clone(),
            template_hash: workload.hash.clone(),
            pod,
            status,
            deleted_at: None,
            termination,
        };
        self.pods.insert(key, record);
        Ok(())
    }

    /// Terminates the applications first. The control plane follows once they are removed.
    fn terminate_pods(&mut self) {
        let apps_left = self.pods.values().any(|record| !record.is_control_plane());
        for record in self.pods.values_mut() {
            if !apps_left || !record.is_control_plane() {
                record.terminate();
            }
        }
    }

    fn write_catalog(&mut self, slices: &[Value]) -> Result<()> {
        let pods = self.pods.values();
        let pods = pods.filter(|record| record.status.view().ip.is_some());
        let pods: Vec<Value> = pods.map(PodRecord::object).collect::<Result<_, _>>()?;
        // The slices contain those that were applied.
        let kinds = CATALOG_KINDS
            .iter()
            .filter(|&&kind| kind != "EndpointSlice");
        let objects = kinds.flat_map(|kind| self.objects.of(kind));
        Ok(self.catalog.write(objects.chain(slices).chain(&pods))?)
    }
}

impl PodRecord {
    fn view(&self) -> PodView {
        self.status.view().clone()
    }

    /// The pod with what the controller reads of its status.
    fn object(&self) -> serde_json::Result<Value> {
        let view = self.status.view();
        let mut object = serde_json::to_value(&self.pod)?;
        object["metadata"]["deletionTimestamp"] = json!(self.deleted_at);
        let ips = [&view.ip, &view.ipv6].into_iter().flatten();
        object["status"] = json!({
            "phase": view.phase,
            "podIPs": ips.map(|ip| json!({"ip": ip})).collect::<Value>(),
            "conditions": [{"type": "Ready", "status": if view.ready { "True" } else { "False" }}],
        });
        Ok(object)
    }

    /// Terminates the pod within its grace period.
    fn terminate(&mut self) {
        if self.deleted_at.is_some() {
            return;
        }
        // In whole seconds, as the API server writes timestamps.
        let now = Timestamp::try_from(SystemTime::now()).unwrap_or(Timestamp::MAX);
        self.deleted_at = Some(Time(Timestamp::from_second(now.as_second()).unwrap_or(now)));
        self.status.update(|view| view.terminating = true);
        let deadline = Instant::now() + termination_grace_period(&self.pod);
        self.termination.send_replace(Some(deadline));
    }

    fn is_control_plane(&self) -> bool {
        let containers = self.pod.spec.iter().flat_map(|spec| &spec.containers);
        let mut images = containers.filter_map(|container| container.image.as_deref());
        images.any(|image| matches!(spec::program(image), Ok("controller" | "injector")))
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

/// Loads the latest translations after each change.
async fn load(
    mut translations: watch::Receiver<Vec<Translation>>,
    events: mpsc::UnboundedSender<Event>,
) {
    while translations.changed().await.is_ok() {
        let latest = translations.borrow_and_update().clone();
        let loaded = tokio::task::spawn_blocking(move || translation::load(&latest)).await;
        if let Ok(Err(error)) = loaded {
            let text = format!("failed to load the translation of cluster addresses: {error:#}");
            let _ = events.send(Event::Notice(text));
        }
    }
}
