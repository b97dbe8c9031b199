//! Routes of connections without HTTP in a sandbox: weights of TCPRoutes and of TrafficSplits, a
//! server that speaks first, invalid backends, and HTTP on the same port.

use std::time::Instant;

use diy_mesh_sandbox::Sandbox;
use diy_mesh_sandbox::protocol::PodView;
use diy_mesh_tests::routes::{binomial_bounds, http_route, servers};
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, request_until, run, shell, single_pod, with_mesh,
};

/// Services `db`, whose pods have the name `one`, and `db-two`.
fn databases() -> String {
    let one = |service: &str, name: &str| {
        format!(
            "---
apiVersion: v1
kind: Service
metadata: {{name: {service}, namespace: shop}}
spec: {{selector: {{app: {service}}}, ports: [{{name: db, port: 9000, targetPort: 9000}}]}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {service}, namespace: shop}}
spec:
  selector: {{matchLabels: {{app: {service}}}}}
  template:
    metadata:
      labels: {{app: {service}}}
      annotations: {{{MESHED}}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
        - name: db
          image: diy-sm-http-server:dev
          command: [sandbox-tcp-server, '9000', {name}]
          startupProbe: {{tcpSocket: {{port: 9000}}, periodSeconds: 1, failureThreshold: 60}}
"
        )
    };
    one("db", "one") + &one("db-two", "two")
}

/// A TCPRoute with the name of its parent, and these backends, a YAML list.
fn tcp_route(service: &str, backends: &str) -> String {
    format!(
        "
apiVersion: gateway.networking.k8s.io/v1alpha2
kind: TCPRoute
metadata: {{name: {service}, namespace: shop}}
spec:
  parentRefs: [{{group: '', kind: Service, name: {service}}}]
  rules: [{{backendRefs: {backends}}}]
"
    )
}

/// Opens connections one after the other, and returns the line that the client got on each, which
/// is empty if there was none. A silent client waits for the server.
fn lines(sandbox: &Sandbox, pod: &PodView, connections: usize, is_silent: bool) -> Vec<String> {
    let first = if is_silent {
        ":"
    } else {
        "printf '\\0\\1' >&3"
    };
    let script = format!(
        "for ((i = 0; i < {connections}; i++)); do
             exec 3<>/dev/tcp/db.shop/9000; {first}; line=
             read -r line <&3; echo \"got $line\"; exec 3>&-
         done 2>/dev/null"
    );
    let output = run(sandbox, pod, &script);
    let lines = output.lines();
    lines
        .filter_map(|line| line.strip_prefix("got ").or(line.strip_prefix("got")))
        .map(str::to_owned)
        .collect()
}

/// Waits until the lines of some connections fulfill a condition: routes reach proxies with a
/// delay.
fn until(sandbox: &Sandbox, pod: &PodView, what: &str, matches: impl Fn(&[String]) -> bool) {
    let deadline = Instant::now() + READY_TIMEOUT;
    loop {
        let lines = lines(sandbox, pod, 30, false);
        if matches(&lines) {
            return;
        }
        assert!(Instant::now() < deadline, "{what}: {lines:?}");
    }
}

fn count(lines: &[String], line: &str) -> usize {
    lines.iter().filter(|one| *one == line).count()
}

/// Asserts that a fifth of the connections goes to `db-two`, whoever speaks first.
fn assert_a_fifth_to_two(sandbox: &Sandbox, pod: &PodView) {
    for is_silent in [false, true] {
        let lines = lines(sandbox, pod, 250, is_silent);
        let (one, two) = (count(&lines, "one"), count(&lines, "two"));
        assert_eq!(one + two, 250, "all are served: {lines:?}");
        let bounds = binomial_bounds(250, 0.2);
        assert!(bounds.contains(&two), "{two} of 250, expected {bounds:?}");
    }
}

