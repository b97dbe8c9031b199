//! Which objects are written next. Pure but for the clock.
//!
//! Namespaces take turns: a namespace with many objects delays each write for another namespace by
//! one write. An object whose write fails waits, and does not delay others. A namespace whose
//! writes time out, for example at a webhook, waits as a whole.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_runtime::Backoff;
use tokio::time::Instant;

use super::{Error, MAX_RETRY_INTERVAL, MIN_RETRY_INTERVAL};
use crate::api::ApiError;
use crate::object::{Kind, ObjectId};

/// Objects that are written before their states are read again.
const MAX_BATCH: usize = 50;

/// The turns of namespaces and objects, and the objects that wait.
#[derive(Default)]
pub(super) struct Schedule {
    failed: BTreeMap<ObjectId, (Instant, Backoff)>,
    /// Namespaces whose latest write has timed out.
    slow: BTreeMap<Arc<str>, (Instant, Backoff)>,
    /// Kinds whose latest write was not permitted.
    forbidden: BTreeSet<Kind>,
    next_retry: Option<Instant>,
    turns: Turns,
}

/// The last turns: the next namespace, and in it the next object, come after the last ones.
#[derive(Default)]
struct Turns {
    namespace: Arc<str>,
    /// The last object of each namespace with objects to write.
    objects: BTreeMap<Arc<str>, ObjectId>,
}

impl Schedule {
    /// The next ones of all objects that are to be written, except failed ones that wait.
    pub(super) fn next_batch(&mut self, all: &BTreeSet<&ObjectId>) -> Vec<ObjectId> {
        let namespaces: BTreeSet<_> = all.iter().map(|object| &object.1.namespace).collect();
        self.failed.retain(|object, _| all.contains(object));
        self.slow
            .retain(|namespace, _| namespaces.contains(namespace));
        let (mut due, now) = (Vec::new(), Instant::now());
        self.next_retry = None;
        for object in all {
            let failure = self.failed.get(object).map(|(retry, _)| *retry);
            let slow = self.slow.get(&object.1.namespace).map(|(retry, _)| *retry);
            match failure.max(slow).filter(|retry| *retry > now) {
                None => due.push(*object),
                retry => self.next_retry = [retry, self.next_retry].into_iter().flatten().min(),
            }
        }
        self.turns.take(due.into_iter(), MAX_BATCH)
    }

    /// The time of the next attempt to write an object that waits, `latest` at the latest.
    pub(super) fn next_retry(&self, latest: Instant) -> Instant {
        self.next_retry.map_or(latest, |retry| retry.min(latest))
    }

    /// Whether the writes of a namespace time out, so that further ones would delay other namespaces.
    pub(super) fn is_slow(&self, namespace: &str) -> bool {
        let slow = self.slow.get(namespace);
        slow.is_some_and(|(retry, _)| *retry > Instant::now())
    }

    /// The cluster has the state of an object.
    pub(super) fn succeeded(&mut self, object: &ObjectId) {
        self.failed.remove(object);
        self.slow.remove(&object.1.namespace);
        self.forbidden.remove(&object.0);
    }

    /// A write of an object has failed. Returns the time until the next attempt, and whether to log
    /// the error: without the permission, each object of the kind fails alike.
    pub(super) fn fail(&mut self, object: &ObjectId, error: &Error) -> (Duration, bool) {
        if matches!(error, Error::Api(ApiError::Timeout)) {
            delay(&mut self.slow, &object.1.namespace);
        }
        let is_forbidden = matches!(error, Error::Api(error) if error.is(403));
        let should_log = !is_forbidden || self.forbidden.insert(object.0);
        (delay(&mut self.failed, object), should_log)
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
    /// Takes up to `max` of the objects: one of each namespace, then the second ones.
    fn take<'a>(&mut self, due: impl Iterator<Item = &'a ObjectId>, max: usize) -> Vec<ObjectId> {
        let mut namespaces: BTreeMap<&Arc<str>, BTreeSet<&ObjectId>> = BTreeMap::new();
        for route in due {
            let of_namespace = namespaces.entry(&route.1.namespace).or_default();
            of_namespace.insert(route);
        }
        self.objects
            .retain(|namespace, _| namespaces.contains_key(namespace));
        let queues = namespaces.into_iter().map(|(namespace, routes)| {
            let mut queue: VecDeque<&ObjectId> = routes.into_iter().collect();
            let last = self.objects.get(namespace);
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
            self.objects
                .insert(route.1.namespace.clone(), route.clone());
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Key;
    use crate::status::testing::KIND;

    /// Takes routes, each as `NAMESPACE/NAME`.
    fn take(turns: &mut Turns, due: &[&str], max: usize) -> Vec<String> {
        let route = |text: &&str| {
            let (namespace, name) = text.split_once('/').unwrap();
            (KIND, Key::new(namespace, name))
        };
        let due: Vec<ObjectId> = due.iter().map(route).collect();
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
        assert!(turns.objects.is_empty(), "no namespace has routes to write");
    }
}
