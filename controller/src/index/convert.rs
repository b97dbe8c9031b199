//! From the objects of Kubernetes to the values that the index keeps. Pure; the one place that
//! knows both.
//!
//! What Kubernetes would refuse is an error here too, so that a hand-written file is told what is
//! wrong with it.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::object::{
    Key, Pod, PodReference, Service, ServicePort, Slice, SliceEndpoint, SlicePort, TargetPort,
    Transport,
};

const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
const STATUS_ANNOTATION: &str = "diy-service-mesh/status";
/// Ports that the pod keeps from its proxy; the proxy's admin port is called this by the injector.
const SKIP_ANNOTATION: &str = "diy-service-mesh/skip-inbound-ports";
const ADMIN_PORT: &str = "mesh-admin";
/// The init container and the argument of it in which the injector writes down the pod's opaque
/// ports. A pod's spec does not change.
const PROXY: &str = "proxy";
const OPAQUE_PORTS_ARGUMENT: &str = "--opaque-ports=";

/// An object that cannot be used, and why.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ConvertError {
    /// The object has no name.
    #[error("metadata.name is missing")]
    NoName,
    /// A field holds something that is no IP address.
    #[error("{field}: {value:?} is not an IP address")]
    Address {
        /// Where it stands.
        field: &'static str,
        /// What stands there.
        value: String,
    },
    /// A field holds something that is no port number.
    #[error("{field}: {value} is not a port (1 to 65535)")]
    Port {
        /// Where it stands.
        field: &'static str,
        /// What stands there.
        value: i32,
    },
    /// A protocol that Kubernetes does not know.
    #[error("{field}: {value:?} is not TCP, UDP or SCTP")]
    Protocol {
        /// Where it stands.
        field: &'static str,
        /// What stands there.
        value: String,
    },
}

/// A Service.
pub fn service(object: &core::Service) -> Result<Service, ConvertError> {
    let key = key(&object.metadata)?;
    let Some(spec) = &object.spec else {
        return Ok(Service {
            key,
            cluster_ips: vec![],
            ports: vec![],
            external_name: String::new(),
            publish_not_ready: false,
        });
    };
    let external = spec.type_.as_deref() == Some("ExternalName");
    Ok(Service {
        key,
        cluster_ips: if external { vec![] } else { cluster_ips(spec)? },
        ports: spec
            .ports
            .iter()
            .flatten()
            .map(service_port)
            .collect::<Result<_, _>>()?,
        external_name: if external {
            spec.external_name.clone().unwrap_or_default()
        } else {
            String::new()
        },
        publish_not_ready: spec.publish_not_ready_addresses.unwrap_or(false),
    })
}

/// An EndpointSlice. One without the label that names its Service belongs to none; one of names
/// (FQDN) has no endpoints.
pub fn slice(object: &discovery::EndpointSlice) -> Result<Slice, ConvertError> {
    let key = key(&object.metadata)?;
    let service = label(&object.metadata, SERVICE_NAME_LABEL).map(|name| Key {
        namespace: key.namespace.clone(),
        name: name.into(),
    });
    let addresses = matches!(object.address_type.as_str(), "IPv4" | "IPv6");
    let mut endpoints = Vec::new();
    for endpoint in object.endpoints.iter().filter(|_| addresses) {
        endpoints.extend(slice_endpoint(endpoint, &key.namespace)?);
    }
    let mut ports = Vec::new();
    for port in object.ports.iter().flatten() {
        ports.extend(slice_port(port)?);
    }
    Ok(Slice {
        key,
        service,
        ports,
        endpoints,
    })
}

/// A Pod.
pub fn pod(object: &core::Pod, trust_domain: &str) -> Result<Pod, ConvertError> {
    let key = key(&object.metadata)?;
    let spec = object.spec.as_ref();
    let status = object.status.as_ref();
    let finished = matches!(
        status.and_then(|status| status.phase.as_deref()),
        Some("Succeeded" | "Failed")
    );
    let host_network = spec.and_then(|spec| spec.host_network).unwrap_or(false);
    let injected = object
        .metadata
        .annotations
        .as_ref()
        .and_then(|all| all.get(STATUS_ANNOTATION))
        .is_some_and(|status| status == "injected");
    let account = spec
        .and_then(|spec| spec.service_account_name.as_deref())
        .filter(|name| !name.is_empty())
        .unwrap_or("default");
    let identity = injected
        .then(|| format!("spiffe://{trust_domain}/ns/{}/sa/{account}", key.namespace).into());
    Ok(Pod {
        uid: object.metadata.uid.as_deref().unwrap_or_default().into(),
        addresses: if finished || host_network {
            vec![]
        } else {
            status.map(pod_addresses).transpose()?.unwrap_or_default()
        },
        terminating: object.metadata.deletion_timestamp.is_some(),
        ready: !finished && status.is_some_and(is_ready),
        created: object
            .metadata
            .creation_timestamp
            .as_ref()
            .map_or(0, |time| time.0.as_second()),
        zone: label(&object.metadata, ZONE_LABEL)
            .unwrap_or_default()
            .into(),
        identity,
        bypassed: bypassed(object),
        opaque_ports: opaque_ports(object),
        key,
    })
}