#[test]
fn connections_follow_weights_whoever_speaks_first() {
    let Some(sandbox) = with_mesh(&format!("{}---{}", databases(), shell(MESHED))) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    until(&sandbox, &client, "without a route", |lines| {
        count(lines, "one") == 30
    });
    let backends = |one: u32, other: &str, two: u32| {
        let one = format!("{{name: db, port: 9000, weight: {one}}}");
        tcp_route(
            "db",
            &format!("[{one}, {{name: {other}, port: 9000, weight: {two}}}]"),
        )
    };
    sandbox.apply(&backends(80, "db-two", 20)).unwrap();
    until(&sandbox, &client, "with weights", |lines| {
        count(lines, "two") > 0
    });
    assert_a_fifth_to_two(&sandbox, &client);
    // The share of an invalid backend is refused.
    sandbox.apply(&backends(50, "missing", 50)).unwrap();
    until(&sandbox, &client, "an invalid backend", |lines| {
        count(lines, "") > 0
    });
    let lines = lines(&sandbox, &client, 100, false);
    let bounds = binomial_bounds(100, 0.5);
    let refused = count(&lines, "");
    assert!(bounds.contains(&refused), "{refused} of 100");
    assert_eq!(count(&lines, "one"), 100 - refused);
    sandbox.delete("TCPRoute", "shop", "db").unwrap();
    until(&sandbox, &client, "without the route", |lines| {
        count(lines, "one") == 30
    });
}

#[test]
fn connections_follow_the_weights_of_a_traffic_split() {
    let Some(sandbox) = with_mesh(&format!("{}---{}", databases(), shell(MESHED))) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    until(&sandbox, &client, "without a split", |lines| {
        count(lines, "one") == 30
    });
    let split = |one: u32, two: u32| {
        let split = format!(
            "
apiVersion: split.smi-spec.io/v1alpha4
kind: TrafficSplit
metadata: {{name: db, namespace: shop}}
spec:
  service: db
  backends: [{{service: db, weight: {one}}}, {{service: db-two, weight: {two}}}]
"
        );
        sandbox.apply(&split).unwrap();
    };
    split(80, 20);
    until(&sandbox, &client, "with a split", |lines| {
        count(lines, "two") > 0
    });
    assert_a_fifth_to_two(&sandbox, &client);
    split(0, 100);
    until(&sandbox, &client, "after the shift", |lines| {
        count(lines, "two") == 30
    });
    sandbox.delete("TrafficSplit", "shop", "db").unwrap();
    until(&sandbox, &client, "without the split", |lines| {
        count(lines, "one") == 30
    });
}

#[test]
fn requests_follow_a_tcp_route_until_an_http_route_is_for_them() {
    let Some(sandbox) = with_mesh(&format!("{}---{}", servers("shop"), shell(MESHED))) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    let until = |version: &str| {
        let is_it = |response: &str| response.contains(&format!("Version: {version}"));
        request_until(&sandbox, &client, "GET /hello", ("web.shop", 80), "", is_it);
    };
    until("1.0");
    let route = tcp_route("web", "[{name: web-v2, port: 80}]");
    sandbox.apply(&route).unwrap();
    until("2.0");
    let rules = "[{backendRefs: [{name: web-v1, port: 80}]}]";
    sandbox
        .apply(&http_route("shop", "web", "shop", rules))
        .unwrap();
    until("1.0");
    sandbox.delete("HTTPRoute", "shop", "web").unwrap();
    until("2.0");
}

/// All connections of a burst are open before its first line is read. In larger bursts, programs of
/// a debug build with little CPU time complete too few handshakes within the time to connect.
#[test]
fn burst_of_server_first_connections_resets_none() {
    let Some(sandbox) = with_mesh(&format!("{}---{}", databases(), shell(MESHED))) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    let script = "
        for burst in {1..25}; do
            connections=()
            for i in {1..20}; do
                exec {opened}<>/dev/tcp/db.shop/9000 && connections+=($opened)
            done
            for connection in ${connections[@]}; do
                line=
                read -r line <&$connection; echo \"$line\"
            done
        done";
    let output = run(&sandbox, &client, script);
    let served = output.lines().filter(|line| *line == "one").count();
    assert_eq!(served, 500, "{output}");
}
