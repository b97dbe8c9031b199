//! Earlier endpoints, which subscribers with former states get the differences to. Bounded in bytes:
//! what was replaced first goes first, and whoever has an older state gets the whole one.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use crate::index::endpoints::{Endpoint, Endpoints};
use crate::object::version::Version;

/// The memory for the earlier endpoints of all Services, and for encoded differences.
const MAX_BYTES: usize = 32 * 1024 * 1024;
/// The memory of an item without its content.
const ITEM_BYTES: usize = 256;

/// The endpoints that others have replaced, and the encoded differences between two of them. They
/// are found by their versions, which are digests.
#[derive(Debug, Default)]
pub struct History {
    /// Alone: what they are a part of may be much larger.
    endpoints: HashMap<Version, Arc<[Endpoint]>>,
    differences: HashMap<(Version, Version), Bytes>,
    /// All of them, the oldest one first, with their sizes.
    order: VecDeque<(Version, Option<Version>, usize)>,
    bytes: usize,
}

impl History {
    /// Adds endpoints that others have replaced.
    pub fn add(&mut self, endpoints: &Endpoints) {
        let (version, list) = (endpoints.version, endpoints.list());
        let bytes = list.iter().map(Endpoint::bytes).sum();
        if self.endpoints.insert(version, list).is_none() {
            self.added(version, None, bytes);
        }
    }

    /// Endpoints that others have replaced, if they are known.
    pub fn endpoints(&self, version: Version) -> Option<Arc<[Endpoint]>> {
        self.endpoints.get(&version).cloned()
    }

    /// The encoded difference between two versions, if it is known.
    pub fn difference(&self, from: Version, to: Version) -> Option<Bytes> {
        self.differences.get(&(from, to)).cloned()
    }

    /// Adds the encoded difference between two versions.
    pub fn add_difference(&mut self, from: Version, to: Version, encoded: Bytes) {
        let bytes = encoded.len();
        if self.differences.insert((from, to), encoded).is_none() {
            self.added(from, Some(to), bytes);
        }
    }

    fn added(&mut self, version: Version, to: Option<Version>, bytes: usize) {
        let bytes = bytes + ITEM_BYTES;
        self.order.push_back((version, to, bytes));
        self.bytes += bytes;
        while self.bytes > MAX_BYTES
            && let Some((oldest, to, bytes)) = self.order.pop_front()
        {
            match to {
                None => drop(self.endpoints.remove(&oldest)),
                Some(to) => drop(self.differences.remove(&(oldest, to))),
            }
            self.bytes -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoints(count: u32, port: u16) -> Endpoints {
        let endpoint = |number: u32| Endpoint {
            address: (std::net::Ipv4Addr::from_bits(number), port).into(),
            zone: "".into(),
            pod: None,
            identity: None,
            opaque: false,
            draining: false,
            node_unready: false,
            outside: false,
        };
        Endpoints::new((0..count).map(endpoint).collect())
    }

    #[test]
    fn oldest_ones_go_when_all_take_more_than_the_limit() {
        let mut history = History::default();
        let all: Vec<Endpoints> = (1..=100).map(|port| endpoints(10_000, port)).collect();
        for one in &all {
            history.add(one);
            history.add(one);
            let encoded = Bytes::from(vec![0; 1000]);
            history.add_difference(one.version, all[0].version, encoded);
            assert!(history.bytes <= MAX_BYTES);
        }
        let known = |one: &&Endpoints| history.endpoints(one.version).is_some();
        let first = all.iter().take_while(|one| !known(one)).count();
        assert!((50..100).contains(&first), "{first}");
        assert!(all[first..].iter().all(|one| known(&one)));
        let differences = history.differences.len();
        assert!(differences.abs_diff(history.endpoints.len()) <= 1);
        assert_eq!(history.order.len(), differences + history.endpoints.len());
    }
}
