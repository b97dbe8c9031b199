//! The fields of a message, in one buffer.

use http::header::{HeaderMap, HeaderName, HeaderValue};

use crate::hpack::FIELD_OVERHEAD;

/// Memory for most messages, and for what is added to a copy.
const ROOM: usize = 512;
const ADDED: usize = 128;

/// The length of the start of an entry: flags, and the lengths of name and value.
const START: usize = 7;
/// The value is sensitive.
const SENSITIVE: u8 = 1;
/// A field that was removed, or the text of a pseudo-field.
const HIDDEN: u8 = 2;

/// The fields of a message in their order, with names in lower case.
#[derive(Default)]
pub struct Fields {
    /// Entries: the start, the name and the value.
    entries: Vec<u8>,
    count: usize,
}

/// The text of a pseudo-field, in the entries.
#[derive(Clone, Copy)]
pub(crate) struct Text {
    start: u32,
    length: u32,
}

/// One entry, with its position.
struct Entry<'a> {
    at: usize,
    flags: u8,
    name: &'a [u8],
    value: &'a [u8],
}

/// The entries in their order.
struct Entries<'a> {
    all: &'a [u8],
    at: usize,
}

impl Fields {
    /// The number of fields.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is no field.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The size of all fields (RFC 9113, section 6.5.2).
    pub fn size(&self) -> usize {
        let size = |entry: Entry<'_>| entry.name.len() + entry.value.len() + FIELD_OVERHEAD;
        self.visible().map(size).sum()
    }

    /// The memory that is held, also for removed fields and for pseudo-fields.
    pub fn memory(&self) -> usize {
        self.entries.capacity()
    }

    /// The names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.visible().map(|entry| (entry.name, entry.value))
    }

    /// The value of the first field with this name, which is in lower case.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.get_all(name).next()
    }

    /// The values of all fields with this name, which is in lower case.
    pub fn get_all<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        let named = self
            .visible()
            .filter(move |entry| entry.name == name.as_bytes());
        named.map(|entry| entry.value)
    }

    /// Appends a field.
    pub fn push(&mut self, name: &HeaderName, value: &HeaderValue) {
        let (name, is_sensitive) = (name.as_str().as_bytes(), value.is_sensitive());
        self.append(name, value.as_bytes(), is_sensitive);
    }

    /// Appends a field with a valid name in lower case and a valid value.
    pub(crate) fn append(&mut self, name: &[u8], value: &[u8], is_sensitive: bool) {
        self.write(u8::from(is_sensitive) * SENSITIVE, name, value);
        self.count += 1;
    }

    /// Replaces the fields with this name, which is in lower case, by one at the last place.
    pub fn replace(&mut self, name: &str, value: &HeaderValue) {
        let before = self.count;
        self.retain(|other| other != name.as_bytes());
        if self.count < before {
            self.append(name.as_bytes(), value.as_bytes(), value.is_sensitive());
        }
    }

    /// Keeps the fields whose names pass, and removes the others.
    pub fn retain(&mut self, mut is_kept: impl FnMut(&[u8]) -> bool) {
        let mut at = 0;
        while let Some(entry) = Entry::read(&self.entries, at) {
            let next = entry.end();
            if entry.flags & HIDDEN == 0 && !is_kept(entry.name) {
                self.entries[at] |= HIDDEN;
                self.count -= 1;
            }
            at = next;
        }
    }

    /// Keeps the text of a pseudo-field.
    pub(crate) fn keep(&mut self, text: &[u8]) -> Text {
        self.write(HIDDEN, b"", text);
        let start = (self.entries.len() - text.len()) as u32;
        let length = text.len() as u32;
        Text { start, length }
    }

    pub(crate) fn text(&self, text: Text) -> &[u8] {
        let (start, length) = (text.start as usize, text.length as usize);
        &self.entries[start..start + length]
    }

    /// The fields for an encoder: name, value, and whether the value is sensitive.
    pub(crate) fn with_sensitivity(&self) -> impl Iterator<Item = (&[u8], &[u8], bool)> {
        self.visible()
            .map(|entry| (entry.name, entry.value, entry.flags & SENSITIVE != 0))
    }

    #[inline]
    fn visible(&self) -> impl Iterator<Item = Entry<'_>> {
        let entries = Entries {
            all: &self.entries,
            at: 0,
        };
        entries.filter(|entry| entry.flags & HIDDEN == 0)
    }

    /// Appends an entry.
    fn write(&mut self, flags: u8, name: &[u8], value: &[u8]) {
        if self.entries.is_empty() {
            self.entries.reserve(ROOM);
        }
        let mut start = [flags; START];
        start[1..3].copy_from_slice(&(name.len() as u16).to_le_bytes());
        start[3..].copy_from_slice(&(value.len() as u32).to_le_bytes());
        self.entries.extend_from_slice(&start);
        self.entries.extend_from_slice(name);
        self.entries.extend_from_slice(value);
    }
}

