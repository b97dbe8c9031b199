//! The name of an exchange, the same at both of its proxies: the address of the pod whose proxy met it
//! first, and a number that this proxy gave it.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The hexadecimal digits of the number.
const DIGITS: usize = 12;

/// The identifier of an exchange, as text `ADDRESS-NUMBER` with 12 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExchangeId {
    /// The address of the pod.
    pub pod: IpAddr,
    number: u64,
}

/// The text is no identifier of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected the identifier of an exchange, such as 10.244.1.7-5f3a9c210b44")]
pub struct InvalidExchangeId;

impl ExchangeId {
    /// The identifier with this number, of which the low 48 bits count.
    pub fn new(pod: IpAddr, number: u64) -> Self {
        let number = number & ((1 << (4 * DIGITS)) - 1);
        Self {
            pod: pod.to_canonical(),
            number,
        }
    }

    /// The digits of the number, which the proxy of the pod tells the next one.
    pub fn digits(self) -> [u8; DIGITS] {
        const HEXADECIMAL: &[u8; 16] = b"0123456789abcdef";
        std::array::from_fn(|index| {
            let shift = 4 * (DIGITS - 1 - index);
            HEXADECIMAL[(self.number >> shift) as usize & 15]
        })
    }

    /// The identifier of a pod's exchange with these digits.
    pub fn of_digits(pod: IpAddr, digits: &[u8]) -> Option<Self> {
        let digits: &[u8; DIGITS] = digits.try_into().ok()?;
        let number = digits.iter().try_fold(0, |number, digit| {
            let digit = match digit {
                b'0'..=b'9' => digit - b'0',
                b'a'..=b'f' => digit - b'a' + 10,
                _ => return None,
            };
            Some(number << 4 | u64::from(digit))
        })?;
        Some(Self::new(pod, number))
    }
}

impl fmt::Display for ExchangeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.digits();
        let digits = str::from_utf8(&digits).map_err(|_| fmt::Error)?;
        write!(f, "{}-{digits}", self.pod)
    }
}

impl FromStr for ExchangeId {
    type Err = InvalidExchangeId;

    /// Each identifier has one text.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = || {
            let (pod, number) = text.split_once('-')?;
            let id = Self::of_digits(pod.parse().ok()?, number.as_bytes())?;
            (id.to_string() == text).then_some(id)
        };
        parsed().ok_or(InvalidExchangeId)
    }
}

impl Serialize for ExchangeId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ExchangeId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_the_same_again() {
        for (pod, text) in [
            ("10.244.1.7", "10.244.1.7-00000000002a"),
            ("::ffff:10.244.1.7", "10.244.1.7-00000000002a"),
            ("fd00::7", "fd00::7-00000000002a"),
        ] {
            let id = ExchangeId::new(pod.parse().unwrap(), (1 << 60) + 42);
            assert_eq!(id.to_string(), text);
            assert_eq!(text.parse(), Ok(id));
            assert_eq!(ExchangeId::of_digits(id.pod, &id.digits()), Some(id));
            assert!(text.as_bytes().ends_with(&id.digits()));
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "-",
            "10.244.1.7",
            "10.244.1.7-2a",
            "10.244.1.7-00000000002A",
            "10.244.1.7-+0000000002a",
            "10.244.1.7-100000000002a",
            "FD00::7-00000000002a",
            "::ffff:10.244.1.7-00000000002a",
            "10.244.1.7-00000000002a ",
            "10.244.1.7-00000000002a\r\nx: y",
        ] {
            assert_eq!(text.parse::<ExchangeId>(), Err(InvalidExchangeId), "{text}");
        }
    }
}
