//! Step 6: load balancing. Selects an endpoint of the destination for each request. Each worker has
//! its own balancers, so that selection takes no lock. Its only atomic operation checks for updates
//! from discovery. This module opens no connections.

mod endpoint;
mod ewma;
mod p2c;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{OnceCell, watch};

use crate::discovery::{AppProtocol, Discovery, EndpointInfo, Target};
use crate::error::Failure;
pub use endpoint::{Endpoint, InFlight};

/// The maximum number of destinations of a worker. Destinations above it are served, but not shared
/// or kept.
const MAX_DESTINATIONS: usize = 10_000;
/// How long a destination without connections is kept.
const DESTINATION_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an idle HTTP/1 connection to an endpoint is kept.
pub(crate) const CONNECTION_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// The destinations of one worker.
pub struct Destinations {
    discovery: Discovery,
    entries: RefCell<HashMap<SocketAddr, Rc<Entry>>>,
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

/// An original destination and its endpoints.
pub struct Destination {
    /// The original destination address.
    pub address: SocketAddr,
    /// An endpoint has announced support for extended CONNECT requests (RFC 8441), which open
    /// WebSockets.
    pub supports_extended_connect: Cell<bool>,
    updates: Option<RefCell<watch::Receiver<Arc<Target>>>>,
    state: RefCell<State>,
}

struct State {
    name: Rc<str>,
    app_protocol: AppProtocol,
    refused: bool,
    /// Sorted by address, without duplicates.
    members: Vec<Member>,
}

struct Member {
    /// The last announcement. A new `Arc` is a new announcement.
    info: Arc<EndpointInfo>,
    endpoint: Rc<Endpoint>,
}

impl Destinations {
    /// Creates an empty set. If discovery is off, as on the inbound path, each address is its own
    /// endpoint.
    pub fn new(discovery: Discovery) -> Self {
        Self {
            discovery,
            entries: RefCell::default(),
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
        let fixed = || Rc::new(Destination::fixed(address));
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
        let connections_since = now.checked_sub(CONNECTION_IDLE_TIMEOUT);
        let mut entries = self.entries.borrow_mut();
        entries.retain(|_, entry| {
            let retain = entry.should_retain(now);
            if let (true, Some(destination)) = (retain, entry.destination.get()) {
                destination.evict_idle_connections(connections_since, now);
            }
            retain
        });
        if entries.len() < entries.capacity() / 4 {
            entries.shrink_to_fit();
        }
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
        if self.discovery.is_off() {
            return Destination::fixed(address);
        }
        let destination = Destination::watched(address, self.discovery.watch(address).await);
        if !destination.is_refused() || !self.release_unused() {
            return destination;
        }
        Destination::watched(address, self.discovery.watch(address).await)
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
                destination.is_unwatched(),
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
    /// A destination whose only endpoint is `address` itself, such as the local application.
    pub fn fixed(address: SocketAddr) -> Self {
        Self {
            address,
            supports_extended_connect: Cell::new(false),
            updates: None,
            state: RefCell::new(State::new(&Target::Unknown, address, Vec::new())),
        }
    }

    fn watched(address: SocketAddr, mut updates: watch::Receiver<Arc<Target>>) -> Self {
        let state = State::new(&updates.borrow_and_update(), address, Vec::new());
        Self {
            updates: Some(RefCell::new(updates)),
            state: RefCell::new(state),
            ..Self::fixed(address)
        }
    }

    /// The protocol that the endpoints or their Service declare.
    pub fn app_protocol(&self) -> AppProtocol {
        self.apply_updates();
        self.state.borrow().app_protocol
    }

    /// The name for logs and errors: `namespace/name` of the Service or pod, else the address.
    pub fn name(&self) -> Rc<str> {
        self.state.borrow().name.clone()
    }

    /// Selects the endpoint for the next request: the better of two random ones, without those in
    /// `tried`. Selects a quarantined one only if all are quarantined. Fails if no endpoint is
    /// left.
    pub fn pick(
        &self,
        tried: &[SocketAddr],
        rng: &mut fastrand::Rng,
    ) -> Result<Rc<Endpoint>, Failure> {
        self.apply_updates();
        let state = self.state.borrow();
        state
            .pick(tried, rng)
            .cloned()
            .ok_or_else(|| match state.refused {
                true => Failure::Overloaded("too many destinations are in use"),
                false => Failure::NoEndpoint(state.name.to_string()),
            })
    }

    /// The number of endpoints.
    pub fn endpoints_len(&self) -> usize {
        self.apply_updates();
        self.state.borrow().members.len()
    }

    /// Applies the latest update of discovery. Costs an atomic load if there is none. Remaining
    /// endpoints keep their state. Removed endpoints get no further requests.
    fn apply_updates(&self) {
        let Some(updates) = &self.updates else { return };
        // An error means that no further update will arrive: the state stays as it is.
        if updates.borrow().has_changed().unwrap_or(false) {
            let target = updates.borrow_mut().borrow_and_update().clone();
            let before = std::mem::take(&mut self.state.borrow_mut().members);
            self.state
                .replace(State::new(&target, self.address, before));
        }
    }

    /// Closes the connections that are idle since before `connections_since`.
    fn evict_idle_connections(&self, connections_since: Option<Instant>, now: Instant) {
        self.apply_updates();
        if let Some(since) = connections_since {
            self.state
                .borrow()
                .members
                .iter()
                .for_each(|member| member.endpoint.pool.evict_idle(since, now));
        }
    }

    /// Whether discovery refused the subscription, because its table of destinations is full.
    fn is_refused(&self) -> bool {
        self.state.borrow().refused
    }

    /// Whether discovery will not update the destination again.
    fn is_unwatched(&self) -> bool {
        self.updates
            .as_ref()
            .is_some_and(|updates| updates.borrow().has_changed().is_err())
    }
}

impl State {
    fn new(target: &Target, address: SocketAddr, before: Vec<Member>) -> Self {
        let (name, app_protocol, endpoints) = match target {
            Target::Withheld => {
                let name = format!(
                    "{address}, which may be meshed and which the controller has not described yet,"
                );
                (name, AppProtocol::Detect, Vec::new())
            }
            Target::Refused => (address.to_string(), AppProtocol::Detect, Vec::new()),
            Target::Unknown => (
                address.to_string(),
                AppProtocol::Detect,
                vec![Arc::new(EndpointInfo::bare(address))],
            ),
            Target::Service(service) => (
                format!("{}/{}", service.namespace, service.name),
                service.app_protocol,
                service.endpoints.clone(),
            ),
            Target::Pod(pod) => (
                format!("{}/{}", pod.namespace, pod.name),
                pod.app_protocol,
                vec![pod.endpoint.clone()],
            ),
        };
        // The declaration of the endpoints overrides that of their Service.
        let opaque = !endpoints.is_empty() && endpoints.iter().all(|endpoint| endpoint.opaque);
        let app_protocol = if opaque {
            AppProtocol::Opaque
        } else {
            app_protocol
        };
        Self {
            name: name.into(),
            app_protocol,
            refused: *target == Target::Refused,
            members: merge(before, endpoints),
        }
    }

    fn pick(&self, tried: &[SocketAddr], rng: &mut fastrand::Rng) -> Option<&Rc<Endpoint>> {
        let untried = |endpoint: &Endpoint| !tried.contains(&endpoint.address);
        if let [only] = self.members.as_slice() {
            return untried(&only.endpoint).then_some(&only.endpoint);
        }
        let now = Instant::now();
        let at = |index: usize| &self.members[index].endpoint;
        let is_cheaper = |one, other| at(one).is_cheaper(at(other), now);
        let healthy = |index| untried(at(index)) && !at(index).is_quarantined(now);
        let count = self.members.len();
        p2c::choose(count, rng, healthy, is_cheaper)
            .or_else(|| p2c::choose(count, rng, |index| untried(at(index)), is_cheaper))
            .map(at)
    }
}

impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.address, self.name())
    }
}

/// Merges an update into the members. Both lists are sorted by address. Unchanged endpoints keep
/// their state. The pools of removed endpoints are closed.
fn merge(before: Vec<Member>, after: Vec<Arc<EndpointInfo>>) -> Vec<Member> {
    let mut before = before.into_iter().peekable();
    let mut members = Vec::with_capacity(after.len());
    for info in after {
        while let Some(removed) = before.next_if(|member| member.info.address < info.address) {
            removed.endpoint.pool.close();
        }
        let endpoint = match before.next_if(|member| member.info.address == info.address) {
            Some(member) if is_same(&member.info, &info) => {
                if !Arc::ptr_eq(&member.info, &info) {
                    member.endpoint.end_quarantine();
                }
                member.endpoint
            }
            other => {
                other.inspect(|removed| removed.endpoint.pool.close());
                Rc::new(Endpoint::new(&info))
            }
        };
        members.push(Member { info, endpoint });
    }
    before.for_each(|removed| removed.endpoint.pool.close());
    members
}

/// Whether both describe the same pod. Another pod may have the address now, or the pod may have
/// joined the mesh.
fn is_same(one: &EndpointInfo, other: &EndpointInfo) -> bool {
    one.address == other.address && one.pod == other.pod && one.identity == other.identity
}
