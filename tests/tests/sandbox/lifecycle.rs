//! Outages of the controllers and of the injector in a sandbox.

use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, http_server, shell, single_pod, under_load, with_mesh,
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
