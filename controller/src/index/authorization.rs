//! The AuthorizationPolicies of pods: the policies that select them, in their own namespace and in
//! the namespace of the mesh. All policies of a direction apply, and change nothing in the other
//! direction. Pure.
//!
//! A policy that is invalid denies the calls of its targets, as one over the bound does. An invalid
//! one of the mesh changes nothing: pods keep what they have, and new ones wait. The filters
//! ExternalAuth in the routes of Services are policies of their pods too.

mod coverage;
mod sources;

use std::collections::BTreeSet;
use std::sync::Arc;

pub use coverage::Covering;
use diy_mesh_proto::mesh::v1 as proto;
pub use sources::{KeySources, MAX_SOURCES};

use super::limits::target_ports;
use super::links::{Link, MAX_LABELS};
use super::reads::{self, Read, Reads};
use super::routes::check_backend;
use super::store::{Replaced, Store};
use super::{Changed, Index};
use crate::kinds::authorization::server::Server;
use crate::kinds::authorization::{
    AuthorizationPolicy, Content, Direction, Effect, MAX_BYTES, MAX_POLICIES, Mode, Rules, Target,
    denying, keys, name,
};
use crate::kinds::smi::traffic_target::{
    self, Condition, Groups, TcpGroup, TrafficTarget, policy_key,
};
use crate::kinds::{Pod, Service};
use crate::object::issuer_keys::Source;
use crate::object::version::Digest;
use crate::object::{Key, Kind, ObjectStatus, PodRef, Rejection, TargetStatus};

/// At least the length of a port in a message, and of the rest of a policy.
const PORT_BYTES: usize = 3;
const POLICY_BYTES: usize = 16;
/// At least the length of the name of a policy.
const MAX_NAME_BYTES: usize = 512;
/// Ports that a policy over the bound has at most. With more, it denies at all of them.
const MAX_PORTS: usize = 1000;
/// Policies that a state remembers without their rules.
const MAX_REMEMBERED: usize = 100;

/// The policies of the catalog.
#[derive(Debug, Default)]
pub(super) struct Authorizations {
    /// Also those that are made of TrafficTargets.
    pub(super) objects: Store<AuthorizationPolicy>,
    pub(super) targets: Store<TrafficTarget>,
    pub(super) tcp_groups: Store<TcpGroup>,
    sources: KeySources,
    /// The namespace of the mesh. Empty: none.
    mesh: Arc<str>,
    /// The invalid policies of the mesh.
    invalid: BTreeSet<Key>,
    /// The namespaces whose policies were deleted with their definition.
    lost: BTreeSet<Arc<str>>,
}

/// Who may call a pod, or what it may call outside of the cluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Authorization {
    /// The policies that select it, in the order of their names.
    pub policies: Vec<Applied>,
    /// The routes with the filter ExternalAuth, in the order of the Services that select the pod.
    pub routes: Vec<Applied>,
    /// In place of those over the bound.
    pub excess: Vec<proto::AuthorizationPolicy>,
    /// Some of those over the bound.
    pub too_large: Vec<Key>,
    /// Some of the policies about the default.
    pub defaults: Vec<Key>,
    /// The policy that sets the default, and whether it is to deny.
    pub default: Option<(Key, bool)>,
    /// The setting of the pod.
    pub plain_paths: bool,
}

/// A policy that selects a pod, or routes of a Service that does.
#[derive(Clone, Debug, PartialEq)]
pub struct Applied {
    /// Namespace and name of the policy, or of the Service.
    pub key: Key,
    /// The rules.
    pub rules: Arc<Rules>,
    /// The ports that it covers. Empty: all.
    pub ports: Vec<u32>,
}

impl Authorization {
    /// The message. `None`: every call is allowed.
    pub fn message(&self) -> Option<proto::Authorization> {
        let policies = self.policies.iter().chain(&self.routes);
        let policies = policies.map(|one| proto::AuthorizationPolicy {
            ports: one.ports.clone(),
            ..one.rules.message.clone()
        });
        let policies = policies.chain(self.excess.iter().cloned());
        let policies: Vec<_> = policies.collect();
        let message = proto::Authorization {
            plain_paths: self.plain_paths && !policies.is_empty(),
            policies,
            deny_by_default: self.default.as_ref().is_some_and(|(_, deny)| *deny),
            default_name: self
                .default
                .as_ref()
                .map(|(key, _)| name(key))
                .unwrap_or_default(),
        };
        (message != proto::Authorization::default()).then_some(message)
    }

