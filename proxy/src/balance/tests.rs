//! Destinations as discovery changes them: who is picked, who keeps what it had, who is forgotten.

use super::*;
use crate::control::testing::soon;
use crate::discovery::{PodTarget, Questions, ServiceTarget};

const SECOND: Duration = Duration::from_secs(1);

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

fn info(text: &str) -> Arc<EndpointInfo> {
    Arc::new(EndpointInfo::bare(address(text)))
}

fn service(endpoints: &[Arc<EndpointInfo>]) -> Arc<Target> {
    let (namespace, name) = ("shop".to_owned(), "cart".to_owned());
    Arc::new(Target::Service(ServiceTarget {
        namespace,
        name,
        app_protocol: AppProtocol::Http2,
        endpoints: endpoints.to_vec(),
    }))
}

/// A destination that the test announces things to.
fn announced(target: Arc<Target>) -> (watch::Sender<Arc<Target>>, Destination) {
    let (sender, receiver) = watch::channel(target);
    (
        sender,
        Destination::watched(address("10.96.0.7:80"), receiver),
    )
}

fn rng() -> fastrand::Rng {
    fastrand::Rng::with_seed(7)
}

/// How often each is picked.
fn picks(destination: &Destination, tried: &[SocketAddr], times: usize) -> HashMap<String, usize> {
    let (mut rng, mut picks) = (rng(), HashMap::new());
    for _ in 0..times {
        let endpoint = destination
            .pick(tried, &mut rng)
            .expect("somebody is there");
        *picks.entry(endpoint.address.to_string()).or_default() += 1;
    }
    picks
}

fn find(destination: &Destination, text: &str) -> Rc<Endpoint> {
    let state = destination.state.borrow();
    state
        .members
        .iter()
        .find(|member| member.info.address == address(text))
        .expect("it is a member")
        .endpoint
        .clone()
}

