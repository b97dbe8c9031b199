//! A drill: faults of objects in one namespace. `mesh check` names the cause of each, and the
//! object to blame. `tests/tests/sandbox/drill.rs` has the faults of requests, and
//! `tests/tests/cluster_serial/faults.rs` has the faults of the mesh itself.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use diy_mesh_tests::cluster::check::check_with;
use diy_mesh_tests::cluster::gateway_api::{install, wait_for_condition};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{MANIFESTS, Namespace, in_namespace, kubectl};
use serde_json::{Value, json};

/// The time from a fault until a command names it.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The same for a failing probe: until then, an application may be starting.
const PROBE_TIMEOUT: Duration = Duration::from_secs(120);

/// A fault that an object makes.
struct Case {
    /// As in docs/troubleshooting.md.
    fault: &'static str,
    command: &'static str,
    object: Value,
    /// The check, its level, and parts of one of its details, after the namespace.
    check: &'static str,
    level: &'static str,
    names: &'static [&'static str],
    within: Duration,
}

fn cases() -> [Case; 7] {
    [
        Case {
            fault: "a probe fails",
            command: "mesh check",
            object: failing_pod(),
            check: "traffic",
            level: "problem",
            names: &[
                "/unready: ",
                "probes failed, HTTP GET /hello on port 8080: status-500",
            ],
            within: PROBE_TIMEOUT,
        },
        Case {
            fault: "a workload passes no traces on",
            command: "mesh check",
            object: traced_pods(),
            check: "traces",
            level: "note",
            names: &[
                "/relay receives traces (",
                " and calls others without a trace (",
            ],
            within: TIMEOUT,
        },
        Case {
            fault: "a pod that should have a proxy has none",
            command: "mesh check",
            object: pod("outside", "", json!({})),
            check: "pods",
            level: "problem",
            names: &["/outside"],
            within: TIMEOUT,
        },
        Case {
            fault: "the selector of a Service matches no pod",
            command: "mesh check",
            object: service("lonely", json!({"app": "nobody"})),
            check: "services",
            level: "problem",
            names: &["/lonely: selector \"app=nobody\""],
            within: TIMEOUT,
        },
        Case {
            fault: "a route is rejected",
            command: "mesh check",
            object: route(
                "rejected",
                json!([{"matches": [{"path": {"type": "RegularExpression", "value": "("}}]}]),
            ),
            check: "routes",
            level: "problem",
            names: &[
                "/rejected, parent ",
                "Accepted is False, UnsupportedValue: spec.rules[0].matches[0].path.value",
            ],
            within: TIMEOUT,
        },
        Case {
            fault: "a route names a Service that does not exist",
            command: "mesh check",
            object: route(
                "stale",
                json!([{"backendRefs": [
                    {"name": "server", "port": 80, "weight": 90}, {"name": "gone", "port": 80, "weight": 10},
                ]}]),
            ),
            check: "routes",
            level: "problem",
            names: &[
                "/stale, parent ",
                "ResolvedRefs is False, BackendNotFound: ",
                "gone",
            ],
            within: TIMEOUT,
        },
        Case {
            fault: "the target of an AuthorizationPolicy is gone",
            command: "mesh check",
            object: json!({
                "apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "AuthorizationPolicy",
                "metadata": {"name": "orphan"},
                "spec": {"action": "ALLOW", "rules": [{}],
                    "targetRefs": [{"group": "", "kind": "Service", "name": "gone"}]},
            }),
            check: "policies",
            level: "warning",
            names: &["/orphan, Service gone: TargetNotFound: "],
            within: TIMEOUT,
        },
    ]
}

/// A pod of http-server, with fields of its container.
fn pod(name: &str, inject: &str, container: Value) -> Value {
    let mut container = container;
    container["name"] = json!("http-server");
    container["image"] = json!("diy-sm-http-server:dev");
    container["imagePullPolicy"] = json!("IfNotPresent");
    let annotations = match inject {
        "" => json!({}),
        value => json!({"diy-service-mesh/inject": value}),
    };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]},
    })
}

