//! Resolution of resources: addresses and Services to their endpoints, for a client. Pure.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::endpoints::{Endpoint, Endpoints};
use super::headless::oldest;
use super::links::Link;
use super::locality::{Area, Location, Scope};
use super::state::{State, Target, TargetKind, Workload};
use super::{Index, Resource};
use crate::kinds::authorization::Direction;
use crate::kinds::policy::Effective;
use crate::kinds::route::attach::Table;
use crate::kinds::service::ServicePort;
use crate::kinds::service::excess::MAX_PORTS;
use crate::kinds::slice::PodReference;
use crate::kinds::{Pod, Service, Slice};
use crate::object::Key;

/// Ports of a Service in an error message.
const MAX_NAMED_PORTS: usize = 100;

impl Index {
    /// Resolves a resource for a client. Clients with equal locations within the scope share the
    /// state.
    pub fn resolve(&self, resource: &Resource, client: &Location) -> (Scope, State) {
        let resolved = match resource {
            Resource::Destination(address) => self.destination(*address, client),
            Resource::Backend(service, port) => self.backend(service, *port, client),
            Resource::Workload(pod, uid) => self.workload(pod, uid, client),
        };
        let (scope, target) = resolved.unzip();
        // A pod that is not in the catalog yet has no configuration.
        let is_new_pod = target.is_none() && matches!(resource, Resource::Workload(..));
        let state = if is_new_pod || self.is_withheld(resource, target.as_ref()) {
            State::withheld()
        } else if target.is_none() && self.is_node(resource) {
            State::of_node()
        } else {
            State::new(target)
        };
        let position = self.position.clone();
        (scope.unwrap_or_default(), State { position, ..state })
    }

    fn is_node(&self, resource: &Resource) -> bool {
        match resource {
            Resource::Destination(address) => self.links.contains(&Link::NodeAt(address.ip())),
            _ => false,
        }
    }

    /// The namespace, and the node and the zone of a pod, not of another one with its name.
    pub fn location(&self, key: &Key, uid: &str) -> Location {
        let namespace = key.namespace.clone();
        let Some(pod) = self.pods.get(key).filter(|pod| *pod.uid == *uid) else {
            return Location {
                namespace,
                ..Location::default()
            };
        };
        let node = Key {
            namespace: "".into(),
            name: pod.node.clone(),
        };
        let zone = self.nodes.get(&node).map(|node| &node.zone);
        Location {
            namespace,
            node: node.name,
            zone: zone.unwrap_or(&pod.zone).clone(),
        }
    }

    /// A Service port, a pod, a Service without the port, a node port, a Service port at an
    /// external address, or an unknown target. An address of several kinds is of the first one.
    fn destination(&self, address: SocketAddr, client: &Location) -> Option<(Scope, Target)> {
        self.service_target(address, client)
            .or_else(|| self.pod_target(address, client))
            .or_else(|| self.unknown_port(address))
            .or_else(|| {
                let node = self.links.keys(&Link::NodeAt(address.ip())).next();
                match node {
                    Some(node) => self.node_port(node, address, client),
                    None => self.external(address, client),
                }
            })
    }

    fn service_target(&self, address: SocketAddr, client: &Location) -> Option<(Scope, Target)> {
        let service = self.service_at(address.ip())?;
        let port = service.tcp_port(|port| port.port == address.port())?;
        let select = |all: &Arc<Endpoints>| all.select(service.local_only, client);
        Some(self.at_port(service, port, address, client, select))
    }

    /// The state of a port with routes, for a client that gets a part of its endpoints.
    fn at_port(
        &self,
        service: &Service,
        port: &ServicePort,
        address: SocketAddr,
        client: &Location,
        select: impl FnOnce(&Arc<Endpoints>) -> (Area, Arc<Endpoints>),
    ) -> (Scope, Target) {
        match self.endpoints(service, &port.name, address.is_ipv6()) {
            Ok(all) => {
                let (area, target) = service_target(service, port, select(&all));
                self.with_routes(&service.key, port.port, (area, target), client)
            }
            Err(no_room) => excess_port(service, no_room.complete),
        }
    }

    /// Pods reach all endpoints at external addresses, whatever the policies of the Service. The
    /// oldest of several Services with the address and port has it.
    fn external(&self, address: SocketAddr, client: &Location) -> Option<(Scope, Target)> {
        let services = self.links.keys(&Link::ExternalIp(address.ip()));
        let services = services.filter_map(|key| {
            let service = &self.services[key];
            let port = service.tcp_port(|port| port.port == address.port());
            let has_port = port.is_some() || service.has_excess_port(address.port());
            has_port.then_some((service, port))
        });
        let (service, port) =
            services.min_by_key(|(service, _)| (service.created, &service.key))?;
        let Some(port) = port else {
            return Some(excess_port(service, MAX_PORTS));
        };
        let select = |all: &Arc<Endpoints>| all.select(false, client);
        Some(self.at_port(service, port, address, client, select))
    }