#[test]
fn equals_share_the_requests() {
    let (_sender, destination) = announced(service(&[
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
        (3, AppProtocol::Http2, "shop/cart")
    );
}

#[test]
fn the_loaded_one_of_two_is_avoided_until_its_requests_end() {
    let (_sender, destination) = announced(service(&[info("10.0.0.1:80"), info("10.0.0.2:80")]));
    let loaded = find(&destination, "10.0.0.1:80");
    let requests: Vec<_> = (0..3).map(|_| loaded.begin()).collect();
    assert_eq!(
        picks(&destination, &[], 100),
        HashMap::from([("10.0.0.2:80".to_owned(), 100)])
    );
    assert_eq!(loaded.pending(), 3);
    // A burst evens out: who is picked stays busy.
    let mut burst = Vec::new();
    for _ in 0..97 {
        burst.push(
            destination
                .pick(&[], &mut rng())
                .expect("two are there")
                .begin(),
        );
    }
    assert_eq!(
        (
            loaded.pending(),
            find(&destination, "10.0.0.2:80").pending()
        ),
        (50, 50)
    );
    drop((burst, requests));
    assert_eq!(loaded.pending(), 0);
}

#[test]
fn a_tried_one_is_not_picked_again_and_with_all_tried_there_is_none() {
    let (_sender, destination) = announced(service(&[info("10.0.0.1:80"), info("10.0.0.2:80")]));
    let tried = [address("10.0.0.1:80"), address("10.0.0.2:80")];
    assert_eq!(
        picks(&destination, &tried[..1], 50),
        HashMap::from([("10.0.0.2:80".to_owned(), 50)])
    );
    let failure = destination
        .pick(&tried, &mut rng())
        .err()
        .expect("none is left");
    assert!(
        matches!(&failure, Failure::NoEndpoint(name) if name == "shop/cart"),
        "{failure}"
    );
    assert!(
        Destination::fixed(tried[0])
            .pick(&tried, &mut rng())
            .is_err()
    );
}

#[test]
fn a_service_without_endpoints_says_so_by_name() {
    let (sender, destination) = announced(service(&[]));
    let failure = destination
        .pick(&[], &mut rng())
        .err()
        .expect("none is there");
    assert_eq!(
        failure.to_string(),
        "service shop/cart has no ready endpoint"
    );
    sender.send_replace(service(&[info("10.0.0.1:80")]));
    assert!(destination.pick(&[], &mut rng()).is_ok());
}

#[test]
fn one_that_refused_is_passed_over_unless_all_have() {
    let (_sender, destination) = announced(service(&[
        info("10.0.0.1:80"),
        info("10.0.0.2:80"),
        info("10.0.0.3:80"),
    ]));
    let now = Instant::now();
    find(&destination, "10.0.0.2:80").quarantine(now + 3600 * SECOND);
    let remaining = picks(&destination, &[], 100);
    assert!(
        remaining.len() == 2 && !remaining.contains_key("10.0.0.2:80"),
        "{remaining:?}"
    );
    for other in ["10.0.0.1:80", "10.0.0.3:80"] {
        find(&destination, other).quarantine(now + 3600 * SECOND);
    }
    assert_eq!(picks(&destination, &[], 100).len(), 3);
}

#[test]
fn an_announcement_lifts_the_quarantine_of_the_one_it_is_about() {
    let (one, other) = (info("10.0.0.1:80"), info("10.0.0.2:80"));
    let (sender, destination) = announced(service(&[one.clone(), other.clone()]));
    let later = Instant::now() + 3600 * SECOND;
    for text in ["10.0.0.1:80", "10.0.0.2:80"] {
        find(&destination, text).quarantine(later);
    }
    sender.send_replace(service(&[one, info("10.0.0.2:80"), info("10.0.0.3:80")]));
    destination.take_news();
    assert!(find(&destination, "10.0.0.1:80").is_quarantined(later));
    assert!(!find(&destination, "10.0.0.2:80").is_quarantined(later));
}

#[test]
fn who_stays_keeps_its_state_and_who_goes_takes_no_request_more() {
    let (sender, destination) = announced(service(&[
        info("10.0.0.1:80"),
        info("10.0.0.2:80"),
        info("10.0.0.4:80"),
    ]));
    let (stays, goes) = (
        find(&destination, "10.0.0.2:80"),
        find(&destination, "10.0.0.1:80"),
    );
    let (_held, under_way) = (stays.begin(), goes.begin());
    sender.send_replace(service(&[info("10.0.0.2:80"), info("10.0.0.3:80")]));
    let picks = picks(&destination, &[], 200);
    assert!(
        picks
            .keys()
            .all(|text| text != "10.0.0.1:80" && text != "10.0.0.4:80"),
        "{picks:?}"
    );
    assert!(Rc::ptr_eq(&stays, &find(&destination, "10.0.0.2:80")));
    assert!(goes.pool.is_closed() && !stays.pool.is_closed());
    // The request that was under way ends in peace.
    assert_eq!(goes.pending(), 1);
    drop(under_way);
    assert_eq!(goes.pending(), 0);
}

#[test]
fn another_pod_at_the_same_address_is_another_endpoint() {
    let with = |pod: &str, identity: Option<&str>| {
        let identity = identity.map(|identity| identity.parse().expect("an identity"));
        Arc::new(EndpointInfo {
            pod: pod.to_owned(),
            identity,
            ..EndpointInfo::bare(address("10.0.0.1:80"))
        })
    };
    let (sender, destination) = announced(service(&[with("shop/cart-1", None)]));
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
        let after = destination.pick(&[], &mut rng()).expect("it is there");
        assert!(!Rc::ptr_eq(&before, &after) && before.pool.is_closed() && !after.pool.is_closed());
    }
    assert!(
        first.pool.remote.identity.is_none()
            && find(&destination, "10.0.0.1:80")
                .pool
                .remote
                .identity
                .is_some()
    );
}

#[test]
fn unknown_goes_where_it_was_going_and_so_does_a_pod() {
    let (sender, destination) = announced(Arc::new(Target::Unknown));
    assert_eq!(
        picks(&destination, &[], 1),
        HashMap::from([("10.96.0.7:80".to_owned(), 1)])
    );
    assert_eq!(
        (&*destination.name(), destination.app_protocol()),
        ("10.96.0.7:80", AppProtocol::Detect)
    );
    let (namespace, name) = ("shop".to_owned(), "cart-1".to_owned());
    let pod = PodTarget {
        namespace,
        name,
        app_protocol: AppProtocol::Opaque,
        endpoint: info("10.96.0.7:80"),
    };
    sender.send_replace(Arc::new(Target::Pod(pod)));
    assert_eq!(
        picks(&destination, &[], 1),
        HashMap::from([("10.96.0.7:80".to_owned(), 1)])
    );
    assert_eq!(
        (destination.app_protocol(), &*destination.name()),
        (AppProtocol::Opaque, "shop/cart-1")
    );
    // The last word counts when nobody says any more.
    drop(sender);
    assert_eq!(picks(&destination, &[], 1).len(), 1);
}

#[test]
fn a_destination_is_opaque_when_all_of_its_endpoints_are() {
    let opaque = |text: &str| {
        Arc::new(EndpointInfo {
            opaque: true,
            ..EndpointInfo::bare(address(text))
        })
    };
    let (sender, destination) = announced(service(&[opaque("10.0.0.1:80"), opaque("10.0.0.2:80")]));
    assert_eq!(
        destination.app_protocol(),
        AppProtocol::Opaque,
        "whatever the Service declares"
    );
    for others in [vec![opaque("10.0.0.1:80"), info("10.0.0.2:80")], Vec::new()] {
        sender.send_replace(service(&others));
        assert_eq!(destination.app_protocol(), AppProtocol::Http2, "{others:?}");
    }
}

#[tokio::test]
async fn those_who_ask_at_once_share_one_watch_and_one_answer() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery);
    let ask = || destinations.get_or_watch(address("10.96.0.7:80"));
    let answer = async {
        let (asked, reply) = questions.next().await;
        assert_eq!(asked, address("10.96.0.7:80"));
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
async fn one_who_gives_up_waiting_leaves_the_question_to_the_next() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery);
    let mut first = Box::pin(destinations.get_or_watch(address("10.96.0.7:80")));
    let (_, _unanswered) = tokio::select! {
        _ = &mut first => panic!("nobody has answered"),
        question = questions.next() => question,
    };
    drop(first);
    let answer = async { questions.next().await.1(service(&[info("10.0.0.1:80")])) };
    let (destination, _sender) =
        tokio::join!(destinations.get_or_watch(address("10.96.0.7:80")), answer);
    assert_eq!(destination.endpoints_len(), 1);
}

