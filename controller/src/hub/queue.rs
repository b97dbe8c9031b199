//! The pending notifications of one subscriber.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The pending notifications of a subscriber: each topic once, in order, with its latest state.
pub(super) struct Queue<T, S> {
    pending: Mutex<Pending<T, S>>,
    added: Notify,
}

struct Pending<T, S> {
    order: VecDeque<T>,
    states: HashMap<T, S>,
    is_woken: bool,
}

impl<T, S> Default for Queue<T, S> {
    fn default() -> Self {
        Queue {
            pending: Mutex::new(Pending {
                order: VecDeque::new(),
                states: HashMap::new(),
                is_woken: false,
            }),
            added: Notify::new(),
        }
    }
}

impl<T: Clone + Eq + Hash, S> Queue<T, S> {
    pub(super) fn push(&self, topic: T, state: S) {
        let mut pending = self.pending();
        if pending.states.insert(topic.clone(), state).is_none() {
            pending.order.push_back(topic);
            drop(pending);
            self.added.notify_one();
        }
    }

    pub(super) fn pop(&self) -> Option<(T, S)> {
        let mut pending = self.pending();
        let topic = pending.order.pop_front()?;
        let state = pending.states.remove(&topic)?;
        Some((topic, state))
    }

    /// Removes a notification, so that topics without subscription do not accumulate.
    pub(super) fn remove(&self, topic: &T) {
        let mut pending = self.pending();
        if pending.states.remove(topic).is_some() {
            pending.order.retain(|other| other != topic);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.pending().order.len()
    }

    /// Completes the current wait, or the next one, without a notification.
    pub(super) fn wake(&self) {
        self.pending().is_woken = true;
        self.added.notify_one();
    }

    /// With one reader, `Notify` keeps a notification between the check and the wait.
    pub(super) async fn wait(&self) {
        while !self.is_ready() {
            self.added.notified().await;
        }
    }

    fn is_ready(&self) -> bool {
        let mut pending = self.pending();
        std::mem::take(&mut pending.is_woken) || !pending.order.is_empty()
    }

    fn pending(&self) -> MutexGuard<'_, Pending<T, S>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
