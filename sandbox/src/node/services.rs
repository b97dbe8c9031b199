//! Services: cluster IPs, translation rules as kube-proxy writes them, and names as CoreDNS
//! resolves them, in a hosts file. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use k8s_openapi::api::{
    core::v1::{Service, ServicePort},
    discovery::v1::{Endpoint, EndpointSlice},
};
use kube::ResourceExt;

use super::endpoints::SERVICE_NAME;

/// The cluster IP ranges.
pub(super) const RANGE_V4: &str = "10.96.0.0/16";
pub(super) const RANGE_V6: &str = "fd00:10:96::/112";

/// Allocates cluster IPs.
#[derive(Debug, Default)]
pub(super) struct ClusterIps {
    allocated: u16,
}

impl ClusterIps {
    /// Sets the IP families and cluster IPs that the Service does not specify, as the API server
    /// does. `previous` is the Service's previous version.
    pub(super) fn assign(&mut self, service: &mut Service, previous: Option<&Service>, ipv6: bool) {
        let Some(spec) = &mut service.spec else {
            return;
        };
        if spec.type_.as_deref() == Some("ExternalName") {
            return;
        }
        let policy = spec.ip_family_policy.as_deref().unwrap_or("SingleStack");
        let families = spec.ip_families.get_or_insert_with(|| match policy {
            "SingleStack" => vec!["IPv4".into()],
            _ if ipv6 => vec!["IPv4".into(), "IPv6".into()],
            _ => vec!["IPv4".into()],
        });
        if spec.cluster_ip.is_some() {
            spec.cluster_ips
                .get_or_insert_with(|| spec.cluster_ip.clone().into_iter().collect());
            return;
        }
        let previous = previous
            .and_then(|service| service.spec.as_ref())
            .filter(|previous| previous.ip_families.as_ref() == Some(families));
        let ips = previous
            .and_then(|previous| previous.cluster_ips.clone())
            .unwrap_or_else(|| {
                // Clusters reserve the addresses below .10.
                self.allocated += 1;
                let number = self.allocated + 9;
                let [high, low] = number.to_be_bytes();
                let address = |family: &String| match family.as_str() {
                    "IPv6" => IpAddr::from(Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, number)),
                    _ => IpAddr::from(Ipv4Addr::new(10, 96, high, low)),
                };
                families
                    .iter()
                    .map(|family| address(family).to_string())
                    .collect()
            });
        spec.cluster_ip = ips.first().cloned();
        spec.cluster_ips = Some(ips);
    }
}

/// The iptables-restore input of one address family. It replaces the whole nat and filter tables of
/// the node's namespace.
pub(super) fn rules(services: &[&Service], slices: &[EndpointSlice], ipv6: bool) -> String {
    let mut nat = String::new();
    let mut addresses = BTreeSet::new();
    for service in services {
        let ips = cluster_ips(service).filter(|ip| ip.is_ipv6() == ipv6);
        for (ip, port) in ips.flat_map(|ip| ports(service).map(move |port| (ip, port))) {
            let protocol = port.protocol.as_deref().unwrap_or("TCP").to_lowercase();
            let destination = format!("-d {ip} -p {protocol} -m {protocol} --dport {}", port.port);
            let targets = targets(service, port, slices, ipv6);
            for (number, (address, port)) in targets.iter().enumerate() {
                let remaining = targets.len() - number;
                let probability = if remaining == 1 {
                    String::new()
                } else {
                    format!(
                        " -m statistic --mode random --probability {:.9}",
                        1.0 / remaining as f64
                    )
                };
                let target = if ipv6 {
                    format!("[{address}]:{port}")
                } else {
                    format!("{address}:{port}")
                };
                let _ = writeln!(
                    nat,
                    "-A SERVICES {destination}{probability} -j DNAT --to-destination {target}"
                );
                addresses.insert(address.clone());
            }
        }
    }
    let mut out =
        format!("*nat\n:SERVICES - [0:0]\n-A PREROUTING -j SERVICES\n-A OUTPUT -j SERVICES\n{nat}");
    for address in addresses {
        // A pod that reaches itself through its own Service must see another source address than
        // its own.
        let _ = writeln!(
            out,
            "-A POSTROUTING -s {address} -d {address} -j MASQUERADE"
        );
    }
    // Packets that still have a cluster IP as destination belong to a Service without endpoints.
    let range = if ipv6 { RANGE_V6 } else { RANGE_V4 };
    let _ = write!(
        out,
        "COMMIT\n*filter\n-A FORWARD -d {range} -j REJECT\n-A OUTPUT -d {range} -j REJECT\nCOMMIT\n"
    );
    out
}

