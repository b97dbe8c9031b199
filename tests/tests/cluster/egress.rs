//! Calls to outside of the cluster, by name and by address. The API server at its own address stands for
//! the outside: no pod has that address.

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{MANIFESTS, Namespace, in_namespace, kubectl, wait_for};
use serde_json::{Value, json};

/// An address of the documentation (RFC 5737), where nothing answers.
const NOWHERE: &str = "192.0.2.1";

fn run(namespace: &Namespace, arguments: &[&str]) -> Result<String> {
    let program = [
        "exec",
        "deploy/client",
        "-c",
        "authorizer",
        "--",
        "authorizer",
    ];
    namespace.kubectl(&[&program[..], arguments].concat())
}

/// Waits until the client's handshake with an address succeeds, or fails.
fn expect(namespace: &Namespace, address: &str, name: &str, is_allowed: bool) -> Result<()> {
    wait_for("the handshake", || {
        let told = run(namespace, &["tls", address, name])?;
        let expected = if is_allowed {
            "handshake:"
        } else {
            "no handshake:"
        };
        ensure!(told.starts_with(expected), "{address} {name}: {told}");
        Ok(Some(()))
    })
}

fn policy(destinations: &Value) -> String {
    let rules = json!([{"destinations": destinations}]);
    json!({
        "apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "AuthorizationPolicy",
        "metadata": {"name": "egress"},
        "spec": {
            "direction": "Outbound",
            "targetRefs": [{"group": "", "kind": "Pod", "selector": {"matchLabels": {"app": "client"}}}],
            "action": "ALLOW", "rules": rules,
        },
    })
    .to_string()
}

/// A Service without selector whose only endpoint is this address. The pod is forged.
fn service(
    name: &str,
    cluster_ip: Option<&str>,
    [address, port]: [&str; 2],
    pod: &str,
) -> [Value; 2] {
    let port: u16 = port.parse().unwrap_or_default();
    let mut spec = json!({"ports": [{"name": "tls", "port": port}]});
    if let Some(cluster_ip) = cluster_ip {
        spec["clusterIP"] = json!(cluster_ip);
    }
    let mut endpoint = json!({"addresses": [address], "conditions": {"ready": true}});
    if !pod.is_empty() {
        endpoint["targetRef"] = json!({"kind": "Pod", "name": pod});
    }
    let labels = json!({"kubernetes.io/service-name": name});
    let service =
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec});
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": name, "labels": labels},
        "ports": [{"name": "tls", "port": port}], "endpoints": [endpoint],
    });
    [service, slice]
}

#[test]
fn closed_egress_reaches_what_is_allowed_by_name_or_address() -> Result<()> {
    in_namespace("egress", |namespace| {
        kubectl(&["apply", "-k", &format!("{MANIFESTS}/crds")])?;
        let slices = ["get", "endpointslices", "-n", "default", "-l"];
        let of_api = ["kubernetes.io/service-name=kubernetes", "-o", "json"];
        let slices: Value = serde_json::from_str(&kubectl(&[&slices[..], &of_api].concat())?)?;
        let slice = &slices["items"][0];
        let ip = slice["endpoints"][0]["addresses"][0].as_str();
        let (ip, port) = (
            ip.context("an address")?,
            slice["ports"][0]["port"].to_string(),
        );
        let (api, nowhere) = (format!("{ip}:{port}"), format!("{NOWHERE}:{port}"));
        let name = format!("named.{}.svc.cluster.local", namespace.name);
        for app in [App::authorizer("client"), App::http_server()] {
            namespace.apply(&app.deployment())?;
        }
        namespace.apply(&App::http_server().service())?;
        namespace.rolled_out("client")?;
        namespace.rolled_out("server")?;
        let pod = namespace.pods("client")?.swap_remove(0);
        let at = [ip, &*port];
        let services = [
            service("named", Some("None"), at, ""),
            service("plain", None, at, ""),
            service("forged", None, at, &pod),
        ];
        for object in services.iter().flatten() {
            namespace.apply(&object.to_string())?;
        }
        let addresses = [&*api, &format!("plain:{port}"), &format!("forged:{port}")];
        for address in &addresses[..2] {
            expect(namespace, address, "open", true)?;
        }
        // Nothing is allowed but the cluster, and the API server by its Service.
        namespace.apply(&policy(&json!([])))?;
        for address in addresses {
            expect(namespace, address, "closed", false)?;
        }
        expect(namespace, "kubernetes.default.svc:443", "api", true)?;
        let inside = run(namespace, &["get", "http://server/hello"])?;
        ensure!(inside.starts_with("200"), "{inside}");
        let outside = run(namespace, &["get", &format!("http://{NOWHERE}/")])?;
        ensure!(outside.starts_with("403"), "{outside}");
        ensure!(outside.contains("egress-denied"), "{outside}");
        // A name leads to no node, and what the application dials counts for nothing.
        namespace.apply(&policy(&json!([{"type": "Host", "host": name}])))?;
        wait_for("the denial of the node", || {
            let told = run(namespace, &["get", &format!("http://{name}:{port}/")])?;
            ensure!(told.contains("local or of the cluster"), "{told}");
            Ok(Some(()))
        })?;
        expect(namespace, &nowhere, &name, false)?;
        let block = json!({"type": "IPBlock", "ipBlock": format!("{ip}/32")});
        namespace.apply(&policy(&json!([{"type": "Host", "host": name}, block])))?;
        expect(namespace, &nowhere, &name, true)?;
        expect(namespace, &nowhere, "another.example.com", false)?;
        for address in &addresses[..2] {
            expect(namespace, address, "by address", true)?;
        }
        namespace.kubectl(&["delete", "authorizationpolicy", "egress"])?;
        namespace.apply(&policy(&json!([])))?;
        expect(namespace, &api, "closed again", false)
    })
}
