//! The rate limits and the telemetry of pods. They come from the Services of a pod's own namespace
//! whose selector selects it, with the number of replicas that share them. EndpointSlices have no
//! part in it: other programs may write them. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use prost::Message;

use super::store::Store;
use super::{Index, Touched};
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
    /// Whether a Service had limits before the latest changes.
    pub(super) fn has(&self, service: &Key) -> bool {
        self.replicas.contains_key(service)
    }

    /// A pod of a namespace has changed. Another number of replicas, as proxies are told it, marks
    /// the Service.
    pub(super) fn count(
        &mut self,
        services: &Store<Service>,
        namespace: &Arc<str>,
        [old, new]: [Option<&Pod>; 2],
        touched: &mut Touched,
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
                touched.replicas.insert(key.clone());
            }
        }
    }

    /// The number of results.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.replicas.len()
    }

    /// The Services of a namespace with limits.
    fn of(&self, namespace: &Arc<str>) -> impl Iterator<Item = (&Key, u32)> {
        let services = self.replicas.range(Key::first_in(namespace)..);
        let services = services.take_while(move |(key, _)| key.namespace == *namespace);
        services.map(|(key, replicas)| (key, rounded(*replicas)))
    }
}

fn is_ready(pod: &Pod) -> bool {
    pod.ready && !pod.terminating
}

impl Index {
    /// Counts the replicas of a changed Service. Its limits concern its pods at once.
    pub(super) fn settle_limits(&mut self, key: &Key, touched: &mut Touched) {
        let before = self.limits.replicas.remove(key);
        let replicas = self.limited(key).map(|service| self.replicas(service));
        if let Some(replicas) = replicas {
            self.limits.replicas.insert(key.clone(), replicas);
        }
        if before.is_some() || replicas.is_some() {
            touched.pods.extend(self.pods_limited_by(key));
        }
    }

    /// A Service with rate limits or telemetry.
    fn limited(&self, key: &Key) -> Option<&Service> {
        let policies = &self.policies;
        let has_limits = policies.rate_limits(key).is_some() || policies.telemetry(key).is_some();
        self.services.get(key).filter(|_| has_limits)
    }

    /// The meshed pods that a Service selects.
    pub fn pods_limited_by(&self, service: &Key) -> Vec<Key> {
        let Some(service) = self.services.get(service) else {
            return Vec::new();
        };
        let selected = self.selected(service);
        selected.map(|pod| pod.key.clone()).collect()
    }

    pub(super) fn selected<'a>(&'a self, service: &'a Service) -> impl Iterator<Item = &'a Pod> {
        let pods = self.meshed.get(&service.key.namespace);
        let pods = pods.into_iter().flatten().map(|key| &self.pods[key]);
        pods.filter(|pod| service.selects(pod))
    }

    fn replicas(&self, service: &Service) -> u32 {
        let ready = self.selected(service).filter(|pod| is_ready(pod));
        u32::try_from(ready.count()).unwrap_or(u32::MAX)
    }

    /// The Services with limits that select a pod, with their replicas: the oldest ones first.
    pub(super) fn limiting(&self, pod: &Pod) -> Vec<(&Service, u32)> {
        let services = self.limits.of(&pod.key.namespace);
        let services = services.map(|(key, replicas)| (&self.services[key], replicas));
        let mut services: Vec<_> = services
            .filter(|(service, _)| service.selects(pod))
            .collect();
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
