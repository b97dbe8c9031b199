//! Step 6: load balancing. Selects an endpoint of the backend for each request. Each worker has its
//! own balancers, so that selection takes no lock, but for the session affinity of a Service. Its
//! only atomic operation checks for updates from discovery. This module opens no connections.

mod budget;
mod endpoint;
mod health;
mod latency;
pub mod maglev;
mod outlier;
mod p2c;
pub mod policy;
mod select;
mod state;
#[cfg(test)]
mod tests;
mod zone;

use crate::route::{Preference, Routes};
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::discovery::{Place, Resource, Target, TargetKind};
use crate::egress::Outside;
use crate::endpoint::EndpointInfo;
use crate::error::Failure;
use crate::labels::Peer;
use crate::observe::exceptions::{Event, Exceptions, Kind};
use crate::protocol::Protocol;
use crate::upstream::connect::{Limits, OpenPool, Pools, Remote};
pub use budget::{BudgetSettings, RetryBudget};
use diy_mesh_model::exchange::Direction;
pub use endpoint::{Endpoint, InFlight};
use health::Health;
pub use outlier::{BreakerSettings, OutlierSettings};
use policy::BackendPolicy;
pub use select::Avoided;
use select::{Context, Turns};

/// The first share of a new endpoint, as a part of the share of the others.
const MIN_SHARE: f64 = 0.1;
/// A slow start takes place if at most this fraction of the endpoints is new: one third. The others
/// get at most half as many requests again. In a rollout, the last old endpoint must not get the
/// requests of all new ones.
const SLOW_START_FRACTION: usize = 3;

/// The endpoints of a Service port, or of a pod, among which requests are balanced.
pub struct Backend {
    /// The resource that discovery resolves. An address is also the endpoint if discovery does not know
    /// it.
    resource: Resource,
    updates: Option<RefCell<watch::Receiver<Arc<Target>>>>,
    state: RefCell<State>,
    pools: Rc<Pools>,
    health: Rc<Health>,
    /// The half interval in which latencies were compared last.
    compared_in: Cell<u32>,
    turns: Turns,
    /// The budget for retries of its requests.
    pub retries: RetryBudget,
    /// An endpoint has announced support for extended CONNECT requests (RFC 8441), which open
    /// WebSockets.
    pub supports_extended_connect: Cell<bool>,
    /// Exchanges and opaque connections that ended since the last report.
    ended: Cell<u32>,
}