    /// The policies that select the pod, and whether each is over the bound.
    pub fn keys(&self) -> impl Iterator<Item = (&Key, bool)> {
        let policies = self.policies.iter().map(|one| &one.key);
        let complete = policies.chain(&self.defaults).map(|key| (key, false));
        complete.chain(self.too_large.iter().map(|key| (key, true)))
    }

    /// Adds what differs between states.
    pub(super) fn digest(&self, digest: &mut Digest) {
        for applied in [&self.policies, &self.routes] {
            digest.number(applied.len() as u64);
            for Applied { key, rules, ports } in applied {
                digest_key(digest, key);
                digest.text(&rules.version.to_string());
                digest.number(ports.len() as u64);
                ports.iter().for_each(|port| digest.number((*port).into()));
            }
        }
        for one in &self.excess {
            digest.text(&Rules::new(one.clone()).version.to_string());
        }
        // Reviews read them from the state.
        for (keys, what) in [(&self.too_large, "too large"), (&self.defaults, "defaults")] {
            digest.text(what);
            keys.iter().for_each(|key| digest_key(digest, key));
        }
        if let Some((key, deny)) = &self.default {
            digest_key(digest, key);
            digest.number((*deny).into());
        }
    }
}

/// The policies over the bound that have the same mode, while they are collected. Without their rules,
/// they deny every call at their ports.
struct Excess {
    name: String,
    mode: Mode,
    /// `None`: all.
    ports: Option<BTreeSet<u32>>,
}

impl Excess {
    /// Adds a policy to the excess of its mode.
    fn add(all: &mut Vec<Excess>, name: &str, mode: Mode, ports: Vec<u32>) {
        let position = all.iter().position(|one| one.mode == mode);
        let position = position.unwrap_or_else(|| {
            all.push(Excess {
                name: name.to_owned(),
                mode,
                ports: Some(BTreeSet::new()),
            });
            all.len() - 1
        });
        let known = &mut all[position].ports;
        if ports.is_empty() {
            *known = None;
        } else if let Some(known) = known {
            known.extend(ports);
        }
        if known.as_ref().is_some_and(|known| known.len() > MAX_PORTS) {
            *known = None;
        }
    }

    fn message(self) -> proto::AuthorizationPolicy {
        proto::AuthorizationPolicy {
            ports: self.ports.into_iter().flatten().collect(),
            ..denying(self.name, self.mode)
        }
    }
}

fn digest_key(digest: &mut Digest, key: &Key) {
    digest.text(&key.namespace);
    digest.text(&key.name);
}

impl Authorizations {
    /// The authorizations of a mesh whose controller is in this namespace.
    pub(super) fn of_mesh(namespace: &str) -> Authorizations {
        Authorizations {
            mesh: namespace.into(),
            ..Authorizations::default()
        }
    }

    /// TrafficTargets concern only their own namespace.
    fn is_of_mesh(&self, key: &Key) -> bool {
        !self.mesh.is_empty() && key.namespace == self.mesh && is_authored(key)
    }

    /// The policies that are no TrafficTargets.
    pub(super) fn authored(&self) -> impl Iterator<Item = &Key> {
        self.objects.keys().filter(|key| is_authored(key))
    }

    /// Sets the namespaces whose policies are lost.
    pub(super) fn set_lost(&mut self, changed: &mut Changed, namespaces: BTreeSet<Arc<str>>) {
        if self.lost != namespaces {
            self.lost = namespaces;
            changed.add(unknown());
        }
    }

