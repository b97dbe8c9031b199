//! The knowledge of all subscribers, and the time when they learned it.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use tokio::sync::{OwnedSemaphorePermit, watch};

use super::cluster;

/// The progress of all subscribers.
pub struct Progress {
    endpoints: usize,
    restarts: watch::Sender<()>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// Subscribers that know all of their destinations.
    complete: usize,
    /// The latest change of the large Service.
    latest: usize,
    /// Subscribers that have received it.
    reached: usize,
    issued: Vec<Instant>,
    arrivals: Vec<Arrival>,
    targets: BTreeMap<usize, Vec<SocketAddr>>,
    failures: usize,
    last_failure: Option<String>,
}

/// A subscriber that had change `before` receives `change`.
#[derive(Clone, Copy)]
struct Arrival {
    before: usize,
    change: usize,
    at: Instant,
}

/// The progress of one subscriber. Dropping it means that the subscriber has lost its stream.
pub struct Position {
    progress: Arc<Progress>,
    /// The latest change, once the subscriber knows all of its destinations.
    change: Option<usize>,
    /// Held until then.
    connecting: Option<OwnedSemaphorePermit>,
}

impl Progress {
    /// No progress. The large Service has so many endpoints.
    pub fn new(endpoints: usize) -> Arc<Progress> {
        Arc::new(Progress {
            endpoints,
            restarts: watch::Sender::new(()),
            inner: Mutex::default(),
        })
    }

    /// The position of a subscriber with a new stream.
    pub fn position(self: &Arc<Self>, connecting: Option<OwnedSemaphorePermit>) -> Position {
        Position {
            progress: self.clone(),
            change: None,
            connecting,
        }
    }

    /// Reports a restart of the controller.
    pub fn restarted(&self) {
        self.restarts.send_replace(());
    }

    /// Notified after a restart of the controller.
    pub fn restarts(&self) -> watch::Receiver<()> {
        self.restarts.subscribe()
    }

    /// Records that the next change is made now. Returns its number.
    pub fn issue(&self) -> usize {
        let mut inner = self.lock();
        inner.latest += 1;
        inner.reached = 0;
        inner.issued.push(Instant::now());
        inner.latest
    }

    /// Subscribers that know all of their destinations.
    pub fn complete(&self) -> usize {
        self.lock().complete
    }

    /// Subscribers that have received the latest change.
    pub fn reached(&self) -> usize {
        self.lock().reached
    }

    /// Records the endpoints of the large Service that the discovery of a subscriber has.
    pub fn set_target(&self, subscriber: usize, addresses: Vec<SocketAddr>) {
        self.lock().targets.insert(subscriber, addresses);
    }

    /// The endpoints that the discoveries have.
    pub fn targets(&self) -> BTreeMap<usize, Vec<SocketAddr>> {
        self.lock().targets.clone()
    }

    /// Records a lost stream or a failed attempt.
    pub fn failed(&self, error: &anyhow::Error) {
        let mut inner = self.lock();
        inner.failures += 1;
        inner.last_failure = Some(format!("{error:#}"));
    }

    /// The number of failures, and the latest.
    pub fn failures(&self) -> String {
        let inner = self.lock();
        match &inner.last_failure {
            Some(error) => format!(
                "{} failures of subscribers, the last: {error}",
                inner.failures
            ),
            None => "no subscriber failed".to_owned(),
        }
    }

    /// For each of these changes and each subscriber: the time from the change until the subscriber
    /// has it.
    pub fn lags(&self, changes: std::ops::RangeInclusive<usize>) -> Vec<Vec<Duration>> {
        let inner = self.lock();
        let mut lags = vec![Vec::new(); changes.clone().count()];
        for arrival in &inner.arrivals {
            let new = arrival.before + 1..=arrival.change;
            for change in new.filter(|change| changes.contains(change)) {
                let lag = arrival
                    .at
                    .saturating_duration_since(inner.issued[change - 1]);
                lags[change - changes.start()].push(lag);
            }
        }
        lags.iter_mut().for_each(|lags| lags.sort_unstable());
        lags
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no holder of the lock panics")
    }
}

impl Position {
    /// Whether the subscriber knows all of its destinations.
    pub fn is_complete(&self) -> bool {
        self.change.is_some()
    }

    /// The subscriber has a stream: another one may connect.
    pub fn connected(&mut self) {
        self.connecting = None;
    }

    /// The subscriber knows all of its destinations.
    pub fn complete(&mut self) {
        self.connected();
        if self.change.is_none() {
            let mut inner = self.progress.lock();
            inner.complete += 1;
            self.change = Some(inner.latest);
        }
    }

    /// The subscriber has received these endpoints of the large Service.
    pub fn advance(&mut self, endpoints: impl Iterator<Item = SocketAddr>) {
        let Some(before) = self.change else { return };
        let all = self.progress.endpoints;
        let newest = endpoints
            .map(|address| cluster::change_of(address, all))
            .max();
        let change = newest.unwrap_or(0);
        if change <= before {
            return;
        }
        let at = Instant::now();
        let mut inner = self.progress.lock();
        inner.arrivals.push(Arrival { before, change, at });
        inner.reached += usize::from(change == inner.latest);
        self.change = Some(change);
    }
}

impl Drop for Position {
    fn drop(&mut self) {
        if self.change.is_some() {
            self.progress.lock().complete -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::cluster::Cluster;

    #[test]
    fn skipped_changes_arrive_with_the_next_one() {
        let (progress, mut cluster) = (Progress::new(10), Cluster::new(10, 5));
        let mut subscribers = [progress.position(None), progress.position(None)];
        subscribers.iter_mut().for_each(Position::complete);
        assert_eq!(progress.complete(), 2);
        for _ in 0..3 {
            progress.issue();
            cluster.change();
            subscribers[0].advance(cluster.addresses().into_iter());
        }
        assert_eq!(progress.reached(), 1);
        subscribers[1].advance(cluster.addresses().into_iter());
        assert_eq!(progress.reached(), 2);
        let lags = progress.lags(2..=3);
        assert_eq!(lags.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
        assert!(lags[0][1] > lags[1][0], "the older change waited longer");
        drop(subscribers);
        assert_eq!(progress.complete(), 0);
    }
}
