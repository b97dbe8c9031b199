//! A Service with all of its endpoints, also those that are not ready, for tools. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use diy_mesh_proto::mesh::v1 as proto;
use proto::service::{Canary, Endpoint, Port};

use super::Index;
use crate::kinds::service::{ServicePort, TargetPort};
use crate::kinds::slice::SliceEndpoint;
use crate::kinds::{Service, Slice};
use crate::object::Key;

/// Ports of one endpoint. A slice has up to 1,000 endpoints that share its ports, a message does
/// not.
const MAX_ENDPOINT_PORTS: usize = 32;

/// The key of an endpoint: its pod, or its address without a pod.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum EndpointKey<'a> {
    Pod(&'a Key),
    Address(IpAddr),
}

impl Index {
    /// The message about a Service, with all endpoints, one per pod.
    pub fn service(&self, key: &Key) -> Option<proto::Service> {
        let service = self.services.get(key)?;
        let mut all: BTreeMap<EndpointKey<'_>, (BTreeSet<IpAddr>, Endpoint)> = BTreeMap::new();
        for slice in self.slices_of(key) {
            for endpoint in &slice.endpoints {
                let pod = endpoint.pod.as_ref().map(|pod| &pod.key);
                let who = pod.map_or(EndpointKey::Address(endpoint.address), EndpointKey::Pod);
                let (addresses, message) = all.entry(who).or_default();
                addresses.insert(endpoint.address);
                self.describe(service, slice, endpoint, message);
            }
        }
        let endpoints = all.into_values().map(|(addresses, message)| Endpoint {
            addresses: addresses.iter().map(IpAddr::to_string).collect(),
            ..message
        });
        let cluster_ips = service.cluster_ips.iter();
        Some(proto::Service {
            name: key.name.to_string(),
            namespace: key.namespace.to_string(),
            ports: service.ports.iter().map(port).collect(),
            cluster_ips: cluster_ips.map(IpAddr::to_string).collect(),
            endpoints: endpoints.collect(),
            canaries: self.routes.canaries(key).iter().map(canary).collect(),
            external_name: service.external_name.to_string(),
            deleted: false,
        })
    }

    /// Adds what a slice says about an endpoint.
    fn describe(
        &self,
        service: &Service,
        slice: &Slice,
        endpoint: &SliceEndpoint,
        message: &mut Endpoint,
    ) {
        let pod = endpoint.pod.as_ref().map(|pod| self.pod_of(pod));
        // As for proxies, endpoints of unknown pods are not usable.
        let is_known = pod != Some(None);
        let is_leaving = pod.flatten().is_some_and(|pod| pod.terminating);
        message.terminating |= endpoint.terminating || is_leaving;
        message.ready |= endpoint.ready && is_known;
        message.ready &= !message.terminating;
        message.ready |= service.publish_not_ready && is_known;
        if message.zone.is_empty() {
            message.zone = endpoint.zone.to_string();
        }
        if let Some(pod) = &endpoint.pod {
            message.pod_name = pod.key.name.to_string();
        }
        let holder = pod.unwrap_or_else(|| self.holder(endpoint.address));
        let mut ports = slice.ports.iter().take(MAX_ENDPOINT_PORTS);
        let identity = ports.find_map(|port| holder?.identity_at(port.port));
        if message.identity.is_empty() {
            message.identity = identity.as_deref().unwrap_or_default().to_owned();
        }
        let free = MAX_ENDPOINT_PORTS.saturating_sub(message.ports.len());
        let ports = slice.ports.iter().take(free);
        let ports = ports.map(|port| (port.name.clone(), port.port.into()));
        message.ports.extend(ports);
    }
}

fn canary((key, percent): &(Key, u32)) -> Canary {
    Canary {
        name: key.name.to_string(),
        weight: i32::try_from(*percent).expect("100 at most"),
        ..Canary::default()
    }
}

fn port(port: &ServicePort) -> Port {
    let (target_port, target_port_name) = match &port.target {
        TargetPort::Number(number) => ((*number).into(), String::new()),
        TargetPort::Name(name) => (0, name.clone()),
    };
    Port {
        name: port.name.clone(),
        port: port.port.into(),
        target_port,
        protocol: port.protocol.name().to_owned(),
        target_port_name,
        app_protocol: port.app_protocol.clone(),
    }
}
