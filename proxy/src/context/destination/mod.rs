//! Step 2, outbound: the backends of one worker, for original destination addresses and for routes.
//! Discovery resolves an address to a Service or a pod. Idle ones are evicted. This module opens no
//! connections.

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{OnceCell, watch};

use crate::discovery::{Discovery, Resource, Target};
use crate::endpoint::ExternalHost;
use crate::observe::exceptions::Exceptions;
use crate::upstream::balance::Backend;
use crate::upstream::connect::Pools;
use diy_mesh_model::exchange::Direction;

/// The maximum number of backends of a worker. Those above it are served, but not shared or kept.
const MAX_DESTINATIONS: usize = 10_000;
/// Destinations without discovery may leave this many values behind that are neither in use nor
/// connected, such as the ports of a scan.
const MAX_UNCONNECTED: usize = 256;
/// How long a destination without connections is kept.
const DESTINATION_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// The same for one without discovery, which is as it was when it is made again.
const FIXED_IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// The backends of one worker, which discovery keeps up to date. Idle ones are evicted.
pub struct Destinations {
    discovery: Discovery,
    entries: RefCell<HashMap<Resource, Rc<Entry>>>,
    limit: usize,
    /// The number of entries from which unconnected ones are removed.
    release_at: Cell<usize>,
    /// The connections to their endpoints.
    pools: Rc<Pools>,
}

/// A backend, set when the first response of discovery arrives. Concurrent callers wait for the same
/// response.
#[derive(Default)]
struct Entry {
    backend: OnceCell<Rc<Backend>>,
    /// The backend was requested since the last eviction run.
    used: Cell<bool>,
    idle_since: Cell<Option<Instant>>,
}

impl Destinations {
    /// Creates an empty set, whose connections are in `pools`. If discovery is off, as on the inbound
    /// path, each address is its own endpoint.
    pub fn new(discovery: Discovery, pools: Pools) -> Self {
        Self {
            discovery,
            entries: RefCell::default(),
            limit: MAX_DESTINATIONS,
            release_at: Cell::new(MAX_UNCONNECTED),
            pools: Rc::new(pools),
        }
    }

    /// The backend of the original destination `address`. For a new one, subscribes to it and waits
    /// for the first response of discovery, which is limited in time.
    pub async fn get_or_watch(&self, address: SocketAddr) -> Rc<Backend> {
        if self.discovery.is_off() {
            self.fixed(address)
        } else {
            self.discovered(address.into()).await
        }
    }

    /// The backend with this name, "NAMESPACE/SERVICE:PORT". Waits as for a destination.
    pub async fn backend(&self, name: &Arc<str>) -> Rc<Backend> {
        self.discovered(Resource::Backend(name.clone())).await
    }

    /// The backend of a host outside of the cluster. `follow` resolves a new one.
    pub async fn external(
        &self,
        host: &Arc<ExternalHost>,
        follow: impl AsyncFn() -> watch::Receiver<Arc<Target>>,
    ) -> Rc<Backend> {
        self.watched(Resource::External(host.clone()), follow).await
    }

    async fn discovered(&self, resource: Resource) -> Rc<Backend> {
        let follow = async || self.discovery.watch(resource.clone()).await;
        self.watched(resource.clone(), follow).await
    }

    /// One that discovery refuses is not kept: the next caller subscribes again. Over the limit,
    /// backends are not shared.
    async fn watched(
        &self,
        resource: Resource,
        follow: impl AsyncFn() -> watch::Receiver<Arc<Target>>,
    ) -> Rc<Backend> {
        let watch = async || {
            let updates = follow().await;
            Rc::new(Backend::watched(resource.clone(), updates, &self.pools))
        };
        let resolve = async || {
            let backend = watch().await;
            // The table of discovery is full, and others may be given up. One that is refused for what
            // its own namespace takes is watched: to give up others would not help it.
            let is_full = backend.is_refused() && backend.is_unwatched();
            if is_full && self.release_unused() {
                watch().await
            } else {
                backend
            }
        };
        let Some(entry) = self.entry(resource.clone()) else {
            return resolve().await;
        };
        entry.used.set(true);
        let resolve = async || {
            let backend = resolve().await;
            if backend.is_refused() {
                Err(backend)
            } else {
                Ok(backend)
            }
        };
        let backend = entry.backend.get_or_try_init(resolve).await;
        backend.cloned().unwrap_or_else(|refused| refused)
    }

