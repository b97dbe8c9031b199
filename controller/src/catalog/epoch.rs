//! The epoch of the resource versions of the cluster: one value for all replicas, in a ConfigMap in
//! the namespace of the mesh.
//!
//! A watch whose list has a lower version than it has seen notices that etcd was restored. Its
//! replica stores the time as the new epoch, before it applies the list; the others read it. Each
//! lists all objects again then. The ConfigMap is restored too, so an epoch is never earlier than the
//! one of the replica that stores it. A subscriber can only cause a read, at most one a second, and
//! none for a while if its claim was false.

use std::time::Duration;

use diy_mesh_control_plane::clock::Clock;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use super::claims::{Claims, Subject};
use super::{Change, Event};
use crate::api::{API_TIMEOUT, ApiError, metadata, request};
use crate::unix_time::seconds;

/// The ConfigMap with the epoch. Without it, there was no restore.
pub const CONFIG_MAP: &str = "diy-service-mesh-epoch";
/// The field with the time of the latest restore, in seconds since 1970.
const FIELD: &str = "restored";
/// The epoch is read again after this time, or if it is requested.
const READ_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum time between two reads.
const MIN_READ_INTERVAL: Duration = Duration::from_secs(1);
/// The epoch that this replica knows.
pub struct Epoch {
    config_maps: Api<ConfigMap>,
    place: String,
    clock: Clock,
    claims: Claims,
    changes: mpsc::Sender<Event>,
    known: Option<u64>,
    /// Whether a watch has noticed a restore since.
    is_restored: watch::Sender<bool>,
    has_failed: bool,
}

impl Epoch {
    /// The epoch in this namespace, which is not known yet.
    pub fn new(
        client: Client,
        namespace: &str,
        clock: Clock,
        claims: Claims,
        changes: mpsc::Sender<Event>,
    ) -> Epoch {
        Epoch {
            config_maps: Api::namespaced(client, namespace),
            place: format!("ConfigMap {namespace}/{CONFIG_MAP}"),
            clock,
            claims,
            changes,
            known: None,
            is_restored: watch::Sender::new(false),
            has_failed: false,
        }
    }

    /// Where watches report a restore.
    pub(super) fn is_restored(&self) -> watch::Sender<bool> {
        self.is_restored.clone()
    }

    /// Reads the epoch, if the API server responds. Returns whether a new one begins.
    pub async fn read(&mut self) -> bool {
        let is_restored = *self.is_restored.borrow();
        let epoch = match request(API_TIMEOUT, self.exchange(is_restored)).await {
            Ok(epoch) => epoch,
            Err(error) => {
                self.failed(&error);
                return false;
            }
        };
        self.has_failed = false;
        // A replica stores an epoch before its clients know of it.
        let known = self.known.unwrap_or_default();
        self.claims.answer(Subject::Epoch, known, epoch);
        if self.known == Some(epoch) {
            return false;
        }
        // An error means that the controller stops.
        let _ = self.changes.send(Change::Epoch(epoch).into()).await;
        self.is_restored.send_replace(false);
        self.known.replace(epoch).is_some()
    }

    /// Reads the epoch again and again, until a new one begins.
    pub async fn changed(&mut self) {
        loop {
            sleep(MIN_READ_INTERVAL).await;
            let known = self.known.unwrap_or_default();
            let mut restored = self.is_restored.subscribe();
            tokio::select! {
                () = self.claims.later_than(Subject::Epoch, known) => {}
                _ = restored.wait_for(|is_restored| *is_restored) => {}
                () = sleep(READ_INTERVAL) => {}
            }
            if self.read().await {
                return;
            }
        }
    }

    /// The epoch from now on, which is stored if it is new.
    async fn exchange(&self, is_restored: bool) -> kube::Result<u64> {
        let stored = self.config_maps.get_opt(CONFIG_MAP).await?;
        let data = stored.as_ref().and_then(|map| map.data.as_ref());
        let value = data.and_then(|data| data.get(FIELD)?.parse().ok());
        let value = value.unwrap_or_default();
        let now = seconds(self.clock.now());
        let epoch = next(self.known, is_restored, value, now);
        if epoch > value {
            self.store(stored, epoch).await?;
            tracing::warn!(
                "the cluster or {} was restored from a backup: stored epoch {epoch} in place of \
                 {value}",
                self.place
            );
        }
        Ok(epoch)
    }

