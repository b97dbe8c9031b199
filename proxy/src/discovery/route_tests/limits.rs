//! Tests of rate limits, from the controller's message to the response.

use std::time::{Duration, Instant};

use proto::rate_limit::Scope;

use super::pod::Pod;
use super::*;
use crate::inbound::limit::{By, RateLimits, Stage};
use crate::route::matching::MatchInput;

fn limit(name: &str, scope: Scope, requests: u64, port: u16) -> proto::RateLimit {
    proto::RateLimit {
        name: name.to_owned(),
        ports: vec![port.into()],
        scope: scope.into(),
        requests,
        // Longer than a test.
        window: 3_600_000,
        replicas: 1,
        ..proto::RateLimit::default()
    }
}

impl Pod {
    /// Applies a message of the controller. Returns the rejection.
    async fn apply(&mut self, rate_limits: Vec<proto::RateLimit>) -> String {
        self.configure(proto::Workload {
            rate_limits,
            ..proto::Workload::default()
        })
        .await
    }
}

const OK: &str = "HTTP/1.1 200 OK\r\n";
const LIMITED: &str = "HTTP/1.1 429 Too Many Requests\r\n";

#[test]
fn each_caller_gets_its_burst_and_others_are_not_affected() {
    on_worker(async {
        let (app, requests) = app("web").await;
        let mut pod = Pod::new(app);
        let name = "TrafficPolicy shop/web/per-caller";
        assert_eq!(
            pod.apply(vec![limit(name, Scope::Caller, 2, app.port())])
                .await,
            ""
        );
        for account in [Some("a"), Some("b"), None] {
            for _ in 0..2 {
                let response = pod.http1(account, "/").await;
                assert!(response.starts_with(OK), "{account:?}: {response}");
            }
            let response = pod.http1(account, "/").await;
            assert!(response.starts_with(LIMITED), "{account:?}: {response}");
            assert!(
                response.contains("x-mesh-error: rate-limited\r\n"),
                "{response}"
            );
            assert!(response.contains(name), "{response}");
            let (_, after) = response.split_once("retry-after: ").expect("Retry-After");
            let seconds: u64 = after.split_once("\r\n").unwrap().0.parse().unwrap();
            assert!((1700..=1800).contains(&seconds), "{seconds}");
        }
        assert_eq!(requests.borrow().len(), 6);
        let metrics = pod.worker.metrics.render();
        for line in [
            format!("rate_limited_total{{per=\"caller\",policy=\"{name}\"}} 3\n"),
            "failures_total{direction=\"inbound\",code=\"rate-limited\"} 3\n".to_owned(),
        ] {
            assert!(metrics.contains(&line), "{line}: {metrics}");
        }
    });
}

#[test]
fn http2_and_grpc_requests_share_the_bucket_with_http1() {
    on_worker(async {
        let (app, requests) = app2("web").await;
        let mut pod = Pod::new(app);
        let call = || {
            let call = Request::post("http://web/a.B/C").header("content-type", "application/grpc");
            call.body(()).unwrap()
        };
        let mut all = limit("all", Scope::Service, 2, app.port());
        all.matches = vec![prefix("/a.B", 0)];
        assert_eq!(pod.apply(vec![all]).await, "");
        for account in [Some("a"), Some("b")] {
            let fields = pod.http2(account, call()).await;
            assert!(!fields.contains_key("grpc-status"), "{fields:?}");
        }
        let fields = pod.http2(Some("c"), call()).await;
        assert_eq!(fields["grpc-status"], "8");
        assert_eq!(fields["x-mesh-error"], "rate-limited");
        let pushback: u64 = fields["grpc-retry-pushback-ms"]
            .to_str()
            .unwrap()
            .parse()
            .unwrap();
        assert!(pushback > 1_700_000, "{pushback}");
        let response = pod.http1(None, "/a.B/C").await;
        assert!(response.starts_with(LIMITED), "{response}");
        let plain = Request::get("http://web/other").body(()).unwrap();
        let fields = pod.http2(Some("c"), plain).await;
        assert!(!fields.contains_key("x-mesh-error"), "{fields:?}");
        until(|| requests.borrow().len() == 3).await;
    });
}

