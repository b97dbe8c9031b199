//! Hosts outside of the cluster as backends of routes: XBackends, by the definition of the experimental
//! channel, and TrafficPolicies.

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::gateway_api::{
    ACCEPTED, Experimental, install, standard, wait_for_condition,
};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{
    MANIFESTS, Namespace, in_namespace, kubectl, kubectl_with_input, wait_for,
};
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

/// The fields of a host.
fn host() -> Value {
    json!({
        "type": "ExternalHostname", "port": {"port": 443},
        "externalHostname": {"hostname": HOST},
        "tls": {
            "mode": "ServerOnly",
            "validation": {"hostname": HOST, "wellKnownCACertificates": "System"},
        },
    })
}

fn object(group: &str, kind: &str, name: &str, spec: &Value) -> String {
    let version = format!("{group}/v1alpha1");
    json!({"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec})
        .to_string()
}

/// The requests to a path of Service `server` fail until the host of this kind exists, and are for
/// the host then. The others stay with the Service. A host that no route uses has a condition, too.
fn check(namespace: &Namespace, group: &str, kind: &str, spec: &Value) -> Result<()> {
    for app in [App::authorizer("client"), App::http_server()] {
        namespace.apply(&app.deployment())?;
    }
    namespace.apply(&App::http_server().service())?;
    namespace.rolled_out("client")?;
    namespace.rolled_out("server")?;
    let prefix = |path: &str| json!([{"path": {"type": "PathPrefix", "value": path}}]);
    let outside = json!([{"group": group, "kind": kind, "name": "api"}]);
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
    namespace.apply(&object(group, kind, "api", spec))?;
    wait_for_condition(namespace, "httproute", "server", ACCEPTED)?;
    let resolved = ["ResolvedRefs", "True", "ResolvedRefs"];
    wait_for_condition(namespace, "httproute", "server", resolved)?;
    namespace.apply(&object(group, kind, "unused", spec))?;
    for name in ["api", "unused"] {
        wait_for_condition(namespace, &kind.to_lowercase(), name, ACCEPTED)?;
    }
    expect(namespace, "/outside", "502", "unresolved")?;
    expect(namespace, "/hello", "200", "")
}

#[test]
fn route_to_an_outside_host_is_accepted_and_resolved_by_the_proxy() -> Result<()> {
    in_namespace("xbackend", |namespace| {
        let _experimental = Experimental::install()?;
        check(
            namespace,
            "gateway.networking.x-k8s.io",
            "XBackend",
            &host(),
        )
    })
}

#[test]
fn outside_host_of_a_policy_needs_no_experimental_channel() -> Result<()> {
    in_namespace("outside-host", |namespace| {
        let _standard = standard();
        install()?;
        kubectl(&["apply", "-k", &format!("{MANIFESTS}/crds")])?;
        let (group, kind) = ("diy-service-mesh.dev", "TrafficPolicy");
        let create = [
            "-n",
            &*namespace.name,
            "create",
            "--dry-run=server",
            "-f",
            "-",
        ];
        let targets = json!([{"group": "", "kind": "Service", "name": "server"}]);
        let mut inside = host();
        inside["externalHostname"]["hostname"] = json!("api.shop.svc.cluster.local");
        for (spec, part) in [
            (json!({}), "targetRefs"),
            (json!({"timeouts": {"request": "1s"}}), "targetRefs"),
            (
                json!({"backend": host(), "targetRefs": targets}),
                "backend alone",
            ),
            (json!({"backend": host(), "timeouts": {}}), "backend alone"),
            (json!({"backend": inside}), "outside of the cluster"),
        ] {
            let refused = kubectl_with_input(&create, &object(group, kind, "api", &spec));
            let error = refused.err().with_context(|| format!("{spec} is stored"))?;
            ensure!(format!("{error:#}").contains(part), "{spec}: {error:#}");
        }
        check(namespace, group, kind, &json!({"backend": host()}))
    })
}
