//! Admission: who may have connections, work and memory while these are limited. Each connection
//! takes a slot of its holder, and the bytes that it holds. Holders are a tree, such as a namespace
//! with its workloads.
//!
//! Slots and bytes follow one rule. A share is the amount of a level, divided by its holders. A
//! level has the share of the holder above it. A holder may use what others leave free. When all is
//! in use, a new connection, or one that needs more bytes, takes them from the holder that is
//! furthest above its share, never from one at or below it. Among more holders than slots, the
//! first ones keep one each. Within that holder, the connections end in this order: silent ones,
//! idle ones, those between two HTTP exchanges, and then the youngest exchange or opaque
//! connection, first those without traffic. If the holder of the new or growing connection is
//! itself furthest above its share, only a connection of it without an exchange ends, or else the
//! new one is refused, or grows no further. A new one that may wait ends no connection of its own
//! holder: it waits. A slot that is released goes to the waiting holder that is furthest below its
//! share, among equals to the first.
//!
//! The holders of a level have the same share: the largest one is furthest above it, and above it
//! at all, because the level has more than it may have. A connection that ends holds its bytes
//! until its task has run: these belong to no holder. An eighth of the limit is left for them, and
//! for work in progress that would grow no further: it may answer. If more than that has not ended
//! yet, nobody gets more. An optional use, such as a mirrored request, ends nothing. It gets
//! bytes while three quarters are free. While one quarter is free, it gets bytes if each of its
//! holders is within the share that it would have beside one more holder.
//!
//! A lasting use, such as a subscription, ends nothing either: the client asks for it again as soon
//! as its connection has ended, so two holders would take it from each other in turns. It gets free
//! bytes. When all is in use, the holder gets its share beyond the limit: as much again in all, and
//! for a group its share, at most half. Earlier holders keep the share that they had then.
//!
//! The module knows neither sockets nor what a holder is. A change of an open connection's class is
//! one store to an atomic. A change of its bytes is an addition for each holder above it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::future::{Future, poll_fn};
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

/// Time that a connection has to end, or work to be done, from when it is asked to end.
pub const END_TIMEOUT: Duration = Duration::from_secs(1);

/// The activity of a connection, in the order in which connections end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// The client has not authenticated, or has sent nothing that tells its protocol.
    Silent,
    /// HTTP without a request so far.
    Idle,
    /// HTTP between two exchanges, or work that others may wait for: it is asked to end.
    BetweenExchanges,
    /// An HTTP exchange, or an opaque connection.
    InUse,
}

const CLASSES: [Class; 4] = [
    Class::Silent,
    Class::Idle,
    Class::BetweenExchanges,
    Class::InUse,
];

/// The state of a slot. It only increases.
const WAITING: u8 = 0;
const HELD: u8 = 1;
/// Another connection has taken it. This one is asked to end.
const ASKED: u8 = 2;
/// Another connection has taken it. This one ends.
const ENDED: u8 = 3;
/// The holder needs it no longer.
const RELEASED: u8 = 4;

/// The part of the address by which clients are told apart: a host has all addresses of a /64.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}

/// The index of a limited resource.
type Resource = usize;
const SLOTS: Resource = 0;
const BYTES: Resource = 1;

/// One part in this many of the bytes is for connections that end, and for work in progress.
const RESERVE: usize = 8;

/// A limited number of slots, and of bytes.
#[derive(Debug)]
pub struct Admission<K: Clone + Eq + Hash> {
    tree: Mutex<Tree<K>>,
    is_under_pressure: AtomicBool,
}

impl<K: Clone + Eq + Hash> Admission<K> {
    /// This many slots, and at least one. The bytes are unlimited.
    pub fn new(slots: usize) -> Arc<Self> {
        let tree = Tree {
            limits: [slots.max(1), usize::MAX],
            next: 0,
            ending: 0,
            nodes: vec![Node::new(0, None)],
            free: Vec::new(),
        };
        Arc::new(Self {
            tree: Mutex::new(tree),
            is_under_pressure: AtomicBool::new(false),
        })
    }