struct State {
    /// The latest resolution by discovery.
    target: Arc<Target>,
    name: Arc<str>,
    /// As metrics name it.
    peer: Peer,
    app_protocol: Option<Protocol>,
    /// Sorted by address, without duplicates.
    members: Vec<Member>,
    /// When the latest of the endpoints joined that get a growing share of the requests.
    slow_start_since: Option<Instant>,
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
        Self::new(address.into(), Arc::default(), None, pools)
    }

    /// The same, with connections of its own.
    pub fn alone(address: SocketAddr) -> Rc<Self> {
        Rc::new(Self::fixed(address, &Rc::default()))
    }

    /// The address, if neither a Service nor a pod has it, as far as discovery knows.
    pub fn outside(&self) -> Option<SocketAddr> {
        let is_unknown = self.state.borrow().target.kind == TargetKind::Unknown;
        self.address().filter(|_| is_unknown)
    }

    /// Where such an address is.
    pub fn place(&self) -> Place {
        self.state.borrow().target.place
    }

    /// The resource that discovery resolves.
    pub fn resource(&self) -> &Resource {
        &self.resource
    }

    /// The address, if it is the backend of a destination.
    pub fn address(&self) -> Option<SocketAddr> {
        self.resource.address()
    }

    /// The host and an address of it, if the backend is a host outside of the cluster.
    pub fn external(&self) -> Option<Outside> {
        let Resource::External(host) = &self.resource else {
            return None;
        };
        self.apply_updates();
        let state = self.state.borrow();
        Some(Outside {
            address: state.members.first()?.info.address,
            name: Some(host.host.clone()),
        })
    }

    /// Whether requests to it may leave the cluster.
    pub fn leaves_cluster(&self) -> bool {
        let is_external = matches!(self.resource, Resource::External(_));
        self.apply_updates();
        let has_outside = |members: &[Member]| members.iter().any(|one| one.info.outside);
        is_external || self.outside().is_some() || has_outside(&self.state.borrow().members)
    }

    /// A backend that follows the updates of discovery for `resource`.
    pub fn watched(
        resource: impl Into<Resource>,
        mut updates: watch::Receiver<Arc<Target>>,
        pools: &Rc<Pools>,
    ) -> Self {
        let target = updates.borrow_and_update().clone();
        Self::new(resource.into(), target, Some(updates), pools)
    }

    fn new(
        resource: Resource,
        target: Arc<Target>,
        updates: Option<watch::Receiver<Arc<Target>>>,
        pools: &Rc<Pools>,
    ) -> Self {
        let health = Rc::new(Health::new(pools.metrics.clone()));
        let state = State::new(target, &resource, Vec::new(), pools, &health);
        let backend = Self {
            resource,
            updates: updates.map(RefCell::new),
            state: RefCell::new(state),
            pools: pools.clone(),
            health,
            compared_in: Cell::new(0),
            turns: Turns::default(),
            retries: RetryBudget::new(Instant::now()),
            supports_extended_connect: Cell::default(),
            ended: Cell::default(),
        };
        backend.apply_policy();
        backend
    }

    fn apply_policy(&self) {
        let state = self.state.borrow();
        self.health.apply(&state.name, &state.target.policy);
        match state.target.policy.budget {
            Some(budget) => self.retries.set(budget, self.pools.workers()),
            None => self.retries.set(BudgetSettings::default(), 1),
        }
    }

    /// The policy of the Service.
    pub fn policy(&self) -> Arc<BackendPolicy> {
        self.state.borrow().target.policy.clone()
    }

    /// The protocol that the endpoints or their Service declare, or `None` if it is detected.
    pub fn app_protocol(&self) -> Option<Protocol> {
        self.apply_updates();
        self.state.borrow().app_protocol
    }

    /// The name for logs and errors: `namespace/name` of the Service or pod, else the address.
    pub fn name(&self) -> Arc<str> {
        self.state.borrow().name.clone()
    }

    /// The Service, or the host outside of the cluster that routes name, as the peer of requests.
    pub fn peer(&self) -> Peer {
        self.state.borrow().peer.clone()
    }

    /// The routes of HTTP requests, if there are any.
    pub fn routes(&self) -> Option<Arc<Routes>> {
        self.apply_updates();
        self.state.borrow().target.routes.clone()
    }

    /// Whether it is one pod, and not a Service.
    pub fn is_pod(&self) -> bool {
        self.state.borrow().target.kind == TargetKind::Pod
    }

    /// Counts an exchange or an opaque connection that ended.
    pub fn count_end(&self) {
        self.ended.set(self.ended.get().saturating_add(1));
    }

    /// Reports that one of those that ended has failed.
    pub fn report_failure(
        &self,
        direction: Direction,
        code: &'static str,
        exceptions: &Exceptions,
        now: Instant,
    ) {
        let (kind, destination) = self.subject(direction);
        let event = Event {
            kind,
            destination: &destination,
            endpoint: "",
            reason: code,
        };
        exceptions.record(event, self.ended.take(), now);
    }

    /// Reports the number of those that ended, if there are exceptions, and what is ejected or open.
    pub fn report(
        &self,
        direction: Direction,
        exceptions: &Exceptions,
        has_exceptions: bool,
        now: Instant,
    ) {
        let (ended, detector) = (self.ended.take(), &self.health.detector);
        if ended > 0 && has_exceptions {
            let (kind, destination) = self.subject(direction);
            exceptions.count(kind, &destination, ended, now);
        }
        let state = self.state.borrow();
        let is_judged = direction == Direction::Outbound && state.members.len() > 1;
        let ejected = is_judged && detector.has_quarantined();
        if !detector.is_open(now) && !ejected {
            return;
        }
        let (_, destination) = self.subject(direction);
        let report = |kind, endpoint: &str, reason: &str| {
            let event = Event {
                kind,
                destination: &destination,
                endpoint,
                reason,
            };
            exceptions.record(event, 0, now);
        };
        if detector.is_open(now) {
            report(Kind::CircuitOpen, "", &state.target.policy.name);
        }
        for member in state.members.iter().filter(|_| ejected) {
            if let Some(cause) = member.endpoint.judgement.quarantine(now) {
                let address = member.info.address.to_string();
                report(Kind::Ejected, &address, cause.name());
            }
        }
    }

    /// The kind and the name of its requests in exceptions.
    fn subject(&self, direction: Direction) -> (Kind, String) {
        let name = &*self.state.borrow().name;
        match (direction, &self.resource) {
            (Direction::Inbound, _) => (Kind::Inbound, String::new()),
            (_, Resource::Backend(backend)) => (Kind::Requests, backend.to_string()),
            (_, Resource::External(host)) => (Kind::Requests, host.name.to_string()),
            (_, Resource::Destination(address)) if name.contains('/') => {
                (Kind::Requests, format!("{name}:{}", address.port()))
            }
            (_, Resource::Destination(address)) => (Kind::Addresses, address.to_string()),
        }
    }

    /// Selects the endpoint for the next request as the policy of the Service says, without those in
    /// `avoided`, or the previous one if the Service has session affinity. Selects a quarantined one
    /// only if all are quarantined. Fails if no endpoint is left, and while the circuit is open.
    pub fn pick_for(
        &self,
        preference: Preference,
        avoided: &Avoided,
        zone: &str,
        rng: &mut fastrand::Rng,
        now: Instant,
    ) -> Result<Rc<Endpoint>, Failure> {
        self.apply_updates();
        self.health.check_circuit(now)?;
        let state = self.state.borrow();
        self.compare_latencies(&state.members, now);
        let zones = &self.health.zones;
        let prefers = state.target.policy.balancing.prefer_zone;
        zones.set_zone(if prefers { zone } else { "" });
        let context = Context {
            preference,
            avoided,
            turns: &self.turns,
            zones,
            now,
        };
        let picked = state.pick(&context, rng).cloned();
        picked.ok_or_else(|| state.unavailable(&self.resource))
    }

    /// Whether the circuit is open: no attempt may begin.
    pub fn is_circuit_open(&self, now: Instant) -> bool {
        self.health.check_circuit(now).is_err()
    }

    /// Quarantines the endpoints that are much slower than the median of all, twice in an interval.
    fn compare_latencies(&self, members: &[Member], now: Instant) {
        let detector = &self.health.detector;
        let percent = detector.settings().latency_percent;
        if percent == 0 || self.compared_in.replace(detector.half(now)) == detector.half(now) {
            return;
        }
        let endpoints = members.iter().map(|member| &member.endpoint);
        let known = |endpoint: &'_ Rc<Endpoint>| {
            let latency = endpoint.latency.usual(now)?;
            Some((latency, endpoint.clone()))
        };
        let mut known: Vec<_> = endpoints.filter_map(known).collect();
        known.sort_unstable_by_key(|(latency, _)| *latency);
        // For two endpoints, the median is the faster one.
        let Some((median, _)) = known.get(known.len().saturating_sub(1) / 2) else {
            return;
        };
        let most = median.mul_f64(f64::from(percent) / 100.0);
        for (_, slow) in known.iter().filter(|(latency, _)| *latency > most) {
            slow.record_slowness(now);
        }
    }

    /// The number of endpoints.
    pub fn endpoints_len(&self) -> usize {
        self.apply_updates();
        self.state.borrow().members.len()
    }

    /// Whether discovery still announces the endpoint.
    pub fn contains(&self, endpoint: &Rc<Endpoint>) -> bool {
        self.apply_updates();
        let members = &self.state.borrow().members;
        let at = members.binary_search_by_key(&endpoint.address, |member| member.info.address);
        at.is_ok_and(|at| Rc::ptr_eq(&members[at].endpoint, endpoint))
    }

    /// Whether there is an endpoint other than this one, which may have been removed.
    pub fn has_other(&self, address: SocketAddr) -> bool {
        self.apply_updates();
        self.has_endpoint(|endpoint| endpoint.address != address)
    }

    /// Whether there is an endpoint that is not avoided.
    pub fn has_untried(&self, avoided: &Avoided, now: Instant) -> bool {
        self.has_endpoint(|endpoint| !avoided.contains(endpoint, now))
    }

    /// Whether there is an endpoint that is not avoided, and usually answers within this time.
    pub fn can_answer_within(&self, time: Duration, avoided: &Avoided, now: Instant) -> bool {
        let is_usable = |endpoint: &Endpoint| !avoided.contains(endpoint, now);
        self.has_endpoint(|endpoint| is_usable(endpoint) && endpoint.answers_within(time, now))
    }

    fn has_endpoint(&self, matches: impl Fn(&Endpoint) -> bool) -> bool {
        let members = &self.state.borrow().members;
        members.iter().any(|member| matches(&member.endpoint))
    }

    /// Applies the latest update of discovery. Costs an atomic load if there is none. Remaining
    /// endpoints keep their state. Removed endpoints get no further requests.
    pub fn apply_updates(&self) {
        let Some(updates) = &self.updates else { return };
        // An error means that no further update will arrive: the state stays as it is.
        if updates.borrow().has_changed().unwrap_or(false) {
            let target = updates.borrow_mut().borrow_and_update().clone();
            let before = std::mem::take(&mut self.state.borrow_mut().members);
            let state = State::new(target, &self.resource, before, &self.pools, &self.health);
            self.state.replace(state);
            self.apply_policy();
        }
    }

    /// Whether a connection to an endpoint is kept for further requests.
    pub fn has_connections(&self) -> bool {
        let state = self.state.borrow();
        let mut endpoints = state.members.iter().map(|member| &member.endpoint);
        endpoints.any(|endpoint| endpoint.pool().has_connections())
    }

    /// Whether discovery refused the subscription, because its table of destinations is full.
    pub fn is_refused(&self) -> bool {
        self.state.borrow().target.kind == TargetKind::Refused
    }

    /// Whether the backend is its address, without discovery.
    pub fn is_fixed(&self) -> bool {
        self.updates.is_none()
    }

    /// Whether discovery will not update the backend again.
    pub fn is_unwatched(&self) -> bool {
        self.updates
            .as_ref()
            .is_some_and(|updates| updates.borrow().has_changed().is_err())
    }
}

