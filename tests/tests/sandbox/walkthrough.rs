//! The walkthrough in a sandbox, with the manifests for clusters.

use std::{collections::BTreeSet, process::Command};

use diy_mesh_testkit::process::{Process, Signal};
use diy_mesh_tests::sandbox::{empty, programs, single_pod, wait_for_line, walkthrough};

#[test]
fn both_versions_respond_and_proxies_dump_requests() {
    let Some(sandbox) = walkthrough() else { return };
    let client = single_pod(&sandbox, "http-client", "http-client");
    assert!(client.injected, "http-client is meshed");
    for version in ["Version: 1.0", "Version: 2.0"] {
        wait_for_line(&sandbox, &client, "http-client", version, |line| {
            line.contains("Hello from the http-server service!") && line.contains(version)
        });
    }
    wait_for_line(
        &sandbox,
        &client,
        "proxy",
        "the dump of an outbound request",
        |line| line.starts_with("Outbound connection to 10.96."),
    );
    for name in ["http-server-v1", "http-server-v2"] {
        let server = single_pod(&sandbox, "http-server", name);
        let from = format!("Inbound connection from {}:", client.ip.as_ref().unwrap());
        let line = wait_for_line(
            &sandbox,
            &server,
            "proxy",
            "the dump of an inbound request",
            |line| line.starts_with(&from),
        );
        assert!(line.ends_with(" to port: 8080"), "{line}");
        wait_for_line(&sandbox, &server, "proxy", "the request line", |line| {
            line == "GET /hello HTTP/1.1"
        });
        wait_for_line(&sandbox, &server, "proxy", "the status line", |line| {
            line == "HTTP/1.1 200 OK"
        });
    }
}

#[test]
fn grpc_calls_of_one_connection_reach_both_pods() {
    let Some(sandbox) = walkthrough() else { return };
    let client = single_pod(&sandbox, "grpc-client", "grpc-client");
    let servers = sandbox.view().pods_of("grpc-server", "grpc-server");
    assert_eq!(servers.len(), 2);
    for server in servers {
        let response = format!("Hostname: {} ", server.name);
        wait_for_line(&sandbox, &client, "grpc-client", &response, |line| {
            line.contains(&response)
        });
    }
}

#[test]
fn demo_prints_summary_on_sigint() {
    // Skips the test on machines without sandboxes.
    if empty().is_none() {
        return;
    }
    let mut mesh = Command::new(programs().join("mesh"));
    let demo = mesh.args(["demo", "--only", "http-client", "--for", "600"]);
    let mut demo = Process::with_stdout(demo);
    let mut lines = demo.lines();
    let ready = lines.by_ref().find(|line| {
        line.contains("everything is ready after")
            || line.starts_with("not everything became ready")
    });
    assert!(ready.unwrap().contains("everything is ready after"));
    let shown = lines
        .by_ref()
        .find(|line| line.contains("Response #"))
        .unwrap();
    assert!(shown.starts_with("  http-client[http-client] "), "{shown}");
    demo.signal(Signal::SIGINT);
    let rest: Vec<String> = lines.collect();
    assert!(
        rest.iter()
            .any(|line| line.starts_with("mesh demo: ran ")
                && line.contains("6 of them with a proxy")),
        "{rest:?}"
    );
    assert!(demo.exit().success());
}

#[test]
fn demo_prints_exchanges_as_lines_after_the_first() {
    if empty().is_none() {
        return;
    }
    let mut mesh = Command::new(programs().join("mesh"));
    let mut demo = Process::with_stdout(mesh.args(["demo", "--for", "600"]));
    let mut lines = demo.lines();
    let is_status = |line: &String| line.starts_with("mesh demo: ");
    let start: Vec<String> = lines.by_ref().take(4).collect();
    assert!(
        start.iter().all(is_status),
        "exchanges follow the start: {start:?}"
    );
    let mut seen = BTreeSet::new();
    // The first exchange with each version is a block: headline, application, proxy, proxy,
    // application.
    while seen.len() < 2 {
        let line = lines.next().unwrap();
        assert!(!line.contains("kube-probe"), "{line}");
        let Some(rest) = line.strip_prefix("http-client -> ") else {
            continue;
        };
        // On a busy machine, the client may start more than a second before the servers.
        if line.contains("  no-endpoint: ") && seen.is_empty() {
            continue;
        }
        assert!(
            line.contains(" GET /hello ") && line.ends_with(" ms  mTLS"),
            "{line}"
        );
        let version = rest.split(' ').next().unwrap().to_owned();
        if !seen.insert(version.clone()) {
            continue;
        }
        let block = lines.by_ref().take_while(|line| !line.is_empty());
        let mut sources: Vec<String> = block
            .filter_map(|line| Some(line.trim_start().split_once(' ')?.0.to_owned()))
            .collect();
        sources.dedup();
        let expected = [
            "http-client[http-client]",
            "http-client[proxy]",
            &format!("{version}[proxy]"),
            &format!("{version}[http-server]"),
        ];
        assert_eq!(sources, expected);
    }
    let is_exchange = |line: &String| line.starts_with("http-client -> http-server-v");
    lines.by_ref().find(is_exchange).unwrap();
    let next = lines.next().unwrap();
    assert!(
        !next.starts_with(' '),
        "the second exchange is a line: {next}"
    );
    demo.signal(Signal::SIGINT);
    let summary: Vec<String> = lines
        .filter(|line| line.starts_with("  http-client -> "))
        .collect();
    assert_eq!(summary.len(), 2, "{summary:?}");
    assert!(demo.exit().success());
}

#[test]
fn demo_fails_and_lists_pods_that_are_not_ready() {
    if empty().is_none() {
        return;
    }
    let folder = std::env::temp_dir().join(format!("mesh-demo-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: never, namespace: a}, spec: {containers: [{name: never, image: 'nginx:1'}]}}";
    std::fs::write(folder.join("pod.yaml"), pod).unwrap();
    let output = Command::new(programs().join("mesh"))
        .args(["demo", "--quiet", "--for", "10", "--manifests"])
        .arg(&folder)
        .output()
        .unwrap();
    std::fs::remove_dir_all(folder).unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("not everything became ready:\n  a/never (Pending): image \"nginx:1\""),
        "{text}"
    );
}
