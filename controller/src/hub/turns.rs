//! What is to be published. Namespaces take turns, whatever the number of their resources.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use tokio::time::Instant;

use crate::index::object::Resource;

/// The affected resources by the namespace of their target, with the time of their oldest change.
#[derive(Default)]
pub(super) struct Turns {
    affected: BTreeMap<Arc<str>, BTreeMap<Arc<Resource>, Instant>>,
    /// The namespace of the last turn.
    last: Arc<str>,
}

impl Turns {
    /// Adds a resource, once.
    pub(super) fn add(&mut self, namespace: Arc<str>, resource: Arc<Resource>, since: Instant) {
        let of_namespace = self.affected.entry(namespace).or_default();
        of_namespace.entry(resource).or_insert(since);
    }

    /// A resource of the next namespace, and the time of its oldest change.
    pub(super) fn next(&mut self) -> Option<(Arc<Resource>, Instant)> {
        let after = (Bound::Excluded(&*self.last), Bound::Unbounded);
        let mut following = self.affected.range::<str, _>(after);
        let next = following.next().or_else(|| self.affected.first_key_value());
        let namespace = next?.0.clone();
        let of_namespace = self.affected.get_mut(&namespace)?;
        let resource = of_namespace.pop_first();
        if of_namespace.is_empty() {
            self.affected.remove(&namespace);
        }
        self.last = namespace;
        resource
    }

    pub(super) fn is_empty(&self) -> bool {
        self.affected.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_take_turns() {
        let destination = |port| Arc::new(Resource::Destination(([10, 0, 0, 1], port).into()));
        let (mut turns, now) = (Turns::default(), Instant::now());
        for port in 1..=1000 {
            turns.add("large".into(), destination(port), now);
        }
        let mut order = Vec::new();
        let mut take = |turns: &mut Turns| {
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
