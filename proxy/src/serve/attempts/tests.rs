//! Attempts and retries of requests that need no network.

use crate::route::{AttemptSettings, RetryPolicy};
use std::pin::pin;

use super::*;
use crate::context::worker::{Worker, WorkerContext};
use crate::discovery::{Discovery, Target, TargetKind};
use crate::endpoint::EndpointInfo;
use crate::inbound::policy::Caller;
use crate::observe::metrics::Metrics;
use crate::upstream::balance::policy::BackendPolicy;
use crate::upstream::balance::{Backend, BreakerSettings, BudgetSettings};

/// A request whose attempts fail as often as it has errors, then succeed or never end.
#[derive(Clone)]
struct Scripted {
    settings: AttemptSettings,
    errors: Vec<Retry>,
    can_rewind: bool,
    hangs: bool,
}

impl Scripted {
    /// The result, and the number of attempts.
    async fn send(mut self, flow: &Flow, backend: &Rc<Backend>) -> (Result<(), Failure>, u32) {
        let mut attempts = new(flow, backend, self.settings.clone());
        for count in 1.. {
            let attempt = match attempts.begin(flow) {
                Ok(attempt) => attempt,
                Err(failure) => return (Err(failure), count - 1),
            };
            let (deadline, address) = (attempt.deadline(), attempt.endpoint.address);
            let sent = deadline.limit(pin!(self.attempt(address))).await;
            let Err(error) = sent else {
                return (Ok(()), count);
            };
            match attempt.next(error, flow, || self.can_rewind) {
                Step::Retry(backoff, _) => pause(backoff).await,
                Step::Done(failure) => return (Err(failure), count),
            }
        }
        unreachable!("it has a maximum");
    }

    async fn attempt(&mut self, address: SocketAddr) -> Result<(), AttemptError> {
        match self.errors.pop() {
            None if self.hangs => std::future::pending().await,
            None => Ok(()),
            Some(retry) => {
                let failure = Failure::ConnectTimeout(address);
                Err(AttemptError { failure, retry })
            }
        }
    }
}

fn new(flow: &Flow, backend: &Rc<Backend>, settings: AttemptSettings) -> Attempts {
    let permit = flow.authorize_connection().expect("the own application");
    Attempts::new(flow, backend, settings, permit)
}

/// Sends to a destination with one endpoint: the result, the attempts, and whether it is
/// quarantined.
async fn send(errors: &[Retry], can_rewind: bool) -> (Result<(), String>, u32, bool) {
    let request = Scripted {
        can_rewind,
        ..failing(errors.to_vec())
    };
    run(request).await
}

/// A flow to a destination with one endpoint.
fn flow_to_one() -> Flow {
    let address = SocketAddr::from(([127, 0, 0, 1], 80));
    let worker = Worker::new(WorkerContext::for_a_test(""));
    Flow {
        called_by: Default::default(),
        counted: Default::default(),
        slot: worker.slot(),
        worker,
        direction: Direction::Outbound,
        peer: address,
        original: address,
        destination: Backend::alone(address),
        caller: Caller::App,
    }
}

async fn run(request: Scripted) -> (Result<(), String>, u32, bool) {
    let flow = flow_to_one();
    let (result, count) = request.send(&flow, &flow.destination).await;
    let endpoint = flow
        .destination
        .pick(&[], &mut fastrand::Rng::new())
        .expect("it is fixed");
    let result = result.map_err(|failure| failure.code().label().to_owned());
    (result, count, endpoint.is_quarantined(Instant::now()))
}

#[tokio::test]
async fn retries_only_what_is_safe_and_at_most_three_times() {
    use Retry::{AnyEndpoint, Never};
    let failed = || Err("connect-timeout".to_owned());
    assert_eq!(send(&[], true).await, (Ok(()), 1, false));
    assert_eq!(
        send(&[AnyEndpoint, AnyEndpoint], true).await,
        (Ok(()), 3, false)
    );
    assert_eq!(send(&[AnyEndpoint; 3], true).await, (failed(), 3, false));
    assert_eq!(send(&[AnyEndpoint], false).await, (failed(), 1, false));
    assert_eq!(send(&[Never], true).await, (failed(), 1, false));
}

