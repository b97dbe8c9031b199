//! The objects of one kind by key and source. Pure.
//!
//! If several sources provide an object, the first source takes precedence, whatever the order of
//! events. The objects of the others are kept until it is deleted.

use std::collections::{BTreeMap, HashMap};
use std::ops;

use super::object::{Key, Source};

/// The objects of one kind.
#[derive(Debug)]
pub(super) struct Store<T> {
    objects: HashMap<Key, (Source, T)>,
    /// The objects of sources without precedence.
    hidden: BTreeMap<(Key, Source), T>,
}

/// The previous object of a key, which has another one or none now.
pub(super) struct Replaced<T>(pub Option<T>);

impl<T> Default for Store<T> {
    fn default() -> Self {
        Store {
            objects: HashMap::new(),
            hidden: BTreeMap::new(),
        }
    }
}

/// The objects of one kind, of whatever type.
pub(super) trait Objects {
    fn len(&self) -> usize;

    /// The keys of all objects of a source.
    fn keys_of(&self, source: Source) -> Vec<Key>;
}

impl<T> Objects for Store<T> {
    fn len(&self) -> usize {
        self.objects.len()
    }

    fn keys_of(&self, source: Source) -> Vec<Key> {
        let owned = self.objects.iter();
        let owned = owned.filter_map(|(key, (owner, _))| (*owner == source).then_some(key));
        let hidden = self.hidden.keys();
        let hidden = hidden.filter_map(|(key, owner)| (*owner == source).then_some(key));
        owned.chain(hidden).cloned().collect()
    }
}

impl<T: Clone + PartialEq> Store<T> {
    pub fn get(&self, key: &Key) -> Option<&T> {
        self.objects.get(key).map(|(_, object)| object)
    }

    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.objects.keys()
    }

    /// Replaces the object of a source. `None` if the key has the same object as before.
    pub fn replace(&mut self, source: Source, key: &Key, new: Option<T>) -> Option<Replaced<T>> {
        let owner = self.objects.get(key).map_or(source, |(owner, _)| *owner);
        if owner < source {
            match new {
                Some(new) => self.hidden.insert((key.clone(), source), new),
                None => self.hidden.remove(&(key.clone(), source)),
            };
            return None;
        }
        let next = match new {
            Some(new) => Some((source, new)),
            None if owner > source => return None,
            None => self.take_hidden(key),
        };
        let is_same = next.as_ref().map(|(_, object)| object) == self.get(key);
        let old = match next {
            Some(next) => self.objects.insert(key.clone(), next),
            None => self.objects.remove(key),
        };
        if let Some((owner, old)) = &old
            && *owner > source
        {
            self.hidden.insert((key.clone(), *owner), old.clone());
        }
        (!is_same).then(|| Replaced(old.map(|(_, object)| object)))
    }

    /// Removes the object of the first source without precedence.
    fn take_hidden(&mut self, key: &Key) -> Option<(Source, T)> {
        let from = (key.clone(), Source::FIRST);
        let (found, _) = self.hidden.range(from..).next()?;
        let found = (found.0 == *key).then(|| found.clone())?;
        let object = self.hidden.remove(&found)?;
        Some((found.1, object))
    }
}

impl<T: Clone + PartialEq> ops::Index<&Key> for Store<T> {
    type Output = T;

    fn index(&self, key: &Key) -> &T {
        &self.objects[key].1
    }
}
