//! Log lines about what callers do: one a minute for each caller and subject. Any token can cause as
//! many refusals as it likes.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Time between two lines of a caller about a subject.
const LINE_INTERVAL: Duration = Duration::from_secs(60);
/// Callers and subjects with a line in the last minute. The others share one line for each subject.
const MAX_LINES: usize = 4096;

/// The latest lines. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Lines(Arc<Mutex<HashMap<Key, Line>>>);

/// A caller and a subject.
type Key = (Arc<str>, &'static str);

#[derive(Debug)]
struct Line {
    written: Instant,
    /// Lines that were left out since.
    omitted: u64,
}

/// The number of lines that were left out, for the end of the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Omitted(pub u64);

impl fmt::Display for Omitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(f, " ({count} more since the last line)"),
        }
    }
}

impl Lines {
    /// Whether to write a line of a caller now.
    pub fn begin(&self, caller: &Arc<str>, subject: &'static str) -> Option<Omitted> {
        let now = Instant::now();
        let is_recent = |line: &Line| now < line.written + LINE_INTERVAL;
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut key = (caller.clone(), subject);
        if lines.len() >= MAX_LINES && !lines.contains_key(&key) {
            lines.retain(|_, line| is_recent(line));
            if lines.len() >= MAX_LINES {
                key.0 = "".into();
            }
        }
        match lines.get_mut(&key) {
            Some(line) if is_recent(line) => {
                line.omitted += 1;
                None
            }
            before => {
                let omitted = before.map_or(0, |line| line.omitted);
                let written = now;
                lines.insert(
                    key,
                    Line {
                        written,
                        omitted: 0,
                    },
                );
                Some(Omitted(omitted))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn caller_has_a_line_a_minute_for_each_subject_with_the_number_of_others() {
        let (lines, caller) = (Lines::default(), "1".into());
        assert_eq!(lines.begin(&caller, "a"), Some(Omitted(0)));
        assert_eq!(lines.begin(&caller, "b"), Some(Omitted(0)));
        (0..1840).for_each(|_| assert_eq!(lines.begin(&caller, "a"), None));
        assert_eq!(lines.begin(&"2".into(), "a"), Some(Omitted(0)));
        tokio::time::advance(LINE_INTERVAL).await;
        let next = lines.begin(&caller, "a").unwrap();
        assert_eq!(next.to_string(), " (1840 more since the last line)");
        assert_eq!(Omitted(0).to_string(), "");
    }

    #[tokio::test(start_paused = true)]
    async fn callers_over_the_limit_share_a_line() {
        let lines = Lines::default();
        let written = (0..2 * MAX_LINES)
            .filter(|number| lines.begin(&number.to_string().into(), "a").is_some());
        assert_eq!(written.count(), MAX_LINES + 1);
        tokio::time::advance(LINE_INTERVAL).await;
        assert_eq!(lines.begin(&"new".into(), "a"), Some(Omitted(0)));
    }
}
