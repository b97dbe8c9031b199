//! The workload controllers: Deployments, DaemonSets, Jobs and single Pods to the pods that there should be. Pure; what to
//! create and what to delete follows from what is wanted and what is there.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use anyhow::{Context, Result};
use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        batch::v1::Job,
        core::v1::{Pod, PodTemplateSpec},
    },
    apimachinery::pkg::{
        apis::meta::v1::{ObjectMeta, OwnerReference},
        util::intstr::IntOrString,
    },
};

use super::objects::Key;

/// What makes pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Deployment,
    DaemonSet,
    Job,
    Pod,
}

/// Pods that there should be.
#[derive(Clone, Debug)]
pub(super) struct Workload {
    pub(super) kind: Kind,
    pub(super) key: Key,
    pub(super) replicas: usize,
    /// How many pods more than wanted, and how many ready ones fewer, a rollout may have.
    surge: usize,
    unavailable: usize,
    /// A Job gives up after this many failed pods more.
    backoff_limit: usize,
    completions: usize,
    template: PodTemplateSpec,
    hash: String,
}

/// What is known of a pod that a workload owns.
#[derive(Clone, Debug)]
pub(super) struct Owned {
    pub(super) name: String,
    /// Of the template that it was made from.
    pub(super) hash: String,
    pub(super) ready: bool,
    pub(super) terminating: bool,
    pub(super) succeeded: bool,
    pub(super) failed: bool,
}

/// The way from what is there to what is wanted.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) create: usize,
    pub(super) delete: Vec<String>,
}

impl Workload {
    pub(super) fn deployment(deployment: Deployment, key: &Key) -> Result<Self> {
        let spec = deployment.spec.context("no spec")?;
        let replicas = count(spec.replicas, 1);
        let strategy = spec.strategy.unwrap_or_default();
        let rolling = strategy.rolling_update.unwrap_or_default();
        let (surge, unavailable) = if strategy.type_.as_deref() == Some("Recreate") {
            (0, replicas)
        } else {
            (
                share(rolling.max_surge.as_ref(), replicas, true),
                share(rolling.max_unavailable.as_ref(), replicas, false),
            )
        };
        // Both zero would never get anywhere; the API server refuses it where it is written so.
        let unavailable = if surge == 0 {
            unavailable.max(1)
        } else {
            unavailable
        };
        Ok(Self {
            surge,
            unavailable,
            ..Self::new(Kind::Deployment, key, replicas, spec.template)
        })
    }

    pub(super) fn daemon_set(set: DaemonSet, key: &Key) -> Result<Self> {
        Ok(Self::new(
            Kind::DaemonSet,
            key,
            1,
            set.spec.context("no spec")?.template,
        ))
    }

    pub(super) fn job(job: Job, key: &Key) -> Result<Self> {
        let spec = job.spec.context("no spec")?;
        let completions = count(spec.completions, 1);
        let backoff_limit = count(spec.backoff_limit, 6);
        Ok(Self {
            completions,
            backoff_limit,
            ..Self::new(Kind::Job, key, count(spec.parallelism, 1), spec.template)
        })
    }

    pub(super) fn pod(pod: Pod, key: &Key) -> Result<Self> {
        let template = PodTemplateSpec {
            metadata: Some(pod.metadata),
            spec: Some(pod.spec.context("no spec")?),
        };
        Ok(Self::new(Kind::Pod, key, 1, template))
    }

    fn new(kind: Kind, key: &Key, replicas: usize, template: PodTemplateSpec) -> Self {
        let mut hasher = DefaultHasher::new();
        // Maps of these types are sorted: equal templates have equal texts.
        serde_json::to_string(&template)
            .unwrap_or_default()
            .hash(&mut hasher);
        let hash = readable(hasher.finish(), 10);
        Self {
            kind,
            key: key.clone(),
            replicas,
            surge: 0,
            unavailable: 1,
            backoff_limit: 0,
            completions: 0,
            template,
            hash,
        }
    }

