//! Admission on a cluster, beyond the injection of new pods.

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{Namespace, in_namespace, kubectl, kubectl_with_input, wait_for};
use serde_json::{Value, json};

#[test]
fn ephemeral_containers_cannot_use_the_uid_of_the_proxy() -> Result<()> {
    in_namespace("debug", |namespace| {
        let meshed = App::http_server();
        let plain = App {
            name: "plain",
            inject: None,
            ..App::http_server()
        };
        for app in [&meshed, &plain] {
            namespace.apply(&app.deployment())?;
            namespace.rolled_out(app.name)?;
        }
        let error = debug(namespace, meshed.name, 1337).expect_err("the container is rejected");
        let message = "container \"shell\" runs as user 1337, which is reserved for the proxy";
        ensure!(format!("{error:#}").contains(message), "{error:#}");
        debug(namespace, meshed.name, 1338).context("another user")?;
        debug(namespace, plain.name, 1337).context("a pod without a proxy")
    })
}

#[test]
fn label_of_a_namespace_decides_about_the_next_pod() -> Result<()> {
    in_namespace("strict-label", |namespace| {
        for mode in ["strict", "permissive", "strict", "permissive"] {
            let label = format!("diy-service-mesh/inbound={mode}");
            kubectl(&["label", "--overwrite", "namespace", &namespace.name, &label])?;
            let arguments = "jsonpath={.spec.initContainers[?(@.name=='proxy')].args}";
            let run = ["run", "never", "--image=never", "--dry-run=server"];
            let injected = [
                "--annotations=diy-service-mesh/inject=true",
                "-o",
                arguments,
            ];
            let proxy = namespace.kubectl(&[&run[..], &injected].concat())?;
            let is_strict = proxy.contains(r#"\"strict\":true"#);
            ensure!(is_strict == (mode == "strict"), "{mode}: {proxy}");
        }
        Ok(())
    })
}

#[test]
fn pods_that_are_not_injected_cause_events_about_their_controllers() -> Result<()> {
    in_namespace("events", |namespace| {
        for (name, annotation, value, reason) in [
            (
                "denied",
                "diy-service-mesh/max-connection-age",
                "never",
                "AdmissionDenied",
            ),
            (
                "typo",
                "diy-service-mesh/inbund",
                "strict",
                "InjectionWarning",
            ),
            ("unclear", "diy-service-mesh/inject", "yes", "NotInjected"),
            ("elsewhere", "linkerd.io/inject", "enabled", "NotInjected"),
        ] {
            let app = App {
                name,
                ..App::http_server()
            };
            let mut deployment: Value = serde_json::from_str(&app.deployment())?;
            let annotations = &mut deployment["spec"]["template"]["metadata"]["annotations"];
            annotations[annotation] = json!(value);
            namespace.apply(&deployment.to_string())?;
            let field = format!("reason={reason},involvedObject.kind=ReplicaSet");
            wait_for(reason, || {
                let names = ["get", "events", "--field-selector", &field];
                let output = "jsonpath={.items[*].involvedObject.name}";
                let names = namespace.kubectl(&[&names[..], &["-o", output]].concat())?;
                let mut names = names.split(' ');
                Ok(names.any(|one| one.starts_with(name)).then_some(()))
            })?;
        }
        Ok(())
    })
}

/// Adds an ephemeral container to a pod of an app.
fn debug(namespace: &Namespace, app: &str, user: i64) -> Result<()> {
    let pods = namespace.pods(app)?;
    let pod = pods.first().context("the app has a pod")?;
    let path = format!(
        "/api/v1/namespaces/{}/pods/{pod}/ephemeralcontainers",
        namespace.name
    );
    let mut pod: Value = serde_json::from_str(&kubectl(&["get", "--raw", &path])?)?;
    pod["spec"]["ephemeralContainers"] = json!([{
        "name": "shell",
        "image": "diy-sm-http-server:dev",
        "imagePullPolicy": "IfNotPresent",
        "securityContext": {"runAsUser": user},
    }]);
    kubectl_with_input(&["replace", "--raw", &path, "-f", "-"], &pod.to_string()).map(drop)
}
