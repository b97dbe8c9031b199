//! Clocks that jump under load in a sandbox. A library for the dynamic linker replaces the clock of
//! the real programs, so they contain nothing for this test.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use diy_mesh_sandbox::protocol::PodView;
use diy_mesh_sandbox::{Sandbox, View};
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, empty_with, failures_under_load, http_server, install, set_env, shell,
    single_pod, under_load,
};

use crate::demo_socket::Session;
use crate::drill::SKEWED;
use crate::faults::assert_all_serve;
use crate::wrapped::wrapped;

/// Adds the seconds in `/tmp/clock`, which each container has for itself, to the wall clock.
const CLOCK: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now), before = errno;
    int file = clock == CLOCK_REALTIME ? open("/tmp/clock", O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        char text[32] = "";
        if (read(file, text, sizeof text - 1) > 0) now->tv_sec += atol(text);
        close(file);
    }
    errno = before;
    return result;
}
"#;

/// Lifetime of certificates in seconds.
const CERTIFICATE_LIFE: &str = "600";
/// Certificates begin five minutes before they are issued, and last ten minutes.
const SMALL_JUMP: i64 = 240;
const LARGE_JUMP: i64 = 1800;
const DAY: i64 = 86_400;
/// Connections of 50 requests.
const LOAD: [[&str; 2]; 1] = [["2", "50"]];
/// Why requests fail until certificates are renewed.
const DOCUMENTED: [&str; 2] = ["no-certificate", "handshake-failed"];

fn compile(path: &Path) {
    let mut compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-x", "c", "-", "-o"])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .expect("the compiler runs");
    let mut source = compiler.stdin.take().unwrap();
    source.write_all(CLOCK.as_bytes()).unwrap();
    drop(source);
    assert!(compiler.wait().unwrap().success());
}

/// Sets the clocks of these pods.
fn set_clocks(sandbox: &Sandbox, pods: &[PodView], seconds: i64) {
    let script = format!("echo {seconds} > /tmp/new && mv /tmp/new /tmp/clock");
    for pod in pods {
        let container = if pod.injected { "proxy" } else { "controller" };
        let output = sandbox.exec(pod, container, &["sh", "-c", &script]);
        assert_eq!(output.unwrap().code, 0);
    }
}

/// The number of lines of a proxy's log with this text.
fn count(view: &View, pod: &PodView, text: &str) -> usize {
    let lines = view.lines(pod, "proxy").iter();
    lines.filter(|line| line.contains(text)).count()
}

/// Sets the clocks of these pods, and waits until each of the proxies has logged another such line.
fn jump(sandbox: &Sandbox, pods: &[PodView], proxies: &[PodView], seconds: i64, text: &str) {
    let counts = |view: &View| Vec::from_iter(proxies.iter().map(|pod| count(view, pod, text)));
    let before = counts(&sandbox.view());
    set_clocks(sandbox, pods, seconds);
    let is_logged = |view: &View| {
        let counts = counts(view);
        let mut counts = counts.iter().zip(&before);
        counts.all(|(count, before)| count > before).then_some(())
    };
    sandbox.wait(text, READY_TIMEOUT, is_logged).unwrap();
}

/// A sandbox whose controllers and proxies have clocks that [`set_clocks`] sets, with servers and a
/// client.
fn start(programs: &Path) -> Option<(Sandbox, PodView)> {
    compile(&programs.join("clock.so"));
    let sandbox = empty_with(programs)?;
    let objects = format!("{}---{}", http_server(3, "1.0", MESHED), shell(MESHED));
    let life = [("CERTIFICATE_LIFE", CERTIFICATE_LIFE)];
    install(&sandbox, |controller| set_env(controller, &life), &objects);
    let client = single_pod(&sandbox, "clients", "shell");
    Some((sandbox, client))
}

const COMMAND: &str = "exec env LD_PRELOAD=/usr/local/bin/clock.so";

