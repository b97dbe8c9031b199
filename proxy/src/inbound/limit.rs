//! Rate limits of the requests to the pod: token buckets, counted as in the generic cell rate
//! algorithm (ITU-T I.371). All workers share a bucket, and a new version of a limit keeps its
//! fill. Pure: the caller passes the time. A request takes a lock for writing only if it is the
//! first one of its caller.

use crate::error::{Exceeded, Failure, Scope};
use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use diy_mesh_model::identity::Identity;
use diy_mesh_model::ports::PortSet;
use diy_mesh_runtime::admission::network;

use crate::route::matching::{MatchInput, Matches};

/// Callers of a limit that have buckets of their own. Further ones share a bucket.
const MAX_CALLERS: usize = 4096;
/// How often callers whose buckets are full are removed while there are [`MAX_CALLERS`].
const SWEEP_INTERVAL: u64 = 1_000_000_000;
/// The longest time of a rate, in nanoseconds: a century. Sums of three fit the type.
const MAX_NANOS: u64 = 100 * 365 * 86_400 * 1_000_000_000;

/// All limits of the pod.
#[derive(Clone, Debug, Default)]
pub struct RateLimits(pub Vec<Arc<RateLimit>>);

/// Only the same limits are equal: expressions cannot be compared.
impl PartialEq for RateLimits {
    fn eq(&self, other: &Self) -> bool {
        let mut pairs = self.0.iter().zip(&other.0);
        self.0.len() == other.0.len() && pairs.all(|(one, two)| Arc::ptr_eq(one, two))
    }
}

impl Eq for RateLimits {}

/// A limit.
#[derive(Debug)]
pub struct RateLimit {
    /// The object that it comes from, and its name there.
    pub name: Arc<str>,
    /// The requests that it counts together.
    pub scope: Scope,
    /// The ports of the application.
    pub ports: PortSet,
    /// The requests.
    pub matches: Matches,
    /// How fast requests may arrive.
    pub rate: Rate,
    /// How many have arrived.
    pub buckets: Arc<Buckets>,
}

/// The client of a request.
#[derive(Clone, Copy, Debug)]
pub enum By<'a> {
    /// It has authenticated.
    Identity(&'a Identity),
    /// It has not.
    Address(IpAddr),
}

/// When a request takes the token of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Before its token is verified: limits of a caller, which protect verification.
    BeforeToken,
    /// When the policies allow it: the others.
    Allowed,
}

/// The limits whose tokens a request has taken.
#[derive(Debug, Default)]
pub struct Taken(Vec<Arc<RateLimit>>);

impl Taken {
    /// Puts the tokens of limits that all callers share back: the application does not get the request.
    pub fn put_back_shared(self) {
        let shared = self.0.iter().filter(|limit| limit.scope == Scope::Service);
        shared.for_each(|limit| limit.buckets.shared.put_back(limit.rate));
    }
}

impl RateLimits {
    /// Takes a token of every limit of a stage for a request to `port`, or of none. `set` are the
    /// fields that applications get from tokens.
    pub fn take(
        &self,
        stage: Stage,
        set: &[Arc<str>],
        port: u16,
        caller: By<'_>,
        request: &MatchInput<'_>,
        now: Instant,
    ) -> Result<Taken, Failure> {
        let mut taken = Taken::default();
        let limits = self.0.iter().filter(|limit| limit.ports.contains(port));
        for limit in limits.filter(|limit| limit.stage(set) == stage) {
            let refused = match limit.matches.holds(request) {
                Ok(false) => continue,
                Ok(true) => limit.take(caller, now).err().map(Failure::RateLimited),
                Err(part) => Some(Failure::TooLargeToMatch(part)),
            };
            if let Some(refused) = refused {
                let put_back = |limit: Arc<RateLimit>| {
                    limit.buckets.put_back(limit.scope, caller, limit.rate);
                };
                taken.0.into_iter().for_each(put_back);
                return Err(refused);
            }
            taken.0.push(limit.clone());
        }
        Ok(taken)
    }

