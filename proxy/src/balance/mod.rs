//! Step 6: load balancing. Selects an endpoint of the backend for each request. Each worker has its
//! own balancers, so that selection takes no lock. Its only atomic operation checks for updates
//! from discovery. This module opens no connections.

mod endpoint;
mod latency;
mod p2c;
mod quarantine;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::watch;

use crate::connect::Remote;
use crate::connect::{OpenPool, Pools};
use crate::discovery::{Affinity, AppProtocol, EndpointInfo, Target};
use crate::error::Failure;
pub use endpoint::{Endpoint, InFlight, is_failure_status};
use quarantine::Siblings;

/// The endpoints of a Service port, or of a pod, among which requests are balanced.
pub struct Backend {
    /// The original destination, which is the endpoint of what discovery does not know.
    address: SocketAddr,
    updates: Option<RefCell<watch::Receiver<Arc<Target>>>>,
    state: RefCell<State>,
    pools: Rc<Pools>,
    siblings: Rc<Siblings>,
}

struct State {
    name: Rc<str>,
    app_protocol: AppProtocol,
    /// Why there is no endpoint, if there is none.
    unavailable: Failure,
    /// Sorted by address, without duplicates.
    members: Vec<Member>,
    /// The endpoint that requests keep.
    affinity: Option<Arc<Affinity>>,
}

struct Member {
    /// The last announcement. A new `Arc` is a new announcement.
    info: Arc<EndpointInfo>,
    endpoint: Rc<Endpoint>,
    /// Its pool is open as long as a backend contains the endpoint.
    _pool: Rc<OpenPool>,
}

impl Backend {
    /// A backend whose only endpoint is `address` itself, such as the local application.
    pub fn fixed(address: SocketAddr, pools: &Rc<Pools>) -> Self {
        Self::new(address, &Target::Unknown, None, pools)
    }

    /// A backend that follows the updates of discovery for `address`.
    pub fn watched(
        address: SocketAddr,
        mut updates: watch::Receiver<Arc<Target>>,
        pools: &Rc<Pools>,
    ) -> Self {
        let target = updates.borrow_and_update().clone();
        Self::new(address, &target, Some(updates), pools)
    }

