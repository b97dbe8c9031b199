//! The failures at this proxy in the last minute: requests by destination and code, ejected
//! endpoints, open circuits, and probes. Workers and probes report here. Discovery sends the
//! exceptions to the controller, and metrics show them. Requests that succeed take no lock: workers
//! report their number every few seconds.
//!
//! Each kind has a limited number of entries, and keeps those that it has: further ones are counted
//! together. So callers of the pod do not displace the failures of its application, and unknown
//! addresses displace no Services. Pure: the caller passes the time.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The entries of a kind.
const MAX_ENTRIES: usize = 32;
/// The destination of the events that have no entry.
const OTHER: &str = "other";
/// A minute in parts. The current part is incomplete.
const PARTS: usize = 6;
const PART: Duration = Duration::from_secs(10);

/// The kind of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Requests and connections to a Service, or to a pod that discovery knows.
    Requests,
    /// Those to other addresses.
    Addresses,
    /// Those to the application of the pod.
    Inbound,
    /// An endpoint: requests avoid it.
    Ejected,
    /// A backend: requests fail at once.
    CircuitOpen,
    /// A probe of the kubelet.
    Probe,
}

impl Kind {
    /// In the order of the discriminants.
    const ALL: [Self; 6] = [
        Self::Requests,
        Self::Addresses,
        Self::Inbound,
        Self::Ejected,
        Self::CircuitOpen,
        Self::Probe,
    ];

    /// The names in messages and metrics, in the order of the discriminants.
    const NAMES: [&str; 6] = [
        "requests",
        "addresses",
        "inbound",
        "ejected",
        "circuit-open",
        "probe",
    ];

    /// The name in messages and metrics.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// One failure, or one observation of an ejected endpoint or an open circuit.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// The kind of the failure.
    pub kind: Kind,
    /// Its name. Empty: the pod.
    pub destination: &'a str,
    /// The endpoint, if the event is about one.
    pub endpoint: &'a str,
    /// Why.
    pub reason: &'a str,
}

/// The failures of one kind and reason in the last minute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exception {
    /// The kind of the failures.
    pub kind: Kind,
    /// Its name. Empty: the pod.
    pub destination: String,
    /// The endpoint, if the exception is about one.
    pub endpoint: String,
    /// Why.
    pub reason: String,
    /// The number of events.
    pub count: u32,
    /// The number of requests, connections or attempts. 0: unknown.
    pub total: u32,
}

/// The exceptions of the process, shared by all threads.
#[derive(Debug)]
pub struct Exceptions {
    start: Instant,
    /// By [`Kind`].
    tables: Mutex<[Table; Kind::ALL.len()]>,
}

#[derive(Debug, Default)]
struct Table {
    entries: Vec<Entry>,
    /// Requests, connections or attempts by destination, of those that have entries.
    totals: Vec<(String, Minute)>,
}

#[derive(Debug)]
struct Entry {
    destination: String,
    endpoint: String,
    reason: String,
    count: Minute,
}

impl Exceptions {
    /// No exceptions so far.
    pub fn new(start: Instant) -> Self {
        Self {
            start,
            tables: Mutex::default(),
        }
    }

    /// Counts an event. `total` is the number of requests, connections or attempts since the last
    /// report about the destination, this one included.
    pub fn record(&self, event: Event<'_>, total: u32, now: Instant) {
        let part = self.part(now);
        self.lock()[event.kind as usize].record(event, total, part);
    }

    /// Counts what did not fail. Without an effect for destinations that have no entries.
    pub fn count(&self, kind: Kind, destination: &str, total: u32, now: Instant) {
        let part = self.part(now);
        let table = &mut self.lock()[kind as usize];
        if let Some((_, count)) = table
            .totals
            .iter_mut()
            .find(|(name, _)| name == destination)
        {
            count.add(total, part);
        }
    }

    /// Whether no destination has an entry.
    pub fn is_empty(&self) -> bool {
        self.lock().iter().all(|table| table.entries.is_empty())
    }

