//! The latest exchanges and opaque connections of the proxy: what the admin server tells of them
//! (`/exchanges`). Those that failed do not give way to those that did not. Bounded: 256 of each.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use diy_mesh_model::exchange::{self, ExchangeId};

use crate::observe::ended::{Ended, Holder};

/// The entries that failed, and the others.
const MAX_ENTRIES: usize = 256;

/// The latest entries, shared by all threads.
pub struct Recent {
    /// The number of the next exchange that begins here.
    next: AtomicU64,
    entries: Mutex<Entries>,
}

/// With their numbers, in the order of their ends.
type Ring = VecDeque<(u64, Arc<Ended>)>;

#[derive(Default)]
struct Entries {
    /// The number of entries so far.
    ended: u64,
    failed: Ring,
    others: Ring,
}

impl Entries {
    /// Adds an entry. Returns the one that gives way to it.
    fn add(&mut self, entry: Arc<Ended>) -> Option<(u64, Arc<Ended>)> {
        self.ended += 1;
        let is_failure = entry.is_failure;
        let ring = if is_failure {
            &mut self.failed
        } else {
            &mut self.others
        };
        let mut evicted = None;
        if ring.len() == MAX_ENTRIES {
            let oldest = if is_failure { oldest_of_most(ring) } else { 0 };
            evicted = ring.remove(oldest);
        }
        ring.push_back((self.ended, entry));
        evicted
    }
}

/// Which entries are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Query {
    /// The entries of one exchange.
    Id(ExchangeId),
    /// Those that ended after so many others.
    After(u64),
}

impl Query {
    /// The query of a URL: `id=ID` or `after=NUMBER`; all, if it is empty.
    pub fn parse(text: &str) -> Result<Self, String> {
        let expected = "expected ?id=ID or ?after=NUMBER";
        match text.split_once('=') {
            None if text.is_empty() => Ok(Self::After(0)),
            Some(("id", id)) => id.parse().map(Self::Id).map_err(|error| format!("{error}")),
            Some(("after", number)) => number.parse().map(Self::After).map_err(|_| expected.into()),
            _ => Err(expected.into()),
        }
    }
}

impl Default for Recent {
    /// No entries. Numbers begin anywhere, so that they differ from the numbers of an earlier proxy of
    /// the pod.
    fn default() -> Self {
        Self {
            next: AtomicU64::new(fastrand::u64(..)),
            entries: Mutex::default(),
        }
    }
}

impl Recent {
    /// The number of an exchange that begins now.
    pub fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds an entry.
    pub fn add(&self, entry: Arc<Ended>) {
        let evicted = self.lock().add(entry);
        // Without the lock, which all workers take.
        drop(evicted);
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The entries that are asked for.
    pub fn query(&self, query: Query) -> exchange::Recent {
        let is_asked = |(number, entry): &&(u64, Arc<Ended>)| match query {
            Query::Id(id) => entry.id == id,
            Query::After(after) => *number > after,
        };
        // The workers wait for the lock, but not for the texts.
        let (ended, mut found) = {
            let entries = self.lock();
            let all = entries.failed.iter().chain(&entries.others);
            (
                entries.ended,
                all.filter(is_asked).cloned().collect::<Vec<_>>(),
            )
        };
        found.sort_by_key(|(number, _)| *number);
        exchange::Recent {
            ended,
            exchanges: found.iter().map(|(_, entry)| entry.exchange()).collect(),
        }
    }
}

/// The oldest failure of those whose callers have most of them: a workload that is denied again and
/// again does not displace what others want to know.
fn oldest_of_most(failed: &Ring) -> usize {
    // Each holder with its oldest entry and the number of all.
    let mut held: Vec<(Holder<'_>, usize, usize)> = Vec::new();
    for (at, (_, entry)) in failed.iter().enumerate() {
        let holder = entry.holder();
        match held.iter_mut().find(|(other, ..)| *other == holder) {
            Some((.., count)) => *count += 1,
            None => held.push((holder, at, 1)),
        }
    }
    let most = held.iter().max_by_key(|(.., count)| *count);
    most.map_or(0, |(_, oldest, _)| *oldest)
}

#[cfg(test)]
pub(crate) mod testing {
    /// A message without the identifiers of exchanges, which differ from run to run.
    pub fn without_ids(text: &str) -> String {
        let lines = text.split_inclusive('\n');
        lines
            .filter(|line| !line.starts_with("x-mesh-exchange: "))
            .collect()
    }
}

#[cfg(test)]
mod tests;
