//! The conditions of Services with TCP ports or endpoints over the limit. Pure.

use super::endpoints::{MAX_BYTES, Room};
use crate::kinds::Service;
use crate::kinds::service::excess::MAX_PORTS;
use crate::object::{Condition, Key, TargetReference, TargetStatus};

/// The condition of a Service with ports over the limit.
pub const APPLIES_TO_ALL_PORTS: &str = "diy-service-mesh.dev/AppliesToAllPorts";
const TOO_MANY_PORTS: &str = "TooManyPorts";
/// The condition of a Service with endpoints over the limit.
const TOO_MANY_ENDPOINTS: &str = "TooManyEndpoints";

/// The conditions of a Service over a limit, with the room of its ports if they have too little.
pub(super) fn status(service: &Service, room: Option<&Room>) -> Option<TargetStatus> {
    let room = room.map(|room| without_room(&service.key, room));
    let conditions: Vec<Condition> = condition(service).into_iter().chain(room).collect();
    (!conditions.is_empty()).then(|| TargetStatus {
        parent: TargetReference::service(&service.key.name),
        conditions,
    })
}

/// The condition of a Service with endpoints over the limit.
fn without_room(key: &Key, room: &Room) -> Condition {
    let first = room.of_port.keys().next().map_or("", String::as_str);
    Condition::new(
        APPLIES_TO_ALL_PORTS,
        false,
        TOO_MANY_ENDPOINTS,
        format!(
            "the endpoints of the Service {key}, of all its ports together, take more than \
             {} MiB; {} of its ports, in the order of their names from {first:?} on, lack some or \
             all of them, and connections to ports without endpoints fail; split the Service",
            MAX_BYTES / 1024 / 1024,
            room.of_port.len(),
        ),
    )
}

