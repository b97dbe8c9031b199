//! The roots in a ConfigMap in each namespace with meshed pods, and in the namespace of the mesh,
//! for the command line. Where a label of the namespace enables injection, before the first pod: a
//! kubelet that does not find the ConfigMap logs `FailedMount` and tries again later.
//!
//! A namespace with errors is retried and does not delay others. ConfigMaps that this mesh has
//! published are kept up to date, with meshed pods or without; other ConfigMaps are left alone.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_runtime::{Backoff, error_chain};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::api::rbac::v1::ClusterRole;
use kube::api::{PartialObjectMeta, Patch, PatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::time::{Instant, sleep_until};

use super::{KEY, Publication, are_disjoint, warn_of_disjoint_roots};
use crate::api::{API_TIMEOUT, request};
use crate::authority::Roots;
use crate::authority::store::kubernetes::FIELD_MANAGER;

/// The name of the ConfigMaps.
pub const CONFIG_MAP: &str = "diy-service-mesh-roots";
/// The label with the namespace of the mesh that owns the ConfigMap.
pub const LABEL: &str = "diy-service-mesh.dev/mesh";
/// Owns the ConfigMaps of all namespaces, as an object of the installation without a namespace:
/// Kubernetes deletes them after it.
const OWNER: &str = "diy-service-mesh-controller";
/// Enables injection for all new pods of a namespace.
const INJECT: &str = "diy-service-mesh/inject=enabled";
const MAX_CONCURRENT_WRITES: usize = 16;
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(250);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// Writes the roots to a ConfigMap in each namespace with meshed pods or with the label, and restores
/// it after changes. `mesh` is the namespace of the mesh. Returns when the authority ends.
pub async fn run(client: Client, mesh: String, mut publication: Publication) {
    let all: Api<ConfigMap> = Api::all(client.clone());
    let name = format!("metadata.name={CONFIG_MAP}");
    let config = watcher::Config::default().fields(&name);
    let mut events = pin!(watcher(all, config).default_backoff());
    let labelled = watcher::Config::default().labels(INJECT);
    let metadata: Api<PartialObjectMeta<Namespace>> = Api::all(client.clone());
    let labelled = watcher(metadata, labelled);
    let mut labelled = pin!(labelled.default_backoff());
    let mut injected = Injected::default();
    let mut config_maps = ConfigMaps::new(mesh, owner(&client).await);
    let mut writes = FuturesUnordered::new();
    loop {
        let roots = publication.roots();
        let mut namespaces = publication.namespaces.borrow_and_update().clone();
        namespaces.insert(config_maps.mesh.as_str().into());
        namespaces.extend(injected.names.iter().cloned());
        let mut wake = None;
        if config_maps.listed {
            warn_of_disjoint_roots(&config_maps.disjoint(&roots, &namespaces));
            let capacity = MAX_CONCURRENT_WRITES - writes.len();
            let due = config_maps.due(&roots.pem, &namespaces, Instant::now(), capacity);
            writes.extend(due.into_iter().map(|namespace| {
                let mesh = config_maps.mesh.clone();
                let owner = config_maps.owner.clone();
                apply(client.clone(), namespace, mesh, owner, roots.clone())
            }));
            let (waiting, next) = config_maps.waiting(&roots.pem, &namespaces);
            wake = next;
            publication.report(&roots, waiting);
        }
        tokio::select! {
            Some(event) = events.next() => config_maps.apply(event),
            Some(event) = labelled.next() => injected.apply(event),
            Some((namespace, result)) = writes.next() => config_maps.written(namespace, result, Instant::now()),
            changed = publication.trust.changed() => if changed.is_err() { return },
            changed = publication.namespaces.changed() => if changed.is_err() { return },
            () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
        }
    }
}

/// The namespaces whose label enables injection. Pure.
#[derive(Default)]
struct Injected {
    names: BTreeSet<Arc<str>>,
    listing: BTreeSet<Arc<str>>,
}

impl Injected {
    fn apply(&mut self, event: Result<Event<PartialObjectMeta<Namespace>>, watcher::Error>) {
        // The API server refuses new objects in a namespace that terminates.
        let is_usable = |one: &PartialObjectMeta<_>| one.metadata.deletion_timestamp.is_none();
        let name = |one: &PartialObjectMeta<Namespace>| Arc::from(one.name_any());
        match event {
            Ok(Event::Init) => self.listing.clear(),
            Ok(Event::InitApply(one)) if is_usable(&one) => drop(self.listing.insert(name(&one))),
            Ok(Event::InitApply(_)) => {}
            Ok(Event::InitDone) => self.names = std::mem::take(&mut self.listing),
            Ok(Event::Apply(one)) if is_usable(&one) => drop(self.names.insert(name(&one))),
            Ok(Event::Apply(one) | Event::Delete(one)) => drop(self.names.remove(&name(&one))),
            Err(error) => {
                let error = error_chain(&error);
                tracing::warn!(
                    "cannot watch namespaces with the label {INJECT}, retrying: {error}"
                );
            }
        }
    }
}

/// The UID of the owner. `None`, with a log line, if it cannot be read: the ConfigMaps then stay
/// after an uninstall.
async fn owner(client: &Client) -> Option<String> {
    let roles: Api<ClusterRole> = Api::all(client.clone());
    let role = request(API_TIMEOUT, roles.get(OWNER)).await;
    let role = role.inspect_err(|error| {
        tracing::warn!(
            "ConfigMaps {CONFIG_MAP} have no owner: cannot read ClusterRole {OWNER}: {error}"
        );
    });
    role.ok()?.metadata.uid
}

async fn apply(
    client: Client,
    namespace: String,
    mesh: String,
    owner: Option<String>,
    roots: Arc<Roots>,
) -> (String, Result<String, String>) {
    let owner = owner.map(|uid| {
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "name": OWNER, "uid": uid})
    });
    let config_map = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {
            "name": CONFIG_MAP, "labels": {"app.kubernetes.io/part-of": "diy-service-mesh", LABEL: mesh},
            "ownerReferences": Vec::from_iter(owner),
        },
        "data": {KEY: roots.pem},
    });
    let api: Api<ConfigMap> = Api::namespaced(client, &namespace);
    let (params, patch) = (
        PatchParams::apply(FIELD_MANAGER).force(),
        Patch::Apply(config_map),
    );
    let applied = request(API_TIMEOUT, api.patch(CONFIG_MAP, &params, &patch)).await;
    let result = applied.map(|_| roots.pem.clone());
    (namespace, result.map_err(|error| error.to_string()))
}

