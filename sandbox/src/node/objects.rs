//! The applied Kubernetes objects. Parses and defaults them as an API server does. Ignores kinds
//! that have no effect in the sandbox, such as RBAC objects, and lists objects of unknown kinds.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
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

use super::{
    services::ClusterIps,
    workloads::{Kind, Workload},
};

/// Namespace and name.
pub(super) type Key = (String, String);

/// The applied objects.
#[derive(Debug, Default)]
pub(super) struct Objects {
    /// Namespace labels by name.
    pub(super) namespaces: BTreeMap<String, BTreeMap<String, String>>,
    pub(super) services: BTreeMap<Key, Service>,
    /// EndpointSlices of Services without a selector.
    pub(super) slices: BTreeMap<Key, EndpointSlice>,
    /// Nodes by name. They have no effect but that of their labels; all pods run on this machine.
    pub(super) nodes: BTreeMap<String, Node>,
    pub(super) webhooks: BTreeMap<String, MutatingWebhookConfiguration>,
    pub(super) workloads: BTreeMap<(Kind, Key), Workload>,
    /// Objects of the Gateway API and of SMI, and TrafficPolicies, by kind and key.
    pub(super) routes: BTreeMap<(String, Key), Value>,
    /// Ignored objects of kinds that the sandbox does not have, as `KIND of VERSION, NAMESPACE/NAME`.
    pub(super) unknown: Vec<String>,
    ips: ClusterIps,
}

