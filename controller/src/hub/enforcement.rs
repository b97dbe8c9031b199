//! The clients that lack capabilities, and the conditions of the routes and policies that they do
//! not apply.
//!
//! Only these clients are registered: without them, nothing is done. A review takes the locks
//! once per pod, and its work per pod is bounded by the quota of subscriptions.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use super::{Hub, Resources};
use crate::authenticate::PodRef;
use crate::index::enforcement::{Missing, Subject};
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
        if self.reports().update(Instant::now(), &found) {
            self.routed.send_replace(());
        }
    }

    /// The routes and policies that connected proxies do not apply, with the pods of these proxies.
    async fn unenforced(&self) -> BTreeMap<Subject, Pods> {
        let mut found: BTreeMap<Subject, Pods> = BTreeMap::new();
        let clients = self.subscribers().with_missing();
        for (pod, streams) in clients {
            for subject in self.not_applied(&pod, streams) {
                let namespace = subject.key.namespace.clone();
                let pods = found.entry(subject).or_default();
                pods.add(&pod.key(), &namespace);
            }
            // Streams and changes of the catalog come first.
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
