//! The writer with an API server in memory.

use std::sync::Mutex as Shared;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use diy_mesh_control_plane::events::Queue;

use super::*;
use crate::catalog::{Change, parse, resource};
use crate::object::Condition;
use crate::object::condition::APPLIES_TO_ALL_PODS;
use crate::object::status::CONTROLLER_NAME;
use crate::publish::Hub;
use crate::publish_statuses;
use crate::status::lease::Timing;
use crate::status::testing::{ApiServer, KIND, accepted, service, status, subscriber};
use diy_mesh_testkit::output::Output;

const TIMEOUT: Duration = Duration::from_secs(3600);

/// A running writer, its statuses, and the API server. Time is paused.
struct Fixture {
    server: ApiServer,
    statuses: Source,
    metrics: Arc<Metrics>,
    queue: Queue,
    writer: JoinHandle<Infallible>,
}

/// Statuses in memory.
#[derive(Clone)]
struct Source {
    current: Arc<Shared<Vec<ObjectStatus>>>,
    changed: watch::Sender<BTreeSet<ObjectId>>,
}

impl Source {
    fn new(statuses: Vec<ObjectStatus>) -> Source {
        Source {
            current: Arc::new(Shared::new(statuses)),
            changed: watch::Sender::default(),
        }
    }

    fn set(&self, statuses: Vec<ObjectStatus>) {
        let before = self.with_status();
        *self.current.lock().unwrap() = statuses;
        self.changed
            .send_modify(|all| all.extend(before.into_iter().chain(self.with_status())));
    }
}

impl Statuses for Source {
    fn with_status(&self) -> BTreeSet<ObjectId> {
        let current = self.current.lock().unwrap();
        current
            .iter()
            .map(|one| (one.kind, one.key.clone()))
            .collect()
    }

    fn get(&self, (kind, key): &ObjectId) -> Result<Option<ObjectStatus>, Withheld> {
        let current = self.current.lock().unwrap();
        let mut current = current.iter();
        let found = current.find(|one| (one.kind, &one.key) == (*kind, key));
        Ok(found.cloned())
    }

    fn changed(&self) -> &watch::Sender<BTreeSet<ObjectId>> {
        &self.changed
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.writer.abort();
    }
}

impl Fixture {
    fn start(server: ApiServer, statuses: Vec<ObjectStatus>) -> Fixture {
        Fixture::of_kinds(&[KIND], server, statuses)
    }

    fn of_kinds(kinds: &[Kind], server: ApiServer, statuses: Vec<ObjectStatus>) -> Fixture {
        let statuses = Source::new(statuses);
        let metrics = Arc::new(Metrics::new(|_| Ok(())));
        let (events, queue) = Events::new();
        let writer = Writer::new(server.client(), "mesh", kinds, metrics.clone(), events);
        let source = statuses.clone();
        Fixture {
            server,
            statuses,
            metrics,
            queue,
            writer: tokio::spawn(async move { writer.run(&source).await }),
        }
    }

    fn set(&self, statuses: Vec<ObjectStatus>) {
        self.statuses.set(statuses);
    }

