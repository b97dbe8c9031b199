//! The workload controllers: Deployments, Jobs and Pods to the pods to create and delete. Pure.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        batch::v1::Job,
        core::v1::{Pod, PodTemplateSpec},
    },
    apimachinery::pkg::{
        apis::meta::v1::{ObjectMeta, OwnerReference},
        util::intstr::IntOrString,
    },
};

use super::objects::Key;

/// The kind of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Deployment,
    Job,
    Pod,
}

/// A desired set of pods.
#[derive(Clone, Debug)]
pub(super) struct Workload {
    pub(super) kind: Kind,
    pub(super) key: Key,
    pub(super) replicas: usize,
    /// A rolling update creates at most this many pods above `replicas`.
    max_surge: usize,
    /// A rolling update keeps at least `replicas` minus this many pods ready.
    max_unavailable: usize,
    /// A Job stops after more failed pods than this.
    backoff_limit: usize,
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
    pub(super) failed: bool,
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
        let replicas = count(spec.replicas, 1);
        let strategy = spec.strategy.unwrap_or_default();
        let kind = strategy.type_.as_deref().unwrap_or("RollingUpdate");
        ensure!(
            kind == "RollingUpdate",
            "unsupported update strategy {kind}: the sandbox supports RollingUpdate"
        );
        let rolling = strategy.rolling_update.unwrap_or_default();
        let max_surge = limit(rolling.max_surge, replicas.div_ceil(4))?;
        let mut max_unavailable = limit(rolling.max_unavailable, replicas / 4)?;
        if max_surge == 0 {
            // With both limits at zero a rolling update makes no progress.
            max_unavailable = max_unavailable.max(1);
        }
        Ok(Self {
            max_surge,
            max_unavailable,
            ..Self::new(Kind::Deployment, key, replicas, spec.template)
        })
    }

    /// A Job that runs one pod to completion.
    pub(super) fn job(job: Job, key: &Key) -> Result<Self> {
        let spec = job.spec.context("spec is missing")?;
        ensure!(
            count(spec.completions, 1) == 1 && count(spec.parallelism, 1) == 1,
            "unsupported completions or parallelism: the sandbox runs one pod per Job"
        );
        Ok(Self {
            backoff_limit: count(spec.backoff_limit, 6),
            ..Self::new(Kind::Job, key, 1, spec.template)
        })
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
            max_surge: 0,
            max_unavailable: 1,
            backoff_limit: 0,
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
                (
                    format!("{replica_set}-{suffix}"),
                    Some(("apps/v1", "ReplicaSet", replica_set)),
                )
            }
            Kind::Job => {
                labels.insert("batch.kubernetes.io/job-name".into(), own_name.clone());
                (
                    format!("{own_name}-{suffix}"),
                    Some(("batch/v1", "Job", own_name.clone())),
                )
            }
            Kind::Pod => (own_name.clone(), None),
        };
        let owner_references = owner.map(|(api_version, kind, name)| {
            vec![OwnerReference {
                api_version: api_version.into(),
                kind: kind.into(),
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

    /// The pods to create and delete next.
    pub(super) fn plan(&self, pods: &[OwnedPod]) -> Plan {
        match self.kind {
            Kind::Job => self.plan_job(pods),
            Kind::Pod => self.plan_pod(pods),
            Kind::Deployment => self.plan_rolling_update(pods),
        }
    }

    fn plan_job(&self, pods: &[OwnedPod]) -> Plan {
        let failed = pods.iter().filter(|pod| pod.failed).count();
        let running_or_succeeded = pods.len() > failed;
        Plan {
            create: usize::from(!running_or_succeeded && failed <= self.backoff_limit),
            delete: Vec::new(),
        }
    }

    /// A changed pod is deleted first, because its replacement has the same name.
    fn plan_pod(&self, pods: &[OwnedPod]) -> Plan {
        let outdated = pods
            .iter()
            .filter(|pod| pod.template_hash != self.template_hash && !pod.terminating);
        Plan {
            create: usize::from(pods.is_empty()),
            delete: outdated.map(|pod| pod.name.clone()).collect(),
        }
    }

    fn plan_rolling_update(&self, pods: &[OwnedPod]) -> Plan {
        let active: Vec<&OwnedPod> = pods.iter().filter(|pod| !pod.terminating).collect();
        let (mut new, old): (Vec<&OwnedPod>, Vec<&OwnedPod>) = active
            .iter()
            .partition(|pod| pod.template_hash == self.template_hash);
        let allowed = (self.replicas + self.max_surge).saturating_sub(active.len());
        let create = self.replicas.saturating_sub(new.len()).min(allowed);
        let ready = active.iter().filter(|pod| pod.ready).count();
        let mut deletable_ready =
            ready.saturating_sub(self.replicas.saturating_sub(self.max_unavailable));
        let surplus = new.len().saturating_sub(self.replicas);
        // Scaling down deletes pods that are not ready first.
        new.sort_by_key(|pod| pod.ready);
        let mut delete: Vec<String> = new
            .into_iter()
            .take(surplus)
            .map(|pod| pod.name.clone())
            .collect();
        for pod in old {
            if !pod.ready {
                delete.push(pod.name.clone());
            } else if deletable_ready > 0 {
                deletable_ready -= 1;
                delete.push(pod.name.clone());
            }
        }
        Plan { create, delete }
    }
}

fn count(value: Option<i32>, default: usize) -> usize {
    value
        .and_then(|value| usize::try_from(value).ok())
        .unwrap_or(default)
}

fn limit(value: Option<IntOrString>, default: usize) -> Result<usize> {
    match value {
        None => Ok(default),
        Some(IntOrString::Int(number)) => usize::try_from(number)
            .with_context(|| format!("invalid rolling update limit {number}")),
        Some(IntOrString::String(text)) => {
            bail!("unsupported rolling update limit {text:?}: the sandbox supports numbers")
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

    fn deployment(replicas: usize, strategy: &str) -> Result<Workload> {
        let yaml = format!(
            "{{spec: {{replicas: {replicas}, {strategy} selector: {{}}, template: {{metadata: {{labels: {{app: a}}}}, spec: {{containers: []}}}}}}}}"
        );
        Workload::deployment(
            serde_yaml_ng::from_str(&yaml).unwrap(),
            &("shop".into(), "cart".into()),
        )
    }

    fn owned(name: &str, workload: &Workload, new: bool, ready: bool) -> OwnedPod {
        let template_hash = if new {
            workload.template_hash.clone()
        } else {
            "old".into()
        };
        OwnedPod {
            name: name.into(),
            template_hash,
            ready,
            terminating: false,
            failed: false,
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
        let pod = deployment(1, "").unwrap().new_pod();
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
    fn rolling_update_replaces_pods_one_by_one_without_losing_ready_pods() {
        let workload = deployment(2, "").unwrap();
        let (a, b) = (
            owned("a", &workload, false, true),
            owned("b", &workload, false, true),
        );
        assert_eq!(workload.plan(&[a.clone(), b.clone()]), plan(1, &[]));
        let starting = owned("c", &workload, true, false);
        assert_eq!(
            workload.plan(&[a.clone(), b.clone(), starting]),
            Plan::default()
        );
        let started = owned("c", &workload, true, true);
        assert_eq!(
            workload.plan(&[a.clone(), b.clone(), started.clone()]),
            plan(0, &["a"])
        );
        let terminating = OwnedPod {
            terminating: true,
            ..a
        };
        assert_eq!(workload.plan(&[terminating, b, started]), plan(1, &[]));
    }

    #[test]
    fn rolling_update_without_surge_deletes_first() {
        let workload = deployment(
            2,
            "strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 0}},",
        )
        .unwrap();
        let pods = [
            owned("a", &workload, false, true),
            owned("b", &workload, false, true),
        ];
        assert_eq!(workload.plan(&pods), plan(0, &["a"]));
        assert_eq!(workload.plan(&pods[1..]).create, 1);
    }

    #[test]
    fn scaling_down_deletes_pods_that_are_not_ready_first() {
        let workload = deployment(1, "").unwrap();
        let pods = [
            owned("a", &workload, true, true),
            owned("b", &workload, true, false),
        ];
        assert_eq!(workload.plan(&pods).delete, ["b"]);
    }

    #[test]
    fn rejects_unsupported_strategies() {
        for (strategy, value) in [
            ("strategy: {type: Recreate},", "Recreate"),
            ("strategy: {rollingUpdate: {maxSurge: 50%}},", "50%"),
        ] {
            let error = deployment(2, strategy).unwrap_err().to_string();
            assert!(error.contains(value), "{error}");
        }
    }

    #[test]
    fn job_stops_on_success_and_after_the_backoff_limit() {
        let yaml = "{spec: {backoffLimit: 1, template: {spec: {containers: []}}}}";
        let job = Workload::job(
            serde_yaml_ng::from_str(yaml).unwrap(),
            &("a".into(), "j".into()),
        )
        .unwrap();
        let pod = owned("p", &job, true, false);
        let failed = OwnedPod {
            failed: true,
            ..pod.clone()
        };
        // Running and succeeded pods are equal here: neither needs a replacement.
        assert_eq!(job.plan(&[]).create, 1);
        assert_eq!(job.plan(std::slice::from_ref(&pod)).create, 0);
        assert_eq!(job.plan(std::slice::from_ref(&failed)).create, 1);
        assert_eq!(job.plan(&[failed.clone(), failed.clone()]).create, 0);
        assert_eq!(job.plan(&[failed, pod]).create, 0);
    }
}
