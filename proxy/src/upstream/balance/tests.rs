//! Services of several endpoints, through the proxies of a caller and of each endpoint: which
//! endpoints get requests, and what a caller reads if none does.

mod algorithms;
mod changes;
mod hops;
mod overload;
mod simulation;

use crate::route::Preference;
use std::cell::Cell;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderValue, Method, Request, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::policy::BackendPolicy;
use super::{Avoided, Backend, BreakerSettings, Endpoint, Member, peer};
use crate::discovery::{Discovery, Resource, Target, TargetKind};
use crate::endpoint::{EndpointInfo, ExternalHost};
use crate::error::Failure;
use crate::labels::Peer;
use crate::secure::identity::testing::{Authority, WEB};
use crate::secure::io::Io;
use crate::secure::tls::tests::{
    CART, Side, app, credentials, credentials_that_trust, exchange, listening,
};
use diy_mesh_model::exchange::Direction;
use diy_mesh_testkit::metrics;
use diy_mesh_testkit::net::{closed_address, read_all, read_head, read_until};
use diy_mesh_testkit::wait::on_worker;

/// A hundred rollouts add no labels to metrics.
#[test]
fn peer_of_requests_is_the_service_and_never_a_pod() {
    let target = |kind, rollout: u8| {
        let info = EndpointInfo {
            pod: format!("cart-{rollout}"),
            ..EndpointInfo::bare(([10, 1, 0, rollout], 80).into())
        };
        Target {
            kind,
            namespace: "shop".into(),
            name: "cart".into(),
            endpoints: vec![Arc::new(info)],
            ..Target::default()
        }
    };
    let address = SocketAddr::from(([10, 96, 0, 7], 80)).into();
    let backend = Resource::backend("shop/cart:80").expect("a backend");
    for rollout in 0..100 {
        for resource in [&address, &backend] {
            let named = peer(resource, &target(TargetKind::Service, rollout));
            assert_eq!(named, Peer::new("cart", "shop"));
        }
        let own_address = peer(&address, &target(TargetKind::Pod, rollout));
        assert_eq!(own_address, Peer::default());
    }
    assert_eq!(peer(&address, &Target::default()), Peer::default());
    let host = Resource::External(Arc::new(ExternalHost {
        name: "XBackend shop/api".into(),
        host: "api.test".into(),
        port: 443,
        tls: None,
    }));
    assert_eq!(peer(&host, &Target::default()), Peer::new("api.test", ""));
}

const GET: &str = "GET / HTTP/1.1\r\nHost: cart\r\nConnection: close\r\n\r\n";
const POST: &str =
    "POST / HTTP/1.1\r\nHost: cart\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

impl Backend {
    /// Selects the endpoint for a request without a preference.
    pub fn pick(
        &self,
        tried: &[SocketAddr],
        rng: &mut fastrand::Rng,
    ) -> Result<Rc<Endpoint>, Failure> {
        let avoided = Avoided {
            tried: tried.to_vec(),
            ..Avoided::default()
        };
        self.pick_for(Preference::default(), &avoided, "", rng, Instant::now())
    }

    /// The endpoint with this address.
    pub fn endpoint(&self, address: SocketAddr) -> Option<Rc<Endpoint>> {
        let state = self.state.borrow();
        let member = |member: &&Member| member.info.address == address;
        let member = state.members.iter().find(member)?;
        Some(member.endpoint.clone())
    }
}

/// A caller, a Service, and the proxies of its endpoints.
struct Service {
    caller: Side,
    endpoints: Vec<Side>,
    addresses: Vec<SocketAddr>,
    updates: watch::Sender<Arc<Target>>,
    destination: Rc<Backend>,
}