/// Neither pods by their own addresses nor addresses outside of the cluster have a name.
fn peer(resource: &Resource, target: &Target) -> Peer {
    match resource {
        Resource::External(host) => Peer::new(&host.host, ""),
        Resource::Backend(name) => {
            let (namespace, rest) = name.split_once('/').unwrap_or_default();
            Peer::new(rest.split(':').next().unwrap_or_default(), namespace)
        }
        Resource::Destination(_) => match target.kind {
            TargetKind::Service | TargetKind::UnknownPort { .. } => {
                Peer::new(&target.name, &target.namespace)
            }
            _ => Peer::default(),
        },
    }
}

impl State {
    fn new(
        target: Arc<Target>,
        resource: &Resource,
        before: Vec<Member>,
        pools: &Pools,
        health: &Rc<Health>,
    ) -> Self {
        let name = if target.name.is_empty() {
            resource.to_string()
        } else {
            format!("{}/{}", target.namespace, target.name)
        };
        let endpoints = match (&target.kind, resource) {
            (TargetKind::Unknown, Resource::Destination(address)) => {
                vec![Arc::new(EndpointInfo::bare(*address))]
            }
            _ => target.usable().to_vec(),
        };
        // The declaration of the endpoints overrides the declaration of their Service.
        let opaque = !endpoints.is_empty() && endpoints.iter().all(|endpoint| endpoint.opaque);
        let app_protocol = if opaque {
            Some(Protocol::Opaque)
        } else {
            target.app_protocol
        };
        let mut limits = target.policy.limits;
        if target.kind == TargetKind::Unknown {
            // Such as the local application. Each client has a connection of its own, and each
            // caller its share of these. With another limit, one caller could use all of it.
            limits.connections = u32::MAX;
        }
        let members = merge(before, endpoints, pools, health, limits);
        Self {
            name: name.into(),
            peer: peer(resource, &target),
            app_protocol,
            slow_start_since: slow_start(&members, target.policy.balancing.slow_start),
            members,
            target,
        }
    }