fn failing_pod() -> Value {
    let probe = json!({"httpGet": {"port": 8080, "path": "/hello"}, "periodSeconds": 1});
    let fails = json!([{"name": "FAIL_RATE", "value": "100"}]);
    pod(
        "unready",
        "true",
        json!({"env": fails, "readinessProbe": probe}),
    )
}

/// A pod that receives traces, and whose client sends requests of its own.
fn traced_pods() -> Value {
    let client = |endpoint: &str| {
        json!({
            "name": "http-client", "image": "diy-sm-http-client:dev", "imagePullPolicy": "IfNotPresent",
            "env": [{"name": "ENDPOINT", "value": endpoint}, {"name": "INTERVAL_MS", "value": "100"}],
        })
    };
    let mut relay = pod("relay", "true", json!({}));
    relay["metadata"]["labels"] = json!({"app": "relay"});
    let containers = relay["spec"]["containers"].as_array_mut();
    containers
        .expect("the list of a pod")
        .push(client("http://server/hello"));
    let mut caller = pod("caller", "true", json!({}));
    caller["spec"]["containers"] = json!([client("http://relay/hello")]);
    let policy = json!({
        "apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "TrafficPolicy", "metadata": {"name": "relay"},
        "spec": {
            "targetRefs": [{"group": "", "kind": "Service", "name": "relay"}],
            "telemetry": {"tracing": {
                "provider": {"endpoint": "collector.observability.svc:4317"}, "samplingRate": {"numerator": 100},
            }},
        },
    });
    let service = service("relay", json!({"app": "relay"}));
    json!({"apiVersion": "v1", "kind": "List", "items": [relay, caller, service, policy]})
}

fn service(name: &str, selector: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"selector": selector, "ports": [{"port": 80, "targetPort": 8080}]},
    })
}

fn route(name: &str, rules: Value) -> Value {
    json!({
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "metadata": {"name": name},
        "spec": {"parentRefs": [{"group": "", "kind": "Service", "name": "server"}], "rules": rules},
    })
}

impl Case {
    fn wait(&self, namespace: &Namespace) -> Result<()> {
        let deadline = Instant::now() + self.within;
        loop {
            let report = check_with(&["--namespace", &namespace.name])?;
            if self.is_named(&report, &namespace.name) {
                return Ok(());
            }
            let (fault, command, check) = (self.fault, self.command, self.check);
            ensure!(
                Instant::now() < deadline,
                "{fault}: {command}: {check} does not name {:?}: {report:#}",
                self.names
            );
        }
    }

    fn is_named(&self, report: &Value, namespace: &str) -> bool {
        let findings = report["checks"].as_array().into_iter().flatten();
        let mut of_check = findings
            .filter(|finding| finding["check"] == self.check && finding["level"] == self.level);
        let is_it = |detail: &Value| {
            let detail = detail.as_str().unwrap_or_default();
            let object = format!("{namespace}{}", self.names[0]);
            detail.contains(&object) && self.names[1..].iter().all(|part| detail.contains(part))
        };
        of_check.any(|finding| {
            finding["details"]
                .as_array()
                .is_some_and(|all| all.iter().any(is_it))
        })
    }
}

#[test]
fn each_fault_of_a_namespace_is_named_by_mesh_check() -> Result<()> {
    in_namespace("drill", |namespace| {
        install()?;
        kubectl(&["apply", "-k", &format!("{MANIFESTS}/crds")])?;
        let [probe, traces, others @ ..] = cases();
        namespace.apply(&probe.object.to_string())?;
        namespace.apply(&traces.object.to_string())?;
        namespace.wait_for_responses(&App::http_server(), &App::http_client())?;
        for case in &others {
            namespace.apply(&case.object.to_string())?;
            if case.check == "pods" {
                // From now on it should have one.
                namespace.kubectl(&["annotate", "pod/outside", "diy-service-mesh/inject=true"])?;
            }
            case.wait(namespace)?;
        }
        let rejected = ["Accepted", "False", "UnsupportedValue"];
        wait_for_condition(namespace, "httproute", "rejected", rejected)?;
        traces.wait(namespace)?;
        probe.wait(namespace)
    })
}
