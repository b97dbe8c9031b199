//! The pods that a policy selects, and where it has no effect there. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use diy_mesh_proto::mesh::v1::authorization_policy::Action;

use super::super::Index;
use super::super::links::Link;
use crate::index::outcome::{Coverage, Outcome, shown};
use crate::kinds::Pod;
use crate::kinds::authorization::{AuthorizationPolicy, Direction, Mode, Rules, Target};
use crate::object::Key;

/// The coverage of a policy while the pods are counted.
#[derive(Debug, Default)]
pub struct Covering {
    coverage: Coverage,
    declared: BTreeSet<u32>,
    /// A pod declares no port: it may have any.
    has_any_port: bool,
}

impl Index {
    /// The policies.
    pub fn authorizations(&self) -> Vec<Key> {
        self.authorizations.objects.keys().cloned().collect()
    }

    /// The namespaces whose pods a policy may select. A policy of the mesh concerns those with meshed
    /// pods.
    pub fn namespaces_of_authorization(&self, policy: &Key) -> Vec<Arc<str>> {
        if self.authorizations.is_of_mesh(policy) {
            return self.meshed.keys().cloned().collect();
        }
        vec![policy.namespace.clone()]
    }

    /// Counts the pods of a namespace that a policy selects.
    pub fn cover(&self, policy: &Key, namespace: &Arc<str>, covering: &mut Covering) {
        let Some(policy) = self.authorizations.objects.get(policy) else {
            return;
        };
        let pods = self.links.keys(&Link::PodIn(namespace.clone()));
        let pods = pods.map(|key| &self.pods[key]);
        for pod in pods.filter(|pod| !pod.terminating) {
            if let Some(ports) = self.ports(policy, pod) {
                covering.add(policy, pod, ports);
            }
        }
    }

    /// The meshed pods without an ALLOW policy whose default is to allow, with the ALLOW policies
    /// of their namespace that name a Service without pods. All of these pods may be open by
    /// mistake.
    pub fn opened(&self) -> Vec<(&Key, String, Vec<&Key>)> {
        let mut opened = Vec::new();
        for policy in self.authorizations.objects.values() {
            let Some((service, namespace)) = self.lost(policy).zip(self.own_pods(policy)) else {
                continue;
            };
            let pods = namespace.iter().map(|key| &self.pods[key]);
            let open = pods.filter(|pod| self.is_open(pod)).map(|pod| &pod.key);
            opened.push((&policy.key, service.to_string(), open.collect()));
        }
        opened.retain(|(.., pods): &(_, _, Vec<_>)| !pods.is_empty());
        opened.sort();
        opened
    }

    fn own_pods(&self, policy: &AuthorizationPolicy) -> Option<&BTreeSet<Key>> {
        self.meshed.get(&policy.key.namespace)
    }

    /// The Service of an ALLOW that leads to no pod.
    fn lost<'a>(&self, policy: &'a AuthorizationPolicy) -> Option<&'a Target> {
        policy.rules().filter(|rules| is_enforced_allow(rules))?;
        policy.applied().targets.iter().find(|target| {
            let Target::Service(key) = target else {
                return false;
            };
            let service = self.services.get(key);
            service.is_none_or(|service| self.selected(service).next().is_none())
        })
    }

    /// Whether everyone may call a pod but for DENY policies.
    fn is_open(&self, pod: &Pod) -> bool {
        let authorization = self.authorization(pod, Direction::Inbound);
        let mut policies = authorization.policies.iter();
        !policies.any(|one| is_enforced_allow(&one.rules))
            && authorization.default.is_none_or(|(_, deny)| !deny)
    }

    /// The generation of a policy that selects pods, and which.
    pub fn covered(&self, policy: &Key, covering: Covering) -> Option<(i64, Coverage)> {
        let policy = self.authorizations.objects.get(policy)?;
        let mut coverage = covering.coverage;
        if coverage.is_empty() {
            return None;
        }
        // Others name ports of destinations.
        let rules = policy.rules();
        let rules = rules.filter(|_| policy.is_about(Direction::Inbound));
        let mut absent = rules.map_or_else(BTreeSet::new, named_ports);
        absent.retain(|port| !covering.has_any_port && !covering.declared.contains(port));
        coverage.set_absent(absent);
        Some((policy.generation, coverage))
    }
}

impl Covering {
    /// Adds a pod at these ports. An empty list: all ports.
    fn add(&mut self, policy: &AuthorizationPolicy, pod: &Pod, ports: Vec<u32>) {
        let add = |one: &mut Coverage, outcome| one.add(&policy.key.namespace, &pod.key, &outcome);
        if pod.identity.is_none() {
            return add(&mut self.coverage, Outcome::NoProxy);
        }
        // A pod without an address is not started.
        if !pod.own_addresses().is_empty() {
            add(&mut self.coverage, Outcome::Waiting);
        }
        if !policy.is_about(Direction::Inbound) {
            return;
        }
        let declared: BTreeSet<u32> = pod
            .inbound
            .ports
            .iter()
            .map(|one| one.port.into())
            .collect();
        self.has_any_port |= declared.is_empty();
        let named = policy.rules().map_or_else(BTreeSet::new, named_ports);
        let mut covered: BTreeSet<u32> = ports.iter().copied().collect();
        if ports.is_empty() {
            covered.extend(declared.iter().chain(&named));
        }
        self.declared.extend(declared);
        let all = covered.iter().filter_map(|port| u16::try_from(*port).ok());
        let bypassed = shown(all.clone().filter(|port| pod.bypassed.contains(*port)));
        let opaque = shown(all.filter(|port| pod.is_opaque_at(*port)));
        if !bypassed.is_empty() {
            add(&mut self.coverage, Outcome::Bypassed(bypassed));
        }
        if !opaque.is_empty() && policy.rules().is_some_and(is_about_requests) {
            add(&mut self.coverage, Outcome::Opaque(opaque));
        }
    }
}

fn is_enforced_allow(rules: &Rules) -> bool {
    rules.message.action() == Action::Allow && rules.mode() == Mode::Enforce
}

/// The ports that rules name.
fn named_ports(rules: &Rules) -> BTreeSet<u32> {
    let rules = rules.message.rules.iter();
    rules.flat_map(|rule| rule.ports.iter().copied()).collect()
}

/// Without the request, no rule of it is known to match, and no server is asked.
fn is_about_requests(rules: &Rules) -> bool {
    let mut conditions = rules.message.rules.iter();
    !rules.servers.is_empty() || conditions.any(|rule| !rule.requests.is_empty())
}
