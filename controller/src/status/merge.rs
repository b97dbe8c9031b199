//! The entries of the mesh in `status.parents` of a route, or in `status.ancestors` of a policy, and
//! its conditions of an XMesh. Pure: from the object in the cluster and the conditions that the mesh computes to the status to
//! write.
//!
//! The list is atomic, and other controllers have entries in it. Their entries, and what the mesh
//! does not know in its own, stay as they are.

use kube::core::DynamicObject;
use serde_json::{Map, Value, json};

use super::programmed::PROGRAMMED;
use crate::kinds::authorization::keys;
use crate::kinds::mesh::FEATURES;
use crate::object::status::CONTROLLER_NAME;
use crate::object::{Condition, Kind, ObjectStatus, TargetStatus};

/// The API server accepts 32 KiB.
const MAX_MESSAGE_BYTES: usize = 2048;

/// The fields of a kind with its references, and with the entries of its status.
struct Fields {
    references: &'static str,
    entries: &'static str,
    reference: &'static str,
    /// The API server rejects more entries.
    max_entries: usize,
}

const ROUTE: Fields = Fields {
    references: "parentRefs",
    entries: "parents",
    reference: "parentRef",
    max_entries: 32,
};

/// GEP-713, PolicyStatus.
const POLICY: Fields = Fields {
    references: "targetRefs",
    entries: "ancestors",
    reference: "ancestorRef",
    max_entries: 16,
};

/// The status of an object with the entries that the mesh computes; without `desired`, without those
/// whose parents the object no longer has. `None` if there is nothing to change. `now` is the time
/// of transitions.
pub fn merge(
    kind: Kind,
    object: &DynamicObject,
    desired: Option<&ObjectStatus>,
    now: &str,
) -> Option<Value> {
    let fields = match kind {
        Kind::Mesh => return merge_mesh(object, desired?, now),
        Kind::TrafficPolicy | Kind::Authorization => POLICY,
        _ => ROUTE,
    };
    let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
    let before = object.data["status"][fields.entries].as_array();
    let before = before.map(Vec::as_slice).unwrap_or_default();
    let latest = object.metadata.generation.unwrap_or(i64::MAX);
    let mut missing: Vec<&TargetStatus> = desired.iter().flat_map(|one| &one.parents).collect();
    let mut parents = Vec::new();
    for entry in before {
        if entry["controllerName"] != CONTROLLER_NAME {
            parents.push(entry.clone());
            continue;
        }
        let reference = &entry[fields.reference];
        let Some(desired) = desired else {
            let current = object.data["spec"][fields.references].as_array();
            let is_current = |parent: &Value| normalized(parent, namespace);
            let mut current = current.into_iter().flatten().map(is_current);
            if current.any(|parent| parent == normalized(reference, namespace)) {
                parents.push(entry.clone());
            }
            continue;
        };
        let is_same = |status: &TargetStatus| {
            normalized(&json!(status.parent), namespace) == normalized(reference, namespace)
        };
        // An entry without a parent, or a second one for the same parent, is removed.
        if let Some(index) = missing.iter().position(|status| is_same(status)) {
            let status = missing.remove(index);
            parents.push(updated(entry, status, desired, latest, now));
        }
    }
    for (status, desired) in missing.into_iter().zip(desired.into_iter().cycle()) {
        let entry = json!({
            fields.reference: status.parent, "controllerName": CONTROLLER_NAME,
        });
        parents.push(updated(&entry, status, desired, latest, now));
    }
    parents.truncate(fields.max_entries);
    let issuers = desired.and_then(|desired| keys::merge(&desired.issuers, &object.data["status"]));
    if parents == before && issuers.is_none() {
        return None;
    }
    let mut status = match &object.data["status"] {
        Value::Object(status) => status.clone(),
        _ => Map::new(),
    };
    status.insert(fields.entries.into(), parents.into());
    status.extend(issuers.map(|issuers| ("issuers".to_owned(), issuers)));
    Some(status.into())
}

