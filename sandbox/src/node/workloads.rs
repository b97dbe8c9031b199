//! The workloads, which create pods: Deployments and single Pods. A changed Deployment replaces all
//! of its pods at once. Pure.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use anyhow::{Context, Result};
use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        core::v1::{Pod, PodTemplateSpec},
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};

use super::objects::Key;

/// The kind of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Deployment,
    Pod,
}

/// A desired set of pods.
#[derive(Clone, Debug)]
pub(super) struct Workload {
    pub(super) kind: Kind,
    pub(super) key: Key,
    pub(super) replicas: usize,
    template: PodTemplateSpec,
    template_hash: String,
}

/// The observed state of a pod that a workload owns.
#[derive(Clone, Debug)]
pub(super) struct OwnedPod {
    pub(super) name: String,
    pub(super) template_hash: String,
    pub(super) ready: bool,
    pub(super) terminating: bool,
}

/// The next step from the observed to the desired state.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) create: usize,
    pub(super) delete: Vec<String>,
}

impl Workload {
    pub(super) fn deployment(deployment: Deployment, key: &Key) -> Result<Self> {
        let spec = deployment.spec.context("spec is missing")?;
        let replicas = spec.replicas.map_or(Ok(1), usize::try_from);
        let replicas = replicas.context("invalid replicas")?;
        Ok(Self::new(Kind::Deployment, key, replicas, spec.template))
    }

    pub(super) fn pod(pod: Pod, key: &Key) -> Result<Self> {
        let template = PodTemplateSpec {
            metadata: Some(pod.metadata),
            spec: Some(pod.spec.context("spec is missing")?),
        };
        Ok(Self::new(Kind::Pod, key, 1, template))
    }

    fn new(kind: Kind, key: &Key, replicas: usize, template: PodTemplateSpec) -> Self {
        let mut hasher = DefaultHasher::new();
        // The maps of these types are sorted, so equal templates serialize equally.
        serde_json::to_string(&template)
            .unwrap_or_default()
            .hash(&mut hasher);
        Self {
            kind,
            key: key.clone(),
            replicas,
            template,
            template_hash: safe_encode(hasher.finish(), 10),
        }
    }

    /// A pod of the template with a new name and uid.
    pub(super) fn new_pod(&self) -> Pod {
        let (namespace, own_name) = &self.key;
        let hash = &self.template_hash;
        let suffix = safe_encode(fastrand::u64(..), 5);
        let template = self.template.metadata.clone().unwrap_or_default();
        let mut labels: BTreeMap<String, String> = template.labels.unwrap_or_default();
        let (name, owner) = match self.kind {
            Kind::Deployment => {
                labels.insert("pod-template-hash".into(), hash.clone());
                let replica_set = format!("{own_name}-{hash}");
                (format!("{replica_set}-{suffix}"), Some(replica_set))
            }
            Kind::Pod => (own_name.clone(), None),
        };
        let owner_references = owner.map(|name| {
            vec![OwnerReference {
                api_version: "apps/v1".into(),
                kind: "ReplicaSet".into(),
                uid: name.clone(),
                name,
                controller: Some(true),
                ..OwnerReference::default()
            }]
        });
        let mut spec = self.template.spec.clone();
        if let Some(spec) = &mut spec {
            // The API server sets this default before it calls webhooks.
            spec.service_account_name
                .get_or_insert_with(|| "default".into());
        }
        Pod {
            metadata: ObjectMeta {
                name: Some(name),
                namespace: Some(namespace.clone()),
                uid: Some(uuid()),
                labels: Some(labels),
                annotations: template.annotations,
                owner_references,
                ..ObjectMeta::default()
            },
            spec,
            status: None,
        }
    }

    /// The hash of the template of new pods.
    pub(super) fn template_hash(&self) -> &str {
        &self.template_hash
    }

