//! The measurements that are computed for each scrape of the metrics.

use std::fmt;

use diy_mesh_control_plane::events::Events;
use diy_mesh_proto::{
    CAPABILITY_AUTHORIZATION, CAPABILITY_EGRESS, CAPABILITY_POLICY, CAPABILITY_ROUTES,
    CAPABILITY_TELEMETRY,
};
use diy_mesh_runtime::Readiness;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use tokio::sync::mpsc::WeakSender;

use crate::authority::{self, AuthorityHandle};
use crate::catalog::Event;
use crate::catalog::freshness::Freshness;
use crate::edges::Edges;
use crate::metrics::encode_gauges;
use crate::publish::{Counts, Hub};
use crate::quota::Quotas;

/// The sources of the measurements for each scrape.
pub(crate) struct Sources {
    pub(crate) hub: Hub,
    pub(crate) freshness: Freshness,
    pub(crate) authority: AuthorityHandle,
    pub(crate) quotas: Quotas,
    pub(crate) edges: Edges,
    pub(crate) readiness: Readiness,
    pub(crate) changes: WeakSender<Event>,
    pub(crate) events: Events,
}

impl Sources {
    /// Encodes all of them.
    pub(crate) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        encode_counts(&self.hub, encoder)?;
        encode_times(&self.hub, encoder)?;
        encode_queues(&self.hub, &self.changes, &self.events, encoder)?;
        encode_charged(&self.quotas, encoder)?;
        encode_edges(&self.edges, encoder)?;
        encode_ages(&self.freshness, encoder)?;
        encode_ready(&self.readiness, encoder)?;
        let (status, time) = (self.authority.status(), self.authority.clock().verdict());
        authority::status::encode_metrics(&status, time, encoder)
    }
}

/// Encodes what callers hold, in bytes.
fn encode_charged(quotas: &Quotas, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let (used, budget) = quotas.charged();
    let bytes = [("used", used), ("limit", budget)].into_iter();
    encode_gauges(
        encoder,
        "budget_bytes",
        "Bytes that subscriptions and unsent answers of all callers hold, and their limit",
        "of",
        bytes.map(|(of, bytes)| (of, i64::try_from(bytes).unwrap_or(i64::MAX))),
    )
}

/// Encodes the sizes of the catalog and of its subscriptions.
fn encode_counts(hub: &Hub, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let Counts {
        objects,
        resources,
        subscriptions,
        earlier,
        unauthorizing,
        without_egress,
        without_telemetry,
    } = hub.counts();
    let objects = objects
        .into_iter()
        .map(|(kind, count)| (kind.unique_name(), count as i64));
    let name = "catalog_objects";
    encode_gauges(encoder, name, "Objects in the catalog", "kind", objects)?;
    encode_gauges(
        encoder,
        "subscriptions",
        "Subscribed resources, and subscriptions to them",
        "of",
        [
            ("resources", resources as i64),
            ("subscribers", subscriptions as i64),
        ],
    )?;
    let holds = LOCKS.into_iter().zip(hub.longest_holds());
    encode_gauges(
        encoder,
        "longest_lock_hold_seconds",
        "The longest time for which a lock was held since the start",
        "lock",
        holds.map(|(lock, time)| (lock, time.as_secs_f64())),
    )?;
    encode_gauges(
        encoder,
        "streams_without_capability",
        "Discover streams of proxies of an earlier release, which do not announce a capability",
        "capability",
        [
            (CAPABILITY_ROUTES, earlier as i64),
            (CAPABILITY_POLICY, earlier as i64),
            (CAPABILITY_AUTHORIZATION, unauthorizing as i64),
            (CAPABILITY_EGRESS, without_egress as i64),
            (CAPABILITY_TELEMETRY, without_telemetry as i64),
        ],
    )
}

/// The locks of the hub: the index, exclusive and shared, and the subscribers.
const LOCKS: [&str; 3] = ["index", "index, shared", "subscribers"];

/// Encodes the times for which locks are held, and the delay of publications.
pub(crate) fn encode_times(hub: &Hub, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let (name, kind) = ("lock_hold_seconds", MetricType::Histogram);
    let help = "Times for which a lock is held. The goal is 20 ms.";
    let mut family = encoder.encode_descriptor(name, help, None, kind)?;
    for (lock, times) in LOCKS.into_iter().zip(hub.holds()) {
        times.encode(family.encode_family(&[("lock", lock)])?)?;
    }
    let name = "publication_duration_seconds";
    let help = "Time from the receipt of a change to the notification of the subscribers, once for each resource. Up to 0.1 s is the merging of changes.";
    let times = encoder.encode_descriptor(name, help, None, kind)?;
    hub.publications().encode(times)
}

/// Encodes the lengths of queues.
fn encode_queues(
    hub: &Hub,
    changes: &WeakSender<Event>,
    events: &Events,
    encoder: &mut DescriptorEncoder<'_>,
) -> fmt::Result {
    let changes = changes.upgrade();
    let changes = changes.map_or(0, |sender| sender.max_capacity() - sender.capacity());
    let lengths = [
        ("changes", changes),
        ("events", events.queued()),
        ("subscribers", hub.waiting()),
    ];
    let help = "Waiting items: changes for the index (at most 1,024), Kubernetes Events (at most 64), and subscribers with states that their stream has not taken";
    let lengths = lengths.map(|(of, length)| (of, length as i64));
    encode_gauges(encoder, "queued", help, "of", lengths)
}

