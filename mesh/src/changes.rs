//! The changes of the objects and pods that steer traffic, from their metadata and states. Pure.

use diy_mesh_control_plane::pods::ContainerStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta, Time};
use kube::ResourceExt;
use serde::Serialize;
use serde_json::Value;

use crate::pods::{Pod, name};
use crate::time::format_timestamp;

/// A change of an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// In seconds since 1970.
    #[serde(serialize_with = "rfc3339")]
    pub time: u64,
    /// The kind.
    pub kind: String,
    /// `NAMESPACE/NAME`, or the name of an object of the cluster.
    pub object: String,
    /// For people.
    pub change: String,
    /// The field manager, or the owner that creates pods. Empty if it is not known.
    pub by: String,
}

fn rfc3339<S: serde::Serializer>(time: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format_timestamp(*time))
}

/// The path of the annotation that `kubectl rollout restart` sets, in a set of fields.
const RESTARTED_AT: [&str; 5] = [
    "f:spec",
    "f:template",
    "f:metadata",
    "f:annotations",
    "f:kubectl.kubernetes.io/restartedAt",
];

/// The changes of an object: its creation, the latest one by each field manager, but of the status,
/// and its pending deletion.
pub fn of_object(kind: &str, metadata: &ObjectMeta) -> Vec<Change> {
    let created = metadata.creation_timestamp.as_ref().map_or(0, seconds);
    let managed = || metadata.managed_fields.iter().flatten();
    let at = |entry: &ManagedFieldsEntry| entry.time.as_ref().map_or(0, seconds);
    let mut creators = managed().filter(|one| one.subresource.is_none() && at(one) == created);
    let creator = creators.next().map(manager).unwrap_or_default();
    let creation = (created, "created".to_owned(), creator);
    let later = managed().filter(|entry| at(entry) > created);
    let later = later.filter_map(|entry| {
        let what = changed(entry, metadata.generation == Some(1))?;
        Some((at(entry), what, manager(entry)))
    });
    let deletion = metadata.deletion_timestamp.as_ref().map(|end| {
        let grace = metadata.deletion_grace_period_seconds.unwrap_or_default();
        let finalizers = metadata
            .finalizers
            .as_deref()
            .unwrap_or_default()
            .join(", ");
        let what = match &*finalizers {
            "" => "deletion pending".to_owned(),
            all => format!("deletion pending, with the finalizers {all}"),
        };
        let asked = seconds(end).saturating_sub(u64::try_from(grace).unwrap_or_default());
        (asked, what, String::new())
    });
    let all = [creation].into_iter().chain(later).chain(deletion);
    let object = object(metadata);
    let change = |(time, change, by)| Change {
        time,
        kind: kind.to_owned(),
        object: object.clone(),
        change,
        by,
    };
    all.map(change).collect()
}

/// The changes of a pod, and the latest restart of each of its containers.
pub fn of_pod(pod: &Pod) -> Vec<Change> {
    let mut changes = of_object("Pod", &pod.metadata);
    let mut owners = pod.owner_references().iter();
    if let Some(owner) = owners.find(|owner| owner.controller == Some(true)) {
        changes[0].by = format!("{} {}", owner.kind, owner.name);
    }
    let status = pod.status.iter();
    let containers = status.flat_map(|status| {
        let both = [&status.init_container_statuses, &status.container_statuses];
        both.into_iter().flatten().flatten()
    });
    changes.extend(containers.filter_map(|container| {
        let (time, change) = restarted(container)?;
        Some(Change {
            time,
            kind: "Pod".to_owned(),
            object: name(pod),
            change,
            by: "kubelet".to_owned(),
        })
    }));
    changes
}

/// The latest restart of a container.
fn restarted(container: &ContainerStatus) -> Option<(u64, String)> {
    let (name, number) = (&container.name, container.restart_count);
    let last = container.last_state.as_ref()?.terminated.as_ref()?;
    let reason = last.reason.as_deref().unwrap_or("terminated");
    let code = last.exit_code;
    let what = format!("container {name} restarted, {number} in all: {reason}, exit code {code}");
    let time = last.finished_at.as_ref().filter(|_| number > 0)?;
    Some((seconds(time), what))
}

/// A description of the change by a field manager. `None` for the status.
fn changed(entry: &ManagedFieldsEntry, is_first_generation: bool) -> Option<String> {
    match entry.subresource.as_deref() {
        None | Some("") => {}
        Some("status") => return None,
        Some("scale") => return Some("scaled".to_owned()),
        Some(other) => return Some(format!("{other} changed")),
    }
    let fields = &entry.fields_v1.as_ref()?.0;
    if has_only(fields, &RESTARTED_AT) {
        return Some("rollout restarted".to_owned());
    }
    let mut sections = fields.as_object()?.keys();
    let section = sections.find(|section| *section != "f:metadata" && *section != "f:status");
    let section = section.filter(|_| !is_first_generation).map(String::as_str);
    let section = section.or_else(|| fields.get("f:metadata").map(|_| "f:metadata"))?;
    Some(format!("{} changed", section.trim_start_matches("f:")))
}

