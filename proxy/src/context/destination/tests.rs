//! Tests of destinations under updates from discovery: selection, retained state, eviction.

use std::sync::Arc;

use tokio::sync::watch;

use super::*;
use crate::discovery::{Affinity, Questions, Target, TargetKind};
use crate::endpoint::EndpointInfo;
use crate::error::Failure;
use crate::protocol::Protocol;
use crate::upstream::balance::policy::BackendPolicy;
use crate::upstream::balance::{Endpoint, OutlierSettings};
use crate::upstream::connect::{Limits, Remote};
use diy_mesh_testkit::wait::{TEST_TIMEOUT, soon};

impl Destinations {
    fn len(&self) -> usize {
        self.entries.borrow().len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of idle HTTP/1 connections.
    pub fn idle_http1(&self) -> usize {
        self.pools.idle_http1()
    }
}

const SECOND: Duration = Duration::from_secs(1);

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

fn info(text: &str) -> Arc<EndpointInfo> {
    Arc::new(EndpointInfo::bare(address(text)))
}

fn service(endpoints: &[Arc<EndpointInfo>]) -> Arc<Target> {
    let (namespace, name) = ("shop".to_owned(), "cart".to_owned());
    Arc::new(Target {
        kind: TargetKind::Service,
        namespace,
        name,
        app_protocol: Some(Protocol::Http2),
        endpoints: endpoints.to_vec(),
        ..Target::default()
    })
}

/// A destination and the sender of its updates.
fn watched_destination(target: Arc<Target>) -> (watch::Sender<Arc<Target>>, Rc<Backend>) {
    let (sender, receiver) = watch::channel(target);
    let backend = Backend::watched(address("10.96.0.7:80"), receiver, &Rc::default());
    (sender, Rc::new(backend))
}

fn rng() -> fastrand::Rng {
    fastrand::Rng::with_seed(7)
}

/// The number of selections by endpoint.
fn picks(destination: &Backend, tried: &[SocketAddr], times: usize) -> HashMap<String, usize> {
    let (mut rng, mut picks) = (rng(), HashMap::new());
    for _ in 0..times {
        let endpoint = destination
            .pick(tried, &mut rng)
            .expect("there is an endpoint");
        *picks.entry(endpoint.address.to_string()).or_default() += 1;
    }
    picks
}

fn find(destination: &Backend, text: &str) -> Rc<Endpoint> {
    destination
        .endpoint(address(text))
        .expect("the endpoint is a member")
}

#[test]
fn other_endpoints_exclude_only_the_given_one() {
    let (sender, destination) = watched_destination(service(&[info("10.0.0.1:80")]));
    let has_other = |text: &str| destination.has_other(address(text));
    assert!(!has_other("10.0.0.1:80"));
    // A request is in flight to an endpoint that discovery replaces.
    sender
        .send(service(&[info("10.0.0.2:80")]))
        .expect("the destination watches");
    assert!(has_other("10.0.0.1:80") && !has_other("10.0.0.2:80"));
}

#[test]
fn distributes_requests_evenly() {
    let (_sender, destination) = watched_destination(service(&[
        info("10.0.0.1:80"),
        info("10.0.0.2:80"),
        info("10.0.0.3:80"),
    ]));
    let picks = picks(&destination, &[], 3000);
    assert!(
        picks.len() == 3 && picks.values().all(|times| (900..1100).contains(times)),
        "{picks:?}"
    );
    assert_eq!(
        (
            destination.endpoints_len(),
            destination.app_protocol(),
            &*destination.name()
        ),
        (3, Some(Protocol::Http2), "shop/cart")
    );
}

#[test]
fn prefers_endpoint_with_fewer_in_flight_requests() {
    let (_sender, destination) =
        watched_destination(service(&[info("10.0.0.1:80"), info("10.0.0.2:80")]));
    let loaded = find(&destination, "10.0.0.1:80");
    let requests: Vec<_> = (0..3).map(|_| loaded.begin(Instant::now())).collect();
    assert_eq!(
        picks(&destination, &[], 100),
        HashMap::from([("10.0.0.2:80".to_owned(), 100)])
    );
    assert_eq!(loaded.in_flight(), 3);
    // A burst is distributed evenly.
    let mut burst = Vec::new();
    for _ in 0..97 {
        burst.push(
            destination
                .pick(&[], &mut rng())
                .expect("there are two endpoints")
                .begin(Instant::now()),
        );
    }
    assert_eq!(
        (
            loaded.in_flight(),
            find(&destination, "10.0.0.2:80").in_flight()
        ),
        (50, 50)
    );
    drop((burst, requests));
    assert_eq!(loaded.in_flight(), 0);
}

#[test]
fn draining_endpoint_gets_requests_only_while_no_endpoint_is_ready() {
    let target = |ready: &[&str], draining: &[&str]| {
        let all = |texts: &[&str]| texts.iter().map(|text| info(text)).collect::<Vec<_>>();
        let empty = service(&[]);
        Arc::new(Target {
            kind: TargetKind::Service,
            endpoints: all(ready),
            draining: all(draining),
            ..(*empty).clone()
        })
    };
    let (one, other) = ("10.0.0.1:80", "10.0.0.2:80");
    let (sender, destination) = watched_destination(target(&[one, other], &[]));
    let in_flight = find(&destination, one).begin(Instant::now());
    sender.send_replace(target(&[other], &[one]));
    assert_eq!(
        picks(&destination, &[], 100),
        HashMap::from([(other.to_owned(), 100)])
    );
    sender.send_replace(target(&[], &[one, other]));
    assert_eq!(picks(&destination, &[], 100).len(), 2);
    // The last ready endpoint that drains keeps its connections and its state.
    let last = find(&destination, other);
    sender.send_replace(target(&[other], &[]));
    assert_eq!(picks(&destination, &[], 1).len(), 1);
    assert!(Rc::ptr_eq(&last, &find(&destination, other)));
    drop(in_flight);
}

#[test]
fn session_affinity_keeps_the_endpoint_in_all_workers_until_it_fails_or_leaves() {
    let all = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80", "10.0.0.4:80"].map(info);
    let balanced = service(&all);
    let affinity = Some(Arc::new(Affinity::new(Duration::from_secs(3600))));
    let sticky = |endpoints: &[Arc<EndpointInfo>]| {
        Arc::new(Target {
            kind: TargetKind::Service,
            endpoints: endpoints.to_vec(),
            affinity: affinity.clone(),
            ..(*balanced).clone()
        })
    };
    let (sender, one) = watched_destination(sticky(&all));
    let (_sender, other) = watched_destination(sticky(&all));
    let only = |destination: &Backend| {
        let picks = picks(destination, &[], 50);
        assert_eq!(picks.len(), 1, "{picks:?}");
        address(picks.keys().next().expect("an endpoint"))
    };
    let first = only(&one);
    assert_eq!(only(&other), first);
    // Another attempt of a request does not go to the same endpoint, and later requests follow it.
    let second = picks(&one, &[first], 1);
    let second = address(second.keys().next().expect("an endpoint"));
    assert_ne!(second, first);
    assert_eq!(only(&one), second);
    // It refuses connections.
    find(&one, &second.to_string())
        .begin(Instant::now())
        .refused();
    let third = only(&one);
    assert_ne!(third, second);
    // Discovery removes it.
    let rest: Vec<_> = all
        .into_iter()
        .filter(|info| info.address != third)
        .collect();
    sender.send_replace(sticky(&rest));
    assert_ne!(only(&one), third);
}

#[test]
fn excludes_tried_endpoints() {
    let (_sender, destination) =
        watched_destination(service(&[info("10.0.0.1:80"), info("10.0.0.2:80")]));
    let tried = [address("10.0.0.1:80"), address("10.0.0.2:80")];
    assert_eq!(
        picks(&destination, &tried[..1], 50),
        HashMap::from([("10.0.0.2:80".to_owned(), 50)])
    );
    let failure = destination
        .pick(&tried, &mut rng())
        .err()
        .expect("all endpoints were tried");
    assert!(
        matches!(&failure, Failure::NoEndpoint(name) if name == "shop/cart"),
        "{failure}"
    );
    assert!(Backend::alone(tried[0]).pick(&tried, &mut rng()).is_err());
}

#[test]
fn error_names_service_without_endpoints() {
    let (sender, destination) = watched_destination(service(&[]));
    let failure = destination
        .pick(&[], &mut rng())
        .err()
        .expect("there is no endpoint");
    assert_eq!(
        failure.to_string(),
        "service shop/cart has no ready endpoint"
    );
    sender.send_replace(service(&[info("10.0.0.1:80")]));
    assert!(destination.pick(&[], &mut rng()).is_ok());
}

#[test]
fn error_names_unknown_port_and_withheld_destination() {
    let unknown = |ports, max_ports| Target {
        kind: TargetKind::UnknownPort { ports, max_ports },
        namespace: "shop".to_owned(),
        name: "cart".to_owned(),
        ..Target::default()
    };
    for (target, code, message) in [
        (
            unknown(vec![8080], 0),
            "unknown-port",
            "service shop/cart has no port 80; it has 8080",
        ),
        (
            unknown(vec![], 1000),
            "unknown-port",
            "the mesh does not support port 80 of service shop/cart, only its first 1000 TCP \
             ports; split the service",
        ),
        (
            TargetKind::Withheld.into(),
            "withheld",
            "the endpoints of 10.96.0.7:80 are unknown, and it may be meshed: \
             plaintext is not allowed; check that the controller is available",
        ),
    ] {
        let (_sender, destination) = watched_destination(Arc::new(target));
        let picked = destination.pick(&[], &mut rng());
        let failure = picked.err().expect("there is no endpoint");
        assert_eq!(
            (failure.code().label(), &*failure.to_string()),
            (code, message)
        );
    }
}

#[test]
fn picks_quarantined_endpoints_only_if_all_are_quarantined() {
    let (_sender, destination) = watched_destination(service(&[
        info("10.0.0.1:80"),
        info("10.0.0.2:80"),
        info("10.0.0.3:80"),
    ]));
    find(&destination, "10.0.0.2:80")
        .begin(Instant::now())
        .refused();
    let remaining = picks(&destination, &[], 100);
    assert!(
        remaining.len() == 2 && !remaining.contains_key("10.0.0.2:80"),
        "{remaining:?}"
    );
    for other in ["10.0.0.1:80", "10.0.0.3:80"] {
        find(&destination, other).begin(Instant::now()).refused();
    }
    assert_eq!(picks(&destination, &[], 100).len(), 3);
}

#[test]
fn announcement_ends_quarantine_of_its_endpoint() {
    let (one, other) = (info("10.0.0.1:80"), info("10.0.0.2:80"));
    let (sender, destination) = watched_destination(service(&[one.clone(), other.clone()]));
    let now = Instant::now();
    for text in ["10.0.0.1:80", "10.0.0.2:80"] {
        find(&destination, text).begin(Instant::now()).refused();
    }
    sender.send_replace(service(&[one, info("10.0.0.2:80"), info("10.0.0.3:80")]));
    destination.apply_updates();
    assert!(find(&destination, "10.0.0.1:80").is_quarantined(now));
    assert!(!find(&destination, "10.0.0.2:80").is_quarantined(now));
}

#[test]
fn update_keeps_state_of_remaining_endpoints_and_closes_removed_ones() {
    let (sender, destination) = watched_destination(service(&[
        info("10.0.0.1:80"),
        info("10.0.0.2:80"),
        info("10.0.0.4:80"),
    ]));
    let (remaining, removed) = (
        find(&destination, "10.0.0.2:80"),
        find(&destination, "10.0.0.1:80"),
    );
    let (_held, request) = (
        remaining.begin(Instant::now()),
        removed.begin(Instant::now()),
    );
    sender.send_replace(service(&[info("10.0.0.2:80"), info("10.0.0.3:80")]));
    let picks = picks(&destination, &[], 200);
    assert!(
        picks
            .keys()
            .all(|text| text != "10.0.0.1:80" && text != "10.0.0.4:80"),
        "{picks:?}"
    );
    assert!(Rc::ptr_eq(&remaining, &find(&destination, "10.0.0.2:80")));
    assert!(removed.pool().is_closed() && !remaining.pool().is_closed());
    // The in-flight request of the removed endpoint continues.
    assert_eq!(removed.in_flight(), 1);
    drop(request);
    assert_eq!(removed.in_flight(), 0);
}

#[test]
fn replaces_endpoint_if_another_pod_has_its_address() {
    let with = |pod: &str, identity: Option<&str>| {
        let identity = identity.map(|identity| identity.parse().expect("an identity"));
        Arc::new(EndpointInfo {
            pod: pod.to_owned(),
            identity,
            ..EndpointInfo::bare(address("10.0.0.1:80"))
        })
    };
    let (sender, destination) = watched_destination(service(&[with("shop/cart-1", None)]));
    let first = find(&destination, "10.0.0.1:80");
    for changed in [
        with("shop/cart-2", None),
        with(
            "shop/cart-2",
            Some("spiffe://cluster.local/ns/shop/sa/cart"),
        ),
    ] {
        let before = find(&destination, "10.0.0.1:80");
        sender.send_replace(service(&[changed]));
        let after = destination
            .pick(&[], &mut rng())
            .expect("there is an endpoint");
        assert!(
            !Rc::ptr_eq(&before, &after) && before.pool().is_closed() && !after.pool().is_closed()
        );
    }
    assert!(
        first.pool().remote.identity.is_none()
            && find(&destination, "10.0.0.1:80")
                .pool()
                .remote
                .identity
                .is_some()
    );
}

#[test]
fn unknown_destinations_and_pods_use_the_original_address() {
    let (sender, destination) = watched_destination(Arc::new(Target::default()));
    assert_eq!(
        picks(&destination, &[], 1),
        HashMap::from([("10.96.0.7:80".to_owned(), 1)])
    );
    assert_eq!(
        (&*destination.name(), destination.app_protocol()),
        ("10.96.0.7:80", None)
    );
    let (namespace, name) = ("shop".to_owned(), "cart-1".to_owned());
    let pod = Target {
        kind: TargetKind::Pod,
        namespace,
        name,
        app_protocol: Some(Protocol::Opaque),
        endpoints: vec![info("10.96.0.7:80")],
        ..Target::default()
    };
    sender.send_replace(Arc::new(pod));
    assert_eq!(
        picks(&destination, &[], 1),
        HashMap::from([("10.96.0.7:80".to_owned(), 1)])
    );
    assert_eq!(
        (destination.app_protocol(), &*destination.name()),
        (Some(Protocol::Opaque), "shop/cart-1")
    );
    // The last update stays in effect after the sender is dropped.
    drop(sender);
    assert_eq!(picks(&destination, &[], 1).len(), 1);
}

#[test]
fn destination_is_opaque_if_all_endpoints_are() {
    let opaque = |text: &str| {
        Arc::new(EndpointInfo {
            opaque: true,
            ..EndpointInfo::bare(address(text))
        })
    };
    let (sender, destination) =
        watched_destination(service(&[opaque("10.0.0.1:80"), opaque("10.0.0.2:80")]));
    assert_eq!(
        destination.app_protocol(),
        Some(Protocol::Opaque),
        "the declaration of the Service is overridden"
    );
    for others in [vec![opaque("10.0.0.1:80"), info("10.0.0.2:80")], Vec::new()] {
        sender.send_replace(service(&others));
        assert_eq!(
            destination.app_protocol(),
            Some(Protocol::Http2),
            "{others:?}"
        );
    }
}

#[test]
fn limits_of_a_policy_change_the_connections_and_not_the_endpoint() {
    let with = |requests| {
        let mut target = (*service(&[info("10.0.0.1:80")])).clone();
        target.policy = Arc::new(BackendPolicy {
            limits: Limits {
                requests,
                ..Limits::default()
            },
            ..BackendPolicy::default()
        });
        Arc::new(target)
    };
    let (sender, destination) = watched_destination(with(u32::MAX));
    let endpoint = find(&destination, "10.0.0.1:80");
    let (before, request) = (endpoint.pool(), endpoint.begin(Instant::now()));
    sender.send_replace(with(u32::MAX));
    assert!(Rc::ptr_eq(
        &find(&destination, "10.0.0.1:80").pool(),
        &before
    ));
    sender.send_replace(with(10));
    destination.apply_updates();
    let same = find(&destination, "10.0.0.1:80");
    assert!(Rc::ptr_eq(&same, &endpoint) && same.in_flight() == 1);
    assert!(before.is_closed() && !same.pool().is_closed());
    drop(request);
}

#[test]
fn services_with_other_limits_do_not_share_connections() {
    let pools = Pools::default();
    let remote = || Remote::from(&*info("10.0.0.1:80"));
    let own = Limits {
        connections: 1,
        ..Limits::default()
    };
    let [one, other, limited] =
        [Limits::default(), Limits::default(), own].map(|limits| pools.open(remote(), limits));
    assert!(Rc::ptr_eq(&one, &other) && !Rc::ptr_eq(&one, &limited));
}

#[test]
fn slow_endpoint_is_quarantined_by_a_policy() {
    let all = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"].map(info);
    let mut target = (*service(&all)).clone();
    target.policy = Arc::new(BackendPolicy {
        outliers: OutlierSettings {
            latency_percent: 300,
            interval: Duration::from_millis(2),
            ..OutlierSettings::default()
        },
        ..BackendPolicy::default()
    });
    let (_sender, destination) = watched_destination(Arc::new(target));
    let slow = find(&destination, "10.0.0.2:80");
    let start = Instant::now();
    while !slow.is_quarantined(Instant::now()) {
        assert!(start.elapsed() < TEST_TIMEOUT, "it is not slow");
        for _ in 0..30 {
            for (host, milliseconds) in [("10.0.0.1:80", 1), ("10.0.0.3:80", 2), ("10.0.0.2:80", 9)]
            {
                let latency = Duration::from_millis(milliseconds);
                find(&destination, host)
                    .begin(Instant::now())
                    .answered_after(latency);
            }
        }
        assert_eq!(picks(&destination, &[], 1).len(), 1);
    }
    assert!(!find(&destination, "10.0.0.3:80").is_quarantined(Instant::now()));
}

#[tokio::test]
async fn concurrent_requests_share_one_watch() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery, Pools::default());
    let ask = || destinations.get_or_watch(address("10.96.0.7:80"));
    let answer = async {
        let (asked, reply) = questions.next().await;
        assert_eq!(asked, address("10.96.0.7:80").into());
        reply(service(&[info("10.0.0.1:80")]))
    };
    let (one, other, sender) = tokio::join!(ask(), ask(), answer);
    let third = ask().await;
    assert!(Rc::ptr_eq(&one, &other) && Rc::ptr_eq(&one, &third) && destinations.len() == 1);
    sender.send_replace(service(&[info("10.0.0.2:80")]));
    assert_eq!(
        picks(&third, &[], 1),
        HashMap::from([("10.0.0.2:80".to_owned(), 1)])
    );
}

