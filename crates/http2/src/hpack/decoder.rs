//! The decoder: reads field blocks, and keeps the dynamic table of the peer's encoder. All input is
//! untrusted.

use std::fmt;
use std::sync::LazyLock;

use super::table::{STATIC_TABLE, Table};
use super::{DEFAULT_TABLE_SIZE, Field, Kind, huffman};

/// The largest accepted integer.
const MAX_INTEGER: u64 = 1 << 28;
/// The maximum number of size updates at the beginning of a block (RFC 7541, section 4.2).
const MAX_SIZE_UPDATES: usize = 2;
/// The most memory for Huffman-coded strings that the decoder keeps between two blocks, in bytes.
const MAX_SCRATCH: usize = 4096;

const TRUNCATED: DecodeError = DecodeError("field block ends within a field");

/// The static table, checked.
static STATIC_ENTRIES: LazyLock<Vec<(Entry, usize)>> = LazyLock::new(|| {
    let check = |&(name, value): &(&str, &str)| {
        let kind = Kind::of(name.as_bytes());
        Entry::new(kind, name.as_bytes(), value.as_bytes())
    };
    STATIC_TABLE.iter().map(check).collect()
});

/// The decoder of the field blocks of one connection.
pub struct Decoder {
    table: Table<Entry>,
    max_table_size: usize,
    /// The texts of the last Huffman-coded name and value, and unused bytes.
    scratch: [Vec<u8>; 2],
}

/// An invalid field block. The connection ends with a COMPRESSION_ERROR.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeError(pub(super) &'static str);

/// An entry of a table. A later field can refer to the name.
struct Entry {
    /// The name and the value.
    text: Box<[u8]>,
    name_length: usize,
    name: Kind,
    kind: Kind,
}

impl Entry {
    /// An entry, and its size.
    fn new(name_kind: Kind, name: &[u8], value: &[u8]) -> (Self, usize) {
        let entry = Self {
            text: [name, value].concat().into(),
            name_length: name.len(),
            name: name_kind,
            kind: name_kind.with(value),
        };
        let size = entry.field().size();
        (entry, size)
    }

    fn name(&self) -> &[u8] {
        &self.text[..self.name_length]
    }

    #[inline]
    fn field(&self) -> Field<'_> {
        let (name, value) = self.text.split_at(self.name_length);
        Field {
            name,
            value,
            kind: self.kind,
            is_sensitive: false,
        }
    }
}

impl Decoder {
    /// A decoder for the SETTINGS_HEADER_TABLE_SIZE of this side.
    pub fn new(max_table_size: usize) -> Self {
        Self {
            table: Table::new(max_table_size.min(DEFAULT_TABLE_SIZE)),
            max_table_size,
            scratch: Default::default(),
        }
    }

