//! Other service meshes. A pod is in one mesh only: the redirect rules of two would take the same
//! connections. Pure.

use serde_json::Value;

use crate::annotations::quoted;
use crate::pod::{list, name_of};

/// Another mesh, and what shows that a pod is in it.
#[derive(Debug, PartialEq, Eq)]
pub struct OtherMesh {
    name: &'static str,
    /// The init containers that it adds to pods. Gateways of the mesh do not have them.
    init_containers: &'static [&'static str],
    /// The label or annotation of a pod that requests it.
    pod_key: &'static str,
    /// The label or annotation of a namespace that requests it for pods without `pod_key`.
    namespace_key: &'static str,
    /// The values of both that request it.
    requests: &'static [&'static str],
    /// The label or annotation that excludes a pod, for people.
    opt_out: &'static str,
}

const OTHER_MESHES: [OtherMesh; 6] = [
    OtherMesh {
        name: "Linkerd",
        init_containers: &["linkerd-init", "linkerd-network-validator"],
        pod_key: "linkerd.io/inject",
        namespace_key: "linkerd.io/inject",
        requests: &["enabled", "ingress"],
        opt_out: "annotation linkerd.io/inject: disabled",
    },
    OtherMesh {
        name: "Istio",
        init_containers: &["istio-init", "istio-validation"],
        pod_key: "sidecar.istio.io/inject",
        namespace_key: "istio-injection",
        requests: &["true", "enabled"],
        opt_out: "label sidecar.istio.io/inject: \"false\"",
    },
    OtherMesh {
        name: "Istio ambient",
        init_containers: &[],
        pod_key: "istio.io/dataplane-mode",
        namespace_key: "istio.io/dataplane-mode",
        requests: &["ambient"],
        opt_out: "label istio.io/dataplane-mode: none",
    },
    OtherMesh {
        name: "Open Service Mesh",
        init_containers: &["osm-init"],
        pod_key: "openservicemesh.io/sidecar-injection",
        namespace_key: "openservicemesh.io/sidecar-injection",
        requests: &["enabled", "yes", "true"],
        opt_out: "annotation openservicemesh.io/sidecar-injection: disabled",
    },
    OtherMesh {
        name: "Kuma",
        init_containers: &["kuma-init", "kuma-validation"],
        pod_key: "kuma.io/sidecar-injection",
        namespace_key: "kuma.io/sidecar-injection",
        requests: &["enabled", "true"],
        opt_out: "label kuma.io/sidecar-injection: disabled",
    },
    OtherMesh {
        name: "Consul",
        init_containers: &["consul-connect-inject-init"],
        pod_key: "consul.hashicorp.com/connect-inject",
        namespace_key: "consul.hashicorp.com/connect-inject",
        requests: &["true"],
        opt_out: "annotation consul.hashicorp.com/connect-inject: \"false\"",
    },
];

impl OtherMesh {
    /// The mesh that a namespace with these labels and annotations requests for its pods.
    pub fn of_namespace<'a>(setting: impl Fn(&str) -> Option<&'a str>) -> Option<&'static Self> {
        OTHER_MESHES
            .iter()
            .find(|mesh| mesh.is_requested(setting(mesh.namespace_key)))
    }

    fn is_requested(&self, value: Option<&str>) -> bool {
        value.is_some_and(|value| self.requests.contains(&value))
    }
}

/// The reason why a pod is, or will be, in another mesh, with the remedy. `namespace` is the mesh
/// that its namespace requests.
pub fn reason(pod: &Value, namespace: Option<&OtherMesh>) -> Option<String> {
    let spec = pod.get("spec").unwrap_or(&Value::Null);
    let containers = list(spec, "initContainers");
    OTHER_MESHES.iter().find_map(|mesh| {
        let is_own = |container: &&Value| mesh.init_containers.contains(&name_of(container));
        let (name, key, opt_out) = (mesh.name, mesh.pod_key, mesh.opt_out);
        let cause = match (containers.iter().find(is_own), setting(pod, key)) {
            (Some(container), _) => {
                format!("the pod has init container {:?} of {name}", name_of(container))
            }
            (None, Some(value)) if mesh.is_requested(Some(value)) => {
                format!("the pod requests {name} ({key}: {})", quoted(value))
            }
            (None, None) if namespace == Some(mesh) => {
                format!("the namespace requests {name} ({})", mesh.namespace_key)
            }
            _ => return None,
        };
        Some(format!(
            "{cause}, and a pod cannot be in two meshes: to move it from {name} to DIY Service Mesh, set {opt_out} on the pod"
        ))
    })
}

/// The value of a label or annotation.
fn setting<'a>(pod: &'a Value, key: &str) -> Option<&'a str> {
    let metadata = pod.get("metadata")?;
    let value = |field| metadata.get(field)?.get(key)?.as_str();
    value("labels").or_else(|| value("annotations"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn pod_decides_before_its_namespace() {
        for mesh in &OTHER_MESHES {
            let request = mesh.requests[0];
            let namespace =
                OtherMesh::of_namespace(|key| (key == mesh.namespace_key).then_some(request));
            assert_eq!(namespace, Some(mesh));
            let unset = json!({"metadata": {}, "spec": {}});
            assert!(reason(&unset, namespace).is_some_and(|reason| reason.contains(mesh.name)));
            assert_eq!(reason(&unset, None), None);
            let (_, value) = mesh.opt_out.split_once(": ").expect("a value");
            for field in ["labels", "annotations"] {
                let pod =
                    |value: &str| json!({"metadata": {field: {mesh.pod_key: value}}, "spec": {}});
                assert_eq!(reason(&pod(value.trim_matches('"')), namespace), None);
                assert!(
                    reason(&pod(request), None).is_some_and(|reason| reason.contains(mesh.opt_out))
                );
            }
        }
    }

    #[test]
    fn init_containers_show_the_mesh_of_a_pod() {
        for mesh in &OTHER_MESHES {
            for name in mesh.init_containers {
                let containers = json!([{"name": "own"}, {"name": name}]);
                let pod = json!({"metadata": {}, "spec": {"initContainers": containers}});
                assert!(reason(&pod, None).is_some_and(|reason| reason.contains(name)));
            }
        }
        let own = json!({"metadata": {}, "spec": {"initContainers": [{"name": "own"}]}});
        assert_eq!(reason(&own, None), None);
    }
}
