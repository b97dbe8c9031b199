//! The workloads, which create pods: Deployments and single Pods. A changed Deployment replaces all
//! of its pods at once. Pure.

use std::hash::{DefaultHasher, Hash, Hasher};

use anyhow::{Context, Result};
use diy_mesh_model::json;
use k8s_openapi::{
    api::core::v1::Pod,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};
use kube::ResourceExt;
use serde_json::{Value, json};

use super::objects::Key;
use crate::protocol::PodView;

/// A desired set of pods.
#[derive(Clone, Debug)]
pub(super) struct Workload {
    pub(super) replicas: usize,
    /// The metadata and spec of new pods.
    template: Pod,
    /// The hash of the template.
    pub(super) hash: String,
    /// Whether a pod has the name of its workload.
    is_single_pod: bool,
}

/// The next step from the observed to the desired state.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) create: usize,
    /// Their names.
    pub(super) delete: Vec<String>,
}

impl Workload {
    /// Parses the spec of a Deployment.
    pub(super) fn deployment(spec: &Value) -> Result<Self> {
        let replicas = spec["replicas"].as_i64().unwrap_or(1);
        let replicas = usize::try_from(replicas).context("invalid replicas")?;
        Self::new(&spec["template"], replicas, false)
    }

    /// Parses a Pod.
    pub(super) fn pod(pod: &Value) -> Result<Self> {
        Self::new(pod, 1, true)
    }

    fn new(template: &Value, replicas: usize, is_single_pod: bool) -> Result<Self> {
        let pod = json!({"metadata": template["metadata"], "spec": template["spec"]});
        let mut hasher = DefaultHasher::new();
        // The maps of JSON objects are sorted, so equal templates have equal texts.
        pod.to_string().hash(&mut hasher);
        let mut template: Pod = json::read(&pod)?;
        let spec = template.spec.as_mut().context("spec is missing")?;
        // The API server sets this default before it calls webhooks.
        spec.service_account_name
            .get_or_insert_with(|| "default".into());
        Ok(Self {
            replicas,
            template,
            hash: encode(hasher.finish(), 10),
            is_single_pod,
        })
    }

    /// A pod of the workload with this key, with a new name and uid.
    pub(super) fn new_pod(&self, (namespace, own_name): &Key) -> Pod {
        let mut labels = self.template.labels().clone();
        let mut name = own_name.clone();
        let mut owner_references = None;
        if !self.is_single_pod {
            let replica_set = format!("{name}-{}", self.hash);
            name = format!("{replica_set}-{}", encode(fastrand::u64(..), 5));
            labels.insert("pod-template-hash".into(), self.hash.clone());
            owner_references = Some(vec![OwnerReference {
                api_version: "apps/v1".into(),
                kind: "ReplicaSet".into(),
                uid: replica_set.clone(),
                name: replica_set,
                controller: Some(true),
                ..OwnerReference::default()
            }]);
        }
        Pod {
            metadata: ObjectMeta {
                name: Some(name),
                namespace: Some(namespace.clone()),
                uid: Some(format!("{:032x}", fastrand::u128(..))),
                labels: Some(labels),
                owner_references,
                ..self.template.metadata.clone()
            },
            ..self.template.clone()
        }
    }

    /// The pods to create and delete next, from the own pods with the hashes of their templates.
    /// Pods of an earlier template are deleted, and so are surplus pods, unready ones first.
    pub(super) fn plan(&self, pods: &[(&str, PodView)]) -> Plan {
        let active = pods.iter().filter(|(_, pod)| !pod.terminating);
        let (mut current, mut delete): (Vec<_>, Vec<_>) =
            active.partition(|(hash, _)| *hash == self.hash);
        current.sort_by_key(|(_, pod)| !pod.ready);
        delete.extend(current.iter().skip(self.replicas));
        let create = if self.is_single_pod {
            // The replacement has the same name.
            usize::from(pods.is_empty())
        } else {
            self.replicas.saturating_sub(current.len())
        };
        let names = delete.iter().map(|(_, pod)| pod.name.clone());
        Plan {
            create,
            delete: names.collect(),
        }
    }
}

/// Encodes a number in the alphabet of generated Kubernetes names.
fn encode(mut number: u64, length: usize) -> String {
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut next = || {
        let digit = number % ALPHABET.len() as u64;
        number /= ALPHABET.len() as u64;
        char::from(ALPHABET[digit as usize])
    };
    (0..length).map(|_| next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deployment(replicas: usize) -> Workload {
        let template = json!({"metadata": {"labels": {"app": "a"}}, "spec": {"containers": []}});
        Workload::deployment(&json!({"replicas": replicas, "template": template})).unwrap()
    }

    fn owned<'a>(name: &str, hash: &'a str, ready: bool) -> (&'a str, PodView) {
        let view = PodView {
            name: name.into(),
            ready,
            ..PodView::default()
        };
        (hash, view)
    }

    fn plan(create: usize, delete: &[&str]) -> Plan {
        Plan {
            create,
            delete: delete.iter().map(|&name| name.to_owned()).collect(),
        }
    }

    #[test]
    fn names_deployment_pods_after_their_replica_set() {
        let pod = deployment(1).new_pod(&("shop".into(), "cart".into()));
        let name = pod.name_any();
        assert!(
            name.starts_with("cart-") && name.split('-').count() == 3,
            "{name}"
        );
        let labels = pod.labels();
        assert_eq!(
            (labels["app"].as_str(), labels["pod-template-hash"].len()),
            ("a", 10)
        );
    }

    #[test]
    fn changed_deployment_replaces_all_pods() {
        let workload = deployment(2);
        let pods = [owned("a", "old", true), owned("b", &workload.hash, false)];
        assert_eq!(workload.plan(&pods), plan(1, &["a"]));
    }

    #[test]
    fn changed_pod_is_created_after_its_predecessor_is_removed() {
        let workload = Workload::pod(&json!({"spec": {"containers": []}})).unwrap();
        let mut before = [owned("a", "old", true)];
        assert_eq!(workload.plan(&before), plan(0, &["a"]));
        before[0].1.terminating = true;
        assert_eq!(workload.plan(&before), plan(0, &[]));
        assert_eq!(workload.plan(&[]), plan(1, &[]));
    }

    #[test]
    fn scaling_down_deletes_pods_that_are_not_ready_first() {
        let workload = deployment(1);
        let pods = [
            owned("a", &workload.hash, false),
            owned("b", &workload.hash, true),
        ];
        assert_eq!(workload.plan(&pods), plan(0, &["a"]));
    }
}
