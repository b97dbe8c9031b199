//! An endpoint as discovery announces it.

use std::net::SocketAddr;

use diy_mesh_model::identity::Identity;

/// One endpoint. Each announcement is a new `Arc`, even without changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointInfo {
    /// Address and port.
    pub address: SocketAddr,
    /// Topology zone; empty if unknown.
    pub zone: String,
    /// Pod as "namespace/name"; empty if the endpoint is not a pod.
    pub pod: String,
    /// Expected SPIFFE ID; `None` if the endpoint is not meshed.
    pub identity: Option<Identity>,
    /// Whether the pod declares the port opaque.
    pub opaque: bool,
    /// Whether the address is of no pod: egress has to allow it.
    pub outside: bool,
}
