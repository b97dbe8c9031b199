//! GetServices, WatchServices, GetIdentity, GetEdges and GetTraffic over loopback, for people and tools: what they
//! contain, their pages, and the namespaces that a caller gets.
#![allow(clippy::unwrap_used)]

mod support;

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_testkit::wait::soon;
use proto::discover_request::Action;
use support::{Client, Discover, Sandbox, pod_manifest, web};
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

const VIEWER: &str = "system:serviceaccount:service-mesh:mesh-viewer";

#[tokio::test]
async fn callers_get_their_own_namespace_and_the_viewer_all() {
    let other = web(&["10.0.0.9"]).replace("shop", "other");
    let other = other.replace("10.96.0.7", "10.96.0.9");
    let files = [
        ("web.yaml", web(&["10.0.0.1"])),
        ("other.yaml", other.clone()),
    ];
    let sandbox = Sandbox::start(&files).await;
    let names = |services: Vec<proto::Service>| -> Vec<String> {
        let services = services.into_iter();
        let names = services.map(|service| format!("{}/{}", service.namespace, service.name));
        names.collect()
    };
    let (mut shop, mut viewer) = (sandbox.client().await, sandbox.account(VIEWER).await);
    let proxy = sandbox.pod(1).await.discover().await;
    let account = "system:serviceaccount:other:web";
    let unbound = sandbox.account(account).await.discover().await;
    assert_eq!(names(shop.services(&[]).await.unwrap()), ["shop/web"]);
    assert_eq!(
        names(viewer.services(&[]).await.unwrap()),
        ["other/web", "shop/web"]
    );
    let named = ["shop/web", "other/web"];
    let denied = shop.services(&named).await.unwrap_err();
    assert_eq!(denied.code(), Code::PermissionDenied);
    assert!(denied.message().contains("\"other/web\""), "{denied:?}");
    assert_eq!(viewer.services(&named).await.unwrap().len(), 2);

    let mut watch = shop.watch(&[]).await;
    assert_eq!(
        [next(&mut watch).await, next(&mut watch).await],
        ["web 1", "synced true"]
    );
    // Changes of other namespaces are not sent.
    sandbox.write("other.yaml", &other.replace("10.0.0.9", "10.0.0.8"));
    sandbox.write("web.yaml", &web(&["10.0.0.1", "10.0.0.2"]));
    assert_eq!(next(&mut watch).await, "web 2");

    let (own, all) = (shop.identity().await.unwrap(), viewer.identity().await);
    let all = all.unwrap();
    let pods = |page: &proto::GetIdentityResponse| -> Vec<String> {
        let workloads = page.workloads.iter();
        let names = workloads.map(|workload| format!("{}/{}", workload.namespace, workload.pod));
        names.collect()
    };
    assert_eq!(
        (own.namespace.as_str(), all.namespace.as_str()),
        ("shop", "")
    );
    assert_eq!(pods(&own), ["shop/web-1"]);
    assert_eq!(pods(&all), ["shop/web-1".to_owned(), format!("/{account}")]);
    assert_eq!(own.roots, all.roots);
    drop((proxy, unbound));

    let mut person = sandbox.account("admin").await;
    let denied = person.identity().await.unwrap_err();
    assert_eq!(denied.code(), Code::PermissionDenied);
    assert!(denied.message().contains("mesh-viewer"), "{denied:?}");
    for path in ["/identity", "/services"] {
        assert_eq!(sandbox.admin(path).await.0, 404);
    }
}

