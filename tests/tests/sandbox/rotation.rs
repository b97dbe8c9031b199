//! Certificate renewal and root rotation under load, with short-lived certificates: no request
//! fails while roots are replaced, rotations are abandoned, and controllers restart or crash.
//! `controller/tests` tests the rotation in detail, `sandbox_commands` the commands.

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
    time::{Duration, Instant},
};

use diy_mesh_sandbox::{Sandbox, View, protocol::PodView};
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, get, http_server, identity, identity_when, mesh, shell, single_pod,
    under_load, wait_for_line, with_controller,
};
use serde_json::Value;

/// Certificate lifetime in seconds.
const SHORT_LIFETIME: &str = "30";
/// Certificate lifetime in seconds for tests that kill controllers: longer than the restart
/// back-off.
const LONG_LIFETIME: &str = "120";
/// Persistent connections, connections of 50 requests, and one connection per request.
const LOADS: [[&str; 2]; 3] = [["1", "1000000"], ["1", "50"], ["1", "1"]];
/// Proxies of two servers and one client.
const PROXIES: usize = 3;
/// Phases of a requested rotation.
const PHASES: [&str; 2] = ["announcing", "switched"];
/// Limit for rotation phases.
const ROTATION_TIMEOUT: Duration = Duration::from_secs(3 * READY_TIMEOUT.as_secs());