    /// A node with `externalTrafficPolicy: Local` forwards connections of other nodes to its own
    /// endpoints.
    fn node_port(
        &self,
        node: &Key,
        address: SocketAddr,
        client: &Location,
    ) -> Option<(Scope, Target)> {
        let services = self.links.keys(&Link::NodePort(address.port()));
        let services = services.map(|key| &self.services[key]);
        let service = services.min_by_key(|service| (service.created, &service.key))?;
        let port = service.tcp_port(|port| port.node_port == Some(address.port()));
        let Some(port) = port else {
            return Some(excess_port(service, MAX_PORTS));
        };
        let on_node = Location {
            node: node.name.clone(),
            ..Location::default()
        };
        let is_local = service.external_local && client.node != node.name;
        let from = if is_local { &on_node } else { client };
        let select = |all: &Arc<Endpoints>| match all.select(is_local, from) {
            (_, endpoints) if service.external_local => (Area::Node, endpoints),
            selected => selected,
        };
        Some(self.at_port(service, port, address, client, select))
    }

    /// A Service port in the primary family of the Service.
    fn backend(&self, service: &Key, port: u16, client: &Location) -> Option<(Scope, Target)> {
        let service = self.services.get(service)?;
        let primary = service.cluster_ips.first();
        let port = service.tcp_port(|other| other.port == port)?;
        let is_ipv6 = match primary {
            Some(primary) => primary.is_ipv6(),
            // A headless Service: IPv4, if there are such endpoints.
            None => {
                let ipv4 = self.endpoints(service, &port.name, false);
                ipv4.is_ok_and(|endpoints| endpoints.is_empty())
            }
        };
        let all = match self.endpoints(service, &port.name, is_ipv6) {
            Ok(all) => all,
            Err(no_room) => return Some(excess_port(service, no_room.complete)),
        };
        let selected = all.select(service.local_only, client);
        let (area, target) = service_target(service, port, selected);
        let scope = Scope {
            area,
            namespaces: None,
        };
        Some((scope, self.with_policy(&service.key, target)))
    }

    /// Adds the policy of a Service.
    fn with_policy(&self, service: &Key, target: Target) -> Target {
        let policy = self.policy(service);
        let policy = policy.and_then(|policy| policy.backend.clone());
        Target {
            service: Some(service.clone()),
            policy,
            ..target
        }
    }

    /// The routes of a Service port for the clients of a namespace.
    pub fn table(&self, service: &Key, port: u16, clients: &str) -> Option<&Arc<Table>> {
        let routes = self.routes.of_client(service, port, clients);
        routes.or_else(|| self.policies.table(service, port))
    }

    /// The authorization servers that the pods of a Service ask about the requests of each rule of a
    /// table. Empty: none.
    pub fn servers(&self, service: &Key, port: u16, table: &Arc<Table>) -> Vec<Option<String>> {
        self.routes.servers(service, port, table)
    }

    /// The policy of a Service.
    pub fn policy(&self, service: &Key) -> Option<&Effective> {
        self.policies.of_service(service)
    }

    /// Adds the routes of a Service port for the client, and the policy of the Service.
    fn with_routes(
        &self,
        service: &Key,
        port: u16,
        (area, target): (Area, Target),
        client: &Location,
    ) -> (Scope, Target) {
        let routes = self.table(service, port, &client.namespace).cloned();
        let scope = Scope {
            area,
            namespaces: self.routes.consumers(service, port),
        };
        let target = self.with_policy(service, target);
        (scope, Target { routes, ..target })
    }

    /// The inbound configuration of a meshed pod, not of another one with its name. The pod is the
    /// client.
    fn workload(&self, pod: &Key, uid: &str, client: &Location) -> Option<(Scope, Target)> {
        let pod = self.pods.get(pod)?;
        let scope = Scope {
            area: Area::Zone,
            namespaces: None,
        };
        let (rate_limits, limiting) = self.rate_limits(pod);
        let (telemetry, replaced) = self.telemetry(&pod.key.namespace, &limiting);
        let workload = Workload {
            inbound: pod.inbound.clone(),
            zone: client.zone.clone(),
            telemetry,
            replaced,
            rate_limits,
            limiting,
            authorization: self.authorization(pod, Direction::Inbound),
            egress: self.authorization(pod, Direction::Outbound),
        };
        let target = Target::new(TargetKind::Workload(Box::new(workload)), pod.key.clone());
        (pod.identity.is_some() && *pod.uid == *uid).then_some((scope, target))
    }

