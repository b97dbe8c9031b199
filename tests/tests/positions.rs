//! A model of discovery with several replicas: the index and the hub of the controller, and the
//! proxy's order of states, with a simulated API server. Watches stall, and the data are restored
//! from a backup. Time is paused, and chance is seeded.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use diy_mesh_controller::catalog::claims::{Claims, Subject};
use diy_mesh_controller::catalog::{Change, Event, epoch};
use diy_mesh_controller::index::position::Known;
use diy_mesh_controller::index::state::State;
use diy_mesh_controller::index::{Resource, dependencies};
use diy_mesh_controller::kinds::service::{ServicePort, TargetPort, Transport};
use diy_mesh_controller::kinds::slice::{SliceEndpoint, SlicePort};
use diy_mesh_controller::kinds::{Object, Service, Slice};
use diy_mesh_controller::object::version::Version;
use diy_mesh_controller::object::{Key, Kind};
use diy_mesh_controller::publish::{Hub, Resources};
use diy_mesh_proxy::discovery::position::{MAX_REFUSAL, Order, Position};
use tokio::time::{Instant, advance};

const TICK: Duration = Duration::from_millis(100);
/// The times of the controller.
const MAX_CATCH_UP: Duration = Duration::from_secs(10);
const STALL_TIMEOUT: Duration = Duration::from_secs(1);
const EPOCH_INTERVALS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];
const KINDS: [Kind; 3] = [Kind::Service, Kind::Slice, Kind::Pod];

/// The number of the write that a state includes: of Services, and of EndpointSlices.
type Content = [u64; 2];

struct Api {
    revision: u64,
    /// Revision, place of the kind and number of each write.
    log: Vec<(u64, usize, u64)>,
    writes: u64,
    epoch: u64,
    /// The writes that a restore has removed, from the time at which a replica has stored it.
    lost: BTreeSet<u64>,
    removed: BTreeSet<u64>,
    started: Instant,
}

impl Api {
    fn write(&mut self, place: usize) {
        self.revision += 7;
        self.writes += 1;
        self.log.push((self.revision, place, self.writes));
    }

    fn latest(&self, place: usize) -> u64 {
        let mut log = self.log.iter().rev();
        log.find(|write| write.1 == place)
            .map_or(0, |write| write.2)
    }

    /// The data of this revision, without a stored epoch.
    fn restore(&mut self, backup: u64) {
        let removed = self.log.extract_if(.., |write| write.0 > backup);
        self.removed.extend(removed.map(|write| write.2));
        (self.revision, self.epoch) = (backup, 0);
    }

    fn store(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.lost.append(&mut self.removed);
    }

    fn seconds(&self) -> u64 {
        1_000_000 + self.started.elapsed().as_secs()
    }
}

struct Replica {
    hub: Hub,
    watches: [Watch; 3],
    epoch: Option<u64>,
    is_restored: bool,
    epoch_read: Option<Instant>,
    /// The API server does not respond.
    is_cut_off: bool,
}

struct Watch {
    revision: u64,
    is_stalled: bool,
    /// It sends nothing, and the objects cannot be listed either.
    is_broken: bool,
    /// The next LIST or events, and the next bookmark.
    next: Instant,
    bookmark: Instant,
    must_list: bool,
    /// The latest event since a claim of later ones.
    silent: Instant,
}

impl Replica {
    fn new(now: Instant) -> Replica {
        let watch = |_| Watch {
            revision: 0,
            is_stalled: false,
            is_broken: false,
            next: now,
            bookmark: now,
            must_list: true,
            silent: now,
        };
        Replica {
            hub: Hub::default(),
            watches: [0, 1, 2].map(watch),
            epoch: None,
            is_restored: false,
            epoch_read: None,
            is_cut_off: false,
        }
    }