    /// The status of the route when it meets the condition.
    async fn until(&self, what: &str, condition: impl Fn(&Value) -> bool) -> Value {
        let poll = async {
            loop {
                let route = self.server.get(&path("web")).unwrap();
                if condition(&route["status"]) {
                    return route["status"].clone();
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        let found = timeout(TIMEOUT, poll).await;
        found.unwrap_or_else(|_| panic!("{what}: {:?}", self.server.get(&path("web"))))
    }

    /// The requests until the writer waits for a change.
    async fn calls(&self) -> Vec<String> {
        let resource = resource(KIND).plural;
        let calls = calls_until_idle(&self.server).await.into_iter();
        calls
            .map(|call| call.replace(PREFIX, "").replace(&resource, "routes"))
            .collect()
    }
}

/// The requests of a writer until it waits for a change.
pub(super) async fn calls_until_idle(server: &ApiServer) -> Vec<String> {
    tokio::time::sleep(RESYNC_INTERVAL / 2).await;
    server.take_calls()
}

/// A writer that does not run.
pub(super) fn writer(server: &ApiServer) -> Writer {
    let metrics = Arc::new(Metrics::new(|_| Ok(())));
    let (events, _) = Events::new();
    let kinds = [KIND, Kind::Mesh];
    Writer::new(server.client(), "mesh", &kinds, metrics, events)
}

const PREFIX: &str = "/apis/gateway.networking.k8s.io/v1/";

fn path(name: &str) -> String {
    let plural = resource(KIND).plural;
    format!("{PREFIX}namespaces/shop/{plural}/{name}")
}

fn collection() -> String {
    format!("{PREFIX}{}", resource(KIND).plural)
}

/// A server with HTTPRoute shop/web, which has an entry of another controller.
fn server() -> ApiServer {
    let server = ApiServer::default();
    server.install(&collection());
    server.put(&path("web"), route("web"));
    server
}

fn route(name: &str) -> Value {
    json!({
        "metadata": {"namespace": "shop", "name": name, "generation": 1},
        "spec": {"parentRefs": [{"group": "", "kind": "Service", "name": "web"}]},
        "status": {"parents": [{"parentRef": {"name": "edge"}, "controllerName": "example.net/x"}]},
    })
}

fn desired(generation: i64, holds: bool) -> ObjectStatus {
    status(
        generation,
        vec![service("web", None, vec![accepted(holds)])],
    )
}

fn is_written(generation: i64) -> impl Fn(&Value) -> bool {
    move |status| {
        let condition = &status["parents"][1]["conditions"][0];
        condition["observedGeneration"] == generation
    }
}

#[tokio::test(start_paused = true)]
async fn kind_that_cannot_be_read_withholds_only_the_statuses_that_depend_on_it() {
    let (server, hub) = (server(), Hub::default());
    server.put(&path("till"), route("till"));
    let objects = r#"
{apiVersion: v1, kind: Service, metadata: {name: web, namespace: shop}, spec: {
  clusterIP: 10.96.0.1, ports: [{port: 80}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: open, namespace: shop}, spec: {
  clusterIP: 10.96.0.2, ports: [{port: 80}]}}
---
{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRoute,
 metadata: {name: web, namespace: shop, generation: 1},
 spec: {parentRefs: [{group: "", kind: Service, name: web}], rules: [{}]}}
---
{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRoute,
 metadata: {name: till, namespace: shop, generation: 1},
 spec: {parentRefs: [{group: "", kind: Service, name: open}],
  rules: [{backendRefs: [{name: till, namespace: bank, port: 80}]}]}}
"#;
    let listed = |kind| Change::Reset(kind, Vec::new());
    hub.apply(Kind::ALL.map(|kind| match kind {
        Kind::Grant | Kind::Mesh => Change::Unreadable(kind),
        _ => listed(kind),
    }));
    let objects = parse(objects, "cluster.local").unwrap().objects;
    hub.apply(objects.into_iter().map(Change::Apply));
    let election = Election::new(server.client(), "mesh", "one".into(), Timing::default());
    let (writer, stopping) = (Some((election, writer(&server))), CancellationToken::new());
    let (source, end) = (hub.clone(), stopping.clone());
    let writing = async move { publish_statuses(&source, writer, &end).await };
    let writing = tokio::spawn(writing);
    let writes = async || {
        let calls = calls_until_idle(&server).await.into_iter();
        let routes = calls.filter(|call| call.starts_with("PUT ") && call.ends_with("/status"));
        Vec::from_iter(routes)
    };
    let write = |name: &str| format!("PUT {}/status", path(name));
    assert_eq!(writes().await, [write("web")]);
    // Without the list of grants, this reference looks forbidden.
    hub.apply([listed(Kind::Grant)]);
    assert_eq!(writes().await, [write("till")]);
    let till = server.get(&path("till")).unwrap();
    let conditions = till["status"]["parents"][1]["conditions"]
        .as_array()
        .unwrap();
    let reasons = Vec::from_iter(conditions.iter().map(|one| &one["reason"]));
    assert!(reasons.contains(&&json!("RefNotPermitted")), "{reasons:?}");
    stopping.cancel();
    writing.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn own_meshes_get_their_condition_and_features_once() {
    const PATH: &str = "/apis/gateway.networking.x-k8s.io/v1alpha1/xmeshes";
    let server = ApiServer::default();
    server.install(PATH);
    let mesh = |name: &str, controller: &str| {
        json!({
            "apiVersion": "gateway.networking.x-k8s.io/v1alpha1", "kind": "XMesh",
            "metadata": {"name": name, "generation": 3},
            "spec": {"controllerName": controller},
            "status": {"conditions": [
                {"type": "Accepted", "status": "Unknown", "reason": "Pending", "message": "",
                    "lastTransitionTime": "1970-01-01T00:00:00Z"},
                {"type": "example.net/X", "status": "True"},
            ]},
        })
    };
    let mut with_parameters = mesh("parameters", CONTROLLER_NAME);
    with_parameters["spec"]["parametersRef"] = json!({"name": "x"});
    let meshes = [
        mesh("own", CONTROLLER_NAME),
        mesh("other", "example.net/mesh"),
        with_parameters,
    ];
    let parsed = |mesh: &Value| parse(&mesh.to_string(), "").unwrap().objects.remove(0);
    let (writer, hub) = (writer(&server), Hub::default());
    hub.apply([Change::Reset(
        Kind::Mesh,
        meshes.iter().map(parsed).collect(),
    )]);
    for mesh in &meshes {
        let name = mesh["metadata"]["name"].as_str().unwrap();
        server.put(&format!("{PATH}/{name}"), mesh.clone());
    }
    let statuses = hub.clone();
    let writing = tokio::spawn(async move { writer.run(&statuses).await });
    let writes = async || {
        let calls = calls_until_idle(&server).await.into_iter();
        Vec::from_iter(calls.filter(|call| call.starts_with("PUT ")))
    };
    let write = |name: &str| format!("PUT {PATH}/{name}/status");
    assert_eq!(writes().await, [write("own"), write("parameters")]);
    let status = |name: &str| server.get(&format!("{PATH}/{name}")).unwrap()["status"].clone();
    let own = status("own");
    let accepted = &own["conditions"][0];
    assert_eq!(
        (&accepted["type"], &accepted["status"], &accepted["reason"]),
        (&json!("Accepted"), &json!("True"), &json!("Accepted"))
    );
    assert_eq!(accepted["observedGeneration"], 3);
    assert_eq!(own["conditions"][1]["type"], "example.net/X");
    assert_eq!(own["supportedFeatures"][0]["name"], "GRPCRoute");
    let rejected = &status("parameters")["conditions"][0];
    assert_eq!(
        (&rejected["status"], &rejected["reason"]),
        (&json!("False"), &json!("InvalidParameters"))
    );
    assert_eq!(status("other"), mesh("other", "")["status"]);
    // After a list of the same objects, and after the resync.
    hub.apply([Change::Reset(
        Kind::Mesh,
        meshes.iter().map(parsed).collect(),
    )]);
    assert_eq!(writes().await, [""; 0]);
    assert_eq!(writes().await, [""; 0]);
    writing.abort();
}

#[tokio::test(start_paused = true)]
async fn writes_changes_and_nothing_else() {
    let fixture = Fixture::start(server(), vec![desired(1, true)]);
    let written = fixture.until("is written", is_written(1)).await;
    assert_eq!(written["parents"][0]["controllerName"], "example.net/x");
    assert_eq!(written["parents"][1]["controllerName"], CONTROLLER_NAME);
    let get = "GET namespaces/shop/routes/web";
    let put = "PUT namespaces/shop/routes/web/status";
    assert_eq!(fixture.calls().await, ["GET routes", get, put]);
    fixture.set(vec![desired(1, true)]);
    assert_eq!(fixture.calls().await, ["GET routes"]);
    fixture.set(vec![desired(2, false)]);
    fixture.until("is written", is_written(2)).await;
    assert_eq!(fixture.calls().await, [get, put]);
    assert_eq!(fixture.metrics.statuses_written.get(), 2);
}

#[tokio::test(start_paused = true)]
async fn writes_and_removes_a_condition_about_pods() {
    let fixture = Fixture::start(server(), vec![desired(1, true)]);
    fixture.until("is written", is_written(1)).await;
    let mut with_older = desired(1, true);
    with_older.parents[0].conditions.push(Condition {
        kind: APPLIES_TO_ALL_PODS,
        ..accepted(false)
    });
    fixture.set(vec![with_older]);
    let has = |number| {
        move |status: &Value| {
            let conditions = status["parents"][1]["conditions"].as_array();
            conditions.is_some_and(|all| all.len() == number)
        }
    };
    let written = fixture.until("has the condition", has(2)).await;
    let kind = &written["parents"][1]["conditions"][1]["type"];
    assert_eq!(kind, APPLIES_TO_ALL_PODS);
    fixture.set(vec![desired(1, true)]);
    let removed = fixture.until("has no such condition", has(1)).await;
    let kind = &removed["parents"][1]["conditions"][0]["type"];
    assert_eq!(kind, "Accepted");
    assert_eq!(removed["parents"][0], written["parents"][0]);
}

#[tokio::test(start_paused = true)]
async fn each_written_problem_is_one_event_about_the_route() {
    let mut route = route("web");
    route["metadata"]["uid"] = json!("1-2");
    let server = server();
    server.put(&path("web"), route);
    let mut fixture = Fixture::start(server, vec![desired(1, true)]);
    fixture.until("is written", is_written(1)).await;
    fixture.calls().await;
    assert!(fixture.queue.try_recv().is_none(), "no problem");
    fixture.set(vec![desired(2, false)]);
    fixture.until("is written", is_written(2)).await;
    // Several changes and resyncs without another status.
    for _ in 0..3 {
        fixture.set(vec![desired(2, false)]);
        fixture.calls().await;
    }
    let (object, event) = fixture.queue.try_recv().expect("an event");
    let named = (object.kind.as_deref(), object.name.as_deref());
    assert_eq!(named, (Some(KIND.name()), Some("web")));
    assert_eq!(object.uid.as_deref(), Some("1-2"));
    let problem = accepted(false);
    let note = event.note.unwrap();
    assert_eq!(event.reason, problem.reason);
    assert!(note.contains("Service web: Accepted is False") && note.contains(&problem.message));
    assert!(fixture.queue.try_recv().is_none(), "one event");
}

#[tokio::test(start_paused = true)]
async fn repeats_conflicting_writes_on_the_new_version() {
    let server = server();
    server.conflict_once(&path("web"), |route| {
        route["status"]["parents"][0]["new"] = json!("field");
    });
    let fixture = Fixture::start(server, vec![desired(1, true)]);
    let written = fixture.until("is written", is_written(1)).await;
    assert_eq!(written["parents"][0]["new"], "field");
    assert_eq!(fixture.metrics.status_conflicts.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn restores_its_entries_and_removes_stale_ones() {
    let fixture = Fixture::start(server(), vec![desired(1, true)]);
    let written = fixture.until("is written", is_written(1)).await;
    // Another controller replaces the whole list.
    fixture.server.put(&path("web"), route("web"));
    let restored = fixture.until("is restored", is_written(1)).await;
    assert_eq!(restored["parents"][0], written["parents"][0]);
    // The route has another parent now, and the mesh has no status for it.
    let mut other = fixture.server.get(&path("web")).unwrap();
    other["spec"] = json!({"parentRefs": [{"name": "edge"}]});
    fixture.server.put(&path("web"), other);
    fixture.set(Vec::new());
    let is_removed = |status: &Value| status["parents"].as_array().unwrap().len() == 1;
    let removed = fixture.until("is removed", is_removed).await;
    assert_eq!(removed["parents"][0], written["parents"][0]);
}

#[tokio::test(start_paused = true)]
async fn removes_stale_entries_of_a_predecessor() {
    let server = server();
    let mut stale = route("web");
    stale["status"]["parents"] = json!([{
        "parentRef": {"group": "", "kind": "Service", "name": "old"},
        "controllerName": CONTROLLER_NAME, "conditions": [],
    }]);
    server.put(&path("web"), stale);
    let fixture = Fixture::start(server, Vec::new());
    let is_empty = |status: &Value| status["parents"] == json!([]);
    fixture.until("is removed", is_empty).await;
}

#[tokio::test(start_paused = true)]
async fn retries_a_rejected_write_and_does_not_delay_others() {
    let server = server();
    server.put(&path("bad"), route("bad"));
    let rejected = format!("{}/status", path("bad"));
    server.reject(&rejected, Some(422));
    let mut bad = desired(1, true);
    bad.key = Key::new("shop", "bad");
    let fixture = Fixture::start(server, vec![bad, desired(1, true)]);
    fixture.until("is written", is_written(1)).await;
    assert!(fixture.metrics.statuses_failed.get() > 0);
    assert!(fixture.metrics.statuses_waiting.get() > 0);
    fixture.server.reject(&rejected, None);
    let poll = async {
        while !is_written(1)(&fixture.server.get(&path("bad")).unwrap()["status"]) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(TIMEOUT, poll).await.expect("the write is repeated");
    fixture.calls().await;
    // Back-off: the number of attempts does not depend on the number of changes.
    fixture.server.reject(&rejected, Some(422));
    let mut bad = desired(2, true);
    bad.key = Key::new("shop", "bad");
    fixture.set(vec![bad.clone(), desired(1, true)]);
    let failed = fixture.metrics.statuses_failed.get();
    for _ in 0..1000 {
        fixture.set(vec![bad.clone(), desired(1, true)]);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(fixture.metrics.statuses_failed.get() - failed <= 3);
}

#[tokio::test(start_paused = true)]
async fn missing_permission_for_a_kind_is_one_line_of_the_log_until_writes_succeed() {
    let log = Output::default();
    let _logging = tracing::subscriber::set_default(subscriber(&log));
    let lines = || log.text().matches("cannot write the status of").count();
    let server = server();
    let names = Vec::from_iter((0..20).map(|number| format!("r-{number}")));
    let set_permitted = |is_permitted: bool| {
        for name in &names {
            let code = (!is_permitted).then_some(403);
            server.reject(&format!("{}/status", path(name)), code);
        }
    };
    names
        .iter()
        .for_each(|name| server.put(&path(name), route(name)));
    set_permitted(false);
    let all = |generation| -> Vec<ObjectStatus> {
        let named = names.iter().map(|name| ObjectStatus {
            key: Key::new("shop", name),
            ..desired(generation, true)
        });
        named.collect()
    };
    let fixture = Fixture::start(server.clone(), all(1));
    fixture.calls().await;
    assert!(fixture.metrics.statuses_failed.get() >= 20);
    assert_eq!(lines(), 1, "{}", log.text());
    set_permitted(true);
    fixture.calls().await;
    assert_eq!(fixture.metrics.statuses_written.get(), 20);
    set_permitted(false);
    fixture.set(all(2));
    fixture.calls().await;
    assert_eq!(lines(), 2, "{}", log.text());
}

#[tokio::test(start_paused = true)]
async fn kind_that_cannot_be_listed_neither_stops_nor_repeats_the_comparison_of_others() {
    let server = server();
    let other = format!("{PREFIX}{}", resource(Kind::GrpcRoute).plural);
    server.install(&other);
    server.reject(&other, Some(500));
    // The mesh does not know the route, whose entry an earlier version has left.
    let mut left = route("web");
    left["status"]["parents"][0]["controllerName"] = json!(CONTROLLER_NAME);
    server.put(&path("web"), left);
    let fixture = Fixture::of_kinds(&[Kind::GrpcRoute, KIND], server, vec![]);
    let is_removed = |status: &Value| status["parents"].as_array().is_none_or(Vec::is_empty);
    fixture.until("the entry is removed", is_removed).await;
    let calls = calls_until_idle(&fixture.server).await;
    let lists = |collection: &str| {
        let list = format!("GET {collection}");
        calls.iter().filter(|call| **call == list).count()
    };
    assert_eq!(lists(&collection()), 1);
    assert!(lists(&other) > 3, "{calls:?}");
}

#[tokio::test(start_paused = true)]
async fn namespace_with_many_routes_does_not_delay_others() {
    const MANY: usize = 2000;
    let server = server();
    let names: Vec<String> = (0..MANY).map(|number| format!("r-{number}")).collect();
    for name in &names {
        let mut object = route(name);
        object["metadata"]["namespace"] = json!("big");
        server.put(&path(name).replace("/shop/", "/big/"), object);
    }
    let all = |generation| -> Vec<ObjectStatus> {
        let of_big = names.iter().map(|name| ObjectStatus {
            key: Key::new("big", name),
            ..desired(generation, true)
        });
        of_big.chain([desired(generation, true)]).collect()
    };
    // The number of writes before the write of shop/web.
    let writes_before = |fixture: &Fixture| {
        let calls = fixture.server.take_calls();
        let mut puts = calls.iter().filter(|call| call.starts_with("PUT "));
        puts.position(|call| call.contains("/shop/"))
    };
    let fixture = Fixture::start(server, all(1));
    fixture.until("is written first", is_written(1)).await;
    let before = writes_before(&fixture).unwrap();
    assert!(before <= 2, "{before} writes of the other namespace");
    // A change while the others are written.
    let mut changed = all(1);
    changed.pop();
    changed.push(desired(2, true));
    fixture.set(changed);
    fixture.until("a change is written", is_written(2)).await;
    let before = writes_before(&fixture).unwrap();
    assert!(before <= 100, "{before} writes of the other namespace");
    let written = fixture.metrics.statuses_written.get();
    assert!(written < MANY as u64 / 2, "{written}");
    // In the end all are written.
    fixture.calls().await;
    assert_eq!(fixture.metrics.statuses_written.get(), MANY as u64 + 2);
}

#[tokio::test(start_paused = true)]
async fn namespace_whose_writes_time_out_does_not_delay_others() {
    const MANY: usize = 200;
    let server = server();
    server.hang("/big/");
    let names: Vec<String> = (0..MANY).map(|number| format!("r-{number}")).collect();
    for name in &names {
        let mut object = route(name);
        object["metadata"]["namespace"] = json!("big");
        server.put(&path(name).replace("/shop/", "/big/"), object);
    }
    let all = |generation| -> Vec<ObjectStatus> {
        let of_big = names.iter().map(|name| ObjectStatus {
            key: Key::new("big", name),
            ..desired(1, true)
        });
        of_big.chain([desired(generation, true)]).collect()
    };
    // The writes that time out, until the next call of this function.
    let timeouts = |fixture: &Fixture| {
        let calls = fixture.server.take_calls().into_iter();
        let slow = calls.filter(|call| call.starts_with("PUT ") && call.contains("/big/"));
        slow.count()
    };
    let fixture = Fixture::start(server, all(1));
    for generation in 1..20 {
        fixture.set(all(generation));
        fixture.until("is written", is_written(generation)).await;
    }
    let before = timeouts(&fixture);
    assert!(
        before <= 20,
        "{before} timeouts before 20 writes of the other namespace"
    );
    // They are attempted again.
    tokio::time::sleep(RESYNC_INTERVAL).await;
    assert!(timeouts(&fixture) > 1);
}

#[tokio::test(start_paused = true)]
async fn only_the_holder_of_the_lease_writes_and_another_replica_follows_it() {
    let server = server();
    // Earlier releases have stored states of invalid objects.
    let stored = "/apis/apps/v1/namespaces/mesh/controllerrevisions";
    server.put(stored, json!({"metadata": {}, "items": []}));
    let start = |replica: &str| {
        let metrics = Arc::new(Metrics::new(|_| Ok(())));
        let writer = Writer::new(
            server.client(),
            "mesh",
            &[KIND],
            metrics.clone(),
            Events::new().0,
        );
        let timing = Timing::default();
        let election = Election::new(server.client(), "mesh", replica.into(), timing);
        // The sender is dropped: nothing changes.
        let statuses = Source::new(vec![desired(1, true)]);
        let stopping = CancellationToken::new();
        let end = stopping.clone();
        let running = tokio::spawn(async move { run(election, writer, &statuses, end).await });
        (metrics, stopping, running)
    };
    let (first, stop_first, first_running) = start("one");
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (second, stop_second, second_running) = start("two");
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert_eq!(
        (first.status_leader.get(), first.statuses_written.get()),
        (1, 1)
    );
    assert_eq!(
        (second.status_leader.get(), second.statuses_written.get()),
        (0, 0)
    );
    assert_eq!(server.get(stored), None, "the holder deletes them");
    let deletes = server.take_calls();
    let deletes = deletes.iter().filter(|call| call.starts_with("DELETE"));
    assert_eq!(deletes.collect::<Vec<_>>(), [&format!("DELETE {stored}")]);
    server.put(&path("web"), route("web"));
    stop_first.cancel();
    first_running.await.unwrap();
    assert_eq!(first.status_leader.get(), 0);
    // Sooner than the Lease expires.
    tokio::time::sleep(Duration::from_secs(15)).await;
    assert_eq!(
        (second.status_leader.get(), second.statuses_written.get()),
        (1, 1)
    );
    stop_second.cancel();
    second_running.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn deleted_routes_and_missing_kinds_are_no_errors() {
    let fixture = Fixture::start(ApiServer::default(), Vec::new());
    assert_eq!(fixture.calls().await, ["GET routes"]);
    let mut gone = desired(1, true);
    gone.key = Key::new("shop", "gone");
    fixture.set(vec![gone]);
    let get = "GET namespaces/shop/routes/gone";
    assert_eq!(fixture.calls().await, ["GET routes", get][1..]);
    assert_eq!(fixture.metrics.statuses_failed.get(), 0);
    // The kind is installed, and a route is created.
    fixture.server.install(&collection());
    fixture.server.put(&path("web"), route("web"));
    fixture.set(vec![desired(1, true)]);
    fixture.until("is written", is_written(1)).await;
}

#[tokio::test(start_paused = true)]
async fn marker_follows_the_policies_only_while_their_definition_is_kept() {
    const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    const MARKER: &str = "/api/v1/namespaces/mesh/configmaps/diy-service-mesh-authorization";
    let server = ApiServer::default();
    server.install(DEFINITIONS);
    let marker = Marker::new(&server.client(), "mesh");
    let set = |names: &[&str]| names.iter().map(|name| Arc::from(*name)).collect();
    let update = async |names: &[&str]| {
        marker.update(&set(names)).await.unwrap();
        marker.read().await.unwrap()
    };
    assert_eq!(update(&["shop"]).await, set(&[]), "no definition");
    let definition = format!("{DEFINITIONS}/authorizationpolicies.diy-service-mesh.dev");
    let kept = json!({"metadata": {"name": "authorizationpolicies.diy-service-mesh.dev"}});
    server.put(&definition, kept.clone());
    assert_eq!(update(&["shop"]).await, set(&["shop"]));
    assert_eq!(update(&["bank", "shop"]).await, set(&["bank", "shop"]));
    let mut terminating = kept.clone();
    terminating["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    server.put(&definition, terminating);
    assert_eq!(update(&[]).await, set(&["bank", "shop"]));
    assert!(marker.forget("bank").await.unwrap());
    assert!(!marker.forget("bank").await.unwrap());
    assert_eq!(update(&[]).await, set(&["shop"]));
    server.put(&definition, kept);
    server.conflict_once(MARKER, |map| map["data"] = json!({"till": ""}));
    assert!(
        marker.update(&set(&[])).await.is_err(),
        "another has written"
    );
    assert_eq!(update(&[]).await, set(&[]));
}