    /// The status of a policy.
    pub(super) fn status(&self, key: &Key, services: &Store<Service>) -> Option<ObjectStatus> {
        let policy = self.objects.get(key)?;
        let effect = if self.is_of_mesh(key) {
            "pods keep the policies that they have, and pods that start wait"
        } else {
            "calls of its targets are denied"
        };
        let targets = policy.parents.iter().zip(&*policy.applied().targets);
        let parents = targets.map(|(reference, target)| {
            let exists = match target {
                Target::Service(key) => services.get(key).is_some_and(has_pods),
                _ => true,
            };
            let accepted = policy.accepted(target, exists, effect);
            let mut conditions = policy.conditions(accepted);
            conditions.extend(policy.allows_all());
            conditions.extend(resolved_refs(policy, services));
            TargetStatus {
                parent: reference.clone(),
                conditions,
            }
        });
        let (kind, key) = traffic_target::id(key);
        Some(ObjectStatus {
            kind,
            key,
            issuers: policy.issuers(),
            ..policy.status(parents.collect())
        })
    }
}

/// Which policies of pods are not known was read.
fn unknown() -> Read {
    Read::of("unknown policies", &())
}

/// The condition of a policy that refers to keys or to a server: the first one that does not hold.
fn resolved_refs(
    policy: &AuthorizationPolicy,
    services: &Store<Service>,
) -> Option<crate::object::Condition> {
    let server = policy.server().map(|server| {
        let Server { service, port } = server;
        server.condition(check_backend(services, service, Some(*port)))
    });
    let both = server.into_iter().chain(keys::condition(policy.fetched()));
    both.reduce(|one, other| if one.holds { other } else { one })
}

fn is_authored(key: &Key) -> bool {
    traffic_target::id(key).0 == Kind::Authorization
}

impl Groups for Index {
    fn requests(&self, key: &Key) -> Option<Result<&[Condition], &Rejection>> {
        let group = self.routes.route_groups.get(key)?;
        Some(group.content.as_ref().map(|group| &*group.conditions))
    }

    fn ports(&self, key: &Key) -> Option<&TcpGroup> {
        self.authorizations.tcp_groups.get(key)
    }
}

/// Whether a Service can select pods.
fn has_pods(service: &Service) -> bool {
    service.external_name.is_empty() && !service.selector.is_empty()
}

impl Index {
    /// Replaces a policy.
    pub(super) fn set_authorization(&mut self, key: &Key, new: Option<AuthorizationPolicy>) {
        let is_of_mesh = self.authorizations.is_of_mesh(key);
        let new = new.map(|policy| if is_of_mesh { policy.of_mesh() } else { policy });
        let is_invalid = new
            .as_ref()
            .is_some_and(|policy| policy.rejection().is_some());
        let (links, all) = (&mut self.links, &mut self.authorizations);
        let replaced = all.objects.replace(links, Kind::Authorization, key, new);
        let Some(Replaced(old)) = replaced else {
            return;
        };
        all.sources.replace(key, old.as_ref(), all.objects.get(key));
        let is_changed = if is_of_mesh && is_invalid {
            all.invalid.insert(key.clone())
        } else {
            all.invalid.remove(key)
        };
        if is_changed {
            links.changed.add(unknown());
        }
    }

    /// Answers what the policy of a TrafficTarget is.
    pub(super) fn settle_rules(&mut self, key: &Key) -> Reads {
        let (policy, reads) = reads::ask(|| {
            let target = self.authorizations.targets.get(key)?;
            Some(target.policy(self))
        });
        self.set_authorization(&policy_key(key), policy);
        reads
    }

    /// Where the keys of issuers are.
    pub fn key_sources(&self) -> &KeySources {
        &self.authorizations.sources
    }

    /// The URLs of the keys of these issuers in the policies of a meshed pod.
    pub fn key_urls(&self, pod: &PodRef, issuers: &[String]) -> BTreeSet<Source> {
        let known = self.meshed_pod(pod).into_iter();
        let policies = known.flat_map(|pod| self.authorizing(pod, Direction::Inbound));
        let fetched = policies.flat_map(|(policy, _)| policy.fetched());
        let urls = fetched
            .filter(|one| matches!(one.source, Source::Url(_)) && issuers.contains(&one.issuer));
        urls.map(|one| one.source.clone()).collect()
    }

    /// The invalid policies of the namespace of the mesh.
    pub fn invalid_policies_of_mesh(&self) -> &BTreeSet<Key> {
        &self.authorizations.invalid
    }

