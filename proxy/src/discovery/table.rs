//! The destinations that this proxy has met: what is known of each, which version it is, who still listens. Pure: answers
//! and instants go in, new values go to the listeners and requests for the controller come out.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1::discover_request::Action;
use diy_mesh_proto::mesh::v1::discover_response::Update;
use diy_mesh_proto::mesh::v1::{
    DiscoverRequest, DiscoverResponse, Endpoint, Subscribe, Unsubscribe,
};
use tokio::sync::watch;
use tokio::time::Instant;

use super::target::{self, Target};

/// Addresses of meshed destinations that are remembered when all else of them is forgotten: about 2 MB.
const MAX_REMEMBERED: usize = 50_000;

/// See the file's head.
pub(super) struct Table {
    entries: HashMap<SocketAddr, Entry>,
    were_meshed: WereMeshed,
    limit: usize,
}

/// The forgotten destinations that led to meshed pods when they were last heard of. None is ever dropped to make room: once there are
/// too many, every destination counts as one of them. The pod's application can get there, by a scan of a meshed pod's ports; what it
/// gains is that unknown destinations are refused while the controller is unavailable.
struct WereMeshed {
    addresses: HashSet<SocketAddr>,
    limit: usize,
    is_incomplete: bool,
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
    /// It leads to meshed pods, as far as the controller has said. A Service that has no endpoint now is what it was with its last.
    meshed: bool,
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
        let were_meshed = WereMeshed {
            addresses: HashSet::new(),
            limit: MAX_REMEMBERED,
            is_incomplete: false,
        };
        Self {
            entries: HashMap::new(),
            were_meshed,
            limit,
        }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// A listener for `destination`, and the requests to send where it is new.
    pub fn watch(
        &mut self,
        destination: SocketAddr,
    ) -> Result<(Watched, Vec<DiscoverRequest>), Full> {
        let destination = target::canonical(destination);
        if let Some(entry) = self.entries.get_mut(&destination) {
            entry.unused_since = None;
            return Ok((
                Watched {
                    receiver: entry.listeners.subscribe(),
                    settled: entry.answered,
                },
                Vec::new(),
            ));
        }
        let mut requests = if self.entries.len() < self.limit {
            Vec::new()
        } else {
            self.make_room()
        };
        if self.entries.len() >= self.limit {
            return Err(Full);
        }
        // Until the controller says otherwise, what was meshed is not spoken to in the clear.
        let meshed = self.were_meshed.addresses.remove(&destination);
        let withheld = meshed || self.were_meshed.is_incomplete;
        let (listeners, receiver) = watch::channel(Arc::new(if withheld {
            Target::Withheld
        } else {
            Target::Unknown
        }));
        let entry = Entry {
            listeners,
            version: String::new(),
            phase: Phase::Asked,
            answered: false,
            meshed,
            unused_since: None,
        };
        requests.push(subscribe(destination, &entry));
        self.entries.insert(destination, entry);
        Ok((
            Watched {
                receiver,
                settled: false,
            },
            requests,
        ))
    }

    /// Forgets what nobody watches. What is meshed stays until the next sweep, which comes only while there is a stream: without one it
    /// could not be asked for anew, and would not be reached.
    fn make_room(&mut self) -> Vec<DiscoverRequest> {
        let unneeded = |entry: &Entry| entry.listeners.receiver_count() == 0 && !entry.meshed;
        self.entries
            .extract_if(|_, entry| unneeded(entry))
            .map(|(address, _)| unsubscribe(address))
            .collect()
    }

