//! The judgement of this release about the routes and policies of the cluster. It has the objects
//! that this release judges differently than the controllers that wrote their conditions, and the
//! errors of objects without conditions.

use std::collections::{BTreeMap, BTreeSet};

use diy_mesh_controller::explain;
use diy_mesh_controller::object::condition::PARTIALLY_INVALID;
use diy_mesh_controller::object::{Kind, ObjectStatus};
use diy_mesh_controller::status::merge::merge;
use diy_mesh_model::json;
use kube::core::DynamicObject;
use serde_json::Value;

use super::facts::Facts;
use super::{Finding, Findings, or_ok};
use crate::routes::{conditions, text};

/// The conditions that the objects of the cluster alone decide.
const JUDGEMENTS: [&str; 3] = ["Accepted", "ResolvedRefs", PARTIALLY_INVALID];

/// The judgement of this release about the objects of the cluster.
#[derive(Clone, Debug, Default)]
pub struct Judgement {
    /// The objects with other conditions than this release would write.
    pub differences: Vec<String>,
    /// The errors of TrafficSplits and TrafficTargets, and of the canary annotations and ports of Services, which have
    /// no conditions.
    pub errors: Vec<String>,
    /// The pods that may be open because an AuthorizationPolicy selects none any longer.
    pub opened: Vec<String>,
}

/// Controllers of this release leave the conditions as they are.
pub(super) fn upgrade(facts: &Facts) -> Findings<'_> {
    let judgement = facts.judgement.as_ref()?;
    let text = "objects that controllers of the release of this program would judge differently";
    let advice =
        "correct them before you upgrade the controllers, or use the program of their release";
    let found = Finding::warning(text, advice).if_any(judgement.differences.clone());
    let text = "this release judges all routes and policies as the controllers do";
    Ok(or_ok([found], text.to_owned()))
}

/// Judges the objects of a cluster.
pub fn judge(objects: &[Value]) -> Judgement {
    let statuses = explain::statuses(objects);
    Judgement {
        differences: differences(objects, &statuses),
        errors: statuses.iter().flat_map(errors).collect(),
        opened: explain::opened(objects),
    }
}

/// The errors of an object without conditions.
fn errors(status: &ObjectStatus) -> Vec<String> {
    let kinds = [Kind::TrafficSplit, Kind::TrafficTarget, Kind::Service];
    if !kinds.contains(&status.kind) {
        return Vec::new();
    }
    let conditions = status.parents.iter().flat_map(|parent| &parent.conditions);
    let problems = conditions.filter(|condition| condition.is_problem());
    let (kind, key) = (status.kind, &status.key);
    let describe = |reason: &str, message: &str| format!("{kind} {key}: {reason}: {message}");
    problems
        .map(|one| describe(one.reason, &one.message))
        .collect()
}

fn differences(objects: &[Value], statuses: &[ObjectStatus]) -> Vec<String> {
    let name = |object: &Value| {
        let metadata = &object["metadata"];
        [&object["kind"], &metadata["namespace"], &metadata["name"]].map(text)
    };
    let by_name: BTreeMap<_, _> = objects.iter().map(|one| (name(one), one)).collect();
    let differences = statuses.iter().filter_map(|status| {
        let (kind, key) = (status.kind.name(), &status.key);
        let object = by_name.get(&[kind, &*key.namespace, &*key.name].map(str::to_owned))?;
        difference(object, status)
    });
    differences.collect()
}

fn difference(object: &Value, desired: &ObjectStatus) -> Option<String> {
    let before = judgements(&object["status"]);
    let is_current = |one: &Value| one["observedGeneration"] == object["metadata"]["generation"];
    // Others wait for a controller.
    if before.is_empty() || !before.iter().all(|(_, one)| is_current(one)) {
        return None;
    }
    let typed: DynamicObject = json::read(object).ok()?;
    let after = merge(desired.kind, &typed, Some(desired), "")?;
    let (before, after) = (described(&before), described(&judgements(&after)));
    let new: Vec<&str> = after.difference(&before).map(|one| &**one).collect();
    let old: Vec<&str> = before.difference(&after).map(|one| &**one).collect();
    let (kind, key) = (desired.kind, &desired.key);
    let names = |all: Vec<&str>| {
        if all.is_empty() {
            "none".to_owned()
        } else {
            all.join(", ")
        }
    };
    (before != after).then(|| format!("{kind} {key}: {} instead of {}", names(new), names(old)))
}

