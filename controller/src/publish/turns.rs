//! A queue of work, such as resources to publish and keys to fetch. Namespaces take turns, whatever
//! the number of their items.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use tokio::time::Instant;

/// The items by their namespace, with the time since which each waits.
pub(crate) struct Turns<T> {
    waiting: BTreeMap<Arc<str>, BTreeMap<T, Instant>>,
    /// The namespace of the last turn.
    last: Arc<str>,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Turns {
            waiting: BTreeMap::new(),
            last: "".into(),
        }
    }
}

impl<T: Ord> Turns<T> {
    /// Adds an item, once.
    pub(crate) fn add(&mut self, namespace: Arc<str>, item: T, since: Instant) {
        let of_namespace = self.waiting.entry(namespace).or_default();
        of_namespace.entry(item).or_insert(since);
    }

    /// An item of the next namespace, and the time since which it waits.
    pub(crate) fn next(&mut self) -> Option<(T, Instant)> {
        let after = (Bound::Excluded(&*self.last), Bound::Unbounded);
        let mut following = self.waiting.range::<str, _>(after);
        let next = following.next().or_else(|| self.waiting.first_key_value());
        let namespace = next?.0.clone();
        let of_namespace = self.waiting.get_mut(&namespace)?;
        let item = of_namespace.pop_first();
        if of_namespace.is_empty() {
            self.waiting.remove(&namespace);
        }
        self.last = namespace;
        item
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Resource;

    #[test]
    fn namespaces_take_turns() {
        let destination = |port| Arc::new(Resource::Destination(([10, 0, 0, 1], port).into()));
        let (mut turns, now) = (Turns::default(), Instant::now());
        for port in 1..=1000 {
            turns.add("large".into(), destination(port), now);
        }
        let mut order = Vec::new();
        let mut take = |turns: &mut Turns<Arc<Resource>>| {
            let resource = turns.next().unwrap();
            order.push(turns.last.to_string());
            resource
        };
        take(&mut turns);
        for (namespace, port) in [("a", 2000), ("a", 2000), ("z", 3000)] {
            turns.add(namespace.into(), destination(port), now);
        }
        (0..4).for_each(|_| drop(take(&mut turns)));
        let left = std::iter::from_fn(|| turns.next()).count();
        assert_eq!(
            (order.join(" "), left),
            ("large z a large large".to_owned(), 997)
        );
        assert!(turns.is_empty());
    }
}
