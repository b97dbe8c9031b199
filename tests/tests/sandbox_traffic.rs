//! Who reaches whom: meshed and unmeshed pods both ways, namespaces that ask for all of their pods, and ports that the mesh
//! leaves alone.

use diy_mesh_tests::sandbox::{MESHED, get, http_server, pod_of, shell, wait_line, with_mesh};

const HELLO: &str = "Hello from the http-server service!";

#[test]
fn an_unmeshed_client_reaches_a_meshed_server() {
    let Some(sandbox) = with_mesh(&format!(
        "{}---{}",
        http_server(1, "1.0", MESHED),
        shell("")
    )) else {
        return;
    };
    let (client, server) = (
        pod_of(&sandbox, "clients", "shell"),
        pod_of(&sandbox, "servers", "http-server"),
    );
    assert!(!client.injected && server.injected);
    let answer = get(
        &sandbox,
        &client,
        "shell",
        "http-server.servers",
        80,
        "/hello",
    );
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains(HELLO),
        "{answer}"
    );
    let from = format!("Inbound connection from {}:", client.ip.as_ref().unwrap());
    wait_line(&sandbox, &server, "proxy", &from, |line| {
        line.starts_with(&from)
    });
}

#[test]
fn a_meshed_client_reaches_an_unmeshed_server() {
    let Some(sandbox) = with_mesh(&format!(
        "{}---{}",
        http_server(1, "1.0", ""),
        shell(MESHED)
    )) else {
        return;
    };
    let (client, server) = (
        pod_of(&sandbox, "clients", "shell"),
        pod_of(&sandbox, "servers", "http-server"),
    );
    assert!(client.injected && !server.injected);
    let answer = get(
        &sandbox,
        &client,
        "shell",
        "http-server.servers",
        80,
        "/hello",
    );
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains(HELLO),
        "{answer}"
    );
    wait_line(&sandbox, &client, "proxy", "the dump", |line| {
        line.starts_with("Outbound connection to 10.96.")
    });
    // By the pod's own address, past the Service.
    let answer = get(
        &sandbox,
        &client,
        "shell",
        server.ip.as_deref().unwrap(),
        8080,
        "/hello",
    );
    assert!(answer.contains(HELLO), "{answer}");
}

#[test]
fn a_namespace_can_ask_for_its_pods_and_a_pod_can_decline() {
    let namespace = "{apiVersion: v1, kind: Namespace, metadata: {name: clients, labels: {diy-service-mesh/inject: enabled}}}\n---";
    let other = shell("diy-service-mesh/inject: 'false'")
        .replace("name: shell,", "name: other,")
        .replace("app: shell", "app: other");
    let Some(sandbox) = with_mesh(&format!("{namespace}{}---{other}", shell(""))) else {
        return;
    };
    assert!(pod_of(&sandbox, "clients", "shell").injected);
    assert!(!pod_of(&sandbox, "clients", "other").injected);
}

#[test]
fn skipped_ports_do_not_pass_the_proxy() {
    let server = http_server(
        1,
        "1.0",
        &format!("{MESHED}, diy-service-mesh/skip-inbound-ports: '8000-8080'"),
    );
    let client = shell(&format!(
        "{MESHED}, diy-service-mesh/skip-outbound-ports: '80'"
    ));
    let Some(sandbox) = with_mesh(&format!("{server}---{client}")) else {
        return;
    };
    let (client, server) = (
        pod_of(&sandbox, "clients", "shell"),
        pod_of(&sandbox, "servers", "http-server"),
    );
    let answer = get(
        &sandbox,
        &client,
        "shell",
        "http-server.servers",
        80,
        "/hello",
    );
    assert!(answer.contains(HELLO), "{answer}");
    // A call that does pass the client's proxy; once its dump is there, one of the call before would be there too.
    get(
        &sandbox,
        &client,
        "shell",
        server.ip.as_deref().unwrap(),
        8080,
        "/hello",
    );
    let there = format!(
        "Outbound connection to {}:8080",
        server.ip.as_ref().unwrap()
    );
    wait_line(&sandbox, &client, "proxy", &there, |line| line == there);
    let view = sandbox.view();
    assert!(
        !view
            .lines(&client, "proxy")
            .iter()
            .any(|line| line.starts_with("Outbound connection to 10.96."))
    );
    assert!(
        !view
            .lines(&server, "proxy")
            .iter()
            .any(|line| line.starts_with("Inbound connection"))
    );
}

#[test]
fn a_pods_own_opaque_ports_bypass_detection_and_a_services_app_protocol_does_not() {
    let service = http_server(1, "1.0", MESHED).replace("port: 80,", "port: 80, appProtocol: tcp,");
    let pod = http_server(
        1,
        "1.0",
        &format!("{MESHED}, diy-service-mesh/opaque-ports: '8080'"),
    )
    .replace("servers", "opaque");
    let Some(sandbox) = with_mesh(&format!("{service}---{pod}---{}", shell(MESHED))) else {
        return;
    };
    let client = pod_of(&sandbox, "clients", "shell");
    for (namespace, host, called_by) in [
        ("servers", "http-server.servers", true),
        ("opaque", "http-server.opaque", false),
    ] {
        let server = pod_of(&sandbox, namespace, "http-server");
        let answer = get(&sandbox, &client, "shell", host, 80, "/hello");
        assert!(answer.contains(HELLO), "{answer}");
        // The readiness probe is TCP without a byte; this connection carries more.
        let bytes = |line: &str| line.starts_with("[TCP: ") && !line.starts_with("[TCP: 0 bytes");
        let request =
            |line: &str| line == "X-Called-By: spiffe://cluster.local/ns/clients/sa/default";
        let carried = wait_line(&sandbox, &server, "proxy", "the dump", |line| {
            bytes(line) || request(line)
        });
        assert_eq!(request(&carried), called_by, "{namespace}: {carried}");
    }
    // The caller's proxy detects neither.
    let is_http = |line: &String| line.starts_with("GET /hello ");
    assert!(!sandbox.view().lines(&client, "proxy").iter().any(is_http));
}
