//! The last valid states of invalid objects, as ControllerRevisions in the namespace of the mesh: a
//! replica that starts later reads them. Written on the replica that holds the Lease.
//!
//! Level-triggered: after each change, the index says what is missing and what is obsolete.
//! Namespaces take turns.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_runtime::Backoff;
use k8s_openapi::api::apps::v1::ControllerRevision;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::{Error, MAX_RETRY_INTERVAL, MIN_RETRY_INTERVAL, WRITE_INTERVAL, request};
use crate::catalog::revision;
use crate::last_valid::Write;

/// Time after which a write is repeated, if the catalog does not contain its result.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(30);

/// Writes the revisions of a cluster.
pub struct Revisions {
    api: Api<ControllerRevision>,
    due: Arc<dyn Fn() -> Vec<Write> + Send + Sync>,
    changed: watch::Receiver<()>,
}

impl Revisions {
    /// A writer in the namespace of the mesh of what `due` returns, again after each change.
    pub fn new(
        client: Client,
        namespace: &str,
        due: impl Fn() -> Vec<Write> + Send + Sync + 'static,
        changed: watch::Receiver<()>,
    ) -> Revisions {
        Revisions {
            api: Api::namespaced(client, namespace),
            due: Arc::new(due),
            changed,
        }
    }

    /// Writes until it is dropped.
    pub(super) async fn run(&self) -> Infallible {
        let mut changed = self.changed.clone();
        let mut written: HashMap<String, Instant> = HashMap::new();
        let mut backoff = Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
        let mut pace = interval(WRITE_INTERVAL);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            changed.mark_unchanged();
            written.retain(|_, at| at.elapsed() < CONFIRM_TIMEOUT);
            let due = (self.due)().into_iter();
            let due = due.map(|write| (write.revision_name(), write));
            let due = due.filter(|(name, _)| !written.contains_key(name));
            let turns: BTreeMap<_, _> = due
                .map(|(name, write)| (write.id().1.namespace.clone(), (name, write)))
                .collect();
            if turns.is_empty() {
                let change = async {
                    if changed.changed().await.is_err() {
                        pending().await
                    }
                };
                let _ = timeout(CONFIRM_TIMEOUT, change).await;
            }
            for (name, write) in turns.into_values() {
                pace.tick().await;
                match self.write(&name, &write).await {
                    Ok(()) => {
                        backoff.reset();
                        written.insert(name, Instant::now());
                    }
                    Err(error) => {
                        let (delay, (kind, key)) = (backoff.next_delay(), write.id());
                        tracing::warn!(
                            "cannot write ControllerRevision {name} of {kind} {key}, retrying in \
                             {delay:?}: {error}; without it, the last valid state of the {kind} is \
                             not in force after a restart of the controllers"
                        );
                        tokio::time::sleep(delay).await;
                    }
                }
            }
        }
    }

    async fn write(&self, name: &str, write: &Write) -> Result<(), Error> {
        let (create, delete) = (PostParams::default(), DeleteParams::default());
        let written = match write {
            Write::Create { id, origin } => match revision(name, id, origin) {
                Some(revision) => request(self.api.create(&create, &revision)).await.map(drop),
                None => Ok(()),
            },
            Write::Delete { .. } => request(self.api.delete(name, &delete)).await.map(drop),
        };
        match written {
            // Another replica was faster.
            Err(error) if error.is(409) || error.is(404) => Ok(()),
            written => written,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use serde_json::json;

    use super::*;
    use crate::index::object::{Key, Kind};
    use crate::last_valid::Origin;
    use crate::routes::testing::ApiServer;

    const PATH: &str = "/apis/apps/v1/namespaces/mesh/controllerrevisions";

    fn create(namespace: &str, uid: &str) -> Write {
        Write::Create {
            id: (Kind::HttpRoute, Key::new(namespace, "web")),
            origin: Origin::new(uid, 3, r#"{"rules":[]}"#),
        }
    }

    fn delete(uid: &str) -> Write {
        Write::Delete {
            id: (Kind::HttpRoute, Key::new("shop", "web")),
            revision: Key::new("mesh", &format!("httproute-{uid}-3")),
        }
    }

    /// A running writer of what the test sets.
    fn start(server: &ApiServer) -> (Arc<Mutex<Vec<Write>>>, watch::Sender<()>) {
        let due: Arc<Mutex<Vec<Write>>> = Arc::default();
        let (changed, notified) = watch::channel(());
        let source = due.clone();
        let read = move || source.lock().unwrap().clone();
        let revisions = Revisions::new(server.client(), "mesh", read, notified);
        tokio::spawn(async move { revisions.run().await });
        (due, changed)
    }

    async fn settle() {
        tokio::time::sleep(Duration::from_secs(10)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn states_are_stored_once_and_deleted() {
        let server = ApiServer::default();
        let (due, changed) = start(&server);
        *due.lock().unwrap() = vec![create("shop", "a")];
        changed.send_replace(());
        settle().await;
        let path = format!("{PATH}/httproute-a-3");
        let stored = server.get(&path).unwrap();
        assert_eq!(stored["revision"], 3);
        let labels = json!({"diy-service-mesh.dev/last-valid": "HTTPRoute"});
        assert_eq!(stored["metadata"]["labels"], labels);
        let expected = json!({
            "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
            "metadata": {"namespace": "shop", "name": "web", "uid": "a", "generation": 3},
            "spec": {"rules": []},
        });
        assert_eq!(stored["data"], expected);
        assert_eq!(server.take_calls(), [format!("POST {PATH}")]);
        // Before the catalog contains it, another replica has deleted one.
        due.lock().unwrap().push(delete("gone"));
        changed.send_replace(());
        settle().await;
        let deleted = format!("DELETE {PATH}/httproute-gone-3");
        assert_eq!(server.take_calls(), [deleted]);
        *due.lock().unwrap() = vec![delete("a")];
        // A write whose result the catalog never shows is repeated.
        tokio::time::sleep(2 * CONFIRM_TIMEOUT).await;
        assert_eq!(server.get(&path), None);
    }

    #[tokio::test(start_paused = true)]
    async fn failed_writes_are_repeated_and_namespaces_take_turns() {
        let server = ApiServer::default();
        let (due, changed) = start(&server);
        let many = (0..50).map(|number| create("many", &format!("m{number:02}")));
        *due.lock().unwrap() = many.chain([create("shop", "one")]).collect();
        server.fail_all(Some(500));
        changed.send_replace(());
        settle().await;
        server.fail_all(None);
        server.take_calls();
        let first = async {
            while server.get(&format!("{PATH}/httproute-one-3")).is_none() {
                tokio::time::sleep(WRITE_INTERVAL).await;
            }
        };
        timeout(Duration::from_secs(120), first).await.unwrap();
        assert!(server.take_calls().len() <= 2, "after one of the others");
        tokio::time::sleep(Duration::from_secs(120)).await;
        assert!(server.get(&format!("{PATH}/httproute-m49-3")).is_some());
    }
}
