//! Earlier endpoints, which subscribers with former states get the differences to. Bounded in bytes:
//! what was replaced first goes first, and whoever has an older state gets the whole one.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use crate::index::endpoints::{Delta, Endpoints};
use crate::index::version::Version;

/// The memory for the earlier endpoints of all Services, and for encoded differences.
const MAX_BYTES: usize = 32 * 1024 * 1024;

/// The endpoints that others have replaced, and the differences to them.
#[derive(Debug, Default)]
pub struct History {
    items: HashMap<Id, Item>,
    /// With their sizes, the oldest one first.
    order: VecDeque<(Id, usize)>,
    bytes: usize,
}

/// What an item is found by. Versions are digests, so that equal endpoints are one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Id {
    Endpoints(Version),
    Difference(Version, Version),
}

#[derive(Debug)]
enum Item {
    Endpoints(Arc<Endpoints>),
    Difference(Bytes),
}

/// How a subscriber gets from its endpoints to others.
#[derive(Debug)]
pub enum Way {
    /// By an encoded difference.
    Encoded(Bytes),
    /// By a difference to these endpoints, which nobody has encoded.
    From(Arc<Endpoints>),
}

impl History {
    /// Adds endpoints that others have replaced.
    pub fn add(&mut self, endpoints: &Arc<Endpoints>) {
        let id = Id::Endpoints(endpoints.version);
        self.insert(id, Item::Endpoints(endpoints.clone()), endpoints.bytes());
    }

    /// The way between two versions, if the first one is known.
    pub fn way(&self, from: Version, to: Version) -> Option<Way> {
        match self.items.get(&Id::Difference(from, to)) {
            Some(Item::Difference(bytes)) => Some(Way::Encoded(bytes.clone())),
            _ => match self.items.get(&Id::Endpoints(from))? {
                Item::Endpoints(endpoints) => Some(Way::From(endpoints.clone())),
                Item::Difference(_) => None,
            },
        }
    }

    /// Adds the encoded difference between two versions.
    pub fn add_difference(&mut self, from: Version, to: Version, encoded: &Bytes) {
        let item = Item::Difference(encoded.clone());
        self.insert(Id::Difference(from, to), item, encoded.len());
    }

    /// An item that is too large for the whole store is not kept.
    fn insert(&mut self, id: Id, item: Item, bytes: usize) {
        if bytes > MAX_BYTES || self.items.contains_key(&id) {
            return;
        }
        let bytes = bytes + size_of::<(Id, Item)>();
        self.items.insert(id, item);
        self.order.push_back((id, bytes));
        self.bytes += bytes;
        while self.bytes > MAX_BYTES
            && let Some((oldest, bytes)) = self.order.pop_front()
        {
            self.items.remove(&oldest);
            self.bytes -= bytes;
        }
    }
}

/// The difference between two sets of endpoints, as `encode` encodes it, the first time only. `None`
/// if the first one is not known. The work is done without the lock.
pub fn difference(
    history: &std::sync::Mutex<History>,
    from: Version,
    to: &Endpoints,
    encode: impl FnOnce(&Delta) -> Bytes,
) -> Option<Bytes> {
    let locked = || {
        history
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    };
    let way = locked().way(from, to.version)?;
    Some(match way {
        Way::Encoded(bytes) => bytes,
        Way::From(before) => {
            let bytes = encode(&to.since(&before));
            locked().add_difference(from, to.version, &bytes);
            bytes
        }
    })
}
