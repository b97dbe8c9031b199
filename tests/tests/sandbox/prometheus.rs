//! Prometheus scrapes proxies, and the recipes for canaries tell one that fails from one that works.

use std::thread;
use std::time::{Duration, Instant};

use diy_mesh_sandbox::Sandbox;
use diy_mesh_sandbox::protocol::PodView;
use diy_mesh_testkit::has_program;
use diy_mesh_tests::observability::recipes;
use diy_mesh_tests::routes::{binomial_bounds, canary, http_route, servers};
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, request_until, requests_to, run, shell, single_pod, with_mesh,
};
use serde_json::Value;

/// The namespaces of a canary that fails 30% of the requests, and of one that works.
const NAMESPACES: [&str; 2] = ["shop", "till"];
const TOTAL: &str = "diy_mesh_proxy_requests_total";
const REQUESTS: usize = 400;
/// The least number of requests for the canary: half, less six standard deviations.
const LEAST: usize = 140;

/// The servers with the names that Flagger gives to their Services, and a route to both versions.
fn canaries(namespace: &str) -> String {
    let servers = servers(namespace).replace("web-v1", "web-primary");
    let rate = if namespace == "shop" { 30 } else { 0 };
    let fail = format!("'2.0'}}, {{name: FAIL_RATE, value: '{rate}'}}]");
    let servers = servers.replace("'2.0'}]", &fail);
    let route = http_route(namespace, "web", namespace, &format!("[{}]", canary(50)));
    format!("{servers}---{route}")
        .replace("web-v1", "web-primary")
        .replace("web-v2", "web-canary")
}

/// Starts Prometheus in the container `shell` of a pod. It scrapes all proxies with the labels of the
/// manifests. It has a session of its own, because the end
/// of a command ends its processes; the end of the sandbox ends it.
fn start(sandbox: &Sandbox, monitor: &PodView) {
    let mut targets = String::new();
    for pod in sandbox.view().pods.values().filter(|pod| pod.injected) {
        let ip = pod.ip.as_deref().expect("the pod has an address");
        targets += &format!(
            "      - {{targets: ['{ip}:4001'], labels: {{namespace: {}, pod: {}, workload: {}}}}}\n",
            pod.namespace, pod.name, pod.workload
        );
    }
    let script = format!(
        "mkdir /tmp/prometheus && cd /tmp/prometheus && cat >config.yaml <<'END'
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: proxies
    static_configs:
{targets}END
        setsid prometheus --config.file=config.yaml --storage.tsdb.path=data \\
            --web.listen-address=127.0.0.1:9090 >log 2>&1 </dev/null &
        until (: <>/dev/tcp/127.0.0.1/9090) 2>/dev/null; do sleep 0.1; done"
    );
    run(sandbox, monitor, &script);
}

/// The value of a query. `None` if it has no value, or if Prometheus does not respond yet.
fn value(sandbox: &Sandbox, monitor: &PodView, query: &str) -> Option<f64> {
    let encoded: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let target = format!("GET /api/v1/query?query={encoded} HTTP/1.0");
    let script = format!(
        "exec 3<>/dev/tcp/127.0.0.1/9090 && printf '%s\\r\\n\\r\\n' '{target}' >&3 && cat <&3"
    );
    let response = run(sandbox, monitor, &script);
    let (_, body) = response.split_once("\r\n\r\n")?;
    let body: Value = serde_json::from_str(body).ok()?;
    assert_ne!(body["status"], "error", "{query}: {body}");
    let result = body["data"]["result"].as_array()?;
    assert!(result.len() <= 1, "{query}: {body}");
    result.first()?["value"][1].as_str()?.parse().ok()
}