/// The hosts file lines of the Services, with the names that a pod of `namespace` can use.
pub(super) fn hosts(services: &[&Service], slices: &[EndpointSlice], namespace: &str) -> String {
    let mut out = String::new();
    for service in services {
        let (Some(name), Some(own)) = (&service.metadata.name, &service.metadata.namespace) else {
            continue;
        };
        let mut names = format!(
            "{name}.{own}.svc.cluster.local {name}.{own}.svc.cluster.local. {name}.{own}.svc {name}.{own}"
        );
        if own == namespace {
            names = format!("{names} {name}");
        }
        let mut ips: Vec<String> = cluster_ips(service).map(|ip| ip.to_string()).collect();
        if headless(service) {
            ips = slices_of(service, slices)
                .flat_map(|slice| usable(&[slice]))
                .collect();
            ips.sort();
            ips.dedup();
        }
        for ip in ips {
            let _ = writeln!(out, "{ip} {names}");
        }
    }
    out
}

fn headless(service: &Service) -> bool {
    service
        .spec
        .as_ref()
        .is_some_and(|spec| spec.cluster_ip.as_deref() == Some("None"))
}

fn cluster_ips(service: &Service) -> impl Iterator<Item = IpAddr> {
    service
        .spec
        .iter()
        .flat_map(|spec| spec.cluster_ips.iter().flatten())
        .filter_map(|ip| ip.parse().ok())
}

fn ports(service: &Service) -> impl Iterator<Item = &ServicePort> {
    service
        .spec
        .iter()
        .flat_map(|spec| spec.ports.iter().flatten())
}

/// The EndpointSlices of a Service.
pub(super) fn slices_of<'a>(
    service: &'a Service,
    slices: &'a [EndpointSlice],
) -> impl Iterator<Item = &'a EndpointSlice> {
    slices.iter().filter(|slice| {
        slice.metadata.namespace == service.metadata.namespace
            && slice.labels().get(SERVICE_NAME) == service.metadata.name.as_ref()
    })
}

/// The addresses and ports that traffic for a Service port is translated to.
fn targets(
    service: &Service,
    port: &ServicePort,
    slices: &[EndpointSlice],
    ipv6: bool,
) -> Vec<(String, i32)> {
    let family = if ipv6 { "IPv6" } else { "IPv4" };
    let name = port.name.as_deref().unwrap_or_default();
    let mut by_port: BTreeMap<i32, Vec<&EndpointSlice>> = BTreeMap::new();
    for slice in slices_of(service, slices).filter(|slice| slice.address_type == family) {
        if let Some(number) = port_named(slice, name) {
            by_port.entry(number).or_default().push(slice);
        }
    }
    by_port
        .into_iter()
        .flat_map(|(number, slices)| {
            let addresses = usable(&slices).into_iter();
            addresses.map(move |address| (address, number))
        })
        .collect()
}

/// The number of the slice's port with this name.
pub(super) fn port_named(slice: &EndpointSlice, name: &str) -> Option<i32> {
    let mut ports = slice.ports.iter().flatten();
    ports
        .find(|port| port.name.as_deref().unwrap_or_default() == name)?
        .port
}

