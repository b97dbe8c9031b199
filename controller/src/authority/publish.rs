//! The roots, where pods find them before they have talked to anybody: a ConfigMap in each
//! namespace that has meshed pods, or a file.
//!
//! Each replica does it, and all write the same. A namespace that cannot be written waits and is
//! tried again, and holds up no other. Where this mesh has published once, it is kept right, with
//! meshed pods or without; other namespaces are left alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_runtime::{Backoff, error_chain};
use futures::stream::FuturesUnordered;
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ListParams, Patch, PatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use super::disjoint_roots::{are_disjoint, warning};
use super::store::files::replace;
use super::store::kubernetes::MANAGER;
use super::{Roots, Trust};

/// The ConfigMap in each namespace.
pub const CONFIG_MAP: &str = "diy-service-mesh-roots";
/// The label that says which mesh, by its own namespace, keeps the ConfigMap.
pub const LABEL: &str = "diy-service-mesh.dev/mesh";
/// Its key, and the file's name.
pub const KEY: &str = "roots.pem";
/// All are read this often, should a watch have missed something.
const RESYNC_INTERVAL: Duration = Duration::from_secs(60);
/// A file is looked at this often.
const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How long a request to the API may take.
const API_TIMEOUT: Duration = Duration::from_secs(10);
/// How many namespaces are written at the same moment.
const MAX_CONCURRENT_WRITES: usize = 16;
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(250);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// Where the roots of a version stand, and where not yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// The version; empty: none yet.
    pub version: String,
    /// The namespaces that should hold it and do not, each with the reason where there is one.
    pub waiting: BTreeMap<String, String>,
}

/// What a publisher is told.
pub struct Task {
    /// The roots to publish.
    pub trust: watch::Receiver<Arc<Trust>>,
    /// The namespaces with meshed pods.
    pub namespaces: watch::Receiver<BTreeSet<Arc<str>>>,
    /// Where it says how far it is.
    pub published: watch::Sender<Published>,
}

impl Task {
    fn roots(&mut self) -> Arc<Roots> {
        self.trust.borrow_and_update().roots.clone()
    }
}

/// Writes the roots to the file FOLDER/roots.pem and restores it after changes. Returns when the
/// authority is gone.
pub async fn file(folder: PathBuf, mut task: Task) {
    let path = folder.join(KEY);
    let mut ticks = interval(FILE_CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let roots = task.roots();
        let waiting = match put_right(&path, &roots) {
            Ok(()) => BTreeMap::new(),
            Err(reason) => [(path.display().to_string(), reason)].into(),
        };
        tell(
            &task.published,
            Published {
                version: roots.version.clone(),
                waiting,
            },
        );
        tokio::select! {
            _ = ticks.tick() => {}
            changed = task.trust.changed() => if changed.is_err() { return },
        }
    }
}

fn put_right(path: &Path, roots: &Roots) -> Result<(), String> {
    let there = std::fs::read_to_string(path).unwrap_or_default();
    if there == roots.pem {
        return Ok(());
    }
    replace(path, roots.pem.as_bytes(), 0o644).map_err(|error| error.to_string())?;
    warn_of(
        are_disjoint(roots, &there)
            .then(|| path.display().to_string())
            .into_iter()
            .collect(),
    );
    tracing::info!("the roots are published in {}", path.display());
    Ok(())
}

fn warn_of(places: Vec<String>) {
    if let Some(warning) = warning(&places) {
        tracing::warn!("{warning}");
    }
}

/// Says it, and what is new about it in the log.
fn tell(published: &watch::Sender<Published>, now: Published) {
    published.send_if_modified(|before| {
        for (place, reason) in now.waiting.iter().filter(|(place, reason)| {
            !reason.is_empty() && before.waiting.get(*place) != Some(reason)
        }) {
            tracing::warn!("the roots cannot be published in {place}, trying again: {reason}");
        }
        let changed = *before != now;
        *before = now;
        changed
    });
}

