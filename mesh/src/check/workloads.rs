//! The workloads of the cluster: Deployments, StatefulSets, DaemonSets and Jobs. Their failures to
//! create pods, and settings of the mesh in the wrong place.

use std::collections::{BTreeMap, BTreeSet};

use diy_mesh_injector::annotations::{INJECT, PREFIX};
use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment, StatefulSet},
        batch::v1::Job,
        core::v1::{Event, PodTemplateSpec},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{Client, api::ListParams};

use super::{
    Finding, Findings, count,
    facts::{Fact, Facts},
    or_ok, pods,
};
use crate::cluster::{list, objects};

/// A controller of pods.
#[derive(Clone, Debug)]
pub struct Workload {
    kind: &'static str,
    pub(super) namespace: String,
    name: String,
    /// The annotations and labels of the workload itself.
    own: BTreeMap<String, String>,
    /// The annotations of its pods.
    template: BTreeMap<String, String>,
    /// The labels of its pods.
    pub(super) labels: BTreeMap<String, String>,
    /// The error that prevents the creation of pods.
    failure: Option<String>,
}

/// Lists the workloads of a namespace, or of all.
pub(super) async fn read(client: &Client, only: Option<&str>) -> Fact<Vec<Workload>> {
    let all = ListParams::default();
    let failures = ListParams::default().fields("reason=FailedCreate");
    let (deployments, stateful_sets, daemon_sets, jobs, events) = tokio::try_join!(
        list::<Deployment>(objects(client, only), &all),
        list::<StatefulSet>(objects(client, only), &all),
        list::<DaemonSet>(objects(client, only), &all),
        list::<Job>(objects(client, only), &all),
        list::<Event>(objects(client, only), &failures),
    )?;
    let deployments = deployments.iter().map(deployment);
    let stateful_sets = stateful_sets.iter().map(|set| stateful_set(set, &events));
    let daemon_sets = daemon_sets.iter().map(|set| daemon_set(set, &events));
    let jobs = jobs.iter().map(|item| job(item, &events));
    let workloads = deployments.chain(stateful_sets).chain(daemon_sets);
    Ok(workloads.chain(jobs).flatten().collect())
}

pub(super) fn deployment(deployment: &Deployment) -> Option<Workload> {
    let conditions = deployment
        .status
        .iter()
        .flat_map(|status| &status.conditions);
    let failure = conditions
        .flatten()
        .find(|condition| condition.type_ == "ReplicaFailure" && condition.status == "True")
        .map(|condition| {
            let reason = condition.reason.as_deref().unwrap_or("ReplicaFailure");
            format!(
                "{reason}: {}",
                condition.message.as_deref().unwrap_or_default()
            )
        });
    let template = &deployment.spec.as_ref()?.template;
    let workload = workload("Deployment", &deployment.metadata, template)?;
    Some(Workload {
        failure,
        ..workload
    })
}

fn stateful_set(set: &StatefulSet, events: &[Event]) -> Option<Workload> {
    let spec = set.spec.as_ref()?;
    let current = set.status.as_ref().map_or(0, |status| status.replicas);
    let is_incomplete = current < spec.replicas.unwrap_or(1);
    let workload = workload("StatefulSet", &set.metadata, &spec.template)?;
    Some(workload.with_failure(is_incomplete, events))
}

fn daemon_set(set: &DaemonSet, events: &[Event]) -> Option<Workload> {
    let is_incomplete = set
        .status
        .as_ref()
        .is_some_and(|status| status.current_number_scheduled < status.desired_number_scheduled);
    let workload = workload("DaemonSet", &set.metadata, &set.spec.as_ref()?.template)?;
    Some(workload.with_failure(is_incomplete, events))
}

/// `None` for a Job that has finished.
fn job(job: &Job, events: &[Event]) -> Option<Workload> {
    let (spec, status) = (job.spec.as_ref()?, job.status.clone().unwrap_or_default());
    let mut conditions = status.conditions.iter().flatten();
    if conditions.any(|condition| {
        matches!(condition.type_.as_str(), "Complete" | "Failed") && condition.status == "True"
    }) {
        return None;
    }
    let parallelism = spec.parallelism.unwrap_or(1);
    let left = spec.completions.unwrap_or(parallelism) - status.succeeded.unwrap_or(0);
    let is_incomplete =
        spec.suspend != Some(true) && status.active.unwrap_or(0) < parallelism.min(left);
    let workload = workload("Job", &job.metadata, &spec.template)?;
    Some(workload.with_failure(is_incomplete, events))
}

