//! Attempts and retries of requests that need no network.

use super::*;
use crate::balance::Backend;
use crate::balance::policy::BackendPolicy;
use crate::balance::{BreakerSettings, BudgetSettings};
use crate::discovery::{Discovery, EndpointInfo, Target, TargetKind};
use crate::metrics::Metrics;
use crate::policy::Caller;
use crate::worker::{Worker, WorkerContext};

/// Fails as often as it has errors, then succeeds, or never ends.
struct Scripted {
    attempts: Attempts,
    errors: Vec<Retry>,
    can_rewind: bool,
    hangs: bool,
}

impl Forward for Scripted {
    type Outcome = ();

    fn authorize(&mut self, _: &Flow) -> Result<(), Failure> {
        Ok(())
    }

    fn attempts(&mut self) -> &mut Attempts {
        &mut self.attempts
    }

    async fn attempt(&mut self, _: &Flow, endpoint: &Rc<Endpoint>) -> Result<(), AttemptError> {
        match self.errors.pop() {
            None if self.hangs => std::future::pending().await,
            None => Ok(()),
            Some(retry) => {
                let failure = Failure::ConnectTimeout(endpoint.address);
                Err(AttemptError { failure, retry })
            }
        }
    }

    fn rewind(&mut self) -> bool {
        self.can_rewind
    }
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

async fn run(mut request: Scripted) -> (Result<(), String>, u32, bool) {
    let address = SocketAddr::from(([127, 0, 0, 1], 80));
    let worker = Worker::new(WorkerContext::for_a_test(""));
    let flow = Flow {
        called_by: Default::default(),
        slot: worker.slot(),
        worker,
        direction: Direction::Outbound,
        peer: address,
        original: address,
        destination: Backend::alone(address),
        caller: Caller::App,
    };
    let backend = &flow.destination;
    let result = forward(&mut request, &flow, backend).await;
    let endpoint = backend
        .pick(&[], &mut fastrand::Rng::new())
        .expect("it is fixed");
    let result = result.map_err(|failure| failure.code().label().to_owned());
    (
        result,
        request.attempts.count,
        endpoint.is_quarantined(Instant::now()),
    )
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
    let scripted = |attempts| Scripted {
        attempts,
        ..failing(vec![Retry::AnyEndpoint])
    };
    let deadline = |seconds| Attempts {
        exchange_deadline: Deadline::after(Some(Duration::from_secs(seconds)), Limit::Exchange),
        ..Attempts::default()
    };
    let retried_before = Attempts {
        previous: 1,
        ..Attempts::default()
    };
    let failed = Err("connect-timeout".to_owned());
    for (attempts, expected) in [
        (retried_before, (failed.clone(), 1, false)),
        (deadline(0), (failed, 1, false)),
        (deadline(1), (Ok(()), 2, false)),
    ] {
        assert_eq!(run(scripted(attempts)).await, expected);
    }
}

#[tokio::test]
async fn announces_as_many_previous_attempts_as_fit() {
    let address = SocketAddr::from(([127, 0, 0, 1], 80));
    let backend = Backend::alone(address);
    for (previous, count, expected) in [
        (0, 1, None),
        (0, 2, Some(1)),
        (3, 2, Some(4)),
        (u32::MAX, 2, Some(u32::MAX)),
    ] {
        let attempts = Attempts {
            previous,
            count,
            last: backend.pick(&[], &mut fastrand::Rng::new()).ok(),
            ..Attempts::default()
        };
        assert_eq!(attempts.announced(true), expected);
        assert_eq!(attempts.announced(false), None);
    }
}

/// A request whose attempts end with these errors.
fn failing(errors: Vec<Retry>) -> Scripted {
    Scripted {
        attempts: Attempts::default(),
        errors,
        can_rewind: true,
        hangs: false,
    }
}

/// A request whose attempts never end.
fn hanging(attempts: Attempts) -> Scripted {
    Scripted {
        attempts,
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
        endpoint(number).begin().answered(overload);
    }
    let mut attempts = Attempts {
        backend: Some(backend.clone()),
        ..Attempts::default()
    };
    attempts.begin(&endpoint(1), Duration::ZERO);
    let replayable = Replayable {
        is_kept: true,
        ..Replayable::ONCE
    };
    let error = attempts
        .answered(429, overload, replayable, &flow)
        .unwrap_err();
    assert_eq!(error.retry, Retry::OtherEndpoint);
    assert_eq!(attempts.avoided.tried, [address(0x0a00_0001)]);
    let picked = pick(&flow, backend, &attempts);
    assert_eq!(picked.unwrap().address, address(0x0a00_0000 + 1000));
}

/// Sends 1000 requests to three endpoints, none of which answers. Returns the attempts and the
/// metrics.
async fn fail_all(request: impl Fn() -> Scripted, policy: BackendPolicy) -> (u32, String) {
    let (flow, metrics) = flow_to(3, policy).await;
    let mut attempts = 0;
    for _ in 0..1000 {
        let mut request = request();
        let backend = &flow.destination;
        forward(&mut request, &flow, backend)
            .await
            .expect_err("no endpoint");
        attempts += request.attempts.count;
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
    // What a route retries is a failure too.
    let retried = || {
        hanging(Attempts {
            attempt_timeout: Some(Duration::from_secs(1)),
            policy: Some(Arc::new(RetryPolicy {
                statuses: Vec::new(),
                attempts: 2,
                backoff: Duration::ZERO,
            })),
            ..Attempts::default()
        })
    };
    assert_eq!(fail_all(retried, policy()).await.0, 20);
    let slow = || {
        hanging(Attempts {
            exchange_deadline: Deadline::after(Some(Duration::from_secs(1)), Limit::Exchange),
            ..Attempts::default()
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
    let request = hanging(Attempts {
        exchange_deadline: Deadline::after(Some(4 * SECOND), Limit::Exchange),
        attempt_timeout: Some(SECOND),
        policy: Some(Arc::new(policy)),
        ..Attempts::default()
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
        let request = hanging(Attempts {
            exchange_deadline: Deadline::after(exchange, Limit::Exchange),
            attempt_timeout: attempt,
            ..Attempts::default()
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
