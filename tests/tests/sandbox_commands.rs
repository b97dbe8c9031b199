//! `mesh identity` and `mesh rotate-root` in a sandbox, run beside its controllers: what they say is what the mesh has, and a new
//! root is in force everywhere when the command says that it is done.

#![allow(missing_docs, clippy::unwrap_used)]

use diy_mesh::sandbox::{
    Sandbox,
    protocol::{Output, PodView},
};
use diy_mesh_tests::sandbox::{MESHED, PATIENCE, empty, http_server};
use serde_json::{Value, json};

/// Leaves live for seconds, so that the old root goes while somebody watches.
fn short_lived() -> Option<Sandbox> {
    let sandbox = empty()?;
    let mut objects = diy_mesh::sandbox::manifest::embedded().objects().unwrap();
    objects.retain(|object| object["metadata"]["namespace"] == "service-mesh" || object["kind"] == "MutatingWebhookConfiguration");
    for object in objects.iter_mut().filter(|object| object["kind"] == "Deployment" && object["metadata"]["name"] == "controller") {
        let env = object["spec"]["template"]["spec"]["containers"][0]["env"].as_array_mut().unwrap();
        env.push(json!({"name": "CERTIFICATE_LIFE", "value": "20"}));
    }
    sandbox.apply_objects(objects).unwrap();
    sandbox.apply(&http_server(2, "1.0", MESHED)).unwrap();
    sandbox.wait_settled(PATIENCE).expect("everything gets ready");
    Some(sandbox)
}

/// Runs `mesh` in a controller's pod, told of all controllers.
fn mesh(sandbox: &Sandbox, command: &[&str]) -> Output {
    let controllers: Vec<PodView> = sandbox.view().pods_of("service-mesh", "controller");
    let urls: Vec<String> = controllers.iter().map(|pod| format!("--controller=http://{}:8081", pod.ip.as_ref().unwrap())).collect();
    let arguments: Vec<&str> = ["mesh"].iter().chain(command).copied().chain(urls.iter().map(String::as_str)).collect();
    sandbox.exec(&controllers[0], "controller", &arguments).expect("the program is run")
}

fn identity(sandbox: &Sandbox) -> Value {
    let output = mesh(sandbox, &["identity", "--output=json"]);
    assert_eq!(output.code, 0, "{output:?}");
    serde_json::from_str(&output.stdout).unwrap()
}

#[test]
fn a_new_root_is_in_force_when_the_command_says_so() {
    let Some(sandbox) = short_lived() else { return };
    let before = identity(&sandbox);
    let workloads = before["workloads"].as_array().unwrap();
    assert_eq!((before["replicas"].as_array().unwrap().len(), workloads.len()), (2, 2), "{before:#}");
    for workload in workloads {
        assert_eq!(workload["identity"], "spiffe://cluster.local/ns/servers/sa/default", "{workload:#}");
        assert_eq!(workload["acknowledged"], true, "{workload:#}");
        assert!(workload["certificate_not_after"].as_u64().unwrap() > workload["certificate_not_before"].as_u64().unwrap(), "{workload:#}");
    }
    let page = mesh(&sandbox, &["identity"]);
    assert!(page.stdout.contains("spiffe://cluster.local/ns/servers/sa/default") && !page.stdout.contains('\x1b'), "{}", page.stdout);

    let nothing = mesh(&sandbox, &["rotate-root", "--abandon", "--ca-folder=/run/authority"]);
    assert!(nothing.code == 1 && nothing.stderr.contains("no rotation is under way"), "{nothing:?}");

    let done = mesh(&sandbox, &["rotate-root", "--ca-folder=/run/authority"]);
    assert_eq!(done.code, 0, "{done:?}");
    for part in ["announcing: ", "switched: "] {
        assert!(done.stderr.contains(part), "{part} is not in: {}", done.stderr);
    }
    assert!(done.stdout.starts_with("done after "), "{}", done.stdout);

    let after = identity(&sandbox);
    assert_eq!(after["rotation"]["phase"], "steady", "{after:#}");
    assert_ne!(after["issuer"]["fingerprint"], before["issuer"]["fingerprint"]);
    assert_eq!(after["roots"].as_array().unwrap().len(), 1, "the old root is gone: {after:#}");
    for workload in after["workloads"].as_array().unwrap() {
        assert_eq!(workload["certificate_issuer"], after["issuer"]["id"], "{workload:#}");
    }
}
