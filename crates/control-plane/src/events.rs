//! Kubernetes Events. Best effort: the log has all messages.
//!
//! Namespaces take turns: one with many events delays each event of another one by one event. While
//! the queue is full, only the namespaces with the most events lose some.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// An event and its object.
type Item = (ObjectReference, Event);

/// The sender of events. Drops events without a publisher, and beyond the share of their namespace.
#[derive(Clone)]
pub struct Events {
    queued: Arc<Mutex<Turns>>,
    /// Full while the queue has events that its receiver does not know.
    wake: mpsc::Sender<()>,
}

/// The queued events.
pub struct Queue {
    queued: Arc<Mutex<Turns>>,
    wake: mpsc::Receiver<()>,
}

/// The events of each namespace that has some, in the order of their turns.
#[derive(Default)]
struct Turns(VecDeque<VecDeque<Item>>);

impl Events {
    /// A sender and its queue.
    pub fn new() -> (Self, Queue) {
        let queued = Arc::<Mutex<Turns>>::default();
        let (sender, receiver) = mpsc::channel(1);
        let queue = Queue {
            queued: queued.clone(),
            wake: receiver,
        };
        let wake = sender;
        (Self { queued, wake }, queue)
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
        if !self.wake.is_closed() {
            lock(&self.queued).push((object, event));
            // If it is full, the receiver wakes up anyway.
            let _ = self.wake.try_send(());
        }
    }

    /// The number of queued events.
    pub fn queued(&self) -> usize {
        lock(&self.queued).len()
    }
}

impl Queue {
    /// The next event. `None` after the last one, when all senders are dropped.
    pub async fn recv(&mut self) -> Option<Item> {
        loop {
            if let Some(item) = self.try_recv() {
                return Some(item);
            }
            self.wake.recv().await?;
        }
    }

    /// The next event, if there is one.
    pub fn try_recv(&mut self) -> Option<Item> {
        lock(&self.queued).pop()
    }
}

impl Turns {
    /// Adds an event. If there are too many, drops the latest one of the namespace with the most.
    fn push(&mut self, item: Item) {
        let namespace = |items: &VecDeque<Item>| {
            let first = items.front().map(|(object, _)| object.namespace.clone());
            first.flatten()
        };
        let mut queues = self.0.iter_mut();
        match queues.find(|items| namespace(items) == item.0.namespace) {
            Some(items) => items.push_back(item),
            None => self.0.push_back([item].into()),
        }
        if self.len() > MAX_QUEUED {
            self.drop_latest_of_longest();
        }
    }

    fn len(&self) -> usize {
        self.0.iter().map(VecDeque::len).sum()
    }

    fn drop_latest_of_longest(&mut self) {
        let longest = self.0.iter_mut().max_by_key(|items| items.len());
        longest.and_then(VecDeque::pop_back);
        self.0.retain(|items| !items.is_empty());
    }

    /// Takes an event of the next namespace.
    fn pop(&mut self) -> Option<Item> {
        let mut items = self.0.pop_front()?;
        let item = items.pop_front();
        if !items.is_empty() {
            self.0.push_back(items);
        }
        item
    }
}

/// Each update is complete before the lock is released, so the events are valid after a panic.
fn lock(queued: &Mutex<Turns>) -> MutexGuard<'_, Turns> {
    queued.lock().unwrap_or_else(PoisonError::into_inner)
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

    fn warn(events: &Events, namespace: &str, note: &str) {
        let object = ObjectReference {
            namespace: Some(namespace.into()),
            ..ObjectReference::default()
        };
        events.warn(object, "Refused", "Sign", note);
    }

    /// The next event, as `NAMESPACE NOTE`.
    fn next(queue: &mut Queue) -> Option<String> {
        let (object, event) = queue.try_recv()?;
        Some(format!("{} {}", object.namespace?, event.note?))
    }

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

    #[test]
    fn events_of_one_namespace_neither_delay_nor_hide_those_of_another() {
        let (events, mut queue) = Events::new();
        (0..10_000).for_each(|number| warn(&events, "noisy", &number.to_string()));
        warn(&events, "shop", "first");
        warn(&events, "shop", "second");
        assert_eq!(events.queued(), MAX_QUEUED);
        let order: Vec<String> = std::iter::from_fn(|| next(&mut queue)).collect();
        assert_eq!(
            order[..5],
            ["noisy 0", "shop first", "noisy 1", "shop second", "noisy 2"]
        );
        assert_eq!((order.len(), events.queued()), (MAX_QUEUED, 0));
    }

    #[test]
    fn namespaces_share_a_full_queue() {
        let (events, mut queue) = Events::new();
        let namespaces: Vec<String> = (0..32).map(|number| format!("n{number}")).collect();
        for namespace in &namespaces {
            (0..10).for_each(|number| warn(&events, namespace, &number.to_string()));
        }
        for expected in [0, 1] {
            for _ in &namespaces {
                let event = next(&mut queue).unwrap();
                assert!(event.ends_with(&format!(" {expected}")), "{event}");
            }
        }
        assert_eq!(next(&mut queue), None);
    }

    #[tokio::test]
    async fn queue_ends_after_the_events_of_dropped_senders() {
        let (events, mut queue) = Events::new();
        warn(&events, "shop", "last");
        warn(&events, "till", "last");
        drop(events);
        assert!(queue.recv().await.is_some() && queue.recv().await.is_some());
        assert!(queue.recv().await.is_none());
    }
}
