//! Conversion of Kubernetes objects to the values of the index. Pure; the only module that uses
//! both.
//!
//! Content that Kubernetes rejects is an error here too, for objects from files.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::injected::Injected;
use crate::index::excess;
use crate::index::object::{
    Canary, Inbound, Key, Kind, Node, Object, Pod, PodReference, Service, ServicePort, Slice,
    SliceEndpoint, SlicePort, TargetPort, Transport,
};

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
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct ConvertError(pub(super) String);

fn invalid(field: &str, value: impl fmt::Display, expected: &str) -> ConvertError {
    ConvertError(format!("{field}: {value} is not {expected}"))
}

/// A Kubernetes object of the catalog.
pub(super) trait CatalogObject {
    /// Converts the object, which has this kind. Identities are in this trust domain.
    fn convert(&self, kind: Kind, trust_domain: &str) -> Result<Object, ConvertError>;

    /// The paths of unknown fields that are not parsed with the object.
    fn unknown_fields(&self, _: Kind) -> Vec<String> {
        Vec::new()
    }
}

impl CatalogObject for core::Service {
    fn convert(&self, _: Kind, _: &str) -> Result<Object, ConvertError> {
        service(self).map(Object::Service)
    }
}

impl CatalogObject for discovery::EndpointSlice {
    fn convert(&self, _: Kind, _: &str) -> Result<Object, ConvertError> {
        slice(self).map(Object::Slice)
    }
}

impl CatalogObject for core::Pod {
    fn convert(&self, _: Kind, trust_domain: &str) -> Result<Object, ConvertError> {
        pod(self, trust_domain).map(Object::Pod)
    }
}

impl CatalogObject for core::Node {
    fn convert(&self, _: Kind, _: &str) -> Result<Object, ConvertError> {
        node(self).map(Object::Node)
    }
}

fn service(object: &core::Service) -> Result<Service, ConvertError> {
    let spec = object.spec.clone().unwrap_or_default();
    let ports = spec.ports.iter().flatten().map(service_port);
    let (ports, excess) = excess::split(ports.collect::<Result<_, _>>()?);
    let is_external = spec.type_.as_deref() == Some("ExternalName");
    let (cluster_ips, external_ips, external_name) = match is_external {
        true => (
            vec![],
            vec![],
            spec.external_name.as_deref().unwrap_or_default(),
        ),
        false => (cluster_ips(&spec)?, external_ips(object, &spec)?, ""),
    };
    Ok(Service {
        key: key(&object.metadata)?,
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
        canary: canary(&object.metadata),
    })
}

/// An invalid annotation is reported, and does not make the Service invalid.
fn canary(metadata: &ObjectMeta) -> Option<Canary> {
    let annotation = |name| {
        metadata
            .annotations
            .as_ref()?
            .get(name)
            .map(|text| text.trim())
    };
    let (of, weight) = (annotation(CANARY_OF), annotation(CANARY_WEIGHT));
    of.or(weight)?;
    let (of, weight) = (of.unwrap_or_default(), weight.unwrap_or_default());
    let invalid = |name, value, expected| Err(format!("{name}: {value:?} is not {expected}"));
    let percent = weight.parse().ok().filter(|percent| *percent <= 100);
    Some(Canary {
        of: of.into(),
        weight: match percent {
            _ if of.is_empty() || of.contains(['/', '.']) => {
                invalid(CANARY_OF, of, "the name of a Service of the same namespace")
            }
            None => invalid(CANARY_WEIGHT, weight, "an integer from 0 to 100"),
            Some(percent) => Ok(percent),
        },
    })
}