impl Service {
    /// A Service with a meshed endpoint for each application.
    async fn new(apps: &[SocketAddr]) -> Self {
        let authority = Authority::new("root");
        let cart = credentials(&authority, CART, |_| {});
        let (mut endpoints, mut infos) = (Vec::new(), Vec::new());
        for app in apps {
            let side = Side::new(Some(cart.clone()), "", Discovery::off());
            let address = side.receive(*app).await;
            infos.push(meshed(address));
            endpoints.push(side);
        }
        Self {
            endpoints,
            ..Self::with(&authority, infos).await
        }
    }

    /// A Service with these endpoints.
    async fn with(authority: &Authority, mut infos: Vec<EndpointInfo>) -> Self {
        let addresses = infos.iter().map(|info| info.address).collect();
        infos.sort_by_key(|info| info.address);
        let web = credentials(authority, WEB, |_| {});
        let (discovery, mut questions) = Discovery::by_hand();
        let caller = Side::new(Some(web), "", discovery);
        let target = Target {
            kind: TargetKind::Service,
            namespace: "shop".into(),
            name: "cart".into(),
            app_protocol: None,
            endpoints: infos.into_iter().map(Arc::new).collect(),
            ..Target::default()
        };
        let address = SocketAddr::from(([10, 96, 0, 7], 80));
        let (destination, updates) =
            tokio::join!(caller.worker.destinations.get_or_watch(address), async {
                questions.next().await.1(Arc::new(target))
            });
        Self {
            caller,
            endpoints: Vec::new(),
            addresses,
            updates,
            destination,
        }
    }

    /// Sends a request on a new connection and returns the response.
    async fn call(&self, request: &str) -> String {
        exchange(self.caller.connect(&self.destination).await, request).await
    }

    /// The failures of the proxy of an endpoint.
    fn failures(&self, endpoint: usize, code: &str) -> u64 {
        let name =
            format!("diy_mesh_proxy_failures_total{{direction=\"inbound\",code=\"{code}\"}} ");
        let page = self.endpoints[endpoint].metrics.render();
        let count = page.lines().find_map(|line| line.strip_prefix(&name));
        count.map_or(0, |count| count.parse().expect("a number"))
    }
}

/// A meshed endpoint.
fn meshed(address: SocketAddr) -> EndpointInfo {
    EndpointInfo {
        identity: Some(CART.parse().expect("an identity")),
        ..EndpointInfo::bare(address)
    }
}

/// An application that closes each connection when the first byte of a request arrives.
async fn closing_app() -> SocketAddr {
    listening(async |mut stream| drop(stream.read_u8().await)).await
}

/// An HTTP/1 application that answers each connection's request with 503 at once.
async fn failing_app(requests: Rc<Cell<u32>>) -> SocketAddr {
    listening(async move |mut stream| {
        let Some(_) = read_head(&mut stream).await else {
            return;
        };
        requests.set(requests.get() + 1);
        let answer = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n";
        // The proxy may have closed.
        let _ = stream.write_all(answer).await;
    })
    .await
}

/// An HTTP/2 application that answers each request with this head.
async fn http2_app(head: impl Fn() -> Response<()> + Clone + 'static) -> SocketAddr {
    listening(async move |stream| {
        let Ok(mut connection) = h2::server::handshake(stream).await else {
            return;
        };
        while let Some(Ok((_, mut respond))) = connection.accept().await {
            // The proxy may have closed.
            let _ = respond.send_response(head(), true);
        }
    })
    .await
}

/// Sends 100 HTTP/2 requests, one after the other on one connection. Returns the number of
/// failures.
async fn http2_failures(service: &Service) -> usize {
    http2_failures_of(service, Method::GET).await
}

/// Like [`http2_failures`], for requests with this method.
async fn http2_failures_of(service: &Service, method: Method) -> usize {
    let stream = service.caller.connect(&service.destination).await;
    let (mut client, connection) = h2::client::handshake(stream).await.expect("a preface");
    tokio::task::spawn_local(async move { drop(connection.await) });
    let mut failures = 0;
    for _ in 0..100 {
        poll_fn(|cx| client.poll_ready(cx))
            .await
            .expect("it is open");
        let request = Request::builder().method(&method).uri("http://cart/");
        let request = request.body(()).expect("valid");
        let (response, _) = client.send_request(request, true).expect("it is ready");
        let response = response.await.expect("a response");
        let is_ok = response.status() == 200 && !response.headers().contains_key("grpc-status");
        failures += usize::from(!is_ok);
    }
    failures
}