/// The status of an XMesh with the conditions and the features of the mesh.
fn merge_mesh(object: &DynamicObject, desired: &ObjectStatus, now: &str) -> Option<Value> {
    let before = &object.data["status"];
    let latest = object.metadata.generation.unwrap_or(i64::MAX);
    let mut status = updated(before, desired.parents.first()?, desired, latest, now);
    let features = FEATURES.iter().map(|name| json!({"name": name}));
    status["supportedFeatures"] = features.collect();
    (status != *before).then_some(status)
}

/// An entry of the mesh with these conditions. `latest` is the generation of the object.
fn updated(
    entry: &Value,
    status: &TargetStatus,
    desired: &ObjectStatus,
    latest: i64,
    now: &str,
) -> Value {
    let ObjectStatus {
        generation,
        keeps_programmed,
        ..
    } = *desired;
    let before = entry["conditions"].as_array();
    let before = before.map(Vec::as_slice).unwrap_or_default();
    let observed = |condition: &Value| condition["observedGeneration"].as_i64().unwrap_or(0);
    // Another replica knows a later generation of the route. One that the route has not reached is
    // from before its restoration from a backup.
    let is_later = |at: i64| at > generation && at <= latest;
    if before.iter().any(|one| is_later(observed(one))) {
        return entry.clone();
    }
    let mut conditions: Vec<Value> = Vec::new();
    for old in before {
        match status.conditions.iter().find(|new| old["type"] == new.kind) {
            Some(new) => conditions.push(condition(new, Some(old), generation, now)),
            None if keeps_programmed && old["type"] == PROGRAMMED => conditions.push(old.clone()),
            None if is_of_others(&old["type"]) => conditions.push(old.clone()),
            None => {}
        }
    }
    for new in &status.conditions {
        if !before.iter().any(|old| old["type"] == new.kind) {
            conditions.push(condition(new, None, generation, now));
        }
    }
    let mut entry = entry.clone();
    entry["conditions"] = conditions.into();
    entry
}

/// Whether a type of conditions has another domain than the domain of the mesh.
fn is_of_others(kind: &Value) -> bool {
    let kind = kind.as_str().and_then(|kind| kind.split_once('/'));
    kind.is_some_and(|(domain, _)| domain != crate::object::kind::GROUP)
}

/// A condition, with the time of its last transition.
fn condition(new: &Condition, old: Option<&Value>, generation: i64, now: &str) -> Value {
    let status = new.status();
    let unchanged = old.filter(|old| old["status"] == status);
    let since = unchanged.and_then(|old| old["lastTransitionTime"].as_str());
    let message = &new.message[..new.message.floor_char_boundary(MAX_MESSAGE_BYTES)];
    json!({
        "type": new.kind, "status": status, "reason": new.reason, "message": message,
        "observedGeneration": new.generation.unwrap_or(generation),
        "lastTransitionTime": since.unwrap_or(now),
    })
}

