//! External authorization through two proxies, by a server with Envoy's own messages and by one with
//! HTTP: what it answers, and what happens without an answer.

use anyhow::{Result, ensure};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{MANIFESTS, Namespace, in_namespace, kubectl, wait_for};
use serde_json::{Value, json};

/// The sample server knows no such path.
const ALLOWED: &str = "404";
const FAILED: &str = "503";

/// What a request to the server gets: the status, the fields and the body.
fn get(namespace: &Namespace, path: &str) -> Result<String> {
    let url = format!("http://server{path}");
    let program = ["deploy/authorizer", "-c", "authorizer", "--", "authorizer"];
    namespace.kubectl(&[&["exec"], &program[..], &["get", &url]].concat())
}

fn expect(namespace: &Namespace, path: &str, status: &str, part: &str) -> Result<()> {
    let response = get(namespace, path)?;
    let is_expected = response.starts_with(status) && response.contains(part);
    ensure!(is_expected, "{path}: {response}, expected {status} {part}");
    Ok(())
}

#[test]
fn authorization_servers_decide_and_the_failure_mode_without_them() -> Result<()> {
    in_namespace("external", |namespace| {
        kubectl(&["apply", "-k", &format!("{MANIFESTS}/crds")])?;
        let authorizer = App {
            name: "authorizer",
            program: "authorizer",
            ..App::http_server()
        };
        namespace.apply(&authorizer.deployment())?;
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