#[tokio::test]
async fn destinations_share_pools_until_last_one_removes_the_endpoint() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery, Pools::default());
    let answer = async {
        let endpoints = [info("10.0.0.1:80"), info("10.0.0.2:80")];
        let one = questions.next().await.1(service(&endpoints));
        (one, questions.next().await.1(service(&endpoints)))
    };
    let (one, other, (sender, other_sender)) = tokio::join!(
        destinations.get_or_watch(address("10.96.0.7:80")),
        destinations.get_or_watch(address("10.96.0.8:80")),
        answer
    );
    let (shared, same) = (find(&one, "10.0.0.1:80"), find(&other, "10.0.0.1:80"));
    assert!(Rc::ptr_eq(&shared.pool(), &same.pool()) && !Rc::ptr_eq(&shared, &same));
    assert!(!Rc::ptr_eq(
        &shared.pool(),
        &find(&one, "10.0.0.2:80").pool()
    ));
    sender.send_replace(service(&[info("10.0.0.2:80")]));
    one.apply_updates();
    assert!(!shared.pool().is_closed(), "the other destination uses it");
    other_sender.send_replace(service(&[]));
    destinations.evict_idle(Instant::now());
    assert!(shared.pool().is_closed());
}

#[tokio::test]
async fn failures_of_one_service_quarantine_no_endpoint_of_another() {
    let endpoints = [info("10.0.0.1:80"), info("10.0.0.2:80")];
    let (one, other) = (
        watched_destination(service(&endpoints)).1,
        watched_destination(service(&endpoints)).1,
    );
    for _ in 0..5 {
        find(&one, "10.0.0.1:80").begin(Instant::now()).failed();
    }
    let is_quarantined =
        |destination| find(destination, "10.0.0.1:80").is_quarantined(Instant::now());
    assert!(is_quarantined(&one) && !is_quarantined(&other));
}

