//! Values of a page of metrics, and its conventions.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::has_program;

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

/// The report of promtool about a page: nothing if the page is valid, or if promtool is missing.
pub fn promtool(page: &str) -> String {
    if !has_program("promtool") {
        return String::new();
    }
    let mut check = Command::new("promtool");
    check.args(["check", "metrics"]).stdin(Stdio::piped());
    let started = check.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut started = started.unwrap();
    let mut input = started.stdin.take().unwrap();
    input.write_all(page.as_bytes()).unwrap();
    drop(input);
    let ended = started.wait_with_output().unwrap();
    let text = [ended.stdout, ended.stderr].concat();
    let failed = (!ended.status.success()).then_some("promtool failed\n");
    failed.unwrap_or_default().to_owned() + &String::from_utf8(text).unwrap()
}
