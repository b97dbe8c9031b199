//! The last valid states of invalid objects, as ControllerRevisions in the namespace of the mesh: a
//! replica that starts later reads them. Written on the replica that holds the Lease.
//!
//! Level-triggered: after each change, the index says what is missing and what is obsolete.
//! Namespaces take turns (`schedule.rs`).

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::time::Duration;

use k8s_openapi::api::apps::v1::ControllerRevision;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::schedule::Schedule;
use super::{Desired, Error, Route, WRITE_INTERVAL, request};
use crate::catalog::revision;
use crate::last_valid::Write;

/// Time after which a write is repeated, if the catalog does not contain its result.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(30);

/// Writes the revisions of a cluster.
pub struct Revisions {
    api: Api<ControllerRevision>,
    due: Desired<Write>,
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
            due: Desired::new(due, changed),
        }
    }

    /// Writes until it is dropped.
    pub(super) async fn run(&self) -> Infallible {
        let mut desired = self.due.clone();
        let mut written: HashMap<String, Instant> = HashMap::new();
        let mut schedule = Schedule::default();
        let mut pace = interval(WRITE_INTERVAL);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            written.retain(|_, at| at.elapsed() < CONFIRM_TIMEOUT);
            let mut due = by_object(desired.current(), &written);
            let batch = schedule.next_batch(&due.keys().collect());
            if batch.is_empty() {
                let confirm = Instant::now() + CONFIRM_TIMEOUT;
                tokio::select! {
                    () = desired.changed() => {}
                    () = sleep_until(schedule.next_retry(confirm)) => {}
                }
            }
            for object in batch {
                let Some((name, write)) = due.remove(&object) else {
                    continue;
                };
                if schedule.is_slow(&object.1.namespace) {
                    continue;
                }
                pace.tick().await;
                let Err(error) = self.write(&name, &write).await else {
                    schedule.succeeded(&object);
                    written.insert(name, Instant::now());
                    continue;
                };
                let (delay, should_log) = schedule.fail(&object, &error);
                if should_log {
                    let kind = object.0;
                    tracing::warn!(
                        "cannot write ControllerRevision {name} of {object}, retrying in \
                         {delay:?}: {error}; without it, the last valid state of the {kind} is \
                         not in force after a restart of the controllers"
                    );
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

/// One write for each object that is not written yet, with the name of its ControllerRevision.
fn by_object(
    writes: Vec<Write>,
    written: &HashMap<String, Instant>,
) -> BTreeMap<Route, (String, Write)> {
    let writes = writes.into_iter();
    let named = writes.map(|write| (write.revision_name(), write));
    let due = named.filter(|(name, _)| !written.contains_key(name));
    let of_objects = due.map(|(name, write)| {
        let (kind, key) = write.id().clone();
        (Route(kind, key), (name, write))
    });
    of_objects.collect()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use serde_json::json;
    use tokio::time::timeout;

    use super::*;
    use crate::index::object::{Key, Kind};
    use crate::last_valid::Origin;
    use crate::routes::testing::ApiServer;

    const PATH: &str = "/apis/apps/v1/namespaces/mesh/controllerrevisions";

    fn create(namespace: &str, uid: &str) -> Write {
        Write::Create {
            id: (Kind::HttpRoute, Key::new(namespace, uid)),
            origin: Origin::new(uid, 3, r#"{"rules":[]}"#),
        }
    }

    fn delete(uid: &str) -> Write {
        Write::Delete {
            id: (Kind::HttpRoute, Key::new("shop", uid)),
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

    async fn until_stored(server: &ApiServer, uid: &str) {
        let poll = async {
            while server.get(&format!("{PATH}/httproute-{uid}-3")).is_none() {
                tokio::time::sleep(WRITE_INTERVAL).await;
            }
        };
        timeout(Duration::from_secs(120), poll).await.unwrap();
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
            "metadata": {"namespace": "shop", "name": "a", "uid": "a", "generation": 3},
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
        changed.send_replace(());
        until_stored(&server, "one").await;
        assert!(server.take_calls().len() <= 2, "after one of the others");
        server.fail_all(Some(500));
        due.lock().unwrap().push(create("shop", "two"));
        settle().await;
        server.fail_all(None);
        until_stored(&server, "m49").await;
        until_stored(&server, "two").await;
    }

    #[tokio::test(start_paused = true)]
    async fn rejected_state_delays_those_of_no_other_object() {
        let server = ApiServer::default();
        let (due, changed) = start(&server);
        server.reject(&format!("{PATH}/httproute-bad-3"), Some(403));
        let bad = create("shop", "bad");
        *due.lock().unwrap() = vec![bad.clone()];
        changed.send_replace(());
        tokio::time::sleep(10 * crate::routes::writer::MAX_RETRY_INTERVAL).await;
        let attempts = server.take_calls().len();
        assert!((10..=20).contains(&attempts), "{attempts} with a back-off");
        let good = [create("shop", "a"), create("other", "b")];
        *due.lock().unwrap() = good.into_iter().chain([bad]).collect();
        changed.send_replace(());
        let stored = async {
            until_stored(&server, "a").await;
            until_stored(&server, "b").await;
        };
        let stored = timeout(10 * WRITE_INTERVAL, stored).await;
        stored.expect("a rejected write delays no other one");
    }
}