/// Whether a set of fields has this field alone.
fn has_only(fields: &Value, path: &[&str]) -> bool {
    let field = path.iter().try_fold(fields, |fields, name| {
        let mut names = fields.as_object()?.keys().filter(|name| *name != ".");
        names.all(|one| one == name).then(|| &fields[name])
    });
    field.is_some_and(|field| !field.is_null())
}

fn object(metadata: &ObjectMeta) -> String {
    let name = metadata.name.as_deref().unwrap_or_default();
    let namespace = metadata.namespace.as_deref();
    namespace.map_or_else(
        || name.to_owned(),
        |namespace| format!("{namespace}/{name}"),
    )
}

fn manager(entry: &ManagedFieldsEntry) -> String {
    entry.manager.clone().unwrap_or_default()
}

fn seconds(time: &Time) -> u64 {
    time.0.as_second().try_into().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use diy_mesh_model::json;
    use serde_json::json;

    use super::*;

    fn described(changes: Vec<Change>) -> Vec<String> {
        let lines = changes.into_iter().map(|one| {
            let time = format_timestamp(one.time);
            let minute = &time[14..16];
            format!(
                "{minute} {} {}: {}, {}",
                one.kind, one.object, one.change, one.by
            )
        });
        lines.collect()
    }

    fn entry(minute: u8, manager: &str, fields: Value) -> Value {
        json!({"manager": manager, "operation": "Update", "fieldsType": "FieldsV1",
            "time": format!("2026-11-30T09:{minute:02}:00Z"), "fieldsV1": fields})
    }

    fn of_subresource(minute: u8, manager: &str, subresource: &str) -> Value {
        let mut entry = entry(minute, manager, json!({"f:spec": {"f:replicas": {}}}));
        entry["subresource"] = subresource.into();
        entry
    }

    fn metadata(fields: Value) -> Value {
        let mut metadata = json!({"name": "web", "namespace": "shop", "generation": 2,
            "creationTimestamp": "2026-11-30T09:00:00Z"});
        let fields = fields.as_object().unwrap().clone();
        metadata.as_object_mut().unwrap().extend(fields);
        metadata
    }

    fn changes(fields: Value) -> Vec<String> {
        let metadata = json::read(&metadata(fields)).unwrap();
        described(of_object("Deployment", &metadata))
    }

    #[test]
    fn field_managers_name_who_created_changed_scaled_and_restarted_an_object() {
        let template = json!({"f:metadata": {"f:annotations": {".": {},
            "f:kubectl.kubernetes.io/restartedAt": {}}}});
        let entries = [
            entry(0, "helm", json!({"f:metadata": {}, "f:spec": {}})),
            entry(1, "kubectl-edit", json!({"f:metadata": {}, "f:spec": {}})),
            entry(2, "kubectl-annotate", json!({"f:metadata": {}})),
            entry(
                3,
                "kubectl-rollout",
                json!({"f:spec": {"f:template": template}}),
            ),
            of_subresource(4, "kubectl", "scale"),
            of_subresource(5, "controller", "status"),
            entry(6, "controller", json!({"f:status": {}})),
        ];
        assert_eq!(
            changes(json!({"managedFields": entries})),
            [
                "00 Deployment shop/web: created, helm",
                "01 Deployment shop/web: spec changed, kubectl-edit",
                "02 Deployment shop/web: metadata changed, kubectl-annotate",
                "03 Deployment shop/web: rollout restarted, kubectl-rollout",
                "04 Deployment shop/web: scaled, kubectl",
            ]
        );
        let edited = entry(1, "kubectl-edit", json!({"f:metadata": {}, "f:spec": {}}));
        assert_eq!(
            changes(json!({"managedFields": [edited], "generation": 1})),
            [
                "00 Deployment shop/web: created, ",
                "01 Deployment shop/web: metadata changed, kubectl-edit",
            ]
        );
    }

    #[test]
    fn pending_deletion_has_the_time_of_its_request_and_the_finalizers() {
        let deletion = json!({"deletionTimestamp": "2026-11-30T09:10:30Z",
            "deletionGracePeriodSeconds": 30, "finalizers": ["a/b", "c/d"]});
        assert_eq!(
            changes(deletion)[1],
            "10 Deployment shop/web: deletion pending, with the finalizers a/b, c/d, "
        );
    }

    #[test]
    fn restarts_of_containers_have_the_reason() {
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-7f9",
            "uid": "u", "controller": true});
        let container = |name: &str, number: u8| {
            json!({"name": name, "restartCount": number, "ready": true, "image": "", "imageID": "",
                "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled",
                    "finishedAt": "2026-11-30T09:07:00Z"}}})
        };
        let pod = json!({"metadata": metadata(json!({"ownerReferences": [owner]})), "status": {
            "initContainerStatuses": [container("proxy", 2)],
            "containerStatuses": [container("app", 0)],
        }});
        let pod: Pod = json::read(&pod).unwrap();
        assert_eq!(
            described(of_pod(&pod)),
            [
                "00 Pod shop/web: created, ReplicaSet web-7f9",
                "07 Pod shop/web: container proxy restarted, 2 in all: OOMKilled, exit code 137, \
                 kubelet",
            ]
        );
    }
}
