//! The parts of panels: queries of rates, shares and quantiles.

pub const REQUESTS: &str = "diy_mesh_proxy_requests_total";
pub const SERVER: &str = "http_server_request_duration_seconds";
pub const CLIENT: &str = "http_client_request_duration_seconds";
pub const DENIED: &str = "code=~\"denied|egress-denied|mtls-required\"";

/// A page of Grafana.
pub struct Dashboard {
    /// The name of its file.
    pub name: &'static str,
    pub title: &'static str,
    /// Each with the query of its values.
    pub variables: &'static [(&'static str, &'static str)],
    pub rows: Vec<(&'static str, Vec<Panel>)>,
}

/// A title, a unit, and queries with their legends.
pub type Panel = (&'static str, &'static str, Vec<(&'static str, String)>);

pub fn rate(by: &str, metric: &str, labels: &str) -> String {
    format!("sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))")
}

/// The share of requests without an error. The series of errors exist from the first error on.
pub fn success(by: &str, labels: &str) -> String {
    let all = rate(by, REQUESTS, labels);
    let errors = rate(by, REQUESTS, &format!("{labels},error_type!=\"\""));
    format!("1 - ({errors} or 0 * {all}) / {all}")
}

pub fn mutual_tls(labels: &str) -> String {
    let share = rate("", REQUESTS, &format!("{labels},tls=\"mtls\""));
    format!("{share} / {}", rate("", REQUESTS, labels))
}

pub fn quantile(quantile: f64, by: &str, metric: &str, labels: &str) -> String {
    let by = format!("{by}, le").trim_start_matches(", ").to_owned();
    let buckets = rate(&by, &format!("{metric}_bucket"), labels);
    format!("histogram_quantile({quantile}, {buckets})")
}

pub fn quantiles(metric: &str, labels: &str) -> Vec<(&'static str, String)> {
    let of = |legend, share| (legend, quantile(share, "", metric, labels));
    vec![of("p50", 0.5), of("p95", 0.95), of("p99", 0.99)]
}
