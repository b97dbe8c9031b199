//! The EndpointSlice controller: computes the EndpointSlices of a Service from its pods. Pure.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::{
        core::v1::{Node, ObjectReference, Pod, Service, ServicePort},
        discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice},
    },
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, util::intstr::IntOrString},
};
use kube::ResourceExt;

/// The label of an EndpointSlice that names its Service.
pub(super) const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// The label of a Node that names its zone.
const ZONE: &str = "topology.kubernetes.io/zone";

/// The EndpointSlices of a Service. Empty if the Service has no selector. `pods` are the pods of
/// its namespace; an endpoint has the zone of its pod's node.
pub(super) fn slices(
    service: &Service,
    pods: &[&Pod],
    nodes: &BTreeMap<String, Node>,
) -> Vec<EndpointSlice> {
    let Some(spec) = &service.spec else {
        return Vec::new();
    };
    let Some(selector) = spec
        .selector
        .as_ref()
        .filter(|selector| !selector.is_empty())
    else {
        return Vec::new();
    };
    let publish_unready = spec.publish_not_ready_addresses.unwrap_or(false);
    // Pods that map a named port to different numbers need separate slices.
    let mut groups: BTreeMap<_, (Vec<EndpointPort>, Vec<Endpoint>)> = BTreeMap::new();
    let selected = pods
        .iter()
        .filter(|pod| matches(selector, pod.labels()) && running(pod));
    for pod in selected {
        let ports: Vec<EndpointPort> = spec
            .ports
            .iter()
            .flatten()
            .filter_map(|port| endpoint_port(port, pod))
            .collect();
        let numbers: Vec<_> = ports.iter().map(|port| port.port).collect();
        for (family, address) in addresses(pod) {
            if spec
                .ip_families
                .as_ref()
                .is_none_or(|families| families.iter().any(|item| item == family))
            {
                let (_, endpoints) = groups
                    .entry((family, numbers.clone()))
                    .or_insert_with(|| (ports.clone(), Vec::new()));
                endpoints.push(endpoint(pod, address, publish_unready, nodes));
            }
        }
    }
    let name = service.name_any();
    groups
        .into_iter()
        .enumerate()
        .map(
            |(number, ((family, _), (ports, endpoints)))| EndpointSlice {
                address_type: family.into(),
                endpoints,
                metadata: ObjectMeta {
                    name: Some(format!("{name}-{number}")),
                    namespace: service.metadata.namespace.clone(),
                    labels: Some(BTreeMap::from([(SERVICE_NAME.into(), name.clone())])),
                    ..ObjectMeta::default()
                },
                ports: Some(ports),
            },
        )
        .collect()
}

/// Whether the labels contain all labels of the selector.
fn matches(selector: &BTreeMap<String, String>, labels: &BTreeMap<String, String>) -> bool {
    selector
        .iter()
        .all(|(key, value)| labels.get(key) == Some(value))
}

/// Whether the pod has the condition Ready.
pub(super) fn ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn running(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    !matches!(phase, Some("Succeeded" | "Failed"))
}

/// The address type, as in an EndpointSlice, and address of each pod IP.
fn addresses(pod: &Pod) -> impl Iterator<Item = (&'static str, &str)> {
    let ips = pod
        .status
        .iter()
        .flat_map(|status| status.pod_ips.iter().flatten());
    ips.map(|ip| {
        (
            if ip.ip.contains(':') { "IPv6" } else { "IPv4" },
            ip.ip.as_str(),
        )
    })
}

fn endpoint(
    pod: &Pod,
    address: &str,
    publish_unready: bool,
    nodes: &BTreeMap<String, Node>,
) -> Endpoint {
    let node_name = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
    let node = node_name.as_ref().and_then(|name| nodes.get(name));
    let terminating = pod.metadata.deletion_timestamp.is_some();
    let serving = ready(pod);
    Endpoint {
        addresses: vec![address.to_owned()],
        conditions: Some(EndpointConditions {
            ready: Some(publish_unready || (serving && !terminating)),
            serving: Some(serving),
            terminating: Some(terminating),
        }),
        zone: node.and_then(|node| node.labels().get(ZONE).cloned()),
        node_name,
        target_ref: Some(ObjectReference {
            kind: Some("Pod".into()),
            name: pod.metadata.name.clone(),
            namespace: pod.metadata.namespace.clone(),
            uid: pod.metadata.uid.clone(),
            ..ObjectReference::default()
        }),
        ..Endpoint::default()
    }
}

