//! Which endpoint gets a request: a function of the policy, of the endpoints with their load, of the
//! request's preference, and of the RNG; round robin also of the previous selections.

use crate::route::Preference;
use std::cell::{Cell, LazyCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Instant;

use fastrand::Rng;

use super::endpoint::Endpoint;
use super::policy::{Algorithm, HashKey};
use super::zone::ZonePreference;
use super::{Backend, Member, State, p2c};
use crate::http::view::RequestView;

/// The requests in flight of one worker up to which an endpoint keeps all of its keys.
const MIN_BOUND: u32 = 16;
/// The load of an endpoint that keeps all of its keys, as a multiple of the mean of all endpoints:
/// V. Mirrokni, M. Thorup, M. Zadimoghaddam, "Consistent Hashing with Bounded Loads" (SODA 2018).
const MAX_LOAD_FACTOR: u32 = 2;

/// The endpoints that a request avoids.
#[derive(Debug, Default)]
pub struct Avoided {
    /// Those that it was sent to.
    pub tried: Vec<SocketAddr>,
    /// And those that want no retries at this time. Not a list: all of a large Service may.
    pub refusing: bool,
}

impl Avoided {
    /// Whether this endpoint is one of them.
    pub fn contains(&self, endpoint: &Endpoint, now: Instant) -> bool {
        self.tried.contains(&endpoint.address) || self.refusing && endpoint.refuses_retries(now)
    }
}

/// The endpoint that had the previous turn of a round robin: without a preferred zone or in other
/// zones, and in the own zone.
#[derive(Debug, Default)]
pub(super) struct Turns([Turn; 2]);

type Turn = Cell<Option<SocketAddr>>;

/// The input of a selection besides the endpoints and the RNG.
pub(super) struct Context<'a> {
    pub preference: Preference,
    pub avoided: &'a Avoided,
    pub turns: &'a Turns,
    pub zones: &'a ZonePreference,
    pub now: Instant,
}

impl Backend {
    /// The preference of a request, or an opaque connection, of a client.
    pub fn preference(&self, request: Option<&RequestView<'_>>, client: SocketAddr) -> Preference {
        self.apply_updates();
        let policy = &self.state.borrow().target.policy;
        let hash = match &policy.balancing.algorithm {
            Algorithm::ConsistentHash(key) => key.hash(request, client),
            _ => None,
        };
        Preference {
            hash,
            ..Preference::default()
        }
    }
}

impl HashKey {
    /// The hash of a request, or of an opaque connection, or `None` without the key.
    fn hash(&self, request: Option<&RequestView<'_>>, client: SocketAddr) -> Option<u64> {
        let value = match self {
            Self::Header(name) => request?.header(name),
            Self::Cookie(name) => request?.cookie(name),
            Self::Source => return Some(super::maglev::hash_address(client.ip(), 0)),
        };
        let value = value.filter(|value| !value.is_empty());
        value.map(super::maglev::hash)
    }
}

impl State {
    /// The endpoint of the request's session, that which the affinity of the Service keeps, or the
    /// next one.
    pub(super) fn pick(&self, context: &Context<'_>, rng: &mut Rng) -> Option<&Rc<Endpoint>> {
        let now = context.now;
        let is_usable = |endpoint: &Endpoint| {
            !context.avoided.contains(endpoint, now) && !endpoint.is_quarantined(now)
        };
        if let Some(tag) = context.preference.session {
            let mut endpoints = self.members.iter().map(|member| &member.endpoint);
            let kept = endpoints.find(|one| is_usable(one) && one.tag() == tag);
            if kept.is_some() {
                return kept;
            }
        }
        let Some(affinity) = &self.target.affinity else {
            return self.balance(context, rng);
        };
        let kept = |address| {
            let member = |member: &Member| member.info.address.cmp(&address);
            let at = self.members.binary_search_by(member).ok()?;
            Some(&self.members[at].endpoint).filter(|endpoint| is_usable(endpoint))
        };
        let pick = || {
            let endpoint = self.balance(context, rng)?;
            Some((endpoint.address, endpoint))
        };
        affinity.select(now, kept, pick)
    }

