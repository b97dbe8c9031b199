//! The rows of `mesh top` with their last minute: their order, and what has just become worse. Pure.

use std::collections::{BTreeMap, VecDeque};

use crate::traffic::Rates;

/// The samples that a row keeps: a minute of them.
const MAX_HISTORY: usize = 60;
/// The samples before which nothing is unusual.
const MIN_HISTORY: usize = 10;
/// The rows, whose names hostile proxies may make up.
const MAX_ROWS: usize = 1000;
/// A p99 above this factor of its median and these milliseconds more has jumped.
const LATENCY_JUMP: (f64, f64) = (2.0, 10.0);
/// A share of failures that is so much above its median has jumped.
const FAILURE_JUMP: f64 = 0.05;
/// From none to the most requests of the minute.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// All rows, worst first.
#[derive(Debug, Default)]
pub struct Model {
    lines: Vec<Line>,
}

/// A row.
#[derive(Clone, Debug)]
pub struct Line {
    /// One name, or both ends of an edge.
    pub names: Vec<String>,
    /// The rates of the latest sample.
    pub rates: Rates,
    /// The samples before, and the latest one at the end.
    history: VecDeque<Rates>,
}

impl Model {
    /// Takes the rows of a new sample. Rows without requests stay for a minute.
    pub fn update(&mut self, rows: Vec<(Vec<String>, Rates)>) {
        let mut new: BTreeMap<_, _> = rows.into_iter().take(MAX_ROWS).collect();
        let idle = Rates {
            success: 1.0,
            ..Rates::default()
        };
        for line in &mut self.lines {
            line.push(new.remove(&line.names).unwrap_or_else(|| idle.clone()));
        }
        self.lines.retain(|line| !line.is_forgotten());
        for (names, rates) in new.into_iter().take(MAX_ROWS - self.lines.len()) {
            let history = VecDeque::from([rates.clone()]);
            self.lines.push(Line {
                names,
                rates,
                history,
            });
        }
        self.lines.sort_by(|one, other| {
            let (a, b) = (&one.rates, &other.rates);
            let by_success = a.success.total_cmp(&b.success);
            let idle_last = one.is_idle().cmp(&other.is_idle());
            let by_latency = b.p99_ms.total_cmp(&a.p99_ms);
            let worst_first = idle_last.then(by_success).then(by_latency);
            worst_first.then_with(|| one.names.cmp(&other.names))
        });
    }

    /// The rows, worst first.
    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// The message about the first row whose failures or latency have jumped.
    pub fn banner(&self) -> Option<String> {
        self.lines.iter().find_map(Line::jump)
    }
}

impl Line {
    fn push(&mut self, rates: Rates) {
        self.history.push_back(rates.clone());
        if self.history.len() > MAX_HISTORY {
            self.history.pop_front();
        }
        self.rates = rates;
    }

    /// Whether the latest sample has no requests.
    pub fn is_idle(&self) -> bool {
        self.rates.requests_per_second <= 0.0
    }

    fn is_forgotten(&self) -> bool {
        let mut history = self.history.iter();
        self.history.len() >= MAX_HISTORY && history.all(|one| one.requests_per_second <= 0.0)
    }

