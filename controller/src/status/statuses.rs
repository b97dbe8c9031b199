//! The statuses of objects, and which of them may have changed, for the one who writes them.

use std::collections::BTreeSet;

use tokio::sync::watch;

use crate::object::{ObjectId, ObjectStatus, Withheld};

/// The desired statuses of the cluster, and their changes. It has one reader at a time.
pub trait Statuses: Send + Sync {
    /// The objects that may have a status.
    fn with_status(&self) -> BTreeSet<ObjectId>;

    /// The current status of an object, if it has one. One that is withheld counts as changed when
    /// it no longer is.
    fn get(&self, id: &ObjectId) -> Result<Option<ObjectStatus>, Withheld>;

    /// The objects whose status may have changed since their ids were last taken.
    fn changed(&self) -> &watch::Sender<BTreeSet<ObjectId>>;
}

/// The objects whose status may have changed since the last call.
pub(super) fn take_changed(statuses: &impl Statuses) -> BTreeSet<ObjectId> {
    let mut changed = BTreeSet::new();
    statuses.changed().send_if_modified(|all| {
        changed = std::mem::take(all);
        false
    });
    changed
}

/// Waits for a change.
pub(super) async fn wait_changed(statuses: &impl Statuses) {
    let mut changed = statuses.changed().subscribe();
    let waited = changed.wait_for(|all| !all.is_empty()).await;
    debug_assert!(waited.is_ok(), "the statuses hold the sender");
}