    /// The next endpoint, without those that are avoided: of the side of the zone that is drawn if it
    /// has a healthy one. A quarantined one only if all are.
    pub(super) fn balance(&self, context: &Context<'_>, rng: &mut Rng) -> Option<&Rc<Endpoint>> {
        let now = context.now;
        // A last resort that has refused a connection is none.
        let untried = |endpoint: &Endpoint| {
            let is_lost = endpoint.node_unready.get() && endpoint.is_quarantined(now);
            !context.avoided.contains(endpoint, now) && !is_lost
        };
        if let [only] = self.members.as_slice() {
            return untried(&only.endpoint).then_some(&only.endpoint);
        }
        let at = |index: usize| &self.members[index].endpoint;
        let healthy = |index| untried(at(index)) && !at(index).is_quarantined(now);
        if let Some(hash) = context.preference.hash {
            let picked = self.by_hash(hash, healthy);
            let picked = picked.or_else(|| self.by_hash(hash, |index| untried(at(index))));
            return picked.map(at);
        }
        let stays = self.stays(context, rng);
        let is_own = |index: usize| context.zones.is_own(&at(index).info.zone);
        let on_side = |index| healthy(index) && stays.is_none_or(|stays| is_own(index) == stays);
        let turn = &context.turns.0[usize::from(stays == Some(true))];
        let slow_start = self.target.policy.balancing.slow_start;
        let is_recent = |since| now.saturating_duration_since(since) < slow_start;
        if self.slow_start_since.is_some_and(is_recent) {
            let drawn = rng.f64();
            let takes_part = |index| on_side(index) && at(index).share(slow_start, now) > drawn;
            if let Some(picked) = self.choose(rng, turn, takes_part, now) {
                return Some(at(picked));
            }
        }
        self.choose(rng, turn, on_side, now)
            .or_else(|| self.choose(rng, turn, healthy, now))
            .or_else(|| self.choose(rng, turn, |index| untried(at(index)), now))
            .map(at)
    }

    /// Whether the request stays in the zone of this proxy, or `None` without a preferred zone.
    fn stays(&self, context: &Context<'_>, rng: &mut Rng) -> Option<bool> {
        if !context.zones.is_active() {
            return None;
        }
        let healthy = || {
            let endpoints = self.members.iter().map(|member| &member.endpoint);
            let own = endpoints.filter(|one| context.zones.is_own(&one.info.zone));
            let healthy = own.clone().filter(|one| !one.is_quarantined(context.now));
            healthy.count() as f64 / own.count().max(1) as f64
        };
        Some(context.zones.stays(context.now, rng, healthy))
    }

    /// The index of one of the usable endpoints, whatever the request.
    fn choose(
        &self,
        rng: &mut Rng,
        turn: &Turn,
        usable: impl Fn(usize) -> bool,
        now: Instant,
    ) -> Option<usize> {
        let at = |index: usize| &self.members[index].endpoint;
        let count = self.members.len();
        match self.target.policy.balancing.algorithm {
            Algorithm::RoundRobin => self.next(rng, turn, usable),
            Algorithm::LeastRequest => p2c::choose(count, rng, usable, |one, other| {
                at(one).in_flight() < at(other).in_flight()
            }),
            Algorithm::PeakEwma | Algorithm::ConsistentHash(_) => {
                p2c::choose(count, rng, usable, |one, other| {
                    at(one).is_cheaper(at(other), now)
                })
            }
        }
    }

    /// The usable endpoint after the previous one, in the order of addresses: a change of the
    /// endpoints neither repeats nor skips a turn. The first one is random, so that workers and
    /// proxies do not start together.
    fn next(&self, rng: &mut Rng, turn: &Turn, usable: impl Fn(usize) -> bool) -> Option<usize> {
        let count = self.members.len();
        let start = match turn.get() {
            None if count > 0 => rng.usize(..count),
            None => 0,
            Some(last) => self
                .members
                .partition_point(|member| member.info.address <= last),
        };
        let next = (start..count)
            .chain(0..start)
            .find(|index| usable(*index))?;
        turn.set(Some(self.members[next].info.address));
        Some(next)
    }

    /// The index of the usable endpoint for a hash. An overloaded endpoint gets no key, unless all are
    /// overloaded.
    fn by_hash(&self, hash: u64, usable: impl Fn(usize) -> bool) -> Option<usize> {
        let in_flight = |member: &Member| member.endpoint.in_flight();
        let total = LazyCell::new(|| self.members.iter().map(in_flight).sum::<u32>());
        let is_overloaded = |index: usize| {
            let load = in_flight(&self.members[index]);
            let mean = || *total / u32::try_from(self.members.len()).unwrap_or(u32::MAX).max(1);
            load >= MIN_BOUND && load >= mean().saturating_mul(MAX_LOAD_FACTOR)
        };
        let table = &self.target.table;
        table
            .find(hash, |index| usable(index) && !is_overloaded(index))
            .or_else(|| table.find(hash, usable))
    }
}
