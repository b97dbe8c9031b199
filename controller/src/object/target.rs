//! References to the parents of routes and to the targets of policies. Plain values.

use serde::{Deserialize, Serialize};

use super::{Key, Kind};

/// A parent of a route, or a target of a policy, with the fields that its author wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct TargetReference {
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

impl TargetReference {
    /// A reference to a Service of the route's namespace.
    pub fn service(name: &str) -> TargetReference {
        TargetReference {
            group: None,
            ..TargetReference::object(Kind::Service, name)
        }
    }

    /// A reference to an object of this kind, of the same namespace.
    pub fn object(kind: Kind, name: &str) -> TargetReference {
        TargetReference {
            group: Some(kind.row().group.to_owned()),
            kind: Some(kind.name().to_owned()),
            name: name.to_owned(),
            ..TargetReference::default()
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

    /// The name of a port.
    pub(crate) fn section(&self) -> Option<&str> {
        self.section_name.as_deref().filter(|name| !name.is_empty())
    }
}
