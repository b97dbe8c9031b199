//! How the demo looks: lines with the name of their pod and container in front, as `kubectl logs --prefix` has them, in colour
//! on a terminal; and the summary. It only formats.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, IsTerminal, Write},
    time::Duration,
};

use crate::sandbox::protocol::{LogLine, Message, PodView};

/// Standard output.
pub struct Screen {
    quiet: bool,
    only: Vec<String>,
    colour: bool,
    /// The longest prefix so far; shorter ones are padded.
    width: usize,
    told: BTreeSet<String>,
}

impl Screen {
    /// A screen that shows what `only` names, or all.
    pub fn new(quiet: bool, only: Vec<String>) -> Self {
        let colour = io::stdout().is_terminal()
            && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self {
            quiet,
            only,
            colour,
            width: 0,
            told: BTreeSet::new(),
        }
    }

    /// A line of the demo itself.
    pub fn say(&mut self, text: &str) -> io::Result<()> {
        if self.quiet {
            return Ok(());
        }
        let (on, off) = if self.colour {
            ("\x1b[1m", "\x1b[0m")
        } else {
            ("", "")
        };
        writeln!(io::stdout().lock(), "{on}mesh demo: {text}{off}")
    }

    /// What a pod has become.
    pub fn pod(&mut self, pod: &PodView) -> io::Result<()> {
        // Lines to come shall stand below each other from the first one on.
        for container in &pod.containers {
            if self.shows([&pod.workload, &pod.name, &container.name, &pod.namespace]) {
                self.width = self
                    .width
                    .max(pod.full_name().len() + container.name.len() + 2);
            }
        }
        let what = match () {
            () if pod.terminating => return Ok(()),
            () if pod.phase == "Succeeded" => "has completed",
            () if pod.ready && pod.injected => "is ready, with its proxy",
            () if pod.ready => "is ready",
            () => return Ok(()),
        };
        let text = format!("{} {what}", pod.full_name());
        if self.told.insert(text.clone()) {
            self.say(&text)
        } else {
            Ok(())
        }
    }

    /// A line of a container.
    pub fn line(&mut self, line: &LogLine) -> io::Result<()> {
        if self.quiet || !self.shows([&line.workload, &line.pod, &line.container, &line.namespace])
        {
            return Ok(());
        }
        let prefix = format!("{}/{}[{}]", line.namespace, line.pod, line.container);
        self.width = self.width.max(prefix.len());
        let width = self.width;
        let mut out = io::stdout().lock();
        if self.colour {
            writeln!(
                out,
                "\x1b[{}m{prefix:width$}\x1b[0m {}",
                colour(&prefix),
                line.line
            )
        } else {
            writeln!(out, "{prefix:width$} {}", line.line)
        }
    }

    fn shows(&self, names: [&String; 4]) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| names.contains(&only))
    }
}

/// One of the twelve colours that can be read on light and dark.
fn colour(prefix: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    prefix.hash(&mut hasher);
    let number = hasher.finish() % 12;
    if number < 6 {
        31 + number
    } else {
        91 + number - 6
    }
}

/// What a demo has seen.
#[derive(Debug, Default)]
pub struct Summary {
    pods: BTreeMap<String, PodView>,
    /// How many requests and responses each workload has printed, and how many failures.
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
    /// Counts what a message tells.
    pub fn note(&mut self, message: &Message) {
        match message {
            Message::Pod(pod) => {
                self.restarts.insert(pod.full_name(), pod.restarts());
                self.pods.insert(pod.full_name(), pod.clone());
            }
            Message::PodGone { namespace, name } => {
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

    /// Every pod is ready or has completed.
    pub fn all_settled(&self) -> bool {
        !self.pods.is_empty() && self.pods.values().all(PodView::settled)
    }

    /// The summary at the end.
    pub fn text(&self, ran: Duration, ready: Option<Duration>) -> String {
        let ready = ready.map_or_else(
            || "never all ready".to_owned(),
            |took| format!("all ready after {:.1} s", took.as_secs_f64()),
        );
        let meshed = self.pods.values().filter(|pod| pod.injected).count();
        let restarts: u32 = self.restarts.values().sum();
        let mut out = format!(
            "mesh demo: ran {:.0} s, {ready}; {} pods, {meshed} of them with a proxy, {restarts} restarts",
            ran.as_secs_f64(),
            self.pods.len()
        );
        for (workload, counts) in &self.counts {
            let said = [
                (counts.responses, "responses received"),
                (counts.requests, "requests answered"),
                (counts.failures, "calls failed"),
                (counts.outbound, "outbound exchanges shown"),
                (counts.inbound, "inbound exchanges shown"),
            ];
            let said: Vec<String> = said
                .iter()
                .filter(|(count, _)| *count > 0)
                .map(|(count, what)| format!("{count} {what}"))
                .collect();
            if !said.is_empty() {
                out += &format!("\n  {workload:15} {}", said.join(", "));
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
    fn only_names_workloads_pods_containers_and_namespaces() {
        let screen = |only: &str| Screen {
            quiet: false,
            only: vec![only.into()],
            colour: false,
            width: 0,
            told: BTreeSet::new(),
        };
        let names = ["shop", "shop-1", "proxy", "a"].map(str::to_owned);
        for only in &names {
            assert!(screen(only).shows(names.each_ref()), "{only}");
        }
        assert!(!screen("sho").shows(names.each_ref()));
    }

    #[test]
    fn the_summary_counts_what_was_printed() {
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
        summary.note(&pod(false));
        assert!(!summary.all_settled());
        summary.note(&pod(true));
        assert!(summary.all_settled());
        for text in ["Request #1", "GET /", "Request #2"] {
            summary.note(&Message::Log(line("shop", "shop", text)));
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
