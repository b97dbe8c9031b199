//! Headless Services: the ports of pods to which they lead. The oldest of several Services for one
//! port of a pod decides. The authors of routes and policies of the others get a condition. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::Index;
use super::links::Link;
use super::reads::{self, Read, Reads};
use crate::kinds::policy::Effective;
use crate::kinds::service::ServicePort;
use crate::kinds::{Pod, Service};
use crate::object::condition::{APPLIES_TO_ALL_PODS, OLDER_SERVICE};
use crate::object::{Condition, Key, Kind, ObjectStatus, TargetReference};

/// Names of Services, and of pods, in one condition.
const MAX_NAMES: usize = 4;

/// Ports of a headless Service, with the older Service that decides at a pod.
type Older = BTreeMap<u16, Key>;

/// The headless Services that have pods at which an older Service decides.
#[derive(Debug, Default)]
pub(super) struct Headless {
    /// By Service and pod.
    older: HashMap<Key, BTreeMap<Key, Older>>,
    /// The Services of each pod.
    of_pod: HashMap<Key, BTreeSet<Key>>,
}

impl Headless {
    /// Replaces what holds for a pod. Returns the Services for which it differs from before.
    fn update(&mut self, pod: &Key, next: BTreeMap<Key, Older>) -> Vec<Key> {
        let mut services = self.of_pod.remove(pod).unwrap_or_default();
        services.extend(next.keys().cloned());
        let differs = |service: &Key| {
            let new = next.get(service);
            let pods = self.older.entry(service.clone()).or_default();
            let old = match new {
                Some(new) => pods.insert(pod.clone(), new.clone()),
                None => pods.remove(pod),
            };
            if pods.is_empty() {
                self.older.remove(service);
            }
            old.as_ref() != new
        };
        let changed = services.into_iter().filter(differs).collect();
        if !next.is_empty() {
            self.of_pod.insert(pod.clone(), next.into_keys().collect());
        }
        changed
    }

    /// The number of results.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.older.len() + self.of_pod.len()
    }
}

/// The pods of a headless Service at which an older one decides were read.
fn read(service: &Key) -> Read {
    Read::of("older Services", service)
}

impl Index {
    /// The ports of a pod to which the headless Services that select it lead, with the port of the
    /// Service.
    pub(super) fn headless_ports<'a>(
        &'a self,
        pod: &'a Pod,
    ) -> impl Iterator<Item = (u16, &'a Service, &'a ServicePort)> {
        self.slices_with(&pod.key).flat_map(move |slice| {
            let service = slice.service.as_ref();
            let service = service.and_then(|key| self.services.get(key));
            let service = service.filter(|service| service.is_headless && service.selects(pod));
            service.into_iter().flat_map(move |service| {
                service.tcp_ports().flat_map(move |port| {
                    let numbers = slice.tcp_ports(&port.name);
                    numbers.map(move |at| (at, service, port))
                })
            })
        })
    }

    /// Answers which headless Services of a pod have older ones.
    pub(super) fn settle_headless(&mut self, pod: &Key) -> Reads {
        let (next, reads) = reads::ask(|| {
            let is_endpoint = self.links.contains(&Link::EndpointOf(pod.clone()));
            let pod = self.pods.get(pod).filter(|_| is_endpoint)?;
            Some(self.older_at(pod))
        });
        for service in self.headless.update(pod, next.unwrap_or_default()) {
            self.links.changed.add(read(&service));
        }
        reads
    }

    /// The headless Services of a pod at whose ports older Services decide.
    fn older_at(&self, pod: &Pod) -> BTreeMap<Key, Older> {
        let mut of_port: BTreeMap<u16, Vec<_>> = BTreeMap::new();
        for (at, service, port) in self.headless_ports(pod) {
            of_port.entry(at).or_default().push((service, port));
        }
        let mut older: BTreeMap<Key, Older> = BTreeMap::new();
        for ports in of_port.values() {
            let Some((oldest, _)) = oldest(ports) else {
                continue;
            };
            for (service, port) in ports.iter().filter(|(one, _)| one.key != oldest.key) {
                let of_service = older.entry(service.key.clone()).or_default();
                of_service.insert(port.port, oldest.key.clone());
            }
        }
        older
    }

    /// Adds the condition about older headless Services where it applies.
    pub(super) fn add_older_services(&self, status: &mut ObjectStatus) {
        let (kind, key) = (status.kind, &status.key);
        for parent in &mut status.parents {
            let mut conditions = parent.conditions.iter();
            let is_accepted = conditions.any(|one| one.kind == "Accepted" && one.holds);
            let older = self.older_services(key, &parent.parent);
            let older = older.filter(|_| is_accepted && self.concerns_clients(kind, key));
            parent.conditions.extend(older);
        }
    }

    /// Not a policy with nothing but rate limits, which every Service of a pod has there, and no
    /// AuthorizationPolicy or host outside of the cluster.
    fn concerns_clients(&self, kind: Kind, key: &Key) -> bool {
        match kind {
            Kind::Authorization | Kind::Backend => false,
            Kind::TrafficPolicy => {
                let policy = self.policies.objects.get(key);
                let settings = policy.and_then(|policy| policy.content.as_deref().ok());
                let effective = Effective::of(settings, None);
                effective.is_some_and(|one| one.concerns_clients())
            }
            _ => true,
        }
    }

    /// The condition of a route or of a policy at a parent, if there are older Services. Pods are
    /// named to authors of their own namespace only.
    fn older_services(&self, route: &Key, parent: &TargetReference) -> Option<Condition> {
        let key = parent.key(route);
        let is_service = parent.kind.as_deref() == Some(Kind::Service.name());
        reads::record(|| read(&key));
        let all = self.headless.older.get(&key).filter(|_| is_service)?;
        let ports = self.services.get(&key)?.ports.iter();
        let ports = ports.filter(|port| parent.selects(port));
        let ports: BTreeSet<u16> = ports.map(|port| port.port).collect();
        let (mut pods, mut services) = (Vec::new(), BTreeSet::new());
        for (pod, older) in all {
            let older = older.iter().filter(|(port, _)| ports.contains(port));
            let mut older = older.map(|(_, older)| older).peekable();
            if older.peek().is_some() {
                pods.push(&*pod.name);
                services.extend(older);
            }
        }
        let names = if key.namespace == route.namespace {
            format!(" (pods {})", shortened(pods.iter()))
        } else {
            String::new()
        };
        (!pods.is_empty()).then(|| {
            Condition::new(
                APPLIES_TO_ALL_PODS,
                false,
                OLDER_SERVICE,
                format!(
                    "routes and policies of older headless Services apply to {} of the pods of \
                 {key}: {}{names}",
                    pods.len(),
                    shortened(services.iter())
                ),
            )
        })
    }
}

/// The oldest Service, with its first port.
pub(super) fn oldest<'a>(
    ports: &[(&'a Service, &'a ServicePort)],
) -> Option<(&'a Service, &'a ServicePort)> {
    let ports = ports.iter().copied();
    ports.min_by_key(|(service, port)| (service.created, &service.key, port.port))
}

/// The first names, and the number of the others.
fn shortened(names: impl ExactSizeIterator<Item = impl ToString>) -> String {
    let others = names.len().saturating_sub(MAX_NAMES);
    let first = names.take(MAX_NAMES).map(|name| name.to_string());
    let first = Vec::from_iter(first).join(", ");
    match others {
        0 => first,
        others => format!("{first} and {others} more"),
    }
}

#[cfg(test)]
mod tests;
