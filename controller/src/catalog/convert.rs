//! Conversion of Kubernetes objects to the values of the index. Pure; the only module that uses
//! both.
//!
//! Content that Kubernetes rejects is an error here too, for objects from files.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use diy_mesh_proto::route::is_hostname;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::injected::Injected;
use super::slim::{self, Metadata};
use crate::kinds::pod::Inbound;
use crate::kinds::service::{Canary, ServicePort, TargetPort, Transport, excess};
use crate::kinds::slice::{PodReference, SliceEndpoint, SlicePort};
use crate::kinds::{Node, Pod, Service, Slice};
use crate::object::rejection::{shortened, unsupported};
use crate::object::{Key, Kind, Meta, TargetReference};

const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
/// The default of Kubernetes: three hours.
const DEFAULT_AFFINITY_SECONDS: u32 = 10_800;
const CANARY_OF: &str = "diy-service-mesh/canary-of";
const CANARY_WEIGHT: &str = "diy-service-mesh/canary-weight";
/// Ports of a slice. Kubernetes rejects more.
const MAX_SLICE_PORTS: usize = 20_000;
/// The name of a zone in a slice. Longer ones are unknown: each state and each message with the
/// endpoint has a copy.
const MAX_ZONE_BYTES: usize = 253;
const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
/// An invalid object: the field, its value and the expected value.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct ConvertError(pub(super) String);

fn invalid(field: &str, value: impl fmt::Display, expected: &str) -> ConvertError {
    ConvertError(format!("{field}: {value} is not {expected}"))
}

pub(super) fn service(object: &slim::Service) -> Result<Service, ConvertError> {
    let key = key(&object.metadata)?;
    let spec = object.spec.clone().unwrap_or_default();
    let ports = spec.ports.iter().flatten().map(service_port);
    let (ports, excess) = excess::split(ports.collect::<Result<_, _>>()?);
    let is_external = spec.type_.as_deref() == Some("ExternalName");
    let (cluster_ips, external_ips, external_name) = if is_external {
        (
            vec![],
            vec![],
            spec.external_name.as_deref().unwrap_or_default(),
        )
    } else {
        (cluster_ips(&spec)?, external_ips(object, &spec)?, "")
    };
    Ok(Service {
        uid: object.metadata.uid.as_deref().unwrap_or_default().into(),
        is_headless: is_headless(&spec),
        selector: spec.selector.clone().unwrap_or_default(),
        cluster_ips,
        external_ips,
        external_local: spec.external_traffic_policy.as_deref() == Some("Local"),
        created: created(&object.metadata),
        ports,
        excess,
        external_name: external_name.into(),
        publish_not_ready: spec.publish_not_ready_addresses.unwrap_or(false),
        session_affinity: session_affinity(&spec),
        local_only: spec.internal_traffic_policy.as_deref() == Some("Local"),
        canary: canary(&key, &object.metadata).map(Box::new),
        key,
    })
}

/// An invalid annotation is reported, and does not make the Service invalid.
fn canary(key: &Key, metadata: &Metadata) -> Option<Canary> {
    let annotations = metadata.annotations.as_ref()?;
    let [of, weight] = [&annotations.canary_of, &annotations.canary_weight]
        .map(|text| text.as_deref().map(str::trim));
    of.or(weight)?;
    let (of, weight) = (of.unwrap_or_default(), weight.unwrap_or_default());
    // Logs and Events contain the error: an annotation may have 256 KiB.
    let invalid = |name, value, expected| Err(unsupported(name, value, expected));
    let percent = weight.parse().ok().filter(|percent| *percent <= 100);
    let meta = Meta {
        kind: Kind::Service,
        key: key.clone(),
        created: created(metadata),
        uid: metadata.uid.as_deref().unwrap_or_default().into(),
        generation: 0,
        bytes: of.len() + weight.len(),
        dropped: None,
    };
    let share = match percent {
        _ if !is_hostname(of) || of.contains('.') => {
            invalid(CANARY_OF, of, "the name of a Service of the same namespace")
        }
        None => invalid(CANARY_WEIGHT, weight, "an integer from 0 to 100"),
        Some(percent) => Ok(percent),
    };
    let parent = TargetReference::service(&shortened(of));
    Some(Canary::new(meta, vec![parent], share))
}

