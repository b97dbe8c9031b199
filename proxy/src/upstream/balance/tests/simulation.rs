//! Simulation in virtual time: the shares of requests that two endpoints get, and zones.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::upstream::balance::budget::RetryBudget;
use crate::upstream::balance::latency::Latency;
use crate::upstream::balance::outlier::{Detector, Judgement, Outcome, OutlierSettings};
use crate::upstream::balance::p2c;
use crate::upstream::balance::zone::ZonePreference;

/// Standard deviations between a share and its mean. Chance exceeds it once in 15,000 cases.
const MAX_DEVIATIONS: f64 = 4.0;

/// When requests start.
#[derive(Clone, Copy)]
enum Arrivals {
    /// At random times, as many per second.
    PerSecond(f64),
    /// One after the other, with this pause.
    Sequential(Duration),
}

/// A request that an endpoint got: the time since the start, and the index of the endpoint.
type Request = (Duration, usize);

/// Sends `count` requests to two endpoints, whose latency is a function of their index, of the time
/// and of chance.
fn simulate(
    arrivals: Arrivals,
    count: usize,
    seed: u64,
    latency_of: impl Fn(usize, Duration, &mut Rng) -> Duration,
) -> Vec<Request> {
    let (mut rng, start) = (Rng::with_seed(seed), Instant::now());
    let endpoints: [(Latency, Cell<u32>); 2] = Default::default();
    // Responses by the time of their arrival: the endpoint and the latency.
    let mut responses: BTreeMap<(Duration, usize), (usize, Duration)> = BTreeMap::new();
    let (mut now, mut requests) = (Duration::ZERO, Vec::new());
    for number in 0..count {
        if let Arrivals::PerSecond(rate) = arrivals {
            now += exponential(Duration::from_secs(1), &mut rng).div_f64(rate);
        }
        while let Some(first) = responses.first_entry().filter(|first| first.key().0 <= now) {
            let at = start + first.key().0;
            let (endpoint, latency) = first.remove();
            let (latencies, in_flight) = &endpoints[endpoint];
            in_flight.set(in_flight.get() - 1);
            latencies.record_success(latency, at);
        }
        let is_cheaper = |one: usize, other: usize| {
            let [one, other] = [one, other].map(|index| &endpoints[index]);
            let (in_flight, other_in_flight) = (one.1.get(), other.1.get());
            one.0
                .is_cheaper(in_flight, &other.0, other_in_flight, start + now)
        };
        let picked = p2c::choose(2, &mut rng, |_| true, is_cheaper).expect("two are usable");
        requests.push((now, picked));
        let latency = latency_of(picked, now, &mut rng);
        let in_flight = &endpoints[picked].1;
        in_flight.set(in_flight.get() + 1);
        responses.insert((now + latency, number), (picked, latency));
        if let Arrivals::Sequential(pause) = arrivals {
            now += latency + pause;
        }
    }
    requests
}

/// An exponentially distributed time.
fn exponential(mean: Duration, rng: &mut Rng) -> Duration {
    mean.mul_f64(-(1.0 - rng.f64()).ln())
}

/// The latency of a usual application: 3 ms on average, and 100 ms more for one request of 30.
fn noisy(rng: &mut Rng) -> Duration {
    let usual = exponential(Duration::from_millis(3), rng);
    if rng.u8(..30) > 0 {
        return usual;
    }
    usual + exponential(Duration::from_millis(100), rng)
}

/// The share of the requests between two times that the second endpoint got.
fn share(requests: &[Request], seconds: std::ops::Range<u64>) -> f64 {
    let within = |request: &&Request| seconds.contains(&request.0.as_secs());
    let all = requests.iter().filter(within).count();
    let second = requests
        .iter()
        .filter(within)
        .filter(|request| request.1 == 1);
    assert!(all > 0, "no request in {seconds:?}");
    second.count() as f64 / all as f64
}

/// At higher rates, responses overlap, and in-flight requests count.
#[test]
fn equal_endpoints_get_shares_within_chance_at_low_rates() {
    for rate in [0.2, 1.0, 5.0] {
        let (seeds, count) = (400, 100);
        let mut squares = 0.0;
        for seed in 0..seeds {
            let requests = simulate(Arrivals::PerSecond(rate), count, seed, |_, _, rng| {
                noisy(rng)
            });
            let second = share(&requests, 0..u64::MAX);
            // The binomial distribution of 100 draws at p = 1/2 has a standard deviation of 5.
            let deviations = (second - 0.5) * 2.0 * (count as f64).sqrt();
            assert!(
                deviations.abs() < MAX_DEVIATIONS,
                "seed {seed}: {second} at {rate} requests/s"
            );
            squares += deviations * deviations;
        }
        // Its mean over 400 seeds has a standard deviation of 0.07.
        let variance = squares / seeds as f64;
        assert!(variance < 1.3, "{variance} at {rate} requests/s");
    }
}

