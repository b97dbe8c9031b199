//! Pods, and the inbound configuration of their proxies. Plain values.

pub mod workload;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use diy_mesh_model::ports::PortSet;

use super::service::Transport;
use crate::object::Key;

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