    /// The buckets of an earlier version of a limit, the `nth` one of this name, or new ones.
    pub fn buckets(&self, name: &str, scope: Scope, nth: usize, now: Instant) -> Arc<Buckets> {
        let mut earlier = self.0.iter();
        let earlier = earlier
            .by_ref()
            .filter(|limit| *limit.name == *name && limit.scope == scope)
            .nth(nth);
        let new = || Arc::new(Buckets::new(now));
        earlier.map_or_else(new, |limit| limit.buckets.clone())
    }
}

impl RateLimit {
    /// Limits of a caller come before tokens, unless they match what a token sets.
    fn stage(&self, set: &[Arc<str>]) -> Stage {
        if self.scope == Scope::Caller && !self.matches.reads_field(set) {
            Stage::BeforeToken
        } else {
            Stage::Allowed
        }
    }

    /// Takes a token for a request that the limit counts.
    fn take(&self, caller: By<'_>, now: Instant) -> Result<(), Exceeded> {
        let taken = self.buckets.take(self.scope, caller, self.rate, now);
        taken.map_err(|retry_after| Exceeded {
            name: self.name.clone(),
            scope: self.scope,
            retry_after,
        })
    }
}

/// How fast requests may arrive, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// The time in which a bucket gains a token.
    interval: u64,
    /// The time in which an empty bucket fills: at least one interval.
    capacity: u64,
}

impl Rate {
    /// The part of one of `replicas` of `requests` in `window`, `burst` of them at once.
    pub fn new(requests: u64, window: Duration, burst: u64, replicas: u32) -> Self {
        let requests = u128::from(requests.max(1));
        let nanos = |tokens: u128| {
            let nanos = window.as_nanos().saturating_mul(tokens) / requests;
            u64::try_from(nanos).map_or(MAX_NANOS, |nanos| nanos.clamp(1, MAX_NANOS))
        };
        let interval = nanos(replicas.into());
        Self {
            interval,
            capacity: nanos(burst.into()).max(interval),
        }
    }
}

/// The time, in nanoseconds, at which a bucket is full again.
#[derive(Debug, Default)]
struct Bucket(AtomicU64);

impl Bucket {
    /// Takes a token, or returns the time until there is one.
    fn take(&self, rate: Rate, now: u64) -> Result<(), Duration> {
        // A bucket of an earlier version may have had a larger capacity.
        let next = |full_at: u64| full_at.clamp(now, now + rate.capacity) + rate.interval;
        let limit = now + rate.capacity;
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |full_at| {
                Some(next(full_at)).filter(|next| *next <= limit)
            });
        let waits = |full_at| Duration::from_nanos(next(full_at) - limit);
        taken.map(drop).map_err(waits)
    }

    fn put_back(&self, rate: Rate) {
        let before = |full_at: u64| Some(full_at.saturating_sub(rate.interval));
        let _ = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, before);
    }

    fn is_full(&self, now: u64) -> bool {
        self.0.load(Ordering::Relaxed) <= now
    }
}

/// The buckets of a limit.
#[derive(Debug)]
pub struct Buckets {
    epoch: Instant,
    /// The bucket of all callers together.
    shared: Bucket,
    callers: Table<Identity>,
    /// The buckets of clients without an identity.
    addresses: Table<IpAddr>,
}

/// The buckets of callers.
#[derive(Debug)]
struct Table<K> {
    buckets: RwLock<HashMap<K, Bucket>>,
    /// The bucket of the callers above [`MAX_CALLERS`].
    others: Bucket,
    /// Until then, all of [`MAX_CALLERS`] have tokens to gain.
    crowded_until: AtomicU64,
}

impl<K> Default for Table<K> {
    fn default() -> Self {
        Self {
            buckets: RwLock::default(),
            others: Bucket::default(),
            crowded_until: AtomicU64::default(),
        }
    }
}

impl Buckets {
    /// Full buckets.
    pub fn new(now: Instant) -> Self {
        Self {
            epoch: now,
            shared: Bucket::default(),
            callers: Table::default(),
            addresses: Table::default(),
        }
    }

