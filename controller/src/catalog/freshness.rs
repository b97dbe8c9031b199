//! The age of the catalog: for each kind, the time since its source last confirmed that the objects
//! are current, and the number of invalid ones.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::index::object::Kind;

/// The age of a required kind above which the controller is not ready. A watch that works is
/// confirmed at least every three minutes.
pub const MAX_WATCH_AGE: Duration = Duration::from_secs(300);

/// The last confirmation of each kind, and the number of its objects that are ignored. Cheap to
/// clone.
#[derive(Clone, Debug, Default)]
pub struct Freshness(Arc<Mutex<BTreeMap<Kind, (Instant, usize)>>>);

impl Freshness {
    /// The objects of a kind are current. Of them, this number is invalid.
    pub fn confirm(&self, kind: Kind, ignored: usize) {
        self.lock().insert(kind, (Instant::now(), ignored));
    }

    /// The kind is not installed, and has no age.
    pub fn remove(&self, kind: Kind) {
        self.lock().remove(&kind);
    }

    /// The age of each kind that was confirmed at least once.
    pub fn ages(&self) -> Vec<(Kind, Duration)> {
        let confirmed = self.lock();
        let ages = confirmed
            .iter()
            .map(|(kind, (at, _))| (*kind, at.elapsed()));
        ages.collect()
    }

    /// The number of invalid objects of each kind that was confirmed at least once.
    pub fn ignored(&self) -> Vec<(Kind, usize)> {
        let confirmed = self.lock();
        let ignored = confirmed.iter().map(|(kind, (_, count))| (*kind, *count));
        ignored.collect()
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

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Kind, (Instant, usize)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
}
