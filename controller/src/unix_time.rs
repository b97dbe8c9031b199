//! Times as seconds since 1970.

use std::time::{Duration, SystemTime};

/// Seconds since 1970.
pub fn seconds(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

/// The inverse of [`seconds`].
pub fn time(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}