#[test]
fn one_slow_response_does_not_exclude_an_idle_endpoint() {
    let mut after = 0.0;
    for seed in 0..400 {
        let slow = Cell::new(true);
        let latency_of = |endpoint: usize, now: Duration, rng: &mut Rng| {
            let is_slow = endpoint == 1 && now.as_secs() >= 30 && slow.take();
            let latency = exponential(Duration::from_millis(3), rng);
            latency + Duration::from_millis(60) * u32::from(is_slow)
        };
        let requests = simulate(
            Arrivals::Sequential(Duration::from_secs(1)),
            50,
            seed,
            latency_of,
        );
        let slow_at = requests
            .iter()
            .find(|request| request.0.as_secs() >= 30 && request.1 == 1);
        let from = slow_at
            .expect("each endpoint gets one of 20 requests")
            .0
            .as_secs()
            + 1;
        after += share(&requests, from..from + 5);
    }
    let mean = after / 400.0;
    assert!((0.45..0.55).contains(&mean), "{mean}");
}

#[test]
fn slow_endpoint_loses_its_share_within_two_seconds() {
    let is_slow = |endpoint, now: Duration| endpoint == 1 && now.as_secs() >= 5;
    let latency_of = |endpoint: usize, now: Duration, rng: &mut Rng| {
        noisy(rng) + Duration::from_millis(200) * u32::from(is_slow(endpoint, now))
    };
    for seed in 0..50 {
        let requests = simulate(Arrivals::PerSecond(100.0), 2500, seed, latency_of);
        let (soon, later) = (share(&requests, 7..9), share(&requests, 9..20));
        assert!(
            soon < 0.1 && later < 0.05,
            "seed {seed}: {soon}, then {later}"
        );
    }
    // It gets its share back after the weight of its slow responses has decayed.
    let recovers = |endpoint: usize, now: Duration, rng: &mut Rng| {
        let is_slow = endpoint == 1 && (5..15).contains(&now.as_secs());
        noisy(rng) + Duration::from_millis(200) * u32::from(is_slow)
    };
    for seed in 0..50 {
        let requests = simulate(Arrivals::PerSecond(100.0), 7000, seed, recovers);
        let (slow, after) = (share(&requests, 7..15), share(&requests, 50..65));
        assert!(
            slow < 0.1 && after > 0.4,
            "seed {seed}: {slow}, then {after}"
        );
    }
    // Sequential requests never overlap: only latencies show the slow endpoint, after about nine of
    // its responses.
    for seed in 0..50 {
        let arrivals = Arrivals::Sequential(Duration::from_millis(7));
        let requests = simulate(arrivals, 2500, seed, latency_of);
        let later = share(&requests, 12..20);
        assert!(later < 0.1, "seed {seed}: {later}");
    }
}

