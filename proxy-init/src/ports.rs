//! Lists of ports, as annotations and flags write them: `25,3306,9000-9100`. Pure values.

use std::fmt;
use std::ops::RangeInclusive;

/// Ports in order, none twice: single ones and ranges.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ports(Vec<RangeInclusive<u16>>);

impl Ports {
    /// Reads a list; an empty text is an empty list. The error is a line for each item that is wrong.
    pub fn parse(text: &str) -> Result<Self, Vec<String>> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let (mut ranges, mut problems) = (Vec::new(), Vec::new());
        for item in text.split(',').map(str::trim) {
            match parse_item(item) {
                Ok(range) => ranges.push(range),
                Err(problem) => problems.push(problem),
            }
        }
        if problems.is_empty() {
            Ok(Self::merged(ranges))
        } else {
            Err(problems)
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ranges, in order and apart from one another.
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

/// A port alone, from 1 to 65535.
pub fn parse_port(text: &str) -> Result<u16, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<u16>() {
        Ok(port) if digits && port > 0 => Ok(port),
        _ => Err(format!("`{text}` is not a port from 1 to 65535")),
    }
}

fn parse_item(item: &str) -> Result<RangeInclusive<u16>, String> {
    if item.is_empty() {
        return Err("there is an empty item, that is a comma too many".to_owned());
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

    fn shown(text: &str) -> String {
        Ports::parse(text).expect("valid").to_string()
    }

    #[test]
    fn lists_come_in_order_and_without_overlaps() {
        assert_eq!(shown("9000-9100, 25,3306"), "25, 3306, 9000-9100");
        assert_eq!(shown("10-20,15-30,31,33,33"), "10-31, 33");
        assert_eq!(shown("65535,1-65534"), "1-65535");
        assert_eq!(shown("7-7"), "7");
        assert_eq!(shown(" "), "");
    }

    #[test]
    fn every_wrong_item_is_named() {
        let problems =
            Ports::parse("25,http,0,70000,9-1,1-,-5,+5,1-2-3,,5").expect_err("most of it is wrong");
        assert_eq!(
            problems,
            [
                "`http` is not a port from 1 to 65535",
                "`0` is not a port from 1 to 65535",
                "`70000` is not a port from 1 to 65535",
                "`9-1` ends before it begins",
                "`1-` is not a range of ports from 1 to 65535, such as 9000-9100",
                "`-5` is not a range of ports from 1 to 65535, such as 9000-9100",
                "`+5` is not a port from 1 to 65535",
                "`1-2-3` is not a range of ports from 1 to 65535, such as 9000-9100",
                "there is an empty item, that is a comma too many",
            ]
        );
    }
}
