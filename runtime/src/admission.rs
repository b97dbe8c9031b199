//! Admission: who may have a connection, or may work, while slots for it are limited. Each takes a
//! slot of its holder. Holders are a tree, such as a namespace with its workloads.
//!
//! A share is the number of slots of a level, divided by its holders; the slots of a level are the
//! share of the holder above it. A holder may use what others leave free. When all slots are in use,
//! a new connection takes the slot of the holder that is furthest above its share, never of one at
//! or below it. Among more holders than slots, the first ones keep one each. Within that holder, the
//! order is: silent connections, idle ones, those between two HTTP exchanges, and then its youngest
//! exchange or opaque connection, first those without traffic. If the holder of the new connection
//! is furthest above its share, only a connection of it without an exchange ends, or else the new
//! one is refused. A new one that may wait ends none of its own holder: it waits. A slot that is
//! released goes to the waiting holder that is furthest below its share, among equals to the first.
//!
//! Knows neither sockets nor what a holder is. Below the limit, a new connection only changes the
//! counts of its holders. What a connection does while it is open is one store to an atomic.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::future::{Future, poll_fn};
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

/// Time that a connection has to end, or work to be done, from when it is asked to end.
pub const END_TIMEOUT: Duration = Duration::from_secs(1);

/// What a connection does, in the order in which connections end.
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

/// A limited number of slots.
#[derive(Debug)]
pub struct Admission<K: Clone + Eq + Hash>(Mutex<Tree<K>>);

impl<K: Clone + Eq + Hash> Admission<K> {
    /// This many slots, and at least one.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Tree {
            limit: limit.max(1),
            next: ROOT + 1,
            nodes: HashMap::from([(ROOT, Node::new(None))]),
        })))
    }

    /// Changes the number of slots. Connections beyond a smaller one end when the next one comes.
    pub fn resize(&self, limit: usize) {
        let mut tree = self.tree();
        tree.limit = limit.max(1);
        tree.grant();
    }

    /// A slot for a connection of the last holder of this path. It may be that of another
    /// connection, which is told to end. None if the new one is refused.
    pub fn admit(self: &Arc<Self>, path: &[K]) -> Option<Slot<K>> {
        self.admit_within(path, usize::MAX)
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
        let entry = Arc::new(Entry::new(tree.number()));
        tree.insert(path, &entry);
        tree.hold(&entry);
        let group = tree.above(entry.leaf.load(Relaxed)).unwrap_or(ROOT);
        let mut predecessor = None;
        let exceeded = [(ROOT, tree.limit), (group, group_limit.max(1))];
        let mut exceeded = exceeded
            .into_iter()
            .find(|(id, limit)| tree.nodes[id].used > *limit);
        while let Some((from, slots)) = exceeded {
            let Some(victim) = tree.victim(&entry, from, slots, waits) else {
                tree.remove(&entry);
                if !waits {
                    return None;
                }
                tree.insert(path, &entry);
                tree.wait(&entry);
                break;
            };
            tree.remove(&victim);
            match victim.class() {
                Class::BetweenExchanges => {
                    victim.tell(ASKED);
                    predecessor = Some(Predecessor(victim));
                }
                _ => victim.tell(ENDED),
            }
            // More than one only after the number of slots has become smaller.
            exceeded = Some((ROOT, tree.limit)).filter(|(id, limit)| tree.nodes[id].used > *limit);
        }
        drop(tree);
        Some(Slot {
            admission: self.clone(),
            entry,
            predecessor: Mutex::new(predecessor),
        })
    }

    /// The number of slots that the holder with this path has. Without a path, of all.
    pub fn used(&self, path: &[K]) -> usize {
        let tree = self.tree();
        let mut node = &tree.nodes[&ROOT];
        for key in path {
            match node.children.get(key) {
                Some(child) => node = &tree.nodes[child],
                None => return 0,
            }
        }
        node.used
    }

    /// Each update is complete before the lock is released, so the state is valid after a panic.
    fn tree(&self) -> MutexGuard<'_, Tree<K>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The slot of a connection, released on drop.
#[derive(Debug)]
pub struct Slot<K: Clone + Eq + Hash> {
    admission: Arc<Admission<K>>,
    entry: Arc<Entry>,
    predecessor: Mutex<Option<Predecessor>>,
}

