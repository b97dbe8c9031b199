//! Who is who on the wire: what meshed pods say to each other is encrypted, applications learn their callers, and strict pods
//! turn away those who prove nothing. Real namespaces, real redirection, the real controller.
#![allow(missing_docs, clippy::unwrap_used)]

use diy_mesh::sandbox::{Sandbox, protocol::PodView};
use diy_mesh_tests::sandbox::{
    MESHED, get, http_server, pod_of, post, programs, shell, wait_line, with_mesh,
};

const CALLER: &str = "spiffe://cluster.local/ns/clients/sa/default";

/// Runs a request in the pod while its interface is tapped. How often the wire had each of the words.
fn tap(sandbox: &Sandbox, pod: &PodView, address: &str, words: &[&str]) -> Vec<u32> {
    let capture = programs().join("sandbox-capture");
    let request = "GET /hello?secret=open-sesame HTTP/1.1\\r\\nHost: http-server\\r\\nConnection: close\\r\\n\\r\\n";
    let counts: Vec<String> = words
        .iter()
        .map(|word| format!("grep -aoF '{word}' /tmp/wire | wc -l"))
        .collect();
    let script = format!(
        "set -e; rm -f /tmp/stop-capture; {} eth0 /tmp/wire > /tmp/said & tap=$!
         for try in $(seq 600); do grep -q ready /tmp/said 2>/dev/null && break; kill -0 $tap; sleep 0.05; done
         exec 3<>/dev/tcp/{address}; printf '{request}' >&3; cat <&3 > /tmp/answer; exec 3<&-
         touch /tmp/stop-capture; wait $tap; grep -q '200 OK' /tmp/answer; {}",
        capture.display(),
        counts.join("; ")
    );
    let output = sandbox
        .exec(pod, "shell", &["timeout", "60", "bash", "-c", &script])
        .unwrap();
    let counts: Vec<u32> = output
        .stdout
        .lines()
        .filter_map(|line| line.trim().parse().ok())
        .collect();
    assert_eq!(counts.len(), words.len(), "{output:?}");
    counts
}

#[test]
fn a_tap_on_the_wire_reads_nothing_of_what_meshed_pods_say() {
    let plain = http_server(1, "1.0", "").replace("namespace: servers", "namespace: plain-servers");
    // To tap it takes a capability that containers have on most clusters anyway.
    let tapper = shell(MESHED).replace(
        "command: [sleep, infinity]",
        "command: [sleep, infinity], securityContext: {runAsUser: 0, capabilities: {add: [NET_RAW]}}",
    );
    let objects = format!("{}---{plain}---{tapper}", http_server(1, "1.0", MESHED));
    let Some(sandbox) = with_mesh(&objects) else {
        return;
    };
    let client = pod_of(&sandbox, "clients", "shell");
    // Both are reachable before the wire is tapped.
    get(
        &sandbox,
        &client,
        "shell",
        "http-server.servers",
        80,
        "/hello",
    );
    get(
        &sandbox,
        &client,
        "shell",
        "http-server.plain-servers",
        80,
        "/hello",
    );
    let words = ["open-sesame", "Hello from the http-server"];
    let plain = tap(&sandbox, &client, "http-server.plain-servers/80", &words);
    assert!(
        plain.iter().all(|count| *count > 0),
        "the tap hears what is said in the clear: {plain:?}"
    );
    let meshed = tap(&sandbox, &client, "http-server.servers/80", &words);
    assert_eq!(meshed, [0, 0], "the wire has the request, or the answer");
    // By the pod's own address, past the Service, too.
    let server = pod_of(&sandbox, "servers", "http-server");
    let direct = tap(
        &sandbox,
        &client,
        &format!("{}/8080", server.ip.as_deref().unwrap()),
        &words,
    );
    assert_eq!(direct, [0, 0], "the wire has the request, or the answer");
    // And the application knows who asked.
    wait_line(&sandbox, &server, "http-server", "its caller", |line| {
        line.to_lowercase() == format!("x-called-by: {CALLER}")
    });
}

#[test]
fn a_strict_pod_answers_its_kubelet_and_the_mesh_and_nobody_else() {
    let strict = http_server(
        1,
        "1.0",
        &format!("{MESHED}, diy-service-mesh/inbound: strict"),
    )
    .replace(
        "readinessProbe: {tcpSocket: {port: http}",
        "readinessProbe: {httpGet: {port: http, path: /hello}",
    );
    let stranger = shell("").replace("namespace: clients", "namespace: strangers");
    let Some(sandbox) = with_mesh(&format!("{strict}---{}---{stranger}", shell(MESHED))) else {
        return;
    };
    // It is ready: its kubelet's probe got through.
    let (client, stranger) = (
        pod_of(&sandbox, "clients", "shell"),
        pod_of(&sandbox, "strangers", "shell"),
    );
    get(
        &sandbox,
        &client,
        "shell",
        "http-server.servers",
        80,
        "/hello",
    );
    let refused = post(
        &sandbox,
        &stranger,
        "shell",
        "http-server.servers",
        80,
        "/hello",
    );
    assert!(
        refused.stdout.starts_with("HTTP/1.1 403 ")
            && refused.stdout.contains("x-mesh-error: mtls-required"),
        "{refused:?}"
    );
}