/// Kills the controller of the pod in which the script runs. Processes of all pods are visible: the
/// network namespace identifies the processes of the pod.
const KILL: &str = "for process in /proc/[0-9]*; do
    read -r name < $process/comm && [ \"$name\" = controller ] && [ $process/ns/net -ef /proc/self/ns/net ] && exec kill -9 ${process#/proc/}
done 2> /dev/null; exit 1";

/// Starts two meshed servers and a meshed client.
fn short_lived(life: &str) -> Option<(Sandbox, PodView)> {
    let sandbox = with_controller(
        &[("CERTIFICATE_LIFE", life)],
        &format!("{}---{}", http_server(2, "1.0", MESHED), shell(MESHED)),
    )?;
    let client = single_pod(&sandbox, "clients", "shell");
    Some((sandbox, client))
}

#[test]
fn renewal_and_rotation_under_load_fail_no_request() {
    let Some((sandbox, client)) = short_lived(SHORT_LIFETIME) else {
        return;
    };
    under_load(&sandbox, &client, &LOADS, || {
        let before = identity(&sandbox);
        assert_eq!(before["roots"].as_array().unwrap().len(), 1, "{before:#}");
        let mut certificates: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        wait_until(&sandbox, "two renewals of each proxy", |now| {
            // A proxy that has just connected has no status yet.
            for workload in now["workloads"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|workload| workload["certificate_not_after"] != 0)
            {
                assert_eq!(
                    workload["certificate_issuer"], before["issuer"]["id"],
                    "{workload:#}"
                );
                certificates
                    .entry(workload["pod"].to_string())
                    .or_default()
                    .insert(workload["certificate_serial"].to_string());
            }
            certificates.len() == PROXIES && certificates.values().all(|of_one| of_one.len() >= 3)
        });
        rotate_root(&sandbox, &[]);
        wait_until(&sandbox, "a new root alone, in use by all proxies", |now| {
            is_done(now, &before)
        });
        println!("{}", mesh(&sandbox, &["identity"]).stdout);
    });
    assert_eq!(warnings(&sandbox), [""; 0]);
    assert_client_identity_of_all_requests(&sandbox);
}

#[test]
fn rotation_completes_despite_controller_restarts() {
    let Some((sandbox, client)) = short_lived(SHORT_LIFETIME) else {
        return;
    };
    under_load(&sandbox, &client, &LOADS, || {
        rotate_with_disruption(&sandbox, restart_each)
    });
    assert_eq!(unexpected_warnings(&sandbox), [""; 0]);
    assert_client_identity_of_all_requests(&sandbox);
}

#[test]
fn rotation_completes_despite_crashes_and_can_be_abandoned() {
    let Some((sandbox, client)) = short_lived(LONG_LIFETIME) else {
        return;
    };
    under_load(&sandbox, &client, &LOADS, || {
        rotate_with_disruption(&sandbox, |sandbox| kill(sandbox, &controllers(sandbox)));
        abandon_before_the_switch(&sandbox);
        abandon_after_the_switch(&sandbox);
    });
    assert_eq!(unexpected_warnings(&sandbox), [""; 0]);
    assert_client_identity_of_all_requests(&sandbox);
}

#[test]
fn mesh_that_lost_its_ca_recovers() {
    let objects = format!("{}---{}", http_server(1, "1.0", MESHED), shell(MESHED));
    let Some(sandbox) = with_controller(&[], &objects) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    let before = identity(&sandbox);
    // No replica that has loaded the CA survives.
    let lose = format!("rm -f /run/authority/tls.* /run/authority/rotation.json; {KILL}");
    let pods = controllers(&sandbox);
    thread::scope(|scope| {
        for pod in &pods {
            scope.spawn(|| run(&sandbox, pod, &lose));
        }
    });
    for pod in &pods {
        let restarted = |view: &View| {
            let now = view.pods.get(&pod.full_name())?;
            (now.ready && now.restarts() > pod.restarts()).then_some(())
        };
        sandbox
            .wait("a controller with a new CA", ROTATION_TIMEOUT, restarted)
            .unwrap();
    }
    // From when the new roots are in the volumes of all pods.
    let roots = run(&sandbox, &pods[0], "cat /run/authority/roots.pem");
    let proxies = meshed(&sandbox.view());
    for pod in proxies {
        let deadline = Instant::now() + READY_TIMEOUT;
        let file = ["cat", "/var/run/secrets/diy-service-mesh/roots.pem"];
        let read = || sandbox.exec(&pod, "proxy", &file).unwrap().stdout;
        while read() != roots {
            assert!(
                Instant::now() < deadline,
                "{} has the former roots",
                pod.name
            );
            thread::sleep(Duration::from_millis(100));
        }
    }
    // The regular renewal after a change of the issuer takes up to ten minutes.
    let is_recovered = |now: &Value| {
        let (id, workloads) = (&now["issuer"]["id"], now["workloads"].as_array().unwrap());
        *id != before["issuer"]["id"]
            && workloads.len() == 2
            && workloads
                .iter()
                .all(|one| one["certificate_issuer"] == *id && one["acknowledged"] == true)
    };
    identity_when(
        &sandbox,
        "certificates of the new CA",
        READY_TIMEOUT,
        is_recovered,
    );
    let page = mesh(&sandbox, &["identity"]).stdout;
    assert!(page.contains("the CA was lost"), "{page}");
    let hello = || get(&sandbox, &client, "http-server.servers", 80);
    hello();
    // New pods trust only the new root.
    sandbox.apply(&http_server(1, "2.0", MESHED)).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    hello();
}

#[test]
fn forced_rotation_replaces_roots_and_certificates_at_once() {
    let objects = format!("{}---{}", http_server(1, "1.0", MESHED), shell(MESHED));
    let Some(sandbox) = with_controller(&[], &objects) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    let before = identity(&sandbox);
    let done = mesh(
        &sandbox,
        &["rotate-root", "--force", "--ca-folder=/run/authority"],
    );
    assert_eq!(done.code, 0, "{done:?}");
    for part in ["fail until both have a new certificate", "granted: "] {
        assert!(done.stderr.contains(part), "{part}: {done:?}");
    }
    let after = identity(&sandbox);
    let (old, new) = (&before["issuer"]["id"], &after["issuer"]["id"]);
    assert_ne!(old, new);
    assert_eq!(after["roots"].as_array().unwrap().len(), 1, "{after:#}");
    let workloads = after["workloads"].as_array().unwrap();
    assert_eq!(workloads.len(), 2, "{after:#}");
    for workload in workloads {
        assert_eq!(workload["certificate_issuer"], *new, "{workload:#}");
    }
    // No proxy trusts the former root any longer.
    let pods = meshed(&sandbox.view());
    for pod in pods {
        wait_for_line(&sandbox, &pod, "proxy", "the new roots", |line| {
            line.contains("trust roots updated")
        });
        let overlap = |line: &&String| line.contains("former=1");
        assert_eq!(
            sandbox.view().lines(&pod, "proxy").iter().find(overlap),
            None
        );
    }
    get(&sandbox, &client, "http-server.servers", 80);
}

/// Rotates the root and calls `disturb` in each phase, which returns the phases in which
/// controllers restarted.
fn rotate_with_disruption(sandbox: &Sandbox, disturb: impl Fn(&Sandbox) -> Vec<String>) {
    let mut met = Vec::new();
    // A phase takes a few seconds, longer after a controller has gone. A slow machine may miss a
    // phase: retries.
    for _ in 0..3 {
        let before = identity(sandbox);
        rotate_root(sandbox, &[]);
        for phase in PHASES {
            wait_until(sandbox, phase, |now| {
                now["rotation"]["phase"] == phase || is_done(now, &before)
            });
            met.extend(disturb(sandbox));
        }
        wait_until(sandbox, "a new root alone, in use by all proxies", |now| {
            is_done(now, &before)
        });
        if PHASES
            .iter()
            .all(|phase| met.iter().filter(|began| began == phase).count() >= 2)
        {
            return;
        }
    }
    panic!("controllers restarted only in {met:?}");
}

/// Abandons a rotation before the new CA signs: the next root is removed immediately.
fn abandon_before_the_switch(sandbox: &Sandbox) {
    // Retries if a slow machine misses the phase.
    for turn in 0..3 {
        let before = identity(sandbox);
        rotate_root(sandbox, &[]);
        if kill_one(sandbox, turn) != "announcing" {
            wait_until(sandbox, "a new root alone, in use by all proxies", |now| {
                is_done(now, &before)
            });
            continue;
        }
        assert_eq!(identity(sandbox)["roots"].as_array().unwrap().len(), 2);
        rotate_root(sandbox, &["--abandon"]);
        wait_until(sandbox, "the previous root alone", |now| {
            is_restored(now, &before)
        });
        let (now, page) = (identity(sandbox), mesh(sandbox, &["identity"]).stdout);
        assert_eq!(
            now["rotation"]["reason"], "the rotation was abandoned",
            "{now:#}"
        );
        assert_eq!(
            now["rotation"]["answer"], "granted: the next root is dropped",
            "{now:#}"
        );
        assert!(page.contains("no rotation is in progress"), "{page}");
        return;
    }
    panic!("each rotation switched before the test could abandon it");
}

/// Abandons a rotation after the switch: the previous root is announced again and signs when all
/// proxies trust it.
fn abandon_after_the_switch(sandbox: &Sandbox) {
    // Retries if the rotation completes first.
    for turn in 0..3 {
        let before = identity(sandbox);
        rotate_root(sandbox, &[]);
        let mut switched = false;
        wait_until(sandbox, "switched", |now| {
            switched = now["rotation"]["phase"] == "switched";
            switched || is_done(now, &before)
        });
        if !switched
            || mesh(
                sandbox,
                &[
                    "rotate-root",
                    "--abandon",
                    "--no-wait",
                    "--ca-folder=/run/authority",
                ],
            )
            .code
                != 0
        {
            wait_until(sandbox, "a new root alone, in use by all proxies", |now| {
                is_done(now, &before)
            });
            continue;
        }
        if kill_one(sandbox, turn + 1) != "announcing" {
            wait_until(
                sandbox,
                "the previous root alone, in use by all proxies",
                |now| is_restored(now, &before),
            );
            continue;
        }
        let (now, page) = (identity(sandbox), mesh(sandbox, &["identity"]).stdout);
        assert_eq!(
            (
                &now["rotation"]["reverting"],
                now["roots"].as_array().unwrap().len()
            ),
            (&Value::Bool(true), 2),
            "{now:#}"
        );
        assert_eq!(
            now["rotation"]["answer"], "granted: the mesh reverts to the previous root",
            "{now:#}"
        );
        assert!(
            page.contains("(the rotation was abandoned): the previous root is being announced"),
            "{page}"
        );
        wait_until(
            sandbox,
            "the previous root alone, in use by all proxies",
            |now| is_restored(now, &before),
        );
        return;
    }
    panic!("each rotation completed before the test could abandon it");
}

/// Kills one controller, a different one each turn because of the restart back-off. Returns the
/// phase at its restart.
fn kill_one(sandbox: &Sandbox, turn: usize) -> String {
    let controllers = controllers(sandbox);
    kill(sandbox, &controllers[turn % controllers.len()..][..1]).remove(0)
}

/// Runs `mesh rotate-root`, which returns after a controller has granted it.
fn rotate_root(sandbox: &Sandbox, flags: &[&str]) {
    let output = mesh(
        sandbox,
        &[
            &["rotate-root", "--no-wait", "--ca-folder=/run/authority"],
            flags,
        ]
        .concat(),
    );
    assert!(
        output.code == 0 && output.stderr.contains("granted"),
        "{output:?}"
    );
}

/// Polls until the state of the mesh matches.
fn wait_until(sandbox: &Sandbox, what: &str, matches: impl FnMut(&Value) -> bool) {
    identity_when(sandbox, what, ROTATION_TIMEOUT, matches);
}

/// Whether a new root is the only one and all proxies trust it and have a certificate of its CA.
fn is_done(now: &Value, before: &Value) -> bool {
    is_steady(now) && now["issuer"]["fingerprint"] != before["issuer"]["fingerprint"]
}

/// Whether the previous root is the only one again and all proxies trust it and have a certificate
/// of its CA.
fn is_restored(now: &Value, before: &Value) -> bool {
    is_steady(now)
        && now["issuer"]["fingerprint"] == before["issuer"]["fingerprint"]
        && now["roots"] == before["roots"]
}

fn is_steady(now: &Value) -> bool {
    let (roots, workloads) = (
        now["roots"].as_array().unwrap(),
        now["workloads"].as_array().unwrap(),
    );
    now["rotation"]["phase"] == "steady"
        && roots.len() == 1
        && roots[0]["fingerprint"] == now["issuer"]["fingerprint"]
        && workloads.len() == PROXIES
        && workloads.iter().all(|one| {
            one["acknowledged"] == true && one["certificate_issuer"] == now["issuer"]["id"]
        })
}

/// Replaces one controller after the other. Returns the phases at the start of the new ones.
fn restart_each(sandbox: &Sandbox) -> Vec<String> {
    let old = controllers(sandbox);
    let mut known: BTreeSet<String> = old.iter().map(|pod| pod.name.clone()).collect();
    let mut phases = Vec::new();
    for pod in old {
        sandbox.delete("Pod", "service-mesh", &pod.name).unwrap();
        let replaced = |view: &View| {
            let new = view
                .pods_of("service-mesh", "controller")
                .into_iter()
                .find(|pod| pod.ready && !known.contains(&pod.name))?;
            (!view.pods.contains_key(&pod.full_name())).then_some(new)
        };
        let new = sandbox
            .wait("another controller", READY_TIMEOUT, replaced)
            .unwrap();
        phases.push(phase_at_start(sandbox, &new, 0));
        known.insert(new.name);
    }
    phases
}

fn controllers(sandbox: &Sandbox) -> Vec<PodView> {
    sandbox.view().pods_of("service-mesh", "controller")
}

/// Kills controllers concurrently. Returns the phases at their restarts.
fn kill(sandbox: &Sandbox, pods: &[PodView]) -> Vec<String> {
    let begun: Vec<usize> = pods
        .iter()
        .map(|pod| start_phases(&sandbox.view(), pod).len())
        .collect();
    thread::scope(|scope| {
        for pod in pods {
            scope.spawn(|| {
                run(sandbox, pod, KILL);
            });
        }
    });
    let again = |(pod, begun): (&PodView, usize)| {
        let ready = |view: &View| {
            view.pods
                .get(&pod.full_name())
                .filter(|now| now.ready && now.restarts() > pod.restarts())
                .cloned()
        };
        sandbox
            .wait("the restart of a killed controller", READY_TIMEOUT, ready)
            .unwrap();
        phase_at_start(sandbox, pod, begun)
    };
    pods.iter().zip(begun).map(again).collect()
}

/// Runs a script in the pod of a controller.
fn run(sandbox: &Sandbox, pod: &PodView, script: &str) -> String {
    let output = sandbox.exec(pod, "controller", &["bash", "-c", script]);
    let output = output.unwrap();
    assert_eq!(output.code, 0, "{script}");
    output.stdout
}

/// Phase of a controller at its start number `time`, counted from 0.
fn phase_at_start(sandbox: &Sandbox, pod: &PodView, time: usize) -> String {
    sandbox
        .wait("the start of a controller", READY_TIMEOUT, |view| {
            start_phases(view, pod).get(time).cloned()
        })
        .unwrap()
}

fn start_phases(view: &View, pod: &PodView) -> Vec<String> {
    let lines = view
        .lines(pod, "controller")
        .iter()
        .filter(|line| line.contains("loaded the CA in"));
    lines
        .filter_map(|line| Some(line.split("phase=\"").nth(1)?.split('"').next()?.to_owned()))
        .collect()
}

fn meshed(view: &View) -> Vec<PodView> {
    [
        view.pods_of("servers", "http-server"),
        view.pods_of("clients", "shell"),
    ]
    .concat()
}

/// Warnings and errors in the logs of all proxies.
fn warnings(sandbox: &Sandbox) -> Vec<String> {
    let view = sandbox.view();
    let lines = meshed(&view)
        .into_iter()
        .flat_map(|pod| view.lines(&pod, "proxy").to_vec());
    lines
        .filter(|line| line.contains("WARN") || line.contains("ERROR"))
        .collect()
}

/// Like [`warnings`], without the warnings of clients that lose their controller.
fn unexpected_warnings(sandbox: &Sandbox) -> Vec<String> {
    let expected = ["discovery unavailable", "certificate renewal failed"];
    warnings(sandbox)
        .into_iter()
        .filter(|line| !expected.iter().any(|part| line.contains(part)))
        .collect()
}

/// Asserts that each request has the client identity, that is, passed both proxies with mutual TLS.
fn assert_client_identity_of_all_requests(sandbox: &Sandbox) {
    let all = |view: &View, pod: &PodView| {
        let count = |start: &str| {
            view.lines(pod, "http-server")
                .iter()
                .filter(|line| line.to_lowercase().starts_with(start))
                .count()
        };
        count("request #") == count("x-called-by: spiffe://cluster.local/ns/clients/sa/default")
    };
    let servers = sandbox.view().pods_of("servers", "http-server");
    for pod in servers {
        // The last lines may be in transit.
        let what = format!("{} logs the client identity with each request", pod.name);
        sandbox
            .wait(&what, READY_TIMEOUT, |view| all(view, &pod).then_some(()))
            .unwrap();
    }
}