#[tokio::test]
async fn next_request_resolves_after_cancelled_one() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery, Pools::default());
    let mut first = Box::pin(destinations.get_or_watch(address("10.96.0.7:80")));
    let (_, _unanswered) = tokio::select! {
        _ = &mut first => panic!("resolved without a response"),
        question = questions.next() => question,
    };
    drop(first);
    let answer = async { questions.next().await.1(service(&[info("10.0.0.1:80")])) };
    let (destination, _sender) =
        tokio::join!(destinations.get_or_watch(address("10.96.0.7:80")), answer);
    assert_eq!(destination.endpoints_len(), 1);
}

#[tokio::test]
async fn evicts_destination_after_a_minute_without_connections() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery, Pools::default());
    let answer = async { questions.next().await.1(Arc::new(Target::default())) };
    let (held, sender) = tokio::join!(destinations.get_or_watch(address("10.96.0.7:80")), answer);
    let mut now = Instant::now();
    for _ in 0..30 {
        destinations.evict_idle(now);
        now += 5 * SECOND;
    }
    assert_eq!(destinations.len(), 1, "a connection uses it");
    drop(held);
    destinations.evict_idle(now);
    destinations.evict_idle(now + 50 * SECOND);
    drop(destinations.get_or_watch(address("10.96.0.7:80")).await);
    destinations.evict_idle(now + 61 * SECOND);
    assert_eq!(destinations.len(), 1, "a connection has used it");
    assert_eq!(sender.receiver_count(), 1);
    destinations.evict_idle(now + 121 * SECOND);
    assert!(destinations.is_empty());
    assert_eq!(sender.receiver_count(), 0, "the subscription ends");
}