    /// The exceptions of the last minute. The kinds take turns, each with the most frequent ones
    /// first.
    pub fn report(&self, now: Instant) -> Vec<Exception> {
        let part = self.part(now);
        let mut ranked = Vec::new();
        for (table, kind) in self.lock().iter_mut().zip(Kind::ALL) {
            ranked.extend(table.report(kind, part).into_iter().enumerate());
        }
        ranked.sort_by_key(|(rank, _)| *rank);
        ranked.into_iter().map(|(_, exception)| exception).collect()
    }

    /// The number of the part of a minute that contains `now`.
    fn part(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.start).as_secs() / PART.as_secs()
    }

    fn lock(&self) -> MutexGuard<'_, [Table; Kind::ALL.len()]> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn record(&mut self, event: Event<'_>, total: u32, part: u64) {
        if self.entry(event).is_none() && self.entries.len() >= MAX_ENTRIES {
            self.expire(part);
        }
        if let Some(entry) = self.entry(event) {
            entry.count.add(1, part);
        } else if self.entries.len() < MAX_ENTRIES || event.destination == OTHER {
            let mut count = Minute::default();
            count.add(1, part);
            self.entries.push(Entry {
                destination: event.destination.to_owned(),
                endpoint: event.endpoint.to_owned(),
                reason: event.reason.to_owned(),
                count,
            });
        } else {
            let (destination, none) = (OTHER, "");
            let other = Event {
                destination,
                endpoint: none,
                reason: none,
                ..event
            };
            return self.record(other, 0, part);
        }
        let mut totals = self.totals.iter_mut();
        match totals.find(|(name, _)| name == event.destination) {
            Some((_, count)) => count.add(total, part),
            None => {
                let mut count = Minute::default();
                count.add(total, part);
                self.totals.push((event.destination.to_owned(), count));
            }
        }
    }

    fn entry(&mut self, event: Event<'_>) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| {
            entry.destination == event.destination
                && entry.reason == event.reason
                && entry.endpoint == event.endpoint
        })
    }

    /// Removes what has not failed in the last minute.
    fn expire(&mut self, part: u64) {
        let entries = &mut self.entries;
        entries.retain_mut(|entry| entry.count.sum(part) > 0);
        let is_used = |name: &String| entries.iter().any(|entry| entry.destination == *name);
        self.totals.retain(|(name, _)| is_used(name));
    }

    fn report(&mut self, kind: Kind, part: u64) -> Vec<Exception> {
        self.expire(part);
        let totals = &mut self.totals;
        let exceptions = self.entries.iter_mut().map(|entry| {
            let mut totals = totals.iter_mut();
            let total = totals.find(|(name, _)| *name == entry.destination);
            Exception {
                kind,
                destination: entry.destination.clone(),
                endpoint: entry.endpoint.clone(),
                reason: entry.reason.clone(),
                count: entry.count.sum(part),
                total: total.map_or(0, |(_, count)| count.sum(part)),
            }
        });
        let mut exceptions: Vec<Exception> = exceptions.collect();
        exceptions.sort_by_key(|exception| std::cmp::Reverse(exception.count));
        exceptions
    }
}

/// A number of events in the last minute.
#[derive(Debug, Default)]
struct Minute {
    parts: [u32; PARTS],
    /// The number of the latest part.
    latest: u64,
}

impl Minute {
    fn add(&mut self, count: u32, part: u64) {
        self.advance(part);
        let current = &mut self.parts[self.latest as usize % PARTS];
        *current = current.saturating_add(count);
    }