    fn tick(&mut self, api: &mut Api, rng: &mut fastrand::Rng, now: Instant) {
        if self.is_cut_off {
            return;
        }
        self.read_epoch(api, now);
        let claims = self.hub.claims().clone();
        for (place, watch) in self.watches.iter_mut().enumerate() {
            let kind = KINDS[place];
            let subject = Subject::Kind(kind);
            if !is_claimed(&claims, subject, watch.revision) {
                watch.silent = now;
            }
            if now < watch.next || watch.is_broken {
                continue;
            }
            let is_due = now - watch.silent >= STALL_TIMEOUT;
            if is_due && claims.answer(subject, watch.revision, api.revision) {
                // The watch starts again at its own version.
                watch.is_stalled = false;
            }
            let is_list = std::mem::take(&mut watch.must_list);
            if is_list && api.revision < watch.revision {
                // The list waits for an epoch.
                (self.is_restored, watch.must_list) = (true, true);
                continue;
            }
            let mut events = Vec::new();
            if is_list {
                let object = object(place, api.latest(place));
                let change = Change::Reset(kind, object);
                events.push((change, api.revision));
                watch.is_stalled = false;
            } else if !watch.is_stalled {
                let new = api.log.iter().filter(|write| write.0 > watch.revision);
                for (revision, _, write) in new.filter(|write| write.1 == place) {
                    let object = object(place, *write).remove(0);
                    events.push((Change::Apply(object), *revision));
                }
                if now >= watch.bookmark {
                    let change = Change::Bookmark(kind);
                    events.push((change, api.revision));
                    watch.bookmark = now + Duration::from_secs(rng.u64(5..60));
                }
            }
            if let Some((_, revision)) = events.last() {
                (watch.revision, watch.silent) = (*revision, now);
                watch.next = now + TICK * rng.u32(0..8);
            }
            let event = |(change, version)| Event {
                change,
                version: Some(version),
            };
            self.hub.apply(events.into_iter().map(event));
        }
    }

    fn read_epoch(&mut self, api: &mut Api, now: Instant) {
        let (claims, known) = (self.hub.claims(), self.epoch.unwrap_or_default());
        let is_requested = self.is_restored || is_claimed(claims, Subject::Epoch, known);
        let interval = EPOCH_INTERVALS[usize::from(!is_requested)];
        if self.epoch_read.is_some_and(|read| now - read < interval) {
            return;
        }
        self.epoch_read = Some(now);
        let epoch = epoch::next(self.epoch, self.is_restored, api.epoch, api.seconds());
        claims.answer(Subject::Epoch, known, epoch);
        if epoch > api.epoch {
            api.store(epoch);
        }
        if self.epoch != Some(epoch) {
            self.hub.apply([Change::Epoch(epoch)]);
            (self.epoch, self.is_restored) = (Some(epoch), false);
            for watch in &mut self.watches {
                (watch.must_list, watch.revision) = (true, 0);
            }
        }
    }
}

/// Whether a subscriber claims to know of a later version.
fn is_claimed(claims: &Claims, subject: Subject, seen: u64) -> bool {
    let claimed = pin!(claims.later_than(subject, seen));
    let mut context = Context::from_waker(Waker::noop());
    claimed.poll(&mut context).is_ready()
}

/// The objects of a kind after a write: what identifies the cluster, and what contains the number.
fn object(place: usize, write: u64) -> Vec<Object> {
    let port = ServicePort {
        name: "http".into(),
        port: 80,
        node_port: None,
        target: TargetPort::Number(80),
        protocol: Transport::Tcp,
        app_protocol: write.to_string(),
    };
    let service = |key, uid: &str, ip: &str| {
        Object::Service(Service {
            key,
            uid: uid.into(),
            is_headless: false,
            selector: Default::default(),
            cluster_ips: vec![ip.parse().unwrap()],
            external_ips: vec![],
            external_local: false,
            created: 0,
            ports: vec![port.clone()],
            excess: None,
            external_name: "".into(),
            publish_not_ready: false,
            local_only: false,
            session_affinity: 0,
            canary: None,
        })
    };
    let web = Key::new("shop", "web");
    match KINDS[place] {
        Kind::Service => vec![
            service(web, "", "10.96.0.1"),
            service(Key::new("default", "kubernetes"), "uid", "10.96.255.1"),
        ],
        Kind::Slice => vec![Object::Slice(Slice {
            key: Key::new("shop", "web-1"),
            service: Some(web),
            ports: vec![SlicePort {
                name: "http".into(),
                port: 80,
                protocol: Transport::Tcp,
            }],
            endpoints: vec![SliceEndpoint {
                address: "192.0.2.1".parse().unwrap(),
                ready: true,
                serving: true,
                terminating: false,
                node: "".into(),
                zone: write.to_string().into(),
                node_hints: Box::default(),
                zone_hints: Box::default(),
                pod: None,
            }],
        })],
        _ => vec![],
    }
}

fn content(state: &State) -> Content {
    let Some(target) = &state.target else {
        return [0, 0];
    };
    let endpoints = target.endpoints.list();
    let zone = endpoints
        .first()
        .map(|endpoint| endpoint.zone.parse().unwrap());
    [target.app_protocol.parse().unwrap(), zone.unwrap_or(0)]
}

#[derive(Default)]
struct Proxy {
    order: Order,
    content: Content,
    version: Option<Version>,
    refused: Option<(Position, Content, Version)>,
    stream: Option<Stream>,
    /// Time with a stream in which no state has applied, or the state differs from the state of the
    /// replica.
    waited: Duration,
    outdated: Duration,
    /// Former contents since the last write.
    former: Vec<Content>,
    taken_back: u32,
}