    /// Changes the number of slots and of bytes. Connections beyond smaller ones end.
    pub fn resize(&self, slots: usize, bytes: usize) {
        let mut tree = self.tree();
        tree.limits = [slots.max(1), bytes - bytes / RESERVE];
        for resource in [SLOTS, BYTES] {
            // Fails where nothing is left that could end.
            let _ = tree.make_room(resource, None, false);
        }
        tree.grant();
        self.update_pressure(&tree);
    }

    /// A slot for a connection of the last holder of this path, or `None` if the connection is refused.
    /// Another connection may have to end for the slot.
    pub fn admit(self: &Arc<Self>, path: &[K]) -> Option<Slot<K>> {
        self.enter(path, usize::MAX, false)
    }

    /// As [`Admission::admit`], with at most this many slots for the holder above the last one.
    pub fn admit_within(self: &Arc<Self>, path: &[K], group_limit: usize) -> Option<Slot<K>> {
        self.enter(path, group_limit, false)
    }

    /// A slot, as [`Admission::admit`]. Waits where the new connection would be refused, or would
    /// end another one of its own holder. Cancel-safe.
    pub async fn acquire(self: &Arc<Self>, path: &[K]) -> Slot<K> {
        let slot = self.enter(path, usize::MAX, true);
        let slot = slot.expect("a connection that waits is not refused");
        poll_fn(|cx| {
            *lock(&slot.entry.task) = Some(cx.waker().clone());
            match slot.entry.state.load(Relaxed) {
                WAITING => Poll::Pending,
                _ => Poll::Ready(()),
            }
        })
        .await;
        slot
    }

    /// Works in a slot that it waits for. If others take the slot, the work has [`END_TIMEOUT`] to
    /// be done, and then waits and starts again.
    pub async fn run<F: Future>(self: &Arc<Self>, path: &[K], work: impl Fn() -> F) -> F::Output {
        loop {
            let slot = self.acquire(path).await;
            slot.set(Class::BetweenExchanges);
            if let Some(done) = slot.run(pin!(work())).await {
                return done;
            }
        }
    }

    fn enter(self: &Arc<Self>, path: &[K], group_limit: usize, waits: bool) -> Option<Slot<K>> {
        let mut tree = self.tree();
        let leaf = tree.leaf(path);
        let entry = tree.entry(leaf, 1);
        let group = tree.holders(leaf).nth(1).unwrap_or(ROOT);
        let within_group =
            tree.make_room_in((group, group_limit.max(1)), SLOTS, Some(&entry), waits);
        let made = within_group.and_then(|asked| {
            let within_all = tree.make_room(SLOTS, Some(&entry), waits);
            within_all.map(|other| other.or(asked))
        });
        let asked = match made {
            Ok(asked) => asked,
            Err(Refused) if waits => {
                tree.wait(&entry);
                None
            }
            Err(Refused) => {
                tree.remove(&entry);
                return None;
            }
        };
        drop(tree);
        Some(Slot {
            admission: self.clone(),
            entry,
            predecessor: Mutex::new(asked.map(Predecessor)),
        })
    }

    /// The number of slots that the holder with this path has. Without a path, of all.
    pub fn used(&self, path: &[K]) -> usize {
        self.uses(path)[SLOTS]
    }

    /// The number of bytes that the holder with this path has. Without a path, of all, also of those
    /// that end.
    pub fn used_bytes(&self, path: &[K]) -> usize {
        let ending = path.is_empty().then(|| self.tree().ending);
        self.uses(path)[BYTES] + ending.unwrap_or(0)
    }

    /// The number of bytes that connections may have, without the reserve.
    pub fn max_bytes(&self) -> usize {
        self.tree().limits[BYTES]
    }

    fn uses(&self, path: &[K]) -> [usize; 2] {
        let tree = self.tree();
        let mut node = &tree.nodes[ROOT];
        for key in path {
            match node.children.get(key) {
                Some(child) => node = &tree.nodes[*child],
                None => return [0; 2],
            }
        }
        node.used
    }

    fn update_pressure(&self, tree: &Tree<K>) {
        let is_under_pressure = tree.is_under_pressure();
        self.is_under_pressure.store(is_under_pressure, Relaxed);
    }