    fn take(&self, scope: Scope, caller: By<'_>, rate: Rate, now: Instant) -> Result<(), Duration> {
        let now = now.saturating_duration_since(self.epoch).as_nanos();
        let now = u64::try_from(now).map_or(MAX_NANOS, |now| now.min(MAX_NANOS));
        match (scope, caller) {
            (Scope::Service, _) => self.shared.take(rate, now),
            (Scope::Caller, By::Identity(identity)) => self.callers.take(identity, rate, now),
            (Scope::Caller, By::Address(ip)) => self.addresses.take(&network(ip), rate, now),
        }
    }

    fn put_back(&self, scope: Scope, caller: By<'_>, rate: Rate) {
        match (scope, caller) {
            (Scope::Service, _) => self.shared.put_back(rate),
            (Scope::Caller, By::Identity(identity)) => self.callers.put_back(identity, rate),
            (Scope::Caller, By::Address(ip)) => self.addresses.put_back(&network(ip), rate),
        }
    }
}

impl<K: Clone + Eq + Hash> Table<K> {
    fn take(&self, caller: &K, rate: Rate, now: u64) -> Result<(), Duration> {
        let known = self.buckets.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(bucket) = known.get(caller) {
            return bucket.take(rate, now);
        }
        drop(known);
        if now < self.crowded_until.load(Ordering::Relaxed) {
            return self.others.take(rate, now);
        }
        let mut buckets = self.buckets.write().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= MAX_CALLERS && !buckets.contains_key(caller) {
            // Only full buckets: a caller that comes back gets no more tokens than before.
            buckets.retain(|_, bucket| !bucket.is_full(now));
            if buckets.len() >= MAX_CALLERS {
                let until = now + SWEEP_INTERVAL;
                self.crowded_until.store(until, Ordering::Relaxed);
                return self.others.take(rate, now);
            }
        }
        buckets.entry(caller.clone()).or_default().take(rate, now)
    }

    fn put_back(&self, caller: &K, rate: Rate) {
        let buckets = self.buckets.read().unwrap_or_else(PoisonError::into_inner);
        buckets.get(caller).unwrap_or(&self.others).put_back(rate);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::RequestPart;
    use crate::http::view::RequestView;
    use crate::http::view::testing::request;
    use crate::route::matching::{FieldMatch, Match, PathMatch, ValueMatch};
    use diy_mesh_proto::pattern::Pattern;

    const SECOND: Duration = Duration::from_secs(1);

    fn limit(name: &str, scope: Scope, rate: Rate, earlier: &RateLimits) -> Arc<RateLimit> {
        Arc::new(RateLimit {
            name: name.into(),
            scope,
            ports: "80-81".parse().unwrap(),
            matches: Matches::default(),
            rate,
            buckets: earlier.buckets(name, scope, 0, Instant::now()),
        })
    }

    impl RateLimits {
        /// Both stages of a request.
        fn count(
            &self,
            port: u16,
            caller: Option<&Identity>,
            request: &MatchInput<'_>,
            now: Instant,
        ) -> Result<(), Failure> {
            let caller = caller.map_or(By::Address([10, 0, 0, 1].into()), By::Identity);
            let take = |stage| self.take(stage, &[], port, caller, request, now);
            take(Stage::BeforeToken)?;
            take(Stage::Allowed).map(drop)
        }
    }

    fn get(target: &str) -> MatchInput<'_> {
        MatchInput::new(request("GET", target))
    }

    fn one(scope: Scope, rate: Rate) -> RateLimits {
        RateLimits(vec![limit("a", scope, rate, &RateLimits::default())])
    }

    fn caller(number: usize) -> Identity {
        Identity::new("cluster.local", "shop", &format!("web-{number}")).unwrap()
    }

