//! The Discover stream over loopback: what a proxy is told, and when.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_testkit::authority;
use diy_mesh_testkit::net::{listen, read_until};
use diy_mesh_testkit::tokens::Signer;
use diy_mesh_testkit::wait::soon;
use proto::ResourceType;
use proto::discover_request::Action;
use proto::discover_response::Update;
use support::{Sandbox, claims, pod_manifest, say, web};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;

#[tokio::test]
async fn returns_snapshot_of_a_service_then_deltas() {
    let sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1", "10.0.0.2"]))]).await;
    let mut discover = sandbox.client().await.discover().await;
    discover.subscribe("10.96.0.7:80", "").await;
    let first = discover.answer().await.unwrap();
    assert_eq!(
        say(&first),
        "10.96.0.7:80: service shop/web [10.0.0.1:8080 10.0.0.2:8080]"
    );
    let Some(Update::Snapshot(snapshot)) = first.update else {
        panic!("a snapshot comes first")
    };
    assert_eq!(snapshot.app_protocol, "http");
    assert_eq!(
        snapshot.endpoints[0].identity,
        "spiffe://cluster.local/ns/shop/sa/web"
    );
    assert_eq!(
        (
            snapshot.endpoints[0].zone.as_str(),
            snapshot.endpoints[0].pod_name.as_str()
        ),
        ("a", "web-10-0-0-1")
    );

    sandbox.write("web.yaml", &web(&["10.0.0.2", "10.0.0.3"]));
    assert_eq!(
        discover.said().await,
        "10.96.0.7:80: +[10.0.0.3:8080] -[10.0.0.1:8080]"
    );
    sandbox.write("web.yaml", &web(&[]));
    assert_eq!(
        discover.said().await,
        "10.96.0.7:80: +[] -[10.0.0.2:8080 10.0.0.3:8080]"
    );
}

#[tokio::test]
async fn resolves_pod_address_on_any_port() {
    let sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1"]))]).await;
    let mut discover = sandbox.client().await.discover().await;
    discover.subscribe("10.0.0.1:9999", "").await;
    assert_eq!(
        discover.said().await,
        "10.0.0.1:9999: pod shop/web-10-0-0-1 [10.0.0.1:9999]"
    );
}

#[tokio::test]
async fn endpoint_is_opaque_by_the_arguments_of_its_proxy() {
    let proxy = "{name: proxy, args: ['--opaque-ports=5432'], ";
    let sandbox = Sandbox::start(&[(
        "pod.yaml",
        pod_manifest("db", "10.0.0.1").replace("{name: proxy, ", proxy),
    )])
    .await;
    let mut discover = sandbox.client().await.discover().await;
    for (destination, opaque) in [("10.0.0.1:5432", true), ("10.0.0.1:80", false)] {
        discover.subscribe(destination, "").await;
        let Some(Update::Snapshot(snapshot)) = discover.answer().await.unwrap().update else {
            panic!("a snapshot comes first")
        };
        assert_eq!(snapshot.endpoints[0].opaque, opaque, "{destination}");
    }
}

#[tokio::test]
async fn unknown_address_becomes_known_and_unknown_again() {
    let sandbox = Sandbox::start(&[]).await;
    let mut discover = sandbox.client().await.discover().await;
    discover.subscribe("10.96.0.7:80", "").await;
    discover.subscribe("10.0.0.1:80", "").await;
    assert_eq!(discover.said().await, "10.96.0.7:80: unknown");
    assert_eq!(discover.said().await, "10.0.0.1:80: unknown");
    sandbox.write("web.yaml", &web(&["10.0.0.1"]));
    let mut both = [discover.said().await, discover.said().await];
    both.sort();
    assert_eq!(
        both,
        [
            "10.0.0.1:80: pod shop/web-10-0-0-1 [10.0.0.1:80]",
            "10.96.0.7:80: service shop/web [10.0.0.1:8080]"
        ]
    );
    sandbox.remove("web.yaml");
    let mut both = [discover.said().await, discover.said().await];
    both.sort();
    assert_eq!(both, ["10.0.0.1:80: unknown", "10.96.0.7:80: unknown"]);
}