    /// Each update is complete before the lock is released, so the state is valid after a panic.
    fn tree(&self) -> MutexGuard<'_, Tree<K>> {
        lock(&self.tree)
    }
}

/// The slot of a connection and its bytes, released on drop.
#[derive(Debug)]
pub struct Slot<K: Clone + Eq + Hash> {
    admission: Arc<Admission<K>>,
    entry: Arc<Entry>,
    predecessor: Mutex<Option<Predecessor>>,
}

impl<K: Clone + Eq + Hash> Slot<K> {
    /// Runs the work of the connection, once the earlier connection of its slot has ended. Returns
    /// `None` if another connection takes the slot before the work is done.
    pub async fn run<T>(&self, mut work: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        let predecessor = std::mem::take(&mut *lock(&self.predecessor));
        let mut wait = predecessor.map(|predecessor| Box::pin(predecessor.ended()));
        let mut asked = None;
        let mut is_registered = false;
        poll_fn(|cx| {
            if !is_registered {
                *lock(&self.entry.task) = Some(cx.waker().clone());
                is_registered = true;
            }
            if self.entry.state.load(Relaxed) == ASKED {
                let asked = asked.get_or_insert_with(|| Box::pin(sleep(END_TIMEOUT)));
                if asked.as_mut().poll(cx).is_ready() {
                    self.entry.tell(ENDED);
                }
            }
            // The work is polled once more, so that it can end in its own way.
            let is_ended = self.is_ended();
            let polled = match &mut wait {
                Some(waiting) => match waiting.as_mut().poll(cx) {
                    Poll::Ready(()) => {
                        wait = None;
                        work.as_mut().poll(cx)
                    }
                    Poll::Pending => Poll::Pending,
                },
                None => work.as_mut().poll(cx),
            };
            match polled {
                Poll::Pending if is_ended => Poll::Ready(None),
                polled => polled.map(Some),
            }
        })
        .await
    }

    /// Wakes a task when the connection has to end, for work without a task of its own.
    pub fn wake_on_end(&self, task: Waker) {
        *lock(&self.entry.task) = Some(task);
    }

    /// Moves the connection with its bytes to another holder. Needs no slot.
    pub fn reassign(&self, path: &[K]) {
        let mut tree = self.admission.tree();
        tree.remove(&self.entry);
        let leaf = tree.leaf(path);
        tree.insert(leaf, &self.entry);
    }

    /// Work of the same holder that ends on its own, such as a connection that is kept. It has bytes,
    /// and takes no slot.
    pub fn beside(&self) -> Self {
        let mut tree = self.admission.tree();
        let entry = tree.entry(self.entry.leaf.load(Relaxed), 0);
        Self {
            admission: self.admission.clone(),
            entry,
            predecessor: Mutex::default(),
        }
    }

    /// Releases the slot before the end of the connection. Others do not end the connection from now
    /// on, and its bytes stay charged to its holder.
    pub fn release(&self) {
        let mut tree = self.admission.tree();
        if !self.is_ended() {
            self.entry.state.store(RELEASED, Relaxed);
        }
        tree.change(&self.entry, SLOTS, self.entry.uses(SLOTS), 0);
        tree.wait_no_longer(&self.entry);
        tree.grant();
        drop(tree);
        self.entry.gone.notify_one();
    }

    /// A number of the holder, unique in this tree.
    pub fn holder(&self) -> u64 {
        self.admission.tree().nodes[self.entry.leaf.load(Relaxed)].number
    }

    /// Changes a part of the bytes that the connection holds, for new work. False if they grow, and
    /// the holder gets no more: then nothing has changed.
    pub fn begin(&self, from: usize, to: usize) -> bool {
        self.change(from, to, |tree| {
            if self.entry.is_ending() {
                tree.has_reserve()
            } else {
                tree.make_room(BYTES, Some(&self.entry), false).is_ok()
            }
        })
    }

