//! The catalog of a Kubernetes cluster: watches of all Services, EndpointSlices, Pods and Nodes,
//! of the routes and grants of the Gateway API, and of TrafficPolicies, where they are installed.
//!
//! Each kind has its own watch (`watch.rs`). After an error, the watch logs the cause
//! and the required permissions and retries with back-off. A kind that cannot be read for a minute is
//! reported. Only the fields that the index needs are kept.

use std::time::Duration;

use diy_mesh_control_plane::clock::Clock;
use futures::future::join_all;
use kube::Client;
use tokio::sync::mpsc;

use super::claims::Claims;
use super::definitions::watch_custom;
use super::epoch::Epoch;
use super::freshness::{Freshness, Unreadable};
use super::objects::{Context, Objects};
use super::resources::resources;
use super::watch::Timing;
use super::{Change, Event};
use crate::api::bytes::Pages;
use crate::config::Config;
use crate::object::Kind;

/// Interval of checks whether kinds cannot be read.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Sends the objects of the cluster, then changes, until the receiver is dropped. Lists all objects
/// again in a new epoch. Reports each kind that cannot be read.
pub async fn run(
    client: Client,
    config: &Config,
    clock: &Clock,
    freshness: &Freshness,
    changes: mpsc::Sender<Event>,
    claims: &Claims,
    report: impl Fn(&Unreadable),
) {
    let namespace = &config.pod_namespace;
    let (known, sender) = (claims.clone(), changes.clone());
    let mut epoch = Epoch::new(client.clone(), namespace, clock.clone(), known, sender);
    // The states of the first proxies have an order.
    epoch.read().await;
    let context = Context {
        trust_domain: &config.trust_domain,
        namespace,
        freshness,
        changes: &changes,
        claims,
        is_restored: &epoch.is_restored(),
        pages: &Pages::default(),
        timing: Timing::default(),
    };
    loop {
        tokio::select! {
            () = watch_all(&client, context, &report) => return,
            () = epoch.changed() => {}
        }
        tracing::info!("the cluster was restored from a backup, listing all objects again");
    }
}

async fn watch_all(client: &Client, context: Context<'_>, report: impl Fn(&Unreadable)) {
    let Context { freshness, .. } = context;
    Kind::ALL.into_iter().for_each(|kind| freshness.begin(kind));
    // Finished pods own no address. The watch reports them as deleted.
    let running = Some("status.phase!=Succeeded,status.phase!=Failed");
    let core = async {
        tokio::join!(
            follow(Kind::Service, client, None, context),
            follow(Kind::Slice, client, None, context),
            follow(Kind::Pod, client, running, context),
            follow(Kind::Node, client, None, context),
        )
    };
    let custom = Kind::ALL.into_iter().filter(|kind| kind.is_custom());
    let custom = custom.map(|kind| watch_custom(client, kind, context));
    tokio::select! {
        _ = async { tokio::join!(core, join_all(custom), check(context, report)) } => {}
        () = context.changes.closed() => {}
    }
}

/// Reports the kinds that cannot be read. An optional one without a former state delays no call any
/// longer. Never ends.
async fn check(context: Context<'_>, report: impl Fn(&Unreadable)) {
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        for unreadable in context.freshness.take_unreadable() {
            let kind = unreadable.kind;
            report(&unreadable);
            if kind.is_optional() && !unreadable.is_known {
                let change = Change::Unreadable(kind);
                // An error means that the controller stops, and with it this task.
                let _ = context.changes.send(change.into()).await;
            }
        }
    }
}

/// Sends all objects of a kind that every cluster has, then changes. Never ends.
async fn follow(kind: Kind, client: &Client, fields: Option<&str>, context: Context<'_>) {
    let mut objects = Objects::new(kind, client, context);
    objects.watch(resources(kind), fields).await;
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::sync::watch;

    use super::super::freshness::MAX_FAILURE;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn kind_that_cannot_be_read_is_reported_and_delays_calls_for_a_minute() {
        let (sender, mut changes) = mpsc::channel(16);
        let (freshness, reports) = (Freshness::default(), RefCell::<Vec<String>>::default());
        let context = Context {
            trust_domain: "cluster.local",
            namespace: "mesh",
            freshness: &freshness,
            changes: &sender,
            claims: &Claims::default(),
            is_restored: &watch::Sender::new(false),
            pages: &Pages::default(),
            timing: Timing::default(),
        };
        Kind::ALL.into_iter().for_each(|kind| freshness.begin(kind));
        freshness.fail(Kind::Grant, "forbidden".to_owned());
        for kind in Kind::ALL {
            match kind {
                Kind::Grant | Kind::Pod => {}
                // Its watch breaks later.
                Kind::HttpRoute => {
                    freshness.confirm(kind, 0);
                    freshness.fail(kind, "broken".to_owned());
                }
                Kind::TrafficSplit => freshness.remove(kind),
                _ => freshness.confirm(kind, 0),
            }
        }
        let report = |unreadable: &Unreadable| {
            let text = format!("{}: {}", unreadable.kind, unreadable.error);
            reports.borrow_mut().push(text);
        };
        let checked = tokio::time::timeout(MAX_FAILURE * 3, check(context, report));
        let started = tokio::time::Instant::now();
        let (result, (change, elapsed)) = tokio::join!(checked, async {
            let change = changes.recv().await.unwrap().change;
            (change, started.elapsed())
        });
        assert!(result.is_err(), "never ends");
        assert_eq!(change, Change::Unreadable(Kind::Grant));
        assert!(elapsed >= MAX_FAILURE && elapsed <= MAX_FAILURE + CHECK_INTERVAL);
        // A required kind blocks the replica, and a former list stays in use: both are reported.
        assert!(changes.try_recv().is_err());
        assert_eq!(
            *reports.borrow(),
            [
                "Pod: the API server has not listed its objects",
                "HTTPRoute: broken",
                "ReferenceGrant: forbidden"
            ]
        );
    }
}