fn workload(
    kind: &'static str,
    metadata: &ObjectMeta,
    template: &PodTemplateSpec,
) -> Option<Workload> {
    let own = metadata.annotations.iter().chain(&metadata.labels);
    let own = own
        .flatten()
        .map(|(name, value)| (name.clone(), value.clone()));
    let template = template.metadata.clone().unwrap_or_default();
    Some(Workload {
        kind,
        namespace: metadata.namespace.clone()?,
        name: metadata.name.clone()?,
        own: own.collect(),
        template: template.annotations.unwrap_or_default(),
        labels: template.labels.unwrap_or_default(),
        failure: None,
    })
}

impl Workload {
    /// Adds the last `FailedCreate` event if pods are missing. Only Deployments have a condition
    /// for it.
    fn with_failure(mut self, is_incomplete: bool, events: &[Event]) -> Self {
        let own = events.iter().filter(|event| {
            let object = &event.involved_object;
            object.kind.as_deref() == Some(self.kind)
                && object.namespace.as_ref() == Some(&self.namespace)
                && object.name.as_ref() == Some(&self.name)
        });
        let last = own.max_by_key(|event| event.last_timestamp.clone());
        self.failure = last.filter(|_| is_incomplete).map(|event| {
            let message = event.message.as_deref().unwrap_or_default();
            format!("FailedCreate: {message}")
        });
        self
    }

    fn requests_injection(&self, enabled_namespaces: &BTreeSet<String>) -> bool {
        match self.template.get(INJECT) {
            Some(value) => value.eq_ignore_ascii_case("true"),
            None => enabled_namespaces.contains(&self.namespace),
        }
    }

    fn describe(&self, text: &str) -> String {
        format!("{} {}/{}: {text}", self.kind, self.namespace, self.name)
    }
}

