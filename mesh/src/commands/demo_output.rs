//! Output of `mesh demo`: container lines with the prefix of `kubectl logs --prefix`, status lines,
//! and the summary.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, Write},
    time::Duration,
};

use super::terminal::{Colors, TextStyle};
use crate::sandbox::protocol::{LogLine, Message, PodView};

/// Standard output.
pub struct Screen {
    quiet: bool,
    only: Vec<String>,
    colors: Colors,
    /// The length of the longest prefix. Shorter prefixes are padded.
    width: usize,
    printed: BTreeSet<String>,
}

impl Screen {
    /// Creates a screen. If `only` is not empty, it shows only the named workloads, pods,
    /// containers and namespaces.
    pub fn new(quiet: bool, only: Vec<String>) -> Self {
        Self {
            quiet,
            only,
            colors: Colors::of(&io::stdout()),
            width: 0,
            printed: BTreeSet::new(),
        }
    }

    /// Prints a status line of the demo.
    pub fn print_status(&mut self, text: &str) -> io::Result<()> {
        if self.quiet {
            return Ok(());
        }
        let line = format!("mesh demo: {text}");
        writeln!(
            io::stdout().lock(),
            "{}",
            self.colors.paint(TextStyle::Bold, &line)
        )
    }

    /// Prints that a pod has become ready or has completed.
    pub fn pod(&mut self, pod: &PodView) -> io::Result<()> {
        // The prefixes are aligned from the first line on.
        for container in &pod.containers {
            if self.shows([&pod.workload, &pod.name, &container.name, &pod.namespace]) {
                self.width = self
                    .width
                    .max(pod.full_name().len() + container.name.len() + 2);
            }
        }
        let state = match () {
            () if pod.terminating => return Ok(()),
            () if pod.phase == "Succeeded" => "has completed",
            () if pod.ready && pod.injected => "is ready, with its proxy",
            () if pod.ready => "is ready",
            () => return Ok(()),
        };
        let text = format!("{} {state}", pod.full_name());
        if self.printed.insert(text.clone()) {
            self.print_status(&text)
        } else {
            Ok(())
        }
    }

    /// Prints a line of a container.
    pub fn line(&mut self, line: &LogLine) -> io::Result<()> {
        if self.quiet || !self.shows([&line.workload, &line.pod, &line.container, &line.namespace])
        {
            return Ok(());
        }
        let prefix = format!("{}/{}[{}]", line.namespace, line.pod, line.container);
        self.width = self.width.max(prefix.len());
        let padded = format!("{prefix:width$}", width = self.width);
        let prefix = self.colors.paint_code(color_code(&prefix), &padded);
        writeln!(io::stdout().lock(), "{prefix} {}", line.line)
    }

    fn shows(&self, names: [&String; 4]) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| names.contains(&only))
    }
}

/// The ANSI code of one of the twelve colors that are readable on light and dark backgrounds.
fn color_code(prefix: &str) -> u8 {
    let mut hasher = DefaultHasher::new();
    prefix.hash(&mut hasher);
    let number = (hasher.finish() % 12) as u8;
    if number < 6 {
        31 + number
    } else {
        91 + number - 6
    }
}

/// The statistics of a demo.
#[derive(Debug, Default)]
pub struct Summary {
    pods: BTreeMap<String, PodView>,
    /// The numbers of printed requests, responses, failures and exchanges by workload.
    counts: BTreeMap<String, Counts>,
    restarts: BTreeMap<String, u32>,
}

#[derive(Debug, Default)]
struct Counts {
    requests: u64,
    responses: u64,
    failures: u64,
    inbound: u64,
    outbound: u64,
}

