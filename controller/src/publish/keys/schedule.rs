//! The schedule for fetching the keys of sources: every minute, and sooner for a URL if proxies
//! report tokens of unknown keys. Each source has limits of its own, whatever the number of
//! reports: clients choose the key IDs of their tokens. It also has the fetched keys. Pure: the
//! caller passes the clock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::index::authorization::{KeySources, MAX_SOURCES};
use crate::object::issuer_keys::{Entry, Source};

/// Time between two attempts for a source. Twice as long after each failure in a row.
const FETCH_INTERVAL: Duration = Duration::from_secs(60);
const MAX_FETCH_INTERVAL: Duration = Duration::from_secs(600);
/// The same, while proxies report unknown keys.
const REQUESTED_INTERVAL: Duration = Duration::from_secs(10);
/// Time for which the other replicas see a report: the one that writes statuses has to fetch the
/// keys, too. Replicas read each other's state every 10 seconds.
const SHARE_TIME: Duration = Duration::from_secs(20);
/// URLs in the state of a replica, each of at most 2 KiB.
const MAX_SHARED: usize = 32;

/// The attempts of this replica for each source, with their results.
#[derive(Debug, Default)]
pub struct Schedule(BTreeMap<Source, Attempts>);

#[derive(Debug, Default)]
struct Attempts {
    /// The source is over the limit of its namespace.
    is_refused: bool,
    is_running: bool,
    /// The end of the latest one.
    ended: Option<Instant>,
    /// Failures in a row.
    failures: u32,
    /// The results. Without keys, the URL may be one that the operator of the mesh does not allow.
    entry: Entry,
    /// Proxies have reported an unknown key since the latest attempt began.
    is_requested: bool,
    /// The latest report of a proxy of this replica.
    reported: Option<Instant>,
}

impl Attempts {
    fn refused() -> Attempts {
        let message = format!(
            "the policies of the namespace have more than {MAX_SOURCES} sources of keys, and the keys \
             of the others are fetched"
        );
        let mut attempts = Attempts {
            is_refused: true,
            ..Attempts::default()
        };
        attempts.entry.record(Err(message));
        attempts
    }

    fn is_due(&self, now: Instant) -> bool {
        let interval = if self.is_requested {
            REQUESTED_INTERVAL
        } else {
            let factor = 2_u32.saturating_pow(self.failures.saturating_sub(1));
            FETCH_INTERVAL
                .saturating_mul(factor)
                .min(MAX_FETCH_INTERVAL)
        };
        let has_passed = |ended| now.saturating_duration_since(ended) >= interval;
        !self.is_running && self.ended.is_none_or(has_passed)
    }
}

impl Schedule {
    /// Begins the attempts that are due, for some of these sources, each with one of its namespaces.
    /// Returns also the sources that are over the limit from now on. Forgets all others.
    pub fn begin(
        &mut self,
        sources: &KeySources,
        now: Instant,
    ) -> (Vec<(Arc<str>, Source)>, Vec<Source>) {
        let within = sources.within_limit();
        let mut before = std::mem::take(&mut self.0);
        let (mut due, mut refused) = (vec![], vec![]);
        for (source, namespace) in &within {
            let known = before.remove(*source).filter(|one| !one.is_refused);
            let mut attempts = known.unwrap_or_default();
            if attempts.is_due(now) {
                attempts.is_running = true;
                attempts.is_requested = false;
                due.push(((*namespace).clone(), (*source).clone()));
            }
            self.0.insert((*source).clone(), attempts);
        }
        for source in sources.excess().filter(|one| !within.contains_key(*one)) {
            let known = before.remove(source).filter(|one| one.is_refused);
            if known.is_none() {
                refused.push(source.clone());
            }
            let attempts = known.unwrap_or_else(Attempts::refused);
            self.0.insert(source.clone(), attempts);
        }
        (due, refused)
    }

    /// An attempt has ended. Returns whether its result differs from the one before.
    pub fn end(&mut self, source: &Source, result: Result<String, String>, now: Instant) -> bool {
        let Some(attempts) = self.0.get_mut(source) else {
            return false;
        };
        attempts.is_running = false;
        attempts.ended = Some(now);
        attempts.failures = match result {
            Ok(_) => 0,
            Err(_) => attempts.failures.saturating_add(1),
        };
        attempts.entry.record(result)
    }

    /// Adds the results to the sources of a policy.
    pub fn add_to(&self, issuers: &mut [(Source, Entry)]) {
        for (source, entry) in issuers {
            let attempts = self.0.get(source);
            *entry = attempts.map_or_else(Entry::default, |attempts| attempts.entry.clone());
        }
    }

    /// A proxy of this replica has reported an unknown key of a source.
    pub fn report(&mut self, source: &Source, now: Instant) {
        if let Some(attempts) = self.0.get_mut(source) {
            attempts.is_requested |= attempts.entry.keys.is_some();
            attempts.reported = Some(now).filter(|_| attempts.entry.keys.is_some());
        }
    }

    /// A proxy of another replica has.
    pub fn request(&mut self, source: &Source) {
        if let Some(attempts) = self.0.get_mut(source) {
            attempts.is_requested |= attempts.entry.keys.is_some();
        }
    }

