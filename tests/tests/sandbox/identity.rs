//! Mutual TLS in a sandbox: encrypted traffic between meshed pods, client identities, and strict
//! pods.

use diy_mesh_sandbox::{Sandbox, protocol::PodView};
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, get, http_server, post, programs, script, shell, single_pod,
    wait_for_line, with_controller, with_mesh,
};

const CLIENT_IDENTITY: &str = "spiffe://cluster.local/ns/clients/sa/default";

/// Sends a request from a pod during a packet capture. Returns the number of occurrences of each
/// word.
fn captured_counts(sandbox: &Sandbox, pod: &PodView, address: &str, words: &[&str]) -> Vec<u32> {
    let capture = programs().join("sandbox-capture");
    let request = "GET /hello?secret=open-sesame HTTP/1.1\\r\\nHost: http-server\\r\\nConnection: close\\r\\n\\r\\n";
    let counts: Vec<String> = words
        .iter()
        .map(|word| format!("grep -aoF '{word}' /tmp/wire | wc -l"))
        .collect();
    let text = format!(
        "set -e; rm -f /tmp/stop-capture; {} eth0 /tmp/wire > /tmp/said & captured_counts=$!
         for try in $(seq 600); do grep -q ready /tmp/said 2>/dev/null && break; kill -0 $captured_counts; sleep 0.05; done
         exec 3<>/dev/tcp/{address}; printf '{request}' >&3; cat <&3 > /tmp/response; exec 3<&-
         touch /tmp/stop-capture; wait $captured_counts; grep -q '200 OK' /tmp/response; {}",
        capture.display(),
        counts.join("; ")
    );
    let output = script(sandbox, pod, "shell", &text);
    let counts: Vec<u32> = output
        .stdout
        .lines()
        .filter_map(|line| line.trim().parse().ok())
        .collect();
    assert_eq!(counts.len(), words.len(), "{output:?}");
    counts
}

#[test]
fn traffic_between_meshed_pods_is_encrypted() {
    let plain = http_server(1, "1.0", "").replace("namespace: servers", "namespace: plain-servers");
    // The capture requires NET_RAW.
    let client_deployment = shell(MESHED).replace(
        "command: [sleep, infinity]",
        "command: [sleep, infinity], securityContext: {runAsUser: 0, capabilities: {add: [NET_RAW]}}",
    );
    let objects = format!(
        "{}---{plain}---{client_deployment}",
        http_server(1, "1.0", MESHED)
    );
    let Some(sandbox) = with_mesh(&objects) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    // Both servers are reachable before the capture.
    get(&sandbox, &client, "http-server.servers", 80);
    get(&sandbox, &client, "http-server.plain-servers", 80);
    let words = ["open-sesame", "Hello from the http-server"];
    let plain = captured_counts(&sandbox, &client, "http-server.plain-servers/80", &words);
    assert!(
        plain.iter().all(|count| *count > 0),
        "the capture contains plaintext traffic: {plain:?}"
    );
    let meshed = captured_counts(&sandbox, &client, "http-server.servers/80", &words);
    assert_eq!(
        meshed,
        [0, 0],
        "the capture contains the request or the response"
    );
    // The same with the pod IP, without the Service.
    let server = single_pod(&sandbox, "servers", "http-server");
    let direct = captured_counts(
        &sandbox,
        &client,
        &format!("{}/8080", server.ip.as_deref().unwrap()),
        &words,
    );
    assert_eq!(
        direct,
        [0, 0],
        "the capture contains the request or the response"
    );
    // The server receives the client identity.
    wait_for_line(
        &sandbox,
        &server,
        "http-server",
        "the client identity",
        |line| line.to_lowercase() == format!("x-called-by: {CLIENT_IDENTITY}"),
    );
}

#[test]
fn strict_pod_accepts_only_meshed_clients_and_its_probe_succeeds() {
    let strict = http_server(
        1,
        "1.0",
        &format!("{MESHED}, diy-service-mesh/inbound: strict"),
    )
    .replace(
        "readinessProbe: {tcpSocket: {port: http}",
        "readinessProbe: {httpGet: {port: http, path: /hello}",
    );
    let unmeshed = shell("").replace("namespace: clients", "namespace: unmeshed");
    let Some(sandbox) = with_mesh(&format!("{strict}---{}---{unmeshed}", shell(MESHED))) else {
        return;
    };
    // The pod is ready: the kubelet's probe succeeded.
    let (client, unmeshed) = (
        single_pod(&sandbox, "clients", "shell"),
        single_pod(&sandbox, "unmeshed", "shell"),
    );
    get(&sandbox, &client, "http-server.servers", 80);
    let refused = post(&sandbox, &unmeshed, "http-server.servers", 80);
    assert!(
        refused.stdout.starts_with("HTTP/1.1 403 ")
            && refused.stdout.contains("x-mesh-error: mtls-required"),
        "{refused:?}"
    );
}

#[test]
fn pod_stays_ready_and_serves_plaintext_when_its_certificate_expires() {
    let unmeshed = shell("").replace("namespace: clients", "namespace: unmeshed");
    let objects = format!(
        "{}---{}---{unmeshed}",
        http_server(1, "1.0", MESHED),
        shell(MESHED)
    );
    let Some(sandbox) = with_controller(&[("CERTIFICATE_LIFE", "20")], &objects) else {
        return;
    };
    let (client, unmeshed) = (
        single_pod(&sandbox, "clients", "shell"),
        single_pod(&sandbox, "unmeshed", "shell"),
    );
    let server = single_pod(&sandbox, "servers", "http-server");
    let hello = |client: &PodView| get(&sandbox, client, "http-server.servers", 80);
    hello(&client);
    sandbox.scale("service-mesh", "controller", 0).unwrap();
    for pod in [&client, &server] {
        wait_for_line(&sandbox, pod, "proxy", "the expiry", |line| {
            line.contains("certificate expired")
        });
    }
    // The admin port answers as it answers the kubelet.
    let text = format!(
        "exec 3<>/dev/tcp/{}/4001 && printf 'GET /ready HTTP/1.0\\r\\n\\r\\n' >&3 && cat <&3",
        server.ip.as_deref().unwrap()
    );
    let ready = script(&sandbox, &unmeshed, "shell", &text);
    assert!(ready.stdout.starts_with("HTTP/1.0 200 "), "{ready:?}");
    hello(&unmeshed);
    let refused = post(&sandbox, &client, "http-server.servers", 80);
    assert!(
        refused.stdout.contains("x-mesh-error: no-certificate"),
        "{refused:?}"
    );
    sandbox.scale("service-mesh", "controller", 1).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    hello(&client);
}