#[test]
fn new_replicas_change_the_rate_and_not_the_fill() {
    on_worker(async {
        let (app, _) = app("web").await;
        let mut pod = Pod::new(app);
        let of = |replicas| proto::RateLimit {
            replicas,
            ..limit("all", Scope::Service, 4, app.port())
        };
        assert_eq!(pod.apply(vec![of(1)]).await, "");
        assert!(pod.http1(None, "/").await.starts_with(OK));
        let before = pod.worker.policy().rate_limits.clone();
        assert_eq!(pod.apply(vec![of(2)]).await, "");
        until(|| pod.worker.policy().rate_limits != before).await;
        // Three quarters of the bucket are left: one of two requests, and a half.
        assert!(pod.http1(None, "/").await.starts_with(OK));
        assert!(pod.http1(None, "/").await.starts_with(LIMITED));
        assert_eq!(pod.apply(Vec::new()).await, "");
        assert!(pod.http1(None, "/").await.starts_with(OK));
    });
}

#[test]
fn limits_that_cannot_be_interpreted_leave_the_previous_ones_in_force() {
    on_worker(async {
        let (app, _) = app("web").await;
        let mut pod = Pod::new(app);
        let good = limit("all", Scope::Service, 1, app.port());
        assert_eq!(pod.apply(vec![good.clone()]).await, "");
        let with = |change: fn(&mut proto::RateLimit)| {
            let mut one = good.clone();
            change(&mut one);
            vec![good.clone(), one]
        };
        for (limits, expected) in [
            (with(|one| one.scope = 7), "rate limit 1 (all): per"),
            (with(|one| one.scope = 0), "rate limit 1 (all): per"),
            (with(|one| one.requests = 0), "rate limit 1 (all): requests"),
            (
                with(|one| one.window = u64::MAX),
                "rate limit 1 (all): window",
            ),
            (
                with(|one| one.burst = u64::MAX),
                "rate limit 1 (all): burst",
            ),
            (with(|one| one.replicas = 0), "0 replicas"),
            (with(|one| one.ports = vec![65_536]), "port 65536"),
            (with(|one| one.ports = vec![80; 257]), "257 ports"),
            (vec![good.clone(); 257], "257 rate limits"),
            (
                with(|one| {
                    let unknown = Some(proto::PathMatch { kind: None });
                    one.matches = vec![proto::RouteMatch {
                        path: unknown,
                        ..proto::RouteMatch::default()
                    }];
                }),
                "match 0: path.type: \"\" is not",
            ),
        ] {
            let rejection = pod.apply(limits).await;
            assert!(rejection.contains(expected), "{expected}: {rejection}");
        }
        assert!(pod.http1(None, "/").await.starts_with(OK));
        assert!(pod.http1(None, "/").await.starts_with(LIMITED));
    });
}

#[test]
fn one_policy_of_two_services_has_a_bucket_for_each() {
    let all = limit("all", Scope::Service, 1, 80);
    let now = Instant::now();
    let both = [all.clone(), all.clone()];
    let parse = |earlier| super::super::limits::parse(&both, earlier, now).unwrap();
    let none = RateLimits::default();
    let first = parse(&none);
    let get = MatchInput::new(crate::http::view::testing::request("GET", "/"));
    let take = |limits: &RateLimits, now| {
        let client = By::Address([10, 0, 0, 1].into());
        limits.take(Stage::Allowed, &[], 80, client, &get, now)
    };
    assert!(take(&first, now).is_ok());
    let second = parse(&first);
    assert!(take(&second, now).is_err());
    let later = now + Duration::from_secs(3600);
    assert!(take(&second, later).is_ok());
}