/// A reference with the defaults of the Gateway API. Equal for references to the same parent.
fn normalized(reference: &Value, namespace: &str) -> [Value; 6] {
    let or = |field: &str, default: &str| match &reference[field] {
        Value::Null => default.into(),
        value => value.clone(),
    };
    [
        or("group", "gateway.networking.k8s.io"),
        or("kind", "Gateway"),
        or("namespace", namespace),
        or("name", ""),
        or("sectionName", ""),
        reference["port"].clone(),
    ]
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use kube::core::ApiResource;

    use super::*;
    use crate::object::condition::{APPLIES_TO_ALL_PODS, OLDER_SERVICE};
    use crate::status::testing::{KIND, accepted, service, status};

    const NOW: &str = "2026-11-22T09:00:00Z";
    const LATER: &str = "2026-11-22T10:00:00Z";

    fn route(parents: Value) -> DynamicObject {
        let route = json!({
            "metadata": {"namespace": "shop", "name": "web", "generation": 2},
            "spec": {"parentRefs": [{"group": "", "kind": "Service", "name": "web", "port": 80}]},
            "status": {"parents": parents},
        });
        serde_json::from_value(route).unwrap()
    }

    fn gateway() -> Value {
        json!({
            "parentRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "edge"},
            "controllerName": "example.net/gateway", "unknown": {"z": 1, "a": [null]},
            "conditions": [{"type": "Accepted", "status": "Unknown", "reason": "Pending",
                "message": "", "lastTransitionTime": "2020-01-01T00:00:00Z"}],
        })
    }

    fn entries(status: &Value) -> &Vec<Value> {
        status["parents"].as_array().unwrap()
    }

    #[test]
    fn adds_an_entry_and_leaves_those_of_others_alone() {
        let mut object = route(json!([gateway()]));
        object.data["status"]["other"] = json!("stays");
        let desired = status(2, vec![service("web", Some(80), vec![accepted(true)])]);
        let merged = merge(KIND, &object, Some(&desired), NOW).unwrap();
        assert_eq!(merged["other"], "stays");
        let [first, second] = &entries(&merged)[..] else {
            panic!("{merged}")
        };
        assert_eq!(*first, gateway());
        let expected = json!({
            "parentRef": {"group": "", "kind": "Service", "name": "web", "port": 80},
            "controllerName": "diy-service-mesh.dev/controller",
            "conditions": [{"type": "Accepted", "status": "True", "reason": "Accepted",
                "message": "", "observedGeneration": 2, "lastTransitionTime": NOW}],
        });
        assert_eq!(*second, expected);
        object.data["status"] = merged;
        assert_eq!(merge(KIND, &object, Some(&desired), LATER), None);
    }

    #[test]
    fn transition_time_changes_with_the_status_only() {
        let desired = |generation, holds| {
            status(
                generation,
                vec![service("web", None, vec![accepted(holds)])],
            )
        };
        let mut object = route(json!([]));
        let mut merged_at = |generation, holds, now| {
            let merged = merge(KIND, &object, Some(&desired(generation, holds)), now).unwrap();
            object.data["status"] = merged.clone();
            merged["parents"][0]["conditions"][0].clone()
        };
        assert_eq!(merged_at(1, true, NOW)["lastTransitionTime"], NOW);
        let same = merged_at(2, true, LATER);
        assert_eq!(same["lastTransitionTime"], NOW);
        assert_eq!(same["observedGeneration"], 2);
        let changed = merged_at(3, false, LATER);
        assert_eq!(changed["lastTransitionTime"], LATER);
        assert_eq!(changed["status"], "False");
    }

    #[test]
    fn removes_entries_without_a_parent() {
        let desired = status(2, vec![service("web", Some(80), vec![accepted(true)])]);
        let ours = |name: &str, port: Value| {
            json!({"parentRef": {"group": "", "kind": "Service", "name": name, "port": port},
                "controllerName": CONTROLLER_NAME, "conditions": []})
        };
        let old = [
            ours("old", json!(80)),
            ours("web", json!(80)),
            ours("web", json!(80)),
        ];
        let object = route(json!([old[0], gateway(), old[1], old[2]]));
        let merged = merge(KIND, &object, Some(&desired), NOW).unwrap();
        let names: Vec<&Value> = entries(&merged)
            .iter()
            .map(|entry| &entry["parentRef"]["name"])
            .collect();
        assert_eq!(names, ["edge", "web"]);
        // Without computed conditions, only the route itself says that a parent is gone.
        let merged = merge(KIND, &object, None, NOW).unwrap();
        assert_eq!(entries(&merged).len(), 3);
        assert_eq!(merge(KIND, &route(json!([gateway()])), None, NOW), None);
        assert_eq!(
            merge(
                KIND,
                &DynamicObject::new("web", &ApiResource::erase::<Pod>(&())),
                None,
                NOW
            ),
            None
        );
    }

    #[test]
    fn references_are_compared_with_their_defaults() {
        let mut parent = service("web", Some(80), vec![accepted(true)]);
        parent.parent.namespace = Some("shop".into());
        let object = route(json!([]));
        let merged = merge(KIND, &object, Some(&status(2, vec![parent])), NOW).unwrap();
        let mut object = route(merged["parents"].clone());
        let desired = status(2, vec![service("web", Some(80), vec![accepted(true)])]);
        assert_eq!(merge(KIND, &object, Some(&desired), NOW), None);
        // Another port is another parent.
        object.data["status"]["parents"][0]["parentRef"]["port"] = json!(81);
        let merged = merge(KIND, &object, Some(&desired), NOW).unwrap();
        assert_eq!(merged["parents"][0]["parentRef"]["port"], 80);
        assert_eq!(entries(&merged).len(), 1);
    }

    #[test]
    fn conditions_of_others_stay_and_former_ones_of_the_mesh_do_not() {
        let object = route(json!([{
            "parentRef": {"group": "", "kind": "Service", "name": "web"},
            "controllerName": CONTROLLER_NAME,
            "conditions": [
                {"type": "example.net/Audited", "status": "True"},
                {"type": "PartiallyInvalid", "status": "True"},
                {"type": "diy-service-mesh.dev/Enforced", "status": "False"},
                {"type": PROGRAMMED, "status": "True"},
            ],
        }]));
        let mut desired = status(2, vec![service("web", None, vec![accepted(false)])]);
        let kinds = |desired: &ObjectStatus| -> Vec<Value> {
            let merged = merge(KIND, &object, Some(desired), NOW).unwrap();
            let conditions = merged["parents"][0]["conditions"].as_array().unwrap();
            conditions.iter().map(|one| one["type"].clone()).collect()
        };
        assert_eq!(kinds(&desired), ["example.net/Audited", "Accepted"]);
        // This replica does not know yet what the proxies do.
        desired.keeps_programmed = true;
        let kept = ["example.net/Audited", PROGRAMMED, "Accepted"];
        assert_eq!(kinds(&desired), kept);
    }

    #[test]
    fn condition_may_be_about_an_earlier_generation() {
        let earlier = Condition {
            kind: PROGRAMMED,
            generation: Some(1),
            ..accepted(true)
        };
        let conditions = vec![accepted(true), earlier];
        let desired = status(2, vec![service("web", None, conditions)]);
        let merged = merge(KIND, &route(json!([])), Some(&desired), NOW).unwrap();
        let conditions = &merged["parents"][0]["conditions"];
        let observed = [0, 1].map(|at| conditions[at]["observedGeneration"].clone());
        assert_eq!(observed, [2, 1]);
    }

    #[test]
    fn condition_about_pods_is_written_kept_and_removed_beside_those_of_others() {
        let audited = json!({"type": "example.net/Audited", "status": "True"});
        let mut object = route(json!([gateway(), {
            "parentRef": {"group": "", "kind": "Service", "name": "web"},
            "controllerName": CONTROLLER_NAME, "conditions": [audited],
        }]));
        let older = |message: &str| Condition {
            kind: APPLIES_TO_ALL_PODS,
            reason: OLDER_SERVICE,
            message: message.to_owned(),
            ..accepted(false)
        };
        let mut merged_with = |conditions: Vec<Condition>, now| {
            let desired = status(2, vec![service("web", None, conditions)]);
            let merged = merge(KIND, &object, Some(&desired), now)?;
            assert_eq!(merged["parents"][0], gateway());
            object.data["status"] = merged.clone();
            Some(merged["parents"][1]["conditions"].clone())
        };
        let kinds = |conditions: &Value| -> Vec<String> {
            let all = conditions.as_array().unwrap().iter();
            all.map(|one| one["type"].as_str().unwrap().to_owned())
                .collect()
        };
        let written = merged_with(vec![accepted(true), older("2 pods")], NOW).unwrap();
        let expected = ["example.net/Audited", "Accepted", APPLIES_TO_ALL_PODS];
        assert_eq!(kinds(&written), expected);
        assert_eq!(written[2]["status"], "False");
        assert_eq!(written[2]["reason"], "OlderService");
        let same = vec![accepted(true), older("2 pods")];
        assert_eq!(merged_with(same, LATER), None);
        let other = merged_with(vec![accepted(true), older("1 pod")], LATER).unwrap();
        assert_eq!(other[2]["message"], "1 pod");
        assert_eq!(other[2]["lastTransitionTime"], NOW);
        let removed = merged_with(vec![accepted(true)], LATER).unwrap();
        assert_eq!(kinds(&removed), expected[..2]);
    }

    #[test]
    fn never_replaces_conditions_of_a_later_generation() {
        let object = |generation| {
            let mut object = route(json!([{
                "parentRef": {"group": "", "kind": "Service", "name": "web"},
                "controllerName": CONTROLLER_NAME,
                "conditions": [{"type": "Accepted", "status": "True", "observedGeneration": 7}],
            }]));
            object.metadata.generation = Some(generation);
            object
        };
        let desired = |generation| {
            status(
                generation,
                vec![service("web", None, vec![accepted(false)])],
            )
        };
        assert_eq!(merge(KIND, &object(7), Some(&desired(6)), NOW), None);
        assert!(merge(KIND, &object(7), Some(&desired(7)), NOW).is_some());
        // Restored from a backup with its status, the route begins again at generation 1.
        let merged = merge(KIND, &object(1), Some(&desired(1)), NOW).unwrap();
        let condition = &merged["parents"][0]["conditions"][0];
        assert_eq!(
            (&condition["status"], &condition["observedGeneration"]),
            (&json!("False"), &json!(1))
        );
    }

    #[test]
    fn messages_and_lists_have_the_sizes_that_the_api_server_accepts() {
        let mut condition = accepted(false);
        condition.message = "ä".repeat(40_000);
        let parents: Vec<_> = (0..40)
            .map(|number| service(&format!("web-{number}"), None, vec![condition.clone()]))
            .collect();
        let merged = merge(
            KIND,
            &route(json!([gateway()])),
            Some(&status(2, parents)),
            NOW,
        )
        .unwrap();
        assert_eq!(entries(&merged).len(), 32);
        assert_eq!(merged["parents"][0], gateway());
        let message = merged["parents"][1]["conditions"][0]["message"]
            .as_str()
            .unwrap();
        assert_eq!(message.len(), MAX_MESSAGE_BYTES);
    }

    #[test]
    fn policies_have_entries_for_their_targets() {
        let target = json!({"group": "", "kind": "Service", "name": "web"});
        let policy = json!({
            "metadata": {"namespace": "shop", "name": "web", "generation": 2},
            "spec": {"targetRefs": [target]},
        });
        let mut object: DynamicObject = serde_json::from_value(policy).unwrap();
        let kind = Kind::TrafficPolicy;
        let desired = status(2, vec![service("web", None, vec![accepted(true)])]);
        let merged = merge(kind, &object, Some(&desired), NOW).unwrap();
        let [entry] = &merged["ancestors"].as_array().unwrap()[..] else {
            panic!("{merged}")
        };
        assert_eq!(entry["ancestorRef"], target);
        assert_eq!(entry["controllerName"], CONTROLLER_NAME);
        assert_eq!(entry["conditions"][0]["observedGeneration"], 2);
        object.data["status"] = merged;
        assert_eq!(merge(kind, &object, Some(&desired), LATER), None);
        assert_eq!(
            merge(kind, &object, None, LATER),
            None,
            "the target remains"
        );
        object.data["spec"]["targetRefs"] = json!([]);
        let merged = merge(kind, &object, None, LATER).unwrap();
        assert_eq!(merged["ancestors"], json!([]));
    }
}
