//! TrafficPolicies on a cluster: their definition, their status, their effect, and invalid ones,
//! which the API server or the status names.

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{
    MANIFESTS, Namespace, in_namespace, kubectl, kubectl_with_input, wait_for,
};
use rejections::{Rejected, rejections};
use serde_json::{Value, json};

#[path = "../../../controller/src/kinds/policy/tests/rejections.rs"]
mod rejections;

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
        // The API server refuses what its rules express. The controller names the rest.
        let create = ["create", "--dry-run=server", "-f", "-"];
        let create = [&["-n", &*namespace.name][..], &create].concat();
        let mut wrong = Vec::new();
        for Rejected {
            spec,
            message,
            stored,
        } in rejections()
        {
            let written = kubectl_with_input(&create, &policy("invalid", &spec).to_string());
            let section = spec.as_object().and_then(|spec| spec.keys().next());
            let section = section.context("a section")?;
            let is_right = match (&written, stored) {
                (Err(error), None) => format!("{error:#}").contains(section),
                (written, stored) => written.is_ok() && stored.is_some(),
            };
            if !is_right {
                wrong.push(format!("{message}: stored: {stored:?}, {written:?}"));
            }
        }
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        let stored = rejections().into_iter().find(|one| one.stored.is_some());
        let stored = stored.context("a policy that is stored")?;
        namespace.apply(&policy("invalid", &stored.spec).to_string())?;
        wait_for("the policy is rejected", || {
            let condition = accepted(namespace, "invalid")?;
            let text = condition["message"].as_str().unwrap_or_default();
            ensure!(text.starts_with(stored.message), "{condition:#}");
            Ok((condition["status"] == "False").then_some(()))
        })?;
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
