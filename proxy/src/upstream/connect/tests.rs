//! Pools and dialing, with real sockets.

use super::*;
use crate::context::worker::{Worker, WorkerContext};
use crate::endpoint::EndpointInfo;
use crate::labels::LimitKind;
use crate::limits::lifetime::Lifetime;
use crate::route::Preference;
use crate::upstream::balance::Avoided;
use diy_mesh_testkit::wait::{soon, until};

use diy_mesh_testkit::net::listen;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};

impl Pool {
    /// Whether the endpoint was removed.
    pub fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// The number of idle HTTP/1 connections.
    pub fn idle_http1(&self) -> usize {
        self.http1.borrow().len()
    }

    /// A pool of no worker.
    pub fn alone(remote: Remote, limits: Limits) -> Self {
        Self::new(remote, limits, Arc::default(), Rc::default())
    }
}

impl Pools {
    /// The number of idle HTTP/1 connections.
    pub fn idle_http1(&self) -> usize {
        Rc::strong_count(&self.open.idle) - 1
    }
}

fn remote() -> Remote {
    Remote {
        address: ([127, 0, 0, 1], 1).into(),
        pod: String::new(),
        identity: None,
        tls: None,
    }
}

fn pool() -> Pool {
    Pool::alone(remote(), Limits::default())
}

/// An endpoint that accepts connections.
async fn listening() -> (TcpListener, Remote) {
    let (listener, address) = listen().await;
    (listener, Remote::from(&EndpointInfo::bare(address)))
}

fn dialer(worker: &Worker, seconds: u64) -> Dialer<'_> {
    let slot = Box::leak(Box::new(worker.slot()));
    Dialer::new(
        &worker.tls,
        tokio::time::Instant::now(),
        Duration::from_secs(seconds),
        slot,
    )
}

/// Connections and their far ends.
async fn connections(count: usize) -> (Vec<Io>, Vec<TcpStream>) {
    let (listener, address) = listen().await;
    let (mut near, mut far) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let (connected, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        near.push(Io::new(connected.expect("loopback")));
        far.push(accepted.expect("loopback").0);
    }
    (near, far)
}

/// Waits until the close by the remote end has arrived.
async fn wait_until_stale(io: &mut Io) {
    soon(until(|| io.is_stale())).await;
}

#[tokio::test]
async fn reuses_most_recently_used_connection() {
    let (near, _far) = connections(3).await;
    let (pool, now) = (pool(), Instant::now());
    near.into_iter().for_each(|io| pool.checkin_http1(io, now));
    assert_eq!(pool.idle_http1(), 3);
    for left in [2, 1, 0] {
        assert!(pool.checkout_http1(Instant::now(), true).is_some());
        assert_eq!(pool.idle_http1(), left);
    }
    assert!(pool.checkout_http1(Instant::now(), true).is_none());
}

#[tokio::test]
async fn does_not_reuse_closed_connections() {
    let (mut near, mut far) = connections(2).await;
    drop(far.pop());
    wait_until_stale(&mut near[1]).await;
    let pool = pool();
    near.drain(..)
        .for_each(|io| pool.checkin_http1(io, Instant::now()));
    let mut open = pool
        .checkout_http1(Instant::now(), true)
        .expect("the other connection is open");
    assert!(!open.is_stale() && pool.idle_http1() == 0);
}

#[tokio::test]
async fn evicts_idle_connections_by_age_and_closed_ones_immediately() {
    let (mut near, mut far) = connections(3).await;
    drop(far.pop());
    wait_until_stale(&mut near[2]).await;
    let (pool, start) = (pool(), Instant::now());
    for (io, age) in near.into_iter().zip([0, 10, 20]) {
        pool.checkin_http1(io, start + Duration::from_secs(age));
    }
    pool.evict_idle(start + IDLE_TIMEOUT + Duration::from_secs(10));
    assert_eq!(pool.idle_http1(), 1);
}

