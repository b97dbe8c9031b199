//! The age of the catalog: for each kind, the time since its source last confirmed that the objects
//! are current, the number of invalid ones, and why they cannot be read.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::object::Kind;

/// The age of a required kind above which the controller is not ready. A watch that works is
/// confirmed at least every three minutes.
pub const MAX_WATCH_AGE: Duration = Duration::from_secs(300);
/// Time for which requests for a kind may fail until the kind counts as unreadable.
pub const MAX_FAILURE: Duration = Duration::from_secs(60);

/// The state of each kind. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Freshness(Arc<Mutex<BTreeMap<Kind, State>>>);

#[derive(Debug, Default)]
struct State {
    /// The last confirmation.
    confirmed: Option<Instant>,
    /// Objects that are ignored.
    ignored: usize,
    /// Its objects were listed before, or it was not installed.
    is_known: bool,
    /// The time since which it cannot be read, and the latest error.
    failing: Option<(Instant, String)>,
    is_reported: bool,
}

/// A kind that cannot be read.
#[derive(Debug, PartialEq)]
pub struct Unreadable {
    /// The kind.
    pub kind: Kind,
    /// The latest error.
    pub error: String,
    /// Whether there is a former state, which stays in use.
    pub is_known: bool,
}

impl Freshness {
    /// The first request for the objects of a kind follows.
    pub fn begin(&self, kind: Kind) {
        self.fail(kind, "the API server has not listed its objects".to_owned());
    }

    /// Records that the objects of a kind are current. `ignored`: the number of invalid ones.
    pub fn confirm(&self, kind: Kind, ignored: usize) {
        let confirmed = State {
            confirmed: Some(Instant::now()),
            ignored,
            is_known: true,
            ..State::default()
        };
        let before = self.lock().insert(kind, confirmed);
        if before.is_some_and(|before| before.is_reported) {
            tracing::info!("{kind} can be read again");
        }
    }

    /// A request for the objects of a kind has failed.
    pub fn fail(&self, kind: Kind, error: String) {
        let mut kinds = self.lock();
        let state = kinds.entry(kind).or_default();
        let since = state.failing.take().map(|(since, _)| since);
        state.failing = Some((since.unwrap_or_else(Instant::now), error));
    }

    /// The kind is not installed, and has no age.
    pub fn remove(&self, kind: Kind) {
        let none = State {
            is_known: true,
            ..State::default()
        };
        self.lock().insert(kind, none);
    }

    /// The age of each kind that was confirmed at least once.
    pub fn ages(&self) -> Vec<(Kind, Duration)> {
        let age = |(kind, state): (&Kind, &State)| Some((*kind, state.confirmed?.elapsed()));
        self.lock().iter().filter_map(age).collect()
    }

    /// The number of invalid objects of each kind that was confirmed at least once.
    pub fn ignored(&self) -> Vec<(Kind, usize)> {
        let kinds = self.lock();
        let confirmed = kinds.iter().filter(|(_, state)| state.confirmed.is_some());
        confirmed
            .map(|(kind, state)| (*kind, state.ignored))
            .collect()
    }

    /// Whether each kind cannot be read, now and for a while.
    pub fn unreadable(&self) -> Vec<(Kind, bool)> {
        let kinds = self.lock();
        let kinds = kinds.iter();
        kinds
            .map(|(kind, state)| (*kind, state.error().is_some()))
            .collect()
    }

    /// The unreadable kinds that were not returned before.
    pub fn take_unreadable(&self) -> Vec<Unreadable> {
        let mut kinds = self.lock();
        let new = kinds.iter_mut().filter(|(_, state)| !state.is_reported);
        let new = new.filter_map(|(kind, state)| {
            let error = state.error()?.to_owned();
            state.is_reported = true;
            Some(Unreadable {
                kind: *kind,
                error,
                is_known: state.is_known,
            })
        });
        new.collect()
    }

    /// The latest error of a kind that cannot be read at present.
    #[cfg(test)]
    pub(super) fn failure(&self, kind: Kind) -> Option<String> {
        let (_, error) = self.lock().get(&kind)?.failing.clone()?;
        Some(error)
    }

    /// The required kinds that are too old, for `/ready`.
    pub fn stale(&self) -> Option<String> {
        let mut ages = self.ages();
        ages.retain(|(kind, age)| !kind.is_optional() && *age > MAX_WATCH_AGE);
        let stale = ages.iter();
        let stale = stale.map(|(kind, age)| format!("{kind} for {} s", age.as_secs()));
        let stale: Vec<String> = stale.collect();
        (!stale.is_empty()).then(|| format!("not updated: {}", stale.join(", ")))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Kind, State>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The latest error, if all requests have failed for too long.
    fn error(&self) -> Option<&str> {
        let (since, error) = self.failing.as_ref()?;
        (since.elapsed() >= MAX_FAILURE).then_some(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn required_kind_that_is_not_confirmed_for_too_long_is_stale() {
        let freshness = Freshness::default();
        freshness.confirm(Kind::Pod, 0);
        freshness.confirm(Kind::Node, 2);
        tokio::time::advance(MAX_WATCH_AGE).await;
        assert_eq!(freshness.stale(), None);
        tokio::time::advance(Duration::from_secs(1)).await;
        let reason = freshness.stale();
        assert_eq!(reason.as_deref(), Some("not updated: Pod for 301 s"));
        freshness.confirm(Kind::Pod, 0);
        assert_eq!(freshness.stale(), None);
        let ages: Vec<u64> = freshness
            .ages()
            .iter()
            .map(|(_, age)| age.as_secs())
            .collect();
        assert_eq!(ages, [0, 301]);
        assert_eq!(freshness.ignored(), [(Kind::Pod, 0), (Kind::Node, 2)]);
    }

    #[tokio::test(start_paused = true)]
    async fn kind_that_fails_for_a_minute_is_unreadable_until_it_is_confirmed() {
        let freshness = Freshness::default();
        let unreadable = || {
            let new = freshness.take_unreadable().into_iter();
            Vec::from_iter(new.map(|new| (new.kind, new.error, new.is_known)))
        };
        freshness.begin(Kind::Grant);
        freshness.confirm(Kind::Pod, 0);
        freshness.remove(Kind::HttpRoute);
        tokio::time::advance(MAX_FAILURE / 2).await;
        // The time counts from the first failure.
        freshness.fail(Kind::Grant, "forbidden".to_owned());
        freshness.fail(Kind::Pod, "broken".to_owned());
        tokio::time::advance(MAX_FAILURE / 2).await;
        assert_eq!(unreadable(), [(Kind::Grant, "forbidden".to_owned(), false)]);
        assert_eq!(unreadable(), [], "reported once");
        let metric = |kind, is_unreadable| (kind, is_unreadable);
        assert_eq!(
            freshness.unreadable(),
            [
                metric(Kind::Pod, false),
                metric(Kind::HttpRoute, false),
                metric(Kind::Grant, true)
            ]
        );
        freshness.confirm(Kind::Grant, 0);
        tokio::time::advance(MAX_FAILURE / 2).await;
        assert_eq!(unreadable(), [(Kind::Pod, "broken".to_owned(), true)]);
        assert_eq!(freshness.unreadable()[2], metric(Kind::Grant, false));
    }
}
