//! Step 6: of a destination's endpoints, the one for the next request. A worker's own, all of it: no locks, no atomics but
//! the one that tells whether discovery has news. It connects to nothing.

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

/// Destinations that a worker keeps. One more is served all the same, but nothing of it is shared or kept while all are in use.
const MAX_DESTINATIONS: usize = 10_000;
/// A destination that no connection uses is kept this long.
const KEEP_DESTINATION: Duration = Duration::from_secs(60);
/// An idle connection to an endpoint is kept this long.
pub(crate) const KEEP_CONNECTION: Duration = Duration::from_secs(30);

/// The destinations that one worker meets.
pub struct Destinations {
    discovery: Discovery,
    slots: RefCell<HashMap<SocketAddr, Rc<Slot>>>,
    limit: usize,
}

/// A destination, once its first answer is there: those who ask meanwhile wait for the same one.
#[derive(Default)]
struct Slot {
    destination: OnceCell<Rc<Destination>>,
    /// Asked for since the last sweep.
    touched: Cell<bool>,
    idle_since: Cell<Option<Instant>>,
}

/// Where connections were going, and who is behind it.
pub struct Destination {
    /// Where they were going.
    pub address: SocketAddr,
    /// An endpoint has announced that it takes WebSockets in HTTP/2 (RFC 8441).
    pub takes_extended_connect: Cell<bool>,
    news: Option<RefCell<watch::Receiver<Arc<Target>>>>,
    state: RefCell<State>,
}

struct State {
    name: Rc<str>,
    app_protocol: AppProtocol,
    refused: bool,
    /// In the order of their addresses, each address once.
    members: Vec<Member>,
}

struct Member {
    /// As last announced: a new `Arc` is a new announcement.
    info: Arc<EndpointInfo>,
    endpoint: Rc<Endpoint>,
}

impl Destinations {
    /// Those that discovery knows; where it is off, as for the inbound path, each is where it is.
    pub fn new(discovery: Discovery) -> Self {
        Self {
            discovery,
            slots: RefCell::default(),
            limit: MAX_DESTINATIONS,
        }
    }

    /// The destination at `address`. Where it is new, waits for discovery's first answer, a bounded time.
    pub async fn get_or_watch(&self, address: SocketAddr) -> Rc<Destination> {
        let Some(slot) = self.slot(address) else {
            return Rc::new(self.make(address).await);
        };
        slot.touched.set(true);
        // One that was refused is not kept: who comes next asks anew.
        let make = async || {
            let destination = Rc::new(self.make(address).await);
            if destination.is_refused() {
                Err(destination)
            } else {
                Ok(destination)
            }
        };
        slot.destination
            .get_or_try_init(make)
            .await
            .cloned()
            .unwrap_or_else(|refused| refused)
    }

    /// The destination at `address`, taken as it is: discovery is not asked.
    pub fn fixed(&self, address: SocketAddr) -> Rc<Destination> {
        let fixed = || Rc::new(Destination::fixed(address));
        let Some(slot) = self.slot(address) else {
            return fixed();
        };
        slot.touched.set(true);
        if let Some(destination) = slot.destination.get() {
            return destination.clone();
        }
        let destination = fixed();
        // Where somebody waits for discovery's word on it, this one is not kept.
        let _ = slot.destination.set(destination.clone());
        destination
    }

    /// Forgets destinations and closes connections that nobody has used for a while, and takes in discovery's news for
    /// those that nobody uses now. To be called every few seconds.
    pub fn evict_idle(&self, now: Instant) {
        let connections_since = now.checked_sub(KEEP_CONNECTION);
        let mut slots = self.slots.borrow_mut();
        slots.retain(|_, slot| {
            let keep = slot.is_worth_keeping(now);
            if let (true, Some(destination)) = (keep, slot.destination.get()) {
                destination.tidy(connections_since, now);
            }
            keep
        });
        if slots.len() < slots.capacity() / 4 {
            slots.shrink_to_fit();
        }
    }

    /// How many destinations are kept.
    pub fn len(&self) -> usize {
        self.slots.borrow().len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn slot(&self, address: SocketAddr) -> Option<Rc<Slot>> {
        let mut slots = self.slots.borrow_mut();
        if let Some(slot) = slots.get(&address) {
            return Some(slot.clone());
        }
        if slots.len() >= self.limit {
            drop(slots);
            self.release_unused();
            slots = self.slots.borrow_mut();
        }
        (slots.len() < self.limit).then(|| slots.entry(address).or_default().clone())
    }

    async fn make(&self, address: SocketAddr) -> Destination {
        if self.discovery.is_off() {
            return Destination::fixed(address);
        }
        let destination = Destination::watched(address, self.discovery.watch(address).await);
        if !destination.is_refused() || !self.release_unused() {
            return destination;
        }
        Destination::watched(address, self.discovery.watch(address).await)
    }

    /// Forgets what no connection uses now; false where there was nothing. Discovery has room for others then.
    fn release_unused(&self) -> bool {
        let mut slots = self.slots.borrow_mut();
        let before = slots.len();
        slots.retain(|_, slot| slot.is_in_use());
        slots.len() < before
    }
}

impl Slot {
    /// Whether a connection has the destination, or waits for it.
    fn is_in_use(self: &Rc<Self>) -> bool {
        Rc::strong_count(self) > 1
            || self
                .destination
                .get()
                .is_some_and(|destination| Rc::strong_count(destination) > 1)
    }

