//! The condition as authors see it: the proxies that cause it, what it reveals, and how often it
//! changes. With the hub that Discover streams use.

use diy_mesh_control_plane::events::Events;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::authenticate::PodRef;
use crate::hub::{Hub, Resources};
use crate::index::enforcement::Missing;
use crate::index::object::{Change, Object, Pod, Resource, Service, Source};
use crate::index::tests::{endpoint, pod, service, slice};
use crate::metrics::Metrics;
use crate::policy::tests::{policy, policy_for};
use crate::routes::lease::{Election, Timing};
use crate::routes::statuses::{Source as _, Statuses};
use crate::routes::testing::{ApiServer, KIND, accepted, service as parent, status};
use crate::routes::tests::{route, route_of};
use crate::routes::writer::{self, Writer};
use crate::routes::{APPLIES_TO_ALL_PODS, ParentReference};

/// A release without both capabilities.
const OLD: Missing = Missing {
    routes: true,
    policy: true,
};
/// A release that applies routes.
const ROUTES_ONLY: Missing = Missing {
    routes: false,
    policy: true,
};
const WEB: &str = "10.96.0.7:80";
const OTHER: &str = "10.96.0.8:80";

fn route_statuses(hub: &Hub) -> Vec<RouteStatus> {
    let all = hub.with_status().into_iter();
    all.filter_map(|id| hub.get(&id)).collect()
}

fn apply(hub: &Hub, objects: impl IntoIterator<Item = Object>) {
    let changes = objects.into_iter();
    hub.apply(changes.map(|object| Change::Apply(Source::Kubernetes, object)));
}

/// The Services `web`, which selects the pod `replica`, and `other` in the namespace shop, and a
/// pod `client` in each of two namespaces.
fn catalog() -> Hub {
    let hub = Hub::new([Source::Kubernetes]);
    let mut other = service("other", &["10.96.0.8"]);
    other.selector.clear();
    apply(
        &hub,
        [
            Object::Service(service("web", &["10.96.0.7"])),
            Object::Service(other),
            Object::Pod(pod("replica", &["10.0.0.1"])),
            client("shop", "client"),
            client("bank", "client"),
        ],
    );
    hub
}

/// A meshed pod that no Service selects.
fn client(namespace: &str, name: &str) -> Object {
    Object::Pod(Pod {
        key: Key::new(namespace, name),
        labels: Default::default(),
        ..pod(name, &[])
    })
}

/// The stream of a pod with subscriptions.
fn stream(hub: &Hub, pod: &Key, missing: Missing, subscriptions: &[&str]) -> Resources {
    let pod = PodRef {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        uid: "".into(),
    };
    let mut stream = hub.watch_resources(Some(pod));
    stream.set_missing(missing);
    for address in subscriptions {
        stream.subscribe(&Resource::Destination(address.parse().unwrap()));
    }
    stream
}

fn to_web() -> Value {
    json!([{"backendRefs": [{"name": "web", "namespace": "shop", "port": 80}]}])
}

fn connections() -> Value {
    json!({"connections": {"maxRequests": 1}})
}

/// The objects with the condition, and their messages.
fn conditions(hub: &Hub) -> Vec<(String, String)> {
    let statuses = route_statuses(hub).into_iter();
    let conditions = statuses.flat_map(|status| {
        let of_parent = |parent: crate::routes::ParentStatus| {
            let name = parent.parent.name.clone();
            let conditions = parent.conditions.into_iter();
            conditions.map(move |one| (name.clone(), one))
        };
        let (kind, key) = (status.kind, status.key);
        let conditions = status.parents.into_iter().flat_map(of_parent);
        conditions.map(move |(parent, one)| (format!("{kind} {key} at {parent}"), one))
    });
    let own = conditions.filter(|(_, one)| one.kind == ENFORCED);
    own.map(|(object, one)| {
        assert!(!one.holds);
        let is_about_limits = one.message.starts_with("rate limits");
        assert_eq!(one.reason == TOO_MANY_RATE_LIMITS, is_about_limits);
        (object, one.message)
    })
    .collect()
}

