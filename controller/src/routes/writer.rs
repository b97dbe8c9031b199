//! The writer of `status.parents`. It writes on the replica that holds the Lease.
//!
//! Level-triggered: after each change it writes the routes whose conditions differ from those that
//! it has written. At its start and every `RESYNC_INTERVAL` it compares all routes of the
//! cluster. Each write is based on the resource version of the route that it has read.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_control_plane::events::Events;
use diy_mesh_runtime::{Backoff, error_chain};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client, ResourceExt};
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::lease::{Election, LEASE};
use super::{Condition, RouteStatus, report, status};
use crate::index::object::{Key, Kind};
use crate::metrics::Metrics;
use crate::policy;

/// Time between two comparisons of all routes with the cluster.
const RESYNC_INTERVAL: Duration = Duration::from_secs(600);
/// Limits the load of the API server.
const REQUEST_INTERVAL: Duration = Duration::from_millis(20);
const API_TIMEOUT: Duration = Duration::from_secs(10);
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(500);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// Objects in one response to a LIST.
const PAGE_SIZE: u32 = 500;
/// Writes by others between a read and a write, until they count as an error.
const MAX_CONFLICTS: usize = 10;

/// Writes while this replica holds the Lease, until `stopping`. Then releases the Lease.
pub async fn run(
    mut election: Election,
    writer: Writer,
    statuses: Statuses,
    stopping: CancellationToken,
) {
    let leader = &writer.metrics.status_leader;
    loop {
        tokio::select! {
            () = election.acquire() => {}
            () = stopping.cancelled() => return,
        }
        tracing::info!("this replica writes the status of routes (Lease {LEASE})");
        leader.set(1);
        tokio::select! {
            () = election.keep() => {}
            () = stopping.cancelled() => {}
            never = writer.run(statuses.clone()) => match never {},
        }
        leader.set(0);
        if stopping.is_cancelled() {
            return election.release().await;
        }
        tracing::warn!("this replica has lost Lease {LEASE} and writes no status of routes");
    }
}

/// The statuses of all routes, and a notification after each change.
#[derive(Clone)]
pub struct Statuses {
    current: Arc<dyn Fn() -> Vec<RouteStatus> + Send + Sync>,
    changed: watch::Receiver<()>,
}

impl Statuses {
    /// Statuses that `current` returns, and that `changed` announces.
    pub fn new(
        current: impl Fn() -> Vec<RouteStatus> + Send + Sync + 'static,
        changed: watch::Receiver<()>,
    ) -> Statuses {
        Statuses {
            current: Arc::new(current),
            changed,
        }
    }

    /// The current statuses by route. Marks them as seen.
    pub(super) fn current(&mut self) -> BTreeMap<Route, RouteStatus> {
        self.changed.mark_unchanged();
        let statuses = (self.current)().into_iter();
        statuses
            .map(|status| (Route(status.kind, status.key.clone()), status))
            .collect()
    }

    /// Waits for a change. Never returns after the last one.
    pub(super) async fn changed(&mut self) {
        if self.changed.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

/// A route of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Route(pub(super) Kind, pub(super) Key);

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0, self.1)
    }
}

/// Writes the statuses of the routes of a cluster.
pub struct Writer {
    client: Client,
    kinds: Vec<Kind>,
    metrics: Arc<Metrics>,
    events: Events,
    pace: Mutex<Interval>,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{}", error_chain(.0))]
    Client(#[from] kube::Error),
    #[error("the Kubernetes API does not respond")]
    Timeout,
    #[error("other clients have changed the route {MAX_CONFLICTS} times between read and write")]
    Conflicts,
}

/// What the writer knows of the cluster.
#[derive(Default)]
struct Progress {
    /// The statuses in the cluster.
    written: BTreeMap<Route, RouteStatus>,
    /// Routes that the mesh no longer knows, and whose entries may remain.
    removed: BTreeSet<Route>,
    failed: BTreeMap<Route, (Instant, Backoff)>,
}

impl Writer {
    /// A writer for these kinds of routes. The others have no status, and get Events.
    pub fn new(client: Client, kinds: &[Kind], metrics: Arc<Metrics>, events: Events) -> Writer {
        let mut pace = interval(REQUEST_INTERVAL);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Writer {
            client,
            kinds: kinds.to_vec(),
            metrics,
            events,
            pace: Mutex::new(pace),
        }
    }

