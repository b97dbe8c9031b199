//! Port lists in the format of flags and annotations, such as `25,3306,9000-9100`. Pure values.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Sorted, disjoint port ranges.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ports(Vec<RangeInclusive<u16>>);

impl FromStr for Ports {
    type Err = String;

    /// Parses a comma-separated list; an empty text is an empty list. The error describes the first
    /// invalid item.
    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let ranges: Result<_, _> = text
            .split(',')
            .map(|item| parse_item(item.trim()))
            .collect();
        ranges.map(Self::merged)
    }
}

impl Ports {
    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ranges in ascending order, neither overlapping nor adjacent.
    pub fn ranges(&self) -> &[RangeInclusive<u16>] {
        &self.0
    }

    fn merged(mut ranges: Vec<RangeInclusive<u16>>) -> Self {
        ranges.sort_by_key(|range| *range.start());
        let mut merged: Vec<RangeInclusive<u16>> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match merged.last_mut() {
                Some(last) if u32::from(*range.start()) <= u32::from(*last.end()) + 1 => {
                    *last = *last.start()..=*last.end().max(range.end());
                }
                _ => merged.push(range),
            }
        }
        Self(merged)
    }
}

fn parse_port(text: &str) -> Result<u16, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<u16>() {
        Ok(port) if digits && port > 0 => Ok(port),
        _ => Err(format!("`{text}` is not a port from 1 to 65535")),
    }
}

fn parse_item(item: &str) -> Result<RangeInclusive<u16>, String> {
    if item.is_empty() {
        return Err("the list has an empty item; remove the extra comma".to_owned());
    }
    let Some((first, last)) = item.split_once('-') else {
        return parse_port(item).map(|port| port..=port);
    };
    match (parse_port(first.trim()), parse_port(last.trim())) {
        (Ok(first), Ok(last)) if first <= last => Ok(first..=last),
        (Ok(_), Ok(_)) => Err(format!("`{item}` ends before it begins")),
        _ => Err(format!(
            "`{item}` is not a range of ports from 1 to 65535, such as 9000-9100"
        )),
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, range) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            match (range.start(), range.end()) {
                (first, last) if first == last => write!(f, "{comma}{first}")?,
                (first, last) => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normalized(text: &str) -> String {
        text.parse::<Ports>().expect("valid").to_string()
    }

    #[test]
    fn sorts_and_merges_ranges() {
        assert_eq!(normalized("9000-9100, 25,3306"), "25, 3306, 9000-9100");
        assert_eq!(normalized("10-20,15-30,31,33,33"), "10-31, 33");
        assert_eq!(normalized("65535,1-65534"), "1-65535");
        assert_eq!(normalized("7-7"), "7");
        assert_eq!(normalized(" "), "");
    }

    #[test]
    fn rejects_invalid_items() {
        for (item, expected) in [
            ("http", "`http` is not a port from 1 to 65535"),
            ("0", "`0` is not a port from 1 to 65535"),
            ("70000", "`70000` is not a port from 1 to 65535"),
            ("9-1", "`9-1` ends before it begins"),
            (
                "1-",
                "`1-` is not a range of ports from 1 to 65535, such as 9000-9100",
            ),
            (
                "-5",
                "`-5` is not a range of ports from 1 to 65535, such as 9000-9100",
            ),
            ("+5", "`+5` is not a port from 1 to 65535"),
            (
                "1-2-3",
                "`1-2-3` is not a range of ports from 1 to 65535, such as 9000-9100",
            ),
            ("", "the list has an empty item; remove the extra comma"),
        ] {
            assert_eq!(
                format!("25,{item},5").parse::<Ports>(),
                Err(expected.to_owned())
            );
        }
    }
}
