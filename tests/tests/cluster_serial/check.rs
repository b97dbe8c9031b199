//! `mesh check` on a cluster: passes on a healthy mesh, and reports an invalid caBundle, a pod
//! without a proxy, a workload without pods, and why a proxy is not ready.

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::check::{check, finding, level};
use diy_mesh_tests::cluster::outage::InjectorOutage;
use diy_mesh_tests::cluster::{MESH, Namespace, in_namespace, kubectl, rolled_out, wait_for};

const WEBHOOK: &str = "mutatingwebhookconfiguration/diy-service-mesh-injector";

#[test]
fn healthy_mesh_passes_and_problems_are_reported() -> Result<()> {
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
            // Pods of other tests may still be terminating.
            let healthy =
                report["ok"] == true && parts.iter().all(|name| level(&report, name) == "ok");
            if healthy {
                Ok(Some(()))
            } else {
                Err(anyhow::anyhow!("{report:#}"))
            }
        })?;
        reports_pod_without_proxy(namespace)?;
        reports_workload_without_pods(namespace)?;
        prints_the_reasons_of_a_proxy_that_is_not_ready(namespace)?;
        let outage = InjectorOutage::start()?;
        let result = reports_foreign_ca_bundle(namespace);
        drop(outage);
        result?;
        rolled_out(MESH, "injector")?;
        wait_for("the injector restores the caBundle", || {
            Ok((level(&check()?, "caBundle") == "ok").then_some(()))
        })
    })
}

fn reports_pod_without_proxy(namespace: &Namespace) -> Result<()> {
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

fn reports_workload_without_pods(namespace: &Namespace) -> Result<()> {
    namespace.apply(
        "
apiVersion: apps/v1
kind: Deployment
metadata: {name: refused, annotations: {diy-service-mesh/inject: 'true'}}
spec:
  selector: {matchLabels: {app: refused}}
  template:
    metadata:
      labels: {app: refused}
      annotations: {diy-service-mesh/inject: 'true', diy-service-mesh/max-connection-age: never}
    spec:
      containers: [{name: server, image: 'diy-sm-http-server:dev', imagePullPolicy: IfNotPresent}]
---
apiVersion: batch/v1
kind: Job
metadata: {name: refused}
spec:
  template:
    metadata:
      annotations: {diy-service-mesh/inject: 'true', diy-service-mesh/max-connection-age: never}
    spec:
      restartPolicy: Never
      containers: [{name: server, image: 'diy-sm-http-server:dev', imagePullPolicy: IfNotPresent}]
",
    )?;
    let name = |kind: &str| format!("{kind} {}/refused: ", namespace.name);
    wait_for("the rejected annotation is reported", || {
        let report = check()?;
        let findings = report["checks"].as_array().context("a list")?.iter();
        let details: Vec<&str> = findings
            .filter(|finding| finding["check"] == "workloads")
            .flat_map(|finding| finding["details"].as_array().into_iter().flatten())
            .filter_map(|detail| detail.as_str())
            .collect();
        let is_reported = |kind: &str| {
            let mut failures = details
                .iter()
                .filter_map(|detail| detail.strip_prefix(&name(kind)));
            failures.any(|failure| {
                failure.starts_with("FailedCreate: ")
                    && failure.contains("max-connection-age is \"never\"")
            })
        };
        let misplaced = name("Deployment") + "diy-service-mesh/inject";
        if is_reported("Deployment") && is_reported("Job") && details.contains(&&*misplaced) {
            Ok(Some(()))
        } else {
            Err(anyhow::anyhow!("{report:#}"))
        }
    })?;
    namespace
        .kubectl(&["delete", "deployment/refused", "job/refused"])
        .map(drop)
}

/// A pod that looks injected, with a server without `/ready` in place of the proxy.
fn prints_the_reasons_of_a_proxy_that_is_not_ready(namespace: &Namespace) -> Result<()> {
    namespace.apply(
        "
apiVersion: v1
kind: Pod
metadata: {name: stuck, annotations: {diy-service-mesh/status: injected}}
spec:
  terminationGracePeriodSeconds: 0
  initContainers:
    - name: proxy
      image: diy-sm-http-server:dev
      imagePullPolicy: IfNotPresent
      restartPolicy: Always
      env: [{name: LISTEN_PORT, value: '4001'}]
      readinessProbe: {httpGet: {path: /ready, port: 4001}, periodSeconds: 1}
  containers: [{name: server, image: 'diy-sm-http-server:dev', imagePullPolicy: IfNotPresent}]
",
    )?;
    let name = format!("{}/stuck: proxy is running but not ready: ", namespace.name);
    wait_for("the response of /ready is reported", || {
        let report = check()?;
        let finding = finding(&report, "proxies").context("proxies are checked")?;
        let details = finding["details"].as_array().into_iter().flatten();
        let is_named = details
            .filter_map(|detail| detail.as_str()?.strip_prefix(&name))
            .any(|reasons| reasons.contains("this server answers /hello"));
        if is_named {
            Ok(Some(()))
        } else {
            Err(anyhow::anyhow!("{finding:#}"))
        }
    })?;
    namespace
        .kubectl(&["delete", "pod/stuck", "--wait=true"])
        .map(drop)
}

/// Sets the caBundle to another CA while the injector, which would restore it, is down.
fn reports_foreign_ca_bundle(namespace: &Namespace) -> Result<()> {
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
    wait_for("the caBundle and the injector are reported", || {
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
