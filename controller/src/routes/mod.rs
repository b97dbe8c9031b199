//! Routes of the Gateway API: HTTPRoutes, GRPCRoutes, TCPRoutes and ReferenceGrants with Services as
//! parents, and with Services and hosts outside of the cluster as backends. Pure: `parse.rs` reads
//! objects, `attach.rs` merges the routes of a Service, and `crate::index::routes` applies both to the
//! catalog.
//!
//! This file is what the mesh reports about each route to its author. Plain values.

pub mod attach;
pub mod backend;
pub mod canary;
pub(crate) mod external;
pub(crate) mod filters;
pub mod lease;
pub(crate) mod matches;
pub mod mesh;
pub mod model;
pub mod parse;
pub mod programmed;
pub mod report;
pub mod smi;
#[allow(missing_docs)]
pub mod spec;
pub mod status;
pub mod statuses;
#[cfg(test)]
pub(crate) mod testing;
pub mod writer;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::authorization::keys::{Entry, Source};
use crate::index::object::{Key, Kind, ServicePort};

/// The reasons of conditions that do not hold, as the specification names them.
pub(crate) const UNSUPPORTED_VALUE: &str = "UnsupportedValue";
const UNSUPPORTED_PROTOCOL: &str = "UnsupportedProtocol";
const INCOMPATIBLE_FILTERS: &str = "IncompatibleFilters";
const NO_MATCHING_PARENT: &str = "NoMatchingParent";
const CONFLICTED: &str = "Conflicted";
/// True while a part of a route or of a policy is invalid, and the rest applies.
pub const PARTIALLY_INVALID: &str = "PartiallyInvalid";
/// The condition of the mesh about headless Services: False while older ones decide at some pods.
pub const APPLIES_TO_ALL_PODS: &str = "diy-service-mesh.dev/AppliesToAllPods";
/// True while an AuthorizationPolicy has an ALLOW rule without a caller, destination or request.
pub const ALLOWS_ALL: &str = "diy-service-mesh.dev/AllowsAll";
/// The API server has dropped fields of the policy, so that its author may not know.
pub const FIELDS_DROPPED: &str = "FieldsDropped";
pub(crate) const OLDER_SERVICE: &str = "OlderService";
/// For references to backends.
pub const INVALID_KIND: &str = "InvalidKind";
/// For references to backends.
pub const BACKEND_NOT_FOUND: &str = "BackendNotFound";
/// For references to backends.
pub const REF_NOT_PERMITTED: &str = "RefNotPermitted";

/// The status of a route: one entry for each of its parents.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RouteStatus {
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
    pub parents: Vec<ParentStatus>,
    /// The sources of the keys of an AuthorizationPolicy's issuers, and the fetched entries.
    pub issuers: Vec<(Source, Entry)>,
    /// The condition `Programmed` of another replica stays where this one has none.
    pub keeps_programmed: bool,
}

impl RouteStatus {
    /// The status of an object without a UID.
    pub fn new(kind: Kind, key: Key, generation: i64, parents: Vec<ParentStatus>) -> RouteStatus {
        RouteStatus {
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

/// The status of a route at one parent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ParentStatus {
    /// The reference as the route has it.
    pub parent: ParentReference,
    /// Accepted and ResolvedRefs, and what else applies.
    pub conditions: Vec<Condition>,
}

/// A parent of a route, with the fields that its author wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ParentReference {
    /// The API group, "" for Service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// "Service".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// The namespace. `None`: the namespace of the route.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The name.
    pub name: String,
    /// The name of the port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub section_name: Option<String>,
    /// The port. `None`: all ports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
}

impl ParentReference {
    /// A reference to a Service of the route's namespace.
    pub fn service(name: &str) -> ParentReference {
        ParentReference {
            group: None,
            ..ParentReference::object(Kind::Service, name)
        }
    }

    /// A reference to an object of this kind, of the same namespace.
    pub fn object(kind: Kind, name: &str) -> ParentReference {
        ParentReference {
            group: Some(kind.row().group.to_owned()),
            kind: Some(kind.name().to_owned()),
            name: name.to_owned(),
            ..ParentReference::default()
        }
    }

    /// Whether the parent is a Service.
    pub(crate) fn is_service(&self) -> bool {
        // The documentation of the Gateway API spells the core group in both ways.
        matches!(self.group.as_deref(), Some("" | "core"))
            && self.kind.as_deref() == Some("Service")
    }

    /// Namespace and name of the parent of a route.
    pub fn key(&self, route: &Key) -> Key {
        let namespace = self.namespace.as_deref().filter(|name| !name.is_empty());
        Key::new(namespace.unwrap_or(&route.namespace), &self.name)
    }

    /// Whether the reference is to a port of its Service.
    pub(crate) fn selects(&self, port: &ServicePort) -> bool {
        self.port.is_none_or(|number| number == port.port)
            && self.section().is_none_or(|name| name == port.name)
    }

    /// The name of a port.
    pub(crate) fn section(&self) -> Option<&str> {
        self.section_name.as_deref().filter(|name| !name.is_empty())
    }
}

/// A condition of `status.parents`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Condition {
    /// "Accepted", "ResolvedRefs", ...
    pub kind: &'static str,
    /// Whether it holds.
    pub holds: bool,
    /// A reason of the specification, or of a condition of the mesh.
    pub reason: &'static str,
    /// The error, its place, and the remedy.
    pub message: String,
    /// The generation of the route that it is about, if it may be an earlier one.
    pub generation: Option<i64>,
}

impl Condition {
    /// A condition.
    pub fn new(kind: &'static str, holds: bool, reason: &'static str, message: String) -> Self {
        Condition {
            kind,
            holds,
            reason,
            message,
            generation: None,
        }
    }

    /// The value in a status.
    pub fn status(&self) -> &'static str {
        if self.holds { "True" } else { "False" }
    }

    /// Whether its author has to do something.
    pub fn is_problem(&self) -> bool {
        self.holds == (self.kind == PARTIALLY_INVALID) || self.reason == FIELDS_DROPPED
    }
}

#[cfg(test)]
pub(crate) mod tests;
