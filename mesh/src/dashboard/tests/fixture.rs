//! A mesh of the test.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use diy_mesh_model::exchange::Exchange;
use diy_mesh_model::state::{
    Certificate, Cut, Destination, Discovery, Endpoint, Inbound, State, Worker,
};
use diy_mesh_proto::mesh::v1::{Traffic, traffic::Flow};
use serde_json::json;

use super::super::source::{PodState, Source, Workload};
use super::*;
use crate::traffic::PodTraffic;
use crate::why::{Record, Story};

pub const HOSTILE: &str = "<img src=x onerror=document.title='owned'>";

/// A source whose answers the test chooses.
pub struct Fake {
    pub sample: RefCell<Result<Sample, String>>,
    pub asked: Cell<usize>,
}

/// Caller, callee, requests a second, failures of 100, with mutual TLS, the bucket of its durations.
type Call<'a> = (&'a str, &'a str, u64, u64, bool, usize);

impl Fake {
    fn new(calls: &[Call]) -> Self {
        let mut pods = BTreeMap::<&str, Vec<Flow>>::new();
        for call @ (from, to, ..) in calls {
            pods.entry(to).or_default().push(flow(call, true));
            if from.contains('/') {
                pods.entry(from).or_default().push(flow(call, false));
            }
        }
        let pods = pods
            .into_iter()
            .map(|(name, flows)| pod(name, flows))
            .collect();
        let sample = Sample {
            pods,
            notes: Vec::new(),
        };
        Self {
            sample: RefCell::new(Ok(sample)),
            asked: Cell::default(),
        }
    }

    /// A small one, for pictures.
    pub fn shop() -> Self {
        Self::new(&[
            ("", "shop/web", 128, 0, false, 6),
            ("shop/web", "shop/cart", 60, 1, true, 5),
            ("shop/web", "shop/catalog", 96, 0, true, 4),
            ("shop/web", "shop/search", 31, 0, true, 5),
            ("shop/cart", "pay/checkout", 12, 9, true, 7),
            ("shop/catalog", "data/products", 95, 0, true, 3),
            ("shop/search", "data/index", 31, 0, true, 4),
            ("pay/checkout", "pay/ledger", 11, 0, true, 3),
            ("pay/checkout", "legacy/bank", 11, 0, false, 9),
        ])
    }

    /// One with calls over several columns, a long name, and long labels.
    pub fn long() -> Self {
        Self::new(&[
            ("", "shop/web", 12_345, 50, false, 9),
            ("shop/web", "shop/cart", 12_345, 99, true, 9),
            (
                "shop/cart",
                "shop/recommendations-for-customers-eu",
                12_345,
                50,
                true,
                9,
            ),
            (
                "shop/recommendations-for-customers-eu",
                "pay/ledger",
                5,
                0,
                true,
                3,
            ),
            ("shop/web", "pay/ledger", 5, 0, true, 3),
            ("", "pay/ledger", 5, 0, false, 3),
            ("shop/cart", "pay/ledger", 5, 0, true, 3),
        ])
    }

    /// 200 workloads of 10 namespaces, one of which calls a Service with a hostile name.
    pub fn large() -> Self {
        let name = |number: usize| format!("team-{}/service-{number}", number % 10);
        let names: Vec<_> = (0..200).map(name).collect();
        let calls = (0..200)
            .flat_map(|from| [(from * 7 + 3) % 200, (from * 13 + 1) % 200].map(|to| (from, to)));
        let call = |(from, to): (usize, usize)| {
            let failures = if (from, to) == (3, 24) { 10 } else { 0 };
            (&*names[from], &*names[to], 5, failures, true, 4)
        };
        let mut calls: Vec<Call> = calls.map(call).collect();
        calls.push((&names[0], HOSTILE, 1, 0, false, 4));
        Self::new(&calls)
    }
}

fn flow(&(from, to, rate, percent, is_mutual, bucket): &Call, inbound: bool) -> Flow {
    let peer = if inbound { from } else { to };
    let (namespace, name) = peer.split_once('/').unwrap_or(("", peer));
    let requests = rate * 100;
    let mut durations = vec![0; bucket + 1];
    (durations[bucket], durations[bucket - 1]) = (requests / 10, requests - requests / 10);
    Flow {
        inbound,
        route: if inbound { "" } else { "shop/canary" }.into(),
        peer_namespace: namespace.into(),
        peer: name.into(),
        requests,
        failures: rate * percent,
        mutual_tls: if is_mutual { requests } else { 0 },
        durations,
        ..Flow::default()
    }
}

