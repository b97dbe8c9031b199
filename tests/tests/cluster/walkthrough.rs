//! The walkthrough of the README on a cluster: applies the manifests and checks responses and
//! dumps.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::workloads::distinct;
use diy_mesh_tests::cluster::{kubectl, rolled_out, sample_apps, wait_for, with_mesh};
use diy_mesh_tests::sandbox::programs;
use serde_json::Value;

#[test]
fn sample_apps_respond_and_proxies_dump_requests() -> Result<()> {
    if !with_mesh()? {
        return Ok(());
    }
    let existed = kubectl(&["get", "namespace", "http-client"]).is_ok();
    kubectl(&["apply", "-k", &sample_apps()])?;
    let result = check_sample_apps();
    if result.is_ok() && !existed {
        kubectl(&["delete", "-k", &sample_apps(), "--wait=false"])?;
    }
    result
}

fn check_sample_apps() -> Result<()> {
    for (namespace, deployment) in [
        ("http-server", "http-server-v1"),
        ("http-server", "http-server-v2"),
        ("http-client", "http-client"),
        ("grpc-server", "grpc-server"),
        ("grpc-client", "grpc-client"),
    ] {
        rolled_out(namespace, deployment)?;
    }

    wait_for("responses of both versions of http-server", || {
        let responses = logs("http-client", "deployment/http-client", "http-client")?;
        Ok((distinct(&responses, "Version: ") == ["1.0", "2.0"]).then_some(()))
    })?;
    wait_for("responses of both pods of grpc-server", || {
        let responses = logs("grpc-client", "deployment/grpc-client", "grpc-client")?;
        Ok((distinct(&responses, "Hostname: ").len() == 2).then_some(()))
    })?;
    assert_dumps()?;
    assert_services()?;
    assert_namespaces_of_accounts()
}

/// Asserts that `mesh services` reaches the controller and lists both pods with their identity.
fn assert_services() -> Result<()> {
    let arguments = ["services", "http-server/http-server", "--output=json"];
    let output = Command::new(programs().join("mesh"))
        .args(arguments)
        .output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "mesh services: {errors}");
    let services: Value = serde_json::from_slice(&output.stdout)?;
    let endpoints = services[0]["endpoints"].as_array();
    let endpoints = endpoints.with_context(|| format!("no endpoints: {services:#}"))?;
    let identity = "spiffe://cluster.local/ns/http-server/sa/http-server";
    let meshed = endpoints
        .iter()
        .filter(|endpoint| endpoint["identity"] == identity);
    ensure!(meshed.count() >= 2, "{services:#}");
    Ok(())
}

/// Asserts that a service account gets what Kubernetes RBAC allows it to list.
fn assert_namespaces_of_accounts() -> Result<()> {
    let account = |account: &str| {
        let arguments = ["identity", "--output=json", "--account", account];
        let command = programs().join("mesh");
        Command::new(command).args(arguments).output()
    };
    let denied = account("http-server/http-server")?;
    let errors = String::from_utf8_lossy(&denied.stderr);
    ensure!(
        !denied.status.success() && errors.contains("may not list pods"),
        "{errors}"
    );
    let namespace = "--namespace=http-server";
    let binding = ["rolebinding", "viewer", namespace];
    let subject = "--serviceaccount=http-server:http-server";
    kubectl(&[&["create"], &binding[..], &["--clusterrole=view", subject]].concat())?;
    let workloads = |json: &[u8]| -> Result<Vec<String>> {
        let page: Value = serde_json::from_slice(json)?;
        let workloads = page["workloads"].as_array().context("no workloads")?;
        let namespaces = workloads.iter().filter_map(|one| one["namespace"].as_str());
        Ok(namespaces.map(str::to_owned).collect())
    };
    // Each replica asks the API server by itself, and keeps a denial for a while.
    let own = wait_for("the workloads of namespace http-server", || {
        let output = account("http-server/http-server")?;
        if !output.status.success() {
            return Ok(None);
        }
        let own = workloads(&output.stdout)?;
        Ok((own.len() >= 2).then_some(own))
    });
    kubectl(&[&["delete"], &binding[..]].concat())?;
    let own = own?;
    ensure!(own.iter().all(|one| one == "http-server"), "{own:?}");
    let all = workloads(&account("mesh-viewer")?.stdout)?;
    ensure!(all.iter().any(|one| one == "http-client"), "{all:?}");
    Ok(())
}

/// Asserts that the dumps of the proxies contain the requests.
fn assert_dumps() -> Result<()> {
    let outbound = logs("http-client", "deployment/http-client", "proxy")?;
    assert_contains(
        &outbound,
        &[
            "Outbound connection to ",
            "GET /hello HTTP/1.1",
            "HTTP/1.1 200 OK",
            "Hello from the http-server service!",
        ],
    )?;
    for version in ["http-server-v1", "http-server-v2"] {
        let inbound = logs("http-server", &format!("deployment/{version}"), "proxy")?;
        assert_contains(
            &inbound,
            &[
                "Inbound connection from ",
                " to port: 8080",
                "GET /hello HTTP/1.1",
                "HTTP/1.1 200 OK",
            ],
        )?;
    }
    let grpc = logs("grpc-client", "deployment/grpc-client", "proxy")?;
    assert_contains(
        &grpc,
        &[
            "Outbound connection to ",
            "/echo.v1.EchoService/Echo",
            "grpc-status: 0",
        ],
    )
}

fn assert_contains(log: &str, expected: &[&str]) -> Result<()> {
    let missing: Vec<_> = expected
        .iter()
        .filter(|text| !log.contains(**text))
        .collect();
    ensure!(missing.is_empty(), "missing {missing:?} in the log:\n{log}");
    Ok(())
}

fn logs(namespace: &str, what: &str, container: &str) -> Result<String> {
    kubectl(&["logs", "-n", namespace, what, "-c", container, "--tail=-1"])
        .with_context(|| format!("the logs of {what}, {container}"))
}