async fn objects(hub: &Hub) -> Vec<String> {
    hub.review().await;
    let conditions = conditions(hub).into_iter();
    conditions.map(|(object, _)| object).collect()
}

#[tokio::test]
async fn routes_that_an_old_proxy_does_not_apply_say_so() {
    let hub = catalog();
    let mut both = route("both", 0, to_web());
    both.parents.push(ParentReference::service("other"));
    apply(
        &hub,
        [
            Object::Route(both),
            Object::Route(route_of(Kind::GrpcRoute, "shop", "g", 1, json!([{}]))),
            Object::Route(route_of(Kind::TcpRoute, "shop", "t", 1, to_web())),
            Object::Route(route_of(KIND, "bank", "r", 0, to_web())),
        ],
    );
    // A tool.
    let mut tool = hub.watch_resources(None);
    tool.set_missing(OLD);
    tool.subscribe(&Resource::Destination(WEB.parse().unwrap()));
    let (shop, bank) = (Key::new("shop", "client"), Key::new("bank", "client"));
    assert_eq!(objects(&hub).await, [""; 0]);
    let current = stream(&hub, &shop, Missing::default(), &[WEB, OTHER]);
    let routes_only = stream(&hub, &shop, ROUTES_ONLY, &[WEB, OTHER]);
    assert_eq!(objects(&hub).await, [""; 0], "these apply routes");
    let unused = stream(&hub, &shop, OLD, &["10.96.0.9:80"]);
    assert_eq!(objects(&hub).await, [""; 0], "without routes");
    let mut old = stream(&hub, &shop, OLD, &[WEB]);
    let of_web = ["GRPCRoute shop/g at web", "TCPRoute shop/t at web"];
    assert_eq!(objects(&hub).await, of_web);
    old.subscribe(&Resource::Destination(OTHER.parse().unwrap()));
    // A GRPCRoute excludes HTTPRoutes, so that `both` is accepted by `other` only.
    let all = ["HTTPRoute shop/both at other", of_web[0], of_web[1]];
    assert_eq!(objects(&hub).await, all);
    assert_eq!(hub.counts().missing, [2, 3]);
    drop((current, routes_only, unused, old));
    assert_eq!(hub.counts().missing, [0, 0]);
    let hub = catalog();
    let consumer = route_of(KIND, "bank", "r", 0, to_web());
    let producer = route("p", 0, to_web());
    apply(&hub, [consumer, producer].map(Object::Route));
    let _old = stream(&hub, &bank, OLD, &[WEB]);
    let expected = ["HTTPRoute bank/r at web"];
    assert_eq!(objects(&hub).await, expected, "the routes of its namespace");
}

#[tokio::test]
async fn policies_that_an_old_proxy_does_not_apply_say_so() {
    let with_policies = |own: Value| {
        let hub = catalog();
        let namespace = json!([{"group": "", "kind": "Namespace", "name": "shop"}]);
        let policies = [
            policy("p", 0, own),
            policy_for("n", 0, namespace, connections()),
        ];
        apply(&hub, policies.map(Object::Policy));
        hub
    };
    let hub = with_policies(connections());
    let client = Key::new("shop", "client");
    for missing in [OLD, ROUTES_ONLY] {
        let _old = stream(&hub, &client, missing, &[WEB]);
        let expected = ["TrafficPolicy shop/p at web"];
        assert_eq!(objects(&hub).await, expected, "it replaces the section");
    }
    let limits = json!({"rateLimits": [{"name": "all", "requests": 7}]});
    let hub = with_policies(limits);
    let mut old = stream(&hub, &client, OLD, &[]);
    assert_eq!(objects(&hub).await, [""; 0], "limits concern the replicas");
    old.subscribe(&Resource::Backend(Key::new("shop", "web"), 80));
    let of_namespace = "TrafficPolicy shop/n at shop";
    assert_eq!(objects(&hub).await, [of_namespace]);
    let _replica = stream(&hub, &Key::new("shop", "replica"), OLD, &[]);
    let expected = [of_namespace, "TrafficPolicy shop/p at web"];
    assert_eq!(objects(&hub).await, expected);
}

