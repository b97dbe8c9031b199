//! The traffic that the proxies of a cluster saw lately. They report it to the controllers. While
//! no controller responds, and in a demo, some of them are asked.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};
use clap::Args;
use diy_mesh_proto::{
    MAX_FLOWS,
    mesh::v1::{Traffic, get_traffic_response},
};
use futures::future::join_all;
use prost::Message as _;
use tonic::Code;

use crate::cluster;
use crate::controller::{self, Controller, Controllers, Rejected};
use crate::proxies::{Pod, Proxies};
use crate::traffic::{PodTraffic, Sample};
use crate::turns::in_turns;

/// The proxies that are asked by port-forward.
const MAX_PROXIES: usize = 32;
/// The time between the two questions to each of them.
const INTERVAL: Duration = Duration::from_secs(1);

/// After this time, connections are made anew: to new replicas too, and with a valid token.
const MAX_CONNECTION_AGE: Duration = Duration::from_secs(60);

/// The source of samples.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Arguments {
    #[command(flatten)]
    controller: controller::Arguments,
    /// Ask the demo that runs on this machine, not a cluster
    #[arg(long, conflicts_with_all = ["context", "mesh_namespace", "account", "controller"])]
    pub demo: bool,
}

/// The source of samples.
pub struct Sampler {
    /// The controllers. `None` for a demo.
    controllers: Option<Controllers>,
    /// The proxies. `None`: the controllers are given by their URLs.
    proxies: Option<Proxies>,
    /// Empty: all.
    namespace: String,
    watch: bool,
    /// The replicas that have responded.
    connected: BTreeMap<String, Controller>,
    connected_since: Instant,
    /// The latest totals of the proxies, by pod.
    totals: BTreeMap<String, Traffic>,
}

impl Arguments {
    /// The arguments for a cluster.
    pub fn of(controller: &controller::Arguments) -> Self {
        Self {
            controller: controller.clone(),
            demo: false,
        }
    }

    /// The namespace that is given. Empty: none.
    pub fn namespace(&self) -> &str {
        let namespace = self.controller.cluster.namespace.as_deref();
        namespace.unwrap_or_default()
    }

    /// `NAMESPACE/NAME` of `[NAMESPACE/]NAME`, by default in the given namespace, in the namespace
    /// of the context, or in `default`.
    pub async fn full_name(&self, name: &str) -> String {
        let cluster = &self.controller.cluster;
        if self.demo {
            let default = cluster.namespace.as_deref().unwrap_or("default");
            return cluster::full_name(name, default);
        }
        cluster.full_name(name).await
    }

    /// Samples of a namespace, or of all (""). With `watch`, proxies report more often while samples
    /// are taken.
    pub async fn sampler(&self, namespace: &str, watch: bool) -> Result<Sampler> {
        let (controllers, proxies) = if self.demo {
            (None, Some(Proxies::of_demo(None).await?))
        } else {
            let controllers = Controllers::new(&self.controller).await?;
            let cluster = controllers.cluster().cloned();
            let proxies = cluster.map(|cluster| Proxies::Cluster(Box::new(cluster)));
            (Some(controllers), proxies)
        };
        Ok(Sampler {
            controllers,
            proxies,
            namespace: namespace.to_owned(),
            watch: watch && !namespace.is_empty(),
            connected: BTreeMap::new(),
            connected_since: Instant::now(),
            totals: BTreeMap::new(),
        })
    }
}

impl Sampler {
    /// The proxies, unless the controllers are given by their URLs.
    pub fn proxies(&self) -> Option<&Proxies> {
        self.proxies.as_ref()
    }

    /// The traffic of the proxies in their latest interval.
    pub async fn sample(&mut self) -> Result<Sample> {
        let proxies = self.proxies.clone();
        if let (None, Some(proxies)) = (&self.controllers, &proxies) {
            return self.asked(proxies, "").await;
        }
        match (self.reported().await, proxies) {
            (Err(error), Some(proxies)) if is_unavailable(&error) => {
                let why = format!(
                    " by port-forward, which does not tell the Services of pods, because no controller responds: {error}"
                );
                let asked = self.asked(&proxies, &why).await;
                asked.map_err(|other| anyhow!("{other}; {error}"))
            }
            (reported, _) => reported,
        }
    }

