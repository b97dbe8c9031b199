//! The rate limits and the telemetry of pods. They come from the Services of a pod's own namespace
//! whose selector selects it, with the number of replicas that share them. EndpointSlices have no
//! part in it: other programs may write them. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use prost::Message;

use super::Index;
use super::links::{Link, Links, MAX_LABELS};
use super::reads::{self, Read, Reads};
use super::store::Store;
use crate::kinds::policy::{Side, Target};
use crate::kinds::service::{ServicePort, TargetPort, Transport};
use crate::kinds::{Pod, Service};
use crate::object::Key;

/// Services whose limits a pod has at most: the oldest ones. A proxy does not accept more than 256
/// limits with 1,000 regular expressions.
pub(crate) const MAX_SERVICES: usize = 15;
/// The length of the limits of a pod in a message. Each pod has a copy. One Service has less.
pub(crate) const MAX_BYTES: usize = 128 * 1024;
/// Services whose limits a pod does not have that are remembered.
const MAX_SURPLUS: usize = 15;

/// The Services with rate limits or telemetry.
#[derive(Debug, Default)]
pub(super) struct Limits {
    /// Their ready meshed pods.
    replicas: BTreeMap<Key, u32>,
}

impl Limits {
    /// A pod of a namespace has changed. Another number of replicas, as proxies are told it, is told
    /// apart.
    pub(super) fn count(
        &mut self,
        links: &mut Links,
        services: &Store<Service>,
        namespace: &Arc<str>,
        [old, new]: [Option<&Pod>; 2],
    ) {
        let is_replica = |pod: Option<&Pod>, service: &Service| {
            pod.is_some_and(|pod| is_ready(pod) && pod.identity.is_some() && service.selects(pod))
        };
        let of_namespace = self.replicas.range_mut(Key::first_in(namespace)..);
        for (key, replicas) in of_namespace.take_while(|(key, _)| key.namespace == *namespace) {
            // Services that have changed are counted again.
            let Some(service) = services.get(key) else {
                continue;
            };
            let before = rounded(*replicas);
            match (is_replica(old, service), is_replica(new, service)) {
                (false, true) => *replicas += 1,
                (true, false) => *replicas = replicas.saturating_sub(1),
                _ => {}
            }
            if rounded(*replicas) != before {
                links.changed.replicas.insert(read(key));
            }
        }
    }

    /// The number of results.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.replicas.len()
    }

    /// The replicas of a Service, if it has limits.
    fn of(&self, service: &Key) -> Option<u32> {
        reads::record(|| read(service));
        self.replicas.get(service).copied().map(rounded)
    }
}

/// The replicas of a Service were read.
fn read(service: &Key) -> Read {
    Read::of("replicas", service)
}

fn is_ready(pod: &Pod) -> bool {
    pod.ready && !pod.terminating
}

impl Index {
    /// Answers whether a Service has limits, and counts its replicas if so: from then on, changes of pods
    /// are counted.
    pub(super) fn settle_limits(&mut self, key: &Key) -> Reads {
        let before = self.limits.replicas.remove(key);
        let (service, reads) = reads::ask(|| self.limited(key));
        let replicas = service.map(|service| self.replicas(service));
        if let Some(replicas) = replicas {
            self.limits.replicas.insert(key.clone(), replicas);
        }
        if before.map(rounded) != replicas.map(rounded) {
            self.links.changed.add(read(key));
        }
        reads
    }

    /// A Service with rate limits or telemetry.
    fn limited(&self, key: &Key) -> Option<&Service> {
        let policies = &self.policies;
        let has_limits = policies.rate_limits(key).is_some() || policies.telemetry(key).is_some();
        self.services.get(key).filter(|_| has_limits)
    }

    /// The meshed pods that a Service selects.
    pub(super) fn selected<'a>(&'a self, service: &'a Service) -> impl Iterator<Item = &'a Pod> {
        let pods = self.meshed.get(&service.key.namespace);
        let pods = pods.into_iter().flatten().map(|key| &self.pods[key]);
        pods.filter(|pod| service.selects(pod))
    }

