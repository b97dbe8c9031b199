//! Certificates that live for seconds, in a sandbox with real clocks: they are renewed, the root that all trust is replaced, that is
//! abandoned again, the controllers are restarted and killed in the midst of it, and no request fails. What the rotation does in
//! detail is tested in `controller/tests`; what the commands print, in `sandbox_commands`.

#![allow(missing_docs, clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
    time::Duration,
};

use diy_mesh::sandbox::{Sandbox, View, protocol::PodView};
use diy_mesh_tests::sandbox::{
    MESHED, PATIENCE, http_server, identity, identity_when, mesh, pod_of, shell, under_load,
    with_controller,
};
use serde_json::Value;

/// How long certificates live, in seconds,
const SHORT: &str = "30";
/// and where no controller answers for as long as a container that was killed twice waits.
const LONGER: &str = "120";
/// Connections that are kept, ones that are replaced now and then, and one for each request.
const LOADS: [[&str; 2]; 3] = [["1", "1000000"], ["1", "50"], ["1", "1"]];
/// Two servers and their client.
const PROXIES: usize = 3;
/// Those of a rotation that somebody has asked for.
const PHASES: [&str; 2] = ["announcing", "switched"];
/// How long the mesh may take for what it does in the time of a certificate.
const LONG: Duration = Duration::from_secs(3 * PATIENCE.as_secs());

/// Two meshed servers, and a meshed client to call them from.
fn short_lived(life: &str) -> Option<(Sandbox, PodView)> {
    let sandbox = with_controller(
        &[("CERTIFICATE_LIFE", life)],
        &format!("{}---{}", http_server(2, "1.0", MESHED), shell(MESHED)),
    )?;
    let client = pod_of(&sandbox, "clients", "shell");
    Some((sandbox, client))
}