    /// The URLs that proxies of this replica have reported of late.
    pub fn reported(&self, now: Instant) -> Vec<String> {
        let is_recent = |at: Instant| now.saturating_duration_since(at) < SHARE_TIME;
        let all = self.0.iter();
        let recent = all.filter(|(_, attempts)| attempts.reported.is_some_and(is_recent));
        let urls = recent.filter_map(|(source, _)| match source {
            Source::Url(url) => Some(url.clone()),
            Source::Secret(..) => None,
        });
        urls.take(MAX_SHARED).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Key;

    fn url(number: usize) -> Source {
        Source::Url(format!("https://id.example.com/{number}"))
    }

    /// The sources of as many namespaces.
    fn sources_of(all: impl IntoIterator<Item = Source>) -> KeySources {
        let mut sources = KeySources::default();
        for (number, source) in all.into_iter().enumerate() {
            sources.add(&Key::new(&number.to_string(), "p"), source);
        }
        sources
    }

    fn begin(schedule: &mut Schedule, sources: &KeySources, now: Instant) -> Vec<Source> {
        let due = schedule.begin(sources, now).0.into_iter();
        due.map(|(_, source)| source).collect()
    }

    #[test]
    fn failures_in_a_row_delay_the_next_attempt() {
        let (start, sources) = (Instant::now(), sources_of([url(1)]));
        let mut schedule = Schedule::default();
        let mut attempts = vec![];
        for minute in 0..60 {
            let now = start + Duration::from_secs(60) * minute;
            for source in begin(&mut schedule, &sources, now) {
                schedule.end(&source, fetched(minute >= 35), now);
                attempts.push(minute);
            }
        }
        assert_eq!(attempts[..7], [0, 1, 3, 7, 15, 25, 35]);
        assert_eq!(attempts[7..], Vec::from_iter(36..60));
    }

    fn fetched(is_success: bool) -> Result<String, String> {
        let keys = Some(String::new()).filter(|_| is_success);
        keys.ok_or_else(|| "down".to_owned())
    }

    /// A schedule whose sources have had keys at a time.
    fn schedule(sources: &KeySources, now: Instant) -> Schedule {
        let mut schedule = Schedule::default();
        let due = begin(&mut schedule, sources, now);
        assert_eq!(due.len(), sources.within_limit().len());
        for source in due {
            schedule.end(&source, fetched(true), now);
        }
        schedule
    }

    #[test]
    fn reports_bring_the_attempts_of_their_source_forward_to_every_10_seconds() {
        let (start, sources) = (Instant::now(), sources_of([url(1), url(2)]));
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut schedule = schedule(&sources, start);
        let mut attempts = vec![];
        for second in 1..=120 {
            // As many reports as clients can cause, until a key is known.
            if second <= 25 {
                (0..1000).for_each(|_| schedule.report(&url(1), after(second)));
            }
            for source in begin(&mut schedule, &sources, after(second)) {
                // One that fails counts, too.
                schedule.end(&source, fetched(second != 10), after(second));
                attempts.push((source, second));
            }
        }
        let expected = [(1, 10), (1, 20), (1, 30), (2, 60), (1, 90), (2, 120)];
        assert_eq!(attempts, expected.map(|(one, second)| (url(one), second)));
    }

    #[test]
    fn report_during_an_attempt_causes_one_that_begins_after_it() {
        let (start, sources) = (Instant::now(), sources_of([url(1)]));
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut schedule = schedule(&sources, start);
        assert_eq!(begin(&mut schedule, &sources, after(60)), [url(1)]);
        schedule.report(&url(1), after(61));
        assert_eq!(begin(&mut schedule, &sources, after(75)), []);
        schedule.end(&url(1), fetched(true), after(75));
        assert_eq!(begin(&mut schedule, &sources, after(84)), []);
        assert_eq!(begin(&mut schedule, &sources, after(85)), [url(1)]);
        schedule.end(&url(1), fetched(true), after(85));
        assert_eq!(begin(&mut schedule, &sources, after(144)), []);
    }

    #[test]
    fn reports_about_sources_that_have_had_no_keys_change_nothing() {
        let start = Instant::now();
        let mut schedule = Schedule::default();
        let sources = sources_of([url(1)]);
        assert_eq!(begin(&mut schedule, &sources, start), [url(1)]);
        schedule.end(&url(1), fetched(false), start);
        // The first one has failed, and no policy has the second one.
        for source in [url(1), url(2)] {
            schedule.report(&source, start);
            schedule.request(&source);
        }
        assert_eq!(
            begin(&mut schedule, &sources, start + REQUESTED_INTERVAL),
            []
        );
        assert_eq!(schedule.reported(start), [""; 0]);
        assert_eq!(
            begin(&mut schedule, &sources, start + FETCH_INTERVAL),
            [url(1)]
        );
        assert_eq!(schedule.0.len(), 1);
        begin(&mut schedule, &KeySources::default(), start);
        assert_eq!(schedule.0.len(), 0);
    }

    #[test]
    fn replicas_share_recent_reports_of_their_own_proxies() {
        let secret = Source::Secret(Key::new("shop", "idp"), "jwks".to_owned());
        let urls = (1..100).map(url);
        let all: Vec<Source> = urls.chain([secret]).collect();
        let sources = sources_of(all.clone());
        let start = Instant::now();
        let mut schedule = schedule(&sources, start);
        all.iter().for_each(|source| schedule.request(source));
        assert_eq!(schedule.reported(start), [""; 0], "of other replicas");
        schedule.report(&url(7), start);
        assert_eq!(schedule.reported(start), ["https://id.example.com/7"]);
        assert_eq!(schedule.reported(start + SHARE_TIME), [""; 0]);
        all.iter().for_each(|source| schedule.report(source, start));
        assert_eq!(schedule.reported(start).len(), MAX_SHARED);
    }
}