    /// The reports to all replicas.
    async fn reported(&mut self) -> Result<Sample> {
        let mut missing = BTreeMap::new();
        if self.connected.is_empty() || self.connected_since.elapsed() > MAX_CONNECTION_AGE {
            self.connected_since = Instant::now();
            if let Some(controllers) = &self.controllers {
                (self.connected, missing) = controllers.connect_all().await?;
            }
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

    /// The traffic that some proxies report, from two reads: now and before.
    async fn asked(&mut self, proxies: &Proxies, why: &str) -> Result<Sample> {
        let all = proxies.all(&self.namespace).await?;
        let mut chosen = in_turns(all.iter().map(|pod| (pod.namespace.clone(), pod)));
        chosen.truncate(MAX_PROXIES);
        if self.totals.is_empty() {
            self.totals = totals(proxies, &chosen).await;
            tokio::time::sleep(INTERVAL).await;
        }
        let totals = totals(proxies, &chosen).await;
        let before = std::mem::replace(&mut self.totals, totals);
        let between = |pod: &&Pod| of_totals(pod, &before, &self.totals);
        let pods: Vec<_> = chosen.iter().filter_map(between).collect();
        let note = format!("{} of {} proxies were asked{why}", pods.len(), all.len());
        let is_told = pods.len() < all.len() || self.controllers.is_some();
        Ok(Sample {
            pods,
            notes: Some(note).filter(|_| is_told).into_iter().collect(),
        })
    }
}

/// Whether a sample without controllers can help.
fn is_unavailable(error: &anyhow::Error) -> bool {
    let unavailable = [
        Code::Unimplemented,
        Code::Unavailable,
        Code::Cancelled,
        Code::Unknown,
        Code::Internal,
    ];
    let rejected = error.downcast_ref();
    rejected.is_none_or(|Rejected(status)| unavailable.contains(&status.code()))
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
            services: report.services,
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

/// The totals of the proxies that respond, by pod.
async fn totals(proxies: &Proxies, pods: &[&Pod]) -> BTreeMap<String, Traffic> {
    let asked = pods.iter().map(async |pod| {
        let traffic = proxies.traffic(pod).await.ok()?;
        Some((pod.full_name(), traffic))
    });
    join_all(asked).await.into_iter().flatten().collect()
}

fn of_totals(
    pod: &Pod,
    before: &BTreeMap<String, Traffic>,
    after: &BTreeMap<String, Traffic>,
) -> Option<PodTraffic> {
    let name = pod.full_name();
    Some(PodTraffic {
        namespace: pod.namespace.clone(),
        pod: pod.name.clone(),
        workload: pod.workload.clone(),
        services: pod.services.clone(),
        traffic: after.get(&name)?.since(before.get(&name)?),
    })
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
            services: vec![],
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
        let total = |milliseconds, requests| Traffic {
            milliseconds,
            flows: vec![flow(true, "shop/cart", requests)],
            incomplete: false,
        };
        let pod = json!({"metadata": {
            "name": "web-7f9-x2x4z", "namespace": "shop", "labels": {"pod-template-hash": "7f9"},
        }});
        let pod: crate::pods::Pod = diy_mesh_model::json::read(&pod).expect("a pod");
        let of = |total| BTreeMap::from([("shop/web-7f9-x2x4z".to_owned(), total)]);
        let (before, after) = (of(total(5000, 10)), of(total(6500, 13)));
        let pod = Pod::from(&pod);
        let seen = of_totals(&pod, &before, &after).expect("it was asked twice");
        assert_eq!((&*seen.namespace, &*seen.workload), ("shop", "web"));
        assert_eq!(seen.traffic.milliseconds, 1500);
        assert_eq!(seen.traffic.flows[0].requests, 3);
        assert!(of_totals(&pod, &BTreeMap::new(), &after).is_none());
    }

    #[test]
    fn proxies_are_asked_only_if_no_controller_responds() {
        assert!(is_unavailable(&anyhow!("no running controller found")));
        for (status, expected) in [
            (Status::unimplemented(""), true),
            (Status::unavailable(""), true),
            (Status::permission_denied(""), false),
            (Status::unauthenticated(""), false),
        ] {
            let error = Rejected(status).into();
            assert_eq!(is_unavailable(&error), expected);
        }
    }
}
