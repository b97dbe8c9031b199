//! Discovery against a fake controller in the same process.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use diy_mesh_model::exchange::Direction;
use diy_mesh_proto::mesh::v1 as proto;
use prost::Message as _;
use tokio::task::{JoinHandle, JoinSet};

use super::*;
use crate::observe::exceptions::{Event, Kind};
use crate::observe::metrics::{Counted, testing};
use crate::secure::control::testing::FakeController;
use diy_mesh_testkit::wait::{soon, until};

/// Longer than any test.
const FOREVER: Duration = Duration::from_secs(3600);

/// A running discovery task.
struct Running {
    discovery: Discovery,
    metrics: DiscoveryMetrics,
    exceptions: Arc<Exceptions>,
    requests: Arc<Requests>,
    _driver: JoinSet<()>,
}

impl Running {
    fn start(controller: SocketAddr, timing: Timing) -> Self {
        Self::start_with_token(controller, None, timing)
    }

    fn start_with_token(
        controller: SocketAddr,
        token_file: Option<std::path::PathBuf>,
        timing: Timing,
    ) -> Self {
        let url = format!("http://{controller}").parse().expect("a URL");
        let control = Control::new(url, token_file, None);
        let metrics = DiscoveryMetrics::default();
        let exceptions = Arc::new(Exceptions::new(std::time::Instant::now()));
        let own = OwnProxy::default();
        let requests = own.requests.clone();
        let (discovery, driver) = start_with(
            control,
            Trust::default(),
            crate::secure::identity::none(),
            metrics.clone(),
            Reported::new(
                exceptions.clone(),
                Some(Arc::default()),
                own.requests.clone(),
            ),
            timing,
            own,
        );
        let mut tasks = JoinSet::new();
        tasks.spawn(driver);
        Self {
            discovery,
            metrics,
            exceptions,
            requests,
            _driver: tasks,
        }
    }

    /// Watches a destination in the background.
    fn watch(&self, destination: &str) -> JoinHandle<watch::Receiver<Arc<Target>>> {
        let (discovery, destination) = (self.discovery.clone(), address(destination));
        tokio::spawn(async move { discovery.watch(destination).await })
    }
}

/// No timeout of responses, short intervals otherwise.
fn timing() -> Timing {
    let backoff = (Duration::from_millis(1), Duration::from_millis(20));
    Timing {
        first_response_timeout: FOREVER,
        withheld_timeout: FOREVER,
        backoff,
        backoff_reset_after: FOREVER,
        idle_timeout: FOREVER,
        sweep_interval: Duration::from_millis(5),
        report_interval: Duration::ZERO,
        max_destinations: 100,
    }
}

async fn expect(receiver: &mut watch::Receiver<Arc<Target>>, expected: &[&str]) {
    soon(receiver.wait_for(|target| addresses(target) == expected))
        .await
        .expect("discovery runs");
}

fn addresses(target: &Target) -> Vec<String> {
    let addresses = target.endpoints.iter();
    let addresses = addresses.map(|endpoint| endpoint.address.to_string());
    match &target.kind {
        TargetKind::Withheld => vec!["withheld".to_owned()],
        TargetKind::UnknownPort { ports, max_ports } => vec![format!("of {ports:?}, {max_ports}")],
        TargetKind::Refused => vec!["refused".to_owned()],
        TargetKind::Unknown => vec!["unknown".to_owned()],
        TargetKind::Unresolved { .. } => vec!["unresolved".to_owned()],
        TargetKind::Service => addresses.collect(),
        TargetKind::Pod => addresses.map(|address| format!("pod {address}")).collect(),
    }
}

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

fn endpoints(addresses: &[&str]) -> Vec<proto::Endpoint> {
    addresses
        .iter()
        .map(|address| proto::Endpoint {
            address: address.to_string(),
            ..proto::Endpoint::default()
        })
        .collect()
}

fn service(addresses: &[&str]) -> Update {
    let kind = proto::snapshot::Kind::Service.into();
    Update::Snapshot(proto::Snapshot {
        unknown_port: false,
        ports: Vec::new(),
        kind,
        endpoints: endpoints(addresses),
        ..proto::Snapshot::default()
    })
}

