//! The metrics of the injector.

use std::time::SystemTime;

use diy_mesh_runtime::metrics::{register, register_family, register_process, render};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::review::Outcome;

/// Upper bounds of the duration histogram, in seconds.
const DURATION_BUCKETS: [f64; 8] = [0.0001, 0.00025, 0.0005, 0.001, 0.005, 0.025, 0.25, 4.0];

/// The metrics of one injector. The number of series is fixed.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    injected: Counter,
    denied: Counter,
    left_alone: Counter,
    /// Reviews without an answer.
    pub errors: Counter,
    /// The durations of reviews in seconds, answered or not.
    pub duration: Histogram,
    /// Corrections of the caBundle.
    pub repairs: Counter,
    serving_not_after: Gauge,
    ca_not_after: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("diy_mesh_injector");
        let r = &mut registry;
        let [injected, denied, left_alone, errors] = register_family(
            r,
            "reviews",
            "Pods that were injected, denied or left alone, and admission reviews that failed (error)",
            "outcome",
            ["injected", "denied", "left_alone", "error"],
        );
        let duration = Histogram::new(DURATION_BUCKETS);
        r.register(
            "review_duration_seconds",
            "Time to read and answer a review",
            duration.clone(),
        );
        let repairs = register(
            r,
            "ca_bundle_repairs",
            "Corrections of the caBundle in the webhook configuration",
        );
        let serving_not_after = register(
            r,
            "serving_certificate_end_seconds",
            "Expiry of the serving certificate, in seconds since 1970",
        );
        let ca_not_after = register(
            r,
            "ca_certificate_end_seconds",
            "Expiry of the CA of the serving certificate, in seconds since 1970",
        );
        register_process(r);
        Self {
            registry,
            injected,
            denied,
            left_alone,
            errors,
            duration,
            repairs,
            serving_not_after,
            ca_not_after,
        }
    }
}

impl Metrics {
    /// Counts an answered review.
    pub fn outcome(&self, outcome: Outcome) {
        let counter = match outcome {
            Outcome::Injected => &self.injected,
            Outcome::Denied => &self.denied,
            Outcome::LeftAlone => &self.left_alone,
        };
        counter.inc();
    }

    /// Records the expiry of the certificates in use.
    pub fn certificates(&self, serving_not_after: SystemTime, ca_not_after: SystemTime) {
        let seconds = |time: SystemTime| {
            let since_epoch = time.duration_since(SystemTime::UNIX_EPOCH);
            i64::try_from(since_epoch.unwrap_or_default().as_secs()).unwrap_or(i64::MAX)
        };
        self.serving_not_after.set(seconds(serving_not_after));
        self.ca_not_after.set(seconds(ca_not_after));
    }

    /// All metrics in the OpenMetrics text format.
    pub fn render(&self) -> String {
        render(&self.registry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renders_counts_and_durations() {
        let metrics = Metrics::default();
        metrics.outcome(Outcome::Injected);
        metrics.outcome(Outcome::Injected);
        metrics.outcome(Outcome::Denied);
        metrics.errors.inc();
        metrics.duration.observe(0.0002);
        metrics.duration.observe(60.0);
        let text = metrics.render();
        for line in [
            "# TYPE diy_mesh_injector_reviews counter",
            "diy_mesh_injector_reviews_total{outcome=\"injected\"} 2",
            "diy_mesh_injector_reviews_total{outcome=\"denied\"} 1",
            "diy_mesh_injector_reviews_total{outcome=\"left_alone\"} 0",
            "diy_mesh_injector_reviews_total{outcome=\"error\"} 1",
            "diy_mesh_injector_review_duration_seconds_bucket{le=\"0.0001\"} 0",
            "diy_mesh_injector_review_duration_seconds_bucket{le=\"0.00025\"} 1",
            "diy_mesh_injector_review_duration_seconds_bucket{le=\"4.0\"} 1",
            "diy_mesh_injector_review_duration_seconds_bucket{le=\"+Inf\"} 2",
            "diy_mesh_injector_review_duration_seconds_sum 60.0002",
            "diy_mesh_injector_review_duration_seconds_count 2",
            "diy_mesh_injector_ca_bundle_repairs_total 0",
        ] {
            assert!(
                text.lines().any(|other| other == line),
                "{line} is not in:\n{text}"
            );
        }
    }
}