#[tokio::test]
async fn applies_updates_to_destination_without_requests() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery, Pools::default());
    let answer = async { questions.next().await.1(service(&[info("10.0.0.1:80")])) };
    let (destination, sender) =
        tokio::join!(destinations.get_or_watch(address("10.96.0.7:80")), answer);
    let removed = find(&destination, "10.0.0.1:80");
    sender.send_replace(service(&[]));
    destinations.evict_idle(Instant::now());
    assert!(removed.pool().is_closed());
}

#[tokio::test]
async fn resubscribes_after_discovery_drops_the_watch() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery, Pools::default());
    let answer = async { questions.next().await.1(Arc::new(Target::default())) };
    let (held, sender) = tokio::join!(destinations.get_or_watch(address("10.96.0.7:80")), answer);
    drop(sender);
    destinations.evict_idle(Instant::now());
    assert!(destinations.is_empty());
    assert!(
        held.pick(&[], &mut rng()).is_ok(),
        "the connection continues to use it"
    );
    let answer = async { questions.next().await.1(service(&[info("10.0.0.1:80")])) };
    let (new, _sender) = tokio::join!(destinations.get_or_watch(address("10.96.0.7:80")), answer);
    assert_eq!(&*new.name(), "shop/cart");
}

#[tokio::test]
async fn serves_destinations_over_limit_without_keeping_them() {
    let mut destinations = Destinations::new(Discovery::off(), Pools::default());
    destinations.limit = 1;
    let kept = destinations.get_or_watch(address("10.0.0.1:80")).await;
    let over = destinations.get_or_watch(address("10.0.0.2:80")).await;
    let over_too = destinations.fixed(address("10.0.0.2:80"));
    assert!(
        over.pick(&[], &mut rng()).is_ok()
            && !Rc::ptr_eq(&over, &over_too)
            && destinations.len() == 1
    );
    assert!(Rc::ptr_eq(
        &kept,
        &destinations.fixed(address("10.0.0.1:80"))
    ));
}

