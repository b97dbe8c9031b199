//! Services. Plain values.

pub mod excess;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use excess::Excess;

use super::Pod;
use crate::object::{Checked, Key, TargetReference};

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
