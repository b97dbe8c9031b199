//! The calls of pods to outside of the cluster, and the NetworkPolicies that bound them. Pure.

pub mod boundary;
pub mod outbound;

use std::collections::BTreeSet;
use std::net::IpAddr;

use diy_mesh_controller::edges::shared_labels;
use diy_mesh_proto::{
    authorization::edge,
    mesh::v1::get_edges_response::{self, Group},
};
use kube::ResourceExt;
use serde::Serialize;

use crate::{
    edges::{Observed, title},
    pods::{Pod, is_active},
    time::format_timestamp,
};

const SECONDS_PER_DAY: u64 = 86_400;
const DATE_LENGTH: usize = "1970-01-01".len();

/// The observed calls of all pods.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The groups of pods whose proxies have reported.
    pub groups: Vec<Seen>,
    /// The pods without a report of a proxy in the last 7 days.
    pub unwatched: BTreeSet<String>,
}

/// The observed calls of a group of pods.
#[derive(Debug, Serialize)]
pub struct Seen {
    /// The pods.
    pub pods: String,
    /// The start of the observation. `None`: the group stands for others that were cut.
    pub since: Option<String>,
    /// Other calls were cut.
    pub incomplete: bool,
    /// The destinations, by their names.
    pub destinations: Vec<Destination>,
}

/// A destination outside of the cluster.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Destination {
    /// The name in lower case, or the address.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The last day of UTC on which it was called.
    pub last_day: String,
}

impl Destination {
    /// The address, of a destination without a name.
    pub fn address(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }
}

/// The report on what proxies saw, and on the pods of the cluster.
pub fn report(observed: &Observed, unwatched: BTreeSet<String>) -> Report {
    let seen = |group: &Group| Seen {
        pods: title(group),
        since: since(group),
        incomplete: group.incomplete,
        destinations: destinations(group),
    };
    Report {
        groups: observed.groups.iter().map(seen).collect(),
        unwatched,
    }
}

/// The destinations of a group.
pub fn destinations(group: &Group) -> Vec<Destination> {
    let destination = |seen: &get_edges_response::Seen| {
        let (host, port) = edge::destination(&seen.edge.as_ref()?.destination)?;
        let host = host.trim_matches(['[', ']']).to_owned();
        Some(Destination {
            host,
            port,
            last_day: last_day(seen),
        })
    };
    let mut all: Vec<_> = group.edges.iter().filter_map(destination).collect();
    all.sort();
    all
}

/// The last day of UTC on which calls were seen.
pub fn last_day(seen: &get_edges_response::Seen) -> String {
    let day = u64::try_from(seen.last_day).unwrap_or_default();
    let mut last_day = format_timestamp(day.saturating_mul(SECONDS_PER_DAY));
    last_day.truncate(DATE_LENGTH);
    last_day
}

/// The start of the observation of a group. `None`: it stands for others that were cut.
pub fn since(group: &Group) -> Option<String> {
    (!group.service_account.is_empty())
        .then(|| format_timestamp(group.since.try_into().unwrap_or_default()))
}

/// The groups of pods without a report of a proxy, in the namespaces of these groups and in `of`.
pub fn unwatched(pods: &[Pod], groups: &[Group], of: &str) -> BTreeSet<String> {
    let is_watched = |pod: &Group| {
        let is_same = |group: &Group| {
            (&group.namespace, &group.service_account, &group.labels)
                == (&pod.namespace, &pod.service_account, &pod.labels)
        };
        groups.iter().any(is_same)
    };
    let namespaces: BTreeSet<&str> = groups.iter().map(|group| &*group.namespace).collect();
    let pods = pods.iter().filter(|pod| is_active(pod)).map(group);
    let pods = pods.filter(|pod| {
        (namespaces.contains(&*pod.namespace) || pod.namespace == of) && !is_watched(pod)
    });
    pods.map(|pod| title(&pod)).collect()
}

fn group(pod: &Pod) -> Group {
    let account = pod.spec.as_ref();
    let account = account.and_then(|spec| spec.service_account_name.clone());
    Group {
        namespace: pod.namespace().unwrap_or_default(),
        service_account: account.unwrap_or_else(|| "default".to_owned()),
        labels: shared_labels(pod.labels().clone()),
        ..Group::default()
    }
}

#[cfg(test)]
pub(crate) mod testing;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::testing::observed;
    use super::*;

    #[test]
    fn destinations_are_names_and_addresses_in_order() {
        let observed = observed(&["api.example.com:443", "[2001:db8::7]:80", "192.0.2.7:80"]);
        let destinations = destinations(&observed.groups[0]);
        let shown = destinations.iter().map(|one| {
            let is_address = one.address().is_some();
            (&*one.host, one.port, &*one.last_day, is_address)
        });
        let expected = [
            ("192.0.2.7", 80, "1970-01-10", true),
            ("2001:db8::7", 80, "1970-01-10", true),
            ("api.example.com", 443, "1970-01-10", false),
        ];
        assert_eq!(shown.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn pods_without_a_report_are_told() {
        let pod = |namespace: &str, app: &str, phase: &str| {
            let labels = json!({"app": app, "pod-template-hash": "7f9"});
            let pod = json!({"metadata": {"namespace": namespace, "labels": labels},
                "spec": {"serviceAccountName": "cart", "containers": []}, "status": {"phase": phase}});
            diy_mesh_model::json::read::<Pod>(&pod).unwrap()
        };
        let pods = [
            pod("shop", "cart", "Running"),
            pod("shop", "db", "Running"),
            pod("shop", "job", "Succeeded"),
            pod("kube-system", "dns", "Running"),
        ];
        let groups = observed(&[]).groups;
        let db = "shop/cart app=db".to_owned();
        assert_eq!(unwatched(&pods, &groups, ""), BTreeSet::from([db.clone()]));
        let dns = "kube-system/cart app=dns".to_owned();
        assert_eq!(
            unwatched(&pods, &groups, "kube-system"),
            BTreeSet::from([dns, db])
        );
    }
}
