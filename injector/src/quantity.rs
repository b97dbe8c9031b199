//! The quantities of Kubernetes: `100m`, `64Mi`, `1e3`. Pure.

/// A quantity, and its text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantity {
    /// Its text in a pod.
    pub text: String,
    /// Rounded up.
    pub thousandths: u128,
}

/// One mebibyte in thousandths of a byte.
pub const MEBIBYTE: u128 = 1024 * 1024 * 1000;

impl Quantity {
    /// Reads the text of a quantity. `None` if it is invalid or negative.
    pub fn parse(text: &str) -> Option<Self> {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.');
        let (number, suffix) = text.split_at(end.unwrap_or(text.len()));
        let (numerator, denominator) = unit(suffix)?;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
        let divisor = 10_u128.checked_pow(fraction.len().try_into().ok()?)?;
        let thousandths = digits
            .checked_mul(numerator)?
            .div_ceil(denominator.checked_mul(divisor)?);
        Some(Self {
            text: text.into(),
            thousandths,
        })
    }

    /// CPU time of this many thousandths of a second per second.
    pub fn cpu(thousandths: u128) -> Self {
        let text = match thousandths % 1000 {
            0 => (thousandths / 1000).to_string(),
            _ => format!("{thousandths}m"),
        };
        Self { text, thousandths }
    }

    /// Memory of this many thousandths of a byte, rounded up to bytes, in the largest unit that
    /// needs no fraction.
    pub fn memory(thousandths: u128) -> Self {
        let bytes = thousandths.div_ceil(1000);
        let units = [("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)];
        let unit = units.iter().find(|(_, unit)| bytes.is_multiple_of(*unit));
        let (suffix, unit) = unit.unwrap_or(&("", 1));
        Self {
            text: format!("{}{suffix}", bytes / unit),
            thousandths: bytes * 1000,
        }
    }
}

/// The thousandths of one unit, as a fraction.
fn unit(suffix: &str) -> Option<(u128, u128)> {
    let (numerator, denominator) = match suffix {
        "n" => (1, 1_000_000),
        "u" => (1, 1000),
        "m" => (1, 1),
        "" => (1000, 1),
        _ => {
            let units = ["k", "M", "G", "T", "P", "E"];
            let binary = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
            let power = |units: &[&str; 6], base: u128| {
                let power = units.iter().position(|unit| *unit == suffix)?;
                Some((1000 * base.pow(power as u32 + 1), 1))
            };
            let exponent = || {
                let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
                let factor = 10_u128.checked_pow(exponent.unsigned_abs())?;
                match exponent {
                    0.. => Some((factor.checked_mul(1000)?, 1)),
                    _ => Some((1000, factor)),
                }
            };
            return power(&units, 1000)
                .or_else(|| power(&binary, 1024))
                .or_else(exponent);
        }
    };
    Some((numerator, denominator))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_quantities_of_kubernetes() {
        for (text, thousandths) in [
            ("0", 0),
            ("1", 1000),
            ("0.5", 500),
            (".5", 500),
            ("2.", 2000),
            ("100m", 100),
            ("1.5m", 2),
            ("1500u", 2),
            ("2000000n", 2),
            ("1n", 1),
            ("1e3", 1_000_000),
            ("12E2", 1_200_000),
            ("5e-1", 500),
            ("1k", 1_000_000),
            ("1E", 1_000_000_000_000_000_000_000),
            ("64Mi", 64 * MEBIBYTE),
            ("1.5Gi", 1536 * MEBIBYTE),
            ("1Ei", 1024_u128.pow(6) * 1000),
        ] {
            let read = Quantity::parse(text).map(|quantity| quantity.thousandths);
            assert_eq!(read, Some(thousandths), "{text}");
        }
        let huge = "9".repeat(60);
        for text in [
            "", ".", "-1", "+1", "1 m", "1.2.3", "inf", "10x", "1e", "1e99", &huge,
        ] {
            assert_eq!(Quantity::parse(text), None, "{text}");
        }
    }

    #[test]
    fn writes_sums_in_the_largest_whole_unit() {
        for (thousandths, text) in [(1000, "1"), (1010, "1010m")] {
            assert_eq!(Quantity::cpu(thousandths).text, text);
        }
        for (thousandths, text) in [
            (1040 * MEBIBYTE, "1040Mi"),
            (2048 * MEBIBYTE, "2Gi"),
            (1024 * 1000, "1Ki"),
            (1000, "1"),
            (1001, "2"),
        ] {
            let quantity = Quantity::memory(thousandths);
            assert_eq!(quantity.text, text);
            assert_eq!(Quantity::parse(text), Some(quantity));
        }
    }
}