/// Without the label with the name of its Service, a slice belongs to none. A slice of host names
/// (FQDN) has no endpoints.
pub(super) fn slice(object: &slim::EndpointSlice) -> Result<Slice, ConvertError> {
    let key = key(&object.metadata)?;
    let service = label(&object.metadata, SERVICE_NAME_LABEL).map(|name| Key {
        namespace: key.namespace.clone(),
        name: name.into(),
    });
    let has_addresses = matches!(object.address_type.as_str(), "IPv4" | "IPv6");
    let endpoints = object.endpoints.iter().flatten().filter(|_| has_addresses);
    let endpoints = endpoints.filter_map(|endpoint| slice_endpoint(endpoint, &key.namespace));
    let listed = object.ports.as_deref().unwrap_or_default();
    if listed.len() > MAX_SLICE_PORTS {
        let expected = format!("at most {MAX_SLICE_PORTS} ports");
        return Err(invalid("ports", listed.len(), &expected));
    }
    let ports = listed.iter().filter_map(slice_port);
    let mut ports = ports.collect::<Result<Vec<_>, _>>()?;
    ports.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(Slice {
        service,
        ports,
        endpoints: endpoints.collect::<Result<_, _>>()?,
        key,
    })
}

pub(super) fn pod(object: &slim::Pod, trust_domain: &str) -> Result<Pod, ConvertError> {
    let (key, metadata) = (key(&object.metadata)?, &object.metadata);
    let spec = object.spec.as_ref();
    let status = object.status.clone().unwrap_or_default();
    let is_finished = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    let host_network = spec.and_then(|spec| spec.host_network).unwrap_or(false);
    let account = spec.and_then(|spec| spec.service_account_name.as_deref());
    let account = account.filter(|name| !name.is_empty()).unwrap_or("default");
    let identity = || format!("spiffe://{trust_domain}/ns/{}/sa/{account}", key.namespace).into();
    let injected = Injected::of(object);
    let ready = !is_finished && is_true(&status.conditions, "Ready");
    let gates = spec.iter().flat_map(|spec| &spec.readiness_gates).flatten();
    let mut needed = gates.map(|gate| gate.condition_type.as_str());
    let works = is_true(&status.conditions, "ContainersReady")
        && needed.all(|gate| is_true(&status.conditions, gate));
    Ok(Pod {
        uid: metadata.uid.as_deref().unwrap_or_default().into(),
        addresses: if is_finished {
            vec![]
        } else {
            pod_addresses(&status)?
        },
        host_network,
        terminating: metadata.deletion_timestamp.is_some(),
        ready,
        unready_by_node: !is_finished && !ready && works,
        created: created(metadata),
        node: spec
            .and_then(|spec| spec.node_name.as_deref())
            .unwrap_or_default()
            .into(),
        zone: label(metadata, ZONE_LABEL).unwrap_or_default().into(),
        identity: injected.is_some().then(identity),
        bypassed: injected
            .as_ref()
            .map(Injected::bypassed)
            .unwrap_or_default(),
        restricts_udp: injected.as_ref().is_some_and(Injected::restricts_udp),
        inbound: injected.map_or(Inbound::default(), |injected| injected.inbound()),
        labels: metadata.labels.clone().unwrap_or_default(),
        key,
    })
}

pub(super) fn node(object: &slim::Node) -> Result<Node, ConvertError> {
    let name = key(&object.metadata)?.name;
    let addresses = object.status.iter().flat_map(|status| &status.addresses);
    let addresses = addresses
        .flatten()
        .filter(|address| matches!(address.type_.as_str(), "InternalIP" | "ExternalIP"));
    let addresses = addresses.map(|ip| address("status.addresses", &ip.address));
    let conditions = object.status.iter().flat_map(|status| &status.conditions);
    let mut conditions = conditions.flatten();
    Ok(Node {
        key: Key::new("", &name),
        addresses: addresses.collect::<Result<_, _>>()?,
        unready: conditions.any(|one| one.type_ == "Ready" && one.status != "True"),
        zone: label(&object.metadata, ZONE_LABEL)
            .unwrap_or_default()
            .into(),
    })
}

