//! The locations of clients, and the part of them that states depend on: node and zone for endpoints
//! (`internalTrafficPolicy`, topology hints), the namespace for routes. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

/// The namespace, the node and the zone of a client. Empty if unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Location {
    /// The namespace of the pod, which routes depend on.
    pub namespace: Arc<str>,
    /// The name of the node.
    pub node: Arc<str>,
    /// The zone of the node.
    pub zone: Arc<str>,
}

/// The part of a client's location that a state depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// The part of the cluster.
    pub area: Area,
    /// The namespaces whose clients have states of their own: those with consumer routes.
    pub namespaces: Option<Arc<BTreeSet<Arc<str>>>>,
}

/// The part of the cluster that a state is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Area {
    /// All of it.
    #[default]
    Cluster,
    /// The zone.
    Zone,
    /// The node.
    Node,
}

impl Location {
    /// The part of the location that a scope covers. Clients with equal parts share a state.
    pub fn within(&self, scope: &Scope) -> Location {
        let namespaces = scope.namespaces.iter();
        let mut own = namespaces.filter_map(|namespaces| namespaces.get(&self.namespace));
        let namespace = own.next().cloned().unwrap_or_default();
        let (node, zone) = match scope.area {
            Area::Cluster => Default::default(),
            Area::Zone => ("".into(), self.zone.clone()),
            Area::Node => (self.node.clone(), self.zone.clone()),
        };
        Location {
            namespace,
            node,
            zone,
        }
    }
}
