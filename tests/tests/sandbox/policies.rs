//! Rate limits and faults of TrafficPolicies in a sandbox.

use std::time::{Duration, Instant};

use diy_mesh_sandbox::Sandbox;
use diy_mesh_sandbox::protocol::PodView;
use diy_mesh_tests::routes::{binomial_bounds, servers, traffic_policy};
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, request_until, requests, shell, single_pod, with_mesh,
};

const SERVICE: &str = "web.shop";

/// Two clients of different identities, and the servers.
fn mesh() -> Option<(Sandbox, [PodView; 2])> {
    let shells = [
        shell(MESHED),
        shell(MESHED).replace("namespace: clients", "namespace: shop"),
    ];
    let sandbox = with_mesh(&format!("{}---{}", servers("shop"), shells.join("---")))?;
    let clients = ["clients", "shop"].map(|namespace| single_pod(&sandbox, namespace, "shell"));
    Some((sandbox, clients))
}

/// Sends `GET /hello` until the response contains a text, and returns it: policies reach proxies
/// with a delay.
fn until(sandbox: &Sandbox, client: &PodView, host: &str, port: u16, text: &str) -> String {
    let is_expected = |response: &str| response.contains(text);
    request_until(sandbox, client, "GET /hello", (host, port), "", is_expected).stdout
}

fn count(responses: &str, status: &str) -> usize {
    responses.matches(&format!("HTTP/1.1 {status} ")).count()
}

/// The value of `Retry-After`, in seconds.
fn retry_after(response: &str) -> u64 {
    let (_, value) = response.split_once("retry-after: ").expect("the field");
    value.split_once("\r\n").unwrap().0.parse().unwrap()
}

#[test]
fn each_caller_has_its_burst() {
    let Some((sandbox, [one, other])) = mesh() else {
        return;
    };
    // Longer than the test: no bucket gains a token.
    let limits = "rateLimits: [{name: each, requests: 5, window: 10h, per: Caller}]";
    sandbox.apply(&traffic_policy(limits)).unwrap();
    let limited = "x-mesh-error: rate-limited";
    let response = until(&sandbox, &one, SERVICE, 80, limited);
    assert!(response.starts_with("HTTP/1.1 429 "), "{response}");
    assert!(
        response.contains("rate limit TrafficPolicy shop/web/each"),
        "{response}"
    );
    assert!(
        (7000..=7200).contains(&retry_after(&response)),
        "{response}"
    );
    let responses = requests(&sandbox, &other, "/hello", 12);
    assert_eq!(count(&responses, "200"), 5, "{responses}");
    assert_eq!(count(&responses, "429"), 7, "{responses}");
    sandbox.delete("TrafficPolicy", "shop", "web").unwrap();
    until(&sandbox, &one, SERVICE, 80, "200 OK");
    assert_eq!(count(&requests(&sandbox, &other, "/hello", 12), "200"), 12);
}

#[test]
fn replicas_share_a_limit() {
    let Some((sandbox, [one, other])) = mesh() else {
        return;
    };
    let limits = "rateLimits: [{name: all, requests: 8, window: 24h, per: Service}]";
    sandbox.apply(&traffic_policy(limits)).unwrap();
    let limited = "x-mesh-error: rate-limited";
    let response = until(&sandbox, &one, SERVICE, 80, limited);
    let alone = 3 * 3600;
    assert!(retry_after(&response) <= alone, "{response}");
    // The callers share it.
    let responses = requests(&sandbox, &other, "/hello", 3);
    assert_eq!(count(&responses, "429"), 3, "{responses}");
    let first = single_pod(&sandbox, "shop", "web-v1").ip.unwrap();
    sandbox.scale("shop", "web-v1", 2).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    // Half of the rate: the next token takes twice as long.
    let is_halved =
        |response: &str| response.contains(limited) && retry_after(response) > alone + 3600;
    request_until(&sandbox, &one, "GET /hello", (&first, 8080), "", is_halved);
    let pods = sandbox.view().pods_of("shop", "web-v1");
    let second = pods.iter().find(|pod| pod.ip.as_deref() != Some(&first));
    let second = second.unwrap().ip.clone().unwrap();
    // Its controller may learn of the second replica after the controller of the first replica.
    // Until then, it has the whole limit: 8 requests, one every 3 hours. With its share, it passes
    // fewer requests, or the next one is later.
    let passed = std::cell::Cell::new(0);
    let has_its_share = |response: &str| passed.get() < 8 || retry_after(response) > alone;
    let response = request_until(
        &sandbox,
        &one,
        "GET /hello",
        (&second, 8080),
        "",
        |response| {
            passed.set(passed.get() + u32::from(response.starts_with("HTTP/1.1 200 ")));
            response.contains(limited) && has_its_share(response)
        },
    );
    assert!((4..=8).contains(&passed.get()), "{}", response.stdout);
}

