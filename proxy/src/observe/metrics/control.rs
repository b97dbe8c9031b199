//! Metrics of the proxy as a client of the control plane: the discovery stream and the certificate.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use diy_mesh_runtime::metrics::{on_scrape, register, register_family};
use prometheus_client::encoding::EncodeGaugeValue;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

/// Metrics of the discovery stream. Clones share their values.
#[derive(Clone, Debug, Default)]
pub struct DiscoveryMetrics {
    /// 1 while the stream is open.
    pub connected: Gauge,
    /// Subscribed destinations.
    pub subscriptions: Gauge,
    /// Destinations refused because the limit was reached.
    pub refused: Counter,
    /// Invalid parts of responses.
    pub broken: Counter,
    /// Attempts to open the stream after the first one.
    pub reconnects: Counter,
    /// Responses with a state that is older than the known one.
    pub older_refused: Counter,
    /// Older states in use, because no newer ones arrived.
    pub older_accepted: Counter,
    last_message: watch::Sender<Option<Instant>>,
}

/// Metrics of the workload certificate. Clones share their values.
#[derive(Clone, Debug, Default)]
pub struct IdentityMetrics {
    /// Certificates issued by the controller.
    pub certificates: Counter,
    /// Failed attempts to get a certificate.
    pub failures: Counter,
    not_after: watch::Sender<Option<SystemTime>>,
    /// Why the latest attempt failed, if it did.
    failure: watch::Sender<Option<String>>,
}

impl DiscoveryMetrics {
    pub(super) fn register(r: &mut Registry) -> Self {
        let [older_refused, older_accepted] = register_family(
            r,
            "discovery_older_states",
            "Responses with an older state than the known one, of a controller that lags behind: refused, or accepted after 30 seconds without a newer one",
            "result",
            ["refused", "accepted"],
        );
        let metrics = Self {
            older_refused,
            older_accepted,
            connected: register(
                r,
                "discovery_connected",
                "1 while the discovery stream to the controller is open",
            ),
            subscriptions: register(
                r,
                "discovery_subscriptions",
                "Destinations that the proxy subscribes to",
            ),
            refused: register(
                r,
                "discovery_refused",
                "Connections rejected because the limit of subscribed destinations was reached",
            ),
            broken: register(
                r,
                "discovery_broken",
                "Invalid parts of the controller's responses",
            ),
            reconnects: register(
                r,
                "discovery_reconnects",
                "Attempts to open the discovery stream after the first one",
            ),
            last_message: watch::Sender::default(),
        };
        let shared = metrics.clone();
        register_optional(
            r,
            "discovery_last_message_age_seconds",
            "Time since the controller's latest response in seconds.",
            move || shared.last_message_age().map(|age| age.as_secs_f64()),
        );
        metrics
    }

    /// Records the arrival of a response.
    pub fn message_received(&self) {
        self.last_message.send_replace(Some(Instant::now()));
    }

    /// Time since the latest response; `None` before the first one.
    pub fn last_message_age(&self) -> Option<Duration> {
        self.last_message.borrow().map(|at| at.elapsed())
    }
}

impl IdentityMetrics {
    pub(super) fn register(r: &mut Registry) -> Self {
        let metrics = Self {
            certificates: register(r, "certificates", "Certificates issued by the controller"),
            failures: register(
                r,
                "certificate_failures",
                "Failed attempts to get a certificate",
            ),
            not_after: watch::Sender::default(),
            failure: watch::Sender::default(),
        };
        let not_after = metrics.not_after.clone();
        register_optional(
            r,
            "certificate_end_time_seconds",
            "Expiry of the certificate in seconds since 1970.",
            move || not_after.borrow().map(|time| unix_seconds(time) as u64),
        );
        metrics
    }

    /// Records a new certificate that expires at `not_after`.
    pub fn issued(&self, not_after: SystemTime) {
        self.certificates.inc();
        self.not_after.send_replace(Some(not_after));
        self.failure.send_replace(None);
    }

    /// Records a failed attempt.
    pub fn failed(&self, reason: String) {
        self.failures.inc();
        self.failure.send_replace(Some(reason));
    }

    /// Why the latest attempt failed, if it did.
    pub fn failure(&self) -> Option<String> {
        self.failure.borrow().clone()
    }
}

/// Registers a gauge that is read at each scrape, and absent while `read` returns `None`.
fn register_optional<V: EncodeGaugeValue>(
    registry: &mut Registry,
    name: &'static str,
    help: &'static str,
    read: impl Fn() -> Option<V> + Send + Sync + 'static,
) {
    on_scrape(registry, move |encoder| match read() {
        Some(value) => encoder
            .encode_descriptor(name, help, None, MetricType::Gauge)?
            .encode_gauge(&value),
        None => Ok(()),
    });
}

/// Seconds since 1970.
pub(super) fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64()
}