/// A proxy reports about the group of its own pod, whatever it sends.
#[tokio::test]
async fn edges_are_those_of_the_pod_of_the_token_and_are_told_to_its_namespace() {
    let pod = |name: &str, uid: &str| {
        let pod = pod_manifest(name, "10.0.0.1");
        pod.replace(
            "namespace: shop",
            &format!("namespace: shop, uid: '{uid}', labels: {{a: b}}"),
        )
    };
    let sandbox = Sandbox::start(&[("web.yaml", pod("web-1", "1") + &pod("web-2", "9"))]).await;
    let edge = |port| proto::Edge {
        port,
        ..proto::Edge::default()
    };
    let edges = |ports: &[u32]| {
        Action::Edges(proto::Edges {
            edges: ports.iter().copied().map(edge).collect(),
            incomplete: false,
        })
    };
    // The second pod is the successor of the one that the token is bound to.
    for (uid, ports) in [(2, &[9090][..]), (1, &[8080, 0, 8080])] {
        let mut proxy = sandbox.pod(uid).await.discover().await;
        let announced = proxy.capabilities.split(',').any(|word| word == "edges");
        assert!(announced, "{}", proxy.capabilities);
        proxy.send(edges(ports)).await;
        // Requests are read in their order.
        proxy.subscribe("10.9.9.9:80", "").await;
        assert_eq!(proxy.said().await, "10.9.9.9:80: unknown");
    }
    let get = async |mut client: Client, namespace: &str| {
        let request = client.request(proto::GetEdgesRequest {
            namespace: namespace.into(),
            page_token: String::new(),
        });
        let page = client.client.get_edges(request).await?.into_inner();
        assert_eq!(page.next_page_token, "");
        Ok::<_, tonic::Status>(page.groups)
    };
    let groups = get(sandbox.client().await, "").await.unwrap();
    let [group] = &groups[..] else {
        panic!("expected one group: {groups:?}");
    };
    assert_eq!(
        (&*group.namespace, &*group.service_account),
        ("shop", "web")
    );
    assert_eq!(group.labels["a"], "b");
    let seen: Vec<_> = group.edges.iter().map(|seen| seen.edge.clone()).collect();
    assert_eq!((seen, group.incomplete), (vec![Some(edge(8080))], true));
    let viewer = || sandbox.account(VIEWER);
    assert_eq!(get(viewer().await, "shop").await.unwrap(), groups);
    assert_eq!(get(viewer().await, "other").await.unwrap(), []);
    let other = || sandbox.account("system:serviceaccount:other:web");
    assert_eq!(get(other().await, "").await.unwrap(), []);
    let denied = get(other().await, "shop").await.unwrap_err();
    assert_eq!(denied.code(), Code::PermissionDenied);
}

/// While someone watches, proxies that know this report each second.
#[tokio::test]
async fn traffic_is_told_to_those_who_may_list_its_pods_and_reported_often_while_they_watch() {
    let pod = pod_manifest("web-1", "10.0.0.1").replace(
        "namespace: shop",
        "namespace: shop, uid: '1', labels: {controller-revision-hash: web-7f9}",
    );
    let slice = |namespace: &str, name: &str, service: &str| {
        format!(
            "---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {name}, namespace: {namespace}, labels: {{kubernetes.io/service-name: {service}}}}}
addressType: IPv4
ports: [{{port: 8080}}]
endpoints: [{{addresses: [10.0.0.1], targetRef: {{kind: Pod, name: web-1, namespace: shop}}}}]
"
        )
    };
    let slices = [
        slice("shop", "front-1", "front"),
        slice("shop", "front-2", "front"),
        slice("shop", "all-1", "all"),
        slice("other", "foreign-1", "foreign"),
    ];
    let sandbox = Sandbox::start(&[("web.yaml", pod + &slices.concat())]).await;
    let mut client = sandbox.pod(1).await;
    client.announced = Some("chunks, traffic");
    let mut proxy = client.discover().await;
    assert!(
        proxy.capabilities.contains("traffic"),
        "{}",
        proxy.capabilities
    );
    let report = async |proxy: &mut Discover, bytes: Vec<u8>| {
        proxy.send(Action::Traffic(bytes)).await;
        // Requests are read in their order.
        proxy.subscribe("10.9.9.9:80", "").await;
        assert_eq!(proxy.said().await, "10.9.9.9:80: unknown");
        proxy.unsubscribe("10.9.9.9:80").await;
    };
    let get = async |mut client: Client, namespace: &str, watch| {
        let request = client.request(proto::GetTrafficRequest {
            namespace: namespace.into(),
            watch,
            page_token: String::new(),
        });
        let page = client.client.get_traffic(request).await?.into_inner();
        assert_eq!(page.next_page_token, "");
        Ok::<_, tonic::Status>(page.pods)
    };
    let viewer = || sandbox.account(VIEWER);
    assert_eq!(get(viewer().await, "", false).await.unwrap(), []);
    report(&mut proxy, b"opaque".to_vec()).await;
    let expected = proto::get_traffic_response::Pod {
        namespace: "shop".into(),
        name: "web-1".into(),
        workload: "web".into(),
        traffic: b"opaque".to_vec(),
        services: vec!["all".into(), "front".into()],
    };
    assert_eq!(get(viewer().await, "", true).await.unwrap().len(), 1);
    assert_eq!(get(viewer().await, "other", true).await.unwrap(), []);
    let other = || sandbox.account("system:serviceaccount:other:web");
    assert_eq!(get(other().await, "", false).await.unwrap(), []);
    let denied = get(other().await, "shop", true).await.unwrap_err();
    assert_eq!(denied.code(), Code::PermissionDenied);
    assert_eq!(get(viewer().await, "shop", true).await.unwrap(), [expected]);
    // The other calls have not said so.
    assert_eq!(proxy.said().await, ": report for 15 s");
    report(&mut proxy, vec![0; 8193]).await;
    assert_eq!(get(viewer().await, "", false).await.unwrap(), []);
}

