//! Step 2, outbound: the destinations of one worker. A destination is an original destination
//! address, which discovery resolves to the backend of a Service, or of a pod. Idle destinations are
//! evicted. This module opens no connections.

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::OnceCell;

use crate::balance::Backend;
use crate::connect::Pools;
use crate::discovery::{AppProtocol, Discovery};

/// The maximum number of destinations of a worker. Destinations above it are served, but not shared
/// or kept.
const MAX_DESTINATIONS: usize = 10_000;
/// How long a destination without connections is kept.
const DESTINATION_IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// The destinations of one worker.
pub struct Destinations {
    discovery: Discovery,
    entries: RefCell<HashMap<SocketAddr, Rc<Entry>>>,
    /// The connections to their endpoints.
    pools: Rc<Pools>,
    limit: usize,
}

/// A destination, set when the first response of discovery arrives. Concurrent callers wait for the
/// same response.
#[derive(Default)]
struct Entry {
    destination: OnceCell<Rc<Destination>>,
    /// The destination was requested since the last eviction run.
    used: Cell<bool>,
    idle_since: Cell<Option<Instant>>,
}

/// An original destination.
pub struct Destination {
    /// The original destination address.
    pub address: SocketAddr,
    /// An endpoint has announced support for extended CONNECT requests (RFC 8441), which open
    /// WebSockets.
    pub supports_extended_connect: Cell<bool>,
    backend: Rc<Backend>,
}

impl Destinations {
    /// Creates an empty set. If discovery is off, as on the inbound path, each address is its own
    /// endpoint.
    pub fn new(discovery: Discovery) -> Self {
        Self {
            discovery,
            entries: RefCell::default(),
            pools: Rc::default(),
            limit: MAX_DESTINATIONS,
        }
    }

    /// The destination at `address`. For a new one, subscribes to it and waits for the first
    /// response of discovery, which is limited in time.
    pub async fn get_or_watch(&self, address: SocketAddr) -> Rc<Destination> {
        let Some(entry) = self.entry(address) else {
            return Rc::new(self.resolve(address).await);
        };
        entry.used.set(true);
        // A refused destination is not kept: the next caller subscribes again.
        let resolve = async || {
            let destination = Rc::new(self.resolve(address).await);
            if destination.is_refused() {
                Err(destination)
            } else {
                Ok(destination)
            }
        };
        entry
            .destination
            .get_or_try_init(resolve)
            .await
            .cloned()
            .unwrap_or_else(|refused| refused)
    }

    /// The destination at `address` with the address itself as its endpoint, without discovery.
    pub fn fixed(&self, address: SocketAddr) -> Rc<Destination> {
        let fixed = || {
            let backend = Backend::fixed(address, &self.pools);
            Rc::new(Destination::new(address, backend))
        };
        let Some(entry) = self.entry(address) else {
            return fixed();
        };
        entry.used.set(true);
        if let Some(destination) = entry.destination.get() {
            return destination.clone();
        }
        let destination = fixed();
        // Fails while a caller waits for discovery. Then this destination is not shared.
        let _ = entry.destination.set(destination.clone());
        destination
    }

    /// Evicts idle destinations and idle connections, and applies updates to destinations without
    /// requests. The worker calls it every few seconds.
    pub fn evict_idle(&self, now: Instant) {
        let mut entries = self.entries.borrow_mut();
        entries.retain(|_, entry| {
            let retain = entry.should_retain(now);
            if let (true, Some(destination)) = (retain, entry.destination.get()) {
                destination.backend.apply_updates();
            }
            retain
        });
        if entries.len() < entries.capacity() / 4 {
            entries.shrink_to_fit();
        }
        self.pools.evict_idle(now);
    }

    /// The number of destinations.
    pub fn len(&self) -> usize {
        self.entries.borrow().len()
    }

    /// Whether there is no destination.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The entry for `address`. None if all entries are in use and the limit is reached.
    fn entry(&self, address: SocketAddr) -> Option<Rc<Entry>> {
        let mut entries = self.entries.borrow_mut();
        if let Some(entry) = entries.get(&address) {
            return Some(entry.clone());
        }
        if entries.len() >= self.limit {
            drop(entries);
            self.release_unused();
            entries = self.entries.borrow_mut();
        }
        (entries.len() < self.limit).then(|| entries.entry(address).or_default().clone())
    }

    async fn resolve(&self, address: SocketAddr) -> Destination {
        let resolve = async || {
            let backend = if self.discovery.is_off() {
                Backend::fixed(address, &self.pools)
            } else {
                let updates = self.discovery.watch(address).await;
                Backend::watched(address, updates, &self.pools)
            };
            Destination::new(address, backend)
        };
        let destination = resolve().await;
        if !destination.is_refused() || !self.release_unused() {
            return destination;
        }
        resolve().await
    }

    /// Removes destinations without connections, which frees subscriptions of discovery. Returns
    /// whether there were any.
    fn release_unused(&self) -> bool {
        let mut entries = self.entries.borrow_mut();
        let before = entries.len();
        entries.retain(|_, entry| entry.is_in_use());
        entries.len() < before
    }
}

impl Entry {
    /// Whether a connection uses the destination, or waits for it.
    fn is_in_use(self: &Rc<Self>) -> bool {
        Rc::strong_count(self) > 1
            || self
                .destination
                .get()
                .is_some_and(|destination| Rc::strong_count(destination) > 1)
    }

    /// Whether the destination was used recently, and discovery still updates it. If not, the next
    /// request subscribes again.
    fn should_retain(&self, now: Instant) -> bool {
        let (held, unwatched) = match self.destination.get() {
            Some(destination) => (
                Rc::strong_count(destination) > 1,
                destination.backend.is_unwatched(),
            ),
            None => (false, false),
        };
        if self.used.take() || held {
            self.idle_since.set(None);
        }
        let since = self.idle_since.get().unwrap_or(now);
        self.idle_since.set(Some(since));
        !unwatched && now.saturating_duration_since(since) < DESTINATION_IDLE_TIMEOUT
    }
}

impl Destination {
    fn new(address: SocketAddr, backend: Backend) -> Self {
        Self {
            address,
            supports_extended_connect: Cell::new(false),
            backend: Rc::new(backend),
        }
    }

    /// A destination whose only endpoint is `address` itself, with connections of its own.
    pub fn fixed(address: SocketAddr) -> Self {
        Self::new(address, Backend::fixed(address, &Rc::default()))
    }

    /// The backend of a connection or request to this destination.
    pub fn backend(&self) -> &Rc<Backend> {
        &self.backend
    }

    /// The protocol that the endpoints or their Service declare.
    pub fn app_protocol(&self) -> AppProtocol {
        self.backend.app_protocol()
    }

    /// The name for logs: `namespace/name` of the Service or pod, else the address.
    pub fn name(&self) -> Rc<str> {
        self.backend.name()
    }

    /// Whether discovery refused the subscription, because its table of destinations is full.
    fn is_refused(&self) -> bool {
        self.backend.is_refused()
    }
}

impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.address, self.name())
    }
}