impl Summary {
    /// Records a message.
    pub fn record(&mut self, message: &Message) {
        match message {
            Message::Pod(pod) => {
                self.restarts.insert(pod.full_name(), pod.restarts());
                self.pods.insert(pod.full_name(), pod.clone());
            }
            Message::PodRemoved { namespace, name } => {
                drop(self.pods.remove(&format!("{namespace}/{name}")))
            }
            Message::Log(line) => {
                let counts = self.counts.entry(line.workload.clone()).or_default();
                let count = match line.line.as_str() {
                    text if text.starts_with("Request #") => &mut counts.requests,
                    text if text.starts_with("Response #") => &mut counts.responses,
                    text if text.starts_with("Request failed") => &mut counts.failures,
                    text if text.starts_with("Inbound connection from ") => &mut counts.inbound,
                    text if text.starts_with("Outbound connection to ") => &mut counts.outbound,
                    _ => return,
                };
                *count += 1;
            }
            _ => {}
        }
    }

    /// Whether every pod is ready or has succeeded.
    pub fn all_settled(&self) -> bool {
        !self.pods.is_empty() && self.pods.values().all(PodView::settled)
    }

    /// Formats the summary.
    pub fn text(&self, ran: Duration, ready: Option<Duration>) -> String {
        let ready = ready.map_or_else(
            || "never all ready".to_owned(),
            |elapsed| format!("all ready after {:.1} s", elapsed.as_secs_f64()),
        );
        let meshed = self.pods.values().filter(|pod| pod.injected).count();
        let restarts: u32 = self.restarts.values().sum();
        let mut out = format!(
            "mesh demo: ran {:.0} s, {ready}; {} pods, {meshed} of them with a proxy, {restarts} restarts",
            ran.as_secs_f64(),
            self.pods.len()
        );
        for (workload, counts) in &self.counts {
            let totals = [
                (counts.responses, "responses received"),
                (counts.requests, "requests answered"),
                (counts.failures, "calls failed"),
                (counts.outbound, "outbound exchanges shown"),
                (counts.inbound, "inbound exchanges shown"),
            ];
            let totals: Vec<String> = totals
                .iter()
                .filter(|(count, _)| *count > 0)
                .map(|(count, unit)| format!("{count} {unit}"))
                .collect();
            if !totals.is_empty() {
                out += &format!("\n  {workload:15} {}", totals.join(", "));
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(workload: &str, container: &str, text: &str) -> LogLine {
        LogLine {
            namespace: "a".into(),
            pod: format!("{workload}-1"),
            workload: workload.into(),
            container: container.into(),
            line: text.into(),
        }
    }

    #[test]
    fn only_matches_workloads_pods_containers_and_namespaces() {
        let screen = |only: &str| Screen {
            quiet: false,
            only: vec![only.into()],
            colors: Colors::DISABLED,
            width: 0,
            printed: BTreeSet::new(),
        };
        let names = ["shop", "shop-1", "proxy", "a"].map(str::to_owned);
        for only in &names {
            assert!(screen(only).shows(names.each_ref()), "{only}");
        }
        assert!(!screen("sho").shows(names.each_ref()));
    }

    #[test]
    fn summary_counts_printed_lines() {
        let mut summary = Summary::default();
        let pod = |ready| {
            Message::Pod(PodView {
                namespace: "a".into(),
                name: "shop-1".into(),
                ready,
                injected: true,
                ..PodView::default()
            })
        };
        assert!(!summary.all_settled());
        summary.record(&pod(false));
        assert!(!summary.all_settled());
        summary.record(&pod(true));
        assert!(summary.all_settled());
        for text in ["Request #1", "GET /", "Request #2"] {
            summary.record(&Message::Log(line("shop", "shop", text)));
        }
        let text = summary.text(Duration::from_secs(30), Some(Duration::from_millis(1234)));
        assert!(
            text.contains(
                "ran 30 s, all ready after 1.2 s; 1 pods, 1 of them with a proxy, 0 restarts"
            ),
            "{text}"
        );
        assert!(
            text.contains("shop            2 requests answered"),
            "{text}"
        );
    }
}