fn delta(upserted: &[&str], removed: &[&str]) -> Update {
    Update::Delta(proto::Delta {
        upserted: endpoints(upserted),
        removed: removed.iter().map(ToString::to_string).collect(),
        draining: Vec::new(),
    })
}

const CART: &str = "10.96.0.7:80";

#[tokio::test]
async fn receives_unknown_then_snapshot_and_delta() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(controller.address, timing());
    let mut stream = controller.stream().await;
    let (watching, also_watching) = (proxy.watch(CART), proxy.watch(CART));
    assert_eq!(stream.request().await, format!("+{CART}@"));
    stream
        .respond(CART, "1", Update::Unknown(proto::Unknown::default()))
        .await;
    let mut receiver = soon(watching).await.expect("a response");
    let outside = Target::unknown(&address(CART).into(), false);
    assert_eq!(**receiver.borrow(), outside);
    let mut second_receiver = soon(also_watching).await.expect("a response");
    stream
        .respond(CART, "2", service(&["10.0.0.1:80", "10.0.0.2:80"]))
        .await;
    expect(&mut receiver, &["10.0.0.1:80", "10.0.0.2:80"]).await;
    expect(&mut second_receiver, &["10.0.0.1:80", "10.0.0.2:80"]).await;
    stream
        .respond(CART, "3", delta(&["10.0.0.3:80"], &["10.0.0.1:80"]))
        .await;
    expect(&mut receiver, &["10.0.0.2:80", "10.0.0.3:80"]).await;
    // A further worker causes no request.
    let third = soon(proxy.watch(CART)).await.expect("a response");
    assert_eq!(addresses(&third.borrow()), ["10.0.0.2:80", "10.0.0.3:80"]);
    proxy.watch("10.96.0.9:80");
    assert_eq!(stream.request().await, "+10.96.0.9:80@");
}

#[tokio::test]
async fn first_watch_waits_for_an_endpoint_until_the_timeout() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(controller.address, timing());
    let mut stream = controller.stream().await;
    let first = proxy.watch(CART);
    stream.request().await;
    stream.respond(CART, "1", service(&[])).await;
    soon(until(|| proxy.metrics.last_message_age().is_some())).await;
    let mut second = soon(proxy.watch(CART))
        .await
        .expect("a later watch does not wait");
    assert!(second.borrow().is_without_endpoint());
    assert!(!first.is_finished());
    stream
        .respond(CART, "2", delta(&["10.0.0.1:80"], &[]))
        .await;
    assert_eq!(
        addresses(&soon(first).await.expect("a response").borrow()),
        ["10.0.0.1:80"]
    );
    expect(&mut second, &["10.0.0.1:80"]).await;

    let proxy = Running::start(
        controller.address,
        Timing {
            first_response_timeout: Duration::from_millis(50),
            ..timing()
        },
    );
    let mut stream = controller.stream().await;
    let watching = proxy.watch(CART);
    stream.request().await;
    stream.respond(CART, "1", service(&[])).await;
    let receiver = soon(watching).await.expect("a response");
    assert!(
        addresses(&receiver.borrow())
            .iter()
            .all(|address| address == "unknown"),
        "after the timeout"
    );
}

/// A Service without the port of the destination.
fn unknown_port(ports: &[u32], max_ports: u32) -> Update {
    let Update::Snapshot(snapshot) = service(&[]) else {
        unreachable!("a snapshot")
    };
    Update::Snapshot(proto::Snapshot {
        unknown_port: true,
        ports: ports.to_vec(),
        max_ports,
        ..snapshot
    })
}

#[tokio::test]
async fn watch_of_unknown_port_does_not_wait_for_an_endpoint() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(controller.address, timing());
    let mut stream = controller.stream().await;
    let watching = proxy.watch(CART);
    stream.request().await;
    stream
        .respond(CART, "1", unknown_port(&[80, 443, 1 << 16], 0))
        .await;
    let mut receiver = soon(watching).await.expect("a response");
    assert_eq!(addresses(&receiver.borrow()), ["of [80, 443], 0"]);
    stream.respond(CART, "2", unknown_port(&[], 1000)).await;
    expect(&mut receiver, &["of [], 1000"]).await;
    stream.respond(CART, "3", service(&["10.0.0.1:80"])).await;
    expect(&mut receiver, &["10.0.0.1:80"]).await;
}