#[tokio::test]
async fn local_service_has_the_endpoints_on_the_node_of_the_pod_that_the_token_names() {
    let mut local = web(&["10.0.0.1", "10.0.0.2"])
        .replace("clusterIP:", "internalTrafficPolicy: Local, clusterIP:");
    for (address, node) in [("10.0.0.1", "n1"), ("10.0.0.2", "n2")] {
        let endpoint = format!("{{addresses: [{address}], ");
        local = local.replace(&endpoint, &format!("{endpoint}nodeName: {node}, "));
    }
    let sandbox = Sandbox::start(&[("web.yaml", local)]).await;
    let mut discover = sandbox.client().await.discover().await;
    discover.subscribe("10.96.0.7:80", "").await;
    let unknown = "10.96.0.7:80: service shop/web []";
    assert_eq!(
        discover.said().await,
        unknown,
        "so far, no pod has the UID of the token"
    );
    let own_pod = |uid: &str| {
        own_pod(uid, "--inbound=strict")
            .replace("10.0.0.1", "10.0.0.9")
            .replace(
                "containers: [{name: app",
                "nodeName: n2, containers: [{name: app",
            )
    };
    sandbox.write("pod.yaml", &own_pod("0"));
    sandbox.write("pod.yaml", &own_pod("1"));
    let known = "10.96.0.7:80: service shop/web [10.0.0.2:8080]";
    assert_eq!(discover.said().await, known);
}

#[tokio::test]
async fn draining_endpoint_is_removed_for_proxies_that_do_not_know_draining_ones() {
    let sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1", "10.0.0.2"]))]).await;
    let mut discover = sandbox.client().await.discover().await;
    discover.subscribe("10.96.0.7:80", "").await;
    discover.said().await;
    let leaving =
        "{addresses: [10.0.0.1], conditions: {ready: false, serving: true, terminating: true}, ";
    let all = web(&["10.0.0.1", "10.0.0.2"]).replace("{addresses: [10.0.0.1], ", leaving);
    sandbox.write("web.yaml", &all);
    let update = discover.answer().await.unwrap();
    assert_eq!(say(&update), "10.96.0.7:80: +[] -[10.0.0.1:8080]");
    let Some(Update::Delta(delta)) = update.update else {
        panic!("a delta is enough")
    };
    assert_eq!(delta.draining[0].address, "10.0.0.1:8080");
    // A new subscriber.
    let mut discover = sandbox.client().await.discover().await;
    discover.subscribe("10.96.0.7:80", "").await;
    let Some(Update::Snapshot(snapshot)) = discover.answer().await.unwrap().update else {
        panic!("a snapshot comes first")
    };
    assert_eq!(snapshot.endpoints[0].address, "10.0.0.2:8080");
    assert_eq!(snapshot.draining[0].address, "10.0.0.1:8080");
    assert_eq!((snapshot.endpoints.len(), snapshot.draining.len()), (1, 1));
}

#[tokio::test]
async fn unknown_port_of_a_service_is_sent_with_the_ports_of_the_service() {
    let sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1"]))]).await;
    let mut discover = sandbox.client().await.discover().await;
    discover.subscribe("10.96.0.7:99", "").await;
    let Some(Update::Snapshot(snapshot)) = discover.answer().await.unwrap().update else {
        panic!("a snapshot comes first")
    };
    assert_eq!(
        (snapshot.unknown_port, &snapshot.ports[..], &*snapshot.name),
        (true, &[80][..], "web")
    );
    assert!(snapshot.endpoints.is_empty());
    // The Service gets the port.
    let changed = web(&["10.0.0.1"]).replace("port: 80,", "port: 99,");
    sandbox.write("web.yaml", &changed);
    assert_eq!(
        discover.said().await,
        "10.96.0.7:99: service shop/web [10.0.0.1:8080]"
    );
}

#[tokio::test]
async fn port_over_the_limit_of_a_service_is_sent_with_the_limit() {
    let ports: Vec<String> = (1..=1001)
        .map(|port| format!("{{name: p{port}, port: {port}}}"))
        .collect();
    let wide = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: wide, namespace: shop}}\n\
         spec: {{clusterIP: 10.96.0.8, ports: [{}]}}\n",
        ports.join(", ")
    );
    let sandbox = Sandbox::start(&[("wide.yaml", wide)]).await;
    let mut discover = sandbox.client().await.discover().await;
    discover.subscribe("10.96.0.8:1001", "").await;
    let Some(Update::Snapshot(snapshot)) = discover.answer().await.unwrap().update else {
        panic!("a snapshot comes first")
    };
    let unknown = (snapshot.unknown_port, snapshot.max_ports, &*snapshot.name);
    assert_eq!(unknown, (true, 1000, "wide"));
}

