//! Pods of the API server, by the fields that commands read.

use std::borrow::Cow;

use diy_mesh_control_plane::pods::{Container, ContainerStatus, PodSpec, PodStatus};
use diy_mesh_injector::annotations::{STATUS, STATUS_INJECTED};
use diy_mesh_injector::containers::ADMIN_PORT_FLAG;
use k8s_openapi::api::core::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use diy_mesh_controller::kinds::pod::workload;

/// The time from the creation of a pod until its proxy is ready, in seconds.
pub(crate) const READY_TIMEOUT: u64 = 60;

/// A pod.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "Box<RawValue>")]
pub struct Pod {
    /// The metadata.
    pub metadata: ObjectMeta,
    /// The spec.
    pub spec: Option<PodSpec>,
    /// The status.
    pub status: Option<PodStatus>,
    /// The whole object, of an active pod without a proxy: a check asks what the injector would do.
    #[serde(skip)]
    pub(crate) text: Option<Box<RawValue>>,
}

impl TryFrom<Box<RawValue>> for Pod {
    type Error = serde_json::Error;

    fn try_from(text: Box<RawValue>) -> Result<Self, Self::Error> {
        #[derive(Deserialize)]
        struct Fields {
            #[serde(default)]
            metadata: ObjectMeta,
            spec: Option<PodSpec>,
            status: Option<PodStatus>,
        }
        let Fields {
            metadata,
            spec,
            status,
        } = serde_json::from_str(text.get())?;
        let mut pod = Pod {
            metadata,
            spec,
            status,
            text: None,
        };
        pod.text = Some(text).filter(|_| is_active(&pod) && !is_injected(&pod));
        Ok(pod)
    }
}

impl Resource for Pod {
    type DynamicType = ();
    type Scope = <v1::Pod as Resource>::Scope;

    fn kind(_: &()) -> Cow<'_, str> {
        v1::Pod::kind(&())
    }

    fn group(_: &()) -> Cow<'_, str> {
        v1::Pod::group(&())
    }

    fn version(_: &()) -> Cow<'_, str> {
        v1::Pod::version(&())
    }

    fn plural(_: &()) -> Cow<'_, str> {
        v1::Pod::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// Whether the injector has injected a proxy.
pub(crate) fn is_injected(pod: &impl ResourceExt) -> bool {
    annotation(pod, STATUS) == Some(STATUS_INJECTED)
}

pub(crate) fn annotation<'a>(pod: &'a impl ResourceExt, name: &str) -> Option<&'a str> {
    pod.annotations().get(name).map(String::as_str)
}

/// Whether the pod runs, or will run.
pub(crate) fn is_active(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    pod.metadata.deletion_timestamp.is_none() && !matches!(phase, Some("Succeeded" | "Failed"))
}

/// The active pods with a proxy.
pub(crate) fn meshed(pods: &[Pod]) -> impl Iterator<Item = &Pod> {
    pods.iter()
        .filter(|pod| is_injected(*pod) && is_active(pod))
}

/// `namespace/name` of a pod or of another object.
pub(crate) fn name(object: &impl ResourceExt) -> String {
    let namespace = object.namespace().unwrap_or_default();
    format!("{namespace}/{}", object.name_any())
}

/// The proxy container of a pod.
pub(crate) fn proxy(pod: &Pod) -> Option<&Container> {
    init_container(pod, "proxy")
}

/// The name of the workload of a pod.
pub(crate) fn workload(pod: &Pod) -> &str {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    workload::workload(name, |label| Some(pod.labels().get(label)?))
}

/// The port of the admin server of the proxy.
pub(crate) fn admin_port(pod: &Pod) -> u16 {
    let port = proxy(pod).and_then(|proxy| argument(proxy, ADMIN_PORT_FLAG));
    port.and_then(|port| port.parse().ok()).unwrap_or(4001)
}

/// An init container of a pod.
pub(crate) fn init_container<'a>(pod: &'a Pod, name: &str) -> Option<&'a Container> {
    let containers = &pod.spec.as_ref()?.init_containers;
    containers
        .iter()
        .flatten()
        .find(|container| container.name == name)
}

/// The value of an argument `FLAG=VALUE` of a container.
pub(crate) fn argument<'a>(container: &'a Container, flag: &str) -> Option<&'a str> {
    let mut arguments = container.args.iter().flatten();
    arguments.find_map(|argument| argument.strip_prefix(flag)?.strip_prefix('='))
}

/// Whether the proxy of the pod is ready.
pub(crate) fn is_proxy_ready(pod: &Pod) -> bool {
    status(pod, "proxy").is_some_and(|status| status.ready)
}

/// The status of an init container.
pub(crate) fn status<'a>(pod: &'a Pod, container: &str) -> Option<&'a ContainerStatus> {
    pod.status
        .as_ref()?
        .init_container_statuses
        .iter()
        .flatten()
        .find(|status| status.name == container)
}

/// The age of a pod in seconds.
pub(crate) fn age(pod: &Pod, now: u64) -> u64 {
    let created = pod.metadata.creation_timestamp.as_ref();
    let created = created.and_then(|time| u64::try_from(time.0.as_second()).ok());
    now.saturating_sub(created.unwrap_or(now))
}

#[cfg(test)]
mod tests {
    use diy_mesh_model::json;
    use serde_json::json;

    use super::*;

    #[test]
    fn only_active_pods_without_a_proxy_keep_their_text() {
        let pod = |status: &str, phase: &str| -> Pod {
            let object = json!({"metadata": {"name": "a", "annotations": {STATUS: status}},
                "spec": {"containers": [{"name": "app", "image": "i"}]}, "status": {"phase": phase}});
            json::read(&object).expect("a pod")
        };
        let text = pod("", "Running").text.expect("the injector is asked");
        assert!(text.get().contains(r#""image":"i""#), "{text}");
        assert!(pod(STATUS_INJECTED, "Running").text.is_none());
        assert!(pod("", "Succeeded").text.is_none());
    }
}
