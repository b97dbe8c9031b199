//! Discovery against a controller in the same process that does as it is told. Conditions are waited for.

use diy_mesh_proto::mesh::v1 as proto;
use tokio::task::{JoinHandle, JoinSet};

use super::*;
use crate::control::testing::{FakeController, soon};

/// Longer than any test: whoever waits for it fails.
const FOREVER: Duration = Duration::from_secs(3600);

/// A proxy's discovery that runs.
struct Running {
    discovery: Discovery,
    metrics: DiscoveryMetrics,
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
        let control =
            Control::new(&format!("http://{controller}"), token_file, None).expect("an address");
        let metrics = DiscoveryMetrics::default();
        let (discovery, driver) = start_with(
            control,
            Trust::default(),
            crate::identity::none(),
            metrics.clone(),
            timing,
        );
        let mut tasks = JoinSet::new();
        tasks.spawn(driver);
        Self {
            discovery,
            metrics,
            _driver: tasks,
        }
    }

    /// Asks in the background: the answer is the test's to give.
    fn ask(&self, destination: &str) -> JoinHandle<watch::Receiver<Arc<Target>>> {
        let (discovery, destination) = (self.discovery.clone(), address(destination));
        tokio::spawn(async move { discovery.watch(destination).await })
    }
}

/// Patient with answers, quick at everything else.
fn timing() -> Timing {
    let backoff = (Duration::from_millis(1), Duration::from_millis(20));
    Timing {
        first_answer: FOREVER,
        backoff,
        good_stream: FOREVER,
        idle: FOREVER,
        sweep: Duration::from_millis(5),
        limit: 100,
    }
}

async fn expect(receiver: &mut watch::Receiver<Arc<Target>>, expected: &[&str]) {
    soon(receiver.wait_for(|target| addresses(target) == expected))
        .await
        .expect("discovery runs");
}

fn addresses(target: &Target) -> Vec<String> {
    match target {
        Target::Withheld => vec!["withheld".to_owned()],
        Target::Refused => vec!["refused".to_owned()],
        Target::Unknown => vec!["unknown".to_owned()],
        Target::Service(service) => service
            .endpoints
            .iter()
            .map(|endpoint| endpoint.address.to_string())
            .collect(),
        Target::Pod(pod) => vec![format!("pod {}", pod.endpoint.address)],
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
        kind,
        endpoints: endpoints(addresses),
        ..proto::Snapshot::default()
    })
}

fn delta(upserted: &[&str], removed: &[&str]) -> Update {
    Update::Delta(proto::Delta {
        upserted: endpoints(upserted),
        removed: removed.iter().map(ToString::to_string).collect(),
    })
}

const CART: &str = "10.96.0.7:80";

#[tokio::test]
async fn an_unknown_destination_becomes_known_and_changes() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(controller.address, timing());
    let mut stream = controller.stream().await;
    let (asked, asked_too) = (proxy.ask(CART), proxy.ask(CART));
    assert_eq!(stream.request().await, format!("+{CART}@"));
    stream
        .answer(CART, "1", Update::Unknown(proto::Unknown {}))
        .await;
    let mut receiver = soon(asked).await.expect("an answer");
    assert_eq!(**receiver.borrow(), Target::Unknown);
    let mut receiver_too = soon(asked_too).await.expect("an answer");
    stream
        .answer(CART, "2", service(&["10.0.0.1:80", "10.0.0.2:80"]))
        .await;
    expect(&mut receiver, &["10.0.0.1:80", "10.0.0.2:80"]).await;
    expect(&mut receiver_too, &["10.0.0.1:80", "10.0.0.2:80"]).await;
    stream
        .answer(CART, "3", delta(&["10.0.0.3:80"], &["10.0.0.1:80"]))
        .await;
    expect(&mut receiver, &["10.0.0.2:80", "10.0.0.3:80"]).await;
    // A third worker asks no controller.
    let third = soon(proxy.ask(CART)).await.expect("an answer");
    assert_eq!(addresses(&third.borrow()), ["10.0.0.2:80", "10.0.0.3:80"]);
    proxy.ask("10.96.0.9:80");
    assert_eq!(stream.request().await, "+10.96.0.9:80@");
}

