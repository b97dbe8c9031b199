//! External authorization through two proxies, by a server with Envoy's own messages and by one with
//! HTTP: what it answers, and what happens without an answer.

use anyhow::{Result, ensure};
use diy_mesh_tests::cluster::gateway_api::{ACCEPTED, Experimental, wait_for_condition};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{MANIFESTS, Namespace, in_namespace, kubectl, wait_for};
use serde_json::{Value, json};

/// The sample server knows no such path.
const ALLOWED: &str = "404";
const FAILED: &str = "503";

/// The response to a request of a pod: the status, the fields and the body.
fn get(namespace: &Namespace, from: &str, url: &str) -> Result<String> {
    let from = format!("deploy/{from}");
    let program = [&from, "-c", "authorizer", "--", "authorizer", "get", url];
    namespace.kubectl(&[&["exec"], &program[..]].concat())
}

fn expect(namespace: &Namespace, path: &str, status: &str, part: &str) -> Result<()> {
    let url = format!("http://server{path}");
    expect_from(namespace, ["authorizer", &url], status, part)
}

fn expect_from(
    namespace: &Namespace,
    [from, url]: [&str; 2],
    status: &str,
    part: &str,
) -> Result<()> {
    let response = get(namespace, from, url)?;
    let is_expected = response.starts_with(status) && response.contains(part);
    ensure!(
        is_expected,
        "{from} {url}: {response}, expected {status} {part}"
    );
    Ok(())
}

#[test]
fn authorization_servers_decide_and_the_failure_mode_without_them() -> Result<()> {
    in_namespace("external", |namespace| {
        kubectl(&["apply", "-k", &format!("{MANIFESTS}/crds")])?;
        namespace.apply(&App::authorizer("authorizer").deployment())?;
        namespace.apply(&service().to_string())?;
        namespace.apply(&App::http_server().deployment())?;
        namespace.apply(&App::http_server().service())?;
        namespace.rolled_out("authorizer")?;
        namespace.rolled_out("server")?;
        for (name, port) in [("grpc", 9000), ("http", 8000), ("refused", 7000)] {
            for mode in ["Deny", "Allow"] {
                namespace.apply(&policy(name, port, mode).to_string())?;
            }
        }
        for (name, status, body) in [
            ("grpc", "401", "denied by gRPC"),
            ("http", "403", "denied by HTTP"),
        ] {
            for mode in ["Deny", "Allow"] {
                wait_for("the denial", || {
                    expect(namespace, &format!("/{name}/{mode}/deny"), status, body)?;
                    Ok(Some(()))
                })?;
                expect(namespace, &format!("/{name}/{mode}/allow"), ALLOWED, "")?;
            }
            for (sent, told) in [("four", "fourfalse"), ("fours", "fourtrue")] {
                let url = format!("http://server/{name}/Deny/deny");
                let program = ["authorizer", "get", &url, sent];
                let pod = ["exec", "deploy/authorizer", "-c", "authorizer", "--"];
                let response = namespace.kubectl(&[&pod[..], &program].concat())?;
                ensure!(response.ends_with(told), "{response}, expected {told}");
            }
        }
        for name in ["grpc", "http", "refused"] {
            for action in ["error", "empty", "slow", "reset"] {
                let path = |mode| format!("/{name}/{mode}/{action}");
                expect(namespace, &path("Deny"), FAILED, "authorizer-failed")?;
                expect(namespace, &path("Allow"), ALLOWED, "")?;
            }
        }
        // The sample server prints what it gets at this path.
        namespace.apply(&policy("hello", 9000, "Deny").to_string())?;
        wait_for("the field of the server", || {
            expect(namespace, "/hello", "200", "")?;
            let received = namespace.logs("server", "http-server")?.to_lowercase();
            ensure!(received.contains("x-user: ada"), "no X-User in {received}");
            Ok(Some(()))
        })?;
        let asked = namespace.logs("authorizer", "authorizer")?;
        for line in [
            "grpc GET /grpc/Deny/deny from",
            "http GET /http/Deny/deny from",
        ] {
            let account = format!("spiffe://cluster.local/ns/{}/sa/default", namespace.name);
            ensure!(asked.contains(&format!("{line} {account}")), "{asked}");
        }
        Ok(())
    })
}

