//! The current time, and formatting of durations and timestamps.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diy_mesh_injector::settings::duration;
use k8s_openapi::jiff::Timestamp;

/// One year.
const MAX_SECONDS: u64 = 365 * 24 * 3600;

/// The current time, in seconds since 1970.
pub fn now() -> u64 {
    seconds(SystemTime::now())
}

/// A time in seconds since 1970.
pub fn seconds(time: SystemTime) -> u64 {
    let since_epoch = time.duration_since(UNIX_EPOCH);
    since_epoch.unwrap_or_default().as_secs()
}

/// Parses a duration such as `90s`, `5m` or `1h`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let seconds = duration(text).filter(|seconds| *seconds <= MAX_SECONDS);
    let seconds = seconds.ok_or("expected a number with a unit, such as 90s, 5m or 1h")?;
    Ok(Duration::from_secs(seconds))
}

/// Formats a duration in its two largest units.
pub fn format_duration(seconds: u64) -> String {
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

/// Formats a time relative to `now`: `in 3 h` or `3 h ago`.
pub fn format_relative(time: u64, now: u64) -> String {
    if time >= now {
        format!("in {}", format_duration(time - now))
    } else {
        format!("{} ago", format_duration(now - time))
    }
}

/// Reads a time as RFC 3339, in seconds since 1970.
pub fn parse_timestamp(text: &str) -> Option<u64> {
    let timestamp: Timestamp = text.parse().ok()?;
    timestamp.as_second().try_into().ok()
}

/// Formats a time as RFC 3339 in UTC.
pub fn format_timestamp(time: u64) -> String {
    i64::try_from(time)
        .ok()
        .and_then(|seconds| Timestamp::from_second(seconds).ok())
        .map_or_else(|| "?".into(), |timestamp| timestamp.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_durations() {
        let seconds = |text| parse_duration(text).ok().map(|time| time.as_secs());
        assert_eq!(
            ["90s", "5m", "2h", "0s"].map(seconds),
            [90, 300, 7200, 0].map(Some)
        );
        assert_eq!(
            ["", "5", "m", "5d", "-1s", "99999999s", "5µ"].map(seconds),
            [None; 7]
        );
    }

    #[test]
    fn formats_durations_and_times() {
        let durations = [0, 5, 60, 61, 3_600, 3_661, 86_400 * 3 + 7_300].map(format_duration);
        assert_eq!(
            durations,
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
            (format_relative(100, 40), format_relative(40, 100)),
            ("in 1 min".into(), "1 min ago".into())
        );
        assert_eq!(format_timestamp(0), "1970-01-01T00:00:00Z");
        assert_eq!(parse_timestamp("1970-01-01T00:01:00.5Z"), Some(60));
        assert_eq!(parse_timestamp("yesterday"), None);
    }
}
