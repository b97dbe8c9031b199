//! AuthorizationPolicies on a cluster: what the API server refuses, the status, and the effect.

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{
    MANIFESTS, Namespace, in_namespace, kubectl, kubectl_with_input, wait_for,
};
use serde_json::{Value, json};

fn policy(name: &str, spec: &Value) -> String {
    let object = json!({"apiVersion": "diy-service-mesh.dev/v1alpha1",
        "kind": "AuthorizationPolicy", "metadata": {"name": name}, "spec": spec});
    object.to_string()
}

/// A policy for all pods of the namespace.
fn all_pods(mut others: Value) -> Value {
    others["targetRefs"] = json!([{"group": "", "kind": "Pod", "selector": {}}]);
    others
}

fn allow(rule: Value) -> Value {
    all_pods(json!({"action": "ALLOW", "rules": [rule]}))
}

/// Specifications that the API server refuses, with a part of its message.
fn refused() -> Vec<(Value, &'static str)> {
    let source = |source: Value| allow(json!({"sources": [source]}));
    let request = |request: Value| allow(json!({"requests": [request]}));
    let target = |target: Value| json!({"targetRefs": [target], "action": "ALLOW"});
    let scope =
        |rules: Value| all_pods(json!({"action": "ALLOW", "scope": "Ports", "rules": rules}));
    let about_requests = json!([{"requests": [{"methods": ["GET"]}]}]);
    vec![
        (json!({"action": "ALLOW"}), "spec.targetRefs"),
        (target(json!({"kind": "Pod"})), "kind Pod requires selector"),
        (
            target(json!({"kind": "Service"})),
            "other kinds require name",
        ),
        (
            all_pods(json!({})),
            "expected action with rules, or defaultAction",
        ),
        (
            all_pods(json!({"defaultAction": "DENY", "mode": "Audit"})),
            "defaultAction excludes",
        ),
        (
            json!({"targetRefs": [{"kind": "Service", "name": "a"}], "defaultAction": "DENY"}),
            "defaultAction requires",
        ),
        (scope(json!([])), "scope Ports requires"),
        (scope(json!([{}])), "scope Ports requires"),
        (
            all_pods(json!({"action": "DENY", "rules": about_requests})),
            "requires ports",
        ),
        (
            source(json!({"type": "SPIFFE"})),
            "expected the field of the type",
        ),
        (
            source(json!({"type": "SPIFFE", "spiffe": "spiffe://a/ns/b*/sa/c"})),
            "spiffe",
        ),
        (
            source(json!({"type": "Namespace", "namespace": "*"})),
            "namespace",
        ),
        (
            source(json!({"type": "IPBlock", "ipBlock": "10.0.0.1"})),
            "ipBlock",
        ),
        (allow(json!({"requests": []})), "requests"),
        (allow(json!({"notSources": []})), "notSources"),
        (allow(json!({"networkAttributes": {"ports": [0]}})), "ports"),
        (request(json!({})), "requests[0]"),
        (request(json!({"methods": ["get"]})), "methods"),
        (
            request(json!({"paths": [{"type": "Exact", "value": "a"}]})),
            "a path begins with /",
        ),
        (
            request(json!({"headers": [{"name": "a", "type": "Exact"}]})),
            "require value",
        ),
        (
            request(
                json!({"grpc": [{"service": "a"}], "paths": [{"type": "Exact", "value": "/"}]}),
            ),
            "exclude each other",
        ),
    ]
}

/// Specifications that the API server accepts.
fn accepted() -> Vec<Value> {
    let port = json!({"ports": [8080]});
    vec![
        all_pods(json!({"action": "ALLOW"})),
        all_pods(json!({"defaultAction": "DENY"})),
        allow(json!({"sources": []})),
        allow(json!({"sources": [
            {"type": "ServiceAccount", "serviceAccount": {"name": "*"}},
            {"type": "SPIFFE", "spiffe": "spiffe://*/ns/*/sa/web.v2"},
            {"type": "Namespace", "namespace": "shop"},
            {"type": "IPBlock", "ipBlock": "fd00::/8"},
            {"type": "Unauthenticated"}]})),
        all_pods(json!({"action": "DENY", "mode": "Audit", "rules": [
            {"networkAttributes": port, "requests": [{
                "methods": ["GET"], "hosts": ["*.example.com"],
                "paths": [{"type": "Suffix", "value": ".html"}],
                "headers": [{"name": "X-A", "type": "Present"}]}]}]})),
    ]
}

#[test]
fn policy_denies_and_invalid_ones_are_refused() -> Result<()> {
    in_namespace("authorization", |namespace| {
        kubectl(&["apply", "-k", &format!("{MANIFESTS}/crds")])?;
        let definition = "crd/authorizationpolicies.diy-service-mesh.dev";
        kubectl(&["wait", "--for=condition=Established", definition])?;
        check_definition(namespace)?;
        let (server, client) = (App::http_server(), App::http_client());
        namespace.wait_for_responses(&server, &client)?;
        let target = json!([{"group": "", "kind": "Service", "name": "server"}]);
        let nobody = json!({"targetRefs": target, "action": "ALLOW", "rules": [{"sources": []}]});
        namespace.apply(&policy("p", &nobody))?;
        wait_for("responses with status 403", || {
            let is_denied = |line: &String| {
                let line = line.to_lowercase();
                line.starts_with("http/1.1 403 ") && line.contains("x-mesh-error: denied")
            };
            let denied = namespace.responses(&client)?.bad;
            Ok(denied.iter().any(is_denied).then_some(()))
        })?;
        // `Programmed` is about the proxies that are connected to the replica that writes: perhaps none.
        wait_for("the condition of the policy", || {
            let condition = accepted_condition(namespace, "p")?;
            ensure!(condition["status"] == "True", "{condition:#}");
            Ok(Some(()))
        })
    })
}

/// The API server refuses what its rules express.
fn check_definition(namespace: &Namespace) -> Result<()> {
    let create = ["create", "--dry-run=server", "-f", "-"];
    let create = [&["-n", &*namespace.name][..], &create].concat();
    let mut wrong = Vec::new();
    for (spec, message) in refused() {
        let written = kubectl_with_input(&create, &policy("p", &spec));
        let is_right = matches!(&written, Err(error) if format!("{error:#}").contains(message));
        if !is_right {
            wrong.push(format!("{spec}: {message}: {written:?}"));
        }
    }
    for spec in accepted() {
        let written = kubectl_with_input(&create, &policy("p", &spec));
        wrong.extend(written.err().map(|error| format!("{spec}: {error:#}")));
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// The condition `Accepted` of a policy for its first target.
fn accepted_condition(namespace: &Namespace, name: &str) -> Result<Value> {
    let json = namespace.kubectl(&["get", "authorizationpolicy", name, "-o", "json"])?;
    let policy: Value = serde_json::from_str(&json)?;
    let conditions = policy["status"]["ancestors"][0]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let found = conditions.find(|one| one["type"] == "Accepted");
    found
        .cloned()
        .with_context(|| format!("no condition in {:#}", policy["status"]))
}
