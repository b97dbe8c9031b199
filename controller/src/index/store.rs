//! Values by key: the objects of one kind, or results. A read is recorded for the question that reads, and
//! a change is told to the questions that have read the value. Pure.

use std::any::type_name;
use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::ops;

use super::links::{Linked, Links};
use super::reads::{self, Read};
use super::{Changed, put};
use crate::object::{Key, Kind};

/// Values by key.
#[derive(Debug)]
pub(super) struct Values<K, V>(HashMap<K, V>);

/// The previous value of a key, which has another one or none now.
pub(super) struct Replaced<T>(pub Option<T>);

impl<K, V> Default for Values<K, V> {
    fn default() -> Self {
        Values(HashMap::new())
    }
}

impl<K: Clone + Eq + Hash, V: PartialEq> Values<K, V> {
    pub fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        reads::record(|| read::<Q, V>(key));
        self.0.get(key)
    }

    pub fn keys(&self) -> impl Iterator<Item = &K> {
        reads::record(all::<V>);
        self.0.keys()
    }

    /// Replaces or removes the value of a key. `None` if it is the same as before.
    pub fn put(&mut self, changed: &mut Changed, key: &K, new: Option<V>) -> Option<Replaced<V>> {
        if self.0.get(key) == new.as_ref() {
            return None;
        }
        changed.add(read::<K, V>(key));
        Some(self.put_untold(changed, key, new))
    }

    /// Replaces or removes a value. Only those that read all keys are told.
    fn put_untold(&mut self, changed: &mut Changed, key: &K, new: Option<V>) -> Replaced<V> {
        let is_known = new.is_some();
        let old = put(&mut self.0, key, new);
        if old.is_some() != is_known {
            changed.add(all::<V>());
        }
        Replaced(old)
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// The value of a key was read.
fn read<K: Hash + ?Sized, V>(key: &K) -> Read {
    Read::of(type_name::<V>(), key)
}

/// All keys were read.
fn all<V>() -> Read {
    Read::of(type_name::<V>(), &())
}

/// The objects of one kind.
#[derive(Debug)]
pub(super) struct Store<T>(Values<Key, T>);

impl<T> Default for Store<T> {
    fn default() -> Self {
        Store(Values::default())
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
        self.keys().map(|key| &self[key])
    }

    /// Replaces an object and its links. `None` if the key has the same object as before.
    pub fn replace(
        &mut self,
        links: &mut Links,
        kind: Kind,
        key: &Key,
        new: Option<T>,
    ) -> Option<Replaced<T>> {
        let old = self.0.0.get(key);
        if old == new.as_ref() {
            return None;
        }
        let of = |object: Option<&T>| object.map_or_else(Vec::new, T::links);
        links.replace(&(kind, key.clone()), of(old), of(new.as_ref()));
        if old
            .zip(new.as_ref())
            .is_none_or(|(old, new)| new.differs(old))
        {
            links.changed.add(read::<Key, T>(key));
        }
        Some(self.0.put_untold(&mut links.changed, key, new))
    }
}

impl<T: Linked> ops::Index<&Key> for Store<T> {
    type Output = T;

    fn index(&self, key: &Key) -> &T {
        self.get(key).expect("a link leads to an object")
    }
}