    /// The Service at a cluster IP, which does not have the port: no connection can succeed there.
    fn unknown_port(&self, destination: SocketAddr) -> Option<(Scope, Target)> {
        let service = self.service_at(destination.ip())?;
        if !service.cluster_ips.contains(&destination.ip()) {
            return None;
        }
        if service.has_excess_port(destination.port()) {
            return Some(excess_port(service, MAX_PORTS));
        }
        let ports = service.tcp_ports().take(MAX_NAMED_PORTS);
        let kind = TargetKind::UnknownPort(ports.map(|port| port.port).collect());
        Some(everywhere(Target::new(kind, service.key.clone())))
    }

    /// A pod by its own address. It has the routes of the oldest headless Service that selects it.
    fn pod_target(&self, destination: SocketAddr, client: &Location) -> Option<(Scope, Target)> {
        let pod = self.holder(destination.ip())?;
        let headless = self.headless_ports(pod);
        let headless = headless.filter(|(at, ..)| *at == destination.port());
        let headless: Vec<_> = headless.map(|(_, service, port)| (service, port)).collect();
        let target = Target {
            app_protocol: headless_protocol(&headless),
            endpoints: Arc::new(Endpoints::new(vec![Endpoint {
                address: destination,
                zone: pod.zone.clone(),
                pod: Some(pod.key.clone()),
                identity: pod.identity_at(destination.port()),
                opaque: pod.is_opaque_at(destination.port()),
                draining: false,
                node_unready: false,
                outside: false,
            }])),
            ..Target::new(TargetKind::Pod, pod.key.clone())
        };
        Some(match oldest(&headless) {
            None => everywhere(target),
            Some((service, port)) => {
                self.with_routes(&service.key, port.port, (Area::Cluster, target), client)
            }
        })
    }

    /// The running pod with an address. Terminating and older pods come last.
    pub(super) fn holder(&self, address: IpAddr) -> Option<&Pod> {
        self.pods_at(address)
            .max_by_key(|pod| (!pod.terminating, pod.created, &pod.key))
    }

    /// The referenced pod, unless a successor has its name.
    pub(super) fn pod_of(&self, reference: &PodReference) -> Option<&Pod> {
        let pod = self.pods.get(&reference.key)?;
        (reference.uid.is_empty() || pod.uid.is_empty() || reference.uid == pod.uid).then_some(pod)
    }

    /// In the order of their names, independently of the order of events.
    pub(super) fn slices_of(&self, service: &Key) -> impl Iterator<Item = &Slice> {
        let slices = self.links.keys(&Link::SliceOf(service.clone()));
        slices.map(|key| &self.slices[key])
    }

    /// The Service with a cluster IP.
    fn service_at(&self, address: IpAddr) -> Option<&Service> {
        let mut services = self.links.keys(&Link::ClusterIp(address));
        Some(&self.services[services.next()?])
    }
}

/// The application protocol that headless Services declare. Empty if they declare none, or
/// different ones.
fn headless_protocol(ports: &[(&Service, &ServicePort)]) -> String {
    let declared = ports.iter().map(|(_, port)| &port.app_protocol);
    let declared = declared.filter(|protocol| !protocol.is_empty());
    let mut declared: BTreeSet<&String> = declared.collect();
    let only = declared.pop_first().filter(|_| declared.is_empty());
    only.cloned().unwrap_or_default()
}

fn service_target(
    service: &Service,
    port: &ServicePort,
    (area, endpoints): (Area, Arc<Endpoints>),
) -> (Area, Target) {
    let target = Target {
        app_protocol: port.app_protocol.clone(),
        session_affinity: service.session_affinity,
        endpoints,
        ..Target::new(TargetKind::Service, service.key.clone())
    };
    (area, target)
}

/// A port of a Service over the limit. Without a target, its connections would pass through in
/// plaintext, also to meshed pods.
fn excess_port(service: &Service, supported: usize) -> (Scope, Target) {
    let kind = TargetKind::ExcessPort(supported);
    everywhere(Target::new(kind, service.key.clone()))
}

/// A target that does not depend on the client.
fn everywhere(target: Target) -> (Scope, Target) {
    (Scope::default(), target)
}
