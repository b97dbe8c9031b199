//! Rollouts, restarts of the control plane, Jobs, and an injector outage in a sandbox.

use std::collections::BTreeSet;

use diy_mesh::sandbox::Sandbox;
use diy_mesh::sandbox::protocol::PodView;
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, http_server, shell, single_pod, under_load, with_mesh,
};

/// Two servers, and a client.
fn mesh() -> Option<(Sandbox, PodView)> {
    let objects = format!("{}---{}", http_server(2, "1.0", MESHED), shell(MESHED));
    let sandbox = with_mesh(&objects)?;
    let client = single_pod(&sandbox, "clients", "shell");
    Some((sandbox, client))
}

#[test]
fn rollout_under_load_fails_no_request() {
    let Some((sandbox, client)) = mesh() else {
        return;
    };
    let before = names(&sandbox);
    under_load(&sandbox, &client, &[["4", "50"]], || {
        sandbox.apply(&http_server(2, "2.0", MESHED)).unwrap();
        sandbox
            .wait("the rollout", READY_TIMEOUT, |view| {
                let now: BTreeSet<_> = view
                    .pods
                    .values()
                    .filter(|pod| pod.workload == "http-server")
                    .collect::<Vec<_>>()
                    .into_iter()
                    .map(|pod| pod.name.clone())
                    .collect();
                let ready = view
                    .pods
                    .values()
                    .filter(|pod| pod.workload == "http-server")
                    .all(|pod| pod.ready);
                (now.len() == 2 && ready && now.is_disjoint(&before)).then_some(())
            })
            .unwrap();
    });
}

#[test]
fn controller_restart_under_load_fails_no_request() {
    let Some((sandbox, client)) = mesh() else {
        return;
    };
    under_load(&sandbox, &client, &[["4", "50"]], || {
        sandbox.scale("service-mesh", "controller", 0).unwrap();
        let pods = |count: usize| {
            move |view: &diy_mesh::sandbox::View| {
                let controllers: Vec<_> = view
                    .pods
                    .values()
                    .filter(|pod| pod.workload == "controller")
                    .collect();
                (controllers.len() == count && controllers.iter().all(|pod| pod.ready))
                    .then_some(())
            }
        };
        sandbox
            .wait("no controller", READY_TIMEOUT, pods(0))
            .unwrap();
        sandbox.scale("service-mesh", "controller", 2).unwrap();
        sandbox
            .wait("two controllers", READY_TIMEOUT, pods(2))
            .unwrap();
    });
}

#[test]
fn meshed_job_completes() {
    let job = format!(
        "
apiVersion: batch/v1
kind: Job
metadata: {{name: once, namespace: clients}}
spec:
  template:
    metadata: {{annotations: {{{MESHED}}}}}
    spec:
      restartPolicy: Never
      containers: [{{name: once, image: diy-sm-http-client:dev, command: [bash, -c, 'exec 3<>/dev/tcp/http-server.servers/80 && echo connected']}}]
"
    );
    let Some(sandbox) = with_mesh(&http_server(1, "1.0", "")) else {
        return;
    };
    sandbox.apply(&job).unwrap();
    let pod = sandbox
        .wait("the job ends", READY_TIMEOUT, |view| {
            view.pods
                .values()
                .find(|pod| {
                    pod.workload == "once" && !matches!(pod.phase.as_str(), "Pending" | "Running")
                })
                .cloned()
        })
        .unwrap();
    assert_eq!(pod.phase, "Succeeded");
    assert!(
        pod.injected && pod.containers.iter().all(|container| !container.running),
        "{pod:?}"
    );
    assert_eq!(sandbox.view().lines(&pod, "once"), ["connected"]);
    assert_eq!(
        pod.containers
            .iter()
            .find(|container| container.name == "proxy")
            .unwrap()
            .exit_code,
        Some(0),
        "the proxy exits with code 0"
    );
}

#[test]
fn injector_outage_blocks_only_meshed_pods() {
    let Some(sandbox) = with_mesh(&shell("")) else {
        return;
    };
    sandbox.scale("service-mesh", "injector", 0).unwrap();
    sandbox
        .wait("no injector", READY_TIMEOUT, |view| {
            (!view.pods.values().any(|pod| pod.workload == "injector")).then_some(())
        })
        .unwrap();
    let meshed = shell(MESHED)
        .replace("name: shell,", "name: meshed,")
        .replace("app: shell", "app: meshed");
    let other = shell("")
        .replace("name: shell,", "name: other,")
        .replace("app: shell", "app: other");
    sandbox.apply(&format!("{meshed}---{other}")).unwrap();
    sandbox
        .wait("the other pod", READY_TIMEOUT, |view| {
            view.pods_of("clients", "other")
                .iter()
                .any(|pod| pod.ready)
                .then_some(())
        })
        .unwrap();
    let reason = sandbox
        .wait("the reason", READY_TIMEOUT, |view| {
            view.pods_of("clients", "meshed").first()?.reason.clone()
        })
        .unwrap();
    assert!(
        reason.contains("failed calling webhook \"injector.diy-service-mesh.dev\""),
        "{reason}"
    );
    sandbox.scale("service-mesh", "injector", 1).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    assert!(single_pod(&sandbox, "clients", "meshed").injected);
}

fn names(sandbox: &Sandbox) -> BTreeSet<String> {
    sandbox
        .view()
        .pods_of("servers", "http-server")
        .into_iter()
        .map(|pod| pod.name)
        .collect()
}
