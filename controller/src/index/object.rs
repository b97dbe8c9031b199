//! The objects of the catalog, with the fields that determine destinations. Plain values without
//! types of Kubernetes or gRPC.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use diy_mesh_model::ports::PortSet;

use super::excess::Excess;
use crate::authorization::AuthorizationPolicy;
use crate::authorization::smi::{TcpGroup, TrafficTarget};
use crate::object::{Checked, Key, Kind, TargetReference};
use crate::policy::Policy;
use crate::routes::backend::Backend;
use crate::routes::mesh::Mesh;
use crate::routes::model::{Grant, Route};
use crate::routes::smi::{RouteGroup, Split};

/// A change of the catalog.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "most are objects")]
pub enum Change {
    /// A new or changed object.
    Apply(Object),
    /// A deleted object.
    Delete(Kind, Key),
    /// All objects of a kind. Others are deleted.
    Reset(Kind, Vec<Object>),
    /// A kind is not installed, and has no objects.
    NotInstalled(Kind),
    /// The source could not list an optional kind so far, and nothing waits for it any longer.
    /// States that depend on it are withheld until it is listed.
    Unreadable(Kind),
    /// The AuthorizationPolicies of these namespaces were deleted with their definition. The pods wait
    /// for others, until these are listed.
    Lost(BTreeSet<Arc<str>>),
    /// The source has no other changes of a kind up to a resource version.
    Bookmark(Kind),
    /// The epoch of the resource versions of the Kubernetes API.
    Epoch(u64),
}

/// A resource that proxies subscribe to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// The target of the connections to an address.
    Destination(SocketAddr),
    /// The endpoints of a Service port.
    Backend(Key, u16),
    /// The inbound configuration of a pod, by its key and its UID.
    Workload(Key, Arc<str>),
}

/// A change and its resource version.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The change.
    pub change: Change,
    /// The resource version of the list or of the object, if it is an integer.
    pub version: Option<u64>,
}

impl From<Change> for Event {
    /// An event of a source without resource versions.
    fn from(change: Change) -> Event {
        Event {
            change,
            version: None,
        }
    }
}

/// One object of the catalog.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    /// A Service.
    Service(Service),
    /// An EndpointSlice.
    Slice(Slice),
    /// A Pod.
    Pod(Pod),
    /// A Node.
    Node(Node),
    /// An HTTPRoute, a GRPCRoute or a TCPRoute.
    Route(Route),
    /// A ReferenceGrant.
    Grant(Grant),
    /// An XBackend, or a TrafficPolicy that is a host.
    Backend(Backend),
    /// A TrafficSplit of SMI.
    Split(Split),
    /// An HTTPRouteGroup of SMI.
    RouteGroup(RouteGroup),
    /// A TrafficPolicy with targets.
    Policy(Policy),
    /// An AuthorizationPolicy.
    Authorization(AuthorizationPolicy),
    /// A TrafficTarget of SMI.
    TrafficTarget(TrafficTarget),
    /// A TCPRoute of SMI.
    TcpGroup(TcpGroup),
    /// An XMesh.
    Mesh(Mesh),
}

impl Object {
    /// The kind.
    pub fn kind(&self) -> Kind {
        match self {
            Object::Service(_) => Kind::Service,
            Object::Slice(_) => Kind::Slice,
            Object::Pod(_) => Kind::Pod,
            Object::Node(_) => Kind::Node,
            Object::Route(route) => route.kind,
            Object::Grant(_) => Kind::Grant,
            Object::Backend(backend) => backend.kind,
            Object::Split(_) => Kind::TrafficSplit,
            Object::RouteGroup(_) => Kind::RouteGroup,
            Object::Policy(_) => Kind::TrafficPolicy,
            Object::Authorization(_) => Kind::Authorization,
            Object::TrafficTarget(_) => Kind::TrafficTarget,
            Object::TcpGroup(_) => Kind::TcpGroup,
            Object::Mesh(_) => Kind::Mesh,
        }
    }

    /// Namespace and name.
    pub fn key(&self) -> &Key {
        match self {
            Object::Service(service) => &service.key,
            Object::Slice(slice) => &slice.key,
            Object::Pod(pod) => &pod.key,
            Object::Node(node) => &node.key,
            Object::Route(route) => &route.key,
            Object::Grant(grant) => &grant.key,
            Object::Backend(backend) => &backend.key,
            Object::Split(split) => &split.key,
            Object::RouteGroup(group) => &group.key,
            Object::Policy(policy) => &policy.key,
            Object::Authorization(policy) => &policy.key,
            Object::TrafficTarget(target) => &target.key,
            Object::TcpGroup(group) => &group.key,
            Object::Mesh(mesh) => &mesh.key,
        }
    }
}

