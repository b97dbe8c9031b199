//! `mesh check` on a cluster: a mesh that is well has no problem; a webhook that the API server cannot verify and a pod that asks
//! for the mesh without being in it are named.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::{MESH, Namespace, in_namespace, kubectl, rolled_out, wait_for};
use diy_mesh_tests::sandbox::programs;
use serde_json::Value;

const WEBHOOK: &str = "mutatingwebhookconfiguration/diy-service-mesh-injector";

#[test]
fn a_mesh_that_is_well_passes_and_what_is_broken_is_named() -> Result<()> {
    in_namespace("check", |namespace| {
        wait_for("mesh check finds no problem", || {
            let report = check()?;
            let parts = [
                "kubernetes",
                "controller",
                "injector",
                "rights",
                "webhook",
                "caBundle",
                "injection",
                "authority",
            ];
            // What other tests leave behind may still be going.
            let well =
                report["ok"] == true && parts.iter().all(|name| level(&report, name) == "ok");
            if well {
                Ok(Some(()))
            } else {
                Err(anyhow::anyhow!("{report:#}"))
            }
        })?;
        a_pod_outside_of_the_mesh_is_named(namespace)?;
        let stopped = Stopped::new()?;
        let result = a_foreign_ca_bundle_is_told(namespace);
        drop(stopped);
        result?;
        rolled_out(MESH, "injector")?;
        wait_for("the injector puts the caBundle right", || {
            Ok((level(&check()?, "caBundle") == "ok").then_some(()))
        })
    })
}

fn a_pod_outside_of_the_mesh_is_named(namespace: &Namespace) -> Result<()> {
    namespace.apply(
        "
apiVersion: v1
kind: Pod
metadata: {name: outside}
spec:
  terminationGracePeriodSeconds: 0
  containers: [{name: server, image: 'diy-sm-http-server:dev', imagePullPolicy: IfNotPresent}]
",
    )?;
    namespace.kubectl(&["annotate", "pod/outside", "diy-service-mesh/inject=true"])?;
    let report = check()?;
    let finding = finding(&report, "pods").context("pods are checked")?;
    let name = format!("{}/outside", namespace.name);
    let named = finding["details"]
        .as_array()
        .is_some_and(|details| details.iter().any(|detail| *detail == name.as_str()));
    ensure!(finding["level"] == "problem" && named, "{finding:#}");
    namespace
        .kubectl(&["delete", "pod/outside", "--wait=true"])
        .map(drop)
}

/// With another authority's certificate in the caBundle; the injector, which would put it right, is away.
fn a_foreign_ca_bundle_is_told(namespace: &Namespace) -> Result<()> {
    let other = wait_for("the cluster's own CA is published", || {
        let pem = namespace.kubectl(&[
            "get",
            "configmap/kube-root-ca.crt",
            "-o",
            "jsonpath={.data.ca\\.crt}",
        ])?;
        Ok((!pem.is_empty()).then_some(pem))
    })?;
    let literal = format!("--from-literal=ca={other}");
    let encoded = kubectl(&[
        "create",
        "secret",
        "generic",
        "x",
        &literal,
        "--dry-run=client",
        "-o",
        "jsonpath={.data.ca}",
    ])?;
    let patch = format!(
        r#"[{{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": "{encoded}"}}]"#
    );
    kubectl(&["patch", WEBHOOK, "--type=json", "-p", &patch])?;
    wait_for("the caBundle and the injector are named", || {
        let report = check()?;
        let finding = finding(&report, "caBundle").context("the caBundle is checked")?;
        let named = finding["details"] == serde_json::json!(["injector.diy-service-mesh.dev"]);
        let all = ["caBundle", "injector", "injection"]
            .iter()
            .all(|name| level(&report, name) == "problem");
        if named && all && report["ok"] == false {
            Ok(Some(()))
        } else {
            Err(anyhow::anyhow!("{report:#}"))
        }
    })
}

/// The injector, away until this is dropped.
struct Stopped;

impl Stopped {
    fn new() -> Result<Self> {
        kubectl(&["scale", "-n", MESH, "deployment/injector", "--replicas=0"])?;
        let stopped = Self;
        wait_for("the injector is away", || {
            let pods = kubectl(&[
                "get",
                "pods",
                "-n",
                MESH,
                "-l",
                "app=injector",
                "-o",
                "name",
            ])?;
            Ok(pods.trim().is_empty().then_some(()))
        })?;
        Ok(stopped)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        if let Err(error) = kubectl(&["scale", "-n", MESH, "deployment/injector", "--replicas=2"]) {
            eprintln!("the injector is still away: {error:#}");
        }
    }
}

/// What `mesh check` says; its exit code must say the same.
fn check() -> Result<Value> {
    let output = Command::new(programs().join("mesh"))
        .args(["check", "--output", "json"])
        .output()
        .context("mesh does not start")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let report: Value = serde_json::from_str(&text).with_context(|| {
        format!(
            "no report: {text}{}",
            String::from_utf8_lossy(&output.stderr)
        )
    })?;
    ensure!(
        output.status.code() == Some(if report["ok"] == true { 0 } else { 1 }),
        "exit code {:?} with {report:#}",
        output.status.code()
    );
    Ok(report)
}

fn finding<'a>(report: &'a Value, check: &str) -> Option<&'a Value> {
    report["checks"]
        .as_array()?
        .iter()
        .find(|finding| finding["check"] == check)
}

fn level<'a>(report: &'a Value, check: &str) -> &'a str {
    finding(report, check)
        .and_then(|finding| finding["level"].as_str())
        .unwrap_or("not checked")
}