    /// Decodes a complete field block. Calls `each` with every field, in order, until `each` returns
    /// false. Later fields only change the dynamic table. After an error, the decoder is unusable.
    pub fn decode(
        &mut self,
        block: &[u8],
        mut each: impl FnMut(&Field<'_>) -> bool,
    ) -> Result<(), DecodeError> {
        let mut input = Input(block);
        self.update_size(&mut input)?;
        let mut is_wanted = true;
        while let Some(first) = input.0.first() {
            match first {
                0x80.. => {
                    let entry = entry(&self.table, input.integer(7)?)?;
                    is_wanted = is_wanted && each(&entry.field());
                }
                0x40.. => {
                    let Literal { name, value, kind } =
                        Literal::read(&self.table, &mut input, 6, &mut self.scratch)?;
                    let (entry, size) = Entry::new(kind, name, value);
                    is_wanted = is_wanted && each(&entry.field());
                    self.table.insert(entry, size);
                }
                0x20.. => return Err(DecodeError("size update after a field, or a third one")),
                _ if is_wanted => {
                    let is_sensitive = *first >= 0x10;
                    let Literal { name, value, kind } =
                        Literal::read(&self.table, &mut input, 4, &mut self.scratch)?;
                    is_wanted = each(&Field {
                        name,
                        value,
                        kind: kind.with(value),
                        is_sensitive,
                    });
                }
                _ => self.skip_literal(&mut input)?,
            }
        }
        for scratch in &mut self.scratch {
            scratch.truncate(MAX_SCRATCH);
            scratch.shrink_to(MAX_SCRATCH);
        }
        Ok(())
    }

    /// Processes the size updates at the beginning of a block.
    fn update_size(&mut self, input: &mut Input<'_>) -> Result<(), DecodeError> {
        for _ in 0..MAX_SIZE_UPDATES {
            if let Some(0x20..0x40) = input.0.first() {
                let size = input.integer(5)?;
                if size > self.max_table_size {
                    return Err(DecodeError("size update above the limit"));
                }
                self.table.set_capacity(size);
            }
        }
        Ok(())
    }

    /// Skips a literal field that is not inserted into the table.
    fn skip_literal(&self, input: &mut Input<'_>) -> Result<(), DecodeError> {
        match input.integer(4)? {
            0 => drop(input.string()?),
            index => drop(entry(&self.table, index)?),
        }
        input.string().map(drop)
    }
}

/// The entry with an index of the static and the dynamic table.
#[inline]
fn entry(table: &Table<Entry>, index: usize) -> Result<&Entry, DecodeError> {
    let found = match index.checked_sub(1 + STATIC_TABLE.len()) {
        Some(position) => table.get(position),
        None => STATIC_ENTRIES.get(index.wrapping_sub(1)),
    };
    let (entry, _) = found.ok_or(DecodeError("index outside of the tables"))?;
    Ok(entry)
}

/// A field whose value stands in the block.
struct Literal<'a> {
    name: &'a [u8],
    value: &'a [u8],
    /// The kind of the name.
    kind: Kind,
}

impl<'a> Literal<'a> {
    /// Reads a field with `index_bits` bits of the name's index in its first byte.
    fn read<'block: 'a>(
        table: &'a Table<Entry>,
        input: &mut Input<'block>,
        index_bits: u32,
        [name_scratch, value_scratch]: &'a mut [Vec<u8>; 2],
    ) -> Result<Self, DecodeError> {
        let (name, kind) = match input.integer(index_bits)? {
            0 => {
                let name = input.text(name_scratch)?;
                (name, Kind::of(name))
            }
            index => {
                let entry = entry(table, index)?;
                (entry.name(), entry.name)
            }
        };
        let value = input.text(value_scratch)?;
        Ok(Self { name, value, kind })
    }
}

/// The rest of a block.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// The text of a string literal. Decodes a Huffman-coded text into `scratch`.
    fn text<'b>(&mut self, scratch: &'b mut Vec<u8>) -> Result<&'b [u8], DecodeError>
    where
        'a: 'b,
    {
        match self.string()? {
            (bytes, true) => huffman::decode(bytes, scratch),
            (bytes, false) => Ok(bytes),
        }
    }

    /// The bytes of a string literal, and whether they are Huffman-coded (RFC 7541, section 5.2).
    fn string(&mut self) -> Result<(&'a [u8], bool), DecodeError> {
        let is_huffman = *self.0.first().ok_or(TRUNCATED)? >= 0x80;
        let length = self.integer(7)?;
        let (bytes, rest) = self.0.split_at_checked(length).ok_or(TRUNCATED)?;
        self.0 = rest;
        Ok((bytes, is_huffman))
    }

    /// An integer with `bits` bits in its first byte (RFC 7541, section 5.1).
    #[inline]
    fn integer(&mut self, bits: u32) -> Result<usize, DecodeError> {
        let mask = (1 << bits) - 1;
        let mut value = u64::from(self.byte()?) & mask;
        if value < mask {
            return Ok(value as usize);
        }
        for shift in [0, 7, 14, 21, 28] {
            let byte = self.byte()?;
            value += u64::from(byte & 0x7f) << shift;
            if value > MAX_INTEGER {
                break;
            }
            if byte < 0x80 {
                return Ok(value as usize);
            }
        }
        Err(DecodeError("integer above the limit"))
    }

    fn byte(&mut self) -> Result<u8, DecodeError> {
        let (first, rest) = self.0.split_first().ok_or(TRUNCATED)?;
        self.0 = rest;
        Ok(*first)
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for DecodeError {}
