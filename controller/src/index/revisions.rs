//! The last valid states of invalid objects: those that the index has seen, and those that are
//! stored in the cluster, from before its start. Pure.

use std::collections::{BTreeSet, HashMap};

use super::object::{Key, Kind, Object, Source};
use super::store::{Replaced, Store};
use super::{Index, Touched, link, unlink};
use crate::last_valid::{FallBack, InForce, Origin, Revision, Write};
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
    fallen_back: BTreeSet<RouteId>,
}

impl Revisions {
    /// A new object, with the last valid state if it is invalid. `old` is that of the same source.
    pub(super) fn restore<T: FallBack>(
        &self,
        source: Source,
        id: &RouteId,
        new: T,
        old: Option<&T>,
    ) -> T {
        let stored = self.of_object.get(id).filter(|_| source == STORED);
        let stored = stored.into_iter().flatten();
        let stored = stored.filter_map(|key| self.objects[key].object.downcast::<T>());
        new.with_last_valid(stored.chain(old))
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
        fn object<T: Clone + PartialEq>(
            store: &Store<T>,
            key: &Key,
            to_object: fn(T) -> Object,
        ) -> Option<Object> {
            store.of_source(STORED, key).cloned().map(to_object)
        }
        match kind {
            Kind::Service => object(&self.services, key, Object::Service),
            Kind::TrafficPolicy => object(&self.policies.objects, key, Object::Policy),
            Kind::TrafficSplit => object(&self.routes.traffic_splits, key, Object::Split),
            Kind::RouteGroup => object(&self.routes.route_groups, key, Object::RouteGroup),
            kind => object(self.routes.of_kind(*kind), key, Object::Route),
        }
    }

    /// The state of an object, and whether the object has fallen back to it.
    fn state_of(&self, (kind, key): &RouteId) -> Option<(&Origin, bool)> {
        fn state<'a, T>(store: &'a Store<T>, key: &Key) -> Option<(&'a Origin, bool)>
        where
            T: FallBack + Clone + PartialEq,
        {
            let object = store.of_source(STORED, key)?;
            Some((object.origin()?, object.in_force() == InForce::Earlier))
        }
        match kind {
            Kind::Service => state(&self.services, key),
            Kind::TrafficPolicy => state(&self.policies.objects, key),
            Kind::TrafficSplit => state(&self.routes.traffic_splits, key),
            Kind::RouteGroup => state(&self.routes.route_groups, key),
            kind => state(self.routes.of_kind(*kind), key),
        }
    }

    /// Notes whether an object has fallen back.
    pub(super) fn note_fallback(&mut self, kind: Kind, key: &Key) {
        if kind.can_fall_back() {
            let id = (kind, key.clone());
            match self.state_of(&id) {
                Some((_, true)) => self.revisions.fallen_back.insert(id),
                _ => self.revisions.fallen_back.remove(&id),
            };
        }
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
            match self.is_needed(&id, origin_of(&revision.object)) {
                true => *stored.entry(&revision.object.key().namespace).or_default() += 1,
                false => writes.push(Write::Delete {
                    revision: revision.key.clone(),
                    id,
                }),
            }
        }
        for id in &self.revisions.fallen_back {
            let Some((origin, _)) = self.state_of(id) else {
                continue;
            };
            let of_object = self.revisions.of_object.get(id).into_iter().flatten();
            let mut of_object = of_object.map(|key| origin_of(&self.revisions.objects[key].object));
            let is_stored = of_object.any(|one| Some(origin) == one);
            let count = stored.entry(&id.1.namespace).or_default();
            if !is_stored && *count < MAX_REVISIONS {
                *count += 1;
                writes.push(Write::Create {
                    id: id.clone(),
                    origin: origin.clone(),
                });
            }
        }
        writes
    }

    /// Whether a stored state is the one that is in force while its object is invalid.
    fn is_needed(&self, id: &RouteId, stored: Option<&Origin>) -> bool {
        let in_force = self.state_of(id);
        in_force.is_some_and(|(origin, has_fallen_back)| has_fallen_back && Some(origin) == stored)
    }
}

fn origin_of(object: &Object) -> Option<&Origin> {
    match object {
        Object::Service(service) => service.origin(),
        Object::Route(route) => route.origin(),
        Object::Split(split) => split.origin(),
        Object::RouteGroup(group) => group.origin(),
        Object::Policy(policy) => policy.origin(),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