/// What the pod's annotation keeps from its proxy, and the proxy's own admin port. The injector has
/// refused what is no list of ports.
fn bypassed(object: &core::Pod) -> Vec<RangeInclusive<u16>> {
    let list = object
        .metadata
        .annotations
        .as_ref()
        .and_then(|all| all.get(SKIP_ANNOTATION))
        .map_or("", String::as_str);
    let skipped = ports(list);
    let spec = object.spec.iter();
    let containers = spec.flat_map(|spec| {
        spec.init_containers
            .iter()
            .flatten()
            .chain(&spec.containers)
    });
    let ports = containers.flat_map(|container| container.ports.iter().flatten());
    let admin = ports
        .filter(|port| port.name.as_deref() == Some(ADMIN_PORT))
        .filter_map(|port| u16::try_from(port.container_port).ok());
    skipped.chain(admin.map(|port| port..=port)).collect()
}

/// The opaque ports in the arguments of the injected proxy.
fn opaque_ports(object: &core::Pod) -> Box<[RangeInclusive<u16>]> {
    let containers = object
        .spec
        .iter()
        .flat_map(|spec| spec.init_containers.iter().flatten());
    let arguments = containers
        .filter(|container| container.name == PROXY)
        .flat_map(|proxy| proxy.args.iter().flatten());
    arguments
        .filter_map(|argument| argument.strip_prefix(OPAQUE_PORTS_ARGUMENT))
        .flat_map(ports)
        .collect()
}

/// The ports and ranges of a list, without what is neither.
fn ports(list: &str) -> impl Iterator<Item = RangeInclusive<u16>> {
    list.split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    })
}

fn is_ready(status: &core::PodStatus) -> bool {
    status
        .conditions
        .iter()
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn key(metadata: &ObjectMeta) -> Result<Key, ConvertError> {
    let name = metadata
        .name
        .as_deref()
        .filter(|name| !name.is_empty())
        .ok_or(ConvertError::NoName)?;
    Ok(Key::new(
        metadata
            .namespace
            .as_deref()
            .filter(|namespace| !namespace.is_empty())
            .unwrap_or("default"),
        name,
    ))
}

fn label<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    metadata
        .labels
        .as_ref()?
        .get(name)
        .map(String::as_str)
        .filter(|value| !value.is_empty())
}

