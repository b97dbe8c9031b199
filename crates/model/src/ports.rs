//! Sets of ports: lists such as `25,3306,9000-9100` in annotations and arguments, and ranges in
//! messages. Pure values.

use std::fmt;
use std::ops::{BitOr, RangeInclusive};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A set of ports: ascending ranges, neither overlapping nor adjacent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PortSet(Vec<RangeInclusive<u16>>);

/// The syntax of a list of ports, for errors.
pub const EXPECTED: &str = "expected ports from 1 to 65535 and ranges of them, separated by commas, such as 25,3306,9000-9100";
/// The length of an invalid item in an error, in characters.
const MAX_SHOWN: usize = 64;

/// A text that is no list of ports: its first invalid item.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{EXPECTED}; {0:?} is neither")]
pub struct InvalidPorts(String);

impl PortSet {
    /// The ports of ranges. Fails with the first range that is not ascending or not within 1 to
    /// 65535.
    pub fn from_ranges(ranges: impl IntoIterator<Item = (u32, u32)>) -> Result<Self, (u32, u32)> {
        let ranges = ranges.into_iter();
        let ranges = ranges.map(|(first, last)| ascending(first, last).ok_or((first, last)));
        Ok(Self(ranges.collect::<Result<_, _>>()?).merged())
    }

    fn merged(mut self) -> Self {
        self.0.sort_unstable_by_key(|range| *range.start());
        self.0.dedup_by(|range, previous| {
            let joins = u32::from(*range.start()) <= u32::from(*previous.end()) + 1;
            if joins {
                *previous = *previous.start()..=*range.end().max(previous.end());
            }
            joins
        });
        self
    }

    /// Whether the port is in the set.
    pub fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|range| range.contains(&port))
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ranges in ascending order.
    pub fn ranges(&self) -> &[RangeInclusive<u16>] {
        &self.0
    }
}

/// Parses ports and ranges that are separated by commas. An empty text is an empty set.
impl FromStr for PortSet {
    type Err = InvalidPorts;

    fn from_str(text: &str) -> Result<Self, InvalidPorts> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let ranges = text.split(',').map(|item| {
            let (first, last) = item.split_once('-').unwrap_or((item, item));
            let range = number(first).zip(number(last));
            let range = range.and_then(|(first, last)| ascending(first, last));
            range.ok_or_else(|| InvalidPorts(item.trim().chars().take(MAX_SHOWN).collect()))
        });
        Ok(Self(ranges.collect::<Result<_, _>>()?).merged())
    }
}

impl TryFrom<String> for PortSet {
    type Error = InvalidPorts;

    fn try_from(text: String) -> Result<Self, InvalidPorts> {
        text.parse()
    }
}

impl From<PortSet> for String {
    fn from(ports: PortSet) -> Self {
        ports.to_string()
    }
}

fn ascending(first: u32, last: u32) -> Option<RangeInclusive<u16>> {
    let port = |number: u32| u16::try_from(number).ok().filter(|port| *port != 0);
    let (first, last) = port(first).zip(port(last))?;
    (first <= last).then_some(first..=last)
}

/// Digits only: `FromStr` of integers also accepts a plus sign.
fn number(text: &str) -> Option<u32> {
    let text = text.trim();
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

/// The ports of either set.
impl BitOr for PortSet {
    type Output = Self;

    fn bitor(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self.merged()
    }
}

impl fmt::Display for PortSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, range) in self.0.iter().enumerate() {
            let separator = if position == 0 { "" } else { "," };
            match (range.start(), range.end()) {
                (first, last) if first == last => write!(f, "{separator}{first}")?,
                (first, last) => write!(f, "{separator}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorts_and_merges_ranges() {
        for (text, normalized) in [
            ("25", "25"),
            (" 25, 3306 ,9000 - 9100 ", "25,3306,9000-9100"),
            ("9000-9100, 25,3306", "25,3306,9000-9100"),
            ("10-20,15-30,31,33,33", "10-31,33"),
            ("1-100,5-6", "1-100"),
            ("65535,1-65534", "1-65535"),
            ("7-7", "7"),
            ("007", "7"),
            (" ", ""),
        ] {
            let ports: PortSet = text.parse().expect(text);
            assert_eq!(ports.to_string(), normalized);
            assert_eq!(normalized.parse(), Ok(ports), "{text}");
        }
    }

    #[test]
    fn contains_single_ports_and_ranges() {
        let ports: PortSet = "25, 9000-9002,65535".parse().expect("valid");
        assert_eq!(
            [24, 25, 8999, 9000, 9002, 9003, 65535].map(|port| ports.contains(port)),
            [false, true, false, true, true, false, true]
        );
        assert!(!ports.is_empty());
        let empty = PortSet::default();
        assert!(!empty.contains(25) && empty.is_empty());
    }

    #[test]
    fn rejects_invalid_items() {
        for bad in [
            "x",
            "http",
            "0",
            "65536",
            "4294967321",
            "25,",
            ",",
            "9100-9000",
            "1-2-3",
            "-5",
            "5-",
            "1-",
            "+5",
            "25;26",
            "80 81",
            "0-10",
            "--help",
            "25\n26",
            "٢٥",
        ] {
            let error = bad.parse::<PortSet>().expect_err(bad);
            let within = format!("25,{bad},5").parse::<PortSet>();
            assert_eq!(within, Err(error.clone()), "the first invalid item");
            let InvalidPorts(item) = &error;
            assert!(bad.contains(item.as_str()) && error.to_string().starts_with(EXPECTED));
        }
        let error = "25,smtp,x"
            .parse::<PortSet>()
            .expect_err("smtp")
            .to_string();
        assert_eq!(error, format!("{EXPECTED}; \"smtp\" is neither"));
        let InvalidPorts(item) = "é".repeat(1000).parse::<PortSet>().expect_err("long");
        assert_eq!(item.chars().count(), MAX_SHOWN);
    }

    #[test]
    fn ranges_of_messages_are_checked() {
        for bad in [(0, 25), (26, 25), (25, 65_536), (25, u32::MAX)] {
            assert_eq!(PortSet::from_ranges([(1, 2), bad]), Err(bad));
        }
        let ports = PortSet::from_ranges([(80, 81), (25, 25)]).expect("valid");
        assert_eq!(ports.ranges(), [25..=25, 80..=81]);
    }
}
