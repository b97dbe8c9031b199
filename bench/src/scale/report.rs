//! The values of a run, their medians, goals and growth, as a table and as JSON. Pure.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// Measured quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    /// Memory that a subscriber adds.
    Memory,
    /// From the first to the last subscriber with a change, 99th percentile of the subscribers.
    FanOut,
    /// From a change to the first subscriber that has it.
    ChangeFirst,
    /// CPU time of a change, per subscriber.
    ChangeCpu,
    /// CPU time during the churn.
    ChurnCpu,
    /// From a change to a subscriber, during the churn.
    ChurnLag,
    /// From kill -9 until the last subscriber knows all of its destinations.
    Storm,
    /// CPU time of the new controller until then.
    StormCpu,
    /// Peak memory of the new controller.
    StormMemory,
    /// The same, as a ratio to the memory before.
    StormMemoryRatio,
    /// Certificates per second of CPU time.
    CertificatesPerCore,
    /// Certificates per second.
    Certificates,
    /// Injections per second of CPU time.
    InjectionsPerCore,
    /// Injections per second.
    Injections,
}

impl Metric {
    const ALL: [Metric; 14] = [
        Metric::Memory,
        Metric::FanOut,
        Metric::ChangeFirst,
        Metric::ChangeCpu,
        Metric::ChurnCpu,
        Metric::ChurnLag,
        Metric::Storm,
        Metric::StormCpu,
        Metric::StormMemory,
        Metric::StormMemoryRatio,
        Metric::CertificatesPerCore,
        Metric::Certificates,
        Metric::InjectionsPerCore,
        Metric::Injections,
    ];

    /// The name in JSON, the label in the table, the decimals, and the goal.
    fn description(self) -> (&'static str, &'static str, usize, Option<f64>) {
        match self {
            Metric::Memory => (
                "memory_kb_per_subscriber",
                "memory, kB per subscriber",
                1,
                Some(30.0),
            ),
            Metric::FanOut => (
                "fan_out_p99_ms",
                "change: first to last subscriber, p99, ms",
                0,
                Some(150.0),
            ),
            Metric::ChangeFirst => (
                "change_to_first_ms",
                "change: to the first subscriber, ms",
                0,
                None,
            ),
            Metric::ChangeCpu => (
                "change_cpu_us_per_subscriber",
                "change: CPU, µs per subscriber",
                1,
                Some(8.0),
            ),
            Metric::ChurnCpu => (
                "churn_cpu_percent",
                "churn: CPU, % of a core",
                0,
                Some(20.0),
            ),
            Metric::ChurnLag => ("churn_lag_p99_ms", "churn: lag p99, ms", 0, Some(200.0)),
            Metric::Storm => ("storm_s", "kill -9: all back, s", 1, Some(4.0)),
            Metric::StormCpu => ("storm_cpu_s", "kill -9: CPU, s", 1, None),
            Metric::StormMemory => ("storm_peak_mb", "kill -9: peak memory, MB", 0, None),
            Metric::StormMemoryRatio => (
                "storm_peak_ratio",
                "kill -9: peak to steady memory",
                2,
                Some(1.3),
            ),
            Metric::CertificatesPerCore => (
                "certificates_per_second_and_core",
                "certificates/s on one core",
                0,
                Some(1000.0),
            ),
            Metric::Certificates => ("certificates_per_second", "certificates/s", 0, None),
            Metric::InjectionsPerCore => (
                "injections_per_second_and_core",
                "injections/s on one core",
                0,
                Some(500.0),
            ),
            Metric::Injections => ("injections_per_second", "injections/s", 0, None),
        }
    }

    fn is_met(self, value: f64, goal: f64) -> bool {
        match self {
            Metric::CertificatesPerCore | Metric::InjectionsPerCore => value >= goal,
            _ => value <= goal,
        }
    }
}

/// Samples of one run.
#[derive(Debug, Default)]
pub struct Values(BTreeMap<Metric, Vec<f64>>);

impl Values {
    /// Adds a sample.
    pub fn add(&mut self, metric: Metric, value: f64) {
        self.0.entry(metric).or_default().push(value);
    }

    /// Adds the samples of another measurement.
    pub fn extend(&mut self, other: Values) {
        self.0.extend(other.0);
    }

    fn median(&self, metric: Metric) -> Option<f64> {
        let mut samples = self.0.get(&metric)?.clone();
        samples.sort_by(f64::total_cmp);
        samples.get(samples.len() / 2).copied()
    }
}

/// The results of all numbers of subscribers, and those without subscribers.
#[derive(Debug, Default)]
pub struct Report {
    /// By the number of subscribers.
    pub by_subscribers: BTreeMap<u32, Values>,
    /// Certificates and injections.
    pub standalone: Values,
}