/// The pod that the token of the tests is bound to.
fn own_pod(uid: &str, arguments: &str) -> String {
    pod_manifest("web-1", "10.0.0.1")
        .replace("name: web-1,", &format!("name: web-1, uid: '{uid}',"))
        .replace(
            "containers: []",
            "containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]",
        )
        .replace(
            "{name: proxy, ",
            &format!("{{name: proxy, args: [{arguments}], "),
        )
}

#[tokio::test]
async fn self_is_the_inbound_configuration_of_the_pod_that_the_token_names() {
    let sandbox = Sandbox::start(&[]).await;
    let mut discover = sandbox.client().await.discover().await;
    assert_eq!(
        discover.capabilities,
        "self,edges,authorization,egress,keys,traffic,backend"
    );
    discover.subscribe_to(ResourceType::Self_, "").await;
    discover.subscribe("192.0.2.1:80", "").await;
    assert_eq!(
        discover.said().await,
        "192.0.2.1:80: unknown",
        "the pod is not in the catalog yet"
    );
    // A predecessor with the same name has another UID.
    sandbox.write("pod.yaml", &own_pod("0", "--inbound=strict"));
    sandbox.write("late.yaml", &pod_manifest("late", "192.0.2.1"));
    let expected = "192.0.2.1:80: pod shop/late [192.0.2.1:80]";
    assert_eq!(discover.said().await, expected);
    let arguments = "--inbound=strict, '--opaque-ports=25,9000-9100', --allow-connect";
    sandbox.write("pod.yaml", &own_pod("1", arguments));
    let update = discover.answer().await.unwrap();
    assert_eq!(
        say(&update),
        r#": workload INBOUND_MODE_STRICT connect true opaque ["25-25", "9000-9100"] ports ["http:8080/TCP"]"#
    );
    assert_eq!(update.r#type(), ResourceType::Self_);
    // The same version is not sent to a new stream.
    let mut discover = sandbox.client().await.discover().await;
    let known = proto::Subscribe {
        known_version: update.version,
        r#type: ResourceType::Self_.into(),
        ..proto::Subscribe::default()
    };
    discover.send(Action::Subscribe(known)).await;
    assert_eq!(discover.said().await, ": unchanged");
}

#[tokio::test]
async fn token_without_a_pod_has_no_self() {
    let sandbox = Sandbox::start(&[]).await;
    let mut client = sandbox.client().await;
    let mut claims = claims();
    claims["kubernetes.io"] = serde_json::json!({"namespace": "shop"});
    client.token = Some(sandbox.issuer.sign(&claims));
    let mut discover = client.discover().await;
    assert_eq!(discover.capabilities, "backend");
    discover.subscribe_to(ResourceType::Self_, "").await;
    let status = discover.answer().await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::FailedPrecondition);
    assert!(status.message().contains("not bound to a pod"), "{status}");
}

/// A proxy that was started by hand in such a pod uses its own flags.
#[tokio::test]
async fn pod_without_an_injected_proxy_has_no_self() {
    let plain = own_pod("1", "").replace("SERVICE_MESH_TOKEN_FILE", "OTHER");
    let sandbox = Sandbox::start(&[("pod.yaml", plain)]).await;
    let discover = sandbox.client().await.discover().await;
    assert_eq!(discover.capabilities, "backend");
}

#[tokio::test]
async fn backend_is_a_service_port_by_its_name() {
    let sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1"]))]).await;
    let mut discover = sandbox.client().await.discover().await;
    for (name, expected) in [
        ("shop/web:80", "service shop/web [10.0.0.1:8080]"),
        ("shop/web:81", "unknown"),
        ("shop/api:80", "unknown"),
    ] {
        discover.subscribe_to(ResourceType::Backend, name).await;
        let update = discover.answer().await.unwrap();
        assert_eq!(say(&update), format!("{name}: {expected}"));
        assert_eq!(update.r#type(), ResourceType::Backend);
    }
    sandbox.write("web.yaml", &web(&["10.0.0.2"]));
    let expected = "shop/web:80: +[10.0.0.2:8080] -[10.0.0.1:8080]";
    assert_eq!(discover.said().await, expected);
    let long = format!("shop/{}:80", "x".repeat(126));
    for name in ["shop/web", "web:80", "/web:80", "shop/web:0", &long] {
        let mut discover = sandbox.client().await.discover().await;
        discover.subscribe_to(ResourceType::Backend, name).await;
        let status = discover.answer().await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument, "{name}");
        assert!(
            status.message().contains("NAMESPACE/SERVICE:PORT"),
            "{status}"
        );
    }
}

