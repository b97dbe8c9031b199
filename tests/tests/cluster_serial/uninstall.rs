//! Removal of the mesh from a cluster as docs/operations.md describes it, and while meshed pods run;
//! a new installation; the check of an upgrade.

use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::load::Load;
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{
    MANIFESTS, MESH, Namespace, in_namespace, kubectl, kubectl_with_input, wait_for, wait_for_mesh,
};
use diy_mesh_tests::sandbox::programs;

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

#[test]
fn mesh_uninstall_waits_for_pods_and_keeps_identities_and_policies_until_purge() -> Result<()> {
    in_namespace("installation", |namespace| {
        let server = App::http_server();
        namespace.apply(&server.deployment())?;
        namespace.rolled_out(server.name)?;
        kubectl_with_input(&["apply", "-f", "-"], &mesh(&["install", "--crds"])?)?;
        let report = mesh(&["upgrade", "--check"])?;
        ensure!(report.contains("would accept all objects"), "{report}");
        let other = ["--set=trustDomain=example.org", "--set=proxy.dump=off"];
        let objects = mesh(&[&["install", "--set=namespace=default"][..], &other].concat())?;
        kubectl_with_input(&["apply", "--dry-run=server", "-f", "-"], &objects)?;

        let pod = namespace.pods(server.name)?.remove(0);
        let refused = run_mesh(&["uninstall", "--purge"])?;
        let error = String::from_utf8_lossy(&refused.stderr);
        ensure!(
            refused.status.code() == Some(1) && error.contains(&pod),
            "{error}"
        );
        let webhook = "mutatingwebhookconfiguration/diy-service-mesh-injector";
        kubectl(&["get", webhook])?;
        namespace.kubectl(&["delete", "deployment", server.name])?;
        let plan = wait_for("no pod has a proxy", || {
            mesh(&["uninstall", "--dry-run"]).map(Some)
        })?;
        ensure!(
            plan.contains("would delete Deployment service-mesh/controller"),
            "{plan}"
        );
        kubectl(&["get", webhook])?;

        let installed = Installation;
        let foreign = ["role", "foreign", "-n", MESH];
        kubectl(
            &[
                &["create"][..],
                &foreign,
                &["--verb=get", "--resource=pods"],
            ]
            .concat(),
        )?;
        kubectl(
            &[
                &["label"][..],
                &foreign,
                &["app.kubernetes.io/part-of=diy-service-mesh"],
            ]
            .concat(),
        )?;
        let ca = || {
            kubectl(&[
                "get",
                "secret",
                "-n",
                MESH,
                "diy-service-mesh-ca",
                "-o=jsonpath={.metadata.uid}",
            ])
        };
        let before = ca()?;
        mesh(&["uninstall"])?;
        let left = objects_of(&["clusterroles,clusterrolebindings,mutatingwebhookconfigurations"])?;
        ensure!(left.is_empty(), "{left}");
        let left = objects_of(&[
            "services,deployments,serviceaccounts,roles,rolebindings",
            "-n",
            MESH,
        ])?;
        ensure!(
            left.trim() == "role.rbac.authorization.k8s.io/foreign",
            "{left}"
        );
        kubectl(&["get", "crd", "trafficpolicies.diy-service-mesh.dev"])?;
        let again = mesh(&["uninstall"])?;
        ensure!(again.contains("no object of the mesh is left"), "{again}");
        kubectl_with_input(&["apply", "-f", "-"], &mesh(&["install"])?)?;
        wait_for_mesh()?;
        ensure!(ca()? == before, "the CA is another one");

        let secret = ["secret", "generic", "of-others", "-n", MESH];
        kubectl(&[&["create"][..], &secret].concat())?;
        let refused = run_mesh(&["uninstall", "--purge"])?;
        let error = String::from_utf8_lossy(&refused.stderr);
        ensure!(
            error.contains("1 object of others") && error.contains("\n    Secret of-others\n"),
            "{error}"
        );
        kubectl(&["delete", "secret", "of-others", "-n", MESH])?;
        let purged = mesh(&["uninstall", "--purge"])?;
        for title in [
            "Secret service-mesh/diy-service-mesh-ca",
            "Namespace service-mesh",
        ] {
            ensure!(purged.contains(&format!("deleted {title}\n")), "{purged}");
        }
        let left = objects_of(&["namespaces,customresourcedefinitions"])?;
        ensure!(left.is_empty(), "{left}");
        kubectl_with_input(&["apply", "-f", "-"], &mesh(&["install", "--crds"])?)?;
        drop(installed);
        wait_for_mesh()
    })
}

/// The output of a command that succeeds.
fn mesh(arguments: &[&str]) -> Result<String> {
    let output = run_mesh(arguments)?;
    let (text, error) = (output.stdout, String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(text)?;
    ensure!(output.status.success(), "mesh {arguments:?}: {text}{error}");
    Ok(text)
}

fn run_mesh(arguments: &[&str]) -> Result<Output> {
    let output = Command::new(programs().join("mesh"))
        .args(arguments)
        .output();
    output.context("cannot start mesh")
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
    let global = "namespaces,clusterroles,clusterrolebindings,mutatingwebhookconfigurations";
    let local = "configmaps,secrets,services,deployments,serviceaccounts,roles,rolebindings";
    let own = objects_of(&[local, "-n", &namespace.name])?;
    Ok(objects_of(&[global])? + &objects_of(&[local, "-n", MESH])? + &own)
}

/// The objects of these kinds with the label of the mesh.
fn objects_of(kinds: &[&str]) -> Result<String> {
    let label = "app.kubernetes.io/part-of=diy-service-mesh";
    kubectl(&[&["get"], kinds, &["-l", label, "-o", "name"]].concat())
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
