//! The state of the cluster as the writer knows it, and the statuses that it writes next. Pure
//! except for the clock.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher;

use super::schedule::Schedule;
use crate::object::{ObjectId, ObjectStatus, Withheld};

/// The statuses in the cluster, and the routes to write.
#[derive(Default)]
pub(super) struct Progress {
    /// As digests: the conditions of a route may be much larger than the route.
    written: BTreeMap<ObjectId, u64>,
    digests: RandomState,
    /// Routes whose status may differ from the one in the cluster.
    pending: BTreeSet<ObjectId>,
    /// Routes that the mesh does not know, and whose entries remain.
    removed: BTreeSet<ObjectId>,
    pub(super) schedule: Schedule,
}

impl Progress {
    /// The status of a route may have changed. One that is withheld changes again.
    pub(super) fn changed(
        &mut self,
        route: ObjectId,
        status: Result<Option<ObjectStatus>, Withheld>,
    ) {
        match status {
            Ok(status) if !self.is_written(&route, status.as_ref()) => {
                self.pending.insert(route);
            }
            _ => drop(self.pending.remove(&route)),
        }
    }

    /// The next routes to write, except failed ones that wait.
    pub(super) fn next_batch(&mut self) -> Vec<ObjectId> {
        self.schedule.next_batch(&self.pending.iter().collect())
    }

    /// The number of routes to write.
    pub(super) fn waiting(&self) -> usize {
        self.pending.len()
    }

    /// Whether the cluster has this status of a route.
    fn is_written(&self, route: &ObjectId, status: Option<&ObjectStatus>) -> bool {
        let written = self.written.get(route);
        match status {
            Some(status) => written == Some(&self.digests.hash_one(status)),
            None => written.is_none() && !self.removed.contains(route),
        }
    }

    /// The cluster has this status of a route.
    pub(super) fn succeeded(&mut self, route: ObjectId, status: Option<&ObjectStatus>) {
        self.schedule.succeeded(&route);
        self.removed.remove(&route);
        self.pending.remove(&route);
        match status {
            Some(status) => drop(self.written.insert(route, self.digests.hash_one(status))),
            None => drop(self.written.remove(&route)),
        }
    }

    /// The cluster has another status of a route than this one.
    pub(super) fn differs(&mut self, route: ObjectId, status: Option<&ObjectStatus>) {
        self.written.remove(&route);
        if status.is_none() {
            self.removed.insert(route.clone());
        }
        self.pending.insert(route);
    }
}
