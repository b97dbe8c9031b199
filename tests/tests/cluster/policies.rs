//! TrafficPolicies on a cluster: their definition, their status, their effect, and invalid ones,
//! which the API server or the status names.

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{MANIFESTS, Namespace, in_namespace, kubectl, wait_for};
use serde_json::{Value, json};

/// Sections of invalid policies, and the field that the error names.
fn invalid() -> Vec<(Value, &'static str)> {
    let abort = json!({"status": 503, "percent": 100});
    let regex = json!([{"path": {"type": "RegularExpression", "value": "("}}]);
    let limit = |name: &str| json!({"name": name, "requests": 1});
    vec![
        (
            json!({"loadBalancing": {"algorithm": "Magic"}}),
            "spec.loadBalancing.algorithm",
        ),
        (
            json!({"loadBalancing": {"algorithm": "ConsistentHash"}}),
            "spec.loadBalancing",
        ),
        (
            json!({"connections": {"maxRequests": 0}}),
            "spec.connections.maxRequests",
        ),
        (
            json!({"connections": {"connectTimeout": "0s"}}),
            "spec.connections.connectTimeout",
        ),
        (
            json!({"outlierDetection": {"failurePercent": 101}}),
            "spec.outlierDetection.failurePercent",
        ),
        (
            json!({"circuitBreaker": {"failurePercent": 50, "interval": "10"}}),
            "spec.circuitBreaker.interval",
        ),
        (json!({"retry": {"attempts": 11}}), "spec.retry.attempts"),
        (
            json!({"retry": {"budget": {"percent": 101}}}),
            "spec.retry.budget.percent",
        ),
        (
            json!({"timeouts": {"request": "1s", "backendRequest": "2s"}}),
            "spec.timeouts",
        ),
        (
            json!({"rateLimits": [limit("a"), limit("a")]}),
            "spec.rateLimits",
        ),
        (
            json!({"faults": [{"abort": abort, "matches": regex}]}),
            "spec.faults[0].matches[0].path.value",
        ),
        (
            json!({"faults": [{"abort": {"status": 200, "percent": 100}}]}),
            "spec.faults[0].abort.status",
        ),
        (
            json!({"faults": [{"abort": {"status": 503}}]}),
            "spec.faults[0].abort",
        ),
        (
            json!({"faults": [{"percent": 10, "abort": {"status": 503}}]}),
            "spec.faults[0].percent",
        ),
        (
            json!({"faults": [{"delay": {"duration": "25h"}}]}),
            "spec.faults[0].delay.duration",
        ),
        (
            json!({"faults": [{"abort": {"status": 503, "percent": 1, "fraction": {"numerator": 1}}}]}),
            "spec.faults[0].abort",
        ),
        (
            json!({"sessionPersistence": {"type": "Header", "sessionName": "X_Called-By"}}),
            "spec.sessionPersistence",
        ),
    ]
}

fn policy(name: &str, section: &Value) -> Value {
    let mut spec = section.clone();
    spec["targetRefs"] = json!([{"group": "", "kind": "Service", "name": "server"}]);
    json!({"apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "TrafficPolicy",
        "metadata": {"name": name}, "spec": spec})
}

#[test]
fn policy_limits_the_rate_and_invalid_ones_are_named() -> Result<()> {
    in_namespace("policies", |namespace| {
        kubectl(&["apply", "-k", &format!("{MANIFESTS}/crds")])?;
        let definition = "crd/trafficpolicies.diy-service-mesh.dev";
        kubectl(&["wait", "--for=condition=Established", definition])?;
        let (server, client) = (App::http_server(), App::http_client());
        let client = App {
            interval_ms: "100",
            ..client
        };
        namespace.wait_for_responses(&server, &client)?;
        // Twice the limit.
        let limit = json!({"rateLimits": [{"name": "all", "requests": 5, "window": "1s"}]});
        namespace.apply(&policy("limit", &limit).to_string())?;
        wait_for("the policy is accepted", || {
            let condition = accepted(namespace, "limit")?;
            ensure!(condition["status"] == "True", "{condition:#}");
            Ok(Some(()))
        })?;
        wait_for("responses with status 429", || {
            let limited = namespace.responses(&client)?.bad;
            let is_limited = |line: &String| {
                let line = line.to_lowercase();
                line.starts_with("http/1.1 429 ") && line.contains("retry-after")
            };
            Ok((limited.iter().filter(|line| is_limited(line)).count() >= 10).then_some(()))
        })?;
        // The API server refuses an invalid change: the policy that it has stays in force. Regular
        // expressions are left to the controller.
        let mut stored = Vec::new();
        for (section, field) in invalid() {
            let message = match namespace.apply(&policy("invalid", &section).to_string()) {
                Err(error) => format!("{error:#}"),
                Ok(()) => {
                    stored.push(field);
                    wait_for("the policy is rejected", || {
                        let condition = accepted(namespace, "invalid")?;
                        ensure!(condition["status"] == "False", "{condition:#}");
                        Ok(Some(condition.to_string()))
                    })?
                }
            };
            ensure!(message.contains(field), "{section}: {field}: {message}");
        }
        ensure!(
            stored == ["spec.faults[0].matches[0].path.value"],
            "{stored:?}"
        );
        let condition = accepted(namespace, "limit")?;
        ensure!(condition["status"] == "True", "{condition:#}");
        Ok(())
    })
}

/// The condition `Accepted` of a policy for its Service.
fn accepted(namespace: &Namespace, name: &str) -> Result<Value> {
    let json = namespace.kubectl(&["get", "trafficpolicy", name, "-o", "json"])?;
    let policy: Value = serde_json::from_str(&json)?;
    let conditions = policy["status"]["ancestors"][0]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let found = conditions.find(|one| one["type"] == "Accepted");
    found
        .cloned()
        .with_context(|| format!("no condition in {:#}", policy["status"]))
}