#[test]
fn under_load_certificates_are_renewed_and_the_root_is_replaced() {
    let Some((sandbox, client)) = short_lived(SHORT) else {
        return;
    };
    under_load(&sandbox, &client, &LOADS, || {
        let before = identity(&sandbox);
        assert_eq!(before["roots"].as_array().unwrap().len(), 1, "{before:#}");
        let mut certificates: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        until(&sandbox, "two renewals of each proxy", |now| {
            // One that has just connected has not said yet what it has.
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
        until(&sandbox, "a new root alone, and all use it", |now| {
            is_done(now, &before)
        });
        println!("{}", mesh(&sandbox, &["identity"]).stdout);
    });
    assert_eq!(complaints(&sandbox), [""; 0]);
    every_request_came_from_its_caller(&sandbox);
}

#[test]
fn controllers_that_restart_in_each_phase_of_a_rotation_finish_it_under_load() {
    let Some((sandbox, client)) = short_lived(SHORT) else {
        return;
    };
    under_load(&sandbox, &client, &LOADS, || {
        rotate_disturbed(&sandbox, restart_each)
    });
    assert_eq!(unexpected_complaints(&sandbox), [""; 0]);
    every_request_came_from_its_caller(&sandbox);
}

#[test]
fn controllers_that_are_killed_finish_a_rotation_and_one_that_is_abandoned_leads_back_under_load() {
    let Some((sandbox, client)) = short_lived(LONGER) else {
        return;
    };
    under_load(&sandbox, &client, &LOADS, || {
        rotate_disturbed(&sandbox, |sandbox| kill(sandbox, &controllers(sandbox)));
        abandon_before_the_switch(&sandbox);
        abandon_after_the_switch(&sandbox);
    });
    assert_eq!(unexpected_complaints(&sandbox), [""; 0]);
    every_request_came_from_its_caller(&sandbox);
}

/// Replaces the root, and in each phase of that does something to the controllers, which gives the phases in which they began again.
fn rotate_disturbed(sandbox: &Sandbox, disturb: impl Fn(&Sandbox) -> Vec<String>) {
    let mut met = Vec::new();
    // A phase that nothing holds up takes a few seconds; once a controller has gone, its last report is waited for a while. A
    // machine that is too slow to disturb somebody within that time gets another try.
    for _ in 0..3 {
        let before = identity(sandbox);
        rotate_root(sandbox, &[]);
        for phase in PHASES {
            until(sandbox, phase, |now| {
                now["rotation"]["phase"] == phase || is_done(now, &before)
            });
            met.extend(disturb(sandbox));
        }
        until(sandbox, "a new root alone, and all use it", |now| {
            is_done(now, &before)
        });
        if PHASES
            .iter()
            .all(|phase| met.iter().filter(|began| began == phase).count() >= 2)
        {
            return;
        }
    }
    panic!("disturbed only in {met:?}");
}

/// The next root is dropped at once: nobody has a certificate by it.
fn abandon_before_the_switch(sandbox: &Sandbox) {
    // A machine that is too slow to do it before the switch gets another try.
    for turn in 0..3 {
        let before = identity(sandbox);
        rotate_root(sandbox, &[]);
        if kill_one(sandbox, turn) != "announcing" {
            until(sandbox, "a new root alone, and all use it", |now| {
                is_done(now, &before)
            });
            continue;
        }
        assert_eq!(identity(sandbox)["roots"].as_array().unwrap().len(), 2);
        rotate_root(sandbox, &["--abandon"]);
        until(sandbox, "the root of before alone", |now| {
            is_as_before(now, &before)
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
        assert!(page.contains("no rotation is under way"), "{page}");
        return;
    }
    panic!("each rotation had switched before it could be abandoned");
}

/// It goes back the way that it came: the former root is announced again, and signs when all trust it.
fn abandon_after_the_switch(sandbox: &Sandbox) {
    // A machine that is too slow to do it before the rotation is over gets another try.
    for turn in 0..3 {
        let before = identity(sandbox);
        rotate_root(sandbox, &[]);
        let mut switched = false;
        until(sandbox, "switched", |now| {
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
            until(sandbox, "a new root alone, and all use it", |now| {
                is_done(now, &before)
            });
            continue;
        }
        if kill_one(sandbox, turn + 1) != "announcing" {
            until(sandbox, "the root of before alone, and all use it", |now| {
                is_as_before(now, &before)
            });
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
            now["rotation"]["answer"], "granted: the mesh goes back to the root before",
            "{now:#}"
        );
        assert!(
            page.contains("(the rotation was abandoned): the former root is announced again"),
            "{page}"
        );
        until(sandbox, "the root of before alone, and all use it", |now| {
            is_as_before(now, &before)
        });
        return;
    }
    panic!("each rotation was over before it could be abandoned");
}

/// Kills one controller, each time another one, for each kill doubles the pause before the next beginning. In which phase it began
/// again: its last report is waited for a while, so the phase lasts, and can be looked at.
fn kill_one(sandbox: &Sandbox, turn: usize) -> String {
    let controllers = controllers(sandbox);
    kill(sandbox, &controllers[turn % controllers.len()..][..1]).remove(0)
}

/// `mesh rotate-root`, which comes back when a controller has granted it.
fn rotate_root(sandbox: &Sandbox, flags: &[&str]) {
    let asked = mesh(
        sandbox,
        &[
            &["rotate-root", "--no-wait", "--ca-folder=/run/authority"],
            flags,
        ]
        .concat(),
    );
    assert!(
        asked.code == 0 && asked.stderr.contains("granted"),
        "{asked:?}"
    );
}

/// Asks until the mesh's state fits.
fn until(sandbox: &Sandbox, what: &str, fits: impl FnMut(&Value) -> bool) {
    identity_when(sandbox, what, LONG, fits);
}
/// Another root than before is the only one, its CA signs, and everybody trusts the one and has a certificate of the other.
fn is_done(now: &Value, before: &Value) -> bool {
    is_steady(now) && now["issuer"]["fingerprint"] != before["issuer"]["fingerprint"]
}

/// The root of before is the only one again, its CA signs, and everybody trusts the one and has a certificate of the other.
fn is_as_before(now: &Value, before: &Value) -> bool {
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

/// Replaces one controller after the other. In which phases the new ones began.
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
            .wait("another controller", PATIENCE, replaced)
            .unwrap();
        phases.push(begun_in(sandbox, &new, 0));
        known.insert(new.name);
    }
    phases
}

fn controllers(sandbox: &Sandbox) -> Vec<PodView> {
    sandbox.view().pods_of("service-mesh", "controller")
}

/// Kills these controllers at once, in the midst of whatever they do. In which phases they began again.
fn kill(sandbox: &Sandbox, pods: &[PodView]) -> Vec<String> {
    // Processes are seen across pods, so the pod's own is told by its network.
    const KILL: &str = "for process in /proc/[0-9]*; do
        read -r name < $process/comm && [ \"$name\" = controller ] && [ $process/ns/net -ef /proc/self/ns/net ] && exec kill -9 ${process#/proc/}
    done 2> /dev/null; exit 1";
    let begun: Vec<usize> = pods
        .iter()
        .map(|pod| beginnings(&sandbox.view(), pod).len())
        .collect();
    thread::scope(|scope| {
        for pod in pods {
            scope.spawn(|| {
                assert_eq!(
                    sandbox
                        .exec(pod, "controller", &["bash", "-c", KILL])
                        .unwrap()
                        .code,
                    0
                )
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
            .wait("a controller that was killed", PATIENCE, ready)
            .unwrap();
        begun_in(sandbox, pod, begun)
    };
    pods.iter().zip(begun).map(again).collect()
}

/// In which phase a controller was when it began, the first time or a later one.
fn begun_in(sandbox: &Sandbox, pod: &PodView, time: usize) -> String {
    sandbox
        .wait("what it has read", PATIENCE, |view| {
            beginnings(view, pod).get(time).cloned()
        })
        .unwrap()
}

fn beginnings(view: &View, pod: &PodView) -> Vec<String> {
    let lines = view
        .lines(pod, "controller")
        .iter()
        .filter(|line| line.contains("is in use"));
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

/// What the proxies warn of.
fn complaints(sandbox: &Sandbox) -> Vec<String> {
    let view = sandbox.view();
    let lines = meshed(&view)
        .into_iter()
        .flat_map(|pod| view.lines(&pod, "proxy").to_vec());
    lines
        .filter(|line| line.contains("WARN") || line.contains("ERROR"))
        .collect()
}

/// The same, without what must be said: whoever asks a controller in the moment when it goes says so, and asks another one.
fn unexpected_complaints(sandbox: &Sandbox) -> Vec<String> {
    let expected = ["discovery unavailable", "certificate renewal failed"];
    complaints(sandbox)
        .into_iter()
        .filter(|line| !expected.iter().any(|part| line.contains(part)))
        .collect()
}

/// Through both proxies, over mutual TLS: the server's proxy has told it who calls.
fn every_request_came_from_its_caller(sandbox: &Sandbox) {
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
        // What was printed last may be on its way.
        let what = format!("{} is told its caller with each request", pod.name);
        sandbox
            .wait(&what, PATIENCE, |view| all(view, &pod).then_some(()))
            .unwrap();
    }
}
