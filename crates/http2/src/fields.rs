//! The fields of a message, in one buffer.

use http::header::{HeaderMap, HeaderName, HeaderValue};

/// Memory for the fields of most messages, in bytes and in fields.
const TEXT: usize = 512;
const FIELDS: usize = 16;

/// The fields of a message in their order, with names in lower case.
#[derive(Clone, Default)]
pub struct Fields {
    /// Names and values, also removed ones, and the texts of pseudo-fields.
    text: Vec<u8>,
    list: Vec<Entry>,
}

#[derive(Clone, Copy)]
struct Entry {
    name: Text,
    value: Text,
    is_sensitive: bool,
}

/// A part of the buffer.
#[derive(Clone, Copy)]
pub(crate) struct Text {
    start: u32,
    length: u32,
}

impl Fields {
    /// The number of fields.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there is no field.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The size of all fields (RFC 9113, section 6.5.2).
    pub fn size(&self) -> usize {
        let size = |entry: &Entry| (entry.name.length + entry.value.length) as usize + 32;
        self.list.iter().map(size).sum()
    }

    /// The names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.list
            .iter()
            .map(|entry| (self.text(entry.name), self.text(entry.value)))
    }

    /// The value of the first field with this name, which is in lower case.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.get_all(name).next()
    }

    /// The values of all fields with this name, which is in lower case.
    pub fn get_all<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        let is_named = move |entry: &&Entry| self.text(entry.name) == name.as_bytes();
        let named = self.list.iter().filter(is_named);
        named.map(|entry| self.text(entry.value))
    }

    /// Appends a field. The name may have upper case.
    pub fn push(&mut self, name: &HeaderName, value: &HeaderValue) {
        let (name, is_sensitive) = (name.as_str().as_bytes(), value.is_sensitive());
        self.append(name, value.as_bytes(), is_sensitive);
    }

    /// Appends a field with a valid name in lower case and a valid value.
    pub(crate) fn append(&mut self, name: &[u8], value: &[u8], is_sensitive: bool) {
        let entry = Entry {
            name: self.keep(name),
            value: self.keep(value),
            is_sensitive,
        };
        if self.list.is_empty() {
            self.list.reserve(FIELDS);
        }
        self.list.push(entry);
    }

    /// Gives the first field with this name, which is in lower case, another value.
    pub fn replace(&mut self, name: &str, value: &HeaderValue) {
        let is_named = |entry: &Entry| self.text(entry.name) == name.as_bytes();
        if let Some(at) = self.list.iter().position(is_named) {
            self.list[at].value = self.keep(value.as_bytes());
        }
    }

    /// Removes the fields with other names than these.
    pub fn retain(&mut self, mut is_kept: impl FnMut(&[u8]) -> bool) {
        let Self { text, list } = self;
        list.retain(|entry| is_kept(entry.name.of(text)));
    }

    /// Copies a text into the buffer.
    pub(crate) fn keep(&mut self, text: &[u8]) -> Text {
        if self.text.is_empty() {
            self.text.reserve(TEXT);
        }
        let start = self.text.len() as u32;
        self.text.extend_from_slice(text);
        let length = text.len() as u32;
        Text { start, length }
    }

    pub(crate) fn text(&self, text: Text) -> &[u8] {
        text.of(&self.text)
    }

    /// The fields for an encoder: name, value, and whether the value is sensitive.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&[u8], &[u8], bool)> {
        let parts = |entry: &Entry| {
            let (name, value) = (self.text(entry.name), self.text(entry.value));
            (name, value, entry.is_sensitive)
        };
        self.list.iter().map(parts)
    }
}

impl Text {
    fn of(self, text: &[u8]) -> &[u8] {
        let (start, length) = (self.start as usize, self.length as usize);
        &text[start..start + length]
    }
}

impl From<&HeaderMap> for Fields {
    fn from(map: &HeaderMap) -> Self {
        let mut fields = Self::default();
        for (name, value) in map {
            fields.push(name, value);
        }
        fields
    }
}

impl From<&Fields> for HeaderMap {
    fn from(fields: &Fields) -> Self {
        let mut map = Self::new();
        for (name, value, is_sensitive) in fields.entries() {
            if let (Ok(name), Ok(mut value)) =
                (HeaderName::from_bytes(name), HeaderValue::from_bytes(value))
            {
                value.set_sensitive(is_sensitive);
                map.append(name, value);
            }
        }
        map
    }
}

impl PartialEq for Fields {
    fn eq(&self, other: &Self) -> bool {
        self.entries().eq(other.entries())
    }
}

impl std::fmt::Debug for Fields {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = |(name, value, is_sensitive): (&[u8], &[u8], bool)| {
            let shown = String::from_utf8_lossy(value).into_owned();
            let value = if is_sensitive {
                "sensitive".to_owned()
            } else {
                shown
            };
            (String::from_utf8_lossy(name).into_owned(), value)
        };
        f.debug_map().entries(self.entries().map(shown)).finish()
    }
}