fn cluster_ips(spec: &core::ServiceSpec) -> Result<Vec<IpAddr>, ConvertError> {
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

fn service_port(port: &core::ServicePort) -> Result<ServicePort, ConvertError> {
    let number = port_number("spec.ports.port", port.port)?;
    let target = match &port.target_port {
        None => TargetPort::Number(number),
        // Written by hand, 0 and the empty text mean what leaving it out means.
        Some(IntOrString::Int(0)) => TargetPort::Number(number),
        Some(IntOrString::String(name)) if name.is_empty() => TargetPort::Number(number),
        Some(IntOrString::Int(target)) => {
            TargetPort::Number(port_number("spec.ports.targetPort", *target)?)
        }
        Some(IntOrString::String(name)) => TargetPort::Name(name.clone()),
    };
    Ok(ServicePort {
        name: port.name.clone().unwrap_or_default(),
        port: number,
        target,
        protocol: transport("spec.ports.protocol", port.protocol.as_deref())?,
        app_protocol: port.app_protocol.clone().unwrap_or_default(),
    })
}

/// None for a port without a number, which stands for "all ports" and leads nowhere.
fn slice_port(port: &discovery::EndpointPort) -> Result<Option<SlicePort>, ConvertError> {
    let Some(number) = port.port else {
        return Ok(None);
    };
    Ok(Some(SlicePort {
        name: port.name.clone().unwrap_or_default(),
        port: port_number("ports.port", number)?,
        protocol: transport("ports.protocol", port.protocol.as_deref())?,
    }))
}

fn slice_endpoint(
    endpoint: &discovery::Endpoint,
    namespace: &Arc<str>,
) -> Result<Option<SliceEndpoint>, ConvertError> {
    let Some(first) = endpoint.addresses.first() else {
        return Ok(None);
    };
    let conditions = endpoint.conditions.clone().unwrap_or_default();
    let pod = endpoint
        .target_ref
        .as_ref()
        .filter(|target| target.kind.as_deref() == Some("Pod"))
        .and_then(|target| {
            let name = target.name.as_deref()?;
            let namespace = target
                .namespace
                .as_deref()
                .map_or_else(|| namespace.clone(), Arc::from);
            Some(PodReference {
                key: Key {
                    namespace,
                    name: name.into(),
                },
                uid: target.uid.as_deref().unwrap_or_default().into(),
            })
        });
    Ok(Some(SliceEndpoint {
        address: address("endpoints.addresses", first)?,
        ready: conditions.ready.unwrap_or(true),
        terminating: conditions.terminating.unwrap_or(false),
        zone: endpoint.zone.as_deref().unwrap_or_default().into(),
        pod,
    }))
}

fn pod_addresses(status: &core::PodStatus) -> Result<Vec<IpAddr>, ConvertError> {
    let listed = status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str());
    let mut addresses = Vec::new();
    for ip in listed
        .chain(status.pod_ip.as_deref())
        .filter(|ip| !ip.is_empty())
    {
        let ip = address("status.podIPs", ip)?;
        if !addresses.contains(&ip) {
            addresses.push(ip);
        }
    }
    Ok(addresses)
}

fn address(field: &'static str, value: &str) -> Result<IpAddr, ConvertError> {
    value.parse().map_err(|_| ConvertError::Address {
        field,
        value: value.to_owned(),
    })
}

fn port_number(field: &'static str, value: i32) -> Result<u16, ConvertError> {
    u16::try_from(value)
        .ok()
        .filter(|port| *port != 0)
        .ok_or(ConvertError::Port { field, value })
}

fn transport(field: &'static str, value: Option<&str>) -> Result<Transport, ConvertError> {
    match value.unwrap_or("TCP") {
        "TCP" | "" => Ok(Transport::Tcp),
        "UDP" => Ok(Transport::Udp),
        "SCTP" => Ok(Transport::Sctp),
        other => Err(ConvertError::Protocol {
            field,
            value: other.to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(external.external_name, "example.org");
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
                "metadata: {name: p, namespace: shop, annotations: {diy-service-mesh/status: injected}}
spec: {serviceAccountName: clerk, containers: []}
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
    fn ports_that_do_not_pass_the_proxy_have_no_identity() {
        let converted = pod(&read(
            "metadata: {name: p, namespace: shop, annotations: {diy-service-mesh/status: injected, diy-service-mesh/skip-inbound-ports: '25, 9000-9100'}}
spec: {containers: [{name: app}], initContainers: [{name: proxy, ports: [{name: mesh-admin, containerPort: 4001}]}]}",
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
    fn opaque_ports_are_read_from_the_proxys_arguments_and_nowhere_else() {
        let converted = pod(
            &read(
                "metadata: {name: p, namespace: shop, annotations: {diy-service-mesh/status: injected, diy-service-mesh/opaque-ports: '80'}}
spec:
  containers: [{name: app, args: ['--opaque-ports=81']}]
  initContainers: [{name: other, args: ['--opaque-ports=82']}, {name: proxy, args: ['--dump=off', '--opaque-ports=25,9000-9100']}]",
            ),
            "cluster.local",
        )
        .unwrap();
        let opaque: Vec<u16> = (1..=u16::MAX)
            .filter(|port| converted.is_opaque_at(*port))
            .collect();
        assert_eq!(opaque, [vec![25], (9000..=9100).collect()].concat());
        let plain = pod(
            &read("{metadata: {name: p}, spec: {containers: []}}"),
            "cluster.local",
        )
        .unwrap();
        assert!(plain.opaque_ports.is_empty());
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
        assert_eq!(
            pod(&read("{metadata: {}}"), "cluster.local").unwrap_err(),
            ConvertError::NoName
        );
    }
}