    /// The Services that select a pod, in the order of their names.
    pub(super) fn selecting<'a>(&'a self, pod: &Pod) -> Vec<&'a Service> {
        let namespace = &pod.key.namespace;
        let at = |(name, value): (&String, &String)| {
            Link::ServiceAt(namespace.clone(), name.clone(), value.clone())
        };
        let links = match pod.labels.len() {
            ..=MAX_LABELS => pod.labels.iter().map(at).collect(),
            _ => vec![Link::ServiceIn(namespace.clone())],
        };
        let services = links.iter().flat_map(|link| self.links.keys(link));
        let services = services.map(|key| &self.services[key]);
        let mut services = Vec::from_iter(services.filter(|service| service.selects(pod)));
        services.sort_by_key(|service| &service.key);
        services
    }

    fn replicas(&self, service: &Service) -> u32 {
        let ready = self.selected(service).filter(|pod| is_ready(pod));
        u32::try_from(ready.count()).unwrap_or(u32::MAX)
    }

    /// The Services with limits that select a pod, with their replicas: the oldest ones first.
    pub(super) fn limiting(&self, pod: &Pod) -> Vec<(&Service, u32)> {
        let services = self.selecting(pod).into_iter();
        let services = services.map(|service| Some((service, self.limits.of(&service.key)?)));
        let mut services = Vec::from_iter(services.flatten());
        services.sort_by_key(|(service, _)| (service.created, &service.key));
        services
    }

    /// The limits of a pod, and the Services with limits that select it, each with whether its
    /// limits are surplus.
    pub(super) fn rate_limits(&self, pod: &Pod) -> (Vec<proto::RateLimit>, Vec<(Key, bool)>) {
        let (mut all, mut limiting, mut bytes, mut limited) = (Vec::new(), Vec::new(), 0, 0);
        let services = self.limiting(pod).into_iter();
        for (service, replicas) in services.take(MAX_SERVICES + MAX_SURPLUS) {
            let limits = self.policies.rate_limits(&service.key).into_iter();
            let limits = limits.flat_map(|limits| limits.iter());
            let ports = target_ports(service.tcp_ports(), pod);
            let of_pod = |limit: &proto::RateLimit| proto::RateLimit {
                ports: ports.clone(),
                replicas,
                ..limit.clone()
            };
            let limits = Vec::from_iter(limits.map(of_pod));
            bytes += limits.iter().map(Message::encoded_len).sum::<usize>();
            limited += usize::from(!limits.is_empty());
            let is_surplus = !limits.is_empty() && (limited > MAX_SERVICES || bytes > MAX_BYTES);
            if !is_surplus {
                all.extend(limits);
            }
            limiting.push((service.key.clone(), is_surplus));
        }
        (all, limiting)
    }

    /// The telemetry of a pod: the oldest Service with telemetry that selects the pod decides, or else
    /// the namespace. And the Services whose telemetry has no effect.
    pub(super) fn telemetry(
        &self,
        namespace: &Arc<str>,
        limiting: &[(Key, bool)],
    ) -> (Option<Arc<proto::Telemetry>>, Vec<Key>) {
        let mut services = limiting.iter().filter_map(|(service, _)| {
            let telemetry = self.policies.telemetry(service)?;
            Some((service, telemetry))
        });
        let Some((_, telemetry)) = services.next() else {
            return (self.policies.telemetry_in(namespace).cloned(), vec![]);
        };
        let replaced = services.filter(|(_, other)| *other != telemetry);
        let replaced = replaced.map(|(service, _)| service.clone());
        (Some(telemetry.clone()), replaced.collect())
    }

    /// The policies in force for a Service, which one side applies, with their targets.
    pub fn policies_of(&self, service: &Key, side: Side) -> Vec<(Key, Target)> {
        self.policies.sources(service, side)
    }
}

/// The ports of a pod that ports of a Service lead to. Named ones are those that the pod declares.
pub(crate) fn target_ports<'a>(
    ports: impl Iterator<Item = &'a ServicePort>,
    pod: &Pod,
) -> Vec<u32> {
    let targets = ports.filter_map(|port| match &port.target {
        TargetPort::Number(number) => Some(*number),
        TargetPort::Name(name) => {
            let mut declared = pod.inbound.ports.iter();
            let is_target = |one: &&crate::kinds::pod::ContainerPort| {
                *one.name == **name && one.protocol == Transport::Tcp
            };
            declared.find(is_target).map(|one| one.port)
        }
    });
    let targets: BTreeSet<u32> = targets.map(u32::from).collect();
    targets.into_iter().collect()
}

/// A number of replicas with three significant bits after the first one, rounded up, at least 1:
/// most changes of a large number concern no pod, and a share is never too large.
fn rounded(replicas: u32) -> u32 {
    let step = 1 << replicas.max(1).ilog2().saturating_sub(3);
    replicas
        .max(1)
        .checked_next_multiple_of(step)
        .unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