#[tokio::test]
async fn unrepeatable_request_replaces_a_connection_that_was_idle_for_long() {
    let (near, mut far) = connections(3).await;
    let (pool, start) = (pool(), Instant::now());
    let after = |milliseconds| start + Duration::from_millis(milliseconds);
    near.into_iter()
        .for_each(|io| pool.checkin_http1(io, start));
    assert!(pool.checkout_http1(after(1000), false).is_none());
    assert_eq!(pool.idle_http1(), 2);
    let ended = far[2].read_u8().await.unwrap_err();
    assert_eq!(
        ended.kind(),
        io::ErrorKind::ConnectionReset,
        "its port is free"
    );
    let io = pool.checkout_http1(after(1000), true).expect("an old one");
    pool.checkin_http1(io, after(1000));
    assert!(pool.checkout_http1(after(1999), false).is_some());
}

#[tokio::test]
async fn drops_retired_connections() {
    let (near, _far) = connections(3).await;
    let (pool, now) = (pool(), Instant::now());
    let after = |seconds| now + Duration::from_secs(seconds);
    for (mut io, seconds) in near.into_iter().zip([0, 3600, 7200]) {
        io.set_lifetime(Lifetime {
            retires_at: after(seconds),
            certificate_ends_at: after(86_400),
            resets_at: None,
        });
        pool.checkin_http1(io, now);
    }
    assert_eq!(pool.idle_http1(), 2, "the first one is retired");
    let longest = pool
        .checkout_http1(after(3600), true)
        .expect("the last one is not retired");
    assert!(
        pool.checkout_http1(after(3600), true).is_none() && pool.idle_http1() == 0,
        "the second one is retired"
    );
    pool.checkin_http1(longest, after(7199));
    pool.evict_idle(after(7199));
    assert_eq!(pool.idle_http1(), 1);
    pool.evict_idle(after(7200));
    assert_eq!(pool.idle_http1(), 0);
}

#[tokio::test]
async fn closed_pool_keeps_no_connections() {
    let (near, _far) = connections(2).await;
    let (pool, mut near) = (pool(), near.into_iter());
    let mut checkin = || pool.checkin_http1(near.next().expect("two connections"), Instant::now());
    checkin();
    pool.close();
    assert_eq!(pool.idle_http1(), 0);
    checkin();
    assert!(pool.is_closed() && pool.checkout_http1(Instant::now(), true).is_none());
}

#[tokio::test]
async fn exchange_waits_for_a_connection_of_a_saturated_endpoint() {
    let worker = Worker::new(WorkerContext::for_a_test(""));
    let (_listener, remote) = listening().await;
    let limits = Limits {
        connections: 2,
        waiting: 1,
        ..Limits::default()
    };
    let pool = Pool::alone(remote, limits);
    let connect = |seconds| pool.http1(dialer(&worker, seconds), Instant::now(), true);
    let first = connect(5).await.expect("one of two");
    let _second = connect(5).await.expect("two of two");
    let (third, fourth, ()) = tokio::join!(connect(60), connect(60), async {
        tokio::task::yield_now().await;
        let end = |upstream: Upstream| pool.checkin_http1(upstream.io, Instant::now());
        end(first);
    });
    let third = third.expect("it waited");
    assert!(third.reused, "the connection of the first exchange");
    assert_eq!(
        fourth.err().map(|failure| failure.code().label()),
        Some("upstream-overloaded")
    );
    drop(third);
    assert_eq!(pool.limiter.connections(), 1);
}

#[tokio::test]
async fn opaque_connections_count_for_the_limit_of_a_policy() {
    let worker = Worker::new(WorkerContext::for_a_test(""));
    let (_listener, remote) = listening().await;
    let dialer = dialer(&worker, 60);
    let metrics: Arc<UpstreamMetrics> = Arc::default();
    for (opaque, expected) in [(true, false), (false, true)] {
        let limits = Limits {
            connections: 2,
            opaque,
            waiting: 0,
            ..Limits::default()
        };
        let pool = Pool::new(remote.clone(), limits, metrics.clone(), Rc::default());
        let connect = || pool.opaque(dialer, Alpn::Opaque);
        let exchange = pool.http1(dialer, Instant::now(), true).await.expect("one");
        pool.checkin_http1(exchange.io, Instant::now());
        drop((exchange.connection, exchange._request));
        let first = connect().await.expect("an idle connection does not count");
        assert_eq!((pool.idle_http1(), metrics.connections.get()), (1, 2));
        // The idle one makes space.
        let second = connect().await.expect("two of two");
        assert_eq!(pool.idle_http1(), usize::from(!opaque));
        assert_eq!(connect().await.is_ok(), expected);
        // A connection after an upgrade keeps its slot.
        let slot = second.connection.filter(Slot::counts_opaque);
        drop(second.io);
        assert_eq!(slot.is_some(), opaque);
        assert_eq!(connect().await.is_ok(), expected);
        drop((first, slot));
        assert!(connect().await.is_ok() && pool.limiter.connections() == 0);
        drop(pool);
        assert_eq!(metrics.connections.get(), 0);
    }
}