/// The number of failures of 100 requests, one after the other.
async fn http1_failures(service: &Service) -> usize {
    let mut failures = 0;
    for _ in 0..100 {
        let answer = service.call(GET).await;
        failures += usize::from(!answer.starts_with("HTTP/1.1 200 "));
    }
    failures
}

#[test]
fn endpoint_that_accepts_and_closes_loses_its_traffic() {
    on_worker(async {
        let service = Service::new(&[closing_app().await, app().await]).await;
        let failures = http1_failures(&service).await;
        assert!((1..=5).contains(&failures), "{failures} of 100 failed");
        let service =
            Service::new(&[closing_app().await, http2_app(Response::default).await]).await;
        let failures = http2_failures(&service).await;
        assert!((1..=5).contains(&failures), "{failures} of 100 failed");
    });
}

#[test]
fn endpoint_that_answers_503_loses_its_traffic() {
    on_worker(async {
        let requests = Rc::new(Cell::new(0));
        let service = Service::new(&[failing_app(requests.clone()).await, app().await]).await;
        let failures = http1_failures(&service).await;
        assert!((1..=5).contains(&failures), "{failures} of 100 failed");
        assert_eq!(requests.get() as usize, failures, "no request was retried");
        let unavailable = || {
            let mut head = Response::new(());
            *head.status_mut() = http::StatusCode::SERVICE_UNAVAILABLE;
            head
        };
        let grpc_unavailable = || {
            let mut head = Response::new(());
            let status = HeaderValue::from_static("14");
            head.headers_mut().insert("grpc-status", status);
            head
        };
        for failing in [
            http2_app(unavailable).await,
            http2_app(grpc_unavailable).await,
        ] {
            let service = Service::new(&[failing, http2_app(Response::default).await]).await;
            let failures = http2_failures(&service).await;
            assert!((1..=5).contains(&failures), "{failures} of 100 failed");
        }
    });
}

#[test]
fn fast_failures_do_not_attract_concurrent_requests() {
    on_worker(async {
        let requests = Rc::new(Cell::new(0));
        let service = Service::new(&[failing_app(requests.clone()).await, app().await]).await;
        let service = Rc::new(service);
        for _ in 0..10 {
            let mut calls = JoinSet::new();
            for _ in 0..10 {
                let service = service.clone();
                calls.spawn_local(async move { service.call(GET).await });
            }
            calls.join_all().await;
        }
        // Ten requests begin before the first failure.
        assert!(requests.get() <= 15, "{} of 100 failed", requests.get());
    });
}

#[test]
fn retries_on_another_endpoint_if_the_peer_proxy_cannot_connect() {
    on_worker(async {
        let service = Service::new(&[closed_address(), app().await]).await;
        let refused = || service.failures(0, "connect-failed");
        let (mut calls, begun) = (0, Instant::now());
        while calls < 20 || refused() == 0 {
            calls += 1;
            let answer = service.call(POST).await;
            assert!(
                answer.starts_with("HTTP/1.1 200 ") && !answer.contains("x-mesh-error"),
                "{answer}"
            );
        }
        // The endpoint is tried again after a quarantine of 1 s, 2 s, 4 s and so on.
        let quarantines = (begun.elapsed().as_secs() + 1).ilog2();
        assert!(
            refused() <= 1 + u64::from(quarantines),
            "tries the unavailable endpoint, then avoids it: {} of {calls}",
            refused()
        );
    });
}

