//! Each algorithm of a policy: on endpoints alone, and from a request through the proxy.

use crate::endpoint::EndpointInfo;
use crate::route::Preference;
use std::collections::BTreeMap;
use std::time::Instant;

use super::super::maglev::hash;
use super::super::policy::{Algorithm, BackendPolicy, Balancing, HashKey};
use super::super::select::{Avoided, Context, Turns};
use super::super::zone::ZonePreference;
use super::super::{Endpoint, State};
use super::*;
use crate::upstream::connect::Pools;

/// A Service with this algorithm and endpoints 10.0.0.N:80.
fn service(algorithm: &Algorithm, hosts: &[u8]) -> Target {
    let endpoint = |host: &u8| EndpointInfo::bare(([10, 0, 0, *host], 80).into());
    let infos = hosts.iter().map(endpoint).collect();
    with_policy(algorithm, infos)
}

fn with_policy(algorithm: &Algorithm, mut infos: Vec<EndpointInfo>) -> Target {
    infos.sort_by_key(|info| info.address);
    let balancing = Balancing {
        algorithm: algorithm.clone(),
        ..Balancing::default()
    };
    Target {
        kind: TargetKind::Service,
        endpoints: infos.into_iter().map(Arc::new).collect(),
        policy: Arc::new(BackendPolicy {
            balancing,
            ..BackendPolicy::default()
        }),
        ..Target::default()
    }
    .with_table(&Target::default(), usize::MAX)
}

/// The endpoints of one worker.
struct Endpoints {
    state: State,
    pools: Pools,
    turns: Turns,
    zones: ZonePreference,
    rng: fastrand::Rng,
}

impl Endpoints {
    fn new(target: &Target, seed: u64) -> Self {
        let pools = Pools::default();
        let address = SocketAddr::from(([10, 96, 0, 7], 80)).into();
        let state = State::new(
            Arc::new(target.clone()),
            &address,
            Vec::new(),
            &pools,
            &Rc::default(),
        );
        Self {
            state,
            pools,
            turns: Turns::default(),
            zones: ZonePreference::default(),
            rng: fastrand::Rng::with_seed(seed),
        }
    }

    fn update(&mut self, target: &Target) {
        let before = std::mem::take(&mut self.state.members);
        let address = SocketAddr::from(([10, 96, 0, 7], 80)).into();
        self.state = State::new(
            Arc::new(target.clone()),
            &address,
            before,
            &self.pools,
            &Rc::default(),
        );
    }

    fn pick(&mut self, key: Option<u64>) -> Rc<Endpoint> {
        let preference = Preference {
            hash: key,
            ..Preference::default()
        };
        let context = Context {
            preference,
            avoided: &Avoided::default(),
            turns: &self.turns,
            zones: &self.zones,
            now: Instant::now(),
        };
        let picked = self.state.balance(&context, &mut self.rng);
        picked.expect("it has endpoints").clone()
    }

    /// The last byte of the address.
    fn host(&mut self, key: Option<u64>) -> u8 {
        match self.pick(key).address {
            SocketAddr::V4(address) => address.ip().octets()[3],
            SocketAddr::V6(_) => unreachable!("IPv4"),
        }
    }

    fn endpoint(&self, host: u8) -> Rc<Endpoint> {
        let address = SocketAddr::from(([10, 0, 0, host], 80));
        let members = &mut self.state.members.iter();
        let found = members.find(|member| member.info.address == address);
        found.expect("a member").endpoint.clone()
    }
}

fn quarantine(endpoint: &Rc<Endpoint>) {
    endpoint.begin(Instant::now()).refused();
}

