//! A few counters, and their text for Prometheus. Nothing here decides anything.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::hub::Counts;

/// A number that goes up, or up and down.
#[derive(Debug, Default)]
pub struct Number(AtomicU64);

impl Number {
    /// Adds.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// One more until the guard is dropped.
    pub fn hold(&self) -> Held<'_> {
        self.add(1);
        Held(self)
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Takes one off a [`Number`] when it is dropped.
pub struct Held<'a>(&'a Number);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What the controller counts.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Calls with a good token.
    pub calls_accepted: Number,
    /// Calls without one.
    pub calls_refused: Number,
    /// Calls whose token nobody could check.
    pub calls_unchecked: Number,
    /// Discover streams that are open.
    pub discover_streams: Number,
    /// WatchServices streams that are open.
    pub watch_streams: Number,
    /// Snapshots sent.
    pub snapshots: Number,
    /// Deltas sent.
    pub deltas: Number,
    /// "Unchanged" sent.
    pub unchanged: Number,
    /// "Unknown" sent.
    pub unknown: Number,
    /// Trust roots sent.
    pub roots: Number,
    /// Certificates signed for pods.
    pub certificates_issued: Number,
    /// Calls for a certificate that got none.
    pub certificates_refused: Number,
}

impl Metrics {
    /// The text that Prometheus reads.
    pub fn text(&self, counts: &Counts) -> String {
        let mut text = String::new();
        let calls = [
            ("accepted", &self.calls_accepted),
            ("refused", &self.calls_refused),
            ("unchecked", &self.calls_unchecked),
        ];
        family(
            &mut text,
            "calls_total",
            "counter",
            "RPCs by what became of their token.",
        );
        for (result, number) in calls {
            sample(&mut text, "calls_total", "result", result, number.get());
        }
        family(&mut text, "streams", "gauge", "Streams that are open.");
        for (rpc, number) in [
            ("Discover", &self.discover_streams),
            ("WatchServices", &self.watch_streams),
        ] {
            sample(&mut text, "streams", "rpc", rpc, number.get());
        }
        let updates = [
            ("snapshot", &self.snapshots),
            ("delta", &self.deltas),
            ("unchanged", &self.unchanged),
            ("unknown", &self.unknown),
            ("roots", &self.roots),
        ];
        family(
            &mut text,
            "updates_total",
            "counter",
            "Discovery answers sent.",
        );
        for (kind, number) in updates {
            sample(&mut text, "updates_total", "kind", kind, number.get());
        }
        let certificates = [
            ("issued", &self.certificates_issued),
            ("refused", &self.certificates_refused),
        ];
        family(
            &mut text,
            "certificates_total",
            "counter",
            "Calls for a certificate by what became of them.",
        );
        for (result, number) in certificates {
            sample(
                &mut text,
                "certificates_total",
                "result",
                result,
                number.get(),
            );
        }
        family(
            &mut text,
            "catalog_objects",
            "gauge",
            "Objects in the catalog.",
        );
        for (kind, count) in &counts.objects {
            sample(
                &mut text,
                "catalog_objects",
                "kind",
                kind.name(),
                *count as u64,
            );
        }
        family(
            &mut text,
            "subscriptions",
            "gauge",
            "Destinations that are subscribed to, and subscriptions to them.",
        );
        sample(
            &mut text,
            "subscriptions",
            "of",
            "destinations",
            counts.destinations as u64,
        );
        sample(
            &mut text,
            "subscriptions",
            "of",
            "subscribers",
            counts.subscriptions as u64,
        );
        text
    }
}

/// The lines that say what a number is.
pub(crate) fn family(text: &mut String, name: &str, sort: &str, help: &str) {
    let written = write!(
        text,
        "# HELP diy_mesh_controller_{name} {help}\n# TYPE diy_mesh_controller_{name} {sort}\n"
    );
    debug_assert!(written.is_ok(), "writing to a String cannot fail");
}

/// One number of a family.
pub(crate) fn sample(text: &mut String, name: &str, label: &str, value: &str, number: u64) {
    let written = writeln!(
        text,
        "diy_mesh_controller_{name}{{{label}=\"{value}\"}} {number}"
    );
    debug_assert!(written.is_ok(), "writing to a String cannot fail");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::object::Kind;

    #[test]
    fn the_text_has_every_number_under_its_label() {
        let metrics = Metrics::default();
        metrics.deltas.add(3);
        let held = metrics.discover_streams.hold();
        let text = metrics.text(&Counts {
            objects: vec![(Kind::Pod, 7)],
            destinations: 2,
            subscriptions: 5,
        });
        assert!(text.contains("diy_mesh_controller_updates_total{kind=\"delta\"} 3\n"));
        assert!(text.contains("diy_mesh_controller_streams{rpc=\"Discover\"} 1\n"));
        assert!(text.contains("diy_mesh_controller_catalog_objects{kind=\"Pod\"} 7\n"));
        assert!(text.contains("diy_mesh_controller_subscriptions{of=\"subscribers\"} 5\n"));
        drop(held);
        assert!(
            metrics
                .text(&Counts::default())
                .contains("diy_mesh_controller_streams{rpc=\"Discover\"} 0\n")
        );
    }
}