    /// Requests until one is refused, and the time that it has to wait.
    fn drain(limits: &RateLimits, caller: Option<&Identity>, now: Instant) -> (usize, Duration) {
        let get = get("/");
        let mut taken = 0;
        loop {
            match limits.count(80, caller, &get, now) {
                Ok(()) => taken += 1,
                Err(failure) => return (taken, failure.retry_after().expect("exceeded")),
            }
        }
    }

    #[test]
    fn burst_then_rate_and_each_replica_has_its_part() {
        for (requests, window, burst, replicas, at_once, wait) in [
            (100, SECOND, 200, 1, 200, Duration::from_millis(10)),
            (100, SECOND, 200, 4, 50, Duration::from_millis(40)),
            (1, SECOND, 1, 1, 1, SECOND),
            // Less than one request: one at once, and the rate stays.
            (10, SECOND, 10, 100, 1, 10 * SECOND),
            (3, SECOND, 3, 1, 3, Duration::from_nanos(333_333_332)),
        ] {
            let rate = Rate::new(requests, window, burst, replicas);
            let limits = one(Scope::Service, rate);
            let start = Instant::now();
            assert_eq!(drain(&limits, None, start), (at_once, wait));
            let almost = start + wait - Duration::from_nanos(1);
            assert_eq!(drain(&limits, None, almost).0, 0);
            assert_eq!(drain(&limits, None, start + wait).0, 1);
            // In ten times the window, ten times the requests pass.
            let mut passed = 0;
            for step in 0..1000 {
                let now = start + wait + window.mul_f64(f64::from(step) / 100.0);
                passed += drain(&limits, None, now).0;
            }
            let expected = usize::try_from(10 * requests / u64::from(replicas)).unwrap();
            assert!(passed.abs_diff(expected) <= 1, "{passed} of {expected}");
            // A long pause fills no more than the burst.
            assert_eq!(drain(&limits, None, start + 3600 * SECOND).0, at_once);
        }
    }

    #[test]
    fn extreme_rates_do_not_overflow() {
        let start = Instant::now();
        let day = Duration::from_secs(86_400);
        for (requests, window, burst, replicas) in [
            (1, day, 1_000_000_000, u32::MAX),
            (1_000_000_000, Duration::from_millis(1), 1, 1),
        ] {
            let limits = one(Scope::Service, Rate::new(requests, window, burst, replicas));
            for now in [start, start + 1000 * day] {
                let get = get("/");
                let _ = limits.count(80, None, &get, now);
            }
        }
    }

    #[test]
    fn callers_and_addresses_without_identity_have_buckets_of_their_own() {
        let limits = one(Scope::Caller, Rate::new(5, SECOND, 5, 1));
        let now = Instant::now();
        for number in 0..3 {
            assert_eq!(drain(&limits, Some(&caller(number)), now).0, 5);
        }
        assert_eq!(drain(&limits, None, now).0, 5);
        for who in [Some(&caller(1)), None] {
            assert_eq!(drain(&limits, who, now).0, 0);
        }
        let take = |address: &str| {
            let caller = By::Address(address.parse().unwrap());
            let get = get("/");
            limits
                .take(Stage::BeforeToken, &[], 80, caller, &get, now)
                .is_ok()
        };
        assert!(take("10.0.0.2") && !take("::ffff:10.0.0.1"));
        // A network of IPv6 is one client.
        assert!((0..5).all(|last| take(&format!("fd00::{last}"))) && !take("fd00::5"));
        // Floods of addresses take nothing of identities.
        for number in 0..2 * MAX_CALLERS as u32 {
            take(&std::net::Ipv4Addr::from_bits(number).to_string());
        }
        assert_eq!(drain(&limits, Some(&caller(7)), now).0, 5);
    }

    #[test]
    fn limits_of_callers_come_first_unless_they_match_what_a_token_sets() {
        let [caller, service] = [Scope::Caller, Scope::Service].map(|scope| {
            let limit = by_field("a", "1", 1);
            RateLimit {
                scope,
                ..Arc::try_unwrap(limit).unwrap()
            }
        });
        let set: Arc<str> = "X_A".into();
        assert_eq!(caller.stage(&["x-b".into()]), Stage::BeforeToken);
        assert_eq!(caller.stage(&[set]), Stage::Allowed);
        assert_eq!(service.stage(&[]), Stage::Allowed);
    }

