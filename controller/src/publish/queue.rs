//! The pending notifications of one subscriber.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::index::Resource;
use crate::index::state::State;

/// The pending notifications of a subscriber: each resource once, in order, with its latest state.
#[derive(Default)]
pub(super) struct Queue {
    pending: Mutex<Pending>,
    added: Notify,
}

#[derive(Default)]
struct Pending {
    order: VecDeque<Arc<Resource>>,
    states: HashMap<Arc<Resource>, Arc<State>>,
    is_woken: bool,
}

impl Queue {
    pub(super) fn push(&self, resource: Arc<Resource>, state: Arc<State>) {
        let mut pending = self.pending();
        if pending.states.insert(resource.clone(), state).is_none() {
            pending.order.push_back(resource);
            drop(pending);
            self.added.notify_one();
        }
    }

    pub(super) fn pop(&self) -> Option<(Arc<Resource>, Arc<State>)> {
        let mut pending = self.pending();
        let resource = pending.order.pop_front()?;
        let state = pending.states.remove(&resource)?;
        Some((resource, state))
    }

    /// Removes a notification, so that resources without subscription do not accumulate.
    pub(super) fn remove(&self, resource: &Resource) {
        let mut pending = self.pending();
        if pending.states.remove(resource).is_some() {
            pending.order.retain(|other| **other != *resource);
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

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