/// Writes the roots to a ConfigMap in each namespace with meshed pods, and restores it after
/// changes. `mesh`: the mesh's own namespace.
pub async fn kubernetes(client: Client, mesh: String, mut task: Task) {
    let all: Api<ConfigMap> = Api::all(client.clone());
    let only_ours = format!("metadata.name={CONFIG_MAP}");
    let mut events =
        pin!(watcher(all.clone(), watcher::Config::default().fields(&only_ours)).default_backoff());
    let list = ListParams::default().fields(&only_ours);
    let mut lists = pin!(stream::unfold(
        interval(RESYNC_INTERVAL),
        async |mut ticks| {
            ticks.tick().await;
            Some((timeout(API_TIMEOUT, all.list(&list)).await, ticks))
        }
    ));
    let mut places = Places {
        mesh,
        ..Places::default()
    };
    let mut writing = FuturesUnordered::new();
    loop {
        let roots = task.roots();
        let namespaces = task.namespaces.borrow_and_update().clone();
        let mut wake = None;
        if places.listed {
            warn_of(places.with_disjoint_roots(&roots, &namespaces));
            for namespace in places.due(
                &roots.pem,
                &namespaces,
                Instant::now(),
                MAX_CONCURRENT_WRITES - writing.len(),
            ) {
                writing.push(apply(
                    client.clone(),
                    namespace,
                    places.mesh.clone(),
                    roots.clone(),
                ));
            }
            let (waiting, next) = places.waiting(&roots.pem, &namespaces);
            wake = next;
            tell(
                &task.published,
                Published {
                    version: roots.version.clone(),
                    waiting,
                },
            );
        }
        tokio::select! {
            Some(event) = events.next() => places.take(event),
            Some(listed) = lists.next() => places.replace(listed),
            Some((namespace, result)) = writing.next(), if !writing.is_empty() => places.wrote(namespace, result, Instant::now()),
            changed = task.trust.changed() => if changed.is_err() { return },
            changed = task.namespaces.changed() => if changed.is_err() { return },
            () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
        }
    }
}

async fn apply(
    client: Client,
    namespace: String,
    mesh: String,
    roots: Arc<Roots>,
) -> (String, Result<String, String>) {
    let config_map = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": CONFIG_MAP, "labels": {"app.kubernetes.io/part-of": "diy-service-mesh", LABEL: mesh}},
        "data": {KEY: roots.pem},
    });
    let api: Api<ConfigMap> = Api::namespaced(client, &namespace);
    let params = PatchParams::apply(MANAGER).force();
    let result = match timeout(
        API_TIMEOUT,
        api.patch(CONFIG_MAP, &params, &Patch::Apply(config_map)),
    )
    .await
    {
        Ok(Ok(_)) => Ok(roots.pem.clone()),
        Ok(Err(error)) => Err(error_chain(&error)),
        Err(_) => Err("the Kubernetes API does not answer".to_owned()),
    };
    (namespace, result)
}

/// What is known of the ConfigMaps. Pure but for what it is told.
#[derive(Default)]
struct Places {
    mesh: String,
    /// Whether the ConfigMaps have been listed.
    listed: bool,
    /// What each namespace holds.
    there: BTreeMap<String, ConfigMapContent>,
    listing: BTreeMap<String, ConfigMapContent>,
    /// Being written.
    busy: BTreeSet<String>,
    failed: BTreeMap<String, Failure>,
    /// The version of the roots that were last compared with what is there.
    compared: String,
}

/// What a ConfigMap says.
#[derive(Default)]
struct ConfigMapContent {
    pem: Option<String>,
    /// The mesh that keeps it.
    mesh: Option<String>,
}

struct Failure {
    reason: String,
    backoff: Backoff,
    again: Instant,
}

impl Places {
    fn take(&mut self, event: Result<Event<ConfigMap>, watcher::Error>) {
        match event {
            Ok(Event::Init) => self.listing.clear(),
            Ok(Event::InitApply(object)) => self.listing.extend(read(object)),
            Ok(Event::InitDone) => {
                self.there = std::mem::take(&mut self.listing);
                self.listed = true;
            }
            Ok(Event::Apply(object)) => self.there.extend(read(object)),
            Ok(Event::Delete(object)) => {
                self.there
                    .remove(&object.metadata.namespace.unwrap_or_default());
            }
            Err(error) => tracing::warn!(
                "the watch of ConfigMaps {CONFIG_MAP} was interrupted: {}",
                error_chain(&error)
            ),
        }
    }