    /// The namespaces whose policies were deleted with their definition.
    pub fn lost_policies(&self) -> &BTreeSet<Arc<str>> {
        &self.authorizations.lost
    }

    /// Whether policies of the pods of a namespace are not known.
    pub(super) fn lacks_policies(&self, namespace: &Arc<str>) -> bool {
        reads::record(unknown);
        let Authorizations {
            invalid,
            lost,
            mesh,
            ..
        } = &self.authorizations;
        !invalid.is_empty() || lost.contains(namespace) || lost.contains(mesh)
    }

    /// The policies of a direction that select a pod, with the ports that they cover. Policies of
    /// the mesh come first.
    fn authorizing<'a>(
        &'a self,
        pod: &'a Pod,
        direction: Direction,
    ) -> impl Iterator<Item = (&'a AuthorizationPolicy, Vec<u32>)> {
        let (own, mesh) = (&pod.key.namespace, &self.authorizations.mesh);
        let is_other = !mesh.is_empty() && mesh != own;
        let namespaces = [mesh].into_iter().filter(move |_| is_other).chain([own]);
        let keys = namespaces.flat_map(|name| {
            let at = |(label, value): (&String, &String)| {
                Link::AuthorizationAt(name.clone(), label.clone(), value.clone())
            };
            let others = [Link::AuthorizationIn(name.clone())];
            let links: Vec<Link> = match pod.labels.len() {
                ..=MAX_LABELS => pod.labels.iter().map(at).chain(others).collect(),
                _ => vec![Link::AnyAuthorizationIn(name.clone())],
            };
            let keys = links.iter().flat_map(|link| self.links.keys(link));
            let mut keys = Vec::from_iter(keys);
            keys.sort();
            keys.dedup();
            keys
        });
        let policies = keys.map(|key| &self.authorizations.objects[key]);
        let policies = policies.filter(move |policy| policy.is_about(direction));
        policies.filter_map(|policy| Some((policy, self.ports(policy, pod)?)))
    }

    /// Whether a pod is the authorization server of a policy. It cannot be asked whether it may be
    /// asked, so that the policy does not apply to it.
    fn is_server(&self, policy: &AuthorizationPolicy, pod: &Pod) -> bool {
        let service = policy.server().map(|server| &server.service);
        let service = service.and_then(|service| self.services.get(service));
        service.is_some_and(|service| has_pods(service) && service.selects(pod))
    }

    /// The ports of a pod that a policy covers. Empty: all. `None`: it does not select the pod.
    fn ports(&self, policy: &AuthorizationPolicy, pod: &Pod) -> Option<Vec<u32>> {
        if self.is_server(policy, pod) {
            return None;
        }
        let Content {
            targets, effect, ..
        } = policy.applied();
        let is_outbound = policy.is_about(Direction::Outbound);
        let is_own = policy.key.namespace == pod.key.namespace;
        let mut ports = BTreeSet::new();
        let mut covers_all = false;
        for target in &**targets {
            match target {
                Target::Pods(selector) => covers_all |= selector.selects(&pod.labels),
                Target::ServiceAccount(name) => {
                    covers_all |= is_own && pod.service_account() == Some(name);
                }
                Target::Service(key) => {
                    let service = self.services.get(key).filter(|service| has_pods(service));
                    if let Some(service) = service.filter(|service| service.selects(pod)) {
                        // Ports over the limit are not known. Ports of destinations are others, and
                        // only an invalid policy is about both.
                        covers_all |= service.excess.is_some() || is_outbound;
                        ports.extend(target_ports(service.tcp_ports(), pod));
                    }
                }
            }
        }
        let scope = match effect {
            Effect::Rules(rules) => &*rules.message.ports,
            Effect::Default { .. } => &[],
        };
        if covers_all {
            return Some(scope.to_vec());
        }
        ports.retain(|port| scope.is_empty() || scope.contains(port));
        (!ports.is_empty()).then(|| ports.into_iter().collect())
    }

    /// Who may call a pod, or what it may call.
    pub(super) fn authorization(&self, pod: &Pod, direction: Direction) -> Authorization {
        let is_inbound = direction == Direction::Inbound;
        let mut all = Authorization {
            plain_paths: is_inbound && pod.inbound.plain_paths,
            ..Authorization::default()
        };
        let mut bytes = 2 * (MAX_PORTS * PORT_BYTES + MAX_NAME_BYTES);
        let mut excess = Vec::new();
        for (policy, ports) in self.authorizing(pod, direction) {
            let key = &policy.key;
            match &policy.applied().effect {
                Effect::Default { deny } => {
                    if all.defaults.len() < MAX_REMEMBERED {
                        all.defaults.push(key.clone());
                    }
                    // The default of the mesh comes first. Each default can deny.
                    if all
                        .default
                        .as_ref()
                        .is_none_or(|(_, denies)| *deny && !denies)
                    {
                        all.default = Some((key.clone(), *deny));
                    }
                }
                Effect::Rules(rules) => {
                    let length = rules.bytes + ports.len() * PORT_BYTES + POLICY_BYTES;
                    if all.policies.len() < MAX_POLICIES && bytes + length <= MAX_BYTES {
                        bytes += length;
                        let (key, rules) = (key.clone(), rules.clone());
                        all.policies.push(Applied { key, rules, ports });
                    } else {
                        if all.too_large.len() < MAX_REMEMBERED {
                            all.too_large.push(key.clone());
                        }
                        Excess::add(&mut excess, &rules.message.name, rules.mode(), ports);
                    }
                }
            }
        }
        let routes = is_inbound.then(|| self.routes_to(pod));
        for one in routes.into_iter().flatten() {
            let length = one.rules.bytes + one.ports.len() * PORT_BYTES + POLICY_BYTES;
            if all.routes.len() < MAX_POLICIES && bytes + length <= MAX_BYTES {
                bytes += length;
                all.routes.push(one);
            } else {
                Excess::add(
                    &mut excess,
                    &one.rules.message.name,
                    Mode::Enforce,
                    one.ports,
                );
            }
        }
        all.excess = excess.into_iter().map(Excess::message).collect();
        all.policies.sort_by(|one, other| one.key.cmp(&other.key));
        all
    }

    /// The routes with the filter ExternalAuth of the Services that select a pod. Ports with the same
    /// routes are together.
    fn routes_to(&self, pod: &Pod) -> Vec<Applied> {
        let mut all: Vec<Applied> = Vec::new();
        for service in self.selecting(pod) {
            let Some(protected) = self.routes.protected(&service.key) else {
                continue;
            };
            for port in service.tcp_ports() {
                let Some(rules) = protected.get(&port.port) else {
                    continue;
                };
                let targets = target_ports([port].into_iter(), pod);
                let is_same = |one: &&mut Applied| Arc::ptr_eq(&one.rules, rules);
                match all.iter_mut().find(is_same) {
                    Some(same) => same.ports.extend(targets),
                    None => all.push(Applied {
                        key: service.key.clone(),
                        rules: rules.clone(),
                        ports: targets,
                    }),
                }
            }
        }
        all.retain_mut(|one| {
            one.ports.sort_unstable();
            one.ports.dedup();
            !one.ports.is_empty()
        });
        all.iter_mut().for_each(|one| self.complete(one, pod));
        all
    }

    /// Ports of Services over the limit are not known: such routes concern all. A pod that would have
    /// to ask itself whether it may be asked denies all calls instead.
    fn complete(&self, routes: &mut Applied, pod: &Pod) {
        let asks_itself = routes.rules.servers.iter().any(|server| {
            let service = self.services.get(&server.service);
            let service = service.filter(|service| service.selects(pod));
            let ports = service.into_iter().flat_map(Service::tcp_ports);
            let ports = target_ports(ports.filter(|port| port.port == server.port), pod);
            ports.iter().any(|port| routes.ports.contains(port))
        });
        if asks_itself {
            let name = routes.rules.message.name.clone();
            routes.rules = Arc::new(Rules::new(denying(name, Mode::Enforce)));
        }
        let service = self.services.get(&routes.key);
        if service.is_some_and(|service| service.excess.is_some()) {
            routes.ports.clear();
        }
    }
}

#[cfg(test)]
mod tests;
