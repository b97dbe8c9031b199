//! Traffic on a cluster, meshed and not: balancing, both mixtures, a Job that ends, a rollout that nobody notices.

use anyhow::{Result, ensure};
use diy_mesh_tests::cluster::workloads::{App, distinct};
use diy_mesh_tests::cluster::{in_namespace, kubectl, wait_for};

#[test]
fn grpc_on_one_connection_reaches_both_pods() -> Result<()> {
    in_namespace("grpc", |namespace| {
        let server = App {
            program: "grpc-server",
            replicas: 2,
            ..App::http_server()
        };
        let client = App {
            program: "grpc-client",
            endpoint: "http://server:80",
            ..App::http_client()
        };
        namespace.apply(&server.service())?;
        namespace.apply(&server.deployment())?;
        namespace.rolled_out(server.name)?;
        namespace.apply(&client.deployment())?;
        namespace.rolled_out(client.name)?;

        let both = namespace.pods(server.name)?;
        wait_for("answers of both pods", || {
            let answers = namespace.logs(client.name, client.program)?;
            Ok((distinct(&answers, "Hostname: ").len() == both.len()).then_some(()))
        })?;
        let pod = &namespace.pods(client.name)?[0];
        let connections = namespace.metric(pod, r#"connections_total{direction="outbound"}"#)?;
        ensure!(
            connections == 1,
            "grpc-client made {connections} connections"
        );
        Ok(())
    })
}

#[test]
fn an_unmeshed_client_calls_a_meshed_server() -> Result<()> {
    in_namespace("meshed-server", |namespace| {
        let client = App {
            inject: None,
            ..App::http_client()
        };
        namespace.answers_come(&App::http_server(), &client)?;
        let dump = namespace.logs("server", "proxy")?;
        ensure!(
            dump.contains("Inbound connection from "),
            "the server's proxy shows nothing:\n{dump}"
        );
        Ok(())
    })
}

#[test]
fn a_meshed_client_calls_an_unmeshed_server() -> Result<()> {
    in_namespace("meshed-client", |namespace| {
        let server = App {
            inject: None,
            ..App::http_server()
        };
        namespace.answers_come(&server, &App::http_client())?;
        let dump = namespace.logs("client", "proxy")?;
        ensure!(
            dump.contains("Outbound connection to "),
            "the client's proxy shows nothing:\n{dump}"
        );
        Ok(())
    })
}

#[test]
fn a_namespace_asks_for_its_pods_and_a_pod_may_decline() -> Result<()> {
    in_namespace("label", |namespace| {
        kubectl(&[
            "label",
            "namespace",
            &namespace.name,
            "diy-service-mesh/inject=enabled",
        ])?;
        wait_for("the API server to have heard of the label", || {
            let names = "jsonpath={.spec.initContainers[*].name}";
            let pod = namespace.kubectl(&[
                "run",
                "never",
                "--image=never",
                "--dry-run=server",
                "-o",
                names,
            ])?;
            Ok((!pod.is_empty()).then_some(()))
        })?;
        let says_nothing = App {
            name: "says-nothing",
            inject: None,
            ..App::http_server()
        };
        let declines = App {
            name: "declines",
            inject: Some("False"),
            ..App::http_server()
        };
        for app in [says_nothing, declines] {
            namespace.apply(&app.deployment())?;
            namespace.rolled_out(app.name)?;
        }
        let sidecars = |app: &App<'_>| {
            let names = "jsonpath={.items[*].spec.initContainers[*].name}";
            namespace.kubectl(&[
                "get",
                "pods",
                "-l",
                &format!("app={}", app.name),
                "-o",
                names,
            ])
        };
        ensure!(
            sidecars(&says_nothing)? == "proxy-init proxy",
            "a pod of the namespace has {:?}",
            sidecars(&says_nothing)?
        );
        ensure!(
            sidecars(&declines)?.is_empty(),
            "a pod that declines has {:?}",
            sidecars(&declines)?
        );
        Ok(())
    })
}

#[test]
fn a_job_in_the_mesh_completes() -> Result<()> {
    in_namespace("job", |namespace| {
        let server = App::http_server();
        namespace.apply(&server.service())?;
        namespace.apply(&server.deployment())?;
        namespace.rolled_out(server.name)?;

        let client = App::http_client();
        namespace.apply(&client.job())?;
        namespace.kubectl(&[
            "wait",
            "job/client",
            "--for=condition=Complete",
            "--timeout=180s",
        ])?;
        let answers = namespace.answers(&client)?;
        ensure!(
            answers.good > 0 && answers.bad.is_empty(),
            "the Job's calls: {answers:?}"
        );
        Ok(())
    })
}

#[test]
fn a_rollout_under_load_fails_no_request() -> Result<()> {
    in_namespace("rollout", |namespace| {
        let server = App {
            replicas: 2,
            ..App::http_server()
        };
        let clients = App {
            replicas: 6,
            ..App::http_client()
        };
        let refused_at_first = namespace.answers_come(&server, &clients)?;
        let before = namespace.answers(&clients)?.good;

        for _ in 0..2 {
            let old = namespace.pods(server.name)?;
            namespace.kubectl(&["rollout", "restart", "deployment/server"])?;
            namespace.rolled_out(server.name)?;
            for pod in old {
                namespace.kubectl(&[
                    "wait",
                    &format!("pod/{pod}"),
                    "--for=delete",
                    "--timeout=180s",
                ])?;
            }
        }

        // Every client has gone on since the last old pod went.
        let seen = namespace.answers(&clients)?.good;
        let enough = seen + 5 * clients.replicas as usize;
        let answers = wait_for("answers after the rollout", || {
            let answers = namespace.answers(&clients)?;
            Ok((answers.good + answers.bad.len() >= enough).then_some(answers))
        })?;
        eprintln!(
            "rollout: {} answers, {} of them while pods came and went",
            answers.good,
            seen - before
        );
        ensure!(
            answers.bad.len() == refused_at_first,
            "of {} answers these are not good: {:#?}",
            answers.good,
            answers.bad
        );
        Ok(())
    })
}
