//! How long the locks of the index and of the subscribers are held, in a large cluster and while one
//! namespace does its worst: `cargo bench -p diy-mesh-controller`. The goal is 20 ms.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use diy_mesh_controller::catalog::Change;
use diy_mesh_controller::index::Resource;
use diy_mesh_controller::kinds::authorization::parse;
use diy_mesh_controller::kinds::pod::Inbound;
use diy_mesh_controller::kinds::policy::parse::policy;
use diy_mesh_controller::kinds::route::parse::route;
use diy_mesh_controller::kinds::service::{ServicePort, TargetPort, Transport};
use diy_mesh_controller::kinds::slice::{PodReference, SliceEndpoint, SlicePort};
use diy_mesh_controller::kinds::{Object, Pod, Service, Slice};
use diy_mesh_controller::object::{Key, Kind, Meta, PodRef};
use diy_mesh_controller::publish::{Hub, Resources};
use serde_json::json;

const SERVICES: u32 = 5_000;
const PODS_OF_EACH: u32 = 10;
const NAMESPACES: u32 = 500;
/// Subscribers to each tenth Service.
const SUBSCRIBERS: u32 = 20;

fn namespace(service: u32) -> String {
    format!("ns-{}", service % NAMESPACES)
}

fn cluster_ip(service: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x0a60_0000 + service)
}

fn ports(count: u16) -> impl Iterator<Item = (String, u16)> {
    (1..=count).map(|port| (format!("p{port:04}"), port))
}

fn service(namespace: &str, name: &str, ip: Ipv4Addr, count: u16) -> Object {
    let port = |(name, port)| ServicePort {
        name,
        port,
        node_port: None,
        target: TargetPort::Number(port),
        protocol: Transport::Tcp,
        app_protocol: String::new(),
    };
    Object::Service(Service {
        key: Key::new(namespace, name),
        uid: "".into(),
        is_headless: false,
        selector: [("app".to_owned(), name.to_owned())].into(),
        cluster_ips: vec![ip.into()],
        external_ips: vec![],
        external_local: false,
        created: 0,
        ports: ports(count).map(port).collect(),
        excess: None,
        external_name: "".into(),
        publish_not_ready: false,
        local_only: false,
        session_affinity: 0,
        canary: None,
    })
}

fn slice(
    namespace: &str,
    name: &str,
    count: u16,
    pods: impl Iterator<Item = (String, IpAddr)>,
) -> Object {
    let endpoint = |(name, address): (String, IpAddr)| SliceEndpoint {
        address,
        ready: true,
        serving: true,
        terminating: false,
        node: "n".into(),
        zone: "z".into(),
        node_hints: Box::default(),
        zone_hints: Box::default(),
        pod: (!name.is_empty()).then(|| PodReference {
            key: Key::new(namespace, &name),
            uid: "".into(),
        }),
    };
    let port = |(name, port)| SlicePort {
        name,
        port,
        protocol: Transport::Tcp,
    };
    Object::Slice(Slice {
        key: Key::new(namespace, &format!("{name}-1")),
        service: Some(Key::new(namespace, name)),
        ports: ports(count).map(port).collect(),
        endpoints: pods.map(endpoint).collect(),
    })
}

fn pod(namespace: &str, app: &str, name: &str, address: IpAddr, ready: bool) -> Object {
    Object::Pod(Pod {
        key: Key::new(namespace, name),
        uid: "".into(),
        addresses: vec![address],
        host_network: false,
        terminating: false,
        ready,
        unready_by_node: false,
        created: 0,
        node: "n".into(),
        zone: "z".into(),
        identity: Some(format!("spiffe://cluster.local/ns/{namespace}/sa/web").into()),
        bypassed: Default::default(),
        restricts_udp: false,
        inbound: Inbound::default(),
        labels: [("app".to_owned(), app.to_owned())].into(),
    })
}

