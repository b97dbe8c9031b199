//! A bounded map whose entries end. The time is passed in; the oldest entry makes room.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

/// Values by the hash of a token.
pub(super) struct Cache<T> {
    entries: HashMap<[u8; 32], Entry<T>>,
    /// In the order of their arrival; an entry that was replaced stands here with its former
    /// number.
    order: VecDeque<([u8; 32], u64)>,
    arrivals: u64,
    capacity: usize,
}

struct Entry<T> {
    value: T,
    until: Instant,
    arrival: u64,
}

impl<T: Clone> Cache<T> {
    pub(super) fn new(capacity: usize) -> Self {
        Cache {
            entries: HashMap::new(),
            order: VecDeque::new(),
            arrivals: 0,
            capacity,
        }
    }

    /// The value, unless it has ended.
    pub(super) fn get(&self, key: &[u8; 32], now: Instant) -> Option<T> {
        self.entries
            .get(key)
            .filter(|entry| now < entry.until)
            .map(|entry| entry.value.clone())
    }

    /// Keeps a value until then, and lets go of what has ended, or is oldest, where there is no
    /// room.
    pub(super) fn put(&mut self, key: [u8; 32], value: T, until: Instant, now: Instant) {
        if until <= now {
            return;
        }
        self.arrivals += 1;
        self.entries.insert(
            key,
            Entry {
                value,
                until,
                arrival: self.arrivals,
            },
        );
        self.order.push_back((key, self.arrivals));
        while let Some((oldest, arrival)) = self.order.front() {
            let current = self
                .entries
                .get(oldest)
                .filter(|entry| entry.arrival == *arrival);
            let keep =
                current.is_some_and(|entry| now < entry.until) && self.order.len() <= self.capacity;
            if keep {
                break;
            }
            if current.is_some() {
                self.entries.remove(oldest);
            }
            self.order.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn key(number: u8) -> [u8; 32] {
        [number; 32]
    }

    #[test]
    fn an_entry_ends_in_time() {
        let now = Instant::now();
        let mut cache = Cache::new(10);
        cache.put(key(1), "a", now + Duration::from_secs(5), now);
        assert_eq!(cache.get(&key(1), now + Duration::from_secs(4)), Some("a"));
        assert_eq!(cache.get(&key(1), now + Duration::from_secs(5)), None);
        cache.put(key(2), "b", now, now);
        assert_eq!(cache.get(&key(2), now), None, "what has ended is not kept");
    }

    #[test]
    fn the_oldest_makes_room_and_memory_stays_bounded() {
        let now = Instant::now();
        let later = now + Duration::from_secs(5);
        let mut cache = Cache::new(3);
        for number in 0..100 {
            cache.put(key(number), number, later, now);
        }
        assert_eq!(
            (0..100)
                .filter(|number| cache.get(&key(*number), now).is_some())
                .collect::<Vec<_>>(),
            [97, 98, 99]
        );
        for _ in 0..100 {
            cache.put(key(99), 99, later, now);
        }
        assert!(cache.order.len() <= 3 && cache.entries.len() <= 3);
        assert_eq!(
            cache.get(&key(99), now),
            Some(99),
            "a replaced entry is not lost with its former place"
        );
    }

    #[test]
    fn ended_entries_leave_when_another_arrives() {
        let now = Instant::now();
        let mut cache = Cache::new(100);
        cache.put(key(1), 1, now + Duration::from_secs(1), now);
        cache.put(
            key(2),
            2,
            now + Duration::from_secs(9),
            now + Duration::from_secs(2),
        );
        assert_eq!(cache.entries.len(), 1);
    }
}
