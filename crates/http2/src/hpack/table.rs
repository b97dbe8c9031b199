//! The static table of RFC 7541, appendix A, and a dynamic table, which the decoder and the encoder
//! have in common.

use std::collections::VecDeque;

/// The names and values of the static table. The index of the first entry is 1.
#[rustfmt::skip]
pub(super) static STATIC_TABLE: [(&str, &str); 61] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    (":status", "204"),
    (":status", "206"),
    (":status", "304"),
    (":status", "400"),
    (":status", "404"),
    (":status", "500"),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    ("accept-language", ""),
    ("accept-ranges", ""),
    ("accept", ""),
    ("access-control-allow-origin", ""),
    ("age", ""),
    ("allow", ""),
    ("authorization", ""),
    ("cache-control", ""),
    ("content-disposition", ""),
    ("content-encoding", ""),
    ("content-language", ""),
    ("content-length", ""),
    ("content-location", ""),
    ("content-range", ""),
    ("content-type", ""),
    ("cookie", ""),
    ("date", ""),
    ("etag", ""),
    ("expect", ""),
    ("expires", ""),
    ("from", ""),
    ("host", ""),
    ("if-match", ""),
    ("if-modified-since", ""),
    ("if-none-match", ""),
    ("if-range", ""),
    ("if-unmodified-since", ""),
    ("last-modified", ""),
    ("link", ""),
    ("location", ""),
    ("max-forwards", ""),
    ("proxy-authenticate", ""),
    ("proxy-authorization", ""),
    ("range", ""),
    ("referer", ""),
    ("refresh", ""),
    ("retry-after", ""),
    ("server", ""),
    ("set-cookie", ""),
    ("strict-transport-security", ""),
    ("transfer-encoding", ""),
    ("user-agent", ""),
    ("vary", ""),
    ("via", ""),
    ("www-authenticate", ""),
];

/// A dynamic table (RFC 7541, section 2.3.2): the newest entries whose sizes have a sum of at most
/// the capacity.
pub(super) struct Table<T> {
    /// The entries and their sizes, newest first.
    entries: VecDeque<(T, usize)>,
    /// The sum of the sizes.
    size: usize,
    capacity: usize,
}

impl<T> Table<T> {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            entries: VecDeque::new(),
            size: 0,
            capacity,
        }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// The number of entries.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The entry at a position, and its size. Position 0 is the newest.
    pub(super) fn get(&self, position: usize) -> Option<&(T, usize)> {
        self.entries.get(position)
    }

    pub(super) fn set_capacity(&mut self, capacity: usize) {
        self.capacity = capacity;
        self.evict(capacity);
    }

    /// Inserts an entry after the eviction of others. An entry above the capacity empties the table
    /// (RFC 7541, section 4.4).
    pub(super) fn insert(&mut self, entry: T, size: usize) {
        self.evict(self.capacity.saturating_sub(size));
        if size <= self.capacity {
            self.entries.push_front((entry, size));
            self.size += size;
        }
    }

    /// Evicts the oldest entries until the sum of the sizes is at most `size`.
    fn evict(&mut self, size: usize) {
        while self.size > size
            && let Some((_, evicted)) = self.entries.pop_back()
        {
            self.size -= evicted;
        }
    }
}
