//! Versions: digests of states, equal on all replicas and independent of the order of events.

use std::fmt;
use std::hash::{Hash, Hasher};

use aws_lc_rs::digest::{Context, SHA256};

/// The version of a state. Equal versions mean equal states.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Version([u8; 16]);

impl Version {
    /// The version with this text. Text in another form is the version of no state.
    pub fn parse(text: &str) -> Option<Version> {
        let number = u128::from_str_radix(text, 16).ok()?;
        let version = Version(number.to_be_bytes());
        (version.to_string() == text).then_some(version)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Computes a version from fields with their lengths, so that different fields result in different
/// input.
pub(crate) struct Digest(Context);

impl Digest {
    /// `what` distinguishes the digests of different types.
    pub(crate) fn new(what: &str) -> Digest {
        let mut digest = Digest(Context::new(&SHA256));
        digest.text(what);
        digest
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.update(text.as_bytes());
    }

    pub(crate) fn number(&mut self, number: u64) {
        self.0.update(&number.to_be_bytes());
    }

    pub(crate) fn address(&mut self, ip: std::net::IpAddr) {
        match ip {
            std::net::IpAddr::V4(ip) => {
                self.0.update(&[4]);
                self.0.update(&ip.octets());
            }
            std::net::IpAddr::V6(ip) => {
                self.0.update(&[6]);
                self.0.update(&ip.octets());
            }
        }
    }

    pub(crate) fn finish(self) -> Version {
        let full = self.0.finish();
        let (half, _) = full
            .as_ref()
            .split_first_chunk::<16>()
            .expect("a SHA-256 digest has 32 bytes");
        Version(*half)
    }
}

/// The version of a value: a digest of its fields. `what` distinguishes types.
pub(crate) fn of(what: &str, value: &impl Hash) -> Version {
    struct Fields(Digest);
    impl Hasher for Fields {
        fn write(&mut self, bytes: &[u8]) {
            self.0.0.update(bytes);
        }
        fn finish(&self) -> u64 {
            0
        }
    }
    let mut fields = Fields(Digest::new(what));
    value.hash(&mut fields);
    fields.0.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distinguishes_adjacent_fields() {
        let of = |fields: &[&str]| {
            let mut digest = Digest::new("test");
            fields.iter().for_each(|field| digest.text(field));
            digest.finish()
        };
        assert_ne!(of(&["ab", "c"]), of(&["a", "bc"]));
        assert_eq!(of(&["ab", "c"]), of(&["ab", "c"]));
    }

    #[test]
    fn parses_only_the_text_of_a_version() {
        let text = "0206d90d9cb08e227638bc9ad532ceb0";
        assert_eq!(Version::parse(text).unwrap().to_string(), text);
        for other in [
            "",
            &text[1..],
            &text.to_uppercase(),
            &format!("+{}", &text[1..]),
        ] {
            assert_eq!(Version::parse(other), None, "{other}");
        }
    }

    #[test]
    fn versions_are_stable_across_releases() {
        let mut digest = Digest::new("test");
        digest.number(7);
        digest.address("10.0.0.1".parse().unwrap());
        assert_eq!(
            digest.finish().to_string(),
            "0206d90d9cb08e227638bc9ad532ceb0"
        );
    }
}
