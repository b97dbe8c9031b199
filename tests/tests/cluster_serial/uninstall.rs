//! Removal of the mesh from a cluster as docs/operations.md describes it, and while meshed pods run;
//! a new installation.

use anyhow::{Result, ensure};
use diy_mesh_tests::cluster::load::Load;
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{
    MANIFESTS, MESH, Namespace, in_namespace, kubectl, wait_for, wait_for_mesh,
};

#[test]
fn uninstall_leaves_meshed_pods_working_and_nothing_behind() -> Result<()> {
    in_namespace("uninstall", |namespace| {
        let (server, client) = (App::http_server(), App::http_client());
        let failures = namespace.wait_for_responses(&server, &client)?;
        ensure!(
            objects(namespace)?.contains("configmap/diy-service-mesh-roots"),
            "the roots are published"
        );
        let load = leave_the_mesh(namespace)?;

        let installed = Installation;
        kubectl(&["delete", "-k", MANIFESTS, "--timeout=180s"])?;
        wait_for("the last objects of the mesh are deleted", || {
            let left = objects(namespace)?;
            if left.is_empty() {
                Ok(Some(()))
            } else {
                Err(anyhow::anyhow!("{left}"))
            }
        })?;
        namespace.wait_for_more_responses(&client, failures)?;
        load.expect_no_failure()?;

        drop(installed);
        wait_for_mesh()?;
        for app in [&server, &client] {
            let deployment = format!("deployment/{}", app.name);
            namespace.kubectl(&["rollout", "restart", &deployment])?;
            namespace.rolled_out(app.name)?;
        }
        wait_for("responses to the new client", || {
            let responses = namespace.responses(&client)?;
            Ok((responses.good >= 3).then_some(()))
        })
    })
}

/// Removes a server and its client from the mesh while the control plane runs, without a failed
/// request.
fn leave_the_mesh(namespace: &Namespace) -> Result<Load<'_>> {
    let server = App {
        name: "leaving",
        ..App::http_server()
    };
    let client = App {
        name: "caller",
        endpoint: "http://leaving/hello",
        ..App::http_client()
    };
    namespace.apply(&server.deployment())?;
    namespace.apply(&server.service())?;
    namespace.rolled_out(server.name)?;
    let load = Load::start(namespace, client)?;
    for app in [server, client] {
        let plain = App {
            inject: None,
            ..app
        };
        namespace.apply(&plain.deployment())?;
        namespace.rolled_out(app.name)?;
        load.expect_no_failure()?;
    }
    Ok(load)
}

/// The objects of the mesh.
fn objects(namespace: &Namespace) -> Result<String> {
    let label = "app.kubernetes.io/part-of=diy-service-mesh";
    let global = "namespaces,clusterroles,clusterrolebindings,mutatingwebhookconfigurations";
    let local = "configmaps,secrets,services,deployments,serviceaccounts,roles,rolebindings";
    let global = kubectl(&["get", global, "-l", label, "-o", "name"])?;
    let mesh = kubectl(&["get", local, "-n", MESH, "-l", label, "-o", "name"])?;
    Ok(global + &mesh + &namespace.kubectl(&["get", local, "-l", label, "-o", "name"])?)
}

/// Installs the mesh again on drop, for the tests that follow.
struct Installation;

impl Drop for Installation {
    fn drop(&mut self) {
        if let Err(error) = kubectl(&["apply", "-k", MANIFESTS]) {
            eprintln!("cannot install the mesh: {error:#}");
        }
    }
}
