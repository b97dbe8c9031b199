//! What the writer knows of the cluster, and which routes it writes next. Pure but for the clock.
//!
//! Namespaces take turns: a namespace with many routes to write delays those of another one by one
//! write for each of its own. A namespace whose writes time out, for example at a webhook, waits.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_runtime::Backoff;
use tokio::time::Instant;

use super::{MAX_RETRY_INTERVAL, MIN_RETRY_INTERVAL, Route};
use crate::routes::RouteStatus;

/// Routes that are written before the statuses are read again.
const MAX_BATCH: usize = 50;

/// The statuses in the cluster, and the routes to write.
#[derive(Default)]
pub(super) struct Progress {
    /// As digests: the conditions of a route may be much larger than the route.
    written: BTreeMap<Route, u64>,
    digests: RandomState,
    /// Routes that the mesh no longer knows, and whose entries may remain.
    removed: BTreeSet<Route>,
    failed: BTreeMap<Route, (Instant, Backoff)>,
    /// Namespaces whose latest write has timed out.
    slow: BTreeMap<Arc<str>, (Instant, Backoff)>,
    next_retry: Option<Instant>,
    turns: Turns,
}

/// Whose turn it is: the next namespace, and in it the next route, come after the last ones.
#[derive(Default)]
struct Turns {
    namespace: Arc<str>,
    /// The last route of each namespace with routes to write.
    routes: BTreeMap<Arc<str>, Route>,
}

impl Progress {
    /// The next routes whose status differs from the desired one, except failed ones that wait.
    pub(super) fn next_batch(&mut self, desired: &BTreeMap<Route, RouteStatus>) -> Vec<Route> {
        let is_gone = |route: &&Route| !desired.contains_key(*route);
        let known = self.written.keys().chain(self.failed.keys());
        self.removed.extend(known.filter(is_gone).cloned());
        self.written.retain(|route, _| desired.contains_key(route));
        let differs = |(route, status): &(&Route, &RouteStatus)| {
            let written = self.written.get(*route);
            written.is_none_or(|digest| *digest != self.digests.hash_one(status))
        };
        let changed = desired.iter().filter(differs).map(|(route, _)| route);
        let removed = self.removed.iter().filter(is_gone);
        let all: Vec<&Route> = changed.chain(removed).collect();
        let namespaces: BTreeSet<_> = all.iter().map(|route| &route.1.namespace).collect();
        self.slow
            .retain(|namespace, _| namespaces.contains(namespace));
        let (mut due, now) = (Vec::new(), Instant::now());
        self.next_retry = None;
        for route in all {
            let failure = self.failed.get(route).map(|(retry, _)| *retry);
            let slow = self.slow.get(&route.1.namespace).map(|(retry, _)| *retry);
            match failure.max(slow).filter(|retry| *retry > now) {
                None => due.push(route),
                retry => self.next_retry = [retry, self.next_retry].into_iter().flatten().min(),
            }
        }
        self.turns.take(due.into_iter(), MAX_BATCH)
    }

    /// The time of the next attempt to write a route that waits.
    pub(super) fn next_retry(&self) -> Option<Instant> {
        self.next_retry
    }

    /// Whether the writes of a namespace time out, so that further ones would delay other namespaces.
    pub(super) fn is_slow(&self, namespace: &str) -> bool {
        let slow = self.slow.get(namespace);
        slow.is_some_and(|(retry, _)| *retry > Instant::now())
    }

    /// The cluster has this status of a route.
    pub(super) fn succeeded(&mut self, route: Route, status: Option<&RouteStatus>) {
        self.failed.remove(&route);
        self.slow.remove(&route.1.namespace);
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

    /// A write of this status has failed. Returns the time until the next attempt.
    pub(super) fn failed(
        &mut self,
        route: &Route,
        status: Option<&RouteStatus>,
        is_timeout: bool,
    ) -> Duration {
        self.differs(route.clone(), status);
        if is_timeout {
            delay(&mut self.slow, &route.1.namespace);
        }
        delay(&mut self.failed, route)
    }
}

/// Delays the next attempt, longer after each failure.
fn delay<K: Clone + Ord>(failed: &mut BTreeMap<K, (Instant, Backoff)>, key: &K) -> Duration {
    let new = || Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
    let mut backoff = failed.remove(key).map_or_else(new, |(_, backoff)| backoff);
    let delay = backoff.next_delay();
    failed.insert(key.clone(), (Instant::now() + delay, backoff));
    delay
}

impl Turns {
    /// Takes up to `max` of the routes: one of each namespace, then the second ones.
    fn take<'a>(&mut self, due: impl Iterator<Item = &'a Route>, max: usize) -> Vec<Route> {
        let mut namespaces: BTreeMap<&Arc<str>, BTreeSet<&Route>> = BTreeMap::new();
        for route in due {
            let of_namespace = namespaces.entry(&route.1.namespace).or_default();
            of_namespace.insert(route);
        }
        self.routes
            .retain(|namespace, _| namespaces.contains_key(namespace));
        let queues = namespaces.into_iter().map(|(namespace, routes)| {
            let mut queue: VecDeque<&Route> = routes.into_iter().collect();
            let last = self.routes.get(namespace);
            queue.rotate_left(queue.partition_point(|route| Some(*route) <= last));
            (namespace, queue)
        });
        let mut queues: VecDeque<_> = queues.collect();
        let last = &self.namespace;
        queues.rotate_left(queues.partition_point(|(namespace, _)| *namespace <= last));
        let mut taken = Vec::new();
        while let Some((namespace, mut queue)) = queues.pop_front()
            && taken.len() < max
        {
            if let Some(route) = queue.pop_front() {
                taken.push(route.clone());
                queues.push_back((namespace, queue));
            }
        }
        for route in &taken {
            self.namespace = route.1.namespace.clone();
            self.routes.insert(route.1.namespace.clone(), route.clone());
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::object::Key;
    use crate::routes::testing::KIND;

    /// Takes routes, each as `NAMESPACE/NAME`.
    fn take(turns: &mut Turns, due: &[&str], max: usize) -> Vec<String> {
        let route = |text: &&str| {
            let (namespace, name) = text.split_once('/').unwrap();
            Route(KIND, Key::new(namespace, name))
        };
        let due: Vec<Route> = due.iter().map(route).collect();
        let taken = turns.take(due.iter(), max);
        taken.iter().map(|route| route.1.to_string()).collect()
    }

    #[test]
    fn namespaces_and_their_routes_take_turns() {
        let mut turns = Turns::default();
        let all = ["a/1", "a/2", "a/3", "b/1", "c/1", "c/2"];
        assert_eq!(
            take(&mut turns, &all, 100),
            ["a/1", "b/1", "c/1", "a/2", "c/2", "a/3"]
        );
        assert_eq!(take(&mut turns, &all, 2), ["b/1", "c/1"]);
        assert_eq!(take(&mut turns, &all, 2), ["a/1", "b/1"]);
        assert_eq!(take(&mut turns, &all, 3), ["c/2", "a/2", "b/1"]);
        assert_eq!(take(&mut turns, &["a/3"], 2), ["a/3"]);
        assert_eq!(take(&mut turns, &["a/1", "a/2"], 1), ["a/1"]);
        assert_eq!(take(&mut turns, &[], 2), [""; 0]);
        assert!(turns.routes.is_empty(), "no namespace has routes to write");
    }
}