/// The known ConfigMaps by namespace. Pure.
#[derive(Default)]
struct ConfigMaps {
    /// The namespace of the mesh.
    mesh: String,
    /// The UID of the owner of the ConfigMaps, if known.
    owner: Option<String>,
    /// Whether the ConfigMaps have been listed.
    listed: bool,
    contents: BTreeMap<String, Content>,
    listing: BTreeMap<String, Content>,
    /// Namespaces with a write in progress.
    writing: BTreeSet<String>,
    attempts: BTreeMap<String, Attempts>,
    /// The version of the roots that were last compared with the contents.
    compared: String,
}

/// The content of a ConfigMap.
#[derive(Default)]
struct Content {
    pem: Option<String>,
    /// The namespace of the mesh that owns it.
    mesh: Option<String>,
    /// The UIDs of its owners.
    owners: Vec<String>,
}

/// The latest writes to a namespace. After failures, and while others change what was written, the
/// time between them grows.
struct Attempts {
    /// The error of the latest one, or nothing.
    error: String,
    backoff: Backoff,
    /// The time before which there is no other one.
    next: Instant,
}

impl ConfigMaps {
    fn new(mesh: String, owner: Option<String>) -> ConfigMaps {
        ConfigMaps {
            mesh,
            owner,
            ..ConfigMaps::default()
        }
    }

    fn apply(&mut self, event: Result<Event<ConfigMap>, watcher::Error>) {
        match event {
            Ok(Event::Init) => self.listing.clear(),
            Ok(Event::InitApply(object)) => self.listing.extend(content(object)),
            Ok(Event::InitDone) => {
                self.contents = std::mem::take(&mut self.listing);
                self.listed = true;
            }
            Ok(Event::Apply(object)) => self.contents.extend(content(object)),
            Ok(Event::Delete(object)) => {
                let namespace = object.metadata.namespace.unwrap_or_default();
                self.contents.remove(&namespace);
            }
            Err(error) => {
                // Without permission to list, write to all namespaces: writes are idempotent.
                self.listed = true;
                let error = error_chain(&error);
                tracing::warn!("cannot watch ConfigMaps {CONFIG_MAP}, retrying: {error}");
            }
        }
    }

