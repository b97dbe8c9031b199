//! Which endpoint gets a request: a function of the policy, of the endpoints with their load, of the
//! request's preference, and of the RNG; round robin also of the previous selections.

use std::cell::{Cell, LazyCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Instant;

use fastrand::Rng;

use super::endpoint::Endpoint;
use super::maglev::Table;
use super::policy::{Algorithm, HashKey};
use super::{Backend, Member, State, p2c};
use crate::http::view::RequestView;
use crate::route::session::Tag;

/// The requests in flight of one worker up to which an endpoint keeps all of its keys.
const MIN_BOUND: u32 = 16;
/// The load of an endpoint that keeps all of its keys, as a multiple of the mean of all endpoints:
/// V. Mirrokni, M. Thorup, M. Zadimoghaddam, "Consistent Hashing with Bounded Loads" (SODA 2018).
const MAX_LOAD_FACTOR: u32 = 2;

/// Which endpoint a request prefers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preference {
    /// The hash of the request's key. None: the policy does not ask for it, or the request has none.
    pub hash: Option<u64>,
    /// The endpoint of the request's session.
    pub session: Option<Tag>,
}

/// The endpoint that had the previous turn of a round robin.
#[derive(Debug, Default)]
pub(super) struct Turn(Cell<Option<SocketAddr>>);

impl Backend {
    /// What a request, or an opaque connection, of a client prefers.
    pub fn preference(&self, request: Option<&RequestView<'_>>, client: SocketAddr) -> Preference {
        self.apply_updates();
        let policy = &self.state.borrow().policy;
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
    /// The hash of a request, or of an opaque connection. None without the key.
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
    pub(super) fn pick(
        &self,
        preference: Preference,
        tried: &[SocketAddr],
        rng: &mut Rng,
        turn: &Turn,
    ) -> Option<&Rc<Endpoint>> {
        let now = Instant::now();
        let is_usable = |endpoint: &Endpoint| {
            !tried.contains(&endpoint.address) && !endpoint.is_quarantined(now)
        };
        if let Some(tag) = preference.session {
            let mut endpoints = self.members.iter().map(|member| &member.endpoint);
            let kept = endpoints.find(|one| is_usable(one) && one.tag() == tag);
            if kept.is_some() {
                return kept;
            }
        }
        let Some(affinity) = &self.affinity else {
            return self.balance(preference, tried, rng, turn, now);
        };
        let kept = |address| {
            let member = |member: &Member| member.info.address.cmp(&address);
            let at = self.members.binary_search_by(member).ok()?;
            Some(&self.members[at].endpoint).filter(|endpoint| is_usable(endpoint))
        };
        let pick = || {
            let endpoint = self.balance(preference, tried, rng, turn, now)?;
            Some((endpoint.address, endpoint))
        };
        affinity.select(now, kept, pick)
    }

    /// The next endpoint, without those in `tried`. A quarantined one only if all are.
    pub(super) fn balance(
        &self,
        preference: Preference,
        tried: &[SocketAddr],
        rng: &mut Rng,
        turn: &Turn,
        now: Instant,
    ) -> Option<&Rc<Endpoint>> {
        let untried = |endpoint: &Endpoint| !tried.contains(&endpoint.address);
        if let [only] = self.members.as_slice() {
            return untried(&only.endpoint).then_some(&only.endpoint);
        }
        let at = |index: usize| &self.members[index].endpoint;
        let healthy = |index| untried(at(index)) && !at(index).is_quarantined(now);
        if let Some(hash) = preference.hash {
            let picked = self.by_hash(hash, healthy);
            let picked = picked.or_else(|| self.by_hash(hash, |index| untried(at(index))));
            return picked.map(at);
        }
        let slow_start = self.policy.balancing.slow_start;
        let is_recent = |since| now.saturating_duration_since(since) < slow_start;
        if self.slow_start_since.is_some_and(is_recent) {
            let drawn = rng.f64();
            let takes_part = |index| healthy(index) && at(index).share(slow_start, now) > drawn;
            if let Some(picked) = self.choose(rng, turn, takes_part, now) {
                return Some(at(picked));
            }
        }
        self.choose(rng, turn, healthy, now)
            .or_else(|| self.choose(rng, turn, |index| untried(at(index)), now))
            .map(at)
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
        match self.policy.balancing.algorithm {
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
        let start = match turn.0.get() {
            None if count > 0 => rng.usize(..count),
            None => 0,
            Some(last) => self
                .members
                .partition_point(|member| member.info.address <= last),
        };
        let next = (start..count)
            .chain(0..start)
            .find(|index| usable(*index))?;
        turn.0.set(Some(self.members[next].info.address));
        Some(next)
    }

    /// The index of the usable endpoint for a hash. One that is overloaded keeps none of its keys,
    /// unless all are.
    fn by_hash(&self, hash: u64, usable: impl Fn(usize) -> bool) -> Option<usize> {
        let in_flight = |member: &Member| member.endpoint.in_flight();
        let total = LazyCell::new(|| self.members.iter().map(in_flight).sum::<u32>());
        let is_overloaded = |index: usize| {
            let load = in_flight(&self.members[index]);
            let mean = || *total / u32::try_from(self.members.len()).unwrap_or(u32::MAX).max(1);
            load >= MIN_BOUND && load >= mean().saturating_mul(MAX_LOAD_FACTOR)
        };
        let table = self.table.get_or_init(|| {
            let addresses = self.members.iter().map(|member| member.info.address);
            Table::new(addresses)
        });
        table
            .find(hash, |index| usable(index) && !is_overloaded(index))
            .or_else(|| table.find(hash, usable))
    }
}
