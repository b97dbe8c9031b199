//! Endpoints that are no pods, and the addresses of nodes.

use super::*;

/// The endpoints of Service `web` with whether each is outside of the cluster.
fn outside(index: &Index) -> Vec<(String, bool)> {
    let target = state(index, "10.96.0.1:80".parse().unwrap()).target;
    let endpoints = target.unwrap().endpoints;
    let endpoints = endpoints.iter();
    let all = endpoints.map(|one| (one.address.ip().to_string(), one.outside));
    all.collect()
}

fn web(endpoints: Vec<SliceEndpoint>) -> Vec<Object> {
    vec![
        Object::Service(service("web", &["10.96.0.1"])),
        Object::Slice(slice("web-1", "web", 8080, endpoints)),
    ]
}

fn expected<const N: usize>(all: [(&str, bool); N]) -> Vec<(String, bool)> {
    all.map(|(address, is)| (address.to_owned(), is)).into()
}

#[test]
fn endpoint_without_the_address_of_a_pod_is_outside_whatever_its_slice_says() {
    let foreign = SliceEndpoint {
        pod: Some(PodReference {
            key: Key::new("bank", "p"),
            uid: "".into(),
        }),
        ..endpoint("203.0.113.3", "")
    };
    let mut objects = web(vec![
        endpoint("10.0.0.1", "p"),
        endpoint("10.0.0.2", ""),
        // Pods of the own and of another namespace, and none.
        endpoint("203.0.113.1", "p"),
        endpoint("203.0.113.2", ""),
        foreign,
        endpoint("203.0.113.4", "finished"),
    ]);
    objects.extend([
        Object::Pod(pod("p", &["10.0.0.1"])),
        Object::Pod(pod("q", &["10.0.0.2"])),
        Object::Pod(pod("finished", &[])),
        Object::Pod(Pod {
            key: Key::new("bank", "p"),
            ..pod("p", &["10.0.1.1"])
        }),
    ]);
    let all = [
        ("10.0.0.1", false),
        ("10.0.0.2", false),
        ("203.0.113.1", true),
        ("203.0.113.2", true),
        ("203.0.113.3", true),
        ("203.0.113.4", true),
    ];
    assert_eq!(outside(&index(objects)), expected(all));
}

#[test]
fn change_of_pods_changes_what_is_outside_and_its_version() {
    let mut index = index(web(vec![
        endpoint("10.0.0.1", "p"),
        endpoint("10.0.0.2", ""),
    ]));
    let version = |index: &Index| state(index, "10.96.0.1:80".parse().unwrap()).version;
    let mut last = version(&index);
    let mut change = |change: Change, all: &[(&str, bool)]| {
        let touched = stale(&mut index, change);
        assert!(touched.addresses.contains(&ip("10.96.0.1")));
        let all = all
            .iter()
            .map(|(address, is)| (String::from(*address), *is));
        assert_eq!(outside(&index), all.collect::<Vec<_>>());
        let next = version(&index);
        assert_ne!(std::mem::replace(&mut last, next), next);
    };
    let set = |name: &str, addresses: &[&str]| Change::Apply(Object::Pod(pod(name, addresses)));
    // The endpoint of an unknown pod is not usable.
    change(set("q", &["10.0.0.2"]), &[("10.0.0.2", false)]);
    let both = |p, q| [("10.0.0.1", p), ("10.0.0.2", q)];
    change(set("p", &[]), &both(true, false));
    change(set("p", &["10.0.0.1"]), &both(false, false));
    change(set("p", &["10.0.0.9"]), &both(true, false));
    change(Change::Delete(Kind::Pod, key("q")), &both(true, true));
}

#[test]
fn address_of_a_node_is_that_of_the_own_pods_in_its_network() {
    let on_host = |namespace: &str, name: &str| {
        Object::Pod(Pod {
            key: Key::new(namespace, name),
            host_network: true,
            ..pod(name, &["10.1.0.1"])
        })
    };
    let at = |pod: &str| endpoint("10.1.0.1", pod);
    let with = |endpoint: SliceEndpoint| {
        let mut objects = web(vec![endpoint]);
        objects.extend([on_host("shop", "host"), on_host("kube-system", "etcd")]);
        objects.push(Object::Pod(pod("p", &["10.0.0.1"])));
        outside(&index(objects))
    };
    assert_eq!(with(at("host")), expected([("10.1.0.1", false)]));
    assert_eq!(with(at("")), expected([("10.1.0.1", true)]));
    assert_eq!(with(at("p")), expected([("10.1.0.1", true)]));
    let foreign = PodReference {
        key: Key::new("kube-system", "etcd"),
        uid: "".into(),
    };
    let forged = SliceEndpoint {
        pod: Some(foreign),
        ..at("")
    };
    assert_eq!(with(forged), expected([("10.1.0.1", true)]));
}

#[test]
fn api_server_is_inside_and_its_namesakes_are_not() {
    let of = |namespace: &str| {
        let key = Key::new(namespace, "kubernetes");
        let mut slice = slice(
            "kubernetes",
            "kubernetes",
            8080,
            vec![endpoint("10.1.0.1", "")],
        );
        slice.key = key.clone();
        slice.service = Some(key.clone());
        let service = Service {
            key,
            ..service("kubernetes", &["10.96.0.1"])
        };
        outside(&index([Object::Service(service), Object::Slice(slice)]))
    };
    assert_eq!(of("default"), expected([("10.1.0.1", false)]));
    assert_eq!(of("shop"), expected([("10.1.0.1", true)]));
}

#[test]
fn unknown_address_is_that_of_a_node_or_not() {
    let destination = "10.1.0.1:22".parse().unwrap();
    let mut index = index([]);
    let node = Object::Node(Node {
        key: Key::new("", "n"),
        addresses: vec![ip("10.1.0.1")],
        unready: false,
        zone: "".into(),
    });
    let none = state(&index, destination);
    assert!(!none.is_node && none.target.is_none());
    let touched = stale(&mut index, Change::Apply(node));
    assert!(!touched.node_ports.is_empty());
    let known = state(&index, destination);
    assert!(known.is_node && known.target.is_none());
    assert!(known.version != none.version && known.rest != none.rest);
    assert!(!state(&index, "10.1.0.2:22".parse().unwrap()).is_node);
    let backend = Resource::Backend(key("none"), 80);
    assert!(!index.resolve(&backend, &Location::default()).1.is_node);
    // A pod or a Service with the address is one.
    apply_one(&mut index, Object::Pod(pod("p", &["10.1.0.1"])));
    assert!(!state(&index, destination).is_node);
    index.apply(Change::Delete(Kind::Pod, key("p")));
    index.apply(Change::Delete(Kind::Node, Key::new("", "n")));
    assert_eq!(state(&index, destination).version, none.version);
}

fn apply_one(index: &mut Index, object: Object) {
    index.apply(Change::Apply(object));
}
