//! Tests of the hub, and of its readers at any pace.

use std::collections::HashMap;

use super::*;
use crate::catalog::Change;
use crate::index::Resource;
use crate::index::state::State;
use crate::index::tests::Chance;
use crate::kinds::{Object, Pod};
use crate::metrics::Metrics;
use crate::scrape::encode_times;

fn pod(name: &str, ip: &str) -> Change {
    Change::Apply(Object::Pod(Pod {
        key: Key::new("shop", name),
        uid: "".into(),
        addresses: vec![ip.parse().unwrap()],
        host_network: false,
        terminating: false,
        ready: false,
        unready_by_node: false,
        created: 0,
        node: "".into(),
        zone: "".into(),
        identity: None,
        bypassed: Default::default(),
        restricts_udp: false,
        inbound: Default::default(),
        labels: Default::default(),
    }))
}

fn destination(text: &str) -> Resource {
    Resource::Destination(text.parse().unwrap())
}

#[tokio::test]
async fn is_synced_when_each_kind_is_listed_or_not_installed_or_cannot_be_read() {
    let hub = Hub::default();
    let listed = |kind| Change::Reset(kind, vec![]);
    hub.apply([Kind::Service, Kind::Pod].map(listed));
    let optional = CONFIGURATION.iter().filter(|kind| kind.is_optional());
    let optional = optional.copied();
    assert_eq!(hub.missing().len(), 1 + optional.clone().count());
    let mut unlisted = optional.clone();
    hub.apply(unlisted.next().map(Change::Unreadable));
    hub.apply(unlisted.map(Change::NotInstalled));
    assert_eq!(hub.missing(), [Kind::Slice].into());
    let waiting = tokio::spawn({
        let hub = hub.clone();
        async move { hub.synced().await }
    });
    hub.apply([listed(Kind::Slice)]);
    waiting.await.unwrap();
    assert!(hub.missing().is_empty());
    assert!(!hub.is_listed(Kind::Node));
    hub.apply([listed(Kind::Node)]);
    assert!(hub.is_listed(Kind::Node));
    // A kind that was listed keeps its objects.
    hub.apply([Change::Unreadable(Kind::HttpRoute)]);
    assert!(hub.is_listed(Kind::HttpRoute));
}

#[test]
fn subscribers_get_what_was_withheld_when_the_kind_can_be_read() {
    let hub = Hub::default();
    let objects = crate::index::tests::service_with_pods("web", "10.96.0.1", &["10.0.0.1"]);
    hub.apply(objects.into_iter().map(Change::Apply));
    hub.apply([Change::Unreadable(Kind::HttpRoute)]);
    let mut reader = hub.watch_resources(None);
    for text in ["10.96.0.1:80", "10.0.0.1:80", "192.0.2.1:80"] {
        reader.subscribe(&destination(text));
    }
    let next = || {
        let (resource, state) = reader.next()?;
        Some(((*resource).clone(), state.is_withheld))
    };
    assert_eq!(next(), Some((destination("10.96.0.1:80"), true)));
    assert_eq!(next(), Some((destination("10.0.0.1:80"), false)));
    assert_eq!(next(), Some((destination("192.0.2.1:80"), false)));
    assert_eq!(next(), None);
    hub.apply([Change::Reset(Kind::HttpRoute, vec![])]);
    assert_eq!(next(), Some((destination("10.96.0.1:80"), false)));
    assert_eq!(next(), None, "the others are as before");
}

#[tokio::test(start_paused = true)]
async fn call_that_needs_pods_waits_for_no_other_kind() {
    let (hub, stopping) = (Hub::default(), CancellationToken::new());
    let pods = || hub.wait_listed(&[Kind::Pod], &stopping);
    let missing = CatalogError::NotSynced("Pod".to_owned());
    assert_eq!(pods().await, Err(missing));
    hub.apply([Change::Reset(Kind::Pod, vec![])]);
    assert_eq!(pods().await, Ok(()));
    assert!(hub.wait_synced(&stopping).await.is_err());
}