    fn sum(&mut self, part: u64) -> u32 {
        self.advance(part);
        let parts = self.parts.iter();
        parts.fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Forgets the parts that are older than a minute. A thread may be late.
    fn advance(&mut self, part: u64) {
        let steps = part.saturating_sub(self.latest).min(PARTS as u64);
        self.latest = self.latest.max(part);
        for step in 0..steps {
            self.parts[(self.latest - step) as usize % PARTS] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CART: &str = "shop/cart:80";

    fn event<'a>(kind: Kind, destination: &'a str, reason: &'a str) -> Event<'a> {
        Event {
            kind,
            destination,
            endpoint: "",
            reason,
        }
    }

    /// The exceptions as "KIND DESTINATION REASON: COUNT of TOTAL".
    fn lines(exceptions: &Exceptions, now: Instant) -> Vec<String> {
        let describe = |one: &Exception| {
            let (kind, destination, reason) = (one.kind.name(), &one.destination, &one.reason);
            format!(
                "{kind} {destination} {reason}: {} of {}",
                one.count, one.total
            )
        };
        exceptions.report(now).iter().map(describe).collect()
    }

    fn seconds(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    #[test]
    fn counts_failures_and_requests_of_the_last_minute() {
        let now = Instant::now();
        let exceptions = Exceptions::new(now);
        // Before the first failure, the number of requests is not needed.
        exceptions.count(Kind::Requests, CART, 50, now);
        assert!(exceptions.is_empty());
        let failed = event(Kind::Requests, CART, "connect-failed");
        exceptions.record(failed, 4, now);
        exceptions.count(Kind::Requests, CART, 6, now + seconds(30));
        exceptions.record(failed, 1, now + seconds(30));
        let reset = event(Kind::Requests, CART, "upstream-closed");
        exceptions.record(reset, 1, now + seconds(31));
        let expected = [
            "requests shop/cart:80 connect-failed: 2 of 12",
            "requests shop/cart:80 upstream-closed: 1 of 12",
        ];
        assert_eq!(lines(&exceptions, now + seconds(59)), expected);
        let expected = [
            "requests shop/cart:80 connect-failed: 1 of 8",
            "requests shop/cart:80 upstream-closed: 1 of 8",
        ];
        assert_eq!(lines(&exceptions, now + seconds(60)), expected);
        assert_eq!(lines(&exceptions, now + seconds(90)), [""; 0]);
        assert!(exceptions.is_empty());
        // A thread that is late changes nothing.
        exceptions.record(failed, 1, now);
        assert_eq!(lines(&exceptions, now + seconds(90)), [""; 0]);
    }

    #[test]
    fn events_that_have_no_entry_are_counted_together_and_displace_none() {
        let now = Instant::now();
        let exceptions = Exceptions::new(now);
        exceptions.record(event(Kind::Requests, CART, "timeout"), 2, now);
        for number in 0..1000 {
            let address = format!("192.0.2.1:{number}");
            let hostile = event(Kind::Addresses, &address, "connect-failed");
            exceptions.record(hostile, 1, now);
            exceptions.record(event(Kind::Inbound, "", &address), 1, now);
        }
        let tables = exceptions.lock();
        for kind in [Kind::Addresses, Kind::Inbound] {
            let Table { entries, totals } = &tables[kind as usize];
            assert_eq!(entries.len(), MAX_ENTRIES + 1);
            assert!(totals.len() <= MAX_ENTRIES + 1, "{}", totals.len());
        }
        drop(tables);
        let lines = |after| lines(&exceptions, now + seconds(after));
        assert_eq!(lines(0)[0], "requests shop/cart:80 timeout: 1 of 2");
        let others = "other : 968 of 0";
        assert_eq!(
            lines(0)[1..3],
            [format!("addresses {others}"), format!("inbound {others}")]
        );
        // Those that still fail keep their entries, the others make room.
        let kept = event(Kind::Addresses, "192.0.2.1:0", "connect-failed");
        exceptions.record(kept, 1, now + seconds(59));
        let late = event(Kind::Addresses, "192.0.2.2:80", "connect-failed");
        exceptions.record(late, 1, now + seconds(60));
        let expected = [
            "addresses 192.0.2.1:0 connect-failed: 1 of 1",
            "addresses 192.0.2.2:80 connect-failed: 1 of 1",
        ];
        assert_eq!(lines(60), expected);
    }

    #[test]
    fn kinds_take_turns_with_their_most_frequent_exceptions() {
        let now = Instant::now();
        let exceptions = Exceptions::new(now);
        let reasons = [
            (Kind::Requests, "a", 1),
            (Kind::Requests, "b", 2),
            (Kind::Probe, "c", 1),
        ];
        for (kind, reason, count) in reasons {
            (0..count).for_each(|_| exceptions.record(event(kind, "x", reason), 1, now));
        }
        let expected = [
            "requests x b: 2 of 3",
            "probe x c: 1 of 1",
            "requests x a: 1 of 3",
        ];
        assert_eq!(lines(&exceptions, now), expected);
    }
}
