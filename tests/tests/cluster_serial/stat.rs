//! `mesh stat` on a cluster: from the reports of the proxies, and without a controller.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{Namespace, in_namespace, wait_for, wait_for_mesh};
use diy_mesh_tests::sandbox::programs;
use serde_json::Value;

use crate::faults::scale_controller_to_zero;

fn stat(arguments: &[&str]) -> Result<Value> {
    let mut mesh = Command::new(programs().join("mesh"));
    let output = mesh.arg("stat").args(arguments).output();
    let output = output.context("cannot start mesh")?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{error}");
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Waits for the edge from client to server, with its success. Returns the whole answer.
fn wait_for_edge(namespace: &Namespace) -> Result<Value> {
    let [from, to] = ["client", "server"].map(|app| format!("{}/{app}", namespace.name));
    wait_for("the edge from client to server", || {
        let all = stat(&["-n", &namespace.name, "-o", "json"])?;
        let mut edges = all["edges"].as_array().context("edges")?.iter();
        let edge = edges.find(|edge| edge["from"] == *from && edge["to"] == *to);
        let is_expected = |edge: &Value| {
            edge["success"] == 1.0
                && edge["mutual_tls"] == 1.0
                && edge["requests_per_second"].as_f64() > Some(0.0)
                && edge["p99_ms"].as_f64() > Some(0.0)
        };
        ensure!(edge.is_some_and(is_expected), "{all}");
        Ok(Some(all))
    })
}

#[test]
fn stat_shows_edges_with_their_success_with_and_without_a_controller() -> Result<()> {
    in_namespace("stat", |namespace| {
        namespace.wait_for_responses(&App::http_server(), &App::http_client())?;
        let all = wait_for_edge(namespace)?;
        ensure!(all["notes"].as_array().is_some_and(Vec::is_empty), "{all}");
        let server = format!("{}/server", namespace.name);
        let only = stat(&[&server, "--by", "workload", "-o", "json"])?;
        ensure!(only["workloads"][0]["name"] == *server, "{only}");

        let repair = scale_controller_to_zero()?;
        let all = wait_for_edge(namespace)?;
        let note = all["notes"][0].as_str().context("a note")?;
        ensure!(
            note.contains("proxies were asked by port-forward"),
            "{note}"
        );
        repair.now()?;
        wait_for_mesh()
    })
}
