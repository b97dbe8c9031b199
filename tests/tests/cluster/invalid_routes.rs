//! Invalid routes on a cluster: those that the API server stores get a condition that names the
//! field, and do not disturb an older valid route of the same Service. Their latest state alone
//! decides, also after a restart of the controllers.

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::gateway_api::{
    ACCEPTED, apply_canary, install, standard, wait_for_condition,
};
use diy_mesh_tests::cluster::load::Load;
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{
    MESH, Namespace, in_namespace, kubectl, rolled_out, versions, wait_for,
};
use diy_mesh_tests::repository::root;
use serde_json::{Value, json};

/// Kind, parent and rule of an invalid route, then type, reason and a part of the message of its
/// condition.
type Case = (&'static str, Value, Value, [&'static str; 3]);

const HTTP: &str = "HTTPRoute";
const GRPC: &str = "GRPCRoute";
const UNSUPPORTED: &str = "UnsupportedValue";

/// Routes that do not apply at all.
fn rejected() -> Vec<Case> {
    let web = || json!({"name": "web"});
    let http = |rule: Value, reason, field| (HTTP, web(), rule, ["Accepted", reason, field]);
    // A GRPCRoute of `web` with a rule that can be read would exclude the valid route.
    let grpc = |rule: Value, field| {
        let parent = json!({"name": "web-v1"});
        (GRPC, parent, rule, ["Accepted", UNSUPPORTED, field])
    };
    let one_match = |one: Value| json!({"matches": [one]});
    let regex = |value: &str| json!({"type": "RegularExpression", "name": "a", "value": value});
    let path = |value: &str| json!({"path": {"type": "RegularExpression", "value": value}});
    let filter = |kind: &str, field: &str, value: Value| json!({"type": kind, field: value});
    let request = |value| filter("RequestHeaderModifier", "requestHeaderModifier", value);
    let set = |name: &str| request(json!({"set": [{"name": name, "value": "x"}]}));
    let response = filter(
        "ResponseHeaderModifier",
        "responseHeaderModifier",
        json!({"set": [{"name": "x-mesh-error", "value": "x"}]}),
    );
    let rewrite = json!({"path": {"type": "ReplaceFullPath", "replaceFullPath": "/a b"}});
    let rewrite = filter("URLRewrite", "urlRewrite", rewrite);
    let line_end = json!({"set": [{"name": "a", "value": "x\r\ny: z"}]});
    let redirect = json!({"type": "RequestRedirect", "requestRedirect": {"statusCode": 301}});
    let of_backend =
        json!({"backendRefs": [{"name": "web-v1", "port": 80, "filters": [redirect]}]});
    let of_rule = |filter: Value| json!({"filters": [filter]});
    let method = |part: Value| one_match(json!({"method": part}));
    let service = json!({"type": "RegularExpression", "service": "["});
    vec![
        http(
            one_match(path("(")),
            UNSUPPORTED,
            "spec.rules[0].matches[0].path.value: \"(\"",
        ),
        http(
            one_match(path("/(a{1,500}){1,500}")),
            UNSUPPORTED,
            "spec.rules[0].matches[0].path.value",
        ),
        http(
            one_match(json!({"headers": [regex("[")]})),
            UNSUPPORTED,
            "spec.rules[0].matches[0].headers[0].value: \"[\"",
        ),
        http(
            one_match(json!({"queryParams": [regex("*")]})),
            UNSUPPORTED,
            "spec.rules[0].matches[0].queryParams[0].value: \"*\"",
        ),
        http(
            of_rule(set("Transfer-Encoding")),
            UNSUPPORTED,
            "spec.rules[0].filters[0].requestHeaderModifier.set",
        ),
        http(
            of_rule(set("Host")),
            UNSUPPORTED,
            "spec.rules[0].filters[0].requestHeaderModifier.set",
        ),
        http(
            of_rule(set("X-Called-By")),
            UNSUPPORTED,
            "spec.rules[0].filters[0].requestHeaderModifier.set",
        ),
        http(
            of_rule(request(json!({"remove": ["Connection"]}))),
            UNSUPPORTED,
            "spec.rules[0].filters[0].requestHeaderModifier.remove",
        ),
        http(
            of_rule(request(line_end)),
            UNSUPPORTED,
            "spec.rules[0].filters[0].requestHeaderModifier.set",
        ),
        http(
            of_rule(response),
            UNSUPPORTED,
            "spec.rules[0].filters[0].responseHeaderModifier.set",
        ),
        http(
            of_rule(rewrite),
            UNSUPPORTED,
            "spec.rules[0].filters[0].urlRewrite.path.replaceFullPath",
        ),
        http(
            of_backend,
            "IncompatibleFilters",
            "spec.rules[0].backendRefs[0].filters",
        ),
        grpc(method(service), "spec.rules[0].matches[0].method"),
        grpc(
            one_match(json!({"headers": [regex("(?=a)")]})),
            "spec.rules[0].matches[0].headers[0].value",
        ),
        grpc(
            of_rule(set("content-length")),
            "spec.rules[0].filters[0].requestHeaderModifier.set",
        ),
        (
            HTTP,
            json!({"name": "none"}),
            json!({}),
            ["Accepted", "NoMatchingParent", "none does not exist"],
        ),
        (
            HTTP,
            json!({"name": "web", "port": 81}),
            json!({}),
            ["Accepted", "NoMatchingParent", "no such TCP port"],
        ),
        (
            GRPC,
            json!({"name": "external"}),
            json!({}),
            ["Accepted", UNSUPPORTED, "external is an ExternalName"],
        ),
    ]
}

