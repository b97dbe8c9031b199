//! TrafficPolicies in a sandbox: circuit breaker, limits with a queue, outlier detection, and the
//! retry budget in an outage.

use std::time::Instant;

use diy_mesh_sandbox::Sandbox;
use diy_mesh_sandbox::protocol::PodView;
use diy_mesh_tests::routes::traffic_policy;
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, get, metric, request_until, requests, run, shell, single_pod,
    wait_for_idle_proxy, with_mesh,
};

/// Service `web` in namespace `shop`, which selects the pods of this group.
fn service(group: &str) -> String {
    format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: shop}}
spec: {{selector: {{group: {group}}}, ports: [{{name: http, port: 80, targetPort: 8080}}]}}
"
    )
}

/// A Deployment of this group, whose pods fail this percentage of the requests.
fn server(name: &str, group: &str, replicas: u32, fail_rate: u32) -> String {
    format!(
        "---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}, namespace: shop}}
spec:
  replicas: {replicas}
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata:
      labels: {{app: {name}, group: {group}}}
      annotations: {{{MESHED}}}
    spec:
      containers:
        - name: http-server
          image: diy-sm-http-server:dev
          env: [{{name: FAIL_RATE, value: '{fail_rate}'}}]
          startupProbe: {{tcpSocket: {{port: 8080}}, periodSeconds: 1, failureThreshold: 60}}
---
"
    )
}

/// Sends `GET /hello` to Service `web` until the response has this status and contains this text.
fn until(sandbox: &Sandbox, pod: &PodView, status: u16, text: &str) {
    let is_expected = |response: &str| {
        response.starts_with(&format!("HTTP/1.1 {status} ")) && response.contains(text)
    };
    let service = ("web.shop", 80);
    request_until(sandbox, pod, "GET /hello", service, "", is_expected);
}

/// Sends requests on one connection, and returns the number of responses with 200 and with 500.
fn statuses(sandbox: &Sandbox, pod: &PodView, count: usize) -> [usize; 2] {
    let responses = requests(sandbox, pod, "/hello", count);
    [200, 500].map(|status| responses.matches(&format!("HTTP/1.1 {status} ")).count())
}

#[test]
fn circuit_opens_while_the_service_fails_and_closes_afterwards() {
    let objects = [
        service("failing"),
        server("failing", "failing", 1, 100),
        server("working", "working", 1, 0),
        shell(MESHED),
    ];
    let Some(sandbox) = with_mesh(&objects.concat()) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    until(&sandbox, &client, 500, "Internal server error");
    let breaker = "circuitBreaker: {failurePercent: 50, minRequests: 5, openTime: 1s}";
    sandbox.apply(&traffic_policy(breaker)).unwrap();
    until(&sandbox, &client, 503, "x-mesh-error: circuit-open");
    until(&sandbox, &client, 503, "TrafficPolicy shop/web");
    // The probing requests still fail.
    until(&sandbox, &client, 500, "Internal server error");
    until(&sandbox, &client, 503, "x-mesh-error: circuit-open");
    assert_eq!(
        metric(&sandbox, &client, "circuits_open{direction=\"outbound\"}"),
        1
    );
    sandbox.apply(&service("working")).unwrap();
    get(&sandbox, &client, "web.shop", 80);
    let expected = "circuits_open{direction=\"outbound\"}";
    assert_eq!(metric(&sandbox, &client, expected), 0);
}

#[test]
fn requests_wait_for_a_limited_endpoint_until_the_queue_is_full() {
    let objects = [service("web"), server("web", "web", 1, 0), shell(MESHED)];
    let Some(sandbox) = with_mesh(&objects.concat()) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    get(&sandbox, &client, "web.shop", 80);
    let limits = "connections: {maxRequests: 1, maxWaiting: 1, connectTimeout: 30s}";
    sandbox.apply(&traffic_policy(limits)).unwrap();
    // The server asks for the body of the first request, so it is in progress. The second one waits
    // in the queue as soon as the policy has reached the proxy, then the third one is rejected.
    let script = "
        metrics() {
            exec 6<>/dev/tcp/ADMIN/4001
            printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' >&6
            cat <&6
        }
        post='POST /hello HTTP/1.1\\r\\nHost: web.shop\\r\\nExpect: 100-continue\\r\\nContent-Length: 1\\r\\n\\r\\n'
        get='GET /hello HTTP/1.1\\r\\nHost: web.shop\\r\\nConnection: close\\r\\n\\r\\n'
        waits=
        until [[ $waits ]]; do
            exec 3<>/dev/tcp/web.shop/80 4<>/dev/tcp/web.shop/80
            printf \"$post\" >&3
            read -r first <&3 && read -r empty <&3
            printf \"$get\" >&4
            # Without the policy, it gets a response.
            until [[ $waits ]] || read -t 0 <&4; do
                case $(metrics) in *'requests_waiting{direction=\"outbound\"} 1'*) waits=1 ;; esac
            done
            [[ $waits ]] || printf x >&3
        done
        echo \"continue: $first\"
        exec 5<>/dev/tcp/web.shop/80
        printf \"$get\" >&5
        cat <&5
        printf x >&3
        read -r first <&3
        echo \"first: $first\"
        echo \"second: $(cat <&4)\"";
    let script = script.replace("ADMIN", client.ip.as_deref().unwrap());
    let output = run(&sandbox, &client, &script);
    for expected in [
        "continue: HTTP/1.1 100 ",
        "x-mesh-error: upstream-overloaded",
        "has reached maxRequests of TrafficPolicy shop/web",
        "first: HTTP/1.1 200 ",
        "second: HTTP/1.1 200 ",
    ] {
        assert!(output.contains(expected), "{expected}: {output}");
    }
    let limited = "requests_limited_total{direction=\"outbound\",limit=\"requests\"}";
    assert!(metric(&sandbox, &client, limited) > 0);
    let waiting = "requests_waiting{direction=\"outbound\"}";
    assert_eq!(metric(&sandbox, &client, waiting), 0);
}

