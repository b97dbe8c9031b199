//! Endpoints that discovery adds and removes while there are requests.

use crate::endpoint::EndpointInfo;
use crate::route::Preference;
use std::time::{Duration, Instant};

use super::super::State;
use super::super::policy::{BackendPolicy, Balancing};
use super::super::select::{Avoided, Context, Turns};
use super::super::zone::ZonePreference;
use super::*;
use crate::upstream::connect::Pools;
use diy_mesh_testkit::wait::until;

/// A Service with these endpoints.
fn shop(endpoints: &[EndpointInfo]) -> Target {
    let mut endpoints: Vec<_> = endpoints.iter().cloned().map(Arc::new).collect();
    endpoints.sort_by_key(|info| info.address);
    Target {
        kind: TargetKind::Service,
        endpoints,
        ..Target::default()
    }
}

/// The shares of 10,000 requests that the endpoints get at a time.
fn shares(state: &State, now: Instant) -> Vec<f64> {
    let mut rng = fastrand::Rng::with_seed(7);
    let (turns, zones) = (Turns::default(), ZonePreference::default());
    let context = Context {
        preference: Preference::default(),
        avoided: &Avoided::default(),
        turns: &turns,
        zones: &zones,
        now,
    };
    let mut counts = vec![0; state.members.len()];
    for _ in 0..10_000 {
        let picked = state.balance(&context, &mut rng).expect("it has endpoints");
        let is_picked = |member: &super::super::Member| Rc::ptr_eq(&member.endpoint, picked);
        counts[state.members.iter().position(is_picked).expect("a member")] += 1;
    }
    counts
        .into_iter()
        .map(|count| f64::from(count) / 10_000.0)
        .collect()
}

#[test]
fn new_endpoint_starts_with_a_small_share_unless_many_are_new() {
    let hosts = |hosts: std::ops::Range<u8>| -> Vec<EndpointInfo> {
        let endpoint = |host| EndpointInfo::bare(([10, 0, 0, host], 80).into());
        hosts.map(endpoint).collect()
    };
    let (pools, siblings) = (Pools::default(), Rc::default());
    let address = SocketAddr::from(([10, 96, 0, 7], 80)).into();
    let state = |before, target: &Target| {
        State::new(
            Arc::new(target.clone()),
            &address,
            before,
            &pools,
            &siblings,
        )
    };
    let is_even = |shares: &[f64]| {
        let even = 1.0 / shares.len() as f64;
        shares.iter().all(|share| (share - even).abs() < 0.02)
    };
    let first = state(Vec::new(), &shop(&hosts(1..4)));
    let now = Instant::now();
    assert!(
        is_even(&shares(&first, now)),
        "they are new to this proxy only"
    );

    let grown = state(first.members, &shop(&hosts(1..5)));
    let now = Instant::now();
    for (seconds, least, most) in [(0, 0.01, 0.06), (5, 0.09, 0.16), (10, 0.23, 0.27)] {
        let slow_start = Balancing::default().slow_start;
        let shares = shares(
            &grown,
            now + Duration::from_secs(seconds) + slow_start / 100,
        );
        assert!(
            (least..most).contains(&shares[3]),
            "{seconds} s: {shares:?}"
        );
        assert!(
            is_even(&[&shares[..3], &[shares[0]]].concat()) || seconds < 10,
            "{shares:?}"
        );
    }
    // Five of nine are new.
    let doubled = state(grown.members, &shop(&hosts(1..10)));
    assert!(
        is_even(&shares(&doubled, now)),
        "{:?}",
        shares(&doubled, now)
    );
}

#[test]
fn policy_sets_the_time_of_the_slow_start() {
    let (pools, siblings) = (Pools::default(), Rc::default());
    let address = SocketAddr::from(([10, 96, 0, 7], 80)).into();
    let state = |before, target: &Target| {
        State::new(
            Arc::new(target.clone()),
            &address,
            before,
            &pools,
            &siblings,
        )
    };
    let with = |count: u8, slow_start| {
        let endpoint = |host| EndpointInfo::bare(([10, 0, 0, host], 80).into());
        let mut service = shop(&(1..=count).map(endpoint).collect::<Vec<_>>());
        service.policy = Arc::new(BackendPolicy {
            balancing: Balancing {
                slow_start: Duration::from_secs(slow_start),
                ..Balancing::default()
            },
            ..BackendPolicy::default()
        });
        service
    };
    let grown = state(state(Vec::new(), &with(3, 0)).members, &with(4, 100));
    let later = Instant::now() + Duration::from_secs(50);
    let share = shares(&grown, later)[3];
    assert!((0.09..0.16).contains(&share), "{share} after the half");
    // A change of the policy counts for endpoints that started under another one.
    let none = state(grown.members, &with(4, 0));
    let share = shares(&none, Instant::now())[3];
    assert!((0.23..0.27).contains(&share), "{share} without slow start");
}

