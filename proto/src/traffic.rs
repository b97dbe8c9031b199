//! The meaning of `Traffic` messages: the difference of two totals, the bounds of a report, and
//! quantiles of durations. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use prost::Message as _;

pub use crate::mesh::v1::{Traffic, traffic::Flow};
use crate::{MAX_FLOWS, MAX_TRAFFIC_BYTES};

/// Upper bounds of the buckets of durations, in microseconds. The last bucket has none.
pub const DURATION_BOUNDS: [u64; 14] = [
    500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000,
];

impl Traffic {
    /// The counts since an earlier total. A value that became smaller began again at 0.
    pub fn since(&self, earlier: &Self) -> Self {
        let known: BTreeMap<_, _> = earlier.flows.iter().map(|one| (one.key(), one)).collect();
        let flows = self.flows.iter().map(|flow| match known.get(&flow.key()) {
            Some(earlier) => flow.since(earlier),
            None => flow.clone(),
        });
        Self {
            milliseconds: difference(self.milliseconds, earlier.milliseconds),
            flows: flows.filter(|flow| flow.count() > 0).collect(),
            incomplete: self.incomplete,
        }
    }

    /// With as many of the flows as a report may have, those with most requests and connections.
    pub fn bounded(mut self) -> Self {
        let mut flows = std::mem::take(&mut self.flows);
        flows.sort_by_key(|flow| Reverse(flow.count()));
        for flow in flows {
            self.flows.push(flow);
            // With `incomplete`, it is two bytes longer.
            let is_small = self.encoded_len() + 2 <= MAX_TRAFFIC_BYTES;
            if !is_small || self.flows.len() > MAX_FLOWS {
                self.flows.pop();
                self.incomplete = true;
            }
        }
        self
    }
}

impl Flow {
    /// The number of its requests and opaque connections.
    pub fn count(&self) -> u64 {
        self.requests.saturating_add(self.connections)
    }

    /// The properties that its requests have in common.
    pub fn key(&self) -> (bool, &str, &str, &str) {
        (self.inbound, &self.route, &self.peer_namespace, &self.peer)
    }

    fn since(&self, earlier: &Self) -> Self {
        let durations = self.durations.iter().enumerate();
        let durations = durations.map(|(bucket, count)| {
            difference(*count, *earlier.durations.get(bucket).unwrap_or(&0))
        });
        Self {
            requests: difference(self.requests, earlier.requests),
            failures: difference(self.failures, earlier.failures),
            mutual_tls: difference(self.mutual_tls, earlier.mutual_tls),
            durations: durations.collect(),
            connections: was_open(self.connections, earlier.connections, earlier.open),
            connections_mutual_tls: was_open(
                self.connections_mutual_tls,
                earlier.connections_mutual_tls,
                earlier.open_mutual_tls,
            ),
            bytes_sent: difference(self.bytes_sent, earlier.bytes_sent),
            bytes_received: difference(self.bytes_received, earlier.bytes_received),
            ..self.clone()
        }
    }
}

/// The connections that were open since an earlier total: all that were not closed then.
fn was_open(later: u64, earlier: u64, open: u64) -> u64 {
    difference(later, earlier.saturating_sub(open))
}

fn difference(later: u64, earlier: u64) -> u64 {
    later.checked_sub(earlier).unwrap_or(later)
}