impl<K: Clone + Eq + Hash> Slot<K> {
    /// Runs the work of the connection, once the connection whose slot it got has ended. None if
    /// another connection takes the slot before the work is done.
    pub async fn run<T>(&self, mut work: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        let predecessor = std::mem::take(&mut *lock(&self.predecessor));
        let mut wait = predecessor.map(|predecessor| Box::pin(predecessor.ended()));
        let mut is_registered = false;
        poll_fn(|cx| {
            if !is_registered {
                *lock(&self.entry.task) = Some(cx.waker().clone());
                is_registered = true;
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

    /// Moves the connection to another holder. Needs no slot.
    pub fn reassign(&self, path: &[K]) {
        let mut tree = self.admission.tree();
        if tree.remove(&self.entry) {
            tree.insert(path, &self.entry);
            tree.hold(&self.entry);
        }
    }

    /// Releases the slot before the end of the connection, which others do not end from now on.
    pub fn release(&self) {
        let mut tree = self.admission.tree();
        self.entry.state.store(RELEASED, Relaxed);
        tree.remove(&self.entry);
        tree.grant();
        drop(tree);
        self.entry.gone.notify_one();
    }

    /// What the connection does from now on.
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
    }
}

/// A connection that is asked to end in favor of another one.
#[derive(Debug)]
struct Predecessor(Arc<Entry>);

impl Predecessor {
    async fn ended(self) {
        if timeout(END_TIMEOUT, self.0.gone.notified()).await.is_err() {
            self.0.tell(ENDED);
            // Its task may not run: the new connection does not wait for it any longer.
            let _ = timeout(END_TIMEOUT, self.0.gone.notified()).await;
        }
    }
}

impl Drop for Predecessor {
    fn drop(&mut self) {
        self.0.tell(ENDED);
    }
}

/// What the tree knows of a connection.
#[derive(Debug)]
struct Entry {
    /// In the order of their start.
    number: u64,
    /// The node of its holder, which only changes under the lock. [`ROOT`] if it neither has a slot
    /// nor waits for one.
    leaf: AtomicU64,
    class: AtomicU8,
    /// There was traffic since the last time that a connection in use of this holder ended.
    has_traffic: AtomicBool,
    state: AtomicU8,
    task: Mutex<Option<Waker>>,
    /// Notified when the slot is released.
    gone: Notify,
}

impl Entry {
    fn new(number: u64) -> Self {
        Self {
            number,
            leaf: AtomicU64::new(ROOT),
            class: AtomicU8::new(Class::Silent as u8),
            has_traffic: AtomicBool::new(false),
            state: AtomicU8::new(HELD),
            task: Mutex::new(None),
            gone: Notify::new(),
        }
    }

    fn class(&self) -> Class {
        CLASSES[usize::from(self.class.load(Relaxed))]
    }

    /// The order in which the connections of a holder end: first the oldest ones, but of those in
    /// use the youngest ones.
    fn order(&self) -> (Class, bool, u64, Reverse<u64>) {
        match self.class() {
            Class::InUse => {
                let has_traffic = self.has_traffic.load(Relaxed);
                (Class::InUse, has_traffic, 0, Reverse(self.number))
            }
            class => (class, false, self.number, Reverse(0)),
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

const ROOT: u64 = 0;

#[derive(Debug)]
struct Tree<K: Clone + Eq + Hash> {
    limit: usize,
    /// The number of the next node or connection.
    next: u64,
    /// The holders by their numbers, in the order in which they came.
    nodes: HashMap<u64, Node<K>>,
}

#[derive(Debug)]
struct Node<K> {
    /// The holder above it, and its key there.
    parent: Option<(u64, K)>,
    used: usize,
    children: HashMap<K, u64>,
    /// Of a holder without others below it.
    connections: BTreeMap<u64, Arc<Entry>>,
    /// What waits for a slot of this holder, or of one below it.
    waiting: BTreeMap<u64, Arc<Entry>>,
}

impl<K> Node<K> {
    fn new(parent: Option<(u64, K)>) -> Self {
        Self {
            parent,
            used: 0,
            children: HashMap::new(),
            connections: BTreeMap::new(),
            waiting: BTreeMap::new(),
        }
    }
}

impl<K: Clone + Eq + Hash> Tree<K> {
    fn number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }

    fn node(&mut self, id: u64) -> &mut Node<K> {
        let node = self.nodes.get_mut(&id);
        node.expect("a holder with connections is in the tree")
    }

    /// Adds a connection to the last holder of this path, so far without a slot.
    fn insert(&mut self, path: &[K], entry: &Entry) {
        let mut id = ROOT;
        for key in path {
            id = match self.nodes[&id].children.get(key) {
                Some(child) => *child,
                None => {
                    let child = self.number();
                    self.nodes.insert(child, Node::new(Some((id, key.clone()))));
                    self.node(id).children.insert(key.clone(), child);
                    child
                }
            };
        }
        entry.leaf.store(id, Relaxed);
    }

    /// Gives a connection of the tree a slot.
    fn hold(&mut self, entry: &Arc<Entry>) {
        let leaf = entry.leaf.load(Relaxed);
        let connections = &mut self.node(leaf).connections;
        connections.insert(entry.number, entry.clone());
        let mut holder = Some(leaf);
        while let Some(id) = holder {
            let node = self.node(id);
            node.used += 1;
            node.waiting.remove(&entry.number);
            holder = self.above(id);
        }
    }

    /// Adds a connection of the tree to those that wait for a slot.
    fn wait(&mut self, entry: &Arc<Entry>) {
        entry.state.store(WAITING, Relaxed);
        let mut holder = Some(entry.leaf.load(Relaxed));
        while let Some(id) = holder {
            let waiting = &mut self.node(id).waiting;
            waiting.insert(entry.number, entry.clone());
            holder = self.above(id);
        }
    }

    /// Gives free slots to those that wait: of the holders of a level, to the one with the fewest,
    /// since the shares of a level are equal.
    fn grant(&mut self) {
        while let root = &self.nodes[&ROOT]
            && !root.waiting.is_empty()
            && root.used < self.limit
        {
            let mut id = ROOT;
            let first = loop {
                let children = self.nodes[&id].children.values();
                let turns = children.filter_map(|child| {
                    let node = &self.nodes[child];
                    let first = node.waiting.keys().next()?;
                    Some((node.used, *first, *child))
                });
                match turns.min() {
                    Some((_, _, child)) => id = child,
                    None => break self.nodes[&id].waiting.values().next(),
                }
            };
            let Some(first) = first.cloned() else {
                return;
            };
            self.hold(&first);
            first.tell(HELD);
        }
    }

    /// Takes the slot of a connection, or its turn. False if it has none.
    fn remove(&mut self, entry: &Entry) -> bool {
        let mut id = entry.leaf.swap(ROOT, Relaxed);
        if id == ROOT {
            return false;
        }
        let has_slot = self.node(id).connections.remove(&entry.number).is_some();
        loop {
            let node = self.node(id);
            node.used -= usize::from(has_slot);
            node.waiting.remove(&entry.number);
            let is_unused = node.used == 0 && node.waiting.is_empty();
            let Some((parent, key)) = node.parent.clone() else {
                return true;
            };
            if is_unused {
                self.nodes.remove(&id);
                self.node(parent).children.remove(&key);
            }
            id = parent;
        }
    }

    /// The holder above another one.
    fn above(&self, id: u64) -> Option<u64> {
        self.nodes[&id].parent.as_ref().map(|(above, _)| *above)
    }

    /// The connection of the holder `id` with `slots`, or of one below it, that ends in favor of a
    /// new one, which has been inserted. None if the new one is refused, or waits.
    fn victim(
        &self,
        new: &Entry,
        mut id: u64,
        mut slots: usize,
        waits: bool,
    ) -> Option<Arc<Entry>> {
        let own_leaf = new.leaf.load(Relaxed);
        let own = std::iter::successors(Some(own_leaf), |id| self.above(*id));
        let own: Vec<u64> = own.collect();
        while !self.nodes[&id].children.is_empty() {
            let children = &self.nodes[&id].children;
            slots = (slots / children.len()).max(1);
            let holding = children.values().filter(|child| self.nodes[child].used > 0);
            let furthest = holding.max_by_key(|child| {
                let excess = self.nodes[child].used.saturating_sub(slots);
                (excess, own.contains(child), **child)
            });
            id = *furthest?;
        }
        if waits && id == own_leaf {
            return None;
        }
        let connections = &self.nodes[&id].connections;
        let others = || connections.values().filter(|one| one.number != new.number);
        let silent = others().find(|one| one.class() == Class::Silent);
        let victim = silent.or_else(|| others().min_by_key(|one| one.order()))?;
        if victim.class() == Class::InUse {
            if id == own_leaf {
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