#[tokio::test]
async fn policies_with_limits_that_a_pod_does_not_have_say_so() {
    let hub = catalog();
    let limits = || json!({"rateLimits": [{"name": "all", "requests": 7}]});
    let services = (0..15).map(|age| Service {
        created: age + 1,
        ..service(&format!("s{age}"), &["10.96.0.9"])
    });
    apply(&hub, services.map(Object::Service));
    let of = |name: &str, service: &str| {
        let target = json!([{"group": "", "kind": "Service", "name": service}]);
        Object::Policy(policy_for(name, 0, target, limits()))
    };
    apply(
        &hub,
        (0..15).map(|age| of(&format!("p{age}"), &format!("s{age}"))),
    );
    assert_eq!(objects(&hub).await, [""; 0], "15 Services");
    let of_web = of("web", "web");
    apply(&hub, [of_web]);
    hub.review().await;
    let message = "rate limits of this policy do not apply to some pods, such as replica: a pod has \
        those of the 15 oldest Services that select it, at most 128 KiB";
    let youngest = || "TrafficPolicy shop/p14 at s14".to_owned();
    assert_eq!(conditions(&hub), [(youngest(), message.to_owned())]);
    // A proxy of an older release has none of them, which is said first.
    let _old = stream(&hub, &Key::new("shop", "replica"), OLD, &[]);
    hub.review().await;
    let all = conditions(&hub);
    assert_eq!(all.len(), 16);
    let old = all
        .iter()
        .find(|(object, _)| *object == youngest())
        .unwrap();
    assert!(
        old.1.starts_with("proxies of an older release"),
        "{}",
        old.1
    );
}

#[tokio::test]
async fn routes_of_headless_services_say_so_beside_other_conditions() {
    let hub = catalog();
    let of_web = slice("web", "web", 8080, vec![endpoint("10.0.0.1", "replica")]);
    apply(
        &hub,
        [
            Object::Service(service("web", &[])),
            Object::Slice(of_web),
            Object::Route(route("r", 0, json!([{}]))),
            Object::Policy(policy("p", 0, connections())),
        ],
    );
    let mut old = stream(&hub, &Key::new("shop", "client"), OLD, &["10.0.0.1:8080"]);
    let expected = ["HTTPRoute shop/r at web", "TrafficPolicy shop/p at web"];
    assert_eq!(objects(&hub).await, expected);
    // A younger Service has the pod too, and another one.
    let younger = Service {
        created: 1,
        ..service("younger", &[])
    };
    let endpoints = ["replica", "second"]
        .into_iter()
        .zip(["10.0.0.1", "10.0.0.2"]);
    let endpoints = endpoints.map(|(name, address)| endpoint(address, name));
    let of_younger = slice("younger", "younger", 8080, endpoints.collect());
    let mut second = route("s", 0, json!([{}]));
    second.parents = vec![ParentReference::service("younger")];
    apply(
        &hub,
        [
            Object::Pod(pod("second", &["10.0.0.2"])),
            Object::Service(younger),
            Object::Slice(of_younger),
            Object::Route(second),
        ],
    );
    assert_eq!(objects(&hub).await, expected);
    old.subscribe(&Resource::Destination("10.0.0.2:8080".parse().unwrap()));
    hub.review().await;
    let statuses = route_statuses(&hub);
    let status = statuses.iter().find(|one| *one.key.name == *"s").unwrap();
    let conditions = status.parents[0].conditions.iter();
    let failed = conditions.filter(|one| !one.holds).map(|one| one.kind);
    let both = [APPLIES_TO_ALL_PODS, ENFORCED];
    assert_eq!(failed.collect::<Vec<_>>(), both, "they coexist");
}