#[test]
fn controller_with_a_wrong_clock_says_so_and_others_rotate_the_ca_without_it() {
    let programs = wrapped(&["controller", "proxy"], COMMAND);
    let Some((sandbox, client)) = start(programs.path()) else {
        return;
    };
    sandbox.scale("service-mesh", "controller", 3).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    let controllers = sandbox.view().pods_of("service-mesh", "controller");
    let (wrong, right) = controllers.split_first().unwrap();
    let wait = |what: &str, condition: &dyn Fn(&View) -> bool| {
        let condition = |view: &View| condition(view).then_some(());
        sandbox.wait(what, READY_TIMEOUT, condition).unwrap();
    };
    let is_ready = |view: &View| {
        let pods = view.pods_of("service-mesh", "controller");
        pods.iter().any(|pod| pod.name == wrong.name && pod.ready)
    };
    let logs = |view: &View, pods: &[PodView], text: &str| {
        let mut lines = pods.iter().flat_map(|pod| view.lines(pod, "controller"));
        lines.any(|line| line.contains(text))
    };
    under_load(&sandbox, &client, &LOAD, || {
        for seconds in [DAY, -DAY] {
            set_clocks(&sandbox, std::slice::from_ref(wrong), seconds);
            wait("the wrong clock is not ready", &|view| !is_ready(view));
            let direction = if seconds < 0 { "behind" } else { "ahead" };
            let text = format!("the clock of this replica is 1440 min {direction}");
            wait(&text, &|view| logs(view, &controllers[..1], &text));
            assert!(!logs(&sandbox.view(), right, "the clock of this replica"));
        }
        // Some proxies are connected to the replica with the wrong clock.
        let request = "cd /run/authority && echo start > .new && mv .new request";
        let output = sandbox.exec(&right[0], "controller", &["sh", "-c", request]);
        assert_eq!(output.unwrap().code, 0);
        for step in [
            "rotation: granted: a new root is announced",
            "rotation: entering the phase switched",
            "rotation: entering the phase steady",
        ] {
            wait(step, &|view| logs(view, right, step));
            assert!(!logs(&sandbox.view(), &controllers[..1], step));
        }
        assert_all_serve(&sandbox, "the CA was rotated");
    });
    set_clocks(&sandbox, std::slice::from_ref(wrong), 0);
    wait("the right clock is ready", &is_ready);
    sandbox.scale("servers", "http-server", 4).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
}

#[test]
fn jumps_of_clocks_fail_no_request_or_until_certificates_are_renewed() {
    let programs = wrapped(&["controller", "proxy"], COMMAND);
    let Some((sandbox, client)) = start(programs.path()) else {
        return;
    };
    let proxies = || {
        let mut pods = sandbox.view().pods_of("servers", "http-server");
        pods.push(client.clone());
        pods
    };

    // Pods that start after a jump have the right time.
    under_load(&sandbox, &client, &LOAD, || {
        for seconds in [SMALL_JUMP, -SMALL_JUMP, 0] {
            set_clocks(&sandbox, &proxies(), seconds);
            for replicas in [4, 3] {
                sandbox.scale("servers", "http-server", replicas).unwrap();
                sandbox.wait_settled(READY_TIMEOUT).unwrap();
                assert_all_serve(&sandbox, &format!("a jump to {seconds} s"));
            }
        }
    });

    let session = Session::new("clocks");
    let _server = sandbox.serve(&session.socket()).unwrap();
    let mut all = sandbox.view().pods_of("service-mesh", "controller");
    let proxies = proxies();
    all.extend(proxies.iter().cloned());
    for seconds in [LARGE_JUMP, 0] {
        let failures = failures_under_load(&sandbox, &client, &LOAD, || {
            if seconds == LARGE_JUMP {
                // Before the clocks of the controllers.
                let only = std::slice::from_ref(&client);
                jump(&sandbox, &proxies, only, seconds, "certificate expired");
                SKEWED.drill(&sandbox, &session, &client);
            }
            jump(&sandbox, &all, &proxies, seconds, "certificate issued");
        });
        println!(
            "{} requests fail after a jump to {seconds} s",
            failures.len()
        );
        for failure in failures {
            let is_documented = DOCUMENTED.iter().any(|code| failure.contains(code));
            assert!(is_documented, "{failure}");
        }
        under_load(&sandbox, &client, &LOAD, || {
            assert_all_serve(&sandbox, "certificates were renewed");
        });
    }
    sandbox.scale("servers", "http-server", 4).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
}
