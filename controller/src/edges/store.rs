//! Keeps the edges of each namespace in a ConfigMap in the namespace of the mesh, for restarts and
//! for the other replicas. Each replica writes what it knows united with what is stored, on the
//! version that it has read.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use diy_mesh_control_plane::clock::Clock;
use diy_mesh_proto::mesh::v1::GetEdgesResponse;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{DeleteParams, ListParams, PostParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use prost::Message as _;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::{Edges, day};
use crate::api::{API_TIMEOUT, ApiError, metadata, request};

/// The label with the namespace that a ConfigMap is about.
const LABEL: &str = "diy-service-mesh.dev/edges";
/// The start of the names of ConfigMaps.
const PREFIX: &str = "diy-service-mesh-edges-";
/// The field with the groups of the namespace, an encoded GetEdgesResponse.
const FIELD: &str = "edges";
/// Time between two exchanges with what is stored.
const INTERVAL: Duration = Duration::from_secs(5 * 60);
/// Attempts to store what is new when the replica has stopped.
const MAX_LAST_ATTEMPTS: u32 = 3;
/// ConfigMaps of a page of their list.
const PAGE_SIZE: u32 = 500;

/// Exchanges the edges with what is stored in this namespace, now and then, and when the replica has
/// stopped. Without a client, it only forgets what is too old.
pub async fn run(
    client: Option<Client>,
    namespace: &str,
    edges: Edges,
    clock: &Clock,
    stopped: &CancellationToken,
) {
    let mut store = client.map(|client| Store::new(client, namespace, edges.clone()));
    let mut has_failed = false;
    let mut attempts = MAX_LAST_ATTEMPTS;
    loop {
        let is_last = stopped.is_cancelled();
        let time = clock.verdict();
        let is_trusted = time.error().is_none() && !time.is_disputed();
        // By a wrong clock, all that others have seen would be too old.
        if is_trusted {
            edges.expire(time.now);
        }
        let result = match store.as_mut().filter(|_| is_trusted) {
            Some(store) => store.exchange(time.now).await,
            None => Ok(()),
        };
        if let Err(error) = &result
            && !has_failed
        {
            tracing::warn!(
                "cannot keep what pods are called by in ConfigMaps {PREFIX}* of namespace \
                 {namespace}, retrying: {error}"
            );
        }
        has_failed = result.is_err();
        if is_last {
            attempts -= 1;
            if has_failed || attempts == 0 || !is_trusted || !edges.has_unstored() {
                return;
            }
            // Another replica has written at the same time.
            continue;
        }
        tokio::select! {
            () = stopped.cancelled() => {}
            // Replicas that have started together do not write together.
            () = sleep(INTERVAL.mul_f64(1.0 + fastrand::f64() / 10.0)) => {}
        }
    }
}

/// The store of the edges in ConfigMaps.
struct Store {
    config_maps: Api<ConfigMap>,
    edges: Edges,
    /// The latest versions that were read or written, by namespace.
    versions: BTreeMap<String, String>,
    /// The day of the latest exchange.
    day: i64,
}

impl Store {
    fn new(client: Client, namespace: &str, edges: Edges) -> Store {
        Store {
            config_maps: Api::namespaced(client, namespace),
            edges,
            versions: BTreeMap::new(),
            day: 0,
        }
    }

    /// Reads what has changed, and writes what is new. On a new day, all that was seen.
    async fn exchange(&mut self, now: SystemTime) -> Result<(), ApiError> {
        let stored = self.list().await?;
        let is_new_day = self.day != day(now);
        let mut namespaces: BTreeSet<String> = stored.keys().cloned().collect();
        namespaces.extend(self.edges.namespaces());
        for namespace in namespaces {
            let is_new = self.edges.take_unstored(&namespace);
            let is_changed = stored.get(&namespace) != self.versions.get(&namespace);
            if !is_new && !is_changed && !is_new_day {
                continue;
            }
            let united = self.unite(&namespace, is_new || is_new_day, now);
            match request(API_TIMEOUT, united).await {
                Ok(Some(version)) => drop(self.versions.insert(namespace, version)),
                Ok(None) => drop(self.versions.remove(&namespace)),
                Err(error) => {
                    self.edges.mark_unstored(&namespace);
                    // Another replica has written it in the meantime, or deleted it.
                    if !error.is(409) && !error.is(404) {
                        return Err(error);
                    }
                }
            }
        }
        self.day = day(now);
        Ok(())
    }

    /// The versions of what is stored, by namespace.
    async fn list(&self) -> Result<BTreeMap<String, String>, ApiError> {
        let mut versions = BTreeMap::new();
        let mut params = ListParams::default().labels(LABEL).limit(PAGE_SIZE);
        loop {
            let page = request(API_TIMEOUT, self.config_maps.list_metadata(&params)).await?;
            for mut map in page.items {
                let version = map.resource_version().unwrap_or_default();
                let namespace = map.labels_mut().remove(LABEL).unwrap_or_default();
                if map.name_any() == name(&namespace) {
                    versions.insert(namespace, version);
                }
            }
            params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                return Ok(versions);
            }
        }
    }

    /// Unites what is stored of a namespace with what is known, and writes it if that `is_due`.
    /// Returns the stored version.
    async fn unite(
        &self,
        namespace: &str,
        is_due: bool,
        now: SystemTime,
    ) -> kube::Result<Option<String>> {
        let name = name(namespace);
        let stored = self.config_maps.get_opt(&name).await?;
        let before = stored.as_ref().map(content).unwrap_or_default();
        // Content that cannot be read is replaced.
        let groups = GetEdgesResponse::decode(&*before)
            .unwrap_or_default()
            .groups;
        let groups = self.edges.unite(namespace, groups, now);
        let after = GetEdgesResponse {
            groups,
            ..GetEdgesResponse::default()
        };
        let (after, params) = (after.encode_to_vec(), PostParams::default());
        let Some(stored) = stored else {
            if after.is_empty() {
                return Ok(None);
            }
            let map = config_map(namespace, after, None);
            let created = self.config_maps.create(&params, &map).await?;
            return Ok(created.resource_version());
        };
        let version = stored.resource_version();
        if after.is_empty() {
            let params = DeleteParams::default().preconditions(Preconditions {
                resource_version: version,
                uid: None,
            });
            self.config_maps.delete(&name, &params).await?;
            return Ok(None);
        }
        if after == before || !is_due {
            return Ok(version);
        }
        let map = config_map(namespace, after, version);
        let replaced = self.config_maps.replace(&name, &params, &map).await?;
        Ok(replaced.resource_version())
    }
}