/// A Service with five replicas, one of which fails this percentage of its requests, with more
/// objects.
fn one_of_five_fails(fail_rate: u32, more: &str) -> Option<(Sandbox, PodView)> {
    let objects = [
        service("web"),
        server("working", "web", 4, 0),
        server("failing", "web", 1, fail_rate),
        shell(MESHED),
        format!("---{more}"),
    ];
    let sandbox = with_mesh(&objects.concat())?;
    let client = single_pod(&sandbox, "clients", "shell");
    get(&sandbox, &client, "web.shop", 80);
    Some((sandbox, client))
}

#[test]
fn failing_replica_is_quarantined() {
    // By default, the balancer already avoids the replica, so that it is seldom quarantined.
    let round_robin = traffic_policy("loadBalancing: {algorithm: RoundRobin}");
    // Clearly above the 50% at which the replica is quarantined: at exactly 50%, the number of
    // requests until the observed share reaches it has no useful bound. With 80%, more than 40
    // failures before the quarantine have a probability below 10^-7.
    let Some((sandbox, client)) = one_of_five_fails(80, &round_robin) else {
        return;
    };
    let [succeeded, failed] = statuses(&sandbox, &client, 800);
    assert_eq!(succeeded + failed, 800);
    // 128 without a quarantine.
    assert!(failed <= 40, "{failed} of 800 fail");
    let ejections = ["consecutive", "percent"].map(|cause| {
        let labels = format!("{{direction=\"outbound\",cause=\"{cause}\"}}");
        metric(&sandbox, &client, &format!("ejections_total{labels}"))
    });
    assert!(ejections[0] + ejections[1] > 0, "{failed} of 800 fail");
}

#[test]
fn failing_replica_is_not_noticed_with_retries_within_the_budget() {
    let retry = traffic_policy("retry: {codes: [500], attempts: 2, backoff: 1ms}");
    let Some((sandbox, client)) = one_of_five_fails(50, &retry) else {
        return;
    };
    let [succeeded, failed] = statuses(&sandbox, &client, 500);
    assert_eq!(succeeded + failed, 500);
    assert!(failed <= 2, "{failed} of 500 fail");
    let retries = "retries_total{direction=\"outbound\"}";
    let retries = metric(&sandbox, &client, retries);
    assert!(
        (1..=100 + 20).contains(&retries),
        "{retries} retries of 500 requests"
    );
}

#[test]
fn outage_adds_at_most_the_budget_of_the_policy() {
    let objects = [service("web"), server("web", "web", 3, 100), shell(MESHED)];
    let Some(sandbox) = with_mesh(&objects.concat()) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    until(&sandbox, &client, 500, "");
    let spec =
        "retry: {codes: [500], attempts: 2, backoff: 1ms, budget: {percent: 10, minPerSecond: 0}}";
    sandbox.apply(&traffic_policy(spec)).unwrap();
    let retries = "retries_total{direction=\"outbound\"}";
    // The requests from before leave no budget.
    let denied = "retries_denied_total{direction=\"outbound\",reason=\"budget\"}";
    let deadline = Instant::now() + READY_TIMEOUT;
    while metric(&sandbox, &client, denied) == 0 {
        assert!(Instant::now() < deadline, "the policy is not in force");
        statuses(&sandbox, &client, 10);
    }
    wait_for_idle_proxy(&sandbox, &client);
    let before = metric(&sandbox, &client, retries);
    let [_, failed] = statuses(&sandbox, &client, 300);
    assert_eq!(failed, 300);
    wait_for_idle_proxy(&sandbox, &client);
    let retries = metric(&sandbox, &client, retries) - before;
    assert!((1..=30 + 1).contains(&retries), "{retries} retries");
}
