//! The metrics of the controller.

use std::fmt;

use diy_mesh_runtime::metrics::{on_scrape, register, register_family, register_process, render};
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

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