#[test]
fn ready_meshed_pods_are_all_those_that_do_not_terminate() {
    let hub = Hub::default();
    let all = (0..3 * MAX_BATCH).map(|number| {
        let Change::Apply(Object::Pod(pod)) = pod("web", "10.0.0.1") else {
            panic!("a pod")
        };
        let namespace = ["bank", "shop"][number % 2];
        Object::Pod(Pod {
            key: Key::new(namespace, &format!("web-{number}")),
            ready: number >= 10,
            terminating: number >= 3 * MAX_BATCH - 10,
            identity: Some("spiffe://cluster.local/ns/shop/sa/web".into()),
            ..pod
        })
    });
    let all = Change::Reset(Kind::Pod, all.collect());
    hub.apply([all]);
    let pods: BTreeSet<Key> = hub
        .ready_meshed_pods()
        .into_iter()
        .map(|(key, _)| key)
        .collect();
    assert_eq!(pods.len(), 3 * MAX_BATCH - 20);
    assert!(!pods.contains(&Key::new("shop", "web-9")));
}

#[test]
fn list_of_the_same_objects_notifies_nobody_and_never_empties_a_service() {
    let objects =
        |addresses: &[&str]| crate::index::tests::service_with_pods("web", "10.96.0.1", addresses);
    let resets = |addresses: &[&str]| {
        let all = objects(addresses);
        Kind::ALL.map(|kind| {
            let of_kind = all.iter().filter(|object| object.kind() == kind);
            Change::Reset(kind, of_kind.cloned().collect())
        })
    };
    let hub = Hub::default();
    hub.apply(resets(&["10.0.0.1", "10.0.0.2"]));
    let mut reader = hub.watch_resources(None);
    reader.subscribe(&destination("10.96.0.1:80"));
    assert!(reader.next().is_some());
    // Each kind is listed again on its own, at another time.
    for reset in resets(&["10.0.0.1", "10.0.0.2"]) {
        hub.apply([reset]);
        assert!(reader.next().is_none());
    }
    for reset in resets(&["10.0.0.2"]) {
        hub.apply([reset]);
        while let Some((_, published)) = reader.next() {
            assert!(!published.target.as_ref().unwrap().endpoints.is_empty());
        }
    }
}

/// The epoch of the next state, and the versions of pods.
fn position(reader: &Resources) -> Option<(String, u64, u64)> {
    let (_, published) = reader.next()?;
    let position = published.position.as_ref()?;
    let mut message = position.message(&[Kind::Pod]);
    let pods = message.components.pop()?;
    Some((message.epoch, pods.resource_version, pods.seen))
}

#[test]
fn states_have_the_latest_position_without_a_change() {
    let hub = Hub::default();
    let event = |change, version| Event {
        change,
        version: Some(version),
    };
    let at = |latest, seen| Some(("uid".to_owned(), latest, seen));
    let api = crate::index::tests::api_service("uid");
    let list = |kind, objects| Change::Reset(kind, objects);
    let mut reader = hub.watch_resources(None);
    hub.apply([event(list(Kind::Service, vec![api.clone()]), 10)]);
    hub.apply([event(list(Kind::Slice, vec![]), 11)]);
    hub.apply([event(list(Kind::Pod, vec![]), 12)]);
    let address = destination("10.0.0.1:80");
    reader.subscribe(&address);
    assert_eq!(position(&reader), None, "the epoch is unknown");
    hub.apply([Change::Epoch(0)]);
    reader.subscribe(&address);
    assert_eq!(position(&reader), at(12, 12));
    hub.apply([
        event(pod("p", "10.0.0.1"), 20),
        event(pod("q", "10.0.0.9"), 21),
    ]);
    assert_eq!(position(&reader), at(21, 21));
    // Another pod has changed: the next subscriber to the same state gets a later position.
    hub.apply([event(pod("q", "10.0.0.8"), 22)]);
    hub.apply([event(Change::Bookmark(Kind::Pod), 25)]);
    assert_eq!(position(&reader), None, "nothing has changed");
    let mut other = hub.watch_resources(None);
    other.subscribe(&address);
    assert_eq!(position(&other), at(22, 25));
    // The same for a change without an effect.
    hub.apply([
        event(pod("p", "10.0.0.2"), 26),
        event(pod("p", "10.0.0.1"), 27),
    ]);
    other.subscribe(&address);
    assert_eq!(position(&other), at(27, 27));
    // A list after a restore from a backup.
    hub.apply([Change::Epoch(1000)]);
    hub.apply([event(list(Kind::Pod, vec![]), 5)]);
    let epoch = "uid, restored at 1000".to_owned();
    assert_eq!(position(&reader), Some((epoch, 5, 5)));
}

