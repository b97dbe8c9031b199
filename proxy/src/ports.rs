//! Sets of ports, parsed from lists such as `25,9000-9100`.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// A set of ports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortSet(Vec<RangeInclusive<u16>>);

impl PortSet {
    /// Whether the port is in the set.
    pub fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|range| range.contains(&port))
    }
}

impl FromIterator<RangeInclusive<u16>> for PortSet {
    fn from_iter<T: IntoIterator<Item = RangeInclusive<u16>>>(ranges: T) -> Self {
        Self(ranges.into_iter().collect())
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

/// Parses a comma-separated list of ports and ranges. An empty string is an empty set.
impl FromStr for PortSet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        text.split(',')
            .map(|item| parse_item(item.trim()))
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

fn parse_item(item: &str) -> Result<RangeInclusive<u16>, String> {
    // Digits only: `u16::from_str` accepts a plus sign too.
    let port = |text: &str| {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u16>().ok().filter(|port| digits && *port != 0)
    };
    let (first, last) = item.split_once('-').unwrap_or((item, item));
    match (port(first.trim()), port(last.trim())) {
        (Some(first), Some(last)) if first <= last => Ok(first..=last),
        _ => Err(format!(
            "{item:?}: expected a port from 1 to 65535 or a range of ports, such as 9000-9100"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_single_ports_and_ranges() {
        let ports: PortSet = "25, 9000-9002,65535".parse().unwrap();
        assert_eq!(
            [24, 25, 8999, 9000, 9002, 9003, 65535].map(|port| ports.contains(port)),
            [false, true, false, true, true, false, true]
        );
        assert_eq!(ports.to_string(), "25,9000-9002,65535");
        assert_eq!(" ".parse(), Ok(PortSet::default()));
        assert!(!PortSet::default().contains(25));
    }

    #[test]
    fn rejects_invalid_items() {
        for bad in [
            "x",
            "0",
            "65536",
            "9100-9000",
            "1-2-3",
            "-5",
            "5-",
            "+5",
            "80 81",
        ] {
            assert!(
                format!("25,{bad}")
                    .parse::<PortSet>()
                    .is_err_and(|error| error.starts_with(&format!("{bad:?}: expected"))),
                "{bad}"
            );
        }
        assert!("25,".parse::<PortSet>().is_err());
    }
}
