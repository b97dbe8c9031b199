//! All that changes on a node, and the comparison of what is wanted with what is there: `sync` starts and stops pods and
//! brings catalog, rules, names and webhooks in step. It is cheap enough to be called after every event, and waits for nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
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
use serde_json::Value;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use super::{
    Event, FOLDER, Node,
    admission::{self, Hook},
    catalog::{Catalog, Contents},
    container::Stop,
    endpoints,
    execute::Program,
    network::feed,
    objects::{Key, Objects},
    pod::PodTask,
    services, spec,
    workloads::{Kind, Owned, Workload},
};
use crate::sandbox::protocol::{Message, PodView};

/// See the module.
pub(super) struct State {
    node: Arc<Node>,
    events: mpsc::UnboundedSender<Event>,
    hooks: watch::Sender<Vec<Hook>>,
    rules: watch::Sender<Rules>,
    catalog: Catalog,
    /// By uid.
    pods: BTreeMap<String, Record>,
    ending: Option<Ending>,
}

/// A pod that has been made.
struct Record {
    owner: (Kind, Key),
    hash: String,
    /// As last heard of.
    pod: Pod,
    view: PodView,
    stop: watch::Sender<Option<Stop>>,
    /// Dropped with the record; see `Program`.
    alive: watch::Sender<()>,
}

/// The order to stop everything.
struct Ending {
    requests: Vec<u64>,
    order: Stop,
}

/// The text of the rules, by family.
#[derive(Clone, Default, PartialEq, Eq)]
struct Rules {
    v4: String,
    v6: Option<String>,
}

impl State {
    /// The state of a node without pods. Shows at once whether the kernel takes the rules.
    pub(super) fn new(
        node: Arc<Node>,
        events: mpsc::UnboundedSender<Event>,
        hooks: watch::Sender<Vec<Hook>>,
    ) -> Result<Self> {
        let first = Rules {
            v4: services::rules(&[], &[], false),
            v6: node.network.ipv6.then(|| services::rules(&[], &[], true)),
        };
        first.load()?;
        let rules = watch::Sender::new(first);
        tokio::spawn(keep_rules(rules.subscribe(), events.clone()));
        let catalog = Catalog::new(std::path::Path::new(FOLDER).join("control/catalog"));
        Ok(Self {
            node,
            events,
            hooks,
            rules,
            catalog,
            pods: BTreeMap::new(),
            ending: None,
        })
    }

    /// Creates or replaces objects; one report of all problems.
    pub(super) fn apply(&mut self, values: Vec<Value>) -> Result<()> {
        let mut objects = self
            .node
            .objects
            .lock()
            .expect("nobody panics while holding it");
        let ipv6 = self.node.network.ipv6;
        let problems: Vec<String> = values
            .into_iter()
            .filter_map(|value| objects.apply(value, ipv6).err())
            .map(|error| format!("{error:#}"))
            .collect();
        ensure!(problems.is_empty(), "{}", problems.join("\n"));
        Ok(())
    }

    /// Deletes an object; a pod also where a workload owns it, which then makes another.
    pub(super) fn delete(&mut self, kind: &str, key: Key) -> Result<()> {
        let uid = self
            .pods
            .iter()
            .find(|(_, record)| kind == "Pod" && record.key() == key)
            .map(|(uid, _)| uid.clone());
        let gone = self
            .node
            .objects
            .lock()
            .expect("nobody panics while holding it")
            .delete(kind, &key);
        match uid {
            Some(uid) => self.stop(&uid),
            None => return gone,
        }
        Ok(())
    }

    pub(super) fn scale(&mut self, key: &Key, replicas: i32) -> Result<()> {
        self.node
            .objects
            .lock()
            .expect("nobody panics while holding it")
            .scale(key, replicas)
    }

    /// A program to run in a pod.
    pub(super) fn exec(&self, key: &Key, container: &str, argv: Vec<String>) -> Result<Program> {
        let found = self.pods.iter().find(|(_, record)| record.key() == *key);
        let (uid, record) =
            found.with_context(|| format!("there is no pod {}/{}", key.0, key.1))?;
        let folder = self.node.pod_folder(uid).join("containers").join(container);
        Program::new(&folder, argv, record.alive.subscribe())
            .with_context(|| format!("pod {}/{}, container {container}", key.0, key.1))
    }

    /// Ends all pods; `request` is answered when that is done.
    pub(super) fn shut_down(&mut self, request: u64, grace: Duration) {
        let order = Stop {
            deadline: Instant::now() + grace,
            pre_stop: false,
        };
        let ending = self.ending.get_or_insert(Ending {
            requests: Vec::new(),
            order,
        });
        ending.requests.push(request);
        ending.order.deadline = ending.order.deadline.min(order.deadline);
    }

