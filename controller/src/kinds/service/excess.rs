//! TCP ports of Services over the limit. States and tables are per port, so their size is the
//! product of the number of ports and the number of routes, endpoints or clients. Pure.
//!
//! A Service keeps its first ports, and only the numbers of the others: clients that use them get
//! an error, and never a connection in plaintext. Its author gets a condition.

use std::collections::BTreeSet;

use super::{ServicePort, Transport};

/// Ports of a Service. Kubernetes permits more.
pub const MAX_PORTS: usize = 1000;

/// The TCP ports of a Service over the limit, ascending.
#[derive(Clone, Debug, PartialEq)]
pub struct Excess {
    /// Never empty.
    pub(crate) ports: Box<[u16]>,
    /// On each node.
    pub(crate) node_ports: Box<[u16]>,
}

/// Separates the ports over the limit. A Service with too many ports keeps only TCP ports: others
/// are not redirected.
pub fn split(mut ports: Vec<ServicePort>) -> (Vec<ServicePort>, Option<Box<Excess>>) {
    if ports.len() > MAX_PORTS {
        ports.retain(|port| port.protocol == Transport::Tcp);
    }
    let rest = ports.split_off(ports.len().min(MAX_PORTS));
    let sorted = |ports: BTreeSet<u16>| ports.into_iter().collect();
    let excess = || Excess {
        ports: sorted(rest.iter().map(|port| port.port).collect()),
        node_ports: sorted(rest.iter().filter_map(|port| port.node_port).collect()),
    };
    let excess = (!rest.is_empty()).then(|| Box::new(excess()));
    (ports, excess)
}