/// An address that answers no SYN: the queue of its listener is full.
fn silent_address(held: &mut Vec<socket2::Socket>) -> SocketAddr {
    let listener = socket2::Socket::new(
        socket2::Domain::IPV4,
        socket2::Type::STREAM,
        Some(socket2::Protocol::TCP),
    )
    .expect("a socket");
    let any: SocketAddr = ([127, 0, 0, 2], 0).into();
    listener.bind(&any.into()).expect("loopback");
    listener.listen(0).expect("bound");
    let address = listener.local_addr().expect("bound");
    // The queue has space for one connection, and the kernel rounds up.
    for _ in 0..2 {
        let client = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        let client = client.expect("a socket");
        client.set_nonblocking(true).expect("an option");
        // In progress.
        let _ = client.connect(&address);
        held.push(client);
    }
    held.push(listener);
    address.as_socket().expect("IPv4")
}

impl Service {
    /// Waits until the exceptions of a side are these, as "KIND DESTINATION ENDPOINT REASON: COUNT of
    /// TOTAL". The record of an exchange ends after the response.
    async fn wait_for_exceptions(&self, side: &Side, expected: &[String]) {
        loop {
            let now = Instant::now();
            let report = side.metrics.exceptions.report(now);
            let lines = report.iter().map(|one| {
                let kind = one.kind.name();
                let [to, at, why] = [&one.destination, &one.endpoint, &one.reason];
                format!("{kind} {to} {at} {why}: {} of {}", one.count, one.total)
            });
            let mut lines: Vec<String> = lines.collect();
            lines.sort();
            if lines == expected {
                return;
            }
            tokio::task::yield_now().await;
        }
    }
}

#[test]
fn failures_ejected_endpoints_and_open_circuits_are_exceptions() {
    on_worker(async {
        let service = Service::new(&[closed_address(), closed_address()]).await;
        let caller = &service.caller.worker;
        let look = || {
            let (exceptions, now) = (&caller.metrics.exceptions, Instant::now());
            caller
                .destinations
                .report(Direction::Outbound, exceptions, now);
        };
        for _ in 0..3 {
            service.call(POST).await;
        }
        let failed = |count| format!("requests shop/cart:80  connect-failed: {count} of {count}");
        service
            .wait_for_exceptions(&service.caller, &[failed(3)])
            .await;
        let refused = service.endpoints[0]
            .metrics
            .exceptions
            .report(Instant::now());
        let refused = &refused[0];
        assert_eq!(
            (refused.kind.name(), &*refused.destination),
            ("inbound", "")
        );
        assert_eq!(
            (&*refused.reason, refused.total),
            ("connect-failed", refused.count)
        );
        // A quarantine for a refused connection is short, so one look may miss it.
        let is_ejected = |address: &SocketAddr| {
            let report = caller.metrics.exceptions.report(Instant::now());
            let mut ejected = report.into_iter();
            ejected.any(|one| {
                (one.kind.name(), &*one.reason, one.endpoint)
                    == ("ejected", "refused", address.to_string())
            })
        };
        while !service.addresses.iter().all(is_ejected) {
            service.call(POST).await;
            look();
        }

        let service = Service::new(&[failing_app(Rc::default()).await]).await;
        let caller = &service.caller.worker;
        let mut target = (*service.updates.borrow()).as_ref().clone();
        target.policy = Arc::new(BackendPolicy {
            name: "TrafficPolicy shop/cart".into(),
            breaker: Some(BreakerSettings {
                failure_percent: 50,
                min_requests: 2,
                interval: Duration::from_secs(60),
                open_time: Duration::from_secs(60),
            }),
            ..BackendPolicy::default()
        });
        service.updates.send_replace(Arc::new(target));
        while !service
            .call(GET)
            .await
            .contains("x-mesh-error: circuit-open")
        {}
        let (exceptions, now) = (&caller.metrics.exceptions, Instant::now());
        caller
            .destinations
            .report(Direction::Outbound, exceptions, now);
        // The two other requests had a response.
        let expected = [
            "circuit-open shop/cart:80  TrafficPolicy shop/cart: 1 of 0".to_owned(),
            "requests shop/cart:80  circuit-open: 1 of 3".to_owned(),
        ];
        service
            .wait_for_exceptions(&service.caller, &expected)
            .await;
    });
}

