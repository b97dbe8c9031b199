//! `mesh why` and `mesh tap`: the cause of a failure, from the proxies of both pods.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use diy_mesh_testkit::process::Process;
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{Namespace, in_namespace, wait_for};
use diy_mesh_tests::sandbox::programs;
use serde_json::json;

/// Runs a command of `mesh`. Returns its exit code and output.
fn mesh(arguments: &[&str]) -> Result<(Option<i32>, String)> {
    let output = Command::new(programs().join("mesh"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .context("cannot start mesh")?;
    let text = [output.stdout, output.stderr].concat();
    Ok((
        output.status.code(),
        String::from_utf8_lossy(&text).into_owned(),
    ))
}

/// Waits until the latest exchange from client to server has this cause. Returns the page.
fn expect(namespace: &Namespace, cause: &str) -> Result<String> {
    let [from, to] = ["client", "server"].map(|app| format!("{}/{app}", namespace.name));
    wait_for(cause, || {
        let (code, page) = mesh(&["why", &from, &to])?;
        ensure!(page.contains(cause), "{code:?} {page}");
        Ok(Some(page))
    })
}

fn denial() -> String {
    json!({
        "apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "AuthorizationPolicy",
        "metadata": {"name": "nobody"},
        "spec": {
            "targetRefs": [{"group": "", "kind": "Pod", "selector": {"matchLabels": {"app": "server"}}}],
            "action": "DENY", "rules": [{"networkAttributes": {"ports": [8080]}}],
        },
    })
    .to_string()
}

#[test]
fn cause_of_a_failure_is_told_by_the_proxies_of_both_pods() -> Result<()> {
    in_namespace("why", |namespace| {
        namespace.wait_for_responses(&App::http_server(), &App::http_client())?;
        let page = expect(namespace, "Why: it did not fail: 200")?;
        for part in [
            "Proxy of the caller, ",
            "Proxy of the callee, ",
            "verified by mutual TLS",
        ] {
            ensure!(page.contains(part), "{page}");
        }
        namespace.apply(&denial())?;
        let page = expect(namespace, "Why: the proxy of the callee answered denied: ")?;
        ensure!(
            page.contains("AuthorizationPolicy") && page.contains("nobody"),
            "{page}"
        );
        let id = page.lines().find_map(|line| line.strip_prefix("Exchange "));
        let (code, by_id) = mesh(&["why", id.context("an identifier")?])?;
        // Only the latest failure has an age.
        let is_told = |line: &&str| !line.is_empty() && !line.starts_with("The failure was ");
        let is_same = by_id
            .lines()
            .filter(is_told)
            .eq(page.lines().filter(is_told));
        ensure!(code == Some(1) && is_same, "{code:?} {by_id}\n{page}");

        namespace.kubectl(&["delete", "authorizationpolicy", "nobody"])?;
        namespace.kubectl(&["scale", "deployment/server", "--replicas=0"])?;
        let page = expect(
            namespace,
            "Why: the proxy of the caller answered no-endpoint: ",
        )?;
        ensure!(
            page.contains("  attempts     none: nothing was sent"),
            "{page}"
        );
        let (code, text) = mesh(&["why", "192.0.2.1-000000000001"])?;
        ensure!(
            code == Some(2) && text.contains("at 192.0.2.1"),
            "{code:?} {text}"
        );
        tap_shows_failures(namespace)
    })
}

/// The client goes on to send requests, which fail.
fn tap_shows_failures(namespace: &Namespace) -> Result<()> {
    let of = format!("{}/client", namespace.name);
    let mut mesh = Command::new(programs().join("mesh"));
    let tap = Process::with_stdout(mesh.args(["tap", &of, "--failures"]));
    let line = tap.lines().next().context("a line")?;
    ensure!(
        line.contains("503") && line.contains("[no-endpoint]  mesh why "),
        "{line}"
    );
    Ok(())
}