#[tokio::test]
async fn services_come_in_pages() {
    let large = |name: &str, address: &str| {
        let service = web(&[]).replace("web", name).replace("10.96.0.7", address);
        let slices = (0..15).map(|slice| {
            let endpoints = (0..1000).map(|one| {
                format!(
                    "- {{addresses: ['10.{slice}.{}.{}']}}\n",
                    one / 250,
                    one % 250
                )
            });
            format!(
                "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
                 metadata: {{name: {name}-{slice}, namespace: shop, \
                 labels: {{kubernetes.io/service-name: {name}}}}}\naddressType: IPv4\n\
                 ports: [{{name: a-name-of-a-port-with-sixty-characters-in-it-for-long-entries, \
                 port: 8080}}]\nendpoints:\n{}",
                endpoints.collect::<String>()
            )
        });
        format!("{service}{}", slices.collect::<String>())
    };
    let files = [
        ("a.yaml", large("a", "10.96.0.1")),
        ("b.yaml", large("b", "10.96.0.2")),
        ("c.yaml", web(&[]).replace("web", "c")),
    ];
    let sandbox = Sandbox::start(&files).await;
    let mut client = sandbox.client().await;
    let pages = client.pages_of_services(&[]).await.unwrap();
    let names = |page: &Vec<proto::Service>| page.iter().map(|one| one.name.clone()).collect();
    let pages: Vec<Vec<String>> = pages.iter().map(names).collect();
    assert_eq!(pages, [vec!["a"], vec!["b"], vec!["c"]]);
    let request = client.request(proto::GetServicesRequest {
        services: Vec::new(),
        page_token: "elsewhere".into(),
    });
    let status = client.client.get_services(request).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
}

/// A consumer's route has the names of another namespace in it.
#[tokio::test]
async fn routes_come_in_pages_to_callers_of_both_namespaces() {
    let ports: String = (1..=200)
        .map(|port| format!("{{name: p{port}, port: {port}}}, "))
        .collect();
    let matches = (0..64).map(|one| {
        format!(
            "{{path: {{type: Exact, value: /{one}{}}}}}, ",
            "x".repeat(400)
        )
    });
    let matches: String = matches.collect();
    let route = |namespace: &str| {
        format!(
            "apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {{name: of-{namespace}, namespace: {namespace}}}
spec:
  parentRefs: [{{group: '', kind: Service, name: web, namespace: shop}}]
  rules: [{{matches: [{matches}], backendRefs: [{{name: web, namespace: shop, port: 1}}]}}]
"
        )
    };
    let service = format!(
        "apiVersion: v1
kind: Service
metadata: {{name: web, namespace: shop}}
spec: {{clusterIP: 10.96.0.7, clusterIPs: [10.96.0.7], ports: [{ports}]}}
"
    );
    let files = [
        ("web.yaml", service),
        ("own.yaml", route("shop")),
        ("consumer.yaml", route("secret")),
    ];
    let sandbox = Sandbox::start(&files).await;
    let (mut shop, mut viewer) = (sandbox.client().await, sandbox.account(VIEWER).await);
    let request = |service: &str, clients: &str, page_token: &str| proto::GetRoutesRequest {
        service: service.into(),
        clients: clients.into(),
        page_token: page_token.into(),
    };
    for (service, clients, token, expected) in [
        ("shop/web", "secret", "", Code::PermissionDenied),
        ("secret/web", "", "", Code::PermissionDenied),
        ("secret/web", "shop", "", Code::PermissionDenied),
        ("shop/nobody", "", "", Code::NotFound),
        ("web", "", "", Code::InvalidArgument),
        ("shop/web", "", "-1", Code::InvalidArgument),
        (
            "shop/web",
            "",
            "99999999999999999999",
            Code::InvalidArgument,
        ),
    ] {
        let request = shop.request(request(service, clients, token));
        let denied = shop.client.get_routes(request).await.unwrap_err();
        assert_eq!(
            denied.code(),
            expected,
            "{service} {clients} {token}: {denied:?}"
        );
        assert!(!denied.message().contains("of-secret"), "{denied:?}");
    }
    let beyond = shop.request(request("shop/web", "", "5000"));
    let beyond = shop.client.get_routes(beyond).await.unwrap().into_inner();
    assert_eq!(
        (beyond.ports.len(), beyond.next_page_token.as_str()),
        (0, "")
    );

    let (mut ports, mut pages, mut token) = (Vec::new(), 0, String::new());
    loop {
        let request = shop.request(request("shop/web", "", &token));
        let page = shop.client.get_routes(request).await.unwrap().into_inner();
        assert!(prost::Message::encoded_len(&page) < 2 * 1024 * 1024);
        assert!(
            !format!("{page:?}").contains("of-secret"),
            "a name of another namespace"
        );
        ports.extend(page.ports.iter().map(|one| one.port));
        (pages, token) = (pages + 1, page.next_page_token);
        if token.is_empty() {
            break;
        }
    }
    assert!(pages > 3, "{pages} pages");
    assert_eq!(ports, (1..=200).collect::<Vec<_>>());
    let request = viewer.request(request("shop/web", "secret", ""));
    let page = viewer
        .client
        .get_routes(request)
        .await
        .unwrap()
        .into_inner();
    assert!(format!("{page:?}").contains("of-secret"));
}

