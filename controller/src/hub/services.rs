//! The subscription of one client to Services, or to all of them.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Hub;
use super::subscribers::ServiceQueue;
use crate::index::object::Key;
use crate::index::view::ServiceView;

/// A subscriber to Services. Dropping it ends its subscriptions.
pub struct Services {
    pub(super) hub: Hub,
    pub(super) id: u64,
    pub(super) names: BTreeSet<Key>,
    pub(super) queue: Arc<ServiceQueue>,
}

impl Services {
    /// Waits for a notification. Cancel-safe.
    pub async fn wait(&self) {
        self.queue.wait().await;
    }

    /// The next notification: a Service and its current state, or `None` if it does not exist.
    pub fn next(&self) -> Option<(Key, Option<ServiceView>)> {
        let (key, ()) = self.queue.pop()?;
        let view = self.hub.service(&key);
        Some((key, view))
    }

    /// Whether the subscription is for all Services.
    pub fn watches_all(&self) -> bool {
        self.names.is_empty()
    }

    /// The number of pending notifications.
    pub fn pending(&self) -> usize {
        self.queue.len()
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        let mut subscribers = self.hub.subscribers();
        subscribers.unwatch_services(self.id, &self.names);
    }
}
