//! The reverse references between the objects of the catalog, and the items to compute again after
//! a change. Pure.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::Arc;

use super::Changed;
use super::reads::{self, Read};
use crate::kinds::authorization::{self, AuthorizationPolicy};
use crate::kinds::mesh::Mesh;
use crate::kinds::policy::{Policy, Target};
use crate::kinds::route::model::{Grant, Route};
use crate::kinds::smi::split::{RouteGroup, Split};
use crate::kinds::smi::traffic_target::{TcpGroup, TrafficTarget};
use crate::kinds::{Node, Pod, Service, Slice};
use crate::object::{Key, Kind, ObjectId};

/// The labels of a pod that are read each. With more, all objects of the namespace are read.
pub(super) const MAX_LABELS: usize = 64;
/// The number of maps of links.
const SHARDS: usize = 256;

/// A reference of an object, or its location.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Link {
    /// A Service: its cluster IP.
    ClusterIp(IpAddr),
    /// A Service: its address for traffic from outside the cluster.
    ExternalIp(IpAddr),
    /// A Service: its port on each node.
    NodePort(u16),
    /// A Service: its namespace.
    ServiceIn(Arc<str>),
    /// A Service: its namespace, and a label that all pods have that it selects.
    ServiceAt(Arc<str>, String, String),
    /// A Service: the one that it is a canary of.
    CanaryOf(Key),
    /// A slice: its Service.
    SliceOf(Key),
    /// A slice: the pod of an endpoint.
    EndpointOf(Key),
    /// A slice: the address of an endpoint that names no pod.
    EndpointAt(IpAddr),
    /// A pod: its address.
    PodAt(IpAddr),
    /// A pod: its namespace.
    PodIn(Arc<str>),
    /// A pod that its node may have made unready: the node.
    UnreadyOn(Arc<str>),
    /// A node: its address.
    NodeAt(IpAddr),
    /// A route: a Service that is its parent, and the namespace of the route.
    RouteOf(Key, Arc<str>),
    /// A route: the Service that is a backend.
    Backend(Key),
    /// A route: the XBackend or the TrafficPolicy that is a backend.
    External(ObjectId),
    /// A route: the namespace of a backend, if it is not its own.
    BackendIn(Arc<str>),
    /// A TrafficSplit: its HTTPRouteGroup.
    Group(Key),
    /// A ReferenceGrant: its namespace.
    GrantIn(Arc<str>),
    /// A TrafficPolicy: its target.
    Target(Target),
    /// A TrafficTarget: the HTTPRouteGroup or the TCPRoute of SMI of a rule.
    RuleOf(Kind, Key),
    /// An AuthorizationPolicy: its namespace.
    AnyAuthorizationIn(Arc<str>),
    /// An AuthorizationPolicy: its namespace, if its other links do not tell which pods it may select.
    AuthorizationIn(Arc<str>),
    /// An AuthorizationPolicy: its namespace, and a label that all pods of a target have.
    AuthorizationAt(Arc<str>, String, String),
    /// An AuthorizationPolicy: the Service whose pods are a target, or are its authorization server.
    AuthorizationOf(Key),
}

/// A question whose answer others read. Questions are answered in this order: none reads a later one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Question {
    /// The route of a TrafficSplit.
    Split(Key),
    /// The AuthorizationPolicy of a TrafficTarget.
    Rules(Key),
    /// The policy that applies to a target.
    Target(Target),
    /// The policy of a Service.
    Policy(Key),
    /// Whether a Service has rate limits or telemetry.
    Limits(Key),
    /// The canaries of a Service.
    Canaries(Key),
    /// The routes of a Service that are of one namespace.
    Routes(Key, Arc<str>),
    /// The headless Services of a pod.
    Headless(Key),
    /// The room of the endpoints of a Service.
    Room(Key),
}

impl Question {
    /// The question that the first object with a link poses.
    fn of(link: &Link) -> Option<Question> {
        match link {
            Link::Target(target) => Some(Question::Target(target.clone())),
            Link::CanaryOf(primary) => Some(Question::Canaries(primary.clone())),
            Link::RouteOf(service, namespace) => {
                Some(Question::Routes(service.clone(), namespace.clone()))
            }
            _ => None,
        }
    }
}