/// The duration that a share `q` of the requests do not exceed, linear within a bucket, and the
/// last bound beyond it. `None` without requests.
pub fn quantile(buckets: &[u64], q: f64) -> Option<Duration> {
    let buckets = &buckets[..buckets.len().min(DURATION_BOUNDS.len() + 1)];
    let total: f64 = buckets.iter().map(|count| *count as f64).sum();
    let rank = total * q.clamp(0.0, 1.0);
    let (mut below, mut lower) = (0.0, 0.0);
    for (count, upper) in buckets.iter().zip(DURATION_BOUNDS) {
        let (count, upper) = (*count as f64, upper as f64);
        if count > 0.0 && below + count >= rank {
            let micros = lower + (upper - lower) * ((rank - below) / count).clamp(0.0, 1.0);
            return Some(Duration::from_nanos((micros * 1e3) as u64));
        }
        (below, lower) = (below + count, upper);
    }
    (total > 0.0).then(|| Duration::from_micros(lower as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(peer: &str, requests: u64, durations: &[u64]) -> Flow {
        Flow {
            peer: peer.into(),
            requests,
            failures: requests / 2,
            durations: durations.to_vec(),
            ..Flow::default()
        }
    }

    fn traffic(milliseconds: u64, flows: Vec<Flow>) -> Traffic {
        Traffic {
            milliseconds,
            flows,
            incomplete: false,
        }
    }

    #[test]
    fn difference_has_the_requests_of_the_interval() {
        let earlier = traffic(1000, vec![flow("a", 4, &[4, 0]), flow("b", 9, &[9])]);
        let later = traffic(
            3000,
            vec![
                flow("a", 10, &[5, 5]),
                flow("b", 9, &[9]),
                flow("c", 2, &[2]),
            ],
        );
        let expected = traffic(2000, vec![flow("a", 6, &[1, 5]), flow("c", 2, &[2])]);
        assert_eq!(later.since(&earlier), {
            let mut expected = expected;
            expected.flows[0].failures = 3;
            expected
        });
        // The proxy has restarted.
        let restarted = traffic(500, vec![flow("a", 3, &[3])]);
        assert_eq!(restarted.since(&later), restarted);
    }

    #[test]
    fn difference_has_the_connections_that_were_open_in_the_interval() {
        let total = |connections, open, bytes_sent| {
            let flow = Flow {
                connections,
                connections_mutual_tls: connections,
                open,
                open_mutual_tls: open,
                bytes_sent,
                ..Flow::default()
            };
            traffic(1000, vec![flow])
        };
        // Five were closed before, two stay open, and three begin.
        let report = total(10, 4, 900).since(&total(7, 2, 500));
        let [flow] = &report.flows[..] else {
            panic!("{report:?}")
        };
        assert_eq!((flow.connections, flow.connections_mutual_tls), (5, 5));
        assert_eq!(
            (flow.open, flow.open_mutual_tls, flow.bytes_sent),
            (4, 4, 400)
        );
        // An idle connection stays in the reports, a closed one does not.
        assert_eq!(total(1, 1, 9).since(&total(1, 1, 9)).flows.len(), 1);
        assert_eq!(total(1, 0, 9).since(&total(1, 0, 9)).flows, []);
    }

    #[test]
    fn report_has_the_flows_with_most_requests() {
        let flows = (0..100)
            .map(|n| flow(&n.to_string(), n, &[n; 15]))
            .collect();
        let report = traffic(1000, flows).bounded();
        assert_eq!((report.flows.len(), report.incomplete), (MAX_FLOWS, true));
        assert_eq!(
            (&*report.flows[0].peer, &*report.flows[63].peer),
            ("99", "36")
        );
        let long = (1..9).map(|n| flow(&"x".repeat(2000), n, &[])).collect();
        let report = traffic(u64::MAX, long).bounded();
        assert_eq!((report.flows.len(), report.incomplete), (4, true));
        assert!(report.encoded_len() <= MAX_TRAFFIC_BYTES);
        let all = traffic(1000, vec![flow("a", 1, &[1])]);
        assert_eq!(all.clone().bounded(), all);
    }

    #[test]
    fn quantile_is_linear_within_a_bucket() {
        let of = |buckets: &[u64], q| quantile(buckets, q).map(|duration| duration.as_micros());
        assert_eq!(of(&[], 0.5), None);
        assert_eq!(of(&[0; 15], 0.5), None);
        assert_eq!(of(&[10], 0.5), Some(250));
        assert_eq!(of(&[50, 0, 50], 0.75), Some(1_750));
        assert_eq!((of(&[1, 1], 0.0), of(&[1, 1], 1.0)), (Some(0), Some(1_000)));
        let mut beyond = [0; 15];
        beyond[14] = 1;
        assert_eq!(of(&beyond, 0.99), Some(10_000_000));
        // Counts of a hostile proxy.
        assert_eq!(of(&[u64::MAX; 100], 0.5), Some(75_000));
    }
}
