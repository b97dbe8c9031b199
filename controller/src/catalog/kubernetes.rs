//! The catalog of a Kubernetes cluster: watches of all Services, EndpointSlices, Pods and Nodes,
//! of the routes and grants of the Gateway API, and of TrafficPolicies, where they are installed.
//!
//! Each kind has its own watch (`watch.rs`). After an error, the watch logs the cause
//! and the required permissions and retries with back-off. Only the fields that the index needs are
//! kept.

use std::fmt::Debug;

use futures::future::join_all;
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use super::convert::CatalogObject;
use super::definitions::watch_custom;
use super::freshness::Freshness;
use super::objects::{Context, Objects};
use super::watch::{ALL, Selector, Timing};
use crate::index::object::{Event, Kind};

/// Sends the objects of the cluster, then changes, until the receiver is dropped.
pub async fn run(
    client: Client,
    trust_domain: &str,
    freshness: &Freshness,
    changes: mpsc::Sender<Event>,
) {
    // Finished pods own no address. The watch reports them as deleted.
    let running = Selector {
        fields: Some("status.phase!=Succeeded,status.phase!=Failed"),
    };
    let context = Context {
        trust_domain,
        freshness,
        changes: &changes,
        timing: Timing::default(),
    };
    let core = async {
        let client = || client.clone();
        tokio::join!(
            watch::<Service>(Kind::Service, Api::all(client()), ALL, context),
            watch::<EndpointSlice>(Kind::Slice, Api::all(client()), ALL, context),
            watch::<Pod>(Kind::Pod, Api::all(client()), running, context),
            watch::<Node>(Kind::Node, Api::all(client()), ALL, context),
        )
    };
    let custom = Kind::ALL.into_iter().filter(|kind| kind.is_custom());
    let custom = custom.map(|kind| watch_custom(&client, kind, context));
    tokio::select! {
        _ = async { tokio::join!(core, join_all(custom)) } => {}
        () = changes.closed() => {}
    }
}

/// Sends all objects of a kind that every cluster has, then changes. Never ends.
async fn watch<K>(kind: Kind, api: Api<K>, selector: Selector<'_>, context: Context<'_>)
where
    K: CatalogObject + Resource + Clone + Debug + DeserializeOwned,
{
    let mut objects = Objects::new(kind, context);
    objects.watch(vec![api], selector).await;
}
