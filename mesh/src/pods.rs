//! Pods of the API server, by the fields that commands read.

use std::borrow::Cow;

use diy_mesh_control_plane::pods::{PodSpec, PodStatus};
use diy_mesh_injector::annotations::{STATUS, STATUS_INJECTED};
use k8s_openapi::api::core::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

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