/// The objects with each link. In many maps: one that grows moves all that it holds at once, and the
/// lock of the index is held meanwhile.
#[derive(Debug)]
struct Shards {
    hasher: RandomState,
    maps: Vec<HashMap<Link, BTreeSet<ObjectId>>>,
}

impl Default for Shards {
    fn default() -> Self {
        Self {
            hasher: RandomState::new(),
            maps: vec![HashMap::new(); SHARDS],
        }
    }
}

impl Shards {
    fn at(&self, link: &Link) -> usize {
        self.hasher.hash_one(link) as usize % SHARDS
    }

    fn of(&self, link: &Link) -> &HashMap<Link, BTreeSet<ObjectId>> {
        &self.maps[self.at(link)]
    }

    fn of_mut(&mut self, link: &Link) -> &mut HashMap<Link, BTreeSet<ObjectId>> {
        let at = self.at(link);
        &mut self.maps[at]
    }
}

/// The links of all objects, and the consequences of changes.
#[derive(Debug, Default)]
pub(super) struct Links {
    objects: Shards,
    pub changed: Changed,
    /// The questions to answer.
    pub stale: BTreeSet<Arc<Question>>,
    /// The objects whose status may have changed.
    pub statuses: BTreeSet<ObjectId>,
}

impl Links {
    /// The objects with a link, in order.
    pub fn ids<'a>(&'a self, link: &Link) -> impl Iterator<Item = &'a ObjectId> + Clone + use<'a> {
        self.of(link).into_iter().flatten()
    }

    /// Records that the objects with a link were read.
    fn of(&self, link: &Link) -> Option<&BTreeSet<ObjectId>> {
        reads::record(|| Read::of("link", link));
        self.objects.of(link).get(link)
    }

    /// The keys of the objects with a link, which only one kind has.
    pub fn keys<'a>(&'a self, link: &Link) -> impl Iterator<Item = &'a Key> + Clone + use<'a> {
        self.ids(link).map(|(_, key)| key)
    }

    /// The objects in a namespace. It does not matter how many there are in others.
    pub fn keys_in<'a>(
        &'a self,
        link: &Link,
        kind: Kind,
        namespace: &'a Arc<str>,
    ) -> impl Iterator<Item = &'a Key> + use<'a> {
        let first = (kind, Key::first_in(namespace));
        let keys = self
            .of(link)
            .map(|ids| ids.range(first..))
            .into_iter()
            .flatten();
        let keys = keys.map(|(_, key)| key);
        keys.take_while(move |key| key.namespace == *namespace)
    }

    /// Whether objects have a link.
    pub fn contains(&self, link: &Link) -> bool {
        self.of(link).is_some()
    }

    /// Replaces the links of an object.
    pub fn replace(&mut self, id: &ObjectId, old: Vec<Link>, new: Vec<Link>) {
        if old == new {
            return;
        }
        let (old, new): (HashSet<Link>, HashSet<Link>) =
            (old.into_iter().collect(), new.into_iter().collect());
        for link in old.difference(&new) {
            super::unlink(self.objects.of_mut(link), link, id);
            self.tell(link);
        }
        for link in new.difference(&old) {
            super::link(self.objects.of_mut(link), link, id);
            self.tell(link);
        }
    }

    fn tell(&mut self, link: &Link) {
        self.changed.add(Read::of("link", link));
        self.stale.extend(Question::of(link).map(Arc::new));
    }

    /// Poses questions.
    pub fn pose(&mut self, questions: impl IntoIterator<Item = Question>) {
        self.stale.extend(questions.into_iter().map(Arc::new));
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        let links = self.objects.maps.iter().map(HashMap::len);
        links.sum::<usize>() + self.stale.len()
    }
}

/// An object with its links.
pub(super) trait Linked: PartialEq {
    fn links(&self) -> Vec<Link> {
        Vec::new()
    }

    /// Whether questions may have another answer with it than with the previous object.
    fn differs(&self, _: &Self) -> bool {
        true
    }
}