#[test]
fn round_robin_gives_equal_turns_while_endpoints_change() {
    let target = |hosts: &[u8]| service(&Algorithm::RoundRobin, hosts);
    for seed in 0..20 {
        let mut endpoints = Endpoints::new(&target(&[1, 3, 5, 7, 9]), seed);
        let mut counts = BTreeMap::<u8, u32>::new();
        // Those that stay have equal turns, whatever comes and goes before or after the turn.
        for round in 0..60 {
            let hosts: &[u8] = match round % 3 {
                0 => &[1, 3, 5, 7, 9],
                1 => &[1, 2, 3, 5, 6, 7, 8],
                _ => &[2, 3, 4, 5, 7],
            };
            endpoints.update(&target(hosts));
            for _ in 0..3 {
                *counts.entry(endpoints.host(None)).or_default() += 1;
            }
        }
        let turns = [3, 5, 7].map(|host| counts[&host]);
        let most = turns.iter().max().zip(turns.iter().min());
        assert!(
            most.is_some_and(|(most, least)| most - least <= 1),
            "{turns:?}"
        );
        quarantine(&endpoints.endpoint(3));
        let next: Vec<u8> = (0..8).map(|_| endpoints.host(None)).collect();
        assert_eq!(next[..4], next[4..]);
        assert!(!next.contains(&3));
    }
    let first = |seed| Endpoints::new(&target(&[1, 2, 3, 4]), seed).host(None);
    let firsts: std::collections::BTreeSet<u8> = (0..50).map(first).collect();
    assert_eq!(firsts.len(), 4, "workers begin at different endpoints");
}

#[test]
fn least_request_counts_no_latency() {
    let target = service(&Algorithm::LeastRequest, &[1, 2]);
    let mut endpoints = Endpoints::new(&target, 7);
    let (slow, fast) = (endpoints.endpoint(1), endpoints.endpoint(2));
    for _ in 0..100 {
        // A failure counts as a latency of a second.
        slow.begin(Instant::now())
            .answered(crate::http::verdict::Verdict::Success);
        slow.begin(Instant::now()).discard();
    }
    let in_flight = fast.begin(Instant::now());
    assert_eq!(endpoints.host(None), 1);
    let more = [slow.begin(Instant::now()), slow.begin(Instant::now())];
    assert_eq!(endpoints.host(None), 2);
    drop((in_flight, more));
}

#[test]
fn consistent_hash_is_the_same_in_all_workers_and_moves_few_keys() {
    let hashed = Algorithm::ConsistentHash(HashKey::Source);
    let hosts: Vec<u8> = (1..=10).collect();
    let mut one = Endpoints::new(&service(&hashed, &hosts), 1);
    let mut other = Endpoints::new(&service(&hashed, &hosts), 2);
    let keys: Vec<u64> = (0..2000_u32).map(|key| hash(&key.to_be_bytes())).collect();
    let before: Vec<u8> = keys.iter().map(|key| one.host(Some(*key))).collect();
    for (key, host) in keys.iter().zip(&before) {
        assert_eq!(other.host(Some(*key)), *host);
    }
    // Without one of ten endpoints, its keys move, and few others.
    one.update(&service(&hashed, &hosts[1..]));
    let moved = keys.iter().zip(&before);
    let moved = moved.filter(|(key, host)| **host != 1 && one.host(Some(**key)) != **host);
    let moved = moved.count();
    assert!(moved < 60, "{moved} of 2000");
    // Requests without the key are balanced.
    let mut counts = BTreeMap::<u8, u32>::new();
    for _ in 0..2000 {
        *counts.entry(other.host(None)).or_default() += 1;
    }
    assert!(
        counts.values().all(|count| (140..260).contains(count)),
        "{counts:?}"
    );
}

#[test]
fn keys_of_quarantined_and_overloaded_endpoints_spill_and_return() {
    let hashed = Algorithm::ConsistentHash(HashKey::Source);
    let mut endpoints = Endpoints::new(&service(&hashed, &[1, 2, 3, 4]), 1);
    let key = Some(hash(b"user"));
    let usual = endpoints.pick(key);
    let held: Vec<_> = (0..15).map(|_| usual.begin(Instant::now())).collect();
    assert!(
        Rc::ptr_eq(&endpoints.pick(key), &usual),
        "few requests in flight"
    );
    let one_more = usual.begin(Instant::now());
    let next = endpoints.pick(key);
    assert!(!Rc::ptr_eq(&next, &usual), "16 of 16 requests are its own");
    let others: Vec<_> = (1..=4).map(|host| endpoints.endpoint(host)).collect();
    let balanced: Vec<_> = (0..40)
        .map(|at| others[at % 4].begin(Instant::now()))
        .collect();
    assert!(
        Rc::ptr_eq(&endpoints.pick(key), &usual),
        "26 of 56, below twice the mean"
    );
    drop((held, one_more, balanced));
    quarantine(&usual);
    assert!(Rc::ptr_eq(&endpoints.pick(key), &next), "the same next one");
    usual.judgement.reset(Instant::now());
    assert!(Rc::ptr_eq(&endpoints.pick(key), &usual));
}