/// A Service.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// Namespace and name.
    pub key: Key,
    /// The UID, or empty.
    pub uid: Arc<str>,
    /// Whether the Service has no cluster IP on purpose: its clients connect to its pods.
    pub is_headless: bool,
    /// The labels of its pods. Empty if something else maintains its slices.
    pub selector: BTreeMap<String, String>,
    /// The cluster IPs of both families. Empty for headless Services and ExternalNames.
    pub cluster_ips: Vec<IpAddr>,
    /// The addresses for traffic from outside the cluster: external IPs, and IPs of a load balancer
    /// that does not forward to other addresses.
    pub external_ips: Vec<IpAddr>,
    /// Whether a node forwards traffic from outside the cluster only to endpoints on itself.
    pub external_local: bool,
    /// The creation time in seconds since 1970, or 0.
    pub created: i64,
    /// The ports in their order.
    pub ports: Vec<ServicePort>,
    /// The TCP ports over the limit.
    pub excess: Option<Box<Excess>>,
    /// The target of an ExternalName, or empty.
    pub external_name: Box<str>,
    /// Whether endpoints that are not ready count as ready.
    pub publish_not_ready: bool,
    /// Whether clients in the cluster use only endpoints on their own node.
    pub local_only: bool,
    /// How long a client keeps its endpoint after a request, in seconds. 0: not at all.
    pub session_affinity: u32,
    /// The annotations that make the Service a canary of another one.
    pub canary: Option<Box<Canary>>,
}

/// The annotations of a Service that request a share of the requests of its parent, another Service
/// of its namespace. The content is the share in percent.
pub type Canary = Checked<u32>;

impl Service {
    /// The Service that it is a canary of.
    pub fn primary(&self) -> Option<Key> {
        let parent = self.canary.as_ref()?.parents.first()?;
        Some(parent.key(&self.key))
    }

    /// Whether it is the Service of the API server, whose endpoints are no pods.
    pub fn is_api(&self) -> bool {
        (&*self.key.namespace, &*self.key.name) == ("default", "kubernetes")
    }

    /// The TCP ports. Only TCP is redirected: other transports have no destinations.
    pub fn tcp_ports(&self) -> impl Iterator<Item = &ServicePort> + Clone {
        let ports = self.ports.iter();
        ports.filter(|port| port.protocol == Transport::Tcp)
    }

    /// The TCP port that `matches`.
    pub fn tcp_port(&self, matches: impl Fn(&ServicePort) -> bool) -> Option<&ServicePort> {
        self.tcp_ports().find(|port| matches(port))
    }

    /// Whether a TCP port is over the limit.
    pub fn has_excess_port(&self, port: u16) -> bool {
        let excess = self.excess.as_ref();
        excess.is_some_and(|excess| excess.ports.binary_search(&port).is_ok())
    }

    /// The TCP ports on each node, also those over the limit.
    pub fn node_ports(&self) -> impl Iterator<Item = u16> {
        let excess = self.excess.iter();
        let excess = excess.flat_map(|excess| excess.node_ports.iter().copied());
        let ports = self.tcp_ports().filter_map(|port| port.node_port);
        ports.chain(excess)
    }

    /// Whether the selector selects a pod.
    pub fn selects(&self, pod: &Pod) -> bool {
        let matches = |(name, value)| pod.labels.get(name) == Some(value);
        !self.selector.is_empty()
            && self.key.namespace == pod.key.namespace
            && self.selector.iter().all(matches)
    }
}

/// One port of a Service.
#[derive(Clone, Debug, PartialEq)]
pub struct ServicePort {
    /// The name, which may be empty for a single port.
    pub name: String,
    /// The number on the cluster IP.
    pub port: u16,
    /// The number on each node.
    pub node_port: Option<u16>,
    /// The port of the pods.
    pub target: TargetPort,
    /// The transport.
    pub protocol: Transport,
    /// The application protocol, or empty.
    pub app_protocol: String,
}

impl TargetReference {
    /// Whether the reference is to a port of its Service.
    pub(crate) fn selects(&self, port: &ServicePort) -> bool {
        self.port.is_none_or(|number| number == port.port)
            && self.section().is_none_or(|name| name == port.name)
    }
}

/// The target of a Service port.
#[derive(Clone, Debug, PartialEq, Hash)]
pub enum TargetPort {
    /// A number.
    Number(u16),
    /// A named port of the pods, whose number is in the slices.
    Name(String),
}

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// TCP, the only redirected transport.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Transport {
    /// The name in Kubernetes.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "TCP",
            Transport::Udp => "UDP",
            Transport::Sctp => "SCTP",
        }
    }
}

/// An EndpointSlice.
#[derive(Clone, Debug, PartialEq)]
pub struct Slice {
    /// Namespace and name.
    pub key: Key,
    /// The Service, if the slice belongs to one.
    pub service: Option<Key>,
    /// The ports of the endpoints, ascending by name.
    pub ports: Vec<SlicePort>,
    /// The endpoints. Empty for a slice of host names.
    pub endpoints: Vec<SliceEndpoint>,
}