    /// Why there is no endpoint.
    fn unavailable(&self, resource: &Resource) -> Failure {
        let service = self.name.to_string();
        match &self.target.kind {
            TargetKind::Refused => Failure::Overloaded("too many destinations are in use"),
            TargetKind::Withheld => Failure::Withheld(resource.to_string()),
            TargetKind::Unresolved { host, reason } => Failure::Unresolved {
                name: host.clone(),
                reason: reason.clone(),
            },
            TargetKind::UnknownPort { ports, max_ports } => Failure::UnknownPort {
                service,
                port: resource.port(),
                ports: ports.as_slice().into(),
                max_ports: *max_ports,
            },
            _ => Failure::NoEndpoint(service),
        }
    }
}

/// When the latest of the new endpoints joined. `None` without new endpoints, or if so many are new
/// that the others would get much more load.
fn slow_start(members: &[Member], slow_start: Duration) -> Option<Instant> {
    let now = Instant::now();
    let is_recent = |since: &Instant| now.saturating_duration_since(*since) < slow_start;
    let joined = members
        .iter()
        .filter_map(|member| member.endpoint.joined_at);
    let (count, last) = joined
        .filter(is_recent)
        .fold((0, None), |(count, last), since| {
            (count + 1, last.max(Some(since)))
        });
    last.filter(|_| count * SLOW_START_FRACTION <= members.len())
}

