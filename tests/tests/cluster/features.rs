//! Pods and Services with features of Kubernetes 1.34 to 1.37, by the manifests in tests/features/.
//! A feature that the cluster lacks is skipped with a message.

use std::fs;
use std::io::Write as _;

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{Namespace, in_namespace, kubectl, kubectl_with_input, wait_for};
use serde_json::Value;

fn manifest(name: &str) -> Result<String> {
    let path = format!("{}/features/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    fs::read_to_string(&path).context(path)
}

fn skip(feature: &str, reason: &str) -> Result<()> {
    writeln!(
        std::io::stderr(),
        "skipped: {feature}: the cluster lacks the feature: {reason}"
    )?;
    Ok(())
}

/// Applies a manifest and runs a test. A rejection with one of the words `lacking` skips it.
fn with(
    feature: &str,
    lacking: &[&str],
    test: impl FnOnce(&Namespace) -> Result<()>,
) -> Result<()> {
    in_namespace(feature, |namespace| {
        // An API server ignores a field of a feature that it lacks; --validate=strict reports unknown
        // ones.
        let apply = [
            "-n",
            &namespace.name,
            "apply",
            "--validate=strict",
            "-f",
            "-",
        ];
        match kubectl_with_input(&apply, &manifest(feature)?) {
            Err(error) => {
                let text = format!("{error:#}");
                ensure!(lacking.iter().any(|one| text.contains(one)), "{text}");
                skip(feature, &text)
            }
            Ok(_) => test(namespace),
        }
    })
}

/// Waits until the pod `app` with its proxy is ready.
fn is_ready(namespace: &Namespace) -> Result<()> {
    namespace.kubectl(&["wait", "pod/app", "--for=condition=Ready", "--timeout=180s"])?;
    let pod = pod(namespace)?;
    let proxies = pod["spec"]["initContainers"].as_array();
    let mut proxies = proxies.into_iter().flatten();
    ensure!(
        proxies.any(|one| one["name"] == "proxy"),
        "not injected: {pod}"
    );
    Ok(())
}

fn pod(namespace: &Namespace) -> Result<Value> {
    let pod = namespace.kubectl(&["get", "pod", "app", "-o", "json"])?;
    serde_json::from_str(&pod).context(pod)
}

/// A meshed client gets responses of a Service.
fn responds(namespace: &Namespace, service: &str) -> Result<()> {
    let name = format!("client-of-{service}");
    let endpoint = format!(
        "http://{service}.{}.svc.cluster.local./hello",
        namespace.name
    );
    let client = App {
        name: &name,
        endpoint: &endpoint,
        ..App::http_client()
    };
    namespace.apply(&client.deployment())?;
    namespace.rolled_out(client.name)?;
    wait_for(&format!("responses of {service}"), || {
        Ok((namespace.responses(&client)?.good >= 3).then_some(()))
    })
}

#[test]
fn names_of_services_may_begin_with_a_digit() -> Result<()> {
    with("service-name", &["metadata.name"], |namespace| {
        let server = App::http_server();
        namespace.apply(&server.deployment())?;
        namespace.rolled_out(server.name)?;
        responds(namespace, "1server")?;
        responds(namespace, "2")
    })
}

#[test]
fn services_with_a_traffic_distribution_respond() -> Result<()> {
    with(
        "traffic-distribution",
        &["trafficDistribution"],
        |namespace| {
            let server = App {
                replicas: 2,
                ..App::http_server()
            };
            namespace.apply(&server.deployment())?;
            namespace.rolled_out(server.name)?;
            responds(namespace, "same-zone")?;
            responds(namespace, "same-node")
        },
    )
}

#[test]
fn pods_with_user_namespaces_are_ready() -> Result<()> {
    with("user-namespace", &["hostUsers"], |namespace| {
        let supported = "jsonpath={.items[*].status.runtimeHandlers[*].features.userNamespaces}";
        let supported = kubectl(&["get", "nodes", "-o", supported])?;
        if pod(namespace)?["spec"]["hostUsers"] != false || !supported.contains("true") {
            return skip("user-namespace", "API server or container runtime");
        }
        is_ready(namespace)
    })
}

#[test]
fn pods_with_resources_are_ready() -> Result<()> {
    with("pod-level-resources", &["resources"], |namespace| {
        let pod = pod(namespace)?;
        if pod["spec"]["resources"].is_null() {
            return skip("pod-level-resources", "the API server ignores the field");
        }
        is_ready(namespace)
    })
}

#[test]
fn guaranteed_pods_stay_guaranteed() -> Result<()> {
    with("guaranteed", &[], |namespace| {
        is_ready(namespace)?;
        let class = &pod(namespace)?["status"]["qosClass"];
        ensure!(class == "Guaranteed", "{class}");
        Ok(())
    })
}

#[test]
fn pods_fit_the_ratios_of_a_limit_range() -> Result<()> {
    with("limit-range", &[], is_ready)
}

#[test]
fn pods_fit_a_resource_quota() -> Result<()> {
    with("resource-quota", &[], is_ready)
}

#[test]
fn pods_with_a_port_of_the_node_are_ready() -> Result<()> {
    with("host-port", &[], is_ready)
}

#[test]
fn pods_with_shared_processes_are_ready() -> Result<()> {
    with("shared-processes", &[], is_ready)
}

#[test]
fn applications_may_have_the_default_user_of_the_proxy() -> Result<()> {
    with("proxy-user", &[], is_ready)
}

#[test]
fn jobs_without_retries_complete() -> Result<()> {
    with("job", &[], |namespace| {
        let completed = ["job/app", "--for=condition=Complete", "--timeout=180s"];
        namespace.kubectl(&[&["wait"], &completed[..]].concat())?;
        Ok(())
    })
}

#[test]
fn proxies_of_ending_pods_serve_until_the_application_has_ended() -> Result<()> {
    with("ending-pod", &["lifecycle"], |namespace| {
        is_ready(namespace)?;
        namespace.kubectl(&["delete", "pod", "app", "--wait=false"])?;
        // The application runs for 30 s more, before the kubelet stops the proxy.
        let page = format!(
            "/api/v1/namespaces/{}/pods/app:4001/proxy/ready",
            namespace.name
        );
        kubectl(&["get", "--raw", &page]).map(drop)
    })
}
