//! `mesh identity`, `mesh rotate-root`, `mesh services` and `mesh routes` in a sandbox: their output matches the
//! state of the mesh, and the new root is in use everywhere when `mesh rotate-root` completes.

use std::{
    process::Command,
    thread,
    time::{Duration, Instant},
};

use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, http_server, identity, identity_when, mesh, programs, script,
    with_controller, with_mesh,
};
use serde_json::Value;

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

#[test]
fn services_lists_endpoints_with_identities_and_watches_them() {
    let Some(sandbox) = with_mesh(&http_server(2, "1.0", MESHED)) else {
        return;
    };
    let pod = sandbox.view().pods_of("servers", "http-server").remove(0);
    let services = "mesh services --controller https://controller.service-mesh.svc:8080 \
        --token-file /var/run/secrets/diy-service-mesh/token \
        --roots-file /var/run/secrets/diy-service-mesh/roots.pem";
    let run = |text: &str| {
        let routes = services.replace("mesh services", "mesh routes");
        let text = text
            .replace("SERVICES", services)
            .replace("ROUTES", &routes);
        script(&sandbox, &pod, "proxy", &text)
    };

    // The catalog receives the readiness of pods with a delay.
    let deadline = Instant::now() + READY_TIMEOUT;
    let all: Vec<Value> = loop {
        let output = run("SERVICES -o json");
        assert_eq!(output.code, 0, "{output:?}");
        if output.stdout.matches("\"ready\": true").count() == 2 {
            break serde_json::from_str(&output.stdout).unwrap();
        }
        assert!(
            Instant::now() < deadline,
            "2 endpoints are ready: {output:?}"
        );
    };
    // The token belongs to a pod: its account gets its own namespace.
    let names: Vec<&Value> = all.iter().map(|service| &service["name"]).collect();
    assert_eq!(names, ["http-server"]);
    let denied = run("SERVICES service-mesh/controller");
    assert!(
        denied.code == 1
            && denied
                .stderr
                .contains("not in the namespace of your service account"),
        "{denied:?}"
    );
    let server = all.iter().find(|service| service["name"] == "http-server");
    let endpoints = server.unwrap()["endpoints"].as_array().unwrap();
    assert_eq!(endpoints.len(), 2, "{endpoints:?}");
    for endpoint in endpoints {
        assert_eq!(
            endpoint["identity"],
            "spiffe://cluster.local/ns/servers/sa/default"
        );
    }
    let table = run("SERVICES servers/http-server").stdout;
    assert!(
        table.starts_with("SERVICE ") && table.lines().count() == 3,
        "{table}"
    );
    assert!(table.contains(&pod.name), "{table}");

    let routes = run("ROUTES servers/http-server -o json").stdout;
    let routes: Value = serde_json::from_str(&routes).expect("JSON");
    assert_eq!(routes[0]["clients"], "servers", "{routes:#}");
    let rule = &routes[0]["ports"][0]["rules"][0];
    assert_eq!(rule["requests"], "all", "{routes:#}");
    assert_eq!(rule["backends"][0]["service"], "servers/http-server:80");
    let denied = "not in the namespace of your service account";
    for (script, reason) in [
        ("ROUTES service-mesh/controller", denied),
        ("ROUTES servers/http-server --clients other", denied),
        (
            "ROUTES servers/none",
            "the Service servers/none does not exist",
        ),
    ] {
        let output = run(script);
        assert!(
            output.code == 1 && output.stderr.contains(reason),
            "{script}: {output:?}"
        );
    }

    let of_default = run("SERVICES http-server");
    assert!(
        of_default.code == 1 && of_default.stderr.contains("\"default/http-server\""),
        "{of_default:?}"
    );
    assert_eq!(run("SERVICES http-server -n servers").stdout, table);

    thread::scope(|scope| {
        let watch = scope.spawn(|| {
            run("SERVICES servers/http-server --watch -o json > /tmp/watch & \
                 until grep -q '\"deleted\":false' /tmp/watch; do sleep 0.05; done; touch /tmp/watching; \
                 until grep '\"deleted\":true' /tmp/watch; do sleep 0.05; done; kill $!")
        });
        let deadline = Instant::now() + READY_TIMEOUT;
        while run("test -e /tmp/watching").code != 0 {
            assert!(Instant::now() < deadline, "the watch has not started");
            thread::sleep(Duration::from_millis(100));
        }
        sandbox.delete("Service", "servers", "http-server").unwrap();
        let output = watch.join().unwrap();
        assert!(
            output.stdout.contains("\"name\":\"http-server\""),
            "{output:?}"
        );
    });
}

#[test]
fn completion_scripts_are_valid_and_hide_internal_commands() {
    for (shell, check) in [("bash", "bash -n"), ("zsh", "cat"), ("fish", "cat")] {
        let script =
            format!("set -o pipefail; mesh completions {shell} | tee /dev/stderr | {check}");
        let programs = programs();
        let output = Command::new("bash")
            .args(["-c", &script])
            .env("PATH", format!("{}:{}", programs.display(), env!("PATH")))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{shell}: {text}");
        assert!(
            text.contains("services") && !text.contains("sandbox"),
            "{shell}: {text}"
        );
    }
}
