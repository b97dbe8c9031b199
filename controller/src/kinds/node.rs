//! Nodes. Plain values.

use std::net::IpAddr;
use std::sync::Arc;

use crate::object::Key;

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
