//! Probes on a cluster: a pod is ready if its application listens, and not ready if it does not, for
//! every kind of probe and in every mode.

use anyhow::{Result, ensure};
use diy_mesh_tests::cluster::{Namespace, in_namespace, wait_for};
use serde_json::{Value, json};

/// The port of all probes.
const PORT: u16 = 8080;

/// Kinds of probes, each with a program that answers it when it listens on [`PORT`].
fn probes() -> [(&'static str, &'static str, Value); 4] {
    [
        ("tcp", "http-server", json!({"tcpSocket": {"port": PORT}})),
        ("grpc", "grpc-server", json!({"grpc": {"port": PORT}})),
        (
            "http",
            "http-server",
            json!({"httpGet": {"port": PORT, "path": "/hello"}}),
        ),
        // No sample program speaks TLS, so this one never succeeds.
        (
            "https",
            "http-server",
            json!({"httpGet": {"port": PORT, "scheme": "HTTPS"}}),
        ),
    ]
}

/// A pod whose application listens on `listen_port`.
fn pod(name: &str, mode: &str, program: &str, listen_port: u16, probe: &Value) -> String {
    let mut readiness = probe.clone();
    readiness["periodSeconds"] = json!(1);
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "labels": {"app": name},
            "annotations": {"diy-service-mesh/inject": "true", "diy-service-mesh/inbound": mode},
        },
        "spec": {
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "app", "image": format!("diy-sm-{program}:dev"), "imagePullPolicy": "IfNotPresent",
                "env": [{"name": "LISTEN_PORT", "value": listen_port.to_string()}],
                "readinessProbe": readiness,
                "securityContext": {"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}},
            }],
        },
    })
    .to_string()
}

fn is_ready(namespace: &Namespace, pod: &str) -> Result<bool> {
    let path = "jsonpath={.status.containerStatuses[0].ready}";
    Ok(namespace.kubectl(&["get", "pod", pod, "-o", path])? == "true")
}

/// The messages of failed readiness probes of the application.
fn failures(namespace: &Namespace, pod: &str) -> Result<String> {
    let selector = format!("reason=Unhealthy,involvedObject.name={pod}");
    let messages = r#"jsonpath={range .items[?(@.involvedObject.fieldPath=="spec.containers{app}")]}{.message}{"\n"}{end}"#;
    namespace.kubectl(&[
        "get",
        "events",
        "--field-selector",
        &selector,
        "-o",
        messages,
    ])
}

#[test]
fn a_dead_application_makes_its_pod_unready() -> Result<()> {
    in_namespace("probes", |namespace| {
        let (mut dead, mut live) = (Vec::new(), Vec::new());
        for mode in ["permissive", "strict"] {
            for (kind, program, probe) in probes() {
                let name = format!("dead-{mode}-{kind}");
                namespace.apply(&pod(&name, mode, program, PORT + 1, &probe))?;
                dead.push(name);
                if kind != "https" {
                    let name = format!("live-{mode}-{kind}");
                    namespace.apply(&pod(&name, mode, program, PORT, &probe))?;
                    live.push(name);
                }
            }
        }
        for name in &live {
            wait_for(&format!("{name} to be ready"), || {
                Ok(is_ready(namespace, name)?.then_some(()))
            })?;
        }
        for name in &dead {
            let messages = wait_for(&format!("a failed probe of {name}"), || {
                let messages = failures(namespace, name)?;
                Ok((!messages.is_empty() || is_ready(namespace, name)?).then_some(messages))
            })?;
            ensure!(
                !is_ready(namespace, name)?,
                "{name} is ready and does not listen"
            );
            ensure!(messages.contains("statuscode: 50"), "{name}: {messages}");
        }
        Ok(())
    })
}
