//! The decoder: reads field blocks, and keeps the dynamic table of the peer's encoder. All input is
//! untrusted.

use std::fmt;
use std::sync::LazyLock;

use super::table::{STATIC_TABLE, Table};
use super::{DEFAULT_TABLE_SIZE, FIELD_OVERHEAD, Field, Name, huffman};

/// The largest accepted integer.
const MAX_INTEGER: u64 = 1 << 28;
/// The maximum number of size updates at the beginning of a block (RFC 7541, section 4.2).
const MAX_SIZE_UPDATES: usize = 2;
/// The most memory for Huffman-coded strings that the decoder keeps between two blocks, in bytes.
const MAX_SCRATCH: usize = 4096;

const TRUNCATED: DecodeError = DecodeError("field block ends within a field");

/// The static table, parsed: the entries and their sizes.
static STATIC_ENTRIES: LazyLock<Vec<(Entry, usize)>> = LazyLock::new(|| {
    let parse = |&(name, value): &(&str, &str)| {
        let name = Name::parse(name.as_bytes());
        let field = name.field(value.as_bytes(), false);
        let size = name.length + value.len() + FIELD_OVERHEAD;
        (Entry { name, field }, size)
    };
    STATIC_TABLE.iter().map(parse).collect()
});

/// The decoder of the field blocks of one connection.
pub struct Decoder {
    table: Table<Entry>,
    max_table_size: usize,
    /// The text of the last Huffman-coded string, and unused bytes.
    scratch: Vec<u8>,
}

/// An invalid field block. The connection ends with a COMPRESSION_ERROR.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeError(pub(super) &'static str);

/// An entry of a table. A later field can refer to the name.
struct Entry {
    name: Name,
    field: Field,
}

impl Decoder {
    /// A decoder for the SETTINGS_HEADER_TABLE_SIZE of this side.
    pub fn new(max_table_size: usize) -> Self {
        Self {
            table: Table::new(max_table_size.min(DEFAULT_TABLE_SIZE)),
            max_table_size,
            scratch: Vec::new(),
        }
    }

    /// Decodes a complete field block. Calls `each` with every field and its size (RFC 9113,
    /// section 6.5.2), in order, until `each` returns false. Later fields only change the dynamic
    /// table. After an error, the decoder is unusable.
    pub fn decode(
        &mut self,
        block: &[u8],
        mut each: impl FnMut(&Field, usize) -> bool,
    ) -> Result<(), DecodeError> {
        let mut input = Input(block);
        self.update_size(&mut input)?;
        let mut is_wanted = true;
        while let Some(first) = input.0.first() {
            match first {
                0x80.. => {
                    let (entry, size) = self.entry(input.integer(7)?)?;
                    is_wanted = is_wanted && each(&entry.field, *size);
                }
                0x40.. => {
                    let (entry, size) = self.literal(&mut input, 6, false)?;
                    is_wanted = is_wanted && each(&entry.field, size);
                    self.table.insert(entry, size);
                }
                0x20.. => return Err(DecodeError("size update after a field, or a third one")),
                _ if is_wanted => {
                    let is_sensitive = *first >= 0x10;
                    let (entry, size) = self.literal(&mut input, 4, is_sensitive)?;
                    is_wanted = each(&entry.field, size);
                }
                _ => self.skip_literal(&mut input)?,
            }
        }
        self.scratch.truncate(MAX_SCRATCH);
        self.scratch.shrink_to(MAX_SCRATCH);
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

    /// Decodes a literal field with `index_bits` bits of the name index in its first byte. The
    /// result has the size of the field.
    fn literal(
        &mut self,
        input: &mut Input<'_>,
        index_bits: u32,
        is_sensitive: bool,
    ) -> Result<(Entry, usize), DecodeError> {
        let name = match input.integer(index_bits)? {
            0 => Name::parse(input.text(&mut self.scratch)?),
            index => self.entry(index)?.0.name.clone(),
        };
        let value = input.text(&mut self.scratch)?;
        let field = name.field(value, is_sensitive);
        let size = name.length + value.len() + FIELD_OVERHEAD;
        Ok((Entry { name, field }, size))
    }

    /// Skips a literal field that is not inserted into the table.
    fn skip_literal(&self, input: &mut Input<'_>) -> Result<(), DecodeError> {
        match input.integer(4)? {
            0 => drop(input.string()?),
            index => drop(self.entry(index)?),
        }
        input.string().map(drop)
    }

    /// The entry with an index of the static and the dynamic table, and its size.
    #[inline]
    fn entry(&self, index: usize) -> Result<&(Entry, usize), DecodeError> {
        let entry = match index.checked_sub(1 + STATIC_TABLE.len()) {
            Some(position) => self.table.get(position),
            None => STATIC_ENTRIES.get(index.wrapping_sub(1)),
        };
        entry.ok_or(DecodeError("index outside of the tables"))
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