#[tokio::test]
async fn resource_types_and_actions_of_later_releases_are_ignored() {
    let sandbox = Sandbox::start(&[]).await;
    let mut discover = sandbox.client().await.discover().await;
    let later = proto::Subscribe {
        name: "shop/web".into(),
        r#type: 77,
        ..proto::Subscribe::default()
    };
    discover.send(Action::Subscribe(later)).await;
    let empty = proto::DiscoverRequest { action: None };
    discover.requests.send(empty).await.unwrap();
    discover.subscribe("192.0.2.1:80", "").await;
    assert_eq!(discover.said().await, "192.0.2.1:80: unknown");
}

/// Serves keys at the returned URL, with a certificate of the returned CA. Tells the time of each
/// request.
async fn serve_keys(keys: String) -> (String, String, mpsc::Receiver<Instant>) {
    let server = authority::server("localhost");
    let tls = TlsAcceptor::from(Arc::new(server.config));
    let (listener, address) = listen().await;
    let url = format!("https://localhost:{}/keys", address.port());
    let (sender, requests) = mpsc::channel(16);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = tls.accept(stream).await.unwrap();
            read_until(&mut stream, "\r\n\r\n").await;
            let length = keys.len();
            let response = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{keys}");
            stream.write_all(response.as_bytes()).await.unwrap();
            let _ = stream.shutdown().await;
            let _ = sender.send(Instant::now()).await;
        }
    });
    (url, server.root, requests)
}