    fn new(
        address: SocketAddr,
        target: &Target,
        updates: Option<watch::Receiver<Arc<Target>>>,
        pools: &Rc<Pools>,
    ) -> Self {
        let siblings = Rc::default();
        let state = State::new(target, address, Vec::new(), pools, &siblings);
        Self {
            address,
            updates: updates.map(RefCell::new),
            state: RefCell::new(state),
            pools: pools.clone(),
            siblings,
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
    /// `tried`, or the previous one if the Service has session affinity. Selects a quarantined one
    /// only if all are quarantined. Fails if no endpoint is left.
    pub fn pick(
        &self,
        tried: &[SocketAddr],
        rng: &mut fastrand::Rng,
    ) -> Result<Rc<Endpoint>, Failure> {
        self.apply_updates();
        let state = self.state.borrow();
        let picked = state.pick(tried, rng).cloned();
        picked.ok_or_else(|| state.unavailable.clone())
    }

    /// The number of endpoints.
    pub fn endpoints_len(&self) -> usize {
        self.apply_updates();
        self.state.borrow().members.len()
    }

    /// Whether there is an endpoint other than this one, which may have been removed.
    pub fn has_other(&self, address: SocketAddr) -> bool {
        self.apply_updates();
        let state = self.state.borrow();
        let mut members = state.members.iter();
        members.any(|member| member.info.address != address)
    }

    /// The endpoint with this address.
    #[cfg(test)]
    pub fn endpoint(&self, address: SocketAddr) -> Option<Rc<Endpoint>> {
        let state = self.state.borrow();
        let member = |member: &&Member| member.info.address == address;
        let member = state.members.iter().find(member)?;
        Some(member.endpoint.clone())
    }

    /// Applies the latest update of discovery. Costs an atomic load if there is none. Remaining
    /// endpoints keep their state. Removed endpoints get no further requests.
    pub fn apply_updates(&self) {
        let Some(updates) = &self.updates else { return };
        // An error means that no further update will arrive: the state stays as it is.
        if updates.borrow().has_changed().unwrap_or(false) {
            let target = updates.borrow_mut().borrow_and_update().clone();
            let before = std::mem::take(&mut self.state.borrow_mut().members);
            let state = State::new(&target, self.address, before, &self.pools, &self.siblings);
            self.state.replace(state);
        }
    }

    /// Whether discovery refused the subscription, because its table of destinations is full.
    pub fn is_refused(&self) -> bool {
        matches!(self.state.borrow().unavailable, Failure::Overloaded(_))
    }

    /// Whether discovery will not update the backend again.
    pub fn is_unwatched(&self) -> bool {
        self.updates
            .as_ref()
            .is_some_and(|updates| updates.borrow().has_changed().is_err())
    }
}

impl State {
    fn new(
        target: &Target,
        address: SocketAddr,
        before: Vec<Member>,
        pools: &Pools,
        siblings: &Rc<Siblings>,
    ) -> Self {
        let (name, app_protocol, endpoints) = match target {
            Target::Withheld | Target::Refused => {
                (address.to_string(), AppProtocol::Detect, Vec::new())
            }
            Target::UnknownPort(unknown) => (
                format!("{}/{}", unknown.namespace, unknown.name),
                AppProtocol::Detect,
                Vec::new(),
            ),
            Target::Unknown => (
                address.to_string(),
                AppProtocol::Detect,
                vec![Arc::new(EndpointInfo::bare(address))],
            ),
            Target::Service(service) => (
                format!("{}/{}", service.namespace, service.name),
                service.app_protocol,
                service.usable().to_vec(),
            ),
            Target::Pod(pod) => (
                format!("{}/{}", pod.namespace, pod.name),
                pod.app_protocol,
                vec![pod.endpoint.clone()],
            ),
        };
        let unavailable = match target {
            Target::Refused => Failure::Overloaded("too many destinations are in use"),
            Target::Withheld => Failure::Withheld(address),
            Target::UnknownPort(unknown) => Failure::UnknownPort {
                service: name.clone(),
                port: address.port(),
                ports: unknown.ports.as_slice().into(),
            },
            _ => Failure::NoEndpoint(name.clone()),
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
            unavailable,
            members: merge(before, endpoints, pools, siblings),
            affinity: match target {
                Target::Service(service) => service.affinity.clone(),
                _ => None,
            },
        }
    }

    fn pick(&self, tried: &[SocketAddr], rng: &mut fastrand::Rng) -> Option<&Rc<Endpoint>> {
        let Some(affinity) = &self.affinity else {
            return self.balance(tried, rng);
        };
        let now = Instant::now();
        let is_usable = |endpoint: &Endpoint| {
            !tried.contains(&endpoint.address) && !endpoint.is_quarantined(now)
        };
        let kept = |address| {
            let member = |member: &Member| member.info.address.cmp(&address);
            let at = self.members.binary_search_by(member).ok()?;
            Some(&self.members[at].endpoint).filter(|endpoint| is_usable(endpoint))
        };
        let pick = || {
            let endpoint = self.balance(tried, rng)?;
            Some((endpoint.address, endpoint))
        };
        affinity.select(now, kept, pick)
    }

    fn balance(&self, tried: &[SocketAddr], rng: &mut fastrand::Rng) -> Option<&Rc<Endpoint>> {
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

/// Merges an update into the members. Both lists are sorted by address. Unchanged endpoints keep
/// their state.
fn merge(
    before: Vec<Member>,
    after: Vec<Arc<EndpointInfo>>,
    pools: &Pools,
    siblings: &Rc<Siblings>,
) -> Vec<Member> {
    let mut before = before.into_iter().peekable();
    let mut members = Vec::with_capacity(after.len());
    siblings.set_count(after.len());
    for info in after {
        while let Some(removed) = before.next_if(|member| member.info.address < info.address) {
            removed.endpoint.remove();
        }
        let known = before.next_if(|member| member.info.address == info.address);
        members.push(match known {
            Some(member) if is_same(&member.info, &info) => {
                if !Arc::ptr_eq(&member.info, &info) {
                    member.endpoint.end_quarantine();
                }
                Member { info, ..member }
            }
            replaced => {
                if let Some(replaced) = replaced {
                    replaced.endpoint.remove();
                }
                let pool = pools.open(Remote::from(&*info));
                let endpoint = Rc::new(Endpoint::new(pool.pool(), siblings));
                Member {
                    info,
                    endpoint,
                    _pool: pool,
                }
            }
        });
    }
    before.for_each(|removed| removed.endpoint.remove());
    members
}

/// Whether both describe the same pod. Another pod may have the address now, or the pod may have
/// joined the mesh.
fn is_same(one: &EndpointInfo, other: &EndpointInfo) -> bool {
    one.address == other.address && one.pod == other.pod && one.identity == other.identity
}