fn http_route(namespace: &str, name: &str, parent: &serde_json::Value, rules: usize) -> Object {
    let rule = |number: usize| json!({"matches": [{"path": {"type": "PathPrefix", "value": format!("/{name}/{number}")}}]});
    let rules: Vec<_> = (0..rules).map(rule).collect();
    let spec = json!({"parentRefs": [parent], "rules": rules});
    let route = route(meta(Kind::HttpRoute, namespace, name), &spec.to_string()).expect("a route");
    assert!(route.content.is_ok(), "{route:?}");
    Object::Route(route)
}

fn rate_limit(namespace: &str, requests: u32) -> Object {
    let limit = json!({"requests": requests, "interval": "1s"});
    let target = json!({"group": "", "kind": "Namespace", "name": namespace});
    let spec = json!({"targetRefs": [target], "rateLimits": [limit]}).to_string();
    let policy = policy(meta(Kind::TrafficPolicy, namespace, "limits"), &spec).expect("a policy");
    assert!(policy.content.is_ok(), "{policy:?}");
    Object::Policy(policy)
}

/// A policy for the pods of an application, or for all of the namespace.
fn authorization(namespace: &str, name: &str, app: Option<&str>, action: &str) -> Object {
    let selector = app.map_or(json!({}), |app| json!({"matchLabels": {"app": app}}));
    let source = json!({"type": "Namespace", "namespace": "bank"});
    let spec = json!({
        "targetRefs": [{"kind": "Pod", "selector": selector}],
        "action": action,
        "rules": [{"sources": [source]}],
    });
    let meta = meta(Kind::Authorization, namespace, name);
    let policy = parse::policy(meta, &spec.to_string(), "null", "cluster.local");
    assert!(policy.rejection().is_none(), "{policy:?}");
    Object::Authorization(policy)
}

fn meta(kind: Kind, namespace: &str, name: &str) -> Meta {
    Meta {
        kind,
        key: Key::new(namespace, name),
        uid: "".into(),
        created: 0,
        generation: 1,
        bytes: 100,
        dropped: None,
    }
}

/// Pods of a Service: names and addresses.
fn pods(service: u32) -> impl Iterator<Item = (String, IpAddr)> {
    (0..PODS_OF_EACH).map(move |pod| {
        let number = service * PODS_OF_EACH + pod;
        let address = Ipv4Addr::from_bits(0x0a80_0000 + number);
        (format!("pod-{number}"), address.into())
    })
}

/// Applies changes, and prints the time that they take, and the longest holds so far.
fn measure(hub: &Hub, what: &str, changes: impl IntoIterator<Item = Change>) {
    let begin = Instant::now();
    hub.apply(changes);
    print(hub, what, begin);
}

fn print(hub: &Hub, what: &str, begin: Instant) {
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    let [index, shared, subscribers] = hub.longest_holds().map(millis);
    println!(
        "{what:60} {:9.1} ms   longest holds so far: index {index:6.2} ms, shared {shared:6.2} ms, \
         subscribers {subscribers:6.2} ms",
        millis(begin.elapsed())
    );
}

fn apply(object: Object) -> Change {
    Change::Apply(object)
}

fn subscribe(hub: &Hub, addresses: impl Iterator<Item = SocketAddr>) -> Resources {
    let mut subscriber = hub.watch_resources(None);
    for address in addresses {
        subscriber.subscribe(&Resource::Destination(address));
    }
    subscriber
}

/// The proxies of the pods of a Service, each with 20 subscriptions, which it acknowledges.
fn proxies(hub: &Hub, service: u32) -> impl Iterator<Item = Resources> {
    pods(service).map(move |(name, _)| {
        let pod = Key::new(&namespace(service), &name);
        let mut proxy = hub.watch_resources(Some(PodRef {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: "".into(),
        }));
        proxy.subscribe(&Resource::Workload(pod, "".into()));
        for other in (0..SERVICES)
            .skip(service as usize % 250)
            .step_by(250)
            .take(19)
        {
            let address = SocketAddr::new(cluster_ip(other).into(), 1);
            proxy.subscribe(&Resource::Destination(address));
        }
        while let Some((resource, state)) = proxy.next() {
            proxy.acknowledge(&resource, state.rest, None);
        }
        proxy
    })
}