    /// Everything was to end and has ended.
    pub(super) fn finished(&self) -> bool {
        self.ending.is_some() && self.pods.is_empty()
    }

    /// The requests that wait for the end.
    pub(super) fn waiting_for_the_end(&self) -> Vec<u64> {
        self.ending
            .iter()
            .flat_map(|ending| ending.requests.clone())
            .collect()
    }

    /// Takes note of what has happened; what the outer half should hear of it.
    pub(super) fn event(&mut self, event: Event) -> Option<Message> {
        match event {
            Event::Notice(text) => Some(Message::Notice(text)),
            Event::Pod { uid, pod, view } => {
                let record = self.pods.get_mut(&uid)?;
                let deleted = record.pod.metadata.deletion_timestamp.take();
                record.view = PodView {
                    terminating: deleted.is_some(),
                    ..view
                };
                record.pod = *pod;
                record.pod.metadata.deletion_timestamp = deleted;
                Some(Message::Pod(record.view.clone()))
            }
            Event::View { uid, view } => {
                let record = self.pods.get_mut(&uid)?;
                record.view = PodView {
                    terminating: record.view.terminating,
                    ..view
                };
                Some(Message::Pod(record.view.clone()))
            }
            Event::Touched { uid } => self
                .pods
                .get(&uid)
                .map(|record| Message::Pod(record.view.clone())),
            Event::Ended { uid } => {
                let record = self.pods.remove(&uid)?;
                Some(Message::PodGone {
                    namespace: record.view.namespace,
                    name: record.view.name,
                })
            }
        }
    }

    /// Brings everything in step.
    pub(super) fn sync(&mut self) -> Result<()> {
        // Before any pod is made: one that asks for the mesh must find the webhook there.
        self.publish_hooks();
        if self.ending.is_some() {
            self.end_pods();
        } else {
            self.run_workloads();
        }
        let node = self.node.clone();
        let objects = node.objects.lock().expect("nobody panics while holding it");
        let slices = self.slices(&objects);
        self.write_catalog(&objects, &slices)?;
        let services: Vec<&Service> = objects.services.values().collect();
        let rules = Rules {
            v4: services::rules(&services, &slices, false),
            v6: node
                .network
                .ipv6
                .then(|| services::rules(&services, &slices, true)),
        };
        self.rules
            .send_if_modified(|current| std::mem::replace(current, rules.clone()) != rules);
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
            .context("cannot write a hosts file")?;
        Ok(())
    }

    fn publish_hooks(&self) {
        let objects = self
            .node
            .objects
            .lock()
            .expect("nobody panics while holding it");
        let ca_file = |uid: &str| self.node.pod_folder(uid).join("injector/ca.pem");
        let hooks = admission::hooks(&objects, &self.slices(&objects), &ca_file);
        self.hooks.send_if_modified(|current| {
            let before = format!("{current:?}");
            *current = hooks;
            before != format!("{current:?}")
        });
    }