impl Objects {
    /// Creates or replaces one object.
    pub(super) fn apply(&mut self, value: Value, ipv6: bool) -> Result<()> {
        let kind = value["kind"].as_str().unwrap_or_default().to_owned();
        let name = value["metadata"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let namespace = value["metadata"]["namespace"]
            .as_str()
            .unwrap_or("default")
            .to_owned();
        if name.is_empty() {
            bail!("{kind}: metadata.name is missing");
        }
        let object = format!("{kind} {namespace}/{name}");
        self.apply_named(value, &kind, (namespace, name), ipv6)
            .context(object)
    }

    fn apply_named(&mut self, value: Value, kind: &str, key: Key, ipv6: bool) -> Result<()> {
        match kind {
            "Namespace" => {
                let mut labels = parse::<Namespace>(value)?
                    .metadata
                    .labels
                    .unwrap_or_default();
                labels.insert("kubernetes.io/metadata.name".into(), key.1.clone());
                self.namespaces.insert(key.1, labels);
            }
            "Service" => {
                let mut service: Service = parse(value)?;
                service.metadata.namespace = Some(key.0.clone());
                service.metadata.uid = Some(format!("service-{}-{}", key.0, key.1));
                self.ips.assign(&mut service, self.services.get(&key), ipv6);
                self.services.insert(key, service);
            }
            "EndpointSlice" => {
                let mut slice: EndpointSlice = parse(value)?;
                slice.metadata.namespace = Some(key.0.clone());
                self.slices.insert(key, slice);
            }
            "Node" => drop(self.nodes.insert(key.1, parse(value)?)),
            "MutatingWebhookConfiguration" => drop(self.webhooks.insert(key.1, parse(value)?)),
            "Deployment" => self.add(Workload::deployment(parse::<Deployment>(value)?, &key)?),
            "Pod" => self.add(Workload::pod(parse::<Pod>(value)?, &key)?),
            "HTTPRoute" | "GRPCRoute" | "TCPRoute" | "ReferenceGrant" | "TrafficPolicy"
            | "TrafficSplit" | "HTTPRouteGroup" => self.add_route(kind, key, value),
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
            | "CustomResourceDefinition" => {}
            _ => {
                let version = value["apiVersion"].as_str().unwrap_or_default();
                let object = format!("{kind} of {version}, {}/{}", key.0, key.1);
                self.unknown.push(object);
            }
        }
        Ok(())
    }

    /// Stores such an object, with the metadata that an API server
    /// sets.
    fn add_route(&mut self, kind: &str, key: Key, mut value: Value) {
        let id = (kind.to_owned(), key);
        let before = self.routes.get(&id);
        let kept = |field: &str| before.map(|before| before["metadata"][field].clone());
        let is_changed = before.is_none_or(|before| before["spec"] != value["spec"]);
        let generation = kept("generation").and_then(|generation| generation.as_i64());
        let generation = generation.unwrap_or(0) + i64::from(is_changed);
        let created = kept("creationTimestamp");
        let created = created.unwrap_or_else(|| json!(Time(Timestamp::now())));
        let metadata = &mut value["metadata"];
        metadata["namespace"] = json!(id.1.0);
        metadata["generation"] = json!(generation);
        metadata["creationTimestamp"] = created;
        self.routes.insert(id, value);
    }

    fn add(&mut self, workload: Workload) {
        let key = (workload.kind, workload.key.clone());
        self.workloads.insert(key, workload);
    }

    /// Deletes an object. The next reconciliation terminates its pods.
    pub(super) fn delete(&mut self, kind: &str, key: &Key) -> Result<()> {
        let mut delete_workload =
            |kind: Kind| self.workloads.remove(&(kind, key.clone())).is_some();
        let found = match kind {
            "Service" => self.services.remove(key).is_some(),
            "EndpointSlice" => self.slices.remove(key).is_some(),
            "Node" => self.nodes.remove(&key.1).is_some(),
            "MutatingWebhookConfiguration" => self.webhooks.remove(&key.1).is_some(),
            "Deployment" => delete_workload(Kind::Deployment),
            "Pod" => delete_workload(Kind::Pod),
            "HTTPRoute" | "GRPCRoute" | "TCPRoute" | "ReferenceGrant" | "TrafficPolicy"
            | "TrafficSplit" | "HTTPRouteGroup" => {
                let id = (kind.to_owned(), key.clone());
                self.routes.remove(&id).is_some()
            }
            _ => bail!("unsupported kind {kind}: the sandbox cannot delete it"),
        };
        if !found {
            bail!("{kind} {}/{} not found", key.0, key.1);
        }
        Ok(())
    }

    /// Changes a Deployment's number of replicas.
    pub(super) fn scale(&mut self, key: &Key, replicas: i32) -> Result<()> {
        let workload = self.workloads.get_mut(&(Kind::Deployment, key.clone()));
        workload
            .with_context(|| format!("Deployment {}/{} not found", key.0, key.1))?
            .replicas =
            usize::try_from(replicas).with_context(|| format!("invalid replicas {replicas}"))?;
        Ok(())
    }

    /// The labels of a namespace. A namespace that was not applied has its name label only.
    pub(super) fn namespace_labels(&self, name: &str) -> BTreeMap<String, String> {
        let named =
            || BTreeMap::from([("kubernetes.io/metadata.name".to_owned(), name.to_owned())]);
        self.namespaces.get(name).cloned().unwrap_or_else(named)
    }
}

fn parse<T: DeserializeOwned>(value: Value) -> Result<T> {
    serde_json::from_value(value).context("failed to parse the object")
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
        assert!(!objects.webhooks.is_empty());
        assert!(objects.unknown.is_empty(), "{:?}", objects.unknown);
        assert!(
            objects.services.values().all(|service| service
                .spec
                .as_ref()
                .unwrap()
                .cluster_ip
                .is_some())
        );
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
        let id = ("HTTPRoute".to_owned(), ("a".to_owned(), "web".to_owned()));
        apply(&mut objects, &route(80)).unwrap();
        let created = objects.routes[&id]["metadata"]["creationTimestamp"].clone();
        assert!(created.is_string());
        for (port, generation) in [(80, 1), (81, 2)] {
            apply(&mut objects, &route(port)).unwrap();
            let metadata = &objects.routes[&id]["metadata"];
            assert_eq!(metadata["generation"], generation);
            assert_eq!(metadata["creationTimestamp"], created);
        }
        objects.delete("HTTPRoute", &id.1).unwrap();
        assert!(objects.routes.is_empty());
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
