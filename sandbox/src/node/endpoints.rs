//! The EndpointSlice controller: computes the EndpointSlices of a Service from its pods. Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};

use super::services::{items, text};
use crate::protocol::PodView;

/// The label of an EndpointSlice that names its Service.
pub(super) const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// The label of a Node that names its zone.
const ZONE: &str = "topology.kubernetes.io/zone";

/// The EndpointSlices of a Service. Empty if the Service has no selector. `pods` are the pods of
/// its namespace, and `node` finds a Node by name: an endpoint has the zone of its pod's node.
pub(super) fn slices<'a>(
    service: &Value,
    pods: impl Iterator<Item = &'a (&'a Pod, PodView)>,
    node: impl Fn(&str) -> Option<&'a Value>,
) -> Vec<Value> {
    let (metadata, spec) = (&service["metadata"], &service["spec"]);
    let selector = spec["selector"].as_object();
    let Some(selector) = selector.filter(|selector| !selector.is_empty()) else {
        return Vec::new();
    };
    // Pods that map a named port to different numbers need separate slices.
    let mut groups: BTreeMap<(&str, String), (Value, Vec<Value>)> = BTreeMap::new();
    for (pod, view) in pods {
        let labels = pod.labels();
        let mut pairs = selector.iter();
        if !pairs.all(|(key, value)| labels.get(key).map(String::as_str) == value.as_str()) {
            continue;
        }
        let ports = items(&spec["ports"]).filter_map(|port| endpoint_port(port, pod));
        let ports: Value = ports.collect();
        let node_name = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        let zone = node_name.and_then(&node);
        let zone = zone.map(|node| &node["metadata"]["labels"][ZONE]);
        for (family, address) in [("IPv4", &view.ip), ("IPv6", &view.ipv6)] {
            let is_family = items(&spec["ipFamilies"]).any(|item| item == family);
            let Some(address) = address.as_ref().filter(|_| is_family) else {
                continue;
            };
            let group = groups.entry((family, ports.to_string()));
            let (_, endpoints) = group.or_insert_with(|| (ports.clone(), Vec::new()));
            endpoints.push(json!({
                "addresses": [address],
                "conditions": {
                    "ready": view.ready && !view.terminating,
                    "serving": view.ready,
                    "terminating": view.terminating,
                },
                "zone": zone,
                "nodeName": node_name,
                "targetRef": {
                    "kind": "Pod", "name": view.name, "namespace": view.namespace, "uid": pod.uid(),
                },
            }));
        }
    }
    let slice = |(number, ((family, _), (ports, endpoints)))| {
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{}-{number}", text(&metadata["name"])),
                "namespace": metadata["namespace"],
                "labels": {SERVICE_NAME: metadata["name"]},
            },
            "addressType": family,
            "ports": ports,
            "endpoints": endpoints,
        })
    };
    groups.into_iter().enumerate().map(slice).collect()
}

/// The Services of a namespace that a pod there is an endpoint of.
pub(super) fn services_of(slices: &[Value], namespace: &str, pod: &str) -> Vec<String> {
    let has_pod = |slice: &&Value| {
        let mut endpoints = items(&slice["endpoints"]);
        let is_own = slice["metadata"]["namespace"] == namespace;
        is_own && endpoints.any(|one| one["targetRef"]["name"] == pod)
    };
    let of_pod = slices.iter().filter(has_pod);
    let names = of_pod.map(|slice| text(&slice["metadata"]["labels"][SERVICE_NAME]));
    let names: BTreeSet<&str> = names.filter(|name| !name.is_empty()).collect();
    names.into_iter().map(str::to_owned).collect()
}

/// Resolves the target port. Returns `None` if the pod has no port with the requested name.
fn endpoint_port(port: &Value, pod: &Pod) -> Option<Value> {
    let target = match &port["targetPort"] {
        Value::Null => port["port"].clone(),
        Value::String(name) => {
            let containers = &pod.spec.as_ref()?.containers;
            let mut ports = containers.iter().flat_map(|one| one.ports.iter().flatten());
            let port = ports.find(|port| port.name.as_ref() == Some(name))?;
            json!(port.container_port)
        }
        number => number.clone(),
    };
    Some(json!({
        "name": text(&port["name"]),
        "port": target,
        "protocol": port["protocol"].as_str().unwrap_or("TCP"),
        "appProtocol": port["appProtocol"],
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, port: u16, ready: bool, terminating: bool) -> (Pod, PodView) {
        let pod = json!({
            "metadata": {"name": name, "namespace": "a", "labels": {"app": "shop"}},
            "spec": {"nodeName": name, "containers": [{"name": "c", "ports": [{"name": "web", "containerPort": port}]}]},
        });
        let view = PodView {
            name: name.into(),
            ip: Some(format!("10.0.0.{port}")),
            ipv6: Some(format!("fd00::{port}")),
            ready,
            terminating,
            ..PodView::default()
        };
        (serde_json::from_value(pod).unwrap(), view)
    }

    fn of(pods: &[(Pod, PodView)]) -> Vec<Value> {
        let spec = json!({"selector": {"app": "shop"}, "ports": [{"port": 80, "targetPort": "web"}], "ipFamilies": ["IPv4"]});
        let service = json!({"metadata": {"name": "shop", "namespace": "a"}, "spec": spec});
        let node = json!({"metadata": {"labels": {ZONE: "eu-1"}}});
        let pods: Vec<_> = pods.iter().map(|(pod, view)| (pod, view.clone())).collect();
        slices(&service, pods.iter(), |name| (name == "n").then_some(&node))
    }

    #[test]
    fn reports_readiness_and_termination_separately() {
        let pods = [
            pod("up", 81, true, false),
            pod("down", 81, false, false),
            pod("terminating", 81, true, true),
        ];
        let slices = of(&pods);
        assert_eq!(slices.len(), 1, "one address type and one set of ports");
        let conditions: Vec<_> = items(&slices[0]["endpoints"])
            .map(|endpoint| endpoint["conditions"].clone())
            .collect();
        let expected = |ready, serving, terminating| json!({"ready": ready, "serving": serving, "terminating": terminating});
        assert_eq!(
            conditions,
            [
                expected(true, true, false),
                expected(false, false, false),
                expected(false, true, true)
            ]
        );
        assert_eq!(slices[0]["metadata"]["labels"][SERVICE_NAME], "shop");
    }

    #[test]
    fn endpoints_have_the_zone_of_their_node() {
        let slices = of(&["n", "other"].map(|node| pod(node, 81, true, false)));
        let zones: Vec<_> = items(&slices[0]["endpoints"])
            .map(|one| one["zone"].as_str())
            .collect();
        assert_eq!(zones, [Some("eu-1"), None]);
    }

    #[test]
    fn creates_one_slice_per_number_of_a_named_port() {
        let slices = of(&[81, 82].map(|port| pod("one", port, true, false)));
        let ports: Vec<_> = slices.iter().map(|one| &one["ports"][0]["port"]).collect();
        assert_eq!(ports, [81, 82]);
        let services = |namespace, pod| services_of(&slices, namespace, pod);
        assert_eq!(services("a", "one"), ["shop"], "once, though of two slices");
        assert!(services("a", "other").is_empty() && services("b", "one").is_empty());
    }

    #[test]
    fn ignores_unselected_pods() {
        let mut other = pod("other", 81, true, false);
        other.0.metadata.labels = None;
        assert!(of(&[other]).is_empty());
    }
}