/// Proxies in several zones that prefer their own, and endpoints with queues.
struct Zones {
    /// The zone of each endpoint.
    endpoints: Vec<&'static str>,
    /// The zone of each proxy, and its requests per second.
    proxies: Vec<(&'static str, f64)>,
}

/// The requests that an endpoint serves at once, and the mean time for one: at most 400 per second.
const SERVERS: usize = 4;
const SERVICE: Duration = Duration::from_millis(10);

/// A request: its time, its proxy, its endpoint and its latency.
type ZoneRequest = (Duration, usize, usize, Duration);

impl Zones {
    /// Sends requests for this time. Latencies contain the queue of the endpoint, 1 ms to another
    /// zone, and a delay.
    fn simulate(
        &self,
        seconds: u64,
        seed: u64,
        delay: impl Fn(usize, Duration) -> Duration,
    ) -> Vec<ZoneRequest> {
        let (mut rng, start) = (Rng::with_seed(seed), Instant::now());
        let count = self.endpoints.len();
        let preferences: Vec<ZonePreference> =
            self.proxies.iter().map(|_| Default::default()).collect();
        let in_flight = vec![vec![Cell::new(0_u32); count]; self.proxies.len()];
        let mut free_at = vec![[Duration::ZERO; SERVERS]; count];
        let mut arrivals = BTreeMap::new();
        for (proxy, (zone, _)) in self.proxies.iter().enumerate() {
            preferences[proxy].set_zone(zone);
            arrivals.insert((Duration::ZERO, proxy), ());
        }
        let mut responses: BTreeMap<(Duration, usize), (usize, usize, Duration)> = BTreeMap::new();
        let mut requests = Vec::new();
        while let Some(((now, proxy), ())) = arrivals.pop_first() {
            if now >= Duration::from_secs(seconds) {
                break;
            }
            let (zone, rate) = self.proxies[proxy];
            let next = exponential(Duration::from_secs(1), &mut rng).div_f64(rate);
            arrivals.insert((now + next + Duration::from_nanos(1), proxy), ());
            while let Some(first) = responses.first_entry().filter(|first| first.key().0 <= now) {
                let at = start + first.key().0;
                let (proxy, endpoint, latency) = first.remove();
                let count = &in_flight[proxy][endpoint];
                count.set(count.get() - 1);
                preferences[proxy].record(self.endpoints[endpoint], latency, at);
            }
            let stays = preferences[proxy].stays(start + now, &mut rng, || 1.0);
            let usable = |endpoint: usize| (self.endpoints[endpoint] == zone) == stays;
            let loads = &in_flight[proxy];
            let is_cheaper = |one: usize, other: usize| loads[one].get() < loads[other].get();
            let picked =
                p2c::choose(count, &mut rng, usable, is_cheaper).expect("each zone has one");
            loads[picked].set(loads[picked].get() + 1);
            let server = free_at[picked].iter_mut().min().expect("it has servers");
            *server = now.max(*server) + exponential(SERVICE, &mut rng);
            let way = Duration::from_millis(u64::from(self.endpoints[picked] != zone));
            let latency = *server - now + way + delay(picked, now);
            responses.insert((now + latency, requests.len()), (proxy, picked, latency));
            requests.push((now, proxy, picked, latency));
        }
        requests
    }

