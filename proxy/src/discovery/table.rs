//! The destinations that this proxy has met: what is known of each, which version it is, who still listens. Pure: answers
//! and instants go in, new values go to the listeners and requests for the controller come out.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1::discover_request::Action;
use diy_mesh_proto::mesh::v1::discover_response::Update;
use diy_mesh_proto::mesh::v1::{DiscoverRequest, DiscoverResponse, Subscribe, Unsubscribe};
use tokio::sync::watch;
use tokio::time::Instant;

use super::target::{self, Target};

/// See the file's head.
pub(super) struct Table {
    entries: HashMap<SocketAddr, Entry>,
    limit: usize,
}

/// A listener's end, and whether there is an answer to wait for: its first notification.
#[derive(Debug)]
pub(super) struct Watched {
    pub receiver: watch::Receiver<Arc<Target>>,
    pub settled: bool,
}

/// The table is full.
#[derive(Debug)]
pub(super) struct Full;

struct Entry {
    listeners: watch::Sender<Arc<Target>>,
    /// Of the state that the listeners have; empty: nothing to resume from.
    version: String,
    phase: Phase,
    /// The controller has answered, ever: what the listeners have is an answer.
    answered: bool,
    unused_since: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    /// Subscribed, or to be once there is a stream; the next answer is no delta.
    Asked,
    /// Deltas apply.
    Current,
    /// An answer could not be applied: the next sweep asks for a snapshot.
    Lost,
}

impl Table {
    pub fn new(limit: usize) -> Self {
        Self { entries: HashMap::new(), limit }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// A listener for `destination`, and the request to send where it is new.
    pub fn watch(&mut self, destination: SocketAddr) -> Result<(Watched, Option<DiscoverRequest>), Full> {
        let destination = target::canonical(destination);
        if let Some(entry) = self.entries.get_mut(&destination) {
            entry.unused_since = None;
            return Ok((Watched { receiver: entry.listeners.subscribe(), settled: entry.answered }, None));
        }
        if self.entries.len() >= self.limit {
            return Err(Full);
        }
        let (listeners, receiver) = watch::channel(Arc::new(Target::Unknown));
        let entry = Entry { listeners, version: String::new(), phase: Phase::Asked, answered: false, unused_since: None };
        let request = subscribe(destination, &entry);
        self.entries.insert(destination, entry);
        Ok((Watched { receiver, settled: false }, Some(request)))
    }

    /// Takes an answer in. `report` hears what is wrong with it; what is right counts all the same. Answers about what nobody
    /// watches any more cross our unsubscription on the wire and are no fault.
    pub fn apply(&mut self, answer: DiscoverResponse, report: &mut dyn FnMut(String)) {
        let DiscoverResponse { destination, version, update } = answer;
        let Ok(address) = destination.parse::<SocketAddr>() else {
            return report(format!("an answer about {destination:?}, which is no address"));
        };
        let address = target::canonical(address);
        if let Some(entry) = self.entries.get_mut(&address) {
            entry.apply(address, version, update, &mut |problem| report(format!("{address}: {problem}")));
        }
    }

    /// The controller can't be asked now: those who wait for a first answer need not.
    pub fn stop_waiting(&self) {
        for entry in self.entries.values().filter(|entry| !entry.answered) {
            entry.listeners.send_modify(|_| {});
        }
    }

    /// What to send on a new stream: a subscription for each destination that somebody watches, with the version that
    /// the listeners have. The others are forgotten if it is time.
    pub fn resume(&mut self, now: Instant, idle: Duration) -> Vec<DiscoverRequest> {
        self.mark_unused(now);
        self.entries.retain(|_, entry| !entry.is_idle(now, idle));
        let ask = |(address, entry): (&SocketAddr, &mut Entry)| {
            entry.phase = Phase::Asked;
            subscribe(*address, entry)
        };
        self.entries.iter_mut().map(ask).collect()
    }

    /// Forgets what nobody has watched for the time `idle`, and asks anew for what was lost. To be called while there is a stream:
    /// without one what is known is all that there is, and is kept.
    pub fn sweep(&mut self, now: Instant, idle: Duration) -> Vec<DiscoverRequest> {
        self.mark_unused(now);
        let mut requests = Vec::new();
        self.entries.retain(|address, entry| {
            if entry.is_idle(now, idle) {
                requests.push(unsubscribe(*address));
                return false;
            }
            if entry.phase == Phase::Lost {
                entry.phase = Phase::Asked;
                requests.extend([unsubscribe(*address), subscribe(*address, entry)]);
            }
            true
        });
        if self.entries.len() < self.entries.capacity() / 4 {
            self.entries.shrink_to_fit();
        }
        requests
    }

    fn mark_unused(&mut self, now: Instant) {
        for entry in self.entries.values_mut() {
            entry.unused_since = if entry.listeners.receiver_count() > 0 { None } else { entry.unused_since.or(Some(now)) };
        }
    }
}

impl Entry {
    fn apply(&mut self, address: SocketAddr, version: String, update: Option<Update>, report: &mut dyn FnMut(String)) {
        let mut flaws = 0;
        let mut note = |problem: String| {
            flaws += 1;
            report(problem);
        };
        let next = match update {
            Some(Update::Snapshot(snapshot)) => target::from_snapshot(address, snapshot, &mut note),
            Some(Update::Unknown(_)) => Ok(Target::Unknown),
            Some(Update::Unchanged(_)) if self.answered && !self.version.is_empty() => {
                self.phase = Phase::Current;
                return;
            }
            Some(Update::Unchanged(_)) => Err("unchanged, though nothing was known".to_owned()),
            Some(Update::Delta(_)) if self.phase == Phase::Lost => return,
            Some(Update::Delta(_)) if self.phase == Phase::Asked => Err("a delta before any snapshot".to_owned()),
            Some(Update::Delta(delta)) => {
                let before = self.listeners.borrow().clone();
                let next = target::with_delta(&before, delta, &mut note);
                if flaws > 0 {
                    self.publish(next.unwrap_or_else(|_| Target::clone(&before)), version);
                    return self.lose();
                }
                next
            }
            // What a newer controller says and this proxy can't read changes nothing.
            None => return report("an answer of a kind that this version does not know".to_owned()),
        };
        match next {
            Ok(target) => self.publish(target, version),
            Err(problem) => {
                report(problem);
                self.lose();
            }
        }
    }

    fn publish(&mut self, target: Target, version: String) {
        self.listeners.send_replace(Arc::new(target));
        self.version = version;
        self.phase = Phase::Current;
        self.answered = true;
    }

    /// What the listeners have stays, and a snapshot is due. Nobody waits for it.
    fn lose(&mut self) {
        self.phase = Phase::Lost;
        self.version = String::new();
        if !self.answered {
            self.listeners.send_modify(|_| {});
        }
    }

    fn is_idle(&self, now: Instant, idle: Duration) -> bool {
        self.unused_since.is_some_and(|since| now.saturating_duration_since(since) >= idle)
    }
}

fn subscribe(destination: SocketAddr, entry: &Entry) -> DiscoverRequest {
    let action = Action::Subscribe(Subscribe { destination: destination.to_string(), known_version: entry.version.clone() });
    DiscoverRequest { action: Some(action) }
}

fn unsubscribe(destination: SocketAddr) -> DiscoverRequest {
    DiscoverRequest { action: Some(Action::Unsubscribe(Unsubscribe { destination: destination.to_string() })) }
}