    /// Takes an answer in. `report` hears what is wrong with it; what is right counts all the same. Answers about what nobody
    /// watches any more cross our unsubscription on the wire and are no fault.
    pub fn apply(&mut self, answer: DiscoverResponse, report: &mut dyn FnMut(String)) {
        let DiscoverResponse {
            destination,
            version,
            update,
        } = answer;
        let Ok(address) = destination.parse::<SocketAddr>() else {
            return report(format!(
                "an answer about {destination:?}, which is no address"
            ));
        };
        let address = target::canonical(address);
        if let Some(entry) = self.entries.get_mut(&address) {
            entry.apply(address, version, update, &mut |problem| {
                report(format!("{address}: {problem}"))
            });
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
        self.forget_idle(now, idle);
        let ask = |(address, entry): (&SocketAddr, &mut Entry)| {
            entry.phase = Phase::Asked;
            subscribe(*address, entry)
        };
        self.entries.iter_mut().map(ask).collect()
    }

    /// Forgets what nobody has watched for the time `idle`, sooner where the table is full, and asks anew for what was
    /// lost. To be called while there is a stream: without one what is known is all that there is, and is kept.
    pub fn sweep(&mut self, now: Instant, idle: Duration) -> Vec<DiscoverRequest> {
        self.mark_unused(now);
        let idle = if self.entries.len() < self.limit {
            idle
        } else {
            Duration::ZERO
        };
        let mut requests: Vec<_> = self
            .forget_idle(now, idle)
            .into_iter()
            .map(unsubscribe)
            .collect();
        for (address, entry) in self
            .entries
            .iter_mut()
            .filter(|(_, entry)| entry.phase == Phase::Lost)
        {
            entry.phase = Phase::Asked;
            requests.extend([unsubscribe(*address), subscribe(*address, entry)]);
        }
        if self.entries.len() < self.entries.capacity() / 4 {
            self.entries.shrink_to_fit();
        }
        requests
    }

    /// Forgets what nobody has watched for the time `idle`, but not which of them were meshed.
    fn forget_idle(&mut self, now: Instant, idle: Duration) -> Vec<SocketAddr> {
        let forgotten = self.entries.extract_if(|_, entry| entry.is_idle(now, idle));
        let remember = |(address, entry): (SocketAddr, Entry)| {
            if entry.meshed {
                self.were_meshed.insert(address);
            }
            address
        };
        forgotten.map(remember).collect()
    }

    fn mark_unused(&mut self, now: Instant) {
        for entry in self.entries.values_mut() {
            entry.unused_since = if entry.listeners.receiver_count() > 0 {
                None
            } else {
                entry.unused_since.or(Some(now))
            };
        }
    }
}

impl WereMeshed {
    fn insert(&mut self, address: SocketAddr) {
        if self.addresses.len() < self.limit {
            self.addresses.insert(address);
        } else {
            self.is_incomplete = true;
        }
    }
}

impl Entry {
    fn apply(
        &mut self,
        address: SocketAddr,
        version: String,
        update: Option<Update>,
        report: &mut dyn FnMut(String),
    ) {
        let mut flaws = 0;
        let mut note = |problem: String| {
            flaws += 1;
            report(problem);
        };
        let next = match update {
            Some(Update::Snapshot(snapshot)) => {
                // Also if its identity cannot be read.
                let is_meshed = |endpoint: &Endpoint| !endpoint.identity.is_empty();
                if !self.answered && snapshot.endpoints.iter().any(is_meshed) {
                    self.meshed = true;
                    self.listeners.send_replace(Arc::new(Target::Withheld));
                }
                target::from_snapshot(address, snapshot, &mut note)
            }
            // A replica that lags behind does not know it yet, or any more.
            Some(Update::Unknown(_)) if self.meshed => Ok(Target::Withheld),
            Some(Update::Unknown(_)) => Ok(Target::Unknown),
            Some(Update::Unchanged(_)) if self.answered && !self.version.is_empty() => {
                self.phase = Phase::Current;
                return;
            }
            Some(Update::Unchanged(_)) => Err("unchanged, though nothing was known".to_owned()),
            Some(Update::Delta(_)) if self.phase == Phase::Lost => return,
            Some(Update::Delta(_)) if self.phase == Phase::Asked => {
                Err("a delta before any snapshot".to_owned())
            }
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
            Some(Update::Roots(_)) | None => {
                return report("an answer of a kind that this version does not know".to_owned());
            }
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
        if !target.is_without_endpoint() {
            self.meshed = target.is_meshed();
        }
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
        self.unused_since
            .is_some_and(|since| now.saturating_duration_since(since) >= idle)
    }
}

fn subscribe(destination: SocketAddr, entry: &Entry) -> DiscoverRequest {
    let action = Action::Subscribe(Subscribe {
        destination: destination.to_string(),
        known_version: entry.version.clone(),
    });
    DiscoverRequest {
        action: Some(action),
    }
}

fn unsubscribe(destination: SocketAddr) -> DiscoverRequest {
    DiscoverRequest {
        action: Some(Action::Unsubscribe(Unsubscribe {
            destination: destination.to_string(),
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diy_mesh_proto::mesh::v1::snapshot::Kind;
    use diy_mesh_proto::mesh::v1::{Delta, Snapshot, Unchanged, Unknown};

    const MINUTE: Duration = Duration::from_secs(60);

    fn table() -> Table {
        Table::new(100)
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn endpoint(address: &str) -> Endpoint {
        Endpoint {
            address: address.to_owned(),
            pod_name: "pod".to_owned(),
            pod_namespace: "shop".to_owned(),
            ..Endpoint::default()
        }
    }

    fn snapshot(kind: Kind, addresses: &[&str]) -> Update {
        let endpoints = addresses.iter().map(|address| endpoint(address)).collect();
        let (namespace, name) = ("shop".to_owned(), "cart".to_owned());
        Update::Snapshot(Snapshot {
            kind: kind.into(),
            namespace,
            name,
            app_protocol: String::new(),
            endpoints,
        })
    }

    fn delta(upserted: &[&str], removed: &[&str]) -> Update {
        let upserted = upserted.iter().map(|address| endpoint(address)).collect();
        Update::Delta(Delta {
            upserted,
            removed: removed.iter().map(ToString::to_string).collect(),
        })
    }

    /// Applies an answer about 10.96.0.7:80, returns what was wrong with it.
    fn apply(table: &mut Table, version: &str, update: impl Into<Option<Update>>) -> Vec<String> {
        let mut problems = Vec::new();
        let answer = DiscoverResponse {
            destination: "10.96.0.7:80".to_owned(),
            version: version.to_owned(),
            update: update.into(),
        };
        table.apply(answer, &mut |problem| problems.push(problem));
        problems
    }

    fn addresses(receiver: &watch::Receiver<Arc<Target>>) -> Vec<String> {
        match &**receiver.borrow() {
            Target::Unknown => vec!["unknown".to_owned()],
            Target::Withheld => vec!["withheld".to_owned()],
            Target::Refused => vec!["refused".to_owned()],
            Target::Service(service) => service
                .endpoints
                .iter()
                .map(|endpoint| endpoint.address.to_string())
                .collect(),
            Target::Pod(pod) => vec![format!("pod {}", pod.endpoint.address)],
        }
    }

    /// Requests in short, sorted: "+10.96.0.7:80@version", "-10.96.0.7:80".
    fn short(requests: impl IntoIterator<Item = DiscoverRequest>) -> Vec<String> {
        let mut texts: Vec<_> = requests
            .into_iter()
            .map(|request| match request.action.expect("an action") {
                Action::Subscribe(subscribe) => {
                    format!("+{}@{}", subscribe.destination, subscribe.known_version)
                }
                Action::Unsubscribe(unsubscribe) => format!("-{}", unsubscribe.destination),
                Action::Status(status) => format!("={}", status.roots_version),
            })
            .collect();
        texts.sort();
        texts
    }

    fn watch(table: &mut Table) -> watch::Receiver<Arc<Target>> {
        table
            .watch(address("10.96.0.7:80"))
            .expect("room")
            .0
            .receiver
    }

    #[test]
    fn a_snapshot_then_deltas_make_the_state() {
        let mut table = table();
        let receiver = watch(&mut table);
        assert_eq!(addresses(&receiver), ["unknown"]);
        assert!(
            apply(
                &mut table,
                "1",
                snapshot(
                    Kind::Service,
                    &["10.0.0.2:8080", "10.0.0.1:8080", "10.0.0.2:8080"]
                )
            )
            .is_empty()
        );
        assert_eq!(addresses(&receiver), ["10.0.0.1:8080", "10.0.0.2:8080"]);
        assert!(
            apply(
                &mut table,
                "2",
                delta(
                    &["10.0.0.3:8080", "[fd00::1]:8080", "10.0.0.0:8080"],
                    &["10.0.0.1:8080", "10.0.0.9:1"]
                )
            )
            .is_empty()
        );
        assert_eq!(
            addresses(&receiver),
            [
                "10.0.0.0:8080",
                "10.0.0.2:8080",
                "10.0.0.3:8080",
                "[fd00::1]:8080"
            ]
        );
        assert!(apply(&mut table, "3", Update::Unknown(Unknown {})).is_empty());
        assert_eq!(addresses(&receiver), ["unknown"]);
    }

    #[test]
    fn an_endpoint_is_opaque_as_announced_last() {
        let mut table = table();
        let receiver = watch(&mut table);
        let opaque = || match &**receiver.borrow() {
            Target::Service(service) => service
                .endpoints
                .iter()
                .map(|endpoint| endpoint.opaque)
                .collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        apply(
            &mut table,
            "1",
            snapshot(Kind::Service, &["10.0.0.1:80", "10.0.0.2:80"]),
        );
        assert_eq!(opaque(), [false, false]);
        let upserted = vec![Endpoint {
            opaque: true,
            ..endpoint("10.0.0.2:80")
        }];
        apply(
            &mut table,
            "2",
            Update::Delta(Delta {
                upserted,
                removed: Vec::new(),
            }),
        );
        assert_eq!(opaque(), [false, true]);
    }

    #[test]
    fn an_announced_endpoint_is_a_new_arc_and_its_sibling_the_old_one() {
        let mut table = table();
        let receiver = watch(&mut table);
        let endpoints = |receiver: &watch::Receiver<Arc<Target>>| match &**receiver.borrow() {
            Target::Service(service) => service.endpoints.clone(),
            other => panic!("{other:?}"),
        };
        apply(
            &mut table,
            "1",
            snapshot(Kind::Service, &["10.0.0.1:80", "10.0.0.2:80"]),
        );
        let before = endpoints(&receiver);
        apply(&mut table, "2", delta(&["10.0.0.2:80"], &[]));
        let after = endpoints(&receiver);
        assert!(Arc::ptr_eq(&before[0], &after[0]) && !Arc::ptr_eq(&before[1], &after[1]));
    }

    #[test]
    fn one_destination_is_subscribed_to_once_however_it_is_spelled() {
        let mut table = table();
        let (_first, request) = table.watch(address("10.96.0.7:80")).expect("room");
        assert_eq!(short(request), ["+10.96.0.7:80@"]);
        let (_second, request) = table.watch(address("[::ffff:10.96.0.7]:80")).expect("room");
        assert_eq!((request, table.len()), (Vec::new(), 1));
    }

    #[test]
    fn a_new_stream_resumes_from_the_versions_that_are_known() {
        let (mut table, now) = (table(), Instant::now());
        let receiver = watch(&mut table);
        apply(&mut table, "7", snapshot(Kind::Service, &["10.0.0.1:80"]));
        let _other = table.watch(address("10.96.0.8:80")).expect("room");
        assert_eq!(
            short(table.resume(now, MINUTE)),
            ["+10.96.0.7:80@7", "+10.96.0.8:80@"]
        );
        assert_eq!(addresses(&receiver), ["10.0.0.1:80"]);
        assert!(apply(&mut table, "7", Update::Unchanged(Unchanged {})).is_empty());
        assert!(apply(&mut table, "8", delta(&["10.0.0.2:80"], &[])).is_empty());
        assert_eq!(addresses(&receiver), ["10.0.0.1:80", "10.0.0.2:80"]);
    }

    #[test]
    fn what_cannot_be_applied_leaves_the_state_and_is_asked_for_anew() {
        let bad: [(&str, Option<Update>); 5] = [
            (
                "a delta before any snapshot",
                Some(delta(&["10.0.0.1:80"], &[])),
            ),
            (
                "unchanged, though nothing was known",
                Some(Update::Unchanged(Unchanged {})),
            ),
            (
                "neither service nor pod",
                Some(snapshot(Kind::Unspecified, &["10.0.0.1:80"])),
            ),
            ("without its endpoint", Some(snapshot(Kind::Pod, &[]))),
            ("elsewhere", Some(snapshot(Kind::Pod, &["10.96.0.8:80"]))),
        ];
        for (expected, update) in bad {
            let (mut table, now) = (table(), Instant::now());
            let mut receiver = watch(&mut table);
            let problems = apply(&mut table, "1", update);
            assert!(
                problems.len() == 1 && problems[0].contains(expected),
                "{problems:?}"
            );
            assert!(
                receiver.has_changed().expect("open"),
                "nobody needs to wait for an answer that makes sense"
            );
            receiver.mark_unchanged();
            // One question, however much nonsense follows.
            assert_eq!(apply(&mut table, "2", delta(&[], &[])), [""; 0]);
            assert_eq!(
                short(table.sweep(now, MINUTE)),
                ["+10.96.0.7:80@", "-10.96.0.7:80"]
            );
            assert_eq!(short(table.sweep(now, MINUTE)), [""; 0]);
            assert!(apply(&mut table, "3", snapshot(Kind::Service, &["10.0.0.1:80"])).is_empty());
            assert_eq!(addresses(&receiver), ["10.0.0.1:80"]);
        }
    }

    #[test]
    fn a_flaw_in_a_snapshot_costs_one_endpoint_and_in_a_delta_no_removal() {
        let mut table = table();
        let receiver = watch(&mut table);
        let wrong = [
            "nonsense",
            "10.0.0.1",
            "10.0.0.1:0",
            "0.0.0.0:80",
            "224.0.0.1:80",
            "10.0.0.1:99999",
        ];
        for address in wrong {
            let problems = apply(
                &mut table,
                "1",
                snapshot(Kind::Service, &["10.0.0.1:80", address, "10.0.0.2:80"]),
            );
            assert!(
                problems.len() == 1 && problems[0].contains(address),
                "{problems:?}"
            );
            assert_eq!(addresses(&receiver), ["10.0.0.1:80", "10.0.0.2:80"]);
        }
        assert_eq!(
            apply(
                &mut table,
                "2",
                delta(&["nonsense"], &["10.0.0.1:80", "more nonsense"])
            )
            .len(),
            2
        );
        assert_eq!(addresses(&receiver), ["10.0.0.2:80"]);
        assert_eq!(
            short(table.sweep(Instant::now(), MINUTE)),
            ["+10.96.0.7:80@", "-10.96.0.7:80"]
        );
    }

    #[test]
    fn a_pod_is_reached_where_it_is_and_may_join_the_mesh() {
        let mut table = table();
        let receiver = watch(&mut table);
        assert!(apply(&mut table, "1", snapshot(Kind::Pod, &["10.96.0.7:80"])).is_empty());
        assert_eq!(addresses(&receiver), ["pod 10.96.0.7:80"]);
        let meshed = Endpoint {
            identity: "spiffe://cluster.local/ns/shop/sa/cart".to_owned(),
            ..endpoint("10.96.0.7:80")
        };
        assert!(
            apply(
                &mut table,
                "2",
                Update::Delta(Delta {
                    upserted: vec![meshed],
                    removed: Vec::new()
                })
            )
            .is_empty()
        );
        assert!(
            matches!(&**receiver.borrow(), Target::Pod(pod) if pod.endpoint.identity.is_some())
        );
        assert_eq!(
            apply(&mut table, "3", delta(&[], &["10.96.0.7:80"])).len(),
            1
        );
        assert_eq!(addresses(&receiver), ["pod 10.96.0.7:80"]);
    }

    #[test]
    fn withholds_a_pod_whose_identity_cannot_be_read() {
        let mut table = table();
        let receiver = watch(&mut table);
        let Update::Snapshot(mut pod) = snapshot(Kind::Pod, &["10.96.0.7:80"]) else {
            panic!("it is a snapshot");
        };
        pod.endpoints[0].identity = "https://not-spiffe".to_owned();
        assert!(!apply(&mut table, "1", Update::Snapshot(pod)).is_empty());
        assert_eq!(addresses(&receiver), ["withheld"]);
    }

    #[test]
    fn what_nobody_watches_is_forgotten_after_a_while() {
        let (mut table, start) = (table(), Instant::now());
        let receiver = watch(&mut table);
        assert_eq!(short(table.sweep(start, MINUTE)), [""; 0]);
        drop(receiver);
        assert_eq!(short(table.sweep(start, MINUTE)), [""; 0]);
        let again = watch(&mut table);
        assert_eq!(short(table.sweep(start + MINUTE, MINUTE)), [""; 0]);
        drop(again);
        assert_eq!(short(table.sweep(start + MINUTE, MINUTE)), [""; 0]);
        assert_eq!(
            short(table.sweep(start + 2 * MINUTE, MINUTE)),
            ["-10.96.0.7:80"]
        );
        assert_eq!(table.len(), 0);
        // Answers that crossed the unsubscription are no fault.
        assert!(apply(&mut table, "2", delta(&["10.0.0.2:80"], &[])).is_empty());
    }

    fn meshed() -> Update {
        let meshed = Endpoint {
            identity: "spiffe://cluster.local/ns/shop/sa/cart".to_owned(),
            ..endpoint("10.0.0.1:80")
        };
        Update::Delta(Delta {
            upserted: vec![meshed],
            removed: Vec::new(),
        })
    }

    /// Has the table forget all that nobody watches.
    fn forget(table: &mut Table) {
        let start = Instant::now();
        table.sweep(start, MINUTE);
        table.sweep(start + MINUTE, MINUTE);
        assert_eq!(table.len(), 0);
    }

    #[test]
    fn withholds_a_formerly_meshed_destination_until_it_is_something_else() {
        let mut table = table();
        drop(watch(&mut table));
        apply(&mut table, "1", snapshot(Kind::Service, &[]));
        apply(&mut table, "2", meshed());
        forget(&mut table);
        for _ in 0..2 {
            assert_eq!(addresses(&watch(&mut table)), ["withheld"]);
            forget(&mut table);
        }
        drop(watch(&mut table));
        // A replica that lags behind does not know it.
        apply(&mut table, "3", Update::Unknown(Unknown {}));
        let receiver = watch(&mut table);
        apply(&mut table, "3", Update::Unknown(Unknown {}));
        assert_eq!(addresses(&receiver), ["withheld"]);
        drop(receiver);
        forget(&mut table);
        assert_eq!(addresses(&watch(&mut table)), ["withheld"]);
        apply(&mut table, "4", snapshot(Kind::Service, &["10.0.0.9:80"]));
        forget(&mut table);
        assert_eq!(addresses(&watch(&mut table)), ["unknown"]);
    }

    #[test]
    fn a_service_that_lost_its_meshed_endpoints_was_meshed() {
        let mut table = table();
        drop(watch(&mut table));
        apply(&mut table, "1", snapshot(Kind::Service, &[]));
        apply(&mut table, "2", meshed());
        apply(&mut table, "3", delta(&[], &["10.0.0.1:80"]));
        forget(&mut table);
        assert_eq!(addresses(&watch(&mut table)), ["withheld"]);
        apply(&mut table, "4", snapshot(Kind::Service, &["10.0.0.2:80"]));
        forget(&mut table);
        assert_eq!(
            addresses(&watch(&mut table)),
            ["unknown"],
            "it has left the mesh"
        );
    }

    #[test]
    fn with_more_to_remember_than_there_is_room_for_everything_is_withheld() {
        let mut table = table();
        table.were_meshed.limit = 1;
        let destinations = ["10.96.0.1:80", "10.96.0.2:80", "10.96.0.3:80"].map(address);
        for destination in &destinations[..2] {
            drop(table.watch(*destination).expect("room"));
            for update in [snapshot(Kind::Service, &[]), meshed()] {
                let destination = destination.to_string();
                let answer = DiscoverResponse {
                    destination,
                    version: "1".to_owned(),
                    update: Some(update),
                };
                table.apply(answer, &mut |problem| panic!("{problem}"));
            }
        }
        forget(&mut table);
        let mut watch =
            |destination: SocketAddr| table.watch(destination).expect("room").0.receiver;
        for receiver in destinations.map(&mut watch) {
            assert_eq!(addresses(&receiver), ["withheld"]);
        }
        let receiver = watch(address("10.96.0.7:80"));
        apply(&mut table, "1", Update::Unknown(Unknown {}));
        assert_eq!(
            addresses(&receiver),
            ["unknown"],
            "the controller's word counts"
        );
    }

    #[test]
    fn a_full_table_takes_no_more_and_makes_room_at_once() {
        let (mut table, now) = (Table::new(1), Instant::now());
        let receiver = watch(&mut table);
        apply(&mut table, "1", snapshot(Kind::Service, &[]));
        apply(&mut table, "2", meshed());
        assert!(table.watch(address("10.96.0.8:80")).is_err());
        assert!(table.watch(address("10.96.0.7:80")).is_ok());
        drop(receiver);
        assert!(
            table.watch(address("10.96.0.8:80")).is_err(),
            "without a stream it would not be known again"
        );
        assert_eq!(short(table.sweep(now, MINUTE)), ["-10.96.0.7:80"]);
        assert!(table.watch(address("10.96.0.8:80")).is_ok());
        assert_eq!(short(table.sweep(now, MINUTE)), ["-10.96.0.8:80"]);
        assert_eq!(addresses(&watch(&mut table)), ["withheld"]);
    }

    #[test]
    fn in_a_full_table_what_nobody_watches_makes_room_and_what_somebody_watches_stays() {
        let mut table = Table::new(3);
        let receiver = watch(&mut table);
        apply(&mut table, "1", snapshot(Kind::Service, &["10.0.0.1:80"]));
        for unwatched in ["10.96.0.8:80", "10.96.0.9:80"] {
            drop(table.watch(address(unwatched)).expect("room"));
        }
        let (_watched, requests) = table
            .watch(address("10.96.0.10:80"))
            .expect("room that was made");
        assert_eq!(
            short(requests),
            ["+10.96.0.10:80@", "-10.96.0.8:80", "-10.96.0.9:80"]
        );
        apply(&mut table, "2", delta(&["10.0.0.2:80"], &[]));
        assert_eq!(addresses(&receiver), ["10.0.0.1:80", "10.0.0.2:80"]);
    }

    #[test]
    fn answers_that_say_nothing_change_nothing() {
        let mut table = table();
        let receiver = watch(&mut table);
        apply(&mut table, "1", snapshot(Kind::Service, &["10.0.0.1:80"]));
        assert_eq!(apply(&mut table, "2", None).len(), 1);
        let mut problems = Vec::new();
        let nowhere = DiscoverResponse {
            destination: "nowhere".to_owned(),
            ..DiscoverResponse::default()
        };
        table.apply(nowhere, &mut |problem| problems.push(problem));
        assert_eq!(
            (problems.len(), addresses(&receiver)),
            (1, vec!["10.0.0.1:80".to_owned()])
        );
    }
}