#[tokio::test(start_paused = true)]
async fn retries_nothing_that_was_retried_before_or_cannot_finish() {
    let scripted = |settings| Scripted {
        settings,
        ..failing(vec![Retry::AnyEndpoint])
    };
    let deadline = |seconds| AttemptSettings {
        deadline: Deadline::after(Some(Duration::from_secs(seconds)), Limit::Exchange),
        ..AttemptSettings::default()
    };
    let retried_before = AttemptSettings {
        previous: 1,
        ..AttemptSettings::default()
    };
    let failed = Err("connect-timeout".to_owned());
    for (settings, expected) in [
        (retried_before, (failed.clone(), 1, false)),
        (deadline(0), (failed, 1, false)),
        (deadline(1), (Ok(()), 2, false)),
    ] {
        assert_eq!(run(scripted(settings)).await, expected);
    }
}

#[tokio::test]
async fn announces_as_many_previous_attempts_as_fit() {
    let flow = flow_to_one();
    for (previous, count, expected) in [(0, 1, 0), (0, 2, 1), (3, 2, 4), (u32::MAX, 2, u32::MAX)] {
        let settings = AttemptSettings {
            previous,
            ..AttemptSettings::default()
        };
        let mut attempts = new(&flow, &flow.destination, settings);
        attempts.failures = vec![Failure::RequestTimeout; count - 1];
        let attempt = attempts.begin(&flow).expect("it is fixed");
        let id = flow.new_exchange();
        let announced = attempt.announced(true, id).expect("a proxy reads it");
        assert_eq!(announced.attempts, expected);
        assert_eq!(announced.exchange, Some(id));
        assert_eq!(attempt.announced(false, id), None);
    }
}

/// A request whose attempts end with these errors.
fn failing(errors: Vec<Retry>) -> Scripted {
    Scripted {
        settings: AttemptSettings::default(),
        errors,
        can_rewind: true,
        hangs: false,
    }
}

/// A request whose attempts never end.
fn hanging(settings: AttemptSettings) -> Scripted {
    Scripted {
        settings,
        hangs: true,
        ..failing(Vec::new())
    }
}

/// A connection to a Service with so many endpoints, and the metrics of its proxy.
async fn flow_to(endpoints: u32, policy: BackendPolicy) -> (Flow, Arc<Metrics>) {
    let (discovery, mut questions) = Discovery::by_hand();
    let context = WorkerContext {
        discovery,
        ..WorkerContext::for_a_test("")
    };
    let metrics = context.metrics.clone();
    let worker = Worker::new(context);
    let endpoint = |number| {
        let ip = std::net::Ipv4Addr::from_bits(0x0a00_0000 + number);
        Arc::new(EndpointInfo::bare((ip, 80).into()))
    };
    let target = Target {
        kind: TargetKind::Service,
        endpoints: (1..=endpoints).map(endpoint).collect(),
        policy: Arc::new(policy),
        ..Target::default()
    };
    let address = SocketAddr::from(([10, 96, 0, 7], 80));
    let (destination, ()) = tokio::join!(worker.destinations.get_or_watch(address), async {
        drop(questions.next().await.1(Arc::new(target)));
    });
    let flow = Flow {
        called_by: Default::default(),
        counted: Default::default(),
        slot: worker.slot(),
        worker,
        direction: Direction::Outbound,
        peer: address,
        original: destination.address().unwrap(),
        destination,
        caller: Caller::App,
    };
    (flow, metrics)
}

