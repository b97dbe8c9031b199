//! Services: cluster IPs, their translation as kube-proxy does it, and names as CoreDNS resolves
//! them, in a hosts file. Pure.

use std::{
    collections::BTreeSet,
    fmt::Write,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use serde_json::{Value, json};

use super::{endpoints::SERVICE_NAME, translation::Translation};

/// The cluster IP ranges.
pub(super) const RANGES: [(IpAddr, u8); 2] = [
    (IpAddr::V4(Ipv4Addr::new(10, 96, 0, 0)), 16),
    (
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0)),
        112,
    ),
];

/// Allocates cluster IPs.
#[derive(Debug, Default)]
pub(super) struct ClusterIps {
    allocated: u16,
}

impl ClusterIps {
    /// Sets the IP families and cluster IPs that the spec of a Service does not contain, as the API
    /// server does. `previous` is the Service's previous version.
    pub(super) fn assign(&mut self, spec: &mut Value, previous: Option<&Value>, ipv6: bool) {
        if spec["ipFamilies"].is_null() {
            let is_dual = ipv6 && text(&spec["ipFamilyPolicy"]).ends_with("DualStack");
            spec["ipFamilies"] = if is_dual {
                json!(["IPv4", "IPv6"])
            } else {
                json!(["IPv4"])
            };
        }
        if spec["clusterIPs"].is_null() && spec["clusterIP"].is_string() {
            spec["clusterIPs"] = json!([spec["clusterIP"]]);
        }
        if spec["clusterIPs"].is_null() {
            let previous = previous.map(|previous| &previous["spec"]);
            spec["clusterIPs"] = match previous {
                Some(one) if one["ipFamilies"] == spec["ipFamilies"] => one["clusterIPs"].clone(),
                _ => self.allocate(&spec["ipFamilies"]),
            };
        }
        spec["clusterIP"] = spec["clusterIPs"][0].clone();
    }

    fn allocate(&mut self, families: &Value) -> Value {
        self.allocated += 1;
        // Clusters reserve the addresses below .10.
        let number = self.allocated + 9;
        let [high, low] = number.to_be_bytes();
        let address = |family: &Value| match text(family) {
            "IPv6" => IpAddr::from(Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, number)),
            _ => IpAddr::from(Ipv4Addr::new(10, 96, high, low)),
        };
        items(families)
            .map(|family| json!(address(family)))
            .collect()
    }
}

/// The translations of the ports of all Services.
pub(super) fn translations(services: &[&Value], slices: &[Value]) -> Vec<Translation> {
    let mut translations = Vec::new();
    for service in services {
        let ports = || items(&service["spec"]["ports"]);
        for (ip, port) in cluster_ips(service).flat_map(|ip| ports().map(move |port| (ip, port))) {
            translations.push(Translation {
                service: SocketAddr::new(ip, number(&port["port"])),
                protocol: match text(&port["protocol"]) {
                    "UDP" => 17,
                    _ => 6,
                },
                targets: targets(service, text(&port["name"]), slices, ip.is_ipv6()),
            });
        }
    }
    translations
}

/// The hosts file lines of the Services, with the names that a pod of `namespace` can use.
pub(super) fn hosts(services: &[&Value], slices: &[Value], namespace: &str) -> String {
    let mut out = String::new();
    for service in services {
        let metadata = &service["metadata"];
        let (name, own) = (text(&metadata["name"]), text(&metadata["namespace"]));
        let long = format!("{name}.{own}.svc");
        let mut names = format!("{long}.cluster.local {long}.cluster.local. {long} {name}.{own}");
        if own == namespace {
            names = format!("{names} {name}");
        }
        let mut ips: BTreeSet<String> = cluster_ips(service).map(|ip| ip.to_string()).collect();
        if service["spec"]["clusterIP"] == "None" {
            let slices = slices_of(service, slices);
            ips = slices
                .flat_map(ready_addresses)
                .map(str::to_owned)
                .collect();
        }
        for ip in ips {
            let _ = writeln!(out, "{ip} {names}");
        }
    }
    out
}

fn cluster_ips(service: &Value) -> impl Iterator<Item = IpAddr> {
    items(&service["spec"]["clusterIPs"]).filter_map(|ip| text(ip).parse().ok())
}

/// The EndpointSlices of a Service.
pub(super) fn slices_of<'a>(
    service: &'a Value,
    slices: &'a [Value],
) -> impl Iterator<Item = &'a Value> {
    let own = &service["metadata"];
    slices.iter().filter(|slice| {
        let metadata = &slice["metadata"];
        metadata["namespace"] == own["namespace"] && metadata["labels"][SERVICE_NAME] == own["name"]
    })
}