#[test]
fn state_that_is_not_published_yet_is_resolved_for_a_new_subscriber() {
    let hub = Hub::default();
    let address = destination("10.0.0.1:80");
    let mut reader = hub.watch_resources(None);
    reader.subscribe(&address);
    assert!(reader.next().unwrap().1.target.is_none());
    let mut turns = Turns::default();
    let mut update = Update::new([pod("p", "10.0.0.1").into()].into_iter());
    let changed = loop {
        if let Some(changed) = hub.update(&mut update) {
            break changed;
        }
    };
    hub.begin_publication(&changed, &mut turns, None);
    let mut other = hub.watch_resources(None);
    other.subscribe(&address);
    // For all of them.
    for reader in [&reader, &other] {
        assert!(reader.next().unwrap().1.target.is_some());
    }
    assert!(!hub.publish(&mut turns) && reader.next().is_none() && other.next().is_none());
}

#[tokio::test]
async fn slow_reader_gets_the_latest_state_once() {
    let hub = Hub::default();
    let mut reader = hub.watch_resources(None);
    reader.subscribe(&destination("10.0.0.1:80"));
    for round in 0..1000 {
        hub.apply([
            pod(&format!("p{round}"), "10.0.0.1"),
            Change::Delete(Kind::Pod, Key::new("shop", &format!("p{}", round - 1))),
        ]);
    }
    reader.notifications().wait().await;
    let (_, published) = reader.next().unwrap();
    assert_eq!(
        published.target.as_ref().unwrap().key,
        Key::new("shop", "p999")
    );
    assert!(
        reader.next().is_none(),
        "the queue contained the destination once"
    );
}

/// A hub that follows changes, and a reader of a destination that has its first state.
fn follow() -> (mpsc::Sender<Event>, Resources, tokio::task::JoinHandle<()>) {
    let hub = Hub::default();
    let (sender, changes) = mpsc::channel(100);
    let mut reader = hub.watch_resources(None);
    reader.subscribe(&destination("10.0.0.1:80"));
    reader.next().unwrap();
    let following = tokio::spawn(async move { hub.follow(changes).await });
    (sender, reader, following)
}

