//! The subscriptions of one client to resources.

use std::collections::HashMap;
use std::sync::Arc;

use super::queue::Queue;
use super::{Hub, Inner, Published};
use crate::authenticate::PodRef;
use crate::index::locality::Location;
use crate::index::object::Resource;

/// A subscriber to resources. Dropping it ends its subscriptions.
pub struct Resources {
    pub(super) hub: Hub,
    pub(super) id: u64,
    pub(super) queue: Arc<Queue<Resource>>,
}

impl Resources {
    /// Adds a subscription, and a notification of its current state, even if it exists.
    pub fn subscribe(&mut self, resource: &Resource) {
        let mut inner = self.hub.lock();
        let Inner {
            index,
            resources,
            clients,
            destinations_on,
            ..
        } = &mut *inner;
        let client = clients.get_mut(&self.id).expect("self is a client");
        let watched = resources.entry(resource.clone()).or_default();
        if watched.subscribers.is_empty() {
            (watched.scope, _) = index.resolve(resource, &Location::default());
        }
        if let Resource::Destination(address) = resource {
            let same_port = destinations_on.entry(address.port()).or_default();
            same_port.insert(*address);
        }
        watched.add(resource, index, &client.location, &HashMap::new());
        watched.subscribers.insert(self.id);
        client.subscribed.insert(resource.clone());
        self.queue.push(resource.clone());
    }

    /// Removes a subscription.
    pub fn unsubscribe(&mut self, resource: &Resource) {
        let mut inner = self.hub.lock();
        let client = inner.clients.get_mut(&self.id);
        if client.is_some_and(|client| client.subscribed.remove(resource)) {
            forget(&mut inner, resource, self.id);
        }
    }

    /// A handle that waits for notifications.
    pub fn notifications(&self) -> Notifications {
        Notifications(self.queue.clone())
    }

    /// The next notification: a resource and its current state.
    pub fn next(&self) -> Option<(Resource, Arc<Published>)> {
        loop {
            let resource = self.queue.pop()?;
            let inner = self.hub.lock();
            let client = inner.clients.get(&self.id)?;
            // A pending notification of a subscription that has ended is dropped.
            if let Some(watched) = inner.resources.get(&resource)
                && watched.subscribers.contains(&self.id)
                && let Some(published) = watched.published(&client.location)
            {
                return Some((resource, published.clone()));
            }
        }
    }
}

/// Waits for the notifications of a subscriber.
pub struct Notifications(Arc<Queue<Resource>>);

impl Notifications {
    /// Waits for a notification. Cancel-safe.
    pub async fn wait(&self) {
        self.0.wait().await;
    }
}

impl Drop for Resources {
    fn drop(&mut self) {
        let mut inner = self.hub.lock();
        let Some(client) = inner.clients.remove(&self.id) else {
            return;
        };
        for resource in &client.subscribed {
            forget(&mut inner, resource, self.id);
        }
        if let Some(key) = client.pod.as_ref().map(PodRef::key)
            && let Some(clients) = inner.clients_of_pod.get_mut(&key)
        {
            clients.remove(&self.id);
            if clients.is_empty() {
                inner.clients_of_pod.remove(&key);
            }
        }
    }
}

fn forget(inner: &mut Inner, resource: &Resource, subscriber: u64) {
    if let Some(watched) = inner.resources.get_mut(resource) {
        watched.subscribers.remove(&subscriber);
        if watched.subscribers.is_empty() {
            inner.resources.remove(resource);
            if let Resource::Destination(address) = resource
                && let Some(same_port) = inner.destinations_on.get_mut(&address.port())
            {
                same_port.remove(address);
                if same_port.is_empty() {
                    inner.destinations_on.remove(&address.port());
                }
            }
        }
    }
}
