//! What the writer knows of the cluster, and which statuses it writes next. Pure but for the clock.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher;

use super::Route;
use super::schedule::Schedule;
use crate::routes::RouteStatus;

/// The statuses in the cluster, and the routes to write.
#[derive(Default)]
pub(super) struct Progress {
    /// As digests: the conditions of a route may be much larger than the route.
    written: BTreeMap<Route, u64>,
    digests: RandomState,
    /// Routes that the mesh no longer knows, and whose entries may remain.
    removed: BTreeSet<Route>,
    pub(super) schedule: Schedule,
}

impl Progress {
    /// The next routes whose status differs from the desired one, except failed ones that wait.
    pub(super) fn next_batch(&mut self, desired: &BTreeMap<Route, RouteStatus>) -> Vec<Route> {
        let is_gone = |route: &&Route| !desired.contains_key(*route);
        let known = self.written.keys().chain(self.schedule.failed_objects());
        self.removed.extend(known.filter(is_gone).cloned());
        self.written.retain(|route, _| desired.contains_key(route));
        let differs = |(route, status): &(&Route, &RouteStatus)| {
            let written = self.written.get(*route);
            written.is_none_or(|digest| *digest != self.digests.hash_one(status))
        };
        let changed = desired.iter().filter(differs).map(|(route, _)| route);
        let removed = self.removed.iter().filter(is_gone);
        self.schedule.next_batch(&changed.chain(removed).collect())
    }

    /// The cluster has this status of a route.
    pub(super) fn succeeded(&mut self, route: Route, status: Option<&RouteStatus>) {
        self.schedule.succeeded(&route);
        self.removed.remove(&route);
        match status {
            Some(status) => drop(self.written.insert(route, self.digests.hash_one(status))),
            None => drop(self.written.remove(&route)),
        }
    }

    /// The cluster has another status of a route than this one.
    pub(super) fn differs(&mut self, route: Route, status: Option<&RouteStatus>) {
        self.written.remove(&route);
        if status.is_none() {
            self.removed.insert(route);
        }
    }
}