#[tokio::test]
async fn a_destination_is_forgotten_once_nobody_has_used_it_for_a_minute() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery);
    let answer = async { questions.next().await.1(Arc::new(Target::Unknown)) };
    let (held, sender) = tokio::join!(destinations.get_or_watch(address("10.96.0.7:80")), answer);
    let mut now = Instant::now();
    for _ in 0..30 {
        destinations.evict_idle(now);
        now += 5 * SECOND;
    }
    assert_eq!(destinations.len(), 1, "a connection holds it");
    drop(held);
    destinations.evict_idle(now);
    destinations.evict_idle(now + 50 * SECOND);
    drop(destinations.get_or_watch(address("10.96.0.7:80")).await);
    destinations.evict_idle(now + 61 * SECOND);
    assert_eq!(destinations.len(), 1, "a connection came by");
    assert_eq!(sender.receiver_count(), 1);
    destinations.evict_idle(now + 121 * SECOND);
    assert!(destinations.is_empty());
    assert_eq!(
        sender.receiver_count(),
        0,
        "discovery learns that nobody watches"
    );
}

#[tokio::test]
async fn news_reach_a_destination_that_nobody_asks_for_an_endpoint() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery);
    let answer = async { questions.next().await.1(service(&[info("10.0.0.1:80")])) };
    let (destination, sender) =
        tokio::join!(destinations.get_or_watch(address("10.96.0.7:80")), answer);
    let gone = find(&destination, "10.0.0.1:80");
    sender.send_replace(service(&[]));
    destinations.evict_idle(Instant::now());
    assert!(gone.pool.is_closed());
}

#[tokio::test]
async fn what_discovery_let_go_of_is_asked_for_anew() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery);
    let answer = async { questions.next().await.1(Arc::new(Target::Unknown)) };
    let (held, sender) = tokio::join!(destinations.get_or_watch(address("10.96.0.7:80")), answer);
    drop(sender);
    destinations.evict_idle(Instant::now());
    assert!(destinations.is_empty());
    assert!(
        held.pick(&[], &mut rng()).is_ok(),
        "who has it goes on with it"
    );
    let answer = async { questions.next().await.1(service(&[info("10.0.0.1:80")])) };
    let (anew, _sender) = tokio::join!(destinations.get_or_watch(address("10.96.0.7:80")), answer);
    assert_eq!(&*anew.name(), "shop/cart");
}

#[tokio::test]
async fn over_the_limit_a_destination_is_served_and_not_kept() {
    let destinations = Destinations {
        limit: 1,
        ..Destinations::new(Discovery::off())
    };
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
async fn at_the_limit_what_no_connection_uses_makes_room() {
    let destinations = Destinations {
        limit: 2,
        ..Destinations::new(Discovery::off())
    };
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

/// The main thread refuses: its table is full.
async fn refuse(questions: &mut Questions, text: &str) {
    let (asked, reply) = soon(questions.next()).await;
    assert_eq!(asked, address(text));
    drop(reply);
}

#[tokio::test]
async fn a_destination_that_discovery_has_no_room_for_is_refused_until_it_has() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery);
    let ask = || soon(destinations.get_or_watch(address("10.96.0.7:80")));
    let (refused, ()) = tokio::join!(ask(), refuse(&mut questions, "10.96.0.7:80"));
    let failure = refused
        .pick(&[], &mut rng())
        .err()
        .expect("not in the clear, where it may be meshed");
    assert!(matches!(failure, Failure::Overloaded(_)), "{failure}");
    let answer = soon(async { questions.next().await.1(service(&[info("10.0.0.1:80")])) });
    let (destination, _sender) = tokio::join!(ask(), answer);
    assert!(destination.pick(&[], &mut rng()).is_ok());
}

#[tokio::test]
async fn when_discovery_has_no_room_a_worker_releases_what_no_connection_uses_and_asks_again() {
    let (discovery, mut questions) = Discovery::by_hand();
    let destinations = Destinations::new(discovery);
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

#[tokio::test]
async fn the_local_app_is_where_it_is_and_stays_one_destination() {
    let destinations = Destinations::new(Discovery::off());
    let (one, other) = (
        destinations.fixed(address("10.0.0.1:80")),
        destinations.get_or_watch(address("10.0.0.1:80")).await,
    );
    destinations.evict_idle(Instant::now());
    assert!(Rc::ptr_eq(&one, &other) && destinations.len() == 1);
    assert_eq!(
        one.pick(&[], &mut rng()).expect("it is there").address,
        address("10.0.0.1:80")
    );
}