fn main() {
    let hub = Hub::default();
    let all = 0..SERVICES;
    let services = all
        .clone()
        .map(|one| service(&namespace(one), &format!("s{one}"), cluster_ip(one), 2));
    let list = |kind, objects: Vec<Object>| [Change::Reset(kind, objects)];
    measure(
        &hub,
        "list of 5,000 Services",
        list(Kind::Service, services.collect()),
    );
    let of_service = |one: u32| {
        pods(one).map(move |(name, ip)| pod(&namespace(one), &format!("s{one}"), &name, ip, true))
    };
    let objects: Vec<Object> = all.clone().flat_map(of_service).collect();
    measure(&hub, "list of 50,000 pods", list(Kind::Pod, objects));
    let slices = all
        .clone()
        .map(|one| slice(&namespace(one), &format!("s{one}"), 2, pods(one)));
    measure(
        &hub,
        "list of 5,000 EndpointSlices",
        list(Kind::Slice, slices.collect()),
    );
    let parent = |name: &str| json!({"group": "", "kind": "Service", "name": name});
    let routes = all.map(|one| {
        http_route(
            &namespace(one),
            &format!("r{one}"),
            &parent(&format!("s{one}")),
            4,
        )
    });
    measure(
        &hub,
        "list of 5,000 HTTPRoutes",
        list(Kind::HttpRoute, routes.collect()),
    );
    let limits = (0..NAMESPACES).map(|one| rate_limit(&format!("ns-{one}"), 100));
    measure(
        &hub,
        "500 rate limits of namespaces",
        list(Kind::TrafficPolicy, limits.collect()),
    );
    let policies = (0..NAMESPACES).flat_map(|one| {
        let one = format!("ns-{one}");
        (0..20).map(move |policy| authorization(&one, &format!("p{policy}"), None, "ALLOW"))
    });
    measure(
        &hub,
        "list of 10,000 AuthorizationPolicies of 500 namespaces",
        list(Kind::Authorization, policies.collect()),
    );
    let subscribers: Vec<Resources> = (0..SUBSCRIBERS)
        .map(|_| {
            let every = (0..SERVICES).step_by(10);
            subscribe(
                &hub,
                every.map(|one| SocketAddr::new(cluster_ip(one).into(), 1)),
            )
        })
        .collect();
    let proxies: Vec<Resources> = (0..SERVICES)
        .step_by(10)
        .flat_map(|one| proxies(&hub, one))
        .collect();
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let runtime = runtime.expect("a runtime");
    for _ in 0..2 {
        let begin = Instant::now();
        runtime.block_on(hub.review());
        print(
            &hub,
            "a review of 5,000 proxies, 100,000 subscriptions",
            begin,
        );
    }
    let (name, ip) = pods(0).next().expect("a pod");
    for ready in [false, true] {
        let pod = pod("ns-0", "s0", &name, ip, ready);
        measure(&hub, "a pod that becomes unready, and ready", [apply(pod)]);
    }
    let changed = http_route("ns-0", "r0", &parent("s0"), 5);
    measure(&hub, "a changed HTTPRoute", [apply(changed)]);
    measure(
        &hub,
        "another rate limit of a namespace",
        [apply(rate_limit("ns-0", 50))],
    );
    let fewer = slice("ns-0", "s0", 2, pods(0).skip(1));
    measure(&hub, "an endpoint that leaves", [apply(fewer)]);
    let changed = authorization("ns-0", "p0", None, "DENY");
    measure(&hub, "a changed AuthorizationPolicy", [apply(changed)]);

    let ip = cluster_ip(SERVICES);
    let addresses =
        || (0..1000).map(|one| (String::new(), Ipv4Addr::from_bits(0x0b00_0000 + one).into()));
    let wide = [
        service("hostile", "wide", ip, 1000),
        slice("hostile", "wide", 1000, addresses()),
    ];
    measure(
        &hub,
        "hostile: 1,000 ports with 1,000 addresses",
        wide.map(apply),
    );
    let ports = (1..=1000).map(|port| SocketAddr::new(ip.into(), port));
    let hostile: Vec<Resources> = (0..2).map(|_| subscribe(&hub, ports.clone())).collect();
    let fewer = slice("hostile", "wide", 1000, addresses().skip(1));
    measure(
        &hub,
        "hostile: one of them leaves, with 2,000 subscriptions",
        [apply(fewer)],
    );
    let routes = (0..5000).map(|one| http_route("hostile", &format!("r{one}"), &parent("wide"), 1));
    measure(
        &hub,
        "hostile: 5,000 HTTPRoutes at this Service",
        routes.map(apply),
    );
    measure(
        &hub,
        "hostile: one more",
        [apply(http_route("hostile", "more", &parent("wide"), 1))],
    );
    let own = (1..=1000).map(|port| {
        let mut parent = parent("wide");
        parent["port"] = json!(port);
        http_route("hostile", &format!("a{port}"), &parent, 1)
    });
    measure(
        &hub,
        "hostile: an HTTPRoute of its own for each port",
        own.map(apply),
    );
    let slices = |ports: u16, pods: u32| {
        let one = move |number: u32| {
            let addresses = (0..pods).map(move |pod| {
                let address = Ipv4Addr::from_bits(0x0c00_0000 + number * pods + pod);
                (String::new(), address.into())
            });
            let mut slice = slice("hostile", "many", ports, addresses);
            if let Object::Slice(slice) = &mut slice {
                slice.key = Key::new("hostile", &format!("many-{number:04}"));
            }
            slice
        };
        (0..1000).map(move |number| apply(one(number)))
    };
    let many = SocketAddr::new(cluster_ip(SERVICES + 1).into(), 1);
    let service = service("hostile", "many", cluster_ip(SERVICES + 1), 1000);
    measure(
        &hub,
        "hostile: a Service with 1,000 ports",
        [apply(service)],
    );
    let one = subscribe(&hub, [many].into_iter());
    let what = "hostile: 1,000 EndpointSlices with 1,000 ports";
    measure(&hub, what, slices(1000, 1));
    let what = "hostile: 1,000 EndpointSlices with 1,000 endpoints";
    measure(&hub, what, slices(1, 1000));
    measure(&hub, "hostile: one of them again", slices(1, 999).take(1));
    hostile_policies(&hub);
    drop((subscribers, proxies, hostile, one));
}