/// Encodes how much is kept of what pods were called by and what they called, and what was cut.
fn encode_edges(edges: &Edges, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let (cut, bytes) = edges.counts();
    let values = [("kept bytes", bytes as i64), ("cut", cut as i64)];
    let help = "Bytes of the observed calls of pods that are kept, and the number of reports that were cut";
    encode_gauges(encoder, "edges", help, "of", values)
}

/// Encodes the age of the catalog, and the number of its invalid objects.
fn encode_ages(freshness: &Freshness, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let ages = freshness.ages().into_iter();
    let ages = ages.map(|(kind, age)| (kind.unique_name(), age.as_secs() as i64));
    let help = "Seconds since the source of the catalog last confirmed its objects, by an event, a list, or a watch without changes. The API server confirms a watch that works every three minutes";
    encode_gauges(encoder, "watch_age_seconds", help, "kind", ages)?;
    let ignored = freshness.ignored().into_iter();
    let ignored = ignored.map(|(kind, count)| (kind.unique_name(), count as i64));
    let help = "Objects that the controller ignores, because they are invalid or exceed a limit";
    encode_gauges(encoder, "ignored_objects", help, "kind", ignored)?;
    let unreadable = freshness.unreadable().into_iter();
    let unreadable =
        unreadable.map(|(kind, is_unreadable)| (kind.unique_name(), i64::from(is_unreadable)));
    let help = "1 for a kind whose objects cannot be read for at least a minute";
    encode_gauges(encoder, "unreadable_kinds", help, "kind", unreadable)
}

/// Encodes whether the controller is ready.
fn encode_ready(readiness: &Readiness, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let help = "1 while the replica is ready.";
    encoder
        .encode_descriptor("ready", help, None, MetricType::Gauge)?
        .encode_gauge(&i64::from(readiness.unmet().is_empty()))
}

#[cfg(test)]
mod tests {
    use diy_mesh_runtime::metrics::{Active, negotiate};
    use diy_mesh_testkit::metrics::promtool;
    use tokio::sync::mpsc;

    use super::*;
    use crate::catalog::Change;
    use crate::index::Resource;
    use crate::kinds::{Object, Pod};
    use crate::metrics::{Metrics, Sent};
    use crate::object::Key;

    #[test]
    fn renders_each_series_with_its_label() {
        let hub = Hub::default();
        hub.apply([Change::Apply(Object::Pod(Pod {
            key: Key::new("shop", "web"),
            uid: "".into(),
            addresses: vec!["10.0.0.1".parse().unwrap()],
            host_network: false,
            terminating: false,
            ready: true,
            unready_by_node: false,
            created: 0,
            node: "".into(),
            zone: "".into(),
            identity: None,
            bypassed: Default::default(),
            restricts_udp: false,
            inbound: Default::default(),
            labels: Default::default(),
        }))]);
        let mut one = hub.watch_resources(None);
        one.subscribe(&Resource::Destination("10.0.0.1:80".parse().unwrap()));
        let (sender, _receiver) = mpsc::channel(4);
        sender.try_send(Change::Epoch(1).into()).unwrap();
        let (events, changes) = (Events::new().0, sender.downgrade());
        let metrics = Metrics::new(move |encoder| {
            encode_counts(&hub, encoder)?;
            encode_times(&hub, encoder)?;
            encode_queues(&hub, &changes, &events, encoder)?;
            encode_ready(&Readiness::default(), encoder)
        });
        metrics.signing.observe(0.01);
        metrics.updates(Sent::Delta).inc_by(3);
        let active = Active::new(&metrics.discover_streams);
        let text = metrics.render();
        for line in [
            "# TYPE diy_mesh_controller_updates counter",
            "diy_mesh_controller_updates_total{kind=\"delta\"} 3",
            "# TYPE diy_mesh_controller_streams gauge",
            "diy_mesh_controller_streams{rpc=\"Discover\"} 1",
            "diy_mesh_controller_catalog_objects{kind=\"Pod\"} 1",
            "diy_mesh_controller_subscriptions{of=\"subscribers\"} 1",
            "# TYPE diy_mesh_controller_longest_lock_hold_seconds gauge",
            "# TYPE diy_mesh_controller_lock_hold_seconds histogram",
            "diy_mesh_controller_lock_hold_seconds_bucket{le=\"+Inf\",lock=\"index\"} 2",
            "diy_mesh_controller_publication_duration_seconds_count 0",
            "diy_mesh_controller_queued{of=\"changes\"} 1",
            "diy_mesh_controller_queued{of=\"events\"} 0",
            "diy_mesh_controller_queued{of=\"subscribers\"} 1",
            "diy_mesh_controller_ready 1",
            "diy_mesh_controller_route_status_writes_waiting 0",
            "diy_mesh_controller_signing_duration_seconds_bucket{le=\"0.02\"} 1",
            "diy_mesh_controller_token_review_duration_seconds_count 0",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}: {text}");
        }
        // It finds units, suffixes and texts against the conventions.
        let (_, scraped) = negotiate("*/*", text.clone());
        assert_eq!(promtool(&scraped), "");
        drop(active);
        assert!(
            metrics
                .render()
                .contains("diy_mesh_controller_streams{rpc=\"Discover\"} 0\n")
        );
    }
}