/// Resolves the target port. Returns `None` if the pod has no port with the requested name.
fn endpoint_port(port: &ServicePort, pod: &Pod) -> Option<EndpointPort> {
    let number = match &port.target_port {
        None => port.port,
        Some(IntOrString::Int(number)) => *number,
        Some(IntOrString::String(name)) => {
            let containers = &pod.spec.as_ref()?.containers;
            let mut ports = containers
                .iter()
                .flat_map(|container| container.ports.iter().flatten());
            ports
                .find(|port| port.name.as_ref() == Some(name))?
                .container_port
        }
    };
    Some(EndpointPort {
        app_protocol: port.app_protocol.clone(),
        name: Some(port.name.clone().unwrap_or_default()),
        port: Some(number),
        protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".into())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service() -> Service {
        serde_yaml_ng::from_str(
            "{metadata: {name: shop, namespace: a}, spec: {selector: {app: shop}, ports: [{port: 80, targetPort: web}], ipFamilies: [IPv4]}}",
        )
        .unwrap()
    }

    fn pod(name: &str, port: u16, ready: &str, more: &str) -> Pod {
        let yaml = format!(
            "{{metadata: {{name: {name}, namespace: a, labels: {{app: shop}}{more}}}, \
             spec: {{containers: [{{name: c, ports: [{{name: web, containerPort: {port}}}]}}]}}, \
             status: {{phase: Running, podIPs: [{{ip: 10.0.0.{port}}}, {{ip: 'fd00::{port}'}}], conditions: [{{type: Ready, status: '{ready}'}}]}}}}"
        );
        serde_yaml_ng::from_str(&yaml).unwrap()
    }

    fn nodes() -> BTreeMap<String, Node> {
        let node = "{metadata: {name: n, labels: {topology.kubernetes.io/zone: eu-1}}}";
        BTreeMap::from([("n".to_owned(), serde_yaml_ng::from_str(node).unwrap())])
    }

    fn conditions(endpoint: &Endpoint) -> (bool, bool, bool) {
        let conditions = endpoint.conditions.as_ref().unwrap();
        (
            conditions.ready.unwrap(),
            conditions.serving.unwrap(),
            conditions.terminating.unwrap(),
        )
    }

    #[test]
    fn reports_readiness_and_termination_separately() {
        let pods = [
            pod("up", 81, "True", ""),
            pod("down", 81, "False", ""),
            pod(
                "terminating",
                81,
                "True",
                ", deletionTimestamp: '2026-01-01T00:00:00Z'",
            ),
        ];
        let slices = slices(&service(), &pods.iter().collect::<Vec<_>>(), &nodes());
        assert_eq!(slices.len(), 1, "one address type and one set of ports");
        let seen: Vec<_> = slices[0].endpoints.iter().map(conditions).collect();
        assert_eq!(
            seen,
            [
                (true, true, false),
                (false, false, false),
                (false, true, true)
            ]
        );
        assert_eq!(
            slices[0].metadata.labels.as_ref().unwrap()[SERVICE_NAME],
            "shop"
        );
    }

    #[test]
    fn endpoints_have_the_zone_of_their_node() {
        let pods = ["n", "other"].map(|node| {
            let mut pod = pod(node, 81, "True", "");
            pod.spec.as_mut().unwrap().node_name = Some(node.into());
            pod
        });
        let slices = slices(&service(), &pods.iter().collect::<Vec<_>>(), &nodes());
        let zones: Vec<_> = slices[0]
            .endpoints
            .iter()
            .map(|one| one.zone.as_deref())
            .collect();
        assert_eq!(zones, [Some("eu-1"), None]);
    }

    #[test]
    fn creates_one_slice_per_number_of_a_named_port() {
        let pods = [pod("one", 81, "True", ""), pod("two", 82, "True", "")];
        let slices = slices(&service(), &pods.iter().collect::<Vec<_>>(), &nodes());
        let ports: Vec<_> = slices
            .iter()
            .map(|slice| slice.ports.as_ref().unwrap()[0].port.unwrap())
            .collect();
        assert_eq!(ports, [81, 82]);
    }

    #[test]
    fn ignores_completed_and_unselected_pods() {
        let mut completed = pod("completed", 81, "False", "");
        completed.status.as_mut().unwrap().phase = Some("Succeeded".into());
        let mut other = pod("other", 81, "True", "");
        other.metadata.labels = None;
        assert!(slices(&service(), &[&completed, &other], &nodes()).is_empty());
    }
}
