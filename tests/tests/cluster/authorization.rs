//! AuthorizationPolicies on a cluster: what the API server refuses, the status, and the effect.

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::workloads::{App, Responses};
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
    let values: Vec<String> = (0..63).map(|number| number.to_string()).collect();
    let listed = json!({"key": "a", "operator": "In", "values": values});
    let selected = json!({"kind": "Pod", "selector": {"matchExpressions": [listed]}});
    let about_requests = json!([{"requests": [{"methods": ["GET"]}]}]);
    let asking = |name: &str, field: Value| {
        let backend = json!({"name": "auth", "port": 9000});
        let mut server = json!({"protocol": "HTTP", "backendRef": backend});
        server[name] = field;
        all_pods(json!({"action": "ExternalAuth", "externalAuth": server, "rules": [{}]}))
    };
    let mut audited = asking("timeout", json!("1s"));
    audited["mode"] = json!("Audit");
    vec![
        (
            all_pods(json!({"action": "ExternalAuth"})),
            "the action ExternalAuth requires externalAuth",
        ),
        (audited, "ExternalAuth has no mode Audit"),
        (
            asking("grpc", json!({})),
            "expected no field of the other protocol",
        ),
        (asking("timeout", json!("61s")), "from 1ms to 60s"),
        (asking("http", json!({"path": "check"})), "http.path"),
        (
            asking("backendRef", json!({"name": "auth", "port": 0})),
            "backendRef.port",
        ),
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
        (
            json!({"targetRefs": vec![selected; 5], "action": "ALLOW"}),
            "at most 256 labels and values",
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
        all_pods(json!({"action": "ExternalAuth", "externalAuth": {
            "protocol": "HTTP", "backendRef": {"name": "auth", "namespace": "other", "port": 9000},
            "http": {"path": "/check", "allowedHeaders": ["Cookie"]}, "timeout": "60s",
        }})),
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
        wait_for("the condition of the policy", || {
            let condition = condition(namespace, "p", "Accepted")?;
            ensure!(condition["status"] == "True", "{condition:#}");
            Ok(Some(()))
        })?;
        namespace.kubectl(&["delete", "service", server.name])?;
        wait_for("the condition without the Service", || {
            let condition = condition(namespace, "p", "Accepted")?;
            ensure!(condition["reason"] == "TargetNotFound", "{condition:#}");
            Ok(Some(()))
        })?;
        wait_for("an Event without the Service", || {
            let events = namespace.kubectl(&["get", "events.events.k8s.io", "-o", "json"])?;
            let is_named = ["\"TargetNotFound\"", "\"AuthorizationPolicy\""]
                .iter()
                .all(|text| events.contains(text));
            ensure!(is_named, "{events}");
            Ok(Some(()))
        })
    })
}

/// A client, and what its latest requests have met.
struct Caller<'a> {
    namespace: &'a Namespace,
    app: App<'a>,
    account: &'a str,
}

impl Caller<'_> {
    fn start(&self) -> Result<()> {
        let mut deployment: Value = serde_json::from_str(&self.app.deployment())?;
        deployment["spec"]["template"]["spec"]["serviceAccountName"] = self.account.into();
        self.namespace.apply(&deployment.to_string())
    }

    /// Whether the requests of the last seconds were allowed. They have to agree. A denied opaque
    /// connection is reset: its request fails.
    fn is_allowed(&self) -> Result<bool> {
        let App { name, program, .. } = self.app;
        let app = format!("app={name}");
        let logs = ["logs", "-l", &app, "-c", program, "--since=3s", "--tail=-1"];
        let responses = Responses::count(&self.namespace.kubectl(&logs)?);
        let (not_found, bad): (Vec<_>, Vec<_>) = responses
            .bad
            .iter()
            .partition(|line| line.starts_with("HTTP/1.1 404"));
        let sign = if name == "opaque" {
            "request failed"
        } else {
            "denied"
        };
        let is_denied = bad.iter().all(|line| line.to_lowercase().contains(sign));
        let allowed = responses.good + not_found.len();
        let is_clear = (allowed == 0) != bad.is_empty() && is_denied;
        ensure!(is_clear, "{name}: {responses:?}");
        Ok(allowed > 0)
    }
}

