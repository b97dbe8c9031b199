//! Values of a page of metrics.

/// The value of a time series, which has its labels as on the page.
pub fn value(page: &str, series: &str) -> u64 {
    let mut lines = page.lines();
    let value = lines.find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    let value = value.unwrap_or_else(|| panic!("no {series} in {page}"));
    value.parse().unwrap()
}

/// The sum of all time series of a metric with these labels.
pub fn sum(page: &str, metric: &str, labels: &[&str]) -> u64 {
    let lines = page.lines().filter(|line| {
        let mut parts = line.split('{');
        parts.next() == Some(metric) && labels.iter().all(|label| line.contains(label))
    });
    let values = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
    values.sum()
}
