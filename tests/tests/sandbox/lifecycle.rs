//! Outages of the controllers and of the injector, and pods without redirect rules, in a sandbox.

use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, http_server, metric, run, shell, single_pod, under_load, with_mesh,
};

#[test]
fn controller_restart_under_load_fails_no_request() {
    let objects = format!("{}---{}", http_server(2, "1.0", MESHED), shell(MESHED));
    let Some(sandbox) = with_mesh(&objects) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    under_load(&sandbox, &client, &[["4", "50"]], || {
        sandbox.scale("service-mesh", "controller", 0).unwrap();
        let pods = |count: usize| {
            move |view: &diy_mesh_sandbox::View| {
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

#[test]
fn pod_without_redirect_rules_is_not_ready_until_they_return() {
    // Removed while the proxy runs, and still missing after its restart.
    let admin =
        "securityContext: {runAsUser: 0, capabilities: {drop: [ALL], add: [NET_ADMIN, KILL]}}";
    let command = "command: [sleep, infinity]";
    let Some(sandbox) = with_mesh(&shell(MESHED).replace(command, &format!("{command}, {admin}")))
    else {
        return;
    };
    let pod = single_pod(&sandbox, "clients", "shell");
    let accepted = "connections_total{direction=\"outbound\"}";
    assert_eq!(metric(&sandbox, &pod, accepted), 0, "the probe is none");

    let output = run(
        &sandbox,
        &pod,
        "set -e; nft list table inet diy-service-mesh >/tmp/rules
         nft delete table inet diy-service-mesh",
    );
    assert_eq!(output, "");
    let is_ready = |expected| {
        let ready = move |view: &diy_mesh_sandbox::View| {
            let pods = view.pods_of("clients", "shell");
            pods.iter().all(|pod| pod.ready == expected).then_some(())
        };
        sandbox.wait("its readiness", READY_TIMEOUT, ready).unwrap();
    };
    is_ready(false);
    let page = sandbox.admin_page(&pod, "/ready").unwrap();
    let expected = "redirect: connections of this pod are not redirected to the proxy: a connection to \
                    127.0.0.1:4000 did not arrive at port 5000: it arrived elsewhere";
    assert!(page.body.contains(expected), "{}", page.body);
    run(&sandbox, &pod, "nft -f /tmp/rules");
    is_ready(true);

    let output = run(
        &sandbox,
        &pod,
        "nft delete table inet diy-service-mesh
         for process in /proc/[0-9]*; do
             read -r name <$process/comm && [ \"$name\" = proxy ] || continue
             kill -9 ${process#/proc/} && echo killed
         done",
    );
    assert_eq!(output, "killed\n");
    is_ready(false);

    run(&sandbox, &pod, "nft -f /tmp/rules");
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    assert!(single_pod(&sandbox, "clients", "shell").ready);
}