/// Routes whose requests fail, because they refer to what does not exist.
fn unresolved() -> Vec<Case> {
    let case = |kind, parent: &str, rule, reason, field| {
        (
            kind,
            json!({"name": parent}),
            rule,
            ["ResolvedRefs", reason, field],
        )
    };
    let backend = |reference: Value| json!({"backendRefs": [reference]});
    let http = |rule: Value, reason, field| {
        let mut rule = rule;
        rule["matches"] = json!([{"path": {"type": "Exact", "value": "/invalid"}}]);
        case(HTTP, "web", rule, reason, field)
    };
    let extension = json!({"type": "ExtensionRef", "extensionRef": {"group": "a.example", "kind": "B", "name": "c"}});
    let mirror = json!({"type": "RequestMirror", "requestMirror": {"backendRef": {"name": "none", "port": 80}}});
    vec![
        http(
            backend(json!({"name": "none", "port": 80})),
            "BackendNotFound",
            "spec.rules[0].backendRefs[0]",
        ),
        http(
            backend(json!({"name": "web-v1", "port": 81})),
            "BackendNotFound",
            "spec.rules[0].backendRefs[0]",
        ),
        http(
            backend(json!({"name": "web-v1", "namespace": "default", "port": 80})),
            "RefNotPermitted",
            "spec.rules[0].backendRefs[0]",
        ),
        http(
            backend(json!({"name": "a", "group": "a.example", "kind": "B"})),
            "InvalidKind",
            "spec.rules[0].backendRefs[0]",
        ),
        http(
            json!({"filters": [extension]}),
            "InvalidKind",
            "spec.rules[0].filters[0]",
        ),
        http(
            json!({"filters": [mirror], "backendRefs": [{"name": "web-v1", "port": 80}]}),
            "BackendNotFound",
            "spec.rules[0].filters[0].requestMirror.backendRef",
        ),
        // A GRPCRoute of `web` would exclude the valid route.
        case(
            GRPC,
            "web-v1",
            backend(json!({"name": "none", "port": 80})),
            "BackendNotFound",
            "spec.rules[0].backendRefs[0]",
        ),
    ]
}

#[test]
fn invalid_routes_get_a_condition_and_the_valid_one_stays_in_force() -> Result<()> {
    in_namespace("invalid-routes", |namespace| {
        install()?;
        versions::start(namespace)?;
        apply_canary(namespace, 100)?;
        let client = client("client");
        let load = Load::start(namespace, client)?;
        wait_for_version_2(namespace, client.name)?;
        let first_version = |namespace: &Namespace| -> Result<usize> {
            let logs = namespace.logs(client.name, client.program)?;
            Ok(logs.matches("Version: 1.0").count())
        };
        let before = first_version(namespace)?;

        // The other channel does not store all of them.
        let _standard = standard();
        let cases = [rejected(), unresolved()].concat();
        ensure!(cases.len() >= 20, "{} cases", cases.len());
        namespace.apply(&objects(&cases).to_string())?;
        wait_for("conditions of all routes", || {
            check(namespace, &cases).map(Some)
        })?;
        load.expect_no_failure()?;
        ensure!(
            before == first_version(namespace)?,
            "the valid route is in force"
        );
        Ok(())
    })
}

