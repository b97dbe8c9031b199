//! The traffic that proxies saw in an interval, as rates of workloads, routes and edges. Pure. Text
//! comes from proxies, which may be hostile.

use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum;
use diy_mesh_proto::mesh::v1::{Traffic, traffic::Flow};
use diy_mesh_proto::traffic::{DURATION_BOUNDS, quantile};
use serde::Serialize;

/// The traffic that the proxies of pods saw.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// One entry per pod.
    pub pods: Vec<PodTraffic>,
    /// Notes about missing or sampled data.
    pub notes: Vec<String>,
}

/// The traffic that the proxy of a pod saw.
#[derive(Clone, Debug, Default)]
pub struct PodTraffic {
    /// The namespace of the pod.
    pub namespace: String,
    /// The name.
    pub pod: String,
    /// The name of its workload.
    pub workload: String,
    /// The Services of its namespace that it is an endpoint of, if they are known.
    pub services: Vec<String>,
    /// In an interval that has just passed.
    pub traffic: Traffic,
}

/// Requests in an interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    /// The rate of the requests of all pods together.
    pub requests_per_second: f64,
    /// The share of requests that have not failed.
    pub success: f64,
    /// The share of requests over mutual TLS.
    pub mutual_tls: f64,
    /// The median duration.
    pub p50_ms: f64,
    /// 95% of the requests took no longer.
    pub p95_ms: f64,
    /// 99% of the requests took no longer.
    pub p99_ms: f64,
}

/// Opaque connections in an interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Connections {
    /// The connections that are open at its end.
    pub open: u64,
    /// All that were open in it.
    pub connections: u64,
    /// The share of these over mutual TLS.
    pub mutual_tls: f64,
    /// From clients.
    pub sent_bytes_per_second: f64,
    /// To clients.
    pub received_bytes_per_second: f64,
}

/// The grouping of requests in rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// The requests to each workload
    Workload,
    /// The requests of each route
    Route,
    /// The requests from each workload to each Service
    Edge,
}

/// The requests to a workload, or of a route, or from a workload to a Service or from a service account
/// to a workload.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The `name`, or `from` and `to`, such as "shop/web".
    #[serde(flatten)]
    pub names: BTreeMap<&'static str, String>,
    /// Its requests.
    #[serde(flatten)]
    pub rates: Rates,
}

/// The opaque connections to a workload, or from and to the ends of an edge.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TcpRow {
    /// As of a [`Row`].
    #[serde(flatten)]
    pub names: BTreeMap<&'static str, String>,
    /// Its connections.
    #[serde(flatten)]
    pub connections: Connections,
}

type Names = BTreeMap<&'static str, String>;

/// The name of callers without an identity, and of destinations that are no Service.
const UNNAMED: [&str; 2] = ["(no identity)", "(no Service)"];

impl Sample {
    /// The requests with the same names. Requests of a route are as its clients see them. Edges are
    /// the requests of workloads to Services, and the requests to workloads by callers whose own
    /// proxies are not in the sample.
    pub fn rows(&self, by: By) -> Vec<Row> {
        let mut sums = BTreeMap::<Names, Sum>::new();
        for (names, flow, milliseconds) in self.flows(by).filter(|(_, flow, _)| flow.requests > 0) {
            sums.entry(names).or_default().add(flow, milliseconds);
        }
        let rows = sums.into_iter().map(|(names, sum)| Row {
            names,
            rates: sum.rates(),
        });
        rows.collect()
    }

    /// The opaque connections with the same names.
    pub fn tcp_rows(&self, by: By) -> Vec<TcpRow> {
        let mut sums = BTreeMap::<Names, TcpSum>::new();
        for (names, flow, milliseconds) in
            self.flows(by).filter(|(_, flow, _)| flow.connections > 0)
        {
            sums.entry(names).or_default().add(flow, milliseconds);
        }
        let rows = sums.into_iter().map(|(names, sum)| TcpRow {
            names,
            connections: sum.connections(),
        });
        rows.collect()
    }