    /// The pods to create and delete next: those of an earlier template and surplus ones, first
    /// those that are not ready, are deleted.
    pub(super) fn plan(&self, pods: &[OwnedPod]) -> Plan {
        let active = pods.iter().filter(|pod| !pod.terminating);
        let (mut current, mut delete): (Vec<_>, Vec<_>) =
            active.partition(|pod| pod.template_hash == self.template_hash);
        current.sort_by_key(|pod| !pod.ready);
        delete.extend(current.iter().skip(self.replicas));
        let create = match self.kind {
            Kind::Deployment => self.replicas.saturating_sub(current.len()),
            // The replacement has the same name.
            Kind::Pod => usize::from(pods.is_empty()),
        };
        Plan {
            create,
            delete: delete.iter().map(|pod| pod.name.clone()).collect(),
        }
    }
}

/// Encodes a number in the alphabet of generated Kubernetes names.
fn safe_encode(mut number: u64, length: usize) -> String {
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut out = String::new();
    for _ in 0..length {
        out.push(char::from(
            ALPHABET[(number % ALPHABET.len() as u64) as usize],
        ));
        number /= ALPHABET.len() as u64;
    }
    out
}

fn uuid() -> String {
    let text = format!("{:032x}", fastrand::u128(..));
    format!(
        "{}-{}-{}-{}-{}",
        &text[..8],
        &text[8..12],
        &text[12..16],
        &text[16..20],
        &text[20..]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deployment(replicas: usize) -> Workload {
        let yaml = format!(
            "{{spec: {{replicas: {replicas}, selector: {{}}, template: {{metadata: {{labels: {{app: a}}}}, spec: {{containers: []}}}}}}}}"
        );
        let deployment = serde_yaml_ng::from_str(&yaml).unwrap();
        Workload::deployment(deployment, &("shop".into(), "cart".into())).unwrap()
    }

    fn owned(name: &str, template_hash: &str, ready: bool) -> OwnedPod {
        OwnedPod {
            name: name.into(),
            template_hash: template_hash.into(),
            ready,
            terminating: false,
        }
    }

    fn plan(create: usize, delete: &[&str]) -> Plan {
        Plan {
            create,
            delete: delete.iter().map(|&name| name.to_owned()).collect(),
        }
    }

    #[test]
    fn names_deployment_pods_after_their_replica_set() {
        let pod = deployment(1).new_pod();
        let name = pod.metadata.name.unwrap();
        assert!(
            name.starts_with("cart-") && name.split('-').count() == 3,
            "{name}"
        );
        let labels = pod.metadata.labels.unwrap();
        assert_eq!(
            (labels["app"].as_str(), labels["pod-template-hash"].len()),
            ("a", 10)
        );
    }

    #[test]
    fn changed_deployment_replaces_all_pods() {
        let workload = deployment(2);
        let hash = workload.template_hash.clone();
        let pods = [owned("a", "old", true), owned("b", &hash, false)];
        assert_eq!(workload.plan(&pods), plan(1, &["a"]));
    }

    #[test]
    fn changed_pod_is_created_after_its_predecessor_is_removed() {
        let pod = serde_yaml_ng::from_str("{spec: {containers: []}}").unwrap();
        let workload = Workload::pod(pod, &("shop".into(), "a".into())).unwrap();
        let mut before = owned("a", "old", true);
        assert_eq!(
            workload.plan(std::slice::from_ref(&before)),
            plan(0, &["a"])
        );
        before.terminating = true;
        assert_eq!(workload.plan(&[before]), plan(0, &[]));
        assert_eq!(workload.plan(&[]), plan(1, &[]));
    }

    #[test]
    fn scaling_down_deletes_pods_that_are_not_ready_first() {
        let workload = deployment(1);
        let hash = workload.template_hash.clone();
        let pods = [owned("a", &hash, false), owned("b", &hash, true)];
        assert_eq!(workload.plan(&pods), plan(0, &["a"]));
    }
}