#[tokio::test]
async fn retry_finds_the_endpoint_that_does_not_refuse_it_without_a_list_of_the_others() {
    let (flow, _) = flow_to(1000, BackendPolicy::default()).await;
    let backend = &flow.destination;
    let address = |number| SocketAddr::from((std::net::Ipv4Addr::from_bits(number), 80));
    let endpoint = |number: u32| backend.endpoint(address(0x0a00_0000 + number)).unwrap();
    let overload = Verdict::Overloaded(Overload {
        retry: Retryable::All,
        retry_after: Duration::from_secs(600),
    });
    for number in 1..1000 {
        endpoint(number).begin(Instant::now()).answered(overload);
    }
    let mut attempts = new(&flow, backend, AttemptSettings::default());
    let mut attempt = Attempt {
        endpoint: endpoint(1),
        in_flight: endpoint(1).begin(Instant::now()),
        outside: None,
        attempts: &mut attempts,
        began: tokio::time::Instant::now(),
        connect_timeout: Duration::ZERO,
    };
    let replayable = Replayable {
        is_kept: true,
        ..Replayable::ONCE
    };
    let error = attempt
        .answered(429, overload, replayable, &flow)
        .unwrap_err();
    assert_eq!(error.retry, Retry::OtherEndpoint);
    assert_eq!(attempts.avoided.tried, [address(0x0a00_0001)]);
    let picked = attempts.pick(&flow, Instant::now());
    assert_eq!(picked.unwrap().address, address(0x0a00_0000 + 1000));
}

#[tokio::test(start_paused = true)]
async fn failure_of_an_attempt_leads_to_a_step() {
    use Retry::{AnyEndpoint, Never, OtherEndpoint};
    let backoff = Duration::from_millis(25);
    let route = RetryPolicy {
        statuses: Vec::new(),
        attempts: 1,
        backoff,
    };
    let (route, address) = (Some(Arc::new(route)), SocketAddr::from(([10, 0, 0, 1], 80)));
    let closed = || AttemptError::closed(address, String::new(), false);
    let with = |failure, retry| AttemptError { failure, retry };
    let refused = || with(Failure::ConnectTimeout(address), OtherEndpoint);
    let at_deadline = || AttemptError::from(Limit::Attempt);
    let retried = |after: Option<Duration>| format!("retry after {after:?}");
    for (error, retries, can_rewind, expected) in [
        (refused(), None, true, retried(None)),
        (refused(), None, false, "connect-timeout".to_owned()),
        (refused(), route.clone(), true, retried(Some(backoff))),
        (closed(), None, true, "upstream-closed".to_owned()),
        (closed(), route.clone(), true, retried(Some(backoff))),
        (closed(), route.clone(), false, "upstream-closed".to_owned()),
        (at_deadline(), None, true, "timeout".to_owned()),
        (at_deadline(), route.clone(), true, retried(Some(backoff))),
        (Limit::Exchange.into(), route, true, "timeout".to_owned()),
        (
            with(Failure::MemoryExhausted, Never),
            None,
            true,
            "memory-exhausted".to_owned(),
        ),
        (
            with(Failure::MemoryExhausted, AnyEndpoint),
            None,
            true,
            retried(None),
        ),
    ] {
        let (flow, _) = flow_to(3, BackendPolicy::default()).await;
        let text = format!("{error:?}, rewinds: {can_rewind}");
        let settings = AttemptSettings {
            retries,
            ..AttemptSettings::default()
        };
        let mut attempts = new(&flow, &flow.destination, settings);
        let attempt = attempts.begin(&flow).expect("an endpoint");
        let step = match attempt.next(error, &flow, || can_rewind) {
            Step::Done(failure) => failure.code().label().to_owned(),
            Step::Retry(after, _) => retried(after),
        };
        assert_eq!(step, expected, "{text}");
    }
}

