//! The encoder: writes field blocks, and keeps a dynamic table in step with the peer's decoder.
//! Texts are copied: Huffman coding would cost a proxy more time than the saved bytes are worth.

use std::mem;
use std::ops::Range;

use super::table::{STATIC_TABLE, Table};
use super::{DEFAULT_TABLE_SIZE, FIELD_OVERHEAD};

/// Names whose values rarely repeat: in the dynamic table, their fields would only evict others.
const RARELY_REPEATED: [&[u8]; 10] = [
    b"age",
    b"content-length",
    b"date",
    b"etag",
    b"if-modified-since",
    b"if-none-match",
    b"location",
    b"set-cookie",
    b"traceparent",
    b"x-request-id",
];
/// The number of remembered fields that are not in the table.
const MAX_SEEN: usize = 64;

/// The first byte of a representation without its integer, and the bits of the integer in the byte.
type Representation = (u8, u32);
const INDEXED: Representation = (0x80, 7);
const INSERTED: Representation = (0x40, 6);
const SIZE_UPDATE: Representation = (0x20, 5);
const NEVER_INDEXED: Representation = (0x10, 4);
const NOT_INDEXED: Representation = (0x00, 4);
/// The length of a string without Huffman coding.
const LENGTH: Representation = (0x00, 7);

/// The encoder of the field blocks of one connection.
pub struct Encoder {
    table: Table<Entry>,
    /// The hashes of the entries in the table, newest first.
    hashes: Vec<u32>,
    /// The hashes of the last fields that were seen once, in a ring.
    seen: [u32; MAX_SEEN],
    /// The position of the oldest hash in `seen`.
    oldest: usize,
    /// The table size for the next block.
    next_size: usize,
    /// The smallest table size since the last block.
    min_size: usize,
}

/// A field in the dynamic table.
struct Entry {
    /// The name and the value.
    text: Box<[u8]>,
    name_length: usize,
}

/// A field as text.
#[derive(Clone, Copy)]
struct Text<'a> {
    name: &'a [u8],
    value: &'a [u8],
}

impl Encoder {
    /// An encoder for a peer that has not sent any settings.
    pub fn new() -> Self {
        Self {
            table: Table::new(DEFAULT_TABLE_SIZE),
            hashes: Vec::new(),
            seen: [0; MAX_SEEN],
            oldest: 0,
            next_size: DEFAULT_TABLE_SIZE,
            min_size: DEFAULT_TABLE_SIZE,
        }
    }

    /// Sets the SETTINGS_HEADER_TABLE_SIZE of the peer. The encoder uses at most 4096 bytes of it,
    /// from the next block on.
    pub fn set_max_table_size(&mut self, size: usize) {
        self.next_size = size.min(DEFAULT_TABLE_SIZE);
        self.min_size = self.min_size.min(self.next_size);
    }

    /// Begins a block: writes the size updates that RFC 7541, section 4.2, requires.
    pub fn begin(&mut self, block: &mut Vec<u8>) {
        let min_size = mem::replace(&mut self.min_size, self.next_size);
        for size in [min_size, self.next_size] {
            if size != self.table.capacity() {
                integer(SIZE_UPDATE, size, block);
                self.table.set_capacity(size);
            }
        }
        self.hashes.truncate(self.table.len());
    }

    /// Writes a field with a valid name and value. A sensitive value is never indexed.
    #[inline]
    pub fn field(&mut self, name: &[u8], value: &[u8], is_sensitive: bool, block: &mut Vec<u8>) {
        let field = Text { name, value };
        match name {
            b":method" => self.pseudo(2..4, field, block),
            b":scheme" => self.pseudo(6..8, field, block),
            b":authority" => self.pseudo(1..2, field, block),
            b":protocol" => self.pseudo(0..0, field, block),
            b":status" => self.pseudo(8..15, field, block),
            // Its value rarely repeats: it is not inserted.
            b":path" => match static_match(4..6, value) {
                Some(index) => integer(INDEXED, index, block),
                None => literal(NOT_INDEXED, 4, field, block),
            },
            _ if is_sensitive => {
                literal(NEVER_INDEXED, static_indexes(name).start, field, block);
            }
            _ => self.header(field, block),
        }
    }

    /// Writes a header or trailer field.
    fn header(&mut self, field: Text<'_>, block: &mut Vec<u8>) {
        // Most fields repeat: the dynamic table comes first.
        let hash = field.hash();
        if let Some(index) = self.dynamic_match(hash, field) {
            return integer(INDEXED, index, block);
        }
        let indexes = static_indexes(field.name);
        if let Some(index) = static_match(indexes.clone(), field.value) {
            integer(INDEXED, index, block);
        } else if RARELY_REPEATED.contains(&field.name) {
            literal(NOT_INDEXED, indexes.start, field, block);
        } else {
            self.new_field(hash, indexes.start, field, block);
        }
    }

    /// Writes a pseudo-field. `indexes` are the entries with its name in the static table, or 0..0.
    fn pseudo(&mut self, indexes: Range<usize>, field: Text<'_>, block: &mut Vec<u8>) {
        let name_index = indexes.start;
        if let Some(index) = static_match(indexes, field.value) {
            return integer(INDEXED, index, block);
        }
        let hash = field.hash();
        match self.dynamic_match(hash, field) {
            Some(index) => integer(INDEXED, index, block),
            None => self.new_field(hash, name_index, field, block),
        }
    }