struct Stream {
    reader: Resources,
    /// The events that the replica lacks, and until when it may catch up.
    behind: Option<(Known, Instant)>,
    sent: Option<Content>,
    is_first: bool,
}

impl Proxy {
    fn connect(&mut self, hub: &Hub, now: Instant) {
        if self.stream.take().is_some() {
            self.order.pause(now);
        }
        self.refused = None;
        self.order.resume(now);
        let mut reader = hub.watch_resources(None);
        let known = self.order.known(now).map(Known::from);
        let known = known.filter(|known| reader.is_behind(known));
        match &known {
            Some(known) => reader.catch_up(known),
            None => drop(reader.subscribe(&resource())),
        }
        self.stream = Some(Stream {
            reader,
            behind: known.map(|known| (known, now + MAX_CATCH_UP)),
            sent: None,
            is_first: true,
        });
    }

    fn tick(&mut self, api: &Api, now: Instant) {
        let Some(mut stream) = self.stream.take() else {
            return;
        };
        if let Some((known, until)) = &stream.behind
            && (now >= *until || !stream.reader.is_behind(known))
        {
            stream.reader.subscribe(&resource());
            stream.behind = None;
        }
        self.waited += TICK;
        while let Some((resource, state)) = stream.reader.next() {
            let kinds = dependencies::kinds(&resource, state.target.as_ref());
            let position = state
                .position
                .as_ref()
                .map(|position| position.message(kinds));
            let position = Position::from(position);
            stream.sent = Some(content(&state));
            let is_first = std::mem::take(&mut stream.is_first);
            if is_first && self.version == Some(state.version) {
                // The response is `unchanged`.
                (self.refused, self.waited) = (None, Duration::ZERO);
                self.order.confirm(position);
            } else if self.version.is_none() || self.order.accepts(&position, now) {
                self.apply(position, content(&state), state.version, api);
            } else {
                self.refused = Some((position, content(&state), state.version));
            }
        }
        if let Some((position, content, version)) = self.refused.take_if(|_| self.order.is_due(now))
        {
            self.apply(position, content, version, api);
        }
        if stream.sent == Some(self.content) {
            self.outdated = Duration::ZERO
        } else {
            self.outdated += TICK
        }
        let limit = MAX_REFUSAL + MAX_CATCH_UP + 2 * TICK;
        assert!(self.outdated <= limit, "frozen at {:?}", self.content);
        self.stream = Some(stream);
    }

    fn apply(&mut self, position: Position, content: Content, version: Version, api: &Api) {
        // Writes that a restore has removed are older than all others.
        let age = |write: u64| (!api.lost.contains(&write), write);
        let is_older = (0..2).any(|place| age(content[place]) < age(self.content[place]));
        if is_older {
            // Until a replica has noticed a restore, nothing tells what is older.
            let is_ordered = content
                .iter()
                .chain(&self.content)
                .all(|write| !api.removed.contains(write));
            assert!(
                !is_ordered || self.waited + TICK >= MAX_REFUSAL,
                "taken back from {:?} to {content:?} after {:?}",
                self.content,
                self.waited
            );
            self.taken_back += 1;
        }
        if content != self.content {
            self.former
                .push(std::mem::replace(&mut self.content, content));
        }
        (self.version, self.refused) = (Some(version), None);
        self.waited = Duration::ZERO;
        self.order.apply(position);
    }
}

fn resource() -> Resource {
    Resource::Destination("10.96.0.1:80".parse().unwrap())
}

struct World {
    api: Api,
    replicas: Vec<Replica>,
    proxies: Vec<Proxy>,
    rng: fastrand::Rng,
    /// The chances of a write and of a move in each second, in percent.
    writes: u32,
    moves: u32,
}

impl World {
    fn new(seed: u64) -> World {
        let now = Instant::now();
        let mut api = Api {
            revision: 1000,
            log: Vec::new(),
            writes: 0,
            epoch: 0,
            lost: BTreeSet::new(),
            removed: BTreeSet::new(),
            started: now,
        };
        (0..2).for_each(|place| api.write(place));
        World {
            api,
            replicas: vec![Replica::new(now), Replica::new(now)],
            proxies: (0..6).map(|_| Proxy::default()).collect(),
            rng: fastrand::Rng::with_seed(seed),
            writes: 40,
            moves: 10,
        }
    }

    fn happens(&mut self, percent: u32) -> bool {
        self.rng.u32(0..1000) < percent
    }