impl Report {
    /// The medians for people. Green values meet their goal.
    pub fn table(&self, color: bool) -> String {
        let mut table = String::new();
        if !self.by_subscribers.is_empty() {
            table += &format!("{:<44}", "subscribers");
            for subscribers in self.by_subscribers.keys() {
                table += &format!("{subscribers:>10}");
            }
            table += &format!("{:>10}{:>10}\n", "goal", "growth");
        }
        for metric in Metric::ALL {
            let columns: Vec<_> = self.columns(metric);
            if columns.is_empty() {
                continue;
            }
            let (_, label, decimals, goal) = metric.description();
            table += &format!("{label:<44}");
            for (_, value) in &columns {
                let text = format!("{value:>10.decimals$}");
                table += &match goal {
                    Some(goal) if color && metric.is_met(*value, goal) => {
                        format!("\x1b[32m{text}\x1b[0m")
                    }
                    Some(_) if color => format!("\x1b[31m{text}\x1b[0m"),
                    _ => text,
                };
            }
            table += &match goal {
                Some(goal) => format!("{goal:>10}"),
                None => format!("{:>10}", "-"),
            };
            if let Some(growth) = growth(&columns) {
                table += &format!("{growth:>10.2}");
            }
            table += "\n";
        }
        table
    }

    /// All samples and medians.
    pub fn json(&self) -> Value {
        let rows = Metric::ALL.iter().filter_map(|&metric| {
            let columns = self.columns(metric);
            let (name, _, _, goal) = metric.description();
            let medians: BTreeMap<_, _> = columns.iter().map(|(number, value)| (number.to_string(), *value)).collect();
            let samples = |values: &Values| values.0.get(&metric).cloned();
            let samples: BTreeMap<_, _> = self
                .all()
                .filter_map(|(number, values)| Some((number.to_string(), samples(values)?)))
                .collect();
            (!columns.is_empty()).then(|| {
                json!({ "metric": name, "goal": goal, "medians": medians, "samples": samples, "growth": growth(&columns) })
            })
        });
        json!({ "results": rows.collect::<Vec<_>>() })
    }

    /// With 0 for no subscribers.
    fn all(&self) -> impl Iterator<Item = (u32, &Values)> {
        let by_subscribers = self.by_subscribers.iter();
        by_subscribers
            .map(|(number, values)| (*number, values))
            .chain([(0, &self.standalone)])
    }

    fn columns(&self, metric: Metric) -> Vec<(u32, f64)> {
        self.all()
            .filter_map(|(number, values)| Some((number, values.median(metric)?)))
            .collect()
    }
}

/// The exponent of the growth with the number of subscribers: 0 is constant, 1 is linear.
fn growth(columns: &[(u32, f64)]) -> Option<f64> {
    let ((few, low), (many, high)) = (*columns.first()?, *columns.last()?);
    let exponent = (high / low).ln() / (f64::from(many) / f64::from(few)).ln();
    (many > few && exponent.is_finite()).then_some(exponent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_an_exponent() {
        let growth =
            |columns: &[(u32, f64)]| growth(columns).map(|growth| (growth * 100.0).round() / 100.0);
        assert_eq!(growth(&[(100, 2.0), (300, 3.0), (1000, 20.0)]), Some(1.0));
        assert_eq!(growth(&[(100, 7.0), (1000, 7.0)]), Some(0.0));
        assert_eq!(growth(&[(100, 7.0)]), None);
        assert_eq!(growth(&[(100, 0.0), (1000, 7.0)]), None);
    }

    #[test]
    fn table_has_medians_goals_and_growth() {
        let mut report = Report::default();
        for (number, samples) in [(100, [10.0, 11.0, 400.0]), (1000, [20.0, 60.0, 110.0])] {
            let values = report.by_subscribers.entry(number).or_default();
            samples
                .into_iter()
                .for_each(|value| values.add(Metric::Memory, value));
        }
        report.standalone.add(Metric::CertificatesPerCore, 1234.0);
        let table = report.table(false);
        let rows: Vec<Vec<_>> = table
            .lines()
            .map(|row| row.split_whitespace().collect())
            .collect();
        assert_eq!(rows[0], ["subscribers", "100", "1000", "goal", "growth"]);
        assert_eq!(rows[1][4..], ["11.0", "60.0", "30", "0.74"]);
        assert_eq!(rows[2].last(), Some(&"1000"));
        let colored = report.table(true);
        assert!(colored.contains("\x1b[32m      11.0") && colored.contains("\x1b[31m      60.0"));
        assert_eq!(report.json()["results"][0]["medians"]["1000"], 60.0);
    }
}
