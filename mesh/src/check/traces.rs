//! The hint about workloads that receive traces and pass none on, from what a part of the proxies
//! counted since their start. Pure.

use std::collections::BTreeMap;

use kube::ResourceExt;

use super::facts::{Fact, Facts};
use super::{Finding, Findings};
use crate::pods::{self, Pod};

/// The counters of the proxies, in the order of [`Traces`].
const METRICS: [&str; 3] = [
    "diy_mesh_proxy_inbound_traced_requests_total ",
    "diy_mesh_proxy_outbound_traced_requests_total ",
    "diy_mesh_proxy_outbound_untraced_requests_total ",
];
/// Fewer requests with a trace say nothing.
const MIN_RECEIVED: u64 = 20;
/// Others call for reasons of their own, too.
const MIN_UNTRACED_PERCENT: u64 = 50;

/// The requests of a workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traces {
    /// Inbound, with a trace.
    pub received: u64,
    /// Outbound, with a trace.
    pub traced: u64,
    /// Outbound, without a trace.
    pub untraced: u64,
}

/// The counts in these pages of metrics, by the workload of the pod.
pub(super) fn count(
    pods: &Fact<Vec<Pod>>,
    pages: &BTreeMap<String, String>,
) -> BTreeMap<String, Traces> {
    let mut counts = BTreeMap::<String, Traces>::new();
    for pod in pods.iter().flatten() {
        let Some(page) = pages.get(&pods::name(pod)) else {
            continue;
        };
        let [received, traced, untraced] = METRICS.map(|metric| value(page, metric));
        let count = counts.entry(workload(pod)).or_default();
        count.received = count.received.saturating_add(received);
        count.traced = count.traced.saturating_add(traced);
        count.untraced = count.untraced.saturating_add(untraced);
    }
    counts
}

fn workload(pod: &Pod) -> String {
    let namespace = pod.namespace().unwrap_or_default();
    format!("{namespace}/{}", pods::workload(pod))
}

fn value(page: &str, metric: &str) -> u64 {
    let value = page.lines().find_map(|line| line.strip_prefix(metric));
    value
        .and_then(|value| value.trim().parse().ok())
        .unwrap_or(0)
}

/// The workloads that receive traces pass them on.
pub(super) fn traces(facts: &Facts) -> Findings<'_> {
    let details = facts
        .traces
        .iter()
        .filter_map(|(workload, one)| one.describe(workload));
    let text = "traces end at workloads that receive them and call others without";
    let advice = "let the application pass the field traceparent of a request on to the requests that \
                  it makes for it: with the OpenTelemetry SDK of its language, or by a copy of the field";
    Ok(Vec::from_iter(Finding::note(text, advice).if_any(details)))
}

impl Traces {
    fn describe(&self, workload: &str) -> Option<String> {
        let Self {
            received, untraced, ..
        } = self;
        let sent = self.traced.saturating_add(*untraced);
        let is_large =
            u128::from(*untraced) * 100 >= u128::from(MIN_UNTRACED_PERCENT) * u128::from(sent);
        (*received >= MIN_RECEIVED && *untraced > 0 && is_large).then(|| {
            format!(
                "{workload} receives traces ({received} requests) and calls others without a trace \
                 ({untraced} of {sent} requests)"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::facts::testing::{meshed, ready, unknown_facts};
    use super::*;

    fn page([received, traced, untraced]: [u64; 3]) -> String {
        let lines = METRICS.iter().zip([received, traced, untraced]);
        lines
            .map(|(metric, value)| format!("# HELP x\n{metric}{value}\n"))
            .collect()
    }

    fn owned(name: &str) -> Pod {
        let mut pod = meshed(name, ready());
        let labels = pod.metadata.labels.get_or_insert_default();
        labels.insert("pod-template-hash".to_owned(), "5f4c".to_owned());
        pod
    }

    /// The details of the note about a workload with two pods and one without an owner.
    fn found(web: [[u64; 3]; 2], single: [u64; 3]) -> Vec<String> {
        let pods = Ok(vec![
            owned("web-5f4c-a"),
            owned("web-5f4c-b"),
            meshed("single", ready()),
        ]);
        let pages = [
            ("shop/web-5f4c-a", web[0]),
            ("shop/web-5f4c-b", web[1]),
            ("shop/single", single),
        ];
        let pages = pages.map(|(name, counts)| (name.to_owned(), page(counts)));
        let facts = Facts {
            traces: count(&pods, &pages.into()),
            ..unknown_facts()
        };
        let findings = traces(&facts).unwrap();
        findings.into_iter().flat_map(|one| one.details).collect()
    }

    #[test]
    fn names_workloads_that_receive_traces_and_pass_none_on() {
        let expected = "shop/web receives traces (30 requests) and calls others without a trace (60 of 65 requests)";
        assert_eq!(found([[10, 5, 20], [20, 0, 40]], [0, 0, 100]), [expected]);
    }

    #[test]
    fn few_traces_or_a_small_share_without_are_no_hint() {
        assert!(found([[10, 0, 20], [9, 0, 40]], [100, 51, 49]).is_empty());
        assert!(found([[u64::MAX, 0, 0], [1, 0, 0]], [20, 0, 0]).is_empty());
        assert_eq!(found([[0; 3]; 2], [20, u64::MAX, u64::MAX]).len(), 1);
    }

    #[test]
    fn pages_of_other_releases_count_nothing() {
        let pods = Ok(vec![meshed("old", ready())]);
        let pages = BTreeMap::from([("shop/old".to_owned(), "diy_mesh_proxy_x 1\n".to_owned())]);
        assert_eq!(count(&pods, &pages)["shop/old"], Traces::default());
    }
}
