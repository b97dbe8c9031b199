//! Routes on a cluster: their effect, and their status. `make conformance` covers the features of
//! the Gateway API.

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::gateway_api::{
    ACCEPTED, Experimental, apply_canary, install, route, standard, wait_for_condition,
};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{Namespace, in_namespace, versions, wait_for};
use diy_mesh_tests::routes::{binomial_bounds, grant, http_route, rule, servers};
use diy_mesh_tests::sandbox::programs;
use serde_json::{Value, json};

const RESOLVED: [&str; 3] = ["ResolvedRefs", "True", "ResolvedRefs"];

/// Starts both versions of the server.
fn start(namespace: &Namespace) -> Result<()> {
    install()?;
    versions::start(namespace)
}

fn client<'a>(name: &'a str, endpoint: &'a str, replicas: u32) -> App<'a> {
    App {
        name,
        endpoint,
        replicas,
        ..App::http_client()
    }
}

/// Waits until the log of a client contains a text after its current end.
fn wait_for_new(namespace: &Namespace, app: &App<'_>, text: &str) -> Result<()> {
    let before = namespace.logs(app.name, app.program)?.len();
    wait_for(&format!("{} logs {text}", app.name), || {
        let logs = namespace.logs(app.name, app.program)?;
        let new = logs.get(before..).unwrap_or_default();
        Ok(new.contains(text).then_some(()))
    })
}

#[test]
fn canary_receives_its_share_and_status_is_written() -> Result<()> {
    in_namespace("canary", |namespace| {
        start(namespace)?;
        apply_canary(namespace, 10)?;
        wait_for_condition(namespace, "httproute", "web", RESOLVED)?;
        let clients = client("client", "http://web/hello", 10);
        namespace.apply(&clients.deployment())?;
        namespace.rolled_out(clients.name)?;
        let counts = wait_for("300 responses", || {
            let logs = namespace.logs(clients.name, clients.program)?;
            let count = |version: &str| logs.matches(&format!("Version: {version}")).count();
            let counts = (count("1.0"), count("2.0"));
            Ok((counts.0 + counts.1 >= 300).then_some(counts))
        })?;
        let bounds = binomial_bounds(counts.0 + counts.1, 0.1);
        ensure!(
            bounds.contains(&counts.1),
            "{counts:?}, expected {bounds:?}"
        );
        let responses = namespace.responses(&clients)?;
        ensure!(responses.bad.is_empty(), "{:#?}", responses.bad);
        keeps_entries_of_other_controllers(namespace)?;
        reports_routes(namespace)
    })
}

/// Adds an entry of another controller, and changes the route.
fn keeps_entries_of_other_controllers(namespace: &Namespace) -> Result<()> {
    let other = json!({
        "parentRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "edge"},
        "controllerName": "example.net/other",
        "conditions": [{"type": "Accepted", "status": "True", "reason": "Accepted", "message": "",
            "observedGeneration": 1, "lastTransitionTime": "2020-01-01T00:00:00Z"}],
    });
    let patch = json!([{"op": "add", "path": "/status/parents/0", "value": other}]).to_string();
    namespace.kubectl(&[
        "patch",
        "httproute",
        "web",
        "--subresource=status",
        "--type=json",
        "-p",
        &patch,
    ])?;
    let before = route(namespace, "httproute", "web")?;
    let after = apply_canary(namespace, 100)?;
    ensure!(after["metadata"]["generation"] != before["metadata"]["generation"]);
    ensure!(
        after["status"]["parents"][0] == other,
        "{:#}",
        after["status"]
    );
    let transition = |route: &Value| {
        route["status"]["parents"][1]["conditions"][0]["lastTransitionTime"].clone()
    };
    ensure!(
        transition(&before) == transition(&after),
        "{:#}",
        after["status"]
    );
    Ok(())
}

/// The JSON that a command of `mesh` prints.
fn mesh(arguments: &[&str]) -> Result<Value> {
    let output = std::process::Command::new(programs().join("mesh"))
        .args(arguments)
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(&text).with_context(|| format!("{output:?}"))
}

