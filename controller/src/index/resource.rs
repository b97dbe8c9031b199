//! The resources that proxies subscribe to. Plain values.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::object::Key;

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
