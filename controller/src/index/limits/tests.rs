//! Rate limits of pods: their Services, ports and replicas, and the effect of changes.

use serde_json::json;

use super::*;
use crate::catalog::Change;
use crate::index::Resource;
use crate::index::locality::Location;
use crate::index::state::{TargetKind, Workload};
use crate::index::tests::{Stale, endpoint, index, key, pod, service, slice, stale};
use crate::kinds::authorization;
use crate::kinds::pod::ContainerPort;
use crate::kinds::policy::tests::{policy, policy_for};
use crate::kinds::{Node, Object};
use crate::object::fields::NULL;
use crate::object::{Kind, Meta};

fn apply(index: &mut Index, object: Object) -> Stale {
    stale(index, Change::Apply(object))
}

fn limits(requests: u32) -> serde_json::Value {
    json!({"rateLimits": [{"name": "all", "requests": requests}]})
}

/// A ready pod with a named port.
fn ready(name: &str) -> Pod {
    let http = ContainerPort {
        name: "http".into(),
        port: 8080,
        protocol: Transport::Tcp,
    };
    Pod {
        ready: true,
        inbound: crate::kinds::pod::Inbound {
            ports: [http].into(),
            ..Default::default()
        },
        ..pod(name, &[])
    }
}

fn workload(index: &Index, pod: &Key) -> Workload {
    let location = index.location(pod, "");
    let resource = Resource::Workload(pod.clone(), "".into());
    match index.resolve(&resource, &location).1.target.unwrap().kind {
        TargetKind::Workload(workload) => *workload,
        kind => panic!("{kind:?}"),
    }
}

/// Names, ports and replicas of the limits of a pod.
fn of(index: &Index, pod: &Key) -> Vec<(String, Vec<u32>, u32)> {
    let limits = workload(index, pod).rate_limits.into_iter();
    let limits = limits.map(|limit| (limit.name, limit.ports, limit.replicas));
    limits.collect()
}

#[test]
fn pods_have_the_limits_of_the_services_of_their_namespace_that_select_them() {
    let mut numbered = service("api", &["10.96.0.8"]);
    numbered.ports[0].target = TargetPort::Number(9090);
    numbered.ports.truncate(1);
    let foreign = Service {
        key: Key::new("bank", "web"),
        ..service("web", &["10.96.0.9"])
    };
    let other_labels = Pod {
        labels: BTreeMap::new(),
        ..ready("other")
    };
    // A slice makes no pod a pod of the Service, whatever program writes it.
    let hostile = slice("hostile", "web", 8080, vec![endpoint("10.0.0.9", "other")]);
    let mut index = index([
        Object::Service(service("web", &["10.96.0.7"])),
        Object::Service(numbered),
        Object::Service(foreign),
        Object::Pod(ready("a")),
        Object::Pod(other_labels),
        Object::Slice(hostile),
        Object::Policy(policy_for(
            "p",
            0,
            json!([{"group": "", "kind": "Namespace", "name": "shop"}]),
            limits(7),
        )),
    ]);
    let name = || "TrafficPolicy shop/p/all".to_owned();
    assert_eq!(
        of(&index, &key("a")),
        [(name(), vec![9090], 1), (name(), vec![8080], 1)]
    );
    assert_eq!(workload(&index, &key("a")).rate_limits[0].requests, 7);
    assert_eq!(of(&index, &key("other")), []);
    let delete = Change::Delete(Kind::TrafficPolicy, key("p"));
    let touched = stale(&mut index, delete);
    assert!(touched.pods.contains(&key("a")));
    assert_eq!(of(&index, &key("a")), []);
}