#[test]
fn endpoint_of_an_unready_node_gets_no_requests_after_a_refused_connection() {
    for count in [1, 2] {
        let endpoint = |host: u8| EndpointInfo {
            node_unready: true,
            ..EndpointInfo::bare(([10, 0, 0, host], 80).into())
        };
        let mut target = with_policy(&Algorithm::PeakEwma, Vec::new());
        target.draining = (1..=count).map(|host| Arc::new(endpoint(host))).collect();
        let mut endpoints = Endpoints::new(&target, 7);
        for host in 1..=count {
            quarantine(&endpoints.endpoint(host));
        }
        let context = Context {
            preference: Preference::default(),
            avoided: &Avoided::default(),
            turns: &endpoints.turns,
            zones: &endpoints.zones,
            now: Instant::now(),
        };
        let picked = endpoints.state.balance(&context, &mut endpoints.rng);
        assert!(picked.is_none(), "{count} endpoints");
        let ready = |host| EndpointInfo {
            node_unready: false,
            ..endpoint(host)
        };
        let mut target = with_policy(&Algorithm::PeakEwma, (1..=count).map(ready).collect());
        target.draining = Vec::new();
        let mut endpoints = Endpoints::new(&target, 7);
        for host in 1..=count {
            quarantine(&endpoints.endpoint(host));
        }
        assert!(
            (1..=count).contains(&endpoints.host(None)),
            "a ready one is tried"
        );
        // The next announcement counts.
        (target.draining, target.endpoints) = (target.endpoints, Vec::new());
        for one in &mut target.draining {
            *one = Arc::new(EndpointInfo {
                node_unready: true,
                ..(**one).clone()
            });
        }
        endpoints.update(&target);
        assert!(endpoints.endpoint(1).node_unready.get());
    }
}

/// Hosts 1 to 3 are in zone a, 4 to 9 in zone b.
fn zoned(algorithm: &Algorithm) -> Target {
    let endpoint = |host: u8| EndpointInfo {
        zone: if host <= 3 { "a" } else { "b" }.to_owned(),
        ..EndpointInfo::bare(([10, 0, 0, host], 80).into())
    };
    with_policy(algorithm, (1..=9).map(endpoint).collect())
}

#[test]
fn endpoints_of_the_own_zone_are_preferred_while_they_are_healthy() {
    for algorithm in [
        Algorithm::PeakEwma,
        Algorithm::LeastRequest,
        Algorithm::RoundRobin,
    ] {
        let own = |endpoints: &mut Endpoints| {
            let hosts = (0..2000).map(|_| endpoints.host(None));
            hosts.filter(|host| *host <= 3).count()
        };
        let mut endpoints = Endpoints::new(&zoned(&algorithm), 7);
        assert!(
            (500..850).contains(&own(&mut endpoints)),
            "no zone is preferred"
        );
        endpoints.zones.set_zone("a");
        assert!(own(&mut endpoints) > 1900);
        // A quarantine lasts a second, which may pass on a slow machine.
        let picks_own = |_: &i32| {
            (1..=3).for_each(|host| quarantine(&endpoints.endpoint(host)));
            endpoints.host(None) <= 3
        };
        assert_eq!((0..2000).filter(picks_own).count(), 0);
        for host in 1..=3 {
            endpoints.endpoint(host).judgement.reset(Instant::now());
        }
        assert!(own(&mut endpoints) > 1900);
        // Without an endpoint in its zone, a proxy uses all of the others.
        endpoints.zones.set_zone("c");
        assert!((500..850).contains(&own(&mut endpoints)));
    }
}

#[test]
fn zone_without_enough_healthy_endpoints_shares_its_requests() {
    let mut endpoints = Endpoints::new(&zoned(&Algorithm::PeakEwma), 7);
    endpoints.zones.set_zone("a");
    let picks_own = |_: &i32| {
        (1..=2).for_each(|host| quarantine(&endpoints.endpoint(host)));
        endpoints.host(None) == 3
    };
    let own = (0..4000).filter(picks_own).count();
    // 1.4 times a third, of 97%.
    assert!((1650..1970).contains(&own), "{own} of 4000");
}

