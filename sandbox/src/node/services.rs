//! Services: cluster IPs, translation rules as kube-proxy writes them, and names as CoreDNS
//! resolves them, in a hosts file. Pure.

use std::{
    collections::BTreeSet,
    fmt::Write,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use serde_json::{Value, json};

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

/// The iptables-restore input of one address family. It replaces the whole nat and filter tables of
/// the node's namespace.
pub(super) fn rules(services: &[&Value], slices: &[Value], ipv6: bool) -> String {
    let mut out =
        "*nat\n:SERVICES - [0:0]\n-A PREROUTING -j SERVICES\n-A OUTPUT -j SERVICES\n".to_owned();
    let mut addresses = BTreeSet::new();
    for service in services {
        let ips = cluster_ips(service).filter(|ip| ip.is_ipv6() == ipv6);
        for (ip, port) in
            ips.flat_map(|ip| items(&service["spec"]["ports"]).map(move |port| (ip, port)))
        {
            let protocol = port["protocol"].as_str().unwrap_or("TCP").to_lowercase();
            let destination = format!(
                "-d {ip} -p {protocol} -m {protocol} --dport {}",
                port["port"]
            );
            let targets = targets(service, text(&port["name"]), slices, ipv6);
            for (number, (address, port)) in targets.iter().enumerate() {
                // Each of the remaining targets gets the same share.
                let probability = 1.0 / (targets.len() - number) as f64;
                let target = if ipv6 {
                    format!("[{address}]:{port}")
                } else {
                    format!("{address}:{port}")
                };
                // Writing to a String does not fail.
                let _ = writeln!(
                    out,
                    "-A SERVICES {destination} -m statistic --mode random --probability {probability:.9} -j DNAT --to-destination {target}"
                );
                addresses.insert(address.to_owned());
            }
        }
    }
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
    out + &format!(
        "COMMIT\n*filter\n-A FORWARD -d {range} -j REJECT\n-A OUTPUT -d {range} -j REJECT\nCOMMIT\n"
    )
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
fn targets<'a>(
    service: &'a Value,
    port: &str,
    slices: &'a [Value],
    ipv6: bool,
) -> Vec<(&'a str, &'a Value)> {
    let family = if ipv6 { "IPv6" } else { "IPv4" };
    slices_of(service, slices)
        .filter(|slice| slice["addressType"] == family)
        .filter_map(|slice| Some((slice, port_named(slice, port)?)))
        .flat_map(|(slice, port)| ready_addresses(slice).map(move |address| (address, port)))
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

/// The items of a JSON array, none of another value.
pub(super) fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// The text of a JSON string, empty of another value.
pub(super) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
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
    fn balances_over_ready_endpoints() {
        let endpoints = [("10.0.0.1", true), ("10.0.0.2", true), ("10.0.0.3", false)];
        let rules = rules(&[&fixed()], &[slice(&endpoints)], false);
        let to = "-A SERVICES -d 10.96.0.10 -p tcp -m tcp --dport 80 -m statistic --mode random";
        for (probability, address) in [("0.5", "10.0.0.1"), ("1.0", "10.0.0.2")] {
            let rule = format!(
                "{to} --probability {probability}00000000 -j DNAT --to-destination {address}:8080\n"
            );
            assert!(rules.contains(&rule), "{rules}");
        }
        assert!(!rules.contains("10.0.0.3"), "{rules}");
    }

    #[test]
    fn rejects_without_endpoints() {
        let none = rules(&[&fixed()], &[], false);
        assert!(
            none.contains("-A FORWARD -d 10.96.0.0/16 -j REJECT") && !none.contains("DNAT"),
            "{none}"
        );
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
