//! The TrafficPolicies of the catalog, and the policy of each Service. Pure.
//!
//! A policy concerns its own namespace only. Of several valid policies for one target, the oldest
//! one applies. A change marks the targets that it may concern, whose Services are computed once
//! for all changes of a batch.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;

use super::object::{Key, Kind, Service, Transport};
use super::store::{Replaced, Store};
use super::{link, unlink};
use crate::policy::{Effective, Policy, Requests, Settings, Side, Target};
use crate::routes::attach::{RouteId, Table};
use crate::routes::{ParentStatus, RouteStatus};

/// The policies, by everything that they depend on.
#[derive(Debug, Default)]
pub(super) struct Policies {
    pub(super) objects: Store<Policy>,
    of_target: HashMap<Target, BTreeSet<Key>>,
    services_of: HashMap<Arc<str>, BTreeSet<Key>>,
    /// The policy that applies to each target.
    applied: HashMap<Target, Key>,
    of_service: HashMap<Key, OfService>,
    /// Targets that are to be computed again, and Services that they concern.
    changed: BTreeSet<Target>,
    affected: BTreeSet<Key>,
}

/// The policy of a Service, and the tables of its ports without routes.
#[derive(Clone, Debug, PartialEq)]
struct OfService {
    effective: Effective,
    tables: BTreeMap<u16, Arc<Table>>,
}

impl Policies {
    /// The policy of a Service.
    pub(super) fn of_service(&self, service: &Key) -> Option<&Effective> {
        self.of_service.get(service).map(|one| &one.effective)
    }

    /// The limits of the requests to the pods of a Service, without ports and replicas.
    pub(super) fn rate_limits(&self, service: &Key) -> Option<&Arc<[proto::RateLimit]>> {
        self.of_service(service)?.rate_limits.as_ref()
    }

    /// The settings of the requests of a Service.
    pub(super) fn requests(&self, service: &Key) -> Option<&Requests> {
        self.of_service(service).map(|one| &one.requests)
    }

    /// The table of a Service port without routes.
    pub(super) fn table(&self, service: &Key, port: u16) -> Option<&Arc<Table>> {
        self.of_service.get(service)?.tables.get(&port)
    }

    pub(super) fn set(&mut self, key: &Key, new: Option<Policy>) {
        let Some(Replaced(old)) = self.objects.replace(key, new) else {
            return;
        };
        for target in old.iter().flat_map(targets) {
            unlink(&mut self.of_target, &target, key);
            self.changed.insert(target);
        }
        for target in self.objects.get(key).into_iter().flat_map(targets) {
            link(&mut self.of_target, &target, key);
            self.changed.insert(target);
        }
    }

    /// A Service has changed.
    pub(super) fn set_service(&mut self, key: &Key, exists: bool) {
        match exists {
            true => link(&mut self.services_of, &key.namespace, key),
            false => unlink(&mut self.services_of, &key.namespace, key),
        }
        let of_namespace = Target::Namespace(key.namespace.clone());
        let target = Target::Service(key.clone());
        let has_policy = |target| self.of_target.contains_key(target);
        if has_policy(&target) || has_policy(&of_namespace) || self.of_service.contains_key(key) {
            self.changed.insert(target);
        }
    }

    /// Computes a changed target, and the policy of a Service that it concerns. Returns the Service,
    /// and whether it has another policy than before, or `None` without changes.
    pub(super) fn settle_one(
        &mut self,
        services: &Store<Service>,
        statuses: &mut BTreeSet<RouteId>,
    ) -> Option<(Key, bool)> {
        while let Some(target) = self.changed.pop_first() {
            self.mark_target(&target, statuses);
            match self.oldest(&target) {
                Some(key) => drop(self.applied.insert(target.clone(), key)),
                None => drop(self.applied.remove(&target)),
            }
            match target {
                Target::Service(key) => drop(self.affected.insert(key)),
                Target::Namespace(name) => {
                    let all = self.services_of.get(&name).into_iter().flatten();
                    self.affected.extend(all.cloned());
                }
            }
        }
        let key = self.affected.pop_first()?;
        let is_changed = self.update(&key, services.get(&key));
        Some((key, is_changed))
    }

    /// A Service has changed, which policies name.
    pub(super) fn mark(&self, service: &Key, statuses: &mut BTreeSet<RouteId>) {
        self.mark_target(&Target::Service(service.clone()), statuses);
    }

