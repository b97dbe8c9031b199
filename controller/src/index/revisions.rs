//! The last valid states of invalid objects: those that the index has seen, and those that are
//! stored in the cluster, from before its start. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::object::{Key, Kind, Object, Source};
use super::store::{Replaced, Store};
use super::{Index, Touched, link, unlink};
use crate::last_valid::{Checked, Origin, Revision, Write};
use crate::routes::attach::RouteId;

/// The source of the objects whose states are stored.
const STORED: Source = Source::Kubernetes;
/// Stored states of the objects of one namespace. Further invalid objects lose their last valid state
/// when the controller restarts.
const MAX_REVISIONS: usize = 100;

/// The stored states, and the objects that need them.
#[derive(Debug, Default)]
pub(super) struct Revisions {
    pub(super) objects: Store<Revision>,
    of_object: HashMap<RouteId, BTreeSet<Key>>,
    /// The states of the objects that have fallen back to them.
    fallen_back: BTreeMap<RouteId, Arc<Origin>>,
}

impl Revisions {
    /// Falls back to the last valid state, if a new object is invalid. `old` is that of the same
    /// source.
    pub(super) fn restore<T: Clone + 'static>(
        &mut self,
        source: Source,
        new: &mut Checked<T>,
        old: Option<&Checked<T>>,
    ) {
        let id = (new.kind, new.key.clone());
        let stored = self.of_object.get(&id).filter(|_| source == STORED);
        let stored = stored.into_iter().flatten();
        let stored = stored.filter_map(|key| self.objects[key].object.checked::<T>());
        new.fall_back(stored.chain(old));
        if new.invalid.is_some() && source == STORED {
            self.fallen_back.insert(id, new.origin.clone());
        }
    }

    /// An object has been deleted, or is replaced by a new one.
    pub(super) fn forget(&mut self, source: Source, id: &RouteId) {
        if source == STORED {
            self.fallen_back.remove(id);
        }
    }

    /// The number of references between objects.
    #[cfg(test)]
    pub(super) fn links(&self) -> usize {
        self.of_object.len() + self.fallen_back.len()
    }
}

fn id_of(object: &Object) -> RouteId {
    (object.kind(), object.key().clone())
}

impl Index {
    /// A stored state has changed: its object may fall back to it.
    pub(super) fn set_revision(
        &mut self,
        source: Source,
        key: &Key,
        new: Option<Revision>,
        touched: &mut Touched,
    ) {
        let Some(Replaced(old)) = self.revisions.objects.replace(source, key, new) else {
            return;
        };
        if let Some(old) = old {
            unlink(&mut self.revisions.of_object, &id_of(&old.object), key);
        }
        let Some(new) = self.revisions.objects.get(key) else {
            return;
        };
        let id = id_of(&new.object);
        link(&mut self.revisions.of_object, &id, key);
        if let Some(object) = self.object(&id) {
            self.set(STORED, object, touched);
        }
    }

    /// An object whose states are stored.
    fn object(&self, (kind, key): &RouteId) -> Option<Object> {
        let (policies, routes) = (&self.policies.objects, &self.routes);
        let (splits, groups) = (&routes.traffic_splits, &routes.route_groups);
        Some(match kind {
            Kind::Service => Object::Service(self.services.of_source(STORED, key)?.clone()),
            Kind::TrafficPolicy => Object::Policy(policies.of_source(STORED, key)?.clone()),
            Kind::TrafficSplit => Object::Split(splits.of_source(STORED, key)?.clone()),
            Kind::RouteGroup => Object::RouteGroup(groups.of_source(STORED, key)?.clone()),
            kind => Object::Route(routes.of_kind(*kind).of_source(STORED, key)?.clone()),
        })
    }

    /// The states to store in the cluster, and those that are no longer needed.
    pub fn revision_writes(&self) -> Vec<Write> {
        let mut writes = Vec::new();
        let mut stored: HashMap<&str, usize> = HashMap::new();
        for revision in self.revisions.objects.values() {
            let id = id_of(&revision.object);
            if !self.history.has_listed(id.0) {
                continue;
            }
            let needed = self.revisions.fallen_back.get(&id);
            match needed.is_some() && needed == revision.object.origin() {
                true => *stored.entry(&revision.object.key().namespace).or_default() += 1,
                false => writes.push(Write::Delete {
                    revision: revision.key.clone(),
                    id,
                }),
            }
        }
        for (id, origin) in &self.revisions.fallen_back {
            let of_object = self.revisions.of_object.get(id).into_iter().flatten();
            let mut of_object = of_object.map(|key| self.revisions.objects[key].object.origin());
            let is_stored = of_object.any(|one| one == Some(origin));
            let count = stored.entry(&id.1.namespace).or_default();
            if !is_stored && *count < MAX_REVISIONS {
                *count += 1;
                writes.push(Write::Create {
                    id: id.clone(),
                    origin: (**origin).clone(),
                });
            }
        }
        writes
    }
}

#[cfg(test)]
mod tests;
