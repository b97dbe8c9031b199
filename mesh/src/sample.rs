//! What the proxies of a cluster saw lately: as they report it to the controllers, or as some of them
//! say by port-forward, while no controller responds.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use diy_mesh_controller::index::workload::workload;
use diy_mesh_proto::{
    MAX_FLOWS,
    mesh::v1::{Traffic, get_traffic_response},
};
use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::ListParams};
use prost::Message as _;
use tonic::Code;

use crate::{
    check::{pods, traffic::in_turns},
    cluster::{self, Cluster, describe_error},
    controller::{self, Controller, Controllers, Error},
    proxies::{self, Proxies},
    traffic::{PodTraffic, Sample},
};

/// The proxies that are asked by port-forward.
const MAX_PROXIES: usize = 32;
/// The time between the two questions to each of them.
const INTERVAL: Duration = Duration::from_secs(1);

/// After this time, connections are made anew: to new replicas too, and with a valid token.
const MAX_CONNECTION_AGE: Duration = Duration::from_secs(60);

/// The source of samples.
pub struct Sampler {
    controllers: Controllers,
    /// Empty: all.
    namespace: String,
    watch: bool,
    /// The replicas that have responded.
    connected: BTreeMap<String, Controller>,
    connected_since: Instant,
}

impl Sampler {
    /// Samples of a namespace, or of all (""). With `watch`, proxies report more often while samples
    /// are taken.
    pub async fn new(
        arguments: &controller::Arguments,
        namespace: &str,
        watch: bool,
    ) -> Result<Self, Error> {
        Ok(Self {
            controllers: Controllers::new(arguments).await?,
            namespace: namespace.to_owned(),
            watch: watch && !namespace.is_empty(),
            connected: BTreeMap::new(),
            connected_since: Instant::now(),
        })
    }

    /// The cluster, unless the controllers are given by their URLs.
    pub fn cluster(&self) -> Option<&Cluster> {
        self.controllers.cluster()
    }

    /// What the proxies saw in their latest interval.
    pub async fn sample(&mut self) -> Result<Sample, Error> {
        match (self.reported().await, self.controllers.cluster()) {
            (Ok(sample), _) => Ok(sample),
            (Err(error), Some(cluster)) if is_unavailable(&error) => {
                forwarded(cluster, &self.namespace, &error).await
            }
            (Err(error), _) => Err(error),
        }
    }

    /// The reports to all replicas.
    async fn reported(&mut self) -> Result<Sample, Error> {
        let mut missing = BTreeMap::new();
        if self.connected.is_empty() || self.connected_since.elapsed() > MAX_CONNECTION_AGE {
            self.connected_since = Instant::now();
            (self.connected, missing) = self.controllers.connect_all().await?;
        }
        let (namespace, watch) = (&self.namespace, self.watch);
        let asked = self.connected.iter_mut().map(async |(name, controller)| {
            (name.clone(), controller.traffic(namespace, watch).await)
        });
        let mut reports = Vec::new();
        for (name, answer) in join_all(asked).await {
            match answer {
                Ok(pods) => reports.extend(pods),
                Err(error) => {
                    self.connected.remove(&name);
                    if self.connected.is_empty() {
                        return Err(error);
                    }
                    missing.insert(name, error);
                }
            }
        }
        let notes = missing.iter().map(|(name, error)| {
            format!("{name} does not respond, so what its proxies report is missing: {error}")
        });
        Ok(of_reports(reports, notes.collect()))
    }
}

/// Whether a sample without controllers can help.
fn is_unavailable(error: &Error) -> bool {
    match error {
        Error::Rejected(status) => {
            let unavailable = [
                Code::Unimplemented,
                Code::Unavailable,
                Code::Cancelled,
                Code::Unknown,
                Code::Internal,
            ];
            unavailable.contains(&status.code())
        }
        _ => true,
    }
}

/// A pod whose proxy replaces its stream is in several reports: one of them counts.
fn of_reports(reports: Vec<get_traffic_response::Pod>, mut notes: Vec<String>) -> Sample {
    let mut pods = BTreeMap::new();
    let (mut invalid, mut incomplete) = (0, 0);
    for report in reports {
        let Ok(mut traffic) = Traffic::decode(&*report.traffic) else {
            invalid += 1;
            continue;
        };
        traffic.incomplete |= traffic.flows.len() > MAX_FLOWS;
        traffic.flows.truncate(MAX_FLOWS);
        incomplete += usize::from(traffic.incomplete);
        let pod = PodTraffic {
            namespace: report.namespace,
            pod: report.name,
            workload: report.workload,
            traffic,
        };
        pods.insert((pod.namespace.clone(), pod.pod.clone()), pod);
    }
    for (count, what) in [
        (invalid, "is invalid"),
        (incomplete, "has no room for all of its flows"),
    ] {
        if count > 0 {
            notes.push(format!("of {count} proxies, the report {what}"));
        }
    }
    Sample {
        pods: pods.into_values().collect(),
        notes,
    }
}

