//! The kinds of objects in the catalog, with the fields that determine what proxies do. Plain
//! values without types of Kubernetes or gRPC. A folder or a file for each kind: what its objects
//! say, and how it is read.

pub mod authorization;
pub mod mesh;
pub mod node;
pub mod pod;
pub mod policy;
pub mod route;
pub mod service;
pub mod slice;
pub mod smi;

use authorization::AuthorizationPolicy;
use mesh::Mesh;
pub use node::Node;
pub use pod::Pod;
use policy::Policy;
use route::backend::Backend;
use route::model::{Grant, Route};
pub use service::Service;
pub use slice::Slice;
use smi::split::{RouteGroup, Split};
use smi::traffic_target::{TcpGroup, TrafficTarget};

use crate::object::{Key, Kind};

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
