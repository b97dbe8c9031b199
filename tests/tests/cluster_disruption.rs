//! The mesh's own parts go away on a cluster: what then must go on, goes on. One test at a time, since all share the mesh.

use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{MESH, Namespace, in_namespace, kubectl, wait_for, wait_for_mesh};

#[test]
fn without_the_injector_only_pods_that_ask_for_the_mesh_wait() -> Result<()> {
    let _alone = alone();
    in_namespace("no-injector", |namespace| {
        let away = Away::new()?;
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
        let reason = wait_for("the reason why the pod is not made", || refusal(namespace))?;
        ensure!(
            reason.contains("injector.diy-service-mesh.dev"),
            "the refusal does not name the webhook: {reason}"
        );

        drop(away);
        wait_for_mesh()?;
        namespace
            .kubectl(&["rollout", "restart", "deployment/asks"])
            .context("to have the pod made now rather than after a back-off")?;
        namespace.rolled_out(asks.name)
    })
}

#[test]
fn a_controller_that_restarts_is_not_noticed() -> Result<()> {
    let _alone = alone();
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
        namespace.answers_come(&server, &clients)?;
        // A bad one, ever, is an error.
        let more_answers = || namespace.more_answers(&clients, 0);
        let old_servers = namespace.pods(server.name)?;

        // All replicas at once, with no time to say goodbye.
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
        more_answers()?;
        wait_for_mesh()?;
        more_answers()?;

        // What changes afterwards is heard of: other servers take the place of those that the proxies know.
        namespace.kubectl(&["rollout", "restart", "deployment/server"])?;
        namespace.rolled_out(server.name)?;
        for pod in old_servers {
            namespace.kubectl(&[
                "wait",
                &format!("pod/{pod}"),
                "--for=delete",
                "--timeout=180s",
            ])?;
        }
        more_answers()
    })
}

/// Why the ReplicaSet of the app that asks for the mesh cannot make its pod.
fn refusal(namespace: &Namespace) -> Result<Option<String>> {
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

/// The injector scaled to none, for as long as this lives.
struct Away;

impl Away {
    fn new() -> Result<Self> {
        let away = Self;
        kubectl(&["scale", "-n", MESH, "deployment/injector", "--replicas=0"])?;
        kubectl(&[
            "wait",
            "-n",
            MESH,
            "pods",
            "-l",
            "app=injector",
            "--for=delete",
            "--timeout=180s",
        ])?;
        wait_for("the injector's Service to be empty", || {
            let slices = [
                "get",
                "endpointslices",
                "-n",
                MESH,
                "-l",
                "kubernetes.io/service-name=injector",
            ];
            let addresses = kubectl(
                &[
                    &slices[..],
                    &["-o", "jsonpath={.items[*].endpoints[*].addresses}"],
                ]
                .concat(),
            )?;
            Ok(addresses.is_empty().then_some(()))
        })?;
        Ok(away)
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        if let Err(error) = kubectl(&["scale", "-n", MESH, "deployment/injector", "--replicas=2"]) {
            eprintln!("the injector stays away: {error:#}");
        }
    }
}

fn alone() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}
