//! `mesh identity` and `mesh rotate-root` in a sandbox: their output matches the state of the mesh,
//! and the new root is in use everywhere when `mesh rotate-root` completes.

#![allow(missing_docs, clippy::unwrap_used)]

use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, http_server, identity, identity_when, mesh, with_controller,
};

#[test]
fn new_root_is_in_use_when_rotate_root_completes() {
    // Certificates with a short lifetime: the rotation completes within the test.
    let Some(sandbox) = with_controller(
        &[("CERTIFICATE_LIFE", "20")],
        &http_server(2, "1.0", MESHED),
    ) else {
        return;
    };
    // A proxy that has just connected has no status yet.
    let before = identity_when(
        &sandbox,
        "the status of both proxies",
        READY_TIMEOUT,
        |now| {
            now["workloads"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|workload| workload["certificate_not_after"] != 0)
                .count()
                == 2
        },
    );
    let workloads = before["workloads"].as_array().unwrap();
    assert_eq!(
        (
            before["replicas"].as_array().unwrap().len(),
            workloads.len()
        ),
        (2, 2),
        "{before:#}"
    );
    for workload in workloads {
        assert_eq!(
            workload["identity"], "spiffe://cluster.local/ns/servers/sa/default",
            "{workload:#}"
        );
        assert_eq!(workload["acknowledged"], true, "{workload:#}");
        assert!(
            workload["certificate_not_after"].as_u64().unwrap()
                > workload["certificate_not_before"].as_u64().unwrap(),
            "{workload:#}"
        );
    }
    let page = mesh(&sandbox, &["identity"]);
    assert!(
        page.stdout
            .contains("spiffe://cluster.local/ns/servers/sa/default")
            && !page.stdout.contains('\x1b'),
        "{}",
        page.stdout
    );

    let nothing = mesh(
        &sandbox,
        &["rotate-root", "--abandon", "--ca-folder=/run/authority"],
    );
    assert!(
        nothing.code == 1 && nothing.stderr.contains("no rotation is in progress"),
        "{nothing:?}"
    );

    let done = mesh(&sandbox, &["rotate-root", "--ca-folder=/run/authority"]);
    assert_eq!(done.code, 0, "{done:?}");
    for part in ["announcing: ", "switched: "] {
        assert!(
            done.stderr.contains(part),
            "{part} is not in: {}",
            done.stderr
        );
    }
    assert!(done.stdout.starts_with("done after "), "{}", done.stdout);

    let after = identity(&sandbox);
    assert_eq!(after["rotation"]["phase"], "steady", "{after:#}");
    assert_ne!(
        after["issuer"]["fingerprint"],
        before["issuer"]["fingerprint"]
    );
    assert_eq!(
        after["roots"].as_array().unwrap().len(),
        1,
        "the old root is gone: {after:#}"
    );
    for workload in after["workloads"].as_array().unwrap() {
        assert_eq!(
            workload["certificate_issuer"], after["issuer"]["id"],
            "{workload:#}"
        );
    }
}