/// `mesh routes` and `mesh check` on the same cluster.
fn reports_routes(namespace: &Namespace) -> Result<()> {
    let routes = mesh(&["routes", "-n", &namespace.name, "-o", "json"])?;
    let weights = &routes[0]["rules"][0]["backends"];
    ensure!(weights[1]["weight"] == 100, "{routes:#}");
    let conditions = &routes[0]["parents"][0]["conditions"];
    ensure!(conditions[0]["status"] == true, "{routes:#}");
    let _standard = standard();
    let report = mesh(&["check", "-o", "json"])?;
    let mut findings = report["checks"].as_array().into_iter().flatten();
    let finding = findings.find(|finding| finding["check"] == "gateway-api");
    ensure!(
        finding.is_some_and(|one| one["level"] == "ok"),
        "{finding:?}"
    );
    Ok(())
}

#[test]
fn route_of_a_younger_headless_service_has_a_condition_until_the_older_one_is_deleted() -> Result<()>
{
    in_namespace("headless-routes", |namespace| {
        start(namespace)?;
        // Services of the same second are ordered by their names.
        for name in ["all", "pods"] {
            namespace.apply(&format!(
                "
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  clusterIP: None
  selector: {{app: web-v1}}
  ports: [{{name: http, port: 80, targetPort: 8080}}]
"
            ))?;
        }
        namespace.apply(
            "
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: pods}
spec:
  parentRefs: [{group: '', kind: Service, name: pods}]
  rules: [{timeouts: {request: 5s}, backendRefs: [{name: pods, port: 80}]}]
",
        )?;
        let older = "diy-service-mesh.dev/AppliesToAllPods";
        let condition = [older, "False", "OlderService"];
        let accepted = wait_for_condition(namespace, "httproute", "pods", ACCEPTED)?;
        let described = wait_for_condition(namespace, "httproute", "pods", condition)?;
        let [all, pods] = ["all", "pods"].map(|name| format!("{}/{name}", namespace.name));
        let status = described["status"].to_string();
        let without_effect = "requests stay at the pod that the client has selected";
        ensure!(status.contains(without_effect), "{status}");
        let expected = format!("apply to 1 of the pods of {pods}: {all} (pods web-v1-");
        ensure!(status.contains(&expected), "{status}");
        let explained = mesh(&["routes", &pods, "-o", "json"])?;
        let problems = explained[0]["problems"].to_string();
        ensure!(problems.contains(&expected), "{explained:#}");
        namespace.kubectl(&["delete", "service", "all"])?;
        let what = "the condition about older Services is removed";
        wait_for(what, || {
            let route = route(namespace, "httproute", "pods")?;
            let is_there = route["status"].to_string().contains(older);
            Ok((!is_there).then_some(()))
        })?;
        let after = wait_for_condition(namespace, "httproute", "pods", ACCEPTED)?;
        let generation = |route: &Value| route["metadata"]["generation"].clone();
        ensure!(generation(&accepted) == generation(&after), "{after:#}");
        Ok(())
    })
}

#[test]
fn matches_errors_and_grants_take_effect() -> Result<()> {
    in_namespace("route-errors", |namespace| {
        in_namespace("route-backends", |other| {
            start(namespace)?;
            start(other)?;
            let path = |path: &str| format!("{{path: {{type: Exact, value: {path}}}}}");
            let agent = "{headers: [{name: User-Agent, type: RegularExpression, value: 'diy-http-client/.*'}], \
                         path: {type: Exact, value: /hello}}";
            let foreign = format!("{{name: web-v2, namespace: {}, port: 80}}", other.name);
            let rules = [
                rule(agent, "{name: web-v2, port: 80}"),
                rule(&path("/missing"), "{name: none, port: 80}"),
                // The application does not know this path: 404 with its own text.
                rule(&path("/foreign"), &foreign),
            ];
            let name = &namespace.name;
            let rules = format!("[{}]", rules.join(", "));
            namespace.apply(&http_route(name, "web", name, &rules))?;
            let clients = [
                client("canary", "http://web/hello", 1),
                client("unmatched", "http://web/none", 1),
                client("missing", "http://web/missing", 1),
                client("foreign", "http://web/foreign", 1),
            ];
            for client in &clients {
                namespace.apply(&client.deployment())?;
                namespace.rolled_out(client.name)?;
            }
            let [canary, unmatched, missing, foreign] = &clients;
            wait_for_new(namespace, canary, "Version: 2.0")?;
            wait_for_new(namespace, unmatched, "HTTP/1.1 404 ")?;
            wait_for_new(namespace, missing, "HTTP/1.1 500 ")?;
            wait_for_new(namespace, foreign, "HTTP/1.1 500 ")?;
            wait_for_condition(namespace, "httproute", "web", ACCEPTED)?;
            let route = route(namespace, "httproute", "web")?;
            let conditions = &route["status"]["parents"][0]["conditions"];
            let resolved = conditions.as_array().into_iter().flatten();
            let mut resolved = resolved.filter(|one| one["type"] == "ResolvedRefs");
            ensure!(
                resolved.all(|one| one["status"] == "False"),
                "{conditions:#}"
            );
            other.apply(&grant(&other.name, name))?;
            wait_for_new(namespace, foreign, "this server answers /hello")?;
            // Only the missing Service remains.
            let missing = ["ResolvedRefs", "False", "BackendNotFound"];
            wait_for_condition(namespace, "httproute", "web", missing).map(drop)
        })
    })
}