    #[test]
    fn later_refusal_puts_the_tokens_of_the_service_back_and_none_of_the_caller() {
        let none = RateLimits::default();
        let rate = Rate::new(1, SECOND, 1, 1);
        let limits = RateLimits(vec![
            limit("a", Scope::Caller, rate, &none),
            limit("b", Scope::Service, rate, &none),
        ]);
        let (now, get) = (Instant::now(), get("/"));
        let take = |stage, number| {
            let caller = caller(number);
            limits.take(stage, &[], 80, By::Identity(&caller), &get, now)
        };
        let taken = [0, 1].map(|number| take(Stage::BeforeToken, number).unwrap());
        taken.into_iter().for_each(Taken::put_back_shared);
        assert!(take(Stage::BeforeToken, 0).is_err());
        take(Stage::Allowed, 0).unwrap().put_back_shared();
        assert!(take(Stage::Allowed, 1).is_ok());
        assert!(take(Stage::Allowed, 0).is_err());
    }

    #[test]
    fn rotation_of_identities_resets_no_bucket() {
        let limits = one(Scope::Caller, Rate::new(2, 10 * SECOND, 2, 1));
        let start = Instant::now();
        let get = get("/");
        assert_eq!(drain(&limits, Some(&caller(0)), start).0, 2);
        for number in 1..2 * MAX_CALLERS {
            let _ = limits.count(80, Some(&caller(number)), &get, start);
        }
        let len = || limits.0[0].buckets.callers.buckets.read().unwrap().len();
        assert_eq!(len(), MAX_CALLERS);
        assert_eq!(drain(&limits, Some(&caller(0)), start).0, 0);
        // Those above the bound share a bucket, which is empty by now.
        assert_eq!(drain(&limits, Some(&caller(MAX_CALLERS)), start).0, 0);
        // After half of the time, the buckets of the others are full, and the bucket of the first caller
        // is not.
        let later = start + 6 * SECOND;
        assert!(
            limits
                .count(80, Some(&caller(5 * MAX_CALLERS)), &get, later)
                .is_ok()
        );
        assert_eq!(len(), 2);
        assert_eq!(drain(&limits, Some(&caller(0)), later).0, 1);
    }

    #[test]
    fn new_version_keeps_the_fill() {
        let before = one(Scope::Caller, Rate::new(10, SECOND, 10, 1));
        let start = Instant::now();
        let web = caller(0);
        assert_eq!(drain(&before, Some(&web), start).0, 10);
        let limits = RateLimits(vec![limit(
            "a",
            Scope::Caller,
            Rate::new(10, SECOND, 10, 5),
            &before,
        )]);
        assert_eq!(drain(&limits, Some(&web), start).0, 0);
        assert_eq!(drain(&limits, Some(&web), start + SECOND / 2).0, 1);
        // A smaller bucket is empty, not more than that.
        let smaller = RateLimits(vec![limit(
            "a",
            Scope::Caller,
            Rate::new(1000, SECOND, 1, 1),
            &before,
        )]);
        let (taken, wait) = drain(&smaller, Some(&web), start);
        assert_eq!((taken, wait), (0, SECOND / 1000));
        for (name, scope) in [("b", Scope::Caller), ("a", Scope::Service)] {
            let other = limit(name, scope, Rate::new(1, SECOND, 1, 1), &before);
            assert_eq!(drain(&RateLimits(vec![other]), Some(&web), start).0, 1);
        }
    }