#[tokio::test]
async fn the_first_connection_waits_for_an_endpoint_and_no_longer_than_for_an_answer() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(controller.address, timing());
    let mut stream = controller.stream().await;
    let first = proxy.ask(CART);
    stream.request().await;
    stream.answer(CART, "1", service(&[])).await;
    soon(async {
        while proxy.metrics.last_message_age().is_none() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let mut second = soon(proxy.ask(CART))
        .await
        .expect("who comes later learns at once that there is none");
    assert!(second.borrow().is_without_endpoint());
    assert!(!first.is_finished());
    stream.answer(CART, "2", delta(&["10.0.0.1:80"], &[])).await;
    assert_eq!(
        addresses(&soon(first).await.expect("an answer").borrow()),
        ["10.0.0.1:80"]
    );
    expect(&mut second, &["10.0.0.1:80"]).await;

    let proxy = Running::start(
        controller.address,
        Timing {
            first_answer: Duration::from_millis(50),
            ..timing()
        },
    );
    let mut stream = controller.stream().await;
    let asked = proxy.ask(CART);
    stream.request().await;
    stream.answer(CART, "1", service(&[])).await;
    let receiver = soon(asked).await.expect("an answer");
    assert!(
        addresses(&receiver.borrow())
            .iter()
            .all(|address| address == "unknown"),
        "it has waited long enough"
    );
}

#[tokio::test]
async fn a_lost_controller_leaves_what_is_known_and_is_resumed_from_there() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(controller.address, timing());
    let mut stream = controller.stream().await;
    let asked = proxy.ask(CART);
    stream.request().await;
    stream.answer(CART, "41", service(&["10.0.0.1:80"])).await;
    let mut receiver = soon(asked).await.expect("an answer");

    drop(stream);
    let address = controller.stop().await;
    let known = soon(proxy.ask(CART)).await.expect("an answer");
    assert_eq!(addresses(&known.borrow()), ["10.0.0.1:80"]);
    // What is not known is not waited for, once a try has failed.
    let unknown = soon(proxy.ask("10.96.0.9:80")).await.expect("an answer");
    assert_eq!(**unknown.borrow(), Target::Unknown);

    let mut controller = FakeController::start_at(address).await;
    let mut stream = controller.stream().await;
    let mut requests = [stream.request().await, stream.request().await];
    requests.sort();
    assert_eq!(
        requests,
        [format!("+{CART}@41"), "+10.96.0.9:80@".to_owned()]
    );
    stream
        .answer(CART, "41", Update::Unchanged(proto::Unchanged {}))
        .await;
    stream
        .answer(CART, "42", delta(&["10.0.0.2:80"], &[]))
        .await;
    expect(&mut receiver, &["10.0.0.1:80", "10.0.0.2:80"]).await;
    assert!(proxy.metrics.reconnects.get() > 0 && proxy.metrics.connected.get() == 1);
}

#[tokio::test]
async fn with_the_controller_away_from_the_start_nobody_waits_and_news_comes_later() {
    let address = FakeController::start().await.stop().await;
    let proxy = Running::start(address, timing());
    let mut receiver = soon(proxy.ask(CART)).await.expect("an answer");
    assert_eq!(**receiver.borrow(), Target::Unknown);
    assert!(!*proxy.discovery.connected_once().borrow());
    let mut controller = FakeController::start_at(address).await;
    let mut stream = controller.stream().await;
    assert_eq!(stream.request().await, format!("+{CART}@"));
    stream.answer(CART, "1", service(&["10.0.0.1:80"])).await;
    expect(&mut receiver, &["10.0.0.1:80"]).await;
    assert!(*proxy.discovery.connected_once().borrow());
    assert!(proxy.metrics.last_message_age().is_some());
}

#[tokio::test]
async fn a_controller_that_says_nothing_is_waited_for_a_bounded_time() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(
        controller.address,
        Timing {
            first_answer: Duration::from_millis(20),
            ..timing()
        },
    );
    let mut stream = controller.stream().await;
    let mut receiver = soon(proxy.ask(CART)).await.expect("no answer is one");
    assert_eq!(**receiver.borrow(), Target::Unknown);
    assert_eq!(stream.request().await, format!("+{CART}@"));
    stream.answer(CART, "1", service(&["10.0.0.1:80"])).await;
    expect(&mut receiver, &["10.0.0.1:80"]).await;
}

#[tokio::test]
async fn what_nobody_watches_is_unsubscribed_from_and_asked_anew() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(
        controller.address,
        Timing {
            idle: Duration::ZERO,
            ..timing()
        },
    );
    let mut stream = controller.stream().await;
    let asked = proxy.ask(CART);
    assert_eq!(stream.request().await, format!("+{CART}@"));
    stream.answer(CART, "1", service(&["10.0.0.1:80"])).await;
    drop(soon(asked).await.expect("an answer"));
    assert_eq!(stream.request().await, format!("-{CART}"));
    proxy.ask(CART);
    assert_eq!(stream.request().await, format!("+{CART}@"));
}