/// Without the label with the name of its Service, a slice belongs to none. A slice of host names
/// (FQDN) has no endpoints.
fn slice(object: &discovery::EndpointSlice) -> Result<Slice, ConvertError> {
    let key = key(&object.metadata)?;
    let service = label(&object.metadata, SERVICE_NAME_LABEL).map(|name| Key {
        namespace: key.namespace.clone(),
        name: name.into(),
    });
    let has_addresses = matches!(object.address_type.as_str(), "IPv4" | "IPv6");
    let endpoints = object.endpoints.iter().filter(|_| has_addresses);
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

fn pod(object: &core::Pod, trust_domain: &str) -> Result<Pod, ConvertError> {
    let (key, metadata) = (key(&object.metadata)?, &object.metadata);
    let spec = object.spec.as_ref();
    let status = object.status.clone().unwrap_or_default();
    let is_finished = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    let host_network = spec.and_then(|spec| spec.host_network).unwrap_or(false);
    let account = spec.and_then(|spec| spec.service_account_name.as_deref());
    let account = account.filter(|name| !name.is_empty()).unwrap_or("default");
    let identity = || format!("spiffe://{trust_domain}/ns/{}/sa/{account}", key.namespace).into();
    let injected = Injected::of(object);
    Ok(Pod {
        uid: metadata.uid.as_deref().unwrap_or_default().into(),
        addresses: match is_finished || host_network {
            true => vec![],
            false => pod_addresses(&status)?,
        },
        terminating: metadata.deletion_timestamp.is_some(),
        ready: !is_finished && is_ready(&status),
        created: created(metadata),
        node: spec
            .and_then(|spec| spec.node_name.as_deref())
            .unwrap_or_default()
            .into(),
        zone: label(metadata, ZONE_LABEL).unwrap_or_default().into(),
        identity: injected.is_some().then(identity),
        bypassed: injected.as_ref().map_or(vec![], Injected::bypassed),
        inbound: injected.map_or(Inbound::default(), |injected| injected.inbound()),
        labels: metadata.labels.clone().unwrap_or_default(),
        key,
    })
}

fn node(object: &core::Node) -> Result<Node, ConvertError> {
    let name = key(&object.metadata)?.name;
    let addresses = object.status.iter().flat_map(|status| &status.addresses);
    let addresses = addresses
        .flatten()
        .filter(|address| matches!(address.type_.as_str(), "InternalIP" | "ExternalIP"));
    let addresses = addresses.map(|ip| address("status.addresses", &ip.address));
    Ok(Node {
        key: Key::new("", &name),
        addresses: addresses.collect::<Result<_, _>>()?,
        zone: label(&object.metadata, ZONE_LABEL)
            .unwrap_or_default()
            .into(),
    })
}

fn is_ready(status: &core::PodStatus) -> bool {
    let mut conditions = status.conditions.iter().flatten();
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

pub(super) fn key(metadata: &ObjectMeta) -> Result<Key, ConvertError> {
    let name = metadata.name.as_deref().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| ConvertError("metadata.name is missing".to_owned()))?;
    let namespace = metadata
        .namespace
        .as_deref()
        .filter(|name| !name.is_empty());
    Ok(Key::new(namespace.unwrap_or("default"), name))
}

/// The creation time in seconds since 1970, or 0.
pub(super) fn created(metadata: &ObjectMeta) -> i64 {
    let created = metadata.creation_timestamp.as_ref();
    created.map_or(0, |time| time.0.as_second())
}

fn label<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    let label = metadata.labels.as_ref()?.get(name)?;
    Some(label.as_str()).filter(|label| !label.is_empty())
}

fn is_headless(spec: &core::ServiceSpec) -> bool {
    spec.cluster_ip.as_deref() == Some("None")
}

fn cluster_ips(spec: &core::ServiceSpec) -> Result<Vec<IpAddr>, ConvertError> {
    let listed = spec.cluster_ips.as_deref().unwrap_or_default();
    let all = match listed.is_empty() {
        true => spec.cluster_ip.as_slice(),
        false => listed,
    };
    all.iter()
        .filter(|ip| !ip.is_empty() && *ip != "None")
        .map(|ip| address("spec.clusterIPs", ip))
        .collect()
}