    fn run_workloads(&mut self) {
        let workloads = self
            .node
            .objects
            .lock()
            .expect("nobody panics while holding it")
            .workloads
            .clone();
        for (owner, workload) in &workloads {
            let owned: Vec<Owned> = self
                .pods
                .values()
                .filter(|record| record.owner == *owner)
                .map(Record::owned)
                .collect();
            let plan = workload.plan(&owned);
            for _ in 0..plan.create {
                self.start(workload, owner);
            }
            for name in plan.delete {
                self.stop_named(owner, &name);
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
    }

    fn start(&mut self, workload: &Workload, owner: &(Kind, Key)) {
        let pod = workload.make_pod();
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let view = PodView {
            namespace: owner.1.0.clone(),
            name: pod.metadata.name.clone().unwrap_or_default(),
            owner_kind: format!("{:?}", owner.0),
            workload: owner.1.1.clone(),
            phase: "Pending".into(),
            ..PodView::default()
        };
        let namespace_labels = self
            .node
            .objects
            .lock()
            .expect("nobody panics while holding it")
            .namespace_labels(&view.namespace);
        let (stop, order) = watch::channel(None);
        let task = PodTask {
            node: self.node.clone(),
            pod: pod.clone(),
            view: view.clone(),
            namespace_labels,
            stop: order,
            events: self.events.clone(),
        };
        tokio::spawn(task.run());
        let _ = self.events.send(Event::Touched { uid: uid.clone() });
        let record = Record {
            owner: owner.clone(),
            hash: workload.hash().to_owned(),
            pod,
            view,
            stop,
            alive: watch::Sender::new(()),
        };
        self.pods.insert(uid, record);
    }

    fn stop_named(&mut self, owner: &(Kind, Key), name: &str) {
        let found = self
            .pods
            .iter()
            .find(|(_, record)| record.owner == *owner && record.view.name == name);
        if let Some(uid) = found.map(|(uid, _)| uid.clone()) {
            self.stop(&uid);
        }
    }

    /// Tells a pod to end, as deleting it does.
    fn stop(&mut self, uid: &str) {
        let Some(record) = self
            .pods
            .get_mut(uid)
            .filter(|record| !record.view.terminating)
        else {
            return;
        };
        let grace = record
            .pod
            .spec
            .as_ref()
            .and_then(|spec| spec.termination_grace_period_seconds);
        let grace = Duration::from_secs(
            grace
                .and_then(|seconds| seconds.try_into().ok())
                .unwrap_or(30),
        );
        record.order(Stop {
            deadline: Instant::now() + grace,
            pre_stop: true,
        });
        let _ = self.events.send(Event::Touched {
            uid: uid.to_owned(),
        });
    }

    /// Ends what uses the mesh first, then the mesh: nobody misses it in its last second.
    fn end_pods(&mut self) {
        let Some(ending) = &self.ending else { return };
        let users_left = self.pods.values().any(|record| !record.is_of_the_mesh());
        for record in self
            .pods
            .values_mut()
            .filter(|record| !users_left || !record.is_of_the_mesh())
        {
            let known = *record.stop.borrow();
            if known.is_none_or(|order| order.pre_stop || order.deadline > ending.order.deadline) {
                record.order(ending.order);
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
            slices.extend(endpoints::slices(service, &pods));
        }
        slices
    }

    fn write_catalog(&mut self, objects: &Objects, slices: &[EndpointSlice]) -> Result<()> {
        let mut contents = Contents::default();
        for ((namespace, name), service) in &objects.services {
            contents.add(Some(namespace), Some(name), service)?;
        }
        for slice in slices {
            contents.add(
                slice.metadata.namespace.as_ref(),
                slice.metadata.name.as_ref(),
                slice,
            )?;
        }
        for record in self.pods.values().filter(|record| record.view.ip.is_some()) {
            contents.add(
                record.pod.metadata.namespace.as_ref(),
                record.pod.metadata.name.as_ref(),
                &record.pod,
            )?;
        }
        self.catalog
            .write(contents)
            .context("cannot write the catalog")
    }
}

impl Record {
    fn key(&self) -> Key {
        (self.view.namespace.clone(), self.view.name.clone())
    }

    fn owned(&self) -> Owned {
        Owned {
            name: self.view.name.clone(),
            hash: self.hash.clone(),
            ready: self.view.ready,
            terminating: self.view.terminating,
            succeeded: self.view.phase == "Succeeded",
            failed: self.view.phase == "Failed",
        }
    }

    fn order(&mut self, order: Stop) {
        self.view.terminating = true;
        self.pod.metadata.deletion_timestamp.get_or_insert_with(now);
        self.stop.send_replace(Some(order));
    }

    fn is_of_the_mesh(&self) -> bool {
        let containers = self.pod.spec.iter().flat_map(|spec| &spec.containers);
        let mut programs = containers.filter_map(|container| {
            spec::program(container.image.as_deref().unwrap_or_default()).ok()
        });
        programs.any(|program| program == "controller" || program == "injector")
    }
}

impl Rules {
    fn load(&self) -> Result<()> {
        feed("iptables-restore", &["-w"], &self.v4)?;
        self.v6
            .as_ref()
            .map_or(Ok(()), |text| feed("ip6tables-restore", &["-w"], text))
    }
}

fn now() -> Time {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    Time(Timestamp::from_second(seconds.try_into().unwrap_or(i64::MAX)).unwrap_or(Timestamp::MAX))
}

/// Loads the rules whenever they have changed, the latest ones only.
async fn keep_rules(mut rules: watch::Receiver<Rules>, events: mpsc::UnboundedSender<Event>) {
    while rules.changed().await.is_ok() {
        let latest = rules.borrow_and_update().clone();
        if let Ok(Err(error)) = tokio::task::spawn_blocking(move || latest.load()).await {
            let _ = events.send(Event::Notice(format!(
                "the rules of the Services could not be loaded: {error:#}"
            )));
        }
    }
}