#[tokio::test(start_paused = true)]
async fn publishes_a_change_at_once_and_a_burst_together() {
    let (sender, reader, following) = follow();
    let start = Instant::now();
    sender.send(pod("p", "10.0.0.1").into()).await.unwrap();
    reader.notifications().wait().await;
    assert_eq!(start.elapsed(), Duration::ZERO);
    reader.next().unwrap();
    for name in ["q", "r", "s"] {
        sender.send(pod(name, "10.0.0.1").into()).await.unwrap();
        tokio::time::sleep(PUBLICATION_INTERVAL / 5).await;
    }
    reader.notifications().wait().await;
    let elapsed = start.elapsed().as_millis();
    assert_eq!(elapsed, PUBLICATION_INTERVAL.as_millis());
    let (_, published) = reader.next().unwrap();
    let target = published.target.as_ref().unwrap();
    assert_eq!((&*target.key.name, reader.next().is_none()), ("s", true));
    let hub = reader.hub.clone();
    let metrics = Metrics::new(move |encoder| encode_times(&hub, encoder)).render();
    for line in ["sum 0.1", "count 2", "bucket{le=\"0.001\"} 1"] {
        let line = format!("diy_mesh_controller_publication_duration_seconds_{line}\n");
        assert!(metrics.contains(&line), "{line}{metrics}");
    }
    drop(sender);
    following.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn event_without_a_change_delays_no_change() {
    let (sender, reader, following) = follow();
    sender.send(pod("p", "10.0.0.1").into()).await.unwrap();
    reader.notifications().wait().await;
    reader.next().unwrap();
    tokio::time::sleep(PUBLICATION_INTERVAL * 2).await;
    sender.send(pod("p", "10.0.0.1").into()).await.unwrap();
    tokio::time::sleep(PUBLICATION_INTERVAL / 10).await;
    let start = Instant::now();
    sender.send(pod("q", "10.0.0.1").into()).await.unwrap();
    reader.notifications().wait().await;
    assert_eq!(start.elapsed(), Duration::ZERO);
    drop(sender);
    following.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn rollout_tells_each_pod_the_number_of_replicas_only_a_few_times() {
    const PODS: u32 = 100;
    let limits = serde_json::json!({"rateLimits": [{"name": "all", "requests": 7}]});
    let set = Change::Apply;
    let replica = |number: u32, ready| {
        let pod = crate::index::tests::pod(&format!("p{number}"), &[]);
        set(Object::Pod(Pod { ready, ..pod }))
    };
    let hub = Hub::default();
    hub.apply([
        set(Object::Service(crate::index::tests::service("web", &[]))),
        set(Object::Policy(crate::kinds::policy::tests::policy(
            "p", 0, limits,
        ))),
    ]);
    hub.apply((0..PODS).map(|number| replica(number, false)));
    let readers: Vec<_> = (0..PODS)
        .map(|number| {
            let key = Key::new("shop", &format!("p{number}"));
            let mut reader = hub.watch_resources(None);
            reader.subscribe(&Resource::Workload(key, "".into()));
            reader.next().unwrap();
            reader
        })
        .collect();
    let (sender, changes) = mpsc::channel(100);
    let following = tokio::spawn({
        let hub = hub.clone();
        async move { hub.follow(changes).await }
    });
    let (mut messages, mut replicas) = (0, 0);
    let mut read = || {
        for (_, published) in readers.iter().filter_map(Resources::next) {
            messages += 1;
            let kind = &published.target.as_ref().unwrap().kind;
            let crate::index::state::TargetKind::Workload(workload) = kind else {
                panic!("{kind:?}");
            };
            replicas = workload.rate_limits[0].replicas;
        }
    };
    for number in 0..PODS {
        sender.send(replica(number, true).into()).await.unwrap();
        tokio::time::sleep(PUBLICATION_INTERVAL).await;
        read();
    }
    tokio::time::sleep(2 * REPLICAS_INTERVAL).await;
    read();
    // Rounded up. Three times in these ten seconds, and once afterwards.
    assert_eq!(replicas, 104);
    assert!(messages <= 4 * PODS, "{messages} messages");
    drop(sender);
    following.await.unwrap();
}

/// Each event between the end of the interval and the publication let the replicas wait for another
/// interval: in a cluster with many events, or a tenant that makes them, pods never learned of them.
#[tokio::test(start_paused = true)]
async fn events_of_others_do_not_delay_the_number_of_replicas() {
    let limits = serde_json::json!({"rateLimits": [{"name": "all", "requests": 7}]});
    let replica = |name| Change::Apply(Object::Pod(crate::index::tests::pod(name, &[])));
    let ready = |name| {
        let pod = crate::index::tests::pod(name, &[]);
        Change::Apply(Object::Pod(Pod { ready: true, ..pod }))
    };
    let hub = Hub::default();
    hub.apply([
        Change::Apply(Object::Service(crate::index::tests::service("web", &[]))),
        Change::Apply(Object::Policy(crate::kinds::policy::tests::policy(
            "p", 0, limits,
        ))),
    ]);
    hub.apply(["p0", "p1", "p2"].map(replica));
    let mut reader = hub.watch_resources(None);
    reader.subscribe(&Resource::Workload(Key::new("shop", "p0"), "".into()));
    let (sender, changes) = mpsc::channel(100);
    let following = tokio::spawn({
        let hub = hub.clone();
        async move { hub.follow(changes).await }
    });
    let mut replicas = 0;
    for event in 0..600_u32 {
        match event {
            3 => sender.send(ready("p0").into()).await.unwrap(),
            10 => sender.send(ready("p1").into()).await.unwrap(),
            20 => sender.send(ready("p2").into()).await.unwrap(),
            _ => {
                let address = format!("10.1.0.{}", event % 200);
                sender.send(pod("noise", &address).into()).await.unwrap();
            }
        }
        tokio::time::sleep(PUBLICATION_INTERVAL / 7).await;
        while let Some((_, published)) = reader.next() {
            let kind = &published.target.as_ref().unwrap().kind;
            let crate::index::state::TargetKind::Workload(workload) = kind else {
                panic!("{kind:?}");
            };
            replicas = workload.rate_limits[0].replicas;
        }
    }
    assert_eq!(replicas, 3, "after {:?}", 85 * PUBLICATION_INTERVAL);
    drop(sender);
    following.await.unwrap();
}

#[test]
fn notifies_only_subscribers_of_changed_destinations() {
    let hub = Hub::default();
    let (mut one, mut other) = (hub.watch_resources(None), hub.watch_resources(None));
    one.subscribe(&destination("10.0.0.1:80"));
    other.subscribe(&destination("10.0.0.2:80"));
    assert!(one.next().is_some() && other.next().is_some());
    hub.apply([pod("p", "10.0.0.1")]);
    assert!(one.next().is_some());
    assert!(other.next().is_none());
    // Affected, but unchanged.
    hub.apply([pod("p", "10.0.0.1")]);
    assert!(one.next().is_none());
}

#[test]
fn clients_on_one_node_share_the_states_of_a_local_service() {
    let hub = Hub::default();
    let client = |name: &str| {
        let pod = PodRef {
            namespace: "shop".into(),
            name: name.into(),
            uid: "".into(),
        };
        let mut reader = hub.watch_resources(Some(pod));
        reader.subscribe(&destination("10.96.0.1:80"));
        reader
    };
    let on_node = |name: &str, node: &str| {
        let Change::Apply(Object::Pod(pod)) = pod(name, "10.1.0.1") else {
            panic!("a pod")
        };
        let node = node.into();
        Change::Apply(Object::Pod(Pod { node, ..pod }))
    };
    let endpoints = |reader: &Resources| {
        let published = reader.next()?.1;
        let endpoints = published.target.as_ref()?.endpoints.iter();
        Some(
            endpoints
                .map(|one| one.address.to_string())
                .collect::<Vec<_>>(),
        )
    };
    let addresses = ["10.0.0.1", "10.0.0.2"];
    let mut service = crate::index::tests::service_with_pods("web", "10.96.0.1", &addresses);
    for object in &mut service {
        match object {
            Object::Service(service) => service.local_only = true,
            Object::Slice(slice) => {
                slice.endpoints[0].node = "n1".into();
                slice.endpoints[1].node = "n2".into();
            }
            _ => {}
        }
    }
    hub.apply([on_node("a", "n1"), on_node("b", "n1"), on_node("c", "n2")]);
    let changes = service.iter().cloned();
    hub.apply(changes.map(Change::Apply));
    let (a, b, c, late) = (client("a"), client("b"), client("c"), client("late"));
    let (first, second) = (
        vec!["10.0.0.1:8080".to_owned()],
        vec!["10.0.0.2:8080".to_owned()],
    );
    assert_eq!(endpoints(&a), Some(first.clone()));
    assert_eq!(endpoints(&b), Some(first));
    assert_eq!(endpoints(&c), Some(second.clone()));
    assert_eq!(endpoints(&late), Some(vec![]), "its node is unknown");
    let states = || hub.subscribers().states(&destination("10.96.0.1:80"));
    assert_eq!(states(), 3);
    // The catalog learns of the pod.
    hub.apply([on_node("late", "n2")]);
    assert_eq!(endpoints(&late), Some(second));
    assert!(a.next().is_none() && c.next().is_none());
    // The Service is the same for all clients again.
    let Some(Object::Service(mut web)) = service.iter().rev().nth(1).cloned() else {
        panic!("the Service comes before its slice")
    };
    web.local_only = false;
    hub.apply([Change::Apply(Object::Service(web))]);
    for reader in [&a, &b, &c, &late] {
        assert_eq!(endpoints(reader).unwrap().len(), 2);
    }
    assert_eq!(states(), 1);
}

#[test]
fn former_endpoints_are_kept_without_what_they_were_a_part_of() {
    let mut service =
        crate::index::tests::service_with_pods("web", "10.96.0.1", &["10.0.0.1", "10.0.0.2"]);
    for object in &mut service {
        match object {
            Object::Service(web) => web.local_only = true,
            Object::Slice(slice) => slice
                .endpoints
                .iter_mut()
                .for_each(|one| one.node = "n1".into()),
            Object::Pod(pod) => pod.node = "n1".into(),
            _ => {}
        }
    }
    let hub = Hub::default();
    let set = |object: &Object| Change::Apply(object.clone());
    hub.apply(service.iter().map(set));
    let mut reader = hub.watch_resources(Some(PodRef {
        namespace: "shop".into(),
        name: "10.0.0.1".into(),
        uid: "".into(),
    }));
    reader.subscribe(&destination("10.96.0.1:80"));
    let mut former = Vec::new();
    for ready in [true, false, true, false] {
        if let Some(Object::Slice(slice)) = service.last_mut() {
            slice.endpoints[1].ready = ready;
        }
        hub.apply(service.last().map(set));
        let (_, state) = reader.next().unwrap();
        let endpoints = &state.target.as_ref().unwrap().endpoints;
        assert_eq!(endpoints.len(), if ready { 2 } else { 1 });
        former.push((endpoints.version, Arc::downgrade(endpoints)));
    }
    let (latest, _) = former.pop().unwrap();
    for (version, endpoints) in former.into_iter().filter(|(version, _)| *version != latest) {
        assert!(hub.history().endpoints(version).is_some());
        assert!(
            endpoints.upgrade().is_none(),
            "with its encoding and the whole set"
        );
    }
}

#[test]
fn ended_subscriptions_leave_no_notifications() {
    let hub = Hub::default();
    let mut reader = hub.watch_resources(None);
    for port in 1..1000 {
        let resource = destination(&format!("10.0.0.1:{port}"));
        reader.subscribe(&resource);
        reader.unsubscribe(&resource);
    }
    assert_eq!(reader.queue.len(), 0);
}

#[test]
fn streams_read_their_notifications_while_states_are_resolved() {
    let hub = Hub::default();
    let mut reader = hub.watch_resources(None);
    reader.subscribe(&destination("10.0.0.1:80"));
    let resolving = hub.index();
    let (other, (resource, published)) = std::thread::scope(|scope| {
        let reading = scope.spawn(|| (hub.watch_resources(None), reader.next().unwrap()));
        reading.join().unwrap()
    });
    drop((resolving, other));
    assert_eq!(*resource, destination("10.0.0.1:80"));
    assert!(published.target.is_none());
}

#[test]
fn dropped_subscribers_leave_no_state() {
    let hub = Hub::default();
    let mut one = hub.watch_resources(None);
    one.subscribe(&destination("10.0.0.1:80"));
    one.subscribe(&destination("10.0.0.1:81"));
    one.unsubscribe(&destination("10.0.0.1:81"));
    let counts = hub.counts();
    assert_eq!((counts.resources, counts.subscriptions), (1, 1));
    drop(one);
    assert!(hub.subscribers().is_empty());
}

#[test]
fn readers_of_any_pace_end_with_the_state_of_the_index() {
    for seed in 0..50 {
        let mut chance = Chance(fastrand::Rng::with_seed(seed));
        let hub = Hub::default();
        // Pods that come, go, and move between nodes.
        let pods = ["p1", "p2", "p3"].map(|name| PodRef {
            namespace: "shop".into(),
            name: name.into(),
            uid: "".into(),
        });
        let mut readers: Vec<_> = pods
            .map(|pod| (hub.watch_resources(Some(pod)), HashMap::new()))
            .into();
        for _ in 0..200 {
            let count = chance.0.usize(..3);
            let changes: Vec<Change> = (0..count).map(|_| chance.change()).collect();
            hub.apply(changes);
            let (reader, known) = &mut readers[chance.0.usize(..3)];
            let all = Chance::resources();
            let some = all[chance.0.usize(..all.len())].clone();
            match chance.0.u8(..4) {
                0 => drop(reader.subscribe(&some)),
                1 => {
                    reader.unsubscribe(&some);
                    known.remove(&some);
                }
                _ => take(reader, known),
            }
        }
        for (reader, known) in &mut readers {
            while reader.queue.len() > 0 {
                take(reader, known);
            }
            let (location, subscribed) = hub.subscribers().of(reader);
            assert_eq!(known.len(), subscribed, "seed {seed}");
            for (resource, published) in known {
                assert_eq!(
                    **published,
                    hub.index().resolve(resource, &location).1,
                    "seed {seed}: {resource:?}"
                );
            }
        }
    }
}

fn take(reader: &Resources, known: &mut HashMap<Arc<Resource>, Arc<State>>) {
    if let Some((resource, published)) = reader.next() {
        known.insert(resource, published);
    }
}
