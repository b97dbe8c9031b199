//! Kubernetes Events. Best effort: the log has all messages.

use std::time::Duration;

use diy_mesh_runtime::error_chain;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

const MAX_QUEUED: usize = 64;
/// The API server rejects longer notes.
const MAX_NOTE_BYTES: usize = 1000;
/// Limits the load of the API server.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(200);
const API_TIMEOUT: Duration = Duration::from_secs(10);

/// The sender of events. Drops them while the queue is full, and without a publisher.
#[derive(Clone, Debug)]
pub struct Events(mpsc::Sender<(ObjectReference, Event)>);

/// The queued events.
pub type Queue = mpsc::Receiver<(ObjectReference, Event)>;

impl Events {
    /// A sender and its queue.
    pub fn new() -> (Self, Queue) {
        let (sender, queue) = mpsc::channel(MAX_QUEUED);
        (Self(sender), queue)
    }

    /// Queues a warning about an object. `action` is what failed.
    pub fn warn(&self, object: ObjectReference, reason: &str, action: &str, note: &str) {
        let event = Event {
            type_: EventType::Warning,
            reason: reason.into(),
            note: Some(note[..note.floor_char_boundary(MAX_NOTE_BYTES)].into()),
            action: action.into(),
            secondary: None,
        };
        let _ = self.0.try_send((object, event));
    }
}

/// Publishes the queued events of a component until all senders are dropped.
pub async fn publish(client: Client, component: &str, mut queue: Queue) {
    let reporter = Reporter {
        controller: format!("diy-service-mesh.dev/{component}"),
        instance: None,
    };
    let recorder = Recorder::new(client, reporter);
    while let Some((object, event)) = queue.recv().await {
        match timeout(API_TIMEOUT, recorder.publish(&event, &object)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!("cannot publish an event: {}", error_chain(&error)),
            Err(_) => {
                tracing::debug!("cannot publish an event: the Kubernetes API does not respond")
            }
        }
        sleep(PUBLISH_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortens_notes_at_a_character_boundary() {
        let (events, mut queue) = Events::new();
        events.warn(
            ObjectReference::default(),
            "Refused",
            "Sign",
            &"é".repeat(1000),
        );
        let (_, event) = queue.try_recv().expect("an event");
        assert_eq!(event.note.map(|note| note.len()), Some(MAX_NOTE_BYTES));
    }
}
