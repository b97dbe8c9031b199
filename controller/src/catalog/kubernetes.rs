//! The catalog of a Kubernetes cluster: watches of all Services, EndpointSlices, Pods and Nodes.
//!
//! Each kind has its own watch. After an error, the watch logs the cause and the required
//! permissions and retries with back-off. Only the fields that the index needs are kept.

use std::fmt::Debug;
use std::pin::pin;
use std::time::Duration;

use diy_mesh_runtime::{Backoff, error_chain};
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::core::Status;
use kube::runtime::watcher::{self, Error, Event, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use super::convert::CatalogObject;
use crate::index::object::{Change, Key, Kind, Object, Source};

const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(250);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Sends the objects of the cluster, then changes, until the receiver is dropped.
pub async fn run(client: Client, trust_domain: &str, changes: mpsc::Sender<Change>) {
    // Finished pods own no address. The watch reports them as deleted.
    let running = watcher::Config::default().fields("status.phase!=Succeeded,status.phase!=Failed");
    tokio::join!(
        watch::<Service>(
            client.clone(),
            watcher::Config::default(),
            trust_domain,
            changes.clone()
        ),
        watch::<EndpointSlice>(
            client.clone(),
            watcher::Config::default(),
            trust_domain,
            changes.clone()
        ),
        watch::<Pod>(client.clone(), running, trust_domain, changes.clone()),
        watch::<Node>(client, watcher::Config::default(), trust_domain, changes),
    );
}

async fn watch<K>(
    client: Client,
    config: watcher::Config,
    trust_domain: &str,
    changes: mpsc::Sender<Change>,
) where
    K: CatalogObject
        + Resource<DynamicType = ()>
        + Clone
        + Debug
        + DeserializeOwned
        + Send
        + 'static,
{
    let events = watcher(Api::<K>::all(client), config);
    tokio::select! {
        () = forward(events, trust_domain, &changes) => {}
        () = changes.closed() => {}
    }
}

/// Converts events to changes, with a delay after each error that grows until the next change.
async fn forward<K>(
    events: impl Stream<Item = Result<Event<K>, Error>>,
    trust_domain: &str,
    changes: &mpsc::Sender<Change>,
) where
    K: CatalogObject + Resource<DynamicType = ()>,
{
    let mut events = pin!(events);
    let mut listed = Vec::new();
    let mut backoff = Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
    while let Some(event) = events.next().await {
        let change = match event {
            Ok(Event::Init) => {
                listed = Vec::new();
                None
            }
            Ok(Event::InitApply(object)) => {
                listed.extend(convert(&object, trust_domain));
                None
            }
            Ok(Event::InitDone) => Some(Change::Reset(
                Source::Kubernetes,
                K::KIND,
                std::mem::take(&mut listed),
            )),
            // An invalid object replaces its valid state.
            Ok(Event::Apply(object)) => {
                let converted = convert(&object, trust_domain);
                let apply = |object| Change::Apply(Source::Kubernetes, object);
                Some(converted.map_or_else(|| deleted(&object), apply))
            }
            Ok(Event::Delete(object)) => Some(deleted(&object)),
            Err(error) => {
                let delay = backoff.next_delay();
                tracing::warn!(
                    "cannot watch {} objects, retrying in {delay:?}: {}",
                    K::KIND,
                    explain(K::KIND, &error)
                );
                tokio::time::sleep(delay).await;
                is_unavailable(K::KIND, &error)
                    .then_some(Change::Unavailable(Source::Kubernetes, K::KIND))
            }
        };
        if let Some(change) = change {
            if !matches!(change, Change::Unavailable(..)) {
                backoff.reset();
            }
            if changes.send(change).await.is_err() {
                return;
            }
        }
    }
}

fn deleted<K: CatalogObject + ResourceExt>(object: &K) -> Change {
    Change::Delete(
        Source::Kubernetes,
        K::KIND,
        Key::new(&object.namespace().unwrap_or_default(), &object.name_any()),
    )
}

fn convert<K: CatalogObject + ResourceExt>(object: &K, trust_domain: &str) -> Option<Object> {
    let converted = object.convert(trust_domain);
    if let Err(error) = &converted {
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        tracing::warn!("{} {namespace}/{name} is ignored: {error}", K::KIND);
    }
    converted.ok()
}

/// Whether the cluster does not have an optional kind, or does not permit to list it.
fn is_unavailable(kind: Kind, error: &Error) -> bool {
    kind.is_optional() && status(error).is_some_and(|status| matches!(status.code, 403 | 404))
}

fn status(error: &Error) -> Option<&Status> {
    match error {
        Error::InitialListFailed(kube::Error::Api(status))
        | Error::WatchStartFailed(kube::Error::Api(status))
        | Error::WatchError(status) => Some(status),
        _ => None,
    }
}

/// An error with its remedy.
fn explain(kind: Kind, error: &Error) -> String {
    let Some(status) = status(error) else {
        return error_chain(error);
    };
    if status.code != 403 {
        return format!("{} (status {})", status.message, status.code);
    }
    let (resource, group) = match kind {
        Kind::Service => ("services", "the core group"),
        Kind::Slice => ("endpointslices", "discovery.k8s.io"),
        Kind::Pod => ("pods", "the core group"),
        Kind::Node => ("nodes", "the core group"),
    };
    format!(
        "{}; the controller's ServiceAccount needs the verbs list and watch on {resource} of {group}, in all namespaces",
        status.message
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(name: &str, ip: &str) -> Service {
        serde_json::from_value(serde_json::json!({"metadata": {"name": name, "namespace": "shop"}, "spec": {"clusterIP": ip}})).unwrap()
    }

    fn forbidden() -> Error {
        let status = Status::failure("services is forbidden", "Forbidden").with_code(403);
        Error::InitialListFailed(kube::Error::Api(Box::new(status)))
    }

    async fn forwarded<K>(events: Vec<Result<Event<K>, Error>>) -> Vec<String>
    where
        K: CatalogObject + Resource<DynamicType = ()>,
    {
        let (sender, mut receiver) = mpsc::channel(100);
        forward(futures::stream::iter(events), "cluster.local", &sender).await;
        drop(sender);
        let mut changes = Vec::new();
        while let Some(change) = receiver.recv().await {
            changes.push(match change {
                Change::Apply(_, object) => format!("apply {}", object.key()),
                Change::Delete(_, kind, key) => format!("delete {kind} {key}"),
                Change::Unavailable(_, kind) => format!("unavailable {kind}"),
                Change::Reset(_, kind, objects) => {
                    format!("reset {kind} {}", objects.len())
                }
            });
        }
        changes
    }

    #[tokio::test]
    async fn converts_each_list_to_a_reset() {
        let events = vec![
            Ok(Event::Init),
            Ok(Event::InitApply(service("a", "10.0.0.1"))),
            Ok(Event::InitApply(service("b", "10.0.0.2"))),
            Ok(Event::InitDone),
            Ok(Event::Apply(service("c", "10.0.0.3"))),
            Ok(Event::Delete(service("a", "10.0.0.1"))),
            Ok(Event::Init),
            Ok(Event::InitDone),
        ];
        assert_eq!(
            forwarded(events).await,
            [
                "reset Service 2",
                "apply shop/c",
                "delete Service shop/a",
                "reset Service 0"
            ]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn retries_after_errors_and_discards_incomplete_lists() {
        let events = vec![
            Ok(Event::Init),
            Ok(Event::InitApply(service("a", "10.0.0.1"))),
            Err(forbidden()),
            Err(forbidden()),
            Ok(Event::Init),
            Ok(Event::InitApply(service("b", "10.0.0.2"))),
            Ok(Event::InitDone),
        ];
        let start = tokio::time::Instant::now();
        assert_eq!(forwarded(events).await, ["reset Service 1"]);
        assert_eq!(
            start.elapsed(),
            MIN_RETRY_INTERVAL * 3,
            "the second pause is twice the first"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn kind_that_is_not_installed_or_not_permitted_is_unavailable_if_it_is_optional() {
        let not_found = || {
            let status = Status::failure("the server could not find it", "NotFound").with_code(404);
            Error::InitialListFailed(kube::Error::Api(Box::new(status)))
        };
        let nodes = forwarded::<Node>(vec![Err(not_found()), Err(forbidden())]).await;
        assert_eq!(nodes, ["unavailable Node", "unavailable Node"]);
        let services = forwarded::<Service>(vec![Err(not_found()), Err(forbidden())]).await;
        assert_eq!(services, [""; 0]);
    }

    #[tokio::test]
    async fn deletes_objects_that_become_invalid() {
        let events = vec![Ok(Event::<Service>::Apply(service("a", "not an address")))];
        assert_eq!(forwarded(events).await, ["delete Service shop/a"]);
    }

    #[test]
    fn names_missing_permissions() {
        let text = explain(Kind::Slice, &forbidden());
        assert!(
            text.contains("verbs list and watch on endpointslices of discovery.k8s.io"),
            "{text}"
        );
    }
}