#[test]
fn answer_names_all_endpoints_that_refuse_connections() {
    on_worker(async {
        let service = Service::new(&[closed_address(), closed_address()]).await;
        for _ in 0..3 {
            let answer = service.call(POST).await;
            assert!(
                answer.starts_with("HTTP/1.1 502 ")
                    && answer.contains("x-mesh-error: connect-failed")
                    && answer.contains("both ready endpoints of shop/cart refuse connections"),
                "{answer}"
            );
        }
        // Two pods without a mesh, with a wrong targetPort.
        let port = closed_address().port();
        let pods = [[127, 0, 0, 3], [127, 0, 0, 4]].map(|ip| EndpointInfo::bare((ip, port).into()));
        let service = Service::with(&Authority::new("root"), pods.into()).await;
        let expected =
            format!("both ready endpoints of shop/cart refuse connections on port {port}");
        let answer = service.call(POST).await;
        assert!(
            answer.starts_with("HTTP/1.1 502 ") && answer.contains(&expected),
            "{answer}"
        );
    });
}

#[test]
fn failure_of_the_only_endpoint_names_the_service_and_counts_at_the_caller() {
    on_worker(async {
        let service = Service::new(&[closed_address()]).await;
        // The second request is not repeated: its body is streamed.
        let large = format!(
            "POST / HTTP/1.1\r\nHost: cart\r\nConnection: close\r\nContent-Length: 200000\r\n\r\n{}",
            "x".repeat(200_000)
        );
        for (request, count) in [(POST, 1), (&large, 2)] {
            let answer = service.call(request).await;
            let address = service.addresses[0];
            let expected = format!("shop/cart: cannot connect to {address}: ");
            assert!(
                answer.starts_with("HTTP/1.1 502 ")
                    && answer.contains("x-mesh-error: connect-failed")
                    && answer.contains(&expected),
                "{answer}"
            );
            let name =
                "diy_mesh_proxy_failures_total{direction=\"outbound\",code=\"connect-failed\"}";
            let page = service.caller.metrics.render();
            assert!(page.contains(&format!("{name} {count}\n")), "{page}");
        }
    });
}

#[test]
fn attempts_to_connect_take_three_seconds_together() {
    on_worker(async {
        tokio::time::pause();
        let (mut held, authority) = (Vec::new(), Authority::new("root"));
        // Accepts connections and answers no ClientHello. 127.0.0.1 is the pod's own address.
        let mute = TcpListener::bind("127.0.0.2:0").await.expect("loopback");
        let mute_address = mute.local_addr().expect("bound");
        let mut silent = || EndpointInfo::bare(silent_address(&mut held));
        let cases = [
            (vec![silent()], "504 ", "connect-timeout"),
            (vec![silent(), silent()], "504 ", "connect-timeout"),
            (
                vec![silent(), silent(), silent(), silent()],
                "504 ",
                "connect-timeout",
            ),
            (vec![meshed(mute_address)], "502 ", "handshake-failed"),
        ];
        for (endpoints, status, code) in cases {
            let count = endpoints.len();
            let service = Service::with(&authority, endpoints).await;
            let started_at = tokio::time::Instant::now();
            let answer = service.call(GET).await;
            let seconds = started_at.elapsed().as_secs_f64();
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}"))
                    && answer.contains(&format!("x-mesh-error: {code}")),
                "{answer}"
            );
            assert!((2.9..3.2).contains(&seconds), "{count}: {seconds} s");
        }
    });
}

#[test]
fn attempt_to_connect_leaves_time_for_the_other_endpoint() {
    on_worker(async {
        tokio::time::pause();
        let mut held = Vec::new();
        let silent = EndpointInfo::bare(silent_address(&mut held));
        let endpoints = vec![silent, EndpointInfo::bare(app().await)];
        let service = Service::with(&Authority::new("root"), endpoints).await;
        for _ in 0..5 {
            let answer = service.call(GET).await;
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        }
    });
}