#[test]
fn a_limit_under_load_holds_for_two_replicas_and_fails_no_probe() {
    let probes = "readinessProbe: {httpGet: {path: /hello, port: 8080}, periodSeconds: 1}
          livenessProbe: {httpGet: {path: /hello, port: 8080}, periodSeconds: 2}
          startupProbe:";
    let servers = servers("shop").replace("startupProbe:", probes);
    let Some(sandbox) = with_mesh(&format!("{servers}---{}", shell(MESHED))) else {
        return;
    };
    sandbox.scale("shop", "web-v1", 2).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    let client = single_pod(&sandbox, "clients", "shell");
    // Less than any machine can send.
    let limits = "rateLimits: [{name: all, requests: 20, window: 10s, per: Service}]";
    sandbox.apply(&traffic_policy(limits)).unwrap();
    let send = || requests(&sandbox, &client, "/hello", 60);
    // Uses up what both replicas have left, as soon as they have the limit.
    let deadline = Instant::now() + READY_TIMEOUT;
    while count(&send(), "429") < 30 {
        assert!(Instant::now() < deadline, "the limit has no effect");
    }
    let (begun, mut passed) = (Instant::now(), 0);
    while begun.elapsed() < Duration::from_secs(30) {
        passed += count(&send(), "200");
        for pod in sandbox.view().pods_of("shop", "web-v1") {
            assert!(pod.ready && pod.restarts() == 0, "{pod:?}");
        }
    }
    let expected = begun.elapsed().as_secs_f64() * 2.0;
    // Each replica has up to one token at the start, and another one at the end.
    let difference = (passed as f64 - expected).abs();
    assert!(
        difference <= 0.05 * expected + 2.0,
        "{passed} of {expected}"
    );
}

#[test]
fn faults_concern_their_share_of_the_matching_requests() {
    let Some((sandbox, [client, _])) = mesh() else {
        return;
    };
    let faults = "faults:
    - {matches: [{path: {type: Exact, value: /hello}}], abort: {status: 503, percent: 25}}
    - {matches: [{path: {type: Exact, value: /slow}}], delay: {duration: 300ms}}
    - {matches: [{path: {type: Exact, value: /none}}], abort: {status: 418}}";
    sandbox.apply(&traffic_policy(faults)).unwrap();
    let response = until(
        &sandbox,
        &client,
        SERVICE,
        80,
        "x-mesh-error: fault-injected",
    );
    assert!(
        response.contains("fault of TrafficPolicy shop/web"),
        "{response}"
    );
    let responses = requests(&sandbox, &client, "/hello", 400);
    let aborted = count(&responses, "503");
    assert_eq!(count(&responses, "200") + aborted, 400);
    let bounds = binomial_bounds(400, 0.25);
    assert!(
        bounds.contains(&aborted),
        "{aborted} of 400, expected {bounds:?}"
    );
    assert_eq!(count(&requests(&sandbox, &client, "/none", 20), "418"), 20);
    let begun = Instant::now();
    let responses = requests(&sandbox, &client, "/slow", 3);
    assert!(begun.elapsed() >= 3 * Duration::from_millis(300));
    assert_eq!(count(&responses, "404"), 3, "{responses}");
    sandbox.delete("TrafficPolicy", "shop", "web").unwrap();
    let is_own = |response: &str| response.contains("this server answers /hello");
    request_until(&sandbox, &client, "GET /none", (SERVICE, 80), "", is_own);
    assert_eq!(
        count(&requests(&sandbox, &client, "/hello", 100), "200"),
        100
    );
}