#[tokio::test]
async fn keeps_targets_without_controller_and_resumes_from_their_versions() {
    // An address of this test alone: other tests cannot get the port meanwhile.
    let mut controller = FakeController::start_at(([127, 0, 1, 1], 0).into()).await;
    let proxy = Running::start(controller.address, timing());
    let mut stream = controller.stream().await;
    let watching = proxy.watch(CART);
    stream.request().await;
    stream.respond(CART, "41", service(&["10.0.0.1:80"])).await;
    let mut receiver = soon(watching).await.expect("a response");

    drop(stream);
    let address = controller.stop().await;
    let known = soon(proxy.watch(CART)).await.expect("a response");
    assert_eq!(addresses(&known.borrow()), ["10.0.0.1:80"]);
    // After a failed attempt, unknown destinations do not wait.
    let unknown = soon(proxy.watch("10.96.0.9:80")).await.expect("a response");
    assert_eq!(**unknown.borrow(), Target::default());

    let mut controller = FakeController::start_at(address).await;
    let mut stream = controller.stream().await;
    let mut requests = [stream.request().await, stream.request().await];
    requests.sort();
    assert_eq!(
        requests,
        [format!("+{CART}@41"), "+10.96.0.9:80@".to_owned()]
    );
    stream
        .respond(CART, "41", Update::Unchanged(proto::Unchanged {}))
        .await;
    stream
        .respond(CART, "42", delta(&["10.0.0.2:80"], &[]))
        .await;
    expect(&mut receiver, &["10.0.0.1:80", "10.0.0.2:80"]).await;
    assert!(proxy.metrics.reconnects.get() > 0 && proxy.metrics.connected.get() == 1);
}

#[tokio::test]
async fn does_not_wait_for_an_unavailable_controller() {
    // An address of this test alone: other tests cannot get the port meanwhile.
    let controller = FakeController::start_at(([127, 0, 1, 2], 0).into()).await;
    let address = controller.stop().await;
    let proxy = Running::start(address, timing());
    let mut receiver = soon(proxy.watch(CART)).await.expect("a response");
    assert_eq!(**receiver.borrow(), Target::default());
    unready(&proxy, "failed to connect to the controller at").await;
    let mut controller = FakeController::start_at(address).await;
    let mut stream = controller.stream().await;
    assert_eq!(stream.request().await, format!("+{CART}@"));
    stream.respond(CART, "1", service(&["10.0.0.1:80"])).await;
    expect(&mut receiver, &["10.0.0.1:80"]).await;
    assert_eq!(*proxy.discovery.unready().borrow(), None);
    assert!(proxy.metrics.last_message_age().is_some());
}

#[tokio::test]
async fn waits_for_a_silent_controller_until_the_timeout() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(
        controller.address,
        Timing {
            first_response_timeout: Duration::from_millis(20),
            ..timing()
        },
    );
    let mut stream = controller.stream().await;
    let mut receiver = soon(proxy.watch(CART))
        .await
        .expect("the target after the timeout");
    assert_eq!(**receiver.borrow(), Target::default());
    assert_eq!(stream.request().await, format!("+{CART}@"));
    stream.respond(CART, "1", service(&["10.0.0.1:80"])).await;
    expect(&mut receiver, &["10.0.0.1:80"]).await;
}

#[tokio::test]
async fn waits_longer_for_a_response_without_which_requests_fail() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(
        controller.address,
        Timing {
            first_response_timeout: Duration::ZERO,
            ..timing()
        },
    );
    let mut stream = controller.stream().await;
    let (discovery, backend) = (proxy.discovery.clone(), "shop/cart:80");
    let watching =
        tokio::spawn(async move { discovery.watch(Resource::Backend(backend.into())).await });
    stream.request().await;
    stream
        .send(proto::DiscoverResponse {
            r#type: proto::ResourceType::Backend.into(),
            name: backend.to_owned(),
            version: "1".to_owned(),
            update: Some(service(&["10.0.0.1:80"])),
            ..proto::DiscoverResponse::default()
        })
        .await;
    let receiver = soon(watching).await.expect("a response");
    assert_eq!(addresses(&receiver.borrow()), ["10.0.0.1:80"]);
}