/// The conditions of the mesh in a status, with their parents.
fn judgements(status: &Value) -> Vec<(&Value, &Value)> {
    let is_judgement = |one: &Value| JUDGEMENTS.iter().any(|kind| one["type"] == *kind);
    let conditions = conditions(status);
    conditions.filter(|(_, one)| is_judgement(one)).collect()
}

fn described(judgements: &[(&Value, &Value)]) -> BTreeSet<String> {
    let describe = |(parent, one): &(&Value, &Value)| {
        let [kind, holds, reason] = ["type", "status", "reason"].map(|field| text(&one[field]));
        format!("{kind} {holds} ({reason}) at {}", text(&parent["name"]))
    };
    judgements.iter().map(describe).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{Level, facts::testing::unknown_facts};
    use super::*;
    use crate::routes::CONTROLLER_NAME;

    /// Service shop/web, and HTTPRoute shop/r with a rule and the conditions of a controller.
    fn objects(rule: Value, conditions: Value) -> Vec<Value> {
        let parent = json!({"group": "", "kind": "Service", "name": "web"});
        let service = json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "web", "namespace": "shop"},
            "spec": {"clusterIP": "10.0.0.1", "ports": [{"port": 80}]}});
        let route = json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
            "metadata": {"name": "r", "namespace": "shop", "generation": 2},
            "spec": {"parentRefs": [parent], "rules": [rule]},
            "status": {"parents": [{"parentRef": parent, "controllerName": CONTROLLER_NAME,
                "conditions": conditions}]}});
        vec![service, route]
    }

    fn conditions(generation: i64, accepted: &str, reason: &str) -> Value {
        let condition = |kind: &str, status: &str, reason: &str| {
            json!({"type": kind, "status": status, "reason": reason, "message": "of then",
                "observedGeneration": generation, "lastTransitionTime": "2026-01-01T00:00:00Z"})
        };
        json!([
            condition("Accepted", accepted, reason),
            condition("ResolvedRefs", "True", "ResolvedRefs"),
        ])
    }

    #[test]
    fn objects_that_an_upgrade_judges_differently_are_listed() {
        let valid = || json!({"backendRefs": [{"name": "web", "port": 80}]});
        let invalid = json!({"filters": [{"type": "FilterOfALaterRelease"}]});
        let accepted = |generation| conditions(generation, "True", "Accepted");
        assert_eq!(judge(&objects(valid(), accepted(2))).differences, [""; 0]);
        let refused = conditions(2, "False", "UnsupportedValue");
        let found = judge(&objects(valid(), refused)).differences;
        let expected = "HTTPRoute shop/r: Accepted True (Accepted) at web instead of Accepted False \
                        (UnsupportedValue) at web";
        assert_eq!(found, [expected]);
        let found = judge(&objects(invalid.clone(), accepted(2))).differences;
        assert!(found[0].starts_with("HTTPRoute shop/r: "), "{found:?}");
        // The controllers have not judged this generation.
        assert_eq!(judge(&objects(invalid, accepted(1))).differences, [""; 0]);
        let facts = Facts {
            judgement: Ok(Judgement {
                differences: found,
                ..Judgement::default()
            }),
            ..unknown_facts()
        };
        let finding = upgrade(&facts).unwrap().remove(0);
        assert_eq!((finding.level, finding.details.len()), (Level::Warning, 1));
    }
    #[test]
    fn errors_of_objects_without_conditions_are_listed() {
        let service = |name: &str, annotations: Value| {
            json!({"apiVersion": "v1", "kind": "Service",
                "metadata": {"name": name, "namespace": "shop", "annotations": annotations},
                "spec": {"clusterIP": "10.0.0.1", "ports": [{"port": 80}]}})
        };
        let canary = |weight: &str| {
            let annotations = json!({"diy-service-mesh/canary-of": "web",
                "diy-service-mesh/canary-weight": weight});
            service("web-v2", annotations)
        };
        let split = |backend: &str| {
            json!({"apiVersion": "split.smi-spec.io/v1alpha4", "kind": "TrafficSplit",
                "metadata": {"name": "cart", "namespace": "shop"},
                "spec": {"service": "cart", "backends": [{"service": backend, "weight": 1}]}})
        };
        let errors = |canary: Value, split: Value| {
            let others = ["web", "cart", "cart-v2"].map(|name| service(name, json!({})));
            judge(&[&others[..], &[canary, split]].concat()).errors
        };
        assert_eq!(errors(canary("20"), split("cart-v2")), [""; 0]);
        let found = errors(canary("200"), split("cart-v3")).join("\n");
        for part in [
            "Service shop/web-v2: ",
            "TrafficSplit shop/cart: ",
            "cart-v3",
        ] {
            assert!(found.contains(part), "{found}");
        }
    }
}
