//! One resource with subscribers: its published states, by location, and who is notified of a
//! change.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::acknowledgements::Acknowledged;
use super::history::History;
use super::queue::Queue;
use crate::index::locality::{Location, Scope};
use crate::index::position::Position;
use crate::index::reads::{self, Reads};
use crate::index::state::State;
use crate::index::{Index, Resource};

/// The states of a resource in an index, by the location of clients within the scope.
pub(super) struct Resolved {
    pub(super) scope: Scope,
    states: HashMap<Location, State>,
    /// The values that they depend on.
    pub(super) reads: Reads,
}

impl Resolved {
    /// The states everywhere and at a location.
    pub(super) fn new(index: &Index, resource: &Resource, location: &Location) -> Resolved {
        let anywhere = Location::default();
        let ((scope, state), reads) = reads::ask(|| index.resolve(resource, &anywhere));
        let location = location.within(&scope);
        let mut resolved = Resolved {
            scope,
            states: HashMap::from([(anywhere, state)]),
            reads,
        };
        resolved.add(index, resource, location);
        resolved
    }

    /// Adds the state at a location within the scope.
    pub(super) fn add(&mut self, index: &Index, resource: &Resource, location: Location) {
        let state = self.take(index, resource, &location);
        self.states.insert(location, state);
    }

    /// The state at a location within the scope.
    fn take(&mut self, index: &Index, resource: &Resource, location: &Location) -> State {
        self.states.remove(location).unwrap_or_else(|| {
            let ((_, state), reads) = reads::ask(|| index.resolve(resource, location));
            self.reads.add(reads);
            state
        })
    }
}

/// A resource with subscribers.
#[derive(Default)]
pub(super) struct Watched {
    scope: Scope,
    /// The states by the location of clients within the scope. One for most resources.
    pub(super) states: HashMap<Location, Arc<State>>,
    pub(super) subscribers: BTreeMap<u64, Subscriber>,
    /// A change may concern it, which is not published yet.
    pub(super) is_pending: bool,
}

/// A subscriber to a resource.
pub(super) struct Subscriber {
    pub(super) queue: Arc<Queue>,
    pub(super) acknowledged: Option<Acknowledged>,
}

impl Watched {
    /// The state at a location, which is added if there is none, and what that has read. With its latest
    /// position: nothing up to the published one concerns it.
    pub(super) fn add(
        &mut self,
        index: &Index,
        resource: &Resource,
        location: &Location,
        resolved: Option<Resolved>,
        published: Option<&Arc<Position>>,
    ) -> (Arc<State>, Reads) {
        let within = location.within(&self.scope);
        if let Some(known) = self.states.get_mut(&within) {
            if !self.is_pending {
                State::advance(known, published);
            }
            return (known.clone(), Reads::default());
        }
        let mut resolved = resolved.unwrap_or_else(|| Resolved::new(index, resource, location));
        // An unpublished change of the scope concerns the other subscribers, too.
        if self.subscribers.is_empty() {
            self.scope = resolved.scope.clone();
        }
        let location = location.within(&self.scope);
        let state = Arc::new(resolved.take(index, resource, &location));
        self.states.insert(location, state.clone());
        (state, resolved.reads)
    }

    pub(super) fn state(&self, location: &Location) -> Option<&Arc<State>> {
        self.states.get(&location.within(&self.scope))
    }

    /// Replaces the states, and notifies the subscribers whose state has changed. Returns what the states
    /// have read. Work is done per location, and in most cases there is one.
    pub(super) fn update(
        &mut self,
        index: &Index,
        resource: &Arc<Resource>,
        mut resolved: Resolved,
        history: &mut History,
        location: impl Fn(u64) -> Location,
    ) -> Reads {
        let anywhere = Location::default();
        let before = std::mem::take(self);
        self.scope = resolved.scope.clone();
        let mut next = |location: &Location| {
            let state = resolved.take(index, resource, location);
            next(before.states.get(location), state, history)
        };
        let shared = next(&anywhere);
        self.states.insert(anywhere.clone(), shared.clone());
        let is_shared = [&before.scope, &self.scope] == [&Scope::default(); 2];
        let is_same = |known: &Arc<State>| known.version == shared.version;
        let is_unchanged = is_shared && before.states.get(&anywhere).is_some_and(is_same);
        for (id, Subscriber { queue, .. }) in before.subscribers.iter().filter(|_| !is_unchanged) {
            if is_shared {
                queue.push(resource.clone(), shared.clone());
                continue;
            }
            let location = location(*id);
            let state = self.states.entry(location.within(&self.scope));
            let state = state.or_insert_with_key(&mut next);
            let known = before.state(&location).map(|known| known.version);
            if known != Some(state.version) {
                queue.push(resource.clone(), state.clone());
            }
        }
        self.subscribers = before.subscribers;
        resolved.reads
    }
}

/// The next state of a resource: the current one at a later position, if the versions are equal. The
/// endpoints that subscribers may have are recorded.
fn next(current: Option<&Arc<State>>, next: State, history: &mut History) -> Arc<State> {
    let Some(current) = current else {
        return Arc::new(next);
    };
    if current.version == next.version {
        let mut current = current.clone();
        State::advance(&mut current, next.position.as_ref());
        return current;
    }
    if let Some(target) = current
        .target
        .as_ref()
        .filter(|_| current.rest == next.rest)
    {
        history.add(&target.endpoints);
    }
    Arc::new(next)
}
