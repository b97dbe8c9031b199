//! The TrafficPolicies of the catalog, and the policy of each Service. Pure.
//!
//! A policy concerns its own namespace only. The oldest of several valid policies for one target
//! applies.

use std::collections::BTreeMap;
use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;

use super::links::{Link, Links};
use super::reads::{self, Reads};
use super::store::{Store, Values};
use crate::kinds::Service;
use crate::kinds::policy::{Effective, Policy, Requests, Settings, Side, Target};
use crate::kinds::route::attach::Table;
use crate::object::{Key, ObjectStatus, TargetStatus};

/// The policies, by everything that they depend on.
#[derive(Debug, Default)]
pub(super) struct Policies {
    pub(super) objects: Store<Policy>,
    /// The policy that applies to each target.
    applied: Values<Target, Key>,
    of_service: Values<Key, OfService>,
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

    /// The telemetry settings of the pods of a Service.
    pub(super) fn telemetry(&self, service: &Key) -> Option<&Arc<proto::Telemetry>> {
        self.of_service(service)?.telemetry.as_ref()
    }

    /// The telemetry settings of the pods of a namespace that no Service with telemetry selects.
    pub(super) fn telemetry_in(&self, namespace: &Arc<str>) -> Option<&Arc<proto::Telemetry>> {
        let settings = self.settings(&Target::Namespace(namespace.clone()))?;
        settings.telemetry.as_ref()
    }

    /// The settings of the requests of a Service.
    pub(super) fn requests(&self, service: &Key) -> Option<&Requests> {
        self.of_service(service).map(|one| &one.requests)
    }

    /// The table of a Service port without routes.
    pub(super) fn table(&self, service: &Key, port: u16) -> Option<&Arc<Table>> {
        self.of_service.get(service)?.tables.get(&port)
    }

    /// Answers which policy applies to a target.
    pub(super) fn settle(&mut self, links: &mut Links, target: &Target) -> Reads {
        let (oldest, reads) = reads::ask(|| self.oldest(links, target));
        self.applied.put(&mut links.changed, target, oldest);
        reads
    }

    /// The oldest valid policy for a target.
    fn oldest(&self, links: &Links, target: &Target) -> Option<Key> {
        let policies = links.keys(&Link::Target(target.clone()));
        let policies = policies.map(|key| &self.objects[key]);
        let valid = policies.filter(|policy| policy.rejection().is_none());
        let oldest = valid.min_by_key(|policy| (policy.created, &policy.key));
        oldest.map(|policy| policy.key.clone())
    }

    /// Answers what the policy of a Service is.
    pub(super) fn settle_service(
        &mut self,
        links: &mut Links,
        key: &Key,
        services: &Store<Service>,
    ) -> Reads {
        let (next, reads) = reads::ask(|| self.compute(key, services.get(key)?));
        self.of_service.put(&mut links.changed, key, next);
        reads
    }

    fn compute(&self, key: &Key, service: &Service) -> Option<OfService> {
        if !service.external_name.is_empty() {
            return None;
        }
        let own = self.settings(&Target::Service(key.clone()));
        let inherited = self.settings(&Target::Namespace(key.namespace.clone()));
        let effective = Effective::of(own, inherited)?;
        let tables = service.tcp_ports().filter_map(|port| {
            let table = effective.requests.table(key, port)?;
            Some((port.port, Arc::new(table)))
        });
        Some(OfService {
            tables: tables.collect(),
            effective,
        })
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
            let policy = self.applied.get(&target).filter(|_| is_in_force)?;
            Some((policy.clone(), target))
        });
        layers.collect()
    }

    fn settings(&self, target: &Target) -> Option<&Settings> {
        let policy = &self.objects[self.applied.get(target)?];
        policy.content.as_deref().ok()
    }

    /// The status of a policy.
    pub(super) fn status(&self, key: &Key, services: &Store<Service>) -> Option<ObjectStatus> {
        let policy = self.objects.get(key)?;
        Some(policy.status(self.conditions(policy, services)))
    }

    fn conditions(&self, policy: &Policy, services: &Store<Service>) -> Vec<TargetStatus> {
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
            TargetStatus {
                parent: reference.clone(),
                conditions: policy.conditions(accepted),
            }
        });
        targets.collect()
    }

    /// The number of results.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.applied.len() + self.of_service.len()
    }
}

#[cfg(test)]
mod tests;