/// 1,000 subscribed pods of one namespace, with 10,000 policies.
fn hostile_policies(hub: &Hub) {
    let name = |number: u32| format!("pod-{number}");
    let pods = (0..1000).map(|number| {
        let address = Ipv4Addr::from_bits(0x0d00_0000 + number);
        pod(
            "hostile",
            &format!("a{}", number % 100),
            &name(number),
            address.into(),
            true,
        )
    });
    measure(hub, "hostile: 1,000 pods", pods.map(apply));
    let mut proxies: Vec<Resources> = (0..1000)
        .map(|number| {
            let mut proxy = hub.watch_resources(None);
            proxy.subscribe(&Resource::Workload(
                Key::new("hostile", &name(number)),
                "".into(),
            ));
            proxy
        })
        .collect();
    let policies = (0..10_000).map(|number| {
        let app = format!("a{}", number % 100);
        authorization("hostile", &format!("p{number}"), Some(&app), "ALLOW")
    });
    measure(
        hub,
        "hostile: 10,000 AuthorizationPolicies",
        policies.map(apply),
    );
    for (what, app) in [("an application", Some("a7")), ("all pods", None)] {
        let begin = Instant::now();
        hub.apply([apply(authorization("hostile", "p7", app, "DENY"))]);
        for proxy in &mut proxies {
            while proxy.next().is_some() {}
        }
        print(
            hub,
            &format!("hostile: one of them changes for {what}, with its states"),
            begin,
        );
    }
}