#[tokio::test]
async fn unsubscribes_idle_destination_and_subscribes_again() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(
        controller.address,
        Timing {
            idle_timeout: Duration::ZERO,
            ..timing()
        },
    );
    let mut stream = controller.stream().await;
    let watching = proxy.watch(CART);
    assert_eq!(stream.request().await, format!("+{CART}@"));
    stream.respond(CART, "1", service(&["10.0.0.1:80"])).await;
    drop(soon(watching).await.expect("a response"));
    assert_eq!(stream.request().await, format!("-{CART}"));
    proxy.watch(CART);
    assert_eq!(stream.request().await, format!("+{CART}@"));
}

#[tokio::test]
async fn resubscribes_after_invalid_responses() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(controller.address, timing());
    let mut stream = controller.stream().await;
    let watching = proxy.watch(CART);
    stream.request().await;
    stream
        .respond("nowhere", "1", service(&["10.0.0.1:80"]))
        .await;
    stream
        .respond(CART, "1", delta(&["10.0.0.1:80"], &[]))
        .await;
    let mut receiver = soon(watching)
        .await
        .expect("an invalid response ends the wait");
    assert_eq!(**receiver.borrow(), Target::default());
    assert_eq!(
        [stream.request().await, stream.request().await],
        [format!("-{CART}"), format!("+{CART}@")]
    );
    stream
        .respond(CART, "2", service(&["10.0.0.1:80", "ten.0.0.2:80"]))
        .await;
    expect(&mut receiver, &["10.0.0.1:80"]).await;
    assert_eq!(proxy.metrics.broken.get(), 3);
}

#[tokio::test]
async fn refuses_destinations_over_the_limit() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(
        controller.address,
        Timing {
            max_destinations: 1,
            ..timing()
        },
    );
    let mut stream = controller.stream().await;
    let watching = proxy.watch(CART);
    stream.request().await;
    stream.respond(CART, "1", service(&["10.0.0.1:80"])).await;
    let _held = soon(watching).await.expect("a response");
    let over = soon(proxy.watch("10.96.0.9:80")).await.expect("a response");
    assert_eq!(over.borrow().kind, TargetKind::Refused);
    assert!(over.has_changed().is_err(), "closed");
    assert_eq!(
        (
            proxy.metrics.refused.get(),
            proxy.metrics.subscriptions.get()
        ),
        (1, 1)
    );
}

/// Waits until the reason why discovery is not ready contains `expected`; empty: until it is ready.
async fn unready(proxy: &Running, expected: &str) {
    let mut unready = proxy.discovery.unready();
    let is_expected = |reason: &Option<String>| match reason {
        Some(reason) => !expected.is_empty() && reason.contains(expected),
        None => expected.is_empty(),
    };
    drop(soon(unready.wait_for(is_expected)).await.expect(expected));
}

fn workload(mode: proto::workload::InboundMode) -> Update {
    Update::Workload(proto::Workload {
        inbound_mode: mode.into(),
        ..proto::Workload::default()
    })
}

#[tokio::test]
async fn is_ready_with_the_first_valid_configuration_of_its_pod() {
    use proto::workload::InboundMode::{Strict, Unspecified};
    let mut controller = FakeController::start().await;
    controller.announces_self.store(true, Ordering::SeqCst);
    let proxy = Running::start(controller.address, timing());
    let mut stream = controller.stream().await;
    assert_eq!(stream.request().await, "+self@");
    unready(&proxy, "no inbound configuration").await;
    stream.respond("", "1", workload(Unspecified)).await;
    let rejected = stream.request().await;
    assert!(
        rejected.starts_with("RESOURCE_TYPE_SELF@1 \"inbound mode 0"),
        "{rejected}"
    );
    unready(&proxy, "inbound configuration rejected: inbound mode 0").await;
    assert_eq!(*proxy.discovery.policy().borrow(), None);
    stream.respond("", "2", workload(Strict)).await;
    assert_eq!(stream.request().await, "RESOURCE_TYPE_SELF@2 \"\"");
    unready(&proxy, "").await;
    // It stays in force, and the proxy ready, whatever the next stream says.
    drop(stream);
    let mut stream = controller.stream().await;
    assert_eq!(stream.request().await, "+self@2");
    stream.respond("", "3", workload(Unspecified)).await;
    let rejected = stream.request().await;
    assert!(rejected.starts_with("RESOURCE_TYPE_SELF@3"), "{rejected}");
    assert_eq!(*proxy.discovery.unready().borrow(), None);
    let policy = proxy.discovery.policy().borrow().clone().unwrap();
    assert!(policy.strict);
}