#[test]
fn route_in_the_clients_namespace_wins() -> Result<()> {
    in_namespace("route-producer", |producer| {
        in_namespace("route-consumer", |consumer| {
            start(producer)?;
            let to = |name: &str| {
                format!(
                    "[{{backendRefs: [{{name: {name}, namespace: {}, port: 80}}]}}]",
                    producer.name
                )
            };
            producer.apply(&http_route(
                &producer.name,
                "web",
                &producer.name,
                &to("web-v1"),
            ))?;
            consumer.apply(&http_route(
                &consumer.name,
                "web",
                &producer.name,
                &to("web-v2"),
            ))?;
            producer.apply(&grant(&producer.name, &consumer.name))?;
            wait_for_condition(consumer, "httproute", "web", RESOLVED)?;
            let endpoint = format!("http://web.{}/hello", producer.name);
            let client = client("client", &endpoint, 1);
            for (namespace, version) in [(producer, "1.0"), (consumer, "2.0")] {
                namespace.apply(&client.deployment())?;
                namespace.rolled_out(client.name)?;
                wait_for_new(namespace, &client, &format!("Version: {version}"))?;
            }
            Ok(())
        })
    })
}

#[test]
fn grpc_calls_follow_a_grpc_route() -> Result<()> {
    in_namespace("grpc-route", |namespace| {
        install()?;
        namespace.apply(&servers(&namespace.name).replace("http-server", "grpc-server"))?;
        namespace.rolled_out("web-v1")?;
        namespace.rolled_out("web-v2")?;
        let client = App {
            program: "grpc-client",
            ..client("client", "http://web:80", 1)
        };
        namespace.apply(&client.deployment())?;
        namespace.rolled_out(client.name)?;
        wait_for_new(namespace, &client, "Version: 1.0")?;
        namespace.apply(
            "
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {name: web}
spec:
  parentRefs: [{group: '', kind: Service, name: web}]
  rules:
    - matches: [{method: {service: echo.v1.EchoService}}]
      backendRefs: [{name: web-v2, port: 80}]
",
        )?;
        wait_for_condition(namespace, "grpcroute", "web", ACCEPTED)?;
        wait_for_new(namespace, &client, "Version: 2.0")
    })
}

#[test]
fn fields_of_the_experimental_channel_are_stored_and_accepted() -> Result<()> {
    in_namespace("experimental", |namespace| {
        start(namespace)?;
        let _experimental = Experimental::install()?;
        let name = &namespace.name;
        let rules =
            "[{backendRefs: [{name: web-v2, port: 80}], retry: {attempts: 2, codes: [503]}}]";
        // The API server uses the new schema with a delay.
        let stored = wait_for("retry is stored", || {
            namespace.apply(&http_route(name, "web", name, rules))?;
            let route = route(namespace, "httproute", "web")?;
            Ok(Some(route).filter(|route| route["spec"]["rules"][0]["retry"]["attempts"] == 2))
        })?;
        ensure!(stored["spec"]["rules"][0]["retry"]["codes"] == json!([503]));
        wait_for_condition(namespace, "httproute", "web", ACCEPTED).map(drop)
    })
}
