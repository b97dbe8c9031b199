//! Certificates that live for seconds, in a sandbox with real clocks: they are renewed, the root that all trust is replaced, the
//! controllers are restarted in the midst of that, and no request fails. What the rotation does in detail is tested in
//! `controller/tests`; what the commands print, in `sandbox_commands`.

#![allow(missing_docs, clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
    time::{Duration, Instant},
};

use diy_mesh::sandbox::{Sandbox, View, protocol::PodView};
use diy_mesh_tests::sandbox::{MESHED, PATIENCE, http_server, identity, mesh, pod_of, shell, under_load, wait_line, with_controller};
use serde_json::Value;

const CERTIFICATE_LIFE: (&str, &str) = ("CERTIFICATE_LIFE", "20");
/// Connections that are kept, ones that are replaced now and then, and one for each request.
const LOADS: [[&str; 2]; 3] = [["1", "1000000"], ["1", "50"], ["1", "1"]];
/// Two servers and their client.
const PROXIES: usize = 3;
/// Those of a rotation that somebody has asked for.
const PHASES: [&str; 2] = ["announcing", "switched"];
/// How often `mesh identity` is asked.
const PERIOD: Duration = Duration::from_millis(200);

/// Two meshed servers, and a meshed client to call them from.
fn short_lived() -> Option<(Sandbox, PodView)> {
    let sandbox = with_controller(&[CERTIFICATE_LIFE], &format!("{}---{}", http_server(2, "1.0", MESHED), shell(MESHED)))?;
    let client = pod_of(&sandbox, "clients", "shell");
    Some((sandbox, client))
}

#[test]
fn under_load_certificates_are_renewed_and_the_root_is_replaced() {
    let Some((sandbox, client)) = short_lived() else { return };
    under_load(&sandbox, &client, &LOADS, || {
        let before = identity(&sandbox);
        assert_eq!(before["roots"].as_array().unwrap().len(), 1, "{before:#}");
        let mut certificates: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        until(&sandbox, "two renewals of each proxy", |now| {
            // One that has just connected has not said yet what it has.
            for workload in now["workloads"].as_array().unwrap().iter().filter(|workload| workload["certificate_not_after"] != 0) {
                assert_eq!(workload["certificate_issuer"], before["issuer"]["id"], "{workload:#}");
                certificates.entry(workload["pod"].to_string()).or_default().insert(workload["certificate_serial"].to_string());
            }
            certificates.len() == PROXIES && certificates.values().all(|of_one| of_one.len() >= 3)
        });
        ask_for_a_new_root(&sandbox);
        until(&sandbox, "a new root alone, and all use it", |now| is_done(now, &before));
        println!("{}", mesh(&sandbox, &["identity"]).stdout);
    });
    assert_eq!(complaints(&sandbox), [""; 0]);
    every_request_came_from_its_caller(&sandbox);
}

#[test]
fn controllers_that_restart_in_each_phase_of_a_rotation_finish_it_under_load() {
    let Some((sandbox, client)) = short_lived() else { return };
    under_load(&sandbox, &client, &LOADS, || {
        let mut met = Vec::new();
        // A phase that nothing holds up takes a few seconds; once a controller has gone, its last report is waited for a while. A
        // machine that is too slow to restart somebody within that time gets another try.
        for _ in 0..3 {
            let before = identity(&sandbox);
            ask_for_a_new_root(&sandbox);
            for phase in PHASES {
                until(&sandbox, phase, |now| now["rotation"]["phase"] == phase || is_done(now, &before));
                met.extend(restart_each(&sandbox));
            }
            until(&sandbox, "a new root alone, and all use it", |now| is_done(now, &before));
            if PHASES.iter().all(|phase| met.iter().filter(|began| began == phase).count() >= 2) {
                return;
            }
        }
        panic!("restarted only in {met:?}");
    });
    // Whoever asks a controller in the moment when it goes says so, and asks the other one.
    let expected = ["no discovery, what is known stays", "can't be renewed"];
    let complaints = complaints(&sandbox).into_iter().filter(|line| !expected.iter().any(|part| line.contains(part)));
    assert_eq!(complaints.collect::<Vec<_>>(), [""; 0]);
    every_request_came_from_its_caller(&sandbox);
}

fn ask_for_a_new_root(sandbox: &Sandbox) {
    let asked = mesh(sandbox, &["rotate-root", "--no-wait", "--ca-folder=/run/authority"]);
    assert!(asked.code == 0 && asked.stderr.contains("granted"), "{asked:?}");
}

/// Asks until the mesh's state fits.
fn until(sandbox: &Sandbox, what: &str, mut fits: impl FnMut(&Value) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = identity(sandbox);
        if fits(&now) {
            return;
        }
        assert!(Instant::now() < deadline, "not {what}: {now:#}");
        thread::sleep(PERIOD);
    }
}

/// Another root than before is the only one, its CA signs, and everybody trusts the one and has a certificate of the other.
fn is_done(now: &Value, before: &Value) -> bool {
    let (roots, workloads) = (now["roots"].as_array().unwrap(), now["workloads"].as_array().unwrap());
    now["rotation"]["phase"] == "steady"
        && roots.len() == 1
        && roots[0]["fingerprint"] == now["issuer"]["fingerprint"]
        && now["issuer"]["fingerprint"] != before["issuer"]["fingerprint"]
        && workloads.len() == PROXIES
        && workloads.iter().all(|one| one["acknowledged"] == true && one["certificate_issuer"] == now["issuer"]["id"])
}

/// Replaces one controller after the other. In which phases the new ones began.
fn restart_each(sandbox: &Sandbox) -> Vec<String> {
    let old = sandbox.view().pods_of("service-mesh", "controller");
    let mut known: BTreeSet<String> = old.iter().map(|pod| pod.name.clone()).collect();
    let mut phases = Vec::new();
    for pod in old {
        sandbox.delete("Pod", "service-mesh", &pod.name).unwrap();
        let replaced = |view: &View| {
            let new = view.pods_of("service-mesh", "controller").into_iter().find(|pod| pod.ready && !known.contains(&pod.name))?;
            (!view.pods.contains_key(&pod.full_name())).then_some(new)
        };
        let new = sandbox.wait("another controller", PATIENCE, replaced).unwrap();
        let line = wait_line(sandbox, &new, "controller", "what it has read", |line| line.contains("is in use"));
        phases.push(line.split("phase=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap().to_owned());
        known.insert(new.name);
    }
    phases
}

fn meshed(view: &View) -> Vec<PodView> {
    [view.pods_of("servers", "http-server"), view.pods_of("clients", "shell")].concat()
}

/// What the proxies warn of.
fn complaints(sandbox: &Sandbox) -> Vec<String> {
    let view = sandbox.view();
    let lines = meshed(&view).into_iter().flat_map(|pod| view.lines(&pod, "proxy").to_vec());
    lines.filter(|line| line.contains("WARN") || line.contains("ERROR")).collect()
}

/// Through both proxies, over mutual TLS: the server's proxy has told it who calls.
fn every_request_came_from_its_caller(sandbox: &Sandbox) {
    let view = sandbox.view();
    for pod in view.pods_of("servers", "http-server") {
        let lines = view.lines(&pod, "http-server");
        let count = |start: &str| lines.iter().filter(|line| line.to_lowercase().starts_with(start)).count();
        assert_eq!(count("request #"), count("x-called-by: spiffe://cluster.local/ns/clients/sa/default"), "{}", pod.name);
    }
}
