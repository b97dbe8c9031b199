//! The objects of one kind by key. Pure.

use std::collections::HashMap;
use std::ops;

use super::object::Key;

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

/// The objects of one kind, of whatever type.
pub(super) trait Objects {
    fn len(&self) -> usize;

    fn keys(&self) -> Vec<Key>;
}

impl<T> Objects for Store<T> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn keys(&self) -> Vec<Key> {
        self.0.keys().cloned().collect()
    }
}

impl<T: PartialEq> Store<T> {
    pub fn get(&self, key: &Key) -> Option<&T> {
        self.0.get(key)
    }

    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.0.keys()
    }

    /// Replaces an object. `None` if the key has the same object as before.
    pub fn replace(&mut self, key: &Key, new: Option<T>) -> Option<Replaced<T>> {
        if self.get(key) == new.as_ref() {
            return None;
        }
        Some(Replaced(match new {
            Some(new) => self.0.insert(key.clone(), new),
            None => self.0.remove(key),
        }))
    }
}

impl<T> ops::Index<&Key> for Store<T> {
    type Output = T;

    fn index(&self, key: &Key) -> &T {
        &self.0[key]
    }
}