    /// False once nobody has held or asked for it for a while, or where discovery has let go of it: who asks next asks anew.
    fn is_worth_keeping(&self, now: Instant) -> bool {
        let (held, orphaned) = match self.destination.get() {
            Some(destination) => (Rc::strong_count(destination) > 1, destination.is_orphaned()),
            None => (false, false),
        };
        if self.touched.take() || held {
            self.idle_since.set(None);
        }
        let since = self.idle_since.get().unwrap_or(now);
        self.idle_since.set(Some(since));
        !orphaned && now.saturating_duration_since(since) < KEEP_DESTINATION
    }
}

impl Destination {
    /// One that is where it is: the local app, or a place that nobody needs to know more of.
    pub fn fixed(address: SocketAddr) -> Self {
        Self::new(
            address,
            None,
            State::of(&Target::Unknown, address, Vec::new()),
        )
    }

    fn watched(address: SocketAddr, mut news: watch::Receiver<Arc<Target>>) -> Self {
        let state = State::of(&news.borrow_and_update(), address, Vec::new());
        Self::new(address, Some(RefCell::new(news)), state)
    }

    fn new(
        address: SocketAddr,
        news: Option<RefCell<watch::Receiver<Arc<Target>>>>,
        state: State,
    ) -> Self {
        Self {
            address,
            takes_extended_connect: Cell::new(false),
            news,
            state: RefCell::new(state),
        }
    }

    /// What it speaks, as far as its endpoints or its Service declare.
    pub fn app_protocol(&self) -> AppProtocol {
        self.take_news();
        self.state.borrow().app_protocol
    }

    /// For logs and errors: "namespace/name" where it is known, else its address.
    pub fn name(&self) -> Rc<str> {
        self.state.borrow().name.clone()
    }

    /// The endpoint for the next request: the better of two drawn at random, none of those that were tried. One that refused a
    /// connection lately only where all have. Fails where there is none, or none is left.
    pub fn pick(
        &self,
        tried: &[SocketAddr],
        rng: &mut fastrand::Rng,
    ) -> Result<Rc<Endpoint>, Failure> {
        self.take_news();
        let state = self.state.borrow();
        state
            .pick(tried, rng)
            .cloned()
            .ok_or_else(|| match state.refused {
                true => Failure::Overloaded("too many destinations are in use"),
                false => Failure::NoEndpoint(state.name.to_string()),
            })
    }

    /// How many endpoints there are.
    pub fn endpoints_len(&self) -> usize {
        self.take_news();
        self.state.borrow().members.len()
    }

    /// An atomic load where there are none. Endpoints that stay keep their loads and pools; those that went take no request more.
    fn take_news(&self) {
        let Some(news) = &self.news else { return };
        // An error says that nothing will come any more: what is known stays.
        if news.borrow().has_changed().unwrap_or(false) {
            let target = news.borrow_mut().borrow_and_update().clone();
            let before = std::mem::take(&mut self.state.borrow_mut().members);
            self.state.replace(State::of(&target, self.address, before));
        }
    }

    fn tidy(&self, connections_since: Option<Instant>, now: Instant) {
        self.take_news();
        if let Some(since) = connections_since {
            self.state
                .borrow()
                .members
                .iter()
                .for_each(|member| member.endpoint.pool.evict_idle(since, now));
        }
    }

    /// There was no room to ask discovery about it.
    fn is_refused(&self) -> bool {
        self.state.borrow().refused
    }

    /// Discovery will never say more of it.
    fn is_orphaned(&self) -> bool {
        self.news
            .as_ref()
            .is_some_and(|news| news.borrow().has_changed().is_err())
    }
}

impl State {
    fn of(target: &Target, address: SocketAddr, before: Vec<Member>) -> Self {
        let itself = || vec![endpoint::bare(address)];
        let (name, app_protocol, endpoints) = match target {
            Target::Withheld => {
                let name = format!(
                    "{address}, which may be meshed and which the controller has not described yet,"
                );
                (name, AppProtocol::Detect, Vec::new())
            }
            Target::Refused => (address.to_string(), AppProtocol::Detect, Vec::new()),
            Target::Unknown => (address.to_string(), AppProtocol::Detect, itself()),
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
        // The endpoints' own declaration counts more than their Service's.
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
        let chosen = p2c::choose(self.members.len(), rng, healthy, is_cheaper);
        let chosen = chosen.or_else(|| {
            p2c::choose(
                self.members.len(),
                rng,
                |index| untried(at(index)),
                is_cheaper,
            )
        });
        chosen.map(at)
    }
}

impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.address, self.name())
    }
}

/// The members for `after`, which is in the order of addresses as `before` is. Who is the same as before stays the same
/// endpoint; who is not takes no connection back any more.
fn merge(before: Vec<Member>, after: Vec<Arc<EndpointInfo>>) -> Vec<Member> {
    let mut before = before.into_iter().peekable();
    let mut members = Vec::with_capacity(after.len());
    for info in after {
        while let Some(gone) = before.next_if(|member| member.info.address < info.address) {
            gone.endpoint.pool.close();
        }
        let endpoint = match before.next_if(|member| member.info.address == info.address) {
            Some(member) if is_same(&member.info, &info) => {
                if !Arc::ptr_eq(&member.info, &info) {
                    member.endpoint.announced();
                }
                member.endpoint
            }
            other => {
                other.inspect(|gone| gone.endpoint.pool.close());
                Rc::new(Endpoint::new(&info))
            }
        };
        members.push(Member { info, endpoint });
    }
    before.for_each(|gone| gone.endpoint.pool.close());
    members
}

/// The same process behind the same address: another pod may have taken the address over, or have joined the mesh.
fn is_same(one: &EndpointInfo, other: &EndpointInfo) -> bool {
    one.address == other.address && one.pod == other.pod && one.identity == other.identity
}
