//! The objects of one kind by key. Pure.

use std::collections::HashMap;
use std::hash::Hash;
use std::ops;

use super::links::{Linked, Links};
use crate::object::{Key, Kind};

/// The objects of one kind.
#[derive(Debug)]
pub(super) struct Store<T>(HashMap<Key, T>);

/// The previous object of a key, which has another one or none now.
pub(super) struct Replaced<T>(pub Option<T>);

impl<T> Default for Store<T> {
    fn default() -> Self {
        Store(HashMap::new())
    }
}

impl<T: Linked> Store<T> {
    pub fn get(&self, key: &Key) -> Option<&T> {
        self.0.get(key)
    }

    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.0.keys()
    }

    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.0.values()
    }

    /// Replaces an object and its links. `None` if the key has the same object as before.
    pub fn replace(
        &mut self,
        links: &mut Links,
        kind: Kind,
        key: &Key,
        new: Option<T>,
    ) -> Option<Replaced<T>> {
        let old = self.get(key);
        if old == new.as_ref() {
            return None;
        }
        let of = |object: Option<&T>| object.map_or_else(Vec::new, T::links);
        links.replace(&(kind, key.clone()), of(old), of(new.as_ref()));
        Some(Replaced(put(&mut self.0, key, new)))
    }
}

/// Replaces or removes the value of a key. Returns the one before.
pub(super) fn put<K: Clone + Eq + Hash, V>(
    map: &mut HashMap<K, V>,
    key: &K,
    new: Option<V>,
) -> Option<V> {
    match new {
        Some(new) => map.insert(key.clone(), new),
        None => map.remove(key),
    }
}

impl<T> ops::Index<&Key> for Store<T> {
    type Output = T;

    fn index(&self, key: &Key) -> &T {
        &self.0[key]
    }
}