    /// The message if the latest sample is much worse than the median of the samples before.
    fn jump(&self) -> Option<String> {
        let before = self.history.len().checked_sub(1)?;
        let before = self.history.iter().take(before);
        let before: Vec<_> = before.filter(|one| one.requests_per_second > 0.0).collect();
        if self.is_idle() || before.len() < MIN_HISTORY {
            return None;
        }
        let median = |value: fn(&Rates) -> f64| {
            let mut values: Vec<_> = before.iter().map(|rates| value(rates)).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let (name, now) = (self.names.join(" -> "), &self.rates);
        let (failed, usual) = (1.0 - now.success, 1.0 - median(|rates| rates.success));
        if failed >= usual + FAILURE_JUMP {
            let [failed, usual] = [failed, usual].map(|share| share * 100.0);
            let text = format!("{name}: {failed:.0}% fail, {usual:.0}% in the last minute");
            return Some(text);
        }
        let (p99, usual) = (now.p99_ms, median(|rates| rates.p99_ms));
        let (factor, more) = LATENCY_JUMP;
        (p99 >= usual * factor && p99 >= usual + more)
            .then(|| format!("{name}: p99 is {p99:.0} ms, {usual:.0} ms in the last minute"))
    }

    /// The latest requests per second as bars, at most so many.
    pub fn bars(&self, count: usize) -> String {
        let rates = self.history.iter().map(|one| one.requests_per_second);
        let most = rates.clone().fold(f64::MIN_POSITIVE, f64::max);
        let last = rates.skip(self.history.len().saturating_sub(count));
        let bar = |rate: f64| BARS[(rate / most * (BARS.len() - 1) as f64).round() as usize];
        last.map(bar).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(requests_per_second: f64, success: f64, p99_ms: f64) -> Rates {
        Rates {
            requests_per_second,
            success,
            p99_ms,
            ..Rates::default()
        }
    }

    fn row(name: &str, rates: Rates) -> (Vec<String>, Rates) {
        (vec![name.to_owned()], rates)
    }

    fn names(model: &Model) -> String {
        let names = model.lines().iter().map(|line| line.names.join(" -> "));
        names.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn worst_rows_come_first_and_idle_ones_last() {
        let mut model = Model::default();
        let fast = row("fast", rates(5.0, 1.0, 1.0));
        let idle = row("idle", rates(1.0, 0.0, 9.0));
        model.update(vec![idle]);
        let rows = vec![
            fast.clone(),
            row("failing", rates(1.0, 0.5, 1.0)),
            row("slow", rates(1.0, 1.0, 80.0)),
        ];
        model.update(rows);
        assert_eq!(names(&model), "failing slow fast idle");
        for _ in 0..60 {
            model.update(vec![fast.clone()]);
        }
        assert_eq!(names(&model), "fast");
        let hostile = (0..3000).map(|n| row(&n.to_string(), rates(1.0, 1.0, 1.0)));
        model.update(hostile.collect());
        assert_eq!(model.lines().len(), MAX_ROWS);
    }

    #[test]
    fn jumps_of_failures_and_latency_are_told_against_the_last_minute() {
        let after = |count: usize, now: Rates| {
            let mut model = Model::default();
            for _ in 0..count {
                model.update(vec![row("web", rates(9.0, 0.99, 20.0))]);
            }
            model.update(vec![row("web", now)]);
            model.banner()
        };
        let failing = || rates(9.0, 0.9, 20.0);
        let failed = "web: 10% fail, 1% in the last minute".to_owned();
        assert_eq!(after(10, failing()), Some(failed));
        assert_eq!(after(9, failing()), None);
        let slow = "web: p99 is 50 ms, 20 ms in the last minute".to_owned();
        assert_eq!(after(10, rates(9.0, 0.99, 50.0)), Some(slow));
        assert_eq!(after(10, rates(9.0, 0.99, 39.0)), None);
        assert_eq!(after(10, rates(9.0, 1.0, 5.0)), None);
        assert_eq!(after(10, rates(0.0, 0.0, 0.0)), None);
        // Failures that last for a minute are usual.
        let mut model = Model::default();
        for _ in 0..40 {
            model.update(vec![row("web", failing())]);
        }
        assert_eq!(model.banner(), None);
    }

    #[test]
    fn bars_are_the_latest_rates_in_proportion_to_the_highest() {
        let mut model = Model::default();
        for rate in [0.0, 7.0, 3.0, 1.0, 0.0] {
            model.update(vec![row("web", rates(rate, 1.0, 1.0))]);
        }
        assert_eq!(model.lines()[0].bars(4), "█▄▂▁");
        assert_eq!(model.lines()[0].bars(20), "▁█▄▂▁");
        model = Model::default();
        model.update(vec![row("idle", rates(0.0, 1.0, 1.0))]);
        assert_eq!(model.lines()[0].bars(4), "▁");
    }
}