    fn mark_target(&self, target: &Target, statuses: &mut BTreeSet<RouteId>) {
        let policies = self.of_target.get(target).into_iter().flatten();
        statuses.extend(policies.map(|key| (Kind::TrafficPolicy, key.clone())));
    }

    /// The oldest valid policy for a target.
    fn oldest(&self, target: &Target) -> Option<Key> {
        let policies = self.of_target.get(target).into_iter().flatten();
        let policies = policies.map(|key| &self.objects[key]);
        let valid = policies.filter(|policy| policy.rejection().is_none());
        let oldest = valid.min_by_key(|policy| (policy.created, &policy.key));
        oldest.map(|policy| policy.key.clone())
    }

    /// Computes the policy of a Service. Returns whether it has changed.
    fn update(&mut self, key: &Key, service: Option<&Service>) -> bool {
        let service = service.filter(|service| service.external_name.is_empty());
        let next = service.and_then(|service| {
            let own = self.settings(&Target::Service(key.clone()));
            let inherited = self.settings(&Target::Namespace(key.namespace.clone()));
            let effective = Effective::of(own, inherited)?;
            let ports = service.ports.iter();
            let ports = ports.filter(|port| port.protocol == Transport::Tcp);
            let tables = ports.filter_map(|port| {
                let table = effective.requests.table(key, port)?;
                Some((port.port, Arc::new(table)))
            });
            Some(OfService {
                tables: tables.collect(),
                effective,
            })
        });
        if self.of_service.get(key) == next.as_ref() {
            return false;
        }
        match next {
            Some(next) => drop(self.of_service.insert(key.clone(), next)),
            None => drop(self.of_service.remove(key)),
        }
        true
    }

    /// The policies with sections in force for a Service, which one side applies, with their
    /// targets.
    pub(super) fn sources(&self, service: &Key, side: Side) -> Vec<(Key, Target)> {
        let of_namespace = Target::Namespace(service.namespace.clone());
        let layers = [Target::Service(service.clone()), of_namespace].into_iter();
        let mut replaced = Vec::new();
        let layers = layers.filter_map(|target| {
            let sections = self.settings(&target)?.sections(side);
            let is_replaced = |at: usize| replaced.get(at).copied().flatten().is_some();
            let mut sections_in_force = sections.iter().enumerate();
            let is_in_force =
                sections_in_force.any(|(at, has)| *has == Some(true) && !is_replaced(at));
            replaced = sections;
            is_in_force.then(|| (self.applied[&target].clone(), target))
        });
        layers.collect()
    }

    fn settings(&self, target: &Target) -> Option<&Settings> {
        let policy = &self.objects[self.applied.get(target)?];
        policy.content.as_deref().ok()
    }

    /// The status of a policy.
    pub(super) fn status(&self, key: &Key, services: &Store<Service>) -> Option<RouteStatus> {
        let policy = self.objects.get(key)?;
        Some(RouteStatus {
            kind: Kind::TrafficPolicy,
            key: key.clone(),
            uid: "".into(),
            generation: policy.generation,
            parents: self.conditions(policy, services),
            keeps_programmed: false,
        })
    }

    fn conditions(&self, policy: &Policy, services: &Store<Service>) -> Vec<ParentStatus> {
        let targets = policy.targets().map(|(reference, target)| {
            let exists = match &target {
                Some(Target::Service(key)) => {
                    let service = services.get(key);
                    service.is_some_and(|service| service.external_name.is_empty())
                }
                _ => true,
            };
            let applied = target.as_ref().and_then(|target| self.applied.get(target));
            let applied = applied.unwrap_or(&policy.key);
            let accepted = policy.accepted(target.as_ref(), exists, applied);
            ParentStatus {
                parent: reference.clone(),
                conditions: policy.conditions(accepted),
            }
        });
        targets.collect()
    }

    /// The number of references between objects.
    #[cfg(test)]
    pub(super) fn links(&self) -> usize {
        let targets = self.of_target.len() + self.applied.len();
        targets + self.services_of.len() + self.of_service.len()
    }
}

fn targets(policy: &Policy) -> impl Iterator<Item = Target> {
    policy.targets().filter_map(|(_, target)| target)
}

#[cfg(test)]
mod tests;
