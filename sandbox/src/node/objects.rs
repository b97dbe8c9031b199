//! The applied Kubernetes objects, as JSON with what an API server adds. Ignores kinds that have no
//! effect in the sandbox, such as RBAC objects, and lists objects of unknown kinds.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use diy_mesh_model::json;
use k8s_openapi::api::{
    admissionregistration::v1::MutatingWebhookConfiguration,
    apps::v1::Deployment,
    core::v1::{Namespace, Node, Pod, Service},
    discovery::v1::EndpointSlice,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{services::ClusterIps, workloads::Workload};

/// Namespace and name. The namespace of a cluster-scoped object is empty.
pub(super) type Key = (String, String);

/// The kinds that the controller reads, too.
pub(super) const CATALOG_KINDS: [&str; 12] = [
    "Node",
    "Service",
    "EndpointSlice",
    "HTTPRoute",
    "GRPCRoute",
    "TCPRoute",
    "ReferenceGrant",
    "XBackend",
    "TrafficPolicy",
    "AuthorizationPolicy",
    "TrafficSplit",
    "HTTPRouteGroup",
];

/// The applied objects.
#[derive(Debug, Default)]
pub(super) struct Objects {
    by_kind: BTreeMap<String, BTreeMap<Key, Value>>,
    /// By the kind and key of their objects.
    pub(super) workloads: BTreeMap<(String, Key), Workload>,
    /// Ignored objects of kinds that the sandbox does not have, as `KIND of VERSION, NAMESPACE/NAME`.
    pub(super) unknown: Vec<String>,
    ips: ClusterIps,
}

impl Objects {
    /// The objects of a kind.
    pub(super) fn of(&self, kind: &str) -> impl Iterator<Item = &Value> {
        let objects = self.by_kind.get(kind).into_iter();
        objects.flat_map(|objects| objects.values())
    }

    /// An object.
    pub(super) fn get(&self, kind: &str, key: &Key) -> Option<&Value> {
        self.by_kind.get(kind)?.get(key)
    }

    /// Creates or replaces one object.
    pub(super) fn apply(&mut self, value: Value, ipv6: bool) -> Result<()> {
        let text = |value: &Value, default: &str| value.as_str().unwrap_or(default).to_owned();
        let kind = text(&value["kind"], "");
        let namespace = text(&value["metadata"]["namespace"], "default");
        let name = text(&value["metadata"]["name"], "");
        ensure!(!name.is_empty(), "{kind}: metadata.name is missing");
        let object = format!("{kind} {namespace}/{name}");
        self.apply_named(value, kind, (namespace, name), ipv6)
            .context(object)
    }

    fn apply_named(
        &mut self,
        mut value: Value,
        kind: String,
        mut key: Key,
        ipv6: bool,
    ) -> Result<()> {
        match kind.as_str() {
            "Namespace" => {
                check::<Namespace>(&value)?;
                value["metadata"]["labels"]["kubernetes.io/metadata.name"] = json!(key.1);
                key.0.clear();
            }
            "Node" => {
                check::<Node>(&value)?;
                key.0.clear();
            }
            "MutatingWebhookConfiguration" => {
                check::<MutatingWebhookConfiguration>(&value)?;
                key.0.clear();
            }
            "Service" => {
                check::<Service>(&value)?;
                value["metadata"]["uid"] = json!(format!("service-{}-{}", key.0, key.1));
                let previous = self.get(&kind, &key).cloned();
                self.ips.assign(&mut value["spec"], previous.as_ref(), ipv6);
            }
            "EndpointSlice" => check::<EndpointSlice>(&value)?,
            "Deployment" => {
                check::<Deployment>(&value)?;
                let workload = Workload::deployment(&value["spec"])?;
                self.workloads.insert((kind, key), workload);
                return Ok(());
            }
            "Pod" => {
                check::<Pod>(&value)?;
                let workload = Workload::pod(&value)?;
                self.workloads.insert((kind, key), workload);
                return Ok(());
            }
            "DaemonSet" | "ReplicaSet" | "StatefulSet" | "Job" | "CronJob" => {
                bail!("unsupported kind: the sandbox supports Pods and Deployments")
            }
            "ClusterRole"
            | "ClusterRoleBinding"
            | "Role"
            | "RoleBinding"
            | "ServiceAccount"
            | "NetworkPolicy"
            | "PodDisruptionBudget"
            | "PriorityClass"
            | "PriorityLevelConfiguration"
            | "FlowSchema"
            | "CustomResourceDefinition" => return Ok(()),
            kind if CATALOG_KINDS.contains(&kind) => {}
            _ => {
                let version = value["apiVersion"].as_str().unwrap_or_default();
                let object = format!("{kind} of {version}, {}/{}", key.0, key.1);
                self.unknown.push(object);
                return Ok(());
            }
        }
        self.store(kind, key, value);
        Ok(())
    }

    /// Stores an object with the metadata that an API server sets.
    fn store(&mut self, kind: String, key: Key, mut value: Value) {
        let objects = self.by_kind.entry(kind).or_default();
        let (mut generation, mut created) = (1, json!(Time(Timestamp::now())));
        if let Some(before) = objects.get(&key) {
            created = before["metadata"]["creationTimestamp"].clone();
            let is_changed = before["spec"] != value["spec"];
            generation =
                before["metadata"]["generation"].as_i64().unwrap_or(0) + i64::from(is_changed);
        }
        let metadata = &mut value["metadata"];
        if !key.0.is_empty() {
            metadata["namespace"] = json!(key.0);
        }
        metadata["generation"] = json!(generation);
        metadata["creationTimestamp"] = created;
        objects.insert(key, value);
    }

    /// Deletes an object. The next reconciliation terminates its pods.
    pub(super) fn delete(&mut self, kind: &str, key: &Key) -> Result<()> {
        let id = (kind.to_owned(), key.clone());
        let object = self.by_kind.get_mut(kind).and_then(|all| all.remove(key));
        ensure!(
            object.is_some() || self.workloads.remove(&id).is_some(),
            "{kind} {}/{} not found",
            key.0,
            key.1
        );
        Ok(())
    }

    /// Changes a Deployment's number of replicas.
    pub(super) fn scale(&mut self, key: &Key, replicas: usize) -> Result<()> {
        let workload = self.workloads.get_mut(&("Deployment".into(), key.clone()));
        let workload =
            workload.with_context(|| format!("Deployment {}/{} not found", key.0, key.1))?;
        workload.replicas = replicas;
        Ok(())
    }

    /// The labels of a namespace. A namespace that was not applied has its name label only.
    pub(super) fn namespace_labels(&self, name: &str) -> Value {
        let namespace = self.get("Namespace", &(String::new(), name.to_owned()));
        namespace.map_or_else(
            || json!({"kubernetes.io/metadata.name": name}),
            |namespace| namespace["metadata"]["labels"].clone(),
        )
    }
}

/// Whether the object has this type.
fn check<T: DeserializeOwned>(value: &Value) -> Result<()> {
    let parsed = json::read::<T>(value);
    parsed.map(drop).context("failed to parse the object")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(objects: &mut Objects, yaml: &str) -> Result<()> {
        crate::manifest::parse(yaml)
            .unwrap()
            .into_iter()
            .try_for_each(|value| objects.apply(value, false))
    }

    #[test]
    fn accepts_all_embedded_objects() {
        let mut objects = Objects::default();
        for value in crate::manifest::embedded().objects().unwrap() {
            objects.apply(value, true).unwrap();
        }
        assert!(objects.of("MutatingWebhookConfiguration").next().is_some());
        assert!(objects.unknown.is_empty(), "{:?}", objects.unknown);
        let mut services = objects.of("Service");
        assert!(services.all(|service| service["spec"]["clusterIP"].is_string()));
    }

    #[test]
    fn routes_have_a_generation_and_keep_their_age() {
        let mut objects = Objects::default();
        let route = |port: u16| {
            format!(
                "{{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRoute, \
                 metadata: {{name: web, namespace: a}}, spec: {{port: {port}}}}}"
            )
        };
        let key = ("a".to_owned(), "web".to_owned());
        apply(&mut objects, &route(80)).unwrap();
        let created =
            objects.get("HTTPRoute", &key).unwrap()["metadata"]["creationTimestamp"].clone();
        assert!(created.is_string());
        for (port, generation) in [(80, 1), (81, 2)] {
            apply(&mut objects, &route(port)).unwrap();
            let metadata = &objects.get("HTTPRoute", &key).unwrap()["metadata"];
            assert_eq!(metadata["generation"], generation);
            assert_eq!(metadata["creationTimestamp"], created);
        }
        objects.delete("HTTPRoute", &key).unwrap();
        assert_eq!(objects.get("HTTPRoute", &key), None);
    }

    #[test]
    fn errors_name_the_object() {
        let mut objects = Objects::default();
        let error = apply(
            &mut objects,
            "{apiVersion: apps/v1, kind: StatefulSet, metadata: {name: db, namespace: a}}",
        )
        .unwrap_err();
        assert!(
            format!("{error:#}").starts_with("StatefulSet a/db: unsupported kind"),
            "{error:#}"
        );
        let error = objects
            .delete("Pod", &("a".into(), "x".into()))
            .unwrap_err();
        assert_eq!(error.to_string(), "Pod a/x not found");
    }

    #[test]
    fn ignores_kinds_without_effect_and_lists_unknown_kinds() {
        let mut objects = Objects::default();
        let budget = "{apiVersion: policy/v1, kind: PodDisruptionBudget, metadata: {name: x}}";
        let typo = "{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRout, \
                    metadata: {name: web, namespace: a}}";
        for yaml in [budget, typo] {
            apply(&mut objects, yaml).unwrap();
        }
        let expected = "HTTPRout of gateway.networking.k8s.io/v1, a/web";
        assert_eq!(objects.unknown, [expected]);
    }
}
