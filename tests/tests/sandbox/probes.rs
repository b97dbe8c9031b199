//! Probes of injected pods in a sandbox: a dead application makes its pod unready, for every kind of
//! probe and in every mode.

use diy_mesh_sandbox::View;
use diy_mesh_tests::sandbox::{MESHED, READY_TIMEOUT, shell, with_mesh};

const KINDS: [(&str, &str); 4] = [
    ("tcp", "tcpSocket: {port: web}"),
    ("grpc", "grpc: {port: 8080}"),
    ("http", "httpGet: {port: web, path: /hello}"),
    ("https", "httpGet: {port: web, scheme: HTTPS}"),
];

/// A Deployment whose container starts to listen when the file /tmp/listen exists.
fn late_server(name: &str, mode: &str, probe: &str) -> String {
    format!(
        "
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}, namespace: servers}}
spec:
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}, annotations: {{{MESHED}, diy-service-mesh/inbound: {mode}}}}}
    spec:
      containers:
        - name: app
          image: diy-sm-http-server:dev
          command: [bash, -c, 'until test -e /tmp/listen; do sleep 0.1; done; exec http-server']
          ports: [{{name: web, containerPort: 8080}}]
          readinessProbe: {{{probe}, periodSeconds: 1, timeoutSeconds: 20}}
      terminationGracePeriodSeconds: 1
---
"
    )
}

/// Whether the pod of a workload is ready, once the proxy has answered a probe: with a status from
/// 500 to 509 if the application does not.
fn is_ready(view: &View, workload: &str) -> Option<bool> {
    let pods = view.pods_of("servers", workload);
    let pod = pods.first()?;
    let app = pod.containers.iter().find(|one| one.name == "app")?;
    if app.ready {
        return Some(true);
    }
    let is_failed = app.reason.as_ref()?.contains("status 50");
    (app.running && is_failed).then_some(false)
}

#[test]
fn a_pod_whose_application_does_not_listen_is_not_ready() {
    let Some(sandbox) = with_mesh(&shell(MESHED)) else {
        return;
    };
    let mut names = Vec::new();
    for mode in ["permissive", "strict"] {
        for (kind, probe) in KINDS {
            let name = format!("{mode}-{kind}");
            sandbox.apply(&late_server(&name, mode, probe)).unwrap();
            names.push(name);
        }
    }
    for name in &names {
        let ready = sandbox
            .wait(&format!("a probe of {name}"), READY_TIMEOUT, |view| {
                is_ready(view, name)
            })
            .unwrap();
        assert!(!ready, "{name} is ready and does not listen");
    }

    // The probes of protocols that the application speaks succeed when it listens.
    for name in [
        "permissive-tcp",
        "permissive-http",
        "strict-tcp",
        "strict-http",
    ] {
        let pod = sandbox.view().pods_of("servers", name).remove(0);
        sandbox
            .exec(&pod, "app", &["touch", "/tmp/listen"])
            .unwrap();
        sandbox
            .wait(&format!("{name} to be ready"), READY_TIMEOUT, |view| {
                is_ready(view, name).filter(|ready| *ready)
            })
            .unwrap();
    }
}
