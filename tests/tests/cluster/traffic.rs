//! Traffic on a cluster: balancing, meshed and unmeshed pods, a Job, a rollout under load.

use anyhow::{Result, ensure};
use diy_mesh_tests::cluster::workloads::{App, distinct};
use diy_mesh_tests::cluster::{in_namespace, kubectl, wait_for};

#[test]
fn grpc_calls_of_one_connection_reach_both_pods() -> Result<()> {
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
        wait_for("responses of both pods", || {
            let responses = namespace.logs(client.name, client.program)?;
            Ok((distinct(&responses, "Hostname: ").len() == both.len()).then_some(()))
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
fn unmeshed_client_reaches_meshed_server() -> Result<()> {
    in_namespace("meshed-server", |namespace| {
        let client = App {
            inject: None,
            ..App::http_client()
        };
        namespace.wait_for_responses(&App::http_server(), &client)?;
        let dump = namespace.logs("server", "proxy")?;
        ensure!(
            dump.contains("Inbound connection from "),
            "the server's proxy logged no connection:\n{dump}"
        );
        Ok(())
    })
}

#[test]
fn meshed_client_reaches_unmeshed_server() -> Result<()> {
    in_namespace("meshed-client", |namespace| {
        let server = App {
            inject: None,
            ..App::http_server()
        };
        namespace.wait_for_responses(&server, &App::http_client())?;
        let dump = namespace.logs("client", "proxy")?;
        ensure!(
            dump.contains("Outbound connection to "),
            "the client's proxy logged no connection:\n{dump}"
        );
        Ok(())
    })
}

#[test]
fn namespace_label_enables_injection_and_annotation_disables_it() -> Result<()> {
    in_namespace("label", |namespace| {
        kubectl(&[
            "label",
            "namespace",
            &namespace.name,
            "diy-service-mesh/inject=enabled",
        ])?;
        wait_for("the API server to apply the label", || {
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
        let unannotated = App {
            name: "unannotated",
            inject: None,
            ..App::http_server()
        };
        let disabled = App {
            name: "disabled",
            inject: Some("False"),
            ..App::http_server()
        };
        for app in [unannotated, disabled] {
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
            sidecars(&unannotated)? == "proxy-init proxy",
            "a pod without annotation has {:?}",
            sidecars(&unannotated)?
        );
        ensure!(
            sidecars(&disabled)?.is_empty(),
            "a pod with inject: False has {:?}",
            sidecars(&disabled)?
        );
        Ok(())
    })
}

#[test]
fn meshed_job_completes() -> Result<()> {
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
        let responses = namespace.responses(&client)?;
        ensure!(
            responses.good > 0 && responses.bad.is_empty(),
            "responses of the Job: {responses:?}"
        );
        Ok(())
    })
}

#[test]
fn rollout_under_load_fails_no_request() -> Result<()> {
    in_namespace("rollout", |namespace| {
        let server = App {
            replicas: 2,
            ..App::http_server()
        };
        let clients = App {
            replicas: 6,
            ..App::http_client()
        };
        let initial_failures = namespace.wait_for_responses(&server, &clients)?;
        let before = namespace.responses(&clients)?.good;

        for _ in 0..2 {
            namespace.restart(server.name)?;
        }

        // Each client receives responses after the last old pod is gone.
        let current = namespace.responses(&clients)?.good;
        let minimum = current + 5 * clients.replicas as usize;
        let responses = wait_for("responses after the rollout", || {
            let responses = namespace.responses(&clients)?;
            Ok((responses.good + responses.bad.len() >= minimum).then_some(responses))
        })?;
        eprintln!(
            "rollout: {} responses, {} of them during the rollout",
            responses.good,
            current - before
        );
        responses.expect_failures(initial_failures)
    })
}