#[tokio::test]
async fn evicts_unused_destinations_at_limit() {
    let mut destinations = Destinations::new(Discovery::off(), Pools::default());
    destinations.limit = 2;
    let held = destinations.get_or_watch(address("10.0.0.1:80")).await;
    drop(destinations.get_or_watch(address("10.0.0.2:80")).await);
    let kept = destinations.get_or_watch(address("10.0.0.3:80")).await;
    for (destination, text) in [(held, "10.0.0.1:80"), (kept, "10.0.0.3:80")] {
        assert!(
            Rc::ptr_eq(
                &destination,
                &destinations.get_or_watch(address(text)).await
            ),
            "{text}"
        );
    }
    assert_eq!(destinations.len(), 2);
}

/// Refuses the next subscription, as discovery does when its table is full.
async fn refuse(questions: &mut Questions, text: &str) {
    let (asked, reply) = soon(questions.next()).await;
    assert_eq!(asked, address(text).into());
    drop(reply);
}

#[tokio::test]
async fn refuses_destination_while_table_of_discovery_is_full() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery, Pools::default());
    let ask = || soon(destinations.get_or_watch(address("10.96.0.7:80")));
    let (refused, ()) = tokio::join!(ask(), refuse(&mut questions, "10.96.0.7:80"));
    let failure = refused
        .pick(&[], &mut rng())
        .err()
        .expect("a destination that may be meshed is not reached in plaintext");
    assert!(matches!(failure, Failure::Overloaded(_)), "{failure}");
    let answer = soon(async { questions.next().await.1(service(&[info("10.0.0.1:80")])) });
    let (destination, _sender) = tokio::join!(ask(), answer);
    assert!(destination.pick(&[], &mut rng()).is_ok());
}