    /// The namespaces of this mesh whose roots have none in common with these. Once per set of
    /// roots.
    fn disjoint(&mut self, roots: &Roots, namespaces: &BTreeSet<Arc<str>>) -> Vec<String> {
        if self.compared == roots.version {
            return Vec::new();
        }
        self.compared.clone_from(&roots.version);
        let is_disjoint = |namespace: &String| {
            let content = self.contents.get(namespace);
            let owned = content.filter(|content| content.mesh.as_ref() == Some(&self.mesh));
            let pem = owned.and_then(|content| content.pem.as_deref());
            pem.is_some_and(|pem| are_disjoint(roots, pem))
        };
        let outdated = self.outdated(&roots.pem, namespaces).into_iter();
        outdated
            .filter(is_disjoint)
            .map(|namespace| format!("namespace {namespace}"))
            .collect()
    }

    /// The namespaces to write now, at most `capacity`.
    fn due(
        &mut self,
        pem: &str,
        namespaces: &BTreeSet<Arc<str>>,
        now: Instant,
        capacity: usize,
    ) -> Vec<String> {
        let is_due = |namespace: &String| {
            let attempts = self.attempts.get(namespace);
            !self.writing.contains(namespace) && attempts.is_none_or(|one| one.next <= now)
        };
        let outdated = self.outdated(pem, namespaces);
        let due = outdated.iter().filter(|namespace| is_due(namespace));
        let due: Vec<String> = due.take(capacity).cloned().collect();
        let is_kept = |one: &Attempts| now < one.next + MAX_RETRY_INTERVAL;
        self.attempts
            .retain(|namespace, one| outdated.contains(namespace) || is_kept(one));
        self.writing.extend(due.iter().cloned());
        due
    }

    /// The outdated namespaces with their errors, and the time of the next retry.
    fn waiting(
        &self,
        pem: &str,
        namespaces: &BTreeSet<Arc<str>>,
    ) -> (BTreeMap<String, String>, Option<Instant>) {
        let outdated = self.outdated(pem, namespaces);
        let attempts = |namespace: &String| self.attempts.get(namespace);
        let retries = outdated.iter().filter(|name| !self.writing.contains(*name));
        let next = retries.filter_map(attempts).map(|one| one.next).min();
        let waiting = outdated.into_iter().map(|namespace| {
            let error = attempts(&namespace).map(|one| one.error.clone());
            (namespace, error.unwrap_or_default())
        });
        (waiting.collect(), next)
    }

    /// The namespaces with meshed pods or with a ConfigMap of this mesh (its pods may return),
    /// whose ConfigMap differs from `pem` or lacks the owner.
    fn outdated(&self, pem: &str, namespaces: &BTreeSet<Arc<str>>) -> BTreeSet<String> {
        let owned = self.contents.iter();
        let owned = owned.filter(|(_, content)| content.mesh.as_ref() == Some(&self.mesh));
        let owned = owned.map(|(namespace, _)| namespace.clone());
        let content = |namespace: &String| self.contents.get(namespace)?.pem.as_deref();
        let has_owner = |namespace: &String| {
            let content = self.contents.get(namespace);
            let mut owner = self.owner.iter();
            owner.all(|owner| content.is_some_and(|content| content.owners.contains(owner)))
        };
        let all = namespaces.iter().map(|namespace| namespace.to_string());
        all.chain(owned)
            .filter(|namespace| content(namespace) != Some(pem) || !has_owner(namespace))
            .collect()
    }

    fn written(&mut self, namespace: String, result: Result<String, String>, now: Instant) {
        self.writing.remove(&namespace);
        let attempts = self.attempts.entry(namespace.clone());
        let attempts = attempts.or_insert_with(|| Attempts {
            error: String::new(),
            backoff: Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL),
            next: now,
        });
        if attempts.next + MAX_RETRY_INTERVAL <= now {
            attempts.backoff.reset();
        }
        attempts.next = now + attempts.backoff.next_delay();
        attempts.error = result.as_ref().err().cloned().unwrap_or_default();
        if let Ok(pem) = result {
            tracing::info!("published the roots in namespace {namespace}");
            let (pem, mesh) = (Some(pem), Some(self.mesh.clone()));
            let owners = self.owner.clone().into_iter().collect();
            self.contents
                .insert(namespace, Content { pem, mesh, owners });
        }
    }
}

