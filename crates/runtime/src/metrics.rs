//! Metrics in the OpenMetrics text format, and in the older one of Prometheus.

use std::collections::HashSet;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Metric, Registry};

/// The media type of OpenMetrics.
const OPEN_METRICS: &str = "application/openmetrics-text";
const OPEN_METRICS_CONTENT_TYPE: &str =
    "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT_CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// One label: its name and its value.
pub type Label = [(&'static str, &'static str); 1];

/// Registers a metric and returns a handle to it. `help` has no full stop, counters no `_total`:
/// both are added.
pub fn register<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

/// Registers one time series for each value of a label, in the order of `values`.
pub fn register_family<M: Metric + TypedMetric + Clone + Default, const N: usize>(
    registry: &mut Registry,
    name: &str,
    help: &str,
    label: &'static str,
    values: [&'static str; N],
) -> [M; N] {
    let family: Family<Label, M> = register(registry, name, help);
    values.map(|value| family.get_or_create_owned(&[(label, value)]))
}

/// Adds metrics whose values are computed for each scrape.
pub fn on_scrape(
    registry: &mut Registry,
    encode: impl Fn(&mut DescriptorEncoder<'_>) -> fmt::Result + Send + Sync + 'static,
) {
    registry.register_collector(Box::new(OnScrape(Box::new(encode))));
}

struct OnScrape(Encode);

type Encode = Box<dyn Fn(&mut DescriptorEncoder<'_>) -> fmt::Result + Send + Sync>;

impl Collector for OnScrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        (self.0)(&mut encoder)
    }
}

impl fmt::Debug for OnScrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnScrape")
    }
}

/// Registers the memory and the open files of the process.
pub fn register_process(registry: &mut Registry) {
    on_scrape(registry, |encoder| {
        let mut gauge = |name, help, value: Option<u64>| match value {
            None => Ok(()),
            Some(value) => encoder
                .encode_descriptor(name, help, None, MetricType::Gauge)?
                .encode_gauge(&value),
        };
        let limit = Some(crate::max_open_files());
        gauge(
            "resident_memory_bytes",
            "Resident memory in bytes.",
            resident_memory(),
        )?;
        gauge("open_files", "Open files.", open_files())?;
        gauge("max_open_files", "The limit of open files.", limit)
    });
}

/// `None` where the kernel does not report it.
fn resident_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// `None` where the kernel does not report it. From Linux 6.2 on, the size of the directory is their
/// number. Older kernels list them, which takes milliseconds for thousands of connections.
fn open_files() -> Option<u64> {
    const FILES: &str = "/proc/self/fd";
    match std::fs::metadata(FILES).ok()?.len() {
        0 => u64::try_from(std::fs::read_dir(FILES).ok()?.count()).ok(),
        count => Some(count),
    }
}

/// The content type and the text of a page of [`render`] for a client with this `Accept` field.
pub fn negotiate(accept: &str, page: String) -> (&'static str, String) {
    let open_metrics = quality(accept, OPEN_METRICS);
    if open_metrics > 0.0 && open_metrics >= quality(accept, "text/plain") {
        (OPEN_METRICS_CONTENT_TYPE, page)
    } else {
        (TEXT_CONTENT_TYPE, to_text(&page))
    }
}

/// The weight of a media type (RFC 9110, section 12.5.1). 0: the field does not name it.
fn quality(accept: &str, kind: &str) -> f32 {
    let items = accept.split(',').filter_map(|item| {
        let mut parts = item.split(';').map(str::trim);
        let is_same = parts.next()?.eq_ignore_ascii_case(kind);
        let weight = parts.find_map(|part| part.strip_prefix("q="));
        is_same.then(|| weight.map_or(1.0, |weight| weight.parse().unwrap_or(0.0)))
    });
    items.fold(0.0, f32::max)
}

/// The Prometheus text format 0.0.4 of a page in OpenMetrics: the family of a counter has the name of
/// its samples.
fn to_text(page: &str) -> String {
    let is_counter = |line: &&str| line.starts_with("# TYPE ") && line.ends_with(" counter");
    let names = page.lines().filter(is_counter);
    let counters: HashSet<_> = names.filter_map(|line| line.split(' ').nth(2)).collect();
    let mut text = String::with_capacity(page.len() + 32 * counters.len());
    for line in page.lines() {
        let mut words = line.splitn(4, ' ');
        match [(); 4].map(|()| words.next()) {
            [Some("#"), Some("EOF" | "UNIT"), ..] => continue,
            [Some("#"), Some(kind), Some(name), Some(rest)] if counters.contains(name) => {
                text.extend(["# ", kind, " ", name, "_total ", rest]);
            }
            _ => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

/// Encodes all metrics of a registry in OpenMetrics.
pub fn render(registry: &Registry) -> String {
    let mut text = String::with_capacity(4 * 1024);
    prometheus_client::encoding::text::encode(&mut text, registry)
        .expect("writing to a String does not fail");
    text
}

/// Increments a gauge until it is dropped.
#[derive(Debug)]
pub struct Active(Gauge);

impl Active {
    /// Increments `gauge`.
    pub fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::metrics::counter::Counter;

    #[test]
    fn encodes_each_series_with_its_label() {
        let mut registry = Registry::with_prefix("test");
        let [one, _] = register_family::<Counter, 2>(
            &mut registry,
            "calls",
            "Calls",
            "result",
            ["accepted", "rejected"],
        );
        on_scrape(&mut registry, |encoder| {
            encoder
                .encode_descriptor("objects", "Objects.", None, MetricType::Gauge)?
                .encode_family(&[("kind", "Pod")])?
                .encode_gauge(&2i64)
        });
        let open: Gauge = register(&mut registry, "streams", "Open streams");
        one.inc_by(3);
        let active = Active::new(&open);
        let text = render(&registry);
        for line in [
            "# HELP test_calls Calls.",
            "# TYPE test_calls counter",
            "test_calls_total{result=\"accepted\"} 3",
            "test_calls_total{result=\"rejected\"} 0",
            "test_streams 1",
            "# HELP test_objects Objects.",
            "test_objects{kind=\"Pod\"} 2",
            "# EOF",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}: {text}");
        }
        drop(active);
        assert!(render(&registry).contains("test_streams 0\n"));
    }

    #[test]
    fn text_format_names_families_of_counters_as_their_samples() {
        let page = "# HELP a Calls  of # counter\n# TYPE a counter\na_total{b=\"# HELP a x\"} 1\n\
                    # HELP a_seconds Time.\n# TYPE a_seconds gauge\n# UNIT a_seconds seconds\n\
                    a_seconds 2.5\n# EOF\n";
        let text = "# HELP a_total Calls  of # counter\n# TYPE a_total counter\n\
                    a_total{b=\"# HELP a x\"} 1\n# HELP a_seconds Time.\n\
                    # TYPE a_seconds gauge\na_seconds 2.5\n";
        assert_eq!(to_text(page), text);
    }

    #[test]
    fn client_chooses_the_format() {
        let prometheus = "application/openmetrics-text;version=1.0.0,\
             application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for (accept, is_open) in [
            (prometheus, true),
            ("Application/OpenMetrics-Text", true),
            ("text/plain, application/openmetrics-text; q=0.5", false),
            ("application/openmetrics-text;q=0", false),
            ("application/openmetrics-text;q=x", false),
            ("*/*", false),
            ("", false),
        ] {
            let (kind, text) = negotiate(accept, "# EOF\n".to_owned());
            assert_eq!(kind.starts_with(OPEN_METRICS), is_open, "{accept}");
            assert_eq!(text == "# EOF\n", is_open, "{accept}");
        }
    }
}
