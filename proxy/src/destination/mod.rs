//! Step 2, outbound: the destinations of one worker. A destination is an original destination
//! address, which discovery resolves to the backend of a Service, or of a pod. Idle destinations are
//! evicted. This module opens no connections.

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::OnceCell;

use crate::balance::Backend;
use crate::connect::Pools;
use crate::detect::Protocol;
use crate::discovery::{Discovery, Resource};
use crate::exceptions::Exceptions;
use crate::flow::Direction;
use crate::route::Routes;

/// The maximum number of destinations of a worker, and of backends. Those above it are served, but
/// not shared or kept.
const MAX_DESTINATIONS: usize = 10_000;
/// Destinations without discovery may leave this many values behind that are neither in use nor
/// connected, such as the ports of a scan.
const MAX_UNCONNECTED: usize = 256;
/// How long a destination without connections is kept.
const DESTINATION_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// The same for one without discovery, which is as it was when it is made again.
const FIXED_IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// The destinations of one worker, and the backends of their routes.
pub struct Destinations {
    discovery: Discovery,
    destinations: Registry<SocketAddr, Destination>,
    backends: Registry<Arc<str>, Backend>,
    /// The connections to their endpoints.
    pools: Rc<Pools>,
}

/// Values by name that discovery keeps up to date. Idle ones are evicted.
struct Registry<K, T> {
    entries: RefCell<HashMap<K, Rc<Entry<T>>>>,
    limit: usize,
    /// The number of entries from which unconnected ones are removed.
    release_at: Cell<usize>,
}

/// A value, set when the first response of discovery arrives. Concurrent callers wait for the same
/// response.
struct Entry<T> {
    value: OnceCell<Rc<T>>,
    /// The value was requested since the last eviction run.
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
    /// Creates an empty set, whose connections are in `pools`. If discovery is off, as on the inbound
    /// path, each address is its own endpoint.
    pub fn new(discovery: Discovery, pools: Pools) -> Self {
        Self {
            discovery,
            destinations: Registry::new(MAX_DESTINATIONS),
            backends: Registry::new(MAX_DESTINATIONS),
            pools: Rc::new(pools),
        }
    }

    /// The destination at `address`. For a new one, subscribes to it and waits for the first
    /// response of discovery, which is limited in time.
    pub async fn get_or_watch(&self, address: SocketAddr) -> Rc<Destination> {
        let resolve = async || {
            let backend = if self.discovery.is_off() {
                Backend::fixed(address, &self.pools)
            } else {
                let updates = self.discovery.watch(address).await;
                Backend::watched(address, updates, &self.pools)
            };
            Destination::new(address, backend)
        };
        self.destinations
            .get_or_resolve(address, async || self.retry_refused(resolve).await)
            .await
    }

    /// The backend with this name, "NAMESPACE/SERVICE:PORT". Waits as for a destination.
    pub async fn backend(&self, name: &Arc<str>) -> Rc<Backend> {
        let resolve = async || {
            let resource = Resource::Backend(name.clone());
            let updates = self.discovery.watch(resource.clone()).await;
            Backend::watched(resource, updates, &self.pools)
        };
        self.backends
            .get_or_resolve(name.clone(), async || self.retry_refused(resolve).await)
            .await
    }

    /// The destination at `address` with the address itself as its endpoint, without discovery.
    pub fn fixed(&self, address: SocketAddr) -> Rc<Destination> {
        let fixed = || {
            let backend = Backend::fixed(address, &self.pools);
            Rc::new(Destination::new(address, backend))
        };
        self.destinations.release_unconnected();
        let Some(entry) = self.destinations.entry(address) else {
            return fixed();
        };
        entry.used.set(true);
        if let Some(destination) = entry.value.get() {
            return destination.clone();
        }
        let destination = fixed();
        // Fails while a caller waits for discovery. Then this destination is not shared.
        let _ = entry.value.set(destination.clone());
        destination
    }

    /// Changes the maximum number of idle HTTP/1 connections to their endpoints.
    pub fn set_max_idle(&self, max: usize) {
        self.pools.set_max_idle(max);
    }

    /// Reports what has ended since the last time, and what is ejected or open.
    pub fn report(&self, direction: Direction, exceptions: &Exceptions, now: Instant) {
        self.destinations.report(direction, exceptions, now);
        self.backends.report(direction, exceptions, now);
    }

    /// Evicts what is idle (destinations, backends, connections), and applies updates to those
    /// without requests. The worker calls it every few seconds.
    pub fn evict_idle(&self, now: Instant) {
        self.destinations.evict_idle(now);
        self.backends.evict_idle(now);
        self.pools.evict_idle(now);
    }

    /// Resolves again if discovery refused the subscription and others can be given up.
    async fn retry_refused<T: AsRef<Backend>>(&self, resolve: impl AsyncFn() -> T) -> T {
        let value = resolve().await;
        let is_refused = value.as_ref().is_refused();
        let release = || self.destinations.release_unused() | self.backends.release_unused();
        if !is_refused || !release() {
            return value;
        }
        resolve().await
    }
}

