//! `mesh check` on the cluster.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::sandbox::programs;

/// Output of `mesh check`; asserts that its exit code matches.
pub fn check() -> Result<Value> {
    check_with(&[])
}

/// The same with more arguments.
pub fn check_with(arguments: &[&str]) -> Result<Value> {
    let output = Command::new(programs().join("mesh"))
        .args(["check", "--output", "json"])
        .args(arguments)
        .output()
        .context("cannot start mesh")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let report: Value = serde_json::from_str(&text).with_context(|| {
        format!(
            "no report: {text}{}",
            String::from_utf8_lossy(&output.stderr)
        )
    })?;
    ensure!(
        output.status.code() == Some(if report["ok"] == true { 0 } else { 1 }),
        "exit code {:?} with {report:#}",
        output.status.code()
    );
    Ok(report)
}

/// The first finding of a check.
pub fn finding<'a>(report: &'a Value, check: &str) -> Option<&'a Value> {
    report["checks"]
        .as_array()?
        .iter()
        .find(|finding| finding["check"] == check)
}

/// The level of the first finding of a check.
pub fn level<'a>(report: &'a Value, check: &str) -> &'a str {
    finding(report, check)
        .and_then(|finding| finding["level"].as_str())
        .unwrap_or("not checked")
}
