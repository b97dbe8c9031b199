//! GetServices and WatchServices over loopback: all Services, for people and tools.
#![allow(clippy::unwrap_used)]

mod support;

use diy_mesh_proto::mesh::v1 as proto;
use support::{DEADLINE, Sandbox, web};
use tonic::{Code, Streaming};

const OTHERS: &str = "apiVersion: v1
kind: Service
metadata: {name: out, namespace: shop}
spec: {type: ExternalName, externalName: example.org}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: shop}
spec: {clusterIP: None, clusterIPs: [None], ports: [{port: 5432}]}
---
apiVersion: v1
kind: Service
metadata: {name: both, namespace: shop}
spec:
  clusterIP: 10.96.0.8
  clusterIPs: [10.96.0.8, 'fd00::8']
  ports: [{name: web, port: 80, targetPort: web-port}, {name: dns, port: 53, protocol: UDP, targetPort: 5353}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: both-by-hand, namespace: shop, labels: {kubernetes.io/service-name: both}}
addressType: IPv6
ports: [{name: web, port: 8081}, {name: dns, port: 5353, protocol: UDP}]
endpoints:
- {addresses: ['fd01::1'], conditions: {ready: false}, zone: b}
- {addresses: ['fd01::2'], conditions: {ready: false, terminating: true}}
";

#[tokio::test]
async fn returns_services_with_all_fields() {
    let sandbox = Sandbox::start(&[
        ("others.yaml", OTHERS.into()),
        ("web.yaml", web(&["10.0.0.1"])),
    ])
    .await;
    let mut client = sandbox.client().await;
    let all = client.services(&[]).await.unwrap();
    assert_eq!(
        all.iter()
            .map(|service| service.name.as_str())
            .collect::<Vec<_>>(),
        ["both", "db", "out", "web"]
    );

    let [both, db, out, web] = &all[..] else {
        panic!("four Services")
    };
    assert_eq!(both.cluster_ips, ["10.96.0.8", "fd00::8"]);
    let port = |name: &str, port, target_port, protocol: &str, target_port_name: &str| {
        proto::service::Port {
            name: name.into(),
            port,
            target_port,
            protocol: protocol.into(),
            target_port_name: target_port_name.into(),
            app_protocol: String::new(),
        }
    };
    assert_eq!(
        both.ports,
        [
            port("web", 80, 0, "TCP", "web-port"),
            port("dns", 53, 5353, "UDP", "")
        ]
    );
    let [unready, leaving] = &both.endpoints[..] else {
        panic!("two endpoints")
    };
    assert_eq!(
        (unready.ready, unready.terminating, unready.zone.as_str()),
        (false, false, "b")
    );
    assert_eq!(
        unready.ports,
        [("web".to_owned(), 8081), ("dns".to_owned(), 5353)].into()
    );
    assert!(leaving.terminating && !leaving.ready);

    assert!(db.cluster_ips.is_empty());
    assert_eq!(
        (out.external_name.as_str(), out.cluster_ips.len()),
        ("example.org", 0)
    );
    assert_eq!(
        (
            web.endpoints[0].addresses[0].as_str(),
            web.endpoints[0].pod_name.as_str()
        ),
        ("10.0.0.1", "web-10-0-0-1")
    );
    assert!(web.endpoints[0].ready && !web.deleted && web.canaries.is_empty());
}

#[tokio::test]
async fn missing_service_is_deleted_and_invalid_name_is_an_error() {
    let sandbox = Sandbox::start(&[("web.yaml", web(&[]))]).await;
    let mut client = sandbox.client().await;
    let services = client.services(&["shop/web", "shop/nobody"]).await.unwrap();
    let gone = services
        .iter()
        .find(|service| service.name == "nobody")
        .unwrap();
    assert!(
        gone.deleted
            && !services
                .iter()
                .any(|service| service.name == "web" && service.deleted)
    );
    let status = client.services(&["web"]).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("\"web\""), "{}", status.message());
}

async fn next(stream: &mut Streaming<proto::WatchServicesResponse>) -> String {
    let response = tokio::time::timeout(DEADLINE, stream.message())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    match response.service {
        None => format!("synced {}", response.synced),
        Some(service) if service.deleted => format!("{} deleted", service.name),
        Some(service) => format!("{} {}", service.name, service.endpoints.len()),
    }
}

#[tokio::test]
async fn watch_returns_services_then_synced_then_changes() {
    let sandbox = Sandbox::start(&[
        ("others.yaml", OTHERS.into()),
        ("web.yaml", web(&["10.0.0.1"])),
    ])
    .await;
    let mut client = sandbox.client().await;
    let mut all = client.watch(&[]).await;
    let mut named = client.watch(&["shop/web", "shop/later"]).await;
    let mut seen = Vec::new();
    for _ in 0..5 {
        seen.push(next(&mut all).await);
    }
    assert_eq!(seen, ["both 2", "db 0", "out 0", "web 1", "synced true"]);
    assert_eq!(
        [
            next(&mut named).await,
            next(&mut named).await,
            next(&mut named).await
        ],
        ["later deleted", "web 1", "synced true"]
    );

    sandbox.write("web.yaml", &web(&["10.0.0.1", "10.0.0.2"]));
    assert_eq!(
        (
            next(&mut all).await.as_str(),
            next(&mut named).await.as_str()
        ),
        ("web 2", "web 2")
    );
    sandbox.write(
        "later.yaml",
        &web(&["10.0.0.1"])
            .replace("web", "later")
            .replace("10.96.0.7", "10.96.0.9"),
    );
    assert_eq!(
        (
            next(&mut all).await.as_str(),
            next(&mut named).await.as_str()
        ),
        ("later 1", "later 1")
    );
    sandbox.remove("web.yaml");
    assert_eq!(
        (
            next(&mut all).await.as_str(),
            next(&mut named).await.as_str()
        ),
        ("web deleted", "web deleted")
    );
}

#[tokio::test]
async fn watch_of_an_empty_catalog_is_synced_at_once() {
    let sandbox = Sandbox::start(&[]).await;
    let mut client = sandbox.client().await;
    let mut all = client.watch(&[]).await;
    assert_eq!(next(&mut all).await, "synced true");
}

#[tokio::test]
async fn invalid_file_keeps_its_previous_content() {
    let sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1"]))]).await;
    let mut client = sandbox.client().await;
    let mut all = client.watch(&[]).await;
    assert_eq!(
        [next(&mut all).await, next(&mut all).await],
        ["web 1", "synced true"]
    );
    sandbox.write("web.yaml", "kind: [");
    sandbox.write("others.yaml", OTHERS);
    let mut seen = [
        next(&mut all).await,
        next(&mut all).await,
        next(&mut all).await,
    ];
    seen.sort();
    assert_eq!(seen, ["both 2", "db 0", "out 0"]);
    assert_eq!(
        client.services(&["shop/web"]).await.unwrap()[0]
            .endpoints
            .len(),
        1
    );
}