fn name(namespace: &str) -> String {
    format!("{PREFIX}{namespace}")
}

fn content(map: &ConfigMap) -> Vec<u8> {
    let data = map.binary_data.as_ref().and_then(|data| data.get(FIELD));
    data.map(|bytes| bytes.0.clone()).unwrap_or_default()
}

fn config_map(namespace: &str, content: Vec<u8>, version: Option<String>) -> ConfigMap {
    let mut metadata = metadata(&name(namespace));
    let labels = metadata.labels.get_or_insert_default();
    labels.insert(LABEL.to_owned(), namespace.to_owned());
    metadata.resource_version = version;
    ConfigMap {
        metadata,
        binary_data: Some([(FIELD.to_owned(), ByteString(content))].into()),
        ..ConfigMap::default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use diy_mesh_control_plane::clock::Reading;
    use diy_mesh_proto::mesh::v1 as proto;
    use proto::get_edges_response::Group;
    use serde_json::{Value, json};
    use tokio::time::Instant;

    use super::*;
    use crate::catalog::testing::{Cluster, Server, failure, list};

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn group(namespace: &str) -> Group {
        Group {
            namespace: namespace.into(),
            service_account: "web".into(),
            ..Group::default()
        }
    }

    fn report(edges: &Edges, namespace: &str, port: u32, now: SystemTime) {
        let edge = proto::Edge {
            port,
            ..proto::Edge::default()
        };
        let report = proto::Edges {
            edges: vec![edge],
            incomplete: false,
        };
        edges.report(group(namespace), report, now);
    }

    /// The ConfigMap of a replica that knows this port of the pods of the namespace.
    fn stored(namespace: &str, port: u32, version: &str, now: SystemTime) -> Value {
        let edges = Edges::default();
        report(&edges, namespace, port, now);
        let groups = edges.unite(namespace, vec![], now);
        let next_page_token = String::new();
        let content = GetEdgesResponse {
            groups,
            next_page_token,
        }
        .encode_to_vec();
        let map = config_map(namespace, content, Some(version.into()));
        serde_json::to_value(map).unwrap()
    }

    fn ports(edges: &Edges, namespace: &str) -> Vec<u32> {
        let groups = edges.groups(namespace).into_iter();
        let seen = groups.flat_map(|group| group.edges);
        seen.filter_map(|seen| Some(seen.edge?.port)).collect()
    }

    async fn start() -> (Server, Cluster, Edges, Store) {
        let (server, cluster) = Server::without_watches().await;
        let edges = Edges::default();
        let store = Store::new(cluster.client.clone(), "mesh", edges.clone());
        (server, cluster, edges, store)
    }

    const SHOP: &str = "/namespaces/mesh/configmaps/diy-service-mesh-edges-shop";
    const OTHER: &str = "/namespaces/mesh/configmaps/diy-service-mesh-edges-other";

    #[tokio::test]
    async fn replica_reads_what_others_know_and_writes_what_is_new_on_the_version_that_it_read() {
        let (mut server, _cluster, edges, mut store) = start().await;
        let now = UNIX_EPOCH + DAY;
        report(&edges, "shop", 80, now);
        let respond = async {
            let maps = [stored("other", 81, "7", now), stored("shop", 82, "8", now)];
            server.respond(200, list("9", "", &maps)).await;
            server.respond_at(OTHER, 200, maps[0].clone()).await;
            server.respond_at(SHOP, 200, maps[1].clone()).await;
            let written = stored("shop", 82, "10", now);
            server.respond_at(SHOP, 200, written).await
        };
        let (result, _) = tokio::join!(store.exchange(now), respond);
        result.unwrap();
        let both = (ports(&edges, "shop"), ports(&edges, "other"));
        assert_eq!(both, (vec![80, 82], vec![81]));
        // Without a change, it only lists.
        let maps = [stored("other", 81, "7", now), stored("shop", 80, "10", now)];
        let respond = server.respond(200, list("11", "", &maps));
        let (result, _) = tokio::join!(store.exchange(now), respond);
        result.unwrap();
        assert!(server.early().is_empty());
    }

    #[tokio::test]
    async fn observations_are_stored_when_the_replica_stops() {
        let (mut server, cluster, edges, _) = start().await;
        let (stopped, clock) = (CancellationToken::new(), Clock::default());
        let run = run(
            Some(cluster.client.clone()),
            "mesh",
            edges.clone(),
            &clock,
            &stopped,
        );
        let now = SystemTime::now();
        report(&edges, "shop", 80, now);
        let respond = async {
            server.respond(200, list("9", "", &[])).await;
            let mut missing = failure(404);
            missing["reason"] = json!("NotFound");
            server.respond_at(SHOP, 404, missing).await;
            server.respond(201, stored("shop", 80, "10", now)).await;
            report(&edges, "shop", 82, now);
            stopped.cancel();
            // Another replica writes at the same time.
            let map = stored("shop", 81, "11", now);
            for conflict in [true, false] {
                let list = list("11", "", std::slice::from_ref(&map));
                server.respond(200, list).await;
                server.respond_at(SHOP, 200, map.clone()).await;
                if conflict {
                    server.respond_at(SHOP, 409, failure(409)).await;
                }
            }
            let written = stored("shop", 82, "12", now);
            server.respond_at(SHOP, 200, written).await
        };
        tokio::join!(run, respond);
        assert!(!edges.has_unstored() && server.early().is_empty());
        assert_eq!(ports(&edges, "shop"), [80, 81, 82]);
    }

    #[tokio::test]
    async fn replica_with_a_wrong_clock_deletes_no_observations() {
        let (_server, cluster, edges, _) = start().await;
        let now = SystemTime::now();
        let clock = Clock::new(move || now + 30 * DAY);
        let other = Reading::new(now, Instant::now());
        clock.compare(Some(now), Some(vec![other]));
        report(&edges, "shop", 80, now);
        let stopped = CancellationToken::new();
        stopped.cancel();
        let client = Some(cluster.client.clone());
        run(client, "mesh", edges.clone(), &clock, &stopped).await;
        assert_eq!(ports(&edges, "shop"), [80]);
    }

    #[tokio::test]
    async fn conflict_is_written_later_and_what_is_too_old_is_deleted() {
        let (mut server, _cluster, edges, mut store) = start().await;
        let now = UNIX_EPOCH + DAY;
        report(&edges, "shop", 80, now);
        let created = async {
            server.respond(200, list("9", "", &[])).await;
            let mut missing = failure(404);
            missing["reason"] = json!("NotFound");
            server.respond_at(SHOP, 404, missing).await;
            server.respond(409, failure(409)).await;
        };
        let (result, ()) = tokio::join!(store.exchange(now), created);
        result.unwrap();
        let map = stored("shop", 81, "10", now);
        let written = async {
            let list = list("10", "", std::slice::from_ref(&map));
            server.respond(200, list).await;
            server.respond_at(SHOP, 200, map.clone()).await;
            let written = stored("shop", 81, "11", now);
            server.respond_at(SHOP, 200, written).await
        };
        let (result, _) = tokio::join!(store.exchange(now), written);
        result.unwrap();
        assert_eq!(ports(&edges, "shop"), [80, 81]);
        let later = now + 7 * DAY;
        edges.expire(later);
        let map = stored("shop", 81, "11", now);
        let deleted = async {
            let list = list("11", "", std::slice::from_ref(&map));
            server.respond(200, list).await;
            server.respond_at(SHOP, 200, map.clone()).await;
            server.respond_at(SHOP, 200, map.clone()).await
        };
        let (result, _) = tokio::join!(store.exchange(later), deleted);
        result.unwrap();
        assert!(edges.namespaces().is_empty() && server.early().is_empty());
    }
}