impl<'a> Entry<'a> {
    #[inline]
    fn read(entries: &'a [u8], at: usize) -> Option<Self> {
        let &[flags, a, b, c, d, e, f] = entries.get(at..)?.first_chunk::<START>()?;
        let (name, value) = (
            at + START,
            at + START + usize::from(u16::from_le_bytes([a, b])),
        );
        let end = value + u32::from_le_bytes([c, d, e, f]) as usize;
        Some(Self {
            at,
            flags,
            name: &entries[name..value],
            value: &entries[value..end],
        })
    }

    fn end(&self) -> usize {
        self.at + START + self.name.len() + self.value.len()
    }
}

impl<'a> Iterator for Entries<'a> {
    type Item = Entry<'a>;

    #[inline]
    fn next(&mut self) -> Option<Entry<'a>> {
        let entry = Entry::read(self.all, self.at)?;
        self.at = entry.end();
        Some(entry)
    }
}

/// A copy has room for some further fields.
impl Clone for Fields {
    fn clone(&self) -> Self {
        let mut entries = Vec::with_capacity(self.entries.len() + ADDED);
        entries.extend_from_slice(&self.entries);
        Self {
            entries,
            count: self.count,
        }
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

/// A map of the fields, or of the first ones if they are more than a map can have.
impl From<&Fields> for HeaderMap {
    fn from(fields: &Fields) -> Self {
        let mut map = Self::new();
        for (name, value, is_sensitive) in fields.with_sensitivity() {
            if let (Ok(name), Ok(mut value)) =
                (HeaderName::from_bytes(name), HeaderValue::from_bytes(value))
            {
                value.set_sensitive(is_sensitive);
                if map.try_append(name, value).is_err() {
                    break;
                }
            }
        }
        map
    }
}

impl PartialEq for Fields {
    fn eq(&self, other: &Self) -> bool {
        self.with_sensitivity().eq(other.with_sensitivity())
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
        f.debug_map()
            .entries(self.with_sensitivity().map(shown))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(pairs: &[(&'static str, &'static str)]) -> Fields {
        let mut fields = Fields::default();
        for (name, value) in pairs {
            fields.append(name.as_bytes(), value.as_bytes(), false);
        }
        fields
    }

    /// The next hop may take the first value or the last: both are the new one.
    #[test]
    fn replaced_field_has_only_the_new_value() {
        let mut changed = fields(&[("grpc-timeout", "1S"), ("a", "1"), ("grpc-timeout", "9H")]);
        changed.replace("grpc-timeout", &HeaderValue::from_static("500m"));
        changed.replace("missing", &HeaderValue::from_static("x"));
        assert_eq!(changed, fields(&[("a", "1"), ("grpc-timeout", "500m")]));
        assert_eq!((changed.len(), changed.size()), (2, 2 * 32 + 2 + 16));
    }

    #[test]
    fn removed_and_replaced_fields_leave_the_others() {
        let mut changed = fields(&[("a", "1"), ("b", "2"), ("a", "3"), ("c", "")]);
        let path = changed.keep(b"/path");
        changed.retain(|name| name != b"b");
        changed.replace("a", &HeaderValue::from_static("longer"));
        changed.replace("missing", &HeaderValue::from_static("x"));
        assert_eq!(changed, fields(&[("c", ""), ("a", "longer")]));
        assert_eq!((changed.len(), changed.is_empty()), (2, false));
        assert_eq!(changed.size(), 2 * 32 + 1 + 7);
        assert_eq!(changed.get_all("a").collect::<Vec<_>>(), [b"longer"]);
        assert_eq!((changed.get("b"), changed.get("c")), (None, Some(&b""[..])));
        assert_eq!(changed.text(path), b"/path");
        let copy = changed.clone();
        assert_eq!((&copy, copy.text(path)), (&changed, &b"/path"[..]));
        changed.retain(|_| false);
        assert!(changed.is_empty() && changed.iter().next().is_none());
        assert_eq!(changed.text(path), b"/path");
    }

    #[test]
    fn map_has_the_first_of_too_many_fields() {
        let mut many = Fields::default();
        (0..40_000).for_each(|number| many.append(format!("a{number}").as_bytes(), b"", false));
        let map = HeaderMap::from(&many);
        assert!((20_000..40_000).contains(&map.len()), "{}", map.len());
        assert!((0..map.len()).all(|number| map.contains_key(format!("a{number}"))));
    }

    /// Removed fields stay in memory, in copies too: they cost as much as before.
    #[test]
    fn removed_fields_and_earlier_texts_count_as_memory() {
        let long = [b'v'; 10_000];
        let mut changed = fields(&[("a", "1")]);
        changed.append(b"b", &long, false);
        changed.retain(|name| name != b"b");
        assert_eq!(changed.size(), 32 + 2);
        assert!(changed.memory() > 10_000);
        changed.keep(&long);
        changed.keep(b"/");
        let copy = changed.clone();
        assert!(copy.memory() > 20_000 && copy.memory() <= changed.memory() + ADDED);
    }

    #[test]
    fn maps_have_the_same_fields() {
        let mut secret = fields(&[("a", "1"), ("b", "2"), ("a", "3")]);
        secret.append(b"cookie", b"secret", true);
        let map = HeaderMap::from(&secret);
        assert!(map["cookie"].is_sensitive() && !map["b"].is_sensitive());
        assert_eq!(map.get_all("a").iter().collect::<Vec<_>>(), ["1", "3"]);
        let back = Fields::from(&map);
        assert_eq!(back.len(), 4);
        assert!(!format!("{back:?}").contains("secret\""));
    }

    /// Names and values have the lengths at which their numbers get another byte.
    #[test]
    fn fields_are_those_of_a_list() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..500 {
            let (mut fields, mut list, mut texts) = (Fields::default(), Vec::new(), Vec::new());
            for _ in 0..rng.usize(..20) {
                let value = vec![b'v'; [0, 1, 255, 256, 65_535, 65_536, 70_000][rng.usize(..7)]];
                let length = [1, 1, 2, 255, 256, 65_535][rng.usize(..6)];
                let name = str::repeat(["a", "b"][rng.usize(..2)], length);
                match rng.u8(..8) {
                    0 => texts.push((fields.keep(&value), value)),
                    1 => {
                        fields.retain(|other| other != name.as_bytes());
                        list.retain(|(other, _, _)| *other != name);
                    }
                    2 => {
                        fields.replace(&name, &HeaderValue::from_bytes(&value).unwrap());
                        let before = list.len();
                        list.retain(|(other, _, _)| *other != name);
                        if list.len() < before {
                            list.push((name, value, false));
                        }
                    }
                    3 => fields = fields.clone(),
                    kind => {
                        let is_sensitive = kind == 4;
                        fields.append(name.as_bytes(), &value, is_sensitive);
                        list.push((name, value, is_sensitive));
                    }
                }
            }
            let expected = list
                .iter()
                .map(|(name, value, is_sensitive)| (name.as_bytes(), &value[..], *is_sensitive));
            assert!(fields.with_sensitivity().eq(expected));
            assert_eq!(
                (fields.len(), fields.is_empty()),
                (list.len(), list.is_empty())
            );
            for (text, expected) in texts {
                assert!(fields.text(text) == expected);
            }
        }
    }
}
