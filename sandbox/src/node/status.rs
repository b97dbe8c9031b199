//! The status of one pod, as a kubelet's status manager keeps it. Container supervisors update it,
//! the pod task watches it, and each change is sent to the event loop.

use std::{net::Ipv4Addr, sync::Mutex};

use k8s_openapi::api::core::v1::{Pod, PodCondition, PodIP, PodStatus};
use kube::ResourceExt;
use tokio::sync::{mpsc, watch};

use super::Event;
use crate::{
    lock,
    protocol::{ContainerView, LogLine, Message, PodView},
};

/// The status of one pod and its containers.
pub(super) struct StatusManager {
    uid: String,
    ip: Ipv4Addr,
    pod: Pod,
    view: Mutex<PodView>,
    /// For each container, whether it is an init container that runs to completion.
    init: Vec<bool>,
    containers: watch::Sender<Vec<ContainerView>>,
    events: mpsc::UnboundedSender<Event>,
    messages: mpsc::Sender<Message>,
}

impl StatusManager {
    /// The status of a pod that has a network. `init` states for each container whether it runs to
    /// completion before the pod is ready.
    pub(super) fn new(
        mut pod: Pod,
        view: PodView,
        ips: &[String],
        init: Vec<bool>,
        events: mpsc::UnboundedSender<Event>,
        messages: mpsc::Sender<Message>,
    ) -> Self {
        pod.status = Some(PodStatus {
            pod_ips: Some(ips.iter().map(|ip| PodIP { ip: ip.clone() }).collect()),
            ..PodStatus::default()
        });
        let containers = view.containers.clone();
        let ip = ips
            .first()
            .and_then(|ip| ip.parse().ok())
            .unwrap_or(Ipv4Addr::UNSPECIFIED);
        let uid = pod.uid().unwrap_or_default();
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
        let view = lock(&self.view);
        format!("{}[{}]", view.full_name(), view.containers[index].name)
    }

    /// Changes the state of a container. Reports it only if it differs.
    pub(super) fn update(&self, index: usize, change: impl FnOnce(&mut ContainerView)) {
        let changed = self.containers.send_if_modified(|containers| {
            let before = containers[index].clone();
            change(&mut containers[index]);
            before != containers[index]
        });
        if changed {
            self.report();
        }
    }

    /// Changes the pod's phase.
    pub(super) fn phase(&self, phase: &str) {
        {
            let mut view = lock(&self.view);
            view.phase = phase.into();
            view.reason = None;
        }
        self.report();
    }

    /// Subscribes to the states of the containers.
    pub(super) fn watch(&self) -> watch::Receiver<Vec<ContainerView>> {
        self.containers.subscribe()
    }

    pub(super) fn notice(&self, text: String) {
        // Fails only when the node exits.
        let _ = self.events.send(Event::Notice(text));
    }

    /// Sends a line of output to the client. Waits while the client's queue is full.
    pub(super) async fn log(&self, index: usize, line: String) {
        let source = {
            let view = lock(&self.view);
            view.source(&view.containers[index])
        };
        let _ = self
            .messages
            .send(Message::Log(LogLine { source, line }))
            .await;
    }

    fn report(&self) {
        let mut view = lock(&self.view);
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
        let _ = self.events.send(Event::PodUpdated {
            uid: self.uid.clone(),
            pod: Some(Box::new(pod)),
            view: Box::new(view.clone()),
        });
    }
}

/// What the catalog and the EndpointSlices read of the status.
fn fill_status(status: &mut PodStatus, view: &PodView) {
    status.phase = Some(view.phase.clone());
    status.conditions = Some(vec![PodCondition {
        type_: "Ready".into(),
        status: if view.ready { "True" } else { "False" }.into(),
        ..PodCondition::default()
    }]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_ready_when_all_containers_except_init_containers_are_ready() {
        let (events, mut reported) = mpsc::unbounded_channel();
        let (messages, _lines) = mpsc::channel(1);
        let container = |name: &str| ContainerView {
            name: name.into(),
            ..ContainerView::default()
        };
        let view = PodView {
            containers: vec![container("init"), container("app")],
            ..PodView::default()
        };
        let status = StatusManager::new(
            Pod::default(),
            view,
            &["10.0.0.7".into()],
            vec![true, false],
            events,
            messages,
        );

        status.phase("Running");
        status.update(1, |view| view.ready = true);
        status.update(1, |view| view.ready = true);
        drop(status);

        let mut ready = Vec::new();
        while let Ok(Event::PodUpdated {
            pod: Some(pod),
            view,
            ..
        }) = reported.try_recv()
        {
            let ips = pod.status.as_ref().unwrap().pod_ips.as_ref().unwrap();
            assert_eq!(ips[0].ip, "10.0.0.7");
            assert_eq!(super::super::endpoints::ready(&pod), view.ready);
            ready.push(view.ready);
        }
        assert_eq!(
            ready,
            [false, true],
            "an unchanged state is not reported again"
        );
    }
}
