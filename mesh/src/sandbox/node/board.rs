//! The notice board of one pod: its containers' states in one place. Supervisors write, the pod's task waits on it, and every
//! change goes to the node, with the pod's status as a kubelet would write it. It starts and stops nothing.

use std::{net::Ipv4Addr, sync::Mutex};

use k8s_openapi::api::core::v1::{ContainerStatus, HostIP, Pod, PodCondition, PodIP, PodStatus};
use tokio::sync::{mpsc, watch};

use super::{Event, network::NODE_V4};
use crate::sandbox::protocol::{ContainerView, LogLine, Message, PodView};

/// See the module.
pub(super) struct Board {
    uid: String,
    ip: Ipv4Addr,
    pod: Pod,
    view: Mutex<PodView>,
    /// How many of the containers are run to their end before the others start.
    init: Vec<bool>,
    containers: watch::Sender<Vec<ContainerView>>,
    events: mpsc::UnboundedSender<Event>,
    messages: mpsc::Sender<Message>,
}

impl Board {
    /// A board for a pod whose network is there. `init` says of each container whether it ends before the pod is up.
    pub(super) fn new(
        mut pod: Pod,
        view: PodView,
        ips: &[String],
        init: Vec<bool>,
        events: mpsc::UnboundedSender<Event>,
        messages: mpsc::Sender<Message>,
    ) -> Self {
        let host = NODE_V4.to_string();
        pod.status = Some(PodStatus {
            host_ip: Some(host.clone()),
            host_ips: Some(vec![HostIP { ip: host }]),
            pod_ip: ips.first().cloned(),
            pod_ips: Some(ips.iter().map(|ip| PodIP { ip: ip.clone() }).collect()),
            ..PodStatus::default()
        });
        let containers = view.containers.clone();
        let ip = ips
            .first()
            .and_then(|ip| ip.parse().ok())
            .unwrap_or(Ipv4Addr::UNSPECIFIED);
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        Self {
            uid,
            ip,
            pod,
            view: Mutex::new(view),
            init,
            containers: watch::Sender::new(containers),
            events,
            messages,
        }
    }

    pub(super) fn ip(&self) -> Ipv4Addr {
        self.ip
    }

    /// `namespace/pod[container]`.
    pub(super) fn container(&self, index: usize) -> String {
        let view = self.view.lock().expect("nobody panics while holding it");
        format!("{}[{}]", view.full_name(), view.containers[index].name)
    }

    /// Changes a container's state; unchanged states are not told again.
    pub(super) fn update(&self, index: usize, change: impl FnOnce(&mut ContainerView)) {
        let changed = self.containers.send_if_modified(|containers| {
            let before = containers[index].clone();
            change(&mut containers[index]);
            before != containers[index]
        });
        if changed {
            self.tell();
        }
    }

    /// Changes the pod's phase.
    pub(super) fn phase(&self, phase: &str, reason: Option<String>) {
        {
            let mut view = self.view.lock().expect("nobody panics while holding it");
            view.phase = phase.into();
            view.reason = reason;
        }
        self.tell();
    }

    /// The containers' states, to wait on.
    pub(super) fn watch(&self) -> watch::Receiver<Vec<ContainerView>> {
        self.containers.subscribe()
    }

    pub(super) fn notice(&self, text: String) {
        // The node is gone only at the very end.
        let _ = self.events.send(Event::Notice(text));
    }

    /// Hands on a line of output, and waits where the reader is slow.
    pub(super) async fn log(&self, index: usize, line: String) {
        let line = {
            let view = self.view.lock().expect("nobody panics while holding it");
            LogLine {
                namespace: view.namespace.clone(),
                pod: view.name.clone(),
                workload: view.workload.clone(),
                container: view.containers[index].name.clone(),
                line,
            }
        };
        let _ = self.messages.send(Message::Log(line)).await;
    }

    fn tell(&self) {
        let mut view = self.view.lock().expect("nobody panics while holding it");
        view.containers = self.containers.borrow().clone();
        let running = view.phase == "Running";
        view.ready = running
            && view
                .containers
                .iter()
                .zip(&self.init)
                .all(|(container, &init)| init || container.ready);
        if view.phase == "Pending" || running {
            let waiting = view
                .containers
                .iter()
                .zip(&self.init)
                .find(|(container, init)| {
                    if **init {
                        !container.running && container.exit_code != Some(0)
                    } else {
                        !container.ready
                    }
                });
            view.reason = waiting.and_then(|(container, _)| {
                container
                    .reason
                    .as_ref()
                    .map(|reason| format!("container {}: {reason}", container.name))
            });
        }
        let mut pod = self.pod.clone();
        fill_status(pod.status.get_or_insert_default(), &view);
        let _ = self.events.send(Event::Pod {
            uid: self.uid.clone(),
            pod: Box::new(pod),
            view: view.clone(),
        });
    }
}

fn fill_status(status: &mut PodStatus, view: &PodView) {
    let word = |value: bool| if value { "True" } else { "False" }.to_owned();
    let condition = |type_: &str, value: bool| PodCondition {
        type_: type_.into(),
        status: word(value),
        ..PodCondition::default()
    };
    status.phase = Some(view.phase.clone());
    status.conditions = Some(vec![
        condition("Initialized", view.phase != "Pending"),
        condition("ContainersReady", view.ready),
        condition("Ready", view.ready),
    ]);
    let statuses = view.containers.iter().map(|container| ContainerStatus {
        name: container.name.clone(),
        ready: container.ready,
        started: Some(container.started),
        restart_count: container.restarts.try_into().unwrap_or(i32::MAX),
        ..ContainerStatus::default()
    });
    status.container_statuses = Some(statuses.collect());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_ready_when_all_but_its_init_containers_are() {
        let (events, mut told) = mpsc::unbounded_channel();
        let (messages, _lines) = mpsc::channel(1);
        let container = |name: &str| ContainerView {
            name: name.into(),
            ..ContainerView::default()
        };
        let view = PodView {
            containers: vec![container("init"), container("app")],
            ..PodView::default()
        };
        let board = Board::new(
            Pod::default(),
            view,
            &["10.0.0.7".into()],
            vec![true, false],
            events,
            messages,
        );

        board.phase("Running", None);
        board.update(1, |view| view.ready = true);
        board.update(1, |view| view.ready = true);
        drop(board);

        let mut ready = Vec::new();
        while let Ok(Event::Pod { pod, view, .. }) = told.try_recv() {
            assert_eq!(
                pod.status.as_ref().unwrap().pod_ip.as_deref(),
                Some("10.0.0.7")
            );
            assert_eq!(super::super::endpoints::ready(&pod), view.ready);
            ready.push(view.ready);
        }
        assert_eq!(
            ready,
            [false, true],
            "what has not changed is not told again"
        );
    }
}