#[tokio::test]
async fn only_proxies_of_meshed_pods_count_and_only_names_of_the_own_namespace_are_told() {
    let hub = catalog();
    apply(&hub, [Object::Route(route("r", 0, to_web()))]);
    let unmeshed = Pod {
        identity: None,
        ..pod("unmeshed", &[])
    };
    let terminating = Pod {
        terminating: true,
        ..pod("terminating", &[])
    };
    let replaced = Pod {
        uid: "2".into(),
        ..pod("replaced", &[])
    };
    apply(&hub, [unmeshed, terminating, replaced].map(Object::Pod));
    let key = |name: &str| Key::new("shop", name);
    let names = ["unmeshed", "terminating", "replaced", "absent"];
    let _ignored = names.map(|name| stream(&hub, &key(name), OLD, &[WEB]));
    assert_eq!(objects(&hub).await, [""; 0]);
    let secrets = (0..2).map(|number| client("bank", &format!("secret-{number}")));
    let own = (0..5).map(|number| client("shop", &format!("c{number}")));
    apply(&hub, own.chain(secrets));
    let all = (0..2).map(|number| Key::new("bank", &format!("secret-{number}")));
    let all = all.chain((0..5).map(|number| key(&format!("c{number}"))));
    // A proxy that replaces its stream has two of them.
    let _old: Vec<_> = all
        .flat_map(|pod| [(); 2].map(|()| stream(&hub, &pod, OLD, &[WEB])))
        .collect();
    hub.review().await;
    let expected = "proxies of an older release do not apply this route: those of \
        5 pods of namespace shop (c0, c1, c2, ...) and 2 pods of other namespaces; \
        restart these pods, so that they get the current proxy";
    let object = "HTTPRoute shop/r at web".to_owned();
    assert_eq!(conditions(&hub), [(object, expected.to_owned())]);
}

#[tokio::test]
async fn rejected_routes_have_no_further_condition() {
    let hub = catalog();
    let rejected = json!([{"filters": [{"type": "Unknown"}], "matches": [{"method": "?"}]}]);
    let routes = [route("bad", 0, rejected), route("good", 1, to_web())];
    apply(&hub, routes.map(Object::Route));
    let _old = stream(&hub, &Key::new("shop", "client"), OLD, &[WEB]);
    assert_eq!(objects(&hub).await, ["HTTPRoute shop/good at web"]);
}

