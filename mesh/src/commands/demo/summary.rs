//! The summary at the end of `mesh demo`.

use std::{collections::BTreeMap, fmt::Write, time::Duration};

use super::story::{Exchange, Story};
use crate::check::count;
use diy_mesh_sandbox::protocol::{Message, PodView};

/// The statistics of a demo.
#[derive(Debug, Default)]
pub struct Summary {
    pods: BTreeMap<String, PodView>,
    restarts: BTreeMap<String, u32>,
    /// By the names of the two workloads.
    pairs: BTreeMap<String, Statistics>,
}

#[derive(Debug, Default)]
struct Statistics {
    exchanges: u32,
    failures: u32,
    /// The number of complete exchanges, their total duration, and how many of them had mutual TLS.
    complete: u32,
    milliseconds: f64,
    mutual_tls: u32,
}

impl Summary {
    /// Records a message about a pod.
    pub fn record_message(&mut self, message: &Message) {
        match message {
            Message::Pod(pod) => {
                self.restarts.insert(pod.full_name(), pod.restarts());
                self.pods.insert(pod.full_name(), pod.clone());
            }
            Message::PodRemoved { namespace, name } => {
                self.pods.remove(&format!("{namespace}/{name}"));
            }
            _ => {}
        }
    }

    /// Records an exchange between two workloads.
    pub fn record_exchange(&mut self, exchange: &Exchange, story: &Story) {
        let (Some(dump), Some([caller, callee])) = (exchange.dump(), story.parties(exchange))
        else {
            return;
        };
        // The client is outside the pods, such as on the node.
        if caller.color_code.is_none() {
            return;
        }
        let pair = format!("{} -> {}", caller.workload, callee.workload);
        let statistics = self.pairs.entry(pair).or_default();
        statistics.exchanges += 1;
        statistics.failures += u32::from(exchange.is_failure());
        statistics.mutual_tls += u32::from(exchange.is_mutual_tls());
        if dump.incomplete.is_none() {
            statistics.complete += 1;
            statistics.milliseconds += dump.duration_ms;
        }
    }

    /// Whether every pod is ready.
    pub fn all_ready(&self) -> bool {
        !self.pods.is_empty() && self.pods.values().all(|pod| pod.ready)
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
            "mesh demo: ran {:.0} s, {ready}; {}, {meshed} of them with a proxy, {}",
            ran.as_secs_f64(),
            count(self.pods.len(), "pod", "pods"),
            count(restarts as usize, "restart", "restarts")
        );
        let width = self.pairs.keys().map(String::len).max().unwrap_or(0);
        for (pair, statistics) in &self.pairs {
            let Statistics {
                exchanges,
                failures,
                complete,
                milliseconds,
                mutual_tls,
            } = statistics;
            let average = milliseconds / f64::from((*complete).max(1));
            let exchanges = count(*exchanges as usize, "exchange", "exchanges");
            // Writing to a String does not fail.
            let _ = write!(
                out,
                "\n  {pair:width$}  {exchanges}, {failures} failed, {mutual_tls} with mTLS, average {average:.1} ms"
            );
        }
        out
    }
}
