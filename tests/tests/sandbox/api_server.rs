//! Controllers of a Kubernetes cluster in a sandbox, whose API server is slow, silent, wrong or
//! unavailable under load. No request fails, also while a pod is removed that the mesh still knows,
//! and afterwards the controllers read the changes.

use diy_mesh_sandbox::View;
use diy_mesh_sandbox::protocol::PodView;
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, empty, http_server, install, set_env, shell, single_pod, under_load,
};
use serde_json::{Value, json};

use crate::faults::{ROUTE, assert_all_serve};

/// The number of pods of the Service.
const PODS: usize = 3;
/// Responses with the fault: each controller has more watches.
const RESPONSES: usize = 20;

/// The image is the image of pods with the catalog.
const API_SERVER: &str = "
apiVersion: v1
kind: Service
metadata: {name: api, namespace: kubernetes}
spec: {selector: {app: api}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: api, namespace: kubernetes}
spec:
  selector: {matchLabels: {app: api}}
  template:
    metadata: {labels: {app: api}}
    spec:
      containers:
        - name: api
          image: diy-sm-controller:dev
          command: [sandbox-api-server, '8080', /run/sandbox/catalog, /tmp/fault]
          startupProbe: {tcpSocket: {port: 8080}, periodSeconds: 1, failureThreshold: 60}
";

/// Starts the controller with the API server.
const CONTROLLER: &str = "
    server='{server: \"http://api.kubernetes\"}'
    echo \"{apiVersion: v1, kind: Config, current-context: c, clusters: [{name: c, cluster: $server}],
        users: [{name: c, user: {}}], contexts: [{name: c, context: {cluster: c, user: c}}]}\" > /tmp/config
    exec controller --authenticator=jwks:/run/sandbox/jwks.json --ca=files:/run/authority";

fn use_api_server(controller: &mut Value) {
    controller["command"] = json!(["bash", "-c", CONTROLLER]);
    set_env(controller, &[("KUBECONFIG", "/tmp/config")]);
}

#[test]
fn faults_of_the_api_server_fail_no_request_and_heal() {
    let Some(sandbox) = empty() else {
        return;
    };
    sandbox.apply(API_SERVER).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    let server = http_server(u32::try_from(PODS).unwrap(), "1.0", MESHED);
    let objects = format!("{ROUTE}{server}---{}", shell(MESHED));
    install(&sandbox, use_api_server, &objects);
    let client = single_pod(&sandbox, "clients", "shell");
    let api = single_pod(&sandbox, "kubernetes", "api");
    let run = |script: &str| {
        let output = sandbox.exec(&api, "api", &["bash", "-c", script]).unwrap();
        assert_eq!(output.code, 0, "{script}: {output:?}");
    };
    under_load(&sandbox, &client, &[["4", "50"]], || {
        for fault in ["slow", "silent", "wrong", "closed"] {
            println!("{fault}");
            run(&format!("echo {fault} > /tmp/fault"));
            let has_responded = |view: &View| {
                let lines = view.lines(&api, "api").iter();
                let responses = lines.filter(|line| line.starts_with(fault)).count();
                (responses >= RESPONSES).then_some(())
            };
            let what = format!("{RESPONSES} responses: {fault}");
            sandbox.wait(&what, READY_TIMEOUT, has_responded).unwrap();
            let pods = sandbox.view().pods_of("servers", "http-server");
            sandbox.scale("servers", "http-server", PODS - 1).unwrap();
            let removed = |view: &View| {
                let is_removed = |pod: &PodView| !view.pods.contains_key(&pod.full_name());
                pods.iter().any(is_removed).then_some(())
            };
            sandbox
                .wait("a removed pod", READY_TIMEOUT, removed)
                .unwrap();
            assert_all_serve(&sandbox, "a pod was removed");
            run("rm /tmp/fault");
            sandbox.scale("servers", "http-server", PODS).unwrap();
            sandbox.wait_settled(READY_TIMEOUT).unwrap();
            assert_all_serve(&sandbox, fault);
        }
    });
}