/// The route sends all requests to version 2.0. Without a readable rule, they fail.
#[test]
fn route_without_a_readable_rule_fails_requests_also_after_a_restart_of_the_controllers()
-> Result<()> {
    in_namespace("unreadable", |namespace| {
        install()?;
        versions::start(namespace)?;
        apply_canary(namespace, 100)?;
        let _before = Load::start(namespace, client("before"))?;
        wait_for_version_2(namespace, "before")?;
        patch(
            namespace,
            r#"[{"path": {"type": "RegularExpression", "value": "("}}]"#,
        )?;
        let rejected = ["Accepted", "False", UNSUPPORTED];
        wait_for_condition(namespace, "httproute", "web", rejected)?;
        wait_for_failures(namespace, "before")?;

        kubectl(&["rollout", "restart", "-n", MESH, "deployment/controller"])?;
        rolled_out(MESH, "controller")?;
        // The proxies of new clients know only what the new controllers send.
        namespace.apply(&client("after").deployment())?;
        namespace.rolled_out("after")?;
        wait_for_failures(namespace, "after")?;
        let logs = namespace.logs("after", "http-client")?;
        ensure!(!logs.contains("Version: "), "{logs}");

        patch(namespace, "[]")?;
        wait_for_condition(namespace, "httproute", "web", ACCEPTED)?;
        wait_for_version_2(namespace, "after")
    })
}

/// The warnings of manifests/route-warnings about routes, and the routes without a warning.
#[test]
fn api_server_warns_of_what_the_mesh_does_not_apply() -> Result<()> {
    let folder = root().join("manifests/route-warnings");
    let folder = folder.to_str().context("UTF-8")?;
    in_namespace("warned", |namespace| {
        install()?;
        kubectl(&["apply", "-k", folder])?;
        let result = check_warnings(namespace);
        kubectl(&["delete", "-k", folder])?;
        result
    })
}

fn check_warnings(namespace: &Namespace) -> Result<()> {
    let of_service = json!({"group": "", "kind": "Service", "name": "web"});
    let of_gateway = json!({"name": "web"});
    let rule = |rule: Value| json!({"rules": [rule]});
    let filter = |filter: Value| json!({"filters": [filter]});
    let extension = json!({"group": "example.com", "kind": "Filter", "name": "a"});
    let extension = filter(json!({"type": "ExtensionRef", "extensionRef": extension}));
    let host = json!({"remove": ["Host"]});
    let modifier = json!({"type": "RequestHeaderModifier", "requestHeaderModifier": host});
    let caller = json!({"set": [{"name": "X_Called-By", "value": "me"}]});
    let forged = json!({"type": "ResponseHeaderModifier", "responseHeaderModifier": caller});
    let redirect = json!({"type": "RequestRedirect", "requestRedirect": {"statusCode": 301}});
    let backend = |backend: Value| rule(json!({"backendRefs": [backend]}));
    let bucket = json!({"group": "example.com", "kind": "Bucket", "name": "a"});
    let cases = [
        (
            rule(extension.clone()),
            "the mesh has no ExtensionRef filters",
        ),
        (
            backend(json!({"name": "web", "port": 80, "filters": extension["filters"]})),
            "the mesh has no ExtensionRef filters",
        ),
        (
            backend(json!({"name": "web", "port": 80, "filters": [redirect]})),
            "are filters of rules",
        ),
        (backend(bucket), "backends of the mesh are Services"),
        (rule(filter(modifier)), "filters do not change headers"),
        (rule(filter(forged)), "filters do not change headers"),
        (
            json!({"hostnames": ["a.example"]}),
            "spec.hostnames has no effect",
        ),
    ];
    let route = |mut spec: Value, parent: &Value| {
        spec["parentRefs"] = json!([parent]);
        json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": HTTP,
            "metadata": {"name": "warned"}, "spec": spec})
    };
    for (spec, expected) in &cases {
        // The API server takes a moment to apply a new policy.
        wait_for(&format!("a warning {expected:?} of {spec}"), || {
            let warnings = warnings(namespace, &route(spec.clone(), &of_service), true)?;
            Ok(warnings.contains(expected).then_some(()))
        })?;
        let of_gateway = warnings(namespace, &route(spec.clone(), &of_gateway), true)?;
        ensure!(of_gateway.is_empty(), "{of_gateway}");
    }
    let valid = backend(json!({"name": "web", "port": 80}));
    let valid = warnings(namespace, &route(valid, &of_service), true)?;
    ensure!(valid.is_empty(), "{valid}");
    // Only a change of the spec: neither the controller's status nor a label is the author's word.
    let mut stored = route(cases[0].0.clone(), &of_service);
    ensure!(!warnings(namespace, &stored, false)?.is_empty());
    stored["metadata"]["labels"] = json!({"changed": "yes"});
    let labeled = warnings(namespace, &stored, false)?;
    ensure!(labeled.is_empty(), "{labeled}");
    Ok(())
}