    async fn run(&mut self, seconds: u32) {
        for _ in 0..seconds * 10 {
            advance(TICK).await;
            let now = Instant::now();
            for place in 0..2 {
                if self.happens(self.writes) {
                    self.api.write(place);
                }
            }
            for replica in &mut self.replicas {
                replica.tick(&mut self.api, &mut self.rng, now);
            }
            for place in 0..self.proxies.len() {
                let is_new = self.proxies[place].stream.is_none();
                if is_new || self.happens(self.moves) {
                    let replica = self.rng.usize(0..self.replicas.len());
                    // It accepts no calls before it is synced.
                    let hub = &self.replicas[replica].hub;
                    if KINDS.iter().all(|kind| hub.is_listed(*kind)) {
                        self.proxies[place].connect(hub, now);
                    }
                }
                self.proxies[place].tick(&self.api, now);
            }
        }
    }

    fn stall(&mut self, replica: usize, place: usize) {
        self.replicas[replica].watches[place].is_stalled = true;
    }

    fn restore(&mut self, backup: u64) {
        self.api.restore(backup);
        let now = Instant::now();
        for watch in self
            .replicas
            .iter_mut()
            .flat_map(|replica| &mut replica.watches)
        {
            // The API server has restarted. A stalled watch does not notice it.
            watch.must_list |= !watch.is_stalled;
            watch.next = now + TICK * self.rng.u32(0..20);
        }
    }

    /// Without further writes, all proxies get the latest state, and keep it.
    async fn settle(&mut self) {
        (self.writes, self.moves) = (0, 30);
        self.run(90).await;
        let latest = [0, 1].map(|place| self.api.latest(place));
        for proxy in &mut self.proxies {
            assert_eq!(proxy.content, latest);
            proxy.former.clear();
        }
        self.run(90).await;
        for proxy in &self.proxies {
            assert_eq!(proxy.content, latest);
            assert!(proxy.former.is_empty(), "flaps: {:?}", proxy.former);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn replicas_with_a_stalled_watch_each_and_a_restore_never_take_proxies_back() {
    for seed in 0..12 {
        let mut world = World::new(seed);
        world.run(40).await;
        let backup = world.api.revision;
        world.run(40).await;
        for _ in 0..4 {
            world.stall(0, 0);
            world.stall(1, 1);
            let pause = world.rng.u32(5..30);
            world.run(pause).await;
        }
        world.stall(0, 0);
        world.stall(1, 1);
        world.restore(backup);
        world.run(2).await;
        world.replicas.push(Replica::new(Instant::now()));
        world.run(60).await;
        let epochs = world.replicas.iter().map(|replica| replica.epoch);
        let epochs: BTreeSet<_> = epochs.collect();
        assert_eq!(
            epochs,
            [Some(world.api.epoch)].into(),
            "one for all replicas"
        );
        assert!(world.api.epoch > 0);
        world.settle().await;
        // Some streams end in the time of a restore that no replica has noticed.
        let taken_back: u32 = world.proxies.iter().map(|proxy| proxy.taken_back).sum();
        assert!(taken_back <= 12, "seed {seed}: {taken_back} times");
    }
}

#[tokio::test(start_paused = true)]
async fn replica_that_cannot_catch_up_takes_proxies_back_after_30_seconds() {
    let mut taken_back = 0;
    for seed in 0..6 {
        let mut world = World::new(seed);
        world.run(20).await;
        world.replicas[0].is_cut_off = true;
        world.moves = 2;
        world.run(200).await;
        taken_back += world
            .proxies
            .iter()
            .map(|proxy| proxy.taken_back)
            .sum::<u32>();
        world.replicas[0].is_cut_off = false;
        world.run(10).await;
        world.settle().await;
    }
    assert!(taken_back > 0, "no proxy is frozen");
}

#[tokio::test(start_paused = true)]
async fn replicas_that_cannot_read_a_kind_each_take_proxies_back_after_30_seconds() {
    for seed in 0..6 {
        let mut world = World::new(seed);
        world.run(20).await;
        for broken in [true, false] {
            for place in 0..2 {
                world.replicas[place].watches[place].is_broken = broken;
            }
            world.run(if broken { 200 } else { 10 }).await;
        }
        world.settle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn replicas_catch_up_before_proxies_take_an_older_state() {
    for seed in 0..6 {
        let mut world = World::new(seed);
        world.run(20).await;
        for _ in 0..4 {
            world.stall(0, 0);
            world.stall(1, 1);
            world.run(45).await;
        }
        for proxy in &world.proxies {
            assert_eq!(proxy.taken_back, 0, "seed {seed}");
        }
    }
}