#[tokio::test]
async fn attempts_at_endpoints_of_unready_nodes_are_counted() {
    for (node_unready, expected) in [(false, 0), (true, 1)] {
        let (flow, metrics) = flow_to(1, BackendPolicy::default()).await;
        let endpoint = flow.destination.pick(&[], &mut fastrand::Rng::new());
        endpoint.expect("one").node_unready.set(node_unready);
        let mut attempts = new(&flow, &flow.destination, AttemptSettings::default());
        drop(attempts.begin(&flow).expect("an endpoint"));
        assert_eq!(metrics.last_resorts.get(), expected);
    }
}

/// Sends 1000 requests to three endpoints that do not answer. Returns the attempts and the metrics.
async fn fail_all(request: impl Fn() -> Scripted, policy: BackendPolicy) -> (u32, String) {
    let (flow, metrics) = flow_to(3, policy).await;
    let mut attempts = 0;
    for _ in 0..1000 {
        let (result, count) = request().send(&flow, &flow.destination).await;
        result.expect_err("no endpoint");
        attempts += count;
    }
    (attempts, metrics.render())
}

#[tokio::test(start_paused = true)]
async fn outage_of_all_endpoints_adds_at_most_a_fifth_of_the_requests() {
    for error in [Retry::OtherEndpoint, Retry::AnyEndpoint] {
        let (attempts, metrics) =
            fail_all(|| failing(vec![error; 3]), BackendPolicy::default()).await;
        assert_eq!(attempts, 1000 + 200 + 10, "{error:?}");
        let retries = "diy_mesh_proxy_retries_total{direction=\"outbound\"} 210\n";
        assert!(metrics.contains(retries), "{metrics}");
        let policy = BackendPolicy {
            budget: Some(BudgetSettings {
                percent: 5,
                min_per_second: 2,
            }),
            ..BackendPolicy::default()
        };
        let (attempts, _) = fail_all(|| failing(vec![error; 3]), policy).await;
        assert_eq!(attempts, 1000 + 50 + 20, "{error:?} with a policy");
        let denied =
            "diy_mesh_proxy_retries_denied_total{direction=\"outbound\",reason=\"budget\"} ";
        assert!(!metrics.contains(&format!("{denied}0\n")), "{metrics}");
    }
}

#[tokio::test(start_paused = true)]
async fn open_circuit_ends_attempts_and_retries() {
    let policy = || BackendPolicy {
        name: "TrafficPolicy shop/web".to_owned(),
        breaker: Some(BreakerSettings {
            failure_percent: 50,
            min_requests: 20,
            interval: Duration::from_secs(3600),
            open_time: Duration::from_secs(3600),
        }),
        ..BackendPolicy::default()
    };
    for error in [Retry::OtherEndpoint, Retry::Never] {
        let (attempts, metrics) = fail_all(|| failing(vec![error; 3]), policy()).await;
        assert_eq!(attempts, 20, "{error:?}");
        for gauge in ["circuits_open", "circuits_opened_total"] {
            let expected = format!("{gauge}{{direction=\"outbound\"}} 1\n");
            assert!(metrics.contains(&expected), "{expected}: {metrics}");
        }
        let denied = "{direction=\"outbound\",reason=\"circuit-open\"} ";
        let denied = metrics.contains(&format!("{denied}1\n"));
        assert_eq!(denied, error == Retry::OtherEndpoint, "{metrics}");
    }
    // A response that a route retries is a failure too.
    let retried = || {
        hanging(AttemptSettings {
            timeout: Some(Duration::from_secs(1)),
            retries: Some(Arc::new(RetryPolicy {
                statuses: Vec::new(),
                attempts: 2,
                backoff: Duration::ZERO,
            })),
            ..AttemptSettings::default()
        })
    };
    assert_eq!(fail_all(retried, policy()).await.0, 20);
    let slow = || {
        hanging(AttemptSettings {
            deadline: Deadline::after(Some(Duration::from_secs(1)), Limit::Exchange),
            ..AttemptSettings::default()
        })
    };
    assert_eq!(fail_all(slow, policy()).await.0, 20);
}

