//! The state of proxies without sockets.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::SystemTime;

use diy_mesh_model::exchange::Direction;
use tokio::task::LocalSet;

use super::*;
use crate::context::worker::WorkerContext;
use crate::observe::exceptions::Event;
use crate::secure::identity::testing::{Authority, WEB};
use crate::secure::tls::tests::credentials;

/// The proxy, and the questions to its workers.
fn proxy(workers: usize) -> (States, Vec<mpsc::Receiver<Question>>) {
    let (workers, questions) = (0..workers).map(|_| mpsc::channel(1)).unzip();
    let states = States {
        pod: "shop/web-1".into(),
        credentials: crate::secure::identity::none(),
        identity: IdentityMetrics::default(),
        discovery: Discovery::off(),
        workers,
        exceptions: Arc::new(Exceptions::new(Instant::now())),
        turn: Mutex::default(),
    };
    (states, questions)
}

/// A worker that answers.
fn maintained(questions: mpsc::Receiver<Question>) -> Rc<Worker> {
    let worker = Worker::new(WorkerContext {
        questions,
        ..WorkerContext::for_a_test("")
    });
    let maintained = worker.clone();
    tokio::task::spawn_local(async move { maintained.maintain_until_drained().await });
    worker
}

async fn state(states: &States, query: &str) -> State {
    let json = states.json(query).await.expect("a state");
    assert!(json.len() < 1 << 20, "{} bytes", json.len());
    serde_json::from_str(&json).expect("a state")
}

fn address(number: u16) -> SocketAddr {
    ([10, 1, (number >> 8) as u8, number as u8], 8080).into()
}

#[tokio::test(start_paused = true)]
async fn workers_that_do_not_answer_are_counted() {
    let (states, questions) = proxy(3);
    let mut questions = questions.into_iter();
    let [first, _stalled, ended] = [(); 3].map(|()| questions.next().expect("a worker"));
    drop(ended);
    let test = async {
        let worker = maintained(first);
        let _app = worker.apps.fixed(address(1));
        let _open = worker.admit(Direction::Inbound, [10, 0, 0, 1].into());
        // The second time, the earlier question is still in the queue.
        for _ in 0..2 {
            let state = state(&states, "").await;
            assert_eq!((state.workers.len(), state.silent_workers), (1, 2));
            assert_eq!((&*state.pod, state.discovery), ("shop/web-1", None));
            let worker = &state.workers[0];
            assert_eq!((worker.connections, worker.max_connections), (1, 1000));
            let app = &worker.destinations.items[0];
            assert_eq!((app.inbound, &*app.name), (true, "10.1.0.1:8080"));
        }
    };
    LocalSet::new().run_until(test).await;
}

#[tokio::test]
async fn destinations_are_cut_unless_one_is_asked_for() {
    let (states, mut questions) = proxy(1);
    let test = async {
        let worker = maintained(questions.remove(0));
        let _apps: Vec<_> = (0..5000).map(|at| worker.apps.fixed(address(at))).collect();
        let all = &state(&states, "").await.workers[0].destinations;
        assert_eq!(all.items.len() + all.omitted, 5000);
        assert!(
            all.items.len() > 500 && all.omitted > 500,
            "{}",
            all.items.len()
        );
        let one = state(&states, "destination=10.1.9.9:8080").await;
        let one = &one.workers[0].destinations;
        assert_eq!((one.items.len(), one.omitted), (1, 0));
        assert_eq!(one.items[0].name, "10.1.9.9:8080");
        let none = state(&states, "destination=shop/none").await;
        assert_eq!(none.workers[0].destinations, Cut::default());
    };
    LocalSet::new().run_until(test).await;
}

#[tokio::test(start_paused = true)]
async fn one_client_is_answered_at_a_time() {
    let (states, _questions) = proxy(0);
    let turn = states.turn.lock().await;
    let refused = states
        .json("")
        .await
        .expect_err("another client has its turn");
    assert_eq!(refused.0, StatusCode::SERVICE_UNAVAILABLE);
    drop(turn);
    assert!(states.json("").await.is_ok());
}

#[tokio::test]
async fn certificate_is_told_without_its_key() {
    let (mut states, _questions) = proxy(0);
    assert_eq!(state(&states, "").await.certificate, None);
    let authority = Authority::new("root");
    let credentials = credentials(&authority, WEB, |_| {});
    states.credentials = tokio::sync::watch::channel(Some(credentials)).1;
    let certificate = state(&states, "").await.certificate.expect("a certificate");
    assert_eq!((&*certificate.identity, certificate.trust_roots), (WEB, 1));
    assert!(certificate.not_after.ends_with('Z'), "{certificate:?}");
}

#[tokio::test]
async fn failed_probes_are_told() {
    let (states, _questions) = proxy(0);
    let probe = Event {
        kind: Kind::Probe,
        destination: "HTTP GET /hello on port 8080",
        endpoint: "",
        reason: "status-500",
    };
    let other = Event {
        kind: Kind::Requests,
        ..probe
    };
    for event in [probe, probe, other] {
        states.exceptions.record(event, 1, Instant::now());
    }
    let failed = state(&states, "").await.failed_probes;
    let expected = "2 of 2 failed, HTTP GET /hello on port 8080: status-500";
    assert_eq!(failed, [expected]);
}

#[tokio::test]
async fn failed_renewal_is_told_until_there_is_a_certificate() {
    let (states, _questions) = proxy(0);
    states.identity.failed("no controller".to_owned());
    let failure = async || state(&states, "").await.certificate_failure;
    assert_eq!(failure().await.as_deref(), Some("no controller"));
    states.identity.issued(SystemTime::now());
    assert_eq!(failure().await, None);
}

#[tokio::test]
async fn other_queries_are_refused() {
    let (states, _questions) = proxy(0);
    for query in ["a", "a=b", "=", "destination"] {
        let refused = states.json(query).await.expect_err(query);
        assert_eq!(refused.0, StatusCode::BAD_REQUEST, "{query}");
    }
}
