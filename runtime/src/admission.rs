//! Admission: who may have a connection while connections are limited. Each connection takes a slot
//! of its holder. Holders are a tree, such as a namespace with its workloads.
//!
//! A share is the number of slots of a level, divided by its holders; the slots of a level are the
//! share of the holder above it. A holder may use what others leave free. When all slots are in use,
//! a new connection takes the slot of the holder that is furthest above its share, never of one at
//! or below it. Among more holders than slots, the first ones keep one each. Within that holder, the
//! order is: silent connections, idle ones, those between two HTTP exchanges, and then its youngest
//! exchange or opaque connection, first those without traffic. If the holder of the new connection
//! is furthest above its share, only a connection of it without an exchange ends, or else the new
//! one is refused.
//!
//! Knows neither sockets nor what a holder is. Below the limit, a new connection only changes the
//! counts of its holders. What a connection does while it is open is one store to an atomic.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::future::{Future, poll_fn};
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

/// Time that an HTTP connection between two exchanges has to end.
pub const END_TIMEOUT: Duration = Duration::from_secs(1);

/// What a connection does, in the order in which connections end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// The client has not authenticated, or has sent nothing that tells its protocol.
    Silent,
    /// HTTP without a request so far.
    Idle,
    /// HTTP between two exchanges: it is asked to end.
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

/// What a connection was told.
const NOTHING: u8 = 0;
const ASKED: u8 = 1;
const ENDED: u8 = 2;

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
        self.tree().limit = limit.max(1);
    }

    /// A slot for a connection of the last holder of this path. It may be that of another
    /// connection, which is told to end. None if the new one is refused.
    pub fn admit(self: &Arc<Self>, path: &[K]) -> Option<Slot<K>> {
        self.admit_within(path, usize::MAX)
    }

    /// As [`Admission::admit`], with at most this many slots for the holder above the last one.
    pub fn admit_within(self: &Arc<Self>, path: &[K], group_limit: usize) -> Option<Slot<K>> {
        let mut tree = self.tree();
        let entry = Arc::new(Entry::new(tree.number()));
        tree.insert(path, &entry);
        let group = tree.above(entry.leaf.load(Relaxed)).unwrap_or(ROOT);
        let mut predecessor = None;
        let exceeded = [(ROOT, tree.limit), (group, group_limit.max(1))];
        let mut exceeded = exceeded
            .into_iter()
            .find(|(id, limit)| tree.nodes[id].used > *limit);
        while let Some((from, slots)) = exceeded {
            let Some(victim) = tree.victim(&entry, from, slots) else {
                tree.remove(&entry);
                return None;
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
        }
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
        self.entry.told.load(Relaxed) != NOTHING
    }

    /// Whether the connection has to be reset.
    pub fn is_ended(&self) -> bool {
        self.entry.told.load(Relaxed) == ENDED
    }
}

impl<K: Clone + Eq + Hash> Drop for Slot<K> {
    fn drop(&mut self) {
        self.admission.tree().remove(&self.entry);
        self.entry.gone.notify_one();
    }
}

/// A connection between two exchanges, which ends in favor of another one.
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
    /// The node of its holder, which only changes under the lock. [`ROOT`] without a slot.
    leaf: AtomicU64,
    class: AtomicU8,
    /// There was traffic since the last time that a connection in use of this holder ended.
    has_traffic: AtomicBool,
    told: AtomicU8,
    task: Mutex<Option<Waker>>,
    /// Notified when the slot is dropped.
    gone: Notify,
}

impl Entry {
    fn new(number: u64) -> Self {
        Self {
            number,
            leaf: AtomicU64::new(ROOT),
            class: AtomicU8::new(Class::Silent as u8),
            has_traffic: AtomicBool::new(false),
            told: AtomicU8::new(NOTHING),
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

    fn tell(&self, word: u8) {
        self.told.store(word, Relaxed);
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
}

impl<K> Node<K> {
    fn new(parent: Option<(u64, K)>) -> Self {
        Self {
            parent,
            used: 0,
            children: HashMap::new(),
            connections: BTreeMap::new(),
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

    fn insert(&mut self, path: &[K], entry: &Arc<Entry>) {
        let mut id = ROOT;
        for key in path {
            self.node(id).used += 1;
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
        let leaf = self.node(id);
        leaf.used += 1;
        leaf.connections.insert(entry.number, entry.clone());
        entry.leaf.store(id, Relaxed);
    }

    /// Takes the slot of a connection. False if it has none.
    fn remove(&mut self, entry: &Entry) -> bool {
        let mut id = entry.leaf.swap(ROOT, Relaxed);
        if id == ROOT {
            return false;
        }
        self.node(id).connections.remove(&entry.number);
        loop {
            let node = self.node(id);
            node.used -= 1;
            let (used, parent) = (node.used, node.parent.clone());
            let Some((parent, key)) = parent else {
                return true;
            };
            if used == 0 {
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
    /// new one, which has been inserted. None if the new one is refused.
    fn victim(&self, new: &Entry, mut id: u64, mut slots: usize) -> Option<Arc<Entry>> {
        let own_leaf = new.leaf.load(Relaxed);
        let own = std::iter::successors(Some(own_leaf), |id| self.above(*id));
        let own: Vec<u64> = own.collect();
        while !self.nodes[&id].children.is_empty() {
            let children = &self.nodes[&id].children;
            slots = (slots / children.len()).max(1);
            let furthest = children.values().max_by_key(|child| {
                let excess = self.nodes[child].used.saturating_sub(slots);
                (excess, own.contains(child), **child)
            });
            id = *furthest?;
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