/// A tenant chooses the labels of a pod, and what its state has read is kept.
#[test]
fn pod_with_many_labels_has_the_same_state_and_few_reads() {
    let labels = |count| (0..count).map(|number| (format!("a{number:05}"), String::new()));
    let labelled = |name: &str, count| Pod {
        labels: labels(count).chain(ready("").labels).collect(),
        ..ready(name)
    };
    let deny = serde_json::json!({
        "targetRefs": [{"kind": "Pod", "selector": {"matchLabels": {"app": "web"}}}],
        "action": "DENY", "rules": [{}],
    });
    let deny = deny.to_string();
    let meta = Meta::new(Kind::Authorization, key("deny"), 0, ("", 0), &deny);
    let index = index([
        Object::Service(service("web", &["10.96.0.7"])),
        Object::Policy(policy("p", 0, limits(7))),
        Object::Authorization(authorization::parse::policy(
            meta,
            &deny,
            NULL,
            "cluster.local",
        )),
        Object::Pod(labelled("few", 0)),
        Object::Pod(labelled("many", 10_000)),
    ]);
    let [few, many] = ["few", "many"].map(|name| reads::ask(|| workload(&index, &key(name))));
    assert_eq!(few.0.rate_limits.len(), 1);
    assert_eq!(few.0.rate_limits, many.0.rate_limits);
    assert_eq!(few.0.authorization.policies.len(), 1);
    assert_eq!(few.0.authorization, many.0.authorization);
    assert!(many.1.count() < 40, "{}", many.1.count());
}

#[test]
fn limits_of_a_pod_are_bounded_and_the_oldest_services_come_first() {
    let matches: Vec<_> = (0..14)
        .map(|_| json!({"headers": [{"name": "h", "value": "v".repeat(4000)}]}))
        .collect();
    let large = json!({"rateLimits": [{"name": "all", "requests": 7, "matches": matches}]});
    let services = (0..5).map(|age| Service {
        created: age,
        ..service(&format!("s{age}"), &["10.96.0.7"])
    });
    let namespace = json!([{"group": "", "kind": "Namespace", "name": "shop"}]);
    let objects = [
        Object::Policy(policy_for("p", 0, namespace, large)),
        Object::Pod(ready("a")),
    ];
    let index = index(services.map(Object::Service).chain(objects));
    let limits = workload(&index, &key("a")).rate_limits;
    let bytes: usize = limits.iter().map(Message::encoded_len).sum();
    assert_eq!(limits.len(), 2, "{bytes} bytes");
    assert!(bytes <= MAX_BYTES);
}

#[test]
fn replicas_are_the_ready_meshed_pods_that_the_selector_selects() {
    let mut index = index([
        Object::Service(service("web", &["10.96.0.7"])),
        Object::Policy(policy("p", 0, limits(7))),
        Object::Pod(ready("a")),
    ]);
    let replicas = |index: &Index| of(index, &key("a"))[0].2;
    assert_eq!(replicas(&index), 1);
    for (pod, expected) in [
        (ready("b"), 2),
        (pod("c", &[]), 2),
        (ready("c"), 3),
        (
            Pod {
                terminating: true,
                ..ready("b")
            },
            2,
        ),
        (
            Pod {
                identity: None,
                ..ready("d")
            },
            2,
        ),
        (
            Pod {
                labels: BTreeMap::new(),
                ..ready("e")
            },
            2,
        ),
        (
            Pod {
                key: Key::new("bank", "f"),
                ..ready("f")
            },
            2,
        ),
    ] {
        let before = replicas(&index);
        let changed = pod.key.clone();
        let touched = apply(&mut index, Object::Pod(pod));
        assert_eq!(replicas(&index), expected);
        assert_eq!(touched.replicas.is_empty(), before == expected);
        assert!(touched.pods.iter().all(|pod| *pod == changed));
    }
    for name in ["a", "c"] {
        let unready = Pod {
            ready: false,
            ..ready(name)
        };
        apply(&mut index, Object::Pod(unready));
    }
    assert_eq!(replicas(&index), 1, "at least one");
}

#[test]
fn numbers_of_replicas_are_rounded_up_to_four_significant_bits() {
    for (replicas, expected) in [
        (0, 1),
        (1, 1),
        (15, 15),
        (16, 16),
        (17, 18),
        (33, 36),
        (1000, 1024),
        (u32::MAX, u32::MAX),
    ] {
        assert_eq!(rounded(replicas), expected);
    }
    let steps: BTreeSet<u32> = (1..=1000).map(rounded).collect();
    assert_eq!(steps.len(), 64);
}

#[test]
fn another_selector_concerns_the_pods_before_and_after() {
    let mut index = index([
        Object::Service(service("web", &["10.96.0.7"])),
        Object::Policy(policy("p", 0, limits(7))),
        Object::Pod(ready("a")),
        Object::Pod(Pod {
            labels: [("app".to_owned(), "new".to_owned())].into(),
            ..ready("b")
        }),
    ]);
    let new = Service {
        selector: [("app".to_owned(), "new".to_owned())].into(),
        ..service("web", &["10.96.0.7"])
    };
    let touched = apply(&mut index, Object::Service(new));
    assert_eq!(touched.pods, [key("a"), key("b")].into());
    assert_eq!(of(&index, &key("a")), []);
    assert_eq!(of(&index, &key("b")).len(), 1);
    let delete = Change::Delete(Kind::Service, key("web"));
    let touched = stale(&mut index, delete);
    assert_eq!(touched.pods, [key("b")].into());
    assert_eq!(of(&index, &key("b")), []);
}

