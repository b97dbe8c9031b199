//! A namespace whose label makes its pods strict: they join the mesh by the other label, every kind of their kubelet's probes reaches
//! them, and what proves nothing does not. A pod that says `permissive` stays open.

#![allow(missing_docs, clippy::unwrap_used)]

use diy_mesh_tests::sandbox::{MESHED, get, pod_of, post, shell, with_mesh};

/// A Deployment and its Service; the probes are the container's.
fn server(name: &str, program: &str, annotations: &str, probes: &str) -> String {
    format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: bank}}
spec: {{selector: {{app: {name}}}, ports: [{{name: web, port: 80, targetPort: 8080}}]}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}, namespace: bank}}
spec:
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}, annotations: {{{annotations}}}}}
    spec:
      containers: [{{name: app, image: 'diy-sm-{program}:dev', ports: [{{name: web, containerPort: 8080}}], {probes}}}]
      terminationGracePeriodSeconds: 1
---
"
    )
}

#[test]
fn a_strict_namespace_takes_its_kubelets_probes_and_its_mesh_and_nothing_else() {
    let http = "startupProbe: {httpGet: {port: web, path: /hello}, periodSeconds: 1, failureThreshold: 60},
        livenessProbe: {httpGet: {port: web, path: '/hello?probe=1'}, periodSeconds: 1}, readinessProbe: {tcpSocket: {port: 8080}},
        lifecycle: {preStop: {httpGet: {port: web, path: hello}}}";
    let objects = [
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: bank, labels: {diy-service-mesh/inject: enabled, diy-service-mesh/inbound: strict}}\n---",
        &server("vault", "http-server", "", http),
        &server(
            "ledger",
            "grpc-server",
            "",
            "startupProbe: {grpc: {port: 8080}, periodSeconds: 1}",
        ),
        &server(
            "lobby",
            "http-server",
            "diy-service-mesh/inbound: permissive",
            "readinessProbe: {httpGet: {port: 8080, path: /hello}}",
        ),
        &shell(MESHED),
        "---",
        &shell("").replace("namespace: clients", "namespace: strangers"),
    ];
    // With it all pods are ready: every probe has got through.
    let Some(sandbox) = with_mesh(&objects.concat()) else {
        return;
    };
    for name in ["vault", "ledger", "lobby"] {
        assert!(pod_of(&sandbox, "bank", name).injected, "{name}");
    }
    get(
        &sandbox,
        &pod_of(&sandbox, "clients", "shell"),
        "shell",
        "vault.bank",
        80,
        "/hello",
    );

    let stranger = pod_of(&sandbox, "strangers", "shell");
    let refused = post(&sandbox, &stranger, "shell", "vault.bank", 80, "/hello");
    assert!(
        refused.stdout.contains("x-mesh-error: mtls-required"),
        "{refused:?}"
    );
    let taken = post(&sandbox, &stranger, "shell", "lobby.bank", 80, "/hello");
    assert!(
        !taken.stdout.contains("x-mesh-error") && taken.stdout.starts_with("HTTP/1.1 "),
        "{taken:?}"
    );
    let vault = pod_of(&sandbox, "bank", "vault");
    assert_eq!(
        vault.restarts(),
        0,
        "its liveness probe gets through for as long as it runs: {vault:?}"
    );
}