/// The namespace and the content of a ConfigMap.
fn content(object: ConfigMap) -> Option<(String, Content)> {
    let pem = object.data.and_then(|mut data| data.remove(KEY));
    let labels = object.metadata.labels;
    let mesh = labels.and_then(|mut labels| labels.remove(LABEL));
    let owners = object.metadata.owner_references.into_iter().flatten();
    let owners = owners.map(|owner| owner.uid).collect();
    Some((object.metadata.namespace?, Content { pem, mesh, owners }))
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::SystemTime;

    use http::{Request, Response};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
    use kube::client::Body;
    use tokio::sync::watch;
    use tokio::time::timeout;

    use super::*;
    use crate::authority::state::CaState;
    use crate::authority::{Trust, self_signed};

    fn namespaces(names: &[&str]) -> BTreeSet<Arc<str>> {
        names.iter().map(|name| Arc::from(*name)).collect()
    }

    fn holds(namespace: &str, pem: &str) -> ConfigMap {
        let metadata =
            json!({"name": CONFIG_MAP, "namespace": namespace, "labels": {LABEL: "mesh"}});
        let object = json!({"metadata": metadata, "data": {KEY: pem}});
        serde_json::from_value(object).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn failed_namespace_does_not_delay_others() {
        let (mut config_maps, wanted, now) = (
            ConfigMaps::default(),
            namespaces(&["bad", "good"]),
            Instant::now(),
        );
        assert_eq!(config_maps.due("A", &wanted, now, 16), ["bad", "good"]);
        assert!(
            config_maps.due("A", &wanted, now, 16).is_empty(),
            "both are being written"
        );
        config_maps.written("bad".into(), Err("no".into()), now);
        config_maps.written("good".into(), Ok("A".into()), now);
        assert!(config_maps.due("A", &wanted, now, 16).is_empty());
        let (waiting, next) = config_maps.waiting("A", &wanted);
        assert_eq!(waiting, [("bad".to_owned(), "no".to_owned())].into());
        assert_eq!(next, Some(now + MIN_RETRY_INTERVAL));
        assert_eq!(
            config_maps.due("A", &wanted, now + MIN_RETRY_INTERVAL, 16),
            ["bad"]
        );
        config_maps.written("bad".into(), Err("no".into()), now);
        assert_eq!(
            config_maps.waiting("A", &wanted).1,
            Some(now + MIN_RETRY_INTERVAL * 2),
            "the second pause is longer"
        );
        assert_eq!(
            config_maps.due("B", &wanted, now + MIN_RETRY_INTERVAL, 16),
            ["good"],
            "new roots apply to all namespaces"
        );
    }

    #[test]
    fn writes_against_another_client_become_rare_until_it_stops() {
        let (mut config_maps, wanted) = (ConfigMaps::default(), namespaces(&["shop"]));
        let begun = Instant::now();
        let minute = Duration::from_secs(60);
        let mut writes_until = |end, now: &mut Instant| {
            let mut writes = 0;
            while *now < end {
                config_maps.apply(Ok(Event::Apply(holds("shop", "edited"))));
                if !config_maps.due("A", &wanted, *now, 16).is_empty() {
                    config_maps.written("shop".into(), Ok("A".into()), *now);
                    writes += 1;
                }
                *now += MIN_RETRY_INTERVAL / 10;
            }
            writes
        };
        let mut now = begun;
        let first = writes_until(begun + minute, &mut now);
        let later = writes_until(begun + 10 * minute, &mut now);
        assert!((5..15).contains(&first), "{first}");
        assert_eq!(later, 18, "one in 30 s");
        now += 2 * minute;
        assert_eq!(writes_until(now + 2 * MIN_RETRY_INTERVAL, &mut now), 2);
    }

    #[test]
    fn reports_disjoint_roots_once() {
        let new = || {
            Roots::from_pem(
                &self_signed("cluster.local", SystemTime::now(), MAX_RETRY_INTERVAL)
                    .unwrap()
                    .0,
            )
            .unwrap()
        };
        let (old, now) = (new(), new());
        let both = Roots::new([old.certificates.clone(), now.certificates.clone()].concat());
        let (mut config_maps, wanted) = (
            ConfigMaps {
                mesh: "mesh".into(),
                ..ConfigMaps::default()
            },
            namespaces(&["new", "till"]),
        );
        for (namespace, roots) in [
            ("shop", &old),
            ("till", &old),
            ("moved", &both),
            ("right", &now),
        ] {
            config_maps.apply(Ok(Event::Apply(holds(namespace, &roots.pem))));
        }
        assert_eq!(
            config_maps.disjoint(&now, &wanted),
            ["namespace shop", "namespace till"]
        );
        assert!(
            config_maps.disjoint(&now, &wanted).is_empty(),
            "once is enough"
        );
        config_maps.apply(Ok(Event::Apply(holds("shop", &now.pem))));
        config_maps.mesh = "another".into();
        assert!(
            config_maps.disjoint(&old, &wanted).is_empty(),
            "another mesh's roots are another's"
        );
    }

    #[test]
    fn restores_edited_and_deleted_config_maps() {
        let (mut config_maps, wanted, now) = (
            ConfigMaps {
                mesh: "mesh".into(),
                ..ConfigMaps::default()
            },
            namespaces(&["shop"]),
            Instant::now(),
        );
        config_maps.apply(Ok(Event::Init));
        config_maps.apply(Ok(Event::InitApply(holds("shop", "A"))));
        config_maps.apply(Ok(Event::InitApply(holds("at-rest", "A"))));
        assert!(!config_maps.listed);
        config_maps.apply(Ok(Event::InitDone));
        assert!(config_maps.listed);
        assert!(config_maps.due("A", &wanted, now, 16).is_empty());
        config_maps.apply(Ok(Event::Apply(holds("shop", "edited"))));
        assert_eq!(config_maps.due("A", &wanted, now, 16), ["shop"]);
        config_maps.written("shop".into(), Ok("A".into()), now);
        config_maps.apply(Ok(Event::Delete(holds("shop", "A"))));
        let now = now + MIN_RETRY_INTERVAL;
        assert_eq!(config_maps.due("A", &wanted, now, 16), ["shop"]);
        config_maps.apply(Ok(Event::Delete(holds("at-rest", "A"))));
        assert_eq!(
            config_maps.waiting("A", &wanted).0.len(),
            1,
            "nobody needs it where no meshed pod is"
        );
        config_maps.mesh = "another".into();
        config_maps.apply(Ok(Event::Apply(holds("at-rest", "B"))));
        assert_eq!(
            config_maps.waiting("A", &wanted).0.len(),
            1,
            "another mesh's is left alone"
        );
    }

    #[test]
    fn adds_the_owner_to_config_maps_of_earlier_versions_and_installations() {
        let (wanted, now) = (namespaces(&["shop"]), Instant::now());
        let mut config_maps = ConfigMaps::new("mesh".into(), Some("new".into()));
        let mut stored = holds("shop", "A");
        config_maps.apply(Ok(Event::Apply(stored.clone())));
        assert_eq!(config_maps.due("A", &wanted, now, 16), ["shop"]);
        config_maps.written("shop".into(), Ok("A".into()), now);
        assert!(config_maps.due("A", &wanted, now, 16).is_empty());
        for (uid, due) in [("old", 1), ("new", 0)] {
            let owner = OwnerReference {
                uid: uid.into(),
                ..OwnerReference::default()
            };
            stored.metadata.owner_references = Some(vec![owner]);
            config_maps.apply(Ok(Event::Apply(stored.clone())));
            assert_eq!(config_maps.waiting("A", &wanted).0.len(), due, "{uid}");
        }
    }

    /// A publication to no namespaces with pods, and what must live as long.
    fn publication() -> (Publication, impl Sized) {
        let hour = Duration::from_secs(3600);
        let state = CaState::generate("cluster.local", SystemTime::now(), hour).unwrap();
        let roots = state.roots().into_iter().map(|root| root.der.clone());
        let trust = watch::Sender::new(Arc::new(Trust {
            issuer: state.current.issuer().unwrap().clone(),
            roots: Arc::new(Roots::new(roots)),
            renew_within: Duration::ZERO,
        }));
        let namespaces = watch::Sender::default();
        let publication = Publication {
            trust: trust.subscribe(),
            namespaces: namespaces.subscribe(),
            status: watch::Sender::default(),
        };
        (publication, (trust, namespaces))
    }

    #[tokio::test(start_paused = true)]
    async fn namespace_with_the_label_has_the_roots_before_its_first_pod() {
        let (written, mut writes) = tokio::sync::mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: Request<Body>| {
            let (path, query) = (request.uri().path(), request.uri().query());
            let query = query.unwrap_or_default();
            let is_watch = query.contains("watch=");
            let mut items = Vec::new();
            if path.ends_with("/namespaces") {
                assert!(query.contains("labelSelector=diy-service-mesh%2Finject%3Denabled"));
                let leaving =
                    json!({"name": "leaving", "deletionTimestamp": "2026-11-24T00:00:00Z"});
                items.extend([
                    json!({"metadata": {"name": "shop"}}),
                    json!({"metadata": leaving}),
                ]);
            }
            if request.method() == "PATCH" {
                written.send(path.to_owned()).unwrap();
            }
            async move {
                if is_watch {
                    return pending().await;
                }
                let list = json!({"metadata": {"resourceVersion": "1"}, "items": items});
                let body = Body::from(list.to_string().into_bytes());
                Ok::<_, kube::Error>(Response::new(body))
            }
        });
        let (publication, _senders) = publication();
        let run = run(Client::new(service, "mesh"), "mesh".into(), publication);
        let ended = timeout(Duration::from_secs(60), run).await;
        assert!(ended.is_err(), "the authority has not ended");
        let paths = std::iter::from_fn(|| writes.try_recv().ok());
        let path = |namespace| format!("/api/v1/namespaces/{namespace}/configmaps/{CONFIG_MAP}");
        let expected = ["mesh", "shop"].map(path);
        assert_eq!(BTreeSet::from_iter(paths), expected.into());
    }

    #[test]
    fn namespaces_follow_their_label_until_they_terminate() {
        let namespace = |metadata| {
            let object = json!({"metadata": metadata});
            serde_json::from_value::<PartialObjectMeta<Namespace>>(object).unwrap()
        };
        let named = |name| namespace(json!({"name": name}));
        let mut injected = Injected::default();
        injected.apply(Ok(Event::Init));
        injected.apply(Ok(Event::InitApply(named("shop"))));
        assert!(injected.names.is_empty(), "the list is not complete");
        injected.apply(Ok(Event::InitDone));
        injected.apply(Ok(Event::Apply(named("bank"))));
        assert_eq!(injected.names, namespaces(&["bank", "shop"]));
        // A namespace without the label is deleted for a watch of the label.
        injected.apply(Ok(Event::Delete(named("shop"))));
        let leaving = json!({"name": "bank", "deletionTimestamp": "2026-11-24T00:00:00Z"});
        injected.apply(Ok(Event::Apply(namespace(leaving))));
        assert!(injected.names.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn lists_config_maps_once() {
        let lists = Arc::new(AtomicUsize::new(0));
        let counter = lists.clone();
        // An API server that keeps its watches open.
        let service = tower::service_fn(move |request: Request<Body>| {
            let counter = counter.clone();
            async move {
                if request.uri().query().unwrap_or_default().contains("watch=") {
                    return pending().await;
                }
                if request.uri().path().ends_with("/configmaps") {
                    counter.fetch_add(1, Ordering::Relaxed);
                }
                let list = json!({
                    "apiVersion": "v1", "kind": "ConfigMapList", "metadata": {"resourceVersion": "1"}, "items": [],
                });
                let body = Body::from(list.to_string().into_bytes());
                Ok::<_, kube::Error>(Response::new(body))
            }
        });
        let (publication, _senders) = publication();
        let run = run(Client::new(service, "mesh"), "mesh".into(), publication);
        let ended = timeout(Duration::from_secs(3600), run).await;
        assert!(ended.is_err(), "the authority has not ended");
        assert_eq!(lists.load(Ordering::Relaxed), 1);
    }
}