    /// Writes until it is dropped.
    async fn run(&self, mut statuses: Statuses) -> Infallible {
        let (mut progress, mut announced) = (Progress::default(), BTreeMap::new());
        let mut resync = Instant::now();
        let mut backoff = Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
        loop {
            let current = statuses.current().into_iter();
            let has_status = |(route, _): &(Route, RouteStatus)| self.kinds.contains(&route.0);
            let (desired, others) = current.partition(has_status);
            report::announce(&mut announced, others, &self.events);
            if Instant::now() >= resync {
                let delay = match self.resync(&desired, &mut progress).await {
                    Ok(()) => {
                        backoff.reset();
                        RESYNC_INTERVAL
                    }
                    Err((kind, error)) => {
                        let delay = backoff.next_delay();
                        tracing::warn!(
                            "cannot list {kind} objects, retrying in {delay:?}: {error}"
                        );
                        delay
                    }
                };
                resync = Instant::now() + delay;
            }
            for route in progress.due(&desired) {
                let status = desired.get(&route);
                let result = self.reconcile(&route, status, None).await;
                self.finish(&mut progress, route, status, result);
            }
            tokio::select! {
                () = statuses.changed() => {}
                () = sleep_until(progress.next_retry().unwrap_or(resync).min(resync)) => {}
            }
        }
    }

    /// Compares all routes of the cluster. A kind that is not installed has none.
    async fn resync(
        &self,
        desired: &BTreeMap<Route, RouteStatus>,
        progress: &mut Progress,
    ) -> Result<(), (Kind, Error)> {
        for kind in &self.kinds {
            let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource(*kind));
            let mut params = ListParams::default().limit(PAGE_SIZE);
            loop {
                let page = match request(api.list(&params)).await {
                    Ok(page) => page,
                    Err(error) if error.is(404) => break,
                    Err(error) => return Err((*kind, error)),
                };
                for object in page.items {
                    let namespace = object.namespace().unwrap_or_default();
                    let route = Route(*kind, Key::new(&namespace, &object.name_any()));
                    let status = desired.get(&route);
                    let result = self.reconcile(&route, status, Some(object)).await;
                    self.finish(progress, route, status, result);
                }
                match page.metadata.continue_.filter(|token| !token.is_empty()) {
                    Some(token) => params.continue_token = Some(token),
                    None => break,
                }
            }
        }
        Ok(())
    }