/// An HTTP/1 application that responds with its number.
async fn numbered_app(number: usize) -> SocketAddr {
    listening(async move |mut stream| {
        while read_head(&mut stream).await.is_some() {
            let answer = format!("HTTP/1.1 200 OK\r\nX-App: {number}\r\nContent-Length: 0\r\n\r\n");
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    })
    .await
}

async fn numbered_http2_app(number: usize) -> SocketAddr {
    http2_app(move || {
        let mut head = Response::new(());
        head.headers_mut().insert("x-app", number.into());
        head
    })
    .await
}

/// A Service with this policy, and the address of each numbered application.
async fn numbered(key: HashKey, apps: Vec<SocketAddr>) -> Service {
    let infos: Vec<_> = apps.iter().copied().map(EndpointInfo::bare).collect();
    let service = Service::with(&Authority::new("root"), infos.clone()).await;
    let policy = with_policy(&Algorithm::ConsistentHash(key), infos);
    service.updates.send_replace(Arc::new(policy));
    service
}

/// The number of the application that a key selects.
fn expected(service: &Service, key: &str) -> String {
    let hash = Some(hash(key.as_bytes()));
    let (backend, rng) = (&service.destination, &mut fastrand::Rng::new());
    let preference = Preference {
        hash,
        ..Preference::default()
    };
    let picked = backend.pick_for(preference, &Avoided::default(), "", rng, Instant::now());
    let address = picked.expect("it has endpoints").address;
    let at = service.addresses.iter().position(|one| *one == address);
    at.expect("an endpoint").to_string()
}

#[test]
fn header_and_cookie_select_the_endpoint_in_both_versions_of_http() {
    on_worker(async {
        let (mut http1, mut http2) = (Vec::new(), Vec::new());
        for number in 0..5 {
            http1.push(numbered_app(number).await);
            http2.push(numbered_http2_app(number).await);
        }
        let keys = [
            (HashKey::Header("x-user".into()), "X-User", ""),
            (HashKey::Cookie("sid".into()), "Cookie", "a=b; sid="),
        ];
        for (key, field, prefix) in keys {
            let service = numbered(key.clone(), http1.clone()).await;
            for user in 0..20 {
                let user = format!("user-{user}");
                let head = format!("{field}: {prefix}{user}\r\nConnection: close\r\n\r\n");
                let answer = service
                    .call(&format!("GET / HTTP/1.1\r\nHost: cart\r\n{head}"))
                    .await;
                let app = format!("\r\nX-App: {}\r\n", expected(&service, &user));
                assert!(answer.contains(&app), "{user}: {answer}");
            }
            let service = numbered(key, http2.clone()).await;
            let stream = service.caller.connect(&service.destination).await;
            let (mut client, connection) = h2::client::handshake(stream).await.expect("a preface");
            tokio::task::spawn_local(async move { drop(connection.await) });
            for user in 0..20 {
                let user = format!("user-{user}");
                let request = Request::get("http://cart/").header(field, format!("{prefix}{user}"));
                poll_fn(|cx| client.poll_ready(cx))
                    .await
                    .expect("it is open");
                let sent = client.send_request(request.body(()).expect("valid"), true);
                let response = sent.expect("it is ready").0.await.expect("a response");
                assert_eq!(
                    response.headers()["x-app"],
                    expected(&service, &user),
                    "{user}"
                );
            }
        }
    });
}

#[test]
fn source_selects_one_endpoint_for_requests_and_opaque_connections() {
    on_worker(async {
        let mut apps = Vec::new();
        for number in 0..5 {
            apps.push(numbered_app(number).await);
        }
        let service = numbered(HashKey::Source, apps).await;
        let backend = &service.destination;
        let mut answers = std::collections::BTreeSet::new();
        for _ in 0..20 {
            answers.insert(service.call(GET).await);
        }
        assert_eq!(answers.len(), 1, "{answers:?}");
        let client = |host| backend.preference(None, SocketAddr::from(([10, 0, 0, host], 1)));
        assert_eq!(client(1), client(1));
        assert_ne!(client(1), client(2));
    });
}