    fn replace(
        &mut self,
        listed: Result<
            kube::Result<kube::core::ObjectList<ConfigMap>>,
            tokio::time::error::Elapsed,
        >,
    ) {
        match listed {
            Ok(Ok(list)) => {
                self.there = list.items.into_iter().filter_map(read).collect();
                self.listed = true;
            }
            // Written without knowing what is there rather than not at all: to write the same twice
            // does no harm.
            Ok(Err(error)) => {
                self.listed = true;
                tracing::warn!(
                    "ConfigMaps {CONFIG_MAP} cannot be listed: {}",
                    error_chain(&error)
                );
            }
            Err(_) => tracing::warn!(
                "ConfigMaps {CONFIG_MAP} cannot be listed: the Kubernetes API does not answer"
            ),
        }
    }

    /// The namespaces whose pods know none of these roots. Told once for each set of roots.
    fn with_disjoint_roots(
        &mut self,
        roots: &Roots,
        namespaces: &BTreeSet<Arc<str>>,
    ) -> Vec<String> {
        if self.compared == roots.version {
            return Vec::new();
        }
        self.compared.clone_from(&roots.version);
        let of_this_mesh = |name: &String| {
            self.there
                .get(name)
                .filter(|held| held.mesh.as_ref() == Some(&self.mesh))
        };
        let is_disjoint = |name: &String| {
            of_this_mesh(name)
                .and_then(|held| held.pem.as_deref())
                .is_some_and(|pem| are_disjoint(roots, pem))
        };
        let wrong = self.wrong(&roots.pem, namespaces).into_iter();
        wrong
            .filter(is_disjoint)
            .map(|name| format!("namespace {name}"))
            .collect()
    }

    /// The namespaces that have to be written now.
    fn due(
        &mut self,
        pem: &str,
        namespaces: &BTreeSet<Arc<str>>,
        now: Instant,
        most: usize,
    ) -> Vec<String> {
        let wrong = self.wrong(pem, namespaces);
        let ready = |name: &String| {
            !self.busy.contains(name)
                && self
                    .failed
                    .get(name)
                    .is_none_or(|failure| failure.again <= now)
        };
        let due: Vec<String> = wrong.into_iter().filter(ready).take(most).collect();
        self.busy.extend(due.iter().cloned());
        due
    }

    /// Those that are not right yet, and when the next one is to be tried again.
    fn waiting(
        &self,
        pem: &str,
        namespaces: &BTreeSet<Arc<str>>,
    ) -> (BTreeMap<String, String>, Option<Instant>) {
        let wrong = self.wrong(pem, namespaces);
        let next = wrong
            .iter()
            .filter(|name| !self.busy.contains(*name))
            .filter_map(|name| self.failed.get(name))
            .map(|failure| failure.again)
            .min();
        let reason = |name: &String| {
            self.failed
                .get(name)
                .map(|failure| failure.reason.clone())
                .unwrap_or_default()
        };
        (
            wrong
                .into_iter()
                .map(|name| (name.clone(), reason(&name)))
                .collect(),
            next,
        )
    }

    /// Namespaces with meshed pods, and those that hold roots already: a Deployment that is at rest
    /// will come back.
    fn wrong(&self, pem: &str, namespaces: &BTreeSet<Arc<str>>) -> BTreeSet<String> {
        let ours = self
            .there
            .iter()
            .filter(|(_, held)| held.mesh.as_ref() == Some(&self.mesh))
            .map(|(name, _)| name.clone());
        let all = namespaces.iter().map(|name| name.to_string()).chain(ours);
        all.filter(|name| self.there.get(name).and_then(|held| held.pem.as_deref()) != Some(pem))
            .collect()
    }

    fn wrote(&mut self, namespace: String, result: Result<String, String>, now: Instant) {
        self.busy.remove(&namespace);
        match result {
            Ok(pem) => {
                tracing::info!("the roots are published in namespace {namespace}");
                self.failed.remove(&namespace);
                self.there.insert(
                    namespace,
                    ConfigMapContent {
                        pem: Some(pem),
                        mesh: Some(self.mesh.clone()),
                    },
                );
            }
            Err(reason) => {
                let failure = self.failed.entry(namespace).or_insert_with(|| Failure {
                    reason: String::new(),
                    backoff: Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL),
                    again: now,
                });
                failure.reason = reason;
                failure.again = now + failure.backoff.next_delay();
            }
        }
    }
}

