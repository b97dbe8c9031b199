//! Medians and ratios of all samples, as a text table and as JSON. Pure values.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::cases::{Case, Metric, Side};

const LABEL: usize = 34;
const COLUMN: usize = 11;

/// All samples of a run.
#[derive(Default)]
pub struct Results(BTreeMap<(&'static str, Side, Metric), Vec<f64>>);

impl Results {
    /// Adds the results of one measurement.
    pub fn add(&mut self, case: &Case, side: Side, numbers: &[(Metric, f64)]) {
        for &(metric, value) in numbers {
            self.0
                .entry((case.name, side, metric))
                .or_default()
                .push(value);
        }
    }

    /// Median of the samples. Added latencies are differences of medians.
    fn median(&self, case: &Case, side: Side, metric: Metric) -> Option<f64> {
        let added_to = |base| (side != Side::Direct).then_some(base);
        let base = match metric {
            Metric::AddedP50 => added_to(Metric::LatencyP50)?,
            Metric::AddedP99 => added_to(Metric::LatencyP99)?,
            _ => {
                return self
                    .0
                    .get(&(case.name, side, metric))
                    .and_then(|samples| median(samples));
            }
        };
        Some(self.median(case, side, base)? - self.median(case, Side::Direct, base)?)
    }

    fn ratio(&self, case: &Case, metric: Metric, side: Side, to: Side) -> Option<f64> {
        let (ours, theirs) = (
            self.median(case, side, metric)?,
            self.median(case, to, metric)?,
        );
        (theirs > 0.0).then_some(ours / theirs)
    }

    /// Metrics with samples on any side, in order.
    fn metrics(&self, case: &Case) -> Vec<Metric> {
        let mut metrics: Vec<_> = self
            .0
            .keys()
            .filter(|key| key.0 == case.name)
            .map(|key| key.2)
            .collect();
        for (base, added) in [
            (Metric::LatencyP50, Metric::AddedP50),
            (Metric::LatencyP99, Metric::AddedP99),
        ] {
            if metrics.contains(&base) && self.median(case, Side::Direct, base).is_some() {
                metrics.push(added);
            }
        }
        metrics.sort_unstable();
        metrics.dedup();
        metrics
    }

    /// Formats the table. A goal is a ratio of mesh to Envoy, or an absolute value for a
    /// standalone case.
    pub fn table(&self, cases: &[&Case], sides: &[Side], color: bool) -> String {
        let ratios = ratios(sides);
        let mut columns: Vec<_> = sides.iter().map(|side| side.name().to_string()).collect();
        columns.extend(
            ratios
                .iter()
                .map(|(side, to)| format!("{}/{}", side.name(), to.name())),
        );
        let is_standalone = cases.iter().any(|case| case.kind.is_standalone());
        let goals = ratios.contains(&(Side::Mesh, Side::Envoy))
            || (is_standalone && sides.contains(&Side::Mesh));
        if goals {
            columns.push("goal".to_string());
        }
        let columns: String = columns
            .iter()
            .map(|column| format!("  {column:>COLUMN$}"))
            .collect();
        let mut table = bold(&format!("{:LABEL$}{columns}", ""), color) + "\n";
        for case in cases {
            let metrics = self.metrics(case);
            if metrics.is_empty() {
                continue;
            }
            table += &format!(
                "{}\n",
                bold(&format!("{} [{}]", case.title, case.name), color)
            );
            for metric in metrics {
                table += &self.row(case, metric, sides, &ratios, goals, color);
            }
        }
        table
    }

    fn row(
        &self,
        case: &Case,
        metric: Metric,
        sides: &[Side],
        ratios: &[(Side, Side)],
        goals: bool,
        color: bool,
    ) -> String {
        let mut row = format!("  {:width$}", metric.label(), width = LABEL - 2);
        let goal = case
            .goals
            .iter()
            .find(|goal| goal.0 == metric)
            .map(|goal| goal.1);
        let (plain, decimals) = (
            goal.filter(|_| case.kind.is_standalone()),
            metric.decimals(),
        );
        for &side in sides {
            let value = self.median(case, side, metric);
            let style = value
                .zip(plain)
                .map_or("", |(value, goal)| goal_color(metric, value, goal));
            row += &cell(
                value.map_or("-".to_string(), |value| grouped(value, decimals)),
                style,
                color,
            );
        }
        for &(side, to) in ratios {
            let ratio = self.ratio(case, metric, side, to);
            let style = match (ratio, goal) {
                (Some(ratio), Some(goal)) if (side, to) == (Side::Mesh, Side::Envoy) => {
                    goal_color(metric, ratio, goal)
                }
                _ => "",
            };
            row += &cell(
                ratio.map_or("-".to_string(), |ratio| format!("{ratio:.2}")),
                style,
                color,
            );
        }
        if goals {
            let goal = plain
                .map(|goal| grouped(goal, decimals))
                .or(goal.map(|goal| format!("{goal:.2}")));
            row += &cell(goal.unwrap_or_default(), "", color);
        }
        row.trim_end().to_string() + "\n"
    }

    /// All samples, medians and ratios.
    pub fn json(&self, cases: &[&Case], sides: &[Side], settings: Value) -> Value {
        let mut rows = Vec::new();
        for case in cases {
            for metric in self.metrics(case) {
                let of_sides = sides.iter().filter_map(|&side| {
                    let samples = self
                        .0
                        .get(&(case.name, side, metric))
                        .cloned()
                        .unwrap_or_default();
                    let median = self.median(case, side, metric)?;
                    Some((
                        side.name().to_string(),
                        json!({ "median": median, "samples": samples }),
                    ))
                });
                let ratios = ratios(sides).into_iter().filter_map(|(side, to)| {
                    let ratio = self.ratio(case, metric, side, to)?;
                    Some((format!("{}/{}", side.name(), to.name()), json!(ratio)))
                });
                let goal = case
                    .goals
                    .iter()
                    .find(|goal| goal.0 == metric)
                    .map(|goal| goal.1);
                rows.push(json!({
                    "case": case.name, "metric": metric.name(),
                    "sides": of_sides.collect::<serde_json::Map<_, _>>(),
                    "ratios": ratios.collect::<serde_json::Map<_, _>>(),
                    (if case.kind.is_standalone() { "goal" } else { "goal_mesh_to_envoy" }): goal,
                }));
            }
        }
        json!({ "settings": settings, "results": rows })
    }
}

/// Pairs of sides to compare.
fn ratios(sides: &[Side]) -> Vec<(Side, Side)> {
    let of = |side, others: &[Side]| others.iter().map(|to| (side, *to)).collect::<Vec<_>>();
    let mut selected = of(Side::Mesh, &[Side::Direct, Side::Envoy, Side::Haproxy]);
    if !sides.contains(&Side::Mesh) {
        selected = of(Side::Dumps, &[Side::Envoy, Side::Haproxy]);
        selected.extend(of(Side::Envoy, &[Side::Direct]));
    }
    selected.extend(of(Side::Telemetry, &[Side::Mesh]));
    selected.extend([Side::MeshClient, Side::MeshServer].map(|side| (side, Side::Direct)));
    selected.retain(|(side, to)| sides.contains(side) && sides.contains(to));
    selected
}

fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        length if length % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

fn goal_color(metric: Metric, ratio: f64, goal: f64) -> &'static str {
    let met = if metric.higher_is_better() {
        ratio >= goal
    } else {
        ratio <= goal
    };
    if met { "32" } else { "31" }
}

fn cell(text: String, style: &str, color: bool) -> String {
    let text = format!("  {text:>COLUMN$}");
    if color && !style.is_empty() {
        format!("\x1b[{style}m{text}\x1b[0m")
    } else {
        text
    }
}

fn bold(text: &str, color: bool) -> String {
    if color {
        format!("\x1b[1m{text}\x1b[0m")
    } else {
        text.to_string()
    }
}

/// Formats a number with thousands separators, such as 1,234,568.
fn grouped(value: f64, decimals: usize) -> String {
    let text = format!("{:.decimals$}", value.abs());
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    let mut out = String::new();
    for (position, digit) in whole.chars().enumerate() {
        if position > 0 && (whole.len() - position).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    let sign = if value < 0.0 && text.bytes().any(|digit| (b'1'..=b'9').contains(&digit)) {
        "-"
    } else {
        ""
    };
    let point = if fraction.is_empty() { "" } else { "." };
    format!("{sign}{out}{point}{fraction}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::select;

    fn case(name: &str) -> &'static Case {
        select(&[name.to_string()]).unwrap()[0]
    }

    #[test]
    fn median_of_odd_and_even_counts() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn grouped_inserts_thousands_separators() {
        assert_eq!(grouped(1_234_567.84, 1), "1,234,567.8");
        assert_eq!(grouped(999.0, 0), "999");
        assert_eq!(grouped(-0.04, 1), "0.0");
        assert_eq!(grouped(-1000.0, 0), "-1,000");
    }

    #[test]
    fn row_has_values_ratios_and_goal() {
        let mut results = Results::default();
        for (side, value) in [
            (Side::Direct, None),
            (Side::Mesh, Some(36.0)),
            (Side::Envoy, Some(120.0)),
        ] {
            let cpu = value.map(|value| (Metric::Cpu, value));
            results.add(
                case("h1-1"),
                side,
                &[Some((Metric::Requests, 1000.0)), cpu]
                    .into_iter()
                    .flatten()
                    .collect::<Vec<_>>(),
            );
        }
        let table = results.table(
            &[case("h1-1")],
            &[Side::Direct, Side::Mesh, Side::Envoy],
            false,
        );
        let cpu = table.lines().find(|line| line.contains("CPU")).unwrap();
        let cells: Vec<_> = cpu.split_whitespace().rev().take(6).collect();
        assert_eq!(cells, ["0.25", "0.30", "-", "120.0", "36.0", "-"]);
    }

    #[test]
    fn standalone_case_has_absolute_goals() {
        let (mut results, alone) = (Results::default(), case("certificates"));
        results.add(
            alone,
            Side::Mesh,
            &[
                (Metric::CertificatesPerCore, 1234.5),
                (Metric::LatencyP99, 12_000.0),
            ],
        );
        let table = results.table(&[alone], &[Side::Direct, Side::Mesh], true);
        let rows: Vec<_> = table.lines().skip(2).collect();
        assert!(
            rows[0].contains("\x1b[32m        1,234\x1b[0m") && rows[0].ends_with("1,000"),
            "{table}"
        );
        assert!(
            rows[1].contains("\x1b[31m       12,000\x1b[0m") && rows[1].ends_with("10,000"),
            "{table}"
        );
    }

    #[test]
    fn added_latency_is_difference_to_direct() {
        let mut results = Results::default();
        for (side, value) in [(Side::Direct, 80.0), (Side::Mesh, 150.0)] {
            results.add(case("latency"), side, &[(Metric::LatencyP50, value)]);
        }
        assert_eq!(
            results.median(case("latency"), Side::Mesh, Metric::AddedP50),
            Some(70.0)
        );
        assert_eq!(
            results.median(case("latency"), Side::Direct, Metric::AddedP50),
            None
        );
        assert!(results.metrics(case("latency")).contains(&Metric::AddedP50));
    }

    #[test]
    fn color_shows_whether_goal_is_met() {
        assert_eq!(
            (
                goal_color(Metric::Cpu, 0.3, 0.31),
                goal_color(Metric::Requests, 0.3, 0.31)
            ),
            ("32", "31")
        );
        assert!(!cell("1".to_string(), "32", false).contains('\x1b'));
    }
}