#[tokio::test]
async fn nonsense_is_ignored_and_asked_about_again() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(controller.address, timing());
    let mut stream = controller.stream().await;
    let asked = proxy.ask(CART);
    stream.request().await;
    stream
        .answer("nowhere", "1", service(&["10.0.0.1:80"]))
        .await;
    stream.answer(CART, "1", delta(&["10.0.0.1:80"], &[])).await;
    let mut receiver = soon(asked).await.expect("nobody waits after nonsense");
    assert_eq!(**receiver.borrow(), Target::Unknown);
    assert_eq!(
        [stream.request().await, stream.request().await],
        [format!("-{CART}"), format!("+{CART}@")]
    );
    stream
        .answer(CART, "2", service(&["10.0.0.1:80", "ten.0.0.2:80"]))
        .await;
    expect(&mut receiver, &["10.0.0.1:80"]).await;
    assert_eq!(proxy.metrics.broken.get(), 3);
}

#[tokio::test]
async fn over_the_limit_a_destination_is_refused() {
    let mut controller = FakeController::start().await;
    let proxy = Running::start(
        controller.address,
        Timing {
            limit: 1,
            ..timing()
        },
    );
    let mut stream = controller.stream().await;
    let asked = proxy.ask(CART);
    stream.request().await;
    stream.answer(CART, "1", service(&["10.0.0.1:80"])).await;
    let _held = soon(asked).await.expect("an answer");
    let over = soon(proxy.ask("10.96.0.9:80")).await.expect("an answer");
    assert_eq!(**over.borrow(), Target::Refused);
    assert!(
        over.has_changed().is_err(),
        "closed: whoever holds it asks again later"
    );
    assert_eq!(
        (
            proxy.metrics.refused.get(),
            proxy.metrics.subscriptions.get()
        ),
        (1, 1)
    );
}

#[tokio::test]
async fn each_try_carries_the_token_that_is_in_the_file_then() {
    let path = std::env::temp_dir().join(format!("diy-sm-discovery-token-{}", std::process::id()));
    std::fs::write(&path, "expired").expect("a file in the temporary folder");
    let mut controller = FakeController::start().await;
    let proxy = Running::start_with_token(controller.address, Some(path.clone()), timing());
    soon(async {
        while proxy.metrics.reconnects.get() < 3 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(!*proxy.discovery.connected_once().borrow());
    for token in ["first", "second"] {
        // By rename, as the kubelet does it: never half a token.
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
async fn the_task_ends_with_the_last_handle_and_discovery_that_is_off_knows_nothing() {
    let controller = FakeController::start().await;
    let control =
        Control::new(&format!("http://{}", controller.address), None, None).expect("an address");
    let (discovery, driver) = start_with(
        control,
        Trust::default(),
        crate::identity::none(),
        DiscoveryMetrics::default(),
        timing(),
    );
    let driver = tokio::spawn(driver);
    drop(discovery);
    soon(driver).await.expect("it ends well");
    let off = Discovery::off();
    let receiver = off.watch(address(CART)).await;
    assert!(
        off.is_off() && **receiver.borrow() == Target::Unknown && *off.connected_once().borrow()
    );
}

#[tokio::test]
async fn when_nobody_answers_any_more_a_destination_is_refused() {
    let (discovery, questions) = Discovery::by_hand();
    drop(questions);
    assert!(!discovery.is_off());
    assert_eq!(
        **discovery.watch(address(CART)).await.borrow(),
        Target::Refused
    );
}

#[test]
fn tries_are_spread_and_get_rarer_up_to_a_bound() {
    let bounds = Timing::default().backoff;
    let ceilings: Vec<_> = (0..11)
        .map(|failures| backoff(bounds, failures, 1.0).as_millis())
        .collect();
    assert_eq!(
        ceilings,
        [
            100, 100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000, 10_000
        ]
    );
    assert_eq!(backoff(bounds, u32::MAX, 1.0), Duration::from_secs(10));
    assert_eq!(backoff(bounds, 5, 0.0), Duration::ZERO);
}

#[test]
fn the_log_hears_of_a_trouble_once_in_a_while() {
    let (mut quiet, mut told) = (Quiet::default(), Vec::new());
    for _ in 0..1000 {
        quiet.now_and_then(Trouble::Broken, |times| told.push(times));
    }
    quiet.now_and_then(Trouble::Full, |times| told.push(times));
    assert_eq!(told, [1, 1]);
}
