//! The pending notifications of one subscriber.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The pending notifications of a subscriber: each topic once, in order.
pub(super) struct Queue<T> {
    topics: Mutex<(VecDeque<T>, HashSet<T>)>,
    added: Notify,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Queue {
            topics: Mutex::new((VecDeque::new(), HashSet::new())),
            added: Notify::new(),
        }
    }
}

impl<T: Clone + Eq + Hash> Queue<T> {
    pub(super) fn push(&self, topic: T) {
        let mut topics = self.topics();
        if topics.1.insert(topic.clone()) {
            topics.0.push_back(topic);
            drop(topics);
            self.added.notify_one();
        }
    }

    pub(super) fn pop(&self) -> Option<T> {
        let mut topics = self.topics();
        let topic = topics.0.pop_front()?;
        topics.1.remove(&topic);
        Some(topic)
    }

    pub(super) fn len(&self) -> usize {
        self.topics().0.len()
    }

    /// With one reader, `Notify` keeps a notification between the check and the wait.
    pub(super) async fn wait(&self) {
        while self.topics().0.is_empty() {
            self.added.notified().await;
        }
    }

    fn topics(&self) -> MutexGuard<'_, (VecDeque<T>, HashSet<T>)> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
