//! The workloads of the cluster: Deployments, StatefulSets, DaemonSets and Jobs. Their failures to
//! create pods, and settings of the mesh in the wrong place.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use diy_mesh_injector::annotations::{INJECT, PREFIX};
use diy_mesh_model::json;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment, StatefulSet},
    batch::v1::Job,
    core::v1::Event,
};
use kube::{Client, Resource, api::ListParams};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::facts::{Fact, Facts};
use super::{Finding, Findings, count, injection, or_ok};
use crate::cluster::{list, objects};
use crate::routes::{list as list_of, text};

/// A controller of pods.
#[derive(Clone, Debug)]
pub struct Workload {
    kind: String,
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

/// Reads the workloads of a namespace, or of all.
pub(super) async fn read(client: &Client, only: Option<&str>) -> Fact<Vec<Workload>> {
    let failures = ListParams::default().fields("reason=FailedCreate");
    let (deployments, stateful_sets, daemon_sets, jobs, events) = tokio::try_join!(
        values::<Deployment>(client, only),
        values::<StatefulSet>(client, only),
        values::<DaemonSet>(client, only),
        values::<Job>(client, only),
        list::<Event>(objects(client, only), &failures),
    )?;
    let all = [deployments, stateful_sets, daemon_sets, jobs].concat();
    let read = all.iter().filter_map(|object| workload(object, &events));
    Ok(read.collect())
}

async fn values<K>(client: &Client, only: Option<&str>) -> Fact<Vec<Value>>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    K: Clone + Debug + DeserializeOwned + Serialize,
{
    let items: Vec<K> = list(objects(client, only), &ListParams::default()).await?;
    Ok(items.iter().map(|item| json!(item)).collect())
}

/// `None` for a Job that has finished.
pub(super) fn workload(object: &Value, events: &[Event]) -> Option<Workload> {
    let (spec, status) = (&object["spec"], &object["status"]);
    let [kind, namespace, name] = [
        &object["kind"],
        &object["metadata"]["namespace"],
        &object["metadata"]["name"],
    ]
    .map(text);
    let condition = |kinds: &[&str]| {
        let mut conditions = list_of(&status["conditions"]);
        conditions.find(|one| one["status"] == "True" && kinds.contains(&&*text(&one["type"])))
    };
    let number = |value: &Value, default: i64| value.as_i64().unwrap_or(default);
    let is_incomplete = match &*kind {
        "StatefulSet" => number(&status["replicas"], 0) < number(&spec["replicas"], 1),
        "DaemonSet" => {
            let (current, desired) = ("currentNumberScheduled", "desiredNumberScheduled");
            number(&status[current], 0) < number(&status[desired], 0)
        }
        "Job" if condition(&["Complete", "Failed"]).is_some() => return None,
        "Job" => {
            let parallelism = number(&spec["parallelism"], 1);
            let left = number(&spec["completions"], parallelism) - number(&status["succeeded"], 0);
            spec["suspend"] != true && number(&status["active"], 0) < parallelism.min(left)
        }
        _ => false,
    };
    // Only Deployments have a condition for it.
    let failure = condition(&["ReplicaFailure"]).map(|condition| {
        let reason = condition["reason"].as_str().unwrap_or("ReplicaFailure");
        format!("{reason}: {}", text(&condition["message"]))
    });
    let own = events.iter().filter(|event| {
        let object = &event.involved_object;
        let own = [&kind, &namespace, &name].map(Some);
        [&object.kind, &object.namespace, &object.name].map(Option::as_ref) == own
    });
    let last = own.max_by_key(|event| event.last_timestamp.clone());
    let event = last.filter(|_| is_incomplete).map(|event| {
        let message = event.message.as_deref().unwrap_or_default();
        format!("FailedCreate: {message}")
    });
    let metadata = |of: &Value| -> [BTreeMap<String, String>; 2] {
        let fields = ["annotations", "labels"].map(|field| &of["metadata"][field]);
        fields.map(|field| json::read(field).unwrap_or_default())
    };
    let [template, labels] = metadata(&spec["template"]);
    Some(Workload {
        kind,
        namespace,
        name,
        own: metadata(object).into_iter().flatten().collect(),
        template,
        labels,
        failure: failure.or(event),
    })
}

impl Workload {
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
        .map(injection::enabled)
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
            let deployment = json!({
                "kind": "Deployment", "metadata": {"namespace": "shop", "name": "web"},
                "spec": {"selector": {}, "template": template(inject)},
                "status": {"conditions": [
                    {"type": "Available", "status": "True"},
                    {"type": "ReplicaFailure", "status": status, "reason": "FailedCreate", "message": QUOTA},
                ]},
            });
            findings(workload(&deployment, &[]))
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
                "kind": "StatefulSet", "metadata": {"namespace": "shop", "name": "db"},
                "spec": {"replicas": 2, "selector": {}, "serviceName": "db", "template": template("true")},
                "status": {"replicas": replicas},
            });
            findings(workload(&set, &events))
        };
        assert_eq!(
            db(1)[0].details,
            [format!("StatefulSet shop/db: FailedCreate: {QUOTA}")]
        );
        assert_eq!(db(2)[0].level, Level::Ok, "the event is old");
        let set = json!({
            "kind": "DaemonSet", "metadata": {"namespace": "shop", "name": "db"},
            "spec": {"selector": {}, "template": template("true")},
            "status": {"currentNumberScheduled": 0, "desiredNumberScheduled": 1, "numberMisscheduled": 0, "numberReady": 0},
        });
        let findings = findings(workload(&set, &events));
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
                "kind": "Job", "metadata": {"namespace": "shop", "name": "db"},
                "spec": {"parallelism": 2, "completions": 3, "template": template("true")},
                "status": status,
            });
            job_findings(&job, &event)
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

    fn job_findings(job: &Value, event: &Event) -> Vec<Finding> {
        workloads(&Facts {
            workloads: Ok(workload(job, std::slice::from_ref(event))
                .into_iter()
                .collect()),
            ..unknown_facts()
        })
        .unwrap()
    }

    #[test]
    fn warns_of_settings_in_the_metadata_of_the_workload() {
        let web = json!({
            "kind": "Deployment",
            "metadata": {"namespace": "shop", "name": "web", "annotations": {INJECT: "true"}},
            "spec": {"selector": {}, "template": {"spec": {"containers": []}}},
        });
        let finding = &findings(workload(&web, &[]))[0];
        assert_eq!(finding.level, Level::Warning);
        assert_eq!(finding.details, [format!("Deployment shop/web: {INJECT}")]);
    }
}
