//! What the injector counts, in Prometheus' text form. A fixed number of series, whatever comes in.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use crate::review::Outcome;

/// Upper bounds of the duration histogram, in microseconds.
const BOUNDS: [u64; 8] = [100, 250, 500, 1_000, 5_000, 25_000, 250_000, 4_000_000];

/// The counters of one injector.
#[derive(Debug, Default)]
pub struct Metrics {
    injected: AtomicU64,
    denied: AtomicU64,
    left_alone: AtomicU64,
    errors: AtomicU64,
    buckets: [AtomicU64; BOUNDS.len()],
    durations: AtomicU64,
    microseconds: AtomicU64,
    repairs: AtomicU64,
    serving_ends: AtomicU64,
    ca_ends: AtomicU64,
}

impl Metrics {
    /// A review was answered.
    pub fn outcome(&self, outcome: Outcome) {
        let counter = match outcome {
            Outcome::Injected => &self.injected,
            Outcome::Denied => &self.denied,
            Outcome::LeftAlone => &self.left_alone,
        };
        counter.fetch_add(1, Relaxed);
    }

    /// A review could not be answered.
    pub fn error(&self) {
        self.errors.fetch_add(1, Relaxed);
    }

    /// A review, answered or not, took this long.
    pub fn duration(&self, duration: Duration) {
        let microseconds = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        if let Some(bucket) = BOUNDS.iter().position(|bound| microseconds <= *bound) {
            self.buckets[bucket].fetch_add(1, Relaxed);
        }
        self.durations.fetch_add(1, Relaxed);
        self.microseconds.fetch_add(microseconds, Relaxed);
    }

    /// The caBundle was put right.
    pub fn repair(&self) {
        self.repairs.fetch_add(1, Relaxed);
    }

    /// These certificates are in use.
    pub fn certificates(&self, serving_ends: SystemTime, ca_ends: SystemTime) {
        let seconds = |time: SystemTime| {
            time.duration_since(SystemTime::UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs()
        };
        self.serving_ends.store(seconds(serving_ends), Relaxed);
        self.ca_ends.store(seconds(ca_ends), Relaxed);
    }

    /// All of it as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut family = |name: &str, kind: &str, help: &str, samples: &[(String, String)]| {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (suffix, value) in samples {
                let _ = writeln!(text, "{name}{suffix} {value}");
            }
        };
        let plain = |value: &AtomicU64| vec![(String::new(), value.load(Relaxed).to_string())];
        let outcome = |name: &str, value: &AtomicU64| {
            (
                format!("{{outcome=\"{name}\"}}"),
                value.load(Relaxed).to_string(),
            )
        };
        let outcomes = [
            outcome("injected", &self.injected),
            outcome("denied", &self.denied),
            outcome("left_alone", &self.left_alone),
            outcome("error", &self.errors),
        ];
        family(
            "diy_mesh_injector_reviews_total",
            "counter",
            "Admission reviews by how they ended.",
            &outcomes,
        );
        family(
            "diy_mesh_injector_review_duration_seconds",
            "histogram",
            "Time to read and answer a review.",
            &self.histogram(),
        );
        let help = "Times that the caBundle of the webhook configuration was put right.";
        family(
            "diy_mesh_injector_ca_bundle_repairs_total",
            "counter",
            help,
            &plain(&self.repairs),
        );
        let help = "When the serving certificate ends, in seconds since 1970.";
        family(
            "diy_mesh_injector_serving_certificate_end_seconds",
            "gauge",
            help,
            &plain(&self.serving_ends),
        );
        let help = "When the CA of the serving certificate ends, in seconds since 1970.";
        family(
            "diy_mesh_injector_ca_certificate_end_seconds",
            "gauge",
            help,
            &plain(&self.ca_ends),
        );
        text
    }

    fn histogram(&self) -> Vec<(String, String)> {
        let seconds = |microseconds: u64| Duration::from_micros(microseconds).as_secs_f64();
        let mut sum = 0;
        let mut samples = Vec::with_capacity(BOUNDS.len() + 3);
        for (bound, bucket) in BOUNDS.iter().zip(&self.buckets) {
            sum += bucket.load(Relaxed);
            samples.push((
                format!("_bucket{{le=\"{}\"}}", seconds(*bound)),
                sum.to_string(),
            ));
        }
        let count = self.durations.load(Relaxed);
        samples.push(("_bucket{le=\"+Inf\"}".into(), count.to_string()));
        samples.push((
            "_sum".into(),
            seconds(self.microseconds.load(Relaxed)).to_string(),
        ));
        samples.push(("_count".into(), count.to_string()));
        samples
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_come_out_as_text() {
        let metrics = Metrics::default();
        metrics.outcome(Outcome::Injected);
        metrics.outcome(Outcome::Injected);
        metrics.outcome(Outcome::Denied);
        metrics.error();
        metrics.duration(Duration::from_micros(200));
        metrics.duration(Duration::from_secs(60));
        let text = metrics.text();
        for line in [
            "diy_mesh_injector_reviews_total{outcome=\"injected\"} 2",
            "diy_mesh_injector_reviews_total{outcome=\"denied\"} 1",
            "diy_mesh_injector_reviews_total{outcome=\"left_alone\"} 0",
            "diy_mesh_injector_reviews_total{outcome=\"error\"} 1",
            "diy_mesh_injector_review_duration_seconds_bucket{le=\"0.0001\"} 0",
            "diy_mesh_injector_review_duration_seconds_bucket{le=\"0.00025\"} 1",
            "diy_mesh_injector_review_duration_seconds_bucket{le=\"4\"} 1",
            "diy_mesh_injector_review_duration_seconds_bucket{le=\"+Inf\"} 2",
            "diy_mesh_injector_review_duration_seconds_sum 60.0002",
            "diy_mesh_injector_review_duration_seconds_count 2",
        ] {
            assert!(
                text.lines().any(|other| other == line),
                "{line} is not in:\n{text}"
            );
        }
    }
}