/// The warnings of the API server about a route.
fn warnings(namespace: &Namespace, route: &Value, is_dry_run: bool) -> Result<String> {
    let mut command = Command::new("kubectl");
    command.args(["apply", "-n", &namespace.name, "-f", "-"]);
    if is_dry_run {
        command.arg("--dry-run=server");
    }
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut input = child.stdin.take().context("a pipe")?;
    input.write_all(route.to_string().as_bytes())?;
    drop(input);
    let output = child.wait_with_output()?;
    let text = String::from_utf8(output.stderr)?;
    ensure!(output.status.success(), "{text}");
    Ok(text)
}

fn wait_for_failures(namespace: &Namespace, client: &str) -> Result<()> {
    wait_for("requests fail with status 500", || {
        let logs = namespace.logs(client, "http-client")?;
        Ok(logs.contains("HTTP/1.1 500 ").then_some(()))
    })
}

fn client(name: &'static str) -> App<'static> {
    App {
        name,
        endpoint: "http://web/hello",
        interval_ms: "50",
        ..App::http_client()
    }
}

fn wait_for_version_2(namespace: &Namespace, client: &str) -> Result<()> {
    wait_for("version 2.0", || {
        let logs = namespace.logs(client, "http-client")?;
        Ok(logs.contains("Version: 2.0").then_some(()))
    })
}

/// Sets the matches of the first rule of HTTPRoute `web`.
fn patch(namespace: &Namespace, matches: &str) -> Result<()> {
    let patch =
        format!(r#"[{{"op": "add", "path": "/spec/rules/0/matches", "value": {matches}}}]"#);
    let arguments = ["patch", "httproute", "web", "--type=json", "-p", &patch];
    namespace.kubectl(&arguments).map(drop)
}

/// The routes of all cases, and the ExternalName that one of them names.
fn objects(cases: &[Case]) -> Value {
    let external = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "external"},
        "spec": {"type": "ExternalName", "externalName": "a.example"}});
    let routes = cases
        .iter()
        .enumerate()
        .map(|(number, (kind, parent, rule, _))| {
            let mut parent = parent.clone();
            parent["group"] = json!("");
            parent["kind"] = json!("Service");
            json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": kind,
            "metadata": {"name": format!("invalid-{number}")},
            "spec": {"parentRefs": [parent], "rules": [rule]}})
        });
    let items: Vec<Value> = std::iter::once(external).chain(routes).collect();
    json!({"apiVersion": "v1", "kind": "List", "items": items})
}

/// Fails unless each route has its condition.
fn check(namespace: &Namespace, cases: &[Case]) -> Result<()> {
    let json = namespace.kubectl(&["get", "httproutes,grpcroutes", "-o", "json"])?;
    let routes: Value = serde_json::from_str(&json)?;
    let routes = routes["items"].as_array().context("a list")?;
    for (number, (_, _, rule, [kind, reason, field])) in cases.iter().enumerate() {
        let name = format!("invalid-{number}");
        let mut routes = routes.iter();
        let route = routes.find(|one| one["metadata"]["name"] == json!(name));
        let status = &route.context(name)?["status"]["parents"][0]["conditions"];
        let mut conditions = status.as_array().into_iter().flatten();
        let is_it = |one: &Value| {
            let message = one["message"].as_str().unwrap_or_default();
            one["type"] == *kind
                && one["status"] == "False"
                && one["reason"] == *reason
                && message.contains(field)
        };
        ensure!(
            conditions.any(is_it),
            "{rule}: expected {kind} {reason} {field}, got {status:#}"
        );
    }
    Ok(())
}