    /// The flows of rows, with their names and the length of the interval in milliseconds.
    fn flows(&self, by: By) -> impl Iterator<Item = (Names, &Flow, u64)> {
        let explained = self.explained();
        let flows = self.pods.iter().flat_map(|pod| {
            let flows = pod.traffic.flows.iter();
            flows.map(move |flow| (pod, flow))
        });
        flows.filter_map(move |(pod, flow)| {
            let explained_by = (&*flow.peer_namespace, &*pod.namespace);
            let names = match (by, flow.inbound) {
                (By::Workload, true) => [("name", pod.name())].into(),
                (By::Route, false) if !flow.route.is_empty() => {
                    [("name", flow.route.clone())].into()
                }
                (By::Edge, false) => [("from", pod.name()), ("to", peer(flow))].into(),
                (By::Edge, true) if !explained.contains(&explained_by) => {
                    [("from", peer(flow)), ("to", pod.name())].into()
                }
                _ => return None,
            };
            Some((names, flow, pod.traffic.milliseconds))
        })
    }

    /// The workloads of Services that have other names: `NAMESPACE/NAME` of both.
    pub fn services(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut workloads = BTreeMap::<_, BTreeSet<_>>::new();
        for pod in &self.pods {
            for service in pod.services.iter().filter(|name| **name != pod.workload) {
                let service = format!("{}/{service}", pod.namespace);
                workloads.entry(service).or_default().insert(pod.name());
            }
        }
        workloads
    }

    /// The namespaces of pods, with the namespaces of the Services that they call: inbound requests
    /// between them are known from their callers.
    fn explained(&self) -> BTreeSet<(&str, &str)> {
        let pods = self.pods.iter().filter(|pod| !pod.namespace.is_empty());
        let pairs = pods.flat_map(|pod| {
            let outbound = pod.traffic.flows.iter().filter(|flow| !flow.inbound);
            outbound.map(|flow| (&*pod.namespace, &*flow.peer_namespace))
        });
        pairs.collect()
    }
}

impl PodTraffic {
    /// Namespace and name of its workload.
    pub fn name(&self) -> String {
        format!("{}/{}", self.namespace, self.workload)
    }
}

/// The other end of a flow, for people.
pub fn peer(flow: &Flow) -> String {
    match (&*flow.peer_namespace, &*flow.peer) {
        ("", "") => UNNAMED[usize::from(!flow.inbound)].to_owned(),
        ("", peer) => peer.to_owned(),
        (namespace, peer) => format!("{namespace}/{peer}"),
    }
}

#[derive(Default)]
struct Sum {
    per_second: f64,
    requests: u64,
    failures: u64,
    mutual_tls: u64,
    durations: [u64; DURATION_BOUNDS.len() + 1],
}

impl Sum {
    fn add(&mut self, flow: &Flow, milliseconds: u64) {
        self.per_second += flow.requests as f64 * 1e3 / milliseconds.max(1) as f64;
        let sums = [&mut self.requests, &mut self.failures, &mut self.mutual_tls];
        let counts = [flow.requests, flow.failures, flow.mutual_tls];
        let durations = self.durations.iter_mut().zip(&flow.durations);
        for (sum, count) in sums.into_iter().zip(&counts).chain(durations) {
            *sum = sum.saturating_add(*count);
        }
    }

    fn rates(&self) -> Rates {
        let share = |count: u64| (count as f64 / self.requests.max(1) as f64).min(1.0);
        let quantile =
            |q| quantile(&self.durations, q).map_or(0.0, |took| took.as_secs_f64() * 1e3);
        Rates {
            requests_per_second: self.per_second,
            success: 1.0 - share(self.failures),
            mutual_tls: share(self.mutual_tls),
            p50_ms: quantile(0.5),
            p95_ms: quantile(0.95),
            p99_ms: quantile(0.99),
        }
    }
}

#[derive(Default)]
struct TcpSum {
    open: u64,
    connections: u64,
    mutual_tls: u64,
    sent: f64,
    received: f64,
}

