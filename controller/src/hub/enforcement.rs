//! The conditions of the routes and policies that the proxies of pods do not apply: those of clients
//! that lack capabilities, and those of pods with too many rate limits.
//!
//! Without such clients and namespaces, nothing is done. A review takes the locks once per pod, and
//! its work per pod is bounded by the quota of subscriptions, and by the Services of the namespace.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use super::{Hub, Resources};
use crate::authenticate::PodRef;
use crate::index::enforcement::{Missing, Subject};
use crate::index::object::Key;
use crate::routes::enforcement::Pods;

/// Time between two reviews.
const REVIEW_INTERVAL: Duration = Duration::from_secs(10);

impl Resources {
    /// Registers the client if its proxy lacks capabilities. Clients without a pod are tools.
    pub fn set_missing(&mut self, missing: Missing) {
        self.hub.subscribers().set_missing(self.id, missing);
    }
}

impl Hub {
    /// Updates the conditions of routes and policies that connected proxies do not apply, until it
    /// is dropped.
    pub async fn review_enforcement(&self) -> Infallible {
        let mut ticks = interval(REVIEW_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.review().await;
        }
    }

    /// Updates the conditions once.
    pub(crate) async fn review(&self) {
        let found = self.unenforced().await;
        let changed = self.reports().update(Instant::now(), &found);
        self.mark_statuses(changed);
    }

    /// The routes and policies that proxies do not apply, with the pods of these proxies.
    async fn unenforced(&self) -> BTreeMap<Subject, Pods> {
        let mut found = BTreeMap::new();
        let clients = self.subscribers().with_missing();
        for (pod, streams) in clients {
            add(&mut found, self.not_applied(&pod, streams), &pod.key());
            // Streams and changes of the catalog come first.
            tokio::task::yield_now().await;
        }
        let pods = self.index().pods_with_many_limits();
        for pod in pods {
            add(&mut found, self.index().omitted_limits(&pod), &pod);
            tokio::task::yield_now().await;
        }
        found
    }

    fn not_applied(&self, pod: &PodRef, streams: Vec<(u64, Missing)>) -> BTreeSet<Subject> {
        let index = self.index();
        let subjects = streams.into_iter().flat_map(|(id, missing)| {
            let used = self.subscribers().used(id);
            index.not_applied(pod, missing, used)
        });
        subjects.collect()
    }
}

fn add(found: &mut BTreeMap<Subject, Pods>, subjects: BTreeSet<Subject>, pod: &Key) {
    for subject in subjects {
        let namespace = subject.key.namespace.clone();
        found.entry(subject).or_default().add(pod, &namespace);
    }
}
