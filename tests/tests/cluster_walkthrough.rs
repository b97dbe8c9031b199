//! The walkthrough of the README on a cluster: the manifests are applied, the sample apps answer each other, and the proxies show it.

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::workloads::distinct;
use diy_mesh_tests::cluster::{kubectl, rolled_out, sample_apps, wait_for, with_mesh};

#[test]
fn from_kubectl_apply_to_answers_of_both_versions() -> Result<()> {
    if !with_mesh()? {
        return Ok(());
    }
    let were_there = kubectl(&["get", "namespace", "http-client"]).is_ok();
    kubectl(&["apply", "-k", &sample_apps()])?;
    let result = walk();
    if result.is_ok() && !were_there {
        kubectl(&["delete", "-k", &sample_apps(), "--wait=false"])?;
    }
    result
}

fn walk() -> Result<()> {
    for (namespace, deployment) in [
        ("http-server", "http-server-v1"),
        ("http-server", "http-server-v2"),
        ("http-client", "http-client"),
        ("grpc-server", "grpc-server"),
        ("grpc-client", "grpc-client"),
    ] {
        rolled_out(namespace, deployment)?;
    }

    wait_for("answers of both versions of http-server", || {
        let answers = logs("http-client", "deployment/http-client", "http-client")?;
        Ok((distinct(&answers, "Version: ") == ["1.0", "2.0"]).then_some(()))
    })?;
    wait_for("answers of both pods of grpc-server", || {
        let answers = logs("grpc-client", "deployment/grpc-client", "grpc-client")?;
        Ok((distinct(&answers, "Hostname: ").len() == 2).then_some(()))
    })?;
    proxies_show_requests()
}

/// What people come to see: the requests, in the proxies' own output.
fn proxies_show_requests() -> Result<()> {
    let outbound = logs("http-client", "deployment/http-client", "proxy")?;
    shows(
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
        shows(
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
    shows(
        &grpc,
        &[
            "Outbound connection to ",
            "/echo.v1.EchoService/Echo",
            "grpc-status: 0",
        ],
    )
}

fn shows(log: &str, expected: &[&str]) -> Result<()> {
    let missing: Vec<_> = expected
        .iter()
        .filter(|text| !log.contains(**text))
        .collect();
    ensure!(
        missing.is_empty(),
        "a proxy does not show {missing:?}; it shows:\n{log}"
    );
    Ok(())
}

fn logs(namespace: &str, what: &str, container: &str) -> Result<String> {
    kubectl(&["logs", "-n", namespace, what, "-c", container, "--tail=-1"])
        .with_context(|| format!("the logs of {what}, {container}"))
}
