//! The status of an object: what the mesh reports about it to its author. Plain values.

use std::sync::Arc;

use super::issuer_keys::{Entry, Source};
use super::{Condition, Key, Kind, TargetReference};

/// The `controllerName` of the mesh.
pub const CONTROLLER_NAME: &str = "diy-service-mesh.dev/controller";

/// The status of an object: one entry for each of its parents or targets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ObjectStatus {
    /// A kind of routes, XBackend, TrafficPolicy or XMesh. For canary annotations and too many
    /// ports: Service.
    pub kind: Kind,
    /// Its namespace and name.
    pub key: Key,
    /// The UID, for Events about objects that have no status.
    pub uid: Arc<str>,
    /// The generation of the route that the conditions describe.
    pub generation: i64,
    /// The parents in the order of `spec.parentRefs`, only Services. For an XMesh: itself. For a
    /// host outside of the cluster: the Services of its routes.
    pub parents: Vec<TargetStatus>,
    /// The sources of the keys of an AuthorizationPolicy's issuers, and the fetched entries.
    pub issuers: Vec<(Source, Entry)>,
    /// The condition `Programmed` of another replica stays where this one has none.
    pub keeps_programmed: bool,
}

impl ObjectStatus {
    /// The status of an object without a UID.
    pub fn new(kind: Kind, key: Key, generation: i64, parents: Vec<TargetStatus>) -> ObjectStatus {
        ObjectStatus {
            kind,
            key,
            uid: "".into(),
            generation,
            parents,
            issuers: vec![],
            keeps_programmed: false,
        }
    }
}

/// The status of an object at one parent or target.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TargetStatus {
    /// The reference as the object has it.
    pub parent: TargetReference,
    /// Accepted and ResolvedRefs, and what else applies.
    pub conditions: Vec<Condition>,
}

/// The status of an object may be another one with objects that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Withheld;