fn is_true(conditions: &Option<Vec<slim::Condition>>, name: &str) -> bool {
    let mut conditions = conditions.iter().flatten();
    conditions.any(|condition| condition.type_ == name && condition.status == "True")
}

pub(super) fn key(metadata: &Metadata) -> Result<Key, ConvertError> {
    let name = metadata.name.as_deref().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| ConvertError("metadata.name is missing".to_owned()))?;
    let namespace = metadata
        .namespace
        .as_deref()
        .filter(|name| !name.is_empty());
    Ok(Key::new(namespace.unwrap_or("default"), name))
}

/// The creation time in seconds since 1970, or 0.
pub(super) fn created(metadata: &Metadata) -> i64 {
    let created = metadata.creation_timestamp.as_ref();
    created.map_or(0, |time| time.0.as_second())
}

fn label<'a>(metadata: &'a Metadata, name: &str) -> Option<&'a str> {
    let label = metadata.labels.as_ref()?.get(name)?;
    Some(label.as_str()).filter(|label| !label.is_empty())
}

fn is_headless(spec: &slim::ServiceSpec) -> bool {
    spec.cluster_ip.as_deref() == Some("None")
}

fn cluster_ips(spec: &slim::ServiceSpec) -> Result<Vec<IpAddr>, ConvertError> {
    let listed = spec.cluster_ips.as_deref().unwrap_or_default();
    let all = if listed.is_empty() {
        spec.cluster_ip.as_slice()
    } else {
        listed
    };
    all.iter()
        .filter(|ip| !ip.is_empty() && *ip != "None")
        .map(|ip| address("spec.clusterIPs", ip))
        .collect()
}

fn session_affinity(spec: &slim::ServiceSpec) -> u32 {
    if spec.session_affinity.as_deref() != Some("ClientIP") {
        return 0;
    }
    let config = spec.session_affinity_config.as_ref();
    let client_ip = config.and_then(|config| config.client_ip.as_ref());
    let timeout = client_ip.and_then(|client_ip| client_ip.timeout_seconds);
    let timeout = timeout.and_then(|timeout| u32::try_from(timeout).ok());
    timeout.unwrap_or(DEFAULT_AFFINITY_SECONDS)
}

/// The external IPs, and the IPs of the load balancer that kube-proxy forwards itself: not those in
/// `ipMode: Proxy`, nor if it restricts their clients.
fn external_ips(
    object: &slim::Service,
    spec: &slim::ServiceSpec,
) -> Result<Vec<IpAddr>, ConvertError> {
    let restricted = spec.load_balancer_source_ranges.iter().flatten().count() > 0;
    let has_balancer = spec.type_.as_deref() == Some("LoadBalancer") && !restricted;
    let status = object.status.iter().filter(|_| has_balancer);
    let balancer = status.filter_map(|status| status.load_balancer.as_ref());
    let ingress = balancer.flat_map(|balancer| balancer.ingress.iter().flatten());
    let vip = ingress.filter(|ingress| ingress.ip_mode.as_deref() != Some("Proxy"));
    let vip = vip.filter_map(|ingress| ingress.ip.as_ref());
    let external = spec.external_ips.iter().flatten();
    let all = external.chain(vip).filter(|ip| !ip.is_empty());
    all.map(|ip| address("spec.externalIPs or status.loadBalancer.ingress", ip))
        .collect()
}

fn service_port(port: &slim::ServicePort) -> Result<ServicePort, ConvertError> {
    let number = port_number("spec.ports.port", port.port)?;
    let target = match &port.target_port {
        Some(IntOrString::Int(target)) if *target != 0 => {
            TargetPort::Number(port_number("spec.ports.targetPort", *target)?)
        }
        Some(IntOrString::String(name)) if !name.is_empty() => TargetPort::Name(name.clone()),
        _ => TargetPort::Number(number),
    };
    Ok(ServicePort {
        name: port.name.clone().unwrap_or_default(),
        port: number,
        node_port: match port.node_port.unwrap_or_default() {
            0 => None,
            node_port => Some(port_number("spec.ports.nodePort", node_port)?),
        },
        target,
        protocol: transport("spec.ports.protocol", port.protocol.as_deref())?,
        app_protocol: port.app_protocol.clone().unwrap_or_default(),
    })
}

