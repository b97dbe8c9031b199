//! What has been applied: the objects that the sandbox knows, typed. It defaults and checks as an API server would, runs
//! nothing, and leaves objects that mean nothing here (RBAC, budgets, ...) aside.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use k8s_openapi::api::{
    admissionregistration::v1::MutatingWebhookConfiguration,
    apps::v1::{DaemonSet, Deployment},
    batch::v1::Job,
    core::v1::{ConfigMap, Namespace, Pod, Service},
    discovery::v1::EndpointSlice,
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{
    services::ClusterIps,
    workloads::{Kind, Workload},
};

/// Namespace and name.
pub(super) type Key = (String, String);

/// Everything that has been applied.
#[derive(Debug, Default)]
pub(super) struct Objects {
    /// Their labels, by name.
    pub(super) namespaces: BTreeMap<String, BTreeMap<String, String>>,
    pub(super) services: BTreeMap<Key, Service>,
    /// Those of Services without a selector.
    pub(super) slices: BTreeMap<Key, EndpointSlice>,
    pub(super) config_maps: BTreeMap<Key, ConfigMap>,
    pub(super) webhooks: BTreeMap<String, MutatingWebhookConfiguration>,
    pub(super) workloads: BTreeMap<(Kind, Key), Workload>,
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
            bail!("a {kind} without metadata.name");
        }
        let place = format!("{kind} {namespace}/{name}");
        self.apply_named(value, &kind, (namespace, name), ipv6)
            .with_context(|| place)
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
            "ConfigMap" => drop(self.config_maps.insert(key, parse(value)?)),
            "MutatingWebhookConfiguration" => drop(self.webhooks.insert(key.1, parse(value)?)),
            "Deployment" => self.run(Kind::Deployment, key, |key| {
                Workload::deployment(parse::<Deployment>(value)?, key)
            })?,
            "DaemonSet" => self.run(Kind::DaemonSet, key, |key| {
                Workload::daemon_set(parse::<DaemonSet>(value)?, key)
            })?,
            "Job" => self.run(Kind::Job, key, |key| {
                Workload::job(parse::<Job>(value)?, key)
            })?,
            "Pod" => self.run(Kind::Pod, key, |key| {
                Workload::pod(parse::<Pod>(value)?, key)
            })?,
            "ReplicaSet" | "ReplicationController" | "StatefulSet" | "CronJob" => {
                bail!("the sandbox runs Pods, Deployments, DaemonSets and Jobs, no {kind}")
            }
            _ => {}
        }
        Ok(())
    }

    fn run(
        &mut self,
        kind: Kind,
        key: Key,
        workload: impl FnOnce(&Key) -> Result<Workload>,
    ) -> Result<()> {
        let workload = workload(&key)?;
        self.workloads.insert((kind, key), workload);
        Ok(())
    }

    /// Deletes an object; what it owns follows when the node next compares.
    pub(super) fn delete(&mut self, kind: &str, key: &Key) -> Result<()> {
        let workload = |kind: Kind| (kind, key.clone());
        let found = match kind {
            "Service" => self.services.remove(key).is_some(),
            "EndpointSlice" => self.slices.remove(key).is_some(),
            "ConfigMap" => self.config_maps.remove(key).is_some(),
            "MutatingWebhookConfiguration" => self.webhooks.remove(&key.1).is_some(),
            "Deployment" => self.workloads.remove(&workload(Kind::Deployment)).is_some(),
            "DaemonSet" => self.workloads.remove(&workload(Kind::DaemonSet)).is_some(),
            "Job" => self.workloads.remove(&workload(Kind::Job)).is_some(),
            "Pod" => self.workloads.remove(&workload(Kind::Pod)).is_some(),
            _ => bail!("the sandbox cannot delete a {kind}"),
        };
        if !found {
            bail!("there is no {kind} {}/{}", key.0, key.1);
        }
        Ok(())
    }

    /// Changes a Deployment's number of replicas.
    pub(super) fn scale(&mut self, key: &Key, replicas: i32) -> Result<()> {
        let workload = self.workloads.get_mut(&(Kind::Deployment, key.clone()));
        workload
            .with_context(|| format!("there is no Deployment {}/{}", key.0, key.1))?
            .replicas = usize::try_from(replicas).context("replicas")?;
        Ok(())
    }

    /// The labels of a namespace, as far as they are known.
    pub(super) fn namespace_labels(&self, name: &str) -> BTreeMap<String, String> {
        let named =
            || BTreeMap::from([("kubernetes.io/metadata.name".to_owned(), name.to_owned())]);
        self.namespaces.get(name).cloned().unwrap_or_else(named)
    }
}

fn parse<T: DeserializeOwned>(value: Value) -> Result<T> {
    serde_json::from_value(value).context("it does not parse")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(objects: &mut Objects, yaml: &str) -> Result<()> {
        crate::sandbox::manifest::parse(yaml)
            .unwrap()
            .into_iter()
            .try_for_each(|value| objects.apply(value, false))
    }

    #[test]
    fn every_embedded_object_is_taken() {
        let mut objects = Objects::default();
        for value in crate::sandbox::manifest::embedded().objects().unwrap() {
            objects.apply(value, true).unwrap();
        }
        assert!(!objects.webhooks.is_empty());
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
    fn errors_name_the_object() {
        let mut objects = Objects::default();
        let error = apply(
            &mut objects,
            "{apiVersion: apps/v1, kind: StatefulSet, metadata: {name: db, namespace: a}}",
        )
        .unwrap_err();
        assert!(
            format!("{error:#}").starts_with("StatefulSet a/db: the sandbox runs Pods"),
            "{error:#}"
        );
        let error = objects
            .delete("Pod", &("a".into(), "x".into()))
            .unwrap_err();
        assert_eq!(error.to_string(), "there is no Pod a/x");
    }

    #[test]
    fn objects_without_a_meaning_here_are_left_aside() {
        apply(
            &mut Objects::default(),
            "{apiVersion: policy/v1, kind: PodDisruptionBudget, metadata: {name: x}}",
        )
        .unwrap();
    }
}
