//! Sets of labels with their values, in a limited number of places. Peers choose a part of the
//! labels, so a namespace holds at most as many places as are still free: no namespace takes all of
//! them. A set without a place counts in the set of the others. Pure: the caller passes the time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Seconds without use after which a set may end, if another one needs its place.
const MAX_UNUSED: u32 = 3600;
/// Seconds between two searches for such sets.
const SEARCH_INTERVAL: u32 = 60;

/// The labels of a set.
pub trait Labels: Clone + Ord {
    /// The namespace that holds its place.
    fn namespace(&self) -> &str;

    /// The set that counts for it while it has no place. There are few of these.
    fn other(&self) -> Self;
}

/// All sets of a metric, shared by all threads.
#[derive(Debug)]
pub struct Series<L, V> {
    places: usize,
    start: Instant,
    sets: Mutex<Sets<L, V>>,
}

#[derive(Debug)]
struct Sets<L, V> {
    placed: BTreeMap<L, Arc<Set<V>>>,
    others: BTreeMap<L, Arc<Set<V>>>,
    /// When unused sets were searched last, in seconds since the start.
    searched: u32,
}

/// The value of a set. A set with a handle does not end.
#[derive(Debug, Default)]
pub struct Set<V> {
    value: V,
    /// In seconds since the start.
    used: AtomicU32,
}

impl<L: Labels, V: Default> Series<L, V> {
    /// No sets yet, for so many places.
    pub fn new(places: usize, start: Instant) -> Self {
        let sets = Sets {
            placed: BTreeMap::new(),
            others: BTreeMap::new(),
            searched: 0,
        };
        Self {
            places,
            start,
            sets: Mutex::new(sets),
        }
    }

    /// The handle of a set. A new set begins at 0.
    pub fn get(&self, labels: &L, now: Instant) -> Arc<Set<V>> {
        let now = self.seconds(now);
        let mut sets = self.lock();
        if let Some(set) = sets.placed.get(labels) {
            return set.clone();
        }
        let mut has_place = sets.has_place(labels, self.places);
        if !has_place && now >= sets.searched + SEARCH_INTERVAL {
            sets.end_unused(labels, self.places, now);
            has_place = sets.has_place(labels, self.places);
        }
        let set = if has_place {
            sets.placed.entry(labels.clone())
        } else {
            sets.others.entry(labels.other())
        };
        set.or_default().clone()
    }

    /// The value of a set, which is used now.
    pub fn used<'a>(&self, set: &'a Set<V>, now: Instant) -> &'a V {
        set.used.store(self.seconds(now), Ordering::Relaxed);
        &set.value
    }

    /// All sets, sorted. Requests do not wait until they are written.
    pub fn all(&self) -> Vec<(L, Arc<Set<V>>)> {
        let sets = self.lock();
        let all = sets.placed.iter().chain(&sets.others);
        all.map(|(labels, set)| (labels.clone(), set.clone()))
            .collect()
    }

    fn seconds(&self, now: Instant) -> u32 {
        let since = now.saturating_duration_since(self.start).as_secs();
        u32::try_from(since).unwrap_or(u32::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, Sets<L, V>> {
        self.sets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<L: Labels, V> Sets<L, V> {
    /// Whether the namespace of a new set may hold another place.
    fn has_place(&self, labels: &L, places: usize) -> bool {
        let namespace = labels.namespace();
        let held = self
            .placed
            .keys()
            .filter(|one| one.namespace() == namespace);
        held.count() < places.saturating_sub(self.placed.len())
    }

    /// Ends unused sets: of all namespaces if no place is free, else of the one that holds its share.
    fn end_unused(&mut self, labels: &L, places: usize, now: u32) {
        self.searched = now;
        let is_full = self.placed.len() >= places;
        self.placed.retain(|one, set| {
            let may_end = is_full || one.namespace() == labels.namespace();
            // All handles are made under the lock.
            let is_in_use = Arc::strong_count(set) > 1;
            !may_end || is_in_use || now - set.used.load(Ordering::Relaxed).min(now) < MAX_UNUSED
        });
    }
}

impl<V> Set<V> {
    /// The value, for a scrape.
    pub fn value(&self) -> &V {
        &self.value
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::time::Duration;

    use super::*;

    type Name = (String, u32);

    impl Labels for Name {
        fn namespace(&self) -> &str {
            &self.0
        }

        fn other(&self) -> Self {
            (String::new(), 0)
        }
    }

    struct Table(Series<Name, AtomicU64>, Instant);

    impl Table {
        fn new(places: usize) -> Self {
            let start = Instant::now();
            Self(Series::new(places, start), start)
        }

        fn count(&self, namespace: &str, number: u32, seconds: u64) -> Arc<Set<AtomicU64>> {
            let now = self.1 + Duration::from_secs(seconds);
            let set = self.0.get(&(namespace.to_owned(), number), now);
            self.0.used(&set, now).fetch_add(1, Ordering::Relaxed);
            set
        }

        fn value(&self, namespace: &str, number: u32) -> Option<u64> {
            let all = self.0.all().into_iter();
            let mut found = all.filter(|(name, _)| *name == (namespace.to_owned(), number));
            found
                .next()
                .map(|(_, set)| set.value().load(Ordering::Relaxed))
        }

        fn held(&self, namespace: &str) -> usize {
            let all = self.0.all().into_iter();
            all.filter(|(name, _)| name.0 == namespace).count()
        }
    }

    #[test]
    fn a_namespace_holds_at_most_what_is_still_free_and_the_rest_is_counted() {
        let table = Table::new(16);
        for namespace in ["a", "b", "c"] {
            for number in 0..100 {
                table.count(namespace, number, 0);
            }
        }
        assert_eq!(["a", "b", "c"].map(|name| table.held(name)), [8, 4, 2]);
        assert_eq!(table.value("", 0), Some(300 - 14));
        table.count("d", 0, 0);
        table.count("e", 0, 0);
        table.count("f", 0, 0);
        assert_eq!(["d", "e", "f"].map(|name| table.held(name)), [1, 1, 0]);
        assert_eq!(table.value("", 0), Some(300 - 14 + 1));
    }

    #[test]
    fn unused_sets_end_when_another_one_needs_the_place_and_begin_again_at_zero() {
        let table = Table::new(2);
        table.count("a", 1, 0);
        table.count("b", 1, 0);
        for second in [100, 3599] {
            table.count("c", 1, second);
        }
        assert_eq!((table.value("c", 1), table.value("", 0)), (None, Some(2)));
        table.count("a", 1, 3600);
        table.count("c", 1, 3700);
        assert_eq!(table.value("a", 1), Some(2), "it was in use");
        assert_eq!((table.value("b", 1), table.value("c", 1)), (None, Some(1)));
        table.count("b", 1, 7400);
        assert_eq!(table.value("b", 1), Some(1));
        assert_eq!(table.value("", 0), Some(2), "nothing is lost");
    }

    #[test]
    fn sets_stay_while_there_are_places_or_a_handle() {
        let table = Table::new(4);
        let handle = table.count("a", 1, 0);
        table.count("b", 1, 0);
        table.count("a", 2, 10_000);
        assert_eq!(table.value("b", 1), Some(1), "a place was free");
        // The namespace has its share: its own unused sets end, and no others.
        table.count("a", 3, 20_000);
        assert_eq!(table.value("b", 1), Some(1));
        assert_eq!((table.value("a", 2), table.value("a", 3)), (None, Some(1)));
        assert_eq!(table.value("a", 1), Some(1), "it has a handle");
        drop(handle);
    }
}