/// A meshed endpoint whose proxy closes each connection after the TLS handshake.
async fn closing_peer(authority: &Authority) -> EndpointInfo {
    let side = Side::new(
        Some(credentials(authority, CART, |_| {})),
        "",
        Discovery::off(),
    );
    let listener = TcpListener::bind("127.0.0.2:0").await.expect("loopback");
    let address = listener.local_addr().expect("bound");
    tokio::task::spawn_local(async move {
        loop {
            let (stream, peer) = listener.accept().await.expect("a connection");
            let mut io = Io::new(stream);
            poll_fn(|cx| io.poll_fill(cx)).await.expect("a ClientHello");
            drop(side.accept(io, peer).await);
        }
    });
    meshed(address)
}

/// A meshed endpoint whose proxy trusts other roots, and rejects the caller's certificate.
async fn rejecting_peer(authority: &Authority) -> EndpointInfo {
    let other = Authority::new("another root");
    let cart = credentials_that_trust(authority, CART, other.roots(), |_| {});
    let side = Side::new(Some(cart), "", Discovery::off());
    meshed(side.receive(app().await).await)
}

#[test]
fn peer_that_rejects_the_handshake_is_a_failed_handshake_and_another_one_is_tried() {
    on_worker(async {
        let authority = Authority::new("root");
        let cart = credentials(&authority, CART, |_| {});
        // Without an alert, only an idempotent request is safe to send again.
        for (peer, request) in [
            (rejecting_peer(&authority).await, POST),
            (closing_peer(&authority).await, GET),
        ] {
            let service = Service::with(&authority, vec![peer.clone()]).await;
            let answer = service.call(request).await;
            assert!(
                answer.starts_with("HTTP/1.1 502 ")
                    && answer.contains("x-mesh-error: handshake-failed"),
                "{answer}"
            );
            assert_eq!(http2_failures(&service).await, 100);
            let code = "failures_total{direction=\"outbound\",code=\"handshake-failed\"} 101";
            let metrics = service.caller.metrics.render();
            assert!(metrics.contains(code), "{metrics}");

            let side = Side::new(Some(cart.clone()), "", Discovery::off());
            let other = meshed(side.receive(app().await).await);
            let service = Service::with(&authority, vec![peer.clone(), other]).await;
            for _ in 0..20 {
                let answer = service.call(request).await;
                assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
            }
            let other = http2_app(Response::default).await;
            let other = meshed(side.receive(other).await);
            let service = Service::with(&authority, vec![peer, other]).await;
            assert_eq!(http2_failures(&service).await, 0);
        }
    });
}

/// An opaque application that sends first, and closes.
async fn greeting_app() -> SocketAddr {
    listening(async |mut stream| {
        // The proxy may have closed.
        let _ = stream.write_all(b"220 ready\r\n").await;
    })
    .await
}

/// The number of 40 opaque connections, one after the other, on which the server sends nothing.
async fn opaque_failures(service: &Service) -> usize {
    let mut failures = 0;
    for _ in 0..40 {
        let mut client = service.caller.connect(&service.destination).await;
        let mut greeting = Vec::new();
        // A reset is a failure too.
        let _ = client.read_to_end(&mut greeting).await;
        failures += usize::from(greeting.is_empty());
    }
    failures
}

#[test]
fn opaque_endpoint_that_closes_without_an_answer_loses_its_traffic() {
    on_worker(async {
        let closing = listening(async |stream| drop(stream)).await;
        for failing in [closing, closed_address()] {
            let service = Service::new(&[failing, greeting_app().await]).await;
            let failures = opaque_failures(&service).await;
            assert!((1..=5).contains(&failures), "{failures} of 40 failed");
        }
    });
}