    /// The backend whose only endpoint is `address` itself, without discovery.
    pub fn fixed(&self, address: SocketAddr) -> Rc<Backend> {
        let fixed = || Rc::new(Backend::fixed(address, &self.pools));
        self.release_unconnected();
        let Some(entry) = self.entry(address.into()) else {
            return fixed();
        };
        entry.used.set(true);
        if let Some(backend) = entry.backend.get() {
            return backend.clone();
        }
        let backend = fixed();
        // Fails while a caller waits for discovery. Then this backend is not shared.
        let _ = entry.backend.set(backend.clone());
        backend
    }

    /// The backends that are known, in the order of their names.
    pub fn backends(&self) -> Vec<Rc<Backend>> {
        let entries = self.entries.borrow();
        let known = entries.values().filter_map(|entry| entry.backend.get());
        let mut known: Vec<_> = known.cloned().collect();
        known.sort_by_cached_key(|backend| backend.resource().to_string());
        known
    }

    /// Changes the maximum number of idle HTTP/1 connections to their endpoints.
    pub fn set_max_idle(&self, max: usize) {
        self.pools.set_max_idle(max);
    }

    /// Reports what has ended since the last time, and what is ejected or open.
    pub fn report(&self, direction: Direction, exceptions: &Exceptions, now: Instant) {
        let has_exceptions = !exceptions.is_empty();
        for entry in self.entries.borrow().values() {
            if let Some(backend) = entry.backend.get() {
                backend.report(direction, exceptions, has_exceptions, now);
            }
        }
    }

    /// Evicts what is idle (backends, connections), and applies updates to those without requests. The
    /// worker calls it every few seconds.
    pub fn evict_idle(&self, now: Instant) {
        let mut entries = self.entries.borrow_mut();
        entries.retain(|_, entry| {
            let retain = entry.should_retain(now);
            if let (true, Some(backend)) = (retain, entry.backend.get()) {
                backend.apply_updates();
            }
            retain
        });
        if entries.len() < entries.capacity() / 4 {
            entries.shrink_to_fit();
        }
        drop(entries);
        self.pools.evict_idle(now);
    }

    /// The entry for `resource`, or `None` if all entries are in use and the limit is reached.
    fn entry(&self, resource: Resource) -> Option<Rc<Entry>> {
        let mut entries = self.entries.borrow_mut();
        if let Some(entry) = entries.get(&resource) {
            return Some(entry.clone());
        }
        if entries.len() >= self.limit {
            drop(entries);
            self.release_unused();
            entries = self.entries.borrow_mut();
        }
        (entries.len() < self.limit).then(|| entries.entry(resource).or_default().clone())
    }

    /// Removes backends that are neither in use nor connected, once there are many more backends than
    /// after the last removal.
    fn release_unconnected(&self) {
        let mut entries = self.entries.borrow_mut();
        if entries.len() < self.release_at.get() {
            return;
        }
        let is_connected = |backend: &Rc<Backend>| backend.has_connections();
        entries
            .retain(|_, entry| entry.is_in_use() || entry.backend.get().is_some_and(is_connected));
        self.release_at.set(2 * entries.len() + MAX_UNCONNECTED);
    }

    /// Removes backends that are not in use, which frees subscriptions of discovery. Returns whether
    /// there were any.
    fn release_unused(&self) -> bool {
        let mut entries = self.entries.borrow_mut();
        let before = entries.len();
        entries.retain(|_, entry| entry.is_in_use());
        entries.len() < before
    }
}

impl Entry {
    /// Whether a connection or a request uses the backend, or waits for it.
    fn is_in_use(self: &Rc<Self>) -> bool {
        let backend = self.backend.get();
        Rc::strong_count(self) > 1 || backend.is_some_and(|backend| Rc::strong_count(backend) > 1)
    }

    /// Whether the backend was used recently, and discovery still updates it. If not, the next
    /// request subscribes again.
    fn should_retain(&self, now: Instant) -> bool {
        let (mut held, mut unwatched, mut timeout) = (false, false, DESTINATION_IDLE_TIMEOUT);
        if let Some(backend) = self.backend.get() {
            (held, unwatched) = (Rc::strong_count(backend) > 1, backend.is_unwatched());
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