    /// As [`Slot::begin`], for work in progress, which also gets what is left of the reserve.
    pub fn hold(&self, from: usize, to: usize) -> bool {
        self.change(from, to, |tree| {
            let is_ending = self.entry.is_ending();
            !is_ending && tree.make_room(BYTES, Some(&self.entry), false).is_ok()
                || tree.has_reserve()
        })
    }

    /// As [`Slot::begin`], but nothing ends for what the holder can do without.
    pub fn try_hold(&self, from: usize, to: usize) -> bool {
        self.change(from, to, |tree| {
            !self.entry.is_ending() && tree.is_free(self.entry.leaf.load(Relaxed))
        })
    }

    /// As [`Slot::begin`], but nothing ends for what the client would ask for again.
    pub fn hold_share(&self, from: usize, to: usize) -> bool {
        self.change(from, to, |tree| {
            !self.entry.is_ending() && tree.has_share(self.entry.leaf.load(Relaxed))
        })
    }

    fn change(&self, from: usize, to: usize, is_left: impl Fn(&mut Tree<K>) -> bool) -> bool {
        let mut tree = self.admission.tree();
        tree.change(&self.entry, BYTES, from, to);
        let is_left = to <= from || is_left(&mut tree);
        if !is_left {
            tree.change(&self.entry, BYTES, to, from);
        }
        self.admission.update_pressure(&tree);
        is_left
    }

    /// The bytes that all connections may hold together.
    pub fn max_bytes(&self) -> usize {
        self.admission.max_bytes()
    }

    /// Whether three quarters of the bytes are in use.
    pub fn is_under_pressure(&self) -> bool {
        self.admission.is_under_pressure.load(Relaxed)
    }

    /// Sets the activity of the connection from now on.
    pub fn set(&self, class: Class) {
        self.entry.class.store(class as u8, Relaxed);
    }

    /// The connection is in use, and has traffic.
    pub fn touch(&self) {
        self.set(Class::InUse);
        self.entry.has_traffic.store(true, Relaxed);
    }

    /// Whether the connection must carry no further exchange.
    pub fn is_asked_to_end(&self) -> bool {
        [ASKED, ENDED].contains(&self.entry.state.load(Relaxed))
    }

    /// Whether the connection has to be reset.
    pub fn is_ended(&self) -> bool {
        self.entry.state.load(Relaxed) == ENDED
    }
}

impl<K: Clone + Eq + Hash> Drop for Slot<K> {
    fn drop(&mut self) {
        self.release();
        let mut tree = self.admission.tree();
        tree.remove(&self.entry);
        if self.entry.is_ending() {
            tree.ending -= self.entry.uses(BYTES);
        }
    }
}

/// A connection that is asked to end in favor of another one.
#[derive(Debug)]
struct Predecessor(Arc<Entry>);

impl Predecessor {
    async fn ended(self) {
        // Its task may not run: the new connection does not wait for it any longer.
        let _ = timeout(2 * END_TIMEOUT, self.0.gone.notified()).await;
    }
}

impl Drop for Predecessor {
    fn drop(&mut self) {
        self.0.tell(ENDED);
    }
}

/// The record of a connection in the tree.
#[derive(Debug)]
struct Entry {
    /// In the order of their start.
    number: u64,
    /// The node of its holder, and what it uses. They only change under the lock.
    leaf: AtomicUsize,
    uses: [AtomicUsize; 2],
    class: AtomicU8,
    /// There was traffic since the last time that a connection in use of this holder ended.
    has_traffic: AtomicBool,
    state: AtomicU8,
    /// Its bytes and slot belong to no holder any more.
    is_ending: AtomicBool,
    task: Mutex<Option<Waker>>,
    /// Notified when the slot is released.
    gone: Notify,
}

impl Entry {
    fn uses(&self, resource: Resource) -> usize {
        self.uses[resource].load(Relaxed)
    }

    fn is_ending(&self) -> bool {
        self.is_ending.load(Relaxed)
    }

    fn class(&self) -> Class {
        CLASSES[usize::from(self.class.load(Relaxed))]
    }

