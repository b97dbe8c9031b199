//! Traffic in a sandbox: meshed and unmeshed pods, injection by namespace, skipped and opaque
//! ports.

use diy_mesh_sandbox::protocol::PodView;
use diy_mesh_tests::sandbox::{
    MESHED, get, http_server, request_until, run, shell, single_pod, wait_for_line, with_mesh,
};

const HELLO: &str = "Hello from the http-server service!";

#[test]
fn unmeshed_client_reaches_meshed_server() {
    let Some(sandbox) = with_mesh(&format!(
        "{}---{}",
        http_server(1, "1.0", MESHED),
        shell("")
    )) else {
        return;
    };
    let (client, server) = (
        single_pod(&sandbox, "clients", "shell"),
        single_pod(&sandbox, "servers", "http-server"),
    );
    assert!(!client.injected && server.injected);
    let response = get(&sandbox, &client, "http-server.servers", 80);
    assert!(
        response.starts_with("HTTP/1.1 200 OK\r\n") && response.contains(HELLO),
        "{response}"
    );
    let from = format!("Inbound connection from {}:", client.ip.as_ref().unwrap());
    wait_for_line(&sandbox, &server, "proxy", &from, |line| {
        line.starts_with(&from)
    });
}

#[test]
fn meshed_client_reaches_unmeshed_server() {
    let Some(sandbox) = with_mesh(&format!(
        "{}---{}",
        http_server(1, "1.0", ""),
        shell(MESHED)
    )) else {
        return;
    };
    let (client, server) = (
        single_pod(&sandbox, "clients", "shell"),
        single_pod(&sandbox, "servers", "http-server"),
    );
    assert!(client.injected && !server.injected);
    let response = get(&sandbox, &client, "http-server.servers", 80);
    assert!(
        response.starts_with("HTTP/1.1 200 OK\r\n") && response.contains(HELLO),
        "{response}"
    );
    wait_for_line(&sandbox, &client, "proxy", "the dump", |line| {
        line.starts_with("Outbound connection to 10.96.")
    });
    // By pod IP, without the Service.
    let response = get(&sandbox, &client, server.ip.as_deref().unwrap(), 8080);
    assert!(response.contains(HELLO), "{response}");
    // A port that the Service does not have.
    let target = ("http-server.servers", 99);
    let reason = "service servers/http-server has no port 99; it has 80";
    // A loaded controller may respond after the proxy's timeout: then the connection passes through.
    request_until(&sandbox, &client, "GET /hello", target, "", |response| {
        response.starts_with("HTTP/1.1 503 ") && response.contains(reason)
    });
}

#[test]
fn namespace_label_enables_injection_and_annotation_disables_it() {
    let namespace = "{apiVersion: v1, kind: Namespace, metadata: {name: clients, labels: {diy-service-mesh/inject: enabled}}}\n---";
    let other = shell("diy-service-mesh/inject: 'false'")
        .replace("name: shell,", "name: other,")
        .replace("app: shell", "app: other");
    let Some(sandbox) = with_mesh(&format!("{namespace}{}---{other}", shell(""))) else {
        return;
    };
    assert!(single_pod(&sandbox, "clients", "shell").injected);
    assert!(!single_pod(&sandbox, "clients", "other").injected);
}

#[test]
fn skipped_ports_bypass_the_proxy() {
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
        single_pod(&sandbox, "clients", "shell"),
        single_pod(&sandbox, "servers", "http-server"),
    );
    let response = get(&sandbox, &client, "http-server.servers", 80);
    assert!(response.contains(HELLO), "{response}");
    // A request through the client's proxy: its dump follows any dump of the previous request.
    get(&sandbox, &client, server.ip.as_deref().unwrap(), 8080);
    let dump = format!(
        "Outbound connection to {}:8080",
        server.ip.as_ref().unwrap()
    );
    wait_for_line(&sandbox, &client, "proxy", &dump, |line| line == dump);
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
fn pod_restricted_to_dns_sends_no_udp_and_calls_over_tcp() {
    let closed = format!("{MESHED}, diy-service-mesh/outbound-udp: dns");
    let open = shell(MESHED).replace("namespace: clients", "namespace: open");
    let objects = [http_server(1, "1.0", MESHED), shell(&closed), open];
    let Some(sandbox) = with_mesh(&objects.join("---")) else {
        return;
    };
    let server = single_pod(&sandbox, "servers", "http-server");
    let [closed, open] = ["clients", "open"].map(|name| single_pod(&sandbox, name, "shell"));
    let send = |from: &PodView, to: &PodView| {
        let to = to.ip.as_deref().unwrap();
        let script = format!("printf datagram > /dev/udp/{to}/443");
        sandbox
            .exec(from, "shell", &["bash", "-c", &script])
            .unwrap()
    };
    let refused = send(&closed, &server);
    assert!(
        refused.stderr.contains("Operation not permitted"),
        "{refused:?}"
    );
    for (from, to) in [(&open, &server), (&open, &closed), (&closed, &closed)] {
        let sent = send(from, to);
        assert_eq!(sent.stderr, "", "{from:?} {to:?}");
    }
    let response = get(&sandbox, &closed, "http-server.servers", 80);
    assert!(response.contains(HELLO), "{response}");
    wait_for_line(&sandbox, &closed, "proxy-init", "the refusal", |line| {
        line.starts_with("outbound UDP is refused, except: loopback, replies, ")
    });
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
    let client = single_pod(&sandbox, "clients", "shell");
    for (namespace, host, called_by) in [
        ("servers", "http-server.servers", true),
        ("opaque", "http-server.opaque", false),
    ] {
        let server = single_pod(&sandbox, namespace, "http-server");
        let response = get(&sandbox, &client, host, 80);
        assert!(response.contains(HELLO), "{response}");
        let bytes = |line: &str| line.starts_with("[TCP: ");
        let request =
            |line: &str| line == "X-Called-By: spiffe://cluster.local/ns/clients/sa/default";
        let carried = wait_for_line(&sandbox, &server, "proxy", "the dump", |line| {
            bytes(line) || request(line)
        });
        assert_eq!(request(&carried), called_by, "{namespace}: {carried}");
    }
    // The client's proxy skips detection for both.
    let is_http = |line: &String| line.starts_with("GET /hello ");
    assert!(!sandbox.view().lines(&client, "proxy").iter().any(is_http));
}

#[test]
fn meshed_application_reaches_the_controller() {
    let Some(sandbox) = with_mesh(&shell(MESHED)) else {
        return;
    };
    let client = single_pod(&sandbox, "clients", "shell");
    let handshake =
        "openssl s_client -connect controller.service-mesh:8080 -alpn h2 < /dev/null 2>&1";
    let output = run(&sandbox, &client, handshake);
    assert!(output.contains("ALPN protocol: h2"), "{output:?}");
}
