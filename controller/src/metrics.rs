//! The metrics of the controller.

use std::fmt;

use diy_mesh_control_plane::events::Events;
use diy_mesh_proto::{
    CAPABILITY_AUTHORIZATION, CAPABILITY_EGRESS, CAPABILITY_POLICY, CAPABILITY_ROUTES,
    CAPABILITY_TELEMETRY,
};
use diy_mesh_runtime::Readiness;
use diy_mesh_runtime::metrics::{on_scrape, register, register_family, register_process, render};
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::sync::mpsc::WeakSender;

use crate::catalog::Event;
use crate::catalog::freshness::Freshness;
use crate::edges::Edges;
use crate::hub::{Counts, Hub};
use crate::quota::Quotas;

/// Upper bounds of the histograms of requests, in seconds.
const REQUEST_BUCKETS: [f64; 8] = [0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 30.0];

/// Metrics that the RPCs update.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// RPCs with a valid token.
    pub calls_accepted: Counter,
    /// RPCs without a valid token.
    pub calls_refused: Counter,
    /// RPCs whose token could not be verified.
    pub calls_unchecked: Counter,
    /// Open Discover streams.
    pub discover_streams: Gauge,
    /// Open WatchServices streams.
    pub watch_streams: Gauge,
    updates: [Counter; Sent::NAMES.len()],
    /// Updates that proxies use.
    pub acknowledged: Counter,
    /// Updates that proxies reject.
    pub rejected: Counter,
    behind: [Counter; 2],
    /// Workload certificates issued.
    pub certificates_issued: Counter,
    /// Certificate requests rejected.
    pub certificates_refused: Counter,
    /// Statuses of routes written.
    pub statuses_written: Counter,
    /// Writes that another client has preceded.
    pub status_conflicts: Counter,
    /// Statuses that could not be read or written.
    pub statuses_failed: Counter,
    /// Statuses that are to be written.
    pub statuses_waiting: Gauge,
    /// 1 while this replica writes the statuses of routes.
    pub status_leader: Gauge,
    /// The times to verify tokens that are not cached.
    pub token_reviews: Histogram,
    /// The times to answer certificate requests.
    pub signing: Histogram,
}

/// The kind of a message on a Discover stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// The whole state of a destination or of a backend.
    Snapshot,
    /// A difference.
    Delta,
    /// The client has the state.
    Unchanged,
    /// There is no such target.
    Unknown,
    /// Trust roots.
    Roots,
    /// An inbound configuration.
    Workload,
}

impl Sent {
    /// The values of the label, in the order of the kinds.
    const NAMES: [&str; 6] = [
        "snapshot",
        "delta",
        "unchanged",
        "unknown",
        "roots",
        "workload",
    ];
}

impl Metrics {
    /// Registers all metrics. `state` encodes gauges that are computed for each scrape.
    pub fn new(
        state: impl Fn(&mut DescriptorEncoder<'_>) -> fmt::Result + Send + Sync + 'static,
    ) -> Metrics {
        let mut registry = Registry::with_prefix("diy_mesh_controller");
        let r = &mut registry;
        let [calls_accepted, calls_refused, calls_unchecked] = register_family(
            r,
            "calls",
            "RPCs by the result of their authentication",
            "result",
            ["accepted", "refused", "unchecked"],
        );
        let [discover_streams, watch_streams] = register_family(
            r,
            "streams",
            "Open streams",
            "rpc",
            ["Discover", "WatchServices"],
        );
        let help = "Messages sent on Discover streams";
        let updates = register_family(r, "updates", help, "kind", Sent::NAMES);
        let [acknowledged, rejected] = register_family(
            r,
            "acknowledgements",
            "Updates that proxies have acknowledged: accepted ones are in use, rejected ones are not",
            "result",
            ["accepted", "rejected"],
        );
        let behind = register_family(
            r,
            "behind_subscriptions",
            "Subscriptions of proxies that knew of later events than this replica, which caught up, or did not within 10 seconds (timeout)",
            "result",
            ["timeout", "caught-up"],
        );
        let [certificates_issued, certificates_refused] = register_family(
            r,
            "certificates",
            "Certificate requests by result",
            "result",
            ["issued", "refused"],
        );
        let [statuses_written, status_conflicts, statuses_failed] = register_family(
            r,
            "route_status_writes",
            "Writes of the status of routes: a conflict, since another client preceded, is repeated, and a failed one is retried later, with a line in the log",
            "result",
            ["written", "conflict", "failed"],
        );
        let help = "Statuses of routes that are to be written";
        let statuses_waiting = register(r, "route_status_writes_waiting", help);
        let help = "1 while this replica writes the status of routes";
        let status_leader = register(r, "route_status_leader", help);
        let mut histogram = |name, help| {
            let histogram = Histogram::new(REQUEST_BUCKETS);
            r.register(name, help, histogram.clone());
            histogram
        };
        let help = "Time to verify a token that is not cached, with the wait for a slot";
        let token_reviews = histogram("token_review_duration_seconds", help);
        let help = "Time to answer a certificate request";
        let signing = histogram("signing_duration_seconds", help);
        register_process(r);
        on_scrape(r, state);
        Metrics {
            registry,
            calls_accepted,
            calls_refused,
            calls_unchecked,
            discover_streams,
            watch_streams,
            updates,
            acknowledged,
            rejected,
            behind,
            certificates_issued,
            certificates_refused,
            statuses_written,
            status_conflicts,
            statuses_failed,
            statuses_waiting,
            status_leader,
            token_reviews,
            signing,
        }
    }

    /// The messages of a kind.
    pub fn updates(&self, kind: Sent) -> &Counter {
        &self.updates[kind as usize]
    }

    /// The subscriptions with which this replica has, or has not, caught up.
    pub fn behind(&self, has_caught_up: bool) -> &Counter {
        &self.behind[usize::from(has_caught_up)]
    }

    /// All metrics in the OpenMetrics text format.
    pub fn render(&self) -> String {
        render(&self.registry)
    }
}

/// Encodes what callers hold, in bytes.
pub fn encode_charged(quotas: &Quotas, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
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
pub fn encode_counts(hub: &Hub, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
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
pub fn encode_times(hub: &Hub, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
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
pub fn encode_queues(
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
pub fn encode_edges(edges: &Edges, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let (cut, bytes) = edges.counts();
    let values = [("kept bytes", bytes as i64), ("cut", cut as i64)];
    let help = "Bytes of the observed calls of pods that are kept, and the number of reports that were cut";
    encode_gauges(encoder, "edges", help, "of", values)
}

/// Encodes the age of the catalog, and the number of its invalid objects.
pub fn encode_ages(freshness: &Freshness, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
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
pub fn encode_ready(readiness: &Readiness, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let help = "1 while the replica is ready.";
    encoder
        .encode_descriptor("ready", help, None, MetricType::Gauge)?
        .encode_gauge(&i64::from(readiness.unmet().is_empty()))
}

/// Encodes a gauge with one label. `help` has no full stop.
pub fn encode_gauges(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &'static str,
    values: impl IntoIterator<Item = (&'static str, impl EncodeGaugeValue)>,
) -> fmt::Result {
    let help = format!("{help}.");
    let mut family = encoder.encode_descriptor(name, &help, None, MetricType::Gauge)?;
    for (value, number) in values {
        family
            .encode_family(&[(label, value)])?
            .encode_gauge(&number)?;
    }
    Ok(())
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