    /// The order in which the connections of a holder end: first the oldest ones, but of those in
    /// use the youngest ones. A connection beside others that is in use ends last: it frees little, as what
    /// passes through it is charged to the others.
    fn order(&self) -> (Class, bool, bool, u64, Reverse<u64>) {
        match self.class() {
            Class::InUse => {
                let is_beside = self.uses(SLOTS) == 0;
                let has_traffic = self.has_traffic.load(Relaxed);
                (
                    Class::InUse,
                    is_beside,
                    has_traffic,
                    0,
                    Reverse(self.number),
                )
            }
            class => (class, false, false, self.number, Reverse(0)),
        }
    }

    fn tell(&self, state: u8) {
        self.state.fetch_max(state, Relaxed);
        if let Some(task) = &*lock(&self.task) {
            task.wake_by_ref();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const ROOT: usize = 0;

/// The connection that needs more belongs to the holder that gives way.
struct Refused;

#[derive(Debug)]
struct Tree<K: Clone + Eq + Hash> {
    /// The limit of each resource.
    limits: [usize; 2],
    /// The number of the last node or connection.
    next: u64,
    /// The bytes of connections that were told to end.
    ending: usize,
    nodes: Vec<Node<K>>,
    /// The indexes of unused nodes.
    free: Vec<usize>,
}

#[derive(Debug)]
struct Node<K> {
    /// In the order in which the holders came.
    number: u64,
    /// The holder above it, and its key there.
    parent: Option<(usize, K)>,
    used: [usize; 2],
    children: HashMap<K, usize>,
    /// The connections of a holder without others below it.
    connections: BTreeMap<u64, Arc<Entry>>,
    /// The connections that wait for a slot of this holder, or of one below it.
    waiting: BTreeMap<u64, Arc<Entry>>,
}

impl<K> Node<K> {
    fn new(number: u64, parent: Option<(usize, K)>) -> Self {
        Self {
            number,
            parent,
            used: [0; 2],
            children: HashMap::new(),
            connections: BTreeMap::new(),
            waiting: BTreeMap::new(),
        }
    }
}

impl<K: Clone + Eq + Hash> Tree<K> {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The node of the holder with this path.
    fn leaf(&mut self, path: &[K]) -> usize {
        let mut id = ROOT;
        for key in path {
            id = match self.nodes[id].children.get(key) {
                Some(child) => *child,
                None => {
                    let node = Node::new(self.number(), Some((id, key.clone())));
                    let child = self.free.pop().unwrap_or(self.nodes.len());
                    match self.nodes.get_mut(child) {
                        Some(free) => *free = node,
                        None => self.nodes.push(node),
                    }
                    self.nodes[id].children.insert(key.clone(), child);
                    child
                }
            };
        }
        id
    }

    /// A new connection of this holder with so many slots.
    fn entry(&mut self, leaf: usize, slots: usize) -> Arc<Entry> {
        let entry = Arc::new(Entry {
            number: self.number(),
            leaf: leaf.into(),
            uses: [slots.into(), 0.into()],
            class: AtomicU8::new(Class::Silent as u8),
            has_traffic: AtomicBool::new(false),
            state: AtomicU8::new(HELD),
            is_ending: AtomicBool::new(false),
            task: Mutex::new(None),
            gone: Notify::new(),
        });
        self.insert(leaf, &entry);
        entry
    }

    fn insert(&mut self, leaf: usize, entry: &Arc<Entry>) {
        let connections = &mut self.nodes[leaf].connections;
        connections.insert(entry.number, entry.clone());
        entry.leaf.store(leaf, Relaxed);
        if !entry.is_ending() {
            self.count(entry, |used, uses| used + uses);
        }
    }

    fn remove(&mut self, entry: &Entry) {
        if !entry.is_ending() {
            self.count(entry, |used, uses| used - uses);
        }
        let mut id = entry.leaf.load(Relaxed);
        self.nodes[id].connections.remove(&entry.number);
        while self.nodes[id].connections.is_empty() && self.nodes[id].children.is_empty() {
            let Some((parent, key)) = self.nodes[id].parent.take() else {
                return;
            };
            self.nodes[parent].children.remove(&key);
            self.free.push(id);
            id = parent;
        }
    }

    /// Takes the slot of a connection, which waits for another one.
    fn wait(&mut self, entry: &Arc<Entry>) {
        entry.state.store(WAITING, Relaxed);
        self.change(entry, SLOTS, 1, 0);
        let holders: Vec<_> = self.holders(entry.leaf.load(Relaxed)).collect();
        for id in holders {
            let waiting = &mut self.nodes[id].waiting;
            waiting.insert(entry.number, entry.clone());
        }
    }

    fn wait_no_longer(&mut self, entry: &Entry) {
        let mut holder = Some(entry.leaf.load(Relaxed));
        while let Some(id) = holder
            && self.nodes[id].waiting.remove(&entry.number).is_some()
        {
            holder = self.nodes[id].parent.as_ref().map(|(above, _)| *above);
        }
    }

    /// Gives free slots to those that wait: of the holders of a level, to the one with the fewest,
    /// since the shares of a level are equal.
    fn grant(&mut self) {
        while let root = &self.nodes[ROOT]
            && !root.waiting.is_empty()
            && root.used[SLOTS] < self.limits[SLOTS]
        {
            let mut id = ROOT;
            let first = loop {
                let children = self.nodes[id].children.values();
                let turns = children.filter_map(|child| {
                    let node = &self.nodes[*child];
                    let first = node.waiting.keys().next()?;
                    Some((node.used[SLOTS], *first, *child))
                });
                match turns.min() {
                    Some((_, _, child)) => id = child,
                    None => break self.nodes[id].waiting.values().next(),
                }
            };
            let Some(first) = first.cloned() else {
                return;
            };
            self.wait_no_longer(&first);
            self.change(&first, SLOTS, 0, 1);
            first.tell(HELD);
        }
    }

    /// Counts a connection for its holders.
    fn count(&mut self, entry: &Entry, count: impl Fn(usize, usize) -> usize) {
        for resource in [SLOTS, BYTES] {
            let uses = entry.uses(resource);
            self.update(entry, resource, |used| count(used, uses));
        }
    }

    /// Changes what a connection uses.
    fn change(&mut self, entry: &Entry, resource: Resource, from: usize, to: usize) {
        let uses = entry.uses(resource) - from + to;
        entry.uses[resource].store(uses, Relaxed);
        match (entry.is_ending(), resource) {
            (false, _) => self.update(entry, resource, |used| used - from + to),
            (true, BYTES) => self.ending = self.ending - from + to,
            (true, _) => {}
        }
    }

    fn update(&mut self, entry: &Entry, resource: Resource, update: impl Fn(usize) -> usize) {
        let mut id = entry.leaf.load(Relaxed);
        loop {
            let node = &mut self.nodes[id];
            node.used[resource] = update(node.used[resource]);
            match node.parent {
                Some((parent, _)) => id = parent,
                None => return,
            }
        }
    }

    /// The holder with this node, and those above it.
    fn holders(&self, id: usize) -> impl Iterator<Item = usize> {
        let above = |id: &usize| self.nodes[*id].parent.as_ref().map(|(above, _)| *above);
        std::iter::successors(Some(id), above)
    }

    /// The share of a holder of the bytes, or what would be its share beside so many more holders at
    /// each level but the first one.
    fn share(&self, id: usize, more: usize) -> usize {
        let above = self.holders(id).skip(1);
        above.fold(self.limits[BYTES], |share, above| {
            let more = if above == ROOT { 0 } else { more };
            share / (self.nodes[above].children.len() + more)
        })
    }

    fn is_within_share(&self, id: usize, more: usize) -> bool {
        self.nodes[id].used[BYTES] <= self.share(id, more)
    }

    /// Whether a holder may have bytes for which nothing ends: those that are free, or its share.
    fn has_share(&self, leaf: usize) -> bool {
        let limit = self.limits[BYTES];
        let is_bounded = |id: usize| {
            let beyond = self.nodes[id].used[BYTES].saturating_sub(limit);
            beyond
                <= if id == ROOT {
                    limit
                } else {
                    self.share(id, 0).min(limit / 2)
                }
        };
        self.nodes[ROOT].used[BYTES] + self.ending <= limit
            || self.is_within_share(leaf, 0) && self.holders(leaf).all(is_bounded)
    }

    /// Whether a holder may have bytes that it can do without.
    fn is_free(&self, leaf: usize) -> bool {
        self.nodes[ROOT].used[BYTES] <= self.limits[BYTES] / 4
            || !self.is_under_pressure() && self.holders(leaf).all(|id| self.is_within_share(id, 1))
    }

    /// Whether three quarters of the bytes are in use.
    fn is_under_pressure(&self) -> bool {
        self.nodes[ROOT].used[BYTES] + self.ending >= self.limits[BYTES] / 4 * 3
    }

    /// Whether some of the reserve is left.
    fn has_reserve(&self) -> bool {
        let used = self.nodes[ROOT].used[BYTES] + self.ending;
        used.saturating_sub(self.limits[BYTES]) <= self.limits[BYTES] / (RESERVE - 1)
    }

    /// Ends connections until the resource suffices for `new`, which was counted. Returns the one that
    /// was asked to end, if any. If `new` waits, no connection of its own holder ends.
    fn make_room(
        &mut self,
        resource: Resource,
        new: Option<&Entry>,
        waits: bool,
    ) -> Result<Option<Arc<Entry>>, Refused> {
        let limit = self.limits[resource];
        if self.nodes[ROOT].used[resource] > limit {
            self.make_room_in((ROOT, limit), resource, new, waits)
        } else {
            Ok(None)
        }
    }

    /// As [`Tree::make_room`], for a holder with a limit.
    fn make_room_in(
        &mut self,
        (top, limit): (usize, usize),
        resource: Resource,
        new: Option<&Entry>,
        waits: bool,
    ) -> Result<Option<Arc<Entry>>, Refused> {
        let is_over = |tree: &Self| tree.nodes[top].used[resource] > limit;
        if let Some(new) = new
            && is_over(self)
            && resource == BYTES
            && !self.has_reserve()
            && (self.ending > self.limits[BYTES] / (RESERVE - 1)
                || !self.is_within_share(new.leaf.load(Relaxed), 0))
        {
            return Err(Refused);
        }
        let mut asked = None;
        while is_over(self) {
            let has_reserve = self.has_reserve();
            let victim = self.victim(top, resource, new, waits).ok_or(Refused)?;
            self.count(&victim, |used, uses| used - uses);
            victim.is_ending.store(true, Relaxed);
            self.ending += victim.uses(BYTES);
            match victim.class() {
                Class::BetweenExchanges if has_reserve => {
                    victim.tell(ASKED);
                    asked = Some(victim);
                }
                _ => victim.tell(ENDED),
            }
        }
        Ok(asked)
    }

    /// The connection that ends in favor of `new`, or `None` if `new` is refused, or waits.
    fn victim(
        &self,
        top: usize,
        resource: Resource,
        new: Option<&Entry>,
        waits: bool,
    ) -> Option<Arc<Entry>> {
        let own: Vec<_> = new
            .into_iter()
            .flat_map(|new| self.holders(new.leaf.load(Relaxed)))
            .collect();
        let mut id = top;
        let largest = |id: usize| {
            let children = self.nodes[id].children.values().copied();
            children.max_by_key(|child| {
                let node = &self.nodes[*child];
                (node.used[resource], own.contains(child), node.number)
            })
        };
        while let Some(child) = largest(id) {
            id = child;
        }
        if waits && own.first() == Some(&id) {
            return None;
        }
        let connections = &self.nodes[id].connections;
        let others = || {
            let others = connections.values();
            others.filter(|one| {
                let is_new = new.is_some_and(|new| new.number == one.number);
                !is_new && !one.is_ending() && one.uses(resource) > 0
            })
        };
        let silent = others().find(|one| one.class() == Class::Silent);
        let victim = silent.or_else(|| others().min_by_key(|one| one.order()))?;
        if victim.class() == Class::InUse {
            if own.first() == Some(&id) {
                return None;
            }
            for connection in connections.values() {
                connection.has_traffic.store(false, Relaxed);
            }
        }
        Some(victim.clone())
    }
}

#[cfg(test)]
mod tests;