/// The addresses and ports that traffic for a Service port is translated to.
fn targets(service: &Value, port: &str, slices: &[Value], ipv6: bool) -> Vec<SocketAddr> {
    let family = if ipv6 { "IPv6" } else { "IPv4" };
    slices_of(service, slices)
        .filter(|slice| slice["addressType"] == family)
        .filter_map(|slice| Some((slice, number(port_named(slice, port)?))))
        .flat_map(|(slice, port)| ready_addresses(slice).map(move |address| (address, port)))
        .filter_map(|(address, port)| Some(SocketAddr::new(address.parse().ok()?, port)))
        .collect()
}

/// The number of the slice's port with this name.
pub(super) fn port_named<'a>(slice: &'a Value, name: &str) -> Option<&'a Value> {
    let port = items(&slice["ports"]).find(|port| text(&port["name"]) == name);
    port.map(|port| &port["port"])
}

fn ready_addresses(slice: &Value) -> impl Iterator<Item = &str> {
    ready_endpoints(slice).map(|endpoint| text(&endpoint["addresses"][0]))
}

/// The ready endpoints of a slice.
pub(super) fn ready_endpoints(slice: &Value) -> impl Iterator<Item = &Value> {
    items(&slice["endpoints"]).filter(|endpoint| endpoint["conditions"]["ready"] != false)
}

/// The items of a JSON array. Another value has no items.
pub(super) fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// The text of a JSON string, empty of another value.
pub(super) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A port number, 0 of another value.
fn number(value: &Value) -> u16 {
    let number = value.as_u64().and_then(|number| u16::try_from(number).ok());
    number.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(spec: Value) -> Value {
        let mut service = json!({"metadata": {"name": "shop", "namespace": "a"}, "spec": spec});
        service["spec"]["ports"] = json!([{"port": 80}]);
        service
    }

    fn fixed() -> Value {
        service(json!({"clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10"]}))
    }

    fn slice(endpoints: &[(&str, bool)]) -> Value {
        let endpoint =
            |(ip, ready): &(&str, bool)| json!({"addresses": [ip], "conditions": {"ready": ready}});
        json!({
            "metadata": {"name": "s", "namespace": "a", "labels": {SERVICE_NAME: "shop"}},
            "addressType": "IPv4", "ports": [{"name": "", "port": 8080}],
            "endpoints": endpoints.iter().map(endpoint).collect::<Value>(),
        })
    }

    #[test]
    fn allocates_cluster_ips_once() {
        let mut ips = ClusterIps::default();
        let mut assigned = |spec: Value, previous: Option<&Value>| {
            let mut service = service(spec);
            ips.assign(&mut service["spec"], previous, true);
            service
        };
        let first = assigned(json!({}), None);
        assert_eq!(first["spec"]["clusterIP"], "10.96.0.10");
        assert_eq!(assigned(json!({}), Some(&first)), first);
        let dual = assigned(json!({"ipFamilyPolicy": "PreferDualStack"}), None);
        let expected = json!(["10.96.0.11", "fd00:10:96::b"]);
        assert_eq!(dual["spec"]["clusterIPs"], expected);
        let headless = assigned(json!({"clusterIP": "None"}), None);
        assert_eq!(headless["spec"]["clusterIP"], "None");
    }

    #[test]
    fn translates_to_ready_endpoints() {
        let endpoints = [("10.0.0.1", true), ("10.0.0.2", true), ("10.0.0.3", false)];
        let expected = |targets: &[&str]| Translation {
            service: "10.96.0.10:80".parse().unwrap(),
            protocol: 6,
            targets: targets.iter().map(|one| one.parse().unwrap()).collect(),
        };
        assert_eq!(
            translations(&[&fixed()], &[slice(&endpoints)]),
            [expected(&["10.0.0.1:8080", "10.0.0.2:8080"])]
        );
        assert_eq!(translations(&[&fixed()], &[]), [expected(&[])]);
    }

    #[test]
    fn writes_all_forms_of_a_service_name() {
        let long =
            "10.96.0.10 shop.a.svc.cluster.local shop.a.svc.cluster.local. shop.a.svc shop.a";
        assert_eq!(hosts(&[&fixed()], &[], "b"), format!("{long}\n"));
        assert_eq!(hosts(&[&fixed()], &[], "a"), format!("{long} shop\n"));
    }

    #[test]
    fn resolves_headless_services_to_pod_addresses() {
        let service = service(json!({"clusterIP": "None", "clusterIPs": ["None"]}));
        let slice = slice(&[("10.0.0.1", true), ("10.0.0.2", true)]);
        let hosts = hosts(&[&service], &[slice], "b");
        assert!(
            hosts.starts_with("10.0.0.1 shop.a.svc.cluster.local ")
                && hosts.contains("\n10.0.0.2 "),
            "{hosts}"
        );
    }
}