    /// The share of a proxy's requests between two times that stayed in its zone.
    fn own_share(
        &self,
        requests: &[ZoneRequest],
        proxy: usize,
        seconds: std::ops::Range<u64>,
    ) -> f64 {
        let within = |one: &&ZoneRequest| one.1 == proxy && seconds.contains(&one.0.as_secs());
        let is_own = |one: &&ZoneRequest| self.endpoints[one.2] == self.proxies[proxy].0;
        let all = requests.iter().filter(within);
        let own = all.clone().filter(is_own).count();
        own as f64 / all.count() as f64
    }
}

const THREE_ZONES: [&str; 9] = ["a", "a", "a", "b", "b", "b", "c", "c", "c"];

#[test]
fn requests_stay_in_the_zone_at_equal_load() {
    for rate in [100.0, 300.0, 900.0] {
        let zones = Zones {
            endpoints: THREE_ZONES.to_vec(),
            proxies: vec![("a", rate), ("b", rate), ("c", rate)],
        };
        let requests = zones.simulate(15, 7, |_, _| Duration::ZERO);
        for proxy in 0..3 {
            let share = zones.own_share(&requests, proxy, 1..15);
            assert!(share > 0.95, "{share} at {rate} requests/s");
        }
    }
}

#[test]
fn requests_leave_a_slow_zone_within_seconds_and_return() {
    for rate in [100.0, 300.0] {
        let zones = Zones {
            endpoints: THREE_ZONES.to_vec(),
            proxies: vec![("a", rate), ("b", rate), ("c", rate)],
        };
        let is_slow = |now: Duration| (10..20).contains(&now.as_secs());
        let delay = |endpoint: usize, now| {
            Duration::from_millis(200) * u32::from(endpoint < 3 && is_slow(now))
        };
        let requests = zones.simulate(30, 7, delay);
        let share = |seconds| zones.own_share(&requests, 0, seconds);
        let (slow, after) = (share(13..20), share(25..30));
        assert!(
            share(1..10) > 0.95 && slow < 0.25 && after > 0.9,
            "{rate}: {slow}, {after}"
        );
    }
}

#[test]
fn small_zone_with_most_clients_is_not_overloaded() {
    let endpoints = vec!["a", "a", "b", "b", "b", "b", "c", "c", "c", "c"];
    // The endpoints of zone a serve 800 requests per second.
    let proxies = vec![("a", 640.0), ("a", 640.0), ("b", 160.0), ("c", 160.0)];
    let zones = Zones { endpoints, proxies };
    let requests = zones.simulate(40, 7, |_, _| Duration::ZERO);
    let settled = requests.iter().filter(|one| one.0.as_secs() >= 10);
    let mut latencies: Vec<Duration> = settled.filter(|one| one.2 < 2).map(|one| one.3).collect();
    latencies.sort();
    let mean = latencies.iter().sum::<Duration>() / latencies.len() as u32;
    let worst = latencies[latencies.len() * 99 / 100];
    // Without a queue, 10 ms and 46 ms.
    let limit = (Duration::from_millis(40), Duration::from_millis(250));
    assert!(mean < limit.0 && worst < limit.1, "{mean:?}, {worst:?}");
    let own = zones.own_share(&requests, 0, 10..40);
    assert!((0.2..0.62).contains(&own), "{own} of 0.62 at most");
}

/// Sends 100 requests per second for 10 minutes to five endpoints, one of which fails half of its
/// requests. Returns the requests, those that fail for the caller, and the retries.
fn one_of_five_fails(is_retried: bool, outliers: OutlierSettings, seed: u64) -> (u32, u32, u32) {
    let (mut rng, start) = (Rng::with_seed(seed), Instant::now());
    let detector = Rc::new(Detector::new(start));
    detector.set_count(5);
    detector.set(outliers, None);
    let endpoints: [(Latency, Judgement); 5] =
        std::array::from_fn(|_| (Latency::default(), Judgement::new(&detector)));
    let budget = RetryBudget::new(start);
    // Sends to an endpoint without the one that was tried. Returns the endpoint if it fails.
    let send = |now: Instant, tried: Option<usize>, rng: &mut Rng| {
        let is_cheaper =
            |one: usize, other: usize| endpoints[one].0.is_cheaper(0, &endpoints[other].0, 0, now);
        let is_usable =
            |index: usize| tried != Some(index) && !endpoints[index].1.is_quarantined(now);
        let picked = p2c::choose(5, rng, is_usable, is_cheaper).expect("at most half are left");
        let (latency, judgement) = &endpoints[picked];
        let trial = judgement.begin(now);
        let took = noisy(rng);
        if picked > 0 || rng.bool() {
            latency.record_success(took, now);
            judgement.record(Outcome::Success, &trial, now + took);
            return None;
        }
        latency.record_failure(took, now);
        let ejected = judgement.record(Outcome::Failure, &trial, now + took);
        if ejected.is_some() {
            latency.reset();
        }
        Some(picked)
    };
    let (requests, mut failures, mut retries) = (60_000, 0, 0);
    for number in 0..requests {
        let now = start + Duration::from_millis(10) * number;
        budget.record_request(now);
        let Some(failed) = send(now, None, &mut rng) else {
            continue;
        };
        let is_sent_again = is_retried && budget.try_retry(now);
        retries += u32::from(is_sent_again);
        let mut fails_again = || send(now, Some(failed), &mut rng).is_some();
        failures += u32::from(!is_sent_again || fails_again());
    }
    (requests, failures, retries)
}

#[test]
fn one_of_five_endpoints_that_fails_half_of_its_requests_is_hardly_noticed() {
    let default = OutlierSettings::default();
    let only_consecutive = OutlierSettings {
        failure_percent: 0,
        ..default
    };
    let off = OutlierSettings {
        consecutive_failures: 0,
        ..only_consecutive
    };
    let failed = |is_retried, outliers| {
        (0..20).fold(0, |sum, seed| {
            let (requests, failures, retries) = one_of_five_fails(is_retried, outliers, seed);
            let most = if is_retried { 0 } else { requests / 200 };
            assert!(
                failures <= most || outliers == off,
                "{failures}, seed {seed}"
            );
            assert!(retries <= requests / 5, "{retries}, seed {seed}");
            sum + failures
        })
    };
    // With retries, no caller notices the endpoint.
    assert_eq!(failed(true, default), 0);
    // Without them, callers see less than 0.1% of failures, not 0.5% as without a quarantine.
    let (with, with_one_rule, without) = (
        failed(false, default),
        failed(false, only_consecutive),
        failed(false, off),
    );
    assert!(
        with < 20 * 60 && with < with_one_rule,
        "{with}, {with_one_rule}"
    );
    assert!(without > 20 * 250, "{without}");
}