    /// Writes the status of a route, unless the cluster has it already. `object` is the route, if
    /// it was read just now.
    async fn reconcile(
        &self,
        route: &Route,
        desired: Option<&RouteStatus>,
        mut object: Option<DynamicObject>,
    ) -> Result<(), Error> {
        let Route(kind, key) = route;
        let resource = resource(*kind);
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), &key.namespace, &resource);
        for _ in 0..MAX_CONFLICTS {
            let current = match object.take() {
                Some(object) => object,
                None => {
                    self.pace.lock().await.tick().await;
                    match request(api.get_opt(&key.name)).await? {
                        Some(object) => object,
                        // Deleted, or its kind is not installed.
                        None => return Ok(()),
                    }
                }
            };
            let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
            let Some(changed) = status::merge(*kind, &current, desired, &now) else {
                return Ok(());
            };
            let mut current = current;
            current.data["status"] = changed;
            self.pace.lock().await.tick().await;
            let params = PostParams::default();
            match request(api.replace_status(&key.name, &params, &current)).await {
                Ok(_) => {
                    self.metrics.statuses_written.inc();
                    self.report_problems(&current, &resource, desired);
                    return Ok(());
                }
                Err(error) if error.is(404) => return Ok(()),
                Err(error) if error.is(409) => drop(self.metrics.status_conflicts.inc()),
                Err(error) => return Err(error),
            }
        }
        Err(Error::Conflicts)
    }

    /// Queues an event about each condition that does not hold. Written statuses have changed, so
    /// that neither a resync nor another holder of the Lease repeats them.
    fn report_problems(
        &self,
        object: &DynamicObject,
        resource: &ApiResource,
        status: Option<&RouteStatus>,
    ) {
        let reference = ObjectReference {
            api_version: Some(resource.api_version.clone()),
            kind: Some(resource.kind.clone()),
            namespace: object.namespace(),
            name: Some(object.name_any()),
            uid: object.uid(),
            ..ObjectReference::default()
        };
        for parent in status.iter().flat_map(|status| &status.parents) {
            let conditions = parent.conditions.iter().filter(|one| !one.holds);
            for Condition {
                kind,
                reason,
                message,
                ..
            } in conditions
            {
                let note = format!("{}: {kind} is False: {message}", parent.parent);
                self.events.warn(reference.clone(), reason, "Attach", &note);
            }
        }
    }

    /// Records the result of a write.
    fn finish(
        &self,
        progress: &mut Progress,
        route: Route,
        status: Option<&RouteStatus>,
        result: Result<(), Error>,
    ) {
        let Err(error) = result else {
            progress.failed.remove(&route);
            progress.removed.remove(&route);
            match status {
                Some(status) => drop(progress.written.insert(route, status.clone())),
                None => drop(progress.written.remove(&route)),
            }
            return;
        };
        self.metrics.statuses_failed.inc();
        let new = || Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
        let (_, mut backoff) = progress
            .failed
            .remove(&route)
            .unwrap_or_else(|| (Instant::now(), new()));
        let delay = backoff.next_delay();
        tracing::warn!("cannot write the status of {route}, retrying in {delay:?}: {error}");
        if status.is_none() {
            progress.removed.insert(route.clone());
        }
        progress.written.remove(&route);
        progress
            .failed
            .insert(route, (Instant::now() + delay, backoff));
    }
}

impl Progress {
    /// The routes whose status differs from the desired one, except failed ones that wait.
    fn due(&mut self, desired: &BTreeMap<Route, RouteStatus>) -> Vec<Route> {
        let is_gone = |route: &&Route| !desired.contains_key(*route);
        let known = self.written.keys().chain(self.failed.keys());
        self.removed.extend(known.filter(is_gone).cloned());
        self.written.retain(|route, _| desired.contains_key(route));
        let differs = |(route, status): &(&Route, &RouteStatus)| {
            self.written.get(*route).is_none_or(|one| one != *status)
        };
        let changed = desired.iter().filter(differs).map(|(route, _)| route);
        let removed = self.removed.iter().filter(is_gone);
        let now = Instant::now();
        let waits = |route: &&Route| {
            let failure = self.failed.get(*route);
            failure.is_some_and(|(retry, _)| *retry > now)
        };
        let due = changed.chain(removed).filter(|route| !waits(route));
        due.cloned().collect()
    }

    fn next_retry(&self) -> Option<Instant> {
        self.failed.values().map(|(retry, _)| *retry).min()
    }
}

impl Error {
    fn is(&self, code: u16) -> bool {
        matches!(self, Error::Client(kube::Error::Api(status)) if status.code == code)
    }
}

/// The result of a request, unless the API server does not respond in time.
async fn request<T>(work: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Error> {
    match timeout(API_TIMEOUT, work).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(Error::Timeout),
    }
}