#[tokio::test(start_paused = true)]
async fn condition_is_written_and_is_removed_after_the_last_old_proxy() {
    let path = "/apis/gateway.networking.k8s.io/v1/namespaces/shop/httproutes/r";
    let server = ApiServer::default();
    let parents = json!([{"group": "", "kind": "Service", "name": "web", "namespace": "shop"}]);
    server.put(
        path,
        json!({
            "metadata": {"namespace": "shop", "name": "r", "generation": 7},
            "spec": {"parentRefs": parents},
        }),
    );
    let hub = catalog();
    apply(&hub, [Object::Route(route("r", 0, to_web()))]);
    let source = hub.clone();
    let statuses = Statuses::new(source);
    let metrics = Arc::new(Metrics::new(|_| Ok(())));
    let (events, mut queue) = Events::new();
    let writer = Writer::new(server.client(), "mesh", &[KIND], metrics.clone(), events);
    let election = Election::new(server.client(), "mesh", "one".into(), Timing::default());
    let stopping = CancellationToken::new();
    let writing = tokio::spawn(writer::run(election, writer, statuses, stopping.clone()));
    let reviewing = tokio::spawn({
        let hub = hub.clone();
        async move { hub.review_enforcement().await }
    });
    let condition = || {
        let object = server.get(path).unwrap();
        let conditions = object["status"]["parents"][0]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        conditions.find(|one| one["type"] == ENFORCED).cloned()
    };
    let until = async |present: bool| {
        let poll = async {
            while condition().is_some() != present {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        let waited = tokio::time::timeout(2 * HOLD_TIME, poll).await;
        waited.unwrap_or_else(|_| panic!("{present}: {:?}", server.get(path)));
    };
    let client = Key::new("shop", "client");
    let old = stream(&hub, &client, OLD, &[WEB]);
    until(true).await;
    let written = condition().unwrap();
    let expected = ["False", "ProxyLacksCapability"];
    assert_eq!([&written["status"], &written["reason"]], expected);
    assert_eq!(written["observedGeneration"], 7);
    let (_, event) = queue.try_recv().expect("an event");
    assert_eq!(event.reason, "ProxyLacksCapability");
    let writes = metrics.statuses_written.get();
    drop(old);
    // The pod has the current proxy.
    let _current = stream(&hub, &client, Missing::default(), &[WEB]);
    until(false).await;
    assert_eq!(metrics.statuses_written.get(), writes + 1);
    stopping.cancel();
    writing.await.unwrap();
    reviewing.abort();
}

/// A route that `count` pods do not apply.
fn found(names: &[&str], count: usize) -> BTreeMap<Subject, Pods> {
    let of = |name: &&str| {
        let subject = Subject {
            cause: Cause::Capability,
            kind: KIND,
            key: Key::new("shop", name),
            target: Target::Service(Key::new("shop", "web")),
        };
        let mut pods = Pods::default();
        (0..count).for_each(|number| pods.add(&Key::new("shop", &format!("c{number}")), "shop"));
        (subject, pods)
    };
    names.iter().map(of).collect()
}

#[test]
fn condition_stays_while_streams_come_and_go() {
    let (mut reports, start) = (Reports::default(), Instant::now());
    let at = |seconds| start + Duration::from_secs(seconds);
    let message = |reports: &Reports| {
        let mut status = status(1, vec![parent("web", None, vec![accepted(true)])]);
        reports.add_to(&mut status);
        let added = status.parents.remove(0).conditions.into_iter().nth(1);
        added.map(|one| one.message)
    };
    assert!(!reports.update(at(0), &found(&["web"], 1)).is_empty());
    let first = message(&reports).unwrap();
    // Streams of many pods, of one, or of none.
    for (tick, count) in (1..30).zip([900, 1, 0, 5].into_iter().cycle()) {
        let names: &[&str] = if count == 0 { &[] } else { &["web"] };
        assert!(
            reports
                .update(at(10 * tick), &found(names, count))
                .is_empty()
        );
        assert_eq!(message(&reports).as_ref(), Some(&first));
    }
    assert!(!reports.update(at(300), &found(&["web"], 2)).is_empty());
    let second = message(&reports).unwrap();
    assert!(second.contains("2 pods"), "{second}");
    assert!(reports.update(at(599), &found(&[], 0)).is_empty());
    assert!(
        !reports.update(at(600), &found(&[], 0)).is_empty(),
        "unseen"
    );
    assert_eq!(message(&reports), None);
    assert!(reports.update(at(601), &found(&[], 0)).is_empty());
}

#[test]
fn number_of_changes_is_limited() {
    let names: Vec<String> = (0..120).map(|number| format!("r{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (mut reports, start) = (Reports::default(), Instant::now());
    let mut sizes = Vec::new();
    while !reports.update(start, &found(&names, 1)).is_empty() {
        sizes.push(reports.0.len());
    }
    assert_eq!(sizes, [20, 40, 60, 80, 100, 120]);
    let end = start + HOLD_TIME;
    while !reports.update(end, &found(&[], 1)).is_empty() {
        sizes.push(reports.0.len());
    }
    assert_eq!(sizes[6..], [100, 80, 60, 40, 20, 0]);
}
