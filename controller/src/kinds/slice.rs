//! EndpointSlices. Plain values.

use std::net::IpAddr;
use std::sync::Arc;

use super::service::Transport;
use crate::object::Key;

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