    /// Fails if another replica has stored an epoch since.
    async fn store(&self, before: Option<ConfigMap>, epoch: u64) -> kube::Result<()> {
        let data = (FIELD.to_owned(), epoch.to_string());
        let Some(before) = before else {
            let new = ConfigMap {
                metadata: metadata(CONFIG_MAP),
                data: Some([data].into()),
                ..ConfigMap::default()
            };
            let params = PostParams::default();
            let created = self.config_maps.create(&params, &new);
            return created.await.map(drop);
        };
        let patch = json!({
            "metadata": {"resourceVersion": before.metadata.resource_version},
            "data": {FIELD: data.1},
        });
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        let patched = self.config_maps.patch(CONFIG_MAP, &params, &patch);
        patched.await.map(drop)
    }

    /// Logs the first of several failures in a row.
    fn failed(&mut self, error: &ApiError) {
        if !std::mem::replace(&mut self.has_failed, true) {
            let remedy = if error.is(403) {
                "; the controller's ServiceAccount needs the verbs get and patch on this ConfigMap"
            } else {
                ""
            };
            tracing::warn!(
                "cannot use the epoch in {}, retrying; replicas may disagree on the order of \
                 states: {error}{remedy}",
                self.place
            );
        }
    }
}

/// The epoch of a replica after a read of the stored one: the latest that is known, or a new one for
/// a restore that no other replica has noticed before.
pub fn next(known: Option<u64>, is_restored: bool, stored: u64, now: u64) -> u64 {
    let known = known.unwrap_or_default();
    if is_restored && stored <= known {
        now.max(known.saturating_add(1))
    } else {
        stored.max(known)
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use diy_mesh_control_plane::clock::Reading;
    use tokio::time::Instant;

    use super::super::testing::{Server, failure};
    use super::super::watch::Timing;
    use super::*;

    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

    #[test]
    fn epoch_changes_only_if_a_restore_was_noticed() {
        assert_eq!(next(None, false, 0, 100), 0);
        assert_eq!(next(None, false, 50, 100), 50);
        assert_eq!(next(Some(50), false, 0, 100), 50, "of a backup");
        assert_eq!(next(Some(0), true, 0, 100), 100);
        assert_eq!(next(Some(0), true, 90, 100), 90, "of another replica");
        assert_eq!(next(Some(200), true, 90, 100), 201, "clocks differ");
    }

    fn stored(epoch: &str, version: &str) -> serde_json::Value {
        json!({
            "apiVersion": "v1", "kind": "ConfigMap", "data": {"restored": epoch},
            "metadata": {"name": CONFIG_MAP, "namespace": "mesh", "resourceVersion": version},
        })
    }

    #[tokio::test]
    async fn restore_is_stored_unless_another_replica_has_stored_it() {
        let (mut server, cluster) = Server::start(Timing::default()).await;
        let (sender, mut changes) = mpsc::channel(4);
        let claims = cluster.claims.clone();
        // The clock of this replica is 30 years ahead, as the API server and another replica show.
        let (clock, now) = (
            Clock::new(|| SystemTime::now() + 30 * YEAR),
            SystemTime::now(),
        );
        let other = Reading::new(now, Instant::now());
        clock.compare(Some(now), Some(vec![other]));
        let mut epoch = Epoch::new(cluster.client.clone(), "mesh", clock, claims, sender);
        let (begins, _) = tokio::join!(epoch.read(), server.respond(200, stored("7", "69")));
        assert!(!begins, "it is the first one");
        assert_eq!(changes.try_recv().unwrap().change, Change::Epoch(7));
        epoch.is_restored().send_replace(true);
        // The other replica is faster.
        let respond = async {
            server.respond(200, stored("7", "70")).await;
            server.respond(409, failure(409)).await;
        };
        let (begins, ()) = tokio::join!(epoch.read(), respond);
        assert!(!begins && changes.try_recv().is_err());
        let (begins, _) = tokio::join!(epoch.read(), server.respond(200, stored("9", "71")));
        assert!(begins && !*epoch.is_restored().borrow());
        assert_eq!(changes.try_recv().unwrap().change, Change::Epoch(9));
        epoch.is_restored().send_replace(true);
        let respond = async {
            let mut missing = failure(404);
            missing["reason"] = json!("NotFound");
            server.respond(404, missing).await;
            server.respond(201, stored("1", "1")).await;
        };
        let (begins, ()) = tokio::join!(epoch.read(), respond);
        let Change::Epoch(new) = changes.try_recv().unwrap().change else {
            panic!("expected an epoch");
        };
        let now = seconds(now);
        assert!(begins && (now..now + 60).contains(&new), "{new}");
    }
}
