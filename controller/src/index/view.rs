//! A Service with all of its endpoints, also those that are not ready, for tools. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::object::{Key, Pod, PodReference, Service, Slice, SliceEndpoint, TargetPort};
use super::version::{Digest, Version};

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
#[derive(Clone, Debug, Default, PartialEq)]
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
    /// A digest of the view.
    pub fn version(&self) -> Version {
        let mut digest = Digest::new("view");
        digest_service(&mut digest, &self.service);
        for endpoint in &self.endpoints {
            digest_endpoint(&mut digest, endpoint);
        }
        for (key, percent) in &self.canaries {
            digest.text(&key.name);
            digest.number((*percent).into());
        }
        digest.finish()
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
            let identity = slice.ports.iter().find_map(|port| identity_at(port.port));
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

fn digest_service(digest: &mut Digest, service: &Service) {
    digest.text(&service.key.namespace);
    digest.text(&service.key.name);
    digest.text(&service.external_name);
    digest.number(service.cluster_ips.len() as u64);
    service
        .cluster_ips
        .iter()
        .for_each(|ip| digest.address(*ip));
    digest.number(service.ports.len() as u64);
    for port in &service.ports {
        digest.text(&port.name);
        digest.number(port.port.into());
        match &port.target {
            TargetPort::Number(number) => digest.number((*number).into()),
            TargetPort::Name(name) => digest.text(name),
        }
        digest.text(port.protocol.name());
        digest.text(&port.app_protocol);
    }
}

fn digest_endpoint(digest: &mut Digest, endpoint: &EndpointView) {
    digest.number(endpoint.addresses.len() as u64);
    endpoint.addresses.iter().for_each(|ip| digest.address(*ip));
    digest.number(u64::from(endpoint.ready) | u64::from(endpoint.terminating) << 1);
    digest.text(&endpoint.pod_name);
    digest.text(&endpoint.zone);
    digest.text(endpoint.identity.as_deref().unwrap_or_default());
    digest.number(endpoint.ports.len() as u64);
    for (name, number) in &endpoint.ports {
        digest.text(name);
        digest.number((*number).into());
    }
}