#[test]
fn stream_of_a_removed_endpoint_completes_and_its_connections_close() {
    on_worker(async {
        let (go, open) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(0)));
        let (answer, opened) = (go.clone(), open.clone());
        let removed = listening(async move |stream| {
            opened.set(opened.get() + 1);
            let mut connection = h2::server::handshake(stream).await.expect("a preface");
            while let Some(Ok((_, mut respond))) = connection.accept().await {
                let answer = answer.clone();
                tokio::task::spawn_local(async move {
                    until(|| answer.get()).await;
                    let body = respond.send_response(Response::new(()), false);
                    body.expect("an open stream").send_data("late".into(), true)
                });
            }
            opened.set(opened.get() - 1);
        })
        .await;
        let remaining = EndpointInfo::bare(http2_app(Response::default).await);
        let authority = Authority::new("root");
        let service = Service::with(&authority, vec![EndpointInfo::bare(removed)]).await;
        let stream = service.caller.connect(&service.destination).await;
        let (mut client, connection) = h2::client::handshake(stream).await.expect("a preface");
        tokio::task::spawn_local(async move { drop(connection.await) });
        let get = || Request::get("http://cart/").body(()).expect("valid");
        let (response, _) = client.send_request(get(), true).expect("it is ready");
        until(|| open.get() > 0).await;
        service.updates.send_replace(Arc::new(shop(&[remaining])));
        assert_eq!(
            http2_failures(&service).await,
            0,
            "the other one gets new requests"
        );
        go.set(true);
        let response = response.await.expect("a response");
        let data = response.into_body().data().await;
        assert_eq!(data.expect("a body").expect("complete"), "late");
        until(|| open.get() == 0).await;
    });
}

/// A meshed endpoint that accepts the TLS handshake when `go` is set, and never answers a request.
async fn slow_peer(
    authority: &Authority,
    accepted: Rc<Cell<bool>>,
    go: Rc<Cell<bool>>,
) -> EndpointInfo {
    let cart = credentials(authority, CART, |_| {});
    let side = Side::new(Some(cart), "", Discovery::off());
    let listener = TcpListener::bind("127.0.0.2:0").await.expect("loopback");
    let address = listener.local_addr().expect("bound");
    tokio::task::spawn_local(async move {
        let (stream, peer) = listener.accept().await.expect("a connection");
        let mut io = Io::new(stream);
        poll_fn(|cx| io.poll_fill(cx)).await.expect("a ClientHello");
        accepted.set(true);
        until(|| go.get()).await;
        let _held = side.accept(io, peer).await.expect("a peer");
        std::future::pending::<()>().await;
    });
    meshed(address)
}

#[test]
fn request_that_waits_for_a_connection_leaves_a_removed_endpoint() {
    on_worker(async {
        let authority = Authority::new("root");
        for is_http2 in [false, true] {
            let flag = || Rc::new(Cell::new(false));
            let (accepted, go) = (flag(), flag());
            let slow = slow_peer(&authority, accepted.clone(), go.clone()).await;
            let app = if is_http2 {
                http2_app(Response::default).await
            } else {
                app().await
            };
            let service = Service::with(&authority, vec![slow]).await;
            let replace = async {
                until(|| accepted.get()).await;
                let other = shop(&[EndpointInfo::bare(app)]);
                service.updates.send_replace(Arc::new(other));
                go.set(true);
            };
            let answered = async {
                if is_http2 {
                    return assert_eq!(http2_failures(&service).await, 0);
                }
                let answer = service.call(POST).await;
                assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
            };
            tokio::join!(replace, answered);
        }
    });
}