/// The ready addresses, or, if there are none, those that serve while they terminate.
fn usable(slices: &[&EndpointSlice]) -> Vec<String> {
    let select = |predicate: fn(&Endpoint) -> bool| -> Vec<String> {
        let endpoints = slices
            .iter()
            .flat_map(|slice| &slice.endpoints)
            .filter(|endpoint| predicate(endpoint));
        endpoints
            .filter_map(|endpoint| endpoint.addresses.first().cloned())
            .collect()
    };
    let ready = select(|endpoint| {
        endpoint
            .conditions
            .as_ref()
            .is_none_or(|conditions| conditions.ready.unwrap_or(true))
    });
    if !ready.is_empty() {
        return ready;
    }
    select(|endpoint| {
        endpoint.conditions.as_ref().is_some_and(|conditions| {
            conditions.serving == Some(true) && conditions.terminating == Some(true)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(spec: &str) -> Service {
        serde_yaml_ng::from_str(&format!(
            "{{metadata: {{name: shop, namespace: a}}, spec: {{ports: [{{port: 80}}], {spec}}}}}"
        ))
        .unwrap()
    }

    fn slice(endpoints: &[(&str, bool, bool)]) -> EndpointSlice {
        let list: Vec<String> = endpoints
            .iter()
            .map(|(ip, ready, terminating)| {
                format!("{{addresses: ['{ip}'], conditions: {{ready: {ready}, serving: true, terminating: {terminating}}}}}")
            })
            .collect();
        serde_yaml_ng::from_str(&format!(
            "{{metadata: {{name: s, namespace: a, labels: {{kubernetes.io/service-name: shop}}}}, addressType: IPv4, ports: [{{name: '', port: 8080}}], endpoints: [{}]}}",
            list.join(", ")
        ))
        .unwrap()
    }

    #[test]
    fn allocates_cluster_ips_once() {
        let mut ips = ClusterIps::default();
        let mut first = service("");
        ips.assign(&mut first, None, true);
        let mut changed = service("");
        ips.assign(&mut changed, Some(&first), true);
        assert_eq!(
            first.spec.as_ref().unwrap().cluster_ip.as_deref(),
            Some("10.96.0.10")
        );
        assert_eq!(first.spec, changed.spec);
        let mut dual = service("ipFamilyPolicy: PreferDualStack");
        ips.assign(&mut dual, None, true);
        assert_eq!(
            dual.spec.unwrap().cluster_ips.unwrap(),
            ["10.96.0.11", "fd00:10:96::b"]
        );
        let mut headless = service("clusterIP: None");
        ips.assign(&mut headless, None, true);
        assert_eq!(headless.spec.unwrap().cluster_ip.as_deref(), Some("None"));
    }

    #[test]
    fn balances_over_ready_endpoints() {
        let service = service("clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10]");
        let rules = rules(
            &[&service],
            &[slice(&[
                ("10.0.0.1", true, false),
                ("10.0.0.2", true, false),
                ("10.0.0.3", false, true),
            ])],
            false,
        );
        let to = "-A SERVICES -d 10.96.0.10 -p tcp -m tcp --dport 80";
        assert!(
            rules.contains(&format!("{to} -m statistic --mode random --probability 0.500000000 -j DNAT --to-destination 10.0.0.1:8080\n")),
            "{rules}"
        );
        assert!(
            rules.contains(&format!("{to} -j DNAT --to-destination 10.0.0.2:8080\n")),
            "{rules}"
        );
        assert!(!rules.contains("10.0.0.3"), "{rules}");
    }

    #[test]
    fn rejects_without_endpoints_and_falls_back_to_terminating_ones() {
        let service = service("clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10]");
        let none = rules(&[&service], &[], false);
        assert!(
            none.contains("-A FORWARD -d 10.96.0.0/16 -j REJECT") && !none.contains("DNAT"),
            "{none}"
        );
        assert!(
            rules(&[&service], &[slice(&[("10.0.0.3", false, true)])], false)
                .contains("--to-destination 10.0.0.3:8080")
        );
    }

    #[test]
    fn writes_all_forms_of_a_service_name() {
        let service = service("clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10]");
        let long =
            "10.96.0.10 shop.a.svc.cluster.local shop.a.svc.cluster.local. shop.a.svc shop.a";
        assert_eq!(hosts(&[&service], &[], "b"), format!("{long}\n"));
        assert_eq!(hosts(&[&service], &[], "a"), format!("{long} shop\n"));
    }

    #[test]
    fn resolves_headless_services_to_pod_addresses() {
        let service = service("clusterIP: None");
        let hosts = hosts(
            &[&service],
            &[slice(&[
                ("10.0.0.1", true, false),
                ("10.0.0.2", true, false),
            ])],
            "b",
        );
        assert!(
            hosts.starts_with("10.0.0.1 shop.a.svc.cluster.local ")
                && hosts.contains("\n10.0.0.2 "),
            "{hosts}"
        );
    }
}