/// `None` for a port without a number, which means all ports.
fn slice_port(port: &slim::EndpointPort) -> Option<Result<SlicePort, ConvertError>> {
    let number = port.port?;
    let convert = || {
        Ok(SlicePort {
            name: port.name.clone().unwrap_or_default(),
            port: port_number("ports.port", number)?,
            protocol: transport("ports.protocol", port.protocol.as_deref())?,
        })
    };
    Some(convert())
}

/// `None` for an endpoint without an address.
fn slice_endpoint(
    endpoint: &slim::Endpoint,
    namespace: &Arc<str>,
) -> Option<Result<SliceEndpoint, ConvertError>> {
    let first = endpoint.addresses.as_ref()?.first()?;
    let conditions = endpoint.conditions.clone().unwrap_or_default();
    let ready = conditions.ready.unwrap_or(true);
    let hints = || endpoint.hints.iter();
    let for_nodes = hints().flat_map(|hints| hints.for_nodes.iter().flatten());
    let for_zones = hints().flat_map(|hints| hints.for_zones.iter().flatten());
    let zone = endpoint.zone.as_deref();
    let zone = zone.filter(|zone| zone.len() <= MAX_ZONE_BYTES);
    let target = endpoint.target_ref.as_ref();
    let target = target.filter(|target| target.kind.as_deref() == Some("Pod"));
    let pod = target.and_then(|target| {
        let other = target.namespace.as_deref().map(Arc::from);
        Some(PodReference {
            key: Key {
                namespace: other.unwrap_or_else(|| namespace.clone()),
                name: target.name.as_deref()?.into(),
            },
            uid: target.uid.as_deref().unwrap_or_default().into(),
        })
    });
    Some(
        address("endpoints.addresses", first).map(|address| SliceEndpoint {
            address,
            ready,
            serving: conditions.serving.unwrap_or(ready),
            terminating: conditions.terminating.unwrap_or(false),
            node: endpoint.node_name.as_deref().unwrap_or_default().into(),
            zone: zone.unwrap_or_default().into(),
            node_hints: for_nodes.map(|node| node.name.as_str().into()).collect(),
            zone_hints: for_zones.map(|zone| zone.name.as_str().into()).collect(),
            pod,
        }),
    )
}

fn pod_addresses(status: &slim::PodStatus) -> Result<Vec<IpAddr>, ConvertError> {
    let listed = status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str());
    let all = listed.chain(status.pod_ip.as_deref());
    let mut addresses = Vec::new();
    for ip in all.filter(|ip| !ip.is_empty()) {
        let ip = address("status.podIPs", ip)?;
        if !addresses.contains(&ip) {
            addresses.push(ip);
        }
    }
    Ok(addresses)
}

fn address(field: &str, value: &str) -> Result<IpAddr, ConvertError> {
    let address = value.parse();
    address.map_err(|_| invalid(field, format_args!("{value:?}"), "an IP address"))
}

fn port_number(field: &str, value: i32) -> Result<u16, ConvertError> {
    let port = u16::try_from(value).ok().filter(|port| *port != 0);
    port.ok_or_else(|| invalid(field, value, "a port (1 to 65535)"))
}

pub(super) fn transport(field: &str, value: Option<&str>) -> Result<Transport, ConvertError> {
    match value.unwrap_or_default() {
        "TCP" | "" => Ok(Transport::Tcp),
        "UDP" => Ok(Transport::Udp),
        "SCTP" => Ok(Transport::Sctp),
        other => Err(invalid(
            field,
            format_args!("{other:?}"),
            "TCP, UDP or SCTP",
        )),
    }
}

#[cfg(test)]
mod tests;
