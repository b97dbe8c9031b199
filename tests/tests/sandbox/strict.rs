//! A namespace with the labels `inbound: strict` and `inject: enabled`: all kinds of probes
//! succeed, unmeshed clients are rejected, and the annotation `permissive` overrides the label.

use diy_mesh_tests::sandbox::{MESHED, get, post, shell, single_pod, wait_for_line, with_mesh};

/// Deployment and Service; `probes` are fields of the container.
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
fn strict_namespace_accepts_only_meshed_clients_and_its_probes_succeed() {
    let http = "startupProbe: {httpGet: {port: web, path: /hello}, periodSeconds: 1, failureThreshold: 60},
        livenessProbe: {httpGet: {port: web, path: '/hello?probe=1'}, periodSeconds: 1, timeoutSeconds: 20}, readinessProbe: {tcpSocket: {port: 8080}},
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
        &shell("").replace("namespace: clients", "namespace: unmeshed"),
    ];
    // All pods are ready: all probes succeed.
    let Some(sandbox) = with_mesh(&objects.concat()) else {
        return;
    };
    for name in ["vault", "ledger", "lobby"] {
        assert!(single_pod(&sandbox, "bank", name).injected, "{name}");
    }
    get(
        &sandbox,
        &single_pod(&sandbox, "clients", "shell"),
        "vault.bank",
        80,
    );

    let unmeshed = single_pod(&sandbox, "unmeshed", "shell");
    let refused = post(&sandbox, &unmeshed, "vault.bank", 80);
    assert!(
        refused.stdout.contains("x-mesh-error: mtls-required"),
        "{refused:?}"
    );
    let permitted = post(&sandbox, &unmeshed, "lobby.bank", 80);
    assert!(
        !permitted.stdout.contains("x-mesh-error") && permitted.stdout.starts_with("HTTP/1.1 "),
        "{permitted:?}"
    );
    let vault = single_pod(&sandbox, "bank", "vault");
    assert_eq!(
        vault.restarts(),
        0,
        "the liveness probe never fails: {vault:?}"
    );
    sandbox.delete("Pod", "bank", &vault.name).unwrap();
    wait_for_line(&sandbox, &vault, "app", "the request of the hook", |line| {
        line.to_lowercase()
            .starts_with("user-agent: kube-lifecycle/")
    });
}