impl<K: Clone + Eq + Hash, T: AsRef<Backend>> Registry<K, T> {
    fn new(limit: usize) -> Self {
        Self {
            entries: RefCell::default(),
            limit,
            release_at: Cell::new(MAX_UNCONNECTED),
        }
    }

    /// The value with this name. One that discovery refuses is not kept: the next caller subscribes
    /// again. Over the limit, values are not shared.
    async fn get_or_resolve(&self, key: K, resolve: impl AsyncFn() -> T) -> Rc<T> {
        let Some(entry) = self.entry(key) else {
            return Rc::new(resolve().await);
        };
        entry.used.set(true);
        let resolve = async || {
            let value = Rc::new(resolve().await);
            match (*value).as_ref().is_refused() {
                true => Err(value),
                false => Ok(value),
            }
        };
        let value = entry.value.get_or_try_init(resolve).await;
        value.cloned().unwrap_or_else(|refused| refused)
    }

    fn report(&self, direction: Direction, exceptions: &Exceptions, now: Instant) {
        let has_exceptions = !exceptions.is_empty();
        for value in self.entries.borrow().values() {
            if let Some(value) = value.value.get() {
                let backend = (**value).as_ref();
                backend.report(direction, exceptions, has_exceptions, now);
            }
        }
    }

    fn evict_idle(&self, now: Instant) {
        let mut entries = self.entries.borrow_mut();
        entries.retain(|_, entry| {
            let retain = entry.should_retain(now);
            if let (true, Some(value)) = (retain, entry.value.get()) {
                (**value).as_ref().apply_updates();
            }
            retain
        });
        if entries.len() < entries.capacity() / 4 {
            entries.shrink_to_fit();
        }
    }

    /// The entry for `key`. None if all entries are in use and the limit is reached.
    fn entry(&self, key: K) -> Option<Rc<Entry<T>>> {
        let mut entries = self.entries.borrow_mut();
        if let Some(entry) = entries.get(&key) {
            return Some(entry.clone());
        }
        if entries.len() >= self.limit {
            drop(entries);
            self.release_unused();
            entries = self.entries.borrow_mut();
        }
        (entries.len() < self.limit).then(|| entries.entry(key).or_default().clone())
    }

    /// Removes values that are neither in use nor connected, once there are many more values than
    /// those of the last time.
    fn release_unconnected(&self) {
        let mut entries = self.entries.borrow_mut();
        if entries.len() < self.release_at.get() {
            return;
        }
        let is_connected = |value: &Rc<T>| (**value).as_ref().has_connections();
        entries.retain(|_, entry| entry.is_in_use() || entry.value.get().is_some_and(is_connected));
        self.release_at.set(2 * entries.len() + MAX_UNCONNECTED);
    }

    /// Removes values that are not in use, which frees subscriptions of discovery. Returns whether
    /// there were any.
    fn release_unused(&self) -> bool {
        let mut entries = self.entries.borrow_mut();
        let before = entries.len();
        entries.retain(|_, entry| entry.is_in_use());
        entries.len() < before
    }
}

impl<T> Default for Entry<T> {
    fn default() -> Self {
        Self {
            value: OnceCell::default(),
            used: Cell::default(),
            idle_since: Cell::default(),
        }
    }
}

impl<T: AsRef<Backend>> Entry<T> {
    /// Whether a connection or a request uses the value, or waits for it.
    fn is_in_use(self: &Rc<Self>) -> bool {
        let value = self.value.get();
        Rc::strong_count(self) > 1 || value.is_some_and(|value| Rc::strong_count(value) > 1)
    }

    /// Whether the value was used recently, and discovery still updates it. If not, the next
    /// request subscribes again.
    fn should_retain(&self, now: Instant) -> bool {
        let (mut held, mut unwatched, mut timeout) = (false, false, DESTINATION_IDLE_TIMEOUT);
        if let Some(value) = self.value.get() {
            let backend = (**value).as_ref();
            (held, unwatched) = (Rc::strong_count(value) > 1, backend.is_unwatched());
            if backend.is_fixed() && !backend.has_connections() {
                timeout = FIXED_IDLE_TIMEOUT;
            }
        }
        if self.used.take() || held {
            self.idle_since.set(None);
        }
        let since = self.idle_since.get().unwrap_or(now);
        self.idle_since.set(Some(since));
        !unwatched && now.saturating_duration_since(since) < timeout
    }
}

impl AsRef<Backend> for Backend {
    fn as_ref(&self) -> &Backend {
        self
    }
}

impl AsRef<Backend> for Destination {
    fn as_ref(&self) -> &Backend {
        &self.backend
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

    /// The protocol that the endpoints or their Service declare. None: it is detected.
    pub fn app_protocol(&self) -> Option<Protocol> {
        self.backend.app_protocol()
    }

    /// The name for logs: `namespace/name` of the Service or pod, else the address.
    pub fn name(&self) -> Rc<str> {
        self.backend.name()
    }

    /// The routes of its HTTP requests, if there are any.
    pub fn routes(&self) -> Option<Arc<Routes>> {
        self.backend.routes()
    }
}

impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.address, self.name())
    }
}
