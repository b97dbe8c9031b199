//! The subscriptions of one client to resources.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::watch;

use super::Hub;
use super::queue::Queue;
use super::watched::Resolved;
use crate::index::Resource;
use crate::index::endpoints::{Delta, Endpoints};
use crate::index::position::{Known, Position};
use crate::index::state::State;
use crate::object::version::Version;

/// A subscriber to resources. Dropping it ends its subscriptions.
pub struct Resources {
    pub(super) hub: Hub,
    /// The caller whose claims are suspended if one was false: the UID of the pod.
    pub(super) caller: Arc<str>,
    pub(super) id: u64,
    pub(super) queue: Arc<Queue>,
    pub(super) published: watch::Receiver<Option<Arc<Position>>>,
}

impl Resources {
    /// Whether this replica may lack events that a state at a known position includes.
    pub fn is_behind(&self, known: &Known) -> bool {
        let published = self.published.borrow();
        let position = published.as_ref();
        position.is_some_and(|position| position.lacks(known).next().is_some())
    }

    /// Sets the name of a caller without a pod.
    pub fn set_caller(&mut self, user: Arc<str>) {
        self.caller = user;
    }

    /// Tells the source what this replica lacks.
    pub fn catch_up(&self, known: &Known) {
        let position = self.published.borrow().clone();
        for lack in position.iter().flat_map(|position| position.lacks(known)) {
            let (subject, version) = known.claim(lack);
            self.hub.claims.add(&self.caller, subject, version);
        }
    }

    /// The latest position whose changes are published, and later ones.
    pub fn published(&self) -> watch::Receiver<Option<Arc<Position>>> {
        self.published.clone()
    }

    /// Adds a subscription, and a notification of its current state, even if it exists. Returns the
    /// resource as all subscribers share it.
    pub fn subscribe(&mut self, resource: &Resource) -> Arc<Resource> {
        // The index stays unchanged until the state is published.
        let index = self.hub.index();
        let (location, is_known, is_pending) = self.hub.subscribers().known(self.id, resource);
        if is_pending {
            self.hub.publish_one(&index, resource);
        }
        let resolved = (!is_known).then(|| Resolved::new(&index, resource, &location));
        let mut subscribers = self.hub.subscribers();
        subscribers.subscribe(&index, self.id, resource, resolved)
    }

    /// Removes a subscription, with its notification.
    pub fn unsubscribe(&mut self, resource: &Resource) {
        self.hub.subscribers().unsubscribe(self.id, resource);
    }

    /// A handle that waits for notifications.
    pub fn notifications(&self) -> Notifications {
        Notifications(self.queue.clone())
    }

    /// The next notification: a resource and its latest state.
    pub fn next(&self) -> Option<(Arc<Resource>, Arc<State>)> {
        self.queue.pop()
    }

    /// The difference to endpoints of an earlier state, if they are known, as `encode` encodes it,
    /// once for all subscribers. The work is done without a lock.
    pub fn difference(
        &self,
        from: Version,
        to: &Endpoints,
        encode: impl FnOnce(&Delta) -> Bytes,
    ) -> Option<Bytes> {
        let known = self.hub.history().difference(from, to.version);
        if known.is_some() {
            return known;
        }
        let before = self.hub.history().endpoints(from)?;
        let encoded = encode(&to.since(&before));
        let mut history = self.hub.history();
        history.add_difference(from, to.version, encoded.clone());
        Some(encoded)
    }
}

impl Drop for Resources {
    fn drop(&mut self) {
        self.hub.subscribers().remove_client(self.id);
    }
}

/// Waits for the notifications of a subscriber.
#[derive(Clone)]
pub struct Notifications(Arc<Queue>);

impl Notifications {
    /// Waits for a notification. Cancel-safe.
    pub async fn wait(&self) {
        self.0.wait().await;
    }

    /// Completes the current wait, or the next one, without a notification.
    pub fn wake(&self) {
        self.0.wake();
    }
}