impl Linked for Service {
    fn links(&self) -> Vec<Link> {
        let cluster = self.cluster_ips.iter().copied().map(Link::ClusterIp);
        let external = self.external_ips.iter().copied().map(Link::ExternalIp);
        let addresses = cluster.chain(external);
        let addresses = addresses.chain(self.node_ports().map(Link::NodePort));
        let primary = self.primary().map(Link::CanaryOf);
        let namespace = || self.key.namespace.clone();
        let at = |(name, value): (&String, &String)| {
            Link::ServiceAt(namespace(), name.clone(), value.clone())
        };
        let label = self.selector.first_key_value().map(at);
        let own = Link::ServiceIn(namespace());
        addresses.chain(primary).chain([own]).chain(label).collect()
    }
}

impl Linked for Slice {
    fn links(&self) -> Vec<Link> {
        let service = self.service.iter().cloned().map(Link::SliceOf);
        let endpoints = self.endpoints.iter().map(|endpoint| match &endpoint.pod {
            Some(pod) => Link::EndpointOf(pod.key.clone()),
            None => Link::EndpointAt(endpoint.address),
        });
        service.chain(endpoints).collect()
    }
}

impl Linked for Pod {
    fn links(&self) -> Vec<Link> {
        let addresses = self.own_addresses().iter().copied().map(Link::PodAt);
        let own = Link::PodIn(self.key.namespace.clone());
        let unready = self.unready_by_node.then(|| self.node.clone());
        let unready = unready.map(Link::UnreadyOn);
        addresses.chain([own]).chain(unready).collect()
    }

    /// Replicas alone depend on the readiness, which are counted apart.
    fn differs(&self, before: &Self) -> bool {
        let ready = self.ready;
        *self
            != Pod {
                ready,
                ..before.clone()
            }
    }
}

impl Linked for Node {
    fn links(&self) -> Vec<Link> {
        self.addresses.iter().copied().map(Link::NodeAt).collect()
    }
}

impl Linked for Route {
    fn links(&self) -> Vec<Link> {
        let own = &self.key.namespace;
        let parents = self.parents.iter();
        let parents = parents.map(|parent| Link::RouteOf(parent.key(&self.key), own.clone()));
        let backends = self.references().flat_map(|reference| {
            let namespace = &reference.key.namespace;
            let other = (namespace != own).then(|| Link::BackendIn(namespace.clone()));
            let key = reference.key.clone();
            let object = match reference.external {
                Some(kind) => Link::External((kind, key)),
                None => Link::Backend(key),
            };
            [object].into_iter().chain(other)
        });
        parents.chain(backends).collect()
    }
}

impl Linked for Split {
    fn links(&self) -> Vec<Link> {
        let rules = self.content.iter();
        let groups = rules.flat_map(|rule| &rule.groups);
        groups.cloned().map(Link::Group).collect()
    }
}

impl Linked for Grant {
    fn links(&self) -> Vec<Link> {
        vec![Link::GrantIn(self.key.namespace.clone())]
    }
}

impl Linked for Policy {
    fn links(&self) -> Vec<Link> {
        let targets = self.targets().filter_map(|(_, target)| target);
        targets.map(Link::Target).collect()
    }
}

impl Linked for AuthorizationPolicy {
    fn links(&self) -> Vec<Link> {
        let own = || self.key.namespace.clone();
        let links = self.applied().targets.iter().map(|target| match target {
            authorization::Target::Pods(selector) => {
                let label = selector.match_labels.first_key_value();
                let at = |(name, value): (&String, &String)| {
                    Link::AuthorizationAt(own(), name.clone(), value.clone())
                };
                (label.map_or_else(|| Link::AuthorizationIn(own()), at), None)
            }
            authorization::Target::ServiceAccount(_) => (Link::AuthorizationIn(own()), None),
            authorization::Target::Service(key) => {
                let service = Link::AuthorizationOf(key.clone());
                (Link::AuthorizationIn(own()), Some(service))
            }
        });
        let links = links.flat_map(|(pods, service)| [pods].into_iter().chain(service));
        let server = self.server().map(|server| server.service.clone());
        let server = server.map(Link::AuthorizationOf);
        let any = Link::AnyAuthorizationIn(own());
        links.chain(server).chain([any]).collect()
    }
}

impl Linked for TrafficTarget {
    fn links(&self) -> Vec<Link> {
        let references = self.references();
        references
            .map(|(kind, key)| Link::RuleOf(kind, key))
            .collect()
    }
}

impl Linked for RouteGroup {}

impl Linked for TcpGroup {}

impl Linked for Mesh {}