/// The condition of a Service with ports over the limit. An ExternalName has no ports for the mesh.
fn condition(service: &Service) -> Option<Condition> {
    let excess = service.excess.as_ref();
    let ports = &excess.filter(|_| service.external_name.is_empty())?.ports;
    Some(Condition::new(
        APPLIES_TO_ALL_PORTS,
        false,
        TOO_MANY_PORTS,
        format!(
            "the Service {} has {} TCP ports, and the mesh supports the first {MAX_PORTS}; \
             connections to the others at its addresses fail (the lowest one is {}), and \
             routes and policies do not apply to them; split the Service",
            service.key,
            MAX_PORTS + ports.len(),
            ports[0],
        ),
    ))
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::super::Index;
    use super::super::locality::Location;
    use super::super::state::{State, TargetKind};
    use super::super::tests::{endpoint, index, ip, key, pod, service, slice};
    use super::*;
    use crate::catalog::Change;
    use crate::index::Resource;
    use crate::kinds::service::excess::split;
    use crate::kinds::service::{ServicePort, Transport};
    use crate::kinds::slice::SlicePort;
    use crate::kinds::{Node, Object, Slice};

    /// A Service with these TCP ports, each with a node port. Port N is at 10000 + N of its pods.
    fn wide(name: &str, ports: impl Iterator<Item = u16>) -> Service {
        let service = service(name, &["10.96.0.1"]);
        let port = |number: u16| ServicePort {
            name: format!("p{number}"),
            port: number,
            node_port: Some(30000 + number),
            ..service.ports[0].clone()
        };
        let (ports, excess) = split(ports.map(port).collect());
        Service {
            ports,
            excess,
            external_ips: vec![ip("192.0.2.1")],
            ..service
        }
    }

    fn state(index: &Index, address: &str, port: u16) -> State {
        let address = SocketAddr::new(ip(address), port);
        let destination = Resource::Destination(address);
        index.resolve(&destination, &Location::default()).1
    }

    #[test]
    fn no_port_of_a_service_over_the_limit_passes_through_at_any_of_its_addresses() {
        let node = Node {
            key: Key::new("", "n1"),
            addresses: vec![ip("10.1.0.1")],
            unready: false,
            zone: "".into(),
        };
        let index = index([
            Object::Service(wide("web", 1..=1200)),
            Object::Slice(slice("web-1", "web", 8080, vec![endpoint("10.0.0.1", "p")])),
            Object::Pod(pod("p", &["10.0.0.1"])),
            Object::Node(node),
        ]);
        for (address, offset) in [("10.96.0.1", 0), ("192.0.2.1", 0), ("10.1.0.1", 30000)] {
            for port in 1..=1200 {
                let target = state(&index, address, offset + port).target;
                let kind = target.map(|target| target.kind);
                let expected = match port {
                    ..=1000 => TargetKind::Service,
                    _ => TargetKind::ExcessPort(MAX_PORTS),
                };
                assert_eq!(kind, Some(expected), "{address} {port}");
            }
        }
        let other = state(&index, "10.96.0.1", 1201).target.unwrap().kind;
        assert!(matches!(other, TargetKind::UnknownPort(ports) if ports.len() == 100));
        assert_eq!(state(&index, "192.0.2.1", 1201).target, None);
    }

    #[test]
    fn ports_within_the_limit_keep_their_endpoints_in_any_order_of_the_slice() {
        let port = |number: u16| SlicePort {
            name: format!("p{number}"),
            port: 10000 + number,
            protocol: Transport::Tcp,
        };
        let mut ports: Vec<SlicePort> = (1..=1200).rev().map(port).collect();
        ports.sort_by(|one, other| one.name.cmp(&other.name));
        let index = index([
            Object::Service(wide("web", 1..=1200)),
            Object::Slice(Slice {
                ports,
                ..slice("web-1", "web", 8080, vec![endpoint("10.0.0.1", "p")])
            }),
            Object::Pod(pod("p", &["10.0.0.1"])),
        ]);
        for number in 1..=1000 {
            let target = state(&index, "10.96.0.1", number).target.unwrap();
            let ports = target.endpoints.iter().map(|one| one.address.port());
            assert_eq!(Vec::from_iter(ports), [10000 + number]);
        }
    }

    #[test]
    fn of_several_services_at_an_external_address_the_oldest_one_decides_over_the_limit_too() {
        let old = wide("old", 1..=1001);
        let mut young = wide("young", 1001..=1001);
        young.cluster_ips = vec![ip("10.96.0.2")];
        young.created = 1;
        let both = [old, young].map(Object::Service);
        let target = state(&index(both), "192.0.2.1", 1001).target.unwrap();
        assert_eq!(
            (target.kind, target.key),
            (TargetKind::ExcessPort(MAX_PORTS), key("old"))
        );
    }

    #[test]
    fn other_transports_do_not_count() {
        let tcp = wide("web", 1..=1).ports.remove(0);
        let udp = ServicePort {
            protocol: Transport::Udp,
            ..tcp.clone()
        };
        let all = vec![udp; 5000].into_iter().chain([tcp.clone()]);
        assert_eq!(split(all.collect()), (vec![tcp], None));
    }

    /// The conditions that do not hold, by Service.
    fn problems(index: &Index) -> Vec<String> {
        let statuses = index.route_statuses().into_iter();
        let problems = statuses.flat_map(|status| {
            let conditions = status.parents.into_iter().flat_map(|one| one.conditions);
            let failed = conditions.filter(|one| !one.holds);
            let key = status.key;
            failed.map(move |one| format!("{key} {} {}", one.reason, one.message))
        });
        problems.collect()
    }

    #[test]
    fn author_is_told_the_limit_until_the_service_keeps_it() {
        let mut canary = wide("web", 1..=1200);
        canary.canary = Some(Box::new(crate::index::tests::canary("none", Ok(1))));
        let mut index = index([Object::Service(canary)]);
        let expected = [
            "shop/web NoMatchingParent the Service shop/none does not exist",
            "shop/web TooManyPorts the Service shop/web has 1200 TCP ports, and the mesh supports \
             the first 1000; connections to the others at its addresses fail (the lowest one is \
             1001), and routes and policies do not apply to them; split the Service",
        ];
        assert_eq!(problems(&index), expected);
        let mut apply = |service| {
            let change = Change::Apply(Object::Service(service));
            index.change(change);
            let is_changed = index.settle();
            (is_changed, problems(&index).len())
        };
        assert_eq!(apply(wide("web", 1..=1200)), (true, 1));
        let mut younger = wide("web", 1..=1200);
        younger.created = 1;
        assert_eq!(apply(younger), (true, 1));
        assert_eq!(apply(wide("web", 1..=1000)), (true, 0));
    }
}