/// What some proxies say, twice.
async fn forwarded(cluster: &Cluster, namespace: &str, why: &Error) -> Result<Sample, Error> {
    let client = cluster.client.clone();
    let api = match namespace {
        "" => Api::all(client),
        namespace => Api::namespaced(client, namespace),
    };
    let listed = cluster::list::<Pod>(api, &ListParams::default()).await;
    let listed = listed.map_err(|error| {
        let error = format!("{}; {why}", describe_error(error));
        Error::Connection(format!("failed to list pods: {error}"))
    })?;
    let meshed = pods::meshed(&listed).map(|pod| (pod.namespace().unwrap_or_default(), pod));
    let mut chosen = in_turns(meshed);
    let all = chosen.len();
    chosen.truncate(MAX_PROXIES);
    let of_cluster = Proxies::Cluster(Box::new(cluster.clone()));
    let asked: Vec<_> = chosen.iter().copied().map(proxies::Pod::from).collect();
    let read = async || join_all(asked.iter().map(|pod| of_cluster.traffic(pod))).await;
    let first = read().await;
    tokio::time::sleep(INTERVAL).await;
    let second = read().await;
    let answers = chosen.iter().zip(first.into_iter().zip(second));
    let pods: Vec<_> = answers
        .filter_map(|(pod, (first, second))| Some(of_totals(pod, &first.ok()?, &second.ok()?)))
        .collect();
    let seconds = INTERVAL.as_secs();
    let note = format!(
        "{} of {all} proxies were asked by port-forward for {seconds} s, because no controller responds: {why}",
        pods.len()
    );
    Ok(Sample {
        pods,
        notes: vec![note],
    })
}

fn of_totals(pod: &Pod, first: &Traffic, second: &Traffic) -> PodTraffic {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let label = |name: &str| pod.metadata.labels.as_ref()?.get(name).map(String::as_str);
    PodTraffic {
        namespace: pod.namespace().unwrap_or_default(),
        pod: name.to_owned(),
        workload: workload(name, label).to_owned(),
        traffic: second.since(first),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic::testing::flow;
    use serde_json::json;
    use tonic::Status;

    fn report(pod: &str, traffic: Vec<u8>) -> get_traffic_response::Pod {
        get_traffic_response::Pod {
            namespace: "shop".into(),
            name: pod.into(),
            workload: "web".into(),
            traffic,
        }
    }

    #[test]
    fn each_pod_counts_once_and_a_hostile_report_for_none() {
        let traffic = |flows: usize| Traffic {
            milliseconds: 1000,
            flows: vec![flow(true, "shop/cart", 1); flows],
            incomplete: false,
        };
        let reports = vec![
            report("web-1", traffic(2).encode_to_vec()),
            report("web-1", traffic(1).encode_to_vec()),
            report("web-2", vec![255; 8]),
            report("web-3", traffic(1000).encode_to_vec()),
        ];
        let sample = of_reports(reports, vec![]);
        let flows = sample.pods.iter().map(|pod| pod.traffic.flows.len());
        assert_eq!(flows.collect::<Vec<_>>(), [1, MAX_FLOWS]);
        assert_eq!(
            sample.notes,
            [
                "of 1 proxies, the report is invalid",
                "of 1 proxies, the report has no room for all of its flows"
            ]
        );
    }

    #[test]
    fn totals_of_a_pod_are_the_traffic_of_its_workload_in_between() {
        let pod = json!({"metadata": {
            "name": "web-7f9-x2x4z", "namespace": "shop", "labels": {"pod-template-hash": "7f9"},
        }});
        let pod = serde_json::from_value(pod).expect("a pod");
        let total = |milliseconds, requests| Traffic {
            milliseconds,
            flows: vec![flow(true, "shop/cart", requests)],
            incomplete: false,
        };
        let seen = of_totals(&pod, &total(5000, 10), &total(6500, 13));
        assert_eq!((&*seen.namespace, &*seen.workload), ("shop", "web"));
        assert_eq!(seen.traffic.milliseconds, 1500);
        assert_eq!(seen.traffic.flows[0].requests, 3);
    }

    #[test]
    fn proxies_are_asked_only_if_no_controller_responds() {
        assert!(is_unavailable(&Error::NoPods("service-mesh".into())));
        for (status, expected) in [
            (Status::unimplemented(""), true),
            (Status::unavailable(""), true),
            (Status::permission_denied(""), false),
            (Status::unauthenticated(""), false),
        ] {
            assert_eq!(is_unavailable(&Error::Rejected(status)), expected);
        }
    }
}