#[test]
fn limits_of_a_pod_are_bounded_and_those_of_the_oldest_services() {
    let services = (0..20).map(|age: u8| {
        Object::Service(Service {
            created: (20 - age).into(),
            ..service(&format!("s{age}"), &[&format!("10.96.1.{age}")])
        })
    });
    let everything = policy_for(
        "p",
        0,
        json!([{"group": "", "kind": "Namespace", "name": "shop"}]),
        limits(7),
    );
    let others = [Object::Pod(ready("a")), Object::Policy(everything)];
    let index = index(services.chain(others));
    assert_eq!(of(&index, &key("a")).len(), MAX_SERVICES);
}

#[test]
fn zone_is_that_of_the_node() {
    let mut index = index([Object::Pod(Pod {
        node: "n".into(),
        ..ready("a")
    })]);
    let node = |zone: &str| {
        Object::Node(Node {
            key: Key::new("", "n"),
            addresses: vec![],
            unready: false,
            zone: zone.into(),
        })
    };
    assert_eq!(&*workload(&index, &key("a")).zone, "");
    apply(&mut index, node("eu-1"));
    assert_eq!(&*workload(&index, &key("a")).zone, "eu-1");
    let location = Location::default();
    let resource = Resource::Workload(key("a"), "".into());
    let (scope, _) = index.resolve(&resource, &location);
    // The state of a client follows its location.
    assert_eq!(scope.area, crate::index::locality::Area::Zone);
}

#[test]
fn pods_have_the_telemetry_of_the_oldest_service_that_selects_them() {
    let logs = |format: &str| json!({"telemetry": {"accessLogs": {"format": format}}});
    let target = |name: &str| json!([{"group": "", "kind": "Service", "name": name}]);
    let younger = Service {
        created: 2,
        ..service("web", &["10.96.0.7"])
    };
    let older = Service {
        created: 1,
        ..service("api", &["10.96.0.8"])
    };
    let mut index = index([
        Object::Service(younger),
        Object::Service(older),
        Object::Policy(policy("p", 0, logs("{path}"))),
        Object::Pod(ready("a")),
    ]);
    let format = |index: &Index| {
        let telemetry = workload(index, &key("a")).telemetry?;
        Some(telemetry.access_logs.as_ref()?.format.clone())
    };
    assert_eq!(format(&index).as_deref(), Some("{path}"));
    let of_api = policy_for("o", 0, target("api"), logs("{status}"));
    let touched = apply(&mut index, Object::Policy(of_api));
    assert_eq!(touched.pods, [key("a")].into());
    assert_eq!(format(&index).as_deref(), Some("{status}"));
    assert_eq!(workload(&index, &key("a")).replaced, [key("web")]);
    assert_eq!(of(&index, &key("a")), []);
}

#[test]
fn pods_without_a_service_have_the_telemetry_of_their_namespace() {
    let logs = |format: &str| json!({"telemetry": {"accessLogs": {"format": format}}});
    let of_namespace = |format: &str| {
        let target = json!([{"group": "", "kind": "Namespace", "name": "shop"}]);
        Object::Policy(policy_for("n", 0, target, logs(format)))
    };
    let mut index = index([Object::Pod(ready("a")), of_namespace("{path}")]);
    let format = |index: &Index| {
        let telemetry = workload(index, &key("a")).telemetry?;
        Some(telemetry.access_logs.as_ref()?.format.clone())
    };
    assert_eq!(format(&index).as_deref(), Some("{path}"));
    let touched = apply(&mut index, of_namespace("{status}"));
    assert_eq!(touched.pods, [key("a")].into());
    assert_eq!(format(&index).as_deref(), Some("{status}"));
    let touched = stale(&mut index, Change::Delete(Kind::TrafficPolicy, key("n")));
    assert_eq!(touched.pods, [key("a")].into());
    assert_eq!(format(&index), None);
}