/// Workloads that request injection can create their pods, and their own metadata contains no
/// settings of pods.
pub(super) fn workloads(facts: &Facts) -> Findings<'_> {
    let workloads = facts.workloads.as_ref()?;
    let enabled = facts
        .namespaces
        .as_deref()
        .map(pods::enabled)
        .unwrap_or_default();
    let requesting = workloads
        .iter()
        .filter(|workload| workload.requests_injection(&enabled));
    let requested = requesting.clone().count();
    let failed: Vec<String> = requesting
        .filter_map(|workload| Some(workload.describe(workload.failure.as_deref()?)))
        .collect();
    let misplaced: Vec<String> = workloads
        .iter()
        .filter_map(|workload| {
            let name = workload.own.keys().find(|name| name.starts_with(PREFIX))?;
            Some(workload.describe(name))
        })
        .collect();
    let advice = "remove the cause in the message; Kubernetes then retries";
    let finding = Finding::problem("injection and cannot create pods", advice);
    let failed = finding.about(failed, "workload requests", "workloads request");
    let text = "a setting of pods in its own metadata, where it has no effect";
    let finding = Finding::warning(text, "move it to spec.template.metadata.annotations");
    let misplaced = finding.about(misplaced, "workload has", "workloads have");
    let requested = count(requested, "workload requests", "workloads request");
    let text = format!("{requested} injection, and can create pods");
    Ok(or_ok([failed, misplaced], text))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{
        Level,
        facts::testing::{object, unknown_facts},
    };
    use super::*;

    const QUOTA: &str = "pods \"web-1\" is forbidden: exceeded quota: small";

    fn findings(workload: Option<Workload>) -> Vec<Finding> {
        workloads(&Facts {
            workloads: Ok(vec![workload.expect("a complete object")]),
            ..unknown_facts()
        })
        .unwrap()
    }

    fn template(inject: &str) -> Value {
        json!({"metadata": {"annotations": {INJECT: inject}}, "spec": {"containers": []}})
    }

    #[test]
    fn reports_deployments_that_cannot_create_pods() {
        let web = |inject: &str, status: &str| {
            findings(deployment(&object(json!({
                "metadata": {"namespace": "shop", "name": "web"},
                "spec": {"selector": {}, "template": template(inject)},
                "status": {"conditions": [
                    {"type": "Available", "status": "True"},
                    {"type": "ReplicaFailure", "status": status, "reason": "FailedCreate", "message": QUOTA},
                ]},
            }))))
        };
        let finding = &web("true", "True")[0];
        assert_eq!(finding.level, Level::Problem);
        assert_eq!(
            finding.details,
            [format!("Deployment shop/web: FailedCreate: {QUOTA}")]
        );
        assert_eq!(web("true", "False")[0].level, Level::Ok);
        assert_eq!(web("false", "True")[0].level, Level::Ok);
    }

    #[test]
    fn reports_stateful_and_daemon_sets_that_cannot_create_pods() {
        let event = |kind: &str, time: &str, message: &str| {
            object(json!({
                "metadata": {}, "reason": "FailedCreate", "message": message, "lastTimestamp": time,
                "involvedObject": {"kind": kind, "namespace": "shop", "name": "db"},
            }))
        };
        let events: [Event; 3] = [
            event("StatefulSet", "2026-01-02T00:00:00Z", QUOTA),
            event("StatefulSet", "2026-01-01T00:00:00Z", "earlier"),
            event("DaemonSet", "2026-01-01T00:00:00Z", "denied"),
        ];
        let db = |replicas: i32| {
            let set = json!({
                "metadata": {"namespace": "shop", "name": "db"},
                "spec": {"replicas": 2, "selector": {}, "serviceName": "db", "template": template("true")},
                "status": {"replicas": replicas},
            });
            findings(stateful_set(&object(set), &events))
        };
        assert_eq!(
            db(1)[0].details,
            [format!("StatefulSet shop/db: FailedCreate: {QUOTA}")]
        );
        assert_eq!(db(2)[0].level, Level::Ok, "the event is old");
        let set = json!({
            "metadata": {"namespace": "shop", "name": "db"},
            "spec": {"selector": {}, "template": template("true")},
            "status": {"currentNumberScheduled": 0, "desiredNumberScheduled": 1, "numberMisscheduled": 0, "numberReady": 0},
        });
        let findings = findings(daemon_set(&object(set), &events));
        assert_eq!(
            findings[0].details,
            ["DaemonSet shop/db: FailedCreate: denied"]
        );
    }

    #[test]
    fn reports_jobs_that_cannot_create_pods() {
        let event = object(json!({
            "metadata": {}, "reason": "FailedCreate", "message": QUOTA,
            "involvedObject": {"kind": "Job", "namespace": "shop", "name": "db"},
        }));
        let db = |status: Value| {
            let job = json!({
                "metadata": {"namespace": "shop", "name": "db"},
                "spec": {"parallelism": 2, "completions": 3, "template": template("true")},
                "status": status,
            });
            job_findings(&object(job), &event)
        };
        let expected = [format!("Job shop/db: FailedCreate: {QUOTA}")];
        assert_eq!(db(json!({}))[0].details, expected);
        assert_eq!(
            db(json!({"active": 1, "succeeded": 1}))[0].details,
            expected
        );
        let created = json!({"active": 1, "succeeded": 2});
        assert_eq!(db(created)[0].level, Level::Ok, "the event is old");
        let finished = json!({"conditions": [{"type": "Failed", "status": "True"}]});
        assert_eq!(db(finished)[0].level, Level::Ok);
    }

    fn job_findings(item: &Job, event: &Event) -> Vec<Finding> {
        workloads(&Facts {
            workloads: Ok(job(item, std::slice::from_ref(event)).into_iter().collect()),
            ..unknown_facts()
        })
        .unwrap()
    }

    #[test]
    fn warns_of_settings_in_the_metadata_of_the_workload() {
        let web = json!({
            "metadata": {"namespace": "shop", "name": "web", "annotations": {INJECT: "true"}},
            "spec": {"selector": {}, "template": {"spec": {"containers": []}}},
        });
        let finding = &findings(deployment(&object(web)))[0];
        assert_eq!(finding.level, Level::Warning);
        assert_eq!(finding.details, [format!("Deployment shop/web: {INJECT}")]);
    }
}
