//! Outages of mesh components on a cluster.

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::outage::InjectorOutage;
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{MESH, Namespace, in_namespace, kubectl, wait_for, wait_for_mesh};

#[test]
fn injector_outage_blocks_only_meshed_pods() -> Result<()> {
    in_namespace("no-injector", |namespace| {
        let outage = InjectorOutage::start()?;
        let plain = App {
            name: "plain",
            inject: None,
            ..App::http_server()
        };
        namespace.apply(&plain.deployment())?;
        namespace.rolled_out(plain.name)?;

        let asks = App {
            name: "asks",
            ..App::http_server()
        };
        namespace.apply(&asks.deployment())?;
        let reason = wait_for("the error of the ReplicaSet", || replica_failure(namespace))?;
        ensure!(
            reason.contains("injector.diy-service-mesh.dev"),
            "the error does not name the webhook: {reason}"
        );

        drop(outage);
        wait_for_mesh()?;
        namespace
            .kubectl(&["rollout", "restart", "deployment/asks"])
            .context("restart to create the pod without back-off")?;
        namespace.rolled_out(asks.name)
    })
}

#[test]
fn controller_restart_fails_no_request() -> Result<()> {
    in_namespace("no-controller", |namespace| {
        let (server, clients) = (
            App {
                replicas: 2,
                ..App::http_server()
            },
            App {
                replicas: 3,
                ..App::http_client()
            },
        );
        namespace.wait_for_responses(&server, &clients)?;
        // No request may fail.
        let wait_for_more_responses = || namespace.wait_for_more_responses(&clients, 0);

        // Kills all replicas at once, without grace period.
        kubectl(&[
            "delete",
            "pods",
            "-n",
            MESH,
            "-l",
            "app=controller",
            "--grace-period=0",
            "--force",
        ])?;
        wait_for_more_responses()?;
        wait_for_mesh()?;
        wait_for_more_responses()?;

        // Proxies receive later changes: new servers replace the known ones.
        namespace.restart(server.name)?;
        wait_for_more_responses()
    })
}

/// Error of the ReplicaSet that cannot create its pod.
fn replica_failure(namespace: &Namespace) -> Result<Option<String>> {
    let condition = r#"{.items[*].status.conditions[?(@.type=="ReplicaFailure")].message}"#;
    let message = namespace.kubectl(&[
        "get",
        "replicasets",
        "-l",
        "app=asks",
        "-o",
        &format!("jsonpath={condition}"),
    ])?;
    Ok((!message.is_empty()).then_some(message))
}