impl Slice {
    /// The numbers of the TCP ports with a name.
    pub fn tcp_ports(&self, name: &str) -> impl Iterator<Item = u16> {
        let first = self.ports.partition_point(|port| *port.name < *name);
        let named = self.ports[first..].iter();
        let named = named.take_while(move |port| port.name == name);
        let tcp = named.filter(|port| port.protocol == Transport::Tcp);
        tcp.map(|port| port.port)
    }
}

/// One port of an EndpointSlice.
#[derive(Clone, Debug, PartialEq)]
pub struct SlicePort {
    /// The name of the Service port.
    pub name: String,
    /// The number on the endpoints.
    pub port: u16,
    /// The transport.
    pub protocol: Transport,
}

/// One endpoint of an EndpointSlice.
#[derive(Clone, Debug, PartialEq)]
pub struct SliceEndpoint {
    /// The first address. Kubernetes defines no meaning of further ones.
    pub address: IpAddr,
    /// Whether the endpoint accepts new connections.
    pub ready: bool,
    /// Whether the endpoint serves, also while it terminates.
    pub serving: bool,
    /// Whether the endpoint terminates.
    pub terminating: bool,
    /// The name of the node, or empty.
    pub node: Arc<str>,
    /// The zone, or empty.
    pub zone: Arc<str>,
    /// The nodes whose clients should use the endpoint.
    pub node_hints: Box<[Arc<str>]>,
    /// The zones whose clients should use the endpoint.
    pub zone_hints: Box<[Arc<str>]>,
    /// The pod, if the slice contains a reference to it.
    pub pod: Option<PodReference>,
}

/// A reference to a pod in an EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PodReference {
    /// Namespace and name.
    pub key: Key,
    /// The UID, or empty. It differs for a successor with the same name.
    pub uid: Arc<str>,
}

/// A Pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Pod {
    /// Namespace and name.
    pub key: Key,
    /// The UID, or empty.
    pub uid: Arc<str>,
    /// The addresses. Empty for finished pods.
    pub addresses: Vec<IpAddr>,
    /// Whether the pod has the addresses of its node.
    pub host_network: bool,
    /// Whether the pod is being deleted.
    pub terminating: bool,
    /// Whether the pod is ready. Destinations depend on the slices instead.
    pub ready: bool,
    /// Whether its containers are ready and its readiness gates are met, but the pod is not ready:
    /// so Kubernetes marks the pods of an unready node.
    pub unready_by_node: bool,
    /// The creation time in seconds since 1970, or 0.
    pub created: i64,
    /// The name of the node, or empty.
    pub node: Arc<str>,
    /// The zone, or empty.
    pub zone: Arc<str>,
    /// The SPIFFE ID, if the pod is meshed.
    pub identity: Option<Arc<str>>,
    /// The ports that are not redirected to the proxy of a meshed pod.
    pub bypassed: PortSet,
    /// Whether UDP of its containers reaches the resolvers of the pod only.
    pub restricts_udp: bool,
    /// The inbound configuration of its proxy.
    pub inbound: Inbound,
    /// The labels, which selectors of Services match.
    pub labels: BTreeMap<String, String>,
}

/// The inbound configuration of a meshed pod, from the arguments of its proxy: the injector wrote
/// them, and they are immutable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inbound {
    /// Only authenticated peers are accepted.
    pub strict: bool,
    /// The application accepts CONNECT requests.
    pub allow_connect: bool,
    /// Rules about paths match plain paths only.
    pub plain_paths: bool,
    /// The ports that are copied without detection.
    pub opaque_ports: PortSet,
    /// The ports that the containers declare.
    pub ports: Box<[ContainerPort]>,
}

/// A port that a container declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerPort {
    /// The name, or empty.
    pub name: Arc<str>,
    /// The number.
    pub port: u16,
    /// The transport.
    pub protocol: Transport,
}

impl Pod {
    /// The addresses that no other pod has. Empty in the host network.
    pub fn own_addresses(&self) -> &[IpAddr] {
        if self.host_network {
            &[]
        } else {
            &self.addresses
        }
    }

    /// The SPIFFE ID at a port.
    pub fn identity_at(&self, port: u16) -> Option<Arc<str>> {
        self.identity
            .clone()
            .filter(|_| !self.bypassed.contains(port))
    }

    /// The service account of a meshed pod.
    pub fn service_account(&self) -> Option<&str> {
        let (_, account) = self.identity.as_ref()?.rsplit_once('/')?;
        Some(account)
    }

    /// Whether the pod declares a port opaque.
    pub fn is_opaque_at(&self, port: u16) -> bool {
        self.inbound.opaque_ports.contains(port)
    }
}

/// A Node.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The name, in the empty namespace.
    pub key: Key,
    /// The addresses.
    pub addresses: Vec<IpAddr>,
    /// Whether its kubelet reports that it is not ready, or nothing for a while.
    pub unready: bool,
    /// The zone, or empty.
    pub zone: Arc<str>,
}