/// Waits until a query has a value of at least this. Runs `meanwhile` before each attempt.
fn wait_for(sandbox: &Sandbox, monitor: &PodView, query: &str, least: f64, meanwhile: impl Fn()) {
    let deadline = Instant::now() + READY_TIMEOUT;
    loop {
        meanwhile();
        if value(sandbox, monitor, query).is_some_and(|value| value >= least) {
            return;
        }
        if Instant::now() > deadline {
            let log = run(sandbox, monitor, "cat /tmp/prometheus/log");
            panic!("{query}: below {least}: {log}");
        }
        thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn recipes_tell_a_canary_that_fails_from_one_that_works() {
    if !has_program("prometheus") {
        return;
    }
    let monitor = shell("").replace("namespace: clients", "namespace: monitoring");
    let objects = NAMESPACES.map(canaries).join("---");
    let objects = format!("{objects}---{monitor}---{}", shell(MESHED));
    let Some(sandbox) = with_mesh(&objects) else {
        return;
    };
    let monitor = &single_pod(&sandbox, "monitoring", "shell");
    let client = &single_pod(&sandbox, "clients", "shell");
    for namespace in NAMESPACES {
        let service = (&*format!("web.{namespace}"), 80);
        let is_canary = |response: &str| response.contains("Version: 2.0");
        request_until(&sandbox, client, "GET /hello", service, "", is_canary);
    }
    start(&sandbox, monitor);
    let proxies = sandbox
        .view()
        .pods
        .values()
        .filter(|pod| pod.injected)
        .count();
    wait_for(&sandbox, monitor, "sum(up)", proxies as f64, || {});
    // Prometheus knows the increase of a series from its first sample on.
    let failing = format!("{TOTAL}{{error_type=\"500\"}}");
    let both = format!("count(count by (direction) ({failing}))");
    wait_for(&sandbox, monitor, &both, 2.0, || {
        send(&sandbox, client, "shop", 20)
    });
    for namespace in NAMESPACES {
        send(&sandbox, client, namespace, REQUESTS);
        for labels in [
            format!("namespace=\"{namespace}\",workload=\"web-canary\""),
            format!("service_peer_namespace=\"{namespace}\",service_peer_name=\"web-canary\""),
        ] {
            let sent = format!("sum(increase({TOTAL}{{{labels}}}[10m]))");
            wait_for(&sandbox, monitor, &sent, LEAST as f64, || {});
        }
    }
    for namespace in NAMESPACES {
        let pod = single_pod(&sandbox, namespace, "web-canary");
        check(&sandbox, monitor, namespace, &pod.name);
    }
}

/// Sends requests to both versions.
fn send(sandbox: &Sandbox, client: &PodView, namespace: &str, count: usize) {
    let service = format!("web.{namespace}");
    requests_to(sandbox, client, &service, "/hello", count);
}

/// Runs all recipes for the canary of a namespace, and for one that gets no requests.
fn check(sandbox: &Sandbox, monitor: &PodView, namespace: &str, pod: &str) {
    let (_, hash) = pod.split_once("web-canary-").expect("the name of a pod");
    let hash = hash.rsplit_once('-').map_or(hash, |(hash, _)| hash);
    let route = format!("HTTPRoute {namespace}/web(/.*)?");
    let recipes = recipes();
    assert_eq!(recipes.len(), 8);
    for recipe in recipes {
        let query = |service: &str, workload: &str| {
            // Flagger adds the end of the name of the Service.
            let service = if recipe.name.contains('/') {
                "web-canary".replace("web", service)
            } else {
                service.to_owned()
            };
            recipe.query(&[
                ("namespace", namespace),
                ("service", &service),
                ("target", workload),
                ("workload", workload),
                ("hash", hash),
                ("route", &route),
                ("interval", "10m"),
            ])
        };
        let name = &recipe.name;
        let found = value(sandbox, monitor, &query("web", "web-canary"));
        let found = found.unwrap_or_else(|| panic!("{namespace} {name} has no value"));
        let percent = if name.contains('/') { 100.0 } else { 1.0 };
        match (namespace, name.contains("p99")) {
            (_, true) => assert!(found > 0.0 && found < 10.0, "{namespace} {name}: {found}"),
            ("till", _) => assert_eq!(found * percent, 100.0, "{name}"),
            (_, _) => {
                let bounds = binomial_bounds(LEAST, 0.7);
                let successes = (found * percent / 100.0 * LEAST as f64) as usize;
                assert!(bounds.contains(&successes), "{name}: {found}");
            }
        }
        assert_eq!(
            value(sandbox, monitor, &query("none", "none")),
            None,
            "{name}"
        );
    }
}