    /// The index of a field in the dynamic table. The hash only selects the entries to compare.
    fn dynamic_match(&self, hash: u32, field: Text<'_>) -> Option<usize> {
        let text = (field.name, field.value);
        let is_equal = |(entry, _): &(Entry, usize)| entry.text.split_at(entry.name_length) == text;
        for (position, known) in self.hashes.iter().enumerate() {
            if *known == hash && self.table.get(position).is_some_and(is_equal) {
                return Some(STATIC_TABLE.len() + 1 + position);
            }
        }
        None
    }

    /// Writes a field that the tables do not contain. Inserts the field if it was seen before: the
    /// unique fields of one client thus do not evict the fields of others.
    fn new_field(&mut self, hash: u32, name_index: usize, field: Text<'_>, block: &mut Vec<u8>) {
        let size = field.name.len() + field.value.len() + FIELD_OVERHEAD;
        if size > self.table.capacity() / 4 || !self.was_seen(hash) {
            return literal(NOT_INDEXED, name_index, field, block);
        }
        literal(INSERTED, name_index, field, block);
        let entry = Entry {
            text: [field.name, field.value].concat().into(),
            name_length: field.name.len(),
        };
        self.table.insert(entry, size);
        self.hashes.insert(0, hash);
        self.hashes.truncate(self.table.len());
    }

    /// Whether a field was seen before. Remembers the field otherwise.
    fn was_seen(&mut self, hash: u32) -> bool {
        let was_seen = self.seen.contains(&hash);
        if !was_seen {
            self.seen[self.oldest] = hash;
            self.oldest = (self.oldest + 1) % MAX_SEEN;
        }
        was_seen
    }
}

impl Default for Encoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Text<'_> {
    fn hash(self) -> u32 {
        hash(hash(0, self.name), self.value) as u32
    }
}

/// Writes a literal field. `name_index` is an entry with its name in the static table, or 0.
fn literal(form: Representation, name_index: usize, field: Text<'_>, block: &mut Vec<u8>) {
    integer(form, name_index, block);
    if name_index == 0 {
        string(field.name, block);
    }
    string(field.value, block);
}

fn string(text: &[u8], block: &mut Vec<u8>) {
    integer(LENGTH, text.len(), block);
    block.extend_from_slice(text);
}

/// Writes a representation and its integer (RFC 7541, section 5.1).
#[inline]
fn integer((first, bits): Representation, value: usize, block: &mut Vec<u8>) {
    let max = (1 << bits) - 1;
    if value < max {
        return block.push(first | value as u8);
    }
    block.push(first | max as u8);
    let mut rest = value - max;
    while rest >= 0x80 {
        block.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    block.push(rest as u8);
}

/// The index of the entry with a value among entries of the static table.
fn static_match(mut indexes: Range<usize>, value: &[u8]) -> Option<usize> {
    indexes.find(|index| STATIC_TABLE[index - 1].1.as_bytes() == value)
}

/// The indexes of the entries with a header name in the static table, or 0..0.
fn static_indexes(name: &[u8]) -> Range<usize> {
    let mut slot = hash(0, name) as usize % SLOTS;
    while let index @ 1.. = usize::from(STATIC_NAMES[slot]) {
        if STATIC_TABLE[index - 1].0.as_bytes() == name {
            return index..index + 1;
        }
        slot = (slot + 1) % SLOTS;
    }
    0..0
}

/// The position of the first header name in the static table, after the pseudo-fields.
const FIRST_HEADER: usize = 14;
/// The number of slots, above twice the number of names.
const SLOTS: usize = 128;

/// A hash table of the header names in the static table: the index of a name, or 0 for a free slot.
/// A name is in the slot of its hash or in the next free slot.
static STATIC_NAMES: [u8; SLOTS] = {
    let mut slots = [0; SLOTS];
    let mut position = FIRST_HEADER;
    while position < STATIC_TABLE.len() {
        let mut slot = hash(0, STATIC_TABLE[position].0.as_bytes()) as usize % SLOTS;
        while slots[slot] != 0 {
            slot = (slot + 1) % SLOTS;
        }
        position += 1;
        slots[slot] = position as u8;
    }
    slots
};

/// A fast hash of bytes after the hash of earlier ones. Peers can choose bytes with equal hashes.
pub(super) const fn hash(earlier: u64, bytes: &[u8]) -> u64 {
    let mut hash = earlier ^ bytes.len() as u64;
    let mut rest = bytes;
    while let Some((chunk, after)) = rest.split_first_chunk() {
        hash = mix(hash ^ u64::from_le_bytes(*chunk));
        rest = after;
    }
    if let Some(chunk) = bytes.last_chunk() {
        return mix(hash ^ u64::from_le_bytes(*chunk));
    }
    let mut last = 0;
    while let Some((byte, after)) = rest.split_first() {
        last = last << 8 | *byte as u64;
        rest = after;
    }
    mix(hash ^ last)
}

/// A multiplication whose upper half is added to its lower half.
const fn mix(value: u64) -> u64 {
    let product = value as u128 * 0x9e37_79b9_7f4a_7c15;
    product as u64 ^ (product >> 64) as u64
}