/// Merges an update into the members. Both lists are sorted by address. Unchanged endpoints keep
/// their state.
fn merge(
    before: Vec<Member>,
    after: Vec<Arc<EndpointInfo>>,
    pools: &Pools,
    health: &Rc<Health>,
    limits: Limits,
) -> Vec<Member> {
    // The first endpoints are new to this proxy only.
    let now = Instant::now();
    let joined_at = (!before.is_empty()).then_some(now);
    let mut before = before.into_iter().peekable();
    let mut members = Vec::with_capacity(after.len());
    health.detector.set_count(after.len());
    for info in after {
        while let Some(removed) = before.next_if(|member| member.info.address < info.address) {
            removed.endpoint.judgement.remove(now);
        }
        let known = before.next_if(|member| member.info.address == info.address);
        members.push(match known {
            Some(member) if is_same(&member.info, &info) => {
                if !Arc::ptr_eq(&member.info, &info) {
                    member.endpoint.judgement.reset(now);
                }
                let pool = pools.open(Remote::from(&*info), limits);
                member.endpoint.set_pool(pool.pool());
                member.endpoint.node_unready.set(info.node_unready);
                Member {
                    info,
                    _pool: pool,
                    ..member
                }
            }
            replaced => {
                if let Some(replaced) = replaced {
                    replaced.endpoint.judgement.remove(now);
                }
                let pool = pools.open(Remote::from(&*info), limits);
                let endpoint = Rc::new(Endpoint::new(pool.pool(), &info, joined_at, health));
                Member {
                    info,
                    endpoint,
                    _pool: pool,
                }
            }
        });
    }
    before.for_each(|removed| removed.endpoint.judgement.remove(now));
    members
}

/// Whether both describe the same pod. Another pod may have the address now, or the pod may have
/// joined the mesh.
fn is_same(one: &EndpointInfo, other: &EndpointInfo) -> bool {
    one.address == other.address
        && one.pod == other.pod
        && one.identity == other.identity
        && one.outside == other.outside
        && one.external == other.external
}