impl TcpSum {
    fn add(&mut self, flow: &Flow, milliseconds: u64) {
        let per_second = |bytes: u64| bytes as f64 * 1e3 / milliseconds.max(1) as f64;
        self.open = self.open.saturating_add(flow.open);
        self.connections = self.connections.saturating_add(flow.connections);
        self.mutual_tls = self.mutual_tls.saturating_add(flow.connections_mutual_tls);
        self.sent += per_second(flow.bytes_sent);
        self.received += per_second(flow.bytes_received);
    }

    fn connections(&self) -> Connections {
        let share = self.mutual_tls as f64 / self.connections.max(1) as f64;
        Connections {
            open: self.open,
            connections: self.connections,
            mutual_tls: share.min(1.0),
            sent_bytes_per_second: self.sent,
            received_bytes_per_second: self.received,
        }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// A flow whose requests took at most 0.5 ms, one of which has failed.
    pub(crate) fn flow(inbound: bool, peer: &str, requests: u64) -> Flow {
        let (namespace, name) = peer.split_once('/').unwrap_or(("", peer));
        Flow {
            inbound,
            peer_namespace: namespace.into(),
            peer: name.into(),
            requests,
            failures: 1,
            mutual_tls: requests / 2,
            durations: vec![requests],
            ..Flow::default()
        }
    }

    /// A pod "NAMESPACE/WORKLOAD" that has been observed for 2 s.
    pub(crate) fn pod(workload: &str, flows: Vec<Flow>) -> PodTraffic {
        let (namespace, workload) = workload.split_once('/').expect("NAMESPACE/WORKLOAD");
        PodTraffic {
            namespace: namespace.into(),
            pod: format!("{workload}-1"),
            workload: workload.into(),
            services: vec![],
            traffic: Traffic {
                milliseconds: 2000,
                flows,
                incomplete: false,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{flow, pod};
    use super::*;

    fn sample(pods: Vec<PodTraffic>) -> Sample {
        Sample {
            pods,
            ..Sample::default()
        }
    }

    fn edges(sample: &Sample) -> Vec<String> {
        let edges = sample.rows(By::Edge).into_iter();
        edges
            .map(|edge| format!("{} {}", edge.names["from"], edge.names["to"]))
            .collect()
    }

    #[test]
    fn workload_has_the_inbound_requests_of_its_pods() {
        let cart = |requests| pod("shop/cart", vec![flow(true, "shop/web", requests)]);
        let rows = sample(vec![cart(4), cart(16), pod("shop/web", vec![])]).rows(By::Workload);
        assert_eq!((rows.len(), &*rows[0].names["name"]), (1, "shop/cart"));
        let rates = Rates {
            requests_per_second: 10.0,
            success: 0.9,
            mutual_tls: 0.5,
            p50_ms: 0.25,
            p95_ms: 0.475,
            p99_ms: 0.495,
        };
        assert_eq!(rows[0].rates, rates);
    }

    #[test]
    fn opaque_connections_have_rows_of_their_own() {
        let redis = |inbound, peer: &str, connections| Flow {
            requests: 0,
            connections,
            connections_mutual_tls: connections / 2,
            open: 2,
            bytes_sent: 3000,
            bytes_received: 1000,
            ..flow(inbound, peer, 0)
        };
        let web = pod("shop/web", vec![redis(false, "shop/redis", 4)]);
        let callee = vec![redis(true, "shop/web-account", 4), redis(true, "", 2)];
        let sample = sample(vec![web, pod("shop/redis", callee)]);
        let connections = |by: By| {
            let rows = sample.tcp_rows(by).into_iter();
            rows.map(|row| (Vec::from_iter(row.names.into_values()), row.connections))
                .collect::<Vec<_>>()
        };
        let expected = Connections {
            open: 4,
            connections: 6,
            mutual_tls: 0.5,
            sent_bytes_per_second: 3000.0,
            received_bytes_per_second: 1000.0,
        };
        assert_eq!(
            connections(By::Workload),
            [(vec!["shop/redis".to_owned()], expected)]
        );
        let edges = connections(By::Edge)
            .into_iter()
            .map(|(names, _)| names.join(" "));
        let expected = ["(no identity) shop/redis", "shop/web shop/redis"];
        assert_eq!(edges.collect::<Vec<_>>(), expected);
        assert_eq!(
            (sample.rows(By::Edge), connections(By::Route)),
            (vec![], vec![])
        );
    }

    #[test]
    fn services_have_workloads_of_other_names() {
        let endpoint = |workload: &str, services: &[&str]| PodTraffic {
            services: services.iter().map(|&name| name.into()).collect(),
            ..pod(workload, vec![])
        };
        let sample = sample(vec![
            endpoint("shop/web", &["web"]),
            endpoint("shop/web-canary", &["web", "web-canary"]),
            endpoint("shop/cart-v1", &["cart", "cart-v1"]),
            endpoint("shop/cart-v2", &["cart"]),
            endpoint("pay/cart", &["cart"]),
        ]);
        let set = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let expected = BTreeMap::from([
            (
                "shop/cart".to_owned(),
                set(&["shop/cart-v1", "shop/cart-v2"]),
            ),
            ("shop/web".to_owned(), set(&["shop/web-canary"])),
        ]);
        assert_eq!(sample.services(), expected);
    }

    #[test]
    fn routes_are_those_of_clients() {
        let of_route = |inbound| Flow {
            route: "shop/canary".into(),
            ..flow(inbound, "shop/cart", 2)
        };
        let web = pod(
            "shop/web",
            vec![of_route(false), flow(false, "shop/cart", 1)],
        );
        let rows = sample(vec![web, pod("shop/cart", vec![of_route(true)])]).rows(By::Route);
        assert_eq!((rows.len(), &*rows[0].names["name"]), (1, "shop/canary"));
        assert_eq!(rows[0].rates.requests_per_second, 1.0);
    }

    #[test]
    fn edge_is_counted_once_by_the_caller_if_its_proxy_is_in_the_sample() {
        let web = pod(
            "shop/web",
            vec![flow(false, "shop/cart", 2), flow(false, "", 1)],
        );
        let cart = pod(
            "shop/cart",
            vec![
                flow(true, "shop/web-account", 2),
                flow(true, "front/gateway", 2),
                flow(true, "", 1),
                flow(true, "other", 1),
            ],
        );
        let inbound = [
            "(no identity) shop/cart",
            "front/gateway shop/cart",
            "other shop/cart",
        ];
        let outbound = ["shop/web (no Service)", "shop/web shop/cart"];
        let all = [&inbound[..], &outbound[..]].concat();
        assert_eq!(edges(&sample(vec![web, cart.clone()])), all);
        let alone = edges(&sample(vec![cart]));
        assert!(
            alone.contains(&"shop/web-account shop/cart".to_owned()),
            "{alone:?}"
        );
    }

    #[test]
    fn numbers_of_a_hostile_proxy_are_finite() {
        let mut hostile = flow(true, "shop/web", u64::MAX);
        (hostile.failures, hostile.mutual_tls) = (u64::MAX, u64::MAX);
        hostile.durations = vec![u64::MAX; 100];
        let mut cart = pod("shop/cart", vec![hostile.clone(), hostile]);
        cart.traffic.milliseconds = 0;
        let rates = &sample(vec![cart]).rows(By::Workload)[0].rates;
        assert_eq!((rates.success, rates.mutual_tls), (0.0, 1.0));
        assert!(rates.requests_per_second.is_finite() && rates.p99_ms.is_finite());
        // Requests that it did not count.
        let mut cart = pod("shop/cart", vec![flow(true, "shop/web", 1)]);
        cart.traffic.flows[0].failures = 9;
        assert_eq!(sample(vec![cart]).rows(By::Workload)[0].rates.success, 0.0);
    }
}