    /// A new pod, with a new name and uid.
    pub(super) fn make_pod(&self) -> Pod {
        let (namespace, own) = &self.key;
        let suffix = readable(fastrand::u64(..), 5);
        let name = match self.kind {
            Kind::Deployment => format!("{own}-{}-{suffix}", self.hash),
            Kind::DaemonSet | Kind::Job => format!("{own}-{suffix}"),
            Kind::Pod => own.clone(),
        };
        let given = self.template.metadata.clone().unwrap_or_default();
        let mut labels: BTreeMap<String, String> = given.labels.unwrap_or_default();
        match self.kind {
            Kind::Deployment => drop(labels.insert("pod-template-hash".into(), self.hash.clone())),
            Kind::Job => drop(labels.insert("batch.kubernetes.io/job-name".into(), own.clone())),
            Kind::DaemonSet | Kind::Pod => {}
        }
        let owner = match self.kind {
            Kind::Deployment => Some(("apps/v1", "ReplicaSet", format!("{own}-{}", self.hash))),
            Kind::DaemonSet => Some(("apps/v1", "DaemonSet", own.clone())),
            Kind::Job => Some(("batch/v1", "Job", own.clone())),
            Kind::Pod => None,
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
        let metadata = ObjectMeta {
            name: Some(name),
            namespace: Some(namespace.clone()),
            uid: Some(uuid()),
            labels: Some(labels),
            annotations: given.annotations,
            owner_references,
            ..ObjectMeta::default()
        };
        let mut spec = self.template.spec.clone();
        if let Some(spec) = &mut spec {
            // As an API server does, before any webhook sees the pod.
            spec.service_account_name
                .get_or_insert_with(|| "default".into());
        }
        Pod {
            metadata,
            spec,
            status: None,
        }
    }

    /// The hash of the template that new pods are made from.
    pub(super) fn hash(&self) -> &str {
        &self.hash
    }

    /// What to do next.
    pub(super) fn plan(&self, pods: &[Owned]) -> Plan {
        match self.kind {
            Kind::Job => self.plan_job(pods),
            Kind::Pod => {
                let there = pods.iter().any(|pod| pod.hash == self.hash);
                let delete = pods
                    .iter()
                    .filter(|pod| pod.hash != self.hash && !pod.terminating)
                    .map(|pod| pod.name.clone())
                    .collect();
                Plan {
                    create: usize::from(!there && pods.is_empty()),
                    delete,
                }
            }
            Kind::Deployment | Kind::DaemonSet => self.plan_rollout(pods),
        }
    }

    fn plan_job(&self, pods: &[Owned]) -> Plan {
        let succeeded = pods.iter().filter(|pod| pod.succeeded).count();
        let failed = pods.iter().filter(|pod| pod.failed).count();
        let active = pods.len() - succeeded - failed;
        let wanted = if failed > self.backoff_limit {
            0
        } else {
            self.replicas
                .min(self.completions.saturating_sub(succeeded))
        };
        Plan {
            create: wanted.saturating_sub(active),
            delete: Vec::new(),
        }
    }

    fn plan_rollout(&self, pods: &[Owned]) -> Plan {
        let living: Vec<&Owned> = pods.iter().filter(|pod| !pod.terminating).collect();
        let (new, old): (Vec<&Owned>, Vec<&Owned>) =
            living.iter().partition(|pod| pod.hash == self.hash);
        let room = (self.replicas + self.surge).saturating_sub(living.len());
        let create = self.replicas.saturating_sub(new.len()).min(room);
        let ready = living.iter().filter(|pod| pod.ready).count();
        let mut spare_ready = ready.saturating_sub(self.replicas.saturating_sub(self.unavailable));
        let surplus = new.len().saturating_sub(self.replicas);
        // Of the new ones those go first that are not ready; of the old ones those that are not ready can always go.
        let mut extra = new.clone();
        extra.sort_by_key(|pod| pod.ready);
        let mut delete: Vec<String> = extra
            .into_iter()
            .take(surplus)
            .map(|pod| pod.name.clone())
            .collect();
        for pod in old {
            if !pod.ready {
                delete.push(pod.name.clone());
            } else if spare_ready > 0 {
                spare_ready -= 1;
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

/// A number, or a percentage of `of`; 25% where nothing is said.
fn share(value: Option<&IntOrString>, of: usize, up: bool) -> usize {
    let percent = match value {
        Some(IntOrString::Int(number)) => return count(Some(*number), 0),
        Some(IntOrString::String(text)) => text.trim_end_matches('%').parse().unwrap_or(25),
        None => 25,
    };
    if up {
        (of * percent).div_ceil(100)
    } else {
        of * percent / 100
    }
}

/// Text of the letters and digits that Kubernetes uses in generated names.
fn readable(mut number: u64, length: usize) -> String {
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

    fn deployment(replicas: usize, more: &str) -> Workload {
        let yaml = format!(
            "{{spec: {{replicas: {replicas}, {more} selector: {{}}, template: {{metadata: {{labels: {{app: a}}}}, spec: {{containers: []}}}}}}}}"
        );
        Workload::deployment(
            serde_yaml_ng::from_str(&yaml).unwrap(),
            &("shop".into(), "cart".into()),
        )
        .unwrap()
    }

    fn owned(name: &str, workload: &Workload, new: bool, ready: bool) -> Owned {
        let hash = if new {
            workload.hash.clone()
        } else {
            "old".into()
        };
        Owned {
            name: name.into(),
            hash,
            ready,
            terminating: false,
            succeeded: false,
            failed: false,
        }
    }

    #[test]
    fn a_pods_name_tells_where_it_is_from() {
        let pod = deployment(1, "").make_pod();
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
    fn a_rollout_adds_one_then_takes_one_and_never_falls_below_what_is_wanted() {
        let workload = deployment(2, "");
        let (a, b) = (
            owned("a", &workload, false, true),
            owned("b", &workload, false, true),
        );
        assert_eq!(
            workload.plan(&[a.clone(), b.clone()]),
            Plan {
                create: 1,
                delete: vec![]
            }
        );
        let starting = owned("c", &workload, true, false);
        assert_eq!(
            workload.plan(&[a.clone(), b.clone(), starting]),
            Plan::default()
        );
        let started = owned("c", &workload, true, true);
        assert_eq!(
            workload.plan(&[a.clone(), b.clone(), started.clone()]),
            Plan {
                create: 0,
                delete: vec!["a".into()]
            }
        );
        let leaving = Owned {
            terminating: true,
            ..a
        };
        assert_eq!(
            workload.plan(&[leaving, b, started]),
            Plan {
                create: 1,
                delete: vec![]
            }
        );
    }

    #[test]
    fn scaling_down_takes_unready_pods_first() {
        let workload = deployment(1, "");
        let pods = [
            owned("a", &workload, true, true),
            owned("b", &workload, true, false),
        ];
        assert_eq!(workload.plan(&pods).delete, ["b"]);
    }

    #[test]
    fn recreate_takes_all_before_it_makes_any() {
        let workload = deployment(2, "strategy: {type: Recreate},");
        let pods = [
            owned("a", &workload, false, true),
            owned("b", &workload, false, true),
        ];
        assert_eq!(
            workload.plan(&pods),
            Plan {
                create: 0,
                delete: vec!["a".into(), "b".into()]
            }
        );
        assert_eq!(workload.plan(&[]).create, 2);
    }

    #[test]
    fn a_job_ends_with_success_and_gives_up_after_its_limit() {
        let yaml = "{spec: {backoffLimit: 1, template: {spec: {containers: []}}}}";
        let job = Workload::job(
            serde_yaml_ng::from_str(yaml).unwrap(),
            &("a".into(), "j".into()),
        )
        .unwrap();
        let pod = owned("p", &job, true, false);
        let done = Owned {
            succeeded: true,
            ..pod.clone()
        };
        let failed = Owned {
            failed: true,
            ..pod.clone()
        };
        assert_eq!(job.plan(&[]).create, 1);
        assert_eq!(job.plan(std::slice::from_ref(&pod)).create, 0);
        assert_eq!(job.plan(std::slice::from_ref(&failed)).create, 1);
        assert_eq!(job.plan(&[failed.clone(), failed.clone()]).create, 0);
        assert_eq!(job.plan(&[failed, done]).create, 0);
    }

    #[test]
    fn shares_are_rounded_as_kubernetes_does() {
        assert_eq!((share(None, 1, true), share(None, 1, false)), (1, 0));
        assert_eq!(share(Some(&IntOrString::String("50%".into())), 3, false), 1);
        assert_eq!(share(Some(&IntOrString::Int(2)), 3, false), 2);
    }
}