fn session_affinity(spec: &core::ServiceSpec) -> u32 {
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
    object: &core::Service,
    spec: &core::ServiceSpec,
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

fn service_port(port: &core::ServicePort) -> Result<ServicePort, ConvertError> {
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
fn slice_port(port: &discovery::EndpointPort) -> Option<Result<SlicePort, ConvertError>> {
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
    endpoint: &discovery::Endpoint,
    namespace: &Arc<str>,
) -> Option<Result<SliceEndpoint, ConvertError>> {
    let first = endpoint.addresses.first()?;
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

fn pod_addresses(status: &core::PodStatus) -> Result<Vec<IpAddr>, ConvertError> {
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
mod tests {
    use super::*;
    use crate::index::object::ContainerPort;

    fn read<T: for<'de> serde::Deserialize<'de>>(yaml: &str) -> T {
        serde_yaml_ng::from_str(yaml).expect("the test's YAML is right")
    }

    #[test]
    fn dual_stack_service_keeps_both_cluster_ips_and_every_port() {
        let converted = service(&read(
            "metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.0.7
  clusterIPs: [10.96.0.7, 'fd00::7']
  ports:
  - {name: http, port: 80, targetPort: 8080, appProtocol: http}
  - {name: admin, port: 9000, targetPort: admin-port}
  - {name: dns, port: 53, protocol: UDP}",
        ))
        .unwrap();
        assert_eq!(
            converted.cluster_ips,
            [
                "10.96.0.7".parse::<IpAddr>().unwrap(),
                "fd00::7".parse().unwrap()
            ]
        );
        assert_eq!(converted.ports[0].target, TargetPort::Number(8080));
        assert_eq!(converted.ports[0].app_protocol, "http");
        assert_eq!(
            converted.ports[1].target,
            TargetPort::Name("admin-port".into())
        );
        assert_eq!(converted.ports[2].target, TargetPort::Number(53));
        assert_eq!(converted.ports[2].protocol, Transport::Udp);
    }

    #[test]
    fn headless_and_external_services_have_no_cluster_ip() {
        let headless = service(&read(
            "{metadata: {name: db}, spec: {clusterIP: None, clusterIPs: [None]}}",
        ))
        .unwrap();
        assert!(headless.cluster_ips.is_empty());
        assert_eq!(headless.key, Key::new("default", "db"));
        let external = service(&read(
            "{metadata: {name: out}, spec: {type: ExternalName, externalName: example.org}}",
        ))
        .unwrap();
        assert!(external.cluster_ips.is_empty());
        assert_eq!(&*external.external_name, "example.org");
    }

    #[test]
    fn invalid_canary_annotations_are_errors_of_the_canary_only() {
        let canary = |annotations: &str| {
            let yaml = format!("{{metadata: {{name: web-v2, annotations: {{{annotations}}}}}}}");
            service(&read(&yaml)).unwrap().canary
        };
        let error = |annotations: &str| canary(annotations).unwrap().weight.unwrap_err();
        assert_eq!(canary("other: x"), None);
        let valid = canary("diy-service-mesh/canary-of: web, diy-service-mesh/canary-weight: '10'");
        let expected = Canary {
            of: "web".into(),
            weight: Ok(10),
        };
        assert_eq!(valid, Some(expected));
        let name = "is not the name of a Service of the same namespace";
        let weight = "is not an integer from 0 to 100";
        for (of, percent, expected) in [
            ("web", "101", format!("canary-weight: \"101\" {weight}")),
            ("web", "-1", format!("canary-weight: \"-1\" {weight}")),
            ("web", "10%", format!("canary-weight: \"10%\" {weight}")),
            ("web", "", format!("canary-weight: \"\" {weight}")),
            ("far/web", "1", format!("canary-of: \"far/web\" {name}")),
            ("web.far", "1", format!("canary-of: \"web.far\" {name}")),
            ("", "1", format!("canary-of: \"\" {name}")),
        ] {
            let annotations = format!(
                "diy-service-mesh/canary-of: '{of}', diy-service-mesh/canary-weight: '{percent}'"
            );
            assert_eq!(error(&annotations), format!("diy-service-mesh/{expected}"));
        }
        let alone = error("diy-service-mesh/canary-weight: '1'");
        assert!(
            alone.starts_with("diy-service-mesh/canary-of: \"\""),
            "{alone}"
        );
    }

    #[test]
    fn session_affinity_of_a_client_ip_has_a_timeout() {
        let timeout = |spec: &str| {
            let yaml = format!("{{metadata: {{name: web}}, spec: {{{spec}}}}}");
            service(&read(&yaml)).unwrap().session_affinity
        };
        let config = "sessionAffinityConfig: {clientIP: {timeoutSeconds: 60}}";
        assert_eq!(timeout("sessionAffinity: ClientIP"), 10_800);
        assert_eq!(timeout(&format!("sessionAffinity: ClientIP, {config}")), 60);
        assert_eq!(timeout(&format!("sessionAffinity: None, {config}")), 0);
    }

    #[test]
    fn addresses_for_traffic_from_outside_are_those_that_kube_proxy_forwards_itself() {
        let balanced = |rest: &str| {
            service(&read(&format!(
                "metadata: {{name: web}}
spec: {{clusterIP: 10.96.0.7, externalIPs: [198.51.100.1], {rest}, externalTrafficPolicy: Local, ports: [{{port: 80, nodePort: 30080}}]}}
status: {{loadBalancer: {{ingress: [{{ip: 203.0.113.1}}, {{ip: 203.0.113.2, ipMode: VIP}}, {{ip: 203.0.113.3, ipMode: Proxy}}, {{hostname: lb.example.org}}]}}}}"
            )))
            .unwrap()
        };
        let texts = |service: &Service| {
            let ips = service.external_ips.iter();
            ips.map(ToString::to_string).collect::<Vec<_>>()
        };
        let web = balanced("type: LoadBalancer");
        assert_eq!(texts(&web), ["198.51.100.1", "203.0.113.1", "203.0.113.2"]);
        assert!(web.external_local && web.ports[0].node_port == Some(30080));
        let restricted = balanced("type: LoadBalancer, loadBalancerSourceRanges: [192.0.2.0/24]");
        assert_eq!(texts(&restricted), ["198.51.100.1"]);
        assert_eq!(texts(&balanced("type: NodePort")), ["198.51.100.1"]);
        assert!(texts(&balanced("type: ExternalName")).is_empty());
    }

    #[test]
    fn missing_conditions_mean_ready_and_not_terminating() {
        let converted = slice(&read(
            "metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}, {name: everything}]
endpoints:
- addresses: [10.0.0.1, 10.0.0.2]
- {addresses: [10.0.0.3], conditions: {ready: false, terminating: true}, zone: a, targetRef: {kind: Pod, name: web-x}}",
        ))
        .unwrap();
        assert_eq!(converted.service, Some(Key::new("shop", "web")));
        assert_eq!(
            converted.ports,
            [SlicePort {
                name: "http".into(),
                port: 8080,
                protocol: Transport::Tcp
            }]
        );
        assert_eq!(
            converted.endpoints.len(),
            2,
            "addresses beyond an endpoint's first mean nothing"
        );
        assert!(converted.endpoints[0].ready && !converted.endpoints[0].terminating);
        assert!(converted.endpoints[0].serving && !converted.endpoints[1].serving);
        assert!(!converted.endpoints[1].ready && converted.endpoints[1].terminating);
        assert_eq!(
            converted.endpoints[1].pod.as_ref().unwrap().key,
            Key::new("shop", "web-x")
        );
    }

    #[test]
    fn slice_of_names_has_no_endpoints() {
        let converted = slice(&read(
            "{metadata: {name: s}, addressType: FQDN, endpoints: [{addresses: [example.org]}]}",
        ))
        .unwrap();
        assert!(converted.endpoints.is_empty());
        assert_eq!(converted.service, None);
    }

    #[test]
    fn injected_pod_has_the_identity_of_its_service_account() {
        let converted = pod(
            &read(
                "metadata: {name: p, namespace: shop}
spec: {serviceAccountName: clerk, containers: [], initContainers: [{name: proxy, env: [{name: SERVICE_MESH_TOKEN_FILE}]}]}
status: {phase: Running, podIP: 10.0.0.1, podIPs: [{ip: 10.0.0.1}, {ip: 'fd00::1'}], conditions: [{type: Ready, status: 'True'}]}",
            ),
            "shop.example",
        )
        .unwrap();
        assert!(converted.ready);
        assert_eq!(
            converted.identity.as_deref(),
            Some("spiffe://shop.example/ns/shop/sa/clerk")
        );
        assert_eq!(converted.addresses.len(), 2);
    }

    #[test]
    fn annotations_and_labels_do_not_make_a_pod_meshed() {
        let converted = pod(&read(
            "metadata: {name: p, namespace: shop, labels: {diy-service-mesh/status: injected}, annotations: {diy-service-mesh/status: injected}}
spec: {containers: [{name: proxy, env: [{name: SERVICE_MESH_TOKEN_FILE}]}]}",
        ), "cluster.local")
        .unwrap();
        assert_eq!(converted.identity, None);
    }

    #[test]
    fn ports_that_do_not_pass_the_proxy_have_no_identity() {
        let converted = pod(&read(
            "metadata: {name: p, namespace: shop, annotations: {diy-service-mesh/skip-inbound-ports: '80'}}
spec:
  containers: [{name: app}]
  initContainers:
  - {name: proxy-init, args: ['--skip-inbound-ports=25,9000-9100']}
  - {name: proxy, args: [--admin-port=4001], env: [{name: SERVICE_MESH_TOKEN_FILE}]}",
        ), "cluster.local")
        .unwrap();
        for port in [25, 9000, 9100, 4001] {
            assert_eq!(converted.identity_at(port), None, "{port}");
        }
        for port in [26, 80, 8999, 9101, 4000] {
            assert_eq!(
                converted.identity_at(port).as_deref(),
                Some("spiffe://cluster.local/ns/shop/sa/default"),
                "{port}"
            );
        }
    }

    #[test]
    fn reads_inbound_configuration_from_the_arguments_of_the_proxy_only() {
        let converted = pod(
            &read(
                "metadata: {name: p, namespace: shop, annotations: {diy-service-mesh/inbound: permissive, diy-service-mesh/opaque-ports: '80'}}
spec:
  containers: [{name: app, args: ['--opaque-ports=81', '--allow-connect'], ports: [{name: http, containerPort: 8080}, {containerPort: 53, protocol: UDP}]}]
  initContainers: [{name: other, args: ['--opaque-ports=82']}, {name: proxy, args: ['--inbound=strict', '--opaque-ports=25,9000-9100'], ports: [{containerPort: 4001}], env: [{name: SERVICE_MESH_TOKEN_FILE}]}]",
            ),
            "cluster.local",
        )
        .unwrap();
        let opaque: Vec<u16> = (1..=u16::MAX)
            .filter(|port| converted.is_opaque_at(*port))
            .collect();
        assert_eq!(opaque, [vec![25], (9000..=9100).collect()].concat());
        assert!(converted.inbound.strict && !converted.inbound.allow_connect);
        let port = |name: &str, port, protocol| ContainerPort {
            name: name.into(),
            port,
            protocol,
        };
        assert_eq!(
            *converted.inbound.ports,
            [
                port("http", 8080, Transport::Tcp),
                port("", 53, Transport::Udp)
            ]
        );
        let plain = pod(
            &read("{metadata: {name: p}, spec: {containers: [{name: proxy, args: ['--inbound=strict']}]}}"),
            "cluster.local",
        )
        .unwrap();
        assert_eq!(plain.inbound, Inbound::default());
    }

    #[test]
    fn finished_and_host_network_pods_own_no_address() {
        for text in [
            "{metadata: {name: p}, spec: {containers: []}, status: {phase: Succeeded, podIP: 10.0.0.1}}",
            "{metadata: {name: p}, spec: {containers: []}, status: {phase: Failed, podIP: 10.0.0.1}}",
            "{metadata: {name: p}, spec: {hostNetwork: true, containers: []}, status: {phase: Running, podIP: 10.0.0.1}}",
        ] {
            assert!(
                pod(&read(text), "cluster.local")
                    .unwrap()
                    .addresses
                    .is_empty(),
                "{text}"
            );
        }
    }

    #[test]
    fn long_names_of_zones_are_unknown() {
        for (length, expected) in [(253, 253), (254, 0)] {
            let zone = "z".repeat(length);
            let text = format!(
                "{{metadata: {{name: s}}, addressType: IPv4, endpoints: [{{addresses: [10.0.0.1], zone: {zone}}}]}}"
            );
            let converted = slice(&read(&text)).unwrap();
            assert_eq!(converted.endpoints[0].zone.len(), expected);
        }
    }

    #[test]
    fn errors_name_the_field_and_the_value() {
        let wrong_ip =
            service(&read("{metadata: {name: s}, spec: {clusterIP: 10.0.0}}")).unwrap_err();
        assert_eq!(
            wrong_ip.to_string(),
            "spec.clusterIPs: \"10.0.0\" is not an IP address"
        );
        let wrong_port = service(&read(
            "{metadata: {name: s}, spec: {ports: [{port: 70000}]}}",
        ))
        .unwrap_err();
        assert_eq!(
            wrong_port.to_string(),
            "spec.ports.port: 70000 is not a port (1 to 65535)"
        );
        let ports = vec!["{port: 1}"; 20_001].join(", ");
        let with = format!(
            "{{metadata: {{name: s}}, addressType: IPv4, endpoints: [], ports: [{ports}]}}"
        );
        let error = slice(&read(&with)).unwrap_err().to_string();
        assert_eq!(error, "ports: 20001 is not at most 20000 ports");
        assert_eq!(
            pod(&read("{metadata: {}}"), "cluster.local")
                .unwrap_err()
                .to_string(),
            "metadata.name is missing"
        );
    }
}