fn pod(name: &str, flows: Vec<Flow>) -> PodTraffic {
    let (namespace, workload) = name.split_once('/').unwrap_or(("hostile", name));
    PodTraffic {
        namespace: namespace.into(),
        pod: format!("{workload}-1"),
        workload: workload.into(),
        services: vec![],
        traffic: Traffic {
            milliseconds: 100_000,
            flows,
            incomplete: false,
        },
    }
}

impl Source for Fake {
    async fn sample(&self) -> Result<Sample, String> {
        self.asked.set(self.asked.get() + 1);
        self.sample.borrow().clone()
    }

    async fn workload(&self, name: &str) -> Result<Workload, String> {
        if name.ends_with("/gone") {
            return Err(format!("no pod with a proxy of the mesh is {name}"));
        }
        let (first, second) = (format!("{name}-1"), format!("{name}-2"));
        let known = PodState {
            state: Some(state(&first)),
            pod: first,
            error: None,
        };
        let silent = PodState {
            pod: second,
            state: None,
            error: Some("timed out".into()),
        };
        let others = (0..60).map(|number| exchange(number, 200));
        let exchanges: Vec<_> = (1..=3)
            .map(|number| exchange(number, 503))
            .chain(others)
            .collect();
        Ok(Workload::new(vec![known, silent], &exchanges, 2))
    }

    async fn story(&self, _: ExchangeId) -> Result<Story, String> {
        let record = Record {
            pod: "shop/cart-1".into(),
            exchange: exchange(3, 503),
        };
        Ok(Story {
            caller: Some(record),
            callee: None,
            missing: vec![format!("The callee is unknown: {HOSTILE}.")],
        })
    }

    async fn latest(&self, _: &str, _: &str) -> Result<Story, String> {
        let id = "10.244.1.7-5f3a9c210b44".parse();
        self.story(id.expect("it is valid")).await
    }
}

/// Failures are later than others.
fn exchange(number: usize, status: u16) -> Exchange {
    let minute = if status == 200 { 10 } else { 20 };
    let mut exchange = json!({
        "time": format!("2026-11-27T17:{minute}:{number:02}Z"), "direction": "outbound",
        "peer": "10.244.1.7:40000", "destination": "10.96.0.7:80", "protocol": "http1",
        "duration_ms": 3.5, "id": "10.244.1.7-5f3a9c210b44", "service": "pay/checkout", "attempts": [],
        "request": {"start_line": format!("GET /{number}"), "headers": [], "body_bytes": 0},
        "response": {"start_line": format!("HTTP/1.1 {status}"), "headers": [], "body_bytes": 3},
    });
    if status == 503 {
        exchange["failure"] = json!({"code": "connect-failed", "message": "cannot connect"});
    }
    serde_json::from_value(exchange).expect("it is an exchange")
}

fn state(pod: &str) -> State {
    let cut = |items: &[&str]| Cut {
        items: items.iter().map(|&item| item.to_owned()).collect(),
        omitted: 0,
    };
    let endpoint = |address: &str, ejected: Option<&str>| Endpoint {
        address: address.into(),
        pod: "pay/checkout-1".into(),
        ejected: ejected.map(Into::into),
        ..Endpoint::default()
    };
    let destination = Destination {
        service: "pay/checkout".into(),
        policy: "pay/limits".into(),
        routes: cut(&["pay/canary"]),
        endpoints: Cut {
            items: vec![
                endpoint("10.244.2.3:80", Some("consecutive")),
                endpoint("10.244.2.4:80", None),
            ],
            omitted: 0,
        },
        ..Destination::default()
    };
    State {
        pod: pod.into(),
        certificate: Some(Certificate {
            identity: "spiffe://cluster.local/ns/shop/sa/cart".into(),
            not_after: "2026-11-28T17:00:00Z".into(),
            trust_roots: 1,
            ..Certificate::default()
        }),
        discovery: Some(Discovery {
            connected: true,
            ..Discovery::default()
        }),
        inbound: Some(Inbound {
            strict: true,
            authorization: Some(cut(&["shop/only-web", HOSTILE])),
            ..Inbound::default()
        }),
        workers: vec![Worker {
            destinations: Cut {
                items: vec![destination],
                omitted: 0,
            },
            ..Worker::default()
        }],
        ..State::default()
    }
}
