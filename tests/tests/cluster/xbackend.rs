//! Hosts outside of the cluster as backends of routes, by the definition of the experimental channel.

use anyhow::{Result, ensure};
use diy_mesh_tests::cluster::gateway_api::{ACCEPTED, Experimental, wait_for_condition};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{Namespace, in_namespace, wait_for};
use serde_json::{Value, json};

/// No name server knows it (RFC 6761).
const HOST: &str = "api.mesh.invalid";

fn expect(namespace: &Namespace, path: &str, status: &str, part: &str) -> Result<()> {
    wait_for("the response", || {
        let url = format!("http://server{path}");
        let program = ["exec", "deploy/client", "-c", "authorizer", "--"];
        let get = ["authorizer", "get", &url];
        let response = namespace.kubectl(&[&program[..], &get].concat())?;
        let is_expected = response.starts_with(status) && response.contains(part);
        ensure!(is_expected, "{path}: {response}");
        Ok(Some(()))
    })
}

fn backend(host: &str) -> Value {
    json!({
        "apiVersion": "gateway.networking.x-k8s.io/v1alpha1", "kind": "XBackend",
        "metadata": {"name": "api"},
        "spec": {
            "type": "ExternalHostname", "port": {"port": 443},
            "externalHostname": {"hostname": host},
            "tls": {
                "mode": "ServerOnly",
                "validation": {"hostname": host, "wellKnownCACertificates": "System"},
            },
        },
    })
}

#[test]
fn route_to_an_outside_host_is_accepted_and_resolved_by_the_proxy() -> Result<()> {
    in_namespace("xbackend", |namespace| {
        let _experimental = Experimental::install()?;
        for app in [App::authorizer("client"), App::http_server()] {
            namespace.apply(&app.deployment())?;
        }
        namespace.apply(&App::http_server().service())?;
        namespace.rolled_out("client")?;
        namespace.rolled_out("server")?;
        let prefix = |path: &str| json!([{"path": {"type": "PathPrefix", "value": path}}]);
        let outside = json!([{
            "group": "gateway.networking.x-k8s.io", "kind": "XBackend", "name": "api",
        }]);
        let route = json!({
            "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
            "metadata": {"name": "server"},
            "spec": {
                "parentRefs": [{"group": "", "kind": "Service", "name": "server"}],
                "rules": [
                    {"matches": prefix("/outside"), "backendRefs": outside},
                    {"matches": prefix("/"), "backendRefs": [{"name": "server", "port": 80}]},
                ],
            },
        });
        namespace.apply(&route.to_string())?;
        let missing = ["ResolvedRefs", "False", "BackendNotFound"];
        wait_for_condition(namespace, "httproute", "server", missing)?;
        expect(namespace, "/outside", "500", "invalid-backend")?;
        expect(namespace, "/hello", "200", "")?;
        namespace.apply(&backend(HOST).to_string())?;
        wait_for_condition(namespace, "httproute", "server", ACCEPTED)?;
        let resolved = ["ResolvedRefs", "True", "ResolvedRefs"];
        wait_for_condition(namespace, "httproute", "server", resolved)?;
        wait_for_condition(namespace, "xbackend", "api", ACCEPTED)?;
        expect(namespace, "/outside", "502", "unresolved")?;
        expect(namespace, "/hello", "200", "")
    })
}