#[tokio::test(start_paused = true)]
async fn attempts_together_take_no_longer_than_the_exchange() {
    const SECOND: Duration = Duration::from_secs(1);
    let policy = RetryPolicy {
        statuses: vec![504],
        attempts: 5,
        backoff: SECOND / 2,
    };
    let request = hanging(AttemptSettings {
        deadline: Deadline::after(Some(4 * SECOND), Limit::Exchange),
        timeout: Some(SECOND),
        retries: Some(Arc::new(policy)),
        ..AttemptSettings::default()
    });
    let began = tokio::time::Instant::now();
    let ended = run(request).await;
    assert_eq!(ended.0, Err("timeout".to_owned()));
    // At 0, 1.5 and 3 s: no endpoint is known to answer in less than the time that is left.
    assert_eq!((ended.1, began.elapsed()), (3, 4 * SECOND));
}

#[tokio::test(start_paused = true)]
async fn deadlines_of_exchange_and_attempt_end_it() {
    const SECOND: Duration = Duration::from_secs(1);
    for (exchange, attempt) in [
        (None, Some(SECOND)),
        (Some(SECOND), None),
        (Some(2 * SECOND), Some(SECOND)),
    ] {
        let request = hanging(AttemptSettings {
            deadline: Deadline::after(exchange, Limit::Exchange),
            timeout: attempt,
            ..AttemptSettings::default()
        });
        let began = tokio::time::Instant::now();
        let ended = run(request).await;
        assert_eq!(ended.0, Err("timeout".to_owned()));
        assert_eq!((ended.1, began.elapsed().as_secs()), (1, 1));
    }
}

#[tokio::test]
async fn reports_the_last_failure_when_no_endpoint_is_left() {
    let result = send(&[Retry::OtherEndpoint; 3], true).await;
    assert_eq!(result, (Err("connect-timeout".to_owned()), 1, true));
}

#[tokio::test(start_paused = true)]
async fn endpoints_that_are_removed_while_they_are_dialed_count_for_no_attempt() {
    let flow = flow_to_one();
    let removed = Backend::alone(([127, 0, 0, 1], 81).into());
    let removed = removed.pick(&[], &mut fastrand::Rng::new()).unwrap();
    let mut attempts = new(&flow, &flow.destination, AttemptSettings::default());
    let half_a_second = Duration::from_millis(500);
    // The time to connect is three seconds.
    for count in 1..=6 {
        let mut attempt = attempts.begin(&flow).unwrap();
        assert!(attempt.check_endpoint().is_ok());
        attempt.endpoint = removed.clone();
        tokio::time::advance(half_a_second).await;
        let error = attempt.check_endpoint().unwrap_err();
        match attempt.next(error, &flow, || true) {
            Step::Retry(None, _) if count < 6 => {}
            Step::Done(failure) if count == 6 => {
                let message =
                    "127.0.0.1:80 has removed 127.0.0.1:81 while the proxy connected to it";
                assert_eq!(failure.to_string(), message);
                assert_eq!(failure.code().label(), "no-endpoint");
            }
            step => panic!("{count}: {step:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn slow_attempt_leaves_the_next_ones_their_share_of_the_time_to_connect() {
    let (flow, _) = flow_to(9, BackendPolicy::default()).await;
    let mut attempts = new(&flow, &flow.destination, AttemptSettings::default());
    for seconds in [2, 3] {
        let attempt = attempts.begin(&flow).unwrap();
        assert_eq!(attempt.connect_timeout, Duration::from_secs(1));
        tokio::time::advance(Duration::from_secs(seconds)).await;
        let error = AttemptError {
            failure: Failure::UpstreamOverloaded(attempt.endpoint.address),
            retry: Retry::OtherEndpoint,
        };
        assert!(matches!(
            attempt.next(error, &flow, || true),
            Step::Retry(..)
        ));
    }
    let attempt = attempts.begin(&flow).unwrap();
    assert_eq!(attempt.connect_timeout, Duration::from_secs(1));
}
