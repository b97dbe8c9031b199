//! Changes that the proxy makes to a head on its way: an overlay, which both versions of HTTP apply
//! when they write the head. In HTTP/1 the other fields keep their case and order.

use http::{HeaderMap, HeaderName, HeaderValue};

/// A change of one field. Names are compared by [`is_same_name`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edit<'a> {
    /// The field has this value alone, and stands last.
    Set(&'static str, &'a str),
    /// The field has this value besides those that it has, and stands last.
    Add(&'static str, &'a str),
    /// The field is removed.
    Remove(&'static str),
}

/// The changes of one head, in order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Edits<'a>(pub &'a [Edit<'a>]);

impl<'a> Edits<'a> {
    /// Whether a field with this name that stands in the head is left out.
    pub fn remove(self, name: &[u8]) -> bool {
        self.0.iter().any(|edit| match edit {
            Edit::Set(removed, _) | Edit::Remove(removed) => is_same_name(name, removed.as_bytes()),
            Edit::Add(..) => false,
        })
    }

    /// The fields that are appended.
    pub fn appended(self) -> impl Iterator<Item = (&'static str, &'a str)> {
        self.0.iter().filter_map(|edit| match edit {
            Edit::Set(name, value) | Edit::Add(name, value) => Some((*name, *value)),
            Edit::Remove(_) => None,
        })
    }

    /// The fields of a head after the changes.
    pub fn fields<'f>(
        self,
        head: impl Iterator<Item = (&'f [u8], &'f [u8])>,
    ) -> impl Iterator<Item = (&'f [u8], &'f [u8])>
    where
        'a: 'f,
    {
        let appended = self
            .appended()
            .map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        head.filter(move |(name, _)| !self.remove(name))
            .chain(appended)
    }

    /// Changes a head of HTTP/2.
    pub fn apply(self, headers: &mut HeaderMap) {
        let names = headers
            .keys()
            .filter(|name| self.remove(name.as_str().as_bytes()));
        let removed: Vec<HeaderName> = names.cloned().collect();
        removed.iter().for_each(|name| drop(headers.remove(name)));
        for (name, value) in self.appended() {
            let name = HeaderName::from_bytes(name.as_bytes());
            if let (Ok(name), Ok(value)) = (name, HeaderValue::from_str(value)) {
                headers.append(name, value);
            }
        }
    }
}

/// Compares names as CGI does (RFC 3875, section 4.1.18), and servers that follow it: without case,
/// and every byte that is neither a letter nor a digit counts as an underscore.
pub fn is_same_name(one: &[u8], other: &[u8]) -> bool {
    let fold = |byte: &u8| match byte {
        byte if byte.is_ascii_alphanumeric() => byte.to_ascii_lowercase(),
        _ => b'_',
    };
    one.len() == other.len()
        && one
            .iter()
            .zip(other)
            .all(|(one, other)| fold(one) == fold(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EDITS: Edits<'static> = Edits(&[
        Edit::Set("X-Called-By", "me"),
        Edit::Add("X-Via", "mesh"),
        Edit::Remove("x-mesh-error"),
    ]);

    #[test]
    fn edits_keep_the_case_and_order_of_other_fields() {
        let head: [(&[u8], &[u8]); 5] = [
            (b"hOsT", b"a"),
            (b"x_called.by", b"forged"),
            (b"X-Via", b"one"),
            (b"X-MESH-ERROR", b"forged"),
            (b"X-B", b"2"),
        ];
        let edited: Vec<_> = EDITS.fields(head.into_iter()).collect();
        let expected: [(&[u8], &[u8]); 5] = [
            (b"hOsT", b"a"),
            (b"X-Via", b"one"),
            (b"X-B", b"2"),
            (b"X-Called-By", b"me"),
            (b"X-Via", b"mesh"),
        ];
        assert_eq!(edited, expected);
    }

    #[test]
    fn edits_apply_to_a_header_map() {
        let mut headers = HeaderMap::new();
        for (name, value) in [("x_called.by", "forged"), ("x-via", "one"), ("x-b", "2")] {
            headers.append(name, HeaderValue::from_static(value));
        }
        EDITS.apply(&mut headers);
        let values = |name: &str| -> Vec<_> { headers.get_all(name).iter().collect() };
        assert_eq!(values("x-via"), ["one", "mesh"]);
        assert_eq!(values("x-called-by"), ["me"]);
        assert_eq!(values("x-b"), ["2"]);
        assert_eq!(headers.len(), 4);
    }
}