/// Waits until the callers with these names are allowed, and all others denied.
fn expect(callers: &[Caller<'_>], allowed: &[&str]) -> Result<()> {
    wait_for("the verdicts", || {
        for caller in callers {
            let name = caller.app.name;
            let is_allowed = caller.is_allowed()?;
            let expected = allowed.contains(&name);
            ensure!(is_allowed == expected, "{name}: allowed is {is_allowed}");
        }
        Ok(Some(()))
    })
}

/// The servers of the test: HTTP with a headless Service too, gRPC, and one whose port is opaque.
fn start_servers(namespace: &Namespace) -> Result<()> {
    let (server, grpc) = (
        App::http_server(),
        App {
            name: "grpc",
            program: "grpc-server",
            ..App::http_server()
        },
    );
    let raw = App {
        name: "raw",
        ..App::http_server()
    };
    let mut headless: Value = serde_json::from_str(&server.service())?;
    headless["metadata"]["name"] = "headless".into();
    headless["spec"]["clusterIP"] = "None".into();
    let mut opaque: Value = serde_json::from_str(&raw.deployment())?;
    let annotations = &mut opaque["spec"]["template"]["metadata"]["annotations"];
    annotations["diy-service-mesh/opaque-ports"] = "8080".into();
    namespace.apply(&headless.to_string())?;
    namespace.apply(&opaque.to_string())?;
    for app in [server, grpc] {
        namespace.apply(&app.deployment())?;
    }
    for app in [server, grpc, raw] {
        namespace.apply(&app.service())?;
        namespace.rolled_out(app.name)?;
    }
    Ok(())
}

#[test]
fn policies_decide_by_caller_port_and_request_over_every_way_to_a_pod() -> Result<()> {
    in_namespace("verdicts", |namespace| {
        in_namespace("verdicts-elsewhere", |elsewhere| {
            decide(namespace, elsewhere)
        })
    })
}

fn decide(namespace: &Namespace, elsewhere: &Namespace) -> Result<()> {
    start_servers(namespace)?;
    namespace.kubectl(&["create", "serviceaccount", "other"])?;
    let address = namespace.kubectl(&[
        "get",
        "pods",
        "-l",
        "app=server",
        "-o",
        "jsonpath={.items[0].status.podIP}",
    ])?;
    let service = format!("http://server.{}/hello", namespace.name);
    let by_address = format!("http://{address}:8080/hello");
    let client = |name, endpoint| Caller {
        namespace,
        app: App {
            name,
            endpoint,
            ..App::http_client()
        },
        account: "default",
    };
    let mut callers = vec![
        client("client", "http://server/hello"),
        client("path", "http://server/other"),
        client("headless", "http://headless:8080/hello"),
        client("address", &by_address),
        client("account", "http://server/hello"),
        client("plaintext", "http://server/hello"),
        client("opaque", "http://raw/hello"),
        client("grpc-client", "http://grpc"),
        Caller {
            namespace: elsewhere,
            ..client("elsewhere", &service)
        },
    ];
    callers[4].account = "other";
    callers[5].app.inject = None;
    callers[7].app.program = "grpc-client";
    for caller in &callers {
        caller.start()?;
    }
    for caller in &callers {
        caller.namespace.rolled_out(caller.app.name)?;
    }
    let all = [
        "client",
        "path",
        "headless",
        "address",
        "account",
        "plaintext",
        "opaque",
        "grpc-client",
        "elsewhere",
    ];
    expect(&callers, &all)?;
    let account =
        |name: &str| json!([{"type": "ServiceAccount", "serviceAccount": {"name": name}}]);
    let get =
        |path: &str| json!([{"methods": ["GET"], "paths": [{"type": "Exact", "value": path}]}]);
    let allow_rules =
        |rules: Value| policy("p", &all_pods(json!({"action": "ALLOW", "rules": rules})));
    // One account, one path, over every name of the pod.
    namespace.apply(&allow_rules(
        json!([{"sources": account("default"), "requests": get("/hello")}]),
    ))?;
    expect(&callers, &["client", "headless", "address"])?;
    // The others.
    namespace.apply(&allow_rules(json!([
        {"sources": account("other")},
        {"sources": [{"type": "Unauthenticated"}]},
        {"sources": [{"type": "Namespace", "namespace": elsewhere.name}]},
        {"requests": get("/other")},
        {"requests": [{"grpc": [{"service": "echo.v1.EchoService"}]}]},
    ])))?;
    expect(
        &callers,
        &["path", "account", "plaintext", "grpc-client", "elsewhere"],
    )?;
    // Another method, another gRPC method, and connections without requests.
    namespace.apply(&allow_rules(json!([
        {"requests": [{"methods": ["POST"], "paths": [{"type": "Exact", "value": "/hello"}]}]},
        {"requests": [{"grpc": [{"service": "echo.v1.EchoService", "method": "Other"}]}]},
    ])))?;
    expect(&callers, &[])?;
    namespace.apply(&allow_rules(json!([{"sources": account("default")}])))?;
    expect(
        &callers,
        &[
            "client",
            "path",
            "headless",
            "address",
            "opaque",
            "grpc-client",
        ],
    )?;
    // DENY wins, on its ports. All servers listen on the same port.
    let deny = json!([{"networkAttributes": {"ports": [8080]}, "requests": get("/hello")}]);
    namespace.apply(&policy(
        "deny",
        &all_pods(json!({"action": "DENY", "rules": deny})),
    ))?;
    expect(&callers, &["path", "grpc-client"])
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

/// A current condition of a policy for its first target.
fn condition(namespace: &Namespace, name: &str, kind: &str) -> Result<Value> {
    let json = namespace.kubectl(&["get", "authorizationpolicy", name, "-o", "json"])?;
    let policy: Value = serde_json::from_str(&json)?;
    let conditions = policy["status"]["ancestors"][0]["conditions"].as_array();
    let generation = &policy["metadata"]["generation"];
    let is_current = |one: &&Value| one["type"] == kind && one["observedGeneration"] == *generation;
    let found = conditions.into_iter().flatten().find(is_current);
    found
        .cloned()
        .with_context(|| format!("no condition {kind} in {:#}", policy["status"]))
}

/// Requests between two changes of a policy.
const REQUESTS: usize = 100;

#[test]
fn no_verdict_under_load_is_wrong_once_a_changed_policy_is_programmed() -> Result<()> {
    in_namespace("changes", |namespace| {
        let server = App {
            replicas: 2,
            ..App::http_server()
        };
        let client = App {
            replicas: 2,
            interval_ms: "10",
            ..App::http_client()
        };
        namespace.wait_for_responses(&server, &client)?;
        for is_allowed in [false, true, false] {
            let source = json!({"type": "Namespace", "namespace": namespace.name});
            let sources = if is_allowed { vec![source] } else { vec![] };
            namespace.apply(&policy("p", &allow(json!({"sources": sources}))))?;
            wait_for("the change of the policy", || {
                let programmed = "diy-service-mesh.dev/Programmed";
                let condition = condition(namespace, "p", programmed)?;
                ensure!(condition["status"] == "True", "{condition:#}");
                Ok(Some(()))
            })?;
            let before = namespace.responses(&client)?;
            let count = |responses: &Responses| responses.good + responses.bad.len();
            let after = wait_for("requests", || {
                let responses = namespace.responses(&client)?;
                let is_enough = count(&responses) >= count(&before) + REQUESTS;
                Ok(is_enough.then_some(responses))
            })?;
            let good = after.good - before.good;
            let bad = after.bad.len() - before.bad.len();
            let wrong = if is_allowed { bad } else { good };
            ensure!(
                wrong == 0,
                "allowed is {is_allowed}: {good} allowed, {bad} denied"
            );
        }
        Ok(())
    })
}