#[tokio::test]
async fn keys_that_a_proxy_lacks_are_fetched_long_before_their_time() {
    let (url, root, mut requests) = serve_keys(Signer::named("old").jwks()).await;
    let policy = format!(
        "apiVersion: diy-service-mesh.dev/v1alpha1
kind: AuthorizationPolicy
metadata: {{name: tokens, namespace: shop}}
spec:
  targetRefs: [{{kind: Pod, selector: {{}}}}]
  action: ALLOW
  issuers:
  - {{issuer: 'https://id.example.com', audiences: [shop], keys: {{type: URL, url: '{url}'}}}}
  rules: [{{}}]
"
    );
    let manifests = [("pod.yaml", own_pod("1", "")), ("policy.yaml", policy)];
    let sandbox = Sandbox::start_with(&manifests, |config| {
        config.private_key_urls = vec![url];
        std::fs::write(&config.key_roots_file, root).unwrap();
    })
    .await;
    let mut request = async || soon(requests.recv()).await;
    let first = request().await.unwrap();
    let discover = sandbox.client().await.discover().await;
    // The controller learns when the response has arrived, and reads a report every 5 seconds.
    let reports = async {
        loop {
            let issuers = vec!["https://id.example.com".to_owned(); 1000];
            let keys = proto::UnknownKeys { issuers };
            discover.send(Action::UnknownKeys(keys)).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let second = tokio::select! {
        second = request() => second.unwrap(),
        () = reports => unreachable!("it never ends"),
    };
    assert!(
        second - first >= Duration::from_secs(9),
        "{:?}",
        second - first
    );
}

#[tokio::test]
async fn rejections_are_counted() {
    let sandbox = Sandbox::start(&[]).await;
    let mut discover = sandbox.client().await.discover().await;
    for rejection in ["", "unknown inbound mode 7"] {
        let acknowledgement = proto::Acknowledgement {
            r#type: ResourceType::Self_.into(),
            rejection: rejection.into(),
            ..proto::Acknowledgement::default()
        };
        discover
            .send(Action::Acknowledgement(acknowledgement))
            .await;
    }
    discover.subscribe("192.0.2.1:80", "").await;
    discover.said().await;
    let (_, metrics) = sandbox.admin("/metrics").await;
    for result in ["accepted", "rejected"] {
        let line = format!("diy_mesh_controller_acknowledgements_total{{result=\"{result}\"}} 1\n");
        assert!(metrics.contains(&line), "{metrics}");
    }
}

#[tokio::test]
async fn known_version_is_not_sent_again_by_another_replica() {
    let manifests = [("web.yaml", web(&["10.0.0.1"]))];
    let one = Sandbox::start(&manifests).await;
    let mut discover = one.client().await.discover().await;
    discover.subscribe("10.96.0.7:80", "").await;
    let version = discover.answer().await.unwrap().version;
    drop(discover);

    let other = Sandbox::start(&manifests).await;
    let mut discover = other.client().await.discover().await;
    discover.subscribe("10.96.0.7:80", &version).await;
    let answer = discover.answer().await.unwrap();
    assert_eq!(
        (say(&answer).as_str(), answer.version),
        ("10.96.0.7:80: unchanged", version)
    );
    // From there on, deltas.
    other.write("web.yaml", &web(&["10.0.0.1", "10.0.0.2"]));
    assert_eq!(discover.said().await, "10.96.0.7:80: +[10.0.0.2:8080] -[]");
    // And what is not current is sent whole.
    discover.subscribe("10.96.0.7:80", "something else").await;
    assert_eq!(
        discover.said().await,
        "10.96.0.7:80: service shop/web [10.0.0.1:8080 10.0.0.2:8080]"
    );
}

#[tokio::test]
async fn unsubscription_ends_updates_of_one_destination() {
    let sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1"]))]).await;
    let mut discover = sandbox.client().await.discover().await;
    discover.subscribe("10.96.0.7:80", "").await;
    discover.said().await;
    discover.unsubscribe("10.96.0.7:80").await;
    // The answer to this shows that the line before was read.
    discover.subscribe("192.0.2.1:80", "").await;
    assert_eq!(discover.said().await, "192.0.2.1:80: unknown");
    sandbox.write("web.yaml", &web(&["10.0.0.2"]));
    sandbox.write("more.yaml", &pod_manifest("late", "192.0.2.1"));
    assert_eq!(
        discover.said().await,
        "192.0.2.1:80: pod shop/late [192.0.2.1:80]"
    );
}

#[tokio::test]
async fn rejects_invalid_destination_with_its_value() {
    let sandbox = Sandbox::start(&[]).await;
    let mut discover = sandbox.client().await.discover().await;
    discover.subscribe("web.shop:80", "").await;
    let status = discover.answer().await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
    assert!(
        status.message().contains("\"web.shop:80\""),
        "{}",
        status.message()
    );
}

#[tokio::test]
async fn change_reaches_every_subscriber() {
    let sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1"]))]).await;
    let mut streams = Vec::new();
    for uid in 0..20 {
        let mut client = sandbox.pod(uid).await;
        for _ in 0..10 {
            let mut discover = client.discover().await;
            discover.subscribe("10.96.0.7:80", "").await;
            discover.said().await;
            streams.push(discover);
        }
    }
    sandbox.write("web.yaml", &web(&["10.0.0.1", "10.0.0.2"]));
    for discover in &mut streams {
        assert_eq!(discover.said().await, "10.96.0.7:80: +[10.0.0.2:8080] -[]");
    }
    let (_, metrics) = sandbox.admin("/metrics").await;
    assert!(
        metrics.contains("subscriptions{of=\"resources\"} 1\n")
            && metrics.contains("of=\"subscribers\"} 200\n"),
        "{metrics}"
    );
}

#[tokio::test]
async fn client_with_closed_requests_receives_updates() {
    let sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1"]))]).await;
    let mut discover = sandbox.client().await.discover().await;
    discover.subscribe("10.96.0.7:80", "").await;
    discover.said().await;
    let (requests, _) = tokio::sync::mpsc::channel(1);
    drop(std::mem::replace(&mut discover.requests, requests));
    sandbox.write("web.yaml", &web(&["10.0.0.2"]));
    assert_eq!(
        discover.said().await,
        "10.96.0.7:80: +[10.0.0.2:8080] -[10.0.0.1:8080]"
    );
}

#[tokio::test]
async fn serves_ten_thousand_subscriptions_and_rejects_more() {
    let sandbox = Sandbox::start(&[]).await;
    let mut discover = sandbox.client().await.discover().await;
    // Written without reading in between: the stream must not get stuck on answers that nobody
    // reads yet.
    for number in 0..10_000 {
        discover
            .subscribe(&format!("10.1.{}.{}:80", number / 250, number % 250), "")
            .await;
    }
    discover.subscribe("10.1.0.0:80", "").await;
    for _ in 0..10_000 {
        assert!(discover.said().await.ends_with(": unknown"));
    }
    discover.subscribe("10.2.0.0:80", "").await;
    let status = loop {
        if let Err(status) = discover.answer().await {
            break status;
        }
    };
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    assert!(
        status.message().contains("10000 subscriptions"),
        "{}",
        status.message()
    );
}
