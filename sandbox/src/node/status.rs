//! The status of one pod: its task, its containers and the event loop change it, and each change is
//! announced to the event loop.

use tokio::sync::{mpsc, watch};

use super::{Event, objects::Key};
use crate::protocol::{ContainerView, PodView};

/// The status of one pod and its containers.
pub(super) struct PodStatus {
    key: Key,
    view: watch::Sender<PodView>,
    events: mpsc::UnboundedSender<Event>,
}

impl PodStatus {
    pub(super) fn new(view: PodView, events: mpsc::UnboundedSender<Event>) -> Self {
        Self {
            key: (view.namespace.clone(), view.name.clone()),
            view: watch::Sender::new(view),
            events,
        }
    }

    /// The current status. Do not hold it while the status can change.
    pub(super) fn view(&self) -> watch::Ref<'_, PodView> {
        self.view.borrow()
    }

    /// Subscribes to the status.
    pub(super) fn watch(&self) -> watch::Receiver<PodView> {
        self.view.subscribe()
    }

    /// Changes the status. Announces it only if it differs.
    pub(super) fn update(&self, change: impl FnOnce(&mut PodView)) {
        let is_changed = self.view.send_if_modified(|view| {
            let before = view.clone();
            change(view);
            *view != before
        });
        if is_changed {
            // Fails only when the node exits.
            let _ = self.events.send(Event::PodChanged(self.key.clone()));
        }
    }

    /// Changes the state of a container, and the readiness of its pod accordingly.
    pub(super) fn update_container(&self, index: usize, change: impl FnOnce(&mut ContainerView)) {
        self.update(|view| {
            change(&mut view.containers[index]);
            view.ready = view.containers.iter().all(|one| one.ready);
            let waiting = view.containers.iter().find(|one| !one.ready);
            view.reason = waiting.and_then(|one| {
                let reason = one.reason.as_ref()?;
                Some(format!("container {}: {reason}", one.name))
            });
        });
    }

    pub(super) fn notice(&self, text: String) {
        let _ = self.events.send(Event::Notice(text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_is_ready_when_all_containers_are() {
        let (events, mut changes) = mpsc::unbounded_channel();
        let view = PodView {
            containers: vec![ContainerView::default(), ContainerView::default()],
            ..PodView::default()
        };
        let status = PodStatus::new(view, events);
        status.update_container(1, |container| container.ready = true);
        assert!(!status.view().ready);
        status.update_container(0, |container| container.ready = true);
        assert!(status.view().ready);
        status.update_container(0, |container| container.ready = true);
        drop(status);
        let announced = std::iter::from_fn(|| changes.try_recv().ok()).count();
        assert_eq!(announced, 2, "an unchanged state is not announced again");
    }
}