#[tokio::test]
async fn requests_in_flight_are_limited_in_both_versions_of_http() {
    let worker = Worker::new(WorkerContext::for_a_test(""));
    let (_listener, remote) = listening().await;
    let dialer = dialer(&worker, 60);
    let limits = Limits {
        requests: 1,
        waiting: 0,
        ..Limits::default()
    };
    let pool = Pool::alone(remote, limits);
    let http1 = || pool.http1(dialer, Instant::now(), true);
    let held = http1().await.expect("the first one");
    let rejected = Failure::EndpointLimit {
        address: pool.remote.address,
        limit: "maxRequests",
        policy: String::new(),
    };
    let second = http1().await.err().map(|failure| failure.to_string());
    assert_eq!(second, Some(rejected.to_string()));
    let stream = pool
        .http2(Direction::Outbound, dialer, |_| Expiry(None))
        .await;
    let stream = stream.err().map(|failure| failure.to_string());
    assert_eq!(stream, Some(rejected.to_string()));
    drop(held);
    assert!(http1().await.is_ok());
}

/// Each of many endpoints had 256, whatever the memory.
#[tokio::test]
async fn oldest_idle_connections_of_all_endpoints_are_closed_beyond_the_maximum() {
    let worker = Worker::new(WorkerContext {
        limit: 160,
        ..WorkerContext::for_a_test("")
    });
    let (near, _far) = connections(60).await;
    let start = Instant::now();
    let mut destinations = Vec::new();
    // One connection to each of 50 endpoints, and ten to the last one.
    for (number, io) in (0..60_u8).zip(near) {
        let address = SocketAddr::from(([10, 0, 0, number.min(50)], 80));
        let destination = worker.apps.fixed(address);
        let pick = destination.pick_for(
            Preference::default(),
            &Avoided::default(),
            "",
            &mut fastrand::Rng::with_seed(0),
            start,
        );
        let endpoint = pick.expect("the address itself");
        let now = start + Duration::from_millis(number.into());
        endpoint.pool().checkin_http1(io, now);
        destinations.push((destination, endpoint));
        let kept = worker.apps.idle_http1();
        assert!((35..=40).contains(&kept) || kept == usize::from(number) + 1);
    }
    let idle = |number: usize| destinations[number].1.pool().idle_http1();
    assert_eq!((idle(0), idle(20), idle(49), idle(50)), (0, 0, 1, 10));
    // One that ends makes space for another one.
    let before = worker.apps.idle_http1();
    let used = destinations[50].1.pool().checkout_http1(start, true);
    assert_eq!(worker.apps.idle_http1(), before - 1);
    drop(used);
    worker.apps.set_max_idle(0);
    assert_eq!(worker.apps.idle_http1(), 0);
}

#[tokio::test(start_paused = true)]
async fn queues_and_connect_share_one_timeout() {
    let limits = Limits {
        connections: 1,
        requests: 2,
        waiting: 8,
        ..Limits::default()
    };
    let (_listener, remote) = listening().await;
    let pool = Pool::alone(remote, limits);
    let worker = Worker::new(WorkerContext::for_a_test(""));
    let hold = async || pool.http1(dialer(&worker, 3), Instant::now(), true).await;
    let _connected = hold().await.expect("a connection");
    let request = pool
        .acquire(LimitKind::Requests, dialer(&worker, 3))
        .await
        .expect("a slot");
    let begun = tokio::time::Instant::now();
    let release = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        drop(request);
    };
    // It waits 2 s for a request, and the rest for a connection.
    let (refused, ()) = tokio::join!(hold(), release);
    assert!(refused.is_err());
    assert_eq!(begun.elapsed(), Duration::from_secs(3));
}