#[tokio::test]
async fn is_ready_without_configuration_if_the_controller_sends_none() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(controller.address, timing());
    let _watching = proxy.watch(CART);
    let mut stream = controller.stream().await;
    unready(&proxy, "").await;
    assert_eq!(stream.request().await, format!("+{CART}@"));
    let policy = proxy.discovery.policy().borrow().clone();
    assert_eq!(policy.as_deref(), Some(&Policy::default()));
}

#[tokio::test]
async fn tells_the_stream_and_the_versions() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(controller.address, timing());
    let known = async || soon(proxy.discovery.known()).await.expect("a driver");
    let watching = proxy.watch(CART);
    let mut stream = controller.stream().await;
    assert_eq!(stream.request().await, format!("+{CART}@"));
    assert_eq!(known().await.stream.message_age_ms, None);
    stream.respond(CART, "1", service(&["10.0.0.1:80"])).await;
    let _receiver = soon(watching).await.expect("a response");
    let state = known().await;
    assert_eq!(state.versions[&address(CART).into()].0, "1");
    assert_eq!(state.versions.len(), 1);
    let stream_state = state.stream;
    assert!(stream_state.connected && stream_state.message_age_ms.is_some());
    assert_eq!(
        (stream_state.subscriptions, stream_state.unready),
        (1, None)
    );
    drop((stream, controller));
    while known().await.stream.connected {
        tokio::task::yield_now().await;
    }
    assert!(Discovery::off().known().await.is_none());
}

#[tokio::test]
async fn rejects_invalid_roots_with_a_reason() {
    let mut controller = FakeController::start().await;
    let _proxy = Running::start(controller.address, timing());
    let mut stream = controller.stream().await;
    let garbage = proto::Roots {
        pem: b"garbage".to_vec(),
        ..proto::Roots::default()
    };
    stream.respond("", "1", Update::Roots(garbage)).await;
    let rejected = stream.request().await;
    assert!(
        rejected.starts_with("RESOURCE_TYPE_ROOTS@1 ") && !rejected.ends_with("\"\""),
        "{rejected}"
    );
}

#[tokio::test]
async fn snapshot_in_several_messages_applies_when_the_last_has_arrived() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(controller.address, timing());
    let watching = proxy.watch(CART);
    let mut stream = controller.stream().await;
    assert_eq!(stream.request().await, format!("+{CART}@"));
    let chunk = |endpoint: &str, more| DiscoverResponse {
        name: CART.to_owned(),
        version: "1".to_owned(),
        update: Some(service(&[endpoint])),
        more,
        ..DiscoverResponse::default()
    };
    stream.send(chunk("10.0.0.1:80", true)).await;
    stream.send(chunk("10.0.0.2:80", true)).await;
    // A lost stream begins anew.
    drop(stream);
    let mut stream = controller.stream().await;
    assert_eq!(stream.request().await, format!("+{CART}@"));
    stream.send(chunk("10.0.0.3:80", true)).await;
    assert!(!watching.is_finished());
    stream.send(chunk("10.0.0.4:80", false)).await;
    let mut receiver = soon(watching).await.expect("a response");
    expect(&mut receiver, &["10.0.0.3:80", "10.0.0.4:80"]).await;
    stream
        .respond(CART, "2", delta(&["10.0.0.5:80"], &[]))
        .await;
    expect(
        &mut receiver,
        &["10.0.0.3:80", "10.0.0.4:80", "10.0.0.5:80"],
    )
    .await;
}

