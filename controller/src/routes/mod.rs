//! Routes of the Gateway API: what the mesh reports about each of them to its author. Plain values.

pub mod lease;
pub mod report;
pub mod status;
#[cfg(test)]
mod testing;
pub mod writer;

use crate::index::object::{Key, Kind};

/// The status of a route: one entry for each of its parents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteStatus {
    /// HTTPRoute or GRPCRoute.
    pub kind: Kind,
    /// Its namespace and name.
    pub key: Key,
    /// The generation of the route that the conditions describe.
    pub generation: i64,
    /// In the order of `spec.parentRefs`, only those that are Services.
    pub parents: Vec<ParentStatus>,
}

/// The status of a route at one parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParentStatus {
    /// The reference as the route has it.
    pub parent: ParentReference,
    /// Accepted and ResolvedRefs, and what else applies.
    pub conditions: Vec<Condition>,
}

/// A parent of a route, with the fields that its author wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParentReference {
    /// The API group, "" for Service.
    pub group: Option<String>,
    /// "Service".
    pub kind: Option<String>,
    /// None: the namespace of the route.
    pub namespace: Option<String>,
    /// The name.
    pub name: String,
    /// Not used by Services.
    pub section_name: Option<String>,
    /// None: all ports.
    pub port: Option<u16>,
}

/// A condition of `status.parents`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// "Accepted", "ResolvedRefs", ...
    pub kind: &'static str,
    /// Whether it holds.
    pub holds: bool,
    /// A reason of the specification.
    pub reason: &'static str,
    /// What is wrong, where, and what to do.
    pub message: String,
}
