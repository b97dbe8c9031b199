//! The condition of AuthorizationPolicies: the proxies that enforce them.

use super::*;
use crate::kinds::authorization::tests::policy as authorization;
use crate::kinds::pod::ContainerPort;
use crate::kinds::service::Transport;

/// A policy for all pods of `shop`.
fn of_shop(name: &str, rules: Value) -> Object {
    let target = json!({"kind": "Pod", "selector": {}});
    let spec = json!({"targetRefs": [target], "action": "ALLOW", "rules": rules});
    Object::Authorization(authorization("shop", name, &spec))
}

/// The stream of a pod with its own state.
fn with_state(hub: &Hub, name: &str, lacking: Lacking) -> Resources {
    let key = Key::new("shop", name);
    let mut stream = stream(hub, &key, CURRENT, &[]);
    stream.set_lacking(lacking);
    stream.subscribe(&Resource::Workload(key, "".into()));
    stream
}

#[tokio::test(start_paused = true)]
async fn policy_names_the_proxies_that_do_not_enforce_it() {
    let hub = catalog();
    apply(&hub, [of_shop("p", json!([{}]))]);
    let current = with_state(&hub, "replica", Lacking::default());
    let lacking = Lacking {
        authorization: true,
        ..Lacking::default()
    };
    let old = with_state(&hub, "client", lacking);
    for stream in [&current, &old] {
        answer(stream, None);
    }
    review(&hub).await;
    let message = "1 of 2 pods have generation 1; not: client \
                   (the proxy is of an older release: restart the pod)";
    let policy = || "AuthorizationPolicy shop/p at *".to_owned();
    assert_eq!(conditions(&hub), [(policy(), message.to_owned())]);
    drop(old);
    let again = with_state(&hub, "client", Lacking::default());
    answer(&again, None);
    review(&hub).await;
    let all = all_conditions(&hub);
    assert_eq!(all.len(), 1);
    assert!(
        all[0].1.holds && all[0].1.message.starts_with("2 of 2 pods"),
        "{all:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn policy_over_the_bound_of_a_pod_says_so() {
    let hub = catalog();
    let header = json!({"name": "h", "type": "Exact", "value": "v".repeat(1000)});
    let rule = json!({"requests": [{"headers": vec![header; 16]}]});
    let large = |name| of_shop(name, json!(vec![rule.clone(); 12]));
    apply(&hub, [large("p1"), large("p2")]);
    let replica = with_state(&hub, "replica", Lacking::default());
    answer(&replica, None);
    review(&hub).await;
    let mut failed = all_conditions(&hub);
    failed.retain(|(_, one)| !one.holds);
    assert_eq!(failed.len(), 1);
    let (object, condition) = &failed[0];
    assert_eq!(
        (&**object, condition.reason),
        ("AuthorizationPolicy shop/p2 at *", "TooLarge")
    );
    assert!(
        condition
            .message
            .contains("denies the calls of its targets")
    );
}

#[tokio::test(start_paused = true)]
async fn pods_that_are_connected_to_another_replica_count() {
    let [writer, other] = [catalog(), catalog()];
    for hub in [&writer, &other] {
        apply(hub, [of_shop("p", json!([{}]))]);
    }
    let exchange = || writer.receive_pages([("other".to_owned(), other.page())].into());
    let replica = with_state(&other, "replica", Lacking::default());
    review(&other).await;
    exchange();
    review(&writer).await;
    assert_eq!(
        all_conditions(&writer).len(),
        0,
        "it has not acknowledged it"
    );
    let rest = replica.next().map(|(resource, state)| {
        replica.acknowledge(&resource, state.rest, None);
        state.rest
    });
    review(&other).await;
    exchange();
    review(&writer).await;
    let all = all_conditions(&writer);
    assert_eq!(all[0].1.message, "1 of 1 pods have generation 1");
    let rest = rest.expect("the state of the pod");
    let own = Resource::Workload(Key::new("shop", "replica"), "".into());
    replica.acknowledge(&own, rest, Some(rejection("why", None)));
    for hub in [&writer, &other] {
        let labels = Default::default();
        let client = pod("client", &["10.0.0.2"]);
        apply(hub, [Object::Pod(Pod { labels, ..client })]);
    }
    let client = with_state(&writer, "client", Lacking::default());
    answer(&client, None);
    review(&other).await;
    exchange();
    review(&writer).await;
    let expected = "1 of 2 pods have generation 1; not: replica (rejected: why)";
    assert_eq!(conditions(&writer)[0].1, expected);
    // It has stopped, and its pods are connected to no replica for a minute.
    writer.receive_pages(BTreeMap::new());
    review(&writer).await;
    for _ in 0..8 {
        review(&writer).await;
    }
    let expected = "1 of 2 pods have generation 1; not: 1 pod of namespace shop \
                    (not acknowledged yet)";
    assert_eq!(conditions(&writer)[0].1, expected);
}

#[tokio::test(start_paused = true)]
async fn pods_and_ports_without_enforcement_are_named() {
    let hub = catalog();
    let rule = json!({
        "networkAttributes": {"ports": [5432, 9999]}, "requests": [{"methods": ["GET"]}],
    });
    apply(&hub, [of_shop("p", json!([rule]))]);
    let ports = |declared: &[u16], bypassed: &str, opaque: &str| {
        let mut one = pod("replica", &["10.0.0.1"]);
        one.bypassed = bypassed.parse().unwrap();
        one.inbound.opaque_ports = opaque.parse().unwrap();
        let declared = declared.iter().map(|port| ContainerPort {
            name: "".into(),
            port: *port,
            protocol: Transport::Tcp,
        });
        one.inbound.ports = declared.collect();
        Object::Pod(one)
    };
    let unproxied = |namespace: &str| {
        Object::Pod(Pod {
            key: Key::new(namespace, "job"),
            identity: None,
            ..pod("job", &["10.0.0.9"])
        })
    };
    let replica = ports(&[5432, 8080], "4001,8080", "5432");
    apply(&hub, [replica, unproxied("shop"), unproxied("bank")]);
    let [one, two] = ["replica", "client"].map(|name| {
        let stream = with_state(&hub, name, Lacking::default());
        answer(&stream, None);
        stream
    });
    review(&hub).await;
    let all = all_conditions(&hub);
    // The client declares no port.
    let expected = "2 of 3 pods have generation 1; not: job (no proxy: nothing is enforced); replica \
                    (ports 8080 bypass the proxy); replica (ports 5432 are opaque: no request is \
                    matched)";
    assert_eq!(all[0].1.message, expected);
    assert_eq!((all[0].1.holds, all[0].1.reason), (false, "NoProxy"));
    drop((one, two));
    apply(&hub, [client("bank", "other")]);
    hub.apply([
        Change::Delete(Kind::Pod, Key::new("shop", "client")),
        Change::Delete(Kind::Pod, Key::new("shop", "job")),
    ]);
    let replica = with_state(&hub, "replica", Lacking::default());
    answer(&replica, None);
    review(&hub).await;
    let (_, condition) = &all_conditions(&hub)[0];
    assert!(
        condition.holds
            && condition
                .message
                .ends_with("; no pod declares the ports 9999"),
        "{condition:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn opaque_ports_are_named_where_a_server_would_be_asked() {
    let hub = catalog();
    let spec = json!({
        "targetRefs": [{"kind": "Pod", "selector": {}}],
        "action": "ExternalAuth",
        "externalAuth": {"protocol": "GRPC", "backendRef": {"name": "auth", "port": 80}},
        "rules": [{"networkAttributes": {"ports": [5432]}}],
    });
    let mut replica = pod("replica", &["10.0.0.1"]);
    replica.inbound.opaque_ports = "5432".parse().unwrap();
    let policy = Object::Authorization(authorization("shop", "p", &spec));
    apply(&hub, [Object::Pod(replica), policy]);
    let stream = with_state(&hub, "replica", Lacking::default());
    answer(&stream, None);
    review(&hub).await;
    let expected = "replica (ports 5432 are opaque: no request is matched)";
    let (_, condition) = &all_conditions(&hub)[0];
    assert!(condition.message.contains(expected), "{condition:?}");
}

#[tokio::test(start_paused = true)]
async fn outbound_policy_names_the_proxies_that_enforce_inbound_ones_only() {
    let hub = catalog();
    // Ports of destinations are none that pods declare.
    for (name, address) in [("replica", "10.0.0.1"), ("client", "10.0.0.2")] {
        let mut one = pod(name, &[address]);
        one.inbound.ports = [ContainerPort {
            name: "".into(),
            port: 8080,
            protocol: Transport::Tcp,
        }]
        .into();
        apply(&hub, [Object::Pod(one)]);
    }
    let spec = json!({
        "targetRefs": [{"kind": "Pod", "selector": {}}],
        "direction": "Outbound",
        "action": "ALLOW",
        "rules": [{"networkAttributes": {"ports": [443]}}],
    });
    let policy = Object::Authorization(authorization("shop", "out", &spec));
    apply(&hub, [of_shop("in", json!([{}])), policy]);
    let current = with_state(&hub, "replica", Lacking::default());
    let lacking = Lacking {
        egress: true,
        ..Lacking::default()
    };
    let old = with_state(&hub, "client", lacking);
    for stream in [&current, &old] {
        answer(stream, None);
    }
    review(&hub).await;
    let all = all_conditions(&hub).into_iter();
    let all: Vec<_> = all
        .map(|(name, one)| (name, one.holds, one.message))
        .collect();
    let message = "1 of 2 pods have generation 1; not: client \
                   (the proxy is of an older release: restart the pod)";
    let expected = [
        ("in", true, "2 of 2 pods have generation 1"),
        ("out", false, message),
    ];
    let expected = expected.map(|(name, holds, message)| {
        let name = format!("AuthorizationPolicy shop/{name} at *");
        (name, holds, message.to_owned())
    });
    assert_eq!(all, expected);
}
