//! A Service with all of its endpoints, also those that are not ready, for tools. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::object::{Key, Pod, PodReference, Service, Slice, SliceEndpoint};
use super::version::{self, Version};

/// Ports of one endpoint. A slice has up to 1,000 endpoints that share its ports, a view and its
/// message do not.
const MAX_ENDPOINT_PORTS: usize = 32;

/// A Service with its endpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceView {
    /// The Service.
    pub service: Service,
    /// All endpoints, one per pod.
    pub endpoints: Vec<EndpointView>,
    /// Other Services with their shares of the requests, in percent.
    pub canaries: Vec<(Key, u32)>,
}

/// One endpoint of a Service.
#[derive(Clone, Debug, Default, PartialEq, Hash)]
pub struct EndpointView {
    /// The addresses of both families.
    pub addresses: BTreeSet<IpAddr>,
    /// Whether the endpoint accepts new connections.
    pub ready: bool,
    /// Whether the endpoint terminates.
    pub terminating: bool,
    /// The name of the pod, or empty.
    pub pod_name: Arc<str>,
    /// The zone, or empty.
    pub zone: Arc<str>,
    /// The ports by name, 32 at most.
    pub ports: BTreeMap<String, u16>,
    /// The SPIFFE ID of a meshed pod, unless all of these ports bypass the proxy.
    pub identity: Option<Arc<str>>,
}

impl ServiceView {
    /// A digest of what a message contains of the view.
    pub fn version(&self) -> Version {
        let service = &self.service;
        let ports = service.ports.iter().map(|port| {
            let protocols = (port.protocol, &port.app_protocol);
            (&port.name, port.port, &port.target, protocols)
        });
        let ports = Vec::from_iter(ports);
        let addresses = (&service.cluster_ips, &service.external_name);
        let fields = (
            &service.key,
            addresses,
            ports,
            &self.endpoints,
            &self.canaries,
        );
        version::of("view", &fields)
    }
}

/// The key of an endpoint: its pod, or its address without a pod.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum EndpointKey<'a> {
    Pod(&'a Key),
    Address(IpAddr),
}

/// Combines a Service with its slices. `pod_of` resolves references to pods, `holder` is the pod
/// with an address.
pub(super) fn of<'a>(
    service: &Service,
    slices: &[&Slice],
    pod_of: impl Fn(&PodReference) -> Option<&'a Pod>,
    holder: impl Fn(IpAddr) -> Option<&'a Pod>,
) -> ServiceView {
    let mut all: BTreeMap<EndpointKey, EndpointView> = BTreeMap::new();
    for slice in slices {
        for endpoint in &slice.endpoints {
            let who = endpoint
                .pod
                .as_ref()
                .map_or(EndpointKey::Address(endpoint.address), |pod| {
                    EndpointKey::Pod(&pod.key)
                });
            let view = all.entry(who).or_default();
            let pod = endpoint.pod.as_ref().map(&pod_of);
            // As for proxies, endpoints of unknown pods are not usable.
            let known = pod != Some(None);
            let leaving = endpoint.terminating || pod.flatten().is_some_and(|pod| pod.terminating);
            add(view, endpoint, endpoint.ready && known, leaving);
            view.ready |= service.publish_not_ready && known;
            let holder = pod.unwrap_or_else(|| holder(endpoint.address));
            let identity_at = |port| holder.and_then(|pod| pod.identity_at(port));
            let mut ports = slice.ports.iter().take(MAX_ENDPOINT_PORTS);
            let identity = ports.find_map(|port| identity_at(port.port));
            view.identity = view.identity.take().or(identity);
            let free = MAX_ENDPOINT_PORTS.saturating_sub(view.ports.len());
            let ports = slice.ports.iter().take(free);
            view.ports
                .extend(ports.map(|port| (port.name.clone(), port.port)));
        }
    }
    ServiceView {
        service: service.clone(),
        endpoints: all.into_values().collect(),
        canaries: Vec::new(),
    }
}

fn add(view: &mut EndpointView, endpoint: &SliceEndpoint, ready: bool, leaving: bool) {
    view.addresses.insert(endpoint.address);
    view.terminating |= leaving;
    view.ready = (view.ready || ready) && !view.terminating;
    if view.zone.is_empty() {
        view.zone = endpoint.zone.clone();
    }
    if let Some(pod) = &endpoint.pod {
        view.pod_name = pod.key.name.clone();
    }
}
