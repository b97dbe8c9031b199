//! Zones in a sandbox: Nodes, the pods on them, and a TrafficPolicy that prefers the client's zone.

use std::time::Instant;

use diy_mesh_sandbox::Sandbox;
use diy_mesh_sandbox::protocol::PodView;
use diy_mesh_tests::routes::traffic_policy;
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, get, metric, requests, shell, single_pod, wait_for_idle_proxy, with_mesh,
};

/// A failing endpoint stays quarantined for the rest of the test.
const PREFER_ZONE: &str = "loadBalancing: {zonePreference: Prefer}
  outlierDetection: {ejectionTime: 300s}";
/// Service `web` has endpoints in both zones.
const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {selector: {group: web}, ports: [{name: http, port: 80, targetPort: 8080}]}
";

/// A Node of zone `a` or `b`.
fn node(zone: &str) -> String {
    format!(
        "---
apiVersion: v1
kind: Node
metadata: {{name: node-{zone}, labels: {{topology.kubernetes.io/zone: {zone}}}}}
"
    )
}

/// Servers on the Node of a zone, which name the zone and fail this percentage of the requests.
fn servers(zone: &str, replicas: u32, fail_rate: u32) -> String {
    format!(
        "---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: web-{zone}, namespace: shop}}
spec:
  replicas: {replicas}
  selector: {{matchLabels: {{app: web-{zone}}}}}
  template:
    metadata: {{labels: {{app: web-{zone}, group: web}}, annotations: {{{MESHED}}}}}
    spec:
      nodeName: node-{zone}
      containers:
        - name: http-server
          image: diy-sm-http-server:dev
          env: [{{name: VERSION, value: {zone}}}, {{name: FAIL_RATE, value: '{fail_rate}'}}]
          startupProbe: {{tcpSocket: {{port: 8080}}, periodSeconds: 1, failureThreshold: 60}}
"
    )
}

/// One server in zone `a` and two in zone `b`, and a client in each of the namespaces `a` and `b`,
/// on the Node of the zone with this name.
fn mesh() -> Option<(Sandbox, [PodView; 2])> {
    let client = |zone: &str| {
        let on_node = format!("spec:\n      nodeName: node-{zone}\n      containers:");
        let shell = shell(MESHED).replace("spec:\n      containers:", &on_node);
        assert!(shell.contains(&on_node));
        format!("---{}", shell.replace("clients", zone))
    };
    let objects = [
        SERVICE.to_owned(),
        node("a") + &node("b"),
        servers("a", 1, 0) + &servers("b", 2, 0),
        client("a") + &client("b"),
    ];
    let sandbox = with_mesh(&objects.concat())?;
    let clients = ["a", "b"].map(|zone| single_pod(&sandbox, zone, "shell"));
    for client in &clients {
        get(&sandbox, client, "web.shop", 80);
    }
    Some((sandbox, clients))
}

/// The number of responses of each zone to 500 requests.
fn zones(sandbox: &Sandbox, client: &PodView) -> [usize; 2] {
    let responses = requests(sandbox, client, "/hello", 500);
    ["Version: a", "Version: b"].map(|zone| responses.matches(zone).count())
}

/// Sends requests until the share of each zone is as expected: policies, endpoints and their health
/// change with a delay.
fn zones_until(sandbox: &Sandbox, client: &PodView, is_expected: impl Fn([usize; 2]) -> bool) {
    let deadline = Instant::now() + READY_TIMEOUT;
    loop {
        let found = zones(sandbox, client);
        if is_expected(found) {
            return;
        }
        assert!(Instant::now() < deadline, "{found:?} of 500");
    }
}

/// Nearly all requests. Without a preference, a third to two thirds would go to each zone.
fn is_most(count: usize) -> bool {
    count > 500 * 85 / 100
}

#[test]
fn requests_stay_in_the_zone_of_the_client_while_it_has_endpoints() {
    let Some((sandbox, clients)) = mesh() else {
        return;
    };
    zones_until(&sandbox, &clients[0], |found| {
        !found.into_iter().any(is_most)
    });
    let policy = traffic_policy(PREFER_ZONE);
    sandbox.apply(&policy).unwrap();
    for (zone, client) in clients.iter().enumerate() {
        zones_until(&sandbox, client, |found| is_most(found[zone]));
        // The proxy knows its zone from the controller, and the zone of each endpoint.
        let metrics = || {
            let names = [
                "zone_requests_total{zone=\"own\"}",
                "zone_requests_total{zone=\"other\"}",
                "retries_total{direction=\"outbound\"}",
            ];
            names.map(|name| metric(&sandbox, client, name))
        };
        wait_for_idle_proxy(&sandbox, client);
        let before = metrics();
        let found = zones(&sandbox, client);
        assert_eq!(found[0] + found[1], 500, "all requests succeed");
        let expected = [found[zone], found[1 - zone]].map(|count| count as u64);
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            let after = metrics();
            // Each attempt counts: a request that is sent again counts twice. So does one whose
            // endpoint discovery replaced while the proxy connected, which is no retry.
            let [own, other, retries] = [0, 1, 2].map(|index| after[index] - before[index]);
            let is_complete = own + other >= 500 + retries;
            if is_complete && own >= expected[0] && other >= expected[1] {
                break;
            }
            assert!(
                Instant::now() < deadline,
                "{own} and {other} with {retries} retries, expected {expected:?}"
            );
        }
    }
    let [client, _] = &clients;
    sandbox.scale("shop", "web-a", 0).unwrap();
    zones_until(&sandbox, client, |found| found == [0, 500]);
    sandbox.scale("shop", "web-a", 1).unwrap();
    zones_until(&sandbox, client, |found| is_most(found[0]));
}

#[test]
fn requests_leave_a_zone_whose_endpoints_fail() {
    let Some((sandbox, [client, _])) = mesh() else {
        return;
    };
    sandbox.apply(&traffic_policy(PREFER_ZONE)).unwrap();
    zones_until(&sandbox, &client, |found| is_most(found[0]));
    sandbox.apply(&servers("a", 1, 100)).unwrap();
    zones_until(&sandbox, &client, |found| found == [0, 500]);
    sandbox.apply(&servers("a", 1, 0)).unwrap();
    zones_until(&sandbox, &client, |found| is_most(found[0]));
}