#[tokio::test]
async fn releases_unused_destinations_and_retries_when_table_of_discovery_is_full() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery, Pools::default());
    let ask = |text| soon(destinations.get_or_watch(address(text)));
    let answer = async |questions: &mut Questions| {
        soon(questions.next()).await.1(service(&[info("10.0.0.1:80")]))
    };
    let (held, held_sender) = tokio::join!(ask("10.96.0.7:80"), answer(&mut questions));
    let (unused, unused_sender) = tokio::join!(ask("10.96.0.8:80"), answer(&mut questions));
    drop(unused);
    let (asked, (released, _sender)) = tokio::join!(ask("10.96.0.9:80"), async {
        refuse(&mut questions, "10.96.0.9:80").await;
        let sender = answer(&mut questions).await;
        (unused_sender.receiver_count() == 0, sender)
    });
    assert!(released && asked.pick(&[], &mut rng()).is_ok());
    assert!(held_sender.receiver_count() == 1 && Rc::ptr_eq(&held, &ask("10.96.0.7:80").await));
}

/// Each connection to a Service of a namespace that has used up its share released the unused
/// destinations of all others.
#[tokio::test]
async fn destination_refused_for_its_namespace_releases_no_other() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery, Pools::default());
    let ask = |text| soon(destinations.get_or_watch(address(text)));
    let answer = async |questions: &mut Questions, target| soon(questions.next()).await.1(target);
    let target = service(&[info("10.0.0.1:80")]);
    let (unused, unused_sender) = tokio::join!(ask("10.96.0.8:80"), answer(&mut questions, target));
    drop(unused);
    for _ in 0..3 {
        let refused = Arc::new(TargetKind::Refused.into());
        let (asked, _sender) = tokio::join!(ask("10.96.0.9:80"), answer(&mut questions, refused));
        assert!(asked.pick(&[], &mut rng()).is_err());
    }
    assert_eq!(unused_sender.receiver_count(), 1);
    assert!(ask("10.96.0.8:80").await.pick(&[], &mut rng()).is_ok());
}