#[test]
fn filter_of_a_route_holds_at_the_called_pods_for_all_clients() -> Result<()> {
    in_namespace("external-route", |namespace| {
        let _experimental = Experimental::install()?;
        let outside = App {
            name: "outside",
            inject: None,
            ..App::authorizer("authorizer")
        };
        for app in [App::authorizer("authorizer"), outside, App::http_server()] {
            namespace.apply(&app.deployment())?;
        }
        namespace.apply(&service().to_string())?;
        namespace.apply(&App::http_server().service())?;
        for name in ["authorizer", "outside", "server"] {
            namespace.rolled_out(name)?;
        }
        namespace.apply(&route("server").to_string())?;
        wait_for_condition(namespace, "httproute", "server", ACCEPTED)?;
        let ip = ["get", "pods", "-l", "app=server", "-o"];
        let ip = [&ip[..], &["jsonpath={.items[0].status.podIP}"]].concat();
        let pod = format!("{}:8080", namespace.kubectl(&ip)?);
        for from in ["authorizer", "outside"] {
            for host in ["server", &pod] {
                for (path, status, body) in [
                    ("/deny", "401", "denied by gRPC"),
                    ("/allow", ALLOWED, ""),
                    ("/error", FAILED, "authorizer-failed"),
                    ("/open/deny", ALLOWED, ""),
                    ("/open/%2e%2e/deny", "401", "denied by gRPC"),
                ] {
                    let url = format!("http://{host}{path}");
                    wait_for("the answer", || {
                        expect_from(namespace, [from, &url], status, body)?;
                        Ok(Some(()))
                    })?;
                }
            }
        }
        // Pods of another Service would not ask. Until it is right, nobody can allow a request.
        namespace.apply(&route("authorizer").to_string())?;
        let refused = ["PartiallyInvalid", "True", "IncompatibleFilters"];
        wait_for_condition(namespace, "httproute", "server", refused)?;
        let url = format!("http://{pod}/allow");
        wait_for("the refusal", || {
            expect_from(namespace, ["outside", &url], FAILED, "authorizer-failed")?;
            Ok(Some(()))
        })
    })
}

/// Requests to the server go to a Service if its filter allows them. Requests below /open have no
/// filter.
fn route(backend: &str) -> Value {
    let port = if backend == "server" { 80 } else { 8000 };
    let backends = json!([{"name": backend, "port": port}]);
    let filter = json!({
        "type": "ExternalAuth",
        "externalAuth": {
            "protocol": "GRPC", "grpc": {}, "backendRef": {"name": "authorizer", "port": 9000},
        },
    });
    let prefix = |path: &str| json!([{"path": {"type": "PathPrefix", "value": path}}]);
    json!({
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
        "metadata": {"name": "server"},
        "spec": {
            "parentRefs": [{"group": "", "kind": "Service", "name": "server"}],
            "rules": [
                {"matches": prefix("/open"), "backendRefs": [{"name": "server", "port": 80}]},
                {"matches": prefix("/"), "filters": [filter], "backendRefs": backends},
            ],
        },
    })
}

/// Nothing listens on port 7000.
fn service() -> Value {
    let port = |port: u16| json!({"name": format!("p{port}"), "port": port});
    let ports = [9000, 8000, 7000].map(port);
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "authorizer"},
        "spec": {"selector": {"app": "authorizer"}, "ports": ports}})
}

/// Asks about paths below /NAME/MODE, or about /hello.
fn policy(name: &str, port: u16, mode: &str) -> Value {
    let protocol = if port == 9000 { "GRPC" } else { "HTTP" };
    let path = match name {
        "hello" => "/hello".to_owned(),
        name => format!("/{name}/{mode}"),
    };
    let paths = json!([{"type": "PathPrefix", "value": path}]);
    json!({
        "apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "AuthorizationPolicy",
        "metadata": {"name": format!("{name}-{}", mode.to_lowercase())},
        "spec": {
            "targetRefs": [{"group": "", "kind": "Service", "name": "server"}],
            "action": "ExternalAuth",
            "externalAuth": {
                "protocol": protocol,
                "backendRef": {"name": "authorizer", "port": port},
                protocol.to_lowercase(): {"allowedResponseHeaders": ["x-user"]},
                "forwardBody": {"maxSize": 4},
                "timeout": "1s",
                "failureMode": mode,
            },
            "rules": [{
                "networkAttributes": {"ports": [8080]},
                "requests": [{"paths": paths}],
            }],
        },
    })
}