/// A namespace, and what its ConfigMap says.
fn read(object: ConfigMap) -> Option<(String, ConfigMapContent)> {
    let pem = object.data.and_then(|mut data| data.remove(KEY));
    let mesh = object
        .metadata
        .labels
        .and_then(|mut labels| labels.remove(LABEL));
    object
        .metadata
        .namespace
        .map(|namespace| (namespace, ConfigMapContent { pem, mesh }))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::authority::self_signed;

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
    async fn one_failing_namespace_waits_and_holds_up_no_other() {
        let (mut places, wanted, now) = (
            Places::default(),
            namespaces(&["bad", "good"]),
            Instant::now(),
        );
        assert_eq!(places.due("A", &wanted, now, 16), ["bad", "good"]);
        assert!(
            places.due("A", &wanted, now, 16).is_empty(),
            "both are being written"
        );
        places.wrote("bad".into(), Err("no".into()), now);
        places.wrote("good".into(), Ok("A".into()), now);
        assert!(places.due("A", &wanted, now, 16).is_empty());
        let (waiting, next) = places.waiting("A", &wanted);
        assert_eq!(waiting, [("bad".to_owned(), "no".to_owned())].into());
        assert_eq!(next, Some(now + MIN_RETRY_INTERVAL));
        assert_eq!(
            places.due("A", &wanted, now + MIN_RETRY_INTERVAL, 16),
            ["bad"]
        );
        places.wrote("bad".into(), Err("no".into()), now);
        assert_eq!(
            places.waiting("A", &wanted).1,
            Some(now + MIN_RETRY_INTERVAL * 2),
            "the second pause is longer"
        );
        assert_eq!(
            places.due("B", &wanted, now, 16),
            ["good"],
            "new roots apply to all namespaces"
        );
    }

    #[test]
    fn namespaces_whose_pods_know_none_of_the_roots_are_told_once() {
        let new = || {
            Roots::from_pem(
                &self_signed("cluster.local", SystemTime::now(), RESYNC_INTERVAL)
                    .unwrap()
                    .0,
            )
            .unwrap()
        };
        let (old, now) = (new(), new());
        let both = Roots::new([old.certificates.clone(), now.certificates.clone()].concat());
        let (mut places, wanted) = (
            Places {
                mesh: "mesh".into(),
                ..Places::default()
            },
            namespaces(&["new", "till"]),
        );
        for (namespace, roots) in [
            ("shop", &old),
            ("till", &old),
            ("moved", &both),
            ("right", &now),
        ] {
            places.take(Ok(Event::Apply(holds(namespace, &roots.pem))));
        }
        assert_eq!(
            places.with_disjoint_roots(&now, &wanted),
            ["namespace shop", "namespace till"]
        );
        assert!(
            places.with_disjoint_roots(&now, &wanted).is_empty(),
            "once is enough"
        );
        places.take(Ok(Event::Apply(holds("shop", &now.pem))));
        places.mesh = "another".into();
        assert!(
            places.with_disjoint_roots(&old, &wanted).is_empty(),
            "another mesh's roots are another's"
        );
    }

    #[test]
    fn what_was_edited_or_deleted_is_restored_and_what_is_right_is_left_alone() {
        let (mut places, wanted, now) = (
            Places {
                mesh: "mesh".into(),
                ..Places::default()
            },
            namespaces(&["shop"]),
            Instant::now(),
        );
        places.take(Ok(Event::Init));
        places.take(Ok(Event::InitApply(holds("shop", "A"))));
        places.take(Ok(Event::InitApply(holds("at-rest", "A"))));
        assert!(!places.listed);
        places.take(Ok(Event::InitDone));
        assert!(places.listed);
        assert!(places.due("A", &wanted, now, 16).is_empty());
        places.take(Ok(Event::Apply(holds("shop", "edited"))));
        assert_eq!(places.due("A", &wanted, now, 16), ["shop"]);
        places.wrote("shop".into(), Ok("A".into()), now);
        places.take(Ok(Event::Delete(holds("shop", "A"))));
        assert_eq!(places.due("A", &wanted, now, 16), ["shop"]);
        places.take(Ok(Event::Delete(holds("at-rest", "A"))));
        assert_eq!(
            places.waiting("A", &wanted).0.len(),
            1,
            "nobody needs it where no meshed pod is"
        );
        places.mesh = "another".into();
        places.take(Ok(Event::Apply(holds("at-rest", "B"))));
        assert_eq!(
            places.waiting("A", &wanted).0.len(),
            1,
            "another mesh's is left alone"
        );
    }
}
