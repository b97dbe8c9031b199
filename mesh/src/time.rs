//! Times as people say them. Pure but for the clock.

use std::time::{SystemTime, UNIX_EPOCH};

use k8s_openapi::jiff::Timestamp;

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// A length of time in its two largest units.
pub fn span(seconds: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")];
    let Some(first) = UNITS.iter().position(|(length, _)| seconds >= *length) else {
        return "0 s".into();
    };
    let (length, unit) = UNITS[first];
    let rest = UNITS
        .get(first + 1)
        .map(|(small, unit)| (seconds % length / small, unit))
        .filter(|(count, _)| *count > 0);
    let whole = format!("{} {unit}", seconds / length);
    rest.map_or_else(
        || whole.clone(),
        |(count, unit)| format!("{whole} {count} {unit}"),
    )
}

/// A moment, seen from now: `in 3 h` or `3 h ago`.
pub fn from_now(moment: u64, now: u64) -> String {
    if moment >= now {
        format!("in {}", span(moment - now))
    } else {
        format!("{} ago", span(now - moment))
    }
}

/// A moment as everybody writes it, in UTC.
pub fn stamp(moment: u64) -> String {
    i64::try_from(moment)
        .ok()
        .and_then(|seconds| Timestamp::from_second(seconds).ok())
        .map_or_else(|| "?".into(), |time| time.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_two_units() {
        let told = [0, 5, 60, 61, 3_600, 3_661, 86_400 * 3 + 7_300].map(span);
        assert_eq!(
            told,
            [
                "0 s",
                "5 s",
                "1 min",
                "1 min 1 s",
                "1 h",
                "1 h 1 min",
                "3 d 2 h"
            ]
        );
        assert_eq!(
            (from_now(100, 40), from_now(40, 100)),
            ("in 1 min".into(), "1 min ago".into())
        );
        assert_eq!(stamp(0), "1970-01-01T00:00:00Z");
    }
}