async fn next(stream: &mut Streaming<proto::WatchServicesResponse>) -> String {
    let response = soon(stream.message()).await.unwrap().unwrap();
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

#[tokio::test]
async fn authorization_of_pods_comes_in_pages_for_callers_of_their_namespace() {
    let hosts: Vec<String> = (0..32)
        .map(|at| format!("{}.h{at}", "a".repeat(200)))
        .collect();
    let hosts = hosts.join(", ");
    let rules = format!("{{requests: [{{hosts: [{hosts}]}}]}}, ").repeat(35);
    let policy = format!(
        "apiVersion: diy-service-mesh.dev/v1alpha1
kind: AuthorizationPolicy
metadata: {{name: hosts, namespace: shop}}
spec: {{targetRefs: [{{kind: Pod, selector: {{}}}}], action: ALLOW, rules: [{rules}]}}
"
    );
    let ips: Vec<String> = (1..7).map(|at| format!("10.0.0.{at}")).collect();
    let ips: Vec<&str> = ips.iter().map(String::as_str).collect();
    let pods = web(&ips).replace("shop}\nspec: {s", "shop, labels: {app: web}}\nspec: {s");
    let pods = pods.replace("{clusterIP", "{selector: {app: web}, clusterIP");
    assert_eq!(pods.matches("app: web").count(), 7);
    let sandbox = Sandbox::start(&[("policy.yaml", policy), ("web.yaml", pods)]).await;
    let (mut shop, mut viewer) = (sandbox.client().await, sandbox.account(VIEWER).await);
    let ask = |target: &str, page_token: String| proto::GetAuthorizationRequest {
        target: target.to_owned(),
        port: 80,
        page_token,
    };
    let (mut names, mut pages, mut token) = (vec![], 0, String::new());
    loop {
        let request = shop.request(ask("shop/web", token));
        let page = shop
            .client
            .get_authorization(request)
            .await
            .unwrap()
            .into_inner();
        pages += 1;
        for pod in page.pods {
            let policies = pod.workload.unwrap().authorization.unwrap().policies;
            assert_eq!((policies[0].rules.len(), pod.ports), (35, vec![8080]));
            names.push(pod.name);
        }
        token = page.next_page_token;
        if token.is_empty() {
            break;
        }
    }
    let expected: Vec<String> = (1..7).map(|at| format!("web-10-0-0-{at}")).collect();
    assert_eq!((names, pages), (expected, 2));
    for (target, code) in [
        ("other/web", Code::PermissionDenied),
        ("shop/none", Code::NotFound),
        ("shop", Code::InvalidArgument),
    ] {
        let request = shop.request(ask(target, String::new()));
        let status = shop.client.get_authorization(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
    }
    let request = viewer.request(ask("other/web", String::new()));
    let status = viewer.client.get_authorization(request).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
}
