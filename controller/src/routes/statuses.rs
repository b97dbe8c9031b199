//! The statuses of objects, and which of them may have changed, for the one who writes them.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::watch;

use super::RouteStatus;
use super::attach::RouteId;

/// The status of an object may be another one with objects that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Withheld;

/// Who computes statuses.
pub trait Source: Send + Sync {
    /// The objects that may have a status.
    fn with_status(&self) -> BTreeSet<RouteId>;

    /// The current status of an object, if it has one. One that is withheld counts as changed when
    /// it no longer is.
    fn get(&self, id: &RouteId) -> Result<Option<RouteStatus>, Withheld>;

    /// The objects whose status may have changed since their ids were last taken.
    fn changed(&self) -> watch::Sender<BTreeSet<RouteId>>;
}

/// What the cluster is to contain, and what has changed. It has one reader at a time.
#[derive(Clone)]
pub struct Statuses(Arc<dyn Source>);

impl Statuses {
    /// The statuses of a source.
    pub fn new(source: impl Source + 'static) -> Statuses {
        Statuses(Arc::new(source))
    }

    /// All objects that may have a status.
    pub(super) fn all(&self) -> BTreeSet<RouteId> {
        self.0.with_status()
    }

    /// The current status of an object, if it has one.
    pub(super) fn get(&self, id: &RouteId) -> Result<Option<RouteStatus>, Withheld> {
        self.0.get(id)
    }

    /// The objects whose status may have changed since the last call.
    pub(super) fn take_changed(&self) -> BTreeSet<RouteId> {
        let mut changed = BTreeSet::new();
        self.0.changed().send_if_modified(|all| {
            changed = std::mem::take(all);
            false
        });
        changed
    }

    /// Waits for a change.
    pub(super) async fn changed(&self) {
        let mut changed = self.0.changed().subscribe();
        let waited = changed.wait_for(|all| !all.is_empty()).await;
        debug_assert!(waited.is_ok(), "the source holds the sender");
    }
}