    #[test]
    fn refused_request_takes_no_token_of_other_limits() {
        let none = RateLimits::default();
        let rate = |requests| Rate::new(requests, SECOND, requests, 1);
        let mut limits = RateLimits(vec![
            limit("a", Scope::Service, rate(3), &none),
            limit("b", Scope::Service, rate(1), &none),
        ]);
        let now = Instant::now();
        let (web, get) = (caller(0), get("/"));
        assert!(limits.count(80, Some(&web), &get, now).is_ok());
        for _ in 0..10 {
            let refused = limits.count(80, Some(&web), &get, now);
            let Err(Failure::RateLimited(exceeded)) = refused else {
                panic!("{refused:?}");
            };
            assert_eq!((&*exceeded.name, exceeded.scope), ("b", Scope::Service));
        }
        limits.0.pop();
        assert_eq!(drain(&limits, Some(&web), now).0, 2);
    }

    /// A limit of the requests whose field `x-a` matches.
    fn by_field(name: &str, expression: &str, requests: u64) -> Arc<RateLimit> {
        let value = ValueMatch::Regex(Pattern::parse(expression).unwrap());
        let headers = vec![FieldMatch {
            name: "x-a".to_owned(),
            value,
        }];
        let rate = Rate::new(requests, SECOND, requests, 1);
        let limit = limit(name, Scope::Service, rate, &RateLimits::default());
        Arc::new(RateLimit {
            matches: Matches::new(vec![Match {
                headers,
                ..Match::default()
            }]),
            ..Arc::try_unwrap(limit).unwrap()
        })
    }

    #[test]
    fn refused_request_is_matched_once() {
        let limits = RateLimits(vec![by_field("a", "1*", 3), by_field("b", "[1]*", 1)]);
        let head = http::Request::get("/").header("x-a", "1111");
        let head = diy_mesh_http2::Request::from(&head.body(()).unwrap().into_parts().0);
        let now = Instant::now();
        for is_taken in [true, false, false] {
            let input = MatchInput::new(RequestView {
                head: &head,
                ..request("GET", "/")
            });
            assert_eq!(limits.count(80, None, &input, now).is_ok(), is_taken);
            assert_eq!(input.judged(), 8);
        }
    }

    #[test]
    fn request_too_large_to_match_takes_no_token() {
        let all = limit(
            "all",
            Scope::Service,
            Rate::new(1, SECOND, 1, 1),
            &RateLimits::default(),
        );
        let expensive = (0..20).map(|_| by_field("b", "2*", 1));
        let limits = RateLimits([all].into_iter().chain(expensive).collect());
        let now = Instant::now();
        let large = http::Request::get("/").header("x-a", "1".repeat(60_000));
        let large = diy_mesh_http2::Request::from(&large.body(()).unwrap().into_parts().0);
        for _ in 0..3 {
            let input = MatchInput::new(RequestView {
                head: &large,
                ..request("GET", "/")
            });
            let refused = limits.count(80, None, &input, now);
            let is_fields =
                |failure| matches!(failure, Failure::TooLargeToMatch(RequestPart::Fields));
            assert!(refused.is_err_and(is_fields));
        }
        assert!(limits.count(80, None, &get("/"), now).is_ok());
    }

    #[test]
    fn other_ports_and_requests_are_not_limited() {
        let only = Match {
            path: Some(PathMatch::prefix("/a")),
            ..Match::default()
        };
        let limits = RateLimits(vec![Arc::new(RateLimit {
            matches: Matches::new(vec![only]),
            ..Arc::try_unwrap(limit(
                "a",
                Scope::Service,
                Rate::new(1, SECOND, 1, 1),
                &RateLimits::default(),
            ))
            .unwrap()
        })]);
        let now = Instant::now();
        let take = |port, path| limits.count(port, None, &get(path), now).is_ok();
        assert!(take(80, "/a/b") && !take(81, "/a"));
        assert!(take(82, "/a") && take(80, "/b"));
    }

    #[test]
    fn threads_share_a_bucket() {
        let limits = one(Scope::Caller, Rate::new(1000, 3600 * SECOND, 1000, 1));
        let now = Instant::now();
        let taken: usize = std::thread::scope(|scope| {
            let drain = || drain(&limits, Some(&caller(0)), now).0;
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(drain)).collect();
            threads.into_iter().map(|one| one.join().unwrap()).sum()
        });
        assert_eq!(taken, 1000);
    }
}
