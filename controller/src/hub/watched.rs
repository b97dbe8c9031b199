//! One resource with subscribers: its published states, by location, and who is notified of a
//! change.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::{Client, Published};
use crate::index::Index;
use crate::index::locality::{Location, Scope};
use crate::index::object::Resource;

/// A resource with subscribers.
#[derive(Default)]
pub(super) struct Watched {
    pub(super) scope: Scope,
    /// The states by the location of clients within the scope. One for most resources.
    pub(super) states: HashMap<Location, Arc<Published>>,
    pub(super) subscribers: BTreeSet<u64>,
}

impl Watched {
    /// Adds the state for a location, if there is none. `before` are earlier states.
    pub(super) fn add(
        &mut self,
        resource: &Resource,
        index: &Index,
        location: &Location,
        before: &HashMap<Location, Arc<Published>>,
    ) {
        let location = location.within(self.scope);
        self.states.entry(location).or_insert_with_key(|location| {
            let (_, state) = index.resolve(resource, location);
            Published::next(before.get(location), state)
        });
    }

    pub(super) fn published(&self, location: &Location) -> Option<&Arc<Published>> {
        self.states.get(&location.within(self.scope))
    }

    /// Resolves the resource again, and notifies the subscribers whose state has changed. Work is
    /// done per location, and in most cases there is one.
    pub(super) fn update(
        &mut self,
        resource: &Resource,
        index: &Index,
        clients: &HashMap<u64, Client>,
    ) {
        let anywhere = Location::default();
        let (scope, state) = index.resolve(resource, &anywhere);
        let before = std::mem::take(self);
        let next = Published::next(before.states.get(&anywhere), state);
        let is_same = |known: &Arc<Published>| Arc::ptr_eq(known, &next);
        let is_shared = (before.scope, scope) == (Scope::Cluster, Scope::Cluster);
        let is_unchanged = is_shared && before.states.get(&anywhere).is_some_and(is_same);
        self.scope = scope;
        self.states.insert(anywhere, next);
        let version = |watched: &Watched, client: &Client| {
            let published = watched.published(&client.location)?;
            Some(published.state.version)
        };
        let subscribers = before.subscribers.iter();
        let affected = subscribers.filter(|_| !is_unchanged);
        for client in affected.filter_map(|id| clients.get(id)) {
            if is_shared {
                client.queue.push(resource.clone());
                continue;
            }
            self.add(resource, index, &client.location, &before.states);
            if version(self, client) != version(&before, client) {
                client.queue.push(resource.clone());
            }
        }
        self.subscribers = before.subscribers;
    }
}