#[tokio::test]
async fn fixed_destination_is_its_own_endpoint_and_shared() {
    let destinations = Destinations::new(Discovery::off(), Pools::default());
    let (one, other) = (
        destinations.fixed(address("10.0.0.1:80")),
        destinations.get_or_watch(address("10.0.0.1:80")).await,
    );
    destinations.evict_idle(Instant::now());
    assert!(Rc::ptr_eq(&one, &other) && destinations.len() == 1);
    assert_eq!(
        one.pick(&[], &mut rng())
            .expect("there is an endpoint")
            .address,
        address("10.0.0.1:80")
    );
}

#[tokio::test]
async fn shares_backends_of_routes_by_name_until_they_are_idle() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery, Pools::default());
    let name: Arc<str> = "shop/cart:80".into();
    let asked = async {
        let (resource, answer) = questions.next().await;
        assert_eq!(resource, Resource::Backend("shop/cart:80".into()));
        answer(service(&[info("10.0.0.1:80")]))
    };
    let (one, two, _sender) = tokio::join!(
        destinations.backend(&name),
        destinations.backend(&name),
        asked
    );
    assert!(Rc::ptr_eq(&one, &two) && one.pick(&[], &mut rng()).is_ok());
    let now = Instant::now();
    let after = |seconds: u32| now + seconds * SECOND;
    destinations.evict_idle(after(0));
    destinations.evict_idle(after(100));
    assert_eq!(destinations.entries.borrow().len(), 1, "in use");
    drop((one, two));
    destinations.evict_idle(after(110));
    destinations.evict_idle(after(170));
    assert_eq!(destinations.entries.borrow().len(), 0);
}

#[tokio::test]
async fn ports_of_a_scan_leave_few_destinations_behind() {
    let destinations = Destinations::new(Discovery::off(), Pools::default());
    let port = |port: u16| destinations.fixed(([10, 0, 0, 1], port).into());
    let held = port(1);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = tokio::net::TcpStream::connect(listener.local_addr().unwrap());
    let connected = port(2);
    let endpoint = connected.pick(&[], &mut rng()).unwrap();
    let io = crate::secure::io::Io::new(upstream.await.unwrap());
    endpoint.pool().checkin_http1(io, Instant::now());
    let known = Rc::downgrade(&connected);
    drop((connected, endpoint));
    for number in 3..10_000 {
        port(number);
        assert!(destinations.len() < 600, "after {number} ports");
    }
    assert!(Rc::ptr_eq(&held, &port(1)));
    assert!(
        known
            .upgrade()
            .is_some_and(|known| Rc::ptr_eq(&known, &port(2)))
    );
}