#[tokio::test]
async fn each_attempt_sends_the_current_token() {
    let path = std::env::temp_dir().join(format!("diy-sm-discovery-token-{}", std::process::id()));
    std::fs::write(&path, "expired").expect("a file in the temporary folder");
    let mut controller = FakeController::start().await;
    let proxy = Running::start_with_token(controller.address, Some(path.clone()), timing());
    soon(until(|| proxy.metrics.reconnects.get() >= 3)).await;
    unready(&proxy, "request rejected by the controller").await;
    for token in ["first", "second"] {
        // Atomically, as the kubelet does.
        let next = path.with_extension("next");
        std::fs::write(&next, token).expect("a file in the temporary folder");
        std::fs::rename(&next, &path).expect("the same folder");
        let stream = soon(async {
            loop {
                let stream = controller.stream().await;
                if stream.authorization == Some(format!("Bearer {token}")) {
                    break stream;
                }
            }
        });
        drop(stream.await);
    }
    std::fs::remove_file(&path).expect("the file is there");
}

#[tokio::test]
async fn task_ends_with_the_last_handle_and_off_returns_unknown() {
    let controller = FakeController::start().await;
    let control = Control::new(controller.url(), None, None);
    let (discovery, driver) = start_with(
        control,
        Trust::default(),
        crate::secure::identity::none(),
        DiscoveryMetrics::default(),
        Reported::new(
            Arc::new(Exceptions::new(std::time::Instant::now())),
            None,
            OwnProxy::default().requests,
        ),
        timing(),
        OwnProxy::default(),
    );
    let driver = tokio::spawn(driver);
    drop(discovery);
    soon(driver).await.expect("the task ends");
    let off = Discovery::off();
    let receiver = off.watch(address(CART)).await;
    assert!(off.is_off() && receiver.borrow().kind == TargetKind::Unknown);
    assert_eq!(*off.unready().borrow(), None);
}

#[tokio::test]
async fn refuses_destinations_after_the_task_ended() {
    let (discovery, questions) = Discovery::by_hand();
    drop(questions);
    assert!(!discovery.is_off());
    assert_eq!(
        discovery.watch(address(CART)).await.borrow().kind,
        TargetKind::Refused
    );
}

#[test]
fn limits_log_messages_by_kind() {
    let mut limiter = LogLimiter::default();
    let logged: Vec<u64> = (0..1000)
        .filter_map(|_| limiter.should_log(LogKind::InvalidResponse))
        .collect();
    assert_eq!(logged, [1]);
    assert_eq!(limiter.should_log(LogKind::TableFull), Some(1));
}

#[tokio::test]
async fn reports_exceptions_to_each_controller_and_clears_them() {
    let failed = Event {
        kind: Kind::Requests,
        destination: "shop/cart:80",
        endpoint: "",
        reason: "connect-failed",
    };
    let mut controller = FakeController::start().await;
    let proxy = Running::start(controller.address, timing());
    let now = Instant::now().into_std();
    proxy.exceptions.record(failed, 1, now);
    for _ in 0..2 {
        let mut stream = controller.stream().await;
        let Action::Exceptions(received) = stream.action().await else {
            panic!("expected exceptions");
        };
        assert_eq!(received.exceptions[0].destination, "shop/cart:80");
    }
}

#[tokio::test]
async fn reports_traffic_when_a_controller_asks_for_it() {
    let mut controller = FakeController::start().await;
    controller.announces_self.store(true, Ordering::SeqCst);
    let proxy = Running::start(controller.address, timing());
    let mut stream = controller.stream().await;
    let asked = Update::ReportTraffic(proto::ReportTraffic { seconds: 15 });
    stream.respond("", "", asked).await;
    let labels = testing::request(Direction::Outbound, "", ("shop", "cart"));
    let (took, now) = (Duration::from_millis(3), std::time::Instant::now());
    let reported = loop {
        // Others that the connection has before its stream is open do not count.
        let labels = labels.clone();
        proxy.requests.count(&Counted::default(), labels, took, now);
        if let Action::Traffic(report) = stream.action().await {
            break proto::Traffic::decode(&*report).expect("a message");
        }
    };
    assert_eq!(reported.flows[0].peer, "cart");
    // Well before the next report without a watcher.
    assert!(reported.milliseconds < 9_000, "{reported:?}");
}
