//! The condition as authors see it: the proxies that cause it, what it reveals, and how often it
//! changes. With the hub that Discover streams use.

mod authorization;

use std::sync::Arc;

use diy_mesh_control_plane::events::{Events, Queue};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{advance, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::catalog::Change;
use crate::index::Resource;
use crate::index::tests::{endpoint, pod, service, slice};
use crate::kinds::policy::Side;
use crate::kinds::policy::tests::{policy, policy_for};
use crate::kinds::route::tests::{route, route_of};
use crate::kinds::{Object, Pod, Service};
use crate::metrics::Metrics;
use crate::object::condition::APPLIES_TO_ALL_PODS;
use crate::object::{Key, PodRef, TargetReference};
use crate::publish::{Hub, Lacking, Rejection, Resources};
use crate::status::lease::{Election, Timing};
use crate::status::statuses::Statuses as _;
use crate::status::testing::{ApiServer, KIND, accepted, service as parent, status};
use crate::status::writer::{self, Writer};

/// Whether a proxy is of an earlier release.
const OLD: bool = true;
const CURRENT: bool = false;
const WEB: &str = "10.96.0.7:80";
const OTHER: &str = "10.96.0.8:80";

fn route_statuses(hub: &Hub) -> Vec<ObjectStatus> {
    let all = hub.with_status().into_iter();
    all.filter_map(|id| hub.get(&id).unwrap()).collect()
}

fn apply(hub: &Hub, objects: impl IntoIterator<Item = Object>) {
    let changes = objects.into_iter();
    hub.apply(changes.map(Change::Apply));
}

/// The Services `web`, which selects the pod `replica`, and `other` in the namespace shop, and a
/// pod `client` in each of two namespaces.
fn catalog() -> Hub {
    let hub = Hub::default();
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
fn stream(hub: &Hub, pod: &Key, is_earlier: bool, subscriptions: &[&str]) -> Resources {
    let pod = PodRef {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        uid: "".into(),
    };
    let mut stream = hub.watch_resources(Some(pod));
    stream.set_lacking(Lacking {
        policies: is_earlier,
        authorization: is_earlier,
        egress: is_earlier,
        telemetry: is_earlier,
    });
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

/// The objects with the condition, the conditions, and their messages.
fn all_conditions(hub: &Hub) -> Vec<(String, Condition)> {
    let statuses = route_statuses(hub).into_iter();
    let conditions = statuses.flat_map(|status| {
        let of_parent = |parent: crate::object::TargetStatus| {
            let name = parent.parent.name.clone();
            let conditions = parent.conditions.into_iter();
            conditions.map(move |one| (name.clone(), one))
        };
        let (kind, key) = (status.kind, status.key);
        let conditions = status.parents.into_iter().flat_map(of_parent);
        conditions.map(move |(parent, one)| (format!("{kind} {key} at {parent}"), one))
    });
    let own = conditions.filter(|(_, one)| one.kind == PROGRAMMED);
    own.collect()
}

/// The objects that some proxies do not apply, with the messages.
fn conditions(hub: &Hub) -> Vec<(String, String)> {
    let all = all_conditions(hub).into_iter();
    let failed = all.filter(|(_, one)| !one.holds);
    failed.map(|(object, one)| (object, one.message)).collect()
}

/// Reviews until the current states count as published.
async fn review(hub: &Hub) {
    hub.review().await;
    advance(REVIEW_INTERVAL).await;
    hub.review().await;
}

async fn objects(hub: &Hub) -> Vec<String> {
    review(hub).await;
    let conditions = conditions(hub).into_iter();
    conditions.map(|(object, _)| object).collect()
}

/// A proxy receives its states, and applies or rejects them.
fn answer(stream: &Resources, rejection: Option<&Rejection>) {
    while let Some((resource, state)) = stream.next() {
        stream.acknowledge(&resource, state.rest, rejection.cloned());
    }
}

fn rejection(reason: &str, part: Option<Side>) -> Rejection {
    Rejection {
        reason: reason.into(),
        part,
    }
}

#[tokio::test(start_paused = true)]
async fn routes_that_an_old_proxy_does_not_apply_say_so() {
    let hub = catalog();
    let mut both = route("both", 0, to_web());
    both.parents.push(TargetReference::service("other"));
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
    tool.set_lacking(Lacking {
        policies: true,
        authorization: true,
        egress: true,
        telemetry: true,
    });
    tool.subscribe(&Resource::Destination(WEB.parse().unwrap()));
    let (shop, bank) = (Key::new("shop", "client"), Key::new("bank", "client"));
    assert_eq!(objects(&hub).await, [""; 0]);
    let current = stream(&hub, &shop, CURRENT, &[WEB, OTHER]);
    answer(&current, None);
    assert_eq!(objects(&hub).await, [""; 0], "it applies them");
    let unused = stream(&hub, &shop, OLD, &["10.96.0.9:80"]);
    assert_eq!(objects(&hub).await, [""; 0], "without routes");
    let mut old = stream(&hub, &shop, OLD, &[WEB]);
    let of_web = ["GRPCRoute shop/g at web", "TCPRoute shop/t at web"];
    assert_eq!(objects(&hub).await, of_web);
    old.subscribe(&Resource::Destination(OTHER.parse().unwrap()));
    // A GRPCRoute excludes HTTPRoutes, so that `both` is accepted by `other` only.
    let all = ["HTTPRoute shop/both at other", of_web[0], of_web[1]];
    assert_eq!(objects(&hub).await, all);
    assert_eq!(hub.counts().earlier, 2);
    drop((current, unused, old));
    assert_eq!(hub.counts().earlier, 0);
    let hub = catalog();
    let consumer = route_of(KIND, "bank", "r", 0, to_web());
    let producer = route("p", 0, to_web());
    apply(&hub, [consumer, producer].map(Object::Route));
    let _old = stream(&hub, &bank, OLD, &[WEB]);
    let expected = ["HTTPRoute bank/r at web"];
    assert_eq!(objects(&hub).await, expected, "the routes of its namespace");
}

#[tokio::test(start_paused = true)]
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
    let old = stream(&hub, &client, OLD, &[WEB]);
    let expected = ["TrafficPolicy shop/p at web"];
    assert_eq!(objects(&hub).await, expected, "it replaces the section");
    drop(old);
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

#[tokio::test(start_paused = true)]
async fn telemetry_that_a_proxy_does_not_apply_says_so() {
    let hub = catalog();
    let older = Service {
        created: -1,
        ..service("older", &["10.96.0.9"])
    };
    apply(&hub, [Object::Service(older)]);
    let dump = |mode: &str| json!({"telemetry": {"dump": {"mode": mode}}});
    apply(&hub, [Object::Policy(policy("p", 0, dump("Off")))]);
    let key = Key::new("shop", "replica");
    let mut replica = stream(&hub, &key, CURRENT, &[]);
    replica.subscribe(&Resource::Workload(key.clone(), "".into()));
    answer(&replica, None);
    assert_eq!(objects(&hub).await, [""; 0]);
    let of_web = |message: &str| {
        let object = "TrafficPolicy shop/p at web".to_owned();
        vec![(
            object,
            format!("0 of 1 pods have generation 7; not: replica ({message})"),
        )]
    };
    replica.set_lacking(Lacking {
        telemetry: true,
        ..Lacking::default()
    });
    review(&hub).await;
    let message = "the proxy is of an older release: restart the pod";
    assert_eq!(conditions(&hub), of_web(message));
    replica.set_lacking(Lacking::default());
    let target = json!([{"group": "", "kind": "Service", "name": "older"}]);
    apply(
        &hub,
        [Object::Policy(policy_for("o", 0, target, dump("Full")))],
    );
    answer(&replica, None);
    review(&hub).await;
    let message = "the telemetry of an older Service that selects the pod applies";
    assert_eq!(conditions(&hub), of_web(message));
}

#[tokio::test(start_paused = true)]
async fn policies_with_limits_that_a_pod_does_not_have_say_so() {
    let hub = catalog();
    let limits = || json!({"rateLimits": [{"name": "all", "requests": 7}]});
    let services = (0..15).map(|age| Service {
        created: age + 1,
        ..service(&format!("s{age}"), &["10.96.0.9"])
    });
    apply(&hub, services.map(Object::Service));
    let mut replica = stream(&hub, &Key::new("shop", "replica"), CURRENT, &[]);
    replica.subscribe(&Resource::Workload(Key::new("shop", "replica"), "".into()));
    let of = |name: &str, service: &str| {
        let target = json!([{"group": "", "kind": "Service", "name": service}]);
        Object::Policy(policy_for(name, 0, target, limits()))
    };
    apply(
        &hub,
        (0..15).map(|age| of(&format!("p{age}"), &format!("s{age}"))),
    );
    answer(&replica, None);
    assert_eq!(objects(&hub).await, [""; 0], "15 Services");
    let of_web = of("web", "web");
    apply(&hub, [of_web]);
    answer(&replica, None);
    review(&hub).await;
    let message = "0 of 1 pods have generation 7; not: \
        replica (a pod has the rate limits of the 15 oldest Services that select it, at most 128 KiB)";
    let youngest = || "TrafficPolicy shop/p14 at s14".to_owned();
    assert_eq!(conditions(&hub), [(youngest(), message.to_owned())]);
    // A proxy of an older release has no rate limits. The message says so first.
    let _old = stream(&hub, &Key::new("shop", "replica"), OLD, &[]);
    review(&hub).await;
    let all = conditions(&hub);
    assert_eq!(all.len(), 16);
    let old = all.iter().find(|(object, _)| *object == youngest());
    assert!(old.unwrap().1.contains("of an older release"), "{all:?}");
}

#[tokio::test(start_paused = true)]
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
    second.parents = vec![TargetReference::service("younger")];
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
    review(&hub).await;
    let statuses = route_statuses(&hub);
    let status = statuses.iter().find(|one| *one.key.name == *"s").unwrap();
    let conditions = status.parents[0].conditions.iter();
    let failed = conditions.filter(|one| !one.holds).map(|one| one.kind);
    let both = [APPLIES_TO_ALL_PODS, PROGRAMMED];
    assert_eq!(failed.collect::<Vec<_>>(), both, "they coexist");
}

#[tokio::test(start_paused = true)]
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
    let own = (0..12).map(|number| client("shop", &format!("c{number}")));
    apply(&hub, own.chain(secrets));
    let all = (0..2).map(|number| Key::new("bank", &format!("secret-{number}")));
    let all = all.chain((0..12).map(|number| key(&format!("c{number}"))));
    // A proxy that replaces its stream has two of them.
    let _old: Vec<_> = all
        .flat_map(|pod| [(); 2].map(|()| stream(&hub, &pod, OLD, &[WEB])))
        .collect();
    review(&hub).await;
    let expected = "0 of 14 pods have generation 7; not: \
        c0, c1, c10, c11, c2, c3, c4, c5, c6, c7 (the proxy is of an older release: restart the pod), \
        2 pods of namespace shop (the proxy is of an older release: restart the pod), \
        2 pods of other namespaces (the proxy is of an older release: restart the pod)";
    let object = "HTTPRoute shop/r at web".to_owned();
    assert_eq!(conditions(&hub), [(object, expected.to_owned())]);
}

#[tokio::test(start_paused = true)]
async fn rejected_routes_have_no_further_condition() {
    let hub = catalog();
    let rejected = json!([{"filters": [{"type": "Unknown"}], "matches": [{"method": "?"}]}]);
    let routes = [route("bad", 0, rejected), route("good", 1, to_web())];
    apply(&hub, routes.map(Object::Route));
    let _old = stream(&hub, &Key::new("shop", "client"), OLD, &[WEB]);
    assert_eq!(objects(&hub).await, ["HTTPRoute shop/good at web"]);
}

#[tokio::test(start_paused = true)]
async fn rejection_reaches_the_status_of_what_it_is_about() {
    let hub = catalog();
    apply(
        &hub,
        [
            Object::Route(route("r", 0, to_web())),
            Object::Policy(policy("p", 0, connections())),
        ],
    );
    let all = |number: usize| client("shop", &format!("c{number}"));
    apply(&hub, (0..3).map(all));
    let pods = (0..3).map(|number| Key::new("shop", &format!("c{number}")));
    let streams: Vec<Resources> = pods
        .chain([Key::new("bank", "client")])
        .map(|pod| stream(&hub, &pod, CURRENT, &[WEB]))
        .collect();
    let rejected = rejection("rule 0 (HTTPRoute shop/r): unknown", Some(Side::Requests));
    answer(&streams[0], None);
    answer(&streams[1], Some(&rejected));
    answer(
        &streams[3],
        Some(&rejection("of another namespace", Some(Side::Requests))),
    );
    review(&hub).await;
    let message = "1 of 4 pods have generation 7; not: \
        c1 (rejected: rule 0 (HTTPRoute shop/r): unknown), 1 pod of other namespaces (rejected), \
        c2 (not acknowledged yet)";
    let expected = ("HTTPRoute shop/r at web".to_owned(), message.to_owned());
    assert_eq!(conditions(&hub), [expected]);
    answer(&streams[2], None);
    review(&hub).await;
    let all = all_conditions(&hub);
    let seen: Vec<_> = all.iter().map(|(_, one)| (one.reason, one.holds)).collect();
    assert_eq!(seen, [("Rejected", false), ("Programmed", true)]);
    let of_policy = "4 of 4 pods have generation 7";
    assert_eq!(all[1].1.message, of_policy, "it is not in the routes");
    // Without the part, all of the state is rejected.
    let unnamed = rejection("x", None);
    let mut again = stream(&hub, &Key::new("shop", "c1"), CURRENT, &[]);
    again.subscribe(&Resource::Destination(WEB.parse().unwrap()));
    answer(&again, Some(&unnamed));
    let both = ["HTTPRoute shop/r at web", "TrafficPolicy shop/p at web"];
    assert_eq!(objects(&hub).await, both);
}

#[tokio::test(start_paused = true)]
async fn no_pod_of_another_namespace_makes_a_condition_false() {
    let objects = || {
        [
            Object::Route(route("r", 0, to_web())),
            Object::Route(route_of(Kind::GrpcRoute, "shop", "g", 1, json!([{}]))),
            Object::Route(route_of(Kind::TcpRoute, "shop", "t", 1, to_web())),
            Object::Policy(policy("p", 0, connections())),
        ]
    };
    let unknown = rejection("hostile", None);
    for object in objects() {
        // An older release, a rejection, and no answer.
        for (is_earlier, answers) in [
            (OLD, None),
            (CURRENT, Some(Some(&unknown))),
            (CURRENT, None),
        ] {
            let hub = catalog();
            apply(&hub, [object.clone()]);
            let own = stream(&hub, &Key::new("shop", "client"), CURRENT, &[WEB]);
            answer(&own, None);
            let other = stream(&hub, &Key::new("bank", "client"), is_earlier, &[WEB]);
            if let Some(rejection) = answers {
                answer(&other, rejection);
            }
            review(&hub).await;
            advance(STILL_TIME).await;
            hub.review().await;
            let [(name, condition)] = &all_conditions(&hub)[..] else {
                panic!("expected one condition");
            };
            assert!(condition.holds, "{name}: {condition:?}");
            let told = "1 of 2 pods have generation 7; not: 1 pod of other namespaces (";
            assert!(condition.message.starts_with(told), "{name}: {condition:?}");
            // One of its own namespace does.
            drop(own);
            let own = stream(&hub, &Key::new("shop", "client"), CURRENT, &[WEB]);
            answer(&own, Some(&unknown));
            review(&hub).await;
            assert_eq!(conditions(&hub).len(), 1, "{name}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn new_generation_is_not_applied_before_it_is_acknowledged() {
    let hub = catalog();
    apply(&hub, [Object::Route(route("r", 0, to_web()))]);
    let client = stream(&hub, &Key::new("shop", "client"), CURRENT, &[WEB]);
    answer(&client, None);
    let message = async || {
        review(&hub).await;
        let (_, condition) = all_conditions(&hub).remove(0);
        assert_eq!(condition.message.ends_with("yet)"), !condition.holds);
        (condition.generation, condition.message)
    };
    let applied = |generation: i64| {
        let message = "1 of 1 pods have generation";
        let message = format!("{message} {generation}");
        (Some(generation), message)
    };
    assert_eq!(message().await, applied(7));
    let mut changed = route("r", 0, json!([{"matches": [{"method": "GET"}]}]));
    changed.generation = 8;
    apply(&hub, [Object::Route(changed)]);
    for _ in 0..2 {
        assert_eq!(message().await, applied(7));
    }
    advance(STILL_TIME).await;
    let waiting = "0 of 1 pods have generation 8; not: \
        client (not acknowledged yet)";
    assert_eq!(message().await, (Some(8), waiting.to_owned()));
    answer(&client, None);
    assert_eq!(message().await, applied(8));
}

/// A hub whose statuses are written to an API server.
struct Written {
    hub: Hub,
    server: ApiServer,
    metrics: Arc<Metrics>,
    events: Queue,
    stopping: CancellationToken,
    tasks: [JoinHandle<()>; 2],
}

impl Written {
    const ROUTE: &str = "/apis/gateway.networking.k8s.io/v1/namespaces/shop/httproutes/r";
    const POLICY: &str = "/apis/diy-service-mesh.dev/v1alpha1/namespaces/shop/trafficpolicies/n";

    fn start(hub: Hub) -> Written {
        let server = ApiServer::default();
        let web = json!([{"group": "", "kind": "Service", "name": "web", "namespace": "shop"}]);
        let shop = json!([{"group": "", "kind": "Namespace", "name": "shop"}]);
        let (route, policy) = (json!({"parentRefs": web}), json!({"targetRefs": shop}));
        for (path, name, spec) in [(Self::ROUTE, "r", route), (Self::POLICY, "n", policy)] {
            let metadata = json!({"namespace": "shop", "name": name, "generation": 7});
            server.put(path, json!({"metadata": metadata, "spec": spec}));
        }
        let metrics = Arc::new(Metrics::new(|_| Ok(())));
        let (sender, events) = Events::new();
        let kinds = [KIND, Kind::TrafficPolicy];
        let writer = Writer::new(server.client(), "mesh", &kinds, metrics.clone(), sender);
        let election = Election::new(server.client(), "mesh", "one".into(), Timing::default());
        let stopping = CancellationToken::new();
        let (statuses, end) = (hub.clone(), stopping.clone());
        let writing = async move { writer::run(election, writer, &statuses, end).await };
        let (reviewing, end) = (hub.clone(), stopping.clone());
        let reviewing = async move {
            tokio::select! {
                never = reviewing.review_acknowledgements() => match never {},
                () = end.cancelled() => {}
            }
        };
        Written {
            hub,
            server,
            metrics,
            events,
            stopping,
            tasks: [tokio::spawn(writing), tokio::spawn(reviewing)],
        }
    }

    fn condition(&self, path: &str) -> Option<Value> {
        let object = self.server.get(path).unwrap();
        let entry = match path {
            Self::ROUTE => &object["status"]["parents"][0],
            _ => &object["status"]["ancestors"][0],
        };
        let mut conditions = entry["conditions"].as_array().into_iter().flatten();
        conditions.find(|one| one["type"] == PROGRAMMED).cloned()
    }

    /// Waits for a condition.
    async fn until(&self, path: &str, is_met: impl Fn(Option<&Value>) -> bool) -> Option<Value> {
        let poll = async {
            while !is_met(self.condition(path).as_ref()) {
                sleep(Duration::from_secs(1)).await;
            }
            self.condition(path)
        };
        let waited = timeout(3 * HOLD_TIME, poll).await;
        waited.unwrap_or_else(|_| panic!("{:?}", self.server.get(path)))
    }

    async fn end(self) {
        self.stopping.cancel();
        for task in self.tasks {
            task.await.unwrap();
        }
    }
}

fn message(condition: Option<&Value>) -> &str {
    condition.map_or("", |one| one["message"].as_str().unwrap())
}

#[tokio::test(start_paused = true)]
async fn condition_follows_the_proxies_and_is_removed_after_the_last_one() {
    let hub = catalog();
    apply(&hub, [Object::Route(route("r", 0, to_web()))]);
    let mut written = Written::start(hub);
    let client = Key::new("shop", "client");
    let old = stream(&written.hub, &client, OLD, &[WEB]);
    let condition = written.until(Written::ROUTE, |one| one.is_some()).await;
    let condition = condition.unwrap();
    let expected = ["False", "ProxyLacksCapability"];
    assert_eq!([&condition["status"], &condition["reason"]], expected);
    assert_eq!(condition["observedGeneration"], 7);
    let (_, event) = written.events.try_recv().expect("an event");
    assert_eq!(event.reason, "ProxyLacksCapability");
    drop(old);
    // The pod has the current proxy.
    let current = stream(&written.hub, &client, CURRENT, &[WEB]);
    answer(&current, None);
    let holds = |one: Option<&Value>| one.is_some_and(|one| one["status"] == "True");
    written.until(Written::ROUTE, holds).await;
    assert_eq!(
        written.metrics.statuses_written.get(),
        3,
        "Accepted, then these"
    );
    drop(current);
    written.until(Written::ROUTE, |one| one.is_none()).await;
    written.end().await;
}

#[tokio::test(start_paused = true)]
async fn five_thousand_pods_that_acknowledge_a_policy_are_a_few_writes() {
    const PODS: usize = 5000;
    let hub = catalog();
    let namespace = json!([{"group": "", "kind": "Namespace", "name": "shop"}]);
    let limits = json!({"rateLimits": [{"name": "all", "requests": 7}]});
    let of_namespace = policy_for("n", 0, namespace, limits);
    apply(&hub, [Object::Policy(of_namespace)]);
    let written = Written::start(hub);
    let rng = &mut fastrand::Rng::with_seed(7);
    let mut streams = Vec::new();
    // Pods start over ten minutes, and some leave. Each acknowledges a while later.
    let begin = Instant::now();
    let mut started = 0;
    while started < PODS {
        for _ in 0..rng.usize(0..20) {
            let name = format!("p{started}");
            started += 1;
            let replica = Pod {
                labels: service("web", &[]).selector.into_iter().collect(),
                ..pod(&name, &[])
            };
            apply(&written.hub, [Object::Pod(replica)]);
            let key = Key::new("shop", &name);
            let mut stream = stream(&written.hub, &key, CURRENT, &[]);
            stream.subscribe(&Resource::Workload(key, "".into()));
            streams.push(stream);
        }
        for stream in &streams[streams.len().saturating_sub(100)..] {
            if rng.bool() {
                answer(stream, None);
            }
        }
        if rng.u8(..10) == 0 {
            drop(streams.pop());
        }
        sleep(Duration::from_secs(1)).await;
    }
    assert!(begin.elapsed() > Duration::from_secs(400));
    streams.iter().for_each(|stream| answer(stream, None));
    let count = streams.len();
    let expected = "pods have generation 7";
    let expected = format!("{count} of {count} {expected}");
    let is_complete = |one: Option<&Value>| message(one) == expected;
    written.until(Written::POLICY, is_complete).await;
    let writes = written.metrics.statuses_written.get();
    assert!(writes < 20, "{writes}");
    written.end().await;
}

#[tokio::test(start_paused = true)]
async fn hostile_proxies_cause_a_write_each_ten_seconds_at_most() {
    let hub = catalog();
    apply(&hub, [Object::Route(route("r", 0, to_web()))]);
    let written = Written::start(hub);
    written
        .server
        .put("/unrelated", json!({"metadata": {"name": "x"}}));
    let honest = stream(&written.hub, &Key::new("shop", "client"), CURRENT, &[WEB]);
    answer(&honest, None);
    written.until(Written::ROUTE, |one| one.is_some()).await;
    let before = written.metrics.statuses_written.get();
    let rng = &mut fastrand::Rng::with_seed(7);
    let pods: Vec<Key> = (0..20)
        .map(|number| Key::new("bank", &format!("secret-{number}")))
        .collect();
    apply(
        &written.hub,
        pods.iter().map(|pod| client("bank", &pod.name)),
    );
    let mut streams: Vec<Resources> = Vec::new();
    let minutes = 10;
    for _ in 0..minutes * 60 {
        let pod = &pods[rng.usize(..pods.len())];
        streams.push(stream(
            &written.hub,
            pod,
            [OLD, CURRENT][rng.usize(..2)],
            &[WEB],
        ));
        let text: String = std::iter::repeat_with(|| rng.char(..)).take(1000).collect();
        let reason = rejection(&text, None);
        for stream in &streams {
            answer(stream, Some(&reason).filter(|_| rng.bool()));
            let absent = Resource::Backend(Key::new("shop", "absent"), 1);
            let version = crate::object::version::of("x", &rng.u64(..));
            stream.acknowledge(&absent, version, Some(reason.clone()));
        }
        while streams.len() > 15 || (rng.bool() && !streams.is_empty()) {
            streams.swap_remove(rng.usize(..streams.len()));
        }
        sleep(Duration::from_secs(1)).await;
        let object = written.server.get(Written::ROUTE).unwrap().to_string();
        assert!(
            !object.contains("secret") && !object.contains("bank"),
            "{object}"
        );
        assert!(object.len() < 2000, "{object}");
    }
    let writes = written.metrics.statuses_written.get() - before;
    assert!((10..=minutes * 6).contains(&writes), "{writes}");
    drop(streams);
    written
        .until(Written::ROUTE, |one| {
            one.is_some_and(|one| one["status"] == "True")
        })
        .await;
    written.end().await;
}

/// The findings for these objects with the same outcome at `pods` proxies.
fn found(names: &[&str], pods: usize, outcome: &Outcome) -> BTreeMap<Subject, (i64, Progress)> {
    let of = |name: &&str| {
        let subject = Subject {
            kind: KIND,
            key: Key::new("shop", name),
            target: Target::Service(Key::new("shop", "web")),
        };
        let keys: Vec<Key> = (0..pods)
            .map(|pod| Key::new("shop", &format!("c{pod}")))
            .collect();
        let progress = Progress::of("shop", keys.iter().map(|key| (key, outcome)));
        (subject, (1, progress))
    };
    names.iter().map(of).collect()
}

#[test]
fn numbers_alone_are_written_when_they_are_still() {
    let (mut reports, start) = (Reports::default(), Instant::now());
    let mut written = Vec::new();
    for tick in 0..60 {
        let now = start + REVIEW_INTERVAL * tick;
        // They change for 40 reviews.
        let count = 100 + tick.min(40) as usize;
        let found = found(&["web"], count, &Outcome::Applied);
        if !reports.update(now, found, BTreeMap::new()).is_empty() {
            written.push(tick);
        }
    }
    assert_eq!(written, [1, 46]);
}

#[test]
fn number_of_changes_is_limited_and_the_oldest_come_first() {
    let names: Vec<String> = (0..200).map(|number| format!("r{number:03}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (mut reports, start) = (Reports::default(), Instant::now());
    let mut written = Vec::new();
    for tick in 0..5 {
        // Written states differ again at once.
        let outcome = Outcome::Rejected(tick.to_string());
        let now = start + REVIEW_INTERVAL * tick;
        let changed = reports.update(now, found(&names, 1, &outcome), BTreeMap::new());
        written.extend(changed.into_iter().map(|(_, key)| key.name.to_string()));
    }
    assert_eq!(written.len(), 400);
    written.sort_unstable();
    for (twice, name) in written.chunks(2).zip(&names) {
        assert_eq!(twice, [*name, *name]);
    }
}

#[test]
fn condition_of_another_replica_stays_until_proxies_had_the_time_to_connect() {
    let (mut reports, start) = (Reports::default(), Instant::now());
    let keeps = |reports: &Reports| {
        let mut status = status(1, vec![parent("web", None, vec![accepted(true)])]);
        reports.add_to(&mut status);
        status.keeps_programmed
    };
    assert!(keeps(&reports));
    reports.update(start, BTreeMap::new(), BTreeMap::new());
    assert!(keeps(&reports));
    reports.update(start + HOLD_TIME, BTreeMap::new(), BTreeMap::new());
    assert!(!keeps(&reports));
}