/// The resource of a kind, in the version that the mesh reads.
fn resource(kind: Kind) -> ApiResource {
    let (group, version) = match kind {
        Kind::TrafficPolicy => (policy::GROUP, policy::VERSION),
        Kind::TcpRoute => ("gateway.networking.k8s.io", "v1alpha2"),
        _ => ("gateway.networking.k8s.io", "v1"),
    };
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind.name()))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex as Shared;

    use serde_json::{Value, json};
    use tokio::task::JoinHandle;

    use diy_mesh_control_plane::events::Queue;

    use super::*;
    use crate::routes::APPLIES_TO_ALL_PODS;
    use crate::routes::lease::Timing;
    use crate::routes::status::CONTROLLER_NAME;
    use crate::routes::testing::{ApiServer, KIND, accepted, service, status};

    const TIMEOUT: Duration = Duration::from_secs(3600);

    /// A running writer, its statuses, and the API server. Time is paused.
    struct Fixture {
        server: ApiServer,
        statuses: Arc<Shared<Vec<RouteStatus>>>,
        changed: watch::Sender<()>,
        metrics: Arc<Metrics>,
        queue: Queue,
        writer: JoinHandle<Infallible>,
    }

    impl Drop for Fixture {
        fn drop(&mut self) {
            self.writer.abort();
        }
    }

    impl Fixture {
        fn start(server: ApiServer, statuses: Vec<RouteStatus>) -> Fixture {
            let statuses = Arc::new(Shared::new(statuses));
            let (changed, receiver) = watch::channel(());
            let shared = statuses.clone();
            let current = move || shared.lock().unwrap().clone();
            let metrics = Arc::new(Metrics::new(|_| Ok(())));
            let (events, queue) = Events::new();
            let writer = Writer::new(server.client(), &[KIND], metrics.clone(), events);
            let source = Statuses::new(current, receiver);
            Fixture {
                server,
                statuses,
                changed,
                metrics,
                queue,
                writer: tokio::spawn(async move { writer.run(source).await }),
            }
        }

        fn set(&self, statuses: Vec<RouteStatus>) {
            *self.statuses.lock().unwrap() = statuses;
            self.changed.send_replace(());
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
            tokio::time::sleep(RESYNC_INTERVAL / 2).await;
            let resource = resource(KIND).plural;
            let calls = self.server.take_calls().into_iter();
            calls
                .map(|call| call.replace(PREFIX, "").replace(&resource, "routes"))
                .collect()
        }
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

    fn desired(generation: i64, holds: bool) -> RouteStatus {
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
    async fn writes_changes_and_nothing_else() {
        let fixture = Fixture::start(server(), vec![desired(1, true)]);
        let written = fixture.until("is written", is_written(1)).await;
        assert_eq!(written["parents"][0]["controllerName"], "example.net/x");
        assert_eq!(written["parents"][1]["controllerName"], CONTROLLER_NAME);
        let put = "PUT namespaces/shop/routes/web/status";
        assert_eq!(fixture.calls().await, ["GET routes", put]);
        fixture.set(vec![desired(1, true)]);
        assert_eq!(fixture.calls().await, ["GET routes"]);
        fixture.set(vec![desired(2, false)]);
        fixture.until("is written", is_written(2)).await;
        let get = "GET namespaces/shop/routes/web";
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
        assert!(fixture.queue.try_recv().is_err(), "no problem");
        fixture.set(vec![desired(2, false)]);
        fixture.until("is written", is_written(2)).await;
        // Of several changes and resyncs without another status.
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
        assert!(fixture.queue.try_recv().is_err(), "one event");
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
    async fn only_the_holder_of_the_lease_writes_and_another_replica_follows_it() {
        let server = server();
        let start = |replica: &str| {
            let metrics = Arc::new(Metrics::new(|_| Ok(())));
            let writer = Writer::new(server.client(), &[KIND], metrics.clone(), Events::new().0);
            let timing = Timing::default();
            let election = Election::new(server.client(), "mesh", replica.into(), timing);
            // The sender is dropped: nothing changes.
            let statuses = Statuses::new(|| vec![desired(1, true)], watch::channel(()).1);
            let stopping = CancellationToken::new();
            let running = tokio::spawn(run(election, writer, statuses, stopping.clone()));
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
}
